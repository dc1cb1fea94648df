"""Saver: a save is whole or not at all, whatever happens meanwhile: training goes on, kill -9 at every file
operation, full disks, file systems that refuse links and locks, ranks that fail, wait or die."""

import errno
import math
import os
import random
import resource
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
import saved
import test_checkpoint as tc
import torch
import torch.distributed as dist
from test_checkpoint import error_line, flip_byte, names, same, save, tiny, train_state, weights

import ddp
from groundup.errors import LostRank, UserError, say
from groundup.files import disk
from groundup.files.untrusted import crc32_of
from groundup.train import checkpoint, huggingface, lora, powersgd, ranks
from groundup.train.checkpoint import HostMemory, Saver
from groundup.train.log import read_events
from groundup.train.lora import LoRAConfig, set_trainable
from groundup.train.optim import Optimizer

NAN = float("nan")
FULL = pytest.mark.skipif(
    not Path("/dev/full").is_char_device(), reason="needs Linux's device that is always full"
)  # fmt: skip


# ---- which steps stay, which is best --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "keep_last", "kept", "best", "best2"),
    [
        # losses of steps 1, 2, 3, ...; what is there after the last of them
        ([3.0, 2.0, 1.0], 1, [2, 3], 3, 2),
        ([1.0, 2.0, 3.0], 1, [1, 2, 3], 1, 2),
        ([1.0, 2.0, 3.0], 0, [1, 2, 3], 1, 2),
        ([2.0, 1.0, 3.0, 1.5], 1, [2, 4], 2, 4),
        ([NAN, 5.0, NAN, 4.0, NAN], 1, [2, 4, 5], 4, 2),
        ([NAN, NAN], 1, [2], None, None),
        ([None, 2.0, None], 1, [2, 3], 2, None),
        ([float("-inf"), 2.0, float("inf")], 1, [2, 3], 2, None),
        ([2.0, 2.0, 2.0, 2.0], 1, [1, 2, 4], 1, 2),
        ([3.0, 2.0, 2.0, 1.0, 2.0], 2, [2, 4, 5], 4, 2),
    ],
)
def test_last_and_best(
    tmp_path: Path, losses: list, keep_last: int, kept: list, best: int | None, best2: int | None
) -> None:
    for step, loss in enumerate(losses, start=1):
        save(tmp_path, step, tiny(), val_loss=loss, keep_last=keep_last)
    assert [int(p.name[5:]) for p in checkpoint.step_dirs(tmp_path)] == kept
    for link, step in {"latest": len(losses), "best": best, "best2": best2}.items():
        found = (tmp_path / link).resolve().name if (tmp_path / link).is_symlink() else None
        assert found == (step and f"step_{step:06d}"), link


@pytest.mark.slow
def test_best_of_a_long_run_is_the_best_of_all_its_losses(tmp_path: Path) -> None:
    """Pruned steps are forgotten, which must not matter: against a list that forgets nothing."""
    rng = random.Random(3)
    model, history = tiny(), []
    for step in range(1, 26):
        loss = rng.choice([NAN, None, *[float(rng.randint(1, 12)) for _ in range(6)]])
        history.append((step, loss))
        save(tmp_path, step, model, val_loss=loss, keep_last=2)
        ranking = sorted((x, s) for s, x in history if x is not None and not math.isnan(x))
        expected = [f"step_{s:06d}" for _, s in ranking[:2]]
        found = [
            os.readlink(tmp_path / link)
            for link in ("best", "best2")
            if (tmp_path / link).is_symlink()
        ]
        assert found == expected
        newest = [f"step_{s:06d}" for s in (step - 1, step) if s]
        assert {p.name for p in checkpoint.step_dirs(tmp_path)} == {*newest, *expected}


def test_a_kill_between_evaluation_and_links_is_repaired_at_the_start(tmp_path: Path) -> None:
    """The links are a function of the log and of the steps that are there."""
    for step in (1, 2, 3):
        save(tmp_path, step, val_loss=4.0 - step)
    for link in ("latest", "best", "best2"):
        (tmp_path / link).unlink()
    saved.open_saver(tmp_path, tc.TOKENIZER, keep_last=1, first_step=3).close()
    assert names(tmp_path) == ["best", "best2", "latest", "step_000002", "step_000003"]
    assert [os.readlink(tmp_path / link)[-1] for link in ("latest", "best", "best2")] == [
        "3",
        "3",
        "2",
    ]


@pytest.mark.slow
def test_kill_at_every_moment_from_an_evaluation_to_its_links(tmp_path: Path) -> None:
    """The best checkpoint stays, and the next start has the links of a run that was not killed."""
    base = tmp_path / "base"
    for step, loss in ((1, 1.0), (2, 2.0), (3, None)):
        save(base, step, val_loss=loss, keep_last=1)

    def evaluate(run: Path) -> None:
        behind = saved.open_saver(run, tc.TOKENIZER, keep_last=1, first_step=3)
        if 3 not in behind.log.val_losses():  # as a trainer that starts here
            behind.wait()
            behind.log.write("eval", 3, {"val_loss": 0.5})
            behind.tidy()
        behind.close()

    found, moments = set(), moments_of(base, lambda: evaluate(base))
    for run in moments:
        assert {"step_000001", "step_000003"} <= set(names(run))
        found.add(len(names(run)))
        checkpoint.repair(run)  # as `find` does
        evaluate(run)
        links = {name: os.readlink(run / name)[-1] for name in ("latest", "best", "best2")}
        assert links == {"latest": "3", "best": "3", "best2": "1"}
        assert names(run) == ["best", "best2", "latest", "step_000001", "step_000003"]
    assert len(moments) > 20 and len(found) > 1


