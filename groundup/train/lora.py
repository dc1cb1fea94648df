"""Which parameters are trained, and low-rank adapters (LoRA, arXiv:2106.09685) in peft's format.

    set_trainable(model, "embed,lm_head,lora", LoRAConfig(rank=8))      freeze the rest, add adapters
    trainable_table(cfg, "lora", LoRAConfig())                          how many that are, without a model
    save_adapter(...), load_adapter(...)                                the files that peft writes and reads
    merge_(model)                                                       adapters into the weights: a plain model again
    resize_vocab(model, 64_000)                                         rows for the tokens of another language

A matrix W that is frozen gets a trained product of two thin ones beside it: y = W x + alpha/r B A x, with A (r, in) and
B (out, r). B begins at zero, so that training starts from the very function of the model.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from groundup.errors import UserError
from model import ModelConfig, Transformer

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # what peft puts before Hugging Face's names
# Keys of adapter_config.json that change nothing of what is computed here, or that are read from the weights' names.
NEUTRAL_KEYS = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules", "modules_to_save",
    "layers_to_transform", "layers_pattern", "fan_in_fan_out", "ensure_weight_tying", "megatron_core",
    "runtime_config", "qalora_group_size", "eva_config",
}  # fmt: skip
# Other ways to begin (PiSSA, OLoRA, LoftQ ...) change the frozen weights too, which are not in the adapter's file.
BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")





@dataclass(frozen=True)
class LoRAConfig:
    rank: int = 16
    alpha: float = 32.0  # the adapters' product is scaled by alpha / rank
    dropout: float = 0.0  # on what the adapters read
    modules: tuple[str, ...] = MODULES
    rslora: bool = False  # scale by alpha / sqrt(rank) (arXiv:2312.03732)

    def __post_init__(self) -> None:
        names = [name.strip() for name in self.modules]  # "q_proj, v_proj" may have been split at the comma
        unknown = [name for name in names if name not in MODULES]
        if unknown or not names:
            what = repr(unknown[0]) if unknown else "none"
            hint = "; train the embedding and the head whole, with trainable='embed,lm_head,lora'"
            hint = hint if unknown and unknown[0] in ("embed_tokens", "lm_head", "embed") else ""
            raise UserError(f"lora: modules must be some of {', '.join(MODULES)}, got {what}{hint}")
        # In the model's order and once each, so that equal choices are equal configurations.
        object.__setattr__(self, "modules", tuple(name for name in MODULES if name in names))
        if self.rank < 1 or not 0 < self.alpha < math.inf or not 0 <= self.dropout < 1:
            raise UserError(
                f"lora: rank={self.rank} must be at least 1, alpha={self.alpha} positive, "
                f"dropout={self.dropout} from 0 to below 1"
            )

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


# ---- the layer ------------------------------------------------------------------------------------------------------


class LoRALinear(nn.Linear):
    """y = W x + scale B(A(dropout(x))), around an existing weight."""

    def __init__(self, weight: nn.Parameter, cfg: LoRAConfig) -> None:
        out_features, in_features = weight.shape
        super().__init__(in_features, out_features, bias=False, device="meta")
        self.weight, self.cfg, self.enabled = weight, cfg, True
        like = {"bias": False, "device": weight.device, "dtype": weight.dtype}
        self.lora_A = nn.Linear(in_features, cfg.rank, **like)
        self.lora_B = nn.Linear(cfg.rank, out_features, **like)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        if not self.enabled:
            return y
        # The thin product is the cheap one to scale; nobody else needs y.
        return y.add_(self.lora_B(self.lora_A(F.dropout(x, self.cfg.dropout, self.training)) * self.cfg.scale))

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """W + scale B A, a new tensor (out, in) in W's dtype, computed in float32; W itself while adapters are off."""
        if not self.enabled:
            return self.weight.detach()
        weight = self.weight.to(self.lora_B.weight.device)  # a copy to save from may have left it on the GPU
        with torch.autocast(weight.device.type, enabled=False):  # it may be on around a generation
            delta = self.lora_B.weight.float() @ self.lora_A.weight.float() * self.cfg.scale
        return (weight.float() + delta).to(weight.dtype)


