"""A reward model: pairs of answers, of which the better one learns to get the higher score.

python reward.py config/debug_reward.py                                             # CPU, seconds, needs nothing
python reward.py config/reward.py --init_from=out/sft --data=pairs.jsonl            # all weights
torchrun --standalone --nproc_per_node=4 reward.py config/reward.py --init_from=out/sft --trainable=lora --data=DIR
python reward.py --init_from=out/reward --score=chats.jsonl --out=scored.jsonl      # each row with "reward"

It begins with a checkpoint of sft.py or any Hugging Face Llama or Qwen3 directory. The score is read at the <|im_end|>
of an answer; the loss is -log sigmoid of the difference of two scores, over the number of pairs in the whole step.
"""

import gc
import math
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import ddp as dist
import prepare
from configurator import configure
from groundup.align import reward_model
from groundup.align.reward_model import RewardModel
from groundup.errors import UserError
from groundup.scores import reward_scores
from groundup.tokens.batches import Batches
from groundup.tokens.pairs import PairCorpus
from groundup.train import checkpoint, ranks, run, run_card
from groundup.train import plan as memory_plan
from groundup.train.device import peak_flops, peak_memory_gib, seed_everything
from groundup.train.log import RunLog, clock
from groundup.train.lora import LoRAConfig, set_trainable, trainable_table
from groundup.train.optim import Optimizer, learning_rate_at, stays_whole
from groundup.train.plan import flops_per_token, parameter_table
from groundup.train.signals import StopSignal
from model import ModelConfig
from tokenizer import Tokenizer, chat_ready

