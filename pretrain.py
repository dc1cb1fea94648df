"""Pretraining: next-token prediction on prepared token files.

python pretrain.py config/debug.py                                       # CPU, seconds, makes its own data
torchrun --standalone --nproc_per_node=4 pretrain.py config/small.py     # 4 GPUs, or 4 CPU processes
python pretrain.py config/llama_1b.py --plan_only=True                   # parameters, FLOPs, memory, time, no more
"""

import dataclasses
import gc
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import checkpoint
import ddp as dist
import prepare
import train_utils
from configurator import ConfigError, configure, write_config
from data import Batches, Corpus, same_order
from generate import begin_prompt, generate, never_sampled
from mixture import SCHEDULES as COMPETENCE_SCHEDULES
from mixture import parse_data_dir
from model import IGNORE, ModelConfig, Transformer, flops_per_token, memory_table, parameter_table
from optim import SCHEDULES, Optimizer, learning_rate_at, stays_whole
from sampling import SamplingParams
from tokenizer import Tokenizer

# ---- config: override with a config file or --key=value; see --help -------------------------------------------------
out_dir = "out/pretrain"  # run directory: config.py, log.jsonl, step_*/
data_dir = "data/demo"  # prepared by prepare.py; a mixture 'data/a=0.7,data/b=0.3', stages '0: data/a; 8000: data/b'
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
# data
pack = False  # rows that begin with a document, packed by prepare.py --pack=block_size, instead of windows
max_epochs = ""  # most epochs of each source, or 'data/a=2,data/b=8'; a source used up leaves its share to the others
competence = 1.0  # share of the windows seen at first, the easiest; needs prepare.py --order
competence_steps = 0  # steps until all windows are seen
competence_schedule = "sqrt"  # how the share grows: sqrt | linear
# batch
batch_size = 16  # sequences per rank and micro-step
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
sample_prompts = ""  # continued at each evaluation; several separated by |
log_every = 10  # steps
save_every = 500  # steps; also after the last step
keep_last = 2  # newest checkpoints kept; 0 = all
keep_best = 2  # best checkpoints kept besides (0 to 2), by the validation loss of those saved at an evaluation

ARCHITECTURE = [f.name for f in dataclasses.fields(ModelConfig) if f.name in globals()]
DEFAULTS = {key: globals()[key] for key in ARCHITECTURE}
# These decide which tokens a step sees; a resumed run must not change them.
DATA_KEYS = ("seed", "block_size", "total_batch_tokens")
ORDER_KEYS = ("max_epochs", "competence", "competence_steps", "competence_schedule")
DATA_DEFAULTS = {key: globals()[key] for key in ORDER_KEYS}
# What a run leaves in its directory: overwrite=True deletes nothing else.
OWN_FILES = re.compile(r"(config\.py|log\.jsonl|\.?latest|\.?best2?|\.?step_\d+)(\.tmp|\.old)?")


class TrainingError(RuntimeError):
    one_line = True


def choose_architecture(config: dict, source: Path | None, token_vocab: int) -> ModelConfig:
    """From the checkpoint `source`, else from the keys. Raises ConfigError where they or the tokenizer disagree."""
    asked = {key: config[key] for key in ARCHITECTURE}
    if source is None:
        asked["vocab_size"] = asked["vocab_size"] or token_vocab
        cfg = ModelConfig(**asked)
    else:
        cfg = checkpoint.load_config(source)
        for key in set(ARCHITECTURE) - {"block_size", "dropout"}:
            if asked[key] != DEFAULTS[key] and asked[key] != getattr(cfg, key):
                raise ConfigError(f"config: {key}={asked[key]} but {source} has {getattr(cfg, key)}; leave {key} out")
        cfg = dataclasses.replace(cfg, block_size=asked["block_size"], dropout=asked["dropout"])
    if token_vocab > cfg.vocab_size:
        raise ConfigError(f"config: vocab_size={cfg.vocab_size} is less than the data's {token_vocab} token ids")
    return cfg


