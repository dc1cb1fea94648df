"""Attention: softmax(q k^T / sqrt(D)) v, over the keys that a query may see.

    layout = choose_layout(idx, starts, ...)    # once per forward, outside what is compiled
    y = attention(q, k, v, layout, dropout)     # in each layer; q (B, H, T, D), k, v (B, K, T, D)

The definition is `reference_attention`; the other functions compute the same, each on its hardware:

    torch_attention          anywhere, causal or with a mask; torch picks the kernel
    varlen_attention         documents that share a row, on a GPU with flash attention
    attention_by_document    long rows of documents on a CPU
    cpu_attention            bfloat16 on a CPU with AVX512-BF16, by attention.c
    cached_attention         a few new queries and a key-value cache
    attention_by_length      one new query of each row and a cache, on a GPU with flash attention

Several documents can share a row. `starts` (B, T) bool is true at the first token of each document;
the first token of a row always starts one.
"""

import ctypes
import functools
import importlib
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from groundup.compile_c import compile_c

# On a CPU, shorter rows of documents are computed with a mask, longer ones document by document:
# a mask wastes work with the square of the length, a call per document costs a fixed time.
MASKED_LENGTH = 512
# Before torch 2.12, varlen_attn wants as many heads of keys as of queries.
VARLEN_SHARES_KEYS = torch.__version__ >= (2, 12)


class Layout(NamedTuple):
    """What each query may see, in the form that the chosen kernel takes.

    At most one field is set. Without one each query sees its own position and all before it."""

    mask: Tensor | None = None  # (B, 1, T, T), added to the scores: 0 or -inf
    borders: Tensor | None = None  # (n + 1,) int32, see document_borders
    firsts: Tensor | None = None  # (B, T) int64: the first position that each query sees
    cache: Callable | None = None  # (q, k, v) -> attention to a cache, which stores k and v first


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products: that of autocast if it is on, else that of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def choose_layout(
    idx: Tensor,
    starts: Tensor | None,
    dtype: torch.dtype,
    head_dim: int,
    dropout: float,
    most_documents: int = 0,
) -> Layout:
    """Return the layout of the fastest kernel for these token ids (B, T).

    starts: documents to keep apart; None = rows are whole. dtype: of q, k and v. most_documents:
    upper bound on documents per row, 0 = one per token; it sizes a tensor (document_borders)."""
    # Here we ask what the hardware can do. torch.compile cannot trace such questions, so a compiled
    # block gets the answer with the layout.
    B, T = idx.shape
    # The C kernel: a query sees all from the start of its document or row.
    if c_kernel_works(idx.device, dtype, head_dim, dropout):
        whole_rows = torch.zeros_like(idx)
        return Layout(firsts=whole_rows if starts is None else first_positions(starts))
    if starts is None:
        return Layout()
    # Documents one by one, or else all pairs of tokens with a mask.
    if idx.is_cpu:
        apart = T > MASKED_LENGTH
    else:
        apart = dropout == 0 and has_varlen(idx.device, dtype, head_dim)  # it knows no dropout
    if apart:
        return Layout(borders=document_borders(starts, B * (most_documents or T)))
    return Layout(mask=document_mask(starts, dtype))


def attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, dropout: float = 0.0) -> Tensor:
    """Return attention (B, H, T, D) of q (B, H, T, D) to k and v (B, K, T, D).

    H is a multiple of K: with grouped-query attention, H / K query heads share a key head."""
    if layout.cache is not None:
        return layout.cache(q, k, v)
    if layout.firsts is not None:
        return cpu_attention(q, k, v, layout.firsts)
    if layout.borders is not None and q.is_cpu:
        return attention_by_document(q, k, v, layout.borders, dropout)
    if layout.borders is not None:
        return varlen_attention(q, k, v, layout.borders)
    return torch_attention(q, k, v, layout.mask, dropout)


