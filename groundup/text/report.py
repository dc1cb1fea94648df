"""Say what happened to the input: printed counts, and report.md, dropped.tsv and errors.tsv of the
output.

`what_became` checks that documents and bytes add up: read = kept + dropped + lost.
"""

import codecs
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from groundup.errors import UserError, counted
from groundup.files import turns
from groundup.files.row_formats import COLUMNS, describe_unread
from groundup.files.splits import FEW_VAL, more_rows_for_val, share_for
from groundup.files.text_keys import parse_text_key
from groundup.text import answer_pairs
from groundup.text.inputs import Input
from groundup.text.recipe import Recipe
from groundup.text.select import Selection, SourceDocs
from groundup.text.unit import EXACT, KEPT, NEAR, REASONS, SCORE, SHOWN, Counts, Unit
from groundup.tokens.token_files import ROWS_FORMAT

HTML_TAG = re.compile(r"</?(p|div|span|a|li|td|body|html)\b[^<>]*>|<br ?/?>", re.IGNORECASE)
LARGE_BLOCK = 1024  # a val split of more tokens has a window of any config here
SHOWN_FILES = 1000  # with losses, or unreadable, in manifest.json; errors.tsv has all


# ---- counts --------------------------------------------------------------------------------------


def by_fate(fates: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Return the number of documents of each fate, or the sum of their weights, (len(REASONS),)."""
    return np.bincount(fates, weights, len(REASONS)).astype(np.int64)


def by_reason(sums: np.ndarray) -> dict[str, int]:
    """Return {reason: sum} of the documents that are dropped."""
    named = zip(REASONS, sums.tolist(), strict=True)
    return {reason: n for reason, n in named if n and reason != "kept"}


def check_kept(counts: Counts, chosen: Selection) -> None:
    """Raise UserError if no document is kept."""
    if not (chosen.fates == KEPT).any():
        dropped = counts.lost + counts.unusable + Counter(by_reason(by_fate(chosen.fates)))
        # an empty output is always a mistake: say what became of the documents, and show one
        reasons = ", ".join(f"{n} {reason}" for reason, n in dropped.items())
        first = "".join(f"; first: {problem}" for problem in problem_lines(counts)[:1])
        what = reasons or "the input holds none"
        raise UserError(f"prepare: no document to prepare: {what}{first}")


def problem_lines(counts: Counts) -> list[str]:
    """Return the first problems with their places."""
    return [f"{where}: {problem}" for problem, where in counts.shown.items()]


def check_sum(account: dict, *left_out: str) -> None:
    """Check that what was read is what is kept and what is left out: numbers, or by reason."""
    # A mistake of this program, so it is an assertion: no input can make a sum wrong.
    # what is left out is one number, or a number for each reason
    parts = [account[name] for name in left_out]
    n = sum(sum(part.values()) if isinstance(part, dict) else part for part in parts)
    assert account["read"] == account["kept"] + n, f"{account=}"


def what_became(
    inputs: list[Input], counts: Counts, n_documents: np.ndarray, n_bytes: np.ndarray
) -> dict:
    """Return what the manifest says about documents, bytes of the files (unpacked) and bytes of
    text, after a check that each adds up. The arrays are of `by_fate`."""
    documents = {
        "read": counts.records + counts.mended["split_huge"],
        "kept": int(n_documents[KEPT]),
        "dropped": dict(+counts.unusable) | by_reason(n_documents),
        "lost": dict(+counts.lost),
        "lost_lines": dict(counts.lost_lines),
        "mended": dict(+counts.mended),
    }
    check_sum(documents, "dropped", "lost")
    text = {
        "read": counts.bytes_read,
        "kept": int(n_bytes[KEPT]),
        "cleaned": counts.bytes_cleaned,
        "cut": counts.bytes_cut,
        "dropped": by_reason(n_bytes),
    }
    check_sum(text, "dropped", "cleaned", "cut")
    # Files that gave nothing at all: those that cannot be opened, and those with problems alone.
    failed = {file.name for file in inputs if file.problem}
    failed |= {name for name in counts.bad if not counts.passed[name]}
    return {
        "documents": documents,
        "input": bytes_of_files(counts),
        "bytes": text,
        "marked": counts.marked,
        "unread": dict(counts.unread),
        "n_failed": len(failed),
        "failed": sorted(failed)[:SHOWN_FILES],
    }


def bytes_of_files(counts: Counts) -> dict:
    """Return what the manifest says about the bytes of the files, unpacked."""
    # A last line without an end counts as if it had one, so more than all may seem lost.
    n_lost = min(counts.lost_bytes.total(), counts.input_bytes)
    return {
        "bytes": counts.input_bytes,
        "documents": counts.input_bytes - n_lost,
        "lost": n_lost,
        "files_with_losses": len(counts.lost_bytes),
        "files": dict(counts.lost_bytes.most_common(SHOWN_FILES)),
    }


def summarize(
    inputs: list[Input], counts: Counts, chosen: Selection, parts: list[SourceDocs], recipe: Recipe
) -> dict:
    """Return what the manifest says about documents and bytes. Raise UserError if train is empty;
    note a warning for each source that gives it nothing."""
    without = [part.source.name for part in parts if not (part.splits == 0).any()]
    # without any text for training nothing can follow; one source of several is a warning
    if len(without) == len(parts):
        hint = "lower val_fraction or hold_out, or give more text"
        raise UserError(f"prepare: no document is left for train; {hint}")
    for name in without:
        chosen.split_notes.append(f"warning: nothing is left for train of source {name}")
    n_bytes = by_fate(chosen.fates, chosen.rows["n_bytes"])
    info = what_became(inputs, counts, by_fate(chosen.fates), n_bytes)
    info["split_notes"] = chosen.split_notes
    info["cut_bytes"] = sum(int(part.n_bytes[~part.whole].sum()) for part in parts)
    # a full bucket takes no more documents, so a few near copies may have been missed
    if recipe.near > 0:
        info["near"] = {"not_compared": chosen.capped}
    info["copies"] = copies_of_others(chosen, [source.name for source in recipe.sources])
    info["absent"] = absent_keys(counts, recipe)
    if recipe.sources[0].name:
        info["sources"] = {part.source.name: {"kept": len(part.rows)} for part in parts}
    return info


def absent_keys(counts: Counts, recipe: Recipe) -> list[str]:
    """Return a warning for each source of texts whose text_key has keys with ? that no row has.

    If all have ?, they are keys of several layouts, so those of a known layout may be absent."""
    warnings = []
    for source in recipe.sources if recipe.kind == "text" else ():
        names = parse_text_key(source.text_key) if source.text_key else ()
        of_source, prefix = (f" of {source.name}", f"{source.name}: ") if source.name else ("", "")
        # A typo in a key that may be missing would otherwise pass in silence.
        optional = [name.path for name in names if name.optional]
        of_layouts = COLUMNS if len(optional) == len(names) else ()
        keys = [".".join(path) for path in optional if path[0] not in of_layouts]
        absent = [f"{key}?" for key in keys if f"{prefix}{key}" not in counts.optional]
        if absent and prefix in counts.optional:  # it has rows, not only texts
            warnings.append(f"warning: text_key{of_source}: no row has {', '.join(absent)}")
    return warnings


def copies_of_others(chosen: Selection, names: list[str]) -> list[str]:
    """Return a warning for each source that loses most of the documents that passed the rules as
    copies of those of other sources. names: of the sources."""
    source_of = np.repeat([unit.source for unit in chosen.units], np.diff(chosen.starts))
    passed = chosen.rows["reason"] == KEPT
    # the source that each copy is of; of a document that is no copy its own
    copied_from = np.where(chosen.partner >= 0, source_of[chosen.partner], source_of)
    warnings = []
    for number, name in enumerate(names):
        own = passed & (source_of == number)
        copies = own & (copied_from != number)
        # a few shared texts are usual; most of a source is the same data under two names
        if 2 * copies.sum() > own.sum():
            others = " and ".join(names[k] for k in np.unique(copied_from[copies]))
            what = f"{copies.sum():,} of {counted(int(own.sum()), 'row')} of {name}"
            hint = "dropped.tsv has both places; --near=0 drops exact copies only"
            warnings.append(f"warning: {what} are copies of rows of {others}; {hint}")
    return warnings


# ---- files of the output -------------------------------------------------------------------------


def write_problems(
    inputs: list[Input], others: Iterable[Path], counts: Counts, units: list[Unit], work: Path
) -> None:
    """Write out/errors.tsv: the files that cannot be opened, then the problems in the files
    `others`, then those of the units. Print the first ones."""
    unreadable = [file for file in inputs if file.problem]
    problems = [f"{file.name}: cannot be read: {file.problem}" for file in unreadable]
    # on the screen the first ones, in errors.tsv all
    for problem in [*problems, *problem_lines(counts)][:SHOWN]:
        print(f"prepare: {problem}")
    with open(work / "out" / "errors.tsv", "w", encoding="utf-8") as out:
        out.write("path\tline\tbyte\treason\tdetail\n")
        for file in unreadable:
            out.write(f"{file.name}\t0\t0\tunreadable_file\t{file.problem}\n")
        for path in (*others, *(unit.file(work, "problems") for unit in units)):
            with open(path, encoding="utf-8") as f:
                shutil.copyfileobj(f, out)


def write_dropped(chosen: Selection) -> None:
    """Write out/dropped.tsv: a line for each dropped document, with the reason and, for a copy, the
    earlier document and the similarity to it."""
    with open(chosen.work / "out" / "dropped.tsv", "w", encoding="utf-8") as f:
        f.write("path\tbyte\treason\tlike path\tlike byte\tsimilarity\n")
        for row in np.flatnonzero(chosen.fates != KEPT).tolist():
            # the place of the record in the user's file, where it can be looked up
            columns = [*chosen.place(row), REASONS[chosen.fates[row]]]
            partner = int(chosen.partner[row])
            if partner >= 0:
                columns += [*chosen.place(partner), f"{chosen.similarity[row]:.4f}"]
            f.write("\t".join(map(str, columns)) + "\n")


def write_report(manifest: dict, chosen: Selection) -> None:
    """Write out/report.md: what is printed, and samples of kept documents and of those that each
    rule dropped, so that people can judge the rules."""
    info = manifest["info"]
    said = [*summary(info), *warnings_of(manifest)]
    found = report_samples(chosen)
    if html := mostly_html([excerpt for *_, excerpt in found["kept"]]):
        # the only warning that needs the texts, so it cannot come from the manifest
        said.append(f"warning: {html}")
        print(f"prepare: warning: {html}")
    lines = ["# What became of the input", "", *(f"- {line}" for line in said)]
    lines += [f"- {name}: {counted(n, 'byte')} lost" for name, n in info["input"]["files"].items()]
    # The shape of what is kept: one text of half the bytes, or a median of ten, shows a fault.
    lengths = chosen.rows["n_bytes"][chosen.fates == KEPT]
    marks = ", ".join(f"{int(v):,}" for v in np.percentile(lengths, [0, 10, 50, 90, 99, 100]))
    names = "least, 10 %, median, 90 %, 99 %, most"
    lines.append(f"- bytes per kept document ({names}): {marks}")
    for reason, samples in sorted(found.items()):
        lines.append(f"\n## {reason}\n")
        # sorted by position, which is a hash: a random sample, the same in every run
        for _, place, detail, excerpt in sorted(samples)[:SHOWN]:
            lines.append(f"- {place}: {detail}\n  > {' '.join(excerpt.split())[:200]}")
    report = chosen.work / "out" / "report.md"
    report.write_text("\n".join(lines) + "\n", encoding="utf-8")


def mostly_html(kept: list[str]) -> str:
    """Return a warning if at least half of a sample of kept texts hold tags of HTML, else ""."""
    n_html = sum(HTML_TAG.search(text) is not None for text in kept)
    if not n_html or 2 * n_html < len(kept):
        return ""
    hint = "a model learns to write them; extract the text first, for example with trafilatura"
    return f"{n_html} of {len(kept)} kept documents hold HTML tags: {hint}"


def report_samples(chosen: Selection) -> dict[str, list[tuple[int, str, str, str]]]:
    """Return {reason: [(position, place, detail, excerpt)]}. Those of the lowest positions are a
    random sample."""
    found: dict[str, list[tuple[int, str, str, str]]] = {}
    # Units have samples of what the rules dropped. What came later is looked up.
    for unit in chosen.units:
        for reason, samples in unit.inspected(chosen.work)["samples"].items():
            first = chosen.starts[unit.number]
            own = [(at, chosen.named_place(first + row), *shown) for at, row, *shown in samples]
            found[reason] = sorted(found.get(reason, []) + own)[:SHOWN]
    for fate in (KEPT, EXACT, NEAR, SCORE):
        rows = np.flatnonzero((chosen.fates == fate) & (chosen.rows["reason"] == KEPT))
        positions = chosen.rows["position"][rows]
        for row in rows[np.argsort(positions, kind="stable")[:SHOWN]].tolist():
            position, place = int(chosen.rows["position"][row]), chosen.named_place(row)
            sample = (position, place, chosen.detail(row), chosen.text(row, 900))
            found.setdefault(REASONS[fate], []).append(sample)
    return found


# ---- printed -------------------------------------------------------------------------------------


def summary(info: dict) -> list[str]:
    """Return lines that say what became of the input."""
    documents, n_bytes, files = info["documents"], info["bytes"], info["input"]
    n_dropped, dropped_bytes = (sum(of["dropped"].values()) for of in (documents, n_bytes))
    less = n_bytes["cleaned"] + n_bytes["cut"]
    # With punctuation=on cleaning may make a text longer.
    changed = f"+ {less:,} cleaned away" if less >= 0 else f"- {-less:,} added by cleaning"
    lines = [
        f"documents: {documents['read']:,} read = {documents['kept']:,} kept"
        f" + {n_dropped:,} dropped + {sum(documents['lost'].values()):,} lost",
        f"bytes of the files: {files['bytes']:,} read = {files['documents']:,} in documents"
        f" + {files['lost']:,} lost",
        f"bytes of text: {n_bytes['read']:,} read = {n_bytes['kept']:,} kept"
        f" + {dropped_bytes:,} dropped {changed}",
    ]
    # then a line for each reason
    for what in ("dropped", "lost", "mended"):
        for reason, n in documents[what].items():
            if what == "mended" and is_encoding(reason):
                lines.append(f"read as {reason}: {n:,}")
                continue
            size = n_bytes["dropped"].get(reason, 0) if what == "dropped" else 0
            line = f"{what}: {n:,} {reason}" + (f" ({counted(size, 'byte')})" if size else "")
            lines.append(line + (f"; {turns.JOIN}" if reason.endswith("turns_in_a_row") else ""))
    for reason, n in documents["lost_lines"].items():
        lines.append(f"lost: {n:,} {reason} within texts that are kept")
    # text that was rendered by a chat template already
    if info["marked"]:
        hint = "they stay text, so a model would learn to write them as words"
        hint += "; if these are conversations, use kind=chat"
        what = f"names of special tokens in {counted(info['marked'], 'document')}"
        lines.append(f"warning: {what}, as <|im_start|> or <s> at the beginning: {hint}")
    if info["unread"]:
        lines.append(f"keys not read: {describe_unread(Counter(info['unread']))}")
    if evals := info.get("decontaminate"):
        few = f"{evals['unprotected']:,} of {evals['items']:,} evaluation items"
        lines.append(f"{few} are too short to be looked for")
    lines += info["absent"] + info["copies"]
    return lines + answer_pairs.describe(info.get("answers", [])) + info.get("split_notes", [])


def is_encoding(name: str) -> bool:
    try:
        return bool(codecs.lookup(name))
    except LookupError:
        return False


def exit_status(info: dict, n_inputs: int, max_bad_fraction: float) -> int:
    """Return 1, and print why, if a file could not be read, or if a larger fraction of the bytes or
    of the records is lost than max_bad_fraction; if that is above 0, rows without a text count as
    lost records."""
    files, documents, n_read = info["input"], info["documents"], rows_read(info)
    n_bad = sum(documents["lost"].values()) + documents["dropped"].get("bad_field", 0)
    n_lost, size = files["lost"], max(1, files["bytes"])
    # At 0 a row without a text is no reason to fail, for it may be meant; a lost byte is.
    too_many = max_bad_fraction > 0 and n_bad > max_bad_fraction * n_read
    # lost bytes always count, as far as the user has not accepted them
    accepted = n_lost <= max_bad_fraction * size and not too_many
    if n_lost:
        shown = [f"{name} ({counted(n, 'byte')})" for name, n in list(files["files"].items())[:3]]
        what = f"{n_lost:,} of {counted(size, 'byte')} ({100 * n_lost / size:.3g} %) are lost"
        of_files = f"{files['files_with_losses']:,} of {counted(n_inputs, 'file')}"
        places = f"in {of_files}: {', '.join(shown)}"
        needed = 1.05 * max(n_lost / size, n_bad / max(1, n_read)) + 1e-6  # 5 % above, for rounding
        ways = f"mend them, or accept the loss with --max_bad_fraction={min(1.0, needed):.2g}"
        hint = "accepted" if accepted else f"errors.tsv says where; {ways}"
        warning = "" if accepted else "warning: "
        print(f"prepare: {warning}{what}, {places}; {hint}")
    n_failed, names = info["n_failed"], info["failed"]
    if n_failed:
        shown = ", ".join(names[:3]) + (f" and {n_failed - 3} more" if n_failed > 3 else "")
        what = f"{n_failed} of {counted(n_inputs, 'file')} could not be read: {shown}"
        print(f"prepare: warning: {what}; errors.tsv says why")
    if too_many:
        records = f"{n_bad:,} of {counted(n_read, 'record')}"
        print(f"prepare: {records} could not be read; {max_bad_fraction=}")
    # a file that cannot be opened has no bytes to compare: only 1.0 accepts it
    return int(not accepted or bool(n_failed and max_bad_fraction < 1))


def rows_read(info: dict) -> int:
    """Return the records that were read. A line of answers is one, whatever pairs it gives."""
    of_answers = (
        answers["lines"] - answers["lines_bad"] - answers["pairs"]
        for answers in info.get("answers", [])
    )
    return info["documents"]["read"] + sum(of_answers)


def textless(info: dict) -> str:
    """Return a warning if many rows were not understood, else ""."""
    n, n_read = info["documents"]["dropped"].get("bad_field", 0), rows_read(info)
    if n <= n_read / 10:
        return ""
    # More than a few odd rows: keys or roles have likely other names.
    hint = "errors.tsv says why of some of them; --text_key gives other names of keys and roles"
    return f"{n:,} of {counted(n_read, 'row')} could not be understood; {hint}"


def print_report(manifest: dict, seconds: float) -> None:
    """Print what was read, kept and dropped, the splits, and the speed."""
    for line in summary(manifest["info"]):
        print(f"prepare: {line}")
    print_splits(manifest)
    for line in warnings_of(manifest):
        print(f"prepare: {line}")
    megabytes = manifest["info"]["bytes"]["read"] / 1e6
    print(f"prepare: {seconds:.1f} s, {megabytes / seconds:.1f} MB/s")


def warnings_of(manifest: dict) -> list[str]:
    """Return warnings of small splits and sources, and of rows that were not understood."""
    found = [too_small_val(manifest), *small_sources(manifest), textless(manifest["info"])]
    return [f"warning: {warning}" for warning in found if warning]


def too_small_val(manifest: dict) -> str:
    """Return a warning with advice if the val split has few rows, or few tokens, else ""."""
    splits, val_fraction = manifest["splits"], manifest["info"]["recipe"]["val_fraction"]
    # rows: a few conversations say little, however long they are
    entry = splits.get("val", {})
    if 0 < entry.get("rows", 0) < FEW_VAL:
        n_rows = sum(splits[name]["rows"] for name in ("train", "val") if name in splits)
        advice = more_rows_for_val(entry["rows"], n_rows, val_fraction)
        return f"val has {counted(entry['rows'], 'row')}: too few to trust its loss; {advice}"
    # text: the loss is computed on windows, so tokens count
    n_val = 0 if "rows" in entry else entry.get("tokens", 0)
    if not 0 < n_val <= LARGE_BLOCK:
        return ""
    # Enough for a window of LARGE_BLOCK, or what a small text can spare. Of whole documents nobody
    # knows how long those will be that a hash takes, so only the ends of documents are reckoned.
    n_tokens, n_bytes = (sum(one[key] for one in splits.values()) for key in ("tokens", "bytes"))
    of_ends = n_tokens * manifest["info"].get("cut_bytes", 0) / n_bytes
    share = share_for(1.2 * LARGE_BLOCK, of_ends or n_tokens)
    more = f"--val_fraction={share:g} "
    more += f"gives it about {share * of_ends:,.0f}" if of_ends else "takes more documents"
    # advice that would change nothing is left out
    is_more = share > val_fraction and not 0 < share * of_ends <= n_val
    advice = more if is_more else "give more text"
    needs = f"a run whose block_size is {n_val} or more needs more"
    return f"val has {counted(n_val, 'token')}; {needs}: {advice}"


def small_sources(manifest: dict) -> list[str]:
    """Return a warning for each of several sources that may be too small to train on."""
    train = tokens_by_source(manifest, "train")
    # the order of windows needs two of each source, see mixture.window_sampler
    few = {name: n for name, n in train.items() if n <= 2 * LARGE_BLOCK and len(train) > 1}
    how = "make one source of several ('name: files, other files')"
    return [
        f"{counted(n, 'training token')} of {name}: a run whose block_size is {(n + 1) // 2} or "
        f"more needs more; {how}"
        for name, n in few.items()
    ]


def longest_block(manifest: dict) -> int:
    """Return the largest block_size of which every source of train holds two windows, as their
    borders move, and val, if there is one, holds one."""
    # two windows and the token behind them
    longest = (min(tokens_by_source(manifest, "train").values()) - 1) // 2
    # val of one source is enough, the others are not evaluated
    n_val = max(tokens_by_source(manifest, "val").values(), default=0)
    return min(longest, n_val - 1) if n_val else longest


def tokens_by_source(manifest: dict, split: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for shard in manifest["splits"].get(split, {}).get("shards", []):
        name = shard.get("source", "")
        found[name] = found.get(name, 0) + shard["tokens"]
    return found


def print_splits(manifest: dict) -> None:
    if manifest["format"] == ROWS_FORMAT:
        for split, entry in manifest["splits"].items():
            tokens = f"{entry['tokens']['ids']:>18,} tokens" if "tokens" in entry else ""
            print(f"{split:<8}{entry['rows']:>12,} rows{entry['bytes']:>18,} bytes{tokens}")
        if "held_out" in manifest["splits"]:
            text = "held_out.jsonl is to score models that never saw it, so do not pretrain on"
            print(f"prepare: {text} the input; train.jsonl may be part of a corpus")
        return
    print(f"{'split':<6}{'documents':>14}{'bytes':>18}{'tokens':>18}{'bytes/token':>14}")
    for split, entry in manifest["splits"].items():
        lines = {split: [entry]}  # the split, and below it its sources, each with its shards
        for shard in entry["shards"]:
            if shard.get("source"):
                lines.setdefault(f"  {shard['source']}", []).append(shard)
        for name, own in lines.items():
            n_documents, size, n_tokens = (
                sum(one[key] for one in own) for key in ("documents", "bytes", "tokens")
            )
            ratio = f"{size / n_tokens:>14.2f}"
            print(f"{name:<6}{n_documents:>14,}{size:>18,}{n_tokens:>18,}{ratio}")
