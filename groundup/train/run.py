"""The frame of a run, the same in every trainer; the loop between start() and finish() is the trainer's own.

    find_checkpoint   find the checkpoint of out_dir to continue, and check it against the settings
    set_up            move the model to the device, compile it, make DDP, optimizer and GradScaler
    start             restore weights and state from that checkpoint, or seed a new run; make out_dir
    save, rank        write a checkpoint; give it its validation loss, which decides `best`
    finish            wait for the last save, write the run's README.md, exit
"""

import dataclasses
import gc
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

import ddp
from groundup.errors import UserError, refuse
from groundup.tokens.batches import Batches
from groundup.tokens.corpus import same_order
from groundup.tokens.documents import can_border
from groundup.train import checkpoint, computation, cpu_attention, fsdp, out_dir, powersgd, ranks, run_card
from groundup.train.compiled import compile_blocks
from groundup.train.device import (
    choose_device,
    choose_dtype,
    peak_memory_gib,
    rng_state,
    seed_everything,
    set_rng_state,
)
from groundup.train.log import RunLog, check_tensorboard
from groundup.train.optim import SCHEDULES, Optimizer, stays_whole
from groundup.train.settings import REMOVED
from groundup.train.signals import StopSignal
from groundup.train.write_behind import Writer
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

AT_LEAST = dict.fromkeys(("batch_size", "block_size", "log_every", "eval_every", "save_every", "max_skipped"), 1)
AT_LEAST |= {"total_batch_tokens": 0, "eval_steps": 0, "warmup_steps": 0, "decay_steps": 0, "compress_rank": 1}
AT_LEAST |= dict.fromkeys(("keep_last", "keep_best", "grad_clip", "weight_decay", "learning_rate", "bucket_mb"), 0)
AT_LEAST |= {"compress_start_step": -1, "max_steps": 0, "total_batch_pairs": 0}
SHARES = ("warmup_fraction", "decay_fraction", "beta1", "beta2", "momentum", "val_fraction")
CHOICES = {
    "schedule": SCHEDULES, "optimizer": ("adamw", "muon"), "resume": ("auto", "never", "must"),
    "compress": ddp.COMPRESS, "base_dtype": ("auto", "float32", "bfloat16"), "parallel": ("ddp", "fsdp"),
}  # fmt: skip

def check_config(
    config: dict, at_least: Mapping[str, float] | None = None, shares: tuple[str, ...] = (),
    choices: Mapping[str, tuple[str, ...]] | None = None,
) -> None:  # fmt: skip
    """Raise UserError for a value that no trainer can use, nor this one; nothing exists yet when it does. at_least,
    shares, choices: checks of the trainer's own keys."""
    for key, least in (AT_LEAST | dict(at_least or {})).items():
        value = config.get(key, least)
        refuse(not value >= least, f"{key} must be at least {least}, got {value}")
    for key in filter(config.__contains__, SHARES + shares):
        refuse(not 0 <= config[key] <= 1, f"{key} must be from 0 to 1, got {config[key]}")
    for key, allowed in (CHOICES | dict(choices or {})).items():
        refuse(config[key] not in allowed, f"{key} must be one of {', '.join(allowed)}, got {config[key]!r}")
    endless = not config["max_steps"] and not 0 < config.get("epochs", 1) < math.inf
    refuse(endless, f"epochs must be above 0 where max_steps is 0, got {config.get('epochs')}")
    refuse(config["keep_best"] > 2, f"keep_best must be 0, 1 or 2, got {config['keep_best']}")
    deletes = config["overwrite"] and config["resume"] != "never"
    refuse(deletes, "overwrite=True deletes the run that resume would continue; add resume='never'")
    check_tensorboard(config["tensorboard"])


def warmup_of(config: dict) -> int:
    """Return the steps of warm-up: warmup_steps, or where that is 0 warmup_fraction of max_steps."""
    return config["warmup_steps"] or round(config["warmup_fraction"] * config["max_steps"])


def count_per_step(config: dict, key: str, **factors: int) -> int:
    """Return config[key], the size of a step over all ranks; where it is 0, that of one micro-step on each. Raise
    UserError unless it is a multiple of batch_size times `factors`."""
    factors = {"batch_size": config["batch_size"]} | factors
    per_micro_step = math.prod(factors.values())
    if config[key] % per_micro_step:
        values = " = ".join(dict.fromkeys(("*".join(map(str, factors.values())), str(per_micro_step))))
        raise UserError(f"config: {key}={config[key]} must be a multiple of {'*'.join(factors)} = {values}")
    return config[key] or per_micro_step


