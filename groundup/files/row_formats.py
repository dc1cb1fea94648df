"""Row formats: a row of a raw file is a document, a conversation or a preference pair, under the keys that published
Chinese and English sets use. The three tables at the end of this file list all formats.

What keys mean depends on what is wanted: prompt and response are one text for `document_of` and two turns for
`messages_of`. A row is an object from JSON, CSV or parquet, or a string (a document). Nothing here raises because of a
row: a row that cannot be used comes back with one line that says why, for the caller to count and show.
"""

import json
import re
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from groundup.files import TOOLS_HEAD, TOOLS_TAIL
from groundup.files.text_keys import BadRow, keys_of, parse_text_key, text
from groundup.files.usable import Pair, are_equal, is_blank, label_of


class RowFormat(NamedTuple):
    name: str  # for people
    keys: str  # a row that has all of these has this format
    read: Callable[[dict], str | list[dict] | Pair]


def document_of(row: object, text_key: str = "") -> tuple[str, str]:
    """Return (text, "") or ("", what is wrong). text_key: see `parse_text_key`; "" = found by the row's keys.

    Raise UserError for a malformed text_key only.
    """
    if text_key:
        parse_text_key(text_key)  # also if there is no row that it fits
    if isinstance(row, str):
        return row, ""
    try:
        return (text(text_key, row, lists=True) if text_key and isinstance(row, dict) else read(row, "text")), ""
    except BadRow as problem:
        return "", str(problem)


def messages_of(row: object) -> tuple[list[dict], str]:
    """Return ([{"role": ..., "content": ...}, ...], "") or ([], what is wrong). The ids of calls stay beside their
    text, if a row has them: tool_call_ids of the assistant's turn, tool_call_id of a result.

    Roles are system, user, assistant and tool. Empty answers and a last turn that is not the assistant's are kept. What
    is more than text becomes text as in Qwen's models: tool_calls as <tool_call> lines, tools in the system message,
    reasoning_content within <think>.
    """
    try:
        return check_media(read(row, "chat"), row), ""
    except BadRow as problem:
        return [], str(problem)


def pair_of(row: object) -> tuple[Pair | None, str]:
    """Return (Pair, "") or (None, what is wrong), such as an empty answer, equal answers or different prompts."""
    try:
        pair = read(row, "preference")
        check_media(pair.prompt, row)
        if is_blank(pair.chosen) or is_blank(pair.rejected):
            raise BadRow("empty answer")
        if are_equal(pair.chosen, pair.rejected):
            raise BadRow("chosen and rejected are the same")
        return pair, ""
    except BadRow as problem:
        return None, str(problem)


# ---- which format --------------------------------------------------------------------------------------------


def read(row: object, kind: str) -> str | list[dict] | Pair:
    """Return what a row holds. Raise BadRow."""
    row = {"messages": row} if isinstance(row, list) and row and isinstance(row[0], dict) else row  # nanochat's
    if not isinstance(row, dict):
        raise BadRow(f"{type(row).__name__}, not an object")
    found, row = recognise(row, kind), rename(row)
    sides = [side for side in ("chosen", "rejected") if row.get(side)]
    if kind == "preference" and len(sides) == 1 and not (found and has_all(row, found)):
        missing = "rejected" if sides == ["chosen"] else "chosen"
        raise BadRow(f"a {sides[0]} answer but none under {missing!r} ({keys_of(row)})")
    if found:
        return found.read(row)
    kinds = ("chat", "text", "preference")  # chats first: many are known as text too
    other = next((k for k in kinds if k != kind and recognise(row, k)), "")
    hint = f"; this is {recognise(row, other).name}, of kind={other!r}" if other else ""
    if kind == "preference" and "completions" in row:
        hint = "; these are answers of sample.py: prepare.py --pair_by=dataset or reward makes pairs of them"
    if kind == "preference" and label_of(row) is not None:
        hint = "; this is an answer with a label: dpo.py --loss=kto learns from it"
    if kind != "text" and not hint:
        hint = "; prepare.py --text_key='question=KEY,answer=KEY' reads other names"
    raise BadRow(f"unknown format: {keys_of(row)}{hint}; {kind} is known by: {known_keys(kind)}")


