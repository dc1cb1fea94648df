"""Multiple choice: a model chooses the answer that it finds likeliest.

    evaluate_choices(model, tokenizer, "mmlu", "mmlu_data", shots=5, ...) -> accuracies, and a record of each question

    mmlu cmmlu ceval                a directory of the publishers' CSV files: dev/ has the examples, test/ the questions
                                    (C-Eval: val/, since the answers of its test/ are secret); an answer is a letter
    mmlu_text cmmlu_text ceval_text the same questions without the list of answers; an answer is its text
    hellaswag arc                   .jsonl, .json or .parquet: a file, or a directory with one file that has val
                                    (hellaswag) or test (arc) in its name; examples come from the one with train in it

Prompts, scored tokens and measures are those of lm-eval 0.4 (mmlu, mmlu_continuation, cmmlu, ceval-valid, hellaswag,
arc_easy), with the examples in the order of their file. lm-eval has no cmmlu_text and ceval_text: they follow
mmlu_text. subjects.json holds the prompts, the subjects' names in them, and the publishers' groups of subjects (MMLU
counts anatomy under other, not STEM).
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from groundup.errors import UserError, listed
from groundup.files import readers, records, streams
from groundup.generate.completion import begin_prompt
from groundup.scores.likelihood import score_tokens
from model import Transformer
from tokenizer import Tokenizer

LETTERS = ("A", "B", "C", "D")
QUESTIONS = {"mmlu": "test", "cmmlu": "test", "ceval": "val"}  # directory of the questions
COLUMNS = {  # question, answers, right letter
    "mmlu": ("question", *LETTERS, "answer"),
    "cmmlu": ("Question", *LETTERS, "Answer"),
    "ceval": ("question", *LETTERS, "answer"),
}
FILES = {"hellaswag": "val", "arc": "test"}  # a part of the name of the file with the questions
EXAMPLES = "train"  # of that with the examples
TASKS = (*QUESTIONS, *(f"{task}_text" for task in QUESTIONS), *FILES)
SUBJECTS_FILE = Path(__file__).with_name("subjects.json")


class Question(NamedTuple):
    text: str  # the prompt up to the answer
    answers: tuple[str, ...]  # what may follow it, after a space
    right: int
    where: str  # file:line


class Subject(NamedTuple):
    name: str
    intro: str  # before the examples
    examples: list[Question]
    questions: list[Question]


def evaluate_choices(
    model: Transformer, tokenizer: Tokenizer, task: str, directory: str, shots: int, batch_size: int,
    device: torch.device, dtype: torch.dtype, limit: int = 0, block_size: int = 0,
) -> dict:  # fmt: skip
    """Return {task, shots, overall, groups, subjects, subject_mean, fewer_shots, cut, notes, records}.

    Each score is {n, chance, acc, acc_stderr}: questions, accuracy of guessing, accuracy, and its standard error
    (sample deviation / sqrt n; None for one question). If answers are texts, acc goes by their log-probability,
    acc_norm by that per character, acc_bytes by that per byte of UTF-8. overall and groups average over questions,
    subject_mean over subjects, as CMMLU and C-Eval publish it.

    A prompt that does not fit in block_size (0 = the model's) gets fewer examples (fewer_shots questions); one that
    does not fit without examples loses its beginning (cut questions). limit: first questions of each subject, 0 = all.
    All ranks call this and get the result.
    """
    for key, value in (("shots", shots), ("limit", limit)):
        if value < 0:
            raise UserError(f"choices: {key} must be 0 or more, got {value}")
    size = min(block_size or model.cfg.block_size, model.cfg.block_size)
    subjects, notes = read_task(task, directory, shots)
    records = []
    for subject in subjects:
        questions = subject.questions[: limit or None]
        prompts = [fitted(tokenizer, subject, question, shots, size) for question in questions]
        scored = iter(score_tokens(model, [row for p in prompts for row in p.rows], batch_size, device, dtype))
        for question, prompt in zip(questions, prompts, strict=True):
            logprobs = [-next(scored).nats for _ in prompt.rows]
            if not all(map(math.isfinite, logprobs)):
                raise UserError(f"choices: {question.where}: log-probabilities {logprobs}: the weights are damaged")
            found = record(subject.name, question, logprobs, letters=task in QUESTIONS)
            records.append(found | {"shots": prompt.n_shots, "cut_tokens": prompt.n_cut})
    groups = {} if task in FILES else subjects_file()[task.removesuffix("_text")]["groups"]
    return {"task": task, "shots": shots} | summary(records, groups, shots) | {"notes": notes, "records": records}


def record(subject: str, question: Question, logprobs: list[float], letters: bool) -> dict:
    """Return the log-probability of each answer, the right one, and the chosen one by each measure."""
    lengths = {"acc": [1] * len(logprobs)}
    if not letters:
        lengths["acc_norm"] = [len(answer) for answer in question.answers]
        lengths["acc_bytes"] = [len(answer.encode()) for answer in question.answers]
    chosen = {measure: likeliest(logprobs, units) for measure, units in lengths.items()}
    known = {"subject": subject, "where": question.where, "logprobs": logprobs, "right": question.right}
    return known | {"chosen": chosen}


def likeliest(logprobs: Sequence[float], lengths: Sequence[int]) -> int:
    """Return the index of the highest log-probability per unit of length; an empty answer has length 1."""
    rates = [logprob / max(1, length) for logprob, length in zip(logprobs, lengths, strict=True)]
    return rates.index(max(rates))


def summary(records: Sequence[dict], groups: dict[str, list[str]], shots: int) -> dict:
    """Return scores over all questions, by group and by subject; see evaluate_choices."""
    subjects: dict[str, list[dict]] = {}
    for found in records:
        subjects.setdefault(found["subject"], []).append(found)
    of_group = {name: [r for r in records if r["subject"] in members] for name, members in groups.items()}
    of_subject = {name: scores(found) for name, found in subjects.items()}
    return {
        "overall": scores(records),
        "subject_mean": {m: sum(s[m] for s in of_subject.values()) / len(of_subject) for m in records[0]["chosen"]},
        "groups": {name: scores(found) for name, found in of_group.items() if found},
        "subjects": of_subject,
        "fewer_shots": sum(r["shots"] < shots for r in records),
        "cut": sum(r["cut_tokens"] > 0 for r in records),
    }


def scores(records: Sequence[dict]) -> dict:
    """Return {n, chance, acc, acc_stderr, ...} over some questions."""
    n = len(records)
    found = {"n": n, "chance": sum(1 / len(r["logprobs"]) for r in records) / n}
    for measure in records[0]["chosen"]:
        p = sum(r["chosen"][measure] == r["right"] for r in records) / n
        # the sample variance of n values of 0 and 1 with mean p is p (1 - p) n / (n - 1)
        found |= {measure: p, f"{measure}_stderr": math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else None}
    return found


class Prompt(NamedTuple):
    rows: list[tuple[list[int], int]]  # of each answer: ids, and where in them the answer begins
    n_shots: int
    n_cut: int  # tokens cut from the beginning of the longest row


def fitted(tokenizer: Tokenizer, subject: Subject, question: Question, shots: int, size: int) -> Prompt:
    """Return the rows of a question with as many examples as fit in `size`; the model does not read a row's last id.
    Raise UserError if an answer alone does not fit."""
    for n in range(shots, -1, -1):
        shown = [f"{example.text} {example.answers[example.right]}\n\n" for example in subject.examples[:n]]
        context = subject.intro + "".join(shown) + question.text
        rows = answer_rows(tokenizer, context, question.answers)
        over = max(len(ids) for ids, _ in rows) - (size + 1)
        if over <= 0:
            return Prompt(rows, n, 0)
    longest = max(len(ids) - first for ids, first in rows)
    if longest > size:
        raise UserError(
            f"choices: {question.where}: an answer of {longest} tokens does not fit in block_size={size}; raise it"
        )
    cuts = [max(0, len(ids) - (size + 1)) for ids, _ in rows]
    return Prompt([(ids[cut:], first - cut) for (ids, first), cut in zip(rows, cuts, strict=True)], 0, over)


def answer_rows(tokenizer: Tokenizer, context: str, answers: Sequence[str]) -> list[tuple[list[int], int]]:
    """Return (ids of context and answer, where the answer begins). As in lm-eval the text is tokenized as a whole,
    since an answer's first token depends on what precedes it; white space after the context belongs to the answer."""
    first = len(begin_prompt(tokenizer, context.rstrip()))
    rows = [begin_prompt(tokenizer, f"{context} {answer}") for answer in answers]
    return [(ids, min(first, len(ids) - 1)) for ids in rows]  # a merge over the border may leave the answer no token


def read_task(task: str, path: str, shots: int) -> tuple[list[Subject], list[str]]:
    """Return the subjects of a task with `shots` examples each, and notes on what was unusual."""
    if task not in TASKS:
        raise UserError(f"choices: no task {task!r}; there are {', '.join(TASKS)}")
    if not os.path.exists(path):
        raise UserError(f"choices: {task}: no such file or directory: {path!r}")
    notes = Notes()
    subjects = [read_single(task, Path(path), shots, notes)] if task in FILES else read_exam(task, path, shots, notes)
    return subjects, notes.lines()


class Notes:
    """Notes on the files that were read."""

    def __init__(self) -> None:
        self.other_encoding: list[str] = []
        self.no_group: list[str] = []

    def lines(self) -> list[str]:
        found = []
        if self.other_encoding:
            found.append(f"read as GB18030 (GBK), not UTF-8: {listed(self.other_encoding, 3)}")
        if self.no_group:
            found.append(f"of no group, only in the overall score: {listed(self.no_group, 3)}")
        return found


def read_exam(task: str, path: str, shots: int, notes: Notes) -> list[Subject]:
    """Read the subjects of MMLU, CMMLU or C-Eval, one file each."""
    exam, split = task.removesuffix("_text"), QUESTIONS[task.removesuffix("_text")]
    files = sorted(Path(path, split).glob("*.csv"))
    if not files:
        raise UserError(f"choices: {task}: no {split}/*.csv in {path}; give the directory that holds dev and {split}")
    words = subjects_file()[exam]
    kind = "letters" if task == exam else "texts"
    subjects = []
    for file in files:
        name = file.stem.removesuffix(f"_{split}")
        read = partial(read_questions, task=task, words=words, notes=notes)
        source = Path(path, "dev", file.name.replace(f"_{split}.csv", "_dev.csv"))
        if shots and not source.exists():
            raise UserError(f"choices: {task}: there is no {source} with the examples; add it, or give --shots=0")
        examples = enough(read(source), shots, source) if shots else []
        title = words["names"].get(name, name.replace("_", " "))
        subjects.append(Subject(name, words[f"{kind}_intro"].format(title), examples, read(file)))
        if not any(name in members for members in words["groups"].values()):
            notes.no_group.append(name)
    return subjects


def subjects_file() -> dict[str, dict]:
    """Return {benchmark: its prompts, groups {name: subjects}, names of subjects in prompts}."""
    return json.loads(SUBJECTS_FILE.read_text(encoding="utf-8"))


def read_questions(file: Path, task: str, words: dict, notes: Notes) -> list[Question]:
    exam = task.removesuffix("_text")
    rows = headless_rows(file, COLUMNS[exam]) if exam == "mmlu" else readers.read_records(str(file))
    understand = letter_question if task == exam else text_question
    fields = partial(exam_fields, columns=COLUMNS[exam])
    return checked(file, rows, lambda row: understand(*fields(row), words), notes)


def headless_rows(file: Path, columns: Sequence[str]) -> Iterator[records.Record]:
    """Read a CSV file without a line of column names."""
    with streams.open_stream(str(file)) as stream:
        decoded = partial(records.text_record, encoding=streams.guess_encoding(stream.peek()))
        header = records.Record(",".join(columns), 0, 0)
        lines = map(decoded, records.read_lines(stream))
        yield from records.csv_records(chain([header], lines), ",")


def checked(
    file: Path, rows: Iterable[records.Record], understand: Callable[[Any], tuple], notes: Notes
) -> list[Question]:
    """Return the questions that `understand` makes of rows. A row that cannot be understood is an error, since the
    accuracy over the others would be another benchmark's."""
    questions, encodings = [], set()
    for row in rows:
        where = f"{file}:{row.line}"
        if row.problem:
            raise UserError(f"choices: {where}: {row.problem}: {' '.join(row.detail.split())}")
        try:
            questions.append(Question(*understand(row.value), where))
        except ValueError as error:
            raise UserError(f"choices: {where}: {error}") from None
        encodings.add(row.encoding)
    if not questions:
        raise UserError(f"choices: {file} holds no question")
    notes.other_encoding += [f"{file.parent.name}/{file.name}"] if encodings != {"utf-8"} else []
    return questions


def read_single(task: str, path: Path, shots: int, notes: Notes) -> Subject:
    """Read a benchmark that is one file of rows."""
    file = only_file(path, FILES[task]) if path.is_dir() else path
    source = only_file(file.parent, EXAMPLES) if shots else None
    understand = hellaswag_question if task == "hellaswag" else arc_question
    read = partial(checked, understand=understand, notes=notes)
    examples = enough(read(source, readers.read_records(str(source))), shots, source) if source else []
    return Subject(task, "", examples, read(file, readers.read_records(str(file))))


def only_file(folder: Path, word: str) -> Path:
    found = [file for file in sorted(folder.iterdir()) if word in file.name.lower() and file.is_file()]
    if len(found) != 1:
        what = f"{len(found)} files in {folder} have {word!r} in their name, there must be one"
        raise UserError(f"choices: {what}{', or give --shots=0' if word == EXAMPLES else ''}")
    return found[0]


def enough(examples: list[Question], shots: int, file: Path) -> list[Question]:
    if len(examples) < shots:
        n = len(examples)
        raise UserError(f"choices: {file} holds {n} examples, fewer than shots={shots}; give --shots={n} or less")
    return examples[:shots]


def field(row: Any, name: str, kind: type | tuple[type, ...] = str) -> Any:
    """Return row[name]. Raise ValueError if it is missing or of another type."""
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__} is no row of named fields")
    if name not in row:
        raise ValueError(f"no field {name!r}; there are {', '.join(map(repr, row))}")
    if not isinstance(row[name], kind):
        raise ValueError(f"{name} is {row[name]!r:.60}, a {type(row[name]).__name__}")
    return row[name]