def choose_device_and_dtype(config: dict) -> tuple[torch.device, torch.dtype]:
    """Return the device of this rank and the dtype of its matrix products. Raise UserError if settings conflict."""
    if config["plan_only"] and config["device"] == "cuda" and config["peak_tflops"] and config["dtype"] != "auto":
        device = torch.device("cuda")  # a plan for another machine
    else:
        device = choose_device(config["device"], int(os.environ.get("LOCAL_RANK", 0)))
    compilers = map(shutil.which, ("g++", "clang++", "c++"))
    lacks = config["compile"] and device.type == "cpu" and not config["plan_only"] and not any(compilers)
    refuse(lacks, "compile=True needs a C++ compiler on a CPU; install g++ or use compile=False")
    dtype = choose_dtype(config["dtype"], device)
    needs = config["base_dtype"] == "bfloat16" and dtype != torch.bfloat16
    refuse(needs, f"base_dtype='bfloat16' needs dtype='bfloat16', got {str(dtype).removeprefix('torch.')}")
    fp16 = dtype == torch.float16
    reason = ddp.conflict(config["compress"], config["overlap_step"], config["zero1"], config["grad_clip"], fp16)
    refuse(reason, reason)
    reason = fsdp.conflict(config, dtype) if config["parallel"] == "fsdp" else ""
    refuse(reason, reason)
    return device, dtype


class Resume(NamedTuple):
    """The checkpoint to continue: its directory (None = a new run), step, training state, and state of this rank."""

    path: Path | None
    step: int
    state: dict
    rank_state: dict
    origin: str = ""  # the init_from of these weights
    is_over: bool = False  # max_steps is reached


def find_checkpoint(config: dict, cfg: ModelConfig, order: dict) -> Resume:
    """Return the checkpoint of out_dir to continue, with its state on the CPU. Raise UserError where `resume` forbids
    it or the run would not continue exactly. order: all that decides which samples a step sees."""
    rank = int(os.environ.get("RANK", 0))
    path = find_resume(config, cfg, verbose=rank == 0)
    if path is None:
        return Resume(None, 0, {}, {})
    state, rank_state = checkpoint.load_train_state(path, rank, whole=config["parallel"] == "ddp")
    check_data_order(state["order"], state["config"], order, path, state["step"])
    check_same_parts(path, state["config"], config)
    if rank == 0:
        print(describe_resume(path, state["step"], state["config"], config), flush=True)
    was = state["config"]["init_from"]
    origin = was if not was or Path(was).exists() else config["init_from"]  # or it has moved
    return Resume(path, state["step"], state, rank_state, origin, state["step"] >= config["max_steps"])


def find_resume(config: dict, cfg: ModelConfig, verbose: bool) -> Path | None:
    """Return the checkpoint of out_dir to continue, None for a new run. Raise UserError where `resume` forbids it."""
    out = Path(config["out_dir"])
    bad = not config["out_dir"] or (out.exists() and not out.is_dir())
    refuse(bad, f"out_dir={config['out_dir']!r} is not a directory")
    place = next(parent for parent in (out, *out.absolute().parents) if parent.exists())
    refuse(not os.access(place, os.W_OK), f"out_dir={config['out_dir']!r}: {place} cannot be written to")
    if verbose and ((out / ".lock").exists() or (out / "log.jsonl").exists()):  # a run in it would remove what is read
        out_dir.lock(out)
    used = out.exists() and any(out.iterdir())
    if config["resume"] == "never":
        if used:
            out_dir.check_overwrite(config, out)
        return None
    out_dir.check_stage(out, Path(sys.argv[0]).name)
    path = checkpoint.find_latest(out, report=print if verbose else lambda text: None) if used else None
    if path is None:
        refuse(config["resume"] == "must", f"resume='must' but {out} has no checkpoint")
        if used:
            out_dir.check_own(out)
        return None
    computation.check_resume(path, checkpoint.ADAPTED_CONFIG if checkpoint.is_adapter(path) else "config.json")
    saved = checkpoint.load_config(path)
    keys = [field.name for field in dataclasses.fields(cfg) if field.compare and field.name != "dropout"]
    if differ := [key for key in keys if getattr(saved, key) != getattr(cfg, key)]:
        by = {"vocab_size": " by the data's tokenizer"}
        parts = [f"{key}={getattr(saved, key)} (asked {getattr(cfg, key)}{by.get(key, '')})" for key in differ]
        detail = ", ".join(parts)
        raise UserError(f"config: {path} has another architecture: {detail}; use another out_dir, or to "
                        "begin anew --resume=never --overwrite=True")
    return path


