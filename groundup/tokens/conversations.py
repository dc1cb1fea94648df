"""Conversations in rows and batches: the data of sft.py.

    --data='chat.jsonl,alpaca.json.gz'     # raw files in any format of row_formats.py
    --data='data/x=0.7,chat/*.jsonl=0.3'   # a directory of prepare.py --kind=chat, and a glob

A directory of prepare.py --kind=chat has the rows and, with --tokenizer_dir, their token files
(token_files.py). Without those, or with those of another tokenizer, the rows are tokenized when
training starts, like those of raw files.

A conversation of L ids gives L - 1 inputs. The label of an input is the next id if the mask has it;
labels are shifted within their conversation, so none crosses a border. A row of block_size inputs
holds several whole conversations (packed) or one. A conversation that is too long is cut after its
last complete answer that fits.
"""

import hashlib
import itertools
import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from groundup.errors import counted
from groundup.files import row_formats, turns
from groundup.files.splits import dialogue_text
from groundup.files.turns import BadRow
from groundup.tokens import IGNORE
from groundup.tokens.batches import map_tensors
from groundup.tokens.packing import pack_rows
from groundup.tokens.rows import (
    STRANGE,
    ItemList,
    RowCorpus,
    RowReader,
    Source,
    read_source,
)
from groundup.tokens.token_files import (
    AGAIN,
    CONVERSATION_FILES,
    check_shape,
    npy_header,
    read_manifest,
    token_dtype,
)
from groundup.tokens.token_writer import map_tokens
from tokenizer import Tokenizer


