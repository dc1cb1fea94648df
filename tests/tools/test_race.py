"""tools/race.py: seconds and losses by hand arithmetic, nanoGPT's files by its own rule, and mistakes."""

import math
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from groundup.errors import UserError

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import race  # noqa: E402

CURVE = [(2.0, 2.9), (5.0, 1.89), (8.0, 1.88), (20.0, 1.5)]


def test_the_clock_is_read_at_evaluations_and_nothing_is_interpolated():
    assert race.time_to(1.8857, CURVE) == 8.0 and race.time_to(1.4, CURVE) == math.inf
    assert [race.loss_at(limit, CURVE) for limit in (1, 5, 19.9, 99)] == [math.inf, 1.89, 1.88, 1.5]


def test_the_table_has_medians_over_seeds():
    slower = [(2 * seconds, nats + 0.1) for seconds, nats in CURVE]
    faster = [(seconds / 2, nats) for seconds, nats in CURVE]
    *_, middle = race.table({"1": slower, "2": CURVE, "3": faster}, {"1": 20.0, "2": 16.0, "3": 40.0})
    assert middle.split() == ["median", "8.0", "0.500", "20.0", "1.8800", "20.0", "1.5000"]


def test_characters_are_those_of_nanogpt(tmp_path):
    text = "Zwei boxing\nwizards: jump!" * 7
    race.characters(text, tmp_path)
    chars = sorted(list(set(text)))  # its prepare.py
    ids = [{c: i for i, c in enumerate(chars)}[c] for c in text]
    edge = int(len(text) * 0.9)
    for name, part in (("train", ids[:edge]), ("val", ids[edge:])):
        assert np.fromfile(tmp_path / f"{name}.bin", dtype=np.uint16).tolist() == part
    meta = pickle.loads((tmp_path / "meta.pkl").read_bytes())
    assert meta["vocab_size"] == len(chars) and meta["itos"][meta["stoi"]["Z"]] == "Z"


def test_lines_are_timed_as_they_arrive(tmp_path):
    slow = "import time, os; print('val 3', flush=True); time.sleep(0.2); print('val 2', len(os.sched_getaffinity(0)))"
    (first, three), (second, two) = race.timed(["-c", slow], tmp_path, r"val (\d)")
    assert (three, two) == (3.0, 2.0) and 0 < first and second - first > 0.15
    with pytest.raises(UserError, match="exit status 3\noh"):
        race.timed(["-c", "print('oh'); raise SystemExit(3)"], tmp_path, r"val (\d)")


def test_a_race_runs_what_it_says(tmp_path, monkeypatch, capsys):
    """For each seed nanoGPT, then one run."""
    text, commands = tmp_path / "input.txt", []
    text.write_text("abc" * 50, encoding="utf-8")
    (tmp_path / "nano/data/shakespeare_char").mkdir(parents=True)
    (tmp_path / "nano/train.py").touch()
    settings = {"input": str(text), "nanogpt": str(tmp_path / "nano"), "out": str(tmp_path), "vocab_size": 512}
    settings |= {"entry": "config/shakespeare.py", "flags": "--x=1", "seeds": "4,5"}
    with pytest.raises(UserError, match="is not tinyshakespeare; get it: curl -LO https://"):
        race.main(settings)
    monkeypatch.setattr(race, "SHA256", race.hashlib.sha256(text.read_bytes()).hexdigest())

    def timed(command, directory, pattern):
        commands.append(" ".join(map(str, command)))
        return [(50.0, 1.9)] if command[0] == "train.py" else [(3.0, 3.0), (9.0, 1.8857 / math.log(2)), (40.0, 2.0)]

    monkeypatch.setattr(race, "timed", timed)
    race.main(settings)
    assert all("config/train_shakespeare_char.py --device=cpu" in commands[k] for k in (1, 3)) and len(commands) == 5
    assert "--vocab_size=512" in commands[0]
    assert ["--seed=4" in commands[2], "--seed=5 " in commands[4], "--x=1" in commands[4]] == [True] * 3
    printed = capsys.readouterr().out
    assert "50.0 s, 1.9 nats, measured now" in printed
    assert printed.split("\n")[-2].split() == ["median", "9.0", "0.180", "50.0", "1.3863", "40.0", "1.3863"]
    with pytest.raises(UserError, match="has no train.py; git clone"):
        race.main(settings | {"nanogpt": str(tmp_path)})
