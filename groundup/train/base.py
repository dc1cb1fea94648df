"""What a run starts from: the weights of init_from, their tokenizer, the architecture; and which parameters train."""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

import torch

from groundup.errors import UserError
from groundup.train import checkpoint, fsdp
from groundup.train.computation import say
from groundup.train.device import choose_device
from groundup.train.lora import LoRAConfig, choose, resize_vocab, weight_shapes
from model import ModelConfig, Transformer
from tokenizer import Tokenizer, chat_ready


class Base(NamedTuple):
    """What tuning starts from."""

    source: Path | None  # directory of the weights; None = a tiny new model
    tokenizer: Tokenizer  # with chat tokens
    n_known: int  # how many of its ids the weights were trained with
    cfg: ModelConfig


def open_base(config: dict, debug_data: str) -> Base:
    """Open init_from. Raise UserError unless it has weights that fit the settings, or `data` is `debug_data`."""
    source = checkpoint.resolve(config["init_from"]) if config["init_from"] else None
    if source is None and config["data"] != debug_data:
        raise UserError("config: init_from: give the run, checkpoint or Hugging Face directory to begin with")
    tokenizer = Tokenizer.load(checkpoint.tokenizer_dir(source or Path(config["data"]).parent))
    tokenizer = chat_ready(tokenizer).with_template_settings(config["chat_template_kwargs"])
    n_known = count_known_ids(source, tokenizer, "the chat tokenizer") if source else 0
    check_trainable(config, source, tokenizer.vocab_size - n_known)
    cfg = tuned_architecture(config, source, tokenizer.vocab_size)
    checkpoint.check_saves(cfg, tokenizer)
    return Base(source, tokenizer, n_known, cfg)


def tuned_architecture(config: dict, source: Path | None, token_vocab: int) -> ModelConfig:
    """Return that of the checkpoint `source`, with rows for all token ids and at least the wanted block_size; without a
    source that of a tiny model, to try a script with. Say so where block_size makes the context longer."""
    block_size, dropout = config["block_size"], config.get("dropout", 0.0)
    if source is None:
        return ModelConfig(token_vocab, block_size, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, dropout=dropout)
    cfg = checkpoint.load_config(source)
    rows, longest = max(cfg.vocab_size, token_vocab), max(cfg.block_size, block_size)
    if longest > cfg.block_size:
        keeps = f"--block_size={cfg.block_size} keeps to what it was trained with"
        say(f"warning     block_size={block_size} exceeds the {cfg.block_size} tokens of {source}; {keeps}")
    return dataclasses.replace(cfg, vocab_size=rows, block_size=longest, dropout=dropout)


def count_known_ids(source: Path, tokenizer: Tokenizer, whose: str) -> int:
    """Return how many of the tokenizer's ids the weights in `source` were trained with: all, or the first ones if it
    extends their tokenizer. Raise UserError for any other tokenizer. whose: its owner, for the message."""
    n_rows, directory = checkpoint.load_config(source).vocab_size, checkpoint.tokenizer_dir(source)
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        if tokenizer.vocab_size > n_rows:
            raise UserError(f"config: {whose} has {tokenizer.vocab_size} token ids, {source} only {n_rows}")
        return n_rows
    known = Tokenizer.load(directory)
    if known.fingerprint() == tokenizer.fingerprint():
        return n_rows
    same = known.pieces.items() <= tokenizer.pieces.items() and known.special_ids <= tokenizer.special_ids
    if same and tokenizer.vocab_size > known.vocab_size:
        return known.vocab_size
    raise UserError(
        f"config: {whose} was not tokenized with the tokenizer of {source}, nor with one that extends it; "
        f"rerun prepare.py with --tokenizer_dir={source}"
    )


