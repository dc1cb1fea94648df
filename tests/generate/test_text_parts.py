"""Stop strings against a plain search, thoughts and calls in every form, however the text comes."""

import json
import os
import random
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from test_templates import SPECIALS as NAMES
from test_templates import TAGGED
from transformers.utils.chat_template_utils import render_jinja_template

from groundup.generate.call_forms import divide_calls, divide_thoughts
from groundup.generate.completion import call_ids, never_sampled
from groundup.generate.engine import StopStrings
from groundup.tokens.engines import to_json
from groundup.tokens.training import train
from tokenizer import Tokenizer, with_specials

TRL = Path(find_spec("trl").origin).parent / "chat_templates"


def test_stop_strings_are_those_of_a_plain_search():
    rng = random.Random(0)
    for _ in range(1000):
        words = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(0, 3))]
        stops, text = StopStrings(words), ""
        for char in rng.choices("abc", k=30):
            text += char
            found = stops.push(char)
            assert found == max((word for word in words if text.endswith(word)), key=len, default="")
            pending = (k for word in words for k in range(1, len(word)) if text.endswith(word[:k]))
            assert max(stops.n_begun, default=0) == max(pending, default=0)


@pytest.mark.parametrize("text", ["a" * 20_000, "ab" * 10_000, "c" * 20_000])
def test_long_stop_strings_cost_no_more_than_short_ones(text):
    """The text keeps matching most of them: nothing may be looked at again."""
    stops, began = StopStrings(["a" * 60_000, "ab" * 30_000, "a" * 59_999 + "b"] * 5), time.process_time()
    for char in text:
        stops.push(char)
    assert time.process_time() - began < 2  # some 0.2 s; to slice every beginning takes minutes


def growing(text: str, size: int) -> list[tuple[str, bool]]:
    """(text so far, whether it has ended) as it comes in pieces."""
    ends = [*range(size, len(text), size), len(text)]
    return [(text[:end], end == len(text)) for end in ends]