def check_config(config: dict, world_size: int) -> int:
    """Number of micro-steps per step. Raises ConfigError; nothing exists yet when it does."""
    at_least = dict.fromkeys(("batch_size", "block_size", "max_steps", "log_every", "eval_every", "save_every"), 1)
    at_least |= {"max_skipped": 1, "total_batch_tokens": 0, "eval_steps": 0, "warmup_steps": 0, "decay_steps": 0}
    at_least |= {"compress_rank": 1, "compress_start_step": -1, "competence_steps": int(config["competence"] < 1)}
    at_least |= dict.fromkeys(("keep_last", "keep_best", "grad_clip", "weight_decay", "learning_rate", "bucket_mb"), 0)
    for key, least in at_least.items():
        if config[key] < least:
            raise ConfigError(f"config: {key} must be at least {least}, got {config[key]}")
    for key in ("warmup_fraction", "decay_fraction", "beta1", "beta2", "momentum", "competence"):
        if not 0 <= config[key] <= 1:
            raise ConfigError(f"config: {key} must be from 0 to 1, got {config[key]}")
    if config["keep_best"] > 2:
        raise ConfigError(f"config: keep_best must be 0, 1 or 2, got {config['keep_best']}")
    tokens_per_micro = config["batch_size"] * config["block_size"] * world_size
    total = config["total_batch_tokens"] or tokens_per_micro
    if total % tokens_per_micro:
        raise ConfigError(
            f"config: total_batch_tokens={total} must be a multiple of batch_size*block_size*world_size = "
            f"{config['batch_size']}*{config['block_size']}*{world_size} = {tokens_per_micro}"
        )
    choices = {"schedule": SCHEDULES, "optimizer": ("adamw", "muon"), "resume": ("auto", "never", "must")}
    choices |= {"compress": dist.COMPRESS, "competence_schedule": COMPETENCE_SCHEDULES}
    for key, allowed in choices.items():
        if config[key] not in allowed:
            raise ConfigError(f"config: {key} must be one of {', '.join(allowed)}, got {config[key]!r}")
    if config["overwrite"] and config["resume"] != "never":
        raise ConfigError("config: overwrite=True deletes the run that resume would continue; add resume='never'")
    if config["schedule"] == "wcsd" and not config["stable_lr"]:
        raise ConfigError("config: schedule='wcsd' needs stable_lr, the learning rate of its plateau")
    return total // tokens_per_micro


def find_resume(config: dict, cfg: ModelConfig, verbose: bool) -> Path | None:
    """Checkpoint of out_dir to continue from, or None to start. Raises ConfigError where `resume` forbids it."""
    out = Path(config["out_dir"])
    if not config["out_dir"] or (out.exists() and not out.is_dir()):
        raise ConfigError(f"config: out_dir={config['out_dir']!r} is not a directory")
    used = out.exists() and any(out.iterdir())
    if config["resume"] == "never":
        if used:
            check_overwrite(config, out)
        return None
    path = checkpoint.find_latest(out, report=print if verbose else lambda text: None) if used else None
    if path is None:
        if config["resume"] == "must":
            raise ConfigError(f"config: resume='must' but {out} has no checkpoint")
        return None
    saved = checkpoint.load_config(path)
    differ = [f.name for f in dataclasses.fields(cfg) if getattr(saved, f.name) != getattr(cfg, f.name)]
    differ = [key for key in differ if key != "dropout"]
    if differ:
        detail = ", ".join(f"{key}={getattr(saved, key)} (asked {getattr(cfg, key)})" for key in differ)
        raise ConfigError(f"config: {path} has another architecture: {detail}; use another out_dir, or init_from")
    return path


def check_overwrite(config: dict, out: Path) -> None:
    """Raise ConfigError unless all of `out` may be deleted: the user said so, and it is a run and nothing else."""
    if not config["overwrite"]:
        raise ConfigError(f"config: resume='never' but {out} is not empty; use another out_dir or overwrite=True")
    foreign = [path.name for path in out.iterdir() if not OWN_FILES.fullmatch(path.name)]
    if foreign:
        raise ConfigError(f"config: {out} holds {foreign[0]!r}, which no run made; use another out_dir")
    if config["init_from"] and Path(config["init_from"]).resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"config: init_from={config['init_from']!r} lies in the out_dir that overwrite=True deletes")


