"""The data of pretrain.py (token files of several sources), and the loader of micro-batches for all but rl.py."""

import itertools
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from groundup.errors import UserError
from groundup.tokens.corpus import Corpus, names_of, spread
from groundup.tokens.mixture import Mixture, parse_data_dir, parse_weights
from groundup.tokens.packing import PackedData
from groundup.tokens.token_files import NoSplit, TokenData, locate, read_manifest
from model import IGNORE

# ---- the sources of pretrain.py --------------------------------------------------------------------------------------

SourceKey = tuple[Path, str]  # (directory, name of the source in its manifest)


def sources_of(path: str) -> dict[SourceKey, tuple[float, int]]:
    """Return {source: (share, train tokens)} of what a path names; the shares add up to 1.

    They are the manifest's weights, or, if it has none, in proportion to the tokens. Sources of share 0 are left out.
    """
    directory, only = locate(path)
    manifest, directory = read_manifest(directory), directory.resolve()  # two ways to write a path are one source
    sources = manifest.get("sources") or {"": {"tokens": manifest["splits"].get("train", {"tokens": 0})["tokens"]}}
    if only is not None:
        sources = {only: sources[only]}
    key = "weight" if len(sources) > 1 and all("weight" in entry for entry in sources.values()) else "tokens"
    sources = {name: entry for name, entry in sources.items() if entry["tokens"]}  # prepare.py has warned of the others
    total = sum(entry[key] for entry in sources.values())
    if not total:
        raise NoSplit(f"data: {path} has no split 'train'; rerun prepare.py with more text")
    return {(directory, s): (entry[key] / total, entry["tokens"]) for s, entry in sources.items() if entry[key]}


def val_sources(val_data: str) -> dict[SourceKey, float]:
    """Return {source: weight} of the validation splits that val_data names; by default the weight is the number of
    tokens. Raise NoSplit."""
    found = {}
    for path, weight in parse_weights(val_data, val_data, "val_data").items():
        directory, only = locate(path)
        tokens = Counter()
        for shard in read_manifest(directory)["splits"].get("val", {"shards": []})["shards"]:
            if only in (None, source := shard.get("source", "")):
                tokens[directory.resolve(), source] += shard["tokens"]
        if not tokens:
            raise NoSplit(f"data: val_data: {path} has no split 'val'; rerun prepare.py with more text or val_fraction")
        found |= {key: n if weight is None else weight * n / tokens.total() for key, n in tokens.items()}
    return found


def log_names(keys: Sequence[SourceKey]) -> list[str]:
    """Return the names of sources in the log: the source's or directory's, the path where that is not unique."""
    paths = [os.path.relpath(directory / source) for directory, source in keys]
    return names_of(paths, [source or directory.resolve().name for directory, source in keys])


