"""tools/plot.py: events, smoothing and x by hand arithmetic; what is drawn."""

import json
import math
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from groundup.errors import UserError
from groundup.train.log import RunLog, read_events

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import plot  # noqa: E402


def train(step: int, **values: object) -> dict:
    return {"event": "train", "step": step, **values}


def evaluation(step: int, **values: object) -> dict:
    return {"event": "eval", "step": step, **values}


def lines(*events: dict) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def write(path: Path, *events: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lines(*events))
    return path


# ---- events ----------------------------------------------------------------------------------------------------------


def test_a_log_is_read_as_it_was_written(tmp_path):
    log = RunLog(str(tmp_path), max_steps=4, steps_done=0)
    log.write("eval", 0, {"val_loss": 3.0})
    log.write("train", 2, {"loss": float("nan"), "lr": 0.5})
    log.write("save", 2, {"path": "step_000002"})
    log.write("eval", 2, {"val_loss": 2.0, "calibration": [[1, 2]], "名": "文"})
    log.close()
    run = plot.run_of("run", read_events(tmp_path / "log.jsonl"), "steps")
    assert [(event["event"], event["x"]) for event in run.events] == [("eval", 0), ("train", 2), ("eval", 2)]
    assert [event.get("val_loss") for event in run.events] == [3, None, 2]
    assert math.isnan(run.events[1]["loss"])
    assert set(run.events[2]) == {"event", "step", "x", "val_loss"}  # no lists, no texts


def test_steps_that_came_again_count_once_and_the_later_ones():
    """Killed after step 40 with a checkpoint at 20: 30 and 40 come again. RunLog itself drops them when it resumes, and
    what it keeps is what is drawn."""
    first = [evaluation(0, val_loss=9.0), train(10, loss=5.0), train(20, loss=4.0), evaluation(20, val_loss=4.5)]
    lost = [train(30, loss=7.0), evaluation(30, val_loss=7.5), train(40, loss=6.0)]
    again = [train(25, loss=3.5), train(30, loss=3.0), evaluation(30, val_loss=3.2), train(50, loss=2.0)]
    events = plot.without_repeats([*first, *lost, *again])
    assert events == first + again
    assert (np.diff([event["step"] for event in events if event["event"] == "train"]) > 0).all()


def test_a_resumed_run_has_the_same_curve_as_its_log(tmp_path):
    raw = []
    for start, stop in ((0, 7), (4, 10)):  # the first is killed after 7, its checkpoint is of step 4
        log = RunLog(str(tmp_path), 10, start)
        for step in range(start + 1, stop + 1):
            log.write("train", step, {"loss": 10 * start + step})
            raw.append(train(step, loss=10 * start + step))
        log.close()
    clean = read_events(tmp_path / "log.jsonl")
    assert plot.without_repeats(raw) == clean == plot.without_repeats(clean)
    assert [event["loss"] for event in clean] == [1, 2, 3, 4, 45, 46, 47, 48, 49, 50]


# ---- smoothing -------------------------------------------------------------------------------------------------------


def test_local_fit_by_hand():
    # one neighbour on each side with half the weight: in the middle the mean (1/2 + 2 + 6/2) / 2,
    # at an end the line through two values, which is the value itself
    np.testing.assert_allclose(plot.local_fit(np.array([1.0, 2.0, 6.0]), 0.4), [1, 11 / 4, 6])
    values = np.arange(10.0)
    assert plot.local_fit(values, 0.05) is values  # ten values are not smoothed
    assert plot.local_fit(np.array([]), 0.05).tolist() == []


def test_local_fit_is_a_weighted_line():
    values = np.random.default_rng(0).normal(size=50)
    values[20] = math.nan
    places, known = np.arange(50), ~np.isnan(values)
    for reach in (1, 5, 20):
        fitted = plot.local_fit(values, reach / 50)
        for i in places[known]:
            near = known & (abs(places - i) <= reach)
            weights = 1 - abs(places - i)[near] / (reach + 1)
            line = np.polyfit(places[near] - i, values[near], 1, w=np.sqrt(weights))
            assert fitted[i] == pytest.approx(line[1])
        assert np.isnan(fitted).nonzero()[0].tolist() == [20]


def test_local_fit_does_not_lag():
    line = np.linspace(9, 3, 61)
    np.testing.assert_allclose(plot.local_fit(line, 0.05), line)


