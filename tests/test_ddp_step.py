"""When and where ddp.py updates: deferred, on arrival, in shards; its hooks, what they send, and
its error messages.

As in test_ddp.py, a check is a function of a World that asserts, for any number of ranks. The
global batch is the same for every number of ranks, so that their results can be compared too.
"""

import functools
import gc
import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_ddp import (
    BLOCK_MB,
    Capture,
    D,
    Llama,
    T,
    V,
    WireLog,
    assert_close,
    assert_raises_on_all_ranks,
    assert_same_on_all_ranks,
    digest,
    named_grads,
    new_model,
    relative,
    start_ranks,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer

import ddp
from groundup.errors import UserError
from groundup.train import ranks
from groundup.train.optim import Optimizer, learning_rate_at
from groundup.train.powersgd import PowerSGD
from model import ModelConfig, Transformer

ROWS = 8  # sequences in the global batch


# ---- one training run, as a dictionary of all that it computes -----------------------------------


def mean_loss(world: ranks.World, model: nn.Module, seed: int) -> Tensor:
    """Return the loss of this rank's rows, so that the mean over ranks is that of all tokens."""
    data = torch.randint(V, (ROWS, T + 1), generator=torch.Generator().manual_seed(seed))
    mine = data.chunk(world.world_size)[world.rank]
    return model(mine[:, :-1].clone(), mine[:, 1:].clone()) * (world.world_size / (ROWS * T))


def setup(
    model: nn.Module | None = None, kind: str = "adamw", **options: object
) -> tuple[ddp.DDP, Optimizer]:
    """With one bucket per block, and Muon's products in full precision."""
    defaults = {"bucket_mb": BLOCK_MB, "whole_matrices": kind == "muon"}
    parallel = ddp.DDP(model or new_model(3), **defaults | options)
    muon_dtype = torch.promote_types(parallel.buckets[0].param.dtype, torch.float32)
    return parallel, Optimizer(parallel.buckets, kind, muon_dtype=muon_dtype)


def snapshot(parallel: ddp.DDP, optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of the weights, by name, and of the optimizer's state, by "name key"."""
    parallel.flush()
    state = optimizer.state_dict()
    found = {
        f"{name} {key}": t.clone() for name, values in state.items() for key, t in values.items()
    }
    return found | {name: p.detach().clone() for name, p in parallel.model.named_parameters()}


def assert_agree(
    got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float, pattern: str
) -> None:
    """Compare what has a matching name: weights .weight, norms and losses @step, states else."""
    names = [name for name in want if re.search(pattern, name) and name in got]
    assert names
    assert_close(
        {name: got[name] for name in names}, {name: want[name] for name in names}, tolerance
    )


def train(
    world: ranks.World,
    steps: int = 8,
    kind: str = "adamw",
    clip: float = 0.5,
    scaled: bool = False,
    dtype: torch.dtype = torch.float32,
    recompute: str = "",
    bad_step: int = -1,
    element: int = 0,
    model: Llama | None = None,
    first: int = 0,
    start: dict[str, Tensor] | None = None,
    **options: object,
) -> dict[str, Tensor]:
    """Two micro-batches per step, a schedule, an evaluation in between; at `bad_step` one element
    of the embedding's gradient is infinite on the last rank. Returns weights, optimizer state,
    norms and evaluation losses by name.
    """
    model = model or new_model(3).to(dtype)
    model.recompute = recompute
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=256.0, growth_interval=3)
    parallel, optimizer = setup(model, kind, **options)
    if start is not None:
        model.load_state_dict({name: start[name] for name, _ in model.named_parameters()})
        states = [(*name.split(), t) for name, t in start.items() if " " in name]
        optimizer.load_state_dict({
            name: {key: t for n, key, t in states if n == name} for name, _, _ in states
        })
    spike = torch.zeros_like(model.embed_tokens.weight)
    if bad_step >= 0:
        model.embed_tokens.weight.register_hook(lambda g: g + spike)
    found = {}
    for step in range(first, steps):
        lr = learning_rate_at(step + 1, "cosine", 3e-3, 1e-4, warmup=2, max_steps=20)
        if world.rank == world.world_size - 1:
            spike.view(-1)[element] = float("inf") if step == bad_step else 0.0
        look = (
            step == bad_step and options.get("overlap_step") != "forward"
        )  # there, looking would flush
        before = digest([*snapshot(parallel, optimizer).values()]) if look else ""
        parallel.expect_step(optimizer, lr)
        for micro_step in range(2):
            parallel.sync = micro_step == 1
            scaler.scale(mean_loss(world, model, 2 * step + micro_step) / 2).backward()
        found[f"norm@{step}"] = parallel.step(optimizer, lr, clip, scaler).nan_to_num(posinf=-1.0)
        assert parallel.found_inf.item() == float(step == bad_step)
        if look:
            assert before == digest([*snapshot(parallel, optimizer).values()])
        if step % 4 == 1 and recompute != "reentrant":
            with torch.no_grad():
                found[f"loss@{step}"] = mean_loss(world, model, 1000)
    found |= snapshot(parallel, optimizer)
    assert_same_on_all_ranks(digest([t for name, t in found.items() if "loss@" not in name]))
    return found


# ---- the moment of the update --------------------------------------------------------------------


def check_overlap_is_exact(world: ranks.World) -> None:
    """Weights, moments, norms and losses have the bits of overlap_step="off"."""
    variants = [
        ("forward", {"kind": "muon", "zero1": True, "bad_step": 2, "steps": 4}),
        ("backward", {"clip": 0.0, "kind": "muon", "zero1": True, "steps": 3}),
        ("forward", {"clip": 0.0, "bucket_mb": 0.0, "steps": 3}),
        ("forward", {"scaled": True, "bad_step": 2, "steps": 4, "recompute": "saved"}),
        ("forward", {"recompute": "reentrant", "dtype": torch.bfloat16, "steps": 3}),
        ("backward", {"clip": 0.0, "steps": 3, "recompute": "saved"}),
    ]
    for overlap, variant in variants if world.world_size > 1 else variants[:2]:
        assert_close(train(world, overlap_step=overlap, **variant), train(world, **variant), 0.0)


def stepped(world: ranks.World, **options: object) -> tuple[ddp.DDP, list[Tensor]]:
    """After one step; and the weights before it."""
    parallel, optimizer = setup(**options)
    mean_loss(world, parallel.model, 0).backward()
    old = [bucket.param.clone() for bucket in parallel.buckets]
    parallel.step(optimizer, 1e-2)
    return parallel, old


def check_update_is_deferred(world: ranks.World) -> None:
    """After step() only what forward needs first is new.

    Forward, or flush(), brings the rest up to date.
    """
    for finish in ("forward", "flush"):
        parallel, old = stepped(world, overlap_step="forward")
        late, soon = parallel.buckets[: -ddp.PREFETCH], parallel.buckets[-ddp.PREFETCH :]
        assert len(late) == 3 and all(
            b.state is ddp.State.READY and torch.equal(b.param, old[b.index]) for b in late
        )
        assert all(
            b.state is ddp.State.WAITING and not torch.equal(b.param, old[b.index]) for b in soon
        )
        parallel.flush() if finish == "flush" else mean_loss(world, parallel.model, 0)
        for b in parallel.buckets:
            assert (
                b.state is ddp.State.WAITING
                and all(p.grad is None for p in b.params)
                and not torch.equal(b.param, old[b.index])
            )


def check_weights_used_too_early(world: ranks.World) -> None:
    """Weights that are used past their modules' hooks would be old: refused before sending."""
    h, text = torch.ones(1, T, D), "was used before its update: call modules"
    for zero1 in (False, True):
        model = stepped(world, overlap_step="forward", zero1=zero1)[0].model
        assert_raises_on_all_ranks(model.layers[2].forward(h).sum().backward, "layers.2.", text)
        model = stepped(world, overlap_step="forward", zero1=zero1)[0].model
        assert_raises_on_all_ranks(
            model.lm_head.weight.sum().backward, "lm_head.weight", text, "flush() before"
        )
    if (
        world.world_size > 1
    ):  # the embedding's shards of the other ranks are awaited by its own hook
        model = stepped(world, zero1=True)[0].model
        assert_raises_on_all_ranks(
            model.embed_tokens.weight.sum().backward, "embed_tokens.weight", text
        )
        model = stepped(world, zero1=True)[0].model
        mean_loss(
            world, model.forward, 0
        ).backward()  # so a method of the model may be called instead of the model


def check_updates_on_arrival(world: ranks.World) -> None:
    """After expect_step() a bucket that has arrived is updated while backward still runs."""
    for expected in (True, False):
        parallel, updated = setup(overlap_step="backward")[0], []
        optimizer = SimpleNamespace(
            update=lambda bucket, *_, updated=updated: updated.append(bucket.index)
        )

        def until_arrived(grad: Tensor, bucket: ddp.Bucket = parallel.buckets[0]) -> None:
            travels = dist.is_initialized() and bucket.state is ddp.State.IN_FLIGHT
            while travels and not bucket.has_arrived():
                time.sleep(0.001)

        parallel.model.embed_tokens.weight.register_hook(until_arrived)  # the last gradient
        if expected:
            parallel.expect_step(optimizer, 1e-2)
        mean_loss(world, parallel.model, 0).backward()
        assert (0 in updated) == (expected and dist.is_initialized()), updated
        parallel.step(optimizer, 1e-2)
        parallel.flush()
        assert sorted(updated) == list(range(5))


def check_step_on_arrival_refused(world: ranks.World) -> None:
    """Whatever needs all gradients before the first update.

    The message says why and what to use instead.
    """
    why = "updates a bucket before the others", "forward"
    for factor, arguments, texts in (
        (1.0, (1e-3, 1.0), (*why, "cannot clip to the global norm")),
        (
            1.0,
            (1e-3, 0.0, torch.amp.GradScaler("cpu")),
            (*why, "cannot skip a step that overflows"),
        ),
        (1.0, (1e-2,), ("another optimizer or lr than expect_step()",)),
        (
            float("inf"),
            (1e-3,),
            ("step 1", "not finite", "last checkpoint", "overlap_step='forward'"),
        ),
    ):
        parallel, optimizer = setup(overlap_step="backward")
        parallel.expect_step(optimizer, 1e-3)
        (mean_loss(world, parallel.model, 0) * (factor if world.rank == 0 else 1.0)).backward()
        assert_raises_on_all_ranks(functools.partial(parallel.step, optimizer, *arguments), *texts)
    powersgd = functools.partial(setup, hook=PowerSGD())
    assert_raises_on_all_ranks(lambda: powersgd(overlap_step="backward"), *why, "PowerSGD's errors")
    assert_raises_on_all_ranks(
        lambda: powersgd(zero1=True), "powersgd", "zero1=True", "use one of the two"
    )
    own = functools.partial(
        setup, hook=lambda bucket: iter(())
    )  # would take the norm of a shard for that of the whole
    assert_raises_on_all_ranks(lambda: own(zero1=True), "this hook", "zero1=True")
    assert_raises_on_all_ranks(lambda: setup(overlap_step="on"), "off, forward, backward, got 'on'")


def check_zero1_equals_plain(world: ranks.World) -> None:
    """Weights and moments, in float64 to its rounding; in float32 weights and norms, with clipping
    and a step that all skip although only the first or the last rank's shard holds the infinity.
    """
    cases = [("muon", 0), ("adamw", -1)]  # check_zero1_equals_torch has more of AdamW
    for kind, element in cases if world.world_size > 1 else cases[:1]:
        if element == 0:
            # Without clipping: the norm, and so the coefficient, is float32, whose last bit depends
            # on the shards
            plain, sharded = (
                train(world, 4, kind, 0.0, dtype=torch.float64, zero1=zero1)
                for zero1 in (False, True)
            )
            assert_agree(sharded, plain, 1e-13, "^[^@]*$")
        options = {"scaled": element == 0, "bad_step": 2, "element": element}
        assert_agree(
            train(world, 4, kind, zero1=True, **options),
            train(world, 4, kind, **options),
            1e-6,
            "@|weight$",
        )
    parallel, _ = setup(zero1=True)
    if world.world_size > 1:
        with pytest.raises(
            UserError, match="whole matrices, but a shard ends inside one; pass whole_matrices=True"
        ):
            Optimizer(parallel.buckets, "muon")


def check_zero1_equals_torch(world: ranks.World) -> None:
    """ZeroRedundancyOptimizer(AdamW) with torch's DDP and clip_grad_norm_, in float64."""
    for clip, tolerance in ((0.0, 1e-13), (0.5, 1e-6)):
        parallel, optimizer = setup(new_model(3).double(), zero1=True)
        reference = new_model(3).double()
        theirs = nn.parallel.DistributedDataParallel(reference)
        matrices, vectors = (
            [p for p in reference.parameters() if (p.ndim > 1) == wanted]
            for wanted in (True, False)
        )
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        sharded = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.95))
        for step in range(5):
            mean_loss(world, parallel.model, step).backward()
            sharded.zero_grad()
            mean_loss(world, theirs, step).backward()
            want = nn.utils.clip_grad_norm_(reference.parameters(), clip or float("inf"))
            sharded.step()
            assert relative(parallel.step(optimizer, 1e-3, clip), want) < 1e-6
        want = {name: p.detach() for name, p in reference.named_parameters()}
        assert_agree(snapshot(parallel, optimizer), want, tolerance, "weight$")


