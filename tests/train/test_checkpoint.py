"""checkpoint.py against transformers (the same logits from the same directory, both ways), against kill -9, full disks,
flipped bytes and hostile pickles made here, and against outcomes worked out by hand."""

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import forks
import numpy
import pytest
import saved
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

import ddp
from configurator import script_of
from groundup.errors import UserError
from groundup.tokens.training import train
from groundup.train import checkpoint, huggingface, lora
from groundup.train.lora import LoRAConfig
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

disable_progress_bar()
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
YARN_DEEPSEEK = YARN | {"mscale": 1.4, "mscale_all_dim": 0.8, "beta_fast": 4, "beta_slow": 0.5, "rope_theta": 100.0}

TOKENIZER = train(["Hello world, 你好世界！ def f(x): return x + 1\n"] * 20, vocab_size=384)
V = TOKENIZER.vocab_size


def tiny(seed: int = 0, **changes: object) -> Transformer:
    """A model of a few thousand parameters, each of them random (norms too, or they would hide a mix-up)."""
    torch.manual_seed(seed)
    cfg = dict(vocab_size=V, block_size=32, n_layer=2, n_head=4, n_kv_head=2, n_embd=16, ffn_dim=24)
    model = Transformer(ModelConfig(**(cfg | changes)))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1.0 if p.ndim == 1 else 0.0, 0.3)
    return model


def save(out_dir: Path, step: int, model: Transformer | None = None, **changes: object) -> Path:
    """saved.save, with what a test does not care about filled in."""
    tokenizer = changes.pop("tokenizer", TOKENIZER)
    return saved.save(out_dir, step, model or tiny(step), tokenizer, **changes)


def weights(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k].view(torch.int32), b[k].view(torch.int32)) for k in a)


def names(directory: Path) -> list[str]:
    """What is in a run or a checkpoint, beside the log and the lock."""
    return sorted(set(os.listdir(directory)) - {".lock", "log.jsonl"})


def train_state(step_dir: Path) -> dict:
    return checkpoint.read_state(step_dir / "train_state.pt")


def error_line(*args: object) -> str:
    """Message of the CheckpointError that args[0](*args[1:]) raises; it must be a single line that says who speaks."""
    with pytest.raises(UserError) as caught:
        args[0](*args[1:])
    assert isinstance(caught.value, UserError)
    text = str(caught.value)
    assert text.startswith("checkpoint: ") and "\n" not in text and len(text) < 600
    return text


@torch.no_grad()
def logits_of(model: torch.nn.Module, length: int = 32) -> torch.Tensor:
    out = model.eval()(torch.randint(V, (2, length), generator=torch.Generator().manual_seed(7)))
    return out if isinstance(out, torch.Tensor) else out.logits


# ---- what transformers makes of a checkpoint ------------------------------------------------------------------------

SHAPES = {
    "tied": {},
    "untied": {"tie_embeddings": False},
    "multi_head": {"n_kv_head": 4},
    "head_dim": {"head_dim": 10, "tie_embeddings": False},  # 4 * 10 is not n_embd
    "theta_eps": {"rope_theta": 500000.0, "norm_eps": 1e-2},
    "llama3_rope": {"rope_scaling": LLAMA3, "rope_theta": 1234.5},
    "qwen3": {"qk_norm": True, "head_dim": 6, "rope_theta": 1e6},
    "qwen3_untied": {"qk_norm": True, "tie_embeddings": False, "norm_eps": 1e-6},
    "qwen2": {"qkv_bias": True, "rope_theta": 1e6},
    "qwen2_yarn": {"qkv_bias": True, "rope_theta": 1e6, "rope_scaling": YARN, "tie_embeddings": False},
    "linear_rope": {"rope_scaling": LINEAR},
    "mistral": {"model_type": "mistral", "tie_embeddings": False, "head_dim": 6},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_computes_our_logits(tmp_path: Path, shape: str) -> None:
    model = tiny(**SHAPES[shape])
    path = save(tmp_path, 1, model)
    theirs, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.config.model_type == shape.partition("_")[0] if shape.startswith(("qwen", "mistral")) else "llama"
    assert theirs.dtype == torch.float32
    torch.testing.assert_close(logits_of(theirs), logits_of(model), rtol=0, atol=1e-5)
    assert theirs.config.rope_parameters["rope_theta"] == model.cfg.rope_theta


@pytest.mark.parametrize("shape", SHAPES)
def test_our_own_model_comes_back_to_the_bit(tmp_path: Path, shape: str) -> None:
    model = tiny(**SHAPES[shape])
    path = save(tmp_path, 1, model)
    assert huggingface.load_config(path) == model.cfg
    again = huggingface.load_model(path)
    assert same(weights(model), weights(again))
    assert torch.equal(logits_of(again), logits_of(model))


def test_weights_are_float32_and_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    model = tiny()
    with torch.no_grad():
        model.norm.weight[0] = 1 + 2**-23  # would not survive bfloat16, float16 or a text
    stored = load_file(save(tmp_path, 1, model) / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.float32}
    assert stored["model.norm.weight"][0].item() == 1 + 2**-23
    assert stored.keys() == {"model." + name for name, _ in model.named_parameters()}
    assert "model.lm_head.weight" not in stored and "lm_head.weight" not in stored


def test_weights_that_are_views_of_one_flat_buffer(tmp_path: Path) -> None:
    """As ddp.py lays them out; safetensors refuses tensors that share memory unless they are disjoint."""
    model = tiny()
    before = weights(model)
    ddp.DDP(model)
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) < len(before)
    assert same(before, weights(huggingface.load_model(save(tmp_path, 1, model))))


TEXTS = [
    "The user asked the system and the assistant.",
    "人工智能是计算机科学的一个分支。《红楼梦》，“好了歌”",
    "emoji: 👩‍👩‍👧‍👦 🇨🇳 ☕️, combining: e\u0301, rare: 𠮷",
    "def f(x):\n\treturn [x**2 for x in range(10)]  # <|endoftext|>? no: a text\r\n",
    bytes(random.Random(0).randbytes(300)).decode("latin-1"),
    "  two  spaces   and\n\n\nlines ",
]