def test_evaluations_are_on_the_disk_before_a_step_is_removed_for_them(
    tmp_path: Path, monkeypatch
) -> None:
    """Else a machine that stops could forget which of the others is best."""
    synced, removed, fsync, rename = [], [], os.fsync, Path.rename
    for step in (1, 2):
        save(tmp_path, step, val_loss=float(step), keep_last=1)

    def traced_fsync(fd: int) -> None:
        fsync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        synced.extend([path.read_text(encoding="utf-8")] if path.name == "log.jsonl" else [])

    def traced_rename(path: Path, target: Path) -> Path:
        removed.extend([synced[-1]] if path.name == "step_000002" else [])
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(Path, "rename", traced_rename)
    save(tmp_path, 3, val_loss=0.5, keep_last=1)
    assert len(removed) == 1 and '"val_loss": 0.5' in removed[0]


def refused(*_args, **_keys) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def test_a_lost_log_does_not_lose_the_best_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, val_loss=float(step), keep_last=1)
    (tmp_path / "log.jsonl").unlink()
    for step, loss in ((3, 3.0), (4, 2.5), (5, 4.0)):
        save(tmp_path, step, val_loss=loss, keep_last=1)
    assert os.readlink(tmp_path / "best") == "step_000001"
    assert os.readlink(tmp_path / "best2") == "step_000004"


def test_of_a_step_that_was_moved_to_another_disk_the_link_is_removed(tmp_path: Path, capsys) -> None:
    step, elsewhere = save(tmp_path / "out", 1, keep_last=1), tmp_path / "elsewhere"
    step.rename(elsewhere)
    step.symlink_to(elsewhere)
    save(tmp_path / "out", 2, keep_last=1)
    assert sorted(os.listdir(tmp_path / "out")) == [".lock", "latest", "log.jsonl", "step_000002"]
    assert (elsewhere / "checksums.json").exists() and capsys.readouterr().err == ""


def test_a_run_directory_can_be_moved(tmp_path: Path) -> None:
    save(tmp_path / "a", 1, tiny(1), val_loss=1.0, keep_last=1)
    save(tmp_path / "a", 2, tiny(2), val_loss=2.0, keep_last=1)
    (tmp_path / "a").rename(tmp_path / "b")
    assert same(weights(huggingface.load_model(tmp_path / "b" / "best")), weights(tiny(1)))
    assert same(weights(huggingface.load_model(tmp_path / "b" / "latest")), weights(tiny(2)))
    assert same(weights(huggingface.load_model(tmp_path / "b" / "best2")), weights(tiny(2)))


def test_a_damaged_later_step_neither_counts_nor_disappears(tmp_path: Path) -> None:
    """The resume went behind it to step 2: with keep_last=1 the step saved next must be the one that stays."""
    for step in (2, 4):
        save(tmp_path, step, val_loss=float(step))
    flip_byte(tmp_path / "step_000004" / "model.safetensors")
    save(tmp_path, 3, val_loss=3.0, keep_last=1)
    assert names(tmp_path) == [
        "best",
        "best2",
        "latest",
        "step_000002",
        "step_000003",
        "step_000004",
    ]
    assert (
        os.readlink(tmp_path / "latest") == "step_000003"
        and os.readlink(tmp_path / "best") == "step_000002"
    )
    assert checkpoint.find_latest(tmp_path, lambda line: None).name == "step_000003"
    save(tmp_path, 4, tiny(99), val_loss=0.5, keep_last=1)
    assert checkpoint.find_latest(tmp_path).name == "step_000004"
    assert same(weights(huggingface.load_model(tmp_path / "step_000004")), weights(tiny(99)))


def test_a_step_is_on_the_disk_before_it_has_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch
) -> None:
    """A machine that stops keeps what was fsynced: every file and the directory before the rename, then the run
    directory, which holds the new name."""
    events, fsync, rename = [], os.fsync, Path.rename

    def traced_fsync(fd: int) -> None:
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{fd}"))))
        fsync(fd)

    def traced_rename(path: Path, target: Path) -> Path:
        events.append(("rename", Path(target)))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(Path, "rename", traced_rename)
    final = save(tmp_path, 1)
    temp = tmp_path / ".step_000001.tmp"
    named = events.index(("rename", final))
    assert {("fsync", temp), *(("fsync", temp / path.name) for path in final.iterdir())} <= set(
        events[:named]
    )
    assert ("fsync", tmp_path) in events[named:]


# ---- housekeeping never decides whether data were saved -------------------------------------------------------------


