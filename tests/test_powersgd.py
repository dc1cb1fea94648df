"""PowerSGD against plain loops after the paper, torch's powerSGD_hook, the uncompressed mean, and
algebra.

As in test_ddp.py a check is a function of a World that asserts: all run in this process and in 2
and 4 gloo processes.
"""

import copy
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import product
from pathlib import Path

import pytest
import test_ddp
import torch
import torch.distributed as dist
from test_ddp import (
    BLOCK_MB,
    Capture,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    digest,
    new_model,
    relative,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

import ddp
from groundup.train import ranks
from groundup.train.optim import Optimizer
from groundup.train.powersgd import PowerSGD

Grads = dict[str, Tensor]


# ---- models, gradients and a reference of our own ------------------------------------------------


class Matrices(nn.Module):
    """Parameters whose gradients are what the model is called with. Each may be a bucket."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {
            "a": (48, 32),
            "b": (48, 32),
            "c": (16, 8, 6),
            "d": (32, 40),
            "thin": (4, 64),
            "vector": (50,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, grads: Grads) -> Tensor:
        return torch.stack([(p * grads[name]).sum() for name, p in self.named_parameters()]).sum()


def powersgd(rank: int = 4, embedding: bool = True, **options: object) -> PowerSGD:
    """With embedding and head compressed too."""
    return PowerSGD(rank, embedding=embedding, **options)


def noise(model: nn.Module, world: ranks.World, step: int) -> list[Grads]:
    """Independent normal gradients for every rank, known to all of them."""
    generators = [
        torch.Generator().manual_seed(100 * step + rank) for rank in range(world.world_size)
    ]
    named = list(model.named_parameters())
    return [
        {name: torch.randn(p.shape, generator=g, dtype=p.dtype) for name, p in named}
        for g in generators
    ]


def mean(everyone: list[Grads]) -> Grads:
    return {name: sum(grads[name] for grads in everyone) / len(everyone) for name in everyone[0]}


class Paper:
    """arXiv:1905.13727, algorithms 1 and 2, with a loop over the ranks. The error is what the mean
    lacks of a rank's gradient; orthonormal columns come from an SVD (rotated ones, which changes no
    product).
    """

    def __init__(self, bases: Grads, n_ranks: int) -> None:
        self.q = bases
        self.errors: list[Grads] = [dict.fromkeys(bases, torch.zeros(())) for _ in range(n_ranks)]

    def step(self, everyone: list[Grads]) -> Grads:
        means = mean(everyone)
        for name, q in self.q.items():
            wanted = [
                grads[name].flatten(1) + e[name]
                for grads, e in zip(everyone, self.errors, strict=True)
            ]
            p = torch.linalg.svd(sum(d @ q for d in wanted), full_matrices=False).U
            self.q[name] = sum(d.T @ p for d in wanted) / len(wanted)
            sent = p @ self.q[name].T
            for e, d in zip(self.errors, wanted, strict=True):
                e[name] = d - sent
            means[name] = sent.view(means[name].shape)
        return means


def kept(hook: PowerSGD, key: str) -> Grads:
    """The errors ("error") or bases ("basis") by name."""
    return {name: state[key].clone() for name, state in hook.state_dict().items()}


def mean_error(hook: PowerSGD, world: ranks.World) -> Grads:
    return {
        name: ranks.all_reduce_sum(e) / world.world_size for name, e in kept(hook, "error").items()
    }


def train_llama(
    world: ranks.World,
    hook: Callable | None,
    steps: Iterable[int] = range(6),
    bucket_mb: float = BLOCK_MB,
    dtype: torch.dtype = torch.float32,
    saved: Iterable[dict] = (),
) -> list[Grads]:
    """What comes out in each step, all with the same weights.

    `saved` is loaded into the hook before.
    """
    model, capture, outputs = new_model(3).to(dtype), Capture(), []
    parallel = ddp.DDP(model, hook, bucket_mb=bucket_mb)
    if saved:
        hook.load_state_dict(saved)
    for step in steps:
        _, _, x, y = batch(world, step)
        (model(x, y) / y.numel()).backward()
        parallel.step(capture, 0.0)
        outputs.append(capture.grads)
        capture.grads = {}
    return outputs


def send(model: nn.Module, parallel: ddp.DDP, grads: Grads) -> Grads:
    """What comes out for this rank's `grads`; nothing while accumulating."""
    capture = Capture()
    model(grads).backward()
    if parallel.sync:
        parallel.step(capture, 0.0)
    return capture.grads