def test_transformers_gives_our_ids(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    theirs, ours = AutoTokenizer.from_pretrained(path), Tokenizer.load(path)
    assert ours.fingerprint() == TOKENIZER.fingerprint()
    for text in TEXTS:
        expected = theirs(text, split_special_tokens=True)["input_ids"]
        assert TOKENIZER.encode(text) == ours.encode(text) == expected
        assert theirs.decode(expected) == text


def test_generation_stops_at_the_end_of_a_text_and_of_a_turn(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    generation, config, theirs = (
        kind.from_pretrained(path) for kind in (GenerationConfig, AutoConfig, AutoTokenizer)
    )  # fmt: skip
    end, pad, turn = theirs.convert_tokens_to_ids(["<|endoftext|>", "<|pad|>", "<|im_end|>"])
    assert generation.eos_token_id == [end, turn]
    assert (generation.bos_token_id, generation.pad_token_id) == (end, pad)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (end, end, pad)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (end, end, pad)


def test_the_sources_initializer_range_stays(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    values = json.loads((path / "config.json").read_bytes())
    assert values["initializer_range"] == 0.02
    (path / "config.json").write_text(json.dumps(values | {"initializer_range": 0.041}), encoding="utf-8")
    huggingface.write_model(tmp_path / "again", huggingface.load_model(path), TOKENIZER)
    assert AutoConfig.from_pretrained(tmp_path / "again").initializer_range == 0.041


def test_tokens_that_a_tokenizer_does_not_have_are_null(tmp_path: Path) -> None:
    bare = Tokenizer(TOKENIZER.files)
    bare.pad_id = bare.im_start_id = bare.im_end_id = bare.turn_end_id = -1
    bare.stop_ids = frozenset({bare.eot_id})
    path = save(tmp_path, 1, tokenizer=bare)
    config = AutoConfig.from_pretrained(path)
    assert config.pad_token_id is None and config.eos_token_id == bare.eot_id
    assert GenerationConfig.from_pretrained(path).eos_token_id == [bare.eot_id]
    AutoModelForCausalLM.from_pretrained(path)


# ---- Hugging Face directories of others -----------------------------------------------------------------------------


def hf_llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**(sizes | changes)))
    return shake(model)


def hf_qwen3(seed: int = 0, **changes: object) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, head_dim=6,
        num_key_value_heads=2, max_position_embeddings=32, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    return shake(Qwen3ForCausalLM(Qwen3Config(**(sizes | changes))))


@torch.no_grad()
def shake(model: torch.nn.Module) -> torch.nn.Module:
    for p in model.parameters():
        p.normal_(1.0 if p.ndim == 1 else 0.0, 0.3)
    return model


def hf_qwen2(seed: int = 0, **changes: object) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return shake(Qwen2ForCausalLM(Qwen2Config(**(sizes | changes))))


def hf_mistral(**changes: object) -> MistralForCausalLM:
    sizes = hf_qwen2().config.to_dict() | {"architectures": None, "model_type": "mistral", "head_dim": 6}
    return shake(MistralForCausalLM(MistralConfig(**(sizes | changes))))


FOREIGN = {
    "qwen2": hf_qwen2,
    "qwen2_tied": lambda: hf_qwen2(tie_word_embeddings=True, eos_token_id=[3, 5]),
    "qwen2_yarn": lambda: hf_qwen2(rope_parameters=YARN | {"rope_theta": 1e6}),
    "yarn_mscale": lambda: hf_llama(rope_parameters=YARN_DEEPSEEK),
    "yarn_factor": lambda: hf_qwen3(rope_parameters=YARN | {"rope_theta": 1e4, "attention_factor": 1.7}),
    "mistral": lambda: hf_mistral(sliding_window=None),
    "mistral_window": lambda: hf_mistral(sliding_window=32),
    "llama_untied": lambda: hf_llama(),
    "llama_tied": lambda: hf_llama(tie_word_embeddings=True),
    "llama_multi_head": lambda: hf_llama(num_key_value_heads=4, rms_norm_eps=1e-3),
    "llama_head_dim": lambda: hf_llama(head_dim=10),
    "llama_theta": lambda: hf_llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "llama3_rope": lambda: hf_llama(rope_parameters=LLAMA3 | {"rope_theta": 5e5}),
    "linear_rope": lambda: hf_llama(rope_parameters=LINEAR | {"rope_theta": 1e4}),
    "qwen3_untied": lambda: hf_qwen3(),
    "qwen3_tied": lambda: hf_qwen3(tie_word_embeddings=True),
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("shard", ["10GB", "3KB"])
def test_load_model_computes_their_logits(tmp_path: Path, kind: str, shard: str) -> None:
    theirs = FOREIGN[kind]()
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "3KB")
    ours = huggingface.load_model(checkpoint.resolve(tmp_path))
    torch.testing.assert_close(logits_of(ours), logits_of(theirs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("stale", ["first", "last"])
def test_of_a_tensor_in_two_shards_the_index_decides(tmp_path: Path, stale: str) -> None:
    """Models are published whose index takes new tensors from one file and the rest from the old files."""
    theirs = hf_llama()
    theirs.save_pretrained(tmp_path, max_shard_size="3KB")
    shards = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    files = sorted(set(shards.values()))
    old, right = (files[0], files[-1]) if stale == "first" else (files[-1], files[0])
    name = next(name for name, file in shards.items() if file == right)
    value = load_file(tmp_path / right)[name]
    save_file(load_file(tmp_path / old) | {name: torch.randn_like(value)}, tmp_path / old)
    torch.testing.assert_close(logits_of(huggingface.load_model(tmp_path)), logits_of(theirs), rtol=0, atol=1e-5)
    # Without the index nobody knows which of the two is meant.
    (tmp_path / "model.safetensors.index.json").unlink()
    line = error_line(huggingface.load_model, tmp_path)
    assert all(word in line for word in (name, old, right, "remove"))


def test_shards_are_found_without_their_index(tmp_path: Path) -> None:
    theirs = hf_llama()
    theirs.save_pretrained(tmp_path, max_shard_size="3KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "._model-00001-of-00002.safetensors").write_bytes(b"of a Mac")
    ours = huggingface.load_model(tmp_path)
    torch.testing.assert_close(logits_of(ours), logits_of(theirs), rtol=0, atol=1e-5)
    next(tmp_path.glob("model-00001-*")).unlink()
    assert "is missing" in error_line(huggingface.load_model, tmp_path)


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_was_opened_is_saved_as_the_same_family(tmp_path: Path, kind: str) -> None:
    theirs = FOREIGN[kind]()
    theirs.save_pretrained(tmp_path / "theirs")
    path = save(tmp_path / "ours", 1, huggingface.load_model(tmp_path / "theirs"))
    again = AutoModelForCausalLM.from_pretrained(path)
    assert type(again) is type(theirs) and again.config.model_type == theirs.config.model_type
    torch.testing.assert_close(logits_of(again), logits_of(theirs), rtol=0, atol=1e-6)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="lists mapped files through /proc")
def test_no_weights_file_stays_mapped(tmp_path: Path) -> None:
    """Its pages would count as this process's memory, beside the copies of the weights."""

    def is_mapped() -> bool:
        return str(tmp_path) in Path("/proc/self/maps").read_text(encoding="utf-8")

    hf_llama().save_pretrained(tmp_path)
    stored = huggingface.open_weights(tmp_path)["embed_tokens.weight"]
    assert not is_mapped()
    value = stored[:]
    assert is_mapped() and value.shape == stored.shape
    del value
    assert not is_mapped()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_widened(tmp_path: Path, dtype: torch.dtype) -> None:
    hf_llama().to(dtype).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = huggingface.load_model(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert torch.equal(ours.norm.weight, theirs.model.norm.weight)
    torch.testing.assert_close(logits_of(ours), logits_of(theirs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama_theta", "llama3_rope", "linear_rope", "qwen3_untied", "qwen2_yarn", "mistral"])
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_config_in_the_words_of_transformers_4(tmp_path: Path, kind: str, type_key: str) -> None:
    theirs = FOREIGN[kind]()
    theirs.save_pretrained(tmp_path)
    expected = huggingface.load_config(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    scaling = {type_key: rope.pop("rope_type")} | rope
    config["rope_scaling"] = scaling if "factor" in scaling else None
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert huggingface.load_config(tmp_path) == expected
    torch.testing.assert_close(logits_of(huggingface.load_model(tmp_path)), logits_of(theirs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("scaling", [YARN, LLAMA3])
def test_the_context_before_scaling_is_that_of_the_config_unless_said(tmp_path: Path, scaling: dict) -> None:
    hf_llama(rope_parameters=scaling | {"rope_theta": 1e4}).save_pretrained(tmp_path)
    before = huggingface.load_config(tmp_path)
    rest = {key: value for key, value in scaling.items() if key != "original_max_position_embeddings"}
    edit_config(tmp_path, rope_parameters=rest | {"rope_theta": 1e4})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert huggingface.load_config(tmp_path) != before
    torch.testing.assert_close(logits_of(huggingface.load_model(tmp_path)), logits_of(theirs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("scaling", [YARN, LLAMA3, LINEAR])
@pytest.mark.parametrize("beside", ["absent", 4])
@pytest.mark.parametrize("within", ["absent", 8])
@pytest.mark.parametrize("words", ["rope_parameters", "rope_scaling"])
def test_the_context_before_scaling_may_stand_beside_the_other_settings(
    tmp_path: Path, scaling: dict, beside: object, within: object, words: str
) -> None:
    """Phi-3's place for it, which transformers 5 asks first; a config of another family may have it there too."""
    key = "original_max_position_embeddings"
    hf_llama(rope_parameters=scaling | {"rope_theta": 1e4}).save_pretrained(tmp_path)
    rope = {name: value for name, value in (scaling | {key: within}).items() if value != "absent"}
    places = {"rope_parameters": "absent", "rope_theta": 1e4, key: beside}
    edit_config(tmp_path, **places | {words: rope | {"rope_theta": 1e4}})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits_of(huggingface.load_model(tmp_path)), logits_of(theirs), rtol=0, atol=1e-5)


def test_settings_of_rotary_positions_that_are_not_read_are_named(tmp_path: Path, capsys) -> None:
    """DeepSeek-R1-0528-Qwen3-8B has attn_factor, which transformers passes over too."""
    hf_llama(rope_parameters=YARN | {"rope_theta": 1e4}).save_pretrained(tmp_path)
    expected = huggingface.load_config(tmp_path)
    assert "warning" not in capsys.readouterr().err
    edit_config(tmp_path, rope_parameters=YARN | {"rope_theta": 1e4, "attn_factor": 0.8782488562869419})
    assert huggingface.load_config(tmp_path) == expected
    warning = f"warning: {tmp_path / 'config.json'}: rotary positions are computed without attn_factor"
    assert warning in capsys.readouterr().err


def test_config_is_written_in_the_words_of_both(tmp_path: Path) -> None:
    """transformers 4 looks at the first three and nothing else; other readers know only the words of transformers 5."""
    path = save(tmp_path, 1, tiny(rope_theta=500000.0, rope_scaling=LLAMA3))
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    assert (config["rope_theta"], config["rope_scaling"], config["torch_dtype"]) == (500000.0, LLAMA3, "float32")
    assert (config["rope_parameters"], config["dtype"]) == (LLAMA3 | {"rope_theta": 500000.0}, "float32")


def test_a_longer_or_shorter_block(tmp_path: Path) -> None:
    path = save(tmp_path, 1, tiny())
    longer = huggingface.load_model(path, block_size=48)
    assert longer.cfg.block_size == 48
    theirs = AutoModelForCausalLM.from_pretrained(path, max_position_embeddings=48)
    torch.testing.assert_close(logits_of(longer, length=48), logits_of(theirs, length=48), rtol=0, atol=1e-5)


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}), encoding="utf-8")


@pytest.mark.parametrize("change", [
    {"head_dim": "absent"}, {"hidden_act": "swish"}, {"rope_parameters": {"rope_theta": 1e6}},
])  # fmt: skip
def test_config_that_leaves_out_what_transformers_knows(tmp_path: Path, change: dict) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    theirs = Qwen3Config(num_hidden_layers=1, vocab_size=64, max_position_embeddings=32, rope_parameters=rope, **sizes)
    theirs.save_pretrained(tmp_path)
    before = huggingface.load_config(tmp_path)
    edit_config(tmp_path, **change)
    assert huggingface.load_config(tmp_path) == before and before.head_dim == 128
    assert AutoConfig.from_pretrained(tmp_path).head_dim == 128


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gemma2"}, ("gemma2", "llama, mistral, qwen2, qwen3")),
        ({"model_type": "mistral", "sliding_window": 31}, ("sliding_window=31", "max_position_embeddings=31")),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, ("sliding_window=4096",)),
        ({"model_type": "absent"}, ("None", "llama, mistral, qwen2, qwen3")),
        ({"attention_bias": True}, ("attention_bias=True",)),
        ({"mlp_bias": True}, ("mlp_bias=True",)),
        ({"hidden_act": "gelu"}, ("hidden_act='gelu'", "'silu'")),
        ({"use_sliding_window": True}, ("use_sliding_window=True",)),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "gptq")),
        ({"rope_parameters": {"rope_type": "yarn"}}, ("'yarn'", "factor")),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ("'dynamic'", "llama3")),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}, ("rope_type=None",)),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ("partial_rotary_factor=0.5",)),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ("low_freq_factor", "high_freq_factor")),
        ({"hidden_size": "absent"}, ("'hidden_size'",)),
    ],
)
def test_models_that_we_do_not_build_are_refused(tmp_path: Path, change: dict, words: tuple) -> None:
    hf_llama().save_pretrained(tmp_path)
    huggingface.load_config(tmp_path)
    edit_config(tmp_path, **change)
    text = error_line(huggingface.load_config, tmp_path)
    assert str(tmp_path / "config.json") in text
    for word in words:
        assert word in text


