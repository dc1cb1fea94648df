"""ddp.py against one process, torch.nn.parallel.DistributedDataParallel, clip_grad_norm_ and
GradScaler.

A check is a function of a World that asserts; most of them hold for any number of ranks. They run
in this process (one rank, no process group) and, started once for all of them, in 2 and in 4 gloo
processes.
"""

import copy
import functools
import hashlib
import itertools
import math
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import forks
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ddp
from groundup.errors import UserError
from groundup.train import ranks
from groundup.train.powersgd import PowerSGD, make_hook

V, D, L, T = 512, 64, 3, 16
BLOCK_MB = 1e-4  # smaller than any block: every block gets a bucket of its own


# ---- a model, batches and optimizers of our own --------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(D, D, bias=False) for _ in range(4)
        )
        self.up_proj, self.down_proj = (
            nn.Linear(D, 3 * D, bias=False),
            nn.Linear(3 * D, D, bias=False),
        )
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            p(h).unflatten(-1, (4, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        x = x + self.o_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down_proj(F.silu(self.up_proj(self.norm2(x))))


class Llama(nn.Module):
    """Tokens (B, T) and targets (B, T) -> sum of the cross-entropy over targets other than -100."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(V, D)
        self.layers = nn.ModuleList(Block() for _ in range(L))
        self.norm = nn.RMSNorm(D)
        self.lm_head = nn.Linear(D, V, bias=False)
        self.register_buffer("running", torch.zeros(3), persistent=False)
        self.recompute = ""  # "", "reentrant" or "saved": activation checkpointing
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        h = self.embed_tokens(x)
        for block in self.layers:
            h = (
                checkpoint(block, h, use_reentrant=self.recompute == "reentrant")
                if self.recompute
                else block(h)
            )
        logits = self.lm_head(self.norm(h))
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )


class Casting(nn.Module):
    """Blocks of three dtypes; the loss takes (x, targets) like Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(V, D)
        dtypes = (torch.bfloat16, torch.float32, torch.float64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(D, D), nn.RMSNorm(D)).to(dtype) for dtype in dtypes
        )
        self.layers[0][1].float()  # and two dtypes within one block
        self.lm_head = nn.Linear(D, V)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        h = self.embed_tokens(x)
        for linear, norm in self.layers:
            h = h + norm(linear(h.to(linear.weight.dtype)).to(norm.weight.dtype)).float()
        return F.cross_entropy(self.lm_head(h).flatten(0, 1), targets.flatten(), reduction="sum")


def new_model(seed: int = 0, tied: bool = False) -> Llama:
    torch.manual_seed(seed)
    return Llama(tied)


def batch(world: ranks.World, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, y) of all ranks, two rows each, and this rank's (x, y)."""
    data = torch.randint(
        V, (2 * world.world_size, T + 1), generator=torch.Generator().manual_seed(seed)
    )
    x, y = data[:, :-1].clone(), data[:, 1:].clone()
    mine = slice(2 * world.rank, 2 * world.rank + 2)
    return x, y, x[mine], y[mine]


def named_grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


class Capture:
    """An optimizer that only notes the gradients it is given, divided by grad_scale."""

    def __init__(self) -> None:
        self.grads: dict[str, Tensor] = {}

    def update(self, bucket: ddp.Bucket, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        for i, name in enumerate(bucket.names):
            self.grads[name] = bucket.view(bucket.grad, i) / grad_scale.to(bucket.grad.dtype)


class FlatAdamW:
    """torch's fused AdamW, one flat tensor per bucket."""

    def __init__(self) -> None:
        self.parts: dict[int, torch.optim.AdamW] = {}

    def update(self, bucket: ddp.Bucket, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        if bucket.index not in self.parts:
            self.parts[bucket.index] = torch.optim.AdamW([nn.Parameter(bucket.param)], fused=True)
        part = self.parts[bucket.index]
        part.param_groups[0]["lr"] = lr
        part.param_groups[0]["params"][0].grad = bucket.grad
        part.grad_scale, part.found_inf = grad_scale, found_inf
        part.step()

    def tensors(self) -> list[Tensor]:
        states = [part.state[part.param_groups[0]["params"][0]] for part in self.parts.values()]
        return [
            t.clone()
            for state in states
            for t in (state["exp_avg"], state["exp_avg_sq"], state["step"])
        ]


class WireLog(TorchDispatchMode):
    """Notes every c10d operator of this thread as (name, bytes of its first tensor)."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int | str]] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        if func.namespace == "c10d":
            tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            self.events.append((
                func.name(),
                sum(t.nbytes for t in tensors if isinstance(t, Tensor)),
            ))
        return func(*args, **(kwargs or {}))


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """Relative to the norm of each gradient; tolerance 0 asks for equal bits."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    for name in want:
        if tolerance:
            assert relative(got[name], want[name]) <= tolerance, (
                name,
                relative(got[name], want[name]),
            )
        else:
            assert torch.equal(got[name], want[name]), (
                name,
                (got[name] - want[name]).abs().max().item(),
            )


def digest(tensors: list[Tensor]) -> str:
    return hashlib.sha256(
        b"".join(t.detach().flatten().view(torch.uint8).numpy() for t in tensors)
    ).hexdigest()


def assert_same_on_all_ranks(value: object) -> None:
    everyone = ranks.gather_objects(value)
    assert all(other == everyone[0] for other in everyone), everyone


def assert_raises_on_all_ranks(action: Callable[[], object], *texts: str) -> None:
    """`action` raises a UserError with all `texts` in its one line, on every rank."""
    message = "no error"
    try:
        action()
    except UserError as error:
        message = str(error)
    for rank, line in enumerate(ranks.gather_objects(message)):
        assert line.startswith(("ddp: ", "train: ", "config: ")) and "\n" not in line, (rank, line)
        assert all(text in line for text in texts), (rank, texts, line)


# ---- checks that hold for any number of ranks ----------------------------------------------------


def check_equals_single_process(world: ranks.World) -> None:
    """Token-weighted mean over unequal counts; one micro-batch has no target."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        reference, model = new_model(0).to(dtype), new_model(world.rank).to(dtype)
        parallel, capture = ddp.DDP(model, bucket_mb=BLOCK_MB), Capture()
        batches = [batch(world, seed) for seed in (1, 2)]
        for row in range(2 * world.world_size):  # rows of rank 0: no target; then 3, 4, ... targets
            batches[0][1][row, row + 1 if row > 1 else 0 :] = -100
        n_tokens = sum((y != -100).sum().item() for _, y, _, _ in batches)
        for micro_step, (x, y, my_x, my_y) in enumerate(batches):
            (reference(x, y) / n_tokens).backward()
            parallel.sync = micro_step == 1
            (model(my_x, my_y) * (world.world_size / n_tokens)).backward()
        norm = parallel.step(capture, lr=0.0)
        want = named_grads(reference)
        assert_close(capture.grads, want, tolerance)
        total = torch.cat([g.double().flatten() for g in want.values()]).norm()
        assert norm.dtype == torch.float32 and norm.ndim == 0
        assert relative(norm, total) < 2e-7, (norm, total)
        # The check can fail: the mean of the micro-batches' means is another gradient.
        mean_of_means = new_model(0).to(dtype)
        for x, y, _, _ in batches:
            for rows in range(0, len(x), 2):
                part = y[rows : rows + 2]
                mean = mean_of_means(x[rows : rows + 2], part) / (part != -100).sum().clamp(min=1)
                (mean / (2 * world.world_size)).backward()
        assert relative(mean_of_means.lm_head.weight.grad, want["lm_head.weight"]) > 1e-2


def check_equals_torch_ddp(world: ranks.World) -> None:
    """Bitwise for two ranks, whatever the buckets: a sum of two terms has no order."""
    tolerance = 0.0 if world.world_size == 2 else 1e-6
    models = [new_model(3), new_model(3, tied=True), Casting()]
    cases = [(models[0], mb, n) for mb in (BLOCK_MB, 0.5, 100.0) for n in (1, 3)]
    cases = cases[::3] + [(model, BLOCK_MB, 3) for model in models[1:]]
    for start, bucket_mb, accum_steps in cases:
        model = copy.deepcopy(start)
        torchs = nn.parallel.DistributedDataParallel(
            copy.deepcopy(start), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
        )
        parallel, capture = ddp.DDP(model, bucket_mb=bucket_mb), Capture()
        for micro_step in range(accum_steps):
            _, _, x, y = batch(world, 10 + micro_step)
            parallel.sync = torchs.require_backward_grad_sync = micro_step == accum_steps - 1
            (model(x, y) / 100).backward()
            (torchs(x, y) / 100).backward()
        parallel.step(capture, lr=0.0)
        wide = tolerance if start is not models[2] else tolerance * 1e4  # bfloat16 has 8 bits
        assert_close(capture.grads, named_grads(torchs.module), wide)


def check_ranks_stay_equal(world: ranks.World) -> None:
    """Ranks start with rank 0's weights and buffers and have equal bits after each step."""
    for clip, scaler, dtype in (
        (0.0, None, torch.float32),
        (0.5, None, torch.float32),
        (0.5, torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2), torch.float32),
        (0.5, None, torch.bfloat16),
    ):
        model, optimizer = new_model(world.rank).to(dtype), FlatAdamW()
        model.running += world.rank + 1
        model.norm.weight.requires_grad_(False)
        model.norm.weight += world.rank
        model.register_buffer("flags", torch.tensor([world.rank == 0, False]))
        parallel = ddp.DDP(model)
        assert model.running.tolist() == [1, 1, 1] and model.flags.tolist() == [True, False]
        assert model.norm.weight.tolist() == [1] * D
        digests = [digest(list(model.parameters()))]
        assert digests[0] == digest(list(_frozen_norm(new_model(0)).to(dtype).parameters()))
        for step in range(3):
            for micro_step in range(2):
                parallel.sync = micro_step == 1
                _, _, x, y = batch(world, 2 * step + micro_step)
                loss = model(x, y) / 100
                (loss if scaler is None else scaler.scale(loss)).backward()
            parallel.step(optimizer, 1e-3, clip, scaler)
            digests.append(digest(list(model.parameters())))
        assert_same_on_all_ranks(digests)
        assert len(set(digests)) == 4


def _frozen_norm(model: Llama) -> Llama:
    model.norm.weight.requires_grad_(False)
    return model


def check_unused_parameter(world: ranks.World) -> None:
    """Named on all ranks in the same step, whether no rank or only one lacks the gradient."""
    for lacking in (range(world.world_size), [world.world_size - 1]):
        model = new_model(0)
        parallel = ddp.DDP(model, bucket_mb=BLOCK_MB)
        _, _, x, y = batch(world, 1)
        if world.rank in lacking:
            model.layers[1].forward = lambda x: x  # a block that is skipped
        model(x, y).backward()
        assert_raises_on_all_ranks(
            lambda parallel=parallel: parallel.step(Capture(), 0.0),
            "layers.1.",
            "and 3 more",
            f"rank {lacking[0]}",
        )
    model = new_model(0)
    parallel = ddp.DDP(model)
    parallel.sync = False
    model(x, y).backward()
    assert_raises_on_all_ranks(
        lambda: parallel.step(Capture(), 0.0), "no gradient", "ddp.sync = True", "more"
    )


def check_two_backwards(world: ranks.World) -> None:
    """A second backward after the synced one would average twice: refused, synced or not."""
    for second_is_synced in (True, False):
        model = new_model(0)
        parallel = ddp.DDP(model)
        _, _, x, y = batch(world, 1)
        model(x, y).backward()
        parallel.sync = second_is_synced
        assert_raises_on_all_ranks(model(x, y).backward, "lm_head.weight", "twice")
    model = new_model(0)
    ddp.DDP(model)
    model.layers[2] = model.layers[
        1
    ]  # under reentrant checkpointing, the hooks of a repeated block fire twice
    model.recompute = "reentrant"
    assert_raises_on_all_ranks(model(x, y).backward, "layers.1.", "twice")


def check_order_of_arrival(world: ranks.World) -> None:
    """Gradients that become ready in another order on each rank.

    Buckets still go by index, and the mean is right.
    """

    def loss_of(model: nn.ModuleDict, rank: int) -> Tensor:
        names = [*model][rank % 3 :] + [*model][: rank % 3]
        return torch.stack([
            (rank + 1) * model[name].weight.square().sum() for name in names
        ]).cumsum(0)[-1]

    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(8, 16), "b": nn.Linear(8, 80), "c": nn.Linear(8, 160)})
    for layer in model.values():
        layer.bias = None
    want = {
        name: p.detach() * (world.world_size + 1) for name, p in model.named_parameters()
    }  # mean of 2 * (rank + 1)
    parallel, capture = ddp.DDP(model, bucket_mb=BLOCK_MB), Capture()
    with WireLog() as log:
        log_gradients(model, log)
        loss_of(model, world.rank).backward()
    parallel.step(capture, 0.0)
    assert_close(capture.grads, want, 1e-6)
    arrived = ranks.gather_objects([what for name, what in log.events if name == "gradient"])
    assert world.world_size == 1 or arrived[0] != arrived[1], arrived


