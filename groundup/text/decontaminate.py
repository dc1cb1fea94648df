"""Find evaluation questions in training text, to drop the document or cut them out.

A question is found by a run of units (see dedup.py) that both texts have. Read CMMLU, C-Eval and
MMLU in their own CSV files; JSON lines, JSON and parquet with a question, prompt or text; and chats
and pairs, such as those that prepare.py holds out.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from groundup.errors import UserError
from groundup.files import records, row_formats, streams
from groundup.text.clean import clean, code_points
from groundup.text.dedup import SINGLE, SLICE, UNSPACED, Units, unit_codes, units, windows

RUN = 13  # units of question and choices; a fifth of CMMLU's questions alone have fewer
# Chinese characters or kana: two are like a word, and 13 are often a phrase (docs/data.md).
RUN_HAN = 26
RUN_UNSPACED = 65  # characters of Thai, Lao, Burmese, Khmer, whose words have about five
WHOLE = 8  # units; a shorter evaluation item is too common a phrase to look for
CUT_CHARS = 200  # removed on each side of an evaluation question
PROMPTS = ("question", "prompt", "text", "instruction")
CHOICES = ("choices", "options", "a", "b", "c", "d", "e", "input")
MMLU = ("question", "a", "b", "c", "d", "answer")  # its files do not name their columns


class Evals:
    """Evaluation items. A text contains one if it has `run_of` consecutive units of question and
    choices.

    A shorter item is found by all its units; one of fewer than WHOLE is not looked for, only
    counted. A Chinese question shorter than a run is also found without its choices, from RUN units
    on."""

    def __init__(self, n_items: int, n_unprotected: int, hashes: dict[int, np.ndarray]) -> None:
        """hashes: by length in units, sorted uint64."""
        self.n_items, self.n_unprotected = n_items, n_unprotected
        self.tables = {length: Table(known) for length, known in hashes.items()}

    @classmethod
    def from_files(cls, paths: list[str]) -> "Evals":
        """Read CSV with the columns question, A, B, C, D (CMMLU, C-Eval) or six unnamed columns
        (MMLU); JSON or parquet with question and choices, with prompt, text or instruction, or with
        a conversation or pair. Raise UserError for anything else."""
        found: dict[int, list[np.ndarray]] = {}
        n_items, n_unprotected = 0, 0
        for path in paths:
            items = list(read_items(path))
            if not items:
                raise UserError(f"decontaminate: {path}: no items; not an evaluation file?")
            n_items += len(items)
            # all items of a file at once: numpy is slow on few characters
            these = units([text for _, text in items])
            for (question, text), (begin, end) in zip(items, pairwise(these.starts), strict=True):
                hashes = these.hashes[begin:end]
                length = min(run_of(text, len(hashes)), len(hashes))
                # "What is this?" is an item of some exams and a sentence of many texts
                if length < WHOLE:
                    n_unprotected += 1
                    continue
                n_question = int((these.ends[begin:end] <= len(question)).sum())
                *_, runs = windows(hashes, length)
                found.setdefault(length, []).append(runs)
                # a long Chinese item: its question alone is telling, its choices may be missing
                if RUN <= n_question < length:
                    *_, runs = windows(hashes[:n_question], n_question)
                    found.setdefault(n_question, []).append(runs)
        hashes = {length: np.unique(np.concatenate(runs)) for length, runs in found.items()}
        # sorted and without repeats, as `Table` needs them
        return cls(n_items, n_unprotected, hashes)

    def save(self, path: str) -> None:
        """Write an .npz for the other processes."""
        arrays = {str(length): table.known for length, table in self.tables.items()}
        np.savez(path, n_items=self.n_items, n_unprotected=self.n_unprotected, **arrays)

    @classmethod
    def load(cls, path: str) -> "Evals":
        with np.load(path) as file:
            hashes = {int(name): file[name] for name in file.files if name.isdecimal()}
            return cls(int(file["n_items"]), int(file["n_unprotected"]), hashes)

    def find(self, units: Units) -> tuple[np.ndarray, np.ndarray]:
        """Return all runs of evaluation items in some texts: indices of their first units,
        ascending, and lengths in units."""
        places, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        longest = max(self.tables, default=1)
        for begin in range(0, len(units.hashes), SLICE):
            # A run that begins in this slice may end in the next.
            part = units.hashes[begin : begin + SLICE + longest - 1]
            # runs grow unit by unit; those of a length that some item has are looked up
            for length, runs in enumerate(windows(part, min(longest, len(part))), 1):
                if length in self.tables:
                    at = begin + self.tables[length].find(runs[:SLICE])
                    # A run over the end of a text is none.
                    text_end = units.starts[np.searchsorted(units.starts, at, "right")]
                    places.append(at[at + length <= text_end])
                    lengths.append(np.full(len(places[-1]), length))
        order = np.argsort(np.concatenate(places), kind="stable")
        return np.concatenate(places)[order], np.concatenate(lengths)[order]

    def found_in(self, texts: list[str], units: Units) -> dict[int, str]:
        """Return {index of a text: its part that is in an evaluation file}. units: of texts."""
        found: dict[int, str] = {}
        for place, length in zip(*self.find(units), strict=True):
            i = int(np.searchsorted(units.starts, place, "right")) - 1
            found.setdefault(i, texts[i][units.begins[place] : units.ends[place + length - 1]])
        return found

    def cut(self, text: str) -> str:
        """Return the text without any run of an evaluation item, and without CUT_CHARS characters
        on each side of one."""
        found = units([text])
        # the answer, or an explanation, may stand beside the question
        places, lengths = self.find(found)
        begins = found.begins[places] - CUT_CHARS
        ends = found.ends[places + lengths - 1] + CUT_CHARS
        # The parts between what is removed; `end` is where the last removed part ends.
        kept, end = [], 0
        for first, last in zip(begins.tolist(), ends.tolist(), strict=True):
            kept.append(text[end : max(end, first)])
            end = max(end, last)
        if not end:
            return text
        rest = "\n".join(part.strip() for part in [*kept, text[end:]] if part.strip())
        return self.cut(rest)  # parts that are adjacent now may form an item again


def run_of(text: str, n_units: int) -> int:
    """Return how many units in a row are a match: more if most units are single characters."""
    codes = unit_codes()[code_points(text)]
    codes = codes[codes >= SINGLE] - SINGLE
    n_unspaced = sum(np.count_nonzero((codes >= begin) & (codes < end)) for begin, end in UNSPACED)
    # most units decide: a Chinese question may have English terms in it
    if 2 * n_unspaced > n_units:
        return RUN_UNSPACED
    return RUN_HAN if 2 * len(codes) > n_units else RUN


class Table:
    """Finds known hashes among many: first by flags for their leading bits, then by binary
    search."""

    def __init__(self, known: np.ndarray) -> None:
        bits = max(10, len(known).bit_length() + 4)
        self.known, self.shift = known, np.uint64(64 - bits)
        self.flags = np.zeros(2**bits, bool)
        self.flags[known >> self.shift] = True

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """Return the indices of the known ones, ascending."""
        # nearly all hashes end here, after one lookup
        places = np.flatnonzero(self.flags[hashes >> self.shift])
        nearest = np.minimum(np.searchsorted(self.known, hashes[places]), len(self.known) - 1)
        return places[self.known[nearest] == hashes[places]]


# ---- evaluation files ----------------------------------------------------------------------------


def read_items(path: str) -> Iterator[tuple[str, str]]:
    """Yield (question, question and choices) of each item of a file. Raise UserError."""
    with streams.open_stream(path) as stream:
        kind = records.container(path, stream.peek(), "file")
    if kind == "file":
        hint = "evaluation files are .csv, .tsv, .json, .jsonl or .parquet"
        raise UserError(f"decontaminate: {path}: {hint}")
    # MMLU's files begin with a question; taken as a head it would be lost
    names = MMLU if kind in ("csv", "tsv") and has_no_head(path) else ()
    for record in records.read_records(path, names=names):
        place = f"{path}:{record.line}"
        # a lost question would let its text into training, so nothing is passed over
        if record.problem:
            detail = " ".join(record.detail.split())
            raise UserError(f"decontaminate: {place}: {record.problem}: {detail}; mend the file")
        yield item_text(record.value, place)


def has_no_head(path: str) -> bool:
    """Return whether the first row of a CSV file is a question of MMLU, not names of columns."""
    first = next(records.read_records(path, names=MMLU), None)
    if first is None or first.problem or first.value["answer"] not in tuple("ABCD"):
        return False
    return first.value["question"].strip().lower() not in PROMPTS


def item_text(value: object, place: str) -> tuple[str, str]:
    """Return (question, question and choices, one per line), cleaned as documents are: an accent
    may be a character of its own. Answers are left out: many items have the same. Of a conversation
    or pair it is the user's longest turn."""
    named = value if isinstance(value, dict) else {"text": value}
    row = {str(key).strip().lower(): found for key, found in named.items()}
    question = next((row[name] for name in PROMPTS if isinstance(row.get(name), str)), None)
    if question is None:
        question = longest_turn(value)
    if question is None:
        what = f"no question, prompt, text, instruction or user turn in {', '.join(row)[:200]}"
        raise UserError(f"decontaminate: {place}: {what}; not an evaluation file?")
    choices = [text for name in CHOICES for text in strings(row.get(name))]
    question, *choices = [clean(text, white_space=False) for text in (question, *choices)]
    return question, "\n".join([question, *choices])


def longest_turn(row: object) -> str | None:
    """Return the user's longest turn in a conversation or pair, None if there is none."""
    messages, problem = row_formats.messages_of(row)
    pair = row_formats.pair_of(row)[0] if problem else None
    messages = pair.prompt if pair else messages
    turns = [turn["content"] for turn in messages if turn["role"] == "user"]
    return max(turns, key=len, default=None)


def strings(value: object) -> list[str]:
    """Return all texts in a JSON value: choices are a list, {"A": ..} or {"text": [..],
    "label": [..]}."""
    if isinstance(value, dict):
        value = value.get("text", list(value.values()))
    if isinstance(value, list | tuple):
        return [text for part in value for text in strings(part)]
    return [value] if isinstance(value, str) else []
