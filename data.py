"""Token files, and the batches that training reads from them in the order of mixture.py.

    python prepare.py --input='corpus/*.jsonl' --out_dir=data/x     # writes the format described here
    python pretrain.py --data_dir=data/x                            # reads it

A data directory holds, for each split that has text (train, val, test):
    train_00000.npy       1-D uint16 (vocab_size <= 65536) or uint32: <|endoftext|> document <|endoftext|> document ...
    train_00000.off.npy   int64, n_documents + 1: where each document starts (at its <|endoftext|>), where the last ends
    manifest.json         written last: sizes, sha256 of every file, the tokenizer's fingerprint; without it: incomplete
and the tokenizer's own files. The last shard of a split closes with one more <|endoftext|>, so that the end of the last
document is learned too. Documents do not cross shards; windows do. A directory of several named sources (wiki, code)
holds one such set of files for each in a directory of its name, and one manifest.json for all.
"""

import hashlib
import itertools
import json
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mixture import (
    Curriculum,
    Mixture,
    Sampler,
    hash_words,
    parse_data_dir,
    parse_max_epochs,
    parse_weights,
    permute,
    quotas,
)
from readers import DataError

if TYPE_CHECKING:
    import torch

FORMAT = "groundup tokens 1"
SHARD_TOKENS = 2**27  # 256 MiB as uint16
MANY_EPOCHS = 4  # Muennighoff et al. 2023: up to here repeated tokens are worth nearly as much as new ones
IGNORE = -100  # a target that is not trained on, as in model.py
SORTED = ("length", "unigram", "bigram", "trigram", "score")  # orders of prepare.py that go from easy to hard


class NoSplit(DataError):
    """A split that a data directory or a source does not have, or too short for one window."""


# ---- token files: writer ---------------------------------------------------------------------------------------------


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every id < vocab_size."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def npy_header(dtype: np.dtype, length: int) -> bytes:
    """The header that `np.save` gives a 1-D array: 128 bytes whatever the length, so it can be filled in at the end."""
    fields = f"{{'descr': '{dtype.newbyteorder('<').str}', 'fortran_order': False, 'shape': ({length},), }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + fields.ljust(117).encode("ascii") + b"\n"


class ShardWriter:
    """Writes one split (of one source). Tokens go to disk as they come; a shard's name appears when it is complete."""

    def __init__(
        self, data_dir: str | Path, split: str, vocab_size: int, eot_id: int, shard_tokens: int = SHARD_TOKENS,
        source: str = "",
    ) -> None:  # fmt: skip
        assert 0 <= eot_id < vocab_size, f"{eot_id=} {vocab_size=}"
        assert source == Path(source).name, f"{source=} must be a plain directory name"
        self.dir, self.split, self.source = Path(data_dir), split, source
        self.vocab_size, self.eot_id, self.shard_tokens = vocab_size, eot_id, shard_tokens
        self.dtype = token_dtype(vocab_size)
        self.shards: list[dict] = []  # manifest entries of the shards that are complete
        self.file = None  # of the shard being written

    def add(self, ids: np.ndarray, n_bytes: int) -> None:
        """Append one document: its token ids (1-D, any integer type) and the length of its text in UTF-8 bytes.

        Raises DataError for an id outside the vocabulary: a cast would wrap it silently into another token.
        """
        ids = np.asarray(ids)
        assert ids.ndim == 1 and (ids.dtype.kind in "iu" or not len(ids)), f"{ids.shape=} {ids.dtype=}"
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            bad = ids.min() if ids.min() < 0 else ids.max()
            raise DataError(f"data: token id {bad} is outside the tokenizer's vocab_size={self.vocab_size}")
        if self.file and self.n_tokens + 1 + len(ids) > self.shard_tokens:
            self._finish_shard(closing=False)
        if not self.file:
            self._open_shard()
        self.starts.append(self.n_tokens)
        self._write([self.eot_id])
        self._write(ids)
        self.n_bytes += n_bytes

    def close(self) -> list[dict]:
        """Finish the split; its shards as entries for `write_manifest`. A split without documents has none."""
        if self.file:
            self._finish_shard(closing=True)
        return self.shards

    def _open_shard(self) -> None:
        (self.dir / self.source).mkdir(parents=True, exist_ok=True)
        self.name = f"{self.source}/{self.split}_{len(self.shards):05d}".lstrip("/")
        self.file = open(self.dir / f"{self.name}.npy.tmp", "wb", buffering=2**20)
        self.file.write(npy_header(self.dtype, 0))  # the length is filled in when it is known
        self.n_tokens, self.n_bytes, self.starts = 0, 0, []

    def _write(self, ids: np.ndarray | list[int]) -> None:
        self.file.write(np.asarray(ids).astype(self.dtype.newbyteorder("<")).tobytes())
        self.n_tokens += len(ids)

    def _finish_shard(self, closing: bool) -> None:
        n_documents, end = len(self.starts), self.n_tokens
        if closing:
            self._write([self.eot_id])
        self.file.seek(0)
        self.file.write(npy_header(self.dtype, self.n_tokens))
        self.file.close()
        self.file = None
        tokens, offsets = self.dir / f"{self.name}.npy", self.dir / f"{self.name}.off.npy"
        with open(f"{offsets}.tmp", "wb") as f:
            f.write(npy_header(np.dtype(np.int64), n_documents + 1))
            f.write(np.array([*self.starts, end], dtype="<i8").tobytes())
        for path in (tokens, offsets):
            os.replace(f"{path}.tmp", path)
        self.shards.append({
            "split": self.split, "source": self.source, "file": f"{self.name}.npy", "offsets": f"{self.name}.off.npy",
            "tokens": self.n_tokens, "documents": n_documents, "bytes": self.n_bytes, "sha256": file_sha256(tokens),
            "offsets_sha256": file_sha256(offsets),
        })  # fmt: skip


