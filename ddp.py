"""Data-parallel training by hand: flat buffers, gradient hooks, ordered buckets, a deferred step, PowerSGD, ZeRO-1.

torchrun --standalone --nproc_per_node=2 pretrain.py config/debug.py       # 2 processes on a CPU, gloo
torchrun --standalone --nproc_per_node=4 pretrain.py config/small.py       # 4 GPUs, NCCL

Every rank runs the same model on other data, and all ranks need the mean of their gradients. Five ideas make it fast:

1. Flat buffers. All parameters of one dtype are views of one flat tensor, all gradients are views of another. Autograd
   adds into the gradient views in place, so that a slice of the buffer can be sent with no copy in or out.
2. Hooks. A bucket is a slice that holds a few consecutive blocks. A hook on each parameter tells when its gradient is
   final; a complete bucket is sent at once, while backward still computes the blocks before it.
3. One order. The last block's gradients are ready first, so bucket 0 is the head and the last one is the embedding.
   Buckets are launched strictly by index: ranks that issue collectives in different orders hang or crash.
4. A deferred step. Clipping needs the norm of all gradients, so nothing can be updated before the last one is there.
   But a block's weights are not needed before the next forward comes to it: the update waits until then (and with
   ZeRO-1 the exchange of the updated shards, too). The numbers are the same to the bit.
5. A pipeline. PowerSGD sends two thin factors instead of a matrix, the second computed from the reduced first. While
   a bucket's first factor travels, the bucket before it takes its second step, in an order that never depends on time.

DDP is not a wrapper around the model. A script calls the plain `model(...)`:

    world = ddp.init(device_type)
    parallel = ddp.DDP(model)                                   # from here on all ranks hold rank 0's weights
    for micro_step in range(accum_steps):
        parallel.sync = micro_step == accum_steps - 1           # before that: add up locally, send nothing
        loss = model(x, y) * (world.world_size / n_tokens)      # sum of token losses; the ranks are averaged below
        loss.backward()
    norm = parallel.step(optimizer, lr=lr, clip=1.0)            # wait, norm, clip, update (or defer it), zero
    parallel.flush()                                            # before anything but model(...) reads the weights
    ddp.close()

Collectives run whenever a process group exists (also one of a single process under torchrun) and never otherwise.
docs/ddp.md explains each idea at length, with a timeline and what each option buys.
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, pairwise, zip_longest
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import (  # noqa: F401 (also passed on: scripts say ddp.init, ddp.any_rank)
    DDPError,
    World,
    all_reduce_sum,
    any_rank,
    barrier,
    broadcast,
    bulletin,
    close,
    gather_objects,
    init,
    issue,
    named_errors,
    world_size,
)

Named = tuple[str, nn.Parameter]
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
    grad: Tensor  # (padded,) every p.grad is a view of it
    sizes: list[int]  # ZeRO-1: elements of each rank's shard, the part of the bucket that it updates; else [padded]
    shard: tuple[int, int]  # first and one-past-last element that this rank updates
    # What becomes of it within a step
    step: int = 0  # number of the step, from 0
    missing: int = 0  # parameters whose gradient has not arrived in the synced backward
    stages: Iterator | None = None  # the communication hook at work
    more: bool = False  # the hook has another collective to launch
    square: Tensor | None = None  # squared norm of the mean gradient in this rank's shard, once it is known
    flight: tuple[str, dist.Work] | None = None  # the collective under way, and what errors call it
    update: Callable[[], None] | None = None  # the update, if it is deferred
    stale: bool = False  # ZeRO-1: the other ranks' shards of `param` are still to be fetched
    updated: torch.cuda.Event | None = None  # on a GPU: the moment when the update is done

    @property
    def sharded(self) -> bool:
        return len(self.sizes) > 1

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
            what = f"step {self.step}: {collective.__name__} of bucket {self.index} (first parameter {self.names[0]})"
            self.flight = what, issue(what, partial(collective, async_op=True), *args)

    def wait(self) -> None:
        """Until the collective is done. gloo blocks here; with NCCL only the GPU's stream waits."""
        if self.flight is not None:
            what, work = self.flight
            with named_errors(what):
                work.wait()
            self.flight = None