def test_local_fit_passes_over_gaps():
    smoothed = plot.local_fit(np.array([math.nan, 1.0, math.nan, 2.0]), 0.25)
    np.testing.assert_allclose(smoothed, [math.nan, 1, math.nan, 2])


# ---- x ---------------------------------------------------------------------------------------------------------------


def test_tokens_and_hours_of_a_log_with_tokens():
    events = [evaluation(0), train(10, tokens=3600, step_ms=180_000.0), evaluation(15)]
    events += [train(20, tokens=7200, step_ms=720_000.0)]
    np.testing.assert_allclose(plot.x_of(events, "hours"), [0, 0.5, 1.5, 2.5])
    np.testing.assert_allclose(plot.x_of(events, "tokens"), [0, 3600, 5400, 7200])
    assert plot.x_of(events, "steps").tolist() == [0, 10, 15, 20]


def test_tokens_and_hours_of_a_log_without_tokens():
    """450 steps of 4 s, then 450 of 2 s, at 100 tokens per second."""
    events = [train(450, step_ms=4000.0, tokens_per_s=100.0), train(900, step_ms=2000.0, tokens_per_s=100.0)]
    assert plot.x_of(events, "hours").tolist() == [0.5, 0.75]
    np.testing.assert_allclose(plot.x_of(events, "tokens"), [180_000, 270_000])
    for kind in ("hours", "tokens"):
        with pytest.raises(UserError, match="use --x=steps"):
            plot.x_of([train(10, loss=1.0)], kind)


def test_only_evaluations_are_at_the_beginning():
    assert plot.x_of([evaluation(0, val_loss=1.0)], "hours").tolist() == [0]


# ---- logs ------------------------------------------------------------------------------------------------------------


def test_find_logs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="give --runs"):
        plot.find_logs("")
    for name, age in (("b", 10), ("a", 20), ("c", 30)):
        write(tmp_path / f"out/{name}/log.jsonl", train(1))
        os.utime(tmp_path / f"out/{name}/log.jsonl", (1e9 - age, 1e9 - age))
    assert list(plot.find_logs("")) == ["out/b/log.jsonl"]  # the newest
    assert list(plot.find_logs("out/*, out/c/")) == [f"out/{name}/log.jsonl" for name in "abc"]
    assert list(plot.find_logs("out/b/log.jsonl,out/b")) == ["out/b/log.jsonl"]
    write(tmp_path / "out/x[1]/log.jsonl")
    assert list(plot.find_logs("out/x[1]")) == ["out/x[1]/log.jsonl"]
    write(tmp_path / "out/lr=0.1,wd=0/log.jsonl")
    found = plot.find_logs("新的=out/a,out/lr=0.1,wd=0, old=out/lr=0.1*")
    assert found == {"out/a/log.jsonl": "新的", "out/lr=0.1,wd=0/log.jsonl": "old"}
    assert plot.find_logs("out/a/log.jsonl") == {"out/a/log.jsonl": "out/a"}
    with pytest.raises(UserError, match="several runs are called 'all'"):
        plot.find_logs("all=out/*")
    with pytest.raises(UserError, match="no log matches"):
        plot.find_logs("none*")


def test_an_equals_sign_is_of_a_name_or_of_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in ("lr=1", "lr=2", "out/a"):
        Path(run).mkdir(parents=True)
        Path(run, "log.jsonl").touch()
    Path("out/dangling").mkdir()
    Path("out/dangling/log.jsonl").symlink_to("gone")
    assert plot.find_logs("lr=*") == {"lr=1/log.jsonl": "lr=1", "lr=2/log.jsonl": "lr=2"}
    assert plot.find_logs(" mine = out/a ,lr=2") == {"out/a/log.jsonl": "mine", "lr=2/log.jsonl": "lr=2"}
    assert plot.find_logs("") == {"out/a/log.jsonl": "out/a"}
    with pytest.raises(UserError, match="several runs are called 'n'"):
        plot.find_logs("n=out/a,n=lr=1")


def test_a_long_name_loses_its_middle():
    assert plot.shortened("a" * 20 + "b" * 20) == "a" * 14 + "..." + "b" * 15


# ---- panels ----------------------------------------------------------------------------------------------------------


