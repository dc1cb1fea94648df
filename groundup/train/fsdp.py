"""parallel='fsdp': a model that one device cannot hold, by torch's FSDP2 behind the loop's calls of ddp.DDP.

Every rank keeps its rows of each parameter, of its gradient and of its optimizer state. A block's weights are gathered
just before they are used, forward and backward, and freed after; its gradient goes to the ranks that keep the rows.

    model = build(Transformer, cfg, device, dtype, new=True)    # sharded from the start: never whole on any rank
    parallel = FSDP(model)                                      # step(), flush(), ... as of ddp.DDP
    opt = AdamW(parallel.params, betas, weight_decay)
    write(directory, parallel, shards(parallel, opt), group)    # on all ranks; any number of ranks can read it

A checkpoint's weights are the sharded safetensors that transformers reads. Its optimizer/ is written and read through
torch.distributed.checkpoint, as safetensors too: its other format is pickled, and reading that could run code.
"""

import contextlib
import ctypes
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.adamw import adamw

from ddp import sum_of_squares
from groundup.errors import UserError, listed
from groundup.train import ranks
from groundup.train.huggingface import hf_name, save_weights, write_json
from model import ModelConfig, Transformer, rope_tables

LEAST_FILES = 8  # of a model, or as many as ranks; a rank gathers one at a time to write it
STATE_DIR = "optimizer"


def conflict(config: Mapping, dtype: torch.dtype) -> str:
    """Return why these settings cannot be combined with parallel='fsdp', or ""."""
    off = {"compress": "none", "overlap_step": "off", "zero1": False, "bucket_mb": 0.0}
    text = {"sample_prompts": "", "eval_answers": 0}
    if used := [f"{key}={config[key]!r}" for key, value in off.items() if config[key] != value]:
        return f"parallel='fsdp' sends and updates shards in its own way; leave out {listed(used)}"
    if used := [f"--{key}={value or chr(39) * 2}" for key, value in text.items() if config.get(key, value) != value]:
        return f"parallel='fsdp' writes no text while it trains; add {listed(used)}, use sample.py on checkpoints"
    if config["optimizer"] != "adamw":
        return f"parallel='fsdp' divides the matrices that {config['optimizer']} needs whole; use optimizer='adamw'"
    if config["trainable"].strip() != "all":
        return f"parallel='fsdp' trains all parameters, not trainable={config['trainable']!r}; use parallel='ddp'"
    if dtype == torch.float16:
        return "parallel='fsdp' has no GradScaler for dtype='float16'; use bfloat16 or float32"
    if "RANK" not in os.environ and not config["plan_only"]:
        return "parallel='fsdp' needs torchrun; in one process parallel='ddp' continues the same run"
    return ""


# ---- the model ------------------------------------------------------------------------------------------------------


def build(
    kind: type[Transformer], cfg: ModelConfig, device: torch.device, dtype: torch.dtype, new: bool
) -> Transformer:  # fmt: skip
    """Return kind(cfg) with every parameter divided by rows among the ranks. All ranks call it, after init().

    Between its gathers and for its gradients a block is in `dtype`; the ranks' rows, and sums over ranks, are float32.
    new: draw the weights that kind(cfg) would have, one parameter at a time; else they are not set."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if device.type == "cpu":
        give_memory_back()
    with torch.device("meta"):
        model = kind(cfg)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    held = None if dtype == torch.float32 else dtype
    policy = MixedPrecisionPolicy(param_dtype=held, reduce_dtype=torch.float32, cast_forward_inputs=False)
    groups = {f"layers.{i}": block for i, block in enumerate(model.layers)}
    groups |= {} if cfg.tie_embeddings else {"embed_tokens": model.embed_tokens}
    for name, module in (groups | {"the head": model}).items():  # the head's weight is read outside its forward
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_custom_all_gather(AllGather(name))
        module.set_custom_reduce_scatter(ReduceScatter(name))
    model.to_empty(device=device)
    model.cos, model.sin = (table.to(device) for table in rope_tables(cfg))
    if new:
        draw(model)
    return model


def give_memory_back() -> None:
    """Make glibc map every large tensor by itself. In its heap, small tensors that stay land in the holes that gathered
    blocks leave, and a rank grew as large as with ddp: 1.6 GiB instead of 0.7 for 77M parameters on two ranks."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(-3, 2**18)  # M_MMAP_THRESHOLD, bytes


