"""text_metrics.py: figures by hand, by the textbook and by the libraries; answers against the engine run by hand."""

import importlib.util
import json
import math
import random
import statistics
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path

import forks
import pytest
import test_ddp
import torch
from test_model import random_model, tiny_config

import prepare
from groundup.errors import UserError
from groundup.generate.completion import generate
from groundup.generate.engine import Completion, Result
from groundup.generate.sampling import SamplingParams
from groundup.scores import text_metrics
from groundup.scores.text_metrics import (
    evaluate_generation,
    generate_answers,
    measure_answers,
    read_questions,
)
from groundup.tokens.engines import to_json
from groundup.tokens.training import train
from model import Transformer
from tokenizer import CHAT_TEMPLATE, Tokenizer

CORPUS = [Path(random.__file__).read_text(encoding="utf-8")[:20_000], "从前有一只猫，坐在垫子上。你好吗？" * 20]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)


def chat(*turns: str, system: str = "") -> dict:
    roles = ["system"] * bool(system) + ["user", "assistant"] * len(turns)
    texts = ([system] if system else []) + list(turns)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


CHATS = [
    chat("What is two plus two?", "It is four."),
    chat("只说一句话", "猫坐在垫子上。", "再说一句", "从前有一只猫。"),
    chat("Name a colour", "Red", "and this is never answered"),
    chat("你好吗？", "我很好，谢谢。", system="Be brief."),
]


def write(path: Path, rows: list) -> str:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return str(path)


def made() -> tuple[Transformer, Tokenizer]:
    tokenizer = train(CORPUS, 512)
    return random_model(tiny_config(vocab_size=tokenizer.vocab_size, block_size=96), seed=5), tokenizer


@pytest.fixture(scope="module")
def tiny() -> tuple[Transformer, Tokenizer]:
    return made()


# ---- figures ---------------------------------------------------------------------------------------------------------


def bleu_by_hand(answers: list[list[str]], references: list[list[str]]) -> float:
    """Papineni et al. (2002), with the k-th order that has no match counted as 1 / 2**k."""
    logs, zeros = 0.0, 0
    for n in range(1, 5):
        right = total = 0
        for answer, reference in zip(answers, references, strict=True):
            grams = [Counter(tuple(x[i : i + n]) for i in range(len(x) - n + 1)) for x in (answer, reference)]
            right, total = right + (grams[0] & grams[1]).total(), total + grams[0].total()
        zeros += right == 0
        logs += math.log((right or 0.5**zeros) / total) / 4
    lengths = [sum(map(len, texts)) for texts in (answers, references)]
    return 100 * math.exp(logs + min(0.0, 1 - lengths[1] / lengths[0]))


def test_bleu_by_hand_and_by_language():
    pytest.importorskip("sacrebleu")
    pairs = [
        ("the cat sat on the mat", "the cat sat on a red mat today"),
        ("那只猫坐在垫子上", "一只猫坐在红色的垫子上面"),
        ("a dog ran home", "my dog ran to his home"),
        ("他说你好", "他对我说你好"),
        ("", "nothing came"),
    ]
    answers, references = map(list, zip(*pairs, strict=True))
    found = text_metrics.bleu(answers, references)
    english, chinese = ([[texts[i] for i in rows] for texts in (answers, references)] for rows in ((0, 2, 4), (1, 3)))
    assert found["bleu_13a"] == pytest.approx(bleu_by_hand(*([x.split() for x in texts] for texts in english)))
    assert found["bleu_zh"] == pytest.approx(bleu_by_hand(*([list(x) for x in texts] for texts in chinese)))
    assert (found["bleu_13a_n"], found["bleu_zh_n"]) == (3, 2)
    assert "tok:13a" in found["bleu_13a_signature"] and "tok:zh" in found["bleu_zh_signature"]
    assert set(text_metrics.bleu(["red"], ["red"])) == {"bleu_13a", "bleu_13a_n", "bleu_13a_signature"}


def f_measure(answer: tuple, reference: tuple) -> float:
    @lru_cache(None)
    def lcs(i: int, j: int) -> int:
        if i == len(answer) or j == len(reference):
            return 0
        return 1 + lcs(i + 1, j + 1) if answer[i] == reference[j] else max(lcs(i + 1, j), lcs(i, j + 1))

    n = lcs(0, 0)
    return 2 * n / (len(answer) + len(reference)) if n else 0.0  # 2PR / (P + R)


def test_rouge_l_is_the_librarys_in_english_and_by_characters_in_chinese():
    scorers = pytest.importorskip("rouge_score.rouge_scorer")
    own, theirs = text_metrics.RougeL(), scorers.RougeScorer(["rougeL"])
    rng, words = random.Random(1), "The cat, sat_on a mat-rug: 42 Times! don't".split()
    for _ in range(50):
        answer, reference = (" ".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(2))
        assert own.score(answer, reference) == pytest.approx(theirs.score(reference, answer)["rougeL"].fmeasure)
        answer, reference = ("".join(rng.choices("天地玄黄宇宙", k=rng.randint(1, 12))) for _ in range(2))
        assert own.score(answer, reference) == pytest.approx(f_measure(tuple(answer), tuple(reference)))
    assert own.score("用GPT写。", "我用gpt写") == pytest.approx(2 * 3 / (3 + 4))  # GPT is one word, the mark none
    assert own.score("", "猫") == 0


