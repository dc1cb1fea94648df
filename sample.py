"""Generated text: the engine, a plain function from (model, prompts, parameters) to token ids, and its command line.

python sample.py                                                     # a new document from the newest run under out/
python sample.py --init_from=out/demo --prompt="def main" --n=3 --temperature=0.7 --top_p=0.9

Several prompts of any lengths run as one batch. Row i draws its random numbers from seed + i, so its text does not
depend on the rows beside it, and torch's global generators are left alone.
"""

import contextlib
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import checkpoint
import train_utils
from configurator import configure
from model import KVCache, ModelConfig, Transformer, compute_dtype
from tokenizer import StreamDecoder, Tokenizer

# ---- config: override with a config file or --key=value; see --help -------------------------------------------------
init_from = ""  # run, checkpoint or Hugging Face Llama/Qwen3 directory; empty = the newest run under out/
prompt = ""  # text to continue; empty = begin a new document
n = 1  # samples of the prompt
max_new_tokens = 256  # per sample; the end of the context ends it earlier
temperature = 0.8  # 0 = greedy, 1 = the model's own distribution
top_k = -1  # only the k likeliest tokens; -1 or 0 = off
top_p = 0.95  # only the likeliest tokens that together have this probability; 1 = off
seed = 1337  # sample i uses seed + i
device = "auto"  # auto | cpu | cuda | mps
dtype = "auto"  # auto | float32 | bfloat16 | float16


class SampleError(ValueError):
    one_line = True