def check_tokenizer(path: Path, tokenizer: Tokenizer, data_dir: str) -> None:
    """Raise ConfigError if the weights in `path` were trained on other token ids than the data's."""
    if any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        if Tokenizer.load(path).fingerprint() != tokenizer.fingerprint():
            raise ConfigError(
                f"config: {data_dir} was not tokenized with the tokenizer of {path}; "
                f"rerun prepare.py with --tokenizer_dir={path}"
            )


def check_ranks_agree(mine: dict) -> None:
    """Raise on all ranks if one of them has another setting or would continue from another step."""
    everyone = dist.gather_objects(mine)
    for rank, theirs in enumerate(everyone):
        differ = [key for key in mine if theirs[key] != everyone[0][key]]
        if differ:
            key = differ[0]
            raise TrainingError(
                f"pretrain: rank {rank} has {key}={theirs[key]}, rank 0 has {everyone[0][key]}; "
                f"all ranks need the same command, data and out_dir"
            )


def describe_resume(path: Path, step: int, saved: dict, config: dict) -> str:
    """What a resumed run says: from where, with which other settings, and that it has come to its end if it has."""
    changed = [f"{key} {saved[key]!r} -> {config[key]!r}" for key in saved.keys() & config if saved[key] != config[key]]
    text = f"continuing {path} after step {step}" + (f"; changed: {', '.join(sorted(changed))}" if changed else "")
    if step >= config["max_steps"]:
        text += f"; max_steps={config['max_steps']} is reached, raise it to go on"
    return text


def check_data_order(saved: dict, now: dict, path: Path, step: int) -> None:
    """A resumed run goes on with the very next sample only if all that ordered the samples so far is unchanged."""
    differ = [key for key in saved | now if saved.get(key) != now.get(key)]
    if set(differ) <= {"data", "stages"} and "competence" not in now:  # a curriculum looks ahead
        differ = list(filter(None, [same_order(saved, now, step)]))
    if differ:
        was, asked = DATA_DEFAULTS | saved, DATA_DEFAULTS | now
        detail = {key: f"{key}={was.get(key)} (asked {asked.get(key)})" for key in differ}
        detail = ", ".join((detail | {"data": "another corpus"} if "data" in detail else detail).values())
        raise ConfigError(f"config: {path} was trained with {detail}; resume unchanged, or start anew with init_from")


