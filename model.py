"""The model: a Llama-shaped decoder, its chunked loss, its key-value cache; parameter, FLOPs and memory arithmetic.

RMSNorm before each sub-layer, rotary positions, SwiGLU, grouped-query attention, no biases; optional QK-norm (then it
is Qwen3's architecture) and optional tied embeddings. Parameters carry Hugging Face's names without "model.".

    model(idx, targets) -> sum of the cross-entropy over the valid targets, 0-d float32
    model(idx)          -> logits (B, T, V)
    model(idx, cache=c.chunk(...) or c.step(...)) -> logits (B, T, V) of new positions, kept in the cache c
    model.hidden(idx, ...) -> what the head reads, (B, T, C): with model.lm_head, logits of chosen positions only

Shapes: B batch, T time, C n_embd, H heads, K key-value heads, D head_dim, V vocab.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORE = -100  # a target with this value is not trained on
# Elements of the largest logits block that the loss holds. 2**22 floats are 16 MiB: large enough for full-speed matrix
# products, small enough that softmax temporaries of a 32k vocabulary stay far below the activations.
CHUNK_ELEMENTS = 2**22
# On a CPU with bfloat16 units, two products and a softmax take 0.2 to 0.4 of the time of torch's fused attention up to
# 256 tokens, forward and backward (its tiles are small); at 1024 they take 1.4 times.
PLAIN_ATTENTION_LENGTH = 512


class ModelError(ValueError):
    one_line = True


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
    rope_scaling: dict | None = None  # Llama 3.1's long-context frequencies, as its config.json has them
    norm_eps: float = 1e-5
    qk_norm: bool = False  # RMSNorm on each head's query and key before the rotation (Qwen3)
    tie_embeddings: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        self.n_kv_head = self.n_kv_head or self.n_head
        for key in ("vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "rope_theta", "norm_eps"):
            if getattr(self, key) <= 0:
                raise ModelError(f"model: {key} must be positive, got {getattr(self, key)}")
        if self.head_dim < 0 or self.ffn_dim < 0 or not 0 <= self.dropout < 1:
            raise ModelError(
                f"model: head_dim={self.head_dim} and ffn_dim={self.ffn_dim} must not be negative, "
                f"dropout={self.dropout} must be from 0 to below 1"
            )
        if self.n_head % self.n_kv_head:
            raise ModelError(f"model: n_head={self.n_head} must be a multiple of n_kv_head={self.n_kv_head}")
        if not self.head_dim and self.n_embd % self.n_head:
            raise ModelError(f"model: n_embd={self.n_embd} must be a multiple of n_head={self.n_head}")
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.head_dim % 2:
            raise ModelError(f"model: head_dim={self.head_dim} must be even: rotary positions turn pairs")
        self.ffn_dim = self.ffn_dim or 64 * math.ceil(self.n_embd * 8 / 3 / 64)


# ---- layers ---------------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """x / rms(x) * weight (arXiv:1910.07467). Under autocast the result is cast once here: the linear layers that share
    it would otherwise each cast it again."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return y.to(compute_dtype(x))


