"""rewards.py: against rewards by hand, and transformers' own score of the same ids."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_best_of as tb
import test_sample as ts
import torch
from transformers import AutoModelForSequenceClassification

from groundup.align import rewards
from groundup.align.best_of import drawn_part
from groundup.align.rewards import FunctionReward, Rewards, Rollout, parse_reward
from groundup.errors import UserError
from groundup.generate.completion import generate
from groundup.generate.sampling import SamplingParams
from groundup.tokens.prompts import Prompt
from groundup.tokens.training import train
from groundup.train import checkpoint, huggingface
from tokenizer import Tokenizer

RULES = """
import decimal

def exact(prompt, answer, row):
    return answer == row["answer"]

def length(prompt, answer, row):
    return len(answer)

def turns(prompt, answer, row):
    return sum(len(message["content"]) for message in prompt)

def spoils(prompt, answer, row):
    prompt.pop()["content"] = prompt[0]["content"] = ""
    row["more"].append(prompt)
    return 1

def fails(prompt, answer, row):
    raise KeyError("no\\nsuch key")

def leaves(prompt, answer, row):
    raise SystemExit("enough")

nan = lambda *_: float("nan")
endless = lambda *_: -float("inf")
huge = lambda *_: 10 ** 400
text = lambda *_: "0.5"
nothing = lambda *_: None
tensor = lambda *_: decimal.Decimal(1)
number = 3
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """rules.py; rm, a reward model that counts full stops; random, one that has its own taste;
    chat, the model that answers.
    """
    root = tmp_path_factory.mktemp("cwd")
    (root / "rules.py").write_text(RULES, encoding="utf-8")
    net = huggingface.load_model(ts.save_run(root / "chat", seed=3, stage="sft", block_size=128))
    tokenizer = Tokenizer.load(checkpoint.resolve(root / "chat"))
    counting = tb.counting_model(net, tb.stop(tokenizer))
    tb.write_reward_model(root / "rm", counting, tokenizer)
    torch.manual_seed(5)
    torch.nn.init.normal_(counting.score.weight)
    for p in counting.parameters():
        torch.nn.init.normal_(p, std=0.5) if p.ndim > 1 else None
    tb.write_reward_model(root / "random", counting, tokenizer)
    return root


@pytest.fixture(autouse=True)
def there(home, monkeypatch) -> None:
    monkeypatch.chdir(home)


def tokenizer_of(home: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint.resolve(home / "chat"))


def answer(text: str = "好。", finished: bool = True, ids: tuple = (), **row) -> Rollout:
    messages = [{"role": "system", "content": "短"}, {"role": "user", "content": "从前有一只猫吗?"}]
    return Rollout(Prompt(messages, [], row, "data/zh.jsonl:7"), list(ids), text, finished, 0.0)


def test_a_sum_is_weighted_and_each_part_is_named(home):
    found = Rewards(
        "rules.py:exact=2, rules.py:length=-0.5,rules.py:turns", tokenizer_of(home)
    ).table([answer("好。", answer="好。"), answer("不好。", answer="好。")])
    assert found[1:].tolist() == [[1.0, 0.0], [2.0, 3.0], [9.0, 9.0]]
    assert found[0].tolist() == [2 * 1 - 0.5 * 2 + 9, 0 - 0.5 * 3 + 9]


def test_an_unfinished_answer_is_shown_to_no_part(home):
    parts = Rewards("rm,rules.py:exact", tokenizer_of(home))
    cut = answer("好", finished=False, ids=(5, 6, 7), answer="好")
    whole = answer("好", ids=(5, 6, 7), answer="好")
    found = parts.table([cut, whole, cut])
    assert found.isnan().tolist() == [[True, False, True]] * 3
    assert parts.names == ["rm", "exact"] and found[2, 1] == 1.0
    assert Rewards("rules.py:fails", tokenizer_of(home)).table([cut]).isnan().all()
    assert parts.table([]).shape == (3, 0)


def test_a_model_scores_the_drawn_ids_as_transformers_does(home):
    """Of answers that the engine has drawn, whatever ended them: the reward is at <|im_end|>."""
    tokenizer, policy = (
        tokenizer_of(home),
        huggingface.load_model(checkpoint.resolve(home / "chat")),
    )
    ids, _ = tokenizer.render([{"role": "user", "content": "猫?"}], add_generation_prompt=True)
    ends = frozenset((tokenizer.im_end_id, tb.stop(tokenizer)))
    params = SamplingParams(max_new_tokens=40, n=6, seed=3, stop_token_ids=ends)
    (result,) = generate(policy, tokenizer, [ids], params, batch_size=6)
    drawn = [one for one in result.completions if one.finish_reason == "stop"]
    assert {one.stop_reason for one in drawn} == ends
    answers = [answer(one.text, ids=(*ids, *one.ids)) for one in drawn]
    found = Rewards("random", tokenizer).table(answers)
    model = AutoModelForSequenceClassification.from_pretrained(home / "random").eval()
    assert model.config.pad_token_id is not None
    for one, total, part in zip(drawn, *found.tolist(), strict=True):
        row = torch.tensor([[*ids, *drawn_part(one, tokenizer), tokenizer.im_end_id]])
        assert total == part == pytest.approx(model(row).logits.item(), abs=1e-5)


