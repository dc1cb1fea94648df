"""Is a device's arithmetic right? A small step of training, each operation repeated on the CPU.

Only mps is checked, before every run on it: none of our tests has run on a Mac, and operations of
mps have been wrong in some versions of torch and macOS.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ddp import MIB, make_buckets, sum_of_squares
from groundup.errors import UserError
from groundup.train.device import autocast
from groundup.train.optim import Optimizer
from model import ModelConfig, Transformer

CPU = torch.device("cpu")
# Largest difference, as a share of the largest number: several times what rounding makes.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def check_arithmetic(device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError if a step of training on mps, computed in `dtype`, differs from the CPU's."""
    if device.type == "mps":
        compare_with_cpu(device, dtype)


def compare_with_cpu(device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError with the first operation of a small step that is wrong on the device."""
    # Operation by operation, so that the error can name the one that is wrong.
    compared = ComparedWithCPU(device)
    with compared:
        found = small_step(device, dtype)
    # What the CPU does not have is checked by its effect.
    for name, expected in small_step(CPU, dtype).items():
        if not agree(found[name].cpu(), expected, dtype):
            not_compared = ", ".join(sorted(compared.only_there)) or "none"
            raise wrong(device, f"{name} of a step (operations that the CPU lacks: {not_compared})")


def small_step(device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Train a model of one block for one step: forward, backward, Muon and AdamW."""
    # The same weights and rows on both devices. The run's own random numbers stay as they are.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer(ModelConfig(96, 32, 1, n_head=4, n_kv_head=2, n_embd=64, qk_norm=True))
        rows = torch.randint(96, (2, 33))
    buckets = make_buckets(model.to(device), MIB, world_size=1)
    optimizer = Optimizer(buckets, "muon", muon_dtype=torch.float32)
    with autocast(device, dtype):
        loss = model(rows[:, :-1].to(device), rows[:, 1:].to(device))
    loss.backward()
    square = sum(sum_of_squares(bucket.grad) for bucket in buckets)
    grad_scale, found_inf = torch.tensor([2.0, 0.0], device=device).unbind()  # as if clipped
    for bucket in buckets:
        optimizer.update(bucket, lr=1e-2, grad_scale=grad_scale, found_inf=found_inf)
    # No weights: where a gradient is nearly zero, AdamW's update follows the sign of its rounding.
    return {"the loss": loss.detach(), "the squared norm of the gradient": square}


class ComparedWithCPU(TorchDispatchMode):
    """Within the context each operation runs on the CPU too. The first that differs is an error."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.only_there: set[str] = set()  # operations that the CPU does not have

    def __torch_dispatch__(
        self, function: Callable, types: tuple, args: tuple = (), kwargs: Mapping | None = None
    ) -> Any:
        kwargs = kwargs or {}
        cpu_args, cpu_kwargs = tree_map(on_cpu, (args, kwargs))  # before the operation changes any
        result = function(*args, **kwargs)
        # A view computes nothing; what is drawn, or not yet written, cannot be equal.
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        if function.is_view or is_random or "empty" in str(function):
            return result
        try:
            expected = function(*cpu_args, **cpu_kwargs)
        except NotImplementedError:
            self.only_there.add(str(function))
            return result
        # Also the arguments: in place, they are the result.
        found = tree_leaves((result, args, kwargs))
        for mine, theirs in zip(found, tree_leaves((expected, cpu_args, cpu_kwargs)), strict=True):
            if isinstance(mine, Tensor) and not agree(mine.cpu(), theirs, theirs.dtype):
                shapes = [tuple(t.shape) for t in tree_leaves(args) if isinstance(t, Tensor)]
                raise wrong(self.device, f"{function} of shapes {shapes}")
        return result


def on_cpu(value: Any) -> Any:
    """Return a copy of a tensor on the CPU, CPU for a device, and other arguments as they are."""
    if isinstance(value, Tensor):
        return value.detach().to(CPU, copy=True)
    return CPU if isinstance(value, torch.device) else value


def agree(mine: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two results are equal up to rounding in `dtype`."""
    # Integers and truth values are exact.
    if theirs.numel() == 0 or dtype not in TOLERANCE:
        return torch.equal(mine, theirs)
    mine, theirs = mine.double(), theirs.double()
    within = TOLERANCE[dtype] * theirs.abs().nan_to_num().max() + 1e-12
    both_nan = mine.isnan() & theirs.isnan()
    return bool(((mine == theirs) | ((mine - theirs).abs() <= within) | both_nan).all())


def wrong(device: torch.device, what: str) -> UserError:
    """Return the error about a wrong result."""
    text = f"config: torch {torch.__version__} computes wrongly on device={str(device)!r}: {what}"
    return UserError(f"{text} differs from the CPU; use device='cpu' or another version of torch")
