"""Compare the documents that passed the rules (pipeline.py) with each other, drop copies, assign and write splits.

Of several copies the first in the order of the input is kept. A document is only dropped as a copy of one that is kept.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from groundup.errors import UserError
from groundup.files.splits import FEW, SPLITS, assign, cut_places
from groundup.files.text_mix import MAX_DOC_CHARS, mix_texts
from groundup.text import dedup
from groundup.text.recipe import EXACT, KEPT, NEAR, ROW, SCORE, Recipe, Source, Unit, parse_score
from groundup.tokens.token_files import file_sha256, token_dtype
from groundup.tokens.token_writer import ConversationWriter, ShardWriter
from tokenizer import Tokenizer

MAX_TIMES = 8  # that a tokenizer reads a small source; its rarest words would fill the vocabulary
ROW_SPLITS = (*SPLITS, "held_out")  # of conversations: questions that instruction tuning never sees


@dataclass
class Selection:
    """All documents of all units, in order, and why each is kept or dropped."""

    rows: np.ndarray  # (n,) units.ROW
    fates: np.ndarray  # (n,) uint8, indices of REASONS
    starts: np.ndarray  # (units + 1,) int64: the documents of unit k are starts[k] to starts[k + 1]
    partner: np.ndarray  # (n,) int64: of a dropped copy, the earlier document; else -1
    similarity: np.ndarray  # (n,) float32: of the two
    capped: int = 0  # documents that were not compared with all of a large bucket, see dedup.near_duplicates

    def of_unit(self, unit: Unit, values: np.ndarray) -> np.ndarray:
        """Return the values of the documents of a unit, from those of all."""
        return values[self.starts[unit.number] : self.starts[unit.number + 1]]

    def unit_of(self, row: int) -> int:
        return int(np.searchsorted(self.starts, row, side="right")) - 1

    def place(self, row: int, units: list[Unit]) -> tuple[str, int]:
        """Return (file, byte offset) of the record that a document is from."""
        part = units[self.unit_of(row)].parts[int(self.rows["part"][row])]
        return part.name, int(self.rows["offset"][row])

    def where(self, row: int, units: list[Unit]) -> str:
        return "{} at byte {}".format(*self.place(row, units))


class SourceDocs(NamedTuple):
    """The kept documents of one source."""

    source: Source
    units: list[Unit]
    rows: np.ndarray  # (n,) index in Selection.rows, in order
    splits: np.ndarray  # (n,) uint8, index in ROW_SPLITS
    starts: np.ndarray  # of documents that are cut into the splits: indices in rows, a huge one has several; or empty


def select(units: list[Unit], recipe: Recipe, work: Path) -> Selection:
    """Drop exact copies, then near copies, of the documents that passed. Write work/fates.npy and starts.npy."""
    per_unit = [np.fromfile(unit.file(work, "rows"), ROW) for unit in units]
    rows, starts = np.concatenate(per_unit), np.cumsum([0, *map(len, per_unit)])
    del per_unit
    partner, similarity = np.full(len(rows), -1, np.int64), np.ones(len(rows), np.float32)
    chosen = Selection(rows, rows["reason"].copy(), starts, partner, similarity)
    for _, least, most, shares in parse_score(recipe.score)[:1]:
        left = np.flatnonzero(chosen.fates == KEPT)
        if shares and len(left):
            scores = rows["score"][left]
            low, high = np.percentile(scores, (least, most))
            chosen.fates[left[(scores < low) | (scores > high)]] = SCORE
    left = np.flatnonzero(chosen.fates == KEPT)
    if recipe.exact and len(left):
        first = dedup.first_copies(rows["key"][left])
        copies = np.flatnonzero(first != np.arange(len(left)))
        chosen.fates[left[copies]], chosen.partner[left[copies]] = EXACT, left[first[copies]]
    if recipe.near:
        drop_near(chosen, units, recipe, work)
    np.save(work / "starts.npy", chosen.starts)
    np.save(work / "fates.npy", chosen.fates)
    return chosen


def drop_near(chosen: Selection, units: list[Unit], recipe: Recipe, work: Path) -> None:
    n_perm = recipe.near_bands * recipe.near_rows
    candidates = np.flatnonzero(chosen.fates == KEPT)
    with open(work / "signatures.tmp", "wb") as out:  # one file of all candidates, to be mapped
        for unit in units:
            fates, passed = (chosen.of_unit(unit, one) for one in (chosen.fates, chosen.rows["reason"] == KEPT))
            signatures = np.fromfile(unit.file(work, "sigs"), "<u4").reshape(-1, n_perm)
            assert len(signatures) == passed.sum(), f"{unit.number=} {len(signatures)=} {passed.sum()=}"
            out.write(np.ascontiguousarray(signatures[fates[passed] == KEPT]).data)
    if not len(candidates):
        return
    signatures = np.memmap(work / "signatures.tmp", "<u4", "r", shape=(len(candidates), n_perm))
    found = dedup.near_duplicates(signatures, recipe.near, recipe.near_bands, recipe.near_rows)
    chosen.fates[candidates[found.dropped]] = NEAR
    chosen.capped = found.capped
    copies = candidates[found.dropped]
    chosen.partner[copies], chosen.similarity[copies] = candidates[found.partner], found.similarity


def split_sources(chosen: Selection, units: list[Unit], recipe: Recipe) -> list[SourceDocs]:
    """Return the kept documents of each source with their splits. Pairs of all sources are split together: a prompt
    may be in several sources, and must not be in two splits. Texts of a source with few documents are cut, each into
    all splits. Print that, and a warning if val or held_out was empty."""
    of_row = np.repeat(np.array([unit.source for unit in units], np.int64), np.diff(chosen.starts))
    kept = np.flatnonzero(chosen.fates == KEPT)
    by_prompt = recipe.kind == "preference"
    splits = np.full(len(chosen.rows), ROW_SPLITS.index("held_out"), np.uint8)
    rows_of = [kept[of_row[kept] == number] for number in range(len(recipe.sources))]
    starts_of: dict[str, np.ndarray] = {}
    ends = [("val", recipe.val_fraction), ("test", recipe.test_fraction)]
    by_file = any(source.txt_split == "file" for source in recipe.sources)
    hint = "; if a .txt file holds many documents, --txt_split=blank or line separates them" if by_file else ""
    names = [source.name for source in recipe.sources]
    for name, rows in [("", kept)] if by_prompt else zip(names, rows_of, strict=True):
        of, held_out = f" of source {name}" if name else "", chosen.rows["held_out"][rows]
        if recipe.hold_out and len(rows) and not held_out.any():
            print(f"prepare: warning: hold_out={recipe.hold_out} takes none of so few conversations{of}")
        rows = rows[~held_out]
        positions, n_bytes = chosen.rows["position"][rows], chosen.rows["n_bytes"][rows]
        splits[rows], moved = assign(positions, recipe.val_fraction, recipe.test_fraction, recipe.fold, by_prompt)
        if recipe.kind == "text" and len(starts := few_documents(rows, chosen, recipe)):
            starts_of[name], splits[rows] = starts, 0
            few = f"{len(starts)} documents{of}: the end of each" if len(starts) > 1 else f"1 document{of}: its end"
            parts = [f"{split} ({100 * share:g} %)" for split, share in ends if share]
            print(f"prepare: only {few} becomes {' and '.join(parts)}{hint}")
        elif moved:
            share = n_bytes[splits[rows] == 1].sum() / n_bytes.sum()
            wanted = recipe.fold or recipe.val_fraction
            lost = f"one is moved there, {100 * share:.2g} % of the text, and not trained on"
            lost += hint if recipe.kind == "text" else ""
            print(f"prepare: warning: val takes none of so few documents{of} ({wanted} of them); {lost}")
    return [
        SourceDocs(source, [unit for unit in units if unit.source == number], rows_of[number], splits[rows_of[number]],
                   starts_of.get(source.name, np.zeros(0, np.int64)))
        for number, source in enumerate(recipe.sources)
    ]  # fmt: skip


def few_documents(rows: np.ndarray, chosen: Selection, recipe: Recipe) -> np.ndarray:
    """Return the indices in `rows` at which documents begin that must be cut, for they are few; none if they need not.
    Of a huge document all pieces are from one record. Raise UserError where one document should give several folds."""
    records = np.stack([np.searchsorted(chosen.starts, rows, side="right"), chosen.rows["part"][rows]])
    records = np.vstack([records, chosen.rows["offset"][rows]])
    starts = np.flatnonzero(np.diff(records, axis=1, prepend=-1).any(0))
    if recipe.fold and len(starts) == 1:
        hint = "use txt_split=blank"
        raise UserError(f"prepare: fold={recipe.fold} needs several documents, and there is one; {hint}")
    wanted = recipe.val_fraction + recipe.test_fraction > 0 and not recipe.fold
    return starts if wanted and len(starts) <= FEW else starts[:0]


def cut_document(k: int, part: SourceDocs, chosen: Selection, recipe: Recipe, work: Path) -> list[list[tuple]]:
    """Return, for each split, the pieces of document k of a source that has few: (index in part.rows, text, whether it
    is all of that row)."""
    begin, end = [*part.starts.tolist(), len(part.rows)][k : k + 2]
    taken = np.zeros(len(chosen.rows), bool)
    taken[part.rows[begin:end]] = True
    texts = [text for unit in part.units for text in unit.documents(work, chosen.of_unit(unit, taken))]
    length, at = sum(map(len, texts)), 0
    places = [0, *cut_places(length, recipe.val_fraction, recipe.test_fraction), length]
    splits: list[list[tuple]] = [[] for _ in SPLITS]
    for i, text in enumerate(texts, begin):
        for number, pieces in enumerate(splits):
            inside = text[max(places[number] - at, 0) : max(places[number + 1] - at, 0)]
            pieces += [(i, inside, len(inside) == len(text))] if inside else []
        at += len(text)
    return splits


def training_texts(
    parts: list[SourceDocs], chosen: Selection, most: int, recipe: Recipe, work: Path
) -> Iterator[str]:
    """Return documents of train to train a tokenizer on: of each source all, or a sample (by hash) of about `most`
    bytes; of several sources by turns, by their weights, `most` bytes in all. A source too small for its weight is read
    up to MAX_TIMES times: in training it is repeated, too."""

    def of_source(part: SourceDocs) -> Iterator[str]:
        own = part.rows[part.splits == 0]
        size = int(chosen.rows["n_bytes"][own].sum())
        if size > most:
            own = own[chosen.rows["key"][own, 1] / 2.0**64 < most / size]
        taken = np.zeros(len(chosen.rows), bool)
        taken[own] = True
        for k in range(len(part.starts)):
            for i, text, _ in cut_document(k, part, chosen, recipe, work)[0]:
                size = MAX_DOC_CHARS if len(parts) > 1 else len(text)  # a mixture takes no more of each text
                yield from (text[at : at + size] for at in range(0, taken[part.rows[i]] * len(text), size))
        if len(part.starts):
            return
        for unit in part.units:
            yield from unit.documents(work, chosen.of_unit(unit, taken))

    if len(parts) == 1:
        return of_source(parts[0])
    sizes = [float(chosen.rows["n_bytes"][part.rows].sum()) for part in parts]
    weights = [part.source.weight or size for part, size in zip(parts, sizes, strict=True)]
    largest = max((size / weight for size, weight in zip(sizes, weights, strict=True) if weight), default=0.0)
    sources = []
    for part, size, weight in zip(parts, sizes, weights, strict=True):
        times = min(MAX_TIMES, round(min(largest * weight, most) / size)) if size else 1
        texts = chain.from_iterable(map(of_source, [part] * max(times, 1)))
        label = f"source {part.source.name}, " + (f"weight {weight:g}" if part.source.weight else "by its size")
        sources += [(label + f", read {times} times" * (times > 1), texts, weight)] if weight else []
    return mix_texts(sources, most)


# ---- the files of each split, in the final order ----------------------------------------------


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


def write_splits(
    parts: list[SourceDocs], chosen: Selection, recipe: Recipe, tokenizer: Tokenizer, work: Path
) -> list[dict]:
    """Write the tokens into the shards of their sources and splits; return the shards for the manifest."""
    dtype, shards = token_dtype(tokenizer.vocab_size), []
    column = {"hash": "position", "score": "score"}.get(recipe.order)
    for part in parts:
        tokens, n_bytes = Tokens(part, dtype, work), chosen.rows["n_bytes"][part.rows]
        assert len(tokens.length) == len(part.rows), f"{len(tokens.length)=} {len(part.rows)=}"
        by_length = tokens.length if recipe.order == "length" else part.rows
        keys = chosen.rows[column][part.rows] if column else by_length
        writers = [
            ShardWriter(work / "out", split, tokenizer.vocab_size, tokenizer.eot_id, recipe.shard_tokens,
                        part.source.name) for split in SPLITS
        ]  # fmt: skip
        if len(part.starts):
            for k in np.argsort(keys[part.starts], kind="stable").tolist():
                of_splits = cut_document(k, part, chosen, recipe, work)
                for writer, pieces in zip(writers, of_splits, strict=True):
                    if pieces:
                        writer.add(ids_of(pieces, tokens, tokenizer), sum(len(text.encode()) for _, text, _ in pieces))
        else:
            for i in np.argsort(keys, kind="stable").tolist():
                writers[part.splits[i]].add(tokens.ids(i), int(n_bytes[i]))
        for writer in writers:
            shards += writer.close()
    return shards


def ids_of(pieces: list[tuple], tokens: Tokens, tokenizer: Tokenizer) -> np.ndarray:
    """Return the ids of the pieces of a document (see cut_document). Those that were not cut have theirs already,
    unless this tokenizer begins each text with a space."""
    if tokenizer.encode("\n\nb") != tokenizer.encode("\n\n") + tokenizer.encode("b"):
        return tokenizer.encode_array("".join(text for _, text, _ in pieces))
    return np.concatenate([tokens.ids(i) if whole else tokenizer.encode_array(text) for i, text, whole in pieces])


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
                own = chosen.of_unit(unit, inside)
                for row in unit.documents(work, own):
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
    for i in np.flatnonzero(own[unit.fates(work) == KEPT]).tolist():
        place = slice(int(ends[i - 1]) if i else 0, int(ends[i]))
        writer.add(tokens[place], mask[place])
