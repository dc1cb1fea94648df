"""Pretraining: next-token prediction on prepared token files.

python pretrain.py config/debug.py                                       # CPU, seconds, makes its own data
torchrun --standalone --nproc_per_node=4 pretrain.py config/small.py     # 4 GPUs, or 4 CPU processes
python pretrain.py config/llama_1b.py --plan_only=True                   # parameters, FLOPs, memory, time, no more
"""

import dataclasses
import gc
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import ddp as dist
import prepare
from configurator import configure
from groundup.errors import UserError
from groundup.generate.engine import begin_prompt, generate, never_sampled
from groundup.generate.sampling import SamplingParams
from groundup.tokens.batches import Batches, TextCorpus
from groundup.tokens.mixture import COMPETENCE_SCHEDULES, parse_data_dir
from groundup.train import checkpoint, ranks, run, run_card
from groundup.train import plan as memory_plan
from groundup.train.device import autocast, peak_flops, peak_memory_gib, seed_everything
from groundup.train.log import RunLog, clock
from groundup.train.lora import LoRAConfig, set_trainable, trainable_table
from groundup.train.optim import Optimizer, learning_rate_at, stays_whole
from groundup.train.plan import flops_per_token, parameter_table
from groundup.train.signals import StopSignal
from model import IGNORE, ModelConfig, Transformer
from tokenizer import Tokenizer

# ---- config: override with a config file or --key=value; see --help -------------------------------------------------
out_dir = "out/pretrain"  # run directory: config.py, log.jsonl, step_*/
data_dir = "data/demo"  # prepared by prepare.py; a mixture 'data/a=0.7,data/b=0.3', stages '0: data/a; 8000: data/b'
val_data = ""  # prepared directories whose validation splits are evaluated, 'data/zh,data/code'; "" = those of data_dir
init_from = ""  # "" = new weights; else a run, checkpoint or Hugging Face Llama/Qwen3 directory (architecture, weights)
resume = "auto"  # auto = continue if out_dir has a checkpoint; never = refuse a non-empty out_dir; must
overwrite = False  # with resume='never': delete what out_dir holds
seed = 1337  # weights, data order, dropout
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
# what is trained; all but 'all' needs init_from
trainable = "all"  # all, or some of embed, lm_head, lora, regular expressions of names: 'embed,lm_head,lora'
lora_rank = 16  # of the matrices that are added
lora_alpha = 32.0  # an adapter's result is multiplied by lora_alpha / lora_rank
lora_dropout = 0.0  # on what the adapters read
lora_modules = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"  # matrices that get one
# data
pack = False  # rows that begin with a document, packed by prepare.py --pack=block_size, instead of windows
max_epochs = ""  # most epochs of each source, or 'data/a=2,data/b=8'; a source used up leaves its share to the others
domain = ""  # sources that are the new field in continued pretraining: a warning if they pass 15 % of the tokens
competence = 1.0  # share of the windows seen at first, the easiest; needs prepare.py --order
competence_steps = 0  # steps until all windows are seen
competence_schedule = "sqrt"  # how the share grows: sqrt | linear
# batch
batch_size = 16  # sequences per rank and micro-step; 0 = as many as fit, needs total_batch_tokens
total_batch_tokens = 0  # tokens per step, all ranks and micro-steps; 0 = one micro-step on each rank
max_steps = 2000
# optimizer
optimizer = "muon"  # muon = Muon for the blocks' matrices, AdamW for the rest; adamw
learning_rate = 1e-3  # peak
min_lr = 1e-4  # at the end of the schedule
schedule = "cosine"  # constant | cosine | linear | wsd | wcsd (see optim.py)
warmup_steps = 100  # steps of rising learning rate
warmup_fraction = 0.0  # > 0: warm-up as a fraction of max_steps, instead of warmup_steps
decay_steps = 0  # step at which min_lr is reached; 0 = max_steps; shorter holds min_lr, longer ends above it
decay_fraction = 0.2  # wsd, wcsd: share of the schedule that the final decay takes
stable_lr = 0.0  # wcsd: the plateau
weight_decay = 0.1  # on matrices only
beta1 = 0.9
beta2 = 0.95
momentum = 0.95  # Muon's
grad_clip = 1.0  # global norm; 0.0 = off
max_skipped = 20  # stop after this many steps in a row without a finite gradient (looked at every log_every steps)
# system
device = "auto"  # auto | cpu | cuda | mps
dtype = "auto"  # auto | float32 | bfloat16 | float16 (with a GradScaler)
compile = True  # torch.compile, block by block
compile_whole = False  # one graph of all: a CPU's steps are 3 to 6 % faster, the start is slower; one process
activation_checkpointing = False  # recompute blocks in backward: less memory, a third more work
bucket_mb = 0.0  # size of the gradient buckets; 0 = from the model's size
compress = "none"  # how gradients travel: none | fp16 | bf16 | powersgd (low rank, with error feedback)
compress_rank = 4  # powersgd: numbers sent per row and column of a matrix
compress_start_step = -1  # powersgd: steps sent whole before it begins; -1 = the warm-up
compress_embedding = False  # powersgd: the embedding and the head too: fewer bytes, more loss (docs/ddp.md)
overlap_step = "off"  # forward = update a block when the next forward comes to it; backward = once its gradient came
zero1 = False  # share the optimizer's state and work out among the ranks
ddp_debug = False  # compare every collective and, after each step, all weights across ranks: slow
timeout_s = 300.0  # give up on a collective after this long
peak_tflops = 0.0  # of one device, for mfu and the plan; 0 = data sheet, or measured
plan_only = False  # print the plan and stop
# evaluation, log, checkpoints
eval_every = 250  # steps; also before the first and after the last step
eval_steps = 50  # batches of batch_size windows, over all ranks; 0 = the whole validation split
stop_after = 0  # stop when so many evaluations in a row have not been better; 0 = never
stop_on = ""  # by which loss, for `best` too: a name behind val_loss/ in the log (a source, one of val_data); "" = all
sample_prompts = ""  # continued at each evaluation; several separated by |
log_every = 10  # steps
tensorboard = False  # also write event files for tensorboard into out_dir
save_every = 500  # steps; also after the last step
async_save = True  # write behind training, from a copy of weights and optimizer in RAM (with a GPU up to twice that)
keep_last = 2  # newest checkpoints kept; 0 = all
keep_best = 2  # best checkpoints kept besides (0 to 2), of those saved at an evaluation; stop_after saves each best

