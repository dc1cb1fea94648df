"""Turns: messages of every published form become {"role", "content"}, with text as content.
And whether the conversations and preference pairs made of them can be trained on.

Roles are system, user, assistant and tool. What is more than text becomes text as in Qwen's
models: calls are <tool_call> lines, thoughts stand within <think>, tools stand in the system
message. Beside role and content a message may have

    learn          False: an answer that the row says not to learn from; the mask is 0 there
    tool_call_ids  ids of the calls of an answer
    tool_call_id   id of the call that a tool's turn answers

A turn that cannot be used raises BadRow.
"""

import ast
import itertools
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from groundup.files import TOOLS_HEAD, TOOLS_TAIL


class BadRow(Exception):
    """Why a row cannot be used.

    Readers of rows give a sentence about this row as the reason. Those who count rows give a reason
    to count it under, and what is to be said of this row as the detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


class UselessRow(BadRow):
    """A row was understood but teaches nothing. Its reason is one to count such rows under."""


class Pair(NamedTuple):
    prompt: list[dict]  # messages up to the answer
    chosen: str
    rejected: str


# ---- what a row says about learning from it --------------------------------------------------

# Flags of a turn, or of a part of one, that say whether to learn from it: prepare.py's, OpenAI's
# and axolotl's, ms-swift's, LLaMA-Factory's, xtuner's, StepFun's. 0 and false mean no; null means
# nothing.
WEIGHTS = ("learn", "weight", "train", "training", "loss", "loss_scale", "loss_weight")
WEIGHTS += ("output_with_loss", "loss_mask")
ROW_WEIGHTS = ("weight", "train", "loss_scale", "loss_weight")  # evaluate.py writes a loss, too
KTO_LABELS = ("label", "kto_tag")  # of trl, of LLaMA-Factory: whether the last answer is good


def as_number(value: object) -> float:
    """Return a flag as a number: 0 for no, 1 for yes, nan if it says nothing."""
    words = {"true": 1.0, "false": 0.0}
    if isinstance(value, str):
        value = words.get(value.strip().lower(), value)
    try:
        return float("nan" if value is None else value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def is_learned(holder: dict, flags: tuple[str, ...] = WEIGHTS) -> bool:
    """Return False if a flag of a turn, part or row says not to learn from it."""
    # nan is a flag that says nothing: no comparison with it is true
    return not any(as_number(holder[key]) <= 0 for key in keys_among(flags, tuple(holder)))


@lru_cache(maxsize=256)  # the rows of a file have the same keys
def keys_among(flags: tuple[str, ...], keys: tuple[str, ...]) -> list[str]:
    """Return the keys that are flags, in the order of the flags; a table may have capitals."""
    return [key for flag in flags for key in keys if str(key).lower() == flag]


def label_of(row: object) -> bool | None:
    """Return whether a row says that its last answer is a good one, None if it does not say."""
    if not isinstance(row, dict):
        return None
    # Other sets have labels of their own, such as 3: only 0 and 1 are KTO's.
    labels = [as_number(row[key]) for key in keys_among(KTO_LABELS, tuple(row))]
    return next((label == 1 for label in labels if label in (0, 1)), None)


def is_bad(row: object) -> bool:
    """Return whether a row says that its answer is bad, or not to be learned."""
    return isinstance(row, dict) and (label_of(row) is False or not is_learned(row, ROW_WEIGHTS))


# ---- the keys and roles of turns ---------------------------------------------------------------


def usual_names(**names: str) -> dict[str, str]:
    """Return {any name: usual name}, of names that are given the other way round."""
    return {name: usual for usual, others in names.items() for name in others.split()}


# Names of roles in published sets, in lower case. The sets say nothing about their form, so all
# forms are read from all of them: a turn is understood by its keys alone.
ROLES = usual_names(
    system="system developer",
    user="user human prompter",
    assistant="assistant gpt chatgpt chatbot bing bard bot ai model function_call tool_call",
    tool="tool observation function ipython tool_response function_response tool_result",
)
CALLERS = ("function_call", "tool_call")  # roles of turns that are calls and nothing else

ROLE_KEYS = ("role", "from")
SPEAKER_KEYS = ("speaker", "who", "author", "sender", "by")  # to be proposed as the role's key
CONTENT_KEYS = ("content", "value", "text", "parts")
CALL_KEYS = ("tool_calls", "function_call")
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
# OpenAI, Llama 3.1, LangChain, Anthropic
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
TURN_KEYS = {*ROLE_KEYS, *CONTENT_KEYS, *CALL_KEYS, *THOUGHT_KEYS, "train_detail"}
TURN_KEYS |= {"tool_call_id", "tool_call_ids", "tools"}
# Keys of a question and its answer in one turn: Firefly's; Capybara's and xtuner's; COIG's
EXCHANGES = (("human", "assistant"), ("input", "output"), ("question", "answer"))
EXCHANGES += (("user", "assistant"), ("prompt", "response"), ("query", "response"))
QUESTIONS = {question for question, _ in EXCHANGES}

# What a row may say beside its turns.
SYSTEM_KEYS = ("system", "system_prompt", "system_message", "meta_instruction")
SYSTEM_KEYS += ("systemInstruction", "system_instruction")  # Gemini
TOOL_KEYS = ("tools", "functions")
BESIDE_TURNS = {*SYSTEM_KEYS, *TOOL_KEYS, "chat_template_kwargs"}
MOST_PYTHON = 2**20  # characters of objects in Python's notation, as pandas writes them to CSV
# What pandas writes of arrays: objects without commas, array([...], dtype=object), nan; or a text
NUMPY = re.compile(
    r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|\}(?=\s+\{)|\barray\((?=\[)|,\s*dtype=[^()]{1,40}\)|\bnan\b"""
)
IN_PYTHON = {"}": "},", "nan": "None"}
NOTHING = ("", "None", "null", "nan", "[]", "{}")  # what exporters write where there is none


