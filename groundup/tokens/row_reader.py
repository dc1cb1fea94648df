"""Read conversations, pairs or prompts from raw files or from a directory of prepare.py, and count what is left out.

A raw file has no validation split of its own: a hash of the text decides which rows are held out, as in prepare.py.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from groundup.errors import UserError
from groundup.files import readers, row_formats, streams
from groundup.files.splits import assign, split_position
from groundup.tokens.token_files import read_manifest
from tokenizer import Tokenizer

STRANGE = "not understood"
SHOWN = 3  # lines that are named for each reason


class Unusable(Exception):
    """Raise for a row that cannot be used: Unusable(reason to count it under, detail for people)."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail


class RowReader:
    """Reads the items of one kind (conversations, pairs, prompts) from files and counts the rows that it leaves out."""

    kind, noun = "chat", "conversation"  # kind: of row_formats.FORMATS
    split_by_prompt = False  # rows with the same prompt belong to the same split

    def __init__(self, tokenizer: Tokenizer | None = None, longest: int = 0) -> None:
        self.tokenizer, self.longest = tokenizer, longest  # longest: most tokens of an item, for some kinds
        self.dropped: Counter[str] = Counter()  # rows by the reason why they cannot be used
        self.places: list[str] = []  # "file:line: reason" of the first few for each reason
        self.n_read = 0
        self.trimmed = 0  # conversations that lost what came after the assistant's last turn

    def item(self, row: object, place: str) -> tuple[str, object]:
        """Return (the text whose hash decides the split, the item) of a row. Raise Unusable."""
        raise NotImplementedError

    def read(self, path: str) -> Iterator[tuple[str, object]]:
        """Yield what `item` returns for each usable row of a file."""
        for record in readers.read_records(path):
            self.n_read += 1
            place = f"{path}:{record.line}"
            try:
                if record.problem:
                    raise Unusable(record.problem, record.detail)
                try:
                    found = self.item(streams.mended(record.value), place)
                except UserError as error:  # such as turns that a template does not take
                    raise Unusable("not rendered", str(error)) from None
                yield found
            except Unusable as problem:
                if self.dropped[problem.reason] < SHOWN:
                    detail = ": " + " ".join(problem.detail.split()) if problem.detail else ""
                    self.places.append(f"{place}: {problem.reason}{detail}")
                self.dropped[problem.reason] += 1

    def check(self, name: str, n_found: int) -> None:
        """Raise UserError if nothing usable was found in `name`."""
        if n_found:
            return
        if not self.n_read:
            raise UserError(f"data: {name} is empty: no row in it")
        first = self.places[0].split(f"; {self.kind} is known by")[0]
        if self.n_read == self.dropped[STRANGE]:
            tried = row_formats.known_keys(self.kind)
            raise UserError(f"data: {name} holds no {self.noun}s; first: {first}; tried, by their keys: {tried}")
        reasons = ", ".join(f"{n} {reason}" for reason, n in self.dropped.items())
        raise UserError(f"data: {name} holds no usable {self.noun} ({reasons}); first: {first}")

    def report(self, name: str) -> list[str]:
        """Return lines for people: how many rows cannot be used, why, and where the first of them are."""
        lines = [f"{name}: {n:,} left out: {reason}" for reason, n in self.dropped.items()] + self.places
        return lines + ([f"{name}: {self.trimmed:,} lost turns after the last answer"] if self.trimmed else [])


class SourceRows(NamedTuple):
    """The usable rows of one source."""

    train: Sequence
    val: Sequence
    reader: RowReader  # what was left out


def read_source(path: str, reader: RowReader, val_fraction: float) -> SourceRows:
    """Return the items in a raw file, a glob, a directory of raw files, or one of prepare.py, which has its splits."""
    directory = Path(path)
    if (directory / "manifest.json").exists():
        splits = read_manifest(directory, reader.kind)["splits"]
        files = [str(directory / splits[split]["file"]) if split in splits else "" for split in ("train", "val")]
        train, val = ([item for _, item in reader.read(file)] if file else [] for file in files)
    else:
        items, positions = [], []
        for file in readers.find_files(path):
            for text, item in reader.read(file):
                items.append(item)
                positions.append(split_position(text.encode()))
        split_of, _ = assign(np.array(positions, np.uint64), val_fraction, by_prompt=reader.split_by_prompt)
        train, val = ([item for item, split in zip(items, split_of, strict=True) if split == k] for k in (0, 1))
    reader.check(path, len(train) + len(val))
    return SourceRows(train, val, reader)
