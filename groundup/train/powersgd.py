"""PowerSGD: gradients compressed to low rank, a communication hook of ddp.py.

A gradient matrix D (n, m) is close to a product P Q^T of two thin ones, so (n + m) r numbers are
sent instead of n m. One step of subspace iteration finds them, from the Q of the last step:
    P = orthonormal(mean over ranks of D Q),   Q = mean over ranks of D^T P,   D is about P Q^T
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from ddp import AFTER, BEFORE, Average, Bucket, Hook, State, sum_of_squares
from groundup.train import ranks


@dataclass(eq=False)
class Stack:
    """K matrices of one shape (n, m) side by side in a bucket, with PowerSGD's state for them."""

    names: list[str]  # K
    grad: Tensor  # (K, n, m) view of bucket.grad
    error: Tensor  # (K, n, m) what this rank's gradients had and never sent, without loss scale
    basis: Tensor  # (K, m, r) the last Q, where the next iteration starts; equal on all ranks


class PowerSGD:
    """Low-rank compression with error feedback (arXiv:1905.13727).

    What a rank could not send is added to its next gradient. The paper keeps D - P Q^T with the
    mean Q; we keep D - P Q_own^T, what was lost of this rank's own gradient. Both have the same
    mean over the ranks, and only that affects training. But the paper's also accumulates how the
    ranks differ, a random walk that is never sent.

    Sent whole: vectors; matrices that would not shrink to half; matrices outside the blocks unless
    `embedding`; everything in the first `start_step` steps. scaler: the GradScaler whose scale is
    kept out of the errors."""

    compress = "powersgd"

    def __init__(
        self,
        rank: int = 4,
        start_step: int = 0,
        embedding: bool = False,
        seed: int = 0,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.rank, self.start_step, self.embedding = rank, start_step, embedding
        self.seed, self.scaler = seed, scaler
        self.average = Average()
        self.stacks: list[list[Stack]] = []  # by bucket
        self.raw: list[list[Tensor]] = []  # by bucket: slices of bucket.grad that are sent whole

    def attach(self, buckets: list[Bucket]) -> None:
        """Allocate the state: zero errors, random bases that depend on seed and name alone."""
        for bucket in buckets:
            stacks, raw = [], []
            in_blocks = bucket.blocks not in ([BEFORE], [AFTER])
            # Neighbours of one shape make a stack, because a product of many matrices is one call.
            indices = range(len(bucket.params))
            for shape, group in groupby(indices, key=lambda i, b=bucket: b.params[i].shape):
                items = list(group)
                begin = bucket.offsets[items[0]]
                grad = bucket.grad[begin : begin + len(items) * shape.numel()]
                n, m = shape[:1].numel(), shape[1:].numel()  # of a vector m is 1
                r = min(n, m, self.rank)
                # Worth it if P and Q have less than half as many numbers.
                shrinks = len(shape) >= 2 and 2 * (n + m) * r < n * m
                if shrinks and (in_blocks or self.embedding):
                    names = [bucket.names[i] for i in items]
                    stacks.append(self.new_stack(names, grad.view(-1, n, m), r))
                else:
                    raw.append(grad)
            self.stacks.append(stacks)
            self.raw.append(raw)

    def new_stack(self, names: list[str], grad: Tensor, r: int) -> Stack:
        """Return the state of the matrices `names` with gradients `grad` (K, n, m)."""
        # float32 also for gradients in half precision: errors add up over many steps.
        dtype = torch.promote_types(grad.dtype, torch.float32)
        error = torch.zeros_like(grad, dtype=dtype)
        bases = []
        for name in names:
            # On the CPU, so that ranks with other devices draw the same numbers.
            seed = self.seed * 2**32 + zlib.crc32(name.encode())
            seed %= 2**64  # the setting may have 64 bits of its own, and torch takes no more
            generator = torch.Generator().manual_seed(seed)
            bases.append(torch.randn(grad.shape[2], r, generator=generator))
        return Stack(names, grad, error, torch.stack(bases).to(error))

    def __call__(self, bucket: Bucket) -> Iterator[State]:
        """Reduce `bucket`; see the protocol in ddp.py."""
        stacks, raw = self.stacks[bucket.index], self.raw[bucket.index]
        # A bucket without large matrices, or the warm-up: gradients change too fast at first.
        if not stacks or bucket.n_updates < self.start_step:
            yield from self.average(bucket)
            return
        scale = self.scale_of(stacks[0].error)  # an error counts in true gradients

        # 1. D = gradient + error (in place if the gradient is float32), and P = D Q
        wanted = [s.grad.to(scale.dtype).addcmul_(s.error, scale) for s in stacks]
        left = []  # P of each stack, (K, n, r)
        for d, s in zip(wanted, stacks, strict=True):
            left.append(d @ torch.linalg.qr(s.basis)[0])  # an orthonormal basis: P stays in range
        message = torch.cat([t.flatten() for t in left + raw])
        bucket.launch(dist.all_reduce, message)
        yield State.HALFWAY

        # 2. The mean P, orthonormal, and the mean of what is sent whole; then Q = D^T P
        parts = split_like(message, left + raw)
        for slot, mean in zip(raw, parts[len(left) :], strict=True):
            slot.copy_(mean)
        left = [torch.linalg.qr(p)[0] for p in parts[: len(left)]]
        own_right = [d.mT @ p for d, p in zip(wanted, left, strict=True)]  # (K, m, r)
        message = torch.cat([q.flatten() for q in own_right])
        bucket.launch(dist.all_reduce, message)
        yield State.IN_FLIGHT

        # 3. The norm. |P Q^T| = |Q|, because the columns of P are orthonormal
        right = split_like(message, own_right)
        bucket.squared_norm = sum(sum_of_squares(t.flatten()) for t in right + raw)
        yield State.REDUCED

        # 4. The mean gradient P Q^T. Error and basis change only if the step is not skipped.
        skip = bucket.update.found_inf > 0
        for s, d, p, own, q in zip(stacks, wanted, left, own_right, right, strict=True):
            lost = d.baddbmm_(p, own.mT, alpha=-1).div_(scale)
            torch.where(skip, s.error, lost, out=s.error)
            torch.where(skip, s.basis, q, out=s.basis)
            s.grad.copy_(p @ q.mT)

    def scale_of(self, error: Tensor) -> Tensor:
        """Return the factor of this rank's gradient in bucket.grad, 0-d in the dtype of `error`."""
        # The loss scale of float16, and the division that makes a sum over ranks a mean.
        scale = torch.ones((), device=error.device, dtype=error.dtype)
        if self.scaler is not None:
            scale = self.scaler.scale(scale)
        return scale / ranks.world_size()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return {parameter name: {"error", "basis"}}, views. The error is this rank's own."""
        state = {}
        for stacks in self.stacks:
            for s in stacks:
                for k, name in enumerate(s.names):
                    state[name] = {"error": s.error[k], "basis": s.basis[k]}
        return state

    def load_state_dict(self, saved: list[dict[str, dict[str, Tensor]]]) -> None:
        """Continue from `saved`: [this rank's state], or all ranks' if their number has changed."""
        for name, mine in self.state_dict().items():
            theirs = [state[name] for state in saved if name in state]  # by rank
            if theirs:
                # Of all ranks' errors take the mean, the only thing that training sees.
                mine["error"].copy_(sum(state["error"] for state in theirs) / len(theirs))
                # If the rank of compression has changed, the basis starts anew.
                if theirs[0]["basis"].shape == mine["basis"].shape:
                    mine["basis"].copy_(theirs[0]["basis"])


def split_like(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return views of `flat` in the shapes of `tensors`."""
    parts = flat.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def make_hook(
    compress: str,
    start_step: int = 0,
    seed: int = 0,
    scaler: torch.amp.GradScaler | None = None,
) -> Hook:
    """Return the hook for the setting `compress`; start_step: the end of the warm-up."""
    if compress == "powersgd":
        return PowerSGD(start_step=start_step, seed=seed, scaler=scaler)
    return Average(compress)  # none, fp16, bf16
