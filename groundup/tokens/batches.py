"""From a step to the tensors of a micro-batch: the loader of all trainers, and pretrain.py's data.

    step (from 0), micro-step -> numbers of samples       Batches._load
    -> source, and where the sample starts in it          Mixture.starts_of (mixture.py)
    -> block_size + 1 ids                                 TokenData.window (token_files.py)
    -> x = ids[:-1], y = ids[1:]                          load_windows
    -> a queue, filled by a thread -> the device          Batches.next

data_dir and `data` name the sources of a run (mixture.py says how). `Corpus` is what the data
of all trainers share. Its kinds are `TextCorpus`, here, and those of conversations.py for sft.py,
pairs.py for dpo.py and reward.py, prompts.py for rl.py.
"""

import itertools
import math
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from configurator import parse_number
from groundup.errors import UserError, counted
from groundup.tokens import IGNORE
from groundup.tokens.mixture import (
    Mixture,
    Sampler,
    parse_data_dir,
    parse_weights,
    quotas,
    window_sampler,
)
from groundup.tokens.token_files import NoSplit, PackedData, TokenData, locate

# ---- the loader ------------------------------------------------------------------------------


def map_tensors(batch: tuple, function: Callable[[Tensor], Tensor]) -> tuple:
    """Return a NamedTuple of tensors with `function` applied to each; None stays."""
    return batch._make(None if tensor is None else function(tensor) for tensor in batch)


