"""config.json of Hugging Face: which architecture the weights of a directory belong to.

Read for the four families that model.py computes, and written so that transformers opens it. A
setting that model.py does not compute is refused in one line.
"""

import functools
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from groundup.errors import UserError, listed, say
from groundup.files.untrusted import read_json
from groundup.tokens.text_tokenizer import TextTokenizer
from model import ModelConfig, Transformer

# Other settings, with the values that model.py computes. Absent means the first.
FIXED = {
    "hidden_act": ("silu", "swish"),  # two names of one function
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
}
# Names in config.json of the fields of ModelConfig
SIZES = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "block_size",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "hidden_size": "n_embd",
    "head_dim": "head_dim",
    "intermediate_size": "ffn_dim",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
}
# If these are absent, model.py derives them as transformers does.
OPTIONAL = ("num_key_value_heads", "head_dim", "initializer_range")
FRACTIONS = ("rms_norm_eps", "initializer_range")  # the others are whole numbers
# Keys of rotary positions that a rope_type needs, and those that yarn may have
ROPE_NEEDS = {
    "linear": ["factor"],
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings".split(),
    "yarn": "factor original_max_position_embeddings".split(),
}
YARN_MAY_HAVE = "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate".split()
MAX_ANGLES = 2**27  # positions x head_dim of the rotary tables: a million positions of 128


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def to_hf_config(
    cfg: ModelConfig, tokenizer: TextTokenizer, dtype: torch.dtype = torch.float32
) -> dict:
    """Return the content of config.json, with the names of transformers 5 and of transformers 4."""
    # The tokenizer has -1 for a special token that it lacks.
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eot_id, "pad": tokenizer.pad_id}
    config = {f"{key}_token_id": i if i >= 0 else None for key, i in ids.items()}
    kind, dtype_name = cfg.model_type, str(dtype).removeprefix("torch.")

    # transformers would open the weights of an edited model.py and compute something else.
    if is_plain(cfg):
        config["model_type"] = kind
    else:
        what = f"this model.py computes something else than transformers' {kind}"
        say(f"checkpoint: {what}; only it can open what is saved")
        config |= {"model_type": CHANGED + kind, LOGITS: list(fixed_logits(cfg))}
    config["architectures"] = [f"{kind.capitalize()}ForCausalLM"]  # the class in transformers
    if kind == "mistral":
        config["sliding_window"] = None  # absent means 4096 to transformers
    config |= {key: getattr(cfg, field) for key, field in SIZES.items()}
    rope = {"rope_type": "default"} | (cfg.rope_scaling or {}) | {"rope_theta": cfg.rope_theta}
    return config | {
        "rope_parameters": rope,  # transformers 5
        "rope_theta": cfg.rope_theta,  # transformers 4, as the next line
        "rope_scaling": cfg.rope_scaling,
        "tie_word_embeddings": cfg.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "dtype": dtype_name,  # transformers 5
        "torch_dtype": dtype_name,  # transformers 4
    }


def from_hf_config(path: Path, to_train: bool = False) -> ModelConfig:
    """Return the architecture in a config.json of transformers 4 or 5.

    Raise UserError if this model.py computes something else than the weights were trained for. If
    they are a start to train from, that is only a warning: training adapts them."""
    hf = read_json(path)
    cfg = read_config(hf, path)
    if not is_as_saved(hf, cfg):
        why = f"{path.parent} is of a model.py that computed something else"
        if not to_train:
            raise UserError(f"checkpoint: {why}; put that model.py back (git stash undoes an edit)")
        say(f"checkpoint: warning: {why}; training has to adapt its weights")
    return cfg


def is_edited(directory: Path) -> bool:
    """Return whether a checkpoint says that its model.py was edited."""
    file = directory / "config.json"
    return file.exists() and str(read_json(file).get("model_type")).startswith(CHANGED)


