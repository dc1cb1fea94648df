"""model.py against transformers' Llama and Qwen3, plain torch, and hand arithmetic."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import model
from groundup.errors import UserError
from groundup.generate.kv_cache import KVCache
from groundup.tokens import documents as docs
from groundup.train import device as devices
from groundup.train.base import new_model
from groundup.train.lora import MODULES, LoRAConfig, set_trainable, trainable_table
from groundup.train.plan import flops_per_token, memory_table, parameter_table
from model import IGNORE, ModelConfig, Transformer, cross_entropy, token_scores

LLAMA31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SHAPES = {
    "llama": {},
    "llama tied": {"tie_embeddings": True},
    "llama grouped queries": {"n_kv_head": 2},
    "llama one key head, own head_dim": {"n_kv_head": 1, "head_dim": 24, "ffn_dim": 80},
    "llama 3.1 frequencies": {"n_kv_head": 2, "rope_theta": 500000.0, "rope_scaling": LLAMA31_ROPE},
    "qwen3": {"qk_norm": True, "n_kv_head": 2, "head_dim": 32, "rope_theta": 1e6, "norm_eps": 1e-6},
    "qwen3 tied": {"qk_norm": True, "tie_embeddings": True},
    "qwen2": {"qkv_bias": True, "n_kv_head": 2, "rope_theta": 1e6, "rope_scaling": YARN},
}


def tiny_config(**changes: object) -> ModelConfig:
    base = {"vocab_size": 97, "block_size": 64, "n_layer": 2, "n_head": 4, "n_embd": 64, "tie_embeddings": False}
    return ModelConfig(**(base | changes))


def random_model(cfg: ModelConfig, seed: int = 0) -> Transformer:
    """Weights large enough for attention and softmax to be far from uniform; norm weights other than 1."""
    net = Transformer(cfg)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            if p.ndim == 1:
                p.uniform_(0.5, 1.5, generator=generator)
            else:
                p.normal_(std=0.1, generator=generator)
    return net


def random_ids(cfg: ModelConfig, B: int, T: int, seed: int = 1) -> Tensor:
    return torch.randint(cfg.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def batch_with_ignored(cfg: ModelConfig, B: int = 3, T: int = 11) -> tuple[Tensor, Tensor]:
    x, y = random_ids(cfg, B, T), random_ids(cfg, B, T, seed=2)
    y[0, 3:7], y[2, -1] = IGNORE, IGNORE
    return x, y


def gradients(net: Transformer, loss: Tensor) -> dict[str, Tensor]:
    net.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad for name, p in net.named_parameters()}


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


# ---- logits ---------------------------------------------------------------------------------------------------------


def as_transformers(net: Transformer) -> torch.nn.Module:
    """The same weights in transformers' own class, with its eager attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    cfg = net.cfg
    hf = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            cfg.model_type,
            vocab_size=cfg.vocab_size,
            hidden_size=cfg.n_embd,
            intermediate_size=cfg.ffn_dim,
            num_hidden_layers=cfg.n_layer,
            num_attention_heads=cfg.n_head,
            num_key_value_heads=cfg.n_kv_head,
            head_dim=cfg.head_dim,
            max_position_embeddings=cfg.block_size,
            rms_norm_eps=cfg.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_theta} | (cfg.rope_scaling or {}),
            tie_word_embeddings=cfg.tie_embeddings,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        ),
        attn_implementation="eager",
    )
    weights = {name if name == "lm_head.weight" else "model." + name: p for name, p in net.state_dict().items()}
    hf.load_state_dict(weights, strict=True)
    return hf.eval()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(shape):
    net = random_model(tiny_config(**SHAPES[shape]))
    idx = random_ids(net.cfg, 2, 64)
    with torch.no_grad():
        want = as_transformers(net)(idx).logits
        got = net(idx)
    assert want.std() > 0.5  # else 1e-5 would say nothing
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def eager_attention(q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0, enable_gqa=False) -> Tensor:
    """softmax(q k^T / sqrt(D) + mask) v with the (T, S) matrix written out."""
    assert dropout_p == 0.0
    groups = q.shape[1] // k.shape[1]
    assert enable_gqa == (groups > 1)
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    return torch.matmul(scores.softmax(dim=-1), v)


@pytest.mark.parametrize("shape", ["llama", "llama grouped queries", "qwen3"])
def test_fused_eager_and_cached_attention_agree(shape, monkeypatch):
    net = random_model(tiny_config(**SHAPES[shape]))
    idx = random_ids(net.cfg, 2, 20)
    with torch.no_grad():
        fused = net(idx)
        cache = KVCache(net.cfg, 2, 20, "cpu", torch.float32)
        steps = [cache.step(torch.tensor([t, t]), 20) for t in range(20)]
        token_by_token = torch.cat([net(idx[:, t : t + 1], cache=step) for t, step in enumerate(steps)], dim=1)
        cache = KVCache(net.cfg, 2, 20, "cpu", torch.float32)
        chunks = [cache.chunk(0, 7), cache.chunk(7, 1), cache.chunk(8, 12)]
        pieces = zip(idx.split([7, 1, 12], dim=1), chunks, strict=True)
        in_pieces = torch.cat([net(piece, cache=chunk) for piece, chunk in pieces], dim=1)
        monkeypatch.setattr(F, "scaled_dot_product_attention", eager_attention)
        eager = net(idx)
    for other in (eager, token_by_token, in_pieces):
        torch.testing.assert_close(other, fused, atol=2e-5, rtol=1e-5)


def test_cache_refuses_more_than_it_holds():
    cfg = tiny_config()
    cache = KVCache(cfg, 1, 4, "cpu", torch.float32)
    with pytest.raises(AssertionError, match="4 positions, 5 asked"):
        Transformer(cfg)(random_ids(cfg, 1, 5), cache=cache.chunk(0, 5))


# ---- documents ------------------------------------------------------------------------------------------------------

LENGTHS = [5, 1, 17, 2, 7]  # of the documents of a row, delimiter included