def refuse(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.parametrize("refused", ["links", "locks", "directories", "removal"])
def test_a_file_system_that_refuses_housekeeping_is_told_once(
    tmp_path: Path, monkeypatch, capsys, refused
) -> None:
    """Lustre without locks, FAT without links, SMB without fsync of directories, NFS with a file still open."""
    say.cache_clear()
    fsync = os.fsync
    if refused == "links":
        monkeypatch.setattr(Path, "symlink_to", refuse)
    elif refused == "locks":
        monkeypatch.setattr(disk.fcntl, "flock", refuse)
    elif refused == "directories":
        monkeypatch.setattr(
            os, "fsync", lambda fd: refuse() if os.path.isdir(f"/proc/self/fd/{fd}") else fsync(fd)
        )  # fmt: skip
    else:
        monkeypatch.setattr(
            shutil, "rmtree", lambda path, ignore_errors=False: ignore_errors or refuse()
        )
    for step in (1, 2, 3):
        path = save(tmp_path, step, val_loss=float(-step), keep_last=1)
        assert checkpoint.find_latest(tmp_path, pytest.fail) == path
    said = capsys.readouterr().err
    assert said.count("warning: cannot ") == 1 and said.endswith(": Function not implemented\n")


def test_a_half_save_that_cannot_be_removed_does_not_block_later_saves(
    tmp_path: Path, monkeypatch
) -> None:
    save(tmp_path, 1)
    stuck = tmp_path / ".step_000002.tmp"
    stuck.mkdir()
    rmtree = shutil.rmtree
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, ignore_errors=False: path == stuck or rmtree(path, ignore_errors)
    )  # fmt: skip
    checkpoint.repair(tmp_path)
    for step in (3, 2, 4):
        path = save(tmp_path, step, keep_last=1)
        checkpoint.check_bytes(path)
    assert names(tmp_path) == [".step_000002.tmp", "latest", "step_000004"]


def test_a_run_copied_with_its_links_followed_goes_on(tmp_path: Path, capsys) -> None:
    """cp -rL: latest, best and best2 are copies of steps, and not what they were an evaluation later."""
    for step, loss in ((1, 1.0), (2, 2.0)):
        save(tmp_path / "a", step, val_loss=loss, keep_last=1)
    run = Path(shutil.copytree(tmp_path / "a", tmp_path / "b"))
    assert (run / "best").is_dir() and not (run / "best").is_symlink()
    # at each start, before --resume_from may delete the step of a copy
    checkpoint.repair(run)
    links = {name: os.readlink(run / name) for name in ("latest", "best", "best2")}
    assert links == {"latest": "step_000002", "best": "step_000001", "best2": "step_000002"}
    save(run, 3, tiny(3), val_loss=0.5, keep_last=1)
    links = {name: os.readlink(run / name) for name in ("latest", "best", "best2")}
    assert links == {"latest": "step_000003", "best": "step_000003", "best2": "step_000001"}
    assert names(run) == ["best", "best2", "latest", "step_000001", "step_000003"]
    # what is no copy of a step is not deleted, and keeps no other link from its step
    (run / "latest").unlink()
    (run / "latest").mkdir()
    say.cache_clear()
    checkpoint.repair(run)
    assert save(run, 4, val_loss=0.1).exists() and (run / "latest").is_dir()
    assert capsys.readouterr().err.count("cannot update the links latest, best and best2") == 1
    assert os.readlink(run / "best") == "step_000004" and not list(run.glob(".*.tmp"))


def test_of_a_copy_without_its_step_the_link_is_the_step(tmp_path: Path) -> None:
    save(tmp_path / "a", 1, tiny(1), val_loss=1.0)
    copy = tmp_path / "b"
    shutil.copytree(tmp_path / "a" / "best", copy / "best")
    shutil.copytree(tmp_path / "a" / "latest", copy / "latest")
    checkpoint.repair(copy)
    assert names(copy) == ["best", "latest", "step_000001"]
    assert checkpoint.find_latest(copy) == copy / "step_000001"
    assert os.readlink(copy / "best") == os.readlink(copy / "latest") == "step_000001"


def test_a_copy_of_a_damaged_step_takes_its_place(tmp_path: Path) -> None:
    save(tmp_path / "a", 1, tiny(1), val_loss=1.0)
    copy = Path(shutil.copytree(tmp_path / "a", tmp_path / "b"))
    flip_byte(copy / "step_000001" / "model.safetensors")
    checkpoint.repair(copy)
    assert checkpoint.find_latest(copy) == copy / "step_000001"
    assert os.readlink(copy / "best") == "step_000001"


def test_permissions_that_cannot_be_set_are_left(tmp_path: Path, monkeypatch, capsys) -> None:
    """As on SMB mounts."""
    monkeypatch.setattr(os, "chmod", refused)
    say.cache_clear()
    assert save(tmp_path, 1).exists()
    assert capsys.readouterr().err.count("cannot let others read the weights") == 1


# ---- kill -9 --------------------------------------------------------------------------------------------------------

TOUCHES_DISK = (
    "open",
    "os.mkdir",
    "os.rename",
    "os.symlink",
    "os.remove",
    "os.rmdir",
    "os.scandir",
    "os.listdir",
)


def moments_of(run: Path, action: Callable[[], object]) -> list[Path]:
    """Copies of a run's directory as kill -9 leaves it just before each thing that `action` does to files, in a child,
    and when it is over. The moments are Python's audit events, not hooks in checkpoint.py."""
    copies, turn, copying = run.with_name("moments"), threading.RLock(), False

    def copy() -> None:
        shutil.copytree(run, copies / f"{len(os.listdir(copies)):04}", symlinks=True)

    def hook(event: str, args: tuple) -> None:
        nonlocal copying
        with turn:  # other threads wait
            if event in TOUCHES_DISK and not copying:
                copying = True
                copy()
                copying = False

    def watched() -> None:
        sys.addaudithook(hook)
        action()

    copies.mkdir()
    assert wait(start(watched)) == 0
    copy()
    return sorted(copies.iterdir())


