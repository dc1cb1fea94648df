"""A run and its directory, the same for every trainer: settings that all have, where a run begins, what a checkpoint
brings back and holds, and what stops a run.

The trainers share this file so that resuming is exact in all of them for the same reason; the loops are their own.
"""

import contextlib
import dataclasses
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import ddp as dist
from configurator import write_config
from groundup.errors import UserError
from groundup.tokens.batches import Batches
from groundup.tokens.corpus import same_order
from groundup.train import checkpoint, ranks
from groundup.train.device import choose_device, choose_dtype, rng_state, set_rng_state
from groundup.train.log import RunLog, check_tensorboard
from groundup.train.lora import resize_vocab
from groundup.train.optim import SCHEDULES, Optimizer
from groundup.train.write_behind import Writer
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

AT_LEAST = dict.fromkeys(("batch_size", "block_size", "log_every", "eval_every", "save_every", "max_skipped"), 1)
AT_LEAST |= {"total_batch_tokens": 0, "eval_steps": 0, "warmup_steps": 0, "decay_steps": 0, "compress_rank": 1}
AT_LEAST |= dict.fromkeys(("keep_last", "keep_best", "grad_clip", "weight_decay", "learning_rate", "bucket_mb"), 0)
AT_LEAST |= {"compress_start_step": -1}
SHARES = ("warmup_fraction", "decay_fraction", "beta1", "beta2", "momentum")
CHOICES = {
    "schedule": SCHEDULES, "optimizer": ("adamw", "muon"), "resume": ("auto", "never", "must"),
    "compress": dist.COMPRESS,
}  # fmt: skip
# What a run leaves in its directory: overwrite=True deletes nothing else.
OWN_FILES = re.compile(
    r"(config\.py|log\.jsonl|reference\.safetensors|README\.md|events\.out\.tfevents.*|\.?latest|\.?best2?|\.?step_\d+)"
    r"(\.tmp|\.old)?"
)





# ---- settings --------------------------------------------------------------------------------------------------------


def check_config(config: dict) -> None:
    """Raise ConfigError for a value that no trainer can use; nothing exists yet when it does."""
    for key, least in AT_LEAST.items():
        check_least(config, key, least)
    for key in SHARES:
        check_share(config, key)
    for key, allowed in CHOICES.items():
        check_choice(config, key, allowed)
    if config["keep_best"] > 2:
        raise UserError(f"config: keep_best must be 0, 1 or 2, got {config['keep_best']}")
    if config["overwrite"] and config["resume"] != "never":
        raise UserError("config: overwrite=True deletes the run that resume would continue; add resume='never'")
    check_tensorboard(config["tensorboard"])
    if config["schedule"] == "wcsd" and not config["stable_lr"]:
        raise UserError("config: schedule='wcsd' needs stable_lr, the learning rate of its plateau")


def check_least(config: dict, key: str, least: float) -> None:
    if not config[key] >= least:
        raise UserError(f"config: {key} must be at least {least}, got {config[key]}")


def check_share(config: dict, key: str) -> None:
    if not 0 <= config[key] <= 1:
        raise UserError(f"config: {key} must be from 0 to 1, got {config[key]}")


def check_choice(config: dict, key: str, allowed: tuple[str, ...]) -> None:
    if config[key] not in allowed:
        raise UserError(f"config: {key} must be one of {', '.join(allowed)}, got {config[key]!r}")


def count_tokens(config: dict, world_size: int) -> int:
    """Tokens per step over all ranks: total_batch_tokens; 0 = one micro-step on each. Raises ConfigError."""
    return count_per_step(config, "total_batch_tokens", {"block_size": config["block_size"], "world_size": world_size})


def count_pairs(config: dict, world_size: int) -> int:
    """Pairs per step over all ranks: total_batch_pairs; 0 = one micro-step on each. Raises ConfigError."""
    return count_per_step(config, "total_batch_pairs", {"world_size": world_size})