def read_config(hf: dict, path: Path) -> ModelConfig:
    """Return the architecture in the content of a config.json."""
    # Refuse a model whose weights would load but mean something else.
    kind = str(hf.get("model_type")).removeprefix(CHANGED)
    check_settings(hf, kind, path)
    theta, scaling = read_rope(hf, path)
    if kind == "qwen3":  # transformers does not derive it
        hf = hf | {"head_dim": hf.get("head_dim") or 128}
    cfg = ModelConfig(
        **{field: hf.get(key) or 0 for key, field in SIZES.items()},
        rope_theta=theta,
        rope_scaling=scaling,
        qk_norm=kind == "qwen3",
        qkv_bias=kind == "qwen2",
        model_type=kind,
        tie_embeddings=bool(hf.get("tie_word_embeddings")),
    )
    # Building the model fills a table of angles, which a damaged file could make any size.
    if cfg.block_size * cfg.head_dim > MAX_ANGLES:
        what = f"max_position_embeddings={cfg.block_size} is too many for a table"
        raise wrong(path, f"{what}; write there as many positions as you need")
    return cfg


def wrong(path: Path, text: str) -> UserError:
    return UserError(f"checkpoint: {path}: {text}")


def check_settings(hf: dict, kind: str, path: Path) -> None:
    """Raise UserError for a setting that model.py does not compute."""
    if kind not in PLAIN:
        raise wrong(path, f"model_type={kind!r}; supported are {', '.join(PLAIN)}")
    # transformers 5 has partial_rotary_factor among the settings of rotary positions.
    rope = hf.get("rope_parameters")
    settings = hf | (rope if isinstance(rope, dict) else {})
    for key, known in FIXED.items():
        value = settings.get(key)
        if value is not None and value not in known:
            raise wrong(path, f"{key}={value!r:.80}; supported is {known[0]!r}")
    for key in SIZES:
        if key not in hf and key not in OPTIONAL:
            raise wrong(path, f"there is no {key!r}")
        check_number(hf, key, path, whole=key not in FRACTIONS)

    # A window as long as the context hides nothing.
    longest = hf["max_position_embeddings"]
    window = hf.get("sliding_window", 4096) if kind == "mistral" else None
    if window is not None and not (isinstance(window, int) and window >= longest):
        fix = f"write there max_position_embeddings={window} to use the first {window} positions"
        raise wrong(path, f"sliding_window={window}, attention is not windowed here; {fix}")


def check_number(values: dict, key: str, path: Path, whole: bool = False) -> None:
    """Raise UserError unless `key` is a number of at least 0, or absent."""
    value = values.get(key)
    kinds = int if whole else (int, float)
    # bool is an int to Python; an int of 400 digits is no float.
    fits = isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value < 2**63
    if value is not None and not fits:
        what = "a positive whole number" if whole else "a positive number"
        raise wrong(path, f"{key} must be {what}, got {value!r:.80}")


