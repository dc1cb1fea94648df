"""Rows of raw files by their keys: a row is a document, a conversation or a preference pair, under the names that the
published Chinese and English sets use. All of these shapes are in the three tables at the end of this file.

What the keys mean is decided by what is asked for: prompt and response are one text for `document_of` and two turns for
`messages_of`. A row is an object from JSON, CSV or parquet, or a string (a document). Nothing here raises because of a
row: a row that cannot be used comes back with one line that says why, for the caller to count and show.
"""

import ast
import itertools
import json
import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from groundup.errors import UserError


class Pair(NamedTuple):
    prompt: list[dict]  # messages up to the answer
    chosen: str
    rejected: str


class Shape(NamedTuple):
    name: str  # for people
    keys: str  # a row that has all of these has this shape
    read: Callable[[dict], str | list[dict] | Pair]


class BadRow(Exception):
    """A row that cannot be used, and why."""


def document_of(row: object, text_key: str = "") -> tuple[str, str]:
    """(text, "") or ("", what is wrong). text_key: see `parse_text_key`; "" = found by the row's keys.

    Raises ShapeError for a malformed text_key only.
    """
    template = parse_text_key(text_key) if text_key else None
    if isinstance(row, str):
        return row, ""
    try:
        return (fill(template, row, lists=True) if template and isinstance(row, dict) else read(row, "text")), ""
    except BadRow as problem:
        return "", str(problem)


def messages_of(row: object) -> tuple[list[dict], str]:
    """([{"role": ..., "content": ...}, ...], "") or ([], what is wrong).

    Roles are system, user, assistant and tool. Turns are kept as they are: also a last one that is not the assistant's,
    and empty answers. What is more than text becomes text in the form of Qwen's models: tool_calls as <tool_call>
    lines, tools in the system message, reasoning_content within <think>.
    """
    try:
        return read(row, "chat"), ""
    except BadRow as problem:
        return [], str(problem)


def chat_problem(messages: list[dict]) -> str:
    """Why a conversation cannot be trained on, one of CHAT_PROBLEMS, or "" if it can.

    The assistant may speak first. A last turn that is not the assistant's is no problem: see `trim_chat`.
    """
    roles = [message["role"] for message in messages]
    if any(role not in FOLLOWERS for role in roles):
        return "unknown role"
    if "system" in roles[1:]:
        return "system message not first"
    if "assistant" not in roles:
        return "answer missing"
    if any(m["role"] == "assistant" and not m["content"].strip() for m in messages):
        return "empty answer"
    for role, following in itertools.pairwise(["system", *roles]):
        if following not in FOLLOWERS[role]:
            return f"two {role} turns in a row" if role == following else "tool turn out of place"
    return ""


