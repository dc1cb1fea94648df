"""Which files a setting means: names, globs and directories, separated by commas, each with a
weight behind "=" if it has one.

    a.jsonl=0.7,b/*.jsonl=0.3
    0: data/a=1; 8000: data/a=0.5,data/b=0.5      # stages: the second after 8000 steps

A comma or "=" may also be part of a name: if a file of that name exists, it is meant.
"""

import glob
import math
import os
import re
from typing import NamedTuple

from groundup.errors import UserError

MOST_COMMAS = 8  # in one name
# By these a directory that prepare.py made is known, also without its manifest.
PREPARED = {"report.md", "dropped.tsv"}
# Also of packed files.
DATA_SUFFIXES = (".txt", ".text", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")


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


def matches(name: str) -> list[str]:
    """Return the paths that a name or glob matches; brackets of existing folders are no glob."""
    if os.path.exists(name):
        return [name]
    if found := sorted(glob.glob(name, recursive=True)):
        return found
    # Which folders exist as they are written? Only what is behind them is a glob.
    folder, rest = name, ""
    while folder and not os.path.isdir(folder):
        folder, last = os.path.split(folder)
        rest = os.path.join(last, rest) if rest else last
        if not last:
            return []
    return sorted(glob.glob(os.path.join(glob.escape(folder), rest), recursive=True))


# ---- the files of a setting --------------------------------------------------------------------


def find_files(input: str, setting: str = "") -> list[str]:
    """Return the paths of `input`: files, directories, globs, comma-separated; "-" is standard
    input. In the order given, each once; of a directory the files that `is_data`, recursively, in
    the byte order of relative paths. Raise UserError for a part that matches no file.

    setting: the name of the one that holds `input`, for the message."""
    found: list[str] = []
    for part in filter(None, split_names(input)):
        matched = [part] if part == "-" else matches(part)
        files = [
            file
            for match in matched
            for file in (list_directory(match) if os.path.isdir(match) else [match])
        ]
        if not files:
            hint = "give files, directories or globs, separated by commas"
            named = f" in --{setting}" if setting else ""
            raise UserError(f"data: no file matches {part!r}{named}; {hint}")
        found += files
    unlinked: dict[str, str] = {}  # a link beside the file that it leads to is no second file
    for file in found:
        real = os.path.realpath(file)
        if os.path.islink(unlinked.setdefault(real, file)):
            unlinked[real] = file
    return list(unlinked.values())


def list_directory(top: str) -> list[str]:
    """Return the data files of a directory; print how many others it has, and the first names."""
    files, others = [], []
    seen = {os.path.realpath(top)}  # a link to a folder above would never end
    for folder, folders, names in os.walk(top, onerror=stop, followlinks=True):
        if PREPARED.issubset(names):
            folders.clear()
            where = shown_name(folder)
            if folder == top:
                hint = "give the files that it was made of, or its train.jsonl"
                what = f"{where} is a directory that prepare.py made, not raw data"
                raise UserError(f"data: {what}; {hint}")
            print(f"data: {where} is left out: prepare.py made it")
            continue
        if {"state.json", "dataset_info.json"}.issubset(names):  # of save_to_disk
            call = f"load_from_disk({folder!r}).to_json('rows.jsonl')"
            how = f'python -c "import datasets; datasets.{call}"'
            raise UserError(f"data: {shown_name(folder)} is of the library datasets; first: {how}")
        entered = {}  # of two links to a folder, one
        for name in folders:
            real = os.path.realpath(os.path.join(folder, name))
            if not name.startswith(".") and real not in seen:
                entered[real] = name
        folders[:] = entered.values()
        seen |= entered.keys()
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), top)
            (files if is_data(name) else others).append(path)
    if others := sorted(map(shown_name, others)):
        shown = ", ".join(others[:10]) + (", ..." if len(others) > 10 else "")
        what = f"passed over {len(others):,} that are no data by name: {shown}"
        hint = f"of a directory only {' '.join(DATA_SUFFIXES)} are read, also packed"
        hint += "; name other files, or give a glob"
        print(f"data: {shown_name(top)}: {what}; {hint}")
    return [os.path.join(top, file) for file in sorted(files, key=os.fsencode)]


def stop(error: OSError) -> None:
    raise UserError(f"data: cannot read {shown_name(error.filename)}: {error.strerror}")


def is_data(name: str) -> bool:
    """Return whether a file of a directory is data, by its name: not hidden, no README or LICENSE,
    a suffix of data."""
    stem, suffix = os.path.splitext(unpacked_name(name))
    # of Hugging Face's and LLaMA-Factory's folders
    about = ("readme", "license", "dataset_info", "dataset_infos")
    return not name.startswith(".") and stem not in about and suffix in DATA_SUFFIXES


def unpacked_name(path: str) -> str:
    """Return the name of a file in lower case, without the suffix of its compression."""
    return re.sub(r"\.(gz(ip)?|bz2?|xz|zstd?)$", "", os.path.basename(path).lower())


def shown_name(path: str) -> str:
    """Return a path as valid Unicode in one line without tabs: names from zip files may be GBK."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return re.sub(r"[\0-\x1f\x7f]", lambda control: repr(control[0])[1:-1], text)


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
        if os.path.realpath(path) in map(os.path.realpath, weights):
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
