"""A copy of a model for inference: its matrices in the dtype of the products, on a CPU packed and in fewer layers.

A decoding step of a small model on a CPU is hundreds of small calls, each of which costs some microseconds: queries,
keys and values come from one product here, gate and up from another, and queries and keys are rotated together.
"""

import copy
import functools
import math
import timeit
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from groundup.train.lora import LoRALinear, plain_linear
from model import MLP, Attention, RMSNorm, Transformer

CHUNK_TOKENS = 512  # a prompt is read in pieces of this many tokens, which bounds memory


def for_inference(
    model: Transformer, dtype: torch.dtype, packed: bool, rows: int = 0, merged: bool = True
) -> Transformer:
    """Return a copy of the model in eval mode with eager blocks and matrices in `dtype`; tensors that need no change
    are shared with `model`.

    Blocks compiled for training would be compiled anew here. Embedding and norms keep their dtype, as in training.
    merged: add adapters to copies of their matrices. packed: on a CPU, pack the matrices if memory suffices; for one
    row in float32 only those of a shape that is then multiplied faster, which depends on the CPU."""
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    same = {id(x): x for x in (*model.parameters(), *model.buffers())}
    compiled = {id(vars(block)["forward"]): None for block in model.layers if "forward" in vars(block)}
    view = copy.deepcopy(model, same | compiled)
    for block in view.layers:
        vars(block).pop("forward", None)
    for parent in list(view.modules()):
        if isinstance(parent, LoRALinear):
            continue  # replaced already: a parent comes before its children
        for name, child in parent.named_children():
            if isinstance(child, LoRALinear) and merged:
                child = plain_linear(nn.Parameter(child.merged_weight(), requires_grad=False), child.bias)
                setattr(parent, name, child)
            if isinstance(child, nn.Linear) and child.weight.dtype != dtype:
                child.weight = nn.Parameter(child.weight.detach().to(dtype), requires_grad=False)
    n_bytes = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    if packed and n_bytes < free_bytes(model.embed_tokens.weight.device) / 2:
        pack(view, rows == 1 and dtype == torch.float32)
    return view.eval()


@torch.no_grad()
def pack(view: Transformer, if_it_pays: bool) -> None:
    """Replace the layers by packed ones. if_it_pays: leave matrices as they are where packed ones are slower."""
    pays: dict[torch.Size, bool] = {}  # of the shapes that were timed

    def layer_of(*linears: nn.Linear) -> nn.Module:
        """Return a layer whose output is the outputs of these, one after the other."""
        weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        bias = None if biases[0] is None else torch.cat(biases).to(weight.dtype)
        if if_it_pays and weight.shape not in pays:
            pays[weight.shape] = packing_pays(weight)
        if pays.get(weight.shape, True):
            return PackedLinear(weight, bias)
        bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        return plain_linear(nn.Parameter(weight, requires_grad=False), bias)

    for block in view.layers:
        block.self_attn, block.mlp = MergedAttention(block.self_attn, layer_of), MergedMLP(block.mlp, layer_of)
    view.lm_head = layer_of(view.lm_head)
    view.cos, view.sin = torch.cat((view.cos, view.cos), dim=-1), torch.cat((-view.sin, view.sin), dim=-1)


class MergedAttention(nn.Module):
    """`model.Attention` to a key-value cache."""

    def __init__(self, attention: Attention, layer_of: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.qkv_proj = layer_of(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj, self.head_dim = layer_of(attention.o_proj), attention.head_dim
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        n_head, n_kv_head = (proj.weight.shape[0] // self.head_dim for proj in (attention.q_proj, attention.k_proj))
        self.heads = [n_head, n_kv_head, n_kv_head]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable, *_: None) -> Tensor:
        B, T, _ = x.shape
        y = self.qkv_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H + K + K, T, D)
        q, k, v = y.split(self.heads, dim=1)
        if isinstance(self.q_norm, RMSNorm):
            both = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        else:
            both = y[:, : -self.heads[2]]
        q, k = rotate(both, cos, sin).split(self.heads[:2], dim=1)
        return self.o_proj(attend(q, k, v).transpose(1, 2).reshape(B, T, -1))


class MergedMLP(nn.Module):
    """`model.MLP`."""

    def __init__(self, mlp: MLP, layer_of: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = layer_of(mlp.gate_proj, mlp.up_proj), layer_of(mlp.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate).mul_(up))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`model.rotate` in half its time for a single position; cos and sin (..., T, D) are for whole heads."""
    y = x.float()
    return (y.roll(y.shape[-1] // 2, dims=-1) * sin).addcmul_(y, cos).type_as(x)


@torch.no_grad()
def packing_pays(weight: Tensor) -> bool:
    """Return whether a single row is multiplied faster by the packed weight: the best of five times of each."""
    x, times = weight.new_ones(1, weight.shape[1]), []
    for multiply in (PackedLinear(weight), functools.partial(F.linear, weight=weight)):
        multiply(x)
        times.append(min(timeit.repeat(functools.partial(multiply, x), number=1, repeat=5)))
    return times[0] < times[1]


class PackedLinear(nn.Module):
    """A linear layer with its weight in oneDNN's blocked layout, as inductor lays out frozen weights: 1.6 to 2.3 times
    as fast as F.linear for 1 to 8 rows (2 cores with AVX-512); for one row in float32 0.5 to 1 on some Intel cores."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.bias = bias
        # The layout for many rows is as fast for a few; the one for a single row is slow for more.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, CHUNK_TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    @staticmethod
    def works(device: torch.device, dtype: torch.dtype) -> bool:
        available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and available


def free_bytes(device: torch.device) -> float:
    """Return the free memory of the device, infinity if unknown."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    path = Path("/proc/meminfo")
    if device.type != "cpu" or not path.exists():
        return math.inf
    lines = dict(line.split(":") for line in path.read_text(encoding="utf-8").splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])
