"""tools/to_gguf.py and from_gguf.py against transformers, which reads GGUF too: logits there and back, ids, refusals.

llama.cpp itself is tried by hand (docs/ecosystem.md): it is not on the test machines.
"""

import json
import sys
from pathlib import Path

import forks
import from_gguf
import gguf
import numpy as np
import pytest
import to_gguf
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from groundup.errors import UserError
from groundup.tokens.engines import to_json
from groundup.tokens.training import train
from groundup.train import huggingface
from tokenizer import Tokenizer, with_specials

ROOT = Path(__file__).parents[2]
TEXTS = ["Hello world, it's 12345\n\n\t你好世界！ 春天 def f(x):\n    return x\n"] * 20
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 16,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "yarn": (Qwen2ForCausalLM, Qwen2Config, {"rope_parameters": YARN | {"rope_theta": 1e6}}),
    "linear": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LINEAR | {"rope_theta": 1e4}}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 128}),  # transformers reads no other from GGUF
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(TEXTS, vocab_size=512, pattern="qwen")


def make(kind: str, directory: Path, tokenizer: Tokenizer) -> torch.nn.Module:
    """Write a random model of this kind with `tokenizer`, as transformers does."""
    torch.manual_seed(0)
    model_class, config_class, options = MODELS[kind]
    model = model_class(config_class(vocab_size=tokenizer.vocab_size, **SIZES | options)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(directory)
    tokenizer.save(directory)
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_there_and_back_gives_the_same_weights_and_ids(kind, tmp_path, tokenizer):
    model = make(kind, tmp_path / "hf", tokenizer)
    n = to_gguf.convert(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    assert n == sum(p.numel() for p in model.parameters())
    ids = torch.arange(40).view(1, -1) * 7 % tokenizer.vocab_size
    with torch.no_grad():
        want = model(ids).logits
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
        if kind not in ("llama3", "yarn", "linear"):  # transformers reads no scaling from GGUF
            torch.testing.assert_close(theirs.eval()(ids).logits, want, rtol=1e-5, atol=1e-5)
        from_gguf.convert(tmp_path / "m.gguf", tmp_path / "back", torch.float32)
        with pytest.raises(UserError, match="back' is not empty"):
            from_gguf.convert(tmp_path / "m.gguf", tmp_path / "back", torch.float32)
        torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "back")(ids).logits, want)
        ours = huggingface.load_model(tmp_path / "back").eval()(ids)
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-4)
    back, text = Tokenizer.load(tmp_path / "back"), TEXTS[0] + "<|im_start|>"
    assert back.encode(text) == tokenizer.encode(text)
    assert back.stop_ids == tokenizer.stop_ids and back.pad_id == tokenizer.pad_id
    hf = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert hf.encode(TEXTS[0], add_special_tokens=False) == tokenizer.encode(TEXTS[0])
    talk = [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "Hello"}]
    assert hf.apply_chat_template(talk, tokenize=False) == tokenizer.decode(tokenizer.render(talk)[0])


def test_a_sentencepiece_tokenizer_goes_there_and_back(tmp_path):
    text = (ROOT / "README.zh.md").read_text(encoding="utf-8")
    tokenizer = train([text], vocab_size=1536, backend="sentencepiece")
    make("llama", tmp_path / "hf", tokenizer)
    to_gguf.convert(tmp_path / "hf", tmp_path / "m.gguf", "f16")
    from_gguf.convert(tmp_path / "m.gguf", tmp_path / "back", torch.float32)
    back = Tokenizer.load(tmp_path / "back")
    assert back.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    assert back.special_tokens == tokenizer.special_tokens


