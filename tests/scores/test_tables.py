"""Tables of results as people read them."""

import json
import math
import re

import pytest

from groundup.errors import UserError
from groundup.scores import judging, tables, text_metrics


def test_tables_are_aligned_where_characters_are_wide():
    shown = tables.table(["name", "n", "share"], [["中文", 1234, 0.5], ["x", 5, math.nan], ["big", 0, 1e9]])
    assert shown.splitlines() == [
        "name      n   share",
        "中文  1,234  0.5000",
        "x         5       -",
        "big       0   1e+09",
    ]


def test_columns_become_lines_where_the_terminal_is_narrow(monkeypatch):
    header, cells = ["name", "documents", "tokens", "bits/byte"], [["中文", 1234, 5, 0.5], ["x", 5, 6, 0.25]]
    wide = tables.table(header, cells)
    for width, narrow in ((0, False), (34, False), (33, True), (9, False)):  # 9: this would not help
        monkeypatch.setattr(tables, "terminal_width", lambda width=width: width)
        lines = tables.table(header, cells)
        assert (lines != wide) == narrow
        if narrow:
            assert [line.split() for line in lines.splitlines()] == [
                ["name", "中文", "x"], ["documents", "1,234", "5"], ["tokens", "5", "6"],
                ["bits/byte", "0.5000", "0.2500"],
            ]  # fmt: skip


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
        ["BLEU (13a), of 100", "12.5000"],
        ["answers in BLEU (13a)", "4"],
        ["ROUGE-L", "0.3700"],
        ["exact match", "0.5000 +- 0.2500"],
        ["stops on its own", "1.0000"],
    ]


def test_a_figure_that_only_one_model_has():
    others = {"before": {"another": {"accuracy": 0.1}}}
    lines = tables.describe("another", {"accuracy": 0.4, "ece": 3.0}, others, "after").splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["before", "after"],
        ["accuracy", "0.1000", "0.4000"],
        ["calibration", "error", "-", "3.0000"],
    ]


def generation(*questions: str, right: str = "") -> dict:
    """Answers as evaluate_generation returns them, right to one question."""
    rows = []
    for question in questions:
        text = "yes" if question == right else "no"
        row = {"prompt": [{"role": "user", "content": question}], "reference": "yes", "answer": text}
        rows.append(row | {"finish_reason": "stop", "stopped": True, "n_tokens": 3})
    return text_metrics.measure_rows(rows)[0] | {"answers": rows}


def test_only_questions_that_all_models_answer_are_compared():
    """A model with a short context leaves long prompts out."""
    pytest.importorskip("sacrebleu"), pytest.importorskip("rouge_score")
    before, after = generation("a", "b", "c", "d", "d", right="c"), generation("a", "c", "e", right="c")
    shown = tables.describe("generation", after, {"before": {"generation": before}}, "after")
    rows = [re.split("  +", line) for line in shown.splitlines()]
    assert ["answers", "2", "2"] in rows
    (exact,) = [row for row in rows if row[0] == "exact match"]
    assert exact[1] == exact[2] and exact[1].startswith("0.5000")
    assert shown.endswith("answers left out, which not all models have: before 3, after 1")
    same = tables.describe("generation", before, {"before": {"generation": before}}, "after")
    assert "left out" not in same and re.search("^answers +5 +5$", same, re.MULTILINE)
    other = tables.describe("generation", generation("z"), {"before": {"generation": before}}, "after")
    assert "before 5, after 1" in other  # none in common


def preference(*rows: str, right: str = "") -> dict:
    """The results of a reward model that is right about the pairs in `right`, a letter each."""
    pairs = [{"row": row, "scores": [float(row in right), 0.5], "tokens": [3, 4]} for row in rows]
    return judging.measure_pairs(pairs, True) | {"pairs": pairs}


def test_only_pairs_that_all_models_have_are_compared():
    """The data may have changed between two runs, and a short context leaves pairs out."""
    before, after = preference(*"abcd", right="ab"), preference(*"bcde", right="bcd")
    shown = tables.describe("preference", after, {"before": {"preference": before}}, "after")
    rows = [re.split("  +", line) for line in shown.splitlines()]
    assert ["pairs", "3", "3"] in rows
    (accuracy,) = [row for row in rows if row[0] == "accuracy"]
    assert [cell[:6] for cell in accuracy[1:]] == ["0.3333", "1.0000"]
    assert shown.endswith("\npairs left out, which not all models have: before 1, after 1")
    other = tables.describe("preference", preference("z"), {"before": {"preference": before}}, "after")
    assert other.endswith("\nnothing to compare: no pairs in common (before 4, after 1)")
    assert "before" not in other.splitlines()[1]