ARCHITECTURE = [f.name for f in dataclasses.fields(ModelConfig) if f.name in globals()]
DEFAULTS = {key: globals()[key] for key in ARCHITECTURE}
# These decide which tokens a step sees; a resumed run must not change them.
DATA_KEYS = ("seed", "block_size", "total_batch_tokens")
ORDER_KEYS = ("max_epochs", "competence", "competence_steps", "competence_schedule")
MOST_DOMAIN = 0.15  # of the tokens in continued pretraining
DATA_DEFAULTS = {key: globals()[key] for key in ORDER_KEYS}


def choose_architecture(config: dict, source: Path | None, token_vocab: int) -> ModelConfig:
    """From the checkpoint `source`, with rows for all token ids, else from the keys. Raises ConfigError where they or
    the tokenizer disagree."""
    asked = {key: config[key] for key in ARCHITECTURE}
    if source is None:
        asked["vocab_size"] = asked["vocab_size"] or token_vocab
        cfg = ModelConfig(**asked)
    else:
        cfg = checkpoint.load_config(source)
        cfg = dataclasses.replace(cfg, vocab_size=max(cfg.vocab_size, token_vocab))
        for key in set(ARCHITECTURE) - {"block_size", "dropout"}:
            if asked[key] != DEFAULTS[key] and asked[key] != getattr(cfg, key):
                raise UserError(f"config: {key}={asked[key]} but {source} has {getattr(cfg, key)}; leave {key} out")
        cfg = dataclasses.replace(cfg, block_size=asked["block_size"], dropout=asked["dropout"])
    if token_vocab > cfg.vocab_size:
        raise UserError(f"config: vocab_size={cfg.vocab_size} is less than the data's {token_vocab} token ids")
    return cfg


