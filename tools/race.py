"""The race: tinyshakespeare on two CPU cores, beside nanoGPT. Rules and records: docs/race.md.

    python tools/race.py --input=input.txt                             # make race: three seeds, seconds and losses
    python tools/race.py --input=input.txt --nanogpt=../nanoGPT        # nanoGPT's command before each, on these cores

Each run is a process of its own, bound to two cores; the clock starts with it and is read when the
line of an evaluation arrives, so start-up and evaluations count. Ours is measured on all of the
validation text in bits per byte; the text is ASCII, so nats per character = ln 2 x bits per byte.
"""

import hashlib
import json
import math
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import curves

from configurator import configure
from groundup.errors import UserError

# ---- config --------------------------------------------------------------------------------------
input = "input.txt"  # char-rnn's tinyshakespeare
nanogpt = ""  # checkout of karpathy/nanoGPT; "" = its figures from docs/race.md
entry = "config/shakespeare.py"  # settings of the runs
flags = ""  # more of them, separated by spaces: --eval_every=25
vocab_size = 1024  # of the tokenizer, trained on the text
seeds = "1,2,3"  # one run for each
out = "out/race"  # token files and runs; emptied run by run

ROOT = Path(__file__).parent.parent
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
GOAL = 1.8857  # nats per character of nanoGPT's command (docs/measurements.md)
NANOGPT_S = 84.7  # its seconds on two cores of an AMD EPYC (Zen 5); another machine needs its own, see --nanogpt
NANOGPT = (  # the command of its README for a CPU
    "train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=100 "
    "--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 "
    "--dropout=0.0"
)
THEIR_LOSS = r"step \d+: .*val loss ([\d.]+)"


def timed(command: Sequence[object], directory: Path, pattern: str) -> list[tuple[float, float]]:
    """Run a command on two cores; return (seconds since its start, number) for each line of its
    output that `pattern` finds the number in. Raise UserError if it fails.
    """
    cores = sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else []
    bind = (lambda: os.sched_setaffinity(0, cores)) if cores else None
    found, lines, begin = [], [], time.perf_counter()
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        preexec_fn=bind,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )
    for line in process.stdout:
        lines.append(line)
        if match := re.search(pattern, line):
            found.append((time.perf_counter() - begin, float(match[1])))
    if process.wait() or not found:
        raise UserError(
            f"race: {' '.join(map(str, command))} ended with {process.returncode}: {''.join(lines[-3:])}"
        )
    return found


def characters(text: str, directory: Path) -> None:
    """Write what nanoGPT's data/shakespeare_char/prepare.py writes, which would download the
    text.
    """
    chars = sorted(set(text))
    ids = np.array([chars.index(c) for c in chars], dtype=np.uint16)[
        np.searchsorted(chars, list(text))
    ]
    edge = int(0.9 * len(text))
    ids[:edge].tofile(directory / "train.bin")
    ids[edge:].tofile(directory / "val.bin")
    meta = {
        "vocab_size": len(chars),
        "itos": dict(enumerate(chars)),
        "stoi": {c: i for i, c in enumerate(chars)},
    }
    (directory / "meta.pkl").write_bytes(pickle.dumps(meta))


def time_to(goal: float, curve: Sequence[tuple[float, float]]) -> float:
    """Return the seconds at the first evaluation at or below `goal`, not interpolated; infinity if
    there is none.
    """
    return next((seconds for seconds, nats in curve if nats <= goal), math.inf)


def loss_at(limit: float, curve: Sequence[tuple[float, float]]) -> float:
    """Return the loss of the last evaluation up to `limit` seconds; infinity if there is none."""
    return next((nats for seconds, nats in reversed(curve) if seconds <= limit), math.inf)


def table(found: dict[str, list[tuple[float, float]]], reference_s: dict[str, float]) -> list[str]:
    """Return a line for each seed and one of the medians. reference_s: nanoGPT's seconds, of each
    seed's round.
    """
    rows = {}
    for seed, curve in found.items():
        seconds, limit = time_to(GOAL, curve), reference_s[seed]
        rows[seed] = seconds, seconds / limit, limit, loss_at(limit, curve), *curve[-1]
    rows["median"] = tuple(map(median, zip(*rows.values(), strict=True)))
    head = "seed", f"s to {GOAL}", "of nanoGPT", "nanoGPT, s", "nats then", "end, s", "nats"
    lines = ["{:8} {:>12} {:>10} {:>10} {:>9} {:>8} {}".format(*head)]
    for name, (seconds, part, limit, nats, end_s, end) in rows.items():
        lines.append(
            f"{name:8} {seconds:12.1f} {part:10.3f} {limit:10.1f} {nats:9.4f} {end_s:8.1f} {end:.4f}"
        )
    return lines


def main(config: dict) -> None:
    path, folder = Path(config["input"]), Path(config["out"])
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        raise UserError(
            f"race: --input={config['input']} is not tinyshakespeare; get it: curl -LO {URL}"
        )
    print(
        f"{curves.processor() or 'unknown processor'}, two cores, load average {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    if theirs := config["nanogpt"]:
        if not Path(theirs, "train.py").is_file():
            raise UserError(
                f"race: --nanogpt={theirs} has no train.py; git clone https://github.com/karpathy/nanoGPT"
            )
        characters(path.read_text(encoding="utf-8"), Path(theirs, "data/shakespeare_char"))
    else:
        print(
            f"nanoGPT: {NANOGPT_S} s, taken from docs/race.md: of another machine or another hour",
            flush=True,
        )
    data, found, reference_s = folder / f"data_{config['vocab_size']}", {}, {}
    if not (data / "manifest.json").exists():
        split = [f"--vocab_size={config['vocab_size']}", "--val_fraction=0.1"]
        command = [
            sys.executable,
            ROOT / "prepare.py",
            f"--input={path}",
            f"--out_dir={data}",
            *split,
        ]
        print(
            f"prepare.py: {timed(command, Path(), 'prepare: ([0-9.]+) s')[-1][1]} s, which no run counts",
            flush=True,
        )
    for seed in config["seeds"].split(","):
        reference_s[seed] = NANOGPT_S
        if theirs:  # before each seed: a machine in a cloud has its moods
            reference_s[seed], nats = timed(
                [sys.executable, *NANOGPT.split()], Path(theirs), THEIR_LOSS
            )[-1]
            print(f"nanoGPT: {reference_s[seed]:.1f} s, {nats} nats, measured now", flush=True)
        own = [f"--data_dir={data}", f"--out_dir={folder}/{seed}", f"--seed={seed}"]
        own += ["--resume=never", "--overwrite=True", *config["flags"].split()]
        command = [sys.executable, ROOT / "pretrain.py", config["entry"], *own]
        curve = timed(command, Path(), r"val loss.* ([\d.]+) bits per byte")
        found[seed] = [(seconds, bits * math.log(2)) for seconds, bits in curve]
        print(
            f"seed {seed}: " + ", ".join(f"{s:.1f} s {nats:.3f}" for s, nats in found[seed]),
            flush=True,
        )
    print("\n".join(table(found, reference_s)))
    report = {
        "machine": curves.processor(),
        "commit": curves.commit(),
        "nanogpt_s": reference_s,
        "curves": found,
    }
    (folder / "race.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(configure(globals()))