def read_rope(hf: dict, path: Path) -> tuple[float, dict | None]:
    """Return rope_theta and the scaling of positions: linear, Llama 3.1's, YaRN's or None."""
    # transformers 4 has rope_theta beside rope_scaling, transformers 5 both in rope_parameters.
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {"rope_type": "default"}
    if not isinstance(rope, dict):
        raise wrong(path, f"the settings of the rotary positions are {rope!r:.80}, not an object")
    for values in (hf, rope):
        check_number(values, "rope_theta", path)
    theta = float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)

    kind = rope.get("rope_type", rope.get("type"))  # "type" before transformers 4.43
    if kind is None and rope.keys() <= {"rope_theta", "partial_rotary_factor"}:
        kind = "default"
    if kind == "default":
        return theta, None
    if kind not in list(ROPE_NEEDS):  # a list: the file may hold a value that has no hash
        raise wrong(path, f"rope_type={kind!r:.80}; supported are default, {', '.join(ROPE_NEEDS)}")

    # Keep only the keys that model.py computes with.
    keys = ROPE_NEEDS[kind] + (YARN_MAY_HAVE if kind == "yarn" else [])
    known = {*keys, "rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if unread := [key for key in rope if key not in known]:
        what = f"rotary positions are computed without {listed(unread)}"
        say(f"checkpoint: warning: {path}: {what}")
    # The context before scaling may stand outside of them, as in Phi-3, which then comes first. If
    # nothing is said, it is the whole context. transformers 5 does the same.
    key = "original_max_position_embeddings"
    check_number(hf, key, path)
    rope = rope | {key: hf.get(key) or rope.get(key) or hf["max_position_embeddings"]}
    scaling = {key: rope[key] for key in keys if rope.get(key) is not None}
    if missing := [key for key in ROPE_NEEDS[kind] if key not in scaling]:
        raise wrong(path, f"rope_type={kind!r} without {listed(missing)}")
    for key in scaling:
        if key != "truncate":  # a bool
            check_number(rope, key, path)
    return theta, {"rope_type": kind} | scaling


# ---- has model.py been edited? ------------------------------------------------------------------
# config.json says "llama". After an edit of model.py that is untrue, though names and shapes may be
# the same. So a small model whose weights follow from a formula computes eight logits. If they are
# not those of transformers, model_type becomes "changed_llama", which transformers refuses, and the
# logits are stored beside it.

CHANGED = "changed_"
LOGITS = "logits_of_fixed_weights"
TOLERANCE = 0.01  # float32 differs by 1e-6 between machines; GELU instead of SiLU by 0.4
PLAIN = {  # computed by transformers (tests/train/test_computation.py)
    "llama": (-0.9264, 1.0839, 0.9261, 0.9494, 0.5355, 1.012, -0.296, -0.3565),
    "mistral": (-0.9264, 1.0839, 0.9261, 0.9494, 0.5355, 1.012, -0.296, -0.3565),
    "qwen2": (0.5756, 0.9285, 1.5679, -0.4558, -1.1608, -1.748, 0.2694, -0.1584),
    "qwen3": (-0.7444, 1.2757, 0.8959, 0.6177, 0.95, 1.4743, -1.0055, -0.2844),
}
# The small model. A large norm_eps, so that an edit of RMSNorm shows.
SMALL = ModelConfig(
    vocab_size=32,
    block_size=16,
    n_layer=2,
    n_head=4,
    n_kv_head=2,
    n_embd=64,
    head_dim=16,
    ffn_dim=64,
    norm_eps=0.1,
    tie_embeddings=False,
)


def fixed_values(name: str, shape: torch.Size) -> torch.Tensor:
    """Return the values of a parameter, scaled so that a matrix keeps the size of its input."""
    draw = random.Random(name).random  # the same in every version of Python
    values = torch.tensor([draw() for _ in range(shape.numel())]).view(shape) - 0.5
    if len(shape) == 2:
        return values * (12 / shape[1]) ** 0.5  # the variance of a uniform draw is 1/12
    return values if name.endswith(".bias") else values + 1  # weights of norms lie around 1


def fixed_logits(cfg: ModelConfig) -> tuple[float, ...]:
    """Return eight logits that a small model of this kind computes with model.py.

    A field that an edit has added to ModelConfig, such as another activation, is as in `cfg`."""
    known = {*SIZES.values(), "rope_theta", "rope_scaling", "tie_embeddings", "dropout"}
    known |= {"qk_norm", "qkv_bias", "model_type"}  # see below
    added = {key: value for key, value in vars(cfg).items() if key not in known}
    return logits_of(cfg.model_type, tuple(added.items()))


@functools.cache
def logits_of(kind: str, added: tuple[tuple[str, Any], ...]) -> tuple[float, ...]:
    """Compute `fixed_logits`. Random generators are left as they were. added: fields, values."""
    biases = {"qk_norm": kind == "qwen3", "qkv_bias": kind == "qwen2", "model_type": kind}
    cfg = replace(SMALL, **biases, **dict(added))
    no_autocast = torch.autocast("cpu", enabled=False)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), no_autocast, torch.no_grad():
        model = Transformer(cfg).eval()
        for name, p in model.named_parameters():
            p.copy_(fixed_values(name, p.shape))
        # Of 12 tokens, the last position sees all: logits (1, 12, 32) -> every fourth of 32.
        logits = model(torch.arange(12).view(1, 12))[0, -1, ::4]
    return tuple(round(x, 4) for x in logits.tolist())


def is_plain(cfg: ModelConfig) -> bool:
    """Return whether model.py computes what transformers does for a model of this kind."""
    return is_as_saved({}, cfg)


def is_as_saved(hf: Mapping, cfg: ModelConfig) -> bool:
    """Return whether model.py computes what it did when this config.json was written.

    cfg: what `read_config` finds in it."""
    if cfg.model_type not in PLAIN:
        return True  # no model of ours, which read_config refuses
    stored, computed = hf.get(LOGITS, PLAIN[cfg.model_type]), fixed_logits(cfg)
    if not isinstance(stored, list | tuple) or len(stored) != len(computed):
        return False
    pairs = zip(stored, computed, strict=True)
    return all(isinstance(a, float) and abs(a - b) < TOLERANCE for a, b in pairs)
