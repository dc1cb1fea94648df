"""Whoever edits the blocks of model.py can use all the rest: parameters removed, renamed, added, in other shapes."""

import json
import runpy
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from test_model import random_model
from torch import Tensor

import model
from groundup.errors import UserError
from groundup.generate.completion import generate
from groundup.generate.decode import for_inference
from groundup.generate.sampling import SamplingParams
from groundup.kernels.attention import Layout, attention
from groundup.tokens.training import train
from groundup.train import config_json, fsdp, huggingface, lora
from groundup.train.device import autocast
from model import ModelConfig, Transformer

ROOT = Path(model.__file__).parent
CPU = torch.device("cpu")


class Renamed(model.Block):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg)
        self.ln_2 = self.post_attention_layernorm
        del self.post_attention_layernorm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layout)
        return x + self.mlp(self.ln_2(x))


class Squared(model.MLP):
    """No gate."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg)
        del self.gate_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())


class NanoGPT(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(cfg.n_embd, 4 * cfg.n_embd)
        self.c_proj = nn.Linear(4 * cfg.n_embd, cfg.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Scaled(model.MLP):
    """A parameter in float32 beside products in bfloat16."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg)
        self.scale = nn.Parameter(torch.ones(cfg.ffn_dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x) * self.scale)


class Gated(Scaled):
    """A gate that begins at 0, and a stack of matrices."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg)
        self.gain = nn.Parameter(torch.zeros(cfg.n_embd))
        self.experts = nn.Parameter(torch.full((2, cfg.n_embd, cfg.n_embd), 0.5))
        self.scale = nn.Parameter(torch.full((cfg.ffn_dim,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.gain) + self.gain * (x @ self.experts.sum(0))


class Halved(nn.Linear):
    """Not the product of an nn.Linear."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class Fused(model.Attention):
    """Query, key and value in one matrix; queries in float32; a constructor that reads values and mixes tensors."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg)
        del self.q_proj, self.k_proj, self.v_proj
        heads = torch.tensor([cfg.n_head, cfg.n_kv_head, cfg.n_kv_head])
        self.sizes = (heads * cfg.head_dim).tolist()
        self.register_buffer("rate", (torch.zeros(3) + torch.linspace(0.5, 1, 3)).mean(), persistent=False)
        self.c_attn = nn.Linear(cfg.n_embd, sum(self.sizes))
        self.o_proj = Halved(cfg.n_head * cfg.head_dim, cfg.n_embd, bias=False)
        self.q_scale = nn.Parameter(torch.ones(cfg.head_dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        B, T, _ = x.shape
        parts = self.c_attn(x).split(self.sizes, dim=-1)
        q, k, v = (part.view(B, T, -1, self.head_dim).transpose(1, 2) for part in parts)
        q, k = model.rotate(q * self.q_scale * self.rate, cos, sin), model.rotate(k, cos, sin)
        y = attention(q, k, v, layout)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


EDITS = {"Block": (Renamed,), "MLP": (Squared, NanoGPT, Scaled, Gated), "Attention": (Fused,)}
PLACES = {edit: place for place, edits in EDITS.items() for edit in edits}


@pytest.fixture
def edit(monkeypatch):
    """edit(cls): model.py with this class in the place of its own."""

    def forget() -> None:
        config_json.logits_of.cache_clear()
        config_json.say.cache_clear()

    def patch(cls: type) -> None:
        monkeypatch.setattr(model, PLACES[cls], cls)
        forget()

    yield patch
    monkeypatch.undo()
    forget()


def tiny(**changes: object) -> ModelConfig:
    sizes = {"vocab_size": 384, "block_size": 32, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32}
    return ModelConfig(**sizes | changes)


def saved(directory: Path, **changes: object) -> Transformer:
    net = random_model(tiny(**changes))
    huggingface.write_model(directory, net, train(["a b c"], 384))
    return net


@pytest.mark.parametrize("cls", PLACES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_comes_back_to_the_bit(tmp_path, edit, cls, tied):
    edit(cls)
    net = saved(tmp_path, tie_embeddings=tied)
    weights, again = (dict(of.named_parameters()) for of in (net, huggingface.load_model(tmp_path)))
    assert weights.keys() == again.keys() and all(torch.equal(p, again[name]) for name, p in weights.items())
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["model_type"] == "changed_llama"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cls", PLACES)
def test_what_is_generated_is_what_the_model_computes(tmp_path, edit, cls, dtype):
    """Also as serve.py holds it, with a cache, packed matrices, and several rows."""
    edit(cls)
    saved(tmp_path)
    net, prompts = huggingface.load_model(tmp_path, dtype=dtype).eval(), [[5, 6, 7], [8, 9, 10, 11]]
    params = SamplingParams(temperature=0.0, max_new_tokens=8, logprobs=1)
    with autocast(CPU, dtype), torch.no_grad():
        for result in generate(net, None, prompts, params):
            ids = result.prompt_ids + result.completions[0].ids
            logps = net(torch.tensor([ids]))[0].float().log_softmax(-1)[len(result.prompt_ids) - 1 : -1]
            drawn, each = result.completions[0].ids, result.completions[0].logprobs
            found = [logprobs[i] for i, logprobs in zip(drawn, each, strict=True)]
            want = logps.gather(1, torch.tensor(drawn).unsqueeze(1)).squeeze(1)
            tolerance = 1e-4 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(torch.tensor(found), want, atol=tolerance, rtol=0)


def test_what_a_constructor_gives_a_new_parameter_stays(edit):
    """Of matrices, biases and norms init_parameter decides; fsdp cannot keep the others."""
    edit(Gated)
    net = Transformer(tiny())
    mlp = net.layers[1].mlp
    assert mlp.gain.eq(0).all() and mlp.experts.eq(0.5).all() and mlp.scale.eq(3).all() and net.norm.weight.eq(1).all()
    with pytest.raises(UserError, match="fsdp' needs a line for layers.0.mlp.scale in model.py's init_parameter"):
        fsdp.draw(net)


def test_a_layer_with_a_forward_of_its_own_keeps_it(edit):
    edit(Fused)
    net = random_model(tiny())
    view = for_inference(net, torch.float32)
    assert type(view.layers[0].self_attn.o_proj) is Halved


def test_weights_that_do_not_fit_are_one_line(tmp_path, edit):
    edit(Scaled)
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    name = "model.layers.1.mlp.scale"
    for change, words in {
        "is missing": {},
        r"has shape \(3,\) and not \(128,\)": {name: torch.ones(3)},
        "layers.1.mlp.more is unknown": {name: stored[name], "model.layers.1.mlp.more": torch.ones(3)},
        "layers.2.mlp.scale is unknown": {name: stored[name], "model.layers.2.mlp.scale": torch.ones(3)},
    }.items():
        save_file({key: t for key, t in stored.items() if key != name} | words, path)
        with pytest.raises(UserError, match=change):
            huggingface.load_model(tmp_path)
    save_file(stored, path)


def test_adapters_are_for_the_matrices_that_are_there(tmp_path, edit):
    edit(NanoGPT)
    net = saved(tmp_path)
    with pytest.raises(UserError, match="q_proj, k_proj, v_proj, o_proj, c_fc, c_proj, got 'gate_proj', 'up_proj'"):
        lora.add_lora(net, lora.LoRAConfig(modules=("gate_proj", "up_proj", "q_proj")))
    cfg = lora.LoRAConfig(2, modules=("c_fc", "q_proj"))
    lora.set_trainable(net, "lora", cfg)
    assert {name for name, _ in lora.adapters(net)} == {
        f"layers.{i}.{name}" for i in range(2) for name in ("self_attn.q_proj", "mlp.c_fc")
    }
    whole = Transformer(tiny())
    lora.set_trainable(whole, "lora", lora.LoRAConfig(2))  # all that there are
    assert {name.rpartition(".")[2] for name, _ in lora.adapters(whole)} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"
    }  # fmt: skip
    (tmp_path / "adapter").mkdir()
    huggingface.write_model(tmp_path / "adapter", net, train(["a b c"], 384), base=tmp_path)
    again = huggingface.load_model(tmp_path / "adapter")
    idx = torch.arange(8).view(1, 8)
    torch.testing.assert_close(again(idx), net.eval()(idx), atol=1e-5, rtol=0)
    with pytest.raises(UserError, match=r"got 'o_proj'"):
        lora.set_trainable(fused(edit), "lora", lora.LoRAConfig(modules=("o_proj",)))


def fused(edit: Callable) -> Transformer:
    edit(Fused)
    return Transformer(tiny())


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch):
    """script(name, *flags): run it in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def start(name: str, *flags: str) -> None:
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        monkeypatch.setattr(sys, "argv", [name, *flags])
        try:
            runpy.run_path(str(ROOT / name), run_name="__main__")
        except SystemExit as end:
            assert not end.code, end.code

    yield start
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.slow
def test_a_run_resumes_to_the_bit_and_every_script_opens_it(script, edit, tmp_path, capsys):
    """In bfloat16, in which a CPU's own attention gets queries in float32 too."""
    edit(Squared)
    edit(Fused)
    straight, cut = tmp_path / "out", tmp_path / "cut"
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}), encoding="utf-8")
    made = [f"--input={tmp_path / 'text.jsonl'}", f"--out_dir={tmp_path / 'data'}", "--vocab_size=384", "--workers=1"]
    script("prepare.py", *made, "--val_fraction=0.2", "--near=0")
    sizes = ["--n_layer=2", "--n_head=4", "--n_embd=32", "--block_size=64", "--batch_size=2"]
    steps = ["--total_batch_tokens=128", "--max_steps=4", "--warmup_steps=1", "--save_every=2", "--keep_last=0"]
    flags = [f"--data_dir={tmp_path / 'data'}", *sizes, *steps, "--compile=False", "--device=cpu", "--dtype=bfloat16"]
    script("pretrain.py", f"--out_dir={straight}", *flags)
    cut.mkdir()
    for name in ("config.py", "log.jsonl"):
        shutil.copy(straight / name, cut)
    shutil.copytree(straight / "step_000002", cut / "step_000002")
    script("pretrain.py", f"--out_dir={cut}", *flags)
    one, other = (load_file(out / "step_000004/model.safetensors") for out in (straight, cut))
    assert "continuing" in capsys.readouterr().out and all(torch.equal(t, other[name]) for name, t in one.items())
    rows = [{"prompt": f"What is {i}?", "chosen": f"It is {i}.", "rejected": "No idea."} for i in range(20)]
    chats = [{"prompt": row["prompt"], "response": row["chosen"]} for row in rows]
    for name, data in (("pairs", rows), ("chats", chats)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, data)), encoding="utf-8")
    common = ["--device=cpu", "--dtype=bfloat16"]
    tuning = [*common, "--max_steps=2", "--compile=False", "--batch_size=2", "--block_size=64", "--val_fraction=0.2"]
    tuned = f"--out_dir={tmp_path / 'tuned'}"
    script("sft.py", f"--init_from={cut}", tuned, f"--data={tmp_path / 'chats.jsonl'}", "--eval_answers=2", *tuning)
    chosen, out = f"--data={tmp_path / 'pairs.jsonl'}", f"--out_dir={tmp_path / 'dpo'}"
    script("dpo.py", f"--init_from={tmp_path / 'tuned'}", out, chosen, *tuning)
    for directory in (cut, tmp_path / "dpo"):
        script("sample.py", f"--init_from={directory}", "--prompt=The", "--max_new_tokens=4", *common)
        script("evaluate.py", f"--init_from={directory}", f"--data={tmp_path / 'chats.jsonl'}", *common)
    said = capsys.readouterr()
    assert "perplexity" in said.out and "model.py" not in said.err
