"""Curves of training runs, from their log.jsonl, in one picture.

    python tools/plot.py --runs=out/demo                              # plot.png
    python tools/plot.py --runs='old=out/a,new=out/b' --x=hours --out=two.png  # in one picture
    python tools/plot.py --runs=out/dpo --y='rewards/chosen+rewards/rejected,rewards/margins'
    python tools/plot.py --runs=out/mine --reference=True    # beside the nearest config's curve
    watch -n 60 python tools/plot.py --runs=out/big          # while it trains

A run is its directory or its log.jsonl, or a pattern of such names; `name=DIR` is called `name` in
the picture, others by their path. In y, `+` puts keys into one panel and `*` matches any
letters: --y='val_bpb/*'. Each run has a color, each key of a panel a line style. Markers are
evaluations; pale lines are training values, thick ones a local fit to them.
"""

import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from glob import glob
from itertools import product
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

if __name__ == "__main__":  # before the imports of packages: one that is missing is one line
    from groundup.errors import end_in_one_line

    end_in_one_line()

import curves
import numpy as np

from configurator import configure, split_names
from groundup.errors import UserError
from groundup.train.log import read_events

# ---- config ----------------------------------------------------------------------------------
runs = ""  # run directories, log.jsonl files, patterns, name=DIR; "" = newest of out/*
out = "plot.png"  # the picture: .png, .svg or .pdf
x = "steps"  # steps | tokens | hours (of training, without evaluations and saves)
y = ""  # panels, comma-separated; keys joined by + share one; patterns allowed; "" = the usual
reference = False  # also draw the curve of the nearest config (docs/curves) and compare
smooth = 0.05  # share of the values on each side that a fit uses, from 0 to 0.49; 0 = no fit

X_LABELS = {"steps": "step", "tokens": "tokens", "hours": "hours of training"}
PANELS = (
    "reward,loss+val_loss,val_bpb,val_loss/*,val_bpb/*,mean_token_accuracy,"
    "rewards/accuracies,rewards/margins,rewards/chosen+rewards/rejected,accuracy,margin,"
    "finished,length,kl_answer,entropy,grad_norm,lr,tokens_per_s"
)
# What repeats another key of the same run: rl.py's val_loss is minus the reward.
REPEATS = {"accuracy": "rewards/accuracies", "margin": "rewards/margins", "val_loss": "reward"}
TITLES = {
    "bpb": "bits per byte",
    "val_bpb/*": "bits per byte of each source",
    "val_loss/*": "validation loss of each source",
    "reward": "mean reward",
    "mean_token_accuracy": "token accuracy",
    "rewards/accuracies": "pairs whose chosen answer wins",
    "rewards/margins": "margin: reward of chosen less rejected",
    "rewards/chosen+rewards/rejected": "rewards of chosen and rejected",
    "finished": "answers that stop on their own",
    "length": "length of answers, tokens",
    "kl_answer": "KL to the reference, nats per answer",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens_per_s": "tokens per second",
}
NOT_SMOOTHED = ("lr", "tokens", "epoch")  # these have no noise
MOST_NEIGHBOURS = 200  # on each side
COLUMNS = 3  # panels side by side
LONGEST_NAME = 32  # letters of a run's name in the picture
DASHES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (9, 4)))  # of the keys of a panel
GRAYS = ("0.45", "0.7", "0.85")  # of references, which follow the runs
REFERENCE = "reference "  # how the name of a curve in docs/curves begins
MARKERS = "osv^Dp*"  # of their evaluations
# Fonts with Chinese characters, by their names and by their files' names.
CHINESE_FONTS = re.compile(
    "CJK|Source ?Han|WenQuanYi|wqy|PingFang|YaHei|msyh|Sim(Hei|Sun)|Heiti|Hiragino"
    "|Droid ?Sans ?Fallback",
    re.IGNORECASE,
)


class Run(NamedTuple):
    name: str
    events: list[dict]  # "train" and "eval": "event" and numbers, x among them


class Curve(NamedTuple):
    run: int  # index of the run
    key: int  # index of the panel's key; a training key and its evaluation (loss, val_loss) are one
    points: bool  # evaluations, few
    x: np.ndarray
    y: np.ndarray
    smoothed: np.ndarray  # y, if nothing is smoothed


