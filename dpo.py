"""Preference tuning: of two answers to a prompt the model learns to prefer the chosen one.

python dpo.py config/debug_dpo.py                                                  # CPU, seconds, needs nothing
python dpo.py config/dpo.py --init_from=out/sft --data=pairs.jsonl                 # all weights
torchrun --standalone --nproc_per_node=4 dpo.py config/dpo.py --init_from=out/sft --data='a.jsonl=0.5,b=0.5'

It begins with a checkpoint of sft.py or any Hugging Face Llama or Qwen3 directory, and compares the log-probability of
an answer, its <|im_end|> included, with what it was at the beginning: the reference. These numbers are computed once,
into out_dir/reference.safetensors. The loss is the mean over the pairs of a whole step.
"""

import copy
import gc
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import ddp as dist
import prepare
from configurator import configure
from groundup.align.losses import (  # fmt: skip
    METRICS,
    REFERENCE_FREE,
    about_reference,
    answer_logps,
    check_losses,
    compute_reference,
    losses_and_metrics,
    open_reference,
    reference_logps,
    save_reference,
)
from groundup.errors import UserError
from groundup.tokens.batches import Batches
from groundup.tokens.pairs import PairBatch, PairCorpus
from groundup.train import checkpoint, ranks, run, run_card
from groundup.train import plan as memory_plan
from groundup.train.device import peak_flops, peak_memory_gib, seed_everything
from groundup.train.log import RunLog, clock
from groundup.train.lora import LoRAConfig, set_trainable, trainable_table
from groundup.train.optim import Optimizer, learning_rate_at, stays_whole
from groundup.train.plan import flops_per_token, parameter_table
from groundup.train.signals import StopSignal
from model import ModelConfig, Transformer
from tokenizer import Tokenizer, chat_ready

# ---- config: override with a config file or --key=value; see --help -------------------------------------------------
out_dir = "out/dpo"  # run directory: config.py, log.jsonl, reference.safetensors, step_*/
init_from = "out/sft"  # run, checkpoint or Hugging Face Llama/Qwen3 directory; "" = a tiny new model, to try it
data = "data/pairs"  # pairs: files, a directory of prepare.py --kind=preference; mixed 'a.jsonl=0.7,data/b=0.3'
val_data = ""  # likewise, for validation; "" = the directory's own, or val_fraction of the pairs
val_fraction = 0.02  # of the pairs, by their prompts; for data that have no validation of their own
resume = "auto"  # auto = continue if out_dir has a checkpoint; never = refuse a non-empty out_dir; must
overwrite = False  # with resume='never': delete what out_dir holds
seed = 1337  # order of the data, dropout, adapters
# loss
loss = "sigmoid"  # sigmoid | cdpo | robust | hinge | ipo | sigmoid_norm | simpo | orpo (see pair_losses)
beta = 0.1  # how much a log-ratio counts; sigmoid_norm and simpo, whose are means per token, want 2
label_smoothing = 0.0  # cdpo, robust: the share of pairs that are thought to be the wrong way round, below 0.5
gamma = 0.5  # simpo: the margin by which the chosen answer should win
nll_weight = 0.0  # adds this times the chosen answer's loss per token, which keeps it likely; 0.1 to 1 is usual
nll_prompt = False  # that loss, and orpo's, over the prompt too
reference = "precomputed"  # precomputed | model (a second one, in memory) | adapter_off (trainable='lora')
reference_file = ""  # precomputed log-probabilities of another run; "" = out_dir/reference.safetensors
# what is trained
trainable = "all"  # all, or some of embed, lm_head, lora, regular expressions of names: 'embed,lm_head,lora'
lora_rank = 16  # of the matrices that are added
lora_alpha = 32.0  # an adapter's result is multiplied by lora_alpha / lora_rank
lora_dropout = 0.0  # on what the adapters read
lora_modules = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"  # matrices that get one
dropout = 0.0  # above 0 the log-ratios are noise from the first step on
# data
block_size = 1024  # most tokens of a prompt and an answer; a pair that is longer is left out
epochs = 1.0  # passes over the pairs of all sources
max_steps = 0  # 0 = as many as epochs takes
max_epochs = ""  # most epochs of each source, or 'data/a=2,data/b=8'; a source used up leaves its share to the others
# batch
batch_size = 4  # pairs, so twice as many rows, per rank and micro-step; 0 = as many as fit, needs total_batch_pairs
total_batch_pairs = 0  # batch_size x micro-steps x ranks; 0 = one micro-step on each rank
# optimizer
optimizer = "adamw"  # adamw | muon (for the blocks' matrices)
learning_rate = 1e-6  # peak; adapters take ten times as much
min_lr = 0.0  # at the end of the schedule
schedule = "cosine"  # constant | cosine | linear | wsd | wcsd (see optim.py)
warmup_steps = 0  # steps of rising learning rate
warmup_fraction = 0.1  # > 0: warm-up as a fraction of max_steps, instead of warmup_steps
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
eval_steps = 50  # batches of batch_size pairs, over all ranks; 0 = all of the validation pairs
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
DEBUG_DATA = "data/debug/dpo.jsonl"


