"""Causal attention on a CPU in bfloat16, by attention.c.

The two directions are operators of torch, so torch.compile calls them as they are.
"""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from groundup.compile_c import compile_c

# torch.library.custom_op would import torch._dynamo at the first call, which takes a second
LIBRARY = torch.library.Library("groundup", "DEF")
LIBRARY.define("cpu_attention(Tensor q, Tensor k, Tensor v, Tensor firsts) -> (Tensor, Tensor)")
LIBRARY.define(
    "cpu_attention_backward(Tensor dy, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor firsts)"
    " -> (Tensor, Tensor, Tensor)"
)


def attend(q: Tensor, k: Tensor, v: Tensor, firsts: Tensor) -> Tensor:
    """Return causal attention (B, H, T, D), computed in bfloat16.

    q (B, H, T, D), k and v (B, K, T, D), D a multiple of 8; firsts (B, T) int64: the first key that
    each query sees, at most its own."""
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    y, _ = torch.ops.groundup.cpu_attention(q, k, v, firsts)
    return y


def suits(device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float) -> bool:
    """Return whether attention.c is written for this processor and these heads."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    # It reads 8 numbers at a time, and draws no random ones.
    if head_dim % 8 or dropout:
        return False
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.11 has none
    return bool(capabilities.get("avx512_bf16"))


def works(device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float) -> bool:
    """Return whether `attend` can be called: it also needs a C compiler."""
    return suits(device, dtype, head_dim, dropout) and library() is not None


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return attention.c, compiled; None without a compiler."""
    # Both functions take the struct Attention below and the number of threads.
    found = compile_c(Path(__file__).with_name("attention.c"))
    if found is not None:
        for function in (found.attention, found.attention_backward):
            function.argtypes = [ctypes.c_void_p, ctypes.c_int]
            function.restype = None
    return found


# The next two are the structs of attention.c, field by field.


class Heads(ctypes.Structure):
    """Tensor of attention.c: (B, heads, T, D) and its strides."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("row", ctypes.c_long),
        ("head", ctypes.c_long),
        ("position", ctypes.c_long),
    ]


class Attention(ctypes.Structure):
    """Attention of attention.c."""

    _fields_ = (
        [(name, Heads) for name in ("q", "k", "v", "y", "dy", "dq", "dk", "dv")]
        + [("lse", ctypes.c_void_p), ("firsts", ctypes.c_void_p)]
        + [(name, ctypes.c_long) for name in ("B", "H", "K", "T", "D")]
        + [("scale", ctypes.c_float)]
    )


def call(function: str, lse: Tensor, firsts: Tensor, **tensors: Tensor) -> None:
    """Call a function of attention.c with the named tensors (B, heads, T, D)."""
    # C reads a head's D numbers side by side; all other strides it is told, so nothing is copied.
    assert all(x.stride(3) == 1 and x.dtype == torch.bfloat16 for x in tensors.values())
    heads = {name: Heads(x.data_ptr(), *x.stride()[:3]) for name, x in tensors.items()}
    B, H, T, D = tensors["q"].shape
    K = tensors["k"].shape[1]
    firsts = firsts.contiguous()
    pointers = {"lse": lse.data_ptr(), "firsts": firsts.data_ptr()}
    struct = Attention(**heads, **pointers, B=B, H=H, K=K, T=T, D=D, scale=D**-0.5)
    getattr(library(), function)(ctypes.byref(struct), torch.get_num_threads())


def empty_like(x: Tensor) -> Tensor:
    """Return (B, heads, T, D) with a position's heads side by side, as linear layers have them."""
    B, heads, T, D = x.shape
    return x.new_empty(B, T, heads, D).transpose(1, 2)


# ---- the operators: what they compute, and for torch.compile the shapes of it --------------------


@torch.library.impl(LIBRARY, "cpu_attention", "CPU")
def forward(q: Tensor, k: Tensor, v: Tensor, firsts: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention, and for backward the log of each query's sum of exponentials (B, H, T)."""
    y, lse = shapes(q, k, v, firsts)
    call("attention", lse, firsts, q=q, k=k, v=v, y=y)
    return y, lse


# torch.compile asks for shapes alone.
@torch.library.register_fake("groundup::cpu_attention")
def shapes(q: Tensor, k: Tensor, v: Tensor, firsts: Tensor) -> tuple[Tensor, Tensor]:
    return empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.impl(LIBRARY, "cpu_attention_backward", "CPU")
def gradients(
    dy: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, firsts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    dq, dk, dv = gradient_shapes(dy, lse, q, k, v, firsts)
    # autograd may bring a gradient with any strides, such as that of a sum
    dy = dy if dy.stride(3) == 1 else dy.contiguous()
    call("attention_backward", lse, firsts, q=q, k=k, v=v, dy=dy, dq=dq, dk=dk, dv=dv)
    return dq, dk, dv


@torch.library.register_fake("groundup::cpu_attention_backward")
def gradient_shapes(
    dy: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, firsts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_like(q), empty_like(k), empty_like(v)


def save_for_backward(ctx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    # Nothing depends on lse but backward: no zeros for its gradient, which is None
    ctx.set_materialize_grads(False)
    q, k, v, firsts = inputs
    _, lse = output
    ctx.save_for_backward(lse, q, k, v, firsts)


def backward(ctx, dy: Tensor, _: None) -> tuple[Tensor, Tensor, Tensor, None]:
    dq, dk, dv = torch.ops.groundup.cpu_attention_backward(dy, *ctx.saved_tensors)
    return dq, dk, dv, None


torch.library.register_autograd(
    "groundup::cpu_attention", backward, setup_context=save_for_backward
)
