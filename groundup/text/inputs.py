"""The files that prepare.py reads: find them, look at each once, and remember what they were.

inputs.tsv of the output has a line for each file. Its sha256 is that of the file; of one that was
read in several parts it is the sha256 of the parts' sha256 in hex, end to end.
"""

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from tqdm import tqdm

from configurator import split_names
from groundup.errors import UserError
from groundup.files import readers, records, streams
from groundup.files.paths import find_files, shown_name
from groundup.files.sources import BUILT_IN, Source, look_of, say_looks, write_built_in
from groundup.files.untrusted import LFS_POINTER, POINTER_HINT
from groundup.tokens.token_files import file_sha256

UNITS = 16  # parts of a file, for as many workers; none is smaller or larger than this:
LEAST_UNIT_BYTES, UNIT_BYTES = 2**22, 2**26
COLUMNS = ("path", "source", "size", "stamp", "sha256")  # of inputs.tsv


class Input(NamedTuple):
    """A file to read."""

    path: str  # where the bytes are
    name: str  # what the user calls it: the path, python-docs or -
    size: int = 0
    stamp: str = ""  # changes when the content does
    source: int = 0  # index of its source
    problem: str = ""  # why it cannot be opened
    parts: tuple[tuple[int, int | None], ...] = ((0, None),)  # see readers.work_units
    looks: tuple[str, str] | tuple[()] = ()  # of plain text by its name: see sources.look_of


def find_inputs(
    sources: tuple[Source, ...], out_dir: Path, work: Path, kind: str = "text"
) -> list[Input]:
    """Return the files of all sources, each once, without those in `out_dir`. Standard input and
    built-in sources become files in `work`. Raise UserError if nothing matches."""
    found: dict[str, Input] = {}  # by its real path
    inside = f"{out_dir.resolve()}{os.sep}" if out_dir.name else None
    for number, source in enumerate(sources):
        files = list(files_of(source, number, work, kind))
        say_looks("prepare", [(file.name, file.looks) for file in files])
        left_out = []
        for file in files:
            real = os.path.realpath(file.path)
            # an earlier result inside the input directory is no input
            if inside and real.startswith(inside):
                continue
            # two paths may be one file, by a link or by overlapping globs
            if found.setdefault(real, file).source != number:
                left_out.append(file.name)
        if left_out:
            more = f" (and {len(left_out) - 1:,} more)" if len(left_out) > 1 else ""
            where = f"is in an earlier source already, and is left out of {source.name}{more}"
            print(f"prepare: {left_out[0]} {where}")
    return list(found.values())


def files_of(source: Source, number: int, work: Path, kind: str) -> Iterator[Input]:
    for name in filter(None, split_names(source.input)):
        if name not in ("-", *BUILT_IN):
            for path in find_files(name, "input"):
                yield look(path, shown_name(path), number, source)
            continue
        made = spool_stdin(work) if name == "-" else write_built_in(name, kind, work)
        # Each run writes it again, so its time says nothing.
        yield look(str(made), name, number, source)._replace(stamp=file_sha256(made))


