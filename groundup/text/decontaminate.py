"""Evaluation questions in training text: found by the units that they share, so that they can be dropped or cut out.

CMMLU, C-Eval and MMLU in their own CSV files; JSON lines, JSON and parquet with a question, prompt or text.
"""

import csv
import io
import os
from collections.abc import Iterable, Iterator

import numpy as np

from groundup.errors import UserError
from groundup.files import readers, streams
from groundup.text.dedup import SLICE, Units, units, windows

CUT_CHARS = 200  # removed on each side of an evaluation question
WHOLE = 8  # units; a shorter evaluation item is too common a phrase to look for


class Evals:
    """Evaluation questions, to be found in training text by n consecutive units of question and choices together.

    The whole item, since a fifth of CMMLU's questions alone have fewer than 13 units. An item of fewer than n units is
    looked for as a whole; one of fewer than WHOLE is only listed, in `unprotected`.
    """

    def __init__(self, n: int, n_items: int, unprotected: list[str], hashes: dict[int, np.ndarray]) -> None:
        self.n = n
        self.n_items = n_items
        self.unprotected = unprotected
        self.hashes = hashes  # by length in units: sorted (m,) uint64
        self.tables = {length: Table(known) for length, known in hashes.items()}

    @classmethod
    def from_files(cls, paths: list[str], n: int = 13) -> "Evals":
        """CSV with the columns question, A, B, C, D (as of CMMLU and C-Eval) or six columns without names (as of MMLU);
        JSON or parquet with question and choices, or with prompt, text or instruction. Raise UserError for others."""
        if n < WHOLE:
            raise UserError(f"decontaminate: it looks for at least {WHOLE} units in a row, got {n}")
        found: dict[int, list[np.ndarray]] = {}
        n_items, unprotected = 0, []
        for path in paths:
            items = list(read_items(path))
            if not items:
                raise UserError(f"decontaminate: {path}: no items; not an evaluation file?")
            n_items += len(items)
            these = units([text for _, text in items])
            for (place, text), begin, end in zip(items, these.starts[:-1], these.starts[1:], strict=True):
                length = min(n, end - begin)
                if length < WHOLE:
                    unprotected.append(f"{place}: {' '.join(text.split())[:80]}")
                    continue
                *_, runs = windows(these.hashes[begin:end], length)
                found.setdefault(int(length), []).append(runs)
        return cls(n, n_items, unprotected, {length: np.unique(np.concatenate(runs)) for length, runs in found.items()})

    def save(self, path: str) -> None:
        """An .npz of all, for the other processes."""
        arrays = {f"hashes_{length}": hashes for length, hashes in self.hashes.items()}
        with open(f"{path}.tmp", "wb") as f:
            np.savez(f, n=self.n, n_items=self.n_items, unprotected=np.array(self.unprotected, str), **arrays)
        os.replace(f"{path}.tmp", path)

    @classmethod
    def load(cls, path: str) -> "Evals":
        with np.load(path) as file:
            names = [name for name in file.files if name.startswith("hashes_")]
            hashes = {int(name.removeprefix("hashes_")): file[name] for name in names}
            return cls(int(file["n"]), int(file["n_items"]), file["unprotected"].tolist(), hashes)

    def matches(self, units: Units) -> np.ndarray:
        """(n_texts,) int64: the first unit of the first run in each text that is an evaluation item's, or -1."""
        places, _ = self.find(units)
        texts = np.searchsorted(units.starts, places, "right") - 1
        first = np.full(len(units.starts) - 1, -1, np.int64)
        first[texts[::-1]] = (places - units.starts[texts])[::-1]  # the last assignment stays: the first place
        return first

    def find(self, units: Units) -> tuple[np.ndarray, np.ndarray]:
        """All runs of evaluation items: the places of their first units, ascending, and their lengths."""
        places, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for begin in range(0, len(units.hashes), SLICE):
            part = units.hashes[begin : begin + SLICE + self.n - 1]
            for length, runs in enumerate(windows(part, min(self.n, len(part))), 1):
                if length in self.tables:
                    at = begin + self.tables[length].find(runs[:SLICE])
                    text_end = units.starts[np.searchsorted(units.starts, at, "right")]
                    places.append(at[at + length <= text_end])
                    lengths.append(np.full(len(places[-1]), length))
        order = np.argsort(np.concatenate(places), kind="stable")
        return np.concatenate(places)[order], np.concatenate(lengths)[order]

    def cut(self, text: str) -> str:
        """The text without the runs of evaluation items and CUT_CHARS characters on each side; no match is left."""
        found = units([text])
        places, lengths = self.find(found)
        kept, end = [], 0
        begins, ends = found.begins[places] - CUT_CHARS, found.ends[places + lengths - 1] + CUT_CHARS
        for first, last in zip(begins.tolist(), ends.tolist(), strict=True):
            kept.append(text[end : max(end, first)])
            end = max(end, last)
        if not end:
            return text
        rest = "\n".join(part.strip() for part in [*kept, text[end:]] if part.strip())
        return self.cut(rest)  # what is now side by side may be an item too


