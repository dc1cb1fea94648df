"""Preference pairs in batches, and the sources of a run: what dpo.py and reward.py train on.

    --data='pairs.jsonl,hh.json.gz'        # raw files of any shape of shapes.py, in proportion to their pairs
    --data='data/x=0.7,pairs/*.jsonl=0.3'  # a directory of prepare.py --kind=preference, and a glob

Both sides of a pair have the very same prompt, rendered up to the opened turn of the assistant. An answer is its text
and <|im_end|>, at which generation stops; the newline behind that is nobody's choice. A pair whose longer side does not
fit in block_size is left out: of two answers, one without its end is no answer; so is one whose row says that an
answer was cut off (shapes.is_unfinished). A row may have two numbers beside its texts: margin (how much better, of any
scale) and difficulty (what an easy-to-hard order goes by).
"""

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from groundup.errors import UserError
from groundup.files import readers, row_formats
from groundup.text.pipeline import Recipe, as_score, said, split_position
from groundup.text.selection import assign
from groundup.tokens.batches import eval_windows, in_each, spread
from groundup.tokens.chat_files import ROWS_FORMAT, Reader, fingerprint_of, sha256_of, untokenize
from groundup.tokens.conversations import ChatCorpus, names_of
from groundup.tokens.mixture import Curriculum, Mixture, Sampler, hash_words, parse_data_dir, parse_weights, permute
from groundup.tokens.token_files import token_dtype
from tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

