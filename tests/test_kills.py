"""kill -9 at a file operation of a run, then the same command: one of the kinds of run that kills.py has."""

import random
from pathlib import Path

import forks
import kills
import pytest


@pytest.mark.slow
def test_a_killed_run_continues_to_the_bit(tmp_path: Path) -> None:
    assert kills.try_kills("reward_lora", tmp_path, n_kills=1, rng=random.Random(1), run=forks.run) == []

    # the comparison sees a line that is lost, and another state
    out = tmp_path / "straight" / kills.OUT
    usual, log = kills.left(out), out / "log.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines()
    log.write_text("\n".join(lines[:3] + lines[4:]), encoding="utf-8")
    first, *_, last = sorted(out.glob("step_*"))
    (first / "rank_00000.pt").write_bytes((last / "rank_00000.pt").read_bytes())
    (first / "checksums.json").write_text("{}", encoding="utf-8")
    assert kills.differences(usual, kills.left(out)) == ["log", f"{first.name}/rank_00000.pt"]