class TextCorpus(Corpus):
    """The sources that data_dir names. val: the validation splits of the sources that val_data names, else their own.
    no_val: {name: why it has none}. Raise UserError if all have none, or if not all have the same tokenizer."""

    def __init__(self, spec: str, block_size: int, pack: bool = False, val_data: str = "") -> None:
        self.block_size = block_size
        stages = parse_data_dir(spec)
        self.by_path = {path: sources_of(path) for stage in stages for path in stage.weights}
        self.keys = list(dict.fromkeys(key for found in self.by_path.values() for key in found))
        self.names = log_names(self.keys)
        self.stages = [(stage.first_step, self._weights(stage.weights)) for stage in stages]
        if pack:
            self.train = [PackedData(directory, block_size, source) for directory, source in self.keys]
        else:
            self.train = [TokenData(directory, "train", source) for directory, source in self.keys]
        self.dir = self.train[0].dir  # the directory of the tokenizer
        for data in self.train:
            data.check_tokenizer(self.train[0].tokenizer_fingerprint)
        weights = val_sources(val_data) if val_data else {}
        evaluated = list(weights) or self.keys
        self.val, self.no_val = {}, {}
        for name, (directory, source) in zip(log_names(evaluated), evaluated, strict=True):
            try:
                data = TokenData(directory, "val", source)
                data.check_tokenizer(self.train[0].tokenizer_fingerprint)
                val_window_count(data, block_size)
                self.val[name] = data
            except NoSplit as error:
                self.no_val[name] = error
        if not self.val or (val_data and self.no_val):
            raise next(iter(self.no_val.values()))
        self.val_weights = dict(zip(self.val, weights.values(), strict=True)) if val_data else {}

    def _weights(self, weights: dict[str, float | None]) -> list[float]:
        """Return the weight of each source in a stage from the weights of paths, by default their number of tokens."""
        found = dict.fromkeys(self.keys, 0.0)
        for path, weight in weights.items():
            sources = self.by_path[path]
            weight = sum(tokens for _, tokens in sources.values()) if weight is None and len(weights) > 1 else weight
            for key, (share, _) in sources.items():
                if found[key]:
                    raise UserError(f"data: {path} names {key[0] / key[1]} a second time in one stage; name it once")
                found[key] = share * (1.0 if weight is None else weight)
        return list(found.values())

    def by_source(self, values: dict[str, float], key: str) -> dict[int, float]:
        """See Corpus.by_source."""
        found = {}
        for path, value in values.items():
            if value is None:
                raise UserError(f"data: {key} has {path!r}; write '4' or 'data/a=2,data/b=8'")
            for source in self.by_path.get(path) or sources_of(path):
                if source not in self.keys or self.keys.index(source) in found:
                    wrong = "twice" if source in self.keys else "which data_dir does not name"
                    raise UserError(f"data: {key} names {source[0] / source[1]}, {wrong}")
                found[self.keys.index(source)] = value
        return found

    def size(self, data: TokenData) -> str:
        return f"{data.n_tokens:,}"

    def most_documents(self) -> int:
        """Return a bound on the documents in a row of training or validation, for attention within documents."""
        return max(data.most_documents(self.block_size) for data in [*self.train, *self.val.values()])

    def describe(self, order: Mixture, n_samples: int) -> tuple[str, list[str]]:
        text, warnings = super().describe(order, n_samples)
        return text, [f"warning     {error}; {name} is not evaluated" for name, error in self.no_val.items()] + warnings

    def report(self) -> list[str]:
        """Return lines for people: the size of each source and validation split."""
        splits = [*zip(self.names, self.train, strict=True), *self.val.items()]
        return [
            f"{name} {data.split}: {data.n_documents:,} documents, {data.n_bytes:,} bytes, {data.n_tokens:,} "
            f"tokens, fingerprint {data.fingerprint[:16]}"
            for name, data in splits
        ]

    def tokens_seen(self, order: Mixture, n_samples: int) -> dict[str, int]:
        """Return {"tokens/name": tokens} of each source in the first n_samples samples; {} for a single source."""
        counts = (order.counts(n_samples) * self.block_size).tolist()
        return {f"tokens/{name}": n for name, n in zip(self.names, counts, strict=True)} if len(counts) > 1 else {}

    def val_batches_of(
        self, data: TokenData, batch_size: int, eval_steps: int, rank: int, world_size: int
    ) -> "Iterator[Windows]":
        return val_batches(data, self.block_size, batch_size, eval_steps, rank, world_size)


# ---- windows of tokens -----------------------------------------------------------------------------------------------


class Windows(NamedTuple):
    x: torch.Tensor  # (B, T) int64
    y: torch.Tensor  # (B, T) int64: the inputs one token later, IGNORE where nothing is learned


def load_windows(data: Sequence[TokenData], sources: np.ndarray, starts: np.ndarray, block_size: int) -> Windows:
    """Return the windows at starts[i] of data[sources[i]]."""
    rows = np.stack([data[s].window(int(at), block_size + 1) for s, at in zip(sources, starts, strict=True)])
    x, y = rows[:, :-1].copy(), rows[:, 1:].copy()
    y[np.arange(block_size) >= valid_targets(data, sources, starts, block_size)[:, None]] = IGNORE
    return Windows(torch.from_numpy(x), torch.from_numpy(y))


def valid_targets(data: Sequence[TokenData], sources: np.ndarray, starts: np.ndarray, block_size: int) -> np.ndarray:
    """Return (n,) int64: how many targets of each window are trained on, counted from its beginning."""
    found = np.empty(len(starts), dtype=np.int64)
    for source in np.unique(sources):
        found[sources == source] = data[source].valid(starts[sources == source], block_size + 1) - 1
    return found


def val_batches(
    data: TokenData, block_size: int, batch_size: int, eval_steps: int = 0, rank: int = 0, world_size: int = 1
) -> Iterator[Windows]:
    """Yield this rank's share of eval_steps batches of windows (0 = all), spread evenly over the split, on the CPU."""
    n_windows = val_window_count(data, block_size)
    for windows in spread(n_windows, batch_size, eval_steps, rank, world_size):
        yield load_windows([data], np.zeros_like(windows), windows * block_size, block_size)


