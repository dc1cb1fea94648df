"""parallel='fsdp': torch's FSDP2 for a model that one device cannot hold, behind the calls of DDP.

Every rank keeps its rows of each parameter, of its gradient and of its optimizer state. A block's
weights are gathered just before its forward and its backward and freed after. Its gradient is
averaged over the ranks, and each rank receives the rows that it keeps.

    model = build(Transformer, cfg, device, dtype, new=True)  # never whole on any rank
    ddp = FSDP(model)                                         # step(), flush(), ... as in ddp.py
    opt = AdamW(ddp.params, betas, weight_decay)

For a checkpoint the ranks gather one tensor after the other on rank 0, in host memory. So its files
are those of DDP, and a run can go on with either, on any number of ranks.
"""

import contextlib
import ctypes
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ddp import ALL_GATHER, REDUCE_SCATTER, count_skipped, sum_of_squares, with_clipping
from groundup.errors import UserError, listed, refuse
from groundup.train import ranks
from groundup.train.huggingface import own_rows, put
from groundup.train.optim import adamw_
from model import ModelConfig, Transformer, rope_tables

# device_mesh, fsdp and tensor are imported where they are used: that takes long, and every trainer
# imports this file.

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, under torch's names
NEEDED_SETTINGS = {
    "compress": "none",  # FSDP2 sends shards in its own way
    "overlap_step": "off",
    "reproducible": False,
    "zero1": False,  # the state is divided anyway
    "optimizer": "adamw",  # Muon needs whole matrices
    "trainable": "all",
    "sample_prompts": "",  # no text is written during training; use sample.py on checkpoints
    "eval_answers": 0,
}


def check_settings(config: Mapping, dtype: torch.dtype) -> None:
    """Raise UserError for settings that cannot be combined with parallel='fsdp'."""
    wrong = []
    for key, needed in NEEDED_SETTINGS.items():
        if config.get(key, needed) != needed:  # a stage may lack a key
            wrong.append(f"{key}={needed!r} (not {config[key]!r})")
    refuse(wrong, f"parallel='fsdp' needs {', '.join(wrong)}")
    text = "parallel='fsdp' has no GradScaler for dtype='float16'; use bfloat16 or float32"
    refuse(dtype == torch.float16, text)
    text = "parallel='fsdp' needs torchrun; in one process parallel='ddp' resumes the same run"
    refuse("RANK" not in os.environ, text)


# ---- the model -----------------------------------------------------------------------------------


def build(
    kind: type[Transformer], cfg: ModelConfig, device: torch.device, dtype: torch.dtype, new: bool
) -> Transformer:
    """Return kind(cfg) with every parameter divided by rows among the ranks. All ranks call it.

    new: draw the weights that kind(cfg) would have, else leave them to be loaded."""
    if device.type == "cpu":
        return_memory_at_once()
    with torch.device("meta"):  # names and shapes, no memory
        model = kind(cfg)
    shard(model, device, dtype)

    # Now memory for the rows, and what is no parameter.
    model.to_empty(device=device)
    model.cos, model.sin = (table.to(device) for table in rope_tables(cfg))
    if new:
        draw(model)
    return model


def shard(model: Transformer, device: torch.device, dtype: torch.dtype) -> None:
    """Divide the parameters by rows, and hang on each block what gathers and reduces it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Gathered weights and gradients are in `dtype`; the rows that a rank keeps, and sums over
    # ranks, are float32.
    mesh = init_device_mesh(device.type, (ranks.world_size(),))  # one dimension: all ranks
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )

    # What is gathered together. The model itself takes the parameters that are left: the final norm
    # and the head, whose weight the loss reads outside the head's forward.
    groups: dict[str, nn.Module] = {f"layers.{i}": block for i, block in enumerate(model.layers)}
    if not model.cfg.tie_embeddings:
        groups["embed_tokens"] = model.embed_tokens
    groups["the head"] = model
    for name, module in groups.items():
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_custom_all_gather(AllGather(name))
        module.set_custom_reduce_scatter(ReduceScatter(name))


def return_memory_at_once() -> None:
    """Make glibc map large tensors one by one, so that freeing a block returns its memory."""
    # Its heap fragments around long-lived small tensors. Measured for 77M parameters on two ranks:
    # 1.6 GiB per rank in the heap, as much as ddp, 0.7 GiB mapped.
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(-3, 2**18)  # M_MMAP_THRESHOLD, bytes


def draw(model: Transformer) -> None:
    """Set the weights that the constructor of a whole model draws from the same generator state."""
    # The constructors of layers draw first, so these draws are repeated and dropped.
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.Linear(module.in_features, module.out_features, module.bias is not None)
        elif isinstance(module, nn.Embedding):
            nn.Embedding(module.num_embeddings, module.embedding_dim)
    # Then the weights. Every rank draws whole ones and keeps its rows, one parameter at a time.
    for name, p in model.named_parameters():
        whole = torch.full(p.shape, math.nan)
        model.init_parameter(name, whole)
        # Its constructor ran without memory, so what that gave it is lost.
        text = f"parallel='fsdp' needs a line for {name} in model.py's init_parameter"
        refuse(whole.isnan().any(), text)
        put(p, whole)


def local(t: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, without a copy."""
    return t.detach().to_local()


