"""From logits to tokens: sampling parameters, logit processors, the draw of a token.

Pure functions on tensors. Order and arithmetic are those of transformers, bit for bit: banned ids
-> repetition, frequency, presence penalty -> the argmax if temperature is 0, else temperature ->
top_k -> top_p -> min_p -> a draw. Rows of a batch may have different parameters: each is a tensor
with one value per row, and one that no row uses is skipped.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from groundup.errors import UserError

INF = math.inf
ID_LISTS = ("stop_token_ids", "eos_ids", "banned_ids")
# The least and the most; logits divided or multiplied by more could overflow float32.
RANGES = {
    "temperature": (1e-6, 1e6),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (1e-6, 1e6),
    "seed": (0, 2**63 - 1),
    "max_new_tokens": (1, INF),
    "n": (1, INF),
    "top_k": (-1, INF),
    "logprobs": (-1, INF),
    "prompt_logprobs": (-1, INF),
}


# ---- parameters ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one prompt. Raise UserError for a value out of range."""

    max_new_tokens: int = 256
    min_new_tokens: int = 0  # no stop id (and no stop string) before that many tokens
    temperature: float = 1.0  # 0 = greedy: top_k, top_p, min_p and seed then change nothing
    top_k: int = -1  # only the k likeliest ids and those tied with the last of them; -1 or 0 = off
    top_p: float = 1.0  # only the likeliest ids that together have this probability; 0 keeps one
    min_p: float = 0.0  # only ids at least this times as likely as the likeliest
    presence_penalty: float = 0.0  # subtracted from the logit of every id in the output
    frequency_penalty: float = 0.0  # subtracted once for every time it is there
    # Of ids in prompt or output: positive logits are divided, negative ones multiplied
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()  # the text ends before the first of these strings
    stop_token_ids: frozenset[int] = frozenset()  # end a row even with ignore_eos
    eos_ids: frozenset[int] = frozenset()  # end a row; those of the tokenizer
    ignore_eos: bool = False  # eos_ids are then ordinary tokens
    banned_ids: tuple[int, ...] = ()  # never generated
    json_object: bool = False  # the text is one JSON object
    n: int = 1  # samples that are returned
    best_of: int = 0  # samples that are drawn, of which the best n are returned; 0 = n
    best_of_by: str = "sum"  # sum | mean: of the logprobs of a sample's tokens
    logprobs: int = -1  # k >= 0: of every token its own and the k highest; -1 = off
    prompt_logprobs: int = -1  # the same for the prompt's tokens
    skip_special_tokens: bool = True  # in the text; ids keep them
    seed: int = 1337  # sample i draws from a hash of seed, prompt ids and i

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if kind is float and type(value) is int and abs(value) > 2**53:
                value = INF  # no range below takes it, and no float may hold it
                object.__setattr__(self, field.name, value)
            fits = isinstance(value, (int, float) if kind is float else kind)
            if not fits or (isinstance(value, bool) and kind is not bool):
                what = f"must be of type {kind.__name__}, got {value!r}"
                raise UserError(f"sample: {field.name} {what}")
        # Types are right from here on, so values can be compared.
        for name, fine, allowed in self._ranges():
            if not fine:
                got = getattr(self, name)
                got = list(got) if isinstance(got, frozenset) else got
                raise UserError(f"sample: {name} must be {allowed}, got {got}")

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a row."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | self.eos_ids

    @property
    def n_samples(self) -> int:
        """How many samples are drawn to return n."""
        return self.best_of or self.n

    @property
    def has_penalty(self) -> bool:
        """Whether process() needs a Seen."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    def _ranges(self) -> list[tuple[str, bool, str]]:
        """Return (name, whether the value is in range, the range in words)."""
        found = []
        for name, (least, most) in RANGES.items():
            value, words = getattr(self, name), f"from {least} to {most}"
            if most == INF:
                words = f"at least {least}" + " (off)" * (least < 0)
            elif name == "temperature":
                words = f"0 (greedy) or {words}"
            greedy = name == "temperature" and value == 0
            found.append((name, greedy or least <= value <= most, words))
        for name in ID_LISTS:
            found.append((name, min(getattr(self, name), default=0) >= 0, "ids from 0 up"))
        n, of = self.n, self.best_of
        fits = 0 <= self.min_new_tokens <= self.max_new_tokens
        are_texts = all(isinstance(s, str) and s for s in self.stop)
        draws = self.temperature > 0 or self.n_samples == 1
        return [
            *found,
            ("min_new_tokens", fits, "from 0 to max_new_tokens"),
            ("stop", are_texts, "strings that are not empty"),
            ("best_of", of == 0 or of >= n, f"0 (as n) or at least n={n}"),
            ("best_of_by", self.best_of_by in ("sum", "mean"), "sum or mean"),
            ("temperature", draws, f"above 0 for {f'best_of={of}' if of else f'n={n}'}"),
        ]


class RowParams:
    """Parameters of the rows of a batch, each a tensor (B, 1), or None if no row uses it."""

    def __init__(
        self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.params, self.device = params, device
        masked = [p.stop_ids if p.min_new_tokens else frozenset() for p in params]
        for p, ids in zip(params, masked, strict=True):
            for name in ID_LISTS:
                largest = max(getattr(p, name), default=-1)
                if largest >= vocab_size:
                    what = f"{name} has id {largest}, the model has {vocab_size=}"
                    raise UserError(f"sample: {what}")
            if len(ids.union(p.banned_ids)) == vocab_size:
                what = f"leave none of the {vocab_size} ids of the model"
                raise UserError(f"sample: banned_ids and the stop ids {what}")
        # Ids that are never drawn, in (B * V,)
        banned = [row * vocab_size + i for row, p in enumerate(params) for i in p.banned_ids]
        self.banned = torch.tensor(banned, device=device) if banned else None
        # Those that are not before min_new_tokens: (B, V) bool, or None
        self.masked_ids = None
        if any(masked):
            self.masked_ids = torch.zeros(len(masked), vocab_size, dtype=torch.bool, device=device)
            mark(self.masked_ids, masked)
        self.draws = [p.temperature > 0 for p in params]
        self.greedy = torch.tensor([not draws for draws in self.draws], device=device)  # (B,)
        self.min_new_tokens = self._column([p.min_new_tokens for p in params], 0)
        self.repetition = self._column([p.repetition_penalty for p in params], 1)
        self.frequency = self._column([p.frequency_penalty for p in params], 0)
        self.presence = self._column([p.presence_penalty for p in params], 0)
        rows = [p if p.temperature > 0 else SamplingParams() for p in params]
        self.temperature = self._column([float(p.temperature) for p in rows], 1)
        top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else 0 for p in rows]
        self.largest_k, self.top_k = max(top_k), self._column(top_k, 0)
        # In double precision, as transformers has it; no cumulative probability is -1 or less
        self.tail = self._column([1 - p.top_p if p.top_p < 1 else -1.0 for p in rows], -1)
        self.min_p = self._column([p.min_p for p in rows], 0)

    def _column(self, values: list, off: float) -> Tensor | None:
        if all(value == off for value in values):
            return None
        # Counts stay whole numbers: they are indices.
        dtype = torch.int64 if all(isinstance(value, int) for value in values) else torch.float32
        return torch.tensor(values, dtype=dtype, device=self.device).unsqueeze(1)


def mark(mask: Tensor, ids_of_rows: Sequence[Collection[int]]) -> None:
    """Set these ids of each row of mask (B, V)."""
    for row, ids in enumerate(ids_of_rows):
        mask[row, torch.tensor(list(ids), dtype=torch.int64, device=mask.device)] = True


# ---- processors and the choice -------------------------------------------------------------------


class Seen:
    """Tokens seen so far, for penalties: counts (B, V) int32 in the output, present (B, V) bool
    in prompt or output."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device | str = "cpu",
        outputs: Sequence[Sequence[int]] = (),
    ) -> None:
        self.counts = torch.zeros(len(prompts), vocab_size, dtype=torch.int32, device=device)
        self.present = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
        mark(self.present, prompts)
        mark(self.present, outputs)
        for row, ids in enumerate(outputs):
            tokens = torch.tensor(list(ids), dtype=torch.int64, device=device)
            self.counts[row] = tokens.bincount(minlength=vocab_size)

    def add(self, tokens: Tensor) -> None:
        """tokens (B,) int64: the next output token of every row."""
        tokens = tokens.unsqueeze(1)
        self.counts.scatter_add_(1, tokens, torch.ones_like(tokens, dtype=torch.int32))
        self.present.scatter_(1, tokens, True)

    def select(self, rows: Tensor) -> None:
        """Row i becomes a copy of what row rows[i] was."""
        self.counts, self.present = self.counts[rows], self.present[rows]


