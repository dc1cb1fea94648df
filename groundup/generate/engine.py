"""Generation: plain functions from (model, tokenizer, prompts, parameters) to texts, ids and log-probabilities.

    generate(...)       -> a Result for each prompt
    stream(...)         -> tokens as they are drawn, with the text that may be shown
    generate_each(...)  -> results in the order of finishing, for files of prompts of any length
    Session             -> one conversation: the cache is kept, only new tokens are read

A fixed number of rows generates at a time; a row that ends takes the next waiting sample (continuous batching). The
cache has no padding. Sample s of a prompt draws from its own generator, seeded with the prompt's seed + s, so its ids
do not depend on the rows beside it (in float32; in bfloat16 and float16 the number of rows changes the rounding, and
near ties may fall otherwise). torch's global generators are not touched. Products and cache have the dtype of the
autocast around the call, else that of the weights.
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

CHUNK_TOKENS = 512  # a prompt is read in pieces of this many tokens, which bounds memory
CHUNK_ROWS = 16  # prompts that are read at once
PACKED_STEPS = 24  # from this many steps of one row on, packing the matrices saves time
MIN_WIDTH = 64  # attention reads 64, 128, 256, ... cached positions, so that a compiled step serves many lengths

def generate(
    model: Transformer, tokenizer: Tokenizer | None, prompts: list[list[int]], params: Params,
    batch_size: int = 0, compile: bool = False,
) -> list[Result]:  # fmt: skip
    """Return one Result per prompt. params: for all prompts, or one for each. batch_size: rows at a time, 0 = all.

    tokenizer=None: ids only. compile=True: compile the decoding step for each number of rows; this takes 10 to 60 s and
    pays off from some thousand tokens. (Several rows in float32 on a CPU are faster eager, and stay so.)
    """
    requests = check_requests(model.cfg, tokenizer, prompts, params)
    results = dict(run_all(model, tokenizer, requests, batch_size, compile))
    return [results[i] for i in range(len(requests))]


def stream(
    model: Transformer, tokenizer: Tokenizer | None, prompts: list[list[int]], params: Params,
    batch_size: int = 0, compile: bool = False,
) -> Iterator[Token]:  # fmt: skip
    """Yield the tokens of all samples as they are drawn. Arguments as for generate."""
    requests = check_requests(model.cfg, tokenizer, prompts, params)
    for request in requests:
        check_streamable(request.params)
    engine = engine_for(model, tokenizer, requests, batch_size, compile)
    return (token for _, token in engine.run(requests))


def generate_each(
    model: Transformer, tokenizer: Tokenizer | None, prompts: Iterable[list[int]], params: Params,
    batch_size: int, compile: bool = False,
) -> Iterator[tuple[int, Result]]:  # fmt: skip
    """Yield (index of the prompt, Result) in the order of finishing; take prompts as rows become free.

    The cache grows with the longest text so far. A bad prompt raises UserError when its turn comes."""
    if batch_size < 1:
        raise UserError(f"sample: batch_size must be at least 1, got {batch_size}")
    each = itertools.repeat(params) if isinstance(params, SamplingParams) else one_for_each(params)
    requests = (check(i, ids, p, model.cfg, tokenizer) for i, (ids, p) in enumerate(zip(prompts, each, strict=False)))
    return run_all(model, tokenizer, requests, batch_size, compile)


def one_for_each(params: Iterable[SamplingParams]) -> Iterator[SamplingParams]:
    yield from params
    raise UserError("sample: there are more prompts than sets of parameters")


class Session:
    """One text that grows in turns. The cache is kept between turns, so only new tokens of a prompt are computed."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer | None, compile: bool = False) -> None:
        self.engine = Engine(model, tokenizer, rows=1, length=0, compile=compile)

    def stream(self, ids: list[int], params: SamplingParams) -> Iterator[Token]:
        """Yield the continuation of `ids`. May be closed at any token; the next call reuses the cache."""
        check_streamable(params)
        request = check(0, ids, params, self.engine.model.cfg, self.engine.tokenizer)
        return (token for _, token in self.engine.run([request]))


def run_all(
    model: Transformer, tokenizer: Tokenizer | None, requests: Iterable[Request], batch_size: int, compile: bool
) -> Iterator[tuple[int, Result]]:
    """Yield (index, Result) in the order of finishing. Neighbours with the same beam search share a batch."""
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
    """Return an engine with the rows and cache that a list of requests needs; for an iterator, the cache grows."""
    if not isinstance(requests, list):
        return Engine(model, tokenizer, batch_size, 0, compile)
    if batch_size < 0:
        raise UserError(f"sample: batch_size must be 0 (all at once) or more, got {batch_size}")
    n_samples = sum(request.params.n_samples for request in requests)
    rows = min(batch_size, n_samples) if batch_size else n_samples
    steps = max(request.limit for request in requests)
    return Engine(model, tokenizer, rows, max(request.length for request in requests), compile, steps)


