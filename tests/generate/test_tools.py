"""Tools: their schemas against transformers, hostile ones, and calls in the forms of four templates."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Literal

import pytest
from transformers.utils import get_json_schema

sys.path.insert(0, str(Path(__file__).parents[1] / "tokens"))
from test_templates import TAGGED, TRL, directory_with

from groundup.errors import UserError
from groundup.generate.tool_process import MAX_CHARS, schema_of
from groundup.generate.tools import MAX_CALLS, Tools, check_template, read_calls, tool_ids
from tokenizer import Tokenizer

FILE = '''
import os, sys, time

def add(a: int, b: int = 1) -> int:
    """Add two whole numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b

def hang(how: str) -> str:
    """Never end.

    Args:
        how: asleep or busy
    """
    while True:
        if how == "asleep":
            time.sleep(60)

def speak() -> str:
    """Print, fail to read, and fail."""
    print('{"text": "forged", "failed": false}')
    os.write(1, b"forged")
    assert sys.stdin.read() == ""
    raise KeyError("没有")

def long() -> str:
    """Say too much."""
    return "é" * 10_000_000

def fill() -> str:
    """Fill the memory."""
    return str(len([0] * 10**9))

def leave() -> str:
    """End the process."""
    os._exit(3)

def here() -> str:
    """Say where it is."""
    return os.getcwd()

def _hidden():
    pass
