"""Write token files, whose format token_files.py describes, and check every byte of them.

Of conversations (--kind=chat) there are, in the order of the rows in train.jsonl:

    train_00000.npy        ids of all conversations end to end
    train_00000.mask.npy   uint8, 1 for ids of the assistant's turns
    train_00000.off.npy    int64, n + 1: where each conversation begins, and where the last ends
"""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from groundup.errors import UserError
from groundup.tokens.token_files import (
    BLOCK_BYTES,
    CONVERSATION_FILES,
    FORMAT,
    TokenData,
    file_sha256,
    map_checked,
    npy_header,
    read_manifest,
    read_packing,
    record_sum,
    token_dtype,
    verify_sha256,
)

SHARD_TOKENS = 2**27  # 256 MiB as uint16
TOTALS = ("tokens", "documents", "bytes")


class NpyWriter:
    """Writes a 1-D .npy file piece by piece. It appears under its name when it is complete."""

    def __init__(self, path: Path, dtype: np.dtype | type) -> None:
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.length = 0
        self.file = open(f"{path}.tmp", "wb", buffering=2**20)
        self.file.write(npy_header(self.dtype, 0))  # `close` fills in the length

    def add(self, values: np.ndarray | Sequence[int]) -> None:
        for begin in range(0, len(values), 2**20):  # a document may be gigabytes, in a mapped file
            self.file.write(np.asarray(values[begin : begin + 2**20]).astype(self.dtype).tobytes())
        self.length += len(values)

    def close(self) -> None:
        # the header has the same size for any length
        self.file.seek(0)
        self.file.write(npy_header(self.dtype, self.length))
        self.file.close()
        os.replace(f"{self.path}.tmp", self.path)


def write_npy(path: Path, array: np.ndarray) -> None:
    """Write a 1-D array, whole or not at all."""
    writer = NpyWriter(path, array.dtype)
    writer.add(array)
    writer.close()


def write_json(path: Path, value: dict) -> None:
    """Write a JSON file, whole or not at all."""
    # A file's name that is not UTF-8 has halves of characters. What replaces them is JSON's \udcb9.
    with open(f"{path}.tmp", "w", encoding="utf-8", errors="backslashreplace") as f:
        json.dump(value, f, indent=1, ensure_ascii=False)
        # on the disk before it has its name: after a power cut it is whole or not there
        f.flush()
        os.fsync(f.fileno())
    os.replace(f"{path}.tmp", path)


def write_record(path: Path, record: dict) -> None:
    """Write a JSON object with its own checksum, for token_files.read_record."""
    write_json(path, record | {"crc32": record_sum(record)})


def file_sums(path: Path) -> np.ndarray:
    """Return the CRC-32 of each block of a file of token ids, uint32."""
    with open(path, "rb") as f:
        f.seek(len(npy_header(np.dtype("u1"), 0)))  # the header is no part of a block
        blocks = iter(lambda: f.read(BLOCK_BYTES), b"")
        return np.fromiter(map(zlib.crc32, blocks), np.uint32)


class ShardWriter:
    """Writes one split (of one source). Tokens go to disk as they come."""

    def __init__(
        self,
        data_dir: str | Path,
        split: str,
        vocab_size: int,
        eot_id: int,
        shard_tokens: int = SHARD_TOKENS,
        source: str = "",
        first: int = 0,
    ) -> None:
        """first: number of the first shard; another writer has written those before it."""
        assert 0 <= eot_id < vocab_size, f"{eot_id=} {vocab_size=}"
        # the source is a directory inside data_dir
        assert source == Path(source).name, f"{source=} must be a plain directory name"
        self.dir = Path(data_dir)
        self.split = split
        self.source = source
        self.vocab_size = vocab_size
        self.eot_id = eot_id
        self.shard_tokens = shard_tokens
        self.first = first
        self.shards: list[dict] = []  # manifest entries of the complete shards
        self.file: NpyWriter | None = None  # the shard being written

    def add(self, ids: np.ndarray, n_bytes: int) -> None:
        """Append a document: its token ids (1-D, any integer type), and its length in UTF-8 bytes.

        Raise UserError for an id outside the vocabulary: a cast would make another token of it."""
        self.begin(len(ids), n_bytes)
        self.extend(np.asarray(ids))

    def begin(self, n_ids: int, n_bytes: int) -> None:
        """Append a document of gigabytes: `extend` brings its ids, some at a time."""
        # a document never crosses shards; one that is longer than a shard has one to itself
        if self.file and self.file.length + 1 + n_ids > self.shard_tokens:
            self._finish_shard()
        if not self.file:
            self._begin_shard()
        # a document begins at its delimiter
        self.starts.append(self.file.length)
        self.file.add([self.eot_id])
        self.n_bytes += n_bytes

    def extend(self, ids: np.ndarray) -> None:
        assert ids.ndim == 1 and (ids.dtype.kind in "iu" or not len(ids)), f"{ids.dtype=}"
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            bad = ids.min() if ids.min() < 0 else ids.max()
            limit = f"the tokenizer's vocab_size={self.vocab_size}"
            raise UserError(f"data: token id {bad} is outside {limit}")
        self.file.add(ids)

    def close(self, last: bool = True) -> list[dict]:
        """Return the shards' entries for `write_manifest`, if there are any.

        last: the split ends here, not with the shards of another writer."""
        if self.file:
            self._finish_shard(closing=[self.eot_id] * last)
        return self.shards

    def _begin_shard(self) -> None:
        (self.dir / self.source).mkdir(parents=True, exist_ok=True)
        self.name = f"{self.source}/{self.split}_{self.first + len(self.shards):05d}".lstrip("/")
        self.file = NpyWriter(self.dir / f"{self.name}.npy", token_dtype(self.vocab_size))
        self.n_bytes = 0
        self.starts: list[int] = []  # of the documents

    def _finish_shard(self, closing: Sequence[int] = ()) -> None:
        tokens, offsets, sums = (f"{self.name}{end}.npy" for end in ("", ".off", ".crc"))
        # the closing delimiter belongs to no document
        ends = np.array([*self.starts, self.file.length], np.int64)
        self.file.add(closing)
        self.file.close()
        write_npy(self.dir / offsets, ends)
        write_npy(self.dir / sums, file_sums(self.dir / tokens))
        entry = {
            "split": self.split,
            "source": self.source,
            "file": tokens,
            "offsets": offsets,
            "sums": sums,
            "tokens": self.file.length,
            "documents": len(self.starts),
            "bytes": self.n_bytes,
            "sha256": {name: file_sha256(self.dir / name) for name in (tokens, offsets, sums)},
        }
        self.shards.append(entry)
        self.file = None


