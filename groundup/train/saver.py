"""Save checkpoints while training goes on. checkpoint.py shows what a checkpoint holds.

Training waits for the save before this one, and for a copy of weights and state in host
memory. A thread writes the copy.
"""

import gc
import shutil
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from groundup.errors import UserError, reason_of, say
from groundup.files.disk import free_name, housekeeping, sync
from groundup.tokens.text_tokenizer import TextTokenizer
from groundup.train import fsdp, huggingface, ranks
from groundup.train.checkpoint import (
    BEST,
    LINKS,
    discard,
    is_locked_here,
    rank_file,
    step_dirs,
    step_of,
)
from groundup.train.device import rng_state
from groundup.train.log import RunLog
from groundup.train.powersgd import PowerSGD
from model import Transformer


class Saver:
    """Write checkpoints in a thread while training goes on.

    All ranks make a Saver together and call the same methods. Rank 0 alone writes. If it cannot, it
    says so, and `saved` is False on all ranks until a later save succeeds. A run without any
    checkpoint ends: the first save is waited for, and raises UserError if it fails.

    config, data_record: as for `checkpoint.find`; every checkpoint holds them. base: directory of
    the frozen weights that LoRA adapters need. model_format: the module with `stored_weights` and
    `write_model` for this kind of model, huggingface or reward_model.
    """

    def __init__(
        self,
        out_dir: str | Path,
        keep_last: int,
        tokenizer: TextTokenizer,
        log: RunLog,
        config: dict,
        data_record: dict,
        base: str | Path = "",
        model_format: ModuleType = huggingface,
    ) -> None:
        self.out_dir, self.keep_last = Path(out_dir), keep_last
        self.tokenizer, self.log = tokenizer, log
        self.config, self.data_record = config, data_record
        self.base, self.model_format = base, model_format
        self.saved = True  # False if the last save failed
        self.newest_step = log.steps_done  # the step that this run continues, 0 if it is new
        self.memory = HostMemory()
        self.timeout_s = config["timeout_s"]
        # A group of the thread's own: in a shared one its messages would mix with training's.
        self.group = ranks.new_group(ranks.SLOW_DISK_S)
        # Python waits for this thread before it exits, after an exception too.
        self.pool = futures.ThreadPoolExecutor(1)
        self.pending: list[futures.Future] = []
        self.tidy()  # a kill may have come between a save and its links

    def save(
        self,
        step: int,
        model: Transformer,
        ddp: Any,
        opt: Any,
        scaler: torch.amp.GradScaler,
        extra: dict | None = None,
    ) -> None:
        """Copy everything that a resume needs, and start to write it. Call ddp.flush() before.

        ddp, opt: DDP and Optimizer, or FSDP and its AdamW. extra: plain data and tensors, added to
        the training state.
        """
        # The copy before this one must be written: there is at most one at a time.
        self.wait()
        ranks.check_replicas([bucket.param for bucket in getattr(ddp, "buckets", [])])
        # Training on would write into a directory that nobody looks at.
        if ranks.any_rank(ranks.rank() == 0 and not is_locked_here(self.out_dir)):
            where = f"out_dir={str(self.out_dir)!r}"
            raise UserError(f"train: {where} was removed or moved while the run was in it")

        copied = self.memory.copy(self._content(step, model, ddp, opt, scaler, extra or {}))
        # From here on training may change all tensors: the thread writes the copies, and reads of
        # the model only its architecture.
        self.pending.append(self.pool.submit(self._write, step, model, copied))
        # A run that cannot save ends now, not at its second save.
        if not self.newest_step:
            self.wait()

    def _content(
        self,
        step: int,
        model: Transformer,
        ddp: Any,
        opt: Any,
        scaler: torch.amp.GradScaler,
        extra: dict,
    ) -> dict[str, dict]:
        """Return what this rank saves, not copied: weights, state (on rank 0), rank_state."""
        # Rank 0 writes the model and the training state. With FSDP and ZeRO-1 the others send it
        # their parts, so all ranks make these calls.
        is_main = ranks.rank() == 0
        content: dict[str, dict] = {}
        sharded = isinstance(ddp, fsdp.FSDP)
        weights = ddp.whole_weights() if sharded else self.model_format.stored_weights(model)
        optimizer = opt.state_dict(ddp.gather if self.config["zero1"] else None, keep=is_main)
        if is_main:
            content["weights"] = weights
            content["train_state"] = {
                "config": self.config,
                "data": self.data_record,
                "step": step,
                "max_steps": self.log.max_steps,
                "n_steps": ddp.n_updates,  # updates: rl.py makes several in a step
                "skipped": ddp.skipped.tolist(),
                "optimizer": optimizer,
                "scaler": scaler.state_dict(),
                **extra,
            }
        # Each rank has its own random generators and, with PowerSGD, compression errors.
        content["rank_state"] = {"rng": rng_state(next(model.parameters()).device)}
        hook = getattr(ddp, "hook", None)
        if isinstance(hook, PowerSGD):
            content["rank_state"]["powersgd"] = hook.state_dict()
        return content

    def tidy(self) -> None:
        """Update links and remove steps by the evaluations in the log. Call after an evaluation."""
        # In the thread, after the save under way.
        self.pending.append(self.pool.submit(self._tidy_now))

    def wait(self) -> None:
        """Wait for what the thread has to do."""
        # All ranks have the same work under way, in the same order.
        pending, self.pending = self.pending, []
        for future in pending:
            ranks.wait_together(future, self.timeout_s)
            future.result()  # raises LostRank, or a mistake in our code

    def close(self) -> None:
        """Wait for the last save and end the thread. Call before ranks.close()."""
        self.wait()
        self.pool.shutdown()
        # A process group that still exists at exit may abort the process. After a failed save the
        # error and its stack frames keep it alive, in a reference cycle: hence the collection.
        self.group = None
        gc.collect()

    # ---- in the thread

    def _write(self, step: int, model: Transformer, copied: dict[str, dict]) -> None:
        """Write a checkpoint, then note it in the log and update links."""
        final = self.out_dir / f"step_{step:06d}"
        if ranks.rank() == 0:
            problem = self._write_on_rank_0(final, model, copied)
        else:
            rank_state = [copied["rank_state"]]  # send_object_list takes a list
            ranks.issue("send state", dist.send_object_list, rank_state, 0, group=self.group)
            problem = ranks.gather_objects("", self.group)[0]  # rank 0's

        # All ranks know the problem, so they end together if there is nothing to go back to.
        self.saved = not problem
        if problem:
            text = f"checkpoint: cannot save {final}"
            if not self.newest_step:
                raise UserError(f"{text}, and there is no earlier checkpoint ({problem})")
            self.log.print(f"{text}, earlier checkpoints are intact ({problem})")
            return
        self.newest_step = step
        self.log.write("save", step, {"path": str(final)})
        self._tidy_now()

    def _write_on_rank_0(self, final: Path, model: Transformer, copied: dict[str, dict]) -> str:
        """Write a checkpoint and tell the other ranks. Return what went wrong, "" if nothing."""
        rank_states = self._rank_states(copied["rank_state"])
        problem = "a mistake in the code"  # what the others hear if another error leaves the try
        try:
            self._write_files(final, model, copied, rank_states)
            problem = ""
        # What Python, torch, safetensors and we raise for a bad disk; others are bugs.
        except (OSError, RuntimeError, SafetensorError, UserError) as error:
            problem = reason_of(error)
        finally:
            for _ in rank_states:  # after an error: receive what the others send all the same
                pass
            ranks.gather_objects(problem, self.group)
        return problem

    def _write_files(
        self, final: Path, model: Transformer, copied: dict[str, dict], rank_states: Iterator[dict]
    ) -> None:
        """Write a checkpoint, on rank 0."""
        # Nothing has the final name before it is whole.
        temp = free_name(final, "tmp")
        try:
            temp.mkdir()
            # What a resume needs, then what transformers reads.
            for rank, rank_state in enumerate(rank_states):
                write_state(temp / rank_file(rank), rank_state)
            write_state(temp / "train_state.pt", copied["train_state"])
            weights = copied["weights"]
            self.model_format.write_model(temp, model, self.tokenizer, self.base, weights=weights)
            commit(temp, final)
        finally:
            shutil.rmtree(temp, ignore_errors=True)  # after an error

    def _rank_states(self, own: dict) -> Iterator[dict]:
        """Yield the state of each rank, as they send it."""
        # One after the other: with PowerSGD each is as large as the gradients.
        yield own
        for other in range(1, ranks.world_size()):
            state = [None]
            ranks.issue("receive state", dist.recv_object_list, state, other, group=self.group)
            yield state[0]

    def _tidy_now(self) -> None:
        """Do the housekeeping on rank 0 while the others wait."""
        # The others wait: their next save must not begin while steps are removed.
        if ranks.rank() == 0:
            tidy_run_dir(self.out_dir, self.newest_step, self.keep_last, self.log.val_losses())
        ranks.gather_objects(None, self.group)