def rows_of_documents(cfg: ModelConfig, delimiter: int = 96) -> tuple[Tensor, Tensor]:
    """Two rows of 32: the documents one after the other, and, as a window has them, begun in the midst of one."""
    documents = random_ids(cfg, 1, 32)[0] % delimiter
    starts = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
    documents[starts] = delimiter
    return documents, torch.cat((documents[3:], documents[:3]))


def alone(net: Transformer, row: Tensor, delimiter: int = 96) -> Tensor:
    """Logits of each document of the row by itself; a delimiter behind another one opens none."""
    borders = [0, *(t for t in range(1, len(row)) if row[t] == delimiter != row[t - 1]), len(row)]
    net.document_id = None
    return torch.cat([net(row[a:b].unsqueeze(0))[0] for a, b in zip(borders, borders[1:], strict=False)])


@pytest.mark.parametrize("shape", ["llama", "llama grouped queries", "qwen3", "llama 3.1 frequencies"])
def test_documents_of_a_row_are_as_if_alone(shape):
    net = random_model(tiny_config(**SHAPES[shape]))
    rows = rows_of_documents(net.cfg)
    with torch.no_grad():
        want = torch.stack([alone(net, row) for row in rows])
        unconfined = net(torch.stack(rows))
        net.document_id = 96
        got = net(torch.stack(rows))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(unconfined[0, :5], got[0, :5], atol=1e-5, rtol=1e-5)  # the first document
    assert (unconfined - want).abs()[:, 8:].amax(dim=-1).min() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("way", ["eager", "checkpointed", "compiled"])
def test_gradients_of_documents_are_as_if_alone(way):
    net = random_model(tiny_config(n_kv_head=2))
    rows = torch.stack(rows_of_documents(net.cfg))
    targets = random_ids(net.cfg, 2, 32, seed=5)
    logits = torch.cat([alone(net, row) for row in rows])
    want = gradients(net, F.cross_entropy(logits, targets.flatten(), reduction="sum"))
    net.document_id = 96
    net.activation_checkpointing = way == "checkpointed"
    if way == "compiled":
        torch._dynamo.reset()
        net.compile_blocks(lambda f: torch.compile(f, backend="aot_eager", dynamic=False))
    got = gradients(net, net(rows, targets))
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-5, name


def test_documents_in_bfloat16():
    net = random_model(tiny_config(n_kv_head=2))
    rows = rows_of_documents(net.cfg)
    with torch.no_grad():
        want = torch.stack([alone(net, row) for row in rows])
        net.document_id = 96
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert relative_error(net(torch.stack(rows)), want) < 0.02


def test_a_document_mask_is_that_of_the_offsets():
    row, window = rows_of_documents(tiny_config())
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])  # as in the .off.npy beside a shard
    segment = torch.searchsorted(starts, torch.arange(32), right=True)
    begins = docs.starts_of((torch.stack((row, window)) == 96).cumsum(1))
    added = docs.mask_of(begins, torch.bfloat16)
    assert added.shape == (2, 1, 32, 32) and added.dtype == torch.bfloat16
    assert set(added.unique().tolist()) == {0.0, -float("inf")}
    got = added == 0
    for i in range(32):
        for j in range(32):
            assert got[0, 0, i, j].item() == (j <= i and segment[i].item() == segment[j].item())
    segment = torch.cat((segment[3:], 10 + segment[:3]))
    assert torch.equal(got[1, 0], (segment[:, None] == segment).tril())


# Two rows of conversations with padding behind, as packing makes them. Numbers may come again after another one.
NUMBERS = [[(0, 9), (1, 1), (2, 14), (-1, 8)], [(0, 20), (1, 3), (0, 9)]]


def packed() -> Tensor:
    return torch.tensor([[number for number, length in row for _ in range(length)] for row in NUMBERS])


def runs(documents: Tensor) -> list[tuple[int, int, int]]:
    """(row, begin, end) of each document, found token by token."""
    found = []
    for b, row in enumerate(documents.tolist()):
        borders = [t for t in range(len(row)) if t == 0 or row[t] != row[t - 1]]
        found += [(b, *pair) for pair in zip(borders, [*borders[1:], len(row)], strict=True)]
    return found


def test_positions_lengths_and_borders_of_documents():
    documents = packed()
    starts = docs.starts_of(documents)
    positions, lengths, borders = torch.zeros_like(documents), torch.zeros_like(documents), []
    for b, begin, end in runs(documents):
        positions[b, begin:end], lengths[b, begin:end] = torch.arange(end - begin), end - begin
        borders.append(32 * b + begin)
    assert torch.equal(docs.positions_of(starts), positions)
    assert torch.equal(docs.lengths_of(starts), lengths)
    assert len(borders) == 7
    with pytest.raises(RuntimeError, match="over 4 documents in 64 tokens: most_documents is too low"):
        docs.borders_of(starts, 4)
    few = starts.clone()
    few[0, 9], few[1, 20:] = False, False
    few[0, 24] = False
    got = docs.borders_of(few, 4)
    assert got.dtype == torch.int32 and got.tolist() == [0, 10, 32, 64, 64]  # one more could begin


@pytest.mark.parametrize("longest", [0, 512], ids=["one by one", "masked"])
@pytest.mark.parametrize("shape", ["llama", "llama grouped queries", "qwen3"])
def test_packed_conversations_are_as_if_alone(shape, longest, monkeypatch):
    """Losses and gradients of the documents given by number, each against a call of its own."""
    monkeypatch.setattr(model, "MASKED_LENGTH", longest)
    net = random_model(tiny_config(**SHAPES[shape]))
    documents, x, y = packed(), random_ids(net.cfg, 2, 32), random_ids(net.cfg, 2, 32, seed=5)
    y[documents == -1] = IGNORE
    y[0, :5] = IGNORE
    parts = runs(documents)
    alone = sum(net(x[b : b + 1, i:j], y[b : b + 1, i:j]) for b, i, j in parts)
    want, got = gradients(net, alone), net(x, y, documents=documents)
    torch.testing.assert_close(got, alone, rtol=1e-6, atol=0)
    got = gradients(net, got)
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-5, name
    with torch.no_grad():
        whole = net(x, documents=documents)
        for b, i, j in parts:
            assert relative_error(whole[b, i:j], net(x[b : b + 1, i:j])[0]) < 2e-6
        net.document_id = 96  # numbers that are given come first
        assert torch.equal(net(x, documents=documents), whole)


