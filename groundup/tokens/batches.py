"""The data of pretrain.py (token files of several sources), and the loader of micro-batches.

From a step to tensors:
    step (from 0), micro-step -> numbers of samples       Batches.samples
    -> source, and where the sample starts in it          Mixture.starts_of
    -> block_size + 1 ids                                 TokenData.window
    -> x = ids[:-1], y = ids[1:]                          load_windows
    -> a queue, in a thread -> the device                 Batches._load, Batches.next
"""

import itertools
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from groundup.errors import UserError
from groundup.tokens import IGNORE
from groundup.tokens.mixture import (
    Corpus,
    Mixture,
    Sampler,
    WindowSampler,
    names_of,
    parse_data_dir,
    parse_weights,
    spread,
)
from groundup.tokens.token_files import NoSplit, PackedData, TokenData, locate, read_manifest

# ---- the sources of pretrain.py --------------------------------------------------------------

SourceKey = tuple[Path, str]  # (directory, name of the source in its manifest)


def sources_of(path: str, split: str) -> Counter[SourceKey]:
    """Return {source: tokens} of a split of what a path names. Raise NoSplit if there are none."""
    directory, only = locate(path)
    splits = read_manifest(directory)["splits"]
    tokens: Counter[SourceKey] = Counter()
    for shard in splits.get(split, {"shards": []})["shards"]:
        source = shard.get("source", "")
        if only in (None, source):
            # resolved: two ways to write a path are one source
            tokens[directory.resolve(), source] += shard["tokens"]
    if not tokens.total():
        how = "rerun prepare.py with more text" + " or val_fraction" * (split == "val")
        raise NoSplit(f"data: {path} has no split {split!r}; {how}")
    return +tokens


def train_sources(path: str) -> dict[SourceKey, tuple[float, int]]:
    """Return {source: (share, train tokens)} of what a path names; the shares add up to 1.

    They follow the manifest's weights, or, if it has none, the numbers of tokens."""
    tokens = sources_of(path, "train")
    entries = read_manifest(locate(path)[0]).get("sources") or {"": {}}
    weights = {key: entries[key[1]].get("weight") for key in tokens}
    if len(tokens) == 1 or None in weights.values():
        weights = tokens
    total = sum(weights.values())
    return {key: (weight / total, tokens[key]) for key, weight in weights.items() if weight}


def val_sources(val_data: str) -> dict[SourceKey, float]:
    """Return {source: weight} of the validation splits that val_data names. Raise NoSplit.

    Without weights they are the numbers of tokens."""
    found = {}
    for path, weight in parse_weights(val_data, val_data, "val_data").items():
        tokens = sources_of(path, "val")
        for key, n in tokens.items():
            found[key] = n if weight is None else weight * n / tokens.total()
    return found


def log_names(keys: Sequence[SourceKey]) -> list[str]:
    """Return names for the log: of the source or directory, or the path if that is not unique."""
    paths = [os.path.relpath(directory / source) for directory, source in keys]
    return names_of(paths, [source or directory.resolve().name for directory, source in keys])