WINDOW = 64  # batches of the seeded order among which pairs are sorted by length
PROBLEMS = {  # of shapes.pair_of, as they are counted; another one means that the row was not understood
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
    difficulty: float = math.nan  # the row has none


def tokenize(pair: row_formats.Pair, tokenizer: Tokenizer) -> Tokenized:
    """The ids of a pair: no text of it can open or close a turn, see `Tokenizer.render`."""
    dtype = token_dtype(tokenizer.vocab_size)
    prompt, _ = tokenizer.render(pair.prompt, add_generation_prompt=True)
    answers = ([*tokenizer.encode(answer), tokenizer.im_end_id] for answer in (pair.chosen, pair.rejected))
    return Tokenized(*(np.array(ids, dtype) for ids in (prompt, *answers)))


def pair_problem(row: object) -> tuple[row_formats.Pair | None, str, str]:
    """(pair, "", "") or (None, why it cannot be learnt from, more about that) of a row of any shape."""
    pair, detail = row_formats.pair_of(row)
    if not pair:
        reason = PROBLEMS.get(detail, "not understood")
        return None, reason, detail if reason == "not understood" else ""
    if pair.chosen.strip() == pair.rejected.strip():
        return None, "equal answers", "but for white space"
    if row_formats.is_unfinished(row, pair):
        return None, "unfinished answer", ""
    problem = row_formats.chat_problem([*pair.prompt, {"role": "assistant", "content": pair.chosen}])
    return (None, "prompt: " + problem, "") if problem else (pair, "", "")


# ---- many pairs ------------------------------------------------------------------------------------------------------


class Pairs:
    """The pairs of one split of one source. mixture.Sampler(packed=True) names pair i by i * (block_size + 1).

    lengths: (n, 2) int64, ids of the prompt with each answer. columns: (n,) int64, the T of a batch of this pair alone.
    margin, difficulty: (n,) float32. first: the number of pair 0 in its corpus. n_rows, n_labels, n_used, n_tokens: as
    of conversations.Rows, a row being a pair.
    """

    def __init__(
        self, found: Sequence[Tokenized], tokenizer: Tokenizer, block_size: int, name: str, first: int = 0
    ) -> None:
        dtype = token_dtype(tokenizer.vocab_size)
        parts = [part for pair in found for part in pair[:3]]
        self.tokens = np.concatenate([np.zeros(0, dtype), *parts])
        self.offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        self.margin = np.array([pair.margin for pair in found], np.float32)
        self.difficulty = np.array([pair.difficulty for pair in found], np.float32)
        self.name, self.block_size, self.pad_id, self.first = name, block_size, max(tokenizer.pad_id, 0), first
        sizes = np.diff(self.offsets).reshape(-1, 3)
        self.lengths = sizes[:, :1] + sizes[:, 1:]
        self.columns = columns_for(self.lengths.max(1), block_size) if found else np.zeros(0, np.int64)
        self.n_rows, self.n_tokens = len(found), len(found) * (block_size + 1)
        self.n_labels, self.n_used = sizes[:, 1:].sum(1), self.lengths.sum(1)
        arrays = self.tokens, self.offsets, self.margin, self.difficulty
        digests = [*map(sha256_of, arrays), str(block_size)]
        self.fingerprint = fingerprint_of(digests, tokenizer.fingerprint())

    def ids(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(prompt, chosen, rejected) of pair i."""
        begin, middle, late, end = self.offsets[3 * i : 3 * i + 4].tolist()
        return self.tokens[begin:middle], self.tokens[middle:late], self.tokens[late:end]

    def prompts(self) -> list[bytes]:
        """The ids of each pair's prompt, as what can be compared."""
        return [self.ids(i)[0].tobytes() for i in range(self.n_rows)]


def columns_for(length: np.ndarray, block_size: int) -> np.ndarray:
    """Lengths rounded up to an eighth of block_size: few shapes to compile, and classes to sort by."""
    step = -(-block_size // 8)
    return np.minimum(block_size, -(-length // step) * step)


class PairBatch(NamedTuple):
    """B pairs: B rows with the chosen answers, then B rows with the rejected ones in the same order, padded on the
    right to T, and the n places whose next token is of an answer."""

    x: "torch.Tensor"  # (2B, T) int64, up to and with the <|im_end|> of the answer
    index: "torch.Tensor"  # (n,) int64: places in the flat x, ascending
    targets: "torch.Tensor"  # (n,) int64: the tokens that follow them
    row: "torch.Tensor"  # (n,) int64: which of the 2B rows they are in
    lengths: "torch.Tensor"  # (2B,) int64: tokens of each row; the last is <|im_end|>
    number: "torch.Tensor"  # (B,) int64: of each pair in its corpus
    margin: "torch.Tensor"  # (B,) float32, 0 where there is none

    def to(self, device: "str | torch.device") -> "PairBatch":
        return in_each(self, lambda tensor: tensor.to(device, non_blocking=True))


def load_pairs(splits: Sequence[Pairs], sources: np.ndarray, rows: np.ndarray) -> PairBatch:
    """Pair i is the rows[i]-th of splits[sources[i]]. T is the longest row's, rounded by `columns_for`."""
    import torch

    places = [(splits[source], row) for source, row in zip(sources.tolist(), rows.tolist(), strict=True)]
    found = [pairs.ids(row) for pairs, row in places]
    sides = [(ids[0], ids[side]) for side in (1, 2) for ids in found]  # the chosen first
    n_columns = max(int(pairs.columns[row]) for pairs, row in places)
    x = np.full((len(sides), n_columns), splits[0].pad_id, np.int64)
    learnt, lengths = np.zeros(x.shape, bool), np.empty(len(sides), np.int64)
    for b, (prompt, answer) in enumerate(sides):
        lengths[b] = end = len(prompt) + len(answer)
        x[b, : len(prompt)], x[b, len(prompt) : end] = prompt, answer
        learnt[b, len(prompt) - 1 : end - 1] = True
    index = np.flatnonzero(learnt)
    number = np.array([pairs.first + row for pairs, row in places], np.int64)
    margin = np.array([pairs.margin[row] for pairs, row in places], np.float32)
    arrays = x, index, x.reshape(-1)[index + 1], index // n_columns, lengths, number, margin
    return PairBatch(*map(torch.from_numpy, arrays))


# ---- the order -------------------------------------------------------------------------------------------------------


class ByLength:
    """The order of a sampler with pairs of similar length brought together, so that batches need little padding.

    An epoch is cut into windows of WINDOW batches. Within one, the pairs are sorted by the T they need, of which there
    are eight, those of one T staying in the sampler's order; the sorted pairs are cut into batches, and these come in a
    seeded order, so that long and short ones alternate. Every epoch has each pair once and sorts others together.
    Batches of the one source of a run are exactly those of its steps. As in the sampler, number 10**9 costs what
    number 0 does.

    columns: (n,) int64, T of each pair. rows: (n,) int64, which pair each window of the sampler is.
    """

    def __init__(
        self, sampler: Sampler | Curriculum, columns: np.ndarray, rows: np.ndarray, batch: int, seed: int, source: int
    ) -> None:
        self.sampler, self.n_windows, self.columns, self.rows, self.batch = sampler, len(columns), columns, rows, batch
        self.seed, self.source = seed, source
        curriculum = isinstance(sampler, Curriculum)
        self.stride = (sampler.sampler if curriculum else sampler).block_size + 1
        self.borders = sampler.borders if curriculum else np.zeros(1, np.int64)  # epochs begin after the last one
        self.sorted = lru_cache(maxsize=8)(self._sorted)  # asked for again and again, by two threads

    def start(self, number: np.ndarray) -> np.ndarray:
        """As Sampler.start."""
        number = np.asarray(number, dtype=np.int64)
        starts = np.empty_like(number)
        begins, ends = self.windows(number)
        for begin in np.unique(begins):
            now = begins == begin
            starts[now] = self.sorted(int(begin), int(ends[now][0]))[number[now] - begin]
        return starts

    def windows(self, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(first number, last number + 1) of the window that each number is in, no two epochs in one window."""
        last = self.borders[-1]
        part = np.searchsorted(self.borders, number, side="right")
        epoch = (number - last) // self.n_windows
        begin = np.where(number < last, self.borders[part - 1], last + epoch * self.n_windows)
        end = np.where(number < last, self.borders[np.minimum(part, len(self.borders) - 1)], begin + self.n_windows)
        size = WINDOW * self.batch
        aligned = begin - begin % self.batch  # a step that two epochs share
        window = aligned + (number - aligned) // size * size
        return np.maximum(begin, window), np.minimum(end, window + size)

    def _sorted(self, begin: int, end: int) -> np.ndarray:
        """Starts of the numbers of a window, (end - begin,) int64."""
        rows = self.rows[self.sampler.start(np.arange(begin, end)) // self.stride]
        rows = rows[np.argsort(self.columns[rows], kind="stable")]
        borders = np.arange(begin - begin % self.batch, end + self.batch, self.batch).clip(begin, end)
        sizes = np.diff(borders)
        order = permute(np.arange(len(sizes)), len(sizes), hash_words(8, "lengths", self.seed, self.source, begin))
        batches = np.split(rows, np.cumsum(sizes[order])[:-1])
        return np.concatenate([batches[k] for k in np.argsort(order)]) * self.stride


class StepsByLength(Mixture):
    """A mixture whose steps have their samples by T: what several sources give to one step differs in length, and so
    each micro-batch gets what is alike.

    columns: T of each pair, of each source. batch: samples per step. stride: between the starts of two pairs.
    """

    def __init__(self, order: Mixture, stages: list, columns: list[np.ndarray], batch: int, stride: int) -> None:
        super().__init__(order.samplers, order.seed, stages, order.names, order.limits.tolist())
        self.columns, self.batch, self.stride = columns, batch, stride

    def start(self, sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As Mixture.start."""
        steps, places = np.divmod(np.asarray(sample, dtype=np.int64), self.batch)
        found, which = np.unique(steps, return_inverse=True)
        which = which.reshape(steps.shape)
        sources, starts = super().start(found[:, None] * self.batch + np.arange(self.batch))
        columns = np.empty_like(starts)
        for source in np.unique(sources):
            columns[sources == source] = self.columns[source][starts[sources == source] // self.stride]
        by_length = np.argsort(columns, axis=1, kind="stable")[which, places]
        return sources[which, by_length], starts[which, by_length]


# ---- sources ---------------------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """What one path holds."""

    train: list[Tokenized]
    val: list[Tokenized]
    dropped: Counter  # rows that cannot be used, by reason
    places: list[str]  # "file:line: reason" of the first few of each reason


class PairReader(Reader):
    """Reads pairs out of files, counting what is left out."""

    def pairs(self, path: str, tokenizer: Tokenizer, block_size: int) -> Iterator[tuple[row_formats.Pair, Tokenized]]:
        for record in readers.read_records(path):
            self.n_read += 1
            pair, reason, detail, row = None, record.problem, record.detail, None
            if not reason:
                row = readers.mend(record.value)[0]
                pair, reason, detail = pair_problem(row)
                self.n_strange += reason == "not understood"
            if pair:
                ids = tokenize(pair, tokenizer)
                length = len(ids.prompt) + max(len(ids.chosen), len(ids.rejected))
                if length > block_size:
                    reason, detail = f"does not fit in block_size={block_size}", f"{length} tokens"
                elif np.array_equal(ids.chosen, ids.rejected):
                    reason, detail = "equal answers", "as tokens"
            if reason:
                self._drop(f"{path}:{record.line}", reason, detail)
                continue
            margin, difficulty = as_score(row, "margin"), as_score(row, "difficulty")
            yield pair, ids._replace(margin=margin if math.isfinite(margin) else 0.0, difficulty=difficulty)

    def check(self, name: str, n_found: int) -> None:
        """Raise DataError if there is nothing to train on."""
        if n_found:
            return
        first = f"; first: {self.places[0].split('; preference is known by')[0]}" if self.places else ""
        if self.n_read == self.n_strange:
            tried = " | ".join(shape.keys for shape in row_formats.SHAPES["preference"])
            raise UserError(f"data: {name} holds no preference pairs{first}; tried, by their keys: {tried}")
        reasons = ", ".join(f"{n} {reason}" for reason, n in self.dropped.items())
        raise UserError(f"data: {name} holds no usable pair ({reasons}){first}")


def read_source(path: str, tokenizer: Tokenizer, block_size: int, val_fraction: float) -> Source:
    """The pairs of a raw file, a glob, a directory of raw files or one of prepare.py. Raises DataError."""
    if (Path(path) / "manifest.json").exists():
        return read_prepared(Path(path), tokenizer, block_size)
    return read_raw(path, tokenizer, block_size, val_fraction)


def read_raw(path: str, tokenizer: Tokenizer, block_size: int, val_fraction: float) -> Source:
    """Of raw files, split by a hash of the prompt: val_fraction of the prompts are val, with all their pairs."""
    reader, found, positions = PairReader(), [], []
    for file in readers.find_files(path):
        for pair, ids in reader.pairs(file, tokenizer, block_size):
            found.append(ids)
            positions.append(split_position(said(pair.prompt).encode()))
    reader.check(path, len(found))
    recipe = Recipe(kind="preference", val_fraction=val_fraction)
    splits, _ = assign(np.array(positions, np.uint64), recipe)
    train, val = (list(itertools.compress(found, splits == k)) for k in (0, 1))
    return Source(train, val, reader.dropped, reader.places)


def read_prepared(directory: Path, tokenizer: Tokenizer, block_size: int) -> Source:
    """Of a directory of prepare.py --kind=preference: its train.jsonl and val.jsonl."""
    entries, reader, found = read_splits(directory), PairReader(), []
    for split in ("train", "val"):
        path = str(directory / entries[split]["file"]) if split in entries else ""
        found.append([ids for _, ids in reader.pairs(path, tokenizer, block_size)] if path else [])
    reader.check(str(directory), sum(map(len, found)))
    return Source(*found, reader.dropped, reader.places)


def read_splits(directory: Path) -> dict[str, dict]:
    """What manifest.json says of each split. Raises DataError: another kind, damaged."""
    try:
        manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        kind, splits = manifest["kind"] if manifest["format"] == ROWS_FORMAT else "text", manifest["splits"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"data: {directory}/manifest.json is damaged ({error!r}); rerun prepare.py") from None
    if kind != "preference":
        raise UserError(f"data: {directory} was prepared with kind={kind!r}, not 'preference': it holds no pairs")
    return splits


class PairCorpus(ChatCorpus):
    """The sources that a `data` string names (mixture.py has its syntax), as pairs; see conversations.ChatCorpus.

    names: what the log calls them. train: their Pairs. val: Pairs to evaluate by name: those of val_data if it is
    given, else the sources' validation splits, where they have one. n_pairs: of all these; `PairBatch.number` counts
    through them, train first. fingerprint: of all of them, in that order. Raises DataError.
    """

    def __init__(
        self, spec: str, tokenizer: Tokenizer, block_size: int, seed: int, val_data: str = "",
        val_fraction: float = 0.02,
    ) -> None:  # fmt: skip
        self.tokenizer, self.block_size, self.seed = tokenizer, block_size, seed
        stages = parse_data_dir(spec, "data")
        self.paths = list(dict.fromkeys(path for stage in stages for path in stage.weights))
        self.names = names_of(self.paths)
        fraction = 0.0 if val_data else val_fraction
        self.found = [read_source(path, tokenizer, block_size, fraction) for path in self.paths]
        self.val_weights = parse_weights(val_data, val_data, "val_data") if val_data else {}
        self.others = [read_source(path, tokenizer, block_size, 0.0) for path in self.val_weights]
        self.n_pairs = 0
        self.train = [self._count(found.train, name) for name, found in zip(self.names, self.found, strict=True)]
        for pairs in self.train:
            check_pairs(pairs)
        held_out = [one.val or one.train for one in self.others] if val_data else [one.val for one in self.found]
        names = names_of(list(self.val_weights)) if val_data else self.names
        val = [self._count(found, name) for name, found in zip(names, held_out, strict=True)]
        self.val = {pairs.name: pairs for pairs in val if pairs.n_rows}
        self.no_val = [pairs.name for pairs in val if not pairs.n_rows]
        self.stages = [(stage.first_step, self._weights(stage.weights)) for stage in stages]
        digests = [pairs.fingerprint for pairs in (*self.train, *self.val.values())]
        self.fingerprint = fingerprint_of(digests, tokenizer.fingerprint())

    def _count(self, found: list[Tokenized], name: str) -> Pairs:
        pairs = Pairs(found, self.tokenizer, self.block_size, name, self.n_pairs)
        self.n_pairs += pairs.n_rows
        return pairs

    def order(
        self, seed: int, samples_per_step: int, max_steps: int, max_epochs: str = "", competence: float = 1.0,
        competence_steps: int = 0, competence_schedule: str = "sqrt",
    ) -> Mixture:  # fmt: skip
        """Which pair every sample is. With competence < 1, for competence_steps steps easy pairs come first, see
        mixture.Curriculum. Raises DataError if max_epochs lets the data end before max_steps, or for pairs without a
        difficulty."""
        order = super().order(seed, samples_per_step, max_steps, max_epochs)
        samplers, rows = order.samplers, [np.arange(pairs.n_rows) for pairs in self.train]
        if competence < 1:
            counts = order.counts(competence_steps * samples_per_step).tolist()
            samplers = [
                Curriculum(sampler, n, competence, competence_schedule)
                for sampler, n in zip(samplers, counts, strict=True)
            ]
            rows = list(map(easy_first, self.train))
        order.samplers = [
            ByLength(sampler, pairs.columns, rows[k], samples_per_step, seed, k)
            for k, (sampler, pairs) in enumerate(zip(samplers, self.train, strict=True))
        ]
        if len(self.train) == 1:
            return order
        stages = [(step * samples_per_step, weights) for step, weights in self.stages]
        columns = [pairs.columns for pairs in self.train]
        return StepsByLength(order, stages, columns, samples_per_step, self.block_size + 1)

    def load(self, sources: np.ndarray, starts: np.ndarray) -> PairBatch:
        """The micro-batch of these pairs, for data.Batches."""
        return load_pairs(self.train, sources, starts // (self.block_size + 1))

    def valid(self, sources: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """(n,) int64 of ones, for data.Batches: the loss of a step is the mean over its pairs."""
        return np.ones(len(starts), np.int64)

    def describe(self, order: Mixture, n_samples: int) -> tuple[str, list[str]]:
        """How often n_samples pairs go through each source; lines that warn."""
        text, lines = super().describe(order, n_samples)
        return text.replace(" rows", " pairs"), lines

    def val_batches(
        self, batch_size: int, eval_steps: int, rank: int = 0, world_size: int = 1
    ) -> dict[str, Iterator[PairBatch]]:
        """As data.Corpus.val_batches; the pairs go by length."""
        found = {}
        for k, (name, pairs) in enumerate(self.val.items()):
            steps, first = eval_windows(k, len(self.val), eval_steps, rank, world_size)
            found[name] = batches_by_length([pairs], batch_size, steps, first, world_size)
        return found

    def all_batches(self, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[PairBatch]:
        """This rank's share of batches of every pair of train and val once, by length: for what is computed of all of
        them beforehand, under their numbers."""
        return batches_by_length([*self.train, *self.val.values()], batch_size, 0, rank, world_size)

    def prompts(self, n: int) -> list[tuple[list[dict], str]]:
        """(messages, the chosen answer) of n validation pairs, from all sources in turn."""
        of_each = [[pairs.ids(i) for i in range(min(n, pairs.n_rows))] for pairs in self.val.values()]
        found = [ids for turn in itertools.zip_longest(*of_each) for ids in turn if ids][:n]
        return [
            (untokenize(prompt, self.tokenizer), self.tokenizer.decode(chosen[:-1].tolist()))
            for prompt, chosen, _ in found
        ]

    def report(self) -> list[str]:
        """Lines for people: what there is of each source, and what became of the rest."""
        others = zip(names_of(list(self.val_weights)), self.others, strict=True)
        lines = super().report() + [line for name, found in others for line in left_out(name, found)]
        trained = set().union(*(pairs.prompts() for pairs in self.train))
        for name, pairs in self.val.items():
            if n := sum(prompt in trained for prompt in pairs.prompts()):
                lines.append(f"warning     {n:,} of {pairs.n_rows:,} validation pairs of {name} have a trained prompt")
        return lines

    def _report(self, pairs: Pairs, found: Source) -> Iterator[str]:
        chosen, rejected = np.diff(pairs.offsets).reshape(-1, 3)[:, 1:].mean(0).tolist()
        yield (
            f"{pairs.name}: {pairs.n_rows:,} pairs for training, {len(found.val):,} held out; {pairs.n_used.sum():,} "
            f"tokens, {pairs.n_labels.sum():,} of them in answers, on average {chosen:.1f} chosen and {rejected:.1f} "
            "rejected"
        )
        yield from left_out(pairs.name, found)


def left_out(name: str, found: Source) -> list[str]:
    """Lines for people: how many rows cannot be used and why, and where the first of them are."""
    return [*(f"{name}: {count:,} left out: {reason}" for reason, count in found.dropped.items()), *found.places]


def check_pairs(pairs: Pairs) -> None:
    """Raise DataError if a source has nothing to train on."""
    if not pairs.n_rows:
        raise UserError(f"data: nothing to train on in {pairs.name}: its training split is empty")


def easy_first(pairs: Pairs) -> np.ndarray:
    """Pairs by difficulty, (n,) int64. Raises DataError if one has none."""
    if bare := int(np.isnan(pairs.difficulty).sum()):
        raise UserError(f"data: {bare} of {pairs.n_rows} pairs in {pairs.name} have no number under 'difficulty'")
    return np.argsort(pairs.difficulty, kind="stable")


def batches_by_length(
    splits: Sequence[Pairs], batch_size: int, eval_steps: int = 0, rank: int = 0, world_size: int = 1
) -> Iterator[PairBatch]:
    """This rank's share of eval_steps batches of the pairs of `splits`, by length and spread evenly; 0: of all."""
    sources = np.repeat(np.arange(len(splits)), [pairs.n_rows for pairs in splits])
    rows = np.concatenate([np.arange(pairs.n_rows) for pairs in splits])
    by_length = np.argsort(np.concatenate([pairs.lengths.max(1) for pairs in splits]), kind="stable")
    for places in spread(len(rows), batch_size, eval_steps, rank, world_size):
        chosen = by_length[places]
        yield load_pairs(splits, sources[chosen], rows[chosen])