def check_state_moves_between_world_sizes(world: ranks.World) -> None:
    """What all ranks saved equals one process's, which continues from it to the same result, and
    the reverse.
    """
    one = ranks.World(rank=0, local_rank=0, world_size=1)
    for kind in ("muon",) if world.world_size == 4 else ("adamw", "muon"):
        run = functools.partial(train, kind=kind, clip=0.0, dtype=torch.float64)
        half = run(world, 2, zero1=True)
        with mock.patch.object(
            dist, "is_initialized", return_value=False
        ):  # a run without a process group
            alone, whole, continued = run(one, 2), run(one, 4), run(one, 4, first=2, start=half)
        for got, want in (
            (half, alone),
            (continued, whole),
            (run(world, 4, zero1=True, first=2, start=alone), whole),
        ):
            assert_agree(got, want, 1e-12, "^[^@]*$")


# ---- the same bits on any number of ranks --------------------------------------------------------


def added_in_pairs(terms: list[Tensor]) -> Tensor:
    """((t0 + t1) + (t2 + t3)) + ..., in words other than ddp.py's."""
    half = len(terms) // 2
    return added_in_pairs(terms[:half]) + added_in_pairs(terms[half:]) if half else terms[0]


def train_in_tree(world: ranks.World, model: nn.Module, **options: object) -> dict[str, Tensor]:
    """Two steps of eight micro-batches, of one row each, on any number of ranks.

    Return weights, optimizer state and norms by name, as `train`.
    """
    kind = options.pop("kind", "adamw")
    matrices = {"whole_matrices": kind == "muon"}
    parallel = ddp.DDP(model, ddp.InTree(), bucket_mb=BLOCK_MB, **matrices, **options)
    optimizer = Optimizer(parallel.buckets, kind, muon_dtype=torch.float32, one_by_one=True)
    n_own, found = ROWS // world.world_size, {}
    for step in range(2):
        data = torch.randint(V, (ROWS, T + 1), generator=torch.Generator().manual_seed(step))
        for micro_step in range(n_own):
            parallel.sync = micro_step == n_own - 1
            row = data[world.rank * n_own + micro_step][None]
            (model(row[:, :-1].clone(), row[:, 1:].clone()) / (ROWS * T)).backward()
        found[f"norm@{step}"] = parallel.step(optimizer, 1e-2, clip=0.1)
    return found | snapshot(parallel, optimizer)