def start(action: Callable[[], object]) -> int:
    """Run `action` in a forked child; -> its process id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def wait(child: int) -> int:
    """Exit status of a child: 0, 1, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_kill_at_every_moment_of_a_save(tmp_path: Path) -> None:
    """Whatever the moment, the run has a whole checkpoint: the one before, or the new one. At every fourth moment: its
    weights are right, and the next save works."""
    models, base = {step: tiny(step) for step in (1, 2, 3)}, tmp_path / "base"
    for step, loss in ((1, 1.0), (2, 2.0)):
        save(base, step, models[step], val_loss=loss, keep_last=1)
    found = []
    action = lambda: save(base, 3, models[3], val_loss=0.5, keep_last=1)  # noqa: E731
    for moment, run in enumerate(moments_of(base, action)):
        path = checkpoint.find_latest(run, pytest.fail)
        step = checkpoint.step_of(path)
        found.append(step)
        for finished in checkpoint.step_dirs(run):
            checkpoint.check_bytes(finished)  # nothing half-written or half-removed bears such a name
        assert all((run / link).exists() for link in ("latest", "best"))  # they lead to a directory
        if moment % 4 == 0 or len(set(found[-2:])) > 1:  # the dearer checks, now and then
            assert same(weights(huggingface.load_model(path)), weights(models[step]))
            assert train_state(path)["step"] == step
            assert checkpoint.resolve(run / "latest") and checkpoint.resolve(run / "best")
            checkpoint.repair(run)
            save(run, 4, models[3], val_loss=0.25, keep_last=1)
            assert {"best", "best2", "latest", "step_000004"} <= set(names(run))
            assert len(names(run)) == 5 and os.readlink(run / "best") == "step_000004"
    assert found == sorted(found) and {2, 3} == set(found[:-1]) and len(found) > 30


def test_kill_at_every_moment_of_replacing_a_step(tmp_path: Path) -> None:
    """Step 7 was damaged, so the run went on from step 5 and comes to step 7 again. A kill leaves either of them whole;
    a save that fails changes nothing."""
    before, new, base = tiny(1), tiny(2), tmp_path / "base"
    save(base, 5, before)
    save(base, 7)
    flip_byte(base / "step_000007" / "model.safetensors")
    found = []
    for moment, run in enumerate(moments_of(base, lambda: save(base, 7, new))):
        checkpoint.repair(run)  # as `find` does
        path = checkpoint.find_latest(run, lambda line: None)
        assert same(weights(huggingface.load_model(path)), weights(new if path.name == "step_000007" else before))
        found.append(path.name)
        if moment % 4 == 0 or len(set(found[-2:])) > 1:  # what follows is tried now and then
            error_line(lambda run=run: save(run, 7, new, other={"not": random.Random()}))
            assert checkpoint.find_latest(run, lambda line: None) == path
            save(run, 7, new)
            assert names(run) == ["latest", "step_000005", "step_000007"]
            assert same(weights(huggingface.load_model(run / "latest")), weights(new))
    assert found == sorted(found) and set(found[:-1]) == {"step_000005", "step_000007"}


# ---- full disks -----------------------------------------------------------------------------------------------------


def check_failed_save(run: Path, text: str) -> None:
    """After a save of step 3 that had no room: told in a line, the step before whole, nothing of the new one left."""
    assert (
        "step_000003" in text
        and "No space left on device" in text
        and "earlier checkpoints are intact" in text
    )
    assert names(run) == ["best", "latest", "step_000002"]
    assert checkpoint.find_latest(run, pytest.fail).name == "step_000002"


@FULL
@pytest.mark.parametrize(
    "file", ["config.json", "rank_00000.pt", "tokenizer.json.tmp", "train_state.pt"]
)
def test_no_room_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """The system itself refuses the bytes of one file, be they Python's or torch's."""
    save(tmp_path, 2, val_loss=1.0)
    mkdir = os.mkdir

    def mkdir_with_full_file(path: str | Path, mode: int = 0o777) -> None:
        mkdir(path, mode)
        os.symlink("/dev/full", Path(path) / file)

    monkeypatch.setattr(os, "mkdir", mkdir_with_full_file)
    check_failed_save(tmp_path, error_line(lambda: save(tmp_path, 3)))
    monkeypatch.undo()
    save(tmp_path, 3, val_loss=2.0, keep_last=1)
    assert names(tmp_path) == ["best", "best2", "latest", "step_000002", "step_000003"]


