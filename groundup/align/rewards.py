"""What an answer is worth to rl.py: a reward model, a function of yours, or a weighted sum of several.

    --reward=out/reward                                   # the newest checkpoint of a run of reward.py
    --reward=rules.py:exact                               # a function of a Python file: a reward that can be verified
    --reward=out/reward=1.0,rules.py:length=-0.1          # a sum; a part without a weight has 1

A function is called as function(prompt: list[dict], answer: str, row: dict) -> float. `prompt` are the messages before
the answer, `answer` is its text, `row` is the row of the data, which may hold what the right answer is. The file is
run once, as it is read. The same answer must always have the same reward, or a run cannot be resumed exactly.

A reward model reads the very ids that were drawn, and scores the <|im_end|> that closes them. An unfinished answer has
no reward here: what it gets instead is a rule of rl.py.
"""

import copy
import json
import math
import numbers
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from configurator import load_function
from groundup.align.reward_model import find_model, load, score_ids
from groundup.errors import UserError
from groundup.train import checkpoint
from tokenizer import Tokenizer

SHOWN = 60  # characters of a prompt in an error
LARGEST = torch.finfo(torch.float32).max  # that training reckons with


class Answer(NamedTuple):
    prompt: list[dict]  # messages, up to the question
    text: str  # without what ended it
    ids: list[int]  # of the prompt and the answer, with what ended it
    finished: bool  # it ended by itself
    row: dict  # of the data
    place: str  # of the row, "file:line"


class Scores(NamedTuple):
    total: list[float]  # the weighted sum for each answer; nan for one that is not finished
    parts: dict[str, list[float]]  # of each part by name, before it is weighted; for the log


class Rewards:
    """The parts that a `reward` string names. Raises RewardError, or ConfigError for a function: one is not there, or
    does not fit the policy.

    names: what the log calls the parts. block_size: most ids of a prompt and its answer that all parts can read; 0 = no
    limit.
    """

    def __init__(
        self, spec: str, tokenizer: Tokenizer, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
        batch_size: int = 16,
    ) -> None:  # fmt: skip
        self.weights = parse_reward(spec)
        self.parts = [
            FunctionReward(part) if is_function(part) else ModelReward(part, tokenizer, device, dtype, batch_size)
            for part in self.weights
        ]
        self.names = names_of(list(self.weights))
        self.block_size = min((part.block_size for part in self.parts if part.block_size), default=0)

    def score(self, answers: Sequence[Answer]) -> Scores:
        """The reward of each answer; nan for unfinished ones, which no part gets to see. Raises RewardError."""
        finished = [answer for answer in answers if answer.finished]
        parts, total = {}, [0.0] * len(finished)
        for name, part, weight in zip(self.names, self.parts, self.weights.values(), strict=True):
            found = part.score(finished)
            total = [so_far + weight * value for so_far, value in zip(total, found, strict=True)]
            parts[name] = spread(found, answers)
        if not all(abs(value) <= LARGEST for value in total):
            raise UserError(f"reward: the weighted sum of {', '.join(self.weights)} is not finite; lower the weights")
        return Scores(spread(total, answers), parts)

    def record(self) -> dict[str, str]:
        """{part and weight: fingerprint of the weights or of the file} of all that decides the rewards."""
        return {
            f"{part}={weight:g}": of.fingerprint
            for (part, weight), of in zip(self.weights.items(), self.parts, strict=True)
        }


def spread(values: list[float], answers: Sequence[Answer]) -> list[float]:
    """The values of the finished answers in the places of these, nan in those of the others."""
    left = iter(values)
    return [next(left) if answer.finished else math.nan for answer in answers]


# ---- what `reward` says ---------------------------------------------------------------------------------------------


