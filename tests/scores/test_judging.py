"""judging.py: tallies by hand, reward.py's own evaluation, and an endpoint of our own as judge."""

import ast
import functools
import itertools
import json
import math
import random
import re
import socket
import statistics
from pathlib import Path

import numpy as np
import pytest
import saved
import test_ddp
import torch
from test_model import tiny_config
from test_self_instruct import Endpoint as Service

import reward
from groundup.align import losses, reward_model
from groundup.align.reward_model import RewardModel
from groundup.errors import UserError
from groundup.files import answer_files
from groundup.generate.answers import Answers
from groundup.generate.completion import generate, prompt_ids
from groundup.generate.engine import Engine
from groundup.generate.sampling import SamplingParams
from groundup.scores import judging
from groundup.scores.client import Endpoint, Reply
from groundup.scores.judging import (
    Match,
    Verdict,
    endpoint_judge,
    evaluate_preference,
    read_answers,
    win_rate,
)
from groundup.tokens.pairs import PairCorpus
from groundup.tokens.training import train
from model import Transformer
from tokenizer import Tokenizer

CORPUS = [Path(random.__file__).read_text(encoding="utf-8")[:20_000], "从前有一只猫，坐在垫子上。你好吗？" * 20]


def ask(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def rows(*pairs: tuple[str, str]) -> list[dict]:
    return [{"prompt": ask(prompt), "answer": answer} for prompt, answer in pairs]


def write(path: Path, lines: list) -> str:
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in lines), encoding="utf-8")
    return str(path)


def write_answers(path: Path, lines: list, **settings) -> str:
    """A file as sample.py writes it, with its settings beside it."""
    answer_files.write_settings(path, {"model": "m"} | settings)
    return write(path, lines)


def pair(i: int) -> dict:
    rng = random.Random(i)
    answers = [f"It is {i}" + " indeed" * rng.randrange(6), f"是{i + 1}" + "真的" * rng.randrange(6)]
    rng.shuffle(answers)
    return {"prompt": ask(f"What is {i}?"), "chosen": answers[0], "rejected": answers[1]}


def made() -> tuple[RewardModel, Tokenizer]:
    tokenizer = train(CORPUS, 512)
    torch.manual_seed(1)
    model = RewardModel(tiny_config(vocab_size=tokenizer.vocab_size, block_size=96))
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.3)
    return model.eval(), tokenizer


@pytest.fixture(scope="module")
def judge() -> tuple[RewardModel, Tokenizer]:
    return made()


# ---- pairs -----------------------------------------------------------------------------------------------------------


def test_preference_is_what_reward_py_measures(judge, tmp_path, monkeypatch):
    """Its batches are padded pairs; ours are rows by length, whatever the batch size."""
    model, tokenizer = judge
    path = write(tmp_path / "pairs.jsonl", [*map(pair, range(60)), {"nothing": 1}, pair(1) | {"chosen": "long " * 99}])
    found = evaluate_preference(*judge, path, batch_size=7)
    corpus = PairCorpus(path, tokenizer, 96, seed=1, val_data=path)
    monkeypatch.setattr(reward, "batch_size", 16)
    monkeypatch.setattr(reward, "stop_signal", lambda: False, raising=False)
    monkeypatch.setattr(reward, "torch_device", torch.device("cpu"), raising=False)
    monkeypatch.setattr(reward, "torch_dtype", torch.float32, raising=False)
    want = reward.evaluate(model, corpus)
    for name in set(want) - {"val_loss"}:
        assert found[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), name
    assert found["n"] == 60 and sum(found["left_out"].values()) == 2 and "pairs.jsonl:61" in found["places"][0]
    right = [1.0] * round(60 * found["accuracy"]) + [0.0] * round(60 * (1 - found["accuracy"]))
    assert found["accuracy_se"] == pytest.approx(statistics.stdev(right) / math.sqrt(60))


