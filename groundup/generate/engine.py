"""Generation: plain functions from (model, tokenizer, prompts, parameters) to texts, ids and log-probabilities.

    generate(...)       -> a Result for each prompt
    generate_each(...)  -> results in the order of finishing, for files of prompts of any length
    Engine.stream(...)  -> the tokens of one text as they are drawn; only what is new of the prompt is read

A fixed number of rows generates at a time; a row that ends takes the next waiting sample (continuous batching). The
cache has no padding. Each sample of a prompt draws from its own generator, seeded by a hash of the seed, the prompt's
ids and the sample's number: independent of other prompts, samples and seeds, and the same ids in any batch (in float32;
in bfloat16 and float16 the number of rows changes the rounding, and near ties may fall otherwise). torch's global
generators are not touched. Products and cache have the dtype of the autocast around the call, else that of the weights.
"""

import copy
import functools
import itertools
import math
import os
import shutil
import timeit
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from groundup.errors import UserError
from groundup.generate import sampling
from groundup.generate.completion import Params, Request, Result, Sample, Token, check
from groundup.generate.kv_cache import CacheStep, KVCache
from groundup.generate.sampling import Beams, RowParams, SamplingParams, Seen
from groundup.train.device import autocast
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
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    if not prompts or len(each) != len(prompts) or batch_size < 0:
        raise UserError(f"sample: cannot take {len(prompts)} prompts, {len(each)} sets of parameters, {batch_size=}")
    requests = [check(i, ids, p, model.cfg, tokenizer) for i, (ids, p) in enumerate(zip(prompts, each, strict=True))]
    n_samples = sum(request.params.n_samples for request in requests)
    length, steps = max(request.length for request in requests), max(request.limit for request in requests)
    rows = min(batch_size or n_samples, n_samples)
    results = dict(run_all(model, tokenizer, requests, rows, compile, length, steps))
    return [results[i] for i in range(len(requests))]


def generate_each(
    model: Transformer, tokenizer: Tokenizer | None, prompts: Iterable[list[int]], params: SamplingParams,
    batch_size: int, compile: bool = False,
) -> Iterator[tuple[int, Result]]:  # fmt: skip
    """Yield (index of the prompt, Result) in the order of finishing; take prompts as rows become free.

    The cache grows with the longest text so far. A bad prompt raises UserError when its turn comes."""
    requests = (check(i, ids, params, model.cfg, tokenizer) for i, ids in enumerate(prompts))
    return run_all(model, tokenizer, requests, batch_size, compile)


def run_all(
    model: Transformer, tokenizer: Tokenizer | None, requests: Iterable[Request], rows: int, compile: bool,
    length: int = 0, steps: int = PACKED_STEPS,
) -> Iterator[tuple[int, Result]]:  # fmt: skip
    """Yield (index, Result) in the order of finishing. rows, length, steps: of the engine that draws samples."""
    engines: dict[int, Engine] = {}
    for K, run in itertools.groupby(requests, lambda request: request.params.num_beams):
        if K not in engines:
            shape = (rows, length, compile, steps) if K == 1 else (K, 0, compile)
            engines[K] = Engine(model, tokenizer, *shape)
        if K > 1:
            yield from ((request.index, engines[K].beam_search(request)) for request in run)
            continue
        for sample, token in engines[1].run(run):
            request = sample.request
            if token.finish and len(request.completions) == request.params.n_samples:
                yield request.index, request.result()


