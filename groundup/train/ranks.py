"""The process group: join it, leave it, and talk to the other ranks through it.

A rank is one of the processes that torchrun starts. Without torchrun every function works as in a
world of one rank. If a rank dies or hangs, the others end with one line that names the operation.
"""

import contextlib
import os
import re
import signal
import socket
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# torch._dynamo imports this module at some point. It keeps the process group as a default argument:
# after init() that would keep the group's threads alive at exit, and they would abort the process.
import torch.distributed.nn.functional  # noqa: F401
from torch import Tensor, nn

from groundup.errors import LostRank, Stopped, UserError
from groundup.train.device import choose_device

# ---- join and leave ------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """Who this process is."""

    rank: int  # among all processes, from 0
    local_rank: int  # among those of its machine; also the index of its GPU
    world_size: int  # number of processes

    @property
    def is_main(self) -> bool:
        """Return True on the one process that prints and writes files."""
        return self.rank == 0


def described_world() -> World:
    """Return the world that torchrun describes in the environment, else a world of one."""
    # A shell or a scheduler may have left WORLD_SIZE; only torchrun sets RANK too.
    if "RANK" not in os.environ:
        return World(rank=0, local_rank=0, world_size=1)
    needed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    absent = ", ".join(key for key in needed if key not in os.environ)
    if absent:
        text = f"RANK is set in the environment but {absent} is not; start with torchrun"
        raise UserError(f"ddp: {text}, or unset RANK to train in one process")
    world = World(*(number_in(key) for key in needed[:3]))
    number_in("MASTER_PORT", 1, most=65535)
    if world.rank >= world.world_size:
        raise UserError(f"ddp: RANK={world.rank} must be below WORLD_SIZE={world.world_size}")
    return world


def number_in(key: str, least: int = 0, most: int = sys.maxsize) -> int:
    """Return the whole number that a variable of the environment holds; absent means `least`."""
    text = os.environ.get(key, str(least))
    if not re.fullmatch("[0-9]{1,18}", text) or not least <= int(text) <= most:
        bounds = f"of at least {least}" if most == sys.maxsize else f"from {least} to {most}"
        wrong = f"{key}={text!r} in the environment is no whole number {bounds}"
        raise UserError(f"ddp: {wrong}; start with torchrun, or unset {key}")
    return int(text)


def planned_world_size() -> int:
    """Return the number of ranks to plan for: WORLD_SIZE, which may be set by hand."""
    return number_in("WORLD_SIZE", 1)


def init(device: torch.device | str = "cpu", timeout_s: float = 300) -> World:
    """Join the process group that torchrun describes. Without torchrun return a world of one.

    A collective fails if it waits longer than `timeout_s` for another rank."""
    world = described_world()
    if "RANK" not in os.environ:
        return world

    # Each rank takes its own GPU.
    device = choose_device(str(device), world.local_rank)
    on_gpu = device.type == "cuda"
    name_interface()
    advice = "; between machines, GLOO_SOCKET_IFNAME names the network interface to use"
    with named_errors("init_process_group", f"{advice} (docs/running.md)"):
        dist.init_process_group(
            # CUDA tensors travel over NCCL, CPU tensors (flags, counts) over gloo.
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=meeting_place(world, timeout_s),
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if on_gpu else None,
        )
        barrier()  # if a rank ended now, on a wrong setting, the others would lose its store
    return world


