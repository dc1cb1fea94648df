"""Small data for the `debug` configurations: prepare.py makes a corpus with its tokenizer, this file makes rows."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from groundup.demo.python_docs import debug_texts
from groundup.demo.python_talks import docs_conversations
from groundup.errors import UserError

PREPARE = Path(__file__).parents[2] / "prepare.py"
SETTINGS = ["--vocab_size=512", "--min_chars=1", "--near=0", "--val_fraction=0.1", "--strict=True", "--workers=1"]


def make_debug_data(out_dir: str | Path) -> None:
    """Run prepare.py on the documentation of Python's own parts, unless out_dir is there: it takes two seconds.

    Several processes may call this at once: one makes it, the others wait."""
    out_dir = Path(out_dir)
    if (out_dir / "manifest.json").exists():
        return
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(out_dir.parent, os.O_RDONLY)  # the lock of a directory leaves no file behind
    except OSError as error:
        raise UserError(f"demo: cannot make {out_dir}: {error.strerror}") from None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (out_dir / "manifest.json").exists():
            path = write_rows(debug_texts(), Path(stack.enter_context(tempfile.TemporaryDirectory())) / "debug.jsonl")
            command = [sys.executable, str(PREPARE), f"--input={path}", f"--out_dir={out_dir}", *SETTINGS]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise UserError(f"demo: cannot make {out_dir}: {done.stderr.strip()}")


def debug_pairs(talks: list[list[dict]]) -> list[dict]:
    """Return questions about Python with their answer, and its words in reverse."""
    said = [(talk[:1], talk[1]["content"]) for talk in talks]
    return [{"prompt": asked, "chosen": text, "rejected": " ".join(text.split()[::-1])} for asked, text in said]


def make_debug_rows(path: Path, rows_of: Callable[[list], Iterable[dict]]) -> None:
    """Write beside the debug corpus a file of the rows that `rows_of` makes of some conversations about Python, unless
    it is there. Several processes may call this at once: each writes the same, first under a name of its own."""
    if not path.exists():
        make_debug_data(path.parent)
        rows = rows_of(list(islice(docs_conversations(), 0, 1400, 7)))  # of the first: all take a second more to read
        os.replace(write_rows(rows, path.with_name(f".{path.name}.{os.getpid()}")), path)


def write_rows(rows: Iterable[str | dict], path: Path) -> Path:
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return path
