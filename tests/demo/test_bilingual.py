"""bilingual.py: what it makes is complete, the same each time, and never asks what questions.jsonl asks."""

import json
import re
from itertools import combinations, islice
from pathlib import Path
from unittest import mock

import pytest

from groundup.demo import bilingual
from groundup.demo.bilingual import demo_rows
from groundup.demo.python_talks import question_about
from groundup.errors import UserError

QUESTIONS = Path(bilingual.__file__).with_name("questions.jsonl")
HAN = re.compile("[\u4e00-\u9fff]")


@pytest.fixture(scope="module")
def talks(described):
    with mock.patch.object(bilingual, "described", lambda: described):
        return {language: [row["messages"] for row in demo_rows(language, "chat")] for language in ("en", "zh")}


@pytest.fixture(scope="module")
def key():
    return [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_texts_are_complete_and_the_same_each_time(language, monkeypatch):
    """Of every fortieth module: to read all takes seconds."""
    sources = list(islice(bilingual.library_sources(), 0, None, 40))
    monkeypatch.setattr(bilingual, "library_sources", lambda: sources)
    texts = list(demo_rows(language, "text"))
    assert texts == list(demo_rows(language, "text"))
    assert len(set(texts)) > 0.98 * len(texts) > 1300
    assert not [text for text in texts if "\ufffd" in text or not text.strip()]
    made = texts[-bilingual.N_STORIES :]
    assert not re.findall("[{}|]", "".join(made))
    assert all(bool(HAN.search(text)) == (language == "zh") for text in made)


def test_a_word_of_a_story_stays_the_same(monkeypatch):
    plot = "{name} met {name2}. | {name} saw {name2}.\n{name} left {name2}."
    blocks = ["# en\nname: A | B | C", plot, "# zh\nname: D", "{name}"]
    monkeypatch.setattr(bilingual, "read", lambda name: blocks)
    found = set(bilingual.stories("en"))
    pairs = [(a, b) for two in combinations("ABC", 2) for a, b in (two, two[::-1])]
    assert found == {f"{a} {verb} {b}. {a} left {b}." for a, b in pairs for verb in ("met", "saw")}
    assert set(bilingual.stories("zh")) == {"D"}


def test_every_question_is_whole_and_asked_once(talks):
    for language, found in talks.items():
        assert len(found) > 1500
        assert len({turns[0]["content"] for turns in found}) == len(found)
        for question, answer in ([turn["content"] for turn in turns] for turns in found):
            assert question and answer and not re.search(r"[{}|]", question + answer), (question, answer)
            assert bool(HAN.search(question)) == (language == "zh") and "; " not in question


def test_who_is_bigger(talks):
    """Of two things the later one in the list, whichever is asked first; what is not asked is never shown."""
    subject = next(one for one in bilingual.subjects("en") if one.name.startswith("bigger"))
    order = [fact[0] for fact in subject.facts]
    asked, kept = (list(bilingual.comparisons(subject, "en", given)) for given in (True, False))
    assert len(asked) + len(kept) == len(order) * (len(order) - 1)
    for question, answer in asked + kept:
        first, second = re.fullmatch(r"W.* bigger[,:] (.*) or (.*)\?", question).groups()
        big, small = sorted((first, second), key=order.index, reverse=True)
        assert answer.lower() == f"{big} is bigger than {small}."
    shown = {turns[1]["content"] for turns in talks["en"]}
    assert not shown & {answer for _, answer in kept}


def test_the_thirty_questions_are_never_asked(talks, key, described):
    """Not in these words; what they ask for can be known: the answer is that of other questions, or of a comparison
    that follows from others."""
    trained = [turns for language in talks.values() for turns in language]
    asked = {turns[0]["content"] for turns in trained}
    asked |= {question_about(subject)["content"] for subject, _ in described}
    answers = {turns[1]["content"] for turns in trained}
    assert len(key) == 30 and sum(bool(HAN.search(row["question"])) for row in key) == 15
    assert not [row for row in key if row["question"] in asked]
    compared = [row["answer"] for row in key if re.search("bigger|\u6bd4.*\u5927", row["answer"])]
    assert len(compared) == 6 and not answers & set(compared)
    assert {row["answer"] for row in key} - set(compared) <= answers


def test_there_are_no_pairs():
    with pytest.raises(UserError, match="prepare: demo-zh has no pairs of answers; python-docs has"):
        list(demo_rows("zh", "preference"))
