"""pretrain.py on 2 and 4 gloo ranks with every option of ddp.py: each changes what it should, and resumes to the bit.

Most runs share a start of the ranks (jobs.py). What was interrupted is continued by a later one.
"""

import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import forks
import pytest
import test_pretrain as tp
import torch
from jobs import STOP, run_on_ranks
from saved import load_train_state

from groundup.tokens.batches import Batches
from groundup.tokens.packing import pack
from groundup.train import huggingface
from tokenizer import Tokenizer

data_dir, run, mixed = tp.data_dir, tp.run, tp.mixed
pytestmark = pytest.mark.dist

STEPS = 4
COMMON = ["--n_layer=3", "--dropout=0.1", f"--max_steps={STEPS}", "--save_every=2"]  # 5 buckets, see jobs.py
COMMON += ["--eval_every=3", "--eval_steps=1", "--timeout_s=200", "--peak_tflops=1", "--warmup_steps=1"]
OPTIONS = {  # a run is named by the number of its ranks and these words; Muon unless AdamW is said
    "half": ["--dtype=float16", "--batch_size=1", "--grad_clip=0.5"],  # a GradScaler; 2 micro-steps
    "float": ["--dtype=float32", "--batch_size=2", "--grad_clip=0"],
    "spread": ["--dtype=float32", "--batch_size=1", "--dropout=0", "--total_batch_tokens=256"],  # by 1, 2 or 4 ranks
    "adamw": ["--optimizer=adamw"],
    "zero1": ["--zero1=True"],
    "forward": ["--overlap_step=forward"],
    "backward": ["--overlap_step=backward"],
    "fp16": ["--compress=fp16"],
    "bf16": ["--compress=bf16"],
    "powersgd": ["--compress=powersgd"],
    "recompute": ["--activation_checkpointing=True"],
    "still": ["--dropout=0"],  # compiled, dropout draws other numbers
    "compiled": ["--compile=True"],
    "long": ["--max_steps=15", "--save_every=4"],
    "fsdp": ["--parallel=fsdp", "--optimizer=adamw"],
    "tree": ["--reproducible=True", "--dtype=bfloat16", "--batch_size=1", "--total_batch_tokens=128"],
    "clipped": ["--grad_clip=0.1", "--activation_checkpointing=True", "--tie_embeddings=False"],
    # At ten times this learning rate step 4 has a peak, which makes much of the rounding.
    "brain": ["--dtype=bfloat16", "--dropout=0", "--learning_rate=1e-3"],
    "packed": ["--dtype=float32", "--dropout=0", "--pack=True", "--total_batch_tokens=256"],
}
STRAIGHT = [
    "2 half", "2 half zero1 forward bf16", "2 half powersgd", "2 float backward zero1 fp16",
    "2 float zero1 forward long", "2 spread adamw", "2 spread zero1", "2 spread clipped adamw", "2 spread clipped fsdp",
    "2 brain adamw", "2 brain fsdp", "2 tree clipped", "2 packed",
]  # fmt: skip
STOPPED = "2 half zero1 forward bf16"  # by a signal to one rank
RESUMED = [STOPPED, "2 half powersgd", "2 float backward zero1 fp16"]  # by as many ranks
MOVES = [  # new run, and the straight one from whose step 2 it goes on
    "1 spread from 2 spread zero1", "4 spread zero1 adamw from 2 spread adamw",
    "1 spread clipped adamw from 2 spread clipped fsdp", "4 spread fsdp from 2 spread adamw",
    "4 tree clipped zero1 forward from 2 tree clipped", "1 tree clipped from 2 tree clipped",
]  # fmt: skip


# ---- many runs in one start ---------------------------------------------------------------------------------------


def all_flags(out: Path, data_dir: Path, *more: str) -> list[str]:
    """Command line of the run that the name of its directory describes."""
    ranks, *words = out.name.partition(" from ")[0].split()
    flags = [flag for word in words for flag in OPTIONS[word]] + list(more)
    data_dir = data_dir.with_name("packed") if "packed" in words else data_dir
    common = [*COMMON, f"--total_batch_tokens={64 * int(ranks)}", f"--data_dir={data_dir}", f"--out_dir={out}"]
    return tp.flags_with_defaults(tuple(tp.flags_with_defaults(tuple(flags), common)), tp.TINY)


