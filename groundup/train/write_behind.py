"""Save while training continues: copy weights and state in memory, and let a thread write the copy.

Training waits for the copy, a fraction of a second, and for the save before it if that has not ended. The thread waits
for the disk and the other ranks. The files are byte for byte those of a save that training waits for.
"""

import contextlib
import copy
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

from groundup.train import ranks

NICENESS = 10  # of the thread: a tenth of a core that training could use as well, all of one that it leaves idle


class Writer:
    """Run one save after the other: in a thread if `behind`, else at once and without a copy.

    All ranks make it together, after init(). The thread has a process group of its own, since the messages of two
    threads would mix in one. The memory of the first copy is used again for the next.
    """

    def __init__(self, behind: bool, timeout_s: float) -> None:
        self.behind = behind
        self.saved = True  # False if the last save that has ended raised
        self.group = ranks.new_group(timeout_s) if behind else None
        # Python waits for its thread before it exits, after an exception too.
        self._pool = ThreadPoolExecutor(1, initializer=let_training_go_first)
        self._pending: Future[Path] | None = None
        self._memory: list[Tensor] = []

    def copy(self, model: nn.Module | None, *states: dict) -> tuple:
        """Return a copy of (model, *states) in CPU memory, or themselves if not `behind`. Call after wait().

        Frozen parameters are shared, not copied, and stay on their device."""
        return snapshot(model, states, self._memory) if self.behind else (model, *states)

    def start(self, save: Callable[[], Path]) -> None:
        """Call save(), which writes a checkpoint from what copy() returned last and returns its path."""
        if not self.behind:
            self._pending = ended(save)
            return
        copy_done = None
        if torch.cuda.is_initialized():
            device = torch.cuda.current_device()
            copy_done = torch.cuda.current_stream().record_event()  # the GPU may still be at work on the copies

        def save_the_copy() -> Path:
            if copy_done is not None:
                torch.cuda.set_device(device)  # a thread begins on device 0; waiting there would open a context on it
                copy_done.synchronize()
            return save()

        self._pending = self._pool.submit(save_the_copy)

    def then(self, action: Callable[[], None]) -> None:
        """Call action() after the save that was started, if it succeeds; wait() raises what it raises."""
        if self._pending is None:
            action()
            return
        pending = self._pending

        def after() -> Path:
            path = pending.result()
            action()
            return path

        self._pending = self._pool.submit(after)

    def wait(self) -> Path | None:
        """Wait for the save that was started; return its path, None if there is none. Raise what it raised."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        self.saved = False
        try:
            path = pending.result()
        finally:
            del pending  # an error that it holds would hold this frame, and this frame it
        self.saved = True
        return path

    def close(self) -> None:
        """Call after the last wait(). A process group that is still referred to at exit could abort it (ranks.py)."""
        self._pool.shutdown()
        self.group = None
        gc.collect()  # the errors of a save that failed and its frames, which have the group, hold each other


def ended(save: Callable[[], Path]) -> Future[Path]:
    """Call save() and return a future with its result or error."""
    future: Future[Path] = Future()
    try:
        future.set_result(save())
    except Exception as error:  # for wait()
        future.set_exception(error)
    return future


def let_training_go_first() -> None:
    """Lower the priority of this thread, and of those that it will begin, where threads have one of their own."""
    with contextlib.suppress(OSError):  # a container may forbid it
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def snapshot(model: nn.Module | None, states: tuple[dict, ...], memory: list[Tensor]) -> tuple:
    """(model, *states) with copies of their tensors in CPU memory; `memory` is kept for the next one.

    Whole storages are copied, and what were views of one are views of its copy: torch.save would write them otherwise.
    From a GPU the copies are only under way when this returns, on the current stream."""
    params = [] if model is None else list(model.parameters())
    trained = [p for p in params if p.requires_grad]
    shared = [p for p in params if not p.requires_grad] + ([] if model is None else list(model.buffers()))
    copies: dict[int, Tensor] = {}  # by the address of the storage
    replaced = {id(t): t for t in shared}
    for t in [*trained, *tensors_in(states)]:
        address = t.untyped_storage().data_ptr()
        if address not in copies:
            copies[address] = copy_storage(t, len(copies), memory)
        view = torch.empty(0, dtype=t.dtype).set_(
            copies[address].untyped_storage(), t.storage_offset(), t.size(), t.stride()
        )
        replaced[id(t)] = nn.Parameter(view) if t.requires_grad else view
    return copy.deepcopy((model, *states), replaced)


def copy_storage(t: Tensor, i: int, memory: list[Tensor]) -> Tensor:
    """All bytes that `t` is a view of, in memory[i]; page-locked if they come from a GPU, so that nobody waits. Of such
    memory torch takes the next power of two: up to twice the bytes."""
    storage = t.untyped_storage()
    source = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
    if i == len(memory) or len(memory[i]) != len(source):
        memory[i : i + 1] = [torch.empty(len(source), dtype=torch.uint8, pin_memory=t.is_cuda)]
    return memory[i].copy_(source, non_blocking=t.is_cuda)  # start() waits for CUDA alone


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in nested dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for member in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(member)
