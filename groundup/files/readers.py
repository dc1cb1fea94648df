"""Raw files: every container becomes a stream of records and documents, in bounded memory, in parts that different
processes may read. What cannot be read is reported with file, line and byte offset, never dropped in silence.

.txt .jsonl .json (array, or objects one after the other) .csv .tsv .parquet, each also as .gz .bz2 .xz .zst; UTF-8,
UTF-16, UTF-32 and GB18030. What a file is, is decided by its first bytes and, where these cannot tell, by its name.
"""

import bz2
import codecs
import csv
import glob
import io
import itertools
import json
import lzma
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from groundup.errors import UserError
from groundup.files.row_formats import columns_of, document_of

if TYPE_CHECKING:
    import pyarrow.parquet

READ_BYTES = 2**20
MAGIC = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zst"}
LINE_KINDS = ("jsonl", "line", "blank")  # see `container`: files that may be read in parts





# ---- which, and in which parts ----------------------------------------------------------------------------


def find_files(input: str) -> list[str]:
    """Paths for `input`: files, directories, globs, comma-separated; "-" is standard input. In the order given, without
    repetition; a directory is read recursively in the byte order of relative paths, less hidden files and *.tmp.

    Raises DataError for a part that matches no file.
    """
    found: list[str] = []
    for part in filter(None, (part.strip() for part in input.split(","))):
        matches = [part] if part == "-" or os.path.exists(part) else sorted(glob.glob(part, recursive=True))
        files = [file for match in matches for file in (list_directory(match) if os.path.isdir(match) else [match])]
        if not files:
            raise UserError(f"data: no file matches {part!r}; give files, directories or globs, separated by commas")
        found += files
    return list(dict.fromkeys(found))


