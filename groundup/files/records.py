"""What a file holds, record by record, each with its line and byte offset: lines, paragraphs,
texts, JSON, CSV. Problems are records too: nothing raises because of a file's content.

A file's first bytes decide what it is, and where these cannot tell, its name does. What most files
hold goes through four steps:

    open_stream (streams.py)                the bytes, unpacked
    read_lines or paragraphs                bytes, cut at line ends
    decoded (encodings.py)                  text
    jsonl_records, csv_records, plain_rows  what the lines say

An array of JSON and a text that is one document have no lines to go by: `json_records` and
`text_records` take the stream itself. Rows of parquet come from parquet.py.
"""

import codecs
import contextlib
import csv
import hashlib
import io
import json
import os
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence

from groundup.errors import UserError, counted, json_fault
from groundup.files import parquet, streams
from groundup.files.encodings import Decoder
from groundup.files.parquet import column_names
from groundup.files.paths import shown_name, unpacked_name
from groundup.files.streams import MAX_BYTES, Record, skip_mark, unix_lines

MAX_CSV_LINES = 10_000  # of a row: more mean a quote that is never closed
HEAD_BYTES = 2**16  # of a CSV file: they tell what separates its fields
MAX_DEPTH = 100  # of JSON; code that walks a deeper value would exhaust Python's stack
PIECE_CHARS = 2**21  # a longer text file is read in pieces: each character may take four bytes
LINE_BYTES = 2**22  # a longer line of a text file, too
LINE_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")
JSON_SUFFIXES = (".json", *LINE_SUFFIXES)
MARK = "\ufeff"  # a byte order mark; within a file where several were put together
# NaN is no JSON: pandas and json.dump write it where there is no value
DECODER = json.JSONDecoder(parse_constant=lambda name: None if name == "NaN" else float(name))
NULL = r"\N"  # of MySQL, PostgreSQL and Hive in CSV and TSV
BETWEEN = re.compile(r"[\s,]*")  # JSON values; white space has RFC 7464's record separator, \x1e


class Report:
    """What was not read, or only after mending.

    problems {reason: places where documents are lost}: bad_json, bad_field (no text), bad_encoding,
    bad_csv, too_long, truncated_file (damaged or cut; what came before was read), not_text (another
    kind of file). mended {encoding or surrogates: documents}
    in_text: those of the problems that cost a part of a text file, such as a line
    places: (path, line, byte offset, "reason: detail") of the first max_places problems
    digest: also hash the bytes that are read. name: of the file, for people, instead of its path
    """

    def __init__(
        self, strict: bool = False, max_places: int = 10_000, digest: bool = False, name: str = ""
    ) -> None:
        self.strict, self.max_places, self.name = strict, max_places, name
        self.problems, self.mended, self.in_text = Counter(), Counter(), Counter()
        self.n_bytes = 0  # of the files, unpacked: those of documents and those lost
        self.lost_bytes = 0  # of what no document was made of
        self.sha256 = hashlib.sha256() if digest else None
        self.places: list[tuple[str, int, int, str]] = []

    def add(self, path: str, line: int, offset: int, reason: str, detail: str) -> None:
        """Count a problem and note its place. Raise UserError if strict."""
        name, detail = self.name or path, " ".join(detail.split())  # one line without tabs
        if self.strict:
            what = f"{shown_name(name)}:{line}: {reason} at byte {offset}: {detail}"
            hint = "mend it, or leave such records out with strict=False"
            raise UserError(f"data: {what}; {hint}")
        self.problems[reason] += 1
        self.note(name, line, offset, reason, detail)

    def note(self, name: str, line: int, offset: int, reason: str, detail: str) -> None:
        if len(self.places) < self.max_places:
            self.places.append((name, line, offset, f"{reason}: {detail}"))


# ---- a file --------------------------------------------------------------------------------------


def suffix_of(path: str) -> str:
    return os.path.splitext(unpacked_name(path))[1]


