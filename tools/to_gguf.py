"""A checkpoint of ours, or a Hugging Face directory of its families, into a GGUF file for
llama.cpp.

python tools/to_gguf.py --init_from=out/demo_sft --out=demo.gguf               # matrices in float16
python tools/to_gguf.py --init_from=out/demo_sft --out=demo.gguf --dtype=q8_0  # 8 bits

Beside it comes demo.Modelfile: `ollama create demo -f demo.Modelfile`.

The package gguf writes the file. llama.cpp splits text by rules that it knows by name: a tokenizer
whose pattern is none of PRE_TOKENIZERS (ours are gpt2, cl100k and qwen) is refused. An adapter is
merged first: tools/merge.py.
"""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from from_gguf import (
    BYTE,
    CONTROL,
    PRE_TOKENIZERS,
    USER_DEFINED,
    architecture,
    check_weights,
    gguf_names,
    interleaved,
    n_rotated_heads,
    rope_factors,
)

from configurator import configure
from groundup.errors import UserError, listed, refuse
from groundup.files.paths import check_replaceable
from groundup.files.untrusted import read_json
from groundup.tokens.engines import Unsupported, byte_level_steps, merge_words, split_pattern
from groundup.train import checkpoint, huggingface
from groundup.train.config_json import from_hf_config
from groundup.train.huggingface import open_weights
from model import ModelConfig
from tokenizer import Tokenizer

# ---- config: override with a config file or --key=value; see --help ------------------------------
init_from = ""  # run, checkpoint or Hugging Face directory
out = ""  # the .gguf file to write
dtype = "f16"  # f32 | f16 | bf16 | q8_0 (of the matrices)

NORMAL, UNKNOWN, UNUSED = 1, 2, 5  # kinds of tokens
# What linear scaling and YaRN have in GGUF; other numbers must be the defaults
YARN = ("rope_type", "factor", "original_max_position_embeddings")


def convert(source: Path, path: Path, dtype: str) -> int:
    """Write the GGUF file and its Modelfile; return the number of parameters. Raise UserError."""
    try:
        import gguf
    except ImportError:
        raise UserError("to_gguf: this needs a package; pip install gguf==0.19.0") from None
    if huggingface.is_adapter(source):
        fix = f"python tools/merge.py --init_from={source} --out_dir=DIR"
        raise UserError(f"to_gguf: {source} is an adapter; first: {fix}")
    check_weights(source)
    tokenizer, cfg = Tokenizer.load(source), from_hf_config(source / "config.json")
    if read_json(source / "config.json")["model_type"] != cfg.model_type:
        what = "its model.py computes something else than llama.cpp"
        raise UserError(f"to_gguf: {source}: {what}")
    if tokenizer.vocab_size > cfg.vocab_size:
        sizes = f"its tokenizer has {tokenizer.vocab_size} ids, the model {cfg.vocab_size}"
        raise UserError(f"to_gguf: {source}: {sizes}")
    temp = path.with_name(f".{path.name}.tmp")
    writer = gguf.GGUFWriter(temp, architecture(cfg))
    try:
        add_config(writer, cfg, source)
        add_tokenizer(writer, tokenizer, cfg.vocab_size)
        kind = gguf.GGMLQuantizationType[dtype.upper()]
        n = add_weights(writer, source, cfg, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(temp, path)
        path.with_suffix(".Modelfile").write_text(modelfile(tokenizer, path.name), encoding="utf-8")
    except OSError as error:
        raise UserError(f"to_gguf: cannot write {path}: {error.strerror}") from None
    finally:
        temp.unlink(missing_ok=True)
    return n


def add_config(writer: object, cfg: ModelConfig, source: Path) -> None:
    is_step = checkpoint.STEP_NAME.fullmatch(source.name)
    writer.add_name(source.resolve().parent.name if is_step else source.name)
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
    writer.add_vocab_size(cfg.vocab_size)
    scaling = cfg.rope_scaling or {}
    rope_type = scaling.get("rope_type")
    if rope_type in ("linear", "yarn"):
        from gguf import RopeScalingType

        if more := [key for key in scaling if key not in YARN]:
            what = f"YaRN with {listed(more)} is not supported; only its defaults are"
            raise UserError(f"to_gguf: {source}: {what}")
        writer.add_rope_scaling_type(RopeScalingType(rope_type))
        writer.add_rope_scaling_factor(scaling["factor"])
        if rope_type == "yarn":
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    elif scaling:
        factors = rope_factors(scaling, cfg.rope_theta, cfg.head_dim)
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))


