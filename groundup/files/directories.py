"""Directories that one process has to itself, and directories that appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from groundup.errors import UserError
from groundup.files.disk import HAS_LOCKS, lock, make_room_beside, sync


def lock_directory(path: Path, shared: bool = False, wait: bool = False) -> int:
    """Make a directory if needed and lock it. Return a handle; closing it ends the lock."""
    # The directory itself is locked, because a file would stay behind. Windows opens none.
    while True:
        path.mkdir(parents=True, exist_ok=True)  # again, if it was removed meanwhile
        handle = os.open(path if HAS_LOCKS else os.devnull, os.O_RDONLY)
        try:
            lock(handle, shared, wait)
        except BlockingIOError:
            os.close(handle)
            raise
        if not HAS_LOCKS or (path.exists() and os.path.samestat(os.stat(path), os.fstat(handle))):
            return handle
        os.close(handle)  # of a directory that the process before has removed meanwhile


@contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """Yield a hidden directory that is renamed to `out` at the end, and removed after an error.

    Raise UserError at once if `out` cannot be replaced: it holds files, or is a mount point.
    """
    try:
        if out.exists():
            out.rmdir()  # only an empty one can be
    except OSError as error:
        text = f"out_dir={str(out)!r} is not empty or cannot be replaced ({error.strerror})"
        hint = "delete it first, or give another out_dir, which may be inside it"
        raise UserError(f"config: {text}; {hint}") from None
    temp = make_room_beside(out, "tmp")
    try:
        temp.mkdir(parents=True)
        yield temp
        for path in (*temp.iterdir(), temp):
            sync(path)
        temp.rename(out)  # from now on it is there
        sync(out.parent)  # a power cut does not undo it
    finally:
        shutil.rmtree(temp, ignore_errors=True)  # nothing, if all went well
