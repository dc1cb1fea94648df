"""Token files and the order in which training sees their tokens.

    python prepare.py --input='corpus/*.jsonl' --out_dir=data/x     # writes the format described here
    python pretrain.py --data_dir=data/x                            # reads it

Two parts. *Token files*: a writer and a reader side by side. *Order*: sample number -> window of tokens, a pure
function of the seed, so that a run can resume anywhere and on any number of processes.

A data directory holds, for each split that has text (train, val, test):
    train_00000.npy       1-D uint16 (vocab_size <= 65536) or uint32: <|endoftext|> document <|endoftext|> document ...
    train_00000.off.npy   int64, n_documents + 1: where each document starts (at its <|endoftext|>), where the last ends
    manifest.json         written last: sizes, sha256 of every file, the tokenizer's fingerprint; without it: incomplete
and the tokenizer's own files. The last shard of a split closes with one more <|endoftext|>, so that the end of the last
document is learned too. Documents do not cross shards; windows do.
"""

import hashlib
import itertools
import json
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from readers import DataError

if TYPE_CHECKING:
    import torch

FORMAT = "groundup tokens 1"
SHARD_TOKENS = 2**27  # 256 MiB as uint16


# ---- token files: writer ---------------------------------------------------------------------------------------------


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every id < vocab_size."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def npy_header(dtype: np.dtype, length: int) -> bytes:
    """The header that `np.save` gives a 1-D array: 128 bytes whatever the length, so it can be filled in at the end."""
    fields = f"{{'descr': '{dtype.newbyteorder('<').str}', 'fortran_order': False, 'shape': ({length},), }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + fields.ljust(117).encode("ascii") + b"\n"