class Batches:
    """This rank's micro-batches from first_step on, without end, loaded ahead by a thread.

    A step takes the next samples_per_step samples of the order. Each rank has a consecutive part
    of them, cut into micro-batches: the samples of a step depend neither on the number of ranks
    nor on that of micro-steps.
    """

    def __init__(
        self,
        corpus: "Corpus",
        order: Mixture,
        batch_size: int,
        accum_steps: int,
        world: Any,  # ranks.World: rank and world_size
        device: str | torch.device = "cpu",
        first_step: int = 0,
        ahead: int = 4,
    ) -> None:
        assert batch_size > 0 and accum_steps > 0, f"{batch_size=} {accum_steps=}"
        self.corpus = corpus
        self.order = order
        self.batch_size = batch_size  # sequences per rank and micro-step
        self.accum_steps = accum_steps  # micro-steps per step
        self.rank = world.rank
        self.samples_per_step = batch_size * accum_steps * world.world_size
        self.first_step = first_step  # steps that are done already
        self.device = torch.device(device)  # with its number: the thread has another current one
        # At most `ahead` micro-batches wait in the queue, so the thread uses little memory.
        self.error: Exception | None = None  # what `next` raises from now on
        self.stop = threading.Event()
        self.queue: queue.Queue = queue.Queue(maxsize=ahead)
        self.thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self.thread.start()

    def position(self, step: int) -> int:
        """Return the number of the first sample of a step (from 0), over all ranks."""
        return step * self.samples_per_step

    def count_targets(self, step: int) -> int:
        """Return the targets of a step (from 0) over all ranks, computed without communication."""
        return int(self.corpus.count_targets(*self._samples_of(step)).sum())

    def count_tokens(self, step: int) -> int:
        """Return the tokens of a step (from 0) over all ranks, without padding, for RowCorpus."""
        return self.corpus.count_tokens(*self._samples_of(step))

    def _samples_of(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, start) of each sample of a step, over all ranks."""
        # Each rank computes the samples of all ranks: their order is a function of the samples'
        # numbers.
        samples = np.arange(self.position(step), self.position(step + 1))
        return self.order.starts_of(samples)

    def next(self) -> tuple:
        """Return the next micro-batch, on the device. Raise what the thread raised."""
        # keep the error: a second call raises it again instead of waiting for ever
        item = self.error or self.queue.get()
        if isinstance(item, Exception):
            self.error = item
            raise item
        pinned = self.device.type == "cuda"
        return map_tensors(item, lambda tensor: tensor.to(self.device, non_blocking=pinned))

    def close(self) -> None:
        """End the thread. May be called again."""
        self.stop.set()
        while self.thread.is_alive():
            try:
                self.queue.get_nowait()  # make room, in case the thread waits for it
            except queue.Empty:
                self.thread.join(timeout=0.01)
        self.error = self.error or RuntimeError("next() after close()")

    def _work(self) -> None:
        try:
            self._load()
        except Exception as error:
            self.queue.put(error)  # next() raises it in the main thread

    def _load(self) -> None:
        # from page-locked memory the copy to the device runs in the background
        pinned = self.device.type == "cuda"
        if pinned:
            # a thread begins on device 0, and pinning there would open a context on it
            torch.cuda.set_device(self.device)
        first = self.first_step * self.accum_steps
        # find the samples of 32 micro-batches at once: numpy is slow on few numbers
        for begin in itertools.count(first, 32):  # this rank's micro-batches, from the run's first
            step, micro_step = np.divmod(np.arange(begin, begin + 32), self.accum_steps)
            # a step's samples: all micro-batches of rank 0, then all of rank 1, ...
            number = self.rank * self.accum_steps + micro_step  # of the micro-batch in the step
            begins = self.position(step) + number * self.batch_size
            samples = begins[:, None] + np.arange(self.batch_size)  # (32, batch_size)
            sources, starts = self.order.starts_of(samples)  # (32, batch_size) each
            for k in range(32):
                batch = self.corpus.load(sources[k], starts[k])
                if pinned:
                    batch = map_tensors(batch, Tensor.pin_memory)
                self.queue.put(batch)  # waits while the queue is full
                if self.stop.is_set():
                    return


# ---- what the corpora of all trainers share ----------------------------------------------------


class Corpus:
    """The sources that a data setting names, opened.

    A subclass sets
        names         of the sources, for the log
        train         the training data of each; they have a fingerprint
        stages        [(first step, weight of each source)]
        val           {name: validation data}
        val_weights   {name: weight}, {} without val_data
        no_val        {name: why it has no validation data}
        few_val       whether there are too few validation rows to trust their loss
    and defines
        sampler(source, seed, samples_per_step)     the order of one source
        batch(data, starts)              a NamedTuple of tensors: sample i starts at starts[i] of
                                         data[i], which is an element of train or a value of val
        val_starts(data)                 where the samples of validation data start
        targets_of(source, starts)       (n,) int64: how many targets each of these samples has,
                                         where a loss is a mean over tokens (pretrain.py, sft.py)
        numbers_of(path)                 numbers of the sources that max_epochs names so
    """

    few_val = False
    no_val: Mapping[str, Exception] = {}

    def load(self, sources: np.ndarray, starts: np.ndarray) -> tuple:
        """Return the micro-batch of these training samples, for `Batches`."""
        return self.batch([self.train[source] for source in sources], starts)

    def order(
        self, seed: int, samples_per_step: int, max_steps: int, max_epochs: str = ""
    ) -> Mixture:
        """Return the order of samples. Raise UserError if max_epochs ends it before max_steps."""
        samplers = [self.sampler(k, seed, samples_per_step) for k in range(len(self.train))]
        limits = [math.inf] * len(samplers)  # in samples of each source
        for k, most in self.most_epochs(max_epochs).items():
            limits[k] = max(1, int(most * samplers[k].per_epoch))
        # the settings count steps, the order counts samples
        stages = [(step * samples_per_step, weights) for step, weights in self.stages]
        order = Mixture(samplers, seed, stages, self.names, limits)
        if order.end is not None and order.end < max_steps * samples_per_step:
            last = order.end // samples_per_step  # the last whole step
            fewer = f"set max_steps={last} or " if last else ""
            ends = f"with {max_epochs=} the data end after step {last} of {max_steps}"
            raise UserError(f"data: {ends}; {fewer}raise max_epochs")
        return order

    def most_epochs(self, max_epochs: str) -> dict[int, float]:
        """Return {number of a source: epochs} of '4', for all sources, or 'data/a=2,data/b=8'."""
        if number := parse_number(max_epochs):
            return dict.fromkeys(range(len(self.train)), number)
        found: dict[int, float] = {}
        weights = parse_weights(max_epochs, max_epochs, "max_epochs") if max_epochs else {}
        for path, most in weights.items():
            if most is None:  # a path, or a word, without a number
                raise UserError(f"data: max_epochs has {path!r}; write '4' or 'data/a=2,data/b=8'")
            for k in self.numbers_of(path):
                if k in found:
                    raise UserError(f"data: max_epochs names {self.names[k]} twice")
                found[k] = most
        return found

    def count_targets(self, sources: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return (n,) int64: how many targets of each of these samples are trained on."""
        found = np.empty(len(starts), np.int64)
        for source in np.unique(sources):
            of_source = sources == source
            found[of_source] = self.targets_of(source, starts[of_source])
        return found

    def record(self) -> dict[str, list]:
        """Return what decides the order of samples besides the settings, for `changed_entry`."""
        # Quotas instead of weights: 0.7 and 0.70001 give the same order.
        stages = [[step, quotas(np.array(weights)).tolist()] for step, weights in self.stages]
        return {"data": [data.fingerprint for data in self.train], "stages": stages}

    def size(self, data: object) -> str:
        return counted(data.n_rows, "row")

    def many_epochs(self, data: object) -> float:
        """Return the epochs of a source beyond which a run warns."""
        # Muennighoff et al. 2023: up to here repeated tokens are worth nearly as much as new ones.
        # Small texts: docs/measurements.md, "Repetition of a small text"
        return 4.0

    def describe(self, order: Mixture, n_samples: int) -> tuple[str, list[str]]:
        """Return the epochs of each source in n_samples samples, and warnings, for people."""
        # with one source its name says nothing new
        several = len(self.names) > 1
        advice = "lower its weight or set max_epochs" if several else "train for fewer steps"
        parts = []
        warnings = [
            f"warning     {why}; {name} is not evaluated" for name, why in self.no_val.items()
        ]
        for k, times in enumerate(order.epochs(n_samples).tolist()):
            name = self.names[k]
            named = f" ({name})" if several else ""
            parts.append(f"{times:.2f} epochs of {self.size(self.train[k])}{named}")
            # rounded, since whole steps make 4.4 epochs of epochs=4
            many = self.many_epochs(self.train[k])
            if round(times) > many and order.limits[k] == math.inf:
                seen = f"{name} is seen {times:.1f} times"
                why = f"beyond {many:.0f} repetition adds little, beyond {2 * many:.0f} it may harm"
                warnings.append(f"warning     {seen}; {why}: give more data or {advice}")
        return ", ".join(parts), warnings

    def val_shares(self) -> list[float]:
        """Return the weight of each of `val` in the validation loss, adding up to 1.

        With val_data they are the weights given there, or the numbers of tokens or labels. Without
        it they are the weights of the last training stage."""
        # the last stage is what the finished model is meant for
        last = dict(zip(self.names, self.stages[-1][1], strict=True))
        weights = list(self.val_weights.values()) or [last[name] for name in self.val]
        if not any(weights):
            weights = [1.0] * len(weights)  # each has weight 0 in that stage
        return [weight / sum(weights) for weight in weights]

    def val_batches(
        self, batch_size: int, eval_steps: int, rank: int = 0, world_size: int = 1
    ) -> dict[str, Iterator]:
        """Return this rank's evaluation batches of each of `val`.

        eval_steps: batches over all sources and ranks, at least one per source; 0 = all.
        `val_shares` says how to average the losses."""
        found = {}
        for k, (name, data) in enumerate(self.val.items()):
            share, extra = divmod(eval_steps, len(self.val))  # the first sources get one more
            steps = max(1, share + (k < extra)) if eval_steps else 0
            # the last, small batches of the sources go to different ranks
            first = (rank + k) % world_size
            found[name] = self.batches_of(data, batch_size, steps, first, world_size)
        return found

    def batches_of(
        self, data: Any, batch_size: int, eval_steps: int = 0, rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple]:
        """Yield this rank's part of eval_steps batches (0 = all) of validation data, on the CPU."""
        starts = self.val_starts(data)
        for chosen in spread(len(starts), batch_size, eval_steps, rank, world_size):
            yield self.batch([data] * len(chosen), starts[chosen])