# ---- values of rows ---------------------------------------------------------------------------
# CSV has no objects, and parquet only those of one fixed form, so many sets keep turns, calls and
# tools as text.


def unpacked(value: object) -> object:
    """Parse JSON, or Python's notation of objects, stored as a string; return others unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    # literal_eval evaluates literals alone, so it is safe, but it takes much memory.
    if value.startswith(("[{'", "{'")) and len(value) < MOST_PYTHON:
        with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            plain = NUMPY.sub(lambda found: found[1] or IN_PYTHON.get(found[0], ""), value)
            return json.loads(json.dumps(ast.literal_eval(plain)))
    return value


def listed(value: object) -> list[dict] | None:
    """Return a list of objects that may be stored as JSON, or as lists of equal lengths by key.

    The last is how Hugging Face's Sequence comes in parquet. None if it is none of these."""
    # most values are texts: do not try to parse each
    if isinstance(value, str) and not value.lstrip().startswith(("[", "{")):
        return None
    found = unpacked(value)
    if isinstance(found, dict) and found and all(isinstance(one, list) for one in found.values()):
        lengths = {len(one) for one in found.values()}
        if len(lengths) == 1:
            columns = zip(*found.values(), strict=True)
            found = [dict(zip(found, values, strict=True)) for values in columns]
    if isinstance(found, list) and found and all(isinstance(one, dict) for one in found):
        return found
    return None


def first_of(holder: dict, keys: Sequence[str]) -> object:
    """Return the value under the first of the keys that is there and not null, or None."""
    return next((holder[key] for key in keys if holder.get(key) is not None), None)


def keys_of(row: dict) -> str:
    return f"keys {', '.join(map(str, row))}"[:200] if row else "no keys"


# ---- a list of turns -------------------------------------------------------------------------


def turns_at(key: str, row: dict) -> list[dict]:
    """Return the messages under a key, with the row's own system prompt and tools."""
    return with_system(read_turns(row[key]), row)


def read_turns(value: object) -> list[dict]:
    """Return messages of a list of turns, also as JSON or as a struct of lists."""
    turns = listed(value)
    if turns is None:
        return texts_by_turns(unpacked(value))
    if found := exchange_keys(turns):
        messages = read_exchanges(turns, *found)
    else:
        messages = []
        for turn in turns:
            if plain := plain_message(turn):
                messages.append(plain)
                continue
            for message in read_turn(turn):
                add_turn(messages, message, name_of(turn) in CALLERS)
    # Some sets offer tools in a turn, the system's as a rule, and not in the row.
    tools = next((turn["tools"] for turn in turns if turn.get("tools")), None)
    return with_system(messages, {"tools": tools}) if tools else messages


def plain_message(turn: dict) -> dict | None:
    """Return the message of a turn that is a role and a text, as most are; None for another.

    It says what `read_turn` says, and makes reading conversations six times as fast."""
    if len(turn) != 2:
        return None
    name, said = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if type(name) is not str or type(said) is not str or name not in ROLES or name in CALLERS:
        return None
    return {"role": ROLES[name], "content": said}


