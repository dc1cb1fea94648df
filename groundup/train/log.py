"""What a run writes about itself: lines for people, log.jsonl for programs, README.md at the end.

`RunLog` writes all three and keeps the clock behind their times. With the setting `track` the
events also go to TensorBoard, trackio or wandb, which write to this machine only. `trackio show`
and `tensorboard --logdir=out` show them here; `wandb sync` sends them on, or WANDB_MODE=online at
once.
"""

import importlib.util
import json
import math
import os
import shlex
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor
from tqdm import tqdm

from configurator import defaults_of
from groundup.errors import UserError, counted, discard, listed, naming
from groundup.files.untrusted import check_regular, loads
from groundup.tokens.batches import Batches, Corpus
from groundup.train import ranks
from groundup.train.checkpoint import BEST, Saver, made_by_a_run, step_of, step_path
from groundup.train.config_json import is_edited
from groundup.train.device import hardware, peak_memory_gib, versions

# ---- the log -------------------------------------------------------------------------------------

ALONE, CPU = ranks.World(rank=0, local_rank=0, world_size=1), torch.device("cpu")
SLOW_STEP_S = 10  # seconds
MAX_SKIPPED = 20  # stop at a log line if this many updates in a row had no finite gradient
# Settings that say how a run starts or where it lies, not how it trains.
OF_A_START = ("resume", "resume_from", "overwrite", "out_dir")
# Settings that decide what val_loss is: its data, and the losses of dpo.py, reward.py and rl.py
OF_VAL_LOSS = {"val_data", "loss", "beta", "gamma", "label_smoothing", "desirable_weight"}
OF_VAL_LOSS |= {"nll_weight", "margin_scale", "center", "unfinished", "unfinished_reward"}
# Metrics of pairs in an evaluation, as people read them
BETTER_IF_HIGHER = {"accuracy": "accuracy"}  # of reward.py
BETTER_IF_HIGHER |= {"rewards/accuracies": "accuracy", "rewards/margins": "margin"}  # of dpo.py
# Every line begins with the first three; "tokens", without padding, is for log.jsonl only.
ALREADY_SHOWN = ("loss", "lr", "grad_norm", "tokens")


