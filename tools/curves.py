"""Curves to compare one's own with: docs/curves/NAME.jsonl for each file of config/ that has run.

    python tools/curves.py --run=out/demo --name=demo                    # after a run of config/demo.py: keep its curve
    python tools/plot.py --runs=out/mine --reference=True                # compare

A curve is the log of a run, thinned, behind a line about its machine, versions, command, commit and
settings. A run is compared with the curve whose settings are nearest to its own, at equal tokens
(equal steps where tokens are not logged), by the first of val_bpb, val_loss, loss that both have.
"""

import ast
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from configurator import configure, defaults_of, read_file
from groundup.errors import UserError
from groundup.train.log import read_events

# ---- config --------------------------------------------------------------------------------------
run = ""  # directory of a finished run
name = ""  # of the file in config/ that it ran, without .py
command = ""  # that made it; "" = python SCRIPT.py config/NAME.py

ROOT = Path(__file__).parent.parent
CURVES = ROOT / "docs" / "curves"
MOST = 60  # training and as many evaluation events of a curve
KEPT = (
    "loss",
    "lr",
    "grad_norm",
    "tokens",
    "tokens_per_s",
    "step_ms",
    "val_loss",
    "val_bpb",
    "reward",
    "accuracy",
    "rewards/accuracies",
    "rewards/margins",
    "mean_token_accuracy",
)
NO_CAUSE = {  # settings that do not change what is learnt per token, but for rounding
    "out_dir",
    "resume",
    "resume_from",
    "overwrite",
    "device",
    "dtype",
    "compile",
    "activation_checkpointing",
    "parallel",
    "overlap_step",
    "zero1",
    "timeout_s",
    "peak_tflops",
    "plan_only",
    "eval_every",
    "log_every",
    "track",
    "save_every",
    "keep_last",
    "sample_prompts",
    "batch_size",
    "seed",
    "eval_steps",
}
MARGIN = 0.02  # of the loss, as a median; single ones of three seeds of config/shakespeare.py differ by up to 2.2 %
# Bits per byte of untrained models that differ by a larger share: another text or tokenizer.
SAME_START = 0.05
NAN = float("nan")


class Reference(NamedTuple):
    name: str
    about: dict  # the first line of the file; {} for a config that has not run
    events: list[dict]
    differ: dict[str, tuple]  # {setting: (own, the reference's)}


# ---- files ---------------------------------------------------------------------------------------


def settings_of(directory: Path) -> tuple[str, dict]:
    """Return (script, resolved settings) of a run by its config.py."""
    path = directory / "config.py"
    found = (
        re.search(r"python (\w+)\.py ", path.read_text(encoding="utf-8")[:300])
        if path.exists()
        else None
    )
    if not found or not (ROOT / f"{found[1]}.py").exists():
        raise UserError(
            f"curves: {directory} has no config.py of a run; give the directory of a run"
        )
    defaults = defaults_of(ROOT / f"{found[1]}.py")
    return found[1], defaults | read_file(str(path), defaults)