def plain_linear(weight: nn.Parameter) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = weight
    return linear


def add_lora(model: Transformer, cfg: LoRAConfig) -> None:
    """Put adapters beside the matrices named in cfg.modules, in all blocks. The weights stay the very same tensors.

    Nothing is frozen yet: see set_trainable. Before the blocks are compiled and before ddp.DDP(model)."""
    if lora_config_of(model) is not None:
        raise UserError("lora: the model has adapters already; merge them first (tools/merge.py)")
    for block in model.layers:
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if name in cfg.modules:
                    setattr(parent, name, LoRALinear(child.weight, cfg).train(child.training))


def adapters(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """(name, layer) of each layer with an adapter."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LoRALinear))


def lora_config_of(model: nn.Module) -> LoRAConfig | None:
    """What the model's adapters were made with; None if it has none."""
    return next((layer.cfg for _, layer in adapters(model)), None)


@torch.no_grad()
def merge_(model: Transformer) -> None:
    """Add the adapters to the weights, in place, and make the layers plain ones."""
    for name, layer in list(adapters(model)):
        layer.weight.copy_(layer.merged_weight())
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, plain_linear(layer.weight).train(layer.training))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within it the model computes what it did before adapters: the reference model of preference training. What else
    is trained (embedding, head, ...) stays as it is now."""
    layers = [layer for _, layer in adapters(model)]
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


# ---- trainable parts ------------------------------------------------------------------------------------------------


def set_trainable(model: Transformer, trainable: str, lora: LoRAConfig) -> None:
    """Add adapters if asked for, and let only what `trainable` names have gradients.

    'all', or a comma-separated list of: lora (adapters as `lora` says), embed, lm_head (with tied embeddings the same
    as embed), or a regular expression that is searched for in the names of parameters ('norm', 'layers[.](30|31)[.]').
    Raises LoRAError: a part that is nothing, or a weight that would be trained beside its own adapter.
    """
    present = lora_config_of(model)
    names = [name for name, _ in model.named_parameters() if ".lora_" not in name]
    chosen = choose(names, trainable, lora)
    if with_lora(trainable) and present is None:
        add_lora(model, lora)
    elif present is not None and (not with_lora(trainable) or present != lora):
        raise UserError(f"lora: the model has adapters already, {present}; merge them first (tools/merge.py)")
    for name, p in model.named_parameters():
        p.requires_grad_(".lora_" in name or name in chosen)


def with_lora(trainable: str) -> bool:
    return "lora" in parts_of(trainable)


def parts_of(trainable: str) -> list[str]:
    return [part.strip() for part in trainable.split(",") if part.strip()]


def choose(names: list[str], trainable: str, lora: LoRAConfig) -> set[str]:
    """The names of parameters, adapters aside, that are to be trained. Raises LoRAError."""
    parts = parts_of(trainable)
    if parts == ["all"]:
        return set(names)
    if not parts or "all" in parts:
        raise UserError(f"lora: trainable={trainable!r} must be 'all', or parts without it; parts are {offer(names)}")
    head = "lm_head.weight" if "lm_head.weight" in names else "embed_tokens.weight"
    known = {"lora": set(), "embed": {"embed_tokens.weight"}, "lm_head": {head}}
    chosen = set()
    for part in parts:
        found = known[part] if part in known else matches(part, names)
        if not found and part != "lora":
            raise UserError(f"lora: {part!r} in trainable={trainable!r} is no part; parts are {offer(names)}")
        chosen |= found
    twice = [name for name in names if name in chosen and name.split(".")[-2] in lora.modules]
    if twice and "lora" in parts:
        raise UserError(
            f"lora: trainable={trainable!r} would train {twice[0]} beside its adapter; "
            "take that module out of the adapters' modules, or out of trainable"
        )
    return chosen


def matches(pattern: str, names: list[str]) -> set[str]:
    try:
        return {name for name in names if re.search(pattern, name)}
    except re.error as error:
        raise UserError(f"lora: {pattern!r} in trainable is no regular expression: {error}") from None


def offer(names: list[str]) -> str:
    """What `trainable` may name, for an error message."""
    kinds = dict.fromkeys(re.sub(r"[.]\d+[.]", ".N.", name).removesuffix(".weight") for name in names)
    return "lora, embed, lm_head, or a regular expression over " + ", ".join(kinds)


def weight_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the parameters of a plain model."""
    C, D, V = cfg.n_embd, cfg.head_dim, cfg.vocab_size
    queries, keys = cfg.n_head * D, cfg.n_kv_head * D
    block = {"input_layernorm": (C,)}
    block |= {"self_attn.q_proj": (queries, C), "self_attn.k_proj": (keys, C)}
    block |= {"self_attn.v_proj": (keys, C), "self_attn.o_proj": (C, queries)}
    block |= {"self_attn.q_norm": (D,), "self_attn.k_norm": (D,)} if cfg.qk_norm else {}
    block |= {"post_attention_layernorm": (C,)}
    block |= {"mlp.gate_proj": (cfg.ffn_dim, C), "mlp.up_proj": (cfg.ffn_dim, C), "mlp.down_proj": (C, cfg.ffn_dim)}
    shapes = {"embed_tokens.weight": (V, C)}
    shapes |= {f"layers.{i}.{name}.weight": shape for i in range(cfg.n_layer) for name, shape in block.items()}
    return shapes | {"norm.weight": (C,)} | ({} if cfg.tie_embeddings else {"lm_head.weight": (V, C)})


