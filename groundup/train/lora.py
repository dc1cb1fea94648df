"""Low-rank adapters (LoRA, arXiv:2106.09685), and which parameters are trained.

Beside a frozen matrix W stands a trained product of two thin ones: y = W x + alpha/r B A x, with A (r, in) and
B (out, r). B starts at zero, so the model starts as the same function. huggingface.py has peft's files.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from groundup.errors import UserError
from groundup.train.skeleton import Unfilled, skeleton
from model import ModelConfig, Transformer

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # an edited model has others
MOST_RANK = 2**16  # more than any matrix has
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {}  # what `weight_shapes` has returned


@dataclass(frozen=True)
class LoRAConfig:
    rank: int = 16
    alpha: float = 32.0  # the adapters' product is scaled by alpha / rank
    dropout: float = 0.0  # on the adapters' input
    modules: tuple[str, ...] = MODULES

    def __post_init__(self) -> None:
        names = {name.strip() for name in self.modules} - {""}  # "q_proj, v_proj" may have been split at the comma
        if not names:
            raise UserError("lora: modules must name some matrices, got none")
        # In one order and once each, so that equal choices are equal configurations.
        own = sorted(names - {*MODULES})
        object.__setattr__(self, "modules", (*(name for name in MODULES if name in names), *own))
        if not 1 <= self.rank <= MOST_RANK or not 0 < self.alpha < math.inf or not 0 <= self.dropout < 1:
            which = f"rank={self.rank} must be from 1 to {MOST_RANK}, alpha={self.alpha} positive"
            raise UserError(f"lora: {which}, dropout={self.dropout} from 0 to below 1")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


# ---- the layer ------------------------------------------------------------------------------------------------------


class LoRALinear(nn.Linear):
    """y = W x + bias + scale B(A(dropout(x))), around the weight and bias of an existing layer."""

    def __init__(self, weight: nn.Parameter, cfg: LoRAConfig, bias: nn.Parameter | None = None) -> None:
        out_features, in_features = weight.shape
        super().__init__(in_features, out_features, bias=False, device="meta")
        self.weight, self.bias, self.cfg, self.enabled = weight, bias, cfg, True
        like = {"bias": False, "device": weight.device, "dtype": torch.float32}  # also where W is held in bfloat16
        self.lora_A = nn.Linear(in_features, cfg.rank, **like)
        self.lora_B = nn.Linear(cfg.rank, out_features, **like)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        if not self.enabled:
            return y
        # Scale the thin product, it is the cheap one. In place: y has no other reader.
        return y.add_(self.lora_B(self.lora_A(F.dropout(x, self.cfg.dropout, self.training)) * self.cfg.scale))

    @torch.no_grad()
    def merged_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return W + scale B A, (out, in) in `dtype`, None = W's, computed in float32; W while adapters are off."""
        if not self.enabled:
            return self.weight.detach()
        weight = self.weight.to(self.lora_B.weight.device)  # a copy to save from may have left it on the GPU
        with torch.autocast(weight.device.type, enabled=False):  # it may be on around a generation
            delta = self.lora_B.weight.float() @ self.lora_A.weight.float() * self.cfg.scale
        return (weight.float() + delta).to(dtype or weight.dtype)


def plain_linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight, linear.bias = weight, bias
    return linear


def add_lora(model: Transformer, cfg: LoRAConfig) -> None:
    """Add adapters to the matrices named in cfg.modules, in all blocks. The weights stay the same tensors. Raise
    UserError if a name is that of no nn.Linear.

    Call before compiling the blocks and before `DDP(model)`."""
    if lora_config_of(model) is not None:
        raise UserError("lora: the model has adapters already; merge them first (tools/merge.py)")
    places = [
        (parent, name, child) for parent in list(model.layers.modules())
        for name, child in parent.named_children() if type(child) is nn.Linear
    ]  # fmt: skip
    known = list(dict.fromkeys(name for _, name, _ in places))
    if unknown := [repr(name) for name in cfg.modules if name not in known]:
        hint = "embedding and head are trained whole, with trainable='embed,lm_head,lora'"
        raise UserError(f"lora: modules must be some of {', '.join(known)}, got {', '.join(unknown)}; {hint}")
    for parent, name, child in places:
        if name in cfg.modules:
            setattr(parent, name, LoRALinear(child.weight, cfg, child.bias).train(child.training))


