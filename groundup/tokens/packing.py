"""Write packed rows beside token files: what prepare.py --pack=block_size does.

mixture.pack_rows decides which document is in which row; token_files.PackedData reads the rows for
pretrain.py --pack=True.
"""

from pathlib import Path

import numpy as np

from groundup.tokens.mixture import Packing, pack_rows
from groundup.tokens.token_files import FORMAT, TokenData, block_sums, file_sha256, token_dtype
from groundup.tokens.token_writer import SHARD_TOKENS, write_npy, write_record


def pack(
    data_dir: str | Path, block_size: int, seed: int = 0, shard_tokens: int = SHARD_TOKENS
) -> dict:
    """Pack the train split of each source into rows of block_size + 1 tokens; return the record.

    Beside the train shards it writes
        train_pack1024_00000.npy   the rows end to end; .crc.npy, the CRC-32 of its blocks
        train_pack1024.len.npy     int32: how many tokens of each row are trained on
        train_pack1024.json        the record, last
    What is left of a row is filled with delimiters. The first of them counts: it ends the last
    document.
    """
    assert block_size > 0, f"{block_size=}"
    shards = TokenData(data_dir, "train").entries
    path = Path(data_dir, f"train_pack{block_size}.json")
    path.unlink(missing_ok=True)  # of an earlier packing, whose files are now overwritten
    sources = {}
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
    learned = np.minimum(packing.used + 1, row_tokens).astype(np.int32)
    write_npy(data.dir / lengths_file, learned)

    starts = data.document_starts()
    per_shard = max(1, shard_tokens // row_tokens)
    shards, files = [], [lengths_file]
    for k, first in enumerate(range(0, packing.n_rows, per_shard)):
        span = range(first, min(first + per_shard, packing.n_rows))
        rows = packed_rows(data, starts, packing, span, row_tokens)
        file, sums = f"{name}_{k:05d}.npy", f"{name}_{k:05d}.crc.npy"
        write_npy(data.dir / file, rows.ravel())
        write_npy(data.dir / sums, block_sums(rows.ravel()))
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