def check_same_bits_on_any_number_of_ranks(world: ranks.World) -> None:
    """What one process computes whose gradients and squares are added in pairs by hand."""
    one = ranks.World(rank=0, local_rank=0, world_size=1)
    with mock.patch.object(ddp, "PIECE", 1024):  # a shard begins within a parameter
        for kind, overlap in (("adamw", "off"), ("muon", "forward")):
            with mock.patch.object(dist, "is_initialized", return_value=False):
                want = train_in_tree(one, new_model(3), kind=kind)
            for zero1 in (False, True) if kind == "adamw" else (True,):
                options = {"kind": kind, "zero1": zero1, "overlap_step": overlap}
                assert_close(train_in_tree(world, new_model(3), **options), want, 0.0)


def check_gradients_are_added_in_pairs(world: ranks.World) -> None:
    """Against gradients of single rows, added by hand; the norm against torch's."""
    data = torch.randint(V, (ROWS, T + 1), generator=torch.Generator().manual_seed(1))
    by_row = []
    for row in data.split(1):
        plain = new_model(3)
        (plain(row[:, :-1].clone(), row[:, 1:].clone()) / 7).backward()
        by_row.append(named_grads(plain))
    parallel, capture = setup(hook=ddp.InTree())[0], Capture()
    n_own = ROWS // world.world_size
    for micro_step in range(n_own):
        parallel.sync = micro_step == n_own - 1
        row = data[world.rank * n_own + micro_step][None]
        (parallel.model(row[:, :-1].clone(), row[:, 1:].clone()) / 7).backward()
    norm = parallel.step(capture, 0.0)
    assert_close(capture.grads, {k: added_in_pairs([g[k] for g in by_row]) for k in by_row[0]}, 0.0)
    every = torch.cat([grad.flatten() for grad in capture.grads.values()])
    assert relative(norm, every.double().norm()) < 1e-6
    in_order = {name: sum(grads[name] for grads in by_row) for name in by_row[0]}
    assert any(not torch.equal(in_order[name], capture.grads[name]) for name in in_order)


