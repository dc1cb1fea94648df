"""Token files: the format in which prepare.py writes text for pretraining, its writer, its reader and its check.

A data directory holds the tokenizer's files and, for each split that has text (train, val, test):
    train_00000.npy       1-D uint16 (vocab_size <= 65536) or uint32: <|endoftext|> document <|endoftext|> document ...
    train_00000.off.npy   int64, n_documents + 1: where each document starts (at its <|endoftext|>), where the last ends
    manifest.json         written last: sizes, sha256 of every file, the tokenizer's fingerprint; without it: incomplete
The last shard of a split closes with one more <|endoftext|>, so that the end of the last document is learned too.
Documents do not cross shards; windows do. Named sources (wiki, code) have such files in a directory of their name each.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from groundup.errors import UserError
from groundup.files.untrusted import MANIFEST_BYTES, read_json

FORMAT = "groundup tokens 1"
ROWS_FORMAT = "groundup rows 1"  # of a directory of conversations or pairs
SHARD_TOKENS = 2**27  # 256 MiB as uint16


class NoSplit(UserError):
    """A split that a data directory or a source does not have, or too short for one window."""


# ---- writer ----------------------------------------------------------------------------------------------------------


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest type that holds every id < vocab_size."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def file_sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def npy_header(dtype: np.dtype, length: int) -> bytes:
    """Return the header that `np.save` gives a 1-D array: 128 bytes for any length."""
    fields = f"{{'descr': '{dtype.newbyteorder('<').str}', 'fortran_order': False, 'shape': ({length},), }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + fields.ljust(117).encode("ascii") + b"\n"


class NpyWriter:
    """Writes a 1-D .npy file piece by piece. The file appears under its name when it is complete."""

    def __init__(self, path: Path, dtype: np.dtype | type) -> None:
        self.path, self.dtype, self.length = path, np.dtype(dtype).newbyteorder("<"), 0
        self.file = open(f"{path}.tmp", "wb", buffering=2**20)
        self.file.write(npy_header(self.dtype, 0))  # `close` fills in the length

    def add(self, values: np.ndarray | list[int]) -> None:
        self.file.write(np.asarray(values).astype(self.dtype).tobytes())
        self.length += len(values)

    def close(self) -> None:
        self.file.seek(0)
        self.file.write(npy_header(self.dtype, self.length))
        self.file.close()
        os.replace(f"{self.path}.tmp", self.path)


def write_npy(path: Path, array: np.ndarray) -> None:
    """Write a 1-D array, whole or not at all."""
    writer = NpyWriter(path, array.dtype)
    writer.add(array)
    writer.close()


class ShardWriter:
    """Writes one split (of one source). Tokens go to disk as they come."""

    def __init__(
        self, data_dir: str | Path, split: str, vocab_size: int, eot_id: int, shard_tokens: int = SHARD_TOKENS,
        source: str = "",
    ) -> None:  # fmt: skip
        assert 0 <= eot_id < vocab_size, f"{eot_id=} {vocab_size=}"
        assert source == Path(source).name, f"{source=} must be a plain directory name"
        self.dir, self.split, self.source = Path(data_dir), split, source
        self.vocab_size, self.eot_id, self.shard_tokens = vocab_size, eot_id, shard_tokens
        self.shards: list[dict] = []  # manifest entries of the complete shards
        self.file: NpyWriter | None = None  # of the shard being written

    def add(self, ids: np.ndarray, n_bytes: int) -> None:
        """Append one document: its token ids (1-D, any integer type) and the length of its text in UTF-8 bytes. Raise
        UserError for an id outside the vocabulary: a cast would silently turn it into another token."""
        ids = np.asarray(ids)
        assert ids.ndim == 1 and (ids.dtype.kind in "iu" or not len(ids)), f"{ids.shape=} {ids.dtype=}"
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            bad = ids.min() if ids.min() < 0 else ids.max()
            raise UserError(f"data: token id {bad} is outside the tokenizer's vocab_size={self.vocab_size}")
        if self.file and self.file.length + 1 + len(ids) > self.shard_tokens:
            self._finish_shard()
        if not self.file:
            (self.dir / self.source).mkdir(parents=True, exist_ok=True)
            self.name = f"{self.source}/{self.split}_{len(self.shards):05d}".lstrip("/")
            self.file = NpyWriter(self.dir / f"{self.name}.npy", token_dtype(self.vocab_size))
            self.n_bytes, self.starts = 0, []
        self.starts.append(self.file.length)
        self.file.add([self.eot_id])
        self.file.add(ids)
        self.n_bytes += n_bytes

    def close(self) -> list[dict]:
        """Finish the split and return its shards' entries for `write_manifest`; without documents there are none."""
        if self.file:
            self._finish_shard(closing=[self.eot_id])
        return self.shards

    def _finish_shard(self, closing: Sequence[int] = ()) -> None:
        offsets = np.array([*self.starts, self.file.length], np.int64)
        self.file.add(closing)
        self.file.close()
        write_npy(self.dir / f"{self.name}.off.npy", offsets)
        self.shards.append({
            "split": self.split, "source": self.source, "file": f"{self.name}.npy", "offsets": f"{self.name}.off.npy",
            "tokens": self.file.length, "documents": len(self.starts), "bytes": self.n_bytes,
            "sha256": file_sha256(self.dir / f"{self.name}.npy"),
            "offsets_sha256": file_sha256(self.dir / f"{self.name}.off.npy"),
        })  # fmt: skip
        self.file = None


