"""Compile a C file of this package with the machine's compiler when a program first needs it, and keep the result."""

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path


def compile_c(source: Path, *flags: str) -> ctypes.CDLL | None:
    """Return the file as a library for this very processor; None where no compiler with OpenMP works. It is kept in
    ~/.cache/groundup (XDG_CACHE_HOME), where that can be written: compiling takes a second."""
    compiler = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), "")
    tune = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    command = [compiler, "-O3", tune, "-fopenmp", "-fPIC", "-shared", *flags, str(source), *openmp(), "-lm"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        try:
            version = os.stat(compiler).st_mtime_ns
            key = hashlib.sha256(f"{command} {version} {processor()}".encode() + source.read_bytes()).hexdigest()[:16]
            kept = cache(Path(directory)) / f"{source.stem}-{key}.so"
            with suppress(OSError):  # not there yet, or damaged
                return ctypes.CDLL(str(kept))
            new = kept.with_suffix(f".{os.getpid()}.tmp")  # other processes compile it, too
            subprocess.run([*command, "-o", str(new)], check=True, capture_output=True, timeout=120)
            return ctypes.CDLL(str(new.replace(kept)))
        except (OSError, subprocess.SubprocessError):
            return None


def cache(otherwise: Path) -> Path:
    """Return the directory of compiled files, where only this user may write; `otherwise` if there can be none."""
    found = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "groundup").expanduser()
    try:
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = found.stat()
    except (OSError, RuntimeError):  # a file system that cannot be written to; no home
        return otherwise
    ours = status.st_uid == os.getuid() and not status.st_mode & 0o022  # what lies there is executed
    return found if ours and os.access(found, os.W_OK) else otherwise


def processor() -> str:
    """Return what the compiler reads of the processor: a home directory may be that of several machines."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    return "".join(re.findall(r"^(?:flags|Features|model name)\s*:.*", text, re.M)[:2]) or platform.processor()


def openmp() -> list[str]:
    """Return the OpenMP library that torch has loaded: another one would have threads of its own."""
    maps = Path("/proc/self/maps")
    loaded = maps.read_text(encoding="utf-8") if maps.exists() else ""
    return re.findall(r"/\S*torch\S*/lib(?:gomp|iomp5|omp)\S*", loaded)[:1]