def test_a_language_model_prefers_as_dpo_py_measures_it(judge, tmp_path):
    """By the log-probabilities of its own batches, alone and less those of a reference."""
    _, tokenizer = judge
    path = write(tmp_path / "pairs.jsonl", [*map(pair, range(40)), {"nothing": 1}])
    models = []
    for seed in (2, 3):
        torch.manual_seed(seed)
        models.append(Transformer(tiny_config(vocab_size=tokenizer.vocab_size, block_size=96)).eval())
        for p in models[-1].parameters():
            if p.ndim == 2:
                torch.nn.init.normal_(p, std=0.2)
    corpus = PairCorpus(path, tokenizer, 96, seed=1, val_data=path)
    (batches,) = corpus.val_batches(16, 0).values()
    logps = [torch.cat([losses.pair_logps(model, batch)[0] for batch in given], 1)
             for model, given in zip(models, itertools.tee(batches), strict=True)]  # fmt: skip
    for reference, (chosen, rejected) in ((None, logps[0]), (models[1], logps[0] - logps[1])):
        found = evaluate_preference(models[0], tokenizer, path, batch_size=7, reference=reference)
        assert found["n"] == 40 and found["left_out"] == {"not understood": 1}
        assert found["accuracy"] == pytest.approx((chosen > rejected).double().mean().item())
        assert 0 < found["accuracy"] < 1


def test_preference_on_several_files_and_few_pairs(judge, tmp_path):
    model, tokenizer = judge
    paths = [write(tmp_path / f"{name}.jsonl", list(map(pair, some))) for name, some in
             (("a", range(9)), ("b", range(20, 31)))]  # fmt: skip
    right = []
    for i in (*range(5), *range(20, 25)):
        row = pair(i)
        texts = [[*row["prompt"], {"role": "assistant", "content": row[side]}] for side in ("chosen", "rejected")]
        better, worse = saved.score_talks(model, tokenizer, texts)
        right.append(better > worse)
    found = evaluate_preference(*judge, ",".join(paths), limit=5)
    assert found["n"] == 10 and found["accuracy"] == pytest.approx(sum(right) / 10)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    alone = evaluate_preference(*judge, paths[0], limit=1)
    assert alone["accuracy_se"] is None and None in [alone[f"accuracy/{name}"] for name in reward_model.LENGTH_BUCKETS]


# ---- which prompts belong together -----------------------------------------------------------------------------------


def test_answers_of_sample_py_are_read(judge, tmp_path):
    """Of a file that answers.py wrote, in whatever order it did."""
    _, tokenizer = judge
    torch.manual_seed(0)
    model = Transformer(tiny_config(vocab_size=tokenizer.vocab_size, block_size=96))
    talk = [{"role": "system", "content": "Be brief."}, *ask("你好吗？")]
    prompts = [{"prompt": "Hello"}, {"messages": talk, "id": 7}, {"text": "Once upon"}, {"prompt": "a" * 40}]
    params = SamplingParams(max_new_tokens=9, n=2, logprobs=0, eos_ids=tokenizer.stop_ids)
    writer = Answers(write(tmp_path / "prompts.jsonl", prompts), "", str(tmp_path / "out.jsonl"), {"model": "m"})
    encode = functools.partial(prompt_ids, tokenizer, True, "")
    writer.write(Engine(model, tokenizer, 3), params, encode)
    found = read_answers(str(tmp_path / "out.jsonl"))
    assert [row["prompt"] for row in found] == [ask("Hello"), talk, ask("Once upon"), ask("a" * 40)]
    ids = encode("Hello", False)
    assert found[0]["answer"] == generate(model, tokenizer, [ids], params)[0].completions[0].text


