"""The training batches of pretrain.py: several sources of token files in the order of mixture.py."""

import itertools
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from groundup.errors import UserError
from groundup.tokens.mixture import (
    Curriculum,
    Mixture,
    Sampler,
    parse_data_dir,
    parse_max_epochs,
    parse_weights,
    quotas,
)
from groundup.tokens.packing import PackedData
from groundup.tokens.token_files import IGNORE, SORTED, NoSplit, TokenData, locate, read_manifest

if TYPE_CHECKING:
    import torch

MANY_EPOCHS = 4  # Muennighoff et al. 2023: up to here repeated tokens are worth nearly as much as new ones


# ---- several sources -------------------------------------------------------------------------------------------------


def sources_of(path: str) -> dict[tuple[Path, str], tuple[float, int]]:
    """{(directory, source): (share, train tokens)} of what a path names; the shares add up to 1.

    They are the manifest's weights, or, where it has none, in proportion to the tokens; what has share 0 is left out.
    """
    directory, only = locate(path)
    manifest, directory = read_manifest(directory), directory.resolve()  # two ways to write a path are one source
    sources = manifest.get("sources") or {"": {"tokens": manifest["splits"].get("train", {"tokens": 0})["tokens"]}}
    if only is not None:
        sources = {only: sources[only]}
    key = "weight" if len(sources) > 1 and all("weight" in entry for entry in sources.values()) else "tokens"
    sources = {name: entry for name, entry in sources.items() if entry["tokens"]}  # prepare.py has said which have none
    total = sum(entry[key] for entry in sources.values())
    if not total:
        raise NoSplit(f"data: {path} has no split 'train'; rerun prepare.py with more text")
    return {(directory, s): (entry[key] / total, entry["tokens"]) for s, entry in sources.items() if entry[key]}


def val_sources(val_data: str) -> dict[tuple[Path, str], float]:
    """{(directory, source): weight} of the validation splits that val_data names; what has no weight of its own weighs
    what tokens it has. Raises NoSplit."""
    found = {}
    for path, weight in parse_weights(val_data, val_data, "val_data").items():
        directory, only = locate(path)
        shards = read_manifest(directory)["splits"].get("val", {"shards": []})["shards"]
        tokens = Counter()
        for shard in shards:
            tokens[shard.get("source", "")] += shard["tokens"]
        tokens = {source: n for source, n in tokens.items() if only in (None, source)}
        if not tokens:
            raise NoSplit(f"data: val_data: {path} has no split 'val'; rerun prepare.py with more text or val_fraction")
        total = sum(tokens.values())
        for source, n in tokens.items():
            found[directory.resolve(), source] = n if weight is None else weight * n / total
    return found


def names_of(keys: Sequence[tuple[Path, str]]) -> list[str]:
    """What the log calls these (directory, source): the source or directory, the path where that names two."""
    names = [source or directory.resolve().name for directory, source in keys]
    paths = [os.path.relpath(directory / source) for directory, source in keys]
    return [name if names.count(name) == 1 else path for name, path in zip(names, paths, strict=True)]


