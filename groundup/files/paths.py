"""Which files a setting means: names, globs and directories, separated by commas (configurator.py
says how a comma may be part of a name).
"""

import glob
import os
import re
from pathlib import Path

from configurator import split_names
from groundup.errors import UserError

# By these a directory that prepare.py made is known, also without its manifest.
PREPARED = {"report.md", "dropped.tsv"}
# Also of packed files.
DATA_SUFFIXES = (".txt", ".text", ".jsonl", ".ndjson", ".jsonlines", ".json", ".csv", ".tsv")
DATA_SUFFIXES += (".parquet",)


def matches(name: str) -> list[str]:
    """Return the paths that a name or glob matches; brackets of existing folders are no glob."""
    if os.path.exists(name):
        return [name]
    if found := sorted(glob.glob(name, recursive=True)):  # ** is any folder
        return found
    # Which folders exist as they are written? Only what is behind them is a glob.
    folder, rest = name, ""
    while folder and not os.path.isdir(folder):
        folder, last = os.path.split(folder)
        rest = os.path.join(last, rest) if rest else last
        if not last:
            return []
    return sorted(glob.glob(os.path.join(glob.escape(folder), rest), recursive=True))


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
            if "://" in part:
                hint = f"nothing is downloaded from here; first: curl -LO {part}"
            elif matched:
                hint = "the directory holds no data"
            named = f" in --{setting}" if setting else ""
            raise UserError(f"data: no file matches {part!r}{named}; {hint}")
        found += files
    unlinked: dict[str, str] = {}  # a link beside the file that it leads to is no second file
    for file in found:
        real = os.path.realpath(file)  # without links
        if os.path.islink(unlinked.setdefault(real, file)):
            unlinked[real] = file
    return list(unlinked.values())


def list_directory(top: str) -> list[str]:
    """Return the data files of a directory; print how many others it has, and the first names."""
    files, others = [], []  # paths from `top` on
    seen = {os.path.realpath(top)}  # a link to a folder above would never end
    for folder, folders, names in os.walk(top, onerror=stop, followlinks=True):
        if PREPARED.issubset(names):
            folders.clear()  # os.walk enters none of them
            where = shown_name(folder)
            if folder == top:
                hint = "give the files that it was made of, or its train.jsonl or val.jsonl"
                if "val.jsonl" not in names:
                    hint = "its texts are stored as tokens only; give text files. The loss on its"
                    hint += " val split is in README.md of the run that was trained on it"
                what = f"{where} is a directory that prepare.py made, not raw data"
                raise UserError(f"data: {what}; {hint}")
            print(f"data: {where} is left out: prepare.py made it")
            continue
        refuse_tables(folder, folders, names)
        entered = {}  # of two links to a folder, one
        for name in folders:
            path = os.path.join(folder, name)
            real = os.path.realpath(path)
            if name.startswith("_"):  # such as Spark's _temporary; Hadoop and pyarrow skip it
                others.append(os.path.relpath(path, top) + os.sep)
            elif not name.startswith(".") and real not in seen:
                entered[real] = name
        folders[:] = entered.values()  # os.walk enters these
        seen |= entered.keys()
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), top)
            (files if is_data(name) else others).append(path)
    if others := sorted(map(shown_name, others)):
        shown = ", ".join(others[:10]) + (", ..." if len(others) > 10 else "")
        what = f"passed over {len(others):,} that are no data by name: {shown}"
        hint = f"of a directory only {' '.join(DATA_SUFFIXES)} are read, also packed"
        hint += ", and no folders that begin with _; name other files, or give a glob"
        print(f"data: {shown_name(top)}: {what}; {hint}")
    return [os.path.join(top, file) for file in sorted(files, key=os.fsencode)]


def refuse_tables(folder: str, folders: list[str], names: list[str]) -> None:
    """Raise UserError for a folder of another program whose data files alone are not its rows: some
    may be of earlier versions, with rows that were removed since."""
    if {"state.json", "dataset_info.json"}.issubset(names):  # of save_to_disk
        call = f"load_from_disk({folder!r}).to_json('rows.jsonl')"
        how = f'python -c "import datasets; datasets.{call}"'
        raise UserError(f"data: {shown_name(folder)} is of the library datasets; first: {how}")
    if lake := {"_delta_log", ".hoodie"}.intersection(folders):
        what = f"{shown_name(folder)} is a table whose {lake.pop()} tells which rows count"
        raise UserError(f"data: {what}; export these to parquet or JSON lines")


def stop(error: OSError) -> None:
    raise UserError(f"data: cannot read {shown_name(error.filename)}: {error.strerror}")


def is_data(name: str) -> bool:
    """Return whether a file of a directory is data, by its name: not hidden, no README or LICENSE,
    a suffix of data."""
    stem, suffix = os.path.splitext(unpacked_name(name))  # of a.jsonl.gz: a, .jsonl
    # of Hugging Face's and LLaMA-Factory's folders
    about = ("readme", "license", "dataset_info", "dataset_infos")
    return not name.startswith(".") and stem not in about and suffix in DATA_SUFFIXES


def unpacked_name(path: str) -> str:
    """Return the name of a file in lower case, without the suffix of its compression."""
    return re.sub(r"\.(gz(ip)?|bz2?|xz|zstd?)$", "", os.path.basename(path).lower())


def shown_name(path: str) -> str:
    """Return a path as valid Unicode in one line without tabs: names from zip files may be GBK."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")  # \xb9 for what is no UTF-8
    return re.sub(r"[\0-\x1f\x7f]", lambda control: repr(control[0])[1:-1], text)


def check_replaceable(path: Path) -> None:
    """Raise UserError if `path` is no file that may be replaced, such as a device."""
    if path.exists() and not path.is_file():
        raise UserError(
            f"config: out={str(path)!r} is no regular file and would be replaced; name a file"
        )
