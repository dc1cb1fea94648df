"""optim.py against torch.optim.AdamW and torch.optim.Muon, and the schedules against hand
arithmetic.
"""

import contextlib
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz

import ddp
from configurator import defaults_of
from groundup.errors import UserError
from groundup.train.optim import (
    Optimizer,
    check_schedule,
    learning_rate_at,
    orthogonalize,
    row_scales,
    warmup_length,
)
from model import ModelConfig, Transformer

TINY = ModelConfig(vocab_size=64, block_size=16, n_layer=3, n_head=4, n_kv_head=2, n_embd=32)


def model_and_batch(seed: int = 0) -> tuple[Transformer, torch.Tensor]:
    torch.manual_seed(seed)
    return Transformer(TINY), torch.randint(0, 64, (4, 17))


def train(
    model: Transformer, tokens: torch.Tensor, kind: str, steps: int, clip: float = 0.0
) -> Optimizer:
    parallel = ddp.DDP(model)
    optimizer = Optimizer(parallel.buckets, kind, weight_decay=0.1)
    for step in range(1, steps + 1):
        (model(tokens[:, :-1], tokens[:, 1:]) / 64).backward()
        parallel.step(optimizer, lr=1e-3 * step, clip=clip)
    return optimizer


def is_muon(name: str, p: nn.Parameter) -> bool:
    return p.ndim == 2 and name.startswith("layers.")


class NorMuonOracle:
    """One matrix by algorithm 1 of arXiv:2510.05491 on torch's Newton-Schulz, with the bias of the
    average corrected. Of a wide matrix the columns are evened.
    """

    def __init__(self, p: nn.Parameter) -> None:
        self.p, self.t = p, 0
        self.momentum, self.mean_square = torch.zeros_like(p), torch.zeros(max(p.shape))

    @torch.no_grad()
    def step(self, lr: float, decay: float) -> None:
        self.t += 1
        self.momentum = 0.95 * self.momentum + 0.05 * self.p.grad
        x = _zeropower_via_newtonschulz(
            0.05 * self.p.grad + 0.95 * self.momentum, (3.4445, -4.775, 2.0315), 5, 1e-7
        )
        wide = x.shape[0] < x.shape[1]
        rows = (x.T if wide else x).float()
        self.mean_square = 0.95 * self.mean_square + 0.05 * (rows**2).mean(1)
        even = rows / (self.mean_square / (1 - 0.95**self.t)).sqrt()[:, None]
        even *= rows.norm() / even.norm()
        self.p.mul_(1 - lr * decay)
        self.p.sub_((even.T if wide else even) * lr * 0.2 * math.sqrt(max(x.shape)))


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_five_steps_equal_torch_optim(kind, clip):
    model, tokens = model_and_batch()
    oracle, _ = model_and_batch()
    train(model, tokens, kind, steps=5, clip=clip)

    named = list(oracle.named_parameters())
    matrices = [NorMuonOracle(p) for n, p in named if kind == "muon" and is_muon(n, p)]
    rest = [(n, p) for n, p in named if not (kind == "muon" and is_muon(n, p))]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for _, p in rest if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for _, p in rest if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    for step in range(1, 6):
        oracle.zero_grad()
        (oracle(tokens[:, :-1], tokens[:, 1:]) / 64).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(oracle.parameters(), clip)
        for group in adamw.param_groups:
            group["lr"] = 1e-3 * step
        adamw.step()
        for matrix in matrices:
            matrix.step(1e-3 * step, 0.1)

    # AdamW agrees to rounding. Muon's direction is computed in bfloat16, where rounding differs
    # between one matrix and a stack: 10 steps of up to 0.01 move a weight by at most 0.3, of which
    # bfloat16 leaves about 1 % open.
    for (name, p), q in zip(named, model.parameters(), strict=True):
        close = 3e-3 if kind == "muon" else 2e-6
        assert torch.allclose(p, q, atol=close), f"{name}: {(p - q).abs().max()}"


