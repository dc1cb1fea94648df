"""Curves of training runs, from their log.jsonl: a picture, or a plot in the terminal; also while they run elsewhere.

    python tools/plot.py --runs=out/demo                                 # plot.png: loss, bits per byte, lr, ...
    python tools/plot.py --runs='out/a,out/b' --x=hours --out=two.png    # two runs in one picture
    python tools/plot.py --runs=out/dpo --y='rewards/chosen+rewards/rejected,rewards/margins' --ascii=True
    python tools/plot.py --runs=gpu1:work/out/big --ascii=True --watch=10   # over ssh, until Ctrl-C

A run is its directory or its log.jsonl, a pattern of such names, or `host:` and a name there (host: whatever ssh takes,
with a key that asks for no password). Of a log that grows only what is new is read. Steps that an interrupted run
logged and its continuation took again count once, as they came last. `+` in y puts keys into one panel, `*` stands for
any letters: --y='val_bpb/*'. A color is a run, a style of lines a key. Points are evaluations; pale lines are the
values of training, thick ones their moving average.

x: `tokens` are those in the log, else tokens per second times seconds. `hours` are those of training, without
evaluations and saves, from the speeds in the log. `flops` are model.flops_per_token for each token, with the shape in
the run's last checkpoint; what a frozen reference computes is not in it.
"""

import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from unicodedata import east_asian_width

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from curves import Curve, Log, Panel, Run, axis_of, find_logs, panels_of, parse, short_names, summary

from configurator import configure
from groundup.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---- config ---------------------------------------------------------------------------------------------------------
runs = ""  # run directories or log.jsonl files, comma-separated, also patterns and host:path; "" = the newest of out/*
out = "plot.png"  # the picture: .png, .svg or .pdf
ascii = False  # a plot in the terminal instead
x = "steps"  # steps | tokens | flops | hours
y = ""  # panels, comma-separated, keys of one panel joined by +, patterns allowed; "" = the usual, as far as logged
smooth = 0.8  # weight of the past in the moving average of training values; 0 = none
watch = 0.0  # seconds between two looks at the logs, until Ctrl-C; 0 = draw once

DASHES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (9, 4)))  # of the keys of a panel, one after another
MARKERS = "osv^Dp*"  # of evaluations, likewise
X_LABELS = {"steps": "step", "tokens": "tokens", "flops": "FLOPs", "hours": "hours of training"}


# ---- picture ---------------------------------------------------------------------------------------------------------


