"""The memory a run is planned to take, beside the tensors that are alive in a step and the peak of a process; and the
micro-batch that is chosen by it, beside all others."""

import json
import os
import random
import re
import runpy
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path

import pytest
import test_pretrain as tp
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ddp
import model
from configurator import is_key, read_file, resolve
from groundup.align.reward_model import RewardModel
from groundup.errors import UserError
from groundup.train import checkpoint, plan
from groundup.train import run as runs
from groundup.train.device import autocast
from groundup.train.lora import LoRAConfig, set_trainable, trainable_table
from groundup.train.optim import Optimizer, stays_whole
from groundup.train.plan import memory_table
from model import ModelConfig, Transformer

data_dir, run = tp.data_dir, tp.run
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
MIB = 2**20
LORA = LoRAConfig(4, 8.0)


# ---- the table -------------------------------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """Counts the bytes of the storages that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.logsumexp.default:  # it forms the exponentials, too, out of sight
            self.peak = max(self.peak, self.bytes + args[0].nbytes)
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in self.known:
                self.add(t.untyped_storage())
        return result

    def add(self, storage: torch.UntypedStorage) -> None:
        self.known.add(storage._cdata)
        self.bytes += storage.nbytes()
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self.drop, storage._cdata, storage.nbytes())

    def drop(self, address: int, n_bytes: int) -> None:
        self.known.discard(address)
        self.bytes -= n_bytes


def peak_of_a_step(cfg: ModelConfig, B: int, T: int, dtype: torch.dtype, how: dict, device: torch.device = CPU) -> int:
    """Most bytes of tensors while a step runs, its weights and optimizer included."""
    torch.manual_seed(0)
    x = torch.randint(0, cfg.vocab_size, (B, T), device=device)
    with Alive() as alive:
        net = (RewardModel if how.get("score") else Transformer)(cfg).to(device)
        set_trainable(net, how.get("trainable", "all"), LORA)
        net.activation_checkpointing = how.get("recompute", False)
        net.document_id = 7 if how.get("documents") else None
        kind = how.get("optimizer", "muon")
        parallel = ddp.DDP(net, keep_whole=partial(stays_whole, kind))
        opt = Optimizer(parallel.buckets, kind)
        for _ in range(2):
            with autocast(device, dtype):
                loss = net(x).sum() if how.get("score") else net(x, x)
            loss.backward()
            del loss
            parallel.step(opt, lr=1e-3, clip=1.0)
    return alive.peak


SHAPES = {
    "plain": ({}, {}),
    "adamw": ({}, {"optimizer": "adamw"}),
    "recomputed": ({"n_layer": 8}, {"recompute": True}),
    "large vocabulary": ({"vocab_size": 32768, "n_layer": 2}, {}),
    "untied": ({"vocab_size": 8192, "tie_embeddings": False}, {}),
    "grouped": ({"n_kv_head": 2, "qk_norm": True}, {}),
    "adapters": ({}, {"trainable": "lora"}),
    "documents": ({}, {"documents": True}),
    "no head": ({"vocab_size": 4096}, {"score": True}),
    "no head, recomputed": ({"n_layer": 8}, {"score": True, "recompute": True}),
    "no head, adapters": ({"vocab_size": 4096}, {"score": True, "trainable": "lora"}),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("device_type", "dtype"), [("cuda", torch.float32), ("cuda", torch.bfloat16), ("cpu", torch.bfloat16)]
)
def test_the_table_is_the_peak_of_the_tensors_that_are_alive(monkeypatch, shape, dtype, device_type):
    """Within 10 %. As on a GPU: without the attention that only a CPU has."""
    if device_type == "cuda":
        monkeypatch.setattr(model, "PLAIN_ATTENTION_LENGTH", 0)
    changes, how = SHAPES[shape]
    cfg = ModelConfig(**{"vocab_size": 512, "block_size": 128, "n_layer": 4, "n_head": 4, "n_embd": 128} | changes)
    measured = peak_of_a_step(cfg, 8, 128, dtype, how)
    trained = trainable_table(cfg, how.get("trainable", "all"), LORA)
    table = memory_table(
        cfg, 8, 128, dtype, how.get("optimizer", "muon"), how.get("recompute", False), False, device_type,
        how.get("documents", False), trained["trainable"], trained["adapters"], not how.get("score"),
    )  # fmt: skip
    assert sum(table.values()) - table["allocator"] == pytest.approx(measured, rel=0.1)