def test_packed_conversations_equal_transformers_with_positions():
    """transformers takes documents from positions that begin anew, without a cache."""
    net = random_model(tiny_config(n_kv_head=2))
    documents, x = packed(), random_ids(net.cfg, 2, 32)
    positions = docs.positions_of(docs.starts_of(documents))
    hf = as_transformers(net)
    hf.set_attn_implementation("sdpa")
    with torch.no_grad():
        got = net(x, documents=documents)
        for b in range(2):  # it looks for them in batches of one row only
            want = hf(x[b : b + 1], position_ids=positions[b : b + 1], use_cache=False).logits[0]
            torch.testing.assert_close(got[b], want, atol=1e-5, rtol=1e-5)


def plain_varlen(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, enable_gqa=False) -> Tensor:
    """torch's varlen_attn, document by document, with causal windows as it has them."""
    assert window_size == (-1, 0) and enable_gqa == (q.shape[1] != k.shape[1]) and cu_seq_q is cu_seq_k
    assert cu_seq_q.dtype == torch.int32 and cu_seq_q[0] == 0 and cu_seq_q[-1] == len(q) == len(k) == len(v)
    parts, borders = [], cu_seq_q.tolist()
    for begin, end in zip(borders, borders[1:], strict=False):
        assert 0 <= end - begin <= min(max_q, max_k)
        if end > begin:
            one = (t[begin:end].transpose(0, 1).unsqueeze(0) for t in (q, k, v))  # (1, heads, length, D)
            parts.append(eager_attention(*one, is_causal=True, enable_gqa=enable_gqa)[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("shape", ["llama", "llama grouped queries", "qwen3"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("shares_keys", [True, False])
def test_attention_by_borders_equals_that_by_mask(shape, checkpointing, shares_keys, monkeypatch):
    """With as many borders as there are documents. shares_keys: torch 2.11's kernel has no enable_gqa."""
    import torch.nn.attention.varlen

    monkeypatch.setattr(model, "VARLEN_SHARES_KEYS", shares_keys)
    net = random_model(tiny_config(**SHAPES[shape]))
    net.activation_checkpointing = checkpointing
    documents, x, y = packed(), random_ids(net.cfg, 2, 32), random_ids(net.cfg, 2, 32, seed=5)
    net.varlen = False
    masked = net(x, y, documents=documents)
    want = gradients(net, masked)
    net.varlen, net.most_documents = True, max(len(row) for row in NUMBERS)
    monkeypatch.setattr(model, "MASKED_LENGTH", 0)
    monkeypatch.setattr(
        model, "attention_by_document", lambda q, k, v, borders, _: model.flash_attention(q, k, v, borders)
    )
    calls = []

    def varlen_attn(*args, **options):
        assert ("enable_gqa" in options) == (shares_keys and net.cfg.n_kv_head < net.cfg.n_head)
        calls.append(len(args[3]))
        return plain_varlen(*args, **options)

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
    bordered = net(x, y, documents=documents)
    got = gradients(net, bordered)
    assert calls == [2 * net.most_documents + 1] * 2 * (1 + checkpointing)  # layers, once more in backward
    torch.testing.assert_close(bordered, masked, rtol=1e-6, atol=0)
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-5, name
    net.varlen = False
    assert torch.equal(net(x, y, documents=documents), masked)


def test_blocks_with_borders_compile_to_one_graph_for_any_documents(monkeypatch):
    """varlen_attn itself, whose kernel is a GPU's: traced, not run."""
    import torch.nn.attention.varlen  # noqa: F401

    monkeypatch.setattr(model, "MASKED_LENGTH", 0)
    monkeypatch.setattr(
        model, "attention_by_document", lambda q, k, v, borders, _: model.flash_attention(q, k, v, borders)
    )
    net, graphs = random_model(tiny_config(n_kv_head=2)), []

    def backend(graph, _inputs):
        graphs.append({node.target for node in graph.graph.nodes if node.op == "call_function"})
        return lambda *args: (torch.zeros(2, 32, 64),)

    net.compile_blocks(lambda f: torch.compile(f, backend=backend, dynamic=False, fullgraph=True))
    torch._dynamo.reset()
    with torch.no_grad():
        for length in (32, 16, 20):
            net(random_ids(net.cfg, 2, 32), documents=(torch.arange(32) // length).expand(2, -1))
    assert len(graphs) == 2 and any("_varlen_attn" in str(target) for target in graphs[0])  # and the last norm


@pytest.mark.slow
@pytest.mark.parametrize("varlen", [True, False])
def test_a_model_compiled_whole_is_one_graph_for_any_documents(varlen, monkeypatch):
    """Whatever their number: one that is read would break the graph."""
    import torch.nn.attention.varlen  # noqa: F401

    monkeypatch.setattr(model, "MASKED_LENGTH", 0)
    monkeypatch.setattr(
        model, "attention_by_document", lambda q, k, v, borders, _: model.flash_attention(q, k, v, borders)
    )
    net, graphs = random_model(tiny_config(n_kv_head=2)), []
    net.varlen, net.document_id = varlen, 96

    def backend(graph, _inputs):
        graphs.append(graph)
        return lambda *args: (torch.zeros(2, 32, 97),)

    torch._dynamo.reset()
    whole = torch.compile(net, backend=backend, dynamic=False, fullgraph=True)
    with torch.no_grad():
        for row in rows_of_documents(net.cfg):
            whole(row.expand(2, -1))
    assert len(graphs) == 1


@pytest.mark.parametrize("varlen", [None, True, False])
def test_what_a_device_can_do_is_asked_only_where_nobody_has_said(varlen, monkeypatch):
    """For asking breaks the graph of a model that is compiled whole. On meta, which is no CPU."""
    asked = []
    monkeypatch.setattr(model, "can_border", lambda *args: asked.append(args) or True)
    net = random_model(tiny_config())
    net.varlen = varlen
    mask, borders = net.confine(torch.ones(2, 32, dtype=torch.bool, device="meta"), torch.bfloat16)
    assert len(asked) == (varlen is None) and (mask is None) == (varlen is not False) == (borders is not None)


def test_filling_is_one_document():
    idx = torch.tensor([[9, 1, 2, 9, 3, 9, 9, 9], [1, 2, 9, 9, 9, 9, 3, 4]])
    assert docs.documents_of(idx, 9).tolist() == [[1, 1, 1, 2, 2, 3, 3, 3], [0, 0, 1, 1, 1, 1, 1, 1]]


def test_cudnns_attention_comes_first_from_hopper_on(monkeypatch):
    order, precision = torch._C._get_sdp_priority_order(), torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for capability, first in (((8, 9), order[0]), ((9, 0), torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        devices.choose_device("cuda")
        assert torch._C._get_sdp_priority_order()[0] == first
    devices.ATTENTION.close()
    torch.set_float32_matmul_precision(precision)
    assert torch._C._get_sdp_priority_order() == order


def test_who_has_no_flash_attention_takes_the_mask():
    assert not docs.can_border(torch.device("cpu"), torch.bfloat16, 64)
    assert not docs.can_border(torch.device("cuda"), torch.float32, 64)
    assert not docs.can_border(torch.device("cuda"), torch.bfloat16, 36)
    assert not docs.can_border(torch.device("cuda"), torch.bfloat16, 264)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", ["llama", "llama grouped queries", "qwen3"])
@pytest.mark.parametrize("compiled", [False, True])
def test_flash_attention_by_borders_equals_the_mask_on_a_gpu(shape, compiled):
    net = random_model(tiny_config(**{**SHAPES[shape], "block_size": 512})).cuda()
    x, y = random_ids(net.cfg, 4, 512).cuda(), random_ids(net.cfg, 4, 512, seed=5).cuda()
    batches = [torch.arange(512).div(length, rounding_mode="floor").expand(4, -1).cuda() for length in (100, 37, 512)]
    net.varlen = False
    exact = [gradients(net, net(x, y, documents=documents)) for documents in batches]
    results = {}
    for varlen in (False, True):
        net.varlen = varlen
        if varlen and compiled:
            torch._dynamo.reset()
            net.compile_blocks(lambda f: torch.compile(f, dynamic=False))
        results[varlen] = []
        for documents in batches:  # numbers of documents differ: one graph all the same
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = net(x, y, documents=documents)
            results[varlen].append((loss, gradients(net, loss)))
    for want, (masked, by_mask), (bordered, by_border) in zip(exact, results[False], results[True], strict=True):
        torch.testing.assert_close(bordered, masked, rtol=2e-3, atol=0)
        for name, grad in want.items():
            assert relative_error(by_border[name], grad) < 1.3 * relative_error(by_mask[name], grad) + 1e-3, name


def test_generation_with_a_cache_knows_no_mask():
    net = random_model(tiny_config())
    idx = random_ids(net.cfg, 2, 9)
    net.document_id = 96
    with torch.no_grad():
        cache = KVCache(net.cfg, 2, 9, "cpu", torch.float32)
        torch.testing.assert_close(net(idx % 96, cache=cache.chunk(0, 9)), net(idx % 96), atol=2e-5, rtol=1e-5)


# ---- loss -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize("elements", [1, 97, 7 * 97 + 5, 33 * 97, 2**22])  # chunks of 1, 1, 7, all 33, all rows
def test_loss_and_gradients_equal_cross_entropy(elements, tie_embeddings, monkeypatch):
    monkeypatch.setattr(model, "CHUNK_ELEMENTS", elements)
    net = random_model(tiny_config(n_kv_head=2, tie_embeddings=tie_embeddings))
    x, y = batch_with_ignored(net.cfg)
    want = F.cross_entropy(net(x).flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum")
    want_grads = gradients(net, want * 0.25)
    got = net(x, y)
    assert got.dtype == torch.float32 and got.shape == ()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    for name, grad in gradients(net, got * 0.25).items():
        assert relative_error(grad, want_grads[name]) < 1e-6, name


# One rounding to bfloat16 is at most 2**-9 = 0.2 %, to float16 2**-12 = 0.02 %; a gradient passes some tens of them, of
# either sign. The logits are the same rounded numbers on both sides, so the loss only differs by float32 sums.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 1.5e-3)])
@pytest.mark.parametrize("elements", [5 * 97, 2**22])
def test_loss_and_gradients_under_autocast(dtype, tolerance, elements, monkeypatch):
    monkeypatch.setattr(model, "CHUNK_ELEMENTS", elements)
    net = random_model(tiny_config(n_kv_head=2, tie_embeddings=True))
    x, y = batch_with_ignored(net.cfg)
    exact = gradients(net, net(x, y))
    with torch.autocast("cpu", dtype=dtype):
        logits = net(x)
        want = F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum")
        got = net(x, y)
    assert logits.dtype == dtype and got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    want_grads, got_grads = gradients(net, want), gradients(net, got)
    for name, grad in got_grads.items():
        assert grad.dtype == torch.float32
        assert relative_error(grad, want_grads[name]) < tolerance, name
        # Neither further from float32's gradient than autograd's own half precision.
        assert relative_error(grad, exact[name]) < 1.2 * relative_error(want_grads[name], exact[name]) + 1e-4, name


def test_a_scale_of_the_loss_is_not_rounded():
    """1.0057 in bfloat16 is 1.0078, so the gradients would be off by 0.2 %; each by itself is rounded either way."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32).bfloat16().requires_grad_(), torch.randn(97, 32).bfloat16().requires_grad_()
    targets = torch.randint(97, (64,))
    sums = {}
    for scale in (1.0, 1.0057):
        hidden.grad = weight.grad = None
        (cross_entropy(hidden, weight, targets)[0] * scale).backward()
        sums[scale] = torch.stack([hidden.grad.float().abs().sum(), weight.grad.float().abs().sum()])
    torch.testing.assert_close(sums[1.0057] / sums[1.0], torch.full((2,), 1.0057), rtol=3e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpus_chunk_computes_what_a_cpus_does(dtype):
    torch.manual_seed(0)
    h, w, scale = torch.randn(50, 32).to(dtype), torch.randn(97, 32).to(dtype), torch.rand(50)
    targets = torch.randint(97, (50,))
    targets[::7] = IGNORE
    scale = scale * (targets != IGNORE)
    nats, grad = model.fused_chunk(h, w, targets, scale)
    logits = (h @ w.T).float()
    want, lse = model.softmax_cross_entropy(logits, targets)
    torch.testing.assert_close(nats, want, rtol=1e-5, atol=1e-6)
    want = model.cross_entropy_gradient(logits, targets, lse, scale).to(dtype)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad, want, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_compiled_loss_of_a_gpu_equals_the_eager_one(monkeypatch):
    monkeypatch.setattr(model, "GPU_CHUNK_ELEMENTS", 40 * 97)
    monkeypatch.setattr(model.ChunkedCrossEntropy, "chunk", None)
    hidden, weight = (torch.randn(n, 64, device="cuda").bfloat16().requires_grad_() for n in (130, 97))
    targets = torch.randint(97, (130,), device="cuda")
    found = []
    for chunk in (None, torch.compile(model.fused_chunk)):
        monkeypatch.setattr(model.ChunkedCrossEntropy, "chunk", None if chunk is None else staticmethod(chunk))
        hidden.grad = weight.grad = None
        loss = cross_entropy(hidden, weight, targets)[0]
        loss.backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=0)
    for got, want in zip(found[1][1:], found[0][1:], strict=True):
        assert relative_error(got, want) < 5e-3


@pytest.mark.slow
def test_a_gpus_chunk_is_few_kernels_and_one_graph_for_any_rows():
    """As inductor counts them for a CPU, whose loops are cut finer."""
    from torch._inductor import metrics

    torch._dynamo.reset()
    metrics.reset()
    chunk, made = torch.compile(model.fused_chunk), []
    for n in (64, 48, 40, 33):
        chunk(torch.randn(n, 32), torch.randn(97, 32), torch.randint(97, (n,)), torch.rand(n))
        made.append(metrics.generated_kernel_count)
    assert made[0] <= 8 and made[1:] == [2 * made[0]] * 3  # for 64 rows, then for any number


def test_all_targets_ignored_is_zero_with_zero_gradients():
    net = random_model(tiny_config())
    x = random_ids(net.cfg, 2, 8)
    loss = net(x, torch.full_like(x, IGNORE))
    assert loss.item() == 0.0
    for grad in gradients(net, loss).values():
        assert grad.eq(0).all()


def test_loss_without_gradient_equals_loss_with_it():
    net = random_model(tiny_config())
    x, y = batch_with_ignored(net.cfg)
    with torch.no_grad():
        evaluated = net(x, y)
    assert not evaluated.requires_grad
    assert torch.equal(evaluated, net(x, y).detach())


def head_inputs(N: int = 23, C: int = 16, V: int = 97) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(N, C, generator=generator), torch.randn(V, C, generator=generator)
    targets = torch.randint(V, (N,), generator=generator)
    targets[::5] = IGNORE
    return hidden, weight, targets, torch.rand(N, generator=generator) * 3


@pytest.mark.parametrize("elements", [7 * 97, 2**22])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("frozen", ["", "hidden", "weight", "hidden and weight"])
def test_weighted_cross_entropy_equals_autograds(elements, weighted, frozen, monkeypatch):
    monkeypatch.setattr(model, "CHUNK_ELEMENTS", elements)
    hidden, weight, targets, weights = head_inputs()
    hidden.requires_grad_("hidden" not in frozen)
    weight.requires_grad_("weight" not in frozen)
    each = F.cross_entropy(hidden.double() @ weight.double().T, targets, ignore_index=IGNORE, reduction="none")
    want = (each * weights).sum() if weighted else each.sum()
    made = []
    add_product = model.add_product
    monkeypatch.setattr(model, "add_product", lambda *args: made.append(1) or add_product(*args))
    loss, nats = cross_entropy(hidden, weight, targets, weights if weighted else None)
    assert loss.dtype == nats.dtype == torch.float32 and loss.shape == () and not nats.requires_grad
    torch.testing.assert_close(loss, want.float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(nats, each.float(), rtol=1e-5, atol=1e-6)
    assert bool(made) == weight.requires_grad  # a frozen head costs nothing
    inputs = [t for t in (hidden, weight) if t.requires_grad]
    assert loss.requires_grad == bool(inputs)
    if inputs:
        grads = torch.autograd.grad(loss * 0.25, inputs)
        for got, wanted in zip(grads, torch.autograd.grad(want * 0.25, inputs), strict=True):
            assert relative_error(got, wanted) < 1e-6


def test_cross_entropy_of_chosen_positions_equals_that_of_all():
    """Only positions with a target go through the head: the same loss and gradients, also of the blocks below."""
    net = random_model(tiny_config())
    x, y = batch_with_ignored(net.cfg)
    index = (y.flatten() != IGNORE).nonzero().squeeze(1)
    want = net(x, y)
    want_grads = gradients(net, want)
    got, _ = cross_entropy(net(x, index=index), net.lm_head.weight, y.flatten()[index])
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    for name, grad in gradients(net, got).items():
        assert relative_error(grad, want_grads[name]) < 1e-6, name


def test_cross_entropy_of_no_positions_is_zero_with_zero_gradients():
    net = random_model(tiny_config())
    x, none = random_ids(net.cfg, 2, 8), torch.zeros(0, dtype=torch.int64)
    loss, nats = cross_entropy(net.hidden(x).flatten(0, 1)[none], net.lm_head.weight, none, torch.zeros(0))
    assert loss.item() == 0.0 and nats.shape == (0,)
    for name, grad in gradients(net, loss).items():
        assert grad is not None and grad.eq(0).all(), name
    nats, correct = token_scores(net.hidden(x).flatten(0, 1)[none], net.lm_head.weight, none)
    assert nats.shape == correct.shape == (0,) and correct.dtype == torch.bool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_scores_equal_those_of_full_logits(dtype, monkeypatch):
    monkeypatch.setattr(model, "CHUNK_ELEMENTS", 7 * 97)
    hidden, weight, targets, _ = head_inputs(N=200)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        logits = F.linear(hidden, weight)
        targets[::3] = logits[::3].argmax(dim=1)
        targets[::5] = IGNORE
        nats, correct = token_scores(hidden.requires_grad_(), weight, targets)
        _, trained = cross_entropy(hidden, weight, targets)
    want = F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="none")
    torch.testing.assert_close(nats, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(trained, nats, rtol=1e-6, atol=1e-6)
    assert nats.dtype == torch.float32 and not nats.requires_grad
    assert torch.equal(correct, logits.argmax(dim=1) == targets)
    assert 0.2 < correct.float().mean() < 0.6 and not correct[::5].any()


HEAD_MEMORY = """
    import sys
    import torch
    import torch.nn.functional as F
    from model import IGNORE, cross_entropy

    def peak_bytes():  # of this process's own address space: getrusage would remember the parent's before exec
        with open("/proc/self/status", encoding="utf-8") as f:
            return 1024 * int(next(line for line in f if line.startswith("VmHWM")).split()[1])

    def chunked(hidden, weight, targets):
        return cross_entropy(hidden, weight, targets)[0]

    def plain(hidden, weight, targets):
        return F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORE, reduction="sum")

    torch.manual_seed(0)
    torch.set_num_threads(1)
    N, C, V = 4096, 128, 16000
    loss_of = {"chunked": chunked, "plain": plain}[sys.argv[1]]
    hidden, weight = torch.randn(N, C, requires_grad=True), (torch.randn(V, C) * 0.05).requires_grad_()
    targets = torch.randint(V, (N,))
    targets[::7] = IGNORE
    loss_of(hidden[:8], weight[:64], targets[:8] % 64).backward()  # what libraries set up once is not the head's
    hidden.grad = weight.grad = None
    before = peak_bytes()
    loss = loss_of(hidden, weight, targets)
    loss.backward()
    print(peak_bytes() - before)
    torch.save([loss.detach(), hidden.grad, weight.grad], sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_head_takes_a_fifth_of_the_memory_of_full_logits(tmp_path):
    env = dict(os.environ, PYTHONPATH=str(Path(model.__file__).parent), OMP_NUM_THREADS="1")
    peak, results = {}, {}
    for which in ("chunked", "plain"):
        command = [sys.executable, "-c", textwrap.dedent(HEAD_MEMORY), which, str(tmp_path / which)]
        out = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        peak[which], results[which] = int(out.stdout), torch.load(tmp_path / which, weights_only=True)
    for got, want in zip(results["chunked"], results["plain"], strict=True):
        assert relative_error(got, want) < 1e-6
    assert peak["plain"] > 2 * 4096 * 16000 * 4  # at the least the logits and their gradient: the measure measures
    assert 5 * peak["chunked"] < peak["plain"], {which: f"{n / 2**20:.0f} MiB" for which, n in peak.items()}


# ---- initialisation, dropout, precision -----------------------------------------------------------------------------


@pytest.mark.parametrize("n_layer", [1, 8])
def test_initial_standard_deviations(n_layer):
    torch.manual_seed(0)
    net = Transformer(tiny_config(n_layer=n_layer, n_embd=128, vocab_size=512, qk_norm=True))
    for name, p in net.named_parameters():
        if p.ndim == 1:
            assert p.eq(1).all(), name
            continue
        residual = name.endswith(("self_attn.o_proj.weight", "mlp.down_proj.weight"))
        want = 0.02 / (2 * n_layer) ** 0.5 if residual else 0.02
        # The estimate of a deviation from n numbers has standard error want / sqrt(2 n), here 0.6 % at most.
        assert p.std().item() == pytest.approx(want, rel=0.03), name
        assert abs(p.mean().item()) < 5 * want / p.numel() ** 0.5, name


def test_dropout_acts_in_training_only():
    net = random_model(tiny_config(dropout=0.3))
    x, y = batch_with_ignored(net.cfg)
    torch.manual_seed(0)
    first, second = net(x, y), net(x, y)
    torch.manual_seed(0)
    assert not torch.equal(first, second)
    assert torch.equal(first, net(x, y))
    net.eval()
    without = random_model(tiny_config(dropout=0.0))
    assert torch.equal(net(x, y), net(x, y))
    assert torch.equal(net(x, y), without(x, y))


def test_dropout_is_where_it_should_be(monkeypatch):
    seen = []
    dropout, attention = F.dropout, F.scaled_dot_product_attention

    def watched_dropout(x: Tensor, p: float, training: bool) -> Tensor:
        seen.append(("x", x.shape[-1], p if training else 0.0))
        return dropout(x, p, training)

    def watched_attention(*args: Tensor, dropout_p: float, **options: bool) -> Tensor:
        seen.append(("attention", dropout_p))
        return attention(*args, dropout_p=dropout_p, **options)

    monkeypatch.setattr(F, "dropout", watched_dropout)
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched_attention)
    net = random_model(tiny_config(dropout=0.3))
    for p in (0.3, 0.0):  # in training, then in evaluation
        seen.clear()
        net.train(p > 0)(random_ids(net.cfg, 1, 4))
        block = [("attention", p), ("x", 64, p), ("x", 64, p)]
        assert seen == [("x", 64, p), *block, *block]  # embedding, then both sub-layers of two blocks


def noise_of_embeddings(net: Transformer, x: Tensor, documents: Tensor | None) -> Tensor:
    """What the first block reads less the embeddings."""
    seen = []
    handle = net.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    net(x, documents=documents)
    handle.remove()
    return (seen[0] - net.embed_tokens(x)).detach()


@pytest.mark.parametrize("with_documents", [False, True])
def test_neftune_noise(with_documents):
    net = random_model(tiny_config(vocab_size=11, n_embd=256))
    documents, x = packed(), random_ids(net.cfg, 2, 32)
    torch.manual_seed(0)
    assert noise_of_embeddings(net, x, documents).eq(0).all()
    net.neftune_alpha = 5.0
    parts = runs(documents) if with_documents else [(0, 0, 32), (1, 0, 32)]
    noise = noise_of_embeddings(net, x, documents if with_documents else None)
    for b, i, j in parts:
        m = 5.0 / ((j - i) * 256) ** 0.5
        of_one = noise[b, i:j]
        # n numbers of U(-m, m): the largest is m (1 - 1/n) or so, the deviation m / sqrt(3)
        assert 0.95 * m < of_one.abs().max() <= m * 1.00001
        assert of_one.std().item() == pytest.approx(m / 3**0.5, rel=0.15)
        assert abs(of_one.mean().item()) < 5 * m / (3 * of_one.numel()) ** 0.5
    assert not torch.equal(noise, noise_of_embeddings(net, x, documents if with_documents else None))
    net.eval()
    assert noise_of_embeddings(net, x, documents).eq(0).all()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_activation_checkpointing_recomputes_and_gives_the_same_gradients(dropout):
    net = random_model(tiny_config(dropout=dropout))
    x, y = batch_with_ignored(net.cfg)
    calls = []
    net.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))

    def run(checkpointing: bool) -> tuple[dict[str, Tensor], int]:
        net.activation_checkpointing = checkpointing
        calls.clear()
        torch.manual_seed(0)
        return gradients(net, net(x, y)), len(calls)

    (plain, plain_calls), (recomputed, recomputed_calls) = run(False), run(True)
    assert (plain_calls, recomputed_calls) == (1, 2)
    for name in plain:
        assert torch.equal(plain[name], recomputed[name]), name


@pytest.mark.parametrize("in_c", [True, False])
def test_bfloat16_autocast_computes_in_bfloat16(in_c, monkeypatch):
    if not in_c:
        monkeypatch.setattr(model.cpu_attention, "works", lambda *_: False)
    net = random_model(tiny_config(qk_norm=True, n_kv_head=2))
    x, y = batch_with_ignored(net.cfg)
    seen = {}
    for name, module in net.named_modules():
        if name.endswith(("_proj", "q_norm", "k_norm")):
            module.register_forward_hook(lambda _, args, out, n=name: seen.update({n: {args[0].dtype, out.dtype}}))
    net.layers[1].register_forward_hook(lambda _, args, out: seen.update(residual=out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = net(x, y)
    assert seen.pop("residual") == torch.float32  # sums of many layers keep full precision
    assert len(seen) == 2 * 9  # among them what goes into attention (q_norm, k_norm, v_proj) and comes out (o_proj)
    assert all(dtypes == {torch.bfloat16} for dtypes in seen.values()), seen
    assert loss.dtype == torch.float32
    assert all(grad.dtype == torch.float32 for grad in gradients(net, loss).values())


def test_blocks_compile_to_one_graph_and_the_last_norm_to_another():
    net, plain = random_model(tiny_config(n_layer=3)), random_model(tiny_config(n_layer=3))
    x, y = batch_with_ignored(net.cfg)
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    names = list(net.state_dict())
    net.compile_blocks(lambda f: torch.compile(f, backend=backend, dynamic=False))
    assert list(net.state_dict()) == names
    got, want = gradients(net, net(x, y)), gradients(plain, plain(x, y))
    assert len(graphs) == 2
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)


# ---- arithmetic -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cfg",
    [
        *[tiny_config(**changes) for changes in SHAPES.values()],
        ModelConfig(vocab_size=50304, n_layer=12, n_head=12, n_embd=768),
        ModelConfig(vocab_size=32000, n_layer=3, n_head=16, n_kv_head=4, n_embd=512, head_dim=64, qk_norm=True),
    ],
)
def test_parameter_table_counts_what_is_built(cfg):
    with torch.device("meta"):
        net = Transformer(cfg)
    table = parameter_table(cfg)
    assert table["total"] == sum(p.numel() for p in net.parameters())
    assert table["total"] == sum(count for part, count in table.items() if part != "total")
    parts = {"embedding": "embed_tokens", "biases": ".bias", "attention": "_proj", "mlp": "mlp", "norms": "norm"}
    parts |= {"head": "lm_head"}
    counted = dict.fromkeys(parts, 0)
    for name, p in net.named_parameters():
        part = "mlp" if "mlp" in name else next(part for part, mark in parts.items() if mark in name)
        counted[part] += p.numel()
    assert counted == {part: table[part] for part in parts}


def test_known_shapes_of_a_92m_llama():
    cfg = ModelConfig(vocab_size=64793, n_embd=512, n_layer=8, n_head=8, ffn_dim=1376, tie_embeddings=False)
    with torch.device("meta"):
        net = Transformer(cfg)
    block = {
        "input_layernorm.weight": (512,),
        "self_attn.q_proj.weight": (512, 512),
        "self_attn.k_proj.weight": (512, 512),
        "self_attn.v_proj.weight": (512, 512),
        "self_attn.o_proj.weight": (512, 512),
        "post_attention_layernorm.weight": (512,),
        "mlp.gate_proj.weight": (1376, 512),
        "mlp.up_proj.weight": (1376, 512),
        "mlp.down_proj.weight": (512, 1376),
    }
    want = {"embed_tokens.weight": (64793, 512), "norm.weight": (512,), "lm_head.weight": (64793, 512)}
    want |= {f"layers.{i}.{name}": shape for i in range(8) for name, shape in block.items()}
    assert {name: tuple(p.shape) for name, p in net.state_dict().items()} == want
    # 2 * 64793 * 512 + 8 * (4 * 512 * 512 + 3 * 512 * 1376 + 2 * 512) + 512
    assert parameter_table(cfg)["total"] == 91_653_632
    assert ModelConfig(vocab_size=64793, n_embd=512, n_head=8).ffn_dim == 1408  # 8/3 * 512 = 1365.3, up to 64 * 22


def test_seven_billion_llama_counts():
    # Llama 2 7B: 6,738,415,616 parameters, 6,476,271,616 without embedding and head (Hugging Face's model card).
    table = parameter_table(
        ModelConfig(
            vocab_size=32000, n_embd=4096, n_layer=32, n_head=32, ffn_dim=11008, block_size=8, tie_embeddings=False
        )
    )
    assert table["total"] == 6_738_415_616
    assert table["total"] - table["embedding"] - table["head"] == 6_476_271_616


def kept_bytes(n_layer: int, trainable: str, dtype: torch.dtype) -> int:
    """What autograd keeps for backward beside the parameters, each storage once."""
    cfg = tiny_config(n_layer=n_layer, n_embd=128, block_size=128)
    net = new_model(Transformer, cfg, settings(128, "adamw") | {"trainable": trainable}, dtype)
    set_trainable(net, trainable, LoRAConfig(rank=1))
    own = {t.untyped_storage().data_ptr() for t in (*net.parameters(), net.cos, net.sin)}
    kept = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        kept.update({storage.data_ptr(): storage.nbytes()} if storage.data_ptr() not in own else {})
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            hidden = net.hidden(random_ids(net.cfg, 8, 128))
    assert hidden.requires_grad  # the graph, and with it what it keeps, is alive
    return sum(kept.values())


def settings(block_size: int, optimizer: str) -> dict:
    shape = {"batch_size": 8, "block_size": block_size}
    lora = {"lora_rank": 1, "lora_alpha": 32.0, "lora_modules": ",".join(MODULES), "base_dtype": "auto"}
    return shape | lora | {"optimizer": optimizer, "activation_checkpointing": False, "compile": False}


@pytest.mark.parametrize("trainable", ["all", "lora", "embed,lm_head,lora", "embed,lm_head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_of_the_memory_table_are_what_autograd_keeps(trainable, dtype):
    """Per layer: the difference of models of 5 and of 2 layers."""
    estimated = {}
    for n_layer in (2, 5):
        cfg = tiny_config(n_layer=n_layer, n_embd=128, block_size=128)
        trained = trainable_table(cfg, trainable, LoRAConfig(rank=1))
        table = memory_table(cfg, settings(128, "adamw"), trained, False, "cpu", dtype)
        estimated[n_layer] = table["activations"]
        frozen = trained["total"] - trained["trainable"]
        in_half = "lora" in trainable and dtype == torch.bfloat16
        assert table["weights"] == 4 * trained["total"] - (2 * frozen if in_half else 0)
        assert table["optimizer"] == 2 * table["gradients"]
        assert table["gradients"] == 4 * trained["trainable"]
    counted = kept_bytes(5, trainable, dtype) - kept_bytes(2, trainable, dtype)
    assert estimated[5] - estimated[2] == pytest.approx(counted, rel=0.06)


def test_memory_of_frozen_parts():
    cfg = tiny_config(n_layer=3, vocab_size=4096)
    total = parameter_table(cfg)
    matrices, config = total["attention"] + total["mlp"], settings(64, "muon")
    every = {"trainable": total["total"], "adapters": 0}
    all_trained, frozen = (
        memory_table(cfg, config, trained, False, "cuda", torch.float32)
        for trained in (every, {"trainable": 5000, "adapters": 5000})
    )
    assert all_trained["head"] - frozen["head"] == 4 * 4096 * 64  # its gradient
    assert all_trained["optimizer"] == 8 * total["total"] - 4 * matrices
    assert frozen["optimizer"] == 8 * 5000  # optim.py gives adapters AdamW


@pytest.mark.parametrize("changes", [{}, {"n_kv_head": 2, "head_dim": 24, "tie_embeddings": True}])
def test_flops_equal_torchs_count(changes, monkeypatch):
    """With attention as two plain matrix products torch counts exactly flops_per_token: full T x T scores, backward
    twice the forward, nothing for the embedding. Under bfloat16, because torch's counter has no formula for the addmm_
    that sums the head's gradient in float32. (Nor has it one for a CPU's attention; a GPU's recomputes the
    scores in backward: 14 instead of 12 L H D T.)"""
    monkeypatch.setattr(model.cpu_attention, "works", lambda *_: False)
    monkeypatch.setattr(F, "scaled_dot_product_attention", eager_attention)
    monkeypatch.setattr(model, "CHUNK_ELEMENTS", 9 * 97)
    net = Transformer(tiny_config(**changes))
    x = random_ids(net.cfg, 2, 32)
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", dtype=torch.bfloat16):
        net(x, x).backward()
    counted, formula = counter.get_total_flops(), flops_per_token(net.cfg, 32) * x.numel()
    assert counted == formula


def test_flops_of_frozen_matrices_equal_torchs_count(monkeypatch):
    """Beside adapters, which take 6 per parameter; the first block's input gets no gradient."""
    monkeypatch.setattr(model.cpu_attention, "works", lambda *_: False)
    monkeypatch.setattr(F, "scaled_dot_product_attention", eager_attention)
    net = Transformer(tiny_config())
    set_trainable(net, "lora", LoRAConfig(2, 4.0, 0.0, ("q_proj", "k_proj", "v_proj", "up_proj")))
    x = random_ids(net.cfg, 2, 32)
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", dtype=torch.bfloat16):
        net(x, x).backward()
    first = net.layers[0].self_attn
    ends = [w for part in (first.q_proj, first.k_proj, first.v_proj) for w in (part.weight, part.lora_A.weight)]
    adapters = sum(p.numel() for p in net.parameters() if p.requires_grad)
    found = flops_per_token(net.cfg, 32, trainable="lora") + 6 * adapters - 2 * sum(p.numel() for p in ends)
    assert counter.get_total_flops() == found * x.numel()


# ---- configuration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_head": 6, "n_kv_head": 4, "n_embd": 96}, ["n_head=6", "n_kv_head=4"]),
        ({"n_head": 4, "n_kv_head": 8}, ["n_head=4", "n_kv_head=8"]),
        ({"n_head": 0}, ["n_head must be positive, got 0"]),
        ({"n_embd": 65}, ["n_embd=65", "n_head=4"]),
        ({"head_dim": 17}, ["head_dim=17"]),
        ({"n_embd": 20}, ["head_dim=5"]),
    ],
)
def test_impossible_shapes_are_one_line(changes, named):
    with pytest.raises(UserError) as caught:
        tiny_config(**changes)
    text = str(caught.value)
    assert text.startswith("model: ") and "\n" not in text
    assert all(words in text for words in named), text


def test_derived_shapes():
    cfg = ModelConfig(vocab_size=100, n_embd=768, n_head=12)
    assert (cfg.n_kv_head, cfg.head_dim, cfg.ffn_dim) == (12, 64, 2048)
