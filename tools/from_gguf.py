"""A GGUF file, as llama.cpp uses it, into a Hugging Face directory that every script opens as
init_from.

python tools/from_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf out/smol
python tools/from_gguf.py qwen2.5-7b.gguf out/qwen --dtype=bfloat16        # half the size on disk

The package gguf reads the file and dequantizes its weights. Families: llama (with Mistral), qwen2,
qwen3. What the file has beyond them, or a way to split text that is not in PRE_TOKENIZERS, is
refused in one line.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))


from groundup.errors import UserError
from groundup.files.directories import whole_directory
from groundup.tokens import engines
from groundup.tokens.engines import PATTERNS
from groundup.train.config_json import write_json
from groundup.train.huggingface import (
    check_fit,
    drop_tied_head,
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
# {GGUF's name: Hugging Face's}, outside and inside a block
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
DIGITS = {"type": "Digits", "individual_digits": True}
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_by(pattern: str) -> list[dict]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return [split, BYTE_LEVEL | {"use_regex": False}]


# {name in tokenizer.ggml.pre: the steps of tokenizer.json}, for the families above (llama.cpp,
# src/llama-vocab.cpp)
PRE_TOKENIZERS = {
    "gpt-2": [BYTE_LEVEL],
    "smollm": [DIGITS, BYTE_LEVEL],
    "llama-bpe": split_by(PATTERNS["cl100k"]),
    "qwen2": split_by(PATTERNS["qwen"]),
    "tekken": split_by(TEKKEN),
}
SAME_AS = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "smaug-bpe": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
}
# One number for all layers here; GGUF may have one for each
PER_MODEL = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
CONTROL, USER_DEFINED, BYTE = 3, 4, 6  # kinds of tokens (tokenizer.ggml.token_type)
SHARD_BYTES = 4 * 2**30


def read_gguf(path: Path) -> object:
    """Return the gguf.GGUFReader of a file. Raise UserError."""
    try:
        import gguf
    except ImportError:
        raise UserError("from_gguf: this needs a package; pip install gguf==0.19.0") from None
    try:
        return gguf.GGUFReader(path)
    except OSError as error:
        raise UserError(f"from_gguf: cannot read {path}: {error.strerror}") from None
    except (ValueError, IndexError, KeyError) as error:  # no GGUF, or cut short
        raise UserError(
            f"from_gguf: {path} is no whole GGUF file: {str(error).splitlines()[0]}"
        ) from None


def convert(path: Path, out: Path, dtype: torch.dtype) -> int:
    """Write the Hugging Face directory `out` and return the number of parameters. Raise
    UserError.
    """
    reader = read_gguf(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    arch = fields.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UserError(
            f"from_gguf: {path}: architecture {arch!r}; supported are {', '.join(ARCHITECTURES)}"
        )
    if (parts := fields.get("split.count", 1)) > 1:
        what = f"{path} is one of {parts} parts; join them: llama-gguf-split --merge"
        raise UserError(f"from_gguf: {what}")
    try:
        config = model_config(fields, arch, {tensor.name: tensor for tensor in reader.tensors})
        files, ids = tokenizer_files(fields)
    except KeyError as error:
        raise UserError(f"from_gguf: {path} has no {error}") from None
    except UserError as error:
        raise UserError(f"from_gguf: {path}: {error}") from None
    except (IndexError, TypeError, ValueError) as error:
        raise UserError(f"from_gguf: {path}: its fields do not go together: {error}") from None
    try:
        with whole_directory(out) as temp:
            n = write_weights(temp, weights(reader.tensors, arch, config, path), dtype)
            name = str(dtype).removeprefix("torch.")
            write_json(temp / "config.json", config | ids | {"dtype": name, "torch_dtype": name})
            ends = {
                i
                for i in (ids["eos_token_id"], fields.get("tokenizer.ggml.eot_token_id"))
                if i is not None
            }
            write_json(temp / "generation_config.json", ids | {"eos_token_id": sorted(ends)})
            for name, content in files.items():
                (temp / name).write_bytes(content)
            try:
                check_weights(temp)
                Tokenizer.load(temp)  # raises UserError for one that does not work
            except UserError as error:
                raise UserError(f"from_gguf: {path}: {error}") from None
    except OSError as error:
        raise UserError(f"from_gguf: cannot write {out}: {error.strerror}") from None
    return n


def check_weights(directory: Path) -> None:
    """Raise UserError unless a Hugging Face directory has all weights of the model that its
    config.json describes, and no others."""
    cfg, tensors = load_config(directory), open_weights(directory)
    if cfg.tie_embeddings:
        drop_tied_head(tensors, directory)
    with torch.device("meta"):
        params = dict(Transformer(cfg).named_parameters())
    check_fit({name: tuple(p.shape) for name, p in params.items()}, tensors, directory)


# ---- config.json ---------------------------------------------------------------------------------


def model_config(fields: dict, arch: str, tensors: dict) -> dict:
    """Return config.json without the special ids and the dtype. Raise KeyError for a field that is
    missing.
    """
    get = {key.removeprefix(f"{arch}."): value for key, value in fields.items()}
    if several := [key for key in get if key in PER_MODEL and isinstance(get[key], list)]:
        raise UserError(f"{several[0]} differs between its layers; not supported")
    n_head, n_embd = get["attention.head_count"], get["embedding_length"]
    head_dim = get.get("attention.key_length", n_embd // n_head)
    theta = get.get("rope.freq_base", 10000.0)
    if get.get("rope.dimension_count", head_dim) != head_dim:
        raise UserError(
            f"only {get['rope.dimension_count']} of {head_dim} dimensions are rotated; not supported"
        )
    for key in ("expert_count", "attention.sliding_window"):
        if get.get(key):
            raise UserError(f"it has {key}={get[key]}; not supported")
    rows = int(tensors["token_embd.weight"].shape[1])
    return {
        "model_type": arch,
        "architectures": [ARCHITECTURES[arch]],
        "vocab_size": rows,
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
    """Return rope_scaling of config.json. GGUF has YaRN's numbers, but of Llama 3's scaling only
    what it gives: one factor per frequency. Meta's four numbers are found by trying the published
    `factor`.
    """
    kind = get.get("rope.scaling.type", "none")
    if kind == "yarn":
        original = get["rope.scaling.original_context_length"]
        return {
            "rope_type": "yarn",
            "factor": get["rope.scaling.factor"],
            "original_max_position_embeddings": original,
        }
    if kind != "none":
        raise UserError(f"rope scaling {kind!r} is not supported")
    if factors is None:
        return None
    found = np.array(factors.data, np.float32)
    scaling = {
        "rope_type": "llama3",
        "factor": float(found.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    scaling["original_max_position_embeddings"] = 8192
    if not np.allclose(found, rope_factors(scaling, theta, head_dim), rtol=1e-3):
        raise UserError("its rope_freqs are not those of Llama 3's scaling; not supported")
    return scaling


def rope_factors(scaling: dict, theta: float, head_dim: int) -> np.ndarray:
    """Return by what a rope_scaling divides each frequency, (head_dim / 2,)."""
    plain, scaled = (
        rope_frequencies(
            ModelConfig(1, n_head=1, n_embd=head_dim, rope_theta=theta, rope_scaling=one)
        )
        for one in (None, scaling)
    )
    return (plain / scaled).numpy()


# ---- weights -------------------------------------------------------------------------------------


def weights(
    tensors: Iterable, arch: str, config: dict, path: Path
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (Hugging Face's name, float32 array) of each tensor. Raise UserError for one that is
    unknown.
    """
    from gguf.quants import dequantize

    for tensor in tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        name = hf_name(tensor.name)
        if not name:
            raise UserError(
                f"from_gguf: {path} has a tensor {tensor.name!r}, which model.py does not compute"
            )
        try:
            array = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UserError(f"from_gguf: {path}: {tensor.name}: {error}") from None
        if arch == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            array = interleaved(array, heads, inverse=True)
        yield name, array


