"""Rows train, head, generate and checkpoint: a training step, its head and loss, greedy generation
and a save.

train: ours is the step of pretrain.py. transformers' LlamaForCausalLM of the same shape runs in a
plain loop with torch's fused attention, autocast and fused AdamW; it is compiled as a whole where
ours is compiled. nanoGPT runs as it ships: bfloat16 and compiled on a GPU, float32 and not compiled
on a CPU (the command of its README). The limit counts the full square of attention
(flops_per_token), half of which a causal kernel skips: with long texts the share shown is above the
share of time in which the device multiplies.

head: head and loss alone, forward and backward, beside all logits at once and torch's
linear_cross_entropy in chunks. The limit: three products at the device's rate.

generate: tokens/s of whole calls, the prompt included, with the same random weights. The limit:
every step reads each matrix and the cached keys and values once, at the rate at which a sum reads
as many bytes. transformers has its static cache, with which it compiles itself on a GPU; on a CPU
it does not.

checkpoint: the bare disk writes as many bytes into the same directory and waits until they are
stored. Training waits for the copy in memory that a thread then saves from. The model is on the
CPU, also on a machine with a GPU.
"""

import importlib.util
import io
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import timing
import torch
import torch.nn.functional as F
from timing import Case, Options

import ddp
from groundup.files.disk import sync
from groundup.generate.completion import generate
from groundup.generate.kv_cache import cache_bytes
from groundup.generate.sampling import SamplingParams
from groundup.kernels.cross_entropy import compile_loss, cross_entropy
from groundup.tokens.training import train
from groundup.train import checkpoint, huggingface
from groundup.train.checkpoint import Saver
from groundup.train.config_json import to_hf_config
from groundup.train.device import autocast
from groundup.train.log import RunLog
from groundup.train.optim import Optimizer
from groundup.train.plan import flops_per_token, parameter_table
from model import ModelConfig, Transformer

SHAPES = {
    "tiny": ModelConfig(512, 64, 2, 2, n_embd=64),
    "10M": ModelConfig(65, 256, 6, 6, n_embd=384),  # nanoGPT's shakespeare_char
    "25M": ModelConfig(2048, 512, 8, 8, n_embd=512),
    "124M": ModelConfig(50304, 1024, 12, 12, n_embd=768),  # GPT-2
    "350M": ModelConfig(50304, 1024, 24, 16, n_embd=1024),  # GPT-2 medium
    # TinyLlama
    "1.1B": ModelConfig(32000, 2048, 22, 32, 4, n_embd=2048, ffn_dim=5632, tie_embeddings=False),
}
PEERS = ("transformers", "transformers, compiled", "nanoGPT")
HEAD_PEERS = "all logits at once", "linear_cross_entropy"
PROMPT_TOKENS = 16


Step = tuple[Callable, list[torch.Tensor]]  # a training step, and what it trains


def shapes_of(options: Options, otherwise: str) -> list[str]:
    return (options.shapes or otherwise).split(",")


# ---- train ---------------------------------------------------------------------------------------


def train_side(
    make: Callable, n_rows: int, cfg: ModelConfig, device: torch.device
) -> tuple[Callable[[], float], int]:
    """Return (seconds of a step, parameters) of what `make` returns for random tokens."""
    tokens = torch.randint(cfg.vocab_size, (n_rows, cfg.block_size), device=device)
    step, parameters = make(cfg, tokens)
    return timing.repeated(step, device), sum(p.numel() for p in parameters)


def our_step(
    kind: str, way: str, dtype: torch.dtype, cfg: ModelConfig, tokens: torch.Tensor
) -> Step:
    """Return a step of pretrain.py: AdamW or Muon; compiled block by block or not."""
    model = Transformer(cfg).to(tokens.device)
    parallel = ddp.DDP(model)
    muon_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
    opt = Optimizer(parallel.buckets, kind, muon_dtype=muon_dtype)
    if way == "blocks":
        for part in (*model.layers, model.norm):
            part.forward = torch.compile(part.forward, dynamic=False)
        compile_loss(tokens.device)

    def step() -> None:
        parallel.expect_step(opt, 1e-3)
        with autocast(tokens.device, dtype):
            loss = model(tokens, tokens) / tokens.numel()
        loss.backward()
        parallel.step(opt, lr=1e-3, clip=1.0)

    return step, list(model.parameters())