def compute_dtype(x: Tensor) -> torch.dtype:
    """dtype in which matrix products run now: autocast's where it is on, else that of x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def rope_frequencies(cfg: ModelConfig) -> Tensor:
    """Angle per position of each pair of features, (D/2,) float32 (arXiv:2104.09864)."""
    inv_freq = cfg.rope_theta ** -(torch.arange(0, cfg.head_dim, 2, dtype=torch.float32) / cfg.head_dim)
    if not cfg.rope_scaling:
        return inv_freq
    # Llama 3.1: slow down the long wavelengths by `factor`, leave the short ones, blend in between.
    s = cfg.rope_scaling
    turns = s["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * (keep + (1 - keep) / s["factor"])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]) of x (B, H, T, D) by the angles given as cos and sin (..., T, D/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        H, K, D, C = cfg.n_head, cfg.n_kv_head, cfg.head_dim, cfg.n_embd
        self.head_dim, self.dropout, self.grouped = D, cfg.dropout, K < H
        self.q_proj = nn.Linear(C, H * D, bias=False)
        self.k_proj = nn.Linear(C, K * D, bias=False)
        self.v_proj = nn.Linear(C, K * D, bias=False)
        self.o_proj = nn.Linear(H * D, C, bias=False)
        self.q_norm = RMSNorm(D, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, cfg.norm_eps) if cfg.qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: "LayerCache | None" = None, mask: Tensor | None = None
    ) -> Tensor:
        B, T, _ = x.shape
        q = project(self.q_proj, x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T, D)
        k = project(self.k_proj, x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, K, T, D)
        v = project(self.v_proj, x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, K, T, D)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        dropout = self.dropout if self.training else 0.0
        if cache is not None:
            k, v = cache.append(k, v)
            y = cached_attention(q, k, v, mask)
        elif q.device.type == "cpu" and q.dtype == torch.bfloat16 and T <= PLAIN_ATTENTION_LENGTH:
            y = plain_causal_attention(q, k, v, dropout, mask)
        elif mask is not None:
            if self.grouped:  # on a GPU no fused kernel both takes a mask and shares keys among heads
                k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=self.grouped)
        return project(self.o_proj, y.transpose(1, 2).reshape(B, T, -1))


def project(linear: nn.Module, x: Tensor) -> Tensor:
    """linear(x). A single row on a CPU is written as a matrix-vector product when compiled: inductor makes of it a loop
    at the bandwidth of the memory, where the library behind F.linear reaches a third."""
    if torch.compiler.is_compiling() and type(linear) is nn.Linear and x.numel() == x.shape[-1] and x.is_cpu:
        return torch.mv(linear.weight, x.flatten()).view(*x.shape[:-1], -1)
    return linear(x)


def cached_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v where mask, (T, S) or (B, 1, 1, S), is true. q (B, H, T, D); k, v (B, K, S, D).

    Heads that share keys become more rows of one product, so that no key is copied and every fused kernel applies."""
    B, H, T, D = q.shape
    q = q.reshape(B, k.shape[1], -1, D)
    if torch.compiler.is_compiling() and T == 1 and q.is_cpu:  # sums that inductor fuses: 0.15 to 1 of the time
        scores = (q.float().unsqueeze(3) * k.unsqueeze(2)).sum(-1) * D**-0.5
        weights = scores.masked_fill(~mask, -math.inf).softmax(dim=-1)
        return (weights.unsqueeze(-1) * v.unsqueeze(2)).sum(-2).view(B, H, T, D).to(v.dtype)
    if T > 1:
        mask = mask.repeat(H // k.shape[1], 1)
    elif q.is_cpu and q.dtype != torch.float32 and q.shape[2] == 1:
        # For a single query in half precision torch's kernel takes twice the time that it takes for two.
        return F.scaled_dot_product_attention(q.expand(-1, -1, 2, -1), k, v, attn_mask=mask)[:, :, :1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).view(B, H, T, D)


def plain_causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v with all T x T scores in memory. q (B, H, T, D); k, v (B, K, T, D) -> (B, H, T, D).
    mask (B, 1, T, T): see `document_mask`; None = the whole past."""
    B, H, T, D = q.shape
    q = (q * D**-0.5).view(B, k.shape[1], -1, D)  # heads that share keys become more rows of one product
    if mask is None:
        mask = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    scores = (q @ k.mT).view(B, H, T, T) + mask
    weights = F.dropout(scores.softmax(dim=-1), dropout)
    return (weights.view(B, k.shape[1], -1, T) @ v).view(B, H, T, D)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)): SwiGLU (arXiv:2002.05202)."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(cfg.n_embd, cfg.ffn_dim, bias=False)
        self.up_proj = nn.Linear(cfg.n_embd, cfg.ffn_dim, bias=False)
        self.down_proj = nn.Linear(cfg.ffn_dim, cfg.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return project(self.down_proj, F.silu(project(self.gate_proj, x)) * project(self.up_proj, x))


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.mlp = MLP(cfg)
        self.dropout = cfg.dropout

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: "LayerCache | None" = None, mask: Tensor | None = None
    ) -> Tensor:
        x = x + F.dropout(self.self_attn(self.input_layernorm(x), cos, sin, cache, mask), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout, self.training)


def document_mask(idx: Tensor, document_id: int, dtype: torch.dtype) -> Tensor:
    """idx (B, T) -> (B, 1, T, T), to be added to scores: 0 where position i may attend to j, not later and with no
    `document_id` in between or at i, else -inf. A mask of truth values would be turned into this anew in every layer.

    Positions go on counting across documents: rotary attention depends on distances only."""
    segment = (idx == document_id).cumsum(1)
    same = segment[:, None, :, None] == segment[:, None, None, :]
    return torch.zeros(same.shape, dtype=dtype, device=idx.device).masked_fill_(~same.tril(), -math.inf)


class Transformer(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.activation_checkpointing = False  # recompute each block in backward: less memory, a third more work
        self.document_id: int | None = None  # token that opens a document: without a cache, attention stays within one
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        if cfg.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        angles = torch.outer(torch.arange(cfg.block_size, dtype=torch.float32), rope_frequencies(cfg))
        self.register_buffer("cos", angles.cos(), persistent=False)  # (block_size, D/2)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's initialisation: N(0, 0.02); what writes to the residual stream is scaled by 1/sqrt(2 n_layer)."""
        for name, p in self.named_parameters():
            if p.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.cfg.n_layer) if residual else 0.02)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, cache: "CacheChunk | CacheStep | None" = None
    ) -> Tensor:
        """idx (B, T) int64; targets (B, T) int64 or IGNORE. See the top of the file for what comes back."""
        x = self.hidden(idx, cache)
        if targets is None:
            return project(self.lm_head, x)
        return cross_entropy_sum(x.flatten(0, 1), self.lm_head.weight, targets.flatten())

    def hidden(self, idx: Tensor, cache: "CacheChunk | CacheStep | None" = None) -> Tensor:
        """idx (B, T) int64 -> the last layer's result after the final norm, (B, T, C)."""
        T = idx.shape[1]
        if cache is None:
            assert T <= self.cfg.block_size, f"{T=} is more than block_size={self.cfg.block_size}"
            cos, sin = self.cos[:T], self.sin[:T]
        else:
            positions = cache.positions  # (1, T) or (B, 1)
            cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)  # (.., 1, T, D/2)
        x = F.dropout(self.embed_tokens(idx), self.cfg.dropout, self.training)
        if cache is not None:
            mask = cache.mask
        else:
            same = self.document_id is not None
            mask = document_mask(idx, self.document_id, compute_dtype(x)) if same else None
        for i, block in enumerate(self.layers):
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, None, mask, use_reentrant=False)
            else:
                x = block(x, cos, sin, None if cache is None else LayerCache(cache, i), mask)
        return self.norm(x)

    def compile_blocks(self, compile_fn: Callable) -> None:
        """Compile block by block. All blocks share one graph, so this starts fast, and a block's gradients are out as
        soon as its backward is done, so communication overlaps: one graph of the whole model would hold them back."""
        for block in self.layers:
            block.forward = compile_fn(block.forward)


