"""direct_file.py: whatever is written in whatever pieces is what open(path, "wb") would have left, also where the file
system refuses to pass by the cache or takes only a part; and what the system refuses is told."""

import errno
import fcntl
import os
import random
import zlib
from pathlib import Path

import pytest

from groundup.train import direct_file
from groundup.train.direct_file import DirectFile

PAGE = 4096


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file, "BLOCK", 4 * PAGE)


def written(path: Path, pieces: list[bytes]) -> DirectFile:
    with DirectFile(path) as f:
        assert [f.write(piece) for piece in pieces] == list(map(len, pieces))
    return f


def check(path: Path, pieces: list[bytes]) -> None:
    f = written(path, pieces)
    whole = b"".join(pieces)
    assert path.read_bytes() == whole and f.crc == zlib.crc32(whole)


def random_pieces(seed: int) -> list[bytes]:
    rng = random.Random(seed)
    sizes = [0, 1, 7, 511, PAGE, PAGE + 1, 4 * PAGE - 1, 4 * PAGE, 4 * PAGE + 1, 13 * PAGE + 5]
    return [rng.randbytes(rng.choice(sizes)) for _ in range(rng.randrange(12))]


@pytest.mark.parametrize("seed", range(30))
def test_the_file_is_what_was_written(tmp_path: Path, seed: int) -> None:
    (tmp_path / "f").write_bytes(b"what was there before" * 9999)
    check(tmp_path / "f", random_pieces(seed))


def test_whole_blocks_pass_by_the_cache_where_they_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, direct = direct_file.open_new(tmp_path / "try")
    if not direct:
        pytest.skip("this file system does not know O_DIRECT")
    write, seen = os.write, []

    def observed(fd: int, data: memoryview) -> int:
        seen.append((bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), len(data)))
        return write(fd, data)

    monkeypatch.setattr(os, "write", observed)
    check(tmp_path / "f", [b"x" * (9 * PAGE + 3), b"y" * PAGE])
    assert seen == [(True, 4 * PAGE), (True, 4 * PAGE), (False, 2 * PAGE + 3)]


@pytest.mark.parametrize("refused", ["open", "write"])
def test_file_systems_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """Some refuse O_DIRECT when the file is opened, some when it is written."""
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("this system does not know O_DIRECT")
    original, n_refused = getattr(os, refused), 0

    def refuse(what: object, *args: object) -> int:
        nonlocal n_refused
        flags = args[0] if refused == "open" else fcntl.fcntl(what, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            n_refused += 1
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(what, *args)

    monkeypatch.setattr(os, refused, refuse)
    check(tmp_path / "f", random_pieces(4) + [b"z" * 9 * PAGE])
    assert n_refused == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_system_that_takes_only_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    write, rng = os.write, random.Random(seed)
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: rng.choice([1, 512, PAGE, len(data)])]))
    check(tmp_path / "f", random_pieces(seed + 100) + [b"z" * 9 * PAGE])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's device that is always full")
@pytest.mark.parametrize("size", [1, 9 * PAGE])
def test_a_full_disk_is_told_and_nothing_stays_open(size: int) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No space left on device"):
        written(Path("/dev/full"), [b"x" * size])
    assert os.listdir("/proc/self/fd") == before


def test_an_error_in_between_closes_the_file(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ZeroDivisionError), DirectFile(tmp_path / "f") as f:
        f.write(b"x")
        1 / 0  # noqa: B018
    assert os.listdir("/proc/self/fd") == before and (tmp_path / "f").read_bytes() == b""


def test_the_mode_is_that_of_other_files(tmp_path: Path) -> None:
    written(tmp_path / "f", [b"x"])
    (tmp_path / "g").write_bytes(b"x")
    assert (tmp_path / "f").stat().st_mode == (tmp_path / "g").stat().st_mode