def test_weights_that_do_not_fit_are_named_and_nothing_is_copied(tmp_path: Path) -> None:
    path = save(tmp_path, 1, tiny(1))
    file = path / "model.safetensors"
    good = load_file(file)
    key = "model.layers.0.mlp.up_proj.weight"
    changes = {
        "missing": {k: t for k, t in good.items() if k != key},
        "unknown": good | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(16)},
        "shape (24, 8) and not (24, 16)": good | {key: torch.zeros(24, 8)},
        "I8": good | {key: good[key].to(torch.int8)},
    }
    model = tiny(2)
    before = weights(model)
    for word, changed in changes.items():
        save_file(changed, file)
        text = error_line(huggingface.load_weights, model, path)
        assert word in text and str(path) in text
        assert ("layers.0.self_attn.q_proj.bias" if word == "unknown" else "layers.0.mlp.up_proj.weight") in text
        assert same(before, weights(model))
    save_file(good, file)
    huggingface.load_weights(model, path)
    assert same(weights(tiny(1)), weights(model))


def test_another_architecture_is_a_short_line(tmp_path: Path) -> None:
    path = save(tmp_path, 1, tiny(n_layer=1, n_embd=32))
    text = error_line(huggingface.load_weights, tiny(n_layer=6), path)
    assert "layers.1.input_layernorm.weight is missing" in text and " more" in text


