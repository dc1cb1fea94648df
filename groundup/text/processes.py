"""Run a function on every unit in several processes; none outlives its parent."""

import fcntl
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tqdm import tqdm

from groundup.errors import UserError
from groundup.text.units import Unit


class WorkerLost(UserError):
    """A worker was killed, for example because memory ran out; finished units are kept."""


def run(function: Callable[[Unit], Any], units: list[Unit], workers: int, what: str, work: Path) -> list[Any]:
    """Return function(unit) of every unit. Raise what a worker raised, WorkerLost if one was killed."""
    results, sizes = [None] * len(units), [sum(part.size for part in unit.parts) for unit in units]
    workers = min(workers, len(units))
    done = in_processes(function, units, workers, work) if workers > 1 else enumerate(map(function, units))
    with tqdm(total=sum(sizes), unit="B", unit_scale=True, desc=what, disable=None) as progress:
        for number, result in done:
            results[number] = result
            progress.update(sizes[number])
    return results


def in_processes(
    function: Callable[[Unit], Any], units: list[Unit], workers: int, work: Path
) -> Iterator[tuple[int, Any]]:
    """Yield (number, result) of every unit, as it is done. function: picklable."""
    spawn = multiprocessing.get_context("spawn")
    watched, lifeline = spawn.Pipe(duplex=False)
    # On an error, too, the lifeline is closed first: the workers end, and the executor does not wait for their units.
    with ProcessPoolExecutor(workers, spawn, start_worker, (watched, work)) as executor, lifeline:
        tasks = {executor.submit(function, unit): number for number, unit in enumerate(units)}
        try:
            yield from ((tasks[task], task.result()) for task in as_completed(tasks))
        except BrokenProcessPool:
            hint = "run again, with fewer workers if memory was short; what is done is not done again"
            raise WorkerLost(f"prepare: a worker process was killed; {hint}") from None


def start_worker(watched: Connection, work: Path) -> None:
    """Make this process end when the parent closes its end of the pipe or ends itself, also by kill -9. The lock tells
    the next run that this process may still write; it is held until the process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends its workers
    fcntl.flock(os.open(work / "units", os.O_RDONLY), fcntl.LOCK_SH)
    if watched.poll():  # the parent has ended before the lock was taken
        os._exit(1)
    threading.Thread(target=end_with, args=(watched,), daemon=True).start()


def end_with(watched: Connection) -> None:
    try:
        watched.recv()
    except EOFError:
        os._exit(1)


def wait_for_workers(work: Path) -> None:
    """Return when the workers of a run that was killed have ended: until then they may write into its units."""
    handle = os.open(work / "units", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.close(handle)
