"""row_formats.py: golden rows, one for each published format; what cannot be read says why, and nothing raises."""

import json
from functools import partial

import pytest
import test_layouts
from hypothesis import given, settings
from hypothesis import strategies as st

from groundup.demo.debug_data import make_debug_data
from groundup.errors import UserError
from groundup.files import row_formats, turns
from groundup.files.row_formats import Pair, document_of, messages_of, pair_of, unread_keys
from groundup.files.text_keys import columns_of, missing_keys, renamed
from groundup.generate.answers import asked_of
from groundup.generate.completion import prompt_ids
from groundup.tokens.conversations import ChatReader
from groundup.tokens.prompts import prompt_of
from tokenizer import Tokenizer, chat_ready


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def tool(text: str) -> dict:
    return {"role": "tool", "content": text}


# ---- documents ----------------------------------------------------------------------------------------

DOCUMENTS = {
    "txt": ("一行就是一篇。", "一行就是一篇。"),
    "text": ({"text": "肺炎的并发症？可并发胸膜炎。"}, "肺炎的并发症？可并发胸膜炎。"),
    "text, source": ({"text": "天空新闻", "source": "web"}, "天空新闻"),
    "wikipedia-cn": ({"completion": "昭通机场是一座机场。", "source": "wikipedia.zh2307"}, "昭通机场是一座机场。"),
    "Baidu Baike": (
        {
            "title": "红茶",
            "summary": "全发酵茶。",
            "url": "x",
            "sections": [
                {"title": "产地", "content": "福建。"},
                {"title": "", "content": "云南。"},
                {"title": "冲泡", "content": "沸水。"},
            ],
        },
        "红茶\n全发酵茶。\n产地\n福建。\n云南。\n冲泡\n沸水。",
    ),
    "Baidu Baike, no summary": (
        {"title": "绿茶", "summary": None, "sections": [{"title": None, "content": "不发酵。"}]},
        "绿茶\n不发酵。",
    ),
    "WuDao": ({"uniqueKey": "u", "title": "标题", "content": "正文。\n第二段。"}, "标题\n正文。\n第二段。"),
    "articles with a source": (
        {
            "gid": "1",
            "id": "2",
            "data_src": "news",
            "category": "财经",
            "title": "题。",
            "content": "文",
            "desc": "述",
            "others": "",
        },
        "题。述\n文",
    ),
    "webtext2019zh": (
        {"qid": 1, "title": "怎么学琴？", "desc": "零基础", "topic": "音乐", "star": 3, "content": "先学指法。"},
        "怎么学琴？\n零基础\n先学指法。",
    ),
    "webtext2019zh, no description": (
        {"title": "怎么学琴？", "desc": "", "star": 3, "content": "练。"},
        "怎么学琴？\n练。",
    ),
    "baike_qa": (
        {"qid": "q", "category": "健康", "title": "头痛？", "desc": "三天了", "answer": "休息。"},
        "头痛？\n三天了\n休息。",
    ),
    "chinese-poetry": (
        {"author": "李白", "paragraphs": ["牀前看月光，", "疑是地上霜。"], "title": "靜夜思", "id": "x"},
        "靜夜思\n李白\n牀前看月光，\n疑是地上霜。",
    ),
    "TigerBot": ({"content": "只有正文", "dataType": "web"}, "只有正文"),
    "baby-llama2": ({"response": "只有回答"}, "只有回答"),
    "ci": (
        {"author": "李煜", "rhythmic": "虞美人", "paragraphs": ["春花秋月何时了？", "往事知多少。"]},
        "虞美人\n李煜\n春花秋月何时了？\n往事知多少。",
    ),
    "ChatLM": ({"prompt": "水的沸点？", "response": "一百度。"}, "水的沸点？\n一百度。"),
    "Zhihu-KOL": (
        {"INSTRUCTION": "为什么天是蓝的？", "RESPONSE": "散射。", "SOURCE": "Zhihu", "METADATA": "{}"},
        "为什么天是蓝的？\n散射。",
    ),
    "medical csv": (
        {"department": "内科", "title": "咳嗽", "ask": "咳嗽一周怎么办", "answer": "多喝水"},
        "咳嗽\n咳嗽一周怎么办\n多喝水",
    ),
    "question csv": ({"question": "何谓贫血", "answer": "血红蛋白低"}, "何谓贫血\n血红蛋白低"),
    "OpenOrca": ({"question": "何谓贫血", "response": "血红蛋白低"}, "何谓贫血\n血红蛋白低"),
    "MetaMathQA": ({"query": "何谓贫血", "response": "血红蛋白低"}, "何谓贫血\n血红蛋白低"),
    "columns of a joined table": ({"completion": None, "text": "有文", "title": None, "content": None}, "有文"),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name: str) -> None:
    row, expected = DOCUMENTS[name]
    assert document_of(row) == (expected, "")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": None}, "no text under 'text'"),
        ({"text": 3}, "int, not text, under 'text'"),
        ({"text": ["一"]}, "list, not text, under 'text'"),
        ({"title": "题", "sections": "章"}, "sections is not a list"),
        ({"title": "题", "sections": [{"content": 5}]}, "int, not text, under 'content'"),
        ({"author": "李白", "paragraphs": "牀前"}, "paragraphs is not a list"),
        ({"prompt": "问", "response": None}, "no text under 'response'"),
        (
            {"文": "一", "来源": "二"},
            "unknown format: keys 文, 来源; prepare.py --text_key=KEY reads other names; text is known by: text | ",
        ),
        ({"messages": [{"role": "user", "content": "问"}]}, "this is messages (OpenAI), of kind='chat'"),
        ({"prompt": "问", "response": "答", "chosen": "好", "rejected": "坏"}, "of kind='preference'"),
        (7, "int, not an object"),
        (None, "NoneType, not an object"),
        ([], "list, not an object"),
    ],
)
def test_documents_that_cannot_be_read(row: object, problem: str) -> None:
    text, detail = document_of(row)
    assert text == "" and problem in detail and "\n" not in detail and len(detail) < 600


