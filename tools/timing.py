"""One thing measured beside another: turns, statistics, what the machine allows at most, the table and its JSON file.

A side is a function without arguments that runs once and returns what it measured, mostly seconds. Sides take turns
within a round and every round begins with another side, so that a machine that grows busy or warm slows all alike;
ratios are formed within a round.
"""

import gc
import json
import math
import mmap
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent))

from groundup.errors import UserError
from groundup.train.direct_file import open_new

if TYPE_CHECKING:
    import torch  # else where it is used: tools that measure text start without it

ROOT = Path(__file__).parent.parent
PEERS = ("transformers", "tokenizers", "tiktoken", "sentencepiece", "datasketch")
T = TypeVar("T")





# ---- turns ----------------------------------------------------------------------------------------------------------


def alternate(sides: dict[str, Callable[[], T]], repeats: int, warmups: int = 1) -> dict[str, list[T]]:
    """{name: what each of `repeats` turns returned}, after `warmups` rounds that do not count."""
    names, found = list(sides), {name: [] for name in sides}
    for i in range(warmups + repeats):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            value = sides[name]()
            found[name] += [value] if i >= warmups else []
    return found


def build(makers: dict[str, Callable[[], T]]) -> tuple[dict[str, T], dict[str, str]]:
    """({name: what its maker made}, {name: what is missing} of those whose library cannot be imported)."""
    made, missing = {}, {}
    for name, make in makers.items():
        try:
            made[name] = make()
        except ImportError as error:
            missing[name] = needs(error)
    return made, missing


def needs(error: ImportError) -> str:
    """What to do about it, in a line."""
    if not isinstance(error, ModuleNotFoundError):
        return f"cannot be imported: {one_line(error)}"
    return f"needs pip install {(error.name or str(error)).partition('.')[0]}"


def one_line(error: BaseException) -> str:
    """Its type and the beginning of what it says; of our own errors only that."""
    said = " ".join(str(error).split())[:300]
    return said if isinstance(error, UserError) else f"{type(error).__name__}: {said}"


def release() -> None:
    """Give back what earlier cases have left: compiled code, objects that refer to each other, a GPU's free blocks."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def wall_seconds(call: Callable) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def cpu_seconds(call: Callable) -> float:
    """Seconds of the processor in this process: for one thread, which other programs then disturb little."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def device_seconds(call: Callable, device: "torch.device") -> float:
    """Seconds until the device is done; on a CPU with a single thread those of the processor."""
    import torch

    from groundup.train import device

    def ended() -> None:
        call()
        device.synchronize(device)

    device.synchronize(device)
    one_thread = device.type == "cpu" and torch.get_num_threads() == 1
    return (cpu_seconds if one_thread else wall_seconds)(ended)


def repeated(step: Callable, device: "torch.device", least_s: float = 0.2) -> Callable[[], float]:
    """A side: seconds per step, of as many steps in a row as take `least_s`. The first two are done here: they compile,
    allocate, and make the optimizer's state."""
    step(), step()
    n = math.ceil(least_s / max(device_seconds(step, device), 1e-6))
    return lambda: device_seconds(lambda: [step() for _ in range(n)], device) / n


# ---- what the machine allows ----------------------------------------------------------------------------------------


def matmul(device: "torch.device", dtype: "torch.dtype") -> Callable[[], float]:
    """A side: FLOP/s of a large matrix product, the best of four."""
    import torch

    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return lambda: 2 * n**3 / min(device_seconds(lambda: a @ b, device) for _ in range(4))


