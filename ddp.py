"""Data-parallel training by hand: N ranks compute gradients on their own data and average them.

Every rank updates with g = (g_0 + ... + g_{N-1}) / N. On a slow network sending takes as long as
computing, so it is hidden behind backward. In the order of this file:

1. Layout. The parameters of a few consecutive blocks are views of one flat tensor, a bucket. Their
   gradients are gathered in another: sent as one tensor, and for the optimizer one long tensor.
2. Communication hook. How one bucket travels: `Average` here, PowerSGD in
   groundup/train/powersgd.py.
3. Gradients arrive, buckets leave. Autograd calls us when a gradient is final. A complete bucket is
   sent while backward computes the blocks before it. Buckets leave strictly by index: ranks that
   issue collectives in different orders hang or crash.
4. The step. Wait for the rest, clip to the global norm, update.

Optional: 5. a deferred or overlapped update; 6. ZeRO-1; 7. the same bits on any number of ranks.

DDP is not a wrapper: a trainer calls the plain model(...), sets `ddp.sync` before each backward and
calls `ddp.step()` after the last. Without a process group the same code sends nothing.
docs/ddp.md explains each idea.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from groundup.errors import UserError, listed, refuse
from groundup.train import ranks
from groundup.train.optim import Optimizer, muon_trains

MIB = 2**20
ALIGNMENT = 128  # elements: buckets are multiples of world_size * ALIGNMENT, so shards are equal
PREFETCH = 2  # buckets that are updated or fetched ahead of forward
WIRES = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}
BEFORE, AFTER = "before the blocks", "after the blocks"
# Newer versions of torch rename these two.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

# ---- 1. layout of the buffers --------------------------------------------------------------------

NamedParams = list[tuple[str, nn.Parameter]]


class State(Enum):
    """What a bucket waits for, in the order of a step.

    READY lasts beyond step() with a deferred update only (section 5); STALE is of ZeRO-1 (6)."""

    WAITING = "for its gradients; the weights are current"
    HALFWAY = "for a collective, after which its hook launches a second and last one"
    IN_FLIGHT = "for the last collective of its hook"
    REDUCED = "for the global norm; its own norm is known"
    READY = "for its update; the mean is in grad"
    STALE = "for the other ranks' shards; this rank's own is updated (ZeRO-1)"


@dataclass
class Update:
    """What the optimizer gets for every bucket of a step, now or later."""

    optimizer: Optimizer
    lr: float
    grad_scale: Tensor  # 0-d; gradients are divided by it: loss scale and clipping
    found_inf: Tensor  # 0-d; 1 = leave weights and state as they are


@dataclass(eq=False)
class Bucket:
    """Parameters that are reduced and updated together: consecutive blocks of one dtype.

    Equal shapes are neighbours, so k matrices (n, m) are also one (k, n, m) view of `param`."""

    index: int  # the order of sending: 0 holds the last norm and an untied head
    blocks: list[str]  # names of its blocks, or BEFORE or AFTER
    names: list[str]
    params: list[nn.Parameter]
    offsets: list[int]  # where each parameter starts, in elements
    param: Tensor  # (padded,) every p.data is a view of it; the padding stays zero
    grad: Tensor  # (padded,) after backward every p.grad is a view of it
    # What this rank updates, [first, end) in elements: all, or with ZeRO-1 its shard
    own: tuple[int, int]
    # One shard per rank, of equal sizes; cut_into_shards() may move the cuts for ZeRO-1
    shard_sizes: list[int]  # elements
    sharded: bool = False  # ZeRO-1
    # What changes from step to step
    state: State = State.WAITING
    n_updates: int = 0  # done before this step; PowerSGD compares it with its start_step
    missing: set[int] = field(default_factory=set)  # numbers of the gradients still to come
    running_hook: Iterator[State] | None = None  # the communication hook at work on this bucket
    squared_norm: Tensor | None = None  # of its own part of the mean, 0-d; InTree: of pieces (n,)
    update: Update | None = None  # what the optimizer does with the mean, once that is known
    work: dist.Work | None = None  # the collective under way
    work_name: str = ""  # for errors: the step, the operation and the bucket
    update_done: torch.cuda.Event | None = None  # recorded after an update on the side stream

    def view(self, flat: Tensor, i: int) -> Tensor:
        """Return the slot of params[i] in `flat`, which is laid out like `param`, in its shape."""
        p = self.params[i]
        return flat[self.offsets[i] : self.offsets[i] + p.numel()].view(p.shape)

    def holds(self, t: Tensor | None, flat: Tensor, i: int) -> bool:
        """Return whether `t` lies in the slot of params[i]. Compares addresses, so it is cheap."""
        begin = flat.data_ptr() + self.offsets[i] * flat.element_size()
        return t is not None and t.data_ptr() == begin

    def launch(self, collective: Callable, *args: Any) -> None:
        """Start a collective and return at once; do nothing without a process group."""
        if dist.is_initialized():
            name = f"step {self.n_updates + 1}: {collective.__name__} of bucket {self.index}"
            self.work_name = f"{name} (first: {self.names[0]})"
            self.work = ranks.issue(self.work_name, collective, *args, async_op=True)

    def has_arrived(self) -> bool:
        """Return whether a collective was launched and has ended. Does not wait."""
        return self.work is not None and self.work.is_completed()

    def wait(self) -> None:
        """Wait for the collective. gloo blocks here; with NCCL only the GPU's stream waits."""
        if self.work is not None:
            with ranks.named_errors(self.work_name):
                self.work.wait()
            self.work = None


