"""Low-rank adapters (LoRA, arXiv:2106.09685), and which parameters are trained.

Beside a frozen matrix W (out, in), LoRA trains two thin matrices A (r, in) and B (out, r):

    y = W x + alpha / r * B (A x)

B starts at zero, so training starts from the function that W computes. huggingface.py reads and
writes adapters in peft's format.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from groundup.errors import UserError
from model import Transformer

MAX_RANK = 2**16  # no matrix is larger


@dataclass(frozen=True)
class LoRAConfig:
    rank: int = 16
    alpha: float = 32.0  # the adapter's output is scaled by alpha / rank
    dropout: float = 0.0  # on the adapter's input
    modules: tuple[
        str, ...
    ] = ()  # names of the adapted matrices; () = every nn.Linear in the blocks

    def __post_init__(self) -> None:
        rank_fits = 1 <= self.rank <= MAX_RANK
        if not rank_fits or not 0 < self.alpha < math.inf or not 0 <= self.dropout < 1:
            raise UserError(
                f"lora: rank={self.rank} must be from 1 to {MAX_RANK}, alpha={self.alpha} "
                f"positive, dropout={self.dropout} from 0 to below 1"
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


# ---- the layer ----------------------------------------------------------------------------------


class LoRALinear(nn.Linear):
    """y = W x + bias + scale * B(A(dropout(x))), around the weight and bias of an existing layer."""

    def __init__(
        self, weight: nn.Parameter, cfg: LoRAConfig, bias: nn.Parameter | None = None
    ) -> None:
        out_features, in_features = weight.shape
        super().__init__(in_features, out_features, bias=False, device="meta")
        self.weight, self.bias = weight, bias
        self.cfg, self.enabled = cfg, True
        # Adapters are float32 even if W is held in bfloat16.
        options = {"bias": False, "device": weight.device, "dtype": torch.float32}
        self.lora_A = nn.Linear(in_features, cfg.rank, **options)
        self.lora_B = nn.Linear(cfg.rank, out_features, **options)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))  # as peft
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        y = F.linear(x, self.weight, self.bias)
        if not self.enabled:
            return y
        x = F.dropout(x, self.cfg.dropout, self.training)
        thin = self.lora_A(x) * self.cfg.scale  # (..., r): scale here, where it is cheapest
        return y.add_(self.lora_B(thin))  # in place: y is not used elsewhere

    @torch.no_grad()
    def merged_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return W + scale * B A, (out, in), computed in float32; W while adapters are off.

        dtype: of the result, None = that of W."""
        if not self.enabled:
            return self.weight.detach()
        with torch.autocast(self.weight.device.type, enabled=False):
            delta = self.lora_B.weight.float() @ self.lora_A.weight.float() * self.cfg.scale
        return (self.weight.float() + delta).to(dtype or self.weight.dtype)


def plain_linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight, linear.bias = weight, bias
    return linear


# ---- adapters of a model ------------------------------------------------------------------------


def linear_layers(model: Transformer) -> list[tuple[str, nn.Linear]]:
    """Return (name, layer) of the matrices in the blocks, with or without an adapter.

    A subclass of nn.Linear may compute something else, so it is left out."""
    return [
        (f"layers.{name}", layer)
        for name, layer in model.layers.named_modules()
        if type(layer) in (nn.Linear, LoRALinear) and ".lora_" not in name
    ]


def last_part(name: str) -> str:
    return name.rpartition(".")[2]


def find_modules(model: Transformer, cfg: LoRAConfig) -> LoRAConfig:
    """Return `cfg` with the names of its matrices in the model's order.

    Raise UserError for a name that is not that of an nn.Linear in the blocks."""
    known = list(dict.fromkeys(last_part(name) for name, _ in linear_layers(model)))
    unknown = [repr(name) for name in cfg.modules if name not in known]
    if unknown:
        raise UserError(
            f"lora: modules must be some of {', '.join(known)}, got {', '.join(unknown)}; "
            "embedding and head are trained whole, with trainable='embed,lm_head,lora'"
        )
    wanted = cfg.modules or known
    return replace(cfg, modules=tuple(name for name in known if name in wanted))