def adapters(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """Yield (name, layer) for each layer with an adapter."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoRALinear))


def lora_config_of(model: nn.Module) -> LoRAConfig | None:
    """Return the configuration of the model's adapters, None if it has none."""
    return next((layer.cfg for _, layer in adapters(model)), None)


@torch.no_grad()
def merge_(model: Transformer) -> None:
    """Add the adapters to the weights, in place, and make the layers plain ones."""
    for name, layer in list(adapters(model)):
        layer.weight.copy_(layer.merged_weight())
        parent, _, child = name.rpartition(".")
        plain = plain_linear(layer.weight, layer.bias).train(layer.training)
        setattr(model.get_submodule(parent), child, plain)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off within the context: the reference model of preference training. Other trained weights
    (embedding, head, ...) stay as they are now."""
    layers = [layer for _, layer in adapters(model)]
    try:
        for layer in layers:
            layer.enabled = False
        yield
    finally:
        for layer in layers:
            layer.enabled = True


# ---- trainable parts ------------------------------------------------------------------------------------------------


def set_trainable(model: Transformer, trainable: str, lora: LoRAConfig) -> None:
    """Give gradients only to what `trainable` names, and add adapters if it names lora.

    trainable: 'all', or a comma-separated list of lora, embed, lm_head (with tied embeddings the same as embed) and
    regular expressions over parameter names ('norm', 'layers[.](30|31)[.]'). Raise UserError for a part that matches
    nothing, or a weight that would be trained beside its own adapter.
    """
    present, names = lora_config_of(model), [name for name, _ in model.named_parameters() if ".lora_" not in name]
    chosen, with_adapters = choose(names, trainable, lora)
    if with_adapters and present is None:
        add_lora(model, lora)
    elif present is not None and (not with_adapters or present != lora):
        raise UserError(f"lora: the model has adapters already, {present}; merge them first (tools/merge.py)")
    for name, p in model.named_parameters():
        p.requires_grad_(".lora_" in name or name in chosen)


def choose(names: list[str], trainable: str, lora: LoRAConfig) -> tuple[set[str], bool]:
    """Return (names of the parameters to train beside adapters, whether to train adapters). Raise UserError."""
    parts = [part.strip() for part in trainable.split(",") if part.strip()]
    if parts == ["all"]:
        return set(names), False
    kinds = dict.fromkeys(re.sub(r"[.]\d+[.]", ".N.", name).removesuffix(".weight") for name in names)
    offer = f"parts are lora, embed, lm_head, or a regular expression over {', '.join(kinds)}"
    if not parts or "all" in parts:
        raise UserError(f"lora: trainable={trainable!r} must be 'all', or parts without it; {offer}")
    head = "lm_head.weight" if "lm_head.weight" in names else "embed_tokens.weight"
    known = {"lora": set(), "embed": {"embed_tokens.weight"}, "lm_head": {head}}
    chosen = set()
    for part in parts:
        try:
            found = known[part] if part in known else {name for name in names if re.search(part, name)}
        except re.error as error:
            raise UserError(f"lora: {part!r} in trainable is no regular expression: {error}") from None
        if not found and part != "lora":
            raise UserError(f"lora: {part!r} in trainable={trainable!r} is no part; {offer}")
        chosen |= found
    twice = [name for name in names if name in chosen and name.split(".")[-2:][0] in lora.modules]
    if twice and "lora" in parts:
        raise UserError(f"lora: trainable={trainable!r} would train {twice[0]} beside its adapter; take out either")
    if "lora" in parts and any(name.endswith(".bias") for name in chosen):
        raise UserError(f"lora: trainable={trainable!r} names biases, which an adapter's files cannot hold")
    return chosen, "lora" in parts


def weight_shapes(cfg: ModelConfig, lora: LoRAConfig | None = None) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of a model's parameters, as model.py makes them, with adapters if `lora` is given. Raise
    UserError for adapters on what it does not have."""
    key = f"{cfg} {lora}"  # a ModelConfig has no hash
    if key not in SHAPES:
        with torch.random.fork_rng(devices=[]), Unfilled():
            model = skeleton(cfg)
            if lora:
                add_lora(model, lora)
        SHAPES[key] = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return SHAPES[key]


def trainable_table(cfg: ModelConfig, trainable: str, lora: LoRAConfig) -> dict[str, int]:
    """Return the numbers of parameters {"trainable", "total", "adapters"} without building the model."""
    plain = weight_shapes(cfg)
    chosen, with_adapters = choose(list(plain), trainable, lora)
    total = sum(map(math.prod, plain.values()))
    adapters = sum(map(math.prod, weight_shapes(cfg, lora).values())) - total if with_adapters else 0
    trained = sum(math.prod(plain[name]) for name in chosen) + adapters
    return {"trainable": trained, "total": total + adapters, "adapters": adapters}


@torch.no_grad()
def resize_vocab(
    model: Transformer, vocab_size: int, n_known: int = 0, parts: Mapping[int, list[int]] = MappingProxyType({})
) -> None:
    """Add rows for more tokens to the embedding and the head, and renew those from n_known on, if it is given:
    vocabulary padding that new tokens now use. A new token's row is the mean of the rows of its `parts`, the old ids
    of its text; without parts (a special token) the mean of all old rows.

    Call before `DDP(model)` and the optimizer. Raise UserError if there would be fewer rows."""
    if vocab_size < model.cfg.vocab_size:
        raise UserError(f"lora: vocab_size={vocab_size} is less than {model.cfg.vocab_size}; rows are only added")
    old = min(n_known or model.cfg.vocab_size, model.cfg.vocab_size)
    grown = []
    for weight in (model.embed_tokens.weight, model.lm_head.weight):
        mean = weight[:old].mean(dim=0, keepdim=True, dtype=torch.float64).to(weight.dtype)
        rows = torch.cat((weight[:old], mean.expand(vocab_size - old, -1)))
        for i, ids in parts.items():
            rows[i] = weight[ids].mean(dim=0) if ids else mean[0]
        grown.append(nn.Parameter(rows, requires_grad=weight.requires_grad))
    model.embed_tokens.weight = grown[0]
    model.lm_head.weight = grown[0] if model.cfg.tie_embeddings else grown[1]
    model.embed_tokens.num_embeddings = model.lm_head.out_features = vocab_size
    model.cfg = replace(model.cfg, vocab_size=vocab_size)