# ---- the micro-batch -------------------------------------------------------------------------------------------------

CONFIG = {"batch_size": 0, "out_dir": "none", "resume": "auto", "activation_checkpointing": False}


def linear(config: dict) -> dict[str, float]:
    """100 bytes, and 10 for each sample or 3 with recomputation."""
    return {"weights": 100, "activations": (3 if config["activation_checkpointing"] else 10) * config["batch_size"]}


def fit(config: dict, n_samples: int, memory_of=linear, usable: float = 1e12) -> int:
    return plan.fit_batch_size(CONFIG | config, n_samples, memory_of, CPU, usable)[0]


def test_the_largest_that_divides_a_step_and_fits():
    assert fit({}, 12) == 12
    assert fit({}, 12, usable=100 + 10 * 11) == 6
    assert fit({}, 12, usable=100 + 10 * 4) == 4
    assert fit({}, 12, usable=100 + 10 * 4 - 1) == 3
    assert fit({}, 7, usable=100 + 10 * 6) == 1
    assert fit({"batch_size": 5}, 12, usable=0) == 5  # not asked to choose


@pytest.mark.parametrize("script", ["pretrain", "sft", "dpo", "reward"])
def test_every_trainer_chooses_by_its_own_plan(script):
    """Against all micro-batches, by the sum that the trainer prints."""
    trainer, rng = runpy.run_path(str(ROOT / f"{script}.py"), run_name="imported"), random.Random(script)
    config = {key: value for key, value in trainer.items() if is_key(key, value)}
    config |= {"batch_size": 0, "out_dir": "none", "block_size": 64, "compile": False}
    cfg = ModelConfig(512, 64, n_layer=2, n_head=4, n_embd=64)
    for world_size in (1, 2, 3, 8):
        n_samples = rng.choice([6, 12, 30, 64])
        memory_of = partial(trainer["memory"], cfg, LORA, world_size, torch.device("cuda"), torch.bfloat16)
        needed = {size: sum(memory_of(config | {"batch_size": size}).values()) for size in range(1, n_samples + 1)}
        usable = rng.uniform(needed[1], 1.2 * needed[n_samples])
        fitting = [size for size in needed if n_samples % size == 0 and needed[size] <= usable]
        assert plan.fit_batch_size(config, n_samples, memory_of, CPU, usable)[0] == max(fitting)
        line = plan.describe_parts(memory_of(config | {"batch_size": max(fitting)}))
        assert float(re.search(r"([\d.]+) GiB", line)[1]) == pytest.approx(needed[max(fitting)] / 2**30, abs=0.01)


@pytest.mark.parametrize(
    ("count", "key", "one"),
    [(runs.count_tokens, "total_batch_tokens", 32), (runs.count_pairs, "total_batch_pairs", 1)],
)
def test_a_step_is_whole_micro_steps_on_all_ranks(count, key, one):
    def counted(batch_size: int, total: int, world_size: int, eval_steps: int = 0) -> int:
        settings = {"batch_size": batch_size, "block_size": 32, key: total, "eval_steps": eval_steps}
        return count(settings, world_size)

    for world_size in (1, 2, 3, 8):
        for size in (1, 2, 5):
            total = 30 * one * world_size
            assert counted(size, total, world_size, eval_steps=3) == total
            assert counted(size, 0, world_size) == size * one * world_size
            with pytest.raises(UserError, match=f"{key}={total + one} must be a multiple of batch_size"):
                counted(2 * size, total + one, world_size)
        assert counted(0, total, world_size) == total
        with pytest.raises(UserError, match=f"not depend on the memory; give {key}"):
            counted(0, 0, world_size)
        with pytest.raises(UserError, match="eval_steps=3 counts such batches: .*give eval_steps=0"):
            counted(0, total, world_size, eval_steps=3)
    with pytest.raises(UserError, match=f"{key}={total + one} must be a multiple of .*world_size = "):
        counted(0, total + one, world_size)