@pytest.mark.parametrize("where", ["chat_template.jinja", "named", "config"])
def test_what_the_tokenizer_says_is_in_the_file(where, tmp_path, tokenizer, capsys):
    """A published form: only the post-processor has the begin token, generation_config.json several end tokens."""
    files = with_specials(dict(tokenizer.files), ["<|eot|>", "<|eom|>", "<|more|>"], tokenizer.vocab_size)
    description, config = json.loads(files["tokenizer.json"]), json.loads(files["tokenizer_config.json"])
    begin = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    template += "{%- generation -%}<|eot|>{% endgeneration %}{% endfor %}"
    description["post_processor"] = {
        "type": "TemplateProcessing", "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [tokenizer.eot_id], "tokens": ["<|endoftext|>"]}
        },
    }  # fmt: skip
    config.pop("add_bos_token", None)
    config["chat_template"] = {"config": template, "named": [{"name": "default", "template": template}]}.get(where)
    files |= {"tokenizer.json": to_json(description), "tokenizer_config.json": to_json(config)}
    if where == "chat_template.jinja":
        files[where] = template.encode()
    ids = [Tokenizer(files).special_tokens[name] for name in ("<|eot|>", "<|eom|>", "<|more|>")]
    tuned = Tokenizer(files, json.dumps({"eos_token_id": [tokenizer.eot_id, *ids]}).encode())
    assert tuned.begins and len(tuned.stop_ids) >= 4
    make("llama", tmp_path / "hf", tuned)
    (tmp_path / "hf/generation_config.json").write_bytes(tuned.generation_config)
    to_gguf.convert(tmp_path / "hf", tmp_path / "m.gguf", "f16")
    found = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    assert found["tokenizer.ggml.add_bos_token"] is True and found["tokenizer.ggml.bos_token_id"] == tuned.bos_id
    written = [found[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")]
    assert written[:2] == [tuned.eot_id, tuned.turn_end_id] and set(written) <= tuned.stop_ids
    assert "more end tokens" in capsys.readouterr().err
    assert "for m in" in (written := found["tokenizer.chat_template"]) and "generation" not in written
    lines = (tmp_path / "m.Modelfile").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "FROM ./m.gguf" and 'PARAMETER stop "<|more|>"' in lines
    assert not any(line.startswith("TEMPLATE") for line in lines)


def test_the_end_that_a_template_writes_is_the_files(tmp_path, tokenizer):
    """llama.cpp gives a template the file's end token as eos_token; <|endoftext|> ends texts too."""
    files = with_specials(dict(tokenizer.files), ["</s>"], tokenizer.vocab_size)
    config = json.loads(files["tokenizer_config.json"]) | {"eos_token": {"content": "</s>"}}
    config["chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    tuned = Tokenizer(files | {"tokenizer_config.json": to_json(config)})
    make("mistral", tmp_path / "hf", tuned)
    to_gguf.convert(tmp_path / "hf", tmp_path / "m.gguf", "f16")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.eos_token_id"].contents() == tuned.special_tokens["</s>"] != tuned.eot_id


def test_ollama_gets_the_template_of_our_own_checkpoints(tmp_path, tokenizer):
    make("llama", tmp_path / "hf", tokenizer)
    to_gguf.convert(tmp_path / "hf", tmp_path / "m.gguf", "f16")
    text = (tmp_path / "m.Modelfile").read_text(encoding="utf-8")
    turn, end = to_gguf.CHATML.removeprefix("{{- range .Messages }}").split("{{ end }}")
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好"}]
    said = "".join(turn.replace("{{ .Role }}", m["role"]).replace("{{ .Content }}", m["content"]) for m in talk)
    assert said + end == tokenizer.decode(tokenizer.render(talk, add_generation_prompt=True)[0])
    assert f'TEMPLATE """{to_gguf.CHATML}"""' in text and 'PARAMETER stop "<|im_end|>"' in text


def test_eight_bits_are_what_gguf_makes_of_them(tmp_path, tokenizer):
    model = make("llama", tmp_path / "hf", tokenizer)
    to_gguf.convert(tmp_path / "hf", tmp_path / "m.gguf", "q8_0")
    from_gguf.convert(tmp_path / "m.gguf", tmp_path / "back", torch.bfloat16)
    assert json.loads((tmp_path / "back/config.json").read_text(encoding="utf-8"))["dtype"] == "bfloat16"
    kind = gguf.GGMLQuantizationType.Q8_0
    want = model.lm_head.weight.detach().numpy()
    want = gguf.quants.dequantize(gguf.quants.quantize(want, kind), kind)
    stored = huggingface.load_model(tmp_path / "back").embed_tokens.weight
    torch.testing.assert_close(stored.float(), torch.from_numpy(want).bfloat16().float(), rtol=0, atol=0)


def test_rope_factors_are_those_of_transformers():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=128, rope_parameters=LLAMA3 | {"rope_theta": 500000.0})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / 500000.0 ** (torch.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(from_gguf.rope_factors(LLAMA3, 500000.0, 128), plain / scaled, rtol=1e-5)


def error_of(*command: str | Path) -> str:
    done = forks.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


# Ways to change a tokenizer.json so that llama.cpp, which knows patterns by name, gives other ids
OTHER_WAYS = {
    "lower case": {"normalizer": {"type": "Lowercase"}},
    "NFKC": {"normalizer": {"type": "NFKC"}},
    "replaced": {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "_"}},
    "a space before": {"pre_tokenizer": from_gguf.GPT2 | {"add_prefix_space": True}},
    "groups of digits": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": False}, from_gguf.GPT2,
    ]}},
    "matches removed": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        from_gguf.PRE_TOKENIZERS["qwen2"][0] | {"behavior": "Removed"}, from_gguf.PRE_TOKENIZERS["qwen2"][1],
    ]}},
    "words": {"model": {"type": "WordLevel", "unk_token": "a"}},
}  # fmt: skip


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_refused(way, tmp_path, tokenizer):
    description = json.loads(tokenizer.files["tokenizer.json"])
    change = OTHER_WAYS[way]
    if "model" in change:
        change = {"model": change["model"] | {"vocab": description["model"]["vocab"]}}
    changed = Tokenizer(tokenizer.files | {"tokenizer.json": to_json(description | change)})
    make("llama", tmp_path / "hf", changed)
    with pytest.raises(UserError, match="llama.cpp cannot split text as this tokenizer does"):
        to_gguf.convert(tmp_path / "hf", tmp_path / "m.gguf", "f16")
    assert [one.name for one in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("pattern", ["gpt2", "cl100k", "qwen"])
def test_our_own_patterns_have_names_in_llama_cpp(pattern, tmp_path):
    tokenizer = train(TEXTS, vocab_size=512, pattern=pattern)
    make("llama", tmp_path / "hf", tokenizer)
    to_gguf.convert(tmp_path / "hf", tmp_path / "m.gguf", "f16")
    from_gguf.convert(tmp_path / "m.gguf", tmp_path / "back", torch.float32)
    assert Tokenizer.load(tmp_path / "back").encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


@pytest.mark.parametrize(("name", "ignores"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_whole_chunks_are_taken_before_merges_where_llama_cpp_does(name, ignores):
    get = {"pre": name, "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    assert from_gguf.byte_level_bpe(get, [], "")["model"]["ignore_merges"] is ignores


@pytest.mark.slow
def test_what_cannot_be_converted_is_one_line_and_leaves_nothing(tmp_path, tokenizer):
    make("llama", tmp_path / "hf", train(TEXTS, vocab_size=512, pattern="gpt4"))
    out = f"--out={tmp_path}/m.gguf"
    assert "pattern=qwen" in error_of("tools/to_gguf.py", f"--init_from={tmp_path}/hf", out)
    (tmp_path / "text.gguf").write_text("no GGUF", encoding="utf-8")
    assert "text.gguf" in error_of("tools/from_gguf.py", tmp_path / "text.gguf", tmp_path / "out")
    assert "absent" in error_of("tools/from_gguf.py", tmp_path / "absent.gguf", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "text.gguf"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_string("general.architecture", "gemma3"), "gemma3"),
        (lambda w: w.add_tokenizer_pre("deepseek-llm"), "deepseek-llm"),
        (lambda w: w.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 4, 4), np.float32)), "ffn_gate_exps"),
        # What makes no whole model: a part of a file, other numbers than the tensors have, sizes by layer
        (lambda w: w.add_uint16("split.count", 3), "one of 3 parts; join them"),
        (lambda w: w.add_block_count(5), "m.gguf: .* have 2 layers, its config has 5"),
        (lambda w: w.add_tensor("output_norm.bias", np.zeros(64, np.float32)), "m.gguf: .*'output_norm.bias'"),
        (lambda w: w.add_head_count([4, 4]), "attention.head_count differs between its layers"),
        (lambda w: w.add_feed_forward_length([96, 96]), "feed_forward_length differs between its layers"),
        (lambda w: w.add_sliding_window(16), "attention.sliding_window=16"),
        (lambda w: w.add_eos_token_id(10**6), "fields do not go together"),
        (lambda w: w.add_token_types([1, 1]), "fields do not go together"),
        (lambda w: w.add_token_merges(["a b c"]), "m.gguf: .* damaged"),
    ],
)
def test_what_is_another_family_or_no_whole_model_is_refused_by_name(change, message, tmp_path, tokenizer, monkeypatch):
    make("llama", tmp_path / "hf", tokenizer)
    monkeypatch.setattr(to_gguf, "add_weights", lambda writer, *_: change(writer) or ADD(writer, *_))
    to_gguf.convert(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    with pytest.raises(UserError, match=message):
        from_gguf.convert(tmp_path / "m.gguf", tmp_path / "out", torch.float32)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("change", "dtype", "message"), [
    ({"num_hidden_layers": 3}, "f32", "2 layers, its config has 3"), ({"vocab_size": 999}, "f32", "do not fit"),
    ({}, "q8_0", "rows of 40, which cannot be q8_0; give --dtype=f16"),
])  # fmt: skip
def test_a_checkpoint_that_makes_no_whole_file_leaves_none(change, dtype, message, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setitem(SIZES, "hidden_size", 40)
    make("llama", tmp_path / "hf", tokenizer)
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        to_gguf.convert(tmp_path / "hf", tmp_path / "m.gguf", dtype)
    assert [one.name for one in tmp_path.iterdir()] == ["hf"]


DEFAULT = "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nDEFAULT<|im_end|>\\n' }}{% endif %}"
TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


@pytest.mark.parametrize(
    ("begin", "system"),
    [
        (DEFAULT.replace("DEFAULT", "You are Qwen.\\nBe brief."), "You are Qwen.\nBe brief."),  # as Qwen2.5, SmolLM
        ("", ""),
        (DEFAULT.replace("DEFAULT", 'a \\"\\"\\" b'), None),  # which a Modelfile cannot quote
        (DEFAULT.replace("system\\n", "developer\\n"), None),
        ("{{ 'Hello' }}", None),
    ],
)
def test_the_modelfile_has_the_default_system_message(begin, system, tokenizer):
    """Without it Ollama asks a tuned model something else than it learned to answer."""
    files = dict(tokenizer.files)
    config = json.loads(files["tokenizer_config.json"]) | {"chat_template": begin + TURNS + ASK}
    other = Tokenizer(files | {"tokenizer_config.json": to_json(config)})
    written = to_gguf.modelfile(other, "m.gguf")
    assert ('\nTEMPLATE """{{- range .Messages }}' in written) is (system is not None)
    assert (f'\nSYSTEM """{system}"""\n' in written) is bool(system) and ("SYSTEM" in written) is bool(system)


def test_a_name_that_the_modelfile_would_take_is_refused(tmp_path, tokenizer):
    make("llama", tmp_path / "hf", tokenizer)
    words = error_of("tools/to_gguf.py", f"--init_from={tmp_path}/hf", f"--out={tmp_path}/m.Modelfile")
    assert "ends in .gguf" in words


ADD = to_gguf.add_weights
