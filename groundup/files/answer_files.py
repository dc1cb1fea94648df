"""A file of answers and the settings beside it.

sample.py writes it, reward.py scores it and prepare.py makes pairs of it.

    FILE              a line for each prompt: its own fields, "index" (its number, from 0), and
                      "completions": [{"text", "finish_reason": "stop" | "length", "stop_reason",
                      with a reward model "reward"}]; a text begins with the <think> that its
                      prompt opened
    FILE.config.json  the settings that decided them: "model" (its name and a fingerprint),
                      "system", "temperature", "seed", ..., and "reward_model", likewise, where one
                      was used

So one file never holds answers of different settings. Answers without their settings are refused:
nobody knows which model gave them, and after which system message.
"""

import json
import math
import os
import re
from pathlib import Path

from groundup.errors import UserError
from groundup.files import records, row_formats, turns
from groundup.files.turns import BadRow
from groundup.files.untrusted import read_json

SUFFIX = ".config.json"  # behind the name of a file of answers
HINT = "sample.py writes it beside its answers, keep the two together"


class NoPair(BadRow):
    """Why a line that can be read gives no pair."""


def settings_path(path: str | Path) -> Path:
    return Path(f"{path}{SUFFIX}")


def is_settings_file(path: str | Path) -> bool:
    """Return whether a file holds the settings of the answers beside it, and is no data itself."""
    return str(path).endswith(SUFFIX) and os.path.exists(str(path).removesuffix(SUFFIX))


def read_settings(path: str | Path) -> dict | None:
    """Return the settings beside the answers in `path`, None if there are none.

    Raise UserError if they are damaged."""
    name = settings_path(path)
    if not name.exists():
        return None
    settings = read_json(name, "answers", HINT)
    if not isinstance(settings.get("model"), str):
        raise UserError(f"answers: {name} does not name the model; {HINT}")
    return settings


def need_settings(path: str | Path) -> dict:
    """Return the settings beside the answers in `path`. Raise UserError if there are none."""
    settings = read_settings(path)
    if settings is None:
        raise UserError(
            f"answers: {settings_path(path)} is missing, so nobody knows what made the answers; "
            f"{HINT}"
        )
    return settings


def write_settings(path: str | Path, settings: dict) -> None:
    """Write the settings of the answers in `path`, whole or not at all. Raise UserError."""
    name = settings_path(path)
    part = name.with_name(name.name + ".tmp")
    try:
        name.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(settings, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        os.replace(part, name)
    except OSError as error:
        raise UserError(f"answers: cannot write {name}: {error.strerror}") from None


def check_settings(path: str | Path, settings: dict) -> None:
    """Write the settings of a new file of answers.

    Raise UserError if an existing one was begun with others."""
    old = read_settings(path)
    if old is None and os.path.exists(path) and os.path.getsize(path):
        missing = settings_path(path).name
        raise UserError(
            f"answers: {path} has no {missing} beside it, so it cannot be continued; "
            "use another out"
        )
    if old is None:
        write_settings(path, settings)
    elif differ := [key for key in old | settings if old.get(key) != settings.get(key)]:
        change = f"{differ[0]}={old.get(differ[0])!r}, not {settings.get(differ[0])!r}"
        raise UserError(f"answers: {path} was begun with {change}; use another out")


def is_answers(path: str) -> bool:
    """Return whether the first readable row of a file is one of answers."""
    rows = (record.value for record in records.read_records(path) if not record.problem)
    first = next(rows, None)
    return isinstance(first, dict) and "completions" in first


def row_of(record: records.Record) -> dict:
    """Return a line with a list of answers. Raise BadRow."""
    if record.problem:
        raise BadRow(record.problem)
    listed = record.value.get("completions") if isinstance(record.value, dict) else None
    if not isinstance(listed, list):
        raise BadRow("no list of completions")
    if not all(
        isinstance(answer, dict) and isinstance(answer.get("text"), str) for answer in listed
    ):
        raise BadRow("a completion without a text")
    return record.value


def continued_text(row: dict, chat: bool) -> str | None:
    """Return the text that a row asks a model to continue, None if it asks for an answer.

    chat: a prompt is a user's message."""
    if row.get("messages") is not None:
        return None
    key = "" if chat else "prompt"
    if row.get("prompt") is None:
        key = "" if row_formats.recognise(row, "chat") else "text"
    return row[key] if isinstance(row.get(key), str) else None


def conversation_of(row: dict, settings: dict) -> tuple[list[dict], str]:
    """Return (the messages that the model answers, the data set's own answer or "").

    The row has any format of row_formats, so the messages are those before the answer that training
    reads in it. Raise NoPair, BadRow."""
    if continued_text(row, settings.get("chat", True)) is not None:
        raise NoPair("a text that was continued, not a question that was answered")
    messages, problem = row_formats.messages_of(row)
    if problem and (pair := row_formats.pair_of(row)[0]):
        messages, problem = [*pair.prompt, {"role": "assistant", "content": pair.chosen}], ""
    alone = row.get("messages") is None and row_formats.recognise(row, "question")
    if problem and alone:
        messages, problem = row_formats.messages_of(row, "question")
    if problem:
        raise BadRow("messages that are not understood", problem)
    own = messages.pop() if messages[-1]["role"] == "assistant" else {"content": ""}
    if turns.is_bad(row) or not turns.is_learned(own):
        own = {"content": ""}  # a bad answer is none to learn from
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise NoPair("no question before the answer")
    if problem := turns.chat_problem([*messages, {"role": "assistant", "content": "answer"}]):
        raise BadRow("messages that are not understood", problem)
    system = settings.get("system")
    if system and messages[0]["role"] != "system":  # which sample.py put in front
        messages = [{"role": "system", "content": system}, *messages]
    messages = [{key: turn[key] for key in turn if key != "learn"} for turn in messages]
    return messages, own["content"]


def text_of(answer: dict) -> str:
    """Return the text of an answer without the end of turn.

    sample.py --skip_special_tokens=False leaves it there."""
    return re.sub(r"<\|im_end\|>\n*\Z", "", answer["text"])


def reward_of(answer: dict) -> float | None:
    value = answer.get("reward")
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None