@pytest.mark.parametrize("adapters", [False, True])
def test_no_room_for_weights(tmp_path: Path, adapters: bool) -> None:
    """safetensors writes them, in words of its own: here no file may be as large."""
    base, model = save(tmp_path / "base", 1), tiny()
    if adapters:
        lora.set_trainable(model, "lora", LoRAConfig(rank=64))
    good = save(tmp_path / "run", 2, model, base=str(base) if adapters else "", val_loss=1.0)
    largest = max(path.stat().st_size for path in good.iterdir())
    assert largest == (good / f"{'adapter_' if adapters else ''}model.safetensors").stat().st_size
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, unlimited[1]))
    try:
        text = error_line(
            lambda: save(tmp_path / "run", 3, model, base=str(base) if adapters else "")
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert "File too large" in text
    assert names(tmp_path / "run") == ["best", "latest", "step_000002"]
    checkpoint.resolve(good)


def test_no_room_noticed_when_it_goes_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that allocates late says so in fsync, of any file."""
    save(tmp_path, 2, val_loss=1.0)
    for failing in range(1, len(tc.FILES) + 1):
        calls = 0

        def fsync(fd: int, failing: int = failing) -> None:
            nonlocal calls
            path = os.readlink(f"/proc/self/fd/{fd}")
            calls += os.path.isfile(path) and ".tmp/" in path
            if calls == failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", fsync)
        check_failed_save(tmp_path, error_line(lambda: save(tmp_path, 3)))
        assert calls == failing


def test_a_mistake_in_the_code_is_not_called_a_full_disk(tmp_path: Path, monkeypatch) -> None:
    save(tmp_path, 2)
    monkeypatch.setattr(huggingface, "write_model", lambda *args, **kwargs: None.mistake)
    with pytest.raises(AttributeError, match="mistake"):
        save(tmp_path, 3)
    assert names(tmp_path) == ["latest", "step_000002"]


# ---- training goes on ------------------------------------------------------------------------------------------------

CASES = {  # optimizer, communication hook, what is trained
    "adamw": ("adamw", "none", "all"),
    "muon": ("muon", "none", "all"),
    "powersgd": ("muon", "powersgd", "all"),
    "lora": ("adamw", "none", "lora"),
}


class Training:
    """A tiny run as the trainers set one up: flat buffers, hooks, an optimizer with state."""

    def __init__(self, case: str = "muon", base: Path | None = None) -> None:
        kind, compress, trainable = CASES[case]
        self.model, self.base = tiny(), "" if base is None else str(base)
        set_trainable(self.model, trainable, LoRAConfig(rank=2, modules=("q_proj", "down_proj")))
        self.ddp = ddp.DDP(self.model, hook=powersgd.make_hook(compress, 1, 0, None))
        self.opt = Optimizer(self.ddp.buckets, kind)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.train()

    def train(self) -> None:
        """Take a step, which changes weights, state and random numbers, all of them."""
        tokens = torch.randint(tc.V, (2, 9))
        self.model(tokens[:, :-1], tokens[:, 1:]).backward()
        self.ddp.step(self.opt, lr=0.01, clip=1.0, scaler=self.scaler)

    def saver(self, out: Path) -> Saver:
        return saved.open_saver(out, tc.TOKENIZER, base=self.base)

    def save(self, saver: Saver, step: int = 1) -> None:
        saver.save(step, self.model, self.ddp, self.opt, self.scaler)


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def hold(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The event that the thread waits for, from now on, before it writes anything."""
    original, go_on = checkpoint.write_state, threading.Event()

    def write_state(path: Path, state: dict) -> None:
        assert go_on.wait(60)
        original(path, state)

    monkeypatch.setattr(checkpoint, "write_state", write_state)
    return go_on


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_the_state_at_the_call(tmp_path: Path, monkeypatch, case: str) -> None:
    """Three times with the same memory, while training changes all that is saved before anything is written."""
    base = save(tmp_path / "base", 1, tiny()) if case == "lora" else None
    training = Training(case, base)
    behind, waits = training.saver(tmp_path / "out"), training.saver(tmp_path / "same" / "out")
    behind.config = waits.config
    training.save(behind)  # the first save is waited for
    for step in (2, 3, 4):
        training.save(waits, step)
        waits.wait()
        with monkeypatch.context() as patch:
            go_on = hold(patch)
            training.save(behind, step)
            training.train()
            go_on.set()
            behind.wait()
        name = f"step_{step:06d}"
        found, expected = (
            content(tmp_path / "out" / name),
            content(tmp_path / "same" / "out" / name),
        )
        training.save(waits, step + 10)
        waits.wait()
        later = content(tmp_path / "same" / "out" / f"step_{step + 10:06d}")
        assert found.keys() == expected.keys() and found == expected
        changed = {key for key in found if found[key] != later[key]} - {"checksums.json"}
        files = {
            "train_state.pt",
            "rank_00000.pt",
            "model.safetensors",
            "adapter_model.safetensors",
        }
        assert changed == files & found.keys()
    behind.close()
    waits.close()


@pytest.mark.parametrize("case", CASES)
def test_restore_brings_everything_back(tmp_path: Path, case: str) -> None:
    base = save(tmp_path / "base", 1, tiny()) if case == "lora" else None
    training = Training(case, base)
    training.train()
    behind = training.saver(tmp_path / "out")
    training.ddp.skipped.copy_(torch.tensor([3.0, 1.0]))
    training.save(behind, 2)
    behind.close()
    noise = torch.rand(3)
    again = Training(case, base)
    path = tmp_path / "out" / "step_000002"
    huggingface.load_resumed(again.model, path)
    state = checkpoint.read_state(path / "train_state.pt")
    checkpoint.restore(path, state, again.model, again.ddp, again.opt, again.scaler, seed=0)
    assert (
        state["step"] == 2
        and again.ddp.n_updates == training.ddp.n_updates
        and "optimizer" not in state
    )
    assert again.ddp.skipped.tolist() == [3.0, 1.0] and torch.equal(torch.rand(3), noise)
    for _ in range(2):
        assert same(weights(again.model), weights(training.model))
        torch.manual_seed(1)
        training.train()
        torch.manual_seed(1)
        again.train()


def test_a_rank_that_the_saved_run_did_not_have_draws_other_numbers_at_each_resume(
    tmp_path: Path, monkeypatch
) -> None:
    """Else it would repeat the dropout masks of the steps before."""
    training, seen = Training("adamw"), []
    behind = training.saver(tmp_path)
    for step in (1, 2):
        training.save(behind, step)
    behind.close()
    monkeypatch.setattr(checkpoint.ranks, "rank", lambda: 1)
    for path in (None, tmp_path / "step_000001", tmp_path / "step_000002"):
        state = checkpoint.read_state(path / "train_state.pt") if path else {"step": 0}
        checkpoint.restore(path, state, training.model, training.ddp, training.opt, training.scaler, 7)
        seen.append(torch.rand(4))
    assert not any(torch.equal(*pair) for pair in combinations(seen, 2))
    state = checkpoint.read_state(path / "train_state.pt")
    checkpoint.restore(path, state, training.model, training.ddp, training.opt, training.scaler, 7)
    assert torch.equal(torch.rand(4), seen[-1])


@pytest.mark.parametrize("cuda_is_used", [False, True])  # a compiler may use it in a run on the CPU
def test_a_copy_does_not_change_with_what_is_trained(monkeypatch, cuda_is_used) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda_is_used)
    cpu = torch.device("cpu")
    value = {
        "a": torch.arange(6.0).view(2, 3)[:, 1:],
        "b": [torch.ones(2, dtype=torch.int8), {"c": "text"}],
    }
    memory = HostMemory()
    copied = memory.copy(value, cpu)
    places = [tensor.data_ptr() for tensor in memory.buffers]
    value["a"].add_(1)
    assert copied["a"].tolist() == [[1, 2], [4, 5]] and copied["b"][1] == {"c": "text"}
    # the next one is written into the same memory, unless a tensor has another size
    value["b"][0] = torch.ones(3, dtype=torch.int8)
    assert memory.copy(value, cpu)["a"].tolist() == [[2, 3], [5, 6]]
    assert len(memory.buffers) == 2 and memory.buffers[0].data_ptr() == places[0]
    assert memory.buffers[1].tolist() == [1, 1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_from_a_gpu_while_it_goes_on() -> None:
    """The stream is busy when the copy is asked for and changes the weights right after it."""
    weight = torch.randn(2000, 2000).cuda()
    expected, memory = weight.cpu(), HostMemory()
    for _ in range(2):
        torch.cuda._sleep(200_000_000)
        copied = memory.copy({"a": weight}, weight.device)
        assert copied["a"].is_pinned()
        weight.add_(1)
        assert torch.equal(copied["a"], expected)
        expected = expected + 1


def test_a_save_that_fails_is_told_and_the_next_tries_again(tmp_path: Path, monkeypatch) -> None:
    training = Training()
    behind = training.saver(tmp_path)
    training.save(behind, 1)
    behind.wait()
    assert behind.saved and not behind.log.lines
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_state", refuse)
        training.save(behind, 2)
        behind.wait()
    assert not behind.saved and "earlier checkpoints are intact" in "".join(behind.log.lines)
    training.save(behind, 3)
    behind.close()
    assert (
        behind.saved
        and len(behind.log.lines) == 1
        and names(tmp_path) == ["latest", "step_000001", "step_000003"]
    )
    assert [e["step"] for e in read_events(tmp_path / "log.jsonl")] == [1, 3]


class Group:
    """In the place of a process group."""


@pytest.mark.parametrize("broken", ["write_state", "sync"])
def test_after_a_failed_save_nothing_holds_the_group(
    tmp_path: Path, monkeypatch, broken: str
) -> None:
    training, group = Training(), Group()
    behind = training.saver(tmp_path)
    behind.group, alive = group, weakref.ref(group)
    del group
    training.save(behind)
    behind.wait()
    monkeypatch.setattr(checkpoint, broken, refuse)
    training.save(behind)
    behind.close()
    assert not behind.saved and alive() is None


# ---- several ranks --------------------------------------------------------------------------------------------------


def in_ranks(
    world_size: int, action: Callable[[ranks.World], object], timeout_s: float = 20
) -> list[int]:
    """Run `action` in `world_size` processes that share a gloo group; -> their exit statuses, as of `wait`."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    def join_and_act(rank: int) -> None:
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world_size}
        os.environ.update({
            key: str(value) for key, value in (group | {"RANK": rank, "LOCAL_RANK": rank}).items()
        })
        action(ranks.init("cpu", timeout_s))

    return [
        wait(child)
        for child in [start(lambda rank=rank: join_and_act(rank)) for rank in range(world_size)]
    ]


def open_saver(out: Path, timeout_s: float = 20, **changes: object) -> Saver:
    return saved.open_saver(out, tc.TOKENIZER, config={"timeout_s": timeout_s}, **changes)


def before_write(action: Callable[[], None]) -> None:
    """Let the thread of this process do something before it writes or sends."""
    write = Saver._write

    def first_act(*args: object) -> None:
        action()
        write(*args)

    Saver._write = first_act


def begin_save(behind: Saver, step: int) -> None:
    torch.manual_seed(ranks.rank())
    model, parts = tiny(step), saved.training(step)
    torch.manual_seed(ranks.rank())
    behind.save(step, model, *parts)


@pytest.mark.dist
@pytest.mark.parametrize("zero1", [False, True])
def test_rank_0_reads_for_all_ranks(tmp_path: Path, zero1: bool) -> None:
    """The others have its weights and its optimizer's state, and its error; with ZeRO-1 they read their share."""
    good, damaged = save(tmp_path / "good", 1, tiny(1)), save(tmp_path / "damaged", 1, tiny(1))
    flip_byte(damaged / "model.safetensors")
    getitem = huggingface.Stored.__getitem__

    def action(world: ranks.World) -> None:
        n_read = [0, 0]  # tensors of weights, bytes whose checksum was computed

        def count_read(stored: huggingface.Stored, rows: slice) -> torch.Tensor:
            n_read[0] += 1
            return getitem(stored, rows)

        def count_crc(path: Path) -> int:
            n_read[1] += 1
            return crc32_of(path)

        huggingface.Stored.__getitem__, huggingface.crc32_of = count_read, count_crc
        assert checkpoint.resolve(good) == good
        model = tiny(10 + world.rank)
        huggingface.load_start(model, good, tc.V, tc.TOKENIZER)
        parallel = ddp.DDP(model, zero1=zero1)
        assert all(n_read) == any(n_read) == world.is_main
        assert same(weights(model), weights(tiny(1)))
        with pytest.raises(UserError, match="model.safetensors is damaged"):
            checkpoint.resolve(damaged)

        # Without ZeRO-1 the others need not read the state: a tensor on the meta device has none.
        opt = Optimizer(parallel.buckets)
        device = "cpu" if world.is_main or zero1 else "meta"
        shapes = {name: p.shape for name, p in model.named_parameters()}
        state = {
            name: {
                "step": torch.ones((), device=device),
                **{key: torch.ones(shape, device=device) for key in ("exp_avg", "exp_avg_sq")},
            }
            for name, shape in shapes.items()
        }
        opt.load_state_dict(state)
        loaded = opt.state_dict()
        assert all((t == 1).all() for entry in loaded.values() for t in entry.values())
        ranks.close()

    assert in_ranks(2, action) == [0, 0]


@pytest.mark.dist
def test_a_step_is_one_agreement_which_tells_of_signals(tmp_path: Path) -> None:
    def action(world: ranks.World) -> None:
        training, all_reduce, n_flags = Training("adamw"), dist.all_reduce, []

        def count(t: torch.Tensor, *args: object, **kwargs: object) -> object:
            n_flags.extend([1] * (not t.is_floating_point()))
            return all_reduce(t, *args, **kwargs)

        dist.all_reduce = count
        for stop in (False, world.rank == 1):
            n_flags.clear()
            tokens = torch.randint(tc.V, (2, 9))
            training.model(tokens[:, :-1], tokens[:, 1:]).backward()
            training.ddp.step(training.opt, lr=0.01, stop=stop)
            assert len(n_flags) == 1
            stopping = training.ddp.stopping
            assert stopping is (len(seen) == 1)
            seen.append(stopping)
        dist.all_reduce = all_reduce
        ranks.close()

    seen: list[bool] = []
    assert in_ranks(2, action) == [0, 0]


@pytest.mark.dist
def test_ranks_write_while_they_talk_of_other_things(tmp_path: Path) -> None:
    """Each rank is slow at another time, and their training exchanges numbers all the while."""

    def action(world: ranks.World) -> None:
        before_write(lambda: time.sleep(0.2 * world.rank))
        behind, n = open_saver(tmp_path), 0
        for step in (1, 2, 3):
            begin_save(behind, step)
            for _ in range(40):
                time.sleep(0.01)
                n += 1
                assert ranks.all_reduce_sum(torch.tensor(n * (world.rank + 1))).item() == 6 * n
                assert ranks.gather_objects((n, world.rank)) == [(n, rank) for rank in range(3)]
            behind.wait()
            assert (
                behind.saved and checkpoint.find_latest(tmp_path).name == f"step_{step:06d}"
            )  # on every rank
        behind.close()
        ranks.close()

    assert in_ranks(3, action) == [0, 0, 0]
    for step in (1, 2, 3):
        path = tmp_path / f"step_{step:06d}"
        checkpoint.check_bytes(path)
        assert same(weights(huggingface.load_model(path)), weights(tiny(step)))
        for rank in range(3):
            torch.manual_seed(rank)
            state = checkpoint.read_state(path / checkpoint.rank_file(rank))
            assert torch.equal(state["rng"]["cpu"], torch.get_rng_state())


@FULL
@pytest.mark.dist
@pytest.mark.parametrize("failing", [0, 1])
def test_without_room_for_the_state_of_a_rank_the_save_fails(tmp_path: Path, failing: int) -> None:
    save(tmp_path, 2, val_loss=1.0)

    def action(world: ranks.World) -> None:
        behind, original = open_saver(tmp_path, first_step=2), checkpoint.rank_file
        checkpoint.rank_file = lambda rank: "/dev/full" if rank == failing else f"rank_{rank:05d}.pt"
        begin_save(behind, 3)
        behind.wait()
        assert not behind.saved
        if world.is_main:
            text = "".join(behind.log.lines)
            check_failed_save(tmp_path, text)
        checkpoint.rank_file = original  # there is room again
        begin_save(behind, 4)
        behind.close()
        assert behind.saved
        ranks.close()

    assert in_ranks(2, action) == [0, 0]
    assert names(tmp_path) == ["best", "latest", "step_000002", "step_000004"]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 1])
