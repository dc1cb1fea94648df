"""Reinforcement learning: the model answers prompts, a reward says how good the answers are, and
training makes the good ones more likely.

python rl.py config/debug_rl.py                                            # CPU, seconds, own data
python rl.py config/grpo.py --init_from=out/sft --data=questions.jsonl --reward=rules.py:exact
torchrun --standalone --nproc_per_node=4 rl.py config/ppo.py --init_from=out/sft --data=chats.jsonl

A step draws group_size answers to each of prompts_per_step prompts, scores them, and makes
epochs_per_step * minibatches updates from them. GRPO compares an answer with the other answers to
its prompt. PPO compares each token with the value that a second model, the critic, predicted.
"""

if __name__ == "__main__":  # before the slow imports: from here on Ctrl-C prints one line
    from groundup.errors import end_in_one_line

    end_in_one_line()

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from configurator import configure
from ddp import DDP
from groundup.align import critic as critics
from groundup.align import policy_gradient as pg
from groundup.align import reward_model, rollouts
from groundup.align.reward_model import RewardModel
from groundup.align.rewards import Rewards, Rollout
from groundup.align.rollouts import AnswerSampler
from groundup.errors import UserError, counted, refuse
from groundup.generate.tools import Tools, check_template
from groundup.tokens.prompts import PromptCorpus
from groundup.tokens.rows import steps_of
from groundup.tokens.token_files import file_sha256
from groundup.train import checkpoint, huggingface, plan, ranks
from groundup.train.checkpoint import Saver
from groundup.train.device import check_compiler, choose_device, choose_dtype, peak_flops
from groundup.train.log import MAX_SKIPPED, RunLog
from groundup.train.lora import LoRAConfig, adapters_off, frozen_dtype, set_trainable
from groundup.train.optim import Optimizer, check_schedule, learning_rate_at
from groundup.train.start import open_start, weights_to_load
from model import Transformer

