"""The bytes of a raw file as text in UTF-8 or one other encoding, in bounded memory: compression
is undone, UTF-16 and UTF-32 are transcoded, what is no text is refused by name.

`open_stream` asks the first bytes three questions: is the file packed, is it something else than
text, and in which encoding is it? Each answer puts a generator of bytes behind the one before. What
goes wrong on the way is an exception, Damage, only until it reaches Chunks: from there on it is the
end of the stream, with a note why, so that whoever reads keeps what came before."""

import bz2
import codecs
import io
import itertools
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from groundup.errors import UserError
from groundup.files import encodings
from groundup.files.encodings import Verdict
from groundup.files.paths import shown_name, unpacked_name
from groundup.files.untrusted import LFS_POINTER, POINTER_HINT, regular_size

MAX_BYTES = 2**26  # of a record; a damaged or hostile file may hold a line of gigabytes
READ_BYTES = 2**20
SAMPLES, SAMPLE_BYTES = 16, 2**16  # of a large file, evenly spaced: they tell its encoding
# A few kilobytes may unpack to terabytes. Compressed text grows 3 to 30 times.
BOMB_BYTES = 2**26  # a packed file may become so large whatever its size
BOMB_FACTOR = 200
ZSTD_WINDOW = 2**31  # zstd --long=31, as the dumps of Pushshift have it
XZ_MEMORY = 2**31  # bytes; xz -9 needs 64 MiB, a dictionary of 1.5 GiB (the largest) somewhat more
PACKED = {  # by suffix: first bytes, the command that unpacks it, what tar needs for it
    "gz": (b"\x1f\x8b", "gzip -d {name}", "-xzf"),
    "bz2": (b"BZh", "bzip2 -d {name}", "-xjf"),
    "xz": (b"\xfd7zXZ\x00", "xz -d {name}", "-xJf"),
    "zst": (b"\x28\xb5\x2f\xfd", "zstd -d --long=31 {name}", "--zstd -xf"),
}
MAGIC = tuple(magic for magic, _, _ in PACKED.values())
ZIP, OLE = b"PK\x03\x04", b"\xd0\xcf\x11\xe0"  # the second is of Office up to 2003
# Documents in one of these, by suffix: their first bytes are alike, and their files unpacked are no
# use. Text may have such a name, too: many programs write tables as .xls.
SHEET = "a spreadsheet; save it as CSV: libreoffice --headless --convert-to csv {name}"
SLIDES = "slides; save them as PDF: libreoffice --headless --convert-to pdf {name}, then pdftotext"
WORDS = "a document; write it as text: libreoffice --headless --convert-to txt {name}"
PANDOC = "a document; write it as text: pandoc -t plain {name} -o {name}.txt"
DOCUMENTS = dict.fromkeys(".xlsx .xlsm .xlsb .xls .ods .numbers".split(), SHEET)
DOCUMENTS |= dict.fromkeys(".pptx .ppt .odp .key".split(), SLIDES)
DOCUMENTS |= {".doc": WORDS, ".pages": "a document of Pages; export it as text"}
DOCUMENTS |= dict.fromkeys(".docx .odt .epub".split(), PANDOC)
# First bytes: what it is, and what to do. Read as text, any of these would give documents of noise.
NOT_TEXT = {
    ZIP: "a zip archive; unpack it: unzip {name}",
    b"WARC/": "a web archive; write its texts as JSON lines, as with warcio and trafilatura",
    b'<doc id="': "pages of WikiExtractor; run it with --json, and let the names end in .jsonl",
    b"{\\rtf": "RTF; write it as text: pandoc -t plain {name}",
    b"\x04\x22\x4d\x18": "packed with lz4; unpack it: lz4 -d {name}",
    b"\x1f\x9d": "packed with compress; unpack it: uncompress {name}",
    OLE: "an old file of Office; write it as text: libreoffice --headless --convert-to txt {name}",
    b"PK\x05\x06": "an empty zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it: 7z x {name}",
    b"Rar!\x1a\x07": "a rar archive; unpack it: unrar x {name}",
    b"!<arch>\n": "an ar archive; unpack it: ar x {name}",
    b"\x93NUMPY": "a NumPy array; write its texts as JSON lines: numpy.load({name!r})",
    b"ARROW1": "an Arrow file; write it as parquet: pyarrow.ipc.open_file({name!r}).read_all()",
    b"Obj\x01": "an Avro file; write its rows as JSON lines, as with fastavro",
    b"SQLite format 3\0": "an SQLite database; export a table: sqlite3 -json {name} 'select ...'",
    b"\x89HDF": "an HDF5 file; write its texts as JSON lines: h5py.File({name!r})",
    b"%PDF-": "a PDF; extract its text: pdftotext {name}",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GGUF": "a model in GGUF",
    b"\x7fELF": "a program",
}
# Protocol 2 and newer begin with PROTO and a version; 4 and 5 go on with FRAME.
PICKLE = re.compile(rb"\x80[\x02-\x05][\x95\]}(\x8ccq\x58]")
UNPICKLE = "a Python pickle; if you trust it, load it and write its texts as JSON lines"


