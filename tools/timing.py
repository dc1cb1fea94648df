"""The frame of tools/bench.py: sides that take turns, their statistics, limits of the machine, the table and its JSON.

A side is a function without arguments that runs once and returns what it measured, usually seconds. The sides take
turns, and every round begins with another side, so a machine that becomes busy or hot slows all of them alike. Ratios
are taken within a round.
"""

import gc
import importlib.util
import json
import math
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent))

from groundup.errors import UserError

if TYPE_CHECKING:
    import torch  # imported where it is used: rows that measure text start without it

ROOT = Path(__file__).parent.parent
PEERS = ("transformers", "tokenizers", "tiktoken", "sentencepiece", "datasketch", "trl")
T = TypeVar("T")


@dataclass
class Options:
    """What every row is told; `keys` has the settings of tools/bench.py."""

    keys: dict[str, Any]
    device: "torch.device"
    dtype: "torch.dtype"
    folder: Path  # empty, for temporary files
    repeats: int

    @property
    def quick(self) -> bool:
        return self.keys["quick"]

    @property
    def few(self) -> int:
        """Repeats of what takes long: at most three, unless the user set `repeats`."""
        return self.repeats if self.keys["repeats"] else min(self.repeats, 3)


@dataclass
class Line:
    """One side of a measurement: a line of the table and an object of the JSON file."""

    row: str  # train, ddp, ...
    case: str  # model or data, and its size
    side: str  # ours, or the name of a peer
    unit: str  # of samples and limit: a rate (more is better), s or GiB
    samples: list[float] = field(default_factory=list)  # one for each repeat; empty if it could not be measured
    ratios: dict[str, list[float]] = field(default_factory=dict)  # {peer: speed-up: median, least, most}
    limit: float = 0.0  # what the machine allows, or what we promise; 0 = none
    note: str = ""
    failed: bool = False  # the note holds the error

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def spread(self) -> float:
        """(most - least) / median."""
        return (max(self.samples) - min(self.samples)) / self.median


def lines(
    row: str, case: str, seconds: dict[str, list[float]], unit: str, peers: Iterable[str], work: float = 0.0,
    limit: float = 0.0, notes: dict[str, str] | None = None,
) -> list[Line]:  # fmt: skip
    """Return a line for each side. work: how much of `unit` a turn does, for rates; 0 = the seconds themselves."""
    peers = [name for name in peers if name in seconds]
    found = []
    for name, times in seconds.items():
        samples = [work / s for s in times] if work else times
        ratios = {peer: speedup(times, seconds[peer]) for peer in peers if name not in peers}
        found.append(Line(row, case, name, unit, samples, ratios, limit, (notes or {}).get(name, "")))
    return found


def speedup(seconds: list[float], peer: list[float]) -> list[float]:
    """Return [median, least, most] of the peer's seconds / ours, round by round."""
    each = [theirs / ours for ours, theirs in zip(seconds, peer, strict=True)]
    return [median(each), min(each), max(each)]


def missing_lines(row: str, case: str, missing: dict[str, str]) -> list[Line]:
    """Return the lines of sides that `build` could not make."""
    return [Line(row, case, name, "", note=note) for name, note in missing.items()]


def failure(row: str, case: str, side: str, error: Exception) -> Line:
    """Return the line of a side that raised `error`; print the traceback of an error that is not the user's."""
    if isinstance(error, ImportError):
        return Line(row, case, side, "", note=needs(error))
    if not isinstance(error, UserError):
        traceback.print_exception(error)
    return Line(row, case, side, "", note=f"failed: {one_line(error)}", failed=True)


def needs(error: ImportError) -> str:
    """Return what to install, or why an installed library cannot be imported."""
    if not isinstance(error, ModuleNotFoundError):
        return f"cannot be imported: {one_line(error)}"
    return f"needs pip install {(error.name or str(error)).partition('.')[0]}"


def one_line(error: BaseException) -> str:
    """Return the type and the beginning of the message; of a UserError only the message."""
    said = " ".join(str(error).split())[:300]
    return said if isinstance(error, UserError) else f"{type(error).__name__}: {said}"


HEADER = f"{'row':10} {'case':32} {'side':30} {'median':>9} {'unit':7} {'spread':>6} {'of limit':>8}  times the peer"


def text(line: Line) -> str:
    """Return a line of the table."""
    begin = f"{line.row:10} {line.case:32} {line.side:30} "
    if not line.samples:
        return f"{begin}{line.note}"
    share = f"{100 * line.median / line.limit:.0f}%" if line.limit else ""
    parts = [f"{middle:.2f} ({least:.2f} to {most:.2f}) {peer}" for peer, (middle, least, most) in line.ratios.items()]
    parts += [line.note] if line.note else []
    number = f"{line.median:9,.0f}" if line.median >= 1000 else f"{line.median:9.4g}"
    return f"{begin}{number} {line.unit:7} {100 * line.spread:5.0f}% {share:>8}  {'; '.join(parts)}".rstrip()


