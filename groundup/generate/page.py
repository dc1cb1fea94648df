"""What the page of serve.py needs beside the API: its file with headers that let it load nothing
else, and the rows of preferences that its comparisons leave.
"""

import base64
import hashlib
import json
import os
import re
import threading
import time
from pathlib import Path

from groundup.files.row_formats import pair_of
from groundup.files.usable import pair_problem
from groundup.generate.openai_format import Refused, conversation, read_object, take

PAGE = Path(__file__).with_name("page.html")
WRITING = threading.Lock()  # two clicks at once


def read_page() -> tuple[bytes, dict[str, str]]:
    """Return the page and its headers: only its own script and style run, and it talks to this
    server alone."""
    page = PAGE.read_bytes()
    policy = (
        f"default-src 'none'; script-src 'sha256-{sha256(page, b'script')}'; "
        f"style-src 'sha256-{sha256(page, b'style')}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"  # the browser refuses innerHTML
    )
    return page, {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def sha256(page: bytes, name: bytes) -> str:
    """Return the hash of what stands in the page's only <script> or <style>, as a policy writes
    it."""
    (found,) = re.findall(rb"<%s>(.*?)</%s>" % (name, name), page, re.S)
    return base64.b64encode(hashlib.sha256(found).digest()).decode()


def preference(raw: bytes, system: str) -> tuple[dict, str]:
    """Return (row for the file, why training will pass it over or "") of a click: messages, two
    answers in the order in which they stood, and which is better: 0, 1 or "tie", for which the
    reason is "tie". system: of the server, which the models were given if the chat has none.
    Raise Refused if dpo.py could not read the row."""
    body = read_object(raw)
    messages, answers, better = (
        conversation(body.get("messages")),
        take(body, "answers", list, []),
        body.get("better"),
    )
    if better not in (0, 1, "tie") or isinstance(better, bool):
        raise Refused(400, f"better must be 0, 1 or 'tie', got {better!r:.80}", "better")
    if len(answers) != 2 or not all(isinstance(answer, dict) for answer in answers):
        raise Refused(
            400, "answers must be two objects with model, content and finish_reason", "answers"
        )
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    row = {"messages": messages}
    for side, answer in zip(
        ("chosen", "rejected"), answers[::-1] if better == 1 else answers, strict=True
    ):
        row |= {
            side: take(answer, "content", str, ""),
            f"{side}_model": take(answer, "model", str, "")[:200],
        }
        row[f"{side}_finish_reason"] = take(answer, "finish_reason", str, "")[:20]
    row |= {"chosen_was_shown": ("first", "second")[better == 1], "time": int(time.time())}
    if better == "tie":
        del row["chosen_was_shown"]
        return row, "tie"
    pair, problem = pair_of(row)
    if not pair:
        raise Refused(400, f"this is no preference: {problem}", "answers")
    return row, pair_problem(row, pair)


def append(path: Path, row: dict) -> None:
    """Add a row to a file of JSON lines. On a full disk nothing of it stays, so that the next
    row is a line."""
    line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
    with WRITING:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if file.write(line) != len(line):
                file.truncate(end)
                raise OSError("No space left on device")