def check_tied_and_frozen(world: ranks.World) -> None:
    """Tied weights have one slot, in the last bucket; frozen ones none, and no gradient."""
    model = new_model(0, tied=True)
    for name, p in model.named_parameters():
        p.requires_grad_("q_proj" in name or "embed" in name)
    parallel, capture = ddp.DDP(model, bucket_mb=BLOCK_MB), Capture()
    assert model.lm_head.weight is model.embed_tokens.weight
    assert [bucket.names for bucket in parallel.buckets] == [
        ["layers.2.q_proj.weight"],
        ["layers.1.q_proj.weight"],
        ["layers.0.q_proj.weight"],
        ["embed_tokens.weight"],
    ]
    reference = new_model(0, tied=True)
    x, y, my_x, my_y = batch(world, 1)
    (reference(x, y) / y.numel()).backward()
    (model(my_x, my_y) * (world.world_size / y.numel())).backward()
    assert model.norm.weight.grad is None
    parallel.step(capture, 0.0)
    want = {name: p.grad for name, p in reference.named_parameters() if name in capture.grads}
    assert_close(capture.grads, want, 1e-6)


def check_set_to_none(world: ranks.World) -> None:
    """Gradients that the user dropped or replaced come back into the buffer with equal bits."""
    results = []
    for meddle in (False, True):
        model, capture = new_model(0), Capture()
        parallel = ddp.DDP(model, bucket_mb=BLOCK_MB)
        for step, micro_step in itertools.product(range(2), range(2)):
            if meddle and micro_step == 0:
                model.zero_grad(set_to_none=True)
            if meddle and micro_step == 1:
                for p in model.parameters():
                    p.grad = p.grad.clone()
            parallel.sync = micro_step == 1
            _, _, x, y = batch(world, 2 * step + micro_step)
            model(x, y).backward()
            if micro_step == 1:
                parallel.step(capture, 0.0)
        results.append(capture.grads)
        for bucket in parallel.buckets:
            for i, p in enumerate(bucket.params):
                assert p.grad is None and bucket.holds(p, bucket.param, i)
    assert_close(results[1], results[0], 0.0)


