"""pretrain.py's validation on data of other directories, its end when nothing gets better, and event files."""

import importlib.util
import json
import shutil

import pytest
import torch
from test_pretrain import data_dir, events, mixed, refused, run  # noqa: F401 - fixtures

from data import Corpus, DataError, TokenData, val_batches

VAL = "--val_data={0}/even=3,{0}/odd=1"


def test_other_validation_is_of_the_named_splits_in_their_weights(run, tmp_path, mixed):  # noqa: F811
    corpus = Corpus(f"{mixed}/even", 32, val_data=f"{mixed}/odd=1,{mixed}/even=3")
    assert list(corpus.val) == ["odd", "even"] and corpus.val_shares() == [0.25, 0.75]
    found = corpus.val_batches(2, 0)
    expected = val_batches(TokenData(mixed, "val", "odd"), 32, 2)
    for (x, y), (x2, y2) in zip(found["odd"], expected, strict=True):
        assert torch.equal(x, x2) and torch.equal(y, y2)
    whole = Corpus(f"{mixed}/even", 32, val_data=str(mixed))
    tokens = [data.n_tokens for data in whole.val.values()]
    assert whole.val_shares() == pytest.approx([n / sum(tokens) for n in tokens])


def test_log_has_each_and_training_is_the_same(run, tmp_path, mixed, capsys):  # noqa: F811
    own = [f"--data_dir={mixed}/even", "--max_steps=4", "--eval_every=2"]
    run(*own, f"--out_dir={tmp_path / 'plain'}")
    run(*own, VAL.format(mixed), f"--out_dir={tmp_path / 'both'}")
    plain, both = tmp_path / "plain", tmp_path / "both"
    assert [e["loss"] for e in events(plain, "train")] == [e["loss"] for e in events(both, "train")]
    for alone, event in zip(events(plain, "eval"), events(both, "eval"), strict=True):
        assert event["val_loss"] == pytest.approx(0.75 * event["val_loss/even"] + 0.25 * event["val_loss/odd"])
        assert event["val_loss/even"] == pytest.approx(alone["val_loss"], rel=0.05)  # fewer of its windows
    assert "| odd " in capsys.readouterr().out


def test_training_ends_when_one_of_them_gets_no_better(run, tmp_path, mixed, capsys):  # noqa: F811
    """With a learning rate of nothing no evaluation is better than the first; two after it are enough."""
    flags = [f"--data_dir={mixed}/even", VAL.format(mixed), "--learning_rate=0", "--min_lr=0", "--weight_decay=0"]
    flags += ["--max_steps=20", "--eval_every=3", "--stop_on=odd"]
    assert run(*flags, "--stop_after=2") == 0
    out = tmp_path / "out"
    assert [event["step"] for event in events(out, "eval")] == [0, 3, 6]
    assert (out / "latest").resolve().name == "step_000006"
    assert "no better val_loss/odd in 2 evaluations" in capsys.readouterr().out
    assert run(*flags, "--stop_after=2") == 0  # again: it has ended
    assert [event["step"] for event in events(out, "train")][-1] == 6
    assert run(*flags, "--stop_after=4") == 0  # more patience: it goes on
    assert [event["step"] for event in events(out, "eval")] == [0, 3, 6, 9, 12]


def test_training_goes_on_while_it_gets_better(run, tmp_path, mixed):  # noqa: F811
    run(f"--data_dir={mixed}/even", "--max_steps=8", "--eval_every=2", "--stop_after=1")
    found = [event["val_loss"] for event in events(tmp_path / "out", "eval")]
    assert len(found) == 5 and found == sorted(found, reverse=True)


@pytest.mark.parametrize("flags, says", [
    (["--stop_on=c"], "stop_on='c' is no loss of its own in the log; it has even, odd"),
    (["--stop_after=-1"], "stop_after must be at least 0, got -1"),
    (["--val_data=nowhere"], "no directory nowhere"),
])  # fmt: skip
def test_mistakes_are_one_line(run, tmp_path, mixed, capsys, flags, says):  # noqa: F811
    assert says in refused(run, capsys, f"--data_dir={mixed}", *flags)


def test_other_validation_of_another_tokenizer_is_refused(tmp_path, mixed):  # noqa: F811
    other = shutil.copytree(mixed, tmp_path / "other")
    manifest = json.loads((other / "manifest.json").read_text(encoding="utf-8"))
    (other / "manifest.json").write_text(json.dumps(manifest | {"tokenizer_fingerprint": "0" * 64}), encoding="utf-8")
    with pytest.raises(DataError, match="prepared with another tokenizer"):
        Corpus(f"{mixed}/even", 32, val_data=str(other))


def test_event_files_have_what_the_log_has(run, tmp_path, data_dir):  # noqa: F811
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run("--max_steps=4", "--eval_every=2", "--save_every=2", "--tensorboard=True")
    found = EventAccumulator(str(tmp_path / "out")).Reload()
    of_log = {event["step"]: event["loss"] for event in events(tmp_path / "out", "train")}
    of_board = {point.step: point.value for point in found.Scalars("train/loss")}
    assert of_board == pytest.approx(of_log) and len(of_log) == 4
    assert [point.step for point in found.Scalars("eval/val_loss")] == [0, 2, 4]


def test_event_files_without_the_package_are_one_line(run, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install tensorboard" in refused(run, capsys, "--tensorboard=True")