class AllGather:
    """FSDP's gather of the weights of `module`. An error about a dead rank names it in one line."""

    def __init__(self, module: str) -> None:
        self.operation = f"all_gather of the weights of {module}"

    def allocate(self, size: tuple, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        # FSDP passes these by keyword, so their names are torch's.
        args = output_tensor, input_tensor, group, async_op
        return ranks.issue(self.operation, ALL_GATHER, *args)


class ReduceScatter(AllGather):
    """FSDP's mean of the gradients of `module`: each rank receives its rows."""

    def __init__(self, module: str) -> None:
        self.operation = f"reduce_scatter of the gradients of {module}"

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if input_tensor.is_cuda:
            args = output_tensor, input_tensor, op, group, async_op
            return ranks.issue(self.operation, REDUCE_SCATTER, *args)
        # gloo's reduce_scatter sends as many bytes as a whole all-reduce, and has no mean. Instead
        # every rank receives the terms of its rows and adds them in the order of the ranks.
        terms = torch.empty_like(input_tensor)
        ranks.issue(self.operation, dist.all_to_all_single, terms, input_tensor, group=group)
        terms = terms.view(group.size(), -1).div_(group.size())
        torch.sum(terms, dim=0, out=output_tensor)
        return None


def same_forwards(
    model: nn.Module, batches: Iterable[Any], stop_signal: ranks.StopSignal | None = None
) -> Iterator[Any]:
    """Yield this rank's batches, for one forward without gradients each, until a signal comes.

    All ranks end together, though they may have unlike numbers of batches. A sharded model needs
    all of them in every forward."""
    for batch in chain(batches, repeat(None)):
        stopping = stop_signal is not None and stop_signal()
        flags = torch.tensor([batch is not None, stopping]).int()
        n_left, n_stopping = ranks.all_reduce_sum(flags, "evaluation").tolist()
        if n_stopping or not n_left:
            return
        if batch is not None:
            yield batch
        elif hasattr(model, "unshard"):  # of `build`
            # Out of batches: join the forwards of the others with a single token.
            one_token = torch.zeros(1, 1, dtype=torch.int64, device=model.cos.device)
            with torch.compiler.set_stance("force_eager"):  # a new shape would recompile
                model(one_token, index=one_token[0])


# ---- the step ------------------------------------------------------------------------------------


class FSDP:
    """What a trainer calls on ddp.DDP, for a model of `build`."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.params = dict(model.named_parameters())
        self.device = model.cos.device
        # Changes nothing: a rank has no room for all gradients, so every micro-step reduces them.
        self.sync = True
        self.n_updates = 0
        self.stopping = False
        self.found_inf = torch.zeros((), device=self.device)  # 1.0: the last step was skipped
        self.skipped = torch.zeros(2, device=self.device)  # steps in all, and in a row

    def expect_step(self, optimizer: "AdamW", lr: float) -> None:
        """Do nothing: only ddp.DDP can update during backward."""

    @torch.no_grad()
    def step(
        self,
        optimizer: "AdamW",
        lr: float,
        clip: float = 0.0,
        scaler: object = None,
        stop: bool = False,
    ) -> Tensor:
        """Clip, update, drop the gradients; return the norm before clipping, 0-d float32.

        clip: largest global norm, 0 = off. stop: a signal tells this rank to stop; `stopping` is
        then True on all ranks. Raise UserError on all ranks if one lacks a gradient."""
        # All ranks hear of a missing gradient while the norm is computed.
        step = f"step {self.n_updates + 1}"
        absent = [name for name, p in self.params.items() if p.grad is None]
        problem = f"no gradient for {listed(absent)}" if absent else ""
        agree = ranks.start_agreement(problem, step, stop)

        # The norm of the whole gradient: every rank adds up the squares of its rows.
        grads = [local(p.grad) for p in self.params.values() if p.grad is not None]
        square = torch.stack([sum_of_squares(grad.reshape(-1)) for grad in grads]).sum()
        ranks.all_reduce_sum(square, f"{step}: all_reduce of the squared norm")
        self.stopping = agree()
        norm = square.sqrt()

        # Skip the step if the norm is not finite. On the device, so nothing waits for it.
        self.found_inf = 1.0 - norm.isfinite().float()
        self.skipped = count_skipped(self.skipped, self.found_inf)

        grad_scale = with_clipping(torch.ones_like(norm), norm, clip)  # gradients are divided by it
        optimizer.update(lr, grad_scale, self.found_inf)
        for p in self.params.values():
            p.grad = None  # its memory is free for the next forward
        self.n_updates += 1
        return norm

    def flush(self) -> None:
        """Free the weights that are still gathered since the last forward."""
        self.model.reshard()

    def whole_weights(self) -> dict[str, Tensor]:
        """Return the weights by name on rank 0, in host memory, {} on the others. All call it."""
        weights = {}
        for name, p in self.params.items():
            whole = gather_rows(local(p), p, name)
            if ranks.rank() == 0:
                weights[name] = whole.cpu()
        return weights


def gather_rows(rows: Tensor, p: Tensor, name: str) -> Tensor:
    """Return the whole tensor of which each rank has the rows that it keeps of `p`."""
    from torch.distributed.tensor import DTensor, Shard

    # torch knows how rows are divided, also where the last ranks have fewer.
    sharded = DTensor.from_local(
        rows, p.device_mesh, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride()
    )
    with ranks.named_errors(f"gather of {name} for a checkpoint"):
        return sharded.full_tensor()


class AdamW:
    """AdamW (arXiv:1711.05101, torch's fused kernel) on this rank's rows."""

    def __init__(
        self, params: Mapping[str, Tensor], betas: tuple = (0.9, 0.95), weight_decay: float = 0.1
    ) -> None:
        self.params, self.betas, self.weight_decay = params, betas, weight_decay
        self.state: dict[str, dict[str, Tensor]] = {}  # of this rank's rows
        self.steps: dict[str, Tensor] = {}  # number of updates, 0-d float32
        for name, p in params.items():
            self.state[name] = {key: torch.zeros_like(local(p)) for key in MOMENTS}
            self.steps[name] = torch.zeros((), device=p.device)

    def update(self, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Update with gradients / grad_scale (0-d); change nothing where found_inf (0-d) is 1."""
        # A small parameter has no row on the last ranks. Matrices decay, vectors do not.
        filled = [name for name, p in self.params.items() if local(p).numel()]
        matrices = [name for name in filled if self.params[name].ndim >= 2]
        vectors = [name for name in filled if self.params[name].ndim < 2]
        for names, weight_decay in ((matrices, self.weight_decay), (vectors, 0.0)):
            if not names:
                continue
            params = [local(self.params[name]) for name in names]
            grads = [local(self.params[name].grad) for name in names]
            moments = ([self.state[name][key] for name in names] for key in MOMENTS)
            steps = [self.steps[name] for name in names]
            tensors = params, grads, *moments, steps
            adamw_(*tensors, self.betas, weight_decay, lr, grad_scale, found_inf)

    def state_dict(self, keep: bool = True) -> dict[str, dict[str, Tensor]]:
        """Return the whole state in host memory, as optim.Optimizer does; {} where not `keep`."""
        # All ranks take part in every gather. Rank 0 has rows, and so steps, of every parameter.
        saved: dict[str, dict[str, Tensor]] = {}
        for name, p in self.params.items():
            if keep:
                saved[name] = {"step": self.steps[name].cpu()}
            for key in MOMENTS:
                whole = gather_rows(self.state[name][key], p, f"{name}.{key}")
                if keep:
                    saved[name][key] = whole.cpu()  # so a device holds one whole tensor at a time
        return saved

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load this rank's rows of a whole state, of AdamW with DDP or of this one."""
        for name, p in self.params.items():
            if set(saved.get(name, ())) != {*MOMENTS, "step"}:
                why = f"the saved state of {name!r} is not AdamW's"
                raise UserError(f"optim: {why}; resume with the optimizer it was saved with")
            self.steps[name].copy_(saved[name]["step"])
            # Each rank reads its rows only: the file is mapped.
            first, end = own_rows(p)
            for key in MOMENTS:
                self.state[name][key].copy_(saved[name][key][first:end])
