"""Compile a C file of this package when a program first needs it, and keep the result."""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from groundup.files.untrusted import crc32_of

COMPILE_S = 120  # at most; it takes a second


def compile_c(source: Path, *flags: str) -> ctypes.CDLL | None:
    """Return the compiled file as a library; None without a compiler that knows the flags.

    Compiling takes a second, so the library is kept in ~/.cache/groundup (XDG_CACHE_HOME)."""
    compilers = map(shutil.which, ("gcc", "clang", "cc"))  # the first of them that is installed
    compiler = next(filter(None, compilers), "")
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    tune = "-march=native" if is_x86 else "-mcpu=native"
    libraries = ["-lm"]
    if "#pragma omp" in source.read_text(encoding="utf-8"):
        # the OpenMP library that torch has loaded: a second one would start its own threads
        maps = Path("/proc/self/maps")  # of Linux
        loaded = maps.read_text(encoding="utf-8") if maps.exists() else ""
        of_torch = re.findall(r"/\S*torch\S*/lib(?:gomp|iomp5|omp)\S*", loaded)[:1]
        libraries = ["-fopenmp", *of_torch, "-lm"]
    command = [compiler, "-O3", tune, "-fPIC", "-shared", *flags, str(source), *libraries]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        try:
            # Another compiler, processor or source gives another library.
            version = os.stat(compiler).st_mtime_ns
            built_from = f"{command} {version} {processor()}".encode() + source.read_bytes()
            start = f"{source.stem}-{hashlib.sha256(built_from).hexdigest()[:16]}"
            cache = cache_directory(Path(scratch))
            # The name ends with the CRC-32: loading a library that is cut short would crash.
            for library in cache.glob(f"{start}-*.so"):
                with suppress(OSError):
                    if library.name == f"{start}-{crc32_of(library):08x}.so":
                        return ctypes.CDLL(str(library))
                    library.unlink()  # damaged
            # Several processes may compile at the same time: write under a name of our own.
            new = cache / f"{start}.{os.getpid()}.tmp"
            command += ["-o", str(new)]
            run(command)  # a second, at most COMPILE_S
            library = new.replace(cache / f"{start}-{crc32_of(new):08x}.so")
            return ctypes.CDLL(str(library))
        except (OSError, subprocess.SubprocessError):
            return None


def run(command: list[str]) -> None:
    """Run a compiler. What it has started ends with it, also when it takes too long."""
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere, start_new_session=True)
    try:
        status = process.wait(COMPILE_S)
    except BaseException:  # the time is over, or Ctrl-C
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # Windows knows no groups
        process.wait()
        raise
    if status:
        raise subprocess.CalledProcessError(status, command)


def cache_directory(fallback: Path) -> Path:
    """Return the directory of compiled files; `fallback` unless only this user can write to it."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        directory = Path(home, "groundup").expanduser()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        # We execute what lies there, so nobody else may have put it there.
        private = status.st_uid == os.getuid() and not status.st_mode & 0o022
    except (OSError, RuntimeError, AttributeError):  # read-only; a user without a home; Windows
        return fallback
    return directory if private and os.access(directory, os.W_OK) else fallback


def processor() -> str:
    """Return what -march=native depends on: several machines may share one home directory."""
    info = Path("/proc/cpuinfo")  # of Linux
    text = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    first_core = re.findall(r"^(?:flags|Features|model name)\s*:.*", text, re.M)[:2]
    return "".join(first_core) or platform.processor()
