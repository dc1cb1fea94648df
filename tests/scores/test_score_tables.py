"""score_tables.py: tables as a person would write them."""

import math
import re

from groundup.scores import domains
from groundup.scores.score_tables import describe_choices, describe_domains, describe_figures, percent, table


def test_tables_are_aligned_where_characters_are_wide():
    shown = table(["name", "n", "share"], [["中文", 1234, 0.5], ["x", 5, math.nan], ["big", 0, 1e9]])
    assert shown.splitlines() == [
        "name      n   share",
        "中文  1,234  0.5000",
        "x         5       -",
        "big       0   1e+09",
    ]


def test_figures_of_any_task_are_shown():
    found = {"n": 3, "rate": 0.25, "note": "x", "rows": [1], "left": {"long": 2}, "of": {"a": {"n": 1, "t": "s"}}}
    shown = describe_figures(found)
    assert re.findall(r"^(\w+) +(\S+)$", shown, re.MULTILINE)[:3] == [("n", "3"), ("rate", "0.2500"), ("note", "x")]
    assert "left: long 2" in shown
    assert "rows" not in shown


def test_an_interval_and_a_rate_that_nothing_decided_are_shown():
    assert describe_figures({"win_rate": 0.5, "interval": (0.25, 0.75)}).splitlines() == [
        "win_rate            0.5000",
        "interval  0.2500 to 0.7500",
    ]
    assert [line.split() for line in describe_figures({"win_rate": None, "interval": None}).splitlines()] == [
        ["win_rate", "-"],
        ["interval", "-"],
    ]


def test_notes_of_domains_are_shown():
    figures = domains.summarize([domains.Loss(8 * math.log(2), 4, 8, 2)])
    found = {"domains": {"zh": figures | {"notes": ["empty, left out: 1 documents"]}}, "all": figures}
    header, row, note = describe_domains(found).splitlines()
    assert dict(zip(header.split(), row.split(), strict=True)) == {
        "domain": "zh", "documents": "1", "tokens": "4", "nats/token": "1.3863", "perplexity": "4.0000",
        "bits/byte": "1.0000", "bits/char": "4.0000", "nats/doc": "5.5452",
    }  # fmt: skip
    assert note == "zh: empty, left out: 1 documents"


def test_accuracies_are_in_per_cent_with_their_errors():
    score = {"n": 4, "chance": 0.25, "acc": 0.5, "acc_stderr": 0.2887}
    found = {"task": "arc", "shots": 0, "notes": ["a note"], "fewer_shots": 0, "cut": 1, "groups": {}}
    found |= {"overall": score, "subjects": {"文": score | {"acc_stderr": None}, "b": score}}
    assert describe_choices(found | {"subject_mean": {"acc": 0.5}}).splitlines() == [
        "arc, 0 shots",
        "  a note",
        "  1 prompts lost their beginning to fit",
        "                  n  chance           acc",
        "overall           4    25.0  50.0 +- 28.9",
        "文                4    25.0          50.0",
        "b                 4    25.0  50.0 +- 28.9",
        "mean of subjects                     50.0",
    ]
    assert percent(0.5, None) == "50.0"
