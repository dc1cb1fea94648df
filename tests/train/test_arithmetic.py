"""A device that computes wrongly is refused. The "other device" is the CPU, with a planted mistake."""

import time
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from groundup.errors import UserError
from groundup.train import plan
from groundup.train.optim import Optimizer
from groundup.train.plan import check_arithmetic, compare_with_cpu

CPU = torch.device("cpu")


def compare(monkeypatch, mistake) -> None:
    """compare_with_cpu, with a mistake in the first of its two runs: that of the device."""
    run, mistakes = plan.small_run, iter([mistake])

    def small_run(*args):
        with next(mistakes, nullcontext()):
            return run(*args)

    monkeypatch.setattr(plan, "small_run", small_run)
    compare_with_cpu(CPU, torch.float32)


class Wrong(TorchDispatchMode):
    """An operation whose results are a twentieth off, or what else is given."""

    def __init__(self, operation: str, factor: float = 1.05) -> None:
        super().__init__()
        self.operation, self.factor = operation, factor

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if str(function).startswith(f"aten.{self.operation}."):
            # _fused_adamw_ returns None: its first argument is what it changes
            (args[0][0] if result is None else result).mul_(self.factor)
        return result


def test_the_cpu_agrees_with_itself_in_two_seconds():
    compare_with_cpu(CPU, torch.float32)
    begin = time.process_time()  # without what the first call imports
    compare_with_cpu(CPU, torch.bfloat16)
    assert time.process_time() - begin < 2
    check_arithmetic(torch.device("cuda"), torch.float32)  # of mps alone: cuda need not be there


@pytest.mark.parametrize("operation", ["mm", "embedding_dense_backward", "baddbmm", "silu", "_fused_adamw_"])
def test_a_wrong_operation_is_found(monkeypatch, operation):
    """Of forward, of backward, of Muon and of AdamW."""
    with pytest.raises(UserError, match="computes wrongly on device='cpu': the .*; use device='cpu'") as caught:
        compare(monkeypatch, Wrong(operation))
    assert "\n" not in str(caught.value)


def test_not_a_number_is_wrong(monkeypatch):
    with pytest.raises(UserError, match="the loss after 0 updates of a small model is nan"):
        compare(monkeypatch, Wrong("silu", float("nan")))


@pytest.mark.parametrize(("ignored", "usual", "n"), [("grad_scale", 1.0, 2), ("found_inf", 0.0, 3)])
def test_an_optimizer_that_ignores_clipping_or_skipped_steps_is_found(monkeypatch, ignored, usual, n):
    """As the fused AdamW of mps did before torch 2.13."""
    update = Optimizer.update

    def ignorant(self, bucket, **settings) -> None:
        update(self, bucket, **settings | {ignored: torch.tensor(usual)})

    with pytest.raises(UserError, match=f"the loss after {n} updates"):
        compare(monkeypatch, patch.object(Optimizer, "update", ignorant))
