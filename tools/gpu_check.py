"""What a GPU does with this project, in two parts of at most five minutes, the most valuable first:
make gpu.

    python tools/gpu_check.py --sections=first               # tests, speed of training and decoding
    python tools/gpu_check.py --sections=second --nanogpt=../nanoGPT  # peers, the trainers
    python tools/gpu_check.py --sections=training,decode     # only these

A section is a few commands with a time limit. Each command and the lines of its output that count
are written as they come to out_dir/first.md (second.md; gpu_check.md for a list of sections). A
command that fails leaves the end of its output there, and the next one begins. Without a GPU
everything runs on tiny shapes, which tests the tool, and the figures mean nothing. The exit status
is 1 if a section failed on a GPU.
"""

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import bench_model
import timing
from machine import ROOT, commit, run_script

from configurator import configure
from groundup.errors import UserError, end_in_one_line, refuse
from groundup.train import device as devices

# ---- config --------------------------------------------------------------------------------------
out_dir = "out/gpu_check"  # what was found; the runs, which are deleted
sections = "first"  # first, second, or some of the names in PARTS, comma-separated
shapes = "124M,350M,1.1B"  # training: models; decode measures the last
nanogpt = ""  # peers: checkout of karpathy/nanoGPT; "" = without

PARTS = {  # seconds of each section
    "first": {"machine": 20, "tests": 90, "training": 100, "decode": 60},
    "second": {"peers": 75, "tuning": 75, "cpu": 30, "resume": 25},
}
LIMIT_S = PARTS["first"] | PARTS["second"]
# Settings that give pretrain.py the shape of a model
SIZES = "n_layer n_head n_kv_head n_embd ffn_dim block_size vocab_size tie_embeddings".split()
PRETRAIN = ["pretrain.py", "config/debug.py", "--sample_prompts="]
RARELY = ["--eval_every=1000000", "--save_every=1000000"]  # only at the beginning and the end
STEPS = r"^(memory |step +\d+/)"  # of a trainer's output: the planned memory, the log lines
TABLE = r"^(row|train|generate) "  # of tools/bench.py's
N_LINES = 60  # of a command's output at most
RUNS = ".gpu_check.tmp"  # directory in out_dir, deleted before and after: a name that no run has


class Setup(NamedTuple):
    """gpu: False = tiny shapes on a CPU."""

    gpu: bool
    shapes: list[str]
    nanogpt: str
    runs: Path  # directory of the runs

    @property
    def on_device(self) -> list[str]:
        device = "cuda" if self.gpu else "cpu"
        return [f"--device={device}", f"--compile={self.gpu}"]


class Command(NamedTuple):
    words: list[str]  # a Python script and its flags
    kept: str = ""  # pattern of the lines to keep


# ---- sections: the docstring is the text below the heading ---------------------------------------


def machine(setup: Setup) -> Iterator[str]:
    """Versions; the measured ceilings."""
    device = torch.device("cuda" if setup.gpu else "cpu")
    yield ", ".join(f"{name} {version}" for name, version in timing.versions().items())
    for dtype in (torch.bfloat16, torch.float32):
        rate = timing.matmul(device, dtype)() / 1e12
        yield f"matrix product, {str(dtype)[6:]}: {rate:.2f} TFLOP/s"
    rate = timing.reading(2**30 if setup.gpu else 2**24, device)() / 1e9
    yield f"reading memory: {rate:.0f} GB/s"


def tests(setup: Setup) -> Iterator[Command]:
    """Every test that is marked gpu; a failure stops none of the others."""
    where, processes = ["tests/generate/test_sampling.py"], []
    if setup.gpu:
        files = sorted(ROOT.glob("tests/**/test_*.py"))
        where = [str(file) for file in files if "mark.gpu\n" in file.read_text("utf-8")]
        processes = ["-n", "8"]
    options = ["-q", "-m", "gpu", "-rfs", "--show-capture=no", "--tb=short", "--timeout=70"]
    yield Command(["-m", "pytest", *options, *processes, *where])


def training(setup: Setup) -> Iterator[Command]:
    """pretrain.py itself, compiled: the memory that was planned, then tokens/s, share of the data
    sheet's FLOP/s and memory.
    """
    steps = 30 if setup.gpu else 3
    for optimizer in ("adamw", "muon"):
        for shape in setup.shapes:
            cfg = bench_model.SHAPES[shape]
            batch = {"124M": 32, "350M": 16, "1.1B": 4}.get(shape, 2)
            flags = [f"--{key}={getattr(cfg, key)}" for key in SIZES]
            flags += [f"--batch_size={batch}", f"--total_batch_tokens={batch * cfg.block_size}"]
            flags += [f"--optimizer={optimizer}", f"--max_steps={steps}", "--eval_steps=1"]
            flags += [f"--warmup_steps={min(5, steps)}", f"--log_every={max(1, steps // 3)}"]
            flags += ["--dtype=bfloat16"] if setup.gpu else []
            flags += [f"--out_dir={setup.runs}/{shape}_{optimizer}", *RARELY, *setup.on_device]
            yield Command([*PRETRAIN, *flags], STEPS)


def decode(setup: Setup) -> Iterator[Command]:
    """Tokens/s of generation, and the share of reading weights and cache once per token."""
    for batch in (8, 64) if setup.gpu else (2,):  # beside 1
        more = [] if setup.gpu else ["--new_tokens=4"]
        yield bench(setup, "generate", setup.shapes[-1], f"--batch_size={batch}", *more)