ROW = {"title": "题", "a": {"b": "深", "c": {"d": "更深"}}, "desc": None, "空": "", "two words": "两词", "n": 5}
TEMPLATES = {
    "title": "题",
    " title ": "题",
    "a.b": "深",
    "a.c.d,title": "更深\n题",
    "title,a.b": "题\n深",
    "title, desc?, a.b": "题\n深",
    "title,空,a.b": "题\n深",
    "two words": "两词",
}


@pytest.mark.parametrize("text_key", TEMPLATES)
def test_text_key(text_key: str) -> None:
    assert document_of(ROW, text_key) == (TEMPLATES[text_key], "")


@pytest.mark.parametrize(
    ("text_key", "problem"),
    [
        ("desc", "no text under 'desc'"),
        ("a.x", "no text under 'a.x'"),
        ("title.b", "no text"),
        ("n?", "int, not text"),
        ("missing.key?", "no text under 'missing.key?'"),
        ("a", "dict"),
    ],
)
def test_text_key_that_finds_no_text(text_key: str, problem: str) -> None:
    text, detail = document_of(ROW, text_key)
    assert text == "" and detail.startswith(problem) and "keys title, a, desc" in detail


def test_lists_of_texts_make_lines() -> None:
    row = {"author": "李白", "paragraphs": ["床前明月光，", "疑是地上霜。"]}
    row["talk"] = [{"from": "a", "value": "一"}, {"value": "二"}]
    assert document_of(row, "author,paragraphs") == ("李白\n床前明月光，\n疑是地上霜。", "")
    assert document_of(row, "talk.value") == ("一\n二", "")
    assert document_of(row, "talk.from") == ("a", "")  # the second has none
    call = {"role": "assistant", "content": None, "tool_calls": [{}]}
    said = [{"role": "user", "content": "几点？"}, call, {"role": "tool", "content": "3"}]
    assert document_of({"messages": said}, "messages.content") == ("几点？\n3", "")
    assert document_of({"messages": json.dumps(said)}, "messages.content") == ("几点？\n3", "")
    assert document_of({"messages": [call]}, "messages.content")[1].startswith("no text under 'messages.content'")
    assert document_of({"messages": [call]}, "messages.content?") == ("", "")
    mixed = {"messages": [*said, {"content": 3}]}
    assert document_of(mixed, "messages.content")[1].startswith("list, not text, under 'messages.content'")
    assert document_of({"a": []}, "a")[1].startswith("list, not text")


@pytest.mark.parametrize("text_key", ["question,answer", "QUESTION,answer?", "Question?,x?,a.B?,Answer"])
def test_keys_of_text_key_may_be_in_capitals(text_key: str) -> None:
    row = {"Question": "问", "Answer": "答"}
    assert document_of(row, text_key) == ("问\n答", "")
    assert document_of(row | {"question": "另"}, "question") == ("另", "")  # the exact key comes first
    assert document_of({"A": [{"Says": "一"}, {"Says": "二"}]}, "a.says") == ("一\n二", "")


def test_keys_that_are_renamed_may_be_in_capitals() -> None:
    turns = [{"Speaker": "Customer", "Msg": "问"}, {"Speaker": "Agent", "Msg": "答"}]
    text_key = "messages=dialog,role=speaker,content=msg,user=Customer,assistant=Agent"
    wanted = [{"role": "user", "content": "问"}, {"role": "assistant", "content": "答"}]
    row = renamed({"Dialog": turns, "id": 1}, text_key)
    assert row == {"messages": wanted, "id": 1} and not missing_keys({"Dialog": turns}, text_key)
    row = renamed({"In": {"Ask": "问"}, "OUT": "答"}, "question=in.ask,answer=out")
    assert row == {"In": {}, "question": "问", "answer": "答"}


def test_a_row_with_none_of_its_optional_keys_is_bad() -> None:
    row = {"Frage": "问", "Antwort": "答"}
    assert document_of(row, "question?,answer?")[1] == "no text under 'question?', 'answer?' (keys Frage, Antwort)"
    assert document_of(row | {"answer": None}, "question?,answer?") == ("", "")  # there, and empty