def test_a_tied_model_may_repeat_its_head_but_not_contradict_it(tmp_path: Path) -> None:
    path = save(tmp_path, 1, tiny(1))
    file = path / "model.safetensors"
    good = load_file(file)
    save_file(good | {"lm_head.weight": good["model.embed_tokens.weight"].clone()}, file)
    assert same(weights(tiny(1)), weights(huggingface.load_model(path)))
    save_file(good | {"lm_head.weight": good["model.embed_tokens.weight"] + 1}, file)
    assert "lm_head.weight" in error_line(huggingface.load_model, path)


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    path = save(tmp_path, 1, tiny(1))
    assert "lm_head.weight is missing" in error_line(huggingface.load_weights, tiny(tie_embeddings=False), path)


def test_rotary_constants_of_old_conversions_are_passed_over(tmp_path: Path) -> None:
    path = save(tmp_path, 1, tiny(1))
    file = path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, file)
    assert same(weights(tiny(1)), weights(huggingface.load_model(path)))


def test_names_that_a_wrapper_made_are_shown(tmp_path: Path) -> None:
    path = save(tmp_path, 1, tiny(1))
    (path / "checksums.json").unlink()
    file = path / "model.safetensors"
    save_file({f"_orig_mod.{name}": t for name, t in load_file(file).items()}, file)
    said = error_line(huggingface.load_model, path)
    assert "have 0 layers" in said and "names are like _orig_mod.model." in said


def test_a_directory_with_a_bin_only_is_refused(tmp_path: Path) -> None:
    hf_llama().save_pretrained(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    text = error_line(huggingface.load_model, tmp_path)
    assert "safetensors" in text and ".bin can run code" in text


def test_missing_and_damaged_weight_files_are_named(tmp_path: Path) -> None:
    hf_llama().save_pretrained(tmp_path, max_shard_size="3KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    assert shard.name in error_line(huggingface.load_model, tmp_path)
    shard.unlink()
    assert shard.name in error_line(huggingface.load_model, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]", encoding="utf-8")
    assert "model.safetensors.index.json" in error_line(huggingface.load_model, tmp_path)


# ---- adapters -------------------------------------------------------------------------------------------------------

ADAPTERS = LoRAConfig(rank=4, alpha=6, modules=("q_proj", "v_proj", "down_proj"))
LORA_FILES = ["adapter_config.json", "adapter_model.safetensors", "model_config.json"]


def with_adapters(base: Path, trainable: str = "lora", vocab_size: int = 0) -> Transformer:
    """The model of a directory with everything that is trained changed, as training would."""
    model = huggingface.load_model(base)
    if vocab_size:
        n_known = model.cfg.vocab_size
        model = huggingface.build(Transformer, replace(model.cfg, vocab_size=vocab_size), torch.float32)
        huggingface.load_with_new_rows(model, base, n_known, TOKENIZER)
    lora.set_trainable(model, trainable, ADAPTERS)
    with torch.no_grad():
        for i, p in enumerate(p for p in model.parameters() if p.requires_grad):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.2)
    return model


def merged(model: Transformer) -> dict[str, torch.Tensor]:
    lora.merge_(model)
    return weights(model)


def test_of_a_model_with_adapters_what_is_trained_is_saved(tmp_path: Path) -> None:
    base = save(tmp_path / "base", 1)
    model = with_adapters(base)
    path = save(tmp_path / "run", 3, model, base=base)
    usual = set(names(base)) - {"model.safetensors", "config.json"}
    assert set(names(path)) == usual | set(LORA_FILES)
    assert (path / LORA_FILES[1]).stat().st_mode == (path / LORA_FILES[2]).stat().st_mode
    stored = load_file(path / LORA_FILES[1])
    assert sum(t.numel() for t in stored.values()) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert json.loads((path / LORA_FILES[0]).read_text(encoding="utf-8"))["base_model_name_or_path"] == str(base)
    assert checkpoint.resolve(tmp_path / "run") == path and huggingface.base_of(path) == base
    resumed = huggingface.load_model(base)
    lora.set_trainable(resumed, "lora", ADAPTERS)
    huggingface.load_weights(resumed, path)
    assert same(weights(resumed), weights(model))
    assert train_state(path)["step"] == 3
    plain = tiny(9)
    huggingface.load_weights(plain, path)
    expected = merged(model)
    assert same(weights(plain), expected) and same(weights(huggingface.load_model(path)), expected)


def test_peft_and_transformers_open_a_checkpoint_with_adapters(tmp_path: Path) -> None:
    base = save(tmp_path / "base", 1)
    model = with_adapters(base, "embed,lora")
    path = save(tmp_path / "run", 3, model, base=base)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), path)
    torch.testing.assert_close(logits_of(theirs), logits_of(model), rtol=0, atol=2e-5)
    auto = AutoModelForCausalLM.from_pretrained(path)
    torch.testing.assert_close(logits_of(auto), logits_of(model), rtol=0, atol=2e-5)
    assert AutoTokenizer.from_pretrained(path)("你好")["input_ids"] == TOKENIZER.encode("你好")


def test_trained_parts_without_adapters_are_a_plain_checkpoint(tmp_path: Path) -> None:
    model = tiny(1)
    lora.set_trainable(model, "embed,lm_head", ADAPTERS)
    path = save(tmp_path, 1, model)
    assert "model.safetensors" in names(path) and not set(LORA_FILES) & set(names(path))
    assert same(weights(huggingface.load_model(path)), weights(tiny(1)))


def test_weights_of_a_plain_directory_leave_adapters_alone(tmp_path: Path) -> None:
    base = save(tmp_path, 1, tiny(1))
    model = tiny(2)
    lora.add_lora(model, ADAPTERS)
    before = weights(model)
    huggingface.load_weights(model, base)
    after, plain = weights(model), weights(tiny(1))
    assert all(torch.equal(after[name], before[name]) for name in before if ".lora_" in name)
    assert all(torch.equal(after[name], plain[name]) for name in plain)


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_a_larger_vocabulary_is_saved(tmp_path: Path, tie: bool) -> None:
    trainable = "embed,lm_head,lora"
    hf_llama(tie_word_embeddings=tie).save_pretrained(tmp_path / "base")
    model = with_adapters(tmp_path / "base", trainable, vocab_size=V + 6)
    path = save(tmp_path / "run", 1, model, base=tmp_path / "base")
    assert huggingface.load_config(path).vocab_size == V + 6
    resumed = Transformer(huggingface.load_config(path))
    lora.set_trainable(resumed, trainable, ADAPTERS)
    huggingface.load_weights(resumed, path)
    assert same(weights(resumed), weights(model))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs.resize_token_embeddings(V + 6)
    theirs = PeftModel.from_pretrained(theirs, path)
    torch.testing.assert_close(logits_of(theirs), logits_of(model), rtol=0, atol=2e-5)
    assert same(weights(huggingface.load_model(path)), merged(model))
    file = path / LORA_FILES[1]
    save_file({k: t for k, t in load_file(file).items() if "embed_tokens" not in k}, file)
    with pytest.raises(UserError) as caught:
        huggingface.load_model(path)
    text = str(caught.value)
    assert "embed_tokens.weight has shape" in text or "trained apart" in text


def test_an_adapter_on_an_adapter_is_refused(tmp_path: Path) -> None:
    base = save(tmp_path / "base", 1)
    first = save(tmp_path / "first", 2, with_adapters(base), base=base)
    second = save(tmp_path / "second", 3, with_adapters(first), base=first)
    assert "tools/merge.py" in error_line(checkpoint.resolve, second)


