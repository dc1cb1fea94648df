"""Compare the documents that passed the rules with each other, drop copies, assign and write the
splits.

Of several copies the first in the order of the input is kept. A document is only dropped as a copy
of one that is kept.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from groundup.errors import UserError, counted
from groundup.files.sources import Source
from groundup.files.splits import (
    SPLITS,
    are_held_out,
    assign,
    cut_places,
    least_to_cut,
    shares_of_ends,
    split_together,
)
from groundup.files.text_mix import MAX_DOC_CHARS, mix_texts
from groundup.text import dedup
from groundup.text.recipe import Recipe, parse_score
from groundup.text.unit import EXACT, KEPT, NEAR, ROW, SCORE, Unit
from groundup.tokens.token_files import ROWS_FORMAT, file_sha256, token_dtype
from groundup.tokens.token_writer import (
    SHARD_TOKENS,
    ConversationWriter,
    ShardWriter,
    write_manifest,
    write_record,
)
from tokenizer import Tokenizer

# Most times that a small source is read to train a tokenizer; with more, its rarest words would
# fill the vocabulary.
MAX_REPEATS = 8
ROW_SPLITS = (*SPLITS, "held_out")  # of conversations: questions that tuning never sees
LARGE_VAL = 0.2  # share of the text above which a validation split draws a warning


# ---- which documents are kept --------------------------------------------------------------------


@dataclass
class Selection:
    """All documents of all units, in order, and why each is kept or dropped."""

    units: list[Unit]
    recipe: Recipe
    work: Path  # where the files of the units are
    rows: np.ndarray  # (n,) unit.ROW
    fates: np.ndarray  # (n,) uint8, indices of REASONS
    starts: np.ndarray  # (units + 1,) int64: unit k has the documents starts[k] .. starts[k + 1]
    partner: np.ndarray  # (n,) int64: of a dropped copy, the earlier document; else -1
    similarity: np.ndarray  # (n,) float32: of the two
    capped: int = 0  # documents not compared with all of a large bucket, see near_duplicates
    split_notes: list[str] = field(default_factory=list)  # what is unusual about the splits
    # Units are encoded by other processes while this one writes the splits: each step of the
    # iterator waits for the next unit, in order.
    tokenized: Iterator = iter(())
    n_tokenized: int = 0

    def wait_for(self, unit: Unit) -> None:
        """Return when the documents of a unit are encoded."""
        while self.n_tokenized <= unit.number:
            next(self.tokenized)
            self.n_tokenized += 1

    def of_unit(self, unit: Unit, values: np.ndarray) -> np.ndarray:
        """Return the values of the documents of a unit, from those of all."""
        return values[self.starts[unit.number] : self.starts[unit.number + 1]]

    def unit_of(self, row: int) -> Unit:
        return self.units[int(np.searchsorted(self.starts, row, side="right")) - 1]

    def place(self, row: int) -> tuple[str, int]:
        """Return (file, byte offset) of the record that a document is from."""
        part = self.unit_of(row).parts[int(self.rows["part"][row])]
        return part.name, int(self.rows["offset"][row])

    def named_place(self, row: int) -> str:
        return "{} at byte {}".format(*self.place(row))

    def detail(self, row: int) -> str:
        """Return why a document that passed the rules was dropped later, "" if it was kept."""
        if self.fates[row] == SCORE:
            return f"score {self.rows['score'][row]:.4g}"
        partner = int(self.partner[row])
        return (
            f"{self.similarity[row]:.2f} like {self.named_place(partner)}" if partner >= 0 else ""
        )

    def text(self, row: int, most: int) -> str:
        """Return at most so many bytes of a document that passed the rules."""
        with open(self.unit_of(row).file(self.work, "docs"), "rb") as f:
            f.seek(int(self.rows["begin"][row]))
            return f.read(min(int(self.rows["size"][row]), most)).decode("utf-8", "ignore")

    def texts(self, rows: np.ndarray) -> Iterator[str]:
        """Yield documents that passed the rules, given their indices in self.rows, ascending."""
        bounds = np.searchsorted(rows, self.starts)  # which of `rows` are of which unit
        for unit, (begin, end) in zip(self.units, pairwise(bounds.tolist()), strict=True):
            if begin < end:
                yield from unit.documents(self.work, rows[begin:end] - self.starts[unit.number])


def select(units: list[Unit], recipe: Recipe, work: Path) -> Selection:
    """Drop exact copies, then near copies, of the documents that passed. Write the fates of
    each unit."""
    # 65 bytes of memory a document, of any length: texts stay in the files of their units.
    per_unit = [np.fromfile(unit.file(work, "rows"), ROW) for unit in units]
    starts = np.cumsum([0, *map(len, per_unit)])
    rows = np.concatenate([np.empty(0, ROW), *per_unit])
    del per_unit  # which has as much again
    partner, similarity = np.full(len(rows), -1, np.int64), np.ones(len(rows), np.float32)
    fates = rows["reason"].copy()
    chosen = Selection(units, recipe, work, rows, fates, starts, partner, similarity)
    # Scores first: a copy must not be dropped for one that is dropped itself.
    drop_by_score(chosen)
    if recipe.near >= 0:
        drop_exact(chosen)
    if recipe.near > 0:
        drop_near(chosen)
    for unit in units:
        np.save(unit.file(work, "fates.npy"), chosen.of_unit(unit, chosen.fates))
    return chosen


def drop_by_score(chosen: Selection) -> None:
    """Drop the documents outside the bounds in per cent, if there are any."""
    left = np.flatnonzero(chosen.fates == KEPT)
    # Bounds that are numbers were applied with the other rules, to each document alone.
    for _, bounds, in_percent in parse_score(chosen.recipe.score)[:1]:
        if in_percent and len(left):
            scores = chosen.rows["score"][left]
            low, high = np.percentile(scores, np.clip(bounds, 0, 100))
            chosen.fates[left[(scores < low) | (scores > high)]] = SCORE


def drop_exact(chosen: Selection) -> None:
    left = np.flatnonzero(chosen.fates == KEPT)
    first = dedup.first_copies(chosen.rows["key"][left])  # indices in `left`, as `copies` are
    copies = np.flatnonzero(first != np.arange(len(left)))
    chosen.fates[left[copies]] = EXACT
    chosen.partner[left[copies]] = left[first[copies]]


def drop_near(chosen: Selection) -> None:
    recipe, work = chosen.recipe, chosen.work
    n_values = recipe.near_bands * recipe.near_rows
    candidates = np.flatnonzero(chosen.fates == KEPT)
    if not len(candidates):
        return
    with open(work / "signatures.tmp", "wb") as out:  # one file of all candidates, to be mapped
        for unit in chosen.units:
            # There are signatures of the documents that passed; some were dropped above.
            passed = chosen.of_unit(unit, chosen.rows["reason"]) == KEPT
            wanted = chosen.of_unit(unit, chosen.fates)[passed] == KEPT
            signatures = np.fromfile(unit.file(work, "sigs"), "<u4").reshape(-1, dedup.N_PERM)
            assert len(signatures) == passed.sum(), f"{unit.number=} {len(signatures)=}"
            out.write(np.ascontiguousarray(signatures[wanted, :n_values]).data)
    shape = (len(candidates), n_values)
    signatures = np.memmap(work / "signatures.tmp", "<u4", "r", shape=shape)
    found = dedup.near_duplicates(signatures, recipe.near, recipe.near_bands, recipe.near_rows)
    copies = candidates[found.dropped]
    chosen.fates[copies] = NEAR
    chosen.partner[copies], chosen.similarity[copies] = candidates[found.partner], found.similarity
    chosen.capped = found.capped


# ---- splits --------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A part of a document that was cut into the splits."""

    index: int  # in SourceDocs.rows
    text: str
    is_whole: bool  # the text is all of that row