# ---- hooks, and what they send -------------------------------------------------------------------


def mean_grads(world: ranks.World, **options: object) -> dict[str, Tensor]:
    """The mean gradients of a batch as the optimizer gets them."""
    parallel, capture = setup(**options)[0], Capture()
    mean_loss(world, parallel.model, 0).backward()
    parallel.step(capture, 0.0)
    return capture.grads


def check_narrow_wire(world: ranks.World) -> None:
    """The mean to the wire's rounding, equal on all ranks and to torch's compression hooks."""
    plain = train(world, 4)
    for wire, tolerance, torchs in (
        ("fp16", 5e-4, default_hooks.fp16_compress_hook),
        ("bf16", 4e-3 * world.world_size**0.5, default_hooks.bf16_compress_hook),
    ):
        got = mean_grads(world, hook=ddp.Average(wire))
        assert_same_on_all_ranks(digest([*got.values()]))
        assert_close(got, mean_grads(world), tolerance)
        if world.world_size > 1:
            theirs = nn.parallel.DistributedDataParallel(new_model(3))
            theirs.register_comm_hook(
                None, lambda s, bucket, hook=torchs: hook(s, bucket)
            )  # else torch asks for NCCL
            mean_loss(world, theirs, 0).backward()
            # Two summands have no order; torch divides after rounding, which differs below
            # float16's normal numbers
            bitwise = world.world_size == 2 and wire == "bf16"
            assert_close(got, named_grads(theirs.module), 0.0 if bitwise else tolerance)
        narrow = train(world, 4, hook=ddp.Average(wire), zero1=True)
        assert_agree(narrow, train(world, 4, hook=ddp.Average(wire)), 1e-2, "weight$")
        assert_agree(narrow, plain, 1e-2, "weight$")


