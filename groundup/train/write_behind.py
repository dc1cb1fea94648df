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
from collections.abc import Callable
from concurrent import futures
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from groundup.train import ranks

SAVE_TIMEOUT_S = 6 * 3600  # so long ranks wait for the slowest disk; they notice at once that one has died
NICENESS = 10  # of the thread: a tenth of a core that training could use as well, all of one that it leaves idle


class Writer:
    """Run one save after the other in a thread. Unless `behind`, training waits for each, and nothing is copied.

    All ranks make it together, after init(). The thread has a process group of its own, since the messages of two
    threads would mix in one. The memory of the first copy is used again for the next.
    """

    def __init__(self, behind: bool, timeout_s: float = 300) -> None:
        self.behind, self.timeout_s = behind, timeout_s
        self.saved = True  # False if the last save that has ended raised
        self.group = ranks.new_group(SAVE_TIMEOUT_S)
        # Python waits for its thread before it exits, after an exception too.
        self._pool = futures.ThreadPoolExecutor(1, initializer=let_training_go_first if behind else None)
        self._pending: futures.Future[Path] | None = None
        self._memory: list[Tensor] = []

    def copy(self, model: nn.Module | None, *states: dict) -> tuple:
        """Return a copy of (model, *states) in CPU memory, or themselves if not `behind`. Call after wait().

        Frozen parameters are shared, not copied, and stay on their device."""
        return snapshot(model, states, self._memory) if self.behind else (model, *states)

    def start(self, save: Callable[[], Path]) -> None:
        """Call save(), which writes a checkpoint from what copy() returned last and returns its path."""
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
        if not self.behind:
            ranks.wait_together(self._pending, self.timeout_s)

    def then(self, action: Callable[[], None]) -> None:
        """Call action() after the save that was started, if it succeeds; wait() raises what it raises."""
        pending = self._pending

        def after() -> Path | None:
            path = None if pending is None else pending.result()
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
            ranks.wait_together(pending, self.timeout_s)
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


def let_training_go_first() -> None:
    """Lower the priority of this thread, and of those that it will begin, where threads have one of their own."""
    with contextlib.suppress(OSError):  # a container may forbid it
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def snapshot(model: nn.Module | None, states: tuple[dict, ...], memory: list[Tensor]) -> tuple:
    """Return (model, *states) with copies of their tensors in CPU memory; `memory` is kept for the next one.

    Whole storages are copied, and what were views of one are views of its copy: torch.save would write them otherwise.
    Copies from a GPU are page-locked, so that they are only under way when this returns, on the current stream; of such
    memory torch takes the next power of two, up to twice the bytes."""
    module = nn.Module() if model is None else model
    trained = [p for p in module.parameters() if p.requires_grad]
    replaced = {id(t): t for t in (*module.parameters(), *module.buffers()) if not t.requires_grad}  # shared
    copies: dict[int, Tensor] = {}  # by the address of the storage
    for t in [*trained, *(leaf for leaf in tree_leaves(states) if isinstance(leaf, Tensor))]:
        storage, i = t.untyped_storage(), len(copies)
        if storage.data_ptr() not in copies:
            source = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
            if i == len(memory) or len(memory[i]) != len(source):
                memory[i : i + 1] = [torch.empty(len(source), dtype=torch.uint8, pin_memory=t.is_cuda)]
            copies[storage.data_ptr()] = memory[i].copy_(source, non_blocking=t.is_cuda)  # start() waits for CUDA alone
        to = copies[storage.data_ptr()].untyped_storage()
        view = torch.empty(0, dtype=t.dtype).set_(to, t.storage_offset(), t.size(), t.stride())
        replaced[id(t)] = nn.Parameter(view) if t.requires_grad else view
    return copy.deepcopy((model, *states), replaced)