def name_interface() -> None:
    """Set GLOO_SOCKET_IFNAME where gloo would take an address that other machines cannot reach."""
    # gloo takes the address of this machine's name, which Debian's /etc/hosts makes 127.0.1.1.
    own, main = address_of(socket.gethostname()), address_of(os.environ["MASTER_ADDR"])  # IPv4
    if own.startswith("127.") and main and not main.startswith("127."):
        if interface := interface_to(main):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def address_of(name: str) -> str:
    """Return the IPv4 address of a machine, "" if its name is unknown."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def interface_to(address: str) -> str:
    """Return the network interface that leads to an IPv4 address, "" if the system does not say."""
    table = Path("/proc/net/route")  # Linux: a line per route, with net and mask in hexadecimal
    lines = table.read_text(encoding="utf-8").splitlines()[1:] if table.exists() else []
    target = int.from_bytes(socket.inet_aton(address), "little")
    routes = []  # (bits of the mask, interface) of all nets that hold the address
    for name, net, *_, mask, _, _, _ in map(str.split, lines):
        if target & int(mask, 16) == int(net, 16):
            routes.append((int(mask, 16).bit_count(), name))
    return max(routes, default=(0, ""))[1]  # the narrowest net, as the system routes a packet


def meeting_place(world: World, timeout_s: float) -> dist.Store:
    """Return a key-value store at MASTER_ADDR whose keys belong to this start of the ranks."""
    # torchrun (2.13) keeps one store over all restarts, so a new rank would find the addresses of
    # dead ranks and wait for them. Its restart count may differ between machines.
    hosted_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_host = world.is_main and not hosted_by_torchrun
    store = open_store(world.world_size, is_host, timeout_s)

    # Rank 0 hands out a fresh prefix: each other rank posts a random word, finds the prefix under
    # that word, and confirms. Dead ranks never confirm.
    word = uuid.uuid4().hex  # of this start; rank 0's is the prefix
    if not world.is_main:
        store.set(f"ddp/word/{world.rank}", word)
        prefix = store.get(f"ddp/prefix/{word}").decode()  # waits for rank 0
        store.set(f"ddp/confirmed/{prefix}/{world.rank}", "")
        return dist.PrefixStore(prefix, store)

    deadline = time.monotonic() + timeout_s
    for other in range(1, world.world_size):
        # Its word may be a dead rank's until the new one posts its own, so answer again and again.
        while not store.check([f"ddp/confirmed/{word}/{other}"]):
            if store.check([f"ddp/word/{other}"]):
                their_word = store.get(f"ddp/word/{other}").decode()
                store.set(f"ddp/prefix/{their_word}", word)
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {other} has not come within {timeout_s:.0f} s")
            time.sleep(0.005)  # seconds
    return dist.PrefixStore(word, store)


def open_store(world_size: int, is_host: bool, timeout_s: float) -> dist.Store:
    """Return the store at MASTER_ADDR and MASTER_PORT."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    wait = timedelta(seconds=timeout_s)
    # In a thread, because another program at this port may never answer, and torch would wait.
    # meeting_place, not torch, waits for the other ranks, and knows who is missing.
    thread = futures.ThreadPoolExecutor(1)
    args = (address, port, world_size, is_host, wait)
    store = thread.submit(dist.TCPStore, *args, wait_for_workers=False)
    try:
        return store.result(timeout_s + 1)
    except (TimeoutError, RuntimeError) as error:
        # torch's own words, if this rank could not listen
        if is_host and str(error):
            raise
        text = f"what listens at {address}:{port} is not rank 0; use another MASTER_PORT"
        try:
            socket.create_connection((address, port), 1).close()
        except OSError as reason:
            text = f"rank 0 cannot be reached at MASTER_ADDR and MASTER_PORT, {address}:{port}"
            text += f": {reason.strerror or reason}"
        raise RuntimeError(text) from None


def close() -> None:
    """Leave the process group. Do not call it after an error: it waits for all ranks."""
    if dist.is_initialized():
        barrier()
        dist.destroy_process_group()


def new_group(timeout_s: float) -> dist.ProcessGroup | None:
    """Make a gloo group for a second thread. All ranks call it."""
    # Collectives of two threads in one group could meet in another order on another rank.
    if not dist.is_initialized():
        return None
    with named_errors("new_group"):
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


# ---- who we are, and how work is shared ----------------------------------------------------------


def world_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this rank, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def own_part(n: int) -> range:
    """Return the items out of n that this rank works on, where all ranks share the work."""
    return range(rank(), n, world_size())


# ---- work that one rank does for all -------------------------------------------------------------

SLOW_DISK_S = 6 * 3600  # ranks wait this long for the slowest disk; a dead rank is noticed at once