def is_thread(value: object) -> bool:
    """Return whether a value is a list of objects, or of several texts."""
    # a list of a single text is no conversation: nothing answers it
    found = unpacked(value) if isinstance(value, str) and value.startswith("[") else value
    texts = isinstance(found, list) and len(found) > 1
    return listed(found) is not None or (texts and all(isinstance(one, str) for one in found))


def texts_by_turns(value: object) -> list[dict]:
    """Return messages of texts by turns of the user and the assistant (UltraChat, LIMA)."""
    if not value:  # for an empty list of objects, too
        raise BadRow("no turns")
    if not is_thread(value):
        inner = f" with {type(value[0]).__name__}" if isinstance(value, list) else ""
        raise BadRow(f"{type(value).__name__}{inner}, not a list of turns")
    # The user begins, and the two take turns.
    turns = [message(("user", "assistant")[i % 2], said) for i, said in enumerate(value)]
    marks = {"user": "\u95ee\uff1a", "assistant": "\u7b54\uff1a"}  # HuatuoGPT's
    if all(turn["content"].startswith(marks[turn["role"]]) for turn in turns):
        turns = [message(turn["role"], turn["content"][2:]) for turn in turns]
    return turns


def exchange_keys(turns: list[dict]) -> tuple[str, str] | None:
    """Return the keys of question and answer if turns are both in one; None if they have roles."""
    if QUESTIONS.isdisjoint(turns[0]) or name_of(turns[0]) is not None:
        return None
    return next((keys for keys in EXCHANGES if keys[0] in turns[0]), None)


def keys_read_of(turns: list[dict]) -> set[str]:
    """Return the keys of turns that are read, but for the flags."""
    found = exchange_keys(turns)
    return {*found, "system", "tools"} if found else TURN_KEYS


def read_exchanges(turns: list[dict], question: str, answer: str) -> list[dict]:
    """Return messages of [{question: ..., answer: ...}, ...]; the last answer may be missing.

    The first may have a system message (xtuner), which others may repeat."""
    # Only one for all: a conversation has its system message before all turns.
    system = turns[0].get("system")
    if any(turn.get("system") not in (None, "", system) for turn in turns):
        raise BadRow("a system message not first")
    messages = []
    for i, turn in enumerate(turns):
        messages.append(message("user", turn.get(question)))
        if i + 1 < len(turns) or turn.get(answer) is not None:
            flag = {} if is_learned(turn) else {"learn": False}
            messages.append(message("assistant", turn.get(answer)) | flag)
    return with_system(messages, {"system": system}) if system else messages


def add_turn(messages: list[dict], new: dict, calls: bool) -> None:
    """Append a message; calls that are a turn of their own join the answer before them."""
    if not calls or not messages or messages[-1]["role"] != "assistant":
        messages.append(new)
        return
    # A turn of calls is the second half of an answer: words, then what the model calls.
    before = messages.pop()
    joined = {"content": "\n".join(filter(None, [before["content"], new["content"]]))}
    ids = before.get("tool_call_ids", []) + new.get("tool_call_ids", [])
    messages.append(before | new | joined | ({"tool_call_ids": ids} if ids else {}))
    if before.get("learn", True) != new.get("learn", True):
        raise BadRow("a turn is to be learned in part")


def said(messages: list[dict]) -> list[tuple[str, str]]:
    """Return what is compared of messages: their roles and contents."""
    return [(message["role"], message["content"].strip()) for message in messages]


# ---- one turn --------------------------------------------------------------------------------


def name_of(turn: dict) -> object:
    """Return the name of a turn's role, in lower case if it is text."""
    # "Tool Response" and "tool-response" are tool_response
    name = first_of(turn, ROLE_KEYS)
    return re.sub("[ -]", "_", name.strip().lower()) if isinstance(name, str) else name


def role_of(turn: dict) -> str:
    name = name_of(turn)
    role = ROLES.get(name) if isinstance(name, str) else None
    if role:
        return role
    # Say what would help: name the role, or the keys, or nothing if these are no turns at all.
    shown = first_of(turn, ROLE_KEYS)
    known = ", ".join(ROLES)
    how = f"prepare.py --text_key='{naming([turn])}' reads others"
    if isinstance(shown, str):
        how = f"prepare.py --text_key='ROLE={shown}' reads it, with user or assistant for ROLE"
        how += ", or skip to leave such turns out"
        how += "; names of other roles stand beside it, after a comma"
    if shown is None and not any(isinstance(one, str) for one in turn.values()):
        how = "if these are rows, not turns, give a file of the list alone"
    raise BadRow(f"a turn has the role {shown!r:.40} ({keys_of(turn)}), not one of {known}; {how}")


