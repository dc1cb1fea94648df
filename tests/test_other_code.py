"""A rank whose code differs outside of the project's files: the run ends with one line at the first save.

Of the project's files the checksums are compared at the start, see train/test_ranks.py.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import forks
import pytest
from golden import record

ROOT = Path(__file__).parent.parent
SAYS = "train: the weights of rank 1 differ from those of rank 0 by "


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_with_unlike_code_end_with_one_line(tmp_path):
    out = tmp_path / "out"
    flags = [*record.DATA["pretrain"], "--max_steps=12", "--save_every=9", "--eval_steps=2", f"--out_dir={out}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = forks.run(
        [sys.executable, *launcher, __file__, *flags, "--optimizer=adamw", "--sample_prompts="], cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1 and SAYS in done.stdout, done.stdout
    assert not list(out.glob("step_*"))


if __name__ == "__main__":
    from groundup.train.optim import AdamWSegment

    sys.argv[0] = "pretrain.py"
    if os.environ["RANK"] == "1":
        init = AdamWSegment.__init__
        AdamWSegment.__init__ = lambda self, bucket, items, betas, decay: init(self, bucket, items, (0.8, 0.95), decay)
    runpy.run_path(str(ROOT / "pretrain.py"), run_name="__main__")