def check_config(config: dict, world_size: int) -> int:
    """Tokens per step over all ranks. Raises ConfigError; nothing exists yet when it does."""
    run.check_config(config | {"batch_size": config["batch_size"] or 1})
    run.check_least(config, "max_steps", 1)
    run.check_least(config, "competence_steps", int(config["competence"] < 1))
    run.check_share(config, "competence")
    run.check_choice(config, "competence_schedule", COMPETENCE_SCHEDULES)
    run.check_least(config, "stop_after", 0)
    if config["compile_whole"] and (world_size > 1 or config["overlap_step"] != "off"):
        raise UserError("config: compile_whole=True is for one process without overlap_step, which goes by blocks")
    return run.count_tokens(config, world_size)


def memory(
    cfg: ModelConfig, adapters: LoRAConfig, world_size: int, device: torch.device, dtype: torch.dtype, config: dict
) -> dict[str, float]:
    """{part: bytes} of what a rank will hold."""
    trained = trainable_table(cfg, config["trainable"], adapters)
    return memory_plan.memory_parts(cfg, config, trained, config["doc_mask"], world_size, device, dtype)


def plan(
    cfg: ModelConfig, config: dict, adapters: LoRAConfig, world_size: int, device: torch.device, dtype: torch.dtype,
    peak: float, epochs: str,
) -> str:  # fmt: skip
    """What this run will take, as text: parameters, tokens and `epochs` of the data, FLOPs, memory by part, time."""
    params = parameter_table(cfg)
    total = params["total"]
    tokens_per_step = config["total_batch_tokens"]
    accum_steps = tokens_per_step // (config["batch_size"] * config["block_size"] * world_size)
    tokens = tokens_per_step * config["max_steps"]
    flops = flops_per_token(cfg, config["block_size"])
    trained = trainable_table(cfg, config["trainable"], adapters)
    shares = ", ".join(f"{part} {n:,}" for part, n in params.items() if n and part != "total")
    seconds = tokens * flops / (peak * world_size)
    lines = [
        f"parameters  {total:,}: {shares}",
        *([f"trained     {trained['trainable']:,}"] if config["trainable"] != "all" else []),
        f"batch       {tokens_per_step:,} tokens per step = {config['batch_size']} sequences x {config['block_size']} "
        f"tokens x {accum_steps} micro-steps x {world_size} ranks",
        f"tokens      {tokens:,} in {config['max_steps']:,} steps, {tokens / total:.1f} per parameter"
        + (f", {epochs}" if epochs else ""),
        f"compute     {flops:.3e} FLOPs per token, {tokens * flops:.3e} in all",
        memory_plan.describe_parts(memory(cfg, adapters, world_size, device, dtype, config)),
        f"time        {clock(seconds / 0.4)} at 40 % of {world_size} x {peak / 1e12:,.2f} TFLOP/s",
    ]
    return "\n".join(lines)


@torch.no_grad()
def evaluate(
    model: Transformer, batches: Mapping[str, Iterable[tuple[torch.Tensor, torch.Tensor]]], batch_size: int,
    shares: list[float], token_bytes: torch.Tensor, device: torch.device, dtype: torch.dtype,
) -> dict[str, float]:  # fmt: skip
    """Mean loss over validation windows that the ranks share out: nats per token, bits per byte of text; if there are
    several sources, of each, and of a text that has these shares of them."""
    model.eval()
    sums = torch.zeros(len(batches), 3, dtype=torch.float64)  # nats, tokens, bytes
    for source, of_source in enumerate(batches.values()):
        for x, y in of_source:
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


