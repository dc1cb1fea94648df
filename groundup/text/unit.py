"""Prepare one unit of the input, in any process: its documents and, after all were compared, their
tokens.

A unit is a part of a large file, or some small files. `inspect_unit` reads, cleans and filters its
documents; `tokenize_unit` encodes those that are kept. Each writes, last, a file with a hash of
everything that decides its result, so a run that continues another skips finished units.

units/000012.rows      a ROW per document        .docs       the documents that passed, end to end
units/000012.sigs      their signatures          .problems   what could not be read, a line each
units/000012.json      written last: key, counts, samples of what was dropped
units/000012.fates.npy why each was dropped, after all were compared (select.py)
units/000012.tokens    ids end to end, and .lengths, ids per document; of conversations .mask, too;
                       then .tokenized, written last
"""

import hashlib
import json
import math
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from struct import unpack
from typing import Any, NamedTuple, TextIO

import numpy as np

from groundup.errors import UserError
from groundup.files import readers, row_formats, text_keys, turns, untrusted
from groundup.files.paths import find_files
from groundup.files.records import PIECE_CHARS, Report, piece_end, read_records
from groundup.files.sources import Source
from groundup.files.splits import (
    context_text,
    dialogue_text,
    first_question,
    held_out_position,
    split_position,
)
from groundup.files.text_keys import as_score
from groundup.text import clean, dedup, quality
from groundup.text.decontaminate import Evals
from groundup.text.inputs import Input
from groundup.text.recipe import VERSION, Recipe, outside_range, parse_score
from groundup.tokens.token_files import token_dtype
from groundup.tokens.token_writer import write_json
from tokenizer import Tokenizer

GROUP_BYTES = 2**22  # small files share a unit up to this size: 100,000 files are some 20 tasks
BATCH_CHARS = 2**19  # of text that is compared and hashed at once: numpy is slow on few numbers
HUGE_CHARS = PIECE_CHARS  # a longer document is cut into several, at paragraphs if it has any
SHOWN = 20  # problems that are printed, and samples of each reason in the report
SPECIAL = re.compile(r"<\|[a-z]\w*\|>")  # how special tokens are spelled; Haskell has <|>
PAIR_FACTOR = np.uint32(0x9E3779B1)  # 2**32 over the golden ratio, Knuth's multiplicative hashing
PAIR_NUMBERS = ("margin", "difficulty", "score")  # of a pair's row, kept with it
INSPECTED = ("rows", "docs", "sigs", "problems")  # files of a unit that `inspect_unit` writes
TOKENIZED = ("tokens", "mask", "lengths")  # those of `tokenize_unit`
ANSWER_PLACE = "@answers"  # in a pair that answer_pairs.py made: [line, byte] of its line

# Why a document was dropped; the first rule that it breaks. A ROW holds the index.
REASONS = (
    "kept", "question_length", "answer_missing", "not_rendered", "unfinished_answer",
    "other_prompt", *quality.RULE_NAMES, "score", "contaminated", "exact_duplicate",
    "near_duplicate",
    *(problem.replace(" ", "_") for problem in turns.CHAT_PROBLEMS if problem != "answer missing"),
)  # fmt: skip
KEPT, EXACT, SCORE, NEAR = map(
    REASONS.index, ("kept", "exact_duplicate", "score", "near_duplicate")
)
ROW = np.dtype([
    ("key", "<u8", (2,)),  # of the text, for exact copies
    ("position", "<u8"),  # where in [0, 2**64) the text falls: decides the split
    ("question", "<u8"),  # likewise the first question of a conversation: decides hold_out
    ("begin", "<u8"),  # where in .docs; of a document that passed
    ("size", "<u4"),  # bytes in .docs; 0 for one that did not pass
    ("n_bytes", "<u4"),  # of its text
    ("part", "<u4"),  # which part of the unit it is from
    ("offset", "<u8"),  # of its record
    ("score", "<f4"),  # of the first score key; nan if there is none
    ("reason", "u1"),  # KEPT, or why it did not pass
])


