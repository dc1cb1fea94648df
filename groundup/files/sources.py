"""How a setting names sources of data: paths between commas, each with a weight behind "=" if it
has one.

    a.jsonl=0.7,b/*.jsonl=0.3
    0: data/a=1; 8000: data/a=0.5,data/b=0.5      # stages: the second after 8000 steps

A comma or "=" may also be part of a name: if a file of that name exists, it is meant. paths.py
finds the files that such a name, a glob or a directory stands for.
"""

import math
import os
import re
from typing import NamedTuple

from groundup.errors import UserError

MOST_COMMAS = 8  # in one name

# ---- names and weights -------------------------------------------------------------------------


def split_names(names: str) -> list[str]:
    """Return the parts between commas, without white space around them; "" is a part, too."""
    # join pieces again, the most first, as long as they make the name of a file
    pieces, parts = names.split(","), []
    while pieces:
        tried = range(min(len(pieces), MOST_COMMAS + 1), 1, -1)
        n = next((n for n in tried if is_name(",".join(pieces[:n]).strip())), 1)
        parts.append(",".join(pieces[:n]).strip())
        del pieces[:n]
    return parts


def is_name(part: str) -> bool:
    """Return whether a part that holds commas names a file, with or without its weight."""
    name, _, weight = part.rpartition("=")
    return os.path.exists(part) or ("," not in weight and os.path.exists(name.strip()))


def split_weight(part: str) -> tuple[str, str]:
    """Return (name, what stands behind the last "=" or ""); "=" in a folder's name is no weight."""
    name, equals, weight = part.rpartition("=")
    if not equals or os.path.exists(part) or re.search(r"[/\\*?]", weight):
        return part, ""
    return name.strip(), weight.strip()


# ---- the settings data_dir, data, val_data and max_epochs ------------------------------------


class Stage(NamedTuple):
    first_step: int  # number of steps before it
    weights: dict[str, float | None]  # by path; None = the user gave none


def parse_data_dir(spec: str, key: str = "data_dir") -> list[Stage]:
    """Return the stages in the value `spec` of the setting `key`. Raise UserError."""
    stages = []
    for part in spec.split(";"):
        step, colon, paths = re.fullmatch(r"\s*(?:(\d+)\s*(:))?(.*)", part, re.DOTALL).groups()
        if not colon and ";" in spec:
            problem = f"{part.strip()!r} in {key}={spec!r} has no first step"
            raise UserError(f"data: {problem}; write '0: a=1; 8000: b=1'")
        stages.append(Stage(int(step or 0), parse_weights(paths, spec, key)))
    steps = [stage.first_step for stage in stages]
    if steps != sorted({0, *steps}):
        problem = f"stages of {key}={spec!r} begin at steps {steps}"
        raise UserError(f"data: {problem}; begin at 0 and go up")
    return stages


def parse_weights(text: str, spec: str, key: str = "data_dir") -> dict[str, float | None]:
    """Return {'data/a': 0.7, 'data/b': 0.3} of 'data/a=0.7,data/b=0.3'. Raise UserError."""
    weights: dict[str, float | None] = {}
    for part in split_names(text):
        path, number = split_weight(part)
        weight = parse_number(number) if number else None
        named = f"{part!r} in {key}={spec!r}"
        if not path or (number and weight is None):
            raise UserError(f"data: {named} is not 'path' or 'path=weight above 0'")
        if path in weights:
            raise UserError(f"data: {path!r} comes twice in {key}={spec!r}; add its weights up")
        weights[path] = weight
    # a share of some and no share of others has no meaning
    bare = [path for path, weight in weights.items() if weight is None]
    if 0 < len(bare) < len(weights):
        problem = f"{bare[0]!r} in {key}={spec!r} has no weight but others have"
        raise UserError(f"data: {problem}; weigh all or none")
    return weights


def parse_number(text: str) -> float | None:
    """Return the finite number above 0 that `text` is, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None
