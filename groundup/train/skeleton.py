"""A model of any size at once: its parameters have names and shapes, but none that is large has memory.

    with Unfilled():
        model = skeleton(cfg)

model.py alone says which parameters a model has. Whoever edits it need not repeat that anywhere.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from model import ModelConfig, Transformer

ALLOCATE = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
SMALL = 2**14  # elements: of these, constructors may read the values, and 1000 layers of vectors are 130 MB
FILL = ("normal_", "uniform_", "kaiming_uniform_", "fill_", "zero_")


class Unfilled(TorchFunctionMode):
    """What is allocated within has no memory if it is large, and nothing is drawn for it. The rest (rotary tables) is
    computed as ever: on the meta device that, as any drawing, would import torch._dynamo, which takes a second."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in ALLOCATE:
            without = func(*args, **kwargs | {"device": "meta"})
            return without if without.numel() > SMALL else func(*args, **kwargs)
        if getattr(func, "__name__", "") in FILL:
            filled = (*args, *kwargs.values())[0]
            if filled.is_meta:
                return filled
        return func(*args, **kwargs)


def skeleton(cfg: ModelConfig) -> Transformer:
    """Return Transformer(cfg). Call within `Unfilled()`."""
    try:
        return Transformer(cfg)
    except RuntimeError:  # an edit of model.py computes with two tensors, one of which has no memory
        with torch.device("meta"):
            return Transformer(cfg)