def strings(values: Sequence[Any], name: str) -> tuple[str, ...]:
    if not values or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} is {values!r:.60}, not texts")
    return tuple(values)


def position(value: Any, among: Sequence[Any], name: str) -> int:
    """Return the index of `value`. Raise ValueError if it is not there, as in splits with secret answers."""
    if value not in among:
        raise ValueError(f"{name} is {value!r}, not one of {', '.join(map(str, among))}")
    return among.index(value)


def exam_fields(row: Any, columns: Sequence[str]) -> tuple[str, list[str], int]:
    """Return (question, texts of the answers, index of the right one) of a row of an exam."""
    question, *texts, letter = [field(row, column) for column in columns]
    return question.strip(), texts, position(letter.strip(), LETTERS, columns[-1])


def letter_question(question: str, texts: list[str], right: int, words: dict) -> tuple[str, tuple[str, ...], int]:
    options = [f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=True)]
    return "\n".join([question, *options, words["answer"]]), LETTERS, right


def text_question(question: str, texts: list[str], right: int, words: dict) -> tuple[str, tuple[str, ...], int]:
    return f"{words['texts_question']}{question}\n{words['answer']}", tuple(texts), right


def hellaswag_question(row: Any) -> tuple[str, tuple[str, ...], int]:
    """Read {ctx_a, ctx_b, endings, label} or {ctx, endings, label}, perhaps with activity_label (arXiv:1905.07830)."""
    begun = row.get("ctx_b") if isinstance(row, dict) else None
    context = f"{field(row, 'ctx_a')} {begun.capitalize()}" if isinstance(begun, str) else field(row, "ctx")
    context = without_marks(f"{row['activity_label']}: {context}" if "activity_label" in row else context)
    if not context:
        raise ValueError("the context is empty")
    endings = tuple(without_marks(ending) for ending in strings(field(row, "endings", list), "endings"))
    label = str(field(row, "label", (str, int)))
    return context, endings, position(label, [str(i) for i in range(len(endings))], "label")


def without_marks(text: str) -> str:
    """Remove the marks of WikiHow texts: [title], [step], [substeps]."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def arc_question(row: Any) -> tuple[str, tuple[str, ...], int]:
    """Read {question, choices {text: [...], label: [...]}, answerKey} or, as first published (arXiv:1803.05457),
    {question: {stem, choices: [{text, label}, ...]}, answerKey}. There are three to five answers."""
    question = field(row, "question", (str, dict))
    if isinstance(question, dict):
        answers = field(question, "choices", list)
        texts, labels = ([field(answer, name) for answer in answers] for name in ("text", "label"))
        question = field(question, "stem")
    else:
        texts, labels = (field(field(row, "choices", dict), name, list) for name in ("text", "label"))
    right = position(field(row, "answerKey"), strings(labels, "label"), "answerKey")
    return f"Question: {question}\nAnswer:", strings(texts, "text"), right
