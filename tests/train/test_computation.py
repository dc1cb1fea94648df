"""Has model.py been edited? The recorded numbers are transformers', edits change them, rounding does not."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

import model
from groundup.errors import UserError
from groundup.generate import decode
from groundup.tokens.training import train
from groundup.train import checkpoint, config_json, huggingface
from model import ModelConfig, Transformer

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
silu = F.silu


def small(kind: str) -> ModelConfig:
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "model_type": kind}
    return ModelConfig(384, block_size=16, qk_norm=kind == "qwen3", qkv_bias=kind == "qwen2", **sizes)


@pytest.fixture(autouse=True)
def forget():
    yield
    config_json.logits_of.cache_clear()
    config_json.say.cache_clear()


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_recorded_numbers_are_transformers(kind):
    cfg = CONFIGS[kind](
        vocab_size=32, max_position_embeddings=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        hidden_size=64, head_dim=16, intermediate_size=64, rope_theta=10000.0, rms_norm_eps=0.1,
        tie_word_embeddings=False,
    )  # fmt: skip
    theirs = AutoModelForCausalLM.from_config(cfg).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_(config_json.fixed_values(name.removeprefix("model."), p.shape))
        found = theirs(torch.arange(12).view(1, 12)).logits[0, -1, ::4]
    torch.testing.assert_close(found, torch.tensor(config_json.PLAIN[kind]), atol=1e-4, rtol=0)
    assert config_json.is_plain(small(kind))


def other_rope(cfg: ModelConfig) -> torch.Tensor:
    return 500_000.0 ** -(torch.arange(0, cfg.head_dim, 2, dtype=torch.float32) / cfg.head_dim)


def eps_outside(self: model.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


def with_bias(self: model.MLP, cfg: ModelConfig, make=model.MLP.__init__) -> None:
    make(self, cfg)
    self.down_proj = torch.nn.Linear(cfg.ffn_dim, cfg.n_embd)


def parallel(self: model.Block, x: torch.Tensor, *inputs: object) -> torch.Tensor:
    return x + self.self_attn(self.input_layernorm(x), *inputs) + self.mlp(self.post_attention_layernorm(x))


EDITS = {
    "gelu": (F, "silu", F.gelu),
    "rope": (model, "rope_frequencies", other_rope),
    "eps": (model.RMSNorm, "forward", eps_outside),
    "bias": (model.MLP, "__init__", with_bias),
    "parallel": (model.Block, "forward", parallel),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_model_is_another_and_stays_the_same(monkeypatch, edit):
    tokenizer, cfg = train(["a b c"], 384), ModelConfig(384, block_size=16, n_layer=1, n_head=2, n_embd=16)
    plain = json.loads(json.dumps(config_json.to_hf_config(cfg, tokenizer)))
    assert config_json.is_plain(small("llama")) and config_json.is_plain(small("mistral"))
    config_json.logits_of.cache_clear()
    monkeypatch.setattr(*EDITS[edit])
    assert not config_json.is_plain(small("llama"))
    edited = json.loads(json.dumps(config_json.to_hf_config(cfg, tokenizer)))
    assert config_json.is_as_saved(edited, cfg) and not config_json.is_as_saved(plain, cfg)
    monkeypatch.undo()
    config_json.logits_of.cache_clear()
    assert not config_json.is_as_saved(edited, cfg) and config_json.is_as_saved(plain, cfg)


def test_a_new_setting_of_model_py_is_seen(monkeypatch, tmp_path):
    """With its default the model is plain; with another value transformers must refuse it."""

    @dataclasses.dataclass
    class Config(ModelConfig):
        act: str = "silu"

    class MLP(model.MLP):
        def __init__(self, cfg: Config) -> None:
            super().__init__(cfg)
            self.act = cfg.act

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = self.gate_proj(x)
            gate = F.relu(gate).square() if self.act == "relu2" else F.silu(gate)
            return self.down_proj(gate * self.up_proj(x))

    def with_act(hf: dict, path: Path, read=config_json.read_config) -> Config:
        return Config(**vars(read(hf, path)), act=hf.get("act", "silu"))

    monkeypatch.setattr(model, "MLP", MLP)
    monkeypatch.setattr(config_json, "SMALL", Config(**vars(config_json.SMALL)))
    monkeypatch.setattr(config_json, "read_config", with_act)
    tokenizer, sizes = train(["a b c"], 384), {"n_layer": 1, "n_head": 2, "n_embd": 16}
    kinds = {}
    for act in ("silu", "relu2"):
        cfg = Config(tokenizer.vocab_size, block_size=16, act=act, **sizes)
        hf = json.loads(json.dumps(config_json.to_hf_config(cfg, tokenizer) | {"act": act}))
        kinds[act] = hf["model_type"]
        assert config_json.is_as_saved(hf, with_act(hf, tmp_path)) and is_native(cfg) == (act == "silu")
        if act == "relu2":  # with the weights of the other
            assert not config_json.is_as_saved(hf, dataclasses.replace(cfg, act="silu"))
    assert kinds == {"silu": "llama", "relu2": "changed_llama"}


def is_native(cfg: ModelConfig) -> bool:
    return decode.is_native(cfg, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("logits", [None, 1, "no", [], [1.0] * 7, ["x"] * 8, [10**400] * 8, [[1.0]] * 8, {"a": 1.0}])
def test_damaged_numbers_are_not_those_of_this_model(logits):
    assert not config_json.is_as_saved({"logits_of_fixed_weights": logits}, small("llama"))


def test_rounding_threads_and_random_generators_change_nothing():
    state = torch.get_rng_state()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert config_json.is_plain(small("qwen3"))
        config_json.logits_of.cache_clear()
    with torch.device("meta"):
        assert config_json.is_plain(small("llama"))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    assert all(config_json.is_plain(small(kind)) for kind in CONFIGS)
    torch.set_num_threads(before)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_edited_model_is_not_saved_as_a_plain_one(tmp_path: Path, monkeypatch, capsys):
    """Nor does a run go on with another model.py; other loads say it, each in one line."""
    tokenizer = train(["a b c"], 384)
    cfg = ModelConfig(tokenizer.vocab_size, block_size=16, n_layer=1, n_head=2, n_embd=16)
    plain, changed = tmp_path / "plain", tmp_path / "changed"
    for directory in (plain, changed):
        if directory == changed:
            monkeypatch.setattr(F, "silu", F.gelu)
            config_json.logits_of.cache_clear()
            huggingface.check_saves(cfg, tokenizer)
            said = "checkpoint: this model.py computes something else than transformers' llama; only it can open "
            assert capsys.readouterr().err == said + "what is saved\n"
            with pytest.raises(UserError, match="else; put .* with --resume=never --overwrite=True"):
                checkpoint.check_model(plain, cfg)
        directory.mkdir()
        huggingface.write_model(directory, Transformer(cfg), tokenizer)
        checkpoint.check_model(directory, cfg)
    assert capsys.readouterr().err == ""
    AutoModelForCausalLM.from_pretrained(plain)
    with pytest.raises(ValueError, match="changed_llama"):
        AutoModelForCausalLM.from_pretrained(changed)
    monkeypatch.setattr(F, "silu", silu)
    config_json.logits_of.cache_clear()
    capsys.readouterr()  # bars of transformers
    why = f"{changed} is of a model.py that computed something else"
    with pytest.raises(UserError, match=f"{why}; put that model.py back"):
        huggingface.load_config(changed)
    for _ in range(2):
        assert huggingface.load_config(changed, to_train=True) == cfg
    assert capsys.readouterr().err == f"checkpoint: warning: {why}; training has to adapt its weights\n"
