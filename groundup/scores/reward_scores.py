"""Files of rows with a reward model's scores: conversations, and answers that sample.py drew.

    python reward.py --init_from=out/reward --score=answers.jsonl --out=scored.jsonl

A conversation gets "reward", that of its last answer; a row of answers (answer_files.py) has it in each finished one of
its "completions". What has no score keeps its place: its reward is null, and "reward_problem" says why. Beside scored
answers lies OUT.config.json: how they were made, and by which reward model they were scored.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch

from groundup.align.reward_model import RewardModel, answered_ids, score_ids
from groundup.errors import UserError
from groundup.files import readers, row_formats, streams
from groundup.files.answer_files import (
    NoPair,
    conversation_of,
    is_answers,
    is_settings_file,
    need_settings,
    read_settings,
    settings_path,
    write_settings,
)
from groundup.train import checkpoint
from tokenizer import Tokenizer

ROWS = 64  # at a time, times batch_size; a kill costs that much


class Asked(NamedTuple):
    """A row of a file to score."""

    row: dict
    talks: list[list[dict]]  # the one conversation, or one for each completion; [] for one that is not finished
    problem: str = ""  # why there are none


# ---- a file ---------------------------------------------------------------------------------------------------------


def score_file(
    model: RewardModel, tokenizer: Tokenizer, source: str, out: Path, key: str, batch_size: int, dtype: torch.dtype,
    settings: dict | None = None,
) -> Counter:  # fmt: skip
    """Write the rows of the files in `source` to `out` in their order, each with its rewards; beside it the `settings`
    of the answers, and no older ones. Returns why there is no reward, counted, "" being those that have one.

    `out` is whole or not there. What a killed call has done is kept under a hidden name with `key` in it, the
    fingerprint of model and input, and not done again. Raises RewardError if nothing has a reward, AnswerFileError."""
    part = out.with_name(f".{out.name}.{key[:16]}.part")
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = islice(rows_of(source), whole_lines(part), None)
    while some := list(islice(rows, ROWS * batch_size)):
        done = list(scored(model, tokenizer, some, batch_size, dtype))
        with open(part, "a", encoding="utf-8") as f:
            f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in done)
    problems = count_problems(part)
    if not problems[""]:
        part.unlink(missing_ok=True)
        raise UserError(f"reward: no row of {source} has a score: {reasons(problems) or 'there is no answer'}")
    if out not in map(Path, files_of(source)):
        settings_path(out).unlink(missing_ok=True)  # first, so that at no moment they are those of other answers
    os.replace(part, out)
    if settings:
        write_settings(out, settings)
    return problems


def count_problems(part: Path) -> Counter:
    """Of the scored rows in a file; of none if it is not there."""
    if not part.exists():
        return Counter()
    with open(part, encoding="utf-8") as f:
        return Counter(problem for line in f for problem in problems_in(json.loads(line)))


def problems_in(row: dict) -> list[str]:
    """Why each reward of a scored row is null; "" of one that is not."""
    parts = [row] if "reward_problem" in row else row.get("completions", [row])
    return [part.get("reward_problem", "").partition(":")[0] for part in parts]


def reasons(problems: Counter) -> str:
    """'too long 3, no answer at the end 1'."""
    return ", ".join(f"{reason} {n}" for reason, n in problems.most_common() if reason)


def scoring_key(directory: Path, source: str, dtype: torch.dtype) -> str:
    """Fingerprint of all that decides the scores of the files in `source`."""
    paths = readers.find_files(source)
    known = [checkpoint.weights_key(directory), str(dtype), *(checkpoint.sha256(Path(path)) for path in paths)]
    known += [json.dumps(read_settings(path)) for path in paths]
    return hashlib.sha256("\n".join(known).encode()).hexdigest()


def whole_lines(path: Path) -> int:
    """How many lines of a file are whole; what is behind them is taken away. 0 if there is none."""
    if not path.exists():
        return 0
    with open(path, "rb+") as f:
        content = f.read()
        f.truncate(content.rfind(b"\n") + 1)
    return content.count(b"\n")


# ---- what is in it --------------------------------------------------------------------------------------------------


def files_of(source: str) -> list[str]:
    """The files of rows in `source`: files, directories or globs. Raises RewardError, DataError if there are none."""
    if "-" in readers.find_files(source):
        raise UserError("reward: standard input cannot be scored, for it is read more than once; give a file")
    found = [path for path in readers.find_files(source) if not is_settings_file(path)]
    if not found:
        raise UserError(f"reward: {source} holds the settings of answers only; give the file beside them")
    return found


def common_settings(source: str) -> dict | None:
    """The settings of the answers in `source`, None if it has none. Raises RewardError if two files differ, for the
    answers are of two models; AnswerFileError if a file of answers has none."""
    paths = files_of(source)
    found = {path: need_settings(path) if is_answers(path) else read_settings(path) for path in paths}
    known = [(path, without_judge(settings)) for path, settings in found.items() if settings is not None]
    for path, settings in known[1:]:
        first, others = known[0]
        differ = [key for key in sorted(others | settings) if settings.get(key) != others.get(key)]
        if differ:
            raise UserError(f"reward: {first} and {path} were answered with another {differ[0]}; score them apart")
    return known[0][1] if known else None


def without_judge(settings: dict | None) -> dict | None:
    """Settings that decided the answers: the reward model, which came after them, did not."""
    return settings and {key: value for key, value in settings.items() if key != "reward_model"}


def rows_of(source: str) -> Iterator[Asked]:
    """Each row of the files, the unreadable ones too. Raises AnswerFileError at answers without their settings."""
    for path in files_of(source):
        settings = read_settings(path)
        for record in readers.read_records(path):
            if record.problem:
                yield Asked({"line": record.line}, [], f"{record.problem}: {record.detail}")
                continue
            value = streams.mended(record.value)
            row = value if isinstance(value, dict) else {"row": value}
            row.pop("reward_problem", None)  # that an earlier model had
            if "completions" in row:
                settings = settings or need_settings(path)
                yield Asked(row, *answered_talks(row, settings))
            else:
                yield Asked(row, *own_talk(value))


def own_talk(row: object) -> tuple[list[list[dict]], str]:
    """([the conversation of a row], "") or ([], why it has no score)."""
    messages, detail = row_formats.messages_of(row)
    problem = f"not understood: {detail}" if detail else row_formats.chat_problem(messages)
    if not problem and messages[-1]["role"] != "assistant":
        problem = "no answer at the end"
    return ([], problem) if problem else ([messages], "")


def answered_talks(row: dict, settings: dict) -> tuple[list[list[dict]], str]:
    """([a conversation for each of a row's completions, [] for one that is not finished], "") or ([], why there are
    none). settings: those that sample.py answered with."""
    found = row["completions"] if isinstance(row["completions"], list) else [None]
    if not all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in found):
        return [], "not understood: completions without a text"
    try:
        prompt, _ = conversation_of(row, settings)
    except NoPair as problem:
        return [], f"not understood: {problem}"
    answers = [{"role": "assistant", "content": row_formats.answer_at(one, "text")} for one in found]
    ended = [one.get("finish_reason") == "stop" for one in found]
    return [[*prompt, answer] if end else [] for answer, end in zip(answers, ended, strict=True)], ""


def scored(
    model: RewardModel, tokenizer: Tokenizer, rows: list[Asked], batch_size: int, dtype: torch.dtype
) -> Iterator[dict]:
    """The rows of `rows_of` with their rewards."""
    most = model.cfg.block_size
    ids = [[answered_ids(talk, tokenizer) if talk else [] for talk in asked.talks] for asked in rows]
    fit = [one for of_row in ids for one in of_row if 0 < len(one) <= most]
    rewards = iter(score_ids(model, fit, tokenizer.pad_id, batch_size, dtype))
    for (row, _, problem), of_row in zip(rows, ids, strict=True):
        if problem:
            yield row | {"reward": None, "reward_problem": problem}
        elif "completions" in row:
            both = zip(row["completions"], of_row, strict=True)
            yield row | {"completions": [with_reward(completion, one, most, rewards) for completion, one in both]}
        else:
            yield with_reward(row, of_row[0], most, rewards)


def with_reward(row: dict, ids: list[int], most: int, rewards: Iterator[float]) -> dict:
    """A row or completion with the next of the rewards, if it is finished and has at most `most` ids."""
    row = {key: value for key, value in row.items() if key != "reward_problem"}
    if 0 < len(ids) <= most:
        return row | {"reward": next(rewards)}
    problem = f"too long: {len(ids)} tokens, block_size={most}" if ids else "unfinished answer"
    return row | {"reward": None, "reward_problem": problem}
