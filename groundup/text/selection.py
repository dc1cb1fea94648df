"""Documents compared with each other: which are kept, in which split they are, and a report of it all.

What is dropped by a rule of its own is decided before (pipeline.py). Of several copies that pass, the first survives,
in the order of the input: never one in favour of another that is dropped itself.
"""

import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from groundup.errors import UserError
from groundup.files.splits import SPLITS, assign
from groundup.text import dedup
from groundup.text.pipeline import (  # fmt: skip
    EXACT,
    KEPT,
    NEAR,
    REASONS,
    SCORE,
    SHOWN,
    Counts,
    Input,
    Recipe,
    Source,
    Unit,
    parse_score,
    read_kept,
    read_samples,
    unit_fates,
    unit_rows,
)

ROW_SPLITS = (*SPLITS, "held_out")  # of conversations: questions that instruction tuning never sees


# ---- documents compared with each other ------------------------------------------------------


@dataclass
class Selection:
    """All documents of all units, in order, and what became of each."""

    rows: np.ndarray  # (n,) pipeline.ROW
    fates: np.ndarray  # (n,) uint8, indices of REASONS
    starts: np.ndarray  # (units + 1,) int64: the documents of unit k are starts[k] to starts[k + 1]
    partner: np.ndarray  # (n,) int64: of a dropped copy, the earlier document; else -1
    similarity: np.ndarray  # (n,) float32: of the two
    capped: int = 0  # documents that were not compared with all of a large bucket, see dedup.near_duplicates

    def unit_of(self, row: int) -> int:
        return int(np.searchsorted(self.starts, row, side="right")) - 1

    def place(self, row: int, units: list[Unit]) -> tuple[str, int]:
        """(file, byte offset) of the record that a document is from."""
        part = units[self.unit_of(row)].parts[int(self.rows["part"][row])]
        return part.name, int(self.rows["offset"][row])

    def where(self, row: int, units: list[Unit]) -> str:
        return "{} at byte {}".format(*self.place(row, units))


def select(units: list[Unit], recipe: Recipe, work: Path) -> Selection:
    """Decide what is kept of what passed: exact copies go first, then near copies. Writes work/fates.npy."""
    per_unit = [unit_rows(unit, work) for unit in units]
    rows = np.concatenate(per_unit)
    starts = np.cumsum([0, *map(len, per_unit)])
    del per_unit
    partner, similarity = np.full(len(rows), -1, np.int64), np.ones(len(rows), np.float32)
    chosen = Selection(rows, rows["reason"].copy(), starts, partner, similarity)
    drop_by_percentile(chosen, recipe)
    left = np.flatnonzero(chosen.fates == KEPT)
    if recipe.exact and len(left):
        first = dedup.first_copies(rows["key"][left])
        copies = np.flatnonzero(first != np.arange(len(left)))
        chosen.fates[left[copies]], chosen.partner[left[copies]] = EXACT, left[first[copies]]
    if recipe.near:
        drop_near(chosen, units, recipe, work)
    for name, array in (("starts", chosen.starts), ("fates", chosen.fates)):
        np.save(work / f"{name}.npy", array)
    return chosen


def drop_by_percentile(chosen: Selection, recipe: Recipe) -> None:
    """Bounds in per cent, of the first score key, over the documents that are left."""
    for _, *bounds in parse_score(recipe.score)[:1]:
        left = np.flatnonzero(chosen.fates == KEPT)
        scores = chosen.rows["score"][left]
        low, high = (float(bound.removesuffix("%")) if bound.endswith("%") else None for bound in bounds)
        if len(left) and low is not None:
            chosen.fates[left[scores < np.percentile(scores, low)]] = SCORE
        if len(left) and high is not None:
            chosen.fates[left[scores > np.percentile(scores, high)]] = SCORE