def write_manifest(
    data_dir: str | Path, vocab_size: int, eot_id: int, tokenizer_fingerprint: str, shards: list[dict], info: dict,
    weights: Mapping[str, float] = {},
) -> dict:  # fmt: skip
    """Write manifest.json, which declares the directory complete, and return it. info: the record of the preparation
    (inputs, settings, counts). weights: of the named sources in training, if they have any."""
    manifest = {
        "format": FORMAT, "vocab_size": vocab_size, "eot_id": eot_id, "dtype": token_dtype(vocab_size).name,
        "tokenizer_fingerprint": tokenizer_fingerprint, "splits": {}, "info": info,
    }  # fmt: skip
    for shard in shards:
        split = manifest["splits"].setdefault(shard["split"], {"tokens": 0, "documents": 0, "bytes": 0, "shards": []})
        for total in ("tokens", "documents", "bytes"):
            split[total] += shard[total]
        split["shards"].append({key: value for key, value in shard.items() if key != "split"})
    names = list(dict.fromkeys(shard["source"] for shard in shards))
    assert not weights or set(names) <= set(weights), f"{weights=} lack some of {names}"
    if names not in ([], [""]):
        assert "" not in names, f"{names}: either all sources are named or there is only one"
        manifest["sources"] = {}
        for name in names:
            own = [shard for shard in shards if (shard["split"], shard["source"]) == ("train", name)]
            totals = {total: sum(shard[total] for shard in own) for total in ("tokens", "documents", "bytes")}
            manifest["sources"][name] = totals | ({"weight": weights[name]} if weights else {})
    write_json(Path(data_dir, "manifest.json"), manifest)
    return manifest


def write_json(path: Path, value: dict) -> None:
    """Write a JSON file, whole or not at all."""
    with open(f"{path}.tmp", "w", encoding="utf-8") as f:
        json.dump(value, f, indent=1, ensure_ascii=False)
        f.flush()
        os.fsync(f.fileno())
    os.replace(f"{path}.tmp", path)


# ---- reader ----------------------------------------------------------------------------------------------------------


