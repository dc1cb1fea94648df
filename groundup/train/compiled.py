"""Compile a model for training: few graphs, and one line when torch gives up."""

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from groundup.train.config_json import say
from model import Transformer

MOST_GRAPHS = 32  # of a block: with gradients and without, in up to three models, with adapters or not, ...


def compile_blocks(model: Transformer, lengths_vary: bool) -> None:
    """Compile the model in place, block by block. lengths_vary: one graph for all lengths, as fast as one for each."""
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    logging.getLogger("torch._dynamo.convert_frame").addFilter(say_that_torch_gave_up)
    compiled = partial(torch.compile, dynamic=False)
    model.compile_blocks((lambda forward: for_all_lengths(compiled(forward))) if lengths_vary else compiled)


def for_all_lengths(part: Callable) -> Callable:
    """Return a compiled block or norm that takes the length of its rows as a variable. (dynamic=True would take all
    sizes so, and equal ones as one: another graph for each length that is n_embd or batch_size.)"""

    def forward(*inputs: object) -> Tensor:
        for tensor in filter(torch.is_tensor, inputs[:3]):  # x, cos, sin: (..., T, features)
            torch._dynamo.maybe_mark_dynamic(tensor, tensor.ndim - 2)
        if len(inputs) > 3 and inputs[-1] is not None:  # firsts: (B, T)
            torch._dynamo.maybe_mark_dynamic(inputs[-1], 1)
        return part(*inputs)

    return forward


def say_that_torch_gave_up(record: logging.LogRecord) -> bool:
    """Say it once and in one line; torch takes six. A filter of its logger."""
    if gave_up := "hit config." in str(record.msg):
        what = f"torch compiled a block {record.args[1]} times and gave up"
        say(f"warning     {what}: other shapes run uncompiled, slower")
    return not gave_up
