"""From logits to tokens: sampling parameters, logit processors, the draw of a token, beam search.

Pure functions on tensors, called by engine.py. Order and arithmetic are those of transformers, bit for bit: banned ids
-> repetition, frequency, presence penalty -> the argmax if temperature is 0, else temperature -> top_k -> top_p ->
min_p -> a draw. Rows of a batch may have different parameters: each parameter is a tensor with one value per row, and a
parameter that no row uses is skipped.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from groundup.errors import UserError

INF = math.inf
ID_LISTS = ("stop_token_ids", "eos_ids", "banned_ids")


# ---- parameters -----------------------------------------------------------------------------------------------------


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
    repetition_penalty: float = 1.0  # ids of prompt or output: positive logits are divided, negative ones multiplied
    stop: tuple[str, ...] = ()  # the text ends before the first of these strings
    stop_token_ids: frozenset[int] = frozenset()  # end a row even with ignore_eos
    eos_ids: frozenset[int] = frozenset()  # end a row; those of the tokenizer
    ignore_eos: bool = False  # eos_ids are then ordinary tokens
    banned_ids: tuple[int, ...] = ()  # never generated
    n: int = 1  # samples that are returned
    best_of: int = 0  # samples that are drawn, of which the best n are returned; 0 = n
    best_of_by: str = "sum"  # sum | mean: of the logprobs of a sample's tokens
    num_beams: int = 1  # more than 1: beam search
    length_penalty: float = 1.0  # beam search: score = sum of logprobs / length**length_penalty
    early_stopping: str = "false"  # beam search: false | true | never; see Beams
    logprobs: int = -1  # k >= 0: of every token its own and the k highest; -1 = off
    prompt_logprobs: int = -1  # the same for the prompt's tokens
    skip_special_tokens: bool = True  # in the text; ids keep them
    seed: int = 1337  # sample i draws from seed + i

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            fits = isinstance(value, (int, float) if kind is float else kind)
            if not fits or (isinstance(value, bool) and kind is not bool):
                raise UserError(f"sample: {field.name} must be of type {kind.__name__}, got {value!r}")
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
        """Return (name, whether the value is in range, the range in words). Greedy search has fewer demands."""
        one, with_beams = self.num_beams == 1, f"with num_beams={self.num_beams}"
        k = "-1 (off) or the number of other ids"
        samples = f"best_of={self.best_of}" if self.best_of > self.n else f"n={self.n}"
        # Logits divided by a temperature below 1e-6 could overflow float32.
        return [
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "from 0 to max_new_tokens"),
            ("temperature", self.temperature == 0 or 1e-6 <= self.temperature < INF, "0 (greedy) or from 1e-6 up"),
            ("top_k", self.top_k >= -1, "positive, or -1 or 0 for off"),
            ("top_p", 0 <= self.top_p <= 1, "from 0 to 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2"),
            ("repetition_penalty", 0 < self.repetition_penalty < INF, "above 0 (1 is off)"),
            ("stop", all(isinstance(s, str) and s for s in self.stop), "strings that are not empty"),
            *[(name, all(map(is_id, getattr(self, name))), "ids from 0 up") for name in ID_LISTS],
            ("n", self.n >= 1, "at least 1"),
            ("best_of", self.best_of == 0 or self.best_of >= self.n, f"0 (as n) or at least n={self.n}"),
            ("best_of_by", self.best_of_by in ("sum", "mean"), "sum or mean"),
            ("num_beams", self.num_beams >= 1, "at least 1"),
            ("length_penalty", -10 <= self.length_penalty <= 10, "from -10 to 10"),
            ("early_stopping", self.early_stopping in ("false", "true", "never"), "false, true or never"),
            ("logprobs", self.logprobs >= -1, k),
            ("prompt_logprobs", self.prompt_logprobs >= -1, k),
            ("seed", 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
            ("temperature", not one or self.temperature > 0 or self.n_samples == 1, f"above 0 for {samples}"),
            ("length_penalty", not one or self.length_penalty == 1, "1 without beam search (num_beams above 1)"),
            ("early_stopping", not one or self.early_stopping == "false", "false without beam search"),
            ("temperature", one or self.temperature == 0, f"0 {with_beams}"),
            ("n", one or self.n <= self.num_beams, f"at most as many {with_beams}"),
            ("best_of", one or self.best_of == 0, f"0 {with_beams}"),
            ("logprobs", one or self.logprobs == -1, f"-1 (off) {with_beams}"),
            ("stop", one or not self.stop, f"empty {with_beams}, which takes stop_token_ids"),
        ]


def is_id(value: object) -> bool:
    return isinstance(value, int) and value >= 0


class RowParams:
    """Parameters of the rows of a batch, each a tensor (B, 1), or None if no row uses it."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.params, self.vocab_size, self.device = list(params), vocab_size, device
        self.banned: Tensor | None = None  # (B, V) bool: never; None if no row has any
        self.held: Tensor | None = None  # (B, V) bool: not before min_new_tokens
        for row in range(len(self.params)):
            self._mask_ids(row)
        self._fill()

    def set(self, row: int, params: SamplingParams) -> None:
        """Give row `row` the parameters of another prompt."""
        self.params[row] = params
        self._mask_ids(row)
        self._fill()

    def _mask_ids(self, row: int) -> None:
        params, V = self.params[row], self.vocab_size
        for name in ID_LISTS:
            if any(i >= V for i in getattr(params, name)):
                raise UserError(f"sample: {name} has id {max(getattr(params, name))}, the model has vocab_size={V}")
        held = params.stop_ids if params.min_new_tokens else frozenset()
        if len(held.union(params.banned_ids)) == V:
            raise UserError(f"sample: banned_ids and the stop ids leave none of the {V} ids of the model")
        self.banned = self._mask_row(self.banned, row, params.banned_ids)
        self.held = self._mask_row(self.held, row, held)

    def _mask_row(self, mask: Tensor | None, row: int, ids: Collection[int]) -> Tensor | None:
        if mask is None and ids:
            mask = torch.zeros(len(self.params), self.vocab_size, dtype=torch.bool, device=self.device)
        if mask is not None:
            mask[row] = False
            mask[row, torch.tensor(list(ids), dtype=torch.int64, device=self.device)] = True
        return mask

    def _fill(self) -> None:
        self.draws = [p.temperature > 0 for p in self.params]
        self.greedy = torch.tensor([not draws for draws in self.draws], device=self.device)  # (B,)
        self.min_new_tokens = self._column([p.min_new_tokens for p in self.params], 0)
        self.repetition = self._column([p.repetition_penalty for p in self.params], 1)
        self.frequency = self._column([p.frequency_penalty for p in self.params], 0)
        self.presence = self._column([p.presence_penalty for p in self.params], 0)
        rows = [p if p.temperature > 0 else SamplingParams() for p in self.params]
        self.temperature = self._column([float(p.temperature) for p in rows], 1)
        top_k = [min(p.top_k, self.vocab_size) if p.top_k > 0 else 0 for p in rows]
        self.largest_k, self.top_k = max(top_k), self._column(top_k, 0)
        # 1 - top_p in double precision, as transformers has it; no cumulative probability is -1 or less.
        self.tail = self._column([1 - p.top_p if p.top_p < 1 else -1.0 for p in rows], -1)
        self.min_p = self._column([p.min_p for p in rows], 0)

    def _column(self, values: list, off: float) -> Tensor | None:
        if all(value == off for value in values):
            return None
        dtype = torch.int64 if all(isinstance(value, int) for value in values) else torch.float32
        return torch.tensor(values, dtype=dtype, device=self.device).unsqueeze(1)


