"""Pretraining: next-token prediction on prepared token files.

python pretrain.py config/debug.py                                       # CPU, seconds, makes its own data
torchrun --standalone --nproc_per_node=4 pretrain.py config/small.py     # 4 GPUs, or 4 CPU processes
python pretrain.py config/llama_1b.py --plan_only=True                   # parameters, FLOPs, memory, time, no more
"""

if __name__ == "__main__":  # before the imports, which take seconds: Ctrl-C is one line from here on
    from groundup.errors import end_in_one_line

    end_in_one_line()

import dataclasses
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from configurator import configure
from groundup.demo import debug_data
from groundup.errors import UserError
from groundup.generate.completion import begin_prompt, never_sampled
from groundup.generate.engine import generate
from groundup.generate.sampling import SamplingParams
from groundup.tokens.batches import Batches, TextCorpus
from groundup.tokens.mixture import parse_data_dir
from groundup.train import checkpoint, ranks, run
from groundup.train import plan as memory_plan
from groundup.train.base import adapters_of, check_trainable, count_known_ids, frozen_base, load_start, new_model
from groundup.train.device import autocast, peak_flops, seed_everything
from groundup.train.fsdp import in_step
from groundup.train.log import RunLog
from groundup.train.lora import set_trainable
from groundup.train.optim import learning_rate_at
from groundup.train.plan import flops_per_token, parameter_table
from groundup.train.settings import *  # noqa: F403
from groundup.train.signals import StopSignal
from model import IGNORE, ModelConfig, Transformer
from tokenizer import Tokenizer

# ---- config: override with a config file or --key=value; see --help -------------------------------------------------
out_dir = "out/pretrain"  # run directory: config.py, log.jsonl, step_*/
data_dir = "data/demo"  # prepared by prepare.py; a mixture 'data/a=0.7,data/b=0.3', stages '0: data/a; 8000: data/b'
val_data = ""  # prepared directories whose validation splits are evaluated, 'data/zh,data/code'; "" = those of data_dir
init_from = ""  # "" = new weights; else a run, checkpoint or Hugging Face directory (architecture, weights)
# model
n_layer = 6
n_head = 6
n_kv_head = 0  # 0 = n_head; fewer = grouped-query attention
n_embd = 384
head_dim = 0  # 0 = n_embd / n_head
ffn_dim = 0  # 0 = 8/3 n_embd rounded up to 64
block_size = 256  # tokens per sequence
vocab_size = 0  # 0 = the tokenizer's
rope_theta = 10000.0
norm_eps = 1e-5
qk_norm = False  # RMSNorm on queries and keys (Qwen3)
tie_embeddings = True
dropout = 0.0
doc_mask = False  # attention stays within a document
lora_dropout = 0.0  # on the input of the adapters
# data
pack = False  # rows that begin with a document, packed by prepare.py --pack=block_size, instead of windows
max_epochs = ""  # most epochs of each source, or 'data/a=2,data/b=8'; a source used up leaves its share to the others
# batch
batch_size = 16  # sequences per rank and micro-step
total_batch_tokens = 0  # tokens per step, all ranks and micro-steps; 0 = one micro-step on each rank
max_steps = 2000
# optimizer
optimizer = "muon"
learning_rate = 1e-3  # peak
min_lr = 1e-4
warmup_fraction = 0.05
weight_decay = 0.1
# evaluation, log, checkpoints
eval_every = 250
eval_steps = 50  # batches of batch_size windows, over all ranks; 0 = the whole validation split
stop_after = 0  # stop when so many evaluations in a row have not been better; 0 = never
sample_prompts = ""  # continued at each evaluation; several separated by |

ARCHITECTURE = [f.name for f in dataclasses.fields(ModelConfig) if f.name in globals()]
DEFAULTS = {key: globals()[key] for key in ARCHITECTURE}
# These decide which tokens a step sees; a resumed run must not change them.
DATA_KEYS = ("seed", "block_size", "total_batch_tokens", "max_epochs")