def check_equals_paper(world: ranks.World) -> None:
    """Also with tied and frozen weights, activation checkpointing and clipping.

    The norm is that of what comes out.
    """
    cases = [(8, 3, "reentrant", 0.1), (4, 4, "", 0.0), (2, 2, "saved", 0.0)]
    for rank, n_steps, recompute, clip in cases if world.world_size < 4 else cases[:1]:
        model, hook, capture = (
            new_model(3, tied=bool(recompute)).double(),
            powersgd(rank, seed=rank),
            Capture(),
        )
        model.layers[1].up_proj.requires_grad_(not recompute)
        reference = copy.deepcopy(model)
        model.recompute = recompute
        parallel = ddp.DDP(model, hook, bucket_mb=BLOCK_MB)
        weights = {
            name: p for name, p in model.named_parameters() if p.requires_grad and p.ndim == 2
        }
        names = {
            name for name, p in weights.items() if torchs._should_compress(*p.shape, rank, 2)[0]
        }
        assert hook.state_dict().keys() == names and len(names) == (18 if recompute else 20)
        paper = Paper(kept(hook, "basis"), world.world_size)
        for step in range(n_steps):
            x, y, my_x, my_y = batch(world, step)
            everyone = []
            for rows in zip(x.split(2), y.split(2), strict=True):
                reference.zero_grad()
                (reference(*rows) / my_y.numel()).backward()
                everyone.append(test_ddp.named_grads(reference))
            want = paper.step(everyone)
            (model(my_x, my_y) / my_y.numel()).backward()
            norm = parallel.step(capture, 0.0, clip)
            assert (
                relative(norm, torch.cat([g.flatten() for g in want.values()]).norm()) < 1e-5
                and norm > 0.2
            )
            if clip:
                want = {name: g * (clip / norm) for name, g in want.items()}
            assert_close(
                capture.grads, want, 1e-6 if clip else 1e-10
            )  # the clip coefficient is float32
        assert_close(mean_error(hook, world), mean(paper.errors), 1e-10)


def check_buckets(world: ranks.World) -> None:
    """How the model is cut does not matter: equal bits, but for the order in which gloo adds up
    four terms. Nor does accumulation: the error is added once per step, not once per backward.
    """
    dtype, tolerance = (torch.float64, 1e-13) if world.world_size > 2 else (torch.float32, 0.0)
    runs = [train_llama(world, powersgd(4), bucket_mb=mb, dtype=dtype) for mb in (BLOCK_MB, 100.0)]
    for many, few in zip(*runs, strict=True):
        assert_close(many, few, tolerance)
    models = [Matrices().to(dtype) for _ in range(2)]
    parallels = [
        ddp.DDP(m, powersgd(2), bucket_mb=mb)
        for m, mb in zip(models, (BLOCK_MB, 100.0), strict=True)
    ]
    assert [len(parallel.buckets) for parallel in parallels] == [6, 1]
    for step in range(4):
        parts = [noise(models[0], world, 10 * step + i)[world.rank] for i in range(3)]
        for i, grads in enumerate(parts):
            parallels[0].sync = i == 2
            many = send(models[0], parallels[0], grads)
        total = {name: sum(grads[name] for grads in parts) for name in grads}
        assert_close(many, send(models[1], parallels[1], total), tolerance)