# ---- processors and the choice --------------------------------------------------------------------------------------


class Seen:
    """Tokens seen so far, for penalties: counts (B, V) int32 in the output, present (B, V) bool in prompt or output."""

    def __init__(self, prompts: Sequence[Sequence[int]], vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.counts = torch.zeros(len(prompts), vocab_size, dtype=torch.int32, device=device)
        self.present = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
        for row, ids in enumerate(prompts):
            self.reset(row, ids)

    def reset(self, row: int, prompt: Sequence[int]) -> None:
        """Start row `row` again with this prompt."""
        self.counts[row] = 0
        self.present[row] = False
        self.present[row, torch.tensor(list(prompt), dtype=torch.int64, device=self.present.device)] = True

    def add(self, tokens: Tensor) -> None:
        """tokens (B,) int64: the next output token of every row."""
        tokens = tokens.unsqueeze(1)
        self.counts.scatter_add_(1, tokens, torch.ones_like(tokens, dtype=torch.int32))
        self.present.scatter_(1, tokens, True)

    def select(self, rows: Tensor) -> None:
        """Row i becomes a copy of what row rows[i] was."""
        self.counts, self.present = self.counts[rows], self.present[rows]


def process(logits: Tensor, rows: RowParams, seen: Seen | None, n_out: Tensor | int) -> Tensor:
    """Return logits (B, V) float32 with penalties, banned ids at -inf. n_out (B,): output tokens of each row.

    Penalties as in arXiv:1909.05858 (repetition) and the OpenAI API (frequency, presence)."""
    x = logits.float()
    if rows.banned is not None:
        x = x.masked_fill(rows.banned, -INF)
    if rows.held is not None and rows.min_new_tokens is not None:
        n_out = n_out.unsqueeze(1) if isinstance(n_out, Tensor) else n_out
        x = x.masked_fill(rows.held & (n_out < rows.min_new_tokens), -INF)
    if rows.repetition is not None:
        penalized = torch.where(x < 0, x * rows.repetition, x / rows.repetition)
        x = torch.where(seen.present, penalized, x)
    if rows.frequency is not None:
        x = x - rows.frequency * seen.counts
    if rows.presence is not None:
        x = x - rows.presence * (seen.counts > 0)
    return x


def keep_likeliest(logits: Tensor, rows: RowParams) -> Tensor:
    """Return logits (B, V) divided by the temperature, -inf for the ids that top_k, then top_p, then min_p remove.

    top_p keeps the smallest set of likeliest ids that reaches it (arXiv:1904.09751); min_p: arXiv:2407.01082."""
    x = logits if rows.temperature is None else logits / rows.temperature
    if rows.top_k is not None:
        likeliest = x.topk(rows.largest_k).values
        kth = likeliest.gather(1, (rows.top_k - 1).clamp(min=0))
        x = x.masked_fill((x < kth) & (rows.top_k > 0), -INF)
    if rows.tail is not None:
        x = x.masked_fill(outside_nucleus(x, rows.tail), -INF)
    if rows.min_p is not None:
        probs = x.softmax(dim=-1)
        x = x.masked_fill(probs < rows.min_p * probs.amax(dim=-1, keepdim=True), -INF)
    return x


def outside_nucleus(logits: Tensor, tail: Tensor) -> Tensor:
    """Return (B, V) bool: the least likely ids of a row, with a total probability of at most tail (B, 1); never all."""
    if logits.device.type == "cpu":  # where numpy sorts values 35 times as fast as torch sorts values and indices
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
    """Return token ids (B,) int64. logits (B, V): of process(); generators: one for each row with temperature > 0."""
    if not any(rows.draws):
        return logits.argmax(dim=-1)
    probs = keep_likeliest(logits, rows).softmax(dim=-1)
    # The argmax of p / Exponential(1) is distributed as p (the exponential race). torch.multinomial would take one
    # generator for all rows and make the CPU wait for the GPU.
    tokens = (probs / exponential(probs, rows.draws, generators)).argmax(dim=-1)
    return tokens if all(rows.draws) else torch.where(rows.greedy, logits.argmax(dim=-1), tokens)


def exponential(like: Tensor, draws: list[bool], generators: Sequence[torch.Generator | None]) -> Tensor:
    """Return (B, V) float32 exponential noise, each row that draws from its own generator."""
    on_cpu = like.device.type == "cpu"
    noise = torch.full_like(like, 0.5, dtype=torch.float64 if on_cpu else torch.float32)
    for row, (draw, generator) in enumerate(zip(draws, generators, strict=True)):
        if draw and on_cpu:
            noise[row].uniform_(generator=generator)
        elif draw:
            noise[row].exponential_(generator=generator)
    # exponential_ on CPU takes the logarithms one by one: 15 ns each, this way 5.
    return noise.log_().neg_().float() if on_cpu else noise


def check_logits(logits: Tensor) -> None:
    """Raise UserError for a row of logits (B, V) without a likeliest id: NaN, +inf, or -inf everywhere.

    choose() does not look: it would have to wait for the device at every token."""
    bad = (~logits.amax(dim=-1).isfinite()).nonzero().flatten().tolist()
    if bad:
        raise UserError(f"sample: the logits of row {bad[0]} are not finite; try dtype=float32, or other weights")


def top_logprobs(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """logits (B, V) of the model, chosen (B,) int64 -> ids (B, 1 + k) and their log-probabilities, float32.

    Column 0 is the chosen id, the others are the k highest (at most V), highest first."""
    logps = logits.float().log_softmax(dim=-1)
    values, ids = logps.topk(min(k, logps.shape[-1]))
    chosen = chosen.unsqueeze(1)
    return torch.cat([chosen, ids], dim=1), torch.cat([logps.gather(1, chosen), values], dim=1)


# ---- beam search ----------------------------------------------------------------------------------------------------


class Beam(NamedTuple):
    ids: list[int]  # without the prompt, including the stop id if one ended it
    score: float  # logprob / len(ids)**length_penalty
    logprob: float  # sum of the processed log-probabilities


class Beams:
    """Beam search for B prompts at once, K = num_beams rows each; rows b*K to b*K + K - 1 belong to prompt b.

        beams = Beams(prompts, params, limits, vocab_size, device)  # limits: tokens that each prompt may get
        while not beams.all_ended():
            tokens, parents = beams.advance(logits)  # then copy row parents[i] of the cache to row i, feed tokens[i]
        ranked = beams.results()

    Processors act on log-probabilities, as in transformers, so repetition_penalty always multiplies. A prompt ends when
    it has K finished beams and none that runs could get a better score than the worst of them. early_stopping says what
    it could get: "false" its score at its present length, "never" that at its full length if length_penalty favours
    long ones; with "true" K finished beams are enough. One beam would not be greedy search: it may pass over an end.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, limits: Sequence[int], vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        B, K = len(prompts), params.num_beams
        self.params, self.n_out = params, 0
        self.limits = torch.tensor(limits, device=device)
        self.divisor_at_limit = torch.tensor([limit**params.length_penalty for limit in limits], device=device).float()
        self.stop_ids = torch.tensor(sorted(params.stop_ids), dtype=torch.int64, device=device)
        self.rows = RowParams([params] * (B * K), vocab_size, device)
        self.prompt = torch.arange(B, device=device).unsqueeze(1)  # x[self.prompt, i (B, N)]: of each prompt its own
        each = [ids for ids in prompts for _ in range(K)]
        self.seen = Seen(each, vocab_size, device) if params.has_penalty else None
        self.ids = torch.full((B, K, max(limits)), -1, device=device)  # -1 = no token yet
        # -inf = an empty place. All rows of a prompt begin alike, so only the first takes part in the first step.
        self.sums = torch.full((B, K), -INF, device=device)
        self.sums[:, 0] = 0
        self.finished_ids = self.ids.clone()
        self.finished_scores = torch.full((B, K), -INF, device=device)
        self.ended = torch.zeros(B, dtype=torch.bool, device=device)

    def all_ended(self) -> bool:
        """Return whether every prompt has its beams; waits for the device. Further steps change nothing."""
        return bool(self.ended.all())

    def advance(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits (B*K, V) of the model -> tokens (B*K,) int64 and parents (B*K,): the row that each continues."""
        (B, K), V = self.sums.shape, logits.shape[-1]
        logps = process(logits.float().log_softmax(dim=-1), self.rows, self.seen, self.n_out)
        # Of this many candidates at least K go on, whatever number of the others end with a stop id.
        width = min(max(2, 1 + len(self.stop_ids)), V) * K
        sums, flat = (logps.view(B, K, V) + self.sums.unsqueeze(2)).view(B, K * V).topk(width)
        parents, tokens = flat // V, flat % V  # (B, width), likeliest first
        ids = self.ids[self.prompt, parents]
        ids[:, :, self.n_out] = tokens
        self.n_out += 1
        ends = torch.isin(tokens, self.stop_ids) | (self.n_out == self.limits).unsqueeze(1)
        self._collect(sums, ids, ends)
        self.sums, go_on = sums.masked_fill(ends, -INF).topk(K)
        self.ids = ids[self.prompt, go_on]
        self._mark_ended()
        tokens = tokens[self.prompt, go_on].flatten()
        parents = (parents[self.prompt, go_on] + self.prompt * K).flatten()
        if self.seen is not None:
            self.seen.select(parents)
            self.seen.add(tokens)
        return tokens, parents

    def _collect(self, sums: Tensor, ids: Tensor, ends: Tensor) -> None:
        """Keep the K best of the finished beams and of the candidates that end now, among the K likeliest."""
        K = self.params.num_beams
        among_first = torch.arange(ends.shape[1], device=ends.device) < K
        counts = ends & among_first & ~self.ended.unsqueeze(1)
        scores = (sums / self.n_out**self.params.length_penalty).masked_fill(~counts, -INF)
        self.finished_scores, best = torch.cat([self.finished_scores, scores], dim=1).topk(K)
        self.finished_ids = torch.cat([self.finished_ids, ids], dim=1)[self.prompt, best]

    def _mark_ended(self) -> None:
        params = self.params
        hopes_for_length = params.early_stopping == "never" and params.length_penalty > 0
        divisor = self.divisor_at_limit if hopes_for_length else self.n_out**params.length_penalty
        worst = self.finished_scores[:, -1]  # -inf while a place is empty
        self.ended |= (self.sums[:, 0] / divisor <= worst) | (self.n_out == self.limits)
        if params.early_stopping == "true":
            self.ended |= worst > -INF

    def results(self) -> list[list[Beam]]:
        """Return the finished beams of each prompt, best first: K, or fewer if the model has fewer such texts."""
        ranked, power = [], self.params.length_penalty
        for rows, scores in zip(self.finished_ids.tolist(), self.finished_scores.tolist(), strict=True):
            texts = [[i for i in row if i >= 0] for row in rows]
            beams = [Beam(ids, score, score * len(ids) ** power) for ids, score in zip(texts, scores, strict=True)]
            ranked.append([beam for beam in beams if beam.score > -INF])
        return ranked