@dataclass
class SourceDocs:
    """The kept documents of one source."""

    source: Source
    chosen: Selection
    units: list[Unit]
    rows: np.ndarray  # (n,) index in Selection.rows, in order
    splits: np.ndarray  # (n,) uint8, index in ROW_SPLITS
    cut: np.ndarray  # (k, 2): begin and end in rows of each document to cut; a huge one has several
    ends: tuple[float, float]  # shares of each of those that val and test get

    def __post_init__(self) -> None:
        self.whole = are_whole(self.cut, len(self.rows))  # (n,) bool: not of a document to cut
        self.n_bytes = self.chosen.rows["n_bytes"][self.rows]  # (n,) of text

    def texts(self, which: np.ndarray | slice) -> Iterator[str]:
        return self.chosen.texts(self.rows[which])

    def pieces(self, k: int) -> Iterator[tuple[int, Piece]]:
        """Yield the pieces of document k of those to cut, each with the index of its split in
        SPLITS. Holds one piece: the document may be a file of gigabytes."""
        begin, end = self.cut[k].tolist()
        # Read twice, first for the length.
        length, offset = sum(map(len, self.texts(slice(begin, end)))), 0
        places = [0, *cut_places(length, *self.ends), length]  # where each split begins and ends
        for i, text in enumerate(self.texts(slice(begin, end)), begin):
            for number in range(len(SPLITS)):
                first, last = (max(place - offset, 0) for place in places[number : number + 2])
                inside = text[first:last]
                if inside:
                    yield number, Piece(i, inside, len(inside) == len(text))
            offset += len(text)

    def ids(self, dtype: np.dtype, what: str = "tokens") -> Iterator[np.ndarray]:
        """Yield the ids, or the masks, of each kept document, in order."""
        for unit in self.units:
            self.chosen.wait_for(unit)
            with open(unit.file(self.chosen.work, what), "rb") as f:
                for n in np.fromfile(unit.file(self.chosen.work, "lengths"), "<i8").tolist():
                    yield np.frombuffer(f.read(n * dtype.itemsize), dtype)

    def training_texts(self, most: int, most_chars: int = 0) -> Iterator[str]:
        """Yield documents of train, all or a sample of about `most` bytes. most_chars: of a text
        that is cut into the splits; 0 = any."""
        wanted = self.splits == 0
        n_bytes = int(self.n_bytes[wanted].sum())
        if n_bytes > most:  # a sample: the texts of the lowest hashes
            wanted &= self.chosen.rows["key"][self.rows, 1] / 2.0**64 < most / n_bytes
        yield from self.texts(wanted & self.whole)
        # Of documents that are cut only what is before the ends may be seen: they are of other
        # splits.
        for k in range(len(self.cut)):
            for split, piece in self.pieces(k):
                if split == 0 and wanted[piece.index]:
                    step = most_chars or len(piece.text)
                    for begin in range(0, len(piece.text), step):
                        yield piece.text[begin : begin + step]