class Corpus:
    """The sources that a data_dir string names (mixture.py has its syntax), opened, and their weights in each stage.

    names: what the log calls them. train: their tokens. val: by name the validation splits of the sources that val_data
    names in the same way, else of their own; no_val: why others have none. Raises DataError if all have none, or if not
    all were made by the same tokenizer.
    """

    def __init__(self, spec: str, block_size: int, pack: bool = False, val_data: str = "") -> None:
        self.block_size = block_size
        stages = parse_data_dir(spec)
        self.by_path = {path: sources_of(path) for stage in stages for path in stage.weights}
        self.keys = list(dict.fromkeys(key for found in self.by_path.values() for key in found))
        self.names = names_of(self.keys)
        self.stages = [(stage.first_step, self._weights(stage.weights)) for stage in stages]
        if pack:
            self.train = [PackedData(directory, block_size, source) for directory, source in self.keys]
        else:
            self.train = [TokenData(directory, "train", source) for directory, source in self.keys]
        self.dir = self.train[0].dir  # where the tokenizer lies
        for data in self.train:
            data.check_tokenizer(self.train[0].tokenizer_fingerprint)
        self.val_weights = val_sources(val_data) if val_data else {}
        evaluated = list(self.val_weights) if val_data else self.keys
        self.val, self.no_val = {}, {}
        for name, (directory, source) in zip(names_of(evaluated), evaluated, strict=True):
            try:
                self.val[name] = TokenData(directory, "val", source)
                self.val[name].check_tokenizer(self.train[0].tokenizer_fingerprint)
                val_window_count(self.val[name], block_size)
            except NoSplit as error:
                self.val.pop(name, None)
                self.no_val[name] = error
        if not self.val or (val_data and self.no_val):
            raise next(iter(self.no_val.values()))

    def _weights(self, weights: dict[str, float | None]) -> list[float]:
        """Weight of each source in a stage, from those of its paths; without any, paths weigh what tokens they have."""
        found = dict.fromkeys(self.keys, 0.0)
        for path, weight in weights.items():
            sources = self.by_path[path]
            weight = sum(tokens for _, tokens in sources.values()) if weight is None and len(weights) > 1 else weight
            for key, (share, _) in sources.items():
                if found[key]:
                    raise UserError(f"data: {path} names {key[0] / key[1]} a second time in one stage; name it once")
                found[key] = share * (1.0 if weight is None else weight)
        return list(found.values())

    def order(
        self, seed: int, samples_per_step: int, max_steps: int, max_epochs: str = "", competence: float = 1.0,
        competence_steps: int = 0, competence_schedule: str = "sqrt",
    ) -> Mixture:  # fmt: skip
        """Which window every sample is. Raises DataError if max_epochs lets the data end before max_steps."""
        samplers = [
            Sampler(data.n_tokens, self.block_size, seed, k, isinstance(data, PackedData), name)
            for k, (name, data) in enumerate(zip(self.names, self.train, strict=True))
        ]
        most = self._most_epochs(max_epochs)
        limits = [
            max(1, int(most[key] * sampler.n_windows)) if key in most else float("inf")
            for key, sampler in zip(self.keys, samplers, strict=True)
        ]
        stages = [(step * samples_per_step, weights) for step, weights in self.stages]
        order = Mixture(samplers, seed, stages, self.names, limits)
        check_end(order, samples_per_step, max_steps, max_epochs)
        if competence < 1:
            self._check_sorted()
            n_samples = order.counts(competence_steps * samples_per_step).tolist()
            order.samplers = [
                Curriculum(sampler, n, competence, competence_schedule)
                for sampler, n in zip(samplers, n_samples, strict=True)
            ]
        return order

    def _most_epochs(self, max_epochs: str) -> dict[tuple[Path, str], float]:
        """{source: limit} from the key of that name."""
        most = {}
        for path, limit in parse_max_epochs(max_epochs).items():
            named = self.by_path.get(path) or (sources_of(path) if path else self.keys)
            if foreign := [key for key in named if key not in self.keys]:
                raise UserError(f"data: max_epochs names {foreign[0][0] / foreign[0][1]}, which data_dir does not")
            if twice := [key for key in named if key in most]:
                raise UserError(f"data: max_epochs={max_epochs!r} names {twice[0][0] / twice[0][1]} twice")
            most |= dict.fromkeys(named, limit)
        return most

    def _check_sorted(self) -> None:
        for data in self.train:
            order = data.manifest["info"].get("recipe", {}).get("order", "")
            if isinstance(data, PackedData):
                raise UserError("data: packed rows are in no order of difficulty; use competence or pack, not both")
            if order not in SORTED:
                raise UserError(
                    f"data: competence needs documents from easy to hard, but {data.dir} was prepared with {order=}; "
                    f"rerun prepare.py with --order={SORTED[0]} (or {', '.join(SORTED[1:])})"
                )

    def record(self) -> dict[str, list]:
        """What, besides options and seed, decides the order of samples, see `same_order`."""
        return {"data": [data.fingerprint for data in self.train], "stages": stage_quotas(self.stages)}

    def describe(self, order: Mixture, n_samples: int) -> tuple[str, list[str]]:
        """How often n_samples samples go through each source; lines that warn."""
        several, epochs = len(self.names) > 1, order.epochs(n_samples).tolist()
        text = ", ".join(
            f"{times:.2f} epochs of {data.n_tokens:,}" + (f" ({name})" if several else "")
            for name, data, times in zip(self.names, self.train, epochs, strict=True)
        )
        lines = [f"warning     {error}; {name} is not evaluated" for name, error in self.no_val.items()]
        lines += repeats(order, n_samples)
        return text, lines

    def report(self) -> list[str]:
        """Lines for people: what each source and each validation split holds, and of which files it was made."""
        splits = [*zip(self.names, self.train, strict=True), *self.val.items()]
        lines = [
            f"{name} {data.split}: {data.n_documents:,} documents, {data.n_bytes:,} bytes, {data.n_tokens:,} "
            f"tokens, fingerprint {data.fingerprint[:16]}"
            for name, data in splits
        ]
        inputs = {entry["path"]: entry for data in self.train for entry in data.manifest["info"].get("inputs", [])}
        lines += [f"  made of {path}, sha256 {entry['sha256'][:16]}" for path, entry in list(inputs.items())[:20]]
        return lines + ([f"  and {len(inputs) - 20:,} more files"] if len(inputs) > 20 else [])

    def tokens_seen(self, order: Mixture, n_samples: int) -> dict[str, int]:
        """{"tokens/name": tokens} of each source among the first n_samples samples; {} if there is only one source."""
        counts = (order.counts(n_samples) * self.block_size).tolist()
        return {f"tokens/{name}": n for name, n in zip(self.names, counts, strict=True)} if len(counts) > 1 else {}

    def val_shares(self) -> list[float]:
        """The weight of each of `val` in the whole validation loss: that of val_data, else that of its source in
        the last stage, which is what training ends with, whatever eval_steps is."""
        if self.val_weights:
            weights = list(self.val_weights.values())
            return [weight / sum(weights) for weight in weights]
        return evaluation_weights(list(self.val), self.names, self.stages)

    def val_batches(
        self, batch_size: int, eval_steps: int, rank: int = 0, world_size: int = 1
    ) -> dict[str, Iterator[tuple["torch.Tensor", "torch.Tensor"]]]:
        """This rank's evaluation batches of each source; eval_steps in all, shared out evenly, at least one each.
        `val_shares` says how their losses are put together."""
        found = {}
        for k, (name, data) in enumerate(self.val.items()):
            steps, first = eval_windows(k, len(self.val), eval_steps, rank, world_size)
            found[name] = val_batches(data, self.block_size, batch_size, steps, first, world_size)
        return found


