"""Pack documents into rows of block_size tokens with few cuts, and read such rows.

prepare.py --pack=block_size writes the rows beside the token files; pretrain.py --pack=True reads them.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from groundup.errors import UserError
from groundup.tokens import token_files
from groundup.tokens.mixture import hash_words, permute
from groundup.tokens.token_files import FORMAT, SHARD_TOKENS, TokenData, write_npy


class Packing(NamedTuple):
    """Which piece of which document is in which row; int64, one element per piece, in the order of the rows."""

    document: np.ndarray
    begin: np.ndarray  # of the piece in its document, without the document's delimiter
    length: np.ndarray  # including the delimiter that opens the piece
    row: np.ndarray
    n_rows: int
    n_cut: int  # documents longer than a row

    @property
    def used(self) -> np.ndarray:
        """(n_rows,) tokens of each row that belong to documents."""
        return np.bincount(self.row, self.length, self.n_rows).astype(np.int64)

    @property
    def most_pieces(self) -> int:
        """Pieces of the row that has most."""
        return int(np.bincount(self.row).max(initial=0))


def pack_rows(lengths: np.ndarray, row_tokens: int, seed: int) -> Packing:
    """Pack documents of `lengths` tokens (delimiter included) into rows of row_tokens that begin with a delimiter.

    Best fit decreasing: the longest pieces first, equal ones in a seeded order, each to the fullest row with room
    (Ding et al. 2024, arXiv:2404.10830). A longer document is cut into pieces, each opened by its own delimiter.
    """
    room = row_tokens - 1  # after the delimiter
    content = np.asarray(lengths, dtype=np.int64) - 1
    n_pieces = np.maximum(1, -(-content // room))
    document = np.repeat(np.arange(len(content)), n_pieces)
    begin = room * (np.arange(len(document)) - np.repeat(np.cumsum(n_pieces) - n_pieces, n_pieces))
    length = 1 + np.minimum(room, content[document] - begin)
    shuffled = permute(np.arange(len(document)), len(document), hash_words(8, "pack", seed))
    falling = np.lexsort((shuffled, -length))
    row = np.empty_like(document)
    row[falling] = best_fit(length[falling].tolist(), row_tokens)
    by_row = np.lexsort((shuffled, row))  # not by length within a row: long pieces would always come first
    n_rows, n_cut = int(row.max(initial=-1)) + 1, int((n_pieces > 1).sum())
    return Packing(document[by_row], begin[by_row], length[by_row], row[by_row], n_rows, n_cut)


def best_fit(lengths: list[int], row_tokens: int) -> list[int]:
    """Return the row of each piece, placed in turn: the row with the least sufficient room, else a new one."""
    rows: list[int] = []
    n_rows, with_room = 0, [[] for _ in range(row_tokens + 1)]  # rows by the room left
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
    """Pack the train split of each source into rows of block_size + 1 tokens and return the record of it.

    It writes, beside the train shards, train_pack1024_00000.npy, ... (the rows end to end), train_pack1024.len.npy
    (int32: how many tokens of each row are trained on) and last the record, train_pack1024.json. The rest of a row is
    filled with delimiters, of which the first counts: it ends the last document.
    """
    assert block_size > 0, f"{block_size=}"
    shards = TokenData(data_dir, "train").entries
    record = {"format": FORMAT, "block_size": block_size, "seed": seed, "sources": {}}
    path = Path(data_dir, f"train_pack{block_size}.json")
    path.unlink(missing_ok=True)  # of an earlier packing, whose files are now overwritten
    for source in dict.fromkeys(shard.get("source", "") for shard in shards):
        data = TokenData(data_dir, "train", source)
        record["sources"][source] = pack_source(data, source, block_size, seed, shard_tokens)
    token_files.write_json(path, record)
    return record


def pack_source(data: TokenData, source: str, block_size: int, seed: int, shard_tokens: int) -> dict:
    """Write the packed rows of one source and return its entry for the record."""
    starts = data.document_starts()
    packing = pack_rows(np.concatenate([np.diff(offsets) for offsets in data.offsets]), block_size + 1, seed)
    name, used = f"{source}/train_pack{block_size}".lstrip("/"), packing.used
    entry = {
        "fingerprint": data.fingerprint, "documents": data.n_documents, "cut": packing.n_cut, "rows": packing.n_rows,
        "pieces": len(packing.row), "filled": int((block_size + 1 - used).sum()),
        "most_documents": 1 + packing.most_pieces,  # the filling counts as one
        "lengths": f"{name}.len.npy", "shards": [], "sha256": {},
    }  # fmt: skip
    write_npy(data.dir / entry["lengths"], np.minimum(used + 1, block_size + 1).astype(np.int32))
    per_shard = max(1, shard_tokens // (block_size + 1))
    for k, first in enumerate(range(0, packing.n_rows, per_shard)):
        span = range(first, min(first + per_shard, packing.n_rows))
        rows = packed_rows(data, starts, packing, span, block_size + 1)
        entry["shards"].append({"file": f"{name}_{k:05d}.npy", "tokens": rows.size})
        write_npy(data.dir / f"{name}_{k:05d}.npy", rows.ravel())
    files = [entry["lengths"], *(shard["file"] for shard in entry["shards"])]
    entry["sha256"] = {file: token_files.file_sha256(data.dir / file) for file in files}
    return entry


def packed_rows(data: TokenData, starts: np.ndarray, packing: Packing, span: range, row_tokens: int) -> np.ndarray:
    """Return the rows in `span`, (len(span), row_tokens), of documents that start at `starts`."""
    rows = np.full((len(span), row_tokens), data.eot_id, dtype=token_files.token_dtype(data.vocab_size))
    row, place = -1, 0
    for piece in range(*np.searchsorted(packing.row, [span.start, span.stop])):
        place = place if packing.row[piece] == row else 0
        row, n = int(packing.row[piece]), int(packing.length[piece])
        start = int(starts[packing.document[piece]] + 1 + packing.begin[piece])
        rows[row - span.start, place + 1 : place + n] = data.window(start, n - 1)
        place += n
    return rows


class PackedData(TokenData):
    """The train split of one source as packed rows: each window, of block_size + 1 tokens, begins with a document."""

    packed = True

    def __init__(self, data_dir: str | Path, block_size: int, source: str = "") -> None:
        super().__init__(data_dir, "train", source)
        path, self.block_size = self.dir / f"train_pack{block_size}.json", block_size
        how = f"run: python prepare.py {self.dir}/config.py --pack={block_size} --overwrite=True"
        if not path.exists():
            raise UserError(f"data: {self.dir} is not packed for block_size={block_size}; {how}")
        record = token_files.read_packing(path)
        self.rows = record["sources"].get(source)
        if not self.rows or self.rows["fingerprint"] != super().fingerprint:
            raise UserError(f"data: {path} is not of the tokens that are there now; {how}")
        self.lengths = token_files.map_array(self.dir / self.rows["lengths"], "int32", self.rows["rows"])
        self._map_tokens(self.rows["shards"])

    @property
    def fingerprint(self) -> str:
        """The sha256 of everything that decides the rows."""
        return hashlib.sha256(json.dumps([FORMAT, self.block_size, self.rows["sha256"]]).encode()).hexdigest()

    def most_documents(self, length: int) -> int:
        return self.rows.get("most_documents", length)  # rows that an earlier version packed do not say

    def valid(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return (n,) int64: how many tokens of these rows belong to documents, with the delimiter after the last."""
        return self.lengths[starts // (self.block_size + 1)].astype(np.int64)