def reference_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Return attention by its definition. visible (..., T, S) bool: query t may see key s."""
    k, v = repeat_heads(q, k, v)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # (B, H, T, S)
    scores = scores.masked_fill(~visible, -math.inf)
    return scores.softmax(dim=-1) @ v


def repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v with a head for each of q's, for kernels that cannot share them."""
    # Grouped queries: a head of keys serves H / K consecutive heads of queries.
    sharing = q.shape[1] // k.shape[1]
    return k.repeat_interleave(sharing, dim=1), v.repeat_interleave(sharing, dim=1)


# ---- ways to compute it --------------------------------------------------------------------------


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Return causal attention, or with `mask` what the mask shows."""
    # torch picks the kernel: flash attention on a GPU, its own on a CPU.
    shares = k.shape[1] < q.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=shares
        )
    if shares:  # no fused kernel of a GPU both takes a mask and shares keys among heads
        k, v = repeat_heads(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, borders: Tensor) -> Tensor:
    """Return causal attention within documents, by a kernel that skips what they do not see."""
    B, H, T, D = q.shape
    if not VARLEN_SHARES_KEYS:
        k, v = repeat_heads(q, k, v)
    # The kernel takes all rows as one: (B * T, heads, D).
    dtype = compute_dtype(q)
    q, k, v = (x.transpose(1, 2).flatten(0, 1).to(dtype) for x in (q, k, v))
    gqa = {"enable_gqa": True} if k.shape[1] < H else {}
    kernel = torch.nn.attention.varlen.varlen_attn
    causal = (-1, 0)  # how far a query sees: all before it, nothing after
    y = kernel(q, k, v, borders, borders, T, T, window_size=causal, **gqa)
    return y.view(B, T, H, D).transpose(1, 2)


@torch._disable_dynamo  # torch.compiler.disable would import torch._dynamo at once
def attention_by_document(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, dropout: float
) -> Tensor:
    """Return what varlen_attention does, on a CPU: each document by itself."""
    # Not compiled: the lengths of the documents would be part of the graph.
    B, H, T, D = q.shape
    lengths = [n for n in borders.diff().tolist() if n]  # the rest of borders is N
    # (B, heads, T, D) -> (heads, B * T, D), cut into documents
    q, k, v = (x.transpose(0, 1).reshape(x.shape[1], B * T, D) for x in (q, k, v))
    outputs = []
    documents = zip(q.split(lengths, 1), k.split(lengths, 1), v.split(lengths, 1), strict=True)
    for q1, k1, v1 in documents:
        y1 = torch_attention(q1.unsqueeze(0), k1.unsqueeze(0), v1.unsqueeze(0), None, dropout)
        outputs.append(y1.squeeze(0))
    return torch.cat(outputs, dim=1).view(H, B, T, D).transpose(0, 1)


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, firsts: Tensor) -> Tensor:
    """Return causal attention (B, H, T, D), computed in bfloat16.

    q (B, H, T, D), k and v (B, K, T, D), D a multiple of 8; firsts (B, T) int64: the first key that
    each query sees, at most its own."""
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))  # no copy where they are
    y, _ = torch.ops.groundup.cpu_attention(q, k, v, firsts)
    return y


def cached_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return attention of a few new queries to S cached keys.

    mask (T, S) or (B, 1, 1, S) is added to the scores."""
    B, H, T, D = q.shape
    K = k.shape[1]
    # Heads that share keys become more rows of one product.
    q = q.reshape(B, K, -1, D)
    if T > 1:
        mask = mask.repeat(H // K, 1)
    elif q.is_cpu and q.dtype != torch.float32 and q.shape[2] == 1:
        # torch's kernel is slower for one query than for two
        two = F.scaled_dot_product_attention(q.expand(-1, -1, 2, -1), k, v, attn_mask=mask)
        return two[:, :, :1]
    # On a GPU the result has the layout (B, T, heads, D) in memory, so no view is possible.
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).reshape(B, H, T, D)