def process(logits: Tensor, rows: RowParams, seen: Seen | None, n_out: list[int] | int) -> Tensor:
    """Return logits (B, V) float32 with penalties, banned ids at -inf. n_out: output tokens of each
    row, or of all."""
    x = logits.float()
    if rows.banned is not None:
        # On a CPU a tenth of masked_fill's time
        x = x.flatten().index_fill(0, rows.banned, -INF).view_as(x)
    if rows.masked_ids is not None:
        # Not always: the copy waits for a GPU
        n_out = torch.as_tensor(n_out, device=x.device).view(-1, 1)
        x = x.masked_fill(rows.masked_ids & (n_out < rows.min_new_tokens), -INF)
    if rows.repetition is not None:  # arXiv:1909.05858
        penalized = torch.where(x < 0, x * rows.repetition, x / rows.repetition)
        x = torch.where(seen.present, penalized, x)
    if rows.frequency is not None:  # this and the next as in OpenAI's API
        x = x - rows.frequency * seen.counts
    if rows.presence is not None:
        x = x - rows.presence * (seen.counts > 0)
    return x


def scale(logits: Tensor, rows: RowParams) -> Tensor:
    """Return logits (B, V) divided by the temperature, -inf for the ids that top_k removes."""
    x = logits if rows.temperature is None else logits / rows.temperature
    if rows.top_k is not None:
        likeliest = x.topk(rows.largest_k).values
        kth = likeliest.gather(1, (rows.top_k - 1).clamp(min=0)).where(rows.top_k > 0, -INF)
        x = torch.where(x < kth, -INF, x)  # on a CPU half of masked_fill's time
    return x


