"""Large files written past the system's cache of files (O_DIRECT, Linux), with their CRC-32.

A checkpoint is written once and seldom read. Through the cache its bytes would go into pages that the system must find
first, and that displace the training data; on a virtual machine finding them is most of what a save takes from training
(docs/measurements.md). Where the file system does not know O_DIRECT, the bytes go through the cache.
"""

import errno
import mmap
import os
import zlib
from pathlib import Path
from types import TracebackType

BLOCK = 2**22  # bytes of one write; O_DIRECT wants memory, place and length in multiples of a page at most


class DirectFile:
    """A new file that can be written and closed. After close() `crc` is the CRC-32 of what was written."""

    def __init__(self, path: Path) -> None:
        self.crc = 0
        self._block = memoryview(mmap.mmap(-1, BLOCK))  # begins at a page
        self._filled = 0
        self._fd, self._direct = open_new(path)

    def write(self, data: bytes | memoryview) -> int:
        data = memoryview(data).cast("B")
        self.crc = zlib.crc32(data, self.crc)
        done = 0
        while done < len(data):
            n = min(len(data) - done, BLOCK - self._filled)
            self._block[self._filled : self._filled + n] = data[done : done + n]
            self._filled += n
            done += n
            if self._filled == BLOCK:
                self._write_block()
        return len(data)

    def flush(self) -> None:
        """Nothing: what does not fill a block waits for close(). torch.save calls it."""

    def close(self) -> None:
        try:
            if self._filled:
                self._through_the_cache()
                self._write_block()
        finally:
            os.close(self._fd)

    def __enter__(self) -> "DirectFile":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            os.close(self._fd)

    def _write_block(self) -> None:
        done = 0
        while done < self._filled:
            try:
                done += os.write(self._fd, self._block[done : self._filled])
            except OSError as error:
                # Some file systems open such a file but do not write it; or a part of a block was written before.
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._through_the_cache()
        self._filled = 0

    def _through_the_cache(self) -> None:
        if self._direct:
            import fcntl

            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            self._direct = False


def open_new(path: Path) -> tuple[int, bool]:
    """(descriptor of an empty file, whether its writes pass by the cache)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags, 0o666), False
