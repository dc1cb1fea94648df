"""Rows sft and dpo: tuning a model of random weights on conversations and preference pairs.

sft: packed rows beside padded ones. dpo: steps of dpo.py beside those of trl's DPOTrainer on the
same pairs with the same ids, ours in batches of similar length, as dpo.py makes them, trl's in its
random order, once with precomputed log-probabilities of the reference, as ours has them, and once
with a second model. Whole steps, with loading.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import timing
import torch
from bench_model import SHAPES, shapes_of
from timing import Case, Options

import ddp
from groundup.align.losses import compute_reference, losses_and_metrics, pair_logps
from groundup.demo.python_docs import debug_texts
from groundup.demo.python_talks import docs_rows
from groundup.errors import UserError
from groundup.kernels.cross_entropy import cross_entropy
from groundup.tokens.conversations import ChatCorpus
from groundup.tokens.pairs import PairCorpus, load_pairs
from groundup.tokens.training import train as train_tokenizer
from groundup.train import huggingface
from groundup.train.device import autocast
from groundup.train.optim import Optimizer
from model import Transformer
from tokenizer import Tokenizer, chat_ready

STEPS = 16  # of a side in a round; dpo.py sorts the pairs of that many steps by length
LOSS = {"loss": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, "gamma": 0.0, "nll_weight": 0.0}
LEARNING_RATE = 1e-6
# (numbers of pairs -> seconds, reference's logps)
Side = tuple[Callable[[np.ndarray], float], torch.Tensor | None]


def start(kind: str, shape: str, options: Options) -> tuple[str, Tokenizer, Path]:
    """Return (data, a tokenizer, a checkpoint of random weights with it)."""
    timing.release()
    data, base = options.data or f"{options.folder / kind}.jsonl", options.folder / shape
    if not options.data:
        rows = [json.dumps(row) + "\n" for row in islice(docs_rows(kind), 1000)]
        Path(data).write_text("".join(rows), encoding="utf-8")
    tokenizer = chat_ready(train_tokenizer(debug_texts(), 2048))
    cfg = replace(SHAPES[shape], vocab_size=tokenizer.vocab_size, block_size=options.block_size)
    torch.manual_seed(0)
    base.mkdir()
    huggingface.write_model(base, Transformer(cfg), tokenizer)
    return data, tokenizer, base


def sft_row(options: Options) -> Iterator[Case]:
    """Labelled tokens/s of packed and of padded rows."""
    for shape in shapes_of(options, "25M"):
        yield layouts(shape, options)


def layouts(shape: str, options: Options) -> Case:
    """Return the case of a shape: the same conversations in padded and in packed rows."""
    data, tokenizer, base = start("chat", shape, options)
    model = huggingface.load_model(base, options.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    B, columns = options.batch_size, options.block_size
    corpora = {}
    for name in ("padded", "packed"):
        corpora[name] = ChatCorpus(data, tokenizer, columns, seed=1, pack=name == "packed")

    def load(name: str, step: int) -> tuple:
        numbers = (step * B + np.arange(B)) % corpora[name].train[0].n_rows
        return corpora[name].load(np.zeros_like(numbers), numbers)

    def step(batch: tuple) -> None:
        with autocast(options.device, options.dtype):
            hidden = model(batch.x, documents=batch.documents, index=batch.index)
            loss, _ = cross_entropy(hidden, model.lm_head.weight, batch.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def side(name: str) -> float:
        """Seconds per labelled token."""
        batches = [load(name, k).to(options.device).even() for k in range(STEPS)]
        n_labels = sum(int((batch.targets >= 0).sum()) for batch in batches)
        return timing.device_seconds(lambda: list(map(step, batches)), options.device) / n_labels

    packed, notes = corpora["packed"].train[0], {}
    n_used = int(packed.n_used.sum())
    for name, corpus in corpora.items():
        n_places = sum(load(name, k).x.numel() for k in range(-(-corpus.train[0].n_rows // B)))
        notes[name] = f"padding {100 * max(0.0, 1 - n_used / n_places):.1f} %"
    case, sides = f"{shape}, batch {B} x {columns}", {n: partial(side, n) for n in corpora}
    return Case(case, sides, "label/s", ["padded"], 1.0, notes=notes)


def dpo_row(options: Options) -> Iterator[Case]:
    """Pairs/s of trl and of ours; the note says how far the log-probabilities of the reference are
    from trl's.
    """
    for shape in shapes_of(options, "25M"):
        data, tokenizer, base = start("preference", shape, options)
        corpus = PairCorpus(data, tokenizer, options.block_size, seed=1, val_fraction=0.0)
        n_pairs, n_used = corpus.train[0].n_rows, STEPS * options.batch_size
        if n_pairs < n_used:
            what = f"{data} has {n_pairs} pairs, fewer than the {n_used} of a round"
            raise UserError(f"bench: {what}")
        args, makers = (base, corpus, options), {}
        for ready in (True, False):
            makers[f"trl{', precomputed' * ready}"] = partial(trl_side, *args, ready)
        for way in options.compile.split(","):
            makers[f"ours{', blocks' * (way == 'blocks')}"] = partial(our_side, *args, way)
        made = timing.build(makers)
        rng = np.random.default_rng(0)
        # Numbers of the pairs of each round, the warm-up included; the same for every side
        rounds = [rng.permutation(n_pairs)[:n_used] for _ in range(options.repeats + 1)]
        sides = {}
        for name, (run, _) in made.items():
            turns = iter(rounds)
            sides[name] = lambda run=run, turns=turns: run(next(turns))
        notes = {}
        _, theirs = made.get("trl, precomputed", (None, None))
        for name, (_, table) in made.items():
            if name.startswith("ours") and theirs is not None:
                far = (table[:n_pairs] - theirs[:n_pairs]).abs().max().item()
                notes[name] = f"log-probabilities of the reference within {far:.0e} nats of trl's"
        case = f"{shape}, {options.batch_size} pairs"
        peers = [name for name in made if name.startswith("trl")]
        yield Case(case, sides, "pair/s", peers, n_used, notes=notes)


def our_side(base: Path, corpus: PairCorpus, options: Options, way: str) -> Side:
    """Return the steps of dpo.py."""
    device, dtype, batch_size = options.device, options.dtype, options.batch_size
    model = huggingface.load_model(base, device)
    if way == "blocks":
        for part in (*model.layers, model.norm):
            part.forward = torch.compile(part.forward)
    table = compute_reference(model, corpus, batch_size, device, dtype)
    on_device = table.to(device)
    parallel = ddp.DDP(model)
    opt = Optimizer(parallel.buckets, "adamw", (0.9, 0.999), weight_decay=0.0)
    model.train()

    def step(numbers: np.ndarray) -> None:
        batch = load_pairs(corpus.train * len(numbers), numbers).to(device)
        parallel.expect_step(opt, LEARNING_RATE)
        with autocast(device, dtype):
            logps, n_tokens = pair_logps(model, batch)
        losses, _ = losses_and_metrics(logps, on_device[batch.number].T, n_tokens, LOSS)
        losses.mean().backward()
        parallel.step(opt, lr=LEARNING_RATE, clip=1.0)

    def seconds(numbers: np.ndarray) -> float:
        by_length = numbers[np.argsort(corpus.train[0].columns[numbers], kind="stable")]
        batches = by_length.reshape(-1, batch_size)
        return timing.device_seconds(lambda: list(map(step, batches)), device)

    return seconds, table


def trl_side(base: Path, corpus: PairCorpus, options: Options, precomputed: bool) -> Side:
    """Return DPOTrainer.train, from its first step to its last."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl import DPOTrainer

    class SameIds(DPOTrainer):
        def _prepare_dataset(self, dataset: Dataset, *_: object) -> Dataset:
            return dataset

    names, rows = ("prompt_ids", "chosen_ids", "rejected_ids"), []
    for i in range(corpus.train[0].n_rows):
        ids = [part.tolist() for part in corpus.train[0].ids(i)]
        rows.append(dict(zip(names, ids, strict=True)))
    # trl must train on our ids, or the two would not do the same work
    rows = Dataset.from_list(rows)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer, args = AutoTokenizer.from_pretrained(base), trl_config(options, precomputed)
    trainer = SameIds(model, args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    rows = trainer.train_dataset

    def seconds(numbers: np.ndarray) -> float:
        trainer.train_dataset = rows.select(numbers)
        return timing.device_seconds(trainer.train, options.device)

    table = None
    if precomputed:
        table = torch.tensor([rows["ref_chosen_logps"], rows["ref_rejected_logps"]]).T
    return seconds, table


def trl_config(options: Options, precomputed: bool) -> "DPOConfig":  # noqa: F821 - of trl
    """Return what makes trl's steps those of `our_side`."""
    from trl import DPOConfig

    return DPOConfig(
        tempfile.gettempdir(),
        save_strategy="no",
        per_device_train_batch_size=options.batch_size,
        max_steps=STEPS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        beta=LOSS["beta"],
        bf16=options.dtype == torch.bfloat16,
        use_cpu=options.device.type == "cpu",
        gradient_checkpointing=False,
        max_length=None,
        logging_strategy="no",
        precompute_ref_log_probs=precomputed,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
