"""Conversations in rows and batches: the data of sft.py.

    --data='chat.jsonl,alpaca.json.gz'     # raw files in any format of row_formats.py, weighted by their rows
    --data='data/x=0.7,chat/*.jsonl=0.3'   # a directory of prepare.py --kind=chat --tokenizer_dir=..., and a glob

A conversation of L ids gives L - 1 inputs. The label of an input is the next id if the mask has it; labels are
shifted within their conversation, so none crosses a border. A row of block_size inputs holds several whole
conversations (packed) or one. A conversation that is too long ends after its last complete answer that fits.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from groundup.tokens.batches import in_each
from groundup.tokens.chat_files import Conversations, read_chat
from groundup.tokens.corpus import RowCorpus, spread
from groundup.tokens.mixture import Mixture, parse_weights
from groundup.tokens.packing import pack_rows
from groundup.tokens.row_reader import SourceRows
from model import IGNORE
from tokenizer import Tokenizer

# ---- rows ------------------------------------------------------------------------------------------------------------


def fit(ids: np.ndarray, mask: np.ndarray, end_id: int, limit: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return (ids, mask, whether they were cut), cut after the last complete answer that fits into `limit` ids.

    The newline after its end_id stays if it fits. Empty if no answer fits. No end_id is added: it would teach the model
    to stop in the middle of a sentence.
    """
    if len(ids) <= limit:
        return ids, mask, False
    ends = 1 + np.flatnonzero((mask == 1) & (ids == end_id))
    if not len(ends) or ends[0] > limit:
        return ids[:0], mask[:0], True
    newline = len(ids) - int(ends[-1])  # ids after every end; the last turn is the assistant's
    n = min(limit, int(ends[ends <= limit][-1]) + newline)
    return ids[:n], mask[:n], True