def make_buckets(model: nn.Module, bucket_bytes: float, world_size: int) -> list[Bucket]:
    """Move the trainable parameters of `model` into flat buffers; return the buckets in order."""
    # Backward ends the last blocks first, so their bucket is the first to be sent.
    buckets = []
    for blocks, members in plan_buckets(model, bucket_bytes):
        # Matrices first, equal shapes side by side
        members.sort(key=lambda member: (-member[1].ndim, tuple(member[1].shape)))
        params = [p for _, p in members]
        ends = list(accumulate(p.numel() for p in params))
        multiple = ALIGNMENT * world_size
        padded = -(-ends[-1] // multiple) * multiple  # rounded up
        bucket = Bucket(
            index=len(buckets),
            blocks=blocks,
            names=[name for name, _ in members],
            params=params,
            offsets=[0, *ends[:-1]],
            param=torch.zeros(padded, dtype=params[0].dtype, device=params[0].device),
            grad=torch.zeros(padded, dtype=params[0].dtype, device=params[0].device),
            own=(0, padded),
            shard_sizes=[padded // world_size] * world_size,
        )
        for i, p in enumerate(params):
            bucket.view(bucket.param, i).copy_(p.detach())
            # The Parameter object stays, and with it tied weights, names and references. In the
            # first step backward adds into this slot. Later p.grad is None (`_apply`), and
            # `_on_grad` copies the tensor that autograd brings.
            p.data = bucket.view(bucket.param, i)
            p.grad = bucket.view(bucket.grad, i)
        buckets.append(bucket)
    return buckets


def plan_buckets(model: nn.Module, bucket_bytes: float) -> list[tuple[list[str], NamedParams]]:
    """Return (blocks, trainable parameters) per bucket, in the order in which backward ends them.

    A bucket ends where a block ends (`model.layers`, else the top-level children), so a block's
    weights are never half updated. What lies before and after the blocks (embedding; final norm and
    head) has buckets of its own. Tied weights are the embedding's: its gradient is final last."""
    # Parameters by block, in the order of forward
    has_layers = isinstance(getattr(model, "layers", None), nn.ModuleList)
    by_block: dict[str, NamedParams] = {}
    edge = BEFORE
    for name, p in model.named_parameters():
        path = name.split(".")
        block = path[0]
        if has_layers and block == "layers":
            block, edge = f"layers.{path[1]}", AFTER
        elif has_layers:
            block = edge
        if p.requires_grad:
            by_block.setdefault(block, []).append((name, p))

    # Merge consecutive blocks, from the last one down, while they fit
    merged: list[tuple[list[str], NamedParams]] = []
    room = 0.0
    for block, members in reversed(by_block.items()):
        n_bytes = sum(p.nbytes for _, p in members)
        is_edge = block in (BEFORE, AFTER)
        if is_edge or n_bytes > room:
            merged.append(([], []))
            room = bucket_bytes
        merged[-1][0].append(block)
        merged[-1][1].extend(members)
        room = 0 if is_edge else room - n_bytes

    # One dtype per bucket
    groups = []
    for blocks, members in merged:
        for dtype in dict.fromkeys(p.dtype for _, p in members):
            groups.append((blocks, [member for member in members if member[1].dtype == dtype]))
    return groups


# ---- 2. the communication hook: how a bucket travels ---------------------------------------------
# A hook gets a bucket whose `grad` holds this rank's gradient / world_size (for InTree undivided):
# the sum over ranks is the mean. It is a generator, so that backward waits as little as possible.
# It yields the state that the bucket is in, and DDP resumes it when that has passed:
#
#     HALFWAY     it has launched the first of two collectives; resumed when the next bucket left
#     IN_FLIGHT   it has launched its last one; resumed in step(). With overlap_step="backward" or
#                 ZeRO-1 already in backward, once it has arrived
#     REDUCED     it has set bucket.squared_norm; resumed when bucket.update is known
#
# It ends with the mean in bucket.grad. If bucket.update.found_inf is 1 the step is skipped, and the
# hook must not change its own state.

Hook = Callable[[Bucket], Iterator[State]]


class Average:
    """The plain mean. With compress="fp16" or "bf16" gradients travel in half the bytes."""

    def __init__(self, compress: str = "none") -> None:
        self.compress = compress

    def __call__(self, bucket: Bucket) -> Iterator[State]:
        """Reduce `bucket`; with ZeRO-1 this rank receives the mean of its shard alone."""
        wire_dtype = WIRES[self.compress]
        sent = bucket.grad if wire_dtype is None else bucket.grad.to(wire_dtype)
        begin, end = bucket.own
        mine = bucket.grad[begin:end]
        if not bucket.sharded:
            received = sent
            bucket.launch(dist.all_reduce, sent)
        elif has_native_shards(bucket):
            received = own_shard(bucket, sent)
            bucket.launch(REDUCE_SCATTER, received, sent)
        else:  # gloo's reduce_scatter moves as many bytes as an all-reduce
            received = launch_exchange(bucket, sent)
        yield State.IN_FLIGHT
        if received.ndim == 2:  # the terms, in the order of the ranks
            torch.sum(received, dim=0, dtype=mine.dtype, out=mine)
        elif received.dtype != mine.dtype:  # else the collective has written into bucket.grad
            mine.copy_(received)
        del sent, received  # as large as the bucket, and the generator lives on
        bucket.squared_norm = sum_of_squares(mine)
        yield State.REDUCED


def sum_of_squares(flat: Tensor) -> Tensor:
    """Return the sum of squares, 0-d float32."""
    # Row by row: on a CPU vector_norm adds one element after the other. Of 6.5M elements it is 2e-4
    # off, this 1e-8, in the same time (measured).
    dtype = torch.promote_types(flat.dtype, torch.float32)
    n_in_rows = flat.numel() // ALIGNMENT * ALIGNMENT
    rows, rest = flat[:n_in_rows].view(-1, ALIGNMENT), flat[n_in_rows:]
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    return (norms.square().sum() + rest.to(dtype).square().sum()).float()


def with_clipping(grad_scale: Tensor, norm: Tensor, clip: float) -> Tensor:
    """Return grad_scale, made larger where the norm exceeds `clip` (0 = off).

    Gradients are divided by it, so their global norm becomes at most `clip`."""
    if clip <= 0:
        return grad_scale
    return grad_scale / (clip / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch's clip_grad_norm_


def count_skipped(skipped: Tensor, found_inf: Tensor) -> Tensor:
    """Return the number of skipped steps (2,), in all and in a row, after one more step."""
    in_all, in_a_row = skipped
    return torch.stack((in_all + found_inf, (in_a_row + 1) * found_inf))


class DDP:
    """Average gradients over the ranks during backward and drive the optimizer.

    Set `sync` to whether the next backward is the last one of the step. After a step, `found_inf`
    (0-d float32) is 1 if it was skipped because its norm was not finite. `skipped` (2,) float32
    counts such steps: in all, and in a row. `stopping`: a signal has told some rank to stop."""

    def __init__(
        self,
        model: nn.Module,
        hook: Hook | None = None,
        overlap_step: str = "off",
        zero1: bool = False,
        whole_matrices: bool = False,
        bucket_mb: float = 0.0,
    ) -> None:
        """Move the weights into flat buffers and copy rank 0's to all ranks.

        Call it once the model is on its device, in its dtype, with parameters frozen. Raise
        UserError on all ranks if they hold different models.
        hook: how a bucket travels; None is Average().
        overlap_step: update a bucket in step() (off), just before its next use (forward), or as
            soon as its gradient has arrived (backward, see expect_step).
        zero1: each rank updates one shard of every bucket; whole_matrices: shards do not cut
            matrices of the blocks, because Muon needs whole ones.
        bucket_mb: size up to which blocks are merged; 0 = by the size of the model."""
        hook = hook or Average()
        check_options(getattr(hook, "compress", "this hook"), overlap_step, zero1)
        options = f"{bucket_mb=}, {overlap_step=}, {zero1=}, {whole_matrices=}"
        of_hook = {key: value for key, value in vars(hook).items() if isinstance(value, int | str)}
        check_same_model(model, f"{options}, {of_hook}")
        self.model, self.hook, self.overlap_step = model, hook, overlap_step
        self.in_tree = isinstance(hook, InTree)
        self.device, self.world_size = device_of(model), ranks.world_size()

        self._lay_out(bucket_mb, zero1, whole_matrices)
        self.sync, self.n_updates, self.stopping = True, 0, False
        self.found_inf = torch.zeros((), device=self.device)
        self.skipped = torch.zeros(2, device=self.device)
        self._stream: torch.cuda.Stream | None = None  # for updates beside the model
        if self.device.type == "cuda" and overlap_step != "off":
            self._stream = torch.cuda.Stream()
        self._start_step()
        self._watch_backward()
        self._watch_forward()  # for deferred updates and ZeRO-1; else its forward hooks do nothing

    def _lay_out(self, bucket_mb: float, zero1: bool, whole_matrices: bool) -> None:
        """Make the flat buffers, and put the weights of rank 0 into them."""
        self.buckets = make_buckets(self.model, self._bucket_bytes(bucket_mb), self.world_size)
        if zero1 and dist.is_initialized():
            for bucket in self.buckets:
                # in_tree, PIECE: section 7
                cut_into_shards(bucket, whole_matrices, unit=PIECE if self.in_tree else 1)
        # What is in no bucket: frozen parameters and buffers
        frozen = [p.data for p in self.model.parameters() if not p.requires_grad]
        flat = [bucket.param for bucket in self.buckets]
        for t in (*flat, *frozen, *self.model.buffers()):
            ranks.broadcast(t)
        if hasattr(self.hook, "attach"):
            self.hook.attach(self.buckets)  # state of its own, such as PowerSGD's errors

    def _watch_backward(self) -> None:
        """Make autograd call `_on_grad` when a gradient is final."""
        for bucket in self.buckets:
            for i, p in enumerate(bucket.params):
                slot = bucket.view(bucket.grad, i)
                p.register_post_accumulate_grad_hook(partial(self._on_grad, bucket, i, slot))

    def _bucket_bytes(self, bucket_mb: float) -> float:
        """Return the size up to which blocks are merged into a bucket."""
        if bucket_mb:
            return bucket_mb * MIB
        # A GPU alone sends nothing: the step is few, large kernels.
        is_alone = self.world_size == 1 and not self.in_tree
        if self.device.type == "cuda" and is_alone and self.overlap_step == "off":
            return 256 * MIB
        # Enough buckets to start early, each large enough to hide a collective's latency.
        n_bytes = sum(p.nbytes for p in self.model.parameters() if p.requires_grad)
        return min(max(n_bytes / 12, MIB), 25 * MIB)

    # ---- 3. gradients arrive, buckets leave ------------------------------------------------------

    def _start_step(self) -> None:
        """Expect one gradient per parameter; bucket 0 is launched first."""
        self._next = 0  # index of the bucket to launch next
        # Optimizer and lr, if buckets are updated in this backward: see expect_step
        self._expected: tuple[Optimizer, float] | None = None
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.params)))

    def _on_grad(self, bucket: Bucket, i: int, slot: Tensor, p: nn.Parameter) -> None:
        """Take p.grad, which is now final for this backward. Waiting here would stop backward.

        p: params[i] of the bucket; slot: where its gradient belongs."""
        self._check_use(bucket, i)
        grad = p.grad.detach()
        if self.in_tree:
            subtree = self.hook.add(p, grad, self.sync)
            if not self.sync:
                p.grad = None  # the next micro-batch's gradient comes alone
                return
            slot.copy_(subtree)
        elif self.sync and self.world_size > 1:
            # Divide before the sum over ranks: in float16 the sum could overflow
            torch.div(grad, self.world_size, out=slot)
        elif not bucket.holds(grad, bucket.grad, i):  # first micro-step: autograd's own tensor
            slot.copy_(grad)
        p.grad = slot
        if not self.sync:
            return  # accumulation: autograd adds into the slot, nothing is sent
        bucket.missing.remove(i)
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._launch_next_bucket()

    def _check_use(self, bucket: Bucket, i: int) -> None:
        """Raise UserError if this gradient cannot be right."""
        name, p = bucket.names[i], bucket.params[i]
        if i not in bucket.missing:
            raise UserError(
                f"ddp: {name} received its gradient twice in one synced backward: step() was not "
                "called after it, or a reentrant checkpoint uses a block twice"
            )
        if bucket.state in (State.READY, State.STALE) or bucket.update_done is not None:
            raise UserError(
                f"ddp: {name} was used before its update: call modules, model(...), not their "
                "weights or their forward(); or call flush() before"
            )
        if not bucket.holds(p, bucket.param, i):
            raise UserError(f"ddp: {moved([name])}")

    @torch.no_grad()
    def _launch_next_bucket(self) -> None:
        """Launch the next bucket, then advance the earlier ones."""
        bucket = self.buckets[self._next]
        self._next += 1
        bucket.n_updates = self.n_updates
        bucket.running_hook = self.hook(bucket)
        self._resume_hook(bucket)
        takes_arrived = self._expected or bucket.sharded
        for other in self.buckets[: bucket.index]:
            if other.state is State.HALFWAY:
                # Of two collectives P and Q the order is P0, P1 Q0, P2 Q1, ... on every rank.
                self._resume_hook(other)
            elif takes_arrived and other.state is State.IN_FLIGHT and other.has_arrived():
                # Update it, or with ZeRO-1 free what was received. This launches nothing, so it may
                # depend on timing.
                self._resume_hook(other)
                if self._expected:
                    self._update_alone(other)

    def _resume_hook(self, bucket: Bucket) -> None:
        """Run the hook up to its next collective, or after the last one up to the norm."""
        bucket.wait()
        with torch.autocast(self.device.type, enabled=False):
            bucket.state = next(bucket.running_hook)

    # ---- 4. the step -----------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self,
        optimizer: Optimizer,
        lr: float,
        clip: float = 0.0,
        scaler: torch.amp.GradScaler | None = None,
        stop: bool = False,
    ) -> Tensor:
        """Finish the reduction, clip to the global norm, update now or later, drop the gradients.

        Return the global norm before clipping and without the loss scale, 0-d float32, equal on all
        ranks. If it is not finite, all skip the update. stop: a signal tells this rank to stop;
        `stopping` is then True on all ranks. Raise UserError on all if one lacks a gradient."""
        scaled = scaler is not None and scaler.is_enabled()  # float16
        # `clip` and the scaler are known only here; the rest was checked at the start
        check_options("", self.overlap_step, False, clip, scaled)
        if self._expected not in (None, (optimizer, lr)):
            raise UserError("ddp: step() got another optimizer or lr than expect_step()")
        norm = self._finish_reduction(stop)
        # Everything below stays on the device: `found_inf` skips the update without a host sync
        grad_scale = torch.ones((), device=self.device)
        if scaled:
            grad_scale = scaler.scale(grad_scale)
            unscale(norm, scaler)
        grad_scale = with_clipping(grad_scale, norm, clip)
        self._note_whether_finite(norm)
        update = Update(optimizer, lr, grad_scale, self.found_inf)
        for bucket in self.buckets:
            if bucket.state is State.REDUCED:  # else backward has updated it
                self._end_hook(bucket, update)
        if scaled:
            scaler.update()
        self.n_updates += 1
        self._start_step()
        self._start_updates()
        return norm

    def _finish_reduction(self, stop: bool) -> Tensor:
        """Wait for all buckets and return the global norm."""
        for bucket in self.buckets[self._next :]:
            # Usually there are none: all have left in backward. If forward skipped a block on this
            # rank alone, the others have fetched its shards (ZeRO-1). Without the same fetch here
            # the ranks would hang, instead of ending with the error below.
            self._refresh(bucket)
        while self._next < len(self.buckets):
            # Incomplete: an error below, but the other ranks wait for this collective
            self._launch_next_bucket()
        for bucket in self.buckets:
            if bucket.state is State.HALFWAY:
                self._resume_hook(bucket)  # the last one's second collective
        # The agreement travels while the norms are computed, and each norm is computed while later
        # buckets travel.
        agree = ranks.start_agreement(self._problem(), f"step {self.n_updates + 1}", stop)
        for bucket in self.buckets:
            if bucket.state is State.IN_FLIGHT:
                self._resume_hook(bucket)
        squares = torch.cat([bucket.squared_norm.flatten() for bucket in self.buckets])
        if not self.in_tree:
            squares = squares.sum()
        if self.buckets[0].sharded:  # each rank knows the norm of its shards alone
            name = f"step {self.n_updates + 1}: all_reduce of the squared norm"
            ranks.all_reduce_sum(squares, name)
        self.stopping = agree()
        if self.in_tree:  # sorted: else the order would depend on the buckets and the ranks
            squares = squares.sort().values.sum()
        return squares.sqrt()

    def _problem(self) -> str:
        """Return why this rank's gradients are not those of the whole model, or ""."""
        lost, absent, changed = [], [], []
        for bucket in self.buckets:
            is_updated = bucket.state in (State.WAITING, State.STALE)  # by this backward
            for i, name in enumerate(bucket.names):
                p = bucket.params[i]
                if not bucket.holds(p, bucket.param, i):
                    lost.append(name)
                elif i in bucket.missing:  # is it still the model's parameter?
                    current = dict(self.model.named_parameters()).get(name)
                    (absent if current is p else lost).append(name)
                elif not is_updated and not bucket.holds(p.grad, bucket.grad, i):
                    changed.append(name)
        if lost:
            return moved(lost)
        if absent:
            return (
                f"no gradient in a backward with ddp.sync = True for {listed(absent)}: the loss "
                "does not use them; remove them from model.py, or set requires_grad=False before "
                "DDP(model)"
            )
        if changed:
            return f".grad was replaced between backward and step for {listed(changed)}"
        return ""

    def _note_whether_finite(self, norm: Tensor) -> None:
        """Set `found_inf` and `skipped`."""
        self.found_inf = 1.0 - norm.isfinite().float()
        self.skipped = count_skipped(self.skipped, self.found_inf)
        # Waits for the GPU: with overlap_step="backward" no update can be skipped any more.
        if self._expected and self.found_inf:
            raise UserError(
                f"ddp: step {self.n_updates + 1}: the gradient is not finite, and overlap_step="
                "'backward' has applied a part of it; continue from the last checkpoint with "
                "overlap_step='forward'"
            )

    def _end_hook(self, bucket: Bucket, update: Update) -> None:
        """Let the hook end: then the mean is in bucket.grad."""
        # Average has put it there before. PowerSGD does so now, when it can see in the update
        # whether the step is skipped.
        bucket.state, bucket.update = State.READY, update
        if next(bucket.running_hook, None):
            raise UserError("ddp: a communication hook must end after the norm")

    def _start_updates(self) -> None:
        """Update all buckets now, or only those that the next forward needs first."""
        if self.overlap_step == "off":
            for bucket in self.buckets:
                self._apply(bucket)
        for bucket in reversed(self.buckets[-PREFETCH:]):
            self._begin_refresh(bucket)

    def _apply(self, bucket: Bucket) -> None:
        """Update this rank's shard of the bucket and drop the gradients."""
        update = bucket.update  # it stays there: the side stream may still read its tensors
        # A forward with autocast may have brought us here
        with self._on_side_stream(), torch.autocast(self.device.type, enabled=False):
            update.optimizer.update(bucket, update.lr, update.grad_scale, update.found_inf)
        for p in bucket.params:
            p.grad = None  # adding into zeros would cost two more passes over the memory
        bucket.state = State.STALE if bucket.sharded else State.WAITING
        if self._stream is not None:
            bucket.update_done = self._stream.record_event()

    # ---- 5. optional: a deferred or overlapped update --------------------------------------------
    # No update can start before the last bucket has arrived, since clipping needs the norm of all
    # gradients. But forward needs new weights only when it reaches their block. So every block has
    # a hook that updates its bucket just before, and with ZeRO-1 fetches the other ranks' shards.
    #
    # When a bucket is sent and updated, by overlap_step:
    #
    #              in backward              in step()                before its next use, or flush()
    #   off        send                     receive, norm, update
    #   forward    send                     receive, norm            update
    #   backward   send, receive, update    those still on their way, as with forward
    #
    # With ZeRO-1 a rank receives its shard during backward if it has arrived by then, and updates
    # that shard alone; the others' shards are fetched before the next use. For the PREFETCH buckets
    # that forward needs first, step() starts the work of the last column before it returns. On a
    # GPU updates run on a side stream, for which forward waits.

    def expect_step(self, optimizer: Optimizer, lr: float) -> None:
        """Announce the next step() before its synced backward.

        overlap_step="backward" needs it to update buckets during backward; without it, buckets are
        updated as with "forward"."""
        if self.overlap_step == "backward":
            self._expected = optimizer, lr

    def _update_alone(self, bucket: Bucket) -> None:
        """Update a bucket in backward: nothing depends on others, no clipping and no loss scale."""
        optimizer, lr = self._expected
        found_inf = 1.0 - bucket.squared_norm.sum().isfinite().float()
        self._end_hook(bucket, Update(optimizer, lr, torch.ones_like(found_inf), found_inf))
        self._apply(bucket)

    def flush(self) -> None:
        """Make all weights current. All ranks call it before anything but a forward reads them."""
        for bucket in reversed(self.buckets):
            self._refresh(bucket)

    def _watch_forward(self) -> None:
        """Make every block, and the embedding, refresh its bucket before it runs."""
        # The hooks sit on the blocks: inside them they would be part of a block's compiled graph.
        modules = dict(self.model.named_modules())
        for bucket in self.buckets:

            def refresh(*_: object, bucket: Bucket = bucket) -> None:
                self._refresh(bucket)

            # Norm and head come behind the last block.
            if bucket.blocks == [AFTER]:
                self.model.layers[-1].register_forward_hook(refresh)
                continue
            users = bucket.blocks
            if bucket.blocks == [BEFORE]:  # the modules that own the parameters
                users = dict.fromkeys(name.rpartition(".")[0] for name in bucket.names)
            for name in users:
                module = modules.get(name, self.model)
                if isinstance(module, nn.ModuleList | nn.ModuleDict):  # is never called itself
                    module = self.model
                module.register_forward_pre_hook(refresh)

    @torch.no_grad()
    def _refresh(self, bucket: Bucket) -> None:
        """Make the bucket's weights current. Also begin to refresh all buckets that forward needs
        before it, and the PREFETCH that it needs next."""
        if self._expected and self._next == len(self.buckets):
            # Otherwise forward would use weights of which a part is updated
            text = "after backward call step() before a forward or flush()"
            raise UserError(f"ddp: overlap_step='backward': {text}")
        # Forward goes from the last index down to 0. All ranks must begin in that order, or their
        # fetches would not meet. So begin with the last bucket, since this rank's forward may have
        # skipped a block: what is current already is left alone.
        lowest = bucket.index - PREFETCH
        # When activation checkpointing runs a block again in backward, the buckets below _next have
        # left. With overlap_step="backward" and ZeRO-1 this rank may have updated one that another
        # has not: a fetch here would meet none there. (In forward _next is 0.)
        lowest = max(lowest, self._next)
        for other in reversed(self.buckets[lowest:]):
            self._begin_refresh(other)
        if bucket.state is State.STALE and bucket.work is not None:
            bucket.wait()
            bucket.state = State.WAITING
        if bucket.update_done is not None:
            torch.cuda.current_stream().wait_event(bucket.update_done)
            bucket.update_done = None

    def _begin_refresh(self, bucket: Bucket) -> None:
        """Run the bucket's deferred update; with ZeRO-1 start to fetch the other ranks' shards."""
        if bucket.state is State.READY:
            self._apply(bucket)
        if bucket.state is State.STALE and bucket.work is None:
            with self._on_side_stream():
                launch_gather(bucket, bucket.param)

    def _on_side_stream(self) -> AbstractContextManager:
        """On a GPU with overlap: run on the side stream, after all work queued so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)


# ---- 6. optional: ZeRO-1, every rank updates one shard of each bucket ----------------------------
# A reduce-scatter replaces the all-reduce: a rank receives the mean gradient of its shard, updates
# that and keeps optimizer state for it alone (arXiv:1910.02054). New weights are gathered before
# their next use. In bytes the two together are one all-reduce.


def cut_into_shards(bucket: Bucket, whole_matrices: bool, unit: int) -> None:
    """Let this rank update its shard of the bucket. Shards are equal, unless a cut has to move.

    whole_matrices: a cut within a matrix that Muon trains moves to the nearer end of it. unit: any
    other cut moves to a multiple of `unit` elements from the beginning of its parameter."""
    cuts = [0, *accumulate(bucket.shard_sizes)]
    for name, p, begin in zip(bucket.names, bucket.params, bucket.offsets, strict=True):
        end = begin + p.numel()
        multiple = p.numel() if whole_matrices and muon_trains(name) else unit
        for k, cut in enumerate(cuts):
            if begin < cut < end:
                n_units = (cut - begin + multiple // 2) // multiple  # rounded to the nearest
                cuts[k] = min(begin + n_units * multiple, end)
    bucket.shard_sizes = [end - begin for begin, end in pairwise(cuts)]
    bucket.own = cuts[ranks.rank()], cuts[ranks.rank() + 1]
    bucket.sharded = True


def launch_exchange(bucket: Bucket, flat: Tensor) -> Tensor:
    """Start to send every rank its shard of `flat`; return what this rank will receive.

    It is what each rank has in the place of this rank's shard, (ranks, shard)."""
    n, own_size = len(bucket.shard_sizes), len(own_shard(bucket, flat))
    received = flat.new_empty(n, own_size)
    to_receive, to_send = [own_size] * n, bucket.shard_sizes  # elements from and to each rank
    bucket.launch(dist.all_to_all_single, received.view(-1), flat, to_receive, to_send)
    return received


