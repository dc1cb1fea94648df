"""Preference pairs in batches: the data of dpo.py and reward.py.

    --data='pairs.jsonl,hh.json.gz'        # raw files in any format of row_formats.py, weighted by their pairs
    --data='data/x=0.7,pairs/*.jsonl=0.3'  # a directory of prepare.py --kind=preference, and a glob

Both sides of a pair have the same prompt, rendered up to the opened turn of the assistant. An answer is its text and
<|im_end|>, where generation stops. Left out: a pair whose longer side does not fit in block_size, and one whose row
says that an answer was cut off. A row may have a number `margin`: how much better the chosen answer is, on any scale.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from groundup.files import row_formats, text_keys, usable
from groundup.files.splits import dialogue_text
from groundup.tokens.batches import in_each
from groundup.tokens.chat_files import fingerprint_of, sha256_of
from groundup.tokens.conversations import columns_for
from groundup.tokens.corpus import RowCorpus, spread
from groundup.tokens.mixture import Mixture, Sampler, hash_words, permute
from groundup.tokens.row_reader import STRANGE, RowReader, Unusable
from groundup.tokens.token_files import token_dtype
from tokenizer import Tokenizer

WINDOW = 64  # batches of the seeded order within which pairs are sorted by length
PROBLEMS = {  # of row_formats.pair_of, as they are counted; others mean that the row was not understood
    "empty answer": "empty answer",
    "chosen and rejected are the same": "equal answers",
    "chosen and rejected answer different prompts": "different prompts",
}


# ---- one pair --------------------------------------------------------------------------------------------------------


class Tokenized(NamedTuple):
    """A pair as ids, each array 1-D of the vocabulary's type."""

    prompt: np.ndarray  # up to and with the opened turn of the assistant
    chosen: np.ndarray  # the answer and <|im_end|>
    rejected: np.ndarray
    margin: float = 0.0


def tokenize(pair: usable.Pair, tokenizer: Tokenizer) -> Tokenized:
    """Return the ids of a pair: its text cannot open or close a turn, see `Tokenizer.render`."""
    dtype = token_dtype(tokenizer.vocab_size)
    prompt, _ = tokenizer.render(pair.prompt, add_generation_prompt=True)
    answers = ([*tokenizer.encode(answer), tokenizer.turn_end_id] for answer in (pair.chosen, pair.rejected))
    return Tokenized(*(np.array(ids, dtype) for ids in (prompt, *answers)))


def read_pair(row: object) -> usable.Pair:
    """Return the pair in a row of any format. Raise Unusable."""
    pair, detail = row_formats.pair_of(row)
    if not pair:
        reason = PROBLEMS.get(detail, STRANGE)
        raise Unusable(reason, detail if reason == STRANGE else "")
    if problem := usable.pair_problem(row, pair):
        raise Unusable(problem)
    return pair


class PairReader(RowReader):
    """Reads pairs as ids; longest: the block_size that each side must fit in."""

    kind, noun, split_by_prompt = "preference", "preference pair", True

    def item(self, row: object, place: str) -> tuple[str, Tokenized]:
        pair = read_pair(row)
        ids = tokenize(pair, self.tokenizer)
        length = len(ids.prompt) + max(len(ids.chosen), len(ids.rejected))
        if length > self.longest:
            raise Unusable(f"does not fit in block_size={self.longest}", f"{length} tokens")
        if np.array_equal(ids.chosen, ids.rejected):
            raise Unusable("equal answers", "as tokens")
        margin = text_keys.as_score(row, "margin")
        return dialogue_text(pair.prompt), ids._replace(margin=margin if math.isfinite(margin) else 0.0)


# ---- many pairs ------------------------------------------------------------------------------------------------------