@pytest.mark.parametrize("shape", [(32, 48), (48, 32), (32, 32)])
def test_three_steps_of_one_matrix_equal_normuon(shape):
    torch.manual_seed(0)
    ours, theirs = (nn.Linear(shape[1], shape[0], bias=False) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    oracle = NorMuonOracle(theirs.weight)
    holder = nn.Module()
    holder.layers = nn.ModuleList([ours])
    parallel = ddp.DDP(holder)
    optimizer = Optimizer(parallel.buckets, "muon", weight_decay=0.1)
    for _ in range(3):
        grad = torch.randn(shape) * torch.randn(shape[0], 1).exp()
        theirs.weight.grad = grad.clone()
        oracle.step(0.02, 0.1)
        (ours.weight * grad).sum().backward()
        parallel.step(optimizer, lr=0.02)
    assert torch.allclose(ours.weight, theirs.weight, atol=1e-4)
    saved = optimizer.state_dict()["layers.0.weight"]["mean_square"]
    assert saved.shape == ((shape[0], 1) if shape[0] >= shape[1] else (1, shape[1]))
    assert torch.allclose(saved.flatten(), oracle.mean_square, rtol=1e-2)


def test_a_matrix_and_a_row_without_gradient_stay_finite():
    x, mean_square = torch.zeros(2, 4, 3), torch.zeros(2, 4, 1)
    x[0, 1:] = torch.randn(3, 3)
    for _ in range(3):
        y = x * row_scales(x, mean_square)
    assert torch.equal(y[1], x[1]) and torch.equal(y[0, 0], x[0, 0])
    assert torch.isclose(y[0].norm(), x[0].norm()) and torch.isclose(y[0, 1].norm(), y[0, 2].norm())


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 16, 40), (2, 40, 16)])
def test_orthogonalize_gives_singular_values_near_one_and_keeps_the_directions(shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    y = orthogonalize(x).float()
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    assert y.shape == x.shape
    values = torch.linalg.svdvals(y)
    assert values.min() > 0.5 and values.max() < 1.35  # the coefficients' known band
    assert ((u @ vh) * y).sum(dim=(1, 2)).div(values.sum(1)).min() > 0.95


def test_every_parameter_has_one_rule():
    model, _ = model_and_batch()
    optimizer = Optimizer(ddp.DDP(model).buckets, "muon")
    state = optimizer.state_dict()
    assert state.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        assert ("momentum" in state[name]) == is_muon(name, p), name
        key = "momentum" if is_muon(name, p) else "exp_avg"
        assert state[name][key].shape == p.shape


def test_norms_are_not_decayed():
    model, _ = model_and_batch()
    parallel = ddp.DDP(model)
    optimizer = Optimizer(parallel.buckets, "adamw", weight_decay=0.5)
    before = {n: p.clone() for n, p in model.named_parameters()}
    (
        sum(p.sum() for p in model.parameters()) * 0
    ).backward()  # zero gradient: only decay moves anything
    parallel.step(optimizer, lr=0.1)
    for name, p in model.named_parameters():
        factor = 1.0 if p.ndim < 2 else 1 - 0.1 * 0.5
        assert torch.allclose(p, before[name] * factor, atol=1e-7), name


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_without_a_finite_gradient_changes_nothing(kind, value):
    model, tokens = model_and_batch()
    parallel = ddp.DDP(model)
    optimizer = Optimizer(parallel.buckets, kind)
    (model(tokens[:, :-1], tokens[:, 1:]) / 64).backward()
    parallel.step(optimizer, lr=1e-3)
    weights = [p.clone() for p in model.parameters()]
    state = {n: {k: v.clone() for k, v in s.items()} for n, s in optimizer.state_dict().items()}
    (model(tokens[:, :-1], tokens[:, 1:]) / 64).backward()
    model.layers[1].mlp.up_proj.weight.grad[3, 5] = value
    parallel.step(optimizer, lr=1e-3, clip=1.0)
    assert parallel.found_inf == 1
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    for name, saved in optimizer.state_dict().items():
        assert all(torch.equal(saved[k], state[name][k]) for k in saved), name
    (model(tokens[:, :-1], tokens[:, 1:]) / 64).backward()
    parallel.step(optimizer, lr=1e-3)
    assert parallel.found_inf == 0
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_by_name_survives_another_bucket_layout(kind):
    model, tokens = model_and_batch()
    optimizer = train(model, tokens, kind, steps=3)
    saved = {n: {k: v.clone() for k, v in s.items()} for n, s in optimizer.state_dict().items()}
    other, _ = model_and_batch()
    other.load_state_dict(model.state_dict())
    parallel = ddp.DDP(other, bucket_mb=1e-3)  # every block a bucket of its own
    resumed = Optimizer(parallel.buckets, kind, weight_decay=0.1)
    resumed.load_state_dict(saved)
    for name, state in resumed.state_dict().items():
        assert all(torch.equal(state[k], saved[name][k]) for k in state), name


def test_state_of_another_optimizer_is_refused():
    model, tokens = model_and_batch()
    saved = train(model, tokens, "adamw", steps=1).state_dict()
    other, _ = model_and_batch()
    with pytest.raises(UserError, match="resume with the optimizer it was saved with"):
        Optimizer(ddp.DDP(other).buckets, "muon").load_state_dict(saved)


# ---- schedules: peak 1.0, min 0.1, 10 steps of warm-up, horizon 110 ------------------------------


def lr(step, schedule, max_steps=110, **keys):
    return learning_rate_at(step, schedule, 1.0, 0.1, 10, max_steps, **keys)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "wsd"])
