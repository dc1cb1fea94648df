"""The best of several answers to a prompt by a reward model, which the engine that draws them knows nothing of.

    judge = Judge(load(find_model(reward_from, tokenizer, "reward_from")), tokenizer)
    judge.rank(result, n) -> the result with its n best answers, best first, each with its reward
    judge.report()        -> how many answers have no reward, by reason

What gets a reward is a whole answer, at the <|im_end|> that closes it. The answers to a prompt are scored together and
with no other prompt's, so that rewards depend on the prompt, the parameters and the seed, not on the batch size.
"""

import math
from collections import Counter

import torch

from groundup.align.reward_model import RewardModel, score_ids
from groundup.errors import UserError
from groundup.generate.completion import Completion, Result
from tokenizer import Tokenizer


class Judge:
    """A reward model and what it could not score so far."""

    def __init__(self, model: RewardModel, tokenizer: Tokenizer, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.tokenizer, self.dtype = model, tokenizer, dtype
        self.n_answers = 0
        self.without_reward: Counter[str] = Counter()

    def rank(self, result: Result, n: int) -> Result:
        """`result` with its n best completions, best first, equal ones in their order.

        An answer that ended by length is unfinished: it has no reward (None), and comes after all finished ones. So
        does one too long for the reward model, between the two. Of N answers the best one's distribution is at most
        log N - (N - 1) / N nats (KL divergence) from the model's own (arXiv:2401.01879). Raises SampleError."""
        rewards = self.rewards(result)
        scored = [found._replace(reward=reward) for found, reward in zip(result.completions, rewards, strict=True)]
        scored.sort(key=rank_of, reverse=True)
        return result._replace(completions=scored[:n])

    def rewards(self, result: Result) -> list[float | None]:
        """The reward of each completion, None if it has none; counts those. Raises SampleError."""
        rows: dict[int, list[int]] = {}
        for i, found in enumerate(result.completions):
            ids = result.prompt_ids + closed_ids(found, self.tokenizer)
            if found.finish_reason != "stop":
                self.without_reward["ended by length"] += 1
            elif len(ids) > self.model.cfg.block_size:
                self.without_reward[f"longer than the reward model's block_size={self.model.cfg.block_size}"] += 1
            else:
                rows[i] = ids
        scores = score_ids(self.model, list(rows.values()), self.tokenizer.pad_id, dtype=self.dtype)
        if not all(map(math.isfinite, scores)):
            raise UserError("sample: the reward model gives rewards that are not finite; try dtype=float32")
        self.n_answers += len(result.completions)
        found = dict(zip(rows, scores, strict=True))
        return [found.get(i) for i in range(len(result.completions))]

    def report(self) -> str:
        """One line, or "" if every answer has a reward."""
        if not self.without_reward:
            return ""
        reasons = ", ".join(f"{n} {reason}" for reason, n in self.without_reward.most_common())
        return f"sample: {self.without_reward.total()} of {self.n_answers} answers have no reward: {reasons}"


def rank_of(found: Completion) -> tuple[bool, float]:
    """Higher is better."""
    return found.finish_reason == "stop", -math.inf if found.reward is None else found.reward


def closed_ids(found: Completion, tokenizer: Tokenizer) -> list[int]:
    """Ids of an answer as training has them: what ended it gives way to <|im_end|>. A stop string is not part of the
    text, and may end within a token, so the text before it is tokenized again."""
    if isinstance(found.stop_reason, str):
        return [*tokenizer.encode(found.text), tokenizer.im_end_id]
    said = found.ids if found.stop_reason is None else found.ids[:-1]
    return [*said, tokenizer.im_end_id]
