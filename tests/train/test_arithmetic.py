"""arithmetic.py: a wrong operation of a device is named. The "other device" is the CPU, with a planted mistake."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from groundup.errors import UserError
from groundup.train.arithmetic import CPU, check_arithmetic, compare_with_cpu


class Device(TorchDispatchMode):
    """The CPU as another device: an operation's first call of two is its own, the second that of the comparison."""

    def __init__(self, operation: str, mistake: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.operation, self.mistake, self.is_own = operation, mistake, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if str(function).startswith(f"aten.{self.operation}."):
            self.is_own = not self.is_own
            if self.is_own and isinstance(result, Tensor):
                result.copy_(self.mistake(result))
            elif self.is_own:  # _fused_adamw_ returns None: its first argument is what it changes
                args[0][0].copy_(self.mistake(args[0][0]))
        return result


def test_the_cpu_agrees_with_itself_in_two_seconds():
    compare_with_cpu(CPU, torch.float32)
    begin = time.process_time()  # without what the first call imports
    compare_with_cpu(CPU, torch.bfloat16)
    assert time.process_time() - begin < 2
    check_arithmetic(torch.device("cuda"), torch.float32)  # of mps alone: cuda need not be there


@pytest.mark.parametrize("operation", ["mm", "embedding_dense_backward", "baddbmm", "_fused_adamw_"])
def test_a_wrong_operation_is_named(operation):
    """Of forward, of backward, of Muon and of AdamW; one element off by a hundredth of the largest is enough."""

    def one_off(result: Tensor) -> Tensor:
        wrong = result.clone()
        wrong.view(-1)[-1] += 0.01 * result.abs().max() + 1e-6
        return wrong

    with Device(operation, one_off), pytest.raises(UserError, match=rf"device='cpu': aten\.{operation}\.") as caught:
        compare_with_cpu(CPU, torch.float32)
    assert "\n" not in str(caught.value) and "differs from the CPU; use device='cpu'" in str(caught.value)


def test_not_a_number_is_wrong():
    with Device("silu", lambda result: result * float("nan")), pytest.raises(UserError, match=r"aten\.silu\."):
        compare_with_cpu(CPU, torch.float32)


def test_what_the_cpu_does_not_have_is_found_by_its_effect():
    """An operation of the device alone, such as a fused attention."""

    class Without(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if str(function) != "aten.silu.default":
                return function(*args, **(kwargs or {}))
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 2:
                raise NotImplementedError
            return function(*args, **(kwargs or {})) * (3 if self.calls == 1 else 1)

    with Without(), pytest.raises(UserError, match=r"the loss .*CPU lacks: aten\.silu\.default\) differs"):
        compare_with_cpu(CPU, torch.float32)