class Engine:
    """Rows of one cache that generate together. held[row]: the ids whose keys and values are in the cache."""

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer | None, rows: int, length: int = 0, compile: bool = False,
        steps: int = PACKED_STEPS,
    ) -> None:  # fmt: skip
        """length: positions of the cache at first; steps: about how many there will be."""
        self.device = model.embed_tokens.weight.device
        self.dtype = compute_dtype(model.embed_tokens.weight)
        # For several rows in float32 packed matrices take half the time of inductor's call of the library.
        can_pack = PackedLinear.works(self.device, self.dtype)
        self.compile = compile and not (can_pack and rows > 1 and self.dtype == torch.float32)
        packed = can_pack and not self.compile and steps >= PACKED_STEPS
        self.model, self.tokenizer = for_inference(model, self.dtype, packed, rows), tokenizer
        self.decode = compiled_step(self.device.type) if self.compile else decode_step
        self.samples: list[Sample | None] = [None] * rows
        self.held: list[list[int]] = [[] for _ in range(rows)]
        self.autocast = functools.partial(autocast, self.device, self.dtype)
        self.generators = [torch.Generator(self.device) for _ in range(rows)]
        self.logits = torch.zeros(rows, model.cfg.vocab_size, device=self.device)
        self.params: RowParams | None = None
        self.seen: Seen | None = None  # if a row ever had a penalty
        self.cache: KVCache | None = None
        self.reserve(length)

    def stream(self, ids: list[int], params: SamplingParams) -> Iterator[Token]:
        """Yield the continuation of `ids` by one row. May be closed at any token; the next call reuses the cache."""
        request = check(0, ids, params, self.model.cfg, self.tokenizer)
        return (token for _, token in self.run([request]))

    @torch.no_grad()
    def run(self, requests: Iterable[Request]) -> Iterator[tuple[Sample, Token]]:
        """Yield every token of every sample; take requests as rows become free."""
        waiting = ((request, s) for request in requests for s in range(request.params.n_samples))
        self.samples = [None] * len(self.samples)
        while True:
            self.admit(waiting)
            if not any(self.samples):
                return
            yield from self.draw()
            if any(self.samples):
                self.feed()

    def admit(self, waiting: Iterator[tuple[Request, int]]) -> None:
        """Give the free rows to waiting samples; their logits are those after the prompt."""
        free = [row for row, sample in enumerate(self.samples) if sample is None]
        taken = {row: Sample(*found, self.tokenizer) for row, found in zip(free, waiting, strict=False)}
        if not taken:
            return
        pairs = [(row, sample.request) for row, sample in taken.items()]
        params = self.params.params if self.params else [pairs[0][1].params] * len(self.samples)
        for row, sample in taken.items():
            self.samples[row], params[row] = sample, sample.request.params
            self.generators[row].manual_seed(sample.request.seed_of(sample.index))
        self.params = RowParams(params, self.model.cfg.vocab_size, self.device)
        if self.seen is None and any(p.has_penalty for p in params):
            self.seen = Seen([()] * len(params), self.model.cfg.vocab_size, self.device)
        for row, request in pairs if self.seen else ():
            self.seen.reset(row, request.ids)
        self.reserve(max(request.length for _, request in pairs))
        # First copy prompts that were read earlier: another prompt may be read into their row.
        self.share([pair for pair in pairs if pair[1].logits is not None])
        new = [pair for pair in pairs if pair[1].logits is None]
        first = {request: row for row, request in reversed(new)}
        self.read([(row, request) for request, row in first.items()])
        self.share(new)
        for row, request in pairs:
            self.logits[row] = request.logits

    def share(self, pairs: list[tuple[int, Request]]) -> None:
        """Copy prompts that have been read into these rows."""
        for row, request in pairs:
            if row != request.row:
                self.cache.copy_row(request.row, row, len(request.ids))
            self.held[row] = list(request.ids)

    def read(self, pairs: list[tuple[int, Request]]) -> None:
        """Read prompts into their rows: CHUNK_ROWS of about the same length at a time, in pieces."""
        pairs = sorted(pairs, key=lambda pair: len(pair[1].ids))
        for first in range(0, len(pairs), CHUNK_ROWS):
            group = pairs[first : first + CHUNK_ROWS]
            begin = 0
            if len(self.samples) == 1 and group[0][1].params.prompt_logprobs < 0:
                # What the cache has of the prompt is not read again, but for the last token, whose logits are needed.
                begin = len(os.path.commonprefix([self.held[0], group[0][1].ids[:-1]]))
            while group:
                end = min(begin + CHUNK_TOKENS, len(group[-1][1].ids))
                self.read_piece(group, begin, end)
                group = [pair for pair in group if len(pair[1].ids) > end]
                begin = end

    def read_piece(self, group: list[tuple[int, Request]], begin: int, end: int) -> None:
        """Read tokens begin to end of the prompts, all longer than `begin`."""
        pieces = [request.ids[begin:end] for _, request in group]
        idx = torch.tensor([ids + [0] * (end - begin - len(ids)) for ids in pieces], device=self.device)
        rows = torch.tensor([row for row, _ in group], device=self.device)
        with self.autocast():
            hidden = self.model.hidden(idx, self.cache.chunk(begin, end - begin, rows))  # (n, T, C)
            for i, (row, request) in enumerate(group):
                request.row, self.held[row] = row, request.ids[:end]
                if request.params.prompt_logprobs >= 0:
                    self.score(request, hidden[i], request.ids[begin + 1 : end + 1])
                if len(request.ids) <= end:
                    last = len(request.ids) - 1 - begin
                    request.logits = self.model.lm_head(hidden[i, last : last + 1])[0].float()

    def score(self, request: Request, hidden: Tensor, following: list[int]) -> None:
        """Append the log-probabilities of the tokens that follow in the prompt. hidden (T, C)."""
        size = max(1, CHUNK_ELEMENTS // self.model.cfg.vocab_size)
        targets = torch.tensor(following, device=self.device).split(size)
        for h, t in zip(hidden[: len(following)].split(size), targets, strict=True):
            ids, logps = sampling.top_logprobs(self.model.lm_head(h).float(), t, request.params.prompt_logprobs)
            request.prompt_logprobs += map(dict, map(zip, ids.tolist(), logps.tolist()))

    def draw(self) -> Iterator[tuple[Sample, Token]]:
        """Draw and yield the next token of every busy row; free the rows whose sample ends."""
        n_out = torch.tensor([len(sample.ids) if sample else 0 for sample in self.samples], device=self.device)
        logits = sampling.process(self.logits, self.params, self.seen, n_out)
        self.tokens = sampling.choose(logits, self.params, self.generators)  # (rows,)
        if self.seen is not None:
            self.seen.add(self.tokens)
        k = max(sample.request.params.logprobs for sample in self.samples if sample)
        ids, logps = (x.tolist() for x in sampling.top_logprobs(self.logits, self.tokens, max(k, 0)))
        for row, sample in enumerate(self.samples):
            if sample is None:
                continue
            if not math.isfinite(logps[row][0]):
                sampling.check_logits(self.logits)
            token = sample.push(ids[row], logps[row])
            if token.finish:
                self.samples[row] = None
            yield sample, token

    def feed(self) -> None:
        """Feed the tokens just drawn, for the next logits. Free rows keep their cache."""
        lengths = [len(held) if sample else -1 for held, sample in zip(self.held, self.samples, strict=True)]
        self.logits = self.forward(self.tokens, lengths)
        for sample, held in zip(self.samples, self.held, strict=True):
            if sample:
                held.append(sample.ids[-1])

    def forward(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        """tokens (rows,) at positions `lengths` (-1 = do not touch the row) -> logits (rows, V) float32."""
        width = min(max(MIN_WIDTH, 1 << max(lengths).bit_length()), self.cache.max_length)  # a power of two
        at = torch.tensor([n if n >= 0 else self.cache.max_length for n in lengths], device=self.device)
        span = self.cache.span[:width]
        if self.compile and self.device.type != "cuda":
            torch._dynamo.maybe_mark_dynamic(span, 0)  # and for all widths
        with self.autocast():
            logits = self.decode(self.model, tokens, self.cache.keys, self.cache.values, at, span)
        return logits.clone() if self.compile else logits  # a CUDA graph overwrites its result at the next step

    def reserve(self, length: int) -> None:
        """Grow the cache to at least `length` positions. Raise UserError if memory does not suffice."""
        cfg, rows, old = self.model.cfg, len(self.samples), self.cache
        held = old.max_length if old else 0
        if length <= held:
            return
        length = max(length, min(2 * held, cfg.block_size))
        needed, free = cache_bytes(cfg, rows, length, self.dtype), free_bytes(self.device)
        if needed > free:
            raise UserError(
                f"sample: the cache of {rows} rows of {length} tokens takes {needed / 2**30:.1f} GiB, "
                f"{free / 2**30:.1f} GiB are free; fewer rows (batch_size, n) or fewer tokens need less"
            )
        self.cache = KVCache(cfg, rows, length, self.device, self.dtype)
        for new, had in zip(self.cache.layers, old.layers if old else (), strict=False):
            new[:, :, :held] = had[:, :, :held]
        for layer in self.cache.layers if self.compile else ():
            if self.device.type == "cuda":
                torch._dynamo.mark_static_address(layer)  # a CUDA graph writes to it in place
            else:
                torch._dynamo.maybe_mark_dynamic(layer, 2)  # one compiled step for caches of all lengths

    @torch.no_grad()
    def beam_search(self, request: Request) -> Result:
        """Return the n best texts of num_beams rows, the best first."""
        K, n = request.params.num_beams, len(request.ids)
        self.reserve(request.length)
        self.read([(0, request)])
        self.share([(k, request) for k in range(K)])
        beams = Beams(request.ids, request.params, request.limit, self.model.cfg.vocab_size, self.device)
        logits = request.logits.expand(K, -1)
        while True:
            sampling.check_logits(logits)  # without finite logits no beam is left
            tokens, parents = beams.advance(logits)
            if beams.ended:
                break
            self.cache.select(parents, n)
            logits = self.forward(tokens, [n] * K)
            n += 1
        for s, beam in enumerate(beams.finished[: request.params.n]):
            sample = Sample(request, s, self.tokenizer)
            for token in beam.ids:
                sample.push([token], [0.0])
            request.completions[s] = request.completions[s]._replace(cumulative_logprob=beam.logprob)
        return request.result()


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


def for_inference(model: Transformer, dtype: torch.dtype, packed: bool, rows: int = 0) -> Transformer:
    """Return a copy of the model in eval mode with eager blocks and matrices in `dtype`; tensors that need no change
    are shared with `model`.

    Blocks compiled for training would be compiled anew here. Embedding and norms keep their dtype, as in training.
    Adapters are merged into copies of their matrices. packed: on a CPU, pack the matrices if memory suffices; for one
    row in float32 only those of a shape that is then multiplied faster, which depends on the CPU."""
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    same = {id(x): x for x in (*model.parameters(), *model.buffers())}
    compiled = {id(vars(block)["forward"]): None for block in model.layers if "forward" in vars(block)}
    view = copy.deepcopy(model, same | compiled)
    for block in view.layers:
        vars(block).pop("forward", None)
    n_bytes = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    pays: dict[torch.Size, bool] = {}  # of the shapes that were timed
    packed = packed and n_bytes < free_bytes(model.embed_tokens.weight.device) / 2
    for parent in list(view.modules()):
        if isinstance(parent, LoRALinear):
            continue  # replaced already: a parent comes before its children
        for name, child in parent.named_children():
            if isinstance(child, LoRALinear):
                child = plain_linear(nn.Parameter(child.merged_weight(), requires_grad=False), child.bias)
                setattr(parent, name, child)
            if rows == 1 and type(child) is nn.Linear and child.weight.dtype == dtype == torch.float32:
                if packed and child.weight.shape not in pays:
                    pays[child.weight.shape] = packing_pays(child.weight)
            if type(child) is nn.Linear and packed and pays.get(child.weight.shape, True):
                bias = None if child.bias is None else child.bias.detach().to(dtype)
                setattr(parent, name, PackedLinear(child.weight.detach().to(dtype), bias))
            elif isinstance(child, nn.Linear) and child.weight.dtype != dtype:
                child.weight = nn.Parameter(child.weight.detach().to(dtype), requires_grad=False)
    return view.eval()


@torch.no_grad()
def packing_pays(weight: Tensor) -> bool:
    """Return whether a single row is multiplied faster by the packed weight: the best of five times of each."""
    x, times = weight.new_ones(1, weight.shape[1]), []
    for multiply in (PackedLinear(weight), functools.partial(F.linear, weight=weight)):
        multiply(x)
        times.append(min(timeit.repeat(functools.partial(multiply, x), number=1, repeat=5)))
    return times[0] < times[1]


class PackedLinear(nn.Module):
    """A linear layer with its weight in oneDNN's blocked layout, as inductor lays out frozen weights: 1.6 to 2.3 times
    as fast as F.linear for 1 to 8 rows (2 cores with AVX-512); for one row in float32 0.5 to 1 on some Intel cores."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.bias = bias
        # The layout for many rows is as fast for a few; the one for a single row is slow for more.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, CHUNK_TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    @staticmethod
    def works(device: torch.device, dtype: torch.dtype) -> bool:
        available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and available


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
