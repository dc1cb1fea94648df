"""Report what happened to the input: printed counts, and report.md, dropped.tsv and errors.tsv of the output."""

import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from groundup.errors import UserError
from groundup.text import answer_pairs
from groundup.text.recipe import Recipe
from groundup.text.selection import Selection, SourceDocs
from groundup.text.units import EXACT, KEPT, NEAR, REASONS, SCORE, SHOWN, Counts, Input, Unit, read_samples
from groundup.tokens.token_files import ROWS_FORMAT


def write_dropped(chosen: Selection, units: list[Unit], out: Path) -> None:
    """Write dropped.tsv: a line for each dropped document, with the reason and, for a copy, the earlier document and
    the similarity to it."""
    with open(out / "dropped.tsv", "w", encoding="utf-8") as f:
        f.write("path\tbyte\treason\tlike path\tlike byte\tsimilarity\n")
        for row in np.flatnonzero(chosen.fates != KEPT).tolist():
            columns = [*chosen.place(row, units), REASONS[chosen.fates[row]]]
            if chosen.partner[row] >= 0:
                columns += [*chosen.place(int(chosen.partner[row]), units), f"{chosen.similarity[row]:.4f}"]
            f.write("\t".join(map(str, columns)) + "\n")


def check_train(parts: list[SourceDocs]) -> None:
    """Raise UserError if train is empty; print a warning for each source that gives it nothing."""
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
    """Return {reason: number of documents dropped for it}, in the order of REASONS."""
    counts = np.bincount(chosen.fates, minlength=len(REASONS)).tolist()
    return {reason: n for reason, n in zip(REASONS, counts, strict=True) if n and reason != "kept"}


def summarize(
    info: dict, inputs: list[Input], counts: Counts, chosen: Selection, parts: list[SourceDocs], recipe: Recipe
) -> None:
    """Put the counts of documents and bytes into `info`, and check that read = kept + dropped."""
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
    """Write out/errors.tsv: the files that cannot be opened, then the problems in the files `others`, then those of
    the units in the order of the inputs."""
    with open(work / "out" / "errors.tsv", "w", encoding="utf-8") as out:
        out.write("path\tline\tbyte\treason\tdetail\n")
        out.writelines(f"{file.name}\t0\t0\tunreadable_file\t{file.problem}\n" for file in unreadable)
        for path in (*others, *(unit.file(work, "problems") for unit in units)):
            with open(path, encoding="utf-8") as f:
                shutil.copyfileobj(f, out)


def write_report(info: dict, notes: list[str], chosen: Selection, units: list[Unit], work: Path) -> None:
    """Write out/report.md: counts by reason, notes, and samples of kept documents and of those that each rule
    dropped, so that people can judge the rules."""
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
    """Return {reason: [(where, detail, excerpt)]} of up to SHOWN documents each: a random sample, always the same."""
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
            found.setdefault(REASONS[fate], []).append((
                int(chosen.rows["position"][row]),
                chosen.where(row, units),
                detail,
                excerpt,
            ))
    return {reason: [sample[1:] for sample in sorted(samples)[:SHOWN]] for reason, samples in found.items()}


def excerpt_of(row: int, chosen: Selection, units: list[Unit], work: Path) -> str:
    size = min(int(chosen.rows["size"][row]), 900)
    with open(units[chosen.unit_of(row)].file(work, "docs"), "rb") as f:
        f.seek(int(chosen.rows["begin"][row]))
        return f.read(size).decode("utf-8", "ignore")


def exit_status(info: dict, n_inputs: int, max_bad_fraction: float) -> int:
    failed, dropped = info["failed"], info["documents"]["dropped"]
    if failed:
        names = ", ".join(failed[:3])
        print(f"prepare: {len(failed)} of {n_inputs} files could not be read, or not to the end: {names}")
    bad = sum(n for reason, n in dropped.items() if reason not in REASONS and reason != "empty")
    n_read = info["documents"]["read"]
    for answers in info.get("answers", []):  # a good line of answers counts as one, however many pairs it gives
        n_read += answers["lines"] - answers["lines_bad"] - answers["pairs"]
    too_many = bad > max_bad_fraction * n_read
    if too_many:
        print(f"prepare: {bad} of {n_read} records could not be read; {max_bad_fraction=}")
    return 1 if failed or too_many else 0


def report(manifest: dict, seconds: float) -> None:
    """Print what was read, kept and dropped, the splits, and the speed."""
    info = manifest["info"]
    documents, n_bytes, dropped = info["documents"], info["bytes"], info["documents"]["dropped"]
    n_dropped, dropped_bytes = sum(dropped.values()), sum(n_bytes["dropped"].values())
    removed = n_bytes["cleaned"] + n_bytes["cut"]
    print(f"prepare: documents: {documents['read']:,} read = {documents['kept']:,} kept + {n_dropped:,} dropped")
    print(
        f"prepare: bytes of text: {n_bytes['read']:,} read = {n_bytes['kept']:,} kept + {dropped_bytes:,} dropped "
        f"+ {removed:,} cleaned away"
    )
    for what in ("dropped", "mended"):
        for reason, count in documents[what].items():
            print(f"prepare: {what}: {count:,} {reason}")
    if "decontaminate" in info:
        print(f"prepare: {info['decontaminate']['unprotected']:,} of {info['decontaminate']['items']:,} evaluation "
              f"items are too short to be looked for")  # fmt: skip
    for line in answer_pairs.describe(info.get("answers", [])):
        print(f"prepare: {line}")
    print_splits(manifest)
    print(f"prepare: {seconds:.1f} s, {n_bytes['read'] / 1e6 / seconds:.1f} MB/s")


def print_splits(manifest: dict) -> None:
    if manifest["format"] == ROWS_FORMAT:
        for split, entry in manifest["splits"].items():
            tokens = f"{entry['tokens']['ids']:>18,} tokens" if "tokens" in entry else ""
            print(f"{split:<8}{entry['rows']:>12,} rows{entry['bytes']:>18,} bytes{tokens}")
        return
    print(f"{'split':<6}{'documents':>14}{'bytes':>18}{'tokens':>18}{'bytes/token':>14}")
    for split, entry in manifest["splits"].items():
        print_split(split, entry)
        names = sorted({shard.get("source", "") for shard in entry["shards"]})
        for name in names if names != [""] else []:
            own = [shard for shard in entry["shards"] if shard["source"] == name]
            print_split(f"  {name}", {key: sum(s[key] for s in own) for key in ("documents", "bytes", "tokens")})


def print_split(name: str, entry: dict) -> None:
    ratio = entry["bytes"] / entry["tokens"]
    print(f"{name:<6}{entry['documents']:>14,}{entry['bytes']:>18,}{entry['tokens']:>18,}{ratio:>14.2f}")
