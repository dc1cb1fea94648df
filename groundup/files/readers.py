"""Raw files: every container becomes a stream of records and documents, in bounded memory, in parts that different
processes may read. What cannot be read is reported with file, line and byte offset, never dropped silently.

.txt .jsonl .json (array, or objects one after the other) .csv .tsv .parquet, each also as .gz .bz2 .xz .zst; UTF-8,
UTF-16, UTF-32 and GB18030. A file's first bytes decide what it is, its encoding and, where these cannot tell, its name
does. After damage a reader goes on where it can. The bytes are in streams.py, the containers in records.py, what the
keys of a row mean in row_formats.py.
"""

import codecs
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from groundup.errors import UserError
from groundup.files import paths, records, streams
from groundup.files.records import Record
from groundup.files.row_formats import document_of
from groundup.files.text_keys import columns_of

PREPARED = {"report.md", "dropped.tsv"}  # files that tell a directory that prepare.py made, also without its manifest
DATA_SUFFIXES = (".txt", ".text", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")  # or of these packed
LINE_KINDS = ("jsonl", "line", "blank")  # see `container`: files that may be read in parts


def find_files(input: str) -> list[str]:
    """Return the paths of `input`: files, directories, globs, comma-separated; "-" is standard input. In the order
    given, each once; of a directory the files that `is_data`, recursively in the byte order of relative paths.

    Raise UserError for a part that matches no file.
    """
    found: list[str] = []
    for part in filter(None, paths.split_names(input)):
        matched = [part] if part == "-" else paths.matches(part)
        files = [file for match in matched for file in (list_directory(match) if os.path.isdir(match) else [match])]
        if not files:
            raise UserError(f"data: no file matches {part!r}; give files, directories or globs, separated by commas")
        found += files
    unlinked: dict[str, str] = {}  # a link beside the file that it leads to is no second file
    for file in found:
        real = os.path.realpath(file)
        if os.path.islink(unlinked.setdefault(real, file)):
            unlinked[real] = file
    return list(unlinked.values())


def list_directory(top: str) -> list[str]:
    """Return the data files of a directory; print how many others it has, and the names of the first."""
    files, others, seen = [], [], {os.path.realpath(top)}  # a link to a folder above would never end
    for folder, folders, names in os.walk(top, followlinks=True):
        if PREPARED.issubset(names):
            folders.clear()
            where = streams.shown_name(folder)
            if folder == top:
                hint = "give the files that it was made of, or its train.jsonl"
                raise UserError(f"data: {where} is a directory that prepare.py made, not raw data; {hint}")
            print(f"data: {where} is left out: prepare.py made it")
            continue
        real = {name: os.path.realpath(os.path.join(folder, name)) for name in folders if not name.startswith(".")}
        folders[:] = {real[name]: name for name in real if real[name] not in seen}.values()  # of two links, one
        seen |= set(real.values())
        for name in names:
            (files if is_data(name) else others).append(os.path.relpath(os.path.join(folder, name), top))
    if others := sorted(map(streams.shown_name, others)):
        shown = ", ".join(others[:10]) + (", ..." if len(others) > 10 else "")
        hint = f"of a directory only {' '.join(DATA_SUFFIXES)} are read, also packed; name other files, or give a glob"
        print(f"data: {streams.shown_name(top)}: passed over {len(others):,} that are no data by name: {shown}; {hint}")
    return [os.path.join(top, file) for file in sorted(files, key=os.fsencode)]


def is_data(name: str) -> bool:
    """Return whether a file of a directory is data, by its name: not hidden, no README or LICENSE, a suffix of data."""
    stem, suffix = os.path.splitext(unpacked_name(name))
    about = ("readme", "license", "dataset_info", "dataset_infos")  # of Hugging Face's and LLaMA-Factory's folders
    return not name.startswith(".") and stem not in about and suffix in DATA_SUFFIXES


def unpacked_name(path: str) -> str:
    return re.sub(r"\.(gz|bz2|xz|zst)$", "", os.path.basename(path).lower())


def work_units(path: str, txt_split: str = "file", unit_bytes: int = 2**26) -> list[tuple[int, int | None]]:
    """Return the parts (begin, end) of a file for `read_documents`, for different processes; all of it is (0, None).

    Bytes of a plain line-oriented file; row groups of a parquet file; anything else is one part. The file alone
    decides, so the parts and their order do not depend on the number of processes.
    """
    if path == "-":
        return [(0, None)]
    with streams.open_stream(path) as stream:
        kind = container(path, stream.peek(), txt_split)
        plain = stream.raw.plain
    if kind == "parquet":
        try:
            footer = records.open_parquet(path).metadata
        except streams.Damage:
            return [(0, None)]  # reported when it is read
        ends, room = [0], 0
        for k in range(footer.num_row_groups):
            size = footer.row_group(k).total_byte_size
            if size > room and k:
                ends.append(k)
            room = (room if size <= room else unit_bytes) - size
        return list(zip(ends, [*ends[1:], footer.num_row_groups], strict=True))
    size = os.path.getsize(path)
    if not plain or kind not in LINE_KINDS or size <= unit_bytes:
        return [(0, None)]
    return [(begin, min(begin + unit_bytes, size)) for begin in range(0, size, unit_bytes)]


def container(path: str, head: bytes, txt_split: str) -> str:
    """Return how to read a file, from its first bytes and, where these cannot tell, its name: parquet, csv, tsv, array,
    values (JSON objects over several lines), jsonl, or the txt_split of plain text."""
    suffix, head = os.path.splitext(unpacked_name(path))[1], head.removeprefix(codecs.BOM_UTF8).lstrip()
    if head.startswith(b"PAR1") or suffix == ".parquet":
        return "parquet"
    if suffix in (".csv", ".tsv"):
        return suffix[1:]
    if suffix in (".json", ".jsonl", ".ndjson") or (path == "-" and re.match(rb'\{\s*"|\[\s*[{"\]]', head)):
        if head.startswith(b"["):
            return "jsonl" if lines_of_arrays(head, suffix in (".jsonl", ".ndjson")) else "array"
        return "values" if head.split(b"\n")[0].strip() == b"{" else "jsonl"
    if txt_split not in ("file", "blank", "line"):
        raise UserError(f"data: txt_split must be file, blank or line, got {txt_split!r}")
    return txt_split


def lines_of_arrays(head: bytes, named: bool) -> bool:
    """Return whether a file that begins with "[" has an array in each line, such as the messages of a conversation.
    named: its name says that it has lines; its only line is then a row, not an array of rows."""
    first, *rest = (line.strip() for line in head.split(b"\n"))
    following = next(filter(None, rest), b"")
    if not rest:
        return named
    return first.endswith(b"]") and (following.startswith(b"[") or (named and not following))


def read_records(
    path: str, txt_split: str = "file", begin: int = 0, end: int | None = None, columns: list[str] | None = None,
    names: Sequence[str] = (),
) -> Iterator[Record]:
    """Yield all records of a part of a file (see `work_units`), in order, with problems. columns: to read, of parquet.
    names: of the columns of a CSV file whose first row is not their names.

    A line belongs to the part that holds its first byte, a paragraph to the part that holds the blank line before it:
    wherever the cuts are, every record is read once.
    """
    stream = streams.open_stream(path)
    head = stream.peek()
    kind = container(path, head, txt_split)
    assert not begin or kind in (*LINE_KINDS, "parquet"), f"{path}: {kind} is read as a whole, {begin=}"
    if begin and kind in LINE_KINDS:
        stream.close()
        stream = streams.open_stream(path, begin - 1)
    with stream:
        encoding = streams.encoding_of(head)
        decoded = partial(records.text_record, encoding=encoding)
        if kind == "parquet":
            yield from records.parquet_records(path, begin, end, columns)
        elif kind in ("array", "values"):
            yield from records.json_records(stream, encoding)
        elif kind == "file":
            yield from records.file_record(stream, encoding)
        elif kind in ("csv", "tsv"):
            lines = map(decoded, records.read_lines(stream))
            yield from (records.csv_records if kind == "csv" else records.tsv_records)(lines, names)
        elif kind == "blank":
            yield from map(decoded, records.paragraphs(stream, begin, end))
        else:
            lines = (line for line in records.read_lines(stream, begin, end) if line.problem or line.value.strip())
            yield from map(records.jsonl_record, map(decoded, lines)) if kind == "jsonl" else map(decoded, lines)


class Row(NamedTuple):
    value: Any  # what was made of a record
    path: str
    offset: int  # of its record, see Record


class Report:
    """What was not read, or only after mending.

    problems {reason: places where documents are lost}: bad_json, bad_field (no text), bad_encoding, bad_csv, too_long,
    truncated_file (damaged or cut; what came before was read). mended {gb18030 or surrogates: documents}
    places: (path, line, byte offset, "reason: detail") of the first max_places problems
    """

    def __init__(self, strict: bool = False, max_places: int = 10_000) -> None:
        self.strict, self.max_places = strict, max_places
        self.problems, self.mended = Counter(), Counter()
        self.lost_bytes = 0  # of stretches that hold an unknown number of records
        self.places: list[tuple[str, int, int, str]] = []

    def add(self, path: str, line: int, offset: int, reason: str, detail: str) -> None:
        """Raise UserError if strict."""
        detail = " ".join(detail.split())
        if self.strict:
            where = f"{streams.shown_name(path)}:{line}: {reason} at byte {offset}"
            raise UserError(f"data: {where}: {detail}; mend it, or use strict=False")
        self.problems[reason] += 1
        if len(self.places) < self.max_places:
            self.places.append((path, line, offset, f"{reason}: {detail}"))


def read_documents(
    path: str, text_key: str = "", txt_split: str = "file", begin: int = 0, end: int | None = None,
    report: Report | None = None,
) -> Iterator[Row]:
    """Yield the documents of a file, or of a part of it from `work_units`, holding one record at a time.

    text_key: where the text is in a JSON object or a row, see `row_formats.document_of`; "" = found by the keys.
    txt_split: what a document is in plain text: 'file', 'blank' (between blank lines) or 'line'.
    """
    return read_rows(path, partial(document_of, text_key=text_key), txt_split, begin, end, report, columns_of(text_key))


def read_rows(
    path: str, understand: Callable[[Any], tuple[Any, str]], txt_split: str = "file", begin: int = 0,
    end: int | None = None, report: Report | None = None, columns: list[str] | None = None,
) -> Iterator[Row]:
    """Yield what `understand`, a function of row_formats.py or like one, makes of each record of a file or part.

    understand(record) returns (value, "") or (anything, what is wrong). What cannot be read or understood goes to the
    report and is left out. Raise UserError if the report is strict, or if the file cannot be opened.
    """
    report = report if report is not None else Report()
    for record in read_records(path, txt_split, begin, end, columns):
        reason, detail, value = record.problem, record.detail, None
        if not reason:
            row = streams.mended(record.value)
            value, detail = understand(row)
            reason = "bad_field" if detail else ""
        if reason:
            report.lost_bytes += record.lost
            report.add(path, lines_before(path, begin) + record.line, record.offset, reason, detail)
            continue
        if record.encoding != "utf-8":
            report.mended[record.encoding] += 1
        if row != record.value:
            report.mended["surrogates"] += 1
        yield Row(value, path, record.offset)


@lru_cache(maxsize=16)
def lines_before(path: str, begin: int) -> int:
    """Return the lines before the first one that starts at `begin` or later, to name a line. Rows of parquet, whose
    begin is a row group, are counted from the file's start."""
    if begin == 0:
        return 0
    with open(path, "rb") as f:
        if f.read(4) == b"PAR1":
            return 0
        f.seek(0)
        blocks = iter(lambda: f.read(min(streams.READ_BYTES, begin - 1 - f.tell())), b"")
        return 1 + sum(block.count(b"\n") for block in blocks)
