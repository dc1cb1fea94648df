"""model.py against transformers' Llama and Qwen, plain torch, and hand arithmetic."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from groundup.errors import UserError
from groundup.generate.kv_cache import CacheStep, KVCache
from groundup.kernels import attention
from groundup.kernels.attention import positions_of, starts_of
from groundup.tokens import IGNORE
from model import ModelConfig, Transformer

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
    base = {
        "vocab_size": 97,
        "block_size": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 64,
        "tie_embeddings": False,
    }
    return ModelConfig(**(base | changes))


def random_model(cfg: ModelConfig, seed: int = 0) -> Transformer:
    """Weights so large that attention and softmax are not uniform; norm weights other than 1."""
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


def compile_blocks(net: Transformer, **options: object) -> Transformer:
    """Compile each block by itself, and the last norm, as the trainers do."""
    torch._dynamo.reset()
    for part in (*net.layers, net.norm):
        part.forward = torch.compile(part.forward, dynamic=False, **options)
    return net


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


# ---- logits -------------------------------------------------------------------------------------


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
            rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_theta}
            | (cfg.rope_scaling or {}),
            tie_word_embeddings=cfg.tie_embeddings,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        ),
        attn_implementation="eager",
    )
    weights = {
        name if name == "lm_head.weight" else "model." + name: p
        for name, p in net.state_dict().items()
    }
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


def eager_attention(
    q, k, v, attn_mask=None, is_causal=False, dropout_p=0.0, enable_gqa=False
) -> Tensor:
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
        steps = [CacheStep([cache.part([t, t])]) for t in range(20)]
        token_by_token = torch.cat(
            [net(idx[:, t : t + 1], cache=step) for t, step in enumerate(steps)], dim=1
        )
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
    with pytest.raises(AssertionError, match="5 of 4 positions"):
        Transformer(cfg)(random_ids(cfg, 1, 5), cache=cache.chunk(0, 5))


# ---- documents ----------------------------------------------------------------------------------


LENGTHS = [5, 1, 17, 2, 7]  # of the documents of a row, delimiter included


def rows_of_documents(cfg: ModelConfig, delimiter: int = 96) -> tuple[Tensor, Tensor]:
    """Two rows of 32: documents one after the other, and a window that begins inside one."""
    documents = random_ids(cfg, 1, 32)[0] % delimiter
    starts = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
    documents[starts] = delimiter
    return documents, torch.cat((documents[3:], documents[:3]))


def alone(net: Transformer, row: Tensor, delimiter: int = 96) -> Tensor:
    """Logits of each document of the row by itself; a delimiter behind another one opens none."""
    borders = [0, *(t for t in range(1, len(row)) if row[t] == delimiter != row[t - 1]), len(row)]
    net.delimiter_id = None
    return torch.cat([
        net(row[a:b].unsqueeze(0))[0] for a, b in zip(borders, borders[1:], strict=False)
    ])


@pytest.mark.parametrize(
    "shape", ["llama", "llama grouped queries", "qwen3", "llama 3.1 frequencies"]
)
def test_documents_of_a_row_are_as_if_alone(shape):
    net = random_model(tiny_config(**SHAPES[shape]))
    rows = rows_of_documents(net.cfg)
    with torch.no_grad():
        want = torch.stack([alone(net, row) for row in rows])
        unconfined = net(torch.stack(rows))
        net.delimiter_id = 96
        got = net(torch.stack(rows))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        unconfined[0, :5], got[0, :5], atol=1e-5, rtol=1e-5
    )  # the first document
    assert (unconfined - want).abs()[:, 8:].amax(dim=-1).min() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("way", ["eager", "checkpointed", "compiled"])
def test_gradients_of_documents_are_as_if_alone(way):
    net = random_model(tiny_config(n_kv_head=2))
    rows = torch.stack(rows_of_documents(net.cfg))
    targets = random_ids(net.cfg, 2, 32, seed=5)
    logits = torch.cat([alone(net, row) for row in rows])
    want = gradients(net, F.cross_entropy(logits, targets.flatten(), reduction="sum"))
    net.delimiter_id = 96
    net.activation_checkpointing = way == "checkpointed"
    if way == "compiled":
        compile_blocks(net, backend="aot_eager")
    got = gradients(net, net(rows, targets))
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-5, name


def test_documents_in_bfloat16():
    net = random_model(tiny_config(n_kv_head=2))
    rows = rows_of_documents(net.cfg)
    with torch.no_grad():
        want = torch.stack([alone(net, row) for row in rows])
        net.delimiter_id = 96
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert relative_error(net(torch.stack(rows)), want) < 0.02


# Two packed rows of conversations, one with padding behind. A number may come again in a row.
NUMBERS = [[(0, 9), (1, 1), (2, 14), (-1, 8)], [(0, 20), (1, 3), (0, 9)]]


def packed() -> Tensor:
    return torch.tensor([
        [number for number, length in row for _ in range(length)] for row in NUMBERS
    ])


def runs(documents: Tensor) -> list[tuple[int, int, int]]:
    """(row, begin, end) of each document, found token by token."""
    found = []
    for b, row in enumerate(documents.tolist()):
        borders = [t for t in range(len(row)) if t == 0 or row[t] != row[t - 1]]
        found += [(b, *pair) for pair in zip(borders, [*borders[1:], len(row)], strict=True)]
    return found


@pytest.mark.parametrize("longest", [0, 512], ids=["one by one", "masked"])
@pytest.mark.parametrize("shape", ["llama", "llama grouped queries", "qwen3"])
def test_packed_conversations_are_as_if_alone(shape, longest, monkeypatch):
    """Losses and gradients of the documents given by number, each against a call of its own."""
    monkeypatch.setattr(attention, "MASKED_LENGTH", longest)
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
        net.delimiter_id = 96  # numbers that are given come first
        assert torch.equal(net(x, documents=documents), whole)


def test_packed_conversations_equal_transformers_with_positions():
    """transformers takes documents from positions that begin anew, without a cache."""
    net = random_model(tiny_config(n_kv_head=2))
    documents, x = packed(), random_ids(net.cfg, 2, 32)
    positions = positions_of(starts_of(documents))
    hf = as_transformers(net)
    hf.set_attn_implementation("sdpa")
    with torch.no_grad():
        got = net(x, documents=documents)
        for b in range(2):  # it looks for them in batches of one row only
            want = hf(x[b : b + 1], position_ids=positions[b : b + 1], use_cache=False).logits[0]
            torch.testing.assert_close(got[b], want, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_model_compiled_whole_is_one_graph_for_any_documents():
    """Whatever their number: reading it would break the graph."""
    net, graphs = random_model(tiny_config(n_kv_head=2)), []
    net.delimiter_id = 96

    def backend(graph, _inputs):
        graphs.append(graph)
        return lambda *args: (torch.zeros(2, 32, 97),)

    torch._dynamo.reset()
    whole = torch.compile(net, backend=backend, dynamic=False, fullgraph=True)
    with torch.no_grad():
        for row in rows_of_documents(net.cfg):
            whole(row.expand(2, -1))
    assert len(graphs) == 1


def test_generation_with_a_cache_knows_no_mask():
    net = random_model(tiny_config())
    idx = random_ids(net.cfg, 2, 9)
    net.delimiter_id = 96
    with torch.no_grad():
        cache = KVCache(net.cfg, 2, 9, "cpu", torch.float32)
        torch.testing.assert_close(
            net(idx % 96, cache=cache.chunk(0, 9)), net(idx % 96), atol=2e-5, rtol=1e-5
        )


# ---- initialisation, dropout, precision, compilation --------------------------------------------


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
        # The standard error of the deviation of n numbers is want / sqrt(2 n), at most 0.6 %.
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
        assert seen == [
            ("x", 64, p),
            *block,
            *block,
        ]  # embedding, then both sub-layers of two blocks


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
        monkeypatch.setattr(attention, "c_kernel_works", lambda *_: False)
    net = random_model(tiny_config(qk_norm=True, n_kv_head=2))
    x, y = batch_with_ignored(net.cfg)
    seen = {}
    for name, module in net.named_modules():
        if name.endswith(("_proj", "q_norm", "k_norm")):
            module.register_forward_hook(
                lambda _, args, out, n=name: seen.update({n: {args[0].dtype, out.dtype}})
            )
    net.layers[1].register_forward_hook(lambda _, args, out: seen.update(residual=out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = net(x, y)
    assert seen.pop("residual") == torch.float32  # sums of many layers keep full precision
    assert (
        len(seen) == 2 * 9
    )  # among them what goes into attention (q_norm, k_norm, v_proj) and comes out (o_proj)
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
    compile_blocks(net, backend=backend)
    assert list(net.state_dict()) == names
    got, want = gradients(net, net(x, y)), gradients(plain, plain(x, y))
    assert len(graphs) == 2
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_compiled_blocks_serve_rows_of_all_lengths():
    """A block has two graphs (with and without gradients) for the first length, two for others."""
    net, graphs = random_model(tiny_config()), []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for part in net.layers:
        part.forward = torch.compile(part.forward, backend=backend)
    for T in (20, 4, 32, 8, 17):
        for with_gradients in (True, False):
            with torch.set_grad_enabled(with_gradients):
                net(random_ids(net.cfg, 3, T))
    assert len(graphs) == 4


# ---- configuration ------------------------------------------------------------------------------


def test_known_shapes_of_a_92m_llama():
    cfg = ModelConfig(
        vocab_size=64793, n_embd=512, n_layer=8, n_head=8, ffn_dim=1376, tie_embeddings=False
    )
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
    want = {
        "embed_tokens.weight": (64793, 512),
        "norm.weight": (512,),
        "lm_head.weight": (64793, 512),
    }
    want |= {f"layers.{i}.{name}": shape for i in range(8) for name, shape in block.items()}
    assert {name: tuple(p.shape) for name, p in net.state_dict().items()} == want
    # 2 * 64793 * 512 + 8 * (4 * 512 * 512 + 3 * 512 * 1376 + 2 * 512) + 512
    assert sum(p.numel() for p in net.parameters()) == 91_653_632
    assert (
        ModelConfig(vocab_size=64793, n_embd=512, n_head=8).ffn_dim == 1408
    )  # 8/3 * 512 = 1365.3, up to 64 * 22


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