def list_directory(top: str) -> list[str]:
    files, seen = [], {os.path.realpath(top)}  # links to a folder above would go round for ever
    for folder, folders, names in os.walk(top, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        real = {name: os.path.realpath(os.path.join(folder, name)) for name in folders}
        folders[:] = [name for name in folders if real[name] not in seen]
        seen |= set(real.values())
        names = [name for name in names if not name.startswith(".") and not name.endswith(".tmp")]
        files += [os.path.join(folder, name) for name in names]
    return sorted(files, key=lambda file: os.fsencode(os.path.relpath(file, top)))


def work_units(path: str, txt_split: str = "file", unit_bytes: int = 2**26) -> list[tuple[int, int | None]]:
    """The (begin, end) parts of a file for `read_documents`, which different processes may read; all of it = (0, None).

    Bytes of a plain line-oriented file; row groups of a parquet file; anything else is one part. A function of the file
    alone, so the parts and their order do not depend on the number of processes.
    """
    if path == "-":
        return [(0, None)]
    with open_stream(path) as stream:
        kind = container(path, stream.peek(), txt_split)
        plain = stream.raw.plain
    if kind == "parquet":
        try:
            return [(k, k + 1) for k in range(open_parquet(path).metadata.num_row_groups)]
        except Damage:
            return [(0, None)]  # to be reported by the one who reads it
    size = os.path.getsize(path)
    if not plain or kind not in LINE_KINDS or size <= unit_bytes:
        return [(0, None)]
    return [(begin, min(begin + unit_bytes, size)) for begin in range(0, size, unit_bytes)]


def container(path: str, head: bytes, txt_split: str) -> str:
    """How to read a file, from its first bytes and, where these cannot tell, its name:
    parquet, csv, tsv, array, values (JSON objects over several lines), jsonl, or the txt_split of plain text."""
    name = re.sub(r"\.(gz|bz2|xz|zst)$", "", os.path.basename(path).lower())
    suffix, head = os.path.splitext(name)[1], head.removeprefix(codecs.BOM_UTF8).lstrip()
    if head.startswith(b"PAR1") or suffix == ".parquet":
        return "parquet"
    if suffix in (".csv", ".tsv"):
        return suffix[1:]
    if suffix in (".json", ".jsonl", ".ndjson") or (path == "-" and re.match(rb'\{\s*"|\[\s*[{"\]]', head)):
        if head.startswith(b"["):
            return "array"
        return "values" if head.split(b"\n")[0].strip() == b"{" else "jsonl"
    if txt_split not in ("file", "blank", "line"):
        raise UserError(f"data: txt_split must be file, blank or line, got {txt_split!r}")
    return txt_split


# ---- bytes ------------------------------------------------------------------------------------------------


class Damage(Exception):
    """The rest of an input cannot be read. args: reason, detail."""


class Pieces(io.RawIOBase):
    """Byte pieces as a file. Where the input is damaged the file ends early, with .damage = (reason, detail) set: what
    came before is kept."""

    def __init__(self, chunks: Iterator[bytes], plain: bool, file: BinaryIO | None) -> None:
        self.chunks = chunks
        self.plain = plain  # the bytes are those on disk
        self.file = file  # to close, if any
        self.rest = memoryview(b"")
        self.damage: tuple[str, str] | None = None

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        super().close()
        if self.file:
            self.file.close()

    def readinto(self, buffer: memoryview) -> int:
        while not self.rest:
            try:
                self.rest = memoryview(next(self.chunks))
            except StopIteration:
                return 0
            except Damage as damage:
                self.damage = damage.args
                return 0
        n = min(len(buffer), len(self.rest))
        buffer[:n], self.rest = self.rest[:n], self.rest[n:]
        return n


def open_stream(path: str, begin: int = 0) -> io.BufferedReader:
    """A file from byte `begin` on (plain files only), or standard input.

    Compression, UTF-16 and UTF-32 are recognised by the first bytes and undone.
    """
    try:
        file = sys.stdin.buffer if path == "-" else open(path, "rb")
        if begin:
            file.seek(begin)
        first = file.read(READ_BYTES)
    except OSError as error:
        raise UserError(f"data: cannot read {path}: {error.strerror}") from None
    chunks = itertools.chain([first], iter(lambda: file.read(READ_BYTES), b""))
    named = os.path.splitext(path.lower())[1][1:]
    if named in MAGIC.values() and not begin and not any(first.startswith(m) for m, s in MAGIC.items() if s == named):
        chunks = damaged_chunks(f"these are no {named} data, as the name says")
    compressed = next((suffix for magic, suffix in MAGIC.items() if first.startswith(magic) and not begin), "")
    if compressed:
        chunks = decompress(chunks, path, compressed)
    plain = not compressed and not first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE))
    chunks = chunks if begin else transcode(chunks)
    return io.BufferedReader(Pieces(chunks, plain, None if path == "-" else file), READ_BYTES)


def damaged_chunks(detail: str) -> Iterator[bytes]:
    raise Damage("truncated_file", detail)
    yield b""


def new_decompressor(path: str, suffix: str) -> tuple[Callable, tuple[type[Exception], ...]]:
    """A function that makes a decompressor, and what that raises for damaged data."""
    if suffix == "gz":
        return partial(zlib.decompressobj, wbits=31), (zlib.error,)
    if suffix == "bz2":
        return bz2.BZ2Decompressor, (OSError,)
    if suffix == "xz":
        return lzma.LZMADecompressor, (lzma.LZMAError,)
    try:
        import zstandard
    except ImportError:
        raise UserError(f"data: {path} needs zstandard; run: pip install zstandard") from None
    return zstandard.ZstdDecompressor().decompressobj, (zstandard.ZstdError,)