# ---- settings: override with a config file or --key=value; see --help ----------------------------
# The comments are checked: a value must be one of `a | b`, `at least n`, or `from a to b`.
out_dir = "out/rl"  # run directory: config.py, log.jsonl, step_*/
init_from = "out/sft"  # a run, a checkpoint or a Hugging Face directory
data = "data/chat"  # prompts: a file, or a directory of prepare.py; 'a.jsonl=0.7,data/b=0.3'
val_data = ""  # the same for validation; "" = the directory's own, or val_fraction of the rows
chat_template_kwargs = ""  # settings of the checkpoint's own chat template: 'enable_thinking=False'
val_fraction = 0.02  # of rows without validation data of their own (from 0 to 1)
resume = "auto"  # auto = continue if out_dir has a checkpoint | must | never
resume_from = 0  # step of out_dir to continue from; 0 = its newest checkpoint (at least 0)
overwrite = False  # delete: with resume='never' the old run, with resume_from the steps after it
seed = 1337  # of new weights, data order, dropout and samples
# which parameters are trained
trainable = "all"  # all, or some of embed, lm_head, lora, regular expressions of names
lora_rank = 16  # rank of the LoRA matrices (at least 1)
lora_alpha = 32.0  # an adapter's output is multiplied by lora_alpha / lora_rank
# reward
reward = "out/reward"  # of reward.py; or 'rules.py:function'; 'out/reward=1,rules.py:length=0.1'
teacher = ""  # learn from this model too: a run, a checkpoint or a Hugging Face directory
normalise_rewards = False  # by mean and standard deviation of all finished answers so far
unfinished = "penalty"  # penalty = unfinished_reward | mask = not trained on (answers cut off)
unfinished_reward = -1.0  # not normalised: with normalise_rewards at most -1 (from -1e9 to 1e9)
# answers
group_size = 8  # answers to a prompt (at least 1)
prompts_per_step = 32  # over all ranks (at least 1)
max_new_tokens = 256  # most tokens of an answer, with what its tools say (at least 1)
tools = ""  # Python file of functions that answers may call; see docs/tools.md
temperature = 1.0  # of the distribution that is sampled and trained (from 0.01 to 100)
filter_groups = 0  # grpo: replace groups with equal rewards at most this many times (at least 0)
draw_batch_size = 0  # answers drawn at a time per rank; 0 = all, 32 suits CPUs (at least 0)
# algorithm
algorithm = "grpo"  # grpo (arXiv:2402.03300) | ppo (arXiv:1707.06347)
loss = "dapo"  # dapo (mean over tokens) | grpo (over answers' means) | dr_grpo (by length)
scale_rewards = "none"  # none | group (grpo: divide advantages by the group's standard deviation)
epochs_per_step = 1  # passes over the answers of a step; 2 to 4 is usual for ppo (at least 1)
minibatches = 1  # updates per epoch (at least 1)
kl_coef = 0.04  # weight of the KL divergence from start or teacher; 0 = off (from 0 to 100)
# critic, of ppo
critic_from = ""  # reward model to start from; "" = init_from, with a head of zeros
value_learning_rate = 1e-5  # peak, of the critic; the schedule is learning_rate's (at least 0)
# data
block_size = 1024  # tokens of a prompt and its answer; longer prompts are left out (at least 1)
epochs = 1.0  # passes over the rows of all sources, if max_steps is 0 (from 0 to 1000)
max_steps = 0  # 0 = as many as epochs takes (at least 0)
batch_size = 8  # answers per rank and micro-step (at least 1)
# optimizer
optimizer = "adamw"  # adamw | muon (for the blocks' matrices; AdamW for the rest)
learning_rate = 1e-6  # peak; LoRA needs about ten times as much: 1e-5 (at least 0)
schedule = "cosine"  # constant | cosine | linear | wsd (see groundup/train/optim.py)
warmup_steps = 0.1  # steps of rising learning rate; below 1: a share of max_steps (at least 0)
grad_clip = 1.0  # global norm; 0.0 = off (at least 0)
# system
device = "auto"  # auto, cpu, cuda or mps; auto takes cuda, then cpu
dtype = "auto"  # auto | float32 | bfloat16 | float16 (with a GradScaler)
compile = True  # torch.compile, block by block
activation_checkpointing = False  # recompute blocks in backward: less memory, a third more work
zero1 = False  # each rank keeps and updates its share of the optimizer state (ZeRO-1)
timeout_s = 300.0  # stop if ranks wait for each other longer than this (at least 1)
plan_only = False  # print the plan and stop; WORLD_SIZE=8 before the command plans for 8 devices
# evaluation, log, checkpoints
eval_every = 20  # steps; also before the first and after the last step (at least 1)
eval_prompts = 64  # held-out prompts, one answer to each; 0 = all (at least 0)
log_every = 1  # steps (at least 1)
track = "none"  # none | tensorboard | trackio | wandb (offline; also what log.jsonl has)
save_every = 100  # steps; also after the last step (at least 1)
keep_last = 2  # newest checkpoints to keep besides the two best; 0 = all (at least 0)

CLIP_LOW = 0.2  # the ratio of new to old probability is clipped below at 1 - CLIP_LOW
CLIP_HIGH = 0.2  # and above at 1 + CLIP_HIGH
LAMBDA = 0.95  # ppo: of advantage estimation; 1 = whole returns, 0 = one token ahead
GAMMA = 1.0  # ppo: no discount, an answer is short and has one reward at its end
VALUE_CLIP = 0.2  # ppo: clip the change of a value within a step to this
N_SHOWN = 2  # answers that an evaluation shows


def check_settings(world_size: int) -> None:
    """Raise UserError for settings that do not go together."""
    if algorithm == "grpo":
        text = "must be at least 2 for algorithm='grpo', which compares answers"
        refuse(group_size < 2, f"group_size {text}, got {group_size}")
        refuse(critic_from, "critic_from is for algorithm='ppo'; grpo has no critic")
    else:
        text = "filter_groups is for algorithm='grpo', which learns nothing from equal rewards"
        refuse(filter_groups, text)
    refuse(teacher and not kl_coef, "kl_coef is the weight of the teacher: it must be above 0")
    refuse(not reward and not teacher, "reward='' is for a run with a teacher")
    text = "reward='' scores no answer: give unfinished_reward=0 or unfinished='mask'"
    refuse(not reward and unfinished == "penalty" and unfinished_reward, text)
    text = f"{max_new_tokens=} leaves no room for a prompt in {block_size=}"
    refuse(max_new_tokens >= block_size, text)
    text = f"{prompts_per_step=} must be a multiple of the {world_size} ranks"
    refuse(prompts_per_step % world_size, text)
    n_answers = prompts_per_step * group_size // world_size
    text = f"{minibatches=} must divide the {counted(n_answers, 'answer')} of a rank"
    refuse(n_answers % minibatches, f"{text} (prompts_per_step * group_size / ranks)")