class HostMemory:
    """Copies of tensors in host memory. The next copy is written into the same memory."""

    # To allocate gigabytes takes longer than to copy them.
    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    @torch.no_grad()
    def copy(self, value: Any) -> Any:
        """Return `value` with a copy of every tensor in its dicts and lists."""
        last, self.buffers = iter(self.buffers), []
        return self._copy(value, last)

    def _copy(self, value: Any, last: Iterator[Tensor]) -> Any:
        if isinstance(value, dict):
            return {key: self._copy(item, last) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self._copy(item, last) for item in value])
        # Beside a GPU a tensor here is a copy already: gathered for this save, or a random state.
        is_copy = torch.cuda.is_initialized() and isinstance(value, Tensor) and not value.is_cuda
        if is_copy or not isinstance(value, Tensor):
            return value
        # The memory of the tensor that had this place last time. From a GPU page-locked memory is
        # several times faster.
        buffer = next(last, None)
        if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        self.buffers.append(buffer)
        return buffer.copy_(value)


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
    # The checksums come last: a directory that has them is complete.
    files = [path for path in sorted(temp.rglob("*")) if path.is_file()]
    sums = {path.relative_to(temp).as_posix(): huggingface.checksum(path) for path in files}
    huggingface.write_json(temp / "checksums.json", sums)
    # On the disk before it has the name, or a power cut could leave empty files with it.
    for path in (*temp.rglob("*"), temp):
        sync(path)
    # If there is a step of this number it is damaged: the run was resumed from an earlier one
    # and has come to it again. After a kill between the two renames checkpoint.repair puts the
    # old one back.
    old = final.rename(free_name(final, "old")) if final.exists() else None
    temp.rename(final)
    sync(final.parent)
    if old:
        shutil.rmtree(old, ignore_errors=True)


