"""The model: a Llama-shaped decoder, its chunked loss, its key-value cache; parameter, FLOPs and memory arithmetic.

RMSNorm before each sub-layer, rotary positions, SwiGLU, grouped-query attention, no biases; optional QK-norm (then it
is Qwen3's architecture) and optional tied embeddings. Parameters carry Hugging Face's names without "model.".

    model(idx, targets) -> sum of the cross-entropy over the valid targets, 0-d float32
    model(idx)          -> logits (B, T, V)
    model(idx, ..., index=i) -> what the head reads at places i (n,) of the flat idx, (n, C): see `cross_entropy`
    model(idx, ..., documents=d) -> the same where attention and positions stay within a document, see `hidden`
    model(idx, cache=c.chunk(...) or c.step(...)) -> logits (B, T, V) of new positions, kept in the cache c
    model.hidden(idx, ...) -> what the head reads, (B, T, C): with model.lm_head, logits of chosen positions only

Shapes: B batch, T time, C n_embd, H heads, K key-value heads, D head_dim, V vocab.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from groundup.errors import UserError

IGNORE = -100  # a target with this value is not trained on
# Elements of the largest logits block that the loss holds. 3 * 2**21 floats are 24 MiB: large enough for full-speed
# matrix products, small enough that softmax temporaries of a 32k vocabulary stay far below the activations. From 32 MiB
# on glibc's malloc takes new pages each time (1.06 to 1.2 of the time at 8k). With 2**22 the head takes 1.15 times the
# time at a vocabulary of 32k, 512 wide: each block is added to the whole float32 gradient.
CHUNK_ELEMENTS = 3 * 2**21
# On a CPU with bfloat16 units, two products and a softmax take 0.2 to 0.4 of the time of torch's fused attention up to
# 256 tokens, forward and backward (its tiles are small); at 1024 they take 1.4 times.
PLAIN_ATTENTION_LENGTH = 512
# The least mean length of documents whose attention goes by borders: it sets aside 128 rows for each that might be.
MEAN_DOCUMENT_TOKENS = 8





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
                raise UserError(f"model: {key} must be positive, got {getattr(self, key)}")
        if self.head_dim < 0 or self.ffn_dim < 0 or not 0 <= self.dropout < 1:
            raise UserError(
                f"model: head_dim={self.head_dim} and ffn_dim={self.ffn_dim} must not be negative, "
                f"dropout={self.dropout} must be from 0 to below 1"
            )
        if self.n_head % self.n_kv_head:
            raise UserError(f"model: n_head={self.n_head} must be a multiple of n_kv_head={self.n_kv_head}")
        if not self.head_dim and self.n_embd % self.n_head:
            raise UserError(f"model: n_embd={self.n_embd} must be a multiple of n_head={self.n_head}")
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.head_dim % 2:
            raise UserError(f"model: head_dim={self.head_dim} must be even: rotary positions turn pairs")
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
        self.head_dim, self.dropout = D, cfg.dropout
        self.q_proj = nn.Linear(C, H * D, bias=False)
        self.k_proj = nn.Linear(C, K * D, bias=False)
        self.v_proj = nn.Linear(C, K * D, bias=False)
        self.o_proj = nn.Linear(H * D, C, bias=False)
        self.q_norm = RMSNorm(D, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, cfg.norm_eps) if cfg.qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: "LayerCache | None" = None, mask: Tensor | None = None,
        borders: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        B, T, _ = x.shape
        q = project(self.q_proj, x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T, D)
        k = project(self.k_proj, x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, K, T, D)
        v = project(self.v_proj, x).view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, K, T, D)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        dropout = self.dropout if self.training else 0.0
        if cache is not None:
            k, v = cache.append(k, v)
            y = cached_attention(q, k, v, mask)
        elif borders is not None:
            y = bordered_attention(q, k, v, borders, dropout)
        else:
            y = causal_attention(q, k, v, dropout, mask)
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


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v over the past, by the fastest kernel. q (B, H, T, D); k, v (B, K, T, D).
    mask (B, 1, T, T): see `document_mask`; None = the whole past."""
    n_sharing = q.shape[1] // k.shape[1]  # heads that share keys
    if q.is_cpu and q.dtype == torch.bfloat16 and q.shape[2] <= PLAIN_ATTENTION_LENGTH:
        return plain_causal_attention(q, k, v, dropout, mask)
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=n_sharing > 1)
    if n_sharing > 1:  # on a GPU no fused kernel both takes a mask and shares keys among heads
        k, v = (t.repeat_interleave(n_sharing, dim=1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)


def plain_causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Tensor | None = None) -> Tensor:
    """`causal_attention` with all T x T scores in memory."""
    B, H, T, D = q.shape
    q = (q * D**-0.5).view(B, k.shape[1], -1, D)  # heads that share keys become more rows of one product
    if mask is None:
        mask = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    scores = (q @ k.mT).view(B, H, T, T) + mask
    weights = F.dropout(scores.softmax(dim=-1), dropout)
    return (weights.view(B, k.shape[1], -1, T) @ v).view(B, H, T, D)


