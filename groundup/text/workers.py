"""Work on units in several processes. None of them outlives its parent."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tqdm import tqdm

from groundup.errors import UserError
from groundup.files.directories import lock_directory
from groundup.text.unit import Unit


class WorkerLost(UserError):
    """A worker was killed, for example because memory ran out; finished units are kept."""


@contextmanager
def worker_pool(n_workers: int, work: Path) -> Iterator[Callable[..., Iterator[Any]]]:
    """Yield a function (function, units, what it does) that works in so many processes, up to 1 in
    this one, see `with_progress`. Raise WorkerLost if one of them was killed."""
    if n_workers <= 1:
        yield lambda function, units, what: with_progress(map(function, units), units, what)
        return
    # fork would copy locks that threads of this process may hold
    spawn = multiprocessing.get_context("spawn")
    # nothing is ever sent: the end of the pipe is the message
    watched, lifeline = spawn.Pipe(duplex=False)
    pool = ProcessPoolExecutor(n_workers, spawn, start_worker, (watched, work))
    # After an error the lifeline is closed first: the workers end at once, and the pool does not
    # wait for their units.
    with pool, lifeline:
        try:
            yield lambda function, units, what: with_progress(
                in_order(pool, function, units), units, what
            )
        except BrokenProcessPool:
            hint = "run again, with fewer workers if memory was short; what is done is kept"
            raise WorkerLost(f"prepare: a worker process was killed; {hint}") from None


def in_order(pool: ProcessPoolExecutor, function: Callable, units: list[Unit]) -> Iterator[Any]:
    """Yield function(unit) of every unit, in order."""
    # Unlike pool.map it cancels nothing after an error: when the workers end, Python 3.11 prints a
    # traceback for each cancelled unit. A result is let go of once it is used.
    futures = deque(pool.submit(function, unit) for unit in units)
    while futures:
        yield futures.popleft().result()


def with_progress(results: Iterator[Any], units: list[Unit], what: str) -> Iterator[Any]:
    """Yield the result of every unit, in order, and show how much of the input they are of."""
    sizes = [sum(part.size for part in unit.parts) for unit in units]
    with tqdm(total=sum(sizes), unit="B", unit_scale=True, desc=what, disable=None) as progress:
        for size, result in zip(sizes, results, strict=True):
            yield result
            progress.update(size)


def start_worker(watched: Connection, work: Path) -> None:
    """Make this process end when the parent closes its end of the pipe or ends itself, also by
    kill -9. The lock tells the next run that this process may still write; it is held until the
    process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends its workers
    lock_directory(work / "units", shared=True, wait=True)
    if watched.poll():  # the parent has ended before the lock was taken
        os._exit(1)
    threading.Thread(target=end_with, args=(watched,), daemon=True).start()


def end_with(watched: Connection) -> None:
    try:
        watched.recv()
    except EOFError:
        os._exit(1)


def wait_for_workers(work: Path) -> None:
    """Return when the workers of a killed run, which may still write into its units, have ended."""
    os.close(lock_directory(work / "units", wait=True))
