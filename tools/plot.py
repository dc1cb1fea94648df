"""Curves of training runs, from their log.jsonl, in one picture.

    python tools/plot.py --runs=out/demo                                 # plot.png: loss, bits per byte, lr, ...
    python tools/plot.py --runs='out/a,out/b' --x=hours --out=two.png    # two runs in one picture
    python tools/plot.py --runs=out/dpo --y='rewards/chosen+rewards/rejected,rewards/margins'
    python tools/plot.py --runs=out/mine --reference=True                # beside the curve of the nearest config
    watch -n 60 python tools/plot.py --runs=out/big                      # while it trains: a viewer shows the new one

A run is its directory or its log.jsonl, or a pattern of such names. In y, `+` puts keys into one panel and `*` matches
any letters: --y='val_bpb/*'. Each run has a color, each key of a panel a line style. Markers are evaluations; pale
lines are training values, thick ones their average over the neighbours on both sides.
"""

import math
import os
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from glob import glob
from pathlib import Path
from typing import NamedTuple

import curves
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from configurator import configure
from groundup.errors import UserError
from groundup.train.log import read_events

# ---- config ---------------------------------------------------------------------------------------------------------
runs = ""  # run directories, log.jsonl files, patterns, comma-separated; "" = newest of out/*
out = "plot.png"  # the picture: .png, .svg or .pdf
x = "steps"  # steps | tokens | hours (of training, without evaluations and saves)
y = ""  # panels, comma-separated; keys joined by + share one; patterns allowed; "" = the usual
reference = False  # also draw the curve of the nearest config (docs/curves) and compare
smooth = 0.8  # weight of the neighbours in the average of training values; 0 = none

