"""Raw files: every container becomes a stream of records and documents, in bounded memory, in parts
that different processes may read. What cannot be read is reported with file, line, byte offset and
size: the bytes read are those of documents and those lost.

.txt .jsonl .json (an array, or values one after the other) .csv .tsv .parquet, each also as .gz
.bz2 .xz .zst. A file's first bytes decide what it is, and where these cannot tell, its name does.
The bytes are in streams.py, encodings in encodings.py, containers in records.py and parquet.py,
what the keys of a row mean in row_formats.py.
"""

import codecs
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from groundup.errors import UserError
from groundup.files import parquet, paths, records, streams
from groundup.files.encodings import Decoder
from groundup.files.records import Record
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


def unpacked_name(path: str) -> str:
    return re.sub(r"\.(gz|bz2|xz|zst)$", "", os.path.basename(path).lower())


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


def container(path: str, head: bytes, txt_split: str) -> str:
    """Return how to read a file, from its first bytes and, where these cannot tell, its name:
    parquet, csv, tsv, array, values (JSON values over several lines), jsonl, or the txt_split of
    plain text."""
    suffix = os.path.splitext(unpacked_name(path))[1]
    head = head.removeprefix(codecs.BOM_UTF8).lstrip(b" \t\n\r\x1e")
    if head.startswith(b"PAR1") or suffix == ".parquet":
        return "parquet"
    if suffix in (".csv", ".tsv"):
        return suffix[1:]
    is_json = path == "-" and re.match(rb'\{\s*"|\[\s*[{"\]]', head)
    if suffix in (".json", ".jsonl", ".ndjson") or is_json:
        if head.startswith(b"["):
            named = suffix in (".jsonl", ".ndjson")
            return "jsonl" if lines_of_arrays(head, named) else "array"
        return "values" if is_over_lines(head) else "jsonl"
    if txt_split not in ("file", "blank", "line"):
        raise UserError(f"data: txt_split must be file, blank or line, got {txt_split!r}")
    return txt_split


def is_over_lines(head: bytes) -> bool:
    """Return whether the first JSON value goes on over several lines."""
    first = head.partition(b"\n")[0]
    text = head.decode("utf-8", "replace")
    n_first = len(first.decode("utf-8", "replace"))
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        # it may go on behind the head
        goes_on = error.pos >= len(text) - 1 or error.msg.startswith("Unterminated string")
        return goes_on and n_first < len(text) - 1
    except RecursionError:
        return False
    return end > n_first


def lines_of_arrays(head: bytes, named: bool) -> bool:
    """Return whether a file that begins with "[" has an array in each line, such as the messages of
    a conversation. named: its name says that it has lines; its only line is then a row, not an
    array of rows."""
    first, *rest = (line.strip() for line in head.split(b"\n"))
    following = next(filter(None, rest), b"")
    if re.match(rb"\[\s*\{", first) and not re.search(rb'"(role|from)"', first):
        return False  # rows, not the messages of a conversation
    if not rest:
        return named
    return first.endswith(b"]") and (following.startswith(b"[") or (named and not following))


def read_records(
    path: str, txt_split: str = "file", begin: int = 0, end: int | None = None,
    columns: list[str] | None = None, names: Sequence[str] = (), encoding: str = "",
    report: "Report | None" = None,
) -> Iterator[Record]:  # fmt: skip
    """Yield all records of a part of a file (see `work_units`), in order, with problems.

    columns: to read, of parquet. names: of the columns of a CSV file whose first row is not their
    names. encoding: of lines that are not UTF-8, where the user gave it. report: gets the
    number of unpacked bytes that were read or are lost when all records were taken, and their
    sha256 if it asks for it.

    A line belongs to the part that holds its first byte, a paragraph to the part that holds the
    blank line before it: wherever the cuts are, every record is read once.
    """
    report = report if report is not None else Report()
    if begin and is_parquet(path):
        report.sha256 = None
        yield from counted_rows(parquet.parquet_records(path, begin, end, columns), report)
        return
    stream = streams.open_stream(path, max(begin - 1, 0), encoding, check=True)
    with stream:
        raw = stream.raw
        if begin:  # of a file of lines, as `work_units` found
            suffix = os.path.splitext(unpacked_name(path))[1]
            kind = "jsonl" if suffix in (".json", ".jsonl", ".ndjson") else txt_split
            head = b""
        else:
            head = stream.peek()
            kind = container(path, head, txt_split)
        decoder = Decoder(raw.verdict)
        if report.sha256 and raw.file:  # of parquet the whole file, with its first part
            streams.hash_part(raw.file, begin, None if kind == "parquet" else end, report.sha256)
        if kind == "parquet":
            yield from counted_rows(parquet.parquet_records(path, begin, end, columns), report)
            return
        if kind in ("array", "values"):
            yield from records.json_records(stream, decoder)
        elif kind == "file":
            yield from records.text_records(stream, decoder)
        elif kind in ("csv", "tsv"):
            lines = records.decoded(records.read_lines(stream), decoder)
            if kind == "tsv" and not records.quotes_of_tsv(head):
                yield from records.plain_rows(lines, names)
            else:
                delimiter = records.delimiter_of(kind, head)
                yield from records.csv_records(lines, names, delimiter)
        elif kind == "blank":
            yield from records.decoded(records.paragraphs(stream, begin, end), decoder)
        else:
            lines = records.read_lines(stream, begin, end)
            lines = (line for line in lines if line.problem or line.value.strip())
            lines = records.decoded(lines, decoder)
            yield from records.jsonl_records(lines) if kind == "jsonl" else lines
        if raw.plain and raw.file:
            size = os.fstat(raw.file.fileno()).st_size
            report.n_bytes += (size if end is None else min(end, size)) - begin
        else:
            report.n_bytes += raw.n_made + (raw.damage[2] if raw.damage else 0)


def is_parquet(path: str) -> bool:
    with open(path, "rb") as f:
        return container(path, f.read(4), "file") == "parquet"


def counted_rows(rows: Iterator[tuple[Record, int]], report: "Report") -> Iterator[Record]:
    for record, n_bytes in rows:
        report.n_bytes += n_bytes
        yield record


class Row(NamedTuple):
    value: Any  # what was made of a record
    path: str
    offset: int  # of its record, see Record
    piece: int = 0  # of a long text, see Record


class Report:
    """What was not read, or only after mending.

    problems {reason: places where documents are lost}: bad_json, bad_field (no text), bad_encoding,
    bad_csv, too_long, truncated_file (damaged or cut; what came before was read), not_text (another
    kind of file). mended {encoding or surrogates: documents}
    places: (path, line, byte offset, "reason: detail") of the first max_places problems
    digest: also hash the bytes that are read
    """

    def __init__(
        self, strict: bool = False, max_places: int = 10_000, digest: bool = False
    ) -> None:
        self.strict, self.max_places = strict, max_places
        self.problems, self.mended = Counter(), Counter()
        self.n_bytes = 0  # of the files, unpacked: those of documents and those lost
        self.lost_bytes = 0  # of what no document was made of
        self.sha256 = hashlib.sha256() if digest else None
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
    report = report if report is not None else Report()
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