def write_manifest(
    data_dir: str | Path, vocab_size: int, eot_id: int, tokenizer_fingerprint: str, shards: list[dict], info: dict,
    weights: Mapping[str, float] = {},
) -> dict:  # fmt: skip
    """Declare the directory complete. `info` is the preparer's own record (inputs, configuration, counts); `weights`
    are the named sources' shares in training, if they have any."""
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
        manifest["sources"] = source_totals(manifest, names)
        for name, entry in manifest["sources"].items():
            entry |= {"weight": weights[name]} if weights else {}
    write_json(Path(data_dir, "manifest.json"), manifest)
    return manifest


def source_totals(manifest: dict, names: Sequence[str]) -> dict[str, dict]:
    """What the train split holds of each named source: tokens, documents, bytes."""
    found = {name: {"tokens": 0, "documents": 0, "bytes": 0} for name in names}
    for shard in manifest["splits"].get("train", {"shards": []})["shards"]:
        for total in found[shard["source"]]:
            found[shard["source"]][total] += shard[total]
    return found


def write_json(path: Path, value: dict) -> None:
    """Write a JSON file, whole or not at all."""
    with open(f"{path}.tmp", "w", encoding="utf-8") as f:
        json.dump(value, f, indent=1, ensure_ascii=False)
        f.flush()
        os.fsync(f.fileno())
    os.replace(f"{path}.tmp", path)


# ---- token files: reader ---------------------------------------------------------------------------------------------