def hf_name(name: str) -> str:
    """Return Hugging Face's name of a tensor, "" if it has none."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{INSIDE[part]}.{kind}" if part in INSIDE else ""
    return f"{OUTSIDE[stem]}.{kind}" if stem in OUTSIDE else ""


def interleaved(array: np.ndarray, n_head: int, inverse: bool = False) -> np.ndarray:
    """Reorder the rows of Llama's q and k: its GGUF rotates neighbours, transformers the halves of
    each head.
    """
    shape = array.shape
    split = (
        (n_head, shape[0] // n_head // 2, 2) if inverse else (n_head, 2, shape[0] // n_head // 2)
    )
    return array.reshape(*split, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_weights(
    directory: Path, named: Iterable[tuple[str, np.ndarray]], dtype: torch.dtype
) -> int:
    """Write model.safetensors, or shards of SHARD_BYTES with an index; return the number of
    parameters.
    """
    shard, shards, size, n = {}, [], 0, 0

    def flush() -> None:
        path = directory / f"model-{len(shards) + 1:05d}.safetensors"
        save_weights(path, shard)
        shards.append((path, list(shard)))
        shard.clear()

    for name, array in named:
        tensor = torch.from_numpy(np.array(array, np.float32)).to(dtype)
        if shard and size + tensor.nbytes > SHARD_BYTES:
            flush()
            size = 0
        shard[name] = tensor
        size, n = size + tensor.nbytes, n + tensor.numel()
    flush()
    if len(shards) == 1:
        shards[0][0].rename(directory / "model.safetensors")
    else:
        weight_map = {name: path.name for path, names in shards for name in names}
        write_json(
            directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map}
        )
    return n


# ---- the tokenizer -------------------------------------------------------------------------------


def tokenizer_files(fields: dict) -> tuple[dict[str, bytes], dict[str, int | None]]:
    """Return ({file name: content}, {"bos_token_id", "eos_token_id", "pad_token_id"})."""
    get = {
        key.removeprefix("tokenizer."): value
        for key, value in fields.items()
        if key.startswith("tokenizer.")
    }
    tokens, kinds = get["ggml.tokens"], get.get("ggml.token_type") or [1] * len(get["ggml.tokens"])
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {name: get.get(f"ggml.{key}_token_id") for name, key in names.items()}
    config = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    begins = get.get("ggml.add_bos_token", get["ggml.model"] == "llama")
    config |= {
        "add_bos_token": begins,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    if "chat_template" in get:
        config["chat_template"] = get["chat_template"]
    special = {
        i: token
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == CONTROL
    }
    ids = {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad")}
    if get["ggml.model"] == "gpt2":
        words = {
            i: token
            for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == USER_DEFINED
        }
        first = tokens[ids["bos_token_id"]] if begins and ids["bos_token_id"] is not None else ""
        description = byte_level_bpe(
            tokens, get["ggml.merges"], special, words, get.get("ggml.pre"), first
        )
        files = {"tokenizer.json": engines.to_json(description)}
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    elif get["ggml.model"] == "llama":
        prefix = get.get("ggml.add_space_prefix", True)
        files = {"tokenizer.model": sentencepiece_model(tokens, get["ggml.scores"], kinds, prefix)}
        config |= {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_prefix_space": prefix}
        config["added_tokens_decoder"] = {
            str(i): engines.added_token(token) for i, token in special.items()
        }
    else:
        raise UserError(
            f"its tokenizer is {get['ggml.model']!r}; supported are gpt2 (byte-level BPE) and llama"
        )
    return files | {"tokenizer_config.json": engines.to_json(config)}, ids


def byte_level_bpe(
    tokens: list[str],
    merges: list[str],
    special: dict[int, str],
    words: dict[int, str],
    pre: str | None,
    first: str,
) -> dict:
    """Return tokenizer.json. first: the token that begins every text, "" for none."""
    pre = SAME_AS.get(pre, pre)
    if pre not in PRE_TOKENIZERS:
        raise UserError(f"it splits text as {pre!r}; supported are {', '.join(PRE_TOKENIZERS)}")
    steps = PRE_TOKENIZERS[pre]
    added = [engines.added_token(token, i) for i, token in special.items()]
    added += [engines.added_token(token, i) | {"special": False} for i, token in words.items()]
    begin = [{"SpecialToken": {"id": first, "type_id": 0}}] if first else []
    single = [*begin, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    known = {first: {"id": first, "ids": [tokens.index(first)], "tokens": [first]}} if first else {}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": steps[0]
        if len(steps) == 1
        else {"type": "Sequence", "pretokenizers": steps},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": pair,
            "special_tokens": known,
        },
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",  # as llama.cpp has it
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def sentencepiece_model(
    tokens: list[str], scores: list[float], kinds: list[int], prefix: bool
) -> bytes:
    """Return tokenizer.model: pieces with their scores and kinds, which GGUF numbers as
    sentencepiece does.
    """
    try:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
    except ImportError:
        raise UserError(
            "a sentencepiece tokenizer needs a package; pip install protobuf==7.36.2"
        ) from None
    model = ModelProto()
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        model.pieces.add(piece=token, score=score, type=kind)
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = 2, BYTE in kinds  # 2 = BPE
    model.trainer_spec.vocab_size = len(tokens)
    model.normalizer_spec.name, model.normalizer_spec.add_dummy_prefix = "identity", prefix
    model.normalizer_spec.remove_extra_whitespaces = False
    return model.SerializeToString()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="the .gguf file")
    parser.add_argument("out_dir", type=Path, help="directory to write, new or empty")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights",
    )
    given = parser.parse_args()
    try:
        n_parameters = convert(given.file, given.out_dir, getattr(torch, given.dtype))
    except UserError as error:
        sys.exit(str(error))
    print(f"{given.file}: {n_parameters:,} parameters in {given.dtype}, in {given.out_dir}")