def test_a_string_needs_no_key() -> None:
    assert document_of("文", "a.b") == ("文", "")
    assert document_of(["文"], "a.b") == ("", "list, not an object")


@pytest.mark.parametrize(
    "text_key", ["a,,b", ",", " ", "a..b", ".a", "?", "a?b"]
)
def test_malformed_text_keys(text_key: str) -> None:
    with pytest.raises(UserError) as error:
        document_of({"a": "x"}, text_key)
    assert isinstance(error.value, UserError) and "text_key" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("text_key", "mark"), [("标题，正文", "，"), ("question＝问题,answer=回答", "＝")])
def test_a_full_width_mark_in_a_text_key_is_named(text_key: str, mark: str) -> None:
    with pytest.raises(UserError, match=f"full-width {mark}"):
        document_of({"a": "b"}, text_key)
    with pytest.raises(UserError, match=f"full-width {mark}"):
        renamed({"a": "b"}, text_key)


class Spy(dict):
    """A row that remembers which of its keys were asked for."""

    def __init__(self, row: dict) -> None:
        super().__init__(row)
        self.asked = set()

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)


def test_documents_are_made_of_columns_that_are_read(monkeypatch) -> None:
    """Of a parquet file without text_key only these are read."""
    rows = [(row, text) for row, text in DOCUMENTS.values() if isinstance(row, dict)]
    spies = [(Spy(row_formats.with_format(row, "text")[0]), text) for row, text in rows]
    monkeypatch.setattr(row_formats, "rename", lambda row, answers=False: row)  # it copies
    for spy, text in spies:
        assert document_of(spy) == (text, "")
        assert spy.asked and spy.asked <= row_formats.COLUMNS


def test_columns() -> None:
    assert columns_of("") is None
    assert columns_of("text") == ["text"]
    assert columns_of("title, a.b, a.c?, desc?") == ["title", "a", "desc"]


# ---- conversations ------------------------------------------------------------------------------------

WEATHER = {"name": "get_weather", "parameters": {"city": "string"}}
TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    '{"name": "get_weather", "parameters": {"city": "string"}}\n'
    "</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "北京"}}\n</tool_call>'