def container(path: str, head: bytes, txt_split: str) -> str:
    """Return how to read a file, from its first bytes and, where these cannot tell, its name:
    parquet, csv, tsv, json (an array, or values over several lines), jsonl, or the txt_split of
    plain text."""
    suffix = suffix_of(path)
    # the mark and white space that may stand before anything, \x1e from RFC 7464
    head = head.removeprefix(codecs.BOM_UTF8).lstrip(b" \t\n\r\x1e")
    if head.startswith(b"PAR1") or suffix == ".parquet":
        return "parquet"
    if suffix in (".csv", ".tsv"):
        return suffix[1:]
    # Standard input has no name. A text may begin with a bracket, too, but hardly with these two.
    is_json = path == "-" and re.match(rb'\{\s*"|\[\s*[{"\]]', head)
    if suffix in JSON_SUFFIXES or is_json:
        if head.startswith(b"["):
            named = suffix in LINE_SUFFIXES
            return "jsonl" if lines_of_arrays(head, named) else "json"
        return "json" if is_over_lines(head) else "jsonl"
    if txt_split not in ("file", "blank", "line"):
        raise UserError(f"data: txt_split must be file, blank or line, got {txt_split!r}")
    return txt_split


def is_over_lines(head: bytes) -> bool:
    """Return whether the first JSON value goes on over several lines."""
    text = head.decode("utf-8", "replace")
    first = text.partition("\n")[0]
    try:
        with contextlib.suppress(json.JSONDecodeError):
            DECODER.raw_decode(first)  # a value on a line of its own
            return False
        DECODER.raw_decode(text)
        return True
    except json.JSONDecodeError as error:
        # Is it cut at the end of the head, after several lines? Else the first line is damaged.
        goes_on = error.pos >= len(text) - 1 or error.msg.startswith("Unterminated string")
        return goes_on and len(first) < len(text) - 1
    except (ValueError, RecursionError):  # a number of thousands of digits, nested too deep
        return False


def lines_of_arrays(head: bytes, named: bool) -> bool:
    """Return whether a file that begins with "[" has an array in each line, such as the messages of
    a conversation. named: its name says that it has lines; its only line is then a row, not an
    array of rows."""
    # If the name does not tell, the next line does: it begins an array as well.
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
    report: Report | None = None,
) -> Iterator[Record]:  # fmt: skip
    """Yield all records of a part of a file (see readers.work_units), in order, with problems.

    columns: to read, of parquet. names: of the columns of a CSV file whose first row is not their
    names. encoding: of lines that are not UTF-8, where the user gave it. report: gets the
    number of unpacked bytes that were read or are lost when all records were taken, and their
    sha256 if it asks for it.

    A line belongs to the part that holds its first byte, a paragraph to the part that holds the
    blank line before it: wherever the cuts are, every record is read once.
    """
    report = report or Report()
    # Of parquet begin and end are row groups, not bytes, so the stream is not opened there.
    if begin and is_parquet(path):
        report.sha256 = None  # the whole file is hashed with its first part
        yield from parquet_rows(path, begin, end, columns, report)
        return
    with streams.open_stream(path, max(begin - 1, 0), encoding, check=True) as stream:
        raw = stream.raw
        if begin:  # of a file of lines, as `work_units` found
            kind = "jsonl" if suffix_of(path) in JSON_SUFFIXES else txt_split
        else:
            kind = container(path, stream.peek(), txt_split)
        # standard input cannot be read twice, so it has no sum
        if report.sha256 and raw.file:
            streams.hash_part(raw.file, begin, None if kind == "parquet" else end, report.sha256)
        if kind == "parquet":
            yield from parquet_rows(path, begin, end, columns, report)
            return
        yield from records_of(stream, kind, begin, end, names)
        # What no reader took counts as well: lines of white space, the rest behind damage.
        if raw.plain and raw.file:
            size = os.fstat(raw.file.fileno()).st_size
            report.n_bytes += (size if end is None else min(end, size)) - begin
        else:
            report.n_bytes += raw.n_made + (raw.damage[2] if raw.damage else 0)


def records_of(
    stream: io.BufferedReader, kind: str, begin: int, end: int | None, names: Sequence[str]
) -> Iterator[Record]:
    """Yield the records of a stream that is to be read as a `container` says."""
    decoder = Decoder(stream.raw.verdict)
    if kind == "json":
        yield from json_records(stream, decoder)  # resumes behind damage
    elif kind == "file":
        yield from text_records(stream, decoder)  # one record, or pieces of one
    elif kind in ("csv", "tsv"):
        csv.field_size_limit(MAX_BYTES)  # characters; 128 Ki otherwise, less than an article
        head = stream.peek()  # not decoded: UTF-16 is UTF-8 by now, and what tells is ASCII
        lines = decoded(read_lines(stream), decoder)
        if hint := SEPARATOR.match(head):  # a line for Excel
            head = head[hint.end() :]
            next(lines)
        dialect = dialect_of(kind, head)
        if dialect and is_escaped(head, dialect):
            lines = map(without_escapes, lines)
        yield from csv_records(lines, names, dialect) if dialect else plain_rows(lines, names)
    elif kind == "blank":
        yield from decoded(paragraphs(stream, begin, end), decoder)
    else:
        lines = read_lines(stream, begin, end)
        lines = (line for line in lines if line.problem or not line.value.isspace())
        lines = decoded(lines, decoder)
        yield from jsonl_records(lines) if kind == "jsonl" else lines


