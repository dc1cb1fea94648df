"""Files that others may have made: read within bounds, refused in one line, and never run.

A checkpoint from elsewhere may name a device instead of a file, nest its JSON a million deep, or
hold a regular expression or a template that takes years.
"""

import contextlib
import json
import math
import os
import signal
import stat
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from groundup.errors import UserError

# Of a JSON file; the largest tokenizer.json that is published, Gemma 3's, has half
MOST_BYTES = 2**26
MANIFEST_BYTES = 2**28  # of what prepare.py writes, which names every input
# Seconds after which a copy of this process is ended: a lock of another thread may have stopped it
STUCK_S = 60
# What something is tried with, beyond what the process has now: CPU time and memory
TRIAL_S, TRIAL_MB = 1, 500
# Git LFS leaves a small file in place of a large one.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
POINTER_HINT = "a pointer of Git LFS, not the file; run git lfs pull"
BYTES_PER_VALUE = 16  # at most one value for so many: Python needs up to 100 bytes for each


def regular_size(path: str | Path) -> int:
    """Return the size of a file. Raise OSError unless it is a regular one.

    A pipe would wait for ever, and a device never end."""
    status = os.stat(path)  # follows links
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "is no regular file", str(path))
    return status.st_size


def check_regular(path: str | Path) -> int:
    """Return the size of a file. Raise OSError unless it is a regular one, and not a pointer."""
    size = regular_size(path)
    if size < 1000:
        with open(path, "rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise OSError(0, f"it is {POINTER_HINT}", str(path))
    return size


def crc32_of(path: str | Path) -> int:
    """Return the CRC-32 of a regular file: it shows accidents, twice as fast as SHA-256."""
    check_regular(path)
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(2**20):  # 1 MiB at a time
            crc = zlib.crc32(block, crc)
    return crc


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file. Raise OSError if it is no regular one, or too large."""
    if (size := check_regular(path)) > most:  # checked before any of it is read
        raise OSError(0, f"has {size:,} bytes; at most {most:,} are read", str(path))
    return Path(path).read_bytes()


def check_zip(path: str | Path) -> None:
    """Raise OSError or BadZipFile unless a file is a zip file that holds no more than its size.

    torch compresses nothing, so a checkpoint that unpacks to more is a bomb."""
    size = check_regular(path)
    with zipfile.ZipFile(path) as parts:  # reads the table of contents alone
        if sum(part.file_size for part in parts.infolist()) > size:
            raise zipfile.BadZipFile


def loads(text: str | bytes) -> Any:
    """Return json.loads(text). Raise ValueError, also for JSON that nests too deep."""
    try:
        return json.loads(text)  # recursion: Python's own limit stops it
    except RecursionError:
        raise ValueError("it nests too deep") from None


def parse_object(content: bytes, most: int = MOST_BYTES) -> dict:
    """Return the JSON object in `content`, of up to `most` bytes. Raise ValueError."""
    if sum(map(content.count, (b",", b"[", b"{"))) > most // BYTES_PER_VALUE:
        raise ValueError(f"it has more than {most // BYTES_PER_VALUE:,} values")
    value = loads(content)  # not before the number of values is known
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")
    return value


def read_json(
    path: str | Path, who: str = "checkpoint", fix: str = "", most: int = MOST_BYTES
) -> dict:
    """Return the JSON object in a file. Raise UserError in the name of `who`, ending with `fix`."""
    fix = fix and f"; {fix}"
    try:
        return parse_object(read_bytes(path, most), most)
    except OSError as error:
        raise UserError(f"{who}: cannot read {path}: {error.strerror}{fix}") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise UserError(f"{who}: {path} is damaged: {error}{fix}") from None


def scrub(text: str) -> str:
    r"""Return `text` as valid Unicode. Two halves of a character, as JSON may write it
    (\ud83d\ude00), become the character, and one half alone becomes U+FFFD."""
    if text.isascii():  # in one look, whatever its length
        return text
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def mended(value: Any) -> Any:
    """Return a value of JSON with every text in it made valid Unicode."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, dict):
        return {scrub(key): mended(item) for key, item in value.items()}
    return [mended(item) for item in value] if isinstance(value, list) else value


def is_name(name: object) -> bool:
    """Return whether a file names another one in its own directory, and nothing outside."""
    return (
        isinstance(name, str)
        and name == os.path.basename(name)
        and name not in ("", ".", "..")
        and "\0" not in name
    )


def is_inside(path: object) -> bool:
    """Return whether a path, such as "wiki/train_00000.npy", stays in its directory."""
    return isinstance(path, str) and all(map(is_name, path.split("/")))


def is_count(value: object) -> bool:
    return type(value) is int and value >= 0  # True is no count


def is_weight(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf  # no NaN either


def misfit(value: Any, shape: Any, name: str) -> str:
    """Return which part of a JSON value, called `name`, does not have the shape, "" if none.

    shape: a type, a function that returns whether a value fits, [shape of each item] or
    {key: shape}. "key?" may be missing, "*" is every key. Other keys are not looked at."""
    kind = type(shape) if isinstance(shape, list | dict) else shape
    if not (type(value) is kind if isinstance(kind, type) else kind(value)):
        return f"{name}={value!r:.60}"  # enough to find it
    parts = []
    if isinstance(shape, list):
        parts = [(item, shape[0], f"{name}[{i}]") for i, item in enumerate(value)]
    elif isinstance(shape, dict):
        for key, part in shape.items():
            if key == "*":
                parts += [(item, part, f"{name}.{k}") for k, item in value.items()]
            elif key.rstrip("?") in value or not key.endswith("?"):
                parts.append((value.get(key.rstrip("?")), part, f"{name}.{key.rstrip('?')}"))
    return next(filter(None, (misfit(*part) for part in parts)), "")


def why_unusable(action: Callable[[], object]) -> str:
    """Call `action` in a copy of this process; return why it may not be called here, "" if it may.

    It may not if it takes more CPU time or memory, or ends the process. An Exception is no reason:
    it comes again when `action` is called here."""
    if sys.platform != "linux":  # elsewhere a copy may not run, or has no bounds
        return ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other threads, which do not exist in the copy
        child = os.fork()  # it has all that this process has in memory
    if child == 0:
        status = 1
        try:
            limit_memory(TRIAL_MB, TRIAL_S)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(STUCK_S)  # in seconds of the clock
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where Rust tells its panics
            action()
            status = 0
        except Exception as error:
            status = int(isinstance(error, MemoryError))
        finally:
            os._exit(status)  # without the exit handlers, which are this process's
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended in (-signal.SIGKILL, -signal.SIGXCPU, -signal.SIGALRM):
        return f"it takes more than {TRIAL_S} s"
    return f"it fails, or needs more than {TRIAL_MB} MB" if ended else ""


def limit_memory(megabytes: int, cpu_s: int = 0) -> None:
    """Let this process take so much more memory than it has now, where the system can do that.

    cpu_s: the kernel ends the process after so many seconds of a CPU; 0 = any number."""
    if sys.platform != "linux":
        return
    import resource  # not on Windows

    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    bounds = {resource.RLIMIT_AS: pages * resource.getpagesize() + megabytes * 10**6}
    if cpu_s:
        bounds |= {resource.RLIMIT_CPU: cpu_s, resource.RLIMIT_CORE: 0}  # no file of its memory
    for what, most in bounds.items():
        with contextlib.suppress(ValueError):  # there is a lower limit already
            resource.setrlimit(what, (most, most))