def read_manifest(data_dir: str | Path, kind: str = "text") -> dict:
    """Return manifest.json of a prepared directory. Raise UserError: there is none, damaged, of another kind than
    "text", "chat" or "preference"."""
    path = Path(data_dir, "manifest.json")
    how = f"run: python prepare.py --input=... --out_dir={data_dir}"
    if not Path(data_dir).is_dir():
        raise UserError(f"data: no directory {data_dir}; {how}")
    if not path.exists():
        if any(Path(data_dir).iterdir()) and not (Path(data_dir) / "config.py").exists():
            name = Path(data_dir).absolute().name
            how = f"if it holds texts, run: python prepare.py --input={data_dir} --out_dir=data/{name}"
        raise UserError(f"data: {data_dir} is not prepared, or not completely: no manifest.json; {how}")
    manifest = read_json(path, "data", how, MANIFEST_BYTES)
    try:
        found = {FORMAT: "text", ROWS_FORMAT: manifest.get("kind")}.get(manifest["format"], manifest["format"])
        manifest["splits"].items()
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"data: {path} is damaged ({error!r}); {how}") from None
    if found != kind:
        raise UserError(f"data: {data_dir} was prepared with kind={found!r}, not {kind!r}")
    return manifest


def locate(path: str | Path) -> tuple[Path, str | None]:
    """'data/x' -> (data/x, None); 'data/x/wiki' -> (data/x, 'wiki') if the manifest of data/x names that source."""
    path = Path(path)
    if not (path / "manifest.json").exists() and (path.parent / "manifest.json").exists():
        sources = read_manifest(path.parent).get("sources", {})
        if path.name in sources:
            return path.parent, path.name
        if sources and not path.exists():
            raise UserError(f"data: {path.parent} has no source {path.name!r} (has: {', '.join(sources)})")
    return path, None


def map_array(path: Path, dtype: str, length: int) -> np.ndarray:
    """Return a read-only memory map of a 1-D .npy file. Raise UserError if it is not what the manifest says."""
    header = npy_header(np.dtype(dtype), length)
    try:
        with open(path, "rb") as f:
            found = f.read(len(header))
            size, expected = f.seek(0, os.SEEK_END), len(header) + length * np.dtype(dtype).itemsize
    except FileNotFoundError:
        raise UserError(f"data: {path} is missing; copy it again or rerun prepare.py") from None
    if found != header:
        begins = found[10:].decode("ascii", "replace").strip()
        raise UserError(f"data: {path} is no .npy file of {length} {dtype} (begins {begins!r}); rerun prepare.py")
    if size != expected:
        raise UserError(f"data: {path} ends at byte {size} instead of {expected}; copy it again or rerun prepare.py")
    mapped = np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r", offset=len(header), shape=(length,))
    return np.asarray(mapped)  # the same memory; slices of the subclass np.memmap take three times as long


