"""The model: a Llama-shaped decoder.

RMSNorm before each sub-layer, rotary positions, SwiGLU, grouped-query attention, no biases. With
QK-norm it is Qwen3's architecture, with biases on queries, keys and values Qwen2's. Parameters have
Hugging Face's names without "model.".

    model(idx, targets) -> sum of the cross-entropy over the valid targets, 0-d float32
    model(idx)          -> logits (B, T, V)
    model(idx, index=i) -> hidden states (n, C) at the positions i (n,) of the flattened idx
    model(idx, documents=d) -> attention and positions stay within each document, see `hidden`
    model(idx, cache=c) -> logits (B, T, V) of new positions, see groundup/generate/kv_cache.py
    model.hidden(idx)   -> hidden states (B, T, C) after the final norm: the input of model.lm_head

Shapes: B batch, T time, C n_embd, H heads, K key-value heads, D head_dim, V vocab.

How attention and the loss are made fast is in groundup/kernels, each beside a plain reference. To
try another MLP, a gate or another norm, edit this file alone: LoRA, checkpoints and the plan read
the parameters from the model.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from groundup.errors import UserError
from groundup.kernels.attention import (
    Layout,
    attention,
    choose_layout,
    compute_dtype,
    documents_of,
    positions_of,
    starts_of,
)
from groundup.kernels.cross_entropy import cross_entropy


@dataclass
class ModelConfig:
    vocab_size: int
    block_size: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int = 0  # 0 = n_head; fewer = grouped-query attention
    n_embd: int = 768
    head_dim: int = 0  # 0 = n_embd // n_head
    # 0 = 8/3 n_embd, rounded up to a multiple of 64: three such matrices (SwiGLU) have as many
    # parameters as GPT-2's two of 4 n_embd
    ffn_dim: int = 0
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # linear, Llama 3.1's or YaRN, as in config.json
    norm_eps: float = 1e-5
    qk_norm: bool = False  # RMSNorm on each head's query and key before the rotation (Qwen3)
    qkv_bias: bool = False  # biases on queries, keys and values (Qwen2)
    # Hugging Face's name; "" = from the two above. mistral computes what llama does
    model_type: str = ""
    tie_embeddings: bool = True
    dropout: float = 0.0
    init_std: float = field(default=0.0, compare=False)  # of new weights; 0 = 0.02

    def __post_init__(self) -> None:
        self.n_kv_head = self.n_kv_head or self.n_head
        self.init_std = self.init_std or 0.02
        self.check()
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        self.ffn_dim = self.ffn_dim or 64 * math.ceil(self.n_embd * 8 / 3 / 64)
        kind = "qwen3" if self.qk_norm else "qwen2" if self.qkv_bias else "llama"
        self.model_type = self.model_type or kind

    def check(self) -> None:
        """Raise UserError for sizes that no model can have."""
        sizes = ("vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd")
        for key in (*sizes, "rope_theta", "norm_eps"):
            if getattr(self, key) <= 0:
                raise UserError(f"model: {key} must be positive, got {getattr(self, key)}")
        H, K, D, C, F = self.n_head, self.n_kv_head, self.head_dim, self.n_embd, self.ffn_dim
        wrong = {  # what is said, and when; the first one counts
            f"head_dim={D} and ffn_dim={F} must not be negative": D < 0 or F < 0,
            f"dropout must be from 0 to below 1, got {self.dropout}": not 0 <= self.dropout < 1,
            f"n_head={H} must be a multiple of n_kv_head={K}": H % K,
            f"n_embd={C} must be a multiple of n_head={H}": not D and C % H,
            f"head_dim={D or C // H} must be even: rotary positions turn pairs": (D or C // H) % 2,
        }
        for text in wrong:
            if wrong[text]:
                raise UserError(f"model: {text}")


class Transformer(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        # recompute each block in backward: less memory, a third more work
        self.activation_checkpointing = False
        # token id between documents, for calls without `documents`; None = rows are not divided
        self.delimiter_id: int | None = None
        # upper bound on documents per row, for the table of their borders; 0 = one per token
        self.most_documents = 0
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.norm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.lm_head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        if cfg.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        cos, sin = rope_tables(cfg)
        self.register_buffer("cos", cos, persistent=False)  # (block_size, D/2)
        self.register_buffer("sin", sin, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, p in self.named_parameters():
            self.init_parameter(name, p)

    def init_parameter(self, name: str, p: Tensor) -> None:
        """Draw matrices from N(0, init_std), as GPT-2 does; set biases to 0 and norms to 1.

        This replaces what a layer's constructor drew. A matrix or bias that should begin as
        something else needs a line here; other parameters keep what their constructor gave them."""
        if p.ndim == 2:
            # 2 n_layer matrices add to the residual stream: they start smaller, so that it does not
            # grow with the depth.
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            shrink = math.sqrt(2 * self.cfg.n_layer) if adds else 1
            nn.init.normal_(p, std=self.cfg.init_std / shrink)
        elif name.endswith(".bias"):
            nn.init.zeros_(p)
        elif name.endswith("norm.weight"):
            nn.init.ones_(p)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        cache: Any = None,
        documents: Tensor | None = None,
        index: Tensor | None = None,
    ) -> Tensor:
        """With targets return the summed loss, 0-d; with index hidden states (n, C); else logits.

        idx, targets (B, T) int64, targets may be IGNORE. See the top of this file.
        """
        x = self.hidden(idx, cache, documents)
        # Only some positions, whose logits the caller computes: prompts and padding need none.
        if index is not None:
            return x.flatten(0, 1)[index]
        if targets is None:
            return self.lm_head(x)
        # The head is a part of the loss, so that the logits of all tokens are never held.
        loss, _ = cross_entropy(x.flatten(0, 1), self.lm_head.weight, targets.flatten())
        return loss

    def hidden(self, idx: Tensor, cache: Any = None, documents: Tensor | None = None) -> Tensor:
        """Return the hidden states (B, T, C) of idx (B, T) int64 after the final norm.

        documents (B, T) int64: the number of each token's document. A document starts where the
        number changes; padding gets a number of its own. Each document is computed as if it were
        alone in its row. Not with a cache.

        cache: has `positions` (1, T) or (B, 1) of the new tokens, and layer(i), a function of
        (q, k, v) that stores keys and values (B, K, T, D) of layer i and returns the attention of
        q (B, H, T, D) to all positions so far."""
        assert cache is None or documents is None, "with a cache each row is one document"
        # 1. The embeddings begin the residual stream, to which each block adds.
        x = self.embed_tokens(idx)
        if torch.is_autocast_enabled(x.device.type):
            x = x.float()  # sums of many layers stay in float32, also with bfloat16 weights
        x = F.dropout(x, self.cfg.dropout, self.training)

        # 2. Of each token: its position, and what it may see.
        if cache is not None:
            positions = cache.positions.unsqueeze(1)  # (1, 1, T) or (B, 1, 1)
        else:
            T = idx.shape[1]
            assert T <= self.cfg.block_size, f"{T=} is more than block_size={self.cfg.block_size}"
            if documents is None and self.delimiter_id is not None:
                documents = documents_of(idx, self.delimiter_id)
            starts = None if documents is None else starts_of(documents)
            # Chosen outside the blocks: a compiled block cannot ask what the hardware can do.
            D, dropout = self.cfg.head_dim, self.cfg.dropout * self.training
            layout = choose_layout(idx, starts, compute_dtype(x), D, dropout, self.most_documents)
            # Each document counts its positions from 0.
            positions = slice(T) if starts is None else positions_of(starts).unsqueeze(1)
        cos, sin = self.cos[positions], self.sin[positions]  # (T, D/2) or (.., 1, T, D/2)

        # 3. The blocks, and the final norm.
        for i, block in enumerate(self.layers):
            if cache is not None:
                layout = Layout(cache=cache.layer(i))
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, layout, use_reentrant=False)
            else:
                x = block(x, cos, sin, layout)
        return self.norm(x)


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.n_embd, cfg.norm_eps)
        self.mlp = MLP(cfg)
        self.dropout = cfg.dropout

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        # tokens look at each other, then each for itself
        y = self.self_attn(self.input_layernorm(x), cos, sin, layout)
        x = x + F.dropout(y, self.dropout, self.training)
        y = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(y, self.dropout, self.training)


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        H, K, D, C = cfg.n_head, cfg.n_kv_head, cfg.head_dim, cfg.n_embd
        self.head_dim = D
        self.dropout = cfg.dropout
        self.q_proj = nn.Linear(C, H * D, bias=cfg.qkv_bias)
        self.k_proj = nn.Linear(C, K * D, bias=cfg.qkv_bias)
        self.v_proj = nn.Linear(C, K * D, bias=cfg.qkv_bias)
        self.o_proj = nn.Linear(H * D, C, bias=False)
        self.q_norm = RMSNorm(D, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, cfg.norm_eps) if cfg.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        """x (B, T, C) -> (B, T, C). layout: what each position may see."""
        B, T, _ = x.shape
        q, k, v = each_linear(x, self.q_proj, self.k_proj, self.v_proj)
        q = q.view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, K, T, D)
        v = v.view(B, T, -1, self.head_dim).transpose(1, 2)  # (B, K, T, D)
        q = rotate(self.q_norm(q), cos, sin)
        k = rotate(self.k_norm(k), cos, sin)
        y = attention(q, k, v, layout, self.dropout if self.training else 0.0)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


def each_linear(x: Tensor, *layers: nn.Linear) -> list[Tensor]:
    """Return layer(x) of each layer: x (..., in) -> (..., out of the layer)."""
    # When a GPU generates, kernels/linear.py has joined their matrices: then it is one product.
    joined = getattr(layers[0], "joined", None)
    if joined is None:
        return [layer(x) for layer in layers]
    return list(F.linear(x, *joined).split([layer.weight.shape[0] for layer in layers], dim=-1))


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(cfg.n_embd, cfg.ffn_dim, bias=False)
        self.up_proj = nn.Linear(cfg.n_embd, cfg.ffn_dim, bias=False)
        self.down_proj = nn.Linear(cfg.ffn_dim, cfg.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = each_linear(x, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)


class RMSNorm(nn.Module):
    """x / rms(x) * weight (arXiv:1910.07467), in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        # Under autocast the result is cast here, once for all the layers that read it.
        return y.to(compute_dtype(x))


