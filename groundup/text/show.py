"""Print what prepare.py makes of the first rows of each source: text, tokens, kept or dropped and
why.

python prepare.py --input=chat.jsonl --kind=chat --tokenizer_dir=data/tok --show=5
"""

import json
from itertools import groupby
from pathlib import Path

from groundup.errors import counted
from groundup.files.row_formats import describe_unread
from groundup.text.inputs import Input
from groundup.text.recipe import Recipe
from groundup.text.select import Selection, select
from groundup.text.unit import KEPT, REASONS, Counts, Unit, inspect_unit, plan_units
from tokenizer import Tokenizer, split_answer

MAX_TOKENS = 120  # shown of one text
MAX_CHARS = 600  # likewise, without a tokenizer


def show_rows(
    inputs: list[Input], recipe: Recipe, n: int, tokenizer: Tokenizer | None, work: Path
) -> int:
    """Print n rows of each source, n / files of each of its files; return the exit status, 1 if one
    cannot be read."""
    units, limits, counts = [], [], Counts()  # limits: rows of each unit
    n_passed_over = 0
    readable = (file for file in inputs if not file.problem)
    for _, own in groupby(readable, key=lambda file: file.source):
        files = list(own)
        # at least one row of each file, so no more than n files
        n_passed_over += max(0, len(files) - n)
        for file in files[:n]:
            # the first part is enough: a large file is not read to its end for a few rows
            unit = plan_units([file])[0]
            units.append(unit._replace(number=len(units), parts=unit.parts[:1]))
            limits.append(-(-n // len(files)))
    for unit, limit in zip(units, limits, strict=True):
        counts.add(inspect_unit(unit, recipe, work, limit))
    # copies among these rows are found as in a whole run
    chosen, n_rows = select(units, recipe, work), 0
    for unit, limit in zip(units, limits, strict=True):
        print(f"\n==== {unit.parts[0].name}")
        # in the order of the file, whether a row could be read or not
        found = problems_of(unit, work)[:limit]
        found = sorted(found + rows_of(unit, chosen, recipe.kind, tokenizer))
        n_rows += len(found)
        for offset, lines in found:
            lines = [f"\n-- {unit.parts[0].name} at byte {offset}", *lines]
            print(*lines, sep="\n   ")
    n_kept = int((chosen.fates == KEPT).sum())
    if tokenizer is None:
        print("\nno tokenizer: --tokenizer_dir=DIR shows where its tokens begin and end")
    if n_passed_over:
        print(f"\n{counted(n_passed_over, 'file')} not looked at: a larger --show reaches more")
    if counts.unread:
        print(f"\nkeys not read: {describe_unread(counts.unread)}")
    print(f"\n{counted(n_rows, 'row')}: {n_kept} would be kept, {n_rows - n_kept} not")
    return int(bool(counts.bad))


def problems_of(unit: Unit, work: Path) -> list[tuple[int, list[str]]]:
    """Return [(offset, lines to print)] of what could not be read."""
    found = []
    for line in unit.file(work, "problems").read_text(encoding="utf-8").split("\n")[:-1]:
        _, _, offset, reason, detail = line.split("\t")
        found.append((int(offset), [f"NOT UNDERSTOOD: {reason}: {detail}"]))
    return found


def rows_of(
    unit: Unit, chosen: Selection, kind: str, tokenizer: Tokenizer | None
) -> list[tuple[int, list[str]]]:
    """Return [(offset, lines to print)] of the rows that could be read."""
    samples = {}
    # the text of a row that a rule dropped is kept only in its sample
    for dropped in unit.inspected(chosen.work)["samples"].values():
        samples |= {row: (detail, excerpt) for _, row, detail, excerpt in dropped}
    found = []
    for number, row in enumerate(range(chosen.starts[unit.number], chosen.starts[unit.number + 1])):
        detail, excerpt = samples.get(number, (chosen.detail(row), ""))
        verdict = "kept"
        if chosen.fates[row] != KEPT:
            verdict = f"DROPPED: {REASONS[chosen.fates[row]]}: {detail}"
        lines = [plain(excerpt)]
        # it passed the rules, so its text is there, even if it was dropped later as a copy
        if chosen.rows["reason"][row] == KEPT:
            lines = lines_of(chosen.text(row, 2**32), kind, tokenizer)
        found.append((int(chosen.rows["offset"][row]), [verdict, *lines]))
    return found


def lines_of(document: str, kind: str, tokenizer: Tokenizer | None) -> list[str]:
    """Return a document as the model sees it, the tokens that it learns between [[ and ]]."""
    if kind == "text" and tokenizer is None:
        return [plain(document)]
    if kind == "text":
        return [bars(tokenizer.encode(document), tokenizer)]
    row = json.loads(document)
    if kind == "chat":
        return turns(row["messages"], tokenizer)
    # a pair: nothing of the prompt is learned, and of each answer all
    lines = turns(row["prompt"], tokenizer, learned=False)
    for name in ("chosen", "rejected"):
        answer = {"role": "assistant", "content": row[name]}
        if tokenizer is None:
            shown = turns([answer], None)[0]
        else:
            # written by the chat template, as dpo.py does it
            _, ids = split_answer(*tokenizer.render([*row["prompt"], answer]))
            shown = f"[[{bars(ids, tokenizer)}]]"
        lines.append(f"{name:<9}: {shown}")
    return lines


def turns(messages: list[dict], tokenizer: Tokenizer | None, learned: bool = True) -> list[str]:
    if tokenizer is None:
        lines = []
        for message in messages:
            text = plain(message["content"] or "")
            own = learned and message["role"] == "assistant" and message.get("learn", True)
            lines.append(f"{message['role']}: [[{text}]]" if own else f"{message['role']}: {text}")
        return lines
    ids, mask = tokenizer.render(messages)
    lines = []
    # runs of tokens that are learned, and of others, by turns
    for own, run in groupby(zip(ids, mask, strict=True), key=lambda pair: learned and pair[1]):
        text = bars([i for i, _ in run], tokenizer)
        lines.append(f"[[{text}]]" if own else text)
    if learned:
        lines.append(f"({sum(mask)} of {len(ids)} tokens are learnt: those between [[ and ]])")
    return lines


def plain(text: str) -> str:
    return repr(text[:MAX_CHARS])[1:-1] + (" ..." if len(text) > MAX_CHARS else "")


def bars(ids: list[int], tokenizer: Tokenizer) -> str:
    """Return the tokens with | between them. Tokens that form one character are joined, with their
    number: ~3."""
    shown, waiting = [], []
    for i in ids[:MAX_TOKENS]:
        # a character of Chinese or an emoji may be several tokens: show it when it is whole
        waiting.append(i)
        raw = tokenizer.decode_bytes(waiting)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            if len(raw) < 8:
                continue
            text = repr(raw)[2:-1]  # not UTF-8
        shown.append(repr(text)[1:-1] + (f"~{len(waiting)}" if len(waiting) > 1 else ""))
        waiting = []
    if waiting:
        shown.append(repr(tokenizer.decode_bytes(waiting))[2:-1])
    n_more = len(ids) - MAX_TOKENS
    return "|".join(shown) + (f" ... {n_more} more" if n_more > 0 else "")
