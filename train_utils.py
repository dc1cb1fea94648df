"""Small things that every training script needs: device and dtype, seeds, signals, the log. A closed list."""

import contextlib
import importlib.util
import json
import math
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch
from tqdm import tqdm

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Dense bfloat16 (float16 where there is no bfloat16) peak in TFLOP/s, from the vendors' data sheets.
GPU_PEAK_TFLOPS = {
    "H200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "4090": 165, "3090": 71, "T4": 65,
}  # fmt: skip
# What figures may depend on.
PACKAGES = ("torch", "numpy", "tiktoken", "sentencepiece", "safetensors", "sacrebleu", "rouge-score")


class SetupError(ValueError):
    one_line = True


# ---- device, dtype, seeds -------------------------------------------------------------------------------------------


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """'auto' takes cuda, then mps, then cpu. On several GPUs each rank takes its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.partition(":")[0] not in ("cuda", "mps", "cpu"):
        raise SetupError(f"config: device must be 'auto', 'cuda', 'mps' or 'cpu', got {name!r}")
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise SetupError(f"config: device={name!r}, but torch sees no CUDA device; use device='cpu'")
        if local_rank >= torch.cuda.device_count():
            raise SetupError(
                f"config: local rank {local_rank} has no GPU of its own ({torch.cuda.device_count()} visible); "
                f"lower --nproc_per_node or use device='cpu'"
            )
        device = torch.device("cuda", local_rank) if name == "cuda" else torch.device(name)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32 where float32 is left
        return device
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """dtype of matrix products. 'auto' is bfloat16 where the hardware multiplies it, else float32."""
    if name == "auto":
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise SetupError(f"config: dtype must be 'auto' or one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 natively (emulated it would be slower than float32)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        flags = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.11 does not tell: float32 there
        return bool(flags.get("avx512_bf16") or flags.get("amx_bf16") or flags.get("bf16"))
    return False


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Matrix products in `dtype`, weights and sums in float32; nothing when dtype is float32."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of one device: the data sheet's for a known GPU, else that of a large matrix product measured now."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = [peak for part, peak in GPU_PEAK_TFLOPS.items() if part in name]
        if known:
            return known[0] * 1e12
    n = 4096 if device.type == "cuda" else 1024
    a = torch.ones(n, n, device=device, dtype=dtype)
    best = float("inf")
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
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


# ---- memory, machine ------------------------------------------------------------------------------------------------


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this process has held: on the GPU, else in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return ram_bytes("VmHWM") / 2**30


def process_bytes(device: torch.device) -> float:
    """Memory of the process itself, to be asked before there is a model: what it holds on a CPU, and the 100 MB that
    torch and its compiler take when they are first used. On a GPU the figures count tensors only."""
    return 0.0 if device.type == "cuda" else ram_bytes("VmRSS") + 100e6


def ram_bytes(field: str) -> float:
    """Linux's VmRSS (now) or VmHWM (peak) without the pages of files: the system takes those of libraries and token
    files back when it needs them, and how many are mapped at a time is its own affair. Elsewhere the peak, 0 on
    Windows. Linux's getrusage would not do: its peak is inherited from the process that started this one."""
    status = Path("/proc/self/status")
    if status.exists():
        sizes = dict(re.findall(r"(\w+):\s+(\d+) kB", status.read_text(encoding="utf-8")))
        return (float(sizes[field]) - float(sizes.get("RssFile", 0))) * 2**10
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # bytes on macOS


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """{package: version} of Python and of PACKAGES, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


# ---- signals --------------------------------------------------------------------------------------------------------


class StopSignal:
    """Turns SIGTERM and Ctrl-C into a flag that the loop reads after each step; a second Ctrl-C stops at once, or
    when the checkpoint that is being written is whole.

    torchrun passes a terminal's Ctrl-C on a second time within moments, so a repeat counts only after two seconds.
    """

    def __init__(self) -> None:
        self.received, self.at = 0, 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self.received and time.monotonic() - self.at > 2:
            raise KeyboardInterrupt
        if not self.received:
            self.received, self.at = number, time.monotonic()

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as a shell reports it; 143 for a signal that only another rank received."""
        return 128 + (self.received or signal.SIGTERM)


# ---- log ------------------------------------------------------------------------------------------------------------