def launch_gather(bucket: Bucket, flat: Tensor) -> None:
    """Start to complete `flat`, of which each rank holds its shard."""
    n, mine = len(bucket.shard_sizes), own_shard(bucket, flat)
    if has_native_shards(bucket):
        bucket.launch(ALL_GATHER, flat, mine)
        return
    to_receive, to_send = bucket.shard_sizes, [len(mine)] * n  # elements from and to each rank
    bucket.launch(dist.all_to_all_single, flat, mine.repeat(n), to_receive, to_send)


def own_shard(bucket: Bucket, flat: Tensor) -> Tensor:
    """Return this rank's shard of `flat`, a view."""
    return flat.split(bucket.shard_sizes)[ranks.rank()]


def has_native_shards(bucket: Bucket) -> bool:
    """Return whether NCCL can scatter and gather in place: it wants shards of equal size."""
    return bucket.param.is_cuda and len(set(bucket.shard_sizes)) == 1


# ---- 7. optional: the same bits on any number of ranks -------------------------------------------
# The last bits of a sum depend on the order of its terms. Here the micro-batches of a step are
# added as one binary tree over their number, ((g0 + g1) + (g2 + g3)) + ... A rank computes
# consecutive ones, so it adds a subtree of its own (`add`) and the hook adds those of the ranks.