class Panel(NamedTuple):
    title: str
    keys: list[str]  # as the legend names them
    curves: list[Curve]


# ---- logs ----------------------------------------------------------------------------------------


def find_logs(runs: str) -> dict[str, str]:
    """Return {log file: name of the run}, which is given or its path. Raise UserError if there is
    none.
    """
    found = {}
    if not runs:
        logs = filter(os.path.exists, glob("out/*/log.jsonl"))  # not a link to nowhere
        found = {log: path_of(log) for log in sorted(logs, key=os.path.getmtime)[-1:]}
    for part in filter(None, split_names(runs)):
        name, equals, path = map(str.strip, part.partition("="))
        if not equals or "/" in name or glob(part):  # "=" belongs to the path: out/lr=0.1
            name, path = "", part
        log = path if path.endswith(".jsonl") else path.rstrip("/") + "/log.jsonl"
        logs = [log] if os.path.exists(log) else sorted(glob(log, recursive=True))
        if not logs:
            raise UserError(f"plot: no log matches {log!r}; check --runs")
        if name and (logs[1:] or name in found.values()):
            raise UserError(f"plot: several runs are called {name!r}; give each its own name")
        found |= {log: name or found.get(log) or path_of(log) for log in logs}
    if not found:
        raise UserError("plot: no out/*/log.jsonl here; give --runs=DIR")
    return found


def path_of(log: str) -> str:
    return log.removesuffix("/log.jsonl").removesuffix(".jsonl")


def shortened(name: str) -> str:
    """Return a name that fits into a legend: the middle of a long one is left out."""
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[: half - 2]}...{name[1 - half :]}"


def without_repeats(events: Sequence[dict]) -> list[dict]:
    """Return the "train" and "eval" events, steps ascending. A run that was killed repeats the
    steps after its checkpoint: an event replaces all at its place or later. At one step, training
    comes before the evaluation.
    """

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
    """Return x of each event, of evaluations interpolated. Raise UserError if the log has no
    step_ms, tokens_per_s.
    """
    at = np.array([event["step"] for event in events], dtype=np.float64)
    if kind == "steps":
        return at
    # what had passed at each logged step; an evaluation lies between two of them
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
        found = {"event": event["event"], "x": x}
        for key, value in event.items():
            if value is None:
                found[key] = math.nan
            elif type(value) in (int, float):
                found[key] = float(value)
        kept.append(found)
    return Run(name, kept)


def local_fit(values: np.ndarray, share: float) -> np.ndarray:
    """Return for each value that of a straight line through it and its neighbours.

    share: of the values, on each side; the nearer count more. An average would lie above a falling
    loss at its beginning and its end. NaN stays NaN and counts nowhere."""
    reach = min(int(share * len(values)), MOST_NEIGHBOURS)
    if reach == 0:
        return values
    distance = np.arange(-reach, reach + 1)
    weight = 1 - np.abs(distance) / (reach + 1)
    known = ~np.isnan(values)

    def around(terms: np.ndarray, power: int) -> np.ndarray:
        """Return the weighted sum of terms * distance^power around each place."""
        return np.convolve(terms, (weight * distance**power)[::-1], "same")

    # Least squares: the line's value at distance 0.
    n, d, dd = (around(known, power) for power in (0, 1, 2))
    y, dy = (around(np.nan_to_num(values), power) for power in (0, 1))
    spread = n * dd - d * d  # 0 where a value has no neighbour
    fit = np.where(spread > 1e-9, (dd * y - d * dy) / np.maximum(spread, 1e-9), values)
    return np.where(known, fit, np.nan)


# ---- panels ----------------------------------------------------------------------------------


def panels_of(y: str, runs: Sequence[Run], smooth: float) -> list[Panel]:
    """Return the panels in the order of `y`. Raise UserError for one of `y` that no log has."""
    logged = dict.fromkeys(key for run in runs for event in run.events for key in event)
    keys, panels = [key for key in logged if key not in ("event", "x")], []
    for title in filter(None, map(str.strip, (y or PANELS).split(","))):
        patterns = [pattern.strip() for pattern in title.split("+")]
        chosen = [key for pattern in patterns for key in keys if fnmatchcase(key, pattern)]
        panel = panel_of(title, list(dict.fromkeys(chosen)), runs, smooth, {} if y else REPEATS)
        if panel.curves:
            panels.append(panel)
        elif y and keys:
            raise UserError(f"plot: no log has {title!r}; they have {', '.join(sorted(keys))}")
    return panels


