"""The process group: join and leave it, and talk to the other ranks through it.

Without a process group every function works as in a world of one rank. If a rank dies or hangs, the others end with
one line that says which operation failed and how many steps each rank has finished.
"""

import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

# This module binds the process group as a default argument when it is first imported. torch._dynamo imports it at some
# point: if that is after init(), the group and its threads stay alive until the interpreter shuts down, and a thread
# that drops a tensor then aborts the process ("terminate called without an active exception").
import torch.distributed.nn.functional  # noqa: F401
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from groundup.errors import LostRank, UserError, leave

FOREVER_S = 1e8  # three years
WATCHES: list[tuple[threading.Thread, dist.ProcessGroup]] = []  # of watch_neighbour


@dataclass(frozen=True)
class World:
    """Who this process is: `rank` of `world_size` in all, `local_rank` on this machine (the index of its GPU)."""

    rank: int
    local_rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """True on the one process that prints and writes files."""
        return self.rank == 0


def init(device_type: str = "cpu", timeout_s: float = 300) -> World:
    """Join the process group that torchrun describes in the environment; without torchrun, return a world of one.

    A collective fails if it waits longer than `timeout_s` for another rank. With `device_type` "cuda" this process
    takes GPU number LOCAL_RANK; CUDA tensors travel over NCCL, CPU tensors (flags, counts) over gloo.
    """
    if "RANK" not in os.environ:
        return World(rank=0, local_rank=0, world_size=1)
    absent = [key for key in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if key not in os.environ]
    if absent:
        raise UserError(f"ddp: RANK is set in the environment but {', '.join(absent)} is not; start with torchrun")
    world = World(*(int(os.environ[key]) for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))
    backend, device = "gloo", None
    if device_type == "cuda":
        if world.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"ddp: local rank {world.local_rank} has no GPU, this machine has {torch.cuda.device_count()}; "
                "lower --nproc_per_node"
            )
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
    with named_errors("init_process_group", world.rank):
        dist.init_process_group(
            backend, store=meeting_place(world, timeout_s), rank=world.rank, world_size=world.world_size,
            timeout=timedelta(seconds=timeout_s), device_id=device,
        )  # fmt: skip
    if device_type == "cuda":
        watch_neighbour(world)
    return world


def watch_neighbour(world: World) -> None:
    """End this process with a line soon after another rank died, wherever the main thread waits. All ranks call it.

    Under NCCL that is often .item(), which waits for the GPU until the watchdog aborts the process with SIGABRT after
    timeout_s. So a thread waits over gloo for a word that the rank before this one sends in close(); gloo notices at
    once that the sender has died. This rank's end tells the next one, and so on.
    """
    if world.world_size == 1:
        return
    before, group = (world.rank - 1) % world.world_size, new_group(FOREVER_S)

    def watch() -> None:
        try:
            dist.recv(torch.zeros(1), src=before, group=group)
        except RuntimeError:
            text = f"ddp: rank {world.rank}: rank {before} has died, look for its error{finished_steps()}"
            print(text, file=sys.stderr, flush=True)
            leave(1)

    WATCHES.append((threading.Thread(target=watch, daemon=True), group))
    WATCHES[-1][0].start()


def meeting_place(world: World, timeout_s: float) -> dist.Store:
    """Return a key-value store at MASTER_ADDR whose keys belong to this start of the ranks alone.

    torchrun (2.13) keeps one store over all its restarts, so a new rank would find the addresses of dead ones and wait
    for them; and its count of restarts may differ between machines. So rank 0 hands out a prefix: every other rank
    posts a random word, finds the prefix under that word, and confirms. Dead ranks never confirm.
    """
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun
    address, timeout = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timedelta(seconds=timeout_s)
    store = dist.TCPStore(*address, world.world_size, is_master=world.is_main and not hosted, timeout=timeout)
    word, deadline = uuid.uuid4().hex, time.monotonic() + timeout_s
    if not world.is_main:
        store.set(f"ddp/word/{world.rank}", word)
        prefix = store.get(f"ddp/prefix/{word}").decode()
        store.set(f"ddp/confirmed/{prefix}/{world.rank}", "")
        return dist.PrefixStore(prefix, store)
    missing = list(range(1, world.world_size))
    while missing:
        for rank in missing:
            if store.check([f"ddp/word/{rank}"]):
                store.set(f"ddp/prefix/{store.get(f'ddp/word/{rank}').decode()}", word)
        time.sleep(0.01)
        missing = [rank for rank in missing if not store.check([f"ddp/confirmed/{word}/{rank}"])]
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank {missing[0]} has not come within {timeout_s:.0f} s")
    return dist.PrefixStore(word, store)


def close() -> None:
    """Leave the process group once all ranks have called this. Do not call it after an error: others may not come."""
    if dist.is_initialized():
        barrier()
        while WATCHES:
            thread, group = WATCHES.pop()
            dist.send(torch.zeros(1), dst=(dist.get_rank() + 1) % world_size(), group=group)
            thread.join()
            barrier()  # nobody leaves while a neighbour still listens
        dist.destroy_process_group()


def barrier() -> None:
    """Return when all ranks have called it."""
    any_rank(False)


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def own_part(n: int) -> range:
    """Return the items out of n that this rank works on, where all ranks share the work."""
    return range(dist.get_rank(), n, dist.get_world_size()) if dist.is_initialized() else range(n)