def bench(setup: Setup, row: str, shape: str, *flags: str) -> Command:
    way, (device, _) = "blocks" if setup.gpu else "none", setup.on_device
    flags = [f"--rows={row}", f"--shapes={shape}", f"--compile={way}", device, *flags]
    return Command(["tools/bench.py", "--repeats=3", *flags], TABLE)


def peers(setup: Setup) -> Iterator[Command]:
    """transformers' and nanoGPT's training steps on the same shape, in turns with ours."""
    more = [f"--nanogpt={setup.nanogpt}"] if setup.nanogpt else []
    more += ["--tokens=16384" if setup.gpu else "--tokens=128", "--apart=False"]
    yield bench(setup, "train", setup.shapes[0], *more)


def tuning(setup: Setup) -> Iterator[Command]:
    """sft packed, dpo and GRPO on the debug data, compiled."""
    steps = 20 if setup.gpu else 2
    for stage, more in (("sft", ["--pack=yes"]), ("dpo", []), ("rl", ["--eval_prompts=1"])):
        flags = [f"--max_steps={steps}", "--warmup_steps=2", f"--log_every={steps}", *more]
        flags += [f"--out_dir={setup.runs}/{stage}", *RARELY, *setup.on_device]
        yield Command([f"{stage}.py", f"config/debug_{stage}.py", *flags], STEPS)


def cpu(setup: Setup) -> Iterator[Command]:
    """The losses of config/debug.py on both, in float32."""
    steps = 200 if setup.gpu else 4
    flags = [f"--max_steps={steps}", f"--warmup_steps={min(5, steps)}", *RARELY]
    flags += [f"--log_every={max(1, steps // 4)}"]
    for device in dict.fromkeys(["--device=cpu", setup.on_device[0]]):
        out = f"--out_dir={setup.runs}/debug_{device.partition('=')[2]}"
        yield Command([*PRETRAIN, *flags, device, out], STEPS)


def resume(setup: Setup) -> Iterator[Command | str]:
    """Eight steps at once, and four with four more after a restart: the losses of the last four."""
    flags = [*PRETRAIN, "--schedule=constant", setup.on_device[0], "--warmup_steps=4", *RARELY]
    for name, steps in (("straight", 8), ("resumed", 4), ("resumed", 8)):
        out = f"--out_dir={setup.runs}/{name}"
        yield Command([*flags, "--log_every=1", f"--max_steps={steps}", out], "^no line$")
    for name in ("straight", "resumed"):
        lines = (setup.runs / name / "log.jsonl").read_text("utf-8").splitlines()
        losses = [event["loss"] for event in map(json.loads, lines) if event["event"] == "train"]
        yield f"{name}: {losses[4:]}"


# ---- the report ----------------------------------------------------------------------------------


def run(command: Command, left_s: float) -> Iterator[str]:
    """Yield the lines to write of a command and of its output."""
    yield f"$ python {' '.join(command.words)}"
    if left_s <= 1:
        raise UserError("no time left")
    lines = run_script([sys.executable, *command.words], limit_s=left_s)
    kept = [line.rstrip("\n") for _, line in lines if re.search(command.kept, line)]
    yield from kept[-N_LINES:]
    yield f"({lines[-1][0] if lines else 0.0:.1f} s)"


def run_section(name: str, setup: Setup, write: Callable[[str], None]) -> bool:
    """Write what a section finds; return whether something failed."""
    work, begin, failed = globals()[name], time.monotonic(), False
    write(f"\n## {name}\n\n{work.__doc__}\n\n```")
    steps = iter(work(setup))
    while True:
        try:
            step = next(steps, None)
            if step is None:
                break
            left_s = begin + LIMIT_S[name] - time.monotonic()
            for line in [step] if isinstance(step, str) else run(step, left_s):
                write(line)
        except Exception as error:  # whatever it is, the next command or section may work
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            write(f"failed: {kind}{error}")
            failed = True
    write(f"```\n\n{time.monotonic() - begin:.1f} s")
    return failed


def main(config: dict) -> int:
    part, gpu = config["sections"], torch.cuda.is_available()
    names = list(PARTS[part]) if part in PARTS else part.split(",")
    unknown = [name for name in names if name not in LIMIT_S]
    known = ", ".join([*PARTS, *LIMIT_S])
    refuse(unknown, f"sections={''.join(unknown[:1])!r} is none of {known}")
    refuse(not config["out_dir"], "out_dir is empty; give --out_dir=DIR")
    out = Path(config["out_dir"]).absolute()
    report = out / f"{part if part in PARTS else 'gpu_check'}.md"
    shapes = config["shapes"].split(",") if gpu else ["tiny"]
    setup = Setup(gpu, shapes, config["nanogpt"], out / RUNS)
    # what a killed call has left would be continued
    shutil.rmtree(setup.runs, ignore_errors=True)
    setup.runs.mkdir(parents=True)
    hardware = devices.hardware(torch.device("cuda" if gpu else "cpu"))
    with open(report, "w", encoding="utf-8", buffering=1) as f:  # a line at a time

        def write(line: str) -> None:
            print(line, flush=True)
            f.write(f"{line}\n")

        write(f"# {hardware}, {time.strftime('%Y-%m-%d')}, commit {commit()}")
        if not gpu:
            what = "every section ran on tiny shapes on the CPU, and the figures mean nothing"
            write(f"\nThere is no GPU: {what}.")
        failed = [name for name in names if run_section(name, setup, write)]
    shutil.rmtree(setup.runs, ignore_errors=True)
    print(f"gpu_check: {report}")
    return int(gpu and bool(failed))


if __name__ == "__main__":
    end_in_one_line()
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main(configure(globals())))
