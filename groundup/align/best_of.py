"""Best of n: rank the answers to a prompt by a reward model.

    ranker = Ranker(load(find_model(reward_from, tokenizer, "reward_from")), tokenizer)
    ranker.rank(result, asked, n)   # the result with its n best answers, best first, with rewards
    ranker.report()                 # how many answers have no reward, by reason

The answers to one prompt are a batch of their own, so rewards depend on the prompt, the parameters
and the seed, not on the batch size.
"""

import math
from collections import Counter

import torch

from groundup.align.reward_model import RewardModel, drawn_ids, score_ids
from groundup.errors import UserError
from groundup.generate.completion import asked_messages
from groundup.generate.engine import Completion, Result
from tokenizer import Tokenizer


class Ranker:
    """Ranks answers by a reward model, and counts those without a reward."""

    def __init__(
        self,
        model: RewardModel,
        tokenizer: Tokenizer,
        dtype: torch.dtype = torch.float32,
        system: str = "",
    ) -> None:
        """system: message of conversations that have none."""
        self.model, self.tokenizer, self.dtype, self.system = model, tokenizer, dtype, system
        # for the report
        self.n_answers = 0
        self.without_reward: Counter[str] = Counter()

    def rank(self, result: Result, asked: str | list[dict] | None, n: int) -> Result:
        """Return `result` with its n best completions, best first.

        asked: the question or the messages, None if unknown."""
        rewards = self.rewards(result, asked)
        pairs = zip(result.completions, rewards, strict=True)
        scored = [found._replace(reward=reward) for found, reward in pairs]
        scored.sort(key=rank_of, reverse=True)  # stable: ties keep their order
        return result._replace(completions=scored[:n])

    def rewards(self, result: Result, asked: str | list[dict] | None = None) -> list[float | None]:
        """Return the reward of each completion, None if it has none, and count the latter."""
        rows: dict[int, list[int]] = {}  # {number of the completion: ids with the prompt}
        messages = None if asked is None else asked_messages(self.system, asked)
        longest = self.model.cfg.block_size
        for i, found in enumerate(result.completions):
            drawn = drawn_part(found, self.tokenizer)
            ids = drawn_ids(messages, result.prompt_ids, drawn, found.text, self.tokenizer, longest)
            # A reward is read at the end of a turn, which an answer that was cut does not have.
            if found.finish_reason != "stop":
                self.without_reward["ended by length"] += 1
            elif len(ids) > longest:
                self.without_reward[f"longer than the reward model's block_size={longest}"] += 1
            else:
                rows[i] = ids
        scores = score_ids(self.model, list(rows.values()), dtype=self.dtype)
        if not all(map(math.isfinite, scores)):
            text = "the reward model gives rewards that are not finite; try dtype=float32"
            raise UserError(f"sample: {text}")
        self.n_answers += len(result.completions)
        found = dict(zip(rows, scores, strict=True))
        return [found.get(i) for i in range(len(result.completions))]

    def report(self) -> str:
        """Return one line for people, "" if every answer has a reward."""
        if not self.without_reward:
            return ""
        reasons = ", ".join(f"{n} {reason}" for reason, n in self.without_reward.most_common())
        counts = f"{self.without_reward.total()} of {self.n_answers}"
        return f"sample: {counts} answers have no reward: {reasons}"


def rank_of(found: Completion) -> tuple[bool, float]:
    """Return a sort key; higher is better."""
    # By reward; then finished answers that are too long for the reward model; then unfinished ones.
    return found.finish_reason == "stop", -math.inf if found.reward is None else found.reward


def drawn_part(found: Completion, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of an answer without what ended it."""
    # A stop string may end in the middle of a token: tokenize the text before it again.
    if isinstance(found.stop_reason, str):
        return tokenizer.encode(found.text)
    # otherwise the last id is the one that ended it, None = none did
    return found.ids if found.stop_reason is None else found.ids[:-1]
