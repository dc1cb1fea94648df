"""Many runs of one trainer in one start of several ranks.

A start of torchrun takes seconds and a run of eight steps takes half of one, so most runs share a start: this file,
started by torchrun as a script, executes the trainer once per job. Rank R writes its process id to FILE_OF_JOBS.R.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import forks
import torch._dynamo

import ddp
from groundup.train.log import RunLog

ROOT = Path(__file__).parent.parent
STOP = 3  # a signal stops the runs that are to be interrupted after this step, where no save is due
Jobs = list[tuple[list[str], bool]]  # flags, and whether it is to be interrupted


def run_on_ranks(n: int, script: str, jobs: Jobs, folder: Path) -> None:
    """Run the jobs one after another on n ranks. The folder gets a file."""
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"]
    done = forks.run(
        [*launcher, __file__, script, str(folder / "jobs.json")], cwd=ROOT, text=True, timeout=400,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def run_jobs(script: str, jobs: Jobs) -> None:
    """On each rank: the script with the flags of each job; one that is to stop gets SIGTERM on the last rank."""
    stops, paused = False, RunLog.paused

    @contextmanager
    def then_stop(log: RunLog) -> Iterator[None]:
        with paused(log):  # the end of a step, with its evaluation
            yield
        if stops and log.step == STOP - 1 and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            os.kill(os.getpid(), signal.SIGTERM)

    RunLog.paused = then_stop
    # One graph for training and one for evaluation serve all blocks and runs.
    torch._dynamo.config.recompile_limit = 2
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    ddp.MIB = 10_000  # bytes: each block of a tiny model is a bucket of its own
    for flags, stops in jobs:  # noqa: B007 (then_stop reads `stops`)
        sys.argv = [script, *flags]
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as end:
            assert end.code == (128 + signal.SIGTERM if stops else 0), (flags, end.code)


def drop_labels_of_rank_1() -> None:
    """In the run "no labels" of sft.py rank 1 has none."""
    from groundup.tokens.conversations import Batch, ChatCorpus

    load = ChatCorpus.load

    def load_some(corpus: ChatCorpus, sources: list[int], starts: list[int]) -> Batch:
        batch = load(corpus, sources, starts)
        if os.environ["RANK"] == "0" or not any(flag.endswith("no labels") for flag in sys.argv):
            return batch
        labels = ("index", "targets")
        return batch._replace(**{name: getattr(batch, name)[:0] for name in labels})

    ChatCorpus.load = load_some


def read_calls(tokenizer, ids: list[int]) -> tuple[str, list[dict]]:
    """Take half of what a random model writes for a call."""
    return tokenizer.decode(ids), [{"name": "double", "arguments": {"n": len(ids)}}] * (sum(ids) % 2)


def let_random_models_call() -> None:
    from groundup.align import rollouts
    from groundup.generate import tools

    tools.read_calls = rollouts.read_calls = read_calls


if __name__ == "__main__":
    Path(f"{sys.argv[2]}.{os.environ['RANK']}").write_text(str(os.getpid()), encoding="utf-8")
    drop_labels_of_rank_1()
    let_random_models_call()
    run_jobs(sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
