"""tools/tour.py: its rows add up to what the model has, and docs/tour.md shows what it prints."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from groundup.errors import UserError

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import tour  # noqa: E402

from groundup.train.plan import flops_per_token  # noqa: E402
from model import ModelConfig, Transformer  # noqa: E402

SHAPES = [
    {"n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 64},
    {"n_layer": 1, "n_head": 2, "n_embd": 32, "qk_norm": True, "tie_embeddings": False},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_add_up_to_the_parameters_and_flops_of_the_model(shape):
    cfg = ModelConfig(300, 16, **shape)
    parameters = forward = 0
    for name, _, own, flops, _ in tour.rows_of(cfg, 2, 16):
        times = cfg.n_layer if name.startswith("layers.0.") else 1
        parameters, forward = parameters + times * own, forward + times * flops
    net = Transformer(cfg)
    assert parameters == sum(p.numel() for p in net.parameters())
    assert 3 * forward == flops_per_token(net, 16)


def test_shapes_are_those_of_a_real_forward_pass():
    cfg = ModelConfig(300, 16, **SHAPES[0])
    model, found = Transformer(cfg), {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, _, result, name=name: found.update({name: tuple(result.shape)}))
    model(torch.zeros(2, 16, dtype=torch.int64))
    rows = {name: shape for name, shape, *_ in tour.rows_of(cfg, 2, 16)}
    assert rows.pop("idx") == (2, 16) and rows.pop("layers.0.scores") == (2, 4, 16, 16)
    assert {name: found[name] for name in rows} == rows and len(rows) == 12


@pytest.fixture
def script(monkeypatch, capsys):
    """script(*flags) -> what tools/tour.py prints, in this process."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.chdir(ROOT)

    def run(*flags: str) -> str:
        monkeypatch.setattr(sys, "argv", ["tour.py", *flags])
        runpy.run_path(str(ROOT / "tools/tour.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_the_document_shows_what_is_printed(script):
    text = (ROOT / "docs/tour.md").read_text(encoding="utf-8")
    command = next(line for line in text.splitlines() if line.startswith("python tools/tour.py"))
    assert script(*command.split()[2:]).strip() in text


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A Llama of 2 blocks with block_size 64, as a config.json: nothing else of a checkpoint is looked at."""
    path = tmp_path_factory.mktemp("saved")
    shape = {
        "model_type": "llama", "vocab_size": 300, "max_position_embeddings": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16, "head_dim": 8, "intermediate_size": 40,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    for name, kind in (("model", "LlamaForCausalLM"), ("reward", "LlamaForSequenceClassification")):
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(shape | {"architectures": [kind]}), encoding="utf-8")
    return path


def test_a_checkpoint_has_its_own_shape_and_the_asked_length(script, saved):
    printed = script(f"--init_from={saved / 'model'}", "--batch_size=2", "--block_size=48", "--device=cpu")
    assert "2 x gate_proj                     (2, 48, 40) " in printed and "lm_head " in printed


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "--vocab_size=4096"),
        (["--init_from={0}/model", "--n_layer=3"], "n_layer=3 but {0}/model has 2; leave n_layer out"),
        (["--init_from={0}/reward"], "{0}/reward is a reward model"),
        (["--init_from={0}/none"], "{0}/none"),
    ],
)
def test_a_mistake_is_one_line(script, saved, flags, says):
    with pytest.raises(Exception, match=re.escape(says.format(saved))) as caught:
        script(*(flag.format(saved) for flag in flags))
    assert isinstance(caught.value, UserError) and "\n" not in str(caught.value)
