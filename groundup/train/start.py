"""What a tuning run starts from: a checkpoint, its chat tokenizer and its architecture."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from groundup.train import checkpoint, huggingface
from groundup.train.device import SkipInit
from groundup.train.lora import frozen_dtype, weights_in
from model import ModelConfig
from tokenizer import Tokenizer, chat_ready


class Start(NamedTuple):
    init_dir: Path  # of the checkpoint
    tokenizer: Tokenizer
    n_known: int  # token ids that its weights were trained with
    model_config: ModelConfig


def open_start(
    config: dict,
    *data: str,
    adapt: Callable[[Tokenizer], Tokenizer] = lambda tokenizer: tokenizer,
    rewards: bool = False,
) -> Start:
    """Return what the settings of a trainer begin with. Raise UserError if they do not suit it.

    data: the data, if they may decide the date that a template writes. adapt: changes the tokenizer
    for this stage. rewards: it may be a reward model."""
    init_dir = checkpoint.resolve(config["init_from"], rewards=rewards)
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
    model_config = huggingface.tuned_config(init_dir, n_ids, config, dropout)
    huggingface.check_saves(model_config, tokenizer)
    return Start(init_dir, tokenizer, n_known, model_config)


@contextmanager
def weights_to_load(trainable: str, dtype: torch.dtype, plan_only: bool = False) -> Iterator[None]:
    """Within the context a model gets weights that are loaded later, for products in `dtype`.

    plan_only: shapes without memory."""
    device = torch.device("meta" if plan_only else "cpu")
    with device, SkipInit(), weights_in(frozen_dtype(trainable, dtype)):
        yield
