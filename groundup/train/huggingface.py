"""Hugging Face's file formats: config.json, safetensors weights with their names, and peft's adapter files.

checkpoint.py writes and reads directories with them. Our parameter names are Hugging Face's without "model.". Whatever
would load but compute something else is refused in one line.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from groundup.errors import UserError, listed
from groundup.train.lora import LoRAConfig, add_lora, lora_config_of, weight_shapes
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Settings of those architectures beside the sizes, with the only value that model.py computes. Absent or null means it.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
DTYPES = ("F32", "F16", "BF16")  # of stored weights, by safetensors' names; float32 holds each exactly

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # peft puts this before Hugging Face's names
# Keys of adapter_config.json that do not change what is computed here, or that the weights' names tell.
NEUTRAL_KEYS = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules", "modules_to_save",
    "layers_to_transform", "layers_pattern", "fan_in_fan_out", "ensure_weight_tying", "megatron_core",
    "runtime_config", "qalora_group_size", "eva_config",
}  # fmt: skip
# Other initialisations (PiSSA, OLoRA, LoftQ ...) change the frozen weights too, which are not in the adapter's file.
INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


def read_json(path: Path) -> dict:
    """Return the JSON object in a file. Raise UserError if it cannot be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"checkpoint: cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise UserError(f"checkpoint: {path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"checkpoint: {path} is damaged: it holds a {type(value).__name__}, not an object")
    return value


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# ---- config.json ----------------------------------------------------------------------------------------------------