def test_warm_up_is_linear_and_never_zero(schedule):
    assert [lr(step, schedule) for step in (1, 5, 10)] == pytest.approx([1 / 11, 5 / 11, 10 / 11])
    assert learning_rate_at(1, schedule, 1.0, 0.1, 0, 100) > 0.9  # no warm-up: the peak at once


@pytest.mark.parametrize(
    ("schedule", "step", "value"),
    [
        ("constant", 11, 1.0),
        ("constant", 500, 1.0),
        ("cosine", 60, 0.55),
        ("cosine", 35, 0.1 + 0.45 * (1 + math.sqrt(0.5))),
        ("cosine", 110, 0.1),
        ("cosine", 300, 0.1),
        ("linear", 60, 0.55),
        ("linear", 35, 0.775),
        ("linear", 110, 0.1),
        ("linear", 111, 0.1),
        ("wsd", 11, 1.0),
        ("wsd", 90, 1.0),
        ("wsd", 100, 0.55),
        ("wsd", 110, 0.1),
    ],
)
def test_schedule_values_by_hand(schedule, step, value):
    assert lr(step, schedule) == pytest.approx(value)


def test_warm_up_is_steps_or_a_share():
    assert [warmup_length(x, 300) for x in (0, 0.05, 0.999, 1, 40.0)] == [0, 15, 300, 1, 40]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_last_update_is_one_at_a_min_lr_of_0(schedule):
    rates = [learning_rate_at(step, schedule, 1.0, 0.0, 0, 100) for step in (98, 99, 100)]
    assert rates[0] > rates[1] > rates[2] > 0.1 * rates[1]


SCHEDULE = {"learning_rate": 1e-3, "min_lr": 1e-4, "warmup_steps": 0.05, "schedule": "cosine"}


@pytest.mark.parametrize(("changes", "says"), [
    ({"min_lr": 0.01}, "min_lr=0.01 is above learning_rate=0.001, the peak; add --min_lr=0$"),
    ({"warmup_steps": 11.0}, "warmup_steps=11 is longer than the run, max_steps=10; add --warmup_steps=1$"),
    ({"min_lr": 0.01, "schedule": "constant"}, ""),
    ({"warmup_steps": 10.0}, ""),
    ({"warmup_steps": 0.999}, ""),
])  # fmt: skip
def test_settings_of_the_learning_rate_that_contradict_each_other(changes, says):
    with pytest.raises(UserError, match=says) if says else contextlib.nullcontext():
        check_schedule(SCHEDULE | changes, 10)


CONFIGS = sorted(Path("config").glob("*.py"))


@pytest.mark.parametrize("config", CONFIGS, ids=[path.stem for path in CONFIGS])
@pytest.mark.parametrize("max_steps", [1, 5, 20])
def test_a_shortened_run_needs_at_most_one_addition_which_is_named(config, max_steps):
    """Each file of config/ with --max_steps=5, say, and with what the error tells to add."""
    settings = {"learning_rate": 1.0, "warmup_steps": 0.03, "schedule": "cosine"} | defaults_of(config)
    try:
        check_schedule(settings, max_steps)
    except UserError as error:
        key, value = re.search(r"; add --(\w+)=([\d.]+)$", str(error)).groups()
        check_schedule(settings | {key: float(value)}, max_steps)


def test_decay_fraction_of_wsd():
    assert lr(60, "wsd", decay_fraction=0.5) == pytest.approx(1.0)
    assert lr(85, "wsd", decay_fraction=0.5) == pytest.approx(0.55)
