"""The frame of tools/bench.py: sides that take turns, their statistics, limits of the machine, the
table and its JSON.

A side is a function without arguments that runs once and returns what it measured, usually seconds.
The sides take turns, and every round begins with another side, so a machine that becomes busy or
hot slows all of them alike. Ratios are taken within a round.
"""

import gc
import importlib.util
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from groundup.errors import UserError
from groundup.train import device as devices

PEERS = ("transformers", "tokenizers", "tiktoken", "sentencepiece", "datasketch", "trl")
# The settings of tools/bench.py, device and dtype as torch's; folder: a temporary one
Options = SimpleNamespace


@dataclass
class Case:
    """What a row measures at a time: sides, which take turns."""

    name: str  # model or data, and its size
    sides: dict[str, Callable[[], float]]  # ours, and those of peers
    unit: str
    peers: Collection[str] = ()
    work: float = 0.0  # how much of `unit` a turn does, for rates; 0 = the seconds themselves
    # one more side: its median over this number is the limit, in `unit`
    ceiling: tuple[Callable[[], float], float] | None = None
    unlimited: str = ""  # a side that this limit says nothing of
    notes: dict[str, str] = field(default_factory=dict)


@dataclass
class Line:
    """One side of a case: a line of the table and an object of the JSON file."""

    row: str  # train, ddp, ...
    case: str = ""
    side: str = ""  # ours, or the name of a peer
    unit: str = ""  # of samples and limit: a rate (more is better), s or GiB
    # One for each repeat; empty if it could not be measured
    samples: list[float] = field(default_factory=list)
    # {peer: speed-up: median, least, most}
    ratios: dict[str, list[float]] = field(default_factory=dict)
    limit: float = 0.0  # what the machine allows; 0 = none
    note: str = ""
    failed: bool = False  # the note holds the error

    @property
    def median(self) -> float:
        return median(self.samples)


def measure(row: str, case: Case, repeats: int) -> list[Line]:
    side, per = case.ceiling or (float, 1.0)  # without a ceiling the limit is 0
    seconds = alternate(case.sides | {"ceiling": side}, repeats)
    limit = median(seconds.pop("ceiling")) / per
    return lines(row, case, seconds, limit)


def lines(row: str, case: Case, seconds: dict[str, list[float]], limit: float = 0.0) -> list[Line]:
    """Return a line for each side that was measured."""
    found = []
    for name, times in seconds.items():
        samples = [case.work / s for s in times] if case.work else times
        line = Line(row, case.name, name, case.unit, samples, note=case.notes.get(name, ""))
        line.limit = 0.0 if name == case.unlimited else limit
        for peer in case.peers:
            if peer in seconds and name not in case.peers:
                # within a round, in which both had the same machine
                each = [b / a for a, b in zip(times, seconds[peer], strict=True)]
                line.ratios[peer] = [median(each), min(each), max(each)]
        found.append(line)
    return found


COLUMNS = "{:10} {:32} {:30} {:>9} {:7} {:>6} {:>8}  {}"
HEADER = COLUMNS.format(
    "row", "case", "side", "median", "unit", "spread", "of limit", "times the peer"
)


def text(line: Line) -> str:
    """Return a line of the table."""
    if not line.samples:
        return f"{line.row:10} {line.case:32} {line.side:30} {line.note}"
    parts = []
    for peer, (middle, least, most) in line.ratios.items():
        parts.append(f"{middle:.2f} ({least:.2f} to {most:.2f}) {peer}")
    parts += [line.note] if line.note else []
    number = f"{line.median:,.0f}" if line.median >= 1000 else f"{line.median:.4g}"
    spread = f"{100 * (max(line.samples) - min(line.samples)) / line.median:.0f}%"
    share = f"{100 * line.median / line.limit:.0f}%" if line.limit else ""
    figures = number, line.unit, spread, share, "; ".join(parts)
    return COLUMNS.format(line.row, line.case, line.side, *figures).rstrip()


def write_json(path: str, found: list[Line], hardware: str, command: str) -> None:
    """Write all samples and what they depend on."""
    medians = [{"median": line.median} if line.samples else {} for line in found]
    report = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command,
        "hardware": hardware,
        "versions": versions(),
        "load_average": os.getloadavg(),
        "lines": [asdict(line) | of for line, of in zip(found, medians, strict=True)],
    }
    Path(f"{path}.tmp").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(f"{path}.tmp", path)