def plain_step(
    model: torch.nn.Module, loss_of: Callable, opt: torch.optim.Optimizer, cast: Callable
) -> Callable:
    """Return a step of the usual loop: backward, clip, step."""

    def step() -> None:
        with cast():
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)

    return step


def llama_config(cfg: ModelConfig) -> "LlamaConfig":  # noqa: F821 - imported where it is used
    from transformers import LlamaConfig

    without_tokens = SimpleNamespace(bos_id=-1, eot_id=-1, pad_id=-1)
    return LlamaConfig(**to_hf_config(cfg, without_tokens))


def transformers_step(
    compiled: bool, dtype: torch.dtype, cfg: ModelConfig, tokens: torch.Tensor
) -> Step:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(llama_config(cfg)).to(tokens.device).train()
    params = list(model.parameters())
    opt = torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = torch.compile(model, dynamic=False) if compiled else model

    def loss_of() -> torch.Tensor:
        return run(input_ids=tokens, labels=tokens, use_cache=False).loss

    return plain_step(model, loss_of, opt, partial(autocast, tokens.device, dtype)), params


def nanogpt_step(directory: str, cfg: ModelConfig, tokens: torch.Tensor) -> Step:
    """Return a step of nanoGPT's train.py on its own model, as it runs on this kind of device."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(directory) / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    keys = ("n_layer", "n_head", "n_embd", "vocab_size", "block_size")
    shape = {key: getattr(cfg, key) for key in keys}
    with redirect_stdout(io.StringIO()):  # it prints its size
        model = module.GPT(module.GPTConfig(bias=False, dropout=0.0, **shape)).to(tokens.device)
        # weight decay, learning rate, betas
        opt = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), tokens.device.type)
    run = torch.compile(model) if tokens.device.type == "cuda" else model
    cast = partial(autocast, tokens.device, nanogpt_dtype(tokens.device))
    return plain_step(model, lambda: run(tokens, tokens)[1], opt, cast), list(model.parameters())


def nanogpt_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def train_steps(options: Options) -> dict[str, Callable]:
    """Return {side: what makes its step for a shape and tokens}."""
    steps, ways = {}, options.compile.split(",")
    for way in ways:
        name = "transformers" + ", compiled" * (way == "blocks")
        steps[name] = partial(transformers_step, way == "blocks", options.dtype)
    if options.nanogpt:
        steps["nanoGPT"] = partial(nanogpt_step, options.nanogpt)
    for kind, way in product(options.optimizer.split(","), ways):
        name = f"ours, {kind}" + ", blocks" * (way == "blocks")
        steps[name] = partial(our_step, kind, way, options.dtype)
    return steps


def train_row(options: Options) -> Iterator[Case]:
    """Tokens/s of all sides; the limit is the device's rate of matrix products in the same
    rounds.
    """
    device, dtype = options.device, options.dtype
    default, n_tokens = "10M,25M,124M", 4096
    if device.type == "cuda":
        default, n_tokens = "10M,25M,124M,350M,1.1B", 16384
    for shape in shapes_of(options, default):
        timing.release()
        cfg, T = SHAPES[shape], SHAPES[shape].block_size
        n_rows = max(1, (options.tokens or n_tokens) // T)
        makers = {}
        for name, step in train_steps(options).items():
            makers[name] = partial(train_side, step, n_rows, cfg, device)
        with timing.apart(makers) if options.apart else nullcontext(timing.build(makers)) as made:
            sides = {name: side for name, (side, _) in made.items()}
            notes = {name: f"{n / 1e6:.1f}M parameters" for name, (_, n) in made.items()}
            ceiling = timing.matmul(device, dtype), flops_per_token(shapes_only(cfg), T)
            case = f"{shape}, batch {n_rows} x {T}"
            own = nanogpt_dtype(device)
            if "nanoGPT" in notes:
                notes["nanoGPT"] += f", {str(own)[6:]}"
            unlimited = "nanoGPT" if own != dtype else ""  # the limit is of products in dtype
            work = n_rows * T
            yield Case(case, sides, "tok/s", PEERS, work, ceiling, unlimited, notes)


# ---- head ----------------------------------------------------------------------------------------


def head_losses(device: torch.device) -> dict[str, Callable]:
    """Return {side: function of hidden states (N, C), the weight (V, C) and targets (N,) that gives
    the mean loss}.
    """
    found = {"ours": lambda h, w, t: cross_entropy(h, w, t)[0] / len(t)}
    compile_loss(device)
    found[HEAD_PEERS[0]] = lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t)
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        chunks = torch.nn.LinearCrossEntropyOptions()
        found[HEAD_PEERS[1]] = lambda h, w, t: F.linear_cross_entropy(h, w, t, options=chunks)
    return found


def head_row(options: Options) -> Iterator[Case]:
    """Tokens/s of head and loss, with the gradients of both inputs. They take inputs in the dtype
    of the products.
    """
    device, dtype = options.device, options.dtype
    default, n_tokens = ("124M,1.1B", 16384) if device.type == "cuda" else ("25M,124M", 2048)
    for shape in shapes_of(options, default):
        timing.release()
        N, V, C = options.tokens or n_tokens, SHAPES[shape].vocab_size, SHAPES[shape].n_embd
        h, w = (torch.randn(n, C, device=device).mul_(0.02).to(dtype) for n in (N, V))
        targets = torch.randint(V, (N,), device=device)
        sides, notes = {}, {}
        for name, loss_of in head_losses(device).items():
            step = partial(head_step, loss_of, h, w, targets)
            loss, *gradients = (x.item() for x in step())
            notes[name] = "loss {:.4f}, gradients {:.3e} {:.3e}".format(loss, *gradients)
            sides[name] = timing.repeated(step, device)
        # three products of 2 V C FLOPs per token
        ceiling = timing.matmul(device, dtype), 6 * V * C
        case = f"{shape}, {N} tokens"
        yield Case(case, sides, "tok/s", HEAD_PEERS, N, ceiling, notes=notes)


def head_step(
    loss_of: Callable, h: torch.Tensor, w: torch.Tensor, targets: torch.Tensor
) -> list[torch.Tensor]:
    """Return the loss and the norms of its gradients. h (N, C), w (V, C), targets (N,)."""
    h, w = (x.detach().requires_grad_() for x in (h, w))
    loss = loss_of(h, w, targets)
    loss.backward()
    return [loss, h.grad.norm(), w.grad.norm()]


# ---- generate ------------------------------------------------------------------------------------


def our_call(
    model: Transformer, prompts: list[list[int]], options: Options, compiled: bool
) -> Callable[[], list[list[int]]]:
    params = SamplingParams(max_new_tokens=options.new_tokens, temperature=0)

    def call() -> list[list[int]]:
        with autocast(options.device, options.dtype):
            results = generate(model, None, prompts, params, compile=compiled)
        return [result.completions[0].ids for result in results]

    return call


def their_call(
    model: Transformer, prompts: list[list[int]], options: Options
) -> Callable[[], list[list[int]]]:
    from transformers import LlamaForCausalLM

    hf = LlamaForCausalLM(llama_config(model.cfg)).eval()
    state = model.state_dict()
    hf.load_state_dict({huggingface.hf_name(name): p for name, p in state.items()})
    hf, idx = hf.to(options.device, options.dtype), torch.tensor(prompts, device=options.device)
    length = {"max_new_tokens": options.new_tokens, "min_new_tokens": options.new_tokens}

    def call() -> list[list[int]]:
        with torch.no_grad():
            ids = hf.generate(idx, do_sample=False, cache_implementation="static", **length)
        return ids[:, idx.shape[1] :].tolist()

    return call


def shapes_only(cfg: ModelConfig) -> Transformer:
    """Return a model without memory, to count its parameters."""
    with torch.device("meta"):
        return Transformer(cfg)


def bytes_per_step(cfg: ModelConfig, rows: int, dtype: torch.dtype, length: int) -> int:
    """Return the bytes that a step reads after `length` tokens: every matrix but the embedding, and
    the cache.
    """
    table = parameter_table(shapes_only(cfg))
    matrices = table["attention"] + table["mlp"] + cfg.vocab_size * cfg.n_embd
    return matrices * dtype.itemsize + cache_bytes(cfg, rows, length, dtype)


def generate_row(options: Options) -> Iterator[Case]:
    """Tokens/s for each shape, alone and in a batch; the limit is that of half of the new
    tokens.
    """
    device, dtype, new_tokens = options.device, options.dtype, options.new_tokens
    batches = dict.fromkeys([1, options.batch_size])
    for shape, rows in product(shapes_of(options, "25M,124M"), batches):
        timing.release()
        torch.manual_seed(0)
        cfg = SHAPES[shape]
        model = Transformer(cfg).to(device).eval()
        prompts = torch.randint(cfg.vocab_size, (rows, PROMPT_TOKENS)).tolist()
        makers = {"transformers": partial(their_call, model, prompts, options)}
        for way in options.compile.split(","):
            name = f"ours{', compiled' * (way == 'blocks')}"
            makers[name] = partial(our_call, model, prompts, options, way == "blocks")
        calls = timing.build(makers)
        texts = {name: call() for name, call in calls.items()}  # also compiles and allocates
        n_bytes = bytes_per_step(cfg, rows, dtype, PROMPT_TOKENS + new_tokens // 2)
        sides = {name: partial(timing.device_seconds, call, device) for name, call in calls.items()}
        ceiling = timing.reading(n_bytes, device), n_bytes / rows
        first, notes = next(iter(texts.values())), {}
        for name, ids in texts.items():
            n = sum(a == b for a, b in zip(first, ids, strict=True))
            notes[name] = f"{n_bytes / 1e6:,.0f} MB/step, {n}/{rows} texts equal"
        case, work = f"{shape}, batch {rows}, {str(dtype)[6:]}", rows * new_tokens
        yield Case(case, sides, "tok/s", ["transformers"], work, ceiling, notes=notes)


# ---- checkpoint ----------------------------------------------------------------------------------


def checkpoint_row(options: Options) -> Iterator[Case]:
    """MB/s of saving a training state."""
    Path(options.checkpoint_dir).mkdir(parents=True, exist_ok=True)
    for shape in shapes_of(options, "124M"):
        with tempfile.TemporaryDirectory(dir=options.checkpoint_dir) as folder:
            calls, n_bytes = ways_to_save(SHAPES[shape], Path(folder))
            sides = {name: partial(timing.seconds_of, call) for name, call in calls.items()}
            mb = n_bytes / 1e6
            case, peers = f"{shape}, {mb:,.0f} MB, CPU", ("disk", "torch.save")
            yield Case(case, sides, "MB/s", peers, mb)


def after_one_step(cfg: ModelConfig) -> tuple[Transformer, ddp.DDP, Optimizer]:
    """Return a model whose optimizer has its state."""
    model = Transformer(cfg)
    parallel = ddp.DDP(model)
    opt = Optimizer(parallel.buckets, "adamw")
    tokens = torch.randint(cfg.vocab_size, (1, 8))
    parallel.expect_step(opt, 1e-3)
    (model(tokens, tokens) / tokens.numel()).backward()
    parallel.step(opt, lr=1e-3, clip=1.0)
    parallel.flush()
    return model, parallel, opt


def ways_to_save(cfg: ModelConfig, folder: Path) -> tuple[dict[str, Callable], int]:
    """Return ({side: call that saves}, bytes of a checkpoint) of a model after one step."""
    model, parallel, opt = after_one_step(cfg)
    run, plain = folder / "run", folder / "plain.pt"
    run.mkdir()
    checkpoint.lock(run)
    log = RunLog(str(run), max_steps=1, steps_done=0)
    names = train(["Three letters, and a few more: abc."], 384)
    saver = Saver(run, 1, names, log, config={"zero1": False, "timeout_s": 300.0}, data_record={})
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def save() -> None:
        saver.save(1, model, parallel, opt, scaler)
        saver.wait()

    def copy() -> None:
        content = huggingface.stored_weights(model), opt.state_dict()
        saver.memory.copy(content, torch.device("cpu"))

    def torch_save() -> None:
        with open(plain, "wb") as f:
            torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, f)
        sync(plain)

    def disk() -> None:
        with open(folder / "raw.bin", "wb", buffering=0) as f:
            for begin in range(0, n_bytes, len(block)):
                f.write(block[: n_bytes - begin])
            os.fsync(f.fileno())

    block = random.Random(0).randbytes(2**24)  # a file system may compress zeros
    save()
    n_bytes = sum(path.stat().st_size for path in (run / "step_000001").iterdir())
    calls = {"disk": disk, "torch.save": torch_save, "ours": save, "ours, training waits": copy}
    return calls, n_bytes