class RunLog:
    """The line for people on standard output and the object for programs in out_dir/log.jsonl, from one dict of values.

    Only rank 0 writes. A resumed run drops what an interrupted one logged after its checkpoint: those steps come again.
    tensorboard: numbers go to event files in out_dir, too.
    """

    def __init__(
        self, out_dir: str, max_steps: int, start_step: int, enabled: bool, tensorboard: bool = False
    ) -> None:  # fmt: skip
        self.enabled, self.max_steps, self.board = enabled, max_steps, None
        if not enabled:
            return
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(out_dir, purge_step=start_step + 1 if start_step else None)
        self.path = Path(out_dir) / "log.jsonl"
        keep_events_until(self.path, start_step or -1)  # a fresh run evaluates at step 0 again
        self.file = open(self.path, "a", encoding="utf-8")
        self.bar = tqdm(total=max_steps, initial=start_step, disable=not sys.stdout.isatty(), leave=False, unit="step")

    def advance(self) -> None:
        if self.enabled:
            self.bar.update()

    def write(self, event: str, step: int, values: Mapping[str, object]) -> None:
        """Append {"event", "step", **values} to log.jsonl. JSON has no NaN and no infinity: they become null."""
        if self.enabled:
            values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            try:
                self.file.write(json.dumps({"event": event, "step": step, **values}) + "\n")
                self.file.flush()
                for key, value in values.items() if self.board else ():
                    if isinstance(value, int | float):
                        self.board.add_scalar(f"{event}/{key}", value, step)
            except OSError as error:  # a full disk must not end the run
                self.print(f"log: cannot write {self.path}: {error.strerror}")

    def since_best(self, key: str) -> int:
        """How many evaluations have passed since `key` was lowest; 0 on other ranks than the first. All evaluations of
        the run count, before an interruption too: the file has them. One that is not finite is not better."""
        if not self.enabled:
            return 0
        found = [event[key] for event in read_events(self.path) if event["event"] == "eval" and key in event]
        found = [math.inf if loss is None else loss for loss in found]
        return len(found) - 1 - found.index(min(found)) if found else 0

    def print(self, text: str) -> None:
        if self.enabled:
            tqdm.write(text)
            sys.stdout.flush()

    def train(self, step: int, values: Mapping[str, float], step_s: float) -> None:
        """One training line. `values` has the keys of `named`; what else it has comes last, if it is not 0. A key with
        a slash (tokens/source) goes to the file only: there may be many."""
        self.write("train", step, values | {"step_ms": 1000 * step_s})
        named = ("loss", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", "memory_gib")
        eta = clock(step_s * (self.max_steps - step))
        parts = [
            f"step {step:6d}/{self.max_steps}", f"loss {values['loss']:.4f}", f"lr {values['lr']:.2e}",
            f"norm {values['grad_norm']:.2f}", f"{1000 * step_s:.0f} ms", f"{values['tokens_per_s']:,.0f} tok/s",
            f"mfu {100 * values['mfu']:.1f}%", f"{values['memory_gib']:.1f} GiB", f"eta {eta}",
        ]  # fmt: skip
        others = [key for key in values if key not in named and "/" not in key]
        parts += [f"{key} {values[key]:.4g}" for key in others if values[key]]
        self.print(" | ".join(parts))

    def close(self) -> None:
        if self.enabled:
            self.bar.close()
            self.file.close()
            if self.board:
                self.board.close()


def check_tensorboard(asked: bool) -> None:
    """Raise SetupError if event files are asked for and cannot be written."""
    if asked and importlib.util.find_spec("tensorboard") is None:
        raise SetupError("config: tensorboard=True needs a package; pip install tensorboard==2.21.0")


def read_events(path: Path) -> list[dict]:
    """The events of a log.jsonl, without lines that a kill or a full disk cut short."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            events.append(json.loads(line))
    return events


def keep_events_until(path: Path, step: int) -> None:
    """Drop the events of `path` after `step`, and a last line that a kill cut short."""
    if not path.exists():
        return
    kept = [json.dumps(event) + "\n" for event in read_events(path) if event["step"] <= step]
    tmp = path.with_suffix(".jsonl.tmp")
    tmp.write_text("".join(kept), encoding="utf-8")
    os.replace(tmp, path)


def clock(seconds: float) -> str:
    """3725 -> '1:02:05'."""
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
