"""Rows as published sets have them: what is read, what is left out and why, which keys are unread.

Keys and structure are those of the sets, the texts are ours, and what is expected is written by
hand. `PYTHONPATH=. python tests/files/test_layouts.py` prints all of it as a table.
"""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from groundup.errors import UserError
from groundup.files import readers, records, row_formats
from groundup.files.row_formats import Pair, document_of, messages_of, pair_of, unread_keys
from groundup.files.text_keys import renamed
from groundup.files.turns import call_text, chat_problem, pair_problem


def s(text: str) -> dict:
    return {"role": "system", "content": text}


def u(text: str) -> dict:
    return {"role": "user", "content": text}


def a(text: str, **more) -> dict:
    return {"role": "assistant", "content": text} | more


def t(text: str, **more) -> dict:
    return {"role": "tool", "content": text} | more


def call(name: str, **arguments) -> str:
    return call_text({"name": name, "arguments": arguments})


def turns(*pairs: tuple[str, str], role: str = "from", content: str = "value") -> list[dict]:
    return [{role: who, content: said} for who, said in pairs]


Q, A = ("human", "2 + 2?"), ("gpt", "4")
ASKED = [u("2 + 2?"), a("4")]
WEATHER = {"name": "weather", "parameters": {"city": "string"}}
WEATHER_CALL = {"id": "c1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOLS = row_formats.turns.with_system([u("?")], {"tools": [WEATHER]})[0]["content"]
HH = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: 2 + 2?\n\nAssistant:"
HH_TURNS = [u("Hi"), a("Hello"), u("2 + 2?")]

# name: (row, messages or why it is left out, unread keys)
CHATS = {
    # Z: verdicts that are no, which nobody obeys, are named
    "BeaverTails": (
        {"prompt": "How?", "response": "So.", "category": {"theft": True}, "is_safe": False},
        [u("How?"), a("So.")],
        ["category", "is_safe"],
    ),
    "BeaverTails, safe": (
        {"prompt": "How?", "response": "So.", "is_safe": True},
        [u("How?"), a("So.")],
        [],
    ),
    "OpenMathInstruct, wrong": (
        {"question": "1 + 1?", "generated_solution": "3", "is_correct": False, "error_message": ""},
        [u("1 + 1?"), a("3")],
        ["is_correct"],
    ),
    "a verdict as a number": (
        {"question": "1 + 1?", "answer": "3", "correct": 0, "difficulty": 0},
        [u("1 + 1?"), a("3")],
        ["correct"],
    ),
    "a verdict of a turn": (
        {"messages": [u("1 + 1?"), a("3") | {"correct": False, "edited": False}]},
        [u("1 + 1?"), a("3")],
        ["messages.correct"],
    ),
    # A: keys beside the question and the answer
    "sql-create-context": (
        {"question": "How many?", "context": "CREATE TABLE t (n INT)", "answer": "SELECT 1"},
        [u("CREATE TABLE t (n INT)\nHow many?"), a("SELECT 1")],
        [],
    ),
    "axolotl context_qa": (
        {"article": "Tea is hot.", "question": "What is hot?", "answer": "Tea"},
        [u("Tea is hot.\nWhat is hot?"), a("Tea")],
        [],
    ),
    "a passage": (
        {"passage": ["One.", "Two."], "question": "How many?", "answer": "2", "title": "Counting"},
        [u("One.\nTwo.\nHow many?"), a("2")],
        ["title"],
    ),
    "dolly": (
        {"instruction": "Name it.", "context": "It barks.", "response": "A dog", "category": "qa"},
        [u("Name it.\nIt barks."), a("A dog")],
        ["category"],
    ),
    "C-Eval": (
        {
            "id": 0,
            "question": "2 + 2?",
            "A": "3",
            "B": "4",
            "C": "5",
            "D": "6",
            "answer": "B",
            "explanation": "sum",
        },
        [u("2 + 2?\nA. 3\nB. 4\nC. 5\nD. 6"), a("B")],
        ["explanation"],
    ),
    "MedQA": (
        {"question": "2 + 2?", "options": {"A": "3", "B": "4"}, "answer": "4", "answer_idx": "B"},
        [u("2 + 2?\nA. 3\nB. 4"), a("4")],
        ["answer_idx"],
    ),
    "MMLU": (
        {"question": "2 + 2?", "subject": "sums", "choices": ["3", "4"], "answer": 1},
        [u("2 + 2?\nA. 3\nB. 4"), a("B")],
        ["subject"],
    ),
    "ARC": (
        {
            "id": "x",
            "question": "2 + 2?",
            "choices": {"text": ["3", "4"], "label": ["A", "B"]},
            "answerKey": "B",
        },
        [u("2 + 2?\nA. 3\nB. 4"), a("B")],
        [],
    ),
    "options with their letters": (
        {"question": "2 + 2?", "options": ["A. 3", "B) 4"], "answer": "B"},
        [u("2 + 2?\nA. 3\nB. 4"), a("B")],
        [],
    ),
    "options that are no texts": (
        {"question": "2 + 2?", "options": [3, 4], "answer": "B"},
        "options holds int, not text",
        [],
    ),
    "OpenOrca": (
        {"id": "niv.1", "system_prompt": "Be brief.", "question": "2 + 2?", "response": "4"},
        [s("Be brief."), *ASKED],
        [],
    ),
    "system_message beside messages": (
        {"system_message": "Be brief.", "messages": [u("2 + 2?"), a("4")]},
        [s("Be brief."), *ASKED],
        [],
    ),
    "functions (OpenAI, old)": (
        {"functions": [WEATHER], "messages": [u("2 + 2?"), a("4")]},
        [s(TOOLS), *ASKED],
        [],
    ),
    "tools of None (CSV)": ({"messages": [u("2 + 2?"), a("4")], "tools": "None"}, ASKED, []),
    "Multilingual-Thinking": (
        {
            "reasoning_language": "en",
            "developer": "",
            "user": "2 + 2?",
            "analysis": "Sum.",
            "messages": [u("2 + 2?") | {"thinking": None}, a("4", thinking="Sum.")],
        },
        [u("2 + 2?"), a("<think>\nSum.\n</think>\n\n4")],
        ["reasoning_language", "analysis"],
    ),
    "reasoning (vLLM)": (
        {"messages": [u("2 + 2?"), a("4", reasoning="Sum.", refusal=None, audio=None)]},
        [u("2 + 2?"), a("<think>\nSum.\n</think>\n\n4")],
        [],
    ),
    "thoughts in both places": (
        {"messages": [u("2 + 2?"), a("<think>\nSum.\n</think>\n\n4", reasoning_content="Sum.")]},
        [u("2 + 2?"), a("<think>\nSum.\n</think>\n\n4")],
        [],
    ),
    "other thoughts in both places": (
        {"messages": [u("2 + 2?"), a("<think>\nSum.\n</think>\n\n4", reasoning_content="Add.")]},
        "a turn holds thoughts twice",
        [],
    ),
    "reasoning_content beside alpaca": (
        {"instruction": "2 + 2?", "input": "", "output": "4", "reasoning_content": "Sum."},
        [u("2 + 2?"), a("<think>\nSum.\n</think>\n\n4")],
        [],
    ),
    "Chinese-DeepSeek-R1-Distill": (
        {"input": "2 + 2?", "reasoning_content": "Sum.", "content": "4", "score": 10},
        [u("2 + 2?"), a("<think>\nSum.\n</think>\n\n4")],
        [],
    ),
    "smoltalk2": (
        {
            "messages": [u("2 + 2?"), a("4")],
            "source": "x",
            "chat_template_kwargs": {
                "custom_instructions": "Be brief.",
                "enable_thinking": False,
                "python_tools": [],
                "xml_tools": [],
            },
        },
        [s("Be brief."), *ASKED],
        [],
    ),
    "smoltalk2 with tools": (
        {
            "messages": [u("2 + 2?"), a("4")],
            "chat_template_kwargs": {
                "custom_instructions": "",
                "xml_tools": [json.dumps(WEATHER)],
                "python_tools": ["def f(): ..."],
            },
        },
        [s(TOOLS), *ASKED],
        ["chat_template_kwargs.python_tools"],
    ),
    "VQA": (
        {"question": "What is it?", "answer": "A cat", "image": {"bytes": "x", "path": None}},
        "a turn holds an image (image), not only text",
        [],
    ),
    "multimodal Alpaca": (
        {"instruction": "What is it?", "input": "", "output": "A cat", "images": ["1.jpg"]},
        "a turn holds an image (images), not only text",
        [],
    ),
    "names of speakers": (
        {"messages": [u("2 + 2?") | {"name": "Ann"}, a("4")], "topic": "sums", "meta": {"k": 1}},
        ASKED,
        ["topic", "meta", "messages.name"],
    ),
    "UltraChat 200k": (
        {"prompt": "2 + 2?", "prompt_id": "ab", "messages": [u("2 + 2?"), a("4")]},
        ASKED,
        [],
    ),
    # A: arguments of calls
    "calls with parameters (Llama 3.1)": (
        {
            "messages": [
                u("Rome?"),
                a(None, tool_calls=[{"name": "weather", "parameters": {"city": "Rome"}}]),
                t("sun"),
                a("Sunny"),
            ]
        },
        [u("Rome?"), a(CALL), t("sun"), a("Sunny")],
        [],
    ),
    "calls with args (LangChain)": (
        {
            "messages": [
                u("Rome?"),
                a(
                    "",
                    tool_calls=[
                        {
                            "name": "weather",
                            "args": {"city": "Rome"},
                            "id": "c1",
                            "type": "tool_call",
                        }
                    ],
                ),
                t("sun", tool_call_id="c1"),
                a("Sunny"),
            ]
        },
        [u("Rome?"), a(CALL, tool_call_ids=["c1"]), t("sun", tool_call_id="c1"), a("Sunny")],
        [],
    ),
    "Anthropic's parts": (
        {
            "messages": [
                u("Rome?"),
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Look."},
                        {"type": "text", "text": "I look."},
                        {
                            "type": "tool_use",
                            "id": "c1",
                            "name": "weather",
                            "input": {"city": "Rome"},
                        },
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c1",
                            "content": [{"type": "text", "text": "sun"}],
                        }
                    ],
                },
                a("Sunny"),
            ]
        },
        [
            u("Rome?"),
            a("<think>\nLook.\n</think>\n\nI look.\n" + CALL, tool_call_ids=["c1"]),
            t("sun", tool_call_id="c1"),
            a("Sunny"),
        ],
        [],
    ),
    "LLaMA-Factory v1 parts": (
        {
            "tools": json.dumps([WEATHER]),
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "value": "Rome?"}],
                    "loss_weight": 0.0,
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "reasoning", "value": "Look."},
                        {
                            "type": "tool_call",
                            "value": '{"name": "weather", "arguments": {"city": "Rome"}}',
                        },
                    ],
                    "loss_weight": 1.0,
                },
                {"role": "tool", "content": [{"type": "text", "value": "sun"}], "loss_weight": 0.0},
                {
                    "role": "assistant",
                    "content": [{"type": "text", "value": "Sunny"}],
                    "loss_weight": 1.0,
                },
            ],
        },
        [s(TOOLS), u("Rome?"), a("<think>\nLook.\n</think>\n\n" + CALL), t("sun"), a("Sunny")],
        [],
    ),
    "results that are objects or lists": (
        {
            "messages": [
                u("Rome?"),
                a(CALL),
                t(None) | {"content": {"sky": "sun", "rain": None}},
                t(None) | {"content": [1, "b"]},
                a("Sunny"),
            ]
        },
        [u("Rome?"), a(CALL), t('{"sky": "sun"}'), t('[1, "b"]'), a("Sunny")],
        [],
    ),
    "thoughts before a function_call (LLaMA-Factory)": (
        {
            "conversations": turns(
                ("human", "Rome?"),
                (
                    "function_call",
                    '<think>\nLook.\n</think>\n{"name": "weather", "arguments": {"city": "Rome"}}',
                ),
                ("observation", "sun"),
                ("gpt", "Sunny"),
            ),
            "tools": "",
        },
        [u("Rome?"), a("<think>\nLook.\n</think>\n\n" + CALL), t("sun"), a("Sunny")],
        [],
    ),
    "ms-swift tool_call": (
        {
            "messages": [
                u("Both?"),
                {
                    "role": "tool_call",
                    "content": '{"name": "weather", "arguments": {"city": "Rome"}}',
                },
                {
                    "role": "tool_call",
                    "content": '{"name": "weather", "arguments": {"city": "Oslo"}}',
                },
                {"role": "tool_response", "content": "sun"},
                {"role": "tool_response", "content": "snow"},
                a("Sun and snow"),
            ]
        },
        [
            u("Both?"),
            a(CALL + "\n" + CALL.replace("Rome", "Oslo")),
            t("sun"),
            t("snow"),
            a("Sun and snow"),
        ],
        [],
    ),
    "ipython (Llama 3.1)": (
        {"messages": [u("Rome?"), a(CALL), {"role": "ipython", "content": "sun"}, a("Sunny")]},
        [u("Rome?"), a(CALL), t("sun"), a("Sunny")],
        [],
    ),
    "xLAM": (
        {
            "id": 1,
            "query": "Rome?",
            "answers": '[{"name": "weather", "arguments": {"city": "Rome"}}]',
            "tools": json.dumps([WEATHER]),
        },
        [s(TOOLS), u("Rome?"), a(CALL)],
        [],
    ),
    "glaive v2": (
        {
            "system": "SYSTEM: Use tools.",
            "chat": "USER: Rome?\n\n\n"
            'ASSISTANT: <functioncall> {"name": "weather", '
            '"arguments": \'{"city": "Rome"}\'} <|endoftext|>\n\n\n'
            'FUNCTION RESPONSE: {"sky": "sun"}\n\n\nASSISTANT: Sunny <|endoftext|>',
        },
        [s("Use tools."), u("Rome?"), a(CALL), t('{"sky": "sun"}'), a("Sunny")],
        [],
    ),
    # other layouts and roles
    "WildChat": (
        {
            "conversation_hash": "f0",
            "model": "m",
            "conversation": [
                u("2 + 2?") | {"language": "English", "toxic": False, "country": None},
                a("4", language="English"),
            ],
            "turn": 1,
            "language": "English",
            "openai_moderation": [],
            "toxic": False,
        },
        ASKED,
        ["conversation_hash", "model", "language", "conversation.language"],
    ),
    "Capybara": (
        {
            "source": "x",
            "conversation": [{"input": "2 + 2?", "output": "4"}, {"input": "5?", "output": "6"}],
        },
        [*ASKED, u("5?"), a("6")],
        [],
    ),
    "roles of ShareGPT": (
        {
            "id": "x",
            "conversations": turns(
                ("user", "Hi"), ("chatgpt", "Hello"), ("User", "2 + 2?"), ("bing", "4")
            ),
        },
        [u("Hi"), a("Hello"), *ASKED],
        [],
    ),
    "roles prompter, bot, model": (
        {
            "messages": turns(
                ("prompter", "Hi"), ("bot", "Hello"), ("Human", "2 + 2?"), ("model", "4")
            )
        },
        [u("Hi"), a("Hello"), *ASKED],
        [],
    ),
    "role of null beside from": (
        {
            "messages": [
                {"role": None, "content": None, "from": who, "value": said} for who, said in (Q, A)
            ]
        },
        ASKED,
        [],
    ),
    "OpenAssistant, thread": (
        {"thread": turns(("prompter", "2 + 2?"), ("assistant", "4"), role="role", content="text")},
        ASKED,
        [],
    ),
    "OpenAssistant, tree": (
        {
            "message_tree_id": "m",
            "tree_state": "ready_for_export",
            "prompt": {
                "message_id": "m",
                "text": "2 + 2?",
                "role": "prompter",
                "replies": [
                    {"text": "5", "role": "assistant", "rank": 1, "replies": []},
                    {"text": "4", "role": "assistant", "rank": 0, "replies": []},
                ],
            },
        },
        ASKED,
        [],
    ),
    "OpenAssistant, flat": (
        {"message_id": "m", "parent_id": "p", "text": "4", "role": "assistant", "lang": "en"},
        "one message of a tree (OpenAssistant, flat)",
        [],
    ),
    "MOSS 002": (
        {
            "id": 0,
            "meta_instruction": "Be kind.",
            "plain_text": "[Human]: 2 + 2?<eoh> [MOSS]: 4<eoa> [Human]: 5?<eoh> [MOSS]: 6<eoa>",
        },
        [s("Be kind."), *ASKED, u("5?"), a("6")],
        [],
    ),
    "MOSS 003": (
        {
            "conversation_id": "1",
            "meta_instruction": "Be kind.",
            "num_turns": 1,
            "category": "sum",
            "chat": {
                "turn_1": {
                    "Human": "<|Human|>: 2 + 2?<eoh>\n",
                    "Inner Thoughts": "<|Inner Thoughts|>: None<eot>\n",
                    "Commands": "<|Commands|>: None<eoc>\n",
                    "Tool Responses": "<|Results|>: None<eor>\n",
                    "MOSS": "<|MOSS|>: 4<eom>\n",
                }
            },
        },
        [s("Be kind."), *ASKED],
        ["category"],
    ),
    "UltraChat": ({"id": "0", "data": ["2 + 2?", "4", "5?", "6"]}, [*ASKED, u("5?"), a("6")], []),
    "BELLE, several turns": (
        {
            "instruction": "Human:Hi\nAssistant:Hello\nHuman:2 + 2?\nAssistant:",
            "input": "",
            "output": "4",
        },
        [*HH_TURNS, a("4")],
        [],
    ),
    "full-hh-rlhf, response": ({"prompt": HH, "response": " 4"}, [*HH_TURNS, a("4")], []),
    "turns under unknown keys": (
        {"messages": [{"who": "Ann", "says": "2 + 2?"}, {"who": "Bot", "says": "4"}]},
        "prepare.py --text_key='role=who,content=says' reads others",
        [],
    ),
    "turns of unknown roles": (
        {"messages": [{"role": "Customer", "content": "2 + 2?"}, a("4")]},
        "prepare.py --text_key='ROLE=Customer' reads it, with user or assistant for ROLE, or skip to leave",
        [],
    ),
    "a thread under another key": (
        {"dialog": [{"who": "Ann", "says": "How much is it?"}, {"who": "Bot", "says": "Four"}]},
        "prepare.py --text_key='messages=dialog,role=who,content=says'",
        [],
    ),
    "an array of rows in one line": (
        [{"text": "a"}, {"text": "b"}],
        "list, not an object; if the line",
        [],
    ),
    "a picture among the parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
                a("A cat"),
            ]
        },
        "a turn holds 'image_url', not text",
        [],
    ),
    # keys of more sets
    "Aya, FLAN": ({"inputs": "2 + 2?", "targets": "4", "language": "x"}, ASKED, ["language"]),
    "MetaMathQA": ({"query": "2 + 2?", "response": "4", "type": "sum"}, ASKED, ["type"]),
    "NuminaMath 1.5": (
        {"problem": "2 + 2?", "solution": "It is 4.", "answer": "4", "source": "x"},
        [u("2 + 2?"), a("It is 4.")],
        ["answer"],
    ),
    "AceReason": ({"problem": "2 + 2?", "answer": "4"}, ASKED, []),
    "OpenMathInstruct": ({"question": "2 + 2?", "generated_solution": "4"}, ASKED, []),
    "distilabel": ({"instruction": "2 + 2?", "generation": "4", "model_name": None}, ASKED, []),
    "medical-o1": (
        {"Question": "2 + 2?", "Complex_CoT": "Sum.", "Response": "4"},
        [u("2 + 2?"), a("<think>\nSum.\n</think>\n\n4")],
        [],
    ),
    "LIMA": ({"conversations": ["2 + 2?", "4"], "source": "x"}, ASKED, []),
    "Llama-Nemotron": (
        {"input": [u("2 + 2?")], "output": "4", "reasoning": "off", "system_prompt": "Be brief."},
        [s("Be brief."), *ASKED],
        [],
    ),
    "two names of one key": ({"inputs": "2 + 2?", "output": "4", "targets": "5"}, ASKED, ["targets"]),
    "texts under another key": (
        {"dialog": ["Hi", "Hello"], "act": [1, 1]},
        "prepare.py --text_key='messages=dialog' reads",
        [],
    ),
    "responses to what?": (
        {"topic": "sums", "response": "4"},
        "this is responses, of kind='text'; prepare.py --text_key='question=KEY,answer=KEY'",
        [],
    ),
    # ---- layouts of more public sets and services
    "LIMO: the solution, not its result": (
        {"question": "2 + 2?", "solution": "Two and two are 4.", "answer": "four"},
        [u("2 + 2?"), a("Two and two are 4.")],
        ["answer"],
    ),
    "CodeFeedback": (
        {"query": "2 + 2?", "answer": "4", "lang": "python"},
        ASKED,
        ["lang"],
    ),
    "MedQuAD, keys in capitals": ({"qtype": "x", "Question": "2 + 2?", "Answer": "4"}, ASKED, ["qtype"]),
    "a table with headings": (
        {"Prompt": "2 + 2?", "Response": "4", "Reviewer": "Ann"},
        ASKED,
        ["Reviewer"],
    ),
    "Alpaca with headings": (
        {"Instruction": "2 + 2?", "Input": "", "Output": "4", "System": "Be brief."},
        [s("Be brief."), *ASKED],
        [],
    ),
    "numbers of rows (pandas)": (
        {"": "0", "Unnamed: 0": "17", "ID": "x1", "prompt": "2 + 2?", "response": "4"},
        ASKED,
        [],
    ),
    "HuatuoGPT": (
        {"data": ["\u95ee\uff1a2 + 2?", "\u7b54\uff1a4"]},
        ASKED,
        [],
    ),
    "roles of ShareGPT and Cohere": (
        {"conversations": turns(Q, ("bard", "4"), ("User", "Sure?"), ("Chatbot", "Yes"))},
        [*ASKED, u("Sure?"), a("Yes")],
        [],
    ),
    "smolagents, function-calling-chatml": (
        {
            "conversations": turns(
                Q,
                ("function-call", '{"name": "weather", "arguments": {"city": "Rome"}}'),
                ("function-response", "Sun"),
                A,
            )
        },
        [u("2 + 2?"), a(CALL), t("Sun"), a("4")],
        [],
    ),
    "hermes-function-calling: tools in the system message, too": (
        {
            "tools": json.dumps([WEATHER]),
            "conversations": turns(("system", f"<tools> {WEATHER} </tools>"), Q, A),
        },
        [s(f"<tools> {WEATHER} </tools>"), *ASKED],
        [],
    ),
    "Gemini": (
        {
            "systemInstruction": {"role": "system", "parts": [{"text": "Be brief."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "2 + 2?"}]},
                {"role": "model", "parts": [{"text": "4"}]},
            ],
        },
        [s("Be brief."), *ASKED],
        [],
    ),
    "Bedrock": (
        {
            "system": [{"text": "Be brief."}],
            "messages": [
                {"role": "user", "content": [{"text": "2 + "}, {"text": "2?"}]},
                {"role": "assistant", "content": [{"text": "4", "image": None}]},
            ],
        },
        [s("Be brief."), *ASKED],
        [],
    ),
    "parts that are texts": (
        {"messages": [{"role": "user", "content": ["2 + ", "2?"]}, a("4")]},
        ASKED,
        [],
    ),
    "a picture among parts without a type": (
        {"messages": [{"role": "user", "content": [{"image": {"format": "png"}}]}, a("4")]},
        "a turn holds 'keys image', not text",
        [],
    ),
    "turns in Python's notation (pandas)": (
        {"messages": str([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}])},
        ASKED,
        [],
    ),
    "rows within one object": (
        {"data": [{"messages": [u("2 + 2?"), a("4")]}]},
        "'data' holds rows: give a file of that list alone",
        [],
    ),
    "a struct of lists (parquet)": (
        {"conversations": {"from": ["human", "gpt"], "value": ["2 + 2?", "4"]}},
        ASKED,
        [],
    ),
    # ---- turns of one question and answer each, and answers beside turns
    "xtuner, InternLM": (
        {
            "conversation": [
                {"system": "Be brief.", "input": "2 + 2?", "output": "4"},
                {"system": "Be brief.", "input": "5?", "output": "6"},
            ]
        },
        [s("Be brief."), *ASKED, u("5?"), a("6")],
        [],
    ),
    "xtuner, another system message later": (
        {
            "conversation": [
                {"input": "2 + 2?", "output": "4"},
                {"system": "Be brief.", "input": "5?", "output": "6"},
            ]
        },
        "a system message not first",
        [],
    ),
    "COIG, question and answer": (
        {"instruction": "Talk.", "conversations": [{"question": "2 + 2?", "answer": "4"}]},
        ASKED,
        ["instruction"],
    ),
    "turns of user and assistant": (
        {"messages": [{"user": "2 + 2?", "assistant": "4"}, {"user": "5?", "assistant": "6"}]},
        [*ASKED, u("5?"), a("6")],
        [],
    ),
    "turns of prompt and response": (
        {"messages": [{"prompt": "2 + 2?", "response": "4", "topic": "sums"}]},
        ASKED,
        ["messages.topic"],
    ),
    "keys of other turns beside a role": (
        {"messages": [u("2 + 2?") | {"answer": "x", "input": "y"}, a("4")]},
        ASKED,
        ["messages.answer", "messages.input"],
    ),
    "Dolphin R1": (
        {
            "messages": [s("Be brief."), u("2 + 2?")],
            "reasoning": "Sum.",
            "answer": "4",
            "model": "m",
        },
        [s("Be brief."), u("2 + 2?"), a("<think>\nSum.\n</think>\n\n4")],
        ["model"],
    ),
    "AceMath": ({"messages": [u("2 + 2?")], "answer": "4"}, ASKED, []),
    "turns with a response": ({"messages": [u("2 + 2?")], "response": "4"}, ASKED, []),
    "turns with a completion": ({"messages": [u("2 + 2?")], "completion": "4"}, ASKED, []),
    "turns with an output": ({"messages": [u("2 + 2?")], "output": "4"}, ASKED, []),
    "whole turns with an output": ({"messages": [u("2 + 2?"), a("4")], "output": "5"}, ASKED, ["output"]),
    "OpenR1-Math: an answer beside a whole conversation": (
        {"problem": "2 + 2?", "solution": "It is 4.", "answer": "4", "messages": [u("2 + 2?"), a("4.")]},
        [u("2 + 2?"), a("4.")],
        ["solution", "answer"],
    ),
    "SQuAD": (
        {
            "id": "1",
            "title": "Sums",
            "context": "2 + 2 is 4.",
            "question": "2 + 2?",
            "answers": {"text": ["4", "four"], "answer_start": [9, 9]},
        },
        [u("2 + 2 is 4.\n2 + 2?"), a("4")],
        ["title"],
    ),
    "SQuAD 2, no answer": (
        {"context": "Tea.", "question": "2 + 2?", "answers": {"text": [], "answer_start": []}},
        "answers holds no text",
        [],
    ),
    "SQuAD: answers as a list of texts": (
        {"question": "2 + 2?", "context": "2 + 2 is 4.", "answers": ["4"]},
        [u("2 + 2 is 4.\n2 + 2?"), a("4")],
        [],
    ),
    "SQuAD: answers as a text": (
        {"question": "2 + 2?", "context": "Tea.", "answers": "x"},
        "answers holds no text",
        [],
    ),
    "SQuAD: answers as numbers": (
        {"question": "2 + 2?", "context": "Tea.", "answers": [4, 5]},
        "answers holds no text",
        [],
    ),
    "instructions and targets": (
        {"instruction": "Add.", "input": "2 + 2?", "target": "4"},
        [u("Add.\n2 + 2?"), a("4")],
        [],
    ),
    "Natural Instructions": (
        {"definition": "Add.", "input": "2 + 2?", "target": "4"},
        [u("Add.\n2 + 2?"), a("4")],
        [],
    ),
    "BBH": ({"input": "2 + 2?", "target": "4"}, ASKED, []),
    "an instruction and its target": (
        {"instruction": "2 + 2?", "input": "", "target": "4"},
        ASKED,
        [],
    ),
    "counselling conversations": ({"Context": "2 + 2?", "Response": "4"}, ASKED, []),
    "LCCC: a list of texts": (["2 + 2?", "4"], ASKED, []),
    "Infinity-Instruct: labels that mark nothing": (
        {"conversations": turns(Q, A), "label": {"ability_en": ["sums"]}, "langdetect": "en"},
        ASKED,
        ["label", "langdetect"],
    ),
    "flags of turns that nobody knows": (
        {"messages": [u("2 + 2?"), a("4", to_mask=False, is_trained=True, n=1, ok=True)]},
        ASKED,
        ["messages.to_mask", "messages.is_trained"],
    ),
    "LMFlow: rows within one object": (
        {"type": "conversation", "instances": [{"system": "x", "messages": [u("2 + 2?"), a("4")]}]},
        "'instances' holds rows: give a file of that list alone",
        [],
    ),
    "exchanges under another key": (
        {"dialog": [{"input": "2 + 2?", "output": "4"}]},
        "prepare.py --text_key='messages=dialog' reads",
        [],
    ),
    "lists that are no turns": (
        {"ask": "2 + 2?", "spans": {"text": ["4"], "start": [0]}},
        "--text_key='question=KEY,answer=KEY'",
        [],
    ),
    # ---- what tables and services make of rows
    "tools and calls in Python's notation (pandas)": (
        {"tools": str([WEATHER]), "messages": [u("Rome?"), a(None, tool_calls=str([WEATHER_CALL]))]},
        [s(TOOLS), u("Rome?"), a(CALL, tool_call_ids=["c1"])],
        [],
    ),
    "turns as pandas writes NumPy's arrays": (
        {
            "messages": "[{'role': 'user', 'content': '2 + 2?'}\n"
            """ {'role': 'assistant', 'content': "it's {a} {b}\\n"}"""
            " {'role': 'user', 'content': 'x'} {'role': 'assistant', 'content': '4'}]"
        },
        [u("2 + 2?"), a("it's {a} {b}\n"), u("x"), a("4")],
        [],
    ),
    "tools and calls that are texts, over several lines": (
        {
            "tools": [json.dumps(WEATHER, indent=2)],
            "messages": [
                u("Rome?"),
                a(None, tool_calls=['{"name": "weather", "parameters": {"city": "Rome"}}']),
            ],
        },
        [s(TOOLS), u("Rome?"), a(CALL)],
        [],
    ),
    "a list of tools with null (parquet)": (
        {"tools": [None, WEATHER | {"strict": None}], "messages": [u("2 + 2?"), a("4")]},
        [s(TOOLS), *ASKED],
        [],
    ),
    "a call whose arguments are an empty text": (
        {"messages": [u("?"), a(None, tool_calls=[{"function": {"name": "f", "arguments": ""}}])]},
        [u("?"), a(call("f"))],
        [],
    ),
    "joined tables: turns that are empty": (
        {"messages": [], "conversations": turns(Q, A)},
        ASKED,
        [],
    ),
    "joined tables: turns beside a question": (
        {"conversations": [], "instruction": "2 + 2?", "input": None, "output": "4"},
        ASKED,
        [],
    ),
    "what exporters write where nothing is": (
        {
            "tools": [None, "null"],
            "messages": [
                u("2 + 2?"),
                a("4", tool_calls="null", function_call="None", reasoning_content="nan"),
            ],
        },
        ASKED,
        [],
    ),
    "a system prompt of None": ({"system": "None", "prompt": "2 + 2?", "response": "4"}, ASKED, []),
    "an answer that is a turn": (
        {"prompt": [u("2 + 2?")], "completion": a("4")},
        ASKED,
        [],
    ),
    "a picture in a result (OpenAI)": (
        {"messages": [u("?"), a(CALL), t(None) | {"content": [{"type": "image_url"}]}, a("4")]},
        "a turn holds 'image_url', not text",
        [],
    ),
    "a picture in a result (Anthropic)": (
        {
            "messages": [
                u("?"),
                a([{"type": "tool_use", "id": "c", "name": "f", "input": {}}]),
                u([{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}]),
                a("4"),
            ]
        },
        "a turn holds 'image', not text",
        [],
    ),
    "thoughts that are no text": (
        {"messages": [u("2 + 2?"), a("4", reasoning={"content": "Sum."})]},
        "thoughts are dict, not text",
        [],
    ),
    "thoughts of a row that are no text": (
        {"prompt": "2 + 2?", "response": "4", "reasoning_content": ["Sum."]},
        "thoughts are list, not text",
        [],
    ),
    "flags that say nothing": (
        {"messages": [u("2 + 2?"), a("4", weight=[0], train="last", loss=True)], "label": -1},
        ASKED,
        ["messages.weight", "messages.train", "label"],
    ),
    "flags of rows that nobody knows": (
        {"messages": [u("2 + 2?"), a("4")], "trainable": False, "is_train": True, "ok": False},
        ASKED,
        ["trainable"],
    ),
    "a line of text": ("A line.", "str, not an object; if it is a row, let the file's name end in", []),
}
# how prompts begin that a chat template has written
RENDERED = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "\n<|im_start|>system\nHi",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
    "<s>[INST] Hi [/INST]",
    "<|user|>\nHi</s>\n<|assistant|>\n",
    "<bos><start_of_turn>user\nHi",
    "Hi\n<extra_id_1>Assistant\nHello\n<extra_id_1>User\n2 + 2?",  # HelpSteer
    "<|prompter|>Hi<|endoftext|><|assistant|>",  # OpenAssistant
    "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>",
    "<｜User｜>Hi<｜Assistant｜>",
    "<|begin_of_text|><|header_start|>user<|header_end|>\n\nHi<|eot|>",  # Llama 4
    "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi",  # Command R
    "<|start|>user<|message|>Hi<|end|>",  # gpt-oss
    "<|start_of_role|>user<|end_of_role|>Hi",  # Granite
    "<|im_user|>user<|im_middle|>Hi<|im_end|>",  # Kimi
    "<|system|>\nHi<|user|>\nHi<|assistant|>",
)
# and those that only their end shows: MosaicML's dolly_hhrlhf, Vicuna's
OPENED = (
    "Below is an instruction.\n\n### Instruction:\nHi\n\n### Response:\n",
    "A chat. USER: Hi ASSISTANT:",
    "USER: Hi ASSISTANT:",
    "A chat\nUSER: Hi\nASSISTANT:",
)

