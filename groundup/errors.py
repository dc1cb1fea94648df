"""How a script ends when something is wrong: one line on standard error and an exit status, no traceback.

The user's mistakes are a UserError. What the machine does (a full disk, no memory, Ctrl-C, a reader of the output that
has gone) comes as Python's own exceptions. `end_in_one_line` treats them all in one place; only a mistake in our code
shows a traceback.
"""

import atexit
import errno
import gc
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn

# C0 without tab and newline, DEL, C1, and the marks that change the direction of text
CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
UNINTERRUPTED = threading.Lock()  # held by a thread that completes a checkpoint: waits for the disk, not for ranks
WATCH_S = 0.5  # between two looks at torchrun's agent
PYTHONS = signal.default_int_handler  # of Ctrl-C: KeyboardInterrupt
INTERRUPTED, READER_GONE = 130, 141  # exit status: 128 + SIGINT, 128 + SIGPIPE, as a shell says
ADVICE = {
    errno.ENOSPC: "make room, then run the same command again",
    errno.EDQUOT: "make room, then run the same command again",
    errno.EROFS: "choose a place that can be written to",
    errno.EMFILE: "raise the limit on open files: ulimit -n",
}


class UserError(ValueError):
    """Raise for what the user can fix: bad settings, bad input, a damaged file. Scripts print it as one line, without
    a traceback, so the message says what is wrong, where, with which value, and what to do."""


class LostRank(UserError):
    """Raise where another rank has died or is stuck: a thread may wait long for it, so the process ends without it."""


class Stopped(KeyboardInterrupt):
    """Raise with its number for a signal that ends this process at once, without waiting for threads or ranks."""


def refuse(wrong: object, text: str) -> None:
    """Raise UserError about a setting if `wrong`."""
    if wrong:
        raise UserError(f"config: {text}")


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first `most` names and how many more there are, for an error message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def printable(text: str, keep: str = "") -> str:
    """Return `text` with escapes for the control characters by which a file or a model could drive a terminal, but for
    those in `keep`."""
    return CONTROL.sub(lambda match: match[0] if match[0] in keep else ascii(match[0])[1:-1], text)