def merged(mine: dict) -> dict:
    """Return the results of all ranks in one dict, on all ranks."""
    return {key: value for of_rank in gather_objects(mine) for key, value in of_rank.items()}


def any_rank(flag: bool) -> bool:
    """True on all ranks if `flag` is true on at least one. Over gloo: nothing waits for a GPU."""
    return all_reduce_sum(torch.tensor(int(flag)), "any_rank").item() > 0


def all_reduce_sum(t: Tensor, operation: str = "all_reduce_sum") -> Tensor:
    """Add `t` up over the ranks, in place, and return it. Error messages call the collective `operation`."""
    if dist.is_initialized():
        issue(operation, dist.all_reduce, t)
    return t


def broadcast(t: Tensor) -> Tensor:
    """Overwrite `t` with rank 0's, in place, and return it."""
    if dist.is_initialized():
        issue("broadcast", dist.broadcast, t, src=0)
    return t


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's `value` (anything that pickles) in the order of the ranks, on all ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    issue("gather_objects", dist.all_gather_object, values, value, group=group)
    return values


def wait_together(future: futures.Future, timeout_s: float) -> None:
    """Wait for a future of which every rank has one, however long it takes while all ranks wait. Raise LostRank if
    another rank has not been seen waiting for timeout_s."""
    seen: dict[int, tuple[bytes, float]] = {}  # what each rank wrote last, and when we saw it first
    while dist.is_initialized() and not futures.wait([future], timeout=min(1, timeout_s / 4)).done:
        now, mine = time.monotonic(), dist.get_rank()
        with named_errors("wait for a save"):
            store = _get_default_store()
            store.set(f"ddp/waiting/{mine}", str(now))
            for rank in range(dist.get_world_size()):
                word = store.get(key) if store.check([key := f"ddp/waiting/{rank}"]) else b""
                if rank not in seen or seen[rank][0] != word:
                    seen[rank] = word, now
                if now - seen[rank][1] > timeout_s:
                    raise RuntimeError(f"rank {rank} has not been seen for {timeout_s:.0f} s")
    futures.wait([future])  # of the only rank


def new_group(timeout_s: float) -> dist.ProcessGroup | None:
    """Make a second gloo group, for a second thread; None without a process group. All ranks call it."""
    if not dist.is_initialized():
        return None
    with named_errors("new_group"):
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


def check_same_model(model: torch.nn.Module, options: str) -> None:
    """Raise UserError on all ranks unless they agree on options, names, order, shapes, dtypes and requires_grad."""
    mine = [options]
    mine += [f"{n} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for n, p in model.named_parameters()]
    mine += [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    everyone = gather_objects(mine)
    for rank, theirs in enumerate(everyone):
        for first, other in zip_longest(everyone[0], theirs, fillvalue="nothing"):
            if other != first:
                raise UserError(f"ddp: rank {rank} differs from rank 0: {other} instead of {first}")


def start_agreement(problem: str, where: str) -> Callable[[], None]:
    """Start to tell all ranks whether `problem` is empty here. Call the returned function to wait for their answers:
    it raises UserError on all ranks if any of them has a problem. One flag of 8 bytes over gloo."""
    flag, operation, work = torch.tensor(int(problem != "")), f"{where}: agreement that all is well", None
    if dist.is_initialized():
        work = issue(operation, partial(dist.all_reduce, async_op=True), flag)

    def check() -> None:
        if work is not None:
            with named_errors(operation):
                work.wait()
        if flag.item():
            problems = gather_objects(problem)
            rank = next(rank for rank, text in enumerate(problems) if text)
            raise UserError(f"ddp: rank {rank}, {where}: {problems[rank]}")

    return check


def issue(operation: str, function: Callable, *args: Any, **kwargs: Any) -> dist.Work | None:
    """Call a collective of torch.distributed. Error messages call it `operation`."""
    with named_errors(operation):
        return function(*args, **kwargs)


@contextmanager
def named_errors(operation: str, rank: int | None = None) -> Iterator[None]:
    """Turn the backend's error about a dead or silent rank into one line that says who was doing what."""
    try:
        yield
    except RuntimeError as error:
        rank = dist.get_rank() if rank is None else rank
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0]  # gloo adds advice
        raise LostRank(
            f"ddp: rank {rank}: {operation} failed; another rank has died or is stuck, look for its error"
            f"{finished_steps()} ({reason})"
        ) from error


def post_finished_steps(n_steps: int) -> None:
    """Note in the store how many steps this rank has finished (3 microseconds, waits for nothing)."""
    if dist.is_initialized():
        with named_errors("note of finished steps"):
            _get_default_store().set(f"ddp/steps/{dist.get_rank()}", str(n_steps))


def finished_steps() -> str:
    """How many steps each rank has finished, for an error; empty if the store does not answer within two seconds."""
    found: list[str] = []

    def read() -> None:
        try:
            store = _get_default_store()
            for rank in range(dist.get_world_size()):
                key = f"ddp/steps/{rank}"
                if store.check([key]):
                    found.append(f"rank {rank} {store.get(key).decode()}")
        except (RuntimeError, ValueError):  # the store died with the process that kept it
            return

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(2)
    return f"; steps finished: {', '.join(found)}" if found else ""