@pytest.mark.parametrize(("text", "opened", "thoughts", "said"), [
    ("<think>well</think>\n\nyes", False, "well", "yes"), (" <think>\na</think>b</think>", False, "\na", "b</think>"),
    ("well</think>yes", True, "well", "yes"), ("cut <thi", True, "cut <thi", ""), ("<think>cut", False, "cut", ""),
    ("<thin", False, "", "<thin"), (" a <think>b</think>", False, "", " a <think>b</think>"), ("", False, "", ""),
    ("<think></think>\n", False, "", ""), ("  \n", False, "", "  \n"),
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_thoughts_are_divided_from_what_is_said(text, opened, thoughts, said, size):
    found = [divide_thoughts(part, opened, last) for part, last in growing(text, size)]
    assert found[-1] == (thoughts, said)
    for before, after in pairwise(found):
        assert after[0].startswith(before[0]) and after[1].startswith(before[1])


CALL = '{"name": "wetter", "arguments": {"ort": "北京"}}'
STRING = json.dumps({"name": "wetter", "arguments": '{"ort": "北京"}'})
HERMES, ONE_LINE = f"<tool_call>\n{CALL}\n</tool_call>", f"<tool_call>{CALL}</tool_call>"
# As the chat templates of these models write them
V31_ONE = '<｜tool▁call▁begin｜>wetter<｜tool▁sep｜>{"ort": "北京"}<｜tool▁call▁end｜>'
V31 = f"<｜tool▁calls▁begin｜>{V31_ONE}<｜tool▁calls▁end｜>"
R1 = V31.replace("wetter<｜tool▁sep｜>", "function<｜tool▁sep｜>wetter\n```json\n").replace("}<", "}\n```<")
NO_CALLS = [
    "<function=wetter>", 'like <function=f>{"x": 1} there', "<tool_call>never</tool_call>", "[f(1)]",
    "<｜tool▁calls▁begin｜>", "[wetter(ort={1, 2})]", "[wetter(ort=1)] done", "[f(a=b)]", "[f(a=1e999)]",
    "[a.b['c'](d=1)]", "[wetter(ort='北京', ort='北京')]", ONE_LINE.replace('"北京"', '"北京", "ort": 1'),
    "a < b, <tool", '{"name": 1}', "<tool_call>{</tool_call>", f"see {CALL}", "", "[" * 5000, "[1]", f"{CALL} and more",
    CALL.replace('"北京"', "NaN"), CALL.replace('"北京"', "1e999"),
    f"<tool_call>{CALL[:-9]}", f"{HERMES} <tool_call>no",
    CALL.replace('{"ort": "北京"}', '"no JSON"'), CALL.replace('{"ort": "北京"}', '"[]"'),
    'the mark <tool_call> like {"a": 1} is how', 'write <tool_call>f{"x": 1} there', '[TOOL_CALLS] f {"x": 1}',
]  # fmt: skip


@pytest.mark.parametrize(("answer", "said", "calls"), [
    (HERMES, "", 1), (f"好。\n{HERMES}\n{ONE_LINE}", "好。", 2), (f"<tool_call>\n{CALL}", "", 1),
    (CALL.replace("arguments", "parameters"), "", 1), (f"[{CALL}, {CALL}]", "", 2), (f"[TOOL_CALLS][{CALL}]", "", 1),
    (f"好。[TOOL_CALLS] [{CALL}]", "好。", 1), (STRING, "", 1), (f"[TOOL_CALLS] [{STRING}]", "", 1),
    (f"{CALL}; {CALL}", "", 2), (f"{CALL}\n{CALL}", "", 2), (f"<tool_call>\n{CALL}\n{CALL}\n</tool_call>", "", 2),
    ('[TOOL_CALLS]wetter[ARGS]{"ort": "北京"}', "", 1), ('a [TOOL_CALLS]wetter{"ort": "北京"}', "a", 1),
    ('[TOOL_CALLS]wetter[CALL_ID]abcdefghi[ARGS]{"ort": "北京"}' * 2, "", 2), (f"a\n\n{HERMES}", "a", 1),
    (f"[TOOL_CALLS][{CALL}] [见下]", "[见下]", 1), (f"<tool_call>{CALL}\n{{完", "{完", 1),
    (f"{HERMES}\n[1, 2]", "[1, 2]", 1),
    (f"{ONE_LINE} 完", "完", 1), (f"{HERMES} 完 {HERMES}", "完", 2), (f"\n{CALL}\n", "", 1),
    (f"好。{R1}", "好。", 1), (V31, "", 1), (V31.replace(V31_ONE, f"{V31_ONE}\n{V31_ONE}"), "", 2),
    ('<function=wetter>{"ort": "北京"}</function>', "", 1),
    ("[wetter(ort='北京'), wetter(ort=\"北京\")]", "", 2),
    *((answer, answer.rstrip(), 0) for answer in NO_CALLS),
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_calls_are_found_in_an_answer_however_it_comes(answer, said, calls, size):
    found = [divide_calls(part, last) for part, last in growing(answer, size)]
    shown = found[-1][0]
    assert (shown if calls else shown.rstrip()) == said  # no space before a call, whole or streamed
    assert all(after.startswith(before) for (before, _), (after, _) in pairwise(found))
    assert not any(called for _, called in found[:-1])
    functions = [call["function"] for call in found[-1][1]]
    assert [(f["name"], json.loads(f["arguments"])) for f in functions] == [("wetter", {"ort": "北京"})] * calls


@pytest.mark.parametrize("answer", [
    '<tool_call>{"name": "now"}</tool_call>', '{"name": "now", "arguments": null}', "[TOOL_CALLS]now[ARGS]{}",
    '[TOOL_CALLS][{"name": "now", "parameters": ""}]', "[now()]",
    "<function=now>{}</function>",
])  # fmt: skip
def test_a_call_without_arguments(answer):
    said, (call,) = divide_calls(answer, True)
    assert not said and call["function"] == {"name": "now", "arguments": "{}"}


@pytest.mark.parametrize(("written", "value"), [
    ("{1: 2, None: (3,)}", {"1": 2, "null": [3]}), ("{(1, 2): 3}", None), ("{1, 2}", None), ("b'x'", None),
    ("(1, '\\ud83d')", [1, "\ufffd"]), ("'a\\d'", "a\\d"), ("[true, {'b': false}, null]", [True, {"b": False}, None]),
    ("{1: 2, '1': 3}", None), ("truth", None),
])  # fmt: skip
def test_arguments_that_python_has_and_json_lacks(written, value, recwarn):
    said, calls = divide_calls(f"[f(a={written})]", True)
    found = [json.loads(call["function"]["arguments"]) for call in calls]
    assert found == ([{"a": value}] if value is not None else []) and bool(said) == (value is None)
    assert not recwarn.list


# Of trl's templates those that write calls in a form that is read: of the models that model.py computes
READ = "deepseek_r1_distill deepseekv3 llama3_1 llama3_2 qwen2_5 qwen3 qwen3_instruct_2507 qwen3_vl".split()
WEATHER = {"text": "北京 3", "days": 3, "what": ["a", "二"]}


def call_as_written(source: str, schema: dict) -> str:
    """The text that a chat template writes for a call, up to what ends the turn."""
    question = {"role": "user", "content": "q"}
    arguments = json.dumps(WEATHER, ensure_ascii=False) if "```json" in source else WEATHER  # DeepSeek's wants text
    call = {"type": "function", "id": "a" * 9, "function": {"name": "wetter", "arguments": arguments}}
    content = None if "['content'] is none" in source else ""  # DeepSeek-R1-Distill's writes no calls beside a text
    turn = {"role": "assistant", "content": content, "tool_calls": [call]}
    plain, called = (
        render_jinja_template([[question, last]], tools=[schema], chat_template=source, eos_token="</s>")[0][0]
        for last in ({"role": "assistant", "content": "plain"}, turn)
    )
    begin, end = (len(os.path.commonprefix(both)) for both in ([plain, called], [plain[::-1], called[::-1]]))
    begin = called.rfind("<", 0, begin) if called[:begin].endswith(("<", "<\uff5c")) else begin
    return called[begin : len(called) - end].removesuffix("<|eot_id|>")


@pytest.mark.parametrize("name", READ)
def test_calls_are_read_as_published_templates_write_them(name):
    kinds = {"text": {"type": "string"}, "days": {"type": "integer"}, "what": {"type": "array"}}
    parameters = {"type": "object", "properties": kinds}
    schema = {"type": "function", "function": {"name": "wetter", "description": "", "parameters": parameters}}
    text = call_as_written((TRL / f"{name}.jinja").read_text(encoding="utf-8"), schema)
    _, (call,) = divide_calls(text, True)
    assert json.loads(call["function"]["arguments"]) == WEATHER


@pytest.mark.parametrize("text", [
    "<tool_call>" + "\n" * 200_000 + "x", f"<tool_call>{CALL}" + " " * 200_000 + "x",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f" + " " * 200_000 + "x", f"{V31[:-30]}" + " " * 200_000 + "x",
    "<tool_call>f" + " " * 200_000 + "x", "<function=f>" + "\n" * 200_000 + "x", "[f(" + " " * 200_000 + "x",
])  # fmt: skip
def test_a_model_that_repeats_blanks_takes_no_time(text):
    begin = time.process_time()
    divide_calls(text, True)
    assert time.process_time() - begin < 2  # hours, if each blank began a search of its own


@pytest.mark.parametrize("form", [
    '<tool_call>{"name": "f", "arguments": {"\\ud83d": ["\\ud83d"]}}</tool_call>', "[f(a='\\ud83d')]",
    '{"name": "\\ud83d", "arguments": {}}', '<function=f>{"a": "\\ud83d"}</function>',
])  # fmt: skip
def test_half_a_character_within_a_call_can_be_sent(form):
    """As JSON's and Python's escapes write it; without the mending a server fails when it encodes the answer."""
    said, calls = divide_calls(form, True)
    assert (said + json.dumps(calls, ensure_ascii=False)).encode()


def test_a_line_break_within_a_string_of_a_call():
    _, (call,) = divide_calls('<tool_call>{"name": "run", "arguments": {"code": "a\n\tb"}}</tool_call>', True)
    assert json.loads(call["function"]["arguments"]) == {"code": "a\n\tb"}


@pytest.mark.parametrize("inside", ["</tool_call>", "<tool_call>", "[TOOL_CALLS]", '"}\n</tool_call>'])
@pytest.mark.parametrize("form", ["<tool_call>{}</tool_call>", "[TOOL_CALLS][{}]", "{}"])
def test_marks_within_an_argument_are_text(inside, form):
    call = json.dumps({"name": "wetter", "arguments": {"ort": inside}})
    said, (found,) = divide_calls(form.replace("{}", call), True)
    assert not said and json.loads(found["function"]["arguments"]) == {"ort": inside}


def test_a_special_token_that_begins_a_call_may_be_sampled():
    """Of those that the template writes, for Mistral [TOOL_CALLS]; none that opens a turn or lists tools."""
    tokenizer = train(["Hello world, 你好世界！\n"] * 20, vocab_size=512)
    files = with_specials(dict(tokenizer.files), NAMES[3:], tokenizer.vocab_size)
    config = json.loads(files["tokenizer_config.json"]) | {"bos_token": "<s>", "eos_token": "</s>"}
    for name in ("mistral", "zephyr"):
        for source in (TAGGED[name], TAGGED[name].replace("generation %", "if true %").replace("endif true", "endif")):
            config["chat_template"] = source
            tuned = Tokenizer(files | {"tokenizer_config.json": to_json(config)})
            free = {i for i in tuned.special_ids if i not in never_sampled(tuned, tuned.vocab_size)}
            begins = {tuned.special_tokens["[TOOL_CALLS]"]} if name == "mistral" else set()
            assert call_ids(tuned) == begins and free == begins | tuned.stop_ids
    assert not call_ids(tokenizer)
