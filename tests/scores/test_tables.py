"""Tables of results as people read them."""

import json
import math
import re

import pytest

from groundup.errors import UserError
from groundup.scores import tables


def test_tables_are_aligned_where_characters_are_wide():
    shown = tables.table(["name", "n", "share"], [["中文", 1234, 0.5], ["x", 5, math.nan], ["big", 0, 1e9]])
    assert shown.splitlines() == [
        "name      n   share",
        "中文  1,234  0.5000",
        "x         5       -",
        "big       0   1e+09",
    ]


def test_figures_of_any_task_are_shown():
    found = {"n": 3, "rate": 0.25, "note": "x", "rows": [1], "left": {"long": 2}}
    shown = tables.describe("generation", found)
    figures = re.findall(r"^(\w+) +(\S+)$", shown, re.MULTILINE)
    assert figures[:3] == [("answers", "3"), ("rate", "0.2500"), ("note", "x")]
    assert "left: long 2" in shown
    assert "rows" not in shown


def test_an_interval_and_a_rate_that_nothing_decided_are_shown():
    assert tables.describe("win_rate", {"win_rate": 0.5, "interval": (0.25, 0.75)}).splitlines() == [
        "win_rate",
        "win_rate            0.5000",
        "interval  0.2500 to 0.7500",
    ]
    lines = tables.describe("win_rate", {"win_rate": None, "interval": None}).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["win_rate", "-"],
        ["interval", "-"],
    ]


def test_figures_have_names_that_people_know_and_their_errors():
    found = {"bleu_13a": 12.5, "bleu_13a_n": 4, "bleu_13a_signature": "nrefs:1|case:mixed", "rouge_l": 0.37}
    found |= {"exact_match": 0.5, "exact_match_se": 0.25, "self_stop": 1.0}
    lines = tables.describe("generation", found).splitlines()
    assert [re.split("  +", line) for line in lines[1:]] == [
        ["BLEU (13a)", "12.5000"],
        ["answers with BLEU (13a)", "4"],
        ["ROUGE-L", "0.3700"],
        ["exact match", "0.5000 +- 0.2500"],
        ["stops on its own", "1.0000"],
    ]


def test_a_figure_that_only_one_model_has():
    others = {"before": {"generation": {"rouge_l": 0.1}}}
    lines = tables.describe("generation", {"rouge_l": 0.4, "bleu_zh": 3.0}, others, "after").splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["before", "after"],
        ["ROUGE-L", "0.1000", "0.4000"],
        ["BLEU", "(zh)", "-", "3.0000"],
    ]


def test_an_interval_from_a_file_and_from_this_run():
    others = {"a": {"win_rate": {"win_rate": 0.5, "interval": [0.25, 0.75]}}}
    shown = tables.describe("win_rate", {"win_rate": 0.5, "interval": (0.25, 0.75)}, others, "b")
    assert shown.count("0.2500 to 0.7500") == 2


def test_names_of_models():
    names = ["out/sft", "out/sft/latest", "out/sft/step_000100/", "path/to/Qwen3-0.6B", ""]
    assert list(map(tables.name_of, names)) == ["sft", "sft", "sft", "Qwen3-0.6B", "this"]


@pytest.mark.parametrize("run", [{"results": [1]}, {"results": {"perplexity": 3}}, {"results": {}, "settings": "x"}])
def test_results_that_a_hand_has_spoilt_are_refused(run, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(run), encoding="utf-8")
    with pytest.raises(UserError, match="x.json is no file that evaluate.py wrote to out"):
        tables.read_others(str(tmp_path / "x.json"), {"perplexity": "x"}, {})
