"""Answers that are good or bad, one by one: the data of dpo.py --loss=kto.

A row is a conversation in any format of row_formats.py with `label` (trl) or `kto_tag` (LLaMA-Factory), true or false,
about its last answer; or a pair, which is a good and a bad answer. In memory an answer is a pair, so that pairs.py
does the rest: `chosen` is the answer, `rejected` the answer to another prompt, with which KTO estimates how far the
model has moved, and `margin` is 1 or -1, the label.
"""

from collections.abc import Sequence

import numpy as np

from groundup.errors import UserError
from groundup.files import row_formats, usable
from groundup.files.splits import dialogue_text
from groundup.tokens.pairs import PairBatch, PairCorpus, PairReader, Pairs, Tokenized, load_pairs, tokenize
from groundup.tokens.row_reader import STRANGE, Unusable


class LabelReader(PairReader):
    """Reads labelled answers, and pairs as two of them. An item is a list, whose `rejected` are still empty."""

    noun = "labelled answer or preference pair"

    def item(self, row: object, place: str) -> tuple[str, list[Tokenized]]:
        label = usable.label_of(row)
        if label is None:
            text, pair = super().item(row, place)
            nothing = pair.chosen[:0]
            return text, [Tokenized(pair.prompt, a, nothing, y) for a, y in ((pair.chosen, 1.0), (pair.rejected, -1.0))]
        messages, wrong = row_formats.messages_of(row)
        if wrong or (problem := usable.chat_problem(messages)):
            raise Unusable(STRANGE if wrong else problem, wrong)
        *prompt, answer = usable.trim_chat(messages)
        if not prompt:
            raise Unusable("answer without a prompt")
        self.trimmed += len(messages) > len(prompt) + 1
        ids = tokenize(usable.Pair(prompt, answer["content"], ""), self.tokenizer)
        if len(ids.prompt) + len(ids.chosen) > self.longest:
            raise Unusable(f"does not fit in block_size={self.longest}", f"{len(ids.prompt) + len(ids.chosen)} tokens")
        return dialogue_text(prompt), [ids._replace(rejected=ids.chosen[:0], margin=1.0 if label else -1.0)]


class LabelCorpus(PairCorpus):
    """The labelled answers that a `data` string names; see PairCorpus."""

    def reader(self) -> LabelReader:
        return LabelReader(self.tokenizer, self.block_size)

    def lay_out(self, name: str, items: list[list[Tokenized]]) -> Pairs:
        found = [one for item in items for one in item]
        return super().lay_out(name, [with_other(found, i, self.block_size, name) for i in range(len(found))])

    def load(self, sources: np.ndarray, starts: np.ndarray) -> PairBatch:
        """Return the micro-batch of these answers."""
        return load_pairs(self.train, sources, starts // (self.block_size + 1), (1,))

    def load_others(self, sources: np.ndarray, starts: np.ndarray) -> PairBatch:
        """Return it with the answers to other prompts."""
        return load_pairs(self.train, sources, starts // (self.block_size + 1), (2,))

    def balance(self, weight: float) -> list[str]:
        """Return what there is of both kinds, and a warning where the good ones count for too little or too much."""
        labels = np.concatenate([data.margin for data in self.train])
        good, bad = int((labels > 0).sum()), int((labels < 0).sum())
        lines = [f"labels      {good:,} good answers, {bad:,} bad ones, for training"]
        if not 0.99 <= weight * good / max(1, bad) <= 4 / 3:  # section 4.2 of the paper
            low, high = bad / max(1, good), 4 / 3 * bad / max(1, good)
            lines.append(f"warning     KTO's authors advise desirable_weight from {low:.2f} to {high:.2f} for these")
        return lines


def with_other(found: Sequence[Tokenized], i: int, longest: int, name: str) -> Tokenized:
    """Return answer i with one to another prompt, cut where the context ends: half the rows further on, since
    neighbours may have the same prompt or subject."""
    n, prompt = len(found), found[i].prompt
    others = (found[(i + n // 2 + k) % n] for k in range(n))
    other = next((one for one in others if not np.array_equal(one.prompt, prompt)), None)
    if other is None:
        raise UserError(f"data: {name}: kto needs answers to two prompts at least, for training and for validation")
    return found[i]._replace(rejected=other.chosen[: longest - len(prompt)])