def write_manifest(
    data_dir: str | Path,
    vocab_size: int,
    eot_id: int,
    tokenizer_fingerprint: str,
    shards: list[dict],
    info: dict,
    weights: Mapping[str, float] = {},
) -> dict:
    """Write manifest.json, which declares the directory complete, and return it.

    info: the record of the preparation (inputs, settings, counts).
    weights: of the named sources in training, if they have any."""
    manifest = {
        "format": FORMAT,
        "vocab_size": vocab_size,
        "eot_id": eot_id,
        "tokenizer_fingerprint": tokenizer_fingerprint,
        "splits": {},
        "info": info,
    }
    # shards come from several writers: add them up by split
    for shard in shards:
        empty = dict.fromkeys(TOTALS, 0) | {"shards": []}
        split = manifest["splits"].setdefault(shard["split"], empty)
        for total in TOTALS:
            split[total] += shard[total]
        split["shards"].append({key: value for key, value in shard.items() if key != "split"})

    names = list(dict.fromkeys(shard["source"] for shard in shards))
    assert not weights or set(names) <= set(weights), f"{weights=} lack some of {names}"
    if names not in ([], [""]):
        assert "" not in names, f"{names}: either all sources are named or there is only one"
        manifest["sources"] = {name: source_entry(name, shards, weights) for name in names}
    # last: a directory with a manifest is complete
    write_record(Path(data_dir, "manifest.json"), manifest)
    return manifest


def source_entry(name: str, shards: list[dict], weights: Mapping[str, float]) -> dict:
    """Return what the manifest says of a named source: the totals of its train split."""
    # of training, as the weights are
    own = [s for s in shards if s["split"] == "train" and s["source"] == name]
    entry = {total: sum(shard[total] for shard in own) for total in TOTALS}
    return entry | ({"weight": weights[name]} if weights else {})


# ---- conversations ---------------------------------------------------------------------------


class ConversationWriter:
    """Writes the token files of a split, conversation by conversation."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype) -> None:
        start = directory / f"{split}_00000"
        self.tokens = NpyWriter(Path(f"{start}.npy"), dtype)
        self.mask = NpyWriter(Path(f"{start}.mask.npy"), np.uint8)
        self.offsets = NpyWriter(Path(f"{start}.off.npy"), np.int64)
        self.offsets.add([0])

    def add(self, ids: np.ndarray, mask: np.ndarray) -> None:
        self.tokens.add(ids)
        self.mask.add(mask)
        self.offsets.add([self.tokens.length])

    def close(self) -> dict:
        """Complete the files and return their entry for the manifest."""
        entry = {"ids": self.tokens.length, "conversations": self.offsets.length - 1, "sha256": {}}
        files = (self.tokens, self.mask, self.offsets)
        for key, file in zip(CONVERSATION_FILES, files, strict=True):
            file.close()
            entry[key] = file.path.name
            entry["sha256"][file.path.name] = file_sha256(file.path)
        return entry


def map_tokens(directory: Path, entry: dict, dtype: str) -> list[np.ndarray]:
    """Return (tokens, mask, offsets) of a split, mapped. entry: the manifest's.

    Raise UserError if they are not as they were written: all of them are read now."""
    kinds = (dtype, "uint8", "int64")
    lengths = (entry["ids"], entry["ids"], entry["conversations"] + 1)
    return [
        map_checked(directory, entry[key], entry["sha256"], kind, length)
        for key, kind, length in zip(CONVERSATION_FILES, kinds, lengths, strict=True)
    ]


# ---- check -----------------------------------------------------------------------------------


def verify(data_dir: str | Path) -> dict:
    """Read every byte of a data directory and return its manifest.

    Raise UserError for the first file whose size or sha256 differs from the manifest."""
    manifest = read_manifest(data_dir)
    digests = {}  # {file: sha256}
    for split, entry in manifest["splits"].items():
        TokenData(data_dir, split)  # compares sizes and types
        for shard in entry["shards"]:
            digests |= shard["sha256"]
    for path in sorted(Path(data_dir).glob("train_pack*.json")):
        for packed in read_packing(path)["sources"].values():
            digests |= packed["sha256"]
    for name, sha256 in digests.items():
        verify_sha256(Path(data_dir, name), sha256)
    return manifest
