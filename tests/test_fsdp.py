"""parallel='fsdp' where a rank dies or hangs, or its disk is full; sft.py and dpo.py; the plan.

Losses beside ddp's, other numbers of ranks and moves between the two are in test_pretrain_ranks.py. This file, run as a
script on each rank, executes a trainer with an accident.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import forks
import pytest
import test_pretrain as tp
import torch

from configurator import defaults_of
from groundup.demo import debug_data
from groundup.train import checkpoint, fsdp, plan
from model import ModelConfig

data_dir = tp.data_dir
STEPS = 8
LOST = ("stalled", "killed while saving")
FLAGS = ["--parallel=fsdp", "--optimizer=adamw", f"--max_steps={STEPS}", "--save_every=3", "--eval_every=99"]
FLAGS += ["--total_batch_tokens=128", "--timeout_s=4", "--async_save=False", "--peak_tflops=1"]


def hurt(accident: str, jobs: str) -> None:
    """Run trainers on this rank, one after the other; rank 1 has the accident, after the save of step 3."""
    number = {"stalled": signal.SIGSTOP, "killed while saving": signal.SIGKILL}.get(accident)
    reduce, save_weights, calls = fsdp.ReduceScatter.__call__, fsdp.save_weights, []

    def reduce_until(*args, **kwargs):
        calls.append(args)
        if len(calls) == 14:  # three groups of parameters: in the backward of step 5
            os.kill(os.getpid(), number)
        return reduce(*args, **kwargs)

    def save_until(path: Path, tensors: dict) -> None:
        if path.parent.name == ".step_000006.tmp" and number:
            os.kill(os.getpid(), number)
        elif path.parent.name == ".step_000006.tmp":
            raise OSError(28, "No space left on device")
        save_weights(path, tensors)

    if os.environ["RANK"] == "1" and accident == "stalled":
        fsdp.ReduceScatter.__call__ = reduce_until
    elif os.environ["RANK"] == "1" and accident:
        fsdp.save_weights = save_until
    for sys.argv in json.loads(jobs):
        try:
            runpy.run_path(str(tp.ROOT / sys.argv[0]), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise


def start(accident: str, *jobs: list[str]) -> list[subprocess.Popen]:
    """Start two ranks; by torchrun, or, for an accident, without: it would end the one when the other fails."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tp.ROOT)}
    rank_of = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [rank_of | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"] if accident else [{}]
    launcher = [] if accident else ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [sys.executable, *launcher, __file__, accident, json.dumps(jobs)]
    how = {"cwd": tp.ROOT, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return [forks.Popen(command, env=env | mine, **how) for mine in ranks]


def end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        output, errors = process.communicate(timeout=200)
        assert process.returncode == 0, output + errors


def job(out: Path, data_dir: Path) -> list[str]:
    flags = (*FLAGS, f"--data_dir={data_dir}", f"--out_dir={out}")
    return ["pretrain.py", *tp.flags_with_defaults(flags, tp.TINY)]


def lose(accident: str, out: Path, data_dir: Path) -> tuple[str, float, str]:
    """Run until rank 1 is lost. Return the other's standard error, the seconds that it lived on, and what is latest."""
    alive, lost = start(accident, job(out, data_dir))
    stat = Path(f"/proc/{lost.pid}/stat")
    tp.wait_for(lambda: stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "TZ", alive)
    begin = time.monotonic()
    errors = alive.communicate(timeout=60)[1]
    seconds = time.monotonic() - begin
    lost.kill()
    lost.communicate()
    assert alive.returncode == 1
    return errors, seconds, (out / "latest").resolve().name


@pytest.fixture(scope="module")
def lost(tmp_path_factory, data_dir) -> dict[str, tuple[str, float, str]]:
    """What `lose` returns for each accident, and the folder of the runs."""
    folder = tmp_path_factory.mktemp("fsdp")
    return {accident: lose(accident, folder / accident, data_dir) for accident in LOST} | {"folder": folder}


@pytest.fixture(scope="module")
def runs(lost, data_dir) -> Path:
    """Folder with a straight run of pretrain.py, those that lost a rank, continued, and sft.py and dpo.py with ddp and
    fsdp: in one start, which takes longer than they do."""
    folder = lost["folder"]
    jobs = [job(folder / name, data_dir) for name in ("straight", *LOST)]
    debug_data.make_debug_rows(folder / "data/sft.jsonl", lambda talks: [{"messages": talk} for talk in talks])
    debug_data.make_debug_rows(folder / "data/dpo.jsonl", debug_data.debug_pairs)
    common = ["--max_steps=4", "--eval_every=4", "--log_every=1", "--eval_steps=0", "--peak_tflops=1"]
    common += ["--block_size=256", "--val_fraction=0.2", "--device=cpu", "--dtype=float32", "--compile=False"]
    for script in ("sft", "dpo"):
        for parallel in ("ddp", "fsdp"):
            mine = [*common, f"--parallel={parallel}", f"--out_dir={folder}/{script} {parallel}"]
            mine += [f"--data={folder}/data/{script}.jsonl", f"--init_from={folder}/straight"]
            mine += ["--eval_answers=0", "--total_batch_tokens=0"] if script == "sft" else ["--total_batch_pairs=0"]
            jobs.append([f"{script}.py", *mine])
    end(start("", *jobs))
    return folder


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("accident", LOST)
def test_when_a_rank_is_lost_the_other_ends_with_a_line_and_a_new_start_goes_on(lost, runs, accident):
    """To the bit, from a checkpoint that is whole."""
    errors, seconds, latest = lost[accident]
    assert len(errors.strip().splitlines()) == 1 and "another rank has died or is stuck" in errors
    assert seconds < 20 and latest == "step_000003"
    tp.assert_same_run(runs / "straight", runs / accident)


@pytest.mark.dist
@pytest.mark.slow
def test_a_full_disk_of_one_rank_loses_that_save_alone(runs, data_dir):
    out = runs / "full disk"
    processes = start("full disk", job(out, data_dir))
    output = processes[0].communicate(timeout=100)[0] + processes[1].communicate()[0]
    assert output.count("cannot save") == 1 and "(rank 1: No space left on device)" in output, output
    assert [path.name for path in checkpoint.step_dirs(out)] == ["step_000003", f"step_{STEPS:06d}"]
    tp.assert_same_run(runs / "straight", out)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("script", ["sft", "dpo"])
def test_sft_and_dpo_train_as_with_ddp(runs, script):
    """Also from batches of evaluation, and of the reference, that two ranks cannot divide evenly."""
    for key, event in (("loss", "train"), ("val_loss", "eval")):
        one, two = ([e[key] for e in tp.events(runs / f"{script} {way}", event)] for way in ("ddp", "fsdp"))
        assert two == pytest.approx(one, rel=1e-5) and len(one) > 1


def test_the_plan_compares_what_a_rank_needs():
    """By hand for AdamW in float32: 16 bytes per parameter, of which N ranks divide 0, 8 or 16."""
    config = defaults_of(tp.ROOT / "pretrain.py") | {"device": "cpu", "compile": False, "optimizer": "adamw"}
    own = plan.PROCESS / 2**30
    config |= {"async_save": False, "batch_size": 1, "block_size": 64, "device_gib": 1.0 + own}
    cfg = ModelConfig(512, 64, n_layer=24, n_embd=512, n_head=8)
    cpu = torch.device("cpu")

    def devices(world_size: int, **changed: object) -> str:
        text = plan.describe(cfg, config | changed, "", 1, world_size, cpu, torch.float32, 1e12)
        return next((line for line in text.splitlines() if line.startswith("devices")), "")

    total = plan.parameter_table(cfg)["total"]
    ddp, zero1, sharded = (float(words.split()[-1]) for words in devices(4).partition(" GiB;")[0].split(",")[2:])
    assert ddp - zero1 == pytest.approx(1.3 * total * 6 / 2**30, abs=0.02)
    assert 1.3 * total * 12 / 2**30 - 0.15 < ddp - sharded < 1.3 * total * 12 / 2**30
    assert devices(4).endswith(" GiB: fsdp") and not devices(1)
    assert devices(4, device_gib=3.0 + own).endswith(": ddp") and devices(4, device_gib=1.3 + own).endswith(": zero1")
    assert devices(2, device_gib=0.6 + own).endswith(": none, fsdp needs 8")
    assert devices(2, device_gib=0.1 + own).endswith("none, lower batch_size or use activation_checkpointing=True")


if __name__ == "__main__":
    hurt(*sys.argv[1:])