# ---- loss -----------------------------------------------------------------------------------------------------------


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum over valid targets of -log softmax(hidden @ weight.T)[target], without ever holding all the logits.

    hidden (N, C), weight (V, C), targets (N,) int64 or IGNORE -> 0-d float32.
    """
    dtype = compute_dtype(hidden)
    return ChunkedCrossEntropy.apply(hidden, weight, targets, dtype, torch.is_grad_enabled())


class ChunkedCrossEntropy(torch.autograd.Function):
    """Head and loss over blocks of tokens. The gradients are formed in forward, while a block's logits exist: the same
    arithmetic as autograd's with (N, V) replaced by (chunk, V) in memory, and nothing is computed twice."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, with_grad: bool) -> Tensor:
        N, V = hidden.shape[0], weight.shape[0]
        chunk = max(1, CHUNK_ELEMENTS // V)
        w = weight.to(dtype)
        loss = torch.zeros((), device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if with_grad else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if with_grad else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, N, chunk):
                h, t = hidden[start : start + chunk].to(dtype), targets[start : start + chunk]
                chunk_loss, grad_logits = softmax_cross_entropy(h @ w.T, t, with_grad)
                loss += chunk_loss
                if with_grad:
                    grad_hidden[start : start + chunk] = grad_logits @ w
                    add_product(grad_weight, grad_logits.T, h)
        if with_grad:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad.to(grad_hidden.dtype), grad_weight * grad, None, None, None


def softmax_cross_entropy(logits: Tensor, targets: Tensor, with_grad: bool) -> tuple[Tensor, Tensor | None]:
    """logits (n, V), targets (n,) -> (sum of losses, 0-d float32; its gradient (n, V) in the logits' dtype)."""
    valid = targets != IGNORE
    index = targets.masked_fill(~valid, 0).unsqueeze(1)
    x = logits.float()
    lse = x.logsumexp(dim=1, keepdim=True)
    loss = ((lse - x.gather(1, index)) * valid.unsqueeze(1)).sum()
    if not with_grad:
        return loss, None
    x = x.sub_(lse) if x.data_ptr() != logits.data_ptr() else x - lse
    p = x.exp_()
    p.scatter_add_(1, index, torch.full_like(index, -1.0, dtype=p.dtype))
    return loss, p.mul_(valid.unsqueeze(1)).to(logits.dtype)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out (V, C) float32 += a (V, n) @ b (n, C). A sum over many tokens can pass float16's 65504: float32 there."""
    if a.dtype == torch.float32:
        out.addmm_(a, b)
    elif a.dtype == torch.float16:
        out += torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
    else:
        out += a @ b


# ---- key-value cache ------------------------------------------------------------------------------------------------


class KVCache:
    """Keys and values of past positions, (rows, K, max_length + 1, D) of each layer.

    Each row has a length of its own, which the caller keeps, so a row that is done can be given to another text while
    the others go on; what lies beyond its length is never seen. The last position is a spare one.

    model(idx, cache=cache.chunk(begin, T, rows)) reads the same T positions of some rows: prompts, padded on the right.
    model(idx, cache=cache.step(lengths, width)) reads the next token (rows, 1) of every row.
    """

    def __init__(self, cfg: ModelConfig, rows: int, max_length: int, device: torch.device | str, dtype: torch.dtype):
        shape = (rows, cfg.n_kv_head, max_length + 1, cfg.head_dim)
        self.max_length = max_length
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(cfg.n_layer)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(cfg.n_layer)]
        self.span = torch.arange(max_length, device=device)

    def chunk(self, begin: int, T: int, rows: Tensor | None = None) -> "CacheChunk":
        """Positions begin to begin + T of the rows (n,) int64, of all rows without it."""
        assert begin + T <= self.max_length, f"cache holds {self.max_length} positions, {begin + T} asked"
        return CacheChunk(self.keys, self.values, begin, self.span[: begin + T], rows)

    def step(self, lengths: Tensor, width: int) -> "CacheStep":
        """The next position of each row. lengths (rows,) int64: below width, or max_length for a row to be left as it
        is. Attention costs as much as `width` positions."""
        return CacheStep(self.keys, self.values, lengths, self.span[:width])

    def copy_row(self, source: int, row: int, length: int) -> None:
        """The first `length` positions of row `source` into `row`."""
        for layer in (*self.keys, *self.values):
            layer[row, :, :length] = layer[source, :, :length]

    def select(self, rows: Tensor, length: int) -> None:
        """The first `length` positions of row i become what those of row rows[i] were."""
        for layer in (*self.keys, *self.values):
            layer[:, :, :length] = layer[rows, :, :length]


