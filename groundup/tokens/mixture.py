"""The data of a run: its sources, mixed into one order of samples, computed from the seed alone.

    data_dir='data/x'                                      # all its sources, by their own weights
    data_dir='data/a=0.7,data/x/wiki=0.3'                  # 70 % of the samples are from a
    data_dir='0: data/a=1; 8000: data/a=0.5,data/b=0.5'    # stages: the second after 8000 steps

A sample is one training sequence: sample number -> source -> where it starts there, which is the
offset of its first token or, if the source consists of rows, the number of its row. Sample i is the
same on any number of processes and takes equally long to find for any i, so a run resumes anywhere
without stored state.

`pack_rows` says which documents share a row. `Corpus` is what all trainers share: batches.py has
the one of pretrain.py, conversations.py of sft.py, pairs.py those of dpo.py and reward.py,
prompts.py the one of rl.py.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from groundup.errors import UserError
from groundup.files.paths import split_names, split_weight

CYCLE = 1024  # samples within which the sources have their exact proportions


# ---- the settings data_dir and max_epochs ----------------------------------------------------


class Stage(NamedTuple):
    first_step: int  # number of steps before it
    weights: dict[str, float | None]  # by path; None = the user gave none


def parse_data_dir(spec: str, key: str = "data_dir") -> list[Stage]:
    """Return the stages in the value `spec` of the setting `key`. Raise UserError."""
    stages = []
    for part in spec.split(";"):
        step, colon, paths = re.fullmatch(r"\s*(?:(\d+)\s*(:))?(.*)", part, re.DOTALL).groups()
        if not colon and ";" in spec:
            problem = f"{part.strip()!r} in {key}={spec!r} has no first step"
            raise UserError(f"data: {problem}; write '0: a=1; 8000: b=1'")
        stages.append(Stage(int(step or 0), parse_weights(paths, spec, key)))
    steps = [stage.first_step for stage in stages]
    if steps != sorted({0, *steps}):
        problem = f"stages of {key}={spec!r} begin at steps {steps}"
        raise UserError(f"data: {problem}; begin at 0 and go up")
    return stages


def parse_weights(text: str, spec: str, key: str = "data_dir") -> dict[str, float | None]:
    """Return {'data/a': 0.7, 'data/b': 0.3} of 'data/a=0.7,data/b=0.3'. Raise UserError."""
    weights: dict[str, float | None] = {}
    for part in split_names(text):
        path, number = split_weight(part)
        weight = parse_number(number) if number else None
        named = f"{part!r} in {key}={spec!r}"
        if not path or (number and weight is None):
            raise UserError(f"data: {named} is not 'path' or 'path=weight above 0'")
        if path in weights:
            raise UserError(f"data: {path!r} comes twice in {key}={spec!r}; add its weights up")
        weights[path] = weight
    bare = [path for path, weight in weights.items() if weight is None]
    if 0 < len(bare) < len(weights):
        problem = f"{bare[0]!r} in {key}={spec!r} has no weight but others have"
        raise UserError(f"data: {problem}; weigh all or none")
    return weights


def parse_number(text: str) -> float | None:
    """Return the finite number above 0 that `text` is, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


# ---- permutation -----------------------------------------------------------------------------


def hash_words(count: int, *parts: int | str) -> np.ndarray:
    """Return `count` pseudo-random uint64 made from the parts, the same on every machine."""
    return np.frombuffer(hashlib.shake_256(repr(parts).encode()).digest(8 * count), dtype="<u8")


