"""Optimizers on flat buckets, and learning-rate schedules.

AdamW (fused), and Muon with even rows (NorMuon) for the 2-D weights of the blocks. Both work on the flat buffers of
ddp.py's buckets: AdamW sees consecutive parameters as one tensor, Muon sees adjacent matrices of equal shape as one
stack. State is saved by parameter name, so a checkpoint does not know about buckets.
"""

import math
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from groundup.errors import UserError

# Quintic Newton-Schulz, tuned to be steep at zero while singular values stay near 1 (Keller Jordan, Muon).
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5
ROW_DECAY = 0.95  # NorMuon: of the mean of squares of a row


class Bucket(Protocol):
    """The part of ddp.py's bucket that an optimizer reads."""

    index: int
    names: list[str]
    params: list[nn.Parameter]
    offsets: list[int]  # where each parameter begins in the flat tensors
    param: Tensor  # flat view of the parameters
    grad: Tensor  # flat view of their gradients
    shard: tuple[int, int]  # begin and end of the elements that this rank updates (all of them without ZeRO-1)


class AdamWSegment:
    """AdamW (arXiv:1711.05101) on consecutive parameters that share a weight decay, as one flat tensor."""

    def __init__(self, bucket: Bucket, items: list[int], betas: tuple[float, float], eps: float, decay: float) -> None:
        self.items = items
        self.begin, end = own_span(bucket, items)
        self.param, self.grad = bucket.param[self.begin : end], bucket.grad[self.begin : end]
        self.state = {"exp_avg": torch.zeros_like(self.param), "exp_avg_sq": torch.zeros_like(self.param)}
        self.scalars = {"step": torch.zeros((), device=self.param.device)}
        self.betas, self.eps, self.decay = betas, eps, decay

    def update(self, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        # The kernel divides by grad_scale and leaves everything, the step count too, when found_inf is 1.
        adamw(
            [self.param], [self.grad], [self.state["exp_avg"]], [self.state["exp_avg_sq"]], [], [self.scalars["step"]],
            fused=True, grad_scale=grad_scale, found_inf=found_inf, amsgrad=False, beta1=self.betas[0],
            beta2=self.betas[1], lr=lr, weight_decay=self.decay, eps=self.eps, maximize=False,
        )  # fmt: skip


class MuonStack:
    """Muon on equal-shaped matrices as one (K, n, m) stack: momentum, the nearest orthogonal matrix of each, and rows
    of one size (NorMuon, arXiv:2510.05491).

    The step is scaled by 0.2 sqrt(max(n, m)), which gives it the size of AdamW's, so that both share one learning rate
    and one weight decay (Moonlight, arXiv:2502.16982, section 2.2).
    """

    def __init__(self, bucket: Bucket, items: list[int], momentum: float, decay: float, dtype: torch.dtype) -> None:
        self.items = items
        self.begin, end = own_span(bucket, items)
        shape = bucket.params[items[0]].shape
        if (self.begin - bucket.offsets[items[0]]) % shape.numel() or (end - self.begin) % shape.numel():
            raise UserError("optim: Muon needs whole matrices, but a shard ends inside one; see DDP's keep_whole")
        stack = (end - self.begin) // shape.numel(), *shape
        self.param, self.grad = (flat[self.begin : end].view(stack) for flat in (bucket.param, bucket.grad))
        rows = stack[:2] + (1,) if shape[0] >= shape[1] else (stack[0], 1, stack[2])  # a wide matrix: its columns
        self.state = {"momentum": torch.zeros_like(self.param), "mean_square": self.param.new_zeros(rows)}
        self.scalars: dict[str, Tensor] = {}
        self.momentum, self.decay, self.dtype = momentum, decay, dtype
        self.lr_scale = 0.2 * math.sqrt(max(shape))

    def update(self, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        apply = 1 - found_inf  # a skipped step multiplies by 0 instead of asking the host
        grad = torch.where(found_inf > 0, 0, self.grad / grad_scale)
        buffer = self.state["momentum"]
        buffer.lerp_(grad, (1 - self.momentum) * apply)
        direction = orthogonalize(grad.lerp_(buffer, self.momentum), self.dtype)  # Nesterov's look-ahead
        scales = row_scales(direction, self.state["mean_square"], apply)
        self.param.mul_(1 - lr * self.decay * apply)
        self.param.add_(direction * (scales * (-lr * self.lr_scale * apply)))


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


def row_scales(x: Tensor, mean_square: Tensor, apply: Tensor | float = 1.0) -> Tensor:
    """Return the factors (K, n, 1) that divide the rows of each x (K, n, m) by a running root mean square of theirs, in
    `mean_square` (K, n, 1), and leave each matrix its Frobenius norm; with (K, 1, m), those of the columns. The
    average begins at zero: what it lacks at first is the same factor for all rows, and the norm takes it back."""
    along = 2 if mean_square.shape[2] == 1 else 1
    squares = torch.linalg.vector_norm(x, dim=along, keepdim=True, dtype=mean_square.dtype).square()
    mean_square.lerp_(squares / x.shape[along], (1 - ROW_DECAY) * apply)
    scales = 1 / mean_square.sqrt().add(1e-7)  # a row without a gradient stays zero
    before, after = squares.sum((1, 2), keepdim=True), (squares * scales.square()).sum((1, 2), keepdim=True)
    return scales * (before / after.clamp(min=1e-7)).sqrt()


class Optimizer:
    """The update rule of every bucket. `kind` is 'adamw' or 'muon'; matrices decay, vectors do not. Muon multiplies in
    `muon_dtype`: bfloat16 is enough for training, float32 for runs that must agree to rounding."""

    def __init__(
        self, buckets: Iterable[Bucket], kind: str = "adamw", betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8, weight_decay: float = 0.1, momentum: float = 0.95, muon_dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        if kind not in ("adamw", "muon"):
            raise UserError(f"optim: optimizer must be 'adamw' or 'muon', got {kind!r}")
        self.buckets, self.groups = list(buckets), []
        for bucket in self.buckets:
            groups = []
            for rule, items in segments(bucket, kind):
                if rule == "muon":
                    groups.append(MuonStack(bucket, items, momentum, weight_decay, muon_dtype))
                else:
                    groups.append(AdamWSegment(bucket, items, betas, eps, weight_decay if rule == "decay" else 0.0))
            self.groups.append(groups)

    def update(self, bucket: Bucket, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Update the parameters of `bucket` with gradients / `grad_scale` (0-d); change nothing where `found_inf` (0-d)
        is 1."""
        for group in self.groups[bucket.index]:
            group.update(lr, grad_scale, found_inf)

    def state_dict(
        self, gather: Callable[[Bucket, Tensor], None] | None = None, keep: bool = True
    ) -> dict[str, dict[str, Tensor]]:
        """Return {parameter name: {"exp_avg", "exp_avg_sq", "step"} or {"momentum", "mean_square"}}: views, in the
        parameter's shape, mean_square in that of its rows (n, 1) or columns (1, m).

        With ZeRO-1, all ranks must pass `gather` (DDP.gather), which completes a flat tensor laid out as bucket.param;
        the result is then a copy on the CPU, and empty on ranks that do not `keep` it.
        """
        saved: dict[str, dict[str, Tensor]] = {}
        for bucket, groups in zip(self.buckets, self.groups, strict=True):
            whole = gather_states(bucket, groups, gather, keep) if gather else {}
            for group in groups if keep else []:
                for i in group.items:
                    state = saved[bucket.names[i]] = dict(group.scalars)
                    for key, mine in group.state.items():
                        offset, shape = bucket.offsets[i], bucket.params[i].shape
                        size = mine.shape[1:] if mine.ndim > 1 else shape  # of this parameter's state
                        if gather:
                            repeated = whole[key][offset : offset + shape.numel()].view(shape)
                            state[key] = repeated[tuple(map(slice, size))].contiguous()
                        else:
                            begin = (offset - group.begin) * size.numel() // shape.numel()
                            state[key] = mine.view(-1)[begin : begin + size.numel()].view(size)
        return saved

    def load_state_dict(self, saved: dict[str, dict[str, Tensor]]) -> None:
        """Load the part of a whole state that this rank updates. Raise UserError if another optimizer saved it."""
        groups = [(bucket, group) for bucket, groups in zip(self.buckets, self.groups, strict=True) for group in groups]
        needs = {bucket.names[i]: {*group.state, *group.scalars} for bucket, group in groups for i in group.items}
        for name in needs.keys() | saved.keys():
            ours, theirs = needs.get(name, set()), set(saved.get(name, ()))
            if ours != theirs:
                raise UserError(
                    f"optim: the saved state of {name!r} has {sorted(theirs)}, this run needs {sorted(ours)}; "
                    f"resume with the optimizer it was saved with, or start anew with init_from"
                )
        for bucket, group in groups:
            for i in group.items:
                state, (begin, end) = saved[bucket.names[i]], own_span(bucket, [i])
                for key, mine in group.state.items():
                    per = bucket.params[i].numel() // state[key].numel()  # weights that share one number: a row's
                    first, last = ((at - bucket.offsets[i]) // per for at in (begin, end))
                    to = (begin - group.begin) // per
                    mine.view(-1)[to : to + last - first].copy_(state[key].flatten()[first:last])
                for key, scalar in group.scalars.items():
                    scalar.copy_(state[key])


def gather_states(
    bucket: Bucket, groups: list[AdamWSegment | MuonStack], gather: Callable[[Bucket, Tensor], None], keep: bool
) -> dict[str, Tensor]:
    """Gather {key: state of the whole bucket (padded,), on the CPU} from the ranks' parts. What a row has one number of
    is repeated over the row."""
    whole = {}
    for key in dict.fromkeys(key for group in groups for key in group.state):
        flat = torch.zeros_like(bucket.param)
        for group in groups:
            if key in group.state:
                flat[group.begin : group.begin + group.param.numel()].view(group.param.shape).copy_(group.state[key])
        gather(bucket, flat)
        if keep:
            whole[key] = flat.cpu()
    return whole


def stays_whole(kind: str, name: str) -> bool:
    """Return whether Muon trains the parameter, so that ZeRO-1 must not split it. Adapters are left to AdamW: their
    factors are not maps whose singular values should be equal."""
    return kind == "muon" and name.startswith("layers.") and ".lora_" not in name


def segments(bucket: Bucket, kind: str) -> list[tuple[str, list[int]]]:
    """Cut a bucket into [(rule, indices of consecutive parameters)]; rule is 'muon', 'decay' or 'no_decay'."""
    found: list[tuple[tuple, list[int]]] = []
    for i, (name, p) in enumerate(zip(bucket.names, bucket.params, strict=True)):
        if p.ndim == 2 and stays_whole(kind, name):
            key = ("muon", p.shape)
        else:
            key = ("decay" if p.ndim >= 2 else "no_decay",)
        adjacent = i > 0 and bucket.offsets[i] == bucket.offsets[i - 1] + bucket.params[i - 1].numel()
        if found and found[-1][0] == key and adjacent:
            found[-1][1].append(i)
        else:
            found.append((key, [i]))
    return [(key[0], items) for key, items in found]


def own_span(bucket: Bucket, items: list[int]) -> tuple[int, int]:
    """Return (begin, end) of what this rank updates of consecutive parameters; equal if that is nothing."""
    begin, end = bucket.offsets[items[0]], bucket.offsets[items[-1]] + bucket.params[items[-1]].numel()
    begin = min(max(begin, bucket.shard[0]), end)
    return begin, max(min(end, bucket.shard[1]), begin)


# ---- schedules ------------------------------------------------------------------------------------------------------

SCHEDULES = ("constant", "cosine", "linear", "wsd")


def learning_rate_at(
    step: int, schedule: str, peak: float, min_lr: float, warmup_steps: int, decay_steps: int,
    decay_fraction: float = 0.2,
) -> float:  # fmt: skip
    """Return the learning rate of update number `step` (1, 2, ...).

    Linear warm-up reaches `peak` just after `warmup_steps`, and the first update is never a no-op. `min_lr` is reached
    at `decay_steps` and held after it.
      constant  peak
      cosine    half a cosine from peak to min_lr (arXiv:1608.03983)
      linear    a straight line from peak to min_lr
      wsd       peak, then a straight line to min_lr over the last decay_fraction (MiniCPM, arXiv:2404.06395)
    """
    if step <= warmup_steps:
        return peak * step / (warmup_steps + 1)
    if schedule == "constant":
        return peak
    if step >= decay_steps:
        return min_lr
    t = (step - warmup_steps) / max(1, decay_steps - warmup_steps)  # 0..1 from the end of the warm-up to the horizon
    if schedule == "cosine":
        return min_lr + (peak - min_lr) * 0.5 * (1 + math.cos(math.pi * t))
    if schedule == "linear":
        return peak + (min_lr - peak) * t
    decay_begin = 1 - decay_fraction  # wsd
    if t <= decay_begin:
        return peak
    return peak + (min_lr - peak) * (t - decay_begin) / decay_fraction