def run_of(name: str, *events: dict) -> plot.Run:
    return plot.run_of(name, events, "steps")


def test_panels_are_those_that_are_logged():
    pretrained = run_of("a", train(1, loss=3.0, lr=0.1), evaluation(1, val_loss=3.5))
    both = {"loss": 0.5, "accuracy": 0.7, "margin": 1.0, "rewards/accuracies": 0.7, "rewards/margins": 1.0}
    rewarding = run_of("r", train(1, loss=0.5, accuracy=0.7), evaluation(1, accuracy=0.8))
    assert [panel.title for panel in plot.panels_of("", [pretrained], 0)] == ["loss", "lr"]
    titles = [panel.title for panel in plot.panels_of("", [run_of("d", train(1, **both))], 0)]
    assert titles == ["loss", "rewards/accuracies", "rewards/margins"]  # one quantity once
    (drawn,) = [panel.curves for panel in plot.panels_of("", [rewarding], 0) if panel.title == "accuracy"]
    assert [(curve.points, curve.y.tolist()) for curve in drawn] == [(False, [0.7]), (True, [0.8])]
    beside = plot.panels_of("", [run_of("d", train(1, **both)), rewarding], 0)
    assert {panel.title: [curve.run for curve in panel.curves] for panel in beside} == {
        "loss": [0, 1], "rewards/accuracies": [0], "rewards/margins": [0], "accuracy": [1, 1],
    }  # fmt: skip
    assert [len(panel.curves) for panel in plot.panels_of("accuracy", [run_of("d", train(1, **both))], 0)] == [1]


def test_runs_of_rl_begin_with_the_reward():
    events = [train(1, loss=0.1, reward=0.5, lr=0.1), evaluation(1, val_loss=-0.5, reward=0.5)]
    panels = plot.panels_of("", [run_of("r", *events)], 0)
    assert [panel.title for panel in panels] == ["reward", "loss", "lr"]
    assert [[curve.points for curve in panel.curves] for panel in panels] == [[False, True], [False], [False]]


def test_the_validation_loss_of_reward_is_drawn():
    """It logs the mean reward, too, but in training only; rl.py's val_loss is minus its reward."""
    events = [train(1, loss=0.7, reward=0.5), evaluation(1, val_loss=0.6, accuracy=0.5)]
    panels = {panel.title: panel for panel in plot.panels_of("", [run_of("r", *events)], 0)}
    assert [curve.points for curve in panels["loss"].curves] == [False, True]


def test_panels_of_several_validation_texts_are_among_the_usual():
    names = [f"val_{kind}{name}" for kind in ("loss", "bpb") for name in ("", "/中文", "/code")]
    run = run_of("a", evaluation(5, **dict.fromkeys(names, 1.0)))
    panels = {panel.title: panel.keys for panel in plot.panels_of("", [run], 0)}
    assert panels == {
        "loss": ["loss"], "bpb": ["bpb"], "val_loss/*": ["中文", "code"], "val_bpb/*": ["中文", "code"],
    }  # fmt: skip


def test_panels_that_are_asked_for():
    event = evaluation(5, **{"val_bpb": 1.0, "val_bpb/中文": 2.0, "val_bpb/code": 3.0, "val_loss": 4.0})
    panels = plot.panels_of("val_bpb/* , nope+val_loss", [run_of("a", event)], 0.9)
    assert [(panel.title, panel.keys) for panel in panels] == [
        ("val_bpb/*", ["中文", "code"]), ("loss", ["loss"]),
    ]  # fmt: skip
    assert [(curve.key, curve.points, curve.y.tolist()) for curve in panels[0].curves] == [
        (0, True, [2]), (1, True, [3]),
    ]  # fmt: skip
    mixed = plot.panels_of("val_bpb/*+val_loss", [run_of("a", event)], 0)
    assert mixed[0].keys == ["bpb/中文", "bpb/code", "loss"]  # of two groups: whole
    with pytest.raises(UserError, match="no log has 'nope'; they have .*val_bpb/中文"):
        plot.panels_of("nope", [run_of("a", event)], 0.9)
    assert plot.panels_of("nope", [run_of("a")], 0.9) == []  # nothing is logged yet: it may come