def is_parquet(path: str) -> bool:
    with open(path, "rb") as f:
        return container(path, f.read(4), "file") == "parquet"


def parquet_rows(
    path: str, begin: int, end: int | None, columns: list[str] | None, report: Report
) -> Iterator[Record]:
    """Yield the rows of parquet, and add their bytes, which are not those of the file, to the
    report."""
    for record, n_bytes in parquet.parquet_records(path, begin, end, columns):
        report.n_bytes += n_bytes
        yield record


# ---- lines -------------------------------------------------------------------------------------


def read_lines(
    stream: io.BufferedReader, begin: int = 0, end: int | None = None
) -> Iterator[Record]:
    """Yield the lines, as bytes, that start in [begin, end). The stream is at begin - 1, or at 0.

    Split at "\n" only: text may hold U+2028 and other characters that `str.splitlines` takes for
    line ends. A line that damage cuts short is lost.
    """
    offset = max(begin - 1, 0)
    # The rest of a line of the part before. From begin - 1 on, so that a line which starts at
    # `begin` is known by the line end before it.
    while begin and (raw := stream.readline(MAX_BYTES)):
        offset += len(raw)
        if raw.endswith(b"\n"):
            break
    line, partial = 0, 0
    mark = 0 if begin else skip_mark(stream)  # the mark is part of the first line
    while (end is None or offset < end) and (raw := stream.readline(MAX_BYTES)):
        line, size = line + 1, len(raw)
        if raw.endswith(b"\n"):
            yield Record(raw, line, offset)
        elif size == MAX_BYTES:
            # Go through the rest without holding it: it is only counted.
            while rest := stream.readline(MAX_BYTES):
                size += len(rest)
                if rest.endswith(b"\n"):
                    break
            if stream.raw.damage and not rest:
                partial = size
                break
            detail = f"a line of {size:,} bytes; the most is {MAX_BYTES:,}"
            yield Record(None, line, offset).fail("too_long", detail, size)
        elif stream.raw.damage:
            partial = size
            break
        else:  # the last line of the file may have no end
            yield Record(raw, line, offset)
        offset, mark = offset + mark + size, 0
    yield from damage(stream, line, offset, partial)


def damage(stream: io.BufferedReader, line: int, offset: int, partial: int) -> Iterator[Record]:
    """Yield a record of the stream's damage, if it has any. partial: bytes before it that are not
    used, for they are half a record."""
    if stream.raw.damage:
        reason, detail, lost = stream.raw.damage
        yield Record(None, line, offset).fail(reason, detail, lost + partial)


def decoded(lines: Iterator[Record], decoder: Decoder) -> Iterator[Record]:
    """Decode lines of bytes and drop their ends; Windows line ends become "\n"."""
    for record in lines:
        if record.problem:
            yield record
            continue
        try:
            text = decoder.decode(record.value)
        except UnicodeDecodeError as error:
            yield undecoded(record, error, decoder)
            continue
        if not text.isascii():  # ASCII is the same in all encodings, so it needs no note
            text, record.encoding = text.removeprefix(MARK), decoder.name
        record.value = unix_lines(text).removesuffix("\n")
        yield record


def undecoded(record: Record, error: UnicodeDecodeError, decoder: Decoder) -> Record:
    """Return the record with its problem. Of a paragraph it names the line that is meant."""
    raw = record.value
    begin = raw.rfind(b"\n", 0, error.start) + 1  # of that line
    record.line += raw.count(b"\n", 0, begin)
    record.offset += begin
    error.object = raw[begin:]
    error.start -= begin
    error.end -= begin
    return record.fail("bad_encoding", f"{error}{decoder.hint}", len(raw))