# ---- units of work -------------------------------------------------------------------------------


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

    def key(self, recipe: Recipe) -> str:
        """Return a sha256 of everything that decides what `inspect_unit` makes of the unit."""
        # VERSION: of this code. The number of processes and the order of units decide nothing.
        parts = [(part.name, part.begin, part.end, part.stamp) for part in self.parts]
        decides = repr((VERSION, recipe.for_unit(self.source), parts))
        return hashlib.sha256(decides.encode()).hexdigest()

    def inspected(self, work: Path) -> dict:
        """Return what `inspect_unit` wrote last. Raise UserError if it is damaged."""
        path, most = self.file(work, "json"), untrusted.MANIFEST_BYTES
        return untrusted.read_json(path, "prepare", "run again", most)

    def sizes(self, work: Path, names: Iterable[str]) -> dict[str, int]:
        """Return the bytes of files of the unit, -1 for one that is missing. A record written last
        holds them: it may outlive a power cut that takes the end of a larger file."""
        paths = {name: self.file(work, name) for name in names}
        return {name: p.stat().st_size if p.exists() else -1 for name, p in paths.items()}

    def fates(self, work: Path) -> np.ndarray:
        """Return why each document was dropped, or KEPT, after all were compared: (n,) uint8,
        indices of REASONS."""
        return np.load(self.file(work, "fates.npy"))

    def documents(self, work: Path, numbers: np.ndarray) -> Iterator[str]:
        """Yield documents of the unit that passed."""
        rows = np.fromfile(self.file(work, "rows"), ROW)[numbers]
        with open(self.file(work, "docs"), "rb") as f:
            for begin, size in zip(rows["begin"].tolist(), rows["size"].tolist(), strict=True):
                f.seek(begin)
                yield f.read(size).decode()


def plan_units(inputs: list[Input]) -> list[Unit]:
    """Return the units in the order of the output. Each part of a large file is one, small files
    share one. They do not depend on the number of processes."""
    units: list[Unit] = []
    room = -1
    for file in inputs:
        if file.problem:
            continue
        for begin, end in file.parts:
            size = file.size // len(file.parts)
            # Of one source each: a source has its own settings, and its own shards.
            if size > room or units[-1].source != file.source:
                units.append(Unit(len(units), file.source, []))
                room = GROUP_BYTES
            stamp = f"{file.size} {file.stamp}"
            units[-1].parts.append(Part(file.path, file.name, begin, end, size, stamp))
            room -= size
    return units


@dataclass
class Counts:
    """What was read of the input, before documents are compared with each other.

    Documents: records read = those that passed or were dropped by a rule + unusable + lost. A lost
    line of a text file is no record. Bytes of the files: input_bytes = those of documents +
    lost_bytes."""

    records: int = 0  # read, or lost on the way
    lost: Counter[str] = field(default_factory=Counter)  # records by reason: bad_json, ...
    lost_lines: Counter[str] = field(default_factory=Counter)  # of texts that are kept otherwise
    unusable: Counter[str] = field(default_factory=Counter)  # records without a text, by reason
    mended: Counter[str] = field(default_factory=Counter)  # by what was mended; split_huge: more
    bytes_read: int = 0  # of text in UTF-8
    bytes_cleaned: int = 0  # of it, removed by cleaning
    bytes_cut: int = 0  # of it, removed because an evaluation file has it
    marked: int = 0  # records whose text spells a special token
    input_bytes: int = 0  # of the files, unpacked
    lost_bytes: Counter[str] = field(default_factory=Counter)  # of them, by file
    bad: Counter[str] = field(default_factory=Counter)  # by file: records that could not be read
    passed: Counter[str] = field(default_factory=Counter)  # by file: documents that could
    unread: Counter[str] = field(default_factory=Counter)  # rows by keys that are not read
    optional: Counter[str] = field(default_factory=Counter)  # rows by key with ? (of "": all)
    shown: dict[str, str] = field(default_factory=dict)  # the first problems, with their places
    digests: list[list] = field(default_factory=list)  # (file, sha256) of each part read

    def add(self, other: "Counts") -> None:
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            elif isinstance(mine, dict):  # the first place of each problem stays
                setattr(self, item.name, mine | theirs | mine)
            else:
                mine += theirs
                setattr(self, item.name, mine)

    def add_report(self, report: Report, name: str, n_passed: int) -> None:
        """Add what reading a part of a file reported. n_passed: documents that it gave."""
        n_problems = report.problems.total()
        lost = report.problems - report.in_text
        if n_passed:
            self.lost_lines.update(report.in_text)
        elif report.in_text:  # nothing is left of the text
            lost[next(iter(report.in_text))] += 1
        self.records += lost.total()
        for reason, n in lost.items():
            (self.unusable if reason == "bad_field" else self.lost)[reason] += n
        self.mended.update(report.mended)
        self.input_bytes += report.n_bytes
        self.passed[name] += n_passed
        if n_problems:
            self.bad[name] += n_problems
        if report.lost_bytes:
            self.lost_bytes[name] += report.lost_bytes


