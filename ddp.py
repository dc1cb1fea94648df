"""Data-parallel training by hand: flat buffers, gradient hooks, ordered buckets, a deferred step, PowerSGD, ZeRO-1.

Every rank runs the same model on other data, and all ranks need the mean of their gradients. Five ideas make it fast:

1. Flat buffers. All parameters of one dtype are views of one flat tensor, all gradients are views of another: a slice
   of the buffer is sent as it is, and the optimizer sees a few long tensors.
2. Hooks. A bucket is a slice that holds a few consecutive blocks. A hook on each parameter tells when its gradient is
   final; a complete bucket is sent at once, while backward still computes the blocks before it.
3. One order. The last block's gradients are ready first, so bucket 0 is the head and the last one is the embedding.
   Buckets are launched strictly by index: ranks that issue collectives in different orders hang or crash.
4. A deferred step. Clipping needs the norm of all gradients, so nothing can be updated before the last has come. But a
   block's weights are not needed until the next forward is there: the update waits for it, to the bit the same.
5. A pipeline. PowerSGD sends two thin factors instead of a matrix, the second computed from the reduced first. While
   a bucket's first factor travels, the bucket before it takes its second step, in an order that never depends on time.

DDP is not a wrapper around the model. A script calls the plain `model(...)`:

    parallel = ddp.DDP(model)                                   # after ddp.init(): all ranks hold rank 0's weights
    for micro_step in range(accum_steps):
        parallel.sync = micro_step == accum_steps - 1           # before that: add up locally, send nothing
        loss = model(x, y) * (world.world_size / n_tokens)      # sum of token losses; the ranks are averaged below
        loss.backward()
    norm = parallel.step(optimizer, lr=lr, clip=1.0)            # wait, norm, clip, update or defer it
    parallel.flush()                                            # before anything but model(...) reads the weights

Collectives run whenever a process group exists, and never otherwise. More, with a timeline, in docs/ddp.md.
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, groupby, pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from groundup.errors import UserError
from groundup.train import ranks
from groundup.train.ranks import all_reduce_sum, broadcast, bulletin, named_errors, world_size

World, init, close, barrier = ranks.World, ranks.init, ranks.close, ranks.barrier  # a script needs to import ddp alone
any_rank, gather_objects = ranks.any_rank, ranks.gather_objects
COMPRESS = ("none", "fp16", "bf16", "powersgd")
MIB = 2**20
PREFETCH = 2  # buckets that are updated, or fetched from other ranks, ahead of forward
ALIGNMENT = 128  # elements; buckets are multiples of world_size * ALIGNMENT, so that equal shares start SIMD-aligned


# ---- buckets ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Bucket:
    """Parameters that are reduced and updated together: consecutive blocks, one dtype, one slice of the flat buffers.

    Equal shapes are neighbours, so that k matrices of shape (n, m) are also one (k, n, m) view of `param` or `grad`.
    """

    index: int
    units: list[str]  # the blocks it holds, or BEFORE or AFTER
    names: list[str]
    params: list[nn.Parameter]
    offsets: list[int]  # where each parameter starts, in elements
    param: Tensor  # (padded,) every p.data is a view of it; the padding stays zero
    grad: Tensor  # (padded,) after a backward every p.grad is a view of it
    sizes: list[int]  # elements of each rank's shard, the part of the bucket that it updates; [padded] if not sharded
    shard: tuple[int, int]  # first and one-past-last element that this rank updates
    sharded: bool  # ZeRO-1
    step: int = 0  # steps finished before the one that it is in
    missing: int = 0  # parameters whose gradient has not arrived in the synced backward
    stages: Iterator | None = None  # the communication hook at work
    more: bool = False  # the hook has another collective to launch
    square: Tensor | None = None  # squared norm of the mean gradient in this rank's shard, once it is known
    flight: tuple[str, dist.Work] | None = None  # the collective under way, and what errors call it
    update: Callable[[], None] | None = None  # the update, if it is deferred
    stale: bool = False  # ZeRO-1: the other ranks' shards of `param` are still to be fetched
    updated: torch.cuda.Event | None = None  # on a GPU: the moment when the update is done

    def view(self, flat: Tensor, i: int) -> Tensor:
        """The slot of params[i] in `flat`, which is `param`, `grad` or a tensor of the same layout, in its shape."""
        p = self.params[i]
        return flat[self.offsets[i] : self.offsets[i] + p.numel()].view(p.shape)

    def holds(self, t: Tensor | None, flat: Tensor, i: int) -> bool:
        """True if `t` lies in the slot of params[i] in `flat` (compared by address: cheap enough for every hook)."""
        return t is not None and t.data_ptr() == flat.data_ptr() + self.offsets[i] * flat.element_size()

    def launch(self, collective: Callable, *args: Any) -> None:
        """Start a collective and return at once; without a process group there is nothing to do."""
        if dist.is_initialized():
            what = f"step {self.step + 1}: {collective.__name__} of bucket {self.index} (first: {self.names[0]})"
            self.flight = what, ranks.issue(what, partial(collective, async_op=True), *args)

    def wait(self) -> None:
        """Until the collective is done. gloo blocks here; with NCCL only the GPU's stream waits."""
        if self.flight is not None:
            with named_errors(self.flight[0]):
                self.flight[1].wait()
            self.flight = None