def test_a_judge_never_sees_the_datas_own_answer(judge, tmp_path):
    """It ends the rows that sample.py was given, in the shape of any tool; the model answered what precedes it."""
    _, tokenizer = judge
    torch.manual_seed(0)
    model = Transformer(tiny_config(vocab_size=tokenizer.vocab_size, block_size=96)).eval()
    turns = [*ask("1?"), {"role": "assistant", "content": "One."}, *ask("And 2?")]
    given = [
        {"messages": [*turns, {"role": "assistant", "content": "THE REFERENCE"}]},
        {"prompt": [*turns, {"role": "assistant", "content": "THE REFERENCE"}]},
        {"messages": turns, "response": "THE REFERENCE"},
        {"prompt": "And 3?", "response": "THE REFERENCE"},
    ]
    questions = write(tmp_path / "questions.jsonl", given)
    answers = Answers(questions, "", out := str(tmp_path / "a.jsonl"), {"model": "m"})
    encode = functools.partial(prompt_ids, tokenizer, True, "")
    answers.write(Engine(model, tokenizer, 2), SamplingParams(4, temperature=0), encode)
    found = read_answers(out)
    assert [row["prompt"] for row in found] == [turns, turns, turns, ask("And 3?")]
    seen = []
    worse = [row | {"answer": "no"} for row in found]
    win_rate(found, worse, lambda matches: seen.extend(matches) or [Verdict("tie")] * len(matches))
    assert "REFERENCE" not in "".join(judging.judge_prompt(match, swapped=False) for match in seen)


def test_a_judge_sees_the_system_message_that_the_models_were_given(judge, tmp_path):
    """As reward.py --score does: with the message of the settings, unless the row has its own."""
    own = [{"role": "system", "content": "Be brief."}, *ask("3?")]
    lines = [{"prompt": "1?"}, {"messages": ask("2?")}, {"prompt": own}, {"text": "Once"}]
    lines = [row | {"index": i, "completions": [{"text": "no" * i}]} for i, row in enumerate(lines)]
    system = {"role": "system", "content": "Answer in French."}
    paths = [write_answers(tmp_path / name, lines, system=system["content"]) for name in ("a.jsonl", "b.jsonl")]
    of_a, of_b = judging.read_both(*paths)
    want = [[system, *ask("1?")], [system, *ask("2?")], own, ask("Once")]
    assert [row["prompt"] for row in of_a] == [row["prompt"] for row in of_b] == want
    matches, _ = judging.matches_of(of_a, of_b)
    verdict = judging.reward_judge(matches[:1], *judge)[0]
    talk = [*want[0], {"role": "assistant", "content": ""}]
    assert verdict.scores[0] == pytest.approx(saved.score_talks(*judge, [talk])[0])
    assert "Answer in French." in judging.judge_prompt(matches[1], swapped=False)
    other = write_answers(tmp_path / "c.jsonl", lines, system="")
    with pytest.raises(UserError, match="with system='Answer in French.', .*c.jsonl with system=''"):
        judging.read_both(paths[0], other)
    (tmp_path / "b.jsonl.config.json").unlink()
    with pytest.raises(UserError, match="b.jsonl.config.json is missing"):
        judging.read_both(*paths)


