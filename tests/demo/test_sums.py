"""The demo's task with a tool: config/demo_tools.py."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from groundup.files.functions import load_function
from groundup.files.turns import call_text
from groundup.generate.call_forms import divide_calls
from groundup.generate.tools import Tools

ROOT = Path(__file__).parents[2]
TASK, CALCULATOR = ROOT / "tools/sums.py", ROOT / "groundup/demo/calculator.py"
SIZES = {"examples": 24, "questions": 40, "held_out": 16}


@pytest.fixture(scope="module")
def tools():
    found = Tools(str(CALCULATOR))
    yield found
    found.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Both of two runs of tools/sums.py: a directory each."""
    directory = tmp_path_factory.mktemp("sums")
    flags = [f"--n_{name}={n}" for name, n in SIZES.items()]
    for name in ("a", "b"):
        command = [sys.executable, TASK, f"--out_dir={directory / name}", *flags]
        subprocess.run(command, check=True, capture_output=True)
    return directory


@pytest.mark.parametrize("tool", ["sums", "largest"])
def test_an_empty_out_dir_is_not_the_working_directory(tmp_path, tool: str):
    command = [sys.executable, ROOT / f"tools/{tool}.py", "--out_dir="]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "out_dir is empty" in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def rows_in(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    "expression, says",
    [
        ("123 + 456", "579"),
        ("2 * (3 - 10) / 4", "-3.5"),
        ("-7 - -8", "1"),
        ("1 / 0", "Error: ZeroDivisionError: division by zero"),
        ("__import__('os')", "Error: ValueError: __import__('os') is no number"),
        ("2 ** 9 ** 9", "Error: ValueError: 2 ** 9 ** 9 is no number"),
    ],
)
def test_the_calculator_calculates_and_runs_nothing_else(tools, expression, says):
    call = {"name": "calculate", "arguments": {"expression": expression}}
    (answer,), n_failed = tools.run([call])
    assert answer["content"] == says and n_failed == says.startswith("Error")
    assert tools.schemas == []  # prompts do not describe it


def test_the_sums_are_always_the_same_and_no_two_numbers_are_in_two_files(made):
    pairs = []
    for name, n in SIZES.items():
        file = f"{name}.jsonl"
        assert (made / "a" / file).read_bytes() == (made / "b" / file).read_bytes()
        questions = [row["messages"][0]["content"] for row in rows_in(made / "a" / file)]
        assert len(questions) == n
        assert sum(question.isascii() for question in questions) == n // 2  # the others: Chinese
        pairs += [frozenset(re.findall(r"\d+", question)) for question in questions]
    assert len(set(pairs)) == sum(SIZES.values())
    assert all(len(number) == 3 for pair in pairs for number in pair)


def test_an_example_calls_what_it_was_asked_and_says_what_the_tool_said(made, tools):
    correct = load_function(f"{TASK}:correct", "reward")
    for row in rows_in(made / "a/examples.jsonl"):
        asked, called, result, answer = (message["content"] for message in row["messages"])
        said, (call,) = divide_calls(called, last=True)
        function = call["function"]
        function["arguments"] = json.loads(function["arguments"])
        assert said == "" and call_text(function) == called
        assert function["arguments"]["expression"] in asked
        (message,), n_failed = tools.run([function])
        assert message["content"] == result and n_failed == 0
        wrong = answer.replace(result, str(int(result) + 10))
        scores = [correct(row["messages"][:3], text, row) for text in (answer, wrong, result, "")]
        assert scores == [1.0, 0.0, 0.0, 0.0]


def test_questions_of_reinforcement_learning_show_no_call(made):
    for name in ("questions", "held_out"):
        for row in rows_in(made / f"a/{name}.jsonl"):
            assert [message["role"] for message in row["messages"]] == ["user"]


def test_more_sums_than_there_are_is_refused(tmp_path):
    command = [sys.executable, TASK, f"--out_dir={tmp_path / 'new'}", "--n_examples=500000"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and not (tmp_path / "new").exists()
    text = "config: 504,400 questions in all, but there are 405,450 sums\n"
    assert done.stderr == text
