"""The key-value cache: what attention needs of earlier positions, so that each is computed once.

A call of the model computes new positions and keeps them:

    cache = KVCache(cfg, rows, max_length, device, dtype)
    model(idx, cache=cache.chunk(begin, T, rows))        # the same T positions of some rows
    model(idx, cache=CacheStep([cache.part(lengths)]))   # the next token (rows, 1) of every row

`Rows` holds texts that come, grow and go, in several of these: texts of up to 256 tokens in one, of
up to 512 in the next, and so on. So a long text costs only its own row.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from groundup.kernels.attention import (
    additive_mask,
    attention_by_length,
    cached_attention,
    has_varlen_lengths,
)
from model import ModelConfig

MIN_LENGTH = 256  # positions of the smallest cache
MIN_WIDTH = 64  # attention reads a multiple of so many positions


class Part(NamedTuple):
    """The next position of the first n rows of one cache."""

    keys: list[Tensor]  # of each layer, as in KVCache
    values: list[Tensor]
    lengths: Tensor  # (n,) int64: where the position is; max_length leaves a row unchanged
    span: Tensor  # (width,) the positions that are attended to


class KVCache:
    """Keys and values of each layer, (rows, K, max_length + 1, D); the last position is spare.

    The caller keeps the length of each row, beyond which nothing is attended to. So a finished row
    can be reused for another text while the others go on."""

    def __init__(
        self,
        cfg: ModelConfig,
        rows: int,
        max_length: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ):
        # Zeros, as masked positions are multiplied by 0, and 0 times NaN is NaN
        shape = (rows, cfg.n_kv_head, max_length + 1, cfg.head_dim)
        self.max_length = max_length
        self.keys = [empty(shape, torch.device(device), dtype).zero_() for _ in range(cfg.n_layer)]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        self.span = torch.arange(max_length, device=device)
        self.few_widths = False  # for CUDA graphs, of which there is one for each width
        self.texts: list[Row | None] = []  # the text in each row, if Rows keeps this cache

    @property
    def layers(self) -> list[Tensor]:
        return self.keys + self.values

    @property
    def n_bytes(self) -> int:
        return sum(x.nbytes for x in self.layers)

    def chunk(self, begin: int, T: int, rows: Tensor | None = None) -> "CacheChunk":
        """Positions begin to begin + T of the rows (n,) int64; None = all rows."""
        assert begin + T <= self.max_length, f"{begin + T} of {self.max_length} positions"
        return CacheChunk(self, begin, begin + T, slice(None) if rows is None else rows)

    def part(self, lengths: list[int]) -> Part:
        """Return the next position of the first rows, for a CacheStep; -1 skips a row."""
        # Read no more positions than the longest text has, up to a multiple of MIN_WIDTH.
        n_widths = max(lengths) // MIN_WIDTH + 1
        if self.few_widths:
            n_widths = 1 << (n_widths - 1).bit_length()  # a power of two
        width = min(MIN_WIDTH * n_widths, self.max_length)
        # A row to be skipped writes to the spare position.
        at = [n if n >= 0 else self.max_length for n in lengths]
        lengths = torch.tensor(at, device=self.span.device)
        return Part(self.keys, self.values, lengths, self.span[:width])

    def resize(self, rows: int) -> None:
        """Have this many rows, of which the first are kept."""
        for layers in (self.keys, self.values):
            for i, x in enumerate(layers):
                layers[i] = empty((rows, *x.shape[1:]), x.device, x.dtype).zero_()
                layers[i][: len(x)] = x[:rows]


def empty(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a layer (rows, K, length, D). For `attention_by_length` the heads of a position lie
    side by side."""
    rows, K, length, D = shape
    if has_varlen_lengths(device, dtype, D):
        return torch.empty(rows, length, K, D, device=device, dtype=dtype).transpose(1, 2)
    return torch.empty(shape, device=device, dtype=dtype)


