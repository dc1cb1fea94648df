"""What a run writes about itself: lines for people, log.jsonl for programs, README.md at the end.

`RunLog` writes the first two and keeps the clock behind their times. `write_card` makes README.md
from the settings and the log: trained on what, how well, where, and how to repeat it.
"""

import importlib.util
import json
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

from configurator import defaults_of
from groundup.errors import UserError, naming
from groundup.files.untrusted import check_regular, loads
from groundup.tokens.batches import Batches
from groundup.train import ranks
from groundup.train.device import hardware, peak_memory_gib, versions

# ---- the log -------------------------------------------------------------------------------------

ALONE, CPU = ranks.World(rank=0, local_rank=0, world_size=1), torch.device("cpu")
# Every line begins with these; "tokens" is for log.jsonl only.
ALREADY_SHOWN = ("loss", "lr", "grad_norm", "tokens")


class RunLog:
    """Print lines for people and write the same values to out_dir/log.jsonl.

    Every rank makes one, for the clock; only rank 0 prints and writes. A resumed
    run drops the events after its checkpoint, because it repeats those steps.
    peak_flops: of one device. tensorboard: also write event files.
    """

    def __init__(
        self,
        out_dir: str,
        max_steps: int,
        first_step: int,
        world: ranks.World = ALONE,
        tensorboard: bool = False,
        flops_per_token: float = 0.0,
        peak_flops: float = 0.0,
        device: torch.device = CPU,
    ) -> None:
        self.enabled, self.first_step, self.max_steps = world.is_main, first_step, max_steps
        self.step = first_step
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops * world.world_size or math.inf
        self.world_size, self.device = world.world_size, device
        self.path = Path(out_dir) / "log.jsonl"
        self.lock = threading.Lock()  # the thread that saves writes too
        self.evaluations: list[dict] = []  # also those before an interruption
        self.board = None
        self.begin()
        if tensorboard and importlib.util.find_spec("tensorboard") is None:
            package = "tensorboard==2.21.0"
            raise UserError(f"config: tensorboard=True needs a package; pip install {package}")
        if not self.enabled:
            return
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(out_dir, purge_step=first_step + 1 if first_step else None)
        with naming(self.path):
            if self.path.exists():
                keep_events_until(self.path, first_step or -1)  # step 0 is evaluated again
                events = read_events(self.path)
                self.evaluations = [event for event in events if event["event"] == "eval"]
            self.file = open(self.path, "a", encoding="utf-8")
        hidden = not sys.stdout.isatty()
        self.bar = tqdm(total=max_steps, initial=first_step, disable=hidden, leave=False)

    # ---- the clock: time since the last training line, without pauses

    def begin(self) -> None:
        """Start the clock, after everything that is not training."""
        self.marked_step, self.marked_time = self.step, time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside: evaluations and saves are not training."""
        pause = time.perf_counter()
        yield
        self.marked_time += time.perf_counter() - pause

    def seconds(self) -> float:
        """Return the seconds since the last training line."""
        return time.perf_counter() - self.marked_time

    def n_steps(self) -> int:
        """Return the number of steps since the last training line."""
        return self.step - self.marked_step

    def advance(self) -> None:
        """Count a step."""
        self.step += 1
        if self.enabled:
            self.bar.update()

    # ---- events

    def train(self, step: int, values: Mapping[str, float], n_tokens: float) -> None:
        """Log a training line. Call it after an .item(), which waits for the device.

        values: loss, lr and grad_norm, then what the stage adds. A key with a slash goes to the
        file only: there may be many. n_tokens: since the last line, over all ranks.
        """
        seconds = self.seconds()
        tokens_per_s = n_tokens / seconds
        step_s = seconds / self.n_steps()
        measured = {
            "tokens_per_s": tokens_per_s,
            "mfu": tokens_per_s * self.flops_per_token / self.peak_flops,
            "memory_gib": peak_memory_gib(self.device),
        }
        event: dict[str, float] = {}
        for key, value in values.items():
            event[key] = value
            if key == "grad_norm":
                event |= measured
        self.write("train", step, event | {"step_ms": 1000 * step_s})
        parts = [
            f"loss {event['loss']:.4f}",
            f"lr {event['lr']:.2e}",
            f"norm {event['grad_norm']:.2f}",
            f"{1000 * step_s:.0f} ms",
            f"{tokens_per_s:,.0f} tok/s",
            f"mfu {100 * event['mfu']:.1f}%",
            f"{event['memory_gib']:.1f} GiB",
            f"eta {clock(step_s * (self.max_steps - step))}",
        ]
        for key, value in values.items():
            if key not in ALREADY_SHOWN and "/" not in key and value:
                parts.append(f"{key} {value:.4g}")
        self.print_line(step, parts)
        self.begin()

    def report(
        self,
        step: int,
        scores: Mapping[str, object],
        parts: Iterable[str],
        lines: Iterable[str] = (),
    ) -> None:
        """Log an evaluation: `scores` to the file; `parts` on a line for people, then `lines`."""
        self.write("eval", step, scores)
        self.print_line(step, parts)
        for line in lines:
            self.print(line)

    def write(self, event: str, step: int, values: Mapping[str, object]) -> None:
        """Append {"event", "step", **values} to log.jsonl. Any thread may call it.

        JSON has no NaN and no infinity: they become null.
        """
        if not self.enabled:
            return
        whole: dict[str, object] = {"event": event, "step": step}
        for key, value in values.items():
            lost = isinstance(value, float) and not math.isfinite(value)
            whole[key] = None if lost else value
        with self.lock:
            if event == "eval":
                self.evaluations.append(whole)
            try:
                self.file.write(json.dumps(whole) + "\n")
                self.file.flush()
                for key, value in values.items() if self.board else ():
                    if isinstance(value, int | float):
                        self.board.add_scalar(f"{event}/{key}", value, step)
            except OSError as error:  # a full disk must not end the run
                self.print(f"log: cannot write {self.path}: {error.strerror}")

    def print(self, text: str) -> None:
        """Print a line without disturbing the progress bar."""
        if self.enabled:
            tqdm.write(text)
            sys.stdout.flush()

    def print_line(self, step: int, parts: Iterable[str]) -> None:
        """Print the step, then `parts`."""
        self.print(" | ".join([f"step {step:6d}/{self.max_steps}", *parts]))

    # ---- evaluations

    def lacks_evaluation(self, eval_every: int) -> bool:
        """Return whether this step's evaluation is missing. False on ranks that do not write.

        It is missing in a new run, and after a kill between a save and its evaluation.
        """
        due = self.step % eval_every == 0 or self.step == self.max_steps
        evaluated = [event["step"] for event in self.evaluations]
        return self.enabled and due and self.step not in evaluated

    def val_losses(self) -> dict[int, float]:
        """Return {step: val_loss} of this run's evaluations. Any thread may call it."""
        return val_losses(self.evaluations)

    # ---- the end

    def finish(
        self,
        script: str,
        config: dict,
        data_lines: Iterable[str],
        next_command: str,
        stopped: bool = False,
        saved: bool = True,
    ) -> None:
        """Say how the run ended and what to do next, close the log, and write the card.

        stopped: by a signal. saved: the last save succeeded.
        """
        if not stopped and saved:
            self.print(f"saved in {self.path.parent}; next: {next_command}")
        if stopped:
            again = "the same command continues"
            if config["resume"] == "never":
                again += ", without --resume=never --overwrite=True"
            how = again if saved else "the last save failed"
            self.print(f"stopped by a signal after step {self.step}; {how}")
        self.close()
        out = self.path.parent
        if self.enabled and (self.step > self.first_step or not (out / "README.md").exists()):
            why = "stopped by a signal" if stopped else ""
            write_card(out, script, config, data_lines, self.device, self.world_size, why)

    def close(self) -> None:
        """Close the files and the progress bar."""
        if not self.enabled:
            return
        self.bar.close()
        try:
            self.file.close()
        except OSError as error:
            self.print(f"log: cannot write {self.path}: {error.strerror}")
        if self.board:
            self.board.close()