def check_config(config: dict, world_size: int) -> int:
    """Pairs per step over all ranks. Raises ConfigError; nothing exists yet when it does."""
    run.check_config(config | {"total_batch_tokens": 0, "batch_size": config["batch_size"] or 1})
    check_losses(config)
    run.check_choice(config, "reference", ("precomputed", "model", "adapter_off"))
    for key in ("max_steps", "val_fraction", "total_batch_pairs"):
        run.check_least(config, key, 0)
    if config["reference"] == "adapter_off" and config["trainable"].strip() != "lora":
        raise UserError(f"config: reference='adapter_off' needs trainable='lora', got {config['trainable']!r}")
    if not config["max_steps"] and not 0 < config["epochs"] < math.inf:
        raise UserError(f"config: epochs must be above 0 where max_steps is 0, got {config['epochs']}")
    return run.count_pairs(config, world_size)


def memory(
    cfg: ModelConfig, adapters: LoRAConfig, world_size: int, device: torch.device, dtype: torch.dtype, config: dict
) -> dict[str, float]:
    """{part: bytes} of what a rank will hold at most."""
    trained = trainable_table(cfg, config["trainable"], adapters)
    rows = config | {"batch_size": 2 * config["batch_size"]}
    twice = config["reference"] == "model" and config["loss"] not in REFERENCE_FREE
    reference = {"reference": 4 * parameter_table(cfg)["total"]} if twice else {}
    return memory_plan.memory_parts(cfg, rows, trained, False, world_size, device, dtype, reference)


def plan(
    cfg: ModelConfig, config: dict, adapters: LoRAConfig, world_size: int, device: torch.device, dtype: torch.dtype,
    peak: float, epochs: str,
) -> str:  # fmt: skip
    """What this run will take at most, as text: parameters, steps and `epochs` of the data, memory by part, time."""
    trained = trainable_table(cfg, config["trainable"], adapters)
    tokens = 2 * config["total_batch_pairs"] * config["max_steps"] * config["block_size"]
    seconds = tokens * flops_per_token(cfg, config["block_size"]) / (peak * world_size)
    return "\n".join([
        f"parameters  {trained['total']:,}, trained {trained['trainable']:,} ({config['trainable']})",
        f"batch       {config['total_batch_pairs']} pairs per step, {config['max_steps']:,} steps, {epochs}",
        memory_plan.describe_parts(memory(cfg, adapters, world_size, device, dtype, config)),
        f"time        below {clock(seconds / 0.4)} at 40 % of {world_size} x {peak / 1e12:,.2f} TFLOP/s",
    ])  # fmt: skip