class RunLog:
    """Print lines for people and write the same values to out_dir/log.jsonl.

    peak_flops: FLOP/s of one device, 0 = unknown. track: a tracker that gets the values too."""

    def __init__(
        self,
        out_dir: str,
        max_steps: int,
        steps_done: int,
        world: ranks.World = ALONE,
        track: str = "none",
        flops_per_token: float = 0.0,
        peak_flops: float = 0.0,
        device: torch.device = CPU,
    ) -> None:
        # Every rank has a clock, for what trainers compute from it; only rank 0 prints and writes.
        self.enabled, self.world_size, self.device = world.is_main, world.world_size, device
        self.unread: list[TextIO] = []  # standard output or error, if its reader has ended
        self.steps_done, self.max_steps, self.step = steps_done, max_steps, steps_done
        self.n_skipped = 0  # updates, from the beginning of the run
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops * world.world_size  # of all ranks; 0 = no mfu is shown
        self.path = Path(out_dir) / "log.jsonl"
        self.lock = threading.Lock()  # the thread that saves writes too
        self.evaluations: list[dict] = []  # also those before an interruption
        # How many of them, the first ones, measured another val_loss: see `comparable`
        self.n_incomparable = 0
        self.restart_clock()
        check_installed(track)  # by all ranks, so that all of them end
        if self.enabled:
            self.to_tracker, self.close_tracker = open_tracker(track, out_dir, steps_done)
            with naming(self.path):
                self._open()
            # disable=None: no progress bar in a file
            self.bar = tqdm(total=max_steps, initial=steps_done, disable=None, leave=False)

    def _open(self) -> None:
        """Open log.jsonl. A resumed run repeats the steps after its checkpoint: their events go."""
        events = []
        if self.path.exists():
            # a new run keeps none of them: it evaluates step 0 again
            drop_events_after(self.path, self.steps_done or -1)
            events = read_events(self.path)
        self.evaluations = [event for event in events if event["event"] == "eval"]
        self.n_incomparable = len(self.evaluations) - len(comparable(events))
        self.file = open(self.path, "a", encoding="utf-8")

        # The checkpoint has a directory, but no event if a kill came between the two.
        saved = step_path(self.path.parent, self.steps_done)
        known = [event["step"] for event in events if event["event"] == "save"]
        if saved.is_dir() and self.steps_done not in known:
            last = max((event["step"] for event in events), default="none")
            lacks = f"log: {self.path} lacks the save of step {self.steps_done}"
            print(f"{lacks}: cut, or the run was killed there; its last step is {last}")
            self.write("save", self.steps_done, {"path": str(saved)})

    # ---- the clock: time since the last training line, without pauses

    def restart_clock(self) -> None:
        """Count the steps and the time of the next training line from now on."""
        self.marked_step, self.marked_time = self.step, time.perf_counter()  # seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside: evaluations and saves are not training."""
        pause = time.perf_counter()
        yield
        self.marked_time += time.perf_counter() - pause  # as if the line had come later

    def seconds(self) -> float:
        """Return the seconds since the last training line."""
        return time.perf_counter() - self.marked_time

    def steps_since_line(self) -> int:
        """Return the number of steps since the last training line."""
        return self.step - self.marked_step

    def advance(self) -> None:
        """Count a step."""
        self.step += 1
        if self.enabled:
            self.bar.update()
        # The first training line may be minutes away: say that the run goes on.
        if self.step == self.steps_done + 1 and self.seconds() > SLOW_STEP_S:
            self.print_line(self.step, [f"the first step took {self.seconds():.0f} s"])

    # ---- events

    def train(self, step: int, values: dict[str, float], n_tokens: float) -> None:
        """Log a training line. values: loss, lr and grad_norm, then what the stage adds.

        n_tokens: since the last line, over all ranks, without padding."""
        # The caller's .item() has waited for the device, so the time is right.
        self.n_skipped = int(values.get("skipped", 0))
        seconds = self.seconds()
        step_s, tokens_per_s = seconds / self.steps_since_line(), n_tokens / seconds
        # For programs: the caller's values, then what the clock tells.
        event = values | {"tokens_per_s": tokens_per_s}
        # Model FLOPs utilisation, the share of the peak that training uses.
        mfu = ""
        if self.peak_flops:
            event["mfu"] = tokens_per_s * self.flops_per_token / self.peak_flops
            mfu = f" | mfu {100 * event['mfu']:.1f}%"
        event |= {"memory_gib": peak_memory_gib(self.device), "step_ms": 1000 * step_s}
        self.write("train", step, event)

        # For people: what is watched most comes first.
        parts = [
            f"loss {event['loss']:.4f} | lr {event['lr']:.2e} | norm {event['grad_norm']:.2f}",
            f"{1000 * step_s:.0f} ms | {tokens_per_s:,.0f} tok/s{mfu}",
            f"{event['memory_gib']:.1f} GiB | eta {clock(step_s * (self.max_steps - step))}",
        ]
        # The stage's own values; most often no step was skipped. Of keys with a slash there may be
        # many, so they go to the file only.
        for key, value in values.items():
            if (
                key not in ALREADY_SHOWN
                and "/" not in key
                and (value or not key.endswith("skipped"))
            ):
                parts.append(f"{key} {value:.4g}")
        self.print_line(step, parts)
        self.restart_clock()

    def report(self, step: int, scores: Mapping, shown: str, lines: Iterable[str] = ()) -> None:
        """Log an evaluation: `scores` to the file; `shown` on a line for people, then `lines`.

        The line also has the loss of each source, if there are several, and its bits per byte."""
        self.write("eval", step, scores)
        parts = [shown]
        for name in (key.partition("/")[2] for key in scores if key.startswith("val_loss/")):
            keys = [f"{key}/{name}" for key in ("val_loss", "val_bpb")]
            parts.append(f"{name} " + ", ".join(f"{scores[k]:.4f}" for k in keys if k in scores))
        self.print_line(step, parts)
        for line in lines:
            self.print(f"    {line}")

    def note_changes(self, state: Mapping) -> None:
        """Log the settings that a run which continues has changed. state: of `checkpoint.find`."""
        changes = {
            key: both for key, both in state.get("changed", {}).items() if key not in OF_A_START
        }
        # A run that is complete trains no step with them.
        if changes and self.steps_done < self.max_steps:
            self.write("continue", self.steps_done, {"changes": changes})
            if changed := sorted(OF_VAL_LOSS & changes.keys()):
                text = f"val_loss is another measure with this {listed(changed)}: best and best2"
                self.print(f"log: {text} are among the evaluations from step {self.steps_done} on")

    def write(self, event: str, step: int, values: Mapping[str, object]) -> None:
        """Append {"event", "step", **values} to log.jsonl. Any thread may call it."""
        if not self.enabled:
            return
        values = {key: v.item() if isinstance(v, Tensor) else v for key, v in values.items()}
        whole: dict[str, object] = {"event": event, "step": step}
        for key, value in values.items():
            # JSON has no NaN and no infinity: they become null.
            lost = isinstance(value, float) and not math.isfinite(value)
            whole[key] = None if lost else value

        # Flushed at once, so that a kill loses no line.
        with self.lock, warn_if_unwritable(self.path):
            if event == "eval":
                self.evaluations.append(whole)
            if changes_val_loss(whole):
                self.n_incomparable = len(self.evaluations)
            if event == "save":  # a resume tells whether the log up to here has changed
                lines = self.path.read_bytes().split(b"\n")[:-1]
                whole["crc32"] = save_sum(whole, lines)
            self.file.write(json.dumps(whole) + "\n")
            self.file.flush()
            # A tracker draws curves, so it gets no texts.
            numbers = {k: value for k, value in values.items() if isinstance(value, int | float)}
            if numbers:
                self.to_tracker({f"{event}/{key}": value for key, value in numbers.items()}, step)

    def print(self, text: str) -> None:
        """Print a line without disturbing the progress bar."""
        if not self.enabled:
            return
        # On standard output, as long as somebody reads it or its file has room.
        for stream in (sys.stdout, sys.stderr):
            if stream in self.unread:
                continue
            try:
                tqdm.write(text, file=stream)
                stream.flush()
                return
            except OSError:
                # Ctrl-C also ends a `| tee` behind the run. The run must save all the same.
                discard(stream)
                self.unread.append(stream)

    def print_line(self, step: int, parts: Iterable[str]) -> None:
        """Print the step, then `parts`."""
        self.print(" | ".join([f"step {step:6d}/{self.max_steps}", *parts]))

    # ---- evaluations

    def lacks_evaluation(self, eval_every: int) -> bool:
        """Return whether this step's evaluation is missing. False on ranks that do not write."""
        # It is in a new run, after a kill between a save and its evaluation, and where val_loss means
        # something else than before.
        due = self.step % eval_every == 0 or self.step == self.max_steps
        evaluated = [event["step"] for event in self.evaluations[self.n_incomparable :]]
        return self.enabled and due and self.step not in evaluated

    def val_losses(self) -> dict[int, float]:
        """Return {step: val_loss} of the evaluations with a finite loss. Any thread may call it.

        It is inf for those that measured another val_loss, as soon as there is one of now: `best`
        must not be one of them."""
        # A loss that is not finite is null in the log.
        found = [event for event in self.evaluations if event.get("val_loss") is not None]
        losses = {event["step"]: event["val_loss"] for event in found}
        now = self.evaluations[self.n_incomparable :]
        if now:
            losses = dict.fromkeys(losses, math.inf)
        return losses | {e["step"]: e["val_loss"] for e in now if e.get("val_loss") is not None}

    # ---- the end

    def finish(
        self,
        script: str,
        config: dict,
        corpus: Corpus,
        stopped: bool,
        saved: bool,
        next_command: str = "python sample.py",
    ) -> None:
        """Say how the run ended and what to do next, close the log, and write the card.

        stopped: by a signal. saved: the last save succeeded. next_command: without --init_from."""
        out = self.path.parent
        # 1. Anything to worry about?
        if self.n_skipped:
            text = f"{self.n_skipped} of {self.step} updates were skipped: their gradients were not"
            self.print(f"{text} finite. A few are usual in float16; of more, lower learning_rate")
        if not corpus.few_val:
            self.warn_if_worse()
        self.note_best()
        # 2. How to go on. The flags that delete must not be given again.
        if stopped:
            how = "the same command continues" if saved else "the last save failed"
            if saved and config["resume"] == "never":
                how += ", without --resume=never --overwrite=True"
            elif saved and config["resume_from"]:
                how += f", without --resume_from={config['resume_from']} --overwrite=True"
            self.print(f"stopped by a signal after step {self.step}; {how}")
        self.close()
        # 3. The card. A run that had nothing left to do keeps the one it has.
        if self.enabled and (self.step > self.steps_done or not (out / "README.md").exists()):
            self.write_card(script, config, corpus.report())
        # 4. What to do next, as the last line, after a tracker's own.
        if saved and not stopped:
            card = f" (summary: {out}/README.md)" if made_by_a_run(out / "README.md") else ""
            next_command += f" --init_from={shlex.quote(str(out))}"
            has_trained = self.step > self.steps_done
            what = "saved in" if has_trained else "nothing was left to train in"
            self.print(f"{what} {out}{card}; next: {next_command}")

    def warn_if_worse(self) -> None:
        """Warn if val_loss was lowest before the first step."""
        losses = self.val_losses()
        later = [step for step in losses if step > 0]
        best = min(later, key=losses.get, default=0)
        if losses.get(best, math.inf) <= losses.get(0, math.inf):
            return
        text = f"val_loss was {losses[0]:.4g} before the first step and {losses[best]:.4g} at best"
        hint = "lower learning_rate (with another out_dir), or look at the data; few rows that are"
        hint += " seen often are learned by heart"
        # val_loss may have other parts, such as nll_weight in dpo.py
        events = {event["step"]: event for event in self.evaluations}
        risen = []
        for key, name in BETTER_IF_HIGHER.items():
            before, after = events[0].get(key), events[best].get(key)
            if None not in (before, after) and after > before:
                risen.append(f"{name} {before:.4g} -> {after:.4g}")
        worse = f", but {' and '.join(risen)}" if risen else "; training made the model worse"
        self.print(f"warning: {text} after it{worse}: {hint}")

    def note_best(self) -> None:
        """Say it if an earlier checkpoint had a clearly lower val_loss than the end of the run."""
        losses, best = self.val_losses(), self.path.parent / BEST[0]
        step = step_of(best.resolve()) if best.exists() else -1
        if step not in losses:
            return
        lowest, last = losses[step], losses[max(losses)]
        if last - lowest > 0.05 * abs(lowest):  # of rl.py it is below 0: the negative reward
            what = f"val_loss was {lowest:.4g} at step {step:,}, at the end {last:.4g}"
            self.print(f"{what}: the earlier checkpoint is --init_from={shlex.quote(str(best))}")

    def write_card(self, script: str, config: dict, data: list[str]) -> None:
        """Write README.md: how well, on what data, where, and how to repeat it."""
        out, name, n = self.path.parent, Path(script).name, self.world_size
        events = read_events(self.path)
        best = out / BEST[0]
        saved = step_of(best.resolve()) if best.exists() else -1
        # The defaults are read from the script: a reader wants to know what differs.
        usual, config = defaults_of(script), config | {"max_steps": self.max_steps}
        changed = [key for key in config if key in usual and config[key] != usual[key]]
        launcher = f"torchrun --standalone --nproc_per_node={n}" if n > 1 else "python"
        text = CARD.format(
            run=out.name,
            script=name,
            summary=summary(events, self.max_steps),
            result=result_table(events, saved),
            # In another out_dir, because in its own a run that is complete does nothing.
            command=f"{launcher} {name} {out}/config.py --out_dir={out}_again",
            repeat=repeat_line(events, is_edited(out / "latest")),
            machine=(f"{n} x " if n > 1 else "") + hardware(self.device),
            versions=", ".join(f"{package} {number}" for package, number in versions().items()),
            settings="\n".join(f"{key} = {config[key]!r}" for key in changed),
            data="\n".join(data),
        )
        # Not over a text of the user.
        path, tmp = out / "README.md", out / "README.md.tmp"
        if path.exists() and not made_by_a_run(path):
            self.print(f"log: {path} was not written by a run; it stays, and this run has no card")
            return
        # A path may hold bytes that are no UTF-8, or be in a locale that has none.
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        with warn_if_unwritable(path):
            tmp.write_text(text, encoding="utf-8")
            os.replace(tmp, path)

    def close(self) -> None:
        if not self.enabled:
            return
        self.bar.close()
        with warn_if_unwritable(self.path):
            self.file.close()
        self.close_tracker()