# what other corpora of several sources do alike


def check_end(order: Mixture, samples_per_step: int, max_steps: int, max_epochs: str) -> None:
    """Raise DataError if max_epochs lets the data end before max_steps."""
    if order.end is not None and order.end < max_steps * samples_per_step:
        last = order.end // samples_per_step
        lower = f"lower max_steps={max_steps} to that or " if last else ""
        raise UserError(f"data: with max_epochs={max_epochs!r} the data end after step {last}; {lower}raise max_epochs")


def stage_quotas(stages: Sequence[tuple[int, Sequence[float]]]) -> list:
    """(first step, weights) of each stage as what decides the order: samples of each source in a block."""
    return [[first_step, quotas(np.array(weights)).tolist()] for first_step, weights in stages]


def repeats(order: Mixture, n_samples: int) -> list[str]:
    """Lines that warn of sources that n_samples samples go through too often."""
    return [
        f"warning     {name} is seen {times:.1f} times; beyond {MANY_EPOCHS} repetition adds little "
        "(arXiv:2305.16264): prepare more text, lower its weight or set max_epochs"
        for name, times, limit in zip(order.names, order.epochs(n_samples).tolist(), order.limits, strict=True)
        if times > MANY_EPOCHS and limit == float("inf")
    ]


def evaluation_weights(
    evaluated: Sequence[str], names: Sequence[str], stages: Sequence[tuple[int, Sequence[float]]]
) -> list[float]:
    """The weights of the sources that are evaluated in the last stage, adding up to 1."""
    weights = [stages[-1][1][names.index(name)] for name in evaluated]
    weights = weights if any(weights) else [1.0] * len(weights)
    return [weight / sum(weights) for weight in weights]


