"""Data-parallel training by hand: flat buffers, gradient hooks, buckets that are all-reduced in order during backward.

torchrun --standalone --nproc_per_node=2 pretrain.py config/debug.py       # 2 processes on a CPU, gloo
torchrun --standalone --nproc_per_node=4 pretrain.py config/small.py       # 4 GPUs, NCCL

Every rank runs the same model on other data, and all ranks need the mean of their gradients. Three ideas make it fast:

1. Flat buffers. All parameters of one dtype are views of one flat tensor, all gradients are views of another. Autograd
   adds into the gradient views in place, so that a slice of the buffer can be sent with no copy in or out.
2. Buckets. A bucket is a slice that holds a few consecutive blocks. A hook on each parameter tells when its gradient is
   final; a complete bucket starts its all-reduce at once, while backward still computes the blocks before it.
3. One order. The last block's gradients are ready first, so bucket 0 is the head and the last one is the embedding.
   Buckets are launched strictly by index: ranks that issue collectives in different orders hang or crash.

DDP is not a wrapper around the model. A script calls the plain `model(...)`:

    world = ddp.init(device_type)
    parallel = ddp.DDP(model)                                   # from here on all ranks hold rank 0's weights
    for micro_step in range(accum_steps):
        parallel.sync = micro_step == accum_steps - 1           # before that: add up locally, send nothing
        loss = model(x, y) * (world.world_size / n_tokens)      # sum of token losses; the ranks are averaged below
        loss.backward()
    norm = parallel.step(optimizer, lr=lr, clip=1.0)            # wait, norm, clip, update, zero
    ddp.close()

Collectives run whenever a process group exists (also one of a single process under torchrun) and never otherwise.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any, Protocol

import torch
import torch.distributed as dist

# Its functions take the process group of the moment as default arguments, for good. torch._dynamo imports it at some
# point; after init() it would keep the group and its threads alive until the interpreter shuts down, and a thread that
# then drops a tensor aborts the process ("terminate called without an active exception").
import torch.distributed.nn.functional  # noqa: F401
from torch import Tensor, nn

Named = tuple[str, nn.Parameter]
MIB = 2**20
ALIGNMENT = 128  # elements; buckets are multiples of world_size * ALIGNMENT, so that equal shares start SIMD-aligned


class DDPError(RuntimeError):
    """Ranks that disagree, a lost rank, or a use that would give wrong gradients; printed as one line."""

    one_line = True


# ---- process group and rank helpers -------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """Who this process is: `rank` of `world_size` in all, `local_rank` on this machine (= the index of its GPU)."""

    rank: int
    local_rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """True on the one process that prints and writes files."""
        return self.rank == 0


def init(device_type: str = "cpu", timeout_s: float = 300) -> World:
    """Join the process group that torchrun describes in the environment; alone and without a group if there is none.

    A collective that waits longer than `timeout_s` for another rank fails. With `device_type` "cuda" this process takes
    GPU number LOCAL_RANK, CUDA tensors travel over NCCL, and CPU tensors (flags, counts) still over gloo.
    """
    if "RANK" not in os.environ:
        return World(rank=0, local_rank=0, world_size=1)
    absent = [key for key in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if key not in os.environ]
    if absent:
        raise DDPError(f"ddp: RANK is set in the environment but {', '.join(absent)} is not; start with torchrun")
    world = World(*(int(os.environ[key]) for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))
    backend, device = "gloo", None
    if device_type == "cuda":
        if world.local_rank >= torch.cuda.device_count():
            raise DDPError(
                f"ddp: local rank {world.local_rank} has no GPU, this machine has {torch.cuda.device_count()}; "
                "lower --nproc_per_node"
            )
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
    with _named_errors("init_process_group", world.rank):
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), device_id=device)
    return world


def close() -> None:
    """Leave the process group once all ranks have come here. Only after success: others may not come after an error."""
    if dist.is_initialized():
        barrier()
        dist.destroy_process_group()


def barrier() -> None:
    """Return when all ranks have called it."""
    any_rank(False)


def all_reduce_sum(t: Tensor) -> Tensor:
    """Add `t` up over the ranks, in place; returns it."""
    return _all_reduce(t, "all_reduce_sum")


def any_rank(flag: bool, operation: str = "any_rank") -> bool:
    """True on all ranks if `flag` is true on at least one; `operation` is what an error calls it.

    A CPU tensor over gloo, so that no GPU has to be waited for.
    """
    return _all_reduce(torch.tensor(int(flag)), operation).item() > 0


def gather_objects(value: Any) -> list[Any]:
    """Every rank's `value` (anything that pickles), in the order of the ranks, on all ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    with _named_errors("gather_objects"):
        dist.all_gather_object(values, value)
    return values


