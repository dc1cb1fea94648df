"""The order of training samples: sample number -> source -> window, computed from the seed alone.

    data_dir='data/x'                                                # all sources of a directory, with its own weights
    data_dir='data/a=0.7,data/x/wiki=0.3'                            # 70 % of the samples from a, 30 % from one source
    data_dir='0: data/a=1; 8000: data/a=0.5,data/b=0.5'              # stages: the second begins after 8000 steps

A *sample* is one training sequence of block_size tokens and their targets. Sample i is the same on any number of
processes and takes the same time to find for any i, so a run resumes anywhere without stored state. `Mixture`: sample
-> (source, number within the source), in exact proportions. `Sampler`: number -> window, each once per epoch.
"""

import hashlib
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from groundup.errors import UserError

BLOCK = 1024  # samples within which the sources have their exact proportions


# ---- the settings data_dir and max_epochs ----------------------------------------------------------------------------


class Stage(NamedTuple):
    first_step: int  # number of steps before it
    weights: dict[str, float | None]  # by path; None = the user gave none


def parse_data_dir(spec: str, key: str = "data_dir") -> list[Stage]:
    """Return the stages in the value `spec` of the setting `key`. Raise UserError naming the wrong part."""
    stages = []
    for part in spec.split(";"):
        step, colon, paths = re.fullmatch(r"\s*(?:(\d+)\s*(:))?(.*)", part, re.DOTALL).groups()
        if not colon and ";" in spec:
            raise UserError(f"data: {part.strip()!r} in {key}={spec!r} has no first step; write '0: a=1; 8000: b=1'")
        stages.append(Stage(int(step or 0), parse_weights(paths, spec, key)))
    steps = [stage.first_step for stage in stages]
    if steps[0] != 0 or any(a >= b for a, b in zip(steps, steps[1:], strict=False)):
        raise UserError(f"data: stages of {key}={spec!r} begin at steps {steps}; begin at 0 and go up")
    return stages


def parse_weights(text: str, spec: str, key: str = "data_dir") -> dict[str, float | None]:
    """'data/a=0.7,data/b=0.3' -> {'data/a': 0.7, 'data/b': 0.3}."""
    weights: dict[str, float | None] = {}
    for part in text.split(","):
        path, equals, number = part.strip().rpartition("=")
        path, weight = (path.strip(), parse_number(number)) if equals else (number, None)
        if not path or (equals and weight is None):
            raise UserError(f"data: {part.strip()!r} in {key}={spec!r} is not 'path' or 'path=weight above 0'")
        if path in weights:
            raise UserError(f"data: {path!r} comes twice in {key}={spec!r}; add its weights up")
        weights[path] = weight
    if len({weight is None for weight in weights.values()}) > 1:
        bare = next(path for path, weight in weights.items() if weight is None)
        raise UserError(f"data: {bare!r} in {key}={spec!r} has no weight but others have; weigh all or none")
    return weights


