"""lora.py against peft (logits, merged weights, files in both directions), published counts of parameters, and hand
arithmetic."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_ddp import start_ranks
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import ddp
from groundup.errors import UserError
from groundup.generate.completion import generate
from groundup.generate.decode import for_inference
from groundup.generate.sampling import SamplingParams
from groundup.tokens.training import train
from groundup.train import huggingface, lora, ranks
from groundup.train.huggingface import PREFIX, hf_name
from groundup.train.lora import LoRAConfig, LoRALinear
from groundup.train.optim import Optimizer
from model import ModelConfig, Transformer

V = 40
SIZES = dict(
    vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0,
)  # fmt: skip


@torch.no_grad()
def shake(model: nn.Module, seed: int = 0, of: str = "") -> nn.Module:
    """Make every parameter whose name contains `of` random: B = 0 would hide almost everything."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if of in name:
            p.normal_(1.0 if p.ndim == 1 else 0.0, 0.3, generator=generator)
    return model


def tiny(**changes: object) -> Transformer:
    cfg = dict(vocab_size=V, block_size=32, n_layer=2, n_head=4, n_kv_head=2, n_embd=16, ffn_dim=24)
    return shake(Transformer(ModelConfig(**(cfg | {"tie_embeddings": False} | changes))))


def hf_base(directory: Path, kind: str = "llama", **changes: object) -> Path:
    """A Hugging Face directory with random weights."""
    torch.manual_seed(0)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**(SIZES | changes)))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**(SIZES | changes)))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**(SIZES | {"head_dim": 6} | changes)))
    shake(model).save_pretrained(directory)
    return directory


def hf_load(directory: Path, kind: str = "llama") -> nn.Module:
    classes = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM, "qwen3": Qwen3ForCausalLM}
    return classes[kind].from_pretrained(directory)


@torch.no_grad()
def logits_of(model: nn.Module, vocab: int = V) -> torch.Tensor:
    out = model.eval()(torch.randint(vocab, (2, 16), generator=torch.Generator().manual_seed(7)))
    return out if isinstance(out, torch.Tensor) else out.logits


def error_line(*args: object) -> str:
    with pytest.raises(UserError) as caught:
        args[0](*args[1:])
    text = str(caught.value)
    assert text.startswith(("lora: ", "checkpoint: ")) and "\n" not in text and len(text) < 600
    return text


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


# ---- the layer ------------------------------------------------------------------------------------------------------


def test_a_new_adapter_changes_nothing_and_keeps_the_very_weights() -> None:
    model = tiny()
    before, expected = dict(model.named_parameters()), logits_of(model)
    lora.add_lora(model, LoRAConfig(rank=4))
    after = dict(model.named_parameters())
    assert all(after[name] is p for name, p in before.items())
    assert len(after) - len(before) == 2 * 7 * 2
    assert torch.equal(logits_of(model), expected)
    a, b = (after[f"layers.1.mlp.down_proj.lora_{x}.weight"] for x in "AB")
    assert a.shape == (4, 24) and b.shape == (16, 4) and not b.any()
    # kaiming_uniform(a=sqrt 5): uniform within sqrt(6 / (1 + 5) / inputs)
    assert 0.8 < a.abs().max() * 24**0.5 <= 1


def test_forward_is_the_formula() -> None:
    weight = nn.Parameter(torch.randn(3, 5))
    x = torch.randn(2, 5)
    layer = shake(LoRALinear(weight, LoRAConfig(rank=4, alpha=6)), of="lora")
    a, b = layer.lora_A.weight, layer.lora_B.weight
    torch.testing.assert_close(layer(x), x @ (weight + 6 / 4 * b @ a).T)


def test_dropout_acts_on_the_adapter_alone_and_in_training_alone() -> None:
    torch.manual_seed(1)
    layer = LoRALinear(nn.Parameter(torch.eye(6)), LoRAConfig(rank=6, alpha=6, dropout=0.5))
    with torch.no_grad():
        layer.lora_A.weight.copy_(torch.eye(6))
        layer.lora_B.weight.copy_(torch.eye(6))
    x = torch.ones(500, 6)
    assert torch.equal(layer.eval()(x), 2 * x)
    y = layer.train()(x)
    assert set(y.unique().tolist()) == {1.0, 3.0}  # W x + 0, or W x + x / (1 - 0.5)
    assert abs(y.mean().item() - 2) < 0.1


