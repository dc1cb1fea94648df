"""A reward model: pairs of answers, of which the better one learns to get the higher score.

python reward.py config/debug_reward.py                                             # CPU, seconds, needs nothing
python reward.py config/reward.py --init_from=out/sft --data=pairs.jsonl            # all weights
torchrun --standalone --nproc_per_node=4 reward.py config/reward.py --init_from=out/sft --trainable=lora --data=DIR
python reward.py --init_from=out/reward --score=chats.jsonl --out=scored.jsonl      # each row with "reward"

The score is read at the <|im_end|> of an answer; the loss is -log sigmoid of the difference of two scores, over the
number of pairs in the whole step.
"""

if __name__ == "__main__":  # before the imports, which take seconds: Ctrl-C is one line from here on
    from groundup.errors import end_in_one_line

    end_in_one_line()

import os
import sys
import time
from functools import partial
from pathlib import Path

import torch

from configurator import configure
from groundup.align import reward_model
from groundup.align.reward_model import RewardModel
from groundup.demo import debug_data
from groundup.scores import rows
from groundup.tokens.batches import Batches
from groundup.tokens.corpus import steps_of
from groundup.tokens.pairs import PairCorpus
from groundup.train import checkpoint, ranks, run
from groundup.train import plan as memory_plan
from groundup.train.base import adapters_of, frozen_base, new_model, open_base
from groundup.train.device import peak_flops, seed_everything
from groundup.train.log import RunLog
from groundup.train.lora import set_trainable
from groundup.train.optim import learning_rate_at
from groundup.train.plan import flops_per_token
from groundup.train.settings import *  # noqa: F403
from groundup.train.signals import StopSignal
from tokenizer import Tokenizer

# ---- config: override with a config file or --key=value; see --help -------------------------------------------------
out_dir = "out/reward"  # run directory: config.py, log.jsonl, step_*/
init_from = "out/sft"  # run, checkpoint or Hugging Face directory; "" = a tiny new model, to try it
data = "data/pairs"  # pairs: files, a directory of prepare.py --kind=preference; mixed 'a.jsonl=0.7,data/b=0.3'
val_data = ""  # likewise, for validation; "" = the directory's own, or val_fraction of the prompts
chat_template_kwargs = ""  # settings of the checkpoint's own chat template: 'enable_thinking=False'
val_fraction = 0.05  # of the prompts, by their content; for data that have no validation of their own
# scoring instead of training: init_from is a reward model
score = ""  # files of conversations, as sft.py's data, or of sample.py's answers
out = "scores.jsonl"  # their rows in their order, with "reward": the score of the last answer, or of each completion
# loss
margin_scale = 1.0  # two scores should differ by this times the `margin` of the pair's row, where it has one
center = 0.0  # how strongly the sum of two scores is drawn to 0, squared; 0.01 is usual
# what is trained
lora_dropout = 0.0  # on the input of the adapters
dropout = 0.0
# data
block_size = 1024  # most tokens of a prompt and an answer; a longer pair is left out
epochs = 1.0  # passes over the pairs of all sources; more than one soon learns them by heart
max_steps = 0  # 0 = as many as epochs takes
max_epochs = ""  # most epochs of each source, or 'data/a=2,data/b=8'; a source used up leaves its share to the others
# batch
batch_size = 8  # pairs per rank and micro-step: twice as many rows
total_batch_pairs = 0  # batch_size x micro-steps x ranks; 0 = one micro-step on each rank
# optimizer
learning_rate = 1e-5  # peak; adapters take ten times as much
# evaluation, log, checkpoints
eval_steps = 0  # batches of batch_size pairs, over all ranks; 0 = all of the validation pairs

# These decide which pairs a step sees; a resumed run must not change them.
DATA_KEYS = ("seed", "block_size", "total_batch_pairs", "val_fraction", "max_epochs")
DEBUG_DATA = "data/debug/reward.jsonl"  # made by the script, to try it without anything prepared


def check_config(config: dict, world_size: int) -> int:
    """Return the pairs per step over all ranks. Raise UserError; nothing exists yet when it does."""
    run.check_config(config, {"center": 0, "margin_scale": 0}, choices={"parallel": ("ddp",)})
    return run.count_per_step(config, "total_batch_pairs", world_size=world_size)


