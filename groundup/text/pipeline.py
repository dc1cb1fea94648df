"""Units of work: what any process does to a part of the input, first to its documents, then to their tokens.

The input is cut into units, which depend on nothing but the input. `inspect_unit` reads, cleans and judges the
documents of one; `tokenize_unit` turns those that are left, once all have been compared with each other, into ids. A
unit that is done says so in a file with the key of all that decides its content, so a run that was killed does not do
it again.

    units/000012.rows      a ROW per document        .docs       the documents that passed, end to end
    units/000012.sigs      their signatures          .problems   what could not be read, a line each
    units/000012.json      written last: key, counts, samples of what was dropped
    units/000012.tokens    ids end to end, and .lengths, ids per document; of conversations .mask, too; then
                           .tokenized, written last
"""

import fcntl
import hashlib
import json
import math
import multiprocessing
import os
import signal
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from tqdm import tqdm

from groundup.errors import UserError
from groundup.files import readers, row_formats, streams, text_keys
from groundup.files.splits import first_question, is_held_out, said, split_position
from groundup.files.text_keys import as_score
from groundup.text import dedup
from groundup.text import quality as filters
from groundup.text.decontaminate import Evals
from groundup.tokens.token_files import write_json
from tokenizer import Tokenizer

UNIT_BYTES = 2**26  # a large file is cut into units of this size
GROUP_BYTES = 2**22  # small files share a unit up to this size, so that 100,000 files are not 100,000 tasks
BATCH_CHARS = 2**19  # of text that is compared and hashed at once: numpy is slow on few numbers
HUGE_CHARS = 2**23  # a longer document is cut into several, at the ends of paragraphs if it has any
SHOWN = 20  # problems that are printed, and samples of each reason in the report
PAIR_FACTOR = np.uint32(0x9E3779B1)  # 2**32 over the golden ratio, an odd number: Knuth's multiplicative hashing
PAIR_NUMBERS = ("margin", "difficulty", "score")  # of a pair's row, kept with it
ANSWER_PLACE = "@answers"  # [line, byte] of the line that a pair was made of, in a row of answer_pairs.py
# Why a document was dropped; of several rules that it breaks the first is told. A row of `ROW` holds the index.
REASONS = (
    "kept", "question_length", "answer_missing", "unfinished_answer", "other_prompt", *filters.RULE_NAMES, "score",
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
KEY = struct.Struct("<QQ")


class WorkerLost(UserError):
    """A process was killed, by another or for its memory; what the others did is not lost."""


@dataclass(frozen=True)
class Source:
    """Some of the input with a name and settings of its own."""

    name: str = ""  # "" of the only one
    input: str = ""
    weight: float = 0.0  # in a mixture; 0 = not said
    text_key: str = ""
    txt_split: str = "file"
    quality: str = "curated"
    rules_off: str = ""
    rules_on: str = ""
    min_chars: int = 0
    max_chars: int = 0


@dataclass(frozen=True)
class Recipe:
    """The settings that decide what is made of an input, besides the tokenizer."""

    kind: str = "text"
    sources: tuple[Source, ...] = (Source(),)
    punctuation: bool = False
    keep: str = ""
    words: str = ""
    question_min_chars: int = 0
    question_max_chars: int = 0
    score: str = ""
    exact: bool = True
    near: float = 0.0
    near_bands: int = 0
    near_rows: int = 0
    near_engine: str = "numpy"
    decontaminate: str = ""
    decontaminate_action: str = "drop"
    val_fraction: float = 0.0
    test_fraction: float = 0.0
    hold_out: float = 0.0
    prompts_from: str = ""
    fold: str = ""
    order: str = "input"
    strict: bool = False
    shard_tokens: int = 2**27
    aids: str = ""  # sha256 of the files that keep, words, decontaminate and prompts_from name

    def settings(self) -> dict:
        """As plain values, without the names of the inputs: these count by what is in them."""
        plain = asdict(self)
        plain["sources"] = [{key: v for key, v in source.items() if key != "input"} for source in plain["sources"]]
        return plain

    def for_unit(self, source: int) -> dict:
        """The settings that decide what `inspect_unit` makes of a unit of a source."""
        later = {"sources", "exact", "near", "near_engine", "val_fraction", "test_fraction", "fold", "order"}
        plain = {key: value for key, value in self.settings().items() if key not in later | {"shard_tokens"}}
        own = {key: v for key, v in asdict(self.sources[source]).items() if key not in ("name", "input", "weight")}
        return plain | own | {"signed": self.near > 0}


# ---- units -----------------------------------------------------------------------------------


class Input(NamedTuple):
    path: str  # where the bytes are
    name: str  # what the user calls it: the path, python-docs or -
    size: int
    stamp: str  # changes when the content does
    source: int = 0  # index of its source
    problem: str = ""  # why it cannot be opened


class Part(NamedTuple):
    """What one call of `readers.read_rows` reads."""

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

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def file(self, work: Path, what: str) -> Path:
        return work / "units" / f"{self.number:06d}.{what}"

    def key(self, recipe: Recipe, version: int) -> str:
        """Changes with all that decides what `inspect_unit` makes of the unit."""
        parts = [(part.name, part.begin, part.end, part.stamp) for part in self.parts]
        return hashlib.sha256(repr((version, recipe.for_unit(self.source), parts)).encode()).hexdigest()


def plan_units(inputs: list[Input], recipe: Recipe) -> list[Unit]:
    """The work, in the order of the output: parts of large files one by one, small files in groups."""
    units: list[Unit] = []
    room = -1
    for file in inputs:
        split = recipe.sources[file.source].txt_split
        cuts = readers.work_units(file.path, split, UNIT_BYTES) if not file.problem else []
        for begin, end in cuts:
            size = file.size // len(cuts)
            if size > room or units[-1].source != file.source:
                units.append(Unit(len(units), file.source, []))
                room = GROUP_BYTES
            units[-1].parts.append(Part(file.path, file.name, begin, end, size, f"{file.size} {file.stamp}"))
            room -= size
    return units


# ---- counts ----------------------------------------------------------------------------------


@dataclass
class Counts:
    """What became of what was read of a unit, before documents are compared with each other."""

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

    def failed(self) -> set[str]:
        """Files that could not be read, or not to the end."""
        return {*self.torn, *(name for name in self.bad if not self.passed[name])}

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


class Problems(readers.Report):
    """Writes every problem to a file as it comes: however many there are, they need no memory."""

    def __init__(self, name: str, file: TextIO, strict: bool) -> None:
        super().__init__(strict)
        self.name, self.file = name, file
        self.shown: list[str] = []  # the first of them

    def add(self, path: str, line: int, offset: int, reason: str, detail: str) -> None:
        detail = " ".join(detail.split())  # one line without tabs
        what = f"{self.name}:{line}: {reason}: {detail}"
        if self.strict:
            raise UserError(f"prepare: {what}; mend it, or leave such records out with strict=False")
        self.problems[reason] += 1
        self.file.write(f"{self.name}\t{line}\t{offset}\t{reason}\t{detail}\n")
        if len(self.shown) < SHOWN:
            self.shown.append(what)


class Sample(NamedTuple):
    """A document that did not pass, for people to look at."""

    position: int  # those with the smallest are shown: a choice by chance, always the same
    row: int  # in the unit
    where: str
    detail: str
    excerpt: str


# ---- documents -------------------------------------------------------------------------------


class Item(NamedTuple):
    """What a record holds, of whatever kind, cleaned."""

    text: str  # that is judged: of a conversation, questions and answers
    n_read: int  # bytes of it before it was cleaned
    more: str = ""  # a pair: the rejected answer, to be compared with other rows together with the text
    row: str = ""  # kinds chat and preference: what is kept of it, as JSON
    notes: str = ""  # a pair: its numbers and who made it, as JSON; no part of what is compared
    prompt: str = ""  # a pair: what is said before the answers
    question: str = ""  # a conversation or pair: the first
    problem: str = ""  # a conversation or pair: why it cannot be learnt from
    trimmed: bool = False  # a conversation: it went on after the last answer
    scores: tuple[float, ...] = ()
    place: tuple[int, int] | None = None  # a pair made of answers: their line and byte

    @property
    def compared(self) -> str:
        return f"{self.text}\n{self.more}" if self.more else self.text

    @property
    def document(self) -> str:
        """What is written of it."""
        return f"{self.row[:-1]}, {self.notes[1:]}" if self.notes else self.row or self.text


Clean = Callable[[str], str]


def understand(
    row: object, kind: str, text_key: str, score_keys: tuple[str, ...], clean: Clean
) -> tuple[Item | None, str]:
    """(Item, "") or (None, what is wrong)."""
    scores = tuple(as_score(row, key) for key in score_keys)
    if kind == "text":
        text, problem = row_formats.document_of(row, text_key)
        return (None, problem) if problem else (Item(clean(text), len(text.encode()), scores=scores), "")
    if kind == "chat":
        messages, problem = row_formats.messages_of(row)
        return (None, problem) if problem else (chat_item(messages, scores, clean), "")
    pair, problem = row_formats.pair_of(row)
    return (None, problem) if problem else (pair_item(row, pair, scores, clean), "")


def chat_item(messages: list[dict], scores: tuple[float, ...], clean: Clean) -> Item:
    cleaned = [message | {"content": clean(message["content"])} for message in messages]
    problem = row_formats.chat_problem(cleaned)
    answered = cleaned if problem else row_formats.trim_chat(cleaned)
    row = json.dumps({"messages": answered}, ensure_ascii=False)
    return Item(
        said(answered), len(said(messages).encode()), row=row, question=first_question(answered), problem=problem,
        trimmed=len(answered) < len(cleaned), scores=scores,
    )  # fmt: skip


def pair_item(row: dict, pair: row_formats.Pair, scores: tuple[float, ...], clean: Clean) -> Item:
    prompt = [message | {"content": clean(message["content"])} for message in pair.prompt]
    cleaned = row_formats.Pair(prompt, clean(pair.chosen), clean(pair.rejected))
    before, text = (f"{said(one.prompt)}\n{one.chosen}" for one in (pair, cleaned))
    answered = bool(cleaned.chosen.strip() and cleaned.rejected.strip()) and cleaned.chosen != cleaned.rejected
    problem = "" if answered else "answer missing"
    place = row.get(ANSWER_PLACE)
    return Item(
        text, len(before.encode()), cleaned.rejected, json.dumps(cleaned._asdict(), ensure_ascii=False),
        pair_notes(row), said(prompt), first_question(prompt),
        "unfinished answer" if row_formats.is_unfinished(row, pair) else problem, scores=scores,
        place=tuple(place) if isinstance(place, list) else None,
    )  # fmt: skip


def pair_notes(row: dict) -> str:
    """What a row says of its pair, as JSON: PAIR_NUMBERS, and which model made an answer; "" if nothing."""
    numbers = ((key, as_score(row, key)) for key in PAIR_NUMBERS)
    notes: dict = {key: value for key, value in numbers if math.isfinite(value)}
    notes |= {"made_by": row["made_by"]} if isinstance(row.get("made_by"), str) else {}
    return json.dumps(notes, ensure_ascii=False) if notes else ""


def pieces_of(text: str) -> list[str]:
    """`text`, or its parts of at most HUGE_CHARS, cut after the last blank line, else the last line, that they hold."""
    pieces = []
    while len(text) > HUGE_CHARS:
        half = HUGE_CHARS // 2  # a cut near the beginning would leave a scrap
        places = (text.rfind("\n\n", half, HUGE_CHARS - 1) + 2, text.rfind("\n", half, HUGE_CHARS) + 1, HUGE_CHARS)
        cut = next(place for place in places if place > half)
        pieces.append(text[:cut])
        text = text[cut:]
    return [*pieces, text]


def parse_score(spec: str) -> list[tuple[str, str, str]]:
    """[(key, least, most)] of 'bpb=0.3..1.5,ifd=5%..95%'; a bound may be empty. Raises PrepareError."""
    ranges = []
    for part in filter(None, (part.strip() for part in spec.split(","))):
        key, equals, bounds = part.partition("=")
        least, dots, most = bounds.partition("..")
        try:
            bounds = [float(bound.removesuffix("%")) for bound in (least, most) if bound]
            shares = [float(bound[:-1]) for bound in (least, most) if bound.endswith("%")]
        except ValueError:
            dots = ""
        if not (key and equals and dots):
            raise UserError(f"prepare: score={part!r} is not key=least..most, such as bpb=0.3..1.5 or ifd=5%..95%")
        if any(not 0 <= share <= 100 for share in shares) or (len(bounds) == 2 and not bounds[0] <= bounds[1]):
            raise UserError(f"prepare: score={part!r}: per cent are from 0 to 100, and the least comes first")
        ranges.append((key.strip(), least, most))
    return ranges


def outside_range(scores: tuple[float, ...], ranges: list[tuple[str, str, str]]) -> str:
    """Why a document is dropped by its scores, "" if it is not. Bounds in per cent are seen to when all are known."""
    for value, (key, least, most) in zip(scores, ranges, strict=True):
        if value != value:
            return f"no {key}"
        low, high = (float(b) if b and not b.endswith("%") else None for b in (least, most))
        if (low is not None and value < low) or (high is not None and value > high):
            return f"{key} {value:.4g} is outside {least}..{most}"
    return ""


@lru_cache(maxsize=8)
def load_rules(source: Source, keep: str, words: str, aids: str) -> filters.Rules:
    """aids: changes with the files that keep and words name."""
    return filters.Rules(
        source.quality, off=source.rules_off, on=source.rules_on, min_chars=source.min_chars,
        max_chars=source.max_chars, keep=keep, words=words,
    )  # fmt: skip


@lru_cache(maxsize=1)
def evals_of(path: Path, aids: str) -> Evals:
    """aids: changes with the evaluation files."""
    return Evals.load(path)


@lru_cache(maxsize=8)
def questions_in(files: str, aids: str, steps: filters.Cleaning) -> frozenset[str]:
    """The first questions of the conversations in files, cleaned. aids: changes with the files. Raises PrepareError: a
    row is no conversation with a question."""
    found = set()
    for path in readers.find_files(files):
        for record in readers.read_records(path):
            messages, problem = row_formats.messages_of(streams.mended(record.value))
            question = filters.clean(first_question(messages), steps).strip()
            if not question:
                what = f"prompts_from: {path}:{record.line}: {record.problem or problem or 'no question'}"
                raise UserError(f"prepare: {what}; give conversations, such as a held_out.jsonl")
            found.add(question)
    return frozenset(found)


def signatures_of(items: list[Item], units: dedup.Units, n_perm: int) -> np.ndarray:
    """MinHash signatures (n, n_perm) uint32 of items; units: those of what is compared.

    Two pairs are as similar as their prompts with the chosen answers are, times as similar as the rejected answers are:
    unlike answers to one prompt are no copies, however long the rest is, and near copies of whole pairs are. A pair
    with an answer without units is like no other."""
    if not any(item.more for item in items):
        return dedup.signatures(units, n_perm)
    first = dedup.signatures(dedup.units([item.text for item in items]), n_perm)
    second = dedup.signatures(dedup.units([item.more for item in items]), n_perm)
    empty = (first == dedup.NO_UNITS) | (second == dedup.NO_UNITS)
    return np.where(empty, dedup.NO_UNITS, first * PAIR_FACTOR ^ second)  # equal where both are


class Judge:
    """Tells of documents whether they pass, each on its own: all but the comparison with other documents."""

    def __init__(self, source: Source, recipe: Recipe, work: Path) -> None:
        self.recipe, self.source = recipe, source
        steps = filters.WEB if source.quality == "web" else filters.CURATED
        self.cleaning = replace(steps, punctuation=recipe.punctuation)
        self.drops_lines = "c4" in source.rules_on.replace(" ", "").split(",")
        self.rules = load_rules(source, recipe.keep, recipe.words, recipe.aids)
        self.ranges = parse_score(recipe.score)
        self.evals = evals_of(work / "evals.npz", recipe.aids) if recipe.decontaminate else None
        listed = recipe.prompts_from
        self.questions = questions_in(listed, recipe.aids, self.cleaning) if listed else None

    def understand(self, row: object) -> tuple[Item | None, str]:
        keys = tuple(key for key, _, _ in self.ranges)
        return understand(row, self.recipe.kind, self.source.text_key, keys, self.clean)

    def columns(self) -> list[str] | None:
        """Of parquet, to read."""
        columns = text_keys.columns_of(self.source.text_key) if self.recipe.kind == "text" else None
        return columns and columns + [key for key, _, _ in self.ranges]

    def clean(self, text: str) -> str:
        text = filters.clean(text, self.cleaning)
        if self.drops_lines and filters.language(text) == "en":  # it counts words, by the spaces between them
            return filters.c4_lines(text)
        return text

    def judge(self, item: Item) -> tuple[str, str]:
        """(reason, detail) of the first rule that a cleaned item breaks, ("kept", "") if none."""
        least, most = self.recipe.question_min_chars, self.recipe.question_max_chars
        if self.recipe.kind != "text":
            if len(item.question) < least or (most and len(item.question) > most):
                return "question_length", f"{len(item.question)} characters"
            if item.problem:
                return item.problem.replace(" ", "_"), ""
            if self.questions is not None and item.question.strip() not in self.questions:
                return "other_prompt", "not in prompts_from"
        rule, detail = self.rules.check(item.text)
        if rule:
            return rule, detail
        detail = outside_range(item.scores, self.ranges)
        return ("score", detail) if detail else ("kept", "")

    def contaminated(self, items: list[Item], units: dedup.Units) -> dict[int, str]:
        """{index: the text that an evaluation file has, too}."""
        if self.evals is None or not items:
            return {}
        found: dict[int, str] = {}
        for place, length in zip(*self.evals.find(units), strict=True):
            i = int(np.searchsorted(units.starts, place, "right")) - 1
            found.setdefault(i, items[i].compared[units.begins[place] : units.ends[place + length - 1]])
        return found


class Inspector:
    """Writes the files of one unit, batch by batch."""

    def __init__(self, unit: Unit, recipe: Recipe, work: Path, judge: Judge) -> None:
        self.unit, self.recipe, self.judge = unit, recipe, judge
        self.counts = Counts()
        self.samples: dict[str, list[Sample]] = {}
        self.n_rows, self.n_bytes = 0, 0
        self.batch: list[tuple[Item, int, int]] = []  # items with their part of the unit and the offset of their record
        self.room = BATCH_CHARS
        self.rows, self.docs, self.sigs = (open(unit.file(work, what), "wb") for what in ("rows", "docs", "sigs"))

    def close(self) -> None:
        for file in (self.rows, self.docs, self.sigs):
            file.close()

    def add(self, item: Item, part: int, offset: int) -> None:
        """Take a cleaned item. It is judged and written with others, at the latest by `flush`."""
        self.batch.append((item, part, offset))
        self.room -= len(item.text)
        if self.room <= 0:
            self.flush()

    def flush(self) -> None:
        batch, self.batch, self.room = self.batch, [], BATCH_CHARS
        items = [item for item, _, _ in batch]
        verdicts = [self.judge.judge(item) for item in items]
        passed = [i for i, (reason, _) in enumerate(verdicts) if reason == "kept"]
        units = dedup.units([items[i].compared for i in passed])
        found = self.judge.contaminated([items[i] for i in passed], units)
        keys = [dedup.exact_key(item.row or item.text) for item in items]
        if found:
            for k, text in found.items():
                self._contaminated(passed[k], text, items, verdicts)
            passed = [i for i in passed if verdicts[i][0] == "kept"]
            units = dedup.units([items[i].compared for i in passed])
        if self.recipe.near:
            n_perm = self.recipe.near_bands * self.recipe.near_rows
            signatures = signatures_of([items[i] for i in passed], units, n_perm)
            self.sigs.write(np.ascontiguousarray(signatures, "<u4").data)
        rows = [self._write(items[i], *batch[i][1:], keys[i], *verdicts[i]) for i in range(len(items))]
        self.rows.write(np.array(rows, ROW).data)

    def _contaminated(self, i: int, text: str, items: list[Item], verdicts: list[tuple[str, str]]) -> None:
        """Drop a document, or cut out what is in an evaluation file if that leaves enough of it."""
        if self.recipe.decontaminate_action == "cut" and self.recipe.kind == "text":
            item = items[i]._replace(text=self.judge.evals.cut(items[i].text))
            if self.judge.judge(item)[0] == "kept" and item.text.strip():
                self.counts.bytes_cut += len(items[i].text.encode()) - len(item.text.encode())
                self.counts.mended["contamination_cut"] += 1
                items[i] = item
                return
        verdicts[i] = "contaminated", repr(text)

    def _write(self, item: Item, part: int, offset: int, key: bytes, reason: str, detail: str) -> tuple:
        """Write the document if it passed; its ROW."""
        raw, begin, kept, kind = item.text.encode(), self.n_bytes, b"", self.recipe.kind
        position = split_position(item.prompt.encode() if kind == "preference" else raw)
        if reason == "kept":
            kept = item.document.encode()
            self.docs.write(kept)
            self.n_bytes += len(kept)
        else:
            self._sample(reason, Sample(position, self.n_rows, self._where(part, offset), detail, item.text[:300]))
        self.n_rows += 1
        score = item.scores[0] if item.scores else float("nan")
        halves, held_out = KEY.unpack(key), kind == "chat" and is_held_out(item.question, self.recipe.hold_out)
        return halves, position, begin, len(kept), len(raw), part, offset, score, REASONS.index(reason), held_out

    def _where(self, part: int, offset: int) -> str:
        return f"{self.unit.parts[part].name} at byte {offset}"

    def _sample(self, reason: str, sample: Sample) -> None:
        held = self.samples.setdefault(reason, [])
        held.append(sample)
        if len(held) >= 4 * SHOWN:
            self.samples[reason] = sorted(held)[:SHOWN]


def inspect_unit(unit: Unit, recipe: Recipe, version: int, work: Path) -> Counts:
    """Read, clean and judge the documents of a unit; what it writes is told at the top. Done before: only read back."""
    done, key = unit.file(work, "json"), unit.key(recipe, version)
    try:
        before = json.loads(done.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        before = {}
    if before.get("key") == key:
        return counts_from(before["counts"])
    done.unlink(missing_ok=True)  # what it vouches for is about to be replaced
    judge = Judge(recipe.sources[unit.source], recipe, work)
    inspector = Inspector(unit, recipe, work, judge)
    with open(unit.file(work, "problems"), "w", encoding="utf-8") as problems_file, closing(inspector):
        for number, part in enumerate(unit.parts):
            read_part(part, number, inspector, judge, problems_file)
        inspector.flush()
    samples = {reason: sorted(held)[:SHOWN] for reason, held in sorted(inspector.samples.items())}
    write_json(done, {"key": key, "counts": vars(inspector.counts), "samples": samples})
    return inspector.counts


def read_part(part: Part, number: int, inspector: Inspector, judge: Judge, problems_file: TextIO) -> None:
    """The documents of a part, cleaned, to the inspector; what was lost to its counts."""
    counts, recipe = inspector.counts, judge.recipe
    problems, passed = Problems(part.name, problems_file, recipe.strict), 0
    rows = readers.read_rows(
        part.path, judge.understand, judge.source.txt_split, part.begin, part.end, problems, judge.columns()
    )
    for row in rows:
        counts.records += 1
        text, n_read = row.value.text, row.value.n_read
        offset = row.value.place[1] if row.value.place else row.offset
        n_left = 0 if text.isspace() else len(text.encode())
        counts.bytes_read += n_read
        counts.bytes_cleaned += n_read - n_left
        if not n_left:
            counts.lost["empty"] += 1
            problems_file.write(f"{part.name}\t\t{offset}\tempty\tno text, or none after cleaning\n")
            continue
        counts.mended["unanswered_turns_cut"] += row.value.trimmed
        pieces = pieces_of(text) if recipe.kind == "text" else [text]
        counts.split_huge += len(pieces) - 1
        for piece in pieces:
            passed += 1
            inspector.add(row.value._replace(text=piece), number, offset)
    counts.records += problems.problems.total()
    counts.lost += problems.problems
    counts.mended += problems.mended  # which leaves out counts of 0
    counts.shown = (counts.shown + problems.shown)[:SHOWN]
    counts.passed[part.name] += passed
    if problems.problems:
        counts.bad[part.name] += problems.problems.total()
    if problems.problems["truncated_file"]:
        counts.torn.append(part.name)


def counts_from(plain: dict) -> Counts:
    """Counts as they were before they went through JSON."""
    counters = {name: Counter(plain[name]) for name in ("lost", "mended", "bad", "passed")}
    return Counts(**(plain | counters))


def read_samples(units: list[Unit], work: Path) -> Iterator[tuple[Unit, str, Sample]]:
    for unit in units:
        for reason, held in json.loads(unit.file(work, "json").read_text(encoding="utf-8"))["samples"].items():
            yield from ((unit, reason, Sample(*sample)) for sample in held)


def unit_rows(unit: Unit, work: Path) -> np.ndarray:
    """The rows of an inspected unit, (n,) ROW."""
    return np.fromfile(unit.file(work, "rows"), ROW)


def read_kept(unit: Unit, work: Path, fates: np.ndarray) -> Iterator[tuple[int, str]]:
    """(row number, document) of those of a unit whose fate, (n,) uint8, is KEPT."""
    rows = unit_rows(unit, work)
    with open(unit.file(work, "docs"), "rb") as f:
        for i in np.flatnonzero(fates == KEPT).tolist():
            f.seek(int(rows["begin"][i]))
            yield i, f.read(int(rows["size"][i])).decode()


# ---- tokens ----------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def load_tokenizer(directory: Path, fingerprint: str) -> Tokenizer:
    return Tokenizer.load(directory)


def tokenize_unit(unit: Unit, dtype: str, fingerprint: str, work: Path, chat: bool = False) -> int:
    """Write the ids of what is left of a unit, work/fates.npy decides; their number. Done before: only read back."""
    done = unit.file(work, "tokenized")
    fates = unit_fates(unit, work)
    tokenizer = load_tokenizer(work / "out", fingerprint)
    inspected = json.loads(unit.file(work, "json").read_text(encoding="utf-8"))["key"]
    key = hashlib.sha256(repr((inspected, fingerprint, dtype)).encode() + fates.tobytes()).hexdigest()
    if done.exists() and done.read_text(encoding="utf-8") == key:
        return unit.file(work, "tokens").stat().st_size // np.dtype(dtype).itemsize
    done.unlink(missing_ok=True)
    lengths = []
    with open(unit.file(work, "tokens"), "wb") as tokens, open(unit.file(work, "mask"), "wb") as masks:
        for _, text in read_kept(unit, work, fates):
            ids, mask = tokenizer.render(json.loads(text)["messages"]) if chat else (tokenizer.encode_array(text), ())
            lengths.append(len(ids))
            tokens.write(np.asarray(ids).astype(dtype).data)
            masks.write(np.array(mask, np.uint8).data)
    np.array(lengths, "<i8").tofile(unit.file(work, "lengths"))
    with open(f"{done}.tmp", "w", encoding="utf-8") as f:
        f.write(key)
    os.replace(f"{done}.tmp", done)
    return sum(lengths)


def unit_fates(unit: Unit, work: Path) -> np.ndarray:
    """What became of the documents of a unit, (n,) uint8, indices of REASONS."""
    starts = np.load(work / "starts.npy")
    return np.load(work / "fates.npy", mmap_mode="r")[starts[unit.number] : starts[unit.number + 1]]


# ---- all units, in several processes ---------------------------------------------------------


def run(function: Callable[[Unit], Any], units: list[Unit], workers: int, what: str, work: Path) -> list[Any]:
    """Return function(unit) of all. Raise what a worker raised, and WorkerLost if one was killed."""
    results: list[Any] = [None] * len(units)
    workers = min(workers, len(units))
    done = in_processes(function, units, workers, work) if workers > 1 else in_turn(function, units)
    with tqdm(total=sum(unit.size for unit in units), unit="B", unit_scale=True, desc=what, disable=None) as progress:
        for number, result in done:
            results[number] = result
            progress.update(units[number].size)
    return results


def in_turn(function: Callable[[Unit], Any], units: list[Unit]) -> Iterator[tuple[int, Any]]:
    return ((number, function(unit)) for number, unit in enumerate(units))


def in_processes(
    function: Callable[[Unit], Any], units: list[Unit], workers: int, work: Path
) -> Iterator[tuple[int, Any]]:
    """Yield (number, result) of every unit, as it is done. function: picklable."""
    spawn = multiprocessing.get_context("spawn")
    watched, lifeline = spawn.Pipe(duplex=False)
    # On an error, too, the lifeline is closed first: the workers end, and the executor does not wait for their units.
    with ProcessPoolExecutor(workers, spawn, start_worker, (watched, work)) as executor, lifeline:
        tasks = {executor.submit(function, unit): number for number, unit in enumerate(units)}
        for task in as_completed(tasks):
            try:
                result = task.result()
            except BrokenProcessPool:
                hint = "run again, with fewer workers if memory was short; what is done is not done again"
                raise WorkerLost(f"prepare: a worker process was killed; {hint}") from None
            yield tasks[task], result


def start_worker(watched: Connection, work: Path) -> None:
    """Make this process end when the parent closes its end of the pipe or ends itself, also by kill -9. The lock tells
    the next run that this process may still write; it is held until the process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent sees to the others
    fcntl.flock(os.open(work / "units", os.O_RDONLY), fcntl.LOCK_SH)
    if watched.poll():  # the parent has ended before the lock was taken
        os._exit(1)
    threading.Thread(target=end_with, args=(watched,), daemon=True).start()


def end_with(watched: Connection) -> None:
    try:
        watched.recv()
    except EOFError:
        os._exit(1)


def wait_for_workers(work: Path) -> None:
    """Return when the workers of a run that was killed have ended: until then they may write into its units."""
    handle = os.open(work / "units", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.close(handle)
