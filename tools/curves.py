"""Curves to compare one's own with: docs/curves/NAME.jsonl for each file of config/ that has run.

    python tools/curves.py --run=out/demo --name=demo   # keep the curve of a run of config/demo.py
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
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from machine import ROOT, commit, processor

from configurator import configure, defaults_of, read_file, script_of
from groundup.errors import UserError, refuse
from groundup.train.config_json import is_edited
from groundup.train.log import read_events

# ---- config --------------------------------------------------------------------------------------
run = ""  # directory of a finished run
name = ""  # of the file in config/ that it ran, without .py
command = ""  # that made it; "" = python SCRIPT.py config/NAME.py

CURVES = ROOT / "docs" / "curves"
MOST = 60  # training events of a curve, and the same number of evaluations
# Keys of an event that are kept
KEPT = """loss lr grad_norm tokens tokens_per_s step_ms val_loss val_bpb reward accuracy
rewards/accuracies rewards/margins mean_token_accuracy""".split()
# Settings that do not change what is learned per token, except for rounding
NO_CAUSE = """out_dir resume resume_from overwrite device dtype compile activation_checkpointing
parallel overlap_step zero1 timeout_s peak_tflops plan_only eval_every log_every track save_every
keep_last sample_prompts batch_size seed eval_steps""".split()
# Of the loss, as a median; single losses of three seeds of config/shakespeare.py differ by up to
# 2.2 %.
MARGIN = 0.02
# Bits per byte of untrained models that differ by a larger share: another text or tokenizer.
SAME_START = 0.05
RATE_MARGIN = 1.5  # learning rates are alike up to this ratio
HINTS = {  # what a setting does to the curve
    "total_batch_tokens": ": another number of steps for the same tokens",
    "dropout": ": slower at first",
    "max_steps": ": the schedule ends elsewhere; compare at the ends",
    "schedule": ": compare at the ends",
    "data_dir": ": another text, or another name of it",
    "init_from": ": another start",
    "warmup_steps": ": differs at the beginning only",
}
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
    script = script_of(path)
    if not script or not (ROOT / script).exists():
        what = f"{directory} has no config.py of a run; give the directory of a run"
        raise UserError(f"curves: {what}")
    defaults = defaults_of(ROOT / script)
    return script.removesuffix(".py"), defaults | read_file(str(path), defaults)


def script_for(path: Path) -> str:
    """Return the script that a file of config/ is for, by the command in its docstring."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.search(rf"(\w+)\.py config/{path.name}", doc)[1]


def keep(directory: Path, name: str, command: str = "", folder: Path = CURVES) -> Path:
    """Write the curve of a run into `folder` and return its path."""
    script, settings = settings_of(directory)
    if not (ROOT / "config" / f"{name}.py").exists():
        raise UserError(f"curves: name={name!r}: there is no config/{name}.py")
    readme, log = directory / "README.md", directory / "log.jsonl"
    card = readme.read_text(encoding="utf-8") if readme.exists() else ""
    machine, _, versions = card.partition("## Machine\n\n")[2].strip().partition("\n")
    if not machine or not card.partition("\n\n")[2].startswith("Complete"):
        raise UserError(f"curves: {directory} is no complete run: its README.md does not say so")
    usual = defaults_of(ROOT / f"{script}.py")
    settings = {key: settings[key] for key in usual if settings[key] != usual[key]}
    about = {
        "event": "run",
        "step": 0,
        "command": command or f"python {script}.py config/{name}.py",
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.localtime(log.stat().st_mtime)),
        "script": script,
        "machine": f"{machine.strip()}, {processor()}".rstrip(", "),
        "versions": versions.strip(),
        "settings": settings,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path, events = folder / f"{name}.jsonl", [about, *thinned(read_events(log))]
    lines = [json.dumps(event, ensure_ascii=False) for event in events]
    path.with_suffix(".tmp").write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.replace(path.with_suffix(".tmp"), path)
    return path


def thinned(events: Sequence[dict]) -> list[dict]:
    """Return at most MOST training events, each the mean of several in a row at the place of the
    last, and as many evaluations, with the keys KEPT, five digits each.
    """
    found = []
    for kind in ("train", "eval"):
        of_kind = [event for event in events if event["event"] == kind]
        size = max(1, math.ceil(len(of_kind) / MOST))
        # evaluations are taken from the end, so that the last one stays
        parts = [of_kind[max(0, end - size) : end] for end in range(len(of_kind), 0, -size)][::-1]
        for part in parts:
            last = part[-1]
            values = {key: last[key] for key in KEPT if type(last.get(key)) in (int, float)}
            if kind == "train" and "loss" in values:
                losses = [event.get("loss") for event in part]
                values["loss"] = fmean(loss for loss in losses if loss is not None)
            for key in values.keys() - {"tokens"}:
                values[key] = float(f"{values[key]:.5g}")
            found.append({"event": kind, "step": last["step"], **values})
    return sorted(found, key=lambda event: (event["step"], event["event"] == "eval"))