class Problems(Report):
    """Writes every problem to a file as it comes. shown: gets the first place of each."""

    def __init__(
        self, name: str, file: TextIO, shown: dict[str, str], strict: bool, digest: bool = False
    ) -> None:
        super().__init__(strict, digest=digest, name=name)
        self.file, self.shown = file, shown

    def note(self, name: str, line: int, offset: int, reason: str, detail: str) -> None:
        self.file.write(f"{name}\t{line}\t{offset}\t{reason}\t{detail}\n")
        if len(self.shown) < SHOWN:
            self.shown.setdefault(f"{reason}: {detail}", f"{name}:{line}")


# ---- one document --------------------------------------------------------------------------------


class Item(NamedTuple):
    """The cleaned content of a record of any kind."""

    text: str  # checked by the rules; of a conversation its questions and answers
    n_read: int  # bytes of it before cleaning
    rejected: str = ""  # a pair: the rejected answer
    compared_parts: tuple[str, str] = ("", "")  # of a row: near copies are alike in both
    context: str = ""  # of a row: system message, tools and their results; the same as well
    row: str = ""  # kinds chat and preference: what is written, as JSON
    extra_fields: str = ""  # a pair: its numbers and who made it, as JSON; not compared
    prompt: str = ""  # a pair: the text before the answers
    question: str = ""  # a conversation or pair: the first
    problem: str = ""  # a conversation or pair: why it cannot be trained on
    trimmed: bool = False  # a conversation: it continued after the last answer
    n_skipped: int = 0  # turns that were left out by text_key
    scores: tuple[float, ...] = ()
    offset: int | None = None  # of its record; of a pair made of answers, of their line
    part: int = 0  # which part of the unit it is from
    is_chat: bool = False  # a text: made of a chat, where a short answer is a good one
    unread: tuple[str, ...] = ()  # keys of the row that hold content and are not read
    optional: tuple[str, ...] = ()  # of text_keys.found_optional

    @property
    def all_text(self) -> str:
        """Return all that a model reads of it, where evaluation questions are looked for."""
        return "\n".join(filter(None, (self.context, self.text, self.rejected)))

    @property
    def content(self) -> str:
        """Return what exact copies have in common; of a row its JSON, with line ends as such."""
        return self.row.replace("\\n", "\n").replace("\\t", "\t") or self.text

    @property
    def document(self) -> str:
        """Return what is written to the output."""
        if self.extra_fields:
            return f"{self.row[:-1]}, {self.extra_fields[1:]}"
        return self.row or self.text