def test_mistakes_in_files_of_answers(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        read_answers(str(tmp_path / "none.jsonl"))
    good = {"index": 0, "prompt": "a", "completions": [{"text": "b"}]}
    for bad in ({"prompt": "a"}, {"index": 1, "prompt": "a"}, good | {"completions": []}, {"index": 1, "n": 2}, [1],
                good | {"index": None}):
        with pytest.raises(UserError, match="bad.jsonl:2"):
            read_answers(write_answers(tmp_path / "bad.jsonl", [good, bad]))
    write_answers(tmp_path / "half.jsonl", [])
    (tmp_path / "half.jsonl").write_text(json.dumps(good) + '\n{"index": 1, "pro', encoding="utf-8")
    with pytest.raises(UserError, match="half.jsonl:2"):
        read_answers(str(tmp_path / "half.jsonl"))


def test_answers_to_the_same_prompt_belong_together():
    """By the prompt and how often it came, not by their place."""
    of_a = rows(("x", "a1"), ("y", "a2"), ("x", "a3"), ("w", "a4"))
    of_b = rows(("z", "b1"), ("x", "b2"), ("y", "b3"), ("x", "b4"), ("x", "b5"))
    found, left_out = judging.matches_of(of_a, of_b)
    assert [(match.a, match.b) for match in found] == [("a1", "b2"), ("a2", "b3"), ("a3", "b4")]
    assert found[1].prompt == ask("y") and left_out == {"only A answers": 1, "only B answers": 2}
    with pytest.raises(UserError, match="no prompt in common"):
        judging.matches_of(rows(("x", "a")), rows(("y", "a")))


# ---- the tally -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate, n", [(0.8, 10), (0.0, 5), (1.0, 30), (0.45, 200), (0.5, 1)])
def test_the_interval_is_wilsons(rate, n):
    """Its ends are the shares from which `rate` is exactly 1.959964 standard errors away."""
    low, high = judging.wilson(rate, n)
    assert 0 <= low <= rate <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert abs(rate - end) == pytest.approx(judging.Z95 * math.sqrt(end * (1 - end) / n), abs=1e-12)
    if (rate, n) == (0.8, 10):
        assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Newcombe, Statist. Med. 17 (1998)


def test_a_tally_by_hand():
    """4 wins, 1 loss, 3 ties (one of equal answers), 2 without a verdict."""
    texts = [("long", "s"), ("s", "long"), ("ab", "cd"), ("a", "bb"), ("aa", "b"), ("a", "b"), ("a", "c"), ("a", "d")]
    texts += [(" same", "same "), ("a", "e")]
    said = ["aa", "aa", "aa", "aa", "bb", "ab", "tie b", "none a", "none none"]
    orders = [tuple(one.split()) if " " in one else tuple(one) for one in said]
    replies = iter(judging.agreed(*one) for one in orders)
    answers = [rows(*((f"p{k}", pair[side]) for k, pair in enumerate(texts))) for side in (0, 1)]
    found = win_rate(*answers, lambda matches: [next(replies) for _ in matches])
    assert [found[key] for key in ("n", "wins", "ties", "losses")] == [10, 4, 3, 1]
    assert found["none"] == {"unparsable verdict": 2}
    assert found["win_rate"] == (4 + 1.5) / 8 and found["interval"] == judging.wilson(5.5 / 8, 8)
    assert found["longer_wins"] == 1 / 4  # of a a a b, the first by the longer; ab and cd are equally long
    assert found["disagreements"] == 2  # ab, tie b
    assert [row["winner"] for row in found["matches"]] == [*"aaaab", "tie", "tie", "none", "tie", "none"]
    assert found["matches"][8]["reason"] == "equal answers" and json.dumps(found, allow_nan=False)


UNFINISHED = [  # prompt, answer of A, whether it is cut, answer of B, whether it is cut
    ("only A", "long and cut", True, "b", False), ("only B", "a", False, "长长的答案", True),
    ("both", "aa", True, "b", True), ("both, equal", "same", True, "same", True),
    ("equal texts", "same", True, "same", False), ("none 1", "long", False, "b", False),
    ("none 2", "long", False, "b", False),
]  # fmt: skip


def cut_rows() -> tuple[list[dict], list[dict]]:
    """The answers of A, and those of B."""
    reasons = {False: "stop", True: "length"}
    of_a = [{"prompt": ask(q), "answer": a, "finish_reason": reasons[cut]} for q, a, cut, _, _ in UNFINISHED]
    of_b = [{"prompt": ask(q), "answer": b, "finish_reason": reasons[cut]} for q, _, _, b, cut in UNFINISHED]
    return of_a, of_b


def test_unfinished_answers_by_rule():
    """A judge that prefers what is longer is asked about two matches; A wins those and the one in which only B is cut,
    and loses two: 3 wins, 2 losses, 2 ties."""
    asked = []

    def longer(matches: list[Match]) -> list[Verdict]:
        asked.append([match.prompt[0]["content"] for match in matches])
        return [Verdict("a" if len(match.a) > len(match.b) else "b") for match in matches]

    found = win_rate(*cut_rows(), longer)
    assert asked.pop() == ["none 1", "none 2"]
    assert [row["winner"] for row in found["matches"]] == ["b", "a", "tie", "tie", "b", "a", "a"]
    assert (found["wins"], found["ties"], found["losses"]) == (3, 2, 2)
    assert found["win_rate"] == (3 + 2 / 2) / 7 and found["longer_wins"] == 1.0  # of the two that it was asked about
    assert found["unfinished"] == {"only A": 2, "only B": 1, "both": 2}
    turned = win_rate(*reversed(cut_rows()), longer)
    assert (turned["wins"], turned["losses"]) == (2, 3) and turned["unfinished"]["only A"] == 1


def test_files_of_answers_say_what_is_unfinished(tmp_path):
    """Of the first completion; one that does not say is finished."""
    found = [{"text": "a", "finish_reason": "length"}, {"text": "b", "finish_reason": "stop"}]
    lines = [found, found[::-1], [{"text": "c"}]]
    lines = [{"index": i, "prompt": f"Q{i}", "completions": some} for i, some in enumerate(lines)]
    answers = read_answers(write_answers(tmp_path / "out.jsonl", lines))
    matches, _ = judging.matches_of(answers, answers)
    assert [(match.finished_a, match.finished_b) for match in matches] == [(False,) * 2, (True,) * 2, (True,) * 2]


def test_nothing_to_tally():
    found = win_rate(rows(("x", "a")), rows(("x", "b")), lambda matches: [Verdict("none", "why")])
    assert (found["win_rate"], found["interval"], found["longer_wins"]) == (None, None, None)
    found = win_rate(rows(("x", "a")), rows(("x", "a")), lambda matches: matches)  # there are none
    assert (found["ties"], found["win_rate"]) == (1, 0.5)


def test_judges_of_nothing(judge, tmp_path):
    """Nobody is asked."""
    model, tokenizer = judge
    service = Endpoint("http://127.0.0.1:9", "m")
    for own in (functools.partial(judging.reward_judge, model=model, tokenizer=tokenizer),
                functools.partial(endpoint_judge, endpoint=service, journal=str(tmp_path / "j"))):  # fmt: skip
        assert win_rate(rows(("x", "a")), rows(("x", "a")), own)["ties"] == 1
    assert not list(tmp_path.iterdir())


def test_the_reward_model_prefers_the_higher_score(judge):
    model, tokenizer = judge
    texts = [(f"Question {i}", "yes " * (i % 5 + 1), "不" * (i % 4 + 1)) for i in range(12)]
    of_a, of_b = rows(*((q, a) for q, a, _ in texts)), rows(*((q, b) for q, _, b in texts))
    of_a[3]["answer"] = "long " * 99
    own = functools.partial(judging.reward_judge, model=model, tokenizer=tokenizer, batch_size=5)
    found, turned = win_rate(of_a, of_b, own), win_rate(of_b, of_a, own)
    talks = [[*row["prompt"], {"role": "assistant", "content": row["answer"]}] for row in of_a[:3] + of_b[:3]]
    scores = np.array(saved.score_talks(model, tokenizer, talks)).reshape(2, 3)
    assert [row["winner"] == "a" for row in found["matches"][:3]] == (scores[0] > scores[1]).tolist()
    assert found["matches"][0]["scores"] == pytest.approx(tuple(scores[:, 0]), rel=1e-5)
    assert list(found["none"]) == ["longer than the reward model's block_size=96"] and found["ties"] == 0
    assert found["wins"] == turned["losses"] and found["wins"] + found["losses"] == 11
    assert 0 < found["wins"] < 11 and found["win_rate"] == pytest.approx(1 - turned["win_rate"])


# ---- an endpoint -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, finish, said", [
    ("A is wrong.\n[[B]]", "stop", "b"),
    ("If it were [[B]] ... no.\n[[ A ]]", "stop", "a"),
    ("<think>[[A]] or so</think>Both are good. [[C]]", "stop", "tie"),
    ("<think>[[A]] and then it was", "stop", "none"),
    ("I like A", "stop", "none"),
    ("[[D]]", "stop", "none"),
    ("[[A]] would be one way to", "length", "none"),
    ("HTTP 400 [[A]]", "refused", "none"),
    ("", "", "none"),
    ("两个都不错。[[B]]", "", "b"),
])  # fmt: skip
def test_verdicts_of_replies(text, finish, said):
    assert judging.verdict_of(Reply(text, finish, 0)) == said


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = Service()
    yield made
    made.stopped.set()
    made.server.shutdown()
    made.server.server_close()