class CacheChunk:
    def __init__(
        self, keys: list[Tensor], values: list[Tensor], begin: int, span: Tensor, rows: Tensor | None
    ) -> None:
        self.keys, self.values, self.begin, self.end = keys, values, begin, len(span)
        self.rows = slice(None) if rows is None else rows
        self.positions = span[begin:].unsqueeze(0)  # (1, T)
        self.mask = span <= span[begin:].unsqueeze(1)  # (T, end)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (n, K, T, D); -> keys and values of these rows from their beginning (n, K, end, D)."""
        keys, values = self.keys[layer], self.values[layer]
        keys[self.rows, :, self.begin : self.end] = k
        values[self.rows, :, self.begin : self.end] = v
        return keys[self.rows, :, : self.end], values[self.rows, :, : self.end]


class CacheStep:
    def __init__(self, keys: list[Tensor], values: list[Tensor], lengths: Tensor, span: Tensor) -> None:
        self.keys, self.values, self.lengths, self.width = keys, values, lengths, span.shape[0]
        self.rows = torch.arange(lengths.shape[0], device=lengths.device)
        self.positions = lengths.clamp(max=self.width - 1).unsqueeze(1)  # (B, 1)
        self.mask = (span <= self.positions)[:, None, None]  # (B, 1, 1, width)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, K, 1, D) at each row's length; -> keys and values (B, K, width, D)."""
        keys, values = self.keys[layer], self.values[layer]
        keys[self.rows, :, self.lengths] = k[:, :, 0]
        values[self.rows, :, self.lengths] = v[:, :, 0]
        return keys[:, :, : self.width], values[:, :, : self.width]