def count_per_step(config: dict, key: str, factors: dict[str, int]) -> int:
    """config[key], or one micro-step where it is 0. Raises ConfigError where it is no multiple of `factors` and of
    batch_size. A batch_size that is still to be chosen, 0, will divide it."""
    batch_size, total = config["batch_size"], config[key]
    if not batch_size and not total:
        raise UserError(
            f"config: batch_size=0 takes as many as fit, and {key}=0 would make that the step: what a run learns must "
            f"not depend on the memory; give {key}, or batch_size"
        )
    if not batch_size and config["eval_steps"]:
        raise UserError(
            f"config: batch_size=0 takes as many as fit, and eval_steps={config['eval_steps']} counts such batches: "
            "what an evaluation reads must not depend on the memory; give eval_steps=0, all of it, or batch_size"
        )
    factors = ({"batch_size": batch_size} if batch_size else {}) | factors
    per_micro_step = math.prod(factors.values())
    if total % per_micro_step:
        values = " = ".join(dict.fromkeys(("*".join(map(str, factors.values())), str(per_micro_step))))
        raise UserError(f"config: {key}={total} must be a multiple of {'*'.join(factors)} = {values}")
    return total or per_micro_step


def choose_device_and_dtype(config: dict) -> tuple[torch.device, torch.dtype]:
    """The device of this rank and the dtype of its matrix products. Raises ConfigError for what cannot go together."""
    if config["plan_only"] and config["device"] == "cuda" and config["peak_tflops"] and config["dtype"] != "auto":
        device = torch.device("cuda")  # a plan for another machine
    else:
        device = choose_device(config["device"], int(os.environ.get("LOCAL_RANK", 0)))
    compilers = map(shutil.which, ("g++", "clang++", "c++"))
    if config["compile"] and device.type == "cpu" and not config["plan_only"] and not any(compilers):
        raise UserError("config: compile=True needs a C++ compiler on a CPU; install g++ or use compile=False")
    dtype = choose_dtype(config["dtype"], device)
    fp16 = dtype == torch.float16
    if reason := dist.conflict(config["compress"], config["overlap_step"], config["zero1"], config["grad_clip"], fp16):
        raise UserError(f"config: {reason}")
    return device, dtype


# ---- where a run begins ----------------------------------------------------------------------------------------------


def find_resume(config: dict, cfg: ModelConfig, verbose: bool) -> Path | None:
    """Checkpoint of out_dir to continue from, or None to start. Raises ConfigError where `resume` forbids it."""
    out = Path(config["out_dir"])
    if not config["out_dir"] or (out.exists() and not out.is_dir()):
        raise UserError(f"config: out_dir={config['out_dir']!r} is not a directory")
    place = next(parent for parent in (out, *out.absolute().parents) if parent.exists())
    if not os.access(place, os.W_OK):
        raise UserError(f"config: out_dir={config['out_dir']!r}: {place} cannot be written to")
    used = out.exists() and any(out.iterdir())
    if config["resume"] == "never":
        if used:
            check_overwrite(config, out)
        return None
    path = checkpoint.find_latest(out, report=print if verbose else lambda text: None) if used else None
    if path is None:
        if config["resume"] == "must":
            raise UserError(f"config: resume='must' but {out} has no checkpoint")
        return None
    saved = checkpoint.load_config(path)
    differ = [f.name for f in dataclasses.fields(cfg) if getattr(saved, f.name) != getattr(cfg, f.name)]
    differ = [key for key in differ if key != "dropout"]
    if differ:
        detail = ", ".join(f"{key}={getattr(saved, key)} (asked {getattr(cfg, key)})" for key in differ)
        raise UserError(f"config: {path} has another architecture: {detail}; use another out_dir, or init_from")
    return path