def add_weights(writer: object, source: Path, cfg: ModelConfig, kind: object) -> int:
    """Add the tensors, matrices as `kind`; return the number of parameters."""
    from gguf.quants import QuantError, quantize

    n, tensors = 0, open_weights(source)
    for name, theirs in gguf_names(cfg).items():  # without a head that is tied
        array = tensors[name][:].float().numpy()
        # llama.cpp rotates neighbours, Hugging Face the two halves of a head
        if n_head := n_rotated_heads(theirs, cfg):
            array = interleaved(array, n_head)
        n += array.size
        if array.ndim == 1:
            writer.add_tensor(theirs, array)
            continue
        try:
            rounded = quantize(array, kind)
        except QuantError:  # its blocks do not divide the rows
            what = f"{name} has rows of {array.shape[1]}, which cannot be {kind.name.lower()}"
            raise UserError(f"to_gguf: {what}; give --dtype=f16") from None
        writer.add_tensor(theirs, rounded, raw_dtype=kind)
    return n


def add_tokenizer(writer: object, tokenizer: Tokenizer, n_rows: int) -> None:
    """Add tokens, merges, special ids and chat template.

    Rows of the embedding that have no token get names of their own."""
    if tokenizer.backend == "sentencepiece":
        add_sentencepiece(writer, tokenizer, n_rows)
    else:
        add_byte_level(writer, tokenizer, n_rows)

    end = tokenizer.eot_id
    if "eos_token" in tokenizer.template_source:  # llama.cpp puts this end in its place
        name = tokenizer.config.get("eos_token")
        name = name["content"] if isinstance(name, dict) else name
        end = tokenizer.special_tokens.get(name, end)
    ids = {"bos": tokenizer.bos_id, "eos": end, "pad": tokenizer.pad_id}
    # The file has room for three ids that end an answer.
    more = sorted(tokenizer.stop_ids - {end}, key=lambda i: i != tokenizer.turn_end_id)
    if end < 0 and more:
        ids["eos"] = more.pop(0)
    ids |= zip(("eot", "eom"), more, strict=False)
    if left := [tokenizer.decode([i]) for i in more[2:]]:
        print(f"to_gguf: the file cannot hold more end tokens: {listed(left)}", file=sys.stderr)
    for name, i in ids.items():
        if i >= 0:
            getattr(writer, f"add_{name}_token_id")(i)
    writer.add_add_bos_token(bool(tokenizer.begins))
    if template := tokenizer.template_source:
        # the tags of {% generation %} are transformers' own
        template = re.sub(r"({%-?\s*)generation(\s*-?%})", r"\1if true\2", template)
        template = re.sub(r"({%-?\s*)endgeneration(\s*-?%})", r"\1endif\2", template)
        writer.add_chat_template(template)


def add_byte_level(writer: object, tokenizer: Tokenizer, n_rows: int) -> None:
    description = json.loads(tokenizer.files["tokenizer.json"])
    try:
        pattern, _ = byte_level_steps(description)
    except Unsupported:
        pattern = ""
    known = [name for name, of in PRE_TOKENIZERS.items() if pattern_of(of) == pattern]
    if not known:
        what = "llama.cpp cannot split text as this tokenizer does"
        raise UserError(f"to_gguf: {what}; train one with pattern=qwen")
    words = {i: word for word, i in description["model"]["vocab"].items()}
    kinds = dict.fromkeys(words, NORMAL)
    for token in description["added_tokens"]:
        words[token["id"]] = token["content"]
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(known[0])
    writer.add_token_list([words.get(i, f"[UNUSED{i}]") for i in range(n_rows)])
    writer.add_token_types([kinds.get(i, UNUSED) for i in range(n_rows)])
    writer.add_token_merges([" ".join(merge) for merge in merge_words(description["model"])])


