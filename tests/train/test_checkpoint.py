"""checkpoint.py against transformers (the same logits from the same directory, both ways), against kill -9, full disks,
flipped bytes and hostile pickles made here, and against outcomes worked out by hand."""

import errno
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
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
from groundup.errors import UserError
from groundup.train import checkpoint, huggingface, lora, ranks
from groundup.train.lora import LoRAConfig
from model import ModelConfig, Transformer
from tokenizer import Tokenizer, train

disable_progress_bar()
ALONE = ranks.World(rank=0, local_rank=0, world_size=1)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
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
    """checkpoint.save, with what a test does not care about filled in."""
    arguments = {
        "tokenizer": TOKENIZER,
        "state": {"step": step, "moments": torch.full((3,), float(step))},
        "rank_state": {"rng": torch.get_rng_state()},
        "world": ALONE,
        "val_loss": None,
        "keep_last": 0,
        "keep_best": 0,
    }
    return checkpoint.save(out_dir, step, model or tiny(step), **(arguments | changes))


def weights(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k].view(torch.int32), b[k].view(torch.int32)) for k in a)


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


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
    assert checkpoint.load_config(path) == model.cfg
    again = checkpoint.load_model(path)
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
    assert same(before, weights(checkpoint.load_model(save(tmp_path, 1, model))))


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
    checkpoint.write_model(tmp_path / "again", checkpoint.load_model(path), TOKENIZER)
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
    "qwen3_untied": lambda: hf_qwen3(),
    "qwen3_tied": lambda: hf_qwen3(tie_word_embeddings=True),
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("shard", ["10GB", "3KB"])
def test_load_model_computes_their_logits(tmp_path: Path, kind: str, shard: str) -> None:
    theirs = FOREIGN[kind]()
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "3KB")
    ours = checkpoint.load_model(checkpoint.resolve(tmp_path))
    torch.testing.assert_close(logits_of(ours), logits_of(theirs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_was_opened_is_saved_as_the_same_family(tmp_path: Path, kind: str) -> None:
    theirs = FOREIGN[kind]()
    theirs.save_pretrained(tmp_path / "theirs")
    path = save(tmp_path / "ours", 1, checkpoint.load_model(tmp_path / "theirs"))
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
    ours = checkpoint.load_model(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert torch.equal(ours.norm.weight, theirs.model.norm.weight)
    torch.testing.assert_close(logits_of(ours), logits_of(theirs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama_theta", "llama3_rope", "qwen3_untied", "qwen2_yarn", "mistral"])
@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_config_in_the_words_of_transformers_4(tmp_path: Path, kind: str, type_key: str) -> None:
    theirs = FOREIGN[kind]()
    theirs.save_pretrained(tmp_path)
    expected = checkpoint.load_config(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    scaling = {type_key: rope.pop("rope_type")} | rope
    config["rope_scaling"] = scaling if "factor" in scaling else None
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert checkpoint.load_config(tmp_path) == expected
    torch.testing.assert_close(logits_of(checkpoint.load_model(tmp_path)), logits_of(theirs), rtol=0, atol=1e-5)


def test_config_is_written_in_the_words_of_both(tmp_path: Path) -> None:
    """transformers 4 looks at the first three and nothing else; other readers know only the words of transformers 5."""
    path = save(tmp_path, 1, tiny(rope_theta=500000.0, rope_scaling=LLAMA3))
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    assert (config["rope_theta"], config["rope_scaling"], config["torch_dtype"]) == (500000.0, LLAMA3, "float32")
    assert (config["rope_parameters"], config["dtype"]) == (LLAMA3 | {"rope_theta": 500000.0}, "float32")


def test_a_longer_or_shorter_block_and_dropout(tmp_path: Path) -> None:
    path = save(tmp_path, 1, tiny())
    longer = checkpoint.load_model(path, block_size=48, dropout=0.5)
    assert (longer.cfg.block_size, longer.cfg.dropout) == (48, 0.5)
    theirs = AutoModelForCausalLM.from_pretrained(path, max_position_embeddings=48)
    torch.testing.assert_close(logits_of(longer, length=48), logits_of(theirs, length=48), rtol=0, atol=1e-5)
    assert checkpoint.load_model(path).cfg.dropout == 0.0


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gemma2"}, ("gemma2", "soft caps", "llama, mistral, qwen2, qwen3")),
        ({"model_type": "mistral", "sliding_window": 31}, ("sliding_window=31", "max_position_embeddings=31")),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, ("sliding_window=4096",)),
        ({"model_type": "absent"}, ("None", "llama, mistral, qwen2, qwen3")),
        ({"attention_bias": True}, ("attention_bias=True",)),
        ({"mlp_bias": True}, ("mlp_bias=True",)),
        ({"hidden_act": "gelu"}, ("hidden_act='gelu'", "'silu'")),
        ({"use_sliding_window": True}, ("use_sliding_window=True",)),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "gptq")),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, ("'yarn'", "original_max_position")),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ("'linear'", "llama3")),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ("'dynamic'", "llama3")),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}, ("rope_type=None",)),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ("partial_rotary_factor=0.5",)),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ("low_freq_factor", "high_freq_factor")),
        ({"hidden_size": "absent"}, ("'hidden_size'",)),
    ],
)
def test_models_that_we_do_not_build_are_refused(tmp_path: Path, change: dict, words: tuple) -> None:
    hf_llama().save_pretrained(tmp_path)
    checkpoint.load_config(tmp_path)
    edit_config(tmp_path, **change)
    text = error_line(checkpoint.load_config, tmp_path)
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
        text = error_line(checkpoint.load_weights, model, path)
        assert word in text and str(path) in text
        assert ("layers.0.self_attn.q_proj.bias" if word == "unknown" else "layers.0.mlp.up_proj.weight") in text
        assert same(before, weights(model))
    save_file(good, file)
    checkpoint.load_weights(model, path)
    assert same(weights(tiny(1)), weights(model))


