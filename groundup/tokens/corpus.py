"""What the training data of all trainers share: named sources, their weights by stage, epochs, validation, resume.

batches.TextCorpus          token files, for pretrain.py
conversations.ChatCorpus    conversations, for sft.py
pairs.PairCorpus            preference pairs, for dpo.py and reward.py
labelled.LabelCorpus        single answers, good or bad, for dpo.py --loss=kto
prompts.PromptCorpus        prompts, for rl.py
"""

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from groundup.errors import UserError
from groundup.tokens.mixture import Mixture, Sampler, Stage, parse_data_dir, parse_number, parse_weights, quotas
from groundup.tokens.row_reader import RowReader, SourceRows, read_source

MANY_EPOCHS = 4  # Muennighoff et al. 2023: up to here repeated tokens are worth nearly as much as new ones
FEW_STEPS = 5  # the learning rate has to rise and fall within them


def left_out(readers: Sequence[RowReader], parts: Sequence) -> str:
    """Return which rows were left out of `parts`, and where the first is, as the end of a sentence; "" if none was."""
    dropped = sum((reader.dropped for reader in readers), Counter())
    for data in parts:
        dropped.update({what.removeprefix("left out: "): n for what, n in data.counts.items()})
    text = ": left out " + ", ".join(f"{n:,} ({reason})" for reason, n in dropped.items()) if dropped else ""
    places = [place for reader in readers for place in reader.places]
    return text + (f"; first: {places[0]}" if places else "")


