"""Preference pairs in batches: the data of dpo.py and reward.py.

    a line of a file -> Record, with a row        RowReader.read (rows.py)
    -> messages and two answers                   row_formats.read_pair
    -> ids by the chat template                   tokenize_pair
    -> all pairs of a source, end to end          Pairs
    -> B of them as one tensor of 2B rows         load_pairs
    -> log-probabilities, losses                  pair_logps, pair_losses (align/losses.py)

    --data='pairs.jsonl,hh.json.gz'        # raw files in any format of row_formats.py
    --data='data/x=0.7,pairs/*.jsonl=0.3'  # a directory of prepare.py --kind=preference, and a glob

Both sides of a pair have the same prompt, up to the opened turn of the assistant. An answer is what
sft.py learns of it: the ids that the renderer marks, with those that end the turn. Left out: a pair
whose longer side does not fit in block_size, and one whose row says that an answer was cut off. A
row may have a number `margin`, for reward.py: how much better the chosen answer is, on any scale.

dpo.py --loss=kto learns from single answers, good or bad. A row is a conversation with `label`
(trl) or `kto_tag` (LLaMA-Factory), true or false, 1 or 0, about its last answer; or a pair, which
is a good and a bad answer. In memory an answer is a pair: `chosen` is the answer, `rejected` the
answer to another prompt, with which KTO estimates how far the model has moved, and `margin` is the
label, 1 or -1.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from groundup.errors import UserError
from groundup.files import row_formats, text_keys, turns
from groundup.files.splits import dialogue_text
from groundup.files.turns import BadRow, UselessRow
from groundup.tokens.batches import map_tensors, spread
from groundup.tokens.conversations import fingerprint_of, padded_length, sha256_of
from groundup.tokens.mixture import Sampler, hash_words, permute
from groundup.tokens.rows import STRANGE, RowCorpus, RowReader
from groundup.tokens.token_files import token_dtype
from tokenizer import Tokenizer, split_answer

SORTED_STEPS = 64  # consecutive steps whose pairs are sorted by length


# ---- one pair --------------------------------------------------------------------------------


class PairIds(NamedTuple):
    """A pair as ids, each array 1-D of the vocabulary's type."""

    prompt: np.ndarray  # what stands before both answers
    chosen: np.ndarray  # the answer and what ends the turn
    rejected: np.ndarray
    margin: float = 0.0
    # ids at the head of each answer that belong to its prompt: a template may write the prompt
    # differently for the two answers, and `prompt` ends at the first difference
    n_unlearned: tuple[int, int] = (0, 0)


def tokenize_pair(pair: turns.Pair, tokenizer: Tokenizer) -> PairIds:
    """Return the ids of a pair: its text cannot open or close a turn, see `Tokenizer.render`."""
    # Each answer is written by the template, with its prompt, as sft.py writes conversations.
    prompt, chosen = tokenize_answer(pair.prompt, pair.chosen, tokenizer)
    other_prompt, rejected = tokenize_answer(pair.prompt, pair.rejected, tokenizer)
    # Where the two prompts differ, what is left of them goes with the answers, not to be learned.
    n = min(len(prompt), len(other_prompt))
    differ = np.flatnonzero(prompt[:n] != other_prompt[:n])
    shared = int(differ[0]) if len(differ) else n
    return PairIds(
        prompt[:shared],
        np.concatenate([prompt[shared:], chosen]),
        np.concatenate([other_prompt[shared:], rejected]),
        n_unlearned=(len(prompt) - shared, len(other_prompt) - shared),
    )