def split_sources(chosen: Selection) -> list[SourceDocs]:
    """Return the kept documents of each source with their splits.

    Pairs of all sources are split together: a prompt may be in several sources, and must not be in
    two splits. If a few documents are the text of a source, or most of it, each of them is cut into
    all splits. What became val goes into chosen.split_notes."""
    recipe = chosen.recipe
    source_of = np.repeat([unit.source for unit in chosen.units], np.diff(chosen.starts))
    kept = np.flatnonzero(chosen.fates == KEPT)
    rows_of = [kept[source_of[kept] == number] for number in range(len(recipe.sources))]
    # What no one assigns below is held out: `split_rows` leaves those documents alone.
    splits = np.full(len(chosen.rows), ROW_SPLITS.index("held_out"), np.uint8)
    if recipe.kind == "preference":  # of which none is cut
        cuts = [split_rows("", kept, splits, chosen)] * len(rows_of)
    else:
        pairs = zip(recipe.sources, rows_of, strict=True)
        cuts = [split_rows(one.name, rows, splits, chosen) for one, rows in pairs]
    parts = []
    for number, source in enumerate(recipe.sources):
        units = [unit for unit in chosen.units if unit.source == number]
        rows, cut = rows_of[number], cuts[number]
        ends = ends_of(rows, cut, chosen)
        parts.append(SourceDocs(source, chosen, units, rows, splits[rows], cut, ends))
    return parts