class Pairs:
    """The pairs of one split of one source. mixture.Sampler(packed=True) addresses pair i by i * (block_size + 1).

    lengths: (n, 2) int64, ids of the prompt with each answer. columns: (n,) int64, the T of a batch of this pair alone.
    margin: (n,) float32. first: the number of pair 0 in its corpus. n_rows, n_labels, n_used, n_tokens: see
    conversations.Rows; a row is a pair.
    """

    packed, counts = True, {}

    def __init__(
        self, found: Sequence[Tokenized], tokenizer: Tokenizer, block_size: int, name: str, first: int = 0
    ) -> None:
        dtype = token_dtype(tokenizer.vocab_size)
        parts = [part for pair in found for part in pair[:3]]
        self.tokens = np.concatenate([np.zeros(0, dtype), *parts])
        self.offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        self.margin = np.array([pair.margin for pair in found], np.float32)
        self.name, self.block_size, self.pad_id, self.first = name, block_size, max(tokenizer.pad_id, 0), first
        sizes = np.diff(self.offsets).reshape(-1, 3)
        self.lengths = sizes[:, :1] + sizes[:, 1:]
        self.columns = columns_for(self.lengths.max(1), block_size) if found else np.zeros(0, np.int64)
        self.n_rows, self.n_tokens = len(found), len(found) * (block_size + 1)
        self.n_labels, self.n_used = sizes[:, 1:].sum(1), self.lengths.sum(1)
        no_column = np.full(len(found), np.nan, np.float32)  # of a former key; runs of that time resume
        arrays = self.tokens, self.offsets, self.margin, no_column
        digests = [*map(sha256_of, arrays), str(block_size)]
        self.fingerprint = fingerprint_of(digests, tokenizer.chat_fingerprint())

    def ids(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (prompt, chosen, rejected) of pair i."""
        begin, middle, late, end = self.offsets[3 * i : 3 * i + 4].tolist()
        return self.tokens[begin:middle], self.tokens[middle:late], self.tokens[late:end]


class PairBatch(NamedTuple):
    """B pairs: B rows with the chosen answers, then B rows with the rejected ones in the same order, padded on the
    right to T, and the n positions whose next token belongs to an answer. Of one side only: B rows instead of 2B."""

    x: torch.Tensor  # (2B, T) int64, up to and including the <|im_end|> of the answer
    index: torch.Tensor  # (n,) int64: positions in the flat x, ascending
    targets: torch.Tensor  # (n,) int64: the tokens that follow them
    row: torch.Tensor  # (n,) int64: their rows, of 2B
    lengths: torch.Tensor  # (2B,) int64: tokens of each row; the last is <|im_end|>
    number: torch.Tensor  # (B,) int64: of each pair in its corpus
    margin: torch.Tensor  # (B,) float32, 0 where there is none

    def to(self, device: str | torch.device) -> "PairBatch":
        return in_each(self, lambda tensor: tensor.to(device, non_blocking=True))


def load_pairs(
    splits: Sequence[Pairs], sources: np.ndarray, rows: np.ndarray, side_numbers: tuple[int, ...] = (1, 2)
) -> PairBatch:
    """Return the batch whose pair i is the rows[i]-th of splits[sources[i]]. T is the longest row's length, rounded up
    by `columns_for`. side_numbers: 1 = the chosen, 2 = the rejected answers."""
    places = [(splits[source], row) for source, row in zip(sources.tolist(), rows.tolist(), strict=True)]
    found = [pairs.ids(row) for pairs, row in places]
    sides = [(ids[0], ids[side]) for side in side_numbers for ids in found]  # the chosen first
    n_columns = max(int(pairs.columns[row]) for pairs, row in places)
    x = np.full((len(sides), n_columns), splits[0].pad_id, np.int64)
    learned, lengths = np.zeros(x.shape, bool), np.empty(len(sides), np.int64)
    for b, (prompt, answer) in enumerate(sides):
        lengths[b] = end = len(prompt) + len(answer)
        x[b, : len(prompt)], x[b, len(prompt) : end] = prompt, answer
        learned[b, len(prompt) - 1 : end - 1] = True
    index = np.flatnonzero(learned)
    number = np.array([pairs.first + row for pairs, row in places], np.int64)
    margin = np.array([pairs.margin[row] for pairs, row in places], np.float32)
    arrays = x, index, x.reshape(-1)[index + 1], index // n_columns, lengths, number, margin
    return PairBatch(*map(torch.from_numpy, arrays))


# ---- the order -------------------------------------------------------------------------------------------------------


class ByLength:
    """The order of a sampler, with pairs of similar length brought together so that batches need little padding.

    An epoch is cut into windows of WINDOW batches. Within a window, the pairs are sorted by T (eight values) and cut
    into batches, which come in a seeded order, so that long and short ones alternate. Every epoch has each pair once
    and forms other batches. With one source these are the batches of the steps.

    columns: (n,) int64, T of each pair. batch: pairs per step.
    """

    def __init__(self, sampler: Sampler, columns: np.ndarray, batch: int, seed: int, source: int) -> None:
        self.sampler, self.columns, self.batch, self.seed, self.source = sampler, columns, batch, seed, source
        self.n_windows, self.stride = len(columns), sampler.block_size + 1
        self.sorted = lru_cache(maxsize=8)(self._sorted)  # two threads ask for the same windows many times

    def start(self, number: np.ndarray) -> np.ndarray:
        """See Sampler.start."""
        number = np.asarray(number, dtype=np.int64)
        starts = np.empty_like(number)
        epoch = number // self.n_windows * self.n_windows  # its first number; no window holds two epochs
        size, aligned = WINDOW * self.batch, epoch - epoch % self.batch  # windows begin with a step
        window = aligned + (number - aligned) // size * size
        begins, ends = np.maximum(epoch, window), np.minimum(epoch + self.n_windows, window + size)
        for begin in np.unique(begins):
            now = begins == begin
            starts[now] = self.sorted(int(begin), int(ends[now][0]))[number[now] - begin]
        return starts

    def _sorted(self, begin: int, end: int) -> np.ndarray:
        """Return the starts for the numbers of a window, (end - begin,) int64."""
        rows = self.sampler.start(np.arange(begin, end)) // self.stride
        rows = rows[np.argsort(self.columns[rows], kind="stable")]
        borders = np.arange(begin - begin % self.batch, end + self.batch, self.batch).clip(begin, end)
        sizes = np.diff(borders)
        order = permute(np.arange(len(sizes)), len(sizes), hash_words(8, "lengths", self.seed, self.source, begin))
        batches = np.split(rows, np.cumsum(sizes[order])[:-1])
        return np.concatenate([batches[k] for k in np.argsort(order)]) * self.stride


# ---- the sources of a run --------------------------------------------------------------------------------------------


class PairCorpus(RowCorpus):
    """The pairs that a `data` string names. train, val: Pairs. Raise UserError.

    n_pairs: of train and val; `PairBatch.number` counts through them, train first. fingerprint: of all, in that order.
    """

    def __init__(
        self, spec: str, tokenizer: Tokenizer, block_size: int, seed: int, val_data: str = "",
        val_fraction: float = 0.02,
    ) -> None:  # fmt: skip
        self.tokenizer, self.block_size, self.seed, self.n_pairs = tokenizer, block_size, seed, 0
        self.open(spec, val_data, val_fraction)
        digests = [pairs.fingerprint for pairs in (*self.train, *self.val.values())]
        self.fingerprint = fingerprint_of(digests, tokenizer.chat_fingerprint())

    def reader(self) -> PairReader:
        return PairReader(self.tokenizer, self.block_size)

    def lay_out(self, name: str, items: list[Tokenized]) -> Pairs:
        pairs = Pairs(items, self.tokenizer, self.block_size, name, self.n_pairs)
        self.n_pairs += pairs.n_rows
        return pairs

    def order(self, seed: int, samples_per_step: int, max_steps: int, max_epochs: str = "") -> Mixture:
        """See Corpus.order; pairs of similar length come together."""
        order = super().order(seed, samples_per_step, max_steps, max_epochs)
        order.samplers = [
            ByLength(sampler, pairs.columns, samples_per_step, seed, k)
            for k, (sampler, pairs) in enumerate(zip(order.samplers, self.train, strict=True))
        ]
        return order

    def load(self, sources: np.ndarray, starts: np.ndarray) -> PairBatch:
        """Return the micro-batch of these pairs, for `Batches`."""
        return load_pairs(self.train, sources, starts // (self.block_size + 1))

    def valid(self, sources: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return ones (n,) int64, for `Batches`: the loss of a step is the mean over its pairs."""
        return np.ones(len(starts), np.int64)

    def val_batches_of(
        self, data: Pairs, batch_size: int, eval_steps: int, rank: int, world_size: int
    ) -> Iterator[PairBatch]:
        return batches_by_length([data], batch_size, eval_steps, rank, world_size)

    def all_batches(self, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[PairBatch]:
        """Yield this rank's share of batches, by length, of every pair of train and val once."""
        return batches_by_length([*self.train, *self.val.values()], batch_size, 0, rank, world_size)


def batches_by_length(
    splits: Sequence[Pairs], batch_size: int, eval_steps: int = 0, rank: int = 0, world_size: int = 1
) -> Iterator[PairBatch]:
    """Yield this rank's share of eval_steps batches (0 = all) of the pairs of `splits`, by length, spread evenly."""
    sources = np.repeat(np.arange(len(splits)), [pairs.n_rows for pairs in splits])
    rows = np.concatenate([np.arange(pairs.n_rows) for pairs in splits])
    by_length = np.argsort(np.concatenate([pairs.lengths.max(1) for pairs in splits]), kind="stable")
    for places in spread(len(rows), batch_size, eval_steps, rank, world_size):
        chosen = by_length[places]
        yield load_pairs(splits, sources[chosen], rows[chosen])
