"""What a run begins with: the weights that init_from names, their tokenizer, the architecture, and what is trained."""

import contextlib
import dataclasses
from pathlib import Path
from typing import NamedTuple

from groundup.errors import UserError
from groundup.train import checkpoint
from groundup.train.lora import LoRAConfig, resize_vocab
from model import ModelConfig, Transformer
from tokenizer import Tokenizer, chat_ready


class Base(NamedTuple):
    """What tuning begins with: directory of the weights (None = a tiny new model), chat tokenizer, how many of its ids
    those weights were trained with, and the architecture."""

    source: Path | None
    tokenizer: Tokenizer
    n_known: int
    cfg: ModelConfig


def open_base(config: dict, debug_data: str) -> Base:
    """Open init_from. Raise UserError unless it has weights that fit the settings, or `data` is `debug_data`."""
    source = checkpoint.resolve(config["init_from"]) if config["init_from"] else None
    if source is None and config["data"] != debug_data:
        raise UserError("config: init_from: give the run, checkpoint or Hugging Face directory to begin with")
    tokenizer = chat_ready(Tokenizer.load(checkpoint.tokenizer_dir(source or Path(config["data"]).parent)))
    n_known = count_known_ids(source, tokenizer, "the chat tokenizer") if source else 0
    check_trainable(config, source, tokenizer.vocab_size - n_known)
    return Base(source, tokenizer, n_known, tuned_architecture(config, source, tokenizer.vocab_size))


def tuned_architecture(config: dict, source: Path | None, token_vocab: int) -> ModelConfig:
    """That of the checkpoint `source`, with rows for all token ids, for texts as long as it can or as is asked; without
    a source that of a tiny model, to try a script with."""
    block_size, dropout = config["block_size"], config.get("dropout", 0.0)
    if source is None:
        return ModelConfig(token_vocab, block_size, n_layer=2, n_head=4, n_kv_head=2, n_embd=64, dropout=dropout)
    cfg = checkpoint.load_config(source)
    rows, longest = max(cfg.vocab_size, token_vocab), max(cfg.block_size, block_size)
    return dataclasses.replace(cfg, vocab_size=rows, block_size=longest, dropout=dropout)


def count_known_ids(source: Path, tokenizer: Tokenizer, whose: str) -> int:
    """How many of the tokenizer's ids the weights in `source` were trained with: all of them, or the first so many if
    it is their tokenizer with more tokens. Raise UserError if it is another, that of `whose`."""
    n_rows = checkpoint.load_config(source).vocab_size
    directory = checkpoint.tokenizer_dir(source)
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        if tokenizer.vocab_size > n_rows:
            raise UserError(f"config: {whose} has {tokenizer.vocab_size} token ids, {source} only {n_rows}")
        return n_rows
    known = Tokenizer.load(directory)
    if known.fingerprint() == tokenizer.fingerprint():
        return n_rows
    same = known.pieces.items() <= tokenizer.pieces.items() and known.special_ids <= tokenizer.special_ids
    if not same or tokenizer.vocab_size <= known.vocab_size:
        raise UserError(
            f"config: {whose} was not tokenized with the tokenizer of {source}, nor with one that extends it; "
            f"rerun prepare.py with --tokenizer_dir={source}"
        )
    return known.vocab_size


def check_trainable(config: dict, source: Path | None, n_new: int) -> None:
    """Raise UserError where `trainable` does not fit what training begins with; n_new ids have no weights yet."""
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


def load_start(model: Transformer, source: Path, n_known: int) -> None:
    """The weights in `source` into a model that may have more rows for tokens: those from n_known on become the mean of
    the others, for new tokens mean nothing yet."""
    same_rows = checkpoint.load_config(source).vocab_size == model.cfg.vocab_size == n_known
    if same_rows and not checkpoint.is_adapter(source):
        checkpoint.load_weights(model, source)
        return
    start = checkpoint.load_model(source, block_size=model.cfg.block_size)
    resize_vocab(start, model.cfg.vocab_size, n_known)
    model.load_state_dict(start.state_dict())


def frozen_base(resume_from: Path | None, source: Path | None) -> str:
    """Directory of the weights that adapters are added to: a resumed run's own, whatever init_from has come to mean. If
    it is a step of a run, that run will not remove it."""
    if resume_from and checkpoint.is_adapter(resume_from):
        base = checkpoint.base_of(resume_from)
    elif source:
        base = source.resolve()
    else:
        return ""
    if checkpoint.STEP_NAME.fullmatch(base.name):
        with contextlib.suppress(OSError):  # a directory of others, that cannot be written to
            (base / checkpoint.KEEP).touch()
    return str(base)


def adapters_of(config: dict) -> LoRAConfig:
    modules = tuple(config["lora_modules"].split(","))
    return LoRAConfig(config["lora_rank"], config["lora_alpha"], config.get("lora_dropout", 0.0), modules)
