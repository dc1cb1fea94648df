"""Read token files, the format in which prepare.py stores text for pretraining.

A data directory holds the tokenizer and, for each split that has text (train, val, test):

    train_00000.npy       token ids, 1-D uint16 (vocab_size <= 65536) or uint32:
                          <|endoftext|> document <|endoftext|> document ...
    train_00000.off.npy   int64 (n_documents + 1,): where each document begins, at its
                          <|endoftext|>, and where the last one ends
    train_00000.crc.npy   uint32: CRC-32 of each 64 KiB of the token ids
    manifest.json         sizes, sha256 of every file, fingerprint of the tokenizer, and its own
                          CRC-32. It is written last: a directory without it is incomplete.

The last shard of a split ends with one more <|endoftext|>, so that the end of the last document is
learned too. Documents do not cross shards; windows do. Each named source (wiki, code) has such
files in a directory of its own name. token_writer.py writes the files; packing.py adds rows of
whole documents (`PackedData`).
"""

import contextlib
import functools
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from groundup.errors import UserError
from groundup.files.untrusted import (
    MANIFEST_BYTES,
    check_regular,
    is_count,
    is_inside,
    is_weight,
    misfit,
    read_json,
)

FORMAT = "groundup tokens 1"
ROWS_FORMAT = "groundup rows 1"  # of a directory of conversations or pairs
AGAIN = "copy it again or rerun prepare.py"

# Token ids are checked in blocks, when one is first read: a terabyte opens at once, and no rank
# trains on a damaged id. A disk reads about as much for a single id.
BLOCK_BYTES = 2**16

# What manifest.json must hold, by the kind of the data; untrusted.misfit explains the notation. Its
# checksum shows damage; this shows what somebody has changed by hand.
SHA256S = {"*": str}  # {file: sha256}
TOTAL = {"tokens": is_count, "documents": is_count, "bytes": is_count}
SHARD = {"file": is_inside, "sums": is_inside, "tokens": is_count}
TEXT_SHARD = SHARD | TOTAL | {"source": str, "offsets": is_inside, "sha256": SHA256S}
TEXT = {
    "vocab_size": is_count,
    "eot_id": is_count,
    "tokenizer_fingerprint": str,
    "splits": {"*": TOTAL | {"shards": [TEXT_SHARD]}},
    "sources?": {"*": TOTAL | {"weight?": is_weight}},
    "info": dict,
}
# token_writer.py tells what is in these three
CONVERSATION_FILES = dict.fromkeys(("file", "mask", "offsets"), is_inside)
CHAT_TOKENS = CONVERSATION_FILES | {"ids": is_count, "conversations": is_count, "sha256": SHA256S}
ROW_SPLIT = {"file": is_inside, "rows": is_count, "bytes": is_count, "sha256": str}
ROWS = {
    "vocab_size?": is_count,
    "tokenizer_fingerprint?": str,
    "splits": {"*": ROW_SPLIT | {"tokens?": CHAT_TOKENS}},
    "info": dict,
}
SHAPES = {"text": TEXT, "chat": ROWS, "preference": ROWS}
# What packing.py writes beside them
PACKED = {"fingerprint": str, "rows": is_count, "most_documents": is_count, "lengths": is_inside}
PACKING = {"sources": {"*": PACKED | {"shards": [SHARD], "sha256": SHA256S}}}