def known_keys(kind: str) -> str:
    return " | ".join(known.keys for known in FORMATS[kind])


def check_media(messages: list[dict], row: dict | list) -> list[dict]:
    """Return the messages. Raise BadRow if one has the place of a picture, video or sound of the row."""
    kinds = ("image", "video", "audio") if isinstance(row, dict) else ()
    kinds = [kind for kind in kinds if row.get(kind) or row.get(f"{kind}s")]
    if found := next((kind for kind in kinds for m in messages if f"<{kind}>" in m["content"]), ""):
        raise BadRow(f"a turn holds an {found}, not only text")
    return messages


def recognise(row: object, kind: str) -> RowFormat | None:
    """Return the first format whose keys are all there and not null (joined tables have columns of others, with nulls);
    if there is none, the first whose keys are there, so that a null is reported as such."""
    if not isinstance(row, dict):
        return None
    row = rename(row)
    if kind != "preference" and "rejected" in row and ("chosen" in row or "messages" in row):
        return HH_CHAT if kind == "chat" and is_dialogue(row.get("chosen")) else None
    known = formats_with(tuple(row), kind)
    return next((one for one in known if has_all(row, one)), known[0] if known else None)


@lru_cache(maxsize=64)  # the rows of a file have the same keys
def formats_with(keys: tuple[str, ...], kind: str) -> list[RowFormat]:
    return [known for known in FORMATS[kind] if set(known.keys.split(",")).issubset(keys)]


def has_all(row: dict, known: RowFormat) -> bool:
    return all(row.get(key) is not None for key in known.keys.split(","))


def rename(row: dict) -> dict:
    """Return a preference row under the most common names of its keys."""
    return row if OTHER_NAMES.keys().isdisjoint(row) else {OTHER_NAMES.get(key, key): row[key] for key in row}


OTHER_NAMES = {"reject": "rejected", "rejected_response": "rejected"}
OTHER_NAMES |= {"response_chosen": "chosen", "response_rejected": "rejected"}


def list_at(key: str, row: dict, item: type, what: str) -> list:
    """Return the list under a key, which may be stored as JSON. Raise BadRow if its items are of another type."""
    found = unpacked(row[key])
    if not isinstance(found, list) or not all(isinstance(one, item) for one in found):
        raise BadRow(f"{key} is not a list of {what}")
    return found


# ---- texts ---------------------------------------------------------------------------------------------------


def encyclopedia(row: dict) -> str:
    """Return title, summary, then every section with its heading."""
    sections = [text("title?,content?", section) for section in list_at("sections", row, dict, "objects")]
    return "\n".join(filter(None, [text("title?,summary?", row), *sections]))


def article(row: dict) -> str:
    return "\n".join(filter(None, [text("title?", row) + text("desc?", row), text("content", row)]))


def poem(row: dict) -> str:
    return "\n".join([text("title?,rhythmic?,author?", row), *list_at("paragraphs", row, str, "texts")]).strip("\n")


# ---- conversations ----------------------------------------------------------------------------------------

ROLES = dict.fromkeys(("system", "developer"), "system") | dict.fromkeys(("user", "human"), "user")
ROLES |= dict.fromkeys(("assistant", "gpt", "function_call"), "assistant")
ROLES |= dict.fromkeys(("tool", "observation", "function"), "tool")


def one_turn(question: str, answer: str, row: dict) -> list[dict]:
    """Return a question and its answer, from two text_keys, after the turns in history: [[question, answer], ...]."""
    history = list_at("history", row, list, "[question, answer]") if row.get("history") else []
    if any(len(turn) != 2 for turn in history):
        raise BadRow("history is not a list of [question, answer]")
    turns = [message(role, said) for turn in history for role, said in zip(("user", "assistant"), turn, strict=True)]
    turns += [message("user", text(question, row)), message("assistant", text(answer, row))]
    return with_system(turns, row)


