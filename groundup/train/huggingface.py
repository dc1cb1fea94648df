"""Hugging Face's file formats: config.json, safetensors weights with their names, and peft's adapter files.

checkpoint.py writes and reads directories with them. Our parameter names are Hugging Face's without "model.". Whatever
would load but compute something else is refused in one line.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from groundup.errors import UserError, listed, naming
from groundup.files.untrusted import check_regular, is_name, read_json
from groundup.train import computation
from groundup.train.lora import LoRAConfig, add_lora, lora_config_of, weight_shapes
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip
# Settings of those architectures beside the sizes, with the only value that model.py computes. Absent or null means it.
FIXED = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False,
    "partial_rotary_factor": 1.0, "quantization_config": None,
}  # fmt: skip
SIZES = {  # fields of ModelConfig, by their names in config.json
    "vocab_size": "vocab_size", "max_position_embeddings": "block_size", "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head", "num_key_value_heads": "n_kv_head", "hidden_size": "n_embd",
    "head_dim": "head_dim", "intermediate_size": "ffn_dim", "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
}  # fmt: skip
OPTIONAL = ("num_key_value_heads", "head_dim", "initializer_range")  # model.py derives them in the same way
# What is known of families whose weights would load, or nearly: it stands in the line that refuses them.
DIFFERS = {
    "gemma": "scaled embeddings, norms of 1 + weight and GELU", "gemma2": "norms after each sub-layer and soft caps",
    "gemma3_text": "norms after each sub-layer and sliding windows", "mixtral": "experts", "qwen2_moe": "experts",
    "qwen3_moe": "experts", "deepseek_v3": "experts and latent attention", "phi3": "query, key and value in one matrix",
    "olmo2": "norms after each sub-layer", "gpt2": "learned positions and LayerNorm", "smollm3": "layers without RoPE",
    "gpt_neox": "LayerNorm and parallel sub-layers", "cohere": "LayerNorm and parallel sub-layers",
    "granite": "scaled embeddings, residuals and logits", "gpt_oss": "experts and attention sinks",
}  # fmt: skip
# {rope_type: (keys it needs, keys that it may have)}
ROPES = {
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
MOST_HEADER = 2**24  # bytes of a safetensors header, 100 for each tensor
MOST_LAYERS = 1000
MOST_ANGLES = 2**27  # positions x head_dim in the tables of rotary positions: a million positions of 128
MOST_ELEMENTS = 2**56  # of a matrix: a small multiple of as many bytes as torch can count
DTYPES = ("F32", "F16", "BF16")  # of stored weights, by safetensors' names; float32 holds each exactly

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # peft puts this before Hugging Face's names
# Keys of adapter_config.json that do not change what is computed here, or that the weights' names tell.
NEUTRAL_KEYS = {
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "fan_in_fan_out", "ensure_weight_tying",
    "megatron_core", "runtime_config", "qalora_group_size", "eva_config", "init_lora_weights",
}  # fmt: skip


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# ---- config.json ----------------------------------------------------------------------------------------------------


def to_hf_config(cfg: ModelConfig, tokenizer: Tokenizer, dtype: torch.dtype = torch.float32) -> dict:
    """Return config.json; rotary settings and dtype stand under the names of transformers 5 and of transformers 4."""
    kind, dtype_name = cfg.model_type, str(dtype).removeprefix("torch.")
    config = special_ids(tokenizer) | computation.record(kind) | {"architectures": [ARCHITECTURES[kind]]}
    config |= {"sliding_window": None} if kind == "mistral" else {}  # absent means 4096 to transformers
    config |= {key: getattr(cfg, field) for key, field in SIZES.items()}
    return config | {
        "rope_parameters": {"rope_type": "default"} | (cfg.rope_scaling or {}) | {"rope_theta": cfg.rope_theta},
        "rope_theta": cfg.rope_theta, "rope_scaling": cfg.rope_scaling, "tie_word_embeddings": cfg.tie_embeddings,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
        "dtype": dtype_name, "torch_dtype": dtype_name,
    }  # fmt: skip


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return the ids that begin, end and pad a text; None for one that the tokenizer does not have."""
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eot_id, "pad_token_id": tokenizer.pad_id}
    return {key: i if i >= 0 else None for key, i in ids.items()}


