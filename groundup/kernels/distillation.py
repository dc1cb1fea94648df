"""The loss of a student that learns from a teacher's distributions and from the data.

    loss, nats, kl = distill(hidden, weight, targets, teacher_hidden, teacher_weight, how)

Each labelled token costs (1 - how.weight) * its cross-entropy + how.weight * the divergence between
the teacher's distribution p and the student's q of the next token (arXiv:2306.13649, section 3.1):

    beta = 0          KL(p || q)  forward: the student covers everything the teacher might say
    beta = 1          KL(q || p)  reverse: the student says only what the teacher finds likely
    0 < beta < 1      beta * KL(p || m) + (1 - beta) * KL(q || m) with m = beta * p + (1 - beta) * q

p and q are softmax(logits / temperature). As in cross_entropy.py the logits of all tokens are never
held: the two heads are multiplied chunk by chunk, and forward computes the gradients.

Shapes: N tokens, C and D width of student and teacher, V vocab; hidden (N, C), weight (V, C),
targets (N,) int64 or IGNORE, teacher_hidden (N, D), teacher_weight (V, D).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from groundup.kernels.attention import compute_dtype
from groundup.kernels.cross_entropy import (
    HeadGradients,
    chunks,
    cross_entropy_gradient,
    scaled,
    softmax_cross_entropy,
)
from groundup.tokens import IGNORE


class Distillation(NamedTuple):
    weight: float  # of the divergence, 0 to 1; the cross-entropy has the rest
    beta: float  # 0 to 1
    temperature: float  # above 0


def reference_distill(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    how: Distillation,
) -> Tensor:
    """Return the loss that `distill` returns, by its definition. Tests compare the two."""
    valid = targets != IGNORE
    logits = hidden[valid] @ weight.T  # (n, V), of the tokens with a label
    # q is the student's distribution, p the teacher's.
    q = (logits / how.temperature).softmax(1)
    p = (teacher_hidden[valid] @ teacher_weight.T / how.temperature).softmax(1)
    if how.beta in (0, 1):
        first, second = (q, p) if how.beta else (p, q)  # reverse or forward
        kl = (first * (first / second).log()).sum()
    else:
        m = how.beta * p + (1 - how.beta) * q
        of_p, of_q = (p * (p / m).log()).sum(), (q * (q / m).log()).sum()
        kl = how.beta * of_p + (1 - how.beta) * of_q
    nats = F.cross_entropy(logits, targets[valid], reduction="sum")
    return (1 - how.weight) * nats + how.weight * kl


def distill(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    how: Distillation,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss 0-d, nats (N,), kl (N,)), float32; only the loss has gradients.

    nats is each token's cross-entropy, kl its divergence, both 0 where the target is IGNORE. If the
    two vocabularies are padded to other sizes, the divergence is over the ids that both have."""
    tensors = hidden, weight, targets, teacher_hidden, teacher_weight
    with_grad = torch.is_grad_enabled()  # inside the function it is always off
    return ChunkedDistillation.apply(*tensors, how, compute_dtype(hidden), with_grad)


class ChunkedDistillation(torch.autograd.Function):
    """Two heads and the loss. As in ChunkedCrossEntropy, forward computes the gradients too."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        how: Distillation,
        dtype: torch.dtype,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        loss = hidden.new_zeros((), dtype=torch.float32)
        nats = hidden.new_empty(len(hidden), dtype=torch.float32)
        kl = torch.empty_like(nats)
        w, teacher_w = weight.to(dtype), teacher_weight.to(dtype)  # once for all chunks
        gradients = HeadGradients(ctx, hidden, weight, with_grad)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in chunks(len(hidden), weight):
                h, t = hidden[part].to(dtype), targets[part]
                valid = (t != IGNORE).float()  # (n,) 1 or 0
                logits = (h @ w.T).float()
                teacher_logits = (teacher_hidden[part].to(dtype) @ teacher_w.T).float()
                nats[part], lse = softmax_cross_entropy(logits, t)
                # before the next lines overwrite the logits
                found, grad = divergence(logits, teacher_logits, how)
                kl[part] = found * valid
                loss += ((1 - how.weight) * nats[part] + how.weight * kl[part]).sum()

                # the gradient of the cross-entropy takes the place of the logits
                grad_logits = cross_entropy_gradient(logits, t, lse, (1 - how.weight) * valid)
                # ids that only the student has get none from the divergence
                grad_logits[:, : grad.shape[1]] += grad.mul_(how.weight * valid.unsqueeze(1))
                gradients.add(part, grad_logits.to(dtype), h, w)

        ctx.save_for_backward(*gradients.total())
        ctx.mark_non_differentiable(nats, kl)
        return loss, nats, kl

    @staticmethod
    def backward(ctx, grad: Tensor, *_: Tensor) -> tuple:
        # of hidden and weight; the teacher is frozen
        return *scaled(ctx.saved_tensors, grad), None, None, None, None, None, None


def divergence(logits: Tensor, teacher_logits: Tensor, how: Distillation) -> tuple[Tensor, Tensor]:
    """Return the divergence (n,) and its gradient with respect to the student's logits.

    logits, teacher_logits (n, V) float32. The gradient covers the ids that both have."""
    # Let g = d divergence / d q. With respect to the logits the gradient is
    #     q * (g - sum(q * g)) / temperature        a constant in g cancels
    #     g = log q - log p                         reverse
    #     g = (1 - beta) * (log q - log m)          mixed
    n_ids = min(logits.shape[1], teacher_logits.shape[1])  # rows that pad a vocabulary mean nothing
    log_q = (logits[:, :n_ids] / how.temperature).log_softmax(1)
    log_p = (teacher_logits[:, :n_ids] / how.temperature).log_softmax(1)
    q = log_q.exp()
    # Forward: only log_q depends on the student, and its part is a cross-entropy with p as target
    if how.beta == 0:
        p = log_p.exp()
        return (p * (log_p - log_q)).sum(1), (q - p).div_(how.temperature)

    # Reverse and mixture: sum(q * g) is KL(q || p), or the mixture's second term
    kl_of_p = 0.0
    if how.beta == 1:
        g = log_q - log_p
    else:
        # log m = log(beta p + (1 - beta) q), from logarithms: p and q may be 0 in float32
        log_m = torch.logaddexp(log_p + math.log(how.beta), log_q + math.log1p(-how.beta))
        kl_of_p = how.beta * (log_p.exp() * (log_p - log_m)).sum(1)
        g = (1 - how.beta) * (log_q - log_m)
    mean = (q * g).sum(1, keepdim=True)  # (n, 1)
    return kl_of_p + mean.squeeze(1), q.mul_(g - mean).div_(how.temperature)
