"""The plan of a run before anything is allocated: parameters, FLOPs, and memory by part."""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping

import torch

from groundup.train import cpu_attention
from groundup.train.base import adapters_of, frozen_dtype
from groundup.train.device import device_memory, memory_limit
from groundup.train.log import clock
from groundup.train.lora import trainable_table, weight_shapes
from model import MASKED_LENGTH, ModelConfig, chunk_rows

# Share of the tensors for what a plan cannot know: holes between an allocator's blocks, buffers of libraries. For glibc
# it was largest where blocks are recomputed: a third at 23M parameters.
MARGIN = {"cpu": 0.3, "cuda": 0.1}
# More on a CPU, of what each step takes anew, where batches differ in length or labels: what one frees, the next does
# not fit into. dpo.py's heap grew from 3.9 to 5.7 GiB in 63 steps.
HOLES = 0.25
PROCESS = 400 * 2**20  # Python with torch, in the memory of the machine


def parameter_table(cfg: ModelConfig) -> dict[str, int]:
    """Return {part: number of parameters} of what model.py makes, without memory. Tied embeddings count once."""
    table = dict.fromkeys(("embedding", "attention", "mlp", "norms", "biases", "head"), 0)
    for name, shape in weight_shapes(cfg).items():
        table[part_of(name, len(shape))] += math.prod(shape)
    return table | {"total": sum(table.values())}


def part_of(name: str, n_dims: int) -> str:
    """Return the part that a parameter counts for; what an edit of model.py adds to a block counts for the mlp."""
    ends = {"embed_tokens.weight": "embedding", "lm_head.weight": "head"}
    if name in ends:
        return ends[name]
    if n_dims < 2:
        return "biases" if name.endswith(".bias") else "norms"
    return "attention" if ".self_attn." in name else "mlp"


def flops_per_token(cfg: ModelConfig, T: int, head: bool = True, trainable: str = "all") -> float:
    """Return forward and backward FLOPs per token at length T: 6 per matrix parameter, 12 L H D T for attention. head:
    False for a reward model. trainable: of 'lora' frozen matrices take 4, for they get no gradient of their own.

    As in PaLM (arXiv:2204.02311, appendix B) the causal half is not subtracted, so that figures compare with published
    ones. The embedding lookup multiplies nothing."""
    table = parameter_table(cfg)
    matrices = table["attention"] + table["mlp"] + cfg.vocab_size * cfg.n_embd * head
    return (4 if trainable.strip() == "lora" else 6) * matrices + 12 * cfg.n_layer * cfg.n_head * cfg.head_dim * T