def paragraphs(stream: io.BufferedReader, begin: int, end: int | None) -> Iterator[Record]:
    """Yield the runs of lines after the blank lines that start in [begin, end), as `read_lines`
    would read them; the start of the file counts as a blank line, and so does a line too long."""
    # mine: a blank line of this part was seen, so what follows belongs to it.
    held, first, mine = [], Record(b"", 0, 0), begin == 0
    # Lines after `end` are read, too: the last paragraph may go on there.
    for line in read_lines(stream, begin):
        blank = bool(line.problem) or not line.value.strip()
        if blank and held:
            first.value = b"".join(held)
            yield first
            held = []
        if end is not None and line.offset >= end and (blank or not mine):
            return
        if line.problem:
            if mine or end is None or line.offset < end:
                yield line
            mine = True
            continue
        mine = mine or blank
        if mine and not blank:
            first = first if held else line
            held.append(line.value)
    if held:
        first.value = b"".join(held)
        yield first


# ---- a whole text file -------------------------------------------------------------------------


def text_records(stream: io.BufferedReader, decoder: Decoder) -> Iterator[Record]:
    """Yield a text file as one record, or in pieces of at most PIECE_CHARS that end with a
    paragraph if possible, else with a line. Lines that cannot be decoded are left out; each is a
    problem. What came before damage is kept."""
    held, n_chars, n_pieces, n_problems = [], 0, 0, 0
    name = "utf-8"
    # Pieces have one place, the file's, for all of it is one document.
    for record in text_lines(stream, decoder):
        if record.problem:
            n_problems += 1
            record.in_text = True
            yield record
            continue
        if record.encoding != "utf-8":  # one line tells for the file
            name = record.encoding
        held.append(record.value)
        n_chars += len(record.value)
        while n_chars > PIECE_CHARS:
            text = unix_lines("".join(held))
            end = piece_end(text, 0, PIECE_CHARS)
            yield Record(text[:end], 1, 0, name, piece=n_pieces)
            held, n_chars, n_pieces = [text[end:]], len(text) - end, n_pieces + 1
    # An empty file is one empty text, but what is left of a file with problems may be none.
    text = unix_lines("".join(held))
    if text or not (n_pieces or n_problems):
        yield Record(text, 1, 0, name, piece=n_pieces)


def piece_end(text: str, begin: int, most: int) -> int:
    """Return where to end a piece of at most so many characters that starts at `begin`: behind a
    blank line, else behind a line, in its second half."""
    half, end = begin + most // 2, begin + most
    # rfind returns -1 if there is none, which is before `half`
    places = text.rfind("\n\n", half, end - 1) + 2, text.rfind("\n", half, end) + 1
    return next((place for place in places if place > half), end)


def text_lines(stream: io.BufferedReader, decoder: Decoder) -> Iterator[Record]:
    """Yield the decoded lines of a text file with their ends; a long line in several records."""
    line, offset = 1, skip_mark(stream)
    for raw in lines_or_parts(stream, LINE_BYTES):
        try:
            text = decoder.decode(raw)
            yield Record(text.removeprefix(MARK), line, offset, decoder.name)
        except UnicodeDecodeError as error:
            # The damage may begin within a character. It is reported; the text before it counts.
            cut = stream.raw.damage and error.end == len(raw) and not raw.endswith(b"\n")
            if cut:
                yield Record(decoder.decode(raw[: error.start]), line, offset, decoder.name)
            else:
                yield undecoded(Record(raw, line, offset + error.start), error, decoder)
        line += raw.endswith(b"\n")
        offset += len(raw)
    yield from damage(stream, line, offset, 0)


def lines_or_parts(stream: io.BufferedReader, most: int) -> Iterator[bytes]:
    """Yield the lines of a stream; one of more than `most` bytes in parts of whole characters."""
    rest = b""
    while raw := rest + stream.readline(most):
        end = len(raw)
        if end >= most and not raw.endswith(b"\n"):
            end = character_end(raw)
        yield raw[:end]
        rest = raw[end:]


def character_end(raw: bytes) -> int:
    """Return a place near the end of some bytes of text that is not within a character. Bytes
    below 0x30 are no part of one in any encoding; those of UTF-8 tell where one begins."""
    if end := len(raw.rstrip(bytes(range(0x30, 0x100)))):
        return end
    end = len(raw) - 1
    while end > len(raw) - 4 and raw[end] & 0xC0 == 0x80:
        end -= 1
    return end