@pytest.fixture(scope="session")
def runs(tmp_path_factory, data_dir, mixed) -> Path:
    """Folder with straight/NAME and broken/NAME (interrupted, then resumed, unless that is by one rank)."""
    folder = tmp_path_factory.mktemp("runs")
    straight, broken = folder / "straight", folder / "broken"
    tp.write_documents(data_dir.with_name("packed"), mixed, shortest=18, longest=40)
    pack(data_dir.with_name("packed"), 32, seed=1)

    def run_all(ranks: int, outs: list[Path], stopped: Path | None = None) -> None:
        jobs = [(all_flags(out, data_dir), out == stopped) for out in outs if out.name.startswith(str(ranks))]
        run_on_ranks(ranks, "pretrain.py", jobs, folder)

    run_all(2, [*(straight / name for name in STRAIGHT), broken / STOPPED], stopped=broken / STOPPED)
    for name in RESUMED[1:] + MOVES:  # with what the straight run had saved at step 2
        source = straight / name.rpartition(" from ")[2]
        later = shutil.ignore_patterns(f"step_{STEPS:06d}", "*est*")
        shutil.copytree(source, broken / name, symlinks=True, ignore=later)
    for ranks in (2, 4):
        run_all(ranks, [broken / name for name in RESUMED + MOVES])
    return folder


def assert_same_ranks(a: Path, b: Path) -> None:
    """Losses, weights, optimizer and what each rank has of its own, to the bit."""
    tp.assert_same_run(a, b)
    for rank in range(int(a.name[0])):
        mine, theirs = (load_train_state(out / "latest", rank)[1] for out in (a, b))
        assert torch.equal(mine["rng"]["cpu"], theirs["rng"]["cpu"])
        assert ("powersgd" in mine) == ("powersgd" in theirs) == ("powersgd" in a.name)
        for name, state in mine.get("powersgd", {}).items():
            for key in ("error", "basis"):
                assert torch.equal(state[key], theirs["powersgd"][name][key]), (rank, name, key)


# ---- what the options change, and what not ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_an_interrupted_run_ends_like_a_straight_one(runs, name):
    """From its last save, and from that after SIGTERM to one rank in step 3; other processes go on from there."""
    saves = [event["step"] for event in tp.events(runs / "broken" / name, "save")]
    assert saves == ([2, STOP, STEPS] if name == STOPPED else [2, STEPS])
    assert_same_ranks(runs / "straight" / name, runs / "broken" / name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plain", "rel"), [
    ("2 spread clipped fsdp", "2 spread clipped adamw", 1e-6), ("2 brain fsdp", "2 brain adamw", 2e-3),
])  # fmt: skip
def test_fsdp_trains_like_ddp(runs, name, plain, rel):
    """A checkpoint has the same files, which transformers reads (tests/train/test_interop.py)."""
    straight = runs / "straight"
    for key, within in (("loss", rel), ("grad_norm", 10 * rel)):
        found, expected = ([event[key] for event in tp.events(straight / run, "train")] for run in (name, plain))
        assert found == pytest.approx(expected, rel=within), key
    ours, theirs = (huggingface.load_model(straight / run / "latest").state_dict() for run in (name, plain))
    for key, weight in theirs.items():
        assert (ours[key] - weight).norm() < 50 * rel * weight.norm(), key
    latest, other = (straight / run / "latest" for run in (name, plain))
    models, others = (sorted(path.glob("model*")) for path in (latest, other))
    assert [path.name for path in models] == [path.name for path in others] == ["model.safetensors"]
    assert models[0].stat().st_size == others[0].stat().st_size
    assert (latest / "config.json").read_bytes() == (other / "config.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "whole", "first"), [
    ("2 half powersgd", "2 half", 2), ("2 half zero1 forward bf16", "2 half", 1),
])  # fmt: skip
def test_compression_changes_a_little(runs, name, whole, first):
    """Only after the first compressed step; PowerSGD sends those of the warm-up whole."""
    plain, compressed = (tp.losses(runs / "straight" / run) for run in (whole, name))
    assert plain[:first] == compressed[:first]
    assert plain == pytest.approx(compressed, rel=0.01) and plain != pytest.approx(compressed, rel=2e-6)


@pytest.mark.slow
def test_each_rank_saves_its_own_powersgd_errors(runs):
    path = runs / "straight" / "2 half powersgd" / "latest"
    first, second = (load_train_state(path, rank)[1]["powersgd"] for rank in range(2))
    assert {"layers.0.self_attn.q_proj.weight", "layers.2.mlp.down_proj.weight"} <= first.keys()
    for name in first:
        assert torch.equal(first[name]["basis"], second[name]["basis"])
        assert not torch.equal(first[name]["error"], second[name]["error"])


@pytest.mark.slow
def test_packed_rows_on_two_ranks_have_the_mean_over_the_targets_of_both(runs, run, data_dir, tmp_path):
    """Against one process and one micro-step. Rows have unlike numbers of targets: a mean of each rank's mean, or of
    each micro-batch's, would be another loss."""
    out = tmp_path / "1 packed"
    assert run(*all_flags(out, data_dir, "--batch_size=8")) == 0
    for key in ("loss", "grad_norm"):
        one, two = ([event[key] for event in tp.events(path, "train")] for path in (out, runs / "straight/2 packed"))
        assert two == pytest.approx(one, rel=1e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MOVES if "tree" not in name])
