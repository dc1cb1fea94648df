"""What a stream holds, record by record, each with its line and byte offset: lines, paragraphs, JSON, CSV, parquet.
Problems are records too: nothing raises because of a file's content."""

import codecs
import contextlib
import csv
import io
import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from groundup.errors import UserError
from groundup.files import streams
from groundup.files.streams import Damage, Encoding, skip_mark, unix_lines

if TYPE_CHECKING:
    import pyarrow.parquet

MAX_BYTES = 2**26  # of a record; a damaged or hostile file may hold a line of gigabytes
MAX_TEXT_BYTES = 2**31  # of a text file that is one record
MAX_CSV_LINES = 10_000  # of a row: more mean a quote that is never closed


class Record(NamedTuple):
    """One line, element or row of a file, or a problem in its place."""

    value: object  # what JSON, CSV or parquet holds, or the text; bytes until decoded; None if input is damaged
    line: int  # from 1, within the part that is read; of parquet: row in the file
    offset: int  # where it starts, in bytes; of parquet: row in the file from 0. Transcoded or unpacked: in that text
    encoding: str = "utf-8"
    problem: str = ""  # bad_json, bad_encoding, bad_csv, too_long, truncated_file
    detail: str = ""
    lost: int = 0  # bytes that no record could be made of, if their number of records is unknown


def read_lines(stream: io.BufferedReader, begin: int = 0, end: int | None = None) -> Iterator[Record]:
    """Yield the lines, as bytes, that start in [begin, end); the stream stands at begin - 1, or at 0.

    Split at "\n" only: text may hold U+2028 and other characters that `str.splitlines` takes for line ends. A line that
    damage cuts short is left out.
    """
    offset = max(begin - 1, 0)
    while begin and (raw := stream.readline(MAX_BYTES)):  # the rest of a line of the part before
        offset += len(raw)
        if raw.endswith(b"\n"):
            break
    line, mark = 0, 0 if begin else skip_mark(stream)  # the mark is part of the first line
    while (end is None or offset < end) and (raw := stream.readline(MAX_BYTES)):
        line, size = line + 1, len(raw)
        if raw.endswith(b"\n"):
            yield Record(raw, line, offset)
        elif size == MAX_BYTES:
            while rest := stream.readline(MAX_BYTES):
                size += len(rest)
                if rest.endswith(b"\n"):
                    break
            if stream.raw.damage and not rest:
                break
            detail = f"a line of {size:,} bytes; the most is {MAX_BYTES:,}"
            yield Record(None, line, offset, problem="too_long", detail=detail)
        elif stream.raw.damage:
            break
        else:
            yield Record(raw, line, offset)
        offset, mark = offset + mark + size, 0
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


def text_record(record: Record, encoding: Encoding) -> Record:
    """Decode a line of bytes and drop its line end; Windows line ends inside become "\n"."""
    if record.problem:
        return record
    try:
        text = encoding.decode(record.value)
    except UnicodeDecodeError as error:
        return record._replace(value=None, problem="bad_encoding", detail=encoding.why(error))
    return Record(unix_lines(text).removesuffix("\n"), record.line, record.offset, encoding.name)  # _replace is slow


def jsonl_record(record: Record) -> Record:
    if record.problem:
        return record
    try:
        return Record(json.loads(record.value), record.line, record.offset, record.encoding)
    except (ValueError, RecursionError) as error:
        return record._replace(value=None, problem="bad_json", detail=str(error))


