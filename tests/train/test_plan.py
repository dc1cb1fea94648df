"""The plan of a run: parameters as built, FLOPs as torch counts, more memory than a run takes."""

import json
import math
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import ddp
from groundup.align.reward_model import RewardModel
from groundup.kernels import attention, cross_entropy
from groundup.train import plan
from groundup.train.device import autocast, memory_limit
from groundup.train.lora import LoRAConfig, frozen_dtype, set_trainable, weights_in
from groundup.train.optim import Optimizer
from groundup.train.plan import flops_per_token, memory, parameter_table
from model import ModelConfig, Transformer

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
LORA = LoRAConfig(4, 8.0)
SMALL = {"vocab_size": 512, "block_size": 128, "n_layer": 4, "n_head": 4, "n_embd": 128}
CONFIG = {
    "batch_size": 8,
    "block_size": 128,
    "max_steps": 10,
    "trainable": "all",
    "optimizer": "adamw",
    "activation_checkpointing": False,
    "parallel": "ddp",
    "zero1": False,
    "compress": "none",
}


def shapes(cfg: ModelConfig, trainable: str = "all", kind: type = Transformer) -> Transformer:
    """Return a model without memory."""
    with torch.device("meta"):
        net = kind(cfg)
        set_trainable(net, trainable, LORA)
    return net


def described(world_size: int = 1, cfg: ModelConfig | None = None, **changes: object) -> str:
    net = shapes(cfg or ModelConfig(**SMALL))
    peak = changes.pop("peak", 1e9)
    config = CONFIG | changes
    return plan.describe(net, config, "a batch", 10_000, world_size, CPU, torch.float32, peak)


# ---- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False},
        {"qkv_bias": True},
        {"n_kv_head": 2, "head_dim": 16, "qk_norm": True},
    ],
)
@pytest.mark.parametrize("trainable", ["all", "lora", "lora,embed"])
def test_every_parameter_is_in_one_part(changes, trainable):
    net = shapes(ModelConfig(**SMALL | changes), trainable)
    marks = {"adapters": "lora", "embedding": "embed_tokens", "biases": ".bias", "norms": "norm"}
    marks |= {"attention": "self_attn", "mlp": "mlp", "head": "lm_head"}
    for trained in (False, True):
        counted = dict.fromkeys(marks, 0)
        for name, p in net.named_parameters():
            part = next(part for part, mark in marks.items() if mark in name)
            counted[part] += p.numel() * (p.requires_grad or not trained)
        table = parameter_table(net, trained)
        assert table.pop("total") == sum(counted.values())
        assert table == counted


def test_parameters_of_published_models():
    # Llama 2 7B, from its model card: the total, and without embedding and head.
    cfg = ModelConfig(32000, 8, 32, 32, n_embd=4096, ffn_dim=11008, tie_embeddings=False)
    table = parameter_table(shapes(cfg))
    assert table["total"] == 6_738_415_616
    assert table["total"] - table["embedding"] - table["head"] == 6_476_271_616
    # 2 * 64793 * 512 + 8 * (4 * 512 * 512 + 3 * 512 * 1376 + 2 * 512) + 512
    cfg = ModelConfig(
        vocab_size=64793, n_embd=512, n_layer=8, n_head=8, ffn_dim=1376, tie_embeddings=False
    )
    assert parameter_table(shapes(cfg))["total"] == 91_653_632


# ---- FLOPs ---------------------------------------------------------------------------------------


def plain_attention(
    q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0, enable_gqa=False
) -> Tensor:
    """Attention as two matrix products, which torch's counter sees: the full square of scores."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return (q @ k.transpose(-1, -2)).softmax(dim=-1) @ v


def counted_flops(net: Transformer, monkeypatch: pytest.MonkeyPatch) -> float:
    """FLOPs per token of a step, counted by torch.

    In bfloat16, because the counter does not know addmm_, which adds up the head's gradient in
    float32.
    """
    monkeypatch.setattr(attention, "c_kernel_works", lambda *_: False)
    monkeypatch.setattr(F, "scaled_dot_product_attention", plain_attention)
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 9 * 97)
    x = torch.randint(97, (2, 32))
    counter = FlopCounterMode(display=False)
    with counter, torch.autocast("cpu", dtype=torch.bfloat16):
        net(x, x).backward()
    return counter.get_total_flops() / x.numel()


TINY = {"vocab_size": 97, "block_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 64}


@pytest.mark.parametrize("changes", [{"tie_embeddings": False}, {"n_kv_head": 2, "head_dim": 24}])
def test_flops_equal_torchs_count(changes, monkeypatch):
    net = Transformer(ModelConfig(**TINY | changes))
    assert counted_flops(net, monkeypatch) == flops_per_token(net, 32)


def test_flops_of_frozen_matrices_equal_torchs_count(monkeypatch):
    net = Transformer(ModelConfig(**TINY))
    set_trainable(net, "lora", LoRAConfig(2, 4.0))
    first = net.layers[0].self_attn
    # The input of the first block gets no gradient.
    spared = 0
    for linear in (first.q_proj, first.k_proj, first.v_proj):
        spared += 2 * (linear.weight.numel() + linear.lora_A.weight.numel())
    assert counted_flops(net, monkeypatch) == flops_per_token(net, 32) - spared


def test_a_reward_model_has_no_logits():
    cfg = ModelConfig(**TINY)
    without = flops_per_token(shapes(cfg, kind=RewardModel), 32)
    assert flops_per_token(shapes(cfg), 32) - without == 6 * 97 * 64


# ---- memory --------------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """Counts the bytes of the storages that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in self.known:
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


