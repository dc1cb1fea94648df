"""Data-parallel training by hand: flat buffers, gradient hooks, ordered buckets, a deferred step, PowerSGD, ZeRO-1.

Every rank runs the same model on different data, and every rank needs the mean of all their gradients. Five ideas make
that fast:

1. Flat buffers. All parameters of one dtype are views of one flat tensor, and so are all gradients: a slice of the
   buffer is sent without copying, and the optimizer sees a few long tensors.
2. Hooks. A bucket is a slice that holds a few consecutive blocks. A hook on each parameter fires when its gradient is
   final; a complete bucket is sent at once, while backward still computes the blocks before it.
3. One order. The last block's gradients are ready first, so bucket 0 is the head and the last bucket the embedding.
   Buckets are launched strictly by index: ranks that issue collectives in different orders hang or crash.
4. A deferred step. Clipping needs the norm of all gradients, so no update can start before the last bucket arrives.
   But a block's new weights are needed only by its next forward: update each block just before its next use.
5. A pipeline. PowerSGD (groundup/train/powersgd.py) sends two thin factors instead of a matrix; the second is computed
   from the mean of the first. While a bucket's first factor travels, the bucket before it sends its second.

DDP is not a wrapper around the model. A script calls the plain `model(...)`:

    ddp = DDP(model)                                            # after ranks.init(): all ranks hold rank 0's weights
    for micro_step in range(accum_steps):
        ddp.sync = micro_step == accum_steps - 1                # before that: add up locally, send nothing
        loss = model(x, y) * (world.world_size / n_tokens)      # sum of token losses; the ranks are averaged below
        loss.backward()
    norm = ddp.step(optimizer, lr=lr, clip=1.0)                 # wait, norm, clip; update now or defer the update
    ddp.flush()                                                 # before anything but model(...) reads the weights

Without a process group the same code sends nothing. docs/ddp.md goes through the ideas one by one, with timelines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from groundup.errors import UserError, listed
from groundup.train import ranks
from groundup.train.ranks import named_errors, world_size

COMPRESS = ("none", "fp16", "bf16", "powersgd")
MIB = 2**20
PREFETCH = 2  # buckets that are updated, or fetched from other ranks, ahead of forward
ALIGNMENT = 128  # elements; buckets are multiples of world_size * ALIGNMENT, so that equal shards start SIMD-aligned
BEFORE, AFTER = "before the blocks", "after the blocks"


@dataclass(eq=False)
class Bucket:
    """Parameters that are reduced and updated together: consecutive blocks, one dtype, one slice of the flat buffers.

    Equal shapes are neighbours, so that k matrices of shape (n, m) are also one (k, n, m) view of `param` or `grad`.
    """

    index: int
    blocks: list[str]  # names of the blocks it holds, or BEFORE or AFTER
    names: list[str]
    params: list[nn.Parameter]
    offsets: list[int]  # where each parameter starts, in elements
    param: Tensor  # (padded,) every p.data is a view of it; the padding stays zero
    grad: Tensor  # (padded,) after a backward every p.grad is a view of it
    shard_sizes: list[int]  # elements that each rank updates; [padded] if not sharded
    shard: tuple[int, int]  # first and one-past-last element that this rank updates
    sharded: bool  # ZeRO-1
    step: int = 0  # finished steps when its hook was started
    missing: int = 0  # parameters whose gradient has not arrived in the synced backward
    hook: Iterator | None = None  # the running communication hook
    more: bool = False  # the hook has another collective to launch
    square: Tensor | None = None  # squared norm of the mean gradient in this rank's shard, once known
    flight: tuple[str, dist.Work] | None = None  # name of the collective under way, for errors, and its handle
    update: Callable[[], None] | None = None  # the deferred update
    stale: bool = False  # ZeRO-1: the other ranks' shards of `param` must still be fetched
    updated: torch.cuda.Event | None = None  # on a GPU: set when the update is done

    def view(self, flat: Tensor, i: int) -> Tensor:
        """The slot of params[i] in `flat` (`param`, `grad` or one laid out like them), in the parameter's shape."""
        p = self.params[i]
        return flat[self.offsets[i] : self.offsets[i] + p.numel()].view(p.shape)

    def holds(self, t: Tensor | None, flat: Tensor, i: int) -> bool:
        """True if `t` lies in the slot of params[i] in `flat`. Compares addresses: cheap enough for every hook."""
        return t is not None and t.data_ptr() == flat.data_ptr() + self.offsets[i] * flat.element_size()

    def launch(self, collective: Callable, *args: Any) -> None:
        """Start a collective and return at once; do nothing without a process group."""
        if dist.is_initialized():
            what = f"step {self.step + 1}: {collective.__name__} of bucket {self.index} (first: {self.names[0]})"
            self.flight = what, ranks.issue(what, partial(collective, async_op=True), *args)

    def wait(self) -> None:
        """Wait until the collective is done. gloo blocks here; with NCCL only the GPU's stream waits."""
        if self.flight is not None:
            with named_errors(self.flight[0]):
                self.flight[1].wait()
            self.flight = None


