"""Row train: steps of ours, of transformers and of nanoGPT on the same batch, in turns in one process.

Ours is the step of pretrain.py. transformers' LlamaForCausalLM of the same shape runs in a plain loop with torch's
fused attention, autocast and fused AdamW; it is compiled as a whole where ours is compiled. nanoGPT runs as it ships:
bfloat16 and compiled on a GPU, float32 and not compiled on a CPU (the command of its README).
The limit counts the full square of attention (flops_per_token), half of which a causal kernel skips: with long texts
the share shown is above the share of time in which the device multiplies.
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

import timing
import torch
from timing import Line, Options

import ddp
from groundup.errors import UserError
from groundup.train.device import autocast
from groundup.train.log import read_events
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
Step = Callable[[], torch.Tensor | None]  # ours returns the loss


def train_row(options: Options) -> Iterator[Line]:
    """Tokens/s of a training step, then the peak memory of pretrain.py over its estimate."""
    on_gpu, names = options.device.type == "cuda", list(SHAPES)
    chosen = names[1:2] if options.quick else names[1:] if on_gpu else names[1:4]
    n_tokens = options.keys["tokens"] or (1024 if options.quick else 16384 if on_gpu else 4096)
    for shape in shapes_of(options, chosen):
        yield from attempted("train", shape, "all", lambda shape=shape: compare(shape, options, n_tokens))
        if not wants_memory(options):
            continue
        cfg = replace(SHAPES[shape], vocab_size=max(SHAPES[shape].vocab_size, 512))  # ids of the debug corpus
        flags = [f"--{key}={getattr(cfg, key)}" for key in (
            "vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "ffn_dim", "tie_embeddings"
        )]  # fmt: skip
        flags += [f"--batch_size={max(1, n_tokens // cfg.block_size)}", f"--data_dir={options.folder / 'debug'}"]
        for kind, way in product(options.keys["optimizer"].split(","), compile_ways(options)):
            side = f"ours, {kind}{', blocks' * (way == 'blocks')}"
            more = [*flags, f"--optimizer={kind}", f"--compile={way == 'blocks'}"]
            call = partial(memory, "train", f"{shape}, memory", side, "pretrain.py", more, options)
            yield from attempted("train", f"{shape}, memory", side, call)


def shapes_of(options: Options, otherwise: list[str]) -> list[str]:
    return otherwise if options.keys["shapes"] == "auto" else options.keys["shapes"].split(",")


def compile_ways(options: Options) -> list[str]:
    """Return the ways to run ours: some of none and blocks."""
    if options.keys["compile"] == "auto":
        return ["none"] if options.quick else ["none", "blocks"]
    return options.keys["compile"].split(",")


def wants_memory(options: Options) -> bool:
    return options.keys["memory"] == "True" or (options.keys["memory"] == "auto" and not options.quick)


def attempted(row: str, case: str, side: str, call: Callable[[], list[Line]]) -> list[Line]:
    """Return the lines of `call`; if it fails, a line with the error."""
    try:
        return call()
    except torch.OutOfMemoryError:  # of a GPU
        return [Line(row, case, side, "", note="left out: out of memory; choose smaller --tokens or --batch_size")]
    except Exception as error:
        return [timing.failure(row, case, side, error)]


# ---- steps ----------------------------------------------------------------------------------------------------------


def our_step(cfg: ModelConfig, tokens: torch.Tensor, kind: str, way: str, dtype: torch.dtype) -> Step:
    """Return a step of pretrain.py: AdamW or Muon; compiled block by block or not."""
    model = Transformer(cfg).to(tokens.device)
    parallel = ddp.DDP(model, keep_whole=partial(stays_whole, kind))
    muon_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
    opt = Optimizer(parallel.buckets, kind, muon_dtype=muon_dtype)
    if way == "blocks":
        model.compile_blocks(partial(torch.compile, dynamic=False))

    def step() -> torch.Tensor:
        parallel.expect_step(opt, 1e-3)
        with autocast(tokens.device, dtype):
            loss = model(tokens, tokens) / tokens.numel()
        loss.backward()
        parallel.step(opt, lr=1e-3, clip=1.0)
        return loss.detach()

    return step


def plain_step(model: torch.nn.Module, loss_of: Callable, opt: torch.optim.Optimizer, cast: Callable) -> Step:
    """Return a step of the usual loop: backward, clip, step."""
    params = list(model.parameters())

    def step() -> None:
        with cast():
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)

    return step


def llama_config(cfg: ModelConfig) -> "LlamaConfig":  # noqa: F821 - transformers is imported where it is used
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=cfg.vocab_size, hidden_size=cfg.n_embd, intermediate_size=cfg.ffn_dim, bos_token_id=None,
        num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head, num_key_value_heads=cfg.n_kv_head,
        max_position_embeddings=cfg.block_size, rms_norm_eps=cfg.norm_eps, tie_word_embeddings=cfg.tie_embeddings,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


def transformers_step(
    cfg: ModelConfig, tokens: torch.Tensor, dtype: torch.dtype, counts: dict[str, int], compiled: bool
) -> Step:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(llama_config(cfg)).to(tokens.device).train()
    counts["transformers"] = sum(p.numel() for p in model.parameters())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = torch.compile(model, dynamic=False) if compiled else model
    cast = partial(autocast, tokens.device, dtype)
    return plain_step(model, lambda: run(input_ids=tokens, labels=tokens, use_cache=False).loss, opt, cast)


def nanogpt_step(directory: str, cfg: ModelConfig, tokens: torch.Tensor, counts: dict[str, int]) -> Step:
    """Return a step of nanoGPT's train.py on its own model, as it runs on this kind of device."""
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


