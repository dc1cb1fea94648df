"""pretrain.py's validation on data of other directories, its end when nothing gets better, and event files."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from test_pretrain import data_dir, events, finish, mixed, refused, run, start  # noqa: F401 - fixtures

from groundup.errors import UserError
from groundup.tokens.batches import TextCorpus, val_batches
from groundup.tokens.token_files import TokenData
from groundup.train import checkpoint
from groundup.train.log import RunLog

VAL = "--val_data={0}/even=3,{0}/odd=1"


def test_other_validation_is_of_the_named_splits_in_their_weights(run, tmp_path, mixed):  # noqa: F811
    corpus = TextCorpus(f"{mixed}/even", 32, val_data=f"{mixed}/odd=1,{mixed}/even=3")
    assert list(corpus.val) == ["odd", "even"] and corpus.val_shares() == [0.25, 0.75]
    found = corpus.val_batches(2, 0)
    expected = val_batches(TokenData(mixed, "val", "odd"), 32, 2)
    for (x, y), (x2, y2) in zip(found["odd"], expected, strict=True):
        assert torch.equal(x, x2) and torch.equal(y, y2)
    whole = TextCorpus(f"{mixed}/even", 32, val_data=str(mixed))
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


def test_training_ends_when_nothing_gets_better(run, tmp_path, mixed, capsys):  # noqa: F811
    """With a learning rate of nothing no evaluation is better than the first; two after it are enough."""
    flags = [f"--data_dir={mixed}/even", "--learning_rate=0", "--min_lr=0", "--weight_decay=0"]
    flags += ["--max_steps=20", "--eval_every=3"]
    assert run(*flags, "--stop_after=2") == 0
    out = tmp_path / "out"
    assert [event["step"] for event in events(out, "eval")] == [0, 3, 6]
    assert (out / "latest").resolve().name == "step_000006"
    assert "no better val_loss in 2 evaluations" in capsys.readouterr().out
    assert run(*flags, "--stop_after=2") == 0  # again: it has ended
    assert [event["step"] for event in events(out, "train")][-1] == 6
    assert run(*flags, "--stop_after=4") == 0  # more patience: it goes on
    assert [event["step"] for event in events(out, "eval")] == [0, 3, 6, 9, 12]


def test_training_goes_on_while_it_gets_better(run, tmp_path, mixed):  # noqa: F811
    run(f"--data_dir={mixed}/even", "--max_steps=8", "--eval_every=2", "--stop_after=1")
    found = [event["val_loss"] for event in events(tmp_path / "out", "eval")]
    assert len(found) == 5 and found == sorted(found, reverse=True)


# Learns the odd ids, then unlearns them for the even ones.
UNLEARNS = ["--data_dir=0: {0}/odd=1; 6: {0}/even=1", "--val_data={0}/odd", "--max_steps=40", "--eval_every=2"]
UNLEARNS += ["--schedule=constant", "--optimizer=adamw"]


def check_best_is_of_odd(out: Path) -> None:
    """`best` is the step with the lowest loss on the odd ids, and the card's."""
    by_loss = {event["val_loss"]: event for event in events(out, "eval") if event["step"] > 0}
    best, last = by_loss[min(by_loss)], events(out, "eval")[-1]
    assert 0 < best["step"] < last["step"] < 40
    assert (out / "best").resolve().name == f"step_{best['step']:06d}"
    assert checkpoint.read_loss(out / "best") == best["val_loss"]
    assert [e["step"] for e in events(out, "save")][-1] == last["step"]
    card = (out / "README.md").read_text(encoding="utf-8")
    assert f"| step | 0 | {best['step']} | {last['step']} |" in card
    assert "Ended before its last step, no better val_loss in 3 evaluations: step " in card


def test_best_checkpoint_is_that_of_the_lowest_loss(run, tmp_path, mixed):  # noqa: F811
    flags = [flag.format(mixed) for flag in UNLEARNS]
    assert run(*flags, "--stop_after=3") == 0
    check_best_is_of_odd(tmp_path / "out")
    again = [*flags, f"--out_dir={tmp_path / 'again'}", "--save_every=4"]  # ranked by it also if it never stops
    run(*again)
    of_odd = {event["step"]: event["val_loss"] for event in events(tmp_path / "again", "eval")}
    best = min((step for step in of_odd if step and step % 4 == 0), key=of_odd.get)
    assert (tmp_path / "again/best").resolve().name == f"step_{best:06d}"


@pytest.mark.slow
def test_best_checkpoint_on_two_ranks(tmp_path, mixed):  # noqa: F811
    flags = [flag.format(mixed) for flag in [*UNLEARNS, "--stop_after=3"]]
    finish(start(*flags, f"--out_dir={tmp_path / 'out'}", ranks=2))
    check_best_is_of_odd(tmp_path / "out")


def test_evaluations_that_are_not_finite_are_not_better(tmp_path):
    log = RunLog(str(tmp_path), 9, 0, enabled=True)
    for step, loss in enumerate([float("nan"), 2.0, 3.0, float("nan")]):
        log.write("eval", step, {"val_loss": loss})
        assert log.since_best() == [0, 0, 1, 2][step]
    log.close()


@pytest.mark.parametrize("flags, says", [
    (["--stop_after=-1"], "stop_after must be at least 0, got -1"),
    (["--val_data=nowhere"], "no directory nowhere"),
])  # fmt: skip
def test_mistakes_are_one_line(run, tmp_path, mixed, capsys, flags, says):  # noqa: F811
    assert says in refused(run, capsys, f"--data_dir={mixed}", *flags)


def test_other_validation_of_another_tokenizer_is_refused(tmp_path, mixed):  # noqa: F811
    other = shutil.copytree(mixed, tmp_path / "other")
    manifest = json.loads((other / "manifest.json").read_text(encoding="utf-8"))
    (other / "manifest.json").write_text(json.dumps(manifest | {"tokenizer_fingerprint": "0" * 64}), encoding="utf-8")
    with pytest.raises(UserError, match="prepared with another tokenizer"):
        TextCorpus(f"{mixed}/even", 32, val_data=str(other))


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