CHATS = {
    "firefly, conversation": (
        {"conversation_id": 1, "category": "qa", "conversation": [{"human": "问", "assistant": "答"}, {"human": "再"}]},
        [user("问"), assistant("答"), user("再")],
    ),
    "alpaca": (
        {"instruction": "翻译", "input": "早上好", "output": "Good morning"},
        [user("翻译\n早上好"), assistant("Good morning")],
    ),
    "alpaca, empty input": ({"instruction": "写诗", "input": "", "output": "床前"}, [user("写诗"), assistant("床前")]),
    "alpaca, no input": ({"instruction": "写诗", "output": "床前"}, [user("写诗"), assistant("床前")]),
    "alpaca with system and history": (
        {"instruction": "三", "input": "", "output": "四", "system": "你是助手", "history": [["一", "二"]]},
        [system("你是助手"), user("一"), assistant("二"), user("三"), assistant("四")],
    ),
    "alpaca seeds": (
        {"id": "s", "instruction": "翻译", "instances": [{"input": "早", "output": "morning"}]},
        [user("翻译\n早"), assistant("morning")],
    ),
    "qa": ({"input": "问", "output": "答"}, [user("问"), assistant("答")]),
    "prompt, completion": ({"prompt": "问", "completion": "答"}, [user("问"), assistant("答")]),
    "prompt, completion in turns": (
        {"prompt": [system("短"), user("问")], "completion": [assistant("答")]},
        [system("短"), user("问"), assistant("答")],
    ),
    "prompt, answer": ({"prompt": "问", "answer": "答"}, [user("问"), assistant("答")]),
    "prompt, response": ({"prompt": "解释启示录", "response": "一部书"}, [user("解释启示录"), assistant("一部书")]),
    "question, answer": ({"question": "症状？", "answer": "克罗恩病"}, [user("症状？"), assistant("克罗恩病")]),
    "firefly": (
        {"kind": "NLI", "input": "前提：甲\n假设：乙", "target": "中立"},
        [user("前提：甲\n假设：乙"), assistant("中立")],
    ),
    "Zhihu-KOL": ({"INSTRUCTION": "问", "RESPONSE": "答", "SOURCE": "Zhihu"}, [user("问"), assistant("答")]),
    "medical csv": (
        {"department": "内科", "title": "咳嗽", "ask": "怎么办", "answer": "喝水"},
        [user("咳嗽\n怎么办"), assistant("喝水")],
    ),
    "baike_qa": ({"title": "头痛？", "desc": "", "answer": "休息"}, [user("头痛？"), assistant("休息")]),
    "webtext2019zh": (
        {"title": "学琴？", "desc": "零", "star": 1, "content": "练"},
        [user("学琴？\n零"), assistant("练")],
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "有联系吗？"}, {"from": "gpt", "value": "有。"}]},
        [user("有联系吗？"), assistant("有。")],
    ),
    "sharegpt, other names": (
        {
            "conversations": [
                {"from": "system", "value": "简短"},
                {"from": "user", "value": "问"},
                {"from": "assistant", "value": "答"},
            ]
        },
        [system("简短"), user("问"), assistant("答")],
    ),
    "sharegpt, system beside": (
        {"system": "简短", "conversations": [{"from": "human", "value": "问"}, {"from": "gpt", "value": "答"}]},
        [system("简短"), user("问"), assistant("答")],
    ),
    "sharegpt with functions": (
        {
            "tools": json.dumps([WEATHER]),
            "conversations": [
                {"from": "human", "value": "北京天气？"},
                {"from": "function_call", "value": '{"name": "get_weather", "arguments": {"city": "北京"}}'},
                {"from": "observation", "value": "晴"},
                {"from": "gpt", "value": "晴天。"},
            ],
        },
        [system(TOOLS), user("北京天气？"), assistant(CALL), tool("晴"), assistant("晴天。")],
    ),
    "messages from, value": (
        {"messages": [{"from": "user", "value": "推理"}, {"from": "assistant", "value": "中立"}]},
        [user("推理"), assistant("中立")],
    ),
    "OpenAI": (
        {"messages": [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "你好！"}]},
        [user("你好"), assistant("你好！")],
    ),
    "OpenAI, content in parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "你"}, {"type": "text", "text": "好"}]}]},
        [user("你好")],
    ),
    "OpenAI with tool calls": (
        {
            "tools": [WEATHER],
            "messages": [
                {"role": "system", "content": "助手"},
                {"role": "user", "content": "天气？"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "get_weather", "arguments": '{"city": "北京"}'},
                        }
                    ],
                },
                {"role": "tool", "content": "晴"},
            ],
        },
        [system("助手\n\n" + TOOLS), user("天气？"), assistant(CALL) | {"tool_call_ids": ["1"]}, tool("晴")],
    ),
    "minimind": (
        {
            "conversations": [
                {"role": "system", "content": "", "tools": json.dumps([WEATHER])},
                {"role": "user", "content": "天气？"},
                {
                    "role": "assistant",
                    "content": "查。",
                    "reasoning_content": "要查",
                    "tool_calls": '[{"name": "get_weather", "arguments": {"city": "北京"}}]',
                },
                {"role": "tool", "content": "晴"},
                {"role": "assistant", "content": "晴天", "reasoning_content": "看到了"},
            ]
        },
        [
            system(TOOLS),
            user("天气？"),
            assistant("<think>\n要查\n</think>\n\n查。\n" + CALL),
            tool("晴"),
            assistant("<think>\n看到了\n</think>\n\n晴天"),
        ],
    ),
    "as JSON in a table": ({"conversations": '[{"role": "user", "content": "问"}]'}, [user("问")]),
    "last turn of the user, empty answer": (
        {"conversations": [{"from": "gpt", "value": ""}, {"from": "human", "value": "还在吗"}]},
        [assistant(""), user("还在吗")],
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_conversations(name: str) -> None:
    row, expected = CHATS[name]
    assert messages_of(row) == (expected, "")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    make_debug_data(folder := tmp_path_factory.mktemp("tokenizer") / "data")
    return chat_ready(Tokenizer.load(folder))


@pytest.mark.parametrize("name", [name for name in CHATS if "empty answer" not in name])
def test_sampling_asks_for_the_answer_that_tuning_trains(name: str, tokenizer) -> None:
    """In every format, with tools, calls and a content of null: the trained ids are the prompt, then the answer."""
    row, messages = CHATS[name]
    if messages[-1]["role"] != "assistant":  # the format has a row that ends with its question, or with a tool
        assert asked_of(row, {}) == messages
        key = next(key for key in ("messages", "conversations", "conversation") if key in row)
        turns = json.loads(row[key]) if isinstance(row[key], str) else row[key]
        firefly = [*turns[:-1], turns[-1] | {"assistant": "答"}]
        row = row | {key: firefly if key == "conversation" else [*turns, assistant("答")]}
    _, (ids, mask) = ChatReader(tokenizer).item(row, "")
    asked = prompt_ids(tokenizer, True, "", asked_of(row, {}))
    assert ids[: len(asked)].tolist() == asked
    assert mask[len(asked) : -1].all() and not mask[-1]  # the answer; the newline behind it


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("一行文字", "str, not an object"),
        ({"messages": []}, "no turns"),
        ({"messages": None}, "no turns"),
        ({"messages": "不是"}, "str, not a list of turns"),
        ({"messages": ["问"]}, "not a list of turns"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "the role 'narrator'"),
        ({"messages": [{"content": "x"}]}, "the role None"),
        ({"messages": [{"role": "user", "content": None}]}, "a turn (user) holds no text"),
        ({"messages": [{"role": "assistant", "content": None}]}, "a turn (assistant) holds no text"),
        ({"messages": [{"role": "user", "content": 5}]}, "a turn (user) holds int"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a turn holds 'image_url', not text"),
        ({"instruction": "问", "output": ["甲", "乙"]}, "list, not text, under 'output'"),
        ({"instruction": "问", "output": "答", "history": ["甲"]}, "history is not a list of"),
        ({"instruction": "问", "output": "答", "history": 5}, "history is not a list of"),
        ({"instruction": "问", "instances": []}, "instances is not a list"),
        ({"prompt": "问", "answer": None}, "no text under 'answer'"),
        ({"messages": [user("<image>\n这是什么？"), assistant("猫")], "images": ["a.png"]}, "a turn holds an image"),
        ({"text": "文"}, "this is text, of kind='text'"),
        ({"prompt": "问", "response": "答", "chosen": "好", "rejected": "坏"}, "of kind='preference'"),
        ({}, "unknown format"),
    ],
)
def test_conversations_that_cannot_be_read(row: object, problem: str) -> None:
    messages, detail = messages_of(row)
    assert messages == [] and problem in detail and "\n" not in detail