def bordered_attention(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, dropout: float) -> Tensor:
    """Causal attention within the documents between `document_borders`. q (B, H, T, D); k, v (B, K, T, D)."""
    return attention_of_each(q, k, v, borders, dropout) if q.is_cpu else flash_attention(q, k, v, borders)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, borders: Tensor) -> Tensor:
    """`bordered_attention` by the kernel of GPUs."""
    B, H, T, D = q.shape
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))  # (B * T, heads, D)
    attend = torch.nn.attention.varlen.varlen_attn
    y = attend(q, k, v, borders, borders, T, T, window_size=(-1, 0), enable_gqa=k.shape[1] < H)
    return y.view(B, T, H, D).transpose(1, 2)


# The number of documents would be part of a compiled graph. torch.compiler.disable does the same, but imports
# torch._dynamo here and now: as long again as all of torch.
@torch._disable_dynamo
def attention_of_each(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, dropout: float) -> Tensor:
    """`bordered_attention` where no kernel takes borders: each document by itself. With eight of them in 1024 tokens a
    training step takes 0.6 to 0.7 of the time that T x T scores take, most of which are masked."""
    B, H, T, D = q.shape
    lengths = list(filter(None, borders.diff().tolist()))
    rows = (t.transpose(0, 1).reshape(t.shape[1], B * T, D).split(lengths, dim=1) for t in (q, k, v))
    parts = [causal_attention(*(t.unsqueeze(0) for t in part), dropout).squeeze(0) for part in zip(*rows, strict=True)]
    return torch.cat(parts, dim=1).view(H, B, T, D).transpose(0, 1)


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
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: "LayerCache | None" = None, mask: Tensor | None = None,
        borders: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        y = self.self_attn(self.input_layernorm(x), cos, sin, cache, mask, borders)
        x = x + F.dropout(y, self.dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout, self.training)


def document_starts(documents: Tensor) -> Tensor:
    """documents (B, T) -> (B, T) bool: whether a document begins here. Where the number changes, one does."""
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return starts


def document_positions(starts: Tensor) -> Tensor:
    """starts (B, T) bool -> (B, T) int64: how many tokens of its document are before each."""
    span = torch.arange(starts.shape[1], device=starts.device)
    return span - (span * starts).cummax(1).values


def document_lengths(starts: Tensor) -> Tensor:
    """starts (B, T) bool -> (B, T) int64: length of the document that each token is in."""
    segment = starts.cumsum(1) - 1
    return torch.zeros_like(segment).scatter_add_(1, segment, torch.ones_like(segment)).gather(1, segment)


def document_mask(starts: Tensor, dtype: torch.dtype) -> Tensor:
    """starts (B, T) bool -> (B, 1, T, T), to be added to scores: 0 where position i may attend to j, not later and in
    the same document, else -inf. A mask of truth values would be turned into this anew in every layer."""
    segment = starts.cumsum(1)
    same = segment[:, None, :, None] == segment[:, None, None, :]
    return torch.zeros(same.shape, dtype=dtype, device=starts.device).masked_fill_(~same.tril(), -math.inf)


def document_borders(starts: Tensor, most: int) -> Tensor:
    """starts (B, T) bool -> (most + 1,) int32: where each document begins among all N = B * T tokens, then N.

    A fixed number of entries keeps compiled blocks, and the device busy: it is not asked how many documents there are.
    Documents of no token do no harm. More than fit end the process with a line that says so."""
    N = starts.numel()
    number = starts.flatten().cumsum(0)
    borders = torch.searchsorted(number, torch.arange(1, most + 2, device=starts.device), out_int32=True)
    torch._assert_async(borders[-1] == N, f"model: over {most} documents in {N} tokens: set varlen = False")
    return borders


