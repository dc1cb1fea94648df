"""compile_c: one library for each source, compiler and processor, never left half written."""

import os
import shutil
import time
from pathlib import Path

import pytest

from groundup import compile_c as module
from groundup.compile_c import compile_c

pytestmark = pytest.mark.skipif(
    not shutil.which("gcc") and not shutil.which("clang"), reason="needs a C compiler"
)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "one.c"
    path.write_text("int number(void) { return 1; }", encoding="utf-8")
    return path


def kept(source: Path) -> list[Path]:
    return sorted((source.parent / "cache/groundup").glob("*"))


def test_a_library_is_compiled_once_for_each_source(source, monkeypatch):
    assert compile_c(source).number() == 1
    (first,) = kept(source)
    assert first.parent.stat().st_mode & 0o777 == 0o700
    with monkeypatch.context() as patch:
        patch.setattr(module, "run", None)  # a second compilation would fail
        assert compile_c(source).number() == 1
    source.write_text("int number(void) { return 2; }", encoding="utf-8")
    assert compile_c(source).number() == 2 and len(kept(source)) == 2
    monkeypatch.setattr(module, "processor", lambda: "another")
    assert compile_c(source).number() == 2 and len(kept(source)) == 3


def test_a_damaged_library_is_compiled_again(source):
    assert compile_c(source) is not None
    (path,) = kept(source)
    path.unlink()  # the one that is loaded stays whole
    path.write_bytes(b"\x7fELF")
    assert compile_c(source).number() == 1 and kept(source) == [path]


@pytest.mark.parametrize("cut", [100, 5000, -1])
def test_a_library_that_was_cut_is_not_loaded(source, cut):
    """The system would load it, and then end the process with SIGBUS or SIGSEGV."""
    child = os.fork()
    if child == 0:
        os._exit(0 if compile_c(source) is None else 1)
    assert os.waitpid(child, 0)[1] == 256
    (path,) = kept(source)
    path.write_bytes(path.read_bytes()[:cut])
    child = os.fork()
    if child == 0:
        os._exit(compile_c(source).number())
    assert os.waitpid(child, 0)[1] == 256 and kept(source) == [path]


def test_a_user_without_a_home_compiles_each_time(source, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(module.Path, "expanduser", lambda path: (_ for _ in ()).throw(RuntimeError))
    assert compile_c(source).number() == 1


def test_without_a_place_to_keep_it_a_library_is_compiled_all_the_same(source, monkeypatch):
    (source.parent / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(source.parent / "file"))
    assert compile_c(source).number() == 1 and not kept(source)


def test_nothing_is_taken_from_where_others_may_write(source):
    assert compile_c(source) is not None
    (path,) = kept(source)
    path.unlink()
    path.parent.chmod(0o777)
    path.write_bytes(b"from another user")
    assert compile_c(source).number() == 1 and path.read_bytes() == b"from another user"


def test_what_does_not_compile_is_none_and_leaves_nothing(source):
    source.write_text("int number(void) { return", encoding="utf-8")
    assert compile_c(source) is None and not kept(source)


def test_a_compiler_that_takes_too_long_ends_with_all_that_it_has_started(source, monkeypatch, tmp_path):
    pid, fake = tmp_path / "pid", tmp_path / "bin/gcc"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\nsleep 100 & echo $! > {pid}\nwait\n", encoding="utf-8")
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(module, "COMPILE_S", 0.5)
    assert compile_c(source) is None
    stat = Path("/proc", pid.read_text(encoding="utf-8").strip(), "stat")
    deadline = time.monotonic() + 20  # it was killed, and is gone when it next has the processor
    while stat.exists() and stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
