"""The model: a Llama-shaped decoder and its chunked loss.

RMSNorm before each sub-layer, rotary positions, SwiGLU, grouped-query attention, no biases; with QK-norm it is Qwen3's
architecture, with biases on queries, keys and values Qwen2's. Parameters carry Hugging Face's names without "model.".

    model(idx, targets) -> sum of the cross-entropy over the valid targets, 0-d float32
    model(idx)          -> logits (B, T, V)
    model(idx, ..., index=i) -> hidden states (n, C) at positions i (n,) of the flattened idx, for `cross_entropy`
    model(idx, ..., documents=d) -> the same with attention and positions confined to each document, see `hidden`
    model(idx, cache=c) -> logits (B, T, V) of new positions in a key-value cache, see groundup/generate/kv_cache.py
    model.hidden(idx, ...) -> hidden states (B, T, C) after the final norm: the input of model.lm_head

Shapes: B batch, T time, C n_embd, H heads, K key-value heads, D head_dim, V vocab.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from groundup.errors import UserError
from groundup.tokens.documents import (
    borders_of,
    can_border,
    documents_of,
    firsts_of,
    lengths_of,
    mask_of,
    positions_of,
    starts_of,
)  # fmt: skip
from groundup.train import cpu_attention

IGNORE = -100  # a target with this value is not trained on
# Elements of the largest block of logits that the loss holds. On a CPU 24 MiB in float32 are enough for fast products;
# from 32 MiB on glibc maps new pages every time. A GPU wants thousands of rows at once. What happens to be free
# has no say: other blocks are other roundings, and a resumed run would differ.
CHUNK_ELEMENTS = 3 * 2**21
GPU_CHUNK_ELEMENTS = 2**27
MASKED_LENGTH = 512  # up to here a CPU masks attention between documents; above, it computes each by itself
VARLEN_SHARES_KEYS = torch.__version__ >= (2, 12)  # torch's varlen_attn takes fewer heads of keys than of queries


@dataclass
class ModelConfig:
    vocab_size: int
    block_size: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int = 0  # 0 = n_head; fewer = grouped-query attention
    n_embd: int = 768
    head_dim: int = 0  # 0 = n_embd // n_head
    ffn_dim: int = 0  # 0 = 8/3 n_embd rounded up to a multiple of 64: SwiGLU's three matrices cost as much as 4x two
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # Llama 3.1's long-context frequencies, or YaRN's, as config.json has them
    norm_eps: float = 1e-5
    qk_norm: bool = False  # RMSNorm on each head's query and key before the rotation (Qwen3)
    qkv_bias: bool = False  # biases on queries, keys and values (Qwen2)
    model_type: str = ""  # Hugging Face's name; "" = from the two above. mistral computes what llama does
    tie_embeddings: bool = True
    dropout: float = 0.0
    init_std: float = field(default=0.0, compare=False)  # of new weights; 0 = 0.02

    def __post_init__(self) -> None:
        self.n_kv_head, self.init_std = self.n_kv_head or self.n_head, self.init_std or 0.02
        for key in ("vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "rope_theta", "norm_eps"):
            if getattr(self, key) <= 0:
                raise UserError(f"model: {key} must be positive, got {getattr(self, key)}")
        if self.head_dim < 0 or self.ffn_dim < 0 or not 0 <= self.dropout < 1:
            sizes = f"head_dim={self.head_dim} and ffn_dim={self.ffn_dim} must not be negative"
            raise UserError(f"model: {sizes}, dropout={self.dropout} must be from 0 to below 1")
        if self.n_head % self.n_kv_head:
            raise UserError(f"model: n_head={self.n_head} must be a multiple of n_kv_head={self.n_kv_head}")
        if not self.head_dim and self.n_embd % self.n_head:
            raise UserError(f"model: n_embd={self.n_embd} must be a multiple of n_head={self.n_head}")
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.head_dim % 2:
            raise UserError(f"model: head_dim={self.head_dim} must be even: rotary positions turn pairs")
        self.ffn_dim = self.ffn_dim or 64 * math.ceil(self.n_embd * 8 / 3 / 64)
        self.model_type = self.model_type or ("qwen3" if self.qk_norm else "qwen2" if self.qkv_bias else "llama")


class Transformer(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.activation_checkpointing = False  # recompute each block in backward: less memory, a third more work
        self.document_id: int | None = None  # token that opens a document, for calls without `documents`
        self.most_documents = 0  # in a row; attention by borders has room for as many. 0 = any token may open one
        self.varlen: bool | None = None  # skip the work between documents, not mask it; None = if this device can
        self.neftune_alpha = 0.0  # noise on the embeddings in training; the paper's values are 5 to 15
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        if cfg.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        for name, table in zip(("cos", "sin"), rope_tables(cfg), strict=True):
            self.register_buffer(name, table, persistent=False)  # (block_size, D/2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, p in self.named_parameters():
            self.init_parameter(name, p)

    def init_parameter(self, name: str, p: Tensor) -> None:
        """GPT-2's initialisation: N(0, init_std), divided by sqrt(2 n_layer) for matrices that add to the residual."""
        if p.ndim == 2:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(p, std=self.cfg.init_std / (math.sqrt(2 * self.cfg.n_layer) if residual else 1))
        elif name.endswith(".bias"):
            nn.init.zeros_(p)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, cache: Any = None,
        documents: Tensor | None = None, index: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """idx (B, T) int64; targets (B, T) int64 or IGNORE. See the top of the file for the result."""
        x = self.hidden(idx, cache, documents)
        if index is not None:
            return x.flatten(0, 1)[index]
        if targets is None:
            return self.lm_head(x)
        return cross_entropy(x.flatten(0, 1), self.lm_head.weight, targets.flatten())[0]

    def hidden(self, idx: Tensor, cache: Any = None, documents: Tensor | None = None) -> Tensor:
        """idx (B, T) int64 -> hidden states after the final norm (B, T, C).

        documents (B, T) int64: the number of each token's document. A new document begins where the number changes;
        give padding a number of its own. Each document is computed as if it were alone in its row. Not with a cache.

        cache: `positions` (1, T) or (B, 1) of the new tokens; layer(i)(q, k, v), which stores keys and values
        (B, K, T, D) of layer i and returns the attention of q (B, H, T, D) to all so far."""
        assert cache is None or documents is None, "with a cache each row is one document"
        starts = mask = borders = firsts = None
        if cache is not None:
            positions = cache.positions.unsqueeze(1)  # (1, 1, T) or (B, 1, 1)
        else:
            T = idx.shape[1]
            assert T <= self.cfg.block_size, f"{T=} is more than block_size={self.cfg.block_size}"
            if documents is None and self.document_id is not None:
                documents = documents_of(idx, self.document_id)
            starts = None if documents is None else starts_of(documents)
            positions = slice(T) if starts is None else positions_of(starts).unsqueeze(1)
        cos, sin = self.cos[positions], self.sin[positions]  # (T, D/2) or (.., 1, T, D/2)
        x = self.embed(idx, starts)
        if cache is None and cpu_attention.works(self.cfg, x.device, compute_dtype(x)):
            firsts = torch.zeros_like(idx) if starts is None else firsts_of(starts)
        elif starts is not None:
            mask, borders = self.confine(starts, compute_dtype(x))
        for i, block in enumerate(self.layers):
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, None, mask, borders, firsts, use_reentrant=False)
            else:
                x = block(x, cos, sin, None if cache is None else cache.layer(i), mask, borders, firsts)
        return self.norm(x)

    def embed(self, idx: Tensor, starts: Tensor | None) -> Tensor:
        """idx (B, T) int64 -> embeddings (B, T, C). In training NEFTune (arXiv:2310.05914) adds noise, uniform up to
        alpha / sqrt(L C), where L is the length of the token's document if `starts` is given, else of the row."""
        x = self.embed_tokens(idx)
        if torch.is_autocast_enabled(x.device.type):
            x = x.float()  # the residual stream, also of weights that are held in bfloat16
        if self.training and self.neftune_alpha:
            L = idx.shape[1] if starts is None else lengths_of(starts).unsqueeze(-1)
            x = x + torch.empty_like(x).uniform_(-1, 1) * (self.neftune_alpha / (L * x.shape[-1]) ** 0.5)
        return F.dropout(x, self.cfg.dropout, self.training)

    def confine(self, starts: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return (mask, borders), which restrict attention to the documents that begin at `starts`; one is None."""
        B, T = starts.shape
        by_borders = self.varlen
        if by_borders is None:
            by_borders = starts.is_cpu or can_border(starts.device, dtype, self.cfg.head_dim)
        if starts.is_cpu:
            by_borders = by_borders and T > MASKED_LENGTH
        elif self.training and self.cfg.dropout > 0:
            by_borders = False
        if by_borders:
            return None, borders_of(starts, B * (self.most_documents or T))
        return mask_of(starts, dtype), None

    def compile_blocks(self, compile_fn: Callable) -> None:
        """Compile each block by itself, and the last norm: the start is fast, as all blocks share one graph, and
        communication overlaps, as a block's gradients are ready when its backward ends. On a GPU the loss, too."""
        for part in (*self.layers, self.norm):
            part.forward = compile_fn(part.forward)
        if self.lm_head.weight.is_cuda:
            ChunkedCrossEntropy.chunk = staticmethod(torch.compile(fused_chunk))


# ---- layers ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.mlp = MLP(cfg)
        self.dropout = cfg.dropout

    def forward(self, x: Tensor, *where: Any) -> Tensor:
        """x (B, T, C) -> (B, T, C). where: what Attention takes besides x."""
        x = x + F.dropout(self.self_attn(self.input_layernorm(x), *where), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout, self.training)


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        H, K, D, C = cfg.n_head, cfg.n_kv_head, cfg.head_dim, cfg.n_embd
        self.head_dim, self.dropout = D, cfg.dropout
        self.q_proj = nn.Linear(C, H * D, bias=cfg.qkv_bias)
        self.k_proj = nn.Linear(C, K * D, bias=cfg.qkv_bias)
        self.v_proj = nn.Linear(C, K * D, bias=cfg.qkv_bias)
        self.o_proj = nn.Linear(H * D, C, bias=False)
        self.q_norm = RMSNorm(D, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, cfg.norm_eps) if cfg.qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable | None = None, mask: Tensor | None = None,
        borders: Tensor | None = None, firsts: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T, D)
        k = self.k_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, K, T, D)
        v = self.v_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, K, T, D)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        dropout = self.dropout if self.training else 0.0
        if attend is not None:  # to a key-value cache
            y = attend(q, k, v)
        elif firsts is not None:
            y = cpu_attention.attend(q, k, v, firsts)
        elif borders is not None:
            y = attention_by_document(q, k, v, borders, dropout) if q.is_cpu else flash_attention(q, k, v, borders)
        else:
            y = causal_attention(q, k, v, dropout, mask)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)): SwiGLU (arXiv:2002.05202)."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(cfg.n_embd, cfg.ffn_dim, bias=False)
        self.up_proj = nn.Linear(cfg.n_embd, cfg.ffn_dim, bias=False)
        self.down_proj = nn.Linear(cfg.ffn_dim, cfg.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    """x / rms(x) * weight (arXiv:1910.07467) in float32. Under autocast the result is cast once for all readers."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return y.to(compute_dtype(x))


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products: autocast's if it is on, else that of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def rope_frequencies(cfg: ModelConfig) -> Tensor:
    """Angle per position of each pair of features, (D/2,) float32 (arXiv:2104.09864)."""
    inv_freq = cfg.rope_theta ** -(torch.arange(0, cfg.head_dim, 2, dtype=torch.float32) / cfg.head_dim)
    if not cfg.rope_scaling:
        return inv_freq
    s = cfg.rope_scaling  # slow down the long wavelengths by `factor`, keep the short ones, blend between
    if s["rope_type"] == "yarn":  # arXiv:2309.00071; the blend is linear in the number of the pair
        per_turn = s["original_max_position_embeddings"] / (2 * math.pi)
        first, last = (
            cfg.head_dim / 2 * math.log(per_turn / turns, cfg.rope_theta)  # the pair that turns so often
            for turns in (s.get("beta_fast") or 32, s.get("beta_slow") or 1)
        )
        first, last = (math.floor(first), math.ceil(last)) if s.get("truncate", True) else (first, last)
        first, last = max(first, 0), min(last, cfg.head_dim - 1)
        keep = 1 - ((torch.arange(len(inv_freq)) - first) / (last - first or 0.001)).clamp(0, 1)
    else:  # Llama 3.1: linear in the turns within the original context
        turns = s["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
        keep = ((turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])).clamp(0, 1)
    return inv_freq * (keep + (1 - keep) / s["factor"])


def rope_tables(cfg: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of the angles of all positions, (block_size, D/2) float32."""
    angles = torch.outer(torch.arange(cfg.block_size, dtype=torch.float32), rope_frequencies(cfg))
    return angles.cos() * rope_scale(cfg), angles.sin() * rope_scale(cfg)


def rope_scale(cfg: ModelConfig) -> float:
    """Return the factor of cos and sin: YaRN's, which sharpens attention over long contexts."""
    s = cfg.rope_scaling or {}
    if s.get("rope_type") != "yarn" or s.get("attention_factor") is not None:
        return s.get("attention_factor", 1.0)
    growth = 0.1 * math.log(max(1.0, s["factor"]))
    if s.get("mscale") and s.get("mscale_all_dim"):
        return (growth * s["mscale"] + 1) / (growth * s["mscale_all_dim"] + 1)
    return growth + 1


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]) of x (B, H, T, D) by the angles given as cos and sin (..., T, D/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat(((a * cos - b * sin).type_as(x), (b * cos + a * sin).type_as(x)), dim=-1)


# ---- attention: softmax(q k^T / sqrt(D)) v, q (B, H, T, D), k and v (B, K, S, D) ------------------------------------


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Tensor | None = None) -> Tensor:
    """Return causal attention, by the fastest kernel. mask (B, 1, T, T): see `mask_of`; None = the whole past."""
    n_sharing = q.shape[1] // k.shape[1]  # heads that share keys
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=n_sharing > 1)
    if n_sharing > 1:  # on a GPU no fused kernel both takes a mask and shares keys among heads
        k, v = (t.repeat_interleave(n_sharing, dim=1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)


def cached_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention; mask (T, S) or (B, 1, 1, S) is added to the scores. Heads that share keys become more rows of one
    product."""
    B, H, T, D = q.shape
    q = q.reshape(B, k.shape[1], -1, D)
    if T > 1:
        mask = mask.repeat(H // k.shape[1], 1)
    elif q.is_cpu and q.dtype != torch.float32 and q.shape[2] == 1:  # torch's kernel is slower for one query than two
        return F.scaled_dot_product_attention(q.expand(-1, -1, 2, -1), k, v, attn_mask=mask)[:, :, :1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).view(B, H, T, D)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, borders: Tensor) -> Tensor:
    """Causal attention within the documents between `borders_of`, by a GPU's varlen kernel."""
    B, H, T, D = q.shape
    if not VARLEN_SHARES_KEYS:
        k, v = (t.repeat_interleave(H // t.shape[1], dim=1) for t in (k, v))
    dtype = compute_dtype(q)
    q, k, v = (t.transpose(1, 2).flatten(0, 1).to(dtype) for t in (q, k, v))  # (B * T, heads, D)
    sharing = {"enable_gqa": True} if k.shape[1] < H else {}
    attend = torch.nn.attention.varlen.varlen_attn
    y = attend(q, k, v, borders, borders, T, T, window_size=(-1, 0), **sharing)
    return y.view(B, T, H, D).transpose(1, 2)


@torch._disable_dynamo  # torch.compiler.disable would import torch._dynamo at once
def attention_by_document(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, dropout: float) -> Tensor:
    """`flash_attention` for CPUs: each document by itself. Not compiled: their number would be part of the graph."""
    B, H, T, D = q.shape
    lengths = list(filter(None, borders.diff().tolist()))
    rows = (t.transpose(0, 1).reshape(t.shape[1], B * T, D).split(lengths, dim=1) for t in (q, k, v))
    parts = [causal_attention(*(t.unsqueeze(0) for t in part), dropout).squeeze(0) for part in zip(*rows, strict=True)]
    return torch.cat(parts, dim=1).view(H, B, T, D).transpose(0, 1)


# ---- loss -----------------------------------------------------------------------------------------------------------


def cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(sum over valid targets of weights * nats, 0-d float32; nats (N,) float32, detached, 0 if not valid), where
    nats = -log softmax(hidden @ weight.T)[target], without ever holding all the logits.

    hidden (N, C), weight (V, C), targets (N,) int64 or IGNORE, weights (N,) float32 or None for 1. Without a valid
    target the loss and its gradients are 0. Only the gradients that autograd needs are computed."""
    dtype = compute_dtype(hidden)
    return ChunkedCrossEntropy.apply(hidden, weight, targets, weights, dtype, torch.is_grad_enabled())


def chunk_rows(vocab_size: int, device_type: str) -> int:
    """Return of how many tokens the logits are held at once."""
    return max(1, (CHUNK_ELEMENTS if device_type == "cpu" else GPU_CHUNK_ELEMENTS) // vocab_size)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Head and loss, one chunk of tokens at a time. Forward computes the gradients too, while the logits exist."""

    chunk: Callable | None = None  # a compiled `fused_chunk`

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None, dtype: torch.dtype,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        N, chunk, w = hidden.shape[0], chunk_rows(weight.shape[0], hidden.device.type), weight.to(dtype)
        loss, nats = hidden.new_zeros((), dtype=torch.float32), hidden.new_empty(N, dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if with_grad and ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if with_grad and ctx.needs_input_grad[1] else None
        learns = grad_hidden is not None or grad_weight is not None
        fused = ChunkedCrossEntropy.chunk if hidden.is_cuda and learns else None
        with torch.autocast(hidden.device.type, enabled=False):
            for part in (slice(start, start + chunk) for start in range(0, N, chunk)):
                h, t = hidden[part].to(dtype), targets[part]
                scale = (t != IGNORE).float() if weights is None else weights[part].float() * (t != IGNORE)
                if fused:
                    nats[part], grad_logits = fused(h, w, t, scale)
                else:
                    logits = (h @ w.T).float()
                    nats[part], lse = softmax_cross_entropy(logits, t)
                loss += (nats[part] * scale).sum()
                if not learns:
                    continue
                if not fused:
                    grad_logits = cross_entropy_gradient(logits, t, lse, scale).to(dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = grad_logits @ w
                if grad_weight is not None:
                    add_product(grad_weight, grad_logits.T, h)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(nats)
        return loss, nats

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor) -> tuple:
        # a scale rounded to bfloat16 first would be off by up to 0.4 %, by another amount for each number of ranks
        grads = [saved if saved is None else (saved.float() * grad).to(saved.dtype) for saved in ctx.saved_tensors]
        return *grads, None, None, None, None


@torch.no_grad()
def token_scores(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (nats (N,) float32 as in `cross_entropy`, correct (N,) bool: the target is the likeliest token).

    hidden (N, C), weight (V, C), targets (N,) int64 or IGNORE, which is never correct."""
    dtype, chunk = compute_dtype(hidden), chunk_rows(weight.shape[0], hidden.device.type)
    w, nats, correct = weight.to(dtype), [], []
    with torch.autocast(hidden.device.type, enabled=False):
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            logits = (h.to(dtype) @ w.T).float()
            nats.append(softmax_cross_entropy(logits, t)[0])
            correct.append(logits.argmax(dim=1) == t)
    return torch.cat(nats), torch.cat(correct)


def softmax_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """logits (n, V) float32, targets (n,) -> (nats (n,), 0 where IGNORE; log of the sum of exponentials (n, 1))."""
    valid = targets != IGNORE
    index = targets.masked_fill(~valid, 0).unsqueeze(1)
    nats = -logits.log_softmax(dim=1).gather(1, index)  # on a CPU one kernel, half the time of logsumexp's five passes
    return nats.squeeze(1) * valid, logits.gather(1, index) + nats


def cross_entropy_gradient(logits: Tensor, targets: Tensor, lse: Tensor, scale: Tensor) -> Tensor:
    """Gradient of sum(scale * nats), written over the logits (n, V). scale (n,) float32, 0 where IGNORE."""
    p = logits.sub_(lse).exp_()
    index = targets.clamp(min=0).unsqueeze(1)
    p.scatter_add_(1, index, torch.full_like(index, -1.0, dtype=p.dtype))
    return p.mul_(scale.unsqueeze(1))


def fused_chunk(h: Tensor, w: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """h (n, C), w (V, C) -> (nats (n,), gradient of sum(scale * nats) by the logits (n, V)), to be compiled: few
    kernels behind the product, none of which writes the logits in float32."""
    logits, valid = (h @ w.T).float(), targets != IGNORE
    index = targets.clamp(min=0).unsqueeze(1)
    lse = logits.logsumexp(dim=1, keepdim=True)
    nats = (lse - logits.gather(1, index)).squeeze(1) * valid
    hit = torch.arange(w.shape[0], device=w.device) == index
    return nats, (((logits - lse).exp() - hit.float()) * scale.unsqueeze(1)).to(h.dtype)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out (V, C) float32 += a (V, n) @ b (n, C). A sum over many tokens can exceed float16's 65504: float32 there."""
    if a.dtype == torch.float32:
        out.addmm_(a, b)
    elif a.is_cuda:
        out += torch.mm(a, b, out_dtype=torch.float32)
    else:
        out += a.float() @ b.float() if a.dtype == torch.float16 else a @ b