def check_parameters_moved(world: ranks.World) -> None:
    """model.to(), load_state_dict(assign=True) and a .grad swapped before step() are errors."""
    _, _, x, y = batch(world, 1)

    def moved(meddle: Callable[[nn.Module], object], before_backward: bool) -> Callable[[], object]:
        model = new_model(0)
        parallel = ddp.DDP(model)

        def run() -> None:
            if before_backward:
                meddle(model)
            model(x, y).backward()
            if not before_backward:
                meddle(model)
            parallel.step(Capture(), 0.0)

        return run

    def assign(model: nn.Module) -> None:
        model.load_state_dict(
            {name: t.clone() for name, t in model.state_dict().items()}, assign=True
        )

    def copy_data(model: nn.Module) -> None:
        model.layers[1].q_proj.weight.data = model.layers[1].q_proj.weight.data.clone()

    assert_raises_on_all_ranks(
        moved(lambda model: model.to(torch.float64), True), "flat buffer", ".weight"
    )
    assert_raises_on_all_ranks(moved(assign, True), "flat buffer", "more")
    assert_raises_on_all_ranks(moved(copy_data, True), "flat buffer", "layers.1.q_proj.weight")
    assert_raises_on_all_ranks(moved(copy_data, False), "flat buffer", "layers.1.q_proj.weight")
    assert_raises_on_all_ranks(moved(nn.Module.zero_grad, False), ".grad was replaced")
    moved(lambda model: model.to("cpu"), True)()  # changes nothing


