"""write_behind.py against saves that wait: the same bytes, whatever training does meanwhile; and nothing is lost when
the disk, a rank or the run fails while a checkpoint is being written."""

import math
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import forks
import pytest
import test_checkpoint as tc
import test_pretrain as tp
import torch
from safetensors.torch import load
from torch import nn

import ddp
from groundup.align import reward_model
from groundup.align.reward_model import RewardModel
from groundup.errors import LostRank, UserError
from groundup.train import checkpoint, powersgd, ranks, write_behind
from groundup.train.log import RunLog
from groundup.train.lora import LoRAConfig, set_trainable
from groundup.train.optim import Optimizer
from groundup.train.write_behind import Writer
from model import Transformer

data_dir, run = tp.data_dir, tp.run
KEEP = {"val_loss": 1.5, "keep_last": 0, "keep_best": 1}
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
        self.model, self.base = tc.tiny(), "" if base is None else str(base)
        set_trainable(self.model, trainable, LoRAConfig(rank=2, modules=("q_proj", "down_proj")))
        self.hook = powersgd.make_hook(compress, 1, 0, True)
        self.ddp = ddp.DDP(self.model, hook=self.hook)
        self.opt, self.n_steps = Optimizer(self.ddp.buckets, kind), 0
        self.step()

    def step(self) -> None:
        """Changes weights, state and random numbers, all of them."""
        tokens = torch.randint(tc.V, (2, 9))
        self.model(tokens[:, :-1], tokens[:, 1:]).backward()
        self.ddp.step(self.opt, lr=0.01)
        self.n_steps += 1

    def states(self) -> tuple[dict, dict]:
        state = {"step": 1, "optimizer": self.opt.state_dict(), "skipped": [0.0, 0.0], "config": {"a": "b", "c": "b"}}
        errors = self.hook.state_dict() if isinstance(self.hook, powersgd.PowerSGD) else {}
        return state, {"rng": {"cpu": torch.get_rng_state()}, "powersgd": errors}

    def save(self, out: Path, model: nn.Module, state: dict, rank_state: dict, world: ranks.World = tc.ALONE) -> Path:
        return checkpoint.save(out, 1, model, tc.TOKENIZER, state, rank_state, world, base=self.base, **KEEP)

    def start(self, writer: Writer, out: Path) -> None:
        model, *states = writer.copy(self.model, *self.states())
        writer.start(lambda: self.save(out, model, *states))


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def hold(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The event that writers of states wait for from now on."""
    original, go_on = checkpoint.write_state, threading.Event()

    def write_state(path: Path, state: dict) -> str:
        assert go_on.wait(60)
        return original(path, state)

    monkeypatch.setattr(checkpoint, "write_state", write_state)
    return go_on


# ---- the copy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_a_save_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Three times with the same memory, while training changes all that is saved before anything is written."""
    base = tc.save(tmp_path / "base", 1, tc.tiny()) if case == "lora" else None
    training, writer = Training(case, base), Writer(True)
    for i in range(3):
        expected = content(training.save(tmp_path / f"waits{i}", training.model, *training.states()))
        with monkeypatch.context() as patch:
            go_on = hold(patch)
            hold_weights(patch, go_on)
            training.start(writer, tmp_path / f"behind{i}")
            training.step()
            go_on.set()
            path = writer.wait()
        assert path == tmp_path / f"behind{i}" / "step_000001"
        found = content(path)
        later = content(training.save(tmp_path / f"later{i}", training.model, *training.states()))
        if case == "lora":  # safetensors writes two words about the file in an order of chance
            mine, theirs, others = (load(files.pop("adapter_model.safetensors")) for files in (found, expected, later))
            assert tc.same(mine, theirs) and not tc.same(mine, others)
            del found["checksums.json"], expected["checksums.json"]
        assert found.keys() == expected.keys()
        assert [name for name in found if found[name] != expected[name]] == []
        changed = {name for name in found if found[name] != later[name]} - {"checksums.json"}
        assert changed == {"train_state.pt", "rank_00000.pt", "model.safetensors"} & found.keys()
    writer.close()


def hold_weights(monkeypatch: pytest.MonkeyPatch, go_on: threading.Event) -> None:
    original = checkpoint.write_model

    def write_model(*args: object, **kwargs: object) -> dict[str, str]:
        assert go_on.wait(60)
        return original(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "write_model", write_model)


def test_memory_is_allocated_once_and_for_what_is_trained_alone(tmp_path: Path) -> None:
    base = tc.save(tmp_path, 1, tc.tiny())
    for case in CASES:
        training, memory = Training(case, base), []
        first, *_ = write_behind.snapshot(training.model, training.states(), memory)
        places = [t.data_ptr() for t in memory]
        n_trained = sum(bucket.param.numel() for bucket in training.ddp.buckets)
        state = training.opt.state_dict()
        storages = [t.untyped_storage() for of_name in state.values() for t in of_name.values()]
        n_bytes = 4 * n_trained + sum({s.data_ptr(): s.nbytes() for s in storages}.values())
        stacks = [stack for of_bucket in getattr(training.hook, "stacks", []) for stack in of_bucket]
        n_bytes += sum(stack.error.nbytes + stack.basis.nbytes for stack in stacks)
        assert sum(t.nbytes for t in memory) == n_bytes + len(torch.get_rng_state())
        training.step()
        second, *_ = write_behind.snapshot(training.model, training.states(), memory)
        assert [t.data_ptr() for t in memory] == places
        three = (model.parameters() for model in (training.model, second, first))
        for p, q, old in zip(*three, strict=True):
            assert torch.equal(p, q) and p.requires_grad == q.requires_grad
            assert (p.data_ptr() == q.data_ptr()) == (not p.requires_grad) and q.data_ptr() == old.data_ptr()


def test_not_behind_nothing_is_copied() -> None:
    training, writer = Training(), Writer(False)
    state = training.states()[0]
    model, same = writer.copy(training.model, state)
    assert model is training.model and same is state
    ended = []
    writer.start(lambda: time.sleep(0.1) or ended.append(1) or Path("x"))
    assert ended == [1]  # start() has waited for it
    assert writer.wait() == Path("x") and writer.wait() is None
    writer.start(lambda: Path("x") / 0)
    with pytest.raises(TypeError):
        writer.wait()
    assert not writer.saved
    writer.close()


def test_a_compiled_model_is_copied_without_its_code() -> None:
    training = Training()
    training.model.compile_blocks(torch.compile)
    copied, *_ = write_behind.snapshot(training.model, (), [])
    assert isinstance(copied, Transformer)
    assert all(torch.equal(p, q) for p, q in zip(training.model.parameters(), copied.parameters(), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_from_a_gpu_while_it_goes_on() -> None:
    """The stream is busy when the copy is asked for and changes the weights right after it."""
    model = nn.Linear(2000, 2000).cuda()
    expected, writer = model.weight.detach().cpu(), Writer(True)
    for _ in range(2):
        with torch.no_grad():
            torch.cuda._sleep(200_000_000)
            copied, state = writer.copy(model, {"a": model.bias.detach()})
            assert copied.weight.is_pinned() and state["a"].is_pinned()
            found = []
            writer.start(lambda found=found, copied=copied: found.append(copied.weight.detach().clone()))
            model.weight.add_(1)
        writer.wait()
        assert torch.equal(found[0], expected)
        expected = expected + 1
    writer.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("device", range(torch.cuda.device_count()))
def test_adapters_of_a_reward_model_on_a_gpu_are_written(tmp_path: Path, device: int) -> None:
    """What is frozen stays on the GPU, what is trained is in the copy on the CPU; what is written is their sum."""
    model = RewardModel(tc.tiny().cfg)
    set_trainable(model, "lora", LoRAConfig(rank=2))
    for name, p in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(p)
    writer, found = Writer(True), []
    (tmp_path / "cpu").mkdir()
    (tmp_path / "gpu").mkdir()
    reward_model.write_model(tmp_path / "cpu", model, tc.TOKENIZER)

    def save() -> Path:
        found.append(torch.cuda.current_device())
        reward_model.write_model(tmp_path / "gpu", copied, tc.TOKENIZER)
        return tmp_path

    with torch.cuda.device(device):
        (copied,) = writer.copy(model.cuda())
        writer.start(save)
    assert writer.wait() == tmp_path and found == [device]
    writer.close()
    mine, theirs = (load((tmp_path / name / "model.safetensors").read_bytes()) for name in ("cpu", "gpu"))
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], msg=name)


# ---- one after the other, and what becomes of it --------------------------------------------------------------------


def test_a_save_that_fails_is_told_by_the_next_wait(tmp_path: Path) -> None:
    training, writer = Training(), Writer(True)
    training.start(writer, tmp_path)
    assert writer.wait() is not None and writer.saved
    (tmp_path / "file").write_text("", encoding="utf-8")
    training.start(writer, tmp_path / "file")
    assert "earlier checkpoints are intact" in tc.error_line(writer.wait) and not writer.saved
    assert writer.wait() is None and not writer.saved
    training.start(writer, tmp_path)
    assert writer.wait() is not None and writer.saved
    writer.close()


class Group:
    """In the place of a process group."""


@pytest.mark.parametrize("broken", ["write_state", "commit", "write_model"])
def test_after_a_failed_save_nothing_holds_the_group(tmp_path: Path, monkeypatch, broken: str) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, broken, fail)
    training, writer, group = Training(), Writer(True), Group()
    writer.group, alive = group, weakref.ref(group)
    model, state, rank_state = writer.copy(training.model, *training.states())
    writer.start(partial(
        checkpoint.save, tmp_path, 1, model, tc.TOKENIZER, state, rank_state, tc.ALONE, **KEEP, group=group
    ))  # fmt: skip
    del group
    assert "No space left" in tc.error_line(writer.wait)
    writer.close()
    assert alive() is None


