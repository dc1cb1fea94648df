"""Conversations as ids with a mask of what is learnt: made of raw files, or mapped from what prepare.py has written.

A directory of prepare.py --kind=chat --tokenizer_dir=... holds, for each split (train, val, test), in the same order:
    train.jsonl            {"messages": [{"role": ..., "content": ...}, ...]}, a conversation per line
    train_00000.npy        ids of all conversations end to end, 1-D uint16 (vocab_size <= 65536) or uint32
    train_00000.mask.npy   uint8, 1 where the id is the assistant's to say
    train_00000.off.npy    int64, n + 1: where each conversation begins, where the last ends
the tokenizer's own files and manifest.json. Without token files, or with another tokenizer, the rows are tokenized when
training starts, as those of raw files are: the conversations are the same.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from groundup.errors import UserError
from groundup.files import readers, row_formats
from groundup.text.pipeline import Recipe, said, split_position
from groundup.text.selection import assign
from groundup.tokens.token_files import file_sha256, map_array, npy_header, token_dtype
from tokenizer import Tokenizer

ROWS_FORMAT = "groundup rows 1"  # of a directory of conversations or pairs
SUFFIXES = (".npy", ".mask.npy", ".off.npy")
SHOWN = 3  # places that are named of each reason for which rows are left out


# ---- one conversation ------------------------------------------------------------------------------------------------


def tokenize(messages: list[dict], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """(ids (n,) of the vocabulary's type, mask (n,) uint8) of a conversation, see `Tokenizer.render`."""
    ids, mask = tokenizer.render(messages)
    return np.array(ids, token_dtype(tokenizer.vocab_size)), np.array(mask, np.uint8)


def untokenize(ids: np.ndarray, tokenizer: Tokenizer) -> list[dict]:
    """The messages that `tokenize` made ids of."""
    begins = [*np.flatnonzero(ids == tokenizer.im_start_id).tolist(), len(ids)]
    ends = np.flatnonzero(ids == tokenizer.im_end_id).tolist()
    turns = [tokenizer.decode(ids[begin + 1 : end].tolist()) for begin, end in zip(begins, ends, strict=False)]
    return [dict(zip(("role", "content"), turn.split("\n", 1), strict=True)) for turn in turns]


# ---- many conversations ----------------------------------------------------------------------------------------------


class Conversations(NamedTuple):
    """Of one split of one source, end to end, in memory or mapped."""

    tokens: np.ndarray  # (n_ids,) uint16 or uint32
    mask: np.ndarray  # (n_ids,) uint8
    offsets: np.ndarray  # (n + 1,) int64
    end_id: int  # <|im_end|>
    pad_id: int
    fingerprint: str  # sha256 of all this, equal for what is in memory and what is mapped

    @property
    def n(self) -> int:
        return len(self.offsets) - 1

    def ids(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, mask) of conversation i."""
        place = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.tokens[place], self.mask[place]


def in_memory(rendered: Sequence[tuple[np.ndarray, np.ndarray]], tokenizer: Tokenizer) -> Conversations:
    """Conversations of what `tokenize` gave."""
    dtype = token_dtype(tokenizer.vocab_size)
    tokens = np.concatenate([np.zeros(0, dtype), *(ids for ids, _ in rendered)])
    mask = np.concatenate([np.zeros(0, np.uint8), *(mask for _, mask in rendered)])
    offsets = np.cumsum([0, *(len(ids) for ids, _ in rendered)], dtype=np.int64)
    digests = [sha256_of(array) for array in (tokens, mask, offsets)]
    return Conversations(tokens, mask, offsets, *ids_of(tokenizer), fingerprint_of(digests, tokenizer.fingerprint()))


def ids_of(tokenizer: Tokenizer) -> tuple[int, int]:
    """(end of turn, padding), the latter any id if there is none: nothing looks at it."""
    return tokenizer.im_end_id, max(tokenizer.pad_id, 0)


def sha256_of(array: np.ndarray) -> str:
    """That of the .npy file of an array (n,)."""
    digest = hashlib.sha256(npy_header(array.dtype, len(array)))
    digest.update(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).data)
    return digest.hexdigest()


def fingerprint_of(digests: list[str], tokenizer_fingerprint: str) -> str:
    return hashlib.sha256(json.dumps([*digests, tokenizer_fingerprint]).encode()).hexdigest()


class ConversationWriter:
    """Writes the token files of a split, conversation by conversation."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype) -> None:
        self.paths = [directory / f"{split}_00000{suffix}" for suffix in SUFFIXES]
        self.files = [open(path, "wb", buffering=2**20) for path in self.paths]
        self.dtypes = [np.dtype(dtype), np.dtype(np.uint8), np.dtype(np.int64)]
        self.lengths = [0, 0, 0]
        for file, kind in zip(self.files, self.dtypes, strict=True):
            file.write(npy_header(kind, 0))  # the length is filled in when it is known
        self._write(2, np.zeros(1, np.int64))

    def add(self, ids: np.ndarray, mask: np.ndarray) -> None:
        self._write(0, ids)
        self._write(1, mask)
        self._write(2, np.array([self.lengths[0]]))

    def close(self) -> dict:
        """Complete the files; what the manifest says of them."""
        for file, kind, length in zip(self.files, self.dtypes, self.lengths, strict=True):
            file.seek(0)
            file.write(npy_header(kind, length))
            file.close()
        sha256 = {path.name: file_sha256(path) for path in self.paths}
        return {"ids": self.lengths[0], "conversations": self.lengths[2] - 1, "sha256": sha256}

    def _write(self, which: int, values: np.ndarray) -> None:
        self.files[which].write(values.astype(self.dtypes[which].newbyteorder("<")).tobytes())
        self.lengths[which] += len(values)


def map_tokens(directory: Path, entry: dict, dtype: str) -> list[np.ndarray]:
    """The token files of a split, mapped. entry: the manifest's. Raises DataError if their sizes are wrong."""
    lengths = entry["ids"], entry["ids"], entry["conversations"] + 1
    of_each = zip(entry["sha256"], (dtype, "uint8", "int64"), lengths, strict=True)
    return [map_array(directory / name, kind, length) for name, kind, length in of_each]


# ---- sources ---------------------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """What one path holds."""

    train: Conversations
    val: Conversations
    dropped: Counter  # rows that cannot be used, by reason
    trimmed: int  # conversations that lost what came after the assistant's last turn
    places: list[str]  # "file:line: reason" of the first few of each reason


class Reader:
    """Reads conversations out of files, counting what is left out."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self.trimmed, self.n_read, self.n_strange = 0, 0, 0
        self.places: list[str] = []

    def read(self, path: str) -> Iterator[list[dict]]:
        for record in readers.read_records(path):
            self.n_read += 1
            messages, reason, detail = [], record.problem, record.detail
            if not reason:
                messages, detail = row_formats.messages_of(readers.mend(record.value)[0])
                reason = "not understood" if detail else row_formats.chat_problem(messages)
                self.n_strange += bool(detail)
            if reason:
                self._drop(f"{path}:{record.line}", reason, detail)
                continue
            answered = row_formats.trim_chat(messages)
            self.trimmed += len(answered) < len(messages)
            yield answered

    def _drop(self, where: str, reason: str, detail: str) -> None:
        if self.dropped[reason] < SHOWN:
            self.places.append(f"{where}: {reason}" + (f": {' '.join(detail.split())}" if detail else ""))
        self.dropped[reason] += 1

    def check(self, name: str, n_found: int) -> None:
        """Raise DataError if there is nothing to train on."""
        if n_found:
            return
        if not self.n_read:
            raise UserError(f"data: {name} is empty: no row in it")
        if self.n_read == self.n_strange:
            tried = " | ".join(shape.keys for shape in row_formats.SHAPES["chat"])
            first = f"; first: {self.places[0].split('; chat is known by')[0]}" if self.places else ""
            raise UserError(f"data: {name} holds no conversations{first}; tried, by their keys: {tried}")
        reasons = ", ".join(f"{n} {reason}" for reason, n in self.dropped.items())
        raise UserError(f"data: {name} holds no usable conversation ({reasons}); first: {self.places[0]}")


def read_source(path: str, tokenizer: Tokenizer, val_fraction: float) -> Source:
    """The conversations of a raw file, a glob, a directory of raw files or one of prepare.py. Raises DataError."""
    if (Path(path) / "manifest.json").exists():
        return read_prepared(Path(path), tokenizer)
    return read_raw(path, tokenizer, val_fraction)


def read_raw(path: str, tokenizer: Tokenizer, val_fraction: float) -> Source:
    """Of raw files, split by the same hash of what is said as in prepare.py: val_fraction of them are val."""
    reader, rendered, positions = Reader(), [], []
    for file in readers.find_files(path):
        for messages in reader.read(file):
            rendered.append(tokenize(messages, tokenizer))
            positions.append(split_position(said(messages).encode()))
    reader.check(path, len(rendered))
    splits, _ = assign(np.array(positions, np.uint64), Recipe(val_fraction=val_fraction))
    train, val = (in_memory(list(itertools.compress(rendered, splits == k)), tokenizer) for k in (0, 1))
    return Source(train, val, reader.dropped, reader.trimmed, reader.places)


def read_prepared(directory: Path, tokenizer: Tokenizer) -> Source:
    """Of a directory of prepare.py --kind=chat: its token files, or, without those of this tokenizer, its rows."""
    manifest, reader = read_manifest(directory), Reader()
    same = manifest.get("tokenizer_fingerprint") == tokenizer.fingerprint()
    if not same and "tokenizer_fingerprint" in manifest:
        reader.places.append(f"{directory}: its token files are another tokenizer's; its rows are tokenized again")
    found = []
    for split in ("train", "val"):
        entry = manifest["splits"].get(split)
        if entry and same:
            arrays = map_tokens(directory, entry["tokens"], token_dtype(tokenizer.vocab_size).name)
            digests = list(entry["tokens"]["sha256"].values())
            fingerprint = fingerprint_of(digests, tokenizer.fingerprint())
            found.append(Conversations(*arrays, *ids_of(tokenizer), fingerprint))
        else:
            rows = reader.read(str(directory / entry["file"])) if entry else ()
            found.append(in_memory([tokenize(messages, tokenizer) for messages in rows], tokenizer))
    reader.check(str(directory), sum(split.n for split in found))
    return Source(*found, reader.dropped, reader.trimmed, reader.places)


def read_manifest(directory: Path) -> dict:
    """manifest.json of a directory of conversations. Raises DataError: another kind, damaged."""
    try:
        manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        kind = manifest["kind"] if manifest["format"] == ROWS_FORMAT else "text"
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"data: {directory}/manifest.json is damaged ({error!r}); rerun prepare.py") from None
    if kind != "chat":
        raise UserError(f"data: {directory} was prepared with kind={kind!r}, not 'chat': it holds no conversations")
    return manifest
