"""Before a run trains: what it will take, and whether its device computes as the CPU does.

The plan is counted from the model: parameters, FLOPs, memory, time. The model may be on the meta
device, where it takes no memory: a plan exists for every size. Call `set_trainable` first, because
frozen parameters take less of everything.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ddp import make_buckets, sum_of_squares
from groundup.errors import UserError, counted
from groundup.kernels.cross_entropy import chunk_rows
from groundup.train import huggingface, ranks
from groundup.train.config_json import is_plain
from groundup.train.device import autocast, memory_limit
from groundup.train.log import clock
from groundup.train.optim import Optimizer
from model import ModelConfig, Transformer

# Added to the tensors for what a plan cannot know: holes in the allocator's memory, buffers of
# libraries. A CPU's heap has more holes, most of all where batches differ in length.
MARGIN = {"cpu": 0.4, "cuda": 0.15, "mps": 0.15}
PROCESS = 400 * 2**20  # Python with torch, in the memory of the machine
GIB, MIB = 2**30, 2**20


PARTS = ("embedding", "attention", "mlp", "norms", "biases", "head", "adapters", "total")


def parameter_table(model: nn.Module, trained: bool = False) -> dict[str, int]:
    """Return {part: number of parameters}, and "total". trained: only those with a gradient."""
    table = dict.fromkeys(PARTS, 0)
    # named_parameters yields a tied embedding once.
    for name, p in model.named_parameters():
        if p.requires_grad or not trained:
            table[part_of(name, p.ndim)] += p.numel()
            table["total"] += p.numel()
    return table


def part_of(name: str, n_dims: int) -> str:
    """Return the part that a parameter belongs to, by its name."""
    if ".lora_" in name:
        return "adapters"
    if n_dims < 2:
        return "biases" if name.endswith(".bias") else "norms"
    if not name.startswith("layers."):
        return "embedding" if name == "embed_tokens.weight" else "head"
    return "attention" if ".self_attn." in name else "mlp"  # also what an edit adds to a block


def matrices_in_blocks(table: Mapping[str, int]) -> int:
    return table["attention"] + table["mlp"] + table["adapters"]


def head_of(model: nn.Module) -> torch.Tensor:
    """Return the matrix (V, C) that makes the logits; an empty one for a reward model."""
    return model.lm_head.weight if hasattr(model, "lm_head") else torch.empty(0)


def flops_per_token(model: nn.Module, T: int) -> float:
    """Return the FLOPs per token of forward and backward, in rows of T tokens."""
    # A matrix takes 2 per parameter in the forward pass, 2 for the gradient of its input and 2 for
    # its own, which a frozen one does not need. The embedding lookup multiplies nothing.
    cfg, head = model.cfg, head_of(model)
    matrices = matrices_in_blocks(parameter_table(model)) + head.numel()
    trained = matrices_in_blocks(parameter_table(model, trained=True))
    trained += head.numel() if head.requires_grad else 0
    # Attention: 12 L H D T. As in PaLM (arXiv:2204.02311, appendix B) the causal half is not
    # subtracted, so figures compare with published ones.
    return 4 * matrices + 2 * trained + 12 * cfg.n_layer * cfg.n_head * cfg.head_dim * T


def memory(
    model: Transformer,
    config: dict,
    world_size: int,
    device: torch.device,
    dtype: torch.dtype,
    other: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return {part: bytes} that one of world_size ranks holds during a step, at most.

    other: parts that the stage adds, such as a reference model."""
    # A plain sum: each part counts at its largest, though not all are there at the same time.
    parts = model_state(model, config, world_size, device, dtype)
    # What grows with the batch.
    N = config["batch_size"] * config["block_size"]  # tokens of a micro-step
    parts["activations"] = activations(model.cfg, N, config["activation_checkpointing"], dtype)
    # Three chunks of logits in float32 (scores, exponentials, gradient), the head's gradient.
    head = head_of(model).numel()
    V = model.cfg.vocab_size if head else 0
    rows = min(N, chunk_rows(model.cfg.vocab_size, device.type))
    parts["logits"] = 4 * (3 * rows * V + head)
    parts |= other or {}
    # What a plan cannot know, of all of the above.
    parts["margin"] = MARGIN[device.type] * sum(parts.values())
    if device.type == "cpu":
        parts["interpreter"] = PROCESS
    return parts


