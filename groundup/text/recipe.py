"""The settings of prepare.py, the files of its sources, and units of work: parts that are prepared independently.

units/000012.rows      a ROW per document        .docs       the documents that passed, end to end
units/000012.sigs      their signatures          .problems   what could not be read, a line each
units/000012.json      written last: key, counts, samples of what was dropped
units/000012.tokens    ids end to end, and .lengths, ids per document; of conversations .mask, too; then
                       .tokenized, written last
"""

import hashlib
import math
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

import numpy as np

from groundup.demo.bilingual import demo_rows
from groundup.demo.debug_data import write_rows
from groundup.demo.python_talks import docs_rows
from groundup.errors import UserError
from groundup.files import paths, readers, streams, untrusted, usable
from groundup.text import quality
from groundup.tokens.token_files import file_sha256

NAMED = re.compile(r"\s*([\w-]+)\s*:\s+(.*)", re.DOTALL)
OWN = {
    "weight": float, "text_key": str, "txt_split": str, "encoding": str, "quality": str,
    "rules_off": str, "rules_on": str, "min_chars": int, "max_chars": int,
}  # fmt: skip
MADE = {"python-docs": docs_rows, "demo-en": partial(demo_rows, "en"), "demo-zh": partial(demo_rows, "zh")}  # no files
BOUND = r"(?:(-?\d*\.?\d+(?:e-?\d+)?)%?)?"


