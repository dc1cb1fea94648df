"""Golden losses: 100 steps of each trainer's debug run, on one and on two ranks, in float32.

python tests/golden/record.py        # record them anew, after a change that is meant to change them

losses.json holds the losses, the gradient norms and the validation losses, with the processor that
computed them: there they must come out equal to the last digit. Elsewhere the first steps' losses
and norms agree within 1e-4, reward.py's norms within 1 % (tests/test_golden.py). A redesign keeps
them; so does a faster kernel that claims the same bits. A checkpoint of step 50 of each trainer is kept too. It
resumes to the golden losses until the format is changed on purpose.

The data, and the tiny model that tuning starts from, lie beside this file: Python's documentation,
from which the debug configurations make theirs, differs between versions of Python.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
LOSSES = HERE / "losses.json"
CHECKPOINTS = (
    HERE / "checkpoints.tar.xz"
)  # step 50 of each trainer on one rank: TRAINER/step_000050
STEPS, HALF = 100, 50
DATA = {
    "pretrain": ["config/debug.py", "--data_dir=tests/golden/data"],
    "sft": ["config/debug_sft.py", "--data=tests/golden/data/chat.jsonl"],
    "dpo": ["config/debug_dpo.py", "--data=tests/golden/data/pairs.jsonl"],
    "reward": ["config/debug_reward.py", "--data=tests/golden/data/pairs.jsonl"],
    "rl": ["config/debug_rl.py", "--data=tests/golden/data/rl.jsonl"],
}
RECORDED = {"train": ("loss", "grad_norm"), "eval": ("val_loss",)}


def command(trainer: str, n_ranks: int, out_dir: Path, n_steps: int) -> list[str]:
    """Return the command of the first steps of a golden run."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n_ranks}"]
    start = [] if trainer == "pretrain" else ["--init_from=tests/golden/model"]
    flags = [f"--max_steps={STEPS}", "--log_every=1", "--eval_every=25", "--save_every=50"]
    script = [f"{trainer}.py", *DATA[trainer], *start, *flags, "--keep_last=0"]
    if n_steps < STEPS:
        script = ["tests/golden/begin.py", str(n_steps), *script]
    return [sys.executable, *(launcher if n_ranks > 1 else []), *script, f"--out_dir={out_dir}"]


def run(
    trainer: str,
    n_ranks: int,
    out_dir: Path,
    n_steps: int = STEPS,
    run: Callable = subprocess.run,
) -> list[list]:
    """Train, and return `read_losses` of the run. A relative out_dir is one of the repository."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = run(
        command(trainer, n_ranks, out_dir, n_steps),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_losses(ROOT / out_dir)


def read_losses(out_dir: Path) -> list[list]:
    """Return [event, step, values ...] of each training step and evaluation in a run's log."""
    rows = []
    for line in (out_dir / "log.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["event"] in RECORDED:
            values = [event[key] for key in RECORDED[event["event"]]]
            rows.append([event["event"], event["step"], *values])
    return rows


def machine() -> str:
    """Return what the last digits depend on: the processor, and torch with its BLAS library."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    model = re.findall(r"^(?:model name|flags)\s*: (.*)", text, re.M)[:2] or [platform.processor()]
    return f"{' '.join(model)}, torch {torch.__version__}"


def main() -> None:
    os.chdir(ROOT)
    found = {"machine": machine()}
    for trainer in DATA:
        for n_ranks in (1, 2):
            out_dir = Path("out", "golden", f"{trainer}_{n_ranks}")  # of the current directory
            subprocess.run(["rm", "-rf", str(out_dir)], check=True)
            found[f"{trainer} {n_ranks}"] = run(trainer, n_ranks, out_dir)
            print(f"{trainer} on {n_ranks} ranks: {found[f'{trainer} {n_ranks}'][-1]}", flush=True)
    write(found)
    with tarfile.open(CHECKPOINTS, "w:xz") as archive:
        for trainer in DATA:
            step = f"step_{HALF:06d}"
            archive.add(Path("out", "golden", f"{trainer}_1", step), f"{trainer}/{step}")


def write(found: dict) -> None:
    """Write losses.json, a line for each run."""
    lines = [f"{json.dumps(name)}: {json.dumps(rows)}" for name, rows in found.items()]
    LOSSES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
