"""Generation speed, with the peer beside it: ours and transformers' generate() alternate in one process.

    OMP_NUM_THREADS=2 python tools/bench_generate.py                        # 26M and 124M, some minutes
    OMP_NUM_THREADS=2 python tools/bench_generate.py --shapes=26M --batch=1 --dtypes=float32 --new_tokens=64

Greedy, random weights, the same in all. Prints tokens/s of whole calls (prompt included; median), the ratio to each
of transformers' caches (median over rounds of the ratio in a round), and the share of what this machine's memory
allows: every step reads each matrix and the cached keys and values once, at the speed at which a sum runs over as many
bytes, measured in the same rounds. transformers compiled: on a GPU as its generate() does by itself with a static
cache, on a CPU, where it does not, its forward as a whole.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch

from groundup.train.device import autocast, choose_device, choose_dtype, hardware

sys.path.insert(0, str(Path(__file__).parent.parent))

import timing

from configurator import configure
from groundup.errors import UserError
from groundup.generate.engine import cache_bytes, generate
from groundup.generate.sampling import SamplingParams
from groundup.train.plan import parameter_table
from model import ModelConfig, Transformer

# ---- config ---------------------------------------------------------------------------------------------------------
shapes = "26M,124M"  # of SHAPES below, comma-separated
batch = "1,8"  # prompts that are continued at once
dtypes = "float32,bfloat16"  # of weights and products
new_tokens = 256  # per prompt
prompt_tokens = 16  # per prompt
repeats = 3  # timed rounds after a warm-up; the median counts
compile = True  # also ours compiled
peers = "static"  # transformers: static | dynamic | compiled (static cache, compiled), comma-separated; "" = none
device = "auto"  # auto | cpu | cuda

SHAPES = {
    "tiny": ModelConfig(512, 1024, 2, 2, n_embd=64),
    "26M": ModelConfig(8192, 1024, 8, 8, n_embd=512, tie_embeddings=False),
    "124M": ModelConfig(32000, 1024, 12, 12, n_embd=768),
    "1.1B": ModelConfig(32000, 2048, 22, 32, 4, n_embd=2048, ffn_dim=5632, tie_embeddings=False),  # TinyLlama's
}
Call = Callable[[], list[list[int]]]


def our_call(
    model: Transformer, prompts: list[list[int]], dtype: torch.dtype, compiled: bool, new_tokens: int
) -> Call:
    params = SamplingParams(max_new_tokens=new_tokens, temperature=0)

    def call() -> list[list[int]]:
        with autocast(model.embed_tokens.weight.device, dtype):
            results = generate(model, None, prompts, params, compile=compiled)
        return [result.completions[0].ids for result in results]

    return call


def llama_config(cfg: ModelConfig) -> "LlamaConfig":  # noqa: F821 - transformers is imported where it is used
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=cfg.vocab_size, hidden_size=cfg.n_embd, intermediate_size=cfg.ffn_dim, bos_token_id=None,
        num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head, num_key_value_heads=cfg.n_kv_head,
        max_position_embeddings=cfg.block_size, rms_norm_eps=cfg.norm_eps, tie_word_embeddings=cfg.tie_embeddings,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


def their_call(model: Transformer, prompts: list[list[int]], dtype: torch.dtype, kind: str, new_tokens: int) -> Call:
    from transformers import LlamaForCausalLM

    hf = LlamaForCausalLM(llama_config(model.cfg)).eval()
    state = model.state_dict()
    hf.load_state_dict({name if name == "lm_head.weight" else f"model.{name}": p for name, p in state.items()})
    hf = hf.to(model.embed_tokens.weight.device, dtype)
    compiles_itself = kind == "compiled" and hf.device.type == "cuda"
    if kind == "compiled" and not compiles_itself:
        hf.forward = torch.compile(hf.forward, dynamic=False)
    idx = torch.tensor(prompts, device=hf.device)
    static = {"cache_implementation": "static", "disable_compile": not compiles_itself}
    cache = {} if kind == "dynamic" else static

    def call() -> list[list[int]]:
        with torch.no_grad():
            ids = hf.generate(idx, do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **cache)
        return ids[:, idx.shape[1] :].tolist()

    return call


def bytes_per_step(cfg: ModelConfig, rows: int, dtype: torch.dtype, length: int) -> int:
    """What a step at this length of the text must read: every matrix but the embedding, and the cache."""
    table = parameter_table(cfg)
    matrices = table["attention"] + table["mlp"] + cfg.vocab_size * cfg.n_embd
    return matrices * dtype.itemsize + cache_bytes(cfg, rows, length, dtype)


def compare(
    shape: str, rows: int, dtype: torch.dtype, device: torch.device, repeats: int, new_tokens: int, prompt_tokens: int,
    kinds: list[str], compiled: bool,
) -> list[timing.Line]:  # fmt: skip
    """Tokens/s of transformers (`kinds` of caches) and of ours, in turns; the limit is in the middle of the text."""
    timing.release()
    cfg = SHAPES[shape]
    torch.manual_seed(0)
    model = Transformer(cfg).to(device).eval()
    prompts = torch.randint(cfg.vocab_size, (rows, prompt_tokens)).tolist()
    makers = {f"transformers, {k}": partial(their_call, model, prompts, dtype, k, new_tokens) for k in kinds}
    makers["ours"] = partial(our_call, model, prompts, dtype, False, new_tokens)
    if compiled:
        makers["ours, compiled"] = partial(our_call, model, prompts, dtype, True, new_tokens)
    calls, missing = timing.build(makers)
    texts = {name: call() for name, call in calls.items()}  # compile, allocate
    n_bytes = bytes_per_step(cfg, rows, dtype, prompt_tokens + new_tokens // 2)
    sides = {name: partial(timing.device_seconds, call, device) for name, call in calls.items()}
    found = timing.alternate(sides | {"memory": timing.reading(n_bytes, device)}, repeats, warmups=0)
    limit = rows * median(found.pop("memory")) / n_bytes
    first = next(iter(calls))
    same = {name: sum(a == b for a, b in zip(texts[first], texts[name], strict=True)) for name in calls}
    notes = {name: f"{n_bytes / 1e6:,.0f} MB/step, {n}/{rows} texts equal" for name, n in same.items()}
    case = f"{shape}, batch {rows}, {str(dtype)[6:]}"
    peers = [name for name in calls if name.startswith("transformers")]
    lines = timing.lines("generate", case, found, "tok/s", peers, rows * new_tokens, limit, notes)
    return lines + [timing.Line("generate", case, name, "tok/s", note=note) for name, note in missing.items()]


if __name__ == "__main__":
    configure(globals())
    unknown = [shape for shape in shapes.split(",") if shape not in SHAPES]
    if unknown:
        raise UserError(f"config: shapes={unknown[0]!r} is none of {', '.join(SHAPES)}")
    strange = [kind for kind in peers.split(",") if kind not in ("", "static", "dynamic", "compiled")]
    if strange:
        raise UserError(f"config: peers={strange[0]!r} is none of static, dynamic, compiled")
    if not all(rows.isdigit() and int(rows) for rows in batch.split(",")):
        raise UserError(f"config: batch={batch!r} is not a list of numbers from 1 up")
    short = [name for name in shapes.split(",") if prompt_tokens + new_tokens > SHAPES[name].block_size + 1]
    if short:
        raise UserError(f"config: {prompt_tokens=} and {new_tokens=} do not fit the context of {short[0]}")
    torch_device = choose_device(device)
    print(f"{hardware(torch_device)}, torch {torch.__version__}, {new_tokens} new tokens")
    print(timing.HEADER)
    for name in shapes.split(","):
        for kind in dtypes.split(","):
            for rows in map(int, batch.split(",")):
                torch_dtype = choose_dtype(kind, torch_device)
                for line in compare(
                    name, rows, torch_dtype, torch_device, repeats, new_tokens, prompt_tokens,
                    list(filter(None, peers.split(","))), compile,
                ):  # fmt: skip
                    print(timing.text(line), flush=True)
