"""The key-value cache: what attention needs of earlier positions, so that generation computes each position once.

A call of the model computes new positions and keeps them:

    cache = KVCache(cfg, rows, max_length, device, dtype)
    model(idx, cache=cache.chunk(begin, T, rows))    # the same T positions of some rows: prompts, padded on the right
    model(idx, cache=cache.step(lengths, width))     # the next token (rows, 1) of every row
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from model import ModelConfig


class KVCache:
    """Keys and values of each layer, (rows, K, max_length + 1, D).

    The caller keeps the length of each row, so a finished row can be reused for another text while the others go on;
    nothing beyond a row's length is ever attended to. The last position is a spare one.
    """

    def __init__(self, cfg: ModelConfig, rows: int, max_length: int, device: torch.device | str, dtype: torch.dtype):
        shape = (rows, cfg.n_kv_head, max_length + 1, cfg.head_dim)
        self.max_length = max_length
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(cfg.n_layer)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(cfg.n_layer)]
        self.layers = self.keys + self.values
        self.span = torch.arange(max_length, device=device)

    def chunk(self, begin: int, T: int, rows: Tensor | None = None) -> "CacheChunk":
        """Positions begin to begin + T of the rows (n,) int64; None = all rows."""
        assert begin + T <= self.max_length, f"cache holds {self.max_length} positions, {begin + T} asked"
        return CacheChunk(self, begin, begin + T, slice(None) if rows is None else rows)

    def step(self, lengths: Tensor, width: int) -> "CacheStep":
        """The next position of each row. lengths (rows,) int64: below `width`, or max_length to leave a row unchanged.
        Attention costs as much as `width` positions."""
        return CacheStep(self.keys, self.values, lengths, self.span[:width])

    def copy_row(self, source: int, row: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to `row`."""
        for layer in self.layers:
            layer[row, :, :length] = layer[source, :, :length]

    def select(self, rows: Tensor, length: int) -> None:
        """Replace the first `length` positions of each row i by those of row rows[i]."""
        for layer in self.layers:
            layer[:, :, :length] = layer[rows, :, :length]


class CacheChunk:
    def __init__(self, cache: KVCache, begin: int, end: int, rows: Tensor | slice) -> None:
        self.cache, self.begin, self.end, self.rows = cache, begin, end, rows
        self.positions = cache.span[begin:end].unsqueeze(0)  # (1, T)
        self.mask = cache.span[:end] <= cache.span[begin:end].unsqueeze(1)  # (T, end)

    def layer(self, i: int) -> Callable:
        return partial(self.append, self.cache.keys[i], self.cache.values[i])

    def append(self, keys: Tensor, values: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (n, K, T, D); return keys and values of these rows from their beginning, (n, K, end, D)."""
        keys[self.rows, :, self.begin : self.end] = k
        values[self.rows, :, self.begin : self.end] = v
        return keys[self.rows, :, : self.end], values[self.rows, :, : self.end]


class CacheStep:
    def __init__(self, keys: list[Tensor], values: list[Tensor], lengths: Tensor, span: Tensor) -> None:
        self.keys, self.values, self.lengths, self.width = keys, values, lengths, span.shape[0]
        self.rows = torch.arange(lengths.shape[0], device=lengths.device)
        self.positions = lengths.clamp(max=self.width - 1).unsqueeze(1)  # (B, 1)
        self.mask = (span <= self.positions)[:, None, None]  # (B, 1, 1, width)

    def layer(self, i: int) -> Callable:
        return partial(self.append, i)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, K, 1, D) at each row's length; return keys and values (B, K, width, D)."""
        keys, values = self.keys[layer], self.values[layer]
        keys[self.rows, :, self.lengths] = k[:, :, 0]
        values[self.rows, :, self.lengths] = v[:, :, 0]
        return keys[:, :, : self.width], values[:, :, : self.width]
