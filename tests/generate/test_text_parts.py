"""Stop strings against a plain search, thoughts and calls in every form, however the text comes."""

import json
import random
import time

import pytest
from test_templates import SPECIALS as NAMES
from test_templates import TAGGED

from groundup.generate.completion import call_ids, never_sampled
from groundup.generate.engine import StopStrings
from groundup.generate.openai_answer import ThoughtReader
from groundup.generate.tools import CallReader
from groundup.tokens.engines import to_json
from groundup.tokens.training import train
from tokenizer import Tokenizer, with_specials


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
            assert stops.n_pending == max(pending, default=0)


@pytest.mark.parametrize("text", ["a" * 20_000, "ab" * 10_000, "c" * 20_000])
def test_long_stop_strings_cost_no_more_than_short_ones(text):
    """The text keeps matching most of them: nothing may be looked at again."""
    stops, began = StopStrings(["a" * 60_000, "ab" * 30_000, "a" * 59_999 + "b"] * 5), time.process_time()
    for char in text:
        stops.push(char)
    assert time.process_time() - began < 2  # some 0.2 s; to slice every beginning takes minutes


def push_all(reader, text: str, size: int) -> list[tuple]:
    parts = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    return [reader.push(part, i == len(parts) - 1) for i, part in enumerate(parts)]


@pytest.mark.parametrize(("text", "opened", "thoughts", "said"), [
    ("<think>well</think>\n\nyes", False, "well", "yes"), (" <think>\na</think>b</think>", False, "\na", "b</think>"),
    ("well</think>yes", True, "well", "yes"), ("cut <thi", True, "cut <thi", ""), ("<think>cut", False, "cut", ""),
    ("<thin", False, "", "<thin"), (" a <think>b</think>", False, "", " a <think>b</think>"), ("", False, "", ""),
    ("<think></think>\n", False, "", ""), ("  \n", False, "", "  \n"),
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_thoughts_are_divided_from_what_is_said(text, opened, thoughts, said, size):
    found = push_all(ThoughtReader(opened), text, size)
    assert tuple(map("".join, zip(*found, strict=True))) == (thoughts, said)


CALL = '{"name": "wetter", "arguments": {"ort": "北京"}}'
STRING = json.dumps({"name": "wetter", "arguments": '{"ort": "北京"}'})
HERMES, ONE_LINE = f"<tool_call>\n{CALL}\n</tool_call>", f"<tool_call>{CALL}</tool_call>"
NO_CALLS = [
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
    *((answer, answer.rstrip(), 0) for answer in NO_CALLS),
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_calls_are_found_in_an_answer_however_it_comes(answer, said, calls, size):
    found = push_all(CallReader(), answer, size)
    shown = "".join(text for text, _ in found)
    assert (shown if calls else shown.rstrip()) == said  # no space before a call, whole or streamed
    assert not any(called for _, called in found[:-1])
    functions = [call["function"] for call in found[-1][1]]
    assert [(f["name"], json.loads(f["arguments"])) for f in functions] == [("wetter", {"ort": "北京"})] * calls


@pytest.mark.parametrize("answer", [
    '<tool_call>{"name": "now"}</tool_call>', '{"name": "now", "arguments": null}', "[TOOL_CALLS]now[ARGS]{}",
    '[TOOL_CALLS][{"name": "now", "parameters": ""}]',
])  # fmt: skip
def test_a_call_without_arguments(answer):
    said, (call,) = CallReader().push(answer, True)
    assert not said and call["function"] == {"name": "now", "arguments": "{}"}


@pytest.mark.parametrize("text", ["<tool_call>" + "\n" * 200_000 + "x", f"<tool_call>{CALL}" + " " * 200_000 + "x"])
def test_a_model_that_repeats_blanks_takes_no_time(text):
    begin = time.process_time()
    CallReader().push(text, True)
    assert time.process_time() - begin < 2  # hours, if each blank began a search of its own


def test_a_line_break_within_a_string_of_a_call():
    _, (call,) = CallReader().push('<tool_call>{"name": "run", "arguments": {"code": "a\n\tb"}}</tool_call>', True)
    assert json.loads(call["function"]["arguments"]) == {"code": "a\n\tb"}


@pytest.mark.parametrize("inside", ["</tool_call>", "<tool_call>", "[TOOL_CALLS]", '"}\n</tool_call>'])
@pytest.mark.parametrize("form", ["<tool_call>{}</tool_call>", "[TOOL_CALLS][{}]", "{}"])
def test_marks_within_an_argument_are_text(inside, form):
    call = json.dumps({"name": "wetter", "arguments": {"ort": inside}})
    said, (found,) = CallReader().push(form.replace("{}", call), True)
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
