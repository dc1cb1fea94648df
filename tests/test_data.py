"""data.py: token files against numpy, order of samples against enumeration."""

import io
import itertools
import json
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from data import Batches, Sampler, ShardWriter, TokenData
from readers import DataError

# ---- token files -----------------------------------------------------------------------------------------------------

VOCAB, EOT = 1000, 3


def write(
    path: Path, documents: list[np.ndarray], split: str = "train", shard_tokens: int = 2**27, vocab_size: int = VOCAB
) -> np.ndarray:
    """A data directory of one split; the tokens that it must hold, put together by hand."""
    writer = ShardWriter(path, split, vocab_size, EOT, shard_tokens)
    for ids in documents:
        writer.add(ids, n_bytes=2 * len(ids))
    data.write_manifest(path, vocab_size, EOT, "f" * 64, writer.close(), {"config": {"text_key": "text"}})
    return np.concatenate([[EOT, *ids] for ids in documents] + [[EOT]]).astype(np.int64)


def random_documents(seed: int = 0, n: int = 60, longest: int = 90) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, VOCAB, rng.integers(0, longest)) for _ in range(n)]


def row(path: Path, n_tokens: int, split: str = "train") -> TokenData:
    """One document such that the split holds n_tokens tokens, 4, 5, 6, ... between the delimiters."""
    write(path, [4 + np.arange(n_tokens - 2) % (VOCAB - 4)], split)
    return TokenData(path, split)


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
    assert data.verify(tmp_path) == split.manifest
    assert not list(tmp_path.glob("*.tmp"))


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
    data.write_manifest(tmp_path, 384, 256, "bytes", writer.close(), {})
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
    with pytest.raises(DataError, match=f"data: token id {bad} is outside the tokenizer's vocab_size=1000"):
        writer.add(np.array([5, bad, 6]), 3)


def test_header_is_numpys(tmp_path: Path) -> None:
    for array in (np.arange(5, dtype=np.uint16), np.arange(3, dtype=np.int64), np.zeros(123_456, dtype=np.uint32)):
        np.save(tmp_path / "a.npy", array)
        assert (tmp_path / "a.npy").read_bytes().startswith(data.npy_header(array.dtype, len(array)))


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
    data.write_manifest(tmp_path, VOCAB, EOT, "a" * 64, shards, {})
    data.verify(tmp_path)
    train, val = TokenData(tmp_path, "train"), TokenData(tmp_path, "val")
    assert train.n_documents == 30 and val.n_documents == 5
    with pytest.raises(DataError, match=r"has no split 'test' \(has: train, val\); rerun prepare.py with more text"):
        TokenData(tmp_path, "test")
    assert train.fingerprint == TokenData(tmp_path, "train").fingerprint != val.fingerprint
    write(tmp_path / "b", [*random_documents(n=29), np.array([5])])
    assert TokenData(tmp_path / "b", "train").fingerprint != train.fingerprint
    train.check_tokenizer("a" * 64)
    with pytest.raises(DataError, match=r"prepared with another tokenizer \(aaaaaaaaaaaa, not bbbbbbbbbbbb\); put"):
        train.check_tokenizer("b" * 64)


def edit(path: Path, **changes: object) -> None:
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    (path / "manifest.json").write_text(json.dumps(manifest | changes), encoding="utf-8")


def test_errors_at_open(tmp_path: Path) -> None:
    def message() -> str:
        with pytest.raises(DataError) as caught:
            TokenData(tmp_path / "x", "train")
        assert caught.value.one_line and "\n" not in str(caught.value)
        return str(caught.value)

    run = f"run: python prepare.py --input=... --out_dir={tmp_path}/x"
    assert message() == f"data: no directory {tmp_path}/x; {run}"
    (tmp_path / "x").mkdir()
    assert message() == f"data: {tmp_path}/x is not prepared, or not completely: no manifest.json; {run}"
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
    assert message() == f"data: {shard} is missing; copy it again or rerun prepare.py"
    shard.write_bytes(raw)
    TokenData(tmp_path / "x", "train")
    offsets = tmp_path / "x" / "train_00001.off.npy"
    np.save(offsets, np.load(offsets)[:-1])
    assert message().startswith(f"data: {offsets} is no .npy file of")
    edit(tmp_path / "x", format="other 2")
    assert "manifest.json is not of the format 'groundup tokens 1'" in message()
    (tmp_path / "x" / "manifest.json").write_text("{", encoding="utf-8")
    assert "manifest.json is damaged (" in message()


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
            with pytest.raises(DataError) as caught:
                split.window(start, length)
            assert str(caught.value) == text
    with pytest.raises(DataError, match="holds token id"):
        data.verify(tmp_path)


