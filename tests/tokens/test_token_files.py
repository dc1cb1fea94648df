"""token_files.py: token files against numpy, batches and packing against enumeration."""

import io
import itertools
import json
import os
import random
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from groundup.errors import UserError
from groundup.kernels.attention import documents_of as documents_of_ids
from groundup.tokens import IGNORE, token_files
from groundup.tokens.batches import Batches, TextCorpus, Windows, load_windows
from groundup.tokens.mixture import Mixture, window_sampler
from groundup.tokens.packing import Packing, best_fit, pack, pack_rows
from groundup.tokens.rows import steps_of
from groundup.tokens.token_files import PackedData, TokenData, npy_header
from groundup.tokens.token_writer import ShardWriter, verify, write_manifest, write_record
from groundup.train.ranks import World

# ---- token files -----------------------------------------------------------------------------------------------------

VOCAB, EOT = 1000, 3


def write(
    path: Path, documents: list[np.ndarray], split: str = "train", shard_tokens: int = 2**27, vocab_size: int = VOCAB
) -> np.ndarray:
    """A data directory of one split; the tokens that it must hold, put together by hand."""
    writer = ShardWriter(path, split, vocab_size, EOT, shard_tokens)
    for ids in documents:
        writer.add(ids, n_bytes=2 * len(ids))
    write_manifest(path, vocab_size, EOT, "f" * 64, writer.close(), {"config": {"text_key": "text"}})
    return np.concatenate([[EOT, *ids] for ids in documents] + [[EOT]]).astype(np.int64)


def random_documents(seed: int = 0, n: int = 60, longest: int = 90) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, VOCAB, rng.integers(0, longest)) for _ in range(n)]


def row(path: Path, n_tokens: int, split: str = "train") -> TokenData:
    """One document such that the split holds n_tokens tokens, 4, 5, 6, ... between the delimiters."""
    write(path, [4 + np.arange(n_tokens - 2) % (VOCAB - 4)], split)
    return TokenData(path, split)


def test_there_may_be_more_shards_than_files_may_usually_be_open(tmp_path):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    expected = write(tmp_path, random_documents(n=300), shard_tokens=32)
    token_files.raise_file_limit.cache_clear()
    n_open = len(os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_open + 50, hard))
    try:
        data = TokenData(tmp_path, "train")
        assert len(data.shards) > 100 and np.array_equal(data.window(0, len(expected)), expected)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Alone:
    """A corpus of one split."""

    def __init__(self, split: TokenData, block_size: int) -> None:
        self.split, self.block_size = split, block_size

    def load(self, sources: np.ndarray, starts: np.ndarray) -> Windows:
        return load_windows([self.split] * len(starts), starts, self.block_size)

    def count_targets(self, sources: np.ndarray, starts: np.ndarray) -> np.ndarray:
        return self.split.text_lengths(starts, self.block_size + 1) - 1


def val_batches(data: TokenData, block_size: int, *how: int) -> Iterator:
    """The evaluation batches of these data alone. how: batch_size, eval_steps, rank, world_size."""
    corpus = TextCorpus.__new__(TextCorpus)
    corpus.block_size = block_size
    return corpus.batches_of(data, *how)


def batches_of(
    split: TokenData, block_size: int, batch_size: int, accum_steps: int, seed: int, rank: int = 0,
    world_size: int = 1, **more: object,
) -> Batches:
    """Of this one split alone."""
    order = Mixture([window_sampler(split.n_tokens, block_size, seed)], seed)
    world = World(rank, rank, world_size)
    return Batches(Alone(split, block_size), order, batch_size, accum_steps, world, **more)


@pytest.mark.parametrize("shard_tokens", [64, 91, 512, 4096])
def test_round_trip_with_windows_across_shards(tmp_path: Path, shard_tokens: int) -> None:
    documents = random_documents()
    expected = write(tmp_path, documents, shard_tokens=shard_tokens)
    split = TokenData(tmp_path, "train")
    assert split.n_tokens == len(expected) == sum(len(ids) + 1 for ids in documents) + 1
    assert split.n_documents == len(documents) and split.n_bytes == 2 * sum(map(len, documents))
    assert (split.vocab_size, split.eot_id, split.manifest["info"]["config"]) == (VOCAB, EOT, {"text_key": "text"})
    rng = random.Random(0)
    for _ in range(300):
        start = rng.randrange(len(expected))
        length = rng.randrange(len(expected) - start + 1)
        found = split.window(start, length)
        assert found.dtype == np.int64 and np.array_equal(found, expected[start : start + length])
    # what numpy itself reads from the files
    shards = [np.load(path) for path in sorted(tmp_path.glob("train_?????.npy"))]
    offsets = [np.load(path) for path in sorted(tmp_path.glob("train_*.off.npy"))]
    assert np.array_equal(np.concatenate(shards), expected) and {shard.dtype for shard in shards} == {np.dtype("u2")}
    found = [shard[a + 1 : b] for shard, off in zip(shards, offsets, strict=True) for a, b in itertools.pairwise(off)]
    assert all(np.array_equal(a, b) for a, b in zip(found, documents, strict=True))
    for shard, off in zip(shards[:-1], offsets[:-1], strict=True):
        assert off[-1] == len(shard) and (len(shard) <= shard_tokens or len(off) == 2)
    assert offsets[-1][-1] == len(shards[-1]) - 1 and (len(shards) > 1) == (shard_tokens < 2000)
    assert verify(tmp_path) == split.manifest
    assert not list(tmp_path.glob("*.tmp"))


def test_the_documents_of_a_window_are_bounded(tmp_path: Path) -> None:
    expected = write(tmp_path, [np.full(n, 7) for n in (3, 1, 0, 40, 2, 2, 2, 1, 9, 30, 5, 1)], shard_tokens=32)
    split = TokenData(tmp_path, "train")
    for length in (1, 4, 16, 64, 200):
        windows = [expected[i : i + length] for i in range(len(expected))]
        most = max(int((window == EOT).sum() + (window[0] != EOT)) for window in windows)
        assert most <= split.most_documents(length) <= most + 1