def memory_table(
    cfg: ModelConfig, config: dict, trained: Mapping[str, int], masked: bool, device_type: str, dtype: torch.dtype,
    head: bool = True,
) -> dict[str, float]:  # fmt: skip
    """Return {part: bytes} of the tensors that one rank holds at the peak of a training step.

    trained: from lora.trainable_table; the frozen parameters are taken to be embedding and head first, then the blocks.
    masked: documents share rows. head: False for a reward model, which has no logits. Weights, gradients and optimizer
    state are float32, but for the frozen weights of base_dtype. Activations are what autograd keeps of a block: two
    streams (the residual and the normalised one) in float32; in the compute dtype the inputs of the linear layers,
    query, key, value, the output of attention, three tensors of SwiGLU, and autocast's copies of the matrices.
    torch.compile recomputes the normalised stream and two of SwiGLU's tensors; with checkpointing a block keeps only
    its input. The peak is the largest of three moments: the logits; the head's gradient; the gradients inside the last
    block."""
    B, T, recompute = config["batch_size"], config["block_size"], config["activation_checkpointing"]
    size, N, table = dtype.itemsize, B * T, parameter_table(cfg)
    C, HD, KD, V = cfg.n_embd, cfg.n_head * cfg.head_dim, cfg.n_kv_head * cfg.head_dim, cfg.vocab_size
    matrices, adapters = table["attention"] + table["mlp"], trained["adapters"]
    whole = trained["trainable"] - adapters  # trained without an adapter
    trained_matrices = min(matrices, max(0, whole - table["embedding"] - table["head"]))
    short = device_type == "cpu" and T <= MASKED_LENGTH
    masked = masked and not cpu_attention.suits(cfg, torch.device(device_type), dtype)
    attention = 2 * HD + 2 * (HD if masked else KD)
    read = 2 * C + HD + cfg.ffn_dim if trained_matrices or adapters else 0  # inputs of the linear layers
    streams, factors = (2, 1) if config["compile"] else (4 if trained_matrices else 2, 3)
    block = N * (4 * C * streams + size * (read + attention + factors * cfg.ffn_dim))
    block += 8 * N * (HD + KD) if cfg.qk_norm else 0
    in_half = adapters and frozen_dtype(config, dtype) == torch.bfloat16  # the frozen matrices
    casts = size < 4 and config.get("parallel") != "fsdp"  # which gathers the weights in the compute dtype
    copies = size * (adapters + (trained_matrices if in_half else matrices)) if casts else 0  # autocast's
    mask = N * T * size if masked and (short or device_type != "cpu") else 0
    kept = cfg.n_layer * (4 * N * C if recompute else block) + mask
    kept += N * C * (8 + 2 * size)  # the last norm and the gradient of its output

    rows = min(N, chunk_rows(V, device_type)) if head else 0
    grad = 4 * V * C if head and whole >= V * C else 0
    cast_head = head and casts and (grad or not in_half)
    # Logits and their exponentials of one chunk in float32, beside what is left of the chunk before. (A loss that is
    # compiled for a GPU needs less.)
    logits = 4 * V * max(2 * rows, rows + 2 * min(rows, N - rows)) + grad + (size * V * C if cast_head else 0)
    inside = 2 * size * N * cfg.ffn_dim + 8 * N * C  # gradients of SwiGLU's factors and of the stream
    inside, after = (inside + block, copies / cfg.n_layer) if recompute else (inside, copies)
    moments = (kept + copies, logits), (kept + after, 2 * grad), (kept + after + inside, grad)
    activations, of_head = max(moments, key=sum)
    return {
        "weights": 4 * (table["total"] + adapters) - (2 * (trained["total"] - trained["trainable"]) if in_half else 0),
        "gradients": 4 * trained["trainable"],
        "optimizer": 8 * trained["trainable"] - (4 * trained_matrices if config["optimizer"] == "muon" else 0),
        "activations": activations,
        "head": of_head,
    }


def shard_memory(
    memory: Mapping[str, float], cfg: ModelConfig, world_size: int, device_type: str, dtype: torch.dtype
) -> dict[str, float]:  # fmt: skip
    """Return a memory_table of whole replicas as parallel='fsdp' divides it. A rank holds its part of the state and, in
    the compute dtype, the head's weights and three blocks: the one at work, the next one, and a copy while it arrives.
    A gradient is copied to float32 to be sent, and gloo receives the others' terms beside it. At the end of a backward
    the head's (the embedding's, if tied) is on its way, when the activations are gone."""
    table, size, waits = parameter_table(cfg), dtype.itemsize, 8 if device_type == "cpu" else 4
    head, block = cfg.vocab_size * cfg.n_embd, (table["attention"] + table["mlp"]) / cfg.n_layer
    parts = {key: memory[key] / world_size for key in ("weights", "gradients", "optimizer")}
    parts |= {"gathered": size * (head + 3 * block) + (size + waits) * block, "activations": memory["activations"]}
    return parts | {"head": max(memory["head"], (size + waits) * head - memory["activations"])}


def rank_memory(
    cfg: ModelConfig, config: dict, trained: Mapping[str, int], masked: bool, device_type: str, dtype: torch.dtype,
    head: bool, world_size: int, other: Mapping[str, float],
) -> dict[str, float]:  # fmt: skip
    """Return {part: bytes} of one of world_size ranks, with the margin."""
    memory = memory_table(cfg, config, trained, masked, device_type, dtype, head)
    fsdp = config["parallel"] == "fsdp"
    if fsdp:
        memory = shard_memory(memory, cfg, world_size, device_type, dtype)
    if config["compress"] == "powersgd":
        params = parameter_table(cfg)
        matrices = params["total"] if config["compress_embedding"] else params["attention"] + params["mlp"]
        memory["compression error"] = 4 * min(matrices, trained["trainable"])
    if config["async_save"] and device_type == "cpu":  # a GPU's copy lies in RAM
        copied = 4 * trained["trainable"] / (world_size if fsdp else 1) + memory["optimizer"]
        memory["copy to save"] = copied + memory.get("compression error", 0)
    if fsdp and device_type == "cpu":  # and a file's tensors, gathered
        memory["file to save"] = 4 * max(cfg.vocab_size * cfg.n_embd, trained["total"] / max(8, world_size))
    generates = config.get("sample_prompts") or config.get("eval_answers")
    if device_type == "cpu" and generates and not trained["adapters"] and not fsdp:
        # Evaluations generate with packed matrices (generate/engine.py), when no activations are held.
        packed = 4 * (parameter_table(cfg)["attention"] + parameter_table(cfg)["mlp"] + cfg.vocab_size * cfg.n_embd)
        more = packed - memory["activations"] - memory["head"]
        memory |= {"copy to answer with": more} if more > 0 else {}
    if config["zero1"]:  # rank 0 saves the whole state, but holds its part
        memory["optimizer"] /= world_size
    memory |= other
    memory["margin"] = MARGIN.get(device_type, 0.1) * sum(memory.values())
    if device_type == "cpu" and "data_dir" not in config:  # pretrain.py's batches are all alike
        memory["margin"] += HOLES * (memory["activations"] + memory["head"])
    return memory | ({"interpreter": PROCESS} if device_type == "cpu" else {})