# ---- tables ------------------------------------------------------------------------------------


def dialect_of(kind: str, head: bytes) -> dict | None:
    """Return the arguments of csv.reader for a CSV or TSV file; None for TSV without quotes.

    What separates the fields of CSV is, of the marks that cut most of the first rows into as many
    fields as the very first, the one that makes most; else a comma. In TSV quotes enclose fields
    only if the file is written so, as by pandas and csv.writer."""
    if kind == "tsv":
        # Is the head a table whose rows all have as many fields, if quotes are quotes?
        is_cut = len(head) >= streams.READ_BYTES  # perhaps within quotes
        widths, broken = widths_of(head, "\t", is_cut)
        regular = len({*widths} - {0}) == 1 and (not broken or (is_cut and len(widths) > 1))
        quoted = regular and re.search(rb'(?:^|\t)"', head, re.MULTILINE)
        return {"delimiter": "\t", "strict": True} if quoted else None

    def n_fields(delimiter: str) -> int:
        widths = widths_of(head[:HEAD_BYTES], delimiter, len(head) > HEAD_BYTES)[0]
        widths = [n for n in widths if n][:20]
        most = widths and 2 * widths.count(widths[0]) > len(widths)
        return widths[0] if most and widths[0] > 1 else 0

    mark = max(",;\t|", key=n_fields)  # of equals the first, so a comma if none makes two fields
    others = head.partition(b"\n")[0].split(mark.encode())[1:]
    # By hand: a, b. White space that means something, as in code, is more than one character.
    typed = bool(others) and all(name.startswith(b" ") for name in others)
    typed = typed and not re.search(re.escape(mark.encode()) + rb"(?:  | ?\t)", head)
    return {"delimiter": mark, "strict": True, "skipinitialspace": typed}


SEPARATOR = re.compile(rb"(?:\xef\xbb\xbf)?\"?sep=[^\r\n]\"?\r?\n", re.IGNORECASE)


def is_escaped(head: bytes, dialect: dict) -> bool:
    """Return whether quotes and backslashes within fields have a backslash before them, as Spark
    writes them, instead of quotes being doubled: more of the first rows are a table so."""
    if b'\\"' not in head:
        return False
    mark, is_cut = dialect["delimiter"], len(head) >= streams.READ_BYTES
    plain = widths_of(head, mark, is_cut)[0]
    doubled = with_doubled_quotes(head.decode("latin-1")).encode("latin-1")  # bytes stay bytes
    escaped = widths_of(doubled, mark, is_cut)[0]
    was_table, is_table = len({*plain} - {0}) == 1, len({*escaped} - {0}) == 1
    # If it is a table both ways, it must have more rows so: a backslash may be one in a text.
    return is_table and len(escaped) >= len(plain) + was_table


def without_escapes(line: Record) -> Record:
    if not line.problem:
        line.value = with_doubled_quotes(line.value)
    return line


def with_doubled_quotes(text: str) -> str:
    """Return a text of CSV in which quotes and backslashes have no backslash before them."""
    return re.sub(r'\\(["\\])', lambda found: '""' if found[1] == '"' else "\\", text)


def widths_of(head: bytes, delimiter: str, is_cut: bool) -> tuple[list[int], bool]:
    """Return the number of fields of each whole row, up to one that is no CSV, and whether there is
    one. is_cut: the head ends within the last row."""
    text = head.removeprefix(codecs.BOM_UTF8).decode("utf-8", "replace")
    widths: list[int] = []
    try:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        widths += map(len, rows)
    except csv.Error:
        return widths, True
    return widths[:-1] if is_cut else widths, False


def size_of(record: Record) -> int:
    """Return the bytes of a decoded line."""
    codec = record.encoding
    return len(record.value.encode(codec, "replace")) + 1