def check_overwrite(config: dict, out: Path) -> None:
    """Raise ConfigError unless all of `out` may be deleted: the user said so, and it is a run and nothing else."""
    if not config["overwrite"]:
        raise UserError(f"config: resume='never' but {out} is not empty; use another out_dir or overwrite=True")
    foreign = [path.name for path in out.iterdir() if not OWN_FILES.fullmatch(path.name)]
    if foreign:
        raise UserError(f"config: {out} holds {foreign[0]!r}, which no run made; use another out_dir")
    if config["init_from"] and Path(config["init_from"]).resolve().is_relative_to(out.resolve()):
        raise UserError(f"config: init_from={config['init_from']!r} lies in the out_dir that overwrite=True deletes")


def check_ranks_agree(mine: dict) -> None:
    """Raise on all ranks if one of them has another setting or would continue from another step."""
    everyone = ranks.gather_objects(mine)
    for rank, theirs in enumerate(everyone):
        differ = [key for key in mine if theirs[key] != everyone[0][key]]
        if differ:
            key = differ[0]
            raise UserError(
                f"train: rank {rank} has {key}={theirs[key]}, rank 0 has {everyone[0][key]}; "
                f"all ranks need the same command, data and out_dir"
            )


def describe_resume(path: Path, step: int, saved: dict, config: dict) -> str:
    """What a resumed run says: from where, with which other settings, and that it has come to its end if it has."""
    changed = [f"{key} {saved[key]!r} -> {config[key]!r}" for key in saved.keys() & config if saved[key] != config[key]]
    text = f"continuing {path} after step {step}" + (f"; changed: {', '.join(sorted(changed))}" if changed else "")
    if step >= config["max_steps"]:
        text += f"; max_steps={config['max_steps']} is reached, raise it to go on"
    return text


def check_same_parts(path: Path, saved: dict, config: dict) -> None:
    """A resumed run trains what it trained before. Raises ConfigError."""
    keys = ("trainable", "lora_rank", "lora_alpha", "lora_modules")
    for key in keys if "lora" in config["trainable"] else keys[:1]:
        if saved.get(key, config[key]) != config[key]:
            raise UserError(f"config: {path} was trained with {key}={saved[key]!r}, not {config[key]!r}")


def check_data_order(saved: dict, now: dict, defaults: dict, path: Path, step: int) -> None:
    """A resumed run goes on with the very next sample only if all that ordered the samples so far is unchanged. Raises
    ConfigError. defaults: of keys that are recorded only where they differ from them."""
    differ = [key for key in saved | now if saved.get(key) != now.get(key)]
    if set(differ) <= {"data", "stages"} and "competence" not in now:  # a curriculum looks ahead
        differ = list(filter(None, [same_order(saved, now, step)]))
    if differ:
        was, asked = defaults | saved, defaults | now
        detail = {key: f"{key}={was.get(key)} (asked {asked.get(key)})" for key in differ}
        detail = ", ".join((detail | {"data": "another corpus"} if "data" in detail else detail).values())
        raise UserError(f"config: {path} was trained with {detail}; resume unchanged, or start anew with init_from")


def prepare_out_dir(config: dict, script: str) -> None:
    """Make out_dir, empty if it is to be overwritten, and write the settings that `script` runs again with."""
    out = Path(config["out_dir"])
    if config["resume"] == "never" and out.exists():
        shutil.rmtree(out)  # check_overwrite has looked at it
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"config: out_dir={config['out_dir']!r}: {error.strerror}") from None
    again = config | {"resume": "auto", "overwrite": False}  # to run it again must not delete it
    write_config(again, f"{out}/config.py", command=f"python {script}.py {out}/config.py")


# ---- the weights it begins with --------------------------------------------------------------------------------------


