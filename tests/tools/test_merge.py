"""tools/merge.py against peft's merge_and_unload, as a command and as a function; what is left after a failure."""

import json
import os
import resource
import sys
from pathlib import Path

import forks
import merge
import pytest
import saved
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from groundup.errors import UserError
from groundup.tokens.training import train
from groundup.train import checkpoint, huggingface, lora
from model import ModelConfig, Transformer
from tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
TOKENIZER = train(["Hello world, 你好世界！\n"] * 20, vocab_size=384)
V = TOKENIZER.vocab_size


@torch.no_grad()
def changed(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            p.normal_(1.0 if p.ndim == 1 else 0.0, 0.3, generator=generator)
    return model


def save(out_dir: Path, model: Transformer, base: Path | str = "") -> Path:
    return saved.save(out_dir, 1, model, TOKENIZER, base=base)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with adapters, on a base with tied embeddings."""
    cfg = ModelConfig(vocab_size=V, block_size=32, n_layer=2, n_head=4, n_kv_head=2, n_embd=16, ffn_dim=24)
    base = save(tmp_path / "base", changed(Transformer(cfg), 0))
    model = huggingface.load_model(base)
    lora.set_trainable(model, "embed,lora", lora.LoRAConfig(rank=4, alpha=6))
    save(tmp_path / "run", changed(model, 1), base)
    return tmp_path / "run"


def pefts(run: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    step = checkpoint.resolve(run)
    base = AutoModelForCausalLM.from_pretrained(huggingface.base_of(step))
    return PeftModel.from_pretrained(base, step).merge_and_unload().to(dtype)


def error_line(*args: str) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - several kinds, each of one line
        merge.write(*args)
    assert isinstance(caught.value, UserError) and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_directory_holds_what_peft_merges_to_and_nothing_of_training(run: Path, dtype: str) -> None:
    out = run.parent / "deep" / "merged"
    assert merge.write(str(run), str(out), dtype)[1] == out
    assert set(os.listdir(out)) == {"config.json", "generation_config.json", "model.safetensors", *TOKENIZER.files}
    stored, expected = load_file(out / "model.safetensors"), pefts(run, getattr(torch, dtype)).state_dict()
    assert stored.keys() == expected.keys() - {"lm_head.weight"}  # tied
    assert all(torch.equal(t, expected[name]) and t.dtype == getattr(torch, dtype) for name, t in stored.items())
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == getattr(torch, dtype) and loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(out)("你好 world")["input_ids"] == TOKENIZER.encode("你好 world")
    if dtype == "float32":
        for kind in (torch.float32, torch.bfloat16):  # also where evaluate.py opens both in bfloat16
            models = [huggingface.load_model(source, dtype=kind) for source in (out, checkpoint.resolve(run))]
            pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


@pytest.mark.slow
def test_the_command(run: Path) -> None:
    out = run.parent / "merged"
    out.mkdir()  # an empty directory is as good as none
    command = [sys.executable, ROOT / "tools/merge.py", f"--init_from={run}", f"--out_dir={out}"]
    done = forks.run(command, capture_output=True, encoding="utf-8")
    assert done.returncode == 0 and not done.stderr, done.stderr
    n = sum(t.numel() for t in load_file(out / "model.safetensors").values())
    assert f"{n:,} parameters" in done.stdout and str(out) in done.stdout
    again = forks.run(command, capture_output=True, encoding="utf-8")
    assert again.returncode == 1 and "is not empty" in again.stderr and again.stderr.count("\n") == 1
    assert "; delete it first, or give another out_dir" in again.stderr
    assert sorted(path.name for path in run.parent.iterdir()) == ["base", "merged", "run"]


def test_an_adapter_of_pefts_gets_the_tokenizer_of_its_base(run: Path) -> None:
    adapter, out = run.parent / "adapter", run.parent / "merged"
    step = checkpoint.resolve(run)
    base = AutoModelForCausalLM.from_pretrained(huggingface.base_of(step))
    PeftModel.from_pretrained(base, step).save_pretrained(adapter)
    assert not (adapter / "tokenizer.json").exists()
    merge.write(str(adapter), str(out), "float32")
    assert Tokenizer.load(out).fingerprint() == TOKENIZER.fingerprint()
    expected = pefts(run).state_dict()
    assert all(torch.equal(t, expected[name]) for name, t in load_file(out / "model.safetensors").items())


def test_a_checkpoint_without_adapters_is_exported(run: Path) -> None:
    out = run.parent / "plain"
    merge.write(str(run.parent / "base"), str(out), "bfloat16")
    expected = load_file(run.parent / "base" / "step_000001" / "model.safetensors")
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == expected.keys() and all(torch.equal(t, expected[k].bfloat16()) for k, t in stored.items())
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))["dtype"] == "bfloat16"


def test_mistakes_are_one_line_and_leave_nothing(run: Path) -> None:
    out, full, file = run.parent / "out", run.parent / "full", run.parent / "file"
    full.mkdir()
    (full / "notes").touch()
    file.touch()
    assert "init_from is empty" in error_line("", str(out), "float32")
    assert "out_dir=''" in error_line(str(run), "", "float32")
    assert "Not a directory" in error_line(str(run), str(file), "float32")
    assert "is not empty" in error_line(str(run), str(full), "float32")
    assert "no such directory" in error_line(str(run / "nothing"), str(out), "float32")
    bare = run.parent / "bare"
    LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(bare)
    assert "no tokenizer" in error_line(str(bare), str(out), "float32")
    (run.parent / "base").rename(run.parent / "moved")
    assert "base_model_name_or_path" in error_line(str(run), str(out), "float32")
    assert sorted(path.name for path in run.parent.iterdir()) == ["bare", "file", "full", "moved", "run"]
    assert os.listdir(full) == ["notes"]


@pytest.mark.parametrize(("base", "more"), [
    ("org/Model-1B", "after: hf download org/Model-1B --local-dir=DIR"),
    ("/gone/model", ""),
    ("", ""),
])  # fmt: skip
def test_an_adapter_without_its_base_says_where_to_write_it(tmp_path, monkeypatch, base, more):
    """In peft's own the base is often a name of the hub."""
    monkeypatch.chdir(tmp_path)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": base}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"={base!r} is no model directory; write there where it is") as caught:
        checkpoint.resolve(tmp_path)
    assert str(caught.value).endswith(more or "where it is")


def test_no_room_leaves_nothing(run: Path) -> None:
    out, (soft, hard) = run.parent / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        assert "File too large" in error_line(str(run), str(out), "float32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in run.parent.iterdir()) == ["base", "run"]


def test_a_killed_merge_is_cleared_away(run: Path) -> None:
    temp = run.parent / ".out.tmp"
    temp.mkdir()
    (temp / "model.safetensors").write_bytes(b"half")
    merge.write(str(run), str(run.parent / "out"), "float32")
    assert not temp.exists() and (run.parent / "out" / "config.json").exists()
    with pytest.raises(UserError):
        merge.write(str(run), str(run.parent / "out"), "float32")