def test_another_architecture_is_a_short_line(tmp_path: Path) -> None:
    path = save(tmp_path, 1, tiny(n_layer=1, n_embd=32))
    text = error_line(checkpoint.load_weights, tiny(n_layer=6), path)
    assert "layers.1.input_layernorm.weight is missing" in text and " more" in text


def test_a_tied_model_may_repeat_its_head_but_not_contradict_it(tmp_path: Path) -> None:
    path = save(tmp_path, 1, tiny(1))
    file = path / "model.safetensors"
    good = load_file(file)
    save_file(good | {"lm_head.weight": good["model.embed_tokens.weight"].clone()}, file)
    assert same(weights(tiny(1)), weights(checkpoint.load_model(path)))
    save_file(good | {"lm_head.weight": good["model.embed_tokens.weight"] + 1}, file)
    assert "lm_head.weight" in error_line(checkpoint.load_model, path)


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    path = save(tmp_path, 1, tiny(1))
    assert "lm_head.weight is missing" in error_line(checkpoint.load_weights, tiny(tie_embeddings=False), path)


def test_rotary_constants_of_old_conversions_are_passed_over(tmp_path: Path) -> None:
    path = save(tmp_path, 1, tiny(1))
    file = path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}, file)
    assert same(weights(tiny(1)), weights(checkpoint.load_model(path)))