def check_trainable(config: dict, source: Path | None, n_new: int) -> None:
    """Raise UserError where `trainable` does not fit the weights in `source`, which have none for n_new token ids."""
    parts = [part.strip() for part in config["trainable"].split(",")]
    if parts == ["all"]:
        return
    if source is None:
        raise UserError(f"config: trainable={config['trainable']!r} leaves the rest as it was: give init_from")
    if "lora" in parts and checkpoint.is_adapter(source):
        fix = f"python tools/merge.py --init_from={source} --out_dir=DIR"
        raise UserError(f"config: {source} is an adapter; first: {fix}")
    if "lora" in parts and n_new > 0 and not {"embed", "lm_head"} <= {*parts}:
        raise UserError(f"config: {n_new} token ids are new to {source}: use trainable='embed,lm_head,lora'")


def frozen_dtype(config: dict, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which frozen weights are held; dtype: of the matrix products."""
    return torch.bfloat16 if config["base_dtype"] != "float32" and dtype == torch.bfloat16 else torch.float32


def new_model(kind: type[Transformer], cfg: ModelConfig, config: dict, dtype: torch.dtype) -> Transformer:
    """Return kind(cfg) for what the settings train: beside adapters frozen matrices are held in base_dtype. Weights
    that are saved whole stay as exact as they were. With parallel='fsdp' each rank holds its rows alone."""
    if config.get("parallel") == "fsdp":
        device = choose_device(config["device"], int(os.environ["LOCAL_RANK"]))
        return fsdp.build(kind, cfg, device, dtype, new=not config["init_from"])
    adapters = adapters_of(config)
    whole, with_adapters = choose(list(weight_shapes(cfg)), config["trainable"], adapters)
    if with_adapters:
        weight_shapes(cfg, adapters)  # refuses them now, where model.py has no such matrices
    held = frozen_dtype(config, dtype) if with_adapters else torch.float32
    return checkpoint.build(kind, cfg, held, {*whole, "score.weight"})


def old_parts(source: Path, n_known: int, tokenizer: Tokenizer) -> dict[int, list[int]]:
    """Return, for each of the tokenizer's ordinary tokens from n_known on, the ids into which the tokenizer of `source`
    splits its text."""
    new = {i: token for i, token in tokenizer.engine.token_bytes.items() if i >= n_known}
    if not new:
        return {}
    split = Tokenizer.load(checkpoint.tokenizer_dir(source)).encode_token
    return {i: split(token) for i, token in new.items()}


def load_start(model: Transformer, source: Path, n_known: int, tokenizer: Tokenizer) -> None:
    """Load the weights in `source`. Rows for the tokenizer's ids from n_known on are new, see lora.resize_vocab."""
    same_rows = checkpoint.load_config(source).vocab_size == model.cfg.vocab_size == n_known
    if same_rows and not checkpoint.is_adapter(source):
        return checkpoint.load_weights(model, source)
    start = checkpoint.load_model(source, block_size=model.cfg.block_size, dtype=checkpoint.held_dtype(model))
    resize_vocab(start, model.cfg.vocab_size, n_known, old_parts(source, n_known, tokenizer))
    for name, p in model.named_parameters():
        fsdp.put(p, start.get_parameter(name))


def frozen_base(resume_from: Path | None, source: Path | None) -> str:
    """Return the directory of the weights that adapters are added to; a resumed run keeps its own, even if init_from
    now resolves to another. Mark a step of a run, so that the run does not delete it."""
    if resume_from and checkpoint.is_adapter(resume_from):
        source = checkpoint.base_of(resume_from)
    if not source:
        return ""
    if checkpoint.STEP_NAME.fullmatch(source.resolve().name):
        with contextlib.suppress(OSError):  # a directory of others, that cannot be written to
            (source / checkpoint.KEEP).touch()
    return str(source.resolve())


def adapters_of(config: dict) -> LoRAConfig:
    modules = tuple(config["lora_modules"].split(","))
    return LoRAConfig(config["lora_rank"], config["lora_alpha"], config.get("lora_dropout", 0.0), modules)