def draw(panels: Sequence[Panel], names: Sequence[str], x_label: str) -> "Figure":
    """The panels as a matplotlib figure, up to three beside each other, with one legend below. names: of the runs.
    Raises PlotError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("plot: a picture needs matplotlib; run: pip install matplotlib; or use --ascii=True") from None
    n_columns = min(3, max(1, len(panels)))
    n_rows = max(1, math.ceil(len(panels) / n_columns))
    keys = list(dict.fromkeys(key for panel in panels if len(panel.keys) > 1 for key in panel.keys))
    with matplotlib.rc_context({"font.family": fonts()}):
        figure = Figure(figsize=(5 * n_columns, 3.4 * n_rows), layout="constrained")
        if not panels:
            figure.text(0.5, 0.5, "nothing logged yet", ha="center", va="center")
        limits = bounds([curve.x for panel in panels for curve in panel.curves])
        for position, panel in enumerate(panels, start=1):
            axes = figure.add_subplot(n_rows, n_columns, position)
            draw_panel(axes, panel, keys, x_label)
            axes.set_xlim(limits[0] - 0.03 * (limits[1] - limits[0]), limits[1] + 0.03 * (limits[1] - limits[0]))
        draw_legend(figure, panels, names, keys)
    return figure


def draw_panel(axes: object, panel: Panel, keys: Sequence[str], x_label: str) -> None:
    """keys: those of the panels that have several, in the order of their styles."""
    from matplotlib.ticker import EngFormatter

    for curve in panel.curves:
        color = color_of(curve.run)
        number = keys.index(panel.keys[curve.key]) if len(panel.keys) > 1 else 0
        dash = DASHES[number % len(DASHES)]
        if curve.points:
            marker = MARKERS[number % len(MARKERS)]
            axes.plot(curve.x, curve.y, linestyle=dash, marker=marker, color=color, markersize=4, linewidth=1)
        elif curve.mean is None:
            axes.plot(curve.x, curve.y, linestyle=dash, color=color, linewidth=1.5)
        else:
            axes.plot(curve.x, curve.y, color=color, linewidth=0.8, alpha=0.35)
            axes.plot(curve.x, curve.mean, linestyle=dash, color=color, linewidth=1.8)
    axes.set_title(panel.title.replace("+", ", "), fontsize=10)
    axes.set_xlabel(x_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    if x_label in ("tokens", "FLOPs"):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def draw_legend(figure: "Figure", panels: Sequence[Panel], names: Sequence[str], keys: Sequence[str]) -> None:
    """One for all panels, beneath them: the color of each run, the style of each key, what has points."""
    from matplotlib.lines import Line2D

    curves = [curve for panel in panels for curve in panel.curves]
    runs = sorted({curve.run for curve in curves})
    lines = [(names[run], Line2D([], [], color=color_of(run), linewidth=4)) for run in runs]
    has_points = {curve.points for curve in curves}
    for number, key in enumerate(keys):
        marker = MARKERS[number % len(MARKERS)] if True in has_points else ""
        dash = DASHES[number % len(DASHES)]
        lines.append((key, Line2D([], [], color="black", linestyle=dash, marker=marker, markersize=4)))
    if len(has_points) == 2:
        lines.append(("training", Line2D([], [], color="gray", linewidth=1.8)))
        lines.append(("evaluation", Line2D([], [], color="gray", linewidth=1, marker="o", markersize=4)))
    if lines:
        labels, handles = zip(*lines, strict=True)
        inches = 0.8 + 0.08 * max(int(widths(label).sum()) for label in labels)  # of one entry in this size
        n_columns = max(1, min(len(labels), int(figure.get_figwidth() / inches)))
        figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(labels) / n_columns))
        figure.legend(
            handles, labels, loc="outside lower center", ncols=n_columns, fontsize=8, frameon=False, handlelength=3.5
        )


def color_of(run: int) -> str:
    return f"C{run % 10}"


def fonts() -> list[str]:
    """DejaVu, and for names of runs and sources in Chinese the first font for it that this machine has."""
    from matplotlib.font_manager import fontManager

    have = {font.name for font in fontManager.ttflist}
    chinese = ("Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "PingFang SC", "Microsoft YaHei")
    return ["DejaVu Sans", *[name for name in chinese if name in have][:1]]


def save(figure: "Figure", path: str) -> None:
    """Write the picture whole: who looks at it while it is redrawn sees the old one or the new one."""
    try:
        figure.savefig(path + ".tmp", format=Path(path).suffix[1:], dpi=110)
        os.replace(path + ".tmp", path)
    except OSError as error:
        raise UserError(f"plot: cannot write {path}: {error.strerror}") from None


# ---- terminal --------------------------------------------------------------------------------------------------------


def draw_ascii(panels: Sequence[Panel], names: Sequence[str], x_label: str, width: int, height: int) -> str:
    """The panels as text of `width` columns and, if they fit, `height` lines; 0 = 12 for each plot. Each run's key has
    its letter, small in training, a capital in evaluations. names: of the runs."""
    n_columns = min(len(panels), max(1, width // 50)) or 1
    n_rows = math.ceil(len(panels) / n_columns)
    lines_each = max(5, (height - 1) // n_rows - 4) if height and panels else 12  # beside title, x, an empty line
    limits = bounds([curve.x for panel in panels for curve in panel.curves])
    size = (max(20, width // n_columns - 2), lines_each)
    drawn = [panel_lines(panel, names, x_label, limits, *size) for panel in panels]
    lines = []
    for first in range(0, len(drawn), n_columns):
        beside = drawn[first : first + n_columns]
        lines += ["  ".join(parts).rstrip() for parts in zip(*beside, strict=True)]
    return "\n".join([*lines, "small letters: training, capitals: evaluation"] if lines else ["nothing logged yet"])


def panel_lines(
    panel: Panel, names: Sequence[str], x_label: str, limits: tuple[float, float], width: int, height: int
) -> list[str]:  # fmt: skip
    """One panel: title and legend, `height` lines of plot, the x axis, an empty line; each `width` wide."""
    plot, margin = width - 10, 9
    kept = [trimmed(curve) for curve in panel.curves]
    (left, right), (bottom, top) = limits, bounds([values for _, values in kept])
    grid = [[" "] * plot for _ in range(height)]
    for curve, (xs, ys) in zip(panel.curves, kept, strict=True):
        columns, values = on_columns(xs, ys, curve.points, left, right, plot)
        rows = np.rint((top - values) / (top - bottom) * (height - 1)).astype(int)
        for column, row in zip(columns, rows, strict=True):
            grid[row][column] = letter(curve, panel)
    legend = dict.fromkeys(f"{letter(c, panel).lower()}={called(c, panel, names)}" for c in panel.curves)
    lines = [f"{panel.title.replace('+', ', ')}  {'  '.join(legend)}"]
    labels = [f"{top:.4g}", *[""] * (height - 2), f"{bottom:.4g}"]
    for label, row in zip(labels, grid, strict=True):
        lines.append(f"{label:>{margin}}|" + "".join(row))
    lines.append(" " * margin + "+" + "-" * plot)
    begin, end = f"{left:.4g}", f"{right:.4g} {x_label}"
    lines += [" " * (margin + 1) + begin + end.rjust(plot - len(begin)), ""]
    return [fitted(line, width) for line in lines]


def fitted(line: str, width: int) -> str:
    """The line cut or filled up to `width` columns; a Chinese character takes two."""
    ends = np.cumsum(widths(line))
    n = int(np.searchsorted(ends, width, side="right"))
    return line[:n] + " " * (width - int(ends[n - 1] if n else 0))


def widths(text: str) -> np.ndarray:
    """Columns that each character takes in a terminal."""
    return np.array([1 + (east_asian_width(character) in ("W", "F")) for character in text], dtype=int)


def trimmed(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """The finite points of a curve, smoothed if it is."""
    ys = curve.y if curve.mean is None else curve.mean
    finite = np.isfinite(ys)
    return curve.x[finite], ys[finite]


def bounds(parts: Sequence[np.ndarray]) -> tuple[float, float]:
    """Least and greatest value, never the same."""
    values = np.concatenate([np.zeros(0), *parts])
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def on_columns(
    xs: np.ndarray, ys: np.ndarray, points: bool, left: float, right: float, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """(columns, values there) of a curve: points as they are, a line on every column that it crosses."""
    place = (xs - left) / (right - left) * (n - 1)
    if points or not len(xs):
        return np.rint(place).astype(int), ys
    columns = np.arange(round(place[0]), round(place[-1]) + 1)
    return columns, np.interp(columns, place, ys)


def letter(curve: Curve, panel: Panel) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return (letters.upper() if curve.points else letters)[(curve.run * len(panel.keys) + curve.key) % 26]


def called(curve: Curve, panel: Panel, names: Sequence[str]) -> str:
    """What tells a curve from the others of the panel: the run, the key or both."""
    if len(panel.keys) == 1:
        return names[curve.run]
    return f"{names[curve.run]} {panel.keys[curve.key]}" if len(names) > 1 else panel.keys[curve.key]


# ---- one look at all logs --------------------------------------------------------------------------------------------


def look(logs: Sequence[Log], names: Sequence[str], kind: str) -> tuple[list[Run], list[str], bool]:
    """The runs as they are now, or were when they could be read, a line on each and on what fails, and whether anything
    is new."""
    drawn, lines, changed = [], [], False
    for log, name in zip(logs, names, strict=True):
        try:
            changed |= log.refresh()
        except UserError as error:
            lines.append(str(error))
        if not log.seen:
            continue
        try:
            events, remarks = parse(log.text)
            drawn.append(Run(name, events, axis_of(log, events, kind)))
            lines.append(summary(name, events, remarks))
        except UserError as error:
            lines.append(str(error))
    return drawn, lines, changed


def check_config(config: dict) -> None:
    """Raise ConfigError for a value that cannot be used."""
    if config["x"] not in X_LABELS:
        raise UserError(f"config: x must be one of {', '.join(X_LABELS)}, got {config['x']!r}")
    if not 0 <= config["smooth"] < 1:
        raise UserError(f"config: smooth must be at least 0 and less than 1, got {config['smooth']}")
    if not 0 <= config["watch"] < math.inf:
        raise UserError(f"config: watch must be 0 or a number of seconds, got {config['watch']}")
    if not config["ascii"] and Path(config["out"]).suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"config: out must end in .png, .svg or .pdf, got {config['out']!r}")


def show(drawn: Sequence[Run], config: dict) -> list[str]:
    """Draw the runs: into the file, or on the terminal, which is cleared first if they are watched. Returns lines: what
    was asked for and is not there, which while a run is watched may still come (else it raises PlotError), and which
    file was written."""
    (panels, missing), x_label = panels_of(config["y"], drawn, config["smooth"]), X_LABELS[config["x"]]
    names = [run.name for run in drawn]
    if missing and not config["watch"]:
        raise UserError("\n".join(missing))
    if not config["ascii"]:
        save(draw(panels, names, x_label), config["out"])
        return [*missing, f"wrote {config['out']}"]
    size = shutil.get_terminal_size()
    height = size.lines - len(drawn) - 3 if config["watch"] else 0
    clear = "\x1b[H\x1b[2J" if config["watch"] and sys.stdout.isatty() else ""
    print(clear + draw_ascii(panels, names, x_label, size.columns, height))
    return missing


def main(config: dict) -> None:
    check_config(config)
    known: dict[str, Log] = {}
    said: list[str] = []
    while True:
        paths = find_logs(config["runs"])  # anew each time: a pattern may match more by now
        logs = [known.setdefault(path, Log(path)) for path in paths]
        drawn, lines, changed = look(logs, short_names(paths), config["x"])
        if not config["watch"] and not drawn:
            raise UserError("\n".join(lines))
        redraw = changed and bool(drawn)
        lines += show(drawn, config) if redraw else []
        for line in lines:
            if line not in said or (redraw and config["ascii"]):
                print(line, flush=True)
        said = lines
        if not config["watch"]:
            return
        time.sleep(config["watch"])


if __name__ == "__main__":
    settings = configure(globals())
    try:
        main(settings)
    except KeyboardInterrupt:  # the way to stop watching
        pass