def seed_task(row: dict) -> list[dict]:
    """Return the instruction with its first instance."""
    instances = list_at("instances", row, dict, "objects")
    if not instances:
        raise BadRow("instances is not a list of objects, it is empty")
    return one_turn("instruction,input?", "output", {**row, **instances[0]})


def prompt_and_completion(row: dict) -> list[dict]:
    """Return the turns of two texts or two lists of turns, as trl has them."""
    prompt, answer = row["prompt"], row["completion"]
    turns = read_turns(prompt) if isinstance(prompt, list) else [message("user", prompt)]
    turns += read_turns(answer) if isinstance(answer, list) else [message("assistant", answer)]
    return with_system(turns, row)


def turns_at(key: str, row: dict) -> list[dict]:
    return with_system(read_turns(row[key]), row)


def read_turns(value: object) -> list[dict]:
    """Return messages from [{role or from, content or value}, ...], or from such a list as JSON."""
    turns = unpacked(value)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        inner = f" with {type(turns[0]).__name__}" if isinstance(turns, list) and turns else ""
        raise BadRow(f"{type(turns).__name__}{inner}, not a list of turns" if turns else "no turns")
    tools = next((turn["tools"] for turn in turns if turn.get("tools")), None)
    return with_system(list(map(read_turn, turns)), {"tools": tools})


def question_answer_turns(row: dict) -> list[dict]:
    """Return messages from [{"human": ..., "assistant": ...}, ...]; the last question may lack its answer."""
    turns = list_at("conversation", row, dict, "{human, assistant}")
    said = [(role, turn.get(key)) for turn in turns for role, key in (("user", "human"), ("assistant", "assistant"))]
    if not said:
        raise BadRow("no turns")
    open_end = said[-1][1] is None
    return with_system([message(role, text) for role, text in said[: len(said) - open_end]], row)


def dialogue_at(key: str, row: dict) -> list[dict]:
    """Return messages from one of Anthropic's dialogues, or from turns."""
    if not isinstance(row[key], str):
        return turns_at(key, row)
    before, *rest = HH_TURN.split(row[key])
    if before or not rest:
        raise BadRow("a dialogue does not start with a blank line and Human:")
    return with_system([message(HH_ROLES[name], said) for name, said in zip(rest[::2], rest[1::2], strict=True)], row)


def is_dialogue(value: object) -> bool:
    return isinstance(value, str) and HH_TURN.match(value) is not None


HH_TURN = re.compile(r"\n\n(Human|Assistant):(?: |\Z)")
HH_ROLES = {"Human": "user", "Assistant": "assistant"}


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
    ids = {"tool_call_id": turn["tool_call_id"]} if role == "tool" and is_id(turn.get("tool_call_id")) else {}
    if calls:
        content = "\n".join(filter(None, [content if content else "", *map(call_text, list_of(calls))]))
        found = [call.get("id") for call in list_of(calls) if isinstance(call, dict)]
    else:
        found = turn.get("tool_call_ids")  # of a row that prepare.py has written
    if role == "assistant" and isinstance(found, list) and found and all(map(is_id, found)):
        ids = {"tool_call_ids": found}
    if turn.get("reasoning_content"):
        thought = message(role, turn["reasoning_content"])["content"]
        content = f"<think>\n{thought}\n</think>\n\n{content or ''}"
    return message(role, content) | ids


def is_id(value: object) -> bool:
    return isinstance(value, str) and value != ""


def message(role: str, content: object) -> dict:
    if not isinstance(content, str):
        raise BadRow(f"a turn ({role}) holds {'no text' if content is None else type(content).__name__ + ', not text'}")
    return {"role": role, "content": content}


def part_text(part: object) -> str:
    """Return the text of one part of a content that is a list: {"type": "text", "text" or "value": ...}."""
    is_part = isinstance(part, dict)
    kind, found = (part.get("type"), part.get("text", part.get("value"))) if is_part else (type(part).__name__, None)
    if kind == "text" and not isinstance(found, str):
        raise BadRow("a part of a turn is of type text but has none")
    if kind != "text":
        raise BadRow(f"a turn holds {kind!r:.40}, not text")
    return found


