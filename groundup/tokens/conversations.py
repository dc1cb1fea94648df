"""Conversations in rows and batches, and the sources of a run: what sft.py trains on.

    --data='chat.jsonl,alpaca.json.gz'     # raw files of any shape of shapes.py, in proportion to their rows
    --data='data/x=0.7,chat/*.jsonl=0.3'   # a directory of prepare.py --kind=chat --tokenizer_dir=..., and a glob

A conversation of L ids gives L - 1 inputs. The label of an input is the next id if the mask has it, and labels are
shifted inside their conversation, so none crosses a border. A row of block_size inputs holds several whole
conversations (packed) or one. A conversation that is too long ends after its last complete answer that fits.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from groundup.errors import UserError
from groundup.tokens.batches import check_end, eval_windows, evaluation_weights, in_each, repeats, spread, stage_quotas
from groundup.tokens.chat_files import Conversations, Source, read_source, untokenize
from groundup.tokens.mixture import Mixture, Sampler, parse_data_dir, parse_max_epochs, parse_weights
from groundup.tokens.packing import pack_rows
from groundup.tokens.token_files import IGNORE
from tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch


# ---- rows ------------------------------------------------------------------------------------------------------------


def fit(ids: np.ndarray, mask: np.ndarray, end_id: int, limit: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """(ids, mask, whether they were cut) of at most `limit` ids: cut after the last complete answer that fits.

    An answer is complete with its end_id; the newline behind stays if it fits, too. Empty if no answer fits. Nothing is
    ever put in: an end that the text does not have would teach to stop in the middle of a sentence.
    """
    if len(ids) <= limit:
        return ids, mask, False
    ends = 1 + np.flatnonzero((mask == 1) & (ids == end_id))
    if not len(ends) or ends[0] > limit:
        return ids[:0], mask[:0], True
    newline = len(ids) - int(ends[-1])  # ids that follow every end; the last turn is the assistant's
    n = min(limit, int(ends[ends <= limit][-1]) + newline)
    return ids[:n], mask[:n], True


class Rows:
    """Conversations laid out in rows of block_size inputs. Row r is the window that begins at r * (block_size + 1), by
    which mixture.Sampler(packed=True) names it.

    n_labels: (n_rows,) int64, ids that are learnt in each. n_used: likewise, inputs that are no padding. n_cut:
    conversations that were cut to fit. dropped: {reason: conversations of which nothing could be kept}.
    """

    def __init__(
        self, conversations: Conversations, block_size: int, pack: bool, seed: int, name: str, loss_weight: float = 1.0
    ) -> None:
        self.of, self.block_size, self.pack = conversations, block_size, pack
        self.name, self.loss_weight = name, loss_weight
        lengths, labels = self._measure()
        kept = np.flatnonzero(labels)
        if pack:
            packing = pack_rows(lengths[kept] - 1, block_size, seed)  # no piece is longer than a row
            row, self.members, self.n_rows = packing.row, kept[packing.document], packing.n_rows
        else:
            row, self.members, self.n_rows = np.arange(len(kept)), kept, len(kept)
        self.lengths = lengths[self.members]  # ids of each conversation that are used
        self.borders = np.searchsorted(row, np.arange(self.n_rows + 1))  # row r: members from borders[r] on
        self.n_labels = np.bincount(row, labels[self.members], self.n_rows).astype(np.int64)
        self.n_used = np.bincount(row, self.lengths - 1, self.n_rows).astype(np.int64)
        self.n_tokens = self.n_rows * (block_size + 1)
        about = json.dumps([conversations.fingerprint, block_size, pack, seed if pack else 0])
        self.fingerprint = hashlib.sha256(about.encode()).hexdigest()

    def _measure(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids, labels) that are used of each conversation, (n,) int64; labels are 0 for one that is dropped."""
        of, limit = self.of, self.block_size + 1
        lengths, self.n_cut, self.dropped = np.diff(of.offsets), 0, Counter()
        labels = np.add.reduceat(of.mask, of.offsets[:-1], dtype=np.int64) if of.n else lengths
        self.dropped["no answer"] = int((labels == 0).sum())
        for i in np.flatnonzero((lengths > limit) & (labels > 0)).tolist():
            ids, mask, _ = fit(*of.ids(i), of.end_id, limit)
            lengths[i], labels[i] = len(ids), mask.sum()
            self.n_cut += len(ids) > 0
            self.dropped[f"no answer fits in block_size={self.block_size}"] += len(ids) == 0
        self.dropped = {reason: n for reason, n in self.dropped.items() if n}
        return lengths, labels

    @property
    def n_padding(self) -> int:
        """Inputs of packed rows that are padding. Rows of one conversation are padded to the longest of their batch."""
        return self.n_rows * self.block_size - int(self.n_used.sum()) if self.pack else 0

    def row(self, start: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids, mask) of the conversations of the row that begins at `start`."""
        row = start // (self.block_size + 1)
        for member in range(self.borders[row], self.borders[row + 1]):
            ids, mask = self.of.ids(self.members[member])
            yield ids[: self.lengths[member]], mask[: self.lengths[member]]


class Batch(NamedTuple):
    """A micro-batch: B rows of T inputs, and their n labels."""

    x: "torch.Tensor"  # (B, T) int64
    documents: "torch.Tensor | None"  # (B, T) int64: which conversation of its row, -1 for padding; None: one in each
    index: "torch.Tensor"  # (n,) int64: places in the flat x that have a label
    targets: "torch.Tensor"  # (n,) int64: the labels
    weights: "torch.Tensor"  # (n,) float32: loss weight of the source
    sources: "torch.Tensor"  # (n,) int64: number of the source

    def to(self, device: "str | torch.device") -> "Batch":
        return in_each(self, lambda tensor: tensor.to(device, non_blocking=True))

    def even(self, n_rows: int = 0) -> "Batch":
        """The batch with labels that count nothing behind the others, up to one of 16 numbers: tensors of ever new
        sizes leave holes in the memory, and it grows from step to step. n_rows: filled up to so many rows of padding,
        as another number of them would be compiled anew."""
        from torch.nn.functional import pad

        missing = max(0, n_rows - len(self.x))
        x = pad(self.x, (0, 0, 0, missing))
        documents = None if self.documents is None else pad(self.documents, (0, 0, 0, missing), value=-1)
        n = -len(self.index) % max(1, x.numel() // 16)
        index, targets = pad(self.index, (0, n)), pad(self.targets, (0, n), value=IGNORE)
        return Batch(x, documents, index, targets, pad(self.weights, (0, n)), pad(self.sources, (0, n)))


def load_rows(rows: Sequence[Rows], sources: np.ndarray, starts: np.ndarray) -> Batch:
    """Row i is the one that begins at starts[i] of rows[sources[i]]. All are packed, or none.

    Without packing T is the longest row's length, rounded up to an eighth of block_size: few shapes to compile.
    """
    import torch

    read = [list(rows[source].row(int(start))) for source, start in zip(sources, starts, strict=True)]
    n_columns, pack = rows[0].block_size, rows[0].pack
    if not pack:
        step = -(-n_columns // 8)
        longest = max(len(ids) - 1 for row in read for ids, _ in row)
        n_columns = min(n_columns, -(-longest // step) * step)
    x = np.full((len(read), n_columns), rows[0].of.pad_id, np.int64)
    documents = np.full_like(x, -1)
    y, learnt = np.zeros_like(x), np.zeros(x.shape, bool)
    for b, row in enumerate(read):
        begin = 0
        for k, (ids, mask) in enumerate(row):
            place = slice(begin, begin + len(ids) - 1)
            x[b, place], y[b, place], learnt[b, place], documents[b, place] = ids[:-1], ids[1:], mask[1:], k
            begin = place.stop
    index = np.flatnonzero(learnt)
    of = np.asarray(sources, np.int64)[index // n_columns]
    weights = np.array([one.loss_weight for one in rows], np.float32)[of]
    arrays = x, documents, index, y.reshape(-1)[index], weights, of
    x, documents, *labels = map(torch.from_numpy, arrays)
    return Batch(x, documents if pack else None, *labels)


# ---- several sources -------------------------------------------------------------------------------------------------


class ChatCorpus:
    """The sources that a `data` string names (mixture.py has its syntax), laid out in rows; see data.Corpus.

    names: what the log calls them. train: their Rows. val: Rows to evaluate by name: those of val_data if it is given,
    else the sources' validation splits, where they have one. Raises DataError.
    """

    def __init__(
        self, spec: str, tokenizer: Tokenizer, block_size: int, pack: bool, seed: int, val_data: str = "",
        val_fraction: float = 0.02, loss_weights: str = "",
    ) -> None:  # fmt: skip
        self.tokenizer, self.block_size = tokenizer, block_size
        stages = parse_data_dir(spec, "data")
        self.paths = list(dict.fromkeys(path for stage in stages for path in stage.weights))
        self.names = names_of(self.paths)
        self.found = [read_source(path, tokenizer, 0.0 if val_data else val_fraction) for path in self.paths]
        loss = self._by_path(loss_weights and parse_weights(loss_weights, loss_weights, "loss_weights"), "loss_weights")

        def lay_out(name: str, conversations: Conversations, weight: float = 1.0) -> Rows:
            return Rows(conversations, block_size, pack, seed, name, weight)

        weights = [loss.get(path, 1.0) for path in self.paths]
        trains = [source.train for source in self.found]
        self.train = list(map(lay_out, self.names, trains, weights))
        for rows in self.train:
            check_rows(rows)
        self.stages = [(stage.first_step, self._weights(stage.weights)) for stage in stages]
        self.val_weights = parse_weights(val_data, val_data, "val_data") if val_data else {}
        if val_data:
            others = [read_source(path, tokenizer, 0.0) for path in self.val_weights]
            val = map(lay_out, names_of(list(self.val_weights)), [s.val if s.val.n else s.train for s in others])
        else:
            val = map(lay_out, self.names, [source.val for source in self.found])
        val = list(val)
        self.val = {rows.name: rows for rows in val if rows.n_rows}
        self.no_val = [rows.name for rows in val if not rows.n_rows]

    def _by_path(self, values: dict[str, float | None] | str, key: str) -> dict[str, float]:
        """`values` of paths or names, by path. Raises DataError for another, or one without a number."""
        found = {}
        for name, value in dict(values or {}).items():
            path = self.paths[self.names.index(name)] if name in self.names else name
            if path not in self.paths or value is None:
                raise UserError(f"data: {key} has {name!r}; write path=number, of: {', '.join(self.paths)}")
            found[path] = value
        return found

    def _weights(self, weights: dict[str, float | None]) -> list[float]:
        """Weight of each source in a stage; without any they weigh what rows they have."""
        of_rows = dict(zip(self.paths, (rows.n_rows for rows in self.train), strict=True))
        found = {path: float(of_rows[path]) if weight is None else weight for path, weight in weights.items()}
        return [found.get(path, 0.0) for path in self.paths]

    def order(self, seed: int, samples_per_step: int, max_steps: int, max_epochs: str = "") -> Mixture:
        """Which row every sample is. Raises DataError if max_epochs lets the data end before max_steps."""
        samplers = [
            Sampler(rows.n_tokens, self.block_size, seed, k, packed=True, name=rows.name)
            for k, rows in enumerate(self.train)
        ]
        most = parse_max_epochs(max_epochs)
        most = dict.fromkeys(self.paths, most[""]) if "" in most else self._by_path(most, "max_epochs")
        limits = [
            max(1, int(most[path] * rows.n_rows)) if path in most else float("inf")
            for path, rows in zip(self.paths, self.train, strict=True)
        ]
        stages = [(step * samples_per_step, weights) for step, weights in self.stages]
        order = Mixture(samplers, seed, stages, self.names, limits)
        check_end(order, samples_per_step, max_steps, max_epochs)
        return order

    def record(self) -> dict[str, list]:
        """What, besides options and seed, decides the order of samples, see data.same_order."""
        return {"data": [rows.fingerprint for rows in self.train], "stages": stage_quotas(self.stages)}

    def load(self, sources: np.ndarray, starts: np.ndarray) -> Batch:
        """The micro-batch of these rows, for data.Batches."""
        return load_rows(self.train, sources, starts)

    def label_weight(self, sources: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """(n,) float64: the sum of the loss weights of each row's labels, for data.Batches."""
        found = np.zeros(len(starts))
        for source in np.unique(sources):
            rows, own = self.train[source], sources == source
            found[own] = np.float32(rows.loss_weight) * rows.n_labels[starts[own] // (self.block_size + 1)]
        return found

    def describe(self, order: Mixture, n_samples: int) -> tuple[str, list[str]]:
        """How often n_samples samples go through each source; lines that warn."""
        text = ", ".join(
            f"{times:.2f} epochs of {rows.n_rows:,} rows" + (f" ({rows.name})" if len(self.train) > 1 else "")
            for rows, times in zip(self.train, order.epochs(n_samples).tolist(), strict=True)
        )
        return text, repeats(order, n_samples)

    def tokens_seen(self, order: Mixture, n_samples: int) -> dict[str, int]:
        """{"tokens/name": inputs without padding}, exact at the end of an epoch; {} if there is only one source."""
        if len(self.train) == 1:
            return {}
        epochs = order.epochs(n_samples).tolist()
        return {f"tokens/{rows.name}": round(n * rows.n_used.sum()) for rows, n in zip(self.train, epochs, strict=True)}

    def val_shares(self) -> list[float]:
        """The weight of each of `val` in the whole validation loss: that of its source in the last stage, or of
        val_data, without weights there in proportion to the labels."""
        if not self.val_weights:
            return evaluation_weights(list(self.val), self.names, self.stages) if self.val else []
        own = dict(zip(names_of(list(self.val_weights)), self.val_weights.values(), strict=True))
        weights = [own[name] or float(rows.n_labels.sum()) for name, rows in self.val.items()]
        return [weight / sum(weights) for weight in weights]

    def val_batches(
        self, batch_size: int, eval_steps: int, rank: int = 0, world_size: int = 1
    ) -> dict[str, Iterator[Batch]]:
        """As data.Corpus.val_batches."""
        found = {}
        for k, (name, rows) in enumerate(self.val.items()):
            steps, first = eval_windows(k, len(self.val), eval_steps, rank, world_size)
            found[name] = val_batches(rows, batch_size, steps, first, world_size)
        return found

    def prompts(self, n: int) -> list[tuple[list[dict], str]]:
        """(messages, the answer that is there) of n validation conversations, from all sources in turn; of those that
        fit into a row, and in which not the assistant alone speaks."""

        def of_one(rows: Rows) -> Iterator[list[dict]]:
            fitting = (ids for ids, _ in map(rows.of.ids, range(rows.of.n)) if len(ids) <= self.block_size)
            talks = (untokenize(ids, self.tokenizer) for ids in fitting)
            return itertools.islice((talk for talk in talks if len(talk) > 1), n)

        of_each = map(of_one, self.val.values())
        talks = [talk for turn in itertools.zip_longest(*of_each) for talk in turn if talk][:n]
        return [(talk[:-1], talk[-1]["content"]) for talk in talks]

    def report(self) -> list[str]:
        """Lines for people: what there is of each source, and what became of the rest."""
        lines = [line for rows, found in zip(self.train, self.found, strict=True) for line in self._report(rows, found)]
        return lines + [f"warning     nothing is held out of {name}" for name in self.no_val]

    def _report(self, rows: Rows, found: Source) -> Iterator[str]:
        padding = f", {rows.n_padding / (rows.n_rows * self.block_size):.1%} padding" if rows.pack else ""
        n_used = rows.of.n - sum(rows.dropped.values())
        yield (
            f"{rows.name}: {n_used:,} conversations for training, {found.val.n:,} held out; {rows.n_rows:,} rows of "
            f"{self.block_size}{padding}, {rows.n_used.sum():,} tokens, {rows.n_labels.sum():,} of them learnt"
        )
        if rows.n_cut:
            yield f"{rows.name}: {rows.n_cut:,} longer than block_size={self.block_size}, cut after an answer"
        if found.trimmed:
            yield f"{rows.name}: {found.trimmed:,} lost turns after the last answer"
        for reason, count in (found.dropped + Counter(rows.dropped)).items():
            yield f"{rows.name}: {count:,} left out: {reason}"
        held_out = self.val.get(rows.name)
        for reason, count in (held_out.dropped if held_out and held_out.of is found.val else {}).items():
            yield f"{rows.name}: {count:,} left out of those held out: {reason}"
        yield from found.places


def names_of(paths: list[str]) -> list[str]:
    """The last part of each path, the whole where that is not enough to tell them apart."""
    names = [Path(path).name or path for path in paths]
    return [name if names.count(name) == 1 else path for name, path in zip(names, paths, strict=True)]


def check_rows(rows: Rows) -> None:
    """Raise DataError if a source has nothing to train on."""
    if not rows.n_rows:
        reasons = ", ".join(f"{n} {reason}" for reason, n in rows.dropped.items()) or "its training split is empty"
        raise UserError(f"data: nothing to train on in {rows.name}: {reasons}; give more, or raise block_size")


def val_batches(
    rows: Rows, batch_size: int, eval_steps: int = 0, rank: int = 0, world_size: int = 1
) -> Iterator[Batch]:
    """This rank's share of the evaluation batches, on the CPU, as data.val_batches."""
    for chosen in spread(rows.n_rows, batch_size, eval_steps, rank, world_size):
        yield load_rows([rows], np.zeros_like(chosen), chosen * (rows.block_size + 1))
