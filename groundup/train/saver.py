"""Save checkpoints while training goes on. checkpoint.py shows what a checkpoint holds.

Training waits for the save before this one, and for a copy of weights and state in host
memory. A thread writes the copy.

    saver = Saver(out_dir, keep_last, tokenizer, log, config, data)
    saver.save(step, model, ddp, opt, scaler)
    saver.update_best()    # after an evaluation
    saver.close()          # saver.saved tells whether the last save succeeded
"""

import gc
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from groundup.errors import UserError, reason_of
from groundup.train import fsdp, huggingface, ranks
from groundup.train.checkpoint import (
    BEST,
    SLOW_DISK_S,
    housekeeping,
    is_ours,
    rank_file,
    step_dirs,
    step_of,
)
from groundup.train.device import rng_state
from groundup.train.log import RunLog
from groundup.train.powersgd import PowerSGD
from model import Transformer
from tokenizer import Tokenizer

NEW_DIRECTORY_S = 60  # NFS may hide a new directory from other machines for this long
NICENESS = 10  # of the thread: it takes a tenth of a busy core, all of an idle one


class SaveError(Exception):
    """A save failed, on this rank or another: a full disk, say. The run goes on."""


class Saver:
    """Write checkpoints in a thread while training goes on.

    All ranks make a Saver together and call the same methods. If any rank cannot write, the save
    fails on all of them with one line, and `saved` is False until a later save succeeds.

    config, data: as for `checkpoint.find`; every checkpoint holds them. base: directory of the
    frozen weights that LoRA adapters need. files: the module with `stored_weights` and
    `write_model` for this kind of model, huggingface or reward_model.
    """

    def __init__(
        self,
        out_dir: str | Path,
        keep_last: int,
        tokenizer: Tokenizer,
        log: RunLog,
        config: dict,
        data: dict,
        base: str | Path = "",
        files: ModuleType = huggingface,
    ) -> None:
        self.out_dir, self.keep_last = Path(out_dir), keep_last
        self.tokenizer, self.log = tokenizer, log
        self.config, self.data = config, data
        self.base, self.files = base, files
        self.saved = True  # False if the last save failed
        self.timeout_s = config["timeout_s"]
        self._check_visible()
        self.newest_step = log.steps_done
        self.memory = HostMemory()
        # A group of the thread's own: in a shared one its messages would mix with training's.
        self.group = ranks.new_group(SLOW_DISK_S)
        # Python waits for this thread before it exits, after an exception too.
        self.pool = futures.ThreadPoolExecutor(1, initializer=let_training_go_first)
        self.pending: list[futures.Future] = []
        self.update_best()  # a kill may have come between a save and its links

    def save(
        self,
        step: int,
        model: Transformer,
        ddp: Any,
        opt: Any,
        scaler: torch.amp.GradScaler,
        other: dict | None = None,
    ) -> None:
        """Copy everything that a resume needs, and start to write it. Call ddp.flush() before.

        ddp, opt: as for `restore`. other: added to the training state, plain data and tensors.
        """
        # The copy before this one must be written: its memory is used again.
        self.wait()
        ranks.check_replicas([bucket.param for bucket in getattr(ddp, "buckets", [])])
        is_main = ranks.rank() == 0
        # Training on would write into a directory that nobody looks at.
        if ranks.any_rank(is_main and not is_ours(self.out_dir)):
            where = f"out_dir={str(self.out_dir)!r}"
            raise UserError(f"train: {where} was removed or moved while the run was in it")

        # Rank 0 writes the model and the training state. With FSDP and ZeRO-1 the others send it
        # their parts, so all ranks make these calls.
        content: dict[str, dict] = {}
        sharded = isinstance(ddp, fsdp.FSDP)
        weights = ddp.whole_weights() if sharded else self.files.stored_weights(model)
        optimizer = opt.state_dict(ddp.gather if self.config["zero1"] else None, keep=is_main)
        if is_main:
            content["weights"] = weights
            content["state"] = {
                "config": self.config,
                "data": self.data,
                "step": step,
                "n_steps": ddp.n_steps,
                "skipped": ddp.skipped.tolist(),
                "optimizer": optimizer,
                "scaler": scaler.state_dict(),
                **(other or {}),
            }
        # Each rank writes its own generators and compression errors.
        content["rank_state"] = {"rng": rng_state(next(model.parameters()).device)}
        hook = getattr(ddp, "hook", None)
        if isinstance(hook, PowerSGD):
            content["rank_state"]["powersgd"] = hook.state_dict()

        # From here on training may change all tensors: the thread writes the copies, and reads of
        # the model only its architecture.
        copied = self.memory.copy(content)
        self.pending.append(self.pool.submit(self._write, step, model, copied))

    def update_best(self) -> None:
        """Update links and remove steps by the evaluations in the log. Call after an evaluation."""
        # In the thread, after the save under way.
        self.pending.append(self.pool.submit(self._tidy))

    def wait(self) -> None:
        """Wait for what the thread has to do."""
        pending, self.pending = self.pending, []
        for future in pending:
            ranks.wait_together(future, self.timeout_s)
            future.result()  # raises LostRank, or a mistake in our code

    def close(self) -> None:
        """Wait for the last save and end the thread. Call before ranks.close()."""
        self.wait()
        self.pool.shutdown()
        # A process group that is still referred to at exit could abort it. The error of a failed
        # save and its frames, which have the group, are a cycle.
        self.group = None
        gc.collect()

    def _check_visible(self) -> None:
        """Raise UserError if a rank does not see out_dir."""
        # Each rank writes a file into a checkpoint, so they must share a file system.
        deadline = time.monotonic() + min(NEW_DIRECTORY_S, self.timeout_s / 2)
        while not self.out_dir.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        visible = ranks.gather_objects(self.out_dir.exists())
        if not all(visible):
            text = f"rank {visible.index(False)} does not see the out_dir of rank 0"
            fix = f"put {self.out_dir} on a file system that all machines share"
            raise UserError(f"config: {text}; {fix}")

    # ---- in the thread

    def _write(self, step: int, model: Transformer, copied: dict[str, dict]) -> None:
        """Write a checkpoint, then note it in the log and update links."""
        # Nothing has the final name before it is whole.
        final = self.out_dir / f"step_{step:06d}"
        temp = final.with_name(f".{final.name}.tmp")
        self.memory.wait()
        try:
            self._write_files(temp, final, model, copied)
        except SaveError as error:
            self.saved = False
            text = f"cannot save {final}, earlier checkpoints are intact ({error})"
            self.log.print(f"checkpoint: {text}")
            return
        self.saved, self.newest_step = True, step
        self.log.write("save", step, {"path": str(final)})
        self._tidy()

    def _write_files(
        self, temp: Path, final: Path, model: Transformer, copied: dict[str, dict]
    ) -> None:
        """Write a checkpoint, all ranks together. Raise SaveError on all if one of them fails."""
        is_main = ranks.rank() == 0
        # Remove what a killed save left.
        with self._together(temp):
            if is_main:
                shutil.rmtree(temp, ignore_errors=True)
                temp.mkdir()
        # All ranks write at the same time.
        with self._together(temp):
            write_state(temp / rank_file(ranks.rank()), copied["rank_state"])
            if is_main:
                write_state(temp / "train_state.pt", copied["state"])
                weights = copied["weights"]
                self.files.write_model(temp, model, self.tokenizer, self.base, weights=weights)
        # Complete on all ranks: give it its name.
        with self._together(temp):
            if is_main:
                commit(temp, final)

    @contextmanager
    def _together(self, temp: Path) -> Iterator[None]:
        """Let all ranks finish a part of the save. If one has failed, remove `temp` and raise."""
        # Whatever the error is: the others must hear of it, or they would wait.
        error = None
        try:
            yield
        except Exception as e:
            error = e
        mine = "" if error is None else f"rank {ranks.rank()}: {reason_of(error)}"
        reasons = [reason for reason in ranks.gather_objects(mine, self.group) if reason]
        if reasons and ranks.rank() == 0:
            shutil.rmtree(temp, ignore_errors=True)
        # What Python, torch, safetensors and we raise for a bad disk; others are bugs.
        expected = (OSError, RuntimeError, SafetensorError, UserError)
        if error is not None and not isinstance(error, expected):
            raise error
        if reasons:
            raise SaveError("; ".join(reasons))

    def _tidy(self) -> None:
        """Do the housekeeping on rank 0 while the others wait."""
        if ranks.rank() == 0:
            tidy(self.out_dir, self.newest_step, self.keep_last, self.log.val_losses())
        ranks.gather_objects(None, self.group)