def draw(
    sampler: AnswerSampler, corpus: PromptCorpus, step: int, numbers: list[int], attempt: int = 0
) -> list[Rollout]:
    """Return group_size answers to each of the prompts with these numbers in the step.

    None at all if a signal to stop comes.

    attempt: 0, or which replacement: each has other prompts."""
    order = corpus.redrawn_order(prompts_per_step, attempt)
    prompts = corpus.take(order, (step - 1) * prompts_per_step + np.array(numbers))
    seeds = [rollouts.seed_of(seed, step, attempt, number) for number in numbers]
    return sampler.draw(prompts, seeds, group_size)


def evaluate(
    sampler: AnswerSampler,
    rewards: Rewards,
    corpus: PromptCorpus,
    config: dict,
    guide: Transformer | None,
) -> tuple[dict[str, float], list[str]]:
    """Return figures of one answer to each held-out prompt, and lines that show some answers.

    guide: the teacher; kl_teacher is the divergence from it, in nats per token of the answers.
    The seeds are the same each time. The ranks share the prompts; all call it. Both are empty if a
    signal to stop came meanwhile."""
    prompts = corpus.held_out[: eval_prompts or None]
    mine = ranks.own_part(len(prompts))
    seeds = [rollouts.seed_of(seed, 0, 0, number) for number in mine]  # no step has number 0
    drawn = sampler.draw([prompts[number] for number in mine], seeds, n=1)
    own_table = rewards.table(drawn)
    if ranks.any_rank(stop_signal()):
        return {}, []
    table, lengths = rollouts.gather(own_table, drawn)
    figures = rollouts.describe_answers(table, lengths, rewards.names, config)
    if tools:
        figures |= rollouts.describe_calls(drawn)
    lines = rollouts.show(drawn[:N_SHOWN], own_table[0].tolist())
    # The best checkpoints are those with the lowest val_loss.
    val_loss = -figures["reward"]
    if guide:
        which = [True] * len(drawn)
        answers = rollouts.Rollouts(drawn, which, block_size, sampler.tokenizer.pad_id)
        figures["kl_teacher"] = rollouts.measure_divergence(
            sampler.model, guide, answers, batch_size, temperature, torch_dtype
        )
        val_loss += kl_coef * figures["kl_teacher"]
    return {"val_loss": val_loss} | figures, lines


def report(log: RunLog, step: int, scores: dict[str, float], lines: list[str]) -> None:
    """Write an evaluation to the log."""
    shown = "held out | reward {reward:.4f} | std {reward_std:.3f} | finished {finished:.1%} | "
    shown += "length {length:.1f}"
    if teacher:
        shown += " | kl from the teacher {kl_teacher:.4f}"
    shown = shown.format_map(scores)
    for name in (key.partition("/")[2] for key in scores if key.startswith("reward/")):
        shown += f" | {name} {scores[f'reward/{name}']:.3f}"
    log.report(step, scores, shown, lines)


def state_beside_policy(warmup: int, reward_sums: Tensor, learner: tuple | None) -> dict:
    """Return what a checkpoint holds besides the policy. All ranks call it.

    learner: the critic with its DDP, optimizer and scaler."""
    state = {"warmup_steps": warmup, "reward_sums": reward_sums.tolist()}
    if learner:
        state["critic"] = critics.state_of(*learner)
    return state