FOLLOWERS = {  # which turns may come after one; at the beginning, those after a system message
    "system": ("system", "user", "assistant"),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
CHAT_PROBLEMS = (
    "unknown role", "system message not first", "answer missing", "empty answer", "two user turns in a row",
    "two assistant turns in a row", "tool turn out of place",
)  # fmt: skip


def trim_chat(messages: list[dict]) -> list[dict]:
    """The messages up to the assistant's last one: what comes after is never answered, so there is nothing to learn."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return messages[: last + 1]


def pair_of(row: object) -> tuple[Pair | None, str]:
    """(Pair, "") or (None, what is wrong): also an empty answer, two equal answers, answers to different prompts."""
    try:
        pair = read(row, "preference")
        if not pair.chosen.strip() or not pair.rejected.strip():
            raise BadRow("empty answer")
        if pair.chosen == pair.rejected:
            raise BadRow("chosen and rejected are the same")
        return pair, ""
    except BadRow as problem:
        return None, str(problem)


def is_unfinished(row: dict, pair: Pair) -> bool:
    """Whether the row of a pair says that one of its answers was cut off: in finish_reason, in that of a side, or in
    that of the one among its completions that is the answer."""
    names = ("finish_reason", "chosen_finish_reason", "rejected_finish_reason")
    listed = row.get("completions")
    cut = [one for one in (listed if isinstance(listed, list) else []) if isinstance(one, dict)]
    texts = [one.get("text") for one in cut if one.get("finish_reason") == "length"]
    return any(row.get(name) == "length" for name in names) or pair.chosen in texts or pair.rejected in texts


def shape_name(row: object, kind: str) -> str:
    """What a row is taken for, as people call it; "" if it has no shape of this kind (text, chat or preference)."""
    if isinstance(row, str):
        return "plain text" if kind == "text" else ""
    shape = recognise(row, kind) if isinstance(row, dict) else None
    return shape.name if shape else ""


def columns_of(text_key: str) -> list[str] | None:
    """The columns of a table that text_key needs; None = it may need any. Raises ShapeError."""
    if not text_key:
        return None
    names = [piece.path[0] for pieces in parse_text_key(text_key) for piece in pieces if isinstance(piece, Name)]
    return list(dict.fromkeys(names))


# ---- which shape ------------------------------------------------------------------------------------------


def read(row: object, kind: str) -> str | list[dict] | Pair:
    """What a row holds. Raises BadRow."""
    if not isinstance(row, dict):
        raise BadRow(f"{type(row).__name__}, not an object")
    shape = recognise(row, kind)
    lone = missing_side(row) if kind == "preference" else ""
    if lone and not (shape and has_all(row, shape)):
        raise BadRow(f"{lone} ({keys_of(row)})")
    if shape:
        return shape.read(rename(row))
    other = next((k for k in SHAPES if k != kind and recognise(row, k)), "")
    hint = f"; this is {recognise(row, other).name}, of kind={other!r}" if other else ""
    if kind == "preference" and "completions" in row:
        hint = "; these are answers of sample.py: prepare.py --pair_by=dataset or reward makes pairs of them"
    tried = " | ".join(shape.keys for shape in SHAPES[kind])
    raise BadRow(f"unknown shape: {keys_of(row)}{hint}; {kind} is known by: {tried}")


def recognise(row: dict, kind: str) -> Shape | None:
    """The first shape whose keys are all there and not null (tables that were joined have columns of others, with
    nulls); if there is none, the first whose keys are there, so that a null is reported as such."""
    row = rename(row)
    if kind != "preference" and "rejected" in row and ("chosen" in row or "messages" in row):
        return HH_CHAT if kind == "chat" and is_dialogue(row.get("chosen")) else None
    for shape in SHAPES[kind]:
        if has_all(row, shape):
            return shape
    return next((shape for shape in SHAPES[kind] if all(key in row for key in shape.keys.split(","))), None)


def has_all(row: dict, shape: Shape) -> bool:
    """Whether a row has something under each key of a shape."""
    return all(rename(row).get(key) is not None for key in shape.keys.split(","))


def missing_side(row: dict) -> str:
    """Which answer a row lacks that has the other one, as text; "" if that is not what is wrong."""
    row = rename(row)
    there = [side for side in ("chosen", "rejected") if row.get(side)]
    other = {"chosen": "rejected", "rejected": "chosen"}
    return f"a {there[0]} answer but none under {other[there[0]]!r}" if len(there) == 1 else ""


def rename(row: dict) -> dict:
    """Preference rows with the most common names of their keys."""
    if not any(name in row for name in OTHER_NAMES):
        return row
    return {OTHER_NAMES.get(key, key): value for key, value in row.items()}


OTHER_NAMES = {
    "reject": "rejected",
    "rejected_response": "rejected",
    "response_chosen": "chosen",
    "response_rejected": "rejected",
}


def keys_of(row: dict) -> str:
    return f"keys {', '.join(map(str, row))}"[:200]


def as_score(row: object, key: str) -> float:
    """Return the number under a key of a row, nan if there is none. CSV has text for it, parquet may have Decimal."""
    value = row.get(key) if isinstance(row, dict) else None
    try:
        return float("nan" if isinstance(value, bool) or value is None else value)
    except (TypeError, ValueError):
        return float("nan")


# ---- texts by key -----------------------------------------------------------------------------------------


class Name(NamedTuple):
    path: tuple[str, ...]  # keys, each within the one before
    optional: bool


Template = tuple[tuple[str | Name, ...], ...]  # parts on lines of their own, each of pieces one after the other
PIECE = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^"'+,?]+\??)\s*([+,]|$)""", re.DOTALL)


