"""Preference tuning, with the peer beside it: steps of dpo.py and of trl's DPOTrainer alternate on the same pairs.

    OMP_NUM_THREADS=2 python tools/bench_dpo.py --init_from=out/sft --data=pairs.jsonl
    OMP_NUM_THREADS=2 python tools/bench_dpo.py --init_from=out/sft --data=pairs.jsonl --batch_size=2 --memory=False

In each round every side trains on the same pairs with the same ids: ours in batches of similar length, as dpo.py has
them, trl's in its random order. trl runs twice: with the reference's log-probabilities precomputed, as ours has them,
and with a second model. Prints pairs/s (whole steps, loading included; median over rounds after a warm-up), the ratio
to trl with precomputed ones (median of the ratios in a round), how far the log-probabilities of the reference differ,
and the peak memory of a process that runs one side alone.
"""

import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from groundup.train.device import choose_device, choose_dtype, hardware, peak_memory_gib, synchronize

sys.path.insert(0, str(Path(__file__).parent.parent))

import ddp as dist
from configurator import configure
from groundup.align.losses import answer_logps, compute_reference, losses_and_metrics
from groundup.errors import UserError
from groundup.tokens.pairs import PairBatch, PairCorpus, load_pairs
from groundup.train import checkpoint, ranks
from groundup.train.optim import Optimizer, stays_whole
from model import Transformer
from tokenizer import Tokenizer, chat_ready

# ---- config ---------------------------------------------------------------------------------------------------------
init_from = ""  # run, checkpoint or Hugging Face Llama/Qwen3 directory with the tokenizer's files
data = ""  # pairs: files, a directory of prepare.py --kind=preference
block_size = 1024  # most tokens of a prompt and an answer; a longer pair is left out
batch_size = 4  # pairs
steps = 24  # of each side in a round: the more, the better dpo.py can sort
repeats = 3  # timed rounds after a warm-up; the median counts
sides = "trl precomputed,trl,ours"  # of SIDES below, comma-separated; the first one is what ratios are to
memory = True  # also the peak memory of each side
device = "auto"  # auto | cpu | cuda
dtype = "auto"  # auto | float32 | bfloat16
alone = False  # one side, one round, then its peak memory: what the tool calls itself with

SIDES = ("trl precomputed", "trl", "ours", "ours compiled")
LOSS = {"loss": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, "gamma": 0.0, "nll_weight": 0.0}
LEARNING_RATE = 1e-6
Round = Callable[[np.ndarray], float]  # numbers of pairs -> seconds of steps on them
Side = tuple[Round, torch.Tensor | None]  # with the reference's log-probabilities (n, 2), if they are precomputed


def now(device: torch.device) -> float:
    """Seconds; with a single thread those of the processor, which other programs do not change much."""
    synchronize(device)
    return time.process_time() if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()


# ---- ours -----------------------------------------------------------------------------------------------------------


def our_side(source: Path, corpus: PairCorpus, device: torch.device, dtype: torch.dtype, compiled: bool) -> Side:
    """The step of dpo.py, its gradients and optimizer included."""
    model = checkpoint.load_model(source, device, block_size=max(block_size, checkpoint.load_config(source).block_size))
    if compiled:
        torch._dynamo.config.recompile_limit = 64  # eight lengths, each with gradients and without
        model.compile_blocks(partial(torch.compile, dynamic=False))
    world = ranks.init(device.type, 300.0, False)
    table = compute_reference(model, corpus, batch_size, world, device, dtype)
    on_device, scaler = table.to(device), torch.amp.GradScaler(device.type, enabled=False)
    hook = dist.make_hook("none", 1, 0, False, 0, scaler)
    ddp = dist.DDP(model, 0.0, hook, keep_whole=partial(stays_whole, "adamw"))
    opt = Optimizer(ddp.buckets, "adamw", (0.9, 0.999), weight_decay=0.0, momentum=0.0, muon_dtype=torch.float32)
    model.train()

    def seconds(numbers: np.ndarray) -> float:
        by_length = numbers[np.argsort(corpus.train[0].columns[numbers], kind="stable")]
        begin = now(device)
        for some in np.split(by_length, steps):
            batch = load_pairs(corpus.train, np.zeros_like(some), some).to(device)
            our_step(model, ddp, opt, scaler, batch, on_device[batch.number].T, dtype)
        return now(device) - begin

    return seconds, table


def our_step(
    model: Transformer, ddp: dist.DDP, opt: Optimizer, scaler: torch.amp.GradScaler, batch: PairBatch,
    reference: torch.Tensor, dtype: torch.dtype,
) -> None:  # fmt: skip
    ddp.expect_step(opt, LEARNING_RATE)
    logps, n_tokens = answer_logps(model, batch, batch.x.device, dtype)
    losses, _ = losses_and_metrics(logps, reference, n_tokens, LOSS)
    losses.mean().backward()
    ddp.step(opt, lr=LEARNING_RATE, clip=1.0, scaler=scaler)


# ---- trl ------------------------------------------------------------------------------------------------------------