def decompress(chunks: Iterator[bytes], path: str, suffix: str) -> Iterator[bytes]:
    """Any number of compressed streams, one after the other, as gzip, bzip2, xz and zstd files may hold."""
    new, errors = new_decompressor(path, suffix)
    decompressor = new()
    for chunk in chunks:
        # small pieces, since one of them may become a thousand times larger
        for begin in range(0, len(chunk), 2**11):
            piece = chunk[begin : begin + 2**11]
            # zeros between and after streams are padding
            while piece := piece.lstrip(b"\0") if decompressor.eof else piece:
                if decompressor.eof:
                    decompressor = new()
                try:
                    yield decompressor.decompress(piece)
                except errors as error:
                    raise Damage("truncated_file", f"damaged {suffix} data: {error}") from None
                piece = decompressor.unused_data
    if not decompressor.eof:
        raise Damage("truncated_file", f"the {suffix} data end too early")


def transcode(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """UTF-16 and UTF-32, known by their byte order mark, become UTF-8; other bytes pass. The first piece has 4 or more
    bytes if there are as many, so that a look at it finds a mark or a magic number."""
    head = b""
    while len(head) < 4 and (chunk := next(chunks, None)) is not None:
        head += chunk
    chunks = itertools.chain([head], chunks)
    # UTF-32 first: its little-endian mark begins with UTF-16's
    marks = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
    marks |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
    encoding = next((encoding for mark, encoding in marks.items() if head.startswith(mark)), None)
    if encoding is None:
        yield from chunks
        return
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        for chunk in chunks:
            yield decoder.decode(chunk).encode()
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise Damage("bad_encoding", str(error)) from None


def skip_mark(stream: io.BufferedReader) -> int:
    """Pass over a UTF-8 byte order mark; its length."""
    return len(stream.read(3)) if stream.peek(3).startswith(codecs.BOM_UTF8) else 0


def decode(raw: bytes, first: str = "utf-8", cut: bool = False) -> tuple[str, str]:
    """Text and its encoding, UTF-8 or GB18030, which much Chinese text is in; `first` is tried first.

    cut: the bytes may end within a character. Raises UnicodeDecodeError if neither fits.
    """
    failures = []
    for encoding in (first, "gb18030" if first == "utf-8" else "utf-8"):
        try:
            decoder = codecs.getincrementaldecoder(encoding)() if cut else None
            return decoder.decode(raw) if cut else raw.decode(encoding), encoding
        except UnicodeDecodeError as error:
            failures.append(error)
    raise failures[0]


def guess_encoding(head: bytes) -> str:
    """What most lines beyond ASCII are in. A single one may fit both: C4 A9 CE B2 is two letters in either."""
    votes = 0
    for line in head.split(b"\n"):
        try:
            votes += not line.isascii() and (1 if decode(line, cut=True)[1] == "utf-8" else -1)
        except UnicodeDecodeError:
            continue
    return "gb18030" if votes < 0 else "utf-8"


# ---- records ----------------------------------------------------------------------------------------------


class Record(NamedTuple):
    """One line, element or row of a file, or a problem in its place."""

    value: object  # what JSON, CSV or parquet holds, or the text; bytes until decoded; None if input is damaged
    line: int  # from 1, within the part that is read; of parquet: row in the file
    offset: int  # where it starts, in bytes; of parquet: row in the file from 0. Transcoded or unpacked: in that text
    encoding: str = "utf-8"
    problem: str = ""  # bad_json, bad_encoding, bad_csv, truncated_file
    detail: str = ""


def read_records(
    path: str, txt_split: str = "file", begin: int = 0, end: int | None = None, columns: list[str] | None = None
) -> Iterator[Record]:
    """All records of a part of a file (see `work_units`), in order, problems included. columns: of parquet, to read.

    A line belongs to the part that holds its first byte, a paragraph to the part that holds the blank line before it:
    whatever the cuts, every record is read once.
    """
    stream = open_stream(path)
    head = stream.peek()
    kind = container(path, head, txt_split)
    by_line = kind in (*LINE_KINDS, "csv", "tsv")  # what is decoded as a whole needs no guess
    decoded = partial(text_record, encoding=guess_encoding(head) if by_line else "utf-8")
    assert not begin or kind in (*LINE_KINDS, "parquet"), f"{path}: {kind} is read as a whole, {begin=}"
    if begin and kind in LINE_KINDS:
        stream.close()
        stream = open_stream(path, begin - 1)
    with stream:
        if kind == "parquet":
            yield from parquet_records(path, begin, end, columns)
        elif kind in ("csv", "tsv"):
            yield from csv_records(map(decoded, read_lines(stream, 0, None)), "," if kind == "csv" else "\t")
        elif kind in ("array", "values"):
            yield from json_records(stream)
        elif kind == "file":
            yield from file_record(stream)
        elif kind == "blank":
            yield from map(decoded, paragraphs(stream, begin, end))
        else:
            lines = (line for line in read_lines(stream, begin, end) if line.problem or line.value.strip())
            yield from map(jsonl_record, map(decoded, lines)) if kind == "jsonl" else map(decoded, lines)


def read_lines(stream: io.BufferedReader, begin: int, end: int | None) -> Iterator[Record]:
    """Lines, as bytes, that start in [begin, end); the stream stands at begin - 1, or at 0.

    Split at "\n" only: text may hold U+2028 and other things that `str.splitlines` takes for line ends. A line that
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
    if stream.raw.damage:
        yield damaged(stream, line, offset)


def damaged(stream: io.BufferedReader, line: int, offset: int) -> Record:
    reason, detail = stream.raw.damage
    return Record(None, line, offset, problem=reason, detail=detail)


def paragraphs(stream: io.BufferedReader, begin: int, end: int | None) -> Iterator[Record]:
    """Runs of lines after the blank lines that start in [begin, end), as `read_lines` would read them; the start of the
    file counts as a blank line."""
    offset = begin - 1 + len(stream.readline()) if begin else 0
    line, mark = 0, 0 if begin else skip_mark(stream)
    mine, held, first = begin == 0, [], (0, 0)
    while raw := stream.readline():
        line += 1
        if stream.raw.damage and not raw.endswith(b"\n"):
            break
        if not raw.strip():
            if held:
                yield Record(b"".join(held), *first)
                held = []
            if end is not None and offset >= end:
                return
            mine = True
        elif mine:
            first = first if held else (line, offset)
            held.append(raw)
        elif end is not None and offset >= end:
            return  # all of the part lies within one paragraph
        offset, mark = offset + mark + len(raw), 0
    if held:
        yield Record(b"".join(held), *first)
    if stream.raw.damage:
        yield damaged(stream, line, offset)


def text_record(record: Record, encoding: str) -> Record:
    """Bytes to text, without the line end; Windows line ends become "\n"."""
    if record.problem:
        return record
    try:
        text, encoding = decode(record.value, encoding)
    except UnicodeDecodeError as error:
        text = record.value.decode("utf-8", "replace")
        return record._replace(value=text, problem="bad_encoding", detail=str(error))
    return record._replace(value=unix_lines(text).removesuffix("\n"), encoding=encoding)


def unix_lines(text: str) -> str:
    return text.replace("\r\n", "\n") if "\r" in text else text  # to look for one character is almost free


def jsonl_record(record: Record) -> Record:
    if record.problem:
        return record
    try:
        return record._replace(value=json.loads(record.value))
    except (ValueError, RecursionError) as error:
        return record._replace(value=None, problem="bad_json", detail=str(error))


def file_record(stream: io.BufferedReader) -> Iterator[Record]:
    """A whole text file as one record; of a damaged one, what came before the damage."""
    offset, raw = skip_mark(stream), stream.read()
    try:
        text, encoding = decode(raw, cut=bool(stream.raw.damage))
        yield Record(unix_lines(text), 1, 0, encoding)
    except UnicodeDecodeError as error:
        line, offset = 1 + raw.count(b"\n", 0, error.start), offset + error.start
        yield Record(None, line, offset, problem="bad_encoding", detail=str(error))
    if stream.raw.damage:
        yield damaged(stream, 1 + raw.count(b"\n"), offset + len(raw))


def csv_records(lines: Iterator[Record], delimiter: str) -> Iterator[Record]:
    """Rows as {column: text}, the first row naming the columns. A quoted field may hold line ends."""
    csv.field_size_limit(2**30)  # characters; 128 Ki otherwise, less than a long article
    held: list[Record] = []  # the lines that the row at hand is made of
    damage: list[Record] = []
    names: list[str] = []

    def texts() -> Iterator[str]:
        for record in lines:
            if record.value is None:
                damage.append(record)
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
        where = held[0].line, held[0].offset
        undecodable = next((line for line in held if line.problem), None)
        if undecodable:
            yield undecodable
        elif detail or (names and row and len(row) != len(names)):
            detail = detail or f"{len(row)} fields, but {len(names)} columns"
            yield Record(None, *where, problem="bad_csv", detail=detail)
        elif not names:
            names = row
        elif row:
            encoding = next((line.encoding for line in held if line.encoding != "utf-8"), "utf-8")
            yield Record(dict(zip(names, row, strict=True)), *where, encoding)
    yield from damage


def is_near_end(error: json.JSONDecodeError, text: str) -> bool:
    """Whether more text may mend the error: a string that is open, or a word, number or escape cut off at the end."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(text) - len("-Infinity") - 1


class JsonStream:
    """The elements of a JSON array, or JSON objects one after the other, from text in pieces: (element, line, offset).

    Holds the pieces of one element. Raises ValueError at what is not JSON; what came before has been given out.
    """

    WHITE_SPACE = re.compile(r"[ \t\n\r]*")

    def __init__(self, chunks: Iterator[str]) -> None:
        self.chunks = chunks
        self.text, self.pos = "", 0  # what is held; what of it has been used
        self.line, self.offset = 1, 0  # of text[pos]: from 1; bytes in UTF-8

    def __iter__(self) -> Iterator[tuple[object, int, int]]:
        if self._next_character() != "[":
            while self._next_character():
                yield self._element()
            return
        separator = self._step()
        if self._next_character() == "]":
            separator = self._step()
        while separator != "]":
            yield self._element()
            separator = self._next_character()
            if separator not in (",", "]"):
                raise ValueError(f"expected , or ] but found {separator or 'the end'!r}")
            self._step()
        if self._next_character():
            raise ValueError("text after the end of the array")

    def _element(self) -> tuple[object, int, int]:
        self._next_character()
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self.text, self.pos)
            except json.JSONDecodeError as error:
                if not is_near_end(error, self.text) or not self._read():
                    raise
                continue
            # a number may go on: 1 as 1.5, and what stands here as 1e+ as 1e+9
            if self.WHITE_SPACE.match(self.text, end).end() >= len(self.text) - len("e+") and self._read():
                continue
            found = value, self.line, self.offset
            self._use(end)
            return found

    def _next_character(self) -> str:
        """The next one that is no white space, "" at the end."""
        while True:
            self._use(self.WHITE_SPACE.match(self.text, self.pos).end())
            if self.pos < len(self.text) or not self._read():
                return self.text[self.pos : self.pos + 1]

    def _step(self) -> str:
        self._use(self.pos + 1)
        return self.text[self.pos - 1]

    def _use(self, end: int) -> None:
        used = self.text[self.pos : end]
        self.line += used.count("\n")
        self.offset += len(used) if used.isascii() else len(used.encode("utf-8", "surrogatepass"))
        self.pos = end

    def _read(self) -> bool:
        """Hold at least twice as much: an element that is parsed again and again still takes linear time in all."""
        held = [self.text[self.pos :]]
        wanted = max(1, len(held[0]))
        while wanted > 0 and (chunk := next(self.chunks, "")):
            held.append(chunk)
            wanted -= len(chunk)
        if len(held) > 1:
            self.text, self.pos = "".join(held), 0
        return len(held) > 1