def plan(
    cfg: ModelConfig, config: dict, world_size: int, device: torch.device, dtype: torch.dtype, peak: float,
    epochs: str,
) -> str:  # fmt: skip
    """What this run will take, as text: parameters, tokens and `epochs` of the data, FLOPs, memory by part, time."""
    params = parameter_table(cfg)
    total = params["total"]
    tokens_per_step = config["total_batch_tokens"]
    accum_steps = tokens_per_step // (config["batch_size"] * config["block_size"] * world_size)
    tokens = tokens_per_step * config["max_steps"]
    flops = flops_per_token(cfg, config["block_size"])
    memory = memory_table(
        cfg, config["batch_size"], config["block_size"], dtype, config["optimizer"],
        config["activation_checkpointing"], config["compile"], device.type, config["doc_mask"],
    )  # fmt: skip
    memory["process"] = train_utils.process_bytes(device)
    if config["zero1"]:
        memory["optimizer"] /= world_size
    if config["compress"] == "powersgd":
        matrices = params["total"] if config["compress_embedding"] else params["attention"] + params["mlp"]
        memory["compression error"] = 4 * matrices
    shares = ", ".join(f"{part} {n:,}" for part, n in params.items() if n and part != "total")
    seconds = tokens * flops / (peak * world_size)
    lines = [
        f"parameters  {total:,}: {shares}",
        f"batch       {tokens_per_step:,} tokens per step = {config['batch_size']} sequences x {config['block_size']} "
        f"tokens x {accum_steps} micro-steps x {world_size} ranks",
        f"tokens      {tokens:,} in {config['max_steps']:,} steps, {tokens / total:.1f} per parameter"
        + (f", {epochs}" if epochs else ""),
        f"compute     {flops:.3e} FLOPs per token, {tokens * flops:.3e} in all",
        f"memory      {sum(memory.values()) / 2**30:.2f} GiB per rank: "
        + ", ".join(f"{part} {n / 2**20:,.0f} MiB" for part, n in memory.items()),
        f"time        {train_utils.clock(seconds / 0.4)} at 40 % of {world_size} x {peak / 1e12:,.2f} TFLOP/s",
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
            with train_utils.autocast(device, dtype):
                nats = model(x.to(device), y.to(device))
            sums[source] += torch.tensor([nats.item(), *counts], dtype=torch.float64)
    dist.all_reduce_sum(sums)
    model.train()
    mixed = (torch.tensor(shares, dtype=torch.float64)[:, None] * sums / sums[:, 1:2]).sum(0)
    of = {"": mixed} | ({f"/{name}": sums[k] for k, name in enumerate(batches)} if len(batches) > 1 else {})
    losses = {f"val_loss{name}": (nats / tokens).item() for name, (nats, tokens, _) in of.items()}
    return losses | {f"val_bpb{name}": (nats / math.log(2) / n_bytes).item() for name, (nats, _, n_bytes) in of.items()}


def report_evaluation(log: train_utils.RunLog, step: int, scores: dict, samples: list[str]) -> None:
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


def stop_not_finite(step: int, skipped: int, loss_sum: torch.Tensor, batches: Batches, world_size: int) -> None:
    """Raise on every rank, naming the ranks whose loss of this step was not finite and where their data lies."""
    bad = [rank for rank, finite in enumerate(dist.gather_objects(bool(loss_sum.isfinite()))) if not finite]
    where = f"loss not finite on rank {', '.join(map(str, bad))}" if bad else "loss finite, gradient not"
    share = batches.samples_per_step // world_size
    first = batches.position(step - 1) + (bad[0] if bad else 0) * share
    raise TrainingError(
        f"pretrain: step {step}: {skipped} steps in a row without a finite gradient; {where}; samples {first} to "
        f"{first + share - 1}; lower learning_rate or continue from an earlier checkpoint"
    )


if __name__ == "__main__":
    config = configure(globals())
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    accum_steps = check_config(config, world_size)
    tokens_per_step = accum_steps * batch_size * block_size * world_size
    config["total_batch_tokens"] = tokens_per_step
    if plan_only and device == "cuda" and peak_tflops and dtype != "auto":
        torch_device = torch.device("cuda")  # a plan for another machine
    else:
        torch_device = train_utils.choose_device(device, int(os.environ.get("LOCAL_RANK", 0)))
    compilers = map(shutil.which, ("g++", "clang++", "c++"))
    if compile and torch_device.type == "cpu" and not plan_only and not any(compilers):
        raise ConfigError("config: compile=True needs a C++ compiler on a CPU; install g++ or use compile=False")
    torch_dtype = train_utils.choose_dtype(dtype, torch_device)
    if reason := dist.conflict(compress, overlap_step, zero1, grad_clip, torch_dtype == torch.float16):
        raise ConfigError(f"config: {reason}")
    peak = peak_tflops * 1e12 or train_utils.peak_flops(torch_device, torch_dtype)

    # ---- data, architecture, checkpoint: mistakes show here, before a process group or out_dir exists
    source = checkpoint.resolve(init_from) if init_from else None
    paths = [Path(path) for stage in parse_data_dir(data_dir) for path in stage.weights]
    if plan_only and (vocab_size or source) and not any(path.exists() for path in paths):
        cfg = choose_architecture(config, source, 0)
        print(plan(cfg, config, world_size, torch_device, torch_dtype, peak, epochs=""))
        sys.exit(0)
    if Path(data_dir).name == "debug" and not Path(data_dir).exists():
        prepare.make_debug_data(data_dir)
    corpus = Corpus(data_dir, block_size, pack)
    tokenizer = Tokenizer.load(corpus.dir)
    corpus.train[0].check_tokenizer(tokenizer.fingerprint())
    mixture = corpus.order(
        seed, tokens_per_step // block_size, max_steps, max_epochs, competence, competence_steps, competence_schedule
    )
    cfg = choose_architecture(config, source, tokenizer.vocab_size)
    order = {key: config[key] for key in DATA_KEYS} | corpus.record()
    order |= {key: config[key] for key in ORDER_KEYS if config[key] != DATA_DEFAULTS[key]}
    if source:
        check_tokenizer(source, tokenizer, data_dir)
    if rank == 0:
        epochs, warnings = corpus.describe(mixture, max_steps * tokens_per_step // block_size)
        text = plan(cfg, config, world_size, torch_device, torch_dtype, peak, epochs)
        print("\n".join([text, *warnings]), flush=True)
    if plan_only:
        sys.exit(0)
    resume_from = find_resume(config, cfg, verbose=rank == 0)
    state, rank_state = checkpoint.load_train_state(resume_from, rank) if resume_from else ({}, {})
    start_step = state.get("step", 0)
    if resume_from:
        check_data_order(state["order"], order, resume_from, start_step)
        if rank == 0:
            print(describe_resume(resume_from, start_step, state["config"], config), flush=True)

    # ---- processes
    stop_signal = train_utils.StopSignal()
    world = dist.init(torch_device.type, timeout_s, ddp_debug)
    check_ranks_agree({**config, **order, "step": start_step, "dtype": str(torch_dtype)})

    # ---- model, optimizer
    train_utils.seed_everything(seed)
    raw_model = Transformer(cfg)
    if resume_from or source:
        checkpoint.load_weights(raw_model, resume_from or source)
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
    if compile:
        raw_model.compile_blocks(partial(torch.compile, dynamic=False))
    model = raw_model  # compiled block by block, so it is the same object

    # ---- state: fresh, or exactly as it was
    train_utils.seed_everything(seed + 1_000_003 * start_step, world.rank)  # dropout differs by rank
    skipped = torch.tensor(state.get("skipped", [0.0, 0.0]), device=torch_device)  # in all, in a row
    if resume_from:
        ddp.n_steps = start_step
        opt.load_state_dict(state["optimizer"])
        if state["scaler"]:  # empty unless that run was in float16
            scaler.load_state_dict(state["scaler"])
        if rank_state:  # absent for a rank that the saved run did not have
            train_utils.set_rng_state(rank_state["rng"], torch_device)
        if compress == "powersgd":
            rank_states = checkpoint.load_rank_states(resume_from, world.rank, world_size)
            hook.load_state_dict([saved.get("powersgd", {}) for saved in rank_states])
    state = rank_state = rank_states = None  # as large as the optimizer's
    if world.is_main:
        if resume == "never" and Path(out_dir).exists():
            shutil.rmtree(out_dir)  # check_overwrite has looked at it
        os.makedirs(out_dir, exist_ok=True)
        again = config | {"resume": "auto", "overwrite": False}  # to run it again must not delete it
        write_config(again, f"{out_dir}/config.py", command=f"python pretrain.py {out_dir}/config.py")
    batches = Batches(
        corpus.train, mixture, block_size, batch_size, accum_steps, world.rank, world_size, torch_device, start_step
    )
    val = partial(corpus.val_batches, batch_size, eval_steps, world.rank, world_size)
    shares = corpus.val_shares()
    stages = mixture.changes(batches.samples_per_step) if len(corpus.names) > 1 else {}
    token_bytes = torch.from_numpy(tokenizer.token_byte_lengths())
    log = train_utils.RunLog(out_dir, max_steps, start_step, world.is_main)
    save_failed, stopping = False, False

    # ---- the loop
    gc.collect()
    gc.freeze()  # nothing made so far becomes garbage: the collector need not walk it again
    if start_step == 0:
        scores = evaluate(model, val(), batch_size, shares, token_bytes, torch_device, torch_dtype)
        report_evaluation(log, 0, scores, sample_texts(model, tokenizer, sample_prompts, seed))
    mark_time, mark_step = time.perf_counter(), start_step
    for step in range(start_step + 1, max_steps + 1):
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
            with train_utils.autocast(torch_device, torch_dtype):
                loss = model(x, y) * (world_size / n_targets)  # the model returns a sum; ddp averages over ranks
            scaler.scale(loss).backward()  # full buckets start their all-reduce inside this call
            loss_sum += loss.detach()
        # >>> optimizer step: identical in pretrain, sft, dpo, reward (tests/test_repo.py)
        grad_norm = ddp.step(opt, lr=lr, clip=grad_clip, scaler=scaler)
        skipped = torch.stack((skipped[0] + ddp.found_inf, (skipped[1] + 1) * ddp.found_inf))
        # <<< optimizer step
        log.advance()

        last, stopping = step == max_steps, dist.any_rank(stop_signal.received > 0)
        if step % log_every == 0 or last or stopping:
            mean_loss = dist.all_reduce_sum(loss_sum.clone()).item() / world_size  # waits for the device, so that
            step_s = (time.perf_counter() - mark_time) / (step - mark_step)  # this clock is true
            tokens_per_s = tokens_per_step / step_s
            values = {
                "loss": mean_loss, "lr": lr,
                "grad_norm": grad_norm.item(), "tokens": step * tokens_per_step, "tokens_per_s": tokens_per_s,
                "mfu": tokens_per_s * flops_per_token(cfg, block_size) / peak / world_size,
                "memory_gib": train_utils.peak_memory_gib(torch_device), "skipped": int(skipped[0]),
            }  # fmt: skip
            values |= corpus.tokens_seen(mixture, step * batches.samples_per_step)
            log.train(step, values, step_s)
            if skipped[1] >= max_skipped:
                stop_not_finite(step, int(skipped[1]), loss_sum, batches, world_size)
            mark_time, mark_step = time.perf_counter(), step
        pause, val_loss = time.perf_counter(), None
        if step % eval_every == 0 or step % save_every == 0 or last or stopping:
            ddp.flush()  # updates that wait for the next forward
        if step % eval_every == 0 or last:
            scores = evaluate(model, val(), batch_size, shares, token_bytes, torch_device, torch_dtype)
            val_loss = scores["val_loss"]
            report_evaluation(log, step, scores, sample_texts(model, tokenizer, sample_prompts, seed))
        if step % save_every == 0 or last or stopping:
            state = {"step": step, "order": order, "skipped": skipped.tolist(), "config": config}
            opt_state = opt.state_dict(ddp.gather if zero1 else None, keep=world.is_main)
            state |= {"optimizer": opt_state, "scaler": scaler.state_dict()}
            rank_state = {"rng": train_utils.rng_state(torch_device)}
            if compress == "powersgd":
                rank_state["powersgd"] = hook.state_dict()
            try:
                path = checkpoint.save(
                    out_dir, step, raw_model, tokenizer, state, rank_state, world,
                    val_loss=val_loss, keep_last=keep_last, keep_best=keep_best,
                )  # fmt: skip
                log.write("save", step, {"path": str(path)})
            except checkpoint.CheckpointError as error:
                log.print(str(error))  # go on: the disk may have room again at the next save
                save_failed = True
            else:
                save_failed = False
            state = opt_state = rank_state = None  # with ZeRO-1 a copy, as large as what all ranks hold
        mark_time += time.perf_counter() - pause  # evaluations and saves are not training
        if stopping:
            how = "not saved" if save_failed else "the same command continues"
            log.print(f"stopped by a signal after step {step}; {how}")
            break

    batches.close()
    log.close()
    dist.close()
    sys.exit(stop_signal.exit_code if stopping else int(save_failed))
