"""cross_entropy.py against its plain reference, torch's own loss, and autograd over full logits."""

import os
import sys
import textwrap
from pathlib import Path

import forks
import pytest
import torch
import torch.nn.functional as F
from test_model import (
    batch_with_ignored,
    gradients,
    random_ids,
    random_model,
    relative_error,
    tiny_config,
)
from torch import Tensor

from groundup.kernels import cross_entropy as kernels
from groundup.kernels.cross_entropy import (
    cross_entropy,
    reference_cross_entropy,
    token_entropies,
    token_logps,
    token_scores,
)
from groundup.tokens import IGNORE


def head_inputs(N: int = 23, C: int = 16, V: int = 97) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(N, C, generator=generator), torch.randn(V, C, generator=generator)
    targets = torch.randint(V, (N,), generator=generator)
    targets[::5] = IGNORE
    return hidden, weight, targets


@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize(
    "elements", [1, 97, 7 * 97 + 5, 33 * 97, 2**22]
)  # chunks of 1, 1, 7, all 33, all rows
def test_loss_and_gradients_equal_cross_entropy(elements, tie_embeddings, monkeypatch):
    monkeypatch.setattr(kernels, "CHUNK_ELEMENTS", elements)
    net = random_model(tiny_config(n_kv_head=2, tie_embeddings=tie_embeddings))
    x, y = batch_with_ignored(net.cfg)
    want = F.cross_entropy(net(x).flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum")
    want_grads = gradients(net, want * 0.25)
    got = net(x, y)
    assert got.dtype == torch.float32 and got.shape == ()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    for name, grad in gradients(net, got * 0.25).items():
        assert relative_error(grad, want_grads[name]) < 1e-6, name


# One rounding to bfloat16 is at most 2**-9 = 0.2 %, to float16 2**-12 = 0.02 %; a gradient passes
# some tens of them, of either sign. The logits are the same rounded numbers on both sides, so the
# losses differ only by sums in float32.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 1.5e-3)])
@pytest.mark.parametrize("elements", [5 * 97, 2**22])
def test_loss_and_gradients_under_autocast(dtype, tolerance, elements, monkeypatch):
    monkeypatch.setattr(kernels, "CHUNK_ELEMENTS", elements)
    net = random_model(tiny_config(n_kv_head=2, tie_embeddings=True))
    x, y = batch_with_ignored(net.cfg)
    exact = gradients(net, net(x, y))
    with torch.autocast("cpu", dtype=dtype):
        logits = net(x)
        want = F.cross_entropy(
            logits.float().flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        got = net(x, y)
    assert logits.dtype == dtype and got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    want_grads, got_grads = gradients(net, want), gradients(net, got)
    for name, grad in got_grads.items():
        assert grad.dtype == torch.float32
        assert relative_error(grad, want_grads[name]) < tolerance, name
        # Neither further from float32's gradient than autograd's own half precision.
        assert (
            relative_error(grad, exact[name])
            < 1.2 * relative_error(want_grads[name], exact[name]) + 1e-4
        ), name


def test_a_scale_of_the_loss_is_not_rounded():
    """1.0057 rounded to bfloat16 is 1.0078: the gradients would be off by 0.2 %."""
    torch.manual_seed(0)
    hidden = torch.randn(64, 32).bfloat16().requires_grad_()
    weight = torch.randn(97, 32).bfloat16().requires_grad_()
    targets = torch.randint(97, (64,))
    sums = {}
    for scale in (1.0, 1.0057):
        loss = cross_entropy(hidden, weight, targets)[0] * scale
        grads = torch.autograd.grad(loss, (hidden, weight))
        sums[scale] = torch.stack([grad.float().abs().sum() for grad in grads])
    ratio = sums[1.0057] / sums[1.0]
    torch.testing.assert_close(ratio, torch.full((2,), 1.0057), rtol=3e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpus_chunk_computes_what_a_cpus_does(dtype):
    torch.manual_seed(0)
    h, w = torch.randn(50, 32).to(dtype), torch.randn(97, 32).to(dtype)
    targets = torch.randint(97, (50,))
    targets[::7] = IGNORE
    nats, grad = kernels.fused_chunk(h, w, targets)
    want_nats, want = kernels.eager_chunk(h, w, targets, learns=True)
    torch.testing.assert_close(nats, want_nats, rtol=1e-5, atol=1e-6)
    assert grad.dtype == want.dtype == dtype
    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(grad, want, rtol=rtol, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_compiled_loss_of_a_gpu_equals_the_eager_one(monkeypatch):
    monkeypatch.setattr(kernels, "GPU_CHUNK_ELEMENTS", 40 * 97)
    monkeypatch.setattr(kernels.ChunkedCrossEntropy, "compiled_chunk", None)
    hidden = torch.randn(130, 64, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(97, 64, device="cuda").bfloat16().requires_grad_()
    targets = torch.randint(97, (130,), device="cuda")
    found = []
    for _ in range(2):
        loss = cross_entropy(hidden, weight, targets)[0]
        found.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
        kernels.compile_loss(hidden.device)
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=0)
    for got, want in zip(found[1][1:], found[0][1:], strict=True):
        assert relative_error(got, want) < 5e-3


def test_a_cpus_loss_is_not_compiled():
    kernels.compile_loss(torch.device("cpu"))
    assert kernels.ChunkedCrossEntropy.compiled_chunk is None


@pytest.mark.slow
def test_a_gpus_chunk_is_few_kernels_and_one_graph_for_any_rows():
    """As inductor counts them for a CPU, whose loops are cut finer."""
    from torch._inductor import metrics

    torch._dynamo.reset()
    metrics.reset()
    chunk, made = torch.compile(kernels.fused_chunk), []
    for n in (64, 48, 40, 33):
        chunk(torch.randn(n, 32), torch.randn(97, 32), torch.randint(97, (n,)))
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


@pytest.mark.parametrize("elements", [1, 7 * 97, 2**22])
@pytest.mark.parametrize("frozen", ["", "hidden", "weight", "hidden and weight"])
def test_cross_entropy_agrees_with_the_reference(elements, frozen, monkeypatch):
    """In chunks of 1, 7 and all tokens: loss, nats, and the gradients that are asked for."""
    monkeypatch.setattr(kernels, "CHUNK_ELEMENTS", elements)
    hidden, weight, targets = head_inputs()
    hidden.requires_grad_("hidden" not in frozen)
    weight.requires_grad_("weight" not in frozen)
    want, want_nats = reference_cross_entropy(hidden, weight, targets)
    loss, nats = cross_entropy(hidden, weight, targets)
    assert loss.dtype == nats.dtype == torch.float32
    assert loss.shape == () and not nats.requires_grad
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)
    torch.testing.assert_close(nats, want_nats, rtol=1e-5, atol=2e-6)
    inputs = [t for t in (hidden, weight) if t.requires_grad]
    assert loss.requires_grad == bool(inputs)
    if inputs:
        grads = torch.autograd.grad(loss * 0.25, inputs)
        want_grads = torch.autograd.grad(want * 0.25, inputs)
        for got, wanted in zip(grads, want_grads, strict=True):
            assert relative_error(got, wanted) < 1e-6


def test_the_reference_is_torchs_loss_in_float64():
    hidden, weight, targets = (x.double() for x in head_inputs())
    targets = targets.long()
    logps = (hidden @ weight.T).log_softmax(1)
    each = [-row[t] if t != IGNORE else row[0] * 0 for row, t in zip(logps, targets, strict=True)]
    want = torch.stack(each)
    loss, nats = reference_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(nats, want.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss.float(), want.sum().float(), rtol=1e-6, atol=0)


def test_a_frozen_head_costs_nothing(monkeypatch):
    hidden, weight, targets = head_inputs()
    monkeypatch.setattr(kernels, "add_product", None)  # would make the gradient of the head
    cross_entropy(hidden.requires_grad_(), weight, targets)[0].backward()
    assert hidden.grad is not None


def test_cross_entropy_of_chosen_positions_equals_that_of_all():
    """Only positions with a target go through the head: the same loss and gradients."""
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
    loss, nats = cross_entropy(net.hidden(x).flatten(0, 1)[none], net.lm_head.weight, none)
    assert loss.item() == 0.0 and nats.shape == (0,)
    for name, grad in gradients(net, loss).items():
        assert grad is not None and grad.eq(0).all(), name
    nats, correct = token_scores(net.hidden(x).flatten(0, 1)[none], net.lm_head.weight, none)
    assert nats.shape == correct.shape == (0,) and correct.dtype == torch.bool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_scores_equal_those_of_full_logits(dtype, monkeypatch):
    monkeypatch.setattr(kernels, "CHUNK_ELEMENTS", 7 * 97)
    hidden, weight, targets = head_inputs(N=200)
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


@pytest.mark.parametrize(
    "frozen, temperature", [("", 1.0), ("", 0.7), ("weight", 1.0), ("hidden", 1.3)]
)
def test_token_logps_are_torchs_with_gradients_over_any_number_of_blocks(
    monkeypatch, frozen, temperature
):
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 8, requires_grad=frozen != "hidden"), torch.randn(11, 8)
    weight.requires_grad_(frozen != "weight")
    targets = torch.randint(11, (23,))
    targets[::5] = IGNORE
    factors = torch.randn(23)
    logits = hidden @ weight.T / temperature
    expected = logits.log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0] * (
        targets >= 0
    )
    (expected.exp() * factors).sum().backward()  # a loss that is not linear
    grads = [t.grad for t in (hidden, weight)]
    for elements in (11, 40, 10**6):
        monkeypatch.setattr(kernels, "CHUNK_ELEMENTS", elements)
        hidden.grad = weight.grad = None
        found = token_logps(hidden, weight, targets, temperature)
        torch.testing.assert_close(found, expected)
        (found.exp() * factors).sum().backward()
        for t, grad in zip((hidden, weight), grads, strict=True):
            assert (t.grad is None) == (grad is None)
            assert grad is None or torch.allclose(t.grad, grad, atol=1e-6)


def test_entropies_are_torchs(monkeypatch):
    torch.manual_seed(0)
    hidden, weight = torch.randn(23, 8), torch.randn(11, 8)
    expected = torch.distributions.Categorical(logits=hidden @ weight.T).entropy()
    for elements in (11, 40, 10**6):
        monkeypatch.setattr(kernels, "CHUNK_ELEMENTS", elements)
        torch.testing.assert_close(token_entropies(hidden, weight), expected)
    assert token_entropies(hidden[:0], weight).shape == (0,)


HEAD_MEMORY = """
    import sys
    import torch
    import torch.nn.functional as F
    from groundup.kernels.cross_entropy import cross_entropy
    from groundup.tokens import IGNORE

    def memory(name):  # of this process alone: getrusage would remember the parent's before exec
        with open("/proc/self/status", encoding="utf-8") as f:
            return 1024 * int(next(line for line in f if line.startswith(name)).split()[1])

    def chunked(hidden, weight, targets):
        return cross_entropy(hidden, weight, targets)[0]

    def plain(hidden, weight, targets):
        return F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORE, reduction="sum")

    torch.manual_seed(0)
    torch.set_num_threads(1)
    N, C, V = 2048, 128, 16000
    hidden = torch.randn(N, C, requires_grad=True)
    weight = (torch.randn(V, C) * 0.05).requires_grad_()
    targets = torch.randint(V, (N,))
    targets[::7] = IGNORE
    for loss_of in (chunked, plain):  # the one that takes less comes first
        # What libraries set up once is not the head's.
        loss_of(hidden[:8], weight[:64], targets[:8] % 64).backward()
        hidden.grad = weight.grad = None
        before = memory("VmRSS")
        loss = loss_of(hidden, weight, targets)
        loss.backward()
        print(memory("VmHWM") - before)
        torch.save([loss.detach(), hidden.grad, weight.grad], f"{sys.argv[1]}/{loss_of.__name__}")
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_head_takes_a_fifth_of_the_memory_of_full_logits(tmp_path):
    env = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2]), OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", textwrap.dedent(HEAD_MEMORY), str(tmp_path)]
    out = forks.run(command, env=env, capture_output=True, text=True, check=True).stdout
    chunked, plain = (torch.load(tmp_path / name, weights_only=True) for name in ("chunked", "plain"))
    for got, want in zip(chunked, plain, strict=True):
        assert relative_error(got, want) < 1e-6
    chunked_peak, plain_peak = map(int, out.split())
    assert plain_peak > 2 * 2048 * 16000 * 4  # logits and their gradient: the measure measures
    assert 5 * chunked_peak < plain_peak, out