def check_low_rank(world: ranks.World) -> None:
    """A mean of rank 4 passes unharmed, at once, also after steps without a gradient; matrices that
    would not shrink are sent as they are.
    """
    for n_zeros in (0, 2):
        model, hook, share = Matrices(), powersgd(4), 4 // world.world_size
        parallel, everyone = ddp.DDP(model, hook, bucket_mb=BLOCK_MB), noise(model, world, 1)
        for grads, name in product(everyone, ("a", "b", "c", "d")):
            g = grads[name].flatten(1)
            grads[name] = (g[:, :share] @ g[:share]).view(grads[name].shape)
        for _ in range(n_zeros):
            output = send(
                model, parallel, {name: torch.zeros_like(p) for name, p in model.named_parameters()}
            )
            assert not any(g.any() for g in output.values())
        for tolerance in (
            1e-4,
            1e-4,
            1e-5,
        ):  # a bad first basis loses digits, which come in the second step
            assert_close(send(model, parallel, everyone[world.rank]), mean(everyone), tolerance)
        for name, error in kept(hook, "error").items():
            assert error.norm() < 1e-5 * everyone[0][name].norm()
    assert hook.state_dict().keys() == {"a", "b", "c", "d"}
    hook = powersgd(64)
    assert_close(train_llama(world, hook, (0,))[0], train_llama(world, None, (0,))[0], 0.0)
    assert hook.state_dict() == {}


def check_conservation(world: ranks.World) -> None:
    """What has not come out yet is the mean of the ranks' errors, to the last digit, also where
    gradients vanish.
    """
    model, hook = Matrices().double(), powersgd(2)
    parallel = ddp.DDP(model, hook, bucket_mb=BLOCK_MB)
    owed = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(10):
        size = 0.0 if step in (0, 7) else 1.0
        everyone = [
            {name: g * size for name, g in grads.items()} for grads in noise(model, world, step)
        ]
        output, truth = send(model, parallel, everyone[world.rank]), mean(everyone)
        owed = {name: owed[name] + truth[name] - output[name] for name in owed}
        left = mean_error(hook, world)
        for name, missing in owed.items():
            assert (
                missing - (left[name].view(missing.shape) if name in left else 0)
            ).abs().max() < 1e-12, (step, name)
    assert owed["a"].norm() > 10


def check_error_is_bounded(world: ranks.World) -> None:
    """The error settles; the paper's, whose ranks also keep what they differ by, walks away."""
    model, hook = nn.Linear(32, 24, bias=False), powersgd(2)
    parallel, capture = ddp.DDP(model, hook=hook), Capture()
    paper = Paper(kept(hook, "basis"), world.world_size)
    rms = {}
    for step in range(201):
        everyone = noise(model, world, step)
        model.weight.backward(everyone[world.rank]["weight"])
        parallel.step(capture, 0.0)
        paper.step(everyone)
        rms[step] = [
            e["weight"].square().mean().sqrt().item()
            for e in (kept(hook, "error"), paper.errors[world.rank])
        ]
    assert 1 < rms[200][0] < 1.2 * rms[50][0], rms
    assert world.world_size == 1 or rms[200][1] > 1.5 * rms[50][1]


def check_start_step(world: ranks.World) -> None:
    """Until then, and outside the blocks with embedding=False, the plain mean to the bit."""
    plain = train_llama(world, None)
    for hook, first in ((powersgd(4, start_step=3), 3), (powersgd(4, embedding=False), 0)):
        outputs = train_llama(world, hook)
        assert len(hook.state_dict()) == (20 if hook.embedding else 18)
        for step, name in product(range(6), plain[0]):
            got, want = outputs[step][name], plain[step][name]
            if step < first or not (hook.embedding or name.startswith("layers.")):
                assert torch.equal(got, want), (step, name)
            else:
                assert (
                    (relative(got, want) > 1e-2)
                    if name in hook.state_dict()
                    else (relative(got, want) < 1e-6)
                )