def draw(model: Transformer) -> None:
    """Set the weights that the constructor of a whole model draws from the same state of the generator."""
    for module in model.modules():  # these draw before reset_parameters draws again
        if isinstance(module, nn.Linear):
            nn.Linear(module.in_features, module.out_features, module.bias is not None)
        elif isinstance(module, nn.Embedding):
            nn.Embedding(module.num_embeddings, module.embedding_dim)
    for name, p in model.named_parameters():
        whole = torch.ones(p.shape)
        model.init_parameter(name, whole)
        put(p, whole)


def own_rows(p: Tensor) -> tuple[int, int]:
    """Return (first, one past the last) row of a sharded parameter that this rank keeps."""
    rows = -(-p.shape[0] // p.device_mesh.size())
    first = min(p.device_mesh.get_local_rank() * rows, p.shape[0])
    return first, min(first + rows, p.shape[0])


@torch.no_grad()
def put(p: Tensor, whole: Any) -> None:
    """Copy `whole`, a tensor or a slice of a safetensors file, into a parameter; of a sharded one, this rank's rows."""
    if not hasattr(p, "device_mesh"):
        p.copy_(whole[:])
        return
    first, end = own_rows(p)
    if first < end:
        p.detach().to_local().copy_(whole[first:end])


class AllGather:
    """FSDP's gather of the weights of `module`; the error about a dead rank is one line that names it."""

    def __init__(self, module: str) -> None:
        self.operation = f"all_gather of the weights of {module}"

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:  # fmt: skip
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return ranks.issue(self.operation, gather, output_tensor, input_tensor, group=group, async_op=async_op)


class ReduceScatter(AllGather):
    """FSDP's mean of the gradients of `module`, each rank's rows to that rank."""

    def __init__(self, module: str) -> None:
        self.operation = f"reduce_scatter of the gradients of {module}"

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:  # fmt: skip
        if input_tensor.is_cuda:
            scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
            return ranks.issue(self.operation, scatter, output_tensor, input_tensor, op, group, async_op)
        # gloo's reduce_scatter moves as many bytes as a whole all-reduce, and has no mean.
        terms = torch.empty_like(input_tensor).view(group.size(), -1)
        ranks.issue(self.operation, dist.all_to_all_single, terms.view(-1), input_tensor, group=group)
        torch.sum(terms.div_(group.size()), dim=0, out=output_tensor)
        return None


def in_step(model: nn.Module, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield this rank's batches, for one forward without gradients each. Where the model is sharded, a rank that has no
    batch left takes part in the forwards of the others, which need its rows."""
    if not hasattr(model, "unshard"):
        yield from batches
        return
    for batch in batches:
        ranks.any_rank(True)
        yield batch
    nothing = torch.zeros(1, 1, dtype=torch.int64, device=model.cos.device)
    while ranks.any_rank(False):
        with torch.compiler.set_stance("force_eager"):
            model(nothing, index=nothing[0])


# ---- the step -------------------------------------------------------------------------------------------------------


class FSDP:
    """What the loop calls on ddp.DDP, for a model of `build`. `sync` changes nothing: the gradients of every micro-step
    go to the ranks that keep them at once, since a rank has no room for all of them."""

    def __init__(self, model: Transformer) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.model, self.params = model, dict(model.named_parameters())
        self.device = next(iter(self.params.values())).device
        self.cpu_mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # of the copies that a save writes
        self.sync, self.n_steps, self.found_inf = True, 0, torch.zeros((), device=self.device)

    def expect_step(self, optimizer: "AdamW", lr: float) -> None:
        """For ddp.DDP's overlap_step."""

    @torch.no_grad()
    def step(self, optimizer: "AdamW", lr: float, clip: float = 0.0, scaler: object = None) -> Tensor:
        """Clip to global norm `clip` (0 = off), update, drop the gradients; return the norm before, 0-d float32. All
        ranks skip the update if it is not finite. Raise UserError on all ranks if a gradient is missing on any."""
        where = f"step {self.n_steps + 1}"
        absent = [name for name, p in self.params.items() if p.grad is None]
        check = ranks.start_agreement(absent and f"no gradient for {listed(absent)}" or "", where)
        squares = [sum_of_squares(local(p.grad).reshape(-1)) for p in self.params.values() if p.grad is not None]
        square = ranks.all_reduce_sum(torch.stack(squares).sum(), f"{where}: all_reduce of the squared norm")
        check()
        norm = square.sqrt()
        self.found_inf = 1.0 - norm.isfinite().float()
        scale = torch.ones_like(norm)
        if clip > 0:
            scale = scale / (clip / (norm + 1e-6)).clamp(max=1.0)  # as in ddp.py
        optimizer.update(lr, scale, self.found_inf)
        for p in self.params.values():
            p.grad = None
        self.n_steps += 1
        ranks.post_finished_steps(self.n_steps)
        return norm

    def flush(self) -> None:
        """Free the weights that are still gathered since the last forward."""
        self.model.reshard()


def local(t: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor."""
    return t.detach().to_local()


class AdamW:
    """AdamW (fused) on this rank's rows of sharded parameters; matrices decay, vectors do not."""

    def __init__(
        self, params: Mapping[str, Tensor], betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.1,
        eps: float = 1e-8,
    ) -> None:  # fmt: skip
        self.params, self.betas, self.weight_decay, self.eps = params, betas, weight_decay, eps
        self.state = {
            name: {key: torch.zeros_like(local(p)) for key in ("exp_avg", "exp_avg_sq")} for name, p in params.items()
        }
        self.steps = {name: torch.zeros((), device=p.device) for name, p in params.items()}

    def update(self, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Update with gradients / `grad_scale` (0-d); change nothing where `found_inf` (0-d) is 1."""
        for matrices in (True, False):
            names = [name for name, p in self.params.items() if (p.ndim >= 2) == matrices and local(p).numel()]
            states = [self.state[name] for name in names]
            if names:
                adamw(
                    [local(self.params[name]) for name in names], [local(self.params[name].grad) for name in names],
                    [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states], [],
                    [self.steps[name] for name in names], fused=True, grad_scale=grad_scale, found_inf=found_inf,
                    amsgrad=False, beta1=self.betas[0], beta2=self.betas[1], lr=lr,
                    weight_decay=self.weight_decay if matrices else 0.0, eps=self.eps, maximize=False,
                )  # fmt: skip

    def state_dict(self, gather: None = None, keep: bool = True) -> dict[str, dict[str, Tensor]]:
        """Return the number of updates alone: `write` stores the rest, in shards."""
        steps = [step for name, step in self.steps.items() if local(self.params[name]).numel()]
        return {"": {"step": steps[0]}} if keep else {}

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load this rank's rows of a state that is whole (ddp's), or the number of updates of one in shards."""
        sharded = set(saved) == {""}
        for name in self.params if not sharded else ():
            if set(saved.get(name, ())) != {"exp_avg", "exp_avg_sq", "step"}:
                raise UserError(
                    f"optim: the saved state of {name!r} has {sorted(saved.get(name, ()))}, this run needs AdamW's; "
                    f"resume with the optimizer it was saved with, or start anew with init_from"
                )
        for name, p in self.params.items():
            of_one = saved["" if sharded else name]
            self.steps[name].copy_(of_one["step"])
            first, end = own_rows(p)
            for key, mine in self.state[name].items() if not sharded else ():
                mine.copy_(of_one[key][first:end])


# ---- files ----------------------------------------------------------------------------------------------------------


def shards(parallel: FSDP, opt: AdamW) -> dict[str, dict[str, Tensor]]:
    """Return this rank's rows of the weights and of the optimizer's state."""
    state = {f"{name}.{key}": t for name, of_one in opt.state.items() for key, t in of_one.items()}
    return {"weights": {name: local(p) for name, p in parallel.params.items()}, "optimizer": state}


def write(
    directory: Path, parallel: FSDP, mine: Mapping[str, Mapping[str, Tensor]], group: ProcessGroup | None
) -> None:  # fmt: skip
    """Write the weights and the optimizer's state. mine: `shards`, or a copy. All ranks call it, on one file system."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor, Shard

    shapes = {name: p.shape for name, p in parallel.params.items()}
    files = files_of(shapes, dist.get_world_size())
    error = write_weights(directory, mine["weights"], shapes, files, group)
    state, number = {}, {}
    for key, rows in mine["optimizer"].items():
        name = key.rpartition(".")[0]
        shape, stride = shapes[name], parallel.params[name].stride()
        state[key] = DTensor.from_local(
            rows.cpu(), parallel.cpu_mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )
        number[key] = next(i for i, names in enumerate(files, 1) if name in names)
    path = str(directory / STATE_DIR)
    through_dcp(dcp.save, state, process_group=group, storage_writer=dcp.HuggingFaceStorageWriter(
        path, fqn_to_index_mapping=number, save_distributed=True
    ))  # fmt: skip
    if error is not None:
        raise error


def files_of(shapes: Mapping[str, torch.Size], world_size: int) -> list[list[str]]:
    """Divide the parameters, in their order, among files that are no larger than a rank's part, or than one tensor."""
    files, room = [], 0
    most = -(-sum(map(torch.Size.numel, shapes.values())) // max(world_size, LEAST_FILES))
    for name, shape in shapes.items():
        if shape.numel() > room:
            files.append([])
            room = most
        files[-1].append(name)
        room -= shape.numel()
    return files


def write_weights(
    directory: Path, mine: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], files: list[list[str]],
    group: ProcessGroup | None,
) -> Exception | None:  # fmt: skip
    """Write a model's files, each rank every so many: it receives the rows of the others. A rank whose disk refuses
    goes on receiving, so that no other waits; return the reason."""
    rank, world, error, index = dist.get_rank(), dist.get_world_size(), None, {}
    for number, names in enumerate(files):
        file, owner = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors", number % world
        index |= {hf_name(name): file for name in names}
        whole = {hf_name(name): gather_rows(mine[name].cpu(), shapes[name], owner, group) for name in names}
        try:
            if rank == owner and error is None:
                save_weights(directory / file, whole)
        except Exception as e:  # an OSError or safetensors' own
            error = e
        del whole
    if rank == 0 and error is None:
        size = 4 * sum(map(torch.Size.numel, shapes.values()))
        write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": index})
    return error


def gather_rows(mine: Tensor, shape: torch.Size, owner: int, group: ProcessGroup | None) -> Tensor:
    """Return the tensor of which each rank has rows, on its owner; on the others only `mine`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank != owner:
        if len(mine):
            ranks.issue("send of weights to be saved", dist.send, mine.contiguous(), owner, group)
        return mine
    whole, rows = torch.empty(shape, dtype=mine.dtype), -(-shape[0] // world)
    for source, part in enumerate(whole.split(rows)):
        if source == rank:
            part.copy_(mine)
        else:
            ranks.issue("receipt of weights to be saved", dist.recv, part, source, group)
    return whole


def load_optimizer(opt: AdamW, step_dir: Path) -> None:
    """Read this rank's rows of a state in shards, saved by any number of ranks; there is nothing to do without one."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor, Shard

    if not (step_dir / STATE_DIR).exists():
        return
    state = {}
    for name, p in opt.params.items():
        for key, mine in opt.state[name].items():
            where = {"shape": p.shape, "stride": p.stride(), "run_check": False}
            state[f"{name}.{key}"] = DTensor.from_local(mine, p.device_mesh, [Shard(0)], **where)
    reader = dcp.HuggingFaceStorageReader(str(step_dir / STATE_DIR))
    through_dcp(dcp.load, state, storage_reader=reader, no_dist=True)


def read_optimizer(step_dir: Path, steps: Tensor) -> dict[str, dict[str, Tensor]]:
    """Return the whole state of a checkpoint's shards, as optim.Optimizer loads it. steps: the number of updates."""
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(step_dir / STATE_DIR))
    found = through_dcp(reader.read_metadata).state_dict_metadata
    state = {key: torch.empty(of_one.size, dtype=of_one.properties.dtype) for key, of_one in found.items()}
    through_dcp(dcp.load, state, storage_reader=reader, no_dist=True)
    names = dict.fromkeys(key.rpartition(".")[0] for key in state)
    return {name: {"step": steps} | {k: state[f"{name}.{k}"] for k in ("exp_avg", "exp_avg_sq")} for name in names}


def through_dcp(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch.distributed.checkpoint; raise its errors, which are no Exceptions, as one."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no_dist=True is meant
            return function(*args, **kwargs)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        reason = getattr(cause, "strerror", None) or str(cause).splitlines()[0]
        raise OSError(None, f"rank {rank}: {reason}") from None
