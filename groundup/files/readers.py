"""Raw files: which files a setting means, and their documents, in bounded memory, in parts that
different processes may read. What cannot be read is reported with file, line, byte offset and size:
the bytes read are those of documents and those lost.

.txt .jsonl .json (an array, or values one after the other) .csv .tsv .parquet, each also as .gz
.bz2 .xz .zst. The records of a file are in records.py, what their keys mean in row_formats.py.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from groundup.errors import UserError
from groundup.files import parquet, paths, streams
from groundup.files.records import Report, container, read_records, unpacked_name
from groundup.files.row_formats import document_of
from groundup.files.text_keys import columns_of

# By these a directory that prepare.py made is known, also without its manifest.
PREPARED = {"report.md", "dropped.tsv"}
# Also of packed files.
DATA_SUFFIXES = (".txt", ".text", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
LINE_KINDS = ("jsonl", "line", "blank")  # see `container`: files that may be read in parts


def find_files(input: str) -> list[str]:
    """Return the paths of `input`: files, directories, globs, comma-separated; "-" is standard
    input. In the order given, each once; of a directory the files that `is_data`, recursively, in
    the byte order of relative paths. Raise UserError for a part that matches no file."""
    found: list[str] = []
    for part in filter(None, paths.split_names(input)):
        matched = [part] if part == "-" else paths.matches(part)
        files = [
            file
            for match in matched
            for file in (list_directory(match) if os.path.isdir(match) else [match])
        ]
        if not files:
            hint = "give files, directories or globs, separated by commas"
            raise UserError(f"data: no file matches {part!r}; {hint}")
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
    for folder, folders, names in os.walk(top, followlinks=True):
        if PREPARED.issubset(names):
            folders.clear()
            where = streams.shown_name(folder)
            if folder == top:
                hint = "give the files that it was made of, or its train.jsonl"
                what = f"{where} is a directory that prepare.py made, not raw data"
                raise UserError(f"data: {what}; {hint}")
            print(f"data: {where} is left out: prepare.py made it")
            continue
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
    if others := sorted(map(streams.shown_name, others)):
        shown = ", ".join(others[:10]) + (", ..." if len(others) > 10 else "")
        what = f"passed over {len(others):,} that are no data by name: {shown}"
        hint = f"of a directory only {' '.join(DATA_SUFFIXES)} are read, also packed"
        hint += "; name other files, or give a glob"
        print(f"data: {streams.shown_name(top)}: {what}; {hint}")
    return [os.path.join(top, file) for file in sorted(files, key=os.fsencode)]


def is_data(name: str) -> bool:
    """Return whether a file of a directory is data, by its name: not hidden, no README or LICENSE,
    a suffix of data."""
    stem, suffix = os.path.splitext(unpacked_name(name))
    # of Hugging Face's and LLaMA-Factory's folders
    about = ("readme", "license", "dataset_info", "dataset_infos")
    return not name.startswith(".") and stem not in about and suffix in DATA_SUFFIXES


def work_units(
    path: str, txt_split: str = "file", unit_bytes: int = 2**26, encoding: str = ""
) -> list[tuple[int, int | None]]:
    """Return the parts (begin, end) of a file for `read_documents`, for different processes; all of
    it is (0, None).

    Bytes of a plain line-oriented file; row groups of a parquet file; anything else is one part.
    The file alone decides, so the parts and their order do not depend on the number of processes.
    """
    if path == "-":
        return [(0, None)]
    with streams.open_stream(path, encoding=encoding) as stream:
        kind = container(path, stream.peek(), txt_split)
        divisible = stream.raw.plain and not stream.raw.verdict.refused and kind in LINE_KINDS
        size = os.fstat(stream.raw.file.fileno()).st_size
    if kind == "parquet":
        return parquet.row_groups(path, unit_bytes)
    if not divisible or size <= unit_bytes:
        return [(0, None)]
    return [(begin, min(begin + unit_bytes, size)) for begin in range(0, size, unit_bytes)]


class Row(NamedTuple):
    value: Any  # what was made of a record
    path: str
    offset: int  # of its record, see Record
    piece: int = 0  # of a long text, see Record


def read_documents(
    path: str, text_key: str = "", txt_split: str = "file", begin: int = 0, end: int | None = None,
    report: Report | None = None, encoding: str = "",
) -> Iterator[Row]:  # fmt: skip
    """Yield the documents of a file, or of a part of it from `work_units`, holding one record at a
    time. A text file of many megabytes comes in pieces.

    text_key: where the text is in a JSON object or a row, see `row_formats.document_of`; "" = found
    by the keys. txt_split: what a document is in plain text: 'file', 'blank' (between blank lines)
    or 'line'.
    """
    understand, columns = partial(document_of, text_key=text_key), columns_of(text_key)
    yield from read_rows(path, understand, txt_split, begin, end, report, columns, encoding)


def read_rows(
    path: str, understand: Callable[[Any], tuple[Any, str]], txt_split: str = "file",
    begin: int = 0, end: int | None = None, report: Report | None = None,
    columns: list[str] | None = None, encoding: str = "",
) -> Iterator[Row]:  # fmt: skip
    """Yield what `understand`, a function of row_formats.py or like one, makes of each record of a
    file or part.

    understand(record) returns (value, "") or (anything, what is wrong). What cannot be read or
    understood goes to the report and is left out. Raise UserError if the report is strict, or if
    the file cannot be opened.
    """
    report = report or Report()
    found = read_records(path, txt_split, begin, end, columns, (), encoding, report)
    for record in found:
        reason, detail, value = record.problem, record.detail, None
        if not reason:
            row = streams.mended(record.value)
            value, detail = understand(row)
            reason = "bad_field" if detail else ""
        if reason:
            report.lost_bytes += record.lost
            line = lines_before(path, begin) + record.line
            report.add(path, line, record.offset, reason, detail)
            if record.in_text:
                report.in_text[reason] += 1
            continue
        if record.encoding != "utf-8":
            report.mended[record.encoding] += 1
        if row != record.value:
            report.mended["surrogates"] += 1
        yield Row(value, path, record.offset, record.piece)


counted: dict[str, tuple[int, int]] = {}  # path: (a place, the line ends before it), of one file


def lines_before(path: str, begin: int) -> int:
    """Return the lines before the first one that starts at `begin` or later, to name a line. It
    counts on from where it was asked before, so all parts of a file are counted once. Rows of
    parquet, whose begin is a row group, are counted from the file's start."""
    if begin == 0:
        return 0
    place, n_lines = counted.get(path, (0, 0))
    if place > begin - 1:
        place, n_lines = 0, 0
    with open(path, "rb") as f:
        if f.read(4) == b"PAR1":
            return 0
        f.seek(place)
        while block := f.read(min(streams.READ_BYTES, begin - 1 - f.tell())):
            n_lines += block.count(b"\n")
    counted.clear()
    counted[path] = begin - 1, n_lines
    return 1 + n_lines
