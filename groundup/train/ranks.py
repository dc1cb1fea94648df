"""Process group and rank helpers: who am I, what do the others hold, and one line when one of them is lost.

Everything works without a process group too, as a world of one. ddp.py passes these names on, so scripts say ddp.init.
"""

import os
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

# Its functions take the process group of the moment as default arguments, for good. torch._dynamo imports it at some
# point; after init() it would keep the group and its threads alive until the interpreter shuts down, and a thread that
# then drops a tensor aborts the process ("terminate called without an active exception").
import torch.distributed.nn.functional  # noqa: F401
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from groundup.errors import UserError


@dataclass(frozen=True)
class World:
    """Who this process is: `rank` of `world_size` in all, `local_rank` on this machine (= the index of its GPU)."""

    rank: int
    local_rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """True on the one process that prints and writes files."""
        return self.rank == 0


def init(device_type: str = "cpu", timeout_s: float = 300, debug: bool = False) -> World:
    """Join the process group that torchrun describes in the environment; alone and without a group if there is none.

    A collective that waits longer than `timeout_s` for another rank fails. With `device_type` "cuda" this process takes
    GPU number LOCAL_RANK, CUDA tensors travel over NCCL, and CPU tensors (flags, counts) still over gloo. `debug`
    compares every collective with rank 0's before it starts: slow, but it names the line of the script that differs.
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
    bulletin.debug, bulletin.n_collectives = debug, 0
    return world


def meeting_place(world: World, timeout_s: float) -> dist.Store:
    """A store at MASTER_ADDR whose keys are those of this start alone.

    torchrun (2.13) keeps one store over all its restarts, in which a new rank finds the addresses of dead ones and
    waits for them; and its count of restarts may differ between machines. So rank 0 gives a prefix to every rank that
    answers: each says a word of its own, is told the prefix under that word, and confirms. Dead ranks never confirm.
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
    """Leave the process group once all ranks have come here. Only after success: others may not come after an error."""
    if dist.is_initialized():
        barrier()
        dist.destroy_process_group()


def barrier() -> None:
    """Return when all ranks have called it."""
    any_rank(False)


def all_reduce_sum(t: Tensor, operation: str = "all_reduce_sum") -> Tensor:
    """Add `t` up over the ranks, in place; returns it. `operation` is what errors call it."""
    if dist.is_initialized():
        issue(operation, dist.all_reduce, t)
    return t


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def any_rank(flag: bool, operation: str = "any_rank") -> bool:
    """True on all ranks if `flag` is true on at least one. Over gloo: no GPU has to be waited for."""
    return all_reduce_sum(torch.tensor(int(flag)), operation).item() > 0


def new_group(timeout_s: float) -> dist.ProcessGroup | None:
    """A second gloo group of all ranks, for a second thread; None without a process group. All ranks call it."""
    if not dist.is_initialized():
        return None
    with named_errors("new_group"):
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value` (anything that pickles), in the order of the ranks, on all ranks. group: of new_group."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    issue("gather_objects", dist.all_gather_object, values, value, group=group)
    return values


def broadcast(t: Tensor) -> Tensor:
    """Overwrite `t` with rank 0's, in place; returns it."""
    if dist.is_initialized():
        issue("broadcast", dist.broadcast, t, src=0)
    return t


def start_agreement(problem: str, where: str) -> Callable[[], None]:
    """Start to tell all ranks whether `problem` is empty here. The returned function waits for their answers and raises
    DDPError on all ranks if one has a problem. A flag of 8 bytes over gloo: no GPU has to be waited for."""
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


def check_same_model(model: torch.nn.Module, options: str) -> None:
    """Raise DDPError on all ranks unless they agree on options, names, order, shapes, dtypes and requires_grad."""
    mine = [options]
    mine += [f"{n} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for n, p in model.named_parameters()]
    mine += [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    everyone = gather_objects(mine)
    for rank, theirs in enumerate(everyone):
        for first, other in zip_longest(everyone[0], theirs, fillvalue="nothing"):
            if other != first:
                raise UserError(f"ddp: rank {rank} differs from rank 0: {other} instead of {first}")


def check_equal(tensors: dict[str, Tensor], when: str) -> None:
    """Raise DDPError on all ranks unless every tensor has the same bits on all."""
    everyone = gather_objects([zlib.crc32(t.detach().cpu().view(torch.uint8).numpy()) for t in tensors.values()])
    for rank, theirs in enumerate(everyone):
        for name, first, other in zip(tensors, everyone[0], theirs, strict=True):
            if first != other:
                raise UserError(f"ddp: {when} rank {rank} holds other weights than rank 0 in {name}")


def moved(names: list[str]) -> str:
    return f"{listed(names)} left the flat buffer; call model.to() and load_state_dict(assign=True) before DDP(model)"


def listed(names: list[str]) -> str:
    """The first five names and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def issue(operation: str, function: Callable, *args: Any, **kwargs: Any) -> dist.Work | None:
    """Call a collective of torch.distributed; all of ours go through here. `operation` is what errors call it."""
    if bulletin.debug and kwargs.get("group") is None:  # another group's turn is another thread's
        sizes = [t.numel() for t in args if isinstance(t, Tensor)]
        bulletin.compare(f"{operation} of {sizes[0]} elements" if len(sizes) == 1 else operation)  # two: may differ
    with named_errors(operation):
        return function(*args, **kwargs)


@contextmanager
def named_errors(operation: str, rank: int | None = None) -> Iterator[None]:
    """Turn the backend's error for a lost or silent rank into one line that says who was doing what."""
    try:
        yield
    except RuntimeError as error:
        rank = dist.get_rank() if rank is None else rank
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0]  # gloo adds advice
        raise UserError(
            f"ddp: rank {rank}: {operation} failed; another rank has died or is stuck, look for its error"
            f"{bulletin.read()} ({reason})"
        ) from error


class Bulletin:
    """What ranks tell each other beside the collectives: notes in the store at which they met, which can be read even
    when a collective would hang or crash."""

    debug = False
    n_collectives = 0

    def post(self, n_steps: int) -> None:
        """Note how many steps this rank has finished (a message of 3 microseconds, nothing is waited for)."""
        if dist.is_initialized():
            with named_errors("note of finished steps"):
                _get_default_store().set(f"ddp/steps/{dist.get_rank()}", str(n_steps))

    def read(self) -> str:
        """Who has finished how many steps, for an error; empty if nobody can tell within two seconds."""
        found: list[str] = []
        thread = threading.Thread(target=self._read, args=(found,), daemon=True)
        thread.start()
        thread.join(2)
        return f"; steps finished: {', '.join(found)}" if found else ""

    def _read(self, found: list[str]) -> None:
        try:
            store = _get_default_store()
            for rank in range(dist.get_world_size()):
                key = f"ddp/steps/{rank}"
                if store.check([key]):
                    found.append(f"rank {rank} {store.get(key).decode()}")
        except (RuntimeError, ValueError):  # the store is lost with the process that kept it
            return

    def compare(self, what: str) -> None:
        """Raise DDPError if rank 0's collective of this number is another one."""
        key, rank = f"ddp/collective/{self.n_collectives}", dist.get_rank()
        self.n_collectives += 1
        if rank == 0:
            _get_default_store().set(key, what)
            return
        with named_errors(f"waiting for rank 0 to come to {what}"):
            other = _get_default_store().get(key).decode()
        if other != what:
            raise UserError(
                f"ddp: collective {self.n_collectives} is {what} on rank {rank}, but {other} on rank 0; "
                "every rank must take the same branches"
            )


bulletin = Bulletin()