def trainable_table(cfg: ModelConfig, trainable: str, lora: LoRAConfig) -> dict[str, int]:
    """{"trainable", "total", "adapters": numbers of parameters}, adapters included, without building the model."""
    shapes = weight_shapes(cfg)
    chosen = choose(list(shapes), trainable, lora)
    adapted = [shape for name, shape in shapes.items() if name.split(".")[-2] in lora.modules]
    n_adapters = sum(lora.rank * sum(shape) for shape in adapted) if with_lora(trainable) else 0
    return {
        "trainable": sum(math.prod(shapes[name]) for name in chosen) + n_adapters,
        "total": sum(map(math.prod, shapes.values())) + n_adapters,
        "adapters": n_adapters,
    }


@torch.no_grad()
def resize_vocab(model: Transformer, vocab_size: int, n_known: int = 0) -> None:
    """Give the embedding and the head rows for more tokens; the new rows are the mean of the old ones, and so are old
    rows from n_known on, if it is given: padding of the vocabulary that new tokens come to use.

    Before ddp.DDP(model) and the optimizer. Raises LoRAError if there would be fewer."""
    if vocab_size < model.cfg.vocab_size:
        raise UserError(
            f"lora: vocab_size={vocab_size} is less than the model's {model.cfg.vocab_size}; rows are only added"
        )
    old = min(n_known or model.cfg.vocab_size, model.cfg.vocab_size)
    grown = []
    for weight in (model.embed_tokens.weight, model.lm_head.weight):
        mean = weight[:old].mean(dim=0, keepdim=True, dtype=torch.float64).to(weight.dtype)
        rows = torch.cat((weight[:old], mean.expand(vocab_size - old, -1)))
        grown.append(nn.Parameter(rows, requires_grad=weight.requires_grad))
    model.embed_tokens.weight = grown[0]
    model.lm_head.weight = grown[0] if model.cfg.tie_embeddings else grown[1]
    model.embed_tokens.num_embeddings = model.lm_head.out_features = vocab_size
    model.cfg = replace(model.cfg, vocab_size=vocab_size)


# ---- peft's files ---------------------------------------------------------------------------------------------------


