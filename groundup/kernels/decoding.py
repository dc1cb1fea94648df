"""Products and decoding steps on a CPU in C: builds and calls step.c.

Where there is no C compiler torch does the same, more slowly. The plain reference is decode_step of
generate/decode.py.
"""

import ctypes
import functools
import mmap
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from groundup.compile_c import compile_c
from groundup.errors import say

DTYPES = (torch.float32, torch.bfloat16)  # of the weights and products; the rest is float32
WIDTH = 32  # rows of a weight that lie side by side, as in step.c
GROUP = 64  # 8-bit weights that share a scale, as in step.c


@functools.cache
def step_c(dtype: torch.dtype, int8: bool = False) -> ctypes.CDLL | None:
    """Return step.c, compiled for this dtype and its or 8-bit weights; None if that fails."""
    if dtype not in DTYPES:
        return None
    # One source for four libraries: types that are known when it is compiled make it fast.
    flags = ["-DBFLOAT16"] * (dtype == torch.bfloat16) + ["-DINT8"] * int8
    found = compile_c(Path(__file__).with_name("step.c"), *flags)
    if found is None:
        text = "generate: no C compiler works here (gcc or clang, with OpenMP)"
        say(f"{text}; text comes up to 3 times slower")
        return None
    # The types of their parameters, in the order of step.c.
    pointer, long, number = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    found.lay_out.argtypes = [*[pointer] * 3, long, long, number]
    found.product.argtypes = [*[pointer] * 5, *[long] * 3, number]
    found.step.argtypes = [*[pointer] * 7, long, *[pointer] * 3, long, number]
    found.lay_out.restype = found.product.restype = found.step.restype = None
    return found


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights, in torch: on a GPU, and to compare step.c with."""

    int8 = True

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        rounded, scales = quantize(linear.weight.detach())
        self.register_buffer("rounded", rounded)  # (N, K)
        self.register_buffer("scales", scales)  # (N, groups)
        self.bias, self.dtype = linear.bias, linear.weight.dtype

    @property
    def weight(self) -> Tensor:
        N, K = self.rounded.shape
        scales = self.scales.repeat_interleave(GROUP, dim=1)[:, :K]  # one for each weight
        return (self.rounded * scales).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) -> (..., N)"""
        return F.linear(x, self.weight, self.bias)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 (N, K) and scales (N, groups) float32, whose product is nearly weight (N, K).

    A group is GROUP neighbouring inputs of a row."""
    K = weight.shape[1]
    # The last group is filled up with zeros.
    groups = F.pad(weight.float(), (0, -K % GROUP)).unflatten(1, (-1, GROUP))  # (N, groups, GROUP)
    # The largest weight of a group becomes 127 or -127.
    scales = groups.abs().amax(dim=2, keepdim=True).clamp(min=1e-30) / 127
    rounded = (groups / scales).round().to(torch.int8).flatten(1)
    return rounded[:, :K].contiguous(), scales.squeeze(2)  # without what filled it up


class NativeLinear(nn.Module):
    """A linear layer with its weight (N, K) in the blocks of step.c."""

    def __init__(self, linear: nn.Linear | Int8Linear, dtype: torch.dtype, blocks: Tensor) -> None:
        # blocks: memory for the weight, n_bytes of it
        super().__init__()
        self.int8, self.dtype, self.blocks = isinstance(linear, Int8Linear), dtype, blocks
        self.bias = None if linear.bias is None else linear.bias.float()  # added in float32
        self.c = step_c(dtype, self.int8)
        if self.int8:
            weight, scales = linear.rounded, linear.scales.T.contiguous()
        else:
            weight, scales = linear.weight.to(dtype).contiguous(), None
        self.out_features, self.in_features = weight.shape
        # C writes the weight into `blocks`, in the order in which its products read it.
        addresses = map(address, (weight, scales, blocks))
        self.c.lay_out(*addresses, *weight.shape, torch.get_num_threads())

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) -> (..., N) in the dtype of the layer."""
        x = x.to(self.dtype).contiguous()
        y = torch.empty(*x.shape[:-1], self.out_features)  # float32
        n_rows, K = x.numel() // self.in_features, self.in_features
        # With 8-bit weights C also rounds the inputs: K numbers of a row and its scale.
        inputs = torch.empty(n_rows, K + 2, dtype=torch.int16) if self.int8 else None
        addresses = map(address, (self.blocks, self.bias, x, inputs, y))
        self.c.product(*addresses, n_rows, K, self.out_features, torch.get_num_threads())
        return y.to(x.dtype)


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def n_bytes(linear: nn.Linear | Int8Linear, dtype: torch.dtype) -> int:
    """Return the bytes of a layer in blocks of WIDTH rows."""
    if isinstance(linear, Int8Linear):
        N, row_bytes = len(linear.rounded), linear.rounded[0].nbytes + linear.scales[0].nbytes
    else:
        N, row_bytes = len(linear.weight), linear.in_features * dtype.itemsize
    return -(-N // WIDTH) * WIDTH * row_bytes  # rounded up: the last block is filled up


def huge_pages(size: int) -> Tensor:
    """Return (size,) uint8 zeros, on Linux in large pages: memory then gives a third more."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # another system
        return torch.zeros(size, dtype=torch.uint8)
    # The whole weight is read for every token, so small pages would cost many look-ups.
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def lay_out(places: list[tuple[nn.Module, str]], dtype: torch.dtype) -> None:
    """Replace linear layers, given by parent and name, by NativeLinear in one piece of memory."""
    # One piece, because large pages need room: a small layer would not fill one.
    sizes = [n_bytes(getattr(*place), dtype) for place in places]
    parts = huge_pages(sum(sizes)).split(sizes)
    for place, part in zip(places, parts, strict=True):
        setattr(*place, NativeLinear(getattr(*place), dtype, part))


class Model(ctypes.Structure):
    """Model of step.c, field by field."""

    _fields_ = (
        [(name, ctypes.c_long) for name in ("n_layer", "C", "H", "K", "D", "F", "V")]
        + [("eps", ctypes.c_double)]
        + [(name, ctypes.c_void_p) for name in ("layers", "norm", "head")]
    )


class NativeStep:
    """decode_step for a model whose matrices lie in blocks."""

    def __init__(self, model: nn.Module) -> None:
        cfg, self.int8, self.c = model.cfg, model.lm_head.int8, model.lm_head.c
        # What C reads of each block, in the order of Layer in step.c; None = it has no such part.
        layers: list[Tensor | None] = []
        for block in model.layers:
            attn, mlp = block.self_attn, block.mlp
            matrices = [attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj]
            matrices += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
            layers += [linear.blocks for linear in matrices]
            layers += [linear.bias for linear in matrices[:3]]
            # q_norm and k_norm may be nn.Identity, which has no weight
            norms = attn.q_norm, attn.k_norm, block.input_layernorm, block.post_attention_layernorm
            weights = [getattr(norm, "weight", None) for norm in norms]
            layers += [None if weight is None else weight.float() for weight in weights]
        # C gets addresses. What they lead to must stay as long as they are used.
        norm = model.norm.weight.float()
        table = (ctypes.c_void_p * len(layers))(*map(address, layers))
        self.kept = layers, norm, table
        sizes = (cfg.n_layer, cfg.n_embd, cfg.n_head, cfg.n_kv_head, cfg.head_dim)
        sizes += (cfg.ffn_dim, cfg.vocab_size)
        ends = ctypes.addressof(table), address(norm), address(model.lm_head.blocks)
        self.model = Model(*sizes, cfg.norm_eps, *ends)

    def __call__(self, model: nn.Module, tokens: Tensor, parts: list) -> Tensor:
        """tokens (B,) -> logits (B, V) float32 of the next. parts: of the cache, see CacheStep."""
        cfg, B, n_threads = model.cfg, len(tokens), torch.get_num_threads()
        x, logits = model.embed_tokens.weight[tokens].float(), torch.empty(B, cfg.vocab_size)
        # Of each row: the position of its new token, the angles there, and its place in the cache.
        positions = torch.cat([part.lengths for part in parts])
        at = positions.clamp(max=cfg.block_size - 1)
        angles = [table[at].float() for table in (model.cos, model.sin)]
        sizes = torch.tensor([part.keys[0].shape[2] - 1 for part in parts for _ in part.lengths])
        rows, longest = rows_of(parts), int(positions.max()) + 1
        # Memory that C computes in: one for all threads, and one for each. Sizes as in step.c.
        D, n_sharing = cfg.head_dim, cfg.n_head // cfg.n_kv_head
        shared = torch.empty(B, 2 * (cfg.n_head + cfg.n_kv_head) * D + cfg.ffn_dim)
        widest = max(cfg.n_embd, cfg.n_head * D, cfg.ffn_dim)  # of the inputs of all products
        # 8-bit weights: inputs rounded to 16 bits, and a scale for each row
        n_inputs = 16 + B * (1 + widest // 2) if self.int8 else 0
        n_own = 32 + B * cfg.n_embd + n_inputs + (1 + n_sharing) * D + n_sharing * longest
        own = torch.empty(n_threads, n_own)
        inputs = map(address, (x, *angles, positions, sizes))
        work = *map(address, (logits, shared, own)), own[0].nbytes
        self.c.step(ctypes.byref(self.model), *inputs, rows.ctypes.data, B, *work, n_threads)
        return logits


def rows_of(parts: list) -> np.ndarray:
    """Return (2 n_layer, B) the addresses of each layer's keys, then values, of each row."""
    found = []
    for part in parts:
        # A layer's keys are one tensor, so rows lie at equal distances.
        begin = np.array([layer.data_ptr() for layer in part.keys + part.values])[:, None]
        found.append(begin + np.arange(len(part.lengths)) * part.keys[0][0].nbytes)
    return found[0] if len(found) == 1 else np.concatenate(found, axis=1)