def slow_saves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """[("begin" or "end", step)] of the saves from now on, each of which takes a while."""
    original, seen = checkpoint.save, []

    def save(out_dir: str, step: int, *args: object, **kwargs: object) -> Path:
        seen.append(("begin", step))
        time.sleep(0.3)
        path = original(out_dir, step, *args, **kwargs)
        seen.append(("end", step))
        return path

    monkeypatch.setattr(checkpoint, "save", save)
    return seen


@pytest.mark.slow
def test_training_goes_on_and_the_next_save_waits(run: Callable, tmp_path: Path, monkeypatch) -> None:
    seen = slow_saves(monkeypatch)
    original = write_behind.snapshot

    def snapshot(*args: object) -> tuple:
        assert [what for what, _ in seen if what != "step"][-1:] != ["begin"]  # that save reads from the same memory
        return original(*args)

    monkeypatch.setattr(write_behind, "snapshot", snapshot)
    note_steps(monkeypatch, seen)
    assert run("--max_steps=6", "--save_every=2", "--keep_last=9", "--eval_every=100") == 0
    assert [e for e in seen if e[0] != "step"] == [(what, step) for step in (2, 4, 6) for what in ("begin", "end")]
    assert seen.index(("step", 3)) < seen.index(("end", 2))
    assert [e["step"] for e in tp.events(tmp_path / "out", "save")] == [2, 4, 6]