@dataclass(slots=True)
class Record:
    """One line, element or row of a file, or a problem in its place."""

    value: object  # what JSON, CSV or parquet holds, or the text; bytes until decoded; None if lost
    line: int  # from 1, within the part that is read; of parquet: row in the file
    offset: int  # where it starts, in unpacked bytes of the file; of parquet: row from 0
    encoding: str = "utf-8"
    problem: str = ""  # bad_json, bad_encoding, bad_csv, too_long, truncated_file, not_text
    detail: str = ""
    lost: int = 0  # unpacked bytes that no record is made of
    piece: int = 0  # of a long text file: 1, 2, ... for what continues the record before
    in_text: bool = False  # a problem of a text file: what is lost is a part of the text

    def fail(self, problem: str, detail: str, lost: int) -> "Record":
        """Put a problem in the place of the value."""
        self.value, self.problem, self.detail, self.lost = None, problem, detail, lost
        return self


class Damage(Exception):
    """The rest of an input cannot be read. args: reason, detail, and how many bytes are lost."""


class Chunks(io.RawIOBase):
    """Pieces of bytes as a file. Where the input is damaged it ends early, with .damage set: what
    came before is kept."""

    def __init__(
        self, chunks: Iterator[bytes], verdict: Verdict, plain: bool, file: BinaryIO | None
    ) -> None:
        self.chunks = chunks
        self.verdict = verdict  # how its lines become text; whether it is refused
        self.plain = plain  # the bytes are those on disk
        self.file = file  # to close; None = standard input
        self.rest = memoryview(b"")
        self.n_made = 0  # bytes that came out
        self.damage: tuple[str, str, int] | None = None  # reason, detail, bytes lost

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        super().close()
        if self.file:
            self.file.close()

    def readinto(self, buffer: memoryview) -> int:
        # BufferedReader asks here and does the rest: readline, peek, read.
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
        self.n_made += n
        return n


def open_stream(
    path: str, begin: int = 0, encoding: str = "", check: bool = False
) -> io.BufferedReader:
    """Open a file from byte `begin` on (plain files only), or standard input; its raw is a Chunks.

    encoding: of lines that are not UTF-8, if the user gave it. check: compare the checksums of
    gzip before anything is read, at the price of unpacking twice. Raise UserError if the file
    cannot be opened."""
    file, first = open_bytes(path)
    if begin:
        file.seek(begin)
    chunks = iter(lambda: file.read(READ_BYTES), b"")
    chunks = itertools.chain([] if begin else [first], chunks)
    # What the file is, its first bytes tell, wherever reading begins. head: these, unpacked.
    head, compression = first, compression_of(first, path)
    if compression:
        twice = file if check and compression == "gz" and file.seekable() else None
        head, chunks = with_head(decompress(chunks, path, compression, twice))
    plain, verdict, reason = not compression, Verdict(), "bad_encoding"
    if what := no_text(head, path, compression):
        reason, verdict = "not_text", Verdict(refused=what)
    elif codec := encodings.wide_codec(head):
        plain, chunks = False, transcode(chunks, codec)
    elif not head.startswith(b"PAR1"):
        # All parts of a file must be read in one encoding, so each judges the same sample. Only of
        # plain files can bytes be had from everywhere.
        sample = whole_lines(head, False, len(head) >= READ_BYTES)
        if not compression and path != "-":
            sample = spaced_sample(file, first)
        verdict = encodings.judge(sample, encoding)
    # A refused file is one that is damaged from its first byte on: one path for both.
    if verdict.refused:
        n_bytes = len(head) if path == "-" else os.fstat(file.fileno()).st_size - begin
        chunks = refusal(reason, verdict.refused, n_bytes)
    to_close = None if path == "-" else file
    return io.BufferedReader(Chunks(chunks, verdict, plain, to_close), READ_BYTES)


