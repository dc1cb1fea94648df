"""The log of a run and its card: what is printed, written, dropped and read again."""

import json
import math
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import forks
import numpy
import pytest
import torch

from groundup.errors import UserError
from groundup.train import log as logs
from groundup.train.device import versions
from groundup.train.log import RunLog, read_events
from groundup.train.ranks import World

ROOT = Path(__file__).parents[2]


def corpus(*lines: str, few_val: bool = False) -> SimpleNamespace:
    """What the end of a run asks of its corpus."""
    return SimpleNamespace(report=lambda: list(lines), few_val=few_val)


def event(kind: str, step: int, **values: float) -> dict:
    return {"event": kind, "step": step, **values}


# ---- the log -------------------------------------------------------------------------------------


VALUES = {
    "loss": 3.21874,
    "tokens": 600,
    "lr": 5.4e-4,
    "grad_norm": 0.83,
    "skipped": 0,
    "epoch": 0.5,
}


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time, to be set."""
    clock = [100.0]
    monkeypatch.setattr(logs.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(logs, "peak_memory_gib", lambda device: 3.1)
    return clock


def steps(log: RunLog, n: int) -> None:
    for _ in range(n):
        log.advance()


def test_line_and_event_of_training(tmp_path, capsys, now):
    log = RunLog(str(tmp_path), 2000, 1195, World(0, 0, 2), flops_per_token=1e6, peak_flops=5e6)
    log.restart_clock()
    steps(log, 5)
    now[0] += 2.0
    with log.paused():
        now[0] += 100.0
    assert log.steps_since_line() == 5 and log.seconds() == 2.0
    log.train(1200, VALUES | {"accuracy": 0.0, "tokens/zh": 7}, n_tokens=4.0)
    log.close()
    printed = capsys.readouterr().out
    assert printed == (
        "step   1200/2000 | loss 3.2187 | lr 5.40e-04 | norm 0.83 | 400 ms | 2 tok/s | mfu 20.0%"
        " | 3.1 GiB | eta 0:05:20 | epoch 0.5 | accuracy 0\n"
    )
    (event,) = read_events(tmp_path / "log.jsonl")
    assert list(event) == [
        "event", "step", "loss", "tokens", "lr", "grad_norm", "skipped", "epoch", "accuracy", "tokens/zh",
        "tokens_per_s", "mfu", "memory_gib", "step_ms",
    ]  # fmt: skip
    assert (event["tokens_per_s"], event["mfu"], event["step_ms"]) == (2.0, 0.2, 400.0)


def test_a_tensor_of_one_number_is_logged(tmp_path):
    log = RunLog(str(tmp_path), 9, 0)
    log.write("train", 1, {"loss": 1.5, "weight_norm": torch.tensor(2.5), "lost": torch.tensor(float("nan"))})
    line = json.loads((tmp_path / "log.jsonl").read_text("utf-8").splitlines()[-1])
    assert line == {"event": "train", "step": 1, "loss": 1.5, "weight_norm": 2.5, "lost": None}


def test_each_line_has_its_own_time(tmp_path, now):
    log = RunLog(str(tmp_path), 9, 0)
    log.restart_clock()
    for seconds in (2.0, 3.0):
        steps(log, 1)
        now[0] += seconds
        log.train(log.step, VALUES, n_tokens=6)
    log.close()
    assert [event["tokens_per_s"] for event in read_events(tmp_path / "log.jsonl")] == [3.0, 2.0]


def test_a_slow_first_step_is_a_line_of_its_own(tmp_path, capsys, now):
    for seconds, said in ((9.0, ""), (57.4, "step      4/10 | the first step took 57 s\n")):
        log = RunLog(str(tmp_path), max_steps=10, steps_done=3)
        now[0] += seconds
        steps(log, 2)
        log.close()
        assert capsys.readouterr().out == said


def test_other_ranks_keep_the_clock_and_write_nothing(tmp_path, capsys, now):
    log = RunLog(str(tmp_path / "none"), 9, 0, World(1, 1, 2))
    steps(log, 2)
    now[0] += 1.0
    assert (log.steps_since_line(), log.seconds(), log.lacks_evaluation(1), log.val_losses()) == (
        2,
        1.0,
        False,
        {},
    )
    log.train(2, VALUES, n_tokens=6)
    log.report(2, {"val_loss": 1.0}, "val loss")
    log.finish("sft.py", {}, corpus(), stopped=False, saved=True)
    assert not (tmp_path / "none").exists() and capsys.readouterr().out == ""


def test_losses_of_evaluations_are_known_also_after_a_resume(tmp_path):
    log = RunLog(str(tmp_path), 9, 0)
    for step, loss in enumerate([4.0, float("nan"), 3.0, 5.0]):
        log.report(step, {"val_loss": loss}, "")
    assert log.val_losses() == {0: 4.0, 2: 3.0, 3: 5.0}
    log.close()
    again = RunLog(str(tmp_path), 9, 2)
    assert again.val_losses() == {0: 4.0, 2: 3.0}
    again.close()


@pytest.mark.parametrize(
    ("key", "other"), [("val_data", True), ("loss", True), ("beta", True), ("learning_rate", False)]
)
def test_evaluations_of_another_measure_are_not_compared(tmp_path, capsys, key, other):
    """A run that goes on with other validation data, or with another loss of dpo.py."""
    log = RunLog(str(tmp_path), 9, 0)
    for step, loss in enumerate([0.7, 0.6, 0.5]):
        log.report(step, {"val_loss": loss}, "")
    log.close()
    again = RunLog(str(tmp_path), 9, 2)
    again.note_changes({"changed": {key: ["a", "b"]}})
    assert again.lacks_evaluation(1) == other  # the step that it goes on from is measured anew
    assert ("among the evaluations from step 2 on" in capsys.readouterr().out) == other
    assert again.val_losses() == {0: 0.7, 1: 0.6, 2: 0.5}  # until then there is nothing better to go by
    if other:
        again.report(2, {"val_loss": 25.0}, "")
    again.report(3, {"val_loss": 24.0}, "")
    expected = {0: math.inf, 1: math.inf, 2: 25.0, 3: 24.0} if other else {0: 0.7, 1: 0.6, 2: 0.5, 3: 24.0}
    assert again.val_losses() == expected
    again.close()
    third = RunLog(str(tmp_path), 9, 3)  # and so in every later start
    third.note_changes({"changed": {}})
    assert third.val_losses() == expected and not third.lacks_evaluation(1)
    third.close()
    steps = logs.result_table(read_events(third.path), saved=3 if other else 2).splitlines()[2]
    assert steps == ("| step | 2 | 3 | 3 |" if other else "| step | 0 | 2 | 3 |")


def test_an_evaluation_is_missing_until_it_is_logged(tmp_path):
    log = RunLog(str(tmp_path), 7, 0)
    missing = []
    for step in range(8):
        missing.append(log.lacks_evaluation(4))
        if step == 4:
            log.report(4, {"val_loss": float("nan")}, "")
            assert not log.lacks_evaluation(4)
        log.advance()
    log.close()
    assert [step for step, lacks in enumerate(missing) if lacks] == [0, 4, 7]
    new = RunLog(str(tmp_path), 7, 0)  # a new run in the same place keeps no event
    assert read_events(new.path) == []
    new.close()


@pytest.mark.parametrize("val_loss", ["low", [1], {"a": 1}, "1.5"])
def test_a_loss_that_is_no_number_is_a_damaged_line(tmp_path, val_loss):
    lines = [json.dumps(event("eval", 1, val_loss=loss)) for loss in (val_loss, None, 2.5)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    log = RunLog(str(tmp_path), 9, 2)
    assert log.val_losses() == {1: 2.5}
    log.close()


def test_a_resumed_run_drops_later_events_and_leaves_damaged_lines(tmp_path):
    lines = [json.dumps(event("train", step, loss=1.0)).encode() for step in (1, 2, 3)]
    lines[1] = lines[1].replace(b'"event"', b'"e\xf6ent"')
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\n".join(lines) + b'\n{"event": "tr')  # the last one cut short by a kill
    log = RunLog(str(tmp_path), 9, 2)
    log.write("train", 3, {"loss": 0.5})
    log.close()
    kept = path.read_bytes().splitlines()
    assert kept[:2] == lines[:2] and len(kept) == 3  # and the line of now
    assert [event["loss"] for event in read_events(path)] == [1.0, 0.5]


def saved_run(tmp_path: Path) -> Path:
    """The log of a run of 8 steps that saved after 4 and 8, with its step directories."""
    log = RunLog(str(tmp_path), 12, 0)
    for step in range(1, 9):
        log.write("train", step, {"loss": 1.5})
        if step % 4 == 0:
            log.write("save", step, {"path": f"step_{step:06d}"})
            (tmp_path / f"step_{step:06d}").mkdir()
    log.close()
    return log.path


@pytest.mark.parametrize("resumed_from", [8, 4])
def test_a_resume_says_nothing_of_a_log_that_is_whole(tmp_path, capsys, resumed_from):
    path = saved_run(tmp_path)
    for _ in range(3):
        RunLog(str(tmp_path), 12, resumed_from).close()
    assert capsys.readouterr().out == "" and len(read_events(path)) == 5 * resumed_from // 4


CUTS = {
    "emptied": (
        lambda raw: b"",
        "lacks the save of step 8: cut, or the run was killed there; its last step is none",
    ),
    "cut": (lambda raw: raw[:200], "lacks the save of step 8"),
    "cut in the middle": (lambda raw: raw[:100] + raw[300:], "the lines up to"),
    "a digit": (
        lambda raw: raw.replace(b"1.5", b"1.4", 1),
        "the lines up to the save of step 8 have changed",
    ),
}


@pytest.mark.parametrize("damage", CUTS)
def test_a_resume_says_that_a_log_was_changed(tmp_path, capsys, damage):
    path = saved_run(tmp_path)
    change, words = CUTS[damage]
    path.write_bytes(change(path.read_bytes()))
    RunLog(str(tmp_path), 12, 8).close()
    assert words in capsys.readouterr().out
    assert read_events(path)[-1]["event"] == "save" and read_events(path)[-1]["step"] == 8


def test_a_save_whose_line_a_kill_prevented_is_logged_at_the_resume(tmp_path, capsys):
    path = saved_run(tmp_path)
    before = read_events(path)
    path.write_bytes(path.read_bytes().rpartition(b'{"event": "save"')[0])
    RunLog(str(tmp_path), 12, 8).close()
    assert "lacks the save of step 8" in capsys.readouterr().out
    assert [(e["event"], e["step"]) for e in read_events(path)] == [
        (e["event"], e["step"]) for e in before
    ]
    RunLog(str(tmp_path), 12, 8).close()
    assert capsys.readouterr().out == ""


def test_two_threads_write_whole_lines(tmp_path):
    log = RunLog(str(tmp_path), 9, 0)

    def write(kind: str) -> None:
        for step in range(150):
            log.write(kind, step, {"path": "x" * 3000})

    writers = [threading.Thread(target=write, args=(kind,)) for kind in ("save", "note")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    log.close()
    assert len(read_events(log.path)) == 300


def test_a_full_disk_is_reported_and_the_run_goes_on(tmp_path, capsys):
    log = RunLog(str(tmp_path), 9, 0)
    log.file.close()
    log.file = open("/dev/full", "w", encoding="utf-8")
    log.write("save", 1, {})
    assert "log.jsonl: No space left on device" in capsys.readouterr().out


def test_what_a_run_says_at_its_end(tmp_path, capsys):
    out, script = tmp_path / "out", str(ROOT / "sft.py")
    out.mkdir()
    config = {"max_steps": 1, "resume": "auto", "resume_from": 0}

    def end(config: dict, stopped: bool = False, saved: bool = True, skipped: int = 0) -> str:
        log = RunLog(str(out), 1, 0)
        log.advance()
        if skipped:
            log.train(1, {"loss": 1.0, "lr": 1.0, "grad_norm": math.nan, "skipped": skipped}, 1)
        log.finish(script, config, corpus("the data"), stopped, saved, "python serve.py")
        return capsys.readouterr().out

    saved_in = f"saved in {out} (summary: {out}/README.md)"
    assert end(config) == f"{saved_in}; next: python serve.py --init_from={out}\n"
    assert "the data" in (out / "README.md").read_text(encoding="utf-8")
    assert end(config, saved=False) == ""
    skipped = end(config, skipped=2).splitlines()[-2]
    assert skipped.startswith("2 of 1 updates were skipped: their gradients were not finite")
    assert (
        end(config, stopped=True)
        == "stopped by a signal after step 1; the same command continues\n"
    )
    text = (out / "README.md").read_text(encoding="utf-8")
    assert "Ended before its last step: step 0 of 1" in text
    assert "last save failed" in end(config, stopped=True, saved=False)
    assert "without --resume=never" in end(config | {"resume": "never"}, stopped=True)
    earlier = end(config | {"resume_from": 3}, stopped=True)
    assert earlier.endswith("continues, without --resume_from=3 --overwrite=True\n")


@pytest.mark.parametrize(("name", "shown"), [("\u8fd0\u884c".encode(), "\u8fd0\u884c"), (b"\xd4\xcb", "\ufffd\ufffd")])
def test_a_card_of_a_path_that_the_locale_cannot_name(tmp_path, monkeypatch, name, shown):
    """UTF-8 in an ASCII locale; a folder's name in GBK."""
    out = tmp_path / name.decode("ascii", "surrogateescape")
    os.mkdir(bytes(tmp_path) + b"/" + name)
    monkeypatch.setattr(RunLog, "print", lambda log, text: None)  # a script's output replaces what it lacks
    log = RunLog(str(out), 1, 0)
    log.advance()
    log.finish(str(ROOT / "sft.py"), {"resume": "auto", "resume_from": 0}, corpus(str(out)), False, True)
    assert f"# {shown}: a run of sft.py" in (out / "README.md").read_text(encoding="utf-8")


