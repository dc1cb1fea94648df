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

from groundup.errors import say

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
HAS_LOCKS = fcntl is not None


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
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))  # as a file system without locks
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)


# ---- whole or not at all -------------------------------------------------------------------------


def sync(path: Path) -> None:
    """Put a file, or the names in a directory, on the disk."""
    if path.is_file():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())  # returns when the disk has it
        return
    with housekeeping("fsync a directory"):  # SMB and FUSE may refuse it
        directory = os.open(path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def make_room_beside(path: Path, ending: str) -> Path:
    """Remove what a killed process has left at .NAME.tmp beside `path`, and return that name.

    If it cannot be removed: .NAME.tmp1, and so on."""
    for number in count():
        hidden = path.with_name(f".{path.name}.{ending}{number or ''}")
        with suppress(OSError):  # it is a directory, or not there
            hidden.unlink()
        shutil.rmtree(hidden, ignore_errors=True)  # NFS may keep what is open
        if not os.path.lexists(hidden):
            return hidden


def is_utf8(path: str | Path) -> bool:
    """Return whether a path has the same bytes in UTF-8 as on the disk: torch and safetensors open
    no other. A GBK locale writes others, and a folder from a zip file may have them."""
    try:
        return os.fsencode(path) == str(path).encode()
    except UnicodeEncodeError:
        return False