def reading(n_bytes: int, device: "torch.device") -> Callable[[], float]:
    """A side: bytes/s at which a sum runs over `n_bytes` of memory, the median of five. On a GPU many sums are timed
    together: to start one and to wait for it takes as long as it runs."""
    import torch

    numbers, n_sums = torch.ones(n_bytes // 4, device=device), 20 if device.type == "cuda" else 1

    def sums() -> None:
        for _ in range(n_sums):
            numbers.sum()

    return lambda: n_sums * n_bytes / median(device_seconds(sums, device) for _ in range(5))


def writing(path: Path, n_bytes: int, past_cache: bool = False) -> Callable[[], None]:
    """A call that writes `n_bytes` and waits until they are on the disk. past_cache: not through the system's cache of
    files, where the file system can, and whole pages only."""
    block = memoryview(mmap.mmap(-1, 2**24))  # begins at a page
    block[:] = os.urandom(len(block))  # a file system may store zeros as nothing
    if past_cache:
        n_bytes -= n_bytes % mmap.PAGESIZE

    def write() -> None:
        fd = open_new(path)[0] if past_cache else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            left = n_bytes
            while left:
                left -= os.write(fd, block[:left])
            os.fsync(fd)
        finally:
            os.close(fd)

    return write


def read_files(paths: Iterable[Path]) -> None:
    buffer = bytearray(2**20)
    for path in paths:
        with open(path, "rb", buffering=0) as f:
            while f.readinto(buffer):
                pass


# ---- a script as a process ------------------------------------------------------------------------------------------


def until_line(command: list[str], start: str) -> tuple[float, str]:
    """(seconds until a process prints a line that begins with `start`, all that it printed); it is stopped there.
    Raises BenchError if it ends without."""
    begin, printed = time.perf_counter(), ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            printed += line
            if line.startswith(start):
                seconds = time.perf_counter() - begin
                process.kill()
                return seconds, printed
    raise UserError(f"bench: {' '.join(command[1:3])} ... ended without a line {start!r}: {printed.strip()[-300:]!r}")


# ---- table and file -------------------------------------------------------------------------------------------------


@dataclass
class Line:
    """One side of a measurement: a line of the table and an object of the JSON file."""

    row: str  # train, ddp, ...
    case: str  # of which size
    side: str  # whose
    unit: str  # of samples and limit; a rate (the more, the better), or s and GiB
    samples: list[float] = field(default_factory=list)  # of each repeat; none if it could not be measured
    ratios: dict[str, list[float]] = field(default_factory=dict)  # {peer: how many times as fast: median, least, most}
    limit: float = 0.0  # what the machine, or our own promise, allows; 0 = none
    note: str = ""
    failed: bool = False  # an error, of which the note tells

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def spread(self) -> float:
        """(most - least) / median."""
        return (max(self.samples) - min(self.samples)) / self.median


def failure(row: str, case: str, side: str, error: Exception) -> Line:
    """The line of a side or a row that could not be measured. Where an error is not one of ours, standard error gets
    its traceback."""
    if not isinstance(error, UserError):
        traceback.print_exception(error)
    return Line(row, case, side, "", note=f"failed: {one_line(error)}", failed=True)


def ratio(seconds: list[float], peer: list[float]) -> list[float]:
    """[median, least, most] of how many times as fast as the peer, round by round."""
    each = [theirs / ours for ours, theirs in zip(seconds, peer, strict=True)]
    return [median(each), min(each), max(each)]


def lines(
    row: str, case: str, seconds: dict[str, list[float]], unit: str, peers: Iterable[str], work: float = 0.0,
    limit: float = 0.0, notes: dict[str, str] | None = None,
) -> list[Line]:  # fmt: skip
    """A line for each side. work: how much of `unit` a turn does, for rates; 0 = the seconds themselves."""
    peers = [name for name in peers if name in seconds]
    return [
        Line(
            row, case, name, unit, [work / s for s in times] if work else times,
            {peer: ratio(times, seconds[peer]) for peer in peers if name not in peers}, limit,
            (notes or {}).get(name, ""),
        )
        for name, times in seconds.items()
    ]  # fmt: skip


HEADER = f"{'row':10} {'case':32} {'side':30} {'median':>9} {'unit':7} {'spread':>6} {'of limit':>8}  times the peer"


def text(line: Line) -> str:
    """A line of the table."""
    begin = f"{line.row:10} {line.case:32} {line.side:30} "
    if not line.samples:
        return f"{begin}{line.note}"
    share = f"{100 * line.median / line.limit:.0f}%" if line.limit else ""
    parts = [f"{middle:.2f} ({least:.2f} to {most:.2f}) {peer}" for peer, (middle, least, most) in line.ratios.items()]
    parts += [line.note] if line.note else []
    number = f"{line.median:9,.0f}" if line.median >= 1000 else f"{line.median:9.4g}"
    return f"{begin}{number} {line.unit:7} {100 * line.spread:5.0f}% {share:>8}  {'; '.join(parts)}".rstrip()


def write_json(path: str, found: list[Line], hardware: str, command: str) -> None:
    """All samples, with what they depend on."""
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": command, "hardware": hardware}
    report |= {"versions": versions(), "load_average": os.getloadavg()}
    report["lines"] = [asdict(line) | ({"median": line.median, "spread": line.spread} if line.samples else {})
                       for line in found]  # fmt: skip
    Path(f"{path}.tmp").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(f"{path}.tmp", path)


def versions() -> dict[str, str]:
    """train_utils.versions, and {package: version} of the peers."""
    from groundup.train import device

    found = device.versions()
    for name in PEERS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
