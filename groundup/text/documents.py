"""Read a document, conversation or pair from a row, clean it, and decide by the rules whether to keep it."""

import json
import math
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from groundup.errors import UserError
from groundup.files import readers, row_formats, streams, text_keys, usable
from groundup.files.splits import dialogue_text, first_question
from groundup.files.text_keys import as_score
from groundup.text import cleaning, dedup, quality
from groundup.text.decontaminate import Evals
from groundup.text.recipe import Recipe, Source, outside_range, parse_score
from tokenizer import Tokenizer

PAIR_NUMBERS = ("margin", "difficulty", "score")  # of a pair's row, kept with it
ANSWER_PLACE = "@answers"  # [line, byte] of the line that a pair was made of, in a row of answer_pairs.py


class Item(NamedTuple):
    """The cleaned content of a record of any kind."""

    text: str  # checked by the rules; of a conversation, its questions and answers
    n_read: int  # bytes of it before it was cleaned
    more: str = ""  # a pair: the rejected answer, compared with other rows together with the text
    sides: tuple[str, str] = ("", "")  # of a row: near copies are alike in both
    row: str = ""  # kinds chat and preference: what is written, as JSON
    notes: str = ""  # a pair: its numbers and who made it, as JSON; no part of what is compared
    prompt: str = ""  # a pair: the text before the answers
    question: str = ""  # a conversation or pair: the first
    problem: str = ""  # a conversation or pair: why it cannot be trained on
    trimmed: bool = False  # a conversation: it went on after the last answer
    scores: tuple[float, ...] = ()
    offset: int | None = None  # a pair made of answers: the byte of their line
    unread: tuple[str, ...] = ()  # keys of the row that hold content and are not read

    @property
    def compared(self) -> str:
        return f"{self.text}\n{self.more}" if self.more else self.text

    @property
    def document(self) -> str:
        """Return what is written to the output."""
        return f"{self.row[:-1]}, {self.notes[1:]}" if self.notes else self.row or self.text


