"""Training steps of ours, of transformers and of nanoGPT on one batch, in turns in one process; bench.py's row `train`.

Ours is the step of pretrain.py. transformers' LlamaForCausalLM of the same shape has torch's fused attention, autocast
and fused AdamW in a plain loop; it is compiled, as a whole, where one of ours is, and as it is where one of ours is.
nanoGPT runs as it ships: on a GPU in bfloat16 and compiled, on a CPU in float32 without compile (its README's command).
The limit counts all of the square of attention (model.flops_per_token), half of which a causal kernel leaves out: with
long texts the share that is shown is above the share of the time in which the device multiplies.
"""

import importlib.util
import io
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from groundup.train.device import autocast, process_bytes
from groundup.train.log import read_events

sys.path.insert(0, str(Path(__file__).parent.parent))

import timing

import ddp as dist
from groundup.errors import UserError
from groundup.train import plan
from groundup.train.optim import Optimizer, stays_whole
from groundup.train.plan import flops_per_token, parameter_table
from model import ModelConfig, Transformer

SHAPES = {
    "tiny": ModelConfig(512, 64, 2, 2, n_embd=64),
    "10M": ModelConfig(65, 256, 6, 6, n_embd=384),  # nanoGPT's shakespeare_char
    "25M": ModelConfig(2048, 512, 8, 8, n_embd=512),
    "124M": ModelConfig(50304, 1024, 12, 12, n_embd=768),  # GPT-2
    "350M": ModelConfig(50304, 1024, 24, 16, n_embd=1024),  # GPT-2 medium
    "1.1B": ModelConfig(32000, 2048, 22, 32, 4, n_embd=2048, ffn_dim=5632, tie_embeddings=False),  # TinyLlama
}
PEERS = ("transformers", "transformers, compiled", "nanoGPT")
PARTS, MODES = ("none", "blocks", "whole"), ("", "max-autotune", "reduce-overhead")
Step = Callable[[], torch.Tensor | None]  # ours returns the loss


def parse_compile(value: str) -> list[tuple[str, str]]:
    """'none,whole:max-autotune' -> [('none', ''), ('whole', 'max-autotune')]. Raises ConfigError."""
    found = [tuple(name.partition(":")[::2]) for name in value.split(",")]
    for part, mode in found:
        if part not in PARTS or mode not in MODES or (mode and part == "none"):
            raise UserError(
                f"config: compile={value!r} must list {', '.join(PARTS)}; behind blocks and whole may stand "
                f"{' or '.join(f':{mode}' for mode in MODES[1:])}"
            )
    return found


# ---- steps ----------------------------------------------------------------------------------------------------------


def our_step(cfg: ModelConfig, tokens: torch.Tensor, kind: str, part: str, mode: str, dtype: torch.dtype) -> Step:
    """A step of pretrain.py: AdamW or Muon; not compiled, block by block, or as a whole."""
    model = Transformer(cfg).to(tokens.device)
    ddp = dist.DDP(model, keep_whole=partial(stays_whole, kind))
    muon_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
    opt = Optimizer(ddp.buckets, kind, muon_dtype=muon_dtype)
    compiled = partial(torch.compile, dynamic=False, **({"mode": mode} if mode else {}))
    if part == "blocks":
        model.compile_blocks(compiled)
    elif part == "whole":
        model.forward = compiled(model.forward)

    def step() -> torch.Tensor:
        if mode:  # CUDA graphs reuse the memory of the step before
            torch.compiler.cudagraph_mark_step_begin()
        ddp.expect_step(opt, 1e-3)
        with autocast(tokens.device, dtype):
            loss = model(tokens, tokens) / tokens.numel()
        loss.backward()
        ddp.step(opt, lr=1e-3, clip=1.0)
        return loss.detach()

    return step


def plain_step(model: torch.nn.Module, loss_of: Callable, opt: torch.optim.Optimizer, cast: Callable) -> Step:
    """The loop of everyone: backward, clip, step."""
    params = list(model.parameters())

    def step() -> None:
        with cast():
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)

    return step