# ---- config: override with a config file or --key=value; see --help -------------------------------------------------
out_dir = "out/reward"  # run directory: config.py, log.jsonl, step_*/
init_from = "out/sft"  # run, checkpoint or Hugging Face Llama/Qwen3 directory; "" = a tiny new model, to try it
data = "data/pairs"  # pairs: files, a directory of prepare.py --kind=preference; mixed 'a.jsonl=0.7,data/b=0.3'
val_data = ""  # likewise, for validation; "" = the directory's own, or val_fraction of the prompts
val_fraction = 0.05  # of the prompts, by their content; for data that have no validation of their own
resume = "auto"  # auto = continue if out_dir has a checkpoint; never = refuse a non-empty out_dir; must
overwrite = False  # with resume='never': delete what out_dir holds
seed = 1337  # order of the data, dropout, adapters
# scoring instead of training: init_from is a reward model
score = ""  # files of conversations, as sft.py's data, or of sample.py's answers
out = "scores.jsonl"  # their rows in their order, with "reward": the score of the last answer, or of each completion
# loss
loss = "last"  # last = of the scores of whole answers; per_token = of those of all their beginnings, too
end = "min"  # per_token: with which answer it ends: min = the shorter one; max = the longer one, over padding
margin_scale = 1.0  # two scores should differ by this times the `margin` of the pair's row, where it has one
center = 0.0  # how strongly the sum of two scores is drawn to 0, squared; 0.01 is usual
# what is trained
trainable = "all"  # all, or some of embed, lora, regular expressions of names; the score's head always is
lora_rank = 16  # of the matrices that are added
lora_alpha = 32.0  # an adapter's result is multiplied by lora_alpha / lora_rank
lora_dropout = 0.0  # on what the adapters read
lora_modules = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"  # matrices that get one
dropout = 0.0
# data
block_size = 1024  # most tokens of a prompt and an answer; a longer pair is left out
epochs = 1.0  # passes over the pairs of all sources; more than one soon learns them by heart
max_steps = 0  # 0 = as many as epochs takes
max_epochs = ""  # most epochs of each source, or 'data/a=2,data/b=8'; a source used up leaves its share to the others
# batch
batch_size = 8  # pairs per rank and micro-step: twice as many rows; 0 = as many as fit, needs total_batch_pairs
total_batch_pairs = 0  # batch_size x micro-steps x ranks; 0 = one micro-step on each rank
# optimizer
optimizer = "adamw"  # adamw | muon (for the blocks' matrices)
learning_rate = 1e-5  # peak; adapters take ten times as much
min_lr = 0.0  # at the end of the schedule
schedule = "cosine"  # constant | cosine | linear | wsd | wcsd (see optim.py)
warmup_steps = 0  # steps of rising learning rate
warmup_fraction = 0.03  # > 0: warm-up as a fraction of max_steps, instead of warmup_steps
decay_steps = 0  # step at which min_lr is reached; 0 = max_steps; shorter holds min_lr, longer ends above it
decay_fraction = 0.2  # wsd, wcsd: share of the schedule that the final decay takes
stable_lr = 0.0  # wcsd: the plateau
weight_decay = 0.0  # on matrices only
beta1 = 0.9
beta2 = 0.95
momentum = 0.95  # Muon's
grad_clip = 1.0  # global norm; 0.0 = off
max_skipped = 20  # stop after this many steps in a row without a finite gradient (looked at every log_every steps)
# system
device = "auto"  # auto | cpu | cuda | mps
dtype = "auto"  # auto | float32 | bfloat16 | float16 (with a GradScaler)
compile = True  # torch.compile, block by block
activation_checkpointing = False  # recompute blocks in backward: less memory, a third more work
bucket_mb = 0.0  # size of the gradient buckets; 0 = from the model's size
compress = "none"  # how gradients travel: none | fp16 | bf16 | powersgd (low rank, with error feedback)
compress_rank = 4  # powersgd: numbers sent per row and column of a matrix
compress_start_step = -1  # powersgd: steps sent whole before it begins; -1 = the warm-up
compress_embedding = False  # powersgd: the embedding and the head too
overlap_step = "off"  # forward = update a block when the next forward comes to it; backward = once its gradient came
zero1 = False  # share the optimizer's state and work out among the ranks
ddp_debug = False  # compare every collective and, after each step, all weights across ranks: slow
timeout_s = 300.0  # give up on a collective after this long
peak_tflops = 0.0  # of one device, for mfu and the plan; 0 = data sheet, or measured
plan_only = False  # print the plan and stop
# evaluation, log, checkpoints
eval_every = 100  # steps; also before the first and after the last step
eval_steps = 0  # batches of batch_size pairs, over all ranks; 0 = all of the validation pairs
log_every = 10  # steps
tensorboard = False  # also write event files for tensorboard into out_dir
save_every = 500  # steps; also after the last step
async_save = True  # write behind training, from a copy of weights and optimizer in RAM (with a GPU up to twice that)
keep_last = 2  # newest checkpoints kept; 0 = all
keep_best = 2  # best checkpoints kept besides (0 to 2), by the validation loss of those saved at an evaluation

# These decide which pairs a step sees; a resumed run must not change them.
DATA_KEYS = ("seed", "block_size", "total_batch_pairs", "val_fraction")
ORDER_KEYS = ("max_epochs",)
DATA_DEFAULTS = {key: globals()[key] for key in ORDER_KEYS}  # recorded only where they differ from these
# Made by the script, to try it without anything prepared.
DEBUG_DATA = "data/debug/reward.jsonl"


def check_config(config: dict, world_size: int) -> int:
    """Pairs per step over all ranks. Raises ConfigError; nothing exists yet when it does."""
    run.check_config(config | {"total_batch_tokens": 0, "batch_size": config["batch_size"] or 1})
    if config["score"]:
        run.check_least(config, "batch_size", 1)
    run.check_choice(config, "loss", ("last", "per_token"))
    run.check_choice(config, "end", reward_model.ENDS)
    for key in ("max_steps", "val_fraction", "total_batch_pairs", "center", "margin_scale"):
        run.check_least(config, key, 0)
    if not config["max_steps"] and not 0 < config["epochs"] < math.inf:
        raise UserError(f"config: epochs must be above 0 where max_steps is 0, got {config['epochs']}")
    return run.count_pairs(config, world_size)