# ---- speed and memory -----------------------------------------------------------------------------------------------


def compare(shape: str, options: Options, n_tokens: int) -> list[Line]:
    """Return tokens/s of all sides; the limit is the device's rate of matrix products in the same rounds."""
    timing.release()
    cfg, device, dtype = SHAPES[shape], options.device, options.dtype
    tokens = torch.randint(cfg.vocab_size, (max(1, n_tokens // cfg.block_size), cfg.block_size), device=device)
    case, counts = f"{shape}, batch {tokens.shape[0]} x {tokens.shape[1]}", {"ours": parameter_table(cfg)["total"]}
    makers, ways, nanogpt = {}, compile_ways(options), options.keys["nanogpt"]
    for way in ways:
        name, compiled = ("transformers", False) if way == "none" else ("transformers, compiled", True)
        makers[name] = partial(transformers_step, cfg, tokens, dtype, counts, compiled)
    if nanogpt:
        makers["nanoGPT"] = partial(nanogpt_step, nanogpt, cfg, tokens, counts)
    for kind, way in product(options.keys["optimizer"].split(","), ways):
        makers[f"ours, {kind}{', blocks' * (way == 'blocks')}"] = partial(our_step, cfg, tokens, kind, way, dtype)
    needed, usable = needed_bytes(cfg, tokens.numel(), len(makers)), usable_bytes(device)
    if needed > usable:
        reason = f"left out: {len(makers)} models at once need {needed / 1e9:.0f} GB, {usable / 1e9:.0f} can be used"
        return [Line("train", case, "all", "tok/s", note=reason)]
    steps, missing = timing.build(makers)
    sides = {name: timing.repeated(step, device) for name, step in steps.items()}
    found = timing.alternate(sides | {"matmul": timing.matmul(device, dtype)}, options.repeats, warmups=0)
    limit = median(found.pop("matmul")) / flops_per_token(cfg, cfg.block_size)
    notes = {name: f"{counts[name.partition(',')[0]] / 1e6:.1f}M parameters" for name in found}
    if "nanoGPT" in notes:
        notes["nanoGPT"] += f", {str(nanogpt_dtype(device))[6:]}"
    lines = timing.lines("train", case, found, "tok/s", PEERS, tokens.numel(), limit, notes)
    for line in lines:
        if line.side == "nanoGPT" and nanogpt_dtype(device) != dtype:
            line.limit = 0.0  # measured in another dtype
    return lines + timing.missing_lines("train", case, missing)


def usable_bytes(device: torch.device) -> float:
    """Return the free memory of the device; infinite where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    except OSError:  # not Linux
        return math.inf
    return 1024 * int(found[1]) if found else math.inf


def needed_bytes(cfg: ModelConfig, N: int, n_models: int) -> float:
    """Return roughly the bytes of all models at once: weights, gradients and two AdamW moments each; and activations
    of N tokens in the hungriest: 34 C a layer in half precision (arXiv:2205.05198), here mixed with float32, and four
    times the float32 logits."""
    return 16 * parameter_table(cfg)["total"] * n_models + N * (80 * cfg.n_embd * cfg.n_layer + 16 * cfg.vocab_size)


def memory(row: str, case: str, side: str, script: str, flags: list[str], options: Options) -> list[Line]:
    """Return the peak memory of three steps of a trainer in its own process, over the estimate that it printed. On a
    CPU the peak includes Python and torch, 0.2 GiB."""
    out = options.folder / f"{case}-{side}".replace(" ", "")
    common = [f"--device={options.device.type}", f"--dtype={str(options.dtype)[6:]}", f"--out_dir={out}"]
    common += ["--max_steps=3", "--log_every=3", "--eval_steps=1"]
    common += ["--async_save=False"]  # the process is stopped before it saves, so there is no copy of the weights
    timing.release()
    printed = timing.until_line([sys.executable, script, *common, *flags], "step      3/")[1]
    estimate = re.search(r"^memory +([\d.]+) GiB", printed, re.MULTILINE)
    if not estimate:
        raise UserError(f"bench: {script} printed no estimate of memory: {printed.strip()[-300:]!r}")
    planned = float(estimate[1])
    peak = [event["memory_gib"] for event in read_events(out / "log.jsonl") if event["event"] == "train"][-1]
    note = f"peak of a process, {peak / max(planned, 1e-9):.2f} of the estimate {planned:.2f}"
    return [Line(row, case, side, "GiB", [peak], limit=planned, note=note)]
