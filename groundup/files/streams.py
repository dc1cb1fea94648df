"""The bytes of a raw file as UTF-8, in bounded memory: compression and UTF-16 or UTF-32 are recognised and undone; and
the decoding of bytes that are UTF-8 or GB18030."""

import bz2
import codecs
import io
import itertools
import lzma
import os
import sys
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO

from groundup.errors import UserError

READ_BYTES = 2**20
MAGIC = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zst"}
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}  # first: UTF-32's little-endian mark begins
MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # with UTF-16's


class Damage(Exception):
    """The rest of an input cannot be read. args: reason, detail."""


class Chunks(io.RawIOBase):
    """Pieces of bytes as a file. Where the input is damaged the file ends early with .damage = (reason, detail) set, so
    what came before is kept."""

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
    """Open a file from byte `begin` on (plain files only), or standard input; its raw is a Chunks."""
    try:
        file = sys.stdin.buffer if path == "-" else open(path, "rb")
        if begin:
            file.seek(begin)
        first = file.read(READ_BYTES)
    except OSError as error:
        raise UserError(f"data: cannot read {path}: {error.strerror}") from None
    chunks, plain = itertools.chain([first], iter(lambda: file.read(READ_BYTES), b"")), True
    if not begin:
        named = os.path.splitext(path.lower())[1][1:]
        compression = next((name for magic, name in MAGIC.items() if first.startswith(magic)), named)
        plain = compression not in MAGIC.values() and not first.startswith(tuple(MARKS))
        chunks = transcode(decompress(chunks, path, compression) if compression in MAGIC.values() else chunks)
    return io.BufferedReader(Chunks(chunks, plain, None if path == "-" else file), READ_BYTES)


def decompress(chunks: Iterator[bytes], path: str, compression: str) -> Iterator[bytes]:
    """Decompress any number of streams, one after the other, as gzip, bzip2, xz and zstd files may hold."""
    if compression == "zst":
        try:
            import zstandard
        except ImportError:
            raise UserError(f"data: {path} needs zstandard; run: pip install zstandard") from None
        new, errors = zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
    else:
        makers = {"gz": partial(zlib.decompressobj, 31), "bz2": bz2.BZ2Decompressor, "xz": lzma.LZMADecompressor}
        new, errors = makers[compression], (zlib.error, lzma.LZMAError, OSError)
    decompressor = new()
    for chunk in chunks:
        for begin in range(0, len(chunk), 2**11):  # small pieces, since each may become a thousand times larger
            piece = chunk[begin : begin + 2**11]
            while piece := piece.lstrip(b"\0") if decompressor.eof else piece:  # zeros after a stream are padding
                if decompressor.eof:
                    decompressor = new()
                try:
                    yield decompressor.decompress(piece)
                except errors as error:
                    raise Damage("truncated_file", f"damaged {compression} data: {error}") from None
                piece = decompressor.unused_data
    if not decompressor.eof:
        raise Damage("truncated_file", f"the {compression} data end too early")


def transcode(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Turn UTF-16 and UTF-32, known by their byte order mark, into UTF-8; other bytes pass. The first piece has
    at least 4 bytes if there are as many, so that a peek at it finds a mark or a magic number."""
    head = b""
    while len(head) < 4 and (chunk := next(chunks, None)) is not None:
        head += chunk
    encoding = next((encoding for mark, encoding in MARKS.items() if head.startswith(mark)), None)
    decoder = codecs.getincrementaldecoder(encoding)() if encoding else None
    try:
        for chunk in itertools.chain([head], chunks):
            yield decoder.decode(chunk).encode() if decoder else chunk
        if decoder:
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise Damage("bad_encoding", str(error)) from None


def skip_mark(stream: io.BufferedReader) -> int:
    """Skip a UTF-8 byte order mark; return its length."""
    return len(stream.read(3)) if stream.peek(3).startswith(codecs.BOM_UTF8) else 0


def decode(raw: bytes, first: str = "utf-8", cut: bool = False) -> tuple[str, str]:
    """Return (text, encoding): UTF-8 or GB18030, common for Chinese; `first` is tried first.

    cut: the bytes may end within a character. Raise UnicodeDecodeError if neither fits.
    """
    failures = []
    for encoding in (first, "gb18030" if first == "utf-8" else "utf-8"):
        try:
            return codecs.getincrementaldecoder(encoding)().decode(raw) if cut else raw.decode(encoding), encoding
        except UnicodeDecodeError as error:
            failures.append(error)
    raise failures[0]


def guess_encoding(head: bytes) -> str:
    """Return the encoding of most non-ASCII lines. A single line may fit both: C4 A9 CE B2 is two letters in either."""
    votes = 0
    for line in head.split(b"\n"):
        try:
            votes += not line.isascii() and (1 if decode(line, cut=True)[1] == "utf-8" else -1)
        except UnicodeDecodeError:
            continue
    return "gb18030" if votes < 0 else "utf-8"


def unix_lines(text: str) -> str:
    return text.replace("\r\n", "\n") if "\r" in text else text  # looking for one character is almost free


def mended(value: Any) -> Any:
    """Return a value of JSON with every text in it made valid Unicode."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, dict):
        return {mended(key): mended(item) for key, item in value.items()}
    return [mended(item) for item in value] if isinstance(value, list) else value


def scrub(text: str) -> str:
    r"""Return `text` as valid Unicode: \ud83d\ude00, two halves in JSON, become the character; half of one U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