@torch.no_grad()
def evaluate(
    model: Transformer, batches: Mapping[str, Iterable[PairBatch]], shares: list[float], config: Mapping,
    reference_of: Callable[[PairBatch], Tensor], device: torch.device, dtype: torch.dtype,
) -> dict[str, float]:  # fmt: skip
    """Loss and METRICS, means over validation pairs that the ranks share out; if there are several sources, the loss
    and the accuracy of each, and the rest of such a mixture."""
    model.eval()
    sums = torch.zeros(len(batches), 2 + len(METRICS), dtype=torch.float64)  # pairs, loss, metrics
    for source, of_source in enumerate(batches.values()):
        for batch in of_source:
            batch = batch.to(device)
            logps, n_tokens = answer_logps(model, batch, device, dtype, config["nll_prompt"])
            losses, metrics = losses_and_metrics(logps, reference_of(batch), n_tokens, config)
            found = torch.cat((torch.ones_like(losses)[None], losses[None], metrics)).sum(1)
            sums[source] += found.double().cpu()
    ranks.all_reduce_sum(sums)
    model.train()
    means = sums[:, 1:] / sums[:, :1].clamp(min=1)
    mixed = (torch.tensor(shares, dtype=torch.float64)[:, None] * means).sum(0).tolist()
    scores = dict(zip(("val_loss", *METRICS), mixed, strict=True))
    if len(batches) > 1:
        for name, of_source in zip(batches, means.tolist(), strict=True):
            scores |= {f"val_loss/{name}": of_source[0], f"accuracy/{name}": of_source[4]}
    return scores


def report_evaluation(log: RunLog, step: int, scores: dict) -> None:
    log.write("eval", step, scores)
    parts = [f"val loss {scores['val_loss']:.4f}", f"accuracy {100 * scores['rewards/accuracies']:.1f}%"]
    parts += [f"margin {scores['rewards/margins']:.4f}", f"chosen {scores['logps/chosen']:.2f} nats"]
    parts += [f"rejected {scores['logps/rejected']:.2f} nats"]
    log.print(f"step {step:6d}/{log.max_steps} | " + " | ".join(parts))