def summing(bucket: ddp.Bucket, goes_on: bool = False) -> Iterator:
    """A user's hook: one collective, the sum instead of the mean."""
    bucket.launch(dist.all_reduce, bucket.grad)
    yield ddp.State.IN_FLIGHT
    bucket.squared_norm = ddp.sum_of_squares(bucket.grad)
    yield ddp.State.REDUCED
    if goes_on:
        yield ddp.State.IN_FLIGHT


class Quantized:
    """A user's hook: integers in units of the largest element, found by a first collective."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __call__(self, bucket: ddp.Bucket) -> Iterator:
        largest = bucket.grad.abs().max()
        self.events.append(f"P{bucket.index}")
        bucket.launch(dist.all_reduce, largest, dist.ReduceOp.MAX)
        yield ddp.State.HALFWAY
        unit = largest / 2**20
        whole = (bucket.grad / unit).round().int()
        self.events.append(f"Q{bucket.index}")
        bucket.launch(dist.all_reduce, whole)
        yield ddp.State.IN_FLIGHT
        mean = whole * unit
        bucket.squared_norm = ddp.sum_of_squares(mean)
        yield ddp.State.REDUCED
        bucket.grad.copy_(mean)


def check_own_hooks(world: ranks.World) -> None:
    """A hook may have one collective, or a second that needs the first; none after the norm."""
    want, quantized = mean_grads(world), Quantized()
    assert_close(mean_grads(world, hook=summing), want, 1e-6)  # of what has been divided before
    assert_close(mean_grads(world, hook=quantized), want, 1e-4)
    assert quantized.events == "P0 P1 Q0 P2 Q1 P3 Q2 P4 Q3 Q4".split(), quantized.events
    forward = train(world, 6, hook=Quantized(), overlap_step="forward")
    assert_close(forward, train(world, 6, hook=Quantized()), 0.0)
    endless = functools.partial(summing, goes_on=True)
    assert_raises_on_all_ranks(
        lambda: mean_grads(world, hook=endless), "hook must end after the norm"
    )


class Wire(WireLog):
    """Notes (operation, bytes of the bucket or message, bytes that this rank sends to others)."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        if func.name() == "c10d::alltoall_base_":
            sent, theirs, mine = args[1], args[3], args[4]
            whole = sum(
                max(theirs, mine, key=lambda sizes: len(set(sizes)))
            )  # a bucket's shards; the other is even
            to_others = sum(mine) - mine[dist.get_rank()]
            self.events.append((
                "all_to_all",
                whole * sent.element_size(),
                to_others * sent.element_size(),
            ))
        elif func.namespace == "c10d":
            self.events.append((func.name(), args[0][0].nbytes, 0))
        return func(*args, **(kwargs or {}))