def test_a_column_of_other_texts_is_left_out():
    def perplexity(n_bytes: int) -> dict:
        of = {"documents": 2, "bytes": n_bytes, "bits_per_byte": n_bytes / 100, "notes": []}
        return {"domains": {"zh": of}, "all": of}

    others = {name: {"perplexity": perplexity(n)} for name, n in (("old", 99), ("same", 100))}
    lines = tables.describe("perplexity", perplexity(100), others, "new").splitlines()
    assert [line.split() for line in lines[1:3]] == [["bits/byte", "same", "new"], ["zh", "1.0000", "1.0000"]]
    theirs = "2 documents, 99 bytes; now 2 documents, 100 bytes"
    assert lines[3:] == [f"old left out: it read other texts of zh ({theirs})"]


def test_matches_of_two_judges_are_compared_where_they_are_the_same():
    matches = [judging.Match([], text, "b") for text in ("x", "y")]
    verdicts = [judging.Verdict("a"), judging.Verdict("b")]
    rows = [match._asdict() | verdict._asdict() for match, verdict in zip(matches, verdicts, strict=True)]
    both, one = (judging.tally_rows(part) | {"matches": part} for part in (rows, rows[:1]))
    shown = tables.describe("win_rate", json.loads(json.dumps(both)), {"one": {"win_rate": one}}, "both")
    rows = [re.split("  +", line) for line in shown.splitlines()]
    assert ["comparisons", "1", "1"] in rows and ["wins", "1", "1"] in rows


def test_a_file_of_several_tasks_is_compared_by_the_data_of_each(tmp_path):
    run = {"results": {"preference": preference("a"), "mmlu": {}}, "data": {"preference": "p.jsonl", "mmlu": "DIR"}}
    (tmp_path / "x.json").write_text(json.dumps(run | {"settings": {"init_from": "out/m"}}), encoding="utf-8")
    same = dict.fromkeys(tables.SAME_SETTINGS)
    assert list(tables.read_others(str(tmp_path / "x.json"), {"preference": "p.jsonl"}, same)) == ["m"]
    with pytest.raises(UserError, match="was measured with data='p.jsonl', not 'q.jsonl'"):
        tables.read_others(str(tmp_path / "x.json"), {"preference": "q.jsonl"}, same)


def test_a_file_that_does_not_say_on_which_data_is_to_be_written_again(tmp_path):
    of = {"documents": 1, "bytes": 2, "bits_per_byte": 1.0}
    run = {"results": {"perplexity": {"domains": {"x": of}, "all": of}}, "settings": {}}
    (tmp_path / "x.json").write_text(json.dumps(run), encoding="utf-8")
    with pytest.raises(UserError, match="x.json does not say on which data; write it again with this version"):
        tables.read_others(str(tmp_path / "x.json"), {"perplexity": "x"}, {})


def test_answers_that_cannot_be_compared_are_refused(tmp_path):
    run = {"results": {"generation": {"answers": [{"answer": "x"}]}}}
    (tmp_path / "x.json").write_text(json.dumps(run), encoding="utf-8")
    with pytest.raises(UserError, match="x.json has no results of generation that can be compared; write it again"):
        tables.read_others(str(tmp_path / "x.json"), {"generation": "x"}, {})


def test_an_interval_from_a_file_and_from_this_run():
    others = {"a": {"another": {"win_rate": 0.5, "interval": [0.25, 0.75]}}}
    shown = tables.describe("another", {"win_rate": 0.5, "interval": (0.25, 0.75)}, others, "b")
    assert shown.count("0.2500 to 0.7500") == 2


def test_names_of_models():
    names = ["out/sft", "out/sft/latest", "out/sft/step_000100/", "path/to/Qwen3-0.6B", ""]
    assert list(map(tables.name_of, names)) == ["sft", "sft", "sft", "Qwen3-0.6B", "this"]


@pytest.mark.parametrize("run", [{"results": [1]}, {"results": {"perplexity": 3}}, {"results": {}, "settings": "x"}])
def test_results_that_a_hand_has_spoilt_are_refused(run, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(run), encoding="utf-8")
    with pytest.raises(UserError, match="x.json is no file that evaluate.py wrote to out"):
        tables.read_others(str(tmp_path / "x.json"), {"perplexity": "x"}, {})
