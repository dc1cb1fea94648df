"""Rewards of sampled answers: a reward model, your own function, or a weighted sum of several.

    --reward=out/reward                             # the newest checkpoint of a run of reward.py
    --reward=rules.py:exact                         # a function of a Python file
    --reward=out/reward=1.0,rules.py:length=-0.1    # a sum; the default weight is 1

A function is called as function(prompt: list[dict], answer: str, row: dict) -> float: the messages
before the answer, those of tools among them, its text, and the row of the data, which may hold the
right answer. The file runs once, when it is read. The same answer must always get the same reward,
or a run cannot be resumed exactly.

An unfinished answer has no reward here; the setting `unfinished` of rl.py says what it gets.
"""

import copy
import json
import math
import numbers
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from groundup.align.reward_model import drawn_ids, find_model, load, score_ids
from groundup.errors import UserError
from groundup.files.functions import load_function
from groundup.files.turns import keys_of
from groundup.tokens.batches import names_of
from groundup.tokens.prompts import Prompt
from groundup.tokens.token_files import file_sha256
from groundup.train import huggingface
from tokenizer import Tokenizer

LARGEST = torch.finfo(torch.float32).max  # training computes in float32


class Rollout(NamedTuple):
    """A prompt with an answer that the policy has sampled."""

    prompt: Prompt
    ids: list[int]  # with the id that ended it, if one did
    text: str  # of its last turn, without that id
    finished: bool  # it stopped on its own, and called no tool
    logprob: float  # the engine's sum over its tokens, before the temperature
    turns: tuple[dict, ...] = ()  # before the text: calls of tools, and what these answered
    given: tuple[tuple[int, int], ...] = ()  # begin and end in ids of what was not sampled
    n_calls: int = 0
    n_failed: int = 0  # of them

    @property
    def messages(self) -> list[dict]:
        """The messages before the text."""
        return [*self.prompt.messages, *self.turns]

    @property
    def last_turn(self) -> int:
        """Where the ids of the last turn begin."""
        return self.given[-1][1] if self.given else 0

    @property
    def sampled(self) -> np.ndarray:
        """Which of the ids were sampled, bool."""
        which = np.ones(len(self.ids), bool)
        for begin, end in self.given:
            which[begin:end] = False
        return which