@lru_cache(maxsize=256)
def parse_text_key(text_key: str) -> Template:
    r"""How to make a text from a row. Raises ShapeError.

    text             the text under this key
    a.b              the text under b within a; a list of texts, also of those in each element of a, makes lines
    title,body       one after the other, on lines of their own; one that is empty makes no line
    title + "\n\n" + body      as Python would put texts together
    desc?            may be missing, null or empty
    """
    parts: list[list[str | Name]] = [[]]
    position, separator = 0, "+"
    while separator:
        match = PIECE.match(text_key, position)
        piece = match[1].strip() if match else ""
        if not piece or piece == "?" or "" in piece.rstrip("?").split("."):
            raise UserError(
                f"shapes: cannot understand text_key={text_key!r} at {text_key[position:][:20]!r}; write text, a.b, "
                'title,body or title + "\\n" + body, with ? behind what may be missing'
            )
        is_literal = piece[0] in "\"'"
        parts[-1].append(unquote(piece) if is_literal else Name(tuple(piece.rstrip("?").split(".")), piece[-1] == "?"))
        position, separator = match.end(), match[2]
        if separator == ",":
            parts.append([])
    return tuple(map(tuple, parts))


def unquote(literal: str) -> str:
    try:
        return ast.literal_eval(literal)
    except (SyntaxError, ValueError) as error:
        raise UserError(f"shapes: text_key has the string {literal}, which Python cannot read: {error}") from None


def fill(template: Template, row: dict, lists: bool = False) -> str:
    lines = []
    for pieces in template:
        texts = [piece if isinstance(piece, str) else text_at(row, piece, lists) for piece in pieces]
        if any(text for piece, text in zip(pieces, texts, strict=True) if isinstance(piece, Name)):
            lines.append("".join(texts))
    return "\n".join(lines)


def text_at(row: dict, name: Name, lists: bool) -> str:
    """Anything but a string, or where `lists` a list of them, is wrong: the text "None" helps nobody."""
    found = value_at(row, name.path)
    if lists and isinstance(found, list) and found and all(isinstance(part, str) for part in found):
        return "\n".join(found)
    if isinstance(found, str):
        return found
    if found is None and name.optional:
        return ""
    kind = "no text" if found is None else f"{type(found).__name__}, not text,"
    raise BadRow(f"{kind} under {'.'.join(name.path)!r} ({keys_of(row)})")


def value_at(value: object, path: tuple[str, ...]) -> object:
    """What lies under the keys; below a list, the list of what lies there in each of its elements."""
    if not path:
        return value
    if isinstance(value, list):
        return [value_at(part, path) for part in value]
    return value_at(value.get(path[0]), path[1:]) if isinstance(value, dict) else None


def text(text_key: str, row: dict) -> str:
    return fill(parse_text_key(text_key), row)


def encyclopedia(row: dict) -> str:
    """Title, summary, then every section with its heading."""
    if not isinstance(row["sections"], list) or not all(isinstance(section, dict) for section in row["sections"]):
        raise BadRow("sections is not a list of objects")
    sections = [text("title?,content?", section) for section in row["sections"]]
    return "\n".join(filter(None, [text("title?,summary?", row), *sections]))


def poem(row: dict) -> str:
    if not isinstance(row["paragraphs"], list) or not all(isinstance(line, str) for line in row["paragraphs"]):
        raise BadRow("paragraphs is not a list of texts")
    return "\n".join([text("title?,author?", row), *row["paragraphs"]]).strip("\n")


# ---- conversations ----------------------------------------------------------------------------------------

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "function_call": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool",
}  # fmt: skip


