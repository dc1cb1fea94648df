"""Instruction tuning, with its alternatives beside it: packed rows against padded ones, adapters against all weights.

    OMP_NUM_THREADS=2 python tools/bench_sft.py --data=chat.jsonl --tokenizer_dir=out/demo/latest
    OMP_NUM_THREADS=2 python tools/bench_sft.py --data=chat.jsonl --tokenizer_dir=out/demo/latest --memory=True

Steps (forward, backward, AdamW) of the same model on the same conversations alternate between packed and padded rows:
labelled tokens per second (median over rounds), the share of places that are padding, and the ratio. --memory=True
starts sft.py once for all weights and once for adapters: the peak of the process beside the estimate that it printed.
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from groundup.train.device import autocast, choose_device, choose_dtype, hardware, synchronize

sys.path.insert(0, str(Path(__file__).parent.parent))

from configurator import configure
from groundup.tokens.conversations import ChatCorpus
from groundup.train import checkpoint
from model import ModelConfig, Transformer, cross_entropy
from tokenizer import Tokenizer, chat_ready

# ---- config ---------------------------------------------------------------------------------------------------------
data = ""  # conversations
tokenizer_dir = ""  # a directory with a tokenizer
shapes = "25M"  # of SHAPES below, comma-separated
block_size = 512
batch_size = 8
rounds = 5  # after a warm-up; the median counts
steps = 4  # of each kind in a round
memory = False  # peak memory of whole runs instead
device = "auto"  # auto | cpu | cuda
dtype = "auto"  # auto | float32 | bfloat16 | float16

SHAPES = {
    "7M": {"n_layer": 6, "n_head": 4, "n_kv_head": 2, "n_embd": 256},
    "25M": {"n_layer": 8, "n_head": 8, "n_kv_head": 8, "n_embd": 512},
    "124M": {"n_layer": 12, "n_head": 12, "n_kv_head": 12, "n_embd": 768},
}


def model_of(shape: str, vocab_size: int) -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(vocab_size, block_size, **SHAPES[shape]))


def time_steps(
    model: Transformer, optimizer: torch.optim.Optimizer, corpus: ChatCorpus, first: int, device: torch.device,
    dtype: torch.dtype,
) -> float:  # fmt: skip
    """Labelled tokens per second of `steps` steps from row `first` on."""
    rows, n_labels = corpus.train[0], 0
    synchronize(device)
    begin = time.perf_counter()
    for step in range(steps):
        numbers = (first + np.arange(step * batch_size, (step + 1) * batch_size)) % rows.n_rows
        batch = corpus.load(np.zeros_like(numbers), numbers * (block_size + 1)).to(device).even()
        with autocast(device, dtype):
            hidden = model(batch.x, documents=batch.documents, index=batch.index)
            loss, _ = cross_entropy(hidden, model.lm_head.weight, batch.targets, batch.weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        n_labels += int((batch.targets >= 0).sum())
    synchronize(device)
    return n_labels / (time.perf_counter() - begin)


def compare_layouts(shape: str, tokenizer: Tokenizer, device: torch.device, dtype: torch.dtype) -> None:
    model = model_of(shape, tokenizer.vocab_size).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    kinds = {"packed": True, "padded": False}
    corpora = {kind: ChatCorpus(data, tokenizer, block_size, pack, seed=1) for kind, pack in kinds.items()}
    order = np.random.default_rng(0).permutation(10_000)
    speeds = {kind: [] for kind in kinds}
    for round_ in range(rounds + 1):
        for kind, corpus in corpora.items():
            speed = time_steps(model, optimizer, corpus, int(order[round_]), device, dtype)
            speeds[kind] += [speed] if round_ else []
    for kind, corpus in corpora.items():
        rows = corpus.train[0]
        places = padded_places(corpus) if kind == "padded" else rows.n_rows * block_size
        used = int(corpora["packed"].train[0].n_rows * block_size - corpora["packed"].train[0].n_padding)
        print(f"{shape:>5} {kind}: {statistics.median(speeds[kind]):9,.0f} labels/s, {rows.n_rows:,} rows, "
              f"padding {100 * (1 - used / places):.1f} %")  # fmt: skip
    ratios = [packed / padded for packed, padded in zip(*speeds.values(), strict=True)]
    print(f"{shape:>5} packed / padded: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def padded_places(corpus: ChatCorpus) -> int:
    """Places of all rows in micro-batches of batch_size, in the order of the file."""
    rows, places = corpus.train[0], 0
    for first in range(0, rows.n_rows, batch_size):
        numbers = np.arange(first, min(first + batch_size, rows.n_rows))
        places += corpus.load(np.zeros_like(numbers), numbers * (block_size + 1)).x.numel()
    return places


def measure_memory(shape: str, tokenizer: Tokenizer, folder: Path) -> None:
    """Peak of sft.py for all weights and for adapters, and what it said before."""
    base = folder / shape
    base.mkdir()
    checkpoint.write_model(base, model_of(shape, tokenizer.vocab_size), tokenizer)
    for trainable in ("all", "lora"):
        out = folder / f"{shape}-{trainable}"
        command = [sys.executable, "sft.py", f"--init_from={base}", f"--data={data}", f"--out_dir={out}"]
        command += [f"--trainable={trainable}", f"--block_size={block_size}", f"--batch_size={batch_size}"]
        command += ["--max_steps=12", "--log_every=12", "--eval_steps=1", "--eval_answers=0", "--compile=False"]
        command += [f"--dtype={dtype}", f"--device={device}", "--save_every=1000"]
        done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True)
        estimate = float(re.search(r"memory +([\d.]+) GiB", done.stdout)[1])
        trained = re.search(r"trained ([\d,]+)", done.stdout)[1]
        events = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        peak = [event["memory_gib"] for event in events if event["event"] == "train"][-1]
        print(f"{shape:>5} {trainable:>4}: peak {peak:.2f} GiB, estimate {estimate:.2f} GiB, {trained} trained")


if __name__ == "__main__":
    configure(globals())
    torch_device = choose_device(device)
    torch_dtype = choose_dtype(dtype, torch_device)
    the_tokenizer = chat_ready(Tokenizer.load(tokenizer_dir))
    print(f"{hardware(torch_device)}, torch {torch.__version__}, {str(torch_dtype).removeprefix('torch.')}")
    with tempfile.TemporaryDirectory() as folder_name:
        for name in shapes.split(","):
            if memory:
                measure_memory(name, the_tokenizer, Path(folder_name))
            else:
                compare_layouts(name, the_tokenizer, torch_device, torch_dtype)