if __name__ == "__main__":
    config = configure(globals())
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    pairs_per_step = config["total_batch_pairs"] = check_config(config, world_size)
    torch_device, torch_dtype = run.choose_device_and_dtype(config)
    peak = peak_tflops * 1e12 or peak_flops(torch_device, torch_dtype)

    # ---- weights, tokenizer, pairs: mistakes show here, before a process group or out_dir exists
    source = checkpoint.resolve(init_from) if init_from else None
    if source is None and data != DEBUG_DATA:
        raise UserError("config: init_from: give the run, checkpoint or Hugging Face directory to begin with")
    if data == DEBUG_DATA:
        prepare.make_debug_rows(Path(data), prepare.debug_pairs)
    tokenizer = chat_ready(Tokenizer.load(checkpoint.tokenizer_dir(source or Path(data).parent)))
    n_known = run.count_known_ids(source, tokenizer, "the chat tokenizer") if source else 0
    cfg = run.tuned_architecture(config, source, tokenizer.vocab_size)
    adapters = LoRAConfig(lora_rank, lora_alpha, lora_dropout, tuple(lora_modules.split(",")))
    run.check_trainable(config, source, tokenizer.vocab_size - n_known)
    corpus = PairCorpus(data, tokenizer, block_size, seed, val_data, val_fraction)
    if not corpus.val:
        raise UserError("config: no pair is held out for validation; raise val_fraction or give val_data")
    n_train = sum(pairs.n_rows for pairs in corpus.train)
    memory_of = partial(memory, cfg, adapters, world_size, torch_device, torch_dtype)
    samples = pairs_per_step // world_size  # of each rank
    config["batch_size"], chosen = memory_plan.fit_batch_size(config, samples, memory_of, torch_device)
    asked = dict(config)
    max_steps = config["max_steps"] = max_steps or math.ceil(epochs * n_train / pairs_per_step)
    mixture = corpus.order(seed, pairs_per_step, max_steps, max_epochs)
    order = {key: config[key] for key in DATA_KEYS} | corpus.record()
    order |= {key: config[key] for key in ORDER_KEYS if config[key] != DATA_DEFAULTS[key]}
    kind = "none" if loss in REFERENCE_FREE else reference
    if source and kind in ("model", "precomputed"):  # a run that goes on must not be compared with other weights
        order["reference_weights"] = checkpoint.weights_key(source)
    if rank == 0:
        epochs_text, warnings = corpus.describe(mixture, max_steps * pairs_per_step)
        text = plan(cfg, config, adapters, world_size, torch_device, torch_dtype, peak, epochs_text)
        print("\n".join([*corpus.report(), text, *chosen, *warnings]), flush=True)
    if plan_only:
        sys.exit(0)
    resume_from = run.find_resume(config, cfg, verbose=rank == 0)
    state, rank_state = checkpoint.load_train_state(resume_from, rank) if resume_from else ({}, {})
    start_step = state.get("step", 0)
    if resume_from:
        saved = {key: order[key] for key in ("reference_weights",) if key in order} | state["order"]  # it may lack that
        run.check_data_order(saved, order, DATA_DEFAULTS, resume_from, start_step)
        run.check_same_parts(resume_from, state["config"], config)
        if rank == 0:
            print(run.describe_resume(resume_from, start_step, state["config"], config), flush=True)
    reference_path = Path(reference_file or f"{out_dir}/reference.safetensors")
    table, about = None, {}
    if kind == "precomputed":
        about = about_reference(source, config, cfg, corpus, str(torch_dtype))
        if reference_file or resume != "never":  # else what is there is about to be deleted
            table = open_reference(reference_path, about, corpus.n_pairs)

    # ---- processes
    stop_signal = StopSignal()
    world = ranks.init(torch_device.type, timeout_s, ddp_debug)
    batch_size = memory_plan.agree_batch_size(batch_size, config["batch_size"], verbose=rank == 0)
    config["batch_size"] = asked["batch_size"] = batch_size
    accum_steps = pairs_per_step // (batch_size * world_size)
    run.check_ranks_agree({**config, **order, **about, "step": start_step, "dtype": str(torch_dtype)})
    must_compute = ranks.any_rank(kind == "precomputed" and table is None)
    if world.is_main:
        run.prepare_out_dir(asked, "dpo")

    # ---- model, reference, optimizer
    seed_everything(seed)
    raw_model = Transformer(cfg)
    if source and (must_compute or kind == "model" or not resume_from):
        run.load_start(raw_model, source, n_known)
    first_model = copy.deepcopy(raw_model).requires_grad_(False).to(torch_device) if kind == "model" else raw_model
    set_trainable(raw_model, trainable, adapters)
    base = run.frozen_base(resume_from, source)
    raw_model.to(torch_device).activation_checkpointing = activation_checkpointing
    if compile:
        torch._dynamo.config.recompile_limit = 64  # eight lengths, each with gradients and without
        for one in {raw_model, first_model}:
            one.compile_blocks(partial(torch.compile, dynamic=False))
    model = raw_model  # compiled block by block, so it is the same object
    if must_compute:
        table = compute_reference(model, corpus, batch_size, world, torch_device, torch_dtype)
        if world.is_main:
            save_reference(reference_path, table, about)
    table = None if table is None else table.to(torch_device)
    if resume_from:
        checkpoint.load_weights(raw_model, resume_from)
    scaler = torch.amp.GradScaler(torch_device.type, enabled=torch_dtype == torch.float16)
    warmup = round(warmup_fraction * max_steps) if warmup_fraction else warmup_steps
    compress_from = warmup if compress_start_step < 0 else compress_start_step
    hook = dist.make_hook(compress, compress_rank, compress_from, compress_embedding, seed, scaler)
    ddp = dist.DDP(raw_model, bucket_mb, hook, overlap_step, zero1, keep_whole=partial(stays_whole, optimizer))
    opt = Optimizer(
        ddp.buckets, optimizer, (beta1, beta2), weight_decay=weight_decay, momentum=momentum,
        muon_dtype=torch.float32 if torch_dtype == torch.float32 else torch.bfloat16,
    )  # fmt: skip

    # ---- state: fresh, or exactly as it was
    seed_everything(seed + 1_000_003 * start_step, world.rank)  # dropout differs by rank
    skipped = torch.tensor(state.get("skipped", [0.0, 0.0]), device=torch_device)  # in all, in a row
    parts = run.Parts(raw_model, opt, scaler, hook, ddp, world, torch_device, run.Writer(async_save, timeout_s))
    if resume_from:
        run.restore(parts, resume_from, state, rank_state, compress)
    state = rank_state = None  # as large as the optimizer's
    batches = Batches(
        corpus.train, mixture, block_size, batch_size, accum_steps, world.rank, world_size, torch_device, start_step,
        load=corpus.load, valid=corpus.valid,
    )  # fmt: skip
    val = partial(corpus.val_batches, batch_size, eval_steps, world.rank, world_size)
    shares = corpus.val_shares()
    log = RunLog(out_dir, max_steps, start_step, world.is_main, tensorboard)
    stopping = False

    def reference_of(batch: PairBatch) -> Tensor:
        """Log-probabilities of its answers by the reference, (2, B); 0 where the loss has none."""
        if kind == "none":
            return torch.zeros(2, len(batch.number), device=torch_device)
        if kind == "precomputed":
            return table[batch.number].T
        return reference_logps(first_model, batch, torch_device, torch_dtype)

    def evaluate_now(step: int) -> float:
        """The validation loss; all scores go to the log."""
        scores = evaluate(model, val(), shares, config, reference_of, torch_device, torch_dtype)
        report_evaluation(log, step, scores)
        return scores["val_loss"]

    # ---- the loop
    gc.collect()
    gc.freeze()  # nothing made so far becomes garbage: the collector need not walk it again
    if start_step == 0:
        evaluate_now(0)
    mark_time, mark_step = time.perf_counter(), start_step
    n_tokens_seen = torch.zeros((), dtype=torch.float64)  # of this rank since the last log line, padding too
    for step in range(start_step + 1, max_steps + 1):
        lr = learning_rate_at(
            step, schedule, learning_rate, min_lr, warmup, decay_steps or max_steps, decay_fraction, stable_lr
        )
        n_pairs = batches.valid_tokens(step - 1)  # over all micro-steps and ranks
        sums = torch.zeros(1 + len(METRICS), device=torch_device)  # of the loss and the metrics of this step's pairs
        ddp.expect_step(opt, lr)
        for micro_step in range(accum_steps):
            ddp.sync = micro_step == accum_steps - 1  # talk once per step, during the last backward
            batch = batches.next()
            logps, n_tokens = answer_logps(model, batch, torch_device, torch_dtype, nll_prompt)
            losses, metrics = losses_and_metrics(logps, reference_of(batch), n_tokens, config)
            loss_of_micro = losses.sum() * (world_size / n_pairs)  # ddp averages over ranks
            scaler.scale(loss_of_micro).backward()  # full buckets start their all-reduce inside this call
            sums += torch.cat((losses.detach()[None], metrics)).sum(1) / n_pairs
            n_tokens_seen += batch.x.numel()
        # >>> optimizer step: identical in pretrain, sft, dpo, reward, rl (tests/test_repo.py)
        grad_norm = ddp.step(opt, lr=lr, clip=grad_clip, scaler=scaler)
        skipped = torch.stack((skipped[0] + ddp.found_inf, (skipped[1] + 1) * ddp.found_inf))
        # <<< optimizer step
        log.advance()

        last, stopping = step == max_steps, ranks.any_rank(stop_signal.received > 0)
        if step % log_every == 0 or last or stopping:
            mean_loss, *means = ranks.all_reduce_sum(sums.clone()).tolist()  # waits for the device, so that
            seconds = time.perf_counter() - mark_time  # this clock is true
            tokens_per_s = ranks.all_reduce_sum(n_tokens_seen).item() / seconds
            metrics = dict(zip(METRICS, means, strict=True))
            values = {
                "loss": mean_loss, "lr": lr, "grad_norm": grad_norm.item(), "tokens_per_s": tokens_per_s,
                "mfu": tokens_per_s * flops_per_token(cfg, block_size) / peak / world_size,
                "memory_gib": peak_memory_gib(torch_device), "skipped": int(skipped[0]),
                "epoch": float(mixture.epochs(step * pairs_per_step).max()),
                "pairs_per_s": (step - mark_step) * pairs_per_step / seconds,
                "accuracy": metrics["rewards/accuracies"], "margin": metrics["rewards/margins"],
            }  # fmt: skip
            log.train(step, values | metrics, seconds / (step - mark_step))
            if skipped[1] >= max_skipped:
                run.stop_not_finite(parts, log, step, int(skipped[1]), sums[0], batches)
            mark_time, mark_step = time.perf_counter(), step
            n_tokens_seen.zero_()
        pause, val_loss = time.perf_counter(), None
        if step % eval_every == 0 or step % save_every == 0 or last or stopping:
            ddp.flush()  # updates that wait for the next forward
        if step % eval_every == 0 or last:
            val_loss = evaluate_now(step)
        if step % save_every == 0 or last or stopping:
            run.save(parts, step, tokenizer, config, order, skipped, val_loss, log, base)
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