class Judge:
    """Reads the documents of a source and decides which pass, each on its own."""

    def __init__(self, source: Source, recipe: Recipe, work: Path) -> None:
        self.recipe, self.source, self.ranges = recipe, source, parse_score(recipe.score)
        steps = cleaning.WEB if source.quality == "web" else cleaning.CURATED
        self.clean = partial(cleaning.clean, steps=replace(steps, punctuation=recipe.punctuation))
        self.rules = quality.Rules(
            source.quality if recipe.kind == "text" else "rows", source.rules_off, source.rules_on, source.min_chars,
            source.max_chars, recipe.keep,
        )  # fmt: skip
        self.evals = Evals.load(work / "evals.npz") if recipe.decontaminate else None
        self.tokenizer = Tokenizer.load(work / "out") if recipe.template else None
        self.questions = self.read_questions() if recipe.prompts_from else None
        columns = text_keys.columns_of(source.text_key) or sorted(row_formats.COLUMNS)
        columns = columns if recipe.kind == "text" else None
        self.columns = columns and columns + [one.key for one in self.ranges]  # to read of parquet files; None = all

    def read_questions(self) -> set[str]:
        """Return the cleaned first questions of the conversations in recipe.prompts_from. Raise UserError."""
        found = set()
        for path in readers.find_files(self.recipe.prompts_from):
            for record in readers.read_records(path):
                messages, problem = row_formats.messages_of(streams.mended(record.value))
                question = self.clean(first_question(messages)).strip()
                if not question:
                    what = f"prompts_from: {path}:{record.line}: {record.problem or problem or 'no question'}"
                    raise UserError(f"prepare: {what}; give conversations, such as a held_out.jsonl")
                found.add(question)
        return found

    def clean_messages(self, messages: list[dict]) -> list[dict]:
        return [message | {"content": self.clean(message["content"])} for message in messages]

    def understand(self, row: object) -> tuple[Item | None, str]:
        """Return (the cleaned item of a row, "") or (None, what is wrong)."""
        kind = self.recipe.kind
        if kind == "text":
            found, problem = row_formats.document_of(row, self.source.text_key)
        else:
            row = text_keys.renamed(row, self.source.text_key)
            found, problem = row_formats.messages_of(row) if kind == "chat" else row_formats.pair_of(row)
        if problem:
            return None, problem
        if kind == "text":
            item = Item(self.clean(found), len(found.encode()))
        else:
            item = self.chat_item(row, found) if kind == "chat" else self.pair_item(row, found)
        unread = () if self.source.text_key and kind == "text" else row_formats.unread_keys(row, kind)
        scores = tuple(as_score(row, one.key) for one in self.ranges)
        return item._replace(scores=scores, unread=tuple(unread)), ""

    def chat_item(self, row: dict, messages: list[dict]) -> Item:
        cleaned = self.clean_messages(messages)
        problem = usable.chat_problem(cleaned, row)
        answered = cleaned if problem else usable.trim_chat(cleaned)
        of_model = [[m for m in answered if (m["role"] == "assistant") is own] for own in (False, True)]
        questions, answers = map(dialogue_text, of_model)
        return Item(
            dialogue_text(answered), len(dialogue_text(messages).encode()), sides=(questions or answers, answers),
            row=json.dumps({"messages": answered}, ensure_ascii=False), question=first_question(answered),
            problem=problem, trimmed=len(answered) < len(cleaned),
        )  # fmt: skip

    def pair_item(self, row: dict, pair: usable.Pair) -> Item:
        prompt = self.clean_messages(pair.prompt)
        cleaned = usable.Pair(prompt, self.clean(pair.chosen), self.clean(pair.rejected))
        before, text = (f"{dialogue_text(one.prompt)}\n{one.chosen}" for one in (pair, cleaned))
        problem = "answer missing" if usable.are_equal(cleaned.chosen, cleaned.rejected) else ""
        place = row.get(ANSWER_PLACE)
        return Item(
            text, len(before.encode()), cleaned.rejected, (text, cleaned.rejected),
            json.dumps(cleaned._asdict(), ensure_ascii=False), pair_notes(row), dialogue_text(prompt),
            first_question(prompt), usable.pair_problem(row, pair) or problem,
            offset=place[1] if isinstance(place, list) else None,
        )  # fmt: skip

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
            if self.tokenizer:
                try:
                    self.tokenizer.render(json.loads(item.row)["messages"])
                except UserError as error:  # such as turns that the checkpoint's chat template does not take
                    return "not_rendered", str(error)
        for text in (item.text, f"{item.prompt}\n{item.more}") if item.more else (item.text,):
            rule, detail = self.rules.check(text)
            if rule:
                return rule, detail
        detail = outside_range(item.scores, self.ranges)
        return ("score", detail) if detail else ("kept", "")

    def contaminated(self, items: list[Item], units: dedup.Units) -> dict[int, str]:
        """Return {index of an item: its text that is also in an evaluation file}."""
        found: dict[int, str] = {}
        if self.evals and items:
            for place, length in zip(*self.evals.find(units), strict=True):
                i = int(np.searchsorted(units.starts, place, "right")) - 1
                found.setdefault(i, items[i].compared[units.begins[place] : units.ends[place + length - 1]])
        return found


load_judge = lru_cache(maxsize=1)(Judge)  # for many units of a source; recipe.aids changes with the files it reads


def pair_notes(row: dict) -> str:
    """Return a pair's PAIR_NUMBERS and the model that made its answers, as JSON; "" if a row has none of them."""
    numbers = ((key, as_score(row, key)) for key in PAIR_NUMBERS)
    notes: dict = {key: value for key, value in numbers if math.isfinite(value)}
    notes |= {"made_by": row["made_by"]} if isinstance(row.get("made_by"), str) else {}
    return json.dumps(notes, ensure_ascii=False) if notes else ""