class Judge:
    """Reads the documents of a source and decides which pass, each on its own."""

    def __init__(self, source: Source, recipe: Recipe, work: Path) -> None:
        self.recipe, self.source = recipe, source
        self.scores = parse_score(recipe.score)
        self.changes = quality.parse_rules(source.rules)
        self.row_rules = quality.Rules("rows", source.rules)
        self.rules = self.row_rules
        if recipe.kind == "text":
            self.rules = quality.Rules(source.quality, source.rules)
        web, marks = source.quality == "web", self.changes.punctuation
        self.clean = partial(clean.clean, white_space=web, punctuation=marks)
        self.evals = Evals.load(work / "evals.npz") if recipe.decontaminate else None
        self.tokenizer = Tokenizer.load(work / "out") if recipe.template else None
        self.questions = self.read_questions() if recipe.prompts_from else None
        self.columns = None  # to read of parquet files; None = all
        if recipe.kind == "text":
            of_text = text_keys.columns_of(source.text_key) or sorted(row_formats.COLUMNS)
            self.columns = of_text + [score.key for score in self.scores]

    def read_questions(self) -> set[str]:
        """Return the cleaned first questions of the conversations in recipe.prompts_from. Raise
        UserError."""
        found = set()
        for path in find_files(self.recipe.prompts_from):
            for record in read_records(path):
                messages, problem = row_formats.messages_of(untrusted.mended(record.value))
                question = self.clean(first_question(messages)).strip()
                if not question:
                    why = record.problem or problem or "no question"
                    hint = "give conversations, such as a held_out.jsonl"
                    where = f"prompts_from: {path}:{record.line}"
                    raise UserError(f"prepare: {where}: {why}; {hint}")
                found.add(question)
        return found

    # ---- what a row says

    def understand(self, row: object) -> tuple[Item | None, str]:
        """Return (the cleaned item of a row, "") or (None, what is wrong)."""
        kind, text_key = self.recipe.kind, self.source.text_key
        unread, n_skipped = (), 0
        if kind == "text":
            text, problem = row_formats.document_of(row, text_key)
            item = None if problem else Item(self.clean(text), len(text.encode()))
            if item and self.is_short_chat(item.text, row):
                item = item._replace(is_chat=True)
            if item and "?" in text_key:
                item = item._replace(optional=tuple(text_keys.found_optional(row, text_key)))
        else:
            missing = text_keys.missing_keys(row, text_key)
            row = text_keys.renamed(row, text_key)
            row, n_skipped = text_keys.without_skipped(row, text_key)
            item, problem = self.chat_item(row) if kind == "chat" else self.pair_item(row)
            problem = text_keys.with_given(problem, text_key)
            if missing and problem.startswith(("unknown format", "another kind")):
                problem = missing
        if problem:
            return None, problem
        if kind != "text" or not text_key:
            unread = tuple(row_formats.unread_keys(row, kind))
        scores = tuple(as_score(row, score.key) for score in self.scores)
        return item._replace(scores=scores, unread=unread, n_skipped=n_skipped), ""

    def is_short_chat(self, text: str, row: object) -> bool:
        """Return whether a text is a chat that the least length of curated texts would drop."""
        # The length comes first: it spares most rows a second reading.
        short = len(text) < quality.CURATED_LENGTH["min_length"]
        return short and self.source.quality == "curated" and not row_formats.messages_of(row)[1]

    def clean_messages(self, messages: list[dict]) -> list[dict]:
        return [message | {"content": self.clean(message["content"])} for message in messages]

    def chat_item(self, row: dict) -> tuple[Item | None, str]:
        messages, problem = row_formats.messages_of(row)
        if problem:
            return None, problem
        cleaned = self.clean_messages(messages)
        unusable = turns.chat_problem(cleaned, row)
        # What follows the last answer is never learnt.
        answered = cleaned if unusable else turns.trim_chat(cleaned)
        questions = dialogue_text([m for m in answered if m["role"] != "assistant"])
        answers = dialogue_text([m for m in answered if m["role"] == "assistant"])
        return Item(
            text=dialogue_text(answered),
            n_read=len(dialogue_text(messages).encode()),
            compared_parts=(questions or answers, answers),
            context=context_text(answered),
            row=json.dumps({"messages": answered}, ensure_ascii=False),
            question=first_question(answered),
            problem=unusable,
            trimmed=len(answered) < len(cleaned),
        ), ""

    def pair_item(self, row: dict) -> tuple[Item | None, str]:
        pair, problem = row_formats.pair_of(row)
        if problem:
            return None, problem
        prompt = self.clean_messages(pair.prompt)
        cleaned = turns.Pair(prompt, self.clean(pair.chosen), self.clean(pair.rejected))
        text = f"{dialogue_text(prompt)}\n{cleaned.chosen}"
        unusable = turns.pair_problem(row, pair)
        # Cleaning may have removed the only difference between the two.
        if not unusable and turns.are_equal(cleaned.chosen, cleaned.rejected):
            unusable = "answer missing"
        place = row.get(ANSWER_PLACE)
        return Item(
            text=text,
            n_read=len(f"{dialogue_text(pair.prompt)}\n{pair.chosen}".encode()),
            rejected=cleaned.rejected,
            compared_parts=(text, cleaned.rejected),
            context=context_text(prompt),
            row=json.dumps(cleaned._asdict(), ensure_ascii=False),
            extra_fields=pair_fields(row),
            prompt=dialogue_text(prompt),
            question=first_question(prompt),
            problem=unusable,
            offset=place[1] if isinstance(place, list) else None,
        ), ""

    # ---- whether it passes

    def judge(self, item: Item) -> tuple[str, str]:
        """Return (reason, detail) of the first rule that a cleaned item breaks, ("kept", "") if
        none."""
        if self.recipe.kind != "text":
            reason, detail = self.judge_row(item)
            if reason:
                return reason, detail
        # Of a pair each answer is judged behind its prompt.
        texts = [item.text, f"{item.prompt}\n{item.rejected}"] if item.rejected else [item.text]
        rules = self.row_rules if item.is_chat else self.rules
        for text in texts:
            rule, detail = rules.check(text)
            if rule:
                return rule, detail
        detail = outside_range(item.scores, self.scores)
        return ("score", detail) if detail else ("kept", "")

    def judge_row(self, item: Item) -> tuple[str, str]:
        """Return (reason, detail) why a conversation or pair is dropped before the rules, or two
        empty strings."""
        bounds, n = self.changes.question_length, len(item.question)
        if bounds and not bounds.least <= n <= bounds.most:
            return "question_length", f"{n} characters"
        if item.problem:
            return item.problem.replace(" ", "_"), ""
        if self.questions is not None and item.question.strip() not in self.questions:
            return "other_prompt", "not in prompts_from"
        if self.tokenizer:
            try:
                self.tokenizer.render(json.loads(item.row)["messages"])
            except UserError as error:  # such as turns that the chat template does not take
                return "not_rendered", str(error)
        return "", ""


