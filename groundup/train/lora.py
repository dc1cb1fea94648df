"""Low-rank adapters (LoRA, arXiv:2106.09685), and which parameters are trained.

Beside a frozen matrix W (out, in), LoRA trains two thin matrices A (r, in) and B (out, r):

    y = W x + alpha / r * B (A x)

B starts at zero, so training starts from the function that W computes. huggingface.py reads and
writes adapters in peft's format.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from groundup.errors import UserError, say
from model import Transformer

MAX_RANK = 2**16  # no matrix is larger
MAX_ALPHA = 2**63  # a whole number of a file beyond it is no float


@dataclass(frozen=True)
class LoRAConfig:
    rank: int = 16
    alpha: float = 32.0  # the adapter's output is scaled by alpha / rank
    dropout: float = 0.0  # on the adapter's input
    modules: tuple[str, ...] = ()  # ends of layer names; () = every nn.Linear in the blocks

    def __post_init__(self) -> None:
        # Written so that NaN is refused. adapter_config.json may hold any value.
        fits = isinstance(self.rank, int) and 1 <= self.rank <= MAX_RANK
        fits &= isinstance(self.alpha, int | float) and 0 < self.alpha < MAX_ALPHA
        fits &= isinstance(self.dropout, int | float) and 0 <= self.dropout < 1
        if not fits:
            what = f"rank={self.rank!r} must be from 1 to {MAX_RANK}, alpha={self.alpha!r} positive"
            raise UserError(f"lora: {what}, dropout={self.dropout!r} from 0 to below 1")


class LoRALinear(nn.Linear):
    """y = W x + bias + scale * B(A(dropout(x))), around the parameters of an existing layer."""

    def __init__(self, weight: Tensor, cfg: LoRAConfig, bias: Tensor | None = None) -> None:
        # nn.Linear would draw a weight of its own, so it is made without memory and replaced.
        n_out, n_in = weight.shape
        super().__init__(n_in, n_out, bias=False, device="meta")
        self.weight, self.bias = weight, bias
        self.cfg, self.enabled = cfg, True
        self.scale = cfg.alpha / cfg.rank

        # Adapters are float32 even if W is held in bfloat16: small updates would be rounded away.
        options = {"bias": False, "device": weight.device, "dtype": torch.float32}
        self.lora_A = nn.Linear(n_in, cfg.rank, **options)
        self.lora_B = nn.Linear(cfg.rank, n_out, **options)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))  # as peft
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        if not self.enabled:
            return F.linear(x, self.weight, self.bias)
        dropped = F.dropout(x, self.cfg.dropout, self.training)
        thin = self.lora_A(dropped) * self.scale  # (..., r): scale here, where it is cheapest
        delta = self.lora_B(thin)
        if self.bias is not None:
            delta = delta + self.bias
        # W x is added to it within the product, and rounded once. In bfloat16 W x alone would be
        # rounded before, and a delta of less than half a unit would always vanish.
        y = torch.addmm(delta.flatten(0, -2), x.flatten(0, -2), self.weight.t())
        return y.view(delta.shape)

    @torch.no_grad()
    def merged_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return W + scale * B A, (out, in), in `dtype` or that of W; W while adapters are off."""
        if not self.enabled:
            return self.weight.detach()
        # Computed in float32 even inside autocast, and rounded once.
        with torch.autocast(self.weight.device.type, enabled=False):
            delta = self.lora_B.weight.float() @ self.lora_A.weight.float() * self.scale
        return (self.weight.float() + delta).to(dtype or self.weight.dtype)


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return the layer with these parameters, made without memory of its own as LoRALinear is."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight, linear.bias = weight, bias
    return linear


# ---- adapters of a model ------------------------------------------------------------------------


def linear_layers(model: Transformer, modules: tuple[str, ...] = ()) -> list[tuple[str, nn.Linear]]:
    """Return (name, layer) of the matrices in the blocks, with or without an adapter."""
    found = []
    for name, layer in model.layers.named_modules():
        # A subclass of nn.Linear may compute something else. lora_A and lora_B are no targets.
        if type(layer) not in (nn.Linear, LoRALinear) or ".lora_" in name:
            continue
        if not modules or name.split(".")[-1] in modules:  # q_proj, ...; () = all
            found.append((f"layers.{name}", layer))
    return found


def find_modules(model: Transformer, cfg: LoRAConfig) -> LoRAConfig:
    """Return `cfg` with the names of its matrices in the model's order; refuse unknown names."""
    # All blocks have the same matrices; a dict keeps each name once, in order.
    known = dict.fromkeys(name.split(".")[-1] for name, _ in linear_layers(model))
    unknown = [repr(name) for name in cfg.modules if name not in known]
    if unknown:
        raise UserError(
            f"lora: modules must be some of {', '.join(known)}, got {', '.join(unknown)}; "
            "embedding and head are trained whole, with trainable='embed,lm_head,lora'"
        )
    wanted = cfg.modules or known
    return replace(cfg, modules=tuple(name for name in known if name in wanted))