def choose_architecture(config: dict, source: Path | None, token_vocab: int) -> ModelConfig:
    """Return the architecture of the checkpoint `source`, with rows for all token ids; without one, that of the
    settings. Raise UserError where they or the tokenizer disagree."""
    given = {key: config[key] for key in ARCHITECTURE}
    if source is None:
        cfg = ModelConfig(**given | {"vocab_size": given["vocab_size"] or token_vocab})
    else:
        cfg = checkpoint.load_config(source)
        cfg = dataclasses.replace(cfg, vocab_size=max(cfg.vocab_size, token_vocab))
        for key in set(ARCHITECTURE) - {"block_size", "dropout"}:
            if given[key] != DEFAULTS[key] and given[key] != getattr(cfg, key):
                raise UserError(f"config: {key}={given[key]} but {source} has {getattr(cfg, key)}; leave {key} out")
        cfg = dataclasses.replace(cfg, block_size=given["block_size"], dropout=given["dropout"])
    if token_vocab > cfg.vocab_size:
        raise UserError(f"config: vocab_size={cfg.vocab_size} is less than the data's {token_vocab} token ids")
    return cfg


def check_config(config: dict, world_size: int) -> int:
    """Return the tokens per step over all ranks. Raise UserError; nothing exists yet when it does."""
    run.check_config(config, {"max_steps": 1, "stop_after": 0})
    return run.count_per_step(config, "total_batch_tokens", block_size=config["block_size"], world_size=world_size)


def plan(
    cfg: ModelConfig, config: dict, world_size: int, device: torch.device, dtype: torch.dtype,
    peak: float, epochs: str,
) -> str:  # fmt: skip
    """Return what this run will take, as text: parameters, tokens, `epochs` of the data, FLOPs, memory, time."""
    step_tokens, B, T = config["total_batch_tokens"], config["batch_size"], config["block_size"]
    params, tokens, flops = parameter_table(cfg), step_tokens * config["max_steps"], flops_per_token(cfg, T)
    micro = f"{B} sequences x {T} tokens x {step_tokens // (B * T * world_size)} micro-steps x {world_size} ranks"
    batch = f"{step_tokens:,} tokens per step = {micro}"
    shared = memory_plan.describe(cfg, config, batch, tokens, world_size, device, dtype, peak, config["doc_mask"])
    return "\n".join([
        shared,
        "of these    " + ", ".join(f"{part} {n:,}" for part, n in params.items() if n and part != "total"),
        f"tokens      {tokens:,} in {config['max_steps']:,} steps, {tokens / params['total']:.1f} per parameter"
        + (f", {epochs}" if epochs else ""),
        f"compute     {flops:.3e} FLOPs per token, {tokens * flops:.3e} in all",
    ])  # fmt: skip


@torch.no_grad()
def evaluate(
    model: Transformer, batches: Mapping[str, Iterable[tuple[torch.Tensor, torch.Tensor]]], batch_size: int,
    shares: list[float], token_bytes: torch.Tensor, device: torch.device, dtype: torch.dtype,
) -> dict[str, float]:  # fmt: skip
    """Return the mean loss over validation windows, which the ranks divide: nats per token, and bits per byte of text.
    With several sources: of each, and of a text that mixes them in these shares."""
    model.eval()
    sums = torch.zeros(len(batches), 3, dtype=torch.float64)  # nats, tokens, bytes
    for source, of_source in enumerate(batches.values()):
        for x, y in in_step(model, of_source):
            counts = [y.numel(), token_bytes[y].sum().item()]
            missing = (0, 0, 0, batch_size - len(x))  # fill the last batch up: another shape would be compiled again
            x, y = F.pad(x, missing), F.pad(y, missing, value=IGNORE)
            with autocast(device, dtype):
                nats = model(x.to(device), y.to(device))
            sums[source] += torch.tensor([nats.item(), *counts], dtype=torch.float64)
    ranks.all_reduce_sum(sums)
    model.train()
    mixed = (torch.tensor(shares, dtype=torch.float64)[:, None] * sums / sums[:, 1:2]).sum(0)
    of = {"": mixed} | ({f"/{name}": sums[k] for k, name in enumerate(batches)} if len(batches) > 1 else {})
    losses = {f"val_loss{name}": (nats / tokens).item() for name, (nats, tokens, _) in of.items()}
    return losses | {f"val_bpb{name}": (nats / math.log(2) / n_bytes).item() for name, (nats, _, n_bytes) in of.items()}


