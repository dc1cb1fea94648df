"""Curves of training runs, from their log.jsonl: a picture or a plot in the terminal; also over ssh.

    python tools/plot.py --runs=out/demo                                 # plot.png: loss, bits per byte, lr, ...
    python tools/plot.py --runs='out/a,out/b' --x=hours --out=two.png    # two runs in one picture
    python tools/plot.py --runs=out/dpo --y='rewards/chosen+rewards/rejected,rewards/margins' --ascii=True
    python tools/plot.py --runs=gpu1:work/out/big --ascii=True --watch=10   # over ssh, until Ctrl-C

A run is its directory or its log.jsonl, a pattern of such names, or `host:` and a name there (host: whatever ssh takes,
with a key that asks for no password). Steps that an interrupted run logged and its continuation repeated count once, as
logged last. In y, `+` puts keys into one panel and `*` matches any letters: --y='val_bpb/*'. Each run has a color, each
key of a panel a line style. Markers are evaluations; pale lines are training values, thick ones their moving average.
"""

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from configurator import configure
from groundup.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---- config ---------------------------------------------------------------------------------------------------------
runs = ""  # run directories or log.jsonl files, comma-separated, also patterns and host:path; "" = the newest of out/*
out = "plot.png"  # the picture: .png, .svg or .pdf
ascii = False  # a plot in the terminal instead
x = "steps"  # steps | tokens | hours of training, without evaluations and saves
y = ""  # panels, comma-separated, keys of one panel joined by +, patterns allowed; "" = the usual, as far as logged
smooth = 0.8  # weight of the past in the moving average of training values; 0 = none
watch = 0.0  # seconds between two looks at the logs, until Ctrl-C; 0 = draw once

PANELS = (
    "loss+val_loss,val_bpb,val_loss/*,val_bpb/*,lr,grad_norm,tokens_per_s,"
    "mean_token_accuracy,rewards/accuracies,rewards/margins,rewards/chosen+rewards/rejected,accuracy,margin,reward,"
    "kl_answer,entropy"
)
# dpo.py logs these a second time under trl's names, and only those in evaluations.
TWICE = {"accuracy": "rewards/accuracies", "margin": "rewards/margins"}
NOT_SMOOTHED = ("lr", "tokens", "epoch")  # these have no noise
DASHES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (9, 4)))  # of the keys of a panel
MARKERS = "osv^Dp*"  # of their evaluations
CHINESE_FONTS = ("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "PingFang SC", "Microsoft YaHei")


class Curve(NamedTuple):
    run: int  # index of the run
    key: int  # index of the panel's key; a training key and its evaluation (loss, val_loss) are one
    points: bool  # evaluations, few
    x: np.ndarray
    y: np.ndarray
    mean: np.ndarray | None  # the moving average of y


class Panel(NamedTuple):
    title: str
    keys: list[str]  # as the legend names them
    curves: list[Curve]


class Run(NamedTuple):
    name: str
    events: list[dict]
    axis: tuple[np.ndarray, np.ndarray]  # steps, x


# ---- logs -----------------------------------------------------------------------------------------------------------


def find_logs(runs: str) -> list[str]:
    """Return the log files that `runs` names, a remote one as host:path. Raise UserError if a pattern matches none."""
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
    """Split host:path as scp does; None if such a file is here, or if one letter is a drive of Windows."""
    parts = re.fullmatch(r"([^/:]{2,}):(.+)", path)
    return parts.groups() if parts and not os.path.exists(path) else None


def read(path: str) -> bytes:
    """Return the bytes of a log, here or over ssh. Raise UserError if it cannot be read."""
    far = remote(path)
    if far is None:
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"plot: cannot read {path}: {error.strerror}") from None
    host, file = far
    command = f"cat -- {shlex.quote(file.removeprefix('~/'))}"  # a remote command starts in the home directory
    options = ["-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=10"]
    try:
        done = subprocess.run(["ssh", *options, "--", host, command], stdin=subprocess.DEVNULL, capture_output=True)
    except FileNotFoundError:
        raise UserError(f"plot: cannot read {path}: there is no ssh here") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines() or [f"ssh ended with {done.returncode}"]
        raise UserError(f"plot: cannot read {path}: {reason[-1]}")
    return done.stdout


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the names of the runs: that of the directory (of the file, if it is not log.jsonl), the whole path where
    two would be the same."""
    files = [Path(path) for path in paths]
    names = [file.parent.name if file.name == "log.jsonl" else file.stem for file in files]
    return [name if name and names.count(name) == 1 else path for name, path in zip(names, paths, strict=True)]


def parse(text: bytes) -> tuple[list[dict], list[str]]:
    """Return the "train" and "eval" events of a log, steps ascending, and remarks on what is not among them.

    A run that was killed repeats the steps after its checkpoint: an event replaces all at its place or later. At the
    same step, training comes before the evaluation."""
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
    n_null = sum(event.get("loss", 0) is None for event in events)
    remarks = {
        "the log is empty": not lines, f"lines that are no events, left out: {n_bad}": n_bad,
        "the last line is half written": half_written,
        f"events that came again, the later ones count: {n_again}": n_again,
        f"losses that are not finite, gaps in the curve: {n_null}": n_null,
    }  # fmt: skip
    return events, [remark for remark, holds in remarks.items() if holds]


def read_event(line: bytes) -> dict | None:
    """Return the object of a line if RunLog wrote it, else None."""
    try:
        event = json.loads(line)
    except ValueError:  # not JSON, not UTF-8
        return None
    known = isinstance(event, dict) and isinstance(event.get("event"), str) and type(event.get("step")) is int
    return event if known else None


def place(event: dict) -> tuple[int, bool]:
    return event["step"], event["event"] == "eval"


def series(events: Sequence[dict], kind: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, values) of `key` in the events of one kind; null is NaN, other values are left out."""
    found = [(event["step"], number(event, key)) for event in events if event["event"] == kind]
    found = [(step, value) for step, value in found if value is not None]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)