def check_bytes_on_the_wire(world: ranks.World) -> None:
    """Each step sends what the formulas say, in the same order on all ranks.

    Nothing while gradients are added up.
    """
    cases = [
        (False, "off", "fp16", 2),
        (False, "forward", "bf16", 2),
        (False, "backward", "none", 4),
        (True, "off", "none", 4),
        (True, "forward", "fp16", 2),
        (True, "backward", "bf16", 2),
    ]
    first, last = {1: (0, 1), 2: (0, 6)}.get(world.world_size, (3, 6))
    for zero1, overlap, wire, width in cases[first:last]:
        kind = "muon" if zero1 else "adamw"
        parallel, optimizer = setup(
            None, kind, zero1=zero1, overlap_step=overlap, hook=ddp.Average(wire)
        )
        want = [("c10d::allreduce_", 16, 0)]  # have all gradients arrived, is it to stop
        for bucket in parallel.buckets:
            total, own = bucket.param.numel(), bucket.own[1] - bucket.own[0]
            if zero1:
                want.append(("all_to_all", total * width, (total - own) * width))
                want.append(("all_to_all", total * 4, (world.world_size - 1) * own * 4))
            else:
                want.append(("c10d::allreduce_", total * width, 0))
        if zero1:
            want.append(("c10d::allreduce_", 4, 0))  # the squared norm
        for step in range(2):
            parallel.flush()
            with Wire() as log:
                parallel.sync = False
                mean_loss(world, parallel.model, step).backward()
                assert log.events == []
                parallel.sync = True
                parallel.expect_step(optimizer, 1e-3)
                mean_loss(world, parallel.model, step).backward()
                parallel.step(optimizer, 1e-3)
                parallel.flush()
            assert sorted(log.events) == (sorted(want) if dist.is_initialized() else [])
            assert_same_on_all_ranks([event[:2] for event in log.events])


def check_memory(world: ranks.World) -> None:
    """16 bytes per parameter, 8 + 8/N with ZeRO-1, and padding: no other tensors are alive."""

    def live_bytes() -> int:  # of all tensors of this process, but for scalars and other small ones
        gc.collect()
        storages = [
            t.untyped_storage() for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)
        ]
        return sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes() > 64}.values())

    def settled_bytes() -> int:  # a communication thread may hold a tensor a little longer
        readings = [live_bytes()]
        while len(readings) < 4 or (len(set(readings[-4:])) > 1 and len(readings) < 100):
            time.sleep(0.01)
            readings.append(live_bytes())
        return readings[-1]

    for zero1, overlap in ((False, "off"), (True, "forward"), (True, "backward")):
        gc.collect()
        gc.freeze()  # what there is already is not counted, nor looked at: all of torch is a lot
        parallel, optimizer = setup(zero1=zero1, overlap_step=overlap)
        for step in range(2):
            parallel.expect_step(optimizer, 1e-3)
            mean_loss(world, parallel.model, step).backward()
            parallel.step(optimizer, 1e-3)
        parallel.flush()
        n_params = sum(p.numel() for p in parallel.model.parameters())
        padded = sum(bucket.param.numel() for bucket in parallel.buckets)
        assert padded - n_params < 128 * world.world_size * len(parallel.buckets)
        share, moments = (
            padded // (world.world_size if zero1 else 1),
            (settled_bytes() - 8 * padded) / 8,
        )
        assert share - (padded - n_params) <= moments <= share, (
            f"{moments=} {share=} {padded=} {n_params=}"
        )
        assert ranks.all_reduce_sum(torch.tensor(moments)) == n_params * (
            1 if zero1 else world.world_size
        )
        del parallel, optimizer
        gc.unfreeze()