def shown(prompt: str) -> list[str]:
    """The two answers in the order in which a request has them."""
    return re.findall(r"=== Answer [AB] ===\n(.*?)\n=== end ===", prompt, re.DOTALL)


def longest(prompt: str) -> tuple[str, str]:
    one, other = map(len, shown(prompt))
    return f"Reasons.\n[[{'A' if one > other else 'B' if other > one else 'C'}]]", "stop"


def six(of: str) -> list[dict]:
    lengths = {"a": [5, 5, 2, 3, 4, 9], "b": [2, 7, 2, 3, 1, 3]}[of]
    return rows(*((f"问题 {k}", of * n) for k, n in enumerate(lengths)))


def test_thoughts_are_not_shown(service, tmp_path):
    service.reply = longest
    thoughtful = rows(("q1", "<think>\nlong, long\n</think>\n\nA."), ("q2", "long</think>\nAlso."), ("q3", "Aa."))
    plain = rows(("q1", "Bb."), ("q2", "B."), ("q3", "<think>I never end"))
    judge = functools.partial(endpoint_judge, endpoint=Endpoint(service.url, "m"), journal=str(tmp_path / "j"))
    found = win_rate(thoughtful, plain, judge)
    assert [row["winner"] for row in found["matches"]] == ["b", "a", "a"] and found["longer_wins"] == 1.0
    asked = {text for body in service.requests for text in shown(body["messages"][0]["content"])}
    assert asked == {"A.", "Bb.", "Also.", "B.", "Aa.", ""}


