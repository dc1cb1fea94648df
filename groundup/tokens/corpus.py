"""What the training data of all trainers share: named sources, weights, epochs, validation, resume.

batches.TextCorpus          token files, for pretrain.py
conversations.ChatCorpus    conversations, for sft.py
pairs.PairCorpus            preference pairs, for dpo.py and reward.py
pairs.LabelCorpus           single answers, good or bad, for dpo.py --loss=kto
prompts.PromptCorpus        prompts, for rl.py
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from groundup.errors import UserError
from groundup.tokens.mixture import Mixture, Sampler, parse_number, parse_weights, quotas


class Corpus:
    """The sources that a data setting names (mixture.py has the syntax), opened.

    A subclass sets
        names         of the sources, for the log
        train         the training data of each; they have a fingerprint
        stages        [(first step, weight of each source)]
        val           {name: validation data}
        val_weights   {name: weight}, {} unless the user gave some
    and defines sampler, by_source, and val_batches_of.
    """

    # Muennighoff et al. 2023: up to here repeated tokens are worth nearly as much as new ones
    many_epochs = 4.0

    def sampler(self, source: int, seed: int, samples_per_step: int) -> Sampler:
        """Return the order of one source."""
        raise NotImplementedError

    def by_source(self, values: dict[str, float | None], key: str) -> dict[int, float]:
        """Return {number of a source: value} of the setting `key`, given by path or name."""
        raise NotImplementedError

    def val_batches_of(
        self, data: object, batch_size: int, eval_steps: int, rank: int, world_size: int
    ) -> Iterator:
        """Yield this rank's part of eval_steps batches (0 = all) of validation data."""
        raise NotImplementedError

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