def trl_side(source: Path, corpus: PairCorpus, device: torch.device, dtype: torch.dtype, precomputed: bool) -> Side:
    """DPOTrainer.train, from its first step to its last."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class SameIds(DPOTrainer):
        def _prepare_dataset(self, dataset: Dataset, *_: object) -> Dataset:
            return dataset

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: object, **__: object) -> None:
            self.begin = now(device)

        def on_train_end(self, *_: object, **__: object) -> None:
            self.seconds = now(device) - self.begin

    pairs, clock = corpus.train[0], Clock()
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows = Dataset.from_list([
        dict(zip(names, (ids.tolist() for ids in pairs.ids(i)), strict=True)) for i in range(pairs.n_rows)
    ])  # fmt: skip
    args = DPOConfig(
        tempfile.gettempdir(), save_strategy="no", per_device_train_batch_size=batch_size, max_steps=steps,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", beta=LOSS["beta"], bf16=dtype == torch.bfloat16,
        use_cpu=device.type == "cpu", gradient_checkpointing=False, max_length=None, logging_strategy="no",
        precompute_ref_log_probs=precomputed, report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    trainer = SameIds(
        model, args=args, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(source), callbacks=[clock]
    )
    trainer.remove_callback(PrinterCallback)
    rows = trainer.train_dataset

    def seconds(numbers: np.ndarray) -> float:
        trainer.train_dataset = rows.select(numbers)
        trainer.train()
        return clock.seconds

    found = torch.tensor([rows["ref_chosen_logps"], rows["ref_rejected_logps"]]).T if precomputed else None
    return seconds, found


# ---- both -----------------------------------------------------------------------------------------------------------


def make_side(name: str, source: Path, corpus: PairCorpus, device: torch.device, dtype: torch.dtype) -> Side:
    if name.startswith("trl"):
        return trl_side(source, corpus, device, dtype, name == "trl precomputed")
    return our_side(source, corpus, device, dtype, name == "ours compiled")


def compare(names: list[str], peaks: dict[str, str], make: Callable[[str], Side], n_pairs: int) -> None:
    """Rounds of all sides in turn; a line for each."""
    made = {name: make(name) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    rng = np.random.default_rng(0)
    for round_ in range(repeats + 1):
        numbers = rng.permutation(n_pairs)[: steps * batch_size]
        for name, (run, _) in made.items():
            took = run(numbers)
            seconds[name] += [took] if round_ else []
    for name, times in seconds.items():
        rate = steps * batch_size / statistics.median(times)
        ratios = [one / other for one, other in zip(seconds[names[0]], times, strict=True)]
        print(f"{name:16} {rate:8.2f} pairs/s   x {statistics.median(ratios):5.2f} ({min(ratios):.2f} to "
              f"{max(ratios):.2f}){peaks.get(name, '')}")  # fmt: skip
    tables = {name: table for name, (_, table) in made.items() if table is not None}
    for name, table in list(tables.items())[1:]:
        first, other = next(iter(tables.items()))
        far = (table[:n_pairs] - other[:n_pairs]).abs().max().item()
        print(f"log-probabilities of the reference, {first} and {name}: {far:.1e} nats apart at most")


def peak_of(name: str) -> str:
    """Peak memory of this program with one side only, as text."""
    flags = [flag for flag in sys.argv[1:] if not re.match("--(sides|alone|memory|repeats)=", flag)]
    command = [sys.executable, __file__, *flags, f"--sides={name}", "--alone=True"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"peak ([\d.]+ GiB)", done.stdout)
    if not found:
        raise UserError(f"bench: {name} alone ended with status {done.returncode}: {done.stderr.strip()[-300:]!r}")
    return f"   peak {found[1]}"


if __name__ == "__main__":
    config = configure(globals())
    for key in ("init_from", "data"):
        if not config[key]:
            raise UserError(f"config: {key} is empty; give --init_from=DIR and --data=pairs.jsonl")
    names = sides.split(",")
    strange = [name for name in names if name not in SIDES]
    if strange:
        raise UserError(f"config: sides={strange[0]!r} is none of {', '.join(SIDES)}")
    torch_device = choose_device(device)
    torch_dtype = choose_dtype(dtype, torch_device)
    if torch_dtype == torch.float16:
        raise UserError("config: dtype='float16' is not measured here; use float32 or bfloat16")
    source = checkpoint.resolve(init_from)
    the_tokenizer = chat_ready(Tokenizer.load(checkpoint.tokenizer_dir(source)))
    corpus = PairCorpus(data, the_tokenizer, block_size, seed=1, val_fraction=0.0)
    n_pairs = corpus.train[0].n_rows
    if n_pairs < steps * batch_size:
        raise UserError(f"config: {data} has {n_pairs} pairs, fewer than {steps=} x {batch_size=}")
    make = partial(make_side, source=source, corpus=corpus, device=torch_device, dtype=torch_dtype)
    if alone:
        run, _ = make(names[0])
        run(np.arange(steps * batch_size))
        print(f"peak {peak_memory_gib(torch_device):.2f} GiB")
        sys.exit(0)
    print(f"{hardware(torch_device)}, torch {torch.__version__}, {str(torch_dtype)[6:]}")
    print(f"{n_pairs:,} pairs, {batch_size} at a time, rows of {corpus.train[0].lengths.mean():.0f} tokens on average")
    peaks = {name: peak_of(name) for name in names} if memory else {}
    compare(names, peaks, make, n_pairs)
