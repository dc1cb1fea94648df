"""Row generate: greedy generation of ours and of transformers' generate(), with the same random weights.

Tokens/s of whole calls, the prompt included. The limit: every step reads each matrix and the cached keys and values
once, at the rate at which a sum reads as many bytes, measured in the same rounds. transformers, compiled: on a GPU as
generate() compiles itself with a static cache; on a CPU, where it does not, its forward as a whole.
"""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import timing
import torch
from bench_train import SHAPES, compile_ways, llama_config, shapes_of
from timing import Line, Options

from groundup.errors import UserError
from groundup.generate.engine import cache_bytes, generate
from groundup.generate.sampling import SamplingParams
from groundup.train.device import autocast
from groundup.train.plan import parameter_table
from model import ModelConfig, Transformer

PROMPT_TOKENS = 16
Call = Callable[[], list[list[int]]]


def generate_row(options: Options) -> Iterator[Line]:
    """Tokens/s for each shape, alone and in a batch."""
    new_tokens = 32 if options.quick else options.keys["new_tokens"]
    for shape in shapes_of(options, ["10M"] if options.quick else ["25M", "124M"]):
        if PROMPT_TOKENS + new_tokens > SHAPES[shape].block_size + 1:
            raise UserError(f"config: {new_tokens=} does not fit the context of {shape}")
        for rows in dict.fromkeys([1] if options.quick else [1, options.keys["batch_size"]]):
            yield from compare(shape, rows, options, new_tokens)


def our_call(model: Transformer, prompts: list[list[int]], options: Options, compiled: bool, new_tokens: int) -> Call:
    params = SamplingParams(max_new_tokens=new_tokens, temperature=0)

    def call() -> list[list[int]]:
        with autocast(options.device, options.dtype):
            results = generate(model, None, prompts, params, compile=compiled)
        return [result.completions[0].ids for result in results]

    return call


def their_call(model: Transformer, prompts: list[list[int]], options: Options, kind: str, new_tokens: int) -> Call:
    """kind: the cache, static or dynamic; or compiled, which is static."""
    from transformers import LlamaForCausalLM

    hf = LlamaForCausalLM(llama_config(model.cfg)).eval()
    state = model.state_dict()
    hf.load_state_dict({name if name == "lm_head.weight" else f"model.{name}": p for name, p in state.items()})
    hf = hf.to(options.device, options.dtype)
    compiles_itself = kind == "compiled" and options.device.type == "cuda"
    if kind == "compiled" and not compiles_itself:
        hf.forward = torch.compile(hf.forward, dynamic=False)
    idx = torch.tensor(prompts, device=options.device)
    static = {"cache_implementation": "static", "disable_compile": not compiles_itself}
    cache = {} if kind == "dynamic" else static

    def call() -> list[list[int]]:
        with torch.no_grad():
            ids = hf.generate(idx, do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **cache)
        return ids[:, idx.shape[1] :].tolist()

    return call


def bytes_per_step(cfg: ModelConfig, rows: int, dtype: torch.dtype, length: int) -> int:
    """Return the bytes that a step reads after `length` tokens: every matrix but the embedding, and the cache."""
    table = parameter_table(cfg)
    matrices = table["attention"] + table["mlp"] + cfg.vocab_size * cfg.n_embd
    return matrices * dtype.itemsize + cache_bytes(cfg, rows, length, dtype)


def compare(shape: str, rows: int, options: Options, new_tokens: int) -> list[Line]:
    """Return tokens/s of all sides; the limit is that of half of the new tokens."""
    timing.release()
    cfg, device, dtype = SHAPES[shape], options.device, options.dtype
    torch.manual_seed(0)
    model = Transformer(cfg).to(device).eval()
    prompts = torch.randint(cfg.vocab_size, (rows, PROMPT_TOKENS)).tolist()
    args = model, prompts, options
    makers = {f"transformers, {kind}": partial(their_call, *args, kind, new_tokens)
              for kind in options.keys["peers"].split(",")}  # fmt: skip
    peers = list(makers)
    for way in compile_ways(options):
        makers[f"ours{', compiled' * (way == 'blocks')}"] = partial(our_call, *args, way == "blocks", new_tokens)
    calls, missing = timing.build(makers)
    texts = {name: call() for name, call in calls.items()}  # also compiles and allocates
    n_bytes = bytes_per_step(cfg, rows, dtype, PROMPT_TOKENS + new_tokens // 2)
    sides = {name: partial(timing.device_seconds, call, device) for name, call in calls.items()}
    found = timing.alternate(sides | {"memory": timing.reading(n_bytes, device)}, options.few, warmups=0)
    limit = rows * median(found.pop("memory")) / n_bytes
    first = next(iter(texts.values()))
    same = {name: sum(a == b for a, b in zip(first, ids, strict=True)) for name, ids in texts.items()}
    notes = {name: f"{n_bytes / 1e6:,.0f} MB/step, {n}/{rows} texts equal" for name, n in same.items()}
    case = f"{shape}, batch {rows}, {str(dtype)[6:]}"
    lines = timing.lines("generate", case, found, "tok/s", peers, rows * new_tokens, limit, notes)
    return lines + timing.missing_lines("generate", case, missing)