def open_bytes(path: str) -> tuple[BinaryIO, bytes]:
    """Open a file, or standard input; return it and its first READ_BYTES. Raise UserError."""
    wrong = f"data: cannot read {shown_name(path)}"
    try:
        if path != "-":
            regular_size(path)
        file = sys.stdin.buffer if path == "-" else open(path, "rb")
        first = file.read(READ_BYTES)
    except OSError as error:
        is_pipe = "regular" in (error.strerror or "")
        hint = "; of a pipe give -, standard input" if is_pipe else ""
        raise UserError(f"{wrong}: {error.strerror}{hint}") from None
    if first.startswith(LFS_POINTER):
        raise UserError(f"{wrong}: it is {POINTER_HINT}")
    return file, first


def compression_of(first: bytes, path: str) -> str:
    """Return how a file is packed, by its first bytes or else by its name; "" = it is not."""
    # By its name even if its first bytes are others: then it is damaged, and that is reported.
    named = os.path.splitext(path.lower())[1][1:]
    by_magic = (name for name, (magic, _, _) in PACKED.items() if first.startswith(magic))
    return next(by_magic, named if named in PACKED else "")


def unpacked_head(first: bytes, path: str) -> bytes:
    """Return the text that a file begins with, as far as its first bytes have it."""
    compression = compression_of(first, path)
    if not compression:
        return first
    return with_head(decompress(iter([first]), path, compression))[0]


def hash_part(file: BinaryIO, begin: int, end: int | None, digest: Any) -> None:
    """Add the bytes [begin, end) of a file to a digest. Its position stays."""
    position = file.tell()
    file.seek(begin)
    left = sys.maxsize if end is None else end - begin
    while block := file.read(min(READ_BYTES, left)):
        digest.update(block)
        left -= len(block)
    file.seek(position)