# ---- engine ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingParams:
    max_new_tokens: int = 256
    temperature: float = 1.0  # 0 = greedy: top_k, top_p and seed then change nothing
    top_k: int = -1
    top_p: float = 1.0  # 0 keeps the likeliest token
    seed: int = 1337
    stop_ids: frozenset[int] = frozenset()  # the first of these ends a row; it is part of the row's ids
    banned_ids: tuple[int, ...] = ()  # never generated

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise SampleError(f"sample: max_new_tokens must be at least 1, got {self.max_new_tokens}")
        # Logits divided by less than this could overflow float32.
        if self.temperature != 0 and not 1e-6 <= self.temperature < math.inf:
            raise SampleError(f"sample: temperature must be 0 (greedy) or from 1e-6 up, got {self.temperature}")
        if self.top_k < -1:
            raise SampleError(f"sample: top_k must be positive, or -1 or 0 for off, got {self.top_k}")
        if not 0 <= self.top_p <= 1:
            raise SampleError(f"sample: top_p must be from 0 to 1, got {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise SampleError(f"sample: seed must be from 0 to 2**63 - 1, got {self.seed}")


class Token(NamedTuple):
    row: int
    id: int
    finish: str  # "" = the row goes on; "stop" = this is a stop id; "length" = max_new_tokens or the context is used up


def generate(model: Transformer, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """New token ids of each prompt, without the prompt, with the stop id if one ended the row. Raises SampleError."""
    rows = [[] for _ in prompts]
    for token in stream(model, prompts, params):
        rows[token.row].append(token.id)
    return rows


@torch.no_grad()
def stream(model: Transformer, prompts: list[list[int]], params: SamplingParams) -> Iterator[Token]:
    """Tokens of all rows in the order in which they are generated. Raises SampleError.

    Matrix products and the cache have the dtype of the autocast around the caller's loop, else that of the weights.
    """
    cfg, device = model.cfg, model.embed_tokens.weight.device
    check_prompts(prompts, cfg)
    # The last token is not fed back, so prompt and result together may be one longer than the context.
    limits = [min(params.max_new_tokens, cfg.block_size - len(ids) + 1) for ids in prompts]
    idx, start = left_pad(prompts, device)
    cache = KVCache(cfg, start, idx.shape[1] + max(limits) - 1, device, compute_dtype(model.embed_tokens.weight))
    generators = [torch.Generator(device).manual_seed(params.seed + row) for row in range(len(prompts))]
    banned = torch.tensor(params.banned_ids, dtype=torch.int64, device=device)
    ended, was_training = [False] * len(prompts), model.training
    model.eval()
    try:
        for n_new in range(1, max(limits) + 1):
            with blocks_as_written(model):
                logits = model(idx, cache=cache, last_only=True)[:, -1].float()  # (B, V)
            tokens = choose(logits.index_fill_(1, banned, -math.inf), params, generators)  # (B,)
            for row, token in enumerate(tokens.tolist()):
                if not ended[row]:
                    finish = "stop" if token in params.stop_ids else "length" if n_new == limits[row] else ""
                    ended[row] = finish != ""
                    yield Token(row, token, finish)
            if all(ended):
                return
            idx = tokens.unsqueeze(1)
            # An ended row stays in the batch as padding: at position 0, seen by nobody.
            cache.start.masked_fill_(torch.tensor(ended, device=device), cache.length)
    finally:
        model.train(was_training)


def check_prompts(prompts: list[list[int]], cfg: ModelConfig) -> None:
    if not prompts:
        raise SampleError("sample: there is no prompt")
    for i, ids in enumerate(prompts):
        if not ids:
            raise SampleError(f"sample: prompt {i} has no tokens; begin an empty one with <|endoftext|>")
        if len(ids) > cfg.block_size:
            raise SampleError(f"sample: prompt {i} has {len(ids)} tokens, block_size is {cfg.block_size}; shorten it")
        foreign = [token for token in ids if not 0 <= token < cfg.vocab_size]
        if foreign:
            raise SampleError(
                f"sample: prompt {i} has token id {foreign[0]}, the model has vocab_size={cfg.vocab_size}; "
                f"use the tokenizer it was trained with"
            )


def left_pad(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """-> (ids (B, longest) int64 with zeros on the left, start (B,) int64: index of each row's first token).

    All rows then end, and grow, at the same index.
    """
    width = max(map(len, prompts))
    idx = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts], device=device)
    return idx, torch.tensor([width - len(ids) for ids in prompts], device=device)


def blocks_as_written(model: Transformer) -> contextlib.AbstractContextManager:
    """Blocks compiled for training would be compiled anew at every step here, as the cache grows: run their Python."""
    compiled = "forward" in vars(model.layers[0])  # by Transformer.compile_blocks
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def choose(logits: Tensor, params: SamplingParams, generators: list[torch.Generator]) -> Tensor:
    """logits (B, V) float32 and a generator for each row -> token ids (B,) int64."""
    if params.temperature == 0:
        return logits.argmax(dim=-1)
    probs = keep_likeliest(logits / params.temperature, params.top_k, params.top_p).softmax(dim=-1)
    # The argmax of p / Exponential(1) is distributed as p (the exponential race). torch.multinomial would take one
    # generator for all rows and make the CPU wait for the GPU.
    noise = [torch.empty_like(row).exponential_(generator=g) for row, g in zip(probs, generators, strict=True)]
    return (probs / torch.stack(noise)).argmax(dim=-1)


def keep_likeliest(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """-inf for all but the top_k logits of each row (B, V), then for all but its nucleus: the smallest set of likeliest
    ids whose probability reaches top_p (arXiv:1904.09751). Ties with the k-th stay. As in transformers, bit for bit."""
    if top_k > 0:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p < 1:
        ascending, order = logits.sort(dim=-1)
        remove = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        remove[:, -1] = False
        logits = logits.masked_fill(torch.empty_like(remove).scatter_(1, order, remove), -math.inf)
    return logits


# ---- text -----------------------------------------------------------------------------------------------------------


def begin_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text to continue. An empty one begins a new document; a begin token that is not also the separator of
    documents (Llama's) stands before every text. Raises SampleError."""
    ids = tokenizer.encode(text)
    if not ids and tokenizer.bos_id < 0:
        raise SampleError("sample: this tokenizer has no token that begins a text; give --prompt=TEXT")
    if not ids or tokenizer.bos_id not in (tokenizer.eot_id, -1):
        return [tokenizer.bos_id, *ids]
    return ids


def never_sampled(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Ids that neither add to a text nor end it: padding, reserved ones, those beyond the tokenizer."""
    silent = (tokenizer.token_byte_lengths() == 0).nonzero()[0].tolist()
    return tuple({*silent, *range(tokenizer.vocab_size, vocab_size)} - tokenizer.stop_ids)


def in_row_order(tokens: Iterable[Token], n_rows: int) -> Iterator[Token]:
    """Row 0 as it is generated, each later row as soon as the rows before it have ended."""
    waiting = [deque() for _ in range(n_rows)]
    row = 0
    for token in tokens:
        waiting[token.row].append(token)
        while row < n_rows and waiting[row]:
            ready = waiting[row].popleft()
            yield ready
            row += ready.finish != ""


def text_of(tokenizer: Tokenizer, prompt_ids: list[int], tokens: Iterable[Token], n_rows: int) -> Iterator[str]:
    """Prompt and continuation of row after row, in pieces: every character as soon as its last byte is there."""
    decoder, row = StreamDecoder(tokenizer), -1
    for token in in_row_order(tokens, n_rows):
        if token.row != row:
            row = token.row
            yield "-" * 80 + "\n" if row else ""
            yield "".join(map(decoder.push, prompt_ids))
        yield decoder.push(token.id)
        if token.finish:
            yield decoder.flush() + "\n"


if __name__ == "__main__":
    configure(globals())
    if n < 1:
        raise SampleError(f"sample: n must be at least 1, got {n}")
    torch_device = train_utils.choose_device(device)
    torch_dtype = train_utils.choose_dtype(dtype, torch_device)
    directory = checkpoint.resolve(init_from or checkpoint.newest_run())
    tokenizer = Tokenizer.load(directory)
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_ids=tokenizer.stop_ids,
        banned_ids=never_sampled(tokenizer, checkpoint.load_config(directory).vocab_size),
    )
    prompt_ids = begin_prompt(tokenizer, prompt)
    model = checkpoint.load_model(directory, torch_device)
    with train_utils.autocast(torch_device, torch_dtype):
        for piece in text_of(tokenizer, prompt_ids, stream(model, [prompt_ids] * n, params), n):
            print(piece, end="", flush=True)
