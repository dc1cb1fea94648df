"""The benchmark: every measurement beside its peer and beside what this machine allows, in one
table.

    OMP_NUM_THREADS=2 python tools/bench.py --quick=True              # about a minute
    OMP_NUM_THREADS=2 python tools/bench.py --nanogpt=../nanoGPT --out=bench.json
    sudo python tools/bench.py --rows=ddp --cases=all --mbit=500      # over a link of 500 Mbit/s

The sides of a row take turns after a warm-up, those of train in processes of their own. A line
gives the median of the repeats, their spread (most - least) / median, and the speed-up over each
peer: median, least and most of the rounds. "of limit" is the share of what the machine allows,
measured in the same rounds: train and head, matrix products in the same dtype; ddp, the step
without communication; generate, reading weights and cache once per token. data, tokenize, bpe and
dedup count CPU seconds; so do train and generate on a CPU with one thread (OMP_NUM_THREADS=1). A
row that fails becomes a line with the error, the others go on, and the exit status is 1.
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

import bench_ddp
import bench_model
import bench_text
import bench_tune
import timing
from timing import Line, Options

from configurator import configure, defaults_of
from groundup.errors import UserError, refuse
from groundup.train.device import choose_device, choose_dtype, hardware

# ---- config --------------------------------------------------------------------------------------
rows = "all"  # all, or some of train,head,sft,dpo,ddp,generate,data,tokenize,bpe,dedup,checkpoint
quick = False  # small cases, nothing compiled, three repeats; without sft and dpo
out = ""  # JSON file with all samples; "" = none
repeats = 5  # of each side
device = "auto"  # auto | cpu | cuda | mps
dtype = "auto"  # auto | float32 | bfloat16: train, sft, dpo, generate
shapes = ""  # models: some of tiny,10M,25M,124M,350M,1.1B; "" = what the device does in minutes
compile = "none,blocks"  # none | blocks | none,blocks: train, dpo, generate
tokens = 0  # train, head: tokens in a step; 0 = 4096 on a CPU (head 2048), else 16384
optimizer = "adamw,muon"  # train, ours: adamw, muon or both
apart = True  # train: each side in a process of its own
nanogpt = ""  # train: checkout of karpathy/nanoGPT; "" = without
data = ""  # sft, dpo: conversations or pairs; "" = made from the documentation of Python
block_size = 512  # sft, dpo: longest row
batch_size = 8  # sft, dpo: rows or pairs in a micro-batch; generate: prompts at once, beside 1
new_tokens = 128  # generate: tokens written after each prompt
input = ""  # data, tokenize, bpe, dedup: files or patterns; "" = docs of Python, Chinese sample
corpus_mb = 10.0  # data, tokenize, bpe: megabytes of text at most
vocab_size = 32768  # tokenize, bpe
checkpoint_dir = "out"  # checkpoint: a temporary directory is made here, on the disk to measure
mbit = 0  # ddp: rate of the link, Mbit/s each way, as root by network namespaces; 0 = loopback
cases = "compute,torch,ours,forward"  # ddp: all, or some of those in bench_ddp.py

ROWS = {
    "train": bench_model.train_row,
    "head": bench_model.head_row,
    "sft": bench_tune.sft_row,
    "dpo": bench_tune.dpo_row,
    "ddp": bench_ddp.ddp_row,
    "generate": bench_model.generate_row,
    "data": bench_text.data_row,
    "tokenize": bench_text.tokenize_row,
    "bpe": bench_text.bpe_row,
    "dedup": bench_text.dedup_row,
    "checkpoint": bench_model.checkpoint_row,
}
QUICK = {  # instead of the defaults
    "rows": ",".join(row for row in ROWS if row not in ("sft", "dpo")), "repeats": 3,
    "shapes": "10M", "compile": "none", "tokens": 1024, "batch_size": 1, "new_tokens": 32,
    "corpus_mb": 0.5, "vocab_size": 2048,
}  # fmt: skip
LISTS = {  # settings that are lists, with the values that they may have
    "optimizer": ("adamw", "muon"),
    "shapes": ("", *bench_model.SHAPES),
    "rows": ("all", *ROWS),
    "cases": ("all", *bench_ddp.CASES),
}


def attempted(row: str, options: Options) -> Iterator[Line]:
    """Yield the lines of a row; if it fails, the error as the last one."""
    options.folder.mkdir()
    try:
        for found in ROWS[row](options):
            ready = isinstance(found, Line)
            yield from [found] if ready else timing.measure(row, found, options.repeats)
    except Exception as error:
        said = str(error)
        if not isinstance(error, UserError | ImportError):
            traceback.print_exception(error)
            said = f"{type(error).__name__}: {error}"
        yield Line(row, note=f"failed: {' '.join(said.split())[:300]}", failed=True)


def main(config: dict) -> int:
    """Measure and print all rows; return the exit status."""
    if config["quick"]:
        defaults = defaults_of(Path(__file__))
        quick = {key: value for key, value in QUICK.items() if config[key] == defaults[key]}
        config = config | quick
    for key, allowed in LISTS.items():
        for value in config[key].split(","):
            known = ", ".join(filter(None, allowed))
            refuse(value not in allowed, f"{key}={value!r} is none of {known}")
    device, found = choose_device(config["device"]), []
    where = {"device": device, "dtype": choose_dtype(config["dtype"], device)}
    machine = ", ".join(dict.fromkeys(map(hardware, [choose_device("cpu"), device])))
    print(f"{machine}, load average {os.getloadavg()[0]:.1f}")
    print(", ".join(f"{name} {version}" for name, version in timing.versions().items()))
    print(timing.HEADER)
    try:
        with tempfile.TemporaryDirectory() as name:
            rows = ROWS if config["rows"] == "all" else config["rows"].split(",")
            for row in rows:
                options = Options(**config | where, folder=Path(name, row))
                for line in attempted(row, options):
                    print(timing.text(line), flush=True)
                    found.append(line)
    finally:  # also after Ctrl-C
        if config["out"]:
            timing.write_json(config["out"], found, machine, " ".join(["python", *sys.argv]))
    return int(any(line.failed for line in found))


if __name__ == "__main__":
    sys.exit(main(configure(globals())))