def versions() -> dict[str, str]:
    """Return {package: version} of what we use and of the peers."""
    found = devices.versions()
    for name in PEERS:
        is_here = importlib.util.find_spec(name)
        found[name] = metadata.version(name) if is_here else "not installed"
    return found


def alternate(sides: dict[str, Callable], repeats: int) -> dict[str, list]:
    """Return {name: what each of `repeats` turns returned}, after a round that does not count."""
    names, found = list(sides), {name: [] for name in sides}
    for i in range(1 + repeats):
        # every round begins with another side
        for name in names[i % len(names) :] + names[: i % len(names)]:
            value = sides[name]()
            found[name] += [value] if i else []
    return found


def build(makers: dict[str, Callable]) -> dict[str, Any]:
    """Return {name: what its maker made}; say which are left out because their library cannot be
    imported.
    """
    made = {}
    for name, make in makers.items():
        try:
            made[name] = make()
        except ImportError as error:
            print(f"{name} is left out: {error}")
    return made


HERE = {}  # in the process of a side: the side


@contextmanager
def apart(makers: dict[str, Callable]) -> Iterator[dict[str, Any]]:
    """As `build`, each side in a process of its own, so that none reuses memory that another has
    taken from the system. Makers must be picklable and return (side, what is known about it); the
    side found here takes its turn there.
    """
    # spawn: a forked process cannot use a GPU that its parent has opened
    context = multiprocessing.get_context("spawn")
    # Ctrl-C ends the parent, and that ends these
    how = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    with ExitStack() as stack:

        def start(name: str, make: Callable) -> tuple[Callable, Any]:
            process = stack.enter_context(ProcessPoolExecutor(1, context, **how))
            about = ask(process, name, set_up, make)
            return partial(ask, process, name, take_turn), about

        yield build({name: partial(start, name, make) for name, make in makers.items()})


def ask(process: ProcessPoolExecutor, name: str, function: Callable, *arguments: Any) -> Any:
    """Return what a function returns in the process of a side. Raise UserError, with the side's
    name, if it fails or the process ends.
    """
    try:
        return process.submit(function, *arguments).result()
    except ImportError:
        raise  # see `build`
    except Exception as error:
        raise UserError(f"{name}: {type(error).__name__}: {error}") from error


def set_up(make: Callable) -> Any:
    HERE["side"], about = make()
    return about


def take_turn() -> Any:
    return HERE["side"]()


def seconds_of(call: Callable, clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    call()
    return clock() - begin


def device_seconds(call: Callable, device: torch.device) -> float:
    """Return the seconds until the device is done; on a CPU with a single thread CPU seconds, which
    other programs hardly change.
    """
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    devices.synchronize(device)
    clock = time.process_time if one_thread else time.perf_counter
    return seconds_of(lambda: (call(), devices.synchronize(device)), clock)


def repeated(step: Callable, device: torch.device, least_s: float = 0.2) -> Callable[[], float]:
    """Return a side: seconds per step, over enough steps in a row to take `least_s`."""
    step(), step()  # these compile, allocate and create the optimizer's state
    n = math.ceil(least_s / max(device_seconds(step, device), 1e-6))
    return lambda: device_seconds(lambda: [step() for _ in range(n)], device) / n


def release() -> None:
    """Free what earlier cases left: compiled code, reference cycles, unused blocks of a GPU."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def matmul(device: torch.device, dtype: torch.dtype) -> Callable[[], float]:
    """Return a side: FLOP/s of a large matrix product, the best of four."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return lambda: 2 * n**3 / min(device_seconds(lambda: a @ b, device) for _ in range(4))


def reading(n_bytes: int, device: torch.device) -> Callable[[], float]:
    """Return a side: bytes/s of a sum over `n_bytes` of memory, the median of five. On a GPU 20
    sums are timed together, because launching one takes as long as running it.
    """
    numbers, n_sums = torch.ones(n_bytes // 4, device=device), 20 if device.type == "cuda" else 1

    def sums() -> None:
        for _ in range(n_sums):
            numbers.sum()

    return lambda: n_sums * n_bytes / median(device_seconds(sums, device) for _ in range(5))