def tokenize_answer(
    prompt: list[dict], answer: str, tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids (prompt, answer) of a conversation that ends with `answer`.

    They are the ids that sft.py trains on."""
    talk = [*prompt, {"role": "assistant", "content": answer}]
    ids, mask = tokenizer.render(talk, only_last=True)
    dtype = token_dtype(tokenizer.vocab_size)
    before, learned = split_answer(ids, mask)
    return np.array(before, dtype), np.array(learned, dtype)


def usable_pair(row: object) -> turns.Pair:
    """Return the pair in a row of any format. Raise BadRow if it cannot be trained on."""
    try:
        pair = row_formats.read_pair(row)
    except UselessRow as problem:
        raise BadRow(problem.reason) from None  # "equal answers" and the like, to count rows under
    except BadRow as problem:
        # a sentence about this one row: count it as STRANGE, with the sentence as the detail
        raise BadRow(STRANGE, problem.reason) from None
    if problem := turns.pair_problem(row, pair):
        raise BadRow(problem)
    return pair


class PairReader(RowReader):
    """Reads pairs as ids; longest: the block_size that each side must fit in."""

    kind, noun = "preference", "preference pair"
    split_by_prompt = True

    def item(self, row: object, place: str) -> tuple[str, PairIds]:
        pair = usable_pair(row)
        ids = tokenize_pair(pair, self.tokenizer)
        self.check_length(len(ids.prompt) + max(len(ids.chosen), len(ids.rejected)))
        if np.array_equal(ids.chosen, ids.rejected):
            raise BadRow("equal answers", "as tokens")
        self.count_not_written([*pair.prompt, {"role": "assistant", "content": pair.chosen}])
        self.count_not_written([{"role": "assistant", "content": pair.rejected}])
        # most rows have no margin: 0 means unknown
        margin = text_keys.as_score(row, "margin")
        ids = ids._replace(margin=margin if math.isfinite(margin) else 0.0)
        return dialogue_text(pair.prompt), ids

    def check_length(self, n_tokens: int) -> None:
        if n_tokens > self.longest:
            reason = f"too long for block_size={self.longest}"
            self.needs[reason].append(n_tokens)
            raise BadRow(reason, f"{n_tokens} tokens")


# ---- many pairs ------------------------------------------------------------------------------


class Pairs:
    """The pairs of one split of one source. They are its samples, see `RowCorpus`.

    lengths: (n, 2) int64, number of ids of the prompt with each answer. columns: (n,) int64, the T
    of a batch of this pair alone. margin: (n,) float32. first: the number of pair 0 in its corpus.
    """

    counts: dict[str, int] = {}  # PairReader counts what is left out
    needs: dict[str, list[int]] = {}

    def __init__(
        self,
        every_pair: Sequence[PairIds],
        tokenizer: Tokenizer,
        block_size: int,
        name: str,
        first: int = 0,
    ) -> None:
        self.name = name
        self.block_size = block_size
        self.pad_id = max(tokenizer.pad_id, 0)
        self.first = first
        # prompt, chosen and rejected of pair 0, then of pair 1, ... end to end
        parts = [part for pair in every_pair for part in (pair.prompt, pair.chosen, pair.rejected)]
        self.tokens = np.concatenate([np.zeros(0, token_dtype(tokenizer.vocab_size)), *parts])
        self.offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        self.margin = np.array([pair.margin for pair in every_pair], np.float32)
        n_unlearned = [pair.n_unlearned for pair in every_pair]
        self.n_unlearned = np.array(n_unlearned, np.int64).reshape(-1, 2)

        sizes = np.diff(self.offsets).reshape(-1, 3)  # of prompt, chosen and rejected
        self.lengths = sizes[:, :1] + sizes[:, 1:]
        self.columns = np.zeros(0, np.int64)
        if every_pair:
            self.columns = padded_length(self.lengths.max(1), block_size)
        self.n_rows = len(every_pair)
        self.n_labels = (sizes[:, 1:] - self.n_unlearned).sum(1)
        self.n_used = self.lengths.sum(1)
        # everything that a batch takes from here
        arrays = [self.tokens, self.offsets, self.margin]
        if self.n_unlearned.any():
            arrays.append(self.n_unlearned.ravel())
        digests = [sha256_of(array) for array in arrays]
        self.fingerprint = fingerprint_of([*digests, str(block_size)], tokenizer.chat_fingerprint())

    def ids(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (prompt, chosen, rejected) of pair i."""
        begin, chosen, rejected, end = self.offsets[3 * i : 3 * i + 4].tolist()
        tokens = self.tokens
        return tokens[begin:chosen], tokens[chosen:rejected], tokens[rejected:end]


class PairBatch(NamedTuple):
    """B pairs: rows with the chosen answers, then, in the same order, with the rejected ones.

    Rows are padded on the right to T. The n positions are those whose next token belongs to an
    answer. A batch of one side only has B rows instead of 2B.
    """

    x: Tensor  # (2B, T) int64, up to and including what ends the answer's turn
    index: Tensor  # (n,) int64: positions in the flat x, ascending
    targets: Tensor  # (n,) int64: the tokens that follow them
    row: Tensor  # (n,) int64: the row of x that each position is in
    lengths: Tensor  # (2B,) int64: tokens of each row; the last ends the answer (for reward.py)
    number: Tensor  # (B,) int64: of each pair in its corpus
    # (B,) float32: how much better the chosen answer is, 0 = unknown; for kto the label, 1 or -1
    margin: Tensor

    def to(self, device: str | torch.device) -> "PairBatch":
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))