@contextmanager
def warn_if_unwritable(path: Path) -> Iterator[None]:
    """Report an error of the disk and go on: a full one must not end the run."""
    try:
        yield
    except OSError as error:
        tqdm.write(f"log: cannot write {path}: {error.strerror}")


def check_finite(
    step: int, skipped: Tensor, loss_sum: Tensor, batches: Batches, saver: Saver
) -> None:
    """Raise UserError on every rank after MAX_SKIPPED steps in a row without a finite gradient.

    It names the ranks whose loss is not finite, and their samples. skipped: of DDP. loss_sum: this
    rank's loss of the step, 0-d."""
    if skipped[1] < MAX_SKIPPED:
        return
    saver.wait()  # until the last checkpoint is complete
    # A loss that is not finite on one rank alone points at the samples which that rank read.
    finite = ranks.gather_objects(bool(loss_sum.isfinite()))
    bad = [rank for rank, ok in enumerate(finite) if not ok]
    ranks_named = ", ".join(map(str, bad))
    what = f"loss not finite on rank {ranks_named}" if bad else "loss finite, gradient not"
    # Each rank reads a contiguous part of a step's samples; name that of the first bad rank.
    per_rank = batches.samples_per_step // ranks.world_size()  # samples
    first = batches.position(step - 1) + (bad[0] if bad else 0) * per_rank
    raise UserError(
        f"train: step {step}: {int(skipped[1])} steps in a row without a finite gradient; {what}; "
        f"samples {first} to {first + per_rank - 1}; "
        f"lower learning_rate or continue from an earlier checkpoint (--resume_from=STEP)"
    )


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds: 3725 -> '1:02:05'."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def sums_by_source(
    sums: Mapping[str, Tensor], per: str, corpus: Corpus
) -> dict[str, dict[str, Tensor]]:
    """Add sums up over the ranks. Return {"": average of the sources, "/wiki": of one, ...}.

    sums: {name: (sources,) float64} of the validation data. The average is weighted by the sources'
    shares and divided by the sum called `per`; the sources' own entries are plain sums. So divide
    numbers of one entry by each other: nats / tokens. One source has no entry of its own. The keys
    are suffixes of names.
    """
    whole = ranks.all_reduce_sum(torch.stack(list(sums.values()), dim=1))  # (sources, names)
    n = whole[:, list(sums).index(per)]  # (sources,) what each source's sums are divided by
    shares = torch.tensor(corpus.val_shares(), dtype=torch.float64)  # (sources,), their sum is 1
    rows = {"": (shares[:, None] * whole / n[:, None]).sum(0)}
    if len(corpus.val) > 1:
        rows |= {f"/{name}": row for name, row in zip(corpus.val, whole, strict=True)}
    return {suffix: dict(zip(sums, row, strict=True)) for suffix, row in rows.items()}