def csv_records(lines: Iterator[Record], names: Sequence[str], dialect: dict) -> Iterator[Record]:
    """Yield the rows as {column: text}; the first row names the columns if `names` does not. A
    quoted field may hold line ends. After a row that cannot be read, go on at the next of its
    lines that is a row by itself."""
    waiting: deque[Record] = deque()  # lines to read again
    held: list[Record] = []  # the lines of the row at hand
    reader = csv.reader(csv_lines(lines, waiting, held), **dialect)
    while True:
        held.clear()
        try:
            row, detail = next(reader), ""
        except StopIteration:
            return
        except csv.Error as error:
            row, detail = [], str(error)
            if "\r" in (held[0].value or ""):
                detail = "a carriage return; if lines end so: tr '\\r' '\\n' <OLD >NEW"
            # After an error the old one is still within the row, and would go on with it.
            reader = csv.reader(csv_lines(lines, waiting, held), **dialect)
        first = held[0]
        if first.problem:
            waiting.extendleft(reversed(held[1:]))
            yield first
            continue
        if names and row:
            detail = width_fault(row, names)
        if detail:
            lost = give_back(held, waiting, names, dialect)
            n_bytes = sum(map(size_of, lost))
            if len(held) > 1:  # which rows they are is a guess
                detail += f"; left out: {counted(len(lost), 'line')}, {n_bytes:,} bytes"
            yield first.fail("bad_csv", detail, n_bytes)
        elif not names:
            names = column_names(row)
        elif row:
            first.value = table_row(names, row)
            yield first


def give_back(
    held: list[Record], waiting: deque[Record], names: Sequence[str], dialect: dict
) -> list[Record]:
    """Let lines of a row that cannot be read wait again, from the first that is a row by itself on.
    Return the others. For a quote that is never closed takes in all lines behind it."""
    rows = (k for k in range(1, len(held)) if is_row(held[k], names, dialect))
    again = next(rows, len(held))
    waiting.extendleft(reversed(held[again:]))
    return held[:again]


def width_fault(row: list[str], names: Sequence[str]) -> str:
    """Return what is wrong if a row has more or fewer fields than the table has columns, or ""."""
    if len(row) == len(names):
        return ""
    return f"{counted(len(row), 'field')}, but {counted(len(names), 'column')}"


def plain_rows(lines: Iterator[Record], names: Sequence[str]) -> Iterator[Record]:
    """Yield the rows of TSV as {column: text}, as `csv_records`, where quotes are characters."""
    # csv.reader would refuse a field that holds "\r", as texts of the web do.
    for record in lines:
        if record.problem:
            yield record
            continue
        row = record.value.split("\t")
        if not names:
            names = column_names(row)
        elif record.value:  # an empty line is no row
            if fault := width_fault(row, names):
                record.fail("bad_csv", fault, size_of(record))
            else:
                record.value = table_row(names, row)
            yield record


def table_row(names: Sequence[str], row: list[str]) -> dict[str, str | None]:
    """Return a row of a table as {column: text}, None where a database writes NULL."""
    return {name: None if cell == NULL else cell for name, cell in zip(names, row, strict=True)}


def csv_lines(lines: Iterator[Record], waiting: deque[Record], held: list[Record]) -> Iterator[str]:
    """Yield texts for csv.reader: first of the waiting lines; each is put into `held`, too. Raise
    csv.Error if the row at hand has too many, or one that is a problem."""
    size = 0
    while record := waiting.popleft() if waiting else next(lines, None):
        held.append(record)
        size += len(record.value or "")
        # An error here ends csv.reader's row, and csv_records looks at what is held.
        if record.problem or size > MAX_BYTES or len(held) > MAX_CSV_LINES:
            raise csv.Error(record.detail or "a quote is not closed")
        yield record.value + "\n"


def is_row(line: Record, names: Sequence[str], dialect: dict) -> bool:
    """Return whether a line is a row by itself, or a problem of its own."""
    if line.problem:
        return True
    try:  # a quote that the line opens and does not close is an error, for dialects are strict
        return len(next(csv.reader([line.value], **dialect), ())) == len(names)
    except csv.Error:
        return False


# ---- JSON --------------------------------------------------------------------------------------


def check_depth(value: dict | list, most: int = MAX_DEPTH) -> None:
    """Raise ValueError if objects and lists are nested more than so many deep."""
    if most == 0:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    for inner in value.values() if type(value) is dict else value:
        # JSON makes no subclasses, so type serves; it is faster than isinstance
        if type(inner) in (dict, list):
            check_depth(inner, most - 1)


def jsonl_records(lines: Iterator[Record]) -> Iterator[Record]:
    """Yield the values in decoded lines; a line may hold several, one behind the other."""
    for record in lines:
        if record.problem:
            yield record
            continue
        try:
            values = json_values(record.value)
        except (ValueError, RecursionError) as error:
            yield record.fail("bad_json", json_fault(error), size_of(record))
            continue
        # All of a line's values have its place: people look for the line.
        for value in values:
            yield Record(value, record.line, record.offset, record.encoding)