def naming(found: list[dict]) -> str:
    """Return the text_key to try for turns, "" if keys are known. The longest are contents."""
    if exchange_keys(found):
        return ""
    lengths: Counter[str] = Counter()
    for turn in found:
        lengths.update({key: len(text) for key, text in turn.items() if isinstance(text, str)})
    texts = sorted(lengths, key=lambda key: lengths[key])
    # A known key is what it is called. Of the others the longest is the content; a role is short.
    role = next((key for key in (*ROLE_KEYS, *SPEAKER_KEYS) if key in texts), "")
    texts = [key for key in texts if key != role]
    content = next((key for key in texts if key in CONTENT_KEYS), texts[-1] if texts else "KEY")
    role = role or next((key for key in texts if key != content), "KEY")
    # only what must be said
    names = [] if role in ROLE_KEYS else [f"role={role}"]
    names += [] if content in CONTENT_KEYS else [f"content={content}"]
    return ",".join(names)


def read_turn(turn: dict) -> list[dict]:
    """Return the messages of a turn: one, but for results of tools in a user's turn (Anthropic)."""
    role, name = role_of(turn), name_of(turn)
    raw = first_of(turn, CONTENT_KEYS)
    if role == "tool":
        return [tool_message(raw, turn.get("tool_call_id"))]
    text, thoughts, calls, results = read_content(raw)
    for key in CALL_KEYS:
        calls += list_of(turn[key]) if turn.get(key) else []
    if name in CALLERS and text is not None:
        text, written = split_thoughts(text)
        calls = list_of(written)  # the turn says it itself, whatever stands beside it
    if text is not None:
        message(role, text)  # refuses what is no text
    # Anthropic's results of tools stand in the user's turn, before what the user says.
    if results:
        return results + ([message(role, text)] if text else [])
    if role != "assistant":
        if calls:
            raise BadRow(f"a turn ({role}) holds calls of tools")
        return [message(role, text)]
    return [answer(text, thoughts_of(turn) + thoughts, calls, turn)]


def thoughts_of(holder: dict) -> list[str]:
    """Return the thoughts under the keys of a turn or row; "on" and "off" are a setting."""
    found = [holder.get(key) for key in THOUGHT_KEYS]
    if odd := next((one for one in found if one and isinstance(one, dict | list)), None):
        raise BadRow(f"thoughts are {type(odd).__name__}, not text")
    return [one for one in found if isinstance(one, str) and one not in ("on", "off", *NOTHING)]


def split_thoughts(content: object) -> tuple[str, object]:
    """Return (thoughts, call) of a turn that is a call; LLaMA-Factory writes both in one text."""
    if not isinstance(content, str):
        return "", content
    thoughts, mark, call = content.rpartition("</think>\n")
    # a blank line follows thoughts, as in an answer in words
    return (thoughts + mark, call.strip()) if mark else ("", content)


def answer(text: str | None, thoughts: list[str], calls: list, turn: dict) -> dict:
    """Return the assistant's message: thoughts, then words, then calls."""
    if calls:
        text = "\n".join(filter(None, [text, *map(call_text, calls)]))
    if thoughts and text is None:  # thoughts without words, as when the answer was cut off
        text = ""
    found = message("assistant", with_thoughts("\n".join(thoughts), text))
    ids = [call.get("id") for call in calls if isinstance(call, dict)]
    if not calls:
        ids = turn.get("tool_call_ids")  # of a row that prepare.py has written
    if isinstance(ids, list) and ids and all(map(is_id, ids)):
        found["tool_call_ids"] = ids
    if not turn_is_learned(turn):
        found["learn"] = False
    return found


def with_thoughts(thoughts: str, text: str | None) -> str | None:
    """Return an answer with its thoughts in front; they may be there already."""
    if not thoughts:
        return text
    # Some sets have the thoughts twice: under a key of their own, and in the text.
    if text is not None and text.lstrip().startswith("<think>"):
        if thoughts.strip() not in text:
            raise BadRow("a turn holds thoughts twice: within <think>, and others beside it")
        return text
    return f"<think>\n{thoughts}\n</think>\n\n{text or ''}"