def can_border(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether flash attention, the only kernel behind varlen_attn, runs here."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or head_dim % 8 or head_dim > 256:
        return False
    importlib.import_module("torch.nn.attention.varlen")  # not at the top: --help would wait a second for it
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


class Transformer(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.activation_checkpointing = False  # recompute each block in backward: less memory, a third more work
        self.document_id: int | None = None  # token that opens a document, for calls without documents of their own
        self.varlen = True  # documents as borders instead of a mask where a kernel can: no work between documents
        self.neftune_alpha = 0.0  # noise on the embeddings in training; the paper's values are 5 to 15
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
        self, idx: Tensor, targets: Tensor | None = None, cache: "CacheChunk | CacheStep | None" = None,
        documents: Tensor | None = None, index: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """idx (B, T) int64; targets (B, T) int64 or IGNORE. See the top of the file for what comes back."""
        x = self.hidden(idx, cache, documents)
        if index is not None:
            return x.flatten(0, 1)[index]
        if targets is None:
            return project(self.lm_head, x)
        return cross_entropy(x.flatten(0, 1), self.lm_head.weight, targets.flatten())[0]

    def hidden(
        self, idx: Tensor, cache: "CacheChunk | CacheStep | None" = None, documents: Tensor | None = None
    ) -> Tensor:
        """idx (B, T) int64 -> the last layer's result after the final norm, (B, T, C).

        documents (B, T) int64: number of the document that a token is in, the same for neighbours in one and another
        for the next one; padding may be a document. Each is computed as if it were alone. Not with a cache."""
        assert cache is None or documents is None, "with a cache each row is one document"
        starts = mask = borders = None
        if cache is not None:
            mask, positions = cache.mask, cache.positions.unsqueeze(1)  # positions (1, 1, T) or (B, 1, 1)
        else:
            T = idx.shape[1]
            assert T <= self.cfg.block_size, f"{T=} is more than block_size={self.cfg.block_size}"
            if documents is None and self.document_id is not None:
                documents = (idx == self.document_id).cumsum(1)
            starts = None if documents is None else document_starts(documents)
            positions = slice(T) if starts is None else document_positions(starts).unsqueeze(1)
        cos, sin = self.cos[positions], self.sin[positions]  # (T, D/2) or (.., 1, T, D/2)
        x = self.embed(idx, starts)
        if starts is not None:
            dtype, dropped = compute_dtype(x), self.training and self.cfg.dropout > 0
            one_by_one = x.is_cpu and T > PLAIN_ATTENTION_LENGTH  # shorter rows gain nothing by it
            if self.varlen and (one_by_one or not dropped and can_border(x.device, dtype, self.cfg.head_dim)):
                borders = document_borders(starts, len(x) * (T if x.is_cpu else math.ceil(T / MEAN_DOCUMENT_TOKENS)))
            else:
                mask = document_mask(starts, dtype)
        for i, block in enumerate(self.layers):
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, None, mask, borders, use_reentrant=False)
            else:
                x = block(x, cos, sin, None if cache is None else LayerCache(cache, i), mask, borders)
        return self.norm(x)

    def embed(self, idx: Tensor, starts: Tensor | None) -> Tensor:
        """idx (B, T) int64 -> embeddings (B, T, C). In training with NEFTune's noise (arXiv:2310.05914), uniform up to
        alpha / sqrt(L C): L is the length of a token's document, where they are given, else of the row."""
        x = self.embed_tokens(idx)
        if self.training and self.neftune_alpha:
            L = idx.shape[1] if starts is None else document_lengths(starts).unsqueeze(-1)
            x = x + torch.empty_like(x).uniform_(-1, 1) * (self.neftune_alpha / (L * x.shape[-1]) ** 0.5)
        return F.dropout(x, self.cfg.dropout, self.training)

    def compile_blocks(self, compile_fn: Callable) -> None:
        """Compile block by block. All blocks share one graph, so this starts fast, and a block's gradients are out as
        soon as its backward is done, so communication overlaps: one graph of the whole model would hold them back."""
        for block in self.layers:
            block.forward = compile_fn(block.forward)


# ---- loss -----------------------------------------------------------------------------------------------------------


def cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(sum over valid targets of weights * nats, 0-d float32; nats (N,) float32, detached, 0 where not valid), where
    nats = -log softmax(hidden @ weight.T)[target], without ever holding all the logits.

    hidden (N, C), weight (V, C), targets (N,) int64 or IGNORE, weights (N,) float32 or None for 1. Without a target the
    loss is 0 and so are the gradients. Only gradients that are asked for are formed."""
    dtype = compute_dtype(hidden)
    return ChunkedCrossEntropy.apply(hidden, weight, targets, weights, dtype, torch.is_grad_enabled())


class ChunkedCrossEntropy(torch.autograd.Function):
    """Head and loss over blocks of tokens. The gradients are formed in forward, while a block's logits exist: the same
    arithmetic as autograd's with (N, V) replaced by (chunk, V) in memory, and nothing is computed twice."""

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None, dtype: torch.dtype,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        N, chunk, w = hidden.shape[0], max(1, CHUNK_ELEMENTS // weight.shape[0]), weight.to(dtype)
        loss, nats = hidden.new_zeros((), dtype=torch.float32), hidden.new_empty(N, dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if with_grad and ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if with_grad and ctx.needs_input_grad[1] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for part in (slice(start, start + chunk) for start in range(0, N, chunk)):
                h, t = hidden[part].to(dtype), targets[part]
                scale = (t != IGNORE).float() if weights is None else weights[part].float() * (t != IGNORE)
                logits = (h @ w.T).float()
                nats[part], lse = softmax_cross_entropy(logits, t)
                loss += (nats[part] * scale).sum()
                if grad_hidden is None and grad_weight is None:
                    continue
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
        grads = [saved if saved is None else saved * grad.to(saved.dtype) for saved in ctx.saved_tensors]
        return *grads, None, None, None, None


@torch.no_grad()
def token_scores(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(nats (N,) float32 as in `cross_entropy`, correct (N,) bool: the target is the likeliest token).

    hidden (N, C), weight (V, C), targets (N,) int64 or IGNORE, which is never correct."""
    dtype, chunk = compute_dtype(hidden), max(1, CHUNK_ELEMENTS // weight.shape[0])
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
    def __init__(self, keys: list[Tensor], values: list[Tensor], begin: int, span: Tensor, rows: Tensor | None) -> None:
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