def json_values(text: str) -> list:
    """Return the JSON values that stand in a text one behind the other, or with commas between
    them. Raise ValueError or RecursionError if not all is JSON, or is nested too deep."""
    values, begin = [], BETWEEN.match(text).end()
    while begin < len(text) or not values:  # an empty line raises: it holds no value
        value, end = DECODER.raw_decode(text, begin)
        values.append(value)
        begin = BETWEEN.match(text, end).end()
    check_depth(values, MAX_DEPTH + 1)
    return values


def json_records(stream: io.BufferedReader, decoder: Decoder) -> Iterator[Record]:
    """Yield the elements of an array, or values one after the other."""
    skipped = skip_mark(stream)
    elements = JsonStream(json_texts(stream, decoder), decoder)
    elements.offset = skipped
    partial = 0
    for record in elements:
        cut = stream.raw.damage and record.problem in ("bad_json", "truncated_file")
        if cut and not elements.rest():  # the last, cut by the damage, which is reported below
            partial = record.lost
        else:
            yield record
    yield from damage(stream, elements.line, elements.offset, partial)


def json_texts(stream: io.BufferedReader, decoder: Decoder) -> Iterator[str]:
    """Yield the text of a stream in pieces of whole lines, if these are short; a byte that cannot
    be decoded becomes a surrogate, so that it spoils its element only."""
    held, size = [], 0
    for raw in lines_or_parts(stream, streams.READ_BYTES):
        held.append(decoder.decode_somehow(raw))
        size += len(raw)
        if size >= streams.READ_BYTES:
            yield "".join(held)
            held, size = [], 0
    if held:
        yield "".join(held)