def call_text(call: object) -> str:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]  # OpenAI's form has an id and a type around it
    if isinstance(call, dict) and "name" in call:
        call = {"name": call["name"], "arguments": unpacked(call.get("arguments", {}))}
    return f"<tool_call>\n{call if isinstance(call, str) else as_json(call)}\n</tool_call>"


def unpacked(value: object) -> object:
    """Parse JSON that is stored as a string; return any other value unchanged."""
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
    """Put the row's own system prompt and tools into the first message."""
    system, tools = row.get("system"), unpacked(row.get("tools"))
    if not system and not tools:
        return turns
    has_own = turns[0]["role"] == "system"
    first = turns[0]["content"] if has_own else ""
    if system:
        first = message("system", system)["content"] + ("\n" + first if first not in ("", system) else "")
    if tools:
        lines = "\n".join(tool if isinstance(tool, str) else as_json(tool) for tool in list_of(tools))
        first = (first + "\n\n" if first else "") + TOOLS_HEAD + lines + TOOLS_TAIL
    return [message("system", first), *turns[has_own:]]


# ---- preference pairs -------------------------------------------------------------------------------------


def two_answers(prompt: str, row: dict) -> Pair:
    """Return two answers to the text_key `prompt` (text or turns), or to the turns before each answer."""
    if isinstance(row["chosen"], list) and len(row["chosen"]) > 1:
        return two_dialogues(row)  # UltraFeedback repeats the prompt
    key = prompt.split(",")[0]
    if isinstance(row[key], str) and row[key].startswith("<|im_start|>"):
        raise BadRow("the prompt is in ChatML; give its turns as messages")
    # "nothing?" is a key that no row has: one_turn then makes an empty answer, which [:-1] removes
    turns = turns_at(key, row) if isinstance(row[key], list) else one_turn(prompt, "nothing?", row)[:-1]
    return Pair(turns, answer_at(row, "chosen"), answer_at(row, "rejected"))


def turns_then_two(key: str, row: dict) -> Pair:
    return Pair(turns_at(key, row), answer_at(row, "chosen"), answer_at(row, "rejected"))


def turns_then_worse(row: dict) -> Pair:
    """Return the last turn as the chosen answer."""
    *prompt, chosen = turns_at("messages", row)
    if chosen["role"] != "assistant" or not prompt:
        raise BadRow("messages does not end with a question and the chosen answer")
    return Pair(prompt, chosen["content"], answer_at(row, "rejected"))


def two_outputs(row: dict) -> Pair:
    outputs = row["output"]
    if not isinstance(outputs, list) or len(outputs) != 2:
        hint = "; this is instructions (Alpaca), of kind='chat'" if isinstance(outputs, str) else ""
        raise BadRow(f"output is not a list of a chosen and a rejected answer{hint}")
    return two_answers("instruction,input?", {**row, "chosen": outputs[0], "rejected": outputs[1]})


def two_dialogues(row: dict) -> Pair:
    """Return the pair of two conversations (messages or Anthropic's dialogues) that differ in the last answer only."""
    *prompt, chosen = dialogue_at("chosen", row)
    *other, rejected = dialogue_at("rejected", row)
    if chosen["role"] != "assistant" or rejected["role"] != "assistant" or not prompt:
        raise BadRow("chosen or rejected does not end with a question and its answer")
    if prompt != other:
        raise BadRow("chosen and rejected answer different prompts")
    return Pair(prompt, chosen["content"], rejected["content"])


def answer_at(row: dict, key: str) -> str:
    """Return an answer given as a text, as a turn, or as a list of one turn."""
    value = row[key]
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict):
        value = read_turn(value)["content"]
    if not isinstance(value, str):
        raise BadRow(f"{'no' if value is None else type(value).__name__ + ', not an'} answer under {key!r}")
    return value


# ---- the formats: the first that fits is taken ---------------------------------------------------------------

