"""Copy the tokens or rows of units, in their final order, into the files of each split."""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np

from groundup.files.splits import SPLITS
from groundup.text.recipe import Recipe
from groundup.text.selection import ROW_SPLITS, Selection, SourceDocs, cut
from groundup.text.units import EXACT, KEPT, Unit, read_kept, unit_fates
from groundup.tokens.chat_files import ConversationWriter
from groundup.tokens.token_files import ShardWriter, file_sha256, token_dtype
from tokenizer import Tokenizer


class Tokens:
    """The ids of a source's documents, on disk."""

    OPEN = 64  # files at once: a system allows a process some 1,000

    def __init__(self, docs: SourceDocs, dtype: np.dtype, work: Path) -> None:
        lengths = [np.fromfile(unit.file(work, "lengths"), "<i8") for unit in docs.units]
        empty = np.zeros(0, np.int64)
        self.unit = np.repeat(np.arange(len(lengths)), [len(n) for n in lengths])  # (n,) index in docs.units
        self.begin = np.concatenate([empty, *(np.cumsum(n) - n for n in lengths)])  # (n,) in its unit's ids
        self.length = np.concatenate([empty, *lengths])  # (n,)
        self.empty = np.zeros(0, dtype)
        self.map = lru_cache(self.OPEN)(lambda unit: np.memmap(docs.units[unit].file(work, "tokens"), dtype, "r"))

    def ids(self, i: int) -> np.ndarray:
        begin, length = int(self.begin[i]), int(self.length[i])
        return self.map(int(self.unit[i]))[begin : begin + length] if length else self.empty


def document_order(docs: SourceDocs, tokens: Tokens, chosen: Selection, order: str) -> np.ndarray:
    """Return the order in which a source's documents are written, (n,) int64."""
    if order == "input":
        return np.arange(len(docs.rows))
    if order == "length":
        return np.argsort(tokens.length, kind="stable")
    return np.argsort(chosen.rows["position" if order == "hash" else "score"][docs.rows], kind="stable")


def write_splits(parts: list[SourceDocs], chosen: Selection, single: str | None, recipe: Recipe, tokenizer: Tokenizer,
                 work: Path) -> list[dict]:  # fmt: skip
    """Write the tokens into the shards of their sources and splits; return the shards for the manifest. `single`, if it
    is not None, is the only document, which is cut into the splits."""
    dtype, shards = token_dtype(tokenizer.vocab_size), []
    if single is not None:
        print("prepare: there is only one document; it is cut into the splits")
    for part in parts:
        if single is None:
            tokens, n_bytes = Tokens(part, dtype, work), chosen.rows["n_bytes"][part.rows]
            assert len(tokens.length) == len(part.rows), f"{len(tokens.length)=} {len(part.rows)=}"
            order = document_order(part, tokens, chosen, recipe.order)
            documents = (((tokens.ids(i), int(n_bytes[i])) for i in order[part.splits[order] == number].tolist())
                         for number in range(len(SPLITS)))  # fmt: skip
        else:
            texts = cut(single, recipe) if len(part.rows) else ("", "", "")
            documents = ([(tokenizer.encode_array(text), len(text.encode()))] if text else [] for text in texts)
        for split, own in zip(SPLITS, documents, strict=True):
            writer = ShardWriter(work / "out", split, tokenizer.vocab_size, tokenizer.eot_id, recipe.shard_tokens,
                                 part.source.name)  # fmt: skip
            for ids, n in own:
                writer.add(ids, n)
            shards += writer.close()
    return shards


def write_rows(parts: list[SourceDocs], chosen: Selection, tokenizer: Tokenizer | None, work: Path) -> dict:
    """Write conversations or pairs as train.jsonl, val.jsonl, ..., and with a tokenizer the ids and masks of
    conversations beside them, but for those held out. Return {split: its entry in the manifest}."""
    entries = {}
    for number, split in enumerate(ROW_SPLITS):
        inside, path = np.zeros(len(chosen.rows), bool), work / "out" / f"{split}.jsonl"
        for part in parts:
            inside[part.rows] = part.splits == number
        if not inside.any():
            continue
        writer = None
        if tokenizer and split in SPLITS:
            writer = ConversationWriter(work / "out", split, token_dtype(tokenizer.vocab_size))
        with open(path, "w", encoding="utf-8") as f:
            for name, unit in ((part.source.name, unit) for part in parts for unit in part.units):
                own = inside[chosen.starts[unit.number] : chosen.starts[unit.number + 1]]
                for _, row in read_kept(unit, work, np.where(own, KEPT, EXACT)):
                    f.write((f'{row[:-1]}, "source": {json.dumps(name)}}}' if name else row) + "\n")
                if writer:
                    copy_conversations(unit, own, writer, work)
        entries[split] = {"file": path.name, "rows": int(inside.sum()), "bytes": path.stat().st_size}
        entries[split] |= {"sha256": file_sha256(path)} | ({"tokens": writer.close()} if writer else {})
    return entries


def copy_conversations(unit: Unit, own: np.ndarray, writer: ConversationWriter, work: Path) -> None:
    """Copy the ids and masks of some documents of a unit. own: (n,) bool, which."""
    ends = np.cumsum(np.fromfile(unit.file(work, "lengths"), "<i8"))
    kinds = (("tokens", writer.tokens.dtype), ("mask", "u1"))
    tokens, mask = (np.fromfile(unit.file(work, what), kind) for what, kind in kinds)
    for i in np.flatnonzero(own[unit_fates(unit, work) == KEPT]).tolist():
        place = slice(int(ends[i - 1]) if i else 0, int(ends[i]))
        writer.add(tokens[place], mask[place])