def test_what_does_not_fit_says_what_would():
    with pytest.raises(UserError, match=r"batch_size=1 takes 0.00 GiB, .*=True takes 0.00 GiB, which fits; else a "):
        fit({}, 4, usable=105)
    with pytest.raises(UserError, match=r"which is still too much; else a shorter block_size"):
        fit({}, 4, usable=102)
    with pytest.raises(UserError, match=r"can be used; a shorter block_size"):
        fit({"activation_checkpointing": True}, 4, usable=102)


def test_a_run_that_goes_on_keeps_its_batch_size(tmp_path):
    (tmp_path / "config.py").write_text("seed = 1\nbatch_size = 3\ndraw_batch_size = 9\n", encoding="utf-8")
    config = {"out_dir": str(tmp_path)}
    assert fit(config, 12, usable=115) == 1  # it ended before its first checkpoint: 3 may have been too much
    (tmp_path / "step_000002").mkdir()
    assert fit(config, 12, usable=115) == 3
    assert fit(config | {"resume": "never"}, 12, usable=115) == 1
    assert fit(config | {"batch_size": 6}, 12, usable=115) == 6  # asked for
    assert fit(config, 16, usable=115) == 1  # on another number of ranks it does not divide


# ---- the memory that there is ----------------------------------------------------------------------------------------


