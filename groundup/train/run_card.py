"""The card of a run: out_dir/README.md says what was trained on what, how well, where, and how to do it again.

It is made from the run's settings, its log.jsonl and the corpus; nothing is measured here.
"""

import os
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from configurator import defaults_of
from groundup.train.device import hardware, versions
from groundup.train.log import read_events


def write(
    out_dir: str, script: str, config: dict, data: Iterable[str], device: torch.device, world_size: int, why: str = ""
) -> Path:
    """Write out_dir/README.md and return its path. data: lines about the data; why: what ended the run before its last
    step, if known."""
    out, name = Path(out_dir), Path(script).name
    events = read_events(out / "log.jsonl")
    launcher = f"torchrun --standalone --nproc_per_node={world_size}" if world_size > 1 else "python"
    again = f"{launcher} {name} {out}/config.py --out_dir={out}_again"  # with another out_dir the run starts anew
    parts = [f"# {out.name}: a run of {name}", summary(events, config["max_steps"], why)]
    parts += ["## Result", result_table(events)]
    parts += ["## To do it again", fenced(again)]
    parts += ["## Settings other than the defaults", settings_table(config, Path(script))]
    parts += ["## Data", fenced("\n".join(data)), "## Machine", machine(device, world_size)]
    path, tmp = out / "README.md", out / "README.md.tmp"
    try:
        tmp.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
        os.replace(tmp, path)
    except OSError as error:  # a full disk must not spoil a run that is complete
        print(f"card: cannot write {path}: {error.strerror}")
    return path


def summary(events: Sequence[dict], max_steps: int, why: str = "") -> str:
    last = max((event["step"] for event in events), default=0)
    ended = "Complete" if last == max_steps else "Ended before its last step" + (f", {why}" if why else "")
    trained = [event for event in events if event["event"] == "train"]
    tokens = f", {trained[-1]['tokens']:,} tokens" if trained and "tokens" in trained[-1] else ""
    return f"{ended}: step {last:,} of {max_steps:,}{tokens}. Written {time.strftime('%Y-%m-%d %H:%M')}."


def result_table(events: Sequence[dict]) -> str:
    """Return the figures of the first, the best and the last evaluation as a Markdown table."""
    evaluations = [event for event in events if event["event"] == "eval" and event.get("val_loss") is not None]
    if not evaluations:
        return "No evaluation was logged."
    best = min(evaluations, key=lambda event: event["val_loss"])
    columns = evaluations[0], best, evaluations[-1]
    keys = [key for key, value in columns[-1].items() if key != "event" and isinstance(value, int | float)]
    rows = [f"| {key} | " + " | ".join(figure(event.get(key)) for event in columns) + " |" for key in keys]
    return "\n".join(["| | first | best | last |", "|---|---|---|---|", *rows])


def figure(value: object) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def settings_table(config: dict, script: Path) -> str:
    usual = defaults_of(script)
    lines = [f"{key} = {value!r}" for key, value in config.items() if key in usual and value != usual[key]]
    return fenced("\n".join(lines), "python") + f"\n\nAll settings are in `config.py`; `{script.name}` explains them."


def machine(device: torch.device, world_size: int) -> str:
    ranks = f"{world_size} x " if world_size > 1 else ""
    first = f"{ranks}{hardware(device)}, {os.cpu_count()} cores, {platform.system()}"
    return first + "  \n" + ", ".join(f"{name} {version}" for name, version in versions().items())


def fenced(text: str, language: str = "text") -> str:
    return f"```{language}\n{text}\n```" if text else ""