def broadcast(t: Tensor) -> Tensor:
    """Overwrite `t` with rank 0's, in place; returns it."""
    if dist.is_initialized():
        with _named_errors("broadcast"):
            dist.broadcast(t, src=0)
    return t


def _all_reduce(t: Tensor, operation: str) -> Tensor:
    if dist.is_initialized():
        with _named_errors(operation):
            dist.all_reduce(t)
    return t


@contextmanager
def _named_errors(operation: str, rank: int | None = None) -> Iterator[None]:
    """Turn the backend's error for a lost or silent rank into one line that says who was doing what."""
    try:
        yield
    except RuntimeError as error:
        rank = dist.get_rank() if rank is None else rank
        reason = str(error).strip().splitlines()[0]
        raise DDPError(
            f"ddp: rank {rank}: {operation} failed; another rank has died or is stuck, look for its error ({reason})"
        ) from error


# ---- buckets ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Bucket:
    """Parameters that are reduced and updated together: consecutive blocks, one dtype, one slice of the flat buffers.

    Equal shapes are neighbours, so that k matrices of shape (n, m) are also one (k, n, m) view of `param` or `grad`.
    """

    index: int
    names: list[str]
    params: list[nn.Parameter]
    offsets: list[int]  # where each parameter starts, in elements
    param: Tensor  # (padded,) every p.data is a view of it; the padding stays zero
    grad: Tensor  # (padded,) every p.grad is a view of it
    missing: int = 0  # parameters whose gradient has not arrived in this step's synced backward
    work: dist.Work | None = None  # the all-reduce in flight

    def view(self, flat: Tensor, i: int) -> Tensor:
        """The slot of params[i] in `flat`, which is `param`, `grad` or a tensor of the same layout, in its shape."""
        p = self.params[i]
        return flat[self.offsets[i] : self.offsets[i] + p.numel()].view(p.shape)

    def holds(self, t: Tensor | None, flat: Tensor, i: int) -> bool:
        """True if `t` lies in the slot of params[i] in `flat` (compared by address: cheap enough for every hook)."""
        return t is not None and t.data_ptr() == flat.data_ptr() + self.offsets[i] * flat.element_size()