def check_float16_mean(world: ranks.World) -> None:
    """40,000 on every rank: the sum overflows float16, the mean does not."""
    model = nn.Linear(32, 1, bias=False).half()
    parallel, capture = ddp.DDP(model), Capture()
    (model.weight * 40_000).sum().backward()
    norm = parallel.step(capture, 0.0)
    assert (
        capture.grads["weight"].float().sub(40_000).abs().max() <= 32 * world.world_size
    )  # 32: the spacing there
    assert relative(norm, torch.tensor(40_000 * 32**0.5)) < 2e-3 and parallel.found_inf.item() == 0


def check_activation_checkpointing(world: ranks.World) -> None:
    """Both kinds: the same gradients, and buckets are launched while backward still runs."""
    results = {}
    for kind in ("", "saved", "reentrant"):
        model, capture = new_model(0), Capture()
        model.recompute = kind
        parallel = ddp.DDP(model, bucket_mb=BLOCK_MB)
        if kind == "reentrant":  # this kind only sees blocks whose input requires a gradient
            assert model.embed_tokens.weight.requires_grad
        _, _, x, y = batch(world, 1)
        with WireLog() as log:
            log_gradients(model, log)
            model(x, y).backward()
        assert_launched_in_order(parallel, log)
        parallel.step(capture, 0.0)
        results[kind] = capture.grads
    assert_close(results["saved"], results[""], 1e-6)
    assert_close(results["reentrant"], results[""], 1e-6)


def log_gradients(model: nn.Module, log: WireLog) -> None:
    """Note ("gradient", name) when a gradient is final."""
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda _, name=name: log.events.append(("gradient", name))
        )


def assert_launched_in_order(parallel: ddp.DDP, log: WireLog) -> None:
    """All launches happened inside backward, by index, each as soon as it could."""
    if not dist.is_initialized():
        return
    launches = [size for name, size in log.events if name == "c10d::allreduce_"]
    assert launches == [bucket.grad.nbytes for bucket in parallel.buckets], launches
    kinds = [name for name, _ in log.events]
    first_launch = kinds.index("c10d::allreduce_")
    gradients_before = kinds[:first_launch].count("gradient")
    # One bucket and at most one gradient of the next one; the embedding's arrives last, after all
    # other launches.
    assert gradients_before <= len(parallel.buckets[0].params), (gradients_before, log.events)
    assert "layers.0.q_proj.weight" in [what for _, what in log.events[first_launch:]]
    assert_same_on_all_ranks([event for event in log.events if event[0].startswith("c10d")])


def check_wire(world: ranks.World) -> None:
    """Nothing is sent while accumulating.

    Each step sends every bucket once, and two flags of 8 bytes: a rank has a problem, is to stop.
    """
    model, capture = new_model(0), Capture()
    parallel = ddp.DDP(model, bucket_mb=BLOCK_MB)
    sizes = [bucket.grad.nbytes for bucket in parallel.buckets]
    for step in range(2):
        with WireLog() as log:
            parallel.sync = False
            for seed in range(3):
                _, _, x, y = batch(world, seed)
                model(x, y).backward()
        assert log.events == []
        with WireLog() as log:
            parallel.sync = True
            model(x, y).backward()
            parallel.step(capture, 0.0)
        if dist.is_initialized():
            assert [size for _, size in log.events] == [*sizes, 16], log.events
            assert_same_on_all_ranks(log.events)
        else:
            assert log.events == []
        assert parallel.n_updates == step + 1


def check_clip(world: ranks.World) -> None:
    """Norm and clipped gradients of clip_grad_norm_ on the whole batch in one process."""
    x, y, my_x, my_y = batch(world, 1)
    for clip in (1e-2, 1e3):
        reference, model, capture = new_model(0), new_model(0), Capture()
        (reference(x, y) / y.numel()).backward()
        want_norm = nn.utils.clip_grad_norm_(reference.parameters(), clip)
        parallel = ddp.DDP(model, bucket_mb=BLOCK_MB)
        (model(my_x, my_y) * (world.world_size / y.numel())).backward()
        norm = parallel.step(capture, 0.0, clip)
        assert 1e-1 < want_norm < 1e2 and relative(norm, want_norm) < 1e-6, (norm, want_norm)
        assert_close(capture.grads, named_grads(reference), 1e-6)


