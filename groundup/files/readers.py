"""Documents of raw files, in bounded memory, in parts that different processes may read.

What cannot be read is reported with file, line, byte offset and size: the bytes read are those of
documents and those lost.

.txt .jsonl .json (an array, or values one after the other) .csv .tsv .parquet, each also as .gz
.bz2 .xz .zst. The records of a file are in records.py, what their keys mean in row_formats.py.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from groundup.files import parquet, streams, untrusted
from groundup.files.records import Report, container, read_records
from groundup.files.row_formats import document_of
from groundup.files.text_keys import columns_of

LINE_KINDS = ("jsonl", "line", "blank")  # see `container`: files that may be read in parts


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
            row = untrusted.mended(record.value)
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
