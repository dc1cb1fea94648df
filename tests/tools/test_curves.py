"""tools/curves.py: which curve is a run's reference, and what is said of the run."""

import json
import sys
from pathlib import Path

import forks
import pytest

from configurator import defaults_of, read_file
from groundup.demo import debug_data, debug_model
from groundup.errors import UserError
from groundup.train.log import read_events

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import curves  # noqa: E402
import plot  # noqa: E402

DOWN = {step: 3.0 + 3.0 * 0.98**step for step in range(0, 201, 10)}  # a usual curve


def log(losses: dict[int, float], lr: float = 1e-2, tokens: int = 512, trained: dict | None = None) -> list[dict]:
    """Return a log with these validation losses, and training losses at the same places."""
    found = [{"event": "eval", "step": 0, "val_loss": 6.0, "val_bpb": 5.0}]
    for step in sorted(losses)[1:]:
        loss = (trained or losses)[step]
        found.append({"event": "train", "step": step, "loss": loss, "lr": lr, "tokens": tokens * step})
        found.append({"event": "eval", "step": step, "val_loss": losses[step]})
    return found


def said(events: list[dict], differ: dict | None = None, reference: list[dict] | None = None) -> str:
    about = {"command": "python pretrain.py config/x.py", "machine": "a machine"}
    return "\n".join(curves.compare(events, curves.Reference("x", about, reference or log(DOWN), differ or {})))


def test_a_run_on_its_reference_is_called_so_and_the_others_above_and_below():
    on = said(log({s: 1.01 * y for s, y in DOWN.items()}))
    assert "the run is on its reference" in on and "chance" not in on
    differ = {"max_steps": (150, 900), "model.py": ("edited", "as it came")}
    lines = said(log({s: 1.01 * y for s, y in DOWN.items()}), differ).splitlines()
    assert lines[-3:] == [
        "these differ, so that it is on the curve may be chance:",
        "  max_steps=150, the reference's 900: the schedule ends elsewhere; compare at the ends",
        "  model.py='edited', the reference's 'as it came'",
    ]
    above, below = (said(log({s: f * y for s, y in DOWN.items()})) for f in (1.1, 0.9))
    assert "above its reference: val_loss 3.358 against 3.053 at 102,400 tokens (+10.0 %)" in above
    assert "more than the usual 2 % from 5,120 tokens on" in above and "too little" not in above
    assert "below its reference" in below and "validation text among the training data" in below