def val_window_count(data: TokenData, block_size: int) -> int:
    """Return the number of windows of a validation split. Raise NoSplit if there is none."""
    n_windows = (data.n_tokens - 1) // block_size
    if n_windows < 1:
        raise NoSplit(
            f"data: the {data.split} split of {data.dir} has {data.n_tokens} tokens, but block_size={block_size} needs "
            f"{block_size + 1}; prepare more text, raise prepare.py's val_fraction or lower block_size"
        )
    return n_windows


# ---- the loader ------------------------------------------------------------------------------------------------------


def in_each(batch: tuple, do: Callable[[torch.Tensor], torch.Tensor]) -> tuple:
    """Return a NamedTuple of tensors with `do` applied to each; None stays."""
    return batch._make(None if tensor is None else do(tensor) for tensor in batch)


class Batches:
    """This rank's micro-batches from start_step on, without end, loaded ahead by a thread.

    load(sources, starts) makes a micro-batch, a NamedTuple of tensors; valid(sources, starts) returns the number of
    targets, or their weight, of each window. Default: windows (x, y) of `data`. A step of B = batch_size * accum_steps
    * world_size samples takes the samples step * B ... step * B + B - 1; rank r has the r-th part of them, cut into
    micro-batches in order: the same samples in the same order for any number of ranks and micro-steps.
    """

    def __init__(
        self, data: Sequence[TokenData], order: Mixture, block_size: int, batch_size: int, accum_steps: int,
        rank: int = 0, world_size: int = 1, device: str | torch.device = "cpu", start_step: int = 0, ahead: int = 4,
        load: Callable[[np.ndarray, np.ndarray], tuple] | None = None,
        valid: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        assert 0 <= rank < world_size, f"{rank=} {world_size=}"
        assert batch_size > 0 and accum_steps > 0, f"{batch_size=} {accum_steps=}"
        self.order = order
        self.load = load or partial(load_windows, data, block_size=block_size)
        self.valid = valid or partial(valid_targets, data, block_size=block_size)
        self.batch_size, self.accum_steps = batch_size, accum_steps
        self.rank, self.start_step, self.device = rank, start_step, torch.device(device)
        if self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.samples_per_step = batch_size * accum_steps * world_size
        self.queue: queue.Queue = queue.Queue(maxsize=ahead)
        self.stop, self.error = threading.Event(), None
        self.thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self.thread.start()

    def position(self, step: int) -> int:
        """Return the number of the first sample of a step (from 0), over all ranks."""
        return step * self.samples_per_step

    def valid_tokens(self, step: int) -> int | float:
        """Return the number of targets of a step (from 0), or their weight, over all ranks, from the order alone."""
        samples = np.arange(self.position(step), self.position(step + 1))
        return self.valid(*self.order.start(samples)).sum().item()

    def samples(self, step: int, micro_step: int) -> np.ndarray:
        """Return the sample numbers of this rank's micro-batch, (batch_size,) int64."""
        first = self.position(step) + (self.rank * self.accum_steps + micro_step) * self.batch_size
        return np.arange(first, first + self.batch_size)

    def next(self) -> tuple:
        """Return the next micro-batch, on the device. Raise what the thread raised."""
        item = self.error or self.queue.get()
        if isinstance(item, Exception):
            self.error = item
            raise item
        pinned = self.device.type == "cuda"
        return in_each(item, lambda tensor: tensor.to(self.device, non_blocking=pinned))

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
        pinned = self.device.type == "cuda"  # from page-locked memory the copy to the device runs in the background
        if pinned:
            torch.cuda.set_device(self.device)  # a thread begins on device 0; pinning there would open a context on it
        first = self.start_step * self.accum_steps
        for block in itertools.count(first, 32):  # samples of many micro-batches at once: numpy is slow on few numbers
            samples = [self.samples(*divmod(k, self.accum_steps)) for k in range(block, block + 32)]
            for sources, starts in zip(*self.order.start(np.stack(samples)), strict=True):
                batch = self.load(sources, starts)
                self.queue.put(in_each(batch, lambda tensor: tensor.pin_memory()) if pinned else batch)
                if self.stop.is_set():
                    return