def number(event: dict, key: str) -> float | None:
    """Return the value of `key`, null as NaN; None if there is none or it is no number."""
    value = event.get(key, "")
    return math.nan if value is None else float(value) if type(value) in (int, float) else None


def moving_average(values: np.ndarray, decay: float) -> np.ndarray:
    """Return the exponential moving average, weights decay^age, with the bias correction of Adam (arXiv:1412.6980,
    section 3), so that the weights sum to one from the first value on. NaN stays NaN and counts nowhere."""
    mean, weight, averages = 0.0, 0.0, []
    for value in values:
        if math.isnan(value):
            averages.append(math.nan)
            continue
        mean, weight = decay * mean + (1 - decay) * value, decay * weight + 1 - decay
        averages.append(mean / weight)
    return np.array(averages)


def axis(events: Sequence[dict], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (steps, x at these steps), from step 0 on. Raise UserError if the log has no step_ms or tokens_per_s."""
    if kind == "steps":
        return np.array([0.0, 1.0]), np.array([0.0, 1.0])
    steps, hours, tokens = [0.0], [0.0], [0.0]
    for event in events:
        if event["event"] == "train":
            seconds = (event["step"] - steps[-1]) * (number(event, "step_ms") or math.nan) / 1000
            processed = number(event, "tokens")
            if processed is None:  # logs of pairs and of rl.py
                processed = tokens[-1] + seconds * (number(event, "tokens_per_s") or math.nan)
            steps.append(event["step"]), hours.append(hours[-1] + seconds / 3600), tokens.append(processed)
    values = np.array(hours if kind == "hours" else tokens)
    if np.isnan(values).any():
        raise UserError(f"plot: {kind} need step_ms and tokens_per_s in the log; use --x=steps")
    return np.array(steps, dtype=np.float64), values


def at_steps(steps: np.ndarray, axis_steps: np.ndarray, axis_values: np.ndarray) -> np.ndarray:
    """Return x at `steps`: interpolated, after the last one at the last speed."""
    if len(axis_steps) < 2:
        return np.zeros_like(steps)
    (s0, s1), (v0, v1) = axis_steps[-2:], axis_values[-2:]
    beyond = v1 + (steps - s1) * (v1 - v0) / (s1 - s0)
    return np.where(steps > s1, beyond, np.interp(steps, axis_steps, axis_values))


# ---- panels ---------------------------------------------------------------------------------------------------------


def panels_of(y: str, runs: Sequence[Run], smooth: float) -> tuple[list[Panel], list[str]]:
    """Return (panels in the order of `y`, a line for each one of `y` that no log has)."""
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
    """Return the curves of these keys. Keys of one group, rewards/chosen and rewards/rejected, lose their prefix."""
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
    """Return one line on a run: its step, last figures, remarks."""
    parts = [f"step {events[-1]['step']}"] if events else []
    for kind, shown in (("train", ("loss", "tokens_per_s")), ("eval", ("val_loss", "val_bpb"))):
        for key in shown:
            values = series(events, kind, key)[1]
            parts += [f"{key} {values[-1]:.4g}"] if len(values) else []
    return f"{name}: " + "; ".join(filter(None, [", ".join(parts), *remarks]))


# ---- picture --------------------------------------------------------------------------------------------------------


def draw(panels: Sequence[Panel], names: Sequence[str], x_label: str) -> "Figure":
    """Return the panels as a figure, up to three in a row, each with its legend. names: of the runs."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.font_manager import fontManager
    except ImportError:
        raise UserError("plot: a picture needs matplotlib; run: pip install matplotlib; or use --ascii=True") from None
    n_columns = min(3, max(1, len(panels)))
    n_rows = max(1, math.ceil(len(panels) / n_columns))
    chinese = {font.name for font in fontManager.ttflist} & set(CHINESE_FONTS)
    with matplotlib.rc_context({"font.family": ["DejaVu Sans", *sorted(chinese)[:1]]}):
        figure = Figure(figsize=(5 * n_columns, 3.4 * n_rows), layout="constrained")
        left, right = bounds([curve.x for panel in panels for curve in panel.curves])
        for position, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(n_rows, n_columns, position)
            for curve in panel.curves:
                color, label = f"C{curve.run % 10}", curve_name(curve, panel, names)
                style = {"color": color, "linestyle": DASHES[curve.key % len(DASHES)]}
                if curve.points:
                    marker = MARKERS[curve.key % len(MARKERS)]
                    axes.plot(curve.x, curve.y, marker=marker, markersize=4, linewidth=1, label=label, **style)
                elif curve.mean is None:
                    axes.plot(curve.x, curve.y, linewidth=1.5, label=label, **style)
                else:
                    axes.plot(curve.x, curve.y, color=color, linewidth=0.8, alpha=0.35)
                    axes.plot(curve.x, curve.mean, linewidth=1.8, label=label, **style)
            axes.set_title(panel.title.replace("+", ", "), fontsize=10)
            axes.set_xlabel(x_label, fontsize=9)
            axes.set_xlim(left - 0.03 * (right - left), right + 0.03 * (right - left))
            axes.grid(alpha=0.25)
            axes.legend(fontsize=7)
    return figure


def curve_name(curve: Curve, panel: Panel, names: Sequence[str]) -> str:
    """Return what tells a curve from the others of the panel: the run, the key or both."""
    if len(panel.keys) == 1:
        return names[curve.run]
    return f"{names[curve.run]} {panel.keys[curve.key]}" if len(names) > 1 else panel.keys[curve.key]


def bounds(parts: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return the least and the greatest value, never the same."""
    values = np.concatenate([np.zeros(0), *parts])
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


# ---- terminal -------------------------------------------------------------------------------------------------------


def draw_ascii(panels: Sequence[Panel], names: Sequence[str], x_label: str, width: int, height: int) -> str:
    """Return the panels as text, one below the other, `width` columns and about `height` lines; 0 = 12 for each plot.
    Each key of each run has a letter, small for training, a capital for evaluations."""
    each = max(5, (height - 1) // len(panels) - 4) if height and panels else 12
    limits = bounds([curve.x for panel in panels for curve in panel.curves])
    lines = [line for panel in panels for line in panel_lines(panel, names, x_label, limits, width, each)]
    return "\n".join([*lines, "small letters: training, capitals: evaluation"] if lines else ["nothing logged yet"])


def panel_lines(
    panel: Panel, names: Sequence[str], x_label: str, limits: tuple[float, float], width: int, height: int
) -> list[str]:  # fmt: skip
    """Return one panel: title and legend, `height` lines of plot, the x axis, an empty line."""
    columns, (left, right) = width - 10, limits
    kept = []
    for curve in panel.curves:
        values = curve.y if curve.mean is None else curve.mean
        finite = np.isfinite(values)
        at = (curve.x[finite] - left) / (right - left) * (columns - 1)
        if curve.points or not len(at):
            kept.append((np.rint(at).astype(int), values[finite]))
        else:  # a line: on every column that it crosses
            crossed = np.arange(round(at[0]), round(at[-1]) + 1)
            kept.append((crossed, np.interp(crossed, at, values[finite])))
    bottom, top = bounds([values for _, values in kept])
    grid, legend = [[" "] * columns for _ in range(height)], {}
    for curve, (at, values) in zip(panel.curves, kept, strict=True):
        letter = "abcdefghijklmnopqrstuvwxyz"[(curve.run * len(panel.keys) + curve.key) % 26]
        legend[f"{letter}={curve_name(curve, panel, names)}"] = None
        rows = np.rint((top - values) / (top - bottom) * (height - 1)).astype(int)
        for column, row in zip(at, rows, strict=True):
            grid[row][column] = letter.upper() if curve.points else letter
    labels = [f"{top:.4g}", *[""] * (height - 2), f"{bottom:.4g}"]
    lines = [f"{panel.title.replace('+', ', ')}  {'  '.join(legend)}"[:width]]
    lines += [f"{label:>9}|{''.join(row)}".rstrip() for label, row in zip(labels, grid, strict=True)]
    begin, end = f"{left:.4g}", f"{right:.4g} {x_label}"
    return [*lines, " " * 9 + "+" + "-" * columns, " " * 10 + begin + end.rjust(columns - len(begin)), ""]


# ---- main -----------------------------------------------------------------------------------------------------------


def check_config(config: dict) -> None:
    """Raise UserError for a value that cannot be used."""
    if config["x"] not in ("steps", "tokens", "hours"):
        raise UserError(f"config: x must be one of steps, tokens, hours, got {config['x']!r}")
    if not 0 <= config["smooth"] < 1:
        raise UserError(f"config: smooth must be at least 0 and less than 1, got {config['smooth']}")
    if not 0 <= config["watch"] < math.inf:
        raise UserError(f"config: watch must be 0 or a number of seconds, got {config['watch']}")
    if not config["ascii"] and Path(config["out"]).suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"config: out must end in .png, .svg or .pdf, got {config['out']!r}")


def look(logs: Sequence[str], last: dict[str, bytes], kind: str) -> tuple[list[Run], list[str]]:
    """Return the runs as they are now, or in `last` when they cannot be read any more; and a line on each."""
    drawn, lines = [], []
    for path, name in zip(logs, short_names(logs), strict=True):
        try:
            last[path] = read(path)
        except UserError as error:
            lines.append(str(error))
        if path in last:
            events, remarks = parse(last[path])
            try:
                drawn.append(Run(name, events, axis(events, kind)))
                lines.append(summary(name, events, remarks))
            except UserError as error:
                lines.append(f"plot: {path}: {str(error).removeprefix('plot: ')}")
    return drawn, lines


def show(drawn: Sequence[Run], config: dict) -> list[str]:
    """Draw the runs into the file or on the terminal, which is cleared first if they are watched. Return lines: keys of
    y that no log has (a UserError if they are not watched), and which file was written."""
    panels, missing = panels_of(config["y"], drawn, config["smooth"])
    names = [run.name for run in drawn]
    if missing and not config["watch"]:
        raise UserError("\n".join(missing))
    label = {"steps": "step", "tokens": "tokens", "hours": "hours of training"}[config["x"]]
    if config["ascii"]:
        size = shutil.get_terminal_size()
        clear = "\x1b[H\x1b[2J" if config["watch"] and sys.stdout.isatty() else ""
        height = size.lines - len(drawn) - 3 if config["watch"] else 0
        print(clear + draw_ascii(panels, names, label, size.columns, height))
        return missing
    path = config["out"]
    try:
        draw(panels, names, label).savefig(path + ".tmp", format=Path(path).suffix[1:], dpi=110)
        os.replace(path + ".tmp", path)  # a viewer sees the old picture or the new one
    except OSError as error:
        raise UserError(f"plot: cannot write {path}: {error.strerror}") from None
    return [*missing, f"wrote {path}"]


def main(config: dict) -> None:
    check_config(config)
    last: dict[str, bytes] = {}
    said: list[str] = []
    while True:
        before = dict(last)
        drawn, lines = look(find_logs(config["runs"]), last, config["x"])  # a pattern may match more by now
        if not config["watch"] and not drawn:
            raise UserError("\n".join(lines))
        redraw = bool(drawn) and last != before
        lines += show(drawn, config) if redraw else []
        print("".join(f"{line}\n" for line in lines if redraw or line not in said), end="", flush=True)
        said = lines
        if not config["watch"]:
            return
        time.sleep(config["watch"])


if __name__ == "__main__":
    settings = configure(globals())
    try:
        main(settings)
    except KeyboardInterrupt:  # ends watching
        pass