def one_turn(question: str, answer: str, row: dict) -> list[dict]:
    """A question and its answer, from two text_keys; with the turns before, in history: [[question, answer], ...]."""
    history = unpacked(row.get("history")) or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise BadRow("history is not a list of [question, answer]")
    turns = [message(role, said) for turn in history for role, said in zip(("user", "assistant"), turn, strict=True)]
    turns += [message("user", text(question, row)), message("assistant", text(answer, row))]
    return with_system(turns, row)


def seed_task(row: dict) -> list[dict]:
    """The instruction with its first instance."""
    instances = row["instances"]
    if not isinstance(instances, list) or not instances or not isinstance(instances[0], dict):
        raise BadRow("instances is not a list of objects")
    return one_turn("instruction,input?", "output", {**row, **instances[0]})


def turns_at(key: str, row: dict) -> list[dict]:
    return with_system(read_turns(row[key]), row)


def read_turns(value: object) -> list[dict]:
    """Messages from [{role or from, content or value}, ...], or from such a list as JSON."""
    turns = unpacked(value)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise BadRow(f"{type(turns).__name__}, not a list of turns" if turns else "no turns")
    tools = next((turn["tools"] for turn in turns if turn.get("tools")), None)
    return with_tools([read_turn(turn) for turn in turns], tools)


def question_answer_turns(row: dict) -> list[dict]:
    """From [{"human": ..., "assistant": ...}, ...]; a last question may lack its answer."""
    turns = unpacked(row["conversation"])
    if not isinstance(turns, list) or not turns or not all(isinstance(t, dict) and "human" in t for t in turns):
        raise BadRow("conversation is not a list of {human, assistant}")
    said = [(role, turn.get(key)) for turn in turns for role, key in (("user", "human"), ("assistant", "assistant"))]
    open_end = said[-1][1] is None
    return with_system([message(role, text) for role, text in said[: len(said) - open_end]], row)


def dialogue_at(key: str, row: dict) -> list[dict]:
    return with_system(dialogue(row[key]), row)


def read_turn(turn: dict) -> dict:
    name = turn.get("role", turn.get("from"))
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadRow(f"a turn has the role {name!r:.40}, not one of {', '.join(ROLES)}")
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):
        content = "".join(part_text(part) for part in content)
    calls = turn.get("tool_calls") or turn.get("function_call")
    if name == "function_call":
        content, calls = "", content
    if calls:
        content = "\n".join(filter(None, [content if content else "", *map(call_text, list_of(calls))]))
    if turn.get("reasoning_content"):
        thought = message(role, turn["reasoning_content"])["content"]
        content = f"<think>\n{thought}\n</think>\n\n{content or ''}"
    return message(role, content)


def message(role: str, content: object) -> dict:
    if not isinstance(content, str):
        raise BadRow(f"a turn ({role}) holds {'no text' if content is None else type(content).__name__ + ', not text'}")
    return {"role": role, "content": content}


def part_text(part: object) -> str:
    """Of one part of a content that is a list: {"type": "text", "text": ...}."""
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise BadRow(f"a turn holds {kind!r:.40}, not text")
    return part["text"]


def call_text(call: object) -> str:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]  # OpenAI's form has an id and a type around it
    if isinstance(call, dict) and "name" in call:
        call = {"name": call["name"], "arguments": unpacked(call.get("arguments", {}))}
    return f"<tool_call>\n{call if isinstance(call, str) else as_json(call)}\n</tool_call>"