def tool_message(content: object, call_id: object) -> dict:
    """Return a tool's message; a result that is no text becomes JSON, but for pictures."""
    parts = content if isinstance(content, list) else []
    kinds = [kind_of(part) if isinstance(part, dict) else "" for part in parts]
    for kind, part in zip(kinds, parts, strict=True):
        if MEDIA_PART.fullmatch(kind) and (HOLDS & part.keys() or len(part) == 1):
            raise BadRow(f"a turn holds {kind!r:.40}, not text")
    if isinstance(content, list) and all(kind in TEXT_PARTS for kind in kinds):
        content = "".join(map(text_of_part, content))
    elif isinstance(content, dict | list):
        content = as_json(without_nulls(content))
    return message("tool", content) | ({"tool_call_id": call_id} if is_id(call_id) else {})


def message(role: str, content: object) -> dict:
    if not isinstance(content, str):
        what = "no text" if content is None else f"{type(content).__name__}, not text"
        raise BadRow(f"a turn ({role}) holds {what}")
    return {"role": role, "content": content}


def is_id(value: object) -> bool:
    return isinstance(value, str) and value != ""


def turn_is_learned(turn: dict) -> bool:
    """Return whether an answer is to be learned. Raise BadRow if only a part of it is."""
    parts = [part for part in listed(turn.get("content")) or [] if kind_of(part) in TEXT_PARTS]
    parts += listed(turn.get("train_detail")) or []
    # The mask is for whole answers. A flag of the turn that says no settles it for all parts.
    flags = {is_learned(part) for part in parts}
    if len(flags) > 1 and is_learned(turn):
        raise BadRow("a turn is to be learned in part")
    return is_learned(turn) and flags != {False}


# ---- parts of a content ----------------------------------------------------------------------

# Types of parts that are text; those with _ are of OpenAI's Responses interface.
TEXT_PARTS = ("text", "input_text", "output_text")
THOUGHT_PARTS = ("thinking", "reasoning")
MEDIA_PART = re.compile("(input_)?(image|video|audio)(_url)?")
# Where such a part has its content; a search result may be of the type "video", too
HOLDS = {"image", "image_url", "input_image", "video", "video_url", "audio", "input_audio"}
HOLDS |= {"source", "data"}


def kind_of(part: object) -> str:
    """Return the type of a part; one that has none (Bedrock, Gemini) is a text or its keys."""
    if not isinstance(part, dict):
        return "text" if isinstance(part, str) else type(part).__name__
    kind = part.get("type")
    keys = [key for key, value in part.items() if value is not None]  # parquet fills up with null
    return str(kind or ("text" if keys == ["text"] else keys_of(dict.fromkeys(keys))))


def text_of_part(part: dict | str) -> str:
    if isinstance(part, str):
        return part
    names = ("text", "value", kind_of(part), "content")
    found = first_of(part, names)
    if not isinstance(found, str):
        raise BadRow(f"a part of a turn is of type {kind_of(part)} but has none")
    return found


def read_content(raw: object) -> tuple[str | None, list[str], list, list[dict]]:
    """Return what a content, a text or a list of parts, holds: its text, thoughts, calls, and
    results of tools as messages."""
    if not isinstance(raw, list):
        return raw, [], [], []
    texts, thoughts, calls, results = [], [], [], []
    # What is not known is refused, not skipped: the answer may depend on it, as on a picture.
    for part in raw:
        kind = kind_of(part)
        if kind in TEXT_PARTS:
            texts.append(text_of_part(part))
        elif kind in THOUGHT_PARTS:
            thoughts.append(text_of_part(part))
        elif kind == "tool_use":
            calls.append(part)
        elif kind == "tool_call":
            calls += list_of(part.get("value", part.get("tool_call", part)))
        elif kind == "tool_result":
            results.append(tool_message(part.get("content"), part.get("tool_use_id")))
        else:
            raise BadRow(f"a turn holds {kind!r:.40}, not text")
    # None: no text at all, which an answer of calls may have; [] is an empty text
    text = "".join(texts) if texts or not (thoughts or calls or results) else None
    return text, thoughts, calls, results


# ---- calls and tools -------------------------------------------------------------------------