class NoSplit(UserError):
    """A data directory or source lacks a split, or it is too short for one window."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest type that holds every id below vocab_size."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def npy_header(dtype: np.dtype, length: int) -> bytes:
    """Return the header that `np.save` gives a 1-D array: 128 bytes for any length."""
    # Our own, so that a writer can leave room for it and fill in the length at the end.
    kind = dtype.newbyteorder("<").str  # such as <u2: two bytes, the lower one first
    fields = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({length},), }}"
    magic = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")  # version 1.0; 118 bytes follow
    return magic + fields.ljust(117).encode("ascii") + b"\n"


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def verify_sha256(path: Path, sha256: str | None) -> None:
    """Raise UserError unless the file is there and unchanged."""
    try:
        check_regular(path)
        found = file_sha256(path)
    except OSError as error:
        raise UserError(f"data: cannot read {path}: {error.strerror}; {AGAIN}") from None
    if found != sha256:
        raise UserError(f"data: {path} changed since it was written (sha256); {AGAIN}")


# ---- manifest --------------------------------------------------------------------------------


def record_sum(record: dict) -> str:
    """Return the CRC-32 of a record, as write_record adds it."""
    return f"{zlib.crc32(json.dumps(record).encode()):08x}"


def read_record(path: Path, how: str) -> dict:
    """Return the object that token_writer.write_record has written. Raise UserError."""
    record = read_json(path, "data", how, MANIFEST_BYTES)  # an object, and not too large
    if record.pop("crc32", None) != record_sum(record):
        raise UserError(f"data: {path} is damaged: its crc32 is another; {how}")
    return record


def check_shape(path: Path, record: dict, shape: Any, how: str) -> None:
    """Raise UserError unless a record holds what it must, of the right types."""
    if problem := misfit(record, shape, path.stem):  # the part that is wrong
        raise UserError(f"data: {path} is damaged: {problem}; {how}")


def read_manifest(data_dir: str | Path, kind: str = "text") -> dict:
    """Return manifest.json of a prepared directory. kind: text | chat | preference, "" = any.

    Raise UserError if there is none, or it is damaged or of another kind."""
    path = Path(data_dir, "manifest.json")
    how = f"run: python prepare.py --input=... --out_dir={data_dir}"
    # Say what is wrong as exactly as can be known: this is where most first runs fail.
    if Path(data_dir).is_file():
        how = f"run: python prepare.py --input={data_dir} --out_dir=data/{Path(data_dir).stem}"
        raise UserError(f"data: {data_dir} is a file, not a directory of prepare.py; {how}")
    if not Path(data_dir).is_dir():
        raise UserError(f"data: no directory {data_dir}; {how}")
    if not path.exists():
        # texts that were never prepared, rather than an interrupted prepare.py
        if any(Path(data_dir).iterdir()) and not Path(data_dir, "config.py").exists():
            out_dir = f"data/{Path(data_dir).absolute().name}"
            run = f"python prepare.py --input={data_dir} --out_dir={out_dir}"
            how = f"if it holds texts, run: {run}"
        unprepared = f"{data_dir} is not prepared, or not completely: no manifest.json"
        raise UserError(f"data: {unprepared}; {how}")

    # the kind decides what else must be there
    manifest = read_record(path, how)
    check_shape(path, manifest, {"format": str, "kind?": str}, how)
    kinds = {FORMAT: "text", ROWS_FORMAT: manifest.get("kind")}
    found = kinds.get(manifest["format"], manifest["format"])  # a format of others is named
    if found not in SHAPES or kind not in ("", found):
        what = f"{data_dir} was prepared with kind={found!r}, not {kind or ', '.join(SHAPES)!r}"
        hint = f"; give what prepare.py --kind={kind} has made" if kind else ""
        raise UserError(f"data: {what}{hint}")
    check_shape(path, manifest, SHAPES[found], how)
    return manifest


def read_packing(path: Path) -> dict:
    """Return the record that packing.py wrote beside the rows."""
    record = read_record(path, "rerun prepare.py")
    check_shape(path, record, PACKING, "rerun prepare.py")
    return record


def locate(path: str | Path) -> tuple[Path, str | None, dict]:
    """Return (data directory, source, manifest) of a path; the source is None if none is named.

    'data/x/wiki' is the source wiki of data/x if the manifest of data/x names it."""
    path = Path(path)
    # a directory with a manifest of its own is no source of its parent
    if not (path / "manifest.json").exists() and (path.parent / "manifest.json").exists():
        manifest = read_manifest(path.parent)
        sources = manifest.get("sources", {})
        if path.name in sources:
            return path.parent, path.name, manifest
        if sources and not path.exists():
            known = ", ".join(sources)
            raise UserError(f"data: {path.parent} has no source {path.name!r} (has: {known})")
    return path, None, read_manifest(path)


# ---- token data ------------------------------------------------------------------------------


def map_array(path: Path, dtype: str, length: int) -> np.ndarray:
    """Return a 1-D .npy file, mapped read-only. Raise UserError if the manifest says otherwise."""
    raise_file_limit()
    # The manifest says what header the file must have, so nothing in the file needs to be parsed.
    header = npy_header(np.dtype(dtype), length)
    try:
        size = check_regular(path)
        with open(path, "rb") as f:
            found = f.read(len(header))
    except OSError as error:
        raise UserError(f"data: cannot read {path}: {error.strerror}; {AGAIN}") from None
    if found != header:
        begins = found[10:].decode("ascii", "replace").strip()  # what it says of itself
        wanted = f"no .npy file of {length} {dtype}"
        raise UserError(f"data: {path} is {wanted} (begins {begins!r}); rerun prepare.py")
    expected = len(header) + length * np.dtype(dtype).itemsize
    if size != expected:  # it was cut, or has grown
        wrong = f"{path} ends at byte {size} instead of {expected}"
        raise UserError(f"data: {wrong}; {AGAIN}")
    # little-endian on every machine, as the writer stores it
    little = np.dtype(dtype).newbyteorder("<")
    mapped = np.memmap(path, little, mode="r", offset=len(header), shape=(length,))
    return np.asarray(mapped)  # slices of the subclass np.memmap take three times as long


@functools.cache
def raise_file_limit() -> None:
    """Let this process open as many files as the system allows. Mapped ones count, and the usual
    limit, 1,024, is less than large data has."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on Windows
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def map_checked(
    directory: Path, name: str, sha256: dict[str, str], dtype: str, length: int
) -> np.ndarray:
    """Return `map_array` of a file whose content is as it was written. sha256: {file: digest}."""
    array = map_array(directory / name, dtype, length)
    verify_sha256(directory / name, sha256.get(name))
    return array