def parse_reward(spec: str) -> dict[str, float]:
    """'out/reward,rules.py:length=-0.1' -> {'out/reward': 1.0, 'rules.py:length': -0.1}. Raises RewardError."""
    weights: dict[str, float] = {}
    for part in map(str.strip, spec.split(",")):
        name, equals, number = part.rpartition("=")
        name, weight = (name.strip(), parse_weight(number)) if equals else (part, 1.0)
        if not name or not weight:
            raise UserError(f"reward: {part!r} in reward={spec!r} is not 'part' or 'part=weight', a number but 0")
        if name in weights:
            raise UserError(f"reward: {name!r} comes twice in reward={spec!r}; add its weights up")
        weights[name] = weight
    return weights


def parse_weight(text: str) -> float:
    """A finite number, of either sign; 0 for what is none."""
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if math.isfinite(number) else 0.0


def is_function(part: str) -> bool:
    return re.search(r"\.py(:[^/]*)?$", part) is not None


def names_of(parts: list[str]) -> list[str]:
    """The function, or the directory's last name; the whole part where that is the name of several."""
    short = [part.rpartition(":")[2] if is_function(part) else Path(part).resolve().name for part in parts]
    counts = Counter(short)
    return [name if counts[name] == 1 else part for name, part in zip(short, parts, strict=True)]


# ---- a function -----------------------------------------------------------------------------------------------------


class FunctionReward:
    block_size = 0  # it reads text of any length

    def __init__(self, name: str) -> None:
        self.name, self.function = name, load_function(name, "reward")
        self.fingerprint = checkpoint.sha256(Path(name.rpartition(":")[0]))

    def score(self, answers: Sequence[Answer]) -> list[float]:
        return [self.score_one(answer) for answer in answers]

    def score_one(self, answer: Answer) -> float:
        """What the function says. Raises RewardError if that is no finite number, naming the prompt."""
        prompt, row = copy.deepcopy((answer.prompt, answer.row))  # a function that changes them changes no data
        try:
            value = self.function(prompt, answer.text, row)
            number = float(value) if isinstance(value, numbers.Real | np.bool_) else math.nan
        except (Exception, SystemExit) as error:  # of code that is not ours
            raise UserError(f"reward: {self.name} fails {about(answer)}: {said_by(error)}") from error
        if not abs(number) <= LARGEST:
            returned = f"{shorten(repr(value))} ({type(value).__name__})"
            raise UserError(f"reward: {self.name} returns {returned}, not a finite number, {about(answer)}")
        return number


def said_by(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def about(answer: Answer) -> str:
    """Which prompt it was, and the answer, for people."""
    question = answer.prompt[-1]["content"] if answer.prompt else ""
    return f"on {answer.place}, prompt {shorten(json.dumps(question, ensure_ascii=False))}, answer " + shorten(
        json.dumps(answer.text, ensure_ascii=False)
    )


def shorten(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


# ---- a reward model -------------------------------------------------------------------------------------------------


class ModelReward:
    def __init__(
        self, name: str, tokenizer: Tokenizer, device: torch.device | str, dtype: torch.dtype, batch_size: int
    ) -> None:
        directory = find_model(name, tokenizer, "reward")
        self.name, self.tokenizer, self.dtype, self.batch_size = name, tokenizer, dtype, batch_size
        self.model = load(directory, device)
        self.block_size = self.model.cfg.block_size
        self.fingerprint = checkpoint.weights_key(directory)

    def score(self, answers: Sequence[Answer]) -> list[float]:
        """Of finished answers. Whatever ended one gives way to <|im_end|>, where the model learnt to read a score.
        Raises RewardError for a score that is not finite, and for an answer longer than the model reads."""
        rows = [[*answer.ids[:-1], self.tokenizer.im_end_id] for answer in answers]
        scores = score_ids(self.model, rows, max(self.tokenizer.pad_id, 0), self.batch_size, self.dtype)
        for answer, value in zip(answers, scores, strict=True):
            if not math.isfinite(value):
                raise UserError(f"reward: {self.name} gives {value} {about(answer)}; try dtype=float32")
        return scores