def test_a_directory_with_a_bin_only_is_refused(tmp_path: Path) -> None:
    hf_llama().save_pretrained(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    text = error_line(checkpoint.load_model, tmp_path)
    assert "safetensors" in text and ".bin can run code" in text


def test_missing_and_damaged_weight_files_are_named(tmp_path: Path) -> None:
    hf_llama().save_pretrained(tmp_path, max_shard_size="3KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    assert shard.name in error_line(checkpoint.load_model, tmp_path)
    shard.unlink()
    assert shard.name in error_line(checkpoint.load_model, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]", encoding="utf-8")
    assert "model.safetensors.index.json" in error_line(checkpoint.load_model, tmp_path)


# ---- adapters -------------------------------------------------------------------------------------------------------

ADAPTERS = LoRAConfig(rank=4, alpha=6, modules=("q_proj", "v_proj", "down_proj"))
LORA_FILES = ["adapter_config.json", "adapter_model.safetensors", "model_config.json"]


def with_adapters(base: Path, trainable: str = "lora", vocab_size: int = 0) -> Transformer:
    """The model of a directory with everything that is trained changed, as training would."""
    model = checkpoint.load_model(base)
    lora.resize_vocab(model, vocab_size or model.cfg.vocab_size)
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
    assert checkpoint.resolve(tmp_path / "run") == path and checkpoint.base_of(path) == base
    resumed = checkpoint.load_model(base)
    lora.set_trainable(resumed, "lora", ADAPTERS)
    checkpoint.load_weights(resumed, path)
    assert same(weights(resumed), weights(model))
    assert checkpoint.load_train_state(path, 0)[0]["step"] == 3
    plain = tiny(9)
    checkpoint.load_weights(plain, path)
    expected = merged(model)
    assert same(weights(plain), expected) and same(weights(checkpoint.load_model(path)), expected)


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
    assert same(weights(checkpoint.load_model(path)), weights(tiny(1)))


def test_weights_of_a_plain_directory_leave_adapters_alone(tmp_path: Path) -> None:
    base = save(tmp_path, 1, tiny(1))
    model = tiny(2)
    lora.add_lora(model, ADAPTERS)
    before = weights(model)
    checkpoint.load_weights(model, base)
    after, plain = weights(model), weights(tiny(1))
    assert all(torch.equal(after[name], before[name]) for name in before if ".lora_" in name)
    assert all(torch.equal(after[name], plain[name]) for name in plain)


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_a_larger_vocabulary_is_saved(tmp_path: Path, tie: bool) -> None:
    trainable = "embed,lm_head,lora"
    hf_llama(tie_word_embeddings=tie).save_pretrained(tmp_path / "base")
    model = with_adapters(tmp_path / "base", trainable, vocab_size=V + 6)
    path = save(tmp_path / "run", 1, model, base=tmp_path / "base")
    assert checkpoint.load_config(path).vocab_size == V + 6
    resumed = Transformer(checkpoint.load_config(path))
    lora.set_trainable(resumed, trainable, ADAPTERS)
    checkpoint.load_weights(resumed, path)
    assert same(weights(resumed), weights(model))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs.resize_token_embeddings(V + 6)
    theirs = PeftModel.from_pretrained(theirs, path)
    torch.testing.assert_close(logits_of(theirs), logits_of(model), rtol=0, atol=2e-5)
    assert same(weights(checkpoint.load_model(path)), merged(model))
    file = path / LORA_FILES[1]
    save_file({k: t for k, t in load_file(file).items() if "embed_tokens" not in k}, file)
    with pytest.raises(UserError) as caught:
        checkpoint.load_model(path)
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
    assert f"{base} are not those that {path}" in error_line(checkpoint.load_model, path)
    assert "damaged" in error_line(checkpoint.resolve, path)
    base.rename(tmp_path / "elsewhere")
    for call in (checkpoint.load_model, checkpoint.resolve):
        text = error_line(call, path)
        assert str(path / LORA_FILES[0]) in text and repr(str(base)) in text
    assert "needs base" in error_line(lambda: save(tmp_path / "run", 3, with_adapters(tmp_path / "elsewhere")))
    assert names(tmp_path / "run") == ["latest", "step_000002"]


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
    assert checkpoint.load_config(path).vocab_size == V + grown
    assert checkpoint.tokenizer_dir(path) == checkpoint.base_of(path) == base
    ours = checkpoint.load_model(path, block_size=16)
    torch.testing.assert_close(logits_of(ours, 16), logits_of(theirs, 16), rtol=0, atol=2e-5)


# ---- training state -------------------------------------------------------------------------------------------------


def test_state_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        "optimizer": [{"exp_avg": torch.randn(3, 4), "step": torch.tensor(7.0)}, {}],
        "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
        "order": {"data": "语料", "seed": 1337, "weights": (0.7, 0.3)},
        "val_loss": float("inf"),
        "none": None,
    }
    rank_state = {"rng": torch.get_rng_state(), "python": random.Random(1).getstate()}
    path = save(tmp_path, 3, state=state, rank_state=rank_state)
    back, rank_back = checkpoint.load_train_state(path, rank=0)
    assert torch.equal(back["optimizer"][0]["exp_avg"], state["optimizer"][0]["exp_avg"])
    assert torch.equal(back["half"].view(torch.int16), state["half"].view(torch.int16))
    assert {k: back[k] for k in ("order", "val_loss", "none")} == {k: state[k] for k in ("order", "val_loss", "none")}
    assert torch.equal(rank_back["rng"], rank_state["rng"]) and rank_back["python"] == rank_state["python"]
    for file in ("train_state.pt", "rank_00000.pt"):  # T41: by torch's own loader too
        torch.load(path / file, weights_only=True)
    assert checkpoint.load_train_state(path, rank=1)[1] == {}


def test_state_that_could_not_be_resumed_is_refused_when_saved(tmp_path: Path) -> None:
    save(tmp_path, 1)
    text = error_line(lambda: save(tmp_path, 2, state={"generator": random.Random(1)}))
    assert "train_state.pt holds random.Random" in text and "earlier checkpoints are intact" in text
    assert "rank_00000.pt holds" in error_line(lambda: save(tmp_path, 2, rank_state={"loss": numpy.float64(1)}))
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
    text = error_line(checkpoint.load_train_state, bad, 0)
    assert str(bad / file) in text and "refused" in text
    assert not marker.exists()
    torch.load(bad / file, weights_only=False) if form == "torch" else pickle.loads((bad / file).read_bytes())
    assert marker.exists()  # so the attack was a real one


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 nothing", b"\x80\x04.", "训练".encode(), pickle.dumps(3)])
def test_rubbish_for_a_state_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = save(tmp_path, 1)
    (path / "train_state.pt").write_bytes(content)
    assert "train_state.pt" in error_line(checkpoint.load_train_state, path, 0)
    (path / "train_state.pt").unlink()
    assert "train_state.pt: No such file" in error_line(checkpoint.load_train_state, path, 0)


def test_a_state_that_is_not_a_dict_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    torch.save([1, 2], path / "train_state.pt")
    assert "list, not a dict" in error_line(checkpoint.load_train_state, path, 0)


# ---- which steps stay, which is best --------------------------------------------------------------------------------

NAN = float("nan")


@pytest.mark.parametrize(
    ("losses", "keep_last", "keep_best", "kept", "best", "best2"),
    [
        # losses of steps 1, 2, 3, ...; what is there after the last of them
        ([3.0, 2.0, 1.0], 1, 2, [2, 3], 3, 2),
        ([1.0, 2.0, 3.0], 1, 2, [1, 2, 3], 1, 2),
        ([1.0, 2.0, 3.0], 1, 1, [1, 3], 1, None),
        ([1.0, 2.0, 3.0], 2, 0, [2, 3], None, None),
        ([1.0, 2.0, 3.0], 0, 0, [1, 2, 3], None, None),
        ([2.0, 1.0, 3.0, 1.5], 1, 2, [2, 4], 2, 4),
        ([NAN, 5.0, NAN, 4.0, NAN], 1, 2, [2, 4, 5], 4, 2),
        ([NAN, NAN], 1, 2, [2], None, None),
        ([None, 2.0, None], 1, 2, [2, 3], 2, None),
        ([float("-inf"), 2.0, float("inf")], 1, 2, [2, 3], 2, None),
        ([2.0, 2.0, 2.0, 2.0], 1, 2, [1, 2, 4], 1, 2),
        ([3.0, 2.0, 2.0, 1.0, 2.0], 2, 2, [2, 4, 5], 4, 2),
    ],
)
def test_last_and_best(
    tmp_path: Path, losses: list, keep_last: int, keep_best: int, kept: list, best: int | None, best2: int | None
) -> None:
    for step, loss in enumerate(losses, start=1):
        save(tmp_path, step, tiny(), val_loss=loss, keep_last=keep_last, keep_best=keep_best)
    assert [int(p.name[5:]) for p in checkpoint.step_dirs(tmp_path)] == kept
    for link, step in {"latest": len(losses), "best": best, "best2": best2}.items():
        found = (tmp_path / link).resolve().name if (tmp_path / link).is_symlink() else None
        assert found == (step and f"step_{step:06d}"), link


@pytest.mark.slow
def test_best_of_a_long_run_is_the_best_of_all_its_losses(tmp_path: Path) -> None:
    """Pruned steps are forgotten, which must not matter: against a list that forgets nothing."""
    rng = random.Random(3)
    model, history = tiny(), []
    for step in range(1, 41):
        loss = rng.choice([NAN, None, *[float(rng.randint(1, 12)) for _ in range(6)]])
        history.append((step, loss))
        save(tmp_path, step, model, val_loss=loss, keep_last=2, keep_best=2)
        ranking = sorted((x, s) for s, x in history if x is not None and not math.isnan(x))
        expected = [f"step_{s:06d}" for _, s in ranking[:2]]
        found = [os.readlink(tmp_path / link) for link in ("best", "best2") if (tmp_path / link).is_symlink()]
        assert found == expected
        newest = [f"step_{s:06d}" for s in (step - 1, step) if s]
        assert {p.name for p in checkpoint.step_dirs(tmp_path)} == {*newest, *expected}


def test_fewer_best_than_before(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, val_loss=float(step), keep_last=1, keep_best=2)
    save(tmp_path, 4, val_loss=4.0, keep_last=1, keep_best=0)
    assert names(tmp_path) == ["latest", "step_000004"]


def test_a_run_directory_can_be_moved(tmp_path: Path) -> None:
    save(tmp_path / "a", 1, tiny(1), val_loss=1.0, keep_last=1, keep_best=2)
    save(tmp_path / "a", 2, tiny(2), val_loss=2.0, keep_last=1, keep_best=2)
    (tmp_path / "a").rename(tmp_path / "b")
    assert same(weights(checkpoint.load_model(tmp_path / "b" / "best")), weights(tiny(1)))
    assert same(weights(checkpoint.load_model(tmp_path / "b" / "latest")), weights(tiny(2)))
    assert same(weights(checkpoint.load_model(tmp_path / "b" / "best2")), weights(tiny(2)))


def test_a_damaged_later_step_neither_counts_nor_disappears(tmp_path: Path) -> None:
    """The resume went behind it to step 2: with keep_last=1 the step saved next must be the one that stays."""
    for step in (2, 4):
        save(tmp_path, step, val_loss=float(-step), keep_last=0, keep_best=1)
    flip_byte(tmp_path / "step_000004" / "model.safetensors")
    save(tmp_path, 3, val_loss=1.0, keep_last=1, keep_best=1)
    assert names(tmp_path) == ["best", "latest", "step_000002", "step_000003", "step_000004"]
    assert os.readlink(tmp_path / "latest") == "step_000003" and os.readlink(tmp_path / "best") == "step_000002"
    assert checkpoint.find_latest(tmp_path, lambda line: None).name == "step_000003"
    save(tmp_path, 4, tiny(99), val_loss=0.5, keep_last=1, keep_best=1)
    assert checkpoint.find_latest(tmp_path).name == "step_000004"
    assert same(weights(checkpoint.load_model(tmp_path / "step_000004")), weights(tiny(99)))


@pytest.mark.parametrize(("keep_last", "keep_best"), [(-1, 0), (1, 3), (1, -1)])
def test_senseless_numbers_to_keep(tmp_path: Path, keep_last: int, keep_best: int) -> None:
    text = error_line(lambda: save(tmp_path / "run", 1, keep_last=keep_last, keep_best=keep_best))
    assert f"{keep_last=}" in text and f"{keep_best=}" in text
    assert not (tmp_path / "run").exists()


# ---- damage ---------------------------------------------------------------------------------------------------------


def flip_byte(path: Path, position: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[min(int(len(data) * position), len(data) - 1)] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("two") / "run"
    save(run, 1, val_loss=2.0)
    save(run, 2, val_loss=1.0)
    return run


FILES = [
    "checksums.json", "config.json", "generation_config.json", "model.safetensors", "rank_00000.pt", "score.json",
    "tokenizer.json", "tokenizer_config.json", "train_state.pt",
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
    assert names(two_steps) == ["latest", "step_000001", "step_000002"]  # keep_best=0: no best


@pytest.mark.parametrize("file", [file for file in FILES if file != "score.json"])  # rank() writes that one again
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


def test_a_step_is_on_the_disk_before_it_has_its_name_and_the_name_after(tmp_path: Path, monkeypatch) -> None:
    """A machine that stops keeps what was fsynced: every file and the directory before the rename, then the run
    directory, which holds the new name."""
    events, fsync, rename = [], os.fsync, Path.rename

    def traced_fsync(fd: int) -> None:
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{fd}"))))
        fsync(fd)

    def traced_rename(path: Path, target: Path) -> Path:
        events.append(("rename", Path(target)))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(Path, "rename", traced_rename)
    final = save(tmp_path, 1)
    temp = tmp_path / ".step_000001.tmp"
    named = events.index(("rename", final))
    assert {("fsync", temp), *(("fsync", temp / path.name) for path in final.iterdir())} <= set(events[:named])
    assert ("fsync", tmp_path) in events[named:]


def test_the_name_of_a_model_is_its_own_wherever_it_is(tmp_path: Path) -> None:
    first, other = save(tmp_path / "a", 1, tiny(0)), save(tmp_path / "b", 1, tiny(1))
    moved = shutil.copytree(first, tmp_path / "c" / first.name)
    names = [checkpoint.model_name(path) for path in (first, moved, other)]
    assert names[0] == names[1] != names[2] and all(name.startswith("step_000001 ") for name in names)
    (first / "config.json").write_text("{}", encoding="utf-8")
    assert names[0] != checkpoint.model_name(first)


# ---- kill -9 --------------------------------------------------------------------------------------------------------

TOUCHES_DISK = ("open", "os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir", "os.scandir", "os.listdir")


def killed_at(moment: int, action: Callable[[], object]) -> bool:
    """Run `action` in a child that kills itself (SIGKILL) just before the `moment`-th thing it does to files.

    False if the action was over before that. The moments are Python's audit events, not hooks in checkpoint.py.
    """
    seen = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal seen
        if event in TOUCHES_DISK:
            seen += 1
            if seen == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    def hooked() -> None:
        sys.addaudithook(hook)
        action()

    status = wait(start(hooked))
    assert status in (0, -signal.SIGKILL)
    return status != 0


def start(action: Callable[[], object]) -> int:
    """Run `action` in a forked child; -> its process id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def wait(child: int) -> int:
    """Exit status of a child: 0, 1, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync matters when the machine stops, not when a process does; without it these tests are much faster."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.mark.slow
def test_kill_at_every_moment_of_a_save(tmp_path: Path, unsynced: None) -> None:
    """Whatever the moment, the run has a whole checkpoint: the one before, or the new one; and the next save works."""
    models, base = {step: tiny(step) for step in (1, 2, 3)}, tmp_path / "base"
    keep = dict(keep_last=1, keep_best=1)
    for step, loss in ((1, 1.0), (2, 2.0)):
        save(base, step, models[step], val_loss=loss, **keep)
    found, moment = [], 1
    while True:
        run = Path(shutil.copytree(base, tmp_path / f"run{moment}", symlinks=True))
        killed = killed_at(moment, lambda run=run: save(run, 3, models[3], val_loss=0.5, **keep))
        lines = []
        path = checkpoint.find_latest(run, lines.append)
        step = checkpoint.step_of(path)
        found.append(step)
        assert not lines
        for finished in checkpoint.step_dirs(run):  # nothing half-written or half-removed bears such a name
            checkpoint.check_bytes(finished)
        assert same(weights(checkpoint.load_model(path)), weights(models[step]))
        assert checkpoint.load_train_state(path, 0)[0]["step"] == step
        assert all((run / link).exists() for link in ("latest", "best"))  # they lead to a directory
        assert checkpoint.resolve(run / "latest") and checkpoint.resolve(run / "best")
        save(run, 4, models[3], val_loss=0.25, **keep)
        assert names(run) == ["best", "latest", "step_000004"]
        shutil.rmtree(run)
        if not killed:
            break
        moment += 1
    assert found == sorted(found) and {2, 3} == set(found[:-1]) and len(found) > 30


@pytest.mark.slow
def test_kill_at_every_moment_of_replacing_a_step(tmp_path: Path, unsynced: None) -> None:
    """The only checkpoint of a run is saved again: at any moment the old or the new one can be loaded."""
    old, new, base = tiny(1), tiny(2), tmp_path / "base"
    save(base, 7, old, keep_last=1)
    found, moment = [], 1
    while True:
        run = Path(shutil.copytree(base, tmp_path / f"run{moment}", symlinks=True))
        killed = killed_at(moment, lambda run=run: save(run, 7, new, keep_last=1))
        now = weights(checkpoint.load_model(checkpoint.find_latest(run, pytest.fail)))
        assert same(now, weights(old)) or same(now, weights(new))
        found.append("old" if same(now, weights(old)) else "new")
        error_line(lambda run=run: save(run, 7, new, state={"not": random.Random()}))  # the next save fails: as before
        assert same(now, weights(checkpoint.load_model(checkpoint.find_latest(run, pytest.fail))))
        save(run, 7, new, keep_last=1)
        assert names(run) == ["latest", "step_000007"]
        assert same(weights(checkpoint.load_model(run / "latest")), weights(new))
        shutil.rmtree(run)
        if not killed:
            break
        moment += 1
    assert found == sorted(found, reverse=True) and set(found[:-1]) == {"old", "new"}


# ---- full disks -----------------------------------------------------------------------------------------------------


def check_failed_save(run: Path, text: str) -> None:
    """After a save of step 3 that had no room: told in a line, the step before whole, nothing of the new one left."""
    assert "step_000003" in text and "No space left on device" in text and "earlier checkpoints are intact" in text
    assert names(run) == ["best", "latest", "step_000002"]
    assert checkpoint.find_latest(run, pytest.fail).name == "step_000002"


WRITTEN = ["config.json", "rank_00000.pt", "score.json", "tokenizer.json.tmp", "train_state.pt"]


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs Linux's device that is always full")
@pytest.mark.parametrize("file", WRITTEN)
def test_no_room_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """The system itself refuses the bytes of one file, be they Python's or torch's."""
    save(tmp_path, 2, val_loss=1.0, keep_best=1)
    mkdir = os.mkdir

    def mkdir_with_full_file(path: str | Path, mode: int = 0o777) -> None:
        mkdir(path, mode)
        os.symlink("/dev/full", Path(path) / file)

    monkeypatch.setattr(os, "mkdir", mkdir_with_full_file)
    check_failed_save(tmp_path, error_line(lambda: save(tmp_path, 3)))
    monkeypatch.undo()
    save(tmp_path, 3, val_loss=2.0, keep_last=1, keep_best=1)
    assert names(tmp_path) == ["best", "latest", "step_000002", "step_000003"]


@pytest.mark.parametrize("adapters", [False, True])
def test_no_room_for_weights(tmp_path: Path, adapters: bool) -> None:
    """safetensors writes them, in words of its own: here no file may be as large."""
    base, model = save(tmp_path / "base", 1), tiny()
    if adapters:
        lora.set_trainable(model, "lora", LoRAConfig(rank=64))
    good = save(tmp_path / "run", 2, model, base=base, val_loss=1.0, keep_best=1)
    largest = max(path.stat().st_size for path in good.iterdir())
    assert largest == (good / f"{'adapter_' if adapters else ''}model.safetensors").stat().st_size
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, unlimited[1]))
    try:
        text = error_line(lambda: save(tmp_path / "run", 3, model, base=base))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert "File too large" in text
    assert names(tmp_path / "run") == ["best", "latest", "step_000002"]
    checkpoint.resolve(good)


def test_no_room_noticed_when_it_goes_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that allocates late says so in fsync: of any file, or of the directory."""
    save(tmp_path, 2, val_loss=1.0, keep_best=1)
    for failing in range(1, len(FILES) + 2):
        calls = 0

        def fsync(fd: int, failing: int = failing) -> None:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", fsync)
        check_failed_save(tmp_path, error_line(lambda: save(tmp_path, 3)))
        assert calls >= failing  # the other files are on their way at the same time


def test_a_mistake_in_the_code_is_not_called_a_full_disk(tmp_path: Path) -> None:
    save(tmp_path, 2)
    with pytest.raises(AttributeError, match="named_modules"):
        save(tmp_path, 3, model="no model")
    assert names(tmp_path) == ["latest", "step_000002"]


def test_an_out_dir_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "Not a directory" in error_line(lambda: save(tmp_path / "file" / "run", 1))


# ---- several ranks --------------------------------------------------------------------------------------------------


def in_ranks(world_size: int, action: Callable[[ranks.World], object], timeout_s: float = 20) -> list[int]:
    """Run `action` in `world_size` processes that share a gloo group; -> their exit statuses, as of `wait`."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    def join_and_act(rank: int) -> None:
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world_size}
        os.environ.update({key: str(value) for key, value in (group | {"RANK": rank, "LOCAL_RANK": rank}).items()})
        action(ranks.init(timeout_s=timeout_s))

    return [wait(child) for child in [start(lambda rank=rank: join_and_act(rank)) for rank in range(world_size)]]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks for the mapping in /proc")