def look(path: str, name: str, number: int, source: Source) -> Input:
    """Return the input at a path. Opens the file once, and again only if it is large."""
    failed = Input(path, name, source=number)
    try:
        stat = os.stat(path)
        if not S_ISREG(stat.st_mode):
            return failed._replace(problem="not a regular file")
        with open(path, "rb") as f:
            first = f.read(2**16)
    except OSError as error:
        return failed._replace(problem=error.strerror)
    # a clone without git-lfs has a few lines in place of each data file
    if first.startswith(LFS_POINTER):
        return failed._replace(problem=POINTER_HINT)
    parts = [(0, None)]
    unit_bytes = min(UNIT_BYTES, max(LEAST_UNIT_BYTES, stat.st_size // UNITS))
    # parquet is cut by row groups, whatever its size
    if stat.st_size > unit_bytes or first.startswith(b"PAR1"):
        parts = readers.work_units(path, source.txt_split, unit_bytes, source.encoding)
    stamp, looks = str(stat.st_mtime_ns), look_of(path, first)
    return Input(path, name, stat.st_size, stamp, number, "", tuple(parts), looks)


def check_unchanged(inputs: list[Input], work: Path) -> None:
    """Raise UserError if a file of the user changed since `look` saw it."""
    for file in inputs:
        if file.problem or Path(file.path).is_relative_to(work):
            continue
        with suppress(OSError):  # of a file that was removed
            stat = os.stat(file.path)
            if (stat.st_size, str(stat.st_mtime_ns)) == (file.size, file.stamp):
                continue
        raise UserError(f"prepare: {file.name} changed while it was read; run again")


def spool_stdin(work: Path) -> Path:
    """Write standard input to a file, which can be read twice and in parts. Return its path, .json
    or .txt."""
    path = work / "stdin.txt"
    with open(path, "wb") as f:
        shutil.copyfileobj(sys.stdin.buffer, f, 2**20)
    with streams.open_stream(str(path)) as stream:
        kind = records.container("-", stream.peek(), "file")
    return path.rename(work / "stdin.json") if kind in ("json", "jsonl") else path


# ---- inputs.tsv ----------------------------------------------------------------------------------


def describe(inputs: list[Input], before: list[dict]) -> list[dict]:
    """Return the lines of inputs.tsv. The sha256 of a file is that of an earlier run, if size and
    time are the same; where only the time differs, the file is hashed; else it is "" until the file
    was read. before: the lines of an earlier run."""
    # an unchanged corpus of terabytes is not read again to see that nothing changed
    known = {(one["path"], one["size"], one["stamp"]): one["sha256"] for one in before}
    sizes = {(one["path"], one["size"]) for one in before}
    entries, touched = [], []
    for file in inputs:
        sha256 = file.problem or known.get((file.name, file.size, file.stamp), "")
        values = (file.name, file.source, file.size, file.stamp, sha256)
        entry = dict(zip(COLUMNS, values, strict=True))
        entries.append(entry)
        if not sha256 and (file.name, file.size) in sizes:
            touched.append((file, entry))
    for file, entry in tqdm(touched, "compare", disable=None if touched else True):
        entry["sha256"] = sha256_of(file)
    return entries


def sha256_of(file: Input) -> str:
    """Return the sha256 of inputs.tsv, of a file that is not read now."""
    sums = []
    with open(file.path, "rb") as f:
        parts = [(0, None)] if f.read(4) == b"PAR1" else file.parts  # those are no ranges of bytes
        for begin, end in parts:
            digest = hashlib.sha256()
            streams.hash_part(f, begin, end, digest)
            sums.append(digest.hexdigest())
    return joined_sha256(sums)


def joined_sha256(sums: list[str]) -> str:
    """Return the sha256 of a file from those of its parts."""
    return sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()


def add_digests(entries: list[dict], inputs: list[Input], digests: list[list]) -> None:
    """Fill in the sha256 of the files that were read. digests: (name, sha256) by part."""
    sums: dict[str, list[str]] = {}
    for name, sha256 in digests:
        sums.setdefault(name, []).append(sha256)
    for entry, file in zip(entries, inputs, strict=True):
        entry["sha256"] = entry["sha256"] or joined_sha256(sums.get(file.name, []))


def write(entries: list[dict], out: Path) -> dict:
    """Write inputs.tsv and return its entry for the manifest."""
    path = out / "inputs.tsv"
    with open(path, "w", encoding="utf-8") as f:
        f.write("\t".join(COLUMNS) + "\n")
        for entry in entries:
            f.write("\t".join(str(entry[key]) for key in COLUMNS) + "\n")
    n_bytes = sum(entry["size"] for entry in entries)
    return {"files": len(entries), "bytes": n_bytes, "sha256": file_sha256(path)}


def read(out_dir: Path) -> list[dict]:
    """Return the lines of inputs.tsv; [] if there is none."""
    try:
        lines = (out_dir / "inputs.tsv").read_text(encoding="utf-8").split("\n")[1:-1]
    except OSError:
        return []
    entries = (dict(zip(COLUMNS, line.split("\t"), strict=False)) for line in lines)
    return [one | {"source": int(one["source"]), "size": int(one["size"])} for one in entries]
