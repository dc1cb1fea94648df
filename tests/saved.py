"""save(out_dir, step, model, tokenizer): a checkpoint as a trainer would save it, without training.

What is not a weight is made up: the optimizer's state is one tensor that tells the step.
"""

from pathlib import Path
from types import SimpleNamespace

import torch

from groundup.align import reward_model
from groundup.errors import UserError
from groundup.train import checkpoint, ranks
from groundup.train.checkpoint import Saver
from groundup.train.log import RunLog
from model import Transformer
from tokenizer import Tokenizer

CONFIG = {
    "zero1": False, "timeout_s": 60.0, "init_from": "", "trainable": "all", "resume": "auto", "resume_from": 0,
    "overwrite": False, "max_steps": 10**6, "schedule": "constant", "learning_rate": 1.0, "warmup_steps": 0,
}  # fmt: skip


class Log(RunLog):
    """A RunLog that keeps what it would print."""

    def __init__(self, out_dir: Path, first_step: int, max_steps: int) -> None:
        self.lines: list[str] = []
        world = ranks.World(ranks.rank(), ranks.rank(), ranks.world_size())
        super().__init__(str(out_dir), max_steps, first_step, world)

    def print(self, text: str) -> None:
        self.lines.append(text)


def open_saver(
    out_dir: Path, tokenizer: Tokenizer, keep_last: int = 0, first_step: int = 0, **changes
) -> Saver:
    """A Saver in out_dir, which is made and locked as `checkpoint.start` does."""
    if ranks.rank() == 0:
        out_dir.mkdir(parents=True, exist_ok=True)
        checkpoint.lock(out_dir)
    ranks.barrier()
    config = CONFIG | {"out_dir": str(out_dir)} | changes.pop("config", {})
    log = Log(out_dir, first_step, config["max_steps"])
    return Saver(out_dir, keep_last, tokenizer, log, config, {}, **changes)


def training(step: int, state: dict | None = None) -> tuple:
    """(ddp, opt, scaler) of a run that stands at `step`."""
    ddp = SimpleNamespace(n_updates=step, skipped=torch.zeros(2))
    moments = {"w": {"moments": torch.full((3,), float(step))}} if state is None else state
    opt = SimpleNamespace(state_dict=lambda gather=None, keep=True: moments)
    return ddp, opt, torch.amp.GradScaler("cpu", enabled=False)


def save(
    out_dir: Path, step: int, model: Transformer, tokenizer: Tokenizer, val_loss: float | None = None,
    keep_last: int = 0, other: dict | None = None, **changes,
) -> Path:  # fmt: skip
    """Save one checkpoint of a run that resumed from the newest step before it, then evaluate it if it has a
    val_loss; return its path. Raise UserError with what the log says if it could not be saved."""
    earlier = [
        checkpoint.step_of(path)
        for path in checkpoint.step_dirs(out_dir)
        if checkpoint.step_of(path) < step
    ]
    saver = open_saver(out_dir, tokenizer, keep_last, max(earlier, default=0), **changes)
    saver.save(step, model, *training(step), extra={"warmup_steps": 0} | (other or {}))
    if val_loss is not None:
        saver.wait()
        saver.log.write("eval", step, {"val_loss": val_loss})
        saver.tidy()
    saver.close()
    saver.log.close()
    if not saver.saved:
        raise UserError("".join(saver.log.lines) or "another rank failed")
    return out_dir / f"step_{step:06d}"


def load_train_state(step_dir: Path, rank: int = 0) -> tuple[dict, dict]:
    """The training state of a checkpoint, and that of one rank ({} for a rank that the run did not have)."""
    own = step_dir / checkpoint.rank_file(rank)
    state = checkpoint.read_state(step_dir / "train_state.pt")
    return state, checkpoint.read_state(own) if own.exists() else {}


def score_talks(model, tokenizer, talks: list[list[dict]]) -> list[float]:
    """The reward of the answer that each conversation ends with."""
    rows = [reward_model.answered_ids(talk, tokenizer) for talk in talks]
    return reward_model.score_ids(model, rows)