def test_a_card_replaces_no_text_of_ones_own(tmp_path, capsys):
    card = tmp_path / "README.md"
    for text, stays in (("# thesis", True), ("", True), (logs.CARD, False)):
        card.write_text(text, encoding="utf-8")
        log = RunLog(str(tmp_path), 1, 0)
        log.advance()
        log.finish(str(ROOT / "sft.py"), {"resume": "auto", "resume_from": 0}, corpus(), False, True)
        assert (card.read_text(encoding="utf-8") == text) == stays
        assert (f"{card} was not written by a run" in capsys.readouterr().out) == stays


@pytest.mark.parametrize("track", ["tensorboard", "trackio", "wandb"])
@pytest.mark.parametrize("found", [None, SimpleNamespace(origin=None)], ids=["nothing", "folder of data"])
def test_a_tracker_without_its_package_is_one_line(track, found, tmp_path, monkeypatch):
    monkeypatch.setattr(logs.importlib.util, "find_spec", lambda name: found)
    with pytest.raises(UserError, match=f"track='{track}' needs a package; pip install {track}"):
        RunLog(str(tmp_path), 9, 0, World(1, 1, 2), track=track)


@pytest.mark.parametrize("track", ["trackio", "wandb"])
def test_a_tracker_gets_the_numbers_of_every_event(track, tmp_path, monkeypatch):
    """With a stand-in for the package: a resumed run continues the tracker's run."""
    found = []
    run = SimpleNamespace(
        log=lambda values, step: found.append((step, values)), finish=lambda: found.append("end")
    )
    init = lambda **given: found.append((given["name"], given["config"])) or run  # noqa: E731
    monkeypatch.setitem(sys.modules, track, SimpleNamespace(init=init))
    monkeypatch.setattr(logs, "check_installed", lambda track: None)
    out = tmp_path / "mine"
    out.mkdir()
    (out / "config.py").write_text("max_steps = 9\n", encoding="utf-8")
    log = RunLog(str(out), 9, 0, track=track)
    log.write("train", 1, {"loss": 2.5, "note": "x"})
    log.write("eval", 1, {"val_loss": 3.5})
    log.write("save", 1, {"path": "x"})  # no numbers
    log.close()
    want = [(1, {"train/loss": 2.5}), (1, {"eval/val_loss": 3.5})]
    assert found == [("mine", {"max_steps": 9}), *want, "end"]


