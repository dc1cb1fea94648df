"""Optimizers on the flat buffers of ddp.py, and learning-rate schedules.

AdamW trains everything, or everything but the blocks' matrices, which Muon then trains. AdamW sees
consecutive parameters as one long tensor; Muon sees neighbouring matrices of one shape as a stack.
State is saved by parameter name, so a checkpoint does not depend on the buckets.
docs/optimizer.md explains Muon and shows how it was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, groupby
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from groundup.errors import UserError, refuse
from groundup.train import ranks

if TYPE_CHECKING:
    from ddp import Bucket

EPS = 1e-8  # AdamW's, as in torch
# Newton-Schulz of degree 5: steep at zero, close to 1 up to 1 (Keller Jordan, Muon)
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5
ROW_DECAY = 0.95  # NorMuon: of the running mean square of a row
STEP_SIZE = 0.2  # Muon: root mean square of an update before the learning rate, as AdamW's

States = dict[str, dict[str, Tensor]]

# ---- AdamW ---------------------------------------------------------------------------------------


class AdamWSegment:
    """AdamW (arXiv:1711.05101) on consecutive parameters as one flat tensor.

    Every weight moves by its mean gradient over the root of its mean squared gradient, so by about
    lr, and decays towards zero:
        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2   (both divided by 1 - b^step below)
        w = (1 - lr decay) w - lr m / (sqrt(v) + eps)"""

    def __init__(
        self, bucket: Bucket, indices: list[int], betas: tuple[float, float], decay: float
    ) -> None:
        self.indices = indices  # of the parameters in the bucket
        # Views: what is changed here is changed in the model. The parameters lie side by side, so
        # one call of the kernel updates all of them.
        self.begin, end = own_span(bucket, indices)
        self.param, self.grad = bucket.param[self.begin : end], bucket.grad[self.begin : end]
        self.state = {key: torch.zeros_like(self.param) for key in ("exp_avg", "exp_avg_sq")}
        self.scalars = {"step": torch.zeros((), device=self.param.device)}
        self.betas, self.decay = betas, decay

    def update(self, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Step with gradients / grad_scale. If found_inf is 1 nothing changes."""
        tensors = self.param, self.grad, *self.state.values(), self.scalars["step"]
        lists = [[t] for t in tensors]  # of one tensor each
        adamw_(*lists, self.betas, self.decay, lr, grad_scale, found_inf)


def adamw_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],  # how often each parameter was updated, 0-d float32
    betas: tuple[float, float],
    decay: float,
    lr: float,
    grad_scale: Tensor,
    found_inf: Tensor,
) -> None:
    """Update the parameters by torch's fused kernel: one pass over the memory."""
    b1, b2 = betas
    rule = {"amsgrad": False, "beta1": b1, "beta2": b2, "lr": lr, "weight_decay": decay, "eps": EPS}
    # the kernel divides the gradients by grad_scale, and changes nothing where found_inf is 1
    rule |= {"grad_scale": grad_scale, "found_inf": found_inf, "maximize": False, "fused": True}
    adamw(params, grads, exp_avgs, exp_avg_sqs, [], steps, **rule)  # []: for amsgrad


# ---- Muon with even rows (NorMuon) ---------------------------------------------------------------


