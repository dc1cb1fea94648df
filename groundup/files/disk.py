"""What a file system may refuse, and what is put on it whole.

Lustre and some FUSE mounts have no locks, exFAT and SMB no links. NFS keeps a removed file that is
open. None of these decides whether data are kept: a program warns once and goes on.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import parent_process
from pathlib import Path
from typing import IO

from groundup.errors import UserError, say

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextmanager
def housekeeping(task: str) -> Iterator[None]:
    """Warn once, and go on, if the file system refuses a task that no data depend on."""
    try:
        yield
    except BlockingIOError:
        raise  # no refusal: another process has the lock
    except OSError as error:
        # The workers of prepare.py leave it to the process that started them.
        if parent_process() is None:
            say(f"warning: cannot {task}: {error.strerror or error}")


# ---- locks ---------------------------------------------------------------------------------------


def lock(file: IO | int, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file until it is closed, also by a kill.

    Raise BlockingIOError if another process has locked it, unless `wait`.
    """
    with housekeeping("lock files, so run no command twice at the same time"):
        if fcntl is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)


def lock_directory(path: Path, shared: bool = False, wait: bool = False) -> int:
    """Make a directory if needed and lock it. Return a handle; closing it ends the lock."""
    # The directory itself is locked, because a file would stay behind. Windows opens none.
    while True:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(path if fcntl else os.devnull, os.O_RDONLY)
        try:
            lock(handle, shared, wait)
        except BlockingIOError:
            os.close(handle)
            raise
        if not fcntl or (path.exists() and os.path.samestat(os.stat(path), os.fstat(handle))):
            return handle
        os.close(handle)  # of a directory that the process before has removed meanwhile


# ---- whole or not at all -------------------------------------------------------------------------


def sync(path: Path) -> None:
    """Put a file, or the names in a directory, on the disk."""
    if path.is_file():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
        return
    with housekeeping("fsync a directory"):  # SMB and FUSE may refuse it
        directory = os.open(path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def free_name(path: Path, ending: str) -> Path:
    """Free a hidden name beside `path` and return it: .NAME.tmp, or .NAME.tmp1 and so on.

    What a killed process left under it is removed; the next number is for what cannot be."""
    for number in count():
        hidden = path.with_name(f".{path.name}.{ending}{number or ''}")
        with suppress(OSError):
            hidden.unlink()
        shutil.rmtree(hidden, ignore_errors=True)
        if not os.path.lexists(hidden):
            return hidden


@contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """Yield a hidden directory that is renamed to `out` at the end, and removed after an error.

    Raise UserError at once if `out` cannot be replaced: it holds files, or is a mount point.
    """
    try:
        if out.exists():
            out.rmdir()
    except OSError as error:
        text = f"out_dir={str(out)!r} is not empty or cannot be replaced ({error.strerror})"
        raise UserError(f"config: {text}; give another, or one inside it") from None
    temp = free_name(out, "tmp")
    try:
        temp.mkdir(parents=True)
        yield temp
        for path in (*temp.iterdir(), temp):
            sync(path)
        temp.rename(out)
        sync(out.parent)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