def test_a_disk_may_be_slower_than_ranks_wait_for_each_other(tmp_path: Path, slow: int) -> None:
    """84 GB at 200 MB/s take longer than the default timeout_s."""
    original = checkpoint.write_state

    def action(world: ranks.World) -> None:
        def write_state(path: Path, state: dict) -> None:
            time.sleep(2 * (path.name == checkpoint.rank_file(slow)))
            original(path, state)

        checkpoint.write_state, behind = write_state, open_saver(tmp_path, 1.0)
        begin_save(behind, 1)
        behind.close()
        assert behind.saved
        ranks.close()

    assert in_ranks(2, action, timeout_s=1.0) == [0, 0]
    assert checkpoint.find_latest(tmp_path, pytest.fail).name == "step_000001"


@pytest.mark.dist
@pytest.mark.slow
def test_a_rank_that_is_stuck_in_a_save_is_noticed(tmp_path: Path) -> None:
    """It was stopped: not even its main thread waits any more."""

    def action(world: ranks.World) -> None:
        behind = open_saver(tmp_path)
        if world.rank == 1:
            before_write(lambda: os.kill(os.getpid(), signal.SIGSTOP))
            (tmp_path / "stuck").write_text(str(os.getpid()), encoding="utf-8")
        begin = time.monotonic()
        with pytest.raises(LostRank, match="rank 0: wait for a save failed; another rank has died or is stuck"):
            begin_save(behind, 3)  # the first: it waits
        assert time.monotonic() - begin < 20
        os.kill(int((tmp_path / "stuck").read_text("utf-8")), signal.SIGKILL)

    assert in_ranks(2, action, timeout_s=2) == [0, -signal.SIGKILL]


