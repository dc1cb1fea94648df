"""Make small data for the `debug` configurations: a corpus by prepare.py, and rows of all kinds.

Several processes may call these functions at once.
"""

import contextlib
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
from groundup.files.directories import lock_directory

PREPARE = Path(__file__).parents[2] / "prepare.py"
# Every text is kept, so that the corpus is the same whatever the rules of prepare.py
SETTINGS = "--vocab_size=512 --rules=length=1.. --near=0 --val_fraction=0.1 --strict=True"
SETTINGS = (*SETTINGS.split(), "--workers=1")


def make_debug_data(out_dir: str | Path) -> None:
    """Prepare the documentation of Python's own parts, unless out_dir is there: two seconds."""
    out_dir = Path(out_dir)
    if (out_dir / "manifest.json").exists():  # prepare.py writes it last
        return
    # One process makes the data, the others wait for the lock.
    try:
        lock = lock_directory(out_dir.parent, wait=True)
    except OSError as error:
        raise UserError(f"demo: cannot make {out_dir}: {error.strerror}") from None
    # the lock and the temporary folder go even if prepare.py fails
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, lock)
        if (out_dir / "manifest.json").exists():  # another process was faster
            return
        work = stack.enter_context(tempfile.TemporaryDirectory())
        path = write_rows(debug_texts(), Path(work) / "debug.jsonl")
        command = [sys.executable, str(PREPARE), f"--input={path}", f"--out_dir={out_dir}"]
        done = subprocess.run([*command, *SETTINGS], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"demo: cannot make {out_dir}: {done.stderr.strip()}")


def make_debug_rows(path: str | Path, rows_of: Callable[[list], Iterable[dict]]) -> None:
    """Write rows about Python beside the debug corpus, unless the file is there.

    rows_of makes them of conversations: debug_chats, debug_prompts or debug_pairs."""
    path = Path(path)
    if path.exists():
        return
    make_debug_data(path.parent)
    talks = islice(docs_conversations(), 0, 1400, 7)  # the first: to read all takes a second more
    # Each process writes the same, under a name of its own; the last rename wins.
    own = path.with_name(f".{path.name}.{os.getpid()}")
    os.replace(write_rows(rows_of(list(talks)), own), path)


def debug_chats(talks: list[list[dict]]) -> list[dict]:
    """Return the conversations as rows of sft.py."""
    return [{"messages": talk} for talk in talks]


def debug_prompts(talks: list[list[dict]]) -> list[dict]:
    """Return the first question and answer of each conversation, for rl.py."""
    return [{"messages": talk[:2]} for talk in talks]


def debug_pairs(talks: list[list[dict]]) -> list[dict]:
    """Return first questions with their answer, and with its words in reverse as the worse one."""
    rows = []
    for talk in talks:
        answer = talk[1]["content"]
        reverse = " ".join(answer.split()[::-1])
        rows.append({"prompt": talk[:1], "chosen": answer, "rejected": reverse})
    return rows


def write_rows(rows: Iterable[str | dict], path: Path) -> Path:
    """Write rows as JSON lines and return the path."""
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return path
