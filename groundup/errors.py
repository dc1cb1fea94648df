"""How a script ends: with one line on standard error for a mistake of the user or a full machine.

Raise UserError for what the user can fix. A full disk, exhausted memory, Ctrl-C and `| head` come
as Python's own exceptions. Only a mistake in our code shows a traceback.
"""

from __future__ import annotations  # an older Python gets as far as its version is checked

import atexit
import ctypes
import functools
import io
import json
import math
import os
import re
import signal
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

# control characters without tab and newline, and marks that reverse the direction of text
CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Curly quotes, and the comma and full stop of which Unicode knows no narrow form
ASCII_MARKS = str.maketrans("\u201c\u201d\u2018\u2019\u3001\u3002", "\"\"'',.")
# Curly quotes; the marks , : ; = . and the numbers of Chinese typing, which are as wide as a
# letter. A comma has two forms there, and so has a full stop.
WIDE = re.compile(
    "[\uff0d\uff0e.0-9]*[\uff10-\uff19][\uff0d\uff0e.0-9\uff10-\uff19]*"
    "|[\u201c\u201d\u2018\u2019\uff0c\u3001\uff1a\uff1b\uff1d\u3002\uff0e]"
)
OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
ACTIVATE = "run: source .venv/bin/activate (make install creates it)"
STDOUT = "standard output"  # in messages
# What to do if memory is exhausted, by the setting that a script needs for it
LESS_MEMORY = {
    "batch_size": "lower batch_size",
    "max_batch": "lower max_batch",
    "activation_checkpointing": "use activation_checkpointing",
    "workers": "use fewer workers",
}
PR_SET_PDEATHSIG = 1  # of prctl(2)
REQUIREMENTS = {"torch", "numpy", "sentencepiece", "tiktoken", "regex", "datasketch", "tqdm"}
REQUIREMENTS |= {"safetensors", "charset_normalizer"}


class UserError(ValueError):
    """Something the user can fix. The message is one line: what, where, which value, what to do."""


class LostRank(UserError):
    """Another rank has died or does not answer."""


class Stopped(KeyboardInterrupt):
    """Raise Stopped(signal number) to end at once; a save that is being written is completed."""


# Called when an error ends a process at once, which skips Python's own wait for threads, each with
# the most seconds that it may take: a save that is being written is completed.
before_exit: list[Callable[[float], object]] = []


def refuse(wrong: object, text: str) -> None:
    """Raise UserError about a setting if `wrong`."""
    if wrong:
        raise UserError(f"config: {text}")


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return the first names and the number of the others, for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")


def counted(n: int, noun: str) -> str:
    """Return "1 row" or "2,000 rows"."""
    return f"{n:,} {noun}" + "s" * (n != 1)


def printable(text: str, keep: str = "") -> str:
    """Return `text` with control characters escaped (\\x1b), except those in `keep`."""
    return CONTROL.sub(lambda match: match[0] if match[0] in keep else ascii(match[0])[1:-1], text)


def one_line(text: str) -> str:
    """Return a model's text on one line, as it is: newlines become \\n, as repr() has them."""
    return printable(text).replace("\n", r"\n")