def steps_of(config: dict, n_rows: int, per_step: int, key: str, noun: str = "rows", lost: str = "") -> int:
    """Return max_steps, or where that is 0 as many steps of `per_step` rows as the epochs take. Raise UserError if
    those are so few that next to nothing would be learned. key: the setting that decides per_step; lost: `left_out`."""
    steps = config["max_steps"] or math.ceil(config["epochs"] * n_rows / per_step)
    if not config["max_steps"] and steps < FEW_STEPS:
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        rows = max(1, min(config["batch_size"], n_rows // (8 * world_size)))  # of each rank
        flags = {} if key == "prompts_per_step" else {"batch_size": rows}
        flags[key] = config[key] * rows * world_size // per_step
        flags["epochs"] = max(config["epochs"], math.ceil(4 * FEW_STEPS * rows * world_size / max(1, n_rows)))
        more = " ".join(f"--{name}={value:g}" for name, value in flags.items())
        few = f"{n_rows:,} {noun} make {steps} step{'s' * (steps > 1)} of {key}={config[key]}, too few to learn from"
        raise UserError(f"data: {few}{lost}; smaller steps and more epochs: {more}")
    return steps


class Corpus:
    """The sources that a data setting names (mixture.py has the syntax), opened.

    A subclass sets block_size; names: of the sources, for the log; train: the data of each, with n_tokens, packed and
    fingerprint; stages: (first step, weight of each source); val: {name: validation data}; val_weights: {name: weight}
    if the user chose them. It has by_source(values, key) -> {number of the source: value} from values by path or name,
    and val_batches_of(data, batch_size, eval_steps, rank, world_size), which yields batches of validation data.
    """

    def order(self, seed: int, samples_per_step: int, max_steps: int, max_epochs: str = "") -> Mixture:
        """Return which window every sample is. Raise UserError if max_epochs lets the data end before max_steps."""
        samplers = [
            Sampler(data.n_tokens, self.block_size, seed, k, data.packed, name)
            for k, (name, data) in enumerate(zip(self.names, self.train, strict=True))
        ]
        limit, most = parse_number(max_epochs), {}
        if limit:
            most = dict.fromkeys(range(len(samplers)), limit)
        elif max_epochs:
            most = self.by_source(parse_weights(max_epochs, max_epochs, "max_epochs"), "max_epochs")
        limits = [max(1, int(most[k] * s.n_windows)) if k in most else math.inf for k, s in enumerate(samplers)]
        stages = [(step * samples_per_step, weights) for step, weights in self.stages]
        order = Mixture(samplers, seed, stages, self.names, limits)
        if order.end is not None and order.end < max_steps * samples_per_step:
            last = order.end // samples_per_step
            fewer = "train for no more steps or " if last else ""
            ends = f"with {max_epochs=} the data end after step {last} of {max_steps}"
            raise UserError(f"data: {ends}; {fewer}raise max_epochs")
        return order

    def record(self) -> dict[str, list]:
        """Return what decides the order of samples besides the settings; `same_order` compares two of these."""
        stages = [[first_step, quotas(np.array(weights)).tolist()] for first_step, weights in self.stages]
        return {"data": [data.fingerprint for data in self.train], "stages": stages}

    def size(self, data: object) -> str:
        return f"{data.n_rows:,} rows"

    def describe(self, order: Mixture, n_samples: int) -> tuple[str, list[str]]:
        """Return the epochs of each source in n_samples samples, and warnings, for people."""
        epochs = order.epochs(n_samples).tolist()
        text = ", ".join(
            f"{times:.2f} epochs of {self.size(data)}" + (f" ({name})" if len(self.names) > 1 else "")
            for name, data, times in zip(self.names, self.train, epochs, strict=True)
        )
        shares = "lower its weight or set max_epochs" if len(self.names) > 1 else "train for fewer steps"
        return text, [
            f"warning     {name} is seen {times:.1f} times; beyond {MANY_EPOCHS} repetition adds little: "
            f"give more data or {shares}"
            for name, times, limit in zip(order.names, epochs, order.limits, strict=True)
            if round(times) > MANY_EPOCHS and limit == math.inf  # whole steps round epochs=4 up to 4.4
        ]

    def val_shares(self) -> list[float]:
        """Return the weight of each of `val` in the total validation loss, adding up to 1: the user's, else that of its
        source in the last stage."""
        last = dict(zip(self.names, self.stages[-1][1], strict=True))
        weights = list(self.val_weights.values()) or [last[name] for name in self.val]
        weights = weights if any(weights) else [1.0] * len(weights)
        return [weight / sum(weights) for weight in weights]

    def val_batches(self, batch_size: int, eval_steps: int, rank: int = 0, world_size: int = 1) -> dict[str, Iterator]:
        """Return this rank's evaluation batches of each of `val`: eval_steps (0 = all) in total over all sources and
        ranks, at least one of each source. `val_shares` says how to average their losses."""
        found = {}
        for k, (name, data) in enumerate(self.val.items()):
            steps = max(1, eval_steps // len(self.val) + (k < eval_steps % len(self.val))) if eval_steps else 0
            first = (rank + k) % world_size  # the last, small batches of the sources go to different ranks
            found[name] = self.val_batches_of(data, batch_size, steps, first, world_size)
        return found


class RowCorpus(Corpus):
    """A Corpus of files and directories of rows. A subclass has `reader()`, a new RowReader, and lay_out(name, items),
    which returns data with name, n_rows, n_tokens = n_rows * (block_size + 1), packed, fingerprint; n_used and n_labels
    (n_rows,): ids, and those that are learnt; counts: {what happened to conversations: how many}."""

    def open(self, spec: str, val_data: str, val_fraction: float) -> None:
        """Read and lay out all sources. Raise UserError."""
        stages = parse_data_dir(spec, "data")
        self.paths = list(dict.fromkeys(path for stage in stages for path in stage.weights))
        self.names = names_of(self.paths)
        self.found = [self.read(path, 0.0 if val_data else val_fraction) for path in self.paths]
        weights = parse_weights(val_data, val_data, "val_data") if val_data else {}
        self.val_found = dict(zip(names_of(list(weights)), (self.read(path, 0.0) for path in weights), strict=True))
        self.train = [self.lay_out(name, rows.train) for name, rows in zip(self.names, self.found, strict=True)]
        for data in self.train:
            if not data.n_rows:
                reasons = ", ".join(f"{n} {reason}" for reason, n in data.counts.items()) or "no row for training"
                raise UserError(f"data: nothing to train on in {data.name}: {reasons}; give more, or raise block_size")
        held_out = {name: rows.val if len(rows.val) else rows.train for name, rows in self.val_found.items()}
        held_out = held_out or {name: rows.val for name, rows in zip(self.names, self.found, strict=True)}
        self.all_val = [self.lay_out(name, items) for name, items in held_out.items()]
        self.val = {data.name: data for data in self.all_val if data.n_rows}
        self.n_rows = sum(data.n_rows for data in self.train)
        self.stages = [(stage.first_step, self.weights_of(stage)) for stage in stages]
        given = dict(zip(self.val_found, weights.values(), strict=True))
        self.val_weights = {name: given[name] or float(self.val[name].n_labels.sum()) for name in self.val if given}

    def need_validation(self, val_fraction: float) -> None:
        """Raise UserError if no row is held out, with what was left out and why."""
        if self.val:
            return
        readers = [rows.reader for rows in self.val_found.values() or self.found]
        lost = left_out(readers, self.all_val)
        too_long = "block_size" in lost or "no room" in lost
        could = not self.val_found and (self.n_rows > 1 or not val_fraction)
        more = f"raise val_fraction above {val_fraction:g}" if could else "give more rows"
        text = f"data: no {readers[0].noun} is held out for validation{lost}"
        raise UserError(f"{text}; {more}{', raise block_size' * too_long} or name others in val_data")

    def left_out(self) -> str:
        return left_out([rows.reader for rows in self.found], self.train)

    def read(self, path: str, val_fraction: float) -> SourceRows:
        return read_source(path, self.reader(), val_fraction)

    def weights_of(self, stage: Stage) -> list[float]:
        """Return the weight of each source in a stage: by default its number of rows, 0 if the stage lacks it."""
        weights = dict.fromkeys(self.paths, 0.0)
        for path, weight in stage.weights.items():
            weights[path] = float(self.train[self.paths.index(path)].n_rows) if weight is None else weight
        return list(weights.values())

    def by_source(self, values: dict[str, float | None], key: str) -> dict[int, float]:
        found = {}
        for name, value in values.items():
            known = self.names if name in self.names else self.paths
            if name not in known or value is None:
                raise UserError(f"data: {key} has {name!r}; write path=number, of: {', '.join(self.paths)}")
            found[known.index(name)] = value
        return found

    def report(self) -> list[str]:
        """Return lines for people: the content of each source, and what was left out."""
        lines = []
        for split, parts in (("training", self.train), ("validation", self.all_val)):
            for data in parts:
                packed = f"{len(data.members):,} conversations in " if getattr(data, "pack", False) else ""
                rows = f"{packed}{data.n_rows:,} rows for {split}"
                lines.append(f"{data.name}: {rows}, {data.n_used.sum():,} tokens")
                lines += [f"{data.name}: {n:,} {what}" for what, n in data.counts.items()]
        for name, rows in [*zip(self.names, self.found, strict=True), *self.val_found.items()]:
            lines += rows.reader.report(name)
        return lines


def names_of(paths: Sequence[str], names: Sequence[str] | None = None) -> list[str]:
    """Return a short name for each path: that in `names`, by default its last part, or the whole path if that name is
    not unique."""
    names = [Path(path).name or path for path in paths] if names is None else names
    return [name if names.count(name) == 1 else path for name, path in zip(names, paths, strict=True)]


def spread(n_windows: int, batch_size: int, eval_steps: int, rank: int, world_size: int) -> Iterator[np.ndarray]:
    """Yield this rank's share of eval_steps batches of window numbers, spread evenly; 0, or too many: all windows."""
    n = min(eval_steps * batch_size, n_windows) if eval_steps else n_windows
    chosen = np.arange(n) * n_windows // max(n, 1)
    for first in range(rank * batch_size, n, world_size * batch_size):
        yield chosen[first : first + batch_size]


def same_order(saved: dict[str, list], now: dict[str, list], step: int) -> str:
    """Return which entry of two `Corpus.record`s changes the order of the first `step` steps, "" if none does. Stages
    that begin later may be changed or added, with new sources behind the others."""
    stages = []
    for record in (saved, now):
        begun = [stage for stage in record["stages"] if stage[0] < max(step, 1)]
        stages.append([[first, np.trim_zeros(quotas, "b")] for first, quotas in begun])
    used = max(len(quotas) for _, quotas in stages[0])
    if saved["data"][:used] != now["data"][:used]:
        return "data"
    return "" if stages[0] == stages[1] else "stages"
