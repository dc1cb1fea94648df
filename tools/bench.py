"""Training throughput, with the peer beside it: steps of ours and of nanoGPT's model alternate in one process.

    OMP_NUM_THREADS=2 python tools/bench.py --nanogpt=../nanoGPT                  # a checkout of karpathy/nanoGPT
    python tools/bench.py --n_layer=12 --n_head=12 --n_embd=768 --block_size=1024 --batch_size=16

Prints tokens/s (median of `repeats` after a warm-up), the ratio, and the share of this machine's matrix-product
ceiling, measured here in the same dtype. Equal batch, block and vocabulary; parameters within a percent.
nanoGPT runs as it ships: on a GPU in bfloat16 and compiled, on a CPU in float32 without compile (its README's command).
"""

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import ddp as dist
import train_utils
from configurator import ConfigError, configure
from model import ModelConfig, Transformer, flops_per_token, parameter_table
from optim import Optimizer

# ---- config ---------------------------------------------------------------------------------------------------------
nanogpt = ""  # checkout of nanoGPT to run beside ours; "" = ours alone
n_layer = 6  # of both models
n_head = 6  # of both models
n_embd = 384  # of both models
vocab_size = 65  # of both models
block_size = 256  # tokens per sequence
batch_size = 16  # sequences per step
repeats = 7  # timed steps of each; the median counts
optimizer = "adamw,muon"  # ours: adamw, muon or both
compile = "False,True"  # ours: eager, compiled block by block, or both
device = "auto"  # auto | cpu | cuda | mps
dtype = "auto"  # ours: auto | float32 | bfloat16


def our_step(cfg: ModelConfig, tokens: torch.Tensor, kind: str, compiled: bool, dtype: torch.dtype) -> Callable:
    model = Transformer(cfg).to(tokens.device)
    ddp = dist.DDP(model)
    opt = Optimizer(ddp.buckets, kind)
    if compiled:
        model.compile_blocks(partial(torch.compile, dynamic=False))

    def step() -> None:
        with train_utils.autocast(tokens.device, dtype):
            loss = model(tokens, tokens) / tokens.numel()
        loss.backward()
        ddp.step(opt, lr=1e-3, clip=1.0)

    return step


def nanogpt_step(directory: str, cfg: ModelConfig, tokens: torch.Tensor) -> Callable:
    """A training step of nanoGPT's train.py on its own model, as it runs on this kind of device."""
    path = Path(directory) / "model.py"
    if not path.exists():
        raise ConfigError(f"config: nanogpt={directory!r} holds no model.py; give a checkout of karpathy/nanoGPT")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    shape = {"n_layer": cfg.n_layer, "n_head": cfg.n_head, "n_embd": cfg.n_embd, "vocab_size": cfg.vocab_size}
    model = module.GPT(module.GPTConfig(block_size=cfg.block_size, bias=False, dropout=0.0, **shape)).to(tokens.device)
    opt = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), tokens.device.type)
    on_gpu = tokens.device.type == "cuda"
    if on_gpu:
        model = torch.compile(model)

    def step() -> None:
        with train_utils.autocast(tokens.device, torch.bfloat16 if on_gpu else torch.float32):
            _, loss = model(tokens, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)

    return step


def timed(step: Callable, device: torch.device) -> float:
    train_utils.synchronize(device)
    begin = time.perf_counter()
    step()
    train_utils.synchronize(device)
    return time.perf_counter() - begin


if __name__ == "__main__":
    configure(globals())
    torch_device = train_utils.choose_device(device)
    torch_dtype = train_utils.choose_dtype(dtype, torch_device)
    cfg = ModelConfig(vocab_size, block_size, n_layer, n_head, n_embd=n_embd)
    tokens = torch.randint(0, vocab_size, (batch_size, block_size), device=torch_device)
    rows = {"nanoGPT": nanogpt_step(nanogpt, cfg, tokens)} if nanogpt else {}
    for kind in optimizer.split(","):
        for flag in compile.split(","):
            if flag not in ("True", "False"):
                raise ConfigError(f"config: compile must be True, False or both with a comma, got {compile!r}")
            name = f"ours, {kind}{', compiled' if flag == 'True' else ''}"
            rows[name] = our_step(cfg, tokens, kind, flag == "True", torch_dtype)
    for step in rows.values():
        timed(step, torch_device), timed(step, torch_device)  # compile, allocate
    times: dict[str, list[float]] = {name: [] for name in rows}
    ceilings = []
    for _ in range(repeats):
        ceilings.append(train_utils.peak_flops(torch_device, torch_dtype))
        for name, step in rows.items():
            times[name].append(timed(step, torch_device))
    ceiling, flops = statistics.median(ceilings), flops_per_token(cfg, block_size)
    print(
        f"{train_utils.hardware(torch_device)}, torch {torch.__version__}, "
        f"{parameter_table(cfg)['total']:,} parameters, {torch_dtype} ceiling {ceiling / 1e9:,.0f} GFLOP/s"
    )
    base = statistics.median(next(iter(times.values())))
    for name, seconds in times.items():
        rate = tokens.numel() / statistics.median(seconds)
        spread = (max(seconds) - min(seconds)) / statistics.median(seconds)
        print(
            f"{name:24} {rate:9,.0f} tok/s   x {base / statistics.median(seconds):5.2f}   "
            f"{100 * rate * flops / ceiling:5.1f}% of the ceiling   spread {100 * spread:.0f}%"
        )