def note_steps(monkeypatch: pytest.MonkeyPatch, seen: list) -> None:
    """Have RunLog.train add ("step", number) to `seen`."""
    original = RunLog.train

    def train(log: object, step: int, *args: object) -> None:
        seen.append(("step", step))
        original(log, step, *args)

    monkeypatch.setattr(RunLog, "train", train)


@pytest.mark.slow
def test_a_run_saves_the_same_behind_training_and_not(run: Callable, tmp_path: Path, monkeypatch) -> None:
    every = [(what, step) for step in (2, 4, 5) for what in ("begin", "end")]
    for behind in (True, False):
        with monkeypatch.context() as patch:
            seen = slow_saves(patch)
            out = tmp_path / str(behind)
            flags = ["--max_steps=5", "--save_every=2", "--dropout=0.1", f"--out_dir={out}"]
            assert run(f"--async_save={behind}", *flags) == 0
        assert seen == every
    a, b = tmp_path / "True", tmp_path / "False"
    tp.assert_same_run(a, b)
    assert tc.names(a) == tc.names(b)
    assert tp.events(a, "save") == [e | {"path": e["path"].replace("False", "True")} for e in tp.events(b, "save")]
    for step in ("step_000004", "step_000005"):
        mine, theirs = content(a / step), content(b / step)
        differ = {name for name in mine if mine[name] != theirs[name]}
        assert differ == {"train_state.pt", "checksums.json"}  # the settings: out_dir, async_save


