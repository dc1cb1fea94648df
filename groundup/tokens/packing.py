"""Rows of whole documents: which document goes into which row, and the files of `--pack`.

`pack_rows` decides; sft.py packs its conversations with it when training starts. prepare.py
--pack=block_size writes the rows of a corpus beside its token files, with `pack`, and
pretrain.py --pack=True reads them (token_files.PackedData).
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from groundup.tokens.mixture import hash_words, permute
from groundup.tokens.token_files import FORMAT, TokenData, file_sha256, token_dtype
from groundup.tokens.token_writer import SHARD_TOKENS, file_sums, write_npy, write_record

# ---- which document is in which row ----------------------------------------------------------


class Packing(NamedTuple):
    """Which piece of which document is in which row: int64, one element per piece, row by row."""

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
        """The largest number of pieces in a row."""
        return int(np.bincount(self.row).max(initial=0))


def pack_rows(lengths: np.ndarray, row_tokens: int, seed: int) -> Packing:
    """Pack documents of `lengths` tokens (delimiter included) into rows of row_tokens.

    Best fit decreasing: the longest pieces first, equal ones in a seeded order, each to the fullest
    row with room (Ding et al. 2024, arXiv:2404.10830). A document longer than a row is cut into
    pieces, each opened by a delimiter.
    """
    # Cut what is too long. Each piece takes a delimiter and up to `room` tokens of its document.
    room = row_tokens - 1
    content = np.asarray(lengths, dtype=np.int64) - 1
    n_pieces = np.maximum(1, -(-content // room))
    document = np.repeat(np.arange(len(content)), n_pieces)
    first_piece = np.cumsum(n_pieces) - n_pieces
    begin = room * (np.arange(len(document)) - first_piece[document])
    length = 1 + np.minimum(room, content[document] - begin)

    # a seeded order among pieces of equal length, so that neighbours in the corpus are not packed
    # together for that reason alone
    keys = hash_words(8, "pack", seed)
    shuffled = permute(np.arange(len(document)), len(document), keys)
    falling = np.lexsort((shuffled, -length))
    row = np.empty_like(document)
    row[falling] = best_fit(length[falling].tolist(), row_tokens)
    # by chance within a row: sorted by length, long pieces would always come first
    by_row = np.lexsort((shuffled, row))
    return Packing(
        document=document[by_row],
        begin=begin[by_row],
        length=length[by_row],
        row=row[by_row],
        n_rows=int(row.max(initial=-1)) + 1,
        n_cut=int((n_pieces > 1).sum()),
    )


def best_fit(lengths: list[int], row_tokens: int) -> list[int]:
    """Return the row of each piece in turn: that with the least sufficient room, or a new one."""
    # Rows are found by the room that they have left, so each piece takes the same short time.
    rows: list[int] = []
    n_rows = 0
    with_room: list[list[int]] = [[] for _ in range(row_tokens + 1)]  # rows by the room left
    # Bit r is set if with_room[r] is not empty. The least r >= length is the lowest bit of a shift.
    rooms = 0
    for length in lengths:
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = row_tokens, n_rows
            n_rows += 1
        if room > length:
            with_room[room - length].append(row)
            rooms |= 1 << (room - length)
        rows.append(row)
    return rows


# ---- the files ------------------------------------------------------------------------------


def pack(
    data_dir: str | Path, block_size: int, seed: int = 0, shard_tokens: int = SHARD_TOKENS
) -> dict:
    """Pack the train split of each source into rows of block_size + 1 tokens; return the record.

    Beside the train shards it writes
        train_pack1024_00000.npy   the rows end to end; .crc.npy, the CRC-32 of its blocks
        train_pack1024.len.npy     int32: tokens of each row without what fills it up
        train_pack1024.json        the record, last
    What is left of a row is filled with delimiters. The first of them counts: it ends the last
    document.
    """
    assert block_size > 0, f"{block_size=}"
    shards = TokenData(data_dir, "train").entries
    path = Path(data_dir, f"train_pack{block_size}.json")
    path.unlink(missing_ok=True)  # of an earlier packing, whose files are now overwritten
    sources = {}  # each is packed alone, so that its share in a mixture stays exact
    for name in dict.fromkeys(shard.get("source", "") for shard in shards):
        data = TokenData(data_dir, "train", name)
        sources[name] = pack_source(data, name, block_size, seed, shard_tokens)
    record = {"format": FORMAT, "block_size": block_size, "seed": seed, "sources": sources}
    write_record(path, record)
    return record


def pack_source(
    data: TokenData, source: str, block_size: int, seed: int, shard_tokens: int
) -> dict:
    """Write the packed rows of one source and return its entry for the record."""
    row_tokens = block_size + 1
    lengths = np.concatenate([np.diff(offsets) for offsets in data.offsets])
    packing = pack_rows(lengths, row_tokens, seed)
    name = f"{source}/train_pack{block_size}".lstrip("/")
    lengths_file = f"{name}.len.npy"
    # + 1: the delimiter behind the last document, if the row has room for it
    n_text = np.minimum(packing.used + 1, row_tokens).astype(np.int32)
    write_npy(data.dir / lengths_file, n_text)

    starts = data.document_starts()
    per_shard = max(1, shard_tokens // row_tokens)
    shards, files = [], [lengths_file]
    for k, first in enumerate(range(0, packing.n_rows, per_shard)):
        span = range(first, min(first + per_shard, packing.n_rows))
        rows = packed_rows(data, starts, packing, span, row_tokens)
        file, sums = f"{name}_{k:05d}.npy", f"{name}_{k:05d}.crc.npy"
        write_npy(data.dir / file, rows.ravel())
        write_npy(data.dir / sums, file_sums(data.dir / file))
        shards.append({"file": file, "sums": sums, "tokens": rows.size})
        files += [file, sums]
    return {
        "fingerprint": data.fingerprint,
        "documents": data.n_documents,
        "cut": packing.n_cut,
        "rows": packing.n_rows,
        "pieces": len(packing.row),
        "filled": int((row_tokens - packing.used).sum()),
        "most_documents": 1 + packing.most_pieces,  # the filling counts as one
        "lengths": lengths_file,
        "shards": shards,
        "sha256": {file: file_sha256(data.dir / file) for file in files},
    }


def packed_rows(
    data: TokenData, starts: np.ndarray, packing: Packing, span: range, row_tokens: int
) -> np.ndarray:
    """Return the rows in `span`, (len(span), row_tokens), of documents that begin at `starts`."""
    # Filled with delimiters at first: those before and behind the pieces are there already.
    dtype = token_dtype(data.vocab_size)
    rows = np.full((len(span), row_tokens), data.eot_id, dtype)
    first, last = np.searchsorted(packing.row, [span.start, span.stop])
    row, filled = -1, 0
    for piece in range(first, last):
        if packing.row[piece] != row:
            row, filled = int(packing.row[piece]), 0
        n = int(packing.length[piece])
        start = int(starts[packing.document[piece]] + 1 + packing.begin[piece])
        rows[row - span.start, filled + 1 : filled + n] = data.window(start, n - 1)
        filled += n
    return rows