# ---- preference pairs ---------------------------------------------------------------------------------

HH = "\n\nHuman: 最喜欢的词？\n\nAssistant: 你呢？\n\nHuman: 我先问的\n\nAssistant: "
CHATML = (
    "<|im_start|>system\n你是喵喵小助手<|im_end|>\n<|im_start|>user\n第一行\n第二行<|im_end|>\n<|im_start|>assistant\n"
)
PAIRS = {
    "prompt": ({"prompt": "口号", "chosen": "好", "rejected": "坏"}, Pair([user("口号")], "好", "坏")),
    "huozi": ({"prompt": "口号", "chosen": "好", "reject": "坏"}, Pair([user("口号")], "好", "坏")),
    "MedicalGPT, older": (
        {"system": "", "history": [["甲", "乙"]], "question": "问", "response_chosen": "好", "response_rejected": "坏"},
        Pair([user("甲"), assistant("乙"), user("问")], "好", "坏"),
    ),
    "literal markers": (
        {"prompt": "问", "response": "答", "chosen": "好<|im_end|>", "rejected": "坏<|im_end|>\n"},
        Pair([user("问")], "好<|im_end|>", "坏<|im_end|>\n"),
    ),
    "conversations, strings": (
        {
            "conversations": [{"from": "system", "value": "短"}, {"from": "human", "value": "问"}],
            "chosen": "好",
            "rejected": "坏",
        },
        Pair([system("短"), user("问")], "好", "坏"),
    ),
    "conversations, turns": (
        {
            "conversations": [{"from": "human", "value": "问"}],
            "chosen": {"from": "gpt", "value": "好"},
            "rejected": {"from": "gpt", "value": "坏"},
        },
        Pair([user("问")], "好", "坏"),
    ),
    "messages, strings": (
        {"messages": [{"role": "user", "content": "问"}], "chosen": "好", "rejected": "坏"},
        Pair([user("问")], "好", "坏"),
    ),
    "minimind": (
        {
            "chosen": [{"content": "问", "role": "user"}, {"content": "好", "role": "assistant"}],
            "rejected": [{"content": "问", "role": "user"}, {"content": "坏", "role": "assistant"}],
        },
        Pair([user("问")], "好", "坏"),
    ),
    "UltraFeedback": (
        {
            "prompt": "问",
            "chosen": [{"content": "问", "role": "user"}, {"content": "好", "role": "assistant"}],
            "rejected": [{"content": "问", "role": "user"}, {"content": "坏", "role": "assistant"}],
        },
        Pair([user("问")], "好", "坏"),
    ),
    "lists of answers alone": (
        {
            "prompt": [{"content": "问", "role": "user"}],
            "chosen": [{"content": "好", "role": "assistant"}],
            "rejected": [{"content": "坏", "role": "assistant"}],
        },
        Pair([user("问")], "好", "坏"),
    ),
    "LLaMA-Factory": (
        {"instruction": "译", "input": "早", "chosen": "好", "rejected": "坏"},
        Pair([user("译\n早")], "好", "坏"),
    ),
    "LLaMA-Factory, older": (
        {"instruction": "译", "input": "", "output": ["好", "坏"]},
        Pair([user("译")], "好", "坏"),
    ),
    "ms-swift": (
        {
            "messages": [{"role": "user", "content": "问"}, {"role": "assistant", "content": "好"}],
            "rejected_response": "坏",
        },
        Pair([user("问")], "好", "坏"),
    ),
    "hh-rlhf": (
        {"chosen": HH + "没有。", "rejected": HH + "很多：\n\n一"},
        Pair([user("最喜欢的词？"), assistant("你呢？"), user("我先问的")], "没有。", "很多：\n\n一"),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str) -> None:
    row, expected = PAIRS[name]
    assert pair_of(row) == (expected, "")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "问", "chosen": "同", "rejected": "同"}, "chosen and rejected are the same"),
        ({"chosen": HH + "好", "rejected": HH}, "empty answer"),
        ({"chosen": HH + "好", "rejected": HH.strip() + "坏"}, "does not start with"),
        ({"chosen": HH + "好", "rejected": HH.replace("我先问的", "我后问的") + "坏"}, "answer different prompts"),
        ({"chosen": HH + "好\n\nHuman: 再问", "rejected": HH + "坏"}, "does not end with a question and its answer"),
        ({"prompt": "问", "chosen": None, "rejected": "坏"}, "a rejected answer but none under 'chosen' (keys"),
        ({"prompt": "问", "chosen": "好", "rejected": ""}, "empty answer"),
        ({"prompt": "问", "chosen": "好"}, "a chosen answer but none under 'rejected' (keys prompt, chosen)"),
        ({"prompt": "问", "response_chosen": "好", "a": 1}, "a chosen answer but none under 'rejected'"),
        ({"prompt": "问", "chosen": 4, "rejected": "坏"}, "int, not an answer under 'chosen'"),
        ({"prompt": CHATML, "chosen": "好", "rejected": "坏"}, "written by a chat template (<|im_start|>)"),
        ({"messages": [{"role": "user", "content": "问"}], "rejected_response": "坏"}, "does not end with a question"),
        ({"instruction": "问", "output": ["甲"]}, "not a list of a chosen and a rejected"),
        ({"instruction": "问", "output": "答"}, "rejected answer; this is instructions (Alpaca), of kind='chat'"),
        ({"question": "问", "answer": "答"}, "this is questions and answers, of kind='chat'"),
        ({"prompt": "问", "completion": "答"}, "this is prompts and completions (trl), of kind='chat'"),
        ({"messages": [{"role": "user", "content": "问"}]}, "this is messages (OpenAI), of kind='chat'"),
        ({"text": "文"}, "another kind: keys text; this is text, of kind='text'"),
        ("文", "str, not an object"),
    ],
)
def test_pairs_that_cannot_be_read(row: object, problem: str) -> None:
    pair, detail = pair_of(row)
    assert pair is None and problem in detail and "\n" not in detail