class Rows:
    """Conversations laid out in rows of block_size inputs. Row r is the window at r * (block_size + 1), which is how
    mixture.Sampler(packed=True) addresses it.

    n_labels: (n_rows,) int64, labels in each row. n_used: likewise, inputs that are not padding. counts: {what happened
    to conversations: how many}, cut to fit or left out.
    """

    packed = True  # its windows are rows, see mixture.Sampler

    def __init__(self, conversations: Conversations, block_size: int, pack: bool, seed: int, name: str) -> None:
        self.of, self.block_size, self.pack = conversations, block_size, pack
        self.name, self.loss_weight = name, 1.0
        lengths, labels = self._measure()
        kept = np.flatnonzero(labels)
        if pack:
            packing = pack_rows(lengths[kept] - 1, block_size, seed)  # no piece is longer than a row
            row, self.members, self.n_rows = packing.row, kept[packing.document], packing.n_rows
            self.most_documents = 1 + packing.most_pieces  # padding counts as one
        else:
            row, self.members, self.n_rows = np.arange(len(kept)), kept, len(kept)
            self.most_documents = 1
        self.lengths = lengths[self.members]  # ids of each conversation that are used
        self.borders = np.searchsorted(row, np.arange(self.n_rows + 1))  # row r has the members from borders[r] on
        self.n_labels = np.bincount(row, labels[self.members], self.n_rows).astype(np.int64)
        self.n_used = np.bincount(row, self.lengths - 1, self.n_rows).astype(np.int64)
        self.n_tokens = self.n_rows * (block_size + 1)
        about = json.dumps([conversations.fingerprint, block_size, pack, seed if pack else 0])
        self.fingerprint = hashlib.sha256(about.encode()).hexdigest()

    def _measure(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (n,) int64 each: used ids and labels of each conversation; 0 labels if it is dropped."""
        of, limit = self.of, self.block_size + 1
        lengths, counts = np.diff(of.offsets), Counter()
        labels = np.add.reduceat(of.mask, of.offsets[:-1], dtype=np.int64) if len(of) else lengths
        counts["left out: no answer"] = int((labels == 0).sum())
        for i in np.flatnonzero((lengths > limit) & (labels > 0)).tolist():
            ids, mask, _ = fit(*of.ids(i), of.end_id, limit)
            lengths[i], labels[i] = len(ids), mask.sum()
            what = "cut after an answer that fits" if len(ids) else "left out: no answer fits"
            counts[f"{what} in block_size={self.block_size}"] += 1
        self.counts = +counts
        return lengths, labels

    @property
    def n_padding(self) -> int:
        """Inputs of packed rows that are padding; 0 without packing, where a batch is padded to its longest row."""
        return self.n_rows * self.block_size - int(self.n_used.sum()) if self.pack else 0

    def row(self, start: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (ids, mask) of each conversation in the row that begins at `start`."""
        row = start // (self.block_size + 1)
        for member in range(self.borders[row], self.borders[row + 1]):
            ids, mask = self.of.ids(self.members[member])
            yield ids[: self.lengths[member]], mask[: self.lengths[member]]


class Batch(NamedTuple):
    """A micro-batch: B rows of T inputs, and their n labels."""

    x: torch.Tensor  # (B, T) int64
    documents: torch.Tensor | None  # (B, T) int64: conversation of its row, -1 for padding; None: one in each row
    index: torch.Tensor  # (n,) int64: positions in the flat x that have a label
    targets: torch.Tensor  # (n,) int64: the labels
    weights: torch.Tensor  # (n,) float32: loss weight of the source
    sources: torch.Tensor  # (n,) int64: number of the source

    def to(self, device: str | torch.device) -> "Batch":
        return in_each(self, lambda tensor: tensor.to(device, non_blocking=True))

    def even(self, n_rows: int = 0) -> "Batch":
        """Return the batch with ignored labels appended, so that their number takes at most 16 values: tensors of ever
        new sizes fragment the memory. n_rows: also append rows of padding up to this number, to avoid recompilation."""
        missing = max(0, n_rows - len(self.x))
        x = pad(self.x, (0, 0, 0, missing))
        documents = None if self.documents is None else pad(self.documents, (0, 0, 0, missing), value=-1)
        n = -len(self.index) % max(1, x.numel() // 16)
        index, targets = pad(self.index, (0, n)), pad(self.targets, (0, n), value=IGNORE)
        return Batch(x, documents, index, targets, pad(self.weights, (0, n)), pad(self.sources, (0, n)))


def columns_for(length: np.ndarray | int, block_size: int) -> np.ndarray:
    """Return lengths rounded up to an eighth of block_size: few shapes to compile, and classes to sort by."""
    step = -(-block_size // 8)
    return np.minimum(block_size, -(-length // step) * step)


def load_rows(rows: Sequence[Rows], sources: np.ndarray, starts: np.ndarray) -> Batch:
    """Return the batch whose row i begins at starts[i] of rows[sources[i]]. All are packed, or none.

    Without packing T is the longest row's length, rounded up by `columns_for`.
    """
    read = [list(rows[source].row(int(start))) for source, start in zip(sources, starts, strict=True)]
    n_columns, pack = rows[0].block_size, rows[0].pack
    if not pack:
        n_columns = int(columns_for(max(len(ids) - 1 for row in read for ids, _ in row), n_columns))
    x = np.full((len(read), n_columns), rows[0].of.pad_id, np.int64)
    documents = np.full_like(x, -1)
    y, learned = np.zeros_like(x), np.zeros(x.shape, bool)
    for b, row in enumerate(read):
        begin = 0
        for k, (ids, mask) in enumerate(row):
            place = slice(begin, begin + len(ids) - 1)
            x[b, place], y[b, place], learned[b, place], documents[b, place] = ids[:-1], ids[1:], mask[1:], k
            begin = place.stop
    index = np.flatnonzero(learned)
    of = np.asarray(sources, np.int64)[index // n_columns]
    weights = np.array([one.loss_weight for one in rows], np.float32)[of]
    arrays = x, documents, index, y.reshape(-1)[index], weights, of
    x, documents, *labels = map(torch.from_numpy, arrays)
    return Batch(x, documents if pack else None, *labels)


# ---- the sources of a run --------------------------------------------------------------------------------------------


class ChatCorpus(RowCorpus):
    """The conversations that a `data` string names. train, val: Rows. loss_weights: 'path=number,...'."""

    def __init__(
        self, spec: str, tokenizer: Tokenizer, block_size: int, pack: bool, seed: int, val_data: str = "",
        val_fraction: float = 0.02, loss_weights: str = "",
    ) -> None:  # fmt: skip
        self.tokenizer, self.block_size, self.pack, self.seed = tokenizer, block_size, pack, seed
        self.open(spec, val_data, val_fraction)
        weights = parse_weights(loss_weights, loss_weights, "loss_weights") if loss_weights else {}
        for k, weight in self.by_source(weights, "loss_weights").items():
            self.train[k].loss_weight = weight

    def read(self, path: str, val_fraction: float) -> SourceRows:
        return read_chat(path, self.tokenizer, val_fraction)

    def lay_out(self, name: str, conversations: Conversations) -> Rows:
        return Rows(conversations, self.block_size, self.pack, self.seed, name)

    def most_documents(self) -> int:
        """Return a bound on the documents in a row, for attention within documents."""
        return max(rows.most_documents for rows in [*self.train, *self.all_val])

    def load(self, sources: np.ndarray, starts: np.ndarray) -> Batch:
        """Return the micro-batch of these rows, for `Batches`."""
        return load_rows(self.train, sources, starts)

    def label_weight(self, sources: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return (n,) float64: the sum of the loss weights of each row's labels, for `Batches`."""
        found = np.zeros(len(starts))
        for source in np.unique(sources):
            rows, own = self.train[source], sources == source
            found[own] = np.float32(rows.loss_weight) * rows.n_labels[starts[own] // (self.block_size + 1)]
        return found

    def tokens_seen(self, order: Mixture, n_samples: int) -> dict[str, int]:
        """Return {"tokens/name": inputs without padding}, exact at the end of an epoch; {} for a single source."""
        if len(self.train) == 1:
            return {}
        epochs = order.epochs(n_samples).tolist()
        return {f"tokens/{rows.name}": round(n * rows.n_used.sum()) for rows, n in zip(self.train, epochs, strict=True)}

    def val_batches_of(
        self, data: Rows, batch_size: int, eval_steps: int, rank: int, world_size: int
    ) -> Iterator[Batch]:
        for chosen in spread(data.n_rows, batch_size, eval_steps, rank, world_size):
            yield load_rows([data], np.zeros_like(chosen), chosen * (self.block_size + 1))

    def prompts(self, n: int) -> list[tuple[list[int], str]]:
        """Return (ids up to the last answer, that answer) of n validation conversations, from all sources in turn; only
        of those that fit into a row and have a turn before the answer."""

        def of_one(rows: Rows) -> Iterator[tuple[list[int], str]]:
            for ids, mask in filter(lambda one: len(one[0]) <= self.block_size, map(rows.of.ids, range(len(rows.of)))):
                end = int(np.flatnonzero(mask)[-1])
                begin = int(np.flatnonzero(mask[:end] == 0)[-1]) + 1
                if begin > 0:
                    yield ids[:begin].tolist(), self.tokenizer.decode(ids[begin:end].tolist())

        of_each = (itertools.islice(of_one(rows), n) for rows in self.val.values())
        return [talk for turn in itertools.zip_longest(*of_each) for talk in turn if talk][:n]
