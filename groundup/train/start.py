"""What a tuning run starts from: a checkpoint, its chat tokenizer and its architecture."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from groundup.train import checkpoint, huggingface
from model import ModelConfig
from tokenizer import Tokenizer, chat_ready


class Start(NamedTuple):
    init_dir: Path  # of the checkpoint
    tokenizer: Tokenizer
    n_known: int  # token ids that its weights were trained with
    model_config: ModelConfig


def open_start(
    config: dict, *data: str, adapt: Callable[[Tokenizer], Tokenizer] = lambda tokenizer: tokenizer
) -> Start:
    """Return what the settings of a trainer begin with. Raise UserError if they do not suit it.

    data: the data, if they may decide the date that a template writes. adapt: changes the tokenizer
    for this stage."""
    init_dir = checkpoint.resolve(config["init_from"])
    tokenizer = chat_ready(Tokenizer.load(huggingface.tokenizer_dir(init_dir)))
    # The date is that of the run that continues, else of init_from, else of the data, else today.
    begins = checkpoint.resume_mode(config) == "never"
    dates = (init_dir if begins else config["out_dir"], *data)
    tokenizer = adapt(tokenizer.with_template_settings(config["chat_template_kwargs"], *dates))
    # its ids may be more than the weights were trained with: the rows of new ones are trained
    n_ids = tokenizer.vocab_size
    n_known = huggingface.count_known_ids(init_dir, tokenizer, "the chat tokenizer")
    huggingface.check_trainable(config["trainable"], init_dir, n_ids - n_known)
    dropout = config.get("dropout", 0.0)  # rl.py has none
    model_config = huggingface.tuned_config(init_dir, n_ids, config["block_size"], dropout)
    huggingface.check_saves(model_config, tokenizer)
    return Start(init_dir, tokenizer, n_known, model_config)