def test_curves_of_two_runs_have_their_numbers_and_the_schedule_is_not_smoothed():
    events = [train(step, loss=loss, lr=step) for step, loss in ((1, 4.0), (2, 2.0), (3, 3.0))]
    runs = [run_of(name, *events, evaluation(3, val_loss=3.0)) for name in "ab"]
    drawn = plot.panel_of("", ["loss", "val_loss"], runs, 0.4, {}).curves
    assert [(c.run, c.key, c.points) for c in drawn] == [(0, 0, False), (0, 0, True), (1, 0, False), (1, 0, True)]
    assert drawn[0].smoothed.tolist() == pytest.approx([4, 11 / 4, 3]) and drawn[0].y.tolist() == [4, 2, 3]
    schedule = plot.panel_of("", ["lr"], runs, 0.4, {}).curves[0]
    assert drawn[1].smoothed is drawn[1].y and schedule.smoothed is schedule.y


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_picture_has_what_the_log_has(tmp_path):
    pytest.importorskip("matplotlib")
    one = [train(step, loss=5.0 - step / 10, lr=0.1) for step in (1, 2, 3, 4)]
    again = [train(step, loss=4.0 - step / 10, lr=0.1) for step in (3, 4, 5)]
    events = [*one, *again, evaluation(5, val_loss=3.0)]
    panels = plot.panels_of("", [run_of("run 一", *events)], 0.25)
    figure = plot.draw(panels, ["run 一"], "step")
    losses, rates = figure.axes
    raw, mean, points = losses.lines
    assert raw.get_xdata().tolist() == [1, 2, 3, 4, 5]  # no jump backwards
    np.testing.assert_allclose(raw.get_ydata(), [4.9, 4.8, 3.7, 3.6, 3.5])
    np.testing.assert_allclose(mean.get_ydata(), plot.local_fit(raw.get_ydata(), 0.25))
    assert (points.get_xdata().tolist(), points.get_ydata().tolist()) == ([5], [3])
    assert len(rates.lines) == 1 and losses.get_xlim() == rates.get_xlim()
    assert rates.get_legend() is None  # one curve, and the run's name is above
    assert figure.get_suptitle() == ("run 一" if plot.chinese_font() else NO_FONT)


NO_FONT = "no font for Chinese names: apt install fonts-noto-cjk"


def test_a_font_for_chinese_is_found_or_the_title_says_why(monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    from matplotlib import font_manager

    panels = plot.panels_of("", [run_of("诗", train(1, loss=1.0))], 0)
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda *given, **named: [])
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [])
    assert plot.chinese_font() == ""
    assert plot.draw(panels, ["诗"], "step").get_suptitle() == NO_FONT
    assert capsys.readouterr().out == f"plot: {NO_FONT}\n"
    assert plot.draw(panels, ["诗", "词"], "step").legends[0].get_title().get_text() == NO_FONT
    fonts = [font_manager.FontEntry(name=name) for name in ("Arial", "Noto Serif CJK SC", "Noto Sans CJK JP", "SimHei")]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", fonts)
    assert plot.chinese_font() == "Noto Serif CJK SC"