@pytest.mark.parametrize(
    "marks, unfinished",
    [
        ({"finish_reason": "length"}, True),
        ({"finish_reason": "stop"}, False),
        ({"chosen_finish_reason": "length", "rejected_finish_reason": "stop"}, True),
        ({"rejected_finish_reason": "length"}, True),
        ({"completions": [{"text": "坏", "finish_reason": "length"}]}, True),
        ({"completions": [{"text": "好", "finish_reason": "length"}]}, True),
        ({"completions": [{"text": "坏", "finish_reason": "stop"}, {"text": "", "finish_reason": "length"}]}, False),
        ({"completions": ["坏", None, {"finish_reason": "length"}]}, False),
        ({"completions": "坏"}, False),
        ({}, False),
    ],
)
def test_answers_that_were_cut_off(marks: dict, unfinished: bool) -> None:
    row = {"prompt": "问", "chosen": "好", "rejected": "坏"} | marks
    assert turns.is_unfinished(row, pair_of(row)[0]) is unfinished


def test_answers_of_sample_are_no_pairs_yet() -> None:
    row = {"messages": [user("问"), assistant("好")], "completions": [{"text": "坏", "finish_reason": "stop"}]}
    pair, detail = pair_of(row)
    assert pair is None and "answers of sample.py: prepare.py --pair_by=dataset or reward" in detail


def test_the_chosen_dialogue_of_hh_rlhf_is_a_conversation() -> None:
    row = {"chosen": HH + "没有。", "rejected": HH + "有"}
    turns = [user("最喜欢的词？"), assistant("你呢？"), user("我先问的"), assistant("没有。")]
    assert messages_of(row) == (turns, "")
    assert messages_of(row | {"chosen": "没有。"})[1].startswith("another kind")


def test_an_unknown_format_names_the_three_that_are_most_like_it() -> None:
    for kind, row, first in (
        ("chat", {"query": "问", "reply": "答"}, "query,response"),
        ("chat", {"Problem_text": "问", "problem": "", "sol": "答"}, "problem,solution"),
        ("preference", {"prompt": "问", "chosen_answer": "好", "rejected_answer": "坏"}, "prompt,chosen,rejected"),
        # none is like it: the commonest
        ("chat", {"q": "问", "a": "答"}, r"messages [|] question,answer [|] instruction,output"),
        ("preference", {"q": "问", "good": "好", "bad": "坏"}, "prompt,chosen,rejected [|] chosen,rejected"),
        ("text", {"q": "问"}, "text"),
    ):
        with pytest.raises(turns.BadRow, match=f"{kind} is known by: {first}( [|] [^|]+)* .docs/data.md lists"):
            row_formats.read(row, kind)


@pytest.mark.parametrize(
    "row, text_key",
    [
        ({"instruction": "翻译", "input": "你好", "output": "hello"}, "instruction,input?,output"),
        ({"problem": "1+1", "solution": "2"}, "problem,solution"),
    ],
)
def test_the_text_key_that_is_proposed_makes_text_of_a_chat(row: dict, text_key: str) -> None:
    text, problem = row_formats.document_of(row)
    assert not text and f"; --text_key='{text_key}' makes text of it; " in problem
    assert row_formats.document_of(row, text_key) == ("\n".join(row.values()), "")
    capitals = {key.upper(): value for key, value in row.items()}  # text_key means keys as they are
    assert "--text_key='" not in row_formats.document_of(capitals)[1]