class CacheChunk:
    """Positions begin to end of some rows of a cache, in which prompts are read (prefill)."""

    def __init__(self, cache: KVCache, begin: int, end: int, rows: Tensor | slice) -> None:
        self.cache, self.begin, self.end, self.rows = cache, begin, end, rows
        self.positions = cache.span[begin:end].unsqueeze(0)  # (1, T)
        # A token sees itself, and all before it.
        visible = cache.span[:end] <= cache.span[begin:end].unsqueeze(1)  # (T, end)
        self.mask = additive_mask(visible, cache.keys[0].dtype)

    def layer(self, i: int) -> Callable:
        return partial(self.attend, self.cache.keys[i], self.cache.values[i])

    def attend(self, keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v (n, K, T, D); return the attention of q (n, H, T, D) to these rows."""
        keys[self.rows, :, self.begin : self.end] = k
        values[self.rows, :, self.begin : self.end] = v
        # The earlier pieces of the prompts are in the cache already.
        known = keys[self.rows, :, : self.end], values[self.rows, :, : self.end]
        return cached_attention(q, *known, self.mask)


class CacheStep:
    """The next position of rows of one or more caches (decode), one behind another in the batch."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self.sizes = [part.lengths.shape[0] for part in parts]
        device = parts[0].lengths.device
        self.rows = [torch.arange(n, device=device) for n in self.sizes]
        # The position of each row, (n, 1); a row that is left unchanged has the last one
        at = [part.lengths.clamp(max=part.span.shape[0] - 1).unsqueeze(1) for part in parts]
        self.attentions = [attention_of(*each) for each in zip(parts, at, strict=True)]
        self.positions = at[0] if len(at) == 1 else torch.cat(at)  # (B, 1)

    def layer(self, i: int) -> Callable:
        return partial(self.attend, [(part.keys[i], part.values[i]) for part in self.parts])

    def attend(
        self, layers: list[tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Store k, v (B, K, 1, D) at each row's length; return the attention of q (B, H, 1, D).

        layers: of each cache the keys and values of a layer."""
        found = []
        # The batch is divided by caches: each has rows of its own length.
        new = [(x,) if len(self.parts) == 1 else x.split(self.sizes) for x in (q, k, v)]
        each = zip(layers, self.parts, self.rows, self.attentions, *new, strict=True)
        for (keys, values), part, rows, attention, q, k, v in each:
            n = q.shape[0]
            keys[rows, :, part.lengths] = k[:, :, 0]
            values[rows, :, part.lengths] = v[:, :, 0]
            found.append(attention(q, keys[:n], values[:n]))
        return found[0] if len(found) == 1 else torch.cat(found)


def attention_of(part: Part, at: Tensor) -> Callable:
    """Return a function of q, keys and values: the attention of each row up to its place at (n,
    1)."""
    keys = part.keys[0]
    if keys.stride(1) > keys.stride(2):  # the heads lie apart, see `empty`
        mask = additive_mask(part.span <= at, keys.dtype)[:, None, None]  # (n, 1, 1, width)
        return partial(attend_by_mask, mask=mask)
    # Rows as one long sequence (varlen attention), each with its own length
    starts = torch.arange(len(at) + 1, device=at.device, dtype=torch.int32) * keys.shape[2]
    lengths, width = (at[:, 0] + 1).int(), part.span.shape[0]
    return partial(attention_by_length, starts=starts, lengths=lengths, width=width)


def attend_by_mask(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    width = mask.shape[-1]
    return cached_attention(q, keys[:, :, :width], values[:, :, :width], mask)


# ---- texts that come and go ----------------------------------------------------------------------


class Row:
    """A text in row `slot` of a cache. cached_ids: those whose keys and values are there."""

    def __init__(self) -> None:
        self.cache: KVCache | None = None
        self.slot = -1
        self.cached_ids: list[int] = []

    def views(self, n: int) -> list[Tensor]:
        """Return the keys, then the values, of the first n positions: of each layer (K, n, D)."""
        return [layer[self.slot, :, :n] for layer in self.cache.layers]

    def copy(self, source: "Row", n: int) -> None:
        """Take the first n positions from another text, which begins with the same ids."""
        for to, of in zip(self.views(n), source.views(n), strict=True):
            to.copy_(of)

    def move(self, cache: KVCache, slot: int) -> None:
        """Go to a row of a cache, with what is cached."""
        n = len(self.cached_ids)
        had = self.views(n) if self.cache else []
        self.cache, self.slot = cache, slot
        for to, of in zip(self.views(n), had, strict=False):
            to.copy_(of)

    def saved(self, cfg: ModelConfig) -> "Row":
        """Return a copy in a cache of its own, as long as the text."""
        row, n, like = Row(), len(self.cached_ids), self.cache.keys[0]
        row.move(KVCache(cfg, 1, n, like.device, like.dtype), 0)
        row.cached_ids = self.cached_ids
        row.copy(self, n)
        return row


def row_length(cfg: ModelConfig, length: int) -> int:
    """Return the positions of the row that a text of `length` tokens is given."""
    # Powers of two: a text that grows moves a few times only.
    return min(max(MIN_LENGTH, 1 << (length - 1).bit_length()), cfg.block_size)


class Rows:
    """The caches of texts, by their max_length. Texts that end leave no gap: no step computes idle
    rows. fixed: this many rows in one cache, with gaps, for a recorded step; 0 = as many as there
    are texts."""

    def __init__(
        self, cfg: ModelConfig, device: torch.device, dtype: torch.dtype, fixed: int = 0
    ) -> None:
        self.cfg, self.fixed, self.where = cfg, fixed, (device, dtype)
        self.caches: dict[int, KVCache] = {}

    def n_bytes(self) -> int:
        return sum(cache.n_bytes for cache in self.caches.values())

    def fit(self, row: Row, length: int, together: int = 1) -> None:
        """Give a text room for `length` tokens; it may move to another cache. together: texts
        that come at once."""
        size, old, slot = row_length(self.cfg, length), row.cache, row.slot
        if old is not None and size <= old.max_length:
            return
        # A recorded step has one cache, which keeps its rows.
        if self.fixed:
            self.widen(size)
            if old is None:
                (cache,) = self.caches.values()
                row.move(cache, cache.texts.index(None))
                cache.texts[row.slot] = row
            return
        # Others get the next row of the cache of their length, which grows to twice its rows.
        if size not in self.caches:
            self.caches[size] = KVCache(self.cfg, together, size, *self.where)
        cache = self.caches[size]
        if len(cache.texts) == len(cache.keys[0]):
            cache.resize(len(cache.texts) + max(together, len(cache.texts)))
        row.move(cache, len(cache.texts))
        cache.texts.append(row)
        if old is not None:
            self.leave(old, slot)

    def widen(self, size: int) -> None:
        """Give the only cache room for texts of `size` tokens."""
        old = next(iter(self.caches.values()), None)
        if old is not None and size <= old.max_length:
            return
        # A longer copy takes its place, with all that it held.
        cache = KVCache(self.cfg, self.fixed, size, *self.where)
        cache.texts = old.texts if old else [None] * self.fixed
        for new, had in zip(cache.layers, old.layers if old else (), strict=False):
            new[:, :, : old.max_length] = had[:, :, : old.max_length]
        for row in filter(None, cache.texts):
            row.cache = cache
        cache.few_widths = True
        self.caches = {size: cache}

    def leave(self, cache: KVCache, slot: int) -> None:
        """Free a row; its place goes to the last text of its cache."""
        if self.fixed:
            cache.texts[slot] = None
            return
        # Rows stay without gaps: the last text moves into the free row.
        last = cache.texts.pop()
        if slot < len(cache.texts):
            cache.texts[slot] = last
            last.move(cache, slot)
        if not cache.texts:
            del self.caches[cache.max_length]
        elif 4 * len(cache.texts) <= len(cache.keys[0]):  # and shrinks to half of them
            cache.resize(2 * len(cache.texts))

    def step(self, lengths: dict[Row, int]) -> tuple[list[Part], list[Row | None]]:
        """Return the parts of a CacheStep of the next position of these texts, and the text of each
        row of the batch. Other texts in the same caches are left as they are."""
        parts, rows = [], []
        for cache in self.caches.values():
            # Caches without one of these texts have no part in the step.
            at = [lengths.get(row, -1) for row in cache.texts]
            if max(at) >= 0:
                parts.append(cache.part(at))
                rows += cache.texts
        return parts, rows


# ---- texts that begin alike ----------------------------------------------------------------------


def n_shared(a: list[int], b: list[int]) -> int:
    """Return how many ids two texts begin with together."""
    # One comparison of lists is far faster than a loop in Python.
    n = min(len(a), len(b))
    return n if a[:n] == b[:n] else next(i for i in range(n) if a[i] != b[i])


class PrefixIndex:
    """Texts in alphabetical order of their ids.

    Of all texts, one of the two beside a new text's place begins most like it."""

    def __init__(self) -> None:
        self.sorted: list[tuple[list[int], Row]] = []
        self.ids: dict[Row, list[int]] = {}  # the oldest first

    def add(self, row: Row, ids: list[int]) -> None:
        self.ids[row] = ids
        insort(self.sorted, (ids, row), key=itemgetter(0))

    def remove(self, row: Row) -> None:
        place = self.place(self.ids[row])
        # Several rows may have the same ids.
        while self.sorted[place][1] is not row:
            place += 1
        del self.sorted[place], self.ids[row]

    def place(self, ids: list[int]) -> int:
        return bisect_left(self.sorted, ids, key=itemgetter(0))

    def beside(self, ids: list[int]) -> list[tuple[list[int], Row]]:
        """Return the texts that stand before and behind the place of `ids`, with their rows."""
        place = self.place(ids)
        return self.sorted[max(0, place - 1) : place + 1]


# ---- memory --------------------------------------------------------------------------------------


def cache_bytes(cfg: ModelConfig, rows: int, length: int, dtype: torch.dtype) -> int:
    """Return the memory of the keys and values of `rows` texts of `length` tokens."""
    return 2 * cfg.n_layer * rows * cfg.n_kv_head * (length + 1) * cfg.head_dim * dtype.itemsize


def free_bytes(device: torch.device) -> float:
    """Return the free memory of the device, infinity if unknown."""
    if device.type == "cuda":
        # What torch has reserved and does not use is free, too.
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    path = Path("/proc/meminfo")
    if device.type != "cpu" or not path.exists():
        return math.inf
    # Linux's own estimate, with the pages that it can give back
    lines = dict(line.split(":") for line in path.read_text(encoding="utf-8").splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])