class LayerCache(NamedTuple):
    """One layer's part of a CacheChunk or CacheStep."""

    whole: CacheChunk | CacheStep
    layer: int

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.whole.append(self.layer, k, v)


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def parameter_table(cfg: ModelConfig) -> dict[str, int]:
    """{part: number of parameters}, without building the model. Tied embeddings are counted once."""
    C, D, L = cfg.n_embd, cfg.head_dim, cfg.n_layer
    table = {
        "embedding": cfg.vocab_size * C,
        "attention": L * (2 * C * cfg.n_head * D + 2 * C * cfg.n_kv_head * D),
        "mlp": L * 3 * C * cfg.ffn_dim,
        "norms": L * (2 * C + (2 * D if cfg.qk_norm else 0)) + C,
        "head": 0 if cfg.tie_embeddings else cfg.vocab_size * C,
    }
    return table | {"total": sum(table.values())}


def flops_per_token(cfg: ModelConfig, T: int) -> float:
    """Forward and backward FLOPs per trained token at length T: 6 per matrix parameter, 12 L H D T for attention.

    As in PaLM (arXiv:2204.02311, appendix B) the causal half is not subtracted, so that figures compare with published
    ones. The embedding lookup multiplies nothing."""
    table = parameter_table(cfg)
    matrices = table["attention"] + table["mlp"] + cfg.vocab_size * cfg.n_embd
    return 6 * matrices + 12 * cfg.n_layer * cfg.n_head * cfg.head_dim * T


def memory_table(
    cfg: ModelConfig, B: int, T: int, dtype: torch.dtype, optimizer: str, activation_checkpointing: bool,
    compiled: bool, device_type: str, doc_mask: bool = False,
) -> dict[str, float]:  # fmt: skip
    """{part: bytes} that one rank holds at the peak of a training step, without building the model.

    Weights, gradients and optimizer state are float32. Activations are what autograd keeps, counted from the graph of
    one block: the residual stream and the normalised one in float32; in the compute dtype the norms' results, query,
    key, value, attention's result (and its weights where attention is plain), four tensors of SwiGLU, and autocast's
    copies of the matrices. torch.compile recomputes the normalised stream and two of the four. A document mask is one
    for all blocks; beside it each head has keys and values of its own.
    """
    size, N = dtype.itemsize, B * T
    table = parameter_table(cfg)
    total, matrices = table["total"], table["attention"] + table["mlp"]
    C, HD, KD, V = cfg.n_embd, cfg.n_head * cfg.head_dim, cfg.n_kv_head * cfg.head_dim, cfg.vocab_size
    plain = device_type == "cpu" and dtype == torch.bfloat16 and T <= PLAIN_ATTENTION_LENGTH
    attention = 2 * HD + 2 * (HD if doc_mask and not plain else KD) + (cfg.n_head * T if plain else 0)
    streams, factors = (2, 2) if compiled else (4, 4)
    block = N * (4 * C * streams + size * (2 * C + attention + factors * cfg.ffn_dim))
    copies = size * matrices if size < 4 else 0
    kept = cfg.n_layer * N * 4 * C if activation_checkpointing else cfg.n_layer * block + copies
    activations = kept + block * (3 if activation_checkpointing else 1)  # backward of a block takes as much again
    activations += N * T * (size + 1) if doc_mask else 0
    chunk = min(N, max(1, CHUNK_ELEMENTS // V)) * V
    head = chunk * (4 + 2 * size) + 8 * V * C + N * C * (8 + 3 * size)
    return {
        "weights": 4 * total,
        "gradients": 4 * total,
        "optimizer": 4 * matrices + 8 * (total - matrices) if optimizer == "muon" else 8 * total,
        "activations": activations,
        "head": head,
        # glibc's heap keeps holes between what is freed: 0.15 to 0.4 of the short-lived part, measured on 10 shapes.
        "allocator": 0.3 * (activations + head) if device_type == "cpu" else 0,
    }