class Optimizer(Protocol):
    def update(self, bucket: Bucket, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Step bucket.shard of bucket.param with gradient bucket.grad / grad_scale; do nothing if found_inf is 1."""


class DDP:
    """Average the gradients of all ranks during backward and drive the optimizer, so that replicas stay equal.

    Set `sync` to whether the next backward is the last one of the step. `found_inf` is 1.0 (0-d float32) if the last
    step was skipped because its gradient norm was not finite, else 0.0.
    """

    def __init__(
        self, model: nn.Module, bucket_mb: float = 0.0, hook: Callable[[Bucket], Iterator] | None = None,
        overlap_step: str = "off", zero1: bool = False, keep_whole: Callable[[str], bool] = lambda name: False,
    ) -> None:  # fmt: skip
        """Move the weights into flat buffers and copy rank 0's weights and buffers to all ranks.

        Call it after moving the model to its device and dtype and after freezing parameters. Raise UserError on all
        ranks if they hold different models.
        bucket_mb: largest size to which blocks are merged. 0 takes a twelfth of the model between 1 and 25 MiB: enough
            buckets to start early, each large enough to hide the latency of its collective.
        hook: how gradients travel (see "communication hooks"); None is Average().
        overlap_step: when a bucket is updated. "off": in step(); "forward": just before its next forward; "backward":
            as soon as its gradient has arrived (see expect_step).
        zero1: each rank updates one shard of every bucket and keeps optimizer state for that alone (ZeRO stage 1,
            arXiv:1910.02054). Parameters whose name makes `keep_whole` true are not divided.
        """
        hook = hook or Average()
        if reason := conflict(getattr(hook, "compress", "this hook"), overlap_step, zero1):
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
            ranks.broadcast(t)
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
        """For GradScaler.unscale_. Made late: torch's optimizers import torch._dynamo, which doubles the start-up."""
        return torch.optim.SGD([self._norm_param])

    def _start_step(self) -> None:
        """Expect one gradient per parameter; bucket 0 is launched first."""
        self._arrived: set[nn.Parameter] = set()
        self._next = 0  # index of the bucket to launch next
        self._expected: tuple[Optimizer, float] | None = None  # optimizer and lr of updates during backward
        for bucket in self.buckets:
            bucket.missing, bucket.square = len(bucket.params), None

    # -- backward: gradients arrive, buckets leave

    def _on_grad(self, p: nn.Parameter) -> None:
        """Autograd calls this when p.grad is final for this backward. Waiting here would stop backward."""
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
            raise UserError(f"ddp: {moved([bucket.names[i]])}")
        grad, slot = p.grad.detach(), bucket.view(bucket.grad, i)
        if self.sync and self.world_size > 1:  # the sum over ranks is then the mean; float16 could overflow in a sum
            torch.div(grad, self.world_size, out=slot)
        elif not bucket.holds(grad, bucket.grad, i):  # the first micro-step: autograd's own tensor
            slot.copy_(grad)
        p.grad = slot
        if not self.sync:
            return  # accumulation: autograd keeps adding into the view, nothing is sent
        self._arrived.add(p)
        bucket.missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._launch_next()

    @torch.no_grad()
    def _launch_next(self) -> None:
        """Launch the next bucket, then advance the earlier ones: P0, P1 Q0, P2 Q1, ... in the same order everywhere."""
        bucket = self.buckets[self._next]
        self._next += 1
        bucket.step, bucket.hook = self.n_steps, self.hook(bucket)
        self._resume_hook(bucket)
        self._launch_second_collectives(before=bucket.index)
        for earlier in self.buckets[: bucket.index] if self._expected or bucket.sharded else []:
            if earlier.flight and not earlier.more and earlier.flight[1].is_completed():
                self._finish_bucket(earlier)  # launches nothing, so it may depend on timing

    def _launch_second_collectives(self, before: int) -> bool:
        """Launch the next collective of every earlier bucket that has one; return False if none had."""
        waiting = [bucket for bucket in self.buckets[:before] if bucket.more]
        for bucket in reversed(waiting):
            self._resume_hook(bucket)
        return bool(waiting)

    def _resume_hook(self, bucket: Bucket) -> None:
        """Run the hook up to its next collective, or, after the last one, to the norm."""
        bucket.wait()
        with torch.autocast(self.device.type, enabled=False):
            value = next(bucket.hook)
        bucket.more = value is True
        if isinstance(value, Tensor):
            bucket.square = value

    def _finish_bucket(self, bucket: Bucket) -> None:
        """Compute the bucket's norm after its last collective, and update it if nothing else must be known."""
        with self._on_side_stream() if self._expected else nullcontext():
            self._resume_hook(bucket)
            if self._expected:
                optimizer, lr = self._expected
                found_inf = 1.0 - bucket.square.isfinite().float()
                end_hook(bucket.hook, found_inf)
                self._update(bucket, optimizer, lr, torch.ones_like(found_inf), found_inf)

    # -- step: wait for the rest, then update or defer

    def expect_step(self, optimizer: Optimizer, lr: float) -> None:
        """Call before a synced backward: with overlap_step="backward" each bucket is then updated during backward with
        this optimizer and lr. Without the call, buckets are updated as with "forward"."""
        if self.overlap_step == "backward":
            self._expected = optimizer, lr

    @torch.no_grad()
    def step(
        self, optimizer: Optimizer, lr: float, clip: float = 0.0, scaler: torch.amp.GradScaler | None = None
    ) -> Tensor:
        """Finish the reduction, clip to global norm `clip` (0 = off), update now or later, drop the gradients.

        Return the global norm before clipping, without the loss scale: 0-d float32 on the model's device. All ranks
        share the gradients and so the norm: if it is not finite, all of them skip the update. Does not wait for the
        GPU, except with overlap_step="backward". Raise UserError on all ranks if a gradient is missing on any.
        """
        if reason := conflict("", self.overlap_step, False, clip, scaler is not None and scaler.is_enabled()):
            raise UserError(f"ddp: {reason}")
        if self._expected not in (None, (optimizer, lr)):
            raise UserError("ddp: step() was called with another optimizer or lr than expect_step()")
        norm = self._finish_reduction()
        grad_scale = torch.ones((), device=self.device)
        if scaler is not None and scaler.is_enabled():
            grad_scale = scaler.scale(grad_scale)
            # The scaler sees the norm as its only gradient: it unscales and checks that, and update() then grows or
            # backs off exactly as if it had looked at all gradients.
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
                end_hook(bucket.hook, self.found_inf)
                bucket.update = partial(self._update, bucket, optimizer, lr, grad_scale, self.found_inf)
        if scaler is not None:
            scaler.update()
        self.n_steps += 1
        self._start_step()
        ranks.post_finished_steps(self.n_steps)
        if self.overlap_step == "off":
            for bucket in self.buckets:
                bucket.update()
        for bucket in reversed(self.buckets[-PREFETCH:]):
            self._begin_refresh(bucket)
        return norm

    def _finish_reduction(self) -> Tensor:
        """Wait for all buckets and return the global norm; each bucket's norm is taken while later ones travel."""
        for bucket in self.buckets[self._next :]:
            self._refresh(bucket, ahead=0)  # forward did not use it: its deferred update still needs the old gradient
        while self._next < len(self.buckets):
            self._launch_next()  # incomplete: an error below, but the other ranks wait for this collective
        while self._launch_second_collectives(before=len(self.buckets)):
            pass
        check = ranks.start_agreement(self._problem(), f"step {self.n_steps + 1}")  # travels during the loop below
        for bucket in self.buckets:
            if bucket.square is None:
                self._finish_bucket(bucket)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        square = torch.stack([bucket.square for bucket in self.buckets]).sum()
        if self.buckets[0].sharded:
            ranks.all_reduce_sum(square, f"step {self.n_steps + 1}: all_reduce of the squared norm")
        check()
        return square.sqrt()

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
        kept = [] if self._expected else slots  # an update during backward has dropped its gradients
        changed = [name for name, bucket, i in kept if not bucket.holds(bucket.params[i].grad, bucket.grad, i)]
        return f".grad was replaced between backward and step for {listed(changed)}" if changed else ""

    def _update(self, bucket: Bucket, optimizer: Optimizer, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Update this rank's shard of the bucket and drop the gradients."""
        bucket.update = None
        with torch.autocast(self.device.type, enabled=False):  # the forward that triggers the update may be under it
            optimizer.update(bucket, lr=lr, grad_scale=grad_scale, found_inf=found_inf)
        for p in bucket.params:
            p.grad = None  # adding into zeros would cost two more passes over the memory
        bucket.stale = bucket.sharded
        if self._stream is not None:
            bucket.updated = self._stream.record_event()

    # -- forward: deferred updates, and with ZeRO-1 the other ranks' shards

    def _watch_forward(self) -> None:
        """Make every block, and the embedding, refresh its bucket before it runs. The hooks sit on the blocks: hooks
        on modules inside them would become part of the block's compiled graph."""
        modules = dict(self.model.named_modules())
        for bucket in self.buckets:
            owners = {name.rpartition(".")[0] for name in bucket.names if bucket.blocks == [BEFORE]}
            for block in owners or bucket.blocks:
                module = modules.get(block, self.model)
                if block == AFTER:
                    self.model.layers[-1].register_forward_hook(lambda *_, bucket=bucket: self._refresh(bucket))
                else:
                    module = self.model if isinstance(module, nn.ModuleList | nn.ModuleDict) else module  # never called
                    module.register_forward_pre_hook(lambda *_, bucket=bucket: self._refresh(bucket))

    @torch.no_grad()
    def _refresh(self, bucket: Bucket, ahead: int = PREFETCH) -> None:
        """Make the bucket's parameters current, and start on those that forward needs next, from the last index down on
        every rank. A recomputing forward within backward leaves the buckets that backward has launched alone."""
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
        """Run the bucket's deferred update; with ZeRO-1 start to fetch the other ranks' shards."""
        if bucket.update is not None or (bucket.stale and bucket.flight is None):
            with self._on_side_stream():
                if bucket.update is not None:
                    bucket.update()
                if bucket.stale:
                    launch_gather(bucket, bucket.param)

    def _on_side_stream(self) -> AbstractContextManager:
        """On a GPU with an overlapped step: run on the side stream, after all work queued on the main one so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def flush(self) -> None:
        """Make all parameters current. Call on all ranks before anything but a forward reads them."""
        for bucket in reversed(self.buckets):
            self._refresh(bucket)

    def gather(self, bucket: Bucket, flat: Tensor) -> None:
        """Complete `flat`, laid out as bucket.param, of which this rank has filled its shard. Call on all ranks."""
        if bucket.update is not None or bucket.flight is not None:
            raise UserError("ddp: call flush() before the optimizer's state is gathered")
        if bucket.sharded:
            launch_gather(bucket, flat)
            bucket.wait()


def conflict(compress: str, overlap_step: str, zero1: bool, clip: float = 0.0, scaled: bool = False) -> str:
    """Return why these options cannot be combined, or "". `scaled`: float16 with a GradScaler."""
    if overlap_step not in ("off", "forward", "backward"):
        return f"overlap_step must be one of off, forward, backward, got {overlap_step!r}"
    if zero1 and compress not in ("none", "fp16", "bf16"):
        return f"zero1=True brings a rank its shard of the gradient, {compress} all of it; use one of the two"
    if overlap_step == "backward" and (clip > 0 or scaled or compress == "powersgd"):
        cannot = "clip to the global norm (grad_clip)" if clip > 0 else "skip a step that overflows (float16)"
        cannot = "keep PowerSGD's errors if a step is skipped" if compress == "powersgd" else cannot
        return f"overlap_step='backward' updates a bucket before the others came, so it cannot {cannot}; use 'forward'"
    return ""


def moved(names: list[str]) -> str:
    return f"{listed(names)} left the flat buffer; call model.to() and load_state_dict(assign=True) before DDP(model)"


# ---- the layout of the buckets --------------------------------------------------------------------------------------


def make_buckets(
    model: nn.Module, bucket_bytes: float, world_size: int, shard_of: int = -1,
    keep_whole: Callable[[str], bool] = lambda name: False,
) -> list[Bucket]:  # fmt: skip
    """Allocate the flat buffers, move the trainable parameters of `model` into them and return the buckets in order.

    shard_of: the rank whose ZeRO-1 shards are marked; -1 = not sharded.
    """
    groups = [
        (dtype, blocks, [member for member in group if member[1].dtype == dtype])
        for blocks, group in plan_buckets(model, bucket_bytes)
        for dtype in dict.fromkeys(p.dtype for _, p in group)
    ]
    multiple = ALIGNMENT * world_size
    sizes = [-(-sum(p.numel() for _, p in group) // multiple) * multiple for _, _, group in groups]
    device, flats = next(p.device for p in model.parameters() if p.requires_grad), {}
    for dtype in {dtype for dtype, _, _ in groups}:
        total = sum(size for group, size in zip(groups, sizes, strict=True) if group[0] == dtype)
        flats[dtype] = [torch.zeros(total, dtype=dtype, device=device) for _ in ("param", "grad")]
    buckets = []
    for (dtype, blocks, group), size in zip(groups, sizes, strict=True):
        param, grad = (flat[:size] for flat in flats[dtype])
        flats[dtype] = [flat[size:] for flat in flats[dtype]]
        group.sort(key=lambda member: (-member[1].ndim, tuple(member[1].shape)))  # matrices first, equal ones together
        names, members = (list(column) for column in zip(*group, strict=True))
        ends = list(accumulate(p.numel() for p in members))
        whole = [span for name, span in zip(names, pairwise([0, *ends]), strict=True) if keep_whole(name)]
        cuts = cut_shards(size, 1 if shard_of < 0 else world_size, whole)
        shard = cuts[max(shard_of, 0)], cuts[max(shard_of, 0) + 1]
        shard_sizes, sharded = [end - begin for begin, end in pairwise(cuts)], shard_of >= 0
        bucket = Bucket(len(buckets), blocks, names, members, [0, *ends[:-1]], param, grad, shard_sizes, shard, sharded)
        for i, p in enumerate(members):
            bucket.view(param, i).copy_(p.detach())
            p.data = bucket.view(param, i)  # the Parameter object stays, and with it ties, names and references
            p.grad = bucket.view(grad, i)
        buckets.append(bucket)
    return buckets


def plan_buckets(model: nn.Module, bucket_bytes: float) -> list[tuple[list[str], list[tuple[str, nn.Parameter]]]]:
    """Return (blocks, named trainable parameters) for each bucket, in the order in which backward finishes them.

    Buckets end where blocks end (`model.layers`, else the top-level children), so that a block's weights are never
    half updated. The parameters before and after the blocks (embedding; final norm and head) get buckets of their own.
    Tied weights count once, where they are registered first: at the embedding, whose gradient is final last.
    """
    has_blocks = isinstance(getattr(model, "layers", None), nn.ModuleList)
    blocks: dict[str, list[tuple[str, nn.Parameter]]] = {}  # in the order of registration, which is forward's
    edge = BEFORE
    for name, p in model.named_parameters():
        parts = name.split(".")
        block = parts[0]
        if has_blocks and block == "layers":
            block, edge = f"layers.{parts[1]}", AFTER
        elif has_blocks:
            block = edge
        if p.requires_grad:
            blocks.setdefault(block, []).append((name, p))
    groups, room = [], 0
    for block, members in reversed(blocks.items()):
        size = sum(p.numel() * p.element_size() for _, p in members)
        alone = block in (BEFORE, AFTER)
        if alone or size > room:
            groups.append(([], []))
            room = bucket_bytes
        groups[-1][0].append(block)
        groups[-1][1].extend(members)
        room = 0 if alone else room - size
    return groups


def cut_shards(size: int, shards: int, whole: list[tuple[int, int]]) -> list[int]:
    """Where each shard of a bucket of `size` elements begins, and the end. Shards are equal, except that a cut inside
    one of the spans `whole` moves to the nearer end of that span."""
    cuts = [size * r // shards for r in range(shards + 1)]
    for begin, end in whole:
        cuts = [cut if not begin < cut < end else begin if cut - begin < end - cut else end for cut in cuts]
    return cuts


def launch_scatter(bucket: Bucket, flat: Tensor) -> Tensor:
    """Start to send every rank its shard of `flat`. Return the tensor that will hold this rank's: the sum over ranks
    (shard,) or, over gloo, whose reduce_scatter moves as many bytes as a whole all-reduce, the terms (ranks, shard)."""
    begin, end = bucket.shard
    if has_native_shards(bucket, flat):
        bucket.launch(getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor), flat[begin:end], flat)
        return flat[begin:end]
    received = flat.new_empty(len(bucket.shard_sizes), end - begin)
    received_sizes = [end - begin] * len(bucket.shard_sizes)
    bucket.launch(dist.all_to_all_single, received.view(-1), flat, received_sizes, bucket.shard_sizes)
    return received


def launch_gather(bucket: Bucket, flat: Tensor) -> None:
    """Start to complete `flat`, laid out as bucket.param, of which each rank holds its shard."""
    mine, n = flat[bucket.shard[0] : bucket.shard[1]], len(bucket.shard_sizes)
    if has_native_shards(bucket, flat):
        bucket.launch(getattr(dist, "all_gather_single", dist.all_gather_into_tensor), flat, mine)
    else:
        bucket.launch(dist.all_to_all_single, flat, mine.repeat(n), bucket.shard_sizes, [mine.numel()] * n)


def has_native_shards(bucket: Bucket, flat: Tensor) -> bool:
    """True for NCCL, which scatters and gathers shards of equal size in place."""
    return flat.is_cuda and len(set(bucket.shard_sizes)) == 1


# ---- communication hooks --------------------------------------------------------------------------------------------
# hook(bucket) is called when bucket.grad holds this rank's gradient / world_size: the sum over the ranks is the mean.
# It is a generator, because backward should not wait: it launches a collective and yields, and is resumed when that is
# done. With ZeRO-1 only Average is allowed. It yields
#     True                 another collective depends on this one: resume me as soon as the next bucket is launched
#     False                this was the last collective
#     a 0-d tensor         the squared norm of the mean gradient. Resumed with found_inf, it leaves the mean in
#                          bucket.grad; if found_inf is 1 the step is skipped, and its own state must not change.


def end_hook(hook: Iterator, found_inf: Tensor) -> None:
    """Let a hook write the mean into bucket.grad and end."""
    try:
        hook.send(found_inf)
    except StopIteration:
        return
    raise UserError("ddp: a communication hook must end after the norm")


class Average:
    """The plain mean over the ranks. `wire` is the dtype in which gradients travel: float16 or bfloat16 halve the
    bytes, None keeps theirs. With ZeRO-1 a rank receives the mean of its shard alone."""

    compress = "none"

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
        if received.ndim == 2:  # every rank's term of this shard, added in the order of the ranks
            torch.sum(received, dim=0, dtype=mine.dtype, out=mine)
        elif self.wire is not None:
            mine.copy_(received)
        if received.is_cuda:
            received.record_stream(torch.cuda.current_stream())  # the side stream if updates run in backward
        del sent, received  # as large as the bucket, and the generator lives on
        yield sum_of_squares(mine)


def sum_of_squares(flat: Tensor) -> Tensor:
    """Sum of squares, 0-d float32, computed row by row: on a CPU vector_norm adds one element after the other, and the
    norm of 6.5M elements is 2e-4 off; this is 1e-8 off in the same time (measured)."""
    dtype = torch.promote_types(flat.dtype, torch.float32)
    rows, rest = flat[: flat.numel() // ALIGNMENT * ALIGNMENT], flat[flat.numel() // ALIGNMENT * ALIGNMENT :]
    norms = torch.linalg.vector_norm(rows.view(-1, ALIGNMENT), dim=1, dtype=dtype)
    return (norms.square().sum() + rest.to(dtype).square().sum()).float()