def check_not_finite(world: ranks.World) -> None:
    """With one bad element on the last rank all skip that step, and the next one is normal."""
    for bad, with_scaler in itertools.product((float("inf"), float("nan")), (True, False)):
        model, optimizer = new_model(0), FlatAdamW()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if with_scaler else None
        parallel = ddp.DDP(model, bucket_mb=BLOCK_MB)
        poison = torch.zeros(())
        if world.rank == world.world_size - 1:
            model.layers[1].up_proj.weight.register_hook(
                lambda g, poison=poison: torch.where(_first(g), g + poison, g)
            )
        for step in range(4):
            poison.fill_(bad if step == 2 else 0.0)
            before = [t.clone() for t in model.parameters()] + (optimizer.tensors() if step else [])
            _, _, x, y = batch(world, step)
            loss = model(x, y) / 100
            (scaler.scale(loss) if scaler else loss).backward()
            norm = parallel.step(optimizer, 1e-3, 1.0, scaler)
            after = list(model.parameters()) + optimizer.tensors()
            assert parallel.found_inf.item() == float(step == 2) == float(not norm.isfinite())
            assert parallel.skipped.tolist() == [
                float(step >= 2),
                float(step == 2),
            ]  # in all, in a row
            if step == 2:
                assert digest(before) == digest(after)
            elif step:
                assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            assert_same_on_all_ranks((digest(after), scaler.get_scale() if scaler else 0))
        assert scaler is None or scaler.get_scale() == 512.0


def _first(t: Tensor) -> Tensor:
    """A mask with only the first element True."""
    return torch.arange(t.numel()).view(t.shape) == 0


def check_scaler_alone(world: ranks.World) -> None:
    """Scale, skipped steps and weights follow a GradScaler used as torch documents it."""
    model, reference = new_model(0).double(), new_model(0).double()
    parallel, optimizer = ddp.DDP(model), FlatAdamW()
    theirs = torch.optim.AdamW(reference.parameters(), fused=True, lr=1e-3)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2) for _ in range(2)]
    scales, skipped = [], []
    for step in range(10):
        factor = float("inf") if step in (3, 4, 8) else 1.0
        x, y, my_x, my_y = batch(world, step)
        scalers[0].scale(reference(x, y) / y.numel() * factor).backward()
        scalers[0].unscale_(theirs)
        want_norm = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        scalers[0].step(theirs)
        scalers[0].update()
        theirs.zero_grad()
        loss = model(my_x, my_y) * (world.world_size / y.numel())
        scalers[1].scale(loss * (factor if world.rank == 0 else 1.0)).backward()
        norm = parallel.step(optimizer, 1e-3, 1.0, scalers[1])
        skipped.append(tuple(parallel.skipped.tolist()))
        scales.append(scalers[1].get_scale())
        assert scales[-1] == scalers[0].get_scale(), (step, scales)
        assert factor != 1.0 or relative(norm, want_norm) < 1e-6
    assert skipped[2:] == [(0, 0), (1, 1), (2, 2), (2, 0), (2, 0), (2, 0), (3, 1), (3, 0)]
    assert scales[1] > scales[0] and scales[4] < scales[3] < scales[2]  # it grew and backed off
    for ours, want in zip(model.parameters(), reference.parameters(), strict=True):
        assert (
            ours - want
        ).abs().max() < 1e-6  # after 7 steps of 1e-3; the clip coefficient is float32


def check_disabled_scaler(world: ranks.World) -> None:
    """GradScaler(enabled=False), which scripts pass for other dtypes, changes nothing."""
    grads = []
    for scaler in (None, torch.amp.GradScaler("cpu", enabled=False)):
        model, capture = new_model(0), Capture()
        parallel = ddp.DDP(model)
        _, _, x, y = batch(world, 1)
        model(x, y).backward()
        parallel.step(capture, 0.0, 1.0, scaler)
        grads.append(capture.grads)
    assert_close(grads[1], grads[0], 0.0)


CHECKS = [
    check_equals_single_process,
    check_ranks_stay_equal,
    check_unused_parameter,
    check_two_backwards,
    check_order_of_arrival,
    check_tied_and_frozen,
    check_set_to_none,
    check_parameters_moved,
    check_float16_mean,
    check_activation_checkpointing,
    check_wire,
    check_clip,
    check_not_finite,
    check_scaler_alone,
    check_disabled_scaler,
]


# ---- checks of several ranks ---------------------------------------------------------------------


def check_helpers(world: ranks.World) -> None:
    n = world.world_size
    assert world.rank == world.local_rank and world.is_main == (world.rank == 0)
    assert ranks.all_reduce_sum(torch.tensor([1.5, world.rank])).tolist() == [
        1.5 * n,
        n * (n - 1) / 2,
    ]
    assert ranks.any_rank(False) is False and ranks.any_rank(True) is True
    assert ranks.any_rank(world.rank == n - 1) is True
    assert ranks.gather_objects({"rank": world.rank}) == [{"rank": rank} for rank in range(n)]
    assert ranks.broadcast(torch.tensor(world.rank + 5)).item() == 5
    ranks.barrier()


def check_different_models(world: ranks.World) -> None:
    """The first difference is named on all ranks, within seconds."""

    def reshape(model: Llama) -> None:
        model.layers[1].up_proj.weight = nn.Parameter(torch.ones(5, D))

    def reorder(model: Llama) -> None:
        norm = model.norm
        del model.norm
        model.norm = norm

    changes = {
        "layers.1.up_proj.weight (5, 64)": reshape,
        "layers.0.norm1.weight (64,) torch.float64": lambda model: model.layers[0].norm1.double(),
        "parameter 25=lm_head.weight (512, 64)": reorder,
        "lm_head.weight (512, 64) torch.float32 requires_grad=False": lambda model: (
            model.lm_head.requires_grad_(False)
        ),
        "parameter 0=extra (1,)": lambda model: model.register_parameter(
            "extra", nn.Parameter(torch.ones(1))
        ),
        "buffer running=(4,)": lambda model: model.register_buffer("running", torch.zeros(4)),
    }
    for text, change in changes.items():
        model = new_model(0)
        if world.rank == 1:
            change(model)
        start = time.monotonic()
        assert_raises_on_all_ranks(lambda model=model: ddp.DDP(model), "train: rank 1 has ", text)
        assert time.monotonic() - start < 10
    assert_raises_on_all_ranks(
        lambda: ddp.DDP(new_model(0), bucket_mb=1.0 + (world.rank == 1)), "bucket_mb=2.0"
    )
    hook = PowerSGD(rank=4 + (world.rank == 1))  # messages of another size would end in an abort
    assert_raises_on_all_ranks(lambda: ddp.DDP(new_model(0), hook=hook), "rank 1", "'rank': 5")