def score_conversations(config: dict, device: torch.device, dtype: torch.dtype) -> None:
    """Score the conversations of the files in --score."""
    source = checkpoint.resolve(config["init_from"])
    model, tokenizer = reward_model.load(source, device, dtype), Tokenizer.load(source)
    settings = rows.common_settings(config["score"])
    settings = settings and settings | {"reward_model": checkpoint.model_name(source)}
    key = rows.reward_key(source, config["score"], dtype)
    counts = rows.write_rewards(
        model, tokenizer, config["score"], Path(config["out"]), key, config["batch_size"], dtype, settings
    )
    print(f"{config['out']}: {counts.pop(''):,} answers with a reward")
    for reason, n in counts.items():
        print(f"{config['out']}: {n:,} without: {reason}")


if __name__ == "__main__":
    config = configure(globals())
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    pairs_per_step = config["total_batch_pairs"] = check_config(config, world_size)
    torch_device, torch_dtype = run.choose_device_and_dtype(config | {"compile": compile and not score})
    if score:
        score_conversations(config, torch_device, torch_dtype)
        sys.exit(0)
    peak = peak_tflops * 1e12 or peak_flops(torch_device, torch_dtype)

    # ---- weights, tokenizer, pairs: mistakes show here, before a process group or out_dir exists
    if data == DEBUG_DATA:
        debug_data.make_debug_rows(Path(data), debug_data.debug_pairs)
    source, tokenizer, n_known, cfg = open_base(config, DEBUG_DATA)
    flops = flops_per_token(cfg, block_size, head=False, trainable=trainable)
    tokenizer = reward_model.padded(tokenizer)
    corpus = PairCorpus(data, tokenizer, block_size, seed, val_data, val_fraction)
    corpus.need_validation(val_fraction)
    given = dict(config)  # out_dir/config.py keeps max_steps=0
    n_rows, lost = corpus.n_rows, corpus.left_out()
    max_steps = config["max_steps"] = steps_of(config, n_rows, pairs_per_step, "total_batch_pairs", "pairs", lost)
    mixture = corpus.order(seed, pairs_per_step, max_steps, max_epochs)
    order = {key: config[key] for key in DATA_KEYS} | corpus.record()
    if rank == 0:
        batch, rows = f"{pairs_per_step} pairs per step, {max_steps:,} steps", 2 * pairs_per_step * max_steps
        size = cfg, config | {"batch_size": 2 * batch_size}, batch, rows * block_size, world_size
        text = memory_plan.describe(*size, torch_device, torch_dtype, peak, head=False, note="at most ")
        print("\n".join([*corpus.report(), text]), flush=True)
    if plan_only:
        sys.exit(0)
    resumed = run.find_checkpoint(config, cfg, order)

    # ---- processes, model, optimizer, state
    stop_signal = StopSignal()
    world = run.join(config, order, resumed.step, torch_device, torch_dtype)
    accum_steps = pairs_per_step // (batch_size * world_size)
    seed_everything(seed)
    raw_model = new_model(RewardModel, cfg, config, torch_dtype)
    if source and not resumed.path:
        reward_model.load_start(raw_model, source, n_known, tokenizer)
    set_trainable(raw_model, trainable, adapters_of(config))
    raw_model.score.requires_grad_(True)
    saved = resumed.state.get("trained", {})
    base = saved.get("base") or frozen_base(None, source)
    load = partial(reward_model.load_trained, trained=saved, n_known=n_known)
    parts = run.set_up(config, raw_model, world, torch_device, torch_dtype)
    model, opt, scaler, ddp = raw_model, parts.opt, parts.scaler, parts.ddp  # compiled in place: the same object
    skipped = run.start(parts, resumed, given, __file__, load)
    batches = Batches(
        corpus.train, mixture, block_size, batch_size, accum_steps, world.rank, world_size, torch_device, resumed.step,
        load=corpus.load, valid=corpus.valid,
    )  # fmt: skip
    val = partial(corpus.val_batches, batch_size, eval_steps, world.rank, world_size)
    shares = corpus.val_shares()
    log = RunLog(out_dir, max_steps, resumed.step, world.is_main, tensorboard)
    save = partial(run.save, parts, tokenizer=tokenizer, config=config, order=order, base=base, log=log)

    def evaluate_now(step: int) -> None:
        """Log all scores and rank the checkpoint of this step by its validation loss."""
        scores = reward_model.evaluate(model, val(), shares, config, torch_device, torch_dtype)
        line = [f"val loss {scores['val_loss']:.4f}", f"accuracy {100 * scores['accuracy']:.1f}%"]
        line += [f"longer wins {100 * scores['longer_wins']:.1f}%", f"ece {scores['ece']:.3f}"]
        line += [f"margin {scores['margin']:.3f}", f"correlation with length {scores['length_correlation']:.2f}"]
        names = [name for name in reward_model.LENGTH_BUCKETS if scores[f"pairs/{name}"]]
        shown = (f"{name} {100 * scores[f'accuracy/{name}']:.1f}% of {scores[f'pairs/{name}']}" for name in names)
        log.report(step, scores, line, ["    accuracy by length: " + ", ".join(shown)])
        run.rank(parts, step, scores["val_loss"], config, log)

    # ---- the loop
    if ranks.any_rank(log.lacks_evaluation(eval_every)):
        evaluate_now(resumed.step)
    stop_signal.begin()
    warmup, stopping = run.warmup_of(config), False
    mark_time, mark_step = time.perf_counter(), resumed.step
    seen = torch.zeros(1, dtype=torch.float64)  # positions of this rank since the last log line
    for step in range(resumed.step + 1, max_steps + 1):
        lr = learning_rate_at(step, schedule, learning_rate, min_lr, warmup, decay_steps or max_steps, decay_fraction)
        sums = torch.zeros(4, device=torch_device)  # loss, right pairs, differences, rewards
        ddp.expect_step(opt, lr)
        for micro_step in range(accum_steps):
            ddp.sync = micro_step == accum_steps - 1  # talk once per step, during the last backward
            batch = batches.next()
            losses, chosen, rejected = reward_model.pair_losses(model, batch, config, torch_device, torch_dtype)
            loss_sum = losses.sum() * (world_size / pairs_per_step)  # ddp averages over ranks
            scaler.scale(loss_sum).backward()  # full buckets start their all-reduce inside this call
            with torch.no_grad():
                difference = chosen - rejected
                sums += torch.stack((losses, difference > 0, difference, (chosen + rejected) / 2)).sum(1)
            seen += batch.x.numel()
        # >>> optimizer step: identical in pretrain, sft, dpo, reward, rl (tests/test_repo.py)
        grad_norm = ddp.step(opt, lr=lr, clip=grad_clip, scaler=scaler)
        skipped = torch.stack((skipped[0] + ddp.found_inf, (skipped[1] + 1) * ddp.found_inf))
        # <<< optimizer step
        log.advance()

        last, stopping = step == max_steps, ranks.any_rank(stop_signal.received > 0)
        if step % log_every == 0 or last or stopping:
            mine = sums[0].clone()
            means = (ranks.all_reduce_sum(sums) / pairs_per_step).tolist()  # waits for the device, so that
            seconds = time.perf_counter() - mark_time  # this clock is true
            tokens_per_s = ranks.all_reduce_sum(seen).item() / seconds
            values = dict(zip(("loss", "accuracy", "margin", "reward"), means, strict=True))
            values |= run.figures(parts, lr, grad_norm, skipped, tokens_per_s, flops, peak)
            values["epoch"] = float(mixture.epochs(step * pairs_per_step).max())
            values["pairs_per_s"] = (step - mark_step) * pairs_per_step / seconds
            log.train(step, values, seconds / (step - mark_step))
            if skipped[1] >= max_skipped:
                run.stop_not_finite(parts, log, step, int(skipped[1]), mine, batches)
            mark_time, mark_step = time.perf_counter(), step
            seen.zero_()
        pause = time.perf_counter()
        saving, evaluating = step % save_every == 0 or last or stopping, step % eval_every == 0 or last
        if saving or evaluating:
            ddp.flush()  # updates that wait for the next forward
        if saving:
            trained = reward_model.trained_weights(raw_model, base)
            save(step, skipped, write=reward_model.write_model, other={"trained": trained})
        if evaluating:  # after the save: it may run out of memory
            evaluate_now(step)
        mark_time += time.perf_counter() - pause  # evaluations and saves are not training
        if stopping:
            break

    run.finish(parts, log, config, __file__, corpus.report(), stop_signal if stopping else None, batches)