def compare(needs: Mapping[str, Callable[[int], float]], world_size: int, most: float) -> str:
    """Return a line on the bytes per rank of several ways to train, simplest first, and the first that fits `most`.
    needs: {way: bytes for a number of ranks}."""
    sizes = {way: need(world_size) for way, need in needs.items()}
    text = ", ".join(f"{way} {size / 2**30:.2f}" for way, size in sizes.items())
    text = f"devices     {world_size} with, per rank, {text} GiB"
    if most == math.inf:
        return text
    fits = next((way for way, size in sizes.items() if size <= most), "")
    last, more = list(needs)[-1], world_size
    while not fits and needs[last](more) > most and more < 2**16:
        more *= 2
    fewer = "lower batch_size or use activation_checkpointing=True"
    none = fewer if needs[last](more) > most else f"{last} needs {more}"
    return f"{text}; the least that fits {most / 2**30:.2f} GiB: {fits or f'none, {none}'}"


def describe(
    cfg: ModelConfig, config: dict, batch: str, tokens: float, world_size: int, device: torch.device,
    dtype: torch.dtype, peak: float, masked: bool = False, other: Mapping[str, float] | None = None, head: bool = True,
    note: str = "",
) -> str:  # fmt: skip
    """Return the plan of a run as text. batch: its line on the batch; tokens: of all steps; peak: FLOP/s of one rank;
    masked, head: as in memory_table; other: more parts of memory; note: before the time."""
    cfg = cfg if head else dataclasses.replace(cfg, tie_embeddings=True)  # a reward model's head is one row
    trained = trainable_table(cfg, config["trainable"], adapters_of(config))
    trained = trained if head else trained | {key: trained[key] + cfg.n_embd for key in ("total", "trainable")}

    def memory_of(n_ranks: int = world_size, **changed: object) -> dict[str, float]:
        of_rank = cfg, config | changed, trained, masked, device.type, dtype, head, n_ranks, other or {}
        return rank_memory(*of_rank)

    memory = memory_of()
    parts = ", ".join(f"{part} {n / 2**20:,.0f} MiB" for part, n in memory.items())
    flops = flops_per_token(cfg, config["block_size"], head, config["trainable"])
    seconds = tokens * flops / (peak * world_size) / 0.4
    need, most = sum(memory.values()), memory_limit() if device.type == "cpu" else math.inf
    # The ranks of one machine share it, as torchrun says how many they are.
    n_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    local = n_local * need
    short = f"warning     needs {local / 2**30:.2f} GiB, this machine or its container has {most / 2**30:.2f} GiB"
    ways = {"ddp": {"zero1": False}, "zero1": {"zero1": True, "compress": "none"}}
    ways = {way: {"parallel": "ddp"} | changed for way, changed in ways.items()}
    if config["trainable"].strip() == "all" and head and not other:
        ways["fsdp"] = {"parallel": "fsdp", "zero1": False, "compress": "none", "optimizer": "adamw"}
    needs = {way: lambda n, changed=changed: sum(memory_of(n, **changed).values()) for way, changed in ways.items()}
    room = 2**30 * config["device_gib"] or (most / n_local if device.type == "cpu" else device_memory(device))
    several = [compare(needs, world_size, room)] if world_size > 1 else []
    return "\n".join([
        f"parameters  {trained['total']:,}, trained {trained['trainable']:,} ({config['trainable']})",
        f"batch       {batch}",
        f"memory      {need / 2**30:.2f} GiB per rank: {parts}",
        *([short] if local > most else []),
        *several,
        f"time        {note}{clock(seconds)} at 40 % of {world_size} x {peak / 1e12:,.2f} TFLOP/s",
    ])  # fmt: skip
