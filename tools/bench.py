"""The benchmark: every measurement beside its peer and beside what this machine allows, in one table.

    OMP_NUM_THREADS=2 python tools/bench.py --quick=True                                    # about a minute
    OMP_NUM_THREADS=2 python tools/bench.py --nanogpt=../nanoGPT --out=bench.json           # a checkout of nanoGPT
    python tools/bench.py --rows=train --compile=none,blocks                                # on a GPU: what pays there
    sudo python tools/bench.py --rows=ddp --mbit=500 --timeline=True                        # over a link of 500 Mbit/s

The sides of a row take turns after a warm-up. A line gives the median of the repeats, their spread (most - least) /
median, and the speed-up over each peer: median, least and most of the rounds. "of limit" is the share of what the
machine allows, measured in the same rounds: train, matrix products in the same dtype; ddp, the step without
communication; generate, reading weights and cache once per token; checkpoint, the bare disk. For memory it is the peak
over the printed estimate, for startup the time over the promised one. tokenize and dedup count CPU seconds, bpe counts
both; train and generate count CPU seconds on a CPU with one thread (OMP_NUM_THREADS=1).
A row that fails becomes a line with the error, the others go on, and the exit status is 1.
"""

import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import timing
from timing import Line, Options

from configurator import configure
from groundup.errors import UserError

# ---- config ---------------------------------------------------------------------------------------------------------
rows = "all"  # all, or some of train,sft,dpo,ddp,generate,tokenize,bpe,dedup,checkpoint,startup
quick = False  # small cases, nothing compiled, three repeats; without sft and dpo
out = ""  # JSON file with all samples; "" = none
repeats = 0  # of each side; 0 = 3 with quick and for slow rows, else 7
device = "auto"  # auto | cpu | cuda | mps
dtype = "auto"  # train, sft, dpo, generate: auto | float32 | bfloat16
shapes = "auto"  # train, sft, dpo, generate, checkpoint: some of tiny,10M,25M,124M,350M,1.1B
compile = "auto"  # train, dpo, generate: ours as it is and compiled: none | blocks | none,blocks
memory = "auto"  # train, sft: peak memory of a process over the printed estimate: True | False | auto = unless quick
tokens = 0  # train: tokens in a step; 0 = 1024 with quick, 4096 on a CPU, else 16384
optimizer = "adamw,muon"  # train, ours: adamw, muon or both
nanogpt = ""  # train: checkout of karpathy/nanoGPT; "" = without
data = ""  # sft, dpo: conversations or pairs; "" = made from the documentation of Python
block_size = 512  # sft, dpo: longest row
batch_size = 8  # sft, dpo: rows or pairs in a micro-batch; generate: prompts at once, beside 1
new_tokens = 128  # generate: tokens written after each prompt; 32 with quick
peers = "static"  # generate: caches of transformers: some of static,dynamic,compiled
input = ""  # tokenize, bpe, dedup: texts by name, en:books/*.txt,zh:poems/*.json; "" = docs of Python, Chinese sample
corpus_mb = 10.0  # tokenize, bpe: megabytes of each text at most; 0.5 with quick
vocab_size = 32768  # tokenize, bpe; 2048 with quick
checkpoint_dir = "out"  # checkpoint: a temporary directory is made here, on the disk to measure
ranks = 2  # ddp: processes; there should be a CPU core for each
mbit = 0  # ddp: rate of the link, Mbit/s each way; as root by network namespaces, else simulated; 0 = loopback
cases = "compute,torch,ours,forward"  # ddp: all, or some of those in bench_ddp.py
timeline = False  # ddp: draw when the buckets of one step were sent

MODULES = {
    "train": "bench_train", "sft": "bench_tune", "dpo": "bench_tune", "ddp": "bench_ddp", "generate": "bench_generate",
    "tokenize": "bench_text", "bpe": "bench_text", "dedup": "bench_text", "checkpoint": "bench_run",
    "startup": "bench_run",
}  # fmt: skip


def check(config: dict) -> list[str]:
    """Return the names of the rows to measure. Raise UserError for a value that cannot be used."""
    import bench_ddp
    import bench_text
    import bench_train

    names = [name for name in MODULES if not (config["quick"] and name in ("sft", "dpo"))]
    names = names if config["rows"] == "all" else config["rows"].split(",")
    for key, allowed in {
        "optimizer": ("adamw", "muon"), "compile": ("auto", "none", "blocks"), "memory": ("auto", "True", "False"),
        "shapes": ("auto", *bench_train.SHAPES), "dtype": ("auto", "float32", "bfloat16"), "rows": ("all", *MODULES),
        "peers": ("static", "dynamic", "compiled"), "cases": ("all", *bench_ddp.CASES),
    }.items():  # fmt: skip
        for value in config[key].split(","):
            if value not in allowed:
                raise UserError(f"config: {key}={value!r} is none of {', '.join(allowed)}")
    for key, least in {"repeats": 0, "tokens": 0, "mbit": 0, "batch_size": 1, "block_size": 16, "ranks": 2}.items():
        if config[key] < least:
            raise UserError(f"config: {key}={config[key]} must be at least {least}")
    if config["nanogpt"] and not Path(config["nanogpt"], "model.py").exists():
        raise UserError(f"config: nanogpt={config['nanogpt']!r} holds no model.py; give a checkout of karpathy/nanoGPT")
    bench_text.corpora(config["input"])
    return names


def attempted(row: str, options: Options) -> Iterator[Line]:
    """Yield the lines of a row; if it fails, the error as the last one."""
    options.folder.mkdir(exist_ok=True)
    try:
        yield from getattr(importlib.import_module(MODULES[row]), f"{row}_row")(options)
    except Exception as error:
        yield timing.failure(row, "", "", error)


def main(config: dict) -> int:
    """Measure and print all rows; return the exit status."""
    from groundup.train.device import choose_device, choose_dtype, hardware

    chosen, found = check(config), []
    where = choose_device(config["device"])
    dtype = choose_dtype(config["dtype"], where)
    machine = ", ".join(dict.fromkeys(map(hardware, [choose_device("cpu"), where])))
    print(f"{machine}, load average {os.getloadavg()[0]:.1f}")
    print(", ".join(f"{name} {version}" for name, version in timing.versions().items()))
    print(timing.HEADER)
    n = config["repeats"] or (3 if config["quick"] else 7)
    try:
        with tempfile.TemporaryDirectory() as name:
            for row in chosen:
                for line in attempted(row, Options(config, where, dtype, Path(name, row), n)):
                    print(timing.text(line), flush=True)
                    found.append(line)
    finally:  # also after Ctrl-C
        if config["out"]:
            timing.write_json(config["out"], found, machine, " ".join(["python", *sys.argv]))
    return int(any(line.failed for line in found))


if __name__ == "__main__":
    sys.exit(main(configure(globals())))
