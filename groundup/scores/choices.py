"""Multiple choice: a model chooses the answer that it finds likeliest.

    evaluate_choices(model, tokenizer, "mmlu", "mmlu_data", shots=5, ...)
        -> accuracies, and a record of each question

    mmlu cmmlu ceval
        A directory of the publishers' CSV files: dev/ has the examples, test/ the questions
        (C-Eval: val/, since the answers of its test/ are secret). An answer is a letter.
    mmlu_text cmmlu_text ceval_text
        The same questions without the list of answers. An answer is its text.

Prompts, scored tokens and measures are those of lm-eval 0.4 (mmlu, mmlu_continuation, cmmlu,
ceval-valid), with the examples in the order of their file. lm-eval has no cmmlu_text and
ceval_text: they follow mmlu_text. subjects.json holds the prompts, the subjects' names in them,
and the publishers' groups of subjects (MMLU counts anatomy under other, not STEM).
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from groundup.errors import UserError, listed
from groundup.files.records import read_records
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
TASKS = (*QUESTIONS, *(f"{task}_text" for task in QUESTIONS))
SUBJECTS_FILE = Path(__file__).with_name("subjects.json")


class Question(NamedTuple):
    text: str  # the prompt from the question up to the answer
    answers: tuple[str, ...]  # what may follow it, after a space
    right: int
    where: str  # file:line


class Subject(NamedTuple):
    name: str
    intro: str  # before the examples
    examples: list[Question]
    questions: list[Question]


def evaluate_choices(
    model: Transformer,
    tokenizer: Tokenizer,
    task: str,
    directory: str,
    shots: int,
    batch_size: int,
    dtype: torch.dtype,
    limit: int = 0,
    block_size: int = 0,
) -> dict:
    """Return {task, shots, overall, groups, subjects, subject_mean, fewer_shots, cut, notes,
    records}. All ranks call this and get the result. limit: first questions of each subject, 0 =
    all.

    Each score is {n, chance, acc, acc_stderr}, with acc_norm and acc_bytes if answers are texts.
    A prompt that does not fit in block_size (0 = the model's) gets fewer examples (fewer_shots
    questions), and without examples loses its beginning (cut questions)."""
    size = min(block_size or model.cfg.block_size, model.cfg.block_size)
    subjects, notes = read_task(task, directory, shots)
    records = []
    for subject in subjects:
        questions = subject.questions[: limit or None]
        prompts = [fitted(tokenizer, subject, question, shots, size) for question in questions]
        # All answers of a subject at once, so that rows of similar length share a batch
        of_subject = [row for rows, *_ in prompts for row in rows]
        scored = iter(score_tokens(model, of_subject, batch_size, dtype))
        for question, (rows, n_shots, n_cut) in zip(questions, prompts, strict=True):
            logprobs = [-next(scored).nats for _ in rows]
            digest = hashlib.sha256(question.text.encode()).hexdigest()[:16]
            found = {"subject": subject.name, "where": question.where, "question": digest}
            found["logprobs"] = logprobs
            found |= {"right": question.right, "chosen": chosen_answers(question, logprobs, task)}
            records.append(found | {"shots": n_shots, "cut_tokens": n_cut})
    return results_of(records, task, shots) | {"notes": notes, "records": records}


def results_of(records: Sequence[dict], task: str, shots: int) -> dict:
    """Return what evaluate_choices does of some of its records, without these and the notes."""
    groups = subjects_file()[task.removesuffix("_text")]["groups"]
    return {"task": task, "shots": shots} | summary(records, groups, shots)


def chosen_answers(question: Question, logprobs: list[float], task: str) -> dict[str, int]:
    """Return {measure: index of the answer that it chooses}. logprobs: of the answers."""
    if not all(map(math.isfinite, logprobs)):
        what = f"log-probabilities {logprobs}: the weights are damaged"
        raise UserError(f"choices: {question.where}: {what}")
    # Letters are alike in length. A longer text is less likely as a whole, so texts are also
    # compared per character (lm-eval's acc_norm) and per byte of UTF-8.
    lengths = {"acc": [1] * len(logprobs)}
    if task not in QUESTIONS:
        lengths["acc_norm"] = [len(answer) for answer in question.answers]
        lengths["acc_bytes"] = [len(answer.encode()) for answer in question.answers]
    return {measure: likeliest(logprobs, units) for measure, units in lengths.items()}


def likeliest(logprobs: Sequence[float], lengths: Sequence[int]) -> int:
    """Return the index of the highest log-probability per unit of length; an empty answer has
    length 1."""
    rates = [logprob / max(1, length) for logprob, length in zip(logprobs, lengths, strict=True)]
    return rates.index(max(rates))


def summary(records: Sequence[dict], groups: dict[str, list[str]], shots: int) -> dict:
    """Return scores over all questions, by group and by subject; see evaluate_choices."""
    subjects: dict[str, list[dict]] = {}
    for found in records:
        subjects.setdefault(found["subject"], []).append(found)
    of_group = {
        name: [r for r in records if r["subject"] in members] for name, members in groups.items()
    }
    of_subject = {name: scores(found) for name, found in subjects.items()}
    # The mean over subjects, whatever their sizes, is what CMMLU and C-Eval publish; MMLU's is
    # the mean over questions.
    columns = {m: [one[m] for one in of_subject.values()] for m in records[0]["chosen"]}
    return {
        "overall": scores(records),
        "subject_mean": {m: sum(column) / len(column) for m, column in columns.items()},
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
        # standard error of a mean: sqrt(variance / n); the sample variance of n values of 0 and 1
        # with mean p is p (1 - p) n / (n - 1)
        error = math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else None
        found |= {measure: p, f"{measure}_stderr": error}
    return found


def fitted(
    tokenizer: Tokenizer, subject: Subject, question: Question, shots: int, size: int
) -> tuple[list, int, int]:
    """Return (answer_rows of a question with as many examples as fit in `size`, their number,
    tokens cut from the beginning of the longest row). Raise UserError if an answer alone does not
    fit."""
    # The model does not read a row's last id, so a row may be one longer than its block.
    # drop examples one by one until question and answers fit
    for n in range(shots, -1, -1):
        context = subject.intro
        for example in subject.examples[:n]:
            context += f"{example.text} {example.answers[example.right]}\n\n"
        rows = answer_rows(tokenizer, context + question.text, question.answers)
        over = max(len(ids) for ids, _ in rows) - (size + 1)
        if over <= 0:
            return rows, n, 0
    # Even without examples it is too long: keep the end, which holds question and answer.
    longest = max(len(ids) - first for ids, first in rows)
    if longest > size:
        what = f"an answer of {longest} tokens does not fit in block_size={size}"
        what += ", which may be raised up to the model's context"
        raise UserError(f"choices: {question.where}: {what}")
    cuts = [max(0, len(ids) - (size + 1)) for ids, _ in rows]
    return [(ids[cut:], first - cut) for (ids, first), cut in zip(rows, cuts, strict=True)], 0, over


def answer_rows(
    tokenizer: Tokenizer, context: str, answers: Sequence[str]
) -> list[tuple[list[int], int]]:
    """Return (ids of context and answer, where the answer begins)."""
    # The text is tokenized as a whole, since an answer's first token depends on what precedes it.
    # lm-eval scores the same tokens, but behind those of the context alone, which differ where a
    # token spans the border. White space after the context belongs to the answer.
    first = len(begin_prompt(tokenizer, context.rstrip()))
    rows = [begin_prompt(tokenizer, f"{context} {answer}") for answer in answers]
    # A merge over the border may leave the answer no token
    return [(ids, min(first, len(ids) - 1)) for ids in rows]


def read_task(task: str, path: str, shots: int) -> tuple[list[Subject], list[str]]:
    """Return the subjects of MMLU, CMMLU or C-Eval, one file each, with `shots` examples, and
    notes on what was unusual."""
    exam = task.removesuffix("_text")
    split, words, notes, subjects = QUESTIONS[exam], subjects_file()[exam], defaultdict(list), []
    files = sorted(Path(path, split).glob("[!.]*.csv"))
    if not files:
        what = f"no {split}/*.csv in {path}; give the directory that holds dev and {split}"
        raise UserError(f"choices: {task}: {what}")
    for file in files:
        name = file.stem.removesuffix(f"_{split}")
        read = partial(read_questions, task=task, words=words, notes=notes)
        # test/anatomy_test.csv has its examples in dev/anatomy_dev.csv
        source = Path(path, "dev", file.name.replace(f"_{split}.csv", "_dev.csv"))
        examples = read(source) if shots and source.exists() else []
        if (n := len(examples)) < shots:
            what = f"{source} holds {n} examples, fewer than shots={shots}"
            raise UserError(f"choices: {what}; give --shots={n} or less")
        intro = words["letters_intro" if task == exam else "texts_intro"]
        title = words["names"].get(name, name.replace("_", " "))
        subjects.append(Subject(name, intro.format(title), examples[:shots], read(file)))
        # a subject that the publishers do not know, such as one's own file
        if not any(name in members for members in words["groups"].values()):
            notes["of no group, only in the overall score"].append(name)
    return subjects, [f"{what}: {listed(names, 3)}" for what, names in notes.items()]


def subjects_file() -> dict[str, dict]:
    """Return {benchmark: its prompts, groups {name: subjects}, names of subjects in prompts}."""
    return json.loads(SUBJECTS_FILE.read_text(encoding="utf-8"))


def read_questions(
    file: Path, task: str, words: dict, notes: dict[str, list[str]]
) -> list[Question]:
    """Return the questions of a subject. Raise UserError for a row that cannot be understood: the
    accuracy over the others would be that of another benchmark."""
    exam = task.removesuffix("_text")
    columns, questions, encodings = COLUMNS[exam], [], set()
    # MMLU's files have no line with the names of the columns.
    for row in read_records(str(file), names=columns if exam == "mmlu" else ()):
        where = f"{file}:{row.line}"
        if row.problem:
            raise UserError(f"choices: {where}: {row.problem}: {' '.join(row.detail.split())}")
        if missing := [name for name in columns if name not in row.value]:
            there = ", ".join(map(repr, row.value))
            raise UserError(f"choices: {where}: no field {missing[0]!r}; there are {there}")
        question, *texts, right = (row.value[name] for name in columns)
        if right.strip() not in LETTERS:  # as in splits with secret answers
            what = f"{columns[-1]} is {right!r}, not one of {', '.join(LETTERS)}"
            raise UserError(f"choices: {where}: {what}")
        if task == exam:  # the prompt lists the answers; the model says a letter
            options = [f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=True)]
            asked, answers = "\n".join([question.strip(), *options, words["answer"]]), LETTERS
        else:
            asked = f"{words['texts_question']}{question.strip()}\n{words['answer']}"
            answers = tuple(texts)
        questions.append(Question(asked, answers, LETTERS.index(right.strip()), where))
        encodings.add(row.encoding)
    if not questions:
        raise UserError(f"choices: {file} holds no question")
    if encodings != {"utf-8"}:  # copies of C-Eval and CMMLU saved by Excel in China
        notes["read as GB18030 (GBK), not UTF-8"].append(f"{file.parent.name}/{file.name}")
    return questions
