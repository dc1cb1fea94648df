"""text_key: which value of a row is meant, as in text, a.b or title,body.

Of conversations and pairs it gives the names that row_formats.py knows to other keys, as in
question=ask,answer=a.b, and likewise to the keys and roles of turns.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from groundup.errors import UserError
from groundup.files.turns import ROLE_KEYS, BadRow, first_of, keys_of, listed, unpacked

# keys of lists of turns
THREADS = ("messages", "conversations", "conversation", "thread", "contents")
OF_TURNS = ("role", "content")  # names that mean keys of turns
SKIP = "skip"  # the role of turns that are not read
OF_ROLES = ("system", "user", "assistant", "tool", SKIP)  # names that mean roles of turns


class Name(NamedTuple):
    path: tuple[str, ...]  # keys, each within the one before
    optional: bool


@lru_cache(maxsize=256)
def parse_text_key(text_key: str) -> tuple[Name, ...]:
    """Return the names in a text_key. Raise UserError.

    text         the text under this key
    a.b          the text under b within a; a list of texts, or of one in each element of a, makes
                 lines
    title,body   each on a line of its own; an empty one makes no line; also title+body
    desc?        may be missing, null or empty

    A key may be in other capitals in the row, unless the row has this very key, too.
    """
    refuse_wide_marks(text_key)
    names = [piece.strip() for piece in re.split("[,+]", text_key)]
    for name in names:
        if not re.fullmatch(r"[^.?]+(\.[^.?]+)*\??", name):
            hint = "write text, a.b or title,body, with ? behind what may be missing"
            raise UserError(f"data: cannot understand {name!r} in text_key={text_key!r}; {hint}")
    return tuple(Name(tuple(name.rstrip("?").split(".")), name.endswith("?")) for name in names)


@lru_cache(maxsize=256)
def parse_names(text_key: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return (name, path) of each part of 'question=ask,answer=a.b'. Raise UserError.

    Only a role may have several: assistant=Agent,assistant=Bot."""
    refuse_wide_marks(text_key)
    pairs = [tuple(map(str.strip, piece.split("="))) for piece in re.split("[,+]", text_key)]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        hint = "for conversations and pairs write question=KEY,answer=KEY"
        if any(len(pair) == 1 for pair in pairs[1:]):
            hint += "; of several names of a role each has its own, assistant=A,assistant=B"
        raise UserError(f"data: cannot understand text_key={text_key!r}; {hint}")
    keys = [name for name, _ in pairs if name not in OF_ROLES]
    twice = next((name for name in keys if keys.count(name) > 1), "")
    if twice:
        raise UserError(f"data: text_key={text_key!r} names {twice} twice; leave one out")
    return tuple((name, tuple(key.split("."))) for name, key in pairs)


def with_given(problem: str, text_key: str) -> str:
    """Return what is wrong with a row that `renamed` returned. The text_key that it tells to write
    also gets the names of the user's, so that it can be typed as it stands."""
    if not text_key:
        return problem
    given = [f"{name}={'.'.join(path)}" for name, path in parse_names(text_key)]
    known = {name for name, _ in parse_names(text_key)}

    def whole(told: re.Match) -> str:
        new = [piece for piece in told[1].split(",") if piece not in given]
        # several keys may mean one role
        new = [piece for piece in new if piece.partition("=")[0] not in known - set(OF_ROLES)]
        return f"--text_key='{','.join([*given, *new])}'"

    return re.sub("--text_key='([^']*)'", whole, problem)


def refuse_wide_marks(text_key: str) -> None:
    """Raise UserError for a comma or = of Chinese typing, which no published key has."""
    for wide, narrow in (("\uff0c", ","), ("\uff1d", "=")):
        if wide in text_key:
            raise UserError(f"data: text_key={text_key!r} has a full-width {wide}; write {narrow}")


def renamed(row: object, text_key: str) -> object:
    """Return a row under the names that text_key gives to its keys, and to those of its turns.

    messages=thread,role=who,content=says,user=Customer,assistant=Agent,skip=Note

    Turns of skipped roles get the role "skip": see `without_skipped`."""
    if not text_key or not isinstance(row, dict):
        return row
    names, rest = parse_names(text_key), row
    found = {}
    for name, path in names:
        value = None if name in (*OF_TURNS, SKIP) else value_at(row, path)
        if value is not None:
            found[name] = value
            # away from where it was, so that no key stays under two names
            rest = without(rest, path)
    row = rest | found

    # of each turn in a list of turns
    keys = {path[0]: name for name, path in names if name in OF_TURNS}
    roles = {".".join(path): name for name, path in names if name in OF_ROLES}
    if keys or roles:
        for thread in THREADS:
            if turns := listed(row.get(thread)):
                row = row | {thread: [renamed_turn(turn, keys, roles) for turn in turns]}
    return row


