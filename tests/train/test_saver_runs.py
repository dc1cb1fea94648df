"""Saver in runs of pretrain.py: training goes on while a checkpoint is written, and whatever ends the run meanwhile,
it resumes to the bit."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import forks
import pytest
import test_pretrain as tp
import torch

from groundup.train import checkpoint
from groundup.train.checkpoint import Saver
from groundup.train.log import RunLog

data_dir, run = tp.data_dir, tp.run


def note_steps(monkeypatch: pytest.MonkeyPatch, seen: list) -> None:
    """Have RunLog.train add ("step", number) to `seen`."""
    original = RunLog.train

    def train(log: object, step: int, *args: object) -> None:
        seen.append(("step", step))
        original(log, step, *args)

    monkeypatch.setattr(RunLog, "train", train)


@pytest.mark.slow
def test_training_goes_on_and_the_next_save_waits(
    run: Callable, tmp_path: Path, monkeypatch
) -> None:
    seen, write = [], Saver._write

    def slow_write(self: Saver, step: int, *args: object) -> None:
        seen.append(("begin", step))
        time.sleep(0.3)
        write(self, step, *args)
        seen.append(("end", step))

    monkeypatch.setattr(Saver, "_write", slow_write)
    note_steps(monkeypatch, seen)
    assert run("--max_steps=6", "--save_every=2", "--keep_last=9", "--eval_every=100") == 0
    assert [e for e in seen if e[0] != "step"] == [
        (what, step) for step in (2, 4, 6) for what in ("begin", "end")
    ]
    assert seen.index(("step", 3)) > seen.index(("end", 2))  # the first is waited for
    assert seen.index(("step", 5)) < seen.index(("end", 4))
    assert [e["step"] for e in tp.events(tmp_path / "out", "save")] == [2, 4, 6]


@pytest.mark.slow
def test_a_signal_while_a_checkpoint_is_written(
    run: Callable, tmp_path: Path, monkeypatch, capsys
) -> None:
    original = checkpoint.write_state

    def write_state(path: Path, state: dict) -> None:
        if state.get("step") == 8:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        original(path, state)

    monkeypatch.setattr(checkpoint, "write_state", write_state)
    out = tmp_path / "out"
    flags = ["--max_steps=100000", "--save_every=4", "--keep_last=9", "--eval_every=9999"]
    assert (
        run(*flags, "--resume=never", "--overwrite=True") == 128 + signal.SIGTERM
    )  # which a user may well repeat
    stopped = tp.events(out, "train")[-1]["step"]
    hint = "the same command continues, without --resume=never --overwrite=True\n"
    assert f"stopped by a signal after step {stopped}; {hint}" in capsys.readouterr().out
    assert [e["step"] for e in tp.events(out, "save")] == [4, 8, stopped] and 8 < stopped < 12
    assert (
        checkpoint.find_latest(out, pytest.fail).name
        == f"step_{stopped:06d}"
        == os.readlink(out / "latest")
    )
    checkpoint.check_bytes(out / "step_000008")


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_full_disk_is_one_line_and_the_last_save_decides(
    run, tmp_path, monkeypatch, capsys, at_the_end
) -> None:
    failing = 6 if at_the_end else 4
    fail_at(monkeypatch, failing)
    assert run("--max_steps=6", "--save_every=2", "--keep_last=9") == int(at_the_end)
    text = capsys.readouterr().out
    assert text.count("No space left on device") == 1 and f"step_{failing:06d}" in text
    good = [step for step in (2, 4, 6) if step != failing]
    assert [e["step"] for e in tp.events(tmp_path / "out", "save")] == good
    assert [checkpoint.step_of(path) for path in checkpoint.step_dirs(tmp_path / "out")] == good
    assert not list((tmp_path / "out").glob(".step*"))


def fail_at(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """Have no room for the training state of that step."""
    original = checkpoint.write_state

    def write_state(path: Path, state: dict) -> None:
        if state.get("step") == failing:
            raise OSError(28, "No space left on device")
        original(path, state)

    monkeypatch.setattr(checkpoint, "write_state", write_state)


def test_a_run_that_cannot_save_at_all_ends(run, tmp_path, monkeypatch, capsys) -> None:
    """At its first save, neither at the next nor at its last step, without a checkpoint."""
    fail_at(monkeypatch, 2)
    text = tp.refused(run, capsys, "--max_steps=6", "--save_every=2", "--eval_every=100")
    assert "there is no earlier checkpoint (No space left on device)" in text
    assert tp.events(tmp_path / "out", "train")[-1]["step"] == 2
    assert not (tmp_path / "out" / "README.md").exists()


def test_a_signal_and_a_full_disk(run: Callable, tmp_path: Path, monkeypatch, capsys) -> None:
    """It does not say that the same command continues."""
    fail_at(monkeypatch, 3)
    seen: list[tuple[str, int]] = []
    note_steps(monkeypatch, seen)
    original = RunLog.advance
    monkeypatch.setattr(RunLog, "advance", lambda log: (len(seen) == 1 and stop(), original(log)))
    assert run("--max_steps=9", "--save_every=2") == 128 + signal.SIGTERM
    text = capsys.readouterr().out
    assert (
        "stopped by a signal after step 3; the last save failed" in text and "continues" not in text
    )
    assert text.index("No space left on device") < text.index("stopped by")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


BEGIN = """
import os, runpy, signal, sys, time
from groundup import errors
from groundup.train import checkpoint
from groundup.train.log import RunLog