def test_verify_notices_every_flipped_byte_and_wrong_structure(tmp_path: Path) -> None:
    write(tmp_path, random_documents(n=20), shard_tokens=300)
    rng = random.Random(0)
    for path in sorted(tmp_path.glob("*.npy")):
        raw = path.read_bytes()
        for _ in range(10):
            place = rng.randrange(len(raw))
            path.write_bytes(raw[:place] + bytes([raw[place] ^ (1 << rng.randrange(8))]) + raw[place + 1 :])
            with pytest.raises(DataError, match=path.name):
                data.verify(tmp_path)
        path.write_bytes(raw)
    manifest = data.verify(tmp_path)
    manifest["splits"]["train"]["documents"] += 1
    edit(tmp_path, **manifest)
    with pytest.raises(DataError, match="documents of train do not add up"):
        data.verify(tmp_path)


@pytest.mark.parametrize(
    ("starts", "complaint"),
    [([0, 6, 11], None), ([0, 5, 11], "no <.endoftext.> at offset 5"), ([1, 6, 11], "not increasing"),
     ([0, 6, 12], "not increasing"), ([0, 0, 11], "not increasing")],
)  # fmt: skip
def test_verify_offsets(tmp_path: Path, starts: list[int], complaint: str | None) -> None:
    write(tmp_path, [np.full(5, 9), np.full(4, 9)])
    path = tmp_path / "train_00000.off.npy"
    np.save(path, np.array(starts, dtype=np.int64))
    manifest = data.read_manifest(tmp_path)
    manifest["splits"]["train"]["shards"][0]["offsets_sha256"] = data.file_sha256(path)
    edit(tmp_path, **manifest)
    if complaint is None:
        assert data.verify(tmp_path)
    else:
        with pytest.raises(DataError, match=complaint):
            data.verify(tmp_path)


# ---- order of samples ------------------------------------------------------------------------------------------------


def test_permute_is_a_bijection() -> None:
    for n in [*range(1, 301), 1000, 4096, 4097, 65_536, 99_991]:
        for epoch in range(3):
            keys = data.hash_words(8, n, epoch)
            found = data.permute(np.arange(n), n, keys)
            assert np.array_equal(np.sort(found), np.arange(n)), n
            some = np.random.default_rng(n).integers(0, n, (2, 3))
            assert np.array_equal(data.permute(some, n, keys), found[some])  # any shape, order, repetition
    n = 10**12 + 39
    found = data.permute(np.arange(100_000), n, data.hash_words(8, "large"))
    assert len(set(found.tolist())) == 100_000 and 0 <= found.min() and found.max() < n


