"""Report what happened to the input: printed counts, and report.md, dropped.tsv and errors.tsv of the output."""

import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from groundup.errors import UserError
from groundup.files.row_formats import describe_unread
from groundup.text import answer_pairs
from groundup.text.recipe import EXACT, KEPT, NEAR, REASONS, SCORE, SHOWN, Counts, Input, Recipe, Unit, read_json
from groundup.text.selection import Selection, SourceDocs
from groundup.tokens.token_files import ROWS_FORMAT

SHOWN_FILES = 1000  # with losses, in manifest.json; errors.tsv has all


def by_reason(chosen: Selection, weights: np.ndarray | None = None) -> dict[str, int]:
    """Return {reason: number of documents dropped for it, or sum of their weights}, in the order of REASONS."""
    sums = np.bincount(chosen.fates, weights, len(REASONS)).astype(np.int64).tolist()
    return {reason: n for reason, n in zip(REASONS, sums, strict=True) if n and reason != "kept"}


def check_kept(counts: Counts, chosen: Selection | None) -> None:
    """Raise UserError if no document is kept."""
    if chosen is None or not (chosen.fates == KEPT).any():
        dropped = counts.lost + counts.unusable + Counter(by_reason(chosen) if chosen else {})
        reasons = ", ".join(f"{n} {reason}" for reason, n in dropped.items()) or "the input holds none"
        first = f"; first: {counts.shown[0]}" if counts.shown else ""
        raise UserError(f"prepare: no document to prepare: {reasons}{first}")


def summarize(info: dict, inputs: list[Input], counts: Counts, chosen: Selection, parts: list[SourceDocs],
              recipe: Recipe) -> None:  # fmt: skip
    """Put the counts of documents and bytes into `info`, and check that read = kept + dropped + lost. Raise UserError
    if train is empty; print a warning for each source that gives it nothing."""
    without = [part.source.name for part in parts if not (part.splits == 0).any()]
    if len(without) == len(parts):
        raise UserError("prepare: no document is left for train; lower val_fraction or hold_out, or give more text")
    for name in without:
        print(f"prepare: warning: nothing is left for train of source {name}")
    n_bytes = chosen.rows["n_bytes"]
    n_read, n_kept = counts.records + counts.mended["split_huge"], int((chosen.fates == KEPT).sum())
    kept_bytes, dropped_bytes = int(n_bytes[chosen.fates == KEPT].sum()), by_reason(chosen, n_bytes)
    dropped, lost = dict(counts.unusable) | by_reason(chosen), dict(counts.lost)
    mended = dict(+counts.mended)
    accounted = n_kept + sum(dropped.values()) + sum(lost.values())
    assert n_read == accounted, f"{n_read=} {n_kept=} {dropped=} {lost=}"
    removed = sum(dropped_bytes.values()) + counts.bytes_cleaned + counts.bytes_cut
    assert counts.bytes_read == kept_bytes + removed, f"{counts=} {kept_bytes=} {dropped_bytes=}"
    counted = {"read": n_read, "kept": n_kept, "dropped": dropped, "lost": lost, "mended": mended}
    info["documents"] = counted
    # Bytes of the files, unpacked: what became documents, and what could not be read.
    # A last line without an end counts as if it had one.
    n_lost = min(counts.lost_bytes.total(), counts.input_bytes)
    info["input"] = {
        "bytes": counts.input_bytes, "documents": counts.input_bytes - n_lost, "lost": n_lost,
        "files_with_losses": len(counts.lost_bytes),
        "files": dict(counts.lost_bytes.most_common(SHOWN_FILES)),
    }  # fmt: skip
    info["bytes"] = {
        "read": counts.bytes_read, "kept": kept_bytes, "cleaned": counts.bytes_cleaned, "cut": counts.bytes_cut,
        "dropped": dropped_bytes,
    }  # fmt: skip
    if recipe.near:
        histogram, _ = np.histogram(chosen.similarity[chosen.fates == NEAR], bins=np.linspace(0, 1, 21))
        bins = {f"{k * 0.05:.2f}": n for k, n in enumerate(histogram.tolist()) if n}
        info["near"] = {"bands": recipe.near_bands, "rows": recipe.near_rows, "similarity": bins,
                        "not_compared": chosen.capped}  # fmt: skip
    if recipe.sources[0].name:
        info["sources"] = {part.source.name: {"kept": len(part.rows)} for part in parts}
    unreadable = [file.name for file in inputs if file.problem]
    info["marked"] = counts.marked
    info["unread"] = dict(counts.unread)
    info["failed"] = sorted({*unreadable, *(name for name in counts.bad if not counts.passed[name])})


