"""A checkpoint of ours, or a Hugging Face directory of its families, into a GGUF file for llama.cpp
and its kin.

python tools/to_gguf.py out/demo_sft demo.gguf                  # matrices in float16
python tools/to_gguf.py out/demo_sft demo.gguf --dtype=q8_0     # 8 bits and a scale per 32 weights

The package gguf writes the file. llama.cpp splits text by rules that it knows by name: a
tokenizer whose pattern is none of PRE_TOKENIZERS (ours are gpt2, cl100k and qwen) is refused. An
adapter is merged first: tools/merge.py.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from from_gguf import (
    ARCHITECTURES,
    CONTROL,
    INSIDE,
    OUTSIDE,
    PRE_TOKENIZERS,
    USER_DEFINED,
    interleaved,
    rope_factors,
)

from groundup.errors import UserError, listed
from groundup.files.untrusted import read_json
from groundup.tokens.foreign import merge_words
from groundup.train import checkpoint, huggingface
from groundup.train.config_json import from_hf_config
from groundup.train.tensor_files import drop_tied_head, open_weights
from tokenizer import Tokenizer

NORMAL, UNUSED = 1, 5  # kinds of tokens
NAMES = {
    hf.removeprefix("model."): ours for ours, hf in (OUTSIDE | INSIDE).items()
}  # {Hugging Face's name: GGUF's}


def convert(source: Path, path: Path, dtype: str) -> int:
    """Write the GGUF file and return the number of parameters. Raise UserError."""
    try:
        import gguf
    except ImportError:
        raise UserError("to_gguf: this needs a package; pip install gguf==0.19.0") from None
    if huggingface.is_adapter(source):
        fix = f"python tools/merge.py --init_from={source} --out_dir=DIR"
        raise UserError(f"to_gguf: {source} is an adapter; first: {fix}")
    config, tokenizer = (
        read_json(source / "config.json"),
        Tokenizer.load(huggingface.tokenizer_dir(source)),
    )
    arch = config.get("model_type")
    if arch not in ARCHITECTURES:
        raise UserError(
            f"to_gguf: {source}: model_type={arch!r}; supported are {', '.join(ARCHITECTURES)}"
        )
    temp = path.with_name(f".{path.name}.tmp")
    writer = gguf.GGUFWriter(temp, arch)
    try:
        add_config(writer, config, source)
        add_tokenizer(writer, tokenizer, config["vocab_size"])
        n = add_weights(writer, source, config, getattr(gguf.GGMLQuantizationType, dtype.upper()))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(temp, path)
    except OSError as error:
        raise UserError(f"to_gguf: cannot write {path}: {error.strerror}") from None
    finally:
        temp.unlink(missing_ok=True)
    return n


def add_config(writer: object, config: dict, source: Path) -> None:
    cfg = from_hf_config(source / "config.json")
    writer.add_name(
        source.resolve().parent.name if checkpoint.STEP_NAME.fullmatch(source.name) else source.name
    )
    writer.add_context_length(cfg.block_size)
    writer.add_embedding_length(cfg.n_embd)
    writer.add_block_count(cfg.n_layer)
    writer.add_feed_forward_length(cfg.ffn_dim)
    writer.add_head_count(cfg.n_head)
    writer.add_head_count_kv(cfg.n_kv_head)
    writer.add_key_length(cfg.head_dim)
    writer.add_value_length(cfg.head_dim)
    writer.add_rope_dimension_count(cfg.head_dim)
    writer.add_layer_norm_rms_eps(cfg.norm_eps)
    writer.add_rope_freq_base(cfg.rope_theta)
    writer.add_vocab_size(config["vocab_size"])
    scaling = cfg.rope_scaling or {}
    if scaling.get("rope_type") == "yarn":
        from gguf import RopeScalingType

        if more := [
            key
            for key in scaling
            if key not in ("rope_type", "factor", "original_max_position_embeddings")
        ]:
            raise UserError(
                f"to_gguf: {source}: YaRN with {listed(more)} is not supported; only its defaults are"
            )
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    elif scaling:
        factors = rope_factors(scaling, cfg.rope_theta, cfg.head_dim)
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))


def add_weights(writer: object, source: Path, config: dict, kind: object) -> int:
    """Add the tensors, matrices as `kind`; return the number of parameters."""
    from gguf.quants import quantize

    n = 0
    tensors = open_weights(source)
    if config.get("tie_word_embeddings"):
        drop_tied_head(tensors, source)
    for name, tensor in tensors.items():
        array = tensor[:].float().numpy()
        if config["model_type"] == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
            array = interleaved(
                array, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            )
        n += array.size
        if array.ndim == 1:
            writer.add_tensor(gguf_name(name), array)
        else:
            writer.add_tensor(gguf_name(name), quantize(array, kind), raw_dtype=kind)
    return n


def gguf_name(name: str) -> str:
    """Return GGUF's name of a tensor; `name` is Hugging Face's without "model."."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("layers."):
        _, layer, part = stem.split(".", 2)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def add_tokenizer(writer: object, tokenizer: Tokenizer, n_rows: int) -> None:
    """Add tokens, merges and special ids; rows of the embedding that have no token get names of
    their own."""
    config = json.loads(tokenizer.files.get("tokenizer_config.json", b"{}"))
    if tokenizer.backend == "sentencepiece":
        add_sentencepiece(writer, tokenizer, n_rows)
    else:
        description = json.loads(tokenizer.files["tokenizer.json"])
        steps = description["pre_tokenizer"].get("pretokenizers") or [description["pre_tokenizer"]]
        known = [
            name for name, theirs in PRE_TOKENIZERS.items() if split_of(theirs) == split_of(steps)
        ]
        if not known:
            raise UserError(
                "to_gguf: llama.cpp cannot split text as this tokenizer does; train one with pattern=qwen"
            )
        words = {i: word for word, i in description["model"]["vocab"].items()}
        words |= {token["id"]: token["content"] for token in description["added_tokens"]}
        added = {
            token["id"]: CONTROL if token["special"] else USER_DEFINED
            for token in description["added_tokens"]
        }
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(known[0])
        writer.add_token_list([words.get(i, f"[UNUSED{i}]") for i in range(n_rows)])
        writer.add_token_types([
            added.get(i, NORMAL if i in words else UNUSED) for i in range(n_rows)
        ])
        writer.add_token_merges([" ".join(merge) for merge in merge_words(description["model"])])
    ids = {
        "bos": tokenizer.bos_id,
        "eos": tokenizer.eot_id,
        "eot": tokenizer.im_end_id,
        "pad": tokenizer.pad_id,
    }
    for name, i in ids.items():
        if i >= 0:
            getattr(writer, f"add_{name}_token_id")(i)
    writer.add_add_bos_token(bool(config.get("add_bos_token")))
    if template := config.get("chat_template"):
        # the tags of {% generation %} are transformers' own
        writer.add_chat_template(
            template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
        )