def model_state(
    model: Transformer, config: dict, world_size: int, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Return {part: bytes} of what does not grow with the batch."""
    trained = parameter_table(model, trained=True)
    matrices, head = matrices_in_blocks(parameter_table(model)), head_of(model).numel()

    # Gradients and optimizer state are float32. AdamW has two moments, Muon one.
    moments = 2 * trained["total"]
    if config["optimizer"] == "muon":
        moments -= trained["attention"] + trained["mlp"]
    parts = {
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "gradients": 4 * trained["total"],
        "optimizer": 4 * moments,
    }
    if config.get("reproducible"):  # sums of 1, 2, 4, .. micro-batches, see ddp.InTree
        micro_step = config["batch_size"] * config["block_size"] * world_size  # tokens
        n_micro_steps = config["total_batch_tokens"] / micro_step
        parts["sums"] = parts["gradients"] * math.log2(max(1, n_micro_steps))
    if config.get("compress") == "powersgd":
        parts["compression error"] = 4 * min(matrices, trained["total"])
    if device.type == "cpu":  # a GPU's copy is in the memory of the machine
        parts["copy to save"] = 4 * (trained["total"] + moments)

    # FSDP divides all of these among the ranks; ZeRO-1 divides the optimizer's state.
    if config.get("parallel") == "fsdp":
        parts = {part: size / world_size for part, size in parts.items()}
        # Whole, with gradients: the head and three blocks (at work, next, arriving).
        gathered = head + 3 * matrices / model.cfg.n_layer
        parts["gathered"] = (dtype.itemsize + 4) * gathered
    elif dtype != torch.float32:  # autocast's copies of the matrices
        parts["casts"] = dtype.itemsize * (matrices + head)
    if config["zero1"]:
        parts["optimizer"] /= world_size
    return parts


def teacher_bytes(teacher: Path, dtype: torch.dtype) -> float:
    """Return what the weights of the frozen model in a directory take, computing in dtype."""
    with torch.device("meta"):
        model = Transformer(huggingface.load_config(teacher))
    # As huggingface.load_model holds it.
    each = 2 if dtype == torch.bfloat16 else 4
    return float(each * parameter_table(model)["total"])


def activations(cfg: ModelConfig, N: int, recompute: bool, dtype: torch.dtype) -> float:
    """Return the bytes that autograd keeps of N tokens; recompute: of one block and all inputs."""
    # Of a block: four streams of C in float32 (residual and norm, twice); in `dtype` the inputs of
    # the linear layers, q, k, v, the output of attention, and SwiGLU's four tensors.
    query, key = cfg.n_head * cfg.head_dim, cfg.n_kv_head * cfg.head_dim
    block = 4 * 4 * cfg.n_embd
    block += dtype.itemsize * (2 * cfg.n_embd + 4 * query + 2 * key + 4 * cfg.ffn_dim)
    # q and k before their norms, in float32.
    if cfg.qk_norm:
        block += 8 * (query + key)
    n_whole = 1 if recompute else cfg.n_layer
    inputs = 4 * cfg.n_embd * (cfg.n_layer + 4)  # of the blocks, the last norm and its gradient
    return N * (n_whole * block + inputs)


def describe(
    model: Transformer,
    config: dict,
    batch: str,
    tokens: float,
    world_size: int,
    device: torch.device,
    dtype: torch.dtype,
    peak: float,
    other: Mapping[str, float] | None = None,
    note: str = "",
    forwards: int = 0,
    bound: str = "",
) -> str:
    """Return the plan as text.

    batch, note: on the batch, on the time. tokens: of all steps, without padding. peak: FLOP/s, 0 =
    unknown. forwards: more passes over as many tokens, without gradient. bound: "at most " if
    there may be fewer tokens."""
    table, trained = parameter_table(model), parameter_table(model, trained=True)
    counts = ", ".join(f"{part} {n:,}" for part, n in table.items() if n and part != "total")
    flops = flops_per_token(model, config["block_size"])
    flops *= 1 + forwards / 3  # backward is two thirds
    parts = memory(model, config, world_size, device, dtype, other)
    sizes = ", ".join(f"{part} {size / MIB:,.0f} MiB" for part, size in parts.items())
    need = sum(parts.values())
    ratio = tokens / table["total"]  # Chinchilla (arXiv:2203.15556) finds about 20 best
    lines = [
        f"parameters  {table['total']:,}: {counts}",
        f"trained     {trained['total']:,} ({config['trainable']})",
        f"batch       {batch}",
        f"tokens      {bound}{tokens:,} in {counted(config['max_steps'], 'step')}, "
        f"{ratio:.1f} per parameter",
        f"compute     {flops:.3e} FLOPs per token, {tokens * flops:.3e} in all, "
        f"{str(dtype).removeprefix('torch.')} on {device.type}",
        f"memory      {need / GIB:.2f} GiB per rank: {sizes}",
    ]
    lines += memory_warning(need, device)
    if not is_plain(model.cfg):
        lines.append("model.py    is edited: the numbers are those of the edited model")
    lines.append(time_line(tokens * flops, peak, world_size, note))
    return "\n".join(lines)


def ways_to_fit(config: Mapping, key: str, per_micro_step: int) -> str:
    """Return what to give so that a step has a whole number of micro-steps: the largest batch_size
    below that of the settings, or else a larger total. key: of the total, of tokens or pairs."""
    total, batch_size = config[key], config["batch_size"]
    each = per_micro_step // batch_size
    fitting = [n for n in range(1, batch_size) if total % (n * each) == 0]
    if fitting:
        return f"give batch_size={fitting[-1]}"
    return f"give {key}={-(-total // per_micro_step) * per_micro_step}"


def memory_warning(need: float, device: torch.device) -> list[str]:
    """Return a line if the ranks of this machine need more bytes than it has, `need` each."""
    if device.type != "cpu":
        return []
    # A CPU's ranks share the memory of their machine; torchrun says how many there are.
    need *= ranks.number_in("LOCAL_WORLD_SIZE", 1) if ranks.world_size() > 1 else 1
    has = memory_limit()
    if need <= has:
        return []
    text = f"this machine or its container has {has / GIB:.2f} GiB"
    return [f"warning     needs {need / GIB:.2f} GiB, {text}"]


def rate_warning(model: Transformer, learning_rate: float) -> list[str]:
    """Return a line if a small model is tuned with the learning rate of a large one, see
    config/sft.py."""
    if learning_rate >= 1e-4 or parameter_table(model)["total"] >= 100e6:
        return []
    usual = "1e-4 to 1e-3 is usual below 100M parameters"
    return [f"warning     learning_rate={learning_rate:g} is for larger models: {usual}"]


def time_line(flops: float, peak: float, world_size: int, note: str) -> str:
    """Return the line on the time that all steps take. peak, note: as in `describe`."""
    if not peak:
        return "time        not known for this device: give --peak_tflops; each log line has an eta"
    seconds = flops / (0.4 * peak * world_size)  # 40 % is what a well used GPU reaches
    speed = f"at 40 % of {world_size} x {peak / 1e12:,.2f} TFLOP/s"
    return f"time        {note}{clock(seconds)} {speed}; start-up and evaluations come on top"


# ---- does the device compute as the CPU does? ----------------------------------------------------
# Only mps is checked, before every run on it: none of our tests has run on a Mac, and operations of
# mps have been wrong in some versions of torch and macOS.

# (divisor of the gradients, 1 = skip the update): a plain update, a clipped and a skipped one, and
# one whose loss shows what these did. AdamW's update depends on the divisor only if it changes.
UPDATES = [(1.0, 0.0), (8.0, 0.0), (1.0, 1.0), (1.0, 0.0)]


def check_arithmetic(device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError if mps, computing in `dtype`, trains another model than the CPU does."""
    if device.type == "mps":
        compare_with_cpu(device, dtype)


def compare_with_cpu(device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError with the first value of a small run that differs on the device."""
    # As a share of the value, several times what rounding makes; NaN is wrong, too.
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    found, expected = small_run(device, dtype), small_run(torch.device("cpu"), dtype)
    for name, value in expected.items():
        if not abs(found[name] - value) <= tolerance * abs(value):
            raise UserError(
                f"config: torch {torch.__version__} computes wrongly on device={str(device)!r}: "
                f"{name} of a small model is {found[name]:.6g}, on the CPU {value:.6g}; "
                "use device='cpu' or another version of torch"
            )


def small_run(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Train a model of one block with Muon and AdamW; return losses and norms by name."""
    # The same weights and rows on both devices. The run's own random numbers stay as they are.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer(ModelConfig(96, 32, 1, n_head=4, n_kv_head=2, n_embd=64, qk_norm=True))
        rows = torch.randint(96, (2, 33)).to(device)
    buckets = make_buckets(model.to(device), MIB, world_size=1)
    optimizer = Optimizer(buckets, "muon", muon_dtype=torch.float32)
    values = {}
    for i, update in enumerate(UPDATES):
        with autocast(device, dtype):
            loss = model(rows[:, :-1], rows[:, 1:])
        values[f"the loss after {i} updates"] = loss.item()
        for bucket in buckets:
            bucket.grad.zero_()
        loss.backward()
        norm = sum(sum_of_squares(bucket.grad) for bucket in buckets).sqrt()
        values[f"the gradient's norm after {i} updates"] = norm.item()
        grad_scale, found_inf = torch.tensor(update, device=device).unbind()
        for bucket in buckets:
            optimizer.update(bucket, lr=1e-2, grad_scale=grad_scale, found_inf=found_inf)
    return values
