"""Does a device compute as the CPU does? A few steps of a small model on both.

Only mps is checked, before every run on it: none of our tests has run on a Mac, and operations of
mps have been wrong in some versions of torch and macOS.
"""

import torch

from ddp import MIB, make_buckets, sum_of_squares
from groundup.errors import UserError
from groundup.train.device import autocast
from groundup.train.optim import Optimizer
from model import ModelConfig, Transformer

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-4}  # as a share of the value; several times what rounding makes
TOLERANCE_OF_HALVES = 1e-2  # with bfloat16 or float16

# (divisor of the gradients, 1 = skip the update): a plain update, a clipped and a skipped one.
# AdamW's update depends on the divisor only if it changes.
UPDATES = [(1.0, 0.0), (8.0, 0.0), (1.0, 1.0)]


def check_arithmetic(device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError if mps, computing in `dtype`, trains another model than the CPU does."""
    if device.type == "mps":
        compare_with_cpu(device, dtype)


def compare_with_cpu(device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError with the first value of a small run that differs on the device."""
    tolerance = TOLERANCE.get(dtype, TOLERANCE_OF_HALVES)
    found, expected = small_run(device, dtype), small_run(CPU, dtype)
    for name, value in expected.items():
        if not abs(found[name] - value) <= tolerance * abs(value):  # NaN is wrong, too
            raise UserError(
                f"config: torch {torch.__version__} computes wrongly on device={str(device)!r}: "
                f"{name} of a small model is {found[name]:.6g}, on the CPU {value:.6g}; "
                "use device='cpu' or another version of torch"
            )


def small_run(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Train a model of one block with Muon and AdamW; return losses and norms by name."""
    # The same weights and rows on both devices. The run's own random numbers stay as they are.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer(ModelConfig(96, 32, 1, n_head=4, n_kv_head=2, n_embd=64, qk_norm=True))
        rows = torch.randint(96, (2, 33)).to(device)
    buckets = make_buckets(model.to(device), MIB, world_size=1)
    optimizer = Optimizer(buckets, "muon", muon_dtype=torch.float32)
    values = {}
    for i, update in enumerate([*UPDATES, None]):
        with autocast(device, dtype):
            loss = model(rows[:, :-1], rows[:, 1:])
        values[f"the loss after {i} updates"] = loss.item()
        if update is None:
            break
        for bucket in buckets:
            bucket.grad.zero_()
        loss.backward()
        norm = sum(sum_of_squares(bucket.grad) for bucket in buckets).sqrt()
        values[f"the gradient's norm after {i} updates"] = norm.item()
        grad_scale, found_inf = torch.tensor(update, device=device).unbind()
        for bucket in buckets:
            optimizer.update(bucket, lr=1e-2, grad_scale=grad_scale, found_inf=found_inf)
    return values