load_judge = lru_cache(maxsize=1)(Judge)  # recipe.files_digest changes with the files it reads


def numbers_of(row: dict, keys: Iterable[str]) -> dict[str, float]:
    """Return the numbers that a row has under these keys."""
    numbers = {key: as_score(row, key) for key in keys}
    return {key: number for key, number in numbers.items() if math.isfinite(number)}


def pair_fields(row: dict) -> str:
    """Return a pair's PAIR_NUMBERS and the model that made its answers, as JSON; "" if a row has
    none of them."""
    found: dict = numbers_of(row, PAIR_NUMBERS)
    if isinstance(row.get("made_by"), str):
        found["made_by"] = row["made_by"]
    return json.dumps(found, ensure_ascii=False) if found else ""


def pieces_of(text: str) -> list[str]:
    """Return the text in pieces of at most HUGE_CHARS, cut after a blank line if possible, else
    after a line."""
    ends = [0]
    while len(text) - ends[-1] > HUGE_CHARS:
        ends.append(piece_end(text, ends[-1], HUGE_CHARS))
    return [text[begin:end] for begin, end in zip(ends, [*ends[1:], len(text)], strict=True)]


def signatures_of(items: list[Item], units: dedup.Units) -> np.ndarray:
    """Return MinHash signatures (n, N_PERM) uint32 of items. units: of the items' compared texts.

    The similarity of two conversations is that of their questions times that of their answers; of
    two pairs, that of prompts with chosen answers times that of rejected answers. So different
    answers to one long prompt, or questions on one long text, are no copies. Rows with different
    contexts are not similar: one word of a system message, or one tool, asks for another answer. A
    row with a part too short for a shingle of words is similar to no other: many questions have the
    answer "no"."""
    if not any(item.row for item in items):
        return dedup.signatures(units)
    # A value of a MinHash is equal in two sets with the probability of their similarity. Values of
    # both parts as one number are equal where both are, so with the product.
    parts = [dedup.units([item.compared_parts[k] for item in items]) for k in (0, 1)]
    first, second = map(dedup.signatures, parts)
    context = [unpack("<I", dedup.exact_key(item.context)[:4]) for item in items]
    n_units = np.minimum(*(np.diff(part.starts) for part in parts))
    short = n_units[:, None] < dedup.SHINGLE
    both = first * PAIR_FACTOR ^ second
    alike = both * PAIR_FACTOR ^ np.array(context, np.uint32)  # equal where all three are
    return np.where(short, dedup.NO_UNITS, alike)