def names_of(paths: Sequence[str], names: Sequence[str] = ()) -> list[str]:
    """Return a short name for each path: its last part, or the path where that is not unique.

    names: use these instead of the last parts."""
    names = names or [Path(path).name or path for path in paths]
    pairs = zip(names, paths, strict=True)
    return [name if names.count(name) == 1 else path for name, path in pairs]


def spread(
    n_windows: int, batch_size: int, eval_steps: int, rank: int, world_size: int
) -> Iterator[np.ndarray]:
    """Yield this rank's part of eval_steps batches (0 = all) of evenly spread window numbers."""
    n = min(eval_steps * batch_size, n_windows) if eval_steps else n_windows
    # from the whole split, because its beginning may be all of one kind
    chosen = np.arange(n) * n_windows // max(n, 1)
    for first in range(rank * batch_size, n, world_size * batch_size):  # ranks take turns
        yield chosen[first : first + batch_size]


def changed_entry(saved: dict[str, list], now: dict[str, list], step: int) -> str:
    """Compare two `Corpus.record`s: return which entry changes the first `step` steps, or "".

    Stages that begin later may change or be added, with new sources behind the others."""
    # Compare only what has been used so far. Stages that have not begun may change.
    stages = []
    for record in (saved, now):
        begun = [stage for stage in record["stages"] if stage[0] < max(step, 1)]
        # a source that comes later has the quota 0 until then: cut it off, to compare equal
        stages.append([[first, np.trim_zeros(samples, "b")] for first, samples in begun])
    used = max(len(samples) for _, samples in stages[0])
    if saved["data"][:used] != now["data"][:used]:
        return "data"  # other texts, or another tokenizer
    return "" if stages[0] == stages[1] else "stages"


