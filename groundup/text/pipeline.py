"""Prepare one unit of work, in any process: first its documents and, after all were compared, their tokens.

`inspect_unit` reads, cleans and filters the documents of a unit; `tokenize_unit` encodes those that are kept. Each
writes, last, a file with a hash of everything that decides its result, so a run that continues another skips finished
units. recipe.py lists the files of a unit.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from functools import lru_cache
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from struct import unpack
from typing import Any, TextIO

import numpy as np
from tqdm import tqdm

from groundup.errors import UserError
from groundup.files import readers
from groundup.files.disk import lock_directory
from groundup.files.records import PIECE_CHARS, piece_end
from groundup.files.splits import is_held_out, split_position
from groundup.text import dedup
from groundup.text.documents import Item, load_judge
from groundup.text.recipe import KEPT, REASONS, ROW, SHOWN, Counts, Input, Part, Recipe, Unit, read_json
from groundup.tokens.token_writer import write_json
from tokenizer import Tokenizer

UNIT_BYTES = 2**26  # a large file is cut into units of this size
GROUP_BYTES = 2**22  # small files share a unit up to this size, so that 100,000 files are not 100,000 tasks
BATCH_CHARS = 2**19  # of text that is compared and hashed at once: numpy is slow on few numbers
HUGE_CHARS = PIECE_CHARS  # a longer document is cut into several, at paragraphs if it has any
TURN_MARK = "<|im_start|>"
PAIR_FACTOR = np.uint32(0x9E3779B1)  # 2**32 over the golden ratio, an odd number: Knuth's multiplicative hashing


def plan_units(inputs: list[Input], recipe: Recipe) -> list[Unit]:
    """Return the units in the order of the output: each part of a large file is one, small files share one."""
    units: list[Unit] = []
    room = -1
    for file in inputs:
        if file.problem:
            continue
        source = recipe.sources[file.source]
        cuts = readers.work_units(file.path, source.txt_split, UNIT_BYTES, source.encoding)
        for begin, end in cuts:
            size = file.size // len(cuts)
            if size > room or units[-1].source != file.source:
                units.append(Unit(len(units), file.source, []))
                room = GROUP_BYTES
            units[-1].parts.append(Part(file.path, file.name, begin, end, size, f"{file.size} {file.stamp}"))
            room -= size
    return units


class Problems(readers.Report):
    """Writes every problem to a file as it comes."""

    def __init__(self, name: str, file: TextIO, strict: bool) -> None:
        super().__init__(strict)
        self.name, self.file = name, file
        self.shown: list[str] = []  # the first of them, each detail once
        self.details: set[str] = set()

    def add(self, path: str, line: int, offset: int, reason: str, detail: str) -> None:
        detail = " ".join(detail.split())  # one line without tabs
        what = f"{self.name}:{line}: {reason}: {detail}"
        if self.strict:
            raise UserError(f"prepare: {what}; mend it, or leave such records out with strict=False")
        self.problems[reason] += 1
        self.file.write(f"{self.name}\t{line}\t{offset}\t{reason}\t{detail}\n")
        if len(self.shown) < SHOWN and f"{reason}: {detail}" not in self.details:
            self.shown.append(what)
            self.details.add(f"{reason}: {detail}")


def pieces_of(text: str) -> list[str]:
    """Return the text in pieces of at most HUGE_CHARS, cut after a blank line if possible, else
    after a line."""
    ends = [0]
    while len(text) - ends[-1] > HUGE_CHARS:
        ends.append(piece_end(text, ends[-1], HUGE_CHARS))
    return [text[begin:end] for begin, end in zip(ends, [*ends[1:], len(text)], strict=True)]


def signatures_of(items: list[Item], units: dedup.Units, n_perm: int) -> np.ndarray:
    """Return MinHash signatures (n, n_perm) uint32 of items. units: of the items' compared texts.

    The similarity of two conversations is the product of that of their questions and that of their answers; of two
    pairs, of that of the prompts with the chosen answers and that of the rejected answers. So different answers to one
    long prompt, or questions on one long text, are not copies. A row with a side too short for a shingle of words is
    similar to no other: many questions have the answer "no"."""
    if not any(item.row for item in items):
        return dedup.signatures(units, n_perm)
    sides = [dedup.units([item.sides[k] for item in items]) for k in (0, 1)]
    first, second = (dedup.signatures(side, n_perm) for side in sides)
    empty = np.minimum(*(np.diff(side.starts) for side in sides))[:, None] < dedup.SHINGLE
    return np.where(empty, dedup.NO_UNITS, first * PAIR_FACTOR ^ second)  # equal where both are


class Inspector:
    """Writes the files of one unit, batch by batch."""

    def __init__(self, unit: Unit, recipe: Recipe, work: Path) -> None:
        self.unit, self.recipe = unit, recipe
        self.judge = load_judge(recipe.sources[unit.source], recipe, work)
        self.counts = Counts()
        name = recipe.sources[unit.source].name
        self.source_name = f"{name}: " if name else ""
        self.samples: dict[str, list[tuple]] = {}  # by reason: position, row, where, detail, excerpt; see `write`
        self.n_rows, self.n_bytes = 0, 0
        self.batch: list[tuple[Item, int, int]] = []  # items with their part of the unit and the offset of their record
        self.room = BATCH_CHARS
        self.rows, self.docs, self.sigs = (open(unit.file(work, what), "wb") for what in ("rows", "docs", "sigs"))
        self.problems = open(unit.file(work, "problems"), "w", encoding="utf-8")

    def close(self) -> None:
        for file in (self.rows, self.docs, self.sigs, self.problems):
            file.close()

    def read(self, number: int, limit: int | None) -> None:
        """Add the cleaned documents of a part to the batch, and count what could not be read. limit: of documents."""
        part, counts, source = self.unit.parts[number], self.counts, self.judge.source
        problems, passed = Problems(part.name, self.problems, self.recipe.strict), 0
        place = source.txt_split, part.begin, part.end
        rows = readers.read_rows(part.path, self.judge.understand, *place, problems, self.judge.columns,
                                 source.encoding)  # fmt: skip
        for row in islice(rows, limit):
            item = row.value
            counts.records += row.piece == 0
            counts.mended["split_huge"] += row.piece > 0
            offset = row.offset if item.offset is None else item.offset
            n_left = 0 if item.text.isspace() else len(item.text.encode())
            counts.bytes_read += item.n_read
            counts.bytes_cleaned += item.n_read - n_left
            if not n_left:
                counts.unusable["empty"] += 1
                self.problems.write(f"{part.name}\t\t{offset}\tempty\tno text, or none after cleaning\n")
                continue
            counts.mended["unanswered_turns_cut"] += item.trimmed
            counts.marked += TURN_MARK in item.text
            counts.unread.update(f"{self.source_name}{key}" for key in item.unread)
            pieces = pieces_of(item.text) if self.recipe.kind == "text" else [item.text]
            counts.mended["split_huge"] += len(pieces) - 1
            passed += len(pieces)
            for piece in pieces:
                self.batch.append((item._replace(text=piece), number, offset))
                self.room -= len(piece)
                if self.room <= 0:
                    self.flush()
        counts.records += problems.problems.total()
        for reason, n in problems.problems.items():
            (counts.unusable if reason == "bad_field" else counts.lost)[reason] += n
        counts.mended += problems.mended  # + leaves out counts of 0
        counts.shown = (counts.shown + problems.shown)[:SHOWN]
        counts.passed[part.name] += passed
        counts.bad += {part.name: problems.problems.total()}  # which leaves out 0, too
        counts.input_bytes += problems.n_bytes
        counts.lost_bytes += {part.name: problems.lost_bytes}

    def flush(self) -> None:
        """Judge and write the documents of the batch."""
        batch, self.batch, self.room = self.batch, [], BATCH_CHARS
        items = [item for item, _, _ in batch]
        verdicts = [self.judge.judge(item) for item in items]
        passed = [i for i, (reason, _) in enumerate(verdicts) if reason == "kept"]
        if self.judge.tokenizer:
            for i in passed:
                left_out = self.judge.tokenizer.left_out(json.loads(items[i].row)["messages"])
                for what, n in left_out.items():
                    self.counts.mended[f"left out by the chat template: {what}"] += n
        units = dedup.units([items[i].compared for i in passed])
        found = self.judge.contaminated([items[i] for i in passed], units)
        keys = [dedup.exact_key(item.row or item.text) for item in items]
        if found:
            for k, text in found.items():
                self.cut_or_drop(passed[k], text, items, verdicts)
            passed = [i for i in passed if verdicts[i][0] == "kept"]
            units = dedup.units([items[i].compared for i in passed])
        if self.recipe.near:
            n_perm = self.recipe.near_bands * self.recipe.near_rows
            signatures = signatures_of([items[i] for i in passed], units, n_perm)
            self.sigs.write(np.ascontiguousarray(signatures, "<u4").data)
        rows = [self.write(items[i], *batch[i][1:], keys[i], *verdicts[i]) for i in range(len(items))]
        self.rows.write(np.array(rows, ROW).data)

    def cut_or_drop(self, i: int, text: str, items: list[Item], verdicts: list[tuple[str, str]]) -> None:
        """Drop a document, or cut the evaluation text out of it if the rest passes the rules."""
        if self.recipe.decontaminate_action == "cut" and self.recipe.kind == "text":
            item = items[i]._replace(text=self.judge.evals.cut(items[i].text))
            if self.judge.judge(item)[0] == "kept" and item.text.strip():
                self.counts.bytes_cut += len(items[i].text.encode()) - len(item.text.encode())
                self.counts.mended["contamination_cut"] += 1
                items[i] = item
                return
        verdicts[i] = "contaminated", repr(text)

    def write(self, item: Item, part: int, offset: int, key: bytes, reason: str, detail: str) -> tuple:
        """Write the document if it passed, else keep a sample; return its ROW."""
        raw, begin, kept, kind = item.text.encode(), self.n_bytes, b"", self.recipe.kind
        position = split_position(item.prompt.encode() if kind == "preference" else raw)
        if reason == "kept":
            kept = item.document.encode()
            self.docs.write(kept)
            self.n_bytes += len(kept)
        else:
            held = self.samples.setdefault(reason, [])
            where = f"{self.unit.parts[part].name} at byte {offset}"
            held.append((position, self.n_rows, where, detail, item.text[:300]))
            if len(held) >= 4 * SHOWN:
                self.samples[reason] = sorted(held)[:SHOWN]
        self.n_rows += 1
        score = item.scores[0] if item.scores else float("nan")
        halves, held_out = unpack("<QQ", key), kind == "chat" and is_held_out(item.question, self.recipe.hold_out)
        return halves, position, begin, len(kept), len(raw), part, offset, score, REASONS.index(reason), held_out


def inspect_unit(unit: Unit, recipe: Recipe, version: int, work: Path, limit: int | None = None) -> Counts:
    """Read, clean and filter the documents of a unit, write its files (see recipe.py), and return the counts. If an
    earlier run finished the unit, only read its counts. limit: documents to read of each part, None = all."""
    done, key = unit.file(work, "json"), unit.key(recipe, version)
    before = read_json(done)
    if before.get("key") == key:
        return Counts(**{name: Counter(n) if isinstance(n, dict) else n for name, n in before["counts"].items()})
    done.unlink(missing_ok=True)  # it says that the files are complete, and they are about to be replaced
    with closing(Inspector(unit, recipe, work)) as inspector:
        for number in range(len(unit.parts)):
            inspector.read(number, limit)
        inspector.flush()
    samples = {reason: sorted(held)[:SHOWN] for reason, held in sorted(inspector.samples.items())}
    write_json(done, {"key": key, "counts": vars(inspector.counts), "samples": samples})
    return inspector.counts


load_tokenizer = lru_cache(maxsize=1)(lambda directory, fingerprint: Tokenizer.load(directory))


def tokenize_unit(
    unit: Unit, dtype: str, fingerprint: str, work: Path, chat: bool = False, threads: int = 1
) -> None:  # fmt: skip
    """Write the ids of the documents of a unit that work/fates.npy keeps, unless an earlier run finished the unit.
    threads: that encode documents, where there are fewer units than processes; the tokenizer lets go of Python's
    lock."""
    done, fates = unit.file(work, "tokenized"), unit.fates(work)
    tokenizer = load_tokenizer(work / "out", fingerprint)
    inspected = read_json(unit.file(work, "json"))["key"]
    key = hashlib.sha256(repr((inspected, fingerprint, dtype)).encode() + fates.tobytes()).hexdigest()
    if read_json(done).get("key") == key:
        return
    done.unlink(missing_ok=True)
    lengths = []

    def encode(text: str) -> tuple[Any, Any]:
        return tokenizer.render(json.loads(text)["messages"]) if chat else (tokenizer.encode_array(text), ())

    with open(unit.file(work, "tokens"), "wb") as tokens, open(unit.file(work, "mask"), "wb") as masks:
        for ids, mask in in_threads(encode, unit.documents(work, fates == KEPT), threads):
            lengths.append(len(ids))
            tokens.write(np.asarray(ids).astype(dtype).data)
            masks.write(np.array(mask, np.uint8).data)
    np.array(lengths, "<i8").tofile(unit.file(work, "lengths"))
    write_json(done, {"key": key})


def in_threads(function: Callable[[str], Any], texts: Iterable[str], threads: int) -> Iterator[Any]:
    """Yield function(text) of every text in their order, working at no more than twice `threads` of them at once."""
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


# ---- in several processes; none outlives its parent -------------------------------------------


class WorkerLost(UserError):
    """A worker was killed, for example because memory ran out; finished units are kept."""


def run(function: Callable[[Unit], Any], units: list[Unit], workers: int, what: str, work: Path) -> list[Any]:
    """Return function(unit) of every unit. Raise what a worker raised, WorkerLost if one was killed."""
    results, sizes = [None] * len(units), [sum(part.size for part in unit.parts) for unit in units]
    workers = min(workers, len(units))
    done = in_processes(function, units, workers, work) if workers > 1 else enumerate(map(function, units))
    with tqdm(total=sum(sizes), unit="B", unit_scale=True, desc=what, disable=None) as progress:
        for number, result in done:
            results[number] = result
            progress.update(sizes[number])
    return results


def in_processes(
    function: Callable[[Unit], Any], units: list[Unit], workers: int, work: Path
) -> Iterator[tuple[int, Any]]:
    """Yield (number, result) of every unit, as it is done. function: picklable."""
    spawn = multiprocessing.get_context("spawn")
    watched, lifeline = spawn.Pipe(duplex=False)
    # On an error, too, the lifeline is closed first: the workers end, and the executor does not wait for their units.
    with ProcessPoolExecutor(workers, spawn, start_worker, (watched, work)) as executor, lifeline:
        tasks = {executor.submit(function, unit): number for number, unit in enumerate(units)}
        try:
            yield from ((tasks[task], task.result()) for task in as_completed(tasks))
        except BrokenProcessPool:
            hint = "run again, with fewer workers if memory was short; what is done is not done again"
            raise WorkerLost(f"prepare: a worker process was killed; {hint}") from None


def start_worker(watched: Connection, work: Path) -> None:
    """Make this process end when the parent closes its end of the pipe or ends itself, also by kill -9. The lock tells
    the next run that this process may still write; it is held until the process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends its workers
    lock_directory(work / "units", shared=True, wait=True)
    if watched.poll():  # the parent has ended before the lock was taken
        os._exit(1)
    threading.Thread(target=end_with, args=(watched,), daemon=True).start()


def end_with(watched: Connection) -> None:
    try:
        watched.recv()
    except EOFError:
        os._exit(1)


def wait_for_workers(work: Path) -> None:
    """Return when the workers of a killed run, which may still write into its units, have ended."""
    os.close(lock_directory(work / "units", wait=True))