def fake_system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("files", "least"),
    [
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/job/1\n", "sys/fs/cgroup/job/memory.max": "3000\n",
          "sys/fs/cgroup/job/memory.current": "1000\n", "sys/fs/cgroup/job/memory.stat": "anon 600\nfile 400\n",
          "sys/fs/cgroup/job/1/memory.max": "max\n"}, 2400),
        ({"proc/self/cgroup": "2:cpu:/\n4:memory:/job\n", "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "2000\n",
          "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "900\n",
          "sys/fs/cgroup/memory/job/memory.stat": "cache 7\ntotal_cache 100\n"}, 1200),
    ],
)  # fmt: skip
def test_usable_memory_is_what_the_system_and_the_group_leave(tmp_path, monkeypatch, files, least):
    root = fake_system(tmp_path, files | {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:     5 kB\n"})
    monkeypatch.setattr("groundup.train.device.ram_bytes", lambda field: {"VmRSS": 70}[field])
    for local in (1, 4):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        assert plan.usable_bytes(CPU, root) == pytest.approx(0.85 * ((least or 5120) / local + 70))


def test_memory_that_nobody_tells_is_not_guessed(tmp_path):
    with pytest.raises(UserError, match="nothing tells how much memory cpu has"):
        plan.usable_bytes(CPU, tmp_path)
    with pytest.raises(UserError, match="nothing tells how much memory mps has"):
        plan.usable_bytes(torch.device("mps"))


# ---- runs ------------------------------------------------------------------------------------------------------------


def chosen_in(out: Path) -> int:
    defaults = {k: v for k, v in runpy.run_path(str(ROOT / "pretrain.py"), run_name="imported").items() if is_key(k, v)}
    return read_file(str(out / "config.py"), defaults)["batch_size"]


def needed_by(size: int) -> float:
    """Bytes that the plan of a run of TINY with this batch_size adds up to, the process left out."""
    namespace = runpy.run_path(str(ROOT / "pretrain.py"), run_name="imported")
    defaults = {key: value for key, value in namespace.items() if is_key(key, value)}
    config = resolve(defaults, [*tp.flags_with_defaults((f"--batch_size={size}",), tp.TINY)])
    cfg = ModelConfig(512, 32, n_layer=2, n_head=4, n_kv_head=2, n_embd=32)
    return sum(namespace["memory"](cfg, LORA, 1, CPU, torch.float32, config).values())


def plan_bytes(output: str) -> float:
    return float(re.search(r"memory +([\d.]+) GiB", output)[1]) * 2**30


def test_a_run_chooses_and_resumes_with_what_it_chose(run, tmp_path, monkeypatch, capsys):
    """To the bit, though the second half would have chosen another; a step is the same tokens."""
    monkeypatch.setattr("groundup.train.device.process_bytes", lambda device: 0.0)
    flags = ["--total_batch_tokens=384", "--batch_size=0", "--dropout=0.1", "--save_every=3", "--eval_every=99"]
    flags += ["--eval_steps=0"]
    chosen, usable = 4, needed_by(5)
    monkeypatch.setattr(plan, "usable_bytes", lambda device: usable)
    assert run(*flags, "--max_steps=6", f"--out_dir={tmp_path / 'straight'}") == 0
    output = capsys.readouterr().out
    assert chosen_in(tmp_path / "straight") == chosen
    assert re.search(rf"= {chosen} sequences x 32 tokens x {12 // chosen} micro-steps", output)
    assert re.search(rf"batch_size  {chosen} chosen: \S+ of {usable / 2**30:.2f} GiB", output)
    assert run(*flags, "--max_steps=6", "--schedule=constant") == 0
    whole = tp.losses(tmp_path / "out")
    assert run(*flags, "--max_steps=3", "--schedule=constant", f"--out_dir={tmp_path / 'half'}") == 0
    monkeypatch.setattr(plan, "usable_bytes", lambda device: 1e12)
    capsys.readouterr()
    assert run(*flags, "--max_steps=6", "--schedule=constant", f"--out_dir={tmp_path / 'half'}") == 0
    assert f"batch_size  {chosen}, with which" in capsys.readouterr().out
    assert chosen_in(tmp_path / "half") == chosen and tp.losses(tmp_path / "half") == whole
    assert run(*(flags[:1] + flags[2:]), "--max_steps=7", "--batch_size=12", f"--out_dir={tmp_path / 'half'}") == 0
    assert chosen_in(tmp_path / "half") == 12


def test_mistakes_are_one_line(run, monkeypatch, capsys):
    for flags, text in [
        (["--batch_size=0"], "batch_size=0 takes as many as fit, and total_batch_tokens=0"),
        (["--batch_size=0", "--total_batch_tokens=384"], "eval_steps=4 counts such batches"),
        (["--batch_size=0", "--total_batch_tokens=48", "--eval_steps=0"], "a multiple of block_size\\*world_size = 32"),
        (["--batch_size=-1"], "batch_size must be at least 1"),
    ]:
        with pytest.raises(UserError, match=text):
            run(*flags)
    monkeypatch.setattr(plan, "usable_bytes", lambda device: 1e6)
    with pytest.raises(UserError, match="batch_size=1 takes .* 0.00 GiB can be used; activation_checkpointing=True"):
        run("--batch_size=0", "--total_batch_tokens=384", "--eval_steps=0")


@pytest.mark.dist
def test_ranks_take_what_fits_on_all_of_them(data_dir, tmp_path):
    """Rank 0 has room for a micro-batch of 12, rank 1 for fewer."""
    flags = [f"--data_dir={data_dir}", f"--out_dir={tmp_path / 'out'}", "--total_batch_tokens=768", "--batch_size=0"]
    flags = tp.flags_with_defaults((*flags, "--max_steps=2", "--peak_tflops=1", "--eval_steps=0"), tp.TINY)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*launcher, *flags], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "batch_size  12 chosen" in done.stdout and "batch_size  4, as much as fits on every rank" in done.stdout
    state = checkpoint.load_train_state(tmp_path / "out" / "latest", 0)[0]
    assert chosen_in(tmp_path / "out") == state["config"]["batch_size"] == 4
    assert tp.events(tmp_path / "out", "train")[-1]["tokens"] == 2 * 768


@pytest.mark.slow
def test_the_chosen_batch_peaks_at_the_plan(data_dir, tmp_path):
    """The peak of a process with batch_size=0 and 1 GiB, within 15 % of the plan that it printed, and no more."""
    flags = ["--n_layer=4", "--n_head=4", "--n_kv_head=4", "--n_embd=256", "--vocab_size=4096", "--block_size=256"]
    flags += ["--total_batch_tokens=8192", "--batch_size=0", "--max_steps=3", "--log_every=1", "--eval_steps=0"]
    flags += ["--device=cpu", "--dtype=float32", "--compile=False", "--peak_tflops=1", f"--data_dir={data_dir}"]
    flags += ["--save_every=2"]  # the plan counts the copy that is saved from
    code = f"import memory_plan, runpy, sys; memory_plan.usable_bytes = lambda device: {2**30}; "
    code += "sys.argv[0] = 'pretrain.py'; runpy.run_path('pretrain.py', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, *flags, f"--out_dir={tmp_path / 'out'}"], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    peak = tp.events(tmp_path / "out", "train")[-1]["memory_gib"] * 2**30
    assert peak == pytest.approx(plan_bytes(done.stdout), rel=0.15)
    assert 32 % chosen_in(tmp_path / "out") == 0


# ---- on a GPU (has not run) ------------------------------------------------------------------------------------------

GPU_SHAPES = {
    "10M": ["--n_layer=6", "--n_head=6", "--n_kv_head=6", "--n_embd=384", "--block_size=256", "--batch_size=64"],
    "124M": ["--n_layer=12", "--n_head=12", "--n_kv_head=12", "--n_embd=768", "--block_size=1024", "--batch_size=16"],
}


def gpu_run(out: Path, data_dir: Path, *flags: str) -> tuple[float, float]:
    """(peak, estimate) in bytes of three steps of pretrain.py."""
    common = ["--device=cuda", "--dtype=bfloat16", "--max_steps=3", "--log_every=1", "--eval_steps=0"]
    line = [sys.executable, str(ROOT / "pretrain.py"), *common, f"--data_dir={data_dir}", f"--out_dir={out}", *flags]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(text) for text in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return max(e["memory_gib"] for e in lines if e["event"] == "train") * 2**30, plan_bytes(done.stdout)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", GPU_SHAPES)
@pytest.mark.parametrize("how", [[], ["--compile=True"], ["--activation_checkpointing=True"], ["--optimizer=adamw"]])
def test_peak_on_a_gpu_is_the_plan(tmp_path, data_dir, shape, how):
    flags = [*GPU_SHAPES[shape], "--vocab_size=32768", *how]
    flags += [] if "--compile=True" in how else ["--compile=False"]
    peak, estimate = gpu_run(tmp_path / "out", data_dir, *flags)
    assert peak == pytest.approx(estimate, rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batch_size_0_fills_a_gpu_and_does_not_overflow_it(tmp_path, data_dir):
    flags = [*GPU_SHAPES["124M"][:-1], "--vocab_size=32768", "--compile=False", "--batch_size=0", "--max_steps=2"]
    peak, estimate = gpu_run(tmp_path / "out", data_dir, *flags, f"--total_batch_tokens={1024 * 1024}")
    total = torch.cuda.mem_get_info()[1]
    assert estimate <= plan.MEMORY_SHARE * total and peak < 0.95 * total


if __name__ == "__main__":  # a rank of test_ranks_take_what_fits_on_all_of_them
    rank = int(os.environ["RANK"])
    plan.process_bytes = lambda device: 0.0
    usable = 1e12 if rank == 0 else needed_by(5)
    plan.usable_bytes = lambda device: usable
    sys.argv[0] = str(ROOT / "pretrain.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
