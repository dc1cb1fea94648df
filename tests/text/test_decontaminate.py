"""decontaminate.py: against sets of tuples, and in every layout that evaluation files have."""

import csv
import gzip
import json
import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import regex

from groundup.errors import UserError
from groundup.text import dedup
from groundup.text.clean import clean
from groundup.text.decontaminate import Evals

SINGLE = r"[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}]"
UNIT = regex.compile(rf"(?=[\p{{L}}\p{{M}}\p{{N}}]){SINGLE}|(?:(?!{SINGLE})[\p{{L}}\p{{M}}\p{{N}}])+")
EDGE_TEXTS = ["", " \n!?。", "a", "甲", "a b c d e", "甲乙丙丁戊", "同" * 50]
WORDS = [f"w{i}" for i in range(3000)]
HAN = [chr(0x4E00 + i) for i in range(3000)]


def english(rng: random.Random, n: int) -> str:
    return " ".join(rng.choices(WORDS, k=n))


def chinese(rng: random.Random, n: int) -> str:
    return "".join(rng.choices(HAN, k=n))


QUESTION = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
CHINESE_QUESTION = "下列关于光合作用的说法中哪一项是正确的"  # 19 units


def write_rows(path: Path, rows: list[list[str]]) -> str:
    with open(path, "w", encoding="utf-8", newline="") as f:
        csv.writer(f).writerows(rows)
    return str(path)


@pytest.fixture
def cmmlu(tmp_path: Path) -> str:
    rows = [["", "Question", "A", "B", "C", "D", "Answer"]]
    rows += [["0", CHINESE_QUESTION, "只在夜间进行", "需要光", "不需要水", "没有产物", "B"]]
    rows += [["1", QUESTION, "red, green", 'a "blue" one', "none\nof these", "all", "A"]]
    rows += [["2", "水的沸点", "一百度", "零度", "", "", "A"]]  # 9 units
    rows += [["3", "谁？", "甲", "乙", "丙", "丁", "A"]]  # 5 units
    return write_rows(tmp_path / "cmmlu.csv", rows)


def unit_strings(text: str) -> list[str]:
    return UNIT.findall(text.lower())


def first_matches(evals: Evals, texts: list[str]) -> list[int]:
    """The first unit of the first run of an evaluation item in each text, or -1."""
    units = dedup.units(texts)
    first = [-1] * len(texts)
    for place in evals.find(units)[0].tolist()[::-1]:
        text = int(np.searchsorted(units.starts, place, "right")) - 1
        first[text] = place - int(units.starts[text])
    return first


def first_match(evals: Evals, text: str) -> int:
    return first_matches(evals, [text])[0]


def test_a_run_of_13_words_is_found_and_one_of_12_is_not(cmmlu: str) -> None:
    evals = Evals.from_files([cmmlu])
    words = QUESTION.split()
    assert first_match(evals, "before it " + " ".join(words[1:14]) + " after") == 2
    assert first_match(evals, "before it " + " ".join(words[1:13]) + " after") == -1
    item = CHINESE_QUESTION + "只在夜间进行，需要光"  # in Chinese, of 26 characters and one of 25
    assert first_match(evals, "前文。" + item[1:28] + "后文") == 2
    assert first_match(evals, "前文。" + item[1:26] + "后文") == -1
    assert first_match(evals, "前文。" + CHINESE_QUESTION + "后文") == 2  # or the whole question
    assert first_match(evals, "前文。" + CHINESE_QUESTION[1:] + "后文") == -1
    # its choices belong to it
    assert first_match(evals, "thirteen fourteen fifteen red, green a blue one none of these all more") == -1
    assert first_match(evals, "twelve thirteen fourteen fifteen red, green a blue one none of these all more") == 0