def on_rank_0(function: Callable) -> Callable:
    """Decorate a function: rank 0 runs it, and all return its result or raise its UserError."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return run_on(rank() == 0, function, *args, **kwargs)

    return call


def run_on(runs_here: bool, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call function(*args, **kwargs) on the ranks where `runs_here`; all return rank 0's result.

    All ranks call it; if one raises a UserError, all do."""
    result, problem = None, ""
    if runs_here:
        try:
            result = function(*args, **kwargs)
        except UserError as error:
            problem = str(error)
    # A group of its own: to read 100 GB takes longer than ranks usually wait for each other.
    outcomes = gather_objects((result, problem), new_group(SLOW_DISK_S))
    for _, problem in outcomes:
        if problem:
            raise UserError(problem)
    return outcomes[0][0]


# ---- collectives: all ranks call them, in the same order -----------------------------------------


def barrier() -> None:
    """Return when all ranks have called it."""
    any_rank(False)


def any_rank(flag: bool) -> bool:
    """Return True on all ranks if `flag` is true on at least one."""
    # A CPU tensor travels over gloo, so no GPU waits.
    return all_reduce_sum(torch.tensor(int(flag)), "any_rank").item() > 0


def all_reduce_sum(t: Tensor, operation: str = "all_reduce_sum") -> Tensor:
    """Add `t` up over the ranks, in place, and return it."""
    if dist.is_initialized():
        issue(operation, dist.all_reduce, t)
    return t


def broadcast(t: Tensor) -> Tensor:
    """Overwrite `t` with rank 0's, in place, and return it."""
    if dist.is_initialized():
        issue("broadcast", dist.broadcast, t, src=0)
    return t


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP has divided the weights of a model among the ranks."""
    return hasattr(model, "reshard")


def broadcast_weights(model: nn.Module) -> None:
    """Overwrite a model's weights and buffers with rank 0's, unless FSDP has divided them."""
    tensors = () if is_sharded(model) else (*model.parameters(), *model.buffers())
    for t in tensors:
        broadcast(t.data)


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's `value` (anything that pickles), in the order of the ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * world_size()  # filled below
    issue("gather_objects", dist.all_gather_object, values, value, group=group)
    return values


def check_equal(mine: dict) -> None:
    """Raise UserError on all ranks, naming a key whose value differs from rank 0's.

    Machines may also have other code: of the project's files the checksums must be equal."""
    # Every rank sees all values, so all find the same difference and end with the same line.
    everyone = gather_objects(mine | checksums_of_code() if world_size() > 1 else mine)
    first = everyone[0]
    for other, theirs in enumerate(everyone):
        for key in first | theirs:
            if theirs.get(key) != first.get(key):
                found = f"rank {other} has {key}={theirs.get(key)}, rank 0 has {first.get(key)}"
                need = "all ranks need the same command, code, data and out_dir"
                raise UserError(f"train: {found}; {need}")


def checksums_of_code() -> dict[str, int]:
    """Return {file: CRC-32} of the script, the model and groundup/."""
    root = Path(__file__).parents[2]
    names = {"model.py", "ddp.py", "configurator.py", "tokenizer.py", Path(sys.argv[0]).name}
    files = [*(root / name for name in names), *root.glob("groundup/**/*.py")]
    found = {}
    for path in files:
        # Not an editor's .#model.py or .ipynb_checkpoints/. Line ends may differ between systems.
        name = path.relative_to(root).as_posix()
        if path.is_file() and "/." not in f"/{name}":
            found[name] = zlib.crc32(path.read_bytes().replace(b"\r\n", b"\n"))
    return found