@pytest.mark.slow
def test_a_signal_while_a_checkpoint_is_written(run: Callable, tmp_path: Path, monkeypatch, capsys) -> None:
    original = checkpoint.write_state

    def write_state(path: Path, state: dict) -> str:
        if state.get("step") == 200:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        return original(path, state)

    monkeypatch.setattr(checkpoint, "write_state", write_state)
    out = tmp_path / "out"
    flags = ["--max_steps=100000", "--save_every=200", "--keep_last=9", "--eval_every=9999"]
    assert run(*flags, "--resume=never", "--overwrite=True") == 128 + signal.SIGTERM  # which a user may well repeat
    stopped = tp.events(out, "train")[-1]["step"]
    hint = "the same command continues, without --resume=never --overwrite=True\n"
    assert f"stopped by a signal after step {stopped}; {hint}" in capsys.readouterr().out
    assert [e["step"] for e in tp.events(out, "save")] == [200, stopped] and 200 < stopped < 400
    assert checkpoint.find_latest(out, pytest.fail).name == f"step_{stopped:06d}" == os.readlink(out / "latest")
    checkpoint.check_bytes(out / "step_000200")


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_full_disk_is_one_line_and_the_last_save_decides(run, tmp_path, monkeypatch, capsys, at_the_end) -> None:
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

    def write_state(path: Path, state: dict) -> str:
        if state.get("step") == failing:
            raise OSError(28, "No space left on device")
        return original(path, state)

    monkeypatch.setattr(checkpoint, "write_state", write_state)


def test_a_signal_and_a_full_disk(run: Callable, tmp_path: Path, monkeypatch, capsys) -> None:
    """It does not say that the same command continues."""
    fail_at(monkeypatch, 3)
    seen: list[tuple[str, int]] = []
    note_steps(monkeypatch, seen)
    original = RunLog.advance
    monkeypatch.setattr(RunLog, "advance", lambda log: (len(seen) == 2 and stop(), original(log)))
    assert run("--max_steps=9", "--save_every=2") == 128 + signal.SIGTERM
    text = capsys.readouterr().out
    assert "stopped by a signal after step 3; the last save failed" in text and "continues" not in text
    assert text.index("No space left on device") < text.index("stopped by")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("failing", [0, 3])
def test_an_error_of_the_run_comes_after_what_became_of_the_last_save(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, failing: int
) -> None:
    fail_at(monkeypatch, failing)
    original = Transformer.forward
    monkeypatch.setattr(Transformer, "forward", lambda *args, **kwargs: original(*args, **kwargs) * math.nan)
    with pytest.raises(UserError, match="4 steps in a row"):
        run("--max_steps=9", "--save_every=3", "--max_skipped=4", "--eval_every=99")
    assert ("No space left on device" in capsys.readouterr().out) == bool(failing)
    assert [e["step"] for e in tp.events(tmp_path / "out", "save")] == ([] if failing else [3])


