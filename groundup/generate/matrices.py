"""A copy of a model for inference: its matrices in the dtype of the products, on a CPU laid out
for fast ones.
"""

import copy
import math
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from groundup.generate.native import has_kernels, lay_out
from groundup.train.lora import LoRALinear, plain_linear
from model import Transformer

CHUNK_TOKENS = 512  # a prompt is read in pieces of this many tokens, which bounds memory


@torch.no_grad()
def for_inference(
    model: Transformer, dtype: torch.dtype, packed: bool, rows: int = 0, merged: bool = True
) -> Transformer:
    """Return a copy of the model in eval mode with eager blocks and matrices in `dtype`; tensors
    that need no change are shared with `model`.

    Blocks compiled for training would be compiled anew here. Embedding and norms keep their
    dtype, as in training. merged: add adapters to copies of their matrices. packed: on a CPU,
    lay the matrices out anew if memory suffices: in blocks for step.c (NativeLinear), or where
    that does not work PackedLinear."""
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    device = model.embed_tokens.weight.device
    same = {id(x): x for x in (*model.parameters(), *model.buffers())}
    compiled = {
        id(vars(part)["forward"]): None for part in model.modules() if "forward" in vars(part)
    }
    view = copy.deepcopy(model, same | compiled)
    for part in view.modules():
        vars(part).pop("forward", None)
    for parent in list(view.modules()):
        if isinstance(parent, LoRALinear):
            continue  # replaced already: a parent comes before its children
        for name, child in parent.named_children():
            if isinstance(child, LoRALinear) and merged:
                child = plain_linear(
                    nn.Parameter(child.merged_weight(), requires_grad=False), child.bias
                )
                setattr(parent, name, child)
    places = [
        (parent, name)
        for parent in view.modules()
        if not isinstance(parent, LoRALinear)
        for name, child in parent.named_children()
        if type(child) in (nn.Linear, LoRALinear)
    ]
    n_bytes = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    packed = packed and n_bytes < free_bytes(device) / 2
    if packed and has_kernels(model.cfg, device, dtype):
        lay_out(places, dtype)
        return view.eval()
    for place in places:
        linear = getattr(*place)
        if linear.weight.dtype != dtype:
            linear.weight = nn.Parameter(linear.weight.detach().to(dtype), requires_grad=False)
        if packed and PackedLinear.works(device, dtype, rows):
            setattr(*place, PackedLinear(linear.weight, linear.bias))
    return view.eval()


class PackedLinear(nn.Module):
    """A linear layer with its weight in oneDNN's blocked layout, as inductor lays out frozen
    weights: 1.6 to 2.3 times as fast as F.linear for 1 to 8 rows (2 cores with AVX-512); for one
    row in float32 0.5 to 1 on some Intel cores."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.bias = None if bias is None else bias.to(weight.dtype)
        # The layout for many rows is as fast for a few; the one for a single row is slow for more.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, CHUNK_TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)  # as autocast would
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    @staticmethod
    def works(device: torch.device, dtype: torch.dtype, rows: int = 0) -> bool:
        """Return whether it does, and pays, for this many rows (0 = unknown)."""
        if rows == 1 and dtype == torch.float32:
            return False
        available = torch.backends.mkldnn.is_available() and hasattr(
            torch.ops.mkldnn, "_reorder_linear_weight"
        )
        if dtype == torch.bfloat16 and available:  # oneDNN refuses it on processors without AVX-512
            available = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and available


def free_bytes(device: torch.device) -> float:
    """Return the free memory of the device, infinity if unknown."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    path = Path("/proc/meminfo")
    if device.type != "cpu" or not path.exists():
        return math.inf
    lines = dict(line.split(":") for line in path.read_text(encoding="utf-8").splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])
