"""cpu_attention.py and attention.c against attention written out in float64."""

import math
from functools import partial

import pytest
import torch
from test_model import random_ids, random_model, relative_error, tiny_config
from torch import Tensor

from groundup.tokens.documents import firsts_of
from groundup.train import cpu_attention as attention
from groundup.train.cpu_attention import attend

pytestmark = pytest.mark.skipif(
    not attention.works(tiny_config(), torch.device("cpu"), torch.bfloat16),
    reason="needs AVX512-BF16 and a C compiler",
)


def written_out(q: Tensor, k: Tensor, v: Tensor, firsts: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    position = torch.arange(q.shape[2])
    seen = (position <= position[:, None]) & (position >= firsts[:, None, :, None])
    scores = (q @ k.mT / math.sqrt(q.shape[3])).masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ v


def whole(B: int, T: int) -> Tensor:
    """Rows of one document."""
    return torch.zeros(B, T, dtype=torch.int64)


def random_heads(B: int, H: int, K: int, T: int, D: int, contiguous: bool = False) -> list[Tensor]:
    """q, k, v and a gradient, as linear layers have them: the heads of a position side by side."""
    generator = torch.Generator().manual_seed(B + T)
    found = [torch.randn(B, T, h, D, generator=generator).bfloat16().transpose(1, 2) for h in (H, K, K, H)]
    return [x.contiguous() for x in found] if contiguous else found


def with_gradients(attend, q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> list[Tensor]:
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    y = attend(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy.to(y.dtype))]


# B, H, K, T, D
SHAPES = (2, 3, 3, 64, 64), (1, 4, 2, 37, 40), (2, 2, 1, 1, 8), (1, 2, 2, 300, 128), (1, 4, 1, 131, 16)


@pytest.mark.parametrize("documents", [False, True], ids=["whole rows", "documents"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, documents):
    """As exact as bfloat16 allows, and as torch's own kernel: 0.002 to 0.004 there."""
    heads = random_heads(*shape, contiguous=documents)
    starts = torch.rand(shape[0], shape[3], generator=torch.Generator().manual_seed(1)) < 0.02 * documents
    firsts = firsts_of(starts)
    got = with_gradients(partial(attend, firsts=firsts), *heads)
    want = with_gradients(partial(written_out, firsts=firsts), *(x.double() for x in heads))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.bfloat16 and a.shape == b.shape
        assert relative_error(a.double(), b) < 0.005 if b.any() else a.abs().max() < 1e-3


def test_torch_finds_the_operators_sound():
    (q, k, v, dy), firsts = random_heads(1, 2, 1, 9, 8), whole(1, 9)
    checks = "test_schema", "test_faketensor", "test_autograd_registration"
    ops = torch.ops.groundup
    torch.library.opcheck(ops.cpu_attention.default, (q, k, v, firsts), test_utils=checks)
    lse = attention.forward(q, k, v, firsts)[1]
    scores = (q.float() @ k.float().mT / math.sqrt(8)).masked_fill(~torch.ones(9, 9).tril().bool(), -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    torch.library.opcheck(ops.cpu_attention_backward.default, (dy, lse, q, k, v, firsts), test_utils=checks)


def test_threads_change_no_bit():
    heads = random_heads(3, 4, 2, 70, 16)
    found, n = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(with_gradients(partial(attend, firsts=whole(3, 70)), *heads))
    finally:
        torch.set_num_threads(n)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_large_scores_and_nan():
    q, k, v, _ = random_heads(1, 1, 1, 40, 8)
    far = 300 * q, 300 * k, v
    want = written_out(*(x.double() for x in far), whole(1, 40))
    assert relative_error(attend(*far, whole(1, 40)).double(), want) < 0.01
    q[0, 0, 20] = math.nan
    y = attend(q, k, v, whole(1, 40))[0, 0]
    assert y[20].isnan().all() and not y[:20].isnan().any() and not y[21:].isnan().any()


def compiled(net: torch.nn.Module) -> torch.nn.Module:
    torch._dynamo.reset()
    net.compile_blocks(lambda f: torch.compile(f, backend="aot_eager", dynamic=False))
    return net


def counted_calls(monkeypatch) -> list:
    found, call = [], attention.call
    monkeypatch.setattr(attention, "call", lambda *args, **tensors: (found.append(args), call(*args, **tensors)))
    return found


def loss_and_gradients(net: torch.nn.Module, idx: Tensor, targets: Tensor, dtype: torch.dtype) -> list[Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = net(idx, targets)
    return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]


@pytest.mark.parametrize("documents", [False, True], ids=["whole rows", "documents"])
def test_a_model_in_bfloat16_is_as_near_to_float32_as_by_torch(documents, monkeypatch):
    """Loss and gradients, eager and compiled."""
    net = random_model(tiny_config(n_kv_head=2))
    batch = random_ids(net.cfg, 2, 32), random_ids(net.cfg, 2, 32, seed=5)
    net.document_id = 3 if documents else None
    with monkeypatch.context() as patch:
        patch.setattr(attention, "library", lambda: None)
        exact = loss_and_gradients(net, *batch, torch.float32)
        by_torch = loss_and_gradients(net, *batch, torch.bfloat16)
    calls = counted_calls(monkeypatch)
    for _ in range(2):
        got = loss_and_gradients(net, *batch, torch.bfloat16)
        for a, b, c in zip(got, by_torch, exact, strict=True):
            assert relative_error(a, c) < 1.5 * relative_error(b, c) + 1e-4
        compiled(net)
    assert len(calls) == 2 * 2 * net.cfg.n_layer
    loss_and_gradients(net, *batch, torch.float32)
    assert len(calls) == 2 * 2 * net.cfg.n_layer


def test_torch_does_it_without_a_compiler_with_dropout_or_other_heads(monkeypatch):
    calls = counted_calls(monkeypatch)
    for cfg in (tiny_config(dropout=0.1), tiny_config(head_dim=20)):
        loss_and_gradients(random_model(cfg), random_ids(cfg, 1, 8), random_ids(cfg, 1, 8), torch.bfloat16)
    monkeypatch.setattr("groundup.compile_c.shutil.which", lambda name: None)
    attention.library.cache_clear()
    attention.compiling.cache_clear()
    loss_and_gradients(random_model(tiny_config()), random_ids(cfg, 1, 8), random_ids(cfg, 1, 8), torch.bfloat16)
    assert not calls
    attention.library.cache_clear()
    attention.compiling.cache_clear()
