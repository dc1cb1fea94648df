"""Which conversations and preference pairs can be trained on, whatever layout they came in."""

import itertools
import math
import re
import unicodedata
from typing import NamedTuple


class Pair(NamedTuple):
    prompt: list[dict]  # messages up to the answer
    chosen: str
    rejected: str


# ---- what a row says about learning from it --------------------------------------------------

# Flags of a turn, or of a part of one, that say whether to learn from it: prepare.py's, OpenAI's
# and axolotl's, ms-swift's, LLaMA-Factory's. 0 and false mean no; null means nothing.
WEIGHTS = ("learn", "weight", "train", "training", "loss", "loss_scale", "loss_weight")
ROW_WEIGHTS = ("weight", "train", "loss_scale", "loss_weight")  # evaluate.py writes a loss, too
KTO_LABELS = ("label", "kto_tag")  # of trl, of LLaMA-Factory: whether the last answer is good
FLAGS_OF_ROWS = {*ROW_WEIGHTS, *KTO_LABELS}


def as_number(value: object) -> float:
    """Return a flag as a number: 0 for no, 1 for yes, nan if it says nothing."""
    words = {"true": 1.0, "false": 0.0}
    if isinstance(value, str):
        value = words.get(value.strip().lower(), value)
    try:
        return float("nan" if value is None else value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def is_learned(holder: dict, flags: tuple[str, ...] = WEIGHTS) -> bool:
    """Return False if a flag of a turn, part or row says not to learn from it."""
    found = [holder[flag] for flag in flags if flag in holder]
    return not any(as_number(value) <= 0 for value in found)


def label_of(row: object) -> bool | None:
    """Return whether a row says that its last answer is a good one, None if it does not say."""
    if not isinstance(row, dict):
        return None
    found = [as_number(row[key]) for key in KTO_LABELS if row.get(key) is not None]
    return {1.0: True, 0.0: False}.get(found[0]) if found else None


def is_bad(row: object) -> bool:
    """Return whether a row says that its answer is bad, or not to be learned."""
    if not isinstance(row, dict) or FLAGS_OF_ROWS.isdisjoint(row):
        return False
    return label_of(row) is False or not is_learned(row, ROW_WEIGHTS)


# ---- conversations ---------------------------------------------------------------------------


def chat_problem(messages: list[dict], row: object = None) -> str:
    """Return why a conversation cannot be trained on, one of CHAT_PROBLEMS, "" if it can.

    row: that it is from, whose flags are obeyed. The assistant may speak first. A last turn that
    is not the assistant's is no problem: see `trim_chat`.
    """
    if is_bad(row):
        return "bad answer"
    roles = [message["role"] for message in messages]
    if any(role not in FOLLOWERS for role in roles):
        return "unknown role"
    if "system" in roles[1:]:
        return "system message not first"
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        return "answer missing"
    if not any(message.get("learn", True) for message in answers):
        return "bad answer"
    if any(is_blank(message["content"]) for message in answers):
        return "empty answer"
    for role, following in itertools.pairwise(["system", *roles]):
        if following not in FOLLOWERS[role]:
            if role == following:
                return f"two {role} turns in a row"
            return "tool turn out of place"
    return ""


FOLLOWERS = {  # which turns may follow one; a conversation begins as if after a system message
    "system": ("system", "user", "assistant"),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
CHAT_PROBLEMS = (
    "bad answer",
    "unknown role",
    "system message not first",
    "answer missing",
    "empty answer",
    "two user turns in a row",
    "two assistant turns in a row",
    "tool turn out of place",
)


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
    shown = {unicodedata.normalize("NFC", INVISIBLE.sub("", text)).strip() for text in answers}
    return len(shown) == 1


# ---- pairs -----------------------------------------------------------------------------------


def pair_problem(row: dict, pair: Pair) -> str:
    """Return why the pair of a row cannot be trained on, "" if it can."""
    if is_unfinished(row, pair):
        return "unfinished answer"
    if not is_learned(row, ROW_WEIGHTS):
        return "bad answer"
    return chat_problem([*pair.prompt, {"role": "assistant", "content": pair.chosen}])


def is_unfinished(row: dict, pair: Pair) -> bool:
    """Return whether a row says that an answer of its pair was cut off.

    It says so under finish_reason, under that of a side, or under that of the answer among its
    completions."""
    names = ("finish_reason", "chosen_finish_reason", "rejected_finish_reason")
    if any(row.get(name) == "length" for name in names):
        return True
    answers = row.get("completions")
    answers = [one for one in answers if isinstance(one, dict)] if isinstance(answers, list) else []
    cut = [one.get("text") for one in answers if one.get("finish_reason") == "length"]
    return pair.chosen in cut or pair.rejected in cut
