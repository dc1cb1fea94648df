"""A model's copy for inference and its decoding step: one call, whatever computes it.

    view = for_inference(model, dtype)   # its matrices in `dtype`, on a CPU laid out for step.c
    step = decoding_step(view, compile)
    step(view, tokens, parts)            # tokens (B,) -> logits (B, V) float32

On a CPU a step is a call of C code (kernels/decoding.py), on a GPU with compile=True a recorded
CUDA graph. Otherwise it runs as model.py has it: decode_step is the plain reference of both.
"""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn as nn
from torch import Tensor

from groundup.generate.kv_cache import CacheStep, Part, free_bytes
from groundup.kernels.decoding import Int8Linear, NativeLinear, NativeStep, lay_out, step_c
from groundup.kernels.linear import join
from groundup.train.config_json import is_plain
from groundup.train.lora import LoRALinear, plain_linear
from model import ModelConfig, Transformer

CHUNK_TOKENS = 512  # a prompt is read in pieces of this many tokens, which bounds memory


# ---- the copy for inference ----------------------------------------------------------------------


@torch.no_grad()
def for_inference(model: Transformer, dtype: torch.dtype, copies: bool = True) -> Transformer:
    """Return a copy of the model in eval mode with matrices in `dtype`. It shares what needs no
    change: embedding and norms keep their dtype, as in training.

    copies: add adapters to copies of their matrices, and lay the matrices out for step.c, if it
    computes this model and the memory suffices."""
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    device = model.embed_tokens.weight.device
    if isinstance(model.lm_head, NativeLinear):
        return model  # it is such a copy
    view = shared_copy(model)
    if copies:
        merge_adapters(view)
    places = linear_places(view)
    # Laid out for step.c they are copies: only where there is room for both.
    n_bytes = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    n_bytes += sum(buffer.nbytes for buffer in model.buffers())  # 8-bit matrices
    int8 = isinstance(model.lm_head, Int8Linear)
    if copies and n_bytes < free_bytes(device) / 2 and is_native(model.cfg, device, dtype, int8):
        lay_out(places, dtype)
    elif not int8:
        for parent, name in places:
            linear = getattr(parent, name)
            if linear.weight.dtype != dtype:
                linear.weight = nn.Parameter(linear.weight.detach().to(dtype), requires_grad=False)
    return view.eval()


def linear_places(model: Transformer) -> list[tuple[nn.Module, str]]:
    """Return (parent, name) of each matrix. A layer of another class may compute something else."""
    return [
        (parent, name)
        for parent in model.modules()
        if not isinstance(parent, LoRALinear)
        for name, child in parent.named_children()
        if type(child) in (nn.Linear, LoRALinear, Int8Linear)
    ]


def to_int8(model: Transformer) -> Transformer:
    """Round the matrices to 8 bits, in place, with the adapters that they have."""
    merge_adapters(model)
    for parent, name in linear_places(model):
        setattr(parent, name, Int8Linear(getattr(parent, name)))
    return model


def shared_copy(model: Transformer) -> Transformer:
    """Return a copy that shares all tensors, with eager blocks."""
    # Blocks that are compiled for training would be compiled anew here.
    # deepcopy takes what is in its memo as copied already.
    same = {id(x): x for x in (*model.parameters(), *model.buffers())}
    compiled = [vars(part)["forward"] for part in model.modules() if "forward" in vars(part)]
    view = copy.deepcopy(model, same | {id(forward): None for forward in compiled})
    for part in view.modules():
        vars(part).pop("forward", None)
    return view


def merge_adapters(view: Transformer) -> None:
    """Replace each adapted matrix by the sum of both."""
    for parent, name in linear_places(view):
        child = getattr(parent, name)
        if isinstance(child, LoRALinear):
            weight = nn.Parameter(child.merged_weight(), requires_grad=False)
            setattr(parent, name, plain_linear(weight, child.bias))


def is_native(
    cfg: ModelConfig, device: torch.device, dtype: torch.dtype, int8: bool = False
) -> bool:
    """Return whether step.c works here and computes what model.py does for models of this shape."""
    has = {"qwen2": cfg.qkv_bias, "qwen3": cfg.qk_norm}
    kinds = [kind for kind in has if has[kind]] or ["llama"]
    fits = device.type == "cpu" and cfg.n_embd % 2 == cfg.ffn_dim % 2 == 0
    plain = all(is_plain(replace(cfg, model_type=kind)) for kind in kinds)
    return fits and plain and step_c(dtype, int8) is not None


# ---- the step ------------------------------------------------------------------------------------


def can_record(device: torch.device) -> bool:
    return device.type == "cuda"


def decoding_step(view: Transformer, compile: bool) -> Callable:
    """Return the step of a copy for inference: C code, recorded if `compile`, or plain."""
    if isinstance(view.lm_head, NativeLinear):
        return NativeStep(view)
    return RecordedStep(view) if compile else decode_step


def decode_step(model: Transformer, tokens: Tensor, parts: list[Part]) -> Tensor:
    """tokens (B,) -> logits (B, V) float32 of the next ones. parts: of the cache, see CacheStep."""
    hidden = model.hidden(tokens.unsqueeze(1), CacheStep(parts))
    return model.lm_head(hidden)[:, 0].float()


def groups_of_one_input(model: Transformer) -> list[list[nn.Linear]]:
    """Return the layers that model.py gives to each_linear together."""
    groups, found = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")), []
    for part in model.modules():
        found += [[getattr(part, name, None) for name in group] for group in groups]
    return [group for group in found if all(group)]


class RecordedStep:
    """decode_step of one cache with a fixed number of rows, with compiled blocks, on a GPU.

    Python takes longer to launch the few hundred short kernels of a step than the GPU to run them.
    A CUDA graph, one for each width of the cache, launches all at once. It reads and writes where
    it was recorded: tokens and lengths are copied there, weights and cache stay where they are."""

    def __init__(self, model: Transformer) -> None:
        """Compile the blocks of `model`, a copy for inference."""
        for layers in groups_of_one_input(model):
            join(*layers)
        # All blocks share one compiled function: it takes seconds, not a minute.
        for part in (*model.layers, model.norm):
            part.forward = torch.compile(part.forward)
        self.keys: list[Tensor] | None = None  # of the cache that the graphs write to
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}

    def __call__(self, model: Transformer, tokens: Tensor, parts: list[Part]) -> Tensor:
        """tokens (B,) -> logits (B, V) float32."""
        (part,) = parts
        if part.keys is not self.keys:  # a longer cache has replaced it
            self.keys, self.graphs = part.keys, {}
        # A graph computes the width that it was recorded with.
        width = part.span.shape[0]
        if width not in self.graphs:
            own = part._replace(lengths=part.lengths.clone())
            self.graphs[width] = self.record(model, tokens.clone(), own)
        graph, own_tokens, own_lengths, logits = self.graphs[width]
        own_tokens.copy_(tokens)
        own_lengths.copy_(part.lengths)
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
        decode_step(model, tokens, [part])
        graph = torch.cuda.CUDAGraph()
        # thread_local: the engine of another model may allocate memory in its thread meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = decode_step(model, tokens, [part])
        return graph, tokens, part.lengths, logits
