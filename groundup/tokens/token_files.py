"""Read token files, the format in which prepare.py stores text for pretraining.

A data directory holds the tokenizer and, for each split that has text (train, val, test):

    train_00000.npy       token ids, 1-D uint16 (vocab_size <= 65536) or uint32:
                          <|endoftext|> document <|endoftext|> document ...
    train_00000.off.npy   int64 (n_documents + 1,): where each document begins, at its
                          <|endoftext|>, and where the last one ends
    manifest.json         sizes, sha256 of every file, fingerprint of the tokenizer. It is written
                          last: a directory without it is incomplete.

The last shard of a split ends with one more <|endoftext|>, so that the end of the last document is
learned too. Documents do not cross shards; windows do. Each named source (wiki, code) has such
files in a directory of its own name. token_writer.py writes the files; packing.py adds rows of
whole documents (`PackedData`).
"""

import hashlib
import json
import os
from pathlib import Path

import numpy as np

from groundup.errors import UserError
from groundup.files.untrusted import MANIFEST_BYTES, read_json

FORMAT = "groundup tokens 1"
ROWS_FORMAT = "groundup rows 1"  # of a directory of conversations or pairs


class NoSplit(UserError):
    """A data directory or source lacks a split, or it is too short for one window."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest type that holds every id below vocab_size."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def npy_header(dtype: np.dtype, length: int) -> bytes:
    """Return the header that `np.save` gives a 1-D array: 128 bytes for any length."""
    kind = dtype.newbyteorder("<").str
    fields = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({length},), }}"
    magic = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")
    return magic + fields.ljust(117).encode("ascii") + b"\n"


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


# ---- manifest --------------------------------------------------------------------------------


def read_manifest(data_dir: str | Path, kind: str = "text") -> dict:
    """Return manifest.json of a prepared directory. kind: text | chat | preference.

    Raise UserError if there is none, or it is damaged or of another kind."""
    path = Path(data_dir, "manifest.json")
    how = f"run: python prepare.py --input=... --out_dir={data_dir}"
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

    manifest = read_json(path, "data", how, MANIFEST_BYTES)
    try:
        kinds = {FORMAT: "text", ROWS_FORMAT: manifest.get("kind")}
        found = kinds.get(manifest["format"], manifest["format"])
        manifest["splits"].items()
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"data: {path} is damaged ({error!r}); {how}") from None
    if found != kind:
        raise UserError(f"data: {data_dir} was prepared with kind={found!r}, not {kind!r}")
    return manifest


def read_packing(path: Path) -> dict:
    """Return the record that packing.py wrote beside the rows."""
    return read_json(path, "data", "rerun prepare.py", MANIFEST_BYTES)


def locate(path: str | Path) -> tuple[Path, str | None]:
    """Split a path into (data directory, source); the source is None if none is named.

    'data/x/wiki' is the source wiki of data/x if the manifest of data/x names it."""
    path = Path(path)
    if not (path / "manifest.json").exists() and (path.parent / "manifest.json").exists():
        sources = read_manifest(path.parent).get("sources", {})
        if path.name in sources:
            return path.parent, path.name
        if sources and not path.exists():
            known = ", ".join(sources)
            raise UserError(f"data: {path.parent} has no source {path.name!r} (has: {known})")
    return path, None


# ---- token data ------------------------------------------------------------------------------


def map_array(path: Path, dtype: str, length: int) -> np.ndarray:
    """Return a 1-D .npy file, mapped read-only. Raise UserError if the manifest says otherwise."""
    header = npy_header(np.dtype(dtype), length)
    try:
        with open(path, "rb") as f:
            found = f.read(len(header))
            size = f.seek(0, os.SEEK_END)
    except FileNotFoundError:
        raise UserError(f"data: {path} is missing; copy it again or rerun prepare.py") from None
    if found != header:
        begins = found[10:].decode("ascii", "replace").strip()
        wanted = f"no .npy file of {length} {dtype}"
        raise UserError(f"data: {path} is {wanted} (begins {begins!r}); rerun prepare.py")
    expected = len(header) + length * np.dtype(dtype).itemsize
    if size != expected:
        wrong = f"{path} ends at byte {size} instead of {expected}"
        raise UserError(f"data: {wrong}; copy it again or rerun prepare.py")
    little = np.dtype(dtype).newbyteorder("<")
    mapped = np.memmap(path, little, mode="r", offset=len(header), shape=(length,))
    return np.asarray(mapped)  # slices of the subclass np.memmap take three times as long


class TokenData:
    """One split of a data directory, or of one source, as one long row of tokens.

    Opening checks the sizes of the files and reading checks the ids, so that a terabyte opens fast.
    token_writer.verify reads everything.
    """

    def __init__(self, data_dir: str | Path, split: str, source: str | None = None) -> None:
        """source: None = all sources that data_dir names, one after the other."""
        self.split = split
        self.dir, named = locate(data_dir)
        source = named if source is None else source
        self.manifest = read_manifest(self.dir)
        self.vocab_size = self.manifest["vocab_size"]
        self.eot_id = self.manifest["eot_id"]
        self.tokenizer_fingerprint = self.manifest["tokenizer_fingerprint"]

        shards_of = {
            name: [s for s in entry["shards"] if source in (None, s.get("source", ""))]
            for name, entry in self.manifest["splits"].items()
        }
        if not shards_of.get(split):
            has = ", ".join(name for name, shards in shards_of.items() if shards) or "none"
            lacks = f"{self.dir / (source or '')} has no split {split!r} (has: {has})"
            raise NoSplit(f"data: {lacks}; rerun prepare.py with more text")
        self.entries = shards_of[split]
        self.n_bytes: int = sum(shard["bytes"] for shard in self.entries)
        self.n_documents: int = sum(shard["documents"] for shard in self.entries)
        self.offsets = [
            map_array(self.dir / shard["offsets"], "int64", shard["documents"] + 1)
            for shard in self.entries
        ]
        self._map_tokens(self.entries)

    def _map_tokens(self, shards: list[dict]) -> None:
        dtype = self.manifest["dtype"]
        self.paths = [self.dir / shard["file"] for shard in shards]
        self.shards = [map_array(self.dir / s["file"], dtype, s["tokens"]) for s in shards]
        self.ends = np.cumsum([len(shard) for shard in self.shards])  # in tokens of the split
        self.n_tokens = int(self.ends[-1])

    @property
    def fingerprint(self) -> str:
        """The sha256 of all that decides the tokens: equal fingerprints, equal tokens."""
        parts = [FORMAT, self.split, self.tokenizer_fingerprint, self.vocab_size]
        parts += [shard["sha256"] for shard in self.entries]
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
        out = np.empty(length, dtype=np.int64)
        filled = 0
        k = int(np.searchsorted(self.ends, start, side="right"))
        while filled < length:
            shard = self.shards[k]
            shard_start = int(self.ends[k]) - len(shard)
            begin = start + filled - shard_start
            piece = shard[begin : begin + length - filled]
            self._check_ids(piece, k, begin)
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            k += 1
        return out

    def _check_ids(self, piece: np.ndarray, k: int, begin: int) -> None:
        """Raise UserError for an id that the model has no embedding for."""
        if piece.max(initial=0) >= self.vocab_size:
            at = int(np.argmax(piece >= self.vocab_size))
            found = f"{self.paths[k]} holds token id {piece[at]} at offset {begin + at}"
            size = f"the tokenizer has vocab_size={self.vocab_size}"
            raise UserError(f"data: {found}, but {size}; rerun prepare.py")

    def document_starts(self) -> np.ndarray:
        """Return (n_documents,) int64: where each document begins in the split."""
        begins = self.ends - [len(shard) for shard in self.shards]
        pairs = zip(begins, self.offsets, strict=True)
        return np.concatenate([begin + offsets[:-1] for begin, offsets in pairs])

    def most_documents(self, length: int) -> int:
        """Return an upper bound on the documents in a window of `length` tokens."""
        starts = self.document_starts()
        within = np.searchsorted(starts, starts + length) - np.arange(len(starts))
        return 1 + int(within.max())  # and one that began before the window

    def n_valid(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return how many tokens of the windows at `starts` are trained on: all of them."""
        return np.full(len(starts), length)


class PackedData(TokenData):
    """The train split of one source as rows of block_size + 1 tokens, written by packing.py.

    Each row begins with a document. Here a window is a whole row and `starts` are numbers of rows.
    """

    def __init__(self, data_dir: str | Path, block_size: int, source: str = "") -> None:
        super().__init__(data_dir, "train", source)
        self.block_size = block_size
        path = self.dir / f"train_pack{block_size}.json"
        command = f"prepare.py {self.dir}/config.py --pack={block_size} --overwrite=True"
        how = f"run: python {command}"
        if not path.exists():
            raise UserError(f"data: {self.dir} is not packed for block_size={block_size}; {how}")
        self.entry = read_packing(path)["sources"].get(source)
        if not self.entry or self.entry["fingerprint"] != super().fingerprint:
            raise UserError(f"data: {path} is not of the tokens that are there now; {how}")
        self.n_rows: int = self.entry["rows"]
        self.lengths = map_array(self.dir / self.entry["lengths"], "int32", self.n_rows)
        self._map_tokens(self.entry["shards"])

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

    def n_valid(self, rows: np.ndarray, length: int) -> np.ndarray:
        """Return (n,) int64: tokens of documents in each row, with the delimiter after the last."""
        return self.lengths[rows].astype(np.int64)
