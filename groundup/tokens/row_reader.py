"""Read conversations, pairs or prompts from raw files or from a directory of prepare.py.

Count what is left out, and why. A raw file has no validation split of its own: a hash of the text
decides which rows are held out, as in prepare.py.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from groundup.errors import UserError
from groundup.files import readers, row_formats, streams
from groundup.files.splits import assign, split_position
from groundup.tokens.token_files import read_manifest, verify_sha256
from tokenizer import Tokenizer

STRANGE = "not understood"
SHOWN = 3  # lines that are named for each reason


class Unusable(Exception):
    """A row that cannot be used: Unusable(reason to count it under, detail for people)."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail


class Items(list):
    """Items as they are read."""

    def without(self, held_out: np.ndarray) -> "Items":
        """Take out the items that held_out (n,) bool marks, and return them."""
        pairs = list(zip(self, held_out.tolist(), strict=True))
        self[:] = [item for item, marked in pairs if not marked]
        return Items(item for item, marked in pairs if marked)


class RowReader:
    """Reads the items of one kind (conversations, pairs, prompts) and counts the rows left out."""

    kind, noun = "chat", "conversation"  # kind: of row_formats.FORMATS
    kinds: tuple[str, ...] = ()  # all kinds that it reads, the first that fits a row; () = kind
    unread_are = "not read"
    split_by_prompt = False  # rows with the same prompt belong to the same split

    def __init__(self, tokenizer: Tokenizer | None = None, longest: int = 0) -> None:
        """longest: most tokens of an item, for some kinds."""
        self.tokenizer = tokenizer
        self.longest = longest
        self.dropped: Counter[str] = Counter()  # rows by the reason why they cannot be used
        self.places: list[str] = []  # "file:line: reason" of the first few for each reason
        self.said: Counter[str] = Counter()  # rows by what is wrong, in full
        # Rows by their keys that hold content and are not read
        self.unread: Counter[str] = Counter()
        self.n_read = 0
        self.trimmed = 0  # conversations that lost turns after the assistant's last one
        self.left_out: Counter[str] = Counter()  # parts of rows that the chat template left out

    def new_store(self) -> Any:
        """Return an empty store with `append` and `without`, for the items of a split."""
        return Items()

    def item(self, row: object, place: str) -> tuple[str, Any]:
        """Return (the text whose hash decides the split, the item) of a row. Raise Unusable."""
        raise NotImplementedError

    def read(self, path: str) -> Iterator[tuple[str, Any]]:
        """Yield what `item` returns for each usable row of a file."""
        for record in readers.read_records(path):
            self.n_read += 1
            place = f"{path}:{record.line}"
            try:
                if record.problem:
                    raise Unusable(record.problem, record.detail)
                row = streams.mended(record.value)
                try:
                    found = self.item(row, place)
                except UserError as error:  # such as turns that a template does not take
                    raise Unusable("not rendered", str(error)) from None
                self.unread.update(row_formats.unread_keys(row, *(self.kinds or (self.kind,))))
                yield found
            except Unusable as problem:
                detail = " ".join(problem.detail.split())
                said = f"{problem.reason}{detail and f': {detail}'}"
                # what is wrong with every row is said once
                if self.dropped[problem.reason] < SHOWN and not (detail and self.said[said]):
                    self.places.append(f"{place}: {said}")
                self.dropped[problem.reason] += 1
                if len(self.said) < 1000:
                    self.said[said] += 1

    def check(self, name: str, n_found: int) -> None:
        """Raise UserError if nothing usable was found in `name`."""
        if n_found:
            return
        if not self.n_read:
            raise UserError(f"data: {name} is empty: no row in it")
        first = self.places[0].split(f"; {self.kind} is known by")[0]
        if self.n_read == self.dropped[STRANGE]:
            tried = f"tried, by their keys: {row_formats.known_keys(self.kind)}"
            raise UserError(f"data: {name} holds no {self.noun}s; first: {first}; {tried}")
        reasons = ", ".join(f"{n} {reason}" for reason, n in self.dropped.items())
        raise UserError(f"data: {name} holds no usable {self.noun} ({reasons}); first: {first}")

    def report(self, name: str) -> list[str]:
        """Return lines for people: how many rows cannot be used, why, and where the first are."""
        lines = [f"{name}: {n:,} left out: {reason}" for reason, n in self.dropped.items()]
        lines += self.places
        for what, n in self.left_out.items():
            lines.append(f"{name}: {n:,} {what} are not written by the chat template")
        if self.trimmed:
            lines.append(f"{name}: {self.trimmed:,} lost turns after the last answer")
        if self.unread:
            lines.append(f"{name}: {self.unread_are}: {row_formats.describe_unread(self.unread)}")
        return lines


class SourceRows(NamedTuple):
    """The usable rows of one source."""

    train: Sequence
    val: Sequence
    reader: RowReader  # what was left out


def read_source(path: str, reader: RowReader, val_fraction: float) -> SourceRows:
    """Return the items of a raw file, a glob, a directory of raw files, or one of prepare.py.

    The last has its own splits; of the others val_fraction is held out."""
    train, val = reader.new_store(), reader.new_store()
    if Path(path, "manifest.json").exists():
        splits = read_manifest(path, reader.kind)["splits"]
        for split, items in (("train", train), ("val", val)):
            if split in splits:
                file = Path(path, splits[split]["file"])
                verify_sha256(file, splits[split]["sha256"])
                for _, item in reader.read(str(file)):
                    items.append(item)
    else:
        positions = array("Q")
        for file in readers.find_files(path):
            for text, item in reader.read(file):
                train.append(item)
                positions.append(split_position(text.encode()))
        by_prompt = reader.split_by_prompt
        split_of, _ = assign(np.array(positions, np.uint64), val_fraction, by_prompt=by_prompt)
        val = train.without(split_of != 0)
    reader.check(path, len(train) + len(val))
    return SourceRows(train, val, reader)