@pytest.mark.dist
@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_writing_leaves_nobody_waiting(tmp_path: Path, dying: int) -> None:
    save(tmp_path, 2)

    def action(world: ranks.World) -> None:
        behind = open_saver(tmp_path, first_step=2)
        behind.wait()
        if world.rank == dying:
            before_write(lambda: os.kill(os.getpid(), signal.SIGKILL))
        begin_save(behind, 3)
        with pytest.raises(UserError, match="another rank has died"):
            behind.wait()

    statuses = in_ranks(2, action)
    assert statuses[dying] == -signal.SIGKILL and statuses[1 - dying] == 0
    assert checkpoint.find_latest(tmp_path, pytest.fail).name == "step_000002"
    checkpoint.repair(tmp_path)
    save(tmp_path, 3, keep_last=1)
    assert names(tmp_path) == ["latest", "step_000003"]


@pytest.mark.dist
@pytest.mark.parametrize("compress", ["none", "powersgd"])
def test_machines_need_no_shared_disk_to_save_but_each_the_checkpoint_to_resume(
    tmp_path: Path, compress: str
) -> None:
    """Each rank has a disk of its own under this name."""
    step = Path("out/step_000001")

    def action(world: ranks.World) -> None:
        disk_of_rank = tmp_path / str(world.rank)
        disk_of_rank.mkdir()
        os.chdir(disk_of_rank)
        ranks.barrier()
        behind = saved.open_saver(Path("out"), tc.TOKENIZER)
        model = tiny(1)
        hook = powersgd.make_hook(compress)
        parallel = ddp.DDP(model, hook=hook)
        for name, mine in hook.state_dict().items() if compress == "powersgd" else ():
            mine["error"].fill_(len(name) + world.rank)
        torch.manual_seed(world.rank)
        behind.save(1, model, parallel, *saved.training(1)[1:], extra={"data": tc.DATA, "warmup_steps": 0})
        behind.close()
        assert behind.saved

        def find() -> Path | None:
            settings = tc.settings(Path("out"), timeout_s=1)
            return checkpoint.find(settings, model.cfg, tc.DATA, settings["max_steps"])[0]

        with pytest.raises(UserError, match=f"rank 1 cannot read {step}; copy that of rank 0"):
            find()
        if world.rank == 1:
            shutil.copytree(tmp_path / "0" / step, step)
        ranks.barrier()
        assert find() == step
        if world.rank == 1:
            (step / "checksums.json").write_text("{}", encoding="utf-8")
        with pytest.raises(UserError, match=f"rank 1 finds another checkpoint in {step}"):
            find()
        ranks.close()

    assert in_ranks(2, action) == [0, 0]
    checkpoint.check_bytes(tmp_path / "0" / step)
    for rank in range(2):
        state = checkpoint.read_state(tmp_path / "0" / step / checkpoint.rank_file(rank))
        torch.manual_seed(rank)
        assert torch.equal(state["rng"]["cpu"], torch.get_rng_state())
        errors = {name: mine["error"] for name, mine in state.get("powersgd", {}).items()}
        assert bool(errors) == (compress == "powersgd")
        assert all((error == len(name) + rank).all() for name, error in errors.items())