def panel_of(
    title: str, keys: Sequence[str], runs: Sequence[Run], smooth: float, repeats: dict[str, str]
) -> Panel:
    """Return the curves of these keys, but for those that repeat another of the same run.

    Keys of one group, rewards/chosen and rewards/rejected, lose their prefix."""
    curves, bases = [], list(dict.fromkeys(key.removeprefix("val_") for key in keys))
    for which, run in enumerate(runs):
        for key, kind in product(keys, ("train", "eval")):
            events = [event for event in run.events if event["event"] == kind]
            is_repeated = any(repeats.get(key) in event for event in events)
            points = [(event["x"], event[key]) for event in events if key in event]
            if points and not is_repeated:
                index = bases.index(key.removeprefix("val_"))
                at, values = np.array(points, dtype=np.float64).T
                noisy = kind == "train" and key not in NOT_SMOOTHED
                fitted = local_fit(values, smooth) if noisy else values
                curves.append(Curve(which, index, kind == "eval", at, values, fitted))
    # rewards/chosen and rewards/rejected: the title has "rewards", the legend the rest
    one_group = len(bases) > 1 and len({base.rpartition("/")[0] for base in bases}) == 1
    names = [base.rpartition("/")[2] for base in bases] if one_group else bases
    return Panel(title if len(bases) > 1 else names[0] if names else "", names, curves)


# ---- the picture -----------------------------------------------------------------------------


def chinese_font() -> str:
    """Return the name of an installed font with Chinese characters; "" if there is none."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    known = {font.fname for font in fontManager.ttflist}
    for path in findSystemFonts():  # some are newer than matplotlib's list
        if path not in known and CHINESE_FONTS.search(Path(path).name):
            fontManager.addfont(path)
    # A font of one weight draws bold as normal, which needs no warning for each text.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    names = {font.name for font in fontManager.ttflist if CHINESE_FONTS.search(font.name)}
    return min(names, key=lambda name: ("SC" not in name, "Sans" not in name, name), default="")


def fonts_for(text: str) -> tuple[list[str], str]:
    """Return the fonts for a picture with this text, and what to say if one is missing, else ""."""
    latin = "DejaVu Sans"  # matplotlib brings it
    if not re.search(r"[\u2e80-\uffef]", text):
        return [latin], ""
    if font := chinese_font():
        return [latin, font], ""
    # a box is drawn for each character, which needs no warning each
    warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
    return [latin], "no font for Chinese names: apt install fonts-noto-cjk"


def draw(panels: Sequence[Panel], names: Sequence[str], x_label: str) -> "Figure":  # noqa: F821
    """Return the panels as a figure of matplotlib, COLUMNS in a row. names: of the runs."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError:
        raise UserError("plot: a picture needs matplotlib; run: pip install matplotlib") from None
    n_columns = min(COLUMNS, max(1, len(panels)))
    n_rows = max(1, math.ceil(len(panels) / n_columns))
    short = list(map(shortened, names))
    names = short if len({*short}) == len({*names}) else names
    keys = [key for panel in panels for key in panel.keys]
    fonts, lack = fonts_for("".join([*names, *keys]))
    if lack:
        print(f"plot: {lack}")
    with matplotlib.rc_context({"font.family": fonts}):
        figure = Figure(figsize=(5 * n_columns, 3.4 * n_rows), layout="constrained")
        if not panels:
            figure.text(0.5, 0.5, "nothing is logged yet", ha="center")
        if len(names) == 1:
            figure.suptitle(lack or names[0])
        else:
            legend_of_runs(figure, names, lack, n_columns)
        # the same x in all panels, so that they can be read across
        right = max((curve.x.max() for panel in panels for curve in panel.curves), default=1.0)
        for position, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(n_rows, n_columns, position)
            axes.set_xlabel(x_label, fontsize=9)
            axes.set_xlim(-0.03 * right, 1.03 * right + 1e-9)
            axes.xaxis.get_major_locator().set_params(integer=x_label == X_LABELS["steps"])
            if x_label == X_LABELS["tokens"]:  # 20M: labels of all digits touch each other
                axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            draw_panel(axes, panel, names)
    return figure