def unpacked(value: object) -> object:
    """JSON that is kept as a string is read; any other string stays one."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def list_of(value: object) -> list:
    value = unpacked(value)
    return value if isinstance(value, list) else [value]


def as_json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(f"tools or calls are not JSON: {error}") from None


def with_system(turns: list[dict], row: dict) -> list[dict]:
    """The system prompt and the tools that stand beside the turns become a first message, or a part of it."""
    system = row.get("system")
    if system:
        first = message("system", system)
        own = turns[0]["role"] == "system"
        if own and turns[0]["content"] not in ("", system):
            first["content"] += "\n" + turns[0]["content"]
        turns = [first, *turns[own:]]
    return with_tools(turns, row.get("tools"))


TOOLS_HEAD = (  # the wording of Qwen2.5's chat template
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


def with_tools(turns: list[dict], tools: object) -> list[dict]:
    tools = unpacked(tools)
    if not tools:
        return turns
    lines = "\n".join(tool if isinstance(tool, str) else as_json(tool) for tool in list_of(tools))
    own = turns[0]["role"] == "system"
    before = turns[0]["content"] + "\n\n" if own and turns[0]["content"] else ""
    return [message("system", before + TOOLS_HEAD + lines + TOOLS_TAIL), *turns[own:]]


# ---- preference pairs -------------------------------------------------------------------------------------

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
HH_TURN = re.compile(r"\n\n(Human|Assistant):(?: |\Z)")
HH_ROLES = {"Human": "user", "Assistant": "assistant"}


def two_answers(prompt: str, row: dict) -> Pair:
    """To what the text_key `prompt` gives, which may be in ChatML already; or to the turns before each answer."""
    if isinstance(row["chosen"], list) and len(row["chosen"]) > 1:
        return two_dialogues(row)  # UltraFeedback: the prompt is said again
    key = prompt.split(",")[0]
    if isinstance(row[key], list):
        turns = with_system(read_turns(row[key]), row)
    elif isinstance(row[key], str) and row[key].startswith(IM_START):
        turns = parse_chatml(row[key])
    else:
        turns = one_turn(prompt, "nothing?", row)[:-1]
    return Pair(turns, answer_at(row, "chosen"), answer_at(row, "rejected"))


def turns_then_two(key: str, row: dict) -> Pair:
    return Pair(turns_at(key, row), answer_at(row, "chosen"), answer_at(row, "rejected"))


def turns_then_worse(row: dict) -> Pair:
    """The last turn is the chosen answer."""
    *prompt, chosen = turns_at("messages", row)
    if chosen["role"] != "assistant" or not prompt:
        raise BadRow("messages does not end with a question and the chosen answer")
    return Pair(prompt, chosen["content"], answer_at(row, "rejected"))


def two_outputs(row: dict) -> Pair:
    outputs = row["output"]
    if not isinstance(outputs, list) or len(outputs) != 2:
        raise BadRow("output is not a list of a chosen and a rejected answer")
    return two_answers("instruction,input?", {**row, "chosen": outputs[0], "rejected": outputs[1]})


def two_dialogues(row: dict) -> Pair:
    """Two conversations, as messages or as Anthropic's dialogues, that differ in the last answer only."""
    *prompt, chosen = with_system(dialogue(row["chosen"]), row)
    *other, rejected = with_system(dialogue(row["rejected"]), row)
    if chosen["role"] != "assistant" or rejected["role"] != "assistant" or not prompt:
        raise BadRow("chosen or rejected does not end with a question and its answer")
    if prompt != other:
        raise BadRow("chosen and rejected answer different prompts")
    return Pair(prompt, chosen["content"], rejected["content"])


def is_dialogue(value: object) -> bool:
    return isinstance(value, str) and HH_TURN.match(value) is not None


def dialogue(value: object) -> list[dict]:
    if not isinstance(value, str):
        return read_turns(value)
    before, *rest = HH_TURN.split(value)
    if before or not rest:
        raise BadRow("a dialogue does not start with a blank line and Human:")
    return [message(HH_ROLES[rest[i]], rest[i + 1]) for i in range(0, len(rest), 2)]


def answer_at(row: dict, key: str) -> str:
    """An answer given as a text, as a turn, or as a list of one turn."""
    value = row[key]
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict):
        value = read_turn(value)["content"]
    if not isinstance(value, str):
        raise BadRow(f"{'no' if value is None else type(value).__name__ + ', not an'} answer under {key!r}")
    return value.rstrip("\n").removesuffix(IM_END) if value.rstrip("\n").endswith(IM_END) else value