def describe_resume(path: Path, step: int, saved: dict, config: dict) -> str:
    """Return what a resumed run prints: the checkpoint, changed settings, and whether max_steps is reached."""
    keys = [key for key in saved.keys() & config if saved[key] != config[key]]
    changed = [f"{key} {saved[key]!r} -> {config[key]!r}" for key in keys if key != "init_from"]
    text = f"continuing {path} after step {step}" + (f"; changed: {', '.join(sorted(changed))}" if changed else "")
    if "init_from" in keys:
        text += f"; init_from={config['init_from']!r} has no effect: a run that continues has its own weights"
    gone = {key: saved[key] for key in REMOVED.keys() & saved.keys() - config.keys() if saved[key] != REMOVED[key]}
    if gone := [f"{key}={value!r}" for key, value in sorted(gone.items())]:
        text += f"; no longer a setting, ignored: {', '.join(gone)}"
    if step >= config["max_steps"]:
        raises = "epochs or max_steps" if "epochs" in config else "it"
        anew = f" from {config['init_from']} as it is now" if config["init_from"] else ""
        text += f"; max_steps={config['max_steps']} is reached: raise {raises} to train these weights on, or begin anew"
        text += f"{anew} with --resume=never --overwrite=True"
    return text


def check_same_parts(path: Path, saved: dict, config: dict) -> None:
    """Raise UserError if the settings would train other parameters than before."""
    keys = ("trainable", "lora_rank", "lora_alpha", "lora_modules")
    for key in keys if "lora" in config["trainable"] else keys[:1]:
        was = saved.get(key, config[key])
        refuse(was != config[key], f"{path} was trained with {key}={was!r}, not {config[key]!r}")


def check_data_order(saved: dict, settings: dict, now: dict, path: Path, step: int) -> None:
    """Raise UserError if anything that ordered the samples so far has changed: the run could not continue with the
    next sample. settings: of the saved run, for what its `order` lacks."""
    if "reference_weights" in now:  # earlier versions did not record it
        saved = {"reference_weights": now["reference_weights"]} | saved
    saved = {key: settings[key] for key in now if key in settings} | saved
    differ = [key for key in saved | now if saved.get(key) != now.get(key)]
    if set(differ) <= {"data", "stages"}:
        differ = list(filter(None, [same_order(saved, now, step)]))
    if differ:
        detail = {key: f"{key}={saved.get(key)} (asked {now.get(key)})" for key in differ}
        detail = ", ".join((detail | {"data": "another corpus"} if "data" in detail else detail).values())
        if any(key.startswith("total_batch") for key in differ):
            detail += " (by default it follows batch_size)"
        ways = "continue with the same, use another out_dir, or begin anew with --resume=never --overwrite=True"
        raise UserError(f"config: {path} was trained with {detail}; {ways}")


def join(config: dict, order: dict, step: int, device: torch.device, dtype: torch.dtype) -> ranks.World:
    """Join the process group. Raise UserError on all ranks if they differ in a setting, the data or the checkpoint."""
    if cpu_attention.has_instructions(device, dtype):
        cpu_attention.compiling()  # beside what follows; earlier, it would disturb the measurement of peak_flops
    world = ranks.init(device.type, config["timeout_s"])
    mine = {**config, **order, "step": step, "dtype": str(dtype)}
    everyone = ranks.gather_objects(mine)
    for rank, theirs in enumerate(everyone):
        if differ := [key for key in mine if theirs[key] != everyone[0][key]]:
            key = differ[0]
            raise UserError(
                f"train: rank {rank} has {key}={theirs[key]}, rank 0 has {everyone[0][key]}; "
                f"all ranks need the same command, data and out_dir"
            )
    return world


class Parts(NamedTuple):
    """What training changes: a checkpoint holds it, a resumed run restores it."""

    model: Transformer
    opt: Optimizer
    scaler: torch.amp.GradScaler
    hook: object  # of powersgd.make_hook
    ddp: ddp.DDP | fsdp.FSDP
    world: ranks.World
    device: torch.device
    writer: Writer | None = None  # None: saved as a part of another's state (critic.py)


