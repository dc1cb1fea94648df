"""text_key: which text of a row is meant, as in text, a.b, title,body or title + "\\n" + body."""

import ast
import re
from functools import lru_cache
from typing import NamedTuple

from groundup.errors import UserError


class BadRow(Exception):
    """A row that cannot be used, and why."""


class Name(NamedTuple):
    path: tuple[str, ...]  # keys, each within the one before
    optional: bool


Template = tuple[tuple[str | Name, ...], ...]  # parts on lines of their own, each of pieces one after the other
PIECE = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^"'+,?]+\??)\s*([+,]|$)""", re.DOTALL)


@lru_cache(maxsize=256)
def parse_text_key(text_key: str) -> Template:
    r"""Return how to make a text from a row. Raise UserError.

    text                    the text under this key
    a.b                     the text under b within a; a list of texts, or of one in each element of a, makes lines
    title,body              each on a line of its own; an empty one makes no line
    title + "\n\n" + body   joined as in Python
    desc?                   may be missing, null or empty
    """
    parts: list[list[str | Name]] = [[]]
    position, separator = 0, "+"
    while separator:
        match = PIECE.match(text_key, position)
        piece = match[1].strip() if match else ""
        if not piece or piece == "?" or "" in piece.rstrip("?").split("."):
            raise UserError(
                f"data: cannot understand text_key={text_key!r} at {text_key[position:][:20]!r}; write text, a.b, "
                'title,body or title + "\\n" + body, with ? behind what may be missing'
            )
        is_literal = piece[0] in "\"'"
        parts[-1].append(unquote(piece) if is_literal else Name(tuple(piece.rstrip("?").split(".")), piece[-1] == "?"))
        position, separator = match.end(), match[2]
        if separator == ",":
            parts.append([])
    return tuple(map(tuple, parts))


def unquote(literal: str) -> str:
    try:
        return ast.literal_eval(literal)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"data: text_key has the string {literal}, which Python cannot read: {error}") from None


def text(text_key: str, row: dict) -> str:
    return fill(parse_text_key(text_key), row)


def fill(template: Template, row: dict, lists: bool = False) -> str:
    lines = []
    for pieces in template:
        texts = [piece if isinstance(piece, str) else text_at(row, piece, lists) for piece in pieces]
        if any(text for piece, text in zip(pieces, texts, strict=True) if isinstance(piece, Name)):
            lines.append("".join(texts))
    return "\n".join(lines)


def text_at(row: dict, name: Name, lists: bool) -> str:
    """Return the text under a name; lists: a list of texts is joined by newlines. Raise BadRow for anything else."""
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
    if not text_key:
        return None
    names = [piece.path[0] for pieces in parse_text_key(text_key) for piece in pieces if isinstance(piece, Name)]
    return list(dict.fromkeys(names))


def keys_of(row: dict) -> str:
    return f"keys {', '.join(map(str, row))}"[:200]


def as_score(row: object, key: str) -> float:
    """Return the number under a key of a row, nan if there is none. CSV has text for it, parquet may have Decimal."""
    value = row.get(key) if isinstance(row, dict) else None
    try:
        return float("nan" if isinstance(value, bool) or value is None else value)
    except (TypeError, ValueError):
        return float("nan")
