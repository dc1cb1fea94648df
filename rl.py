"""Reinforcement learning: the model answers prompts, a reward says how well, and good answers become likelier.

python rl.py config/debug_rl.py                                                        # CPU, seconds, needs nothing
python rl.py config/grpo.py --init_from=out/sft --data=questions.jsonl --reward=rules.py:exact      # GRPO
torchrun --standalone --nproc_per_node=4 rl.py config/ppo.py --init_from=out/sft --data=chats.jsonl --reward=out/reward

Each step draws group_size answers to each of prompts_per_step prompts and makes epochs_per_step * minibatches updates
from them. GRPO compares an answer with the other answers to its prompt; PPO compares each token with the value that a
second model, the critic, predicted.
"""

if __name__ == "__main__":  # before the imports, which take seconds: Ctrl-C is one line from here on
    from groundup.errors import end_in_one_line

    end_in_one_line()

import copy
import math
import os
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from configurator import configure
from groundup.align import policy_gradient as pg
from groundup.align import rollouts
from groundup.align.critic import critic_state, estimate_advantages, make_critic, values_of
from groundup.align.reward_model import find_model
from groundup.align.rewards import Rewards
from groundup.demo import debug_data
from groundup.errors import UserError
from groundup.tokens.corpus import steps_of
from groundup.tokens.prompts import PromptCorpus
from groundup.train import checkpoint, ranks, run
from groundup.train.base import adapters_of, frozen_base, frozen_dtype, load_start, new_model, open_base
from groundup.train.compiled import compile_blocks
from groundup.train.device import peak_flops, seed_everything
from groundup.train.log import RunLog
from groundup.train.lora import adapters_off, set_trainable
from groundup.train.optim import learning_rate_at
from groundup.train.plan import flops_per_token
from groundup.train.settings import *  # noqa: F403
from groundup.train.signals import StopSignal
from model import Transformer

# ---- config: override with a config file or --key=value; see --help -------------------------------------------------
out_dir = "out/rl"  # run directory: config.py, log.jsonl, step_*/
init_from = "out/sft"  # run, checkpoint or Hugging Face directory; "" = a tiny new model, to try it
data = "data/chat"  # prompts: files, a directory of prepare.py --kind=chat; mixed 'a.jsonl=0.7,data/b=0.3'
val_data = ""  # the same, for validation; "" = the directory's own, or val_fraction of the prompts
chat_template_kwargs = ""  # settings of the checkpoint's own chat template: 'enable_thinking=False'
val_fraction = 0.02  # of the prompts, by their content; for data that have no validation of their own
# reward
reward = "out/reward"  # run of reward.py, 'rules.py:function', or a sum 'out/reward=1.0,rules.py:length=0.1'
normalise_rewards = False  # subtract the mean, divide by the standard deviation of all finished answers so far
unfinished = "penalty"  # answers cut off by max_new_tokens: penalty = unfinished_reward | mask = do not train on them
unfinished_reward = -1.0  # normalise_rewards does not change it: keep it at -1 or below then
# answers
group_size = 8  # answers to a prompt
prompts_per_step = 32  # over all ranks
max_new_tokens = 256  # most tokens of an answer
temperature = 1.0  # of the distribution that answers are drawn from, and that is trained
filter_groups = 0  # grpo: replace groups with equal rewards by groups of other prompts, at most this many times
draw_batch_size = 0  # answers drawn at a time on each rank; 0 = all of a step. 32 is faster on CPUs
# algorithm
algorithm = "grpo"  # grpo (arXiv:2402.03300) | ppo (arXiv:1707.06347)
loss = "dapo"  # mean over: dapo = tokens of the step | grpo = answers' means | dr_grpo (see normalise)
scale_rewards = "none"  # grpo: divide advantages by the standard deviation of: none | group
clip_low = 0.2  # clip the ratio of new to old probability below at 1 - clip_low
clip_high = 0.2  # and above at 1 + clip_high
epochs_per_step = 1  # passes over the answers of a step; 2 to 4 is usual for ppo
minibatches = 1  # updates per epoch
kl_coef = 0.04  # weight of the KL divergence from the reference; 0 if the reward cannot be hacked
reference = "model"  # model (a second one, in memory) | adapter_off (trainable='lora'); unused where kl_coef=0
# critic, of ppo
critic_from = ""  # reward model to start from (its head too, unless normalise_rewards); "" = init_from, head of zeros
value_learning_rate = 1e-5  # peak; the rest of the schedule is learning_rate's
value_clip = 0.2  # clip the change of a value in one step to this range; 0 = off
gamma = 1.0  # discount per token
lam = 0.95  # of generalised advantage estimation: 1 = whole returns, 0 = one token ahead
# data
block_size = 1024  # most tokens of a prompt and an answer; a prompt without room for an answer is left out
epochs = 1.0  # passes over the prompts of all sources
max_steps = 0  # 0 = as many as epochs takes
# batch
batch_size = 8  # answers per rank and micro-step
# optimizer
learning_rate = 1e-6  # peak; adapters take ten times as much
warmup_fraction = 0.1
# evaluation, log, checkpoints
eval_every = 20  # steps; also before the first and after the last step
eval_prompts = 64  # held-out prompts, one answer to each; 0 = all
eval_answers = 2  # of these answers, how many are shown
log_every = 1  # steps
save_every = 100  # steps; also after the last step

