"""Requests that generate together, a token of each at every step.

    engine = Engine(model, tokenizer, rows)
    engine.add(engine.request(0, ids, params))  # requests come and go while others generate:
    engine.step()                               # their next tokens
    engine.run(requests)                        # the tokens of all, as rows become free
    engine.answer(prompts, params)              # the results of all
    engine.stream(ids, params)                  # the tokens of one text

A Request has samples, and a Sample that generates has a Row of the cache. A sample that ends makes
room for the next (continuous batching). Each draws from its own generator, seeded by a hash of the
seed, the prompt's ids and the sample's number. torch's global generators are not touched.

On a CPU a step is one call of step.c, which computes a row to the bit as if it were alone.
Elsewhere, and in the prefill, which reads the prompts, the number of rows changes the rounding:
log-probabilities differ by some 5e-6 in float32 and 0.03 in bfloat16. So another id is next to
never drawn in float32, now and then in bfloat16 and float16. Products and cache have the dtype of
the autocast around the call, else that of the weights.
"""

import functools
import hashlib
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from groundup.errors import UserError
from groundup.generate import sampling
from groundup.generate.decode import (
    CHUNK_TOKENS,
    can_record,
    decoding_step,
    for_inference,
)
from groundup.generate.json_mode import JsonText, drawn_orders
from groundup.generate.kv_cache import (
    KVCache,
    Part,
    PrefixIndex,
    Row,
    Rows,
    cache_bytes,
    free_bytes,
    n_shared,
    row_length,
)
from groundup.generate.sampling import RowParams, SamplingParams, Seen
from groundup.kernels.attention import compute_dtype
from groundup.kernels.cross_entropy import CHUNK_ELEMENTS
from model import Transformer
from tokenizer import StreamDecoder, Tokenizer

CHUNK_ROWS = 16  # prompts that are read at once
MIN_SHARED = 8  # copying the cache of fewer tokens gains nothing over reading them


# ---- what it is asked and what it answers --------------------------------------------------------


class Completion(NamedTuple):
    text: str  # up to the stop string; "" without a tokenizer
    ids: list[int]  # including the stop id, if one ended it
    finish_reason: str  # stop | length
    stop_reason: int | str | None  # the stop id or stop string
    # At each token: its own and the highest, before any processor
    logprobs: list[dict[int, float]] | None
    cumulative_logprob: float  # sum over all tokens
    reward: float | None = None  # of a reward model, see best_of.py


class Result(NamedTuple):
    prompt_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[dict[int, float] | None] | None  # None for the first token


class Token(NamedTuple):
    id: int
    text: str  # what may be shown now: whole characters, no beginning of a stop string
    finish: str  # "" = it goes on | stop | length
    # Of it and of the likeliest, before any processor; None: of the first token of a prompt
    logprobs: dict[int, float] | None
    is_end: bool = False  # it ends the text and is no part of it
    begin: int = 0  # characters of the text before it


@dataclass(eq=False)
class Request:
    """A prompt, its parameters, and its finished samples."""

    index: int
    ids: list[int]
    params: SamplingParams
    limit: int  # tokens that a sample may get
    completions: dict[int, Completion] = field(default_factory=dict)
    logits: Tensor | None = None  # (V,) after the prompt, once it has been read
    prompt_logprobs: list[dict[int, float] | None] = field(default_factory=lambda: [None])

    @property
    def length(self) -> int:
        """Positions of the cache that a sample needs: its last token is not fed back."""
        return len(self.ids) + self.limit - 1

    def seed_of(self, sample: int) -> int:
        """Return the seed of a sample's random numbers, of 64 bits."""
        # Not seed + sample: all prompts would draw the same noise, neighbouring seeds the same
        # samples. A hash, as torch's or numpy's generators may change.
        words = repr(("sample", self.params.seed, sample, *self.ids))
        return int.from_bytes(hashlib.shake_256(words.encode()).digest(8), "little")

    def result(self) -> Result:
        """Return the n best samples, best first; without best_of all samples in their order."""
        samples = [self.completions[s] for s in sorted(self.completions)]
        if self.params.best_of > self.params.n:
            # The mean is the sum by the number of tokens; power 0 leaves the sum.
            power = int(self.params.best_of_by == "mean")
            samples.sort(key=lambda c: c.cumulative_logprob / len(c.ids) ** power, reverse=True)
        scored = self.params.prompt_logprobs >= 0
        return Result(self.ids, samples[: self.params.n], self.prompt_logprobs if scored else None)