BEFORE, AFTER = "before the blocks", "after the blocks"


def make_buckets(
    model: nn.Module, bucket_bytes: float, world_size: int, shard_of: int = -1,
    keep_whole: Callable[[str], bool] = lambda name: False,
) -> list[Bucket]:  # fmt: skip
    """Allocate the flat buffers, move the trainable parameters of `model` into them and return the buckets in order,
    not sharded or (ZeRO-1) as rank `shard_of` sees them."""
    groups = [
        (dtype, units, [member for member in group if member[1].dtype == dtype])
        for units, group in plan_buckets(model, bucket_bytes)
        for dtype in dict.fromkeys(p.dtype for _, p in group)
    ]
    multiple = ALIGNMENT * world_size
    sizes = [-(-sum(p.numel() for _, p in group) // multiple) * multiple for _, _, group in groups]
    device, flats = next(p.device for p in model.parameters() if p.requires_grad), {}
    for dtype in {dtype for dtype, _, _ in groups}:
        total = sum(size for group, size in zip(groups, sizes, strict=True) if group[0] == dtype)
        flats[dtype] = [torch.zeros(total, dtype=dtype, device=device) for _ in ("param", "grad")]
    buckets = []
    for (dtype, units, group), size in zip(groups, sizes, strict=True):
        param, grad = (flat[:size] for flat in flats[dtype])
        flats[dtype] = [flat[size:] for flat in flats[dtype]]
        group.sort(key=lambda member: (-member[1].ndim, tuple(member[1].shape)))  # matrices first, equal ones together
        names, members = (list(column) for column in zip(*group, strict=True))
        ends = list(accumulate(p.numel() for p in members))
        whole = [span for name, span in zip(names, pairwise([0, *ends]), strict=True) if keep_whole(name)]
        cuts = cut_shards(size, 1 if shard_of < 0 else world_size, whole)
        shard = cuts[max(shard_of, 0)], cuts[max(shard_of, 0) + 1]
        shares, sharded = [end - begin for begin, end in pairwise(cuts)], shard_of >= 0
        bucket = Bucket(len(buckets), units, names, members, [0, *ends[:-1]], param, grad, shares, shard, sharded)
        for i, p in enumerate(members):
            bucket.view(param, i).copy_(p.detach())
            p.data = bucket.view(param, i)  # the Parameter object stays, and with it ties, names and references
            p.grad = bucket.view(grad, i)
        buckets.append(bucket)
    return buckets


def plan_buckets(model: nn.Module, bucket_bytes: float) -> list[tuple[list[str], list[tuple[str, nn.Parameter]]]]:
    """(units, named trainable parameters) of each bucket, in the order in which backward finishes them.

    Buckets end where blocks end (`model.layers`, else the top-level children), so that a block's weights are never
    half updated. What stands before and after the blocks (embedding; final norm and head) has buckets of its own. Tied
    weights count once, where they are registered first: at the embedding, whose gradient is the last to be final.
    """
    has_blocks = isinstance(getattr(model, "layers", None), nn.ModuleList)
    units: dict[str, list[tuple[str, nn.Parameter]]] = {}  # in the order of registration, which is forward's
    edge = BEFORE
    for name, p in model.named_parameters():
        parts = name.split(".")
        unit = parts[0]
        if has_blocks and unit == "layers":
            unit, edge = f"layers.{parts[1]}", AFTER
        elif has_blocks:
            unit = edge
        if p.requires_grad:
            units.setdefault(unit, []).append((name, p))
    groups, room = [], 0
    for unit, members in reversed(units.items()):
        size = sum(p.numel() * p.element_size() for _, p in members)
        alone = unit in (BEFORE, AFTER)
        if alone or size > room:
            groups.append(([], []))
            room = bucket_bytes
        groups[-1][0].append(unit)
        groups[-1][1].extend(members)
        room = 0 if alone else room - size
    return groups


def cut_shards(size: int, shards: int, whole: list[tuple[int, int]]) -> list[int]:
    """Where the shards of a bucket of `size` elements begin, and its end: equal shares, but that a cut inside one of
    the spans `whole` moves to its nearer end."""
    cuts = [size * r // shards for r in range(shards + 1)]
    for begin, end in whole:
        cuts = [cut if not begin < cut < end else begin if cut - begin < end - cut else end for cut in cuts]
    return cuts


# ---- communication hooks ------------------------------------------------------------------------------------------
# hook(bucket) is called when this rank's gradient / world_size stands in bucket.grad: summed over the ranks, the mean.
# It is a generator, because backward should not wait: it launches a collective and yields, and is resumed when that is
# done. With ZeRO-1, only Average. It yields
#     True                 another collective depends on this one: resume me as soon as the next bucket is launched
#     False                this was the last collective
#     a 0-d tensor         the squared norm of the mean gradient. Resumed with found_inf, it leaves the mean in
#                          bucket.grad; where found_inf is 1 the step is skipped and its own state must stay as it was.


class Average:
    """The plain mean over the ranks. `wire` is the dtype that travels, float16 or bfloat16 for half the bytes; None
    sends the gradients as they are. With ZeRO-1 a rank gets the mean of its shard alone."""

    def __init__(self, wire: torch.dtype | None = None) -> None:
        self.wire = wire

    def __call__(self, bucket: Bucket) -> Iterator:
        sent = bucket.grad if self.wire is None else bucket.grad.to(self.wire)
        begin, end = bucket.shard
        mine = bucket.grad[begin:end]
        if bucket.sharded:
            received = launch_scatter(bucket, sent)
        else:
            received = sent
            bucket.launch(dist.all_reduce, sent)
        yield False
        if received.ndim == 2:  # the shard as every rank has it, added in their order
            torch.sum(received, dim=0, dtype=mine.dtype, out=mine)
        elif self.wire is not None:
            mine.copy_(received)
        if received.is_cuda:
            received.record_stream(torch.cuda.current_stream())  # the side one, if backward updates
        del sent, received  # as large as the bucket, and the generator lives on
        yield sum_of_squares(mine)


def launch_scatter(bucket: Bucket, flat: Tensor) -> Tensor:
    """Start to bring together what all ranks have in this rank's shard of `flat`. Returns where it will be: as a sum
    (shard,), or still apart as (ranks, shard): gloo's reduce_scatter would move as many bytes as a whole all-reduce."""
    begin, end = bucket.shard
    if native(bucket, flat):
        bucket.launch(getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor), flat[begin:end], flat)
        return flat[begin:end]
    received = flat.new_empty(len(bucket.sizes), end - begin)
    shares = [end - begin] * len(bucket.sizes)
    bucket.launch(dist.all_to_all_single, received.view(-1), flat, shares, bucket.sizes)
    return received


def launch_gather(bucket: Bucket, flat: Tensor) -> None:
    """Start to complete `flat`, laid out as bucket.param, of which each rank holds its shard."""
    mine, n = flat[bucket.shard[0] : bucket.shard[1]], len(bucket.sizes)
    if native(bucket, flat):
        bucket.launch(getattr(dist, "all_gather_single", dist.all_gather_into_tensor), flat, mine)
    else:
        bucket.launch(dist.all_to_all_single, flat, mine.repeat(n), bucket.sizes, [mine.numel()] * n)


def native(bucket: Bucket, flat: Tensor) -> bool:
    """NCCL has its own operations for shards of equal size, and works in place."""
    return flat.is_cuda and len(set(bucket.sizes)) == 1


def sum_of_squares(flat: Tensor) -> Tensor:
    """0-d float32. By rows: on a CPU vector_norm adds one element after the other, and the norm of 6.5M of them is 2e-4
    off; this is 1e-8 off in the same time (measured)."""
    dtype = torch.promote_types(flat.dtype, torch.float32)
    rows, rest = flat[: flat.numel() // ALIGNMENT * ALIGNMENT], flat[flat.numel() // ALIGNMENT * ALIGNMENT :]
    norms = torch.linalg.vector_norm(rows.view(-1, ALIGNMENT), dim=1, dtype=dtype)
    return (norms.square().sum() + rest.to(dtype).square().sum()).float()


@dataclass(eq=False)
class Stack:
    """K matrices of one shape (n, m) that lie side by side in a bucket, and what PowerSGD remembers of them."""

    names: list[str]
    grad: Tensor  # (K, n, m) view of bucket.grad
    error: Tensor  # (K, n, m) what this rank's gradients had beyond what was sent, in units of the loss
    basis: Tensor  # (K, m, r) the last right factor, with which the next iteration starts; the same on all ranks


class PowerSGD:
    """Low-rank compression (arXiv:1905.13727): of a matrix (n, m) only (n + m) r numbers travel.

    One step of subspace iteration from the last step's factor, and error feedback: what a rank could not send is added
    to its next gradient. Unlike the paper's, the error is what was lost of this rank's own gradient, D - P Q_rank^T,
    not D - P Q_mean^T: the mean over the ranks, which alone matters to training, is the same, but the paper's differs
    from it by a random walk. Matrices that would not shrink to half, vectors and, unless `embedding`, the matrices
    outside the blocks are sent as they are; so is everything in the first `start_step` steps. `scaler` is the
    GradScaler, whose scale the errors must not contain.
    """

    def __init__(
        self, rank: int = 4, start_step: int = 0, embedding: bool = True, seed: int = 0,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.start_step, self.embedding, self.seed, self.scaler = rank, start_step, embedding, seed, scaler
        self.average = Average()
        self.stacks: list[list[Stack]] = []  # by bucket
        self.raw: list[list[Tensor]] = []  # by bucket: slots of bucket.grad that are sent as they are

    def attach(self, buckets: list[Bucket]) -> None:
        """Allocate the state: no errors, and bases that are random, from the seed and each name alone."""
        for bucket in buckets:
            stacks, raw = [], []
            inside = self.embedding or bucket.units not in ([BEFORE], [AFTER])
            for shape, run in groupby(range(len(bucket.params)), key=lambda i: bucket.params[i].shape):
                items = list(run)
                grad = bucket.grad[bucket.offsets[items[0]] : bucket.offsets[items[-1]] + shape.numel()]
                n, m = shape[:1].numel(), shape[1:].numel()
                r = min(n, m, self.rank)
                if len(shape) < 2 or not inside or 2 * (n + m) * r >= n * m:
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
        scale = (scale if self.scaler is None else self.scaler.scale(scale)) / world_size()
        # The gradient plus what is owed to it (in place, if it is float32), projected on the basis
        wanted = [s.grad.to(scale.dtype).addcmul_(s.error, scale) for s in stacks]
        left = [d @ torch.linalg.qr(s.basis)[0] for d, s in zip(wanted, stacks, strict=True)]
        message = torch.cat([t.flatten() for t in left + raw])
        bucket.launch(dist.all_reduce, message)
        yield True  # message: the left factors of the mean, and the mean of the rest
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
        """Continue from what this rank has saved, [it], or, on another number of ranks, from what all had saved: the
        mean of their errors, on every rank. Another rank of compression begins with a new basis."""
        for name, mine in self.state_dict().items():
            theirs = [state[name] for state in saved if name in state]
            if theirs:
                mine["error"].copy_(sum(state["error"] for state in theirs) / len(theirs))
                if theirs[0]["basis"].shape == mine["basis"].shape:
                    mine["basis"].copy_(theirs[0]["basis"])


def make_hook(
    compress: str, rank: int = 4, start_step: int = 0, embedding: bool = False, seed: int = 0,
    scaler: torch.amp.GradScaler | None = None,
) -> Callable[[Bucket], Iterator]:  # fmt: skip
    """The hook that the trainers' keys ask for; `compress` is one of COMPRESS."""
    if compress == "powersgd":
        return PowerSGD(rank, start_step, embedding, seed, scaler)
    return Average({"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}[compress])


def split_like(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Views of `flat` in the shapes of `tensors`."""
    return [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)]


# ---- the synchronisation ------------------------------------------------------------------------------------------


class Optimizer(Protocol):
    def update(self, bucket: Bucket, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Step bucket.shard of bucket.param with gradient bucket.grad / grad_scale; do nothing if found_inf is 1."""


class DDP:
    """Keeps the replicas of `model` equal: averages the gradients during backward and drives the optimizer.

    Set `sync` to whether the next backward is the last of the step. `found_inf` is 1.0 (0-d float32) if the last step
    was skipped because its gradient norm was not finite, else 0.0.
    """

    def __init__(
        self, model: nn.Module, bucket_mb: float = 0.0, hook: Callable[[Bucket], Iterator] | None = None,
        overlap_step: str = "off", zero1: bool = False, keep_whole: Callable[[str], bool] = lambda name: False,
    ) -> None:  # fmt: skip
        """Move the weights into flat buffers and make all ranks equal to rank 0, weights and buffers.

        Move the model to its device and dtype, and freeze what is frozen, before. Raises DDPError on all ranks if they
        hold different models. `bucket_mb` is the most that blocks are merged to; 0 takes a twelfth of the model between
        1 and 25 MiB: enough buckets to start early, each large enough to hide the latency of its collective. `hook` is
        how gradients travel, by default Average(). A bucket is updated in step() if `overlap_step` is "off", when the
        next forward comes to it if "forward", as soon as its gradient has arrived if "backward" (see expect_step()).
        With `zero1` a rank updates one shard of every bucket and keeps optimizer state for it alone (ZeRO stage 1,
        arXiv:1910.02054); parameters for whose name `keep_whole` is true are not divided.
        """
        hook = hook or Average()
        kind = "none" if isinstance(hook, Average) else "powersgd" if isinstance(hook, PowerSGD) else "this hook"
        if reason := conflict(kind, overlap_step, zero1):
            raise UserError(f"ddp: {reason}")
        keys = {key: x for key, x in getattr(hook, "__dict__", {}).items() if isinstance(x, int | str | torch.dtype)}
        ranks.check_same_model(model, f"{bucket_mb=}, {type(hook).__name__} {keys}, {overlap_step=}, {zero1=}")
        trainable = [p for p in model.parameters() if p.requires_grad]
        devices = sorted({str(p.device) for p in trainable})
        if len(devices) != 1:
            raise UserError(f"ddp: the model needs trainable parameters, all on one device; found them on {devices}")
        self.model, self.hook, self.overlap_step = model, hook, overlap_step
        self.device, self.world_size = trainable[0].device, world_size()
        n_bytes = sum(p.numel() * p.element_size() for p in trainable)
        bucket_bytes = bucket_mb * MIB or min(max(n_bytes / 12, MIB), 25 * MIB)
        shard_of = dist.get_rank() if zero1 and dist.is_initialized() else -1
        self.buckets = make_buckets(model, bucket_bytes, world_size(), shard_of, keep_whole)
        frozen = [p.data for p in model.parameters() if not p.requires_grad]
        for t in [bucket.param for bucket in self.buckets] + frozen + list(model.buffers()):
            broadcast(t)
        if hasattr(hook, "attach"):
            hook.attach(self.buckets)
        self.sync, self.n_steps = True, 0
        self.found_inf = torch.zeros((), device=self.device)
        self._home = {p: (bucket, i) for bucket in self.buckets for i, p in enumerate(bucket.params)}
        self._norm_param = nn.Parameter(torch.zeros((), device=self.device))  # carries the norm through GradScaler
        self._stream = torch.cuda.Stream() if self.device.type == "cuda" and overlap_step != "off" else None
        self._start_step()
        for p in self._home:
            p.register_post_accumulate_grad_hook(self._on_grad)
        self._watch_forward()

    @cached_property
    def _norm_optimizer(self) -> torch.optim.Optimizer:
        """For a GradScaler alone: any optimizer of torch's imports torch._dynamo, as long again as all of torch."""
        return torch.optim.SGD([self._norm_param])

    def _start_step(self) -> None:
        """Expect one gradient per parameter, and bucket 0 to be launched first."""
        self._arrived: set[nn.Parameter] = set()
        self._next = 0  # bucket to launch
        self._expected: tuple[Optimizer, float] | None = None  # optimizer and lr of updates during backward
        for bucket in self.buckets:
            bucket.missing, bucket.square = len(bucket.params), None

    # -- backward: gradients arrive, buckets leave

    def _on_grad(self, p: nn.Parameter) -> None:
        """Called by autograd when p.grad is final for this backward. To wait here would stop backward."""
        bucket, i = self._home[p]
        if p in self._arrived:
            why = "no step() since the last backward with sync = True, or a block used twice in a reentrant checkpoint"
            raise UserError(f"ddp: {bucket.names[i]} received its gradient twice in one synced backward: {why}")
        if bucket.update is not None or bucket.stale or bucket.updated is not None:
            raise UserError(
                f"ddp: {bucket.names[i]} was used before its update: call modules, model(...), not their weights or "
                "their forward(); or call flush() before"
            )
        if not bucket.holds(p, bucket.param, i):
            raise UserError(f"ddp: {ranks.moved([bucket.names[i]])}")
        grad, slot = p.grad.detach(), bucket.view(bucket.grad, i)
        if self.sync and self.world_size > 1:  # so that the sum is the mean; float16 could not hold the sum
            torch.div(grad, self.world_size, out=slot)
        elif not bucket.holds(grad, bucket.grad, i):  # the first micro-step: a tensor of autograd's
            slot.copy_(grad)
        p.grad = slot
        if not self.sync:
            return  # accumulation: autograd goes on adding into the view, nothing is sent
        self._arrived.add(p)
        bucket.missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._launch_next()

    @torch.no_grad()
    def _launch_next(self) -> None:
        """Launch the next bucket and move those before it on: P0, P1 Q0, P2 Q1, ... the same on every rank."""
        bucket = self.buckets[self._next]
        self._next += 1
        bucket.step, bucket.stages = self.n_steps, self.hook(bucket)
        self._resume(bucket)
        self._relay(before=bucket.index)
        for earlier in self.buckets[: bucket.index] if self._expected or bucket.sharded else []:
            if earlier.flight and not earlier.more and earlier.flight[1].is_completed():
                self._settle(earlier)  # no collective follows, so this may depend on time

    def _relay(self, before: int) -> bool:
        """Launch the following collective of all earlier buckets that have one; False if none had."""
        waiting = [bucket for bucket in self.buckets[:before] if bucket.more]
        for bucket in reversed(waiting):
            self._resume(bucket)
        return bool(waiting)

    def _resume(self, bucket: Bucket) -> None:
        """Let the hook go on: to its next collective, or to the norm after the last one."""
        bucket.wait()
        with torch.autocast(self.device.type, enabled=False):
            value = next(bucket.stages)
        bucket.more = value is True
        if isinstance(value, Tensor):
            bucket.square = value

    def _settle(self, bucket: Bucket) -> None:
        """The bucket's norm, once its last collective is done; its update too, if that need not know of the others."""
        with self._aside() if self._expected else nullcontext():
            self._resume(bucket)
            if self._expected:
                optimizer, lr = self._expected
                found_inf = 1.0 - bucket.square.isfinite().float()
                finish(bucket.stages, found_inf)
                self._update(bucket, optimizer, lr, torch.ones_like(found_inf), found_inf)

    # -- step: wait for the rest, then update or defer

    def expect_step(self, optimizer: Optimizer, lr: float) -> None:
        """Before a synced backward: what overlap_step="backward" updates its buckets with. Without it, as "forward"."""
        if self.overlap_step == "backward":
            self._expected = optimizer, lr

    @torch.no_grad()
    def step(
        self, optimizer: Optimizer, lr: float, clip: float = 0.0, scaler: torch.amp.GradScaler | None = None
    ) -> Tensor:
        """Finish the reduction, clip to global norm `clip` (0 = off), update, drop the gradients.

        Returns the global norm before clipping, without the loss scale: 0-d float32 on the model's device. If it is not
        finite, all ranks skip the update together, because it is the norm of the gradients they share. Does not wait
        for the GPU, but with overlap_step="backward". Raises DDPError on all ranks if a gradient is missing on any.
        """
        if reason := conflict("", self.overlap_step, False, clip, scaler is not None and scaler.is_enabled()):
            raise UserError(f"ddp: {reason}")
        if self._expected not in (None, (optimizer, lr)):
            raise UserError("ddp: step() was called with another optimizer or lr than expect_step()")
        norm = self._finish_reduce()
        grad_scale = torch.ones((), device=self.device)
        if scaler is not None and scaler.is_enabled():
            grad_scale = scaler.scale(grad_scale)
            # To the scaler the norm is the only gradient: it is unscaled and checked, and update() grows or backs off
            # exactly as if all gradients had been looked at.
            self._norm_param.grad = norm
            scaler.unscale_(self._norm_optimizer)
        self.found_inf = 1.0 - norm.isfinite().float()
        if self._expected and self.found_inf:
            raise UserError(
                f"ddp: step {self.n_steps + 1}: the gradient is not finite, and overlap_step='backward' has applied a "
                "part of it; continue from the last checkpoint with overlap_step='forward', which can skip such a step"
            )
        if clip > 0:
            grad_scale = grad_scale / (clip / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch's clip_grad_norm_
        self._grad_scale = grad_scale  # kept with found_inf until the next step: the side stream may still read them
        if not self._expected:
            for bucket in self.buckets:
                finish(bucket.stages, self.found_inf)
                bucket.update = partial(self._update, bucket, optimizer, lr, grad_scale, self.found_inf)
        if scaler is not None:
            scaler.update()
        self.n_steps += 1
        self._start_step()
        bulletin.post(self.n_steps)
        if self.overlap_step == "off":
            for bucket in self.buckets:
                bucket.update()
        for bucket in reversed(self.buckets[-PREFETCH:]):
            self._begin_refresh(bucket)
        if bulletin.debug:
            self.check_replicas()
        return norm

    def _finish_reduce(self) -> Tensor:
        """Wait for the buckets; the norm of each is taken while the later ones are still on the wire."""
        for bucket in self.buckets[self._next :]:
            self._refresh(bucket, ahead=0)  # no forward has touched it: an update that waits needs its old gradient
        while self._next < len(self.buckets):
            self._launch_next()  # incomplete: an error below, but other ranks wait for this collective
        while self._relay(before=len(self.buckets)):
            pass
        check = ranks.start_agreement(self._problem(), f"step {self.n_steps + 1}")  # one flag, on its way meanwhile
        for bucket in self.buckets:
            if bucket.square is None:
                self._settle(bucket)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        square = torch.stack([bucket.square for bucket in self.buckets]).sum()
        if self.buckets[0].sharded:
            all_reduce_sum(square, f"step {self.n_steps + 1}: all_reduce of the squared norm")
        check()
        return square.sqrt()

    def _update(self, bucket: Bucket, optimizer: Optimizer, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Update this rank's shard of the bucket, drop the gradients."""
        bucket.update = None
        with torch.autocast(self.device.type, enabled=False):  # under which the forward that calls may be
            optimizer.update(bucket, lr=lr, grad_scale=grad_scale, found_inf=found_inf)
        for p in bucket.params:
            p.grad = None  # to add into zeros would cost two more passes over the memory
        bucket.stale = bucket.sharded
        if self._stream is not None:
            bucket.updated = self._stream.record_event()

    # -- forward: what was deferred

    def _watch_forward(self) -> None:
        """Have every block, and the embedding, refresh its bucket before it runs. Hooks on blocks, not on what is in
        them: those would become part of the block's compiled graph."""
        modules = dict(self.model.named_modules())
        for bucket in self.buckets:
            owners = {name.rpartition(".")[0] for name in bucket.names if bucket.units == [BEFORE]}
            for unit in owners or bucket.units:
                module = modules.get(unit, self.model)
                if unit == AFTER:
                    self.model.layers[-1].register_forward_hook(lambda *_, bucket=bucket: self._refresh(bucket))
                else:
                    module = self.model if isinstance(module, nn.ModuleList | nn.ModuleDict) else module  # never called
                    module.register_forward_pre_hook(lambda *_, bucket=bucket: self._refresh(bucket))

    @torch.no_grad()
    def _refresh(self, bucket: Bucket, ahead: int = PREFETCH) -> None:
        """Make the parameters current, and have those of the buckets that forward needs next on their way, downwards
        from the last index on every rank. Recomputation in backward leaves alone what this backward has updated."""
        if self._expected and self._next == len(self.buckets):
            raise UserError("ddp: overlap_step='backward': after backward call step() before a forward or flush()")
        for other in reversed(self.buckets[max(self._next, bucket.index - ahead) :]):
            self._begin_refresh(other)
        if bucket.stale and bucket.flight is not None:
            bucket.wait()
            bucket.stale = False
        if bucket.updated is not None:
            torch.cuda.current_stream().wait_event(bucket.updated)
            bucket.updated = None

    def _begin_refresh(self, bucket: Bucket) -> None:
        if bucket.update is not None or (bucket.stale and bucket.flight is None):
            with self._aside():
                if bucket.update is not None:
                    bucket.update()
                if bucket.stale:
                    launch_gather(bucket, bucket.param)

    def _aside(self) -> AbstractContextManager:
        """On a GPU with an overlapped step: the side stream, after all that the main one has been given so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def flush(self) -> None:
        """Make all parameters current: before anything but a forward reads them. All ranks, as it may communicate."""
        for bucket in reversed(self.buckets):
            self._refresh(bucket)

    def gather(self, bucket: Bucket, flat: Tensor) -> None:
        """Complete `flat`, laid out as bucket.param, of which this rank has filled its shard. All ranks."""
        if bucket.update is not None or bucket.flight is not None:
            raise UserError("ddp: call flush() before the optimizer's state is gathered")
        if bucket.sharded:
            launch_gather(bucket, flat)
            bucket.wait()

    def check_replicas(self) -> None:
        """Raise DDPError on all ranks unless they hold the same parameters, bit for bit."""
        self.flush()
        weights = {f"bucket {bucket.index} ({ranks.listed(bucket.names)})": bucket.param for bucket in self.buckets}
        ranks.check_equal(weights, f"after {self.n_steps} steps")

    def _problem(self) -> str:
        """Why this rank's gradients are not those of the whole model, or an empty string."""
        slots = [(name, bucket, i) for bucket in self.buckets for i, name in enumerate(bucket.names)]
        lost = [name for name, bucket, i in slots if not bucket.holds(bucket.params[i], bucket.param, i)]
        if lost:
            return ranks.moved(lost)
        absent = [(name, bucket.params[i]) for name, bucket, i in slots if bucket.params[i] not in self._arrived]
        if absent:
            current = dict(self.model.named_parameters())
            replaced = [name for name, p in absent if current.get(name) is not p]
            if replaced:
                return ranks.moved(replaced)
            return (
                f"no gradient in a backward with ddp.sync = True for {ranks.listed([name for name, _ in absent])}; "
                "set requires_grad=False before DDP(model) for parameters that the loss does not use"
            )
        kept = [] if self._expected else slots  # what backward has updated has no gradient any more
        changed = [name for name, bucket, i in kept if not bucket.holds(bucket.params[i].grad, bucket.grad, i)]
        return f".grad was replaced between backward and step for {ranks.listed(changed)}" if changed else ""


def finish(stages: Iterator, found_inf: Tensor) -> None:
    """Let a hook write the mean into bucket.grad."""
    try:
        stages.send(found_inf)
    except StopIteration:
        return
    raise UserError("ddp: a communication hook must end after the norm")


def conflict(compress: str, overlap_step: str, zero1: bool, clip: float = 0.0, scaled: bool = False) -> str:
    """Why these options do not go together, or an empty string. `scaled`: float16 with a GradScaler."""
    if overlap_step not in ("off", "forward", "backward"):
        return f"overlap_step must be one of off, forward, backward, got {overlap_step!r}"
    if zero1 and compress not in ("none", "fp16", "bf16"):
        return f"zero1=True brings a rank its shard of the gradient, {compress} all of it; use one of the two"
    if overlap_step == "backward" and (clip > 0 or scaled or compress == "powersgd"):
        cannot = "clip to the global norm (grad_clip)" if clip > 0 else "skip a step that overflows (float16)"
        cannot = "keep PowerSGD's errors if a step is skipped" if compress == "powersgd" else cannot
        return f"overlap_step='backward' updates a bucket before the others came, so it cannot {cannot}; use 'forward'"
    return ""
