"""What the logs of training runs say, as curves: which logs, here or on another machine, what is new in them, their
events in order, any key over steps, tokens, FLOPs or hours. plot.py draws them.

A log is the log.jsonl that train_utils.RunLog writes: an object per line with "event", "step" and figures.
"""

import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import glob, has_magic
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from groundup.errors import UserError

PANELS = (
    "loss+val_loss,val_bpb,val_loss/*,val_bpb/*,lr,grad_norm,tokens_per_s,"
    "mean_token_accuracy,rewards/accuracies,rewards/margins,rewards/chosen+rewards/rejected,accuracy,margin,reward,"
    "kl_answer,entropy"
)
# dpo.py logs these a second time under trl's names, and only those in evaluations.
TWICE = {"accuracy": "rewards/accuracies", "margin": "rewards/margins"}
NOT_SMOOTHED = ("lr", "tokens", "epoch")  # exact as they are





# ---- logs: where they are, what is new in them -----------------------------------------------------------------------


def find_logs(runs: str) -> list[str]:
    """The log files that `runs` means, a remote one as host:path. Raises PlotError for a pattern without any."""
    if not runs.strip():
        logs = sorted(glob("out/*/log.jsonl"), key=os.path.getmtime)
        if not logs:
            raise UserError("plot: no out/*/log.jsonl here; give --runs=DIR")
        return logs[-1:]
    found = {}  # in order, each once
    for name in filter(None, map(str.strip, runs.split(","))):
        log = name if name.endswith(".jsonl") else name.rstrip("/") + "/log.jsonl"
        run = Path(name).parent
        if os.path.isdir(name) and not os.path.exists(log) and (run / "log.jsonl").exists():
            raise UserError(f"plot: {name} is a checkpoint of a run, which has no log; give --runs={run}")
        is_pattern = has_magic(log) and not (os.path.exists(log) or remote(log))
        logs = sorted(glob(log, recursive=True)) if is_pattern else [log]
        if not logs:
            raise UserError(f"plot: no log matches {log!r}; check --runs")
        found |= dict.fromkeys(logs)
    return list(found)


def remote(path: str) -> tuple[str, str] | None:
    """(host, path) of host:path as scp reads it, if no such file is here; one letter is a drive of Windows."""
    parts = re.fullmatch(r"([^/:]{2,}):(.+)", path)
    return parts.groups() if parts and not os.path.exists(path) else None


def read_from(path: str, offset: int) -> bytes:
    """The bytes of a file from `offset` on. Raises PlotError if it cannot be read."""
    far = remote(path)
    if far is None:
        try:
            with open(path, "rb") as f:
                f.seek(offset)
                return f.read()
        except OSError as error:
            raise UserError(f"plot: cannot read {path}: {error.strerror}") from None
    host, file = far
    command = f"tail -c +{offset + 1} -- {shlex.quote(file.removeprefix('~/'))}"  # a remote command begins at home
    options = ["-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=10"]
    try:
        done = subprocess.run(["ssh", *options, "--", host, command], stdin=subprocess.DEVNULL, capture_output=True)
    except FileNotFoundError:
        raise UserError(f"plot: cannot read {path}: there is no ssh here") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines() or [f"ssh ended with {done.returncode}"]
        raise UserError(f"plot: cannot read {path}: {reason[-1]}")
    return done.stdout


@dataclass
class Log:
    """A log file that may grow, and what of it has been read."""

    path: str
    text: bytes = b""
    seen: bool = False  # whether it could be read
    about: dict[str, float] = field(default_factory=dict)  # numbers of config.py, FLOPs per token: read when needed

    def refresh(self) -> bool:
        """Read what is new; whether something is. Raises PlotError.

        The last line read is asked for again: where another one comes, a resumed run has written the file anew."""
        begin = self.text.rfind(b"\n", 0, -1) + 1
        tail = read_from(self.path, begin)
        if not tail.startswith(self.text[begin:]):
            begin, tail = 0, read_from(self.path, 0)
        text = self.text[:begin] + tail
        changed = text != self.text or not self.seen
        self.text, self.seen = text, True
        return changed

    def read_beside(self, name: str) -> str:
        """The text of another file of the run. Raises PlotError."""
        return read_from(re.sub(r"[^/\\:]*$", name, self.path, count=1), 0).decode("utf-8", errors="replace")


def short_names(paths: Sequence[str]) -> list[str]:
    """What the runs are called in the picture: the name of the directory (of the file, if it is not log.jsonl), the
    whole path where two would be the same."""
    files = [Path(path) for path in paths]
    names = [file.parent.name if file.name == "log.jsonl" else file.stem for file in files]
    return [name if name and names.count(name) == 1 else path for name, path in zip(names, paths, strict=True)]


# ---- events ----------------------------------------------------------------------------------------------------------


