"""Each trainer's first 100 steps give the losses that were recorded; see golden/record.py.

Of them a few at the start and behind the kept checkpoint are run: enough for the update of a bit to
reach every weight. golden/record.py runs them all.
"""

import json
import tarfile

import forks
import pytest
from golden import record

GOLDEN = json.loads(record.LOSSES.read_text(encoding="utf-8"))
# A step of rl.py draws 64 answers.
N_STEPS = {
    (trainer, n): 3 if trainer == "rl" else 12 // n for trainer in record.DATA for n in (1, 2)
}


def check(found: list[list], golden: list[list], trainer: str) -> None:
    """The same events, with equal values on the machine that recorded them."""
    assert [row[:2] for row in found] == [row[:2] for row in golden]
    if record.machine() == GOLDEN["machine"]:
        different = [pair for pair in zip(found, golden, strict=True) if pair[0] != pair[1]]
        assert not different, different[0]
        return
    # With reward.py's high learning rate other rounding moves a norm by 0.4 % within 12 steps.
    of_norms = 1e-2 if trainer == "reward" else 1e-4
    for row, want in zip(found, golden, strict=True):
        assert row[2] == pytest.approx(want[2], rel=1e-4, abs=1e-4)
        assert row[3:] == pytest.approx(want[3:], rel=of_norms, abs=1e-4)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("trainer", record.DATA)
def test_the_losses_are_the_recorded_ones(trainer, n_ranks, tmp_path):
    n_steps = N_STEPS[trainer, n_ranks]
    found = record.run(trainer, n_ranks, tmp_path / "run", n_steps, forks.run)
    found = [row for row in found if row[1] <= n_steps]  # one more: a step is not broken off
    assert found[-1][:2] == ["train", n_steps]
    check(found, GOLDEN[f"{trainer} {n_ranks}"][: len(found)], trainer)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", record.DATA)
def test_a_kept_checkpoint_resumes_to_the_recorded_losses(trainer, tmp_path):
    with tarfile.open(record.CHECKPOINTS) as archive:
        members = [one for one in archive if one.name.startswith(f"{trainer}/")]
        archive.extractall(tmp_path, members, filter="data")
    n_steps = record.HALF + N_STEPS[trainer, 2]
    found = record.run(trainer, 1, tmp_path / trainer, n_steps, forks.run)
    golden = GOLDEN[f"{trainer} 1"]
    made_up_for = ["eval", record.HALF]
    first = [row[:2] for row in golden].index(made_up_for)
    check(found, golden[first : first + len(found)], trainer)
    assert len(found) > N_STEPS[trainer, 2]