# Elements of a parameter in a piece. One rank adds up the squares of a piece, so no shard cuts it.
# A multiple of 128, because AdamW's kernel rounds the last few elements of a tensor in another way.
PIECE = 2**20


class InTree:
    """The sum over the ranks in a fixed order. The trainer divides the loss, so it is the mean.

    Numbers of ranks and of micro-steps must be powers of two."""

    compress = "none"

    def __init__(self) -> None:
        # {parameter: (micro-batches, sum of their gradients) of every subtree without a neighbour}
        self.waiting: dict[nn.Parameter, list[tuple[int, Tensor]]] = {}

    def add(self, p: nn.Parameter, grad: Tensor, is_last: bool) -> Tensor:
        """Add a micro-batch's gradient of p; return the sum of the largest subtree it completes.

        is_last: it is the last of the step on this rank."""
        # Subtrees of 1, 2, 4, .. micro-batches wait for a neighbour of their size, as ones in a
        # binary counter wait for a carry.
        size, waiting = 1, self.waiting.setdefault(p, [])
        while waiting and waiting[-1][0] == size:
            grad = waiting.pop()[1].add_(grad)
            size *= 2
        if not is_last:
            waiting.append((size, grad))
        assert not (is_last and waiting), f"{size=}: micro-steps must be a power of two"
        return grad

    def __call__(self, bucket: Bucket) -> Iterator[State]:
        """Add up `bucket` over the ranks; with ZeRO-1 this rank receives its shard alone."""
        if dist.is_initialized():
            terms = launch_exchange(bucket, bucket.grad)
            yield State.IN_FLIGHT if bucket.sharded else State.HALFWAY
            while len(terms) > 1:
                terms = terms[0::2] + terms[1::2]  # neighbours, which are subtrees of one size
            own_shard(bucket, bucket.grad).copy_(terms[0])
            del terms  # as large as the bucket, and the generator lives on
            if not bucket.sharded:
                launch_gather(bucket, bucket.grad)
                yield State.IN_FLIGHT
        bucket.squared_norm = squares_of_pieces(bucket)
        yield State.REDUCED