# ---- the data of pretrain.py -----------------------------------------------------------------


def sources_of(path: str, split: str) -> dict[Path, tuple[float, int]]:
    """Return {source: (share, tokens)} of a split of what a path names; the shares add up to 1.

    A source is the path data_dir/name, or data_dir if it has no name. In training the shares follow
    the manifest's weights, if it has some, else the numbers of tokens. Raise NoSplit if there are
    no tokens."""
    directory, only, manifest = locate(path)  # only: the source that the path names, or None
    tokens: Counter[str] = Counter()
    for shard in manifest["splits"].get(split, {"shards": []})["shards"]:
        name = shard.get("source", "")
        if only in (None, name):
            tokens[name] += shard["tokens"]  # a source may have several shards
    tokens = +tokens  # without empty sources
    if not tokens:
        how = "rerun prepare.py with more text" + " or val_fraction" * (split == "val")
        raise NoSplit(f"data: {path} has no split {split!r}; {how}")

    weights = tokens
    if split == "train" and len(tokens) > 1:
        entries = manifest.get("sources") or {"": {}}
        own = {name: entries[name].get("weight") for name in tokens}
        weights = tokens if None in own.values() else own
    total = sum(weights.values())
    root = directory.resolve()  # two ways to write a path are one source
    return {root / name: (one / total, tokens[name]) for name, one in weights.items() if one}


