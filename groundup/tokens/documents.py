"""Documents that share a row: where each begins, and what attention needs to keep to them.

`starts` (B, T) bool is true at the first token of each document; the first token of a row always begins one.
"""

import importlib
import math

import torch
from torch import Tensor


def documents_of(idx: Tensor, opener: int) -> Tensor:
    """Token ids (B, T) -> numbers of documents: each begins at an `opener` that is not behind another one, so what
    fills a packed row up is one document."""
    is_opener = idx == opener
    opens = is_opener.clone()
    opens[:, 1:] &= ~is_opener[:, :-1]
    return opens.cumsum(1)


def starts_of(documents: Tensor) -> Tensor:
    """Numbers of documents (B, T) -> starts: a document begins where the number changes."""
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return starts


def firsts_of(starts: Tensor) -> Tensor:
    """(B, T) int64: where in the row each token's document begins."""
    return (torch.arange(starts.shape[1], device=starts.device) * starts).cummax(1).values


def positions_of(starts: Tensor) -> Tensor:
    """(B, T) int64: each token's position in its document."""
    return torch.arange(starts.shape[1], device=starts.device) - firsts_of(starts)


def lengths_of(starts: Tensor) -> Tensor:
    """(B, T) int64: the length of each token's document."""
    segment = starts.cumsum(1) - 1
    return torch.zeros_like(segment).scatter_add_(1, segment, torch.ones_like(segment)).gather(1, segment)


def mask_of(starts: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, 1, T, T) to be added to the scores: 0 where position i may attend to j (not later, same document), else -inf.
    A bool mask would be converted to this in every layer."""
    segment = starts.cumsum(1)
    same = segment[:, None, :, None] == segment[:, None, None, :]
    return torch.zeros(same.shape, dtype=dtype, device=starts.device).masked_fill_(~same.tril(), -math.inf)


def borders_of(starts: Tensor, most: int) -> Tensor:
    """(most + 1,) int32: where each document begins among all N = B * T tokens, padded with N.

    The size is fixed, so that compiled blocks stay valid and the GPU need not report how many documents there are; the
    padding is documents of no tokens. More than `most` documents end the process with a message."""
    N = starts.numel()
    number = starts.flatten().cumsum(0)
    borders = torch.searchsorted(number, torch.arange(1, most + 2, device=starts.device), out_int32=True)
    torch._assert_async(borders[-1] == N, f"model: over {most} documents in {N} tokens: most_documents is too low")
    return borders


def can_border(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """True if flash attention, the only kernel behind varlen_attn, runs here."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or head_dim % 8 or head_dim > 256:
        return False
    importlib.import_module("torch.nn.attention.varlen")  # late: --help would wait a second for it
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)