def test_figures_of_all_answers_by_hand():
    pytest.importorskip("sacrebleu"), pytest.importorskip("rouge_score")
    references = ["It is four.", "Red", "猫坐着", "a b c d"]
    answers = [" It is four. ", "red!", "狗跑了", "x x x x x"]
    found, of_each = measure_answers(answers, references)
    assert [one["exact_match"] for one in of_each] == [True, False, False, False] and found["exact_match"] == 0.25
    assert found["exact_match_se"] == pytest.approx(statistics.stdev([1, 0, 0, 0]) / 2)
    assert found["rouge_l"] == pytest.approx(sum([1, 1, 0, 0]) / 4)


@pytest.mark.parametrize("text, said", [
    ("4", "4"),
    (" 4 ", " 4 "),
    ("<think>\n2 + 2\n</think>\n\n4", "4"),
    ("\n<think></think>4", "4"),
    ("<think>It may be 5", ""),
    ("It may be 5</think>\n4", "4"),  # the prompt has opened the thoughts
    ("<think>a</think>Write <think> or </think>.", "Write <think> or </think>."),
])  # fmt: skip
def test_thoughts_are_no_part_of_what_is_said(text, said):
    pytest.importorskip("sacrebleu"), pytest.importorskip("rouge_score")
    assert text_metrics.without_thoughts(text) == said
    plain = measure_answers([said, "yes"], ["4", "yes"])
    assert measure_answers([text, "yes"], ["<think>Two and two</think>\n\n4", "yes"]) == plain


def test_how_answers_end():
    ends = [("a", "stop", True, 3), (" \n", "stop", False, 1), ("b", "length", False, 8)]
    ends.append(("<think>c", "length", False, 4))  # nothing is said
    found = text_metrics.measure_ends([text_metrics.Generated(*end) for end in ends])
    assert found == {"self_stop": 1 / 4, "empty": 2 / 4, "mean_tokens": 4}


# ---- questions -------------------------------------------------------------------------------------------------------


def test_the_last_answer_is_the_reference(tmp_path):
    alone = {"messages": [{"role": "assistant", "content": "I speak first."}]}
    path = write(tmp_path / "chats.jsonl", [CHATS[0], {"nothing": 1}, alone, *CHATS[1:]])
    questions, left_out, places = read_questions(path)
    assert [one.reference for one in questions] == ["It is four.", "从前有一只猫。", "Red", "我很好，谢谢。"]
    assert [message["content"] for message in questions[1].prompt] == ["只说一句话", "猫坐在垫子上。", "再说一句"]
    assert [message["role"] for message in questions[3].prompt] == ["system", "user"]
    assert left_out == {"not understood": 1, text_metrics.NO_PROMPT: 1} and "chats.jsonl:2" in places[0]
    assert read_questions(f"{path},{path}", limit=5)[0] == questions + questions[:1]


def test_questions_in_gbk_and_in_a_prepared_directory(tmp_path):
    more = chat("小河边有什么？", "河边有一棵老树，树下坐着一位老人，他正在给孩子们讲从前的故事。")
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in [*CHATS, more])
    (tmp_path / "gbk.jsonl").write_bytes(text.encode("gb18030"))
    assert read_questions(str(tmp_path / "gbk.jsonl"))[0][1].reference == "从前有一只猫。"
    source = write(tmp_path / "many.jsonl", [chat(f"Question {i}", f"Answer {i}") for i in range(40)])
    flags = [f"--input={source}", f"--out_dir={tmp_path / 'data'}", "--kind=chat", "--val_fraction=0.3", "--workers=1"]

    script = Path(prepare.__file__)
    forks.run([sys.executable, script, *flags], check=True, capture_output=True)
    held_out = [json.loads(line) for line in (tmp_path / "data/val.jsonl").read_text(encoding="utf-8").splitlines()]
    found, _, _ = read_questions(str(tmp_path / "data"))
    assert [one.reference for one in found] == [row["messages"][-1]["content"] for row in held_out]
    assert 0 < len(found) < 40