def let_training_go_first() -> None:
    """Lower the priority of this thread, where threads have one of their own."""
    if sys.platform == "linux":
        with suppress(OSError):  # a container may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class HostMemory:
    """Copies of tensors in host memory. The memory is used again for the next copy."""

    # Copies from a GPU are page-locked, so that they run while the CPU goes on.
    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.n_used = 0
        self.device = 0
        self.done: torch.cuda.Event | None = None

    @torch.no_grad()
    def copy(self, value: Any) -> Any:
        """Return `value` with a copy of every tensor in its dicts and lists."""
        # The copies before this one are overwritten. Call `wait` before reading these.
        self.n_used = 0
        copied = self._copy(value)
        if torch.cuda.is_initialized():
            self.device = torch.cuda.current_device()
            self.done = torch.cuda.current_stream().record_event()
        return copied

    def wait(self) -> None:
        """Wait until the GPU has finished the copies. Any thread may call it."""
        if self.done is not None:
            torch.cuda.set_device(self.device)  # a new thread would open a context on GPU 0
            self.done.synchronize()

    def _copy(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._copy(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self._copy(item) for item in value])
        if not isinstance(value, Tensor):
            return value
        # In host memory already: gathered for this save, or a random state.
        if torch.cuda.is_initialized() and not value.is_cuda:
            return value
        # The buffer that held this tensor last time, or a new one.
        i = self.n_used
        self.n_used += 1
        sizes = [(buffer.shape, buffer.dtype) for buffer in self.buffers[i : i + 1]]
        if sizes != [(value.shape, value.dtype)]:
            new = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self.buffers[i : i + 1] = [new]
        return self.buffers[i].copy_(value, non_blocking=value.is_cuda)


