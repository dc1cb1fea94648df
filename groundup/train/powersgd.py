"""PowerSGD: gradients compressed to low rank, as a communication hook of ddp.py (see the protocol there)."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from ddp import AFTER, BEFORE, Average, Bucket, sum_of_squares
from groundup.train import ranks


@dataclass(eq=False)
class Stack:
    """K matrices of one shape (n, m) that lie side by side in a bucket, with PowerSGD's state for them."""

    names: list[str]
    grad: Tensor  # (K, n, m) view of bucket.grad
    error: Tensor  # (K, n, m) the part of this rank's gradients that was never sent, in units of the loss
    basis: Tensor  # (K, m, r) the last right factor, where the next iteration starts; the same on all ranks


class PowerSGD:
    """Low-rank compression (arXiv:1905.13727): of a gradient matrix (n, m) only (n + m) r numbers are sent.

    One step of subspace iteration from the last step's factor, with error feedback: what a rank could not send is added
    to its next gradient. The paper keeps the error D - P Q_mean^T; we keep D - P Q_rank^T, the part of this rank's own
    gradient that was lost. Their mean over the ranks, which alone affects training, is the same, but the paper's also
    accumulates the difference between ranks, a random walk that is never sent.
    Sent whole: vectors, matrices that would not shrink to half, the matrices outside the blocks unless `embedding`, and
    everything in the first `start_step` steps. `scaler` is the GradScaler whose scale is kept out of the errors.
    """

    compress = "powersgd"

    def __init__(
        self, rank: int = 4, start_step: int = 0, embedding: bool = True, seed: int = 0,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.start_step, self.embedding, self.seed, self.scaler = rank, start_step, embedding, seed, scaler
        self.average = Average()
        self.stacks: list[list[Stack]] = []  # by bucket
        self.raw: list[list[Tensor]] = []  # by bucket: slices of bucket.grad that are sent whole

    def attach(self, buckets: list[Bucket]) -> None:
        """Allocate the state: zero errors, and random bases that depend on the seed and each parameter's name alone."""
        for bucket in buckets:
            stacks, raw = [], []
            compressible = self.embedding or bucket.blocks not in ([BEFORE], [AFTER])
            for shape, group in groupby(range(len(bucket.params)), key=lambda i: bucket.params[i].shape):
                items = list(group)
                grad = bucket.grad[bucket.offsets[items[0]] : bucket.offsets[items[-1]] + shape.numel()]
                n, m = shape[:1].numel(), shape[1:].numel()
                r = min(n, m, self.rank)
                if len(shape) < 2 or not compressible or 2 * (n + m) * r >= n * m:
                    raw.append(grad)
                    continue
                names = [bucket.names[i] for i in items]
                seeds = [self.seed * 2**32 + zlib.crc32(name.encode()) for name in names]
                basis = [torch.randn(m, r, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
                grad = grad.view(len(items), n, m)
                error = torch.zeros_like(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
                stacks.append(Stack(names, grad, error, torch.stack(basis).to(error)))
            self.stacks.append(stacks)
            self.raw.append(raw)

    def __call__(self, bucket: Bucket) -> Iterator:
        stacks, raw = self.stacks[bucket.index], self.raw[bucket.index]
        if not stacks or bucket.step < self.start_step:
            yield from self.average(bucket)
            return
        scale = torch.ones((), device=bucket.grad.device, dtype=stacks[0].error.dtype)
        scale = (scale if self.scaler is None else self.scaler.scale(scale)) / ranks.world_size()
        # Gradient plus error (in place if the gradient is float32), projected on the orthonormalised basis
        wanted = [s.grad.to(scale.dtype).addcmul_(s.error, scale) for s in stacks]
        left = [d @ torch.linalg.qr(s.basis)[0] for d, s in zip(wanted, stacks, strict=True)]
        message = torch.cat([t.flatten() for t in left + raw])
        bucket.launch(dist.all_reduce, message)
        yield True  # message: the left factors of the mean, and the mean of what is sent whole
        parts = split_like(message, left + raw)
        for slot, mean in zip(raw, parts[len(left) :], strict=True):
            slot.copy_(mean)
        left = [torch.linalg.qr(p)[0] for p in parts[: len(left)]]
        mine = [d.mT @ p for d, p in zip(wanted, left, strict=True)]
        message = torch.cat([q.flatten() for q in mine])
        bucket.launch(dist.all_reduce, message)
        yield False  # message: the right factors of the mean
        right = split_like(message, mine)
        # |P Q^T| = |Q| since the columns of P are orthonormal
        found_inf = yield sum(sum_of_squares(t.flatten()) for t in right + raw)
        skip = found_inf > 0
        for s, d, p, q_mine, q in zip(stacks, wanted, left, mine, right, strict=True):
            lost = d.baddbmm_(p, q_mine.mT, alpha=-1).div_(scale)
            torch.where(skip, s.error, lost, out=s.error)
            torch.where(skip, s.basis, q, out=s.basis)
            s.grad.copy_(p @ q.mT)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """{parameter name: {"error", "basis"}}, views of the live state. The error is this rank's own."""
        every = [s for stacks in self.stacks for s in stacks]
        return {name: {"error": s.error[k], "basis": s.basis[k]} for s in every for k, name in enumerate(s.names)}

    def load_state_dict(self, saved: list[dict[str, dict[str, Tensor]]]) -> None:
        """Continue from `saved`: [this rank's state] or, if the number of ranks has changed, all ranks' states; then
        every rank takes the mean of their errors. If the rank of compression has changed, the basis starts anew."""
        for name, mine in self.state_dict().items():
            theirs = [state[name] for state in saved if name in state]
            if theirs:
                mine["error"].copy_(sum(state["error"] for state in theirs) / len(theirs))
                if theirs[0]["basis"].shape == mine["basis"].shape:
                    mine["basis"].copy_(theirs[0]["basis"])


def split_like(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Views of `flat` in the shapes of `tensors`."""
    return [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]


def make_hook(
    compress: str, rank: int = 4, start_step: int = 0, embedding: bool = False, seed: int = 0,
    scaler: torch.amp.GradScaler | None = None,
) -> Callable[[Bucket], Iterator]:  # fmt: skip
    """The hook for the trainers' settings; `compress` is one of ddp.COMPRESS."""
    if compress == "powersgd":
        return PowerSGD(rank, start_step, embedding, seed, scaler)
    return Average({"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}[compress])