def flops_of(cfg: ModelConfig, T: int) -> float:
    """FLOPs per token of a body without a head."""
    return flops_per_token(cfg, T) - 6 * cfg.vocab_size * cfg.n_embd


def memory(
    cfg: ModelConfig, adapters: LoRAConfig, world_size: int, device: torch.device, dtype: torch.dtype, config: dict
) -> dict[str, float]:
    """{part: bytes} of what a rank will hold at most."""
    body = replace(cfg, tie_embeddings=True)  # the head is one row
    trained = trainable_table(body, config["trainable"], adapters)
    rows = config | {"batch_size": 2 * config["batch_size"]}
    return memory_plan.memory_parts(body, rows, trained, False, world_size, device, dtype, head=False)


def plan(
    cfg: ModelConfig, config: dict, adapters: LoRAConfig, world_size: int, device: torch.device, dtype: torch.dtype,
    peak: float,
) -> str:  # fmt: skip
    """What this run will take at most, as text: parameters, steps, memory by part, time."""
    body = replace(cfg, tie_embeddings=True)  # the head is one row
    trained = trainable_table(body, config["trainable"], adapters)
    tokens = 2 * config["total_batch_pairs"] * config["block_size"] * config["max_steps"]
    seconds = tokens * flops_of(cfg, config["block_size"]) / (peak * world_size)
    total = parameter_table(body)["total"] + cfg.n_embd
    return "\n".join([
        f"parameters  {total:,}, trained {trained['trainable'] + cfg.n_embd:,} ({config['trainable']})",
        f"batch       {config['total_batch_pairs']} pairs per step, {config['max_steps']:,} steps",
        memory_plan.describe_parts(memory(cfg, adapters, world_size, device, dtype, config)),
        f"time        at most {clock(seconds / 0.4)} at 40 % of {world_size} x {peak / 1e12:,.2f} TFLOP/s",
    ])  # fmt: skip


def report_evaluation(log: RunLog, step: int, scores: dict) -> None:
    log.write("eval", step, scores)
    parts = [f"val loss {scores['val_loss']:.4f}", f"accuracy {100 * scores['accuracy']:.1f}%"]
    parts += [f"longer wins {100 * scores['longer_wins']:.1f}%", f"ece {scores['ece']:.3f}"]
    parts += [f"margin {scores['margin']:.3f}", f"correlation with length {scores['length_correlation']:.2f}"]
    log.print(f"step {step:6d}/{log.max_steps} | " + " | ".join(parts))
    names = [name for name in reward_model.LENGTH_BUCKETS if scores[f"pairs/{name}"]]
    shown = (f"{name} {100 * scores[f'accuracy/{name}']:.1f}% of {scores[f'pairs/{name}']}" for name in names)
    log.print("    accuracy by length: " + ", ".join(shown))