def read_manifest(data_dir: str | Path) -> dict:
    """manifest.json of a data directory. Raises DataError where there is none, or another program's."""
    path = Path(data_dir, "manifest.json")
    how = f"run: python prepare.py --input=... --out_dir={data_dir}"
    if not Path(data_dir).is_dir():
        raise DataError(f"data: no directory {data_dir}; {how}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"data: {data_dir} is not prepared, or not completely: no manifest.json; {how}") from None
    except ValueError as error:
        raise DataError(f"data: {path} is damaged ({error}); {how}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        if isinstance(manifest, dict) and "rows" in str(manifest.get("format")):
            raise DataError(f"data: {data_dir} was prepared with kind='chat' or 'preference', this needs kind='text'")
        raise DataError(f"data: {path} is not of the format {FORMAT!r}; {how}")
    return manifest


def locate(path: str | Path) -> tuple[Path, str | None]:
    """'data/x' -> (data/x, None); 'data/x/wiki' -> (data/x, 'wiki') if the manifest of data/x names that source."""
    path = Path(path)
    if not (path / "manifest.json").exists() and (path.parent / "manifest.json").exists():
        sources = read_manifest(path.parent).get("sources", {})
        if path.name in sources:
            return path.parent, path.name
        if sources and not path.exists():
            raise DataError(f"data: {path.parent} has no source {path.name!r} (has: {', '.join(sources)})")
    return path, None


def map_array(path: Path, dtype: str, length: int) -> np.ndarray:
    """Read-only memory map of a 1-D .npy file. Raises DataError if it is not what the manifest says."""
    header = npy_header(np.dtype(dtype), length)
    try:
        with open(path, "rb") as f:
            found = f.read(len(header))
            size, expected = f.seek(0, os.SEEK_END), len(header) + length * np.dtype(dtype).itemsize
    except FileNotFoundError:
        raise DataError(f"data: {path} is missing; copy it again or rerun prepare.py") from None
    if found != header:
        begins = found[10:].decode("ascii", "replace").strip()
        raise DataError(f"data: {path} is no .npy file of {length} {dtype} (begins {begins!r}); rerun prepare.py")
    if size != expected:
        raise DataError(f"data: {path} ends at byte {size} instead of {expected}; copy it again or rerun prepare.py")
    mapped = np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r", offset=len(header), shape=(length,))
    return np.asarray(mapped)  # the same memory; slices of the subclass np.memmap take three times as long


def check_ids(ids: np.ndarray, vocab_size: int, path: Path, offset: int) -> None:
    """Raise DataError naming the first id >= vocab_size; ids[0] is token `offset` of the file."""
    if ids.max(initial=0) >= vocab_size:
        first = int(np.argmax(ids >= vocab_size))
        raise DataError(
            f"data: {path} holds token id {ids[first]} at offset {offset + first}, but the tokenizer has "
            f"vocab_size={vocab_size}; rerun prepare.py"
        )


class TokenData:
    """One split of a data directory, or of one of its sources, as one long row of tokens, mapped read-only.

    The sizes of its files are checked here and ids as they are fetched, so a terabyte opens fast. `verify` reads all.
    """

    def __init__(self, data_dir: str | Path, split: str, source: str | None = None) -> None:
        """source: None = all that data_dir names, one after the other."""
        self.split = split
        self.dir, found = locate(data_dir)
        source = found if source is None else source
        self.manifest = read_manifest(self.dir)
        self.vocab_size: int = self.manifest["vocab_size"]
        self.eot_id: int = self.manifest["eot_id"]
        self.tokenizer_fingerprint: str = self.manifest["tokenizer_fingerprint"]
        of_splits = {
            name: [shard for shard in entry["shards"] if source in (None, shard.get("source", ""))]
            for name, entry in self.manifest["splits"].items()
        }
        if not of_splits.get(split):
            has = ", ".join(name for name, shards in of_splits.items() if shards) or "none"
            where = self.dir / (source or "")
            raise NoSplit(f"data: {where} has no split {split!r} (has: {has}); rerun prepare.py with more text")
        self.entries = of_splits[split]
        self.n_bytes: int = sum(shard["bytes"] for shard in self.entries)
        self.n_documents: int = sum(shard["documents"] for shard in self.entries)
        self.offsets = [
            map_array(self.dir / shard["offsets"], "int64", shard["documents"] + 1) for shard in self.entries
        ]
        self._map_tokens(self.entries)

    def _map_tokens(self, shards: list[dict]) -> None:
        self.paths = [self.dir / shard["file"] for shard in shards]
        self.shards = [
            map_array(path, self.manifest["dtype"], shard["tokens"])
            for path, shard in zip(self.paths, shards, strict=True)
        ]
        self.ends = np.cumsum([len(shard) for shard in self.shards])  # of each shard, in tokens of the split
        self.n_tokens = int(self.ends[-1])

    @property
    def fingerprint(self) -> str:
        """sha256 of what decides the token stream: equal fingerprints, equal tokens."""
        parts = [FORMAT, self.split, self.tokenizer_fingerprint, self.vocab_size]
        parts += [shard["sha256"] for shard in self.entries]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def check_tokenizer(self, fingerprint: str) -> None:
        """Raise DataError unless `fingerprint` (`Tokenizer.fingerprint()`) made these tokens."""
        if fingerprint != self.tokenizer_fingerprint:
            raise DataError(
                f"data: {self.dir} was prepared with another tokenizer ({self.tokenizer_fingerprint[:12]}, not "
                f"{fingerprint[:12]}); put its tokenizer files back or rerun prepare.py"
            )

    def window(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) as int64, across shards. Raises DataError for an id beyond the vocabulary."""
        assert 0 <= start and start + length <= self.n_tokens, f"{start=} {length=} {self.n_tokens=}"
        out = np.empty(length, dtype=np.int64)
        filled, k = 0, int(np.searchsorted(self.ends, start, side="right"))
        while filled < length:
            shard = self.shards[k]
            begin = start + filled - (int(self.ends[k]) - len(shard))
            piece = shard[begin : begin + length - filled]
            check_ids(piece, self.vocab_size, self.paths[k], begin)
            out[filled : filled + len(piece)] = piece
            filled, k = filled + len(piece), k + 1
        return out

    def valid(self, starts: np.ndarray, length: int) -> np.ndarray:
        """How many tokens of the windows that begin at `starts` are to be trained on: here all `length`."""
        return np.full(len(starts), length)


def verify(data_dir: str | Path) -> dict:
    """Read every byte of a data directory and compare it with the manifest, which is returned.

    Raises DataError for the first file whose sha256, size, offsets, document starts, ids or totals are not as promised.
    """
    manifest = read_manifest(data_dir)
    for split, entry in manifest["splits"].items():
        for source in dict.fromkeys(shard.get("source", "") for shard in entry["shards"]):
            data = TokenData(data_dir, split, source)
            for k, shard in enumerate(data.entries):
                verify_sha256(data.dir / shard["file"], shard["sha256"])
                verify_sha256(data.dir / shard["offsets"], shard["offsets_sha256"])
                verify_shard(data, k, last=k == len(data.entries) - 1)
        for total in ("tokens", "documents", "bytes"):
            if sum(shard[total] for shard in entry["shards"]) != entry[total]:
                raise DataError(f"data: {data.dir}/manifest.json: {total} of {split} do not add up; rerun prepare.py")
    sources = manifest.get("sources", {})
    for source, totals in source_totals(manifest, list(sources)).items() if sources else ():
        if totals.items() - sources[source].items():
            raise DataError(f"data: {data_dir}/manifest.json: {source} does not add up; rerun prepare.py")
    for path in sorted(Path(data_dir).glob("train_pack*.json")):
        for packed in read_packing(path)["sources"].values():
            for file, sha256 in packed["sha256"].items():
                verify_sha256(path.parent / file, sha256)
    return manifest


def verify_sha256(path: Path, sha256: str) -> None:
    if not path.exists():
        raise DataError(f"data: {path} is missing; copy it again or rerun prepare.py")
    if file_sha256(path) != sha256:
        raise DataError(f"data: {path} changed since it was written (sha256); rerun prepare.py")


def verify_shard(data: TokenData, k: int, last: bool) -> None:
    """Ids, offsets and delimiters of one shard, a block at a time."""
    tokens, offsets, path = data.shards[k], data.offsets[k], data.paths[k]
    for begin in range(0, len(tokens), 2**24):
        check_ids(tokens[begin : begin + 2**24], data.vocab_size, path, begin)
    closing = [len(tokens) - 1] if last else []  # the last shard of a split ends with one more delimiter
    if offsets[0] != 0 or np.any(np.diff(offsets) < 1) or offsets[-1] != len(tokens) - len(closing):
        raise DataError(f"data: the document offsets of {path} are not increasing from 0 to its end; rerun prepare.py")
    starts = np.concatenate([offsets[:-1], closing]).astype(np.int64)
    wrong = starts[tokens[starts] != data.eot_id]
    if len(wrong):
        raise DataError(f"data: {path} has no <|endoftext|> at offset {wrong[0]}; rerun prepare.py")


# ---- packing ---------------------------------------------------------------------------------------------------------


class Packing(NamedTuple):
    """Which piece of which document lies in which row; int64, one element per piece, in the order of the rows."""

    document: np.ndarray
    begin: np.ndarray  # of the piece within its document, not counting the document's delimiter
    length: np.ndarray  # with the delimiter that opens the piece
    row: np.ndarray
    n_rows: int
    n_cut: int  # documents longer than a row

    @property
    def used(self) -> np.ndarray:
        """(n_rows,) tokens of each row that belong to documents."""
        return np.bincount(self.row, self.length, self.n_rows).astype(np.int64)


def pack_rows(lengths: np.ndarray, row_tokens: int, seed: int) -> Packing:
    """Documents of `lengths` tokens (delimiter included) -> rows of row_tokens that each begin with a delimiter.

    Best fit decreasing: the longest pieces first, equal ones in a seeded order, each to the fullest row that has room
    (Ding et al. 2024, arXiv:2404.10830). A longer document is cut into pieces, each opened by a delimiter of its own.
    """
    room = row_tokens - 1  # behind the delimiter
    content = np.asarray(lengths, dtype=np.int64) - 1
    n_pieces = np.maximum(1, -(-content // room))
    document = np.repeat(np.arange(len(content)), n_pieces)
    begin = room * (np.arange(len(document)) - np.repeat(np.cumsum(n_pieces) - n_pieces, n_pieces))
    length = 1 + np.minimum(room, content[document] - begin)
    shuffled = permute(np.arange(len(document)), len(document), hash_words(8, "pack", seed))
    falling = np.lexsort((shuffled, -length))
    row = np.empty_like(document)
    row[falling] = best_fit(length[falling].tolist(), row_tokens)
    by_row = np.lexsort((shuffled, row))  # within a row not by length: long ones would always come first
    n_rows, n_cut = int(row.max(initial=-1)) + 1, int((n_pieces > 1).sum())
    return Packing(document[by_row], begin[by_row], length[by_row], row[by_row], n_rows, n_cut)


def best_fit(lengths: list[int], row_tokens: int) -> list[int]:
    """The row of each piece, in turn: the one with the least room that is enough, else a new one."""
    rows: list[int] = []
    n_rows, with_room = 0, [[] for _ in range(row_tokens + 1)]  # rows by the room they have left
    rooms = 0  # bit r is set if with_room[r] is not empty: the least r >= length is the lowest bit of a shift
    for length in lengths:
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row, n_rows = row_tokens, n_rows, n_rows + 1
        if room > length:
            with_room[room - length].append(row)
            rooms |= 1 << (room - length)
        rows.append(row)
    return rows


def pack(data_dir: str | Path, block_size: int, seed: int = 0, shard_tokens: int = SHARD_TOKENS) -> dict:
    """Pack the train split of each source into rows of block_size + 1 tokens; the record that says what became of it.

    Beside the train shards there are then train_pack1024_00000.npy, ..., rows one after the other, and
    train_pack1024.len.npy, int32: how many tokens of each row are to be trained on. What documents leave of a row is
    filled with delimiters, of which the first counts: it ends the last document. train_pack1024.json is written last.
    """
    assert block_size > 0, f"{block_size=}"
    shards = TokenData(data_dir, "train").entries
    record = {"format": FORMAT, "block_size": block_size, "seed": seed, "sources": {}}
    path = Path(data_dir, f"train_pack{block_size}.json")
    path.unlink(missing_ok=True)  # of an earlier packing, whose files are overwritten now
    for source in dict.fromkeys(shard.get("source", "") for shard in shards):
        data = TokenData(data_dir, "train", source)
        record["sources"][source] = pack_source(data, source, block_size, seed, shard_tokens)
    write_json(path, record)
    return record


def pack_source(data: TokenData, source: str, block_size: int, seed: int, shard_tokens: int) -> dict:
    """Write the packed rows of one source; its entry for the record."""
    begins = data.ends - [len(shard) for shard in data.shards]
    starts = np.concatenate([begin + offsets[:-1] for begin, offsets in zip(begins, data.offsets, strict=True)])
    packing = pack_rows(np.concatenate([np.diff(offsets) for offsets in data.offsets]), block_size + 1, seed)
    name, used = f"{source}/train_pack{block_size}".lstrip("/"), packing.used
    entry = {
        "fingerprint": data.fingerprint, "documents": data.n_documents, "cut": packing.n_cut, "rows": packing.n_rows,
        "pieces": len(packing.row), "filled": int((block_size + 1 - used).sum()),
        "lengths": f"{name}.len.npy", "shards": [], "sha256": {},
    }  # fmt: skip
    save_array(data.dir / entry["lengths"], np.minimum(used + 1, block_size + 1).astype(np.int32))
    per_shard = max(1, shard_tokens // (block_size + 1))
    for k, first in enumerate(range(0, packing.n_rows, per_shard)):
        rows = packed_rows(data, starts, packing, first, min(first + per_shard, packing.n_rows), block_size + 1)
        entry["shards"].append({"file": f"{name}_{k:05d}.npy", "tokens": rows.size})
        save_array(data.dir / f"{name}_{k:05d}.npy", rows.ravel())
    files = [entry["lengths"], *(shard["file"] for shard in entry["shards"])]
    entry["sha256"] = {file: file_sha256(data.dir / file) for file in files}
    return entry


def packed_rows(
    data: TokenData, starts: np.ndarray, packing: Packing, first: int, end: int, row_tokens: int
) -> np.ndarray:
    """Rows first to end - 1, (end - first, row_tokens), of documents that start at `starts`."""
    rows = np.full((end - first, row_tokens), data.eot_id, dtype=token_dtype(data.vocab_size))
    row, place = -1, 0
    for piece in range(*np.searchsorted(packing.row, [first, end])):
        place = place if packing.row[piece] == row else 0
        row, n = int(packing.row[piece]), int(packing.length[piece])
        start = int(starts[packing.document[piece]] + 1 + packing.begin[piece])
        rows[row - first, place + 1 : place + n] = data.window(start, n - 1)
        place += n
    return rows


def save_array(path: Path, array: np.ndarray) -> None:
    """Write a 1-D .npy file, whole or not at all."""
    with open(f"{path}.tmp", "wb") as f:
        f.write(npy_header(array.dtype, len(array)))
        f.write(array.astype(array.dtype.newbyteorder("<")).tobytes())
    os.replace(f"{path}.tmp", path)


def read_packing(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"data: {path} is damaged ({error}); rerun prepare.py") from None


class PackedData(TokenData):
    """The train split of one source as `pack` has laid it out: window (row, block_size + 1) begins with a document."""

    def __init__(self, data_dir: str | Path, block_size: int, source: str = "") -> None:
        super().__init__(data_dir, "train", source)
        path, self.block_size = self.dir / f"train_pack{block_size}.json", block_size
        how = f"run: python prepare.py {self.dir}/config.py --pack={block_size}"
        if not path.exists():
            raise DataError(f"data: {self.dir} is not packed for block_size={block_size}; {how}")
        record = read_packing(path)
        self.packed = record["sources"].get(source)
        if not self.packed or self.packed["fingerprint"] != super().fingerprint:
            raise DataError(f"data: {path} is not of the tokens that are there now; {how}")
        self.lengths = map_array(self.dir / self.packed["lengths"], "int32", self.packed["rows"])
        self._map_tokens(self.packed["shards"])

    @property
    def fingerprint(self) -> str:
        """sha256 of what decides the rows."""
        return hashlib.sha256(json.dumps([FORMAT, self.block_size, self.packed["sha256"]]).encode()).hexdigest()

    def valid(self, starts: np.ndarray, length: int) -> np.ndarray:
        """(n,) int64: how many of the tokens of these rows belong to documents, and the delimiter after the last."""
        return self.lengths[starts // (self.block_size + 1)].astype(np.int64)


# ---- several sources -------------------------------------------------------------------------------------------------


def sources_of(path: str) -> dict[tuple[Path, str], tuple[float, int]]:
    """{(directory, source): (share, train tokens)} of what a path names; the shares add up to 1.

    They are the manifest's weights, or, where it has none, in proportion to the tokens; what has share 0 is left out.
    """
    directory, only = locate(path)
    manifest, directory = read_manifest(directory), directory.resolve()  # two ways to write a path are one source
    sources = manifest.get("sources") or {"": {"tokens": manifest["splits"].get("train", {"tokens": 0})["tokens"]}}
    if only is not None:
        sources = {only: sources[only]}
    key = "weight" if len(sources) > 1 and all("weight" in entry for entry in sources.values()) else "tokens"
    sources = {name: entry for name, entry in sources.items() if entry["tokens"]}  # prepare.py has said which have none
    total = sum(entry[key] for entry in sources.values())
    if not total:
        raise NoSplit(f"data: {path} has no split 'train'; rerun prepare.py with more text")
    return {(directory, s): (entry[key] / total, entry["tokens"]) for s, entry in sources.items() if entry[key]}


def val_sources(val_data: str) -> dict[tuple[Path, str], float]:
    """{(directory, source): weight} of the validation splits that val_data names; what has no weight of its own weighs
    what tokens it has. Raises NoSplit."""
    found = {}
    for path, weight in parse_weights(val_data, val_data, "val_data").items():
        directory, only = locate(path)
        shards = read_manifest(directory)["splits"].get("val", {"shards": []})["shards"]
        tokens = Counter()
        for shard in shards:
            tokens[shard.get("source", "")] += shard["tokens"]
        tokens = {source: n for source, n in tokens.items() if only in (None, source)}
        if not tokens:
            raise NoSplit(f"data: val_data: {path} has no split 'val'; rerun prepare.py with more text or val_fraction")
        total = sum(tokens.values())
        for source, n in tokens.items():
            found[directory.resolve(), source] = n if weight is None else weight * n / total
    return found


def names_of(keys: Sequence[tuple[Path, str]]) -> list[str]:
    """What the log calls these (directory, source): the source or directory, the path where that names two."""
    names = [source or directory.resolve().name for directory, source in keys]
    paths = [os.path.relpath(directory / source) for directory, source in keys]
    return [name if names.count(name) == 1 else path for name, path in zip(names, paths, strict=True)]


class Corpus:
    """The sources that a data_dir string names (mixture.py has its syntax), opened, and their weights in each stage.

    names: what the log calls them. train: their tokens. val: by name the validation splits of the sources that val_data
    names in the same way, else of their own; no_val: why others have none. Raises DataError if all have none, or if not
    all were made by the same tokenizer.
    """

    def __init__(self, spec: str, block_size: int, pack: bool = False, val_data: str = "") -> None:
        self.block_size = block_size
        stages = parse_data_dir(spec)
        self.by_path = {path: sources_of(path) for stage in stages for path in stage.weights}
        self.keys = list(dict.fromkeys(key for found in self.by_path.values() for key in found))
        self.names = names_of(self.keys)
        self.stages = [(stage.first_step, self._weights(stage.weights)) for stage in stages]
        if pack:
            self.train = [PackedData(directory, block_size, source) for directory, source in self.keys]
        else:
            self.train = [TokenData(directory, "train", source) for directory, source in self.keys]
        self.dir = self.train[0].dir  # where the tokenizer lies
        for data in self.train:
            data.check_tokenizer(self.train[0].tokenizer_fingerprint)
        self.val_weights = val_sources(val_data) if val_data else {}
        evaluated = list(self.val_weights) if val_data else self.keys
        self.val, self.no_val = {}, {}
        for name, (directory, source) in zip(names_of(evaluated), evaluated, strict=True):
            try:
                self.val[name] = TokenData(directory, "val", source)
                self.val[name].check_tokenizer(self.train[0].tokenizer_fingerprint)
                val_window_count(self.val[name], block_size)
            except NoSplit as error:
                self.val.pop(name, None)
                self.no_val[name] = error
        if not self.val or (val_data and self.no_val):
            raise next(iter(self.no_val.values()))

    def _weights(self, weights: dict[str, float | None]) -> list[float]:
        """Weight of each source in a stage, from those of its paths; without any, paths weigh what tokens they have."""
        found = dict.fromkeys(self.keys, 0.0)
        for path, weight in weights.items():
            sources = self.by_path[path]
            weight = sum(tokens for _, tokens in sources.values()) if weight is None and len(weights) > 1 else weight
            for key, (share, _) in sources.items():
                if found[key]:
                    raise DataError(f"data: {path} names {key[0] / key[1]} a second time in one stage; name it once")
                found[key] = share * (1.0 if weight is None else weight)
        return list(found.values())

    def order(
        self, seed: int, samples_per_step: int, max_steps: int, max_epochs: str = "", competence: float = 1.0,
        competence_steps: int = 0, competence_schedule: str = "sqrt",
    ) -> Mixture:  # fmt: skip
        """Which window every sample is. Raises DataError if max_epochs lets the data end before max_steps."""
        samplers = [
            Sampler(data.n_tokens, self.block_size, seed, k, isinstance(data, PackedData), name)
            for k, (name, data) in enumerate(zip(self.names, self.train, strict=True))
        ]
        most = self._most_epochs(max_epochs)
        limits = [
            max(1, int(most[key] * sampler.n_windows)) if key in most else float("inf")
            for key, sampler in zip(self.keys, samplers, strict=True)
        ]
        stages = [(step * samples_per_step, weights) for step, weights in self.stages]
        order = Mixture(samplers, seed, stages, self.names, limits)
        check_end(order, samples_per_step, max_steps, max_epochs)
        if competence < 1:
            self._check_sorted()
            n_samples = order.counts(competence_steps * samples_per_step).tolist()
            order.samplers = [
                Curriculum(sampler, n, competence, competence_schedule)
                for sampler, n in zip(samplers, n_samples, strict=True)
            ]
        return order

    def _most_epochs(self, max_epochs: str) -> dict[tuple[Path, str], float]:
        """{source: limit} from the key of that name."""
        most = {}
        for path, limit in parse_max_epochs(max_epochs).items():
            named = self.by_path.get(path) or (sources_of(path) if path else self.keys)
            if foreign := [key for key in named if key not in self.keys]:
                raise DataError(f"data: max_epochs names {foreign[0][0] / foreign[0][1]}, which data_dir does not")
            if twice := [key for key in named if key in most]:
                raise DataError(f"data: max_epochs={max_epochs!r} names {twice[0][0] / twice[0][1]} twice")
            most |= dict.fromkeys(named, limit)
        return most

    def _check_sorted(self) -> None:
        for data in self.train:
            order = data.manifest["info"].get("recipe", {}).get("order", "")
            if isinstance(data, PackedData):
                raise DataError("data: packed rows are in no order of difficulty; use competence or pack, not both")
            if order not in SORTED:
                raise DataError(
                    f"data: competence needs documents from easy to hard, but {data.dir} was prepared with {order=}; "
                    f"rerun prepare.py with --order={SORTED[0]} (or {', '.join(SORTED[1:])})"
                )

    def record(self) -> dict[str, list]:
        """What, besides options and seed, decides the order of samples, see `same_order`."""
        return {"data": [data.fingerprint for data in self.train], "stages": stage_quotas(self.stages)}

    def describe(self, order: Mixture, n_samples: int) -> tuple[str, list[str]]:
        """How often n_samples samples go through each source; lines that warn."""
        several, epochs = len(self.names) > 1, order.epochs(n_samples).tolist()
        text = ", ".join(
            f"{times:.2f} epochs of {data.n_tokens:,}" + (f" ({name})" if several else "")
            for name, data, times in zip(self.names, self.train, epochs, strict=True)
        )
        lines = [f"warning     {error}; {name} is not evaluated" for name, error in self.no_val.items()]
        lines += repeats(order, n_samples)
        return text, lines

    def report(self) -> list[str]:
        """Lines for people: what each source and each validation split holds, and of which files it was made."""
        splits = [*zip(self.names, self.train, strict=True), *self.val.items()]
        lines = [
            f"{name} {data.split}: {data.n_documents:,} documents, {data.n_bytes:,} bytes, {data.n_tokens:,} "
            f"tokens, fingerprint {data.fingerprint[:16]}"
            for name, data in splits
        ]
        inputs = {entry["path"]: entry for data in self.train for entry in data.manifest["info"].get("inputs", [])}
        lines += [f"  made of {path}, sha256 {entry['sha256'][:16]}" for path, entry in list(inputs.items())[:20]]
        return lines + ([f"  and {len(inputs) - 20:,} more files"] if len(inputs) > 20 else [])

    def tokens_seen(self, order: Mixture, n_samples: int) -> dict[str, int]:
        """{"tokens/name": tokens} of each source among the first n_samples samples; {} if there is only one source."""
        counts = (order.counts(n_samples) * self.block_size).tolist()
        return {f"tokens/{name}": n for name, n in zip(self.names, counts, strict=True)} if len(counts) > 1 else {}

    def val_shares(self) -> list[float]:
        """The weight of each of `val` in the whole validation loss: that of val_data, else that of its source in
        the last stage, which is what training ends with, whatever eval_steps is."""
        if self.val_weights:
            weights = list(self.val_weights.values())
            return [weight / sum(weights) for weight in weights]
        return evaluation_weights(list(self.val), self.names, self.stages)

    def val_batches(
        self, batch_size: int, eval_steps: int, rank: int = 0, world_size: int = 1
    ) -> dict[str, Iterator[tuple["torch.Tensor", "torch.Tensor"]]]:
        """This rank's evaluation batches of each source; eval_steps in all, shared out evenly, at least one each.
        `val_shares` says how their losses are put together."""
        found = {}
        for k, (name, data) in enumerate(self.val.items()):
            steps, first = eval_windows(k, len(self.val), eval_steps, rank, world_size)
            found[name] = val_batches(data, self.block_size, batch_size, steps, first, world_size)
        return found


# what other corpora of several sources do alike


def check_end(order: Mixture, samples_per_step: int, max_steps: int, max_epochs: str) -> None:
    """Raise DataError if max_epochs lets the data end before max_steps."""
    if order.end is not None and order.end < max_steps * samples_per_step:
        last = order.end // samples_per_step
        lower = f"lower max_steps={max_steps} to that or " if last else ""
        raise DataError(f"data: with max_epochs={max_epochs!r} the data end after step {last}; {lower}raise max_epochs")


def stage_quotas(stages: Sequence[tuple[int, Sequence[float]]]) -> list:
    """(first step, weights) of each stage as what decides the order: samples of each source in a block."""
    return [[first_step, quotas(np.array(weights)).tolist()] for first_step, weights in stages]


def repeats(order: Mixture, n_samples: int) -> list[str]:
    """Lines that warn of sources that n_samples samples go through too often."""
    return [
        f"warning     {name} is seen {times:.1f} times; beyond {MANY_EPOCHS} repetition adds little "
        "(arXiv:2305.16264): prepare more text, lower its weight or set max_epochs"
        for name, times, limit in zip(order.names, order.epochs(n_samples).tolist(), order.limits, strict=True)
        if times > MANY_EPOCHS and limit == float("inf")
    ]


def evaluation_weights(
    evaluated: Sequence[str], names: Sequence[str], stages: Sequence[tuple[int, Sequence[float]]]
) -> list[float]:
    """The weights of the sources that are evaluated in the last stage, adding up to 1."""
    weights = [stages[-1][1][names.index(name)] for name in evaluated]
    weights = weights if any(weights) else [1.0] * len(weights)
    return [weight / sum(weights) for weight in weights]


def eval_windows(k: int, n_sources: int, eval_steps: int, rank: int, world_size: int) -> tuple[int, int]:
    """(batches of source k, 0 = all, of eval_steps for all sources; which rank counts as 0): last batches, which may be
    small, go to different ranks."""
    steps = max(1, eval_steps // n_sources + (k < eval_steps % n_sources)) if eval_steps else 0
    return steps, (rank + k) % world_size


def spread(n_windows: int, batch_size: int, eval_steps: int, rank: int, world_size: int) -> Iterator[np.ndarray]:
    """This rank's share of eval_steps batches of window numbers, spread evenly; 0, or more than there are: all."""
    n = min(eval_steps * batch_size, n_windows) if eval_steps else n_windows
    chosen = np.arange(n) * n_windows // max(n, 1)
    for first in range(rank * batch_size, n, world_size * batch_size):
        yield chosen[first : first + batch_size]


def same_order(saved: dict[str, list], now: dict[str, list], step: int) -> str:
    """Which entry of two `Corpus.record`s gives the first `step` steps another order, "" if none does. Stages that
    begin later may be changed or added, with sources of their own behind the others."""
    stages = []
    for record in (saved, now):
        begun = [stage for stage in record["stages"] if stage[0] < max(step, 1)]
        stages.append([[first, np.trim_zeros(quotas, "b")] for first, quotas in begun])
    used = max(len(quotas) for _, quotas in stages[0])
    if saved["data"][:used] != now["data"][:used]:
        return "data"
    return "" if stages[0] == stages[1] else "stages"


# ---- batches ---------------------------------------------------------------------------------------------------------


class Windows(NamedTuple):
    x: "torch.Tensor"  # (B, T) int64
    y: "torch.Tensor"  # (B, T) int64, IGNORE where nothing is learnt


def load_windows(data: Sequence[TokenData], sources: np.ndarray, starts: np.ndarray, block_size: int) -> Windows:
    """Inputs and targets, each (len(starts), block_size) int64: targets are the inputs one token later, or IGNORE.

    Window i begins at starts[i] of data[sources[i]].
    """
    import torch

    rows = np.stack([data[s].window(int(at), block_size + 1) for s, at in zip(sources, starts, strict=True)])
    x, y = rows[:, :-1].copy(), rows[:, 1:].copy()
    y[np.arange(block_size) >= valid_targets(data, sources, starts, block_size)[:, None]] = IGNORE
    return Windows(torch.from_numpy(x), torch.from_numpy(y))


def valid_targets(data: Sequence[TokenData], sources: np.ndarray, starts: np.ndarray, block_size: int) -> np.ndarray:
    """(n,) int64: how many targets of each window are trained on, the first ones."""
    found = np.empty(len(starts), dtype=np.int64)
    for source in np.unique(sources):
        found[sources == source] = data[source].valid(starts[sources == source], block_size + 1) - 1
    return found


Load = Callable[[np.ndarray, np.ndarray], tuple]  # (sources, starts of windows in these) -> a NamedTuple of tensors
Valid = Callable[[np.ndarray, np.ndarray], np.ndarray]  # likewise -> (n,) how much of each window is trained on


def in_each(batch: tuple, do: "Callable[[torch.Tensor], torch.Tensor]") -> tuple:
    """A NamedTuple of tensors with something done to each; None stays."""
    return batch._make(None if tensor is None else do(tensor) for tensor in batch)


class Batches:
    """This rank's micro-batches, from start_step on for ever, loaded ahead by a thread.

    load(sources, starts) makes a micro-batch, a NamedTuple of tensors, and valid(sources, starts) tells how many
    targets each of its windows has, or their weight. Without them: (x, y) of windows of `data`.

    A step of B = batch_size * accum_steps * world_size samples takes the samples step * B ... step * B + B - 1; rank r
    has the r-th part of them, cut into micro-batches in order. So the samples of a step, and their order, depend on
    neither the number of ranks nor that of micro-steps.
    """

    def __init__(
        self, data: Sequence[TokenData], order: Mixture, block_size: int, batch_size: int, accum_steps: int,
        rank: int = 0, world_size: int = 1, device: "str | torch.device" = "cpu", start_step: int = 0, ahead: int = 4,
        load: Load | None = None, valid: Valid | None = None,
    ) -> None:  # fmt: skip
        import torch

        assert 0 <= rank < world_size, f"{rank=} {world_size=}"
        assert batch_size > 0 and accum_steps > 0, f"{batch_size=} {accum_steps=}"
        self.data, self.order, self.block_size = data, order, block_size
        self.load = load or partial(load_windows, data, block_size=block_size)
        self.valid = valid or partial(valid_targets, data, block_size=block_size)
        self.all_valid = valid is None and not any(isinstance(split, PackedData) for split in data)
        self.batch_size, self.accum_steps = batch_size, accum_steps
        self.rank, self.start_step, self.device = rank, start_step, torch.device(device)
        if self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.samples_per_step = batch_size * accum_steps * world_size
        self.queue: queue.Queue = queue.Queue(maxsize=ahead)
        self.stop, self.error = threading.Event(), None
        self.thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self.thread.start()

    def position(self, step: int) -> int:
        """Number of the first sample of a step (the first step is 0), over all ranks."""
        return step * self.samples_per_step

    def valid_tokens(self, step: int) -> int | float:
        """Targets of a step (from 0) that are trained on, or their weight, over all ranks, from the order alone."""
        if self.all_valid:
            return self.samples_per_step * self.block_size
        samples = np.arange(self.position(step), self.position(step + 1))
        return self.valid(*self.order.start(samples)).sum().item()

    def samples(self, step: int, micro_step: int) -> np.ndarray:
        """Sample numbers of this rank's micro-batch, (batch_size,) int64."""
        first = self.position(step) + (self.rank * self.accum_steps + micro_step) * self.batch_size
        return np.arange(first, first + self.batch_size)

    def next(self) -> tuple:
        """The next micro-batch on the device: x and y (batch_size, block_size) int64, or what `load` makes. Raises what
        the thread raised."""
        if self.error is None:
            item = self.queue.get()
            self.error = item if isinstance(item, BaseException) else None
        if self.error is not None:
            raise self.error
        pinned = self.device.type == "cuda"
        return in_each(item, lambda tensor: tensor.to(self.device, non_blocking=pinned))

    def close(self) -> None:
        """End the thread. May be called again."""
        self.stop.set()
        while self.thread.is_alive():
            try:
                self.queue.get_nowait()  # make room, in case the thread waits for it
            except queue.Empty:
                self.thread.join(timeout=0.01)
        self.error = self.error or RuntimeError("next() after close()")

    def _work(self) -> None:
        try:
            for batch in self._load():
                self.queue.put(batch)
                if self.stop.is_set():
                    return
        except Exception as error:
            self.queue.put(error)  # raised by next(), in the thread that can act on it

    def _load(self) -> Iterator[tuple]:
        if self.device.type == "cuda":
            import torch

            torch.cuda.set_device(self.device)  # a thread begins on device 0; pinning there would open a context on it
        first = self.start_step * self.accum_steps
        for block in itertools.count(first, 32):  # many micro-batches' samples at once: numpy is slow on few numbers
            samples = [self.samples(*divmod(k, self.accum_steps)) for k in range(block, block + 32)]
            for sources, starts in zip(*self.order.start(np.stack(samples)), strict=True):
                batch = self.load(sources, starts)
                # from page-locked memory the copy to the device runs while the host goes on
                yield in_each(batch, lambda tensor: tensor.pin_memory()) if self.device.type == "cuda" else batch


def val_batches(
    data: TokenData, block_size: int, batch_size: int, eval_steps: int = 0, rank: int = 0, world_size: int = 1
) -> Iterator[tuple["torch.Tensor", "torch.Tensor"]]:
    """This rank's share of the evaluation batches (x, y), on the CPU: all ranks together have the same for any number.

    eval_steps batches of windows spread evenly over the split; 0, or more than there are: every window once, in order.
    """
    n_windows = val_window_count(data, block_size)
    for windows in spread(n_windows, batch_size, eval_steps, rank, world_size):
        yield load_windows([data], np.zeros_like(windows), windows * block_size, block_size)


def val_window_count(data: TokenData, block_size: int) -> int:
    """Windows of a validation split. Raises NoSplit if there is none."""
    n_windows = (data.n_tokens - 1) // block_size
    if n_windows < 1:
        raise NoSplit(
            f"data: the {data.split} split of {data.dir} has {data.n_tokens} tokens, but block_size={block_size} needs "
            f"{block_size + 1}; prepare more text or lower block_size"
        )
    return n_windows