def with_head(chunks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """Return the first READ_BYTES or more, as far as they can be read, and all chunks."""
    # Damage within the head is raised behind it, so that what came before is read.
    head, damages = b"", []
    try:
        while len(head) < READ_BYTES and (chunk := next(chunks, None)) is not None:
            head += chunk
    except Damage as damage:
        damages.append(damage)

    def all_of_them() -> Iterator[bytes]:
        yield head
        yield from chunks
        for damage in damages:
            raise damage

    return head, all_of_them()


def refusal(reason: str, detail: str, n_bytes: int) -> Iterator[bytes]:
    raise Damage(reason, detail, n_bytes)
    yield b""  # makes this a generator


def no_text(head: bytes, path: str, compression: str) -> str:
    """Return what a file is and what to do about it, from its first unpacked bytes; "" = text."""
    name = shown_name(path)
    _, unpack, flags = PACKED.get(compression, (b"", "", "-xf"))
    if head[257:262] == b"ustar":
        return f"a tar archive; unpack it: tar {flags} {name}"
    if compression and head.startswith(MAGIC):  # unpacking at any depth would let bombs through
        return f"packed twice; unpack it once: {unpack.format(name=name)}"
    if head.startswith((ZIP, OLE)):
        what = DOCUMENTS.get(os.path.splitext(unpacked_name(path))[1], "")
        if not what and (head[30:49] == b"[Content_Types].xml" or head[30:38] == b"mimetype"):
            what = PANDOC
        if what:
            return what.format(name=name)
    for magic, what in NOT_TEXT.items():
        if head.startswith(magic):
            return what.format(name=name)
    if PICKLE.match(head):
        return UNPICKLE
    # No text has NUL but UTF-16 and UTF-32, and parquet is no text.
    if b"\0" in head and not head.startswith(b"PAR1") and not encodings.wide_codec(head):
        place = head.index(b"\0")
        return f"not text: byte {place:,} is NUL, and the file is not UTF-16 or UTF-32"
    return ""


def spaced_sample(file: BinaryIO, first: bytes) -> bytes:
    """Return whole lines from all over a file, the same for every part of it."""
    size = os.fstat(file.fileno()).st_size
    if size <= len(first) or not hasattr(os, "pread"):
        return first
    if size <= SAMPLES * SAMPLE_BYTES:
        return os.pread(file.fileno(), size, 0)
    blocks = []
    # The first begins at the file's first byte, the last ends at its last.
    for k in range(SAMPLES):
        place = (size - SAMPLE_BYTES) * k // (SAMPLES - 1)
        block = os.pread(file.fileno(), SAMPLE_BYTES, place)
        blocks.append(whole_lines(block, k > 0, k < SAMPLES - 1))
    return b"\n".join(blocks)


def whole_lines(block: bytes, cut_before: bool, cut_after: bool) -> bytes:
    """Return a block without the lines that it has in part; of one long line the whole words: a
    byte below 0x30 is no part of a character in any encoding."""
    # A character that is cut would look like a fault of the encoding.
    marks = b"\n" if b"\n" in block[:-1] else bytes(range(0x30))
    firsts = [place for mark in marks if (place := block.find(mark)) >= 0]
    if not firsts:
        return block
    begin = min(firsts) + 1 if cut_before else 0
    end = max(map(block.rfind, marks)) if cut_after else len(block)
    return block[begin:end]


# ---- compression -------------------------------------------------------------------------------


def decompressors(path: str, compression: str) -> tuple[Callable[[], Any], tuple]:
    """Return a maker of decompressors and the errors that these raise. Raise UserError."""
    if compression == "zst":
        try:
            import zstandard
        except ImportError:
            hint = "run: pip install zstandard"
            raise UserError(f"data: {shown_name(path)} needs zstandard; {hint}") from None
        makes = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj
        return makes, (zstandard.ZstdError, MemoryError)
    makers = {
        "gz": partial(zlib.decompressobj, 31),
        "bz2": bz2.BZ2Decompressor,
        "xz": partial(lzma.LZMADecompressor, memlimit=XZ_MEMORY),
    }
    return makers[compression], (zlib.error, lzma.LZMAError, OSError, MemoryError)


def decompress(
    chunks: Iterator[bytes], path: str, compression: str, twice: BinaryIO | None = None
) -> Iterator[bytes]:
    """Unpack any number of streams, one after the other, as such files may hold. twice: a gzip file
    whose checksums are compared first."""
    if twice:
        yield from checked_gzip(chunks, twice, path)
        return
    for made, _ in members(chunks, path, compression):
        if made:
            yield made


def members(chunks: Iterator[bytes], path: str, compression: str) -> Iterator[tuple[bytes, bool]]:
    """Yield (unpacked bytes, whether they are the last of their stream). Raise Damage."""
    new, errors = decompressors(path, compression)
    decompressor, n_read, n_made = new(), 0, 0
    for chunk in chunks:
        # small pieces, since each may become a thousand times larger
        for begin in range(0, len(chunk), 2**11):
            piece = chunk[begin : begin + 2**11]
            n_read += len(piece)
            # One piece may end a stream and begin the next. Zeros between them are padding.
            while piece := piece.lstrip(b"\0") if decompressor.eof else piece:
                if decompressor.eof:
                    decompressor = new()
                made, problem = b"", ""
                try:
                    made = decompressor.decompress(piece)
                except errors as error:
                    problem = f"damaged {compression} data: {error}"
                    if isinstance(error, MemoryError) or "emory" in str(error):
                        how = PACKED[compression][1].format(name="FILE")
                        problem = (
                            f"unpacking it takes more memory than there is or may be used: {error};"
                            f" unpack it yourself, and give the result: {how}"
                        )
                n_made += len(made)
                if n_made > max(BOMB_BYTES, BOMB_FACTOR * n_read):
                    problem = (
                        f"the {compression} data become over {BOMB_FACTOR} times larger, like a "
                        "bomb; to use them, decompress the file"
                    )
                if problem:
                    lost = len(chunk) - begin + sum(map(len, chunks))  # to the end of the file
                    raise Damage("truncated_file", problem, lost)
                yield made, decompressor.eof
                piece = decompressor.unused_data
    if not decompressor.eof:
        raise Damage("truncated_file", f"the {compression} data end too early", 1)


def checked_gzip(chunks: Iterator[bytes], file: BinaryIO, path: str) -> Iterator[bytes]:
    """Unpack a gzip file whose checksums have been compared. The sum of a member comes last, so
    nothing of a member with a wrong sum can be trusted, and nothing behind it can be found. A
    member that is cut has no sum; what there is of it is read."""
    # First pass: how many bytes can be trusted, those of whole members whose sums are right?
    n_made, n_trusted, damage = 0, 0, None  # n_trusted: at the end of the last whole member
    try:
        for made, ended in members(chunks, path, "gz"):
            n_made += len(made)
            if ended:
                n_trusted = n_made
    except Damage as found:
        damage = found
    wrong = damage is not None and damage.args[1].startswith("damaged")
    if not wrong:  # whole, or cut
        n_trusted = n_made
    # Second pass: hand these out. To keep them from the first pass might take all memory.
    file.seek(0)
    n_left = n_trusted
    again = members(iter(lambda: file.read(READ_BYTES), b""), path, "gz")
    while n_left > 0:
        made, _ = next(again)
        n_left -= len(made)
        yield made
    if damage:
        reason, detail, lost = damage.args
        if wrong:
            detail += "; nothing that this checksum covers can be trusted"
        raise Damage(reason, detail, lost + n_made - n_trusted)


# ---- UTF-16 and UTF-32 -------------------------------------------------------------------------


def transcode(chunks: Iterator[bytes], codec: str) -> Iterator[bytes]:
    """Turn UTF-16 or UTF-32 into UTF-8, some lines at a time. A lone surrogate becomes bytes that
    are not UTF-8, so that it costs its line alone. Behind a lost byte nothing is text any more:
    raise Damage there."""
    width = 2 if "16" in codec else 4  # bytes of a code unit
    line_end = "\n".encode(codec)
    held, damage = b"", None
    while True:
        # Damage of the input waits until what came before it is handed out.
        try:
            chunk = next(chunks, b"")
        except Damage as found:
            chunk, damage = b"", found
        held += chunk
        # Decode up to the last line end: behind it a character may be cut.
        end = aligned_rfind(held, line_end, width) + width
        if not chunk:
            end = len(held)
        elif end < width:  # no line end: hold more, but not without bound
            if len(held) < 4 * READ_BYTES:
                continue
            end = len(held) // width * width
            unit = int.from_bytes(held[end - 2 : end], "little" if codec.endswith("le") else "big")
            if width == 2 and 0xD800 <= unit < 0xDC00:  # not between two surrogates
                end -= width
        n_good, problem = sound_bytes(held[:end], codec, width, line_end)
        if n_good:
            yield held[:n_good].decode(codec, "surrogatepass").encode("utf-8", "surrogatepass")
        if problem:
            n_lost = len(held) - n_good
            if not damage:
                n_lost += sum(map(len, chunks))
            raise Damage("bad_encoding", f"{problem}; the rest is left out", n_lost)
        held = held[end:]
        if damage:
            raise damage
        if not chunk:
            return


def aligned_rfind(raw: bytes, what: bytes, width: int) -> int:
    """Return the last place of a code unit, -width if there is none."""
    place = raw.rfind(what)
    while place >= 0 and place % width:
        place = raw.rfind(what, 0, place + len(what) - 1)
    return place if place >= 0 else -width


def sound_bytes(raw: bytes, codec: str, width: int, line_end: bytes) -> tuple[int, str]:
    """Return how many bytes are whole lines in which no byte is missing, and what is wrong with
    the next one, "" if nothing is. After a lost byte a line end stands where no character begins,
    or the text ends within a character."""
    # Two tests, for a text with a byte lost is a text of other characters, nearly all of them
    # valid.
    bad, problem = len(raw), ""
    place = raw.find(line_end)
    while place >= 0 and place % width == 0:
        place = raw.find(line_end, place + width)
    if place >= 0:
        bad, problem = place, f"a byte of {codec} is missing here or before"
    elif len(raw) % width:
        problem = f"the {codec} text ends within a character"
    try:
        raw[: bad // width * width].decode(codec, "surrogatepass")
    except UnicodeDecodeError as error:
        bad, problem = error.start, f"{error.reason} in {codec}"
    if not problem:
        return len(raw), ""
    return aligned_rfind(raw[:bad], line_end, width) + width, problem


# ---- names and texts ---------------------------------------------------------------------------


def skip_mark(stream: io.BufferedReader) -> int:
    """Skip a UTF-8 byte order mark; return its length."""
    return len(stream.read(3)) if stream.peek(3).startswith(codecs.BOM_UTF8) else 0


def unix_lines(text: str) -> str:
    # looking for one character is almost free
    return text.replace("\r\n", "\n") if "\r" in text else text