# ---- the card ------------------------------------------------------------------------------------


def test_table_holds_the_first_the_best_and_the_last_evaluation():
    losses = {0: 6.25, 10: 4.5, 20: 4.75}
    events = [event("eval", step, val_loss=loss, pairs=1200) for step, loss in losses.items()]
    rows = [line.strip("| ").split(" | ") for line in logs.result_table(events).splitlines()]
    assert rows[2:] == [
        ["step", "0", "10", "20"],
        ["val_loss", "6.25", "4.5", "4.75"],
        ["pairs", *["1,200"] * 3],
    ]
    assert logs.result_table([event("train", 1, loss=2.0)]) == "No evaluation was logged."


def test_best_is_the_lowest_loss():
    events = [event("eval", step, val_loss=3.0 + abs(step - 2)) for step in range(5)]
    header, _, steps, *_ = logs.result_table(events).splitlines()
    assert (header, steps) == ("| | first | best saved | last |", "| step | 0 | 2 | 4 |")


def test_best_has_a_checkpoint_and_a_lower_loss_without_one_is_named():
    """So the card names the step of the link `best`."""
    events = [event("eval", step, val_loss=loss) for step, loss in ((0, 8.241), (60, 8.313), (80, 8.5))]
    table = logs.result_table(events, 60)
    assert "| step | 0 | 60 | 80 |\n| val_loss | 8.241 | 8.313 | 8.5 |" in table
    assert table.endswith("\n\nbest is the link `best`; val_loss 8.241 at step 0 was lower, but has no checkpoint.")
    assert "no checkpoint" not in logs.result_table(events, 0)