def hf_name(name: str) -> str:
    """Hugging Face's name of one of our parameters or modules."""
    return name if name.split(".")[0] == "lm_head" else f"model.{name}"


def save_adapter(
    directory: str | Path, model: Transformer, base: str, keep: Iterable[str] = (), note: dict[str, str] | None = None
) -> None:
    """Write adapter_config.json and adapter_model.safetensors: what is trained, and the weights named in `keep`.

    base: where the frozen weights are. `note` goes into the weights' metadata. Raises LoRAError without adapters."""
    cfg, directory = lora_config_of(model), Path(directory)
    if cfg is None:
        raise UserError("lora: the model has no adapters to save")
    params = dict(model.named_parameters())
    whole = [name for name, p in params.items() if ".lora_" not in name and (p.requires_grad or name in keep)]
    tensors = {name: p for name, p in params.items() if ".lora_" in name or name in whole}
    if model.cfg.tie_embeddings and "embed_tokens.weight" in whole:
        # peft would leave the head with the base's embedding if it were not named and stored as well.
        tensors["lm_head.weight"] = model.embed_tokens.weight.clone()
        whole.append("lm_head.weight")
    stored = {PREFIX + hf_name(name): p.detach().to("cpu", torch.float32).contiguous() for name, p in tensors.items()}
    save_file(stored, directory / WEIGHTS_FILE, metadata={"format": "pt"} | (note or {}))
    config = to_peft_config(cfg, base, [name.removesuffix(".weight") for name in whole], model.cfg.tie_embeddings)
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def to_peft_config(cfg: LoRAConfig, base: str, whole: list[str], tied: bool) -> dict:
    """adapter_config.json. `whole`: modules that are trained as they are."""
    short = [name if name in ("embed_tokens", "lm_head") else hf_name(name) for name in whole]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": cfg.rank,
        "lora_alpha": int(cfg.alpha) if float(cfg.alpha).is_integer() else cfg.alpha,
        "lora_dropout": cfg.dropout,
        "use_rslora": cfg.rslora,
        "target_modules": list(cfg.modules),
        "modules_to_save": short or None,
        "ensure_weight_tying": tied and "embed_tokens" in whole,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def read_peft_config(directory: str | Path) -> dict:
    """adapter_config.json of an adapter that can be loaded. Raises LoRAError for what is not supported."""
    path = Path(directory) / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"lora: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"lora: {path} is damaged: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise UserError(f"lora: {path}: peft_type={kind!r}; supported is 'LORA'")
    begin = config.get("init_lora_weights")
    if not any(begin is known or begin == known and isinstance(begin, str) for known in BEGINNINGS):
        raise UserError(f"lora: {path}: init_lora_weights={begin!r} changes the frozen weights too; not supported")
    for key, value in config.items():
        if key not in NEUTRAL_KEYS | {"init_lora_weights"} and value not in (None, False, "none", [], {}):
            raise UserError(f"lora: {path}: {key}={value!r} is not supported; merge the adapter with peft")
    return config


def open_adapter(directory: str | Path) -> Any:
    """The open safetensors file of an adapter, to be closed. Raises LoRAError."""
    path = Path(directory) / WEIGHTS_FILE
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        is_bin = not path.exists() and path.with_suffix(".bin").exists()
        why = "a .bin can run code, only safetensors are read" if is_bin else str(error).splitlines()[0]
        raise UserError(f"lora: cannot read {path}: {why}") from None


def stored_shapes(directory: str | Path) -> dict[str, tuple[int, ...]]:
    """{our name: shape} of what an adapter's file holds."""
    with open_adapter(directory) as file:
        return {our_name(key): tuple(file.get_slice(key).get_shape()) for key in file.keys()}


def our_name(key: str) -> str:
    return key.removeprefix(PREFIX).removeprefix("model.")