def add_lora(model: Transformer, cfg: LoRAConfig) -> None:
    """Add adapters to the matrices named in cfg.modules, in all blocks.

    The weights stay the same tensors. Call before compiling the blocks and before `DDP(model)`."""
    refuse_adapters(model)
    cfg = find_modules(model, cfg)
    for name, layer in linear_layers(model):
        if last_part(name) in cfg.modules:
            adapted = LoRALinear(layer.weight, cfg, layer.bias).train(layer.training)
            model.set_submodule(name, adapted)


def adapter_shapes(model: Transformer, cfg: LoRAConfig) -> dict[str, tuple[int, int]]:
    """Return {name: shape} of the adapters' matrices, which the model need not have yet."""
    shapes = {}
    for name, layer in linear_layers(model):
        if last_part(name) in cfg.modules:
            shapes[f"{name}.lora_A.weight"] = (cfg.rank, layer.in_features)
            shapes[f"{name}.lora_B.weight"] = (layer.out_features, cfg.rank)
    return shapes


def refuse_adapters(model: nn.Module) -> None:
    present = lora_config_of(model)
    if present is not None:
        raise UserError(
            f"lora: the model has adapters already, {present}; merge them first (tools/merge.py)"
        )


def adapters(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """Yield (name, layer) for each layer with an adapter."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module


def lora_config_of(model: nn.Module) -> LoRAConfig | None:
    """Return the configuration of the model's adapters, None if it has none."""
    return next((layer.cfg for _, layer in adapters(model)), None)


@torch.no_grad()
def merge_(model: Transformer) -> None:
    """Add the adapters to the weights, in place, and turn their layers into plain ones."""
    for name, layer in list(adapters(model)):
        layer.weight.copy_(layer.merged_weight())
        plain = plain_linear(layer.weight, layer.bias).train(layer.training)
        model.set_submodule(name, plain)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off within the context: this gives preference training its reference.

    Other trained weights (embedding, head, ...) stay as they are now."""
    layers = [layer for _, layer in adapters(model)]
    try:
        for layer in layers:
            layer.enabled = False
        yield
    finally:
        for layer in layers:
            layer.enabled = True


# ---- which parameters are trained ---------------------------------------------------------------


def set_trainable(model: Transformer, trainable: str, cfg: LoRAConfig) -> None:
    """Give gradients only to what `trainable` names, and add adapters if it names lora.

    trainable: 'all', or a comma-separated list of lora, embed, lm_head (the same as embed if they
    are tied) and regular expressions over parameter names ('norm', 'layers[.](30|31)[.]').

    Trained parameters and all vectors become float32: call it before the weights are loaded, so
    that they are not rounded. Raise UserError for a part that matches nothing.
    """
    refuse_adapters(model)
    chosen = names_to_train(model, trainable)
    if "lora" in split_parts(trainable):
        cfg = find_modules(model, cfg)
        check_beside_adapters(chosen, trainable, cfg)
        add_lora(model, cfg)
    for name, p in model.named_parameters():
        p.requires_grad_(name in chosen or ".lora_" in name)
        if p.dtype == torch.bfloat16 and (p.requires_grad or p.ndim < 2):
            p.data = p.data.float()


def split_parts(trainable: str) -> list[str]:
    return [part.strip() for part in trainable.split(",") if part.strip()]


def names_to_train(model: Transformer, trainable: str) -> list[str]:
    """Return the names of the parameters that `trainable` selects, without adapters."""
    names = [name for name, _ in model.named_parameters()]
    parts = split_parts(trainable)
    if parts == ["all"]:
        return names
    kinds = [re.sub(r"[.]\d+[.]", ".N.", name).removesuffix(".weight") for name in names]
    kinds = ", ".join(dict.fromkeys(kinds))  # each once: layers.N.self_attn.q_proj ...
    offer = f"parts are lora, embed, lm_head, or a regular expression over {kinds}"
    if not parts or "all" in parts:
        raise UserError(
            f"lora: trainable={trainable!r} must be 'all', or parts without it; {offer}"
        )
    head = "lm_head.weight" if "lm_head.weight" in names else "embed_tokens.weight"
    known = {"lora": [], "embed": ["embed_tokens.weight"], "lm_head": [head]}
    chosen = set()
    for part in parts:
        try:
            found = known[part] if part in known else [n for n in names if re.search(part, n)]
        except re.error as error:
            raise UserError(
                f"lora: {part!r} in trainable is no regular expression: {error}"
            ) from None
        if not found and part != "lora":
            raise UserError(f"lora: {part!r} in trainable={trainable!r} is no part; {offer}")
        chosen.update(found)
    return [name for name in names if name in chosen]


def check_beside_adapters(chosen: list[str], trainable: str, cfg: LoRAConfig) -> None:
    """Raise UserError for a parameter that cannot be trained together with adapters."""
    for name in chosen:
        if name.endswith(".bias"):
            raise UserError(
                f"lora: trainable={trainable!r} names biases, which an adapter's files cannot hold"
            )
        if last_part(name.removesuffix(".weight")) in cfg.modules:
            raise UserError(
                f"lora: trainable={trainable!r} would train {name} beside its adapter; "
                "take out either"
            )


# ---- dtype of frozen weights --------------------------------------------------------------------


def frozen_dtype(trainable: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to hold frozen matrices in. dtype: of the products.

    With LoRA bfloat16 halves their memory. Weights that are saved whole stay float32."""
    if "lora" in split_parts(trainable) and dtype == torch.bfloat16:
        return torch.bfloat16
    return torch.float32


@contextmanager
def weights_in(dtype: torch.dtype) -> Iterator[None]:
    """Create parameters in `dtype` within the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---- new tokens ---------------------------------------------------------------------------------


@torch.no_grad()
def resize_vocab(
    model: Transformer,
    vocab_size: int,
    n_known: int = 0,
    pieces: Mapping[int, list[int]] | None = None,
) -> None:
    """Add rows for new tokens to the embedding and the head.

    n_known: rows from here on are new, also those that padded the vocabulary; 0 = keep all rows.
    pieces: {new id: old ids of its text}. The row of a new token is the mean of the rows of its
    pieces; without pieces (a special token) it is the mean of all old rows.

    Call before `DDP(model)` and the optimizer. Raise UserError if rows would be removed."""
    old_size = model.cfg.vocab_size
    if vocab_size < old_size:
        raise UserError(
            f"lora: vocab_size={vocab_size} is less than {old_size}; rows are only added"
        )
    n_old = min(n_known or old_size, old_size)
    embedding = resized(model.embed_tokens.weight, vocab_size, n_old, pieces or {})
    if model.cfg.tie_embeddings:
        head = embedding
    else:
        head = resized(model.lm_head.weight, vocab_size, n_old, pieces or {})
    model.embed_tokens.weight, model.lm_head.weight = embedding, head
    model.embed_tokens.num_embeddings = model.lm_head.out_features = vocab_size
    model.cfg = replace(model.cfg, vocab_size=vocab_size)


def resized(
    weight: nn.Parameter, n_rows: int, n_old: int, pieces: Mapping[int, list[int]]
) -> nn.Parameter:
    """Return `weight` (rows, C) with n_rows rows, those from n_old on new."""
    mean = weight[:n_old].mean(dim=0, keepdim=True, dtype=torch.float64).to(weight.dtype)
    rows = torch.cat((weight[:n_old], mean.expand(n_rows - n_old, -1)))
    for token_id, old_ids in pieces.items():
        if old_ids:
            rows[token_id] = weight[old_ids].mean(dim=0)
    return nn.Parameter(rows, requires_grad=weight.requires_grad)
