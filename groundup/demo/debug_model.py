"""Make a tiny model of random weights for the `debug` configurations of sft, dpo, reward and rl."""

import contextlib
import os
import shutil
from pathlib import Path

import torch

from groundup.demo.debug_data import make_debug_data
from groundup.train.huggingface import write_model
from model import ModelConfig, Transformer
from tokenizer import Tokenizer, chat_ready

SEED = 1337


def make_debug_model(directory: str | Path) -> None:
    """Write a Hugging Face model directory beside the debug corpus, unless it is there."""
    directory = Path(directory)
    if directory.exists():
        return
    make_debug_data(directory.parent)
    tokenizer = chat_ready(Tokenizer.load(directory.parent))
    cfg = ModelConfig(
        tokenizer.vocab_size, block_size=512, n_layer=2, n_head=4, n_kv_head=2, n_embd=64
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they were
        torch.manual_seed(SEED)
        model = Transformer(cfg)
    # Several processes may do this at once: each writes the same under a name of its own.
    own = directory.with_name(f".{directory.name}.{os.getpid()}")
    own.mkdir()
    write_model(own, model, tokenizer)
    with contextlib.suppress(OSError):  # another process was faster
        own.rename(directory)
    shutil.rmtree(own, ignore_errors=True)