@functools.cache
def say(line: str) -> None:
    """Print a line once, on rank 0, to standard error: standard output may be data."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


def end_in_one_line() -> None:
    """Install the hooks of this file. Scripts call this before their slow imports, which are over
    when `configure` calls `imports_are_done`."""
    if sys.version_info < OLDEST_PYTHON:
        version = ".".join(map(str, sys.version_info[:2]))
        sys.exit(f"{sys.executable} is Python {version}; 3.11 or newer is needed")
    if sys.excepthook is not one_line_excepthook:  # configure() calls this again
        sys.excepthook = one_line_excepthook
        atexit.register(flush_output)

    # OpenMP's threads spin while they wait, for which torch reads this when it is imported. Beside
    # other busy processes the usual spinning makes a step take several times as long.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")

    # A shell's background job ignores Ctrl-C, and so it stays.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, exit_interrupted)

    # In a rank: no C++ frames of a lost connection. Under torchrun: end with it.
    if "RANK" in os.environ:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    # A stream that was closed (>&-) is None, and the next file that is opened would get its number.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))

    # A pipe may be ASCII, a terminal without emoji: print ? for what it lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        as_is = sys.stdout.isatty() or "PYTHONIOENCODING" in os.environ
        sys.stdout.reconfigure(encoding=None if as_is else "utf-8", errors="replace")

    # No text of a file or a model may command the terminal, which may be behind a pipe (| tee). A
    # progress bar may use \r.
    for stream, keep in ((sys.stdout, ""), (sys.stderr, "\r")):
        if isinstance(stream, io.TextIOWrapper):
            guard(stream, keep)


def guard(stream: TextIO, keep: str) -> None:
    """Escape control characters in what is written, and name the stream in an error."""
    write, flush = stream.write, stream.flush
    name = STDOUT if stream is sys.stdout else "standard error"

    def guarded_write(text: str) -> int:
        with naming(name):
            return write(printable(text, keep))

    def guarded_flush() -> None:
        with naming(name):
            flush()

    stream.write, stream.flush = guarded_write, guarded_flush


def exit_interrupted(number: int, frame: object) -> None:
    """Exit at Ctrl-C while packages are imported: there is nothing to save."""
    # numpy and torch turn a KeyboardInterrupt in their C code into an ImportError or a crash.
    os._exit(report(KeyboardInterrupt(), sys.stderr))


def imports_are_done() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, so that `finally` runs."""
    if signal.getsignal(signal.SIGINT) is exit_interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def one_line_excepthook(kind: type, error: BaseException, tb: TracebackType | None) -> None:
    # Python's own exit waits for threads; those of a rank may wait for other ranks, then abort.
    # In a rank torch also redirects sys.stderr while it calls this hook.
    at_once = "RANK" in os.environ or isinstance(error, Stopped)
    status = report(error, sys.__stderr__ if at_once and sys.__stderr__ else sys.stderr)
    if isinstance(error, OSError) and error.filename == STDOUT:
        discard(sys.stdout)  # the exit would fail to write the same text, and say so again
    if at_once:
        flush_output()
        with suppress(KeyboardInterrupt):  # one more Ctrl-C
            for wait in before_exit:  # the writer may wait for a lost rank, too
                wait(30.0 if isinstance(error, LostRank) else math.inf)
        os._exit(status)
    raise SystemExit(status)


def report(error: BaseException, stderr: TextIO) -> int:
    """Print one line, or a traceback for a mistake in our code. Return the exit status."""
    # As a shell says: 128 + number of the signal. | head is SIGPIPE (13), which Windows lacks.
    if isinstance(error, BrokenPipeError):
        return 141
    if line := line_of(error):
        print(printable(" ".join(line.splitlines())), file=stderr, flush=True)
    else:
        traceback.print_exception(error, file=stderr)
    if isinstance(error, KeyboardInterrupt):
        return 128 + (error.args[0] if isinstance(error, Stopped) else signal.SIGINT)
    return 1