class StopStrings:
    """Finds strings in a text that grows by a character at a time."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words
        # Characters of each with which the text ends: what may become one of the strings
        self.n_begun = [0] * len(words)

    def push(self, char: str) -> str:
        """Return the longest of the strings that the text now ends with, "" if there is none."""
        found = ""
        for i, word in enumerate(self.words):
            n = self.n_begun[i]
            # The text ends with word[:n], so a shorter beginning matters only if the next differs.
            n = n + 1 if word[n] == char else n_begun(word, word[:n] + char)
            if n == len(word):
                found = max(found, word, key=len)
                n = n_begun(word, word)
            self.n_begun[i] = n
        return found


def n_begun(word: str, text: str) -> int:
    """Return how many characters of `word`, not all of them, `text` ends with."""
    for n in range(min(len(word) - 1, len(text)), 0, -1):
        if word[n - 1] == text[-1] and text.endswith(word[:n]):  # first what takes no time
            return n
    return 0


class Sample:
    """Sample `index` of a request, while a row of the cache generates it."""

    def __init__(
        self,
        request: Request,
        index: int,
        tokenizer: Tokenizer | None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.request, self.index, self.generator = request, index, generator
        self.row: Row | None = None  # once the prompt is being read
        self.ids: list[int] = []
        self.tokenizer = tokenizer
        self.decoder = StreamDecoder(tokenizer) if tokenizer else None
        self.n_chars = 0  # of all ids
        self.text = ""  # that may be shown
        self.pending = ""  # behind it: what may become a stop string
        self.stops = StopStrings(request.params.stop)
        self.json = JsonText(tokenizer) if request.params.json_object else None
        self.logprobs: list[dict[int, float]] = []
        self.sum = 0.0
        self.last = False  # whether it is the last of its request to end

    def push(self, ids: list[int], logps: list[float]) -> Token:
        """Take the next token, ids[0], and the likeliest ones, with their log-probabilities."""
        # As many as any request of the batch asks for: keep what this one does.
        params, token, begin = self.request.params, ids[0], self.n_chars
        self.ids.append(token)
        self.sum += logps[0]
        k = 1 + params.logprobs
        found = dict(zip(ids[:k], logps[:k], strict=True))
        self.logprobs.append(found)
        # Why it ends: a stop id or a stop string, the end of the JSON object, or its limit
        is_end = token in params.stop_ids
        piece, reason = ("", token) if is_end else self.grow(token)
        finish = "length" if len(self.ids) == self.request.limit else ""
        if reason is not None or (self.json and self.json.push(token)):
            finish = "stop"  # it wins over length
        if finish:
            # A stop string is cut; nothing follows what else was held back.
            piece += "" if isinstance(reason, str) else self.flush()
            logprobs = self.logprobs if params.logprobs >= 0 else None
            completion = Completion(self.text, self.ids, finish, reason, logprobs, self.sum)
            self.request.completions[self.index] = completion
            self.last = len(self.request.completions) == params.n_samples
        return Token(token, piece, finish, found, is_end, begin)

    def grow(self, token: int) -> tuple[str, str | None]:
        """Return what may be shown now, and the stop string before which the text ends, if any."""
        # Before min_new_tokens a stop string is text like any other.
        may_stop = len(self.ids) >= self.request.params.min_new_tokens
        chars = self.chars_of(token)
        self.n_chars += len(chars)
        for char in chars:
            self.pending += char
            stop = self.stops.push(char)
            if stop and may_stop:
                return self.show(len(self.pending) - len(stop)), stop
        return self.show(len(self.pending) - max(self.stops.n_begun, default=0)), None

    def chars_of(self, token: int) -> str:
        if self.tokenizer is None or token >= self.tokenizer.vocab_size:
            return ""
        # A special token is named whole; ordinary ones may end within a character.
        if token in self.tokenizer.special_ids and not self.request.params.skip_special_tokens:
            return self.decoder.flush() + self.tokenizer.decode([token])
        return self.decoder.push(token)

    def show(self, n: int) -> str:
        piece, self.pending = self.pending[:n], self.pending[n:]
        self.text += piece
        return piece

    def flush(self) -> str:
        """Return what was held back, as nothing follows; U+FFFD for a broken character."""
        self.pending += self.decoder.flush() if self.decoder else ""
        return self.show(len(self.pending))


# ---- the engine ----------------------------------------------------------------------------------


class Engine:
    """The rows of a cache and the requests that have them, or wait for them.

    A prompt is read in pieces, between which the others go on. What the cache has of it already is
    copied: the beginning of a prompt that runs, or of one of the last texts that ended (the prefix
    cache). Requests that begin alike wait for the first of them to read it."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        rows: int,
        compile: bool = False,
        copies: bool = True,
    ) -> None:
        """rows: the most texts at a time. compile: on a GPU, record the decoding step. copies:
        False = use the matrices as they are, without faster copies, in half the memory."""
        self.device = model.embed_tokens.weight.device
        # The cache has the dtype of the products.
        matrices = (p for p in model.layers.parameters() if p.ndim == 2)  # none with 8 bits
        self.dtype = compute_dtype(next(matrices, model.embed_tokens.weight))
        self.compile = compile and can_record(self.device)
        # How to make the copy for inference: `update` makes one again.
        self.view = functools.partial(for_inference, dtype=self.dtype, copies=copies)
        self.model, self.tokenizer = self.view(model), tokenizer
        self.decode_step = decoding_step(self.model, self.compile)
        self.autocast = functools.partial(
            torch.autocast, self.device.type, self.dtype, enabled=self.dtype != torch.float32
        )
        self.n_rows = rows
        self.clear()

    def clear(self) -> None:
        """Forget all requests and all that the cache holds."""
        # A recorded step has a fixed number of rows; other steps have those that are in use.
        fixed = self.n_rows if self.compile else 0
        self.cache = Rows(self.model.cfg, self.device, self.dtype, fixed)
        self.prompts = PrefixIndex()  # of the samples that have a row
        self.prefix_cache = PrefixIndex()  # texts that have ended
        self.waiting: deque[tuple[Request, int]] = deque()  # samples that have no row yet
        self.prefilling: list[Sample] = []  # samples whose prompt is read
        self.running: list[Sample] = []  # samples that generate
        self.promised_bytes = 0  # memory that those two may need
        self.drawn_for: list[Sample] = []  # samples that params and seen are for
        self.params: RowParams | None = None
        self.seen: Seen | None = None

    def update(self, model: Transformer) -> None:
        """Take the weights that `model` has now, between requests, with recorded steps."""
        # An answer would begin with one model and end with another
        assert self.compile and not self.busy
        self.prefix_cache = PrefixIndex()
        # In their place: a CUDA graph reads weights and cache where it was recorded.
        for old, new in zip(self.model.parameters(), self.view(model).parameters(), strict=True):
            old.data.copy_(new.data)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def request(self, index: int, ids: list[int], params: SamplingParams) -> Request:
        """Return a request. Raise UserError if this model cannot serve it."""
        cfg, name = self.model.cfg, f"sample: prompt {index}"
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            what = f"is {type(ids).__name__} {ids!r:.60}; it must be a list of token ids"
            raise UserError(f"{name} {what}")
        # Everything is checked here: later errors would end the other requests, too.
        n, foreign = len(ids), [i for i in ids if not 0 <= i < cfg.vocab_size]
        if not ids:
            raise UserError(f"{name} has no tokens; begin an empty one with <|endoftext|>")
        if n > cfg.block_size:
            raise UserError(f"{name} has {n} tokens, block_size is {cfg.block_size}; shorten it")
        if foreign:
            what = f"has token id {foreign[0]}, the model has vocab_size={cfg.vocab_size}"
            raise UserError(f"{name} {what}; use its own tokenizer")
        if self.tokenizer is None and (params.json_object or params.stop):
            what = f"stop strings {params.stop}" if params.stop else "json_object"
            raise UserError(f"{name} asks for {what}, but there is no tokenizer")
        RowParams([params], cfg.vocab_size)  # raises UserError for ids that the model does not have
        # Prompt and result together may be one longer than the context: the last token is not fed
        # back.
        limit = min(params.max_new_tokens, cfg.block_size - n + 1)
        return Request(index, list(ids), params, limit)

    def add(self, request: Request) -> None:
        """Take a request. Raise UserError if not even one of its samples fits into
        the memory."""
        self.check_memory(1, row_length(self.model.cfg, request.length))
        self.waiting.extend((request, s) for s in range(request.params.n_samples))

    def cancel(self, request: Request) -> None:
        """Forget a request; its rows and their memory are free."""
        # A sample that waits has no row to free.
        self.waiting = deque(pair for pair in self.waiting if pair[0] is not request)
        for sample in self.prefilling + self.running:
            if sample.request is request:
                self.leave(sample)

    @torch.no_grad()
    def step(self, whole: bool = False) -> list[tuple[Sample, Token]]:
        """Return the next token of every sample that generates. Read a piece of the prompts;
        whole: all of them."""
        # A new prompt delays the texts that run by one piece of it at most.
        logits = self.decode()  # after the last tokens
        self.admit()
        while self.prefilling:
            self.prefill(whole)
            if not whole:
                break
        return self.draw(logits)

    def stream(self, ids: list[int], params: SamplingParams) -> Iterator[Token]:
        """Yield the continuation of `ids`. May be closed at any token; the next call reuses the
        cache."""
        return (token for _, token in self.run([self.request(0, ids, params)]))

    def run(
        self, requests: Iterable[Request], stop: Callable[[], bool] | None = None
    ) -> Iterator[tuple[Sample, Token]]:
        """Yield every token of every sample, until `stop` is true; take requests as rows become
        free."""
        # The caller's requests may stand beside others of the same engine.
        requests, mine = iter(requests), set()
        try:
            while True:
                while len(self.waiting) + len(self.prefilling) + len(self.running) < self.n_rows:
                    request = next(requests, None)
                    if request is None:
                        break
                    mine.add(request)
                    self.add(request)
                if not mine or (stop and stop()):
                    return
                for sample, token in self.step(whole=True):
                    if sample.last:
                        mine.remove(sample.request)
                    yield sample, token
        finally:
            for request in mine:
                self.cancel(request)

    def finish(
        self, requests: Iterable[Request], stop: Callable[[], bool] | None = None
    ) -> Iterator[Request]:
        """Yield the requests in the order of finishing, see `run`."""
        return (sample.request for sample, _ in self.run(requests, stop) if sample.last)

    def answer(
        self, prompts: Iterable[list[int]], params: SamplingParams
    ) -> Iterator[tuple[int, Result]]:
        """Yield (index, Result) of each prompt in the order of finishing.

        A bad prompt raises UserError when its turn comes."""
        requests = (self.request(i, ids, params) for i, ids in enumerate(prompts))
        return ((request.index, request.result()) for request in self.finish(requests))

    # ---- from waiting to running -----------------------------------------------------------------

    def admit(self) -> None:
        """Let waiting samples begin as long as there are rows, and memory for all that they may
        generate."""
        while self.waiting and len(self.prefilling) + len(self.running) < self.n_rows:
            # In the order of arrival: a large request is not passed by small ones.
            request, s = self.waiting[0]
            n_bytes = self.bytes_of(request)
            # The prefix cache makes room for requests.
            while (short := n_bytes > self.spare_bytes()) and self.prefix_cache.ids:
                self.prefix_cache.remove(next(iter(self.prefix_cache.ids)))
            if short and (self.prefilling or self.running):
                break
            generator = torch.Generator(self.device)
            generator.manual_seed(request.seed_of(s))
            self.waiting.popleft()
            self.prefilling.append(Sample(request, s, self.tokenizer, generator))
            self.promised_bytes += n_bytes
        if any(sample.row is None for sample in self.prefilling):
            self.assign_rows()

    def assign_rows(self) -> None:
        """Give samples a row, with what the cache has of their prompts."""
        new = [sample for sample in self.prefilling if sample.row is None]
        n_of_size = Counter(self.prompt_row(sample.request) for sample in new)
        reading = {sample.request for sample in self.prefilling if sample.row}
        for sample in new:
            request, size = sample.request, self.prompt_row(sample.request)
            if request in reading:  # another sample reads this very prompt
                continue
            # What need not be read where the cache has it: all of a prompt that another sample
            # read; else not the last token, for its logits, and nothing if all are to be scored
            is_read, ids = request.logits is not None, request.ids
            if not is_read:
                ids = ids[:-1] if request.params.prompt_logprobs < 0 else []
            every = *self.prompts.beside(ids), *self.prefix_cache.beside(ids)
            found = [(n_shared(text, ids), row) for text, row in every]
            has = [(min(n, len(row.cached_ids)), row) for n, row in found]
            n, source = max(has, key=itemgetter(0), default=(0, None))
            # A row that is being read brings more: wait for it.
            n_coming = max((n for n, _ in found), default=0)
            if not is_read and n_coming >= n + MIN_SHARED:
                continue
            # A short beginning is read again; a prompt that was read is copied whole.
            n = n if n >= MIN_SHARED or is_read else 0
            sample.row = row = Row()
            self.cache.fit(row, size, n_of_size[size])
            n_of_size[size] -= 1
            row.cached_ids = ids[:n]
            if n:
                row.copy(source, n)
            self.prompts.add(row, request.ids)
            if n == len(request.ids):
                self.prefilling.remove(sample)
                self.running.append(sample)
            else:
                reading.add(request)

    def prompt_row(self, request: Request) -> int:
        """Return the positions of the row that a sample begins with."""
        length = request.length if self.compile else len(request.ids)
        return row_length(self.model.cfg, length)

    def prefill(self, whole: bool) -> None:
        """Read a piece of the prompts: up to CHUNK_TOKENS of them in the order of coming; whole: of
        CHUNK_ROWS of about the same length."""
        # Others wait for a prompt that begins alike, see assign_rows.
        begun = [sample for sample in self.prefilling if sample.row]
        if whole:
            begun.sort(key=lambda sample: len(sample.request.ids))
        begin, cache = len(begun[0].row.cached_ids), begun[0].row.cache
        # A few tokens that a row has are read again with others that lack them.
        places = range(begin, begin + MIN_SHARED)
        group = [s for s in begun if s.row.cache is cache and len(s.row.cached_ids) in places]
        # The lengths of their pieces, and how many of them fit into one call
        T = [min(CHUNK_TOKENS, len(s.request.ids) - begin) for s in group]
        sizes = range(1, CHUNK_ROWS + 1)
        n_rows = max(n for n in sizes if whole or n * max(T[:n]) <= CHUNK_TOKENS)
        group, end = group[:n_rows], begin + max(T[:n_rows])
        slots, requests = [s.row.slot for s in group], [s.request for s in group]
        self.prefill_piece(cache, slots, requests, begin, end)
        for sample in group:
            sample.row.cached_ids = sample.request.ids[:end]
            if len(sample.request.ids) <= end:
                self.prefilling.remove(sample)
                self.running.append(sample)
        self.admit()  # samples that wait for these

    def prefill_piece(
        self, cache: KVCache, slots: list[int], requests: list[Request], begin: int, end: int
    ) -> None:
        """Read tokens begin to end of the prompts, all longer than `begin`, into these rows of
        the cache."""
        pieces = [request.ids[begin:end] for request in requests]
        # Short pieces are padded; what they write beyond their end is overwritten.
        padded = [ids + [0] * (end - begin - len(ids)) for ids in pieces]
        idx = torch.tensor(padded, device=self.device)
        rows = torch.tensor(slots, device=self.device)
        with self.autocast():
            hidden = self.model.hidden(idx, cache.chunk(begin, end - begin, rows))  # (n, T, C)
            for i, request in enumerate(requests):
                if request.params.prompt_logprobs >= 0 and request.logits is None:
                    self.score(request, hidden[i], request.ids[begin + 1 : end + 1])
                if len(request.ids) <= end:
                    last = len(request.ids) - 1 - begin
                    request.logits = self.model.lm_head(hidden[i, last : last + 1])[0].float()

    def score(self, request: Request, hidden: Tensor, following: list[int]) -> None:
        """Append the log-probabilities of the tokens that follow in the prompt. hidden (T, C)."""
        # All logits of a long prompt would take too much memory.
        size = max(1, CHUNK_ELEMENTS // self.model.cfg.vocab_size)
        k = request.params.prompt_logprobs
        targets = torch.tensor(following, device=self.device).split(size)
        for h, t in zip(hidden[: len(following)].split(size), targets, strict=True):
            ids, logps = sampling.top_logprobs(self.model.lm_head(h).float(), t, k)
            request.prompt_logprobs += map(dict, map(zip, ids.tolist(), logps.tolist()))

    def leave(self, sample: Sample) -> None:
        """Free the row of a sample; its text stays in the prefix cache while there is memory."""
        (self.running if sample in self.running else self.prefilling).remove(sample)
        self.promised_bytes -= self.bytes_of(sample.request)
        row = sample.row
        if row in self.prompts.ids:
            self.prompts.remove(row)
        # The last two: Ctrl-C while it was placed
        if row is None or row.cache is None or row not in row.cache.texts:
            return
        self.save_prefix(row)
        self.cache.leave(row.cache, row.slot)

    def save_prefix(self, row: Row) -> None:
        """Keep a copy of a text, unless a kept one begins so; drop one that it begins with."""
        # Of texts that begin alike the longest is worth keeping.
        ids = row.cached_ids
        for text, kept in self.prefix_cache.beside(ids):
            n = n_shared(text, ids)
            if n == len(ids):
                return
            if n == len(text):
                self.prefix_cache.remove(kept)
        if ids and cache_bytes(self.model.cfg, 1, len(ids), self.dtype) < self.spare_bytes():
            self.prefix_cache.add(row.saved(self.model.cfg), ids)
        # As many as there are rows; the oldest goes.
        if len(self.prefix_cache.ids) > self.n_rows:
            self.prefix_cache.remove(next(iter(self.prefix_cache.ids)))

    # ---- one token of each -----------------------------------------------------------------------

    def draw(self, logits: Tensor | None) -> list[tuple[Sample, Token]]:
        """Draw the next token of every running sample; those that end leave. logits (R, V) of
        those that go on."""
        samples = list(self.running)
        if not samples:
            return []
        # Samples that have just been read begin with the logits after their prompt.
        new = [sample.request.logits for sample in samples if not sample.ids]
        if new:
            logits = torch.stack(new) if logits is None else torch.cat([logits, torch.stack(new)])
        if samples != self.drawn_for:
            # Parameters as tensors, made again only when samples come or go
            V, params = self.model.cfg.vocab_size, [sample.request.params for sample in samples]
            self.drawn_for, self.params = samples, RowParams(params, V, self.device)
            prompts = [sample.request.ids for sample in samples]
            outputs = [sample.ids for sample in samples]
            penalty = any(p.has_penalty for p in params)
            self.seen = Seen(prompts, V, self.device, outputs) if penalty else None
        n_out = [len(sample.ids) for sample in samples]
        # Log-probabilities are the model's own; draws see the processed logits.
        processed = sampling.process(logits, self.params, self.seen, n_out)
        generators = [sample.generator for sample in samples]
        tokens = sampling.choose(processed, self.params, generators)  # (R,)
        for row, sample in enumerate(samples):
            if sample.json and not sample.json.after(tokens[row].item()):
                other = self.json_token(sample, processed[row : row + 1])
                tokens[row] = tokens[row] if other is None else other
        if self.seen is not None:
            self.seen.add(tokens)
        # One call names the alternatives for all rows, as many as any of them asks for.
        k = max(sample.request.params.logprobs for sample in samples)
        ids, logps = (x.tolist() for x in sampling.top_logprobs(logits, tokens, max(k, 0)))
        if not all(math.isfinite(of_row[0]) for of_row in logps):
            sampling.check_logits(logits)
        each = zip(samples, ids, logps, strict=True)
        drawn = [(sample, sample.push(*found)) for sample, *found in each]
        for sample, token in drawn:
            if token.finish:
                self.leave(sample)
        return drawn

    def json_token(self, sample: Sample, processed: Tensor) -> int | None:
        """Return the next id that keeps to JSON, drawn like any other. processed (1, V)."""
        params = sample.request.params
        rows = RowParams([params], processed.shape[1], self.device)
        x = processed if rows.temperature is None else processed / rows.temperature
        # First those that top_k, top_p and min_p keep, then all
        kept = [sampling.keep_likeliest(processed, rows)[0], x[0]]
        return sample.json.first(drawn_orders(kept, params.temperature > 0, sample.generator))

    def decode(self) -> Tensor | None:
        """Feed the tokens just drawn; return the next logits (R, V) float32."""
        if not self.running:
            return None
        for sample in self.running:
            self.cache.fit(sample.row, len(sample.row.cached_ids) + 1)
        lengths = {sample.row: len(sample.row.cached_ids) for sample in self.running}
        # The batch has the order of the caches, `running` that of arrival.
        parts, rows = self.cache.step(lengths)
        last = {sample.row: sample.ids[-1] for sample in self.running}
        logits = self.forward([last.get(row, 0) for row in rows], parts)
        at = {row: i for i, row in enumerate(rows)}
        order = [at[sample.row] for sample in self.running]
        for sample in self.running:
            sample.row.cached_ids.append(sample.ids[-1])
        return logits if order == list(range(len(rows))) else logits[order]

    def forward(self, tokens: list[int] | Tensor, parts: list[Part]) -> Tensor:
        """tokens (B,) of the rows of these parts of the cache -> logits (B, V) float32."""
        # A tenth less time per call than no_grad
        lean = nullcontext() if self.compile else torch.inference_mode()
        with lean, self.autocast():
            return self.decode_step(self.model, torch.as_tensor(tokens, device=self.device), parts)

    # ---- memory ----------------------------------------------------------------------------------

    def bytes_of(self, request: Request) -> int:
        """Return the memory that a sample may need."""
        length = row_length(self.model.cfg, request.length)
        return cache_bytes(self.model.cfg, 1, length, self.dtype)

    def spare_bytes(self) -> float:
        """Return the free memory that no sample may need."""
        return free_bytes(self.device) + self.cache.n_bytes() - self.promised_bytes

    def check_memory(self, rows: int, length: int) -> None:
        """Raise UserError if the cache of these rows is more than the memory."""
        needed = cache_bytes(self.model.cfg, rows, length, self.dtype)
        # What the prefix cache has can be given up.
        free = free_bytes(self.device) + self.cache.n_bytes()
        free += sum(row.cache.n_bytes for row in self.prefix_cache.ids)
        if needed > free:
            what = f"a cache of {rows} x {length} tokens takes {needed / 2**30:.1f} GiB"
            what += f", {free / 2**30:.1f} GiB are free; fewer tokens"
            raise UserError(f"sample: {what} (a shorter prompt, max_new_tokens) need less")