class TextChunks:
    """The text of a stream in pieces. The first bytes beyond ASCII decide between UTF-8 and GB18030."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self.stream, self.encoding = stream, ""
        self.decoder: codecs.IncrementalDecoder | None = None

    def __iter__(self) -> Iterator[str]:
        """Raises UnicodeDecodeError."""
        while raw := self.stream.read1(READ_BYTES):
            if self.decoder is None and not raw.isascii():
                self.encoding = decode(raw, cut=True)[1]
                self.decoder = codecs.getincrementaldecoder(self.encoding)()
            text = self.decoder.decode(raw) if self.decoder else raw.decode("ascii")
            if text:
                yield text
        if self.decoder and not self.stream.raw.damage:
            self.decoder.decode(b"", final=True)


def json_records(stream: io.BufferedReader) -> Iterator[Record]:
    skipped, chunks = skip_mark(stream), TextChunks(stream)
    elements = JsonStream(iter(chunks))
    elements.offset = skipped
    try:
        for value, line, offset in elements:
            yield Record(value, line, offset, chunks.encoding or "utf-8")
    except (ValueError, RecursionError) as error:
        if not stream.raw.damage:
            reason = "bad_encoding" if isinstance(error, UnicodeDecodeError) else "bad_json"
            detail = f"{error}; the rest of the file is left out"
            yield Record(None, elements.line, elements.offset, problem=reason, detail=detail)
    if stream.raw.damage:
        yield damaged(stream, elements.line, elements.offset)


def open_parquet(path: str) -> "pyarrow.parquet.ParquetFile":
    """Raises DataError without pyarrow, Damage if the file's own table of contents, at its end, cannot be read."""
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
    """Rows of the row groups [begin, end)."""
    row = 0
    try:
        file = open_parquet(path)
        groups = range(file.metadata.num_row_groups)
        row = sum(file.metadata.row_group(k).num_rows for k in groups[:begin])
        wanted = columns and [name for name in columns if name in file.schema_arrow.names]
        for batch in file.iter_batches(batch_size=256, row_groups=groups[begin:end], columns=wanted):
            for record in batch_records(batch, row):
                row += 1
                yield record
    except Damage as damage:
        reason, detail = damage.args
        yield Record(None, 1, 0, problem=reason, detail=detail)
    except UserError:
        raise
    except (OSError, ValueError) as error:  # pyarrow's, for damaged pages
        yield Record(None, row + 1, row, problem="truncated_file", detail=str(error))