def call_text(call: object) -> str:
    """Return a call as our own models write it."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]  # OpenAI's form has an id and a type around it
    if isinstance(call, dict) and call.get("name") is not None:
        found = first_of(call, ARGUMENT_KEYS)
        arguments = unpacked(found) if isinstance(found, str) else without_nulls(found)
        call = {"name": call["name"], "arguments": arguments or {}}  # also of "null"
    return f"<tool_call>\n{call if isinstance(call, str) else as_json(call)}\n</tool_call>"


def without_nulls(value: object) -> object:
    """Return a value without the keys that hold null, which parquet gives to all structs alike."""
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    return value


def list_of(value: object) -> list:
    """Return calls or tools as a list; all of it, or each of them, may be stored as JSON."""
    value = unpacked(value)
    found = value if isinstance(value, list) else [value]
    # a call that is no JSON stays a text, and is written as it stands
    return [unpacked(one) for one in found if one and one not in NOTHING]


def as_json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(f"tools or calls are not JSON: {error}") from None


def with_system(turns: list[dict], row: dict) -> list[dict]:
    """Put the row's own system prompt and tools into the first message."""
    if BESIDE_TURNS.isdisjoint(row):
        return turns
    settings = unpacked(row.get("chat_template_kwargs"))  # smoltalk2's
    settings = settings if isinstance(settings, dict) else {}
    prompts = [*(row.get(key) for key in SYSTEM_KEYS), settings.get("custom_instructions")]
    prompts = [system_text(prompt) for prompt in prompts if prompt and prompt not in NOTHING]
    system = "\n".join(dict.fromkeys(prompts))  # each once: a row may repeat it under two keys
    tools = tools_of(row) or list_of(settings.get("xml_tools"))
    if not system and not tools:
        return turns
    # The row's prompt comes before that of the turns, and the tools come last, as in Qwen's.
    has_own = bool(turns) and turns[0]["role"] == "system"
    first = turns[0]["content"] if has_own else ""
    if system:
        first = system + ("\n" + first if first not in ("", system) else "")
    if tools and "<tools>" not in first:  # Hermes' function calls have them there, too
        lines = "\n".join(tool if isinstance(tool, str) else as_json(tool) for tool in tools)
        first = (first + "\n\n" if first else "") + TOOLS_HEAD + lines + TOOLS_TAIL
    return [message("system", first), *turns[has_own:]]


def system_text(prompt: object) -> str:
    """Return a system prompt, which may also be a list of parts (Bedrock) or a turn (Gemini)."""
    if isinstance(prompt, str) and prompt.startswith(('[{"text":', '{"role":', '{"parts":')):
        prompt = unpacked(prompt)
    if isinstance(prompt, dict):
        prompt = first_of(prompt, CONTENT_KEYS)
    return message("system", read_content(prompt)[0])["content"]


def tools_of(row: dict) -> list:
    """Return the tools that a row offers, [] if there are none."""
    for key in TOOL_KEYS:
        if found := list_of(row.get(key)):
            return [without_nulls(tool) for tool in found]
    return []


# ---- can it be trained on? ----------------------------------------------------------------------


def chat_problem(messages: list[dict], row: object = None) -> str:
    """Return why a conversation cannot be trained on, one of CHAT_PROBLEMS, "" if it can.

    row: that it is from, whose flags are obeyed. The assistant may speak first. A last turn that
    is not the assistant's is no problem: see `trim_chat`.
    """
    if is_bad(row):
        return "bad answer"
    roles = [message["role"] for message in messages]
    # before the rest, for FOLLOWERS has no entry for another role
    if set(roles) - FOLLOWERS.keys():
        return "unknown role"
    if "system" in roles[1:]:
        return "system message not first"
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        return "answer missing"
    if not any(message.get("learn", True) for message in answers):
        return "bad answer"
    if any(is_blank(message["content"]) for message in answers):
        return "empty answer"
    # A conversation may begin with either side, as if after a system message.
    for role, following in itertools.pairwise(["system", *roles]):
        if following not in FOLLOWERS[role]:
            if role == following:
                return f"two {role} turns in a row"
            return "tool turn out of place"
    return ""


