"""A GGUF file, as llama.cpp uses it, into a Hugging Face directory that every script opens as
init_from.

python tools/from_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf out/smol
python tools/from_gguf.py qwen2.5-7b.gguf out/qwen --dtype=bfloat16        # half the size on disk

The package gguf reads the file, dequantizes its weights and knows their names. Families: llama
(with Mistral), qwen2, qwen3. What the file has beyond them, or a way to split text that is not in
PRE_TOKENIZERS, is refused in one line.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from groundup.errors import UserError
from groundup.files.directories import whole_directory
from groundup.tokens.engines import PATTERNS, added_token, to_json
from groundup.tokens.training import bpe_description
from groundup.train.config_json import from_hf_config, write_json
from groundup.train.huggingface import (
    check_fit,
    drop_tied_head,
    hf_name,
    load_config,
    open_weights,
    save_weights,
)
from model import ModelConfig, Transformer, rope_frequencies
from tokenizer import Tokenizer

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SUFFIXES = (".weight", ".bias")


def split_by(pattern: str) -> list[dict]:
    """Return the steps of tokenizer.json that split text by a regular expression."""
    return bpe_description((), (), pattern)["pre_tokenizer"]["pretokenizers"]


TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = split_by("")[-1] | {"use_regex": True}  # ByteLevel alone, which splits text, too
DIGITS = {"type": "Digits", "individual_digits": True}
# {name in tokenizer.ggml.pre: the steps of tokenizer.json}, for the families above (llama.cpp,
# src/llama-vocab.cpp)
PRE_TOKENIZERS = {
    "gpt-2": [GPT2],
    "smollm": [DIGITS, GPT2],
    "llama-bpe": split_by(PATTERNS["cl100k"]),
    "qwen2": split_by(PATTERNS["qwen"]),
    "tekken": split_by(TEKKEN),
}
SAME_AS = dict.fromkeys(("llama3", "llama-v3", "smaug-bpe"), "llama-bpe")
SAME_AS["deepseek-r1-qwen"] = "qwen2"
# One number for all layers here; GGUF may have one for each.
PER_MODEL = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
CONTROL, USER_DEFINED, BYTE = 3, 4, 6  # kinds of tokens (tokenizer.ggml.token_type)


def read_gguf(path: Path) -> object:
    """Return the gguf.GGUFReader of a file. Raise UserError."""
    try:
        import gguf
    except ImportError:
        raise UserError("this needs a package; pip install gguf==0.19.0") from None
    try:
        return gguf.GGUFReader(path)
    except OSError as error:
        raise UserError(f"cannot read it: {error.strerror}") from None
    except (ValueError, IndexError, KeyError) as error:  # no GGUF, or cut short
        raise UserError(f"this is no whole GGUF file: {str(error).splitlines()[0]}") from None


def convert(path: Path, out: Path, dtype: torch.dtype) -> int:
    """Write the Hugging Face directory `out` and return the number of parameters. Raise
    UserError.
    """
    try:
        reader = read_gguf(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        config = model_config(fields, tensors)
        files, ids = tokenizer_files(fields)
        with whole_directory(out) as temp:
            name = str(dtype).removeprefix("torch.")
            write_json(temp / "config.json", config | ids | {"dtype": name, "torch_dtype": name})
            for name, content in files.items():
                (temp / name).write_bytes(content)
            Tokenizer.load(temp)  # raises UserError for one that does not work
            arrays = weights(tensors, from_hf_config(temp / "config.json"))
            stored = {name: torch.from_numpy(array).to(dtype) for name, array in arrays}
            save_weights(temp / "model.safetensors", stored)
            check_weights(temp)
    except UserError as error:
        raise UserError(f"from_gguf: {path}: {error}") from None
    except KeyError as error:
        raise UserError(f"from_gguf: {path} has no {error}") from None
    except OSError as error:
        raise UserError(f"from_gguf: cannot write {out}: {error.strerror}") from None
    except (IndexError, TypeError, ValueError) as error:
        raise UserError(f"from_gguf: {path}: its fields do not go together: {error}") from None
    return sum(tensor.numel() for tensor in stored.values())


def check_weights(directory: Path) -> None:
    """Raise UserError unless a Hugging Face directory has all weights of the model that its
    config.json describes, and no others."""
    cfg, tensors = load_config(directory), open_weights(directory)
    if cfg.tie_embeddings:
        drop_tied_head(tensors, directory)
    check_fit({name: tuple(p.shape) for name, p in parameters(cfg).items()}, tensors, directory)


def parameters(cfg: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the parameters of a model by name, without memory."""
    with torch.device("meta"):
        return dict(Transformer(cfg).named_parameters())


# ---- config.json ---------------------------------------------------------------------------------