BEGIN = """
import os, runpy, signal, sys, time
from groundup.train import checkpoint
from groundup.train.log import RunLog

write_state, steps = checkpoint.write_state, []

def slowly(path, state):
    if path.name == "train_state.pt" and state["step"] == 4:
        while steps[-1] < 6:  # training is two steps on
            time.sleep(0.01)
        digest = write_state(path, state)
        {then}
        return digest
    return write_state(path, state)

checkpoint.write_state, train = slowly, RunLog.train

def noted(log, step, *args):
    train(log, step, *args)
    steps.append(step)
    {at_each_step}

RunLog.train = noted
sys.argv[0] = "pretrain.py"
runpy.run_path("pretrain.py", run_name="__main__")
"""


def begin(out: Path, data_dir: Path, then: str = "", at_each_step: str = "") -> subprocess.CompletedProcess:
    """pretrain.py in a process of its own that does something special while step 4 is being written."""
    flags = tp.command(f"--data_dir={data_dir}", f"--out_dir={out}", *RESUMED)[2:]
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": str(tp.ROOT)}
    code = BEGIN.format(then=then or "pass", at_each_step=at_each_step or "pass")
    return forks.run(
        [sys.executable, "-c", code, *flags], cwd=tp.ROOT, env=env, capture_output=True, text=True, timeout=300
    )


RESUMED = ["--max_steps=8", "--save_every=4", "--eval_every=3", "--dropout=0.1", "--keep_last=9"]


@pytest.mark.slow
def test_kill_9_while_training_is_ahead_of_the_write(run: Callable, tmp_path: Path, data_dir: Path) -> None:
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
def test_an_error_in_training_waits_for_the_write(run: Callable, tmp_path: Path, data_dir: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    failing = "if step == 6: time.sleep(0.2); raise RuntimeError('a mistake')"
    done = begin(broken, data_dir, then="time.sleep(1)", at_each_step=failing)
    assert done.returncode == 1 and "a mistake" in done.stderr, done.stderr
    assert checkpoint.find_latest(broken, pytest.fail).name == "step_000004" and not list(broken.glob(".step*"))
    for out in (broken, straight):
        assert run(*RESUMED, f"--out_dir={out}") == 0
    tp.assert_same_run(straight, broken)


# ---- several ranks --------------------------------------------------------------------------------------------------


def save_in_ranks(writer: Writer, world: ranks.World, out: Path, step: int) -> None:
    model, state, rank_state = writer.copy(
        tc.tiny(step) if world.is_main else None, {"step": step}, {"rank": torch.full((3,), world.rank)}
    )
    writer.start(lambda: checkpoint.save(
        out, step, model, tc.TOKENIZER, state, rank_state, world, **KEEP, group=writer.group
    ))  # fmt: skip


@pytest.mark.dist
def test_ranks_write_while_they_talk_of_other_things(tmp_path: Path) -> None:
    """Each rank is slow at another time, and their training exchanges numbers all the while."""
    original = checkpoint.write_state

    def action(world: ranks.World) -> None:
        def write_state(path: Path, state: dict) -> str:
            time.sleep(0.2 * world.rank)
            return original(path, state)

        checkpoint.write_state, writer, n = write_state, Writer(True), 0
        for step in (1, 2, 3):
            save_in_ranks(writer, world, tmp_path, step)
            for _ in range(100):
                n += 1
                assert ranks.all_reduce_sum(torch.tensor(n * (world.rank + 1))).item() == 6 * n
                assert ranks.gather_objects((n, world.rank)) == [(n, rank) for rank in range(3)]
            assert writer.wait().name == f"step_{step:06d}"
        writer.close()
        ranks.close()

    assert tc.in_ranks(3, action) == [0, 0, 0]
    for step in (1, 2, 3):
        path = tmp_path / f"step_{step:06d}"
        checkpoint.check_bytes(path)
        assert tc.same(tc.weights(checkpoint.load_model(path)), tc.weights(tc.tiny(step)))
        for rank in range(3):
            assert checkpoint.load_train_state(path, rank)[1]["rank"].tolist() == [rank] * 3


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs Linux's device that is always full")
@pytest.mark.dist
@pytest.mark.parametrize("failing", [0, 1])
def test_all_ranks_hear_of_one_that_cannot_write(tmp_path: Path, failing: int) -> None:
    tc.save(tmp_path, 2)

    def action(world: ranks.World) -> None:
        writer = Writer(True)
        if world.rank == failing:
            checkpoint.rank_file = lambda rank: "/dev/full"
        save_in_ranks(writer, world, tmp_path, 3)
        text = tc.error_line(writer.wait)
        assert f"rank {failing}: No space left on device" in text and not writer.saved
        checkpoint.rank_file = "rank_{:05d}.pt".format
        save_in_ranks(writer, world, tmp_path, 4)
        assert writer.wait().name == "step_000004" and writer.saved
        writer.close()
        ranks.close()

    assert tc.in_ranks(2, action) == [0, 0]
    assert tc.names(tmp_path) == ["best", "latest", "step_000002", "step_000004"]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 1])
