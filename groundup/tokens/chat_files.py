"""Conversations as ids with a mask of the tokens to learn: from raw files, or from prepare.py's.

A directory of prepare.py --kind=chat --tokenizer_dir=... holds, for each split (train, val, test),
in the same order:

    train.jsonl            {"messages": [{"role": ..., "content": ...}, ...]}, one per line
    train_00000.npy        ids of all conversations end to end, 1-D uint16 or uint32
    train_00000.mask.npy   uint8, 1 for ids of the assistant's turns
    train_00000.off.npy    int64, n + 1: where each conversation begins, and where the last ends

Without token files, or with those of another tokenizer, the rows are tokenized when training
starts, like those of raw files.
"""

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from groundup.files import row_formats, usable
from groundup.files.splits import dialogue_text
from groundup.tokens.row_reader import STRANGE, Items, RowReader, SourceRows, Unusable, read_source
from groundup.tokens.token_files import (
    AGAIN,
    check_shape,
    file_sha256,
    map_checked,
    npy_header,
    read_manifest,
    token_dtype,
)
from groundup.tokens.token_writer import NpyWriter
from tokenizer import Tokenizer


def tokenize(messages: list[dict], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids (n,) of the vocabulary's type, mask (n,) uint8); see `Tokenizer.render`."""
    ids, mask = tokenizer.render(messages)
    return np.array(ids, token_dtype(tokenizer.vocab_size)), np.array(mask, np.uint8)


# ---- many conversations ----------------------------------------------------------------------


@dataclass(frozen=True)
class Conversations:
    """The conversations of one split of one source, end to end, in memory or mapped."""

    tokens: np.ndarray  # (n_ids,) uint16 or uint32
    mask: np.ndarray  # (n_ids,) uint8
    offsets: np.ndarray  # (n + 1,) int64
    pad_id: int  # 0 if the tokenizer has none: padding is never read
    fingerprint: str  # sha256 of all this, the same in memory and mapped

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def ids(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, mask) of conversation i."""
        begin, end = self.offsets[i : i + 2].tolist()
        return self.tokens[begin:end], self.mask[begin:end]


def make_conversations(
    arrays: Sequence[np.ndarray], digests: list[str], tokenizer: Tokenizer
) -> Conversations:
    """Return the Conversations of (tokens, mask, offsets). digests: sha256 of their .npy files."""
    tokens, mask, offsets = arrays
    pad_id = max(tokenizer.pad_id, 0)
    fingerprint = fingerprint_of(digests, tokenizer.chat_fingerprint())
    return Conversations(tokens, mask, offsets, pad_id, fingerprint)


class InMemory:
    """Conversations as they are read: ids and masks grow in place, so that memory holds them once.

    lengths: ids of each conversation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.ids, self.mask, self.lengths = bytearray(), bytearray(), array("q")

    def append(self, item: tuple[np.ndarray, np.ndarray]) -> None:
        """Append what `tokenize` returned."""
        ids, mask = item
        assert ids.dtype == self.dtype and mask.dtype == np.uint8, f"{ids.dtype=} {mask.dtype=}"
        self.ids += ids.tobytes()
        self.mask += mask.tobytes()
        self.lengths.append(len(ids))

    def __len__(self) -> int:
        return len(self.lengths)

    def without(self, held_out: np.ndarray) -> "InMemory":
        """Take out the conversations that held_out (n,) bool marks, and return them."""
        others, kept = InMemory(self.tokenizer), array("q")
        begins = np.cumsum([0, *self.lengths])
        ids = np.frombuffer(self.ids, self.dtype)
        mask = np.frombuffer(self.mask, np.uint8)
        end = 0  # of what is kept, which moves to the front
        for i, (begin, n) in enumerate(zip(begins.tolist(), self.lengths, strict=False)):
            if held_out[i]:
                others.append((ids[begin : begin + n], mask[begin : begin + n]))
            else:
                ids[end : end + n] = ids[begin : begin + n]
                mask[end : end + n] = mask[begin : begin + n]
                kept.append(n)
                end += n
        del ids, mask  # a bytearray with a view cannot shrink
        del self.ids[end * self.dtype.itemsize :], self.mask[end:]
        self.lengths = kept
        return others

    def conversations(self) -> Conversations:
        tokens = np.frombuffer(self.ids, self.dtype)
        mask = np.frombuffer(self.mask, np.uint8)
        offsets = np.cumsum([0, *self.lengths], dtype=np.int64)
        arrays = [tokens, mask, offsets]
        digests = [sha256_of(array) for array in arrays]
        return make_conversations(arrays, digests, self.tokenizer)


def sha256_of(array: np.ndarray) -> str:
    """Return the sha256 of the .npy file of an array (n,)."""
    digest = hashlib.sha256(npy_header(array.dtype, len(array)))
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    digest.update(np.ascontiguousarray(little).data)
    return digest.hexdigest()


def fingerprint_of(digests: list[str], tokenizer_fingerprint: str) -> str:
    return hashlib.sha256(json.dumps([*digests, tokenizer_fingerprint]).encode()).hexdigest()


# ---- token files -----------------------------------------------------------------------------

FILES = ("file", "mask", "offsets")  # their keys in the manifest


class ConversationWriter:
    """Writes the token files of a split, conversation by conversation."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype) -> None:
        start = directory / f"{split}_00000"
        self.tokens = NpyWriter(Path(f"{start}.npy"), dtype)
        self.mask = NpyWriter(Path(f"{start}.mask.npy"), np.uint8)
        self.offsets = NpyWriter(Path(f"{start}.off.npy"), np.int64)
        self.offsets.add([0])

    def add(self, ids: np.ndarray, mask: np.ndarray) -> None:
        self.tokens.add(ids)
        self.mask.add(mask)
        self.offsets.add([self.tokens.length])

    def close(self) -> dict:
        """Complete the files and return their entry for the manifest."""
        entry = {"ids": self.tokens.length, "conversations": self.offsets.length - 1, "sha256": {}}
        for key, file in zip(FILES, (self.tokens, self.mask, self.offsets), strict=True):
            file.close()
            entry[key] = file.path.name
            entry["sha256"][file.path.name] = file_sha256(file.path)
        return entry


def map_tokens(directory: Path, entry: dict, dtype: str) -> list[np.ndarray]:
    """Return (tokens, mask, offsets) of a split, mapped. entry: the manifest's.

    Raise UserError if they are not as they were written: all of them are read now."""
    kinds = (dtype, "uint8", "int64")
    lengths = (entry["ids"], entry["ids"], entry["conversations"] + 1)
    return [
        map_checked(directory, entry[key], entry["sha256"], kind, length)
        for key, kind, length in zip(FILES, kinds, lengths, strict=True)
    ]


# ---- reading ---------------------------------------------------------------------------------


class ChatReader(RowReader):
    """Reads conversations that end with the assistant's last turn.

    An item is (ids, mask), or the messages if the reader has no tokenizer."""

    def new_store(self) -> "Items | InMemory":
        return InMemory(self.tokenizer) if self.tokenizer else Items()

    def item(
        self, row: object, place: str
    ) -> tuple[str, list[dict] | tuple[np.ndarray, np.ndarray]]:
        messages, detail = row_formats.messages_of(row)
        if detail:
            raise Unusable(STRANGE, detail)
        if problem := usable.chat_problem(messages, row):
            raise Unusable(problem)
        answered = usable.trim_chat(messages)
        self.trimmed += len(answered) < len(messages)
        if not self.tokenizer:
            return dialogue_text(answered), answered
        self.left_out += self.tokenizer.left_out(answered)
        return dialogue_text(answered), tokenize(answered, self.tokenizer)


def read_chat(path: str, tokenizer: Tokenizer, val_fraction: float) -> SourceRows:
    """Return the Conversations of raw files or of a directory of prepare.py --kind=chat.

    Use the directory's token files if they are this tokenizer's, else its rows. Raise UserError."""
    directory = Path(path)
    reader = ChatReader(tokenizer)
    if (directory / "manifest.json").exists():
        manifest = read_manifest(directory, "chat")
        if manifest.get("tokenizer_fingerprint") == tokenizer.chat_fingerprint():
            train = map_split(directory, manifest, "train", tokenizer)
            val = map_split(directory, manifest, "val", tokenizer)
            reader.check(path, len(train) + len(val))
            return SourceRows(train, val, reader)
        if "tokenizer_fingerprint" in manifest:
            why = "its token files are another tokenizer's; its rows are tokenized again"
            reader.places.append(f"{directory}: {why}")
    rows = read_source(path, reader, val_fraction)
    return SourceRows(rows.train.conversations(), rows.val.conversations(), reader)


def map_split(directory: Path, manifest: dict, split: str, tokenizer: Tokenizer) -> Conversations:
    """Return the Conversations in the token files of a split; none if there is no such split."""
    if split not in manifest["splits"]:
        return InMemory(tokenizer).conversations()
    check_shape(directory / "manifest.json", manifest["splits"][split], {"tokens": dict}, AGAIN)
    entry = manifest["splits"][split]["tokens"]
    arrays = map_tokens(directory, entry, token_dtype(tokenizer.vocab_size).name)
    digests = [entry["sha256"][entry[key]] for key in FILES]
    return make_conversations(arrays, digests, tokenizer)