def script_of(path: Path) -> str:
    """Return the script of a file of config/, by the command in its docstring."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.search(rf"(\w+)\.py config/{path.name}", doc)[1]


def keep(directory: Path, name: str, command: str = "", folder: Path = CURVES) -> Path:
    """Write the curve of a run into `folder` and return its path."""
    script, settings = settings_of(directory)
    if not (ROOT / "config" / f"{name}.py").exists():
        raise UserError(f"curves: name={name!r}: there is no config/{name}.py")
    card = (
        (directory / "README.md").read_text(encoding="utf-8")
        if (directory / "README.md").exists()
        else ""
    )
    machine, _, versions = card.partition("## Machine\n\n")[2].strip().partition("\n")
    if not machine or not card.partition("\n\n")[2].startswith("Complete"):
        raise UserError(f"curves: {directory} is no complete run: its README.md does not say so")
    usual = defaults_of(ROOT / f"{script}.py")
    about = {
        "event": "run",
        "step": 0,
        "command": command or f"python {script}.py config/{name}.py",
        "commit": commit(),
        "date": time.strftime(
            "%Y-%m-%d", time.localtime((directory / "log.jsonl").stat().st_mtime)
        ),
        "script": script,
        "machine": f"{machine.strip()}, {processor()}".rstrip(", "),
        "versions": versions.strip(),
        "settings": {
            key: value for key, value in settings.items() if key in usual and value != usual[key]
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    lines = [
        json.dumps(event, ensure_ascii=False)
        for event in (about, *thinned(read_events(directory / "log.jsonl")))
    ]
    path.with_suffix(".tmp").write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.replace(path.with_suffix(".tmp"), path)
    return path


def thinned(events: Sequence[dict]) -> list[dict]:
    """Return at most MOST training events, each the mean of several in a row at the place of the
    last, and as many evaluations, with the keys KEPT, four digits each.
    """
    found = []
    for kind in ("train", "eval"):
        of_kind = [event for event in events if event["event"] == kind]
        size = max(1, math.ceil(len(of_kind) / MOST))
        # evaluations are taken from the end, so that the last one stays
        parts = [of_kind[max(0, end - size) : end] for end in range(len(of_kind), 0, -size)][::-1]
        for part in parts:
            values = {key: part[-1][key] for key in KEPT if type(part[-1].get(key)) in (int, float)}
            if kind == "train" and "loss" in values:
                values["loss"] = fmean(
                    event["loss"] for event in part if event.get("loss") is not None
                )
            rounded = {
                key: value if key == "tokens" else float(f"{value:.5g}")
                for key, value in values.items()
            }
            found.append({"event": kind, "step": part[-1]["step"], **rounded})
    return sorted(found, key=lambda event: (event["step"], event["event"] == "eval"))


def commit() -> str:
    """Return the commit of this checkout, and whether files differ from it; "" without git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = git("diff", "HEAD", "--stat", "--", "*.py")
    return git("rev-parse", "--short=10", "HEAD") + (" with changes" if changed else "")


def processor() -> str:
    """Return the name of the processor, "" where the system does not tell."""
    info = Path("/proc/cpuinfo")
    found = (
        re.search(r"model name\s*: (.+)", info.read_text(encoding="utf-8"))
        if info.exists()
        else None
    )
    return found[1].strip() if found else ""


# ---- which curve ---------------------------------------------------------------------------------


def reference_of(directory: Path, folder: Path = CURVES) -> Reference:
    """Return the curve of the config with the fewest settings that differ. Raise UserError if that
    has not run.
    """
    script, own = settings_of(directory)
    found = []
    defaults = defaults_of(ROOT / f"{script}.py")
    for path in sorted((ROOT / "config").glob("*.py")):
        if script_of(path) != script:  # reading it would make the data of another stage
            continue
        file = folder / f"{path.stem}.jsonl"
        about, *events = read_events(file) if file.exists() else [{}]
        settings = defaults | (about["settings"] if about else read_file(str(path), defaults))
        keys = [key for key in own if key in settings and key not in NO_CAUSE]
        differ = {key: (own[key], settings[key]) for key in keys if own[key] != settings[key]}
        found.append(Reference(path.stem, about, events, differ))
    if not found:
        raise UserError(f"curves: no file of config/ is for {script}.py")
    nearest = min(found, key=lambda reference: len(reference.differ))
    if not nearest.about:
        ran = ", ".join(reference.name for reference in found if reference.about) or "none"
        raise UserError(
            f"curves: {directory} is nearest to config/{nearest.name}.py, which has not run: there is no "
            f"curve of it (of {script}.py there are: {ran})"
        )
    return nearest


# ---- in words ------------------------------------------------------------------------------------