def write_problems(inputs: list[Input], others: Iterable[Path], counts: Counts, units: list[Unit], work: Path) -> None:
    """Write out/errors.tsv: the files that cannot be opened, then the problems in the files `others`, then those of
    the units in the order of the inputs. Print the first ones."""
    unreadable = [file for file in inputs if file.problem]
    problems = [f"{file.name}: cannot be read: {file.problem}" for file in unreadable]
    first = {shown.partition(": ")[2]: shown for shown in reversed(counts.shown)}  # the same of two files: once
    problems += [shown for shown in counts.shown if shown in first.values()]
    print("".join(f"prepare: {problem}\n" for problem in problems[:SHOWN]), end="")
    with open(work / "out" / "errors.tsv", "w", encoding="utf-8") as out:
        out.write("path\tline\tbyte\treason\tdetail\n")
        out.writelines(f"{file.name}\t0\t0\tunreadable_file\t{file.problem}\n" for file in unreadable)
        for path in (*others, *(unit.file(work, "problems") for unit in units)):
            with open(path, encoding="utf-8") as f:
                shutil.copyfileobj(f, out)


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


def write_report(info: dict, chosen: Selection, units: list[Unit], work: Path) -> None:
    """Write out/report.md: counts by reason, and samples of kept documents and of those that each rule dropped, so that
    people can judge the rules."""
    documents, n_bytes = info["documents"], info["bytes"]
    lines = ["# What became of the input", "", "| | documents | bytes of text |", "|---|---:|---:|"]
    lines.append(f"| read | {documents['read']:,} | {n_bytes['read']:,} |")
    for reason, n in documents["dropped"].items():
        lines.append(f"| {reason} | {n:,} | {n_bytes['dropped'].get(reason, 0):,} |")
    for reason, n in documents["lost"].items():
        lines.append(f"| lost: {reason} | {n:,} | |")
    lines.append(f"| {' | | '.join(reversed(changed(n_bytes)))} |")
    lines.append(f"| **kept** | {documents['kept']:,} | {n_bytes['kept']:,} |")
    lines.append(f"\nBytes of the files: {input_line(info)}.")
    lines += [f"\n{name}: {n:,} bytes lost." for name, n in info["input"]["files"].items()]
    lines += [f"\n{n:,} documents were mended: {what}." for what, n in documents["mended"].items()]
    lines += [f"\nKeys not read: {describe_unread(Counter(info['unread']))}."] if info["unread"] else []
    lines += [f"\n{note}." for note in answer_pairs.describe(info.get("answers", []))]
    lengths = chosen.rows["n_bytes"][chosen.fates == KEPT]
    marks = ", ".join(f"{int(v):,}" for v in np.percentile(lengths, [0, 10, 50, 90, 99, 100]))
    lines.append(f"\nBytes per kept document (least, 10 %, median, 90 %, 99 %, most): {marks}.")
    for reason, samples in sorted(report_samples(chosen, units, work).items()):
        lines.append(f"\n## {reason}\n")
        for _, where, detail, excerpt in sorted(samples)[:SHOWN]:
            lines.append(f"- {where}: {detail}\n  > {' '.join(excerpt.split())[:200]}")
    (work / "out" / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def report_samples(chosen: Selection, units: list[Unit], work: Path) -> dict[str, list[tuple[int, str, str, str]]]:
    """Return {reason: [(position, where, detail, excerpt)]}: those of the lowest positions are a random sample."""
    found: dict[str, list[tuple[int, str, str, str]]] = {}
    for unit in units:
        for reason, samples in read_json(unit.file(work, "json"))["samples"].items():
            held = found.get(reason, []) + [(position, *shown) for position, _, *shown in samples]
            found[reason] = sorted(held)[:SHOWN]
    for fate in (KEPT, EXACT, NEAR, SCORE):
        rows = np.flatnonzero((chosen.fates == fate) & (chosen.rows["reason"] == KEPT))
        for row in rows[np.argsort(chosen.rows["position"][rows], kind="stable")[:SHOWN]].tolist():
            sample = int(chosen.rows["position"][row]), chosen.where(row, units), detail_of(row, chosen, units)
            found.setdefault(REASONS[fate], []).append((*sample, read_document(row, chosen, units, work, 900)))
    return found


def detail_of(row: int, chosen: Selection, units: list[Unit]) -> str:
    """Return why a document that passed the rules was dropped later, "" if it was kept."""
    if chosen.fates[row] == SCORE:
        return f"score {chosen.rows['score'][row]:.4g}"
    partner = int(chosen.partner[row])
    return f"{chosen.similarity[row]:.2f} like {chosen.where(partner, units)}" if partner >= 0 else ""


def read_document(row: int, chosen: Selection, units: list[Unit], work: Path, most: int) -> str:
    """Return at most so many bytes of a document that passed the rules."""
    with open(units[chosen.unit_of(row)].file(work, "docs"), "rb") as f:
        f.seek(int(chosen.rows["begin"][row]))
        return f.read(min(int(chosen.rows["size"][row]), most)).decode("utf-8", "ignore")


def changed(n_bytes: dict) -> tuple[str, str]:
    """Return how many bytes cleaning changed, and what it did: with `punctuation` it may make a text longer."""
    less = n_bytes["cleaned"] + n_bytes["cut"]
    return (f"+ {less:,}", "cleaned away") if less >= 0 else (f"- {-less:,}", "added by cleaning")


def input_line(info: dict) -> str:
    files = info["input"]
    return f"{files['bytes']:,} read = {files['documents']:,} in documents + {files['lost']:,} lost"


def exit_status(info: dict, n_inputs: int, max_bad_fraction: float) -> int:
    """Return 1, and print why, if a file could not be read, or if a larger fraction of the bytes or of the records of
    the input is lost than max_bad_fraction; if that is above 0, rows without a text count as lost records."""
    files, documents, n_read = info["input"], info["documents"], info["documents"]["read"]
    bad = sum(documents["lost"].values()) + documents["dropped"].get("bad_field", 0)
    for answers in info.get("answers", []):  # a good line of answers counts as one, however many pairs it gives
        n_read += answers["lines"] - answers["lines_bad"] - answers["pairs"]
    n_lost, size = files["lost"], max(1, files["bytes"])
    too_many = max_bad_fraction > 0 and bad > max_bad_fraction * n_read
    accepted = n_lost <= max_bad_fraction * size and not too_many
    if n_lost:
        shown = [f"{name} ({n:,} bytes)" for name, n in list(files["files"].items())[:3]]
        what = f"{n_lost:,} of {size:,} bytes ({100 * n_lost / size:.2g} %) are lost, in {files['files_with_losses']:,}"
        needed = 1.05 * max(n_lost / size, bad / max(1, n_read)) + 1e-6
        hint = f"mend them, or accept the loss with --max_bad_fraction={min(1.0, needed):.2g}"
        hint = "accepted" if accepted else f"errors.tsv says where; {hint}"
        print(f"prepare: {what} of {n_inputs:,} files: {', '.join(shown)}; {hint}")
    failed = info["failed"]
    if failed:
        names = ", ".join(failed[:3])
        print(f"prepare: {len(failed)} of {n_inputs} files could not be read: {names}")
    if too_many:
        print(f"prepare: {bad} of {n_read} records could not be read; {max_bad_fraction=}")
    return int(not accepted or bool(failed and max_bad_fraction < 1))


def print_report(manifest: dict, seconds: float) -> None:
    """Print what was read, kept and dropped, the splits, and the speed."""
    info, documents, n_bytes = manifest["info"], manifest["info"]["documents"], manifest["info"]["bytes"]
    dropped = [sum(of["dropped"].values()) for of in (documents, n_bytes)]
    lost = sum(documents["lost"].values())
    lines = [
        f"documents: {documents['read']:,} read = {documents['kept']:,} kept + {dropped[0]:,} dropped + {lost:,} lost",
        f"bytes of the files: {input_line(info)}",
        f"bytes of text: {n_bytes['read']:,} read = {n_bytes['kept']:,} kept + {dropped[1]:,} dropped "
        f"{' '.join(changed(n_bytes))}",
    ]
    for what in ("dropped", "lost", "mended"):
        lines += [f"{what}: {n:,} {reason}" for reason, n in documents[what].items()]
    if info["marked"]:
        how = "it stays text, so a model would learn to write it as words; if these are conversations, use kind=chat"
        lines.append(f"warning: {info['marked']:,} documents hold <|im_start|>: {how}")
    if info["unread"]:
        lines.append(f"keys not read: {describe_unread(Counter(info['unread']))}")
    if evals := info.get("decontaminate"):
        lines.append(f"{evals['unprotected']:,} of {evals['items']:,} evaluation items are too short to be looked for")
    for line in lines + answer_pairs.describe(info.get("answers", [])):
        print(f"prepare: {line}")
    print_splits(manifest)
    few = manifest["splits"].get("val", {}).get("tokens", 0) if manifest["format"] != ROWS_FORMAT else 0
    if 0 < few <= 1024:
        more = f"a run whose block_size is {few} or more needs a larger val_fraction"
        print(f"prepare: warning: val has {few} tokens; {more}")
    print(f"prepare: {seconds:.1f} s, {n_bytes['read'] / 1e6 / seconds:.1f} MB/s")


def print_splits(manifest: dict) -> None:
    if manifest["format"] == ROWS_FORMAT:
        for split, entry in manifest["splits"].items():
            tokens = f"{entry['tokens']['ids']:>18,} tokens" if "tokens" in entry else ""
            print(f"{split:<8}{entry['rows']:>12,} rows{entry['bytes']:>18,} bytes{tokens}")
        return
    print(f"{'split':<6}{'documents':>14}{'bytes':>18}{'tokens':>18}{'bytes/token':>14}")
    for split, entry in manifest["splits"].items():
        lines = {split: [entry]}
        for shard in entry["shards"]:
            if shard.get("source"):
                lines.setdefault(f"  {shard['source']}", []).append(shard)
        for name, own in lines.items():
            n_documents, size, n_tokens = (sum(one[key] for one in own) for key in ("documents", "bytes", "tokens"))
            print(f"{name:<6}{n_documents:>14,}{size:>18,}{n_tokens:>18,}{size / n_tokens:>14.2f}")