def batch_records(batch: "pyarrow.RecordBatch", row: int) -> Iterator[Record]:
    """The rows of a batch that begins at a row of the file; one that is not UTF-8 is a problem of its own."""
    try:
        values = batch.to_pylist() if batch.num_columns else [{}] * batch.num_rows
        yield from (Record(value, row + k + 1, row + k) for k, value in enumerate(values))
        return
    except UnicodeDecodeError:
        singles = (batch.slice(k, 1) for k in range(batch.num_rows))
    for k, single in enumerate(singles):
        try:
            yield Record(single.to_pylist()[0], row + k + 1, row + k)
        except UnicodeDecodeError as error:
            yield Record(None, row + k + 1, row + k, problem="bad_encoding", detail=str(error))


# ---- documents --------------------------------------------------------------------------------------------


class Row(NamedTuple):
    value: Any  # what was made of a record
    path: str
    offset: int  # of its record, see Record


class Document(NamedTuple):
    text: str
    path: str
    offset: int


class Report:
    """What was not read, or only after mending. Made in a worker, added up in the parent.

    problems: places where documents are lost, by reason: bad_json, bad_field (no text), bad_encoding, bad_csv,
    truncated_file (damaged or cut; what came before was read). mended: documents by kind: gb18030, surrogates.
    places: (path, line, byte offset, "reason: detail") of the first max_places problems.
    """

    def __init__(self, strict: bool = False, max_places: int = 10_000) -> None:
        self.strict, self.max_places = strict, max_places
        self.problems: Counter[str] = Counter()
        self.mended: Counter[str] = Counter()
        self.places: list[tuple[str, int, int, str]] = []

    def add(self, path: str, line: int, offset: int, reason: str, detail: str) -> None:
        """Raises DataError if strict."""
        detail = " ".join(detail.split())
        if self.strict:
            raise UserError(f"data: {path}:{line}: {reason} at byte {offset}: {detail}; mend it, or use strict=False")
        self.problems[reason] += 1
        if len(self.places) < self.max_places:
            self.places.append((path, line, offset, f"{reason}: {detail}"))

    def merge(self, other: "Report") -> None:
        self.problems += other.problems
        self.mended += other.mended
        self.places += other.places[: self.max_places - len(self.places)]