def make_buckets(model: nn.Module, bucket_bytes: float, world_size: int) -> list[Bucket]:
    """Allocate the flat buffers, move the trainable parameters of `model` into them and return the buckets in order."""
    groups = [
        [member for member in group if member[1].dtype == dtype]
        for group in plan_buckets(model, bucket_bytes)
        for dtype in dict.fromkeys(p.dtype for _, p in group)
    ]
    multiple = world_size * ALIGNMENT
    sizes = [-(-sum(p.numel() for _, p in group) // multiple) * multiple for group in groups]
    params = split_flat(groups, sizes)
    grads = split_flat(groups, sizes)
    return [fill_bucket(i, group, params[i], grads[i]) for i, group in enumerate(groups)]


def plan_buckets(model: nn.Module, bucket_bytes: float) -> list[list[Named]]:
    """Named trainable parameters by bucket, in the order in which backward finishes them.

    Buckets end where blocks end (`model.layers`, else the top-level children), so that a block's weights are never
    half updated. What stands before and after the blocks (embedding; final norm and head) has buckets of its own. Tied
    weights count once, where they are registered first: at the embedding, whose gradient is the last to be final.
    """
    has_blocks = isinstance(getattr(model, "layers", None), nn.ModuleList)
    units: dict[str, list[Named]] = {}  # in the order of registration, which is forward's
    edge = "before blocks"
    for name, p in model.named_parameters():
        parts = name.split(".")
        unit = parts[0]
        if has_blocks and unit == "layers":
            unit, edge = f"layers.{parts[1]}", "after blocks"
        elif has_blocks:
            unit = edge
        if p.requires_grad:
            units.setdefault(unit, []).append((name, p))
    groups, room = [], 0
    for unit, members in reversed(units.items()):
        size = sum(p.numel() * p.element_size() for _, p in members)
        alone = unit in ("before blocks", "after blocks")
        if alone or size > room:
            groups.append([])
            room = bucket_bytes
        groups[-1] += members
        room = 0 if alone else room - size
    return groups


def split_flat(groups: list[list[Named]], sizes: list[int]) -> list[Tensor]:
    """Zeros for each group, cut from one flat buffer per dtype."""
    dtypes = [group[0][1].dtype for group in groups]
    device = groups[0][0][1].device
    parts = {}
    for dtype in set(dtypes):
        mine = [size for size, d in zip(sizes, dtypes, strict=True) if d == dtype]
        parts[dtype] = iter(torch.zeros(sum(mine), dtype=dtype, device=device).split(mine))
    return [next(parts[dtype]) for dtype in dtypes]


def fill_bucket(index: int, group: list[Named], param: Tensor, grad: Tensor) -> Bucket:
    """Lay `group` out in the slices `param` and `grad`: matrices first, equal shapes together."""
    group = sorted(group, key=lambda member: (-member[1].ndim, tuple(member[1].shape)))
    offsets, end = [], 0
    for _, p in group:
        offsets.append(end)
        end += p.numel()
    bucket = Bucket(index, [name for name, _ in group], [p for _, p in group], offsets, param, grad)
    for i, p in enumerate(bucket.params):
        bucket.view(param, i).copy_(p.detach())
        p.data = bucket.view(param, i)  # the Parameter object stays, and with it ties, names and optimizer references
        p.grad = bucket.view(grad, i)
    return bucket


# ---- the synchronisation ------------------------------------------------------------------------------------------


class Optimizer(Protocol):
    """What DDP.step asks of an optimizer; it keeps its own state per bucket."""

    def update(self, bucket: Bucket, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Step the parameters of `bucket` with gradient bucket.grad / grad_scale; change nothing if found_inf is 1."""


class DDP:
    """Keeps the replicas of `model` equal: averages the gradients during backward and drives the optimizer.

    Set `sync` to whether the next backward is the last of the step. `found_inf` is 1.0 (0-d float32) if the last step
    was skipped because its gradient norm was not finite, else 0.0.
    """

    def __init__(self, model: nn.Module, bucket_mb: float = 0.0) -> None:
        """Move the weights into flat buffers and make all ranks equal to rank 0, weights and buffers.

        `bucket_mb` is the most that blocks are merged to; 0 takes a twelfth of the model between 1 and 25 MiB: enough
        buckets to start early, each large enough to hide the latency of its collective. Raises DDPError on all ranks if
        they hold different models. Move the model to its device and dtype, and freeze what is frozen, before.
        """
        check_same_model(model, bucket_mb)
        trainable = [p for p in model.parameters() if p.requires_grad]
        devices = sorted({str(p.device) for p in trainable})
        if len(devices) != 1:
            raise DDPError(f"ddp: the model needs trainable parameters, all on one device; found them on {devices}")
        self.model = model
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.device = trainable[0].device
        n_bytes = sum(p.numel() * p.element_size() for p in trainable)
        bucket_bytes = bucket_mb * MIB or min(max(n_bytes / 12, MIB), 25 * MIB)
        self.buckets = make_buckets(model, bucket_bytes, self.world_size)
        frozen = [p.data for p in model.parameters() if not p.requires_grad]
        for t in [bucket.param for bucket in self.buckets] + frozen + list(model.buffers()):
            broadcast(t)
        self.sync = True
        self.n_steps = 0
        self.found_inf = torch.zeros((), device=self.device)
        self._home = {p: (bucket, i) for bucket in self.buckets for i, p in enumerate(bucket.params)}
        self._norm_param = nn.Parameter(torch.zeros((), device=self.device))  # carries the norm through GradScaler
        self._norm_optimizer = torch.optim.SGD([self._norm_param])
        self._start_step()
        for p in self._home:
            p.register_post_accumulate_grad_hook(self._on_grad)

    def _start_step(self) -> None:
        """Expect one gradient per parameter, and bucket 0 to be launched first."""
        self._arrived: set[nn.Parameter] = set()
        self._next = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.params)

    def _on_grad(self, p: nn.Parameter) -> None:
        """Called by autograd when p.grad is final for this backward. Never waits: that would stop backward."""
        bucket, i = self._home[p]
        if p in self._arrived:
            raise DDPError(
                f"ddp: {bucket.names[i]} received its gradient twice in one synced backward; call step() after the "
                "backward with ddp.sync = True, and use no block twice under reentrant checkpointing"
            )
        if not bucket.holds(p.grad, bucket.grad, i):
            self._rebind_grad(bucket, i)
        if not self.sync:
            return  # accumulation: keep adding into the view, send nothing
        self._arrived.add(p)
        bucket.missing -= 1
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._launch(self.buckets[self._next])
            self._next += 1

    def _rebind_grad(self, bucket: Bucket, i: int) -> None:
        """Bring a gradient that autograd had to allocate (after zero_grad(set_to_none=True)) back into the buffer."""
        p = bucket.params[i]
        if not bucket.holds(p, bucket.param, i):
            raise DDPError(f"ddp: {moved([bucket.names[i]])}")
        bucket.view(bucket.grad, i).copy_(p.grad.detach())
        p.grad = bucket.view(bucket.grad, i)

    def _launch(self, bucket: Bucket) -> None:
        """Start to average the bucket over the ranks. Divided before the sum, which float16 could not hold."""
        if dist.is_initialized():
            bucket.grad.div_(self.world_size)
            with _named_errors(self._describe("all_reduce", bucket)):
                bucket.work = dist.all_reduce(bucket.grad, async_op=True)

    def _wait(self, bucket: Bucket) -> None:
        """Until bucket.grad is the mean over the ranks. gloo blocks here; with NCCL only the GPU's stream waits."""
        if bucket.work is not None:
            with _named_errors(self._describe("all_reduce", bucket)):
                bucket.work.wait()
            bucket.work = None

    def _describe(self, operation: str, bucket: Bucket) -> str:
        return f"step {self.n_steps}: {operation} of bucket {bucket.index} (first parameter {bucket.names[0]})"

    @torch.no_grad()
    def step(
        self, optimizer: Optimizer, lr: float, clip: float = 0.0, scaler: torch.amp.GradScaler | None = None
    ) -> Tensor:
        """Finish the reduction, clip to global norm `clip` (0 = off), update, zero the gradients.

        Returns the global norm before clipping, without the loss scale: 0-d float32 on the model's device. If it is not
        finite, all ranks skip the update together, because it is the norm of the gradients they share. Nothing here
        waits for the GPU. Raises DDPError on all ranks if a gradient is missing or was moved on any.
        """
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
        for bucket in self.buckets:
            optimizer.update(bucket, lr=lr, grad_scale=grad_scale, found_inf=self.found_inf)
            bucket.grad.zero_()
        if scaler is not None:
            scaler.update()
        self.n_steps += 1
        self._start_step()
        return norm

    def _finish_reduce(self) -> Tensor:
        """Wait for the buckets; the norm of each is taken while the later ones are still on the wire."""
        for bucket in self.buckets[self._next :]:
            self._launch(bucket)  # incomplete: an error below, but other ranks wait for this collective
        squares = []
        for bucket in self.buckets:
            self._wait(bucket)
            squares.append(sum_of_squares(bucket.grad))
        return torch.stack(squares).sum().sqrt()

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


def sum_of_squares(flat: Tensor) -> Tensor:
    """0-d float32. By rows: on a CPU vector_norm adds one element after the other, and the norm of 6.5M of them is 2e-4
    off; this is 1e-8 off in the same time (measured).
    """
    dtype = torch.promote_types(flat.dtype, torch.float32)
    return torch.linalg.vector_norm(flat.view(-1, ALIGNMENT), dim=1, dtype=dtype).square().sum().float()


def check_same_model(model: nn.Module, bucket_mb: float) -> None:
    """Raise DDPError on all ranks unless they agree on bucket size, names, order, shapes, dtypes, requires_grad."""
    mine = [f"bucket_mb={bucket_mb}"]
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