def test_the_frozen_weights_must_be_there_and_the_same(tmp_path: Path) -> None:
    base = save(tmp_path / "base", 1)
    path = save(tmp_path / "run", 2, with_adapters(base), base=base)
    weights_file = base / "model.safetensors"
    good = load_file(weights_file)
    save_file({name: t + 1e-6 * (t.ndim == 2) for name, t in good.items()}, weights_file, {"format": "pt"})
    assert "damaged" in error_line(checkpoint.resolve, path)
    (base / "checksums.json").unlink()  # as of a model from elsewhere
    assert f"{base} are not those that {path}" in error_line(huggingface.load_model, path)
    base.rename(tmp_path / "elsewhere")
    for call in (huggingface.load_model, checkpoint.resolve):
        text = error_line(call, path)
        assert str(path / LORA_FILES[0]) in text and repr(str(base)) in text
    assert "need base" in error_line(lambda: save(tmp_path / "run", 3, with_adapters(tmp_path / "elsewhere")))
    assert names(tmp_path / "run") == ["latest", "step_000002"]


def test_files_beside_the_weights_change_nothing(tmp_path: Path) -> None:
    """Those that desktops and Jupyter write, and copies of one's own."""
    base = save(tmp_path / "base", 1)
    path = save(tmp_path / "run", 2, with_adapters(base), base=base)
    known = huggingface.weights_fingerprint(base), huggingface.model_name(base), weights(huggingface.load_model(path))
    for directory in (base, path):
        for name in [*os.listdir(directory), "tool_use.jinja"]:
            (directory / f"._{name}").write_bytes(b"\0\5\x16\7Mac OS X\xff")
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates" / "._a.jinja").write_bytes(b"\0\xff")
        (directory / ".DS_Store").write_bytes(b"\0\xff")
        (directory / "model-old.safetensors").write_bytes(b"\0\xff")
        shutil.copytree(base, directory / ".ipynb_checkpoints", ignore=lambda *_: [".ipynb_checkpoints"])
    shutil.copytree(tmp_path / "run", tmp_path / ".trash")
    os.utime(tmp_path / ".trash" / path.name / "checksums.json")
    assert checkpoint.resolve(path) == path and checkpoint.newest_run(tmp_path) == tmp_path / "run"
    assert huggingface.weights_fingerprint(base) == known[0] and huggingface.model_name(base) == known[1]
    assert same(weights(huggingface.load_model(path)), known[2])
    assert Tokenizer.load(path).fingerprint() == TOKENIZER.fingerprint()


def test_a_damaged_adapter_is_passed_over(tmp_path: Path) -> None:
    base = save(tmp_path / "base", 1)
    for step in (2, 3):
        save(tmp_path / "run", step, with_adapters(base), base=base)
    flip_byte(tmp_path / "run" / "step_000003" / LORA_FILES[1])
    lines = []
    assert checkpoint.find_latest(tmp_path / "run", lines.append).name == "step_000002"
    assert len(lines) == 1 and LORA_FILES[1] in lines[0]