def test_a_run_goes_on_with_another_number_of_ranks(runs, run, data_dir, name):
    """With ZeRO-1 and without, from and to it. test_powersgd.py has the errors of PowerSGD."""
    moved, straight = runs / "broken" / name, runs / "straight" / name.partition(" from ")[2]
    if name.startswith("1 "):
        assert run(*all_flags(moved, data_dir)) == 0
    assert len(tp.losses(moved)) == STEPS and tp.losses(moved)[:2] == tp.losses(straight)[:2]
    assert tp.losses(moved) == pytest.approx(tp.losses(straight), rel=1e-5)


@pytest.mark.slow
def test_compiled_runs_train_like_eager_ones_and_resume_to_the_bit(tmp_path, data_dir):
    """All in one start of the ranks, which compile once (jobs.py refuses more)."""
    eager, name = "2 float zero1 forward still", "2 float zero1 forward still compiled"
    outs = [tmp_path / path for path in (eager, f"straight/{name}", f"broken/{name}", f"broken/{name}")]
    jobs = [(all_flags(out, data_dir, "--n_layer=2"), k == 2) for k, out in enumerate(outs)]
    run_on_ranks(2, "pretrain.py", jobs, tmp_path)
    assert_same_ranks(outs[1], outs[3])
    assert tp.losses(outs[3]) == pytest.approx(tp.losses(outs[0]), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MOVES if "tree" in name])
def test_reproducible_runs_have_the_same_bits_on_any_number_of_ranks(runs, run, data_dir, name):
    """Begun on two ranks, continued on four or one: with dropout, clipping, Muon and bfloat16."""
    moved = runs / "broken" / name
    if name.startswith("1 "):
        assert run(*all_flags(moved, data_dir)) == 0
    tp.assert_same_result(moved, runs / "straight" / "2 tree clipped")


# ---- several sources ----------------------------------------------------------------------------------------------


def run_counted(folder: str, eot_id: str, *flags: str) -> None:
    """pretrain.py on this rank, which appends to a file in `folder` how many rows of each source it takes."""
    original = Batches.next

    def counted(batches: Batches) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = original(batches)
        odd = int(tp.odd_rows(x, int(eot_id)).sum())
        with open(Path(folder) / f"{os.getpid()}.txt", "a", encoding="utf-8") as f:
            f.write(f"{len(x) - odd} {odd}\n")
        return x, y

    Batches.next = counted
    sys.argv = ["pretrain.py", *flags]
    runpy.run_path(str(tp.ROOT / "pretrain.py"), run_name="__main__")


@pytest.mark.slow
def test_counts_of_sources_are_exact_through_resumptions_on_other_numbers_of_ranks(tmp_path, mixed):
    """Two ranks, then one, then two: what they took, as they counted it, is what a straight run's log says."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tp.ROOT)}
    flags = [f"--data_dir={tp.STAGED.format(mixed)}", "--total_batch_tokens=1024", "--batch_size=8", "--eval_every=99"]
    flags += ["--schedule=constant", f"--max_epochs={mixed}/odd=0.9"]
    eot_id = str(Tokenizer.load(mixed).eot_id)
    for out, ranks, steps in (("straight", 1, 12), ("moved", 2, 3), ("moved", 1, 8), ("moved", 2, 12)):
        (tmp_path / "counts" / out).mkdir(parents=True, exist_ok=True)
        mine = tp.flags_with_defaults((*flags, f"--max_steps={steps}", f"--out_dir={tmp_path / out}"), tp.TINY)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        counted = [__file__, str(tmp_path / "counts" / out), eot_id]
        done = forks.run(
            [sys.executable, *launcher, *counted, *mine], cwd=tp.ROOT, env=env, text=True, timeout=200,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
    logs = {out: tp.events(tmp_path / out, "train") for out in ("straight", "moved")}
    for out, log in logs.items():
        rows = [line.split() for path in (tmp_path / "counts" / out).iterdir() for line in path.open(encoding="utf-8")]
        even, odd = (sum(int(row[k]) for row in rows) for k in (0, 1))
        assert even + odd == 12 * 32
        assert [log[-1]["tokens/even"], log[-1]["tokens/odd"]] == [32 * even, 32 * odd]
    assert [e["tokens/odd"] for e in logs["moved"]] == [e["tokens/odd"] for e in logs["straight"]]
    assert tp.events(tmp_path / "moved", "stage") == tp.events(tmp_path / "straight", "stage")
    assert len(tp.events(tmp_path / "moved", "stage")) == 4  # three of data_dir, and the end of the odd ones
    assert tp.losses(tmp_path / "moved") == pytest.approx(tp.losses(tmp_path / "straight"), rel=1e-5)


# ---- starts by torchrun -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_torchrun_restarts_after_kill_9_of_one_rank(runs, tmp_path, data_dir):
    out = tmp_path / "2 float zero1 forward long"
    jobs = tmp_path / "jobs.json"
    jobs.write_text(json.dumps([(all_flags(out, data_dir), False)]), encoding="utf-8")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=3"]
    process = forks.Popen(
        [sys.executable, *torchrun, tp.ROOT / "tests/jobs.py", "pretrain.py", jobs], cwd=tp.ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tp.ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    # A checkpoint is written behind training: kill only when one is there to continue from.
    tp.wait_for(lambda: tp.logged_steps(out) > 5 and any(out.glob("step_*/checksums.json")), process)
    os.kill(int(Path(f"{jobs}.1").read_text(encoding="utf-8")), signal.SIGKILL)
    output = tp.finish(process)
    # torchrun names the rank that it sees first: the killed one, or the other, which ends at once
    assert re.search(r"continuing .* after step [1-9]\d*(;.*)?\n", output), output
    assert re.search(r"exitcode: (-9|1)\b", output), output
    assert_same_ranks(runs / "straight" / out.name, out)


def start_without_torchrun(start: Callable, command: list[str]) -> list[subprocess.Popen]:
    """Two ranks, whose ends nobody watches."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [start(command, cwd=tp.ROOT, env=env | {"RANK": rank, "LOCAL_RANK": rank}, **pipes) for rank in "01"]