def read_documents(
    path: str, text_key: str = "", txt_split: str = "file", begin: int = 0, end: int | None = None,
    report: Report | None = None,
) -> Iterator[Document]:
    """The documents of a file, or of a part of it from `work_units`, holding one record at a time.

    text_key: where the text is in a JSON object or a row, see `shapes.document_of`; "" = found by the keys.
    txt_split: what a document is in plain text: 'file', 'blank' (between blank lines) or 'line'.
    """
    rows = read_rows(path, partial(document_of, text_key=text_key), txt_split, begin, end, report, columns_of(text_key))
    return (Document(*row) for row in rows)


def read_rows(
    path: str, understand: Callable[[Any], tuple[Any, str]], txt_split: str = "file", begin: int = 0,
    end: int | None = None, report: Report | None = None, columns: list[str] | None = None,
) -> Iterator[Row]:
    """What `understand`, a function of shapes.py or like one, makes of each record of a file or of a part of it.

    understand(record) returns (value, "") or (anything, what is wrong). What cannot be read or understood goes to the
    report and is left out, or raises DataError if the report is strict. A file that cannot be opened raises DataError.
    """
    report = report if report is not None else Report()
    lines_before = partial(count_lines, path, begin)
    for record in read_records(path, txt_split, begin, end, columns):
        reason, detail, value = record.problem, record.detail, None
        if not reason:
            row, n_mended = mend(record.value)
            value, detail = understand(row)
            reason = "bad_field" if detail else ""
        if reason:
            report.add(path, lines_before() + record.line, record.offset, reason, detail)
            continue
        if record.encoding != "utf-8":
            report.mended[record.encoding] += 1
        if n_mended:
            report.mended["surrogates"] += 1
        yield Row(value, path, record.offset)