def split_rows(name: str, rows: np.ndarray, splits: np.ndarray, chosen: Selection) -> np.ndarray:
    """Write into `splits` the split of the documents `rows` of a source. Return (k, 2) where in
    `rows` each document begins and ends that must be cut; most often there is none."""
    recipe, of_source = chosen.recipe, f" of source {name}" if name else ""
    if recipe.hold_out:
        held_out = are_held_out(chosen.rows["question"][rows], recipe.hold_out)
        if len(rows) and not held_out.any():
            none = f"of {counted(len(rows), 'conversation')}{of_source} picked none"
            chosen.split_notes.append(f"warning: hold_out={recipe.hold_out} {none}")
        rows = rows[~held_out]
    splits[rows], moved = assign(
        chosen.rows["position"][rows], recipe.val_fraction, recipe.test_fraction, recipe.fold,
        by_prompt=recipe.kind == "preference",
    )  # fmt: skip
    cut = documents_to_cut(rows, chosen)
    if len(cut):
        whole = are_whole(cut, len(rows))
        fractions = recipe.val_fraction, recipe.test_fraction
        splits[rows[~whole]] = 0  # until their ends are cut off, see `cut_document`
        splits[rows[whole]] = split_together(chosen.rows["position"][rows[whole]], *fractions)
    chosen.split_notes += split_notes(of_source, rows, splits[rows] == 1, cut, moved, chosen)
    return cut


def split_notes(
    of_source: str, rows: np.ndarray, in_val: np.ndarray, cut: np.ndarray, moved: bool,
    chosen: Selection,
) -> list[str]:  # fmt: skip
    """Return which part of the documents `rows` became val, and what is unusual about it. moved:
    one was taken for val, for the hashes picked none."""
    recipe, hint = chosen.recipe, ""
    by_file = recipe.kind == "text" and any(one.txt_split == "file" for one in recipe.sources)
    # Rows and lines have offsets; a document that is a file begins at 0.
    if by_file and not chosen.rows["offset"][rows].any():
        hint = "; if a .txt file holds many documents, --txt_split=blank or line separates them"
    if len(cut):
        whole = are_whole(cut, len(rows))
        documents = counted(len(cut), "long document" if whole.any() else "document")
        its = "the end of each" if len(cut) > 1 else "its end"
        ends = zip(("val", "test"), ends_of(rows, cut, chosen), strict=True)
        parts = [f"{split} ({100 * share:.3g} %)" for split, share in ends if share]
        only = "" if whole.any() else "only "
        note = f"{only}{documents}{of_source}: {its} becomes {' and '.join(parts)}"
        if whole.any():
            n_val = int(in_val[whole].sum())
            note += f"; of the {whole.sum():,} others, a hash chose {n_val:,} for val"
        return [note + hint]
    n_bytes = chosen.rows["n_bytes"][rows]
    share = n_bytes[in_val].sum() / max(1, n_bytes.sum())
    notes = [describe_val(of_source, in_val, n_bytes, recipe)]
    if moved:
        wanted = f"fold={recipe.fold}" if recipe.fold else f"val_fraction={recipe.val_fraction}"
        none = f"{wanted} of {counted(len(rows), 'document')}{of_source} picked none"
        taken = f"one is taken for val, {100 * share:.2g} % of the text, and not trained on"
        notes.append(f"warning: {none}, so {taken}{hint}")
    # Documents are picked by number, so a few long ones may be most of the text.
    elif not recipe.fold and share > max(LARGE_VAL, 2 * recipe.val_fraction):
        what = f"val has {100 * share:.0f} % of the text{of_source}"
        many = f"{what}: few, or long, documents are in it; give more, or shorter ones"
        notes.append(f"warning: {many}")
    return notes


def describe_val(of_source: str, in_val: np.ndarray, n_bytes: np.ndarray, recipe: Recipe) -> str:
    """Return which whole documents are val, from their bytes (n,)."""
    what = {"text": "document", "chat": "conversation", "preference": "pair"}[recipe.kind]
    of_all = f"of {counted(len(in_val), what)}{of_source}"
    if not in_val.any():
        return f"val: none {of_all}"
    size = f"{n_bytes[in_val].sum():,} of {counted(int(n_bytes.sum()), 'byte')}"
    return f"val: {in_val.sum():,} {of_all}, chosen by a hash; {size}"


def ends_of(rows: np.ndarray, cut: np.ndarray, chosen: Selection) -> tuple[float, float]:
    """Return `shares_of_ends` of the documents to cut; of none, the settings."""
    n_bytes = int(chosen.rows["n_bytes"][rows[~are_whole(cut, len(rows))]].sum())
    fractions = chosen.recipe.val_fraction, chosen.recipe.test_fraction
    return shares_of_ends(len(cut), n_bytes, *fractions) if len(cut) else fractions