class JsonStream:
    """The elements of a JSON array, or JSON values one after the other, from text in pieces, in
    which bytes that could not be decoded are surrogates. Holds the pieces of one element.

    After what is not JSON, resynchronises at text that begins like an earlier element: with the
    same key and, if elements begin lines, the same indentation. So a bad byte costs one element of
    an array of gigabytes, not the rest of it."""

    # An opening: brackets, and the first key behind them; or, of an element that has none, nothing
    # but that a text or number follows.
    WHITE_SPACE = re.compile("[ \t\n\r\x1e\ufeff]*")
    OPENING = re.compile(r'[\[{ \t\n\r]*(?<=[\[{ \t\n\r])"(?:[^"\\]|\\.){0,200}"\s*:|(?=["\d\-])')
    LONGEST = 2**11  # characters of an opening
    UNDECODED = re.compile("[\udc80-\udcff]")

    def __init__(self, chunks: Iterator[str], decoder: Decoder | None = None) -> None:
        self.chunks, self.decoder = chunks, decoder or Decoder()
        self.text, self.pos = "", 0  # what is held; how much of it is used
        self.line, self.offset = 1, 0  # of text[pos]: from 1; in bytes
        self.space = ""  # white space before text[pos]
        self.openings: set[str] = set()  # patterns of how elements began so far

    def __iter__(self) -> Iterator[Record]:
        # before: what came last, "[" or nothing (""), a comma, "]", an element or damage. A comma
        # that is missing, or one too many, costs nothing.
        array, before = self._next() == "[", ""
        if array:
            self._use(self.pos + 1)
        while char := self._next():
            if array and before == "]" and char == "[":  # files that were put together
                self._use(self.pos + 1)
                before = ""
                continue
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
            yield Record(None, self.line, self.offset).fail("truncated_file", detail, 1)

    def _element(self, array: bool, behind: bool) -> tuple[Record | None, bool]:
        """Return the element that begins here, or None if only a separator is damaged, and whether
        it was parsed. behind: the array has ended."""
        line, offset = self.line, self.offset
        try:
            if array and behind:
                raise ValueError("text after the end of the array")
            value, end = self._parse()
            check_depth([value], MAX_DEPTH + 1)
            if array and not isinstance(value, list | dict):
                after = self.WHITE_SPACE.match(self.text, end).end()
                if self.text[after : after + 1] not in (",", "]", ""):
                    raise ValueError(f"expected , or ] but found {self.text[after]!r}")
        except (ValueError, RecursionError) as error:
            fault = json_fault(error, line, self.pos)
            opening, known = self._opening(), bool(self.openings)
            # If the very first element is damaged, its own beginning is all that there is to go by.
            self.openings |= set() if known else {opening}
            n_skipped, undecoded = self._skip()
            if known and n_skipped < 2 and opening not in self.openings:
                return None, False
            lost, reason = self.offset - offset, "bad_encoding" if undecoded else "bad_json"
            reason = "too_long" if lost > MAX_BYTES else reason
            detail = f"{fault}; left out: {lost:,} bytes"
            return Record(None, line, offset).fail(reason, detail, lost), False
        if len(self.openings) < 20:  # more would make the search slow, and tell no more
            self.openings.add(self._opening())
        text = self.text[self.pos : end]
        if self._use(end):
            detail = f"bytes that are not {self.decoder.name}{self.decoder.hint}"
            lost = self.offset - offset
            return Record(None, line, offset).fail("bad_encoding", detail, lost), True
        name = "utf-8" if text.isascii() else self.decoder.name
        return Record(value, line, offset, name), True

    def _opening(self) -> str:
        """Return a pattern of how the element at hand begins: of the white space before it if that
        has a line end, of its brackets and first key if it has any. "" if any text may begin so."""
        found = self.OPENING.match(self.text, self.pos)
        if not found:
            return ""
        space = re.escape(self.space) if "\n" in self.space else ""
        if found[0]:
            return space + re.escape(found[0])
        return space + r'(?=["\d\-])' if space else r'(?<=[^\\]",)\s*(?=")'

    def _skip(self) -> tuple[int, bool]:
        """Go on to the next opening, or to the end. Return how many characters are left out, and
        whether bytes that could not be decoded are among them."""
        patterns = "|".join(sorted(self.openings - {""}))
        pattern, at = re.compile(patterns or r"(?!)"), self.pos + 1  # (?!) matches nowhere
        n_skipped, undecoded, ended = 0, False, False
        while True:
            found = pattern.search(self.text, at)
            # An opening may be cut at the end of what is held, so keep the last characters.
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
                value, end = DECODER.raw_decode(self.text, self.pos)
            except json.JSONDecodeError as error:
                # More text may help: a string is open, or a word, number or escape may be cut off.
                near_end = error.pos >= len(self.text) - len("-Infinity") - 1
                if not (near_end or error.msg.startswith("Unterminated string")):
                    raise
                if len(self.text) - self.pos > MAX_BYTES:
                    raise ValueError(f"an element of more than {MAX_BYTES:,} characters") from None
                if not self._read():
                    raise
                continue
            if isinstance(value, dict | list):
                return value, end
            # At the end of what is held a number may go on: 1 as 1.5, and what stands here as 1e+
            # as 1e+9. And only what follows a text tells whether it is an element.
            near_end = len(self.text) - len("e+")
            if self.WHITE_SPACE.match(self.text, end).end() < near_end or not self._read():
                return value, end

    def _next(self) -> str:
        """Return the next character that is no white space, "" at the end."""
        self.space = ""  # kept for `_opening`: elements of a file have the same indentation
        while True:
            end = self.WHITE_SPACE.match(self.text, self.pos).end()
            if end > self.pos:
                self.space += self.text[self.pos : end]
                self._use(end)
            if self.pos < len(self.text) or not self._read():
                return self.text[self.pos : self.pos + 1]

    def _use(self, end: int) -> int:
        """Go on to `end`; return how many bytes before it could not be decoded."""
        used = self.text[self.pos : end]
        self.pos = end
        self.line += used.count("\n")
        if used.isascii():
            self.offset += len(used)
            return 0
        try:
            self.offset += len(used.encode(self.decoder.name))
        except UnicodeEncodeError:  # a byte that could not be decoded becomes one again
            self.offset += len(used.encode(self.decoder.name, "replace"))
            return len(self.UNDECODED.findall(used))
        return 0

    def rest(self) -> bool:
        """Return whether any text is left."""
        return self.pos < len(self.text) or self._read()

    def _read(self) -> bool:
        """Read at least as much as is held: an element that is parsed again and again then takes
        linear time in all."""
        held = [self.text[self.pos :]]
        wanted = max(1, len(held[0]))
        while wanted > 0 and (chunk := next(self.chunks, "")):
            held.append(chunk)
            wanted -= len(chunk)
        if len(held) > 1:
            self.text, self.pos = "".join(held), 0
        return len(held) > 1