# name: (row, the contents of answers that are learned, "" if the row is left out)
FLAGS = {
    "weight (OpenAI)": (
        {"messages": [u("a"), a("BAD", weight=0), u("b"), a("GOOD", weight=1)]},
        ["GOOD"],
    ),
    "train (axolotl)": (
        {
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "gpt", "value": "BAD", "train": False},
                {"from": "human", "value": "b"},
                {"from": "gpt", "value": "GOOD"},
            ]
        },
        ["GOOD"],
    ),
    "train_detail (axolotl)": (
        {
            "messages": [
                u("a"),
                a("BAD", train_detail=[{"begin_offset": 0, "end_offset": 2, "train": False}]),
                u("b"),
                a("GOOD", train=True),
            ]
        },
        ["GOOD"],
    ),
    "train of parts": (
        {
            "messages": [
                u("a"),
                a([{"type": "text", "text": "BAD", "train": False}]),
                u("b"),
                a([{"type": "text", "text": "GOOD", "train": True}]),
            ]
        },
        ["GOOD"],
    ),
    "loss (ms-swift)": (
        {"messages": [u("a"), a("BAD", loss=False), u("b"), a("GOOD", loss=None)]},
        ["GOOD"],
    ),
    "loss_scale (ms-swift)": (
        {"messages": [u("a"), a("BAD", loss_scale=0.0), u("b"), a("GOOD", loss_scale=1.0)]},
        ["GOOD"],
    ),
    "loss_weight (LLaMA-Factory v1)": (
        {"messages": [u("a"), a("BAD", loss_weight=0.0), u("b"), a("GOOD", loss_weight=1.0)]},
        ["GOOD"],
    ),
    "loss_mask (StepFun)": (
        {"messages": [u("a"), a("BAD", loss_mask=0), u("b"), a("GOOD", loss_mask=1)]},
        ["GOOD"],
    ),
    "training (axolotl)": (
        {"messages": [u("a"), a("BAD", training=False), u("b"), a("GOOD")]},
        ["GOOD"],
    ),
    "flags as text": (
        {"messages": [u("a"), a("BAD", weight="0"), u("b"), a("GOOD", train="true")]},
        ["GOOD"],
    ),
    "learn (prepare.py)": (
        {"messages": [u("a"), a("BAD", learn=False), u("b"), a("GOOD")]},
        ["GOOD"],
    ),
    "nothing to learn": ({"messages": [u("a"), a("BAD", weight=0)]}, []),
    "calls": (
        {"messages": [u("a"), a(None, weight=0, tool_calls=[{"name": "f"}]), t("x"), a("GOOD")]},
        ["GOOD"],
    ),
    "exchanges": (
        {
            "conversation": [
                {"human": "a", "assistant": "BAD", "weight": 0},
                {"human": "b", "assistant": "GOOD"},
            ]
        },
        ["GOOD"],
    ),
    "output_with_loss (xtuner)": (
        {
            "conversation": [
                {"input": "a", "output": "BAD", "output_with_loss": False},
                {"input": "b", "output": "GOOD", "output_with_loss": True},
            ]
        },
        ["GOOD"],
    ),
}
BAD_MARKS = [{"kto_tag": False}, {"label": False}, {"label": 0}, {"label": "0"}, {"label": 0.0}]
BAD_MARKS += [
    {"label": "False"},
    {"kto_tag": None, "label": False},
    {"weight": 0},
    {"train": False},
    {"Label": "0"},
    {"Weight": 0},
]
GOOD_MARKS = [
    {},
    {"label": None},
    {"label": True},
    {"label": 1},
    {"kto_tag": "true"},
    {"weight": 1},
]
GOOD_MARKS += [{"label": "sums"}, {"label": 3}, {"weight": None}, {"loss": 0.0}]