GROUP_CHECKS = [*CHECKS, check_equals_torch_ddp, check_helpers, check_different_models]
OF_FOUR = [  # of these four ranks do something else than two: other means, another order
    check_equals_single_process,
    check_ranks_stay_equal,
    check_order_of_arrival,
    check_float16_mean,
    check_clip,
    check_equals_torch_ddp,
    check_helpers,
]
OF_RANKS = [(check, 2) for check in GROUP_CHECKS] + [(check, 4) for check in OF_FOUR]


# ---- starting ranks ------------------------------------------------------------------------------


def run_checks(world: ranks.World, report: Callable[[str, str], None]) -> None:
    """Every check in turn; the first one that fails ends this rank, and with it the others."""
    for check in OF_FOUR if world.world_size == 4 else GROUP_CHECKS:
        torch.manual_seed(0)
        check(world)
        report(check.__name__, "")


def rank_main(
    scenario: Callable,
    rank: int,
    world_size: int,
    port: int,
    folder: Path,
    timeout_s: float,
    device_type: str,
) -> None:
    """Run a rank. What it reports is appended to a file, which survives the process."""
    env = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({key: str(value) for key, value in env.items()})
    torch.set_num_threads(1)

    def report(name: str, text: str) -> None:
        with open(folder / f"{rank}.txt", "a", encoding="utf-8") as f:
            f.write(f"{name}\t{time.time()}\t{text!r}\n")

    try:
        world = ranks.init(device_type, timeout_s)
        scenario(world, report)
        ranks.close()
    except Exception:
        report("error", traceback.format_exc())
        sys.exit(1)
    report("end", "")


def start_ranks(
    scenario: Callable,
    world_size: int,
    folder: Path,
    timeout_s: float = 60,
    device_type: str = "cpu",
) -> tuple[list[dict[str, tuple[float, str]]], list[int]]:
    """Run `scenario(world, report)` in `world_size` processes.

    Return each rank's reports {name: (time, text)}, and the exit codes.
    """
    # Where CUDA is at hand a fork can use neither it nor the gradients that its parent has computed.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    args = [
        (scenario, rank, world_size, port, folder, timeout_s, device_type)
        for rank in range(world_size)
    ]
    processes = [context.Process(target=rank_main, args=a, daemon=True) for a in args]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 240
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    reports = []
    for rank in range(world_size):
        path = folder / f"{rank}.txt"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        parts = [line.split("\t", 2) for line in lines]
        reports.append({name: (float(when), text) for name, when, text in parts})
    return reports, [process.exitcode for process in processes]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[list, list]]:
    """Return outcome(n): reports and exit codes of n ranks that run all checks when first asked."""
    return functools.cache(
        lambda n: start_ranks(run_checks, n, tmp_path_factory.mktemp(f"ranks{n}"))
    )


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_one_process(check: Callable) -> None:
    assert not dist.is_initialized()
    torch.manual_seed(0)
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the ranks; tensors this small only lose by more
    try:
        check(ranks.World(rank=0, local_rank=0, world_size=1))
    finally:
        torch.set_num_threads(n_threads)


@pytest.mark.dist
@pytest.mark.parametrize(("check", "n"), OF_RANKS, ids=lambda value: getattr(value, "__name__", value))
def test_several_ranks(outcome: Callable, n: int, check: Callable) -> None:
    reports, _ = outcome(n)
    for rank, report in enumerate(reports):
        assert check.__name__ in report, (
            f"rank {rank}: {report.get('error', (0, 'not reached'))[1]}"
        )