'''


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "own.py"
    path.write_text(FILE, encoding="utf-8")
    found = Tools(str(path), seconds=1.0)
    yield found
    found.close()


def said(tools: Tools, name: str, **arguments: object) -> tuple[str, int]:
    [message], failed = tools.run([{"name": name, "arguments": arguments}])
    assert message["role"] == "tool"
    return message["content"], failed


def test_what_tools_answer(tools):
    assert [one["function"]["name"] for one in tools.schemas][:2] == ["add", "hang"] and len(tools.schemas) == 7
    assert said(tools, "add", a=2, b=3) == ("5", 0)
    assert said(tools, "add", a=2) == ("3", 0)
    assert said(tools, "here") == (os.getcwd(), 0)
    for name, arguments, part in (
        ("add", {}, "TypeError"),
        ("add", {"a": 1, "c": 2}, "TypeError"),
        ("add", {"a": "x"}, "TypeError"),
        ("_hidden", {}, "no tool '_hidden'"),
        ("speak", {}, "KeyError: '没有'"),
        ("fill", {}, "MemoryError"),
        ("leave", {}, "Error: it took more than"),
    ):
        text, failed = said(tools, name, **arguments)
        assert part in text and failed == 1, name
    text, failed = said(tools, "long")
    assert text.startswith("é" * MAX_CHARS) and len(text) < MAX_CHARS + 50 and not failed
    assert said(tools, "add", a=1) == ("2", 0)  # after all that


def test_a_file_with_dataclasses_and_a_file_beside_it(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("FACTOR = 3\n", encoding="utf-8")
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom beside import FACTOR\n"
    text += "@dataclass\nclass Pair:\n    a: int\n"
    text += 'def triple(n: int) -> int:\n    """Triple.\n\n    Args:\n        n: a number\n    """\n'
    text += "    return Pair(FACTOR * n).a\n"
    (tmp_path / "own.py").write_text(text, encoding="utf-8")
    found = Tools(str(tmp_path / "own.py"))
    assert said(found, "triple", n=2) == ("6", 0)
    found.close()


def test_a_file_may_keep_its_functions_out_of_the_prompt(tmp_path):
    (tmp_path / "own.py").write_text("_shown = False\n" + FILE[: FILE.index("def hang")], encoding="utf-8")
    found = Tools(str(tmp_path / "own.py"))
    talk = [{"role": "user", "content": "2 + 3?"}]
    assert found.shown(talk) == talk and found.schemas == [] and said(found, "add", a=2, b=3) == ("5", 0)
    found.close()


@pytest.mark.parametrize("how", ("asleep", "busy"))
def test_a_tool_that_does_not_end_is_ended(tools, how):
    began = time.monotonic()
    text, failed = said(tools, "hang", how=how)
    assert "more than 1 s" in text and failed and time.monotonic() - began < 10
    assert said(tools, "add", a=1) == ("2", 0)


def test_calls_under_way_end_with_the_tools(tmp_path):
    """A server that is stopped waits for no tool."""
    path, found = tmp_path / "own.py", []
    path.write_text(FILE, encoding="utf-8")
    toolbox = Tools(str(path), seconds=60)
    calls = [{"name": "hang", "arguments": {"how": "asleep"}}] * 8
    thread = threading.Thread(target=lambda: found.extend(toolbox.run(calls)))
    thread.start()
    time.sleep(0.3)
    toolbox.close()
    thread.join(10)
    assert found and found[1] == 8


def test_more_calls_than_an_answer_may_have(tools):
    messages, n_failed = tools.run([{"name": "add", "arguments": {"a": 1}}] * (MAX_CALLS + 2))
    assert [one["content"] for one in messages[:MAX_CALLS]] == ["2"] * MAX_CALLS and n_failed == 2
    assert "at most" in messages[-1]["content"]


@pytest.mark.parametrize(
    "text, says",
    [
        ("x = 1", "defines no function"),
        ("def f(", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("def f(a: int):\n    pass", "f: it has no docstring"),
        ('def f(a):\n    """Do.\n\n    Args:\n        a: x\n    """', "parameter 'a' has no type hint"),
        ('def f(a: int):\n    """Do."""', "parameter 'a' has no line under Args:"),
        ('async def f():\n    """Do."""', "f: async functions are not supported"),
        ('def f(*a: int):\n    """Do.\n\n    Args:\n        a: x\n    """', "'a' cannot be given by name"),
        ('def f(a: int, /):\n    """Do.\n\n    Args:\n        a: x\n    """', "'a' cannot be given by name"),
        ('def f(a: set):\n    """Do.\n\n    Args:\n        a: x\n    """', "which JSON does not have"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path, text, says):
    (tmp_path / "f.py").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        Tools(str(tmp_path / "f.py"))
    assert says in str(caught.value) and "f.py" in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there():
    with pytest.raises(UserError, match="no such Python file"):
        Tools("nowhere.py")


# ---- schemas ---------------------------------------------------------------------------------------------------------


def everything(
    a: float,
    b: int | None = None,
    mode: Literal["x", "y"] = "x",
    items: list[str] = (),
    either: int | str = 1,
    table: dict[str, int] = (),
    flag: bool = False,
    plain: list = (),
) -> float:
    """Do all of it.

    In more words: with a colon.

    Args:
        a: the first
           number
        b: the second: if any
        mode: how
        items: 东西
        either: a number or a text
        table: a table
        flag: whether
        plain: a list

    Returns:
        the sum
    """


def nothing() -> str:
    """Say hello."""


def only_one(city: str):
    """Tell the weather.

    Args:
        city: its name"""


@pytest.mark.parametrize("function", (everything, nothing, only_one))
def test_schemas_are_those_of_transformers(function):
    assert schema_of(function) == get_json_schema(function)


# ---- conversations ---------------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
WRITTEN = {  # of the same call
    "chatml": CALL + "<|im_end|>",
    "qwen3": CALL + "<|im_end|>",
    "llama3_1": '{"name": "add", "parameters": {"a": 2, "b": 3}}<|eot_id|>',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2, "b": 3}, "id": "abcdefghi"}]</s>',
}


def tokenizer_of(name: str, directory: Path) -> Tokenizer:
    if name == "chatml":
        path = directory_with("", directory)
        config = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
        del config["chat_template"]
        (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    else:
        source = TAGGED[name] if name in TAGGED else (TRL / f"{name}.jinja").read_text(encoding="utf-8")
        path = directory_with(source, directory)
    return Tokenizer.load(path)


def drawn_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of an answer as a model would draw it, its special tokens among them."""
    ids, names = [], sorted(tokenizer.special_tokens, key=len, reverse=True)
    while text:
        name = next((one for one in names if text.startswith(one)), "")
        if name:
            ids.append(tokenizer.special_tokens[name])
            text = text.removeprefix(name)
        else:
            cut = min((text.find(one) for one in names if one in text), default=len(text))
            ids += tokenizer.encode(text[:cut])
            text = text[cut:]
    return ids


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_is_read_and_its_result_is_appended(tools, tmp_path, name):
    """The whole is what the template writes of the conversation, but for the answer's own ids."""
    tokenizer = tokenizer_of(name, tmp_path / name)
    check_template(tokenizer, tools)
    messages = tools.shown([{"role": "user", "content": "2 + 3?"}])
    prompt, _ = tokenizer.render(messages, add_generation_prompt=True)
    answer = drawn_ids(tokenizer, WRITTEN[name])
    content, calls = read_calls(tokenizer, answer[:-1])
    call = {"name": "add", "arguments": {"a": 2, "b": 3}} | ({"id": "abcdefghi"} if name == "mistral" else {})
    assert calls == [call] and content == CALL
    turns = [{"role": "assistant", "content": content}, {"role": "tool", "content": "5 <|im_end|> </s>"}]
    new = tool_ids(tokenizer, [*messages, *turns])
    whole, _ = tokenizer.render([*messages, *turns], add_generation_prompt=True)
    assert whole[-len(new) :] == new and whole[: len(prompt)] == prompt
    text = tokenizer.decode(new)
    assert text.count("5 <|im_end|> </s>") == 1 and "2 + 3" not in text and '"a"' not in text
    # the result's own text closes no turn
    ends = [token for token in new if token in tokenizer.stop_ids]
    assert tokenizer.encode("5 <|im_end|> </s>") and len(ends) <= 2
    no_result = tool_ids(tokenizer, [*messages, turns[0], {"role": "tool", "content": "5"}])
    assert len([token for token in no_result if token in tokenizer.stop_ids]) == len(ends)


def test_an_answer_without_a_call(tools, tmp_path):
    tokenizer = tokenizer_of("chatml", tmp_path)
    for text in ("It is 5.", '<tool_call>\n{"name": }\n</tool_call>', "{}", ""):
        assert read_calls(tokenizer, tokenizer.encode(text))[1] == []


def test_ids_that_pad_a_vocabulary_have_no_text(tools, tmp_path):
    """A model may have more rows than its tokenizer has ids, and any of them may be drawn."""
    tokenizer = tokenizer_of("chatml", tmp_path)
    ids = [*drawn_ids(tokenizer, CALL), tokenizer.vocab_size, tokenizer.vocab_size + 7]
    assert read_calls(tokenizer, ids) == read_calls(tokenizer, ids[:-2])


@pytest.mark.parametrize(("text", "opened", "calls"), [
    (f"<think>\nPerhaps {CALL}?\n</think>\n\nIt is 5.", False, 0), (f"<think>add</think>\n\n{CALL}", False, 1),
    (f"<think>{CALL}", False, 0), (f"<think>a {CALL}</think>b {CALL}", False, 1), (f"{CALL} no </think>", False, 1),
    (f"Perhaps {CALL}?</think>\n\nIt is 5.", True, 0), (f"a </think>\n\n{CALL}", True, 1), (CALL, True, 1),
    ('<think>a</think>\n{"name": "add", "arguments": {"a": 2, "b": 3}}', False, 1),
])  # fmt: skip
def test_what_is_thought_about_is_not_called(tmp_path, text, opened, calls):
    """As serve.py divides an answer: a model may weigh a call, and a form without a mark follows thoughts."""
    tokenizer = tokenizer_of("qwen3" if opened else "chatml", tmp_path)
    assert ("<think>" in tokenizer.template_source) == opened
    content, found = read_calls(tokenizer, tokenizer.encode(text))
    assert found == [{"name": "add", "arguments": {"a": 2, "b": 3}}] * calls
    assert all(content.count(mark) == text.count(mark) for mark in ("<think>", "</think>"))  # the turn keeps them


def test_a_template_without_turns_of_tools_is_refused(tools, tmp_path):
    source = "{% for m in messages %}{% if m['role'] != 'tool' %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    source += "{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    source += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    tokenizer = Tokenizer.load(directory_with(source, tmp_path))
    with pytest.raises(UserError, match="does not write the results of tools"):
        check_template(tokenizer, tools)


def test_a_template_whose_calls_cannot_be_read_is_refused(tools, tmp_path):
    """Qwen3.5's, with a tag for each parameter: a model would call, and nothing would run."""
    tokenizer = tokenizer_of("qwen3_5_nothink", tmp_path)
    with pytest.raises(UserError, match="writes calls in a form that is not read"):
        check_template(tokenizer, tools)
