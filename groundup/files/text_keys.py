"""text_key: which text of a row is meant, as in text, a.b or title,body."""

import re
from functools import lru_cache
from typing import NamedTuple

from groundup.errors import UserError


class BadRow(Exception):
    """A row that cannot be used, and why."""


class Name(NamedTuple):
    path: tuple[str, ...]  # keys, each within the one before
    optional: bool


@lru_cache(maxsize=256)
def parse_text_key(text_key: str) -> tuple[Name, ...]:
    """Return the names in a text_key. Raise UserError.

    text         the text under this key
    a.b          the text under b within a; a list of texts, or of one in each element of a, makes lines
    title,body   each on a line of its own; an empty one makes no line
    desc?        may be missing, null or empty
    """
    names = [piece.strip() for piece in text_key.split(",")]
    for name in names:
        if not re.fullmatch(r"[^.?]+(\.[^.?]+)*\??", name):
            hint = "write text, a.b or title,body, with ? behind what may be missing"
            raise UserError(f"data: cannot understand {name!r} in text_key={text_key!r}; {hint}")
    return tuple(Name(tuple(name.rstrip("?").split(".")), name.endswith("?")) for name in names)


@lru_cache(maxsize=256)
def parse_names(text_key: str) -> dict[str, tuple[str, ...]]:
    """Return {name: path} of 'question=ask,answer=a.b', which gives other names to keys of a row. Raise UserError."""
    pairs = [tuple(map(str.strip, piece.split("="))) for piece in text_key.split(",")]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        hint = "for conversations and pairs write question=KEY,answer=KEY"
        raise UserError(f"data: cannot understand text_key={text_key!r}; {hint}")
    return {name: tuple(key.split(".")) for name, key in pairs}


def renamed(row: object, text_key: str) -> object:
    """Return a row with what text_key names under the other names, too. See `parse_names`."""
    if not text_key or not isinstance(row, dict):
        return row
    found = ((name, value_at(row, path)) for name, path in parse_names(text_key).items())
    return row | {name: value for name, value in found if value is not None}


def text(text_key: str, row: dict, lists: bool = False) -> str:
    """Return the text that is meant; lists: a list of texts is joined by newlines. Raise BadRow if there is none."""
    return "\n".join(filter(None, (text_at(row, name, lists) for name in parse_text_key(text_key))))


def text_at(row: dict, name: Name, lists: bool) -> str:
    found = value_at(row, name.path)
    if lists and isinstance(found, list) and found and all(isinstance(part, str) for part in found):
        return "\n".join(found)
    if isinstance(found, str):
        return found
    if found is None and name.optional:
        return ""
    kind = "no text" if found is None else f"{type(found).__name__}, not text,"
    raise BadRow(f"{kind} under {'.'.join(name.path)!r} ({keys_of(row)})")


def value_at(value: object, path: tuple[str, ...]) -> object:
    """Return what lies under the keys; for a list on the way, the list of what lies there in each of its elements."""
    if not path:
        return value
    if isinstance(value, list):
        return [value_at(part, path) for part in value]
    return value_at(value.get(path[0]), path[1:]) if isinstance(value, dict) else None


def columns_of(text_key: str) -> list[str] | None:
    """Return the columns of a table that text_key needs; None = it may need any. Raise UserError."""
    return list(dict.fromkeys(name.path[0] for name in parse_text_key(text_key))) if text_key else None


def keys_of(row: dict) -> str:
    return f"keys {', '.join(map(str, row))}"[:200] if row else "no keys"


def as_score(row: object, key: str) -> float:
    """Return the number under a key of a row, nan if there is none. CSV has text for it, parquet may have Decimal."""
    value = row.get(key) if isinstance(row, dict) else None
    try:
        return float("nan" if isinstance(value, bool) or value is None else value)
    except (TypeError, ValueError):
        return float("nan")