def load_pairs(
    data: Sequence[Pairs], numbers: np.ndarray, sides: tuple[int, ...] = (1, 2)
) -> PairBatch:
    """Return the batch whose pair i is pair numbers[i] of data[i].

    T is the longest row's length, rounded up to an eighth of block_size (`padded_length`). sides:
    1 = the chosen answers, 2 = the rejected ones."""
    places = list(zip(data, numbers.tolist(), strict=True))
    ids = [pairs.ids(k) for pairs, k in places]  # (prompt, chosen, rejected) of each pair
    n_columns = max(int(pairs.columns[k]) for pairs, k in places)
    # all chosen answers, then all rejected ones: the loss splits the batch in the middle
    answers = [(of_pair[0], of_pair[side]) for side in sides for of_pair in ids]
    n_unlearned = [pairs.n_unlearned[k, side - 1] for side in sides for pairs, k in places]

    x = np.full((len(answers), n_columns), data[0].pad_id, np.int64)
    learned = np.zeros(x.shape, bool)
    lengths = np.empty(len(answers), np.int64)
    for b, (prompt, answer) in enumerate(answers):
        begin, end = len(prompt), len(prompt) + len(answer)
        x[b, :begin] = prompt
        x[b, begin:end] = answer
        # one to the left: the position before a token predicts it
        learned[b, begin + n_unlearned[b] - 1 : end - 1] = True
        lengths[b] = end
    index = np.flatnonzero(learned)
    number = np.array([pairs.first + k for pairs, k in places], np.int64)
    margin = np.array([pairs.margin[k] for pairs, k in places], np.float32)
    return PairBatch(
        x=torch.from_numpy(x),
        index=torch.from_numpy(index),
        targets=torch.from_numpy(x.reshape(-1)[index + 1]),
        row=torch.from_numpy(index // n_columns),
        lengths=torch.from_numpy(lengths),
        number=torch.from_numpy(number),
        margin=torch.from_numpy(margin),
    )


# ---- the order -------------------------------------------------------------------------------


class LengthSampler(Sampler):
    """A Sampler that brings pairs of similar length together, so that batches need less padding.

    An epoch is cut into stretches of SORTED_STEPS steps. Within a stretch the pairs are sorted by T
    (eight values) and cut into steps, which come in a seeded order, so that long and short ones
    alternate. Every epoch has each pair once, in other steps.

    columns: (n,) int64, T of each pair. pairs_per_step: of the run. Where several sources share a
    step, it takes fewer from this one; here a "step" is always so many numbers of this source.

    Example: 10 pairs, 4 in a step. Steps end before the numbers 4, 8, 12, .., and epoch 1 has the
    numbers 10 to 19: it begins with 2 pairs for the step 8 to 11, and ends with a whole step. So
    its stretch has groups of 2, 4 and 4 pairs.
    """

    def __init__(self, columns: np.ndarray, pairs_per_step: int, seed: int, source: int) -> None:
        super().__init__(len(columns), seed, source)
        self.columns = columns
        self.pairs_per_step = pairs_per_step
        self.source_number = source
        # a loader asks for the same stretch again and again; for kto there are two loaders
        self.order_of_stretch = lru_cache(maxsize=8)(self._order_of_stretch)

    def starts_of(self, numbers: np.ndarray) -> np.ndarray:
        numbers = np.asarray(numbers, dtype=np.int64)
        # the stretch of each number, [begin, end), from numbers alone: any rank finds the same
        epoch_begin = numbers - numbers % self.per_epoch
        # stretches begin with a step, and none holds two epochs
        size = SORTED_STEPS * self.pairs_per_step
        step_begin = epoch_begin - epoch_begin % self.pairs_per_step  # of the first step: 8 above
        stretch_begin = step_begin + (numbers - step_begin) // size * size
        begins = np.maximum(epoch_begin, stretch_begin)
        ends = np.minimum(epoch_begin + self.per_epoch, stretch_begin + size)
        pairs = np.empty_like(numbers)
        for begin in np.unique(begins):
            in_stretch = begins == begin
            end = int(ends[in_stretch][0])
            pairs[in_stretch] = self.order_of_stretch(int(begin), end)[numbers[in_stretch] - begin]
        return pairs

    def _order_of_stretch(self, begin: int, end: int) -> np.ndarray:
        """Return the pairs for the numbers of a stretch, (end - begin,) int64: sorted by length,
        cut into steps, and the steps in a seeded order."""
        pairs = super().starts_of(np.arange(begin, end))
        pairs = pairs[np.argsort(self.columns[pairs], kind="stable")]
        first = begin - begin % self.pairs_per_step  # of the step that it begins with
        borders = np.arange(first, end + self.pairs_per_step, self.pairs_per_step)
        sizes = np.diff(borders.clip(begin, end))
        keys = hash_words(8, "lengths", self.seed, self.source_number, begin)
        # Group k, the k-th shortest, becomes step step_of_group[k], and is as large as that step:
        # the first and the last one may be smaller.
        step_of_group = permute(np.arange(len(sizes)), len(sizes), keys)
        groups = np.split(pairs, np.cumsum(sizes[step_of_group])[:-1])
        group_of_step = np.argsort(step_of_group)  # the inverse of a permutation
        return np.concatenate([groups[k] for k in group_of_step])


# ---- the sources of a run --------------------------------------------------------------------


class PairCorpus(RowCorpus):
    """The pairs that a `data` string names. train, val: Pairs. Raise UserError.

    n_pairs: of train and val; `PairBatch.number` counts through them, train first. fingerprint: of
    all, in that order.
    """

    n_pairs = 0

    @property
    def fingerprint(self) -> str:
        digests = [pairs.fingerprint for pairs in (*self.train, *self.val.values())]
        return fingerprint_of(digests, self.tokenizer.chat_fingerprint())

    def reader(self) -> PairReader:
        return PairReader(self.tokenizer, self.block_size)

    def lay_out(self, name: str, items: list[PairIds]) -> Pairs:
        pairs = Pairs(items, self.tokenizer, self.block_size, name, self.n_pairs)
        self.n_pairs += pairs.n_rows
        return pairs

    def sampler(self, source: int, seed: int, samples_per_step: int) -> LengthSampler:
        return LengthSampler(self.train[source].columns, samples_per_step, seed, source)

    def batch(self, data: Sequence[Pairs], numbers: np.ndarray) -> PairBatch:
        return load_pairs(data, numbers)

    def val_starts(self, data: Pairs) -> np.ndarray:
        return by_length([data])

    def all_batches(
        self, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> Iterator[PairBatch]:
        """Yield this rank's part of batches, by length, of every pair of train and val once."""
        # short ones together: there is no order to keep, and less padding
        splits = [*self.train, *self.val.values()]
        places = [(data, number) for data in splits for number in range(data.n_rows)]
        order = by_length(splits)
        for chosen in spread(len(order), batch_size, 0, rank, world_size):
            of_batch, numbers = zip(*(places[k] for k in order[chosen]), strict=True)
            yield load_pairs(of_batch, np.array(numbers))


def by_length(splits: Sequence[Pairs]) -> np.ndarray:
    """Return the numbers of the pairs of all splits, from the shortest one to the longest."""
    longer = np.concatenate([pairs.lengths.max(1) for pairs in splits])
    return np.argsort(longer, kind="stable")


# ---- single answers --------------------------------------------------------------------------


class LabelReader(PairReader):
    """Reads labelled answers, and pairs as two of them. An item is a list without `rejected`."""

    noun = "labelled answer or preference pair"
    kinds = ("preference", "chat")

    def item(self, row: object, place: str) -> tuple[str, list[PairIds]]:
        label = turns.label_of(row)
        if label is None:
            # a pair: the chosen answer is a good one, the rejected one a bad one
            text, pair = super().item(row, place)
            answers = []
            for ids, n, label in zip(pair[1:3], pair.n_unlearned, (1.0, -1.0), strict=True):
                prompt = np.concatenate([pair.prompt, ids[:n]])
                answers.append(PairIds(prompt, ids[n:], ids[:0], label))
            return text, answers

        messages, detail = row_formats.messages_of(row)
        if detail:
            raise BadRow(STRANGE, detail)
        every = [message | {"learn": True} for message in messages]  # the label is of the last one
        if problem := turns.chat_problem(every):
            raise BadRow(problem)
        *prompt, answer = turns.trim_chat(messages)
        if not turns.is_learned(answer) or not turns.is_learned(row, turns.ROW_WEIGHTS):
            raise BadRow("bad answer", "its weight is 0")
        if not prompt:
            raise BadRow("answer without a prompt")
        self.trimmed += len(messages) > len(prompt) + 1
        before, learned = tokenize_answer(prompt, answer["content"], self.tokenizer)
        self.check_length(len(before) + len(learned))
        self.count_not_written([*prompt, answer])
        ids = PairIds(before, learned, learned[:0], 1.0 if label else -1.0)
        return dialogue_text(prompt), [ids]


class LabelCorpus(PairCorpus):
    """The labelled answers that a `data` string names; see PairCorpus."""

    def reader(self) -> LabelReader:
        return LabelReader(self.tokenizer, self.block_size)

    def lay_out(self, name: str, items: list[list[PairIds]]) -> Pairs:
        # a pair was one item, so that both of its answers are in one split
        answers = [answer for item in items for answer in item]
        n = range(len(answers))
        pairs = super().lay_out(name, [with_other(answers, i, self.block_size, name) for i in n])
        pairs.n_used = pairs.lengths[:, 0]  # learned is from the answer, not from the other one
        return pairs

    side = 1  # of the pairs: 1 = the answers, 2 = those to other prompts

    def load(self, sources: np.ndarray, numbers: np.ndarray) -> PairBatch:
        """Return the micro-batch of these answers."""
        return load_pairs([self.train[k] for k in sources], numbers, sides=(self.side,))

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


def with_other(answers: Sequence[PairIds], i: int, longest: int, name: str) -> PairIds:
    """Return answer i with an answer to another prompt, cut where the context ends.

    The search begins half the rows further on: neighbours may have the same prompt or subject."""
    n, prompt = len(answers), answers[i].prompt
    for k in range(n):
        other = answers[(i + n // 2 + k) % n]
        if not np.array_equal(other.prompt, prompt):
            return answers[i]._replace(rejected=other.chosen[: longest - len(prompt)])
    need = "kto needs answers to two prompts at least, for training and for validation"
    how = "give more rows, or raise val_fraction until two prompts are held out"
    raise UserError(f"data: {name}: {need}; {how}")