def squares_of_pieces(bucket: Bucket) -> Tensor:
    """Return the sum of squares of each piece of the gradient, 0 for those of other shards."""
    squares = []
    for p, offset in zip(bucket.params, bucket.offsets, strict=True):
        for begin in range(offset, offset + p.numel(), PIECE):
            piece = bucket.grad[begin : min(begin + PIECE, offset + p.numel())]
            is_mine = bucket.own[0] <= begin < bucket.own[1]
            squares.append(sum_of_squares(piece if is_mine else piece[:0]))
    return torch.stack(squares)


# ---- checks --------------------------------------------------------------------------------------


def check_options(
    compress: str, overlap_step: str, zero1: bool, clip: float = 0.0, scaled: bool = False
) -> None:
    """Raise UserError for options that cannot be combined. scaled: float16 with a GradScaler."""
    is_known = overlap_step in ("off", "forward", "backward")
    refuse(
        not is_known, f"overlap_step must be one of off, forward, backward, got {overlap_step!r}"
    )
    text = f"zero1=True uses reduce-scatter, but {compress} needs an all-reduce"
    refuse(zero1 and compress not in WIRES, f"{text}; use one of the two")
    cannot = ""
    if compress == "powersgd":
        cannot = "keep PowerSGD's errors if a step is skipped"
    elif clip > 0:
        cannot = "clip to the global norm (grad_clip)"
    elif scaled:
        cannot = "skip a step that overflows (float16)"
    text = "overlap_step='backward' updates a bucket before the others came, so it cannot"
    refuse(overlap_step == "backward" and cannot, f"{text} {cannot}; use 'forward'")