def set_up(
    config: dict, model: Transformer, world: ranks.World, device: torch.device, dtype: torch.dtype,
    updates_per_step: int = 1, saves: bool = True, lengths_vary: bool = True,
) -> Parts:  # fmt: skip
    """Move the model to the device, compile it, and make DDP, optimizer and GradScaler. Freeze parameters before.
    lengths_vary: rows of one batch are longer than those of another."""
    model.to(device).activation_checkpointing = config["activation_checkpointing"]
    if device.type == "cuda":
        model.varlen = can_border(device, dtype, model.cfg.head_dim)  # to ask would break a compiled graph
    if config["compile"]:
        compile_blocks(model, lengths_vary)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    first = updates_per_step * warmup_of(config) if config["compress_start_step"] < 0 else config["compress_start_step"]
    hook = powersgd.make_hook(
        config["compress"], config["compress_rank"], first, config["compress_embedding"], config["seed"], scaler
    )
    writer = Writer(config["async_save"], config["timeout_s"]) if saves else None
    if config["parallel"] == "fsdp":
        sharded = fsdp.FSDP(model)
        opt = fsdp.AdamW(sharded.params, (config["beta1"], config["beta2"]), config["weight_decay"])
        return Parts(model, opt, scaler, hook, sharded, world, device, writer)
    whole = partial(stays_whole, config["optimizer"])
    replicas = ddp.DDP(model, config["bucket_mb"], hook, config["overlap_step"], config["zero1"], keep_whole=whole)
    opt = Optimizer(
        replicas.buckets, config["optimizer"], (config["beta1"], config["beta2"]), weight_decay=config["weight_decay"],
        momentum=config["momentum"], muon_dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16,
    )  # fmt: skip
    return Parts(model, opt, scaler, hook, replicas, world, device, writer)


def start(
    parts: Parts, resumed: Resume, config: dict, script: str,
    load: Callable[[Transformer, Path], None] = checkpoint.load_weights,
) -> torch.Tensor:  # fmt: skip
    """Restore the checkpoint, or seed a new run, and write `config` into out_dir. All ranks call it. Return the number
    of skipped steps, in all and in a row, (2,) float32. load: reads the weights."""
    if resumed.path:
        load(parts.model, resumed.path)
    seed_everything(config["seed"] + 1_000_003 * resumed.step, parts.world.rank)  # dropout differs by rank
    skipped = torch.tensor(resumed.state.get("skipped", [0.0, 0.0]), device=parts.device)
    if resumed.path:
        load_state(parts, resumed.state)
        if config["parallel"] == "fsdp":
            fsdp.load_optimizer(parts.opt, resumed.path)
        if resumed.rank_state:  # absent for a rank that the saved run did not have
            set_rng_state(resumed.rank_state["rng"], parts.device)
        if config["compress"] == "powersgd":
            saved = checkpoint.load_rank_states(resumed.path, parts.world.rank, parts.world.world_size)
            parts.hook.load_state_dict([of_rank.get("powersgd", {}) for of_rank in saved])
        resumed.state.clear()  # as large as the optimizer's
        resumed.rank_state.clear()
        config = config | {"init_from": resumed.origin}
    if parts.world.is_main:
        out_dir.prepare(config, Path(script).name, keeps_config=resumed.is_over)
        if resumed.path and checkpoint.STEP_NAME.fullmatch(resumed.path.name):  # killed before the links were moved
            checkpoint.tidy(resumed.path.parent, resumed.step, config["keep_last"], config["keep_best"])
    gc.collect()
    gc.freeze()  # nothing made so far becomes garbage: the collector need not walk it again
    return skipped


def load_state(parts: Parts, state: dict) -> None:
    parts.ddp.n_steps = state["step"]
    parts.opt.load_state_dict(state["optimizer"])
    if state["scaler"]:  # empty unless that run was in float16
        parts.scaler.load_state_dict(state["scaler"])