def line_of(error: BaseException) -> str:
    """Return the line for an error of the user or the machine, "" for a mistake in our code."""
    script, text = Path(sys.argv[0]).stem, str(error)
    if isinstance(error, UserError):
        return text + wide_marks(text)
    if isinstance(error, KeyboardInterrupt):
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        return f"{script}: {rank}interrupted; run the same command again"
    if isinstance(error, ModuleNotFoundError) and error.name in REQUIREMENTS:
        return f"{script}: {sys.executable} has no package {error.name}; {ACTIVATE}"
    # Of the system: "pretrain: out/log.jsonl: Permission denied".
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(str(word) for word in (script, error.filename, error.strerror) if word)
    # numpy raises MemoryError, torch an OutOfMemoryError on a GPU and a RuntimeError on a CPU
    is_torch = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in text
    if is_torch or isinstance(error, MemoryError):
        size = re.search(r"allocate ([\d.]+ \w+)", text)
        what = f": cannot allocate {size[1]}" if size else ""
        names = vars(sys.modules["__main__"])  # the settings of the script
        fix = " or ".join(text for key, text in LESS_MEMORY.items() if key in names)
        return f"{script}: out of memory{what}" + (fix and f"; {fix}")
    # torch.compile calls a compiler, Triton's on a GPU too
    reason = text.partition("\n")[0][:200]
    # "failed to map": a directory that is noexec; OSError: one that cannot be written
    failures = "ompiler|CompileE|ProcessE|failed to map|(OS|Permission|FileNotFound)Error"
    if type(error).__name__ == "InductorError" and re.search(failures, reason):
        fix = "use compile=False, install gcc, g++ and python3-dev, or set TMPDIR and"
        fix += " TORCHINDUCTOR_CACHE_DIR"
        return f"{script}: torch.compile cannot build a kernel; {fix} ({reason})"
    # a function or an argument that it lacks is no mistake in our code
    version = getattr(sys.modules.get("torch"), "__version__", OLDEST_TORCH)
    if version < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        fix = f"{oldest} or newer is needed; {ACTIVATE}"
        return f"{script}: torch {version} is too old, {fix} ({type(error).__name__}: {reason})"
    return ""


def wide_marks(text: str) -> str:
    """Return a question about the marks and digits of Chinese typing, which look like those that
    are meant, if a message quotes some of the command line or says that files are missing."""
    # a word that names a file is right as it is
    values = [word.partition("=")[2] or word for word in sys.argv]
    written = "".join(value for value in values if not os.path.exists(value))
    if text.startswith("data: no file matches"):
        written += text
    found = [wide for wide in dict.fromkeys(WIDE.findall(text)) if wide in written]
    questions = ", ".join(f"{wide} for {narrow(wide)}" for wide in found)
    return f" (is {questions} intended?)" if questions else ""


def narrow(wide: str) -> str:
    """Return the marks and digits of a keyboard without Chinese."""
    return unicodedata.normalize("NFKC", wide).translate(ASCII_MARKS)


def json_fault(error: Exception, line: int = 1, begin: int = 0) -> str:
    """Return what is wrong with JSON and where, and a question about a mark of Chinese typing.

    line: of the file, in which the value begins. begin: where it does in the text that was parsed
    """
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    text, at = error.doc, error.pos
    n_lines = text.count("\n", begin, at)
    place = f"at character {at - begin + 1}"
    if n_lines:
        place = f"in line {line + n_lines}, column {error.colno}"
    mark = text[at : at + 1]
    if error.msg.startswith("Unterminated"):  # its end may be a curly quote
        mark = "\u201d" if "\u201d" in text[at:] else ""
    question = f" (is {mark} for {narrow(mark)} intended?)" if WIDE.fullmatch(mark) else ""
    return f"{error.msg.removesuffix(' at')} {place}{question}"


def reason_of(error: BaseException) -> str:
    """Return why a write failed, in the system's words."""
    # torch hides them behind its own.
    cause = error
    while cause is not None and not getattr(cause, "strerror", None):
        cause = cause.__context__
    return cause.strerror if cause else (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add the file name that the error of a failed write lacks."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    except Exception as error:
        # safetensors has an error of its own around the system's.
        if found := re.search(r"I/O error: (.*) \(os error (\d+)\)", str(error)):
            raise OSError(int(found[2]), found[1], str(path)) from error
        raise


def discard(stream: TextIO) -> None:
    """Send what is still printed there nowhere, because nobody reads it any more."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def flush_output() -> None:
    # At the exit, before Python does it, where a failure would be a traceback.
    try:
        if sys.stdout and not sys.stdout.closed:
            sys.stdout.flush()
    except OSError as error:
        os._exit(report(error, sys.stderr))
