"""What a rank will hold in memory, by part, before anything is allocated, and how many rows of a step fit in it."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from groundup.errors import UserError
from groundup.train import ranks
from groundup.train.device import process_bytes, ram_bytes
from model import ModelConfig, memory_table, parameter_table

# Of a GPU, or of free RAM: the rest is for what the plan leaves out (CUDA's context, blocks of its allocator that
# nothing fits in, on a CPU other programs) and for an estimate that is a tenth too low.
MEMORY_SHARE = 0.85


def memory_parts(
    cfg: ModelConfig, config: dict, trained: dict[str, int], masked: bool, world_size: int, device: torch.device,
    dtype: torch.dtype, other: Mapping[str, float] | None = None, head: bool = True,
) -> dict[str, float]:  # fmt: skip
    """{part: bytes} of what a rank holds at most, on a GPU there. trained: of lora.trainable_table; masked: documents
    share rows; other: parts that the model alone does not have, in bytes; head: of memory_table."""
    memory = memory_table(
        cfg, config["batch_size"], config["block_size"], dtype, config["optimizer"],
        config["activation_checkpointing"], config["compile"], device.type, masked, trained["trainable"],
        trained["adapters"], head,
    )  # fmt: skip
    if config["compress"] == "powersgd":
        params = parameter_table(cfg)
        matrices = params["total"] if config["compress_embedding"] else params["attention"] + params["mlp"]
        memory["compression error"] = 4 * min(matrices, trained["trainable"])
    if config["async_save"] and device.type == "cpu":  # on a GPU's machine it is in RAM, where there is room
        saved = memory["optimizer"] + memory.get("compression error", 0)
        memory["copy to save from"] = 4 * trained["trainable"] + saved
    memory |= {"process": process_bytes(device)} | dict(other or {})
    if config["zero1"]:
        memory["optimizer"] /= world_size
    return memory


def describe_parts(memory: Mapping[str, float]) -> str:
    """A line of memory_parts."""
    parts = ", ".join(f"{part} {n / 2**20:,.0f} MiB" for part, n in memory.items())
    return f"memory      {sum(memory.values()) / 2**30:.2f} GiB per rank: {parts}"


def fit_batch_size(
    config: dict, n_samples: int, memory_of: Callable[[dict], Mapping[str, float]], device: torch.device,
    usable: float | None = None,
) -> tuple[int, list[str]]:  # fmt: skip
    """(batch_size, lines for the plan). Where it is 0: that of the run that goes on, for other sums would round
    otherwise; else the largest that divides n_samples, those of a rank in a step, and whose memory_of(config) is at
    most `usable` bytes, None = those of the device. Raises ConfigError if one sample is too much."""
    if config["batch_size"]:
        return config["batch_size"], []
    began = began_with(config)
    if began and n_samples % began == 0:
        return began, [f"batch_size  {began}, with which {config['out_dir']} began"]
    usable = usable_bytes(device) if usable is None else usable

    def needed(batch_size: int, **changes: bool) -> float:
        return sum(memory_of(config | {"batch_size": batch_size} | changes).values())

    fitting = [size for size in range(1, n_samples + 1) if n_samples % size == 0 and needed(size) <= usable]
    if fitting:
        return fitting[-1], [f"batch_size  {fitting[-1]} chosen: {gib(needed(fitting[-1]))} of {gib(usable)} GiB"]
    advice = "a shorter block_size, a smaller model or trainable='lora'"
    if not config["activation_checkpointing"]:
        less = needed(1, activation_checkpointing=True)
        fits = "fits" if less <= usable else "is still too much"
        advice = f"activation_checkpointing=True takes {gib(less)} GiB, which {fits}; else {advice}"
    raise UserError(
        f"config: batch_size=1 takes {gib(needed(1))} GiB, {gib(usable)} GiB can be used; {advice}"
    )


def gib(n_bytes: float) -> str:
    return f"{n_bytes / 2**30:.2f}"


def began_with(config: dict) -> int:
    """The batch_size in the config.py of the run that will be continued; 0 if there is none. Without a checkpoint there
    is nothing to continue, and it may have been too much."""
    path = Path(config["out_dir"]) / "config.py"
    if config["resume"] == "never" or not path.exists() or not any(path.parent.glob("step_*")):
        return 0
    found = re.search(r"^batch_size = (\d+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1]) if found else 0


def usable_bytes(device: torch.device, root: Path = Path("/")) -> float:
    """What this rank may plan to fill: MEMORY_SHARE of its GPU, or its share of the RAM that is free now, with what it
    holds already. Ranks may see different numbers. Raises ConfigError where the system does not tell. root: of the
    files that tell, /proc and /sys."""
    if device.type == "cuda" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(device)
        return MEMORY_SHARE * min(total, free + torch.cuda.memory_reserved(device))
    if device.type != "cpu" or not (root / "proc/meminfo").exists():
        raise UserError(f"config: batch_size=0: nothing tells how much memory {device} has here; give batch_size")
    text = (root / "proc/meminfo").read_text(encoding="utf-8")
    free = [1024 * int(re.search(r"MemAvailable:\s+(\d+)", text)[1]), *free_in_groups(root)]
    return MEMORY_SHARE * (min(free) / int(os.environ.get("LOCAL_WORLD_SIZE", 1)) + ram_bytes("VmRSS"))


def free_in_groups(root: Path) -> list[int]:
    """Bytes left in each control group that this process is in and whose memory is limited (a container, a job).

    Version 2 has memory.max, version 1 memory.limit_in_bytes, in the group's directory; inside a container that is
    often the top one. The groups above count too. Pages of files are not counted: the system takes them back."""
    found = []
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, kinds, group = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        top, limit, used, files = root / "sys/fs/cgroup", "memory.max", "memory.current", "file"
        if kinds:
            top, limit, used, files = top / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"
        place = top / group.lstrip("/")
        for directory in (place, *place.parents):
            if directory.is_relative_to(top) and (directory / limit).exists():
                most = (directory / limit).read_text(encoding="utf-8").strip()
                if most != "max":
                    stat = dict(line.split() for line in (directory / "memory.stat").read_text("utf-8").splitlines())
                    held = int((directory / used).read_text(encoding="utf-8")) - int(stat.get(files, 0))
                    found.append(int(most) - held)
    return found


def agree_batch_size(asked: int, chosen: int, verbose: bool) -> int:
    """The smallest that a rank has chosen, on all ranks, if they were asked to: it divides a step and fits on each.
    What differs otherwise, check_ranks_agree reports."""
    everyone = ranks.gather_objects((asked, chosen))
    least = min(size for _, size in everyone)
    if any(asked for asked, _ in everyone) or least == chosen:
        return chosen
    if verbose:
        print(f"batch_size  {least}, as much as fits on every rank", flush=True)
    return least