def pattern_of(steps: list[dict]) -> str:
    """Return the regular expression by which the steps of a pre_tokenizer split text."""
    return split_pattern({"type": "Sequence", "pretokenizers": steps})


def add_sentencepiece(writer: object, tokenizer: Tokenizer, n_rows: int) -> None:
    processor = tokenizer.engine.processor
    n_pieces = processor.get_piece_size()
    names = [processor.id_to_piece(i) for i in range(n_pieces)]
    names += [f"[UNUSED{i}]" for i in range(n_pieces, n_rows)]
    kinds = [NORMAL] * n_pieces + [UNUSED] * (n_rows - n_pieces)
    for i in range(n_pieces):
        if processor.is_unknown(i):
            kinds[i] = UNKNOWN
        elif processor.is_byte(i):
            kinds[i] = BYTE
    for name, i in tokenizer.special_tokens.items():
        names[i] = name
    for i in tokenizer.special_ids:
        kinds[i] = CONTROL
    scores = [processor.get_score(i) for i in range(n_pieces)] + [0.0] * (n_rows - n_pieces)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_scores(scores)
    writer.add_add_space_prefix(tokenizer.engine.has_prefix)


CHATML = """{{- range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""


def modelfile(tokenizer: Tokenizer, name: str) -> str:
    """Return Ollama's description of the file: template, default system message and end tokens."""
    lines = [f"FROM ./{name}"]
    system = chatml_system(tokenizer)
    if system is not None:
        lines.append(f'TEMPLATE """{CHATML}"""')
    elif tokenizer.template_source:
        lines.append("# Ollama knows many templates by the one in the file; write others here:")
        lines.append('# TEMPLATE """{{ .System }} {{ .Prompt }}"""')
    if system:
        lines.append(f'SYSTEM """{system}"""')
    lines += [f'PARAMETER stop "{tokenizer.decode([i])}"' for i in sorted(tokenizer.stop_ids)]
    return "\n".join(lines) + "\n"


def chatml_system(tokenizer: Tokenizer) -> str | None:
    """Return the system message of a conversation that has none, "" for no such turn. None if the
    tokenizer does not write conversations as CHATML does."""
    if tokenizer.turn_end_id < 0:
        return None
    turns = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")]
    try:
        written = [
            tokenizer.decode(tokenizer.render(some, add_generation_prompt=True)[0])
            for some in (turns, turns[1:])
        ]
    except UserError:  # a template without system messages, say
        return None
    want = [chatml(turns), chatml(turns[1:])]
    begin, end = "<|im_start|>system\n", "<|im_end|>\n"
    system = written[1].removesuffix(want[1]).removeprefix(begin).removesuffix(end)
    right = written == [want[0], (begin + system + end if system else "") + want[1]]
    return system if right and '"""' not in system + '"' else None


def chatml(turns: list[dict]) -> str:
    texts = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns]
    return "".join(texts) + "<|im_start|>assistant\n"


if __name__ == "__main__":
    config = configure(globals())
    refuse(not init_from or not out, "give --init_from=DIR and --out=FILE.gguf")
    what = "a name that ends in .gguf (the Modelfile is written beside it)"
    refuse(Path(out).suffix != ".gguf", f"{out=} must be {what}")
    check_replaceable(Path(out))
    n_parameters = convert(checkpoint.resolve(init_from), Path(out), dtype)
    print(f"{init_from}: {n_parameters:,} parameters, matrices in {dtype}, in {out}")