# ---- trackers ------------------------------------------------------------------------------------

PACKAGES = {"tensorboard": "tensorboard==2.21.0", "trackio": "trackio", "wandb": "wandb"}


def check_installed(track: str) -> None:
    """Raise UserError if the tracker's package is missing."""
    # A folder of that name in the way (wandb leaves one) is a package without a file.
    if track != "none" and getattr(importlib.util.find_spec(track), "origin", None) is None:
        fix = f"pip install {PACKAGES[track]}"
        raise UserError(f"config: track={track!r} needs a package; {fix}")


def open_tracker(track: str, out_dir: str, steps_done: int) -> tuple[Callable, Callable]:
    """Return (log, close) of this run's tracker: log(values, step) with numbers by name."""
    if track == "none":
        return lambda values, step: None, lambda: None
    if track == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run drops the steps after its checkpoint.
        board = SummaryWriter(out_dir, purge_step=steps_done + 1 if steps_done else None)

        def add_each(values: dict, step: int) -> None:
            for name, value in values.items():
                board.add_scalar(name, value, step)

        return add_each, board.close

    # A resumed run continues the run of the same name.
    name, settings = Path(out_dir).resolve().name, Path(out_dir) / "config.py"
    config = defaults_of(settings) if settings.exists() else {}
    if track == "trackio":
        import trackio

        options = {"resume": "allow", "embed": False}
        run = trackio.init(project="groundup", name=name, config=config, **options)
    else:
        import wandb

        os.environ.setdefault("WANDB_MODE", "offline")  # nothing leaves this machine unasked
        run = wandb.init(project="groundup", name=name, id=name, config=config, dir=out_dir)
    return run.log, run.finish  # the run's own: a thread saves, and it has no current run