def check_ranks_stay_equal(world: ranks.World) -> None:
    """4 steps: equal weights and bases on all ranks, errors of their own, and equal bits if the
    update is deferred to the next forward. During backward, or with ZeRO-1, it is refused with the
    reason.
    """
    for kind, dtype in (
        ("adamw", torch.float32),
        ("muon", torch.float32),
        ("adamw", torch.bfloat16),
    ):
        results = []
        for overlap_step in ("off", "forward"):
            model, hook = new_model(world.rank).to(dtype), powersgd(4, start_step=2)
            parallel = ddp.DDP(
                model, hook=hook, overlap_step=overlap_step, whole_matrices=kind == "muon"
            )
            optimizer, norms = Optimizer(parallel.buckets, kind), []
            for step in range(4):
                _, _, x, y = batch(world, step)
                (model(x, y) / y.numel()).backward()
                norms.append(parallel.step(optimizer, 2e-4 * (step + 1), clip=0.5).item())
            parallel.flush()
            mine, shared = (
                list(kept(hook, "error").values()),
                [*model.parameters(), *kept(hook, "basis").values()],
            )
            assert_same_on_all_ranks((norms, digest(shared)))
            assert len(set(ranks.gather_objects(digest(mine)))) == world.world_size
            results.append((norms, digest(mine), digest(shared)))
        assert results[0] == results[1] and len(set(norms)) == 4
        assert {e.dtype for e in kept(hook, "error").values()} == {torch.float32}
    for option, text in (
        ({"zero1": True}, "reduce-scatter"),
        ({"overlap_step": "backward"}, "skip"),
    ):
        refused = partial(ddp.DDP, Matrices(), hook=powersgd(), **option)
        test_ddp.assert_raises_on_all_ranks(refused, text)


def check_not_finite(world: ranks.World) -> None:
    """One bad element on one rank: nothing changes anywhere, the scale halves, and training goes on
    as if the step had not been. The loss scale leaves no trace.
    """

    def train(seeds: list[int], bad: float = 0.0, where: str = "") -> str:
        """Weights, moments and errors at the end.

        A negative seed is a step with a bad first element in `where`.
        """
        model, poison = new_model(3), torch.zeros(())
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=2.0**30, growth_interval=2, enabled=where != ""
        )
        hook = powersgd(4, scaler=scaler)
        parallel = ddp.DDP(model, hook, bucket_mb=BLOCK_MB)
        optimizer = Optimizer(parallel.buckets)
        if where and world.rank == world.world_size - 1:
            p = model.get_parameter(where)
            first = torch.arange(p.numel()).view(p.shape) == 0
            p.register_hook(lambda g: torch.where(first, g + poison, g))

        def state() -> list[Tensor]:
            moments = [t for s in optimizer.state_dict().values() for t in s.values()]
            return [
                t.clone() for t in (*model.parameters(), *moments, *kept(hook, "error").values())
            ]

        for seed in seeds:
            poison.fill_(bad if seed < 0 else 0.0)
            before, scale = digest(state() + list(kept(hook, "basis").values())), scaler.get_scale()
            _, _, x, y = batch(world, abs(seed))
            scaler.scale(model(x, y) / y.numel()).backward()
            parallel.step(optimizer, 1e-3, 1.0, scaler)
            unchanged = digest(state() + list(kept(hook, "basis").values())) == before
            assert (
                unchanged == parallel.found_inf.item() == (scaler.get_scale() < scale) == (seed < 0)
            )
            assert_same_on_all_ranks((scaler.get_scale(), digest(list(model.parameters()))))
        assert not where or scaler.get_scale() == 2.0**32  # grew twice, halved, grew again
        return digest(state())

    want = train([1, 2, 3, 4, 5, 6])
    for bad, where in (
        (float("inf"), "layers.1.up_proj.weight"),
        (float("nan"), "layers.1.norm2.weight"),
    ):
        assert train([1, 2, 3, 4, -9, 5, 6], bad, where) == want, (bad, where)