SHAPES = {
    "plain": ({}, {}),
    "muon": ({}, {"optimizer": "muon"}),
    "recomputed": ({"n_layer": 6}, {"activation_checkpointing": True}),
    "large vocabulary": ({"vocab_size": 16384, "n_layer": 1}, {}),
    "grouped": ({"n_kv_head": 2, "qk_norm": True}, {}),
    "adapters": ({}, {"trainable": "lora"}),
    "no head": ({"vocab_size": 4096}, {}),
}


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, torch.float32) for shape in SHAPES]
    + [(shape, torch.bfloat16) for shape in ("plain", "adapters")],
)
def test_a_step_holds_less_than_planned(shape, dtype):
    """And more than half of it, without the margin."""
    changes, settings = SHAPES[shape]
    cfg, config = ModelConfig(**SMALL | {"n_layer": 2} | changes), CONFIG | settings | {"block_size": 64}
    trainable = config["trainable"]
    torch.manual_seed(0)
    x = torch.randint(cfg.vocab_size, (8, 64))
    with Alive() as alive:
        with weights_in(frozen_dtype(trainable, dtype)):
            net = (RewardModel if shape == "no head" else Transformer)(cfg)
        set_trainable(net, trainable, LORA)
        net.activation_checkpointing = config["activation_checkpointing"]
        parallel = ddp.DDP(net)
        opt = Optimizer(parallel.buckets, config["optimizer"])
        scaler = torch.amp.GradScaler(enabled=False)
        for _ in range(2):
            with autocast(CPU, dtype):
                loss = net(x).sum() if shape == "no head" else net(x, x)
            loss.backward()
            del loss
            parallel.step(opt, lr=1e-3, clip=1.0, scaler=scaler)
    parts = memory(net, config, 1, CPU, dtype)
    left_out = parts["margin"] + parts["interpreter"] + parts["copy to save"]
    planned = sum(parts.values()) - left_out
    assert planned / 2 < alive.peak < planned + parts["margin"]


def test_state_of_one_rank():
    net = shapes(ModelConfig(**SMALL))
    n, table = parameter_table(net)["total"], parameter_table(net)

    def planned(**changes: object) -> dict[str, float]:
        return memory(net, CONFIG | changes, 4, CPU, torch.float32)

    plain = planned()
    assert (plain["weights"], plain["gradients"], plain["optimizer"]) == (4 * n, 4 * n, 8 * n)
    assert plain["copy to save"] == 12 * n
    matrices = table["attention"] + table["mlp"]
    assert planned(optimizer="muon")["optimizer"] == 8 * n - 4 * matrices
    assert planned(zero1=True)["optimizer"] == 2 * n
    sharded = planned(parallel="fsdp")
    assert (sharded["weights"], sharded["gradients"], sharded["optimizer"]) == (n, n, 2 * n)
    assert planned(compress="powersgd")["compression error"] == 4 * matrices
    # four micro-steps on each of four ranks: sums of one and of two micro-batches wait
    assert planned(reproducible=True, total_batch_tokens=16 * 8 * 128)["sums"] == 2 * 4 * n
    assert planned(reproducible=True, total_batch_tokens=0)["sums"] == 0
    assert memory(net, CONFIG, 1, CPU, torch.float32, {"reference": 5.0})["reference"] == 5.0


def test_frozen_weights_take_only_themselves():
    cfg = ModelConfig(**SMALL)
    with torch.device("meta"), weights_in(torch.bfloat16):
        net = Transformer(cfg)
    set_trainable(net, "lora", LORA)
    trained = parameter_table(net, trained=True)["total"]
    parts = memory(net, CONFIG | {"optimizer": "muon"}, 1, CPU, torch.bfloat16)
    assert (parts["gradients"], parts["optimizer"]) == (4 * trained, 8 * trained)
    frozen = parameter_table(net)["total"] - trained
    assert parts["weights"] == pytest.approx(2 * frozen + 4 * trained, rel=0.01)  # norms: float32