def from_hf_config(path: Path) -> ModelConfig:
    """Return the architecture in a config.json (transformers 4 or 5). Raise UserError for a model whose weights would
    load but mean something else."""
    hf = read_json(path)
    kind = str(hf.get("model_type")).removeprefix(computation.CHANGED)
    if kind not in ARCHITECTURES:
        why = f" ({DIFFERS[kind]})" if kind in DIFFERS else ""
        raise UserError(f"checkpoint: {path}: model_type={kind!r}{why}; supported are {', '.join(ARCHITECTURES)}")
    parameters = hf.get("rope_parameters")
    settings = hf | (parameters if isinstance(parameters, dict) else {})
    for key, only in FIXED.items():
        if settings.get(key) not in (None, only):
            raise UserError(f"checkpoint: {path}: {key}={settings[key]!r}; supported is {only!r}")
    if missing := [key for key in SIZES if key not in hf and key not in OPTIONAL]:
        raise UserError(f"checkpoint: {path} has no {missing[0]!r}")
    for key in SIZES:
        check_number(hf, key, path, whole=key not in ("rms_norm_eps", "initializer_range"))
    window, longest = hf.get("sliding_window", 4096) if kind == "mistral" else None, hf["max_position_embeddings"]
    if window is not None and not (isinstance(window, int) and window >= longest):
        fix = f"to use the first {window} positions, write there max_position_embeddings={window}"
        raise UserError(f"checkpoint: {path}: sliding_window={window}, attention is not windowed here; {fix}")
    theta, scaling = read_rope(hf, path)
    sizes = {field: hf.get(key) or 0 for key, field in SIZES.items()}
    tied = bool(hf.get("tie_word_embeddings"))
    cfg = ModelConfig(
        **sizes, rope_theta=theta, rope_scaling=scaling, qk_norm=kind == "qwen3", qkv_bias=kind == "qwen2",
        model_type=kind, tie_embeddings=tied,
    )  # fmt: skip
    if not computation.is_as_saved(hf):
        why = "this model.py does not compute what these weights were trained for"
        computation.say(f"checkpoint: warning: {path.parent}: {why}")
    if cfg.n_layer > MOST_LAYERS:
        raise UserError(f"checkpoint: {path}: num_hidden_layers={cfg.n_layer}, at most {MOST_LAYERS} are supported")
    rows, columns = sorted((cfg.vocab_size, cfg.n_embd, cfg.ffn_dim, cfg.n_head * cfg.head_dim))[-2:]
    if rows * columns > MOST_ELEMENTS:
        raise UserError(f"checkpoint: {path}: no matrix can have {rows:,} x {columns:,} elements")
    if longest * cfg.head_dim > MOST_ANGLES:
        fix = "write there as many positions as you need"
        raise UserError(f"checkpoint: {path}: max_position_embeddings={longest} is too many for a table; {fix}")
    return cfg


def check_number(values: dict, key: str, path: Path, whole: bool = False) -> None:
    """Raise UserError if a file has something else under `key` than a number, 0 or more, or nothing."""
    value = values.get(key)
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if value is not None and not (right and 0 <= value < math.inf):
        what = "a positive whole number" if whole else "a positive number"
        raise UserError(f"checkpoint: {path}: {key} must be {what}, got {value!r:.80}")


def read_rope(hf: dict, path: Path) -> tuple[float, dict | None]:
    """Return (rope_theta, Llama 3.1's or YaRN's scaling, or None). transformers 5 keeps both in rope_parameters."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {"rope_type": "default"}
    if not isinstance(rope, dict):
        raise UserError(f"checkpoint: {path}: the settings of the rotary positions are {rope!r:.80}, not an object")
    for values in (hf, rope):
        check_number(values, "rope_theta", path)
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type"))  # "type" before transformers 4.43
    if kind == "default":
        return theta, None
    if kind not in [*ROPES]:  # a list: the file may have what no dictionary takes
        raise UserError(f"checkpoint: {path}: rope_type={kind!r}; supported are default, {', '.join(ROPES)}")
    needed, optional = ROPES[kind]
    missing = [key for key in needed if rope.get(key) is None]
    if missing:
        raise UserError(f"checkpoint: {path}: rope_type={kind!r} without {listed(missing)}")
    for key in set(needed + optional) - {"truncate"}:
        check_number(rope, key, path)
    return theta, {"rope_type": kind} | {key: rope[key] for key in needed + optional if rope.get(key) is not None}


# ---- weights --------------------------------------------------------------------------------------------------------


def hf_name(name: str) -> str:
    """Return Hugging Face's name of one of our parameters or modules."""
    return name if name.split(".")[0] == "lm_head" else f"model.{name}"


def save_weights(path: Path, tensors: dict[str, Tensor], **metadata: str) -> None:
    """Write a safetensors file that others may read as the umask says (safetensors 0.8 lets only its owner)."""
    path.touch()
    mode = path.stat().st_mode
    with naming(path):
        save_file(tensors, path, metadata={"format": "pt"} | metadata)
    path.chmod(mode)