# ---- all documents of a unit ---------------------------------------------------------------------


def inspect_unit(unit: Unit, recipe: Recipe, work: Path, limit: int | None = None) -> Counts:
    """Read, clean and filter the documents of a unit, write its files, and return the counts. If an
    earlier run finished the unit, only read its counts. limit: documents to read of each part."""
    done, key = unit.file(work, "json"), unit.key(recipe)
    before = read_json(done)
    signed = recipe.near > 0  # `near` is no part of the key: other thresholds need no new reading
    same = before.get("key") == key and before["signed"] >= signed
    if same and before["sizes"] == unit.sizes(work, INSPECTED):
        counts = before["counts"].items()
        return Counts(**{name: Counter(n) if isinstance(n, dict) else n for name, n in counts})
    done.unlink(missing_ok=True)  # it says that the files are complete, and they are replaced now
    with ExitStack() as stack:
        inspector = Inspector(unit, recipe, work, stack)
        for number in range(len(unit.parts)):
            inspector.read(number, limit)
        inspector.flush()
    # Sorted, so that the file is the same in every run.
    samples = {reason: sorted(found)[:SHOWN] for reason, found in sorted(inspector.samples.items())}
    counts = vars(inspector.counts)
    sizes = unit.sizes(work, INSPECTED)
    record = {"key": key, "signed": signed, "sizes": sizes, "counts": counts, "samples": samples}
    write_json(done, record)
    return inspector.counts