def without_skipped(row: object, text_key: str) -> tuple[object, int]:
    """Return a row of `renamed` without the turns that are not read, and how many these are."""
    n_skipped = 0
    if not text_key or not isinstance(row, dict) or SKIP not in dict(parse_names(text_key)):
        return row, n_skipped
    for thread in THREADS:
        if turns := listed(row.get(thread)):
            kept = [turn for turn in turns if first_of(turn, ROLE_KEYS) != SKIP]
            n_skipped += len(turns) - len(kept)
            row = row | {thread: kept}
    return row, n_skipped


def missing_keys(row: object, text_key: str) -> str:
    """Return a sentence about the keys of rows that text_key names and a row lacks, "" if it has
    all."""
    if not text_key or not isinstance(row, dict):
        return ""
    paths = [path for name, path in parse_names(text_key) if name not in OF_TURNS + OF_ROLES]
    missing = [repr(".".join(path)) for path in paths if value_at(row, path) is None]
    return f"no {', no '.join(missing)} ({keys_of(row)}); see text_key" if missing else ""


def renamed_turn(turn: dict, keys: dict[str, str], roles: dict[str, str]) -> dict:
    """Return a turn under other names of its keys, and with other names of roles."""
    own = {own_key(turn, key): name for key, name in keys.items()}
    others = {key: value for key, value in turn.items() if key not in own}
    turn = others | {name: turn[key] for key, name in own.items() if key in turn}
    changed = {
        key: roles[turn[key]]
        for key in ("role", "from")
        if isinstance(turn.get(key), str) and turn[key] in roles
    }
    return turn | changed


def without(row: dict, path: tuple[str, ...]) -> dict:
    """Return a row without what lies under the keys, as far as these lead through objects."""
    first, *rest = path
    first = own_key(row, first)
    if not rest:
        return {key: value for key, value in row.items() if key != first}
    inner = unpacked(row.get(first))
    return row | {first: without(inner, tuple(rest))} if isinstance(inner, dict) else row


def text(text_key: str, row: dict, lists: bool = False) -> str:
    """Return the text that is meant; lists: a list of texts is joined by newlines.

    Raise BadRow if there is none."""
    names = parse_text_key(text_key)
    found = [text_at(row, name, lists) for name in names]
    if not any(found) and not any(own_key(row, name.path[0]) in row for name in names):
        keys = ", ".join(f"'{'.'.join(name.path)}?'" for name in names)
        raise BadRow(f"no text under {keys} ({keys_of(row)})")
    return "\n".join(filter(None, found))


def text_at(row: dict, name: Name, lists: bool) -> str:
    found = value_at(row, name.path)
    if lists and isinstance(found, list) and found:
        found = [part for part in found if part is not None]  # beside calls of tools
        if found and all(isinstance(part, str) for part in found):
            return "\n".join(found)
        found = found or None
    if isinstance(found, str):
        return found
    if found is None and name.optional:
        return ""
    kind = "no text" if found is None else f"{type(found).__name__}, not text,"
    raise BadRow(f"{kind} under {'.'.join(name.path)!r} ({keys_of(row)})")


def value_at(value: object, path: tuple[str, ...]) -> object:
    """Return what lies under the keys; of a list on the way, what lies there in each element."""
    for i, key in enumerate(path):
        value = unpacked(value)  # CSV has objects as JSON
        if isinstance(value, list):
            return [value_at(part, path[i:]) for part in value]
        if not isinstance(value, dict):
            return None
        value = value.get(own_key(value, key))
    return value


def found_optional(row: object, text_key: str) -> list[str]:
    """Return the keys with ? in a text_key under which a row has a value; before them "" if the
    row has any keys, and is not a text."""
    names = [name for name in parse_text_key(text_key) if name.optional]
    found = [".".join(name.path) for name in names if value_at(row, name.path) is not None]
    return ["", *found] if isinstance(row, dict) else []


def own_key(row: dict, key: str) -> str:
    """Return the key as a row writes it: in other capitals, unless it has this very key."""
    if key in row:
        return key
    return next((own for own in row if own.lower() == key.lower()), key)


def columns_of(text_key: str) -> list[str] | None:
    """Return the columns of a table that text_key needs; None = it may need any.

    Raise UserError."""
    if not text_key:
        return None
    return list(dict.fromkeys(name.path[0] for name in parse_text_key(text_key)))


def as_score(row: object, key: str) -> float:
    """Return the number under a key of a row, nan if there is none.

    CSV has text for it, parquet may have Decimal."""
    value = row.get(key) if isinstance(row, dict) else None
    try:
        return float("nan" if isinstance(value, bool) or value is None else value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")
