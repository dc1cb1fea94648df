"""What a stream holds, record by record, each with its line and byte offset: lines, paragraphs, JSON, CSV, parquet.
Problems are records too: nothing raises because of a file's content."""

import codecs
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from groundup.errors import UserError
from groundup.files import streams
from groundup.files.streams import Damage, decode, skip_mark, unix_lines

if TYPE_CHECKING:
    import pyarrow.parquet


class Record(NamedTuple):
    """One line, element or row of a file, or a problem in its place."""

    value: object  # what JSON, CSV or parquet holds, or the text; bytes until decoded; None if input is damaged
    line: int  # from 1, within the part that is read; of parquet: row in the file
    offset: int  # where it starts, in bytes; of parquet: row in the file from 0. Transcoded or unpacked: in that text
    encoding: str = "utf-8"
    problem: str = ""  # bad_json, bad_encoding, bad_csv, truncated_file
    detail: str = ""


def read_lines(stream: io.BufferedReader, begin: int = 0, end: int | None = None) -> Iterator[Record]:
    """Yield the lines, as bytes, that start in [begin, end); the stream stands at begin - 1, or at 0.

    Split at "\n" only: text may hold U+2028 and other characters that `str.splitlines` takes for line ends. A line that
    damage cuts short is left out.
    """
    offset = begin - 1 + len(stream.readline()) if begin else 0
    line, mark = 0, 0 if begin else skip_mark(stream)  # the mark is part of the first line
    while (end is None or offset < end) and (raw := stream.readline()):
        line += 1
        if stream.raw.damage and not raw.endswith(b"\n"):
            break
        yield Record(raw, line, offset)
        offset, mark = offset + mark + len(raw), 0
    yield from damage(stream, line, offset)


def damage(stream: io.BufferedReader, line: int, offset: int) -> Iterator[Record]:
    """Yield a record of the stream's damage, if it has any."""
    if stream.raw.damage:
        yield Record(None, line, offset, problem=stream.raw.damage[0], detail=stream.raw.damage[1])


def paragraphs(stream: io.BufferedReader, begin: int, end: int | None) -> Iterator[Record]:
    """Yield the runs of lines after the blank lines that start in [begin, end), as `read_lines` would read them; the
    start of the file counts as a blank line."""
    held, first, mine = [], Record(b"", 0, 0), begin == 0
    for line in read_lines(stream, begin):
        blank = bool(line.problem) or not line.value.strip()
        if blank and held:
            yield first._replace(value=b"".join(held))
            held = []
        if line.problem:
            yield line
            return
        if end is not None and line.offset >= end and (blank or not mine):
            return
        mine = mine or blank
        if mine and not blank:
            first = first if held else line
            held.append(line.value)
    if held:
        yield first._replace(value=b"".join(held))


def text_record(record: Record, encoding: str) -> Record:
    """Decode a line of bytes and drop its line end; Windows line ends inside become "\n"."""
    if record.problem:
        return record
    try:
        text, encoding = decode(record.value, encoding)
    except UnicodeDecodeError as error:
        text = record.value.decode("utf-8", "replace")
        return record._replace(value=text, problem="bad_encoding", detail=str(error))
    return record._replace(value=unix_lines(text).removesuffix("\n"), encoding=encoding)


def jsonl_record(record: Record) -> Record:
    if record.problem:
        return record
    try:
        return record._replace(value=json.loads(record.value))
    except (ValueError, RecursionError) as error:
        return record._replace(value=None, problem="bad_json", detail=str(error))


def file_record(stream: io.BufferedReader) -> Iterator[Record]:
    """Yield a whole text file as one record; of a damaged one, what came before the damage."""
    offset, raw = skip_mark(stream), stream.read()
    try:
        text, encoding = decode(raw, cut=bool(stream.raw.damage))
        yield Record(unix_lines(text), 1, 0, encoding)
    except UnicodeDecodeError as error:
        line, start = 1 + raw.count(b"\n", 0, error.start), offset + error.start
        yield Record(None, line, start, problem="bad_encoding", detail=str(error))
    yield from damage(stream, 1 + raw.count(b"\n"), offset + len(raw))


def csv_records(lines: Iterable[Record], delimiter: str, names: Sequence[str] = ()) -> Iterator[Record]:
    """Yield the rows as {column: text}; the first row names the columns if `names` does not. A quoted field may hold
    line ends."""
    csv.field_size_limit(2**30)  # characters; 128 Ki otherwise, less than a long article
    held: list[Record] = []  # the lines of the row at hand
    lost: list[Record] = []

    def texts() -> Iterator[str]:
        for record in lines:
            if record.value is None:
                lost.append(record)
                return
            held.append(record)
            yield record.value + "\n"  # also of a line that cannot be decoded: its quotes decide where the row ends

    rows = csv.reader(texts(), delimiter=delimiter, strict=True)
    while True:
        held.clear()
        try:
            row, detail = next(rows), ""
        except StopIteration:
            break
        except csv.Error as error:
            row, detail = [], str(error)
        if names and row and len(row) != len(names):
            detail = f"{len(row)} fields, but {len(names)} columns"
        where = held[0].line, held[0].offset
        undecodable = next((line for line in held if line.problem), None)
        if undecodable:
            yield undecodable
        elif detail:
            yield Record(None, *where, problem="bad_csv", detail=detail)
        elif not names:
            names = row
        elif row:
            encoding = next((line.encoding for line in held if line.encoding != "utf-8"), "utf-8")
            yield Record(dict(zip(names, row, strict=True)), *where, encoding)
    yield from lost


