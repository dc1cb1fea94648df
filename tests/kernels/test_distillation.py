"""The loss of a student beside its definition, autograd, trl's and hand arithmetic."""

import math

import pytest
import torch

from groundup.kernels import cross_entropy as plain
from groundup.kernels.cross_entropy import cross_entropy
from groundup.kernels.distillation import Distillation, distill, reference_distill
from groundup.tokens import IGNORE

N, C, D, V = 37, 12, 20, 50
BETAS = (0.0, 0.1, 0.5, 1.0)


def tensors(dtype=torch.float32, extra: int = 0) -> tuple:
    torch.manual_seed(0)
    hidden = torch.randn(N, C, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, C, dtype=dtype, requires_grad=True)
    targets = torch.randint(V, (N,))
    targets[::5] = IGNORE
    teacher_hidden, teacher_weight = torch.randn(N, D, dtype=dtype), torch.randn(V + extra, D, dtype=dtype)
    return hidden, weight, targets, teacher_hidden, teacher_weight / 2


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("weight", (0.3, 1.0))
@pytest.mark.parametrize("temperature", (1.0, 2.5))
def test_loss_and_gradients_are_those_of_the_definition(monkeypatch, beta, weight, temperature):
    monkeypatch.setattr(plain, "CHUNK_ELEMENTS", 10 * V)  # several chunks, the last one shorter
    how, given = Distillation(weight, beta, temperature), tensors()
    want = reference_distill(*given, how)
    expected = torch.autograd.grad(want, given[:2])
    loss, nats, kl = distill(*given, how)
    found = torch.autograd.grad(loss * 3, given[:2])
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    assert ((1 - weight) * nats + weight * kl).sum().item() == pytest.approx(want.item(), rel=1e-5)
    assert not nats[::5].any() and not kl[::5].any() and (kl[1::5] > 0).all()
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, 3 * other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", (1.0, 2.0))
def test_the_divergence_is_trls(beta, temperature):
    GKDTrainer = pytest.importorskip("trl.experimental.gkd").GKDTrainer
    hidden, weight, targets, teacher_hidden, teacher_weight = given = tensors()
    student = (hidden @ weight.T)[None]
    teacher = (teacher_hidden @ teacher_weight.T)[None]
    want = GKDTrainer.generalized_jsd_loss(
        student, teacher, labels=targets[None], beta=beta, temperature=temperature, reduction="sum"
    )
    loss, _, _ = distill(*given, Distillation(1.0, beta, temperature))
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    for mine, other in zip(
        torch.autograd.grad(loss, given[:2]), torch.autograd.grad(want, given[:2]), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_by_hand():
    """Two ids: the student says (1/2, 1/2), the teacher (3/4, 1/4)."""
    hidden, weight = torch.ones(1, 1), torch.zeros(2, 1, requires_grad=True)
    teacher = torch.ones(1, 1), torch.tensor([[math.log(3.0)], [0.0]])
    targets = torch.tensor([1])
    kl = {
        0.0: 0.75 * math.log(1.5) + 0.25 * math.log(0.5),
        1.0: 0.5 * math.log(2 / 3) + 0.5 * math.log(2),
        0.5: 0.5 * (0.75 * math.log(1.2) + 0.25 * math.log(2 / 3))
        + 0.5 * (0.5 * math.log(0.8) + 0.5 * math.log(4 / 3)),
    }
    for beta, value in kl.items():
        _, nats, found = distill(hidden, weight, targets, *teacher, Distillation(0.5, beta, 1.0))
        assert (nats.item(), found.item()) == pytest.approx((math.log(2), value), rel=1e-6)


def test_without_weight_it_is_the_cross_entropy_to_the_bit():
    given = tensors()
    want, nats = cross_entropy(*given[:3])
    loss, found, _ = distill(*given, Distillation(0.0, 0.5, 1.0))
    assert loss.item() == want.item() and torch.equal(found, nats)
    expected, mine = torch.autograd.grad(want, given[:2]), torch.autograd.grad(loss, given[:2])
    assert all(map(torch.equal, mine, expected))


@pytest.mark.parametrize("extra", (-6, 6))
def test_vocabularies_padded_to_other_sizes(extra):
    """Over the ids that both have; the other ids learn from the labels alone."""
    hidden, weight, targets, teacher_hidden, teacher_weight = tensors(extra=extra)
    both = V + min(0, extra)
    targets = targets.clamp(max=both - 1)
    how = Distillation(1.0, 0.5, 1.0)
    loss, _, _ = distill(hidden, weight, targets, teacher_hidden, teacher_weight, how)
    want = reference_distill(
        hidden, weight[:both], targets, teacher_hidden, teacher_weight[:both], how
    )
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    grads = torch.autograd.grad(loss, weight)[0], torch.autograd.grad(want, weight)[0]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=2e-5)
    assert not grads[0][both:].any()


def test_a_teacher_that_agrees_costs_nothing():
    hidden, weight, targets, _, _ = tensors()
    for beta in BETAS:
        loss, _, _ = distill(
            hidden, weight, targets, hidden.detach(), weight.detach(), Distillation(1.0, beta, 1.0)
        )
        grad = torch.autograd.grad(loss, hidden)[0]
        assert abs(loss.item()) < 1e-4 and grad.abs().max() < 1e-5


@pytest.mark.parametrize(("beta", "least", "most"), [(0.0, 0.0, 0.6), (1.0, 0.9, 1.0)])
def test_forward_covers_both_modes_and_reverse_seeks_one(beta, least, most):
    """The teacher has two peaks, the student can have one: a bell over 21 ids, mean and width learned.

    Checked: the share of the student's probability at and around the larger peak."""
    ids = torch.arange(21.0)
    teacher = 0.6 * (-((ids - 4) ** 2)).exp() + 0.4 * (-((ids - 16) ** 2)).exp()
    teacher = (1e-6 + teacher)[:, None].log()
    mean, width = torch.tensor(6.0, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    optimizer, target = torch.optim.Adam([mean, width], lr=0.05), torch.tensor([0])
    for _ in range(400):
        bell = -(((ids - mean) / width.exp()) ** 2) / 2
        loss, _, _ = distill(
            torch.ones(1, 1), bell[:, None], target, torch.ones(1, 1), teacher, Distillation(1.0, beta, 1.0)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    near = bell.detach().softmax(0)[:9].sum().item()
    assert least <= near <= most, near


def test_a_temperature_flattens_the_teacher_and_weakens_the_gradient():
    """Far above the logits the divergence is small in T squared, as in trl; no factor T * T makes up for it."""
    given = tensors()
    norms = []
    for temperature in (10.0, 100.0):
        loss, _, _ = distill(*given, Distillation(1.0, 0.0, temperature))
        norms.append(torch.autograd.grad(loss, given[0])[0].norm().item())
    assert norms[0] / norms[1] == pytest.approx(100, rel=0.2)