def check_resume(world: ranks.World) -> None:
    """A resume has equal bits; with other ranks, the mean error; at another rank, new bases."""
    resume = partial(train_llama, world, dtype=torch.float64)
    straight, hook = resume(powersgd(4), range(5)), powersgd(4)
    resume(hook, range(3))
    saved = hook.state_dict()
    for states, tolerance in (([saved], 0.0), (ranks.gather_objects(saved), 1e-10)):
        again = resume(powersgd(4, seed=1), range(3, 5), saved=states)
        for got, want in zip(again, straight[3:], strict=True):
            assert_close(got, want, tolerance)
    fresh, wider = powersgd(8), powersgd(8)
    resume(fresh, ())
    resume(wider, (), saved=[saved])
    assert_close(kept(wider, "error"), kept(hook, "error"), 0.0)
    assert_close(kept(wider, "basis"), kept(fresh, "basis"), 0.0)


def check_wire_and_memory(world: ranks.World) -> None:
    """The formula's bytes in the order P0, P1, Q0, P2, Q1, ..., on all ranks; memory: the state."""
    for embedding in (True, False):
        model, hook, capture = new_model(0), powersgd(4, embedding=embedding), Capture()
        parallel = ddp.DDP(model, hook, bucket_mb=BLOCK_MB)
        vocab, d = model.lm_head.weight.shape
        edge = [(vocab, d)] * embedding
        matrices = [edge, *[[(d, d)] * 4 + [(3 * d, d), (d, 3 * d)]] * 3, edge]
        vectors = [d, 2 * d, 2 * d, 2 * d, 0]
        left = [
            4 * (4 * sum(n for n, _ in shapes) + raw)
            for shapes, raw in zip(matrices, vectors, strict=True)
        ]
        right = [4 * sum(4 * m for _, m in shapes) for shapes in matrices]
        if not embedding:  # the plain mean sends buckets whole
            left[0], left[4] = parallel.buckets[0].grad.nbytes, parallel.buckets[4].grad.nbytes
        order = [
            left[0],
            left[1],
            right[0],
            left[2],
            right[1],
            left[3],
            right[2],
            left[4],
            right[3],
            right[4],
        ]
        sent = [size for size in order if size] if dist.is_initialized() else []
        for step in range(2):
            with test_ddp.WireLog() as log:
                for micro_step in range(2):
                    assert log.events == []
                    parallel.sync = micro_step == 1
                    _, _, x, y = batch(world, 2 * step + micro_step)
                    model(x, y).backward()
                assert len(log.events) == max(
                    0, len(sent) - embedding
                )  # all but Q4 were launched in backward
                parallel.step(capture, 0.0)
            assert [size for _, size in log.events] == sent + [16] * dist.is_initialized(), (
                log.events,
                order,
            )
            assert_same_on_all_ranks(log.events)
        owned = {
            t.untyped_storage().data_ptr(): t
            for s in hook.state_dict().values()
            for t in s.values()
        }
        n_bytes = sum(t.untyped_storage().nbytes() for t in owned.values())
        assert n_bytes == 4 * sum(n * m for n, m in sum(matrices, [])) + sum(right)


CHECKS = [
    check_equals_paper,
    check_buckets,
    check_low_rank,
    check_conservation,
    check_error_is_bounded,
    check_start_step,
    check_ranks_stay_equal,
    check_not_finite,
    check_resume,
    check_wire_and_memory,
]
CHECKS_OF_FOUR = [check_equals_paper, check_resume, check_wire_and_memory]