FOLLOWERS = {  # which turns may follow one
    "system": ("system", "user", "assistant"),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
CHAT_PROBLEMS = (
    "bad answer", "unknown role", "system message not first", "answer missing", "empty answer",
    "two user turns in a row", "two assistant turns in a row", "tool turn out of place",
)  # fmt: skip


# What to do about two turns in a row. They are not joined here, for nobody knows with what between.
JOIN = "to keep such conversations join the two into one turn"


def trim_chat(messages: list[dict]) -> list[dict]:
    """Return the messages up to the assistant's last one: what follows is never answered."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return messages[: last + 1]


# Control characters and those of no width, which `clean` removes; tab and line ends are white
# space.
CONTROLS = "\0-\x08\x0b-\x1f\x7f\u200b-\u200d\u2060\ufeff"
INVISIBLE = re.compile(f"[{CONTROLS}]")
VISIBLE = re.compile(rf"[^\s{CONTROLS}]")


def is_blank(text: str) -> bool:
    """Return whether a text has nothing to see, which cleaning would leave empty."""
    return not VISIBLE.search(text)


def are_equal(*answers: str) -> bool:
    """Return whether answers look the same, but for white space around them."""
    shown = {unicodedata.normalize("NFC", INVISIBLE.sub("", text)).strip() for text in answers}
    return len(shown) == 1


def pair_problem(row: dict, pair: Pair) -> str:
    """Return why the pair of a row cannot be trained on, "" if it can."""
    if is_unfinished(row, pair):
        return "unfinished answer"
    if not is_learned(row, ROW_WEIGHTS):
        return "bad answer"
    return chat_problem([*pair.prompt, {"role": "assistant", "content": pair.chosen}])


def is_unfinished(row: dict, pair: Pair) -> bool:
    """Return whether a row says that an answer of its pair was cut off.

    It says so under finish_reason, under that of a side, or under that of the answer among its
    completions."""
    # A model would learn to stop in the middle, or to dislike what was only cut.
    names = ("finish_reason", "chosen_finish_reason", "rejected_finish_reason")
    if any(row.get(name) == "length" for name in names):
        return True
    answers = row.get("completions")
    answers = [one for one in answers if isinstance(one, dict)] if isinstance(answers, list) else []
    cut = [one.get("text") for one in answers if one.get("finish_reason") == "length"]
    return pair.chosen in cut or pair.rejected in cut


# ---- dialogues within one text ---------------------------------------------------------------

HH_TURN = re.compile(r"\n\n(Human|Assistant):(?: |\Z)")  # Anthropic's
BELLE_TURN = re.compile(r"(?:\A|\n)(Human|Assistant): ?")
OPEN_DIALOGUE = re.compile(r"(?:\n\nHuman:.*\n\n|Human:.*\n)Assistant:\s*", re.DOTALL)


def is_dialogue(value: object) -> bool:
    return isinstance(value, str) and HH_TURN.match(value) is not None


def dialogue_turns(
    text: object,
    pattern: re.Pattern,
    name: str = "a dialogue",
    begin: str = "a blank line and Human:",
) -> list[dict]:
    """Return messages of a text that a pattern cuts at its speakers. Raise BadRow.

    name, begin: what the text is, and what it must begin with."""
    # split: what stands before the first speaker, then speakers and words by turns
    before, *rest = pattern.split(message("user", text)["content"])
    if before.strip() or not rest:
        raise BadRow(f"{name} does not start with {begin}")
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return [message(SPEAKERS[speaker], words) for speaker, words in pairs]


SPEAKERS = {"Human": "user", "USER": "user", "FUNCTION RESPONSE": "tool"}
SPEAKERS |= dict.fromkeys(("Assistant", "ASSISTANT", "MOSS"), "assistant")


RENDERED = re.compile(  # how a prompt begins that a chat template has written
    r"\s*(?:<(?:s|bos|BOS_TOKEN|\|begin_of_text\||\uff5cbegin\u2581of\u2581sentence\uff5c)>\s*)?"
    r"(?:<[|\uff5c](?:im_start|im_user|im_system|start_header_id|header_start|start_of_role|"
    r"start_of_turn_token|system|user|prompter|human|assistant)[|\uff5c]>|"
    r"<\|start\|>(?=\w+<\|)|\[INST\].*\[/INST\]|<start_of_turn>)",
    re.DOTALL | re.IGNORECASE,
)
# how one may end, and what then stands before, where a line or sentence begins: Alpaca's, Vicuna's
OPENS_ANSWER = {
    "### Response:": re.compile("^### Instruction:", re.MULTILINE),
    "ASSISTANT:": re.compile(r"(?:^|[.!?\u3002]\s*)USER:", re.MULTILINE),
}
LATER_TURN = re.compile("<extra_id_1>(?=(?:User|Assistant)\n)")  # HelpSteer's


def question_turns(text: str) -> list[dict]:
    """Return a question as the user's turn, or the turns of a dialogue that waits for its answer.

    Such are the prompts of full-hh-rlhf and Nectar, and BELLE's instructions of several turns."""
    # Marks of a template would become part of the question, and ours would be put around them.
    found = RENDERED.match(text) or LATER_TURN.search(text)
    end = text.rstrip()
    pairs = OPENS_ANSWER.items()
    ends = (mark for mark, before in pairs if end.endswith(mark) and before.search(text))
    if mark := found[0].strip() if found else next(ends, ""):
        how = "give its turns as messages"
        raise BadRow(f"the prompt is written by a chat template ({mark}); {how}")
    if "Human:" not in text[:8] or not OPEN_DIALOGUE.fullmatch(text):
        return [message("user", text)]
    pattern = HH_TURN if text.startswith("\n\n") else BELLE_TURN
    # the last is "Assistant:" without words
    return dialogue_turns(text.rstrip(), pattern)[:-1]


# Three sets with a form of their own: glaive's function calls, MOSS, and OpenAssistant's trees.
GLAIVE_TURN = re.compile(r"(?:\A|\n+)\s*(USER|ASSISTANT|FUNCTION RESPONSE): ")
# arguments are an object, often within single quotes
GLAIVE_CALL = re.compile(
    r"""<functioncall>\s*\{"name":\s*"([^"]*)\""""
    r"""(?:,\s*"arguments":\s*(?:'(.*)'|(\{.*\})))?\s*\}\s*\Z""",
    re.DOTALL,
)


def glaive(row: dict) -> list[dict]:
    """Return the turns of a row of glaive-function-calling-v2."""
    messages = dialogue_turns(row["chat"], GLAIVE_TURN, "chat", "USER:")
    for turn in messages:
        turn["content"] = turn["content"].replace("<|endoftext|>", "").strip()
        if turn["role"] == "assistant":
            turn["content"] = GLAIVE_CALL.sub(glaive_call, turn["content"])
    system = row.get("system")
    system = system.removeprefix("SYSTEM: ").strip() if isinstance(system, str) else system
    return with_system(messages, row | {"system": system})


def glaive_call(found: re.Match) -> str:
    return call_text({"name": found[1], "arguments": unpacked(found[2] or found[3] or "{}")})


MOSS_TURN = re.compile(r"\[(Human|MOSS)\]: ")
MOSS_MARK = re.compile(r"\A<\|[^|]*\|>:\s*|\s*<eo[a-z]>\s*\Z")


def moss_text(row: dict) -> list[dict]:
    """Return the turns of a row of moss-002: '[Human]: ...<eoh> [MOSS]: ...<eoa>'."""
    messages = dialogue_turns(row["plain_text"], MOSS_TURN, "plain_text", "[Human]:")
    for turn in messages:
        turn["content"] = MOSS_MARK.sub("", turn["content"])
    return with_system(messages, row)


def moss_chat(row: dict) -> list[dict]:
    """Return the turns of a row of moss-003: {"turn_1": {"Human": ..., "MOSS": ...}, ...}."""
    chat = unpacked(row["chat"])
    turns = chat.values() if isinstance(chat, dict) else []
    turns = [turn for turn in turns if turn is not None]
    if not turns or not all(isinstance(turn, dict) for turn in turns):
        raise BadRow("chat is not an object of turns")
    messages = []
    for turn in turns:
        for name, words in turn.items():
            words = MOSS_MARK.sub("", words) if isinstance(words, str) else words
            if name in ("Human", "MOSS"):
                messages.append(message(SPEAKERS[name], words))
            elif words not in (None, "", "None"):  # such as Commands, whose results are elsewhere
                raise BadRow(f"a turn holds {name}, which is not read")
    return with_system(messages, row)


def best_thread(row: dict) -> list[dict]:
    """Return the turns along the best replies of a tree of OpenAssistant."""
    node, messages = unpacked(row["prompt"]), []
    while isinstance(node, dict):
        messages += read_turn(node)
        replies = [one for one in listed(node.get("replies")) or [] if not one.get("deleted")]
        ranks = [one.get("rank") for one in replies]
        # rank 0 is the best; replies that nobody ranked come last
        order = [rank if isinstance(rank, int | float) else len(replies) for rank in ranks]
        node = replies[order.index(min(order))] if replies else None
    if not messages:
        raise BadRow("prompt is not the root of a tree")
    return messages