class Stored:
    """A tensor in a safetensors file, read by `stored[:]`. The file is mapped only while that result is alive: pages of
    a mapped file stay in the process's memory, beside the copy, until it is closed."""

    def __init__(self, path: Path, name: str, shape: list[int], dtype: str) -> None:
        self.path, self.name, self.shape, self.dtype = path, name, tuple(shape), dtype

    def __getitem__(self, place: Any) -> Tensor:
        with open_safetensors(self.path) as file:
            return file.get_slice(self.name)[place]


def tensors_of(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file by its names. Raise UserError."""
    with open_safetensors(path) as file:
        found = {name: file.get_slice(name) for name in file.keys()}
        return {name: Stored(path, name, one.get_shape(), one.get_dtype()) for name, one in found.items()}


def open_weights(directory: Path) -> dict[str, Stored]:
    """Return the weights by our names, from one file or from the shards that an index names."""
    paths, index = [directory / "model.safetensors"], directory / "model.safetensors.index.json"
    if index.exists() and not paths[0].exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(map(is_name, shards.values())):
            raise UserError(f"checkpoint: {index} is damaged: weight_map must name files of its directory")
        paths = [directory / shard for shard in sorted(set(shards.values()))]
    tensors = {}
    for path in paths:
        tensors |= {name.removeprefix("model."): tensor for name, tensor in tensors_of(path).items()}
    # Conversions of the first Llamas carry this constant, which follows from the configuration.
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file; the caller closes it. Raise UserError if that fails."""
    try:
        check_regular(path)
        with open(path, "rb") as file:
            if (size := int.from_bytes(file.read(8), "little")) > MOST_HEADER:
                raise SafetensorError(f"its header should have {size:,} bytes; at most {MOST_HEADER:,} are read")
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        has_bin = not path.exists() and any(path.parent.glob("*.bin"))
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        why = "a .bin can run code, only safetensors are read" if has_bin else why
        raise UserError(f"checkpoint: cannot read {path}: {why}") from None


def drop_tied_head(tensors: dict[str, Stored], directory: str | Path, trained_as_one: bool = True) -> None:
    """Remove the head that some files of tied models hold beside the embedding. Raise UserError if it differs, or if an
    adapter has only one of them, not `trained_as_one` with the other."""
    head, embedding = tensors.pop("lm_head.weight", None), tensors.get("embed_tokens.weight")
    if head is None:
        apart = embedding is not None and not trained_as_one
    else:
        apart = embedding is None or not torch.equal(head[:], embedding[:])
    if apart:
        raise UserError(f"checkpoint: {directory} ties its embeddings, but lm_head.weight was trained apart from them")


def check_sizes(cfg: ModelConfig, tensors: dict[str, Stored], directory: str | Path) -> None:
    """Raise UserError unless `tensors`, as in check_fit, have the layers and the sizes of `cfg`: compared before a
    model is built, which a damaged config.json could make as large as it likes."""
    shapes = {name: shape for name, shape in weight_shapes(cfg).items() if name != "lm_head.weight"}
    found, made = ({name.split(".")[1] for name in names if name.startswith("layers.")} for names in (tensors, shapes))
    if len(found) != len(made):
        raise UserError(f"checkpoint: the weights in {directory} have {len(found)} layers, its config has {len(made)}")
    check_fit(shapes, {name: tensors[name] for name in shapes if name in tensors}, directory)


def check_fit(shapes: dict[str, tuple[int, ...]], tensors: dict[str, Stored], directory: str | Path) -> None:
    """Raise UserError unless `tensors`, slices of a file in `directory`, are one for each name and shape."""
    problems = [f"{name} is missing" for name in shapes if name not in tensors]
    problems += [f"{name} is unknown" for name in tensors if name not in shapes]
    for name in (name for name in shapes if name in tensors):
        shape, want, dtype = tensors[name].shape, shapes[name], tensors[name].dtype
        if shape != want:
            problems.append(f"{name} has shape {shape} and not {want}")
        elif dtype not in DTYPES:
            problems.append(f"{name} is {dtype} and not one of {', '.join(DTYPES)}")
    if problems:
        raise UserError(f"checkpoint: the weights in {directory} do not fit the model: {listed(problems, 4)}")


# ---- peft's adapters ------------------------------------------------------------------------------------------------


def save_adapter(directory: str | Path, model: Transformer, base: str, **metadata: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors, with all that is trained.

    base: directory of the frozen weights. metadata: of the weights' file. Raise UserError without adapters."""
    cfg, directory = lora_config_of(model), Path(directory)
    if cfg is None:
        raise UserError("lora: the model has no adapters to save")
    tensors = {name: p for name, p in model.named_parameters() if ".lora_" in name or p.requires_grad}
    tied = model.cfg.tie_embeddings and "embed_tokens.weight" in tensors
    if tied:  # peft leaves the head with the base's embedding unless it is named and stored as well
        tensors["lm_head.weight"] = model.embed_tokens.weight.clone()
    stored = {PREFIX + hf_name(name): p.detach().to("cpu", torch.float32).contiguous() for name, p in tensors.items()}
    save_weights(directory / ADAPTER_WEIGHTS, stored, **metadata)
    whole = [name.removesuffix(".weight") for name in tensors if ".lora_" not in name]
    write_json(directory / ADAPTER_CONFIG, {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": cfg.rank, "lora_alpha": int(cfg.alpha) if float(cfg.alpha).is_integer() else cfg.alpha,
        "lora_dropout": cfg.dropout, "target_modules": list(cfg.modules),
        "modules_to_save": [name if name == "embed_tokens" else hf_name(name) for name in whole] or None,
        "ensure_weight_tying": tied, "bias": "none", "fan_in_fan_out": False, "init_lora_weights": True,
    })  # fmt: skip


def read_peft_config(directory: str | Path) -> dict:
    """Return adapter_config.json. Raise UserError for an adapter that is not supported."""
    path = Path(directory) / ADAPTER_CONFIG
    config = read_json(path)
    for key in ("r", "lora_alpha"):
        check_number(config, key, path, whole=key == "r")
    if not isinstance(config.get("base_model_name_or_path"), str | None):
        raise UserError(f"lora: {path}: base_model_name_or_path must be a text")
    if config.get("peft_type") != "LORA":
        raise UserError(f"lora: {path}: peft_type={config.get('peft_type')!r}; supported is 'LORA'")
    begin = config.get("init_lora_weights")  # PiSSA, OLoRA, LoftQ ... change the frozen weights, stored elsewhere
    if not isinstance(begin, bool | None) and begin not in ("gaussian", "eva", "orthogonal"):
        raise UserError(f"lora: {path}: init_lora_weights={begin!r} changes the frozen weights too; not supported")
    for key, value in config.items():
        if key not in NEUTRAL_KEYS and value not in (None, False, "none", [], {}):
            raise UserError(f"lora: {path}: {key}={value!r} is not supported; merge the adapter with peft")
    return config


def stored_shapes(directory: str | Path) -> dict[str, tuple[int, ...]]:
    """Return {our name: shape} of an adapter's tensors."""
    return {name: tensor.shape for name, tensor in open_adapter(directory).items()}


def open_adapter(directory: str | Path) -> dict[str, Stored]:
    """Return an adapter's tensors by our names."""
    return {our_name(key): tensor for key, tensor in tensors_of(Path(directory) / ADAPTER_WEIGHTS).items()}


def our_name(key: str) -> str:
    return key.removeprefix(PREFIX).removeprefix("model.")


@torch.no_grad()
def load_adapter(model: Transformer, directory: str | Path) -> None:
    """Load adapters, and modules that were trained whole, into a model that holds the base's weights.

    Adapters are added if the model has none; otherwise they must be of the same kind. Raise UserError, with nothing
    copied, for what is not supported or does not fit."""
    config, present = read_peft_config(directory), lora_config_of(model)
    tensors = open_adapter(directory)
    # The weights tell which modules have one: peft's target_modules may also be an expression.
    modules = tuple({name.split(".")[-3] for name in tensors if ".lora_A." in name})
    try:
        cfg = LoRAConfig(config["r"], config["lora_alpha"], config.get("lora_dropout", 0.0), modules)
        shapes = weight_shapes(model.cfg, cfg)
    except (KeyError, TypeError, UserError) as error:
        raise UserError(f"lora: {Path(directory) / ADAPTER_CONFIG}: {error}") from None
    if present is not None and replace(present, dropout=cfg.dropout) != cfg:
        raise UserError(f"lora: {directory} has {cfg}; the model has {present}")
    if model.cfg.tie_embeddings:
        drop_tied_head(tensors, directory, bool(config.get("ensure_weight_tying")))
    shapes = {name: shape for name, shape in shapes.items() if ".lora_" in name or name in tensors}
    check_fit(shapes, tensors, directory)
    if present is None:
        add_lora(model, cfg)
    params = dict(model.named_parameters())
    for name, tensor in tensors.items():
        params[name].copy_(tensor[:])