GOOD, BAD = a("good"), a("bad")
# name: (row, pair or why it is left out, unread keys)
PAIRS = {
    "ultrafeedback_binarized": (
        {
            "prompt": "Hi",
            "prompt_id": "f",
            "chosen": [u("Hi"), GOOD],
            "rejected": [u("Hi"), BAD],
            "messages": [u("Hi"), GOOD],
            "score_chosen": 8.0,
            "score_rejected": 2.0,
        },
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
    "Firefly dummy_dpo": (
        {"chosen": [u("Hi"), GOOD], "rejected": [u("Hi"), BAD], "messages": [u("Hi"), GOOD]},
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
    "a prompt before answers of several turns": (
        {
            "prompt": [u("one")],
            "chosen": [a("two"), u("three"), GOOD],
            "rejected": [a("two"), u("three"), BAD],
        },
        Pair([u("one"), a("two"), u("three")], "good", "bad"),
        [],
    ),
    "a prompt that is a system message": (
        {"prompt": [s("Be brief.")], "chosen": [u("Hi"), GOOD], "rejected": [u("Hi"), BAD]},
        Pair([s("Be brief."), u("Hi")], "good", "bad"),
        [],
    ),
    "a history before answers of two turns": (
        {"prompt": [u("one"), a("two")], "chosen": [u("Hi"), GOOD], "rejected": [u("Hi"), BAD]},
        Pair([u("one"), a("two"), u("Hi")], "good", "bad"),
        [],
    ),
    "the answers add a system message": (
        {
            "prompt": "Hi",
            "chosen": [s("Be brief."), u("Hi"), GOOD],
            "rejected": [s("Be brief."), u("Hi"), BAD],
        },
        Pair([s("Be brief."), u("Hi")], "good", "bad"),
        [],
    ),
    "system_prompt beside a pair": (
        {
            "system_prompt": "Be brief.",
            "question": "Hi",
            "chosen": "good",
            "rejected": "bad",
            "model": "m",
        },
        Pair([s("Be brief."), u("Hi")], "good", "bad"),
        ["model"],
    ),
    "an answer not to learn from": (
        {"prompt": "Hi", "chosen": [a("good", weight=0)], "rejected": [BAD]},
        "the chosen answer is one not to learn from",
        [],
    ),
    "answers as JSON (CSV)": (
        {
            "prompt": "Hi",
            "chosen": json.dumps([u("Hi"), GOOD]),
            "rejected": json.dumps([u("Hi"), BAD]),
        },
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
    "full-hh-rlhf": (
        {"prompt": HH, "response": " 4", "chosen": " 4", "rejected": " 5"},
        Pair(HH_TURNS, "4", "5"),
        [],
    ),
    "Nectar": (
        {
            "prompt": HH + " ",
            "answers": [
                {"answer": "5", "model": "m", "rank": 2.0},
                {"answer": "6", "model": "n", "rank": 3.0},
                {"answer": "4", "model": "o", "rank": 1.0},
            ],
            "turns": 2,
            "num_responses": 3,
            "source": ["x"],
            "good_natured": True,
        },
        Pair(HH_TURNS, "4", "6"),
        [],
    ),
    "PKU-SafeRLHF": (
        {
            "prompt": "Hi",
            "response_0": "bad",
            "response_1": "good",
            "is_response_0_safe": True,
            "is_response_1_safe": True,
            "better_response_id": 1,
            "safer_response_id": 1,
        },
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
    "SHP": (
        {
            "post_id": "p",
            "domain": "d",
            "history": "Hi",
            "human_ref_A": "bad",
            "human_ref_B": "good",
            "labels": 0,
            "score_A": 1,
            "score_B": 5,
        },
        Pair([u("Hi")], "good", "bad"),
        ["domain"],
    ),
    "arena": (
        {
            "question_id": "q",
            "model_a": "m",
            "model_b": "n",
            "winner": "model_b",
            "judge": "j",
            "conversation_a": [u("Hi"), BAD],
            "conversation_b": [u("Hi"), GOOD],
            "turn": 1,
        },
        Pair([u("Hi")], "good", "bad"),
        ["model_a", "model_b", "judge"],
    ),
    "arena, a tie": (
        {"winner": "tie", "conversation_a": [u("Hi"), BAD], "conversation_b": [u("Hi"), GOOD]},
        "neither answer is preferred",
        [],
    ),
    "UltraFeedback, raw": (
        {
            "source": "x",
            "instruction": "Hi",
            "models": ["m", "n"],
            "completions": [
                {"model": "m", "response": "bad", "fine-grained_score": 1.5, "overall_score": 10.0},
                {"model": "n", "response": "good", "fine-grained_score": 4.5, "overall_score": 8.0},
            ],
        },
        Pair([u("Hi")], "good", "bad"),
        ["models"],
    ),
    "ms-swift rejected_messages": (
        {"messages": [u("Hi"), GOOD], "rejected_messages": [u("Hi"), BAD]},
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
    "distilabel orca": (
        {"system": "Be kind.", "input": "Hi", "chosen": "good", "rejected": "bad"},
        Pair([s("Be kind."), u("Hi")], "good", "bad"),
        [],
    ),
    "UltraInteract": (
        {"trajectory": turns(("user", "Hi")), "chosen": "good", "rejected": "bad"},
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
    "CValues": (
        {"prompt": "Hi", "pos_resp": "good", "neg_resp": "bad", "pos_type": "kind"},
        Pair([u("Hi")], "good", "bad"),
        ["pos_type"],
    ),
    "StackExchange": (
        {"question": "Hi", "response_j": "good", "response_k": "bad"},
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
    "HelpSteer2": (
        {"prompt": "Hi", "response_1": "bad", "response_2": "good", "preference_strength": 2},
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
    "HelpSteer3": (
        {
            "context": [u("Hi")],
            "response1": "good",
            "response2": "bad",
            "overall_preference": -3,
        },
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
    "HelpSteer3, a tie": (
        {"context": [u("Hi")], "response1": "a", "response2": "b", "overall_preference": 0},
        "neither answer is preferred",
        [],
    ),
    "answers alone": (
        {"id": "x1", "ask": "Hi", "chosen": "good", "rejected": "bad"},
        "has its question (keys id, ask, chosen, rejected); prepare.py --text_key='question=ask' names it",
        [],
    ),
    "answers alone, several texts": (
        {"ask": "Hi", "topic": "x", "chosen": "good", "rejected": "bad"},
        "prepare.py --text_key='question=KEY' names it",
        [],
    ),
    "answers under unknown keys": (
        {"ask": "Hi", "better": "good", "worse": "bad"},
        "--text_key='question=KEY,chosen=KEY,rejected=KEY'",
        [],
    ),
    "preference tuning (OpenAI)": (
        {
            "input": {"messages": [u("Hi")], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [GOOD],
            "non_preferred_output": [BAD],
        },
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
    "When2Call": (
        {"messages": [u("Hi")], "chosen_response": GOOD, "rejected_response": BAD},
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
    "a table of pairs with headings": (
        {"Prompt": "Hi", "Chosen": "good", "Rejected": "bad"},
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
    "answers that are accepted": (
        {"input": "Hi", "accepted": "good", "rejected": "bad"},
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
    "torchtune": (
        {"chosen_conversations": [u("Hi"), GOOD], "rejected_conversations": [u("Hi"), BAD]},
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
    "NeMo RL": (
        {
            "context": [u("Hi")],
            "completions": [{"rank": 1, "completion": [BAD]}, {"rank": 0, "completion": [GOOD]}],
        },
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
    "ColossalAI": (
        {
            "context": turns(("human", "Hi"), content="content"),
            "chosen": turns(("assistant", "good"), content="content"),
            "rejected": turns(("assistant", "bad"), content="content"),
        },
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
    "a passage beside two conversations": (
        {"context": "Tea.", "chosen": [u("Hi"), GOOD], "rejected": [u("Hi"), BAD]},
        Pair([u("Hi")], "good", "bad"),
        ["context"],
    ),
    "StackExchange, scored": (
        {
            "qid": 1,
            "question": "Hi",
            "answers": [
                {"answer_id": 1, "text": "bad", "pm_score": 1, "selected": False},
                {"answer_id": 2, "text": "good", "pm_score": 4, "selected": True},
            ],
            "date": "2020",
        },
        Pair([u("Hi")], "good", "bad"),
        ["date"],
    ),
    "AlpacaFarm": (
        {"instruction": "Hi", "input": "", "output_1": "bad", "output_2": "good", "preference": 2},
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
    "two outputs and a label": (
        {"instruction": "Hi", "output_1": "good", "output_2": "bad", "label": 1},
        "--text_key='question=KEY,chosen=KEY,rejected=KEY'",
        [],
    ),
    "trl stepwise": (
        {"prompt": "Hi", "completions": ["one", "two"], "labels": [True, False]},
        "these are steps with labels (trl's stepwise)",
        [],
    ),
    "answers that are JSON": (
        {"prompt": "Hi", "chosen": '[{"a": 1}]', "rejected": '[{"role": "user", "content": "x"}]'},
        Pair([u("Hi")], '[{"a": 1}]', '[{"role": "user", "content": "x"}]'),
        [],
    ),
    "an answer that is JSON with a role": (
        {"prompt": "Hi", "chosen": '{"role": "user"}', "rejected": "{'from': 'admin'}"},
        Pair([u("Hi")], '{"role": "user"}', "{'from': 'admin'}"),
        [],
    ),
    "answers as pandas writes NumPy's arrays": (
        {
            "prompt": "Hi",
            "chosen": "[{'content': 'Hi', 'role': 'user'}\n {'content': 'good', 'role': 'assistant'}]",
            "rejected": "[{'content': 'Hi', 'role': 'user'}\n {'content': 'bad', 'role': 'assistant'}]",
        },
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
    "answers as pandas writes one turn": (
        {
            "conversations": str(turns(("human", "Hi"))),
            "chosen": "{'from': 'gpt', 'value': 'good'}",
            "rejected": "{'from': 'gpt', 'value': 'bad'}",
        },
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
    "joined tables of pairs": (
        {"conversations": [], "prompt": "Hi", "chosen": "good", "rejected": "bad"},
        Pair([u("Hi")], "good", "bad"),
        [],
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_a_conversation(name: str) -> None:
    row, expected, unread = CHATS[name]
    messages, problem = messages_of(row)
    if isinstance(expected, str):
        assert messages == [] and expected in problem and "\n" not in problem
    else:
        assert (messages, problem) == (expected, "")
        assert chat_problem(messages, row) == ""
        assert sorted(unread_keys(row, "chat")) == sorted(unread)


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair(name: str) -> None:
    row, expected, unread = PAIRS[name]
    pair, problem = pair_of(row)
    if isinstance(expected, str):
        assert pair is None and expected in problem and "\n" not in problem
    else:
        assert (pair, problem) == (expected, "")
        assert pair_problem(row, pair) == ""
        assert sorted(unread_keys(row, "preference")) == sorted(unread)


@pytest.mark.parametrize("prompt", RENDERED)
def test_a_prompt_that_a_chat_template_wrote_is_refused(prompt: str) -> None:
    said = "the prompt is written by a chat template (<"
    for key, answer in (("prompt", "response"), ("instruction", "output"), ("question", "answer")):
        assert messages_of({key: prompt, answer: "4"})[1].replace("([", "(<").startswith(said)
        row = {key: prompt, "chosen": "good", "rejected": "bad"}
        assert pair_of(row)[1].replace("([", "(<").startswith(said)
    asked = f"What is this? {prompt}" if "extra_id" not in prompt else "What is <extra_id_1>?"
    assert messages_of({"prompt": asked, "response": "4"}) == ([u(asked), a("4")], "")


@pytest.mark.parametrize(
    "prompt",
    [
        "Finish it: USER: a, what does ASSISTANT:",
        "What stands between ### Instruction: and ### Response:",
        "<|endoftext|> \u662f\u4ec0\u4e48\uff1f",
        "<|endoftext|> ends a text. Why?",
        "<|word|>",
        "<|begin_of_text|>, what is it?",
        "<|fim_prefix|>def f(",
        "<\uff5cword\uff5c>",
        "<|username|> says hi",
    ],
)
def test_an_ordinary_prompt_that_speaks_of_marks_is_kept(prompt: str) -> None:
    assert messages_of({"prompt": prompt, "response": "4"}) == ([u(prompt), a("4")], "")


def test_turns_that_pandas_has_written_to_csv(tmp_path: Path) -> None:
    """As parquet gives them: arrays of objects, an object of arrays, NaN for null."""
    pandas, numpy = pytest.importorskip("pandas"), pytest.importorskip("numpy")
    texts = ["it's nan, array([1], dtype=int) " + "x y " * 40, 'say "hi" } { ' + "z " * 90]
    wanted = [u(texts[0]), a(texts[1])]

    def array(*items: object) -> object:
        return numpy.array([*items, None], dtype=object)[:-1]

    for turns in (
        array(*(turn | {"weight": math.nan} for turn in wanted)),
        array(wanted[0], wanted[1] | {"tool_calls": array(), "name": None}),
        {"from": array("human", "gpt"), "value": array(*texts)},
        {"from": numpy.array(["human", "gpt"]), "value": array(*texts)},
        {"from": numpy.array(["human", "gpt"], dtype="S5").astype(str), "value": texts},
        wanted,
    ):
        pandas.DataFrame({"conversations": [turns]}).to_csv(tmp_path / "a.csv", index=False)
        (row,) = records.read_records(str(tmp_path / "a.csv"))
        assert messages_of(row.value) == (wanted, "")
    begun = time.monotonic()
    for part in (", dtype=", ", dtype=x", "array(", "array(["):
        messages_of({"conversations": "[{'from': " + part * 50_000})
    assert time.monotonic() - begun < 4


@pytest.mark.parametrize("nothing", [None, "", []])
def test_a_table_joined_from_sets_of_several_kinds(nothing) -> None:
    """Hugging Face's datasets gives every row all columns, with null in those of other sets."""
    empty = dict.fromkeys(("messages", "prompt", "response", "text", "chosen", "rejected"), nothing)
    empty["rejected_messages"] = nothing
    for row in ({"messages": [u("2 + 2?"), a("4")]}, {"prompt": "2 + 2?", "response": "4"}):
        assert messages_of(empty | row) == (ASKED, "")
        assert document_of(empty | row)[0] == document_of(row)[0]
    assert document_of(empty | {"text": "A text."}) == ("A text.", "")
    pair, problem = pair_of(empty | {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"})
    assert (pair, problem) == (Pair([u("2 + 2?")], "4", "5"), "")
    assert messages_of(empty | {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"})[1]


@pytest.mark.parametrize("arguments", ["", "null", "{}", None, {}])
def test_a_call_without_arguments_has_an_empty_object(arguments) -> None:
    written = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert call_text({"function": {"name": "f", "arguments": arguments}}) == written


@pytest.mark.parametrize("prompt", OPENED)
def test_a_prompt_that_ends_as_a_chat_template_opens_an_answer_is_refused(prompt: str) -> None:
    said = f"the prompt is written by a chat template ({prompt.split()[-1]}"
    problem = messages_of({"prompt": prompt, "response": "4"})[1]
    assert problem.replace("(### ", "(").startswith(said)
    for asked in (prompt + " x", prompt.replace("USER", "user").replace("Instruction", "Words")):
        assert messages_of({"prompt": asked, "response": "4"}) == ([u(asked), a("4")], "")
    begun = time.monotonic()
    for part in (prompt, prompt.split("Hi")[0], prompt.split("Hi")[1], "\n"):
        messages_of({"prompt": part * 20_000, "response": "4"})
    assert time.monotonic() - begun < 2


def learned(messages: list[dict]) -> list[str]:
    answers = [message for message in messages if message["role"] == "assistant"]
    return [answer["content"] for answer in answers if answer.get("learn", True)]


@pytest.mark.parametrize("name", FLAGS)
def test_what_is_not_to_be_learned(name: str) -> None:
    row, expected = FLAGS[name]
    messages, problem = messages_of(row)
    assert not problem and learned(messages) == expected
    assert chat_problem(messages, row) == ("" if expected else "bad answer")


def test_a_turn_that_is_to_be_learned_in_part() -> None:
    parts = [{"type": "text", "text": one, "train": one == "b"} for one in "ab"]
    assert messages_of({"messages": [u("?"), a(parts)]})[1] == "a turn is to be learned in part"
    detail = [{"begin_offset": 0, "end_offset": 2, "train": one} for one in (True, False)]
    talk = [u("?"), a("abcdef", train_detail=detail)]
    assert messages_of({"messages": talk})[1] == "a turn is to be learned in part"


def test_a_bad_answer_is_one_in_every_layout() -> None:
    for name, (row, expected, _) in CHATS.items():
        if isinstance(row, dict) and not isinstance(expected, str):
            for mark in BAD_MARKS:
                assert (
                    chat_problem(messages_of(row | mark)[0], row | mark) == "bad answer"
                ), name
            for mark in GOOD_MARKS:
                assert chat_problem(messages_of(row | mark)[0], row | mark) == "", name


def test_text_key_gives_several_names_to_one_role() -> None:
    """The last one won, so one of two was always unknown."""
    row = {"messages": [{"role": "Ann", "content": "2 + 2?"}, {"role": "Bot", "content": "4"}]}
    for names in ("user=Bob,user=Ann,assistant=Bot,assistant=Agent", "assistant=Agent+assistant=Bot+user=Ann"):
        assert messages_of(renamed(row, names)) == (ASKED, "")
    with pytest.raises(UserError, match="names question twice; leave one out"):
        renamed({"a": "x"}, "question=a,question=b")
    with pytest.raises(UserError, match="has its own, assistant=A,assistant=B"):
        renamed(row, "user=Ann,assistant=Agent+Bot")


def test_text_key_names_threads_roles_and_their_keys() -> None:
    row = {
        "thread_of_mine": [{"who": "Ann", "says": "2 + 2?"}, {"who": "Bot", "says": "4"}],
        "n": {"a": 1},
    }
    names = "messages=thread_of_mine,role=who,content=says,user=Ann,assistant=Bot"
    found = renamed(row, names)
    assert messages_of(found) == (ASKED, "") and unread_keys(found, "chat") == ["n"]
    assert (
        messages_of(
            renamed({"q": {"text": "2 + 2?", "tag": "x"}, "r": "4"}, "question=q.text,answer=r")
        )[0]
        == ASKED
    )
    assert unread_keys(renamed({"q": "2 + 2?", "r": "4"}, "question=q,answer=r"), "chat") == []
    packed = {"q": json.dumps({"text": "2 + 2?", "tag": "x"}), "r": "4"}  # CSV
    found = renamed(packed, "question=q.text,answer=r")
    assert messages_of(found) == (ASKED, "") and unread_keys(found, "chat") == ["q"]
    assert document_of({"meta": '{"body": {"text": "x"}}'}, "meta.body.text") == ("x", "")
    packed = {"log": json.dumps(row["thread_of_mine"])}
    assert messages_of(renamed(packed, names.replace("thread_of_mine", "log"))) == (ASKED, "")


# ---- the same row in every container ---------------------------------------------------------


def write_containers(rows: list[dict], folder: Path) -> Iterator[Path]:
    """Yield the files of the same rows as an array, as lines, as CSV and as parquet."""
    import csv

    import pyarrow as pa
    import pyarrow.parquet as pq

    stem = len(list(folder.iterdir()))
    array, lines, table, parquet = (
        folder / f"{stem}.{end}" for end in ("json", "jsonl", "csv", "parquet")
    )
    array.write_text(json.dumps(rows), encoding="utf-8")
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with open(table, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row))
        writer.writeheader()
        packed = [
            {k: v if isinstance(v, str | None) else json.dumps(v) for k, v in row.items()}
            for row in rows
        ]
        writer.writerows(packed)
    yield from (array, lines, table)
    try:
        arrow = pa.Table.from_pylist(rows)
    except (pa.ArrowInvalid, pa.ArrowTypeError):  # a column of texts and lists cannot be in a table
        return
    pq.write_table(arrow, parquet)
    yield parquet


@pytest.mark.parametrize("kind", ["chat", "preference"])
def test_the_container_does_not_change_a_row(kind: str, tmp_path: Path) -> None:
    read = messages_of if kind == "chat" else pair_of
    n_files = 0
    for row, expected, _ in (CHATS if kind == "chat" else PAIRS).values():
        if isinstance(row, list) or isinstance(expected, str):
            continue
        for file in write_containers([row], tmp_path):
            (record,) = records.read_records(str(file))
            assert read(record.value) == (expected, ""), file
            n_files += 1
    assert n_files > 3.5 * (40 if kind == "chat" else 14)


def test_nulls_of_parquet_structs_are_no_arguments(tmp_path: Path) -> None:
    """All structs of a column have the keys of all of them."""
    tools = [
        {"name": name, "parameters": {"properties": {key: {"type": "string"}}}}
        for name, key in (("f", "x"), ("g", "y"))
    ]
    rows = [
        {
            "tools": [tools[k]],
            "messages": [
                {"role": "user", "content": "?", "tool_calls": None},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"function": {"name": name, "arguments": {"deep": {key: 2}, key: "1"}}}
                    ],
                },
                {"role": "tool", "content": "done", "tool_calls": None},
                {"role": "assistant", "content": "Done", "tool_calls": None},
            ],
        }
        for k, (name, key) in enumerate((("f", "x"), ("g", "y")))
    ]
    found = [
        [messages_of(record.value) for record in records.read_records(str(file))]
        for file in write_containers(rows, tmp_path)
    ]
    assert len(found) == 4 and all(one == found[0] for one in found)
    assert [call("f", deep={"x": 2}, x="1"), call("g", deep={"y": 2}, y="1")] == [
        messages[2]["content"] for messages, _ in found[0]
    ]
    assert "null" not in json.dumps(found[0])


def test_binary_columns_of_text(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = {
        "question": [b"2 + 2?", b"\xff"],
        "answer": [b"4", b"5"],
        "history": [[{"role": b"user", "content": b"Hi"}, {"role": b"assistant", "content": b"Ho"}]] * 2,
    }
    pq.write_table(pa.table(rows), tmp_path / "x.parquet")
    first, second = (
        messages_of(one.value) for one in records.read_records(str(tmp_path / "x.parquet"))
    )
    assert first == ([u("Hi"), a("Ho"), *ASKED], "")
    assert second[1].startswith("bytes, not text, under 'question'")


def test_maps_of_parquet_are_objects(tmp_path: Path) -> None:
    """As {"city": "Rome"} of JSON, not as [["city", "Rome"]]."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = pa.string()
    calls = pa.list_(pa.struct([("name", text), ("arguments", pa.map_(text, text))]))
    turn = pa.struct([("role", text), ("content", text), ("tool_calls", calls)])
    talk = [
        {"role": "user", "content": "2 + 2?", "tool_calls": None},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"name": "weather", "arguments": [("city", "Rome")]}],
        },
    ]
    table = pa.table({"messages": pa.array([talk], pa.list_(turn))})
    pq.write_table(table, tmp_path / "x.parquet")
    (record,) = records.read_records(str(tmp_path / "x.parquet"))
    assert messages_of(record.value) == ([u("2 + 2?"), a(CALL)], "")


def test_maps_with_keys_that_are_no_texts(tmp_path: Path) -> None:
    """They are texts, as in JSON."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for k, (keys, values) in enumerate(((pa.int64(), [(1, "x")]), (pa.binary(), [(b"1", "x")]))):
        maps = pa.array([values], pa.map_(keys, pa.string()))
        table = pa.table({"question": ["2 + 2?"], "answer": ["4"], "scores": maps})
        pq.write_table(table, tmp_path / f"{k}.parquet")
        (row,) = readers.read_rows(str(tmp_path / f"{k}.parquet"), lambda row: (row, ""))
        assert row.value == {"question": "2 + 2?", "answer": "4", "scores": {"1": "x"}}
        assert messages_of(row.value) == (ASKED, "") and unread_keys(row.value, "chat") == ["scores"]


def main() -> None:
    """Print what is made of every row: read, or left out and why, and its unread keys."""
    print("| layout | kind | rows read | learned | left out, and why | keys not read |")
    print("|---|---|---:|---|---|---|")
    for kind, table in (("chat", CHATS), ("preference", PAIRS)):
        for name, (row, _, _) in table.items():
            found, problem = messages_of(row) if kind == "chat" else pair_of(row)
            if not problem:
                check = (
                    chat_problem(found, row)
                    if kind == "chat"
                    else pair_problem(row, found)
                )
                problem = check
            answers = [] if problem else learned(found) if kind == "chat" else [found.chosen]
            cells = [name, kind, str(int(not problem)), " / ".join(answers), problem[:110]]
            cells.append(", ".join(unread_keys(row, kind)) if not problem else "")
            print(
                "| "
                + " | ".join(cell.replace("\n", "⏎").replace("|", "¦") for cell in cells)
                + " |"
            )
    for name, (row, _) in FLAGS.items():
        messages, _ = messages_of(row)
        problem = chat_problem(messages, row).replace(" ", "_")
        words = " / ".join(learned(messages))
        print(f"| {name} | chat | {int(not problem)} | {words} | {problem} | |")


if __name__ == "__main__":
    main()


def test_a_hint_speaks_of_what_a_row_may_be():
    """Options are no turns, and a list of answers without scores is no list of rated ones."""
    options = {"text": ["Tea", "Ice"], "label": ["A", "B"]}
    for row in (
        {"question_stem": "What is hot?", "choices": options, "answerKey": "A"},  # OpenBookQA
        {"question": "What is hot?", "documents": [{"title": "Tea"}], "answers": ["Tea"]},  # DuReader
    ):
        problem = messages_of(row)[1]
        assert "choices as turns" not in problem and "rated answers" not in problem, problem
