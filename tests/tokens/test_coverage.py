"""Whether a tokenizer knows the characters of the data: figures by hand, and the line that trainers print."""

import json

import pytest

from groundup.tokens.conversations import ChatCorpus, ChatReader
from groundup.tokens.coverage import unfamiliar
from groundup.tokens.pairs import PairCorpus
from groundup.tokens.prompts import PromptCorpus
from groundup.tokens.training import train
from tokenizer import Tokenizer, chat_ready

ENGLISH = ["The quick brown fox jumps over the lazy dog. " * 20]
CHINESE = ["你好，请问今天的天气怎么样？", "今天的天气很好，你好吗？"]


@pytest.fixture(scope="module")
def english() -> Tokenizer:
    return chat_ready(train(ENGLISH, 384))


def test_a_tokenizer_that_never_saw_the_characters_is_named_with_figures(english):
    said = unfamiliar(CHINESE, english)
    assert "3.0 tokens a character, 1.00 bytes a token" in said and "\n" not in said
    assert unfamiliar(ENGLISH, english) == "" == unfamiliar([], english)
    few = ENGLISH[0] + CHINESE[0]  # a quotation in an English text
    assert unfamiliar([few], english) == ""


def test_a_tokenizer_that_was_trained_on_them_is_not():
    assert unfamiliar(CHINESE, train(CHINESE * 20, 512)) == ""


class Letters:
    """A tokenizer without bytes: each character is an id, and one that it does not know is 0."""

    special_ids = frozenset({0})

    def encode(self, text: str) -> list[int]:
        return [1 + "你好".find(char) for char in text]


def test_characters_that_become_unknown_ids_are_counted():
    assert unfamiliar(["你好你好"], Letters()) == ""
    said = unfamiliar(["你好你吗"], Letters())
    assert said.startswith("the tokenizer does not know 25.0 % of the characters, such as '吗'")


def test_of_long_texts_only_the_beginnings_are_kept_and_looked_at(english, tmp_path):
    rows = [{"question": f"{i}", "answer": CHINESE[0] * 2_000} for i in range(200)]
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "chat.jsonl").write_text("".join(lines), encoding="utf-8")
    reader = ChatReader(english, 512)
    assert len(list(reader.read(str(tmp_path / "chat.jsonl")))) == 200
    assert len(reader.texts) == 200 and 900_000 < sum(map(len, reader.texts)) <= 1_000_000
    for _ in range(2):  # at the start and for the card
        assert any("not trained on such text" in line for line in reader.report("chat"))


def test_the_trainers_say_it(english, tmp_path):
    rows = {"chat": [], "pair": [], "prompt": []}
    for i in range(20):
        asked, answered = (f"{i}：{text}" for text in CHINESE)
        rows["chat"].append({"question": asked, "answer": answered})
        rows["pair"].append({"prompt": asked, "chosen": answered, "rejected": CHINESE[0]})
        rows["prompt"].append({"prompt": asked})
    for kind, some in rows.items():
        lines = [json.dumps(row) + "\n" for row in some]
        (tmp_path / f"{kind}.jsonl").write_text("".join(lines), encoding="utf-8")
    corpora = {"chat": ChatCorpus, "pair": PairCorpus, "prompt": PromptCorpus}
    for kind, corpus in corpora.items():
        report = corpus(str(tmp_path / f"{kind}.jsonl"), english, 512, seed=1, val_fraction=0.25).report()
        (line,) = [line for line in report if "not trained on such text" in line]
        assert line.startswith("warning     ")