def test_layout_case_and_width_do_not_hide_a_match(cmmlu: str) -> None:
    evals = Evals.from_files([cmmlu])
    assert first_match(evals, QUESTION.upper().replace(" ", " \n\n- ")) == 0
    wide = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else "\u3000" for c in QUESTION)
    assert wide[:3] == "ｏｎｅ" and first_match(evals, wide) == 0
    assert first_match(evals, "\n".join(CHINESE_QUESTION)) == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: unicodedata.normalize("NFD", text),  # as files made on a Mac have it
        lambda text: text.replace("u", "u\u200b"),  # a zero-width space
        lambda text: "\ufeff" + text.replace("u", "\x01u"),
    ],
    ids=["decomposed", "zero-width", "control"],
)
def test_evaluation_text_is_cleaned_as_documents_are(tmp_path: Path, damage) -> None:
    french = "À la réflexion, quelle était l'épaisseur de la vitre éclairée où la lumière fut réfractée"
    vietnamese = "Câu nào sau đây là câu trả lời đúng nhất cho vấn đề được nêu trong bài viết"
    korean = "다음 글을 읽고 물음에 답하시오 그리고 가장 알맞은 것을 모두 고르시오 다음 중 옳은 것은 무엇"
    for question in (french, vietnamese, korean):
        path = write_rows(tmp_path / "e.csv", [["question", "A"], [damage(question), damage("réponse")]])
        evals = Evals.from_files([path])
        assert first_match(evals, clean(damage(question))) == first_match(evals, question) == 0


def test_short_items_are_matched_whole_or_counted(cmmlu: str) -> None:
    evals = Evals.from_files([cmmlu])
    assert evals.n_items == 4 and evals.n_unprotected == 1
    assert first_match(evals, "常识：水的沸点，一百度，零度。") == 2
    assert first_match(evals, "常识：水的沸点，一百度，零。") == -1