def raise_not_finite(step: int, skipped: Tensor, loss_sum: Tensor, batches: Batches) -> NoReturn:
    """Raise UserError on every rank, naming the ranks whose loss is not finite, and their samples.

    skipped: of DDP. loss_sum: this rank's loss of the step, 0-d."""
    finite = ranks.gather_objects(bool(loss_sum.isfinite()))
    bad = [rank for rank, ok in enumerate(finite) if not ok]
    what = "loss finite, gradient not"
    if bad:
        what = f"loss not finite on rank {', '.join(map(str, bad))}"
    per_rank = batches.samples_per_step // ranks.world_size()
    first = batches.position(step - 1) + (bad[0] if bad else 0) * per_rank
    samples = f"samples {first} to {first + per_rank - 1}"
    raise UserError(
        f"train: step {step}: {int(skipped[1])} steps in a row without a finite gradient; {what}; "
        f"{samples}; lower learning_rate or continue from an earlier checkpoint"
    )


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds: 3725 -> '1:02:05'."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


# ---- reading a log -------------------------------------------------------------------------------


def read_events(path: Path) -> list[dict]:
    """Return the events of a log.jsonl, without the lines that cannot be read."""
    return [event for event in map(event_of, path.read_bytes().split(b"\n")) if event]


def event_of(line: bytes) -> dict | None:
    """Return the event of a line, None if it is damaged: by a kill, a full disk, a faulty one."""
    try:
        event = loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    return event if type(event.get("step")) is int else None


