"""Each trainer's first 100 steps give the losses that were recorded; see golden/record.py.

Of them the first quarter is run (of rl.py, whose steps draw 64 answers, the first six), six steps
from the kept checkpoint, and six on two ranks. golden/record.py runs them all.
"""

import json
import tarfile

import forks
import pytest
from golden import record

GOLDEN = json.loads(record.LOSSES.read_text(encoding="utf-8"))


def check(found: list[list], golden: list[list]) -> None:
    """The same events, with equal values on the machine that recorded them."""
    assert [row[:2] for row in found] == [row[:2] for row in golden]
    if record.machine() == GOLDEN["machine"]:
        different = [pair for pair in zip(found, golden, strict=True) if pair[0] != pair[1]]
        assert not different, different[0]
        return
    for row, want in zip(found, golden, strict=True):
        assert row[2:] == pytest.approx(want[2:], rel=1e-4, abs=1e-4)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("trainer", record.DATA)
def test_the_losses_are_the_recorded_ones(trainer, n_ranks, tmp_path):
    """On one rank the last step comes after an evaluation."""
    n_steps = 26 if n_ranks == 1 and trainer != "rl" else 6
    found = record.run(trainer, n_ranks, tmp_path / "run", n_steps, forks.run)
    found = [row for row in found if row[1] <= n_steps]  # one more: a step is not broken off
    assert found[-1][:2] == ["train", n_steps]
    check(found, GOLDEN[f"{trainer} {n_ranks}"][: len(found)])


@pytest.mark.slow
@pytest.mark.parametrize("trainer", record.DATA)
def test_a_kept_checkpoint_resumes_to_the_recorded_losses(trainer, tmp_path):
    with tarfile.open(record.CHECKPOINTS) as archive:
        members = [one for one in archive if one.name.startswith(f"{trainer}/")]
        archive.extractall(tmp_path, members, filter="data")
    n_steps = record.HALF + 6
    found = record.run(trainer, 1, tmp_path / trainer, n_steps, forks.run)
    golden = [row for row in GOLDEN[f"{trainer} 1"] if record.HALF < row[1] <= n_steps]
    check([row for row in found if record.HALF < row[1] <= n_steps], golden)