def test_matches_equal_sets_of_tuples(cmmlu: str, tmp_path: Path) -> None:
    rng = random.Random(4)
    questions = [english(rng, rng.randrange(3, 40)) if rng.random() < 0.5 else chinese(rng, rng.randrange(3, 40))
                 for _ in range(200)]  # fmt: skip
    path = tmp_path / "items.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": q}, ensure_ascii=False) for q in questions), encoding="utf-8")
    runs: set[tuple] = set()
    for question in questions:
        strings = unit_strings(question)
        length = min(13 if " " in question else 26, len(strings))
        if length >= 8:
            runs |= {tuple(strings[i : i + length]) for i in range(len(strings) - length + 1)}
    texts = [*EDGE_TEXTS, chinese(rng, 70_000) + "。" + next(q for q in questions if " " not in q and len(q) > 15)]
    for _ in range(400):
        question = rng.choice(questions)
        begin = rng.randrange(len(question))
        texts.append(english(rng, 3) + " " + question[begin:] + " " + chinese(rng, 3))
    texts += [q for q in questions for q in (q[: len(q) // 2], q[len(q) // 2 :])]  # matches across texts do not count
    expected = []
    for text in texts:
        strings = unit_strings(text)
        hit = (i for i in range(len(strings)) if any(tuple(strings[i : i + n]) in runs for n in range(8, 27)))
        expected.append(next(hit, -1))
    assert 20 < sum(place >= 0 for place in expected) < len(expected) - 100
    evals = Evals.from_files([str(path)])
    assert first_matches(evals, texts) == expected
    assert first_matches(evals, []) == []
    evals.save(str(tmp_path / "evals.npz"))
    loaded = Evals.load(str(tmp_path / "evals.npz"))
    assert first_matches(loaded, texts) == expected
    assert (loaded.n_items, loaded.n_unprotected) == (200, evals.n_unprotected) and evals.n_unprotected


def test_cut_removes_the_run_and_200_characters_on_each_side(cmmlu: str) -> None:
    evals = Evals.from_files([cmmlu])
    left, middle, right = "L" * 500, "M" * 900, "R" * 500
    text = f"{left} {QUESTION} {middle} {CHINESE_QUESTION} {right}"
    assert evals.cut(text) == "\n".join(["L" * 301, "M" * 502, "R" * 301])
    assert first_match(evals, evals.cut(text)) == -1
    assert evals.cut(f"{left} \n{QUESTION}") == "L" * 302
    assert evals.cut(QUESTION) == ""
    around = QUESTION.replace(" eight", "-" * 200 + CHINESE_QUESTION + "-" * 200 + "eight")
    assert first_match(evals, QUESTION.replace(" ", "\n")) == 0 and evals.cut(around) == ""  # joined to an item again
    clean = "  nothing here \n\n to cut "
    assert evals.cut(clean) == clean


def test_evaluation_files_of_all_kinds(tmp_path: Path) -> None:
    row = [QUESTION, "red", "green", "2", "2", "C"]
    mmlu = write_rows(tmp_path / "mmlu.csv", [row, [CHINESE_QUESTION, "1", "1", "1", "2", "A"]])
    ceval = write_rows(tmp_path / "ceval.csv", [["id", "question", "A", "B", "C", "D", "answer", "explanation"],
                                                ["0", CHINESE_QUESTION, "a", "b", "c", "d", "A", ""]])  # fmt: skip
    rows = [
        {"question": "short one", "choices": QUESTION.split(), "answer": 3},
        {"question": "short one", "choices": {"text": QUESTION.split(), "label": ["A"] * 15}},
        {"Question": "short one", "A": QUESTION[:27], "B": QUESTION[27:]},
        {"prompt": QUESTION},
        {"text": QUESTION},
        {"instruction": "short one", "input": QUESTION, "output": "x"},
    ]
    for name, read in (("mmlu", mmlu), ("ceval", ceval)):
        evals = Evals.from_files([read])
        assert evals.n_items == {"mmlu": 2, "ceval": 1}[name] and first_match(evals, CHINESE_QUESTION) == 0
        assert (first_match(evals, QUESTION) == 0) == (name == "mmlu")
    for i, item in enumerate(rows):
        path = tmp_path / f"{i}.jsonl.gz"
        path.write_bytes(gzip.compress(json.dumps(item).encode() + b"\n"))
        assert first_match(Evals.from_files([str(path)]), " ".join(QUESTION.split()[2:])) == 0, item
    gb = tmp_path / "gb.csv"
    more = "2,河边的老树下坐着一位老人，他正在给孩子们讲什么样的故事？,古代的,现代的,外国的,家里的,A,\n"
    gb.write_bytes((Path(ceval).read_text(encoding="utf-8").rstrip() + "\n" + more).encode("gb18030"))
    both = Evals.from_files([str(gb), mmlu])
    assert both.n_items == 4 and first_match(both, CHINESE_QUESTION) == 0


def test_held_out_conversations_and_pairs_are_evaluation_files(tmp_path: Path) -> None:
    """Of their turns the longest of the user is the item, whatever the layout of the row."""
    turns = [("system", "Be brief. " * 30), ("user", "Hello there"), ("assistant", "a long answer " * 30)]
    turns += [("user", QUESTION), ("assistant", "fifteen numbers")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rows = [
        {"messages": messages, "source": "desk"},
        {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": "yes"}]},
        {"prompt": messages[:-1], "chosen": "good", "rejected": "bad"},
        {"chosen": messages[:-1] + [{"role": "assistant", "content": "good"}], "rejected": messages},
    ]
    for i, row in enumerate(rows):
        path = tmp_path / f"{i}.jsonl"
        path.write_text(json.dumps(row) + "\n", "utf-8")
        evals = Evals.from_files([str(path)])
        assert evals.n_items == 1 and evals.n_unprotected == 0
        assert first_match(evals, "As asked: " + QUESTION) == 2, row
        assert first_match(evals, "a long answer " * 30 + "Be brief. " * 30) == -1


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", '{"messages": [{"role": "assistant", "content": "Hi"}]}\n', "a.jsonl:1: no question"),
        ("a.csv", "id,label\n1,2\n", "no question"),
        ("a.csv", "question,A\nwhat,1,2\n", "a.csv:2: bad_csv: 3 fields"),
        ("a.csv", b"question,A\n\xff\xff,1\n", "bad_encoding"),
        ("a.csv", 'question,A\n"what,1\n', "mend"),
        ("a.jsonl", '{"question": "x"}\n{"question"', "a.jsonl:2: bad_json"),
        ("a.jsonl", '{"answer": "x"}\n', "a.jsonl:1: no question"),
        ("a.jsonl", "[1]\n[2]\n", "not an evaluation file"),
        ("a.txt", "words", "jsonl"),
        ("a.csv", "", "no items"),
        ("a.csv", "question,A\n", "no items"),
        ("a.jsonl", "", "no items"),
        ("a.csv.gz", gzip.compress(b"question,A\nwhat,1\n", mtime=0)[:-9], "truncated"),
    ],
)
def test_what_is_no_evaluation_file_is_an_error_of_one_line(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as error:
        Evals.from_files([str(path)])
    assert "\n" not in str(error.value) and name in str(error.value)


def test_a_missing_file_is_an_error_and_no_file_protects_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        Evals.from_files([str(tmp_path / "nowhere.csv")])
    empty = Evals.from_files([])
    assert empty.n_items == 0 and first_match(empty, QUESTION) == -1