def are_whole(cut: np.ndarray, n_rows: int) -> np.ndarray:
    """Return (n_rows,) bool which rows of a source are of no document to cut, (k, 2)."""
    whole = np.ones(n_rows, bool)
    for begin, end in cut.tolist():
        whole[begin:end] = False
    return whole


def documents_to_cut(rows: np.ndarray, chosen: Selection) -> np.ndarray:
    """Return (k, 2) where in `rows` the documents to cut begin and end, by `least_to_cut`: none of
    conversations or pairs. All pieces of a huge document are from one record. Raise UserError where
    one document should give several folds."""
    recipe = chosen.recipe
    if recipe.kind != "text" or not len(rows):
        return np.zeros((0, 2), np.int64)
    # A document begins where the unit, the part or the offset differs from the one before.
    record = np.vstack([
        np.searchsorted(chosen.starts, rows, side="right"),
        chosen.rows["part"][rows],
        chosen.rows["offset"][rows],
    ])
    starts = np.flatnonzero(np.diff(record, axis=1, prepend=-1).any(0))
    if recipe.fold and len(starts) == 1:
        what = f"fold={recipe.fold} needs several documents, and there is one"
        raise UserError(f"prepare: {what}; use txt_split=blank")
    share = 0 if recipe.fold else recipe.val_fraction + recipe.test_fraction
    sizes = np.add.reduceat(chosen.rows["n_bytes"][rows].astype(np.int64), starts)
    is_cut = sizes >= least_to_cut(sizes, len(sizes), int(sizes.sum()), share)
    return np.stack([starts, np.append(starts[1:], len(rows))], axis=1)[is_cut]


# ---- texts to train a tokenizer on ---------------------------------------------------------------


def training_texts(parts: list[SourceDocs], most: int) -> Iterator[str]:
    """Return documents of train: of one source all, or a sample (by hash) of about `most` bytes; of
    several sources by turns, by their weights, `most` bytes in all. A source too small for its
    weight is read up to MAX_REPEATS times: in training it is repeated, too."""
    if len(parts) == 1:
        return parts[0].training_texts(most)
    sizes = [float(part.n_bytes.sum()) for part in parts]
    weights = [part.source.weight or size for part, size in zip(parts, sizes, strict=True)]
    # The source that is largest for its weight is read once; the others are read until they fit.
    ratios = [size / weight for size, weight in zip(sizes, weights, strict=True) if weight]
    sources = []
    for part, size, weight in zip(parts, sizes, weights, strict=True):
        if not weight:
            continue
        wanted = min(max(ratios) * weight, most)
        n_times = max(1, min(MAX_REPEATS, round(wanted / size))) if size else 1
        # mix_texts takes MAX_DOC_CHARS of each text, so longer ones are cut.
        texts = chain.from_iterable([
            part.training_texts(most, MAX_DOC_CHARS) for _ in range(n_times)
        ])
        share = f"weight {weight:g}" if part.source.weight else "by its size"
        times = f", read {n_times} times" if n_times > 1 else ""
        label = f"source {part.source.name}, {share}{times}"
        sources.append((label, texts, weight))
    return mix_texts(sources, most)


# ---- the files of each split ---------------------------------------------------------------------


