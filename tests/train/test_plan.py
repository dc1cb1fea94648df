"""The memory a run is planned to take, beside the tensors that are alive in a step and the peak of a process; and the
micro-batch that is chosen by it, beside all others."""

import json
import math
import os
import re
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
from configurator import defaults_of
from groundup.align.reward_model import RewardModel
from groundup.errors import UserError
from groundup.train import plan
from groundup.train import run as run_frame
from groundup.train.device import autocast, memory_limit
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device_type", "dtype", "shape"),
    [
        *(("cuda", torch.bfloat16, shape) for shape in SHAPES),
        *(("cuda", torch.float32, shape) for shape in ("plain", "recomputed", "adapters")),
        *(("cpu", torch.bfloat16, shape) for shape in ("plain", "documents", "no head")),
    ],
)
def test_the_table_is_the_peak_of_the_tensors_that_are_alive(monkeypatch, shape, dtype, device_type):
    """Within 10 %. As on a GPU: without the attention that only a CPU has."""
    if device_type == "cuda":
        monkeypatch.setattr(model, "MASKED_LENGTH", 0)
        monkeypatch.setattr(model.cpu_attention, "works", lambda *_: False)
        monkeypatch.setattr(model, "CHUNK_ELEMENTS", model.GPU_CHUNK_ELEMENTS)
    changes, how = SHAPES[shape]
    cfg = ModelConfig(**{"vocab_size": 512, "block_size": 128, "n_layer": 4, "n_head": 4, "n_embd": 128} | changes)
    measured = peak_of_a_step(cfg, 8, 128, dtype, how)
    trained = trainable_table(cfg, how.get("trainable", "all"), LORA)
    config = {
        "batch_size": 8, "block_size": 128, "optimizer": how.get("optimizer", "muon"), "compile": False,
        "activation_checkpointing": how.get("recompute", False), "base_dtype": "float32",
    }  # fmt: skip
    masked, head = how.get("documents", False), not how.get("score")
    table = memory_table(cfg, config, trained, masked, device_type, dtype, head)
    assert sum(table.values()) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("key", "factors"), [("total_batch_tokens", {"block_size": 32}), ("total_batch_pairs", {})])
def test_a_step_is_whole_micro_steps_on_all_ranks(key, factors):
    def counted(batch_size: int, total: int, world_size: int) -> int:
        return run_frame.count_per_step({"batch_size": batch_size, key: total}, key, **factors, world_size=world_size)

    one = factors.get("block_size", 1)
    for world_size in (1, 2, 3, 8):
        for size in (1, 2, 5):
            total = 30 * one * world_size
            assert counted(size, total, world_size) == total
            assert counted(size, 0, world_size) == size * one * world_size
            with pytest.raises(UserError, match=f"{key}={total + one} must be a multiple of batch_size"):
                counted(2 * size, total + one, world_size)


def plan_bytes(output: str) -> float:
    return float(re.search(r"memory +([\d.]+) GiB", output)[1]) * 2**30


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["--activation_checkpointing=True"]])
def test_a_run_peaks_below_its_plan(data_dir, tmp_path, how):
    """And not far below, with a vocabulary of 32,768."""
    flags = ["--n_layer=6", "--n_head=6", "--n_kv_head=6", "--n_embd=384", "--vocab_size=32768", "--block_size=256"]
    flags += ["--batch_size=4", "--max_steps=2", "--log_every=1", "--eval_steps=1", f"--data_dir={data_dir}", *how]
    flags += ["--device=cpu", "--dtype=float32", "--compile=False", "--peak_tflops=1", f"--out_dir={tmp_path / 'out'}"]
    flags += ["--save_every=1"]  # the plan counts the copy for saving
    done = subprocess.run(
        [sys.executable, "pretrain.py", *flags], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    peak, planned = tp.events(tmp_path / "out", "train")[-1]["memory_gib"] * 2**30, plan_bytes(done.stdout)
    assert 0.7 * planned < peak < planned


@pytest.mark.parametrize(
    "line, file",
    [
        ("0::/job/step", "job/step/memory.max"),
        ("0::/job/step", "job/memory.max"),  # of the group above
        ("0::/elsewhere/on/the/host", "memory.max"),  # a container sees its own group as the top
        ("7:cpu,memory:/job/step", "memory/job/step/memory.limit_in_bytes"),
    ],
)
def test_a_control_group_limits_the_memory(tmp_path, line, file):
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    assert memory_limit(str(proc), str(groups)) == math.inf
    (proc / "meminfo").write_text("MemTotal:       4 kB\nMemFree: 1 kB\n", encoding="utf-8")
    (proc / "self/cgroup").write_text(f"3:cpuset:/job\n{line}\n", encoding="utf-8")
    (groups / file).parent.mkdir(parents=True)
    for text, limit in (("max\n", 4096), ("3000\n", 3000), ("9223372036854771712\n", 4096)):
        (groups / file).write_text(text, encoding="utf-8")
        assert memory_limit(str(proc), str(groups)) == limit


@pytest.mark.parametrize("limit, warned", [(2**20, True), (2**40, False)])
def test_a_plan_that_does_not_fit_warns(monkeypatch, limit, warned):
    monkeypatch.setattr(plan, "memory_limit", lambda: limit)
    config = defaults_of(ROOT / "pretrain.py") | {"device": "cpu", "compile": False}
    text = plan.describe(ModelConfig(512, 64), config, "", 1, 1, torch.device("cpu"), torch.float32, 1e12)
    assert ("warning     needs" in text) == warned


@pytest.mark.parametrize("trainable, copied", [("all", True), ("lora", False)])
def test_answers_of_an_evaluation_are_planned_where_they_take_more_than_a_step(trainable, copied):
    """Packed matrices beside all weights; adapters generate with the matrices of training."""
    config = defaults_of(ROOT / "sft.py") | {"device": "cpu", "compile": False, "trainable": trainable, "batch_size": 1}
    cfg = ModelConfig(512, 16, n_layer=8, n_head=8, n_embd=512)
    text = plan.describe(cfg, config | {"block_size": 16}, "", 1, 1, torch.device("cpu"), torch.float32, 1e12)
    assert ("copy to answer with" in text) == copied


@pytest.mark.parametrize("stage, more", [("pretrain", 0), ("sft", 1), ("dpo", 1), ("reward", 1), ("rl", 1)])
def test_batches_of_other_lengths_take_more_of_a_cpus_heap(stage, more):
    config = defaults_of(ROOT / f"{stage}.py") | {"compile": False, "sample_prompts": "", "eval_answers": 0}
    text = plan.describe(ModelConfig(512, 1024), config, "", 1, 1, CPU, torch.float32, 1e12)
    parts = {part: float(n.replace(",", "")) for part, n in re.findall(r"[:,] ([a-z ]+) ([\d,]+) MiB", text)}
    held = sum(parts.values()) - parts["margin"] - parts["interpreter"]
    taken = parts["activations"] + parts["head"]
    assert parts["margin"] == pytest.approx(0.3 * held + more * plan.HOLES * taken, abs=3)


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