def model_config(fields: dict, tensors: dict) -> dict:
    """Return what config.json says of the architecture. Raise UserError for one that is not
    supported, or a part of a file; KeyError for a field that is missing.
    """
    arch, n_parts = fields.get("general.architecture"), fields.get("split.count", 1)
    if arch not in ARCHITECTURES:
        raise UserError(f"architecture {arch!r}; supported are {', '.join(ARCHITECTURES)}")
    if n_parts > 1:
        raise UserError(f"it is one of {n_parts} parts; join them: llama-gguf-split --merge")
    get = {key.removeprefix(f"{arch}."): value for key, value in fields.items()}
    if several := [key for key in get if key in PER_MODEL and isinstance(get[key], list)]:
        raise UserError(f"{several[0]} differs between its layers; not supported")
    n_head, n_embd = get["attention.head_count"], get["embedding_length"]
    head_dim = get.get("attention.key_length", n_embd // n_head)
    n_rotated = get.get("rope.dimension_count", head_dim)
    if n_rotated != head_dim:
        raise UserError(f"only {n_rotated} of {head_dim} dimensions are rotated; not supported")
    for key in ("expert_count", "attention.sliding_window"):
        if get.get(key):
            raise UserError(f"it has {key}={get[key]}; not supported")
    theta = get.get("rope.freq_base", 10000.0)
    return {
        "model_type": arch,
        "architectures": [ARCHITECTURES[arch]],
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "max_position_embeddings": get["context_length"],
        "num_hidden_layers": get["block_count"],
        "num_attention_heads": n_head,
        "num_key_value_heads": get.get("attention.head_count_kv", n_head),
        "hidden_size": n_embd,
        "head_dim": head_dim,
        "intermediate_size": get["feed_forward_length"],
        "rms_norm_eps": get["attention.layer_norm_rms_epsilon"],
        "rope_theta": theta,
        "rope_scaling": rope_scaling(get, theta, head_dim, tensors.get("rope_freqs.weight")),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def rope_scaling(get: dict, theta: float, head_dim: int, factors: object) -> dict | None:
    """Return rope_scaling of config.json. GGUF has numbers of others, but of Llama 3's scaling only
    the result: one factor per frequency. Meta's four numbers are found by trying the published
    `factor`.
    """
    kind = get.get("rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": get["rope.scaling.factor"]}
    if kind == "yarn":
        length = get["rope.scaling.original_context_length"]
        scaling = {"rope_type": "yarn", "factor": get["rope.scaling.factor"]}
        return scaling | {"original_max_position_embeddings": length}
    if kind != "none":
        raise UserError(f"rope scaling {kind!r} is not supported")
    if factors is None:
        return None
    found = np.array(factors.data, np.float32)
    scaling = {"rope_type": "llama3", "factor": float(found.max())}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    if not np.allclose(found, rope_factors(scaling, theta, head_dim), rtol=1e-3):
        raise UserError("its rope_freqs are not those of Llama 3's scaling; not supported")
    return scaling


def rope_factors(scaling: dict, theta: float, head_dim: int) -> np.ndarray:
    """Return by what a rope_scaling divides each frequency, (head_dim / 2,)."""
    cfg = ModelConfig(1, n_head=1, n_embd=head_dim, rope_theta=theta)
    scaled = replace(cfg, rope_scaling=scaling)
    return (rope_frequencies(cfg) / rope_frequencies(scaled)).numpy()


# ---- weights -------------------------------------------------------------------------------------


def architecture(cfg: ModelConfig) -> str:
    """Return the name in GGUF: llama.cpp computes Mistral as llama."""
    return "llama" if cfg.model_type == "mistral" else cfg.model_type


def gguf_names(cfg: ModelConfig) -> dict[str, str]:
    """Return {name of a parameter in model.py: its name in GGUF}."""
    import gguf

    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture(cfg).upper()], cfg.n_layer)
    return {name: table.get_name(hf_name(name), SUFFIXES) for name in parameters(cfg)}