def tuned_architecture(config: dict, source: Path | None, token_vocab: int) -> ModelConfig:
    """That of the checkpoint `source`, with rows for all token ids, for texts as long as it can or as is asked; without
    a source that of a tiny model, to try a script with."""
    block_size, dropout = config["block_size"], config["dropout"]
    if source is None:
        return ModelConfig(token_vocab, block_size, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, dropout=dropout)
    cfg = checkpoint.load_config(source)
    rows, longest = max(cfg.vocab_size, token_vocab), max(cfg.block_size, block_size)
    return dataclasses.replace(cfg, vocab_size=rows, block_size=longest, dropout=dropout)


def count_known_ids(source: Path, tokenizer: Tokenizer, whose: str) -> int:
    """How many of the tokenizer's ids the weights in `source` were trained with: all of them, or the first so many if
    it is their tokenizer with more tokens. Raises ConfigError if it is another, that of `whose`."""
    n_rows = checkpoint.load_config(source).vocab_size
    directory = checkpoint.tokenizer_dir(source)
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        if tokenizer.vocab_size > n_rows:
            raise UserError(f"config: {whose} has {tokenizer.vocab_size} token ids, {source} only {n_rows}")
        return n_rows
    known = Tokenizer.load(directory)
    if known.fingerprint() == tokenizer.fingerprint():
        return n_rows
    same = known.pieces.items() <= tokenizer.pieces.items() and known.special_ids <= tokenizer.special_ids
    if not same or tokenizer.vocab_size <= known.vocab_size:
        raise UserError(
            f"config: {whose} was not tokenized with the tokenizer of {source}, nor with one that extends it; "
            f"rerun prepare.py with --tokenizer_dir={source}"
        )
    return known.vocab_size


def check_trainable(config: dict, source: Path | None, n_new: int) -> None:
    """Raise ConfigError where `trainable` does not fit what training begins with; n_new ids have no weights yet."""
    parts = [part.strip() for part in config["trainable"].split(",")]
    if parts == ["all"]:
        return
    if source is None:
        raise UserError(f"config: trainable={config['trainable']!r} leaves the rest as it was: give init_from")
    if "lora" in parts and checkpoint.is_adapter(source):
        fix = f"python tools/merge.py --init_from={source} --out_dir=DIR"
        raise UserError(f"config: {source} is an adapter; first: {fix}")
    if "lora" in parts and n_new > 0 and not {"embed", "lm_head"} <= {*parts}:
        raise UserError(f"config: {n_new} token ids are new to {source}: use trainable='embed,lm_head,lora'")


def load_start(model: Transformer, source: Path, n_known: int) -> None:
    """The weights in `source` into a model that may have more rows for tokens: those from n_known on become the mean of
    the others, for new tokens mean nothing yet."""
    same_rows = checkpoint.load_config(source).vocab_size == model.cfg.vocab_size == n_known
    if same_rows and not checkpoint.is_adapter(source):
        checkpoint.load_weights(model, source)
        return
    start = checkpoint.load_model(source, block_size=model.cfg.block_size)
    resize_vocab(start, model.cfg.vocab_size, n_known)
    model.load_state_dict(start.state_dict())


def frozen_base(resume_from: Path | None, source: Path | None) -> str:
    """Directory of the weights that adapters are added to: a resumed run's own, whatever init_from has come to mean. If
    it is a step of a run, that run will not remove it."""
    if resume_from and checkpoint.is_adapter(resume_from):
        base = checkpoint.base_of(resume_from)
    elif source:
        base = source.resolve()
    else:
        return ""
    if checkpoint.STEP_NAME.fullmatch(base.name):
        with contextlib.suppress(OSError):  # a directory of others, that cannot be written to
            (base / checkpoint.KEEP).touch()
    return str(base)


# ---- what a checkpoint holds -----------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """What training changes, and so what a checkpoint holds and a resumed run brings back."""

    model: Transformer
    opt: Optimizer
    scaler: torch.amp.GradScaler
    hook: object  # of ddp.make_hook
    ddp: dist.DDP
    world: ranks.World
    device: torch.device
    writer: Writer | None = None  # None: saved as a part of another's state (critic.py)