def test_the_score_is_by_hand_that_of_the_whole_conversation(home):
    tokenizer = tokenizer_of(home)
    ids = [*tokenizer.encode("猫。。坐"), tokenizer.im_end_id]
    other = [*ids[:-1], tokenizer.bos_id]  # ended by another id
    found = Rewards("rm=0.5", tokenizer).table([answer(ids=ids), answer(ids=other)])
    wanted = tb.reward_by_hand(ids, tb.stop(tokenizer))
    assert found.tolist() == [
        pytest.approx([wanted / 2] * 2, rel=1e-4),
        pytest.approx([wanted] * 2, rel=1e-4),
    ]


def test_the_longest_answer_is_that_of_the_model(home):
    assert Rewards("rules.py:exact", tokenizer_of(home)).block_size == 0
    parts = Rewards("rules.py:exact,rm", tokenizer_of(home))
    assert parts.block_size == 128
    assert parts.table([answer(ids=range(5, 133), answer="")]).shape == (3, 1)
    with pytest.raises(UserError, match="129 tokens, but the model reads block_size=128"):
        parts.table([answer(ids=range(5, 134), answer="")])


def test_a_function_cannot_change_the_data(home):
    one = answer(more=[])
    Rewards("rules.py:spoils", tokenizer_of(home)).table([one])
    assert one == answer(more=[])


def test_the_name_of_a_folder_may_hold_an_equals_sign():
    spec = "lang=zh/rules.py:f, lang=zh/rm=0.5"
    assert parse_reward(spec) == {"lang=zh/rules.py:f": 1.0, "lang=zh/rm": 0.5}


@pytest.mark.parametrize("late", [False, True])
def test_a_file_may_import_what_lies_beside_it(home, tmp_path, late):
    """When it is read or when it is called, as the tools of a model may."""
    (tmp_path / f"beside_{late}.py").write_text("SCORE = 2.5\n", encoding="utf-8")
    line, function = f"from beside_{late} import SCORE\n", "def f(prompt, answer, row):\n"
    body = f"{function}    {line}" if late else line + function
    (tmp_path / "uses.py").write_text(f"{body}    return SCORE\n", encoding="utf-8")
    assert FunctionReward(f"{tmp_path}/uses.py:f").reward(answer()) == 2.5


def test_a_file_may_hold_dataclasses_whose_types_are_texts(home):
    lines = [
        "from __future__ import annotations",
        "import dataclasses",
        "@dataclasses.dataclass",
        "class Mark:",
    ]
    lines += ["    value: float", "def mark(prompt, answer, row):", "    return Mark(0.5).value"]
    Path("marks.py").write_text("\n".join(lines), encoding="utf-8")
    assert Rewards("marks.py:mark", tokenizer_of(home)).table([answer()])[0].tolist() == [0.5]


PLACE = 'on data/zh.jsonl:7, prompt "从前有一只猫吗?", answer "好。"'


@pytest.mark.parametrize(("function", "says"), [
    ("fails", f"rules.py:fails fails {PLACE}: KeyError: 'no\\nsuch key' (the row has the keys question)"),
    ("leaves", f"rules.py:leaves fails {PLACE}: SystemExit: enough"),
    ("nan", f"rules.py:nan returns nan (float), not a finite number, {PLACE}"),
    ("endless", f"rules.py:endless returns -inf (float), not a finite number, {PLACE}"),
    ("huge", f"rules.py:huge fails {PLACE}: OverflowError: int too large to convert to float"),
    ("text", f"rules.py:text returns '0.5' (str), not a finite number, {PLACE}"),
    ("nothing", f"rules.py:nothing returns None (NoneType), not a finite number, {PLACE}"),
    ("tensor", f"rules.py:tensor returns Decimal('1') (Decimal), not a finite number, {PLACE}"),
])  # fmt: skip
def test_a_function_that_gives_no_number_is_named_with_the_prompt(home, function, says):
    with pytest.raises(UserError) as error:
        Rewards(f"rules.py:{function}", tokenizer_of(home)).table([answer(question="?")])
    assert str(error.value) == f"reward: {says}"
    assert isinstance(error.value, UserError)


def test_a_long_prompt_is_shortened_in_the_error(home):
    long = answer("好" * 500)
    long = long._replace(
        prompt=long.prompt._replace(messages=[{"role": "user", "content": "猫" * 500}])
    )
    with pytest.raises(UserError) as error:
        Rewards("rules.py:nan", tokenizer_of(home)).table([long])
    assert len(str(error.value)) < 300 and "\n" not in str(error.value)


def test_a_model_whose_score_is_not_finite_is_named_with_the_prompt(home):
    parts = Rewards("rm", tokenizer_of(home))
    with torch.no_grad():
        parts.parts[0].model.score.weight.fill_(math.nan)
    with pytest.raises(UserError, match=re.escape(f"rm gives nan {PLACE}; try dtype=float32")):
        parts.table([answer(ids=(5, 6, 7))])