SHOWN = 20  # problems that are printed, and samples of each reason in the report
# Why a document was dropped; the first rule that it breaks. A ROW holds the index.
REASONS = (
    "kept", "question_length", "answer_missing", "not_rendered", "unfinished_answer", "other_prompt",
    *quality.RULE_NAMES, "score", "contaminated", "exact_duplicate", "near_duplicate",
    *(problem.replace(" ", "_") for problem in usable.CHAT_PROBLEMS if problem != "answer missing"),
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


@dataclass(frozen=True)
class Source:
    """A named part of the input with settings of its own."""

    name: str = ""  # "" if the input is one source
    input: str = ""
    weight: float = 0.0  # in a mixture; 0 = not given
    text_key: str = ""
    txt_split: str = "file"
    encoding: str = ""  # of lines that are not UTF-8; "" = found
    quality: str = "curated"
    rules_off: str = ""
    rules_on: str = ""
    min_chars: int = 0
    max_chars: int = 0


@dataclass(frozen=True)
class Recipe:
    kind: str
    sources: tuple[Source, ...]
    punctuation: bool
    keep: str
    question_min_chars: int
    question_max_chars: int
    score: str
    exact: bool
    near: float
    near_bands: int
    near_rows: int
    decontaminate: str
    decontaminate_action: str
    val_fraction: float
    test_fraction: float
    hold_out: float
    prompts_from: str
    fold: str
    order: str
    strict: bool
    shard_tokens: int
    template: str  # kind=chat: fingerprint of a foreign tokenizer, whose chat template may refuse a conversation
    aids: str  # sha256 of the files that keep, decontaminate and prompts_from name

    def settings(self) -> dict:
        """Return the settings as plain values, without the paths of the inputs: only their content matters."""
        plain = asdict(self)
        plain["sources"] = [{key: v for key, v in source.items() if key != "input"} for source in plain["sources"]]
        return plain

    def for_unit(self, source: int) -> dict:
        """Return the settings that decide what `inspect_unit` makes of a unit of this source."""
        later = ("sources", "exact", "near", "val_fraction", "test_fraction", "fold", "order", "shard_tokens")
        plain = {key: value for key, value in self.settings().items() if key not in later}
        own = {key: v for key, v in asdict(self.sources[source]).items() if key not in ("name", "input", "weight")}
        return plain | own | {"signed": self.near > 0}


class Range(NamedTuple):
    """Documents stay if this number of their row is in the range."""

    key: str
    least: float
    most: float
    shares: bool  # the bounds are per cent of the documents; selection.py applies them


def parse_score(spec: str) -> list[Range]:
    """Return the ranges of 'bpb=0.3..1.5,ifd=5%..95%'; a bound may be empty. Raise UserError."""
    ranges = []
    for part in filter(None, (part.strip() for part in spec.split(","))):
        found, shares = re.fullmatch(rf"([^=]+?)\s*=\s*{BOUND}\.\.{BOUND}", part), "%" in part
        ends = ("0", "100") if shares else ("-inf", "inf")
        least, most = (float(found[k + 2] or end) for k, end in enumerate(ends)) if found else (1.0, 0.0)
        if least > most or (shares and not 0 <= least <= most <= 100):
            hint = "give bpb=0.3..1.5 or ifd=5%..95%, the least first, per cent from 0 to 100"
            raise UserError(f"prepare: score={part!r} is not key=least..most; {hint}")
        ranges.append(Range(found[1], least, most, shares))
    if any(one.shares for one in ranges[1:]):
        raise UserError("config: score: only the first key may have bounds in per cent")
    return ranges


def outside_range(scores: tuple[float, ...], ranges: list[Range]) -> str:
    """Return why a document is dropped by its scores, "" if it is not."""
    for value, (key, least, most, shares) in zip(scores, ranges, strict=True):
        if value != value:
            return f"no {key}"
        if not shares and not least <= value <= most:
            return f"{key} {value:.4g} is outside {least:g}..{most:g}"
    return ""


# ---- sources and their files -------------------------------------------------------------------


class Input(NamedTuple):
    path: str  # where the bytes are
    name: str  # what the user calls it: the path, python-docs or -
    size: int
    stamp: str  # changes when the content does
    source: int = 0  # index of its source
    problem: str = ""  # why it cannot be opened


def parse_sources(config: dict) -> tuple[Source, ...]:
    """Return the sources named in `input` with their settings, or one without a name. Raise UserError."""
    general = {key: config[key] for key in OWN if key != "weight"}
    parts = [part for part in config["input"].split(";") if part.strip()]
    matches = [NAMED.fullmatch(part) for part in parts]
    if not any(matches):
        return (Source(input=config["input"], **general),)
    if not all(matches):
        part = parts[matches.index(None)].strip()
        raise UserError(f"config: input: {part!r} is not of the form 'name: files, key=value, ...'")
    sources = tuple(make_source(*match.groups(), general) for match in matches)
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        raise UserError(f"config: input: two sources have the same name: {', '.join(names)}")
    if len({source.weight > 0 for source in sources}) > 1:
        raise UserError("config: input: give a weight to every source, or to none")
    if sum("-" in source.input.split(",") for source in sources) > 1:
        raise UserError("config: input: standard input (-) can be read once only")
    return sources


def make_source(name: str, text: str, general: dict) -> Source:
    """Return a source of 'files, key=value, ...'; its own settings win over the general ones. Raise UserError."""
    files, settings = [], dict(general)
    for item in filter(None, paths.split_names(text)):
        key, _, value = (word.strip() for word in item.partition("="))
        if key not in OWN:
            files.append(item)
            continue
        try:
            settings[key] = OWN[key](value.replace("+", ",") if OWN[key] is str else value)  # , ends a setting
            if OWN[key] is not str and not 0 <= settings[key] < math.inf:
                raise ValueError
        except ValueError:
            raise UserError(f"config: input: {key}={value} of source {name} is not a number, 0 or more") from None
    if not files:
        raise UserError(f"config: input: source {name} names no files")
    return Source(name, ",".join(files), **settings)


def find_inputs(sources: tuple[Source, ...], out_dir: Path, work: Path, kind: str = "text") -> list[Input]:
    """Return the files of all sources, each once, without those in `out_dir`. Standard input and python-docs become
    files in `work`. Raise UserError if nothing matches."""
    found: dict[str, Input] = {}
    for number, source in enumerate(sources):
        for name in filter(None, paths.split_names(source.input)):
            if name in ("-", *MADE):
                made = spool_stdin(work) if name == "-" else write_rows(MADE[name](kind), work / f"{name}.jsonl")
                files = [look(made, name, number)._replace(stamp=file_sha256(made))]  # each run writes it again
            else:
                files = [look(path, streams.shown_name(path), number) for path in readers.find_files(name)]
                if rows := next(filter(looks_like_rows, files), None):
                    hint = "if its rows are meant, let its name end in .jsonl"
                    print(f"prepare: {rows.name} looks like JSON lines but is read as plain text; {hint}")
            for file in files:
                if out_dir.name and out_dir.resolve() in Path(file.path).resolve().parents:
                    continue
                if found.setdefault(file.path, file).source != number:
                    print(f"prepare: {file.name} is in an earlier source already, and is left out of {source.name}")
    return list(found.values())


def look(path: str | Path, name: str, source: int) -> Input:
    try:
        stat = os.stat(path)
        if not S_ISREG(stat.st_mode):
            return Input(str(path), name, 0, "", source, problem="not a regular file")
        with open(path, "rb") as f:
            head = f.read(64)
    except OSError as error:
        return Input(str(path), name, 0, "", source, problem=error.strerror)
    if head.startswith(streams.LFS_POINTER):
        return Input(str(path), name, 0, "", source, problem=streams.POINTER_HINT)
    return Input(str(path), name, stat.st_size, str(stat.st_mtime_ns), source)


def looks_like_rows(file: Input) -> bool:
    """Return whether a file of plain text, by its name, begins like a file of JSON lines."""
    if file.problem:
        return False
    with streams.open_stream(file.path) as stream:
        head = stream.peek()
    is_row = re.match(rb'\s*\{\s*"[^"\n]*"\s*:', head)
    return is_row is not None and readers.container(file.path, head, "file") == "file"


def spool_stdin(work: Path) -> Path:
    """Write standard input to a file, which can be read twice and in parts. Return its path, .json or .txt."""
    path = work / "stdin.txt"
    with open(path, "wb") as f:
        shutil.copyfileobj(sys.stdin.buffer, f, 2**20)
    with streams.open_stream(str(path)) as stream:
        kind = readers.container("-", stream.peek(), "file")
    return path.rename(work / "stdin.json") if kind in ("array", "values", "jsonl") else path


# ---- units of work ---------------------------------------------------------------------------


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

    def fates(self, work: Path) -> np.ndarray:
        """Return why each document was dropped, or KEPT, after all were compared: (n,) uint8, indices of REASONS."""
        starts = np.load(work / "starts.npy")
        return np.load(work / "fates.npy", mmap_mode="r")[starts[self.number] : starts[self.number + 1]]

    def documents(self, work: Path, wanted: np.ndarray) -> Iterator[str]:
        """Yield the documents that passed and are `wanted`, (n,) bool."""
        rows = np.fromfile(self.file(work, "rows"), ROW)
        with open(self.file(work, "docs"), "rb") as f:
            for i in np.flatnonzero(wanted).tolist():
                f.seek(int(rows["begin"][i]))
                yield f.read(int(rows["size"][i])).decode()


@dataclass
class Counts:
    """Counts of the records of a unit, before documents are compared with each other."""

    records: int = 0  # read, or lost on the way
    lost: Counter[str] = field(default_factory=Counter)  # records by reason: bad_json, not_text, ...
    unusable: Counter[str] = field(default_factory=Counter)  # records without a text: empty, bad_field
    mended: Counter[str] = field(default_factory=Counter)  # records by what was mended; split_huge: pieces more
    bytes_read: int = 0  # of text in UTF-8
    bytes_cleaned: int = 0  # of it, taken away by cleaning
    bytes_cut: int = 0  # of it, taken out because an evaluation file has it
    marked: int = 0  # records whose text holds the marker of a turn
    input_bytes: int = 0  # of the files, unpacked: those of documents and those lost
    lost_bytes: Counter[str] = field(default_factory=Counter)  # of them, by file
    bad: Counter[str] = field(default_factory=Counter)  # by file: records that could not be read
    passed: Counter[str] = field(default_factory=Counter)  # by file: documents that could
    unread: Counter[str] = field(default_factory=Counter)  # rows by their keys with content that is not read
    shown: list[str] = field(default_factory=list)  # the first problems, in words

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


def read_json(path: Path) -> dict:
    """Return the object in a JSON file, {} if the file is missing or damaged."""
    try:
        return untrusted.read_json(path, most=untrusted.MANIFEST_BYTES)
    except UserError:
        return {}
