"""Units of work: parts of the input that are prepared independently, and the files of each unit.

units/000012.rows      a ROW per document        .docs       the documents that passed, end to end
units/000012.sigs      their signatures          .problems   what could not be read, a line each
units/000012.json      written last: key, counts, samples of what was dropped
units/000012.tokens    ids end to end, and .lengths, ids per document; of conversations .mask, too; then
                       .tokenized, written last
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np

from groundup.files import row_formats
from groundup.text import quality
from groundup.text.recipe import Recipe

SHOWN = 20  # problems that are printed, and samples of each reason in the report
# Why a document was dropped; the first rule that it breaks. A ROW holds the index.
REASONS = (
    "kept", "question_length", "answer_missing", "unfinished_answer", "other_prompt", *quality.RULE_NAMES, "score",
    "contaminated", "exact_duplicate", "near_duplicate",
    *(problem.replace(" ", "_") for problem in row_formats.CHAT_PROBLEMS if problem != "answer missing"),
)  # fmt: skip
KEPT, EXACT, SCORE, NEAR = (REASONS.index(name) for name in ("kept", "exact_duplicate", "score", "near_duplicate"))
ROW = np.dtype([
    ("key", "<u8", (2,)),  # of the text, for exact copies
    ("position", "<u8"),  # where in [0, 2**64) the text falls: decides the split
    ("begin", "<u8"),  # where in .docs; of a document that passed
    ("size", "<u4"),  # bytes in .docs; 0 for one that did not pass
    ("n_bytes", "<u4"),  # of its text
    ("part", "<u4"),  # which part of the unit it is from
    ("offset", "<u8"),  # of its record
    ("score", "<f4"),  # of the first score key; nan if there is none
    ("reason", "u1"),  # KEPT, or why it did not pass
    ("held_out", "?"),  # a conversation whose first question is in the hold_out share
])  # fmt: skip


class Input(NamedTuple):
    path: str  # where the bytes are
    name: str  # what the user calls it: the path, python-docs or -
    size: int
    stamp: str  # changes when the content does
    source: int = 0  # index of its source
    problem: str = ""  # why it cannot be opened


class Part(NamedTuple):
    """The bytes of a file that one call of `readers.read_rows` reads."""

    path: str
    name: str
    begin: int
    end: int | None
    size: int  # bytes of input, for the progress bar
    stamp: str


class Unit(NamedTuple):
    number: int
    source: int
    parts: list[Part]

    def file(self, work: Path, what: str) -> Path:
        return work / "units" / f"{self.number:06d}.{what}"

    def key(self, recipe: Recipe, version: int) -> str:
        """Return a sha256 of everything that decides what `inspect_unit` makes of the unit."""
        parts = [(part.name, part.begin, part.end, part.stamp) for part in self.parts]
        return hashlib.sha256(repr((version, recipe.for_unit(self.source), parts)).encode()).hexdigest()


@dataclass
class Counts:
    """Counts of the records of a unit, before documents are compared with each other."""

    records: int = 0  # read, or lost on the way
    lost: Counter[str] = field(default_factory=Counter)  # records by reason: empty, bad_json, ...
    mended: Counter[str] = field(default_factory=Counter)  # records by what was mended; they go on
    split_huge: int = 0  # documents that were made by cutting a longer one, less one for each of these
    bytes_read: int = 0  # of text in UTF-8
    bytes_cleaned: int = 0  # of it, taken away by cleaning
    bytes_cut: int = 0  # of it, taken out because an evaluation file has it
    torn: list[str] = field(default_factory=list)  # files that could not be read to the end
    bad: Counter[str] = field(default_factory=Counter)  # by file: records that could not be read
    passed: Counter[str] = field(default_factory=Counter)  # by file: documents that could
    shown: list[str] = field(default_factory=list)  # the first problems, in words

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


class Sample(NamedTuple):
    """A document that did not pass, for the report."""

    position: int  # a hash; the smallest are shown: a random sample, always the same
    row: int  # in the unit
    where: str
    detail: str
    excerpt: str


def read_json(path: Path) -> dict:
    """Return the object in a JSON file, {} if the file is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_kept(unit: Unit, work: Path, fates: np.ndarray) -> Iterator[tuple[int, str]]:
    """Yield (row number, document) of the documents of a unit whose fate, (n,) uint8, is KEPT."""
    rows = np.fromfile(unit.file(work, "rows"), ROW)
    with open(unit.file(work, "docs"), "rb") as f:
        for i in np.flatnonzero(fates == KEPT).tolist():
            f.seek(int(rows["begin"][i]))
            yield i, f.read(int(rows["size"][i])).decode()


def unit_fates(unit: Unit, work: Path) -> np.ndarray:
    """Return the fates of the documents of a unit, (n,) uint8, indices of REASONS."""
    starts = np.load(work / "starts.npy")
    return np.load(work / "fates.npy", mmap_mode="r")[starts[unit.number] : starts[unit.number + 1]]
