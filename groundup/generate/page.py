"""What the page of serve.py needs beside the API: its files, rendered Markdown, questions to begin
with, and rows of preferences from comparisons.
"""

import base64
import hashlib
import json
import os
import re
import threading
import time
from pathlib import Path

from groundup.files.answer_files import conversation_of
from groundup.files.row_formats import pair_of
from groundup.files.turns import BadRow, pair_problem
from groundup.files.untrusted import loads
from groundup.generate.completion import asked_messages
from groundup.generate.openai_api import Refused, conversation, read_object, take
from groundup.generate.rendering import LineProcess

PAGE = Path(__file__).with_name("page.html")
WRITING = threading.Lock()  # two clicks at once
MARKDOWN = LineProcess("groundup.generate.markdown", seconds=5)
N_EXAMPLES = 3
MAX_EXAMPLE = 60  # characters of a question that is offered


def read_page() -> tuple[bytes, dict[str, str]]:
    """Return the page and its headers. It loads nothing, and asks only this server."""
    page = PAGE.read_bytes()
    # One file for the browser, whose parts are named by their hashes
    for name, suffix in ((b"style", ".css"), (b"script", ".js")):
        content = PAGE.with_suffix(suffix).read_bytes()
        page = page.replace(b"<%s></%s>" % (name, name), b"<%s>\n%s</%s>" % (name, content, name))
    policy = (
        f"default-src 'none'; script-src 'sha256-{sha256(page, b'script')}'; "
        f"style-src 'sha256-{sha256(page, b'style')}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types groundup"  # innerHTML in one place only
    )
    return page, {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def sha256(page: bytes, name: bytes) -> str:
    """Return the hash of what stands in the page's only <script> or <style>."""
    (found,) = re.findall(rb"<%s>(.*?)</%s>" % (name, name), page, re.S)
    return base64.b64encode(hashlib.sha256(found).digest()).decode()


def render(raw: bytes) -> dict:
    """Return {"html", "rest"} of a body {"text", "whole"}, see markdown.to_html. What takes too
    long stays text."""
    body = read_object(raw)
    text, whole = take(body, "text", str, ""), take(body, "whole", bool, True)
    html, rest = MARKDOWN.ask([text, whole]) or ("", text)
    return {"html": html, "rest": rest}


def examples(checkpoint: Path) -> list[str]:
    """Return short questions of the data that the run of this checkpoint was tuned on, if any."""
    try:
        # The run says in its config.py what it was tuned on.
        config = (checkpoint.resolve().parent / "config.py").read_text(encoding="utf-8")
        data = re.search(r"^data = [\"'](.+)[\"']$", config, re.M)
        files = [Path(data[1], name) for name in ("held_out.jsonl", "val.jsonl")] if data else []
        found = next((path for path in files if path.is_file() and path.stat().st_size), None)
        with open(found or os.devnull, "rb") as file:
            lines = file.read(1_000_000).split(b"\n")[:-1]
    except OSError:
        return []
    # A hundred lines from all over the file, of these the short questions
    questions = []
    for line in lines[:: len(lines) // 100 + 1]:
        try:
            messages, _ = conversation_of(loads(line), {})
        except (BadRow, ValueError):
            continue
        question = messages[-1]["content"].strip()
        if len(messages) == 1 and len(question) <= MAX_EXAMPLE and question not in questions:
            questions.append(question)
    return questions[:: max(1, len(questions) // N_EXAMPLES)][:N_EXAMPLES]


def preference(raw: bytes, system: str) -> tuple[dict, str]:
    """Return (row for the file, why training will pass it over or "") of a click.

    The body has messages, two answers as they stood, and which is better: 0, 1 or "tie", for which
    the reason is "tie". system: of the server. Raise Refused if dpo.py could not read the row."""
    body = read_object(raw)
    messages, answers = conversation(body.get("messages")), take(body, "answers", list, [])
    better = body.get("better")
    if better not in (0, 1, "tie") or isinstance(better, bool):
        raise Refused(400, f"better must be 0, 1 or 'tie', got {better!r:.80}", "better")
    if len(answers) != 2 or not all(isinstance(answer, dict) for answer in answers):
        what = "answers must be two objects with model, content and finish_reason"
        raise Refused(400, what, "answers")
    row = {"messages": asked_messages(system, messages)}  # as the models were given them
    # Of a tie the order says nothing.
    best_first = answers[::-1] if better == 1 else answers
    for side, answer in zip(("chosen", "rejected"), best_first, strict=True):
        row[side] = take(answer, "content", str, "")
        row[f"{side}_model"] = take(answer, "model", str, "")[:200]
        row[f"{side}_finish_reason"] = take(answer, "finish_reason", str, "")[:20]
    row["time"] = int(time.time())
    if better == "tie":
        return row, "tie"
    # Where the better one stood: people favour one side.
    row["chosen_was_shown"] = ("first", "second")[better == 1]
    # Read the row as training will.
    pair, problem = pair_of(row)
    if not pair:
        raise Refused(400, f"this is no preference: {problem}", "answers")
    return row, pair_problem(row, pair)


def append(path: Path, row: dict) -> None:
    """Add a row to a file of JSON lines. On a full disk nothing of it stays."""
    line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
    with WRITING:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if file.write(line) != len(line):
                file.truncate(end)
                raise OSError("No space left on device")