def report_evaluation(log: RunLog, step: int, scores: dict, samples: list[str]) -> None:
    log.write("eval", step, scores)
    sources = [key.partition("/")[2] for key in scores if key.startswith("val_loss/")]
    parts = [f"val loss {scores['val_loss']:.4f}", f"{scores['val_bpb']:.4f} bits per byte"]
    parts += [f"{name} {scores[f'val_loss/{name}']:.4f}, {scores[f'val_bpb/{name}']:.4f}" for name in sources]
    log.print(f"step {step:6d}/{log.max_steps} | " + " | ".join(parts))
    for text in samples:
        log.print(f"    {text!r}")


def sample_texts(model: Transformer, tokenizer: Tokenizer, prompts: str, seed: int) -> list[str]:
    """Continuations of the prompts (separated by |), with the same random numbers at each evaluation."""
    ids = [begin_prompt(tokenizer, prompt) for prompt in prompts.split("|") if prompt]
    if not ids:
        return []
    params = SamplingParams(
        max_new_tokens=64, temperature=0.8, top_p=0.95, seed=seed, eos_ids=tokenizer.stop_ids,
        banned_ids=never_sampled(tokenizer, model.cfg.vocab_size),
    )  # fmt: skip
    each = [dataclasses.replace(params, seed=seed + i) for i in range(len(ids))]
    results = generate(model, None, ids, each)
    return [tokenizer.decode(result.prompt_ids + result.completions[0].ids) for result in results]


def check_domain(domain: str, corpus: TextCorpus) -> list[str]:
    """Lines that warn of too much of a new field at once: what the model knew fades. Raises ConfigError."""
    names = [name.strip() for name in domain.split(",") if name.strip()]
    if unknown := [name for name in names if name not in corpus.names]:
        has = ", ".join(corpus.names)
        raise UserError(f"config: domain names {unknown[0]!r}, the sources are {has}; name some, or domain=''")
    lines = []
    for first_step, weights in corpus.stages if names else []:
        share = sum(weights[corpus.names.index(name)] for name in names) / sum(weights)
        if share > MOST_DOMAIN:
            lines.append(
                f"warning     {100 * share:.0f} % of the tokens from step {first_step} on are of a new domain; beyond "
                f"{100 * MOST_DOMAIN:.0f} % general ability suffers: give general text more weight in data_dir"
            )
    return lines