@pytest.mark.parametrize("losses, warned", [((2.0, 2.5, 2.25), True), ((2.0, 1.5, 2.25), False), ((2.0,), False)])
@pytest.mark.parametrize("few_val", [False, True])
def test_a_run_that_made_the_model_worse_says_so(tmp_path, capsys, losses, warned, few_val):
    """Unless the validation rows are too few to tell."""
    log = RunLog(str(tmp_path), len(losses), 0)
    for step, loss in enumerate(losses):
        log.write("eval", step, {"val_loss": loss})
    config = {"resume": "auto", "resume_from": 0}
    log.finish("pretrain.py", config, corpus(few_val=few_val), stopped=True, saved=False)
    said = "warning: val_loss was 2 before the first step and 2.25 at best after it;" in capsys.readouterr().out
    assert said == (warned and not few_val)


def test_the_warning_of_a_worse_loss_names_what_became_better(tmp_path, capsys):
    """The val_loss of dpo.py also counts the nll_weight part. A lower rate needs another out_dir."""
    log = RunLog(str(tmp_path), 2, 0)
    for step, loss, right, margin in ((0, 2.0, 0.5, 0.0), (1, 2.25, 0.65, 0.033), (2, 2.5, 0.4, -0.1)):
        log.write("eval", step, {"val_loss": loss, "rewards/accuracies": right, "rewards/margins": margin})
    log.finish("dpo.py", {"resume": "auto", "resume_from": 0}, corpus(), stopped=True, saved=False)
    said = capsys.readouterr().out
    assert "and 2.25 at best after it, but accuracy 0.5 -> 0.65 and margin 0 -> 0.033: lower learning_rate" in said
    assert "made the model worse" not in said and "lower learning_rate (with another out_dir), or" in said