class TextCorpus(Corpus):
    """The sources that data_dir names.

    val: validation splits of the sources that val_data names, else of data_dir's own.
    Raise UserError if no source has one, or if the sources do not have the same tokenizer.
    """

    def __init__(self, spec: str, block_size: int, pack: bool = False, val_data: str = "") -> None:
        self.block_size = block_size
        stages = parse_data_dir(spec)
        paths = [path for stage in stages for path in stage.weights]
        self.by_path = {path: sources_of(path, "train") for path in paths}
        # a source that several stages name is opened once
        every = [source for path in paths for source in self.by_path[path]]
        self.sources = list(dict.fromkeys(every))
        self.names = names_of([os.path.relpath(path) for path in self.sources])
        self.stages = [(stage.first_step, self._weights(stage.weights)) for stage in stages]
        if pack:
            self.train = [PackedData(source, block_size) for source in self.sources]
        else:
            self.train = [TokenData(source, "train") for source in self.sources]
        self.dir = self.train[0].dir  # the directory of the tokenizer
        # the ids of another tokenizer would mean other text
        for data in self.train:
            data.check_tokenizer(self.train[0].tokenizer_fingerprint)
        self._open_val(val_data)

    def _open_val(self, val_data: str) -> None:
        """Open the validation splits. A source need not have one, unless val_data names it."""
        given = parse_weights(val_data, val_data, "val_data") if val_data else {}  # {path: weight}
        weights: dict[Path, float] = {}  # by default the numbers of tokens
        for path, weight in given.items():
            for source, (share, n_tokens) in sources_of(path, "val").items():
                weights[source] = n_tokens if weight is None else weight * share
        sources = list(weights) or self.sources
        self.val: dict[str, TokenData] = {}
        self.no_val = {}
        names = names_of([os.path.relpath(path) for path in sources])
        for name, source in zip(names, sources, strict=True):
            try:
                data = TokenData(source, "val")
                data.check_tokenizer(self.train[0].tokenizer_fingerprint)
                count_val_windows(data, self.block_size)
                self.val[name] = data
            except NoSplit as error:  # it has no such split, or too short a one
                self.no_val[name] = error  # `describe` warns of it
        # A source that is only trained on may lack a split. One that val_data names must have it.
        if not self.val or (val_data and self.no_val):
            raise next(iter(self.no_val.values()))
        self.val_weights = dict(zip(self.val, weights.values(), strict=True)) if val_data else {}

    def _weights(self, weights: dict[str, float | None]) -> list[float]:
        """Return the weight of each source in a stage from the weights of paths.

        A path without a weight weighs as much as it has tokens."""
        found = dict.fromkeys(self.sources, 0.0)
        for path, weight in weights.items():
            sources = self.by_path[path]
            if weight is None:  # then no path of this stage has one
                several = len(weights) > 1
                weight = sum(tokens for _, tokens in sources.values()) if several else 1.0
            for source, (share, _) in sources.items():
                if found[source]:
                    twice = f"{path} names {source} a second time in one stage"
                    raise UserError(f"data: {twice}; name it once")
                found[source] = share * weight  # of the path's weight
        return list(found.values())

    def sampler(self, source: int, seed: int, samples_per_step: int) -> Sampler:
        data = self.train[source]
        if isinstance(data, PackedData):  # its samples are rows
            return Sampler(data.n_rows, seed, source)
        return window_sampler(data.n_tokens, self.block_size, seed, source, self.names[source])

    def numbers_of(self, path: str) -> list[int]:
        numbers = []
        # a path that data_dir does not name itself may be a source of one that it names
        for source in self.by_path.get(path) or sources_of(path, "train"):
            if source not in self.sources:
                raise UserError(f"data: max_epochs names {source}, which data_dir does not name")
            numbers.append(self.sources.index(source))
        return numbers

    def size(self, data: TokenData) -> str:
        return f"{data.n_tokens:,}"

    def most_documents(self) -> int:
        """Return an upper bound on the documents in a row of training or validation."""
        every = [*self.train, *self.val.values()]  # attention has room for the most of all
        return max(data.most_documents(self.block_size) for data in every)

    def report(self) -> list[str]:
        """Return lines for people: the size of each source and validation split."""
        lines = []
        for name, data in [*zip(self.names, self.train, strict=True), *self.val.items()]:
            size = f"{counted(data.n_documents, 'document')}, {data.n_bytes:,} bytes"
            fingerprint = data.fingerprint[:16]  # enough to compare by eye
            text = f"{size}, {data.n_tokens:,} tokens, fingerprint {fingerprint}"
            lines.append(f"{name} {data.split}: {text}")
        return lines

    def tokens_seen(self, order: Mixture, n_samples: int) -> dict[str, int]:
        """Return {"tokens/name": tokens} of each source in the first n_samples samples.

        A single source has none: they would be the run's own `tokens`."""
        if len(self.names) == 1:
            return {}
        counts = (order.counts(n_samples) * self.block_size).tolist()
        return {f"tokens/{name}": n for name, n in zip(self.names, counts, strict=True)}

    def batch(self, data: Sequence[TokenData], starts: np.ndarray) -> "Windows":
        return load_windows(data, starts, self.block_size)

    def val_starts(self, data: TokenData) -> np.ndarray:
        # Windows lie side by side: no token is a target twice. What is behind the last is left out.
        return np.arange(count_val_windows(data, self.block_size)) * self.block_size

    def targets_of(self, source: int, starts: np.ndarray) -> np.ndarray:
        # a window of n tokens has n - 1 targets: the first token has nothing before it
        return self.train[source].text_lengths(starts, self.block_size + 1) - 1


class Windows(NamedTuple):
    x: Tensor  # (B, T) int64
    y: Tensor  # (B, T) int64: the inputs one token later, IGNORE where nothing is learned


def load_windows(data: Sequence[TokenData], starts: np.ndarray, block_size: int) -> Windows:
    """Return the batch of the windows that start at starts[i] of data[i]."""
    places = list(zip(data, starts, strict=True))
    length = block_size + 1  # the last token is only a target
    rows = np.stack([tokens.window(int(start), length) for tokens, start in places])
    x, y = rows[:, :-1].copy(), rows[:, 1:].copy()  # (B, T) each; y is x one token later
    # What fills up a packed row is not learned. The first of n_text tokens is no target.
    one_by_one = [tokens.text_lengths(np.array([start]), length) for tokens, start in places]
    n_text = np.concatenate(one_by_one)  # (B,)
    y[np.arange(block_size) >= n_text[:, None] - 1] = IGNORE
    return Windows(torch.from_numpy(x), torch.from_numpy(y))


def count_val_windows(data: TokenData, block_size: int) -> int:
    """Return the number of windows of a validation split. Raise NoSplit if there is none."""
    n_windows = (data.n_tokens - 1) // block_size
    if n_windows < 1:
        has = f"the {data.split} split of {data.dir} has {counted(data.n_tokens, 'token')}"
        needs = f"block_size={block_size} needs {block_size + 1}"
        how = "prepare more text, raise prepare.py's val_fraction or lower block_size"
        raise NoSplit(f"data: {has}, but {needs}; {how}")
    return n_windows
