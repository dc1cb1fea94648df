"""The race: tinyshakespeare on two CPU cores, beside nanoGPT. Rules and records: docs/race.md.

    python tools/race.py --input=input.txt     # make race: three seeds, seconds and losses
    python tools/race.py --input=input.txt --nanogpt=../nanoGPT   # nanoGPT's command before each

Each run is a process of its own, bound to two cores. The clock starts with it and is read when the
line of an evaluation arrives, so start-up and evaluations count. Ours is measured on all of the
validation text in bits per byte; the text is ASCII, so nats per character = ln 2 x bits per byte.
"""

import hashlib
import json
import math
import os
import pickle
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from machine import ROOT, commit, processor, run_script

from configurator import configure
from groundup.errors import UserError, refuse

# ---- config --------------------------------------------------------------------------------------
input = "input.txt"  # char-rnn's tinyshakespeare
nanogpt = ""  # checkout of karpathy/nanoGPT; "" = its figures from docs/race.md
entry = "config/shakespeare.py"  # settings of the runs
flags = ""  # more of them, separated by spaces: --eval_every=25
vocab_size = 1024  # of the tokenizer, trained on the text
seeds = "1,2,3"  # one run for each
out = "out/race"  # token files and runs; emptied run by run

SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
GOAL = 1.8857  # nats per character of nanoGPT's command (docs/measurements.md)
# Its seconds on two cores of an AMD EPYC (Zen 5). Another machine needs its own: see --nanogpt.
NANOGPT_S = 84.7
# The command of its README for a CPU
NANOGPT = """train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20
--log_interval=100 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128
--max_iters=2000 --lr_decay_iters=2000 --dropout=0.0""".split()
THEIR_LOSS = r"step \d+: .*val loss ([\d.]+)"
OUR_LOSS = r"val loss.* ([\d.]+) bits per byte"

Curve = list[tuple[float, float]]  # (seconds since the start, loss)


def timed(command: Sequence[object], directory: str | Path, pattern: str) -> Curve:
    """Run a Python script on two cores; return (seconds since its start, number) for each line of
    its output in which `pattern` finds a number. Raise UserError if it fails.
    """
    lines = run_script([sys.executable, *command], directory, n_cores=2)
    found = [(seconds, re.search(pattern, line)) for seconds, line in lines]
    curve = [(seconds, float(match[1])) for seconds, match in found if match]
    if not curve:
        raise UserError(f"race: {command[0]} prints no line with {pattern!r}")
    return curve


def characters(text: str, directory: Path) -> None:
    """Write the files of nanoGPT's data/shakespeare_char/prepare.py, which would download the
    text.
    """
    chars = sorted(set(text))
    ids = np.searchsorted(chars, list(text)).astype(np.uint16)
    # nanoGPT's split: the last tenth is for validation
    edge = int(0.9 * len(text))
    ids[:edge].tofile(directory / "train.bin")
    ids[edge:].tofile(directory / "val.bin")
    numbers = {char: i for i, char in enumerate(chars)}
    meta = {"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": numbers}
    (directory / "meta.pkl").write_bytes(pickle.dumps(meta))


def time_to(goal: float, curve: Curve) -> float:
    """Return the seconds at the first evaluation at or below `goal`, not interpolated; infinity if
    there is none.
    """
    return next((seconds for seconds, nats in curve if nats <= goal), math.inf)


def loss_at(limit: float, curve: Curve) -> float:
    """Return the loss of the last evaluation up to `limit` seconds; infinity if there is none."""
    return next((nats for seconds, nats in reversed(curve) if seconds <= limit), math.inf)


def table(found: dict[str, Curve], reference_s: dict[str, float]) -> list[str]:
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
    form = "{:8} {:12.1f} {:10.3f} {:10.1f} {:9.4f} {:8.1f} {:.4f}"
    return lines + [form.format(name, *figures) for name, figures in rows.items()]


def prepare_text(path: Path, data: Path, vocab_size: int) -> None:
    """Write the token files of the text, unless they are there."""
    if not (data / "manifest.json").exists():
        command = [ROOT / "prepare.py", f"--input={path}", f"--out_dir={data}"]
        command += [f"--vocab_size={vocab_size}", "--val_fraction=0.1"]
        _, seconds = timed(command, Path(), "prepare: ([0-9.]+) s")[-1]
        print(f"prepare.py: {seconds} s, which no run counts", flush=True)


def main(config: dict) -> None:
    path, folder, theirs = Path(config["input"]), Path(config["out"]), config["nanogpt"]
    say = partial(print, flush=True)
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        raise UserError(f"race: --input={path} is not tinyshakespeare; get it: curl -LO {URL}")
    load = os.getloadavg()[0]
    say(f"{processor() or 'unknown processor'}, two cores, load average {load:.1f}")
    if theirs:
        clone = "git clone https://github.com/karpathy/nanoGPT"
        is_there = Path(theirs, "train.py").is_file()
        refuse(not is_there, f"nanogpt={theirs!r} has no train.py; {clone}")
        characters(path.read_text(encoding="utf-8"), Path(theirs, "data/shakespeare_char"))
    else:
        say(f"nanoGPT: {NANOGPT_S} s, taken from docs/race.md: of another machine or another hour")
    data = folder / f"data_{config['vocab_size']}"
    prepare_text(path, data, config["vocab_size"])

    found, reference_s = {}, {}
    for seed in config["seeds"].split(","):
        reference_s[seed] = NANOGPT_S
        if theirs:  # before each seed: the speed of a cloud machine changes from hour to hour
            reference_s[seed], nats = timed(NANOGPT, theirs, THEIR_LOSS)[-1]
            say(f"nanoGPT: {reference_s[seed]:.1f} s, {nats} nats, measured now")
        command = [ROOT / "pretrain.py", config["entry"], f"--data_dir={data}", f"--seed={seed}"]
        command += [f"--out_dir={folder}/{seed}", "--resume=never", "--overwrite=True"]
        command += config["flags"].split()
        curve = timed(command, Path(), OUR_LOSS)
        found[seed] = [(seconds, bits * math.log(2)) for seconds, bits in curve]
        say(f"seed {seed}: " + ", ".join(f"{s:.1f} s {nats:.3f}" for s, nats in found[seed]))
    say("\n".join(table(found, reference_s)))
    report = {"machine": processor(), "commit": commit()}
    report |= {"nanogpt_s": reference_s, "curves": found}
    (folder / "race.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(configure(globals()))