write_state, steps = checkpoint.write_state, []

def slowly(path, state):
    if path.name == "train_state.pt" and state["step"] == 4:
        while steps[-1] < 6:  # training is two steps on
            time.sleep(0.01)
        write_state(path, state)
        {then}
        return
    write_state(path, state)

checkpoint.write_state, train = slowly, RunLog.train

def noted(log, step, *args):
    train(log, step, *args)
    steps.append(step)
    {at_each_step}

RunLog.train = noted
sys.argv[0] = "pretrain.py"
runpy.run_path("pretrain.py", run_name="__main__")
"""


def begin(
    out: Path, data_dir: Path, then: str = "", at_each_step: str = "", rank: bool = False
) -> subprocess.CompletedProcess:
    """pretrain.py in a process of its own that does something special while step 4 is being written.

    rank: as torchrun starts it."""
    flags = tp.command(f"--data_dir={data_dir}", f"--out_dir={out}", *RESUMED)[2:]
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": str(tp.ROOT)}
    if rank:
        env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    code = BEGIN.format(then=then or "pass", at_each_step=at_each_step or "pass")
    return forks.run(
        [sys.executable, "-c", code, *flags],
        cwd=tp.ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )


RESUMED = ["--max_steps=8", "--save_every=2", "--eval_every=3", "--dropout=0.1", "--keep_last=9"]


@pytest.mark.slow
def test_kill_9_while_training_is_ahead_of_the_write(
    run: Callable, tmp_path: Path, data_dir: Path
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    done = begin(killed, data_dir, then="os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert tp.events(killed, "train")[-1]["step"] >= 6 and not (killed / "step_000004").exists()
    assert (killed / ".step_000004.tmp" / "train_state.pt").exists()
    for out in (killed, straight):
        assert run(*RESUMED, f"--out_dir={out}") == 0
    tp.assert_same_run(straight, killed)
    assert not list(killed.glob(".step*"))


@pytest.mark.slow
def test_an_error_in_training_waits_for_the_write(
    run: Callable, tmp_path: Path, data_dir: Path
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    fail_while_writing(broken, data_dir, "RuntimeError('a mistake')", "a mistake")
    for out in (broken, straight):
        assert run(*RESUMED, f"--out_dir={out}") == 0
    tp.assert_same_run(straight, broken)


# These end without Python's own wait for threads: torchrun's rank, and who is told twice to stop.
@pytest.mark.parametrize(
    ("rank", "error", "line"),
    [
        (True, "MemoryError()", "out of memory"),
        (True, "KeyboardInterrupt()", "interrupted"),
        (False, "errors.Stopped(2)", "interrupted"),
    ],
)
@pytest.mark.slow
def test_an_end_at_once_waits_for_the_write(
    tmp_path: Path, data_dir: Path, rank: bool, error: str, line: str
) -> None:
    fail_while_writing(tmp_path / "out", data_dir, error, line, rank)


def fail_while_writing(
    out: Path, data_dir: Path, error: str, line: str, rank: bool = False
) -> None:
    """Raise an error at step 6, while step 4 is being written, which must be done nevertheless."""
    failing = f"if step == 6: time.sleep(0.2); raise {error}"
    done = begin(out, data_dir, "time.sleep(1)", failing, rank)
    assert done.returncode == (130 if line == "interrupted" else 1), done.stderr
    assert line in done.stderr
    assert checkpoint.find_latest(out, pytest.fail).name == "step_000004"
    assert not list(out.glob(".step*"))