# ---- reading a log -------------------------------------------------------------------------------


def read_events(path: Path) -> list[dict]:
    """Return the events of a log.jsonl, without the lines that cannot be read."""
    return [event for event in map(event_of, path.read_bytes().split(b"\n")) if event]


def event_of(line: bytes) -> dict | None:
    """Return the event of a line, None if it is damaged, as a kill or a full disk may leave it."""
    try:
        event = loads(line)
        # The keys that every reader of a log uses.
        valid = isinstance(event["event"], str) and type(event["step"]) is int
        valid &= isinstance(event.get("val_loss"), int | float | None)
    except (ValueError, TypeError, KeyError, IndexError):
        return None
    return event if valid else None


def until(lines: Iterable[bytes], step: int) -> list[bytes]:
    """Return the lines without the events after `step`. Lines that cannot be read stay."""
    events = ((line, event_of(line)) for line in lines)
    return [line for line, event in events if event is None or event["step"] <= step]


def is_continue(event: dict | None, step: int) -> bool:
    """Return whether an event says which settings changed at `step`."""
    return bool(event) and (event["event"], event["step"]) == ("continue", step)


def save_sum(event: dict, lines: Iterable[bytes]) -> str:
    """Return the CRC-32 of a save's event and of the lines before it that a resume there keeps."""
    # Not of later steps: a run trains on while it saves, so the line of step 210 may come first.
    kept = until(lines, event["step"])
    return f"{zlib.crc32(json.dumps(event).encode(), zlib.crc32(b' '.join(kept))):08x}"