class ShardWriter:
    """Writes one split. Tokens go to disk as they come; a shard's name appears when the shard is complete."""

    def __init__(
        self, data_dir: str | Path, split: str, vocab_size: int, eot_id: int, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        assert 0 <= eot_id < vocab_size, f"{eot_id=} {vocab_size=}"
        self.dir, self.split = Path(data_dir), split
        self.vocab_size, self.eot_id, self.shard_tokens = vocab_size, eot_id, shard_tokens
        self.dtype = token_dtype(vocab_size)
        self.shards: list[dict] = []  # manifest entries of the shards that are complete
        self.file = None  # of the shard being written
        self.dir.mkdir(parents=True, exist_ok=True)

    def add(self, ids: np.ndarray, n_bytes: int) -> None:
        """Append one document: its token ids (1-D, any integer type) and the length of its text in UTF-8 bytes.

        Raises DataError for an id outside the vocabulary: a cast would wrap it silently into another token.
        """
        ids = np.asarray(ids)
        assert ids.ndim == 1 and (ids.dtype.kind in "iu" or not len(ids)), f"{ids.shape=} {ids.dtype=}"
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            bad = ids.min() if ids.min() < 0 else ids.max()
            raise DataError(f"data: token id {bad} is outside the tokenizer's vocab_size={self.vocab_size}")
        if self.file and self.n_tokens + 1 + len(ids) > self.shard_tokens:
            self._finish_shard(closing=False)
        if not self.file:
            self._open_shard()
        self.starts.append(self.n_tokens)
        self._write([self.eot_id])
        self._write(ids)
        self.n_bytes += n_bytes

    def close(self) -> list[dict]:
        """Finish the split; its shards as entries for `write_manifest`. A split without documents has none."""
        if self.file:
            self._finish_shard(closing=True)
        return self.shards

    def _open_shard(self) -> None:
        self.name = f"{self.split}_{len(self.shards):05d}"
        self.file = open(self.dir / f"{self.name}.npy.tmp", "wb", buffering=2**20)
        self.file.write(npy_header(self.dtype, 0))  # the length is filled in when it is known
        self.n_tokens, self.n_bytes, self.starts = 0, 0, []

    def _write(self, ids: np.ndarray | list[int]) -> None:
        self.file.write(np.asarray(ids).astype(self.dtype.newbyteorder("<")).tobytes())
        self.n_tokens += len(ids)

    def _finish_shard(self, closing: bool) -> None:
        n_documents, end = len(self.starts), self.n_tokens
        if closing:
            self._write([self.eot_id])
        self.file.seek(0)
        self.file.write(npy_header(self.dtype, self.n_tokens))
        self.file.close()
        self.file = None
        tokens, offsets = self.dir / f"{self.name}.npy", self.dir / f"{self.name}.off.npy"
        with open(f"{offsets}.tmp", "wb") as f:
            f.write(npy_header(np.dtype(np.int64), n_documents + 1))
            f.write(np.array([*self.starts, end], dtype="<i8").tobytes())
        for path in (tokens, offsets):
            os.replace(f"{path}.tmp", path)
        self.shards.append({
            "split": self.split, "file": tokens.name, "offsets": offsets.name, "tokens": self.n_tokens,
            "documents": n_documents, "bytes": self.n_bytes, "sha256": file_sha256(tokens),
            "offsets_sha256": file_sha256(offsets),
        })  # fmt: skip


def write_manifest(
    data_dir: str | Path, vocab_size: int, eot_id: int, tokenizer_fingerprint: str, shards: list[dict], info: dict
) -> dict:
    """Declare the directory complete. `info` is the preparer's own record (inputs, configuration, counts)."""
    manifest = {
        "format": FORMAT, "vocab_size": vocab_size, "eot_id": eot_id, "dtype": token_dtype(vocab_size).name,
        "tokenizer_fingerprint": tokenizer_fingerprint, "splits": {}, "info": info,
    }  # fmt: skip
    for shard in shards:
        split = manifest["splits"].setdefault(shard["split"], {"tokens": 0, "documents": 0, "bytes": 0, "shards": []})
        for total in ("tokens", "documents", "bytes"):
            split[total] += shard[total]
        split["shards"].append({key: value for key, value in shard.items() if key != "split"})
    path = Path(data_dir, "manifest.json")
    with open(f"{path}.tmp", "w", encoding="utf-8") as f:
        json.dump(manifest, f, indent=1, ensure_ascii=False)
        f.flush()
        os.fsync(f.fileno())
    os.replace(f"{path}.tmp", path)
    return manifest


# ---- token files: reader ---------------------------------------------------------------------------------------------


def read_manifest(data_dir: str | Path) -> dict:
    """manifest.json of a data directory. Raises DataError where there is none, or another program's."""
    path = Path(data_dir, "manifest.json")
    how = f"run: python prepare.py --input=... --out_dir={data_dir}"
    if not Path(data_dir).is_dir():
        raise DataError(f"data: no directory {data_dir}; {how}")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"data: {data_dir} is not prepared, or not completely: no manifest.json; {how}") from None
    except ValueError as error:
        raise DataError(f"data: {path} is damaged ({error}); {how}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"data: {path} is not of the format {FORMAT!r}; {how}")
    return manifest


def map_array(path: Path, dtype: str, length: int) -> np.ndarray:
    """Read-only memory map of a 1-D .npy file. Raises DataError if it is not what the manifest says."""
    header = npy_header(np.dtype(dtype), length)
    try:
        with open(path, "rb") as f:
            found = f.read(len(header))
            size, expected = f.seek(0, os.SEEK_END), len(header) + length * np.dtype(dtype).itemsize
    except FileNotFoundError:
        raise DataError(f"data: {path} is missing; copy it again or rerun prepare.py") from None
    if found != header:
        begins = found[10:].decode("ascii", "replace").strip()
        raise DataError(f"data: {path} is no .npy file of {length} {dtype} (begins {begins!r}); rerun prepare.py")
    if size != expected:
        raise DataError(f"data: {path} ends at byte {size} instead of {expected}; copy it again or rerun prepare.py")
    mapped = np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r", offset=len(header), shape=(length,))
    return np.asarray(mapped)  # the same memory; slices of the subclass np.memmap take three times as long


def check_ids(ids: np.ndarray, vocab_size: int, path: Path, offset: int) -> None:
    """Raise DataError naming the first id >= vocab_size; ids[0] is token `offset` of the file."""
    if ids.max(initial=0) >= vocab_size:
        first = int(np.argmax(ids >= vocab_size))
        raise DataError(
            f"data: {path} holds token id {ids[first]} at offset {offset + first}, but the tokenizer has "
            f"vocab_size={vocab_size}; rerun prepare.py"
        )


class TokenData:
    """One split of a data directory as one long row of tokens, mapped read-only.

    The sizes of its files are checked here and ids as they are fetched, so a terabyte opens fast. `verify` reads all.
    """

    def __init__(self, data_dir: str | Path, split: str) -> None:
        self.dir, self.split = Path(data_dir), split
        self.manifest = read_manifest(data_dir)
        self.vocab_size: int = self.manifest["vocab_size"]
        self.eot_id: int = self.manifest["eot_id"]
        self.tokenizer_fingerprint: str = self.manifest["tokenizer_fingerprint"]
        if split not in self.manifest["splits"]:
            has = ", ".join(self.manifest["splits"]) or "none"
            raise DataError(f"data: {data_dir} has no split {split!r} (has: {has}); rerun prepare.py with more text")
        entry = self.manifest["splits"][split]
        self.n_bytes: int = entry["bytes"]
        self.n_documents: int = entry["documents"]
        self.paths = [self.dir / shard["file"] for shard in entry["shards"]]
        self.shards = [
            map_array(path, self.manifest["dtype"], shard["tokens"])
            for path, shard in zip(self.paths, entry["shards"], strict=True)
        ]
        self.offsets = [
            map_array(self.dir / shard["offsets"], "int64", shard["documents"] + 1) for shard in entry["shards"]
        ]
        self.ends = np.cumsum([len(shard) for shard in self.shards])  # of each shard, in tokens of the split
        self.n_tokens = int(self.ends[-1])

    @property
    def fingerprint(self) -> str:
        """sha256 of what decides the token stream: equal fingerprints, equal tokens."""
        parts = [FORMAT, self.split, self.tokenizer_fingerprint, self.vocab_size]
        parts += [shard["sha256"] for shard in self.manifest["splits"][self.split]["shards"]]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def check_tokenizer(self, fingerprint: str) -> None:
        """Raise DataError unless `fingerprint` (`Tokenizer.fingerprint()`) made these tokens."""
        if fingerprint != self.tokenizer_fingerprint:
            raise DataError(
                f"data: {self.dir} was prepared with another tokenizer ({self.tokenizer_fingerprint[:12]}, not "
                f"{fingerprint[:12]}); put its tokenizer files back or rerun prepare.py"
            )

    def window(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) as int64, across shards. Raises DataError for an id beyond the vocabulary."""
        assert 0 <= start and start + length <= self.n_tokens, f"{start=} {length=} {self.n_tokens=}"
        out = np.empty(length, dtype=np.int64)
        filled, k = 0, int(np.searchsorted(self.ends, start, side="right"))
        while filled < length:
            shard = self.shards[k]
            begin = start + filled - (int(self.ends[k]) - len(shard))
            piece = shard[begin : begin + length - filled]
            check_ids(piece, self.vocab_size, self.paths[k], begin)
            out[filled : filled + len(piece)] = piece
            filled, k = filled + len(piece), k + 1
        return out


def verify(data_dir: str | Path) -> dict:
    """Read every byte of a data directory and compare it with the manifest, which is returned.

    Raises DataError for the first file whose sha256, size, offsets, document starts, ids or totals are not as promised.
    """
    manifest = read_manifest(data_dir)
    for split, entry in manifest["splits"].items():
        data = TokenData(data_dir, split)
        for k, shard in enumerate(entry["shards"]):
            for name, sha256 in ((shard["file"], shard["sha256"]), (shard["offsets"], shard["offsets_sha256"])):
                if file_sha256(data.dir / name) != sha256:
                    raise DataError(f"data: {data.dir / name} changed since it was written (sha256); rerun prepare.py")
            verify_shard(data, k, last=k == len(entry["shards"]) - 1)
        for total in ("tokens", "documents", "bytes"):
            if sum(shard[total] for shard in entry["shards"]) != entry[total]:
                raise DataError(f"data: {data.dir}/manifest.json: {total} of {split} do not add up; rerun prepare.py")
    return manifest


def verify_shard(data: TokenData, k: int, last: bool) -> None:
    """Ids, offsets and delimiters of one shard, a block at a time."""
    tokens, offsets, path = data.shards[k], data.offsets[k], data.paths[k]
    for begin in range(0, len(tokens), 2**24):
        check_ids(tokens[begin : begin + 2**24], data.vocab_size, path, begin)
    closing = [len(tokens) - 1] if last else []  # the last shard of a split ends with one more delimiter
    if offsets[0] != 0 or np.any(np.diff(offsets) < 1) or offsets[-1] != len(tokens) - len(closing):
        raise DataError(f"data: the document offsets of {path} are not increasing from 0 to its end; rerun prepare.py")
    starts = np.concatenate([offsets[:-1], closing]).astype(np.int64)
    wrong = starts[tokens[starts] != data.eot_id]
    if len(wrong):
        raise DataError(f"data: {path} has no <|endoftext|> at offset {wrong[0]}; rerun prepare.py")


# ---- order -----------------------------------------------------------------------------------------------------------


def window_count(n_tokens: int, block_size: int) -> int:
    """Training windows per epoch. One window's worth is left for the offset that moves their borders every epoch."""
    return (n_tokens - 1) // block_size - 1


def hash_words(count: int, *parts: int | str) -> np.ndarray:
    """`count` pseudo-random uint64, the same on every machine, from the parts."""
    return np.frombuffer(hashlib.shake_256(repr(parts).encode()).digest(8 * count), dtype="<u8")


def permute(index: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """index (any shape) int64 in [0, n) -> its place under a pseudo-random bijection of [0, n), without a table.

    A Feistel network (Luby and Rackoff, 1988): x = (left, right) -> (right, left ^ f(right)) is invertible whatever f
    is. It permutes a power of four; a result >= n is fed in again until it is below ("cycle walking", Black and Rogaway
    2002), on average less than four times. Eight rounds: with four, the 24 orders of n = 4 are visibly not alike.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)

    def encrypt(x: np.ndarray) -> np.ndarray:
        left, right = x >> half, x & mask
        for key in keys:
            f = (right ^ key) * np.uint64(0xBF58476D1CE4E5B9)  # the finaliser of splitmix64, wrapping modulo 2**64
            f = (f ^ (f >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((f ^ (f >> np.uint64(31))) & mask)
        return (left << half) | right

    flat = encrypt(np.asarray(index, dtype=np.uint64).reshape(-1))
    while len(outside := np.flatnonzero(flat >= n)):
        flat[outside] = encrypt(flat[outside])
    return flat.astype(np.int64).reshape(np.shape(index))


class Sampler:
    """Sample number -> where its window of block_size + 1 tokens starts.

    Every window comes once per epoch, in an order and with borders that differ between epochs. Nothing to save, nothing
    to skip: sample 10**9 costs what sample 0 does.

    One source of tokens. A mixture would map a sample number to (source, number within the source) and ask its Sampler.
    """

    def __init__(self, n_tokens: int, block_size: int, seed: int) -> None:
        self.block_size, self.seed = block_size, seed
        self.n_windows = window_count(n_tokens, block_size)
        if self.n_windows < 1:
            raise DataError(
                f"data: {n_tokens} training tokens are too few for block_size={block_size}, which needs "
                f"{2 * block_size + 1}; prepare more text or lower block_size"
            )

    def start(self, sample: np.ndarray) -> np.ndarray:
        """Sample numbers, any shape, -> int64 token offsets. Neighbours share one token: each is a target once."""
        epochs, positions = np.divmod(np.asarray(sample, dtype=np.int64), self.n_windows)
        starts = np.empty_like(positions)
        for epoch in np.unique(epochs):
            now = epochs == epoch
            words = hash_words(9, "windows", self.seed, int(epoch))
            offset = int(words[8] % np.uint64(self.block_size))
            starts[now] = offset + self.block_size * permute(positions[now], self.n_windows, words[:8])
        return starts


# ---- batches ---------------------------------------------------------------------------------------------------------


def load_windows(data: TokenData, starts: np.ndarray, block_size: int) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Inputs and targets, each (len(starts), block_size) int64: targets are the inputs one token later."""
    import torch

    rows = np.stack([data.window(int(start), block_size + 1) for start in starts])
    return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


class Batches:
    """This rank's micro-batches, from start_step on for ever, loaded ahead by a thread.

    A step of B = batch_size * accum_steps * world_size samples takes the samples step * B ... step * B + B - 1; rank r
    has the r-th part of them, cut into micro-batches in order. So the samples of a step, and their order, depend on
    neither the number of ranks nor that of micro-steps.
    """

    def __init__(
        self, data: TokenData, block_size: int, batch_size: int, accum_steps: int, seed: int, rank: int = 0,
        world_size: int = 1, device: "str | torch.device" = "cpu", start_step: int = 0, ahead: int = 4,
    ) -> None:  # fmt: skip
        import torch

        assert 0 <= rank < world_size, f"{rank=} {world_size=}"
        assert batch_size > 0 and accum_steps > 0, f"{batch_size=} {accum_steps=}"
        self.data, self.block_size, self.batch_size, self.accum_steps = data, block_size, batch_size, accum_steps
        self.rank, self.start_step, self.device = rank, start_step, torch.device(device)
        if self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.samples_per_step = batch_size * accum_steps * world_size
        self.sampler = Sampler(data.n_tokens, block_size, seed)
        self.n_taken = 0  # micro-batches handed out
        self.queue: queue.Queue = queue.Queue(maxsize=ahead)
        self.stop, self.error = threading.Event(), None
        self.thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self.thread.start()

    def position(self, step: int) -> int:
        """Number of the first sample of a step (the first step is 0), over all ranks."""
        return step * self.samples_per_step

    @property
    def epoch(self) -> int:
        """Epoch (from 0) that the next micro-batch's step begins in."""
        return self.position(self.start_step + self.n_taken // self.accum_steps) // self.sampler.n_windows

    def samples(self, step: int, micro_step: int) -> np.ndarray:
        """Sample numbers of this rank's micro-batch, (batch_size,) int64."""
        first = self.position(step) + (self.rank * self.accum_steps + micro_step) * self.batch_size
        return np.arange(first, first + self.batch_size)

    def next(self) -> tuple["torch.Tensor", "torch.Tensor"]:
        """The next micro-batch, x and y (batch_size, block_size) int64 on the device. Raises what the thread raised."""
        if self.error is None:
            item = self.queue.get()
            self.error = item if isinstance(item, BaseException) else None
        if self.error is not None:
            raise self.error
        self.n_taken += 1
        x, y = item
        pinned = self.device.type == "cuda"
        return x.to(self.device, non_blocking=pinned), y.to(self.device, non_blocking=pinned)

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

    def _load(self) -> Iterator[tuple["torch.Tensor", "torch.Tensor"]]:
        if self.device.type == "cuda":
            import torch

            torch.cuda.set_device(self.device)  # a thread begins on device 0; pinning there would open a context on it
        first = self.start_step * self.accum_steps
        for block in itertools.count(first, 32):  # many micro-batches' samples at once: numpy is slow on few numbers
            samples = [self.samples(*divmod(k, self.accum_steps)) for k in range(block, block + 32)]
            for starts in self.sampler.start(np.stack(samples)):
                x, y = load_windows(self.data, starts, self.block_size)
                # from page-locked memory the copy to the device runs while the host goes on
                yield (x.pin_memory(), y.pin_memory()) if self.device.type == "cuda" else (x, y)


def val_batches(
    data: TokenData, block_size: int, batch_size: int, eval_steps: int = 0, rank: int = 0, world_size: int = 1
) -> Iterator[tuple["torch.Tensor", "torch.Tensor"]]:
    """This rank's share of the evaluation batches (x, y), on the CPU: all ranks together have the same for any number.

    eval_steps batches of windows spread evenly over the split; 0, or more than there are: every window once, in order.
    """
    n_windows = (data.n_tokens - 1) // block_size
    if n_windows < 1:
        raise DataError(
            f"data: the {data.split} split of {data.dir} has {data.n_tokens} tokens, but block_size={block_size} needs "
            f"{block_size + 1}; prepare more text or lower block_size"
        )
    n = min(eval_steps * batch_size, n_windows) if eval_steps else n_windows
    starts = np.arange(n) * n_windows // n * block_size
    for first in range(rank * batch_size, n, world_size * batch_size):
        yield load_windows(data, starts[first : first + batch_size], block_size)
