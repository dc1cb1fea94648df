"""Trackers: the events of log.jsonl also go to TensorBoard, trackio or wandb.

All three write to this machine only. `trackio show` and `tensorboard --logdir=out` show them here;
`wandb sync` sends them on, or WANDB_MODE=online at once.
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from configurator import defaults_of
from groundup.errors import UserError

PACKAGES = {"tensorboard": "tensorboard==2.21.0", "trackio": "trackio", "wandb": "wandb"}


def check_installed(track: str) -> None:
    """Raise UserError if the tracker's package is missing."""
    if track != "none" and importlib.util.find_spec(track) is None:
        fix = f"pip install {PACKAGES[track]}"
        raise UserError(f"config: track={track!r} needs a package; {fix}")


def open_tracker(track: str, out_dir: str, steps_done: int) -> tuple[Callable, Callable]:
    """Return (log, close) of this run's tracker: log(values, step) with numbers by name.

    A resumed run continues the tracker's run of the same out_dir."""
    if track == "none":
        return lambda values, step: None, lambda: None
    name, settings = Path(out_dir).resolve().name, Path(out_dir) / "config.py"
    config = defaults_of(settings) if settings.exists() else {}
    if track == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(out_dir, purge_step=steps_done + 1 if steps_done else None)
        return log_each(board.add_scalar), board.close
    if track == "trackio":
        import trackio

        run = trackio.init(
            project="groundup", name=name, config=config, resume="allow", embed=False
        )
    else:
        import wandb

        os.environ.setdefault("WANDB_MODE", "offline")
        run = wandb.init(project="groundup", name=name, id=name, config=config, dir=out_dir)
    return run.log, run.finish  # the run's own: a thread saves, and it has no current run


def log_each(add: Callable[[str, float, int], None]) -> Callable[[dict, int], None]:
    """Return a function that gives `add` one value after the other."""

    def log(values: dict, step: int) -> None:
        for name, value in values.items():
            add(name, value, step)

    return log
