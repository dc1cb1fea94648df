"""A device without float64, as Apple's: what a function returns lives there until .cpu() fetches it."""

from collections.abc import Callable

import torch


class OnDevice(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs or {})
        if function is torch.Tensor.cpu:
            return out.as_subclass(torch.Tensor)
        if isinstance(out, OnDevice) and out.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return out


def on_device(function: Callable) -> Callable:
    """The function, whose tensors are on the device."""
    return lambda *args, **keys: tuple(t.as_subclass(OnDevice) for t in function(*args, **keys))