def test_without_a_font_no_line_is_printed_for_each_character(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plot, "chinese_font", lambda: "")
    panels = plot.panels_of("", [run_of("诗", train(1, loss=1.0))], 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot.draw(panels, ["诗", "词"], "step").draw_without_rendering()


def test_a_flat_curve_is_drawn_from_zero():
    pytest.importorskip("matplotlib")
    run = run_of("a", *[train(step, margin=1.0) for step in range(4)])
    (axes,) = plot.draw(plot.panels_of("", [run], 0), ["a"], "step").axes
    assert axes.get_ylim() == (0, 1.1)


def test_a_color_is_a_run_and_a_style_of_lines_a_key():
    pytest.importorskip("matplotlib")
    runs = [run_of(f"run {k}", *[train(s, loss=k + 1.0, **{"rewards/chosen": k, "rewards/rejected": -k - 1})
                                 for s in (1, 2)]) for k in range(6)]  # fmt: skip
    panels = plot.panels_of("loss,rewards/chosen+rewards/rejected", runs, 0.0)
    figure = plot.draw(panels, [run.name for run in runs], "step")
    losses, rewards = figure.axes
    of_run = {line.get_color() for line in losses.lines}
    assert len(of_run) == 6 and {line.get_linestyle() for line in losses.lines} == {"-"}
    for line in rewards.lines:
        run = int(line.get_ydata()[0]) if line.get_ydata()[0] >= 0 else -int(line.get_ydata()[0]) - 1
        chosen = line.get_ydata()[0] >= 0
        assert line.get_color() == losses.lines[run].get_color()
        assert line.get_linestyle() == ("-" if chosen else "--")
    assert [text.get_text() for text in rewards.get_legend().get_texts()] == ["chosen", "rejected"]
    (legend,) = figure.legends  # of the runs, above all panels
    assert [text.get_text() for text in legend.get_texts()] == [run.name for run in runs]


def test_references_differ_and_millions_of_tokens_have_short_labels():
    pytest.importorskip("matplotlib")
    names = ["a", "b", "reference x", "reference y"]
    runs = [run_of(name, *[train(s * 20_000_000, loss=1.0 + k) for s in (1, 2)]) for k, name in enumerate(names)]
    figure = plot.draw(plot.panels_of("loss", runs, 0.0), names, plot.X_LABELS["tokens"])
    figure.canvas.draw()
    (axes,) = figure.axes
    assert len({line.get_color() for line in axes.lines}) == 4
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert "20M" in labels and all(len(label) <= 5 for label in labels)


def test_values_that_stand_alone_are_seen():
    """A run of one step, and a value between two that are not finite."""
    pytest.importorskip("matplotlib")
    for losses, seen in (([3.0], [3]), ([2.0, None, 5.0, None, 3.0, 3.0], [2, 5])):
        run = run_of("a", *[train(step, loss=loss) for step, loss in enumerate(losses, 1)])
        (axes,) = plot.draw(plot.panels_of("", [run], 0), ["a"], "step").axes
        dots = [line for line in axes.lines if line.get_marker() == "."]
        assert [value for line in dots for value in line.get_ydata()] == seen
        assert all(tick == int(tick) for tick in axes.get_xticks())


def test_a_panel_or_a_picture_without_a_number_says_so():
    pytest.importorskip("matplotlib")
    run = run_of("a", train(1, loss=None), train(2, loss=None))
    (axes,) = plot.draw(plot.panels_of("", [run], 0), ["a"], "step").axes
    assert [text.get_text() for text in axes.texts] == ["never finite"]
    nothing = plot.draw([], ["a"], "step")
    assert nothing.texts[0].get_text() == "nothing is logged yet"


def test_a_long_name_leaves_the_panels_their_room():
    pytest.importorskip("matplotlib")
    names = ["a" * 200, "b"]
    runs = [run_of(name, train(1, loss=1.0), train(2, loss=2.0), evaluation(2, val_loss=1.0)) for name in names]
    figure = plot.draw(plot.panels_of("", runs, 0), names, "step")
    figure.draw_without_rendering()
    assert figure.axes[0].get_position().width > 0.7


@pytest.mark.parametrize("text", [b"", b'{"event": "tr', lines(train(1, loss=None, lr=0.1)) + b"{"])
def test_picture_of_a_log_with_next_to_nothing(tmp_path, monkeypatch, capsys, text):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/log.jsonl").write_bytes(text)
    plot.main(DEFAULTS)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG") and not (tmp_path / "x.png.tmp").exists()
    assert capsys.readouterr().out == "wrote x.png\n"


DEFAULTS = {"runs": "run", "out": "x.png", "x": "steps", "y": "", "smooth": 0.05, "reference": False}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"x": "hours"}, "hours need step_ms"),
        ({"out": "x.doc"}, "cannot write x.doc: .*doc"),
        ({"y": "los"}, "no log has 'los'; they have loss, step"),
        ({"runs": "run,missing"}, "no log matches 'missing/log.jsonl'"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, setting, said):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run/log.jsonl", train(1, loss=1.0))
    with pytest.raises(ValueError, match=said) as caught:
        plot.main(DEFAULTS | setting)
    assert isinstance(caught.value, UserError) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


def test_a_picture_that_cannot_be_written_is_a_line(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run/log.jsonl", train(1, loss=1.0))
    with pytest.raises(UserError, match="cannot write none/x.svg: .*No such file"):
        plot.main(DEFAULTS | {"out": "none/x.svg"})


def test_without_matplotlib_the_line_to_install_it_is_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        plot.draw([], [], "step")
