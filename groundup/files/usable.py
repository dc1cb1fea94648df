"""Which conversations and preference pairs can be trained on, whatever format they came in."""

import itertools
import re
import unicodedata
from typing import NamedTuple


class Pair(NamedTuple):
    prompt: list[dict]  # messages up to the answer
    chosen: str
    rejected: str


def chat_problem(messages: list[dict], row: object = None) -> str:
    """Return why a conversation cannot be trained on, one of CHAT_PROBLEMS, or "" if it can. row: that it is from.

    The assistant may speak first. A last turn that is not the assistant's is no problem: see `trim_chat`.
    """
    if isinstance(row, dict) and not row.keys().isdisjoint(("messages", "conversations", "completion")):
        if label_of(row) is False:
            return "bad answer"
    roles = [message["role"] for message in messages]
    if any(role not in FOLLOWERS for role in roles):
        return "unknown role"
    if "system" in roles[1:]:
        return "system message not first"
    if "assistant" not in roles:
        return "answer missing"
    if any(m["role"] == "assistant" and is_blank(m["content"]) for m in messages):
        return "empty answer"
    for role, following in itertools.pairwise(["system", *roles]):
        if following not in FOLLOWERS[role]:
            return f"two {role} turns in a row" if role == following else "tool turn out of place"
    return ""


FOLLOWERS = {  # which turns may follow one; a conversation begins as if after a system message
    "system": ("system", "user", "assistant"),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
KTO_LABELS = ("label", "kto_tag")  # of trl, of LLaMA-Factory: whether the answer is a good one
CHAT_PROBLEMS = (
    "bad answer", "unknown role", "system message not first", "answer missing", "empty answer",
    "two user turns in a row", "two assistant turns in a row", "tool turn out of place",
)  # fmt: skip


def label_of(row: object) -> bool | None:
    """Return whether a row of KTO says that its last answer is a good one, None if it does not say."""
    found = [row[key] for key in KTO_LABELS if key in row] if isinstance(row, dict) else []
    return {"true": True, "false": False}.get(str(found[0]).lower()) if found else None


def trim_chat(messages: list[dict]) -> list[dict]:
    """Return the messages up to the assistant's last one: what follows is never answered."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return messages[: last + 1]


INVISIBLE = re.compile("[\0-\x08\x0b-\x1f\x7f\u200b-\u200d\u2060\ufeff]")


def is_blank(text: str) -> bool:
    """Return whether a text has nothing to see, which cleaning would leave empty."""
    return not INVISIBLE.sub("", text).strip()


def are_equal(*answers: str) -> bool:
    """Return whether answers look the same, but for white space around them."""
    return len({unicodedata.normalize("NFC", INVISIBLE.sub("", text)).strip() for text in answers}) == 1


def pair_problem(row: dict, pair: Pair) -> str:
    """Return why the pair of a row cannot be trained on, "" if it can."""
    turns = [*pair.prompt, {"role": "assistant", "content": pair.chosen}]
    return "unfinished answer" if is_unfinished(row, pair) else chat_problem(turns)


def is_unfinished(row: dict, pair: Pair) -> bool:
    """Return whether a row says that an answer of its pair was cut off: under finish_reason, under that of a side, or
    under that of the answer among its completions."""
    names = ("finish_reason", "chosen_finish_reason", "rejected_finish_reason")
    answers = row.get("completions")
    answers = [one for one in answers if isinstance(one, dict)] if isinstance(answers, list) else []
    cut = [one.get("text") for one in answers if one.get("finish_reason") == "length"]
    return any(row.get(name) == "length" for name in names) or pair.chosen in cut or pair.rejected in cut