X_LABELS = {"steps": "step", "tokens": "tokens", "hours": "hours of training"}
PANELS = (
    "loss+val_loss,val_bpb,val_loss/*,val_bpb/*,lr,grad_norm,tokens_per_s,"
    "mean_token_accuracy,rewards/accuracies,rewards/margins,rewards/chosen+rewards/rejected,accuracy,margin,reward,"
    "kl_answer,entropy"
)
NOT_SMOOTHED = ("lr", "tokens", "epoch")  # these have no noise
DASHES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (9, 4)))  # of the keys of a panel
REFERENCE = "reference "  # how the name of a curve in docs/curves begins
MARKERS = "osv^Dp*"  # of their evaluations
CHINESE_FONTS = ("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "PingFang SC", "Microsoft YaHei")


class Run(NamedTuple):
    name: str
    events: list[dict]  # "train" and "eval": "event" and numbers, x among them


class Curve(NamedTuple):
    run: int  # index of the run
    key: int  # index of the panel's key; a training key and its evaluation (loss, val_loss) are one
    points: bool  # evaluations, few
    x: np.ndarray
    y: np.ndarray
    mean: np.ndarray  # the moving average of y, or y


class Panel(NamedTuple):
    title: str
    keys: list[str]  # as the legend names them
    curves: list[Curve]


# ---- logs -----------------------------------------------------------------------------------------------------------


def find_logs(runs: str) -> list[str]:
    """Return the log files that `runs` names, each once. Raise UserError for a name without a log."""
    found = sorted(glob("out/*/log.jsonl"), key=os.path.getmtime)[-1:] if not runs else []
    for name in filter(None, map(str.strip, runs.split(","))):
        log = name if name.endswith(".jsonl") else name.rstrip("/") + "/log.jsonl"
        logs = [log] if os.path.exists(log) else sorted(glob(log, recursive=True))
        if not logs:
            raise UserError(f"plot: no log matches {log!r}; check --runs")
        found += logs
    if not found:
        raise UserError("plot: no out/*/log.jsonl here; give --runs=DIR")
    return list(dict.fromkeys(found))


def without_repeats(events: Sequence[dict]) -> list[dict]:
    """Return the "train" and "eval" events, steps ascending. A run that was killed repeats the steps after its
    checkpoint: an event replaces all at its place or later. At one step, training comes before the evaluation."""

    def place(event: dict) -> tuple[int, bool]:
        return event["step"], event["event"] == "eval"

    kept: list[dict] = []
    for event in events:
        if event["event"] in ("train", "eval"):
            while kept and place(kept[-1]) >= place(event):
                kept.pop()
            kept.append(event)
    return kept


def x_of(events: Sequence[dict], kind: str) -> np.ndarray:
    """Return x of each event, of evaluations interpolated. Raise UserError if the log has no step_ms, tokens_per_s."""
    at = np.array([event["step"] for event in events], dtype=np.float64)
    if kind == "steps":
        return at
    steps, values = [0.0], [0.0]
    for event in events:
        if event["event"] == "train":
            seconds = (event["step"] - steps[-1]) * event.get("step_ms", math.nan) / 1000
            # logs of pairs and of rl.py have only the rate of tokens
            tokens = event.get("tokens", values[-1] + seconds * event.get("tokens_per_s", math.nan))
            values.append(values[-1] + seconds / 3600 if kind == "hours" else tokens)
            steps.append(event["step"])
    if np.isnan(values).any():
        raise UserError(f"plot: {kind} need step_ms and tokens_per_s in the log; use --x=steps")
    return np.interp(at, steps, values)


def run_of(name: str, events: Sequence[dict], kind: str) -> Run:
    """Return the run with its numbers, null as NaN."""
    events, kept = without_repeats(events), []
    for event, x in zip(events, x_of(events, kind).tolist(), strict=True):
        numbers = {key: math.nan if value is None else float(value) for key, value in event.items()
                   if value is None or type(value) in (int, float)}  # fmt: skip
        kept.append(numbers | {"event": event["event"], "x": x})
    return Run(name, kept)


def moving_average(values: np.ndarray, decay: float) -> np.ndarray:
    """Return the mean around each value, with weights decay^distance on both sides.

    An average of the past alone lags: it would draw a falling loss too high. NaN stays NaN and
    counts nowhere."""

    def sums(values: np.ndarray) -> np.ndarray:  # of each value and all before it: (n, 2)
        total, found = np.zeros(2), []
        for value in values:
            total = decay * total + ([0, 0] if math.isnan(value) else [value, 1])
            found.append(total)
        return np.array(found).reshape(-1, 2)

    own = np.stack([np.nan_to_num(values), ~np.isnan(values)], axis=1)
    both = sums(values) + sums(values[::-1])[::-1] - own  # each value's own is in both
    return np.where(np.isnan(values), np.nan, both[:, 0] / np.maximum(both[:, 1], 1e-300))


# ---- panels ---------------------------------------------------------------------------------------------------------


def panels_of(y: str, runs: Sequence[Run], smooth: float) -> list[Panel]:
    """Return the panels in the order of `y`. Raise UserError for one of `y` that no log has."""
    logged = dict.fromkeys(key for run in runs for event in run.events for key in event)
    keys, panels = [key for key in logged if key not in ("event", "x")], []
    for title in filter(None, map(str.strip, (y or PANELS).split(","))):
        patterns = [pattern.strip() for pattern in title.split("+")]
        chosen = dict.fromkeys(key for pattern in patterns for key in keys if fnmatchcase(key, pattern))
        if chosen:
            panels.append(panel_of(title, list(chosen), runs, smooth))
        elif y and keys:
            raise UserError(f"plot: no log has {title!r}; they have {', '.join(sorted(keys))}")
    return panels


def panel_of(title: str, keys: Sequence[str], runs: Sequence[Run], smooth: float) -> Panel:
    """Return the curves of these keys. Keys of one group, rewards/chosen and rewards/rejected, lose their prefix."""
    curves, bases = [], list(dict.fromkeys(key.removeprefix("val_") for key in keys))
    for which, run in enumerate(runs):
        for key in keys:
            for kind in ("train", "eval"):
                points = [(e["x"], e[key]) for e in run.events if e["event"] == kind and key in e]
                at, values = np.array(points, dtype=np.float64).reshape(-1, 2).T
                mean = (
                    moving_average(values, smooth) if kind == "train" and smooth and key not in NOT_SMOOTHED else values
                )
                if points:
                    curves.append(Curve(which, bases.index(key.removeprefix("val_")), kind == "eval", at, values, mean))
    one_group = len(bases) > 1 and len({base.rpartition("/")[0] for base in bases}) == 1
    return Panel(title, [base.rpartition("/")[2] for base in bases] if one_group else bases, curves)


def draw(panels: Sequence[Panel], names: Sequence[str], x_label: str) -> "Figure":  # noqa: F821 - imported in it
    """Return the panels as a figure, up to three in a row, each with its legend. names: of the runs."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.font_manager import fontManager
    except ImportError:
        raise UserError("plot: a picture needs matplotlib; run: pip install matplotlib") from None
    n_columns = min(3, max(1, len(panels)))
    n_rows = max(1, math.ceil(len(panels) / n_columns))
    chinese = {font.name for font in fontManager.ttflist} & set(CHINESE_FONTS)
    with matplotlib.rc_context({"font.family": ["DejaVu Sans", *sorted(chinese)[:1]]}):
        figure = Figure(figsize=(5 * n_columns, 3.4 * n_rows), layout="constrained")
        right = max((curve.x.max() for panel in panels for curve in panel.curves), default=1.0)
        for position, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(n_rows, n_columns, position)
            for curve in panel.curves:
                behind = names[curve.run].startswith(REFERENCE)
                color = "0.7" if behind else f"C{curve.run % 10}"
                style = {"color": color, "linestyle": DASHES[curve.key % len(DASHES)], "linewidth": 1.6}
                style |= {"zorder": 1 if behind else 2}
                if curve.points:
                    style |= {"marker": MARKERS[curve.key % len(MARKERS)], "markersize": 4, "linewidth": 1}
                elif curve.mean is not curve.y:
                    axes.plot(curve.x, curve.y, color=style["color"], linewidth=0.8, alpha=0.35)
                parts = [names[curve.run]] if len(names) > 1 or len(panel.keys) == 1 else []
                parts += [panel.keys[curve.key]] if len(panel.keys) > 1 else []
                if any(other.points != curve.points for other in panel.curves):
                    parts.append("validation" if curve.points else "training")
                axes.plot(curve.x, curve.mean, label=" ".join(parts), **style)
            axes.set_title(panel.title.replace("+", ", "), fontsize=10)
            axes.set_xlabel(x_label, fontsize=9)
            axes.set_xlim(-0.03 * right, 1.03 * right + 1e-9)
            axes.grid(alpha=0.25)
            axes.legend(fontsize=7)
    return figure


def references(logs: Sequence[str]) -> list[tuple[str, list[dict]]]:
    """Print how each run compares with its reference; return [(name, events)] of these, each once."""
    found = {}
    for log in logs:
        directory = Path(log).parent
        beside = curves.reference_of(directory)
        print("\n".join([f"{directory}:", *curves.compare(without_repeats(read_events(Path(log))), beside)]))
        found[REFERENCE + beside.name] = beside.events
    return list(found.items())


def main(config: dict) -> None:
    if not 0 <= config["smooth"] < 1:
        raise UserError(f"config: smooth must be at least 0 and less than 1, got {config['smooth']}")
    logs = find_logs(config["runs"])
    names = [Path(log).parent.name for log in logs]
    names = names if len(set(names)) == len(names) else logs
    drawn = [run_of(name, read_events(Path(log)), config["x"]) for log, name in zip(logs, names, strict=True)]
    for events in references(logs) if config["reference"] else ():
        drawn.append(run_of(events[0], events[1], config["x"]))
        names.append(events[0])
    panels, label, path = panels_of(config["y"], drawn, config["smooth"]), X_LABELS[config["x"]], config["out"]
    figure = draw(panels, names, label)
    try:
        figure.savefig(path + ".tmp", format=Path(path).suffix[1:], dpi=110)
        os.replace(path + ".tmp", path)  # a viewer sees the old picture or the new one
    except (OSError, ValueError) as error:  # a directory, an unknown suffix
        raise UserError(f"plot: cannot write {path}: {error}") from None
    print(f"wrote {path}")


if __name__ == "__main__":
    main(configure(globals()))