def parse_number(text: str) -> float | None:
    """A finite number above 0, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


# ---- permutation -----------------------------------------------------------------------------------------------------


def hash_words(count: int, *parts: int | str) -> np.ndarray:
    """`count` pseudo-random uint64, the same on every machine, from the parts."""
    return np.frombuffer(hashlib.shake_256(repr(parts).encode()).digest(8 * count), dtype="<u8")


def permute(index: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Map index (any shape) int64 in [0, n) by a pseudo-random bijection of [0, n), without a table.

    A Feistel network (Luby and Rackoff, 1988): x = (left, right) -> (right, left ^ f(right)) is invertible for any f.
    It permutes a power of four; a result >= n is fed in again until it is below n ("cycle walking", Black and Rogaway
    2002), on average less than four times. Eight rounds: with four, the 24 orders of n = 4 are visibly not uniform.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)

    def encrypt(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for key in keys:
            f = (right ^ key) * np.uint64(0xBF58476D1CE4E5B9)  # the finaliser of splitmix64, wrapping modulo 2**64
            f = (f ^ (f >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((f ^ (f >> np.uint64(31))) & mask)
        return (left << half) | right

    flat = encrypt(np.asarray(index, dtype=np.uint64).reshape(-1))
    while len(outside := np.flatnonzero(flat >= n)):
        flat[outside] = encrypt(flat[outside])
    return flat.astype(np.int64).reshape(np.shape(index))


# ---- one source ------------------------------------------------------------------------------------------------------


class Sampler:
    """Number of a sample within its source -> where its window of block_size + 1 tokens starts. Every window comes once
    per epoch; order and borders differ between epochs. source: its index in the mixture. packed: a window is one of the
    rows of block_size + 1 tokens that the data consist of."""

    def __init__(
        self, n_tokens: int, block_size: int, seed: int, source: int = 0, packed: bool = False, name: str = ""
    ) -> None:
        self.block_size, self.seed, self.packed = block_size, seed, packed
        self.source = (source,) if source else ()  # a single source and the first of several have the same order
        # one less than fit, so that an offset can move their borders each epoch
        self.n_windows = n_tokens // (block_size + 1) if packed else (n_tokens - 1) // block_size - 1
        if self.n_windows < 1:
            of = f" of {name}" if name else ""
            raise UserError(
                f"data: {n_tokens} training tokens{of} are too few for block_size={block_size}, which needs "
                f"{2 * block_size + 1}; prepare more text or lower block_size"
            )

    def start(self, number: np.ndarray) -> np.ndarray:
        """Return the token offsets (int64) for numbers of any shape. Neighbouring windows share one token."""
        epochs, positions = np.divmod(np.asarray(number, dtype=np.int64), self.n_windows)
        starts = np.empty_like(positions)
        for epoch in np.unique(epochs):
            now = epochs == epoch
            words = hash_words(9, "windows", self.seed, int(epoch), *self.source)
            index = permute(positions[now], self.n_windows, words[:8])
            offset = 0 if self.packed else int(words[8] % np.uint64(self.block_size))
            starts[now] = offset + index * (self.block_size + self.packed)
        return starts


# ---- several sources -------------------------------------------------------------------------------------------------


def quotas(weights: np.ndarray) -> np.ndarray:
    """Return the samples (int64) of each source in a block of 1024, by largest remainder, the first of equal ones."""
    exact = weights / weights.sum() * BLOCK
    whole = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(-(exact - whole), kind="stable")
    whole[by_remainder[: BLOCK - whole.sum()]] += 1
    return whole


class Segment(NamedTuple):
    """Consecutive samples with one pattern of sources: a stage, or a part of it that ends when a source is used up."""

    first: int  # its first sample
    quotas: np.ndarray  # (n_sources,) samples of each source in a block of 1024
    before: np.ndarray  # (n_sources,) samples of each source before `first`
    pattern: np.ndarray  # (1024,) source of each sample of a block
    rank: np.ndarray  # (1024,) how many of the same source come before it in the block

    def counts(self, n: int) -> np.ndarray:
        """Return (n_sources,): samples of each source among the first n of this segment."""
        blocks, rest = divmod(n, BLOCK)
        return blocks * self.quotas + np.bincount(self.pattern[:rest], minlength=len(self.quotas))

    def reaches(self, source: int, n: int) -> int:
        """Return which sample of this segment (from 0) is the source's n-th (from 0)."""
        blocks, rest = divmod(n, int(self.quotas[source]))
        return blocks * BLOCK + int(np.flatnonzero(self.pattern == source)[rest])