BEFORE, AFTER = "before the blocks", "after the blocks"


def make_buckets(
    model: nn.Module, bucket_bytes: float, world_size: int, shard_of: int = -1,
    keep_whole: Callable[[str], bool] = lambda name: False,
) -> list[Bucket]:  # fmt: skip
    """Allocate the flat buffers, move the trainable parameters of `model` into them and return the buckets in order,
    not sharded or (ZeRO-1) as rank `shard_of` sees them."""
    groups = [
        (units, [member for member in group if member[1].dtype == dtype])
        for units, group in plan_buckets(model, bucket_bytes)
        for dtype in dict.fromkeys(p.dtype for _, p in group)
    ]
    dtypes = [group[0][1].dtype for _, group in groups]
    multiple = ALIGNMENT * world_size
    sizes = [-(-sum(p.numel() for _, p in group) // multiple) * multiple for _, group in groups]
    params = split_flat(dtypes, sizes, groups[0][1][0][1].device)
    grads = split_flat(dtypes, sizes, groups[0][1][0][1].device)
    buckets = []
    for (units, group), param, grad in zip(groups, params, grads, strict=True):
        group.sort(key=lambda member: (-member[1].ndim, tuple(member[1].shape)))  # matrices first, equal ones together
        ends = list(accumulate(p.numel() for _, p in group))
        names, members = (list(column) for column in zip(*group, strict=True))
        whole = [span for name, span in zip(names, pairwise([0, *ends]), strict=True) if keep_whole(name)]
        cuts = cut_shards(param.numel(), 1 if shard_of < 0 else world_size, whole)
        mine = max(shard_of, 0)
        bucket = Bucket(
            len(buckets), units, names, members, [0, *ends[:-1]], param, grad,
            sizes=[end - begin for begin, end in pairwise(cuts)], shard=(cuts[mine], cuts[mine + 1]),
        )  # fmt: skip
        for i, p in enumerate(members):
            bucket.view(param, i).copy_(p.detach())
            p.data = bucket.view(param, i)  # the Parameter object stays, and with it ties, names and references
            p.grad = bucket.view(grad, i)
        buckets.append(bucket)
    return buckets


def plan_buckets(model: nn.Module, bucket_bytes: float) -> list[tuple[list[str], list[Named]]]:
    """(units, named trainable parameters) of each bucket, in the order in which backward finishes them.

    Buckets end where blocks end (`model.layers`, else the top-level children), so that a block's weights are never
    half updated. What stands before and after the blocks (embedding; final norm and head) has buckets of its own. Tied
    weights count once, where they are registered first: at the embedding, whose gradient is the last to be final.
    """
    has_blocks = isinstance(getattr(model, "layers", None), nn.ModuleList)
    units: dict[str, list[Named]] = {}  # in the order of registration, which is forward's
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


def split_flat(dtypes: list[torch.dtype], sizes: list[int], device: torch.device) -> list[Tensor]:
    """Zeros of each dtype and size, cut from one flat buffer per dtype."""
    parts = {}
    for dtype in set(dtypes):
        mine = [size for size, d in zip(sizes, dtypes, strict=True) if d == dtype]
        parts[dtype] = iter(torch.zeros(sum(mine), dtype=dtype, device=device).split(mine))
    return [next(parts[dtype]) for dtype in dtypes]


def cut_shards(size: int, shards: int, whole: list[tuple[int, int]]) -> list[int]:
    """Where the shards of a bucket of `size` elements begin, and its end: equal shares, but that a cut inside one of
    the spans `whole` moves to its nearer end."""
    cuts = [size * r // shards for r in range(shards + 1)]
    for begin, end in whole:
        cuts = [cut if not begin < cut < end else begin if cut - begin < end - cut else end for cut in cuts]
    return cuts


# ---- communication hooks ------------------------------------------------------------------------------------------
# hook(bucket) is called when bucket.grad is final on this rank. It is a generator, because nothing may be waited for
# during backward: it launches a collective and yields, and is resumed when the collective is done. It yields
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
        bucket.grad.div_(world_size())  # before the sum, which float16 could not hold
        sent = bucket.grad if self.wire is None else bucket.grad.to(self.wire)
        begin, end = bucket.shard
        mine = bucket.grad[begin:end]
        if bucket.sharded:
            received = launch_scatter(bucket, sent)
            yield False
            if received.ndim == 2:  # the shard of every rank, added in their order
                torch.sum(received, dim=0, dtype=mine.dtype, out=mine)
            elif received.data_ptr() != mine.data_ptr():
                mine.copy_(received)
        else:
            bucket.launch(dist.all_reduce, sent)
            yield False
            if sent is not bucket.grad:
                mine.copy_(sent)
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
    begin, end = bucket.shard
    if native(bucket, flat):
        bucket.launch(getattr(dist, "all_gather_single", dist.all_gather_into_tensor), flat, flat[begin:end])
    else:
        shares = [end - begin] * len(bucket.sizes)
        bucket.launch(dist.all_to_all_single, flat, flat[begin:end].repeat(len(shares)), bucket.sizes, shares)


def native(bucket: Bucket, flat: Tensor) -> bool:
    """NCCL has its own operations for shards of equal size, and works in place."""
    return flat.is_cuda and len(set(bucket.sizes)) == 1


def sum_of_squares(flat: Tensor) -> Tensor:
    """0-d float32. By rows: on a CPU vector_norm adds one element after the other, and the norm of 6.5M of them is 2e-4
    off; this is 1e-8 off in the same time (measured).
    """
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
    outside the blocks are sent as they are; so is everything in the first `start_step` steps. Results do not depend on
    how the model is cut into buckets. `scaler` is the GradScaler, whose scale the errors must not contain.
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
        """Allocate the state, all errors zero."""
        for bucket in buckets:
            stacks, raw = [], []
            for shape, run in groupby(range(len(bucket.params)), key=lambda i: bucket.params[i].shape):
                items = list(run)
                grad = bucket.grad[bucket.offsets[items[0]] : bucket.offsets[items[-1]] + shape.numel()]
                if self.compresses(bucket, shape):
                    stacks.append(self.new_stack([bucket.names[i] for i in items], grad, shape))
                else:
                    raw.append(grad)
            self.stacks.append(stacks)
            self.raw.append(raw)

    def compresses(self, bucket: Bucket, shape: torch.Size) -> bool:
        n, m = shape[0], shape[1:].numel()
        r = min(n, m, self.rank)
        inside = self.embedding or not {BEFORE, AFTER} & set(bucket.units)
        return len(shape) >= 2 and inside and 2 * (n + m) * r < n * m

    def new_stack(self, names: list[str], grad: Tensor, shape: torch.Size) -> Stack:
        """The first basis is random, from the seed and each name alone."""
        grad = grad.view(len(names), shape[0], -1)
        dtype = torch.promote_types(grad.dtype, torch.float32)
        r = min(self.rank, *grad.shape[1:])
        basis = []
        for name in names:
            generator = torch.Generator().manual_seed(self.seed * 2**32 + zlib.crc32(name.encode()))
            basis.append(torch.randn(grad.shape[2], r, generator=generator, dtype=dtype))
        return Stack(names, grad, torch.zeros_like(grad, dtype=dtype), torch.stack(basis).to(grad.device))

    def __call__(self, bucket: Bucket) -> Iterator:
        stacks, raw = self.stacks[bucket.index], self.raw[bucket.index]
        if not stacks or bucket.step < self.start_step:
            yield from self.average(bucket)
            return
        scale = torch.ones((), device=bucket.grad.device)
        scale = scale if self.scaler is None else self.scaler.scale(scale)
        # The gradient plus what is owed to it (in place, if it is float32), projected on the basis
        wanted = [s.grad.to(s.error.dtype).addcmul_(s.error, scale.to(s.error.dtype)) for s in stacks]
        left = [d @ torch.linalg.qr(s.basis)[0] for d, s in zip(wanted, stacks, strict=True)]
        message = join(left + [slot.div_(world_size()) for slot in raw])
        bucket.launch(dist.all_reduce, message)
        yield True  # message: the sum over the ranks of the left factors, the mean of the rest
        left, means = split_like(message, left), split_like(message, raw, from_end=True)
        for slot, mean in zip(raw, means, strict=True):
            slot.copy_(mean)
        left = [torch.linalg.qr(p)[0] for p in left]
        mine = [d.mT @ p for d, p in zip(wanted, left, strict=True)]
        message = join(mine).div_(world_size())
        bucket.launch(dist.all_reduce, message)
        yield False  # message: the mean over the ranks of the right factors
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
        return {
            name: {"error": s.error[k], "basis": s.basis[k]}
            for stacks in self.stacks
            for s in stacks
            for k, name in enumerate(s.names)
        }

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
    compress: str, rank: int = 4, start_step: int = 0, embedding: bool = True, seed: int = 0,
    scaler: torch.amp.GradScaler | None = None,
) -> Callable[[Bucket], Iterator]:  # fmt: skip
    """The hook that the trainers' keys ask for; `compress` is one of COMPRESS."""
    if compress == "powersgd":
        return PowerSGD(rank, start_step, embedding, seed, scaler)
    return Average({"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}[compress])


def join(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def split_like(flat: Tensor, tensors: list[Tensor], from_end: bool = False) -> list[Tensor]:
    """Views of the first elements of `flat` (or the last) in the shapes of `tensors`."""
    sizes = [t.numel() for t in tensors]
    flat = flat[flat.numel() - sum(sizes) :] if from_end else flat[: sum(sizes)]
    return [part.view(t.shape) for part, t in zip(flat.split(sizes), tensors, strict=True)]


# ---- the synchronisation ------------------------------------------------------------------------------------------


class Optimizer(Protocol):
    """What DDP.step asks of an optimizer; it keeps its own state per bucket."""

    def update(self, bucket: Bucket, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Step the parameters in bucket.shard with gradient bucket.grad / grad_scale; change nothing if found_inf is
        1."""


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

        `bucket_mb` is the most that blocks are merged to; 0 takes a twelfth of the model between 1 and 25 MiB: enough
        buckets to start early, each large enough to hide the latency of its collective. Raises DDPError on all ranks if
        they hold different models. Move the model to its device and dtype, and freeze what is frozen, before.

        `hook` is how gradients travel; default Average(). `overlap_step` is when a bucket is updated: "off" in step();
        "forward" when the next forward comes to it; "backward" as soon as its gradient has arrived, see expect_step().
        `zero1` has each rank update one shard of every bucket, so that optimizer state takes a share of the memory
        (ZeRO stage 1, arXiv:1910.02054); parameters for whose name `keep_whole` is true belong to one rank entirely.
        """
        hook = Average() if hook is None else hook
        if reason := conflict(type(hook).__name__.lower(), overlap_step, zero1):
            raise DDPError(f"ddp: {reason}")
        options = f"{bucket_mb=}, hook={type(hook).__name__}, {overlap_step=}, {zero1=}"
        check_same_model(model, options)
        trainable = [p for p in model.parameters() if p.requires_grad]
        devices = sorted({str(p.device) for p in trainable})
        if len(devices) != 1:
            raise DDPError(f"ddp: the model needs trainable parameters, all on one device; found them on {devices}")
        self.model, self.hook, self.overlap_step = model, hook, overlap_step
        self.device = trainable[0].device
        n_bytes = sum(p.numel() * p.element_size() for p in trainable)
        bucket_bytes = bucket_mb * MIB or min(max(n_bytes / 12, MIB), 25 * MIB)
        shard_of = dist.get_rank() if zero1 and world_size() > 1 else -1
        self.buckets = make_buckets(model, bucket_bytes, world_size(), shard_of, keep_whole)
        frozen = [p.data for p in model.parameters() if not p.requires_grad]
        for t in [bucket.param for bucket in self.buckets] + frozen + list(model.buffers()):
            broadcast(t)
        if hasattr(hook, "attach"):
            hook.attach(self.buckets)
        self.sync = True
        self.n_steps = 0
        self.found_inf = torch.zeros((), device=self.device)
        self._home = {p: (bucket, i) for bucket in self.buckets for i, p in enumerate(bucket.params)}
        self._norm_param = nn.Parameter(torch.zeros((), device=self.device))  # carries the norm through GradScaler
        self._norm_optimizer = torch.optim.SGD([self._norm_param])
        side = self.device.type == "cuda" and overlap_step != "off"
        self._stream = torch.cuda.Stream(self.device) if side else None  # on which buckets are updated
        self._start_step()
        for p in self._home:
            p.register_post_accumulate_grad_hook(self._on_grad)
        self._watch_forward()

    def _start_step(self) -> None:
        """Expect one gradient per parameter, and bucket 0 to be launched first."""
        self._arrived: set[nn.Parameter] = set()
        self._next = 0  # bucket to launch
        self._expected: tuple[Optimizer, float] | None = None  # optimizer and lr of updates during backward
        for bucket in self.buckets:
            bucket.missing, bucket.square, bucket.step = len(bucket.params), None, self.n_steps

    # -- backward: gradients arrive, buckets leave

    def _on_grad(self, p: nn.Parameter) -> None:
        """Called by autograd when p.grad is final for this backward. Never waits: that would stop backward."""
        bucket, i = self._home[p]
        if p in self._arrived:
            raise DDPError(
                f"ddp: {bucket.names[i]} received its gradient twice in one synced backward; call step() after the "
                "backward with ddp.sync = True, and use no block twice under reentrant checkpointing"
            )
        if bucket.update is not None or bucket.stale:
            raise DDPError(
                f"ddp: {bucket.names[i]} was used before its update: call modules, model(...), not their weights or "
                "their forward(); or call flush() before"
            )
        if not bucket.holds(p.grad, bucket.grad, i):
            self._rebind_grad(bucket, i)
        if not self.sync:
            return  # accumulation: keep adding into the view, send nothing
        self._arrived.add(p)
        bucket.missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._launch_next()

    def _rebind_grad(self, bucket: Bucket, i: int) -> None:
        """Bring a gradient that autograd had to allocate (after zero_grad(set_to_none=True)) back into the buffer."""
        p = bucket.params[i]
        if not bucket.holds(p, bucket.param, i):
            raise DDPError(f"ddp: {moved([bucket.names[i]])}")
        bucket.view(bucket.grad, i).copy_(p.grad.detach())
        p.grad = bucket.view(bucket.grad, i)

    @torch.no_grad()
    def _launch_next(self) -> None:
        """Launch the next bucket and move those before it on: P0, P1 Q0, P2 Q1, ... the same on every rank."""
        bucket = self.buckets[self._next]
        self._next += 1
        bucket.stages = self.hook(bucket)
        self._resume(bucket)
        self._relay(before=bucket.index)
        for earlier in self.buckets[: bucket.index]:
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
        """Before the backward of a step, with overlap_step="backward": what its buckets will be updated with. Without
        this call, or with another overlap_step, the update waits for step()."""
        if self.overlap_step == "backward":
            self._expected = optimizer, lr

    @torch.no_grad()
    def step(
        self, optimizer: Optimizer, lr: float, clip: float = 0.0, scaler: torch.amp.GradScaler | None = None
    ) -> Tensor:
        """Finish the reduction, clip to global norm `clip` (0 = off), update, zero the gradients.

        Returns the global norm before clipping, without the loss scale: 0-d float32 on the model's device. If it is not
        finite, all ranks skip the update together, because it is the norm of the gradients they share. Nothing here
        waits for the GPU, except with overlap_step="backward". Raises DDPError on all ranks if a gradient is missing or
        was moved on any.
        """
        if reason := conflict("", self.overlap_step, False, clip, scaler is not None and scaler.is_enabled()):
            raise DDPError(f"ddp: {reason}")
        if self._expected not in (None, (optimizer, lr)):
            raise DDPError("ddp: step() was called with another optimizer or lr than expect_step()")
        norm = self._finish_reduce()
        self._check_gradients()
        grad_scale = torch.ones((), device=self.device)
        if scaler is not None:
            grad_scale = scaler.scale(grad_scale)
            # To the scaler the norm is the only gradient: it is unscaled and checked, and update() grows or backs off
            # exactly as if all gradients had been looked at.
            self._norm_param.grad = norm
            scaler.unscale_(self._norm_optimizer)
        self.found_inf = 1.0 - norm.isfinite().float()
        if clip > 0:
            grad_scale = grad_scale / (clip / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch's clip_grad_norm_
        self._grad_scale = grad_scale  # kept with found_inf until the next step: the side stream may still read them
        if self._expected:
            self._check_finite(norm)
        else:
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
            self._begin_refresh(bucket)  # no forward has touched it: an update that still waits needs its old gradient
            self._end_refresh(bucket)
        while self._next < len(self.buckets):
            self._launch_next()  # incomplete: an error below, but other ranks wait for this collective
        while self._relay(before=len(self.buckets)):
            pass
        for bucket in self.buckets:
            if bucket.square is None:
                self._settle(bucket)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        square = torch.stack([bucket.square for bucket in self.buckets]).sum()
        if self.buckets[0].sharded:
            all_reduce_sum(square, f"step {self.n_steps}: all_reduce of the squared norm")
        return square.sqrt()

    def _update(self, bucket: Bucket, optimizer: Optimizer, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Update this rank's shard of the bucket, zero the gradients."""
        bucket.update = None
        optimizer.update(bucket, lr=lr, grad_scale=grad_scale, found_inf=found_inf)
        bucket.grad.zero_()
        bucket.stale = bucket.sharded
        if self._stream is not None:
            bucket.updated = self._stream.record_event()

    # -- forward: what was deferred

    def _watch_forward(self) -> None:
        """Have every block refresh its bucket before it runs. Hooks on blocks, not on what is inside them: those would
        become part of the block's compiled graph."""
        modules = dict(self.model.named_modules())
        for bucket in self.buckets:
            for unit in bucket.units:
                if unit == AFTER:
                    self.model.layers[-1].register_forward_hook(lambda *_, bucket=bucket: self._refresh(bucket))
                else:
                    module = modules.get(unit, self.model)
                    module.register_forward_pre_hook(lambda *_, bucket=bucket: self._refresh(bucket))

    @torch.no_grad()
    def _refresh(self, bucket: Bucket) -> None:
        """Make the parameters current, and have the buckets that forward needs next on their way."""
        for ahead in reversed(self.buckets[max(0, bucket.index - PREFETCH) : bucket.index + 1]):
            self._begin_refresh(ahead)
        self._end_refresh(bucket)

    def _begin_refresh(self, bucket: Bucket) -> None:
        if bucket.update is not None or (bucket.stale and bucket.flight is None):
            with self._aside():
                if bucket.update is not None:
                    bucket.update()
                if bucket.stale:
                    launch_gather(bucket, bucket.param)

    def _end_refresh(self, bucket: Bucket) -> None:
        if bucket.stale:
            bucket.wait()
            bucket.stale = False
        if bucket.updated is not None:
            torch.cuda.current_stream().wait_event(bucket.updated)
            bucket.updated = None

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On a GPU with an overlapped step: on the side stream, after all that the main one has been given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def flush(self) -> None:
        """Make all parameters current: before anything but a forward reads them. All ranks, as it may communicate."""
        for bucket in reversed(self.buckets):
            self._refresh(bucket)

    def gather(self, bucket: Bucket, flat: Tensor) -> None:
        """Complete `flat`, laid out as bucket.param, of which this rank has filled its shard. All ranks."""
        if bucket.sharded:
            launch_gather(bucket, flat)
            bucket.wait()

    # -- what may go wrong

    def _check_gradients(self) -> None:
        """Raise on all ranks what is wrong on any. One flag over gloo per step; it also notices dead ranks early."""
        problem = self._problem()
        if any_rank(problem != "", f"step {self.n_steps}: agreement that all gradients arrived"):
            problems = gather_objects(problem)
            rank = next(rank for rank, text in enumerate(problems) if text)
            raise DDPError(f"ddp: rank {rank}, step {self.n_steps}: {problems[rank]}")

    def _problem(self) -> str:
        """Why this rank's gradients are not those of the whole model, or an empty string."""
        slots = [(name, bucket, i) for bucket in self.buckets for i, name in enumerate(bucket.names)]
        lost = [name for name, bucket, i in slots if not bucket.holds(bucket.params[i], bucket.param, i)]
        if lost:
            return moved(lost)
        absent = [(name, bucket.params[i]) for name, bucket, i in slots if bucket.params[i] not in self._arrived]
        if absent:
            current = dict(self.model.named_parameters())
            replaced = [name for name, p in absent if current.get(name) is not p]
            if replaced:
                return moved(replaced)
            return (
                f"no gradient in a backward with ddp.sync = True for {listed([name for name, _ in absent])}; "
                "set requires_grad=False before DDP(model) for parameters that the loss does not use"
            )
        changed = [name for name, bucket, i in slots if not bucket.holds(bucket.params[i].grad, bucket.grad, i)]
        return f".grad was replaced between backward and step for {listed(changed)}" if changed else ""

    def _check_finite(self, norm: Tensor) -> None:
        if not norm.isfinite():
            raise DDPError(
                f"ddp: step {self.n_steps}: the gradient is not finite, and overlap_step='backward' has applied a part "
                "of it; continue from the last checkpoint with overlap_step='forward', which can skip such a step"
            )

    def check_replicas(self) -> None:
        """Raise DDPError on all ranks unless they hold the same parameters, bit for bit."""
        self.flush()
        mine = [zlib.crc32(bucket.param.cpu().view(torch.uint8).numpy()) for bucket in self.buckets]
        for rank, theirs in enumerate(everyone := gather_objects(mine)):
            for bucket, first, other in zip(self.buckets, everyone[0], theirs, strict=True):
                if first != other:
                    raise DDPError(
                        f"ddp: after {self.n_steps} steps rank {rank} holds other weights than rank 0 in bucket "
                        f"{bucket.index} ({listed(bucket.names)})"
                    )


def finish(stages: Iterator, found_inf: Tensor) -> None:
    """Let a hook write the mean into bucket.grad."""
    try:
        stages.send(found_inf)
    except StopIteration:
        return
    raise DDPError("ddp: a communication hook must end after the norm")


def conflict(compress: str, overlap_step: str, zero1: bool, clip: float = 0.0, scaled: bool = False) -> str:
    """Why these options do not go together, or an empty string. `scaled`: float16 with a GradScaler."""
    if overlap_step not in ("off", "forward", "backward"):
        return f"overlap_step must be one of off, forward, backward, got {overlap_step!r}"
    if compress == "powersgd" and zero1:
        return "PowerSGD brings the whole mean gradient to every rank, zero1=True only a shard; use one of the two"
    if overlap_step == "backward":
        unknown = "overlap_step='backward' updates a bucket before the others have arrived"
        if clip > 0:
            return f"{unknown}, so it cannot clip to the global norm; use grad_clip=0.0, or overlap_step='forward'"
        if scaled:
            return f"{unknown}, so it cannot skip a step that overflows in float16; use overlap_step='forward'"
        if compress == "powersgd":
            return f"{unknown}, but PowerSGD's errors must not change in a skipped step; use overlap_step='forward'"
    return ""


def check_same_model(model: nn.Module, options: str) -> None:
    """Raise DDPError on all ranks unless they agree on options, names, order, shapes, dtypes and requires_grad."""
    mine = [options]
    mine += [f"{n} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad}" for n, p in model.named_parameters()]
    mine += [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    everyone = gather_objects(mine)
    for rank, theirs in enumerate(everyone):
        for first, other in zip_longest(everyone[0], theirs, fillvalue="nothing"):
            if other != first:
                raise DDPError(f"ddp: rank {rank} holds another model than rank 0: {other} instead of {first}")


def moved(names: list[str]) -> str:
    return f"{listed(names)} left the flat buffer; call model.to() and load_state_dict(assign=True) before DDP(model)"


def listed(names: list[str]) -> str:
    """The first five names and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