def test_shards_end_exactly_on_the_border_and_small_documents(tmp_path: Path) -> None:
    documents = [np.full(31, 7), np.full(31, 8), np.zeros(0, int), np.full(63, 9), np.full(1, 5), np.full(500, 6)]
    expected = write(tmp_path, documents, shard_tokens=64)
    lengths = [len(np.load(path)) for path in sorted(tmp_path.glob("train_?????.npy"))]
    assert lengths == [64, 1, 64, 2, 502]  # 32+32 | 1 | 64 | 2 | 501 and the closing delimiter
    assert np.array_equal(TokenData(tmp_path, "train").window(0, 633), expected)


def test_chinese_text_comes_back(tmp_path: Path) -> None:
    texts = ["床前明月光，疑是地上霜。", "emoji 🙂", "", "def f(x):\n\treturn x"]
    writer = ShardWriter(tmp_path, "val", 384, 256, 40)
    for text in texts:
        writer.add(np.frombuffer(text.encode(), dtype=np.uint8), len(text.encode()))  # a tokenizer of bytes
    write_manifest(tmp_path, 384, 256, "bytes", writer.close(), {})
    split = TokenData(tmp_path, "val")
    ids = split.window(0, split.n_tokens).tolist()
    parts = [list(part) for is_eot, part in itertools.groupby(ids, lambda i: i == 256) if not is_eot]
    assert [bytes(part).decode() for part in parts] == [text for text in texts if text]
    assert split.n_bytes == sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(40_064, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_dtype(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    ids = [32_767, 32_768, 40_000, min(65_535, vocab_size - 1), vocab_size - 1]
    write(tmp_path, [np.array(ids)], vocab_size=vocab_size)
    assert np.load(tmp_path / "train_00000.npy").dtype == np.dtype(dtype)
    assert TokenData(tmp_path, "train").window(0, 7).tolist() == [EOT, *ids, EOT]


@pytest.mark.parametrize("bad", [70_000, 1000, -1])
def test_writer_refuses_ids_outside_the_vocabulary(tmp_path: Path, bad: int) -> None:
    writer = ShardWriter(tmp_path, "train", VOCAB, EOT)
    with pytest.raises(UserError, match=f"data: token id {bad} is outside the tokenizer's vocab_size=1000"):
        writer.add(np.array([5, bad, 6]), 3)


def test_header_is_numpys(tmp_path: Path) -> None:
    for array in (np.arange(5, dtype=np.uint16), np.arange(3, dtype=np.int64), np.zeros(123_456, dtype=np.uint32)):
        np.save(tmp_path / "a.npy", array)
        assert (tmp_path / "a.npy").read_bytes().startswith(npy_header(array.dtype, len(array)))


def test_memory_map_is_read_only(tmp_path: Path) -> None:
    split = row(tmp_path, 100)
    assert isinstance(split.shards[0].base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        split.shards[0][0] = 1


def test_splits_live_side_by_side_and_fingerprints_tell_them_apart(tmp_path: Path) -> None:
    shards = []
    for split, n in (("train", 30), ("val", 5), ("test", 0)):
        writer = ShardWriter(tmp_path, split, VOCAB, EOT)
        for ids in random_documents(n=n):
            writer.add(ids, 1)
        shards += writer.close()
    write_manifest(tmp_path, VOCAB, EOT, "a" * 64, shards, {})
    verify(tmp_path)
    train, val = TokenData(tmp_path, "train"), TokenData(tmp_path, "val")
    assert train.n_documents == 30 and val.n_documents == 5
    with pytest.raises(UserError, match=r"has no split 'test'; rerun prepare.py with more text"):
        TokenData(tmp_path, "test")
    assert train.fingerprint == TokenData(tmp_path, "train").fingerprint != val.fingerprint
    write(tmp_path / "b", [*random_documents(n=29), np.array([5])])
    assert TokenData(tmp_path / "b", "train").fingerprint != train.fingerprint
    train.check_tokenizer("a" * 64)
    with pytest.raises(UserError, match=r"prepared with another tokenizer \(aaaaaaaaaaaa, not bbbbbbbbbbbb\); put"):
        train.check_tokenizer("b" * 64)


def edit(path: Path, **changes: object) -> None:
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    write_record(path / "manifest.json", {k: v for k, v in (manifest | changes).items() if k != "crc32"})


def test_errors_at_open(tmp_path: Path) -> None:
    def message() -> str:
        with pytest.raises(UserError) as caught:
            TokenData(tmp_path / "x", "train")
        assert isinstance(caught.value, UserError) and "\n" not in str(caught.value)
        return str(caught.value)

    run = f"run: python prepare.py --input=... --out_dir={tmp_path}/x"
    assert message() == f"data: no directory {tmp_path}/x; {run}"
    (tmp_path / "x").write_text("a text", encoding="utf-8")
    assert message() == (
        f"data: {tmp_path}/x is a file, not a directory of prepare.py; "
        f"run: python prepare.py --input={tmp_path}/x --out_dir=data/x"
    )
    (tmp_path / "x").unlink()
    (tmp_path / "x").mkdir()
    assert message() == f"data: {tmp_path}/x is not prepared, or not completely: no manifest.json; {run}"
    (tmp_path / "x" / "my.txt").write_text("mine", encoding="utf-8")
    assert message().endswith(f"if it holds texts, run: python prepare.py --input={tmp_path}/x --out_dir=data/x")
    (tmp_path / "x" / "my.txt").unlink()
    documents = random_documents()
    write(tmp_path / "x", documents, shard_tokens=512)
    shard = tmp_path / "x" / "train_00001.npy"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-10])
    assert message() == f"data: {shard} ends at byte {len(raw) - 10} instead of {len(raw)}; " + (
        "copy it again or rerun prepare.py"
    )
    shard.write_bytes(raw[:50])
    assert message().startswith(f"data: {shard} is no .npy file")
    np.arange(500, dtype=np.uint16).tofile(shard)
    assert message().startswith(f"data: {shard} is no .npy file")
    np.save(shard, np.load(io.BytesIO(raw)).astype(np.int16))
    assert f"{shard} is no .npy file of {len(raw) // 2 - 64} uint16 (begins \"{{'descr': '<i2'," in message()
    shard.unlink()
    again = "copy it again or rerun prepare.py"
    assert message() == f"data: cannot read {shard}: No such file or directory; {again}"
    shard.write_bytes(raw)
    TokenData(tmp_path / "x", "train")
    offsets = tmp_path / "x" / "train_00001.off.npy"
    np.save(offsets, np.load(offsets)[:-1])
    assert message().startswith(f"data: {offsets} is no .npy file of")
    edit(tmp_path / "x", format="other 2")
    assert "was prepared with kind='other 2', not 'text'" in message()
    (tmp_path / "x" / "manifest.json").write_text("{", encoding="utf-8")
    assert "manifest.json is damaged: " in message()


WRONG = {  # what a manifest may say that is not so
    "vocab_size": ["600", -1, None, 1.5, [], True],
    "eot_id": ["5", {}],
    "tokenizer_fingerprint": [5, None],
    "format": [5, [], None],
    "splits": [[], 5, None, {"train": 5}, {"train": {"shards": 5}}],
    "sources": [[], 5, {"a": 5}],
    "info": [[], None],
}
WRONG_SHARD = {
    "tokens": ["5", -1, None], "documents": [[], "5"], "bytes": [None], "source": [5], "sha256": [5, {"a": 5}, None],
    **dict.fromkeys(("file", "offsets", "sums"), [5, None, "", ".", "../x.npy", "/etc/passwd", "a/../../x", "a\0b"]),
}  # fmt: skip


def test_a_manifest_of_other_types_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the checksum that belongs to it, as somebody else may make one; nothing else is opened."""
    write(tmp_path, random_documents())
    good = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))
    (shard,) = good["splits"]["train"]["shards"]
    monkeypatch.setattr(token_files, "map_array", None)
    tries = [(good, key, value) for key, values in WRONG.items() for value in values]
    tries += [(shard, key, value) for key, values in WRONG_SHARD.items() for value in values]
    for part, key, value in tries:
        before = part.get(key)
        part[key] = value
        edit(tmp_path, **good)
        with pytest.raises(UserError, match="manifest.json is damaged: manifest.*=|manifest.json: it has more"):
            TokenData(tmp_path, "train")
        part[key] = before
        if before is None:
            del part[key]
    (tmp_path / "manifest.json").write_text(json.dumps(good | {"eot_id": 4}), encoding="utf-8")
    with pytest.raises(UserError, match="manifest.json is damaged: its crc32 is another"):
        TokenData(tmp_path, "train")


def test_a_pipe_in_place_of_a_file_does_not_wait(tmp_path: Path) -> None:
    write(tmp_path, random_documents())
    for path in sorted(tmp_path.iterdir()):
        raw = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(UserError, match=f"{path.name}: is no regular file"):
            TokenData(tmp_path, "train")
        path.unlink()
        path.write_bytes(raw)


def test_id_beyond_the_vocabulary(tmp_path: Path) -> None:
    documents = random_documents()
    expected = write(tmp_path, documents, shard_tokens=512)
    place = 700 + int(np.argmax(expected[700:] > 900))
    edit(tmp_path, vocab_size=int(expected[place]))
    split = TokenData(tmp_path, "train")
    lengths = [len(shard) for shard in split.shards]
    shard = int(np.searchsorted(np.cumsum(lengths), place, side="right"))
    text = (
        f"data: {tmp_path}/train_{shard:05d}.npy holds token id {expected[place]} at offset "
        f"{place - sum(lengths[:shard])}, but the tokenizer has vocab_size={expected[place]}; rerun prepare.py"
    )
    for start, length in ((place, 1), (place, 3), (place - 1, 2)):
        if expected[start : start + length].argmax() == place - start or length == 1:
            with pytest.raises(UserError) as caught:
                split.window(start, length)
            assert str(caught.value) == text


def test_verify_notices_every_flipped_byte_and_wrong_structure(tmp_path: Path) -> None:
    write(tmp_path, random_documents(n=20), shard_tokens=300)
    rng = random.Random(0)
    for path in sorted(tmp_path.glob("*.npy")):
        raw = path.read_bytes()
        for _ in range(10):
            place = rng.randrange(len(raw))
            path.write_bytes(raw[:place] + bytes([raw[place] ^ (1 << rng.randrange(8))]) + raw[place + 1 :])
            with pytest.raises(UserError, match=path.name):
                verify(tmp_path)
        path.write_bytes(raw)
    verify(tmp_path)


def test_an_id_that_changed_is_never_read(tmp_path: Path) -> None:
    """Of several blocks only those are refused that hold it; each is compared once."""
    expected = write(tmp_path, [np.arange(4, 1000)] * 100)
    path, place = tmp_path / "train_00000.npy", 40_000  # in the second block of 32,768 ids
    raw = bytearray(path.read_bytes())
    raw[128 + 2 * place] ^= 1
    path.write_bytes(raw)
    split = TokenData(tmp_path, "train")
    for start, length in ((0, 32_768), (65_536, 30_000)):
        assert np.array_equal(split.window(start, length), expected[start : start + length])
    for start, length in ((place, 1), (65_535, 1), (32_760, 100)):
        with pytest.raises(UserError, match=r"train_00000.npy changed since it was written \(tokens from 32768 on\);"):
            split.window(start, length)


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_a_late_step_costs_no_more_than_the_first(tmp_path: Path) -> None:
    split = row(tmp_path, 5000)

    def seconds(step: int) -> float:
        begin = time.perf_counter()
        batches = batches_of(split, 16, 4, 1, seed=1, first_step=step)
        batches.next()
        batches.close()
        return time.perf_counter() - begin

    seconds(0)
    assert min(seconds(10**6) for _ in range(5)) < 5 * min(seconds(0) for _ in range(5)) + 0.01


def test_corpus_shorter_than_needed(tmp_path: Path) -> None:
    batches_of(row(tmp_path / "a", 129), 64, 1, 1, 0).close()
    with pytest.raises(UserError, match=r"128 training tokens are too few for block_size=64, which needs 129;"):
        batches_of(row(tmp_path / "b", 128), 64, 1, 1, 0)
    assert len(list(val_batches(row(tmp_path / "c", 65, "val"), 64, 4))) == 1
    with pytest.raises(UserError, match=r"val split of .* has 64 tokens, but block_size=64 needs 65; .* val_fraction"):
        list(val_batches(row(tmp_path / "d", 64, "val"), 64, 4))


def take(
    split: TokenData, batch_size: int, accum_steps: int, n_steps: int, rank: int = 0, world_size: int = 1,
    start: int = 0,
) -> torch.Tensor:
    """Inputs of n_steps steps of one rank, (n_steps, accum_steps * batch_size, 16); x and y are checked."""
    batches = batches_of(split, 16, batch_size, accum_steps, 5, rank=rank, world_size=world_size, first_step=start)
    steps = []
    for _ in range(n_steps * accum_steps):
        x, y = batches.next()
        assert x.shape == y.shape == (batch_size, 16) and x.dtype == y.dtype == torch.int64
        assert x.is_contiguous() and y.is_contiguous() and torch.equal(x[:, 1:], y[:, :-1])
        steps.append(x)
    batches.close()
    assert not batches.thread.is_alive()
    return torch.stack(steps).view(n_steps, accum_steps * batch_size, 16)


def test_batches_hold_the_samples_of_the_sampler(tmp_path: Path) -> None:
    expected = write(tmp_path, random_documents(), shard_tokens=256)
    split = TokenData(tmp_path, "train")
    batches = batches_of(split, 16, 3, 2, seed=9, first_step=4)
    assert batches.position(4) == 24
    starts = window_sampler(split.n_tokens, 16, 9).starts_of(np.arange(24, 24 + 60))
    for k in range(20):
        x, y = batches.next()
        for row_x, row_y, start in zip(x, y, starts[3 * k : 3 * k + 3], strict=True):
            assert row_x.tolist() == expected[start : start + 16].tolist()
            assert row_y.tolist() == expected[start + 1 : start + 17].tolist()
    batches.close()


class Found(NamedTuple):
    sources: torch.Tensor
    nothing: None
    starts: torch.Tensor


class Strange:
    """A corpus of another kind of batch."""

    def load(self, sources: np.ndarray, starts: np.ndarray) -> Found:
        return Found(torch.from_numpy(sources), None, torch.from_numpy(starts))

    def count_targets(self, sources: np.ndarray, starts: np.ndarray) -> np.ndarray:
        return starts + sources


def test_batches_of_another_kind(tmp_path: Path) -> None:
    split = row(tmp_path, 2000)
    order = Mixture([window_sampler(split.n_tokens, 16, 5)], 5)
    batches = Batches(Strange(), order, 3, 2, World(0, 0, 1), first_step=1)
    _, starts = order.starts_of(np.arange(6, 12))
    assert batches.count_targets(1) == starts.sum()
    for k in range(2):
        found = batches.next()
        assert type(found) is Found and found.nothing is None and found.sources.tolist() == [0] * 3
        assert found.starts.tolist() == starts[3 * k : 3 * k + 3].tolist()
    batches.close()


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_samples_and_their_order_do_not_depend_on_ranks_or_accumulation(tmp_path: Path, world_size: int) -> None:
    split = row(tmp_path, 16 * 101 + 5)  # 100 windows
    expected = take(split, batch_size=48, accum_steps=1, n_steps=5)
    for accum_steps in (1, 6):
        if 48 % (world_size * accum_steps):
            continue
        batch_size = 48 // world_size // accum_steps
        ranks = [take(split, batch_size, accum_steps, 5, rank, world_size) for rank in range(world_size)]
        assert torch.equal(torch.cat(ranks, dim=1), expected), (accum_steps,)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_an_epoch_is_every_window_once_over_all_ranks(tmp_path: Path, world_size: int) -> None:
    split = row(tmp_path, 16 * 97 + 1)  # 96 windows: 8 steps of 12
    ranks = [take(split, 12 // world_size, 1, 8, rank, world_size) for rank in range(world_size)]
    windows = torch.cat(ranks).view(-1, 16)
    assert len(windows) == 96 and len({tuple(window.tolist()) for window in windows}) == 96
    offset = window_sampler(split.n_tokens, 16, 5).starts_of(np.arange(96)).min()
    expected = split.window(int(offset), 96 * 16).reshape(96, 16)
    assert sorted(windows.tolist()) == sorted(expected.tolist())


def test_resume_at_every_step(tmp_path: Path) -> None:
    split = row(tmp_path, 500)
    whole = take(split, 2, 3, 30)
    for step in range(30):
        assert torch.equal(take(split, 2, 3, min(3, 30 - step), start=step), whole[step : step + 3])


def test_error_of_the_thread_surfaces(tmp_path: Path) -> None:
    write(tmp_path, [np.full(3000, 500), np.full(3000, 999)])
    edit(tmp_path, vocab_size=999)
    batches = batches_of(TokenData(tmp_path, "train"), 16, 4, 1, seed=0)
    with pytest.raises(UserError, match=r"train_00000.npy holds token id 999 at offset \d+, but the tokenizer has"):
        for _ in range(100):
            batches.next()
    with pytest.raises(UserError):  # and again, instead of waiting for ever
        batches.next()
    batches.thread.join(timeout=10)
    assert not batches.thread.is_alive()
    batches.close()


def test_queue_is_bounded_and_close_ends_the_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    batches = batches_of(row(tmp_path, 500), 16, 4, 2, seed=0, ahead=3)
    deadline = time.monotonic() + 10
    while batches.queue.qsize() < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert batches.queue.qsize() == 3
    batches.close()
    batches.close()
    assert not batches.thread.is_alive() and threading.active_count() == before
    with pytest.raises(RuntimeError, match="after close"):
        batches.next()


@pytest.mark.parametrize("eval_steps", [0, 1, 3, 1000])
def test_validation_windows(tmp_path: Path, eval_steps: int) -> None:
    split = row(tmp_path, 16 * 41 + 9, "val")  # 41 windows
    tokens = split.window(0, split.n_tokens)
    whole = [(x.tolist(), y.tolist()) for x, y in val_batches(split, 16, 4, eval_steps)]
    windows = [window for x, _ in whole for window in x]
    places = [next(k for k in range(41) if tokens[16 * k : 16 * k + 16].tolist() == window) for window in windows]
    n = {0: 41, 1: 4, 3: 12, 1000: 41}[eval_steps]
    assert places == sorted(set(places)) and len(places) == n
    assert max(np.diff([*places, 41])) <= -(-41 // n)  # evenly spread
    targets = [target for _, y in whole for target in y]
    assert targets == [tokens[16 * k + 1 : 16 * k + 17].tolist() for k in places]
    for world_size in (2, 3, 4, 16):
        shares = [list(val_batches(split, 16, 4, eval_steps, rank, world_size)) for rank in range(world_size)]
        for i, batch in enumerate(whole):
            x, y = shares[i % world_size][i // world_size]
            assert (x.tolist(), y.tolist()) == batch
        assert sum(map(len, shares)) == len(whole)


# ---- several sources -------------------------------------------------------------------------------------------------


def documents_of(parity: int, n: int, seed: int = 0, longest: int = 300) -> list[np.ndarray]:
    """Documents of even (0) or odd (1) ids only, beside the delimiter."""
    rng = np.random.default_rng([seed, parity])
    return [4 + parity + 2 * rng.integers(0, 490, rng.integers(1, longest)) for _ in range(n)]


def write_sources(path: Path, sizes: dict[str, int], weights: Mapping[str, float] = {}, **info: object) -> None:
    """Documents by source: the first source has even ids, the second odd ones. Shards of 4,096 tokens."""
    shards = []
    for split in ("train", "val"):
        for k, (source, n) in enumerate(sizes.items()):
            writer = ShardWriter(path, split, VOCAB, EOT, 4096, source=source)
            for ids in documents_of(k % 2, n if split == "train" else 30, seed=split == "val"):
                writer.add(ids, 2 * len(ids))
            shards += writer.close()
    write_manifest(path, VOCAB, EOT, "f" * 64, shards, info, weights)


def tokens_of(documents: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([[EOT, *ids] for ids in documents] + [[EOT]])


def test_named_sources_lie_in_directories_of_their_own(tmp_path: Path) -> None:
    write_sources(tmp_path, {"wiki": 60, "code": 25}, {"wiki": 3.0, "code": 1.0})
    wiki, code = tokens_of(documents_of(0, 60)), tokens_of(documents_of(1, 25))
    assert {p.name for p in tmp_path.iterdir()} == {"manifest.json", "wiki", "code"}
    assert len(list((tmp_path / "wiki").glob("train_*.off.npy"))) == -(-len(wiki) // 4096) > 1
    for split, expected in (
        (TokenData(tmp_path, "train", "wiki"), wiki),
        (TokenData(tmp_path / "code", "train"), code),
        (TokenData(tmp_path, "train"), np.concatenate([wiki, code])),
    ):
        assert np.array_equal(split.window(0, split.n_tokens), expected)
    manifest = verify(tmp_path)
    assert manifest["sources"] == {
        "wiki": {"tokens": len(wiki), "documents": 60, "bytes": 2 * (len(wiki) - 61), "weight": 3.0},
        "code": {"tokens": len(code), "documents": 25, "bytes": 2 * (len(code) - 26), "weight": 1.0},
    }
    assert manifest["splits"]["train"]["tokens"] == len(wiki) + len(code)
    with pytest.raises(UserError, match=r"has no source 'wikki' \(has: wiki, code\)"):
        TokenData(tmp_path / "wikki", "train")
    with pytest.raises(UserError, match=r"wiki has no split 'test'"):
        TokenData(tmp_path / "wiki", "test")
    for path in (tmp_path / "wiki" / "train_00001.npy", tmp_path / "code" / "val_00000.off.npy"):
        raw = path.read_bytes()
        path.write_bytes(raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:])
        with pytest.raises(UserError, match=path.name):
            verify(tmp_path)
        path.write_bytes(raw)


def test_weights_of_sources_and_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_sources(Path("x"), {"wiki": 60, "code": 25}, {"wiki": 3.0, "code": 1.0})
    write_sources(Path("y"), {"wiki": 20, "books": 40})
    write_sources(Path("z"), {"": 30})
    size = {path: TokenData(path, "train").n_tokens for path in ("x", "y/wiki", "y", "z")}

    def shares(spec: str) -> list[dict[str, float]]:
        corpus = TextCorpus(spec, 16)
        weights = np.array([weights for _, weights in corpus.stages])
        rounded = np.round(weights / weights.sum(axis=1, keepdims=True), 9).tolist()
        return [dict(zip(corpus.names, stage, strict=True)) for stage in rounded]

    assert shares("x") == [{"wiki": 0.75, "code": 0.25}]
    assert shares("x/wiki") == [{"wiki": 1.0}] and shares("z") == [{"z": 1.0}]
    of_wiki = size["y/wiki"] / size["y"]
    assert shares("y") == [pytest.approx({"wiki": of_wiki, "books": 1 - of_wiki}, abs=1e-8)]
    assert shares("x=0.5,z=1.5") == [{"wiki": 0.1875, "code": 0.0625, "z": 0.75}]
    total = size["x"] + size["z"]
    expected = {"wiki": 0.75 * size["x"] / total, "code": 0.25 * size["x"] / total, "z": size["z"] / total}
    assert shares("x,z") == [pytest.approx(expected, abs=1e-8)]
    assert shares("x/wiki=1,y/wiki=3") == [{"x/wiki": 0.25, "y/wiki": 0.75}]
    assert shares("0: x/wiki; 10: x/wiki=.5,z=.5; 20: z") == [
        {"wiki": 1.0, "z": 0.0}, {"wiki": 0.5, "z": 0.5}, {"wiki": 0.0, "z": 1.0},
    ]  # fmt: skip
    with pytest.raises(UserError, match="x/wiki a second time in one stage"):
        TextCorpus("x=1,x/wiki=1", 16)
    with pytest.raises(UserError, match="no directory nowhere"):
        TextCorpus("x=1,nowhere=1", 16)
    edit(Path("z"), tokenizer_fingerprint="e" * 64)
    with pytest.raises(UserError, match="z was prepared with another tokenizer"):
        TextCorpus("x=1,z=1", 16)


STEP = 32  # samples
MIXED = "0: {0}/wiki=1; 7: {0}/wiki=0.75,{0}/code=0.25; 19: {0}/wiki=0.25,{0}/code=0.75"


def mixed_batches(
    path: Path, batch_size: int = STEP, accum_steps: int = 1, start: int = 0, rank: int = 0, world_size: int = 1,
    **options: object,
) -> Batches:  # fmt: skip
    """Of three stages; 30 steps pass through shards, sources, stages and more than one epoch of each source."""
    corpus = TextCorpus(MIXED.format(path), 16)
    order = corpus.order(11, STEP, 30, **options)
    world = World(rank, rank, world_size)
    return Batches(corpus, order, batch_size, accum_steps, world, first_step=start)


def inputs(batches: Batches, n: int) -> torch.Tensor:
    found = [batches.next()[0] for _ in range(n)]
    batches.close()
    return torch.stack(found)


def mixed_run(path: Path, n_steps: int, batch_size: int = STEP, accum_steps: int = 1, **more: object) -> torch.Tensor:
    """Inputs of n_steps steps of this rank: (n_steps, its samples, 16)."""
    batches = mixed_batches(path, batch_size, accum_steps, **more)
    return inputs(batches, n_steps * accum_steps).view(n_steps, -1, 16)


def test_a_mixture_gives_the_tokens_of_its_sources(tmp_path: Path) -> None:
    """Every window is one of its source, and the counts are those of the order, at every step."""
    write_sources(tmp_path, {"wiki": 40, "code": 15})
    streams = [tokens_of(documents_of(0, 40)), tokens_of(documents_of(1, 15))]
    batches = mixed_batches(tmp_path)
    windows = inputs(batches, 30)
    odd = (((windows % 2 == 1) & (windows != EOT)).any(dim=2)).numpy()
    even = (windows % 2 == 0).any(dim=2).numpy()
    assert (odd ^ even).all() and not odd[:7].any() and odd[7:].sum() > 100
    for step in range(31):
        assert batches.order.counts(STEP * step).tolist() == [even[:step].sum(), odd[:step].sum()]
    places = [{tuple(s[i : i + 16]) for i in range(len(s) - 16)} for s in streams]
    for window, source in zip(windows.view(-1, 16).tolist(), odd.reshape(-1).astype(int), strict=True):
        assert tuple(window) in places[source]
    assert (batches.order.epochs(30 * STEP) > 1).all()


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_a_mixture_does_not_depend_on_ranks_or_accumulation(tmp_path: Path, world_size: int) -> None:
    write_sources(tmp_path, {"wiki": 40, "code": 15})
    expected = mixed_run(tmp_path, 22)
    for accum_steps in (1, 4):
        size = STEP // world_size // accum_steps
        ranks = [
            mixed_run(tmp_path, 22, size, accum_steps, rank=rank, world_size=world_size) for rank in range(world_size)
        ]
        assert torch.equal(torch.cat(ranks, dim=1), expected), accum_steps


@pytest.mark.parametrize("options", [{}, {"max_epochs": "1.6"}])
def test_a_mixture_resumes_at_every_step(tmp_path: Path, options: dict) -> None:
    write_sources(tmp_path, {"wiki": 60, "code": 15}, recipe={"order": "length"})
    whole = mixed_run(tmp_path, 30, **options)
    for step in range(0, 30, 3):
        assert torch.equal(mixed_run(tmp_path, 1, start=step, **options)[0], whole[step])
    late = inputs(mixed_batches(tmp_path, start=10**6), 1)  # two million epochs on: nothing is skipped one by one
    assert ((late % 2 == 1) & (late != EOT)).any()


def test_max_epochs_in_a_corpus(tmp_path: Path) -> None:
    write_sources(tmp_path, {"wiki": 40, "code": 15})
    corpus = TextCorpus(str(tmp_path), 16)
    n_wiki, n_code = (TokenData(tmp_path, "train", s).n_tokens // 16 for s in ("wiki", "code"))
    order = corpus.order(1, 8, 10, max_epochs="2")
    assert order.end == pytest.approx(2 * n_wiki + 2 * n_code, abs=8)
    assert order.epochs(order.end).tolist() == [2.0, 2.0]
    last = order.end // 8
    message = f"with max_epochs='2' the data end after step {last} of 9999; set max_steps={last} or raise"
    with pytest.raises(UserError, match=message):
        corpus.order(1, 8, 9999, max_epochs="2")
    corpus.order(1, 8, order.end // 8, max_epochs="2")
    limited = corpus.order(1, 8, 10, max_epochs=f"{tmp_path}/code=0.5")
    assert limited.end is None and limited.epochs(10**5)[1] == pytest.approx(0.5, abs=0.01)
    text, warnings = corpus.describe(limited, 10**5)
    assert f"0.50 epochs of {corpus.train[1].n_tokens:,} (code)" in text or "0.49 epochs" in text
    assert len(warnings) == 1 and "wiki is seen" in warnings[0]
    assert "beyond 4 repetition adds little, beyond 8 it may harm" in warnings[0]
    for times, warned in ((4.4, False), (4.6, True)):  # whole steps make up to 4.4 of epochs=4
        warnings = corpus.describe(corpus.order(1, 8, 10), round(times * (n_wiki + n_code)))[1]
        assert any(f"wiki is seen {times} times" in line for line in warnings) == warned
    with pytest.raises(UserError, match="max_epochs names .*code, which data_dir does not"):
        TextCorpus(f"{tmp_path}/wiki", 16).order(1, 8, 10, max_epochs=f"{tmp_path}/code=1")


def test_epochs_that_make_no_steps_are_refused_with_flags_that_do(capsys) -> None:
    config = {"max_steps": 0, "epochs": 1.0, "batch_size": 4, "total_batch_pairs": 64, "world_size": 1}
    config["plan_only"] = False
    assert steps_of(config, 20 * 64, 64, "total_batch_pairs") == 20 and not capsys.readouterr().err
    assert steps_of(config, 320, 64, "total_batch_pairs") == 5
    warning = capsys.readouterr().err.strip()
    assert re.search(r"320 rows make 5 steps .* few to learn from; smaller steps: --total_batch_pairs=4$", warning)
    with pytest.raises(UserError, match=r"11 pairs make 1 step of total_batch_pairs=64, too few .* --epochs=2$"):
        steps_of(config, 11, 64, "total_batch_pairs", "pairs")
    packed = {"pack": "yes", "epochs": 3.0, "batch_size": 8, "total_batch_tokens": 8192, "max_steps": 0}
    packed |= {"world_size": 1, "plan_only": False}
    proposal = "smaller steps and more epochs: .* or --pack=auto, which gives each of few conversations a row"
    with pytest.raises(UserError, match=f"4 rows make 2 steps .*; {proposal}"):  # a hundred conversations
        steps_of(packed, 4, 8, "total_batch_tokens")
    with pytest.raises(UserError, match=r"too few to learn from; smaller .*; left out 1 \(bad_json\); first: f:5$"):
        steps_of(config, 11, 64, "total_batch_pairs", "pairs", ": left out 1 (bad_json); first: f:5")
    assert steps_of(config | {"plan_only": True}, 11, 64, "total_batch_pairs", "pairs") == 1  # a plan is printed
    config |= {"total_batch_tokens": 128 * 1024}
    with pytest.raises(UserError, match=r"1 rows .* --batch_size=1 --total_batch_tokens=1024 --epochs=20$"):
        steps_of(config, 1, 128, "total_batch_tokens")
    with pytest.raises(UserError, match=r"100 rows make 2 steps .* smaller steps: --total_batch_pairs=4$"):
        steps_of(config, 100, 64, "total_batch_pairs")
    with pytest.raises(UserError, match=r"100 rows make 2 steps .* more epochs: --total_batch_pairs=8 --epochs=2$"):
        steps_of(config | {"world_size": 2}, 100, 64, "total_batch_pairs")
    assert steps_of(config | {"max_steps": 1}, 11, 64, "total_batch_pairs") == 1  # who asks for one gets one


@pytest.mark.parametrize("eval_steps", [0, 1, 5, 1000])
def test_validation_of_each_source(tmp_path: Path, eval_steps: int) -> None:
    write_sources(tmp_path, {"wiki": 40, "code": 15})
    corpus = TextCorpus(str(tmp_path), 16)
    whole = {name: list(batches) for name, batches in corpus.val_batches(4, eval_steps).items()}
    assert list(whole) == ["wiki", "code"]
    for (name, batches), steps in zip(whole.items(), {1: (1, 1), 5: (3, 2)}.get(eval_steps, (0, 0)), strict=True):
        expected = list(val_batches(TokenData(tmp_path / name, "val"), 16, 4, steps))
        assert len(expected) == len(batches) and (not steps or len(batches) == steps)
        for pair, other in zip(expected, batches, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(pair, other, strict=True))
    for world_size in (2, 3):
        shares = [corpus.val_batches(4, eval_steps, rank, world_size) for rank in range(world_size)]
        for name, batches in whole.items():
            found = [x.tolist() for share in shares for x, _ in share[name]]
            assert sorted(found) == sorted(x.tolist() for x, _ in batches)


def test_sources_without_validation(tmp_path: Path) -> None:
    write_sources(tmp_path / "x", {"wiki": 40, "code": 15})
    write(tmp_path / "y", documents_of(0, 9))
    corpus = TextCorpus(f"{tmp_path}/x,{tmp_path}/y", 16)
    assert list(corpus.val) == ["wiki", "code"] and list(corpus.val_batches(4, 1)) == ["wiki", "code"]
    assert "y has no split 'val'" in corpus.describe(corpus.order(1, 8, 1), 8)[1][0]
    with pytest.raises(UserError, match=r"y has no split 'val'"):
        TextCorpus(str(tmp_path / "y"), 16)
    with pytest.raises(UserError, match=r"val split of .* tokens, but block_size=9000 needs 9001"):
        TextCorpus(str(tmp_path / "x"), 9000)


# ---- packing ---------------------------------------------------------------------------------------------------------


def check_packing(lengths: np.ndarray, row_tokens: int, packing: Packing) -> None:
    """Every token of every document is in one piece; a row holds no more than it can; the counts are right."""
    seen = [np.zeros(n - 1, dtype=int) for n in lengths]
    for document, begin, length in zip(packing.document, packing.begin, packing.length, strict=True):
        assert 1 <= length <= row_tokens and begin + length - 1 <= len(seen[document])
        seen[document][begin : begin + length - 1] += 1
    assert all((counts == 1).all() for counts in seen)
    assert set(packing.document) == set(range(len(lengths)))
    assert (packing.used <= row_tokens).all() and set(packing.row) == set(range(packing.n_rows))
    assert packing.n_cut == sum(n > row_tokens for n in lengths)
    assert len(packing.row) == sum(max(1, -(-(n - 1) // (row_tokens - 1))) for n in lengths)


@pytest.mark.parametrize("row_tokens", [2, 3, 17, 65])
def test_rows_hold_every_document_once(row_tokens: int) -> None:
    for seed in range(2):
        lengths = np.random.default_rng(seed).integers(1, 150, 200)
        packing = pack_rows(lengths, row_tokens, seed)
        check_packing(lengths, row_tokens, packing)
        again = pack_rows(lengths, row_tokens, seed)
        assert all(np.array_equal(a, b) for a, b in zip(packing, again, strict=True))
    assert not np.array_equal(packing.document, pack_rows(lengths, row_tokens, seed + 1).document)


def test_best_fit_against_trying_every_row() -> None:
    for seed in range(20):
        lengths = np.sort(np.random.default_rng(seed).integers(1, 33, 150))[::-1].tolist()
        room: list[int] = []
        for row, length in zip(best_fit(lengths, 32), lengths, strict=True):
            fits = [left for left in room if left >= length]
            if row == len(room):
                assert not fits
                room.append(32)
            assert room[row] == min(fits, default=32)
            room[row] -= length
        assert len(room) < sum(lengths) / 32 * 1.1 + 1


def packed_directory(path: Path, block_size: int = 64) -> dict:
    write_sources(path, {"wiki": 120, "code": 45})
    return pack(path, block_size, seed=3, shard_tokens=4096)


def test_packed_files_hold_every_document_once(tmp_path: Path) -> None:
    record = packed_directory(tmp_path)
    for parity, source in enumerate(("wiki", "code")):
        split, entry = PackedData(tmp_path, 64, source), record["sources"][source]
        assert len(entry["shards"]) > 1 and split.n_tokens == 65 * entry["rows"]
        assert split.n_rows == entry["rows"]
        rows = np.stack([split.window(k, 65) for k in range(split.n_rows)])
        valid = split.text_lengths(np.arange(len(rows)), 65)
        assert (rows[:, 0] == EOT).all() and valid.max() <= 65
        pieces = []
        filled = 0
        for row, n in zip(rows.tolist(), valid, strict=True):
            text = row if n == 65 and row[-1] != EOT else row[: n - 1]
            assert set(row[len(text) :]) <= {EOT} and n in (len(text), len(text) + 1)
            filled += 65 - len(text)
            pieces += [tuple(group) for is_eot, group in itertools.groupby(text, lambda i: i == EOT) if not is_eot]
        expected = [tuple(ids[i : i + 64]) for ids in documents_of(parity, 120 if source == "wiki" else 45)
                    for i in range(0, len(ids), 64)]  # fmt: skip
        assert sorted(pieces) == sorted(expected) and entry["pieces"] == len(expected)
        assert entry["cut"] == sum(len(ids) > 64 for ids in documents_of(parity, entry["documents"]))
        assert entry["filled"] == filled
        most = documents_of_ids(torch.from_numpy(rows[:, :-1].astype(np.int64)), EOT).max().item()
        assert most <= split.most_documents(64) <= most + 1
    verify(tmp_path)
    path = tmp_path / "code" / "train_pack64_00000.npy"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(UserError, match="train_pack64_00000.npy changed"):
        verify(tmp_path)


def test_training_on_packed_rows(tmp_path: Path) -> None:
    """Each row once per epoch; targets end where the row's documents do; every step's targets are counted."""
    packed_directory(tmp_path)
    corpus = TextCorpus(str(tmp_path), 64, pack=True)
    order = corpus.order(1, 6, 10)
    n_rows = sum(split.n_rows for split in corpus.train)
    n_steps = n_rows // 6 + 3
    found = [[], []]
    batches = [Batches(corpus, order, 3, 1, World(rank, rank, 2)) for rank in range(2)]
    for step in range(n_steps):
        n_valid = 0
        for k, of_rank in enumerate(batches):
            x, y = of_rank.next()
            assert (x[:, 0] == EOT).all()
            valid = y != IGNORE
            n_valid += int(valid.sum())
            assert torch.equal(x[:, 1:][valid[:, :-1]], y[:, :-1][valid[:, :-1]])
            assert (x[:, 1:][~valid[:, :-1]] == EOT).all()
            for x_row, mask in zip(x, valid, strict=True):
                assert mask[: mask.sum()].all()
                found[k].append(tuple(x_row.tolist()))
        assert batches[0].count_targets(step) == batches[1].count_targets(step) == n_valid
    for of_rank in batches:
        of_rank.close()
    counts = order.counts(6 * n_steps)
    for source, split in enumerate(corpus.train):
        rows = order.samplers[source].starts_of(np.arange(min(counts[source], split.n_rows)))
        assert len(set(rows)) == len(rows) and (rows < split.n_rows).all()
    assert len(set(found[0]) | set(found[1])) > 0.9 * n_rows
    assert batches_of(TokenData(tmp_path, "train", "wiki"), 16, 3, 2, 1).count_targets(5) == 96


def test_mistakes_with_packing(tmp_path: Path) -> None:
    packed_directory(tmp_path)
    with pytest.raises(UserError, match=r"not packed for block_size=32; run: .* --pack=32 --overwrite=True"):
        TextCorpus(str(tmp_path), 32, pack=True)
    write_sources(tmp_path, {"wiki": 121, "code": 45})
    with pytest.raises(UserError, match=r"train_pack64.json is not of the tokens that are there now; run: python prep"):
        TextCorpus(str(tmp_path), 64, pack=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_on_cuda(tmp_path: Path) -> None:
    split = row(tmp_path, 500)
    expected = take(split, 4, 2, 5).view(10, 4, 16)
    batches = batches_of(split, 16, 4, 2, 5, device="cuda")
    for x in expected:
        found, _ = batches.next()
        assert found.is_cuda and torch.equal(found.cpu(), x)
    batches.close()