def end_in_one_line() -> None:
    """Print one line for whatever the user or the machine ended this process with. A script calls it before its slow
    imports. From here on no character is too strange for the terminal, and none can drive it."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is PYTHONS:
        signal.signal(signal.SIGINT, interrupted)  # until configure(), too
    gc.disable()  # until configure(): the imports leave no garbage, and to look for it takes a sixth of their time
    sys.excepthook = one_line_excepthook
    atexit.register(flush_output)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # ranks started by hand may outlive the shell that started them
        threading.Thread(target=end_with_torchrun, args=(os.getppid(),), daemon=True).start()
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else 20 lines of C++ frames for each lost connection
    if isinstance(sys.stdout, io.TextIOWrapper):
        own = sys.stdout.isatty() or "PYTHONIOENCODING" in os.environ
        sys.stdout.reconfigure(encoding=None if own else "utf-8", errors="replace")  # a terminal in GBK has no emoji
    for stream, keep in ((sys.stdout, ""), (sys.stderr, "\r")):  # a progress bar begins its line anew
        if isinstance(stream, io.TextIOWrapper) and stream.isatty():
            write = partial(type(stream).write, stream)
            stream.write = lambda text, write=write, keep=keep: write(printable(text, keep))


def imports_are_done() -> None:
    """What end_in_one_line has put off comes back: the garbage collector, and Ctrl-C as an exception."""
    gc.enable()
    if signal.getsignal(signal.SIGINT) is interrupted:
        signal.signal(signal.SIGINT, PYTHONS)


def interrupted(number: int, frame: object) -> NoReturn:
    """Ctrl-C during slow imports: an exception there is lost in some library, or leaves it half imported."""
    print(f"{Path(sys.argv[0]).stem}: interrupted; run the same command again", file=sys.stderr, flush=True)
    leave(INTERRUPTED)


def one_line_excepthook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    """Print the line of an error; the exit status is 1, after Ctrl-C as a shell says it. This is sys.excepthook."""
    if issubclass(kind, BrokenPipeError):  # | head
        raise SystemExit(READER_GONE)
    line = line_of(error)
    if not line:
        vars(sys.stderr).pop("write", None)  # Python's traceback may have colours
        return sys.__excepthook__(kind, error, tb)
    # 0 where Python may end as usual; a signal before training (signals.py) waits for no rank either
    status = 1 if issubclass(kind, LostRank) else 128 + error.args[0] if issubclass(kind, Stopped) else 0
    # With a process group torch calls this hook and prints what it wrote to sys.stderr after it has returned.
    print(printable(" ".join(line.splitlines())), file=sys.__stderr__ if status else sys.stderr, flush=True)
    if status:
        flush_output()
        leave(status)
    if issubclass(kind, KeyboardInterrupt):
        raise SystemExit(INTERRUPTED)


def line_of(error: BaseException) -> str:
    """Return the line for an error that is the user's or the machine's, "" for a mistake in our code."""
    script, text = Path(sys.argv[0]).stem, str(error)
    if isinstance(error, UserError):
        return text
    if isinstance(error, KeyboardInterrupt):
        return f"{script}: interrupted; run the same command again"
    if isinstance(error, OSError) and error.strerror:
        what = ": ".join([str(name) for name in (script, error.filename, error.strerror) if name])
        return f"{what}; {ADVICE[error.errno]}" if error.errno in ADVICE else what
    less = "lower batch_size, or set activation_checkpointing=True where there is one"
    if type(error).__name__ == "OutOfMemoryError":  # torch's on a GPU; torch is not imported here
        return f"{text.partition('. GPU')[0]}; {less}"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:  # numpy's and Python's; torch's on a CPU
        return f"{script}: out of memory{size_of(text)}; {less}"
    return ""


def size_of(text: str) -> str:
    """Return how much memory was asked for, in the words of torch or numpy."""
    found = re.search(r"allocate ([\d.]+ \w+)", text)
    return f": cannot allocate {found[1]}" if found else ""


def reason_of(error: BaseException) -> str:
    """Return one line of why: the system's words if there are any (torch says "unexpected pos 704" of a full disk)."""
    cause = error
    while cause is not None and not getattr(cause, "strerror", None):
        cause = cause.__context__
    return cause.strerror if cause else (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Give an OSError the name of the file: of a failed write the system does not tell it, and a library in Rust, as
    safetensors, has an exception of its own."""
    try:
        yield
    except Exception as error:
        if found := re.search(r"I/O error: (.*) \(os error (\d+)\)", str(error)):
            raise OSError(int(found[2]), found[1], str(path)) from error
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)
        raise


def end_with_torchrun(agent: int) -> None:
    """End this rank soon after torchrun's agent, its parent, was killed: nothing restarts it, and to meet the other
    ranks it would wait for twice timeout_s. A thread, because the main one may be waiting in C."""
    while os.getppid() == agent:
        time.sleep(WATCH_S)
    try:
        text = f"ddp: rank {os.environ.get('RANK')}: torchrun (process {agent}) has died; run the same command again"
        print(text, file=sys.stderr, flush=True)
    finally:
        leave(1)


def flush_output() -> None:
    """Flush standard output while its error can still be told: later, Python would print a traceback."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except BrokenPipeError:
        leave(READER_GONE)
    except OSError as error:
        error.filename = "standard output"
        print(line_of(error), file=sys.stderr)
        leave(1)
    except ValueError:  # it is closed
        pass


def leave(status: int) -> NoReturn:
    """Exit at once: without what is left in the buffer of standard output, and without waiting for other threads."""
    with UNINTERRUPTED:
        os._exit(status)