NO_INPUT = ["None", "nan", "<noinput>", "<No input>", "No input", "noinput", "无", " 没有 ", "无输入", "没有输入"]


@pytest.mark.parametrize("nothing", NO_INPUT)
def test_an_input_that_says_there_is_none_is_no_part_of_the_question(nothing: str) -> None:
    """The original Alpaca set has four ways to say so, a table by pandas two more, Chinese sets others."""
    row = {"instruction": "问", "input": nothing, "output": "答"}
    assert messages_of(row) == ([user("问"), assistant("答")], "")
    assert row_formats.unread_keys(row, "chat") == ["input that says there is none"]
    pair = {"instruction": "问", "input": nothing, "chosen": "好", "rejected": "坏"}
    assert row_formats.read_pair(pair).prompt == [user("问")]
    for other in ({"input": "none of it"}, {"input": ""}, {"input": "没有钱"}):
        assert row_formats.unread_keys(row | other, "chat") == []
    assert messages_of({"input": nothing, "output": "答"}) == ([user(nothing), assistant("答")], "")


S, U, A, E, T = (
    {"role": role, "content": content}
    for role, content in (("system", "规"), ("user", "问"), ("assistant", "答"), ("assistant", " \n"), ("tool", "42"))
)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([U, A], ""), ([S, U, A, U, A], ""), ([U, A, T, A], ""), ([U, A, T, T, A, U, A], ""), ([A, U, A], ""),
        ([S, A], ""), ([U, A, U], ""), ([U, A, T], ""),
        ([{"role": "robot", "content": "x"}, U, A], "unknown role"),
        ([U, S, A], "system message not first"), ([S, S, U, A], "system message not first"),
        ([], "answer missing"), ([S, U], "answer missing"), ([U, U], "answer missing"),
        ([U, E], "empty answer"), ([U, E, U, A], "empty answer"),
        ([U, U, A], "two user turns in a row"), ([U, A, U, U], "two user turns in a row"),
        ([U, A, A], "two assistant turns in a row"), ([U, A, T, A, A], "two assistant turns in a row"),
        ([T, A], "tool turn out of place"), ([U, T, A], "tool turn out of place"),
        ([U, A, T, U, A], "tool turn out of place"),
    ],
)  # fmt: skip
def test_conversations_that_cannot_be_trained_on(messages: list[dict], problem: str) -> None:
    assert turns.chat_problem(messages) == problem
    assert not problem or problem in turns.CHAT_PROBLEMS
    if not problem:
        trimmed = turns.trim_chat(messages)
        assert trimmed[-1]["role"] == "assistant" and messages[: len(trimmed)] == trimmed
        assert all(message["role"] != "assistant" for message in messages[len(trimmed) :])


def test_a_question_beside_an_answer_that_is_a_number_is_a_prompt() -> None:
    """A reward function compares with the number."""
    row = {"messages": [user("2 + 2?")], "answer": 4}
    assert prompt_of(row) == row["messages"]


@pytest.mark.parametrize("key", ["response", "completion", "output"])
def test_a_short_answer_to_check_is_not_learned_in_place_of_the_whole_one(key: str) -> None:
    row = {"messages": [user("3 + 4?")], "answer": "7", key: "Three and four are 7."}
    messages, problem = row_formats.messages_of(row)
    assert not problem and messages[-1]["content"] == row[key]
    del row[key]
    assert row_formats.messages_of(row)[0][-1]["content"] == "7"


def test_every_format_has_a_golden_row() -> None:
    golden = {"text": DOCUMENTS, "chat": CHATS | test_layouts.CHATS, "preference": PAIRS | test_layouts.PAIRS}
    for kind, rows in golden.items():
        seen = {row_formats.recognise(row, kind) for row, *_ in rows.values()}
        assert seen - {None} == set(row_formats.FORMATS[kind])  # a string has none


KEYS = sorted({key for table in row_formats.FORMATS.values() for shape in table for key in shape.keys.split(",")})
KEYS += "rank answer response weight train context options A B thinking".split()
KEYS += "summary desc history system tools reject role from value content tool_calls x".split()
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["user", "gpt", HH, CHATML]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)),
    max_leaves=12,
)


ODD = (None, [], {}, 3, "x", [1], ["x"], {"x": []}, [{"x": []}], {"text": 1, "label": 2}, 10**400, [[]])