class Ticking(nn.Module):
    """Eight blocks, of 15 ms in forward and of 30 ms in backward before their gradients are ready,
    on a clock that else moves on only when somebody waits for the link.
    """

    def __init__(self, ms_per_bucket: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(8))
        self.now = self.link_free = 0.0
        self.bytes_per_ms = 4 * D * D / ms_per_bucket

    def advance(self, ms: float) -> None:
        self.now += ms

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            self.advance(15)
            x.register_hook(lambda _: self.advance(30))
        return x.square().mean()

    def issue(
        self, operation: str, function: Callable, *args: object, **kwargs: object
    ) -> SimpleNamespace | None:
        """Replace ranks.issue: messages queue up on the link and arrive by the clock."""
        size = max(t.nbytes for t in args if isinstance(t, Tensor))
        arrives = self.link_free = max(self.now, self.link_free) + size / self.bytes_per_ms
        work = function(*args, **kwargs)

        def wait() -> None:
            if work is not None:
                work.wait()
            self.now = max(self.now, arrives)

        return (
            wait()
            if work is None
            else SimpleNamespace(wait=wait, is_completed=lambda: self.now >= arrives)
        )


def virtual_time(ms_per_bucket: float, late: bool, **options: object) -> float:
    """What the third step takes by the clock, as a multiple of what it must take for when its
    gradients were ready. `late`: all buckets are launched when backward is over.
    """
    model, ready = Ticking(ms_per_bucket), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: ready.append(model.now))
    parallel, optimizer = setup(model, **options)
    with mock.patch.object(ranks, "issue", model.issue):
        for _ in range(3):
            begin = model.now
            parallel.expect_step(optimizer, 1e-3)
            loss = model(torch.ones(1, D))
            for bucket in parallel.buckets:
                if late:  # it waits for a gradient that never comes; step() launches it
                    bucket.missing.add(-1)
            loss.backward()
            ideal = model.now
            parallel.step(optimizer, 1e-3)
        end = model.now
        parallel.flush()
    done = begin
    for when in ready[-8:]:
        done = max(done, when) + ms_per_bucket
    return (end - begin) / (max(ideal, done) - begin)


def check_overlap(world: ranks.World) -> None:
    """A step takes its ideal time on a serial link, fast or slow, ZeRO-1's with its shards fetched
    during forward; launched after backward it does not.
    """
    for ms, overlap in itertools.product((10.0, 30.0, 60.0), ("off", "forward", "backward")):
        assert virtual_time(ms, False, overlap_step=overlap) < 1.001
        assert virtual_time(ms, True, overlap_step=overlap) > 1.15
    assert (
        virtual_time(10.0, False, zero1=True, overlap_step="forward") < 1.05
    )  # and the first shards
    assert virtual_time(10.0, True, zero1=True, overlap_step="forward") > 1.15


def check_recomputed_on_arrival(world: ranks.World) -> None:
    """Activation checkpointing runs blocks, and their hooks, once more in backward, when later ones
    are updated.
    """
    variant = {"clip": 0.0, "zero1": True, "steps": 3, "recompute": "saved"}
    assert_close(train(world, overlap_step="backward", **variant), train(world, **variant), 0.0)


def check_forward_before_step(world: ranks.World) -> None:
    """What backward has updated is only half of a step: a forward or a flush between is refused."""
    for use in ("forward", "flush"):
        parallel, optimizer = setup(overlap_step="backward", zero1=True)
        parallel.expect_step(optimizer, 1e-3)
        mean_loss(world, parallel.model, 0).backward()
        action = (
            parallel.flush
            if use == "flush"
            else functools.partial(mean_loss, world, parallel.model, 1)
        )
        assert_raises_on_all_ranks(action, "call step() before")


