"""parallel='fsdp': steps, weights and state against torch; a rank that dies or hangs, or whose disk is full; sft, dpo.

Losses beside ddp's, other numbers of ranks and moves between the two are in test_pretrain_ranks.py. This file, run as a
script on each rank, trains a model with fsdp.py, or executes a trainer with an accident.
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
from groundup.errors import UserError
from groundup.train import checkpoint, fsdp, ranks
from model import ModelConfig, Transformer

data_dir = tp.data_dir
TINY = ModelConfig(512, 16, n_layer=2, n_embd=64, n_head=4, tie_embeddings=False)
LR, CLIP = 1e-3, 0.5
STEPS = 5
LOST = ("stalled", "killed while saving")
FLAGS = ["--parallel=fsdp", "--optimizer=adamw", f"--max_steps={STEPS}", "--save_every=2", "--eval_every=99"]
FLAGS += ["--total_batch_tokens=128", "--timeout_s=4", "--peak_tflops=1"]


# ---- fsdp.py on two ranks, without a trainer ------------------------------------------------------------------------


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 512, (2, 3, 17), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: Transformer, idx: torch.Tensor) -> torch.Tensor:
    return model(idx[:, :-1], idx[:, 1:]) / (2 * 3 * 16)  # the mean over the tokens of two micro-steps


def expected() -> tuple[Transformer, torch.optim.Optimizer, list[float]]:
    """Return model, optimizer and gradient norms after 4 steps on the batches of both ranks, by torch alone."""
    torch.manual_seed(1)
    model, norms = Transformer(TINY), []
    groups = [[p for p in model.parameters() if (p.ndim >= 2) == matrices] for matrices in (True, False)]
    groups = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    for step in range(4):
        for rank in range(2):
            for idx in batch(rank, step):
                (loss_of(model, idx) / 2).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, norms


def train_sharded(folder: Path) -> None:
    """On each rank: the steps of `expected`, one more with a gradient that is not finite, and a save."""
    world = ranks.init("cpu", 60)
    torch.manual_seed(1)
    model = fsdp.build(Transformer, TINY, torch.device("cpu"), torch.float32, new=True)
    parallel, norms = fsdp.FSDP(model), []
    opt = fsdp.AdamW(parallel.params, (0.9, 0.95), 0.1)
    for step in range(5):
        for idx in batch(world.rank, step):
            (loss_of(model, idx) * (float("inf") if step == 4 and world.rank else 1)).backward()
        norms.append(parallel.step(opt, LR, CLIP).item())
    assert parallel.found_inf == 1 and parallel.skipped.tolist() == [1, 1] and parallel.n_updates == 5
    parallel.flush()

    with torch.no_grad():  # rank 1 has one batch more
        mine = batch(0, 0)[: 1 + world.rank, :, :16]
        logits = [model(idx) for idx in fsdp.same_forwards(model, mine)]
    assert len(logits) == 1 + world.rank

    weights, state = parallel.whole_weights(), opt.state_dict(keep=world.is_main)
    assert bool(weights) == bool(state) == world.is_main
    again = fsdp.AdamW(parallel.params)
    again.load_state_dict(ranks.gather_objects(state)[0])  # as all ranks read it from a file
    for name in opt.state:
        assert again.steps[name] == 4
        assert all(torch.equal(again.state[name][key], t) for key, t in opt.state[name].items())
    if world.is_main:
        torch.save({"norms": norms, "weights": weights, "state": state}, folder / "ours.pt")
    ranks.close()


@pytest.mark.dist
@pytest.mark.slow
def test_steps_weights_and_state_are_torchs_adamw_on_the_whole_model(tmp_path):
    end([launch(["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"], "train", str(tmp_path))])
    model, optimizer, norms = expected()
    ours = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert ours["norms"][:4] == pytest.approx(norms, rel=1e-5) and not ours["norms"][4] < float("inf")
    weights = ours["weights"]
    assert weights.keys() == ours["state"].keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        assert torch.allclose(weights[name], p, atol=1e-5), name
        theirs = optimizer.state[p]
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.allclose(ours["state"][name][key], theirs[key], rtol=1e-3, atol=1e-7), (name, key)


def test_settings_that_fsdp_cannot_combine_are_named(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    config = defaults_of(tp.ROOT / "pretrain.py") | {"optimizer": "adamw", "sample_prompts": ""}
    fsdp.check_settings(config, torch.float32)
    for key, value in (("compress", "bf16"), ("zero1", True), ("optimizer", "muon"), ("trainable", "lora")):
        with pytest.raises(UserError, match=f"needs {key}="):
            fsdp.check_settings(config | {key: value}, torch.float32)
    with pytest.raises(UserError, match="float16"):
        fsdp.check_settings(config, torch.float16)
    monkeypatch.delenv("RANK")
    with pytest.raises(UserError, match="torchrun"):
        fsdp.check_settings(config, torch.float32)


# ---- trainers -------------------------------------------------------------------------------------------------------


def hurt(accident: str, jobs: str) -> None:
    """Run trainers on this rank, one after the other; one rank has the accident, after the save of step 2."""
    number = {"stalled": signal.SIGSTOP, "killed while saving": signal.SIGKILL}.get(accident)
    reduce, write, calls, saves = fsdp.ReduceScatter.__call__, checkpoint.Saver._write, [], []
    write_state = checkpoint.write_state

    def reduce_until(*args, **kwargs):
        calls.append(args)
        if len(calls) == 8:  # three groups of parameters: in the backward of step 3
            os.kill(os.getpid(), number)
        return reduce(*args, **kwargs)

    def write_until(path: Path, state: dict) -> None:
        if path.parent.name == ".step_000004.tmp":
            raise OSError(28, "No space left on device")
        write_state(path, state)

    def save_until(*args) -> None:
        saves.append(args)
        if len(saves) == 2:  # of step 4
            os.kill(os.getpid(), number)
        write(*args)

    if os.environ["RANK"] == "1" and accident == "stalled":
        fsdp.ReduceScatter.__call__ = reduce_until
    elif os.environ["RANK"] == "1" and accident == "killed while saving":
        checkpoint.Saver._write = save_until
    elif os.environ["RANK"] == "0" and accident == "full disk":
        checkpoint.write_state = write_until
    for sys.argv in json.loads(jobs):
        try:
            runpy.run_path(str(tp.ROOT / sys.argv[0]), run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise


def launch(launcher: list[str], *args: str, **environment: str) -> subprocess.Popen:
    """Start this file with Python and these arguments."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tp.ROOT)} | environment
    how = {"cwd": tp.ROOT, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return forks.Popen([sys.executable, *launcher, __file__, *args], env=env, **how)


def start(accident: str, *jobs: list[str]) -> list[subprocess.Popen]:
    """Start two ranks; by torchrun, or, for an accident, without: it would end the one when the other fails."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    rank_of = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environments = [rank_of | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"] if accident else [{}]
    launcher = [] if accident else ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return [launch(launcher, accident, json.dumps(jobs), **mine) for mine in environments]


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
    return errors, seconds, max(path.name for path in out.glob("step_*"))


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
    debug_data.make_debug_rows(folder / "data/sft.jsonl", lambda talks: [{"messages": talk} for talk in talks][:45])
    debug_data.make_debug_rows(folder / "data/dpo.jsonl", lambda talks: debug_data.debug_pairs(talks)[:45])
    common = ["--max_steps=2", "--eval_every=2", "--log_every=1", "--eval_steps=0", "--peak_tflops=1"]
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
    assert seconds < 20 and latest == "step_000002"
    tp.assert_same_run(runs / "straight", runs / accident)


@pytest.mark.dist
@pytest.mark.slow
def test_a_full_disk_loses_that_save_alone(runs, data_dir):
    out = runs / "full disk"
    processes = start("full disk", job(out, data_dir))
    output = processes[0].communicate(timeout=100)[0] + processes[1].communicate()[0]
    assert output.count("cannot save") == 1 and "(No space left on device)" in output, output
    assert [path.name for path in checkpoint.step_dirs(out)] == ["step_000002", f"step_{STEPS:06d}"]
    tp.assert_same_run(runs / "straight", out)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("script", ["sft", "dpo"])
def test_sft_and_dpo_train_as_with_ddp(runs, script):
    """Also from batches of evaluation, and of the reference, that two ranks cannot divide evenly."""
    for key, event in (("loss", "train"), ("val_loss", "eval")):
        one, two = ([e[key] for e in tp.events(runs / f"{script} {way}", event)] for way in ("ddp", "fsdp"))
        assert two == pytest.approx(one, rel=1e-5) and len(one) > 1


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train_sharded(Path(sys.argv[2]))
    else:
        hurt(*sys.argv[1:])