@pytest.mark.parametrize("kind", row_formats.FORMATS)
def test_odd_values_under_the_keys_of_a_format_are_no_traceback(kind: str) -> None:
    readers = {"text": document_of, "preference": pair_of}
    read = readers.get(kind, partial(messages_of, kind=kind))
    for known in row_formats.FORMATS[kind]:
        names = known.keys.split(",") + [name for name in known.also.split(",") if name]
        for odd in ODD:
            for n in range(len(names)):
                row = {name: "x" for name in names} | {names[n]: odd}
                assert bool(read(row)[0]) != bool(read(row)[1]) or kind == "text"
                unread_keys(row, kind)
            read(dict.fromkeys(names, odd))
    deep: dict = {}
    for _ in range(600):
        deep = {"a": [deep]}
    read({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": deep}]}]})


@settings(max_examples=150, deadline=None)
@given(JSON, st.sampled_from(["", "text", "content.value?", "title,desc?"]))
def test_no_row_raises(row: object, text_key: str) -> None:
    text, problem = document_of(row, text_key)
    assert isinstance(text, str) and isinstance(problem, str) and not (text and problem)
    messages, problem = messages_of(row)
    assert bool(messages) != bool(problem)
    assert all({"role", "content"} <= set(turn) <= {"role", "content", "learn"} for turn in messages)
    assert all(isinstance(turn["content"], str) for turn in messages)
    pair, problem = pair_of(row)
    assert (pair is None) == bool(problem)
    assert pair is None or pair.prompt
    assert all(isinstance(key, str) for kind in row_formats.FORMATS for key in unread_keys(row, kind))


@pytest.mark.parametrize(
    "row, said",
    [
        ({"prompt": "2+2?", "answer": "4", "generation": "5"}, "4"),
        ({"prompt": "2+2?", "completion": "4", "generation": "5"}, "4"),
        ({"instruction": "2+2?", "generation": "4"}, "4"),  # distilabel
        ({"question": "An empty list?", "answer": "[]", "response": "x"}, "[]"),
        ({"instruction": "Write turns.", "output": '[{"role": "user", "content": "hi"}]'},
         '[{"role": "user", "content": "hi"}]'),
        ({"instruction": "Write turns.", "output": '[{"from": "bob", "value": "hi"}]'},
         '[{"from": "bob", "value": "hi"}]'),
    ],
)  # fmt: skip
def test_a_rarer_name_or_an_answer_about_turns_changes_nothing(row, said):
    assert row_formats.messages_of(row)[0][-1] == {"role": "assistant", "content": said}


def test_what_is_refused_is_named_as_in_the_file():
    cases = [
        ({"instruction": "q", "instances": [{"input": "x"}]}, "no text under 'output'"),
        ({"tags": ["a", "b"], "body": "b"}, "question=KEY,answer=KEY"),
        ({"Question": "", "Answers": 5}, "keys Question, Answers"),
    ]
    for row, says in cases:
        assert not row_formats.messages_of(row)[0] and says in row_formats.messages_of(row)[1], row
    assert row_formats.unread_keys({"prompt": "q", "answer": "a", "generation": "another"}, "chat") == ["generation"]
    likert = {"prompt": "Hi", "response_1": "a", "response_2": "b", "preference_strength": "slightly"}
    assert row_formats.pair_of(likert)[1] == "neither answer is preferred"


def test_rarer_names_beside_usual_ones_lose_nothing():
    for row in (
        {"INSTRUCTION": "Sum up:", "input": "long", "output": "s"},
        {"instruction": "Sum up:", "inputs": "long", "output": "s"},
    ):
        assert row_formats.messages_of(row)[0][0]["content"] == "Sum up:\nlong", row
    thought = {"prompt": "q", "response": "a", "Complex_CoT": "so"}
    assert "so" in row_formats.messages_of(thought)[0][-1]["content"]
    turn = {"role": "user", "content": "q"}
    for row in (
        {"messages": [turn, {"role": "assistant", "content": "good"}], "rejected_response": "bad"},
        {"question": "q", "answer": "a", "response_chosen": "a", "response_rejected": "b"},
    ):
        assert "preference" in row_formats.messages_of(row)[1], row
    critic = json.dumps([turn, {"role": "critic", "content": "no"}])
    assert "'critic'" in row_formats.messages_of({"prompt": critic, "response": "a"})[1]
    two = {"Question": "q", "answer": "a", "Response": "x y", "generation": "z w"}
    assert sorted(row_formats.unread_keys(two, "chat")) == ["Response", "generation"]


@pytest.mark.parametrize("beside", [{"reasoning": "Sum."}, {"tool_calls": [{"name": "f"}]}, {}])
@pytest.mark.parametrize("content", [{"a": 1}, {}, 4])
def test_an_answer_that_is_no_text_is_a_bad_row_whatever_stands_beside_it(content: object, beside: dict) -> None:
    answer = {"role": "assistant", "content": content} | beside
    messages, problem = messages_of({"messages": [{"role": "user", "content": "2 + 2?"}, answer]})
    assert messages == [] and problem == f"a turn (assistant) holds {type(content).__name__}, not text"


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "conversations.value"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages.content"),
    ],
)
def test_a_chat_where_text_is_wanted_has_a_text_key(row, key):
    why = row_formats.document_of(row)[1]
    assert "of kind='chat'" in why and f"; text_key={key} makes text of it; " in why
    assert row_formats.document_of(row, key) == ("a\nb", "")
