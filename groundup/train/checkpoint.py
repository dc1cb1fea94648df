"""Checkpoints of a run: find the one to continue, restore it, save the next.

    out/demo/
      config.py  log.jsonl  README.md  .lock        settings, events, card; the process at work
      step_000200/                                  a checkpoint:
        config.json  model.safetensors  ...           what transformers reads, see huggingface.py
        train_state.pt                                step, optimizer, scaler, settings, data
        rank_00000.pt  rank_00001.pt  ...             by rank: random state, errors of PowerSGD
        checksums.json                                CRC-32 of the other files, written last
      latest -> step_000200                         the newest checkpoint
      best -> step_000150  best2 -> step_000100     those with the lowest val_loss in log.jsonl

A checkpoint appears whole or not at all: it is written as .step_000200.tmp, put on the disk, and
then renamed. A kill at any moment loses at most the save under way, because nothing is removed
before its successor is whole. Only the data decide whether a save succeeded. Links, locks and the
removal of old steps are housekeeping: where the file system refuses them, a run warns and goes on.
Rank 0 alone writes, so machines need not share a disk while a run trains; to resume, each needs a
copy. At a start rank 0 reads, compares checksums and sends what it read; the others read only
small files, and with ZeRO-1 and FSDP their share.

Opening a checkpoint never runs code: weights are safetensors, state is plain data.
"""

import dataclasses
import gc
import math
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from configurator import defaults_of, script_of, write_config
from groundup.errors import UserError, before_exit, listed, reason_of, refuse, say
from groundup.files import disk
from groundup.files.disk import housekeeping, is_utf8, make_room_beside, sync
from groundup.files.untrusted import check_zip, is_inside, read_json
from groundup.tokens.batches import changed_entry
from groundup.tokens.text_tokenizer import TextTokenizer
from groundup.train import fsdp, huggingface, ranks
from groundup.train.config_json import is_as_saved, read_config
from groundup.train.device import rng_state, set_rng_state
from groundup.train.huggingface import fail
from groundup.train.optim import DECAY_FRACTION, learning_rate_at, warmup_length
from groundup.train.powersgd import PowerSGD
from model import ModelConfig, Transformer

if TYPE_CHECKING:
    from groundup.train.log import RunLog

STEP_NAME = re.compile(r"step_(\d+)")
BEST = ("best", "best2")
LINKS = ("latest", *BEST)
NEW_DIRECTORY_S = 60  # NFS may hide a new directory from other machines for this long
START_OVER = "start over with --resume=never --overwrite=True"

# What a run writes in its directory. overwrite=True deletes this; all else is the user's and stays.
# HIDDEN are the names of `make_room_beside`, which a kill may leave.
HIDDEN = re.compile(r"\.(latest|best2?|step_\d+)\.(tmp|old)\d*")
OWN_FILES = re.compile(
    r"(config\.py|log\.jsonl|reference\.safetensors|README\.md)(\.tmp)?|events\.out\.tfevents.*"
    rf"|latest|best2?|step_\d+|{HIDDEN.pattern}"
)
# In the directory of a model, or of prepared data. All other names may stay beside a run.
NOT_OF_A_RUN = ("adapter_config.json", "config.json", "manifest.json")
# Users have files of these names too. A run's own have this in their first line.
FIRST_LINES = {"config.py": b"'Resolved configuration", "README.md": b": a run of "}

# ---- checkpoints on the disk ---------------------------------------------------------------------
# Three functions choose one: `resolve` by the setting init_from, `newest_run` if it is empty
# (sample.py), and `find` to continue the run in out_dir.