def drop_events_after(path: Path, step: int) -> None:
    """Drop the events of `path` after `step`, and what a kill has left of a last line.

    The settings with which an earlier start went on from `step` go too: its steps are dropped.

    Other lines that cannot be read are named and stay. Say so if the lines up to the save of `step`
    are not those that were there: a person may have edited them, and plots show it."""
    check_regular(path)
    *lines, rest = path.read_bytes().split(b"\n")
    if event_of(rest):
        lines.append(rest)
    elif rest:
        where = f"{path}:{len(lines) + 1}"
        print(f"log: {where}: an incomplete last line is removed (was the run killed?)")
    damaged = [str(number) for number, line in enumerate(lines, 1) if not event_of(line)]
    if damaged:
        where = f"{path}:{', '.join(damaged[:5])}"
        print(f"log: {where}: {counted(len(damaged), 'line')} cannot be read; nothing is removed")
    kept = [line for line in until(lines, step) if not is_continue(event_of(line), step)]
    for k, event in enumerate(map(event_of, kept)):
        if event and (event["event"], event["step"]) == ("save", step):
            if event.pop("crc32", None) != save_sum(event, kept[:k]):
                print(f"log: {path}: the lines up to the save of step {step} have changed")
    # Renamed when complete, so that a kill leaves the old log or the new one.
    tmp = path.with_suffix(".jsonl.tmp")
    tmp.write_bytes(b"".join(line + b"\n" for line in kept))
    os.replace(tmp, path)