class TextCorpus(Corpus):
    """The sources that data_dir names.

    val: validation splits of the sources that val_data names, else of data_dir's own.
    no_val: {name: why it has none}. Raise UserError if no source has one, or if the sources do not
    have the same tokenizer.
    """

    def __init__(self, spec: str, block_size: int, pack: bool = False, val_data: str = "") -> None:
        self.block_size = block_size
        stages = parse_data_dir(spec)
        self.by_path = {path: train_sources(path) for stage in stages for path in stage.weights}
        keys = [key for found in self.by_path.values() for key in found]
        self.keys = list(dict.fromkeys(keys))
        self.names = log_names(self.keys)
        self.stages = [(stage.first_step, self._weights(stage.weights)) for stage in stages]
        if pack:
            self.train = [PackedData(directory, block_size, name) for directory, name in self.keys]
        else:
            self.train = [TokenData(directory, "train", name) for directory, name in self.keys]
        self.dir = self.train[0].dir  # the directory of the tokenizer
        for data in self.train:
            data.check_tokenizer(self.train[0].tokenizer_fingerprint)
        self._open_val(val_data)

    def _open_val(self, val_data: str) -> None:
        weights = val_sources(val_data) if val_data else {}
        keys = list(weights) or self.keys
        self.val: dict[str, TokenData] = {}
        self.no_val: dict[str, NoSplit] = {}
        for name, (directory, source) in zip(log_names(keys), keys, strict=True):
            try:
                data = TokenData(directory, "val", source)
                data.check_tokenizer(self.train[0].tokenizer_fingerprint)
                count_val_windows(data, self.block_size)
                self.val[name] = data
            except NoSplit as error:
                self.no_val[name] = error
        if not self.val or (val_data and self.no_val):
            raise next(iter(self.no_val.values()))
        self.val_weights = dict(zip(self.val, weights.values(), strict=True)) if val_data else {}

    def _weights(self, weights: dict[str, float | None]) -> list[float]:
        """Return the weight of each source in a stage from the weights of paths.

        A path without a weight weighs as much as it has tokens."""
        found = dict.fromkeys(self.keys, 0.0)
        for path, weight in weights.items():
            sources = self.by_path[path]
            if weight is None:
                several = len(weights) > 1
                weight = sum(tokens for _, tokens in sources.values()) if several else 1.0
            for key, (share, _) in sources.items():
                if found[key]:
                    twice = f"{path} names {key[0] / key[1]} a second time in one stage"
                    raise UserError(f"data: {twice}; name it once")
                found[key] = share * weight
        return list(found.values())

    def sampler(self, source: int, seed: int, samples_per_step: int) -> Sampler:
        data = self.train[source]
        if isinstance(data, PackedData):
            return Sampler(data.n_rows, seed, source)
        return WindowSampler(data.n_tokens, self.block_size, seed, source, self.names[source])

    def by_source(self, values: dict[str, float | None], key: str) -> dict[int, float]:
        found = {}
        for path, value in values.items():
            if value is None:
                raise UserError(f"data: {key} has {path!r}; write '4' or 'data/a=2,data/b=8'")
            for source in self.by_path.get(path) or train_sources(path):
                name = source[0] / source[1]
                if source not in self.keys:
                    raise UserError(f"data: {key} names {name}, which data_dir does not name")
                number = self.keys.index(source)
                if number in found:
                    raise UserError(f"data: {key} names {name}, twice")
                found[number] = value
        return found

    def size(self, data: TokenData) -> str:
        return f"{data.n_tokens:,}"

    def most_documents(self) -> int:
        """Return an upper bound on the documents in a row of training or validation."""
        every = [*self.train, *self.val.values()]
        return max(data.most_documents(self.block_size) for data in every)

    def describe(self, order: Mixture, n_samples: int) -> tuple[str, list[str]]:
        text, warnings = super().describe(order, n_samples)
        lost = [f"warning     {why}; {name} is not evaluated" for name, why in self.no_val.items()]
        return text, lost + warnings

    def report(self) -> list[str]:
        """Return lines for people: the size of each source and validation split."""
        lines = []
        for name, data in [*zip(self.names, self.train, strict=True), *self.val.items()]:
            size = (
                f"{data.n_documents:,} documents, {data.n_bytes:,} bytes, {data.n_tokens:,} tokens"
            )
            lines.append(f"{name} {data.split}: {size}, fingerprint {data.fingerprint[:16]}")
        return lines

    def tokens_seen(self, order: Mixture, n_samples: int) -> dict[str, int]:
        """Return {"tokens/name": tokens} of each source in the first n_samples samples.

        A single source has none: they would be the run's own `tokens`."""
        if len(self.names) == 1:
            return {}
        counts = (order.counts(n_samples) * self.block_size).tolist()
        return {f"tokens/{name}": n for name, n in zip(self.names, counts, strict=True)}

    def load(self, sources: np.ndarray, starts: np.ndarray) -> "Windows":
        """Return the micro-batch of the windows that start at starts[i] of source sources[i]."""
        return load_windows([self.train[k] for k in sources], starts, self.block_size)

    def count_targets(self, sources: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return (n,) int64: how many targets of each window are trained on."""
        found = np.empty(len(starts), dtype=np.int64)
        for k in np.unique(sources):
            own = sources == k
            found[own] = self.train[k].tokens_to_learn(starts[own], self.block_size + 1) - 1
        return found

    def val_batches_of(
        self, data: TokenData, batch_size: int, eval_steps: int, rank: int, world_size: int
    ) -> Iterator["Windows"]:
        return val_batches(data, self.block_size, batch_size, eval_steps, rank, world_size)


# ---- windows of tokens -----------------------------------------------------------------------


class Windows(NamedTuple):
    x: Tensor  # (B, T) int64
    y: Tensor  # (B, T) int64: the inputs one token later, IGNORE where nothing is learned


def load_windows(data: Sequence[TokenData], starts: np.ndarray, block_size: int) -> Windows:
    """Return the batch of the windows that start at starts[i] of data[i]."""
    pairs = list(zip(data, starts, strict=True))
    length = block_size + 1
    rows = np.stack([split.window(int(start), length) for split, start in pairs])
    x, y = rows[:, :-1].copy(), rows[:, 1:].copy()
    # Behind the last document of a packed row nothing is learned. A row of n_text tokens of text
    # has n_text - 1 targets.
    one_by_one = [split.tokens_to_learn(np.array([start]), length) for split, start in pairs]
    n_text = np.concatenate(one_by_one)
    y[np.arange(block_size) >= n_text[:, None] - 1] = IGNORE
    return Windows(torch.from_numpy(x), torch.from_numpy(y))


def val_batches(
    data: TokenData,
    block_size: int,
    batch_size: int,
    eval_steps: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Windows]:
    """Yield this rank's part of eval_steps batches (0 = all), spread evenly, on the CPU."""
    n_windows = count_val_windows(data, block_size)
    for windows in spread(n_windows, batch_size, eval_steps, rank, world_size):
        yield load_windows([data] * len(windows), windows * block_size, block_size)


def count_val_windows(data: TokenData, block_size: int) -> int:
    """Return the number of windows of a validation split. Raise NoSplit if there is none."""
    n_windows = (data.n_tokens - 1) // block_size
    if n_windows < 1:
        has = f"the {data.split} split of {data.dir} has {data.n_tokens} tokens"
        needs = f"block_size={block_size} needs {block_size + 1}"
        how = "prepare more text, raise prepare.py's val_fraction or lower block_size"
        raise NoSplit(f"data: {has}, but {needs}; {how}")
    return n_windows


# ---- the loader ------------------------------------------------------------------------------


def map_tensors(batch: tuple, function: Callable[[Tensor], Tensor]) -> tuple:
    """Return a NamedTuple of tensors with `function` applied to each; None stays."""
    return batch._make(None if tensor is None else function(tensor) for tensor in batch)


class Batches:
    """This rank's micro-batches from first_step on, without end, loaded ahead by a thread.

    corpus.load(sources, starts) makes a micro-batch, a NamedTuple of tensors, and
    corpus.count_targets(sources, starts) counts the targets of each sample.

    A step takes the next samples_per_step samples of the order. Each rank has a consecutive part
    of them, cut into micro-batches: the samples of a step depend neither on the number of ranks
    nor on that of micro-steps.
    """

    def __init__(
        self,
        corpus: Corpus,
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
        self.batch_size = batch_size
        self.accum_steps = accum_steps
        self.rank = world.rank
        self.samples_per_step = batch_size * accum_steps * world.world_size
        self.first_step = first_step
        self.device = torch.device(device)
        if self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.error: Exception | None = None
        self.stop = threading.Event()
        self.queue: queue.Queue = queue.Queue(maxsize=ahead)
        self.thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self.thread.start()

    def position(self, step: int) -> int:
        """Return the number of the first sample of a step (from 0), over all ranks."""
        return step * self.samples_per_step

    def count_targets(self, step: int) -> int:
        """Return the targets of a step (from 0) over all ranks, computed without communication."""
        samples = np.arange(self.position(step), self.position(step + 1))
        sources, starts = self.order.starts_of(samples)
        return int(self.corpus.count_targets(sources, starts).sum())

    def samples(self, step: int, micro_step: int) -> np.ndarray:
        """Return the sample numbers of this rank's micro-batch, (batch_size,) int64."""
        batch = self.rank * self.accum_steps + micro_step
        first = self.position(step) + batch * self.batch_size
        return np.arange(first, first + self.batch_size)

    def next(self) -> tuple:
        """Return the next micro-batch, on the device. Raise what the thread raised."""
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
        for begin in itertools.count(first, 32):
            micro_steps = [divmod(k, self.accum_steps) for k in range(begin, begin + 32)]
            samples = np.stack([self.samples(*micro_step) for micro_step in micro_steps])
            # Two matrices (32, batch_size), whose rows are micro-batches.
            for sources, starts in zip(*self.order.starts_of(samples), strict=True):
                batch = self.corpus.load(sources, starts)
                if pinned:
                    batch = map_tensors(batch, Tensor.pin_memory)
                self.queue.put(batch)
                if self.stop.is_set():
                    return