def tokenize_chat(messages: list[dict], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids (n,) of the vocabulary's type, mask (n,) uint8); see `Tokenizer.render`."""
    ids, mask = tokenizer.render(messages)
    # through bytes: twice as fast as np.array(mask)
    mask = np.frombuffer(bytes(mask), np.uint8)
    return np.array(ids, token_dtype(tokenizer.vocab_size)), mask


# ---- many conversations ----------------------------------------------------------------------


@dataclass(frozen=True)
class Conversations:
    """The conversations of one split of one source, in memory or mapped.

    In memory those of another split may lie between them."""

    tokens: np.ndarray  # uint16 or uint32: ids, one conversation behind the other
    mask: np.ndarray  # uint8, of the same length
    begins: np.ndarray  # (n,) int64: where each conversation begins
    ends: np.ndarray  # (n,) int64
    tokenizer: Tokenizer
    fingerprint: str  # sha256 of all this, the same in memory and mapped

    def __len__(self) -> int:
        return len(self.begins)

    def ids(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, mask) of conversation i."""
        begin, end = int(self.begins[i]), int(self.ends[i])
        return self.tokens[begin:end], self.mask[begin:end]

    def take(self, chosen: np.ndarray) -> "Conversations":
        """Return those that chosen (n,) bool marks, in the same memory."""
        begins, ends = self.begins[chosen], self.ends[chosen]
        # The digests of the files in which prepare.py would write them: a run may be continued with
        # the same conversations from a directory, or from the raw file.
        offsets = np.concatenate([[0], np.cumsum(ends - begins)])
        digests = [sha256_of(self.tokens, begins, ends), sha256_of(self.mask, begins, ends)]
        digests.append(sha256_of(offsets))
        fingerprint = fingerprint_of(digests, self.tokenizer.chat_fingerprint())
        return replace(self, begins=begins, ends=ends, fingerprint=fingerprint)


class InMemory:
    """Conversations as they are read: ids and masks grow in place, so that memory holds them once.

    lengths: ids of each conversation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.ids, self.mask, self.lengths = bytearray(), bytearray(), array("q")

    def append(self, item: tuple[np.ndarray, np.ndarray]) -> None:
        """Append what `tokenize_chat` returned."""
        ids, mask = item
        assert ids.dtype == self.dtype and mask.dtype == np.uint8, f"{ids.dtype=} {mask.dtype=}"
        self.ids += ids.tobytes()
        self.mask += mask.tobytes()
        self.lengths.append(len(ids))

    def take(self, chosen: np.ndarray) -> Conversations:
        """Return the conversations that chosen (n,) bool marks."""
        borders = np.cumsum([0, *self.lengths], dtype=np.int64)
        tokens, mask = np.frombuffer(self.ids, self.dtype), np.frombuffer(self.mask, np.uint8)
        every = Conversations(tokens, mask, borders[:-1], borders[1:], self.tokenizer, "")
        return every.take(chosen)


def sha256_of(
    array: np.ndarray, begins: np.ndarray | None = None, ends: np.ndarray | None = None
) -> str:
    """Return the sha256 of the .npy file that holds these parts of an array (n,), None = all."""
    if begins is None:
        begins, ends = np.array([0]), np.array([len(array)])
    digest = hashlib.sha256(npy_header(array.dtype, int((ends - begins).sum())))
    for begin, end in zip(begins, ends, strict=True):
        little = array[begin:end].astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(np.ascontiguousarray(little).data)
    return digest.hexdigest()


def fingerprint_of(digests: list[str], tokenizer_fingerprint: str) -> str:
    return hashlib.sha256(json.dumps([*digests, tokenizer_fingerprint]).encode()).hexdigest()


# ---- reading ---------------------------------------------------------------------------------


class ChatReader(RowReader):
    """Reads conversations that end with the assistant's last turn.

    An item is (ids, mask), or the messages if the reader has no tokenizer."""

    def new_store(self) -> "ItemList | InMemory":
        return InMemory(self.tokenizer) if self.tokenizer else ItemList()

    def item(
        self, row: object, place: str
    ) -> tuple[str, list[dict] | tuple[np.ndarray, np.ndarray]]:
        messages, detail = row_formats.messages_of(row)
        if detail:
            raise BadRow(STRANGE, detail)
        if problem := turns.chat_problem(messages, row):
            raise BadRow(problem)
        answered = turns.trim_chat(messages)
        self.trimmed += len(answered) < len(messages)
        if not self.tokenizer:
            return dialogue_text(answered), answered
        self.count_not_written(answered)
        return dialogue_text(answered), tokenize_chat(answered, self.tokenizer)


def read_chat(
    path: str, tokenizer: Tokenizer, val_fraction: float, setting: str = "data"
) -> Source:
    """Return the Conversations of raw files or of a directory of prepare.py --kind=chat.

    Use the directory's token files if they are this tokenizer's, else its rows. setting: that names
    the path, for an error message. Raise UserError."""
    directory = Path(path)
    reader = ChatReader(tokenizer)
    if (directory / "manifest.json").exists():
        manifest = read_manifest(directory, "chat")
        if manifest.get("tokenizer_fingerprint") == tokenizer.chat_fingerprint():
            # nothing is read twice, and the processes of one machine share the mapped memory
            train = map_split(directory, manifest, "train", tokenizer)
            val = map_split(directory, manifest, "val", tokenizer)
            reader.check(path, len(train) + len(val))
            return Source(train, val, reader)
        if "tokenizer_fingerprint" in manifest:
            why = "its token files are another tokenizer's; its rows are tokenized again"
            reader.notes.append(f"{directory}: {why}")
    return read_source(path, reader, val_fraction, setting)


def map_split(directory: Path, manifest: dict, split: str, tokenizer: Tokenizer) -> Conversations:
    """Return the Conversations in the token files of a split; none if there is no such split."""
    if split not in manifest["splits"]:
        return InMemory(tokenizer).take(np.zeros(0, bool))
    check_shape(directory / "manifest.json", manifest["splits"][split], {"tokens": dict}, AGAIN)
    entry = manifest["splits"][split]["tokens"]
    tokens, mask, borders = map_tokens(directory, entry, token_dtype(tokenizer.vocab_size).name)
    digests = [entry["sha256"][entry[key]] for key in CONVERSATION_FILES]
    fingerprint = fingerprint_of(digests, tokenizer.chat_fingerprint())
    return Conversations(tokens, mask, borders[:-1], borders[1:], tokenizer, fingerprint)


# ---- rows ------------------------------------------------------------------------------------


def fit(ids: np.ndarray, mask: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, mask), cut after the last complete answer that fits into `limit` ids.

    The newline after it stays if it fits. Empty if no answer fits. Nothing is added that ends an
    answer: it would teach the model to stop in the middle of a sentence.
    """
    if len(ids) <= limit:
        return ids, mask
    # an answer ends where the mask falls from 1 to 0, or at the last id
    ends = 1 + np.flatnonzero(mask > np.append(mask[1:], 0))
    if not len(ends) or ends[0] > limit:
        return ids[:0], mask[:0]
    newline = len(ids) - int(ends[-1])  # ids after every end; the last turn is the assistant's
    last_end = int(ends[ends <= limit][-1])
    n = min(limit, last_end + newline)
    return ids[:n], mask[:n]


class ChatRows:
    """Conversations laid out in rows of block_size inputs.

    n_labels: (n_rows,) int64, labels of each row. n_used: (n_rows,) int64, inputs that are no
    padding. counts: {what happened to conversations: how many}, cut to fit or left out. needs: {the
    same: the block_size that each needs}.
    """

    def __init__(
        self, conversations: Conversations, block_size: int, pack: bool, seed: int, name: str
    ) -> None:
        self.conversations = conversations
        self.block_size = block_size
        self.pack = pack
        self.name = name
        lengths, labels = self._measure()
        kept = np.flatnonzero(labels)  # the conversations with something to learn
        if pack:
            packing = pack_rows(lengths[kept] - 1, block_size, seed)  # none is longer than a row
            row, self.n_rows = packing.row, packing.n_rows
            self.members = kept[packing.document]
            self.most_documents = 1 + packing.most_pieces  # padding counts as one
        else:
            row, self.n_rows = np.arange(len(kept)), len(kept)
            self.members = kept
            self.most_documents = 1
        self.lengths = lengths[self.members]  # ids of each conversation that are used
        # row r has the members from borders[r] on
        self.borders = np.searchsorted(row, np.arange(self.n_rows + 1))
        # sums over the members of each row
        n_labels = np.bincount(row, labels[self.members], self.n_rows)
        self.n_labels = n_labels.astype(np.int64)
        self.n_used = np.bincount(row, self.lengths - 1, self.n_rows).astype(np.int64)
        # the seed decides only which conversations share a row
        decides = [conversations.fingerprint, block_size, pack, seed if pack else 0]
        self.fingerprint = hashlib.sha256(json.dumps(decides).encode()).hexdigest()

    def _measure(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the used ids and the labels of each conversation, (n,) int64.

        One that is dropped has no labels."""
        talks, limit = self.conversations, self.block_size + 1
        lengths = talks.ends - talks.begins
        places = zip(talks.begins.tolist(), talks.ends.tolist(), strict=True)
        labels = [np.count_nonzero(talks.mask[begin:end]) for begin, end in places]
        labels = np.array(labels, np.int64)
        counts: Counter[str] = Counter()
        counts["left out: no answer"] = int((labels == 0).sum())
        self.needs: dict[str, list[int]] = defaultdict(list)
        for i in np.flatnonzero((lengths > limit) & (labels > 0)).tolist():
            ids, mask = fit(*talks.ids(i), limit)
            what = "cut after" if len(ids) else "left out: without"
            what += f" an answer that fits in block_size={self.block_size}"
            counts[what] += 1
            self.needs[what].append(int(lengths[i]) - 1)
            lengths[i], labels[i] = len(ids), mask.sum()
        self.counts = +counts  # without zeros
        return lengths, labels

    def row(self, number: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (ids, mask) of each conversation in a row."""
        for member in range(self.borders[number], self.borders[number + 1]):
            ids, mask = self.conversations.ids(self.members[member])
            n = self.lengths[member]
            yield ids[:n], mask[:n]


class Batch(NamedTuple):
    """A micro-batch: B rows of T inputs, and their n labels."""

    x: Tensor  # (B, T) int64
    documents: Tensor | None  # (B, T) int64: conversation of its row, -1 = padding; None: one each
    index: Tensor  # (n,) int64: positions in the flat x that have a label
    targets: Tensor  # (n,) int64: the labels

    def to(self, device: str | torch.device) -> "Batch":
        return map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))

    def even(self, n_rows: int = 0) -> "Batch":
        """Return the batch with ignored labels appended, so that their number takes 16 values.

        Tensors of ever new sizes fragment the memory. n_rows: also append rows of padding up to
        this number, since a new shape recompiles."""
        missing = max(0, n_rows - len(self.x))
        x = pad(self.x, (0, 0, 0, missing))
        documents = self.documents
        if documents is not None:
            documents = pad(documents, (0, 0, 0, missing), value=-1)
        # IGNORE has no loss, so position 0 may have a second label
        n = -len(self.index) % max(1, x.numel() // 16)
        index = pad(self.index, (0, n))
        targets = pad(self.targets, (0, n), value=IGNORE)
        return Batch(x, documents, index, targets)


def padded_length(length: np.ndarray | int, block_size: int) -> np.ndarray:
    """Return lengths rounded up to an eighth of block_size: few shapes to compile and sort by."""
    step = -(-block_size // 8)
    return np.minimum(block_size, -(-length // step) * step)


def load_rows(data: Sequence[ChatRows], numbers: np.ndarray) -> Batch:
    """Return the batch whose row i is row numbers[i] of data[i].

    All are packed, or none. Without packing T is the longest row's length, rounded up by
    `padded_length`."""
    places = zip(data, numbers, strict=True)
    read = [list(rows.row(int(number))) for rows, number in places]
    pack, n_columns = data[0].pack, data[0].block_size
    if not pack:
        longest = max(len(ids) - 1 for row in read for ids, _ in row)
        n_columns = int(padded_length(longest, n_columns))

    # padding is never read: without an id for it any will do
    pad_id = max(0, data[0].conversations.tokenizer.pad_id)
    x = np.full((len(read), n_columns), pad_id, np.int64)
    y = np.zeros_like(x)
    learned = np.zeros(x.shape, bool)
    documents = np.full_like(x, -1)
    for b, row in enumerate(read):
        begin = 0  # of the next conversation in the row
        for k, (ids, mask) in enumerate(row):
            # L ids give L - 1 inputs: the last id is a label only
            end = begin + len(ids) - 1
            x[b, begin:end] = ids[:-1]
            y[b, begin:end] = ids[1:]
            learned[b, begin:end] = mask[1:]
            documents[b, begin:end] = k
            begin = end
    index = np.flatnonzero(learned)
    return Batch(
        x=torch.from_numpy(x),
        documents=torch.from_numpy(documents) if pack else None,
        index=torch.from_numpy(index),
        targets=torch.from_numpy(y.reshape(-1)[index]),
    )


# ---- the sources of a run --------------------------------------------------------------------


FEW = 1000  # conversations: fewer do not share rows, for they would make a handful of steps
# Conversations that a run sees at least, counting repetitions: 20 steps of config/sft.py's 128. Of
# a hundred, 10 and 20 epochs had 98.4 % of the tokens right in questions worded otherwise.
SEEN = 2500


@dataclass(eq=False)
class ChatCorpus(RowCorpus):
    """The conversations that `data` names. train, val: ChatRows. Raise UserError."""

    pack: bool | None = True  # several conversations in a row; None = unless they are few

    def many_epochs(self, data: ChatRows) -> float:
        # a hundred conversations are learned well in 20 epochs, thirty in 100
        return max(30.0, 3000 / len(data.conversations))

    def usual_epochs(self, max_epochs: str) -> float:
        """Return the epochs of a run whose settings name none."""
        n = sum(map(self.n_items, self.train))
        return 3.0 if max_epochs else max(3.0, SEEN / n)

    def chosen_for_few(self, config: dict, epochs: float) -> list[str]:
        """Return a line on what was chosen because conversations are few, and which settings change
        that. [] if nothing was. config: settings. epochs: of the run."""
        chosen, usual = [], self.usual_epochs(config["max_epochs"])
        # max_steps may be a config file's. Of several sources the epochs of each stand above.
        if config["max_steps"] and usual > 3 and len(self.train) == 1:
            seen = f"max_steps={config['max_steps']} shows each {epochs:.1f} times"
            would = f"--max_steps=0 does {config['epochs'] or usual:.0f} times"
            chosen.append(f"{seen}; {would} (--epochs sets this)")
        elif not config["epochs"] and usual > 3:
            often = f"each is shown {usual:.0f} times, and learned by heart"
            chosen.append(f"{often} (--epochs sets this)")
        if config["pack"] == "auto" and not self.pack:
            chosen.append("one conversation per row (--pack=yes puts several into a row)")
        n = counted(sum(map(self.n_items, self.train)), "conversation")
        return [f"few data    {n}: {'; '.join(chosen)}"] if chosen else []

    def read(self, path: str, val_fraction: float, setting: str) -> Source:
        return read_chat(path, self.tokenizer, val_fraction, setting)

    def with_validation(self, sources: list[Source]) -> list[Source]:
        """Return the sources; if nothing that is held out fits in a row, move one that fits."""
        if any(self.first_that_fits(source.val) is not None for source in sources):
            return sources
        for k, (train, val, reader) in enumerate(sources):
            first = self.first_that_fits(train)
            if first is None:
                continue
            # with its copies: no text is in two splits
            ids, _ = train.ids(first)
            moved = np.array([np.array_equal(train.ids(i)[0], ids) for i in range(len(train))])
            rest = train.take(~moved)
            if self.first_that_fits(rest) is not None:
                held_out = f"{counted(len(val), 'conversation')} held out for validation"
                why = f"{held_out}, none of which fits in block_size={self.block_size}"
                reader.notes.append(f"{self.names[k]}: {why}; one that fits takes their place")
                source = Source(rest, train.take(moved), reader)
                return [*sources[:k], source, *sources[k + 1 :]]
        return sources

    def first_that_fits(self, talks: Conversations) -> int | None:
        """Return the number of the first conversation with an answer that fits in a row."""
        for i in range(len(talks)):
            _, mask = fit(*talks.ids(i), self.block_size + 1)
            if mask.any():
                return i
        return None

    def n_items(self, data: ChatRows) -> int:
        return len(data.members)

    def lay_out(self, name: str, items: Conversations) -> ChatRows:
        if self.pack is None:  # the first time: all sources are read
            self.pack = sum(len(source.train) for source in self.sources) >= FEW
        return ChatRows(items, self.block_size, self.pack, self.seed, name)

    def most_documents(self) -> int:
        """Return an upper bound on the documents in a row, for attention within documents."""
        return max(rows.most_documents for rows in [*self.train, *self.all_val])

    def batch(self, data: Sequence[ChatRows], numbers: np.ndarray) -> Batch:
        return load_rows(data, numbers)

    def val_starts(self, data: ChatRows) -> np.ndarray:
        return np.arange(data.n_rows)

    def targets_of(self, source: int, numbers: np.ndarray) -> np.ndarray:
        return self.train[source].n_labels[numbers]

    def prompts(self, n: int) -> list[tuple[list[int], str]]:
        """Return (ids up to the last answer, that answer) of n validation conversations.

        They come from all sources in turn; only from conversations that fit into a row and have
        ids before a learned answer."""
        of_each = [itertools.islice(self.prompts_of(rows), n) for rows in self.val.values()]
        rounds = itertools.zip_longest(*of_each)
        return [prompt for prompts in rounds for prompt in prompts if prompt][:n]

    def prompts_of(self, rows: ChatRows) -> Iterator[tuple[list[int], str]]:
        """Yield (ids up to the last answer, that answer) of one source."""
        for i in range(len(rows.conversations)):
            ids, mask = rows.conversations.ids(i)
            if len(ids) > self.block_size or not mask.any():
                continue
            # the last run of ones in the mask; its last id ends the turn and is no text
            end = int(np.flatnonzero(mask)[-1])
            unlearned = np.flatnonzero(mask[:end] == 0)
            if len(unlearned):
                begin = int(unlearned[-1]) + 1
                yield ids[:begin].tolist(), self.tokenizer.decode(ids[begin:end].tolist())