if __name__ == "__main__":
    config = configure(globals())
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    tokens_per_step = config["total_batch_tokens"] = check_config(config, world_size)
    samples = tokens_per_step // (block_size * world_size)  # of each rank
    torch_device, torch_dtype = run.choose_device_and_dtype(config)
    peak = peak_tflops * 1e12 or peak_flops(torch_device, torch_dtype)

    # ---- data, architecture, checkpoint: mistakes show here, before a process group or out_dir exists
    source = checkpoint.resolve(init_from) if init_from else None
    adapters = LoRAConfig(lora_rank, lora_alpha, lora_dropout, tuple(lora_modules.split(",")))
    paths = [Path(path) for stage in parse_data_dir(data_dir) for path in stage.weights]
    if plan_only and (vocab_size or source) and not any(path.exists() for path in paths):
        cfg = choose_architecture(config, source, 0)
        memory_of = partial(memory, cfg, adapters, world_size, torch_device, torch_dtype)
        config["batch_size"], chosen = memory_plan.fit_batch_size(config, samples, memory_of, torch_device)
        print("\n".join([plan(cfg, config, adapters, world_size, torch_device, torch_dtype, peak, epochs=""), *chosen]))
        sys.exit(0)
    if Path(data_dir).name == "debug" and not Path(data_dir).exists():
        prepare.make_debug_data(data_dir)
    corpus = TextCorpus(data_dir, block_size, pack, val_data)
    if stop_on and (stop_on not in corpus.val or len(corpus.val) == 1):
        has = ", ".join(corpus.val)
        raise UserError(f"config: stop_on={stop_on!r} is no loss of its own in the log; it has {has}")
    tokenizer = Tokenizer.load(corpus.dir)
    corpus.train[0].check_tokenizer(tokenizer.fingerprint())
    mixture = corpus.order(
        seed, tokens_per_step // block_size, max_steps, max_epochs, competence, competence_steps, competence_schedule
    )
    n_known = run.count_known_ids(source, tokenizer, data_dir) if source else 0
    cfg = choose_architecture(config, source, tokenizer.vocab_size)
    run.check_trainable(config, source, tokenizer.vocab_size - n_known)
    order = {key: config[key] for key in DATA_KEYS} | corpus.record()
    order |= {key: config[key] for key in ORDER_KEYS if config[key] != DATA_DEFAULTS[key]}
    memory_of = partial(memory, cfg, adapters, world_size, torch_device, torch_dtype)
    config["batch_size"], chosen = memory_plan.fit_batch_size(config, samples, memory_of, torch_device)
    if rank == 0:
        epochs, warnings = corpus.describe(mixture, max_steps * tokens_per_step // block_size)
        text = plan(cfg, config, adapters, world_size, torch_device, torch_dtype, peak, epochs)
        print("\n".join([text, *chosen, *warnings, *check_domain(domain, corpus)]), flush=True)
    if plan_only:
        sys.exit(0)
    resume_from = run.find_resume(config, cfg, verbose=rank == 0)
    state, rank_state = checkpoint.load_train_state(resume_from, rank) if resume_from else ({}, {})
    start_step = state.get("step", 0)
    if resume_from:
        run.check_data_order(state["order"], order, DATA_DEFAULTS, resume_from, start_step)
        run.check_same_parts(resume_from, state["config"], config)
        if keep_best and (was := state["config"].get("stop_on", stop_on)) != stop_on:
            raise UserError(f"config: {out_dir} ranked its best by stop_on={was!r}, not {stop_on!r}; or keep_best=0")
        if rank == 0:
            print(run.describe_resume(resume_from, start_step, state["config"], config), flush=True)

    # ---- processes
    stop_signal = StopSignal()
    world = ranks.init(torch_device.type, timeout_s, ddp_debug)
    batch_size = memory_plan.agree_batch_size(batch_size, config["batch_size"], verbose=rank == 0)
    config["batch_size"] = batch_size
    accum_steps = samples // batch_size
    run.check_ranks_agree({**config, **order, "step": start_step, "dtype": str(torch_dtype)})

    # ---- model, optimizer
    seed_everything(seed)
    raw_model = Transformer(cfg)
    if source and not resume_from:
        run.load_start(raw_model, source, n_known)
    set_trainable(raw_model, trainable, adapters)
    if resume_from:
        checkpoint.load_weights(raw_model, resume_from)
    base = run.frozen_base(resume_from, source)
    raw_model.to(torch_device).activation_checkpointing = activation_checkpointing
    raw_model.document_id = tokenizer.eot_id if doc_mask else None
    scaler = torch.amp.GradScaler(torch_device.type, enabled=torch_dtype == torch.float16)
    warmup = round(warmup_fraction * max_steps) if warmup_fraction else warmup_steps
    compress_from = warmup if compress_start_step < 0 else compress_start_step
    hook = dist.make_hook(compress, compress_rank, compress_from, compress_embedding, seed, scaler)
    ddp = dist.DDP(raw_model, bucket_mb, hook, overlap_step, zero1, keep_whole=partial(stays_whole, optimizer))
    opt = Optimizer(
        ddp.buckets, optimizer, (beta1, beta2), weight_decay=weight_decay, momentum=momentum,
        muon_dtype=torch.float32 if torch_dtype == torch.float32 else torch.bfloat16,
    )  # fmt: skip
    model = raw_model
    if compile and compile_whole:
        model = torch.compile(raw_model, dynamic=False)
    elif compile:
        raw_model.compile_blocks(partial(torch.compile, dynamic=False))  # in place: it stays the same object

    # ---- state: fresh, or exactly as it was
    seed_everything(seed + 1_000_003 * start_step, world.rank)  # dropout differs by rank
    skipped = torch.tensor(state.get("skipped", [0.0, 0.0]), device=torch_device)  # in all, in a row
    parts = run.Parts(raw_model, opt, scaler, hook, ddp, world, torch_device, run.Writer(async_save, timeout_s))
    if resume_from:
        run.restore(parts, resume_from, state, rank_state, compress)
    state = rank_state = None  # as large as the optimizer's
    if world.is_main:
        run.prepare_out_dir(config, "pretrain")
    batches = Batches(
        corpus.train, mixture, block_size, batch_size, accum_steps, world.rank, world_size, torch_device, start_step
    )
    val = partial(corpus.val_batches, batch_size, eval_steps, world.rank, world_size)
    shares = corpus.val_shares()
    stages = mixture.changes(batches.samples_per_step) if len(corpus.names) > 1 else {}
    token_bytes = torch.from_numpy(tokenizer.token_byte_lengths())
    log = RunLog(out_dir, max_steps, start_step, world.is_main, tensorboard)
    watched = f"val_loss/{stop_on}" if stop_on else "val_loss"
    stopping = False

    def evaluations_since_best() -> int:
        """How many in a row have not been better, on all ranks alike."""
        return int(ranks.all_reduce_sum(torch.tensor(float(log.since_best(watched)))).item())

    # ---- the loop
    gc.collect()
    gc.freeze()  # nothing made so far becomes garbage: the collector need not walk it again
    if start_step == 0:
        scores = evaluate(model, val(), batch_size, shares, token_bytes, torch_device, torch_dtype)
        report_evaluation(log, 0, scores, sample_texts(raw_model, tokenizer, sample_prompts, seed))
    ended = bool(start_step and stop_after) and evaluations_since_best() >= stop_after
    mark_time, mark_step = time.perf_counter(), start_step
    for step in range(start_step + 1, 0 if ended else max_steps + 1):
        lr = learning_rate_at(
            step, schedule, learning_rate, min_lr, warmup, decay_steps or max_steps, decay_fraction, stable_lr
        )
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
            values = {
                "loss": mean_loss, "lr": lr,
                "grad_norm": grad_norm.item(), "tokens": step * tokens_per_step, "tokens_per_s": tokens_per_s,
                "mfu": tokens_per_s * flops_per_token(cfg, block_size) / peak / world_size,
                "memory_gib": peak_memory_gib(torch_device), "skipped": int(skipped[0]),
            }  # fmt: skip
            values |= corpus.tokens_seen(mixture, step * batches.samples_per_step)
            log.train(step, values, step_s)
            if skipped[1] >= max_skipped:
                run.stop_not_finite(parts, log, step, int(skipped[1]), loss_sum, batches)
            mark_time, mark_step = time.perf_counter(), step
        pause, val_loss, better = time.perf_counter(), None, False
        if step % eval_every == 0 or step % save_every == 0 or last or stopping:
            ddp.flush()  # updates that wait for the next forward
        if step % eval_every == 0 or last:
            scores = evaluate(model, val(), batch_size, shares, token_bytes, torch_device, torch_dtype)
            val_loss = scores[watched]
            report_evaluation(log, step, scores, sample_texts(raw_model, tokenizer, sample_prompts, seed))
            if stop_after:
                n_worse = evaluations_since_best()
                better, ended = n_worse == 0, n_worse >= stop_after
        if step % save_every == 0 or last or stopping or ended or (better and keep_best):
            run.save(parts, step, tokenizer, config, order, skipped, val_loss, log, base)
        mark_time += time.perf_counter() - pause  # evaluations and saves are not training
        if stopping or ended:
            break

    why = f"no better {watched} in {stop_after} evaluations" if ended else "stopped by a signal" if stopping else ""
    if ended:
        log.print(f"{why}: that is the end")
    saved = run.finish_saving(parts, log)
    if stopping:
        how = "the same command continues" if saved else "the last save failed"
        log.print(f"stopped by a signal after step {step}; {how}")
    batches.close()
    log.close()
    if world.is_main:
        run_card.write(out_dir, __file__, config, corpus.report(), torch_device, world_size, watched, why)
    ranks.close()
    sys.exit(stop_signal.exit_code if stopping else int(not saved))