def test_adapters_off_is_the_model_before() -> None:
    model = tiny()
    expected = logits_of(model)
    lora.add_lora(model, LoRAConfig(rank=4))
    shake(model, 1, "lora")
    changed = logits_of(model)
    assert not torch.allclose(changed, expected)
    with pytest.raises(KeyError), lora.adapters_off(model):
        assert torch.equal(logits_of(model), expected)
        raise KeyError
    assert torch.equal(logits_of(model), changed)


def test_merging_leaves_a_plain_model_of_the_same_function() -> None:
    model = tiny()
    names = list(dict(model.named_parameters()))
    lora.add_lora(model, LoRAConfig(rank=4))
    shake(model, 1, "lora")
    expected, weight = logits_of(model), model.layers[0].mlp.up_proj.weight
    lora.merge_(model)
    assert lora.lora_config_of(model) is None and list(dict(model.named_parameters())) == names
    assert type(model.layers[0].mlp.up_proj) is nn.Linear and model.layers[0].mlp.up_proj.weight is weight
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generation_with_adapters_is_that_of_the_merged_model(dtype: torch.dtype) -> None:
    model = tiny()
    lora.add_lora(model, LoRAConfig(rank=4))
    shake(model, 1, "lora")
    before = {name: p.clone() for name, p in model.named_parameters()}
    params, prompts = SamplingParams(max_new_tokens=20, temperature=0.0), [[1, 2, 3], [4, 5, 6, 7]]
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        ours = generate(model, None, prompts, params)
        with lora.adapters_off(model):
            without = generate(model, None, prompts, params)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    lora.merge_(model)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        merged = generate(model, None, prompts, params)
    assert [r.completions[0].ids for r in ours] == [r.completions[0].ids for r in merged]
    assert [r.completions[0].ids for r in ours] != [r.completions[0].ids for r in without]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generation_without_copies_shares_all_weights_of_training(dtype: torch.dtype) -> None:
    """Frozen matrices in `dtype`, as base_dtype holds them; the embedding is float32, as one that is trained."""
    model = tiny()
    for name, p in model.named_parameters():
        p.data = p.data.to(dtype) if p.ndim == 2 and name != "embed_tokens.weight" else p.data
    lora.add_lora(model, LoRAConfig(rank=4))
    shake(model, 1, "lora")
    view = for_inference(model, dtype, copies=False)
    held = {p.data_ptr() for p in model.parameters()}
    assert {p.data_ptr() for p in view.parameters()} == held and lora.lora_config_of(view) is not None
    params, prompts = SamplingParams(max_new_tokens=30, temperature=0.0), [[1, 2, 3], [4, 5, 6, 7]]
    found = [generate(model, None, prompts, params, copies=copies) for copies in (False, True)]
    ids, merged = ([r.completions[0].ids for r in results] for results in found)
    assert ids == merged if dtype == torch.float32 else all(map(len, ids))  # W + B A loses digits in bfloat16


@pytest.mark.slow
def test_compiled_blocks_have_adapters_and_can_switch_them_off() -> None:
    model = tiny()
    lora.set_trainable(model, "lora", LoRAConfig(rank=4))
    shake(model, 1, "lora")
    expected = logits_of(model)
    with lora.adapters_off(model):
        plain = logits_of(model)
    for block in model.layers:
        block.forward = torch.compile(block.forward, dynamic=False, backend="eager")
    torch.testing.assert_close(logits_of(model), expected)
    with lora.adapters_off(model):
        torch.testing.assert_close(logits_of(model), plain)
    torch.testing.assert_close(logits_of(model), expected)


# ---- what is trained ------------------------------------------------------------------------------------------------

LLAMA2 = ModelConfig(
    vocab_size=121_824, block_size=4096, n_layer=32, n_head=32, n_embd=4096, ffn_dim=11008, tie_embeddings=False
)