def restore(parts: Parts, path: Path, state: dict, rank_state: dict, compress: str) -> None:
    """Everything but the weights as it was when the checkpoint `path` was saved; the two states are its content."""
    parts.ddp.n_steps = state["step"]
    parts.opt.load_state_dict(state["optimizer"])
    if state["scaler"]:  # empty unless that run was in float16
        parts.scaler.load_state_dict(state["scaler"])
    if rank_state:  # absent for a rank that the saved run did not have
        set_rng_state(rank_state["rng"], parts.device)
    if compress == "powersgd":
        rank_states = checkpoint.load_rank_states(path, parts.world.rank, parts.world.world_size)
        parts.hook.load_state_dict([saved.get("powersgd", {}) for saved in rank_states])


def save(
    parts: Parts, step: int, tokenizer: Tokenizer, config: dict, order: dict, skipped: torch.Tensor,
    val_loss: float | None, log: RunLog, base: str = "",
    write: Callable[[Path, Transformer, Tokenizer], dict] | None = None, other: Mapping[str, object] | None = None,
) -> None:  # fmt: skip
    """Write the checkpoint of this step, by all ranks, behind training unless async_save is off. If it cannot be
    written (a full disk), the next save says so and is tried: what is there already is whole. base, write: as of
    checkpoint.save; other: what the training state holds besides."""
    report_save(parts, log)
    state = {"step": step, "order": order, "skipped": skipped.tolist(), "config": config}
    opt_state = parts.opt.state_dict(parts.ddp.gather if config["zero1"] else None, keep=parts.world.is_main)
    state |= {"optimizer": opt_state, "scaler": parts.scaler.state_dict()} | dict(other or {})
    rank_state = {"rng": rng_state(parts.device)}
    if config["compress"] == "powersgd":
        rank_state["powersgd"] = parts.hook.state_dict()
    model, state = (parts.model, state) if parts.world.is_main else (None, {})  # which rank 0 alone writes
    model, state, rank_state = parts.writer.copy(model, state, rank_state)
    parts.writer.start(partial(
        checkpoint.save, config["out_dir"], step, model, tokenizer, state, rank_state, parts.world,
        val_loss=val_loss, keep_last=config["keep_last"], keep_best=config["keep_best"], base=base, write=write,
        group=parts.writer.group,
    ))  # fmt: skip
    if not parts.writer.behind:
        report_save(parts, log)


def report_save(parts: Parts, log: RunLog) -> None:
    """Wait for the save that is under way and say how it ended, if there is one."""
    try:
        path = parts.writer.wait()
    except UserError as error:
        log.print(str(error))
    else:
        if path is not None:
            log.write("save", checkpoint.step_of(path), {"path": str(path)})


def finish_saving(parts: Parts, log: RunLog) -> bool:
    """Wait for the last save; whether it is on the disk. None can follow."""
    report_save(parts, log)
    parts.writer.close()
    return parts.writer.saved


# ---- what stops a run ------------------------------------------------------------------------------------------------


def stop_not_finite(
    parts: Parts, log: RunLog, step: int, skipped: int, loss_sum: torch.Tensor, batches: Batches
) -> None:
    """Raise on every rank, naming the ranks whose loss of this step was not finite and where their data lies."""
    report_save(parts, log)
    bad = [rank for rank, finite in enumerate(ranks.gather_objects(bool(loss_sum.isfinite()))) if not finite]
    where = f"loss not finite on rank {', '.join(map(str, bad))}" if bad else "loss finite, gradient not"
    share = batches.samples_per_step // parts.world.world_size
    first = batches.position(step - 1) + (bad[0] if bad else 0) * share
    raise UserError(
        f"train: step {step}: {skipped} steps in a row without a finite gradient; {where}; samples {first} to "
        f"{first + share - 1}; lower learning_rate or continue from an earlier checkpoint"
    )
