"""The bytes of a raw file, in bounded memory: compression and UTF-16 or UTF-32 are recognised and undone; and whether
they are UTF-8 or GB18030."""

import bz2
import codecs
import io
import itertools
import lzma
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, BinaryIO, NamedTuple

from groundup.errors import UserError
from groundup.files.untrusted import scrub

READ_BYTES = 2**20
BOMB_BYTES, BOMB_FACTOR = 2**26, 200  # compressed text grows 3 to 30 times; a file that grows more, and so much, stops
MAGIC = {b"\x1f\x8b": "gz", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zst"}
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # Git LFS leaves such a small file in place of a large one
POINTER_HINT = "a pointer of Git LFS, not the file; run git lfs pull"
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
        raise UserError(f"data: cannot read {shown_name(path)}: {error.strerror}") from None
    if not begin and first.startswith(LFS_POINTER):
        raise UserError(f"data: {shown_name(path)} is {POINTER_HINT}")
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
    decompressor, n_read, n_made = new(), 0, 0
    for chunk in chunks:
        for begin in range(0, len(chunk), 2**11):  # small pieces, since each may become a thousand times larger
            piece = chunk[begin : begin + 2**11]
            n_read += len(piece)
            while piece := piece.lstrip(b"\0") if decompressor.eof else piece:  # zeros after a stream are padding
                if decompressor.eof:
                    decompressor = new()
                try:
                    made = decompressor.decompress(piece)
                except errors as error:
                    raise Damage("truncated_file", f"damaged {compression} data: {error}") from None
                n_made += len(made)
                if n_made > max(BOMB_BYTES, BOMB_FACTOR * n_read):
                    detail = f"the {compression} data become more than {BOMB_FACTOR} times larger, like a bomb"
                    raise Damage("truncated_file", f"{detail}; to use them, decompress the file")
                yield made
                piece = decompressor.unused_data
    if not decompressor.eof:
        raise Damage("truncated_file", f"the {compression} data end too early")


def transcode(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Turn UTF-16 and UTF-32, known by their byte order mark, into UTF-8; other bytes pass. The first piece has
    READ_BYTES if there are as many, so that a peek at it finds a mark and tells the encoding."""
    head, damage = b"", None
    try:
        while len(head) < READ_BYTES and (chunk := next(chunks, None)) is not None:
            head += chunk
    except Damage as found:
        damage = found
    encoding = next((encoding for mark, encoding in MARKS.items() if head.startswith(mark)), None)
    decoder = codecs.getincrementaldecoder(encoding)() if encoding else None
    try:
        for chunk in itertools.chain([head], chunks):
            yield decoder.decode(chunk).encode() if decoder else chunk
            if damage:
                raise damage
        if decoder:
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise Damage("bad_encoding", str(error)) from None


def shown_name(path: str) -> str:
    """Return a path as valid Unicode in one line without tabs: names from zip files may be GBK."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return re.sub(r"[\0-\x1f\x7f]", lambda control: repr(control[0])[1:-1], text)


def skip_mark(stream: io.BufferedReader) -> int:
    """Skip a UTF-8 byte order mark; return its length."""
    return len(stream.read(3)) if stream.peek(3).startswith(codecs.BOM_UTF8) else 0


class Encoding(NamedTuple):
    """How the bytes of one file become text; decided once, from its first bytes (`encoding_of`)."""

    name: str = "utf-8"  # or gb18030
    garbled: re.Pattern | None = None  # what a lost byte makes of this file's text, and seldom anything else
    hint: str = ""  # what to do about bytes that are not of this encoding

    def decode(self, raw: bytes) -> str:
        """Raise UnicodeDecodeError, also for what a lost byte makes of this file's text."""
        text = raw.decode(self.name)
        if found := self.sign_of_loss(text):
            place = len(text[: found.start()].encode(self.name))
            raise UnicodeDecodeError(self.name, raw, place, place + 2, "a byte before it seems to be missing")
        return text

    def sign_of_loss(self, text: str) -> re.Match | None:
        """Return the first place of a text of this file that looks as after a lost byte."""
        return self.garbled and self.garbled.search(without_pairs(text))

    def why(self, error: UnicodeDecodeError) -> str:
        return f"{error}{self.hint}"


UTF8 = Encoding()


def encoding_of(head: bytes) -> Encoding:
    """Return the encoding of a file that begins with `head`: UTF-8 or GB18030, common for Chinese. Bytes that are
    neither are left to UTF-8, which refuses them.

    The text of a file decides, not that of a line: a line with a byte missing fits several encodings.
    """
    if head.isascii():
        return UTF8
    text = head.decode("utf-8", "replace")
    n_wide, n_bad = len(NOT_ASCII.findall(text)), text.count("\ufffd")
    if n_bad <= max(n_wide / 2, len(text) / 1000):  # a fifth of the bytes of GB18030 are valid UTF-8 by accident
        return UTF8
    text = head.decode("gb18030", "replace")
    # Greek and Cyrillic letters and the lines of a box, which GB2312 has too, tell nothing
    wide, n_late = re.findall("[^\0-\x7f\u0370-\u04ff\u2500-\u259f]", text), len(chinese("late").findall(text))
    # Hangul in EUC-KR are the bytes of the Chinese characters up to C8FE, kana in EUC-JP those of kana
    if (
        len(wide) >= 5
        and len(chinese("common").findall(text)) >= 0.9 * len(wide)
        and n_late >= max(1, 0.1 * len(wide))
        and len(KANA.findall(text)) <= 0.1 * len(wide)
    ):
        # A lost byte leaves an odd byte, which forms a pair with an ASCII letter. Simplified Chinese has few such
        # pairs; its own are symbols, such as a dash, and rare names. To keep those, a pair is a sign only before a
        # letter or after uncommon characters; 2 to 3 of 100 losses are not seen. Traditional Chinese has many, so that
        # after the loss a byte soon stands alone as an ASCII letter: a sign of it where the text has few of its own.
        # Else rare characters close by are a weaker sign.
        if len(chinese("low").findall(text)) <= 0.01 * len(wide):
            return Encoding("gb18030", chinese("odd"))
        alone, uncommon, text = Counter(), chinese("uncommon"), without_pairs(text)
        for found in re.finditer(ALONE.format("@-~", FOUR_BYTES), text):
            # one after uncommon characters is of damage, and damage makes as many others
            alone[found[0]] += -1 if uncommon.search(text, max(0, found.start() - 6), found.start()) else 1
        own = [letter for letter, n in alone.items() if n > max(1, 0.0001 * len(wide))]
        few = alone.total() - sum(map(alone.get, own)) <= max(1, 0.0003 * len(wide))
        letters = re.escape("".join(set(map(chr, range(0x40, 0x7F))) - set(own)))
        return Encoding("gb18030", re.compile(ALONE.format(letters, FOUR_BYTES)) if few else chinese("rare"))
    return Encoding(hint=f"; {likely_encoding(head)}; convert the file: iconv -f ENCODING -t UTF-8")


NOT_ASCII, KANA = re.compile("[^\0-\x7f]"), re.compile("[\u3040-\u30ff]")
SYMBOLS = re.compile("[\u0080-\u24ff\u3000-\u33ff\ufe30-\uffef]")  # dashes, arrows, units, kana
FOUR_BYTES = "\u3400-\u4dbf\U00010000-\U0010ffff"  # rare Chinese characters, with four bytes in GB18030
# One of 40 to 7E beside a wide character. Beside a rare one it is the text's own: damage makes none of four bytes, and
# seldom hits the character next to one.
ALONE = "(?<=[^\0-\x7f{1}])[{0}](?![@-~{1}])|(?<![@-~{1}])[{0}](?=[^\0-\x7f{1}])"
PAIRS = re.compile(r'\[([^]["\n]*)\]'), re.compile(r'\{([^{}"\n]*)\}')  # no quote: those of JSON are around texts


def without_pairs(text: str) -> str:
    """Return a text with ( ) for the brackets [ ] and { } that pair, which are its own: a lost byte leaves but one."""
    for pair in PAIRS:
        text = pair.sub(r"(\1)", text)
    return text


@cache
def chinese(which: str) -> re.Pattern:
    """Return a pattern of one character. common: punctuation and the frequent characters of GB2312 and Big5; late:
    those of GB2312 after C8FE; low: all but symbols that GB18030 writes with an ASCII letter as the second byte; made:
    those that a lost byte makes of GB2312. uncommon: two bytes and no common one. Or one of several. rare: three of
    some ten characters are uncommon. odd: one that is made soon after two uncommon ones, or before a letter."""
    if which == "uncommon":
        return re.compile(f"[^\0-\x7f{FOUR_BYTES}{chinese('common').pattern[1:]}")
    if which == "rare":
        rare = chinese("uncommon").pattern
        return re.compile(f"{rare}(.{{0,3}}{rare}){{2}}")
    if which == "odd":
        uncommon = f"{chinese('uncommon').pattern}(?<!{chinese('low').pattern})"
        made = chinese("made").pattern
        return re.compile(f"({uncommon}[^\0-\x7f]{{0,3}}){{2}}{made}|{made}(?=[A-Za-z])")
    high, low, trails = range(0xA1, 0xFF), range(0x40, 0x7F), (*range(0x40, 0x7F), *range(0xA1, 0xFF))
    gb, big5 = (*range(0xA1, 0xA4), *range(0xB0, 0xD8)), range(0xA4, 0xC7)
    zones = {
        "common": [("gb18030", gb, high), ("big5", big5, trails)],
        "late": [("gb18030", range(0xC9, 0xD8), high)],
        "low": [("gb18030", range(0x81, 0xFF), low)],
        "made": [("gb18030", range(0xA1, 0xFF), low)],
    }[which]
    found = (bytes((a, b)).decode(name, "ignore") for name, first, second in zones for a in first for b in second)
    characters = "".join(found) if which == "common" else SYMBOLS.sub("", "".join(found))
    return re.compile(f"[{re.escape(characters)}]")


def likely_encoding(head: bytes) -> str:
    try:
        from charset_normalizer import from_bytes
    except ImportError:
        return "neither UTF-8 nor clearly GB18030"
    best = from_bytes(head[: 2**16]).best()
    return f"neither UTF-8 nor clearly GB18030, perhaps {best.encoding}" if best else "no text in a known encoding"


def unix_lines(text: str) -> str:
    return text.replace("\r\n", "\n") if "\r" in text else text  # looking for one character is almost free


def mended(value: Any) -> Any:
    """Return a value of JSON with every text in it made valid Unicode."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, dict):
        return {mended(key): mended(item) for key, item in value.items()}
    return [mended(item) for item in value] if isinstance(value, list) else value
