"""Generated text: the engine, plain functions from (model, tokenizer, prompts, parameters) to texts, ids and logprobs.

    generate(...)  -> a Result for each prompt
    stream(...)    -> tokens as they come, with the text that may be shown
    completed(...) -> results in the order of finishing, for files of prompts of any length
    Session        -> one conversation: the cache is kept, only what is new is read

A fixed number of rows generates at a time; a row that is done takes the next waiting sample (continuous batching).
Prompts need no padding in the cache. Sample s of a prompt draws from its own generator, seeded with the prompt's
seed + s, so its text does not depend on the rows beside it, and torch's global generators are left alone. (To the bit
in float32. In bfloat16 and float16 the rounding of a product depends on the number of rows, and a near tie between two
tokens may fall otherwise.) Matrix products and the cache have the dtype of the autocast around the call, else that of
the weights.
"""

import contextlib
import copy
import functools
import itertools
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from groundup.errors import UserError
from groundup.generate.completion import (
    Completion,
    Params,
    Request,
    Result,
    Sample,
    Text,
    Token,
    check,
    check_requests,
    check_streamable,
)
from groundup.generate.kv_cache import CacheStep, KVCache
from groundup.generate.sampling import (
    Beams,
    RowParams,
    SamplingParams,
    Seen,
    check_logits,
    choose,
    process,
    top_logprobs,
)
from groundup.train.lora import LoRALinear, plain_linear
from model import CHUNK_ELEMENTS, ModelConfig, Transformer, compute_dtype, project
from tokenizer import Tokenizer

CHUNK_TOKENS = 512  # a prompt is read in pieces of that many tokens: memory stays bounded, products are large enough
CHUNK_ROWS = 16  # prompts that are read at once
PACKED_STEPS = 24  # to pack the matrices takes the time that so many steps of one row save
MIN_WIDTH = 64  # attention reads this many cached positions, twice as many, ...: a compiled step serves many lengths

# ---- calls ----------------------------------------------------------------------------------------------------------


def generate(
    model: Transformer, tokenizer: Tokenizer | None, prompts: list[list[int]], params: Params,
    batch_size: int = 0, compile: bool = False,
) -> list[Result]:  # fmt: skip
    """One Result per prompt. params: for all prompts, or one for each. batch_size: rows at a time, 0 = all.

    tokenizer=None: ids only. compile=True: the decoding step is compiled at its first use for a number of rows; takes
    10 to 60 s, less when torch finds it in its cache, and pays off from some thousand tokens. (Several rows in float32
    on a CPU are faster as they are, and stay so.) Raises SampleError.
    """
    requests = check_requests(model.cfg, tokenizer, prompts, params)
    results = dict(finished(model, tokenizer, requests, batch_size, compile))
    return [results[i] for i in range(len(requests))]


def stream(
    model: Transformer, tokenizer: Tokenizer | None, prompts: list[list[int]], params: Params,
    batch_size: int = 0, compile: bool = False,
) -> Iterator[Token]:  # fmt: skip
    """The tokens of all samples in the order in which they come. Arguments as for generate. Raises SampleError."""
    requests = check_requests(model.cfg, tokenizer, prompts, params)
    for request in requests:
        check_streamable(request.params)
    engine = engine_for(model, tokenizer, requests, batch_size, compile)
    return (token for _, token in engine.run(requests))


def completed(
    model: Transformer, tokenizer: Tokenizer | None, prompts: Iterable[list[int]], params: Params,
    batch_size: int, compile: bool = False,
) -> Iterator[tuple[int, Result]]:  # fmt: skip
    """(index of the prompt, Result) in the order of finishing; prompts are taken as rows become free.

    The cache grows with the longest text so far. Raises SampleError when a prompt's turn comes."""
    if batch_size < 1:
        raise UserError(f"sample: batch_size must be at least 1, got {batch_size}")
    each = itertools.repeat(params) if isinstance(params, SamplingParams) else one_for_each(params)
    requests = (check(i, ids, p, model.cfg, tokenizer) for i, (ids, p) in enumerate(zip(prompts, each, strict=False)))
    return finished(model, tokenizer, requests, batch_size, compile)


def one_for_each(params: Iterable[SamplingParams]) -> Iterator[SamplingParams]:
    yield from params
    raise UserError("sample: there are more prompts than sets of parameters")