# ---- which curve ---------------------------------------------------------------------------------


def reference_of(directory: Path, folder: Path = CURVES) -> Reference:
    """Return the curve of the config with the fewest settings that differ. Raise UserError if that
    has not run.
    """
    script, own = settings_of(directory)
    found = []
    defaults = defaults_of(ROOT / f"{script}.py")
    for path in sorted((ROOT / "config").glob("*.py")):
        if script_for(path) != script:  # reading it would make the data of another stage
            continue
        file = folder / f"{path.stem}.jsonl"
        about, *events = read_events(file) if file.exists() else [{}]
        settings = defaults | (about["settings"] if about else read_file(str(path), defaults))
        keys = [key for key in own if key in settings and key not in NO_CAUSE]
        differ = {key: (own[key], settings[key]) for key in keys if own[key] != settings[key]}
        if is_edited(directory / "latest"):
            differ["model.py"] = ("edited", "as it came")
        found.append(Reference(path.stem, about, events, differ))
    if not found:
        raise UserError(f"curves: no file of config/ is for {script}.py")
    # The fewest settings that differ; of equals the first by name.
    nearest = min(found, key=lambda reference: len(reference.differ))
    if not nearest.about:
        ran = ", ".join(reference.name for reference in found if reference.about) or "none"
        what = f"{directory} is nearest to config/{nearest.name}.py, which has not run"
        what = f"{what}: there is no curve of it (of {script}.py there are: {ran})"
        raise UserError(f"curves: {what}")
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


def beside(own: Sequence[dict], reference: Reference, key: str, axis: str) -> np.ndarray:
    """Return (n, 3): the places of the run that the reference covers, both values there."""
    mine, theirs = (series(log, key, axis) for log in (own, reference.events))
    if not len(theirs):
        return np.empty((0, 3))
    # outside of these places there is nothing to compare with
    mine = mine[(mine[:, 0] >= theirs[0, 0]) & (mine[:, 0] <= theirs[-1, 0])]
    return np.column_stack([mine, np.interp(mine[:, 0], *theirs.T)])