def drop_near(chosen: Selection, units: list[Unit], recipe: Recipe, work: Path) -> None:
    n_perm = recipe.near_bands * recipe.near_rows
    candidates = np.flatnonzero(chosen.fates == KEPT)
    with open(work / "signatures.tmp", "wb") as out:  # those of the candidates, so that they can be mapped as one
        for k, unit in enumerate(units):
            own = slice(chosen.starts[k], chosen.starts[k + 1])
            passed = chosen.rows["reason"][own] == KEPT
            signatures = np.fromfile(unit.file(work, "sigs"), "<u4").reshape(-1, n_perm)
            assert len(signatures) == passed.sum(), f"{unit.number=} {len(signatures)=} {passed.sum()=}"
            out.write(np.ascontiguousarray(signatures[chosen.fates[own][passed] == KEPT]).data)
    if not len(candidates):
        return
    signatures = np.memmap(work / "signatures.tmp", "<u4", "r", shape=(len(candidates), n_perm))
    found = dedup.near_duplicates(signatures, recipe.near, recipe.near_bands, recipe.near_rows, recipe.near_engine)
    chosen.fates[candidates[found.dropped]] = NEAR
    chosen.capped = found.capped
    copies = candidates[found.dropped]
    chosen.partner[copies], chosen.similarity[copies] = candidates[found.partner], found.similarity


def write_dropped(chosen: Selection, units: list[Unit], out: Path) -> None:
    """dropped.tsv: every document that was read and dropped, why, and of a copy what it is like, and how much."""
    with open(out / "dropped.tsv", "w", encoding="utf-8") as f:
        f.write("path\tbyte\treason\tlike path\tlike byte\tsimilarity\n")
        for row in np.flatnonzero(chosen.fates != KEPT).tolist():
            columns = [*chosen.place(row, units), REASONS[chosen.fates[row]]]
            if chosen.partner[row] >= 0:
                columns += [*chosen.place(int(chosen.partner[row]), units), f"{chosen.similarity[row]:.4f}"]
            f.write("\t".join(map(str, columns)) + "\n")


# ---- splits ----------------------------------------------------------------------------------


def splits_of(positions: np.ndarray, recipe: Recipe, name: str) -> np.ndarray:
    """As `assign`, with a word to the user if val takes a document that it would not."""
    by_prompt = recipe.kind == "preference"
    splits, moved = assign(positions, recipe.val_fraction, recipe.test_fraction, recipe.fold, by_prompt)
    if moved:
        of, share = f" of source {name}" if name else "", recipe.fold or recipe.val_fraction
        print(f"prepare: warning: val takes none of so few documents{of} ({share} of them); one is moved there")
    return splits


def cut(text: str, recipe: Recipe) -> tuple[str, str, str]:
    """A single document as train, val and test: test is the last test_fraction of its characters, val lies before it.

    With val_fraction=0.1 these are nanoGPT's text[: int(n * 0.9)] and text[int(n * 0.9) :].
    """
    if recipe.fold:
        hint = "use txt_split=blank"
        raise UserError(f"prepare: fold={recipe.fold} needs several documents, and there is one; {hint}")
    val_begin = int(len(text) * (1 - recipe.test_fraction - recipe.val_fraction))
    test_begin = int(len(text) * (1 - recipe.test_fraction))
    return text[:val_begin], text[val_begin:test_begin], text[test_begin:]


class Share(NamedTuple):
    """The kept documents of one source."""

    source: Source
    units: list[Unit]
    rows: np.ndarray  # (n,) index in Selection.rows, in order
    splits: np.ndarray  # (n,) uint8, index in ROW_SPLITS


def shares(chosen: Selection, units: list[Unit], recipe: Recipe) -> list[Share]:
    """The kept documents of each source with their splits. Pairs are split as one: a prompt may be in several sources,
    and must not be in two splits."""
    of_unit = np.array([unit.source for unit in units], np.int64)
    of_row = np.repeat(of_unit, np.diff(chosen.starts))
    found = []
    kept = np.flatnonzero(chosen.fates == KEPT)
    of_pairs = np.zeros(len(chosen.rows), np.uint8)
    if recipe.kind == "preference":
        of_pairs[kept] = splits_of(chosen.rows["position"][kept], recipe, "")
    for number, source in enumerate(recipe.sources):
        rows = kept[of_row[kept] == number]
        own = [unit for unit in units if unit.source == number]
        if recipe.kind == "preference":
            found.append(Share(source, own, rows, of_pairs[rows]))
            continue
        held_out = chosen.rows["held_out"][rows]
        if recipe.hold_out and len(rows) and not held_out.any():
            of = f" of source {source.name}" if source.name else ""
            print(f"prepare: warning: hold_out={recipe.hold_out} takes none of so few conversations{of}")
        splits = np.full(len(rows), ROW_SPLITS.index("held_out"), np.uint8)
        splits[~held_out] = splits_of(chosen.rows["position"][rows[~held_out]], recipe, source.name)
        found.append(Share(source, own, rows, splits))
    return found