def write_json(path: str, found: list[Line], hardware: str, command: str) -> None:
    """Write all samples and what they depend on."""
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": command, "hardware": hardware}
    report |= {"versions": versions(), "load_average": os.getloadavg()}
    report["lines"] = [asdict(line) | ({"median": line.median, "spread": line.spread} if line.samples else {})
                       for line in found]  # fmt: skip
    Path(f"{path}.tmp").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(f"{path}.tmp", path)


def versions() -> dict[str, str]:
    """Return {package: version} of what we use and of the peers."""
    from groundup.train import device

    peers = {name: metadata.version(name) if importlib.util.find_spec(name) else "not installed" for name in PEERS}
    return device.versions() | peers


# ---- turns ----------------------------------------------------------------------------------------------------------


def alternate(sides: dict[str, Callable[[], T]], repeats: int, warmups: int = 1) -> dict[str, list[T]]:
    """Return {name: what each of `repeats` turns returned}, after `warmups` rounds that do not count."""
    names, found = list(sides), {name: [] for name in sides}
    for i in range(warmups + repeats):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            value = sides[name]()
            found[name] += [value] if i >= warmups else []
    return found


def build(makers: dict[str, Callable[[], T]]) -> tuple[dict[str, T], dict[str, str]]:
    """Return ({name: what its maker made}, {name: what to install} of those whose library cannot be imported)."""
    made, missing = {}, {}
    for name, make in makers.items():
        try:
            made[name] = make()
        except ImportError as error:
            missing[name] = needs(error)
    return made, missing


def wall_seconds(call: Callable) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def cpu_seconds(call: Callable) -> float:
    """Return the CPU seconds of this process: use it for one thread, other programs hardly change them."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def device_seconds(call: Callable, device: "torch.device") -> float:
    """Return the seconds until the device is done; on a CPU with a single thread CPU seconds."""
    import torch

    from groundup.train.device import synchronize

    def ended() -> None:
        call()
        synchronize(device)

    synchronize(device)
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    return (cpu_seconds if one_thread else wall_seconds)(ended)


def repeated(step: Callable, device: "torch.device", least_s: float = 0.2) -> Callable[[], float]:
    """Return a side: seconds per step, over as many steps in a row as take `least_s`. Two steps run here first: they
    compile, allocate and create the optimizer's state."""
    step(), step()
    n = math.ceil(least_s / max(device_seconds(step, device), 1e-6))
    return lambda: device_seconds(lambda: [step() for _ in range(n)], device) / n


def release() -> None:
    """Free what earlier cases left: compiled code, reference cycles, unused blocks of a GPU."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- limits of the machine, processes -------------------------------------------------------------------------------


def matmul(device: "torch.device", dtype: "torch.dtype") -> Callable[[], float]:
    """Return a side: FLOP/s of a large matrix product, the best of four."""
    import torch

    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return lambda: 2 * n**3 / min(device_seconds(lambda: a @ b, device) for _ in range(4))


def reading(n_bytes: int, device: "torch.device") -> Callable[[], float]:
    """Return a side: bytes/s of a sum over `n_bytes` of memory, the median of five. On a GPU 20 sums are timed
    together, because launching one takes as long as running it."""
    import torch

    numbers, n_sums = torch.ones(n_bytes // 4, device=device), 20 if device.type == "cuda" else 1

    def sums() -> None:
        for _ in range(n_sums):
            numbers.sum()

    return lambda: n_sums * n_bytes / median(device_seconds(sums, device) for _ in range(5))


def write_bytes(path: Path, n_bytes: int) -> None:
    """Write `n_bytes` in large blocks and wait until the disk has them."""
    block = random.Random(0).randbytes(2**24)  # a file system may compress zeros
    with open(path, "wb", buffering=0) as f:
        for begin in range(0, n_bytes, len(block)):
            f.write(block[: n_bytes - begin])
        os.fsync(f.fileno())


def until_line(command: list[str], start: str) -> tuple[float, str]:
    """Start a process and stop it at its first line that begins with `start`; return (seconds until then, all that it
    printed). Raise UserError if it ends without such a line."""
    begin, printed = time.perf_counter(), ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            printed += line
            if line.startswith(start):
                seconds = time.perf_counter() - begin
                process.kill()
                return seconds, printed
    raise UserError(f"bench: {' '.join(command[1:3])} ... ended without a line {start!r}: {printed.strip()[-300:]!r}")


def compare_sides(
    row: str, case: str, calls: dict[str, Callable], unit: str, peers: Iterable[str], work: float, repeats: int,
) -> list[Line]:  # fmt: skip
    """Return rates (`work` per CPU second) of calls that take turns in this process."""
    sides = {name: partial(cpu_seconds, call) for name, call in calls.items()}
    return lines(row, case, alternate(sides, repeats), unit, peers, work)
