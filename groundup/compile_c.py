"""Compile a C file of this package with the machine's compiler, when a program first needs it."""

import ctypes
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path


def compile_c(source: Path, *flags: str) -> ctypes.CDLL | None:
    """Return the file as a library for this very processor; None where no compiler with OpenMP works."""
    compiler = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), "")
    tune = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    flags = ("-O3", tune, "-fopenmp", "-fPIC", "-shared", *flags)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        out = str(Path(directory) / f"{source.stem}.so")
        try:
            command = [compiler, *flags, "-o", out, str(source), *openmp(), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            return ctypes.CDLL(out)
        except (OSError, subprocess.SubprocessError):
            return None


def openmp() -> list[str]:
    """Return the OpenMP library that torch has loaded: another one would have threads of its own."""
    maps = Path("/proc/self/maps")
    loaded = maps.read_text(encoding="utf-8") if maps.exists() else ""
    return re.findall(r"/\S*torch\S*/lib(?:gomp|iomp5|omp)\S*", loaded)[:1]
