"""A decoding step on a GPU, recorded once and replayed for each token.

At one row a step is a few hundred short kernels, and Python takes longer to launch them than the
GPU to run them. A CUDA graph launches all of them at once. It reads and writes the addresses of
its recording: tokens and lengths are copied into its own tensors; weights and cache stay where
they were.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from groundup.generate.kv_cache import Part
from model import Transformer


class RecordedStep:
    """`step(model, tokens, parts)` of one cache with a fixed number of rows, with compiled blocks.

    A graph is recorded for each width of the cache. All blocks share one compiled function, so
    that it takes seconds, not a minute."""

    def __init__(self, model: Transformer, step: Callable) -> None:
        """Compile the blocks of `model`, a copy for inference."""
        for part in (*model.layers, model.norm):
            part.forward = torch.compile(part.forward)
        self.step = step
        self.keys: list[Tensor] | None = None  # of the cache that the graphs write to
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}

    def __call__(self, model: Transformer, tokens: Tensor, parts: list[Part]) -> Tensor:
        """tokens (B,) -> logits (B, V) float32."""
        ((keys, values, lengths, span),) = parts
        if keys is not self.keys:  # a longer cache has replaced it
            self.keys, self.graphs = keys, {}
        width = span.shape[0]
        if width not in self.graphs:
            self.graphs[width] = self.record(
                model, tokens.clone(), (keys, values, lengths.clone(), span)
            )
        graph, own_tokens, own_lengths, logits = self.graphs[width]
        own_tokens.copy_(tokens)
        own_lengths.copy_(lengths)
        graph.replay()
        return logits.clone()  # the next replay overwrites them

    def record(
        self, model: Transformer, tokens: Tensor, part: Part
    ) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]:
        """Return (graph, its tokens, its lengths, its logits)."""
        from torch._dynamo import config  # late: its import takes as long as all of torch

        # Of all models and numbers of rows; beyond torch's 8 a call fails. Each thread has its own.
        config.recompile_limit = 128
        # Compile. What this writes to the cache, the replay writes again.
        self.step(model, tokens, [part])
        graph = torch.cuda.CUDAGraph()
        # thread_local: the engine of another model may allocate memory in its thread meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = self.step(model, tokens, [part])
        return graph, tokens, part[2], logits