if __name__ == "__main__":
    config = configure(globals())

    # ---- ranks and device
    world = ranks.init(device, timeout_s)
    stop_signal = ranks.StopSignal()  # Ctrl-C, SIGTERM and the like: save, then stop
    torch_device = choose_device(device, world.local_rank)
    torch_dtype = choose_dtype(dtype, torch_device)
    # a plan may be for other ranks than the one that prints it
    world_size = ranks.planned_world_size() if plan_only else world.world_size
    peak = peak_flops(torch_device)

    # ---- batch: each rank draws the answers to its own prompts
    check_settings(world_size)
    is_ppo = algorithm == "ppo"
    n_updates = epochs_per_step * minibatches  # of a step
    n_answers = prompts_per_step * group_size  # of a step, over all ranks
    n_own = prompts_per_step // world_size
    first = world.rank * n_own  # of them, in the step
    own_prompts = list(range(first, first + n_own))  # numbers in the step
    own = slice(first * group_size, (first + n_own) * group_size)  # answers
    draw_rows = min(draw_batch_size or n_answers, n_own * group_size)

    # ---- the checkpoint to start from; n_known: token ids that its weights were trained with
    init_dir, tokenizer, n_known, model_config = open_start(config)
    critic_dir, teacher_dir = init_dir, None
    if critic_from:
        critic_dir = reward_model.find_model(critic_from, tokenizer, "critic_from")
    if teacher:
        teacher_dir = checkpoint.resolve(teacher, "teacher")
        huggingface.check_teacher(teacher_dir, tokenizer, block_size)

    # ---- rewards and prompts
    rewards = Rewards(reward, tokenizer, torch_device, torch_dtype, batch_size)
    longest = min(block_size, rewards.block_size or block_size) - max_new_tokens  # prompt
    # the longest that any block_size allows
    most = model_config.block_size
    context = min(most, rewards.block_size or most) - max_new_tokens
    reads = f"reward={reward!r} reads {rewards.block_size} tokens"
    refuse(longest < 1, f"{reads}, {max_new_tokens=} leaves no room for a prompt")
    toolbox = Tools(tools) if tools else None  # a process in which they run
    schemas = toolbox.schemas if toolbox else []
    if toolbox:
        check_template(tokenizer, toolbox)
    corpus = PromptCorpus(
        data, tokenizer, longest, seed, val_data, val_fraction, schemas, context=context
    )
    corpus.need_validation(val_fraction)
    settings = config | {"world_size": world_size}
    max_steps = steps_of(settings, corpus.n_rows, prompts_per_step, "prompts_per_step", "prompts")
    check_schedule(config, max_steps)

    # ---- model
    torch.manual_seed(seed)  # of new weights
    with weights_to_load(trainable, torch_dtype, plan_only):
        model = Transformer(model_config)
    set_trainable(model, trainable, LoRAConfig(lora_rank, lora_alpha))
    if world.is_main:
        print(*corpus.report(), sep="\n")
        settings = config | {"max_steps": max_steps}
        text = rollouts.describe_plan(
            model,
            settings,
            rewards,
            draw_rows,
            world_size,
            torch_device,
            torch_dtype,
            peak,
            teacher_dir,
        )
        print(text, flush=True)
    if plan_only:
        sys.exit(0)

    # ---- the checkpoint to continue, or the weights to start from
    data_record = {"algorithm": algorithm, "seed": seed, "block_size": block_size}
    data_record |= {"max_new_tokens": max_new_tokens, "prompts_per_step": prompts_per_step}
    data_record |= {"val_fraction": val_fraction, "trainable": trainable}
    data_record |= {"reward": rewards.record()} | corpus.record()
    if tools:
        data_record["tools"] = file_sha256(Path(tools))
    if teacher:
        data_record["teacher_weights"] = huggingface.shared_fingerprint(teacher_dir)
    elif trainable != "lora":  # a resumed run must measure its KL divergence to the same weights
        data_record["reference_weights"] = huggingface.shared_fingerprint(init_dir)
    if is_ppo and trainable != "all":  # a checkpoint holds only what the critic trains
        data_record["critic_weights"] = huggingface.shared_fingerprint(critic_dir)
    ranks.check_equal(config | data_record | {"dtype": str(torch_dtype)})
    # None and {"step": 0} for a new run. load_resumed() loads the weights, restore() the rest.
    resume_dir, state = checkpoint.find(config, model_config, data_record, max_steps)
    warmup = checkpoint.warmup_of(config, max_steps, state)  # steps
    # rank 0 reads the weights, DDP sends them to the others
    if resume_dir:
        huggingface.load_resumed(model, resume_dir)
    else:
        huggingface.load_start(model, init_dir, n_known, tokenizer)
    base_dir = huggingface.frozen_base(model, init_dir, resume_dir)  # of adapters
    plan.check_arithmetic(torch_device, torch_dtype)  # mps may be wrong: compare with the CPU
    model.to(torch_device)
    models = [model]

    # ---- the reference of the KL divergence: the teacher, or the weights before training
    reference = model  # with its adapters off
    if teacher:
        reference = huggingface.load_model(teacher_dir, torch_device, block_size, torch_dtype)
        reference.requires_grad_(False).eval()
        models.append(reference)
    elif kl_coef and trainable != "lora":
        held_in = frozen_dtype(trainable, torch_dtype)
        reference = huggingface.build(Transformer, model_config, held_in)
        reference.requires_grad_(False)
        huggingface.load_start(reference, init_dir, n_known, tokenizer)
        ranks.broadcast_weights(reference)
        reference.to(torch_device)
        models.append(reference)

    # ---- the critic
    if is_ppo:
        critic_config = huggingface.tuned_config(critic_dir, tokenizer.vocab_size, config, 0.0)
        with weights_to_load(trainable, torch_dtype):
            critic = RewardModel(critic_config)
        set_trainable(critic, trainable, LoRAConfig(lora_rank, lora_alpha))
        critic.score.requires_grad_(True)
        known = huggingface.count_known_ids(critic_dir, tokenizer, "the chat tokenizer")
        reward_model.load_start(critic, critic_dir, known, tokenizer)
        if normalise_rewards:  # its head has learned another scale
            torch.nn.init.zeros_(critic.score.weight)
        critic.to(torch_device)
        models.append(critic)

    # ---- compile, data parallel, optimizer
    for network in models:
        network.activation_checkpointing = activation_checkpointing
    if compile:
        check_compiler(torch_device)
        # A block is compiled for each model, with gradients and without, and for other lengths.
        torch._dynamo.config.recompile_limit = 32
        for network in models:
            for part in (*network.layers, network.norm):
                part.forward = torch.compile(part.forward)
    fp16 = torch_dtype == torch.float16
    muon_dtype = torch.bfloat16 if torch_dtype == torch.bfloat16 else torch.float32
    scaler = torch.amp.GradScaler(torch_device.type, enabled=fp16)
    ddp = DDP(model, zero1=zero1, whole_matrices=optimizer == "muon")
    opt = Optimizer(ddp.buckets, optimizer, weight_decay=0.0, muon_dtype=muon_dtype)
    if is_ppo:
        critic_scaler = torch.amp.GradScaler(torch_device.type, enabled=fp16)
        critic_ddp = DDP(critic, zero1=zero1, whole_matrices=optimizer == "muon")
        critic_opt = Optimizer(
            critic_ddp.buckets, optimizer, weight_decay=0.0, muon_dtype=muon_dtype
        )

    # ---- restore, and make the run directory
    checkpoint.restore(resume_dir, state, model, ddp, opt, scaler, seed)
    steps_done = state["step"]  # 0 for a new run
    # number, sum and sum of squares of all rewards so far
    reward_sums = torch.tensor(state.get("reward_sums", [0.0, 0.0, 0.0]), dtype=torch.float64)
    learner = None  # of the critic
    if is_ppo:
        learner = critic, critic_ddp, critic_opt, critic_scaler
        if resume_dir:
            critics.restore(state["critic"], *learner)
    config = checkpoint.make_run_dir(config, __file__, state, max_steps)
    flops = plan.flops_per_token(model, block_size)
    log = RunLog(out_dir, max_steps, steps_done, world, track, flops, peak, torch_device)
    log.note_changes(state)
    del state  # its tensors are mapped from a file
    saver = Saver(out_dir, keep_last, tokenizer, log, config, data_record, base_dir)
    order = corpus.redrawn_order(prompts_per_step)
    guide = reference if teacher else None
    sampler = AnswerSampler(
        model,
        tokenizer,
        draw_rows,
        max_new_tokens,
        temperature,
        torch_dtype,
        compile,
        stop_signal,
        toolbox,
    )

    # ---- the loop
    if ranks.any_rank(log.lacks_evaluation(eval_every)):
        scores, lines = evaluate(sampler, rewards, corpus, config, guide)
        report(log, steps_done, scores, lines)
        saver.tidy()
    stop_signal.begin()  # from here on a signal waits for the end of a step
    stopping, saving = False, True  # saving: the last step has a checkpoint
    log.restart_clock()
    since_log: list[dict[str, float]] = []  # figures of each step since the last log line
    for step in range(steps_done + 1, max_steps + 1):
        lr = learning_rate_at(step, schedule, learning_rate, 0.0, warmup, max_steps)
        value_lr = learning_rate_at(step, schedule, value_learning_rate, 0.0, warmup, max_steps)

        # 1. draw group_size answers to each of this rank's prompts
        ddp.flush()  # apply the updates that wait for the next forward
        sampler.reset()
        drawn = draw(sampler, corpus, step, own_prompts)

        # 2. score: the reward of each answer, and from it the advantage of each token
        table = rewards.table(drawn)  # (1 + parts, answers): the weighted sum, then each part
        n_redrawn = 0
        for attempt in range(1, filter_groups + 1):
            if stop_signal():
                break
            # Equal rewards teach nothing: answer other prompts instead (arXiv:2503.14476, 3.2).
            learned_rewards, learned = rollouts.learned_rewards(table[0], config)
            flat = pg.flat_groups(learned_rewards, group_size, learned).nonzero()[:, 0].tolist()
            if not flat:
                break
            redrawn = draw(sampler, corpus, step, [own_prompts[k] for k in flat], attempt)
            rollouts.replace_groups(drawn, table, flat, redrawn, rewards.table(redrawn))
            n_redrawn += len(flat)
        stopping = ranks.any_rank(stop_signal())
        if stopping:  # answers may be missing: save the step before this one
            step -= 1
            break
        table, lengths = rollouts.gather(table, drawn)  # now of all ranks: (1 + parts, R), (R,)
        figures = rollouts.describe_answers(table, lengths, rewards.names, config)
        figures |= rollouts.describe_drawing(sampler, n_redrawn)
        if tools:
            figures |= rollouts.describe_calls(drawn)
        if normalise_rewards:
            finished = ~table[0].isnan()
            reward_sums += pg.power_sums(table[0][finished])
            table = pg.whiten(table, *pg.moments(reward_sums))
        # R rewards, and which of the answers are trained on
        learned_rewards, learned = rollouts.learned_rewards(table[0], config)
        if group_size > 1:
            flat = pg.flat_groups(learned_rewards, group_size, learned)
            figures["flat_groups"] = flat.float().mean().item()

        answers = rollouts.Rollouts(drawn, learned[own].tolist(), block_size, tokenizer.pad_id)
        old = None  # (n,) log-probabilities of this rank's n tokens before the first update
        if n_updates > 1 or is_ppo:
            old = rollouts.measure_logps(model, answers, batch_size, temperature, torch_dtype)
        if kl_coef:
            with adapters_off(reference):
                of_reference = rollouts.measure_logps(
                    reference, answers, batch_size, temperature, torch_dtype
                )
        if is_ppo:
            values = critics.measure_values(critic, answers, batch_size, torch_dtype)
            kls = old - of_reference if kl_coef else torch.zeros_like(old)
            of_tokens = pg.token_rewards(learned_rewards[own], kls.cpu(), answers.row, kl_coef)
            advantages, returns, figures["explained"] = critics.estimate_advantages(
                of_tokens, values, answers, GAMMA, LAMBDA
            )
        else:
            of_answers = pg.group_advantages(learned_rewards, group_size, scale_rewards, learned)
            advantages = of_answers[own][answers.row].to(torch_device)

        # 3. train: n_updates updates, each on a part of the answers
        totals = dict.fromkeys(rollouts.TOTALS, 0.0)  # over the micro-steps, for the log
        ratio_max = torch.ones((), device=torch_device)
        for epoch in range(epochs_per_step):
            part_of = rollouts.minibatch_of(n_answers, minibatches, seed, step, epoch)  # (R,)
            for minibatch in range(minibatches):
                chosen = part_of == minibatch  # (R,) bool
                n_tokens = int(lengths[torch.from_numpy(chosen) & learned].sum())  # of all ranks
                mine = np.flatnonzero(chosen[own])
                totals["positions"] += int(answers.lengths[mine].sum())  # without padding
                batches = list(answers.batches(batch_size, mine))
                ddp.expect_step(opt, lr)
                for micro_step, batch in enumerate(batches):
                    # talk once per update, in the last backward
                    ddp.sync = micro_step == len(batches) - 1
                    batch = batch.to(torch_device)
                    logps, entropies = rollouts.answer_logps(
                        model, batch, temperature, torch_dtype, with_entropy=epoch == 0
                    )
                    before = logps.detach() if old is None else old[batch.token]
                    losses, ratios, clipped = pg.policy_losses(
                        logps, before, advantages[batch.token], CLIP_LOW, CLIP_HIGH
                    )
                    if kl_coef:
                        ref = of_reference[batch.token]
                        totals["kl"] += (before - ref).sum()
                        if not is_ppo:  # ppo has it in the rewards of its tokens
                            losses = losses + kl_coef * pg.kl_penalty(logps, before, ref)
                    policy_loss = pg.normalise(
                        losses, batch.row, loss, n_answers // minibatches, n_tokens, max_new_tokens
                    )
                    # ddp averages over the ranks
                    scaler.scale(policy_loss * world_size).backward()
                    if is_ppo:
                        critic_ddp.sync = ddp.sync
                        new_values = critics.predict(critic, batch, torch_dtype)
                        old_values, targets = values[batch.token], returns[batch.token]
                        errors = pg.value_losses(new_values, old_values, targets, VALUE_CLIP)
                        value_loss = errors.sum() / max(1, n_tokens)
                        critic_scaler.scale(value_loss * world_size).backward()
                        totals["value_loss"] += value_loss.detach()
                    totals["loss"] += policy_loss.detach()
                    totals["entropy"] += entropies.sum()
                    totals["clipped"] += clipped.sum()
                    totals["tokens"] += len(losses)
                    ratio_max = torch.cat((ratios, ratio_max.view(1))).max()

                # >>> optimizer step: identical in all trainers (tests/test_repo.py)
                grad_norm = ddp.step(opt, lr, grad_clip, scaler, stop_signal())
                # <<< optimizer step
                if is_ppo:
                    value_norm = critic_ddp.step(
                        critic_opt, lr=value_lr, clip=grad_clip, scaler=critic_scaler
                    )
        log.advance()

        # log
        figures |= rollouts.describe_updates(
            totals, ratio_max, n_updates, epochs_per_step, int(learned.sum())
        )
        if not kl_coef:  # without a reference there is no KL divergence
            del figures["kl"], figures["kl_answer"]
        since_log.append(figures)
        last = step == max_steps
        stopping = ddp.stopping
        if step % log_every == 0 or last or stopping:
            means = rollouts.mean_figures(since_log)
            n_positions = means.pop("positions") * len(since_log)
            shown = {"loss": means.pop("loss"), "lr": lr, "grad_norm": grad_norm.item()}
            shown |= {"skipped": int(ddp.skipped[0])}
            shown |= {"epoch": float(order.epochs(step * prompts_per_step).max())} | means
            skipped = {"learning_rate": ddp.skipped}
            if is_ppo:
                shown["value_norm"] = value_norm.item()
                shown["value_skipped"] = int(critic_ddp.skipped[0])
                skipped["value_learning_rate"] = critic_ddp.skipped
            # mfu counts only the work of the policy's updates, but all the time: sampling, the
            # critic, and forward passes without gradient are not counted as work.
            log.train(step, shown, n_positions)
            warning = rollouts.warn_of_cut_answers(since_log, max_new_tokens)
            if warning and reward:
                log.print(warning)
            for key, (_, in_a_row) in skipped.items():
                if in_a_row >= MAX_SKIPPED:
                    saver.wait()
                    text = f"{int(in_a_row)} updates in a row without a finite gradient"
                    how = f"lower {key} or continue from an earlier checkpoint (--resume_from)"
                    raise UserError(f"train: step {step}: {text}; {how}")
            since_log = []

        # save, then evaluate: an evaluation may run out of memory
        with log.paused():
            saving = step % save_every == 0 or last
            evaluating = (step % eval_every == 0 or last) and not stopping
            if saving or evaluating:
                ddp.flush()  # apply the updates that wait for the next forward
            if saving:
                extra_state = state_beside_policy(warmup, reward_sums, learner)
                saver.save(step, model, ddp, opt, scaler, extra_state)
            if evaluating:
                scores, lines = evaluate(sampler, rewards, corpus, config, guide)
                stopping = ranks.any_rank(stop_signal())
                if not stopping:  # else it was left early: a resumed run does it again
                    report(log, step, scores, lines)
                    saver.tidy()
        if stopping:
            break

    # ---- the end
    if stopping and not saving:
        ddp.flush()
        extra_state = state_beside_policy(warmup, reward_sums, learner)
        saver.save(step, model, ddp, opt, scaler, extra_state)
    saver.close()
    log.finish(__file__, config, corpus, stopping, saver.saved)
    ranks.close()
    sys.exit(stop_signal.exit_code if stopping else int(not saver.saved))