def permute(index: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Map int64 in [0, n), of any shape, by a pseudo-random bijection of [0, n), without a table.

    A Feistel network (Luby and Rackoff, 1988): (left, right) -> (right, left ^ f(right)) is
    invertible for any f. It permutes a power of four; a result >= n is fed in again until it is
    below n ("cycle walking", Black and Rogaway 2002), on average fewer than four times. keys: one
    per round. With four rounds the 24 orders of n = 4 are visibly not uniform; use eight.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)

    def encrypt(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for key in keys:
            # the finaliser of splitmix64, wrapping modulo 2**64
            f = (right ^ key) * np.uint64(0xBF58476D1CE4E5B9)
            f = (f ^ (f >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            f ^= f >> np.uint64(31)
            left, right = right, left ^ (f & mask)
        return (left << half) | right

    flat = encrypt(np.asarray(index, dtype=np.uint64).reshape(-1))
    while len(outside := np.flatnonzero(flat >= n)):
        flat[outside] = encrypt(flat[outside])
    return flat.astype(np.int64).reshape(np.shape(index))


# ---- rows of several documents ------------------------------------------------------------------


class Packing(NamedTuple):
    """Which piece of which document is in which row: int64, one element per piece, row by row."""

    document: np.ndarray
    begin: np.ndarray  # of the piece in its document, without the document's delimiter
    length: np.ndarray  # including the delimiter that opens the piece
    row: np.ndarray
    n_rows: int
    n_cut: int  # documents longer than a row

    @property
    def used(self) -> np.ndarray:
        """(n_rows,) tokens of each row that belong to documents."""
        return np.bincount(self.row, self.length, self.n_rows).astype(np.int64)

    @property
    def most_pieces(self) -> int:
        """The largest number of pieces in a row."""
        return int(np.bincount(self.row).max(initial=0))


def pack_rows(lengths: np.ndarray, row_tokens: int, seed: int) -> Packing:
    """Pack documents of `lengths` tokens (delimiter included) into rows of row_tokens.

    Best fit decreasing: the longest pieces first, equal ones in a seeded order, each to the fullest
    row with room (Ding et al. 2024, arXiv:2404.10830). A document longer than a row is cut into
    pieces, each opened by a delimiter.
    """
    room = row_tokens - 1  # after the delimiter
    content = np.asarray(lengths, dtype=np.int64) - 1
    n_pieces = np.maximum(1, -(-content // room))
    document = np.repeat(np.arange(len(content)), n_pieces)
    first_piece = np.cumsum(n_pieces) - n_pieces
    begin = room * (np.arange(len(document)) - first_piece[document])
    length = 1 + np.minimum(room, content[document] - begin)

    keys = hash_words(8, "pack", seed)
    shuffled = permute(np.arange(len(document)), len(document), keys)
    falling = np.lexsort((shuffled, -length))
    row = np.empty_like(document)
    row[falling] = best_fit(length[falling].tolist(), row_tokens)
    # by chance within a row: sorted by length, long pieces would always come first
    by_row = np.lexsort((shuffled, row))
    return Packing(
        document=document[by_row],
        begin=begin[by_row],
        length=length[by_row],
        row=row[by_row],
        n_rows=int(row.max(initial=-1)) + 1,
        n_cut=int((n_pieces > 1).sum()),
    )


def best_fit(lengths: list[int], row_tokens: int) -> list[int]:
    """Return the row of each piece in turn: that with the least sufficient room, or a new one."""
    rows: list[int] = []
    n_rows = 0
    with_room: list[list[int]] = [[] for _ in range(row_tokens + 1)]  # rows by the room left
    # Bit r is set if with_room[r] is not empty. The least r >= length is the lowest bit of a shift.
    rooms = 0
    for length in lengths:
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = row_tokens, n_rows
            n_rows += 1
        if room > length:
            with_room[room - length].append(row)
            rooms |= 1 << (room - length)
        rows.append(row)
    return rows


# ---- one source ------------------------------------------------------------------------------


class Sampler:
    """The order of one source: number of a sample within the source -> row.

    Each of the per_epoch rows comes once per epoch, in another order each time.
    source: the number of the source in the mixture.
    """

    def __init__(self, per_epoch: int, seed: int, source: int = 0) -> None:
        self.per_epoch = per_epoch
        self.seed = seed
        # a single source has the same order as the first of several
        self.source_words = (source,) if source else ()

    def starts_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return where these samples start, int64 of the same shape."""
        numbers = np.asarray(numbers, dtype=np.int64)
        epochs, positions = np.divmod(numbers, self.per_epoch)
        starts = np.empty_like(positions)
        for epoch in np.unique(epochs):
            now = epochs == epoch
            # eight keys of the permutation, and a number that moves the borders of windows
            words = hash_words(9, "windows", self.seed, int(epoch), *self.source_words)
            chosen = permute(positions[now], self.per_epoch, words[:8])
            starts[now] = self.place_of(chosen, int(words[8]))
        return starts

    def place_of(self, chosen: np.ndarray, random: int) -> np.ndarray:
        return chosen


class WindowSampler(Sampler):
    """The order of windows of block_size + 1 tokens of a long text; neighbours share one token.

    The borders of the windows move each epoch, so one window fewer than would fit is used."""

    def __init__(
        self, n_tokens: int, block_size: int, seed: int, source: int = 0, name: str = ""
    ) -> None:
        super().__init__((n_tokens - 1) // block_size - 1, seed, source)
        self.block_size = block_size
        if self.per_epoch < 1:
            few = f"{n_tokens} training tokens{f' of {name}' if name else ''} are too few"
            need = f"for block_size={block_size}, which needs {2 * block_size + 1}"
            raise UserError(f"data: {few} {need}; prepare more text or lower block_size")

    def place_of(self, chosen: np.ndarray, random: int) -> np.ndarray:
        return random % self.block_size + chosen * self.block_size


# ---- several sources -------------------------------------------------------------------------


def quotas(weights: np.ndarray) -> np.ndarray:
    """Return the samples (int64) of each source in a cycle, by largest remainder."""
    exact = weights / weights.sum() * CYCLE
    whole = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(-(exact - whole), kind="stable")  # the first of equal ones
    whole[by_remainder[: CYCLE - whole.sum()]] += 1
    return whole


class Segment(NamedTuple):
    """Consecutive samples with one pattern of sources.

    It is a stage, or a part of a stage that ends because a source is exhausted."""

    first: int  # its first sample
    quotas: np.ndarray  # (n_sources,) samples of each source in a cycle
    before: np.ndarray  # (n_sources,) samples of each source before `first`
    pattern: np.ndarray  # (CYCLE,) source of each sample of a cycle
    nth: np.ndarray  # (CYCLE,) how many earlier samples of the cycle have the same source

    def counts(self, n: int) -> np.ndarray:
        """Return (n_sources,): samples of each source among the first n of this segment."""
        cycles, rest = divmod(n, CYCLE)
        in_rest = np.bincount(self.pattern[:rest], minlength=len(self.quotas))
        return cycles * self.quotas + in_rest

    def reaches(self, source: int, n: int) -> int:
        """Return which sample of this segment (from 0) is the source's n-th (from 0)."""
        cycles, rest = divmod(n, int(self.quotas[source]))
        return cycles * CYCLE + int(np.flatnonzero(self.pattern == source)[rest])


class Mixture:
    """The order of all samples, with exact proportions of the sources in every CYCLE samples.

    samplers: one per source. stages: (first sample, weight of each source), ascending from 0.
    limits: most samples of each source. When a source is exhausted, the others take over its
    share. end: the sample at which all are exhausted, or None.
    """

    def __init__(
        self,
        samplers: Sequence[Sampler],
        seed: int,
        stages: Sequence[tuple[int, Sequence[float]]] = (),
        names: Sequence[str] = (),
        limits: Sequence[float] = (),
    ) -> None:
        self.samplers = list(samplers)
        self.names = list(names) or [str(source) for source in range(len(samplers))]
        self.seed = seed
        self.limits = np.array(limits or [math.inf] * len(samplers))
        self.end: int | None = None
        self.segments: list[Segment] = []
        stages = stages or [(0, [1.0] * len(samplers))]
        stops = [first for first, _ in stages[1:]] + [math.inf]
        before = np.zeros(len(samplers), dtype=np.int64)
        for (first, weights), stop in zip(stages, stops, strict=True):
            if self.end is None:
                before = self._add_stage(first, stop, np.array(weights, dtype=float), before)
        self.firsts = np.array([segment.first for segment in self.segments])

    def _add_stage(
        self, first: int, stop: float, weights: np.ndarray, before: np.ndarray
    ) -> np.ndarray:
        """Append the segments of samples [first, stop).

        before: samples of each source before `first`; return those before `stop`."""
        while first != stop:
            left = np.where(before < self.limits, weights, 0.0)
            if not left.any():
                self.end = first
                return before
            segment = self._segment(first, left, before)
            self.segments.append(segment)
            # the segment ends where the stage does, or where the first source is exhausted
            n = stop - first
            for source in np.flatnonzero(left):
                room = self.limits[source] - before[source]
                if room < math.inf:
                    n = min(n, segment.reaches(source, int(room)))
            if n == math.inf:
                return before
            first, before = first + n, before + segment.counts(n)
        return before

    def _segment(self, first: int, weights: np.ndarray, before: np.ndarray) -> Segment:
        n_samples = quotas(weights)  # of each source in CYCLE samples
        for source in np.flatnonzero(weights):
            if not n_samples[source]:
                small = f"weight {weights[source] / weights.sum():.2g} of {self.names[source]}"
                why = f"is too small: shares are multiples of 1/{CYCLE}"
                raise UserError(f"data: {small} {why}; raise it or leave the source out")
        keys = hash_words(8, "pattern", self.seed, len(self.segments))
        order = permute(np.arange(CYCLE), CYCLE, keys)
        pattern = np.repeat(np.arange(len(n_samples)), n_samples)[order]
        nth = np.empty(CYCLE, dtype=np.int64)
        for source, n in enumerate(n_samples):
            nth[pattern == source] = np.arange(n)
        return Segment(first, n_samples, before, pattern, nth)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (sources, numbers within them), int64, of samples of any shape."""
        samples = np.asarray(samples, dtype=np.int64)
        sources, numbers = np.empty_like(samples), np.empty_like(samples)
        which = np.searchsorted(self.firsts, samples, side="right") - 1
        for k in np.unique(which):
            now, segment = which == k, self.segments[k]
            cycles, in_cycle = np.divmod(samples[now] - segment.first, CYCLE)
            source = segment.pattern[in_cycle]
            sources[now] = source
            earlier = segment.before[source] + cycles * segment.quotas[source]
            numbers[now] = earlier + segment.nth[in_cycle]
        return sources, numbers

    def starts_of(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (sources, where the samples start in them), int64, of samples of any shape.

        A source of rows has numbers of rows there."""
        sources, numbers = self.locate(samples)
        starts = np.empty_like(numbers)
        for source in np.unique(sources):
            now = sources == source
            starts[now] = self.samplers[source].starts_of(numbers[now])
        return sources, starts

    def counts(self, n_samples: int) -> np.ndarray:
        """Return (n_sources,) int64: samples of each source among the first n_samples."""
        k = int(np.searchsorted(self.firsts, n_samples, side="right")) - 1
        segment = self.segments[k]
        return segment.before + segment.counts(n_samples - segment.first)

    def epochs(self, n_samples: int) -> np.ndarray:
        """Return (n_sources,) float64: epochs of each source in the first n_samples."""
        return self.counts(n_samples) / [sampler.per_epoch for sampler in self.samplers]

    def changes(self, samples_per_step: int) -> dict[int, dict[str, float]]:
        """Return {step (from 1): {source: share}} of the steps in which a new pattern begins."""
        found = {}
        for segment in self.segments:
            shares = (segment.quotas / CYCLE).tolist()
            step = segment.first // samples_per_step + 1
            found[step] = dict(zip(self.names, shares, strict=True))
        return found


# ---- what the corpora of all trainers share ----------------------------------------------------


class Corpus:
    """The sources that a data setting names, opened.

    A subclass sets
        names         of the sources, for the log
        train         the training data of each; they have a fingerprint
        stages        [(first step, weight of each source)]
        val           {name: validation data}
        val_weights   {name: weight}, {} unless the user gave some
    and defines
        sampler(source, seed, samples_per_step)     the order of one source
        by_source(values, key)      {number of a source: value} of a setting, given by path or name
        val_batches_of(data, batch_size, eval_steps, rank, world_size)      for `val_batches`
    """

    # Muennighoff et al. 2023: up to here repeated tokens are worth nearly as much as new ones
    many_epochs = 4.0

    def order(
        self, seed: int, samples_per_step: int, max_steps: int, max_epochs: str = ""
    ) -> Mixture:
        """Return the order of samples. Raise UserError if max_epochs ends it before max_steps."""
        n_sources = len(self.train)
        samplers = [self.sampler(k, seed, samples_per_step) for k in range(n_sources)]
        limit = parse_number(max_epochs)
        if limit:
            most = dict.fromkeys(range(n_sources), limit)
        elif max_epochs:
            weights = parse_weights(max_epochs, max_epochs, "max_epochs")
            most = self.by_source(weights, "max_epochs")
        else:
            most = {}
        limits = [math.inf] * n_sources
        for k, epochs in most.items():
            limits[k] = max(1, int(epochs * samplers[k].per_epoch))

        stages = [(step * samples_per_step, weights) for step, weights in self.stages]
        order = Mixture(samplers, seed, stages, self.names, limits)
        if order.end is not None and order.end < max_steps * samples_per_step:
            last = order.end // samples_per_step
            fewer = "train for no more steps or " if last else ""
            ends = f"with {max_epochs=} the data end after step {last} of {max_steps}"
            raise UserError(f"data: {ends}; {fewer}raise max_epochs")
        return order

    def record(self) -> dict[str, list]:
        """Return what decides the order of samples besides the settings, for `changed_entry`."""
        stages = [[step, quotas(np.array(weights)).tolist()] for step, weights in self.stages]
        return {"data": [data.fingerprint for data in self.train], "stages": stages}

    def size(self, data: object) -> str:
        return f"{data.n_rows:,} rows"

    def describe(self, order: Mixture, n_samples: int) -> tuple[str, list[str]]:
        """Return the epochs of each source in n_samples samples, and warnings, for people."""
        several = len(self.names) > 1
        advice = "lower its weight or set max_epochs" if several else "train for fewer steps"
        parts, warnings = [], []
        for k, times in enumerate(order.epochs(n_samples).tolist()):
            name = self.names[k]
            named = f" ({name})" if several else ""
            parts.append(f"{times:.2f} epochs of {self.size(self.train[k])}{named}")
            # rounded, since whole steps make 4.4 epochs of epochs=4
            if round(times) > self.many_epochs and order.limits[k] == math.inf:
                seen = f"{name} is seen {times:.1f} times"
                why = f"beyond {self.many_epochs:g} repetition adds little"
                warnings.append(f"warning     {seen}; {why}: give more data or {advice}")
        return ", ".join(parts), warnings

    def val_shares(self) -> list[float]:
        """Return the weight of each of `val` in the validation loss, adding up to 1.

        They are the user's weights, else those of the last training stage."""
        last = dict(zip(self.names, self.stages[-1][1], strict=True))
        weights = list(self.val_weights.values()) or [last[name] for name in self.val]
        if not any(weights):
            weights = [1.0] * len(weights)
        return [weight / sum(weights) for weight in weights]

    def val_batches(
        self, batch_size: int, eval_steps: int, rank: int = 0, world_size: int = 1
    ) -> dict[str, Iterator]:
        """Return this rank's evaluation batches of each of `val`.

        eval_steps: batches over all sources and ranks, at least one per source; 0 = all.
        `val_shares` says how to average the losses."""
        found = {}
        for k, (name, data) in enumerate(self.val.items()):
            share, extra = divmod(eval_steps, len(self.val))
            steps = max(1, share + (k < extra)) if eval_steps else 0
            # the last, small batches of the sources go to different ranks
            first = (rank + k) % world_size
            found[name] = self.val_batches_of(data, batch_size, steps, first, world_size)
        return found


def names_of(paths: Sequence[str], names: Sequence[str] | None = None) -> list[str]:
    """Return a short name for each path: its last part, or the path where that is not unique.

    names: use these instead of the last parts."""
    if names is None:
        names = [Path(path).name or path for path in paths]
    pairs = zip(names, paths, strict=True)
    return [name if names.count(name) == 1 else path for name, path in pairs]


def spread(
    n_windows: int, batch_size: int, eval_steps: int, rank: int, world_size: int
) -> Iterator[np.ndarray]:
    """Yield this rank's part of eval_steps batches (0 = all) of evenly spread window numbers."""
    n = min(eval_steps * batch_size, n_windows) if eval_steps else n_windows
    chosen = np.arange(n) * n_windows // max(n, 1)
    for first in range(rank * batch_size, n, world_size * batch_size):
        yield chosen[first : first + batch_size]


def changed_entry(saved: dict[str, list], now: dict[str, list], step: int) -> str:
    """Compare two `Corpus.record`s: return which entry changes the first `step` steps, or "".

    Stages that begin later may change or be added, with new sources behind the others."""
    stages = []
    for record in (saved, now):
        begun = [stage for stage in record["stages"] if stage[0] < max(step, 1)]
        stages.append([[first, np.trim_zeros(quotas, "b")] for first, quotas in begun])
    used = max(len(quotas) for _, quotas in stages[0])
    if saved["data"][:used] != now["data"][:used]:
        return "data"
    return "" if stages[0] == stages[1] else "stages"