def test_the_state_is_mapped_not_held(tmp_path: Path) -> None:
    """Every rank reads the whole state, and keeps its share: as copies, eight ranks would hold it eight times."""
    path = save(tmp_path, 1)
    state, _ = checkpoint.load_train_state(path, 0)
    assert str(path / "train_state.pt") in Path("/proc/self/maps").read_text("utf-8")
    assert state["moments"].tolist() == [1.0] * 3
    shutil.rmtree(path)
    assert state["moments"].add_(1).tolist() == [2.0] * 3  # a change is this process's own


@pytest.mark.dist
def test_ranks_save_one_checkpoint(tmp_path: Path) -> None:
    def action(world: ranks.World) -> None:
        rank_state = {"rank": world.rank, "rng": torch.full((5,), world.rank, dtype=torch.uint8)}
        for step in (1, 2):
            path = save(tmp_path, step, tiny(step), world=world, rank_state=rank_state, keep_last=1)
            assert checkpoint.find_latest(tmp_path) == path  # on every rank, as soon as its own save returns
        ranks.close()

    assert in_ranks(3, action) == [0, 0, 0]
    path = checkpoint.find_latest(tmp_path, pytest.fail)
    assert names(tmp_path) == ["latest", "step_000002"]
    assert same(weights(checkpoint.load_model(path)), weights(tiny(2)))
    for rank in range(3):
        state, rank_state = checkpoint.load_train_state(path, rank)
        assert state["step"] == 2 and rank_state["rank"] == rank and set(rank_state["rng"].tolist()) == {rank}
    assert checkpoint.load_train_state(path, 3)[1] == {}
    flip_byte(path / "rank_00002.pt")
    assert "all 1 checkpoints" in error_line(checkpoint.find_latest, tmp_path, lambda line: None)


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs Linux's device that is always full")
@pytest.mark.dist
@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_without_room_fails_the_save_of_all(tmp_path: Path, failing: int) -> None:
    save(tmp_path, 2, val_loss=1.0, keep_best=1)

    def action(world: ranks.World) -> None:
        if world.rank == failing:
            checkpoint.rank_file = lambda rank: "/dev/full"
        text = error_line(lambda: save(tmp_path, 3, world=world))
        assert f"rank {failing}: No space left on device" in text and f"rank {1 - failing}" not in text
        if world.is_main:
            check_failed_save(tmp_path, text)
        checkpoint.rank_file = "rank_{:05d}.pt".format  # there is room again
        save(tmp_path, 4, world=world, keep_last=1)
        ranks.close()

    assert in_ranks(2, action) == [0, 0]
    assert names(tmp_path) == ["latest", "step_000004"]


