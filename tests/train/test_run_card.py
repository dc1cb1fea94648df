"""The card of a run: figures are those of the log, the command begins the same run."""

import json
import shlex
import sys
from pathlib import Path

import forks
import numpy
import pytest
import torch

from groundup.train import run_card
from groundup.train.device import versions

ROOT = Path(__file__).parents[2]


def event(kind: str, step: int, **values: float) -> dict:
    return {"event": kind, "step": step, **values}


def test_table_holds_the_first_the_best_and_the_last_evaluation():
    losses = {0: 6.25, 10: 4.5, 20: 4.75}
    events = [event("eval", step, val_loss=loss, pairs=1200) for step, loss in losses.items()]
    rows = [line.strip("| ").split(" | ") for line in run_card.result_table(events).splitlines()]
    assert rows[2:] == [["step", "0", "10", "20"], ["val_loss", "6.25", "4.5", "4.75"], ["pairs", *["1,200"] * 3]]
    assert run_card.result_table([event("train", 1, loss=2.0)]) == "No evaluation was logged."


def test_best_is_the_lowest_loss():
    events = [event("eval", step, val_loss=3.0 + abs(step - 2)) for step in range(5)]
    header, _, steps, *_ = run_card.result_table(events).splitlines()
    assert (header, steps) == ("| | first | best | last |", "| step | 0 | 2 | 4 |")


def test_summary_says_why_a_run_ended():
    events = [event("train", 5, loss=1.0, tokens=5000)]
    assert run_card.summary(events, 9, "stopped by a signal").startswith(
        "Ended before its last step, stopped by a signal: step 5 of 9, 5,000 tokens. Written 2"
    )
    assert run_card.summary(events, 9).startswith("Ended before its last step: step 5 of 9")
    assert run_card.summary(events, 5, "no better").startswith("Complete: step 5 of 5")


def test_versions_are_those_of_what_is_installed(monkeypatch):
    monkeypatch.setattr("groundup.train.device.PACKAGES", ("numpy", "no-such-package", "pytest"))
    python = ".".join(map(str, sys.version_info[:3]))
    assert versions() == {"python": python, "numpy": numpy.__version__, "pytest": pytest.__version__}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("card") / "out"
    command = [sys.executable, ROOT / "pretrain.py", ROOT / "config/debug.py", "--max_steps=6", "--log_every=2"]
    forks.run([*command, "--eval_every=3", f"--out_dir={out}"], cwd=ROOT, check=True, capture_output=True)
    return out


def test_a_run_leaves_a_card_with_its_figures_settings_and_data(trained):
    text = (trained / "README.md").read_text(encoding="utf-8")
    events = [json.loads(line) for line in (trained / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    last = [e for e in events if e["event"] == "eval"][-1]
    assert f"| {last['val_loss']:.4g} |" in text and "Complete: step 6 of 6, 3,072 tokens" in text
    assert "max_steps = 6\n" in text and "\nseed = " not in text  # the default
    assert "debug train: 40 documents" in text and f"torch {torch.__version__.split('+')[0]}" in text


@pytest.mark.slow
def test_its_command_gives_the_same_losses(trained):
    text = (trained / "README.md").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("python pretrain.py"))
    forks.run([sys.executable, *shlex.split(line)[1:]], cwd=ROOT, check=True, capture_output=True)
    again = trained.with_name("out_again")
    losses = [
        [json.loads(row).get("loss") for row in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        for out in (trained, again)
    ]
    assert losses[0] == losses[1]


def test_a_line_that_a_full_disk_cut_short_costs_that_line_alone(tmp_path, capsys):
    whole = [event("train", 1, loss=3.0), event("eval", 2, val_loss=2.5)]
    lines = [json.dumps(whole[0]), '{"event": "tra', json.dumps(whole[1])]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    path = run_card.write(tmp_path, ROOT / "sft.py", {"max_steps": 2}, [], torch.device("cpu"), 1)
    assert "| val_loss | 2.5 | 2.5 | 2.5 |" in path.read_text(encoding="utf-8")
    path.unlink()
    path.mkdir()  # cannot be written over, by root either
    run_card.write(tmp_path, ROOT / "sft.py", {"max_steps": 2}, [], torch.device("cpu"), 1)
    assert f"card: cannot write {path}" in capsys.readouterr().out