# ---- rotary positions (arXiv:2104.09864) ---------------------------------------------------------


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (B, H, T, D) with the pairs (x[i], x[i + D/2]) turned by the angles of a position.

    cos, sin (..., T, D/2)."""
    # A pair is a point in a plane. Turned by its position, a product of a query and a key depends
    # only on how far the two are apart.
    a, b = x.chunk(2, dim=-1)
    turned = ((a * cos - b * sin).type_as(x), (b * cos + a * sin).type_as(x))
    return torch.cat(turned, dim=-1)


def rope_tables(cfg: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of the angles of all positions, (block_size, D/2) float32."""
    positions = torch.arange(cfg.block_size, dtype=torch.float32)
    angles = torch.outer(positions, rope_frequencies(cfg))
    scale = yarn_scale(cfg.rope_scaling or {})
    return angles.cos() * scale, angles.sin() * scale


def rope_frequencies(cfg: ModelConfig) -> Tensor:
    """Return the angle per position of each pair of features, (D/2,) float32."""
    # The first pair turns by 1 per position, the last one by about 1 / rope_theta.
    even = torch.arange(0, cfg.head_dim, 2, dtype=torch.float32)
    frequencies = cfg.rope_theta ** -(even / cfg.head_dim)
    scaling = cfg.rope_scaling
    if not scaling:
        return frequencies
    # For a longer context, linear scaling slows down all by `factor` (arXiv:2306.15595). The others
    # slow down the long wavelengths, keep the short ones, and blend between the two.
    if scaling["rope_type"] == "linear":
        return frequencies / scaling["factor"]
    if scaling["rope_type"] == "yarn":
        keep = yarn_kept(cfg, scaling, len(frequencies))
    else:  # Llama 3.1: linear in the number of turns within the original context
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling["factor"])


def yarn_kept(cfg: ModelConfig, scaling: dict, n_pairs: int) -> Tensor:
    """Return YaRN's share of each frequency that is kept, (D/2,): linear in the pair's number.

    arXiv:2309.00071, section 3.2."""
    per_turn = scaling["original_max_position_embeddings"] / (2 * math.pi)

    def pair_that_turns(n: float) -> float:  # n times within the original context
        return cfg.head_dim / 2 * math.log(per_turn / n, cfg.rope_theta)

    first = pair_that_turns(scaling.get("beta_fast") or 32)
    last = pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, cfg.head_dim - 1)
    slowed = (torch.arange(n_pairs) - first) / (last - first or 0.001)
    return 1 - slowed.clamp(0, 1)


def yarn_scale(scaling: dict) -> float:
    """Return the factor of cos and sin with which YaRN sharpens attention over long contexts."""
    if scaling.get("rope_type") != "yarn" or scaling.get("attention_factor") is not None:
        return scaling.get("attention_factor", 1.0)
    growth = 0.1 * math.log(max(1.0, scaling["factor"]))
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return (growth * scaling["mscale"] + 1) / (growth * scaling["mscale_all_dim"] + 1)
    return growth + 1