def tidy_run_dir(out: Path, newest_step: int, keep_last: int, val_losses: dict[int, float]) -> None:
    """Point latest, best and best2 at their steps, and remove the steps that are not kept.

    Kept are the `keep_last` newest (0 = all) and the two with the lowest val_loss.
    """
    # Steps after `newest_step` are damaged ones that a resume has skipped.
    steps = [path for path in step_dirs(out) if step_of(path) <= newest_step]
    if not steps:
        return
    # Which two are the best?
    evaluated = [path for path in steps if step_of(path) in val_losses]
    # Sorting is stable: of equal losses the earlier is better.
    ranking = sorted(evaluated, key=lambda path: val_losses[step_of(path)])
    # Losing the log must not lose the best checkpoint: its link still names it.
    linked = (out / BEST[0]).resolve().name
    forgotten = [path for path in steps if path.name == linked and path not in evaluated]
    for path in forgotten:
        text = f"log.jsonl has no evaluation of {path.name}, so {out}/best stays there"
        say(f"warning: {text}; remove this link to choose by the log")
    best = (forgotten + ranking)[: len(BEST)]
    with housekeeping("put the log on the disk"):
        sync(out / "log.jsonl")  # what is removed below follows from it
    absent = [None] * (len(BEST) - len(best))
    for link, target in zip(LINKS, [steps[-1], *best, *absent], strict=True):
        with housekeeping("update the links latest, best and best2"):
            point(out / link, target)
    for path in steps[:-keep_last] if keep_last else []:
        if path not in best:
            with housekeeping("remove old checkpoints"):
                discard(path)


def point(link: Path, target: Path | None) -> None:
    """Replace a symbolic link in one operation; None removes it."""
    if target is None:
        link.unlink(missing_ok=True)
        return
    temp = free_name(link, "tmp")
    # Relative, so that a run directory can be moved.
    temp.symlink_to(target.name, target_is_directory=True)
    try:
        temp.replace(link)
    except OSError:
        temp.unlink()
        raise