@pytest.mark.parametrize(("spec", "says"), [
    ("rm,", "'' in reward='rm,' is not"),
    ("rm=0", "'rm=0' in reward='rm=0' is not"),
    ("rm=nan", "'rm=nan' in reward='rm=nan' is not"),
    ("rm=much", "'rm=much' in reward='rm=much' is not"),
    ("rm,rm=0.5", "'rm' comes twice in reward='rm,rm=0.5'"),
    ("nowhere", "reward='nowhere': no such directory"),
    ("rules.py", "reward='rules.py': rules.py has no function ''; give file.py:function"),
    ("chat", "'chat' holds no reward model; reward.py trains one"),
    ("other.py:exact", "there is no file 'other.py'"),
    ("rules.py:", "rules.py has no function ''"),
    ("rules.py:none", "rules.py has no function 'none'"),
    ("rules.py:number", "rules.py has no function 'number'"),
    ("broken.py:exact", "broken.py fails: SyntaxError"),
])  # fmt: skip
def test_what_cannot_be_a_reward_is_refused(home, spec, says):
    (home / "broken.py").write_text("def exact(", encoding="utf-8")
    with pytest.raises((UserError, UserError), match=re.escape(says)):
        Rewards(spec, tokenizer_of(home))


def test_a_model_with_another_tokenizer_is_refused(home):
    with pytest.raises(UserError, match="'rm' has another tokenizer than the model that answers"):
        Rewards("rm", train(ts.CORPUS, 300))


def test_parts_of_the_same_name_keep_their_whole_one(monkeypatch):
    parts = [
        "out/a/step_000010",
        "out/b/step_000010",
        "rules.py:exact",
        "x/rules.py:exact",
        "x/y.py:z",
        "out/rm/",
    ]
    stub = SimpleNamespace(block_size=0, n_parameters=0)
    monkeypatch.setattr(rewards, "FunctionReward", lambda name: stub)
    monkeypatch.setattr(rewards, "ModelReward", lambda *_: stub)
    assert Rewards(",".join(parts), None).names == [*parts[:4], "z", "rm"]


def test_another_weight_file_or_function_is_another_record(home):
    tokenizer = tokenizer_of(home)
    first = Rewards("rm,rules.py:exact=0.5", tokenizer).record()
    assert list(first) == ["rm=1", "rules.py:exact=0.5"]
    assert Rewards("rm,rules.py:exact=0.5", tokenizer).record() == first
    assert Rewards("random", tokenizer).record()["random=1"] != first["rm=1"]
    (home / "rules.py").write_text(RULES + "\n", encoding="utf-8")
    assert Rewards("rm,rules.py:exact=0.5", tokenizer).record() != first


# ---- the demo's task -----------------------------------------------------------------------------

TASK = ts.ROOT / "tools/largest.py"


def make_task(out_dir: Path, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, TASK, f"--out_dir={out_dir}", *flags]
    return subprocess.run(command, capture_output=True, text=True)


def rows_in(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_task_is_always_the_same_and_no_numbers_are_in_two_files(tmp_path):
    flags = "--n_examples=20", "--n_questions=150", "--n_held_out=50", "--most=12"
    for name in ("a", "b"):
        done = make_task(tmp_path / name, *flags)
        assert done.returncode == 0, done.stderr
    files = {file.name: rows_in(file) for file in sorted((tmp_path / "a").iterdir())}
    assert {name: len(rows) for name, rows in files.items()} == {
        "examples.jsonl": 20, "held_out.jsonl": 50, "questions.jsonl": 150
    }  # fmt: skip
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    questions = [row["messages"][0]["content"] for rows in files.values() for row in rows]
    asked = [frozenset(map(int, re.findall(r"\d+", question))) for question in questions]
    assert len(set(asked)) == 220 and {len(numbers) for numbers in asked} == {3}
    assert max(map(max, asked)) == 12 and min(map(min, asked)) == 0


def test_the_task_rewards_the_right_answer_and_no_other(home, tmp_path):
    make_task(tmp_path, "--n_examples=30", "--n_questions=5", "--n_held_out=5")
    parts = Rewards(f"{TASK}:correct", tokenizer_of(home))
    for row in rows_in(tmp_path / "examples.jsonl"):
        question, right = (message["content"] for message in row["messages"])
        largest, smallest = (f(map(int, re.findall(r"\d+", question))) for f in (max, min))
        assert str(largest) in right and ("largest" in question) == ("largest" in right)
        wrong = [right.replace(str(largest), str(smallest)), right + right, str(largest), ""]
        found = parts.table([answer(text, **row) for text in (right, *wrong)])
        assert found[0].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    for name in ("questions", "held_out"):
        assert all(
            [m["role"] for m in row["messages"]] == ["user"]
            for row in rows_in(tmp_path / f"{name}.jsonl")
        )


def test_a_task_with_too_few_numbers_is_refused(tmp_path):
    done = make_task(tmp_path / "new", "--most=4")
    assert done.returncode == 1 and not (tmp_path / "new").exists()
    assert (
        done.stderr == "config: 3600 questions in all, but most=4 gives three numbers in 10 ways\n"
    )
