"""Compare the documents that passed the rules (pipeline.py) with each other, drop copies, and assign splits.

Of several copies the first in the order of the input is kept. A document is only dropped as a copy of one that is kept.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from groundup.errors import UserError
from groundup.files.splits import SPLITS, assign
from groundup.text import dedup
from groundup.text.recipe import Recipe, Source, parse_score
from groundup.text.units import EXACT, KEPT, NEAR, ROW, SCORE, Counts, Unit, read_kept, unit_fates

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
        for k, unit in enumerate(units):
            own = slice(chosen.starts[k], chosen.starts[k + 1])
            passed = chosen.rows["reason"][own] == KEPT
            signatures = np.fromfile(unit.file(work, "sigs"), "<u4").reshape(-1, n_perm)
            assert len(signatures) == passed.sum(), f"{unit.number=} {len(signatures)=} {passed.sum()=}"
            out.write(np.ascontiguousarray(signatures[chosen.fates[own][passed] == KEPT]).data)
    if not len(candidates):
        return
    signatures = np.memmap(work / "signatures.tmp", "<u4", "r", shape=(len(candidates), n_perm))
    found = dedup.near_duplicates(signatures, recipe.near, recipe.near_bands, recipe.near_rows)
    chosen.fates[candidates[found.dropped]] = NEAR
    chosen.capped = found.capped
    copies = candidates[found.dropped]
    chosen.partner[copies], chosen.similarity[copies] = candidates[found.partner], found.similarity


def cut(text: str, recipe: Recipe) -> tuple[str, str, str]:
    """Return a single document cut into train, val and test, in this order, by the fractions of its characters.

    With val_fraction=0.1 these are nanoGPT's text[: int(n * 0.9)] and text[int(n * 0.9) :].
    """
    if recipe.fold:
        hint = "use txt_split=blank"
        raise UserError(f"prepare: fold={recipe.fold} needs several documents, and there is one; {hint}")
    val_begin = int(len(text) * (1 - recipe.test_fraction - recipe.val_fraction))
    test_begin = int(len(text) * (1 - recipe.test_fraction))
    return text[:val_begin], text[val_begin:test_begin], text[test_begin:]


def split_sources(chosen: Selection, units: list[Unit], recipe: Recipe) -> list[SourceDocs]:
    """Return the kept documents of each source with their splits. Pairs of all sources are split together: a prompt
    may be in several sources, and must not be in two splits. Print a warning if val or held_out was empty."""
    of_row = np.repeat(np.array([unit.source for unit in units], np.int64), np.diff(chosen.starts))
    kept = np.flatnonzero(chosen.fates == KEPT)
    by_prompt = recipe.kind == "preference"
    splits = np.full(len(chosen.rows), ROW_SPLITS.index("held_out"), np.uint8)
    rows_of = [kept[of_row[kept] == number] for number in range(len(recipe.sources))]
    names = [source.name for source in recipe.sources]
    for name, rows in [("", kept)] if by_prompt else zip(names, rows_of, strict=True):
        of, held_out = f" of source {name}" if name else "", chosen.rows["held_out"][rows]
        if recipe.hold_out and len(rows) and not held_out.any():
            print(f"prepare: warning: hold_out={recipe.hold_out} takes none of so few conversations{of}")
        rows = rows[~held_out]
        positions, share = chosen.rows["position"][rows], recipe.fold or recipe.val_fraction
        splits[rows], moved = assign(positions, recipe.val_fraction, recipe.test_fraction, recipe.fold, by_prompt)
        if moved:
            print(f"prepare: warning: val takes none of so few documents{of} ({share} of them); one is moved there")
    return [
        SourceDocs(source, [unit for unit in units if unit.source == number], rows_of[number], splits[rows_of[number]])
        for number, source in enumerate(recipe.sources)
    ]


def single_text(chosen: Selection, units: list[Unit], counts: Counts, work: Path) -> str | None:
    """Return the text if the input is one document, else None. The pieces of a huge document are joined again."""
    if counts.records != 1 or not (chosen.fates == KEPT).any():
        return None
    return "".join(text for unit in units for _, text in read_kept(unit, work, unit_fates(unit, work)))