@pytest.mark.parametrize("grown", [0, 6])
def test_a_directory_of_pefts(tmp_path: Path, grown: int) -> None:
    """It has no config.json and no tokenizer; peft adds the embeddings to the file if their size was changed."""
    base = save(tmp_path / "base", 1, tiny(tie_embeddings=False))
    theirs = AutoModelForCausalLM.from_pretrained(base)
    theirs.resize_token_embeddings(V + grown)
    theirs = get_peft_model(theirs, LoraConfig(r=4, target_modules=["k_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "lora_B" in name:
                p.normal_(0.0, 0.3)
    theirs.save_pretrained(tmp_path / "adapter")
    path = checkpoint.resolve(tmp_path / "adapter")
    assert huggingface.load_config(path).vocab_size == V + grown
    assert huggingface.tokenizer_dir(path) == huggingface.base_of(path) == base
    ours = huggingface.load_model(path, block_size=16)
    torch.testing.assert_close(logits_of(ours, 16), logits_of(theirs, 16), rtol=0, atol=2e-5)


# ---- training state -------------------------------------------------------------------------------------------------


def test_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        "moments": [{"exp_avg": torch.randn(3, 4), "step": torch.tensor(7.0)}, {}],
        "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "of the data": {"data": "语料", "seed": 1337, "weights": (0.7, 0.3)},
        "val_loss": float("inf"),
        "none": None,
    }
    path = save(tmp_path, 3, other=state)
    back = train_state(path)
    assert torch.equal(back["moments"][0]["exp_avg"], state["moments"][0]["exp_avg"])
    assert torch.equal(back["half"].view(torch.int16), state["half"].view(torch.int16))
    assert {k: back[k] for k in ("of the data", "val_loss", "none")} == {
        k: state[k] for k in ("of the data", "val_loss", "none")
    }
    assert torch.equal(checkpoint.read_state(path / "rank_00000.pt")["rng"]["cpu"], torch.get_rng_state())
    for file in ("train_state.pt", "rank_00000.pt"):  # T41: by torch's own loader too
        torch.load(path / file, weights_only=True)


def test_state_that_could_not_be_resumed_is_refused_when_saved(tmp_path: Path) -> None:
    save(tmp_path, 1)
    text = error_line(lambda: save(tmp_path, 2, other={"generator": random.Random(1)}))
    assert "train_state.pt holds random.Random" in text and "earlier checkpoints are intact" in text
    assert "train_state.pt holds" in error_line(lambda: save(tmp_path, 2, other={"loss": numpy.float64(1)}))
    assert names(tmp_path) == ["latest", "step_000001"]


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # torch's remark on pickles that it did not write
@pytest.mark.parametrize("file", ["train_state.pt", "rank_00000.pt"])
@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_a_hostile_pickle_is_not_executed(tmp_path: Path, file: str, form: str) -> None:
    run, marker = tmp_path / "run", tmp_path / "executed"
    good, bad = save(run, 1), save(run, 2)
    if form == "torch":
        torch.save({"step": 2, "x": Hostile(marker)}, bad / file)
    else:
        (bad / file).write_bytes(pickle.dumps({"step": 2, "x": Hostile(marker)}))
    lines = []
    assert checkpoint.find_latest(run, lines.append) == good
    assert len(lines) == 1 and file in lines[0]
    # A careful attacker would have corrected the checksum.
    text = error_line(checkpoint.read_state, bad / file)
    assert str(bad / file) in text and "refused" in text
    assert not marker.exists()
    torch.load(bad / file, weights_only=False) if form == "torch" else pickle.loads((bad / file).read_bytes())
    assert marker.exists()  # so the attack was a real one


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 nothing", b"\x80\x04.", "训练".encode(), pickle.dumps(3)])
def test_rubbish_for_a_state_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = save(tmp_path, 1)
    (path / "train_state.pt").write_bytes(content)
    assert "train_state.pt" in error_line(train_state, path)
    (path / "train_state.pt").unlink()
    assert "train_state.pt: No such file" in error_line(train_state, path)


def test_a_state_that_is_not_a_dict_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    torch.save([1, 2], path / "train_state.pt")
    assert "list, not a dict" in error_line(train_state, path)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks for the mapping in /proc")
def test_the_state_is_mapped_not_held(tmp_path: Path) -> None:
    """Every rank reads the whole state, and keeps its share: as copies, eight ranks would hold it eight times."""
    path = save(tmp_path, 1)
    state = train_state(path)["optimizer"]["w"]
    assert str(path / "train_state.pt") in Path("/proc/self/maps").read_text("utf-8")
    assert state["moments"].tolist() == [1.0] * 3
    shutil.rmtree(path)
    assert state["moments"].add_(1).tolist() == [2.0] * 3  # a change is this process's own


# ---- damage ---------------------------------------------------------------------------------------------------------


def flip_byte(path: Path, position: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[min(int(len(data) * position), len(data) - 1)] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("two") / "run"
    save(run, 1)
    save(run, 2)
    return run


FILES = [
    "checksums.json", "config.json", "generation_config.json", "model.safetensors", "rank_00000.pt", "tokenizer.json",
    "tokenizer_config.json", "train_state.pt",
]  # fmt: skip
DAMAGE = {
    "first byte": lambda path: flip_byte(path, 0.0),
    "some byte": lambda path: flip_byte(path, 0.37),
    "last byte": lambda path: flip_byte(path, 1.0),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "gone": lambda path: path.unlink(),
}


def test_files_of_a_checkpoint(two_steps: Path) -> None:
    assert len({file.stat().st_mode for file in (two_steps / "step_000002").iterdir()}) == 1
    assert names(two_steps / "step_000002") == FILES
    assert names(two_steps) == ["latest", "step_000001", "step_000002"]  # no evaluation: no best


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_the_step_before_is_used(two_steps: Path, tmp_path: Path, file: str, damage: str) -> None:
    run = Path(shutil.copytree(two_steps, tmp_path / "run", symlinks=True))
    DAMAGE[damage](run / "step_000002" / file)
    lines = []
    assert checkpoint.find_latest(run, lines.append) == run / "step_000001"
    assert len(lines) == 1 and "\n" not in lines[0] and str(run / "step_000002") in lines[0]
    if file != "checksums.json":  # where the checksum of a file is damaged, it is that file which does not fit
        assert f"/{file}" in lines[0]
        assert f"/{file}" in error_line(checkpoint.resolve, run / "latest")
    DAMAGE[damage](run / "step_000001" / file)
    assert "all 2 checkpoints" in error_line(checkpoint.find_latest, run, lines.append)
    assert len(lines) == 3


def test_every_byte_of_the_checksums_counts(two_steps: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(two_steps, tmp_path / "run", symlinks=True))
    path = run / "step_000002" / "checksums.json"
    good = path.read_bytes()
    for i in range(len(good)):
        path.write_bytes(good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :])
        assert checkpoint.find_latest(run, lambda line: None).name == "step_000001", f"byte {i} of {good!r}"


def test_the_name_of_a_model_is_its_own_wherever_it_is(tmp_path: Path) -> None:
    first, other = save(tmp_path / "a", 1, tiny(0)), save(tmp_path / "b", 1, tiny(1))
    moved = shutil.copytree(first, tmp_path / "c" / first.name)
    names = [huggingface.model_name(path) for path in (first, moved, other)]
    assert names[0] == names[1] != names[2] and all(name.startswith("step_000001 ") for name in names)
    (first / "config.json").write_text("{}", encoding="utf-8")
    assert names[0] != huggingface.model_name(first)


# ---- find and start --------------------------------------------------------------------------------------------------

DATA = {"seed": 1, "data": ["a"], "stages": [[0, [1.0]]]}


def settings(out_dir: Path, **changes: object) -> dict:
    return saved.CONFIG | {"out_dir": str(out_dir), "max_steps": 9} | changes


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of pretrain.py that has saved step 3."""
    monkeypatch.setattr("sys.argv", ["pretrain.py"])
    out = tmp_path / "out"
    assert find(out) is None
    make_run_dir(settings(out), None)
    save(out, 3, tiny(), config={"max_steps": 9, "init_from": "first"}, other={"data": DATA})
    return out


def find(out: Path, data: dict = DATA, max_steps: int = 0, n_ids: int = 0, **changes: object) -> Path | None:
    cfg = tiny(**{"vocab_size": n_ids} if n_ids else {}).cfg
    config = settings(out, **changes)
    return checkpoint.find(config, cfg, data, max_steps or config["max_steps"])[0]


def make_run_dir(config: dict, path: Path | None, max_steps: int = 9) -> dict:
    state = checkpoint.read_state(path / "train_state.pt") if path else {"step": 0}
    return checkpoint.make_run_dir(config, "/x/pretrain.py", state, max_steps)


def config_error(*args: object, **kwargs: object) -> str:
    with pytest.raises(UserError) as caught:
        find(*args, **kwargs)
    assert str(caught.value).startswith("config: ") and "\n" not in str(caught.value)
    return str(caught.value)


def test_what_resume_allows(tmp_path: Path, begun: Path) -> None:
    assert find(tmp_path / "new") is None and find(begun) == find(begun, resume="must") == begun / "step_000003"
    assert "has no checkpoint" in config_error(tmp_path / "new", resume="must")
    assert "holds a run" in config_error(begun, resume="never")
    assert "needs resume='never'" in config_error(begun, overwrite=True)
    assert find(begun, resume="never", overwrite=True) is None
    assert names(begun) == ["config.py", "latest", "step_000003"]


@pytest.mark.parametrize("name", ["config.py", "README.md"])
def test_a_file_of_ones_own_beside_a_log_is_neither_replaced_nor_deleted(tmp_path: Path, begun: Path, name) -> None:
    mine, flags = tmp_path / "new" / name, {"resume": "never", "overwrite": True}
    mine.parent.mkdir()
    (mine.parent / "log.jsonl").write_text("", encoding="utf-8")
    (begun / name).write_text("mine", encoding="utf-8")
    mine.write_text("mine", encoding="utf-8")
    for out in (mine.parent, begun):
        for changes in ({}, flags) if out != begun else (flags,):
            assert f"{out} holds {name!r}, which no run made" in config_error(out, **changes)
    assert find(begun) == begun / "step_000003"
    make_run_dir(settings(begun), begun / "step_000003")
    assert (begun / name).read_text(encoding="utf-8") == "mine"


def test_a_checkpoint_that_the_user_has_hidden_stays(begun: Path) -> None:
    """Neither a start nor overwrite=True deletes it, unlike what a killed save has left."""
    shutil.copytree(begun / "step_000003", begun / ".step_000003")
    (begun / ".step_000005.tmp").mkdir()
    assert find(begun) == begun / "step_000003"
    changes = {"resume": "never", "overwrite": True}
    assert find(begun, **changes) is None
    make_run_dir(settings(begun, **changes), None)
    assert names(begun) == [".step_000003", "config.py"]


@pytest.mark.parametrize("left", [["log.jsonl"], ["step_000003"], ["latest", "log.jsonl", "step_000003"]])
def test_an_overwrite_that_was_killed_goes_on(begun: Path, left: list[str]) -> None:
    (begun / "log.jsonl").write_text("", encoding="utf-8")
    for path in list(begun.iterdir()):
        if path.name not in left and path.name != ".lock":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    changes = {"resume": "never", "overwrite": True}
    assert find(begun, **changes) is None
    make_run_dir(settings(begun, **changes), None)
    assert names(begun) == ["config.py"]


def test_torchruns_restart_continues_whatever_the_command_says(begun: Path, monkeypatch) -> None:
    """`--resume=never --overwrite=True` must not delete what the run saved before a rank died."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    changes = {"resume": "never", "overwrite": True}
    path = find(begun, **changes)
    assert path == begun / "step_000003"
    make_run_dir(settings(begun, **changes), path)
    assert names(begun) == ["config.py", "latest", "step_000003"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert find(begun, **changes) is None
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.delenv("RANK")  # what another program's torchrun has left is no restart
    assert find(begun, **changes) is None
    make_run_dir(settings(begun, **changes), None)
    assert names(begun) == ["config.py"]


def test_a_step_to_resume_from(begun: Path, monkeypatch) -> None:
    """Later steps go, if the user says so, at a start and not before: a refused start leaves them."""
    for step in (5, 8):
        save(begun, step, tiny(), config={"max_steps": 9}, other={"data": DATA})
    assert "resume_from=4: " in config_error(begun, resume_from=4)
    assert config_error(begun, resume_from=4).endswith("no such checkpoint, only 3, 5, 8")
    assert "deletes step_000008 of" in config_error(begun, resume_from=5)
    assert "leave resume='never' out" in config_error(begun, resume_from=5, resume="never", overwrite=True)
    assert find(begun, resume_from=8) == begun / "step_000008"  # nothing is later
    changes = {"resume_from": 3, "overwrite": True}
    path = find(begun, **changes)
    assert path == begun / "step_000003" and len(checkpoint.step_dirs(begun)) == 3
    (begun / "README.md").write_text("# out: a run of pretrain.py\n\nComplete: step 8 of 8", encoding="utf-8")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # the same command, after an error
    assert find(begun, **changes) == begun / "step_000008"
    make_run_dir(settings(begun, **changes), begun / "step_000008")
    assert len(checkpoint.step_dirs(begun)) == 3
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    make_run_dir(settings(begun, **changes), path)
    assert checkpoint.step_dirs(begun) == [path] and not (begun / "README.md").exists()


def test_a_damaged_step_to_resume_from_is_refused(begun: Path) -> None:
    save(begun, 5, tiny(), config={"max_steps": 9}, other={"data": DATA})
    flip_byte(begun / "step_000003" / "model.safetensors")
    with pytest.raises(UserError, match="step_000003/model.safetensors is damaged"):
        find(begun, resume_from=3, overwrite=True)
    assert find(begun) == begun / "step_000005"


def test_a_run_that_goes_on_keeps_its_warm_up(tmp_path: Path) -> None:
    """A share of a longer run would begin to warm up again."""
    before = {"warmup_steps": 0.05}
    assert checkpoint.warmup_of(before, 100, {"step": 0}) == 5
    state = {"step": 5, "config": before, "warmup_steps": 5}
    assert checkpoint.warmup_of(before, 1000, state) == 5
    assert checkpoint.warmup_of({"warmup_steps": 0.1}, 1000, state) == 100  # the user has changed it


def test_what_a_resume_says(begun: Path, capsys: pytest.CaptureFixture) -> None:
    find(begun, init_from="first")
    assert capsys.readouterr().out == f"continuing {begun}/step_000003 after step 3\n"
    find(begun, init_from="second", resume="must", max_steps=3)
    text = capsys.readouterr().out
    assert "max_steps=3 is reached; without effect: resume 'auto' -> 'must'; init_from='second' has no effect" in text
    assert "train these weights on raise it" in text and text.endswith("from second as it is now\n")
    find(begun, resume="must")
    assert "after step 3; changed: resume 'auto' -> 'must'" in capsys.readouterr().out


def test_a_longer_run_says_how_its_learning_rate_jumps(begun: Path, capsys) -> None:
    rate = {"learning_rate": 1.0, "schedule": "linear", "min_lr": 0.1}
    save(begun, 4, tiny(), config={"max_steps": 4, **rate}, other={"data": DATA})
    find(begun, max_steps=9, **rate)
    assert "learning rate 0.1 -> 0.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": DATA | {"seed": 2}}, "was trained with seed=1 (asked 2); continue with the same"),
        ({"data": DATA | {"data": ["b"]}}, "was trained with another corpus"),
        ({"data": DATA | {"seed": 2, "data": ["b"]}}, "was trained with seed=1 (asked 2); continue with the same"),
        ({"data": DATA | {"pack": True, "data": ["b"]}}, "was trained with pack=None (asked True); continue"),
        ({"data": DATA | {"data": ["b"]}, "n_ids": 640}, "was trained with another corpus"),  # its tokenizer too
        ({"trainable": "embed"}, "was trained with trainable='all', not 'embed'"),
    ],
)
def test_what_would_not_continue_exactly_is_refused(begun: Path, changes: dict, words: str) -> None:
    assert words in config_error(begun, **changes)
    later = DATA | {"data": ["a", "b"], "stages": [[0, [1.0]], [3, [0.5, 0.5]]]}
    assert find(begun, data=later)  # a stage that is still to come