def file_record(stream: io.BufferedReader, encoding: Encoding) -> Iterator[Record]:
    """Yield a whole text file as one record: what came before damage, without the lines that cannot be decoded; each of
    these is a problem."""
    offset, raw = skip_mark(stream), stream.read(MAX_TEXT_BYTES)
    if stream.peek():
        detail = f"a text of more than {MAX_TEXT_BYTES:,} bytes; use txt_split=blank or line"
        yield Record(None, 1, 0, problem="too_long", detail=detail)
        return
    try:
        yield Record(unix_lines(encoding.decode(raw)), 1, 0, encoding.name)
    except UnicodeDecodeError:
        texts, pieces, place = [], raw.split(b"\n"), offset
        for line, piece in enumerate(pieces, 1):
            try:
                texts.append(encoding.decode(piece))
            except UnicodeDecodeError as error:
                half = stream.raw.damage and line == len(pieces) and error.end == len(piece)  # cut within a character
                if half:
                    texts.append(encoding.decode(piece[: error.start]))
                else:
                    detail = encoding.why(error)
                    yield Record(None, line, place + error.start, problem="bad_encoding", detail=detail)
            place += len(piece) + 1
        if any(texts):
            yield Record(unix_lines("\n".join(texts)), 1, 0, encoding.name)
    yield from damage(stream, 1 + raw.count(b"\n"), offset + len(raw))


def tsv_records(lines: Iterator[Record], names: Sequence[str] = ()) -> Iterator[Record]:
    """Yield the rows as {column: text}, as `csv_records`; a quote is a character like any other."""
    for record in lines:
        row = [] if record.problem else record.value.split("\t")
        if record.problem:
            yield record
        elif not names:
            names = row
        elif len(row) != len(names) and record.value:
            yield record._replace(value=None, problem="bad_csv", detail=f"{len(row)} fields, but {len(names)} columns")
        elif record.value:
            yield record._replace(value=dict(zip(names, row, strict=True)))


def csv_records(lines: Iterator[Record], names: Sequence[str] = ()) -> Iterator[Record]:
    """Yield the rows as {column: text}; the first row names the columns if `names` does not. A quoted field may hold
    line ends. After a row that cannot be read, go on at the next of its lines that is a row by itself."""
    csv.field_size_limit(MAX_BYTES)  # characters; 128 Ki otherwise, less than a long article
    waiting: deque[Record] = deque()  # lines to read again
    held: list[Record] = []  # the lines of the row at hand

    def texts() -> Iterator[str]:
        size = 0
        while record := waiting.popleft() if waiting else next(lines, None):
            held.append(record)
            size += len(record.value or "")
            if record.problem or size > MAX_BYTES or len(held) > MAX_CSV_LINES:
                raise csv.Error(record.detail or "a quote is not closed")
            yield record.value + "\n"

    reader = csv.reader(texts(), strict=True)
    while True:
        held.clear()
        try:
            row, detail = next(reader), ""
        except StopIteration:
            return
        except csv.Error as error:
            row, detail = [], str(error)
            reader = csv.reader(texts(), strict=True)  # the old one stands within a row
        first = held[0]
        if first.problem:
            waiting.extendleft(reversed(held[1:]))
            yield first
            continue
        if names and row and len(row) != len(names):
            detail = f"{len(row)} fields, but {len(names)} columns"
        if detail:
            again = next((k for k in range(1, len(held)) if held[k].problem or is_row(held[k].value, names)), len(held))
            last, lost = held[again - 1], 0
            waiting.extendleft(reversed(held[again:]))
            if len(held) > 1:  # which rows they are is a guess
                lost = last.offset + len(last.value.encode()) + 1 - first.offset
                detail += f"; left out: {again} lines, {lost:,} bytes"
            yield first._replace(value=None, problem="bad_csv", detail=detail, lost=lost)
        elif not names:
            names = row
        elif row:
            yield Record(dict(zip(names, row, strict=True)), first.line, first.offset, first.encoding)


def is_row(line: str, names: Sequence[str]) -> bool:
    try:
        return len(next(csv.reader([line], strict=True), ())) == len(names)
    except csv.Error:
        return False


def json_records(stream: io.BufferedReader, encoding: Encoding) -> Iterator[Record]:
    """Yield the elements of an array, or objects one after the other."""
    skipped = skip_mark(stream)
    decoder = codecs.getincrementaldecoder(encoding.name)("surrogateescape")  # a bad byte spoils its element only

    def texts() -> Iterator[str]:
        while raw := stream.read1(streams.READ_BYTES):
            if text := decoder.decode(raw):
                yield text
        if not stream.raw.damage and (text := decoder.decode(b"", final=True)):
            yield text

    elements = JsonStream(texts(), encoding)
    elements.offset = skipped
    for record in elements:
        cut = stream.raw.damage and not elements.rest() and record.problem in ("bad_json", "truncated_file")
        if not cut:  # the damage itself is reported
            yield record
    yield from damage(stream, elements.line, elements.offset)