def add_lora(model: Transformer, cfg: LoRAConfig) -> None:
    """Add adapters to the matrices named in cfg.modules, in all blocks."""
    # The weights stay the same tensors. Call before compiling the blocks and before `DDP(model)`.
    refuse_adapters(model)
    cfg = find_modules(model, cfg)
    for name, layer in linear_layers(model, cfg.modules):
        adapted = LoRALinear(layer.weight, cfg, layer.bias).train(layer.training)
        model.set_submodule(name, adapted)


def adapter_shapes(model: Transformer, cfg: LoRAConfig) -> dict[str, tuple[int, int]]:
    """Return {name: shape} of the adapters' matrices, which the model need not have yet."""
    shapes = {}
    for name, layer in linear_layers(model, cfg.modules):
        shapes[f"{name}.lora_A.weight"] = (cfg.rank, layer.in_features)
        shapes[f"{name}.lora_B.weight"] = (layer.out_features, cfg.rank)
    return shapes


def refuse_adapters(model: nn.Module) -> None:
    if present := lora_config_of(model):
        what = f"the model has adapters already, {present}"
        raise UserError(f"lora: {what}; merge them first (tools/merge.py)")


def adapters(model: nn.Module) -> list[tuple[str, LoRALinear]]:
    """Return (name, layer) for each layer with an adapter."""
    return [(n, layer) for n, layer in model.named_modules() if isinstance(layer, LoRALinear)]


def lora_config_of(model: nn.Module) -> LoRAConfig | None:
    """Return the configuration of the model's adapters, None if it has none."""
    # All adapters of a model have the same.
    return next((layer.cfg for _, layer in adapters(model)), None)


@torch.no_grad()
def merge_(model: Transformer) -> None:
    """Add the adapters to the weights, in place, and turn their layers into plain ones."""
    for name, layer in adapters(model):
        layer.weight.copy_(layer.merged_weight())
        # The same Parameter in another layer: tied weights and names stay.
        plain = plain_linear(layer.weight, layer.bias).train(layer.training)
        model.set_submodule(name, plain)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off within the context: this gives preference training its reference."""
    # Other trained weights (embedding, head, ...) stay as they are now.
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

    Call before the weights are loaded: what becomes float32 here is then not rounded."""
    refuse_adapters(model)
    chosen = names_to_train(model, trainable)
    if "lora" in split_parts(trainable):
        cfg = find_modules(model, cfg)
        check_beside_adapters(chosen, trainable, cfg)
        add_lora(model, cfg)
    elif cfg.rank != LoRAConfig.rank:
        text = f"lora_rank={cfg.rank} has no effect with {trainable=}; give --trainable=lora"
        say(f"warning     {text}")

    # Trained parameters and vectors are float32. Frozen matrices keep the dtype in which the model
    # was built, see frozen_dtype.
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

    # For messages, the layers' names once: layers.N.self_attn.q_proj ...
    kinds = [re.sub(r"[.]\d+[.]", ".N.", name).removesuffix(".weight") for name in names]
    kinds = ", ".join(dict.fromkeys(kinds))
    offer = f"parts are lora, embed, lm_head, or a regular expression over {kinds}"
    if not parts or "all" in parts:
        raise UserError(f"lora: {trainable=} must be 'all', or parts without it; {offer}")

    # A model with tied embeddings has no parameter of its own for the head.
    head = "lm_head.weight" if "lm_head.weight" in names else "embed_tokens.weight"
    known = {"lora": [], "embed": ["embed_tokens.weight"], "lm_head": [head]}
    chosen = set()
    for part in parts:
        try:
            # A regular expression may match any part of a name.
            found = known[part] if part in known else [n for n in names if re.search(part, n)]
        except re.error as error:
            raise UserError(f"lora: {part!r} is no regular expression: {error}") from None
        if not found and part != "lora":
            raise UserError(f"lora: {part!r} in {trainable=} is no part; {offer}")
        chosen.update(found)
    return [name for name in names if name in chosen]  # in the model's order


def check_beside_adapters(chosen: list[str], trainable: str, cfg: LoRAConfig) -> None:
    """Raise UserError for a parameter that cannot be trained together with adapters."""
    for name in chosen:
        if name.endswith(".bias"):  # peft would have to save the whole layer
            text = f"{trainable=} names biases, which an adapter's files cannot hold"
            raise UserError(f"lora: {text}")
        if name.removesuffix(".weight").split(".")[-1] in cfg.modules:
            text = f"{trainable=} would train {name} beside its adapter; take out either"
            raise UserError(f"lora: {text}")


def frozen_dtype(trainable: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to hold frozen matrices in. dtype: of the products."""
    # With LoRA bfloat16 halves their memory. Weights that are saved whole stay float32.
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


def with_new_rows(
    weight: Tensor, n_rows: int, n_known: int, pieces: dict[int, list[int]]
) -> Tensor:
    """Return an embedding or a head (rows, C) with n_rows rows, those from n_known on new.

    pieces: {id of a new token: known ids of its text}."""
    # A special token starts as the mean of all known rows, summed in float64.
    mean = weight[:n_known].mean(dim=0, keepdim=True, dtype=torch.float64).to(weight.dtype)
    rows = torch.cat((weight[:n_known], mean.expand(n_rows - n_known, -1)))
    # Another new token starts as the mean of the rows that its text had before.
    for token_id, old_ids in pieces.items():
        if old_ids:
            rows[token_id] = weight[old_ids].mean(dim=0)
    return rows