def check_replicas(weights: list[Tensor]) -> None:
    """Raise UserError on all ranks if they no longer train the same weights: flat tensors."""
    if world_size() == 1:
        return
    # 128 sums of each bucket are quick to send, and differ between ranks, relatively, as much as
    # the weights do.
    sums = []
    for flat in weights:
        whole = flat.detach()[: flat.numel() // 128 * 128]
        sums.append(whole.view(-1, 128).sum(0, dtype=torch.float32).cpu())
    mine = torch.cat(sums) if sums else torch.zeros(1)
    first, *others = gather_objects(mine)
    for other, theirs in enumerate(others, 1):
        # Relative, so that it does not depend on the size of the model. Where processors differ, so
        # does the rounding, by 1e-5; other code makes far more than 1e-3.
        difference = (theirs - first).norm() / first.norm().clamp(min=1e-30)
        if difference > 1e-3:  # False for nan, which the loop reports
            text = f"the weights of rank {other} differ from those of rank 0 by {difference:.1e}"
            raise UserError(f"train: {text}; all machines need the same code and sound hardware")


def start_agreement(problem: str, where: str, stop: bool = False) -> Callable[[], bool]:
    """Start to tell all ranks whether `problem` is empty here, and whether this rank should stop.

    Return a function that waits for their answers. If a rank has a problem it raises on all ranks,
    else it returns whether any rank should stop."""
    # 16 bytes over gloo. Work between the two calls hides the latency.
    flags = torch.tensor([problem != "", stop], dtype=torch.int64)
    operation = f"{where}: agreement that all is well"
    work = None
    if dist.is_initialized():
        work = issue(operation, dist.all_reduce, flags, async_op=True)

    def check() -> bool:
        # A rank alone reads no tensor, which would wait for the device; a test runs a step with
        # tensors that have no data, to show that nothing waits.
        n_problems, n_stopping = problem != "", stop
        if work is not None:
            with named_errors(operation):
                work.wait()
            n_problems, n_stopping = flags.tolist()
        # Only now the texts: most steps have none.
        if n_problems:
            problems = gather_objects(problem)
            other = next(i for i, text in enumerate(problems) if text)
            raise UserError(f"ddp: rank {other}, {where}: {problems[other]}")
        return n_stopping > 0

    return check


def wait_together(future: futures.Future) -> None:
    """Wait for work in a thread, such as a save, on every rank. It may take any time.

    Raise LostRank if another rank does not come to wait, or no longer does."""
    # Ask again and again: the work may take longer than a collective waits for a rank.
    all_done = False
    while not all_done:
        futures.wait([future], timeout=0.25)  # seconds
        n_waiting = all_reduce_sum(torch.tensor(int(not future.done())), "wait for a save")
        all_done = n_waiting.item() == 0


# ---- errors and signals --------------------------------------------------------------------------


def issue(operation: str, function: Callable, *args: Any, **kwargs: Any) -> dist.Work | None:
    """Call a collective of torch.distributed under a name for error messages."""
    with named_errors(operation):
        return function(*args, **kwargs)


@contextmanager
def named_errors(operation: str, advice: str = "") -> Iterator[None]:
    """Turn the backend's error about a lost rank into one line."""
    try:
        yield
    except RuntimeError as error:
        # The first sentence says why; gloo adds advice.
        text = str(error).strip() or type(error).__name__
        reason = text.splitlines()[0].split(". ")[0]
        raise LostRank(
            f"ddp: rank {os.environ.get('RANK', 0)}: {operation} failed; "
            f"another rank has died or is stuck, look for its error ({reason}){advice}"
        ) from error


class StopSignal:
    """Turn a signal to stop into a flag. The loop gives it to ddp.step(), saves and ends."""

    # Ctrl-C, a scheduler's SIGTERM, a closed terminal's SIGHUP, and Slurm's --signal=USR1. Windows
    # lacks the last two.
    NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")

    # Before `begin` a signal ends the process at once, and so does a second Ctrl-C. (A save that is
    # being written is completed.)
    def __init__(self) -> None:
        self.begun = False
        # 128 + the signal's number, as shells have it. SIGTERM's for a rank that stops because
        # another one received a signal.
        self.exit_code = 128 + signal.SIGTERM
        self.received_at: float | None = None  # seconds, the first one
        for name in self.NAMES:
            number = getattr(signal, name, None)
            if number is None:
                continue
            # nohup ignores SIGHUP, and so it stays.
            if name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    def __call__(self) -> bool:
        """Return whether this rank has received a signal."""
        return self.received_at is not None

    def begin(self) -> None:
        """Let signals wait for a step to end, from now on."""
        self.begun = True

    def _handle(self, number: int, frame: object) -> None:
        if not self.begun:
            raise Stopped(number)
        # A terminal sends Ctrl-C to every process and torchrun sends it again, so a second one
        # counts only after two seconds.
        if self.received_at is None:
            self.received_at, self.exit_code = time.monotonic(), 128 + number
            if number == signal.SIGINT and rank() == 0:
                # Not print, which must not run within another print. Ctrl-C ends a `| tee`, too.
                with contextlib.suppress(OSError):
                    os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")
        elif number == signal.SIGINT and time.monotonic() - self.received_at > 2:
            raise KeyboardInterrupt