def json_records(stream: io.BufferedReader) -> Iterator[Record]:
    """Yield the elements of an array, or objects one after the other. The first bytes beyond ASCII decide between UTF-8
    and GB18030."""
    skipped, encoding = skip_mark(stream), ""

    def texts() -> Iterator[str]:
        nonlocal encoding
        decoder: codecs.IncrementalDecoder | None = None
        while raw := stream.read1(streams.READ_BYTES):
            if decoder is None and not raw.isascii():
                encoding = decode(raw, cut=True)[1]
                decoder = codecs.getincrementaldecoder(encoding)()
            if text := decoder.decode(raw) if decoder else raw.decode("ascii"):
                yield text
        if decoder and not stream.raw.damage:
            decoder.decode(b"", final=True)

    elements = JsonStream(texts())
    elements.offset = skipped
    try:
        for value, line, offset in elements:
            yield Record(value, line, offset, encoding or "utf-8")
    except (ValueError, RecursionError) as error:
        if not stream.raw.damage:
            reason = "bad_encoding" if isinstance(error, UnicodeDecodeError) else "bad_json"
            detail = f"{error}; the rest of the file is left out"
            yield Record(None, elements.line, elements.offset, problem=reason, detail=detail)
    yield from damage(stream, elements.line, elements.offset)


class JsonStream:
    """The elements of a JSON array, or JSON objects one after the other, from text in pieces: (element, line, offset).

    Holds the pieces of one element. Raise ValueError at what is not JSON, after all that came before it.
    """

    WHITE_SPACE = re.compile(r"[ \t\n\r]*")

    def __init__(self, chunks: Iterator[str]) -> None:
        self.chunks = chunks
        self.text, self.pos = "", 0  # what is held; how much of it is used
        self.line, self.offset = 1, 0  # of text[pos]: from 1; bytes in UTF-8

    def __iter__(self) -> Iterator[tuple[object, int, int]]:
        if self._next() != "[":
            while self._next():
                yield self._element()
            return
        self._use(self.pos + 1)
        separator = "]" if self._next() == "]" else ","
        while separator == ",":
            yield self._element()
            separator = self._next()
            if separator == ",":
                self._use(self.pos + 1)
        if separator != "]":
            raise ValueError(f"expected , or ] but found {separator or 'the end'!r}")
        self._use(self.pos + 1)
        if self._next():
            raise ValueError("text after the end of the array")

    def _element(self) -> tuple[object, int, int]:
        self._next()
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self.text, self.pos)
            except json.JSONDecodeError as error:
                # More text may help: a string is open, or a word, number or escape may be cut off at the end.
                near_end = error.pos >= len(self.text) - len("-Infinity") - 1
                if not (near_end or error.msg.startswith("Unterminated string")) or not self._read():
                    raise
                continue
            # a number may go on: 1 as 1.5, and what stands here as 1e+ as 1e+9
            if self.WHITE_SPACE.match(self.text, end).end() >= len(self.text) - len("e+") and self._read():
                continue
            found = value, self.line, self.offset
            self._use(end)
            return found

    def _next(self) -> str:
        """Return the next character that is no white space, "" at the end."""
        while True:
            self._use(self.WHITE_SPACE.match(self.text, self.pos).end())
            if self.pos < len(self.text) or not self._read():
                return self.text[self.pos : self.pos + 1]

    def _use(self, end: int) -> None:
        used = self.text[self.pos : end]
        self.line += used.count("\n")
        self.offset += len(used) if used.isascii() else len(used.encode("utf-8", "surrogatepass"))
        self.pos = end

    def _read(self) -> bool:
        """Read at least as much as is held: so an element that is parsed again and again takes linear time in all."""
        held = [self.text[self.pos :]]
        wanted = max(1, len(held[0]))
        while wanted > 0 and (chunk := next(self.chunks, "")):
            held.append(chunk)
            wanted -= len(chunk)
        if len(held) > 1:
            self.text, self.pos = "".join(held), 0
        return len(held) > 1


def open_parquet(path: str) -> "pyarrow.parquet.ParquetFile":
    """Raise UserError without pyarrow, Damage if the file's own table of contents, at its end, cannot be read."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"data: {path} needs pyarrow; run: pip install pyarrow") from None
    if path == "-":
        raise UserError("data: parquet cannot be read from standard input; give the file's name")
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise Damage("truncated_file", str(error)) from None


def parquet_records(path: str, begin: int, end: int | None, columns: list[str] | None) -> Iterator[Record]:
    """Yield the rows of the row groups [begin, end)."""
    row = 0
    try:
        file = open_parquet(path)
        groups = range(file.metadata.num_row_groups)
        row = sum(file.metadata.row_group(k).num_rows for k in groups[:begin])
        wanted = columns and [name for name in columns if name in file.schema_arrow.names]
        for batch in file.iter_batches(batch_size=256, row_groups=groups[begin:end], columns=wanted):
            yield from batch_records(batch, row)
            row += batch.num_rows
    except Damage as error:
        yield Record(None, 1, 0, problem=error.args[0], detail=error.args[1])
    except UserError:
        raise
    except (OSError, ValueError) as error:  # pyarrow's, for damaged pages
        yield Record(None, row + 1, row, problem="truncated_file", detail=str(error))


def batch_records(batch: "pyarrow.RecordBatch", row: int) -> Iterator[Record]:
    """Yield the rows of a batch that begins at a row of the file; one that is not UTF-8 is a problem of its own."""
    try:
        values = batch.to_pylist() if batch.num_columns else [{}] * batch.num_rows
        yield from (Record(value, row + k + 1, row + k) for k, value in enumerate(values))
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            yield Record(None, row + 1, row, problem="bad_encoding", detail=str(error))
            return
        for k in range(batch.num_rows):
            yield from batch_records(batch.slice(k, 1), row + k)