def test_both_orders_are_asked(service, tmp_path):
    service.reply = longest
    own = functools.partial(
        endpoint_judge, endpoint=Endpoint(service.url, "m", key="secret"), journal=str(tmp_path / "j")
    )
    found = win_rate(six("a"), six("b"), own)
    assert [row["winner"] for row in found["matches"]] == ["a", "b", "tie", "tie", "a", "a"]
    assert (found["disagreements"], found["longer_wins"]) == (0, 1.0)
    bodies = sorted(service.requests, key=lambda body: body["messages"][0]["content"])
    asked = [shown(body["messages"][0]["content"]) for body in bodies]
    assert sorted(map(tuple, asked)) == sorted(
        order for row in found["matches"] for order in ((row["a"], row["b"]), (row["b"], row["a"]))
    )
    assert all("[user]\n问题" in body["messages"][0]["content"] for body in bodies)
    assert {(body["model"], body["temperature"]) for body in bodies} == {("m", 0.0)}
    assert set(service.keys) == {"Bearer secret"}


def test_a_favour_for_the_first_place_is_a_tie(service, tmp_path):
    service.reply = lambda prompt: ("[[A]]", "stop")
    found = win_rate(six("a"), six("b"), functools.partial(
        endpoint_judge, endpoint=Endpoint(service.url, "m"), journal=str(tmp_path / "j")
    ))  # fmt: skip
    assert (found["ties"], found["disagreements"], found["win_rate"]) == (6, 6, 0.5)
    assert {key: service.requests[0][key] for key in ("temperature", "max_tokens")} == {
        "temperature": 0.0, "max_tokens": 2048
    }  # fmt: skip