# These decide which prompts a step sees; a resumed run must not change them.
DATA_KEYS = ("algorithm", "seed", "block_size", "max_new_tokens", "prompts_per_step", "val_fraction")
DEBUG_DATA = "data/debug/rl.jsonl"  # made by the script, to try it without anything prepared


def check_config(config: dict, world_size: int) -> int:
    """Return the number of updates per step. Raise UserError; nothing exists yet when it does."""
    ppo = config["algorithm"] == "ppo"
    least = dict.fromkeys(("prompts_per_step", "max_new_tokens", "epochs_per_step", "minibatches"), 1)
    least |= dict.fromkeys(("filter_groups", "draw_batch_size", "kl_coef", "clip_high", "value_clip"), 0)
    least |= dict.fromkeys(("value_learning_rate", "eval_prompts", "eval_answers"), 0)
    choices = {"algorithm": ("grpo", "ppo"), "loss": pg.NORMALISERS, "scale_rewards": pg.SCALES}
    choices |= {"reference": ("model", "adapter_off"), "unfinished": ("penalty", "mask"), "parallel": ("ddp",)}
    run.check_config(config, least | {"group_size": 1 if ppo else 2}, ("clip_low", "gamma", "lam"), choices)
    for key in ("kl_coef", "unfinished_reward"):
        run.refuse(not math.isfinite(config[key]), f"{key} must be a finite number, got {config[key]}")
    cold = not 0 < config["temperature"] < math.inf
    run.refuse(cold, f"temperature must be above 0, got {config['temperature']}")
    no_adapters = config["trainable"].strip() != "lora" and config["reference"] == "adapter_off"
    run.refuse(no_adapters, f"reference='adapter_off' needs trainable='lora', got {config['trainable']!r}")
    only_grpo = "filter_groups is for algorithm='grpo', which learns nothing from equal rewards"
    run.refuse(ppo and config["filter_groups"], only_grpo)
    run.refuse(not ppo and config["critic_from"], "critic_from is for algorithm='ppo'; grpo has no critic")
    longest, n_prompts, n_minibatches = config["max_new_tokens"], config["prompts_per_step"], config["minibatches"]
    no_room = f"max_new_tokens={longest} leaves no room for a prompt in block_size={config['block_size']}"
    run.refuse(longest >= config["block_size"], no_room)
    run.refuse(n_prompts % world_size, f"prompts_per_step={n_prompts} must be a multiple of the {world_size} ranks")
    n_answers = n_prompts * config["group_size"] // world_size
    divides = f"minibatches={n_minibatches} must divide the {n_answers} answers of a rank"
    run.refuse(n_answers % n_minibatches, f"{divides} (prompts_per_step * group_size / ranks)")
    return config["epochs_per_step"] * n_minibatches