def adapter_config(directory: str | Path) -> LoRAConfig:
    """The adapters of a directory that we or peft wrote. Raises LoRAError for what is not supported.

    Which modules have one is read from the weights: peft's target_modules may be names, paths or an expression."""
    config, shapes = read_peft_config(directory), stored_shapes(directory)
    modules = {name.split(".")[-3] for name in shapes if ".lora_A." in name}
    try:
        return LoRAConfig(
            rank=config["r"], alpha=config["lora_alpha"], dropout=config.get("lora_dropout", 0.0),
            modules=tuple(sorted(modules)), rslora=bool(config.get("use_rslora")),
        )  # fmt: skip
    except KeyError as error:
        raise UserError(f"lora: {Path(directory) / CONFIG_FILE} has no {error}") from None
    except UserError as error:
        raise UserError(f"{error} (in {directory})") from None


@torch.no_grad()
def load_adapter(model: Transformer, directory: str | Path) -> None:
    """Load adapters, and the modules that were trained whole, into a model that holds the base's weights.

    Adapters are added if the model has none; otherwise they must be of the same kind. Where the file has no adapter for
    a layer, the layer's is made to add nothing. Raises LoRAError with nothing copied: not supported, does not fit."""
    cfg, present = adapter_config(directory), lora_config_of(model)
    if present is not None and replace(present, dropout=cfg.dropout) != cfg:
        raise UserError(f"lora: {directory} has {describe(cfg)}; the model has {describe(present)}")
    shapes = stored_shapes(directory)
    check_fit(model, cfg, shapes, directory)
    if present is None:
        add_lora(model, cfg)
    params = dict(model.named_parameters())
    with open_adapter(directory) as file:
        tensors = {our_name(key): file.get_tensor(key) for key in file.keys()}
    if model.cfg.tie_embeddings:
        tensors.pop("lm_head.weight", None)  # check_fit has seen that it is the embedding once more
    for name, p in params.items():
        if name in tensors:
            p.copy_(tensors[name])
        elif ".lora_B." in name:
            p.zero_()


def describe(cfg: LoRAConfig) -> str:
    return ", ".join(f"{key}={'+'.join(v) if key == 'modules' else v}" for key, v in asdict(cfg).items())


def check_fit(model: Transformer, cfg: LoRAConfig, shapes: dict[str, tuple[int, ...]], directory: str | Path) -> None:
    """Raise LoRAError unless every stored tensor has its place in the model with adapters."""
    want = weight_shapes(model.cfg)
    adapted = {name: shape for name, shape in want.items() if name.split(".")[-2] in cfg.modules}
    for name, (out_features, in_features) in adapted.items():
        module = name.removesuffix("weight")
        want |= {f"{module}lora_A.weight": (cfg.rank, in_features), f"{module}lora_B.weight": (out_features, cfg.rank)}
    if model.cfg.tie_embeddings and "lm_head.weight" in shapes:
        want |= {"lm_head.weight": want["embed_tokens.weight"]}
    for name, shape in shapes.items():
        if name not in want or name in adapted:
            raise UserError(f"lora: {directory} holds {name}, for which this model has no place")
        if shape != want[name]:
            raise UserError(f"lora: {directory}: {name} has shape {shape} and not {want[name]}")
        other = name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")
        if other not in shapes:
            raise UserError(f"lora: {directory} holds {name} without {other}")
    if model.cfg.tie_embeddings:
        check_tied(shapes, directory)


def check_tied(shapes: dict[str, tuple[int, ...]], directory: str | Path) -> None:
    """Raise LoRAError unless embedding and head were trained as one: only that is a tied model's."""
    names = [name for name in ("embed_tokens.weight", "lm_head.weight") if name in shapes]
    if not names:
        return
    with open_adapter(directory) as file:
        found = [file.get_tensor(key) for key in file.keys() if our_name(key) in names]
        tied = read_peft_config(directory).get("ensure_weight_tying")
    if len(found) == 2 and torch.equal(*found) or names == ["embed_tokens.weight"] and tied:
        return
    raise UserError(f"lora: {directory} trained {' and '.join(names)} apart, but the model ties them; untie the base")