def to_hf_config(cfg: ModelConfig, tokenizer: Tokenizer, dtype: torch.dtype = torch.float32) -> dict:
    """Return config.json; rotary settings and dtype stand under the names of transformers 5 and of transformers 4."""
    kind = "qwen3" if cfg.qk_norm else "llama"
    return special_ids(tokenizer) | {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "vocab_size": cfg.vocab_size,
        "max_position_embeddings": cfg.block_size,
        "num_hidden_layers": cfg.n_layer,
        "num_attention_heads": cfg.n_head,
        "num_key_value_heads": cfg.n_kv_head,
        "hidden_size": cfg.n_embd,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.ffn_dim,
        "rms_norm_eps": cfg.norm_eps,
        "rope_parameters": {"rope_type": "default"} | (cfg.rope_scaling or {}) | {"rope_theta": cfg.rope_theta},
        "rope_theta": cfg.rope_theta,
        "rope_scaling": cfg.rope_scaling,
        "tie_word_embeddings": cfg.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return the ids that begin, end and pad a text; None for one that the tokenizer does not have."""
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eot_id, "pad_token_id": tokenizer.pad_id}
    return {key: i if i >= 0 else None for key, i in ids.items()}


def from_hf_config(path: Path) -> ModelConfig:
    """Return the architecture in a config.json (transformers 4 or 5). Raise UserError if model.py does not build it."""
    hf = read_json(path)
    check_supported(hf, path)
    rope_theta, rope_scaling = read_rope(hf, path)
    try:
        return ModelConfig(
            vocab_size=hf["vocab_size"],
            block_size=hf["max_position_embeddings"],
            n_layer=hf["num_hidden_layers"],
            n_head=hf["num_attention_heads"],
            n_kv_head=hf.get("num_key_value_heads") or 0,
            n_embd=hf["hidden_size"],
            head_dim=hf.get("head_dim") or 0,
            ffn_dim=hf["intermediate_size"],
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            norm_eps=hf["rms_norm_eps"],
            qk_norm=hf["model_type"] == "qwen3",
            tie_embeddings=bool(hf.get("tie_word_embeddings")),
        )
    except KeyError as error:
        raise UserError(f"checkpoint: {path} has no {error}") from None


def check_supported(hf: dict, path: Path) -> None:
    """Raise UserError for a model whose weights would load but mean something else."""
    kind = hf.get("model_type")
    if kind not in ARCHITECTURES:
        why = " (Qwen2's queries, keys and values have biases)" if kind == "qwen2" else ""
        raise UserError(f"checkpoint: {path}: model_type={kind!r}{why}; supported are {', '.join(ARCHITECTURES)}")
    settings = hf | (hf.get("rope_parameters") or {})
    for key, only in FIXED.items():
        if settings.get(key) not in (None, only):
            raise UserError(f"checkpoint: {path}: {key}={settings[key]!r}; supported is {only!r}")


def read_rope(hf: dict, path: Path) -> tuple[float, dict | None]:
    """Return (rope_theta, Llama 3.1's scaling or None). transformers 5 keeps both in rope_parameters."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {"rope_type": "default"}
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type"))  # "type" before transformers 4.43
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"checkpoint: {path}: rope_type={kind!r}; supported are default, llama3")
    missing = [key for key in LLAMA3_ROPE if key not in rope]
    if missing:
        raise UserError(f"checkpoint: {path}: rope_type='llama3' without {listed(missing)}")
    return theta, {"rope_type": kind} | {key: rope[key] for key in LLAMA3_ROPE}


# ---- weights --------------------------------------------------------------------------------------------------------


def hf_name(name: str) -> str:
    """Return Hugging Face's name of one of our parameters or modules."""
    return name if name.split(".")[0] == "lm_head" else f"model.{name}"


def save_weights(path: Path, tensors: dict[str, Tensor], **metadata: str) -> None:
    """Write a safetensors file that others may read as the umask says (safetensors 0.8 lets only its owner)."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"} | metadata)
    path.chmod(mode)


def open_weights(directory: Path, files: ExitStack) -> dict[str, Any]:
    """Return {our name: slice of an open safetensors file}, from one file or from the shards that an index names."""
    paths, index = [directory / "model.safetensors"], directory / "model.safetensors.index.json"
    if index.exists() and not paths[0].exists():
        paths = [directory / shard for shard in sorted(set(read_json(index).get("weight_map", {}).values()))]
    tensors = {}
    for path in paths:
        shard = files.enter_context(open_safetensors(path))
        tensors |= {name.removeprefix("model."): shard.get_slice(name) for name in shard.keys()}
    # Conversions of the first Llamas carry this constant, which follows from the configuration.
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file; the caller closes it. Raise UserError if that fails."""
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        has_bin = not path.exists() and any(path.parent.glob("*.bin"))
        why = "a .bin can run code, only safetensors are read" if has_bin else str(error).splitlines()[0]
        raise UserError(f"checkpoint: cannot read {path}: {why}") from None


def drop_tied_head(tensors: dict[str, Any], directory: str | Path) -> None:
    """Remove the second copy of the embedding that some tied models store as their head."""
    head, embedding = tensors.pop("lm_head.weight", None), tensors.get("embed_tokens.weight")
    if head is not None and embedding is not None and not torch.equal(head[:], embedding[:]):
        raise UserError(f"checkpoint: {directory} ties its embeddings, but lm_head.weight differs from them")


def misfits(params: dict[str, Tensor], tensors: dict[str, Any]) -> Iterator[str]:
    """Yield a text for each reason why `tensors` cannot be copied into `params`."""
    yield from (f"{name} is missing" for name in params if name not in tensors)
    yield from (f"{name} is unknown" for name in tensors if name not in params)
    for name in (name for name in params if name in tensors):
        shape, want, dtype = tuple(tensors[name].get_shape()), tuple(params[name].shape), tensors[name].get_dtype()
        if shape != want:
            yield f"{name} has shape {shape} and not {want}"
        elif dtype not in DTYPES:
            yield f"{name} is {dtype} and not one of {', '.join(DTYPES)}"


# ---- peft's adapters ------------------------------------------------------------------------------------------------


def save_adapter(
    directory: str | Path, model: Transformer, base: str, keep: Iterable[str] = (), note: dict[str, str] | None = None
) -> None:
    """Write adapter_config.json and adapter_model.safetensors: all that is trained, and the parameters in `keep`.

    base: directory of the frozen weights. note: goes into the weights' metadata. Raise UserError without adapters."""
    cfg, directory = lora_config_of(model), Path(directory)
    if cfg is None:
        raise UserError("lora: the model has no adapters to save")
    params = dict(model.named_parameters())
    whole = [name for name, p in params.items() if ".lora_" not in name and (p.requires_grad or name in keep)]
    tensors = {name: p for name, p in params.items() if ".lora_" in name or name in whole}
    if model.cfg.tie_embeddings and "embed_tokens.weight" in whole:
        # peft leaves the head with the base's embedding unless it is named and stored as well.
        tensors["lm_head.weight"] = model.embed_tokens.weight.clone()
        whole.append("lm_head.weight")
    stored = {PREFIX + hf_name(name): p.detach().to("cpu", torch.float32).contiguous() for name, p in tensors.items()}
    save_weights(directory / ADAPTER_WEIGHTS, stored, **(note or {}))
    config = to_peft_config(cfg, base, [name.removesuffix(".weight") for name in whole], model.cfg.tie_embeddings)
    write_json(directory / ADAPTER_CONFIG, config)


def to_peft_config(cfg: LoRAConfig, base: str, whole: list[str], tied: bool) -> dict:
    """Return adapter_config.json. whole: modules that are trained without an adapter."""
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
    """Return adapter_config.json. Raise UserError for an adapter that is not supported."""
    path = Path(directory) / ADAPTER_CONFIG
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise UserError(f"lora: {path}: peft_type={config.get('peft_type')!r}; supported is 'LORA'")
    begin = config.get("init_lora_weights")
    if not any(begin is known or begin == known and isinstance(begin, str) for known in INITIALISATIONS):
        raise UserError(f"lora: {path}: init_lora_weights={begin!r} changes the frozen weights too; not supported")
    for key, value in config.items():
        if key not in NEUTRAL_KEYS | {"init_lora_weights"} and value not in (None, False, "none", [], {}):
            raise UserError(f"lora: {path}: {key}={value!r} is not supported; merge the adapter with peft")
    return config


def stored_shapes(directory: str | Path) -> dict[str, tuple[int, ...]]:
    """Return {our name: shape} of an adapter's tensors."""
    with open_safetensors(Path(directory) / ADAPTER_WEIGHTS) as file:
        return {our_name(key): tuple(file.get_slice(key).get_shape()) for key in file.keys()}


def our_name(key: str) -> str:
    return key.removeprefix(PREFIX).removeprefix("model.")


def adapter_config(directory: str | Path) -> LoRAConfig:
    """Return the adapters of a directory that we or peft wrote. Raise UserError for what is not supported.

    The weights tell which modules have one: peft's target_modules may be names, paths or an expression."""
    config, shapes = read_peft_config(directory), stored_shapes(directory)
    modules = {name.split(".")[-3] for name in shapes if ".lora_A." in name}
    try:
        return LoRAConfig(
            rank=config["r"], alpha=config["lora_alpha"], dropout=config.get("lora_dropout", 0.0),
            modules=tuple(sorted(modules)), rslora=bool(config.get("use_rslora")),
        )  # fmt: skip
    except KeyError as error:
        raise UserError(f"lora: {Path(directory) / ADAPTER_CONFIG} has no {error}") from None
    except UserError as error:
        raise UserError(f"{error} (in {directory})") from None


@torch.no_grad()
def load_adapter(model: Transformer, directory: str | Path) -> None:
    """Load adapters, and modules that were trained whole, into a model that holds the base's weights.

    Adapters are added if the model has none; otherwise they must be of the same kind. A layer without an adapter in the
    file gets one that adds nothing. Raise UserError, with nothing copied, for what is not supported or does not fit."""
    cfg, present = adapter_config(directory), lora_config_of(model)
    if present is not None and replace(present, dropout=cfg.dropout) != cfg:
        raise UserError(f"lora: {directory} has {describe(cfg)}; the model has {describe(present)}")
    check_adapter_fits(model, cfg, stored_shapes(directory), directory)
    if present is None:
        add_lora(model, cfg)
    with open_safetensors(Path(directory) / ADAPTER_WEIGHTS) as file:
        tensors = {our_name(key): file.get_tensor(key) for key in file.keys()}
    if model.cfg.tie_embeddings:
        tensors.pop("lm_head.weight", None)  # check_tied has seen that it equals the embedding
    for name, p in model.named_parameters():
        if name in tensors:
            p.copy_(tensors[name])
        elif ".lora_B." in name:
            p.zero_()


def describe(cfg: LoRAConfig) -> str:
    return ", ".join(f"{key}={'+'.join(v) if key == 'modules' else v}" for key, v in asdict(cfg).items())


def check_adapter_fits(
    model: Transformer, cfg: LoRAConfig, shapes: dict[str, tuple[int, ...]], directory: str | Path
) -> None:
    """Raise UserError unless every stored tensor has its place in the model with adapters."""
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
    """Raise UserError unless the adapter trained embedding and head as one, as a tied model must."""
    names = [name for name in ("embed_tokens.weight", "lm_head.weight") if name in shapes]
    if not names:
        return
    with open_safetensors(Path(directory) / ADAPTER_WEIGHTS) as file:
        found = [file.get_tensor(key) for key in file.keys() if our_name(key) in names]
    tied = read_peft_config(directory).get("ensure_weight_tying")
    if len(found) == 2 and torch.equal(*found) or names == ["embed_tokens.weight"] and tied:
        return
    raise UserError(f"lora: {directory} trained {' and '.join(names)} apart, but the model ties them; untie the base")