@lru_cache(maxsize=16)
def count_lines(path: str, begin: int) -> int:
    """Lines before the first one that starts at `begin` or later. Counted only when a line is to be named."""
    if begin == 0:
        return 0
    with open(path, "rb") as f:
        if f.read(4) == b"PAR1":
            return 0  # begin is a row group, and rows are counted from the file's start
        f.seek(0)
        blocks = iter(lambda: f.read(min(READ_BYTES, begin - 1 - f.tell())), b"")
        return 1 + sum(block.count(b"\n") for block in blocks)


def mend(value: Any) -> tuple[Any, int]:
    """`value` with every text in it encodable, and how many were not."""
    if isinstance(value, str):
        return (value, 0) if is_encodable(value) else (scrub(value), 1)
    if isinstance(value, dict):
        pairs = [(mend(key), mend(item)) for key, item in value.items()]
        return {key[0]: item[0] for key, item in pairs}, sum(key[1] + item[1] for key, item in pairs)
    if isinstance(value, list):
        items = [mend(item) for item in value]
        return [item[0] for item in items], sum(item[1] for item in items)
    return value, 0


def scrub(text: str) -> str:
    r"""Return `text` as valid Unicode: \ud83d\ude00, two halves in JSON, become the character; half of one U+FFFD."""
    if is_encodable(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