class Session:
    """One text that grows in turns. The cache is kept: of the next prompt only what differs from it is read."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer | None, compile: bool = False) -> None:
        self.engine = Engine(model, tokenizer, rows=1, length=0, compile=compile)

    def stream(self, ids: list[int], params: SamplingParams) -> Iterator[Token]:
        """The continuation of `ids`. May be closed at any token; the next call reuses what was read. Raises
        SampleError."""
        check_streamable(params)
        request = check(0, ids, params, self.engine.model.cfg, self.engine.tokenizer)
        return (token for _, token in self.engine.run([request]))


def begin_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text to continue. An empty one begins a new document; a begin token that is not also the separator of
    documents (Llama's) stands before every text. Raises SampleError."""
    ids = tokenizer.encode(text)
    if not ids and tokenizer.bos_id < 0:
        raise UserError("sample: this tokenizer has no token that begins a text; give --prompt=TEXT")
    if not ids or tokenizer.bos_id not in (tokenizer.eot_id, -1):
        return [tokenizer.bos_id, *ids]
    return ids


def never_sampled(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Ids that neither add to a text nor end it: padding, reserved ones, those beyond the tokenizer."""
    silent = (tokenizer.token_byte_lengths() == 0).nonzero()[0].tolist()
    return tuple({*silent, *range(tokenizer.vocab_size, vocab_size)} - tokenizer.stop_ids)


# ---- requests -------------------------------------------------------------------------------------------------------


def finished(
    model: Transformer, tokenizer: Tokenizer | None, requests: Iterable[Request], batch_size: int, compile: bool
) -> Iterator[tuple[int, Result]]:
    """(index, Result) in the order of finishing. Runs of prompts with the same beam search become batches."""
    engine, ended = None, Counter()
    for beams, run in itertools.groupby(requests, lambda r: r.params if r.params.num_beams > 1 else None):
        if beams is not None:
            n_prompts = max(1, batch_size // beams.num_beams) if batch_size else None
            while group := list(itertools.islice(run, n_prompts)):
                yield from beam_search(model, tokenizer, group, compile)
            continue
        if engine is None:
            run = list(run) if isinstance(requests, list) else run
            engine = engine_for(model, tokenizer, run, batch_size, compile)
        for request, token in engine.run(run):
            ended[request.index] += token.finish != ""  # completions may be there already for tokens still to come
            if token.finish and ended[request.index] == request.params.n_samples:
                yield request.index, request.result()


def engine_for(
    model: Transformer, tokenizer: Tokenizer | None, requests: Iterable[Request], batch_size: int, compile: bool
) -> "Engine":
    """Rows and length as the requests need them, if they are a list; else `batch_size` rows of a cache that grows."""
    if not isinstance(requests, list):
        return Engine(model, tokenizer, batch_size, 0, compile)
    if batch_size < 0:
        raise UserError(f"sample: batch_size must be 0 (all at once) or more, got {batch_size}")
    n_samples = sum(request.params.n_samples for request in requests)
    rows = min(batch_size, n_samples) if batch_size else n_samples
    steps = max(request.limit for request in requests)
    return Engine(model, tokenizer, rows, max(request.length for request in requests), compile, steps)


# ---- engine ---------------------------------------------------------------------------------------------------------


class Engine:
    """Rows of one cache that generate together. held[row] are the ids whose keys and values the row holds."""

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer | None, rows: int, length: int, compile: bool,
        steps: int = PACKED_STEPS,
    ) -> None:  # fmt: skip
        """length: positions of the cache to begin with; steps: about how many there will be."""
        self.device = model.embed_tokens.weight.device
        self.dtype = compute_dtype(model.embed_tokens.weight)
        # Packed matrices serve several rows in float32 in half the time that inductor's call of the library takes.
        can_pack = PackedLinear.works(self.device, self.dtype)
        compile = compile and not (can_pack and rows > 1 and self.dtype == torch.float32)
        packed = can_pack and not compile and steps >= PACKED_STEPS
        self.model, self.tokenizer = for_inference(model, self.dtype, packed), tokenizer
        self.decode = compiled_step(self.device.type) if compile else decode_step
        self.compile = compile
        self.samples: list[Sample | None] = [None] * rows
        self.held: list[list[int]] = [[] for _ in range(rows)]
        self.generators = [torch.Generator(self.device) for _ in range(rows)]
        self.params: RowParams | None = None
        self.seen: Seen | None = None
        self.cache: KVCache | None = None
        if length:
            self.reserve(length)

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Token]]:
        """Every token of every sample of the requests, which are taken as rows become free."""
        waiting = ((request, s) for request in requests for s in range(request.params.n_samples))
        self.samples = [None] * len(self.samples)
        logits = torch.zeros(len(self.samples), self.model.cfg.vocab_size, device=self.device)
        while True:
            self.admit(waiting, logits)
            if not any(self.samples):
                return
            yield from self.choose(logits)
            if any(self.samples):
                logits = self.step()

    def admit(self, waiting: Iterator[tuple[Request, int]], logits: Tensor) -> None:
        """Give the free rows to waiting samples and set their logits (rows, V) to those after the prompt."""
        free = [row for row, sample in enumerate(self.samples) if sample is None]
        taken = list(zip(free, itertools.islice(waiting, len(free)), strict=False))
        if not taken:
            return
        for row, (request, s) in taken:
            self.samples[row] = Sample(request, s, self.tokenizer)
            self.generators[row].manual_seed(request.params.seed + s)
            self.set_params(row, request)
        self.reserve(max(request.length for _, (request, _) in taken))
        pairs = [(row, request) for row, (request, _) in taken]
        # First the samples of a prompt that was read earlier: another prompt may be read into the row that has it.
        self.share([(row, request) for row, request in pairs if request.logits is not None])
        new = [(row, request) for row, request in pairs if request.logits is None]
        first = {request: row for row, request in reversed(new)}
        self.read([(row, request) for request, row in first.items()])
        self.share(new)
        for row, request in pairs:
            logits[row] = request.logits

    def set_params(self, row: int, request: Request) -> None:
        if self.params is None:
            self.params = RowParams([request.params] * len(self.samples), self.model.cfg.vocab_size, self.device)
        if self.params.params[row] is not request.params:
            self.params.set(row, request.params)
        if request.params.has_penalty and self.seen is None:
            self.seen = Seen([()] * len(self.samples), self.model.cfg.vocab_size, self.device)
        if self.seen is not None:
            self.seen.reset(row, request.ids)

    def share(self, rows: list[tuple[int, Request]]) -> None:
        """Copy prompts that have been read into these rows."""
        for row, request in rows:
            if row != request.row:
                self.cache.copy_row(request.row, row, len(request.ids))
            self.held[row] = list(request.ids)

    @torch.no_grad()
    def read(self, rows: list[tuple[int, Request]]) -> None:
        """Read prompts into their rows, some at a time: those of about the same length, in pieces."""
        rows = sorted(rows, key=lambda pair: len(pair[1].ids))
        for first in range(0, len(rows), CHUNK_ROWS):
            group = rows[first : first + CHUNK_ROWS]
            begin = self.reusable(group[0][1]) if len(self.samples) == 1 else 0
            while group:
                end = min(begin + CHUNK_TOKENS, len(group[-1][1].ids))
                self.read_piece(group, begin, end)
                group = [pair for pair in group if len(pair[1].ids) > end]
                begin = end

    def reusable(self, request: Request) -> int:
        """How many tokens of the prompt the only row holds already; the last one is read again for its logits."""
        if request.params.prompt_logprobs >= 0:
            return 0
        pairs = zip(self.held[0], request.ids[:-1], strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.held[0]), len(request.ids) - 1))

    def read_piece(self, group: list[tuple[int, Request]], begin: int, end: int) -> None:
        """Tokens begin to end of the prompts, which are at least longer than begin."""
        pieces = [request.ids[begin:end] for _, request in group]
        idx = torch.tensor([ids + [0] * (end - begin - len(ids)) for ids in pieces], device=self.device)
        rows = torch.tensor([row for row, _ in group], device=self.device)
        with self.autocast():
            hidden = self.model.hidden(idx, self.cache.chunk(begin, end - begin, rows))  # (n, T, C)
            for i, (row, request) in enumerate(group):
                request.row, self.held[row] = row, request.ids[:end]
                if request.prompt_logprobs is not None:
                    request.prompt_logprobs += self.score(hidden[i], request, begin, end)
                if len(request.ids) <= end:
                    last = len(request.ids) - 1 - begin
                    request.logits = self.model.lm_head(hidden[i, last : last + 1])[0].float()

    def score(self, hidden: Tensor, request: Request, begin: int, end: int) -> list[dict[int, float]]:
        """Log-probabilities of the prompt's tokens after begin, up to the one at `end`. hidden (T, C)."""
        targets = torch.tensor(request.ids[begin + 1 : end + 1], device=self.device)
        size = max(1, CHUNK_ELEMENTS // self.model.cfg.vocab_size)
        found = []
        for h, t in zip(hidden[: len(targets)].split(size), targets.split(size), strict=True):
            ids, logps = top_logprobs(self.model.lm_head(h).float(), t, request.params.prompt_logprobs)
            found += [dict(zip(*pair, strict=True)) for pair in zip(ids.tolist(), logps.tolist(), strict=True)]
        return found

    @torch.no_grad()
    def choose(self, logits: Tensor) -> list[tuple[Request, Token]]:
        """The next token of every row at work; rows whose sample is done become free."""
        n_out = torch.tensor([len(sample.ids) if sample else 0 for sample in self.samples], device=self.device)
        self.tokens = choose(process(logits, self.params, self.seen, n_out), self.params, self.generators)  # (rows,)
        if self.seen is not None:
            self.seen.add(self.tokens)
        k = max(sample.request.params.logprobs for sample in self.samples if sample)
        ids, logps = (x.tolist() for x in top_logprobs(logits, self.tokens, max(k, 0)))
        given = []
        for row, sample in enumerate(self.samples):
            if sample is None:
                continue
            if not math.isfinite(logps[row][0]):
                check_logits(logits)
            token = sample.push(ids[row][0], ids[row], logps[row])
            if token.finish:
                self.samples[row] = None
            given.append((sample.request, token))
        return given

    @torch.no_grad()
    def step(self) -> Tensor:
        """Feed the tokens just chosen; -> logits (rows, V) float32. Free rows keep what they hold."""
        lengths = [len(held) if sample else -1 for held, sample in zip(self.held, self.samples, strict=True)]
        logits = self.forward(self.tokens, lengths)
        for sample, held in zip(self.samples, self.held, strict=True):
            if sample:
                held.append(sample.ids[-1])
        return logits

    def forward(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        """tokens (rows,) at positions `lengths` (-1 = leave the row as it is) -> logits (rows, V) float32."""
        width = min(power_of_two(max(lengths) + 1), self.cache.max_length)
        at = torch.tensor([n if n >= 0 else self.cache.max_length for n in lengths], device=self.device)
        span = self.cache.span[:width]
        if self.compile and self.device.type != "cuda":
            torch._dynamo.maybe_mark_dynamic(span, 0)  # and for all widths
        with self.autocast():
            logits = self.decode(self.model, tokens, self.cache.keys, self.cache.values, at, span)
        return logits.clone() if self.compile else logits  # a CUDA graph overwrites its result at the next step

    def reserve(self, length: int) -> None:
        """Make the cache hold at least `length` positions, keeping what it has. Raises SampleError: no memory."""
        if self.cache is not None and length <= self.cache.max_length:
            return
        cfg, rows, old = self.model.cfg, len(self.samples), self.cache
        length = length if old is None else max(length, min(2 * old.max_length, cfg.block_size))
        check_memory(cache_bytes(cfg, rows, length, self.dtype), rows, length, self.device)
        self.cache = KVCache(cfg, rows, length, self.device, self.dtype)
        if old is not None:
            for new, had in zip(self.cache.keys + self.cache.values, old.keys + old.values, strict=True):
                new[:, :, : old.max_length] = had[:, :, : old.max_length]
        if self.compile:
            for layer in self.cache.keys + self.cache.values:
                if self.device.type == "cuda":
                    torch._dynamo.mark_static_address(layer)  # a CUDA graph writes to it in place
                else:
                    torch._dynamo.maybe_mark_dynamic(layer, 2)  # one compiled step for caches of all lengths

    def autocast(self) -> contextlib.AbstractContextManager:
        kind = self.device.type
        return torch.autocast(kind, self.dtype, enabled=self.dtype != torch.float32)


def decode_step(
    model: Transformer, tokens: Tensor, keys: list[Tensor], values: list[Tensor], lengths: Tensor, span: Tensor
) -> Tensor:
    """tokens (B,) -> logits (B, V) float32 of what follows them."""
    hidden = model.hidden(tokens.unsqueeze(1), CacheStep(keys, values, lengths, span))
    return project(model.lm_head, hidden)[:, 0].float()


@functools.cache
def compiled_step(device_type: str) -> Callable:
    """decode_step compiled for each number of rows (and width, on a GPU). Raises SampleError: no compiler."""
    if device_type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise UserError("sample: compile=True needs a C++ compiler; install g++, or set compile=False")
    if device_type == "cuda":
        from torch._dynamo import config  # late: its import takes as long as all of torch

        config.recompile_limit = 128  # graphs, of all models, rows and widths; beyond torch's 8 a call fails
        return torch.compile(decode_step, dynamic=False, fullgraph=True, mode="reduce-overhead")
    return torch.compile(decode_step, dynamic=False)


def for_inference(model: Transformer, dtype: torch.dtype, packed: bool) -> Transformer:
    """The model in eval mode, its blocks as written, matrices in dtype; it shares with `model` all that stays equal.

    Blocks compiled for training would be compiled anew here. Embedding and norms keep their dtype, as in training.
    Adapters are added to copies of their matrices: the model in training keeps its own, generation costs no more.
    packed: on a CPU matrices are copied into the layout of its library, if there is room."""
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    same = {id(x): x for x in (*model.parameters(), *model.buffers())}
    compiled = {id(vars(block)["forward"]): None for block in model.layers if "forward" in vars(block)}
    view = copy.deepcopy(model, same | compiled)
    for block in view.layers:
        vars(block).pop("forward", None)
    device = model.embed_tokens.weight.device
    n_bytes = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    packed = packed and n_bytes < free_bytes(device) / 2
    for parent in list(view.modules()):
        if isinstance(parent, LoRALinear):
            continue  # replaced already: a parent comes before its children
        for name, child in parent.named_children():
            if isinstance(child, LoRALinear):
                child = plain_linear(nn.Parameter(child.merged_weight(), requires_grad=False))
                setattr(parent, name, child)
            if type(child) is nn.Linear and child.bias is None and packed:
                setattr(parent, name, PackedLinear(child.weight.detach().to(dtype)))
            elif isinstance(child, nn.Linear) and child.weight.dtype != dtype:
                child.weight = nn.Parameter(child.weight.detach().to(dtype), requires_grad=False)
    return view.eval()


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in the blocked layout of oneDNN, as inductor has it for frozen weights: 1.6 to
    2.3 times as fast as F.linear for 1 to 8 rows (2 cores with AVX-512)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        # The layout for many rows is as fast for a few; the one for a single row is slow for more.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, CHUNK_TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")

    @staticmethod
    def works(device: torch.device, dtype: torch.dtype) -> bool:
        available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and available


# ---- memory ---------------------------------------------------------------------------------------------------------


def power_of_two(length: int) -> int:
    return max(MIN_WIDTH, 1 << (length - 1).bit_length())


def cache_bytes(cfg: ModelConfig, rows: int, length: int, dtype: torch.dtype) -> int:
    """Memory of the keys and values of `rows` texts of `length` tokens."""
    return 2 * cfg.n_layer * rows * cfg.n_kv_head * (length + 1) * cfg.head_dim * dtype.itemsize


def free_bytes(device: torch.device) -> float:
    """Memory that can still be had on the device; infinite where nobody says."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    path = Path("/proc/meminfo")
    if device.type != "cpu" or not path.exists():
        return math.inf
    lines = dict(line.split(":") for line in path.read_text(encoding="utf-8").splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])


def check_memory(needed: int, rows: int, length: int, device: torch.device) -> None:
    free = free_bytes(device)
    if needed > free:
        raise UserError(
            f"sample: the cache of {rows} rows of {length} tokens takes {needed / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} GiB are free; fewer rows (batch_size, n) or fewer tokens need less"
        )


# ---- beam search ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def beam_search(
    model: Transformer, tokenizer: Tokenizer | None, requests: list[Request], compile: bool
) -> list[tuple[int, Result]]:
    """(index, Result) of requests with the same parameters: row b*K + k of the cache is beam k of request b."""
    params = requests[0].params
    K = params.num_beams
    engine = Engine(model, tokenizer, len(requests) * K, max(request.length for request in requests), compile)
    engine.read([(b * K, request) for b, request in enumerate(requests)])
    engine.share([(b * K + k, request) for b, request in enumerate(requests) for k in range(K)])
    logits = torch.stack([request.logits for request in requests for _ in range(K)])
    limits = [request.limit for request in requests]
    beams = Beams([request.ids for request in requests], params, limits, model.cfg.vocab_size, engine.device)
    lengths = [len(held) for held in engine.held]
    while True:
        check_logits(logits)  # of nothing finite no beam would be left; each step waits for the device anyway
        tokens, parents = beams.advance(logits)
        if beams.all_ended():
            break
        engine.cache.select(parents, max(lengths))
        # A prompt that has ended may be full.
        lengths = [-1 if n < 0 or n >= engine.cache.max_length else n for n in lengths]
        logits = engine.forward(tokens, lengths)
        lengths = [n + 1 if n >= 0 else n for n in lengths]
    for request, ranked in zip(requests, beams.results(), strict=True):
        for s, beam in enumerate(ranked[: params.n]):
            request.completions[s] = beam_completion(tokenizer, params, beam.ids, beam.logprob)
    return [(request.index, request.result()) for request in requests]


def beam_completion(tokenizer: Tokenizer | None, params: SamplingParams, ids: list[int], logprob: float) -> Completion:
    stopped = ids[-1] in params.stop_ids
    text = Text(tokenizer, params)
    for token in ids[:-1] if stopped else ids:
        text.push(token, False)
    text.end()
    reason = ids[-1] if stopped else None
    return Completion(text.shown, ids, "stop" if stopped else "length", reason, None, logprob)