class Mixture:
    """Sample -> (source, number within the source), with exact proportions in every block of 1024 samples.

    samplers: one per source. stages: (first sample, weight of each source), ascending from 0. limits: most samples of
    each source; the others then take its samples in proportion to their weights. end: the sample at which all sources
    are used up, or None.
    """

    def __init__(
        self, samplers: Sequence[Sampler], seed: int, stages: Sequence[tuple[int, Sequence[float]]] = (),
        names: Sequence[str] = (), limits: Sequence[float] = (),
    ) -> None:  # fmt: skip
        self.samplers = list(samplers)
        self.names = list(names) or [str(source) for source in range(len(samplers))]
        self.seed, self.end = seed, None
        self.limits = np.array(limits or [math.inf] * len(samplers))
        stages = stages or [(0, [1.0] * len(samplers))]
        self.segments: list[Segment] = []
        before = np.zeros(len(samplers), dtype=np.int64)
        for k, (first, weights) in enumerate(stages):
            stop = stages[k + 1][0] if k + 1 < len(stages) else math.inf
            before = self._add_stage(first, stop, np.array(weights, dtype=float), before)
            if self.end is not None:
                break
        self.firsts = np.array([segment.first for segment in self.segments])

    def _add_stage(self, first: int, stop: float, weights: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Append the segments of samples [first, stop) and return the samples of each source before `stop`."""
        while True:
            now = np.where(before < self.limits, weights, 0.0)
            if not now.any():
                self.end = first
                return before
            segment = self._segment(first, now, before)
            self.segments.append(segment)
            room = self.limits - before
            limited = [s for s in np.flatnonzero(now) if room[s] < math.inf]
            n = min([segment.reaches(s, int(room[s])) for s in limited] + [stop - first])
            if n == math.inf:
                return before
            first, before = first + n, before + segment.counts(n)
            if first == stop:
                return before

    def _segment(self, first: int, weights: np.ndarray, before: np.ndarray) -> Segment:
        share = quotas(weights)
        if small := [s for s in np.flatnonzero(weights) if not share[s]]:
            raise UserError(
                f"data: weight {weights[small[0]] / weights.sum():.2g} of {self.names[small[0]]} is too small: shares "
                f"are multiples of 1/{BLOCK}; raise it or leave the source out"
            )
        order = permute(np.arange(BLOCK), BLOCK, hash_words(8, "pattern", self.seed, len(self.segments)))
        pattern = np.repeat(np.arange(len(share)), share)[order]
        rank = np.empty(BLOCK, dtype=np.int64)
        for source, n in enumerate(share):
            rank[pattern == source] = np.arange(n)
        return Segment(first, share, before, pattern, rank)

    def locate(self, sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (sources, numbers within them), int64, of samples of any shape."""
        sample = np.asarray(sample, dtype=np.int64)
        sources, numbers = np.empty_like(sample), np.empty_like(sample)
        which = np.searchsorted(self.firsts, sample, side="right") - 1
        for k in np.unique(which):
            now, segment = which == k, self.segments[k]
            blocks, places = np.divmod(sample[now] - segment.first, BLOCK)
            source = segment.pattern[places]
            sources[now] = source
            numbers[now] = segment.before[source] + blocks * segment.quotas[source] + segment.rank[places]
        return sources, numbers

    def start(self, sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (sources, starts of the windows in them), int64, of samples of any shape."""
        sources, numbers = self.locate(sample)
        starts = np.empty_like(numbers)
        for source in np.unique(sources):
            now = sources == source
            starts[now] = self.samplers[source].start(numbers[now])
        return sources, starts

    def counts(self, n_samples: int) -> np.ndarray:
        """Return (n_sources,) int64: how many of the first n_samples samples each source gives."""
        k = int(np.searchsorted(self.firsts, n_samples, side="right")) - 1
        return self.segments[k].before + self.segments[k].counts(n_samples - self.segments[k].first)

    def epochs(self, n_samples: int) -> np.ndarray:
        """Return (n_sources,) float64: epochs of each source in the first n_samples samples."""
        return self.counts(n_samples) / [sampler.n_windows for sampler in self.samplers]

    def changes(self, samples_per_step: int) -> dict[int, dict[str, float]]:
        """Return {step (from 1): {source: share}} of the steps in which a new pattern begins."""
        return {
            segment.first // samples_per_step + 1: dict(zip(self.names, (segment.quotas / BLOCK).tolist(), strict=True))
            for segment in self.segments
        }
