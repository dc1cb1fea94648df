"""Optimizers on flat buckets, and learning-rate schedules.

AdamW (fused) and Muon for the 2-D weights of the blocks. Both work on the flat buffers of ddp.py's buckets: a run of
parameters is one tensor to AdamW, and equal-shaped matrices, which lie side by side, are one stack to Muon. State is
saved by parameter name, so a checkpoint does not know about buckets.
"""

import math
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

# Quintic Newton-Schulz, tuned to be steep at zero while singular values stay near 1 (Keller Jordan, Muon).
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5


class OptimError(ValueError):
    one_line = True


class Bucket(Protocol):
    """What an optimizer needs to know of a bucket of ddp.py."""

    index: int
    names: list[str]
    params: list[nn.Parameter]
    offsets: list[int]  # where each parameter begins in the flat tensors
    param: Tensor  # flat view of the parameters
    grad: Tensor  # flat view of their gradients


class AdamWSegment:
    """AdamW (arXiv:1711.05101) on consecutive parameters that share a weight decay, as one flat tensor."""

    def __init__(self, bucket: Bucket, items: list[int], betas: tuple[float, float], eps: float, decay: float) -> None:
        begin, end = span(bucket, items)
        self.param, self.grad = bucket.param[begin:end], bucket.grad[begin:end]
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.param), torch.zeros_like(self.param)
        self.step = torch.zeros((), device=self.param.device)
        self.views = named_views(bucket, items, begin)
        self.betas, self.eps, self.decay = betas, eps, decay

    def update(self, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        # The kernel divides by grad_scale and leaves everything, the step count too, when found_inf is 1.
        adamw(
            [self.param], [self.grad], [self.exp_avg], [self.exp_avg_sq], [], [self.step], fused=True,
            grad_scale=grad_scale, found_inf=found_inf, amsgrad=False, beta1=self.betas[0], beta2=self.betas[1],
            lr=lr, weight_decay=self.decay, eps=self.eps, maximize=False,
        )  # fmt: skip

    def state(self) -> dict[str, dict[str, Tensor]]:
        """{parameter name: views of its state}."""
        return {
            name: {"exp_avg": cut(self.exp_avg, view), "exp_avg_sq": cut(self.exp_avg_sq, view), "step": self.step}
            for name, view in self.views.items()
        }


class MuonStack:
    """Muon on equal-shaped matrices as one (K, n, m) stack: momentum, then the nearest orthogonal matrix of each.

    The step is scaled by 0.2 sqrt(max(n, m)), which gives it the size of AdamW's, so that both share one learning rate
    and one weight decay (Moonlight, arXiv:2502.16982, section 2.2).
    """

    def __init__(self, bucket: Bucket, items: list[int], momentum: float, decay: float, dtype: torch.dtype) -> None:
        begin, end = span(bucket, items)
        shape = (len(items), *bucket.params[items[0]].shape)
        self.param, self.grad = bucket.param[begin:end].view(shape), bucket.grad[begin:end].view(shape)
        self.buffer = torch.zeros_like(self.param)
        self.names = [bucket.names[i] for i in items]
        self.momentum, self.decay, self.dtype = momentum, decay, dtype
        self.lr_scale = 0.2 * math.sqrt(max(shape[1:]))

    def update(self, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        apply = 1 - found_inf  # a skipped step multiplies by 0 instead of asking the host
        grad = torch.where(found_inf > 0, 0, self.grad / grad_scale)
        self.buffer.lerp_(grad, (1 - self.momentum) * apply)
        direction = orthogonalize(grad.lerp_(self.buffer, self.momentum), self.dtype)  # Nesterov's look-ahead
        self.param.mul_(1 - lr * self.decay * apply)
        self.param.add_(direction * (-lr * self.lr_scale * apply))

    def state(self) -> dict[str, dict[str, Tensor]]:
        return {name: {"momentum": self.buffer[i]} for i, name in enumerate(self.names)}


def orthogonalize(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x (K, n, m) -> approximately U V^T of each x = U S V^T, by Newton-Schulz in `dtype` (float16 would overflow)."""
    a, b, c = NS_COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    y = (x.mT if tall else x).to(dtype)
    y = y / torch.linalg.matrix_norm(y, keepdim=True).clamp(min=1e-7)
    for _ in range(NS_STEPS):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if tall else y


class Optimizer:
    """The update rule of every bucket. `kind` is 'adamw' or 'muon'; matrices decay, vectors do not. Muon multiplies in
    `muon_dtype`: bfloat16 is enough for training, float32 for runs that must agree to rounding."""

    def __init__(
        self, buckets: Iterable[Bucket], kind: str = "adamw", betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8, weight_decay: float = 0.1, momentum: float = 0.95, muon_dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        if kind not in ("adamw", "muon"):
            raise OptimError(f"optim: optimizer must be 'adamw' or 'muon', got {kind!r}")
        self.groups = []
        for bucket in buckets:
            groups = []
            for rule, items in runs(bucket, kind):
                if rule == "muon":
                    groups.append(MuonStack(bucket, items, momentum, weight_decay, muon_dtype))
                else:
                    groups.append(AdamWSegment(bucket, items, betas, eps, weight_decay if rule == "decay" else 0.0))
            self.groups.append(groups)

    def update(self, bucket: Bucket, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """One step of the parameters of `bucket`. Gradients are divided by `grad_scale` (0-d); where `found_inf` (0-d)
        is 1, parameters and state stay as they are."""
        for group in self.groups[bucket.index]:
            group.update(lr, grad_scale, found_inf)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """{parameter name: {"exp_avg", "exp_avg_sq", "step"} or {"momentum"}}, views of the live state."""
        return {name: state for groups in self.groups for group in groups for name, state in group.state().items()}

    def load_state_dict(self, saved: dict[str, dict[str, Tensor]]) -> None:
        mine = self.state_dict()
        for name in mine.keys() | saved.keys():
            ours, theirs = set(mine.get(name, ())), set(saved.get(name, ()))
            if ours != theirs:
                raise OptimError(
                    f"optim: the saved state of {name!r} has {sorted(theirs)}, this run needs {sorted(ours)}; "
                    f"resume with the optimizer it was saved with, or start anew with init_from"
                )
        for name, state in mine.items():
            for key, value in state.items():
                value.copy_(saved[name][key])


def runs(bucket: Bucket, kind: str) -> list[tuple[str, list[int]]]:
    """Cut a bucket into runs [(rule, indices of consecutive parameters)]; rule is 'muon', 'decay' or 'no_decay'."""
    found: list[tuple[tuple, list[int]]] = []
    for i, (name, p) in enumerate(zip(bucket.names, bucket.params, strict=True)):
        if kind == "muon" and p.ndim == 2 and name.startswith("layers."):
            key = ("muon", p.shape)
        else:
            key = ("decay" if p.ndim >= 2 else "no_decay",)
        adjacent = i > 0 and bucket.offsets[i] == bucket.offsets[i - 1] + bucket.params[i - 1].numel()
        if found and found[-1][0] == key and adjacent:
            found[-1][1].append(i)
        else:
            found.append((key, [i]))
    return [(key[0], items) for key, items in found]


def span(bucket: Bucket, items: list[int]) -> tuple[int, int]:
    """First and one-past-last element of consecutive parameters in the bucket's flat tensors."""
    return bucket.offsets[items[0]], bucket.offsets[items[-1]] + bucket.params[items[-1]].numel()


def named_views(bucket: Bucket, items: list[int], begin: int) -> dict[str, tuple[int, torch.Size]]:
    """{name: (offset within the run, shape)}."""
    return {bucket.names[i]: (bucket.offsets[i] - begin, bucket.params[i].shape) for i in items}


def cut(flat: Tensor, view: tuple[int, torch.Size]) -> Tensor:
    offset, shape = view
    return flat[offset : offset + shape.numel()].view(shape)


# ---- schedules ------------------------------------------------------------------------------------------------------

SCHEDULES = ("constant", "cosine", "linear", "wsd", "wcsd")


def learning_rate_at(
    step: int, schedule: str, peak: float, min_lr: float, warmup_steps: int, decay_steps: int,
    decay_fraction: float = 0.2, stable_lr: float = 0.0,
) -> float:  # fmt: skip
    """Learning rate of update number `step` (1, 2, ...).

    Linear warm-up reaches `peak` just after `warmup_steps`; the first update is never a no-op. `min_lr` is reached at
    `decay_steps` and held after it; a run that ends earlier ends above it.
      constant  peak
      cosine    half a cosine from peak to min_lr (arXiv:1608.03983)
      linear    a straight line from peak to min_lr
      wsd       peak, then a straight line to min_lr over the last decay_fraction (MiniCPM, arXiv:2404.06395)
      wcsd      half a cosine from peak to stable_lr over the first half of what is left, stable_lr, then as wsd
    """
    if step <= warmup_steps:
        return peak * step / (warmup_steps + 1)
    if schedule == "constant":
        return peak
    if step >= decay_steps:
        return min_lr
    t = (step - warmup_steps) / max(1, decay_steps - warmup_steps)  # 0..1 from the end of the warm-up to the horizon
    if schedule == "cosine":
        return half_cosine(peak, min_lr, t)
    if schedule == "linear":
        return peak + (min_lr - peak) * t
    plateau = peak if schedule == "wsd" else stable_lr
    decay_begin = 1 - decay_fraction
    if t > decay_begin:
        return plateau + (min_lr - plateau) * (t - decay_begin) / decay_fraction
    if schedule == "wcsd":
        return half_cosine(peak, stable_lr, min(1.0, 2 * t / decay_begin))
    return plateau


def half_cosine(high: float, low: float, t: float) -> float:
    """`high` at t = 0, `low` at t = 1."""
    return low + (high - low) * 0.5 * (1 + math.cos(math.pi * t))