def val_losses(events: Iterable[dict]) -> dict[int, float]:
    """Return {step: val_loss} of the evaluations among `events` whose loss is finite."""
    evaluations = [event for event in events if event["event"] == "eval"]
    losses = {event["step"]: event.get("val_loss") for event in evaluations}
    return {step: loss for step, loss in losses.items() if loss is not None}


def keep_events_until(path: Path, step: int) -> None:
    """Drop the events of `path` after `step`, and a last line cut short by a kill.

    Other damaged lines are reported and stay: a damaged log must not end a run.
    """
    check_regular(path)
    lines = path.read_bytes().splitlines()
    if lines and event_of(lines[-1]) is None:
        lines.pop()
    kept, damaged = [], []
    for number, line in enumerate(lines, 1):
        event = event_of(line)
        if event is None:
            damaged.append(str(number))
        if event is None or event["step"] <= step:
            kept.append(line + b"\n")
    if damaged:
        where = f"{path}:{', '.join(damaged[:5])}"
        print(f"log: {where}: {len(damaged)} lines cannot be read; they are left as they are")
    tmp = path.with_suffix(".jsonl.tmp")
    tmp.write_bytes(b"".join(kept))
    os.replace(tmp, path)


# ---- the card ------------------------------------------------------------------------------------

CARD = """\
# {run}: a run of {script}

{summary}

## Result

{result}

## To repeat it

```text
{command}
```

## Settings other than the defaults

```python
{settings}
```

All settings are in `config.py`; `{script}` explains them.

## Data

```text
{data}
```

## Machine

{machine}, {cores} cores, {system}

{versions}
"""


def write_card(
    out_dir: str | Path,
    script: str,
    config: dict,
    data_lines: Iterable[str],
    device: torch.device,
    world_size: int,
    why: str = "",
) -> Path:
    """Write out_dir/README.md and return its path. why: what ended the run early, if known."""
    out, name = Path(out_dir), Path(script).name
    events = read_events(out / "log.jsonl")
    usual = defaults_of(Path(script))
    changed = [key for key in config if key in usual and config[key] != usual[key]]
    several = world_size > 1
    launcher = f"torchrun --standalone --nproc_per_node={world_size}" if several else "python"
    text = CARD.format(
        run=out.name,
        script=name,
        summary=summary(events, config["max_steps"], why),
        result=result_table(events),
        # With another out_dir the run starts from the beginning.
        command=f"{launcher} {name} {out}/config.py --out_dir={out}_again",
        settings="\n".join(f"{key} = {config[key]!r}" for key in changed),
        data="\n".join(data_lines),
        machine=(f"{world_size} x " if several else "") + hardware(device),
        cores=os.cpu_count(),
        system=platform.system(),
        versions=", ".join(f"{package} {version}" for package, version in versions().items()),
    )
    path, tmp = out / "README.md", out / "README.md.tmp"
    try:
        tmp.write_text(text, encoding="utf-8")
        os.replace(tmp, path)
    except OSError as error:  # a full disk must not spoil a run that is complete
        print(f"card: cannot write {path}: {error.strerror}")
    return path


def summary(events: Sequence[dict], max_steps: int, why: str = "") -> str:
    """Return a sentence: how far the run came, and when."""
    last = max((event["step"] for event in events), default=0)
    ended = "Complete" if last == max_steps else "Ended before its last step"
    if why and last != max_steps:
        ended += f", {why}"
    counts = [event["tokens"] for event in events if "tokens" in event]
    tokens = f", {counts[-1]:,} tokens" if counts else ""
    written = time.strftime("%Y-%m-%d %H:%M")
    return f"{ended}: step {last:,} of {max_steps:,}{tokens}. Written {written}."


def result_table(events: Sequence[dict]) -> str:
    """Return the first, the best and the last evaluation as a Markdown table."""
    evaluations = [e for e in events if e["event"] == "eval" and e.get("val_loss") is not None]
    if not evaluations:
        return "No evaluation was logged."
    best = min(evaluations, key=lambda event: event["val_loss"])
    shown = (evaluations[0], best, evaluations[-1])
    rows = ["| | first | best | last |", "|---|---|---|---|"]
    for key, value in evaluations[-1].items():
        if isinstance(value, int | float):
            figures = " | ".join(figure(event.get(key)) for event in shown)
            rows.append(f"| {key} | {figures} |")
    return "\n".join(rows)


def figure(value: float | None) -> str:
    """Return a count with commas, or four digits of another number."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
