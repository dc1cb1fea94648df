"""The machine a run uses: device, dtype, random state, memory, versions."""

import contextlib
import math
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from groundup.errors import UserError, counted, refuse

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# TFLOP/s of dense matrix products, from the vendors' data sheets: in bfloat16, or in float16 where
# the GPU has no bfloat16. The first name counts whose words are in the GPU's name.
GPU_PEAK_TFLOPS = {"GH200": 989, "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312}
GPU_PEAK_TFLOPS |= {"L40S": 362, "4090": 165, "3090": 71, "T4": 65}

# What the card of a run and the results of evaluate.py name with their versions.
PACKAGES = ("torch", "numpy", "tiktoken", "sentencepiece", "safetensors", "sacrebleu")
PACKAGES += ("rouge-score",)


def choose_device(name: str, local_rank: int = 0, plan_only: bool = False) -> torch.device:
    """Return the device of this process and make it the current one. 'auto' is cuda, then cpu.

    With several GPUs on a machine each rank takes the one of its `local_rank`. plan_only: it need
    not be in this machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind = name.partition(":")[0]
    known = kind in ("cuda", "mps", "cpu")
    refuse(not known, f"device must be 'auto', 'cuda', 'mps' or 'cpu', got {name!r}")
    if kind != "cuda" or plan_only:
        return torch.device(name)

    # One GPU per rank: NCCL refuses two ranks on one.
    n_gpus = torch.cuda.device_count()
    if n_gpus == 0:
        why = "check nvidia-smi, and that torch.version.cuda is not None"
        raise UserError(f"config: device={name!r}: torch sees no GPU: {why}; or use device='cpu'")
    if local_rank >= n_gpus:
        raise UserError(
            f"config: device={name!r}: torch sees {n_gpus} GPUs, none for local rank {local_rank}; "
            f"lower --nproc_per_node or use device='cpu'"
        )
    device = torch.device("cuda", local_rank) if name == "cuda" else torch.device(name)
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")  # TF32 where matrices are still float32
    return device


def choose_dtype(name: str, device: torch.device, scaled: bool = False) -> torch.dtype:
    """Return the dtype of matrix products. 'auto' is bfloat16 where the hardware has it.

    On older GPUs (T4, V100, RTX 20xx) it is float16 if a GradScaler is at work (scaled). Without
    one it is float32, because in float16 the activations of published models may overflow."""
    if name in DTYPES:
        return DTYPES[name]
    refuse(name != "auto", f"dtype must be 'auto' or one of {', '.join(DTYPES)}, got {name!r}")
    # Only native bfloat16 counts: emulated, it is slower than float32.
    native = False
    if device.type == "cuda":
        # without a GPU here it is a plan for one elsewhere: those since 2020 have it
        here = torch.cuda.is_available()
        native = not here or torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu" and hasattr(torch.cpu, "get_capabilities"):  # not in torch 2.11
        found = torch.cpu.get_capabilities()
        native = any(found.get(flag) for flag in ("avx512_bf16", "amx_bf16", "bf16"))
    if native:
        return torch.bfloat16
    return torch.float16 if scaled and device.type == "cuda" else torch.float32


def check_compiler(device: torch.device) -> None:
    """Raise UserError if torch.compile cannot work on a CPU: it compiles C++ against Python."""
    if device.type != "cpu":
        return
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    compiler = os.environ.get("CXX", usual)  # what torch would call
    text = f"compile=True needs a C++ compiler on a CPU; install {compiler}"
    refuse(not shutil.which(compiler), f"{text} or use compile=False")

    header = Path(sysconfig.get_path("include"), "Python.h")
    text = f"compile=True needs {header}; install python3-dev or use compile=False"
    refuse(not header.exists(), text)

    # What is compiled must also run where it is written.
    directory = os.environ.get("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
    if hasattr(os, "ST_NOEXEC") and os.path.isdir(directory):
        is_noexec = os.statvfs(directory).f_flag & os.ST_NOEXEC
        text = f"compile=True needs programs to run in {directory}, which is mounted noexec"
        refuse(is_noexec, f"{text}; set TMPDIR to another directory or use compile=False")


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Compute matrix products in `dtype`; weights and sums stay float32."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


# ---- speed ---------------------------------------------------------------------------------------


def peak_flops(device: torch.device) -> float:
    """Return FLOP/s of one GPU from its data sheet; 0 of a CPU, or of a GPU that is not listed."""
    # What a CPU reaches depends on its other work: measured twice, it differed by a factor of 5.
    if device.type != "cuda" or not torch.cuda.is_available():  # or a plan for another machine
        return 0.0
    for part, tflops in GPU_PEAK_TFLOPS.items():
        # Words: the RTX A1000 is no A100, the T400 no T4.
        if re.search(rf"\b{part}\b", torch.cuda.get_device_name(device)):
            return tflops * 1e12
    return 0.0


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work, so that a clock is real."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# ---- random state --------------------------------------------------------------------------------


class SkipInit(TorchFunctionMode):
    """Leave new weights as they are in memory within the context: others will replace them."""

    DRAWS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)

    def __torch_function__(
        self, function: Callable, types: tuple, args: tuple = (), kwargs: Mapping | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in self.DRAWS:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of torch's generators on the CPU and on this GPU."""
    # Data order needs none: it follows from the step. Dropout and new weights draw.
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Restore what `rng_state` returned, possibly on another kind of device."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


# ---- memory --------------------------------------------------------------------------------------


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process in GiB: on the GPU, else in RAM (0 on Windows)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30

    # Linux. Resident memory minus the pages of mapped files, which the system can reclaim.
    # (getrusage would count the parent's peak from before the fork.)
    status = Path("/proc/self/status")
    if status.exists():
        in_kb = dict(re.findall(r"(\w+):\s+(\d+) kB", status.read_text(encoding="utf-8")))
        return (float(in_kb["VmHWM"]) - float(in_kb.get("RssFile", 0))) / 2**20

    with contextlib.suppress(ImportError):  # Windows has no such module
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # bytes on macOS
    return 0.0


def memory_limit(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> float:
    """Return the bytes that this process may use, infinity where the system does not tell."""
    limits = [math.inf]  # the lowest counts
    lines = []
    with contextlib.suppress(OSError):  # no Linux
        meminfo = Path(proc, "meminfo").read_text(encoding="utf-8")
        limits.append(1024 * int(re.search(r"MemTotal:\s+(\d+) kB", meminfo)[1]))
        lines = Path(proc, "self/cgroup").read_text(encoding="utf-8").splitlines()

    # A control group (of a container or a job) may allow less. In a line
    # number:controllers:path, number 0 means version 2 of the interface.
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            group, file = Path(cgroups, path.lstrip("/")), "memory.max"
        elif "memory" in controllers.split(","):
            group, file = Path(cgroups, "memory", path.lstrip("/")), "memory.limit_in_bytes"
        else:
            continue
        # Each group limits those below it.
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file; "max"
                limits.append(int((folder / file).read_text(encoding="utf-8")))
    return min(limits)


# ---- what figures depend on ----------------------------------------------------------------------


def hardware(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's architecture and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {counted(torch.get_num_threads(), 'thread')}"


def versions() -> dict[str, str]:
    """Return {name: version} of Python and of those PACKAGES that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
