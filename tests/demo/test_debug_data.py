"""The data and the model that the debug configurations make for themselves."""

import json
import sys
from itertools import islice
from pathlib import Path

import forks
import pytest
import torch

from configurator import defaults_of, read_file
from groundup.demo import debug_data, debug_model
from groundup.train import huggingface
from model import ModelConfig, Transformer
from tokenizer import Tokenizer, chat_ready

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("debug") / "debug"
    debug_model.make_debug_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def talks() -> list:
    """What docs_conversations begins with: to read the sources takes a second each time."""
    return list(islice(debug_data.docs_conversations(), 1400))


def test_rows_of_each_kind(folder, talks, monkeypatch):
    monkeypatch.setattr(debug_data, "docs_conversations", lambda: iter(talks))
    kinds = {"chats": "chat", "prompts": "rl", "pairs": "dpo"}
    for kind, name in kinds.items():
        path = folder / f"{name}.jsonl"
        debug_data.make_debug_rows(path, getattr(debug_data, f"debug_{kind}"))
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        assert len(rows) == 200
        if kind == "pairs":
            assert rows[0]["rejected"].split() == rows[0]["chosen"].split()[::-1]
        else:
            assert rows[0]["messages"][1]["role"] == "assistant"
    assert not list(folder.glob(".*"))


def test_the_model_has_the_random_weights_of_the_seed(folder):
    before = torch.random.get_rng_state()
    debug_model.make_debug_model(folder / "model")  # it is there
    assert torch.equal(torch.random.get_rng_state(), before)
    tokenizer = chat_ready(Tokenizer.load(folder))
    saved = Tokenizer.load(folder / "model")
    assert saved.fingerprint() == tokenizer.fingerprint() and saved.turn_end_id >= 0
    torch.manual_seed(1337)
    cfg = ModelConfig(tokenizer.vocab_size, 512, n_layer=2, n_head=4, n_kv_head=2, n_embd=64)
    wanted = Transformer(cfg).state_dict()
    found = huggingface.load_model(folder / "model").state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_several_processes_make_the_model_at_once(tmp_path):
    directory = tmp_path / "debug/model"
    code = f"from groundup.demo.debug_model import make_debug_model; make_debug_model({str(directory)!r})"
    runs = [forks.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(2)]
    assert [run.wait() for run in runs] == [0, 0]
    assert huggingface.load_config(directory).n_layer == 2
    assert not list(directory.parent.glob(".*"))


@pytest.mark.parametrize("script", ["pretrain", "sft", "dpo", "reward", "rl"])
def test_the_configurations_make_what_they_name(script, tmp_path, monkeypatch, folder, talks):
    monkeypatch.setattr(debug_data, "docs_conversations", lambda: iter(talks))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/debug").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    name = "debug" if script == "pretrain" else f"debug_{script}"
    config = read_file(str(ROOT / f"config/{name}.py"), defaults_of(ROOT / f"{script}.py"))
    if script == "pretrain":
        assert Path(config["data_dir"], "manifest.json").exists()
    else:
        assert Path(config["data"]).exists()
        assert Path(config["init_from"], "model.safetensors").exists()