class Inspector:
    """Writes the files of one unit, batch by batch."""

    def __init__(self, unit: Unit, recipe: Recipe, work: Path, stack: ExitStack) -> None:
        self.unit, self.recipe = unit, recipe
        self.judge = load_judge(recipe.sources[unit.source], recipe, work)
        self.counts = Counts()
        name = recipe.sources[unit.source].name
        self.source_name = f"{name}: " if name else ""
        # By reason: position, row, detail, excerpt; see `sample`.
        self.samples: dict[str, list[tuple]] = {}
        self.n_rows = 0
        self.batch: list[Item] = []
        self.room = BATCH_CHARS
        self.rows, self.docs, self.sigs = (
            stack.enter_context(open(unit.file(work, what), "wb"))
            for what in ("rows", "docs", "sigs")
        )
        self.problems = stack.enter_context(
            open(unit.file(work, "problems"), "w", encoding="utf-8")
        )

    def read(self, number: int, limit: int | None) -> None:
        """Add the cleaned documents of a part to the batch, and count what could not be read."""
        part, source = self.unit.parts[number], self.judge.source
        report = Problems(
            part.name, self.problems, self.counts.shown, self.recipe.strict, digest=limit is None
        )
        rows = readers.read_rows(
            part.path, self.judge.understand, source.txt_split, part.begin, part.end, report,
            self.judge.columns, source.encoding,
        )  # fmt: skip
        n_passed = sum(self.take(row, number) for row in islice(rows, limit))
        # Only now has the report the bytes and the sum of all that was read.
        self.counts.add_report(report, part.name, n_passed)
        if report.sha256:
            self.counts.digests.append([part.name, report.sha256.hexdigest()])

    def take(self, row: readers.Row, number: int) -> int:
        """Add the document of a record to the batch; return how many pieces it has."""
        counts, item = self.counts, row.value
        if row.piece:
            counts.mended["split_huge"] += 1
        else:
            counts.records += 1
        offset = row.offset if item.offset is None else item.offset
        item = item._replace(part=number, offset=offset)
        n_left = 0 if item.text.isspace() else len(item.text.encode())
        counts.bytes_read += item.n_read
        counts.bytes_cleaned += item.n_read - n_left
        if not n_left:
            counts.unusable["empty"] += 1
            name = self.unit.parts[number].name
            self.problems.write(f"{name}\t\t{offset}\tempty\tno text, or none after cleaning\n")
            return 0
        counts.mended["unanswered_turns_cut"] += item.trimmed
        counts.mended["turns_skipped"] += item.n_skipped
        # "in" is forty times as fast as the expression
        has_name = "<|" in item.text and SPECIAL.search(item.text)
        counts.marked += bool(has_name) or item.text.startswith("<s>")
        counts.unread.update(f"{self.source_name}{key}" for key in item.unread)
        counts.optional.update(f"{self.source_name}{key}" for key in item.optional)
        pieces = pieces_of(item.text) if self.recipe.kind == "text" else [item.text]
        counts.mended["split_huge"] += len(pieces) - 1
        for piece in pieces:
            self.batch.append(item._replace(text=piece))
            self.room -= len(piece)
            if self.room <= 0:
                self.flush()
        return len(pieces)

    def flush(self) -> None:
        """Judge and write the documents of the batch."""
        items, self.batch, self.room = self.batch, [], BATCH_CHARS
        # Rules look at one document at a time.
        verdicts = [self.judge.judge(item) for item in items]
        passed = [i for i, (reason, _) in enumerate(verdicts) if reason == "kept"]
        self.count_left_out([items[i] for i in passed])
        # Evaluation text and near copies are found in the units of all texts at once.
        signed = self.recipe.near > 0
        texts = [items[i].all_text for i in passed]
        units = dedup.units(texts) if signed or self.judge.evals else None
        found = self.judge.evals.found_in(texts, units) if self.judge.evals else {}
        for k, text in found.items():
            self.cut_or_drop(passed[k], text, items, verdicts)
        if found and signed:  # some are dropped, some are shorter now
            passed = [i for i in passed if verdicts[i][0] == "kept"]
            units = dedup.units([items[i].all_text for i in passed])
        if signed:
            signatures = signatures_of([items[i] for i in passed], units)
            self.sigs.write(np.ascontiguousarray(signatures, "<u4").data)
        keys = [dedup.exact_key(item.content) for item in items]  # of what is left of them
        rows = list(map(self.write, items, keys, verdicts))
        self.rows.write(np.array(rows, ROW).data)

    def count_left_out(self, items: list[Item]) -> None:
        """Count what a foreign chat template does not write of conversations."""
        if not self.judge.tokenizer:
            return
        for item in items:
            left_out = self.judge.tokenizer.left_out(json.loads(item.row)["messages"])
            for what, n in left_out.items():
                self.counts.mended[f"left out by the chat template: {what}"] += n

    def cut_or_drop(self, i: int, text: str, items: list[Item], verdicts: list[tuple]) -> None:
        """Drop a document, or cut the evaluation text out of it if the rest passes the rules."""
        if self.recipe.cuts:
            item = items[i]._replace(text=self.judge.evals.cut(items[i].text))
            # What is left may be too short, or none.
            if self.judge.judge(item)[0] == "kept" and item.text.strip():
                self.counts.bytes_cut += len(items[i].text.encode()) - len(item.text.encode())
                self.counts.mended["contamination_cut"] += 1
                items[i] = item
                return
        verdicts[i] = "contaminated", repr(text)

    def write(self, item: Item, key: bytes, verdict: tuple[str, str]) -> tuple:
        """Write the document if it passed, else keep a sample; return its ROW."""
        raw, kept, kind = item.text.encode(), b"", self.recipe.kind
        reason, detail = verdict
        begin = self.docs.tell()
        position = split_position(item.prompt.encode() if kind == "preference" else raw)
        question = held_out_position(item.question) if kind == "chat" else 0
        if reason == "kept":
            kept = item.document.encode()
            self.docs.write(kept)
        else:
            self.sample(item, position, reason, detail)
        self.n_rows += 1
        score = item.scores[0] if item.scores else math.nan
        return (
            unpack("<QQ", key), position, question, begin, len(kept), len(raw), item.part,
            item.offset, score, REASONS.index(reason),
        )  # fmt: skip

    def sample(self, item: Item, position: int, reason: str, detail: str) -> None:
        """Keep the documents of the lowest positions, a random sample, of each reason."""
        found = self.samples.setdefault(reason, [])
        found.append((position, self.n_rows, detail, item.text[:300]))
        if len(found) >= 4 * SHOWN:  # not after each, for sorting costs more than holding some
            self.samples[reason] = sorted(found)[:SHOWN]


