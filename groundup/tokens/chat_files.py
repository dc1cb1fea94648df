"""Conversations as ids with a mask of the tokens to learn: from raw files, or mapped from what prepare.py has written.

A directory of prepare.py --kind=chat --tokenizer_dir=... holds, for each split (train, val, test), in the same order:
    train.jsonl            {"messages": [{"role": ..., "content": ...}, ...]}, a conversation per line
    train_00000.npy        ids of all conversations end to end, 1-D uint16 (vocab_size <= 65536) or uint32
    train_00000.mask.npy   uint8, 1 for ids of the assistant's turns
    train_00000.off.npy    int64, n + 1: where each conversation begins, where the last ends
Without token files, or with another tokenizer, the rows are tokenized when training starts, like those of raw files.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from groundup.files import row_formats, usable
from groundup.files.splits import dialogue_text
from groundup.tokens.row_reader import STRANGE, RowReader, SourceRows, Unusable, read_source
from groundup.tokens.token_files import NpyWriter, file_sha256, map_array, npy_header, read_manifest, token_dtype
from tokenizer import Tokenizer

# ---- one conversation ------------------------------------------------------------------------------------------------


def tokenize(messages: list[dict], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids (n,) of the vocabulary's type, mask (n,) uint8) of a conversation; see `Tokenizer.render`."""
    ids, mask = tokenizer.render(messages)
    return np.array(ids, token_dtype(tokenizer.vocab_size)), np.array(mask, np.uint8)


# ---- many conversations ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conversations:
    """The conversations of one split of one source, end to end, in memory or mapped."""

    tokens: np.ndarray  # (n_ids,) uint16 or uint32
    mask: np.ndarray  # (n_ids,) uint8
    offsets: np.ndarray  # (n + 1,) int64
    end_id: int  # ends an assistant's turn
    pad_id: int  # 0 if the tokenizer has none: padding is never read
    fingerprint: str  # sha256 of all this, the same in memory and mapped

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def ids(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, mask) of conversation i."""
        place = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.tokens[place], self.mask[place]


def make_conversations(arrays: Sequence[np.ndarray], digests: list[str], tokenizer: Tokenizer) -> Conversations:
    """Return the Conversations of (tokens, mask, offsets), whose .npy files have these sha256 `digests`."""
    fingerprint = fingerprint_of(digests, tokenizer.chat_fingerprint())
    return Conversations(*arrays, tokenizer.turn_end_id, max(tokenizer.pad_id, 0), fingerprint)


def in_memory(rendered: Sequence[tuple[np.ndarray, np.ndarray]], tokenizer: Tokenizer) -> Conversations:
    """Return the Conversations of what `tokenize` returned."""
    empty = np.zeros(0, token_dtype(tokenizer.vocab_size)), np.zeros(0, np.uint8)
    tokens, mask = (np.concatenate(parts) for parts in zip(empty, *rendered, strict=True))
    arrays = tokens, mask, np.cumsum([0, *(len(ids) for ids, _ in rendered)], dtype=np.int64)
    return make_conversations(arrays, [sha256_of(array) for array in arrays], tokenizer)


def sha256_of(array: np.ndarray) -> str:
    """Return the sha256 of the .npy file of an array (n,)."""
    digest = hashlib.sha256(npy_header(array.dtype, len(array)))
    digest.update(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).data)
    return digest.hexdigest()


def fingerprint_of(digests: list[str], tokenizer_fingerprint: str) -> str:
    return hashlib.sha256(json.dumps([*digests, tokenizer_fingerprint]).encode()).hexdigest()


# ---- token files -----------------------------------------------------------------------------------------------------


class ConversationWriter:
    """Writes the token files of a split, conversation by conversation."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype) -> None:
        kinds = {".npy": dtype, ".mask.npy": np.uint8, ".off.npy": np.int64}
        self.files = [NpyWriter(directory / f"{split}_00000{suffix}", kind) for suffix, kind in kinds.items()]
        self.tokens, self.mask, self.offsets = self.files
        self.offsets.add([0])

    def add(self, ids: np.ndarray, mask: np.ndarray) -> None:
        self.tokens.add(ids)
        self.mask.add(mask)
        self.offsets.add([self.tokens.length])

    def close(self) -> dict:
        """Complete the files and return their entry for the manifest."""
        for file in self.files:
            file.close()
        sha256 = {file.path.name: file_sha256(file.path) for file in self.files}
        return {"ids": self.tokens.length, "conversations": self.offsets.length - 1, "sha256": sha256}


def map_tokens(directory: Path, entry: dict, dtype: str) -> list[np.ndarray]:
    """Return the token files of a split, mapped. entry: the manifest's. Raise UserError if their sizes are wrong."""
    lengths = entry["ids"], entry["ids"], entry["conversations"] + 1
    of_each = zip(entry["sha256"], (dtype, "uint8", "int64"), lengths, strict=True)
    return [map_array(directory / name, kind, length) for name, kind, length in of_each]


# ---- reading ---------------------------------------------------------------------------------------------------------


class ChatReader(RowReader):
    """Reads conversations as messages that end with the assistant's last turn, or as ids if it has a tokenizer."""

    def item(self, row: object, place: str) -> tuple[str, list[dict] | tuple[np.ndarray, np.ndarray]]:
        messages, detail = row_formats.messages_of(row)
        if detail:
            raise Unusable(STRANGE, detail)
        if problem := usable.chat_problem(messages, row):
            raise Unusable(problem)
        answered = usable.trim_chat(messages)
        self.trimmed += len(answered) < len(messages)
        return dialogue_text(answered), tokenize(answered, self.tokenizer) if self.tokenizer else answered


def read_chat(path: str, tokenizer: Tokenizer, val_fraction: float) -> SourceRows:
    """Return the Conversations of a raw file, a glob, a directory of raw files or one of prepare.py --kind=chat: its
    token files, or, without those of this tokenizer, its rows. Raise UserError."""
    directory, reader = Path(path), ChatReader(tokenizer)
    if (directory / "manifest.json").exists():
        manifest = read_manifest(directory, "chat")
        if manifest.get("tokenizer_fingerprint") == tokenizer.chat_fingerprint():
            found = {split: in_memory([], tokenizer) for split in ("train", "val")}
            for split in found.keys() & manifest["splits"]:
                entry = manifest["splits"][split]["tokens"]
                arrays = map_tokens(directory, entry, token_dtype(tokenizer.vocab_size).name)
                found[split] = make_conversations(arrays, list(entry["sha256"].values()), tokenizer)
            reader.check(path, sum(map(len, found.values())))
            return SourceRows(**found, reader=reader)
        if "tokenizer_fingerprint" in manifest:
            reader.places.append(f"{directory}: its token files are another tokenizer's; its rows are tokenized again")
    rows = read_source(path, reader, val_fraction)
    return rows._replace(train=in_memory(rows.train, tokenizer), val=in_memory(rows.val, tokenizer))