def single_text(chosen: Selection, units: list[Unit], counts: Counts, work: Path) -> str | None:
    """The text, if the input is one document; a huge one was cut, and is put together again."""
    if counts.records != 1 or not (chosen.fates == KEPT).any():
        return None
    return "".join(text for unit in units for _, text in read_kept(unit, work, unit_fates(unit, work)))


# ---- the report ------------------------------------------------------------------------------


def check_train(parts: list[Share]) -> None:
    """Raise PrepareError if there is nothing to learn from; say which sources give nothing."""
    for part in parts:
        if part.source.name and not (part.splits == 0).any():
            print(f"prepare: warning: nothing is left for train of source {part.source.name}")
    if not any((part.splits == 0).any() for part in parts):
        raise UserError("prepare: no document is left for train; lower val_fraction or hold_out, or give more text")


def nothing_kept(counts: Counts, chosen: Selection | None) -> UserError:
    dropped = counts.lost + Counter(reason_counts(chosen) if chosen else {})
    reasons = ", ".join(f"{n} {reason}" for reason, n in dropped.items()) or "the input holds none"
    first = f"; first: {counts.shown[0]}" if counts.shown else ""
    return UserError(f"prepare: no document to prepare: {reasons}{first}")


def reason_counts(chosen: Selection) -> dict[str, int]:
    """{reason: documents dropped for it}, in the order of REASONS."""
    counts = np.bincount(chosen.fates, minlength=len(REASONS)).tolist()
    return {reason: n for reason, n in zip(REASONS, counts, strict=True) if n and reason != "kept"}


def summarize(
    info: dict, inputs: list[Input], counts: Counts, chosen: Selection, parts: list[Share], recipe: Recipe
) -> None:
    """Put into `info` what became of all that was read: what is read is what is kept and what is dropped."""
    sizes = np.bincount(chosen.fates, chosen.rows["n_bytes"], len(REASONS)).astype(np.int64).tolist()
    dropped_bytes = {reason: n for reason, n in zip(REASONS, sizes, strict=True) if n and reason != "kept"}
    n_read, n_kept = counts.records + counts.split_huge, int((chosen.fates == KEPT).sum())
    dropped = dict(counts.lost) | reason_counts(chosen)
    assert n_read == n_kept + sum(dropped.values()), f"{n_read=} {n_kept=} {dropped=}"
    assert counts.bytes_read == sum(sizes) + counts.bytes_cleaned + counts.bytes_cut, f"{counts=} {sizes=}"
    info["documents"] = {"read": n_read, "kept": n_kept, "dropped": dropped, "mended": dict(counts.mended)}
    if counts.split_huge:
        info["documents"]["mended"]["split_huge"] = counts.split_huge
    info["bytes"] = {
        "read": counts.bytes_read, "kept": sizes[KEPT], "cleaned": counts.bytes_cleaned, "cut": counts.bytes_cut,
        "dropped": dropped_bytes,
    }  # fmt: skip
    if recipe.near:
        values = chosen.similarity[chosen.fates == NEAR]
        histogram, _ = np.histogram(values, bins=np.linspace(0, 1, 21))
        bins = {f"{k * 0.05:.2f}": n for k, n in enumerate(histogram.tolist()) if n}
        info["near"] = {"bands": recipe.near_bands, "rows": recipe.near_rows, "similarity": bins,
                        "not_compared": chosen.capped}  # fmt: skip
    if recipe.sources[0].name:
        info["sources"] = {part.source.name: {"kept": len(part.rows)} for part in parts}
    unreadable = {file.name for file in inputs if file.problem}
    info["failed"] = sorted(unreadable | counts.failed())


def print_problems(unreadable: list[Input], counts: Counts) -> None:
    problems = [f"{file.name}: cannot be read: {file.problem}" for file in unreadable] + counts.shown
    print("".join(f"prepare: {problem}\n" for problem in problems[:SHOWN]), end="")