# ---- files ---------------------------------------------------------------------------------------


def write_state(path: Path, state: dict) -> None:
    """Write a .pt file. Raise UserError if only running code could read it back."""
    # torch hides the system's error if it opens the file itself.
    with open(path, "wb") as file:
        torch.save(state, file)
    # Refused now, not at the resume.
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if unsafe:
        text = f"{path.name} holds {', '.join(unsafe)}; what is not plain data cannot be resumed"
        raise UserError(text)


def commit(temp: Path, final: Path) -> None:
    """Put a complete checkpoint on the disk, then give it its name."""
    files = [path for path in sorted(temp.rglob("*")) if path.is_file()]
    sums = {path.relative_to(temp).as_posix(): huggingface.checksum(path) for path in files}
    huggingface.write_json(temp / "checksums.json", sums)
    # On the disk before it has the name, or a power cut could leave empty files with it.
    for path in (*temp.rglob("*"), temp):
        sync(path)
    # If there is a step of this number it is damaged: the run was resumed from an earlier one
    # and has come to it again. After a kill between the two renames checkpoint.repair puts the
    # old one back.
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        final.rename(old)
    temp.rename(final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Put a file, or the names in a directory, on the disk."""
    if path.is_file():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
        return
    with housekeeping("fsync a directory"):  # SMB and FUSE may refuse it
        directory = os.open(path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def tidy(out: Path, newest_step: int, keep_last: int, val_losses: dict[int, float]) -> None:
    """Point latest, best and best2 at their steps, and remove the steps that are not kept.

    Kept are the `keep_last` newest (0 = all) and the two with the lowest val_loss.
    """
    # Steps after `newest_step` are damaged ones that a resume has skipped.
    steps = [path for path in step_dirs(out) if step_of(path) <= newest_step]
    if not steps:
        return
    evaluated = [path for path in steps if step_of(path) in val_losses]
    # Sorting is stable: of equal losses the earlier is better.
    ranking = sorted(evaluated, key=lambda path: val_losses[step_of(path)])
    best = ranking[: len(BEST)]
    with housekeeping("update the links latest, best and best2"):
        point(out / "latest", steps[-1])
        for i, name in enumerate(BEST):
            point(out / name, best[i] if i < len(best) else None)
    # Renamed first: a half removed step must not look finished.
    for path in steps[:-keep_last] if keep_last else []:
        if path not in best:
            with housekeeping("remove old checkpoints"):
                shutil.rmtree(path.rename(path.with_name(f".{path.name}.tmp")))


def point(link: Path, target: Path | None) -> None:
    """Replace a symbolic link in one operation; None removes it."""
    if target is None:
        link.unlink(missing_ok=True)
        return
    temp = link.with_name(f".{link.name}.tmp")
    temp.unlink(missing_ok=True)
    # Relative, so that a run directory can be moved.
    temp.symlink_to(target.name, target_is_directory=True)
    temp.replace(link)