def keep_likeliest(logits: Tensor, rows: RowParams) -> Tensor:
    """Return logits (B, V) divided by the temperature, -inf for the ids that top_k, then top_p,
    then min_p remove."""
    return confine(scale(logits, rows), rows.tail, rows.min_p)


def confine(x: Tensor, tail: Tensor | None, min_p: Tensor | None) -> Tensor:
    """Return logits x (B, V), -inf for the ids that top_p, then min_p remove. tail: 1 - top_p."""
    # The smallest set of likeliest ids that reaches top_p (arXiv:1904.09751)
    if tail is not None:
        x = x.masked_fill(outside_nucleus(x, tail), -INF)
    if min_p is not None:  # arXiv:2407.01082
        probs = x.softmax(dim=-1)
        x = x.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), -INF)
    return x


def outside_nucleus(logits: Tensor, tail: Tensor) -> Tensor:
    """Return (B, V) bool: the least likely ids of a row, with a total probability of at most
    tail (B, 1); never all."""
    # Where numpy sorts values 35 times as fast as torch sorts values and indices
    if logits.device.type == "cpu":
        ascending = torch.from_numpy(np.sort(logits.detach().numpy(), axis=-1))
        n_out = (ascending.softmax(dim=-1).cumsum(dim=-1) <= tail).sum(dim=-1, keepdim=True)
        n_out = n_out.clamp(max=logits.shape[-1] - 1)
        least = ascending.gather(1, n_out)  # that stays
        if not ((ascending.gather(1, (n_out - 1).clamp(min=0)) == least) & (n_out > 0)).any():
            return logits < least
    # Which ids of a tie across the edge stay is decided by this very sort, in transformers too.
    ascending, order = logits.sort(dim=-1)
    remove = ascending.softmax(dim=-1).cumsum(dim=-1) <= tail
    remove[:, -1] = False
    return torch.empty_like(remove).scatter_(1, order, remove)