def parse_chatml(prompt: str) -> list[dict]:
    """The messages of a prompt in ChatML, up to the opened turn of the assistant."""
    *turns, opened = prompt.split(IM_START)[1:]
    messages = []
    for turn in turns:
        role, newline, content = turn.partition("\n")
        content, end, rest = content.partition(IM_END)
        if role not in ROLES or not newline or not end or rest.strip():
            raise BadRow(f"the prompt is not ChatML at {turn[:20]!r}")
        messages.append(message(ROLES[role], content))
    if opened.strip() != "assistant" or not messages:
        raise BadRow("the prompt does not end with the assistant's turn")
    return messages


# ---- the shapes: the first that fits is taken --------------------------------------------------------------

DOCUMENTS = (
    Shape("text", "text", partial(text, "text")),
    Shape("completions", "completion", partial(text, "completion")),
    Shape("encyclopedia pages (Baidu Baike)", "title,sections", encyclopedia),
    Shape("poems (chinese-poetry)", "author,paragraphs", poem),
    Shape("articles with a source", "data_src,title,content", partial(text, 'title? + desc? + "\\n" + content')),
    Shape("articles or answers (WuDao, webtext2019zh)", "title,content", partial(text, "title?,desc?,content")),
    Shape("questions (medical CSV)", "title,ask,answer", partial(text, "title?,ask?,answer")),
    Shape("questions (baike_qa)", "title,answer", partial(text, "title,desc?,answer")),
    Shape("questions and answers", "question,answer", partial(text, "question,answer")),
    Shape("prompts and responses", "prompt,response", partial(text, "prompt,response")),
    Shape("instructions (Zhihu-KOL)", "INSTRUCTION,RESPONSE", partial(text, "INSTRUCTION,RESPONSE")),
    Shape("contents", "content", partial(text, "content")),
    Shape("responses", "response", partial(text, "response")),
)

CHATS = (
    Shape("messages (OpenAI)", "messages", partial(turns_at, "messages")),
    Shape("conversations (ShareGPT)", "conversations", partial(turns_at, "conversations")),
    Shape("conversation (Firefly)", "conversation", question_answer_turns),
    Shape("instructions (Alpaca)", "instruction,output", partial(one_turn, "instruction,input?", "output")),
    Shape("seed tasks (Alpaca)", "instruction,instances", seed_task),
    Shape("tasks (Firefly)", "kind,input,target", partial(one_turn, "input", "target")),
    Shape("inputs and outputs", "input,output", partial(one_turn, "input", "output")),
    Shape("prompts and responses", "prompt,response", partial(one_turn, "prompt", "response")),
    Shape("prompts and answers", "prompt,answer", partial(one_turn, "prompt", "answer")),
    Shape("questions and answers", "question,answer", partial(one_turn, "question", "answer")),
    Shape("questions (medical CSV)", "title,ask,answer", partial(one_turn, "title?,ask?", "answer")),
    Shape("questions (baike_qa)", "title,answer", partial(one_turn, "title,desc?", "answer")),
    Shape("questions (webtext2019zh)", "title,desc,content", partial(one_turn, "title,desc?", "content")),
    Shape("instructions (Zhihu-KOL)", "INSTRUCTION,RESPONSE", partial(one_turn, "INSTRUCTION", "RESPONSE")),
)

HH_CHAT = Shape("the better of two dialogues (hh-rlhf)", "chosen,rejected", partial(dialogue_at, "chosen"))

PAIRS = (
    Shape("conversations with two answers", "conversations,chosen,rejected", partial(turns_then_two, "conversations")),
    Shape("messages with two answers", "messages,chosen,rejected", partial(turns_then_two, "messages")),
    Shape("messages with a worse answer (ms-swift)", "messages,rejected", turns_then_worse),
    Shape("instructions with two answers", "instruction,chosen,rejected", partial(two_answers, "instruction,input?")),
    Shape("prompts with two answers", "prompt,chosen,rejected", partial(two_answers, "prompt")),
    Shape("questions with two answers", "question,chosen,rejected", partial(two_answers, "question")),
    Shape("two dialogues (UltraFeedback, hh-rlhf)", "chosen,rejected", two_dialogues),
    Shape("instructions with two outputs", "instruction,output", two_outputs),
)

SHAPES = {"text": DOCUMENTS, "chat": CHATS, "preference": PAIRS}