def parse(text: bytes) -> tuple[list[dict], list[str]]:
    """The "train" and "eval" events of a log, steps ascending, and remarks on what is not among them.

    A run that was killed takes the steps after its checkpoint again: an event replaces all that stand at its place or
    further on. At one step, training comes before the evaluation."""
    lines = [line for line in text.split(b"\n") if line.strip()]
    read = [read_event(line) for line in lines]
    half_written = bool(read) and read[-1] is None and not text.endswith(b"\n")
    n_bad = read.count(None) - half_written
    events, n_again = [], 0
    for event in read:
        if event is None or event["event"] not in ("train", "eval"):
            continue
        while events and place(events[-1]) >= place(event):
            events.pop()
            n_again += 1
        events.append(event)
    remarks = [] if lines else ["the log is empty"]
    remarks += [f"lines that are no events, left out: {n_bad}"] if n_bad else []
    remarks += ["the last line is half written"] if half_written else []
    remarks += [f"events that came again, the later ones count: {n_again}"] if n_again else []
    n_null = sum(event.get("loss", 0) is None for event in events)
    remarks += [f"losses that are not finite, gaps in the curve: {n_null}"] if n_null else []
    return events, remarks


def read_event(line: bytes) -> dict | None:
    """The object of a line if it is one of RunLog's, else None."""
    try:
        event = json.loads(line)
    except ValueError:  # not JSON, not UTF-8
        return None
    known = isinstance(event, dict) and isinstance(event.get("event"), str) and type(event.get("step")) is int
    return event if known else None


def place(event: dict) -> tuple[int, bool]:
    return event["step"], event["event"] == "eval"


