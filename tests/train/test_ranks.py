"""ranks.py without a trainer: the stop signal, and what ranks must agree on."""

import os
import signal
import socket
import time

import pytest
import torch

from groundup.errors import LostRank, Stopped, UserError
from groundup.train import ranks


@pytest.fixture
def stop_signal(monkeypatch):
    """A StopSignal whose handlers are removed after the test."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield ranks.StopSignal()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_before_training_a_signal_ends_the_process(stop_signal):
    with pytest.raises(Stopped) as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.args == (signal.SIGTERM,)


def test_during_training_the_first_signal_is_a_flag(stop_signal, capfd):
    stop_signal.begin()
    assert not stop_signal() and stop_signal.exit_code == 143  # another rank received it
    os.kill(os.getpid(), signal.SIGINT)
    assert stop_signal() and stop_signal.exit_code == 130
    assert "stopping after this step; Ctrl-C again" in capfd.readouterr().err


def test_a_signal_counts_when_nobody_reads_standard_error(stop_signal, monkeypatch):
    def broken(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(ranks.os, "write", broken)
    stop_signal.begin()
    os.kill(os.getpid(), signal.SIGINT)
    assert stop_signal()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop_signal.exit_code == 130


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_closed_terminal_and_a_schedulers_warning_stop_as_sigterm_does(number, stop_signal):
    stop_signal.begin()
    os.kill(os.getpid(), number)
    assert stop_signal() and stop_signal.exit_code == 128 + number


def test_what_nohup_ignores_stays_ignored_and_windows_lacks_two(stop_signal, monkeypatch):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.delattr(signal, "SIGUSR1")
    before = signal.getsignal(10)
    ranks.StopSignal()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and signal.getsignal(10) == before


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
    assert ranks.gather_objects(1) == [1] and ranks.any_rank(True) and not ranks.any_rank(False)
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
    with pytest.raises(
        UserError, match=f"rank 2 has {key}={theirs.get(key)}, rank 0 has {mine.get(key)}; "
    ):
        ranks.check_equal(mine)


def test_another_file_of_the_project_on_a_rank_is_named(monkeypatch):
    """It may change what a rank adds to the gradient, which no comparison of weights shows."""
    monkeypatch.setattr("sys.argv", ["pretrain.py"])
    code = ranks.checksums_of_code()
    assert {"pretrain.py", "model.py", "groundup/train/optim.py"} <= set(code)
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(ranks, "gather_objects", lambda mine: [mine, mine | {"pretrain.py": 1}])
    with pytest.raises(
        UserError, match="rank 1 has pretrain.py=1, rank 0 has .* the same command, code"
    ):
        ranks.check_equal({"seed": 1})


def test_files_that_editors_hide_are_no_code(tmp_path, monkeypatch):
    for name in (
        "model.py",
        "groundup/a.py",
        "groundup/.#a.py",
        "groundup/.ipynb_checkpoints/a-checkpoint.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("", encoding="utf-8")
    monkeypatch.setattr(ranks, "__file__", str(tmp_path / "groundup/train/ranks.py"))
    assert set(ranks.checksums_of_code()) == {"model.py", "groundup/a.py"}


def test_absent_variables_of_torchrun_are_named(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    for key in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    with pytest.raises(
        UserError,
        match="LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not; start with torchrun",
    ):
        ranks.init()


def test_a_world_size_that_was_left_over_is_no_world(monkeypatch):
    """Without RANK nobody else is there. A plan may be for other ranks."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert ranks.init("cpu").world_size == 1 and ranks.planned_world_size() == 8


@pytest.mark.parametrize(("key", "value", "says"), [
    ("WORLD_SIZE", "x", "WORLD_SIZE='x' in the environment is no whole number of at least 0; start with torchrun"),
    ("MASTER_PORT", "0", "MASTER_PORT='0' in the environment is no whole number from 1 to 65535"),
    ("MASTER_PORT", "99999", "MASTER_PORT='99999' in the environment is no whole number from 1 to 65535"),
    ("RANK", "\u0661", "in the environment is no whole number of at least 0"),
    ("RANK", "2", "RANK=2 must be below WORLD_SIZE=2"),
])  # fmt: skip
def test_what_torchrun_would_not_set_is_one_line(key, value, says, monkeypatch):
    usual = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    for name, text in (usual | {key: value}).items():
        monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match=says):
        ranks.init()
    monkeypatch.setenv("WORLD_SIZE", "0")
    with pytest.raises(UserError, match="at least 1"):
        ranks.planned_world_size()


def test_a_port_where_another_program_listens_is_one_line(monkeypatch):
    """It takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        usual = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        for name, text in (usual | {"MASTER_PORT": str(port)}).items():
            monkeypatch.setenv(name, text)
        begin = time.monotonic()
        with pytest.raises(
            LostRank, match="rank 1: init_process_group failed.*is not rank 0.*GLOO_SOCKET_IFNAME"
        ):
            ranks.init("cpu", timeout_s=1)
        assert time.monotonic() - begin < 5
    with pytest.raises(
        LostRank, match=f"rank 0 cannot be reached at .*127.0.0.1:{port}: "
    ):  # nobody listens
        ranks.init("cpu", timeout_s=1)


def test_gloo_takes_the_interface_that_leads_to_the_first_machine(monkeypatch):
    """/etc/hosts gives this machine's name a loopback address."""
    monkeypatch.setenv("MASTER_ADDR", "first")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is taken back in the end
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    addresses = {"first": "127.0.0.1", socket.gethostname(): "127.0.1.1"}
    monkeypatch.setattr(ranks, "address_of", addresses.get)
    monkeypatch.setattr(ranks, "interface_to", {"10.1.2.3": "eth7", "10.9.9.9": ""}.get)
    for first in ("127.0.0.1", "10.9.9.9"):
        addresses["first"] = first
        ranks.name_interface()
        assert "GLOO_SOCKET_IFNAME" not in os.environ
    addresses["first"] = "10.1.2.3"
    ranks.name_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")  # of the user
    ranks.name_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"


def test_replicas_may_differ_by_rounding_only(monkeypatch):
    """By another learning rate in one step, say, they differ by more."""
    torch.manual_seed(0)
    weights = [torch.randn(1280) * 0.02, torch.ones(256)]
    other = [[t * factor for t in weights] for factor in (1 + 1e-6, 1.01)]
    gathered = []
    monkeypatch.setattr(ranks, "gather_objects", lambda mine: gathered.append(mine) or gathered)
    monkeypatch.setattr(ranks, "world_size", lambda: 3)
    ranks.check_replicas(weights)
    ranks.check_replicas(other[0])
    with pytest.raises(
        UserError, match="weights of rank 2 differ from those of rank 0 by 1.0e-02; .* same code"
    ):
        ranks.check_replicas(other[1])