class TokenData:
    """One split of a data directory, or of one source, as one long row of tokens.

    Opening checks the small files, and reading checks blocks of ids, so that a terabyte opens fast.
    token_writer.verify reads everything.
    """

    def __init__(self, data_dir: str | Path, split: str, source: str | None = None) -> None:
        """source: None = all sources that data_dir names, one after the other."""
        self.split = split  # train | val | test
        self.dir, named, self.manifest = locate(data_dir)
        self.source = source = named if source is None else source
        self.vocab_size = self.manifest["vocab_size"]
        self.eot_id = self.manifest["eot_id"]
        self.tokenizer_fingerprint = self.manifest["tokenizer_fingerprint"]

        # entries of the manifest, one for each shard, in the order of the text
        shards = self.manifest["splits"].get(split, {"shards": []})["shards"]
        self.entries = [one for one in shards if source in (None, one.get("source", ""))]
        if not self.entries:
            lacks = f"{self.dir / (source or '')} has no split {split!r}"
            raise NoSplit(f"data: {lacks}; rerun prepare.py with more text")
        self.n_bytes: int = sum(shard["bytes"] for shard in self.entries)  # of text in UTF-8
        self.n_documents: int = sum(shard["documents"] for shard in self.entries)
        sha256 = {name: sha for shard in self.entries for name, sha in shard["sha256"].items()}
        # small files, read now; those of token ids may be terabytes
        self.offsets = [
            map_checked(self.dir, shard["offsets"], sha256, "int64", shard["documents"] + 1)
            for shard in self.entries
        ]
        self._map_tokens(self.entries, sha256)

    def _map_tokens(self, shards: list[dict], sha256: dict[str, str]) -> None:
        dtype = token_dtype(self.vocab_size)
        self.paths = [self.dir / shard["file"] for shard in shards]
        self.shards = [map_array(self.dir / s["file"], dtype.name, s["tokens"]) for s in shards]
        size = BLOCK_BYTES // dtype.itemsize  # tokens in a block
        self.sums = [
            map_checked(self.dir, s["sums"], sha256, "uint32", -(-s["tokens"] // size))
            for s in shards
        ]
        self.checked = [bytearray(len(sums)) for sums in self.sums]  # 1: the block is right
        self.ends = np.cumsum([len(shard) for shard in self.shards])  # in tokens of the split
        self.n_tokens = int(self.ends[-1])  # where the last shard ends

    @property
    def fingerprint(self) -> str:
        """The sha256 of all that decides the tokens: equal fingerprints, equal tokens."""
        # The digests of the files stand in the manifest, so no token is read for this.
        parts = [FORMAT, self.split, self.tokenizer_fingerprint, self.vocab_size]
        parts += [shard["sha256"].get(shard["file"]) for shard in self.entries]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def check_tokenizer(self, fingerprint: str) -> None:
        """Raise UserError unless the tokenizer with this fingerprint has made these tokens."""
        if fingerprint != self.tokenizer_fingerprint:
            which = f"({self.tokenizer_fingerprint[:12]}, not {fingerprint[:12]})"
            other = f"{self.dir} was prepared with another tokenizer {which}"
            raise UserError(f"data: {other}; put its tokenizer files back or rerun prepare.py")

    def window(self, start: int, length: int) -> np.ndarray:
        """Return tokens [start, start + length) as int64, across shards."""
        assert 0 <= start and start + length <= self.n_tokens, f"{start=} {length=}"
        out = np.empty(length, dtype=np.int64)  # torch embeds int64
        filled = 0
        k = int(np.searchsorted(self.ends, start, side="right"))  # the shard with the first token
        while filled < length:
            shard_start = int(self.ends[k]) - len(self.shards[k])  # in tokens of the split
            piece = self._read(k, start + filled - shard_start, length - filled)
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            k += 1  # the window goes on in the next shard
        return out

    def _read(self, k: int, begin: int, length: int) -> np.ndarray:
        """Return the tokens of shard k from `begin` on, up to `length` of them.

        Raise UserError if a block that holds them is damaged, or for an id that is too large."""
        shard, sums, checked = self.shards[k], self.sums[k], self.checked[k]
        piece = shard[begin : begin + length]  # mapped: nothing is read yet
        size = BLOCK_BYTES // shard.itemsize  # tokens in a block
        for block in range(begin // size, -(-(begin + len(piece)) // size)):
            first = block * size
            if not checked[block] and zlib.crc32(shard[first : first + size]) != sums[block]:
                what = f"{self.paths[k]} changed since it was written (tokens from {first} on)"
                raise UserError(f"data: {what}; {AGAIN}")
            checked[block] = 1  # from now on it is trusted

        # the model has no embedding for an id that is not below vocab_size
        if piece.max(initial=0) >= self.vocab_size:
            at = int(np.argmax(piece >= self.vocab_size))
            found = f"{self.paths[k]} holds token id {piece[at]} at offset {begin + at}"
            size = f"the tokenizer has vocab_size={self.vocab_size}"
            raise UserError(f"data: {found}, but {size}; rerun prepare.py")
        return piece

    def document_starts(self) -> np.ndarray:
        """Return (n_documents,) int64: where each document begins in the split."""
        begins = self.ends - [len(shard) for shard in self.shards]
        pairs = zip(begins, self.offsets, strict=True)
        return np.concatenate([begin + offsets[:-1] for begin, offsets in pairs])

    def most_documents(self, length: int) -> int:
        """Return an upper bound on the documents in a window of `length` tokens."""
        # for a window that begins with each document: how many begin inside it
        starts = self.document_starts()
        within = np.searchsorted(starts, starts + length) - np.arange(len(starts))
        return 1 + int(within.max())  # and one that began before the window

    def text_lengths(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return (n,) int64: the number of tokens of text in each window. Here it is `length`."""
        return np.full(len(starts), length)  # every token is text


class PackedData(TokenData):
    """The train split of one source as rows of block_size + 1 tokens, written by packing.py.

    Each row begins with a document. Here a window is a whole row and `starts` are numbers of rows.
    """

    def __init__(self, data_dir: str | Path, block_size: int, source: str | None = None) -> None:
        super().__init__(data_dir, "train", source)
        self.block_size = block_size
        path = self.dir / f"train_pack{block_size}.json"
        command = f"prepare.py {self.dir}/config.py --pack={block_size} --overwrite=True"
        how = f"run: python {command}"
        if not path.exists():
            raise UserError(f"data: {self.dir} is not packed for block_size={block_size}; {how}")
        self.entry = read_packing(path)["sources"].get(self.source or "")
        if not self.entry or self.entry["fingerprint"] != super().fingerprint:
            raise UserError(f"data: {path} is not of the tokens that are there now; {how}")
        self.n_rows: int = self.entry["rows"]  # the samples of an epoch
        sha256 = self.entry["sha256"]
        # from here on the tokens are those of the rows, with the methods of TokenData
        self.lengths = map_checked(self.dir, self.entry["lengths"], sha256, "int32", self.n_rows)
        self._map_tokens(self.entry["shards"], sha256)

    @property
    def fingerprint(self) -> str:
        """The sha256 of all that decides the rows."""
        parts = [FORMAT, self.block_size, self.entry["sha256"]]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def window(self, row: int, length: int) -> np.ndarray:
        """Return the first `length` tokens of a row as int64."""
        return super().window(row * (self.block_size + 1), length)

    def most_documents(self, length: int) -> int:
        """Return the most documents of a row; what fills a row counts as one."""
        return self.entry["most_documents"]

    def text_lengths(self, rows: np.ndarray, length: int) -> np.ndarray:
        """Return (n,) int64: the tokens of each row up to and with the delimiter behind its last
        document. The rest fills the row up and is not learned."""
        return self.lengths[rows].astype(np.int64)
