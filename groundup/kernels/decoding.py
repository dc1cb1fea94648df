"""Products and decoding steps on a CPU in C: builds step.c with the machine's compiler and calls it.

Where there is no C compiler torch does the same, more slowly. The plain reference is
generate/decode.py's decode_step.
"""

import ctypes
import functools
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from groundup.compile_c import compile_c
from groundup.errors import say

DTYPES = (torch.float32, torch.bfloat16)
WIDTH = 32  # as in step.c


@functools.cache
def kernels(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return step.c, compiled for matrices of this dtype; None if that does not work here."""
    if dtype not in DTYPES:
        return None
    flags = ["-DBFLOAT16"] if dtype == torch.bfloat16 else []
    found = compile_c(Path(__file__).with_name("step.c"), *flags)
    if found is None:
        say(
            "generate: no C compiler works here (gcc or clang, with OpenMP); text comes up to 3 times slower"
        )
        return None
    pointer, long, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    found.lay_out.argtypes = [pointer, pointer, long, long, number]
    found.product.argtypes = [*[pointer] * 4, *[long] * 3, number]
    found.step.argtypes = [*[pointer] * 7, long, *[pointer] * 3, long, number]
    found.lay_out.restype = found.product.restype = found.step.restype = None
    return found


def has_kernels(cfg: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether step.c works here, for models of these sizes."""
    fits = device.type == "cpu" and cfg.n_embd % 2 == cfg.ffn_dim % 2 == 0
    return fits and kernels(dtype) is not None


class NativeLinear(nn.Module):
    """A linear layer with its weight (N, K) in the blocks of step.c."""

    def __init__(self, linear: nn.Linear, blocks: Tensor) -> None:
        """blocks: memory for the weight, n_elements of it."""
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.blocks, self.bias = blocks, None if linear.bias is None else linear.bias.float()
        weight, n_words = (
            linear.weight.to(blocks.dtype).contiguous(),
            self.in_features * blocks.itemsize // 4,
        )
        where = address(weight), address(blocks), self.out_features, n_words
        kernels(blocks.dtype).lay_out(*where, torch.get_num_threads())

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) -> (..., N) in the dtype of the weight."""
        x = x.to(self.blocks.dtype).contiguous()
        y = torch.empty(*x.shape[:-1], self.out_features)
        sizes = x.numel() // self.in_features, self.in_features, self.out_features
        where = map(address, (self.blocks, self.bias, x, y))
        kernels(x.dtype).product(*where, *sizes, torch.get_num_threads())
        return y.to(x.dtype)


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def n_elements(linear: nn.Linear) -> int:
    return -(-linear.weight.shape[0] // WIDTH) * WIDTH * linear.weight.shape[1]


def huge_pages(n_bytes: int) -> Tensor:
    """Return (n_bytes,) uint8 zeros, on Linux in large pages: memory then gives a third more."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(n_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def lay_out(places: list[tuple[nn.Module, str]], dtype: torch.dtype) -> None:
    """Replace linear layers, given by parent and name, by layers in blocks of `dtype`, all in
    one stretch of memory."""
    sizes = [n_elements(getattr(*place)) for place in places]
    parts = huge_pages(sum(sizes) * dtype.itemsize).view(dtype).split(sizes)
    for place, part in zip(places, parts, strict=True):
        setattr(*place, NativeLinear(getattr(*place), part))


class Model(ctypes.Structure):
    """Model of step.c."""

    _fields_ = (
        [(name, ctypes.c_long) for name in ("n_layer", "C", "H", "K", "D", "F", "V")]
        + [("eps", ctypes.c_double)]
        + [(name, ctypes.c_void_p) for name in ("layers", "norm", "head")]
    )


class NativeStep:
    """decode.decode_step for a model whose matrices lie in blocks."""

    def __init__(self, model: nn.Module) -> None:
        cfg, self.dtype = model.cfg, model.lm_head.blocks.dtype
        layers: list[Tensor | None] = []
        for block in model.layers:
            attn, mlp = block.self_attn, block.mlp
            matrices = (
                attn.q_proj,
                attn.k_proj,
                attn.v_proj,
                attn.o_proj,
                mlp.gate_proj,
                mlp.up_proj,
                mlp.down_proj,
            )
            norms = attn.q_norm, attn.k_norm, block.input_layernorm, block.post_attention_layernorm
            layers += [linear.blocks for linear in matrices] + [
                linear.bias for linear in matrices[:3]
            ]
            weights = [getattr(norm, "weight", None) for norm in norms]
            layers += [None if weight is None else weight.float() for weight in weights]
        norm = model.norm.weight.float()
        table = (ctypes.c_void_p * len(layers))(*map(address, layers))
        self.kept = layers, norm, table  # C holds their addresses
        sizes = (
            cfg.n_layer,
            cfg.n_embd,
            cfg.n_head,
            cfg.n_kv_head,
            cfg.head_dim,
            cfg.ffn_dim,
            cfg.vocab_size,
        )
        ends = ctypes.addressof(table), address(norm), address(model.lm_head.blocks)
        self.model = Model(*sizes, cfg.norm_eps, *ends)

    def __call__(self, model: nn.Module, tokens: Tensor, parts: list) -> Tensor:
        """tokens (B,) -> logits (B, V) float32 of the next ones. parts: of the cache, see
        CacheStep."""
        cfg, B, n_threads = model.cfg, len(tokens), torch.get_num_threads()
        x, logits = model.embed_tokens.weight[tokens].float(), torch.empty(B, cfg.vocab_size)
        positions = torch.cat([part.lengths for part in parts])
        angles = [
            table[positions.clamp(max=cfg.block_size - 1)].float()
            for table in (model.cos, model.sin)
        ]
        sizes = torch.tensor([part.keys[0].shape[2] - 1 for part in parts for _ in part.lengths])
        rows, longest = rows_of(parts), int(positions.max()) + 1
        D, n_sharing = cfg.head_dim, cfg.n_head // cfg.n_kv_head
        shared = torch.empty(B, 2 * (cfg.n_head + cfg.n_kv_head) * D + cfg.ffn_dim)
        own = torch.empty(
            n_threads, 32 + B * cfg.n_embd + (1 + n_sharing) * D + n_sharing * longest
        )
        inputs = map(address, (x, *angles, positions, sizes))
        work = *map(address, (logits, shared, own)), own[0].nbytes
        kernels(self.dtype).step(
            ctypes.byref(self.model), *inputs, rows.ctypes.data, B, *work, n_threads
        )
        return logits


def rows_of(parts: list) -> np.ndarray:
    """Return (2 n_layer, B) the addresses of each layer's keys, then values, of each row."""
    found = []
    for part in parts:
        begin = np.array([layer.data_ptr() for layer in part.keys + part.values])[:, None]
        found.append(begin + np.arange(len(part.lengths)) * part.keys[0][0].nbytes)
    return found[0] if len(found) == 1 else np.concatenate(found, axis=1)