def test_mistakes_are_said_in_one_line(tmp_path, tiny, monkeypatch):
    empty, alone = write(tmp_path / "empty.jsonl", []), {"messages": [{"role": "assistant", "content": "I"}]}
    with pytest.raises(UserError, match="empty"):
        read_questions(empty)
    with pytest.raises(UserError, match="before its answer"):
        read_questions(write(tmp_path / "alone.jsonl", [alone]))
    with pytest.raises(UserError, match="no conversation of ' , '"):
        read_questions(" , ")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sacrebleu" else 1)
    with pytest.raises(UserError, match="^generated: sacrebleu missing; run: pip install sacrebleu"):
        evaluate_generation(*tiny, empty, GREEDY)


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_answers_are_the_engines(tiny):
    """And do not depend on the batch size; a prompt that does not fit has none."""
    model, tokenizer = tiny
    prompts = [[{"role": "user", "content": "word " * 100}], *(row["messages"][:1] for row in CHATS[:3])]
    params = SamplingParams(max_new_tokens=20, temperature=0.7, eos_ids=tokenizer.stop_ids)
    found = generate_answers(model, tokenizer, prompts, params, batch_size=2)
    assert found == generate_answers(model, tokenizer, prompts, params, batch_size=5)
    assert found[0] is None
    for messages, answer in zip(prompts[1:], found[1:], strict=True):
        ids = tokenizer.render(messages, add_generation_prompt=True)[0]
        completion = generate(model, tokenizer, [ids], params)[0].completions[0]
        assert (answer.text, answer.finish_reason) == (completion.text, completion.finish_reason)
        plain = [i for i in completion.ids if i not in tokenizer.stop_ids]
        assert answer.n_tokens == len(plain) and answer.stopped == (completion.finish_reason == "stop")


def test_who_ended_an_answer(tiny, monkeypatch):
    model, tokenizer = tiny
    ends = [("stop", tokenizer.im_end_id), ("stop", "\n\n"), ("length", None), ("stop", 65)]
    results = [(k, Result([1], [Completion("x", [65] * 4, *end, None, 0.0)], None)) for k, end in enumerate(ends)]
    monkeypatch.setattr(text_metrics.Engine, "answer", lambda *_: iter(reversed(results)))
    found = generate_answers(model, tokenizer, [CHATS[0]["messages"][:1]] * 4, GREEDY, 4)
    assert [answer.stopped for answer in found] == [True, False, False, False]  # 65: a stop id of the user's
    assert [answer.n_tokens for answer in found] == [3, 4, 4, 3]


@pytest.mark.parametrize("opening", ["<think>\n", "<think>\n\n</think>\n\n", ""])
def test_thoughts_that_the_prompt_opens_belong_to_the_answer(tiny, monkeypatch, opening):
    model, tokenizer = tiny
    template = CHAT_TEMPLATE + "{% if add_generation_prompt %}{{ " + repr(opening) + " }}{% endif %}"
    config = json.loads(tokenizer.files["tokenizer_config.json"]) | {"chat_template": template}
    tokenizer = Tokenizer(tokenizer.files | {"tokenizer_config.json": to_json(config)})
    results = [(0, Result([1], [Completion("2 + 2", [65], "length", None, None, 0.0)], None))]
    monkeypatch.setattr(text_metrics.Engine, "answer", lambda *_: iter(results))
    [found] = generate_answers(model, tokenizer, [CHATS[0]["messages"][:1]], GREEDY, 1)
    assert found.text == ("<think>\n2 + 2" if opening == "<think>\n" else "2 + 2")


def test_the_whole(tiny, tmp_path):
    pytest.importorskip("sacrebleu"), pytest.importorskip("rouge_score")
    model, tokenizer = tiny
    long = chat("word " * 100, "never")
    path = write(tmp_path / "chats.jsonl", [*CHATS, long, {"nothing": 1}])
    found = evaluate_generation(model, tokenizer, path, GREEDY, batch_size=3)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["n"] == 4 and found["left_out"] == {"not understood": 1, text_metrics.TOO_LONG: 1}
    answers, references = ([row[key] for row in found["answers"]] for key in ("answer", "reference"))
    assert references == ["It is four.", "从前有一只猫。", "Red", "我很好，谢谢。"]
    for name, value in measure_answers(answers, references)[0].items():
        assert found[name] == value, name
    assert found["bleu_zh_n"] == 2 and found["answers"][2]["finish_reason"] in ("stop", "length")
    assert found["rouge_l"] == pytest.approx(statistics.mean(row["rouge_l"] for row in found["answers"]))
    with pytest.raises(UserError, match="block_size=96"):
        evaluate_generation(model, tokenizer, write(tmp_path / "long.jsonl", [long]), GREEDY)


def two_ranks(world, report) -> None:
    torch.set_num_threads(1)
    prompts = [row["messages"][:1] for row in CHATS[:3]]
    found = [generate_answers(*made(), prompts[:n], GREEDY, batch_size=2) for n in (3, 1)]
    report("answers", json.dumps(found))


@pytest.mark.dist
def test_ranks_share_the_prompts(tiny, tmp_path):
    """Also where one of them has nothing to do."""
    prompts = [row["messages"][:1] for row in CHATS[:3]]
    alone = [generate_answers(*tiny, prompts[:n], GREEDY, batch_size=2) for n in (3, 1)]
    reports, codes = test_ddp.start_ranks(two_ranks, 2, tmp_path)
    assert codes == [0, 0], reports
    assert [report["answers"][1] for report in reports] == [repr(json.dumps(alone))] * 2