def weights(tensors: dict, cfg: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (Hugging Face's name, float32 array) of each tensor. Raise UserError for one that is
    unknown.
    """
    from gguf.quants import dequantize

    # A damaged file may claim any number of layers.
    known = replace(cfg, n_layer=min(cfg.n_layer, len(tensors)))
    ours_of = {theirs: ours for ours, theirs in gguf_names(known).items()}
    for name, tensor in tensors.items():
        if name == "rope_freqs.weight":  # went into config.json
            continue
        if name not in ours_of:
            raise UserError(f"it has a tensor {name!r}, which model.py does not compute")
        try:
            array = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UserError(f"{name}: {error}") from None
        if n_head := n_rotated_heads(name, cfg):
            array = interleaved(array, n_head, inverse=True)
        yield hf_name(ours_of[name]), np.array(array, np.float32)  # a copy: gguf maps the file


def n_rotated_heads(name: str, cfg: ModelConfig) -> int:
    """Return the heads of a tensor whose rows GGUF has in another order, 0 for all others. name:
    GGUF's.
    """
    kind = name.split(".")[-2] if architecture(cfg) == "llama" else ""
    return {"attn_q": cfg.n_head, "attn_k": cfg.n_kv_head}.get(kind, 0)


def interleaved(array: np.ndarray, n_head: int, inverse: bool = False) -> np.ndarray:
    """Reorder the rows of Llama's q and k: its GGUF rotates neighbours, transformers the halves of
    each head.
    """
    n_pairs = len(array) // n_head // 2
    split = (n_head, n_pairs, 2) if inverse else (n_head, 2, n_pairs)
    return array.reshape(*split, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


# ---- the tokenizer -------------------------------------------------------------------------------


def tokenizer_files(fields: dict) -> tuple[dict[str, bytes], dict]:
    """Return ({file name: content}, the special ids for config.json); generation_config.json has
    all ids that end an answer.
    """
    own = "tokenizer.ggml."
    get = {key.removeprefix(own): value for key, value in fields.items() if key.startswith(own)}
    tokens, is_bpe = get["tokens"], get["model"] == "gpt2"
    if not is_bpe and get["model"] != "llama":
        known = "gpt2 (byte-level BPE) and llama"
        raise UserError(f"its tokenizer is {get['model']!r}; supported are {known}")
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {name: get.get(f"{key}_token_id") for name, key in names.items()}
    config = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    config["add_bos_token"] = get.get("add_bos_token", not is_bpe)
    config |= {"add_eos_token": False, "clean_up_tokenization_spaces": False}
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]

    kinds = get.get("token_type") or [1] * len(tokens)
    marked = []  # tokens that are found whole in a text: (id, token, whether it is a special one)
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind in (CONTROL, USER_DEFINED):
            marked.append((i, token, kind == CONTROL))
    if is_bpe:
        first = config.get("bos_token", "") if config["add_bos_token"] else ""
        description = byte_level_bpe(get, marked, first)
        files = {"tokenizer.json": to_json(description)}
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    else:
        prefix = get.get("add_space_prefix", True)
        files = {"tokenizer.model": sentencepiece_model(tokens, get["scores"], kinds, prefix)}
        config |= {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_prefix_space": prefix}
        added = {str(i): added_token(token) for i, token, is_special in marked if is_special}
        config["added_tokens_decoder"] = added
    ends = {ids["eos"], get.get("eot_token_id")} - {None}
    ids = {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad")}
    files["tokenizer_config.json"] = to_json(config)
    files["generation_config.json"] = to_json(ids | {"eos_token_id": sorted(ends)})
    return files, ids


def byte_level_bpe(get: dict, marked: list[tuple[int, str, bool]], first: str) -> dict:
    """Return tokenizer.json. get: the file's fields; first: the token that begins every text, ""
    for none.
    """
    pre = SAME_AS.get(get.get("pre"), get.get("pre"))
    if pre not in PRE_TOKENIZERS:
        raise UserError(f"it splits text as {pre!r}; supported are {', '.join(PRE_TOKENIZERS)}")
    found = bpe_description((), (), "")
    found["pre_tokenizer"]["pretokenizers"] = PRE_TOKENIZERS[pre]
    if pre == "qwen2":
        found["normalizer"] = {"type": "NFC"}
    found["model"] |= {
        "vocab": {token: i for i, token in enumerate(get["tokens"])},
        "merges": [merge.split(" ") for merge in get["merges"]],
        "ignore_merges": pre in ("llama-bpe", "tekken"),  # as llama.cpp has it
    }
    for i, token, is_special in marked:
        found["added_tokens"].append(added_token(token, i) | {"special": is_special})

    single = [{"Sequence": {"id": "A", "type_id": 0}}]
    known = {}
    if first:
        single.insert(0, {"SpecialToken": {"id": first, "type_id": 0}})
        known[first] = {"id": first, "ids": [get["tokens"].index(first)], "tokens": [first]}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": pair}
    return found | {"post_processor": template | {"special_tokens": known}}


def sentencepiece_model(
    tokens: list[str], scores: list[float], kinds: list[int], prefix: bool
) -> bytes:
    """Return tokenizer.model: pieces with their scores and kinds, which GGUF numbers as
    sentencepiece does.
    """
    try:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
    except ImportError:
        what = "a sentencepiece tokenizer needs a package; pip install protobuf==7.36.2"
        raise UserError(what) from None
    model = ModelProto()
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        model.pieces.add(piece=token, score=score, type=kind)
    model.trainer_spec.model_type = 2  # BPE
    model.trainer_spec.byte_fallback = BYTE in kinds
    model.trainer_spec.vocab_size = len(tokens)
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = prefix
    model.normalizer_spec.remove_extra_whitespaces = False
    return model.SerializeToString()


if __name__ == "__main__":
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("file", type=Path, help="the .gguf file")
    parser.add_argument("out_dir", type=Path, help="directory to write, new or empty")
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", default="float32", choices=dtypes, help="of the weights")
    given = parser.parse_args()
    try:
        n_parameters = convert(given.file, given.out_dir, getattr(torch, given.dtype))
    except UserError as error:
        sys.exit(str(error))
    print(f"{given.file}: {n_parameters:,} parameters in {given.dtype}, in {given.out_dir}")
