"""Every way of attention against reference_attention, and that against a loop over tokens."""

import math
from functools import partial

import pytest
import torch
import torch.nn.attention.varlen  # a GPU's kernel: replaced here by a plain one
from test_model import SHAPES as MODELS
from test_model import (
    compile_blocks,
    gradients,
    packed,
    random_ids,
    random_model,
    relative_error,
    runs,
    tiny_config,
)
from torch import Tensor

from groundup import compile_c
from groundup.kernels import attention as kernels
from groundup.kernels.attention import (
    Layout,
    additive_mask,
    attention,
    attention_by_length,
    cached_attention,
    choose_layout,
    document_borders,
    document_mask,
    documents_of,
    first_positions,
    has_varlen,
    positions_of,
    reference_attention,
    starts_of,
    varlen_attention,
)

CPU = torch.device("cpu")
needs_c = pytest.mark.skipif(
    not kernels.c_kernel_works(CPU, torch.bfloat16, 64, 0.0),
    reason="needs AVX512-BF16 and a C compiler",
)


def random_heads(B: int, H: int, K: int, T: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and a gradient, as linear layers make them: the heads of a position side by side."""
    generator = torch.Generator().manual_seed(B + T)
    found = [torch.randn(B, T, heads, D, generator=generator) for heads in (H, K, K, H)]
    return [x.to(dtype).transpose(1, 2) for x in found]


def random_starts(B: int, T: int, share: float) -> Tensor:
    starts = torch.rand(B, T, generator=torch.Generator().manual_seed(1)) < share
    starts[:, 0] = True
    return starts


def visible(starts: Tensor) -> Tensor:
    """(B, 1, T, T) bool: not later, and in the same document."""
    number = starts.cumsum(1)
    return (number[:, None, :, None] == number[:, None, None, :]).tril()


def with_gradients(attend, q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    y = attend(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy.to(y.dtype))]


def plain_varlen(
    q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=None, seqused_k=None, enable_gqa=False
) -> Tensor:
    """torch's varlen_attn, one sequence after the other: q (N, H, D), k and v (S, K, D)."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert enable_gqa == (q.shape[1] != k.shape[1])
    causal = window_size == (-1, 0)
    assert causal == (seqused_k is None)
    begins, ends = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert begins[-1] == len(q) and ends[-1] == len(k) == len(v)
    parts = []
    for i in range(len(begins) - 1):
        n_queries = begins[i + 1] - begins[i]
        n_keys = ends[i + 1] - ends[i] if seqused_k is None else int(seqused_k[i])
        assert 0 <= n_queries <= max_q and 0 <= n_keys <= max_k
        if not n_queries:
            continue
        one = q[begins[i] : begins[i + 1]].transpose(0, 1).unsqueeze(0)  # (1, H, n, D)
        keys = k[ends[i] : ends[i] + n_keys].transpose(0, 1).unsqueeze(0)
        values = v[ends[i] : ends[i] + n_keys].transpose(0, 1).unsqueeze(0)
        shown = torch.ones(n_queries, n_keys, dtype=torch.bool)
        y = reference_attention(one, keys, values, shown.tril() if causal else shown)
        parts.append(y[0].transpose(0, 1))
    return torch.cat(parts)


# ---- the reference and the ways ------------------------------------------------------------------


def test_the_reference_is_attention_written_out():
    q, k, v, _ = random_heads(2, 4, 2, 7, 8, torch.float64)
    shown = visible(random_starts(2, 7, 0.3))
    y = reference_attention(q, k, v, shown)
    for b in range(2):
        for h in range(4):
            for t in range(7):
                seen = [s for s in range(7) if shown[b, 0, t, s]]
                scores = [float(q[b, h, t] @ k[b, h // 2, s]) / math.sqrt(8) for s in seen]
                total = sum(math.exp(score) for score in scores)
                parts = [
                    math.exp(score) / total * v[b, h // 2, s]
                    for score, s in zip(scores, seen, strict=True)
                ]
                torch.testing.assert_close(y[b, h, t], sum(parts), rtol=1e-12, atol=1e-12)


WAYS = ("causal", "mask", "by document", "varlen", "varlen, without shared keys")


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_agrees_with_the_reference(way, n_kv_head, monkeypatch):
    """Values and gradients in float64, so that a wrong key shows."""
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", plain_varlen)
    monkeypatch.setattr(kernels, "VARLEN_SHARES_KEYS", way == "varlen")
    B, T = 3, 33
    heads = random_heads(B, 4, n_kv_head, T, 16, torch.float64)
    starts = random_starts(B, T, 0.0 if way == "causal" else 0.15)
    borders = document_borders(starts, 40)
    attend = {
        "causal": partial(attention, layout=Layout()),
        "mask": partial(attention, layout=Layout(mask=document_mask(starts, torch.float64))),
        "by document": partial(attention, layout=Layout(borders=borders)),
    }.get(way, partial(varlen_attention, borders=borders))
    got = with_gradients(attend, *heads)
    want = with_gradients(partial(reference_attention, visible=visible(starts)), *heads)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
def test_attention_to_a_cache_agrees_with_the_reference(n_kv_head, dtype, monkeypatch):
    """Five new queries of rows that are all as long; one new query of rows of different lengths."""
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", plain_varlen)
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
    S = 21
    q, k, v, _ = random_heads(3, 4, n_kv_head, S, 16, dtype)
    shown = torch.ones(S, S, dtype=torch.bool).tril()[-5:]
    want = reference_attention(q[:, :, -5:].double(), k.double(), v.double(), shown)
    got = cached_attention(q[:, :, -5:], k, v, additive_mask(shown, dtype))
    torch.testing.assert_close(got.double(), want, **tolerance)
    lengths, one = torch.tensor([4, 21, 13]), q[:, :, -1:]
    shown = (torch.arange(S) < lengths[:, None])[:, None, None]  # (B, 1, 1, S)
    want = reference_attention(one.double(), k.double(), v.double(), shown)
    got = cached_attention(one, k, v, additive_mask(shown, dtype))
    torch.testing.assert_close(got.double(), want, **tolerance)
    starts = torch.arange(4, dtype=torch.int32) * S
    got = attention_by_length(one, k, v, starts, lengths.int(), S)
    torch.testing.assert_close(got.double(), want, **tolerance)


def test_a_cache_computes_its_own_attention():
    q, k, v, _ = random_heads(1, 2, 2, 3, 8, torch.float32)
    assert attention(q, k, v, Layout(cache=lambda q, k, v: (q, k, v)))[1] is k


def test_dropout_reaches_the_kernels_that_have_it():
    q, k, v, _ = random_heads(1, 2, 2, 9, 8, torch.float32)
    starts = random_starts(1, 9, 0.2)
    mask, borders = document_mask(starts, torch.float32), document_borders(starts, 9)
    for layout in (Layout(), Layout(mask=mask), Layout(borders=borders)):
        torch.manual_seed(0)
        first, second = (attention(q, k, v, layout, dropout=0.5) for _ in range(2))
        assert not torch.equal(first, second)


# ---- which way is chosen -------------------------------------------------------------------------


def chosen(idx: Tensor, starts: Tensor | None, dtype: torch.dtype, dropout: float = 0.0) -> str:
    layout = choose_layout(idx, starts, dtype, head_dim=64, dropout=dropout)
    return " ".join(name for name, value in layout._asdict().items() if value is not None)


def test_a_cpu_masks_short_rows_of_documents(monkeypatch):
    monkeypatch.setattr(kernels, "c_kernel_works", lambda *_: False)
    idx = torch.zeros(2, 600, dtype=torch.int64)
    starts = random_starts(2, 600, 0.01)
    assert chosen(idx, None, torch.float32) == ""
    assert chosen(idx[:, :512], starts[:, :512], torch.float32) == "mask"
    assert (
        chosen(idx, starts, torch.float32) == chosen(idx, starts, torch.float32, 0.1) == "borders"
    )
    monkeypatch.setattr(kernels, "c_kernel_works", lambda *_: True)
    assert chosen(idx, starts, torch.bfloat16) == chosen(idx, None, torch.bfloat16) == "firsts"


@pytest.mark.parametrize("flash", [False, True])
def test_a_gpu_masks_documents_without_flash_attention_or_with_dropout(flash, monkeypatch):
    """On meta, which is no CPU either."""
    monkeypatch.setattr(kernels, "has_varlen", lambda *_: flash)
    idx = torch.zeros(2, 32, dtype=torch.int64, device="meta")
    starts = torch.ones(2, 32, dtype=torch.bool, device="meta")
    assert chosen(idx, None, torch.bfloat16) == ""
    assert chosen(idx, starts, torch.bfloat16) == ("borders" if flash else "mask")
    assert chosen(idx, starts, torch.bfloat16, dropout=0.1) == "mask"


def test_flash_attention_is_for_half_precision_on_a_gpu():
    assert not has_varlen(CPU, torch.bfloat16, 64)
    assert not has_varlen(torch.device("cuda"), torch.float32, 64)
    assert not has_varlen(torch.device("cuda"), torch.bfloat16, 36)
    assert not has_varlen(torch.device("cuda"), torch.bfloat16, 264)


# ---- documents -----------------------------------------------------------------------------------


def test_filling_is_one_document():
    idx = torch.tensor([[9, 1, 2, 9, 3, 9, 9, 9], [1, 2, 9, 9, 9, 9, 3, 4]])
    assert documents_of(idx, 9).tolist() == [[1, 1, 1, 2, 2, 3, 3, 3], [0, 0, 1, 1, 1, 1, 1, 1]]


def test_positions_borders_and_mask_of_documents():
    """Against a loop over the tokens. Numbers of documents may come again in a row."""
    documents = packed()
    starts = starts_of(documents)
    positions, borders = torch.zeros_like(documents), []
    shown = torch.zeros(2, 1, 32, 32, dtype=torch.bool)
    for b, begin, end in runs(documents):
        positions[b, begin:end] = torch.arange(end - begin)
        borders.append(32 * b + begin)
        for t in range(begin, end):
            shown[b, 0, t, begin : t + 1] = True
    assert torch.equal(positions_of(starts), positions)
    assert torch.equal(first_positions(starts), torch.arange(32) - positions)
    assert document_borders(starts, 9).tolist() == [*borders, 64, 64, 64]  # two more could start
    mask = document_mask(starts, torch.bfloat16)
    assert mask.dtype == torch.bfloat16 and set(mask.unique().tolist()) == {0.0, -math.inf}
    assert torch.equal(mask == 0, shown)
    with pytest.raises(RuntimeError, match="over 4 documents in 64 tokens: most_documents is too"):
        document_borders(starts, 4)


# ---- the kernel of a GPU -------------------------------------------------------------------------


def as_on_a_gpu(monkeypatch) -> None:
    """Let a CPU take the way of a GPU with flash attention, for rows of any length."""
    monkeypatch.setattr(kernels, "MASKED_LENGTH", 0)
    monkeypatch.setattr(
        kernels,
        "attention_by_document",
        lambda q, k, v, borders, _: varlen_attention(q, k, v, borders),
    )


@pytest.mark.parametrize("shape", ["llama", "llama grouped queries", "qwen3"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_with_borders_equals_that_with_a_mask(shape, checkpointing, monkeypatch):
    """With room for as many documents as there are."""
    net = random_model(tiny_config(**MODELS[shape]))
    net.activation_checkpointing = checkpointing
    documents, x, y = packed(), random_ids(net.cfg, 2, 32), random_ids(net.cfg, 2, 32, seed=5)
    masked = net(x, y, documents=documents)
    want = gradients(net, masked)
    as_on_a_gpu(monkeypatch)
    net.most_documents = 4  # the longer row of `packed` has as many
    calls = []

    def varlen_attn(*args, **options):
        calls.append(len(args[3]))
        return plain_varlen(*args, **options)

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
    bordered = net(x, y, documents=documents)
    got = gradients(net, bordered)
    assert calls == [2 * 4 + 1] * 2 * (1 + checkpointing)  # layers, once more in backward
    torch.testing.assert_close(bordered, masked, rtol=1e-6, atol=0)
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-5, name


def test_blocks_with_borders_compile_to_one_graph_for_any_documents(monkeypatch):
    """varlen_attn itself, whose kernel is a GPU's: traced, not run."""
    as_on_a_gpu(monkeypatch)
    net, graphs = random_model(tiny_config(n_kv_head=2)), []

    def backend(graph, _inputs):
        nodes = graph.graph.nodes
        graphs.append({node.target for node in nodes if node.op == "call_function"})
        return lambda *args: (torch.zeros(2, 32, 64),)

    compile_blocks(net, backend=backend, fullgraph=True)
    with torch.no_grad():
        for length in (32, 16, 20):
            documents = (torch.arange(32) // length).expand(2, -1)
            net(random_ids(net.cfg, 2, 32), documents=documents)
    assert len(graphs) == 2  # of a block and the last norm
    assert any("_varlen_attn" in str(target) for target in graphs[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", ["llama", "llama grouped queries", "qwen3"])
@pytest.mark.parametrize("compiled", [False, True])
def test_flash_attention_by_borders_equals_the_mask_on_a_gpu(shape, compiled, monkeypatch):
    net = random_model(tiny_config(**{**MODELS[shape], "block_size": 512})).cuda()
    x, y = random_ids(net.cfg, 4, 512).cuda(), random_ids(net.cfg, 4, 512, seed=5).cuda()
    batches = [(torch.arange(512) // length).expand(4, -1).cuda() for length in (100, 37, 512)]
    exact = [gradients(net, net(x, y, documents=documents)) for documents in batches]  # float32
    results = {}
    for way in ("mask", "borders"):
        with monkeypatch.context() as patch:
            if way == "mask":
                patch.setattr(kernels, "has_varlen", lambda *_: False)
            elif compiled:
                compile_blocks(net)
            results[way] = []
            for documents in batches:  # numbers of documents differ: one graph all the same
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    loss = net(x, y, documents=documents)
                results[way].append((loss, gradients(net, loss)))
    for want, masked, bordered in zip(exact, results["mask"], results["borders"], strict=True):
        torch.testing.assert_close(bordered[0], masked[0], rtol=2e-3, atol=0)
        for name, grad in want.items():
            by_mask = relative_error(masked[1][name], grad)
            assert relative_error(bordered[1][name], grad) < 1.3 * by_mask + 1e-3, name


# ---- attention.c ---------------------------------------------------------------------------------

# B, H, K, T, D
SHAPES = (
    (2, 3, 3, 64, 64),
    (1, 4, 2, 37, 40),
    (2, 2, 1, 1, 8),
    (1, 2, 2, 300, 128),
    (1, 4, 1, 131, 16),
)


def whole(B: int, T: int) -> Tensor:
    """Return the first positions of rows of one document."""
    return torch.zeros(B, T, dtype=torch.int64)


@needs_c
@pytest.mark.parametrize("documents", [False, True], ids=["whole rows", "documents"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_in_c_agrees_with_the_reference(shape, documents):
    """As exact as bfloat16 allows, and as torch's own kernel: 0.002 to 0.004 there."""
    heads = random_heads(*shape, torch.bfloat16)
    if documents:
        heads = [x.contiguous() for x in heads]
    starts = random_starts(shape[0], shape[3], 0.02 * documents)
    layout = Layout(firsts=first_positions(starts))
    got = with_gradients(partial(attention, layout=layout), *heads)
    exact = (x.double() for x in heads)
    want = with_gradients(partial(reference_attention, visible=visible(starts)), *exact)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.bfloat16 and a.shape == b.shape
        assert relative_error(a.double(), b) < 0.005 if b.any() else a.abs().max() < 1e-3


@needs_c
def test_torch_finds_the_operators_sound():
    q, k, v, dy = random_heads(1, 2, 1, 9, 8, torch.bfloat16)
    firsts = whole(1, 9)
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    ops = torch.ops.groundup
    torch.library.opcheck(ops.cpu_attention.default, (q, k, v, firsts), test_utils=checks)
    lse = kernels.c_forward(q, k, v, firsts)[1]
    scores = q.float() @ k.float().mT / math.sqrt(8)
    scores = scores.masked_fill(~torch.ones(9, 9).tril().bool(), -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    inputs = (dy, lse, q, k, v, firsts)
    torch.library.opcheck(ops.cpu_attention_backward.default, inputs, test_utils=checks)


@needs_c
def test_threads_change_no_bit():
    heads = random_heads(3, 4, 2, 70, 16, torch.bfloat16)
    attend = partial(kernels.cpu_attention, firsts=whole(3, 70))
    found, n = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(with_gradients(attend, *heads))
    finally:
        torch.set_num_threads(n)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@needs_c
def test_large_scores_and_nan():
    q, k, v, _ = random_heads(1, 1, 1, 40, 8, torch.bfloat16)
    far = 300 * q, 300 * k, v
    shown = torch.ones(40, 40).tril().bool()
    want = reference_attention(*(x.double() for x in far), shown)
    got = kernels.cpu_attention(*far, whole(1, 40))
    assert relative_error(got.double(), want) < 0.01
    q[0, 0, 20] = math.nan
    y = kernels.cpu_attention(q, k, v, whole(1, 40))[0, 0]
    assert y[20].isnan().all() and not y[:20].isnan().any() and not y[21:].isnan().any()


def counted_calls(monkeypatch) -> list:
    found, call = [], kernels.call_c

    def counted(*args: object, **tensors: Tensor) -> None:
        found.append(args)
        call(*args, **tensors)

    monkeypatch.setattr(kernels, "call_c", counted)
    return found


def loss_and_gradients(
    net: torch.nn.Module, idx: Tensor, targets: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = net(idx, targets)
    return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]


@needs_c
@pytest.mark.parametrize("documents", [False, True], ids=["whole rows", "documents"])
def test_a_model_in_bfloat16_is_as_near_to_float32_as_by_torch(documents, monkeypatch):
    """Loss and gradients, eager and compiled."""
    net = random_model(tiny_config(n_kv_head=2))
    batch = random_ids(net.cfg, 2, 32), random_ids(net.cfg, 2, 32, seed=5)
    net.delimiter_id = 3 if documents else None
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "c_library", lambda: None)
        exact = loss_and_gradients(net, *batch, torch.float32)
        by_torch = loss_and_gradients(net, *batch, torch.bfloat16)
    calls = counted_calls(monkeypatch)
    for _ in range(2):
        got = loss_and_gradients(net, *batch, torch.bfloat16)
        for a, b, c in zip(got, by_torch, exact, strict=True):
            assert relative_error(a, c) < 1.5 * relative_error(b, c) + 1e-4
        compile_blocks(net, backend="aot_eager")
    assert len(calls) == 2 * 2 * net.cfg.n_layer
    loss_and_gradients(net, *batch, torch.float32)
    assert len(calls) == 2 * 2 * net.cfg.n_layer


def test_torch_does_it_without_a_compiler_with_dropout_or_other_heads(monkeypatch):
    calls = counted_calls(monkeypatch)
    for cfg in (tiny_config(dropout=0.1), tiny_config(head_dim=20)):
        x = random_ids(cfg, 1, 8)
        loss_and_gradients(random_model(cfg), x, x, torch.bfloat16)
    monkeypatch.setattr(compile_c.shutil, "which", lambda name: None)
    kernels.c_library.cache_clear()
    loss_and_gradients(random_model(tiny_config()), x, x, torch.bfloat16)
    assert not calls
    kernels.c_library.cache_clear()