def test_the_comparison_is_at_equal_tokens_and_within_the_reference():
    """Twice the batch, the same curve by tokens; the run has gone on twice as far."""
    halved = {step // 2: loss for step, loss in DOWN.items()}
    longer = halved | {step: 1.0 for step in range(110, 201, 10)}
    assert "the run is on its reference: val_loss 3.053 against 3.053" in said(log(longer, tokens=1024))


@pytest.mark.parametrize(
    ("lr", "differ", "cause"),
    [
        (1e-1, {"n_head": (2, 4), "learning_rate": (0.1, 0.01)}, "too high: 10 times the reference's at the same"),
        (1e-3, {"n_head": (2, 4)}, "too low: 1/10 of the reference's at the same tokens, by the schedule"),
        (1e-2, {"n_layer": (1, 4)}, "n_layer=1, the reference's 4"),
        (1e-2, {}, "settings and learning rate are the reference's: the data"),
    ],
)
def test_a_wrong_learning_rate_is_named_first(lr, differ, cause):
    lines = said(log({s: 1.2 * y for s, y in DOWN.items()}, lr), differ).split("\n")
    assert cause in lines[3], lines


def test_a_loss_that_rises_again_and_one_of_too_little_text_are_told_apart():
    risen = {s: y if s < 100 else 2 * y for s, y in DOWN.items()}
    assert "has risen again" in said(log(risen)) and "training loss is not above" not in said(log(risen))
    low = {s: 0.8 * y for s, y in DOWN.items()}
    assert "training loss is not above the reference's" in said(log(risen, trained=low))
    lost = [e | {"loss": None} if e["event"] == "train" and e["step"] > 50 else e for e in log(risen)]
    assert "not finite" in said(lost)


def test_a_run_on_another_text_is_not_compared():
    other = [e | {"val_bpb": 4.0} if e["step"] == 0 else e for e in log({s: 2 * y for s, y in DOWN.items()})]
    differ = {"data_dir": ("data/mine", "data/demo"), "max_steps": (150, 240)}
    lines = said(other, differ).split("\n")
    assert len(lines) == 2
    assert lines[1].startswith("no comparison: another text, tokenizer or start (data_dir='data/mine'")
    assert lines[1].endswith("4 bits per byte before the first step, the reference's 5")
    # the same text at another place
    assert "the run is on its reference" in said(log(DOWN), differ)
    # the same data_dir: with another tokenizer, or other starting weights
    assert "another text, tokenizer or start: 4 bits" in said(other, {"max_steps": (150, 240)})


def test_a_run_without_a_common_place_says_so():
    assert "nothing to compare yet" in said([{"event": "eval", "step": 0, "val_loss": 6.0}])


def write_run(directory: Path, script: str, **settings: object) -> Path:
    directory.mkdir(parents=True)
    lines = [repr(f"Resolved configuration; re-run with: python {script}.py {directory}/config.py")]
    lines += [f"{key} = {value!r}" for key, value in settings.items()]
    (directory / "config.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (directory / "log.jsonl").write_text("\n".join(map(json.dumps, log(DOWN))) + "\n", encoding="utf-8")
    card = "# x\n\nComplete: step 200.\n\n## Machine\n\na CPU  \ntorch 2\n"
    (directory / "README.md").write_text(card, encoding="utf-8")
    return directory


def settings_of(name: str) -> dict:
    path = ROOT / "config" / f"{name}.py"
    defaults = defaults_of(ROOT / f"{curves.script_for(path)}.py")
    return defaults | read_file(str(path), defaults)


def test_the_reference_is_the_nearest_config_of_the_script_if_that_has_run(tmp_path, monkeypatch):
    for name in ("make_debug_data", "make_debug_rows"):  # the configurations need no data to be read
        monkeypatch.setattr(debug_data, name, lambda *args: None)
    monkeypatch.setattr(debug_model, "make_debug_model", lambda *args: None)
    kept = {name: curves.keep(write_run(tmp_path / f"{name}_ran", script, **settings_of(name)), name, folder=tmp_path)
            for name, script in (("debug", "pretrain"), ("shakespeare", "pretrain"), ("debug_sft", "sft"))}  # fmt: skip
    about, *events = read_events(kept["debug"])
    assert about["command"] == "python pretrain.py config/debug.py" and about["machine"].startswith("a CPU")
    assert [e["step"] for e in events if e["event"] == "eval"] == list(DOWN)
    assert events[1]["loss"] == pytest.approx(3 + 3 * 0.98**10, abs=1e-3)
    mine = write_run(tmp_path / "mine", "pretrain", **settings_of("debug") | {"learning_rate": 1.0, "out_dir": "y"})
    found = curves.reference_of(mine, tmp_path)
    assert (found.name, found.differ) == ("debug", {"learning_rate": (1.0, 0.01)})
    tuned = write_run(tmp_path / "s", "sft", **settings_of("debug_sft"))
    assert curves.reference_of(tuned, tmp_path).name == "debug_sft"
    large = write_run(tmp_path / "large", "pretrain", **settings_of("gpt2"))
    with pytest.raises(UserError, match="nearest to config/gpt2.py, which has not run.* are: debug, shakespeare"):
        curves.reference_of(large, tmp_path)
    with pytest.raises(UserError, match="no config.py of a run"):
        curves.reference_of(tmp_path, tmp_path)
    (mine / "README.md").write_text("# x\n\nEnded before its last step\n\n## Machine\n\na CPU\n", encoding="utf-8")
    with pytest.raises(UserError, match="no complete run"):
        curves.keep(mine, "debug", folder=tmp_path)


def test_a_long_log_is_thinned_and_keeps_its_last_places():
    events = curves.thinned(log({step: float(step) for step in range(1000)}))
    for kind in ("train", "eval"):
        of_kind = [event for event in events if event["event"] == kind]
        assert len(of_kind) <= curves.MOST and of_kind[-1]["step"] == 999
    assert [e["loss"] for e in events if e["event"] == "train"][-1] == pytest.approx(991)  # the mean of 983 to 999


def test_shipped_curves_are_of_configs_and_say_where_they_are_from():
    names = {path.stem for path in (ROOT / "config").glob("*.py")}
    for path in (ROOT / "docs/curves").glob("*.jsonl"):
        header, *events = read_events(path)
        keys = "command", "commit", "date", "script", "machine", "versions", "settings"
        assert path.stem in names and all(header[key] for key in keys) and 0 < len(events) <= 2 * curves.MOST, path
        known = defaults_of(ROOT / f"{header['script']}.py").keys()
        assert header["settings"].keys() <= known and "with changes" not in header["commit"], path


@pytest.mark.slow
def test_a_real_run_with_a_wrong_learning_rate_is_called_so(tmp_path, capsys, monkeypatch):
    """config/debug.py on the data that it makes, beside its shipped curve."""
    flags = "--out_dir=mine --learning_rate=3e-1 --batch_size=8 --sample_prompts= --eval_steps=2 --save_every=50"
    command = [sys.executable, ROOT / "pretrain.py", ROOT / "config/debug.py", *flags.split()]
    done = forks.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    drawn = {"runs": "mine", "out": "x.svg", "x": "steps", "y": ""}
    plot.main(drawn | {"smooth": 0.2, "reference": True})
    printed = capsys.readouterr().out
    assert "above its reference" in printed and "rate is too high: 27.2 times" in printed
    assert "reference debug" in Path("x.svg").read_text(encoding="utf-8")