@pytest.mark.dist
@pytest.mark.parametrize("dying", [0, 1])
def test_one_rank_killed_while_it_saves(tmp_path: Path, dying: int) -> None:
    save(tmp_path, 2, tiny(2))

    def action(world: ranks.World) -> None:
        if world.rank == dying:
            checkpoint.write_state = lambda path, state: os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(UserError):
            save(tmp_path, 3, world=world)

    statuses = in_ranks(2, action)
    assert statuses[dying] == -signal.SIGKILL and statuses[1 - dying] == 0
    assert checkpoint.find_latest(tmp_path, pytest.fail).name == "step_000002"
    save(tmp_path, 3, keep_last=1)
    assert names(tmp_path) == ["latest", "step_000003"]


# ---- which directory is meant ---------------------------------------------------------------------------------------


def test_init_from_names_a_run_a_step_a_link_or_a_model(tmp_path: Path) -> None:
    run = tmp_path / "out" / "run"
    for step, loss in ((1, 1.0), (2, 2.0)):
        save(run, step, val_loss=loss, keep_best=1)
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


def test_init_from_that_names_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert "'Qwen/Qwen3-0.6B'" in error_line(checkpoint.resolve, "Qwen/Qwen3-0.6B")
    assert "no such directory" in error_line(checkpoint.resolve, tmp_path / "没有")
    assert "is a file" in error_line(checkpoint.resolve, tmp_path / "file")
    assert "holds no checkpoint" in error_line(checkpoint.resolve, tmp_path / "empty")
    assert "config.json: No such file" in error_line(checkpoint.load_config, tmp_path / "empty")


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
        path = save(tmp_path / "out" / name, step, val_loss=1.0, keep_best=1)
        then = time.time() - age
        os.utime(path / "checksums.json", (then, then))
    assert checkpoint.newest_run(tmp_path / "out") == tmp_path / "out" / "a"
    path = tmp_path / "out" / "a" / "step_000009" / "config.json"
    path.write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"]}), encoding="utf-8")
    assert checkpoint.newest_run(tmp_path / "out") == tmp_path / "out" / "c"  # a reward model writes no text
    assert checkpoint.newest_run(tmp_path / "out", rewards=True) == tmp_path / "out" / "a"
