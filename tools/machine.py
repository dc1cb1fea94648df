"""What tools ask of the machine: its processor, the commit, a script's output line by line."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import TIMEOUT_MAX, Timer

from groundup.errors import UserError

ROOT = Path(__file__).parent.parent


def processor() -> str:
    """Return the name of the processor, "" if the system does not tell."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    found = re.search(r"model name\s*: (.+)", text)
    return found[1].strip() if found else ""


def commit() -> str:
    """Return the commit of this checkout, and whether files differ from it; "" without git."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = git("diff", "HEAD", "--stat", "--", "*.py")
    return git("rev-parse", "--short=10", "HEAD") + (" with changes" if changed else "")


def run_script(
    command: Sequence[object],
    directory: str | Path = ROOT,
    limit_s: float = TIMEOUT_MAX,
    n_cores: int = 0,
) -> list[tuple[float, str]]:
    """Run a command; return each line that it prints with the seconds since its start.

    limit_s: seconds until it is killed, with all that it started. n_cores: bind it to the first
    cores of this process, one thread each; 0 = all. Raise UserError with the end of its output if
    it fails or takes too long."""
    words, bound = [str(word) for word in command], {}
    if n_cores:
        bound["env"] = os.environ | {"OMP_NUM_THREADS": str(n_cores)}
        if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
            cores = sorted(os.sched_getaffinity(0))[:n_cores]
            bound["preexec_fn"] = partial(os.sched_setaffinity, 0, cores)

    # a session of its own, so that `kill` reaches what the command starts
    begin = time.perf_counter()
    process = subprocess.Popen(
        words, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
        errors="replace", start_new_session=True, **bound,
    )  # fmt: skip
    timer = Timer(limit_s, kill, [process])
    timer.start()
    try:
        lines = [(time.perf_counter() - begin, line) for line in process.stdout]
        status = process.wait()
        is_late = time.perf_counter() - begin >= limit_s
    finally:  # also after Ctrl-C
        timer.cancel()
        kill(process)
    said = " ".join(words[1:])  # without Python's own path
    text = "".join(line for _, line in lines)
    if is_late:
        raise UserError(f"{said}: no end after {limit_s:.0f} s\n{text[-1500:]}")
    if status:
        raise UserError(f"{said}: exit status {status}\n{text[-9000:]}")
    return lines


def kill(process: subprocess.Popen) -> None:
    """Kill a process and all that it started: those hold its output open."""
    with suppress(OSError):  # it has ended
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:  # Windows
            process.kill()