def test_a_disk_may_be_slower_than_ranks_wait_for_each_other(tmp_path: Path, slow: int) -> None:
    """Behind training, and while training waits: 84 GB at 200 MB/s take longer than the default timeout_s."""
    original = checkpoint.write_state

    def action(world: ranks.World) -> None:
        def write_state(path: Path, state: dict) -> None:
            time.sleep(3 * (path.name == checkpoint.rank_file(slow)))
            original(path, state)

        checkpoint.write_state = write_state
        for step, behind in enumerate((True, False), 1):
            writer = Writer(behind)
            save_in_ranks(writer, world, tmp_path, step)
            assert writer.wait().name == f"step_{step:06d}"
            writer.close()
        ranks.close()

    assert tc.in_ranks(2, action, timeout_s=1.5) == [0, 0]
    assert checkpoint.find_latest(tmp_path, pytest.fail).name == "step_000002"


@pytest.mark.dist
@pytest.mark.slow
def test_a_rank_that_is_stuck_in_a_save_is_named(tmp_path: Path) -> None:
    """It was stopped: not even its main thread waits any more."""

    def action(world: ranks.World) -> None:
        writer = Writer(True, 2)
        if world.rank == 1:
            checkpoint.write_state = lambda path, state: os.kill(os.getpid(), signal.SIGSTOP)
            (tmp_path / "stuck").write_text(str(os.getpid()), encoding="utf-8")
        save_in_ranks(writer, world, tmp_path, 3)
        begin = time.monotonic()
        with pytest.raises(LostRank, match="rank 1 has not been seen for 2 s"):
            writer.wait()
        assert time.monotonic() - begin < 20
        os.kill(int((tmp_path / "stuck").read_text("utf-8")), signal.SIGKILL)

    assert tc.in_ranks(2, action) == [0, -signal.SIGKILL]


@pytest.mark.dist
@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_writing_leaves_nobody_waiting(tmp_path: Path, dying: int) -> None:
    tc.save(tmp_path, 2)

    def action(world: ranks.World) -> None:
        writer = Writer(True)
        if world.rank == dying:
            checkpoint.write_state = lambda path, state: os.kill(os.getpid(), signal.SIGKILL)
        save_in_ranks(writer, world, tmp_path, 3)
        with pytest.raises(UserError, match="another rank has died"):
            writer.wait()

    statuses = tc.in_ranks(2, action)
    assert statuses[dying] == -signal.SIGKILL and statuses[1 - dying] == 0
    assert checkpoint.find_latest(tmp_path, pytest.fail).name == "step_000002"


def test_importing_begins_no_thread() -> None:
    before = threading.active_count()
    runpy.run_path(write_behind.__file__)
    assert threading.active_count() == before