def sample_texts(model: Transformer, tokenizer: Tokenizer, prompts: str, seed: int) -> list[str]:
    """Return continuations of the prompts (separated by |), drawn with the same random numbers at each evaluation."""
    ids = [begin_prompt(tokenizer, prompt) for prompt in prompts.split("|") if prompt]
    how = {"max_new_tokens": 64, "temperature": 0.8, "top_p": 0.95, "eos_ids": tokenizer.stop_ids}
    how["banned_ids"] = never_sampled(tokenizer, model.cfg.vocab_size)
    results = generate(model, None, ids, SamplingParams(**how, seed=seed)) if ids else []
    return [tokenizer.decode(result.prompt_ids + result.completions[0].ids) for result in results]


if __name__ == "__main__":
    config = configure(globals())
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    tokens_per_step = config["total_batch_tokens"] = check_config(config, world_size)
    rows_per_step = tokens_per_step // block_size
    torch_device, torch_dtype = run.choose_device_and_dtype(config)
    peak = peak_tflops * 1e12 or peak_flops(torch_device, torch_dtype)

    # ---- data, architecture, checkpoint: mistakes show here, before a process group or out_dir exists
    source = checkpoint.resolve(init_from) if init_from else None
    describe = partial(plan, config=config, world_size=world_size, device=torch_device, dtype=torch_dtype, peak=peak)
    paths = [Path(path) for stage in parse_data_dir(data_dir) for path in stage.weights]
    if plan_only and (vocab_size or source) and not any(path.exists() for path in paths):
        print(describe(choose_architecture(config, source, 0), epochs=""))
        sys.exit(0)
    for path in paths:
        if path.name == "debug" and not path.exists():
            debug_data.make_debug_data(path)
    corpus = TextCorpus(data_dir, block_size, pack, val_data)
    tokenizer = Tokenizer.load(corpus.dir)
    corpus.train[0].check_tokenizer(tokenizer.fingerprint())
    mixture = corpus.order(seed, rows_per_step, max_steps, max_epochs)
    n_known = count_known_ids(source, tokenizer, data_dir) if source else 0
    cfg = choose_architecture(config, source, tokenizer.vocab_size)
    check_trainable(config, source, tokenizer.vocab_size - n_known)
    checkpoint.check_saves(cfg, tokenizer)
    order = {key: config[key] for key in DATA_KEYS} | corpus.record()
    if rank == 0:
        epochs, warnings = corpus.describe(mixture, max_steps * rows_per_step)
        print("\n".join([describe(cfg, epochs=epochs), *warnings]), flush=True)
    if plan_only:
        sys.exit(0)
    resumed = run.find_checkpoint(config, cfg, order)

    # ---- processes, model, optimizer, state
    stop_signal = StopSignal()
    world = run.join(config, order, resumed.step, torch_device, torch_dtype)
    accum_steps = rows_per_step // (batch_size * world_size)
    seed_everything(seed)
    raw_model = new_model(Transformer, cfg, config, torch_dtype)
    if source and not resumed.path:
        load_start(raw_model, source, n_known, tokenizer)
    set_trainable(raw_model, trainable, adapters_of(config))
    if doc_mask:
        raw_model.document_id, raw_model.most_documents = tokenizer.eot_id, corpus.most_documents()
    base = frozen_base(resumed.path, source)
    parts = run.set_up(config, raw_model, world, torch_device, torch_dtype, lengths_vary=False)
    model, opt, scaler, ddp = raw_model, parts.opt, parts.scaler, parts.ddp  # compiled in place: the same object
    skipped = run.start(parts, resumed, config, __file__)
    batches = Batches(
        corpus.train, mixture, block_size, batch_size, accum_steps, world.rank, world_size, torch_device, resumed.step
    )
    # A whole validation split in batches of 4,096 tokens takes 0.8 of the time that it takes in batches of 1,024.
    val_rows = batch_size if eval_steps else max(batch_size, 4096 // block_size)
    val = partial(corpus.val_batches, val_rows, eval_steps, world.rank, world_size)
    shares = corpus.val_shares()
    stages = mixture.changes(rows_per_step) if len(corpus.names) > 1 else {}
    token_bytes = torch.from_numpy(tokenizer.token_byte_lengths())
    log = RunLog(out_dir, max_steps, resumed.step, world.is_main, tensorboard)
    save = partial(run.save, parts, tokenizer=tokenizer, config=config, order=order, base=base, log=log)

    def evaluate_now(step: int) -> float:
        """Log validation losses and samples, rank the checkpoint of this step by its loss, and return it."""
        losses = evaluate(model, val(), val_rows, shares, token_bytes, torch_device, torch_dtype)
        samples = sample_texts(raw_model, tokenizer, sample_prompts, seed)
        sources = [key.partition("/")[2] for key in losses if key.startswith("val_loss/")]
        line = [f"val loss {losses['val_loss']:.4f}", f"{losses['val_bpb']:.4f} bits per byte"]
        line += [f"{name} {losses[f'val_loss/{name}']:.4f}, {losses[f'val_bpb/{name}']:.4f}" for name in sources]
        log.report(step, losses, line, [f"    {text!r}" for text in samples])
        run.rank(parts, step, losses["val_loss"], config, log)
        return losses["val_loss"]

    def evaluations_since_best() -> int:  # the same on all ranks
        return int(ranks.all_reduce_sum(torch.tensor(float(log.since_best()))).item())

    # ---- the loop
    if ranks.any_rank(log.lacks_evaluation(eval_every)):
        evaluate_now(resumed.step)
    stop_signal.begin()
    warmup, stopping = run.warmup_of(config), False
    ended = bool(resumed.step and stop_after) and evaluations_since_best() >= stop_after
    mark_time, mark_step = time.perf_counter(), resumed.step
    for step in range(resumed.step + 1, 0 if ended else max_steps + 1):
        lr = learning_rate_at(step, schedule, learning_rate, min_lr, warmup, decay_steps or max_steps, decay_fraction)
        if step in stages:
            log.write("stage", step, {"weights": stages[step]})
            weights = ", ".join(f"{100 * share:.1f} % {name}" for name, share in stages[step].items())
            log.print(f"step {step:6d}/{max_steps} | samples from here on: {weights}")
        n_targets = batches.valid_tokens(step - 1)  # over all micro-steps and ranks
        loss_sum = torch.zeros((), device=torch_device)
        ddp.expect_step(opt, lr)
        for micro_step in range(accum_steps):
            ddp.sync = micro_step == accum_steps - 1  # talk once per step, during the last backward
            x, y = batches.next()  # (B, T), (B, T)
            with autocast(torch_device, torch_dtype):
                loss = model(x, y) * (world_size / n_targets)  # the model returns a sum; ddp averages over ranks
            scaler.scale(loss).backward()  # full buckets start their all-reduce inside this call
            loss_sum += loss.detach()
        # >>> optimizer step: identical in pretrain, sft, dpo, reward, rl (tests/test_repo.py)
        grad_norm = ddp.step(opt, lr=lr, clip=grad_clip, scaler=scaler)
        skipped = torch.stack((skipped[0] + ddp.found_inf, (skipped[1] + 1) * ddp.found_inf))
        # <<< optimizer step
        log.advance()

        last, stopping = step == max_steps, ranks.any_rank(stop_signal.received > 0)
        if step % log_every == 0 or last or stopping:
            mean_loss = ranks.all_reduce_sum(loss_sum.clone()).item() / world_size  # waits for the device, so that
            step_s = (time.perf_counter() - mark_time) / (step - mark_step)  # this clock is true
            tokens_per_s = tokens_per_step / step_s
            values = {"loss": mean_loss, "tokens": step * tokens_per_step}
            values |= run.figures(parts, lr, grad_norm, skipped, tokens_per_s, flops_per_token(cfg, block_size), peak)
            log.train(step, values | corpus.tokens_seen(mixture, step * rows_per_step), step_s)
            if skipped[1] >= max_skipped:
                run.stop_not_finite(parts, log, step, int(skipped[1]), loss_sum, batches)
            mark_time, mark_step = time.perf_counter(), step
        pause = time.perf_counter()
        saving, evaluating = step % save_every == 0 or last or stopping, step % eval_every == 0 or last
        if saving or evaluating:
            ddp.flush()  # updates that wait for the next forward
        if saving:
            save(step, skipped)
        if evaluating:  # after the save: it may run out of memory
            val_loss = evaluate_now(step)
            n_worse = evaluations_since_best() if stop_after else 1
            ended = bool(stop_after) and n_worse >= stop_after
            if not saving and (ended or (n_worse == 0 and keep_best)):
                save(step, skipped)
                run.rank(parts, step, val_loss, config, log)
        mark_time += time.perf_counter() - pause  # evaluations and saves are not training
        if stopping or ended:
            break

    why = f"no better val_loss in {stop_after} evaluations" if ended else ""
    if ended:
        log.print(f"{why}: that is the end")
    run.finish(parts, log, config, __file__, corpus.report(), stop_signal if stopping else None, batches, why)