class Table:
    """Which of many hashes are among the known ones: a table of flags by their first bits, then a binary search."""

    def __init__(self, known: np.ndarray) -> None:
        bits = max(10, len(known).bit_length() + 4)
        self.known = known
        self.shift = np.uint64(64 - bits)
        self.flags = np.zeros(2**bits, bool)
        self.flags[known >> self.shift] = True

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """Places of known ones, ascending."""
        places = np.flatnonzero(self.flags[hashes >> self.shift])
        wanted = hashes[places]
        nearest = np.minimum(np.searchsorted(self.known, wanted), len(self.known) - 1)
        return places[self.known[nearest] == wanted]


def read_items(path: str) -> Iterator[tuple[str, str]]:
    """("path:line", question and choices) of each item of an evaluation file. Raise UserError."""
    with streams.open_stream(path) as stream:
        kind = readers.container(path, stream.peek(), "file")
        if kind in ("csv", "tsv"):
            yield from csv_items(path, stream, "," if kind == "csv" else "\t")
            return
    if kind == "file":
        raise UserError(f"decontaminate: {path}: evaluation files are .csv, .tsv, .json, .jsonl or .parquet")
    for record in readers.read_records(path):
        place = f"{path}:{record.line}"
        if record.problem:
            detail = " ".join(record.detail.split())
            raise UserError(f"decontaminate: {place}: {record.problem}: {detail}; mend the file")
        yield place, item_text(record.value, place)


def csv_items(path: str, stream: io.BufferedReader, delimiter: str) -> Iterator[tuple[str, str]]:
    try:
        streams.skip_mark(stream)
        text, _ = streams.decode(stream.read())
        table = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        rows = [(table.line_num, row) for row in table if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"decontaminate: {path}: {error}; mend the file") from None
    if stream.raw.damage:
        raise UserError(f"decontaminate: {path}: {': '.join(stream.raw.damage)}; mend the file")
    names = [name.strip().lower() for name in rows[0][1]] if rows else []
    if not {"question", *PROMPTS} & set(names) and all(len(row) == 6 and row[5] in tuple("ABCD") for _, row in rows):
        names = ["question", "a", "b", "c", "d", "answer"]
    else:
        rows = rows[1:]
    for line, row in rows:
        if len(row) != len(names):
            raise UserError(f"decontaminate: {path}:{line}: {len(row)} fields, but {len(names)} columns; mend the file")
        yield f"{path}:{line}", item_text(dict(zip(names, row, strict=True)), f"{path}:{line}")


PROMPTS = ("prompt", "text", "instruction")
CHOICES = ("choices", "options", "a", "b", "c", "d", "e", "input")


def item_text(value: object, place: str) -> str:
    """Question and choices in lines. Answers are left out: many items have the same."""
    row = {str(key).lower(): found for key, found in value.items()} if isinstance(value, dict) else {"text": value}
    question = next((row[name] for name in ("question", *PROMPTS) if isinstance(row.get(name), str)), None)
    if question is None:
        has = ", ".join(row)[:200]
        what = f"no question, prompt, text or instruction in {has}"
        raise UserError(f"decontaminate: {place}: {what}; not an evaluation file?")
    return "\n".join([question, *(text for name in CHOICES for text in strings(row.get(name)))])


def strings(value: object) -> Iterable[str]:
    """All texts in a JSON value: choices are a list, {"A": ..} or {"text": [..], "label": [..]}."""
    if isinstance(value, dict):
        value = value.get("text", list(value.values()))
    if isinstance(value, list | tuple):
        return [text for part in value for text in strings(part)]
    return [value] if isinstance(value, str) else []
