"""Read a document, conversation or pair from a row, clean it, and decide by the rules whether to keep it."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from groundup.errors import UserError
from groundup.files import readers, row_formats, streams, text_keys
from groundup.files.splits import dialogue_text, first_question
from groundup.files.text_keys import as_score
from groundup.text import cleaning, dedup, quality
from groundup.text.decontaminate import Evals
from groundup.text.recipe import Recipe, Source, outside_range, parse_score

PAIR_NUMBERS = ("margin", "difficulty", "score")  # of a pair's row, kept with it
ANSWER_PLACE = "@answers"  # [line, byte] of the line that a pair was made of, in a row of answer_pairs.py


class Item(NamedTuple):
    """The cleaned content of a record of any kind."""

    text: str  # checked by the rules; of a conversation, its questions and answers
    n_read: int  # bytes of it before it was cleaned
    more: str = ""  # a pair: the rejected answer, compared with other rows together with the text
    row: str = ""  # kinds chat and preference: what is written, as JSON
    notes: str = ""  # a pair: its numbers and who made it, as JSON; no part of what is compared
    prompt: str = ""  # a pair: the text before the answers
    question: str = ""  # a conversation or pair: the first
    problem: str = ""  # a conversation or pair: why it cannot be trained on
    trimmed: bool = False  # a conversation: it went on after the last answer
    scores: tuple[float, ...] = ()
    place: tuple[int, int] | None = None  # a pair made of answers: their line and byte

    @property
    def compared(self) -> str:
        return f"{self.text}\n{self.more}" if self.more else self.text

    @property
    def document(self) -> str:
        """Return what is written to the output."""
        return f"{self.row[:-1]}, {self.notes[1:]}" if self.notes else self.row or self.text


Clean = Callable[[str], str]


def understand(
    row: object, kind: str, text_key: str, score_keys: tuple[str, ...], clean: Clean
) -> tuple[Item | None, str]:
    """Return (the cleaned item of a row, "") or (None, what is wrong)."""
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
        dialogue_text(answered), len(dialogue_text(messages).encode()), row=row, question=first_question(answered),
        problem=problem, trimmed=len(answered) < len(cleaned), scores=scores,
    )  # fmt: skip


def pair_item(row: dict, pair: row_formats.Pair, scores: tuple[float, ...], clean: Clean) -> Item:
    prompt = [message | {"content": clean(message["content"])} for message in pair.prompt]
    cleaned = row_formats.Pair(prompt, clean(pair.chosen), clean(pair.rejected))
    before, text = (f"{dialogue_text(one.prompt)}\n{one.chosen}" for one in (pair, cleaned))
    answered = bool(cleaned.chosen.strip() and cleaned.rejected.strip()) and cleaned.chosen != cleaned.rejected
    problem = "" if answered else "answer missing"
    place = row.get(ANSWER_PLACE)
    return Item(
        text, len(before.encode()), cleaned.rejected, json.dumps(cleaned._asdict(), ensure_ascii=False),
        pair_notes(row), dialogue_text(prompt), first_question(prompt),
        "unfinished answer" if row_formats.is_unfinished(row, pair) else problem, scores=scores,
        place=tuple(place) if isinstance(place, list) else None,
    )  # fmt: skip


def pair_notes(row: dict) -> str:
    """Return a pair's PAIR_NUMBERS and the model that made its answers, as JSON; "" if a row has none of them."""
    numbers = ((key, as_score(row, key)) for key in PAIR_NUMBERS)
    notes: dict = {key: value for key, value in numbers if math.isfinite(value)}
    notes |= {"made_by": row["made_by"]} if isinstance(row.get("made_by"), str) else {}
    return json.dumps(notes, ensure_ascii=False) if notes else ""


@lru_cache(maxsize=8)
def load_rules(source: Source, keep: str, aids: str) -> quality.Rules:
    """Return the rules of a source, from the cache if `aids` (sha256 of the files that settings name) is the same."""
    return quality.Rules(
        source.quality, off=source.rules_off, on=source.rules_on, min_chars=source.min_chars,
        max_chars=source.max_chars, keep=keep,
    )  # fmt: skip


@lru_cache(maxsize=1)
def evals_of(path: Path, aids: str) -> Evals:
    """Return the evaluation text saved in a file. aids: as for load_rules."""
    return Evals.load(path)


@lru_cache(maxsize=8)
def questions_in(files: str, aids: str, steps: cleaning.Cleaning) -> frozenset[str]:
    """Return the cleaned first questions of the conversations in files. aids: as for load_rules. Raise UserError if a
    row is not a conversation with a question."""
    found = set()
    for path in readers.find_files(files):
        for record in readers.read_records(path):
            messages, problem = row_formats.messages_of(streams.mended(record.value))
            question = cleaning.clean(first_question(messages), steps).strip()
            if not question:
                what = f"prompts_from: {path}:{record.line}: {record.problem or problem or 'no question'}"
                raise UserError(f"prepare: {what}; give conversations, such as a held_out.jsonl")
            found.add(question)
    return frozenset(found)


class Judge:
    """Decides which documents of a source pass, each on its own, before they are compared with each other."""

    def __init__(self, source: Source, recipe: Recipe, work: Path) -> None:
        self.recipe, self.source = recipe, source
        steps = cleaning.WEB if source.quality == "web" else cleaning.CURATED
        self.cleaning = replace(steps, punctuation=recipe.punctuation)
        self.rules = load_rules(source, recipe.keep, recipe.aids)
        self.ranges = parse_score(recipe.score)
        self.evals = evals_of(work / "evals.npz", recipe.aids) if recipe.decontaminate else None
        listed = recipe.prompts_from
        self.questions = questions_in(listed, recipe.aids, self.cleaning) if listed else None

    def understand(self, row: object) -> tuple[Item | None, str]:
        keys = tuple(key for key, _, _ in self.ranges)
        return understand(row, self.recipe.kind, self.source.text_key, keys, self.clean)

    def columns(self) -> list[str] | None:
        """Return the columns to read of a parquet file, None for all."""
        columns = text_keys.columns_of(self.source.text_key) if self.recipe.kind == "text" else None
        return columns and columns + [key for key, _, _ in self.ranges]

    def clean(self, text: str) -> str:
        return cleaning.clean(text, self.cleaning)

    def judge(self, item: Item) -> tuple[str, str]:
        """Return (reason, detail) of the first rule that a cleaned item breaks, ("kept", "") if none."""
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
        """Return {index of an item: its text that is also in an evaluation file}."""
        if self.evals is None or not items:
            return {}
        found: dict[int, str] = {}
        for place, length in zip(*self.evals.find(units), strict=True):
            i = int(np.searchsorted(units.starts, place, "right")) - 1
            found.setdefault(i, items[i].compared[units.begins[place] : units.ends[place + length - 1]])
        return found