class JsonStream:
    """The elements of a JSON array, or JSON objects one after the other, from text in pieces; bytes that could not be
    decoded are surrogates in it.

    Holds the pieces of one element. After what is not JSON, goes on at the next text that opens as an element before it
    did: with the same key and, if elements begin lines, the same indentation.
    """

    DECODER = json.JSONDecoder()
    WHITE_SPACE = re.compile(r"[ \t\n\r]*")
    OPENING = re.compile(r'[\[{ \t\n\r]*(?<=[\[{ \t\n\r])"(?:[^"\\]|\\.){0,200}"\s*:|(?=["\d\-])')
    LONGEST = 2**11  # characters of an opening
    UNDECODED = re.compile("[\udc80-\udcff]")

    def __init__(self, chunks: Iterator[str], encoding: Encoding = streams.UTF8) -> None:
        self.chunks, self.encoding = chunks, encoding
        self.text, self.pos = "", 0  # what is held; how much of it is used
        self.line, self.offset = 1, 0  # of text[pos]: from 1; bytes in UTF-8
        self.space = ""  # white space before text[pos]
        self.openings: set[str] = set()  # patterns: how elements began so far

    def __iter__(self) -> Iterator[Record]:
        array, before = self._next() == "[", ""
        if array:
            self._use(self.pos + 1)
        while char := self._next():
            if array and before != "]" and char in ",]":
                self._use(self.pos + 1)
                before = char
                continue
            record, whole = self._element(array, before == "]")
            before = "element" if whole else "damage"
            if record:
                yield record
        if array and before in ("", ",", "element"):
            detail = "the array is not closed: the file is cut"
            yield Record(None, self.line, self.offset, problem="truncated_file", detail=detail)

    def _element(self, array: bool, behind: bool) -> tuple[Record | None, bool]:
        """Return the element that begins here, or None if only a separator is damaged, and whether it was parsed.
        behind: the array has ended."""
        line, offset = self.line, self.offset
        try:
            if array and behind:
                raise ValueError("text after the end of the array")
            value, end = self._parse()
            after = self.WHITE_SPACE.match(self.text, end).end()
            if array and not isinstance(value, list | dict) and self.text[after : after + 1] not in (",", "]", ""):
                raise ValueError(f"expected , or ] but found {self.text[after]!r}")
        except (ValueError, RecursionError) as error:
            opening, known = self._opening(), bool(self.openings)
            self.openings |= set() if known else {opening}
            n_skipped, undecoded = self._skip()
            if known and n_skipped < 2 and opening not in self.openings:
                return None, False
            lost, reason = self.offset - offset, "bad_encoding" if undecoded else "bad_json"
            reason = "too_long" if lost > MAX_BYTES else reason
            detail = f"{error}; left out: {lost:,} bytes"
            return Record(None, line, offset, problem=reason, detail=detail, lost=lost), False
        if len(self.openings) < 20:
            self.openings.add(self._opening())
        text = self.text[self.pos : end]
        if self._use(end) or self.encoding.sign_of_loss(text):
            detail = f"bytes that are not {self.encoding.name}{self.encoding.hint}"
            return Record(None, line, offset, problem="bad_encoding", detail=detail), True
        return Record(value, line, offset, self.encoding.name), True

    def _opening(self) -> str:
        """Return a pattern of how the element at hand begins, with the white space before it if that has a line end; ""
        if any text could begin so."""
        found = self.OPENING.match(self.text, self.pos)
        lead = re.escape(self.space) if "\n" in self.space else ""
        if found and found[0]:
            return lead + re.escape(found[0])
        return lead + r'(?=["\d\-])' if found and lead else r'(?<=[^\\]",)\s*(?=")' if found else ""

    def _skip(self) -> tuple[int, bool]:
        """Go on to the next opening, or to the end. Return how many characters are left out, and whether bytes that
        could not be decoded are among them."""
        pattern, at = re.compile("|".join(sorted(self.openings - {""})) or r"(?!)"), self.pos + 1
        n_skipped, undecoded, ended = 0, False, False
        while True:
            found = pattern.search(self.text, at)
            end = len(self.text) if ended else max(at, len(self.text) - self.LONGEST)
            end = found.start() if found else end
            n_skipped += end - self.pos
            undecoded = bool(self._use(end)) or undecoded
            if found or ended:
                return n_skipped, undecoded
            ended, at = not self._read(), self.pos

    def _parse(self) -> tuple[object, int]:
        while True:
            try:
                value, end = self.DECODER.raw_decode(self.text, self.pos)
            except json.JSONDecodeError as error:
                # More text may help: a string is open, or a word, number or escape may be cut off at the end.
                near_end = error.pos >= len(self.text) - len("-Infinity") - 1
                if not (near_end or error.msg.startswith("Unterminated string")):
                    raise
                if len(self.text) - self.pos > MAX_BYTES:
                    raise ValueError(f"an element of more than {MAX_BYTES:,} characters") from None
                if not self._read():
                    raise
                continue
            # a number may go on: 1 as 1.5, and what stands here as 1e+ as 1e+9
            if self.WHITE_SPACE.match(self.text, end).end() >= len(self.text) - len("e+") and self._read():
                continue
            return value, end

    def _next(self) -> str:
        """Return the next character that is no white space, "" at the end."""
        self.space = ""
        while True:
            end = self.WHITE_SPACE.match(self.text, self.pos).end()
            self.space += self.text[self.pos : end]
            self._use(end)
            if self.pos < len(self.text) or not self._read():
                return self.text[self.pos : self.pos + 1]

    def _use(self, end: int) -> int:
        """Go on to `end`; return how many bytes before it could not be decoded."""
        used, n_undecoded = self.text[self.pos : end], 0
        self.pos = end
        self.line += used.count("\n")
        try:
            self.offset += len(used.encode())
        except UnicodeEncodeError:
            n_undecoded = len(self.UNDECODED.findall(used))
            self.offset += len(used.encode("utf-8", "surrogatepass")) - 2 * n_undecoded  # these are one byte
        return n_undecoded

    def rest(self) -> bool:
        """Return whether any text is left."""
        return self.pos < len(self.text) or self._read()

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
        wanted = [name for name in file.schema_arrow.names if name in (columns or ())] or None  # None = all
        for batch in file.iter_batches(batch_size=256, row_groups=groups[begin:end], columns=wanted):
            yield from batch_records(batch, row)
            row += batch.num_rows
    except Damage as error:
        yield Record(None, 1, 0, problem=error.args[0], detail=error.args[1])
    except UserError:
        raise
    except (OSError, ValueError) as error:  # pyarrow's, for damaged pages
        yield Record(None, row + 1, row, problem="truncated_file", detail=str(error))


def decode_texts(row: dict, binary: list[str]) -> dict:
    """Return a row with the bytes of its binary columns as text, where they are UTF-8."""
    for name in binary:
        with contextlib.suppress(AttributeError, UnicodeDecodeError):  # null, or no text
            row[name] = row[name].decode()
    return row


def batch_records(batch: "pyarrow.RecordBatch", row: int) -> Iterator[Record]:
    """Yield the rows of a batch that begins at a row of the file; one that is not UTF-8 is a problem of its own."""
    try:
        binary = [field.name for field in batch.schema if "binary" in str(field.type)]
        for k, value in enumerate(batch.to_pylist()):
            yield Record(decode_texts(value, binary), row + k + 1, row + k)
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            yield Record(None, row + 1, row, problem="bad_encoding", detail=str(error))
            return
        for k in range(batch.num_rows):
            yield from batch_records(batch.slice(k, 1), row + k)