def test_another_architecture_is_refused(begun: Path) -> None:
    with pytest.raises(UserError, match=r"has another architecture: n_layer=2 \(asked 3\); use another out_dir"):
        checkpoint.find(settings(begun), tiny(n_layer=3).cfg, DATA, 9)


def test_a_run_of_another_script_is_called_so(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/x/sft.py"])
    assert f"{begun} is a run of pretrain.py; use another out_dir for sft.py" in config_error(begun)


@pytest.mark.parametrize("name", ["pretrain-zh.py", "pretrain 2.py", "预训练.py", "link-to-it", "p.py"])
def test_a_copy_of_a_script_or_a_link_to_one_continues_its_run(begun: Path, tmp_path: Path, monkeypatch, name) -> None:
    script = tmp_path / "scripts" / name
    script.parent.mkdir()
    is_link = name in ("link-to-it", "p.py")
    if is_link:
        script.symlink_to(tmp_path / "pretrain.py")
    state = checkpoint.read_state(begun / "step_000003" / "train_state.pt")
    checkpoint.make_run_dir(settings(begun), str(script), state, 9)
    assert script_of(begun / "config.py") == ("pretrain.py" if is_link else name)
    for argv in (str(script), f"./scripts/{name}"):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", [argv])
        assert find(begun).name == "step_000003"


def test_the_config_of_a_run_that_was_moved_does_not_begin_another(begun: Path, tmp_path: Path, monkeypatch) -> None:
    moved, config = begun.rename(tmp_path / "moved"), str(tmp_path / "moved" / "config.py")
    checkpoint.LOCKS.clear()  # the run has ended
    monkeypatch.setattr("sys.argv", ["pretrain.py", config])
    assert f"give --out_dir={moved}, else another" in config_error(begun)
    monkeypatch.setattr("sys.argv", ["pretrain.py", config, f"--out_dir={moved}"])
    assert find(moved).name == "step_000003"
    checkpoint.LOCKS.clear()
    (tmp_path / "link").symlink_to(moved)
    monkeypatch.setattr("sys.argv", ["pretrain.py", config])
    assert find(tmp_path / "link").name == "step_000003"
    shutil.copy(config, tmp_path / "config.py")  # as an override file of one's own
    monkeypatch.setattr("sys.argv", ["pretrain.py", str(tmp_path / "config.py")])
    assert find(begun) is None


def test_the_record_is_of_what_a_run_began_with(begun: Path, tmp_path: Path, monkeypatch) -> None:
    path = begun / "step_000003"
    record = begun / "config.py"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first").mkdir()
    config = make_run_dir(settings(begun, init_from="second"), path)
    assert config == settings(begun, init_from="first") and "init_from = 'first'" in record.read_text("utf-8")
    (tmp_path / "first").rename(tmp_path / "moved")
    config = make_run_dir(settings(begun, init_from="moved"), path)
    assert config["init_from"] == "moved"
    before = record.read_text("utf-8")
    make_run_dir(settings(begun, seed=7), path, max_steps=3)
    assert record.read_text("utf-8") == before  # nothing is trained by these settings


def test_two_runs_in_one_directory(begun: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from groundup.train import checkpoint; "
        "checkpoint.lock(Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"
    )
    other = Path(shutil.copytree(begun, begun.with_name("other"), symlinks=True))
    command = [sys.executable, "-c", code, str(other)]
    with forks.Popen(command, stdout=subprocess.PIPE, cwd=Path(ddp.__file__).parent) as process:
        assert process.stdout.readline() == b"locked\n"
        for flags in ({}, {"resume": "never", "overwrite": True}):
            assert f"process {process.pid} on " in config_error(other, **flags)
        process.kill()
    assert find(other) == other / "step_000003"


# ---- which directory is meant ---------------------------------------------------------------------------------------


def test_init_from_names_a_run_a_step_a_link_or_a_model(tmp_path: Path) -> None:
    run = tmp_path / "out" / "run"
    for step, loss in ((1, 1.0), (2, 2.0)):
        save(run, step, val_loss=loss)
    hf_llama().save_pretrained(tmp_path / "hf")
    assert checkpoint.resolve(run) == run / "step_000002"
    assert checkpoint.resolve(str(run / "step_000001")).resolve() == run / "step_000001"
    assert checkpoint.resolve(run / "best").resolve() == run / "step_000001"
    assert checkpoint.resolve(run / "latest").resolve() == run / "step_000002"
    assert checkpoint.resolve(tmp_path / "hf") == tmp_path / "hf"


def test_best_of_a_run_without_an_evaluation_says_so(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    said = error_line(checkpoint.resolve, tmp_path / "run" / "best")
    assert "no checkpoint of this run has been evaluated yet" in said and f"--init_from={tmp_path / 'run'} is" in said
    assert "no such directory" in error_line(checkpoint.resolve, tmp_path / "best")


def test_a_gguf_file_names_its_converter(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert f"python tools/from_gguf.py {tmp_path}/m.gguf DIR" in error_line(checkpoint.resolve, tmp_path / "m.gguf")


def test_init_from_that_names_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("", encoding="utf-8")
    for name in ("Qwen/Qwen3-0.6B", "https://huggingface.co/Qwen/Qwen3-0.6B"):
        said = error_line(checkpoint.resolve, name)
        assert repr(name) in said and "hf download Qwen/Qwen3-0.6B --local-dir" in said
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    assert error_line(checkpoint.resolve, snapshot.parent.parent).endswith(f"; give {snapshot}")
    assert "no such directory" in error_line(checkpoint.resolve, tmp_path / "没有")
    assert f"teacher='{tmp_path}/no': no such" in error_line(lambda: checkpoint.resolve(f"{tmp_path}/no", "teacher"))
    assert "is a file" in error_line(checkpoint.resolve, tmp_path / "file")
    monkeypatch.chdir(tmp_path)
    assert error_line(checkpoint.resolve, "latest").endswith("no such directory; the runs here: none yet")
    save(tmp_path / "out" / "mine", 1)
    save(tmp_path / "out" / "two", 1)
    assert error_line(checkpoint.resolve, "mine").endswith("no such directory; the runs here: out/mine, out/two")
    for word in ("scratch", "resume"):  # as in nanoGPT
        assert "leave init_from out: pretrain.py begins or continues" in error_line(checkpoint.resolve, word)
    said = error_line(checkpoint.resolve, "out/mine,out/two")
    assert "it is one model. To compare two: evaluate.py with --out=A.json for the first" in said
    assert "holds no checkpoint" in error_line(checkpoint.resolve, tmp_path / "empty")
    assert "config.json: No such file" in error_line(huggingface.load_config, tmp_path / "empty")


def test_a_run_without_checkpoints_is_none(tmp_path: Path) -> None:
    assert checkpoint.find_latest(tmp_path / "absent") is None
    (tmp_path / "config.py").write_text("", encoding="utf-8")
    (tmp_path / ".step_000001.tmp").mkdir()  # a first save that was killed
    (tmp_path / "step_notes").mkdir()
    assert checkpoint.find_latest(tmp_path) is None


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (5, 999_999, 1_000_000):
        save(tmp_path, step, keep_last=2)
    assert names(tmp_path) == ["latest", "step_1000000", "step_999999"]
    assert os.readlink(tmp_path / "latest") == checkpoint.find_latest(tmp_path).name == "step_1000000"


def test_newest_run_is_the_one_saved_last(tmp_path: Path) -> None:
    assert "has a checkpoint" in error_line(checkpoint.newest_run, tmp_path / "out")
    for name, step, age in (("b", 5, 30), ("a", 9, 10), ("c", 100, 20)):
        path = save(tmp_path / "out" / name, step, val_loss=1.0)
        then = time.time() - age
        os.utime(path / "checksums.json", (then, then))
    assert checkpoint.newest_run(tmp_path / "out") == tmp_path / "out" / "a"
    path = tmp_path / "out" / "a" / "step_000009" / "config.json"
    path.write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"]}), encoding="utf-8")
    assert checkpoint.newest_run(tmp_path / "out") == tmp_path / "out" / "c"  # a reward model writes no text
    assert checkpoint.newest_run(tmp_path / "out", rewards=True) == tmp_path / "out" / "a"
    adapter = save(tmp_path / "out" / "lora", 7, val_loss=1.0)  # the newest
    (adapter / "config.json").rename(adapter / huggingface.ADAPTED_CONFIG)
    (adapter / huggingface.ADAPTER_CONFIG).write_text("{}", encoding="utf-8")
    assert checkpoint.newest_run(tmp_path / "out") == tmp_path / "out" / "lora"


@pytest.mark.skipif(sys.platform != "linux", reason="needs names that are not UTF-8")
def test_adapters_below_a_folder_that_is_not_utf8_are_refused_at_the_start(tmp_path, monkeypatch):
    """Relative paths work there, but adapters keep the whole path of their base."""
    folder = tmp_path / "a\udcb9b"
    (folder / "base").mkdir(parents=True)
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="the frozen weights are in .*, which is not UTF-8"):
        huggingface.absolute_base(Path("base"))
    monkeypatch.chdir(tmp_path)
    assert huggingface.absolute_base(Path("运行")) == str(tmp_path / "运行")