# ---- the text ------------------------------------------------------------------------------------


def test_a_plan_says_what_a_run_takes():
    net = shapes(ModelConfig(**SMALL))
    total, flops = parameter_table(net)["total"], flops_per_token(net, 128)
    lines = dict(line.split(maxsplit=1) for line in described().splitlines())
    assert list(lines) == ["parameters", "trained", "batch", "tokens", "compute", "memory", "time"]
    assert lines["parameters"].startswith(f"{total:,}: embedding 65,536, attention ")
    assert lines["trained"] == f"{total:,} (all)"
    assert lines["tokens"] == f"10,000 in 10 steps, {10_000 / total:.1f} per parameter"
    assert lines["compute"] == f"{flops:.3e} FLOPs per token, {10_000 * flops:.3e} in all, float32 on cpu"
    seconds = int(10_000 * flops / 0.4e9)
    at = f"0:{seconds // 60:02}:{seconds % 60:02} at 40 % of 1 x 0.00 TFLOP/s"
    assert lines["time"] == f"{at}; start-up and evaluations come on top"
    sizes = [float(n.replace(",", "")) for n in re.findall(r"([\d,]+) MiB", lines["memory"])]
    assert float(lines["memory"].split()[0]) == pytest.approx(sum(sizes) / 1024, abs=0.01)
    assert described(peak=0.0).splitlines()[-1].startswith("time        not known for this device")


def test_a_plan_says_that_model_py_is_edited(monkeypatch):
    assert "edited" not in described()
    monkeypatch.setattr(plan, "is_plain", lambda cfg: False)
    assert "is edited" in described()


def test_a_plan_counts_what_each_way_divides():
    cfg = ModelConfig(32000, 128, 8, 8, n_embd=1024)

    def memory_gib(**config: object) -> float:
        return float(re.search(r"memory +([\d.]+) GiB", described(8, cfg, **config))[1])

    assert memory_gib() > memory_gib(zero1=True) > memory_gib(parallel="fsdp")


@pytest.mark.parametrize("limit, warned", [(2**20, True), (2**40, False)])
def test_a_plan_that_does_not_fit_warns(monkeypatch, limit, warned):
    monkeypatch.setattr(plan, "memory_limit", lambda: limit)
    assert ("warning     needs" in described()) == warned


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


# ---- whole runs ----------------------------------------------------------------------------------


def planned_and_peak(out: Path, *flags: str) -> tuple[float, float]:
    """(planned, peak) GiB of two steps of pretrain.py."""
    common = [
        "--max_steps=2",
        "--warmup_steps=1",
        "--log_every=1",
        "--eval_steps=1",
        "--save_every=1",
        "--peak_tflops=1",
        "--total_batch_tokens=0",
        "--sample_prompts=",
    ]
    line = [sys.executable, str(ROOT / "pretrain.py"), str(ROOT / "config/debug.py"), *common]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*line, f"--out_dir={out}", *flags], cwd=ROOT, capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    lines = (out / "log.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    peak = max(event["memory_gib"] for event in events if event["event"] == "train")
    return float(re.search(r"memory +([\d.]+) GiB", done.stdout)[1]), peak


def of_size(n_layer: int, n_embd: int, block_size: int, batch_size: int) -> list[str]:
    heads = [f"--n_head={n_embd // 64}", f"--n_kv_head={n_embd // 64}", "--vocab_size=32768"]
    shape = [f"--n_layer={n_layer}", f"--n_embd={n_embd}", f"--block_size={block_size}"]
    return [*heads, *shape, f"--batch_size={batch_size}"]


@pytest.mark.slow
def test_a_run_peaks_below_its_plan(tmp_path):
    flags = [*of_size(2, 256, 128, 2), "--device=cpu", "--dtype=float32", "--optimizer=adamw"]
    planned, peak = planned_and_peak(tmp_path / "out", *flags)
    assert 0.5 * planned < peak < planned


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(6, 384, 256, 64), (12, 768, 1024, 16)])
@pytest.mark.parametrize(
    "how", [[], ["--compile=True"], ["--activation_checkpointing=True"], ["--optimizer=adamw"]]
)
def test_a_run_on_a_gpu_peaks_below_its_plan(tmp_path, shape, how):
    flags = [*of_size(*shape), "--device=cuda", "--dtype=bfloat16", *how]
    if "--compile=True" not in how:
        flags.append("--compile=False")
    planned, peak = planned_and_peak(tmp_path / "out", *flags)
    assert 0.5 * planned < peak < planned