def eval_windows(k: int, n_sources: int, eval_steps: int, rank: int, world_size: int) -> tuple[int, int]:
    """(batches of source k, 0 = all, of eval_steps for all sources; which rank counts as 0): last batches, which may be
    small, go to different ranks."""
    steps = max(1, eval_steps // n_sources + (k < eval_steps % n_sources)) if eval_steps else 0
    return steps, (rank + k) % world_size


def spread(n_windows: int, batch_size: int, eval_steps: int, rank: int, world_size: int) -> Iterator[np.ndarray]:
    """This rank's share of eval_steps batches of window numbers, spread evenly; 0, or more than there are: all."""
    n = min(eval_steps * batch_size, n_windows) if eval_steps else n_windows
    chosen = np.arange(n) * n_windows // max(n, 1)
    for first in range(rank * batch_size, n, world_size * batch_size):
        yield chosen[first : first + batch_size]


def same_order(saved: dict[str, list], now: dict[str, list], step: int) -> str:
    """Which entry of two `Corpus.record`s gives the first `step` steps another order, "" if none does. Stages that
    begin later may be changed or added, with sources of their own behind the others."""
    stages = []
    for record in (saved, now):
        begun = [stage for stage in record["stages"] if stage[0] < max(step, 1)]
        stages.append([[first, np.trim_zeros(quotas, "b")] for first, quotas in begun])
    used = max(len(quotas) for _, quotas in stages[0])
    if saved["data"][:used] != now["data"][:used]:
        return "data"
    return "" if stages[0] == stages[1] else "stages"


# ---- batches ---------------------------------------------------------------------------------------------------------


class Windows(NamedTuple):
    x: "torch.Tensor"  # (B, T) int64
    y: "torch.Tensor"  # (B, T) int64, IGNORE where nothing is learnt


def load_windows(data: Sequence[TokenData], sources: np.ndarray, starts: np.ndarray, block_size: int) -> Windows:
    """Inputs and targets, each (len(starts), block_size) int64: targets are the inputs one token later, or IGNORE.

    Window i begins at starts[i] of data[sources[i]].
    """
    import torch

    rows = np.stack([data[s].window(int(at), block_size + 1) for s, at in zip(sources, starts, strict=True)])
    x, y = rows[:, :-1].copy(), rows[:, 1:].copy()
    y[np.arange(block_size) >= valid_targets(data, sources, starts, block_size)[:, None]] = IGNORE
    return Windows(torch.from_numpy(x), torch.from_numpy(y))


def valid_targets(data: Sequence[TokenData], sources: np.ndarray, starts: np.ndarray, block_size: int) -> np.ndarray:
    """(n,) int64: how many targets of each window are trained on, the first ones."""
    found = np.empty(len(starts), dtype=np.int64)
    for source in np.unique(sources):
        found[sources == source] = data[source].valid(starts[sources == source], block_size + 1) - 1
    return found


Load = Callable[[np.ndarray, np.ndarray], tuple]  # (sources, starts of windows in these) -> a NamedTuple of tensors
Valid = Callable[[np.ndarray, np.ndarray], np.ndarray]  # likewise -> (n,) how much of each window is trained on


def in_each(batch: tuple, do: "Callable[[torch.Tensor], torch.Tensor]") -> tuple:
    """A NamedTuple of tensors with something done to each; None stays."""
    return batch._make(None if tensor is None else do(tensor) for tensor in batch)


class Batches:
    """This rank's micro-batches, from start_step on for ever, loaded ahead by a thread.

    load(sources, starts) makes a micro-batch, a NamedTuple of tensors, and valid(sources, starts) tells how many
    targets each of its windows has, or their weight. Without them: (x, y) of windows of `data`.

    A step of B = batch_size * accum_steps * world_size samples takes the samples step * B ... step * B + B - 1; rank r
    has the r-th part of them, cut into micro-batches in order. So the samples of a step, and their order, depend on
    neither the number of ranks nor that of micro-steps.
    """

    def __init__(
        self, data: Sequence[TokenData], order: Mixture, block_size: int, batch_size: int, accum_steps: int,
        rank: int = 0, world_size: int = 1, device: "str | torch.device" = "cpu", start_step: int = 0, ahead: int = 4,
        load: Load | None = None, valid: Valid | None = None,
    ) -> None:  # fmt: skip
        import torch

        assert 0 <= rank < world_size, f"{rank=} {world_size=}"
        assert batch_size > 0 and accum_steps > 0, f"{batch_size=} {accum_steps=}"
        self.data, self.order, self.block_size = data, order, block_size
        self.load = load or partial(load_windows, data, block_size=block_size)
        self.valid = valid or partial(valid_targets, data, block_size=block_size)
        self.all_valid = valid is None and not any(isinstance(split, PackedData) for split in data)
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
        """Number of the first sample of a step (the first step is 0), over all ranks."""
        return step * self.samples_per_step

    def valid_tokens(self, step: int) -> int | float:
        """Targets of a step (from 0) that are trained on, or their weight, over all ranks, from the order alone."""
        if self.all_valid:
            return self.samples_per_step * self.block_size
        samples = np.arange(self.position(step), self.position(step + 1))
        return self.valid(*self.order.start(samples)).sum().item()

    def samples(self, step: int, micro_step: int) -> np.ndarray:
        """Sample numbers of this rank's micro-batch, (batch_size,) int64."""
        first = self.position(step) + (self.rank * self.accum_steps + micro_step) * self.batch_size
        return np.arange(first, first + self.batch_size)

    def next(self) -> tuple:
        """The next micro-batch on the device: x and y (batch_size, block_size) int64, or what `load` makes. Raises what
        the thread raised."""
        if self.error is None:
            item = self.queue.get()
            self.error = item if isinstance(item, BaseException) else None
        if self.error is not None:
            raise self.error
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
            for batch in self._load():
                self.queue.put(batch)
                if self.stop.is_set():
                    return
        except Exception as error:
            self.queue.put(error)  # raised by next(), in the thread that can act on it

    def _load(self) -> Iterator[tuple]:
        if self.device.type == "cuda":
            import torch

            torch.cuda.set_device(self.device)  # a thread begins on device 0; pinning there would open a context on it
        first = self.start_step * self.accum_steps
        for block in itertools.count(first, 32):  # many micro-batches' samples at once: numpy is slow on few numbers
            samples = [self.samples(*divmod(k, self.accum_steps)) for k in range(block, block + 32)]
            for sources, starts in zip(*self.order.start(np.stack(samples)), strict=True):
                batch = self.load(sources, starts)
                # from page-locked memory the copy to the device runs while the host goes on
                yield in_each(batch, lambda tensor: tensor.pin_memory()) if self.device.type == "cuda" else batch


def val_batches(
    data: TokenData, block_size: int, batch_size: int, eval_steps: int = 0, rank: int = 0, world_size: int = 1
) -> Iterator[tuple["torch.Tensor", "torch.Tensor"]]:
    """This rank's share of the evaluation batches (x, y), on the CPU: all ranks together have the same for any number.

    eval_steps batches of windows spread evenly over the split; 0, or more than there are: every window once, in order.
    """
    n_windows = val_window_count(data, block_size)
    for windows in spread(n_windows, batch_size, eval_steps, rank, world_size):
        yield load_windows([data], np.zeros_like(windows), windows * block_size, block_size)


def val_window_count(data: TokenData, block_size: int) -> int:
    """Windows of a validation split. Raises NoSplit if there is none."""
    n_windows = (data.n_tokens - 1) // block_size
    if n_windows < 1:
        raise NoSplit(
            f"data: the {data.split} split of {data.dir} has {data.n_tokens} tokens, but block_size={block_size} needs "
            f"{block_size + 1}; prepare more text or lower block_size"
        )
    return n_windows
