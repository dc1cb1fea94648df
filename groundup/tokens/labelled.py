"""Answers that are good or bad, one by one: the data of dpo.py --loss=kto.

A row is a conversation in any format of row_formats.py with `label` (trl) or `kto_tag`
(LLaMA-Factory), true or false, 1 or 0, about its last answer; or a pair, which is a good and a bad
answer. A row that says not to learn from its last answer at all (weight 0) is left out.

In memory an answer is a pair, so that pairs.py does the rest: `chosen` is the answer, `rejected`
the answer to another prompt, with which KTO estimates how far the model has moved, and `margin` is
the label, 1 or -1.
"""

import copy
from collections.abc import Sequence

import numpy as np

from groundup.errors import UserError
from groundup.files import row_formats, usable
from groundup.files.splits import dialogue_text
from groundup.tokens.pairs import (
    PairBatch,
    PairCorpus,
    PairReader,
    Pairs,
    Tokenized,
    load_pairs,
    tokenize_answer,
)
from groundup.tokens.row_reader import STRANGE, Unusable


class LabelReader(PairReader):
    """Reads labelled answers, and pairs as two of them. An item is a list without `rejected`."""

    noun = "labelled answer or preference pair"
    kinds = ("preference", "chat")

    def item(self, row: object, place: str) -> tuple[str, list[Tokenized]]:
        label = usable.label_of(row)
        if label is None:
            text, pair = super().item(row, place)
            answers = []
            for ids, n, label in zip(pair[1:3], pair.given, (1.0, -1.0), strict=True):
                prompt = np.concatenate([pair.prompt, ids[:n]])
                answers.append(Tokenized(prompt, ids[n:], ids[:0], label))
            return text, answers

        messages, detail = row_formats.messages_of(row)
        if detail:
            raise Unusable(STRANGE, detail)
        every = [message | {"learn": True} for message in messages]  # the label is of the last one
        if problem := usable.chat_problem(every):
            raise Unusable(problem)
        *prompt, answer = usable.trim_chat(messages)
        if not usable.is_learned(answer) or not usable.is_learned(row, usable.ROW_WEIGHTS):
            raise Unusable("bad answer", "its weight is 0")
        if not prompt:
            raise Unusable("answer without a prompt")
        self.trimmed += len(messages) > len(prompt) + 1
        before, learned = tokenize_answer(prompt, answer["content"], self.tokenizer)
        length = len(before) + len(learned)
        if length > self.longest:
            raise Unusable(f"does not fit in block_size={self.longest}", f"{length} tokens")
        ids = Tokenized(before, learned, learned[:0], 1.0 if label else -1.0)
        return dialogue_text(prompt), [ids]


class LabelCorpus(PairCorpus):
    """The labelled answers that a `data` string names; see PairCorpus."""

    def reader(self) -> LabelReader:
        return LabelReader(self.tokenizer, self.block_size)

    def lay_out(self, name: str, items: list[list[Tokenized]]) -> Pairs:
        answers = [answer for item in items for answer in item]
        n = range(len(answers))
        return super().lay_out(name, [with_other(answers, i, self.block_size, name) for i in n])

    side = 1  # of the pairs: 1 = the answers, 2 = those to other prompts

    def load(self, sources: np.ndarray, rows: np.ndarray) -> PairBatch:
        """Return the micro-batch of these answers."""
        return load_pairs(self.train, sources, rows, sides=(self.side,))

    def others(self) -> "LabelCorpus":
        """Return the same prompts, in the same order, with answers to other prompts."""
        corpus = copy.copy(self)
        corpus.side = 2
        return corpus

    def balance(self, weight: float) -> list[str]:
        """Return the numbers of good and bad answers, and a warning if they are out of balance."""
        labels = np.concatenate([data.margin for data in self.train])
        good, bad = int((labels > 0).sum()), int((labels < 0).sum())
        lines = [f"labels      {good:,} good answers, {bad:,} bad ones, for training"]
        # section 4.2 of the paper: weighted good answers per bad one should be from 1 to 4/3
        if not 0.99 <= weight * good / max(1, bad) <= 4 / 3:
            low = bad / max(1, good)
            advice = f"desirable_weight from {low:.2f} to {4 / 3 * low:.2f}"
            lines.append(f"warning     KTO's authors advise {advice} for these")
        return lines


def with_other(answers: Sequence[Tokenized], i: int, longest: int, name: str) -> Tokenized:
    """Return answer i with an answer to another prompt, cut where the context ends.

    The search begins half the rows further on: neighbours may have the same prompt or subject."""
    n, prompt = len(answers), answers[i].prompt
    for k in range(n):
        other = answers[(i + n // 2 + k) % n]
        if not np.array_equal(other.prompt, prompt):
            return answers[i]._replace(rejected=other.chosen[: longest - len(prompt)])
    need = "kto needs answers to two prompts at least, for training and for validation"
    raise UserError(f"data: {name}: {need}")