@pytest.mark.parametrize(
    ("lowest", "last", "named"),
    [
        (2.0, 2.5, True),
        (2.0, 2.05, False),
        # of rl.py, whose val_loss is the negative reward
        (-1.0, -0.5, True),
        (-1.0, -0.98, False),
        (-1.0, -1.0, False),
        (-1.0, -1.2, False),  # the best one has no checkpoint
    ],
)
def test_an_earlier_checkpoint_with_a_lower_loss_is_named(lowest, last, named, tmp_path, capsys):
    log = RunLog(str(tmp_path), 2, 0)
    (tmp_path / "step_000001").mkdir()
    (tmp_path / "best").symlink_to("step_000001")
    for step, loss in ((0, 3.0), (1, lowest), (2, last)):
        log.write("eval", step, {"val_loss": loss})
    log.finish("sft.py", {"resume": "auto", "resume_from": 0}, corpus(few_val=True), stopped=True, saved=False)
    begin = f"val_loss was {lowest:g} at step 1, at the end {last:g}: the earlier checkpoint is"
    said = capsys.readouterr().out
    assert (f"{begin} --init_from={tmp_path}/best" in said) == named and ("at step 1" in said) == named


def test_summary_says_how_far_a_run_came():
    events = [event("train", 5, loss=1.0, tokens=5000)]
    assert logs.summary(events, 9).startswith(
        "Ended before its last step: step 5 of 9, 5,000 tokens. Written 2"
    )
    assert logs.summary(events, 5).startswith("Complete: step 5 of 5")


