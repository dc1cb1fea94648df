"""pretrain.py's validation on data of other directories, the best checkpoint, and event files."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from test_pretrain import data_dir, events, finish, mixed, refused, run, start, val_batches  # noqa: F401 - fixtures

from groundup.errors import UserError
from groundup.tokens.batches import TextCorpus
from groundup.tokens.token_files import TokenData
from groundup.tokens.token_writer import write_record

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
        assert event["val_loss"] == pytest.approx(
            0.75 * event["val_loss/even"] + 0.25 * event["val_loss/odd"]
        )
        assert event["val_loss/even"] == pytest.approx(
            alone["val_loss"], rel=0.05
        )  # fewer of its windows
    assert "| odd " in capsys.readouterr().out


# It learns the odd ids for 6 steps, then unlearns them for the even ones.
UNLEARNS = [
    "--data_dir=0: {0}/odd=1; 6: {0}/even=1",
    "--val_data={0}/odd",
    "--max_steps=20",
    "--eval_every=2",
    "--save_every=4",
    "--schedule=constant",
    "--optimizer=adamw",
]


def check_best_is_of_odd(out: Path) -> None:
    """`best` is the saved step with the lowest loss on the odd ids; the card says if another was lower."""
    of_odd = {event["step"]: event["val_loss"] for event in events(out, "eval")}
    saved = [event["step"] for event in events(out, "save")]
    best, second, *_ = sorted(saved, key=of_odd.get)
    assert saved == [4, 8, 12, 16, 20] and best < 20
    assert (out / "best").resolve().name == f"step_{best:06d}"
    assert (out / "best2").resolve().name == f"step_{second:06d}"
    assert (out / "latest").resolve().name == "step_000020"
    lowest = min(of_odd, key=of_odd.get)
    assert 0 < lowest < 20
    card = (out / "README.md").read_text(encoding="utf-8")
    assert f"| step | 0 | {best} | 20 |" in card
    said = f"at step {lowest} was lower, but has no checkpoint" in card
    assert said == (lowest != best)
    assert "Complete: step 20 of 20" in card


def test_best_checkpoint_is_that_of_the_lowest_loss(run, tmp_path, mixed):  # noqa: F811
    assert run(*[flag.format(mixed) for flag in UNLEARNS]) == 0
    check_best_is_of_odd(tmp_path / "out")


@pytest.mark.slow
def test_best_checkpoint_on_two_ranks(tmp_path, mixed):  # noqa: F811
    flags = [flag.format(mixed) for flag in UNLEARNS]
    finish(start(*flags, f"--out_dir={tmp_path / 'out'}", ranks=2))
    check_best_is_of_odd(tmp_path / "out")


def test_val_data_that_is_not_there_is_one_line(run, mixed, capsys):  # noqa: F811
    assert "no directory nowhere" in refused(
        run, capsys, f"--data_dir={mixed}", "--val_data=nowhere"
    )


def test_other_validation_of_another_tokenizer_is_refused(tmp_path, mixed):  # noqa: F811
    other = shutil.copytree(mixed, tmp_path / "other")
    manifest = json.loads((other / "manifest.json").read_text(encoding="utf-8"))
    del manifest["crc32"]
    write_record(other / "manifest.json", manifest | {"tokenizer_fingerprint": "0" * 64})
    with pytest.raises(UserError, match="prepared with another tokenizer"):
        TextCorpus(f"{mixed}/even", 32, val_data=str(other))


def test_event_files_have_what_the_log_has(run, tmp_path, data_dir):  # noqa: F811
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run("--max_steps=4", "--eval_every=2", "--save_every=2", "--track=tensorboard")
    found = EventAccumulator(str(tmp_path / "out")).Reload()
    of_log = {event["step"]: event["loss"] for event in events(tmp_path / "out", "train")}
    of_board = {point.step: point.value for point in found.Scalars("train/loss")}
    assert of_board == pytest.approx(of_log) and len(of_log) == 4
    assert [point.step for point in found.Scalars("eval/val_loss")] == [0, 2, 4]


def test_event_files_without_the_package_are_one_line(run, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install tensorboard" in refused(run, capsys, "--track=tensorboard")