def test_unparsable_and_refused_replies_are_counted(service, tmp_path):
    service.reply = lambda prompt: ("hm", "stop") if "问题 1" in prompt else longest(prompt)
    service.failures = {0: 400}
    found = win_rate(six("a"), six("b"), functools.partial(
        endpoint_judge, endpoint=Endpoint(service.url, "m", parallel=1), journal=str(tmp_path / "j")
    ))  # fmt: skip
    assert [row["winner"] for row in found["matches"]] == ["none", "none", "tie", "tie", "a", "a"]
    assert found["none"] == {"unparsable verdict": 2} and found["matches"][0]["orders"] == ("none", "a")
    service.failures = {"all": 400}
    with pytest.raises(UserError, match="refuses every request.*planted"):
        endpoint_judge([Match(ask("x"), "a", "b")], Endpoint(service.url, "m"), str(tmp_path / "other"))


def test_what_was_broken_off_goes_on(service, tmp_path):
    """No reply is paid for twice, and another model or other answers do not go on with the same file."""
    service.reply = longest
    matches, _ = judging.matches_of(six("a"), six("b"))
    whole = endpoint_judge(matches, Endpoint(service.url, "m"), str(tmp_path / "whole"))
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    (tmp_path / "part").write_bytes(b"".join(lines[:6]) + lines[6][:10])
    service.requests.clear()
    service.failures = {0: 503, 2: "close"}
    again = endpoint_judge(matches, Endpoint(service.url, "m", retry_wait=0.01), str(tmp_path / "part"))
    assert again == whole and len(service.requests) == 12 - 5 + 2
    assert (tmp_path / "part").read_bytes() == b"".join(lines)
    with pytest.raises(UserError, match="model='m'"):
        endpoint_judge(matches, Endpoint(service.url, "other"), str(tmp_path / "part"))
    with pytest.raises(UserError, match="matches="):
        endpoint_judge(matches[1:], Endpoint(service.url, "m"), str(tmp_path / "part"))


def test_a_service_that_is_not_there_is_said_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(UserError, match="refused.*start the service, or mend base_url"):
            endpoint_judge([Match(ask("x"), "a", "b")] * 9, Endpoint(url, "m"), str(tmp_path / "j"))
    assert "again in" not in capsys.readouterr().err


# ---- ranks -----------------------------------------------------------------------------------------------------------


def some_matches() -> list[Match]:
    return [Match(ask(f"Question {i}"), "yes " * (i % 5 + 1), "不" * (i % 4 + 1)) for i in range(5)]


def two_ranks(world, report) -> None:
    torch.set_num_threads(1)
    model, tokenizer = made()
    found = [judging.reward_judge(some_matches()[:n], model, tokenizer, batch_size=3) for n in (5, 1)]
    report("verdicts", json.dumps(found))
    with pytest.raises(UserError, match="torchrun"):
        endpoint_judge(some_matches(), Endpoint("http://127.0.0.1:9", "m"), "never")


@pytest.mark.dist
def test_ranks_share_the_answers(judge, tmp_path):
    alone = [judging.reward_judge(some_matches()[:n], *judge) for n in (5, 1)]
    reports, codes = test_ddp.start_ranks(two_ranks, 2, tmp_path)
    assert codes == [0, 0], reports
    assert reports[0]["verdicts"][1] == reports[1]["verdicts"][1]
    found = json.loads(ast.literal_eval(reports[0]["verdicts"][1]))
    for mine, theirs in zip(sum(alone, []), sum(found, []), strict=True):
        assert mine.winner == theirs[0] and mine.scores == pytest.approx(theirs[2], abs=1e-4)
