"""Copy the tokens or rows of units, in their final order, into the files of each split."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from groundup.files.splits import SPLITS
from groundup.text.quality import NgramModel
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
        self.docs, self.dtype, self.work = docs, dtype, work
        lengths = [np.fromfile(unit.file(work, "lengths"), "<i8") for unit in docs.units]
        empty = np.zeros(0, np.int64)
        self.unit = np.repeat(np.arange(len(lengths)), [len(n) for n in lengths])  # (n,) index in docs.units
        self.begin = np.concatenate([empty, *(np.cumsum(n) - n for n in lengths)])  # (n,) in its unit's ids
        self.length = np.concatenate([empty, *lengths])  # (n,)
        self.mapped: dict[int, np.ndarray] = {}

    def ids(self, i: int) -> np.ndarray:
        unit, begin, length = int(self.unit[i]), int(self.begin[i]), int(self.length[i])
        if unit not in self.mapped and length:
            if len(self.mapped) == self.OPEN:
                del self.mapped[next(iter(self.mapped))]
            self.mapped[unit] = np.memmap(self.docs.units[unit].file(self.work, "tokens"), self.dtype, "r")
        return self.mapped[unit][begin : begin + length] if length else np.zeros(0, self.dtype)


def document_order(docs: SourceDocs, tokens: Tokens, chosen: Selection, recipe: Recipe) -> np.ndarray:
    """Return the order in which a source's documents are written, (n,) int64."""
    if recipe.order == "input":
        return np.arange(len(docs.rows))
    if recipe.order == "hash":
        return np.argsort(chosen.rows["position"][docs.rows], kind="stable")
    if recipe.order == "length":
        return np.argsort(tokens.length, kind="stable")
    if recipe.order == "score":
        return np.argsort(chosen.rows["score"][docs.rows], kind="stable")
    model = NgramModel({"unigram": 1, "bigram": 2, "trigram": 3}[recipe.order])
    for i in np.flatnonzero(docs.splits == 0).tolist():
        model.add(tokens.ids(i))
    added = (docs.splits == 0).tolist()
    return np.argsort([model.difficulty(tokens.ids(i), added[i]) for i in range(len(added))], kind="stable")


def write_splits(
    parts: list[SourceDocs], chosen: Selection, recipe: Recipe, tokenizer: Tokenizer, work: Path
) -> list[dict]:
    """Copy the tokens into the shards of their sources and splits. Return the shards for the manifest."""
    dtype, shards = token_dtype(tokenizer.vocab_size), []
    for part in parts:
        tokens = Tokens(part, dtype, work)
        assert len(tokens.length) == len(part.rows), f"{len(tokens.length)=} {len(part.rows)=}"
        order = document_order(part, tokens, chosen, recipe)
        n_bytes = chosen.rows["n_bytes"][part.rows]
        for number, split in enumerate(SPLITS):
            writer = new_writer(split, recipe, tokenizer, work, part.source.name)
            for i in order[part.splits[order] == number].tolist():
                writer.add(tokens.ids(i), int(n_bytes[i]))
            shards += writer.close()
    return shards


def new_writer(split: str, recipe: Recipe, tokenizer: Tokenizer, work: Path, name: str) -> ShardWriter:
    return ShardWriter(work / "out", split, tokenizer.vocab_size, tokenizer.eot_id, recipe.shard_tokens, name)


def write_single(text: str, recipe: Recipe, tokenizer: Tokenizer, work: Path) -> list[dict]:
    print("prepare: there is only one document; it is cut into the splits")
    shards = []
    for split, part in zip(SPLITS, cut(text, recipe), strict=True):
        writer = new_writer(split, recipe, tokenizer, work, recipe.sources[0].name)
        if part:
            writer.add(tokenizer.encode_array(part), len(part.encode()))
        shards += writer.close()
    return shards


def write_jsonl(parts: list[SourceDocs], chosen: Selection, work: Path) -> dict:
    """Write conversations or pairs as train.jsonl, val.jsonl, ... Return {split: its entry in the manifest}."""
    splits = {}
    names = [part.source.name for part in parts]
    for number, split in enumerate(ROW_SPLITS):
        path, n_rows = work / "out" / f"{split}.jsonl", 0
        with open(path, "w", encoding="utf-8") as f:
            for unit, own in units_of_split(number, parts, chosen):
                name = names[unit.source]
                for _, row in read_kept(unit, work, np.where(own, KEPT, EXACT)):
                    f.write((f'{row[:-1]}, "source": {json.dumps(name)}}}' if name else row) + "\n")
                    n_rows += 1
        if n_rows:
            sha256 = file_sha256(path)
            splits[split] = {"file": path.name, "rows": n_rows, "bytes": path.stat().st_size, "sha256": sha256}
        else:
            path.unlink()
    return splits


def units_of_split(number: int, parts: list[SourceDocs], chosen: Selection) -> Iterator[tuple[Unit, np.ndarray]]:
    """Yield the units in order, each with (n,) bool: which of its documents are in that split."""
    inside = np.zeros(len(chosen.rows), bool)
    for part in parts:
        inside[part.rows] = part.splits == number
    for unit in (unit for part in parts for unit in part.units):
        yield unit, inside[chosen.starts[unit.number] : chosen.starts[unit.number + 1]]


def write_conversations(
    splits: dict, parts: list[SourceDocs], chosen: Selection, tokenizer: Tokenizer, work: Path
) -> None:
    """Write the ids and masks of the rows of write_jsonl in their order, without those held out. Add the files to the
    manifest's entries in `splits`."""
    dtype = token_dtype(tokenizer.vocab_size)
    for number, split in enumerate(SPLITS):
        if split not in splits:
            continue
        writer = ConversationWriter(work / "out", split, dtype)
        for unit, own in units_of_split(number, parts, chosen):
            kept = unit_fates(unit, work) == KEPT
            ends = np.cumsum(np.fromfile(unit.file(work, "lengths"), "<i8"))
            tokens = np.fromfile(unit.file(work, "tokens"), dtype)
            mask = np.fromfile(unit.file(work, "mask"), np.uint8)
            for i in np.flatnonzero(own[kept]).tolist():
                place = slice(int(ends[i - 1]) if i else 0, int(ends[i]))
                writer.add(tokens[place], mask[place])
        splits[split]["tokens"] = writer.close()