class TokenData:
    """One split of a data directory, or of one of its sources, as one long row of tokens, mapped read-only. Opening
    checks the sizes of the files, fetching checks the ids: a terabyte opens fast. `verify` reads everything."""

    packed = False  # windows may begin anywhere, see mixture.Sampler

    def __init__(self, data_dir: str | Path, split: str, source: str | None = None) -> None:
        """source: None = all sources that data_dir names, one after the other."""
        self.split = split
        self.dir, found = locate(data_dir)
        source = found if source is None else source
        self.manifest = read_manifest(self.dir)
        keys = "vocab_size", "eot_id", "tokenizer_fingerprint"
        self.vocab_size, self.eot_id, self.tokenizer_fingerprint = (self.manifest[key] for key in keys)
        shards_of = {
            name: [shard for shard in entry["shards"] if source in (None, shard.get("source", ""))]
            for name, entry in self.manifest["splits"].items()
        }
        if not shards_of.get(split):
            has = ", ".join(name for name, shards in shards_of.items() if shards) or "none"
            where = self.dir / (source or "")
            raise NoSplit(f"data: {where} has no split {split!r} (has: {has}); rerun prepare.py with more text")
        self.entries = shards_of[split]
        self.n_bytes: int = sum(shard["bytes"] for shard in self.entries)
        self.n_documents: int = sum(shard["documents"] for shard in self.entries)
        self.offsets = [map_array(self.dir / one["offsets"], "int64", one["documents"] + 1) for one in self.entries]
        self._map_tokens(self.entries)

    def _map_tokens(self, shards: list[dict]) -> None:
        self.paths = [self.dir / shard["file"] for shard in shards]
        self.shards = [map_array(self.dir / one["file"], self.manifest["dtype"], one["tokens"]) for one in shards]
        self.ends = np.cumsum([len(shard) for shard in self.shards])  # of each shard, in tokens of the split
        self.n_tokens = int(self.ends[-1])

    @property
    def fingerprint(self) -> str:
        """The sha256 of everything that decides the token stream: equal fingerprints, equal tokens."""
        parts = [FORMAT, self.split, self.tokenizer_fingerprint, self.vocab_size]
        parts += [shard["sha256"] for shard in self.entries]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def check_tokenizer(self, fingerprint: str) -> None:
        """Raise UserError unless the tokenizer with this fingerprint has made these tokens."""
        if fingerprint != self.tokenizer_fingerprint:
            which = f"({self.tokenizer_fingerprint[:12]}, not {fingerprint[:12]})"
            how = "put its tokenizer files back or rerun prepare.py"
            raise UserError(f"data: {self.dir} was prepared with another tokenizer {which}; {how}")

    def window(self, start: int, length: int) -> np.ndarray:
        """Return tokens [start, start + length) as int64, across shards. Raise UserError: an id too large."""
        assert 0 <= start and start + length <= self.n_tokens, f"{start=} {length=} {self.n_tokens=}"
        out = np.empty(length, dtype=np.int64)
        filled, k = 0, int(np.searchsorted(self.ends, start, side="right"))
        while filled < length:
            shard = self.shards[k]
            begin = start + filled - (int(self.ends[k]) - len(shard))
            piece = shard[begin : begin + length - filled]
            if piece.max(initial=0) >= self.vocab_size:
                at = int(np.argmax(piece >= self.vocab_size))
                raise UserError(
                    f"data: {self.paths[k]} holds token id {piece[at]} at offset {begin + at}, but the tokenizer has "
                    f"vocab_size={self.vocab_size}; rerun prepare.py"
                )
            out[filled : filled + len(piece)] = piece
            filled, k = filled + len(piece), k + 1
        return out

    def document_starts(self) -> np.ndarray:
        """Return (n_documents,) int64: where each document begins in the split."""
        begins = self.ends - [len(shard) for shard in self.shards]
        return np.concatenate([begin + own[:-1] for begin, own in zip(begins, self.offsets, strict=True)])

    def most_documents(self, length: int) -> int:
        """Return a bound on the documents in any window of `length` tokens, with one that began before it."""
        starts = self.document_starts()
        return 1 + int((np.searchsorted(starts, starts + length) - np.arange(len(starts))).max())

    def valid(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return how many tokens of the windows at `starts` are trained on: here all `length`."""
        return np.full(len(starts), length)


def verify(data_dir: str | Path) -> dict:
    """Read every byte of a data directory and return its manifest. Raise UserError for the first file whose size or
    sha256 differs from it."""
    manifest = read_manifest(data_dir)
    digests = {}
    for split, entry in manifest["splits"].items():
        TokenData(data_dir, split)  # compares sizes and types
        for shard in entry["shards"]:
            digests |= {shard["file"]: shard["sha256"], shard["offsets"]: shard["offsets_sha256"]}
    for path in sorted(Path(data_dir).glob("train_pack*.json")):
        for packed in read_packing(path)["sources"].values():
            digests |= packed["sha256"]
    for name, sha256 in digests.items():
        verify_sha256(Path(data_dir, name), sha256)
    return manifest


def verify_sha256(path: Path, sha256: str) -> None:
    if not path.exists():
        raise UserError(f"data: {path} is missing; copy it again or rerun prepare.py")
    if file_sha256(path) != sha256:
        raise UserError(f"data: {path} changed since it was written (sha256); rerun prepare.py")


def read_packing(path: Path) -> dict:
    return read_json(path, "data", "rerun prepare.py", MANIFEST_BYTES)