def save(
    parts: Parts, step: int, skipped: torch.Tensor, tokenizer: Tokenizer, config: dict, order: dict, base: str,
    log: RunLog, write: Callable[[Path, Transformer, Tokenizer], None] | None = None,
    other: Mapping[str, object] | None = None,
) -> None:  # fmt: skip
    """Write the checkpoint of this step, in a thread if async_save is on. All ranks call it. If it cannot be written (a
    full disk), the next save reports that, and tries again; older checkpoints stay whole. base, write: as in
    checkpoint.save; other: added to the training state."""
    report_save(parts, log)
    gone = parts.world.is_main and not out_dir.is_ours(Path(config["out_dir"]))
    if ranks.any_rank(gone):  # a save would make half a run in its place
        raise UserError(f"train: out_dir={config['out_dir']!r} was removed or moved while the run was in it")
    state = {"step": step, "order": order, "skipped": skipped.tolist(), "config": config}
    opt_state = parts.opt.state_dict(parts.ddp.gather if config["zero1"] else None, keep=parts.world.is_main)
    state |= {"optimizer": opt_state, "scaler": parts.scaler.state_dict()} | dict(other or {})
    rank_state = {"rng": rng_state(parts.device)}
    if config["compress"] == "powersgd":
        rank_state["powersgd"] = parts.hook.state_dict()
    model, state = (parts.model, state) if parts.world.is_main else (None, {})  # which rank 0 alone writes
    mine = {}
    if config["parallel"] == "fsdp":
        model, mine = None, fsdp.shards(parts.ddp, parts.opt)

        def write(directory: Path, _: None, tokenizer: Tokenizer) -> None:
            checkpoint.write_settings(directory, parts.model.cfg, tokenizer)

    model, state, rank_state, mine = parts.writer.copy(model, state, rank_state, mine)
    write_shards = partial(fsdp.write, parallel=parts.ddp, mine=mine, group=parts.writer.group) if mine else None
    parts.writer.start(partial(
        checkpoint.save, config["out_dir"], step, model, tokenizer, state, rank_state, parts.world, val_loss=None,
        keep_last=config["keep_last"], keep_best=config["keep_best"], base=base, write=write, group=parts.writer.group,
        write_shards=write_shards,
    ))  # fmt: skip
    if not parts.writer.behind:
        report_save(parts, log)


def rank(parts: Parts, step: int, val_loss: float, config: dict, log: RunLog) -> None:
    """Give the checkpoint of this step, if there is one, its validation loss, which decides `best` and `best2`. A run
    saves before it evaluates, because an evaluation may run out of memory."""
    if parts.world.is_main:
        keep = config["keep_last"], config["keep_best"]
        parts.writer.then(partial(checkpoint.rank, config["out_dir"], step, val_loss, *keep))


def report_save(parts: Parts, log: RunLog) -> None:
    """Wait for a save in progress, and log its result."""
    try:
        path = parts.writer.wait()
    except UserError as error:
        log.print(str(error))
    else:
        if path is not None:
            log.write("save", checkpoint.step_of(path), {"path": str(path)})


def figures(
    parts: Parts, lr: float, grad_norm: torch.Tensor, skipped: torch.Tensor, tokens_per_s: float, flops: float,
    peak: float,
) -> dict[str, float]:  # fmt: skip
    """Return the figures that every trainer logs. flops: per token; peak: FLOP/s of one device."""
    return {
        "lr": lr, "grad_norm": grad_norm.item(), "tokens_per_s": tokens_per_s,
        "mfu": tokens_per_s * flops / peak / parts.world.world_size, "memory_gib": peak_memory_gib(parts.device),
        "skipped": int(skipped[0]),
    }  # fmt: skip


def stop_not_finite(
    parts: Parts, log: RunLog, step: int, skipped: int, loss_sum: torch.Tensor, batches: Batches
) -> None:
    """Raise UserError on every rank, naming the ranks whose loss was not finite, and their samples."""
    report_save(parts, log)
    bad = [rank for rank, finite in enumerate(ranks.gather_objects(bool(loss_sum.isfinite()))) if not finite]
    where = f"loss not finite on rank {', '.join(map(str, bad))}" if bad else "loss finite, gradient not"
    share = batches.samples_per_step // parts.world.world_size
    first = batches.position(step - 1) + (bad[0] if bad else 0) * share
    raise UserError(
        f"train: step {step}: {skipped} steps in a row without a finite gradient; {where}; samples {first} to "
        f"{first + share - 1}; lower learning_rate or continue from an earlier checkpoint"
    )


def finish(
    parts: Parts, log: RunLog, config: dict, script: str, data: Iterable[str], stopped_by: StopSignal | None,
    batches: Batches | None = None, why: str = "",
) -> NoReturn:  # fmt: skip
    """Wait for the last save, write the run's README.md and exit: with 0, 1 if that save failed, or as a signal does.
    data: lines about the data; why: what ended the run before max_steps."""
    report_save(parts, log)
    parts.writer.close()
    saved = parts.writer.saved
    if stopped_by:
        without = ", without --resume=never --overwrite=True" if config["resume"] == "never" else ""
        how = f"the same command continues{without}" if saved else "the last save failed"
        log.print(f"stopped by a signal after step {log.step}; {how}")
    if batches:
        batches.close()
    log.close()
    trained = log.step > log.first_step or not Path(config["out_dir"], "README.md").exists()
    if parts.world.is_main and trained:
        why = "stopped by a signal" if stopped_by else why
        run_card.write(config["out_dir"], script, config, data, parts.device, parts.world.world_size, why)
    ranks.close()
    sys.exit(stopped_by.exit_code if stopped_by else int(not saved))