def split_of(steps: list[dict]) -> list:
    """Return what decides how the steps of a pre_tokenizer split text."""
    return [(step["type"], step.get("pattern"), step.get("use_regex", True)) for step in steps]


def add_sentencepiece(writer: object, tokenizer: Tokenizer, n_rows: int) -> None:
    processor = tokenizer.engine.processor
    pieces = {i: processor.id_to_piece(i) for i in range(processor.get_piece_size())}
    pieces |= {i: name for name, i in tokenizer.special_tokens.items()}
    special = tokenizer.special_ids

    def kind(i: int) -> int:
        if i >= processor.get_piece_size() or i in special:
            return CONTROL if i in special else UNUSED
        return 2 if processor.is_unknown(i) else 6 if processor.is_byte(i) else NORMAL

    scores = [
        processor.get_score(i) if i < processor.get_piece_size() else 0.0 for i in range(n_rows)
    ]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([pieces.get(i, f"[UNUSED{i}]") for i in range(n_rows)])
    writer.add_token_types([kind(i) for i in range(n_rows)])
    writer.add_token_scores(scores)
    writer.add_add_space_prefix(tokenizer.engine.has_prefix)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("init_from", help="run, checkpoint or Hugging Face directory")
    parser.add_argument("file", type=Path, help="the .gguf file to write")
    parser.add_argument(
        "--dtype", default="f16", choices=("f32", "f16", "bf16", "q8_0"), help="of the matrices"
    )
    given = parser.parse_args()
    try:
        n_parameters = convert(checkpoint.resolve(given.init_from), given.file, given.dtype)
    except UserError as error:
        sys.exit(str(error))
    print(
        f"{given.init_from}: {n_parameters:,} parameters, matrices in {given.dtype}, in {given.file}"
    )