def choose(logits: Tensor, rows: RowParams, generators: Sequence[torch.Generator | None]) -> Tensor:
    """Return token ids (B,) int64. logits (B, V): of process(); generators: one for each row with
    temperature > 0."""
    # The argmax of p / Exponential(1) is distributed as p (the exponential race). torch.multinomial
    # would take one generator for all rows and make the CPU wait for the GPU.
    if not any(rows.draws):
        return logits.argmax(dim=-1)
    x = scale(logits, rows)
    if x.device.type == "cpu":
        nothing = [None] * len(x)
        tail = nothing if rows.tail is None else rows.tail.split(1)
        min_p = nothing if rows.min_p is None else rows.min_p.split(1)
        each = zip(x.split(1), tail, min_p, generators, rows.draws, strict=True)
        tokens = torch.tensor([draw_on_cpu(*row) if draws else -1 for *row, draws in each])
    else:
        probs = confine(x, rows.tail, rows.min_p).softmax(dim=-1)
        noise = torch.ones_like(probs)
        for row, draws in enumerate(rows.draws):
            if draws:
                noise[row].exponential_(generator=generators[row])
        tokens = (probs / noise).argmax(dim=-1)
    return tokens if all(rows.draws) else torch.where(rows.greedy, logits.argmax(dim=-1), tokens)


def draw_on_cpu(
    x: Tensor, tail: Tensor | None, min_p: Tensor | None, generator: torch.Generator
) -> int:
    """Return an id drawn from those of x (1, V) that top_p and min_p keep, see `confine`."""
    # One row at a time fits into the CPU's cache, a batch does not. If the winner among all ids is
    # kept, it is the winner among the kept ones, too. So the ids are sorted only if it is not, or
    # if it is so close to the edge that rounding decides.
    probs = x.softmax(dim=-1)
    # exponential_ on CPU takes the logarithms one by one: 15 ns each, this way 5.
    noise = torch.empty_like(x, dtype=torch.float64).uniform_(generator=generator)
    noise = noise.log_().neg_().float()
    token = (probs / noise).argmax().item()
    p, kept = probs[0, token].item(), True
    if tail is not None:  # the others as likely or likelier have less than top_p
        kept = F.threshold(probs, p * (1 - 1e-6), 0).sum().item() - p < 1 - tail.item() - 1e-4
    if min_p is not None:
        kept = kept and p > min_p.item() * probs.amax().item() * 1.0001
    return token if kept else (confine(x, tail, min_p).softmax(dim=-1) / noise).argmax().item()


def check_logits(logits: Tensor) -> None:
    """Raise UserError for a row of logits (B, V) with NaN or +inf, or -inf everywhere.

    choose() does not look: it would have to wait for the device at every token."""
    # NaN and +inf show in the maximum of a row, -inf only if it is everywhere.
    bad = (~logits.amax(dim=-1).isfinite()).nonzero().flatten().tolist()
    if bad:
        what = f"the logits of row {bad[0]} are not finite"
        raise UserError(f"sample: {what}; try dtype=float32, or other weights")


def top_logprobs(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return ids (B, 1 + k) and their log-probabilities, float32: of the chosen ids (B,) int64,
    then of the k highest (at most V), highest first. logits (B, V): of the model."""
    logps = logits.float().log_softmax(dim=-1)
    values, ids = logps.topk(min(k, logps.shape[-1]))
    chosen = chosen.unsqueeze(1)
    return torch.cat([chosen, ids], dim=1), torch.cat([logps.gather(1, chosen), values], dim=1)
