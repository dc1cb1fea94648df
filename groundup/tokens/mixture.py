"""Which sample comes next: the order of the samples of all sources, computed from the seed alone.

A sample is one training sequence. Its number in the run gives its source and its number within the
source (`Mixture`); that gives where it starts there (`Sampler`): at which token of a long text, or
at which row. Sample i is the same on any number of processes and takes equally long to find for any
i. So a run resumes anywhere without stored state: the number of steps done is enough.
"""

import hashlib
import math
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from configurator import parse_number, split_names, split_weight
from groundup.errors import UserError

CYCLE = 1024  # samples within which the sources have their exact proportions


# ---- permutation -----------------------------------------------------------------------------


def hash_words(count: int, *parts: int | str) -> np.ndarray:
    """Return `count` pseudo-random uint64 made from the parts, the same on every machine."""
    # a hash, not numpy's generator: its stream may change with numpy's version
    return np.frombuffer(hashlib.shake_256(repr(parts).encode()).digest(8 * count), dtype="<u8")


def permute(index: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Map int64 in [0, n), of any shape, by a pseudo-random bijection of [0, n), without a table.

    A Feistel network (Luby and Rackoff, 1988): (left, right) -> (right, left ^ f(right)) is
    invertible for any f. It permutes a power of four; a result >= n is fed in again until it is
    below n ("cycle walking", Black and Rogaway 2002), on average fewer than four times. keys: one
    per round. With four rounds the 24 orders of n = 4 are visibly not uniform; use eight.
    """
    # half of the bits of the largest index, rounded up: (left, right) together hold any index
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)

    def encrypt(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for key in keys:
            # mixing as at the end of splitmix64, modulo 2**64
            f = (right ^ key) * np.uint64(0xBF58476D1CE4E5B9)
            f = (f ^ (f >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            f ^= f >> np.uint64(31)
            left, right = right, left ^ (f & mask)
        return (left << half) | right

    # Cycle walking: the permutation may lead outside of [0, n), but from there it leads back.
    flat = encrypt(np.asarray(index, dtype=np.uint64).reshape(-1))
    while len(outside := np.flatnonzero(flat >= n)):
        flat[outside] = encrypt(flat[outside])
    return flat.astype(np.int64).reshape(np.shape(index))


# ---- the settings data_dir, data, val_data and max_epochs ------------------------------------


class Stage(NamedTuple):
    first_step: int  # number of steps before it
    weights: dict[str, float | None]  # by path; None = the user gave none


def parse_data_dir(spec: str, key: str = "data_dir") -> list[Stage]:
    """Return the stages in the value `spec` of the setting `key`. Raise UserError.

    '0: data/a=1; 8000: data/a=0.5,data/b=0.5' has two, the second after 8000 steps."""
    if not spec.strip():
        raise UserError(f"data: {key} is empty; give --{key}=PATH")
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
        path, number = split_weight(part)  # the number as text, or ""
        weight = parse_number(number) if number else None
        named = f"{part!r} in {key}={spec!r}"
        if not path or (number and weight is None):
            raise UserError(f"data: {named} is not 'path' or 'path=weight above 0'")
        if os.path.realpath(path) in map(os.path.realpath, weights):
            raise UserError(f"data: {path!r} comes twice in {key}={spec!r}; add its weights up")
        weights[path] = weight
    # a share of some and no share of others has no meaning
    bare = [path for path, weight in weights.items() if weight is None]
    if 0 < len(bare) < len(weights):
        problem = f"{bare[0]!r} in {key}={spec!r} has no weight but others have"
        raise UserError(f"data: {problem}; weigh all or none")
    return weights


# ---- one source ------------------------------------------------------------------------------


class Sampler:
    """The order of one source: number of a sample within the source -> where it starts.

    Each of the per_epoch samples comes once per epoch, in another order each time. A sample is a
    row. With `stride` it is a window of a long text, and a window begins every `stride` tokens; in
    each epoch they all begin up to one stride later.

    source: the number of the source in the mixture.
    """

    def __init__(self, per_epoch: int, seed: int, source: int = 0, stride: int = 1) -> None:
        self.per_epoch = per_epoch
        self.seed = seed
        self.stride = stride
        # a single source has the same order as the first of several
        self.source_words = (source,) if source else ()

    def starts_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return where these samples start, int64 of the same shape."""
        numbers = np.asarray(numbers, dtype=np.int64)
        epochs, positions = np.divmod(numbers, self.per_epoch)
        # the samples asked for seldom lie in more than two epochs
        starts = np.empty_like(positions)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            # eight keys of the permutation, and a number that moves the borders of windows
            words = hash_words(9, "windows", self.seed, int(epoch), *self.source_words)
            chosen = permute(positions[in_epoch], self.per_epoch, words[:8])
            starts[in_epoch] = int(words[8]) % self.stride + chosen * self.stride
        return starts


def window_sampler(
    n_tokens: int, block_size: int, seed: int, source: int = 0, name: str = ""
) -> Sampler:
    """Return the order of windows of block_size + 1 tokens; neighbours share one token.

    Raise UserError for a text of fewer than two windows: since their borders move each epoch, one
    window fewer than would fit is used."""
    # One token less, since the last window needs a target behind it, and one window less, so that
    # every shift of the borders leaves room.
    per_epoch = (n_tokens - 1) // block_size - 1
    if per_epoch < 1:
        few = f"{n_tokens} training tokens{f' of {name}' if name else ''} are too few"
        need = f"for block_size={block_size}, which needs {2 * block_size + 1}"
        how = "prepare more text, lower block_size"
        how += ", or prepare it as one source with the others" if name else ""
        raise UserError(f"data: {few} {need}; {how}")
    return Sampler(per_epoch, seed, source, stride=block_size)


# ---- several sources -------------------------------------------------------------------------


def quotas(weights: np.ndarray) -> np.ndarray:
    """Return the samples (int64) of each source in a cycle, by largest remainder."""
    # Round down, then give what is left, one each, to the sources that lost most by rounding.
    exact = weights / weights.sum() * CYCLE  # samples of each source, with fractions
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
        cycles, rest = divmod(n, CYCLE)  # whole cycles, and the beginning of another one
        in_rest = np.bincount(self.pattern[:rest], minlength=len(self.quotas))
        return cycles * self.quotas + in_rest


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
        self.end: int | None = None  # set when all sources are exhausted
        self.segments: list[Segment] = []
        stages = stages or [(0, [1.0] * len(samplers))]
        # each stage ends where the next one begins, the last one never
        stops = [first for first, _ in stages[1:]] + [math.inf]
        before = np.zeros(len(samplers), dtype=np.int64)
        for (first, weights), stop in zip(stages, stops, strict=True):
            if self.end is None:
                before = self._add_stage(first, stop, np.array(weights, dtype=float), before)
        # a row for each segment, so that `locate` finds samples of all segments at once
        self.firsts = np.array([segment.first for segment in self.segments])
        self.quotas = np.array([segment.quotas for segment in self.segments])
        self.before = np.array([segment.before for segment in self.segments])
        self.pattern = np.array([segment.pattern for segment in self.segments])
        self.nth = np.array([segment.nth for segment in self.segments])

    def _add_stage(
        self, first: int, stop: float, weights: np.ndarray, before: np.ndarray
    ) -> np.ndarray:
        """Append the segments of samples [first, stop).

        before: samples of each source before `first`; return those before `stop`."""
        while first != stop:
            left = np.where(before < self.limits, weights, 0.0)
            if not left.any():  # the run can have no more samples than these
                self.end = first
                return before
            segment = self._segment(first, left, before)
            self.segments.append(segment)
            # the segment ends where the stage does, or where the first source is exhausted
            n = stop - first
            for source in np.flatnonzero((left > 0) & np.isfinite(self.limits)):
                room = int(self.limits[source] - before[source])  # samples that are left
                cycles, rest = divmod(room, int(segment.quotas[source]))
                # the first sample of the source that there is no room for
                in_cycle = np.flatnonzero(segment.pattern == source)[rest]
                n = min(n, cycles * CYCLE + int(in_cycle))
            if n == math.inf:  # the last stage, with a source that is never exhausted
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
        # One cycle has each source as often as its quota says, in a seeded order. The segment
        # repeats it.
        keys = hash_words(8, "pattern", self.seed, len(self.segments))
        order = permute(np.arange(CYCLE), CYCLE, keys)  # (CYCLE,)
        pattern = np.repeat(np.arange(len(n_samples)), n_samples)[order]
        nth = np.empty(CYCLE, dtype=np.int64)
        for source, n in enumerate(n_samples):
            nth[pattern == source] = np.arange(n)
        return Segment(first, n_samples, before, pattern, nth)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (sources, numbers within them), int64, of samples of any shape."""
        samples = np.asarray(samples, dtype=np.int64)
        which = np.searchsorted(self.firsts, samples, side="right") - 1  # segment of each sample
        cycles, in_cycle = np.divmod(samples - self.firsts[which], CYCLE)
        sources = self.pattern[which, in_cycle]
        # samples of the same source: before the segment, in whole cycles, in this cycle
        earlier = self.before[which, sources] + cycles * self.quotas[which, sources]
        return sources, earlier + self.nth[which, in_cycle]

    def starts_of(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (sources, where the samples start in them), int64, of samples of any shape.

        A source of rows has numbers of rows there."""
        sources, numbers = self.locate(samples)
        starts = np.empty_like(numbers)
        for source in np.unique(sources):
            of_source = sources == source
            starts[of_source] = self.samplers[source].starts_of(numbers[of_source])
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
        found = {}  # {step: shares}
        for segment in self.segments:
            shares = (segment.quotas / CYCLE).tolist()
            step = segment.first // samples_per_step + 1
            found[step] = dict(zip(self.names, shares, strict=True))
        return found