def test_versions_are_those_of_what_is_installed(monkeypatch):
    monkeypatch.setattr("groundup.train.device.PACKAGES", ("numpy", "no-such-package", "pytest"))
    python = ".".join(map(str, sys.version_info[:3]))
    assert versions() == {
        "python": python,
        "numpy": numpy.__version__,
        "pytest": pytest.__version__,
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("card") / "out"
    command = [
        sys.executable,
        ROOT / "pretrain.py",
        ROOT / "config/debug.py",
        "--max_steps=6",
        "--log_every=2",
    ]
    forks.run(
        [*command, "--eval_every=6", "--eval_steps=2", f"--out_dir={out}"], cwd=ROOT, check=True, capture_output=True
    )
    return out


def test_a_run_leaves_a_card_with_its_figures_settings_and_data(trained):
    text = (trained / "README.md").read_text(encoding="utf-8")
    events = [
        json.loads(line)
        for line in (trained / "log.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    last = [e for e in events if e["event"] == "eval"][-1]
    assert f"| {last['val_loss']:.4g} |" in text and "Complete: step 6 of 6, 3,072 tokens" in text
    assert "max_steps = 6\n" in text and "\nseed = " not in text  # the default
    assert (
        "debug train: 40 documents" in text and f"torch {torch.__version__.split('+')[0]}" in text
    )


@pytest.mark.slow
def test_its_command_gives_the_same_losses(trained):
    text = (trained / "README.md").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("python pretrain.py"))
    forks.run([sys.executable, *shlex.split(line)[1:]], cwd=ROOT, check=True, capture_output=True)
    again = trained.with_name("out_again")
    losses = [
        [
            json.loads(row).get("loss")
            for row in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        for out in (trained, again)
    ]
    assert losses[0] == losses[1]


def test_a_line_that_a_full_disk_cut_short_costs_that_line_alone(tmp_path, capsys):
    whole = [event("train", 1, loss=3.0), event("eval", 2, val_loss=2.5)]
    lines = [json.dumps(whole[0]), '{"event": "tra', json.dumps(whole[1])]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    log, path = RunLog(str(tmp_path), 2, 2), tmp_path / "README.md"
    log.write_card(str(ROOT / "sft.py"), {"max_steps": 2}, [])
    assert "| val_loss | 2.5 | 2.5 | 2.5 |" in path.read_text(encoding="utf-8")
    path.with_suffix(".md.tmp").mkdir()  # cannot be written over, by root either
    log.write_card(str(ROOT / "sft.py"), {"max_steps": 2}, [])
    log.close()
    assert f"log: cannot write {path}" in capsys.readouterr().out


@pytest.mark.parametrize("full", [False, True], ids=["no reader", "full disk"])
def test_a_run_goes_on_when_nobody_reads_its_output(tmp_path, full):
    """At Ctrl-C a terminal ends the `| tee` behind a run, too, and the disk of `> file` may be full;
    the run must still save."""
    if full and not Path("/dev/full").is_char_device():
        pytest.skip("needs Linux's /dev/full")
    code = (
        "import sys; from groundup.train.log import RunLog; log = RunLog(sys.argv[1], 9, 0)\n"
        "for step in range(3): log.print(f'line {step}')\n"
        "print('kept')"
    )
    read, write = os.pipe()
    os.close(read)
    if full:
        os.close(write)
        write = os.open("/dev/full", os.O_WRONLY)
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = forks.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, encoding="utf-8")
    assert forks.run(command, cwd=ROOT, stdout=write, stderr=write).returncode == 0  # 2>&1 | tee
    os.close(write)
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if line.startswith("line")] == [
        "line 0",
        "line 1",
        "line 2",
    ]
