"""The machine a run uses: device, dtype, random state, memory, versions."""

import contextlib
import math
import platform
import re
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

from groundup.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Dense bfloat16 (float16 where there is no bfloat16) peak in TFLOP/s, from the vendors' data sheets.
GPU_PEAK_TFLOPS = {
    "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "4090": 165, "3090": 71, "T4": 65,
}  # fmt: skip
PACKAGES = ("torch", "numpy", "tiktoken", "sentencepiece", "safetensors", "sacrebleu", "rouge-score")


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """'auto' takes cuda, then mps, then cpu. On several GPUs each rank takes its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.partition(":")[0] not in ("cuda", "mps", "cpu"):
        raise UserError(f"config: device must be 'auto', 'cuda', 'mps' or 'cpu', got {name!r}")
    if not name.startswith("cuda"):
        return torch.device(name)
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"config: device={name!r}: torch sees {torch.cuda.device_count()} GPUs, none for local rank {local_rank}; "
            "lower --nproc_per_node or use device='cpu'"
        )
    device = torch.device("cuda", local_rank) if name == "cuda" else torch.device(name)
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")  # TF32 where float32 is left
    if torch.cuda.get_device_capability(device) >= (9, 0):
        prefer_cudnn()
    return device


ATTENTION = contextlib.ExitStack()  # stays open as long as the process lives


def prefer_cudnn() -> None:
    """Try cuDNN's fused attention first, then FlashAttention: the former is written for Hopper and later GPUs, but
    torch's own order begins with the latter."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    ATTENTION.close()
    ATTENTION.enter_context(sdpa_kernel(order, set_priority=True))


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products. 'auto' is bfloat16 where the hardware multiplies it natively (emulation is
    slower than float32), else float32."""
    if name != "auto" and name not in DTYPES:
        raise UserError(f"config: dtype must be 'auto' or one of {', '.join(DTYPES)}, got {name!r}")
    if name != "auto":
        return DTYPES[name]
    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        flags = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.11 does not tell: float32 there
        native = flags.get("avx512_bf16") or flags.get("amx_bf16") or flags.get("bf16")
    return torch.bfloat16 if native else torch.float32


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Compute matrix products in `dtype`, keep weights and sums in float32."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOP/s of one device: from the data sheet of a known GPU, else measured on a large matrix product."""
    for part, peak in GPU_PEAK_TFLOPS.items() if device.type == "cuda" else ():
        if part in torch.cuda.get_device_name(device):
            return peak * 1e12
    n, best = 4096 if device.type == "cuda" else 1024, float("inf")
    a = torch.ones(n, n, device=device, dtype=dtype)
    for _ in range(8):
        synchronize(device)
        begin = time.perf_counter()
        a @ a
        synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * n**3 / best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed torch's generators. Weights are drawn with rank 0's seed on every rank; dropout then differs by rank."""
    torch.manual_seed(seed + rank)


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state()} | cuda


def set_rng_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process: on the GPU, else in RAM (0 on Windows). On Linux without mapped files,
    which the system takes back when it must; its getrusage would count the peak of the parent process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    status = Path("/proc/self/status")
    if status.exists():
        sizes = dict(re.findall(r"(\w+):\s+(\d+) kB", status.read_text(encoding="utf-8")))
        return (float(sizes["VmHWM"]) - float(sizes.get("RssFile", 0))) / 2**20
    with contextlib.suppress(ImportError):  # Windows has no such module
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # bytes on macOS
    return 0.0


def device_memory(device: torch.device) -> float:
    """Return the bytes of a GPU; infinity where it is not in this machine."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return math.inf
    return torch.cuda.get_device_properties(device).total_memory


def memory_limit(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> float:
    """Return the bytes that this process may use: the machine's, or less where a control group of its path (a
    container's, a job's), of version 1 or 2, allows less. Infinity where the system does not tell."""
    found = [math.inf]
    with contextlib.suppress(OSError, ValueError):
        in_kb = re.search(r"MemTotal:\s+(\d+) kB", Path(proc, "meminfo").read_text(encoding="utf-8"))
        found += [1024 * int(in_kb[1])] if in_kb else []
    with contextlib.suppress(OSError):
        for line in Path(proc, "self/cgroup").read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            if number != "0" and "memory" not in controllers.split(","):
                continue
            top, name = (cgroups, "memory.max") if number == "0" else (f"{cgroups}/memory", "memory.limit_in_bytes")
            group = Path(top, path.lstrip("/"))
            for folder in (group, *group.parents):  # each one above limits, too
                with contextlib.suppress(OSError, ValueError):  # no file; "max"
                    found.append(int((folder / name).read_text(encoding="utf-8")))
    return min(found)


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Return {package: version} of Python and of the installed PACKAGES, on which figures may depend."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