@pytest.mark.slow
def test_short_runs_end_without_a_word(tmp_path, data_dir):
    """Threads of gloo that outlive the interpreter would abort the process now and then."""
    command = tp.command(*all_flags(tmp_path / "2 float zero1 forward", data_dir, "--max_steps=2"))
    starts = iter((subprocess.Popen, forks.Popen))  # no fork of rank 0: an interpreter of its own ends
    ranks = start_without_torchrun(lambda *args, **options: next(starts)(*args, **options), command)
    (output, errors), others = (rank.communicate(timeout=300) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0] and errors == "" and others == ("", ""), (errors, others)
    *lines, last = output[output.index("step      0/2") :].splitlines()
    assert last.startswith("saved in ")
    assert [line[:11] for line in lines] == [f"step {step:6d}" for step in (0, 1, 2, 2)], output


# ---- options that do not go together ------------------------------------------------------------------------------

REFUSED = [  # flags, and words that the line must have
    (["--zero1=True", "--compress=powersgd"], "powersgd zero1=True"),
    (["--overlap_step=backward"], "overlap_step='backward' clip 'forward'"),
    (["--overlap_step=backward", "--grad_clip=0", "--dtype=float16"], "overlap_step='backward' float16 'forward'"),
    (["--overlap_step=backward", "--grad_clip=0", "--compress=powersgd"], "overlap_step='backward' PowerSGD 'forward'"),
    (["--compress=topk"], "compress none fp16 bf16 powersgd 'topk'"),
    (["--overlap_step=sideways"], "overlap_step off forward backward 'sideways'"),
    (["--parallel=fsdp"], "fsdp muon adamw"),
    (["--parallel=fsdp", "--optimizer=adamw", "--dtype=float16"], "fsdp GradScaler float16 bfloat16"),
    (["--parallel=fsdp", "--optimizer=adamw", "--zero1=True"], "fsdp zero1"),
    (["--parallel=fsdp", "--optimizer=adamw", "--sample_prompts=The"], "fsdp sample_prompts='' 'The'"),
]


@pytest.mark.parametrize(("flags", "says"), REFUSED, ids=[" ".join(flags) for flags, _ in REFUSED])
def test_options_that_do_not_go_together_are_one_line(run, tmp_path, capsys, flags, says):
    message = tp.refused(run, capsys, *flags)
    assert message.startswith("config: ") and all(word in message for word in says.split()), message
    assert not (tmp_path / "out").exists()


def test_what_is_refused_on_every_rank_ends_each_with_1_and_its_line_alone(tmp_path, data_dir):
    """Without torchrun, which would end the others."""
    out = tmp_path / "2 half zero1 powersgd"
    ranks = start_without_torchrun(forks.Popen, tp.command(*all_flags(out, data_dir)))
    for rank in ranks:
        errors = rank.communicate(timeout=60)[1]
        assert rank.returncode == 1, errors
        assert errors.count("\n") == 1 and errors.startswith("config: zero1=True"), errors
    assert not out.exists()


if __name__ == "__main__":
    run_counted(*sys.argv[1:])