class Engine:
    """Rows of one cache that generate together. held[row]: the ids whose keys and values are in the cache."""

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer | None, rows: int, length: int, compile: bool,
        steps: int = PACKED_STEPS,
    ) -> None:  # fmt: skip
        """length: positions of the cache at first; steps: about how many there will be."""
        self.device = model.embed_tokens.weight.device
        self.dtype = compute_dtype(model.embed_tokens.weight)
        # For several rows in float32 packed matrices take half the time of inductor's call of the library.
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
        """Yield every token of every sample; take requests as rows become free."""
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
        # First copy prompts that were read earlier: another prompt may be read into their row.
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
        """Read prompts into their rows: CHUNK_ROWS of about the same length at a time, in pieces."""
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
        """Return how many tokens of the prompt are in the cache; the last one is read again for its logits."""
        if request.params.prompt_logprobs >= 0:
            return 0
        pairs = zip(self.held[0], request.ids[:-1], strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.held[0]), len(request.ids) - 1))

    def read_piece(self, group: list[tuple[int, Request]], begin: int, end: int) -> None:
        """Read tokens begin to end of the prompts, all longer than `begin`."""
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
        """Return the log-probabilities of the prompt's tokens begin + 1 to `end`. hidden (T, C)."""
        targets = torch.tensor(request.ids[begin + 1 : end + 1], device=self.device)
        size = max(1, CHUNK_ELEMENTS // self.model.cfg.vocab_size)
        found = []
        for h, t in zip(hidden[: len(targets)].split(size), targets.split(size), strict=True):
            ids, logps = top_logprobs(self.model.lm_head(h).float(), t, request.params.prompt_logprobs)
            found += [dict(zip(*pair, strict=True)) for pair in zip(ids.tolist(), logps.tolist(), strict=True)]
        return found

    @torch.no_grad()
    def choose(self, logits: Tensor) -> list[tuple[Request, Token]]:
        """Draw the next token of every busy row; free the rows whose sample ends."""
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
        """Feed the tokens just drawn; return logits (rows, V) float32. Free rows keep their cache."""
        lengths = [len(held) if sample else -1 for held, sample in zip(self.held, self.samples, strict=True)]
        logits = self.forward(self.tokens, lengths)
        for sample, held in zip(self.samples, self.held, strict=True):
            if sample:
                held.append(sample.ids[-1])
        return logits

    def forward(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        """tokens (rows,) at positions `lengths` (-1 = do not touch the row) -> logits (rows, V) float32."""
        width = min(power_of_two(max(lengths) + 1), self.cache.max_length)
        at = torch.tensor([n if n >= 0 else self.cache.max_length for n in lengths], device=self.device)
        span = self.cache.span[:width]
        if self.compile and self.device.type != "cuda":
            torch._dynamo.maybe_mark_dynamic(span, 0)  # and for all widths
        with self.autocast():
            logits = self.decode(self.model, tokens, self.cache.keys, self.cache.values, at, span)
        return logits.clone() if self.compile else logits  # a CUDA graph overwrites its result at the next step

    def reserve(self, length: int) -> None:
        """Grow the cache to at least `length` positions. Raise UserError if memory does not suffice."""
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
    """tokens (B,) -> logits (B, V) float32 of the next ones."""
    hidden = model.hidden(tokens.unsqueeze(1), CacheStep(keys, values, lengths, span))
    return project(model.lm_head, hidden)[:, 0].float()


@functools.cache
def compiled_step(device_type: str) -> Callable:
    """Return decode_step compiled for each number of rows (and width, on a GPU). Raise UserError if it cannot be."""
    if device_type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise UserError("sample: compile=True needs a C++ compiler; install g++, or set compile=False")
    if device_type == "cuda":
        from torch._dynamo import config  # late: its import takes as long as all of torch

        config.recompile_limit = 128  # graphs, of all models, rows and widths; beyond torch's 8 a call fails
        return torch.compile(decode_step, dynamic=False, fullgraph=True, mode="reduce-overhead")
    return torch.compile(decode_step, dynamic=False)


def for_inference(model: Transformer, dtype: torch.dtype, packed: bool) -> Transformer:
    """Return a copy of the model in eval mode with eager blocks and matrices in `dtype`; tensors that need no change
    are shared with `model`.

    Blocks compiled for training would be compiled anew here. Embedding and norms keep their dtype, as in training.
    Adapters are merged into copies of their matrices. packed: on a CPU, pack the matrices if memory suffices."""
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
    """A linear layer with its weight in oneDNN's blocked layout, as inductor lays out frozen weights: 1.6 to 2.3 times
    as fast as F.linear for 1 to 8 rows (2 cores with AVX-512)."""

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


def power_of_two(length: int) -> int:
    return max(MIN_WIDTH, 1 << (length - 1).bit_length())


def cache_bytes(cfg: ModelConfig, rows: int, length: int, dtype: torch.dtype) -> int:
    """Return the memory of the keys and values of `rows` texts of `length` tokens."""
    return 2 * cfg.n_layer * rows * cfg.n_kv_head * (length + 1) * cfg.head_dim * dtype.itemsize


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


def check_memory(needed: int, rows: int, length: int, device: torch.device) -> None:
    free = free_bytes(device)
    if needed > free:
        raise UserError(
            f"sample: the cache of {rows} rows of {length} tokens takes {needed / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} GiB are free; fewer rows (batch_size, n) or fewer tokens need less"
        )


@torch.no_grad()
def beam_search(
    model: Transformer, tokenizer: Tokenizer | None, requests: list[Request], compile: bool
) -> list[tuple[int, Result]]:
    """Return (index, Result) of requests with the same parameters: row b*K + k of the cache is beam k of request b."""
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
        check_logits(logits)  # without finite logits no beam is left; each step waits for the device anyway
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