def transformers_step(
    cfg: ModelConfig, tokens: torch.Tensor, dtype: torch.dtype, counts: dict[str, int], compiled: bool
) -> Step:
    from bench_generate import llama_config
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(llama_config(cfg)).to(tokens.device).train()
    counts["transformers"] = sum(p.numel() for p in model.parameters())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = torch.compile(model, dynamic=False) if compiled else model
    cast = partial(autocast, tokens.device, dtype)
    return plain_step(model, lambda: run(input_ids=tokens, labels=tokens, use_cache=False).loss, opt, cast)


def nanogpt_step(directory: str, cfg: ModelConfig, tokens: torch.Tensor, counts: dict[str, int]) -> Step:
    """A step of nanoGPT's train.py on its own model, as it runs on this kind of device."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(directory) / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    shape = {"n_layer": cfg.n_layer, "n_head": cfg.n_head, "n_embd": cfg.n_embd, "vocab_size": cfg.vocab_size}
    with redirect_stdout(io.StringIO()):  # it prints its size
        model = module.GPT(module.GPTConfig(block_size=cfg.block_size, bias=False, dropout=0.0, **shape))
        opt = model.to(tokens.device).configure_optimizers(0.1, 1e-3, (0.9, 0.95), tokens.device.type)
    counts["nanoGPT"] = sum(p.numel() for p in model.parameters())
    run = torch.compile(model) if tokens.device.type == "cuda" else model
    cast = partial(autocast, tokens.device, nanogpt_dtype(tokens.device))
    return plain_step(model, lambda: run(tokens, tokens)[1], opt, cast)


def nanogpt_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


# ---- all of them ----------------------------------------------------------------------------------------------------


class Options(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    repeats: int
    n_tokens: int  # of a step
    optimizers: list[str]  # ours: adamw, muon
    compiles: list[tuple[str, str]]  # ours: of parse_compile
    nanogpt: str  # checkout; "" = without


def compare(shape: str, options: Options) -> list[timing.Line]:
    """Tokens/s of all sides; the limit is this device's ceiling of matrix products, measured in the same turns."""
    timing.release()
    cfg, device, dtype = SHAPES[shape], options.device, options.dtype
    tokens = torch.randint(cfg.vocab_size, (max(1, options.n_tokens // cfg.block_size), cfg.block_size), device=device)
    case, counts = f"{shape}, batch {tokens.shape[0]} x {tokens.shape[1]}", {"ours": parameter_table(cfg)["total"]}
    makers, parts = {}, {part for part, _ in options.compiles}
    if "none" in parts:
        makers["transformers"] = partial(transformers_step, cfg, tokens, dtype, counts, compiled=False)
    if parts - {"none"}:
        makers["transformers, compiled"] = partial(transformers_step, cfg, tokens, dtype, counts, compiled=True)
    if options.nanogpt:
        makers["nanoGPT"] = partial(nanogpt_step, options.nanogpt, cfg, tokens, counts)
    for kind, (part, mode) in product(options.optimizers, options.compiles):
        name = ", ".join(filter(None, ["ours", kind, part if part != "none" else "", mode]))
        makers[name] = partial(our_step, cfg, tokens, kind, part, mode, dtype)
    asked, usable = needed_bytes(cfg, tokens.numel(), len(makers)), usable_bytes(device)
    if asked > usable:
        reason = f"left out: {len(makers)} models at once need {asked / 1e9:.0f} GB, {usable / 1e9:.0f} can be used"
        return [timing.Line("train", case, "all", "tok/s", note=reason)]
    steps, missing = timing.build(makers)
    sides = {name: timing.repeated(step, device) for name, step in steps.items()}
    found = timing.alternate(sides | {"ceiling": timing.matmul(device, dtype)}, options.repeats, warmups=0)
    limit = median(found.pop("ceiling")) / flops_per_token(cfg, cfg.block_size)
    notes = {name: f"{counts[name.partition(',')[0]] / 1e6:.1f}M parameters" for name in found}
    if "nanoGPT" in notes:
        notes["nanoGPT"] += f", {str(nanogpt_dtype(device))[6:]}"
    rows = timing.lines("train", case, found, "tok/s", PEERS, tokens.numel(), limit, notes)
    for line in rows:
        if line.side == "nanoGPT" and nanogpt_dtype(device) != dtype:
            line.limit = 0.0  # it is of products in another dtype
    return rows + [timing.Line("train", case, name, "tok/s", note=note) for name, note in missing.items()]


def usable_bytes(device: torch.device) -> float:
    """What can be filled beyond what the process holds now; infinite where the system does not tell."""
    try:
        return plan.usable_bytes(device) - process_bytes(device)
    except UserError:
        return math.inf


def needed_bytes(cfg: ModelConfig, N: int, n_models: int) -> float:
    """Roughly what the models hold at once: weights, gradients and AdamW's two of each; and what the hungriest keeps of
    N tokens for backward: 34 C bytes a layer in half precision (arXiv:2205.05198), here mixed with float32, and four
    times the logits in float32, of those who form all of them."""
    return 16 * parameter_table(cfg)["total"] * n_models + N * (80 * cfg.n_embd * cfg.n_layer + 16 * cfg.vocab_size)


def memory(shape: str, options: Options, kind: str, compiled: bool, folder: Path, side: str) -> timing.Line:
    """The peak of three steps of pretrain.py in a process of its own, and the estimate that it printed."""
    cfg = replace(SHAPES[shape], vocab_size=max(SHAPES[shape].vocab_size, 512))  # the debug corpus has as many ids
    keys = ("vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "ffn_dim", "tie_embeddings")
    out, batch_size = folder / f"memory-{shape}-{kind}-{compiled}", max(1, options.n_tokens // cfg.block_size)
    flags = [f"--{key}={getattr(cfg, key)}" for key in keys] + [f"--batch_size={batch_size}", f"--optimizer={kind}"]
    flags += [f"--device={options.device.type}", f"--dtype={str(options.dtype)[6:]}", f"--compile={compiled}"]
    flags += [f"--data_dir={folder / 'debug'}", f"--out_dir={out}", "--max_steps=3", "--log_every=3", "--eval_steps=1"]
    flags += ["--async_save=False"]  # it is stopped before it saves: there is no copy to save from
    timing.release()  # what this process holds the other one cannot have
    printed = timing.until_line([sys.executable, "pretrain.py", *flags], "step      3/")[1]
    found = re.search(r"^memory +([\d.]+) GiB", printed, re.MULTILINE)
    if not found:
        raise UserError(f"bench: pretrain.py printed no estimate of memory: {printed.strip()[-300:]!r}")
    estimate = float(found[1])
    peaks = [event["memory_gib"] for event in read_events(out / "log.jsonl") if event["event"] == "train"]
    note = f"peak of a process, {peaks[-1] / max(estimate, 1e-9):.2f} of the estimate {estimate:.2f}"
    return timing.Line("train", f"{shape}, memory", side, "GiB", [peaks[-1]], limit=estimate, note=note)


def measure(shapes: list[str], options: Options, with_memory: bool, folder: Path) -> Iterator[timing.Line]:
    """Speeds, then memory, of each shape. What fails is a line, and the next one has its turn."""
    for shape in shapes:
        yield from attempted(shape, "all", lambda shape=shape: compare(shape, options))
        ways = sorted({part == "blocks" for part, _ in options.compiles}) if with_memory else []
        for kind, compiled in product(options.optimizers, ways):
            call = partial(memory, shape, options, kind, compiled, folder)
            side = f"ours, {kind}{', blocks' if compiled else ''}"
            yield from attempted(f"{shape}, memory", side, lambda call=call, side=side: [call(side)])


def attempted(case: str, side: str, call: Callable[[], list[timing.Line]]) -> list[timing.Line]:
    try:
        return call()
    except torch.OutOfMemoryError:  # of a GPU
        note = "left out: out of memory; choose a smaller --tokens"
        return [timing.Line("train", case, side, "tok/s", note=note)]
    except Exception as error:
        return [timing.failure("train", case, side, error)]