def legend_of_runs(
    figure: "Figure",  # noqa: F821
    names: Sequence[str],
    heading: str,
    n_columns: int,
) -> None:
    """Put one legend above all panels: in each of them it would hide curves."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **color_of(i, name)) for i, name in enumerate(names)]
    where = {"loc": "outside upper center", "ncols": 2 * n_columns, "fontsize": 8}
    figure.legend(lines, names, title=heading, **where)


def draw_panel(axes: "Axes", panel: Panel, names: Sequence[str]) -> None:  # noqa: F821
    labels = set()  # of several runs only the first is in the legend: the others look the same
    for curve in panel.curves:
        label = label_of(curve, panel)
        draw_curve(axes, curve, names[curve.run], "" if label in labels else label)
        labels.add(label)
    axes.set_title(TITLES.get(panel.title, panel.title.replace("+", ", ")), fontsize=10)
    values = np.concatenate([curve.y[np.isfinite(curve.y)] for curve in panel.curves])
    if not values.size:
        axes.text(0.5, 0.5, "never finite", ha="center", transform=axes.transAxes)
    if values.any() and np.ptp(values) == 0:  # flat: from 0, not a window around it
        axes.set_ylim(*sorted([0, 1.1 * values[0]]))
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=7)


def label_of(curve: Curve, panel: Panel) -> str:
    """Return what the panel's legend says of a curve: only what tells it from the run's others."""
    parts = [panel.keys[curve.key]] if len(panel.keys) > 1 else []
    if any(other.points != curve.points for other in panel.curves):
        parts.append("validation" if curve.points else "training")
    return " ".join(parts)


def color_of(run: int, name: str) -> dict[str, object]:
    """Return the color of a run, and its place: a reference is gray and behind the others."""
    behind = name.startswith(REFERENCE)
    color = GRAYS[run % len(GRAYS)] if behind else f"C{run % 10}"
    return {"color": color, "zorder": 1 if behind else 2}


def draw_curve(axes: "Axes", curve: Curve, name: str, label: str) -> None:  # noqa: F821
    """Draw the values, and a thick line of what is smoothed."""
    color = color_of(curve.run, name)
    style = color | {"linestyle": DASHES[curve.key % len(DASHES)], "linewidth": 1.6}
    if curve.points:
        style |= {"marker": MARKERS[curve.key % len(MARKERS)], "markersize": 4, "linewidth": 1}
    elif curve.smoothed is not curve.y:
        axes.plot(curve.x, curve.y, color=color["color"], linewidth=0.8, alpha=0.35)
    axes.plot(curve.x, curve.smoothed, label=label, **style)
    # a line needs two values in a row: mark those that stand alone
    known = np.isfinite(np.pad(curve.smoothed, 1, constant_values=math.nan))
    alone = known[1:-1] & ~known[:-2] & ~known[2:]
    if alone.any() and not curve.points:
        axes.plot(curve.x[alone], curve.smoothed[alone], ".", **color)


def references(logs: Iterable[str]) -> list[tuple[str, list[dict]]]:
    """Print how each run compares with its reference; return [(name, events)] of these, each
    once.
    """
    found = {}
    for log in logs:
        directory = Path(log).parent
        beside = curves.reference_of(directory)
        said = curves.compare(without_repeats(read_events(Path(log))), beside)
        print(f"{directory}:", *said, sep="\n")
        found[REFERENCE + beside.name] = beside.events
    return list(found.items())


def main(config: dict) -> None:
    x, path, share = config["x"], config["out"], config["smooth"]
    logs = find_logs(config["runs"])
    found = [(name, read_events(Path(log))) for log, name in logs.items()]
    if config["reference"]:
        found += references(logs)
    drawn = [run_of(name, events, x) for name, events in found]
    panels, names = panels_of(config["y"], drawn, share), [run.name for run in drawn]
    figure = draw(panels, names, X_LABELS[x])
    try:
        figure.savefig(path + ".tmp", format=Path(path).suffix[1:], dpi=110)
        os.replace(path + ".tmp", path)  # a viewer sees the old picture or the new one
    except (OSError, ValueError) as error:  # a directory, an unknown suffix
        raise UserError(f"plot: cannot write {path}: {error}") from None
    print(f"wrote {path}")


if __name__ == "__main__":
    main(configure(globals()))
