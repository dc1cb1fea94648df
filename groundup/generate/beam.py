"""Beam search for sample.py, as transformers does it: the likeliest of several texts that grow
together. No other file knows of it: a search is an engine of its own, with one cache for its rows.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from groundup.generate.decode import CHUNK_TOKENS
from groundup.generate.engine import Engine, Request, Result, Sample
from groundup.generate.kv_cache import KVCache
from groundup.generate.sampling import RowParams, SamplingParams, Seen, check_logits, process

INF = math.inf


@dataclass(frozen=True)
class BeamParams(SamplingParams):
    """Parameters of one prompt. Raise UserError for a value out of range."""

    num_beams: int = 2  # texts that grow together
    length_penalty: float = 1.0  # score = sum of logprobs / length**length_penalty
    early_stopping: str = "false"  # false | true | never; see Beams

    def _ranges(self) -> list[tuple[str, bool, str]]:
        K, others = self.num_beams, (self.best_of, self.stop, self.logprobs, self.json_object)
        alone = self.temperature == 0 and others == (0, (), -1, False)
        least = "1 unless temperature is 0 and best_of, stop and logprobs are off"
        allowed = ("false", "true", "never")
        return [
            ("num_beams", K >= 2, "at least 2"),
            ("length_penalty", -10 <= self.length_penalty <= 10, "from -10 to 10"),
            ("early_stopping", self.early_stopping in allowed, "false, true or never"),
            ("num_beams", alone, least),
            ("n", 1 <= self.n <= K, f"at least 1 and at most num_beams={K}"),
            *super()._ranges(),
        ]

    @property
    def n_samples(self) -> int:
        """One search finds all n."""
        return 1


class BeamSearch(Engine):
    """An engine of num_beams rows that searches, a prompt at a time."""

    def answer(
        self, prompts: Iterable[list[int]], params: BeamParams
    ) -> Iterator[tuple[int, Result]]:
        for i, ids in enumerate(prompts):
            yield i, self.search(self.request(i, ids, params))

    @torch.no_grad()
    def search(self, request: Request) -> Result:
        """Return the n best texts of num_beams rows, the best first."""
        K, n, cfg = request.params.num_beams, len(request.ids), self.model.cfg
        # All beams share one cache, so that a row can take over another's past.
        self.check_memory(K, request.length)
        cache = KVCache(cfg, K, request.length, self.device, self.dtype)
        cache.few_widths = self.compile
        # The prompt is read into row 0.
        for begin in range(0, n, CHUNK_TOKENS):
            self.prefill_piece(cache, [0], [request], begin, min(begin + CHUNK_TOKENS, n))
        select(cache, torch.zeros(K, dtype=torch.int64, device=self.device), n)
        beams = Beams(request.ids, request.params, request.limit, cfg.vocab_size, self.device)
        logits = request.logits.expand(K, -1)
        while True:
            check_logits(logits)  # without finite logits no beam is left
            tokens, parents = beams.advance(logits)
            if beams.ended:
                break
            select(cache, parents, n)
            logits = self.forward(tokens, [cache.part([n] * K)])
            n += 1
        # Samples make the texts, with stop ids and special tokens as everywhere.
        for s, beam in enumerate(beams.finished[: request.params.n]):
            sample = Sample(request, s, self.tokenizer)
            for token in beam.ids:
                sample.push([token], [0.0])
            found = request.completions[s]
            request.completions[s] = found._replace(cumulative_logprob=beam.logprob)
        return request.result()


def select(cache: KVCache, rows: Tensor, length: int) -> None:
    """Replace the first `length` positions of each row i by those of row rows[i]."""
    for layer in cache.layers:
        layer[:, :, :length] = layer[rows, :, :length]


class Beam(NamedTuple):
    ids: list[int]  # including the stop id if one ended it
    score: float  # logprob / len(ids)**length_penalty
    logprob: float  # sum of the processed log-probabilities


class Beams:
    """Beam search for one prompt with K = num_beams rows.

        beams = Beams(prompt, params, limit, vocab_size, device)  # limit: of a text, in tokens
        while not beams.ended:
            tokens, parents = beams.advance(logits)
            # copy row parents[i] of the cache to row i, feed tokens[i] to it
        beams.finished  # at most K, the best first

    The search ends with K finished beams if none that runs could get a better score than the worst
    of them. early_stopping says what it could get: "false" its score at its present length, "never"
    that at its full length if length_penalty favours long ones; with "true" K finished beams are
    enough. One beam would not be greedy search: it may pass over an end."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: BeamParams,
        limit: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        K = params.num_beams
        self.params, self.limit, self.n_out = params, limit, 0
        self.rows = RowParams([params] * K, vocab_size, device)
        self.seen = Seen([prompt] * K, vocab_size, device) if params.has_penalty else None
        # All rows begin alike, so only the first takes part in the first step.
        self.running = [Beam([], 0.0, 0.0 if k == 0 else -INF) for k in range(K)]
        self.finished: list[Beam] = []
        self.ended = False

    def advance(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens (K,) int64 and parents (K,), the row that each continues. logits (K, V): of
        the model."""
        params, (K, V) = self.params, logits.shape
        # Of log-probabilities, as in transformers, so repetition_penalty always multiplies.
        logps = process(logits.float().log_softmax(dim=-1), self.rows, self.seen, self.n_out)
        # A candidate is a row and a next token, with the sum of both.
        sums = torch.tensor([beam.logprob for beam in self.running], device=logits.device)
        # Of this many candidates at least K go on, however many of the others end with a stop id
        width = min(max(2, 1 + len(params.stop_ids)), V) * K
        found = (logps + sums.unsqueeze(1)).flatten().topk(width)  # likeliest first
        self.n_out += 1
        # All candidates have the same length.
        divisor = self.n_out**params.length_penalty
        go_on: list[tuple[int, Beam]] = []  # with their parents
        candidates = zip(found.values.tolist(), found.indices.tolist(), strict=True)
        for rank, (total, at) in enumerate(candidates):
            parent, token = divmod(at, V)
            ends = token in params.stop_ids or self.n_out == self.limit
            # As in transformers, an end counts only among the K best candidates.
            if (ends and rank < K and total > -INF) or (not ends and len(go_on) < K):
                beam = Beam([*self.running[parent].ids, token], total / divisor, total)
                self.finished.append(beam) if ends else go_on.append((parent, beam))
        self.finished = sorted(self.finished, key=lambda beam: beam.score, reverse=True)[:K]
        # Fewer texts than rows: the others never win.
        go_on += [(0, Beam([0] * self.n_out, -INF, -INF))] * (K - len(go_on))
        self.running = [beam for _, beam in go_on]
        self.ended = self.n_out == self.limit or self._no_better()
        tokens = torch.tensor([beam.ids[-1] for beam in self.running], device=logits.device)
        parents = torch.tensor([parent for parent, _ in go_on], device=logits.device)
        if self.seen is not None:
            self.seen.select(parents)
            self.seen.add(tokens)
        return tokens, parents

    def _no_better(self) -> bool:
        """Return whether no running beam is to replace the worst of K finished ones."""
        params, best = self.params, self.running[0].logprob
        if len(self.finished) < params.num_beams:
            return best == -INF
        # A longer text may have a better mean, though its sum can only fall.
        hopes_for_length = params.early_stopping == "never" and params.length_penalty > 0
        length = self.limit if hopes_for_length else self.n_out
        could_get = best / length**params.length_penalty
        return params.early_stopping == "true" or could_get <= self.finished[-1].score
