"""The log of a run: lines for people, out_dir/log.jsonl for programs."""

import importlib.util
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tqdm import tqdm

from groundup.errors import UserError, naming
from groundup.files.untrusted import check_regular, loads


class RunLog:
    """Print a line for people and write an object to out_dir/log.jsonl, from one dict of values. Only rank 0 writes.

    A resumed run drops events after its checkpoint: it runs those steps again. tensorboard: also write event files.
    """

    def __init__(
        self, out_dir: str, max_steps: int, start_step: int, enabled: bool, tensorboard: bool = False
    ) -> None:  # fmt: skip
        self.enabled, self.max_steps, self.board = enabled, max_steps, None
        self.first_step = self.step = start_step
        if not enabled:
            return
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(out_dir, purge_step=start_step + 1 if start_step else None)
        self.path = Path(out_dir) / "log.jsonl"
        if self.path.exists():
            check_regular(self.path)
        with naming(self.path):
            keep_events_until(self.path, start_step or -1)  # a fresh run evaluates at step 0 again
            self.file = open(self.path, "a", encoding="utf-8")
        self.bar = tqdm(total=max_steps, initial=start_step, disable=not sys.stdout.isatty(), leave=False, unit="step")

    def advance(self) -> None:
        self.step += 1
        if self.enabled:
            self.bar.update()

    def write(self, event: str, step: int, values: Mapping[str, object]) -> None:
        """Append {"event", "step", **values} to log.jsonl. JSON has no NaN and no infinity: they become null."""
        if self.enabled:
            values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            try:
                self.file.write(json.dumps({"event": event, "step": step, **values}) + "\n")
                self.file.flush()
                for key, value in values.items() if self.board else ():
                    if isinstance(value, int | float):
                        self.board.add_scalar(f"{event}/{key}", value, step)
            except OSError as error:  # a full disk must not end the run
                self.print(f"log: cannot write {self.path}: {error.strerror}")

    def report(self, step: int, scores: Mapping[str, object], parts: Iterable[str], lines: Iterable[str] = ()) -> None:
        """Log an evaluation: `scores` to the file; `parts` on a line for people, then `lines`."""
        self.write("eval", step, scores)
        self.print("\n".join([" | ".join([f"step {step:6d}/{self.max_steps}", *parts]), *lines]))

    def since_best(self) -> int:
        """Return the number of evaluations since the one with the lowest val_loss, also before an interruption; 0 on
        other ranks than the first. A loss that is not finite is never the lowest."""
        if not self.enabled:
            return 0
        events = [event for event in read_events(self.path) if event["event"] == "eval"]
        found = [math.inf if event["val_loss"] is None else event["val_loss"] for event in events]
        return len(found) - 1 - found.index(min(found)) if found else 0

    def lacks_evaluation(self, eval_every: int) -> bool:
        """Return whether the evaluation of this step is missing: of a new run, or of one interrupted between checkpoint
        and evaluation. False on other ranks than the first."""
        due = self.step == 0 or self.step % eval_every == 0 or self.step == self.max_steps
        events = read_events(self.path) if self.enabled and due else []
        return self.enabled and due and not any(e["event"] == "eval" and e["step"] == self.step for e in events)

    def print(self, text: str) -> None:
        if self.enabled:
            tqdm.write(text)
            sys.stdout.flush()

    def train(self, step: int, values: Mapping[str, float], step_s: float) -> None:
        """Log a training line. `values` has the keys of `named`; others are printed last, if not 0. A key with a slash
        (tokens/source) goes to the file only: there may be many."""
        self.write("train", step, values | {"step_ms": 1000 * step_s})
        named = ("loss", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", "memory_gib")
        eta = clock(step_s * (self.max_steps - step))
        parts = [
            f"step {step:6d}/{self.max_steps}", f"loss {values['loss']:.4f}", f"lr {values['lr']:.2e}",
            f"norm {values['grad_norm']:.2f}", f"{1000 * step_s:.0f} ms", f"{values['tokens_per_s']:,.0f} tok/s",
            f"mfu {100 * values['mfu']:.1f}%", f"{values['memory_gib']:.1f} GiB", f"eta {eta}",
        ]  # fmt: skip
        others = [key for key in values if key not in named and "/" not in key]
        parts += [f"{key} {values[key]:.4g}" for key in others if values[key]]
        self.print(" | ".join(parts))

    def close(self) -> None:
        if self.enabled:
            self.bar.close()
            try:
                self.file.close()
            except OSError as error:
                self.print(f"log: cannot write {self.path}: {error.strerror}")
            if self.board:
                self.board.close()


def check_tensorboard(wanted: bool) -> None:
    """Raise UserError if event files are wanted but the package is missing."""
    if wanted and importlib.util.find_spec("tensorboard") is None:
        raise UserError("config: tensorboard=True needs a package; pip install tensorboard==2.21.0")


def read_events(path: Path) -> list[dict]:
    """Return the events of a log.jsonl, without the lines that cannot be read."""
    return [event for event in map(event_of, path.read_bytes().split(b"\n")) if event]


def event_of(line: bytes) -> dict | None:
    """Return the event of a line, None if a kill, a full disk or a faulty one has damaged it."""
    try:
        event = loads(line)
    except ValueError:
        return None
    right = isinstance(event, dict) and isinstance(event.get("event"), str) and type(event.get("step")) is int
    return event if right else None


def keep_events_until(path: Path, step: int) -> None:
    """Drop the events of `path` after `step`, and a last line that a kill cut short. Other lines that cannot be read
    are reported and stay: a damaged log is no reason to lose a run."""
    if not path.exists():
        return
    *lines, last = path.read_bytes().split(b"\n")
    events = [event_of(line) for line in lines]
    kept = [line for line, event in zip(lines, events, strict=True) if not event or event["step"] <= step]
    if (event := event_of(last)) and event["step"] <= step:
        kept.append(last)
    if bad := [str(number) for number, event in enumerate(events, 1) if not event]:
        print(f"log: {path}:{', '.join(bad[:5])}: {len(bad)} lines cannot be read; they are left as they are")
    tmp = path.with_suffix(".jsonl.tmp")
    tmp.write_bytes(b"".join(line + b"\n" for line in kept))
    os.replace(tmp, path)


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds: 3725 -> '1:02:05'."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