DOCUMENTS = (
    RowFormat("text", "text", partial(text, "text")),
    RowFormat("completions", "completion", partial(text, "completion")),
    RowFormat("encyclopedia pages (Baidu Baike)", "title,sections", encyclopedia),
    RowFormat("poems (chinese-poetry)", "author,paragraphs", poem),
    RowFormat("articles with a source", "data_src,title,content", article),
    RowFormat("articles or answers (WuDao, webtext2019zh)", "title,content", partial(text, "title?,desc?,content")),
    RowFormat("questions (medical CSV)", "title,ask,answer", partial(text, "title?,ask?,answer")),
    RowFormat("questions (baike_qa)", "title,answer", partial(text, "title,desc?,answer")),
    RowFormat("questions and answers", "question,answer", partial(text, "question,answer")),
    RowFormat("prompts and responses", "prompt,response", partial(text, "prompt,response")),
    RowFormat("instructions (Zhihu-KOL)", "INSTRUCTION,RESPONSE", partial(text, "INSTRUCTION,RESPONSE")),
    RowFormat("contents", "content", partial(text, "content")),
    RowFormat("responses", "response", partial(text, "response")),
)

CHATS = (
    RowFormat("messages (OpenAI)", "messages", partial(turns_at, "messages")),
    RowFormat("conversations (ShareGPT)", "conversations", partial(turns_at, "conversations")),
    RowFormat("conversation (Firefly)", "conversation", question_answer_turns),
    RowFormat("instructions (Alpaca)", "instruction,output", partial(one_turn, "instruction,input?", "output")),
    RowFormat("seed tasks (Alpaca)", "instruction,instances", seed_task),
    RowFormat("tasks (Firefly)", "kind,input,target", partial(one_turn, "input", "target")),
    RowFormat("inputs and outputs", "input,output", partial(one_turn, "input", "output")),
    RowFormat("prompts and responses", "prompt,response", partial(one_turn, "prompt", "response")),
    RowFormat("prompts and answers", "prompt,answer", partial(one_turn, "prompt", "answer")),
    RowFormat("prompts and completions (trl)", "prompt,completion", prompt_and_completion),
    RowFormat("questions and answers", "question,answer", partial(one_turn, "question", "answer")),
    RowFormat("questions (medical CSV)", "title,ask,answer", partial(one_turn, "title?,ask?", "answer")),
    RowFormat("questions (baike_qa)", "title,answer", partial(one_turn, "title,desc?", "answer")),
    RowFormat("questions (webtext2019zh)", "title,desc,content", partial(one_turn, "title,desc?", "content")),
    RowFormat("instructions (Zhihu-KOL)", "INSTRUCTION,RESPONSE", partial(one_turn, "INSTRUCTION", "RESPONSE")),
)

HH_CHAT = RowFormat("the better of two dialogues (hh-rlhf)", "chosen,rejected", partial(dialogue_at, "chosen"))

PAIRS = (
    RowFormat("turns with two answers", "conversations,chosen,rejected", partial(turns_then_two, "conversations")),
    RowFormat("messages with two answers", "messages,chosen,rejected", partial(turns_then_two, "messages")),
    RowFormat("messages with a worse answer (ms-swift)", "messages,rejected", turns_then_worse),
    RowFormat("tasks with two answers", "instruction,chosen,rejected", partial(two_answers, "instruction,input?")),
    RowFormat("prompts with two answers", "prompt,chosen,rejected", partial(two_answers, "prompt")),
    RowFormat("questions with two answers", "question,chosen,rejected", partial(two_answers, "question")),
    RowFormat("two dialogues (UltraFeedback, hh-rlhf)", "chosen,rejected", two_dialogues),
    RowFormat("instructions with two outputs", "instruction,output", two_outputs),
)

FORMATS = {"text": DOCUMENTS, "chat": CHATS, "preference": PAIRS}
# What documents are made of, and what shows that rows are of another kind; a table's other columns need not be read.
COLUMNS = {key for known in FORMATS.values() for one in known for key in one.keys.split(",")}
COLUMNS |= {"desc", "summary", "rhythmic", *OTHER_NAMES}