def step_dirs(out_dir: Path) -> list[Path]:
    """Return the finished steps of a run, oldest first."""
    found = [path for path in out_dir.glob("step_*") if STEP_NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(step_dir: Path) -> int:
    """Return the step of a checkpoint, by its name."""
    return int(STEP_NAME.fullmatch(step_dir.name)[1])


def step_path(out_dir: Path, step: int) -> Path:
    """Return the directory of a step."""
    return out_dir / f"step_{step:06d}"


def rank_file(rank: int) -> str:
    """Return the name of the file with the state of one rank."""
    return f"rank_{rank:05d}.pt"


def find_latest(out_dir: str | Path, report: Callable[[str], None] = print) -> Path | None:
    """Return the newest undamaged checkpoint of a run, None if it has none yet."""
    # A bad disk, or a copy that was cut short, costs the newest one; then the one before is used.
    paths = step_dirs(Path(out_dir))
    for path in reversed(paths):
        try:
            check_bytes(path)
            return path
        except UserError as error:
            report(f"{error}; trying the checkpoint before it")
    # Not None: a new run would overwrite what may still be rescued.
    if paths:
        fail(f"all {len(paths)} checkpoints in {out_dir} are damaged; use another out_dir")
    return None


def check_bytes(step_dir: Path) -> None:
    """Raise UserError unless every file of a checkpoint is as it was written (CRC-32)."""
    # A file of another size or another bit has another checksum; one that is absent cannot be read.
    sums = step_dir / "checksums.json"
    for name, expected in read_json(sums).items():
        # A file from elsewhere must not name files outside its directory.
        if not is_inside(name):
            fail(f"{sums} is damaged: it names {name!r:.80}")
        path = step_dir / name
        try:
            found = huggingface.checksum(path)
        except OSError as error:
            fail(f"cannot read {path}: {error.strerror}")
        if found != expected:
            fail(f"{path} is damaged, its checksum is not the one in checksums.json")


@ranks.on_rank_0
def resolve(directory: str | Path, key: str = "init_from", rewards: bool = False) -> Path:
    """Return the model directory that is meant: itself, or a run's newest checkpoint.

    key: the setting that names it. rewards: it may be a reward model. Its checksums are compared.
    All ranks call it; rank 0 reads."""
    path = Path(directory)
    if not str(directory):
        fail(f"{key}: give the run, checkpoint or Hugging Face directory to start from")
    if not path.is_dir():
        fail(f"{key}={str(directory)!r}: {why_no_model(path, key)}")

    # A model directory itself, or else a run
    unchecked = [path]
    model_files = ("adapter_config.json", "config.json", "checksums.json")
    if not any((path / name).exists() for name in model_files):
        unchecked, path = [], find_latest(path)  # which compares checksums
        if path is None:
            hint = "".join(f"; give {p}" for p in Path(directory).glob("snapshots/*"))  # of the hub
            fail(f"{directory} holds no checkpoint: no config.json, no step_*{hint}")

    # An adapter without its base should show now. Models of other programs have no checksums.
    if huggingface.is_adapter(path):
        unchecked.append(huggingface.base_of(path))
    for part in unchecked:
        if (part / "checksums.json").exists():
            check_bytes(part)
    if huggingface.is_reward_model(path) and not rewards:
        how = f"give another {key}"
        if start := start_of(path):
            how = f"--{key}={start} is what it started from"
        fail(f"{path} is a reward model, which writes no text; {how}")
    return path


def start_of(path: Path) -> str:
    """Return the init_from of the run that wrote a checkpoint, "" if it is unknown."""
    settings = path.parent / "config.py"
    if not STEP_NAME.fullmatch(path.name) or not settings.exists():
        return ""
    with suppress(SyntaxError, ValueError):  # a person may have edited it
        return defaults_of(settings).get("init_from", "")
    return ""


def why_no_model(path: Path, key: str) -> str:
    """Return why a path that is not a directory names no model, and what to do."""
    if path.suffix == ".gguf":
        return f"first: python tools/from_gguf.py {path} DIR"
    if path.exists():
        return "is a file, give its directory"
    # The links best and best2 come with the first evaluation.
    if path.name in BEST and step_dirs(path.parent):
        text = "no checkpoint of this run has been evaluated yet, or its disk has no links"
        return f"{text}; --{key}={path.parent} is its newest"
    # Nothing is downloaded from here.
    hub = re.fullmatch(r"(?:https?:/huggingface\.co/)?((?!out/)[\w-]+/[\w.-]+)", str(path))
    if hub and not path.parent.exists():
        return f"no such directory; a model of the hub first: hf download {hub[1]} --local-dir=DIR"
    if str(path) in ("scratch", "resume"):  # nanoGPT's words
        text = "pretrain.py begins or continues the run in out_dir, sample.py takes the newest run"
        return f"no such directory; leave {key} out: {text}"
    if "," in str(path):
        text = "evaluate.py with --out=A.json for the first, then --beside=A.json for the second"
        return f"no such directory; it is one model. To compare two: {text}"
    runs = sorted(str(run) for run in Path("out").glob("[!.]*") if step_dirs(run))
    return f"no such directory; the runs here: {listed(runs) or 'none yet'}"


def newest_run(root: str | Path = "out", rewards: bool = False) -> Path:
    """Return the run below `root` that saved last: of models of text, or of reward models."""
    saves = Path(root).glob("[!.]*/step_*/checksums.json")  # written at the end of a save
    for sums in sorted(saves, key=lambda path: path.stat().st_mtime, reverse=True):
        # A reward model's config.json names its kind. An adapter, which writes text, has none.
        config = huggingface.config_path(sums.parent)
        if config.exists() and (b"ForSequenceClassification" in config.read_bytes()) == rewards:
            return sums.parent.parent
    fail(f"no run in {str(root)!r} has a checkpoint; train, or give --init_from=DIR")


def read_state(path: Path) -> dict:
    """Return the plain data in a .pt file. Its tensors are mapped: the ranks share the memory."""
    # torch raises errors of many kinds, and its text recommends weights_only=False: that runs code.
    try:
        check_zip(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}")
    except Exception:
        fail(f"refused to load {path}: damaged, or more than plain data")
    if not isinstance(state, dict):
        fail(f"refused to load {path}: it holds a {type(state).__name__}, not a dict")
    return state


# ---- find: the checkpoint to continue ------------------------------------------------------------


def find(
    config: dict, model_config: ModelConfig, data_record: dict, max_steps: int
) -> tuple[Path | None, dict]:
    """Return the checkpoint of out_dir to continue and its training state. All ranks call it.

    If a run has begun there it locks out_dir and removes what a kill has left of a save.

    data_record: what decides the samples of a step and what is learned of them; a run that
    continues must have the same. A new run has None and {"step": 0}. The state also has `changed`,
    see changed_settings. Its tensors are mapped from a file: drop them once they are loaded."""
    path = choose(config)
    if path is None:
        return None, {"step": 0}
    # Rank 0 has chosen. Each rank must be able to read it, from a disk that they share or its own.
    check_visible(path, config["timeout_s"])
    state = read_state(path / "train_state.pt")  # mapped: no rank reads its tensors here
    check_continues(path, state, config, model_config, data_record)
    state["changed"] = changed_settings(state["config"], config)
    if ranks.rank() == 0:
        print(describe_resume(path, state, config, max_steps), flush=True)
    return path, state


@ranks.on_rank_0
def choose(config: dict) -> Path | None:
    """Return the checkpoint that the settings ask to continue, None for a new run.

    If a run has begun there, lock out_dir before, and `repair` what a kill has left."""
    check_resume_settings(config)
    out, resume, step = Path(config["out_dir"]), resume_mode(config), config["resume_from"]

    # Another run could delete the checkpoint while we read it.
    if (out / ".lock").exists() or (out / "log.jsonl").exists():
        lock(out)
    used = bool(run_files(out))
    path = None
    if resume == "never":
        # The run that is there is deleted: the user must say so, and not start from it.
        text = f"resume='never' but {out} holds a run; use another out_dir or overwrite=True"
        refuse(used and not config["overwrite"], text)
        source = config["init_from"]
        inside = source and Path(source).resolve().is_relative_to(out.resolve())
        text = f"init_from={source!r} lies in the out_dir that overwrite=True deletes"
        refuse(used and inside, text)
    else:
        script, other = Path(sys.argv[0]).resolve().name, script_of(out / "config.py")
        text = f"{out} is a run of {other}; use another out_dir for {script}"
        refuse(used and other and other != script, text)
        if used:
            repair(out)
        if step and not is_restarted():
            path = find_step(out, step, config["overwrite"])
        else:
            path = find_latest(out)
    if path is None:
        text = f"resume='must' but {out} has no checkpoint; for a new run leave resume out"
        refuse(resume == "must", text)
        check_nothing_foreign(out)
        if resume != "never" and (out / "log.jsonl").exists():
            print(f"{out} has no checkpoint, so the run begins anew", flush=True)
    return path


def check_resume_settings(config: dict) -> None:
    """Raise UserError for settings that contradict each other."""
    # The setting, not resume_mode: a restarted run still has its overwrite=True.
    out, step, is_new = config["out_dir"], config["resume_from"], config["resume"] == "never"
    deletes = config["overwrite"] and not (is_new or step)
    refuse(deletes, "overwrite=True deletes what is there; it needs resume='never' or resume_from")
    refuse(step and is_new, f"resume_from={step} continues a run; leave resume='never' out")
    is_file = os.path.exists(out) and not os.path.isdir(out)
    text = f"out_dir={out!r} is not a directory; name a new one, such as out/mine"
    refuse(not out or is_file, text)
    # A run would train and save there, and could not be continued.
    text = f"out_dir={out!r} is not UTF-8, but torch and safetensors open no other names; "
    refuse(not is_utf8(out), text + "use ASCII letters, or a locale of UTF-8")

    # The out_dir in the config.py of a run that was moved or copied names the old place, and a
    # relative one names another place in each working directory: a new run would begin there.
    given = any(word.startswith("--out_dir=") for word in sys.argv)
    for path in map(Path, sys.argv[1:]):
        is_run = path.name == "config.py" and made_by_a_run(path) and step_dirs(path.parent)
        # does this file give the out_dir, and not another override file?
        named = is_run and f"out_dir = {out!r}\n" in path.read_text(encoding="utf-8")
        moved = named and path.parent.resolve() != Path(out).resolve()
        text = f"{path} has out_dir={out!r}; to continue the run beside it"
        text += f" give --out_dir={path.parent}, else another --out_dir"
        refuse(moved and not given, text)


def resume_mode(config: dict) -> str:
    """Return the setting `resume`, "auto" when torchrun restarts a run after an error."""
    # The same command must not delete what it saved before the error.
    return "auto" if is_restarted() else config["resume"]


def is_restarted() -> bool:
    """Return whether torchrun has started these processes again, after an error."""
    # Without RANK torchrun has not started us: another program has left the count.
    return "RANK" in os.environ and ranks.number_in("TORCHELASTIC_RESTART_COUNT") > 0


def find_step(out: Path, step: int, overwrite: bool) -> Path:
    """Return the checkpoint of a step. Raise UserError if there are later ones to be kept."""
    # Damage is an error here, because the user has asked for this step and no other.
    steps = step_dirs(out)
    path = step_path(out, step)
    there = ", ".join(str(step_of(other)) for other in steps) or "none"
    refuse(path not in steps, f"resume_from={step}: {out} has no such checkpoint, only {there}")
    check_bytes(path)
    # Later ones would stay, and the next start would continue from the newest of them, which does
    # not follow from the steps that are trained now.
    later = ", ".join(other.name for other in steps if step_of(other) > step)
    text = f"resume_from={step} deletes {later} of {out}; add --overwrite=True, or copy the run"
    refuse(later and not overwrite, f"{text} to another out_dir first")
    return path


def check_visible(path: Path, timeout_s: float) -> None:
    """Raise UserError unless every rank finds this checkpoint under its name."""
    # The checksums, which differ between any two checkpoints, stand for all of its files.
    sums = path / "checksums.json"
    deadline = time.monotonic() + min(NEW_DIRECTORY_S, timeout_s / 2)
    while not sums.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    everyone = ranks.gather_objects(sums.read_bytes() if sums.exists() else b"")
    for other, theirs in enumerate(everyone):
        found = "finds another checkpoint in" if theirs else "cannot read"
        fix = "copy that of rank 0 there, or use a file system that all machines share"
        refuse(theirs != everyone[0], f"rank {other} {found} {path}; {fix}")


@ranks.on_rank_0
def check_continues(
    path: Path, state: dict, config: dict, model_config: ModelConfig, data_record: dict
) -> None:
    """Raise UserError unless the run can continue exactly."""
    check_data(path, state["data"], data_record, state["step"])
    check_model(path, model_config)
    # The same parameters, and adapters of the same size
    before = state["config"]
    keys = ["trainable"]
    if "lora" in config["trainable"]:
        keys += ["lora_rank", "lora_alpha"]  # pretrain.py has no lora_alpha
    for key in keys:
        text = f"{path} was trained with {key}={before.get(key)!r}, not {config.get(key)!r}"
        refuse(before.get(key) != config.get(key), text)


def check_data(path: Path, saved: dict, now: dict, step: int) -> None:
    """Raise UserError if data_record has changed: then the next sample would be another one."""
    # Stages of a mixture that start after `step` may change.
    # `data` and `stages` describe the mixture; the other keys are settings.
    differ = [key for key in saved | now if saved.get(key) != now.get(key)]
    if differ and set(differ) <= {"data", "stages"}:
        key = changed_entry(saved, now, step)
        differ = [key] if key else []
    # These change how the same corpus is laid out, and `data` and `stages` with it: name them
    # alone.
    if {"pack", "seed", "block_size", "val_fraction"} & set(differ):
        differ = [key for key in differ if key not in ("data", "stages")]
    details = []
    for key in differ:
        text = f"{key}={saved.get(key)} (asked {now.get(key)})"
        details.append("another corpus" if key == "data" else text)
    ways = f"continue with the same, use another out_dir, or {START_OVER}"
    refuse(differ, f"{path} was trained with {', '.join(details)}; {ways}")


def check_model(path: Path, wanted: ModelConfig) -> None:
    """Raise UserError unless model.py and the settings make the model of a checkpoint."""
    file = huggingface.config_path(path)
    values = read_json(file)
    saved = read_config(values, file)
    if not is_as_saved(values, saved):
        what = f"{path} is of a model.py that computed something else; put that model.py back"
        fail(f"{what}, use another out_dir, or {START_OVER}")
    # Name all sizes that differ, not the first one alone. Another corpus may have brought another
    # vocab_size. Dropout holds no weights, so it may change.
    differ = []
    for field in dataclasses.fields(wanted):
        was, asked = getattr(saved, field.name), getattr(wanted, field.name)
        if field.compare and field.name != "dropout" and was != asked:
            differ.append(f"{field.name}={was} (asked {asked})")
    text = f"{path} has another architecture: {', '.join(differ)}"
    refuse(differ, f"{text}; use another out_dir, or {START_OVER}")


def changed_settings(saved: dict, config: dict) -> dict[str, list]:
    """Return {key: [before, now]} of the settings that a run which continues has changed."""
    # init_from is left out because it has no effect: the run has its own weights.
    keys = sorted(key for key in saved.keys() & config if saved[key] != config[key])
    return {key: [saved[key], config[key]] for key in keys if key != "init_from"}


def describe_resume(path: Path, state: dict, config: dict, max_steps: int) -> str:
    """Return what a resumed run prints: the checkpoint, changed settings, whether it is done."""
    # Settings may change, such as the batch size per rank. A person should see which did.
    saved = state["config"]
    changed = [f"{key} {was!r} -> {now!r}" for key, (was, now) in state["changed"].items()]
    # A longer run decays later, so its learning rate jumps back up.
    before = rate_after(state["step"], saved, state["warmup_steps"], state["max_steps"])
    after = rate_after(state["step"], config, warmup_of(config, max_steps, state), max_steps)
    if before != after and state["step"] < max_steps:
        changed.append(f"so the next learning rate {before:.3g} -> {after:.3g}")
    source = config["init_from"]
    is_done = step_of(path) >= max_steps
    text = f"continuing {path} after step {step_of(path)}"
    if is_done:
        text = f"{path}: the run is finished, max_steps={max_steps} is reached"
    if changed:
        text += f"; {'without effect' if is_done else 'changed'}: {', '.join(changed)}"
    if saved["init_from"] != source:
        text += f"; init_from={source!r} has no effect: a run that continues has its own weights"
    if is_done:
        limit = "epochs or max_steps" if "epochs" in config else "it"
        text += f"; to train these weights on raise {limit}; else give another out_dir, or "
        text += f"{START_OVER}, from {source} as it is now" if source else START_OVER
    return text


def rate_after(step: int, config: Mapping, warmup: int, max_steps: int) -> float:
    """Return the learning rate of the update after `step`."""
    # rl.py has no min_lr, and only pretrain.py a decay_fraction: the others use the default.
    peak, least = config["learning_rate"], config.get("min_lr", 0.0)
    decay = config.get("decay_fraction", DECAY_FRACTION)
    return learning_rate_at(step + 1, config["schedule"], peak, least, warmup, max_steps, decay)


# ---- start: the run directory --------------------------------------------------------------------


@ranks.on_rank_0
def make_run_dir(config: dict, script: str, state: dict, max_steps: int) -> dict:
    """Make out_dir, delete what overwrite=True gives up, write config.py. All ranks call it.

    state: of `find`. Return the settings as recorded."""
    out = Path(config["out_dir"])
    try:
        out.mkdir(parents=True, exist_ok=True)
        # `find` locks a directory in which a run has begun. If there is a log now and no lock of
        # ours, another run began after `find` looked.
        other_run = not is_locked_here(out) and (out / "log.jsonl").exists()
        lock(out)
        refuse(other_run, f"another run has begun in {out}; run the same command again")
        delete_overwritten(out, config, state["step"])
    except OSError as error:
        raise UserError(f"config: out_dir={config['out_dir']!r}: {error.strerror}") from None

    # A resumed run keeps its init_from, unless that is gone: then the one given now is recorded.
    recorded = dict(config)
    if state["step"]:
        init_from = state["config"]["init_from"]
        if not init_from or Path(init_from).exists():
            recorded["init_from"] = init_from

    # config.py repeats the run, but must not delete it, so overwrite is False there. A run that is
    # complete keeps its own, because no step would have the new settings.
    config_file = out / "config.py"
    if config_file.exists() and not made_by_a_run(config_file):
        text = f"config: {config_file} was not written by a run; it stays, and this run has none"
        print(text, flush=True)
    elif state["step"] < max_steps or not config_file.exists():
        again = recorded | {"resume": "auto", "resume_from": 0, "overwrite": False}
        # A link to a script is that script.
        command = f"python {Path(script).resolve().name} {config_file}"
        write_config(again, str(config_file), command)
    return recorded


def delete_overwritten(out: Path, config: dict, steps_done: int) -> None:
    """Delete what overwrite=True gives up. `find` has looked at what is there."""
    # With resume='never' it is the run ...
    if resume_mode(config) == "never":
        for name in run_files(out):
            discard(out / name)
    # ... and with resume_from the steps after it, with the card that tells of them.
    elif config["resume_from"] and not is_restarted():
        later = [path for path in step_dirs(out) if step_of(path) > steps_done]
        if later and made_by_a_run(out / "README.md"):
            discard(out / "README.md")
        for path in reversed(later):
            print(f"deleting {path}, a step after resume_from", flush=True)
            discard(path)


# ---- restore -------------------------------------------------------------------------------------


def warmup_of(config: Mapping, max_steps: int, state: Mapping) -> int:
    """Return the steps of warm-up. A resumed run keeps its own, also if max_steps has grown."""
    # It gets new ones if the setting has changed. A new run's state has no config.
    if state.get("config", {}).get("warmup_steps") == config["warmup_steps"]:
        return state["warmup_steps"]
    return warmup_length(config["warmup_steps"], max_steps)


def restore(
    path: Path | None,
    state: dict,
    model: Transformer,
    ddp: Any,
    opt: Any,
    scaler: torch.amp.GradScaler,
    seed: int,
) -> None:
    """Restore all of a checkpoint but its weights: into the arguments and the random generators.

    All ranks call it, after DDP or FSDP. path, state: of `find`. A new run only seeds the
    generators. The optimizer's part of the state is taken out, so that its memory is freed."""
    # Each rank draws its own dropout. Seeds of two steps are a million apart, so adding the rank
    # never gives the seed of another step.
    torch.manual_seed(seed + 1_000_003 * state["step"] + ranks.rank())

    if path:
        # What all ranks share. The scaler's state is empty unless the run was in float16.
        opt.load_state_dict(state.pop("optimizer"))
        if state["scaler"]:
            scaler.load_state_dict(state["scaler"])
        ddp.n_updates = state["n_updates"]
        ddp.skipped.copy_(torch.tensor(state["skipped"]))

        # What is a rank's own. One that the saved run did not have keeps its seed from above.
        own_file, saved_ranks = path / rank_file(ranks.rank()), sorted(path.glob("rank_*.pt"))
        if own_file.exists():
            set_rng_state(read_state(own_file)["rng"], next(model.parameters()).device)
        # With another number of ranks each takes the mean of all errors, see powersgd.py.
        if isinstance(hook := getattr(ddp, "hook", None), PowerSGD):
            same = len(saved_ranks) == ranks.world_size()
            states = [read_state(file) for file in ([own_file] if same else saved_ranks)]
            hook.load_state_dict([of_rank.get("powersgd", {}) for of_rank in states])

    # What exists now stays until the end: the garbage collector need not look at it again.
    gc.collect()
    gc.freeze()


# ---- save ----------------------------------------------------------------------------------------


class Saver:
    """Write checkpoints in a thread while training goes on.

    All ranks make a Saver together and call the same methods. Rank 0 alone writes. If it cannot, it
    says so, and `saved` is False on all ranks until a later save succeeds. If the very first save
    of a run fails, the run ends with a UserError; so that save is waited for.

    config, data_record: as for `find`; every checkpoint holds them. base: directory of
    the frozen weights that LoRA adapters need. model_format: the module with `stored_weights` and
    `write_model` for this kind of model, huggingface or reward_model."""

    def __init__(
        self,
        out_dir: str | Path,
        keep_last: int,
        tokenizer: TextTokenizer,
        log: "RunLog",
        config: dict,
        data_record: dict,
        base: str | Path = "",
        model_format: ModuleType = huggingface,
    ) -> None:
        self.out_dir, self.keep_last = Path(out_dir), keep_last
        self.tokenizer, self.log = tokenizer, log
        self.config, self.data_record = config, data_record
        self.base, self.model_format = base, model_format
        self.saved = True  # False if the last save failed
        self.newest_step = log.steps_done  # of the newest checkpoint, 0 if there is none
        self.memory = HostMemory()
        # A group of the thread's own: in a shared one its messages would mix with training's.
        self.group = ranks.new_group(ranks.SLOW_DISK_S)
        # A process waits for this thread before it ends, after an error too: Python does, and where
        # errors.py ends a process at once `wait_at_exit` does.
        self.pool = futures.ThreadPoolExecutor(1)
        self.pending: list[futures.Future] = []
        before_exit.append(self.wait_at_exit)
        self.tidy()  # a kill may have come between a save and its links

    def save(
        self,
        step: int,
        model: Transformer,
        ddp: Any,
        opt: Any,
        scaler: torch.amp.GradScaler,
        extra: dict | None = None,
    ) -> None:
        """Copy everything that a resume needs, and start to write it. Call ddp.flush() before.

        ddp, opt: DDP and Optimizer, or FSDP and its AdamW. extra: plain data and tensors, added to
        the training state."""
        # The copy before this one must be written: there is at most one at a time.
        self.wait()
        ranks.check_replicas([bucket.param for bucket in getattr(ddp, "buckets", [])])
        # If the directory was moved, the saves to come would be lost.
        if ranks.any_rank(ranks.rank() == 0 and not is_locked_here(self.out_dir)):
            where = f"out_dir={str(self.out_dir)!r}"
            raise UserError(f"train: {where} was removed or moved while the run was in it")

        # Rank 0 writes the model and the training state. With FSDP and ZeRO-1 the others send it
        # their parts, so all ranks make these calls.
        is_main, device = ranks.rank() == 0, next(model.parameters()).device
        sharded = isinstance(ddp, fsdp.FSDP)
        weights = ddp.whole_weights() if sharded else self.model_format.stored_weights(model)
        optimizer = opt.state_dict(keep=is_main)
        content: dict[str, dict] = {}
        if is_main:
            content["weights"] = weights
            content["train_state"] = {
                "config": self.config,
                "data": self.data_record,
                "step": step,
                "max_steps": self.log.max_steps,
                "n_updates": ddp.n_updates,  # rl.py makes several in a step
                "skipped": ddp.skipped.tolist(),
                "optimizer": optimizer,
                "scaler": scaler.state_dict(),
                **(extra or {}),
            }
        # Each rank has its own random generators and, with PowerSGD, compression errors.
        content["rank_state"] = {"rng": rng_state(device)}
        hook = getattr(ddp, "hook", None)
        if isinstance(hook, PowerSGD):
            content["rank_state"]["powersgd"] = hook.state_dict()

        # Once copied, training may change all tensors: the thread writes the copies, and reads of
        # the model only its architecture.
        copied = self.memory.copy(content, device)
        self.pending.append(self.pool.submit(self._write, step, model, copied))
        # A run that cannot save ends now, not at its second save.
        if not self.newest_step:
            self.wait()

    def tidy(self) -> None:
        """Update links and remove steps by the evaluations in the log. Call after an evaluation."""
        # In the thread, after the save under way.
        self.pending.append(self.pool.submit(self._tidy_now))

    def wait(self) -> None:
        """Wait for what the thread has to do."""
        # All ranks have the same work under way, in the same order.
        while self.pending:
            ranks.wait_together(self.pending[0])
            # raises what `_write` raised: LostRank, or UserError if the first save failed
            self.pending.pop(0).result()

    def wait_at_exit(self, limit_s: float) -> None:
        """Wait for what the thread has to do, but not for ever: a rank may be lost."""
        futures.wait(self.pending, min(limit_s, self.config["timeout_s"]))

    def close(self) -> None:
        """Wait for the last save and end the thread. Call before ranks.close()."""
        self.wait()
        before_exit.remove(self.wait_at_exit)
        self.pool.shutdown()
        # A process group that still exists at exit may abort the process. After a failed save the
        # error and its stack frames keep it alive, in a reference cycle: hence the collection.
        self.group = None
        gc.collect()

    # ---- in the thread

    def _write(self, step: int, model: Transformer, copied: dict[str, dict]) -> None:
        """Write a checkpoint, then note it in the log and update links."""
        final = step_path(self.out_dir, step)
        # A generator: each rank sends or receives only once it is read.
        rank_states = self._exchange_rank_states(copied["rank_state"])
        problem = "a mistake in the code"  # what the others hear if another error leaves the try
        try:
            if ranks.rank() == 0:
                self._write_files(final, model, copied, rank_states)
            problem = ""
        # What Python, torch, safetensors and we raise for a bad disk; others are bugs.
        except (OSError, RuntimeError, SafetensorError, UserError) as error:
            problem = reason_of(error)
        finally:
            # Here the other ranks send. Rank 0 has received all, or receives the rest after an
            # error.
            for _ in rank_states:
                pass
            problem = ranks.gather_objects(problem, self.group)[0]

        # All ranks know the problem, so they end together if there is nothing to go back to.
        self.saved = not problem
        if problem:
            text = f"checkpoint: cannot save {final}"
            if not self.newest_step:
                raise UserError(f"{text}, and there is no earlier checkpoint ({problem})")
            self.log.print(f"{text}, earlier checkpoints are intact ({problem})")
            return
        self.newest_step = step
        self.log.write("save", step, {"path": str(final)})
        self._tidy_now()

    def _write_files(
        self, final: Path, model: Transformer, copied: dict[str, dict], rank_states: Iterator[dict]
    ) -> None:
        """Write a checkpoint, on rank 0."""
        # Nothing has the final name before it is whole.
        temp = make_room_beside(final, "tmp")
        try:
            temp.mkdir()
            # What a resume needs, then what transformers reads.
            for rank, rank_state in enumerate(rank_states):
                write_state(temp / rank_file(rank), rank_state)
            write_state(temp / "train_state.pt", copied["train_state"])
            weights = copied["weights"]
            self.model_format.write_model(temp, model, self.tokenizer, self.base, weights=weights)
            commit(temp, final)
        finally:
            shutil.rmtree(temp, ignore_errors=True)  # after an error

    def _exchange_rank_states(self, own: dict) -> Iterator[dict]:
        """Yield the state of each rank, on rank 0. The others send theirs and yield nothing."""
        # One after the other: with PowerSGD each is as large as the gradients.
        if ranks.rank() > 0:
            ranks.issue("send state", dist.send_object_list, [own], 0, group=self.group)
            return
        yield own
        for other in range(1, ranks.world_size()):
            state = [None]
            ranks.issue("receive state", dist.recv_object_list, state, other, group=self.group)
            yield state[0]

    def _tidy_now(self) -> None:
        """Do the housekeeping on rank 0 while the others wait."""
        # The others wait: their next save must not begin while steps are removed.
        if ranks.rank() == 0:
            tidy_run_dir(self.out_dir, self.newest_step, self.keep_last, self.log.val_losses())
        ranks.gather_objects(None, self.group)


class HostMemory:
    """Copies of tensors in host memory. The next copy is written into the same memory."""

    # To allocate gigabytes takes longer than to copy them.
    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    @torch.no_grad()
    def copy(self, value: Any, device: torch.device) -> Any:
        """Return `value` with copies of the tensors in its dicts and lists that training changes.

        device: the model's."""
        last, self.buffers = iter(self.buffers), []

        def copy_of(item: Any) -> Any:
            if isinstance(item, dict):
                return {key: copy_of(value) for key, value in item.items()}
            if isinstance(item, list | tuple):
                return type(item)(map(copy_of, item))
            if not isinstance(item, Tensor):
                return item
            # If the model is on a GPU, what is in host memory was made for this save alone:
            # gathered weights, a random state.
            if item.device.type == "cpu" and device.type != "cpu":
                return item
            # The memory of the tensor that had this place last time. From a GPU page-locked memory
            # is several times faster.
            buffer = next(last, None)
            if buffer is None or (buffer.shape, buffer.dtype) != (item.shape, item.dtype):
                buffer = torch.empty(item.shape, dtype=item.dtype, pin_memory=item.is_cuda)
            self.buffers.append(buffer)
            return buffer.copy_(item)

        return copy_of(value)


# ---- the files of a save -------------------------------------------------------------------------


def write_state(path: Path, state: dict) -> None:
    """Write a .pt file. Raise UserError if only running code could read it back."""
    # torch hides the system's error if it opens the file itself.
    with open(path, "wb") as file:
        torch.save(state, file)
    # Refused now, not at the resume.
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if unsafe:
        text = f"{path.name} holds {', '.join(unsafe)}; what is not plain data cannot be resumed"
        raise UserError(text)


def commit(temp: Path, final: Path) -> None:
    """Put a complete checkpoint on the disk, then give it its name."""
    # The checksums come last: a directory that has them is complete.
    files = [path for path in sorted(temp.rglob("*")) if path.is_file()]
    sums = {path.relative_to(temp).as_posix(): huggingface.checksum(path) for path in files}
    huggingface.write_json(temp / "checksums.json", sums)
    # On the disk before it has the name, or a power cut could leave empty files with it.
    for path in (*temp.rglob("*"), temp):
        sync(path)
    # If there is a step of this number it is damaged: the run was resumed from an earlier one, and
    # has come to it again.
    old = final.rename(make_room_beside(final, "old")) if final.exists() else None
    temp.rename(final)
    sync(final.parent)
    if old:
        shutil.rmtree(old, ignore_errors=True)


def tidy_run_dir(out: Path, newest_step: int, keep_last: int, val_losses: dict[int, float]) -> None:
    """Point latest, best and best2 at their steps, and remove the steps that are not kept.

    Kept are the `keep_last` newest (0 = all) and the two with the lowest val_loss."""
    # Steps after `newest_step` are damaged ones that a resume has skipped.
    steps = [path for path in step_dirs(out) if step_of(path) <= newest_step]
    if not steps:
        return
    losses = {path: val_losses[step_of(path)] for path in steps if step_of(path) in val_losses}
    # Losing the log must not lose the best checkpoint: its link still names it.
    linked = out / (out / BEST[0]).resolve().name
    if linked in steps and linked not in losses:
        text = f"log.jsonl has no evaluation of {linked.name}, so {out}/best stays there"
        say(f"warning: {text}; remove this link to choose by the log")
        losses[linked] = -math.inf
    # Sorting is stable: of equal losses the earlier is better.
    best = sorted(losses, key=losses.get)[: len(BEST)]
    with housekeeping("put the log on the disk"):
        sync(out / "log.jsonl")  # what is removed below follows from it
    for link, target in zip_longest(LINKS, [steps[-1], *best]):
        with housekeeping("update the links latest, best and best2"):
            point(out / link, target)
    for path in steps[:-keep_last] if keep_last else []:
        if path not in best:
            with housekeeping("remove old checkpoints"):
                discard(path)


def point(link: Path, target: Path | None) -> None:
    """Replace a symbolic link in one operation; None removes it."""
    if target is None:
        link.unlink(missing_ok=True)
        return
    temp = make_room_beside(link, "tmp")
    # Relative, so that a run directory can be moved.
    temp.symlink_to(target.name, target_is_directory=True)
    try:
        temp.replace(link)
    except OSError:
        temp.unlink()
        raise


def discard(path: Path) -> None:
    """Remove a file or directory of a run; of a link to a step on another disk only the link."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    # Renamed first: a half removed step must not look finished.
    temp = path if path.name.startswith(".") else path.rename(make_room_beside(path, "tmp"))
    with housekeeping("remove old checkpoints"):
        shutil.rmtree(temp)


# ---- whose files are these? The run's, the user's, or what a kill or a copy has left -------------


def run_files(out: Path) -> list[str]:
    """Return the names in `out` that are a run's; the others are the user's."""
    names = [name for name in os.listdir(out) if OWN_FILES.fullmatch(name)] if out.exists() else []
    # A run shows itself by its config.py, its log or a whole step. (A kill during the deletions of
    # overwrite=True may leave any one of them.)
    begun = made_by_a_run(out / "config.py") or (out / "log.jsonl").exists()
    if not (begun or any(out.glob("step_*/checksums.json"))):
        # No run has begun here, so a `latest` is the user's. Only these can be a run's: hidden and
        # temporary names that a kill has left, and a reference that was copied from another run.
        left = re.compile(r"\..*|.*\.tmp|reference\.safetensors")
        names = [name for name in names if left.fullmatch(name)]
    return sorted(name for name in names if name not in FIRST_LINES or made_by_a_run(out / name))


def made_by_a_run(path: Path) -> bool:
    """Return whether a run has written this config.py or README.md."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return FIRST_LINES[path.name] in file.readline(1000)


def check_nothing_foreign(out: Path) -> None:
    """Raise UserError if a new run would write over a file of the user, or into a model."""
    own = run_files(out)
    for name in sorted(os.listdir(out)) if out.exists() else ():
        is_foreign = name in NOT_OF_A_RUN or (OWN_FILES.fullmatch(name) and name not in own)
        refuse(is_foreign, f"{out} holds {name!r}, which no run made; use another out_dir")


def repair(out: Path) -> None:
    """Remove what a killed save has left; turn copies of checkpoints into links again."""
    for name in LINKS:
        with housekeeping("turn copies of checkpoints into links again"):
            link_again(out / name)
    for name in os.listdir(out):
        if HIDDEN.fullmatch(name):
            with housekeeping("remove what a killed save has left"):
                discard(out / name)


def link_again(link: Path) -> None:
    """Put a copy of a checkpoint in the place of its step, and a link to it where the copy was.

    `cp -rL` and object stores copy what links lead to. A copy that is damaged stays."""
    if link.is_symlink() or not (link / "checksums.json").is_file():
        return
    # A state without a step is no run's. The step of this number may be another run's.
    with suppress(ValueError, KeyError, TypeError):  # a UserError is a ValueError
        check_bytes(link)
        step = step_path(link.parent, read_state(link / "train_state.pt")["step"])
        if step.exists():
            sums = [(path / "checksums.json").read_bytes() for path in (step, link)]
            if sums[0] != sums[1]:
                return
            discard(step)
        link.rename(step)
        link.symlink_to(step.name, target_is_directory=True)


# ---- one process in a run directory --------------------------------------------------------------

# Run directories that this process has locked: {path: (open .lock, identity of the directory)}.
# While the file is open its directory keeps its number (inode), even if both are deleted: so a new
# directory of the same name is never taken for the old one.
LOCKS: dict[Path, tuple[IO, os.stat_result]] = {}


def lock(out: Path) -> None:
    """Keep `out` for this process as long as it lives."""
    if is_locked_here(out):  # since `find`
        return
    # The lock is the system's: it ends with the process, however that ends. The file stays open.
    file = open(out / ".lock", "a+", encoding="utf-8")
    try:
        disk.lock(file)
    except BlockingIOError:
        file.seek(0)
        owner = f"process {file.read() or '?'}"
        raise UserError(f"config: {owner} is training in {out}; use another out_dir") from None
    with housekeeping("write who is training"):
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}")
        file.flush()
    LOCKS[out.resolve()] = file, os.stat(out)


def is_locked_here(out: Path) -> bool:
    """Return whether `out` is the directory that this process has locked."""
    # Not a new one in its place: a user may have moved the run.
    _, directory = LOCKS.get(out.resolve(), (None, None))
    return bool(directory) and out.exists() and os.path.samestat(directory, os.stat(out))