def score_conversations(config: dict, device: torch.device, dtype: torch.dtype) -> None:
    """What --score asks for."""
    source = checkpoint.resolve(config["init_from"])
    model, tokenizer = reward_model.load(source, device), Tokenizer.load(source)
    settings = reward_scores.common_settings(config["score"])
    settings = settings and settings | {"reward_model": checkpoint.model_name(source)}
    key = reward_scores.scoring_key(source, config["score"], dtype)
    counts = reward_scores.score_file(
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
    source = checkpoint.resolve(init_from) if init_from else None
    if data == DEBUG_DATA:
        prepare.make_debug_rows(Path(data), prepare.debug_pairs)
    if source is None and data != DEBUG_DATA:
        raise UserError("config: init_from: give the run, checkpoint or Hugging Face directory to begin with")
    tokenizer = chat_ready(Tokenizer.load(checkpoint.tokenizer_dir(source or Path(data).parent)))
    n_known = run.count_known_ids(source, tokenizer, "the chat tokenizer") if source else 0
    cfg = run.tuned_architecture(config, source, tokenizer.vocab_size)
    adapters = LoRAConfig(lora_rank, lora_alpha, lora_dropout, tuple(lora_modules.split(",")))
    run.check_trainable(config, source, tokenizer.vocab_size - n_known)
    corpus = PairCorpus(data, tokenizer, block_size, seed, val_data, val_fraction)
    if not corpus.val:
        raise UserError("config: no pair is held out for validation; raise val_fraction or give val_data")
    n_pairs = sum(pairs.n_rows for pairs in corpus.train)
    memory_of = partial(memory, cfg, adapters, world_size, torch_device, torch_dtype)
    samples = pairs_per_step // world_size  # of each rank
    config["batch_size"], chosen = memory_plan.fit_batch_size(config, samples, memory_of, torch_device)
    asked = dict(config)
    max_steps = config["max_steps"] = max_steps or math.ceil(epochs * n_pairs / pairs_per_step)
    mixture = corpus.order(seed, pairs_per_step, max_steps, max_epochs)
    order = {key: config[key] for key in DATA_KEYS} | corpus.record()
    order |= {key: config[key] for key in ORDER_KEYS if config[key] != DATA_DEFAULTS[key]}
    if rank == 0:
        text = plan(cfg, config, adapters, world_size, torch_device, torch_dtype, peak)
        print("\n".join([*corpus.report(), text, *chosen]), flush=True)
    if plan_only:
        sys.exit(0)
    resume_from = run.find_resume(config, cfg, verbose=rank == 0)
    state, rank_state = checkpoint.load_train_state(resume_from, rank) if resume_from else ({}, {})
    start_step = state.get("step", 0)
    if resume_from:
        run.check_data_order(state["order"], order, DATA_DEFAULTS, resume_from, start_step)
        run.check_same_parts(resume_from, state["config"], config)
        if rank == 0:
            print(run.describe_resume(resume_from, start_step, state["config"], config), flush=True)

    # ---- processes
    stop_signal = StopSignal()
    world = ranks.init(torch_device.type, timeout_s, ddp_debug)
    batch_size = memory_plan.agree_batch_size(batch_size, config["batch_size"], verbose=rank == 0)
    config["batch_size"] = asked["batch_size"] = batch_size
    accum_steps = pairs_per_step // (batch_size * world_size)
    run.check_ranks_agree({**config, **order, "step": start_step, "dtype": str(torch_dtype)})

    # ---- model, optimizer
    seed_everything(seed)
    raw_model = RewardModel(cfg)
    if source and not resume_from:
        reward_model.load_start(raw_model, source, n_known)
    set_trainable(raw_model, trainable, adapters)
    raw_model.score.requires_grad_(True)
    base = state.get("trained", {}).get("base") or run.frozen_base(None, source)
    if resume_from:
        reward_model.load_trained(raw_model, resume_from, state["trained"], n_known)
    raw_model.to(torch_device).activation_checkpointing = activation_checkpointing
    scaler = torch.amp.GradScaler(torch_device.type, enabled=torch_dtype == torch.float16)
    warmup = round(warmup_fraction * max_steps) if warmup_fraction else warmup_steps
    compress_from = warmup if compress_start_step < 0 else compress_start_step
    hook = dist.make_hook(compress, compress_rank, compress_from, compress_embedding, seed, scaler)
    ddp = dist.DDP(raw_model, bucket_mb, hook, overlap_step, zero1, keep_whole=partial(stays_whole, optimizer))
    opt = Optimizer(
        ddp.buckets, optimizer, (beta1, beta2), weight_decay=weight_decay, momentum=momentum,
        muon_dtype=torch.float32 if torch_dtype == torch.float32 else torch.bfloat16,
    )  # fmt: skip
    if compile:
        raw_model.compile_blocks(partial(torch.compile, dynamic=False))
    model = raw_model  # compiled block by block, so it is the same object

    # ---- state: fresh, or exactly as it was
    seed_everything(seed + 1_000_003 * start_step, world.rank)  # dropout differs by rank
    skipped = torch.tensor(state.get("skipped", [0.0, 0.0]), device=torch_device)  # in all, in a row
    parts = run.Parts(raw_model, opt, scaler, hook, ddp, world, torch_device, run.Writer(async_save, timeout_s))
    if resume_from:
        run.restore(parts, resume_from, state, rank_state, compress)
    state = rank_state = None  # as large as the optimizer's
    if world.is_main:
        run.prepare_out_dir(asked, "reward")
    batches = Batches(
        corpus.train, mixture, block_size, batch_size, accum_steps, world.rank, world_size, torch_device, start_step,
        load=corpus.load, valid=corpus.valid,
    )  # fmt: skip
    val = partial(corpus.val_batches, batch_size, eval_steps, world.rank, world_size)
    shares = corpus.val_shares()
    log = RunLog(out_dir, max_steps, start_step, world.is_main, tensorboard)
    stopping = False

    def evaluate_now(step: int) -> float:
        """The validation loss; all scores go to the log."""
        scores = reward_model.evaluate(model, val(), shares, config, torch_device, torch_dtype)
        report_evaluation(log, step, scores)
        return scores["val_loss"]

    # ---- the loop
    gc.collect()
    gc.freeze()  # nothing made so far becomes garbage: the collector need not walk it again
    if start_step == 0:
        evaluate_now(0)
    mark_time, mark_step = time.perf_counter(), start_step
    seen = torch.zeros(1, dtype=torch.float64)  # positions of this rank since the last log line
    for step in range(start_step + 1, max_steps + 1):
        lr = learning_rate_at(
            step, schedule, learning_rate, min_lr, warmup, decay_steps or max_steps, decay_fraction, stable_lr
        )
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
            values = {
                "loss": means[0], "lr": lr, "grad_norm": grad_norm.item(), "tokens_per_s": tokens_per_s,
                "mfu": tokens_per_s * flops_of(cfg, block_size) / peak / world_size,
                "memory_gib": peak_memory_gib(torch_device), "skipped": int(skipped[0]),
                "epoch": float(mixture.epochs(step * pairs_per_step).max()), "accuracy": means[1], "margin": means[2],
                "reward": means[3], "pairs_per_s": (step - mark_step) * pairs_per_step / seconds,
            }  # fmt: skip
            log.train(step, values, seconds / (step - mark_step))
            if skipped[1] >= max_skipped:
                run.stop_not_finite(parts, log, step, int(skipped[1]), mine, batches)
            mark_time, mark_step = time.perf_counter(), step
            seen.zero_()
        pause, val_loss = time.perf_counter(), None
        if step % eval_every == 0 or step % save_every == 0 or last or stopping:
            ddp.flush()  # updates that wait for the next forward
        if step % eval_every == 0 or last:
            val_loss = evaluate_now(step)
        if step % save_every == 0 or last or stopping:
            trained = {"trained": reward_model.trained_weights(raw_model, base)}
            run.save(
                parts, step, tokenizer, config, order, skipped, val_loss, log, base, reward_model.write_model, trained
            )
        mark_time += time.perf_counter() - pause  # evaluations and saves are not training
        if stopping:
            break

    saved = run.finish_saving(parts, log)
    if stopping:
        how = "the same command continues" if saved else "the last save failed"
        log.print(f"stopped by a signal after step {step}; {how}")
    batches.close()
    log.close()
    if world.is_main:
        run_card.write(out_dir, __file__, config, corpus.report(), torch_device, world_size)
    ranks.close()
    sys.exit(stop_signal.exit_code if stopping else int(not saved))
