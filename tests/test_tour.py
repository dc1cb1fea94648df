"""tools/tour.py: its rows add up to what the model has, and docs/tour.md shows what it prints."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import tour  # noqa: E402

from model import ModelConfig, Transformer, flops_per_token  # noqa: E402

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
    assert parameters == sum(p.numel() for p in Transformer(cfg).parameters())
    assert 3 * forward == flops_per_token(cfg, 16)


def test_shapes_are_those_of_a_real_forward_pass():
    cfg = ModelConfig(300, 16, **SHAPES[0])
    model, found = Transformer(cfg), {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, _, result, name=name: found.update({name: tuple(result.shape)}))
    model(torch.zeros(2, 16, dtype=torch.int64))
    rows = {name: shape for name, shape, *_ in tour.rows_of(cfg, 2, 16)}
    assert rows.pop("idx") == (2, 16) and rows.pop("layers.0.scores") == (2, 4, 16, 16)
    assert {name: found[name] for name in rows} == rows and len(rows) == 12


def test_the_document_shows_what_is_printed():
    command = [sys.executable, ROOT / "tools/tour.py", "config/demo.py", "--vocab_size=4096"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.strip() in (ROOT / "docs/tour.md").read_text(encoding="utf-8")


def test_a_missing_vocabulary_is_one_line():
    done = subprocess.run([sys.executable, ROOT / "tools/tour.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "--vocab_size=4096" in done.stderr