class MuonStack:
    """NorMuon (arXiv:2510.05491) on K matrices of one shape as a stack (K, n, m).

    A gradient matrix has a few large singular values. Muon sets them all to 1, so that a step
    learns in every direction, and NorMuon then gives all rows one size:
        M = momentum M + (1 - momentum) G
        O = U V^T            where U S V^T is (1 - momentum) G + momentum M
        W = (1 - lr decay) W - lr 0.2 sqrt(max(n, m)) even_rows(O)
    The factor makes an update as large as AdamW's, so both share one learning rate and one weight
    decay (Moonlight, arXiv:2502.16982, section 2.2). In a wide matrix columns take the rows' place.
    """

    def __init__(
        self, bucket: Bucket, indices: list[int], momentum: float, decay: float, dtype: torch.dtype
    ) -> None:
        self.indices = indices  # of the parameters in the bucket
        self.begin, end = own_span(bucket, indices)
        n, m = bucket.params[indices[0]].shape
        # With ZeRO-1 this rank may have a part of the stack, but no part of a matrix
        if (self.begin - bucket.offsets[indices[0]]) % (n * m) or (end - self.begin) % (n * m):
            what = "Muon needs whole matrices, but a shard ends inside one"
            raise UserError(f"optim: {what}; pass whole_matrices=True to DDP")
        k = (end - self.begin) // (n * m)
        self.param = bucket.param[self.begin : end].view(k, n, m)
        self.grad = bucket.grad[self.begin : end].view(k, n, m)
        # The mean square is one number per row, or column if the matrix is wide.
        rows = (k, n, 1) if n >= m else (k, 1, m)
        self.state = {
            "momentum": torch.zeros_like(self.param),
            "mean_square": self.param.new_zeros(rows),
        }
        self.scalars: dict[str, Tensor] = {}  # none: Muon does not count steps
        self.momentum, self.decay, self.dtype = momentum, decay, dtype
        self.lr_scale = STEP_SIZE * math.sqrt(max(n, m))

    def update(self, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Step with gradients / grad_scale. If found_inf is 1 nothing changes."""
        apply = 1 - found_inf  # multiplying by 0 skips a step without asking the GPU
        grad = torch.where(found_inf > 0, 0, self.grad / grad_scale)
        # M, a running mean of the gradients
        average = self.state["momentum"]
        average.lerp_(grad, (1 - self.momentum) * apply)
        ahead = grad.lerp_(average, self.momentum)  # Nesterov's look-ahead
        # O = U V^T, and what gives its rows one size
        direction = orthogonalize(ahead, self.dtype)
        scales = row_scales(direction, self.state["mean_square"], apply)
        # Decay, then the step
        self.param.mul_(1 - lr * self.decay * apply)
        self.param.add_(direction * (scales * (-lr * self.lr_scale * apply)))


def orthogonalize(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return about U V^T of each x = U S V^T; x (K, n, m) -> (K, n, m) `dtype`.

    Newton-Schulz: an odd polynomial of x applies to its singular values alone,
        x <- a x + b (x x^T) x + c (x x^T)^2 x
    and this one takes any value in (0, 1] close to 1 in five iterations. float16 would overflow."""
    a, b, c = NS_COEFFICIENTS
    tall = x.shape[1] > x.shape[2]
    y = (x.mT if tall else x).to(dtype)  # so that y y^T is the smaller product
    # Divided by the Frobenius norm no singular value is above 1
    y = y / torch.linalg.matrix_norm(y, keepdim=True).clamp(min=1e-7)
    for _ in range(NS_STEPS):
        gram = y @ y.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b G + c G G
        y = torch.baddbmm(y, polynomial, y, beta=a)  # a y + polynomial y
    return y.mT if tall else y


def row_scales(x: Tensor, mean_square: Tensor, apply: Tensor | float = 1.0) -> Tensor:
    """Return the factors (K, n, 1) that give the rows of each x (K, n, m) one size.

    A row is divided by its running root mean square, whose average `mean_square` (K, n, 1) is
    updated; then each matrix gets its Frobenius norm back. With mean_square (K, 1, m): columns."""
    along = 2 if mean_square.shape[2] == 1 else 1
    # No bias correction of the average: it cancels in the renormalisation.
    norms = torch.linalg.vector_norm(x, dim=along, keepdim=True, dtype=mean_square.dtype)
    squares = norms.square()
    mean_square.lerp_(squares / x.shape[along], (1 - ROW_DECAY) * apply)
    scales = 1 / mean_square.sqrt().add(1e-7)  # a row without a gradient stays zero
    # Squared Frobenius norms before and after the rows are divided
    before = squares.sum((1, 2), keepdim=True)
    after = (squares * scales.square()).sum((1, 2), keepdim=True)
    return scales * (before / after.clamp(min=1e-7)).sqrt()


def muon_trains(name: str) -> bool:
    """Return whether Muon would train a matrix of this name: of the blocks, no LoRA factor."""
    # A factor is no map whose singular values should be equal: AdamW trains it.
    return name.startswith("layers.") and ".lora_" not in name


# A group: neighbouring parameters of a bucket, their update rule and its state.
Group = AdamWSegment | MuonStack

# ---- all buckets ---------------------------------------------------------------------------------


class Optimizer:
    """The update rule of every bucket. Matrices decay, vectors do not.

    kind: adamw, or muon for the matrices of the blocks and AdamW for the rest.
    muon_dtype: of Muon's products. bfloat16 is enough for training; float32 for runs that must
        agree to rounding.
    one_by_one: update each parameter alone, so that its bits do not depend on its neighbours."""

    def __init__(
        self,
        buckets: Iterable[Bucket],
        kind: str = "adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        muon_dtype: torch.dtype = torch.bfloat16,
        one_by_one: bool = False,
    ) -> None:
        self.buckets = list(buckets)
        self.groups: list[list[Group]] = []  # by bucket
        for bucket in self.buckets:
            groups = []
            for rule, indices in segments(bucket, kind, one_by_one):
                if rule == "muon":
                    groups.append(MuonStack(bucket, indices, momentum, weight_decay, muon_dtype))
                else:
                    decay = weight_decay if rule == "decay" else 0.0
                    groups.append(AdamWSegment(bucket, indices, betas, decay))
            self.groups.append(groups)

    def update(self, bucket: Bucket, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Step this rank's part of `bucket` with gradients / grad_scale (0-d).

        Change nothing where found_inf (0-d) is 1."""
        for group in self.groups[bucket.index]:
            group.update(lr, grad_scale, found_inf)

    def members(self) -> Iterator[tuple[Bucket, Group, int]]:
        """Yield (bucket, group, index in the bucket) of every parameter."""
        for bucket, groups in zip(self.buckets, self.groups, strict=True):
            for group in groups:
                for i in group.indices:
                    yield bucket, group, i

    def state_dict(self, keep: bool = True) -> States:
        """Return {parameter name: state}, views of the live state in the parameter's shape.

        State: exp_avg, exp_avg_sq and step; or momentum and mean_square, that of rows (n, 1) or
        columns (1, m). With ZeRO-1 all ranks call it after DDP.flush(), and it is a copy on the
        CPU. It is empty on ranks that do not `keep` it. step is always the live tensor."""
        saved: States = {}
        for bucket, group, i in self.members():
            name, state = bucket.names[i], dict(group.scalars)
            for key, mine in group.state.items():
                part = part_of(bucket, group, i, mine)
                state[key] = mine.view(-1)[part.in_group]
                if bucket.sharded:
                    # Every rank adds its part to zeros, also those that keep nothing.
                    whole = mine.new_zeros(part.shape.numel())
                    whole[part.in_whole] = state[key]
                    ranks.all_reduce_sum(whole, f"{key} of {name}")
                    state[key] = whole.cpu() if keep else whole
                state[key] = state[key].view(part.shape)
            if keep:
                saved[name] = state
        return saved

    def load_state_dict(self, saved: States) -> None:
        """Load the part of a whole state that this rank updates. All ranks call it.

        Raise UserError if another optimizer saved it."""
        # Compare before anything is changed.
        needs = {b.names[i]: {*group.state, *group.scalars} for b, group, i in self.members()}
        for name in needs.keys() | saved.keys():
            ours, theirs = needs.get(name, set()), set(saved.get(name, ()))
            if ours != theirs:
                what = f"the saved state of {name!r} has {sorted(theirs)}, not {sorted(ours)}"
                fix = "resume with the optimizer it was saved with, or start anew with init_from"
                raise UserError(f"optim: {what}; {fix}")
        # Of each parameter, copy the span that this rank updates. Without ZeRO-1 every rank updates
        # all, so rank 0 reads the file and sends what it read.
        is_replicated = not any(bucket.sharded for bucket in self.buckets)
        if ranks.rank() == 0 or not is_replicated:
            self._copy_state(saved)
        if is_replicated:
            for group in chain(*self.groups):
                for t in (*group.state.values(), *group.scalars.values()):
                    ranks.broadcast(t)

    def _copy_state(self, saved: States) -> None:
        """Copy what this rank updates of a whole state."""
        for bucket, group, i in self.members():
            state = saved[bucket.names[i]]
            for key, mine in group.state.items():
                part = part_of(bucket, group, i, mine)
                mine.view(-1)[part.in_group] = state[key].flatten()[part.in_whole]
            for key, scalar in group.scalars.items():
                scalar.copy_(state[key])


def segments(bucket: Bucket, kind: str, one_by_one: bool) -> list[tuple[str, list[int]]]:
    """Cut a bucket into (rule, indices of consecutive parameters, or of one).

    rule: muon (one shape each), decay or no_decay."""

    def what_neighbours_share(i: int) -> tuple:
        p, rule, shape = bucket.params[i], "no_decay", None
        if kind == "muon" and p.ndim == 2 and muon_trains(bucket.names[i]):
            rule, shape = "muon", p.shape  # matrices of another shape begin another stack
        elif p.ndim >= 2:
            rule = "decay"
        return rule, shape, i if one_by_one else None

    indices = range(len(bucket.params))
    return [(shared[0], list(group)) for shared, group in groupby(indices, what_neighbours_share)]


def own_span(bucket: Bucket, indices: list[int]) -> tuple[int, int]:
    """Return (begin, end) of what this rank updates of consecutive parameters, in the bucket."""
    last = indices[-1]
    begin, end = bucket.offsets[indices[0]], bucket.offsets[last] + bucket.params[last].numel()
    # Cut off where this rank's shard begins and ends.
    begin = min(max(begin, bucket.own[0]), end)
    return begin, max(min(end, bucket.own[1]), begin)  # begin == end: nothing


class Part(NamedTuple):
    """This rank's part of a parameter's state, which without ZeRO-1 is all of it."""

    shape: torch.Size  # of the whole state
    in_whole: slice  # of the whole state, flat
    in_group: slice  # of the group's state, flat


def part_of(bucket: Bucket, group: Group, i: int, mine: Tensor) -> Part:
    """Return where the state of params[i] lies in `mine`, the group's state."""
    p, offset = bucket.params[i], bucket.offsets[i]
    # Of Muon `mine` is (k, n, m), or (k, n, 1) for the mean squares of rows; of AdamW it is flat.
    shape = mine.shape[1:] if mine.ndim > 1 else p.shape
    n_sharing = p.numel() // shape.numel()  # weights that share a number: 1, or those of a row
    begin, end = own_span(bucket, [i])
    size = (end - begin) // n_sharing
    in_whole = (begin - offset) // n_sharing
    in_group = (begin - group.begin) // n_sharing if size else 0  # 0: an empty part
    return Part(shape, slice(in_whole, in_whole + size), slice(in_group, in_group + size))


# ---- schedules -----------------------------------------------------------------------------------

DECAY_FRACTION = 0.2  # of wsd: the share of the run in which the learning rate falls


def check_schedule(config: Mapping, max_steps: int) -> None:
    """Raise UserError for settings of the learning rate that contradict each other."""
    peak, warmup = config["learning_rate"], config["warmup_steps"]
    min_lr = config.get("min_lr", 0.0)  # rl has none
    rises = min_lr > peak and config["schedule"] != "constant"
    refuse(rises, f"{min_lr=} is above learning_rate={peak}, the peak; add --min_lr=0")
    text = f"warmup_steps={warmup:g} is longer than the run, {max_steps=}"
    how = f"add --warmup_steps={max_steps // 10}"
    refuse(warmup >= 1 and warmup > max_steps, f"{text}; {how}")


def warmup_length(warmup_steps: float, max_steps: int) -> int:
    """Return the steps of warm-up; warmup_steps below 1 is a share of max_steps."""
    return int(warmup_steps) if warmup_steps >= 1 else round(warmup_steps * max_steps)


def learning_rate_at(
    step: int,
    schedule: str,
    peak: float,
    min_lr: float,
    warmup: int,
    max_steps: int,
    decay_fraction: float = DECAY_FRACTION,
) -> float:
    """Return the learning rate of update number `step` (1, 2, ...).

    It rises linearly to `peak` in `warmup` steps (the first update is never a no-op) and falls to
    `min_lr` at max_steps. With min_lr = 0 the last update would be a no-op: it has the rate of half
    a step before the end.
      constant  it does not fall
      cosine    by half a cosine (arXiv:1608.03983)
      linear    by a straight line
      wsd       by a straight line over the last decay_fraction of the steps after the warm-up
                (MiniCPM, arXiv:2404.06395)"""
    # The warm-up. Dividing by one step more leaves the peak to the first step after it.
    if step <= warmup:
        return peak * step / (warmup + 1)
    if schedule == "constant":
        return peak
    if step >= max_steps:
        if min_lr > 0:
            return min_lr
        step = max_steps - 0.5
    t = (step - warmup) / max(1, max_steps - warmup)  # 0..1 from the end of the warm-up
    if schedule == "cosine":
        return min_lr + (peak - min_lr) * 0.5 * (1 + math.cos(math.pi * t))
    if schedule == "linear":
        return peak + (min_lr - peak) * t
    # Warm-up, stable, decay
    assert schedule == "wsd", schedule
    decay_begin = 1 - decay_fraction
    if t <= decay_begin:
        return peak
    return peak + (min_lr - peak) * (t - decay_begin) / decay_fraction