# ---- the card ------------------------------------------------------------------------------------

CARD = """\
# {run}: a run of {script}

{summary}

{result}

Made on {machine}, with {versions}. {repeat}:

```text
{command}
```

Settings other than the defaults, and the data:

```text
{settings}

{data}
```
"""


def repeat_line(events: list[dict], edited: bool) -> str:
    """Return what the card says of its command, which has the run's last settings. edited: whether
    its model.py was."""
    changed = []
    for event in events:
        if event["event"] == "continue":
            each = (f"{key} {was!r} -> {now!r}" for key, (was, now) in event["changes"].items())
            changed.append(f"at step {event['step']:,}: {', '.join(each)}")
    text = "Its model.py was edited; only with that one it can be opened or repeated. " * edited
    if not changed:
        return f"{text}To repeat it"
    text += f"Settings changed {'; '.join(changed)}"
    return f"{text}; so the command below does not repeat this run"


def changes_val_loss(event: Mapping) -> bool:
    """Return whether the run went on here with settings that make val_loss another measure."""
    changes = event.get("changes")  # of "continue"; a damaged log may hold anything
    return isinstance(changes, dict) and not OF_VAL_LOSS.isdisjoint(changes)


def comparable(events: list[dict]) -> list[dict]:
    """Return the evaluations whose val_loss measures the same as the last one's."""
    changed = [i for i, event in enumerate(events) if changes_val_loss(event)]
    since = changed[-1] if changed else 0
    return [event for event in events[since:] if event["event"] == "eval"]


def summary(events: list[dict], max_steps: int) -> str:
    """Return a sentence: how far the run came, and when."""
    # By the log, because the run may have been interrupted and continued.
    last = max((event["step"] for event in events), default=0)
    ended = "Complete" if last == max_steps else "Ended before its last step"
    counts = [event["tokens"] for event in events if "tokens" in event]
    tokens = f", {counts[-1]:,} tokens" if counts else ""  # not every stage counts them
    now = time.strftime("%Y-%m-%d %H:%M")
    return f"{ended}: step {last:,} of {max_steps:,}{tokens}. Written {now}."


def result_table(events: list[dict], saved: int = -1) -> str:
    """Return the first, the best and the last evaluation as a Markdown table.

    saved: the step that the link `best` points to, -1 = no checkpoint was evaluated."""
    evaluations = [event for event in comparable(events) if event.get("val_loss") is not None]
    if not evaluations:
        return "No evaluation was logged."
    # The best is the one to use, so it has a checkpoint; of equal losses the first, as for `best`.
    lowest = min(evaluations, key=lambda event: event["val_loss"])
    best = next((event for event in evaluations if event["step"] == saved), lowest)
    shown = (evaluations[0], best, evaluations[-1])
    # A row per number: counts with commas, four digits of others. Texts stay in log.jsonl.
    rows = ["| | first | best saved | last |", "|---|---|---|---|"]
    for key in evaluations[-1]:
        values = [event.get(key) for event in shown]
        if all(isinstance(value, int | float) for value in values):
            figures = [f"{v:,}" if isinstance(v, int) else f"{v:.4g}" for v in values]
            rows.append(f"| {key} | {' | '.join(figures)} |")
    if lowest["val_loss"] < best["val_loss"]:
        lower = f"val_loss {lowest['val_loss']:.4g} at step {lowest['step']:,}"
        rows += ["", f"best is the link `best`; {lower} was lower, but has no checkpoint."]
    return "\n".join(rows)