if __name__ == "__main__":
    config = configure(globals())
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    n_updates = check_config(config, world_size)
    torch_device, torch_dtype = run.choose_device_and_dtype(config)
    peak = peak_tflops * 1e12 or peak_flops(torch_device, torch_dtype)

    # ---- weights, tokenizer, prompts, rewards: mistakes show here, before a process group or out_dir exists
    if data == DEBUG_DATA:
        debug_data.make_debug_rows(Path(data), lambda talks: [{"messages": talk[:2]} for talk in talks])
    source, tokenizer, n_known, cfg = open_base(config, DEBUG_DATA)
    flops = flops_per_token(cfg, block_size, trainable=trainable)
    rewards = Rewards(reward, tokenizer, torch_device, torch_dtype, batch_size)
    critic_source = find_model(critic_from, tokenizer, "critic_from") if critic_from else source
    longest = min(block_size, rewards.block_size or block_size) - max_new_tokens
    lengths = f"reward={reward!r} reads {rewards.block_size} tokens, max_new_tokens={max_new_tokens}"
    run.refuse(longest < 1, f"{lengths} leaves no room for a prompt")  # check_config has looked at block_size
    corpus = PromptCorpus(data, tokenizer, longest, seed, val_data, val_fraction)
    corpus.need_validation(val_fraction)
    given = dict(config)  # out_dir/config.py keeps max_steps=0
    max_steps = steps_of(config, corpus.n_train, prompts_per_step, "prompts_per_step", "prompts")
    config["max_steps"] = max_steps
    order = {key: config[key] for key in DATA_KEYS} | corpus.record() | {"reward": rewards.record()}
    second_model = kl_coef > 0 and reference == "model"
    if source and reference == "model":  # a resumed run must measure its KL to the same weights
        order["reference_weights"] = checkpoint.weights_key(source)
    if rank == 0:
        text = rollouts.plan(cfg, config, world_size, torch_device, torch_dtype, peak, rewards)
        print("\n".join([*corpus.report(), text]), flush=True)
    if plan_only:
        sys.exit(0)
    resumed = run.find_checkpoint(config, cfg, order)

    # ---- processes, policy, reference, optimizer, critic, state
    stop_signal = StopSignal()
    world = run.join(config, order, resumed.step, torch_device, torch_dtype)
    seed_everything(seed)
    raw_model = new_model(Transformer, cfg, config, torch_dtype)
    if source and (second_model or not resumed.path):
        load_start(raw_model, source, n_known, tokenizer)
    first_model = raw_model
    if second_model:
        held = frozen_dtype(config, torch_dtype)  # the copy's, of matrices
        shared = {id(p): nn.Parameter(p.detach().to(held, copy=True)) for p in raw_model.parameters() if p.ndim == 2}
        first_model = copy.deepcopy(raw_model, shared).requires_grad_(False).to(torch_device)
        if compile:
            compile_blocks(first_model, lengths_vary=True)
    set_trainable(raw_model, trainable, adapters_of(config))
    base = frozen_base(resumed.path, source)
    parts = run.set_up(config, raw_model, world, torch_device, torch_dtype, n_updates)
    model, opt, scaler, ddp = raw_model, parts.opt, parts.scaler, parts.ddp  # compiled in place: the same object
    critic = None
    if algorithm == "ppo":
        saved = resumed.state.get("critic", {})
        critic = make_critic(config, critic_source, tokenizer, saved, world, torch_device, torch_dtype)
        critic_values = partial(values_of, critic.model, device=torch_device, dtype=torch_dtype)
    value_skipped = torch.tensor(resumed.state.get("value_skipped", [0.0, 0.0]), device=torch_device)  # the critic's
    reward_sums = torch.tensor(resumed.state.get("seen_scores", [0.0, 0.0, 0.0]), dtype=torch.float64)  # pg.power_sums
    skipped = run.start(parts, resumed, given, __file__)
    ddp.n_steps = resumed.step * n_updates
    n_answers = prompts_per_step * group_size  # of a step, over all ranks
    own = slice(world.rank * n_answers // world_size, (world.rank + 1) * n_answers // world_size)  # this rank's
    slots = range(own.start // group_size, own.stop // group_size)  # their prompts
    draw = rollouts.drawing(model, tokenizer, config, world_size, torch_dtype)
    log = RunLog(out_dir, max_steps, resumed.step, world.is_main, tensorboard)
    save = partial(run.save, parts, tokenizer=tokenizer, config=config, order=order, base=base, log=log)
    logps_of = partial(rollouts.answer_logps, temperature=temperature, device=torch_device, dtype=torch_dtype)

    def reference_logps(batch: rollouts.RolloutBatch) -> Tensor:
        with adapters_off(first_model):
            return logps_of(first_model, batch)[0]

    def evaluate_now(step: int) -> None:
        """Log the mean reward of one answer to each held-out prompt; minus this mean ranks this step's checkpoint."""
        figures, shown = rollouts.evaluate(draw, rewards, corpus, world, config)
        rollouts.report_evaluation(log, step, {"val_loss": -figures["reward"]} | figures, shown)
        run.rank(parts, step, -figures["reward"], config, log)

    # ---- the loop
    if ranks.any_rank(log.lacks_evaluation(eval_every)):
        evaluate_now(resumed.step)
    stop_signal.begin()
    warmup, stopping = run.warmup_of(config), False
    mark_time, mark_step = time.perf_counter(), resumed.step
    since_log: list[dict] = []  # figures of each step since the last log line
    for update in range(resumed.step * n_updates, max_steps * n_updates):
        step, turn, last = update // n_updates + 1, update % n_updates, update // n_updates + 1 == max_steps
        lr, value_lr = (
            learning_rate_at(step, schedule, top, min_lr, warmup, decay_steps or max_steps, decay_fraction)
            for top in (learning_rate, value_learning_rate)
        )
        if turn == 0:  # answers, and all that stays the same for the updates that are made from them
            ddp.flush()  # updates that wait for the next forward
            drawn, table, lengths, figures = rollouts.draw_step(draw, rewards, corpus, step, slots, config)
            if normalise_rewards:
                reward_sums = reward_sums + pg.power_sums(table[0][~table[0].isnan()])
                table = pg.whiten(table, *pg.moments(reward_sums))
            learned_rewards, counts = rollouts.learned_rewards(table[0], config)
            if group_size > 1:  # a group of one is compared with nothing
                figures["flat_groups"] = pg.flat_groups(learned_rewards, group_size, counts).float().mean().item()
            answers = rollouts.Rollouts(drawn, counts[own].tolist(), block_size, tokenizer.pad_id)
            each = partial(answers.of_each, batch_size=batch_size, device=torch_device)
            ref = each(reference_logps) if kl_coef else None
            old = each(lambda batch: logps_of(model, batch)[0]) if n_updates > 1 or critic else None
            if critic:
                values = each(critic_values)
                kls = torch.zeros_like(old) if ref is None else old - ref
                of_rank = learned_rewards[own], kls, values, answers
                advantages, returns, figures["explained"] = estimate_advantages(*of_rank, kl_coef, gamma, lam)
                values, returns = values.to(torch_device), returns.to(torch_device)
            else:
                advantages = pg.group_advantages(learned_rewards, group_size, scale_rewards, counts)[own][answers.row]
            advantages, old, ref = (x if x is None else x.to(torch_device) for x in (advantages, old, ref))
            sums = torch.zeros(len(rollouts.TOKEN_SUMS), device=torch_device)
            ratio_max = torch.ones((), device=torch_device)
        epoch, minibatch = divmod(turn, minibatches)
        in_update = rollouts.minibatch_of(n_answers, minibatches, seed, step, epoch) == minibatch
        n_tokens = int(lengths[torch.from_numpy(in_update) & counts].sum())  # over all ranks
        batches = list(answers.batches(batch_size, np.flatnonzero(in_update[own])))
        ddp.expect_step(opt, lr)
        for k, batch in enumerate(batches):
            ddp.sync = k == len(batches) - 1  # talk once per update, during the last backward
            batch = batch.to(torch_device)
            logps, entropies = logps_of(model, batch, with_entropy=epoch == 0)
            before = logps.detach() if old is None else old[batch.place]
            losses, ratios, clipped = pg.policy_losses(logps, before, advantages[batch.place], clip_low, clip_high)
            kls = torch.zeros_like(before) if ref is None else before - ref[batch.place]  # for the log
            if kl_coef and not critic:
                losses = losses + kl_coef * pg.kl_penalty(logps, before, ref[batch.place])
            loss_of_micro = pg.normalise(losses, batch.row, loss, n_answers // minibatches, n_tokens, max_new_tokens)
            scaler.scale(loss_of_micro * world_size).backward()  # ddp averages over ranks
            value_loss = losses.new_zeros(())
            if critic:
                critic.ddp.sync = ddp.sync
                new_values = critic_values(batch)
                errors = pg.value_losses(new_values, values[batch.place], returns[batch.place], value_clip)
                value_loss = errors.sum() / max(1, n_tokens)
                critic.scaler.scale(value_loss * world_size).backward()
            n_learned, n_positions = losses.new_tensor([float(len(losses)), float(batch.x.numel())])
            added = n_learned, loss_of_micro, value_loss, entropies.sum(), kls.sum(), clipped.sum(), n_positions
            sums += torch.stack([value.detach().float() for value in added])
            ratio_max = torch.cat((ratios, ratio_max.view(1))).max()
        # >>> optimizer step: identical in pretrain, sft, dpo, reward, rl (tests/test_repo.py)
        grad_norm = ddp.step(opt, lr=lr, clip=grad_clip, scaler=scaler)
        skipped = torch.stack((skipped[0] + ddp.found_inf, (skipped[1] + 1) * ddp.found_inf))
        # <<< optimizer step
        if critic:
            value_norm = critic.ddp.step(critic.opt, lr=value_lr, clip=grad_clip, scaler=critic.scaler)
            found_inf = critic.ddp.found_inf
            value_skipped = torch.stack((value_skipped[0] + found_inf, (value_skipped[1] + 1) * found_inf))
        if turn < n_updates - 1:
            continue
        log.advance()

        figures |= rollouts.describe_updates(sums, ratio_max, n_updates, epochs_per_step, int(counts.sum()))
        if not kl_coef:  # there is no reference, so nothing is known of the KL divergence from it
            del figures["kl"], figures["kl_answer"]
        since_log.append(figures)
        stopping = ranks.any_rank(stop_signal.received > 0)
        if step % log_every == 0 or last or stopping:
            seconds, n_steps = time.perf_counter() - mark_time, step - mark_step
            means = rollouts.mean_figures(since_log, seconds)
            tokens_per_s = n_steps * means.pop("positions") / seconds
            # mfu: work of the policy's updates over all the time. Drawing, the critic, and forward passes without
            # gradient (old, reference, rewards) take time and count no work, so it is lower than in other stages.
            means |= run.figures(parts, lr, grad_norm, skipped, tokens_per_s, flops, peak)
            means["epoch"] = float(corpus.redrawn_order(prompts_per_step).epochs(step * prompts_per_step).max())
            means |= {"value_norm": value_norm.item(), "value_skipped": int(value_skipped[0])} if critic else {}
            log.train(step, means, seconds / n_steps)
            if n_cut := sum(one["finished"] == 0 for one in since_log):
                what = f"in {n_cut} of these {n_steps} steps every answer was cut off at {max_new_tokens=}"
                log.print(f"train: {what}; no reward was learnt. Raise it, or teach the model to end answers (sft.py)")
            for key, (_, in_a_row) in {"learning_rate": skipped, "value_learning_rate": value_skipped}.items():
                if in_a_row >= max_skipped:
                    run.report_save(parts, log)
                    problem = f"train: step {step}: {int(in_a_row)} updates in a row without a finite gradient"
                    raise UserError(f"{problem}; lower {key} or continue from an earlier checkpoint")
            mark_time, mark_step, since_log = time.perf_counter(), step, []
        pause = time.perf_counter()
        saving, evaluating = step % save_every == 0 or last or stopping, step % eval_every == 0 or last
        if saving or evaluating:
            ddp.flush()  # updates that wait for the next forward
        if saving:
            other = {"seen_scores": reward_sums.tolist()}
            if critic:
                other |= {"critic": critic_state(critic, step * n_updates, zero1, critic_source)}
                other |= {"value_skipped": value_skipped.tolist()}
            save(step, skipped, other=other)
        if evaluating:  # after the save: it may run out of memory
            evaluate_now(step)
        mark_time += time.perf_counter() - pause  # evaluations and saves are not training
        if stopping:
            break

    run.finish(parts, log, config, __file__, corpus.report(), stop_signal if stopping else None)