def series(events: Sequence[dict], kind: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of `key` in the events of one kind; null is NaN, what is no number is left out."""
    found = [(event["step"], number(event, key)) for event in events if event["event"] == kind]
    found = [(step, value) for step, value in found if value is not None]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)


def number(event: dict, key: str) -> float | None:
    """The value of `key`, null as NaN; None if there is none or it is no number."""
    value = event.get(key, "")
    return math.nan if value is None else float(value) if type(value) in (int, float) else None


def moving_average(values: np.ndarray, decay: float) -> np.ndarray:
    """Exponential moving average of each value and those before, weights decay^age, with the bias correction of Adam
    (arXiv:1412.6980, section 3): the weights sum to one from the first value on. NaN stays NaN and counts nowhere."""
    mean, weight, averages = 0.0, 0.0, []
    for value in values:
        if math.isnan(value):
            averages.append(math.nan)
            continue
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + 1 - decay
        averages.append(mean / weight)
    return np.array(averages)


# ---- x: steps, tokens, hours, FLOPs ----------------------------------------------------------------------------------


def axis(events: Sequence[dict], kind: str, n_pairs: float = 0, flops: float = 0) -> tuple[np.ndarray, np.ndarray]:
    """(steps, x at these steps), from step 0 on. n_pairs: pairs per step, in a log without tokens; flops: per token.
    Raises PlotError if the log does not say enough."""
    if kind == "steps":
        return np.array([0.0, 1.0]), np.array([0.0, 1.0])
    steps, hours, tokens = [0], [0.0], [0.0]
    for event in events:
        if event["event"] != "train":
            continue
        seconds = interval_seconds(event, event["step"] - steps[-1], tokens[-1], n_pairs)
        tokens_now, speed = number(event, "tokens"), number(event, "tokens_per_s")
        if tokens_now is None and speed is not None:
            tokens_now = tokens[-1] + seconds * speed
        steps.append(event["step"])
        hours.append(hours[-1] + seconds / 3600)
        tokens.append(math.nan if tokens_now is None else tokens_now)
    values = np.array(hours if kind == "hours" else tokens) * (flops if kind == "flops" else 1)
    if np.isnan(values).any():
        raise UserError(f"plot: {kind} need tokens and tokens_per_s in the log, or pairs_per_s; use --x=steps")
    return np.array(steps, dtype=np.float64), values


def interval_seconds(event: dict, n_steps: int, tokens: float, n_pairs: float) -> float:
    """Seconds that the `n_steps` up to this event of training took; of a log without step_ms at its speed, `tokens`
    being those before. NaN if the event does not say."""
    if (step_ms := number(event, "step_ms")) is not None:
        return n_steps * step_ms / 1000
    work, speed = number(event, "tokens"), number(event, "tokens_per_s")
    if n_pairs and "pairs_per_s" in event:
        work, speed = tokens + n_steps * n_pairs, number(event, "pairs_per_s")
    return (work - tokens) / speed if work is not None and speed else math.nan


def at_steps(steps: np.ndarray, axis_steps: np.ndarray, axis_values: np.ndarray) -> np.ndarray:
    """x at `steps`: on straight lines between those of the log, past the last one at the last speed."""
    if len(axis_steps) < 2:
        return np.zeros_like(steps)
    (s0, s1), (v0, v1) = axis_steps[-2:], axis_values[-2:]
    beyond = v1 + (steps - s1) * (v1 - v0) / (s1 - s0)
    return np.where(steps > s1, beyond, np.interp(steps, axis_steps, axis_values))


def axis_of(log: Log, events: Sequence[dict], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """axis() with what stands beside the log: pairs per step in config.py, the shape in the last checkpoint."""
    paired = any("pairs_per_s" in event for event in events)
    if not log.about and (kind == "flops" or (kind != "steps" and paired)):
        settings = re.findall(r"^(\w+) = (\d+)$", log.read_beside("config.py"), flags=re.MULTILINE)
        log.about = {key: float(value) for key, value in settings}
    if kind == "flops" and "flops_per_token" not in log.about:
        log.about["flops_per_token"] = flops_of(log)
    try:
        return axis(events, kind, log.about.get("total_batch_pairs", 0), log.about.get("flops_per_token", 0))
    except UserError as error:
        raise UserError(f"plot: {log.path}: {str(error).removeprefix('plot: ')}") from None


def flops_of(log: Log) -> float:
    """FLOPs per trained token of the model in the last checkpoint; one that rewards has no head over the vocabulary."""
    from groundup.train import checkpoint  # these need torch, which takes seconds to load
    from groundup.train.plan import flops_per_token

    try:
        text = log.read_beside("latest/config.json")
    except UserError:  # no checkpoint yet, or an adapter
        text = log.read_beside(f"latest/{checkpoint.CONFIG_FILES[1]}")
    with tempfile.TemporaryDirectory() as directory:  # the run may be elsewhere
        (Path(directory) / "config.json").write_text(text, encoding="utf-8")
        try:
            cfg = checkpoint.load_config(directory)
        except UserError as error:
            raise UserError(f"plot: {log.path}: {error}") from None
    head = 6 * cfg.vocab_size * cfg.n_embd if "SequenceClassification" in text else 0
    return flops_per_token(cfg, int(log.about.get("block_size", cfg.block_size))) - head


# ---- panels ----------------------------------------------------------------------------------------------------------


class Curve(NamedTuple):
    run: int  # which of the runs
    key: int  # which of the panel's keys: those of training and evaluation, loss and val_loss, are one
    points: bool  # of evaluations, few
    x: np.ndarray
    y: np.ndarray
    mean: np.ndarray | None  # the moving average of y


class Panel(NamedTuple):
    title: str
    keys: list[str]  # what its keys are called in it
    curves: list[Curve]


class Run(NamedTuple):
    name: str
    events: list[dict]
    axis: tuple[np.ndarray, np.ndarray]  # steps, x


def panels_of(y: str, runs: Sequence[Run], smooth: float) -> tuple[list[Panel], list[str]]:
    """(panels in the order of `y`, a line for each that was asked for and that no log has)."""
    keys_of = [dict.fromkeys(key for event in run.events for key in event if number(event, key) is not None)
               for run in runs]  # fmt: skip
    keys = list(dict.fromkeys(key for of_run in keys_of for key in of_run))
    panels, missing = [], []
    for title in filter(None, map(str.strip, (y or PANELS).split(","))):
        patterns = [pattern.strip() for pattern in title.split("+")]
        chosen = [key for pattern in patterns for key in keys if fnmatchcase(key, pattern)]
        shown = runs
        if not y:
            shown = [run._replace(events=[]) if TWICE.get(title) in of_run else run
                     for run, of_run in zip(runs, keys_of, strict=True)]  # fmt: skip
        panel = panel_of(title, list(dict.fromkeys(chosen)), shown, smooth)
        if panel.curves:
            panels.append(panel)
        elif y and keys:
            missing.append(f"plot: no log has {title!r}; they have {', '.join(sorted(keys))}")
    return panels, missing


def panel_of(title: str, keys: Sequence[str], runs: Sequence[Run], smooth: float) -> Panel:
    """The curves of these keys. Keys of one group, rewards/chosen and rewards/rejected, go by what differs."""
    curves, bases = [], list(dict.fromkeys(key.removeprefix("val_") for key in keys))
    for which, run in enumerate(runs):
        for key in keys:
            base = bases.index(key.removeprefix("val_"))
            for kind in ("train", "eval"):
                steps, values = series(run.events, kind, key)
                if not len(steps):
                    continue
                averaged = kind == "train" and smooth > 0 and key not in NOT_SMOOTHED
                mean = moving_average(values, smooth) if averaged else None
                curves.append(Curve(which, base, kind == "eval", at_steps(steps, *run.axis), values, mean))
    one_group = len(bases) > 1 and len({base.rpartition("/")[0] for base in bases}) == 1
    return Panel(title, [base.rpartition("/")[2] for base in bases] if one_group else bases, curves)


def summary(name: str, events: Sequence[dict], remarks: Sequence[str]) -> str:
    """One line on a run: how far it is, its last figures, what was not drawn."""
    parts = [f"step {events[-1]['step']}"] if events else []
    for kind, shown in (("train", ("loss", "tokens_per_s")), ("eval", ("val_loss", "val_bpb"))):
        for key in shown:
            values = series(events, kind, key)[1]
            parts += [f"{key} {values[-1]:.4g}"] if len(values) else []
    return f"{name}: " + "; ".join(filter(None, [", ".join(parts), *remarks]))