def series(events: Sequence[dict], key: str, axis: str) -> np.ndarray:
    """Return (n, 2): place (tokens or steps) and value; without the evaluation before the first
    step.
    """
    places = [(0, 0)] + [(event["step"], event["tokens"]) for event in events if "tokens" in event]
    found = [(event["step"], NAN if event[key] is None else event[key]) for event in events
             if event["step"] and key in event]  # fmt: skip
    at = np.array(found, dtype=np.float64).reshape(-1, 2)
    if axis == "tokens":
        at[:, 0] = np.interp(at[:, 0], *np.array(places, dtype=np.float64).T)
    return at


def compare(own: Sequence[dict], reference: Reference) -> list[str]:
    """Return the lines that say where the run is beside its reference, and the usual causes, the
    likeliest first.
    """
    logs = own, reference.events
    keys = ("val_bpb", "val_loss", "loss")
    both = [key for key in keys if all(any(e["step"] and key in e for e in log) for log in logs)]
    axis = "tokens" if all(any("tokens" in e for e in log) for log in logs) else "steps"
    head = (
        f"reference: {reference.name} ({reference.about['command']}; {reference.about['machine']})"
    )
    text = another_text(own, reference)
    if text:
        return [head, text]
    for key in both:
        mine, theirs = series(own, key, axis), series(reference.events, key, axis)
        mine = mine[(mine[:, 0] <= theirs[-1, 0]) & (mine[:, 0] >= theirs[0, 0])]
        if len(mine):
            break
    else:
        return [
            head,
            "nothing to compare yet: the two have no loss at a common place after the first step",
        ]
    expected = np.interp(mine[:, 0], *theirs.T)
    off = np.nan_to_num((mine[:, 1] - expected) / np.abs(expected), nan=math.inf)
    now = float(np.median(off[-max(1, len(off) // 3) :]))
    word = "on" if abs(now) <= MARGIN else "above" if now > 0 else "below"
    tail = f"{key} {mine[-1, 1]:.4g} against {expected[-1]:.4g} at {mine[-1, 0]:,.0f} {axis} ({100 * off[-1]:+.1f} %)"
    lines = [head, f"the run is {word} its reference: {tail}"]
    if word != "on":
        outside = np.abs(off) > MARGIN
        begin = 0 if outside.all() else len(off) - int(np.argmin(outside[::-1]))
        since = mine[min(begin, len(off) - 1), 0]
        lines[-1] += f"; by more than the usual {100 * MARGIN:.0f} % from {since:,.0f} {axis} on"
        lines += ["usual causes, the likeliest first:"]
        lines += [f"  {cause}" for cause in causes(own, reference, mine, word, axis, key)]
    return lines + speed(own, reference)


def first_bpb(events: Sequence[dict]) -> float:
    """Return the bits per byte before the first step, 0.0 if they were not logged."""
    found = (event.get("val_bpb") for event in events if event["step"] == 0)
    return next(filter(None, found), 0.0)


def another_text(own: Sequence[dict], reference: Reference) -> str:
    """Return why the losses cannot be compared: another text or tokenizer. "" if they can."""
    data = reference.differ.get("data_dir")
    ours, other = first_bpb(own), first_bpb(reference.events)
    if not (data and ours and other) or abs(ours / other - 1) <= SAME_START:
        return ""
    return (
        f"no comparison: data_dir={data[0]!r} is another text or tokenizer than {data[1]!r}: "
        f"{ours:.3g} bits per byte before the first step, the reference's {other:.3g}"
    )


def causes(
    own: Sequence[dict], reference: Reference, mine: np.ndarray, word: str, axis: str, key: str
) -> list[str]:
    """Return what usually makes such a difference."""
    found, differ = [], dict(reference.differ)
    logs = own, reference.events
    begin_own, begin = map(first_bpb, logs)
    ratio = rate_ratio(own, reference.events, axis)
    rate = differ.pop("learning_rate", None)
    if ratio > 1.5 or ratio < 1 / 1.5:
        said = (
            f": learning_rate={rate[0]:g}, the reference's {rate[1]:g}"
            if rate
            else ", by the schedule"
        )
        times = f"{ratio:.3g} times" if ratio > 1 else f"1/{1 / ratio:.3g} of"
        wrong = f" is too {'high' if ratio > 1 else 'low'}" if word == "above" else ""
        found.append(f"the learning rate{wrong}: {times} the reference's at the same {axis}{said}")
    if any(event["event"] == "train" and event.get("loss", 0.0) is None for event in own):
        found.append(
            "the loss is not finite at some steps: a learning rate too high, float16, or a damaged text"
        )
    if word == "above" and ratio <= 1.5:
        lowest = int(np.nanargmin(mine[:, 1])) if not np.isnan(mine[:, 1]).all() else 0
        if mine[lowest:, 1].max(initial=0.0) > 1.1 * mine[lowest, 1]:
            found.append(
                "the loss has risen again: a learning rate too high for this model, or too little warm-up, or "
                "too many epochs of a small text"
            )
    for setting, (ours, other) in differ.items():
        found.append(f"{setting}={ours!r}, the reference's {other!r}{HINTS.get(setting, '')}")
    if begin and begin_own and abs(begin_own / begin - 1) > SAME_START:
        found.append(
            f"val_bpb is {begin_own:.3g} before the first step, the reference's {begin:.3g}: another "
            "text, tokenizer or starting weights"
        )
    trained, usual = (series(log, "loss", axis) for log in logs)
    if word == "above" and len(trained) and len(usual) and key != "loss":
        at = trained[:, 0] <= usual[-1, 0]
        off = trained[at, 1] / np.interp(trained[at, 0], *usual.T) - 1
        if len(off) and np.median(off[-max(1, len(off) // 3) :]) < MARGIN:  # NaN is not
            found.append(
                "the training loss is not above the reference's: too little text, seen too often, or "
                "validation text of another kind"
            )
    rest = "the data (python prepare.py --show=20 ...), changed code, other versions"
    rest = (
        rest
        if word == "above"
        else "easier text, validation text among the training data, code that learns faster"
    )
    return found or [f"settings and learning rate are the reference's: {rest}"]


HINTS = {
    "total_batch_tokens": ": another number of steps for the same tokens",
    "dropout": ": slower at first",
    "max_steps": ": the schedule ends elsewhere; compare at the ends",
    "schedule": ": compare at the ends",
    "data_dir": ": another text, or another name of it",
    "init_from": ": another start",
    "warmup_steps": ": differs at the beginning only",
}


def rate_ratio(own: Sequence[dict], others: Sequence[dict], axis: str) -> float:
    """Return the median of the run's learning rates over the reference's at the same places; 1
    where none is logged.
    """
    mine, theirs = series(own, "lr", axis), series(others, "lr", axis)
    if not len(mine) or not len(theirs):
        return 1.0
    usual = np.interp(mine[:, 0], *theirs.T)
    kept = (
        (mine[:, 0] <= theirs[-1, 0])
        & (mine[:, 0] >= theirs[0, 0])
        & (usual > 0.05 * theirs[:, 1].max())
    )
    return float(np.median(mine[kept, 1] / usual[kept])) if kept.any() else 1.0


def speed(own: Sequence[dict], reference: Reference) -> list[str]:
    """Return a line about tokens per second, which depend on the machine."""
    rates = [
        [e["tokens_per_s"] for e in events if e.get("tokens_per_s")]
        for events in (own, reference.events)
    ]
    if not all(rates):
        return []
    mine, theirs = map(median, rates)
    return [f"speed: {mine:,.0f} tokens/s, the reference's {theirs:,.0f} on its machine"]


def main(config: dict) -> None:
    if not config["run"] or not config["name"]:
        raise UserError(
            "curves: give --run=DIR --name=NAME, the run and the file of config/ that it ran"
        )
    print(f"wrote {keep(Path(config['run']), config['name'], config['command'])}")


if __name__ == "__main__":
    main(configure(globals()))