def run_checks(world: ranks.World, report: Callable[[str, str], None]) -> None:
    for check in CHECKS if world.world_size <= 2 else CHECKS_OF_FOUR:
        check(world)
        report(check.__name__, "")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[list, list]]:
    """Return outcome(n): reports and exit codes of n ranks that run all checks when first asked."""
    return cache(
        lambda n: test_ddp.start_ranks(run_checks, n, tmp_path_factory.mktemp(f"ranks{n}"))
    )


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_one_process(check: Callable) -> None:
    test_ddp.test_one_process(check)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "n"),
    [
        (name, n)
        for n, checks in ((2, CHECKS), (4, CHECKS_OF_FOUR))
        for name in [*(c.__name__ for c in checks), "end"]
    ],
)
def test_several_ranks(outcome: Callable, name: str, n: int) -> None:
    reports, exit_codes = outcome(n)
    for rank, report in enumerate(reports):
        assert name in report, f"rank {rank}: {report.get('error', (0, 'not reached'))[1]}"
    assert name != "end" or exit_codes == [0] * n


# ---- torch's hook --------------------------------------------------------------------------------


def compare_to_torch(world: ranks.World, report: Callable[[str, str], None]) -> None:
    """10 compressed steps in float64 from the same basis. Torch gets one bucket: with two its hook
    deadlocks on gloo, with more it aborts. It orders matrices by shape, and its bucket is final
    from the third step on.
    """
    model, hook, capture = new_model(3).double(), powersgd(4, start_step=2), Capture()
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=1000)
    names = {p: name for name, p in theirs.module.named_parameters()}
    parallel = ddp.DDP(model, hook, bucket_mb=BLOCK_MB)
    start = kept(hook, "basis")

    def prefilled(
        state: torchs.PowerSGDState, bucket: dist.GradBucket
    ) -> torch.futures.Future[Tensor]:
        if state.iter == 2:
            assert bucket.index() == 0 and bucket.is_last()
            shapes = defaultdict(list)
            for p in bucket.parameters():
                if names[p] in start:
                    shapes[p.shape].append(p)
            ordered = sum(shapes.values(), [])
            state.q_memory_dict[0] = torch.cat([start[names[p]].flatten() for p in ordered])
            state.p_memory_dict[0] = torch.empty(
                sum(4 * p.shape[0] for p in ordered), dtype=torch.float64
            )
        return torchs.powerSGD_hook(state, bucket)

    state = torchs.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    theirs.register_comm_hook(state, prefilled)
    for step in range(12):
        _, _, x, y = batch(world, step)
        theirs.zero_grad()
        (model(x, y) / y.numel()).backward()
        (theirs(x, y) / y.numel()).backward()
        parallel.step(capture, 0.0)
        assert_close(capture.grads, test_ddp.named_grads(theirs.module), 1e-10)
    assert state.compression_stats()[0] > 5
    report("equal", "")


@pytest.mark.dist
def test_equals_torch(tmp_path: Path) -> None:
    reports, _ = test_ddp.start_ranks(compare_to_torch, 2, tmp_path)
    assert all("equal" in report for report in reports), reports


def test_start_step_after_resuming() -> None:
    """Compression goes on in the first step after a resume, also where it had begun late."""
    model = Matrices()
    parallel = ddp.DDP(model, hook=powersgd(2, start_step=3))
    parallel.n_updates = 5
    grads = noise(model, ranks.World(0, 0, 1), 0)[0]
    assert relative(send(model, parallel, grads)["a"], grads["a"]) > 0.1


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 1, 2**31, 2**32, 1_790_000_000_123_456_789, 2**63 - 1])
def test_any_seed_that_the_setting_may_have(seed: int) -> None:
    model, hook = Matrices(), powersgd(2, seed=seed)
    ddp.DDP(model, hook=hook)
    basis = hook.state_dict()["a"]["basis"]
    assert torch.linalg.matrix_rank(basis) == 2
    if -(2**31) <= seed < 2**31:  # as torch draws from the seed and the name, side by side
        generator = torch.Generator().manual_seed(seed * 2**32 + zlib.crc32(b"a"))
        assert torch.equal(basis, torch.randn(basis.shape, generator=generator))