def read_json(path: Path) -> dict:
    """Return the object in a JSON file, {} if the file is missing or damaged."""
    try:
        return untrusted.read_json(path, most=untrusted.MANIFEST_BYTES)
    except UserError:
        return {}


# ---- tokens --------------------------------------------------------------------------------------

load_tokenizer = lru_cache(maxsize=1)(lambda directory, fingerprint: Tokenizer.load(directory))


def tokenize_unit(
    unit: Unit, fingerprint: str, work: Path, kind: str = "text", threads: int = 1
) -> None:
    """Write the ids of the documents of a unit that are kept, unless an earlier run
    finished the unit. threads: that encode documents, for fewer units than processes; the tokenizer
    releases the GIL."""
    done, fates = unit.file(work, "tokenized"), unit.fates(work)
    tokenizer = load_tokenizer(work / "out", fingerprint)
    decides = repr((unit.inspected(work)["key"], fingerprint)).encode() + fates.tobytes()
    key = hashlib.sha256(decides).hexdigest()
    before = read_json(done)
    if before.get("key") == key and before["sizes"] == unit.sizes(work, TOKENIZED):
        return
    done.unlink(missing_ok=True)

    def encode(text: str) -> tuple[Any, Any]:
        if kind == "chat":
            return tokenizer.render(json.loads(text)["messages"])
        return tokenizer.encode_array(text), ()

    dtype, lengths = token_dtype(tokenizer.vocab_size), []
    documents = unit.documents(work, np.flatnonzero(fates == KEPT))
    with (
        open(unit.file(work, "tokens"), "wb") as tokens,
        open(unit.file(work, "mask"), "wb") as masks,
    ):
        for ids, mask in in_threads(encode, documents, threads):
            lengths.append(len(ids))
            tokens.write(np.asarray(ids).astype(dtype).data)
            masks.write(np.array(mask, np.uint8).data)
    np.array(lengths, "<i8").tofile(unit.file(work, "lengths"))
    write_json(done, {"key": key, "sizes": unit.sizes(work, TOKENIZED)})


def in_threads(function: Callable[[str], Any], texts: Iterable[str], threads: int) -> Iterator[Any]:
    """Yield function(text) of every text in their order, at most 2 * threads of them at once."""
    if threads == 1:
        yield from map(function, texts)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future] = deque()
        for text in texts:
            waiting.append(pool.submit(function, text))
            if len(waiting) >= 2 * threads:
                yield waiting.popleft().result()
        yield from (one.result() for one in waiting)