def check_same_model(model: nn.Module, settings: str) -> None:
    """Raise UserError on all ranks unless they hold the same model and the same settings."""
    # Before the first collective of a bucket: there a mismatch hangs or aborts.
    # The order of the parameters counts too: it is the order in the buckets.
    mine = {"DDP": settings}
    for i, (name, p) in enumerate(model.named_parameters()):
        shape = tuple(p.shape)
        mine[f"parameter {i}"] = f"{name} {shape} {p.dtype} requires_grad={p.requires_grad}"
    for name, b in model.named_buffers():
        mine[f"buffer {name}"] = f"{tuple(b.shape)} {b.dtype}"
    ranks.check_equal(mine)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the trainable parameters. Raise UserError unless there is one."""
    devices = list({p.device for p in model.parameters() if p.requires_grad})
    if len(devices) != 1:
        text = "the model needs trainable parameters, all on one device; found them on"
        raise UserError(f"ddp: {text} {sorted(map(str, devices))}")
    return devices[0]


def unscale(norm: Tensor, scaler: torch.amp.GradScaler) -> None:
    """Divide the norm by the loss scale, in place."""
    # To the scaler it is the only gradient of an optimizer, so update() grows or backs off as if it
    # had checked all gradients.
    carrier = nn.Parameter(torch.zeros_like(norm))
    carrier.grad = norm
    scaler.unscale_(torch.optim.SGD([carrier]))


def moved(names: list[str]) -> str:
    """Return the text for parameters that are no longer views of their bucket."""
    return (
        f"{listed(names)} left the flat buffer; call model.to() and load_state_dict(assign=True) "
        "before DDP(model)"
    )