def attention_by_length(
    q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, lengths: Tensor, width: int
) -> Tensor:
    """Return attention of q (B, H, 1, D) to the first lengths[b] <= width positions of each row.

    keys, values (B, K, L, D); starts (B + 1,) int32: multiples of L."""
    # The kernel reads no other positions, and splits a long row among processors.
    B, H = q.shape[:2]
    k = keys.transpose(1, 2).flatten(0, 1)  # (B L, K, D), no copy
    v = values.transpose(1, 2).flatten(0, 1)
    queries = torch.arange(B + 1, device=q.device, dtype=torch.int32)  # one in each row
    gqa = {"enable_gqa": True} if k.shape[1] < H else {}
    kernel = torch.nn.attention.varlen.varlen_attn
    q = q[:, :, 0].to(k.dtype)
    return kernel(q, k, v, queries, starts, 1, width, seqused_k=lengths, **gqa).unsqueeze(2)


def has_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether flash attention, the only kernel behind varlen_attn, runs here."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    if head_dim % 8 or head_dim > 256:
        return False
    importlib.import_module("torch.nn.attention.varlen")  # late: it takes a second
    if not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def has_varlen_lengths(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether varlen_attn also takes a length for each row; older versions do not."""
    if not has_varlen(device, dtype, head_dim):
        return False
    signature = inspect.signature(torch.nn.attention.varlen.varlen_attn)
    return "seqused_k" in signature.parameters


# ---- documents that share a row ------------------------------------------------------------------


def documents_of(idx: Tensor, opener: int) -> Tensor:
    """Return the number of each token's document, (B, T) int64, for token ids (B, T).

    A document starts at each `opener`, except behind another one."""
    # The openers that fill up a packed row are one document.
    is_opener = idx == opener
    opens = is_opener.clone()
    opens[:, 1:] &= ~is_opener[:, :-1]
    return opens.cumsum(1)


def starts_of(documents: Tensor) -> Tensor:
    """Return where documents start, (B, T) bool: where their number changes."""
    starts = torch.ones_like(documents, dtype=torch.bool)  # also the first token of a row
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return starts


def first_positions(starts: Tensor) -> Tensor:
    """Return where in its row each token's document starts, (B, T) int64."""
    # A start has its own column, all else 0: the largest so far is the last start.
    columns = torch.arange(starts.shape[1], device=starts.device)
    return (columns * starts).cummax(1).values


def positions_of(starts: Tensor) -> Tensor:
    """Return each token's position in its document, (B, T) int64."""
    return torch.arange(starts.shape[1], device=starts.device) - first_positions(starts)


def document_mask(starts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask (B, 1, T, T) that shows earlier positions of the same document."""
    # Of the same document, by its number, and not after the query.
    number = starts.cumsum(1)
    same = number[:, None, :, None] == number[:, None, None, :]
    return additive_mask(same.tril(), dtype)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores: 0 where `visible` (bool), else -inf."""
    # Made once for all layers: given a bool mask, torch would make it in each.
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, -math.inf)


def document_borders(starts: Tensor, most: int) -> Tensor:
    """Return where each document starts among all N = B * T tokens, (most + 1,) int32, then N.

    More than `most` documents end the process with a message."""
    # The size is fixed, and the rest is filled with N (documents without tokens): so compiled
    # blocks stay valid, and the GPU need not report how many documents there are.
    N = starts.numel()
    # The k-th document starts at the first token whose number is k.
    number = starts.flatten().cumsum(0)
    wanted = torch.arange(1, most + 2, device=starts.device)
    borders = torch.searchsorted(number, wanted, out_int32=True)
    text = f"model: over {most} documents in {N} tokens: most_documents is too low"
    torch._assert_async(borders[-1] == N, text)
    return borders


# ---- attention.c ---------------------------------------------------------------------------------


def c_kernel_works(device: torch.device, dtype: torch.dtype, head_dim: int, dropout: float) -> bool:
    """Return whether attention.c computes these heads here; it also needs a C compiler."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    # It reads 8 numbers at a time, and draws no random ones.
    if head_dim % 8 or dropout:
        return False
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.11 has none
    return bool(capabilities.get("avx512_bf16")) and c_library() is not None


@functools.cache
def c_library() -> ctypes.CDLL | None:
    """Return attention.c, compiled; None without a compiler."""
    # Both functions take the struct Attention below and the number of threads.
    found = compile_c(Path(__file__).with_name("attention.c"))
    if found is not None:
        for function in (found.attention, found.attention_backward):
            function.argtypes = [ctypes.c_void_p, ctypes.c_int]
            function.restype = None
    return found


class Heads(ctypes.Structure):
    """Tensor of attention.c, field by field: (B, heads, T, D), its memory and strides."""

    _fields_ = [("data", ctypes.c_void_p)] + [
        (name, ctypes.c_long) for name in ("row", "head", "position")
    ]


class Attention(ctypes.Structure):
    """Attention of attention.c, field by field: tensors, pointers, sizes, 1 / sqrt(D)."""

    _fields_ = (
        [(name, Heads) for name in ("q", "k", "v", "y", "dy", "dq", "dk", "dv")]
        + [("lse", ctypes.c_void_p), ("firsts", ctypes.c_void_p)]
        + [(name, ctypes.c_long) for name in ("B", "H", "K", "T", "D")]
        + [("scale", ctypes.c_float)]
    )


def call_c(function: str, lse: Tensor, firsts: Tensor, **tensors: Tensor) -> None:
    """Call a function of attention.c with the named tensors (B, heads, T, D)."""
    # C reads a head's D numbers side by side; all other strides it is told, so nothing is copied.
    assert all(x.stride(3) == 1 and x.dtype == torch.bfloat16 for x in tensors.values())
    heads = {name: Heads(x.data_ptr(), *x.stride()[:3]) for name, x in tensors.items()}
    B, H, T, D = tensors["q"].shape
    K = tensors["k"].shape[1]
    firsts = firsts.contiguous()
    pointers = {"lse": lse.data_ptr(), "firsts": firsts.data_ptr()}
    struct = Attention(**heads, **pointers, B=B, H=H, K=K, T=T, D=D, scale=D**-0.5)
    getattr(c_library(), function)(ctypes.byref(struct), torch.get_num_threads())


def empty_like(x: Tensor) -> Tensor:
    """Return (B, heads, T, D) with a position's heads side by side, as linear layers have them."""
    B, heads, T, D = x.shape
    return x.new_empty(B, T, heads, D).transpose(1, 2)


# Its two directions are operators of torch, so torch.compile calls them as they are, and asks only
# for the shapes of their results. (torch.library.custom_op would import torch._dynamo at the first
# call, which takes a second.)
LIBRARY = torch.library.Library("groundup", "DEF")
LIBRARY.define("cpu_attention(Tensor q, Tensor k, Tensor v, Tensor firsts) -> (Tensor, Tensor)")
LIBRARY.define(
    "cpu_attention_backward(Tensor dy, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor firsts)"
    " -> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(LIBRARY, "cpu_attention", "CPU")
def c_forward(q: Tensor, k: Tensor, v: Tensor, firsts: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention, and for backward the log of each query's sum of exponentials (B, H, T)."""
    y, lse = c_forward_shapes(q, k, v, firsts)
    call_c("attention", lse, firsts, q=q, k=k, v=v, y=y)
    return y, lse


@torch.library.register_fake("groundup::cpu_attention")
def c_forward_shapes(q: Tensor, k: Tensor, v: Tensor, firsts: Tensor) -> tuple[Tensor, Tensor]:
    return empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.impl(LIBRARY, "cpu_attention_backward", "CPU")
def c_backward(
    dy: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, firsts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    dq, dk, dv = c_backward_shapes(dy, lse, q, k, v, firsts)
    # autograd may bring a gradient with any strides, such as that of a sum
    dy = dy if dy.stride(3) == 1 else dy.contiguous()
    call_c("attention_backward", lse, firsts, q=q, k=k, v=v, dy=dy, dq=dq, dk=dk, dv=dv)
    return dq, dk, dv


@torch.library.register_fake("groundup::cpu_attention_backward")
def c_backward_shapes(
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