@pytest.mark.dist
@pytest.mark.parametrize("n", [2, 4])
def test_clean_exit(outcome: Callable, n: int) -> None:
    reports, exit_codes = outcome(n)
    assert exit_codes == [0] * n and all("end" in report for report in reports), reports


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists threads through /proc")
def test_close_ends_the_threads_of_the_group() -> None:
    """A gloo thread that outlives the interpreter now and then aborts the process.

    See the imports of ranks.py.
    """
    code = """if True:
        import os, pathlib, torch, ddp
        from groundup.train import ranks
        ranks.init()
        ddp.DDP(torch.nn.Linear(2, 2))
        import torch._dynamo  # as compile=True does at some point
        ranks.any_rank(True)
        ranks.close()
        print([path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")])
    """
    env = os.environ | {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env |= {
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    done = forks.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "gloo" not in done.stdout, done.stdout


# ---- ranks that are lost -------------------------------------------------------------------------


def lose_rank(world: ranks.World, report: Callable[[str, str], None], how: str) -> None:
    """Train; in its fourth step the last rank dies, stops or leaves."""
    model, optimizer = new_model(0), FlatAdamW()
    parallel = ddp.DDP(model, bucket_mb=BLOCK_MB)
    for step in range(8):
        _, _, x, y = batch(world, step)
        if step == 3 and world.rank == world.world_size - 1:
            report("lost", "")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stopped":
                time.sleep(3.5)
            sys.exit(0)  # "left": one step fewer than the others
        model(x, y).backward()
        parallel.step(optimizer, 1e-3)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("how", "seconds"), [("killed", 5.0), ("left", 5.0), ("stopped", 2.0 + 2.0)]
)
def test_lost_rank(how: str, seconds: float, tmp_path: Path) -> None:
    """The survivor says in one line who, when, what and where: within seconds or at timeout_s."""
    reports, _ = start_ranks(functools.partial(lose_rank, how=how), 2, tmp_path, timeout_s=2)
    assert "lost" in reports[1], reports
    when, text = reports[0]["error"]
    assert when - reports[1]["lost"][0] < seconds, (when - reports[1]["lost"][0], text)
    assert "LostRank: ddp: rank 0: step 4: all_reduce of bucket" in text, text
    assert "(first: " in text and "another rank has died or is stuck" in text


# ---- layout --------------------------------------------------------------------------------------


def test_buckets_end_at_blocks() -> None:
    model = new_model()
    buckets = ddp.make_buckets(model, 1, world_size=4)  # one byte: nothing is merged
    owners = [
        {".".join(name.split(".")[: 2 if name.startswith("layers") else 1]) for name in b.names}
        for b in buckets
    ]
    assert owners == [
        {"norm", "lm_head"},
        {"layers.2"},
        {"layers.1"},
        {"layers.0"},
        {"embed_tokens"},
    ]
    assert [bucket.index for bucket in buckets] == [0, 1, 2, 3, 4]
    assert all(bucket.param.numel() % (4 * 128) == 0 for bucket in buckets)
    merged = ddp.make_buckets(new_model(), 2.5 * buckets[1].param.nbytes, world_size=1)
    assert [len(bucket.names) for bucket in merged] == [
        2,
        16,
        8,
        1,
    ]  # two blocks fit, the head never joins them


def test_default_bucket_size() -> None:
    """A twelfth of the model, at least 1 MiB; for large models 25 MiB."""
    small = ddp.DDP(new_model())  # 0.9 MiB: all blocks in one bucket
    assert [len(bucket.names) for bucket in small.buckets] == [2, 24, 1]
    large = nn.Sequential(
        *(nn.Linear(1024, 1024, bias=False) for _ in range(24))
    )  # 24 x 4 MiB, a twelfth is 8 MiB
    assert [len(bucket.names) for bucket in ddp.DDP(large).buckets] == [2] * 12
    with torch.device("meta"):
        huge = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(120)))
    assert [len(group) for _, group in ddp.plan_buckets(huge, 25 * 2**20)] == [6] * 20


def test_equal_shapes_are_one_view() -> None:
    """A bucket gives its matrices of one shape as one (k, n, m) tensor without a copy."""
    model = new_model()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    bucket = ddp.make_buckets(model, 1e9, world_size=2)[1]
    for name, p in model.named_parameters():
        assert torch.equal(p, values[name])
    shapes = [tuple(p.shape) for p in bucket.params]
    assert shapes == sorted(shapes, key=lambda shape: (-len(shape), shape))
    squares = [i for i, shape in enumerate(shapes) if shape == (D, D)]
    assert len(squares) == 4 * L and squares == list(range(squares[0], squares[0] + 4 * L))
    start = bucket.offsets[squares[0]]
    stack = bucket.param[start : start + 4 * L * D * D].view(4 * L, D, D)
    for k, i in enumerate(squares):
        assert torch.equal(stack[k], values[bucket.names[i]])
    assert (
        sum(p.numel() for p in bucket.params) <= bucket.param.numel()
        and bucket.param.numel() % 256 == 0
    )


