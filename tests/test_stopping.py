"""A signal while a trainer evaluates or draws answers: it leaves, saves and stops, and goes on as if nothing had been.

torchrun kills its ranks 30 s after it has passed a signal on, and an evaluation may take longer.
"""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import forks
import pytest
from golden import record

ROOT = Path(__file__).parent.parent
FLAGS = ["--max_steps=3", "--eval_every=2", "--save_every=3", "--keep_last=0", "--log_every=1", "--warmup_steps=1"]
FLAGS += ["--compile=False", "--batch_size=2"]
PAIRS = ["--eval_steps=8", "--total_batch_pairs=4"]
OWN_FLAGS = {
    "pretrain": ["--eval_steps=8", "--total_batch_tokens=256"],
    "sft": ["--eval_steps=8", "--total_batch_tokens=0", "--eval_new_tokens=4"],
    "dpo": PAIRS,
    "reward": PAIRS,
    "rl": ["--eval_prompts=4", "--prompts_per_step=4", "--group_size=2", "--max_new_tokens=8"],
}
STEP = 2


def command(trainer: str, out: Path, n_ranks: int, *flags: str, when: str = "", number: int = 0) -> list[str]:
    """A run of three steps that evaluates at 2 and saves at 3; with `when` a signal comes to the last rank."""
    start = [] if trainer == "pretrain" else ["--init_from=tests/golden/model"]
    mine = FLAGS + OWN_FLAGS[trainer]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n_ranks}"] if n_ranks > 1 else []
    script = [f"{trainer}.py"] if not when else [__file__, when, str(number), f"{trainer}.py"]
    return [sys.executable, *launcher, *script, *record.DATA[trainer], *start, *mine, *flags, f"--out_dir={out}"]


def run(*args, status: int | None = 0, **when) -> str:
    done = forks.run(
        command(*args, **when), cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == status or (status is None and done.returncode), done.stdout
    return done.stdout


SHARDED = ("--parallel=fsdp", "--optimizer=adamw", "--sample_prompts=")
CASES = [
    ("sft", 1, signal.SIGHUP, ("--eval_answers=2", "--sample_prompts=")), ("dpo", 1, signal.SIGUSR1, ("--loss=simpo",)),
    ("reward", 1, signal.SIGTERM, ()), ("rl", 1, signal.SIGTERM, ()), ("pretrain", 2, signal.SIGHUP, SHARDED),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("trainer", "n_ranks", "number", "flags"), CASES)
def test_an_evaluation_is_left_and_made_up_for(trainer, n_ranks, number, flags, tmp_path):
    straight, left = tmp_path / "straight", tmp_path / "left"
    run(trainer, straight, n_ranks, *flags)
    status = 128 + number if n_ranks == 1 else None  # torchrun has one of its own
    output = run(trainer, left, n_ranks, *flags, when="evaluation", number=number, status=status)
    assert f"stopped by a signal after step {STEP}; the same command continues" in output
    assert "BATCHES 1" in output and "BATCHES 2" not in output  # of many
    assert [path.name for path in sorted(left.glob("step_*"))] == [f"step_{STEP:06d}"]
    assert ["eval", STEP] not in [row[:2] for row in record.read_losses(left)]
    run(trainer, left, n_ranks, *flags)
    assert record.read_losses(left) == record.read_losses(straight)


@pytest.mark.slow
@pytest.mark.dist
def test_a_step_whose_answers_were_left_is_done_again(tmp_path):
    straight, left, n_ranks = tmp_path / "straight", tmp_path / "left", 2
    run("rl", straight, n_ranks)
    output = run("rl", left, n_ranks, when="drawing", number=signal.SIGTERM, status=None)
    assert "stopped by a signal after step 2; the same command continues" in output
    assert [path.name for path in sorted(left.glob("step_*"))] == ["step_000002"]
    run("rl", left, n_ranks)
    assert record.read_losses(left) == record.read_losses(straight)


# ---- the run that gets a signal -------------------------------------------------------------------------------------


def send(number: int) -> None:
    if os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1):
        os.kill(os.getpid(), number)


def signal_within_an_evaluation(number: int) -> None:
    """After its first batch, or its first token, unless it is the one before step 1."""
    from groundup.generate.engine import Engine
    from groundup.train import fsdp

    original, step, seen = fsdp.same_forwards, Engine.step, []

    def same_forwards(model, batches, stop_signal):
        for batch in original(model, batches, stop_signal):
            if stop_signal.begun:
                seen.append(1)
                send(number)
                print("BATCHES", len(seen), flush=True)
            yield batch

    fsdp.same_forwards = same_forwards
    if sys.argv[0] != "rl.py":
        return

    from groundup.align.rollouts import AnswerSampler

    draw = AnswerSampler.draw

    def counted(sampler, prompts, seeds, n):
        if n == 1 and sampler.stop.begun:
            seen.append(1)
            Engine.step = lambda *args, **keys: (send(number), print("BATCHES", len(seen)), step(*args, **keys))[2]
        return draw(sampler, prompts, seeds, n)

    AnswerSampler.draw = counted


def signal_within_step_3(number: int) -> None:
    """While its answers are drawn."""
    from groundup.generate.engine import Engine
    from groundup.train.log import RunLog

    step, advance, steps = Engine.step, RunLog.advance, []

    def count(log):
        steps.append(1)
        if len(steps) == 2:
            Engine.step = lambda *args, **keys: (send(number), step(*args, **keys))[1]
        advance(log)

    RunLog.advance = count


if __name__ == "__main__":
    when, number, *sys.argv = sys.argv[1:]
    {"evaluation": signal_within_an_evaluation, "drawing": signal_within_step_3}[when](int(number))
    runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