def test_permutation_looks_random() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for key in range(4800):
        order = tuple(data.permute(np.arange(4), 4, data.hash_words(8, "small", key)))
        counts[order] = counts.get(order, 0) + 1
    chi2 = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert len(counts) == 24 and chi2 < 49.7  # 23 degrees of freedom: one in a thousand is above
    n = 100_003
    order = data.permute(np.arange(n), n, data.hash_words(8, 1)).astype(float)
    other = data.permute(np.arange(n), n, data.hash_words(8, 2)).astype(float)
    for a, b in ((order[:-1], order[1:]), (order, np.arange(n)), (order, other)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / n**0.5


def test_windows_of_an_epoch() -> None:
    """Every position is the target of exactly one window, but for fewer than 2T at the ends."""
    for block_size in (1, 2, 3, 8):
        for n_tokens in range(2 * block_size + 1, 8 * block_size + 4):
            sampler = Sampler(n_tokens, block_size, seed=7)
            n = data.window_count(n_tokens, block_size)
            assert sampler.n_windows == n >= 1
            for epoch in range(4):
                starts = sampler.start(np.arange(epoch * n, (epoch + 1) * n))
                targets = np.sort((starts[:, None] + 1 + np.arange(block_size)).ravel())
                assert starts.min() >= 0 and targets.max() < n_tokens
                assert np.array_equal(targets, np.arange(targets[0], targets[0] + n * block_size))
                assert n_tokens - 1 - len(targets) < 2 * block_size


def test_epochs_differ_in_order_and_borders_and_seeds_differ() -> None:
    sampler = Sampler(10_000, 16, seed=1)
    n = sampler.n_windows
    epochs = [tuple(sampler.start(np.arange(e * n, (e + 1) * n))) for e in range(20)]
    assert len({epoch[0] % 16 for epoch in epochs}) > 8 and len({epoch[:8] for epoch in epochs}) == 20
    mixed = np.random.default_rng(0).permutation(20 * n)  # any order, many epochs at once
    assert np.array_equal(sampler.start(mixed), np.concatenate(epochs)[mixed])
    assert not np.array_equal(Sampler(10_000, 16, seed=2).start(np.arange(n)), epochs[0])
    # fixed for ever: a changed order would break the resumption of every run
    assert Sampler(1000, 10, seed=1337).start(np.array([0, 1, 2, 98, 10**9])).tolist() == [281, 171, 881, 963, 624]


def test_a_late_step_costs_no_more_than_the_first(tmp_path: Path) -> None:
    split = row(tmp_path, 5000)

    def seconds(step: int) -> float:
        begin = time.perf_counter()
        batches = Batches(split, 16, 4, 1, seed=1, start_step=step)
        batches.next()
        batches.close()
        return time.perf_counter() - begin

    seconds(0)
    assert min(seconds(10**6) for _ in range(5)) < 5 * min(seconds(0) for _ in range(5)) + 0.01


def test_corpus_shorter_than_needed(tmp_path: Path) -> None:
    Batches(row(tmp_path / "a", 129), 64, 1, 1, 0).close()
    with pytest.raises(DataError, match=r"128 training tokens are too few for block_size=64, which needs 129;"):
        Batches(row(tmp_path / "b", 128), 64, 1, 1, 0)
    assert len(list(data.val_batches(row(tmp_path / "c", 65, "val"), 64, 4))) == 1
    with pytest.raises(DataError, match=r"val split of .* has 64 tokens, but block_size=64 needs 65;"):
        list(data.val_batches(row(tmp_path / "d", 64, "val"), 64, 4))


# ---- batches ---------------------------------------------------------------------------------------------------------


def take(
    split: TokenData, batch_size: int, accum_steps: int, n_steps: int, rank: int = 0, world_size: int = 1,
    start: int = 0,
) -> torch.Tensor:
    """Inputs of n_steps steps of one rank, (n_steps, accum_steps * batch_size, 16); x and y are checked."""
    batches = Batches(split, 16, batch_size, accum_steps, 5, rank, world_size, "cpu", start)
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
    batches = Batches(split, 16, 3, 2, seed=9, start_step=4)
    assert batches.position(4) == 24
    starts = Sampler(split.n_tokens, 16, 9).start(np.arange(24, 24 + 60))
    for k in range(20):
        assert batches.epoch == (24 + 6 * (k // 2)) // batches.sampler.n_windows
        x, y = batches.next()
        for row_x, row_y, start in zip(x, y, starts[3 * k : 3 * k + 3], strict=True):
            assert row_x.tolist() == expected[start : start + 16].tolist()
            assert row_y.tolist() == expected[start + 1 : start + 17].tolist()
    batches.close()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_samples_and_their_order_do_not_depend_on_ranks_or_accumulation(tmp_path: Path, world_size: int) -> None:
    split = row(tmp_path, 16 * 101 + 5)  # 100 windows
    expected = take(split, batch_size=48, accum_steps=1, n_steps=5)
    for accum_steps in (1, 2, 4, 6):
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
    offset = Sampler(split.n_tokens, 16, 5).start(np.arange(96)).min()
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
    batches = Batches(TokenData(tmp_path, "train"), 16, 4, 1, seed=0)
    with pytest.raises(DataError, match=r"train_00000.npy holds token id 999 at offset \d+, but the tokenizer has"):
        for _ in range(100):
            batches.next()
    with pytest.raises(DataError):  # and again, instead of waiting for ever
        batches.next()
    batches.thread.join(timeout=10)
    assert not batches.thread.is_alive()
    batches.close()


def test_queue_is_bounded_and_close_ends_the_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    batches = Batches(row(tmp_path, 500), 16, 4, 2, seed=0, ahead=3)
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
    whole = [(x.tolist(), y.tolist()) for x, y in data.val_batches(split, 16, 4, eval_steps)]
    windows = [window for x, _ in whole for window in x]
    places = [next(k for k in range(41) if tokens[16 * k : 16 * k + 16].tolist() == window) for window in windows]
    n = {0: 41, 1: 4, 3: 12, 1000: 41}[eval_steps]
    assert places == sorted(set(places)) and len(places) == n
    assert max(np.diff([*places, 41])) <= -(-41 // n)  # evenly spread
    targets = [target for _, y in whole for target in y]
    assert targets == [tokens[16 * k + 1 : 16 * k + 17].tolist() for k in places]
    for world_size in (2, 3, 4, 16):
        shares = [list(data.val_batches(split, 16, 4, eval_steps, rank, world_size)) for rank in range(world_size)]
        for i, batch in enumerate(whole):
            x, y = shares[i % world_size][i // world_size]
            assert (x.tolist(), y.tolist()) == batch
        assert sum(map(len, shares)) == len(whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_on_cuda(tmp_path: Path) -> None:
    split = row(tmp_path, 500)
    expected = take(split, 4, 2, 5).view(10, 4, 16)
    batches = Batches(split, 16, 4, 2, 5, device="cuda")
    for x in expected:
        found, _ = batches.next()
        assert found.is_cuda and torch.equal(found.cpu(), x)
    batches.close()