def write_splits(
    parts: list[SourceDocs], chosen: Selection, tokenizer: Tokenizer, info: dict
) -> dict:
    """Write the tokens into the shards of their sources and splits, and the manifest with the
    entries `info`; return it."""
    dtype, shards, work = token_dtype(tokenizer.vocab_size), [], chosen.work
    ids = tokenizer.vocab_size, tokenizer.eot_id
    for part in parts:
        numbered, next_row = enumerate(part.ids(dtype)), 0
        writers = [
            ShardWriter(work / "out", s, *ids, SHARD_TOKENS, part.source.name) for s in SPLITS
        ]
        # Documents that are cut: ShardWriter.begin needs a document's length, so its ids are
        # collected in a file first; the document may be of gigabytes.
        for k, (begin, end) in enumerate(part.cut.tolist()):
            add_whole(range(next_row, begin), part, numbered, writers)
            next_row = end
            for split, own in groupby(part.pieces(k), key=lambda pair: pair[0]):
                path = work / f"document_{k}_{split}.tmp"
                size = write_ids((piece for _, piece in own), numbered, tokenizer, path)
                writers[split].begin(path.stat().st_size // dtype.itemsize, size)
                with open(path, "rb") as f:  # mapped, it would fill the memory
                    while len(block := np.fromfile(f, dtype, 2**20)):
                        writers[split].extend(block)
                path.unlink()
        add_whole(range(next_row, len(part.rows)), part, numbered, writers)
        for writer in writers:
            shards += writer.close()
    weights = {part.source.name: part.source.weight for part in parts if part.source.weight}
    return write_manifest(work / "out", *ids, tokenizer.fingerprint(), shards, info, weights)


def add_whole(
    rows: range, part: SourceDocs, numbered: Iterator, writers: list[ShardWriter]
) -> None:
    """Add the documents at these indices in part.rows to the writers of their splits."""
    for row in rows:
        writers[part.splits[row]].add(ids_at(row, numbered), int(part.n_bytes[row]))


def ids_at(index: int, numbered: Iterator) -> np.ndarray:
    """Return the ids of a document, and go on behind it. numbered: (index, ids) from here on."""
    return next(ids for i, ids in numbered if i == index)


def write_ids(pieces: Iterable[Piece], numbered: Iterator, tokenizer: Tokenizer, path: Path) -> int:
    """Write the ids of the pieces of a document; return their bytes of text. Pieces that were not
    cut have their ids already, unless this tokenizer begins each text with a space.

    numbered: (index, ids) of all documents from here on."""
    dtype, n_bytes = token_dtype(tokenizer.vocab_size), 0
    # If ids depend on where a text begins, pieces must be encoded as one.
    if tokenizer.encode("\n\nb") != tokenizer.encode("\n\n") + tokenizer.encode("b"):
        pieces = [Piece(0, "".join(piece.text for piece in pieces), False)]
    with open(path, "wb") as f:
        for piece in pieces:
            if piece.is_whole:
                ids = ids_at(piece.index, numbered)
            else:
                ids = tokenizer.encode_array(piece.text)
            f.write(np.asarray(ids).astype(dtype).data)
            n_bytes += len(piece.text.encode())
    return n_bytes


def write_rows(
    parts: list[SourceDocs], chosen: Selection, tokenizer: Tokenizer | None, info: dict
) -> dict:
    """Write conversations or pairs as train.jsonl, val.jsonl, ..., and with a tokenizer the ids and
    masks of conversations beside them, but for those held out. Write the manifest with the entries
    `info`; return it."""
    out, entries = chosen.work / "out", {}
    dtype = token_dtype(tokenizer.vocab_size) if tokenizer else np.dtype("u1")
    for number, split in enumerate(ROW_SPLITS):
        path, n_rows = out / f"{split}.jsonl", sum((p.splits == number).sum() for p in parts)
        if not n_rows:
            continue
        writer = ConversationWriter(out, split, dtype) if tokenizer and split in SPLITS else None
        with open(path, "w", encoding="utf-8") as f:
            for part in parts:
                name = part.source.name
                for row in part.texts(part.splits == number):
                    row = f'{row[:-1]}, "source": {json.dumps(name)}}}' if name else row
                    f.write(f"{row}\n")
                # Ids are in the order of all documents of the source, of any split.
                if writer:
                    masks = part.ids(np.dtype("u1"), "mask")
                    tokens = zip(part.splits, part.ids(dtype), masks, strict=True)
                    for its_split, ids, mask in tokens:
                        if its_split == number:
                            writer.add(ids, mask)
        entry = {"file": path.name, "rows": int(n_rows), "bytes": path.stat().st_size}
        entry["sha256"] = file_sha256(path)
        if writer:
            entry["tokens"] = writer.close()
        entries[split] = entry
    manifest = {"format": ROWS_FORMAT, "kind": chosen.recipe.kind, "splits": entries, "info": info}
    if tokenizer:
        manifest["tokenizer_fingerprint"] = tokenizer.chat_fingerprint()
        manifest["vocab_size"] = tokenizer.vocab_size
    write_record(out / "manifest.json", manifest)
    return manifest