@pytest.mark.parametrize("bias", [False, True])
def test_small_adapters_are_not_rounded_away_in_bfloat16(bias: bool) -> None:
    """A delta of less than half a unit in the last place of W x would vanish if it were added to the rounded W x."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(256, 256) * 0.05, requires_grad=False)
    layer = lora.LoRALinear(weight, LoRAConfig(rank=8), nn.Parameter(torch.randn(256) * 0.01) if bias else None)
    nn.init.normal_(layer.lora_B.weight, std=1e-4)
    x, outputs = torch.randn(4, 128, 256), {}
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
                for layer.enabled in (False, True):
                    outputs[dtype, layer.enabled] = layer(x).float()
    exact, rounded = (outputs[dtype, True] - outputs[dtype, False] for dtype in (torch.float32, torch.bfloat16))
    kept = (rounded * exact).sum() / exact.square().sum()
    assert kept.item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("modules", "n_trained", "n_all"),
    [(("q_proj", "v_proj"), 1_002_176_512, 7_478_448_128), ((), 1_017_970_688, 7_494_242_304)],
)
def test_the_published_counts_of_llama_2_with_a_chinese_vocabulary(modules: tuple, n_trained: int, n_all: int) -> None:
    with torch.device("meta"):
        model = Transformer(LLAMA2)
        lora.set_trainable(model, "embed,lm_head,lora", LoRAConfig(rank=8, modules=modules))
    assert sum(p.numel() for p in model.parameters()) == n_all
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == n_trained


@pytest.mark.parametrize("shape", [{}, {"tie_embeddings": True}, {"qk_norm": True, "head_dim": 6}, {"qkv_bias": True}])
def test_adapters_have_the_shapes_that_are_told_beforehand(shape: dict) -> None:
    model = tiny(**shape)
    cfg = lora.find_modules(model, LoRAConfig(rank=3, modules=("up_proj", "k_proj")))
    before = lora.adapter_shapes(model, cfg)
    lora.add_lora(model, cfg)
    assert before == {name: tuple(p.shape) for name, p in model.named_parameters() if ".lora_" in name}
    assert lora.adapter_shapes(model, cfg) == before


def test_parts() -> None:
    model = tiny()
    lora.set_trainable(model, "embed,lm_head", LoRAConfig())
    assert trained(model) == {"embed_tokens.weight", "lm_head.weight"} and lora.lora_config_of(model) is None
    lora.set_trainable(model, r"layers[.]1[.].*norm, ^norm", LoRAConfig())
    assert trained(model) == {
        "norm.weight", "layers.1.input_layernorm.weight", "layers.1.post_attention_layernorm.weight"
    }  # fmt: skip
    lora.set_trainable(model, "all", LoRAConfig())
    assert trained(model) == {name for name, _ in model.named_parameters()}
    lora.set_trainable(model, "lora,down_proj", LoRAConfig(rank=2, modules=("v_proj", "q_proj")))
    assert lora.lora_config_of(model) == LoRAConfig(rank=2, modules=("q_proj", "v_proj"))  # in the model's order
    assert len(trained(model)) == 2 * 2 * 2 + 2
    tied = tiny(tie_embeddings=True)
    lora.set_trainable(tied, "lm_head", LoRAConfig())
    assert trained(tied) == {"embed_tokens.weight"}


def test_parts_that_are_none_are_refused_with_what_there_is() -> None:
    model = tiny()
    for trainable, words in {
        "lorra": ("'lorra'", "lora, embed, lm_head", "layers.N.self_attn.q_proj"),
        "all,lora": ("'all,lora'",),
        "": ("''",),
        " , ": ("' , '",),
        "lora,(": ("'('", "no regular expression"),
        "lora,layers.0.mlp": ("layers.0.mlp.gate_proj.weight", "beside its adapter"),
        "q_norm": ("'q_norm'",),
    }.items():
        text = error_line(lora.set_trainable, model, trainable, LoRAConfig())
        assert all(word in text for word in words), text
        assert lora.lora_config_of(model) is None and len(trained(model)) == len(list(model.parameters()))
    lora.add_lora(model, LoRAConfig(rank=2))
    assert "rank=2" in error_line(lora.set_trainable, model, "lora", LoRAConfig(rank=3))
    assert "already" in error_line(lora.set_trainable, model, "all", LoRAConfig())
    assert "already" in error_line(lora.add_lora, model, LoRAConfig())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 0}, "rank=0"),
        ({"alpha": 0.0}, "alpha=0.0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"rank": 10**30}, "to 65536"),
        ({"modules": ("q_proj", "wq")}, "down_proj, got 'wq'"),
        ({"modules": ("lm_head",)}, "trainable='embed,lm_head,lora'"),
    ],
)
def test_settings_that_make_no_sense(changes: dict, words: str) -> None:
    assert words in error_line(lambda: lora.add_lora(tiny(), LoRAConfig(**changes)))


@pytest.mark.parametrize("tied", [False, True])
def test_new_tokens_get_the_mean(tied: bool) -> None:
    model = tiny(tie_embeddings=tied)
    old, expected = model.embed_tokens.weight.clone(), logits_of(model)
    head = lora.with_new_rows(model.lm_head.weight.detach(), V + 5, V, {})
    rows = head if tied else lora.with_new_rows(old, V + 5, V, {})
    model.embed_tokens.weight, model.lm_head.weight = nn.Parameter(rows), nn.Parameter(head)
    logits = logits_of(model)
    assert torch.equal(logits[..., :V], expected) and logits.shape[-1] == V + 5
    assert torch.equal(model.embed_tokens.weight[:V], old)
    torch.testing.assert_close(model.embed_tokens.weight[V:], old.mean(0).expand(5, -1))
    # A linear map of a mean: each new token's logit is the mean of the old ones.
    torch.testing.assert_close(logits[..., V:], expected.mean(-1, keepdim=True).expand(-1, -1, 5), atol=1e-5, rtol=0)


def test_rows_of_new_tokens_must_be_trained_beside_adapters(tmp_path: Path) -> None:
    """In a tied model the embedding and the head are one weight, so either name trains both."""
    untied, tied = (hf_base(tmp_path / f"{tie}", tie_word_embeddings=tie) for tie in (False, True))
    for base, trainable, n_new in [
        (untied, "embed,lm_head,lora", 4), (tied, "embed,lm_head,lora", 4), (untied, "lora", 0),
        (tied, "embed,lora", 4), (tied, "lm_head,lora", 4),
    ]:  # fmt: skip
        huggingface.check_trainable(trainable, base, n_new)
    for base, trainable in [(untied, "embed,lora"), (untied, "lm_head,lora"), (untied, "lora"), (tied, "lora")]:
        with pytest.raises(UserError, match="4 token ids are new"):
            huggingface.check_trainable(trainable, base, 4)


# ---- peft -----------------------------------------------------------------------------------------------------------

KINDS = {
    "all": LoRAConfig(rank=4, alpha=6),
    "attention": LoRAConfig(rank=3, alpha=7.5, modules=("q_proj", "v_proj"), dropout=0.25),
    "two": LoRAConfig(rank=5, alpha=3, modules=("k_proj", "down_proj")),
}
TRAINABLE = ("lora", "embed,lm_head,lora", "lora,norm")


def ours_and_files(tmp_path: Path, trainable: str, cfg: LoRAConfig, kind: str = "llama", tied: bool = False) -> tuple:
    """A model of ours on a Hugging Face base with everything trainable changed, and the adapter directory of it."""
    base = hf_base(tmp_path / "base", kind, tie_word_embeddings=tied)
    model = huggingface.load_model(base)
    lora.set_trainable(model, trainable, cfg)
    with torch.no_grad():
        for i, p in enumerate(p for p in model.parameters() if p.requires_grad):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.2)
    directory = tmp_path / "adapter"
    directory.mkdir()
    huggingface.save_adapter(directory, model, str(base), huggingface.stored_weights(model))
    return base, model, directory


def test_an_adapter_is_saved_as_the_same_bytes(tmp_path: Path) -> None:
    base, model, directory = ours_and_files(tmp_path, "lora,norm", KINDS["all"])
    first = {path.name: path.read_bytes() for path in directory.iterdir()}
    for _ in range(4):
        huggingface.save_adapter(directory, model, str(base), huggingface.stored_weights(model))
        assert first == {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.filterwarnings("error:Unexpected keyword")
@pytest.mark.filterwarnings("error:Found missing adapter keys")
@pytest.mark.parametrize(
    ("kind", "trainable", "tied"),
    [
        *(("all", trainable, tied) for trainable in TRAINABLE for tied in (False, True)),
        ("attention", "lora", False),
        ("two", "lora,norm", True),
    ],
)
def test_peft_loads_our_adapter_and_merges_to_the_same_bits(
    tmp_path: Path, kind: str, trainable: str, tied: bool
) -> None:
    base, model, directory = ours_and_files(tmp_path, trainable, KINDS[kind], tied=tied)
    theirs = PeftModel.from_pretrained(hf_load(base), directory)
    torch.testing.assert_close(logits_of(model), logits_of(theirs), rtol=0, atol=2e-5)
    merged = theirs.merge_and_unload()
    lora.merge_(model)
    weights = dict(merged.named_parameters()) | {"lm_head.weight": merged.lm_head.weight}
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[hf_name(name)]), name
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])


@pytest.mark.parametrize("trainable", TRAINABLE)
def test_peft_and_we_have_the_same_gradients(tmp_path: Path, trainable: str) -> None:
    base, model, directory = ours_and_files(tmp_path, trainable, KINDS["all"])
    theirs = PeftModel.from_pretrained(hf_load(base), directory, is_trainable=True)
    # From 1: transformers keeps gradients from the row of the padding token.
    idx = torch.randint(1, V, (2, 16), generator=torch.Generator().manual_seed(3))
    model(idx[:, :-1], idx[:, 1:]).div(30).backward()
    theirs(input_ids=idx, labels=idx).loss.backward()
    found = {
        name.replace(".default", "").replace("modules_to_save.", "").removeprefix(PREFIX): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    ours = {hf_name(name): p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert ours.keys() == found.keys()
    for name, grad in ours.items():
        torch.testing.assert_close(grad, found[name], rtol=1e-4, atol=3e-6, msg=name)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_peft_loads_our_adapter_on_biased_layers(tmp_path: Path) -> None:
    base, model, directory = ours_and_files(tmp_path, "lora", KINDS["all"], "qwen2")
    theirs = PeftModel.from_pretrained(hf_load(base, "qwen2"), directory)
    torch.testing.assert_close(logits_of(model), logits_of(theirs), rtol=0, atol=2e-5)
    lora.merge_(model)
    torch.testing.assert_close(logits_of(model), logits_of(theirs), rtol=0, atol=2e-5)
    up = LoRAConfig(modules=("up_proj",))
    assert "biases" in error_line(lora.set_trainable, model, "q_proj.bias,lora", up)


def load_adapter(model: nn.Module, directory: Path) -> None:
    """Load the weights of a directory with adapters, which stay beside them."""
    if lora.lora_config_of(model) is None:
        lora.add_lora(model, huggingface.open_adapter(model, directory)[0])
    huggingface.load_weights(model, directory)


@pytest.mark.parametrize("kind", KINDS)
def test_our_own_adapter_comes_back_to_the_bit(tmp_path: Path, kind: str) -> None:
    base, model, directory = ours_and_files(tmp_path, "embed,lora", KINDS[kind])
    again = huggingface.load_model(base)
    load_adapter(again, directory)
    assert lora.lora_config_of(again) == lora.lora_config_of(model)
    params = dict(again.named_parameters())
    assert all(torch.equal(p, params[name]) for name, p in model.named_parameters())
    load_adapter(again, directory)  # into the adapters that are there
    assert torch.equal(logits_of(again), logits_of(model))
    other = huggingface.load_model(base)
    lora.add_lora(other, LoRAConfig(rank=2))
    assert "rank=2" in error_line(huggingface.load_weights, other, directory)
    stored = load_file(directory / huggingface.ADAPTER_WEIGHTS)
    assert {t.dtype for t in stored.values()} == {torch.float32}
    assert not any("norm" in name or "lm_head" in name for name in stored)


PEFT = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"target_modules": "all-linear", "lora_dropout": 0.1},
    "all but": {"target_modules": "all-linear", "exclude_modules": ["up_proj"]},
    "expression": {"target_modules": r".*layers\.\d+\.mlp\.(up|down)_proj"},
    "paths": {"target_modules": ["layers.1.self_attn.k_proj", "layers.0.self_attn.k_proj"]},
    "gaussian": {"target_modules": ["gate_proj"], "init_lora_weights": "gaussian"},
    "embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "norms": {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "model.norm"]},
    "rslora": {"target_modules": ["q_proj"], "use_rslora": True},
}


@pytest.mark.parametrize(
    ("kind", "base_kind"), [*((kind, "llama") for kind in PEFT), ("all-linear", "qwen2"), ("norms", "qwen3")]
)
def test_we_load_pefts_adapters(tmp_path: Path, kind: str, base_kind: str) -> None:
    base = hf_base(tmp_path / "base", base_kind)
    options = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | PEFT[kind]
    theirs = get_peft_model(hf_load(base, base_kind), LoraConfig(**options))
    with torch.no_grad():
        for i, p in enumerate(p for p in theirs.parameters() if p.requires_grad):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.2)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = huggingface.load_model(base)
    expected = logits_of(theirs)
    assert not torch.allclose(logits_of(ours), expected, atol=1e-3)
    load_adapter(ours, tmp_path / "adapter")
    torch.testing.assert_close(logits_of(ours), expected, rtol=0, atol=2e-5)
    whole = huggingface.load_model(tmp_path / "adapter")  # finds the base by itself
    merged = dict(theirs.merge_and_unload().named_parameters())
    assert all(torch.equal(p, merged[hf_name(name)]) for name, p in whole.named_parameters())


def test_half_precision_adapters_are_widened(tmp_path: Path) -> None:
    base, model, directory = ours_and_files(tmp_path, "lora", KINDS["all"])
    file = directory / huggingface.ADAPTER_WEIGHTS
    save_file({name: t.bfloat16() for name, t in load_file(file).items()}, file)
    theirs = PeftModel.from_pretrained(hf_load(base), directory)
    torch.testing.assert_close(logits_of(huggingface.load_model(directory)), logits_of(theirs), rtol=0, atol=2e-5)


@pytest.mark.parametrize("both", [False, True])
def test_tied_embeddings_trained_by_peft(tmp_path: Path, both: bool) -> None:
    """peft trains the embedding apart from the head unless told otherwise: a tied model cannot be that."""
    base = hf_base(tmp_path / "base", tie_word_embeddings=True)
    options = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "task_type": "CAUSAL_LM"}
    theirs = get_peft_model(hf_load(base), LoraConfig(**options, ensure_weight_tying=both))
    shake(theirs, 1, "modules_to_save")
    theirs.save_pretrained(tmp_path / "adapter")
    if both:
        ours = huggingface.load_model(tmp_path / "adapter")
        torch.testing.assert_close(logits_of(ours), logits_of(theirs), rtol=0, atol=2e-5)
    else:
        assert "apart" in error_line(huggingface.load_model, tmp_path / "adapter")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("whole", [["embed_tokens", "lm_head"], ["embed_tokens"]])
def test_peft_trained_the_rows_of_new_tokens(tmp_path: Path, whole: list, tied: bool) -> None:
    """Its files then hold a layer that was trained whole twice more: as it was before, and as it is in memory."""
    base = hf_base(tmp_path / "base", tie_word_embeddings=tied)
    resized = hf_load(base)
    resized.resize_token_embeddings(V + 4)
    options = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "ensure_weight_tying": tied}
    theirs = get_peft_model(resized, LoraConfig(**options, modules_to_save=whole))
    shake(theirs, 1, "modules_to_save.")
    theirs.save_pretrained(tmp_path / "adapter")
    ours = huggingface.load_model(tmp_path / "adapter")
    torch.testing.assert_close(logits_of(ours, V + 4), logits_of(theirs, V + 4), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"an_option_of_tomorrow": 1}, "an_option_of_tomorrow"),
        ({"init_lora_weights": "pissa"}, "'pissa'"),
        ({"init_lora_weights": 1}, "init_lora_weights=1"),
        ({"peft_type": "IA3"}, "'IA3'"),
        ({"r": 0}, "rank=0"),
        ({"r": 4.0}, "rank=4.0 must"),
        ({"r": "4"}, "rank='4' must"),
        ({"lora_alpha": "8"}, "alpha='8' positive"),
        ({"lora_alpha": None}, "alpha=None positive"),
        ({"lora_alpha": "absent"}, "there is no 'lora_alpha'"),
        ({"r": "absent"}, "there is no 'r'"),
        ({"lora_dropout": None}, "dropout=None from"),
    ],
)
def test_adapters_that_mean_something_else_are_refused(tmp_path: Path, changes: dict, words: str) -> None:
    base, _, directory = ours_and_files(tmp_path, "lora", KINDS["attention"])
    path = directory / huggingface.ADAPTER_CONFIG
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}), encoding="utf-8")
    assert words in error_line(huggingface.load_weights, huggingface.load_model(base), directory)


def test_adapters_that_do_not_fit_are_refused_and_nothing_is_copied(tmp_path: Path) -> None:
    base, _, directory = ours_and_files(tmp_path, "lora", KINDS["attention"])
    good, file = load_file(directory / huggingface.ADAPTER_WEIGHTS), directory / huggingface.ADAPTER_WEIGHTS
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    other = key.replace("layers.0", "layers.9")
    model = huggingface.load_model(base)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for words, changed in {
        "layers.0.self_attn.q_proj.lora_A.weight is missing": {k: t for k, t in good.items() if k != key},
        "shape (3, 8) and not (3, 16)": good | {key: torch.zeros(3, 8)},
        "layers.9.self_attn.q_proj.lora_A.weight is unknown": good | {other: torch.ones(1)},
        "score.weight is unknown": good | {"base_model.model.score.weight": torch.ones(2)},
        "is I8 and not": good | {key: good[key].to(torch.int8)},
        "holds no adapters": {"base_model.model.model.norm.weight": torch.ones(16)},
    }.items():
        save_file(changed, file)
        assert words in error_line(huggingface.load_weights, model, directory)
        after = dict(model.named_parameters())
        assert before.keys() == after.keys() and all(torch.equal(p, after[name]) for name, p in before.items())
    file.rename(directory / "adapter_model.bin")
    assert ".bin can run code" in error_line(huggingface.load_weights, model, directory)
    (directory / huggingface.ADAPTER_CONFIG).write_text("[]", encoding="utf-8")
    assert "list" in error_line(huggingface.load_weights, model, directory)
    (directory / huggingface.ADAPTER_CONFIG).write_text("{", encoding="utf-8")
    assert "damaged" in error_line(huggingface.load_weights, model, directory)


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainable", ["lora", "embed,lora"])
@pytest.mark.parametrize("overlap", ["off", "forward", "backward"])
def test_ddp_and_its_optimizers_train_what_is_trainable(trainable: str, overlap: str) -> None:
    """Against torch's AdamW on a copy; what is frozen stays as it was, to the bit."""
    torch.manual_seed(0)
    model, reference = tiny(), tiny()
    for m in (model, reference):
        torch.manual_seed(1)
        lora.set_trainable(m, trainable, LoRAConfig(rank=4))
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    parallel = ddp.DDP(model, overlap_step=overlap)
    ours = Optimizer(parallel.buckets, weight_decay=0.0)
    parameters = [p for p in reference.parameters() if p.requires_grad]
    theirs = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), weight_decay=0)
    for step in range(4):
        idx = torch.randint(V, (2, 17), generator=torch.Generator().manual_seed(step))
        parallel.expect_step(ours, 1e-2)
        model(idx[:, :-1], idx[:, 1:]).div(32).backward()
        parallel.step(ours, lr=1e-2)
        theirs.zero_grad()
        reference(idx[:, :-1], idx[:, 1:]).div(32).backward()
        theirs.step()
    parallel.flush()
    expected = dict(reference.named_parameters())
    for name, p in model.named_parameters():
        if name in frozen:
            assert torch.equal(p, frozen[name]), name
        else:
            torch.testing.assert_close(p, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_muon_takes_whole_matrices_and_adamw_the_adapters() -> None:
    model = tiny()
    lora.set_trainable(model, "lora,down_proj", LoRAConfig(rank=4, modules=("q_proj", "o_proj")))
    parallel = ddp.DDP(model, whole_matrices=True)
    opt = Optimizer(parallel.buckets, "muon", weight_decay=0.0, muon_dtype=torch.float32)
    idx = torch.randint(V, (2, 17), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(12):
        loss = model(idx[:, :-1], idx[:, 1:]).div(32)
        loss.backward()
        parallel.step(opt, lr=2e-2)
        losses.append(loss.item())
    assert all(torch.isfinite(p).all() for p in model.parameters()) and losses[-1] < losses[0] - 0.5
    state = opt.state_dict()
    assert state.keys() == trained(model)
    for name, tensors in state.items():
        muon, adamw = {"momentum", "mean_square"}, {"exp_avg", "exp_avg_sq", "step"}
        assert tensors.keys() == (muon if "down_proj" in name else adamw)


ROWS = 4
OPTIONS = {
    "plain": {},
    "forward": {"overlap_step": "forward"},
    "backward": {"overlap_step": "backward"},
    "zero1": {"zero1": True},
    "zero1 forward muon": {"zero1": True, "overlap_step": "forward"},
}


def train_in_ranks(world: ranks.World, how: str) -> dict[str, torch.Tensor]:
    """Four steps on this rank's rows of the same batches; -> all weights."""
    kind = "muon" if "muon" in how else "adamw"
    torch.manual_seed(1)
    model = tiny()
    lora.set_trainable(model, "lora,embed,mlp", LoRAConfig(rank=4, modules=("q_proj", "v_proj", "o_proj")))
    parallel = ddp.DDP(model, bucket_mb=1e-3, whole_matrices=kind == "muon", **OPTIONS[how])
    opt = Optimizer(parallel.buckets, kind, muon_dtype=torch.float32)
    for step in range(4):
        idx = torch.randint(V, (ROWS, 17), generator=torch.Generator().manual_seed(step))
        mine = idx.chunk(world.world_size)[world.rank]
        parallel.expect_step(opt, 1e-2)
        (model(mine[:, :-1], mine[:, 1:]) * (world.world_size / (ROWS * 16))).backward()
        parallel.step(opt, lr=1e-2)
    parallel.flush()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def save_in_ranks(folder: Path, world: ranks.World, report: Callable) -> None:
    for how in OPTIONS:
        torch.save(train_in_ranks(world, how), folder / f"{how} {world.rank}.pt")


@pytest.mark.dist
def test_two_ranks_train_adapters_as_one_does(tmp_path: Path) -> None:
    reports, exit_codes = start_ranks(functools.partial(save_in_ranks, tmp_path), 2, tmp_path)
    assert exit_codes == [0, 0], reports
    alone = ranks.World(rank=0, local_rank=0, world_size=1)
    for how in OPTIONS:
        expected = train_in_ranks(alone, how)
        for rank in range(2):
            found = torch.load(tmp_path / f"{how} {rank}.pt", weights_only=True)
            assert found.keys() == expected.keys()
            for name, p in found.items():
                torch.testing.assert_close(p, expected[name], rtol=1e-3, atol=2e-5, msg=f"{how} {rank} {name}")


# ---- frozen weights in bfloat16 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainable", ["lora", "embed,lm_head,lora", "all"])
def test_a_base_of_bfloat16_is_held_in_it_and_computes_the_same_bits(tmp_path: Path, trainable: str) -> None:
    """Weights that are published in bfloat16 lose nothing; what is trained stays float32."""
    base = hf_base(tmp_path, "qwen2")
    Qwen2ForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    held, found = lora.frozen_dtype(trainable, torch.bfloat16), []
    assert held == (torch.float32 if trainable == "all" else torch.bfloat16)
    assert lora.frozen_dtype(trainable, torch.float32) == torch.float32
    for dtype in (torch.float32, held):
        with lora.weights_in(dtype):
            model = Transformer(huggingface.load_config(base))
        lora.set_trainable(model, trainable, LoRAConfig(rank=4, alpha=8, modules=("q_proj", "up_proj")))
        huggingface.load_start(model, base, V, None)  # no token is new
        shake(model, 1, "lora")
        idx = torch.randint(V, (2, 16), generator=torch.Generator().manual_seed(7))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(idx[:, :-1], idx[:, 1:])
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        found.append({"loss": loss.detach()} | grads)
        in_half = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad and p.ndim == 2}
        assert in_half == (frozen if dtype == torch.bfloat16 else set())
    assert torch.get_default_dtype() == torch.float32
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("trainable", ["lora", "embed,lm_head,lora"])
def test_a_save_and_a_resume_give_the_same_model(tmp_path: Path, trainable: str) -> None:
    """Frozen weights come from the base, the rest from the adapter's files; a base that has changed is refused."""
    tokenizer = train(["a b c"], 384)
    base, step = tmp_path / "base", tmp_path / "step"
    for directory in (base, step):
        directory.mkdir()
    huggingface.write_model(base, tiny(vocab_size=384), tokenizer)
    model = tiny(vocab_size=384)
    lora.set_trainable(model, trainable, LoRAConfig(rank=4))
    huggingface.load_start(model, base, 384, tokenizer)
    shake(model, 1, "lora")
    assert huggingface.frozen_base(model, base, None) == str(base)
    huggingface.write_model(step, model, tokenizer, base)
    again = tiny(vocab_size=384)
    lora.set_trainable(again, trainable, LoRAConfig(rank=4))
    huggingface.load_weights(again, step)
    params = dict(again.named_parameters())
    assert all(torch.equal(p, params[name]) for name, p in model.named_parameters())
    assert huggingface.frozen_base(again, tmp_path, step) == str(base)
    first = {path.name: path.read_bytes() for path in step.iterdir()}
    huggingface.write_model(step, again, tokenizer, base)
    assert first == {path.name: path.read_bytes() for path in step.iterdir()}
    huggingface.write_model(base, shake(tiny(vocab_size=384), 2), tokenizer)
    assert "not those that" in error_line(huggingface.load_model, step)


def test_a_longer_block_than_the_models_says_how_to_train_for_it(tmp_path: Path, capsys) -> None:
    """The advice to raise block_size and this warning led in circles."""
    path = hf_base(tmp_path / "base")
    settings = {"block_size": 64, "batch_size": 3}
    assert huggingface.tuned_config(path, V, settings, 0.0).block_size == 64
    said = capsys.readouterr().err
    assert "block_size=64 exceeds the 32 tokens of" in said
    assert said.endswith("; for longer texts pretrain and fine-tune with --block_size=64\n")


def test_the_flags_of_shorter_rows_contradict_no_other_setting(monkeypatch) -> None:
    """One line of flags: the run that has them is not refused for what they changed."""
    settings = {"batch_size": 8, "total_batch_tokens": 32_768, "max_new_tokens": 256}
    assert huggingface.flags_for_rows(settings, 512) == "--block_size=512"
    wanted = "--block_size=192 --total_batch_tokens=33792 --max_new_tokens=96"
    assert huggingface.flags_for_rows(settings, 192) == wanted and 33_792 % (8 * 192) == 0
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert huggingface.flags_for_rows(settings, 512) == "--block_size=512 --total_batch_tokens=36864"
    assert huggingface.flags_for_rows({"batch_size": 4, "total_batch_tokens": 0}, 7) == "--block_size=7"