def write_problems(unreadable: list[Input], others: Iterable[Path], units: list[Unit], work: Path) -> None:
    """out/errors.tsv: all problems, first files that cannot be opened, then those in the files `others`, then those of
    the units, in the order of the inputs."""
    with open(work / "out" / "errors.tsv", "w", encoding="utf-8") as out:
        out.write("path\tline\tbyte\treason\tdetail\n")
        out.writelines(f"{file.name}\t0\t0\tunreadable_file\t{file.problem}\n" for file in unreadable)
        for path in (*others, *(unit.file(work, "problems") for unit in units)):
            with open(path, encoding="utf-8") as f:
                shutil.copyfileobj(f, out)


def write_report(info: dict, notes: list[str], chosen: Selection, units: list[Unit], work: Path) -> None:
    """out/report.md: counts by reason, notes, and for people to judge the rules by: documents that each dropped, and
    kept."""
    documents, n_bytes = info["documents"], info["bytes"]
    lines = ["# What became of the input", "", "| | documents | bytes of text |", "|---|---:|---:|"]
    lines.append(f"| read | {documents['read']:,} | {n_bytes['read']:,} |")
    for reason, n in documents["dropped"].items():
        lines.append(f"| {reason} | {n:,} | {n_bytes['dropped'].get(reason, 0):,} |")
    lines.append(f"| cleaned away, cut out | | {n_bytes['cleaned'] + n_bytes['cut']:,} |")
    lines.append(f"| **kept** | {documents['kept']:,} | {n_bytes['kept']:,} |")
    lines += [f"\n{n:,} documents were mended: {what}." for what, n in documents["mended"].items()]
    lines += [f"\n{note}." for note in notes]
    lengths = chosen.rows["n_bytes"][chosen.fates == KEPT]
    marks = ", ".join(f"{int(v):,}" for v in np.percentile(lengths, [0, 10, 50, 90, 99, 100]))
    lines.append(f"\nBytes per kept document (least, 10 %, median, 90 %, 99 %, most): {marks}.")
    for reason, samples in sorted(report_samples(chosen, units, work).items()):
        lines.append(f"\n## {reason}\n")
        lines += [f"- {where}: {detail}\n  > {' '.join(excerpt.split())[:200]}" for where, detail, excerpt in samples]
    (work / "out" / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def report_samples(chosen: Selection, units: list[Unit], work: Path) -> dict[str, list[tuple[str, str, str]]]:
    """{reason: [(where, detail, excerpt)]} of up to SHOWN documents each, chosen by chance but always the same."""
    found: dict[str, list[tuple[int, str, str, str]]] = {}
    for _, reason, sample in read_samples(units, work):
        held = found.setdefault(reason, [])
        held.append((sample.position, sample.where, sample.detail, sample.excerpt))
        if len(held) > 4 * SHOWN:
            found[reason] = sorted(held)[:SHOWN]
    for fate in (KEPT, EXACT, NEAR, SCORE):
        rows = np.flatnonzero((chosen.fates == fate) & (chosen.rows["reason"] == KEPT))
        for row in rows[np.argsort(chosen.rows["position"][rows], kind="stable")[:SHOWN]].tolist():
            partner, similarity = int(chosen.partner[row]), chosen.similarity[row]
            detail = f"{similarity:.2f} like {chosen.where(partner, units)}" if partner >= 0 else ""
            detail = f"score {chosen.rows['score'][row]:.4g}" if fate == SCORE else detail
            excerpt = excerpt_of(row, chosen, units, work)
            found.setdefault(REASONS[fate], []).append(
                (int(chosen.rows["position"][row]), chosen.where(row, units), detail, excerpt)
            )
    return {reason: [sample[1:] for sample in sorted(samples)[:SHOWN]] for reason, samples in found.items()}


def excerpt_of(row: int, chosen: Selection, units: list[Unit], work: Path) -> str:
    size = min(int(chosen.rows["size"][row]), 900)
    with open(units[chosen.unit_of(row)].file(work, "docs"), "rb") as f:
        f.seek(int(chosen.rows["begin"][row]))
        return f.read(size).decode("utf-8", "ignore")
