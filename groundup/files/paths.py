"""Names of files in settings: separated by commas, each with a weight behind "=" if it has one.

    a.jsonl=0.7,b/*.jsonl=0.3

A comma or "=" may also be a part of a name: what exists, is meant.
"""

import glob
import os
import re

MOST_COMMAS = 8  # in one name


def split_names(names: str) -> list[str]:
    """Return the parts between commas, without white space around them; "" is a part, too."""
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


def matches(name: str) -> list[str]:
    """Return the paths that a name or glob matches; brackets of existing folders are no glob."""
    if os.path.exists(name):
        return [name]
    if found := sorted(glob.glob(name, recursive=True)):
        return found
    folder, rest = name, ""
    while folder and not os.path.isdir(folder):
        folder, last = os.path.split(folder)
        rest = os.path.join(last, rest) if rest else last
        if not last:
            return []
    return sorted(glob.glob(os.path.join(glob.escape(folder), rest), recursive=True))