def test_user_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="trainable parameters"):
        ddp.DDP(new_model().requires_grad_(False))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(UserError, match=r"on one device.*'cpu', 'meta'"):
        ddp.DDP(mixed)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(UserError, match="LOCAL_RANK.*torchrun"):
        ranks.init()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_of_many_elements(dtype: torch.dtype) -> None:
    """One running float32 sum over a flat buffer loses digits.

    The norm must not (vector_norm: 2e-4 off here).
    """
    model = nn.Linear(3000, 2003, bias=False).to(dtype)
    parallel = ddp.DDP(model)
    gradient = torch.randn(2003, 3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    model.weight.backward(gradient)
    assert relative(parallel.step(Capture(), 0.0), gradient.double().norm()) < 2e-7


# ---- CUDA ----------------------------------------------------------------------------------------


def cuda_rank(world: ranks.World, report: Callable[[str, str], None]) -> None:
    """NCCL with one rank gives the CPU's gradients, and a step does not wait for the GPU."""
    model, reference = new_model(0).cuda(), new_model(0)
    parallel, optimizer, capture = ddp.DDP(model, bucket_mb=BLOCK_MB), FlatAdamW(), Capture()
    _, _, x, y = batch(world, 1)
    reference(x, y).backward()
    model(x.cuda(), y.cuda()).backward()
    assert all(bucket.running_hook is not None for bucket in parallel.buckets)
    parallel.step(capture, 0.0)
    assert_close({name: g.cpu() for name, g in capture.grads.items()}, named_grads(reference), 1e-5)
    assert ranks.any_rank(True) and ranks.all_reduce_sum(torch.ones(2, device="cuda")).tolist() == [
        1,
        1,
    ]
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    x, y = x.cuda(), y.cuda()
    poison = torch.zeros((), device="cuda")
    model.layers[1].up_proj.weight.register_hook(lambda g: g + poison)
    for step in range(4):  # the first builds the optimizer's state
        poison.fill_(float("inf") if step == 2 else 0.0)
        before = digest([p.cpu() for p in model.parameters()])
        scaler.scale(model(x, y) / 100).backward()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        norm = parallel.step(optimizer, 1e-3, 1.0, scaler)
        torch.cuda.set_sync_debug_mode("default")
        assert parallel.found_inf.item() == float(step == 2) == float(not norm.isfinite())
        assert (before == digest([p.cpu() for p in model.parameters()])) == (step == 2)
    assert scaler.get_scale() == 512.0
    report("cuda_rank", "")


def train_on_gpu(**options: object) -> tuple[list[Tensor], list[float]]:
    """Weights and norms after six steps with a loss scale, clipping and two micro-steps."""
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    hook = make_hook(str(options.pop("compress", "none")), start_step=2, scaler=scaler)
    exact = options.get("overlap_step") == "backward"  # cannot clip or scale
    model = new_model(0).cuda()
    parallel = ddp.DDP(model, hook, bucket_mb=BLOCK_MB, **options)
    optimizer, norms = FlatAdamW(), []
    for step in range(6):
        parallel.expect_step(optimizer, 1e-3)
        for micro_step in range(2):
            parallel.sync = micro_step == 1
            _, _, x, y = batch(ranks.World(0, 0, 1), 2 * step + micro_step)
            loss = model(x.cuda(), y.cuda()) / 64
            (loss if exact else scaler.scale(loss)).backward()
        norms.append(
            parallel.step(optimizer, 1e-3, 0.0 if exact else 1e9, None if exact else scaler).item()
        )
    parallel.flush()
    return [p.detach().cpu() for p in model.parameters()], norms


def cuda_options(world: ranks.World, report: Callable[[str, str], None]) -> None:
    """On NCCL with one rank what is exact equals the plain step to rounding, the rest runs."""
    plain, norms = train_on_gpu()
    for options in (
        {"overlap_step": "forward"},
        {"overlap_step": "backward"},
        {"zero1": True},
        {"zero1": True, "overlap_step": "forward"},
    ):
        weights, other = train_on_gpu(**options)
        assert other == pytest.approx(norms, rel=1e-4), options
        for got, want in zip(weights, plain, strict=True):
            assert (got - want).abs().max() < 1e-4, options
    for options in ({"compress": "fp16"}, {"compress": "bf16"}, {"compress": "powersgd"}):
        weights, other = train_on_gpu(**options)
        assert all(math.isfinite(norm) for norm in other) and all(
            w.isfinite().all() for w in weights
        ), options
    report("cuda_options", "")


def cuda_overlap(world: ranks.World, report: Callable[[str, str], None]) -> None:
    """overlap_step="forward" runs the update's kernels beside those of the forward pass."""
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(8))).cuda()
    parallel, optimizer = ddp.DDP(model, overlap_step="forward", bucket_mb=BLOCK_MB), FlatAdamW()
    x = torch.randn(8192, 4096, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(4):
            model(x).square().mean().backward()
            parallel.step(optimizer, 1e-3)
        parallel.flush()
        torch.cuda.synchronize()
    kernels = [
        e for e in profile.profiler.kineto_results.events() if e.device_type().name == "CUDA"
    ]
    spans = [
        (e.device_resource_id(), e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
        for e in kernels
    ]
    updates = [span for span in spans if "adam" in span[3].lower()]
    products = [span for span in spans if "gemm" in span[3].lower() or "cutlass" in span[3].lower()]
    overlaps = [
        (u, p) for u in updates for p in products if u[0] != p[0] and max(u[1], p[1]) < min(u[2],
        p[2])
    ]  # fmt: skip
    assert updates and products and overlaps, (len(updates), len(products))
    report("cuda_overlap", "")


def gloo_on_one_gpu(rank: int, port: int, folder: Path) -> None:
    """Two processes share one GPU, where NCCL would refuse.

    Gradients over gloo equal those of one process.
    """
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    reference, model, capture = new_model(0), new_model(rank).cuda(), Capture()
    parallel = ddp.DDP(model, bucket_mb=BLOCK_MB)
    all_x, all_y, x, y = batch(ranks.World(rank, 0, 2), 1)
    (reference(all_x, all_y) / 2).backward()
    model(x.cuda(), y.cuda()).backward()
    parallel.step(capture, 0.0)
    assert_close({name: g.cpu() for name, g in capture.grads.items()}, named_grads(reference), 1e-5)
    ranks.close()
    (folder / f"{rank}.ok").touch()


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("scenario", [cuda_rank, cuda_options, cuda_overlap])
def test_nccl(scenario: Callable, tmp_path: Path) -> None:
    reports, exit_codes = start_ranks(scenario, 1, tmp_path, device_type="cuda")
    assert scenario.__name__ in reports[0] and exit_codes == [0], reports


@pytest.mark.gpu
@needs_cuda
def test_two_processes_on_one_gpu(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(gloo_on_one_gpu, args=(port, tmp_path), nprocs=2)
    assert all((tmp_path / f"{rank}.ok").exists() for rank in range(2))