class Rewards:
    """The parts that a `reward` string names. Raise UserError for one that does not fit the policy.

    names: of the parts, for the log. block_size: most ids that all parts can read, 0 = any.
    """

    def __init__(
        self,
        spec: str,
        tokenizer: Tokenizer,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        batch_size: int = 16,
    ) -> None:
        self.weights = parse_reward(spec)
        self.parts: list[FunctionReward | ModelReward] = []
        short = []  # names for the log: the function, or the directory
        for name in self.weights:
            if is_function(name):
                self.parts.append(FunctionReward(name))
                short.append(name.rpartition(":")[2])
            else:
                self.parts.append(ModelReward(name, tokenizer, device, dtype, batch_size))
                short.append(Path(name).resolve().name)  # of the link out/latest, its target
        self.names = names_of(list(self.weights), short)
        sizes = [part.block_size for part in self.parts if part.block_size]
        self.block_size = min(sizes, default=0)
        self.n_parameters = sum(part.n_parameters for part in self.parts)

    def table(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Return (1 + parts, R) float64: the weighted sum for each of R answers, then each part.

        It is nan for unfinished answers, which no part gets to see. Raise UserError for a reward
        that is not finite."""
        finished = torch.tensor([rollout.finished for rollout in rollouts], dtype=torch.bool)
        answers = [rollout for rollout in rollouts if rollout.finished]
        parts = [part.rewards(answers) for part in self.parts]
        # The sum in Python's floats, part by part: the same on every machine
        total = [0.0] * len(answers)
        for values, weight in zip(parts, self.weights.values(), strict=True):
            total = [so_far + weight * value for so_far, value in zip(total, values, strict=True)]
        if not all(abs(value) <= LARGEST for value in total):  # NaN is not
            text = f"the weighted sum of {', '.join(self.weights)} is not finite"
            raise UserError(f"reward: {text}; lower the weights")
        table = torch.full((1 + len(parts), len(rollouts)), math.nan, dtype=torch.float64)
        table[:, finished] = torch.tensor([total, *parts], dtype=torch.float64)
        return table

    def record(self) -> dict[str, str]:
        """Return {part and weight: fingerprint of weights or file}: what decides the rewards."""
        pairs = zip(self.weights.items(), self.parts, strict=True)
        return {f"{name}={weight:g}": part.fingerprint for (name, weight), part in pairs}


def parse_reward(spec: str) -> dict[str, float]:
    """Return {part: weight}: 'out/reward,a.py:f=-0.1' -> {'out/reward': 1.0, 'a.py:f': -0.1}."""
    weights: dict[str, float] = {}
    if not spec:
        return weights
    for part in map(str.strip, spec.split(",")):
        name, equals, number = part.rpartition("=")
        if not equals or "/" in number:  # of a folder's name, lang=zh/rules.py:f
            name, equals = part, ""
        name = name.strip()
        try:
            weight = float(number) if equals else 1.0
        except ValueError:
            weight = 0.0  # refused below
        if not name or not weight or not math.isfinite(weight):
            wanted = "'part' or 'part=weight', a number but 0"
            raise UserError(f"reward: {part!r} in reward={spec!r} is not {wanted}")
        if name in weights:
            raise UserError(f"reward: {name!r} comes twice in reward={spec!r}; add its weights up")
        weights[name] = weight
    return weights


def is_function(part: str) -> bool:
    """Return whether a part is a function, not a reward model."""
    # "rules.py:exact" is one; "rules.py" too, to be refused by load_function
    return re.search(r"\.py(:[^/]*)?$", part) is not None


class FunctionReward:
    """A function of the user's."""

    block_size = 0  # text of any length
    n_parameters = 0

    def __init__(self, name: str) -> None:
        self.name, self.function = name, load_function(name, "reward")
        # of the file: a resumed run must not meet another function
        self.fingerprint = file_sha256(Path(name.rpartition(":")[0]))

    def rewards(self, rollouts: Sequence[Rollout]) -> list[float]:
        return [self.reward(rollout) for rollout in rollouts]

    def reward(self, rollout: Rollout) -> float:
        """Return the function's value.

        Raise UserError, naming the prompt, if it fails or does not return a finite number."""
        # The function gets copies, which it may change.
        messages, row = copy.deepcopy((rollout.messages, rollout.prompt.row))
        try:
            value = self.function(messages, rollout.text, row)
            # True counts as 1, also numpy's; what is no number fails below
            number = float(value) if isinstance(value, numbers.Real | np.bool_) else math.nan
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            if isinstance(error, KeyError):
                problem += f" (the row has the {keys_of(rollout.prompt.row)})"
            text = f"{self.name} fails {describe(rollout)}: {problem}"
            raise UserError(f"reward: {text}") from error
        if not abs(number) <= LARGEST:
            returned = f"{value!r:.60} ({type(value).__name__})"
            text = f"{self.name} returns {returned}, not a finite number, {describe(rollout)}"
            raise UserError(f"reward: {text}")
        return number


def describe(rollout: Rollout) -> str:
    """Return the place, the prompt and the answer, shortened, for people."""
    messages = rollout.prompt.messages
    question = json.dumps(messages[-1]["content"] if messages else "", ensure_ascii=False)
    answer = json.dumps(rollout.text, ensure_ascii=False)
    return f"on {rollout.prompt.place}, prompt {question:.60}, answer {answer:.60}"


class ModelReward:
    """A reward model, which scores what ends the turn."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        device: torch.device | str,
        dtype: torch.dtype,
        batch_size: int,
    ) -> None:
        directory = find_model(name, tokenizer, "reward")
        self.name, self.tokenizer = name, tokenizer
        self.dtype, self.batch_size = dtype, batch_size
        self.model = load(directory, device, dtype)
        self.block_size = self.model.cfg.block_size
        self.n_parameters = sum(p.numel() for p in self.model.parameters())
        self.fingerprint = huggingface.shared_fingerprint(directory)

    def rewards(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return the scores of finished answers, read at the end of the turn.

        Raise UserError for a score that is not finite, and for an answer too long for the model."""
        rows = []
        for rollout in rollouts:
            # Its last turn is the answer. Calls of tools and their results stand before it.
            begin = rollout.last_turn
            before, drawn = rollout.prompt.ids + rollout.ids[:begin], rollout.ids[begin:-1]
            of_training = rollout.messages, before, drawn, rollout.text
            rows.append(drawn_ids(*of_training, self.tokenizer, self.block_size))
        scores = score_ids(self.model, rows, self.batch_size, self.dtype)
        for rollout, value in zip(rollouts, scores, strict=True):
            if not math.isfinite(value):
                text = f"{self.name} gives {value} {describe(rollout)}"
                raise UserError(f"reward: {text}; try dtype=float32")
        return scores
