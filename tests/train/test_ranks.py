"""ranks.py without a trainer: the stop signal, and what ranks must agree on."""

import os
import signal

import pytest
import torch

from groundup.errors import Stopped, UserError
from groundup.train import ranks


@pytest.fixture
def stop_signal(monkeypatch):
    """A StopSignal whose handlers are removed after the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield ranks.StopSignal()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_before_training_a_signal_ends_the_process(stop_signal):
    with pytest.raises(Stopped) as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.args == (signal.SIGTERM,)


def test_during_training_the_first_signal_is_a_flag(stop_signal):
    stop_signal.begin()
    assert not stop_signal.received and stop_signal.exit_code == 143  # another rank received it
    os.kill(os.getpid(), signal.SIGINT)
    assert stop_signal.received == signal.SIGINT and stop_signal.exit_code == 130
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop_signal.exit_code == 130


def test_a_second_ctrl_c_counts_after_two_seconds(stop_signal, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(ranks.time, "monotonic", lambda: now[0])
    stop_signal.begin()
    for now[0] in (100.0, 101.9):  # torchrun repeats a terminal's Ctrl-C
        os.kill(os.getpid(), signal.SIGINT)
    now[0] = 102.1
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_one_process_is_a_world_of_one(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    world = ranks.init("cpu")
    assert world == ranks.World(rank=0, local_rank=0, world_size=1) and world.is_main
    assert (ranks.rank(), ranks.world_size(), ranks.own_part(3)) == (0, 1, range(3))
    assert ranks.merged({"a": 1}) == {"a": 1} and ranks.any_rank(True) and not ranks.any_rank(False)
    assert ranks.all_reduce_sum(torch.ones(2)).tolist() == [1, 1] and ranks.new_group(1) is None
    ranks.check_equal({"seed": 1})
    ranks.start_agreement("", "step 1")()
    with pytest.raises(UserError, match="rank 0, step 1: a problem"):
        ranks.start_agreement("a problem", "step 1")()
    ranks.close()


@pytest.mark.parametrize("theirs", [{"lr": 2, "seed": 2}, {"lr": 1}, {"lr": 1, "seed": 1, "x": 0}])
def test_the_first_key_that_differs_from_rank_0_is_named(theirs, monkeypatch):
    """Also where a rank lacks it, or has one more."""
    mine = {"lr": 1, "seed": 1}
    key = next(key for key in mine | theirs if mine.get(key) != theirs.get(key))
    monkeypatch.setattr(ranks, "gather_objects", lambda value: [mine, mine, theirs])
    with pytest.raises(UserError, match=f"rank 2 has {key}={theirs.get(key)}, rank 0 has {mine.get(key)}; "):
        ranks.check_equal(mine)


def test_absent_variables_of_torchrun_are_named(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    for key in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    with pytest.raises(UserError, match="LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not; start with torchrun"):
        ranks.init()