def recent(off: np.ndarray) -> float:
    """Return the median of the last third."""
    return float(np.median(off[-max(1, len(off) // 3) :]))


def compare(own: Sequence[dict], reference: Reference) -> list[str]:
    """Return the lines that say where the run is beside its reference, and the usual causes, the
    likeliest first.
    """
    logs, about = (own, reference.events), reference.about
    head = f"reference: {reference.name} ({about['command']}; {about['machine']})"
    if text := starts_apart(own, reference):
        return [head, text]
    # Tokens, because a run may take larger or smaller steps than its reference.
    axis = "tokens" if all(any("tokens" in e for e in log) for log in logs) else "steps"
    keys = ("val_bpb", "val_loss", "loss")
    common = {key: at for key in keys if len(at := beside(own, reference, key, axis))}
    if not common:
        nothing = "the two have no loss at a common place after the first step"
        return [head, f"nothing to compare yet: {nothing}"]
    key, points = next(iter(common.items()))
    place, mine, expected = points.T
    off = np.nan_to_num((mine - expected) / np.abs(expected), nan=math.inf)
    now = recent(off)
    word = "on" if abs(now) <= MARGIN else "above" if now > 0 else "below"
    found = f"{key} {mine[-1]:.4g} against {expected[-1]:.4g} at {place[-1]:,.0f} {axis}"
    line = f"the run is {word} its reference: {found} ({100 * off[-1]:+.1f} %)"
    lines = []
    if word == "on" and (differ := differences(reference)):
        lines = ["these differ, so that it is on the curve may be chance:"]
        lines += [f"  {one}" for one in differ]
    if word != "on":
        # After the last place at which it was within the margin
        inside = np.flatnonzero(np.abs(off) <= MARGIN)
        begin = inside[-1] + 1 if len(inside) else 0
        since = place[min(begin, len(off) - 1)]
        line += f"; by more than the usual {100 * MARGIN:.0f} % from {since:,.0f} {axis} on"
        lines = ["usual causes, the likeliest first:"]
        lines += [f"  {cause}" for cause in causes(own, reference, mine, word, axis, key)]
    return [head, line, *lines]


def first_bpb(events: Sequence[dict]) -> float:
    """Return the bits per byte before the first step, 0.0 if they were not logged."""
    found = (event.get("val_bpb") for event in events if event["step"] == 0)
    return next(filter(None, found), 0.0)


def starts_apart(own: Sequence[dict], reference: Reference) -> str:
    """Return why the losses cannot be compared; "" if the runs start alike, or nobody knows."""
    ours, other = first_bpb(own), first_bpb(reference.events)
    if not ours or not other or abs(ours / other - 1) <= SAME_START:
        return ""
    how = f"{ours:.3g} bits per byte before the first step, the reference's {other:.3g}"
    where = ""
    if "data_dir" in reference.differ:
        where = " (data_dir={!r}, the reference's {!r})".format(*reference.differ["data_dir"])
    return f"no comparison: another text, tokenizer or start{where}: {how}"


def causes(
    own: Sequence[dict], reference: Reference, mine: np.ndarray, word: str, axis: str, key: str
) -> list[str]:
    """Return what usually makes such a difference. mine (n,): the run's `key` where it was
    compared; word: above | below.
    """
    found, is_above = [], word == "above"
    ratio = rate_ratio(own, reference, axis)
    found += [wrong_rate(ratio, reference, is_above, axis)]
    if any(event["event"] == "train" and event.get("loss", 0.0) is None for event in own):
        why = "a learning rate too high, float16, or a damaged text"
        found.append(f"the loss is not finite at some steps: {why}")
    if is_above and ratio <= RATE_MARGIN and has_risen(mine):
        why = "a learning rate too high for this model, or too little warm-up"
        found.append(f"the loss has risen again: {why}, or too many epochs of a small text")
    found += differences(reference)
    if is_above and key != "loss" and trains_as_well(own, reference, axis):
        why = "too little text, seen too often, or validation text of another kind"
        found.append(f"the training loss is not above the reference's: {why}")
    rest = "easier text, validation text among the training data, code that learns faster"
    if is_above:
        rest = "the data (python prepare.py --show=20 ...), changed code, other versions"
    last = f"settings and learning rate are the reference's: {rest}"
    return list(filter(None, found)) or [last]


def differences(reference: Reference) -> list[str]:
    """Return a line for each setting that differs, without the learning rate."""
    return [
        f"{key}={ours!r}, the reference's {other!r}{HINTS.get(key, '')}"
        for key, (ours, other) in reference.differ.items()
        if key != "learning_rate"
    ]


def wrong_rate(ratio: float, reference: Reference, is_above: bool, axis: str) -> str:
    """Return what to say of a learning rate `ratio` times the reference's; "" if they are alike."""
    if 1 / RATE_MARGIN <= ratio <= RATE_MARGIN:
        return ""
    wrong = f" is too {'high' if ratio > 1 else 'low'}" if is_above else ""
    times = f"{ratio:.3g} times" if ratio > 1 else f"1/{1 / ratio:.3g} of"
    source = ", by the schedule"
    if rates := reference.differ.get("learning_rate"):
        source = f": learning_rate={rates[0]:g}, the reference's {rates[1]:g}"
    return f"the learning rate{wrong}: {times} the reference's at the same {axis}{source}"


def has_risen(losses: np.ndarray) -> bool:
    """Return whether the losses are later more than a tenth above their lowest."""
    if np.isnan(losses).all():
        return False
    lowest = int(np.nanargmin(losses))
    return bool(losses[lowest:].max(initial=0.0) > 1.1 * losses[lowest])


def trains_as_well(own: Sequence[dict], reference: Reference, axis: str) -> bool:
    """Return whether the training loss is not above the reference's."""
    _, trained, usual = beside(own, reference, "loss", axis).T
    return len(trained) > 0 and recent(trained / usual - 1) < MARGIN  # NaN is not


def rate_ratio(own: Sequence[dict], reference: Reference, axis: str) -> float:
    """Return the median of the run's learning rates over the reference's at the same places; 1
    where none is logged.
    """
    _, mine, usual = beside(own, reference, "lr", axis).T
    kept = usual > 0.05 * usual.max(initial=0.0)  # at the end of a schedule ratios mean little
    return float(np.median(mine[kept] / usual[kept])) if kept.any() else 1.0


def main(config: dict) -> None:
    what = "give --run=DIR --name=NAME, the run and the file of config/ that it ran"
    refuse(not config["run"] or not config["name"], what)
    print(f"wrote {keep(Path(config['run']), config['name'], config['command'])}")


if __name__ == "__main__":
    main(configure(globals()))