def check_rank_that_skips_blocks(world: ranks.World) -> None:
    """A rank that skips blocks gets an error with names: shards are fetched in one order."""
    parallel, optimizer = setup(Ticking(1.0), zero1=True, overlap_step="forward")
    for step in range(2):
        if step == 1 and world.rank == world.world_size - 1:
            layers = parallel.model.layers
            parallel.model.layers = nn.ModuleList([layers[0], layers[7]])
        parallel.model(torch.ones(1, D)).backward()
        if step == 0:
            parallel.step(optimizer, 1e-3)
    assert_raises_on_all_ranks(lambda: parallel.step(optimizer, 1e-3), "step 2", "layers.6.weight")


# ---- starting ranks ------------------------------------------------------------------------------

CHECKS = [check for name, check in list(globals().items()) if name.startswith("check_")]
OF_SEVERAL = (  # they compare a rank's share with the whole, which one process would do with itself
    check_zero1_equals_torch,
    check_overlap,
    check_state_moves_between_world_sizes,
    check_same_bits_on_any_number_of_ranks,
)
# What four ranks do that two do not: other shards, sums of other terms.
OF_FOUR = (
    check_zero1_equals_torch,
    check_same_bits_on_any_number_of_ranks,
    check_gradients_are_added_in_pairs,
    check_bytes_on_the_wire,
)


def run_checks(world: ranks.World, report: Callable[[str, str], None]) -> None:
    for check in OF_FOUR if world.world_size == 4 else CHECKS:
        check(world)
        report(check.__name__, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", [c for c in CHECKS if c not in OF_SEVERAL], ids=lambda check: check.__name__
)
def test_one_process(check: Callable) -> None:
    check(ranks.World(rank=0, local_rank=0, world_size=1))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(("kind", "scaled"), [("adamw", True), ("muon", False)])
def test_no_step_reads_a_value(kind: str, scaled: bool) -> None:
    """Tensors without values refuse to be read.

    On a GPU reading one waits for all that is queued.
    """
    with FakeTensorMode():
        model = Transformer(ModelConfig(V, 64, n_layer=2, n_head=4, n_kv_head=2, n_embd=64))
        model.delimiter_id = V - 1
        parallel, optimizer = setup(model, kind)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        x, loss_sum = torch.zeros(2, 64, dtype=torch.int64), torch.zeros(())
        for _ in range(2):
            parallel.expect_step(optimizer, 1e-3)
            for micro_step in range(2):
                parallel.sync = micro_step == 1
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(x, x) * (1 / 7)
                scaler.scale(loss).backward()
                loss_sum += loss.detach()
            norm = parallel.step(optimizer, lr=1e-3, clip=1.0, scaler=scaler)
        for value in (norm, loss_sum):
            with pytest.raises(DataDependentOutputException):
                value.item()


@pytest.mark.dist
@pytest.mark.parametrize("n", [2, 4])
def test_several_ranks(n: int, tmp_path: Path) -> None:
    """All checks in turn; the first that fails ends its rank, and with it the others."""
    reports, exit_codes = start_ranks(run_checks, n, tmp_path)
    assert all("end" in report for report in reports), [
        report.get("error", "no end") for report in reports
    ]
    assert exit_codes == [0] * n


def fail_in_step_4(world: ranks.World, report: Callable, lost: int, **options: object) -> None:
    """Train; in the fourth step rank `lost` dies."""
    parallel, optimizer = setup(**options)
    for step in range(6):
        if step == 3 and world.rank == lost:
            report("step 4", "")
            os.kill(os.getpid(), signal.SIGKILL)
        mean_loss(world, parallel.model, step).backward()
        parallel.step(optimizer, 1e-3)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("lost", "options", "operation"),
    [(0, {}, "all_reduce"), (1, {"zero1": True}, "all_to_all_single")],
)
def test_rank_that_fails(lost: int, options: dict, operation: str, tmp_path: Path) -> None:
    """One line says who, when, what and where."""
    scenario = functools.partial(fail_in_step_4, lost=lost, overlap_step="forward", **options)
    reports, _ = start_ranks(scenario, 2, tmp_path, timeout_s=30)
    assert "step 4" in reports[lost], reports
    text = reports[1 - lost]["error"][1]
    # With ZeRO-1 the shards that step 3 has updated are still to be fetched
    assert re.search(rf"LostRank: ddp: rank {1 - lost}: step [34]: {operation} of bucket ", text), (
        text
    )
    assert "(first: " in text and "another rank has died or is stuck" in text, text
