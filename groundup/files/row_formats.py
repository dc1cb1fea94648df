"""Row formats: a row of a raw file is a document, a conversation or a preference pair.

Its keys tell which: they are those of published Chinese and English sets. The tables at the end of
this file list all formats, with the keys that each reads. `unread_keys` names those that hold
content and that no reader asked for.

What keys mean depends on what is wanted: prompt and response are one text for `document_of` and two
turns for `messages_of`. A row is an object from JSON, CSV or parquet, or a string (a document).
A row that cannot be used never ends the program: `read` and `read_pair` raise BadRow,
`document_of`, `messages_of` and `pair_of` return one line that says why, for the caller to count
and show.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from groundup.errors import counted
from groundup.files import turns
from groundup.files.text_keys import THREADS, as_score, text
from groundup.files.turns import (
    KTO_LABELS,
    ROW_WEIGHTS,
    WEIGHTS,
    BadRow,
    Pair,
    are_equal,
    as_number,
    is_blank,
    is_learned,
    keys_of,
    label_of,
    listed,
    message,
    read_turns,
    turns_at,
    unpacked,
    with_system,
)


class RowFormat(NamedTuple):
    name: str  # for people
    keys: str  # a row that has all of these has this format
    read: Callable[[dict], str | list[dict] | Pair]
    also: str = ""  # keys that are read, too, where a row has them
    fits: Callable[[dict], bool] | None = None  # what else is true of a row of this format


def document_of(row: object, text_key: str = "") -> tuple[str, str]:
    """Return (text, "") or ("", what is wrong). text_key: see text_keys.py; "" = by the keys.

    Raise UserError for a malformed text_key only.
    """
    if isinstance(row, str):
        return row, ""
    try:
        if text_key and isinstance(row, dict):
            return text(text_key, row, lists=True), ""
        return read(row, "text"), ""
    except BadRow as problem:
        return "", str(problem)


def any_text_of(row: object, text_key: str = "") -> tuple[str, str]:
    """As `document_of`, but conversations and pairs are text as well: that of their turns."""
    found, problem = document_of(row, text_key)
    if not problem or text_key:
        return found, problem
    messages, no_chat = messages_of(row)
    answers = []
    if no_chat and (pair := pair_of(row)[0]):
        messages, answers = pair.prompt, [pair.chosen, pair.rejected]
    texts = [turn["content"] for turn in messages] + answers
    return "\n".join(texts), "" if texts else problem


def messages_of(row: object, kind: str = "chat") -> tuple[list[dict], str]:
    """Return (messages as turns.py has them, "") or ([], what is wrong).

    Empty answers and a last turn that is not the assistant's are kept. kind: "question" reads one
    that stands alone."""
    try:
        return check_media(read(row, kind), row), ""
    except BadRow as problem:
        return [], str(problem)


def pair_of(row: object) -> tuple[Pair | None, str]:
    """Return (Pair, "") or (None, what is wrong), such as an empty answer or equal answers."""
    try:
        return read_pair(row), ""
    except BadRow as problem:
        return None, problem.detail or problem.reason


# Reason and detail of a BadRow. The detail marks a reason under which rows are counted.
EMPTY = ("empty answer", "empty answer")


def read_pair(row: object) -> Pair:
    """Return the pair of a row. Raise BadRow, with a detail where the reason is one to count."""
    pair = read(row, "preference")
    check_media(pair.prompt, row)
    if is_blank(pair.chosen) or is_blank(pair.rejected):
        raise BadRow(*EMPTY)
    if are_equal(pair.chosen, pair.rejected):
        raise BadRow("equal answers", "chosen and rejected are the same")
    return pair


# ---- which format ----------------------------------------------------------------------------


def read(row: object, kind: str) -> str | list[dict] | Pair:
    """Return what a row holds. Raise BadRow."""
    original = as_object(row)
    row, found = with_format(original, kind)  # row: under the usual names of its keys
    if kind == "preference" and not (found and has_all(row, found)):
        refuse_one_side(row, original)
    if found:
        try:
            return found.read(row)
        except RecursionError:
            raise BadRow("nested too deeply") from None
    hint = hint_of(row, kind) + (text_key_for(original) if kind == "text" else "")
    what = "another kind" if "of kind=" in hint else "unknown format"
    raise BadRow(
        f"{what}: {keys_of(original)}{hint}; "
        f"{kind} is known by: {nearest_keys(tuple(row), kind)} (docs/data.md lists all)"
    )


def text_key_for(row: dict) -> str:
    """Return the text_key that makes text of a chat without turns, as the end of a sentence; "" for
    another row. The keys of `row` have their own names."""
    known = recognise(row, "chat")
    keys = known.keys.split(",") if known else []
    if not keys or not all(isinstance(row.get(key), str) for key in keys):
        return ""
    if "input" in row and "input" not in keys:
        keys.insert(1, "input?")
    return f"; --text_key='{','.join(keys)}' makes text of it"


def refuse_one_side(row: dict, original: dict) -> None:
    """Raise BadRow if one of a pair's answers is there and the other is not.

    original: the row under its own names of keys, for the message."""
    sides = [side for side in ("chosen", "rejected") if row.get(side)]
    if len(sides) == 1:
        missing = "rejected" if sides == ["chosen"] else "chosen"
        if row.get(missing) == "":
            raise BadRow(*EMPTY)
        raise BadRow(f"a {sides[0]} answer but none under {missing!r} ({keys_of(original)})")


def as_object(row: object) -> dict:
    """Return a row as an object: a list of turns (nanochat's) or of texts (LCCC's) is a
    conversation. Raise BadRow."""
    if isinstance(row, list) and turns.is_thread(row):
        if isinstance(row[0], str) or turns.name_of(row[0]) is not None:
            return {"messages": row}
    if isinstance(row, dict):
        return row
    hint = ""
    if isinstance(row, list) and listed(row):
        hint = "; if the line is an array of rows, give the file a name that ends in .json"
    if isinstance(row, str):
        hint = "; if it is a row, let the file's name end in .jsonl, .csv or .tsv"
    raise BadRow(f"{type(row).__name__}, not an object{hint}")


def hint_of(row: dict, kind: str) -> str:
    """Return what a row of no known format may be, and what to do, as the end of a sentence."""
    listing = listed(row.get("completions"))
    if kind == "preference" and listing and "text" in listing[0]:
        how = "prepare.py --pair_by=dataset or reward makes pairs of them"
        return f"; these are answers of sample.py: {how}"
    if "completions" in row and "labels" in row:
        return "; these are steps with labels (trl's stepwise), from which no stage here learns"
    if kind == "preference" and label_of(row) is not None and recognise(row, "chat"):
        return "; this is an answer with a label: dpo.py --loss=kto learns from it"
    kinds = ("chat", "text", "preference")  # chats first: many are known as text too
    other = next((one for one in kinds if one != kind and recognise(row, one)), "")
    name = recognise(row, other).name if other else ""
    hint = f"; this is {name}, of kind={other!r}" if name else ""
    thread = next((key for key, value in row.items() if turns.is_thread(value)), "")
    others = [value for key, value in row.items() if key != thread and isinstance(value, str)]
    found = listed(row[thread]) if thread else None
    names = turns.naming(found) if found else ""  # texts have none
    is_list = isinstance(row.get(thread), list) and found and not turns.exchange_keys(found)
    if (kind != "text" or not name) and is_list and recognise(found[0], kind):
        return f"; {thread!r} holds rows: give a file of that list alone"
    may_be_turns = "KEY" not in names if found else not any(others)
    if kind == "chat" and thread and not name and may_be_turns:
        setting = ",".join(filter(None, (f"messages={thread}", names)))
        return f"; prepare.py --text_key='{setting}' reads {thread} as turns, if they are turns"
    if kind == "text":
        told = (key for key in turns.CONTENT_KEYS if found and isinstance(found[0].get(key), str))
        if content := next(told, ""):
            hint += f"; text_key={thread}.{content} makes text of it"
        return hint or "; prepare.py --text_key=KEY reads other names"
    if other in ("chat", "preference"):
        return hint
    setting = (
        "question=KEY,answer=KEY" if kind == "chat" else "question=KEY,chosen=KEY,rejected=KEY"
    )
    return f"{hint}; prepare.py --text_key='{setting}' reads other names"


def known_keys(kind: str) -> list[str]:
    """Return the keys of each format of a kind, each once."""
    return list(dict.fromkeys(known.keys for known in FORMATS[kind]))


@lru_cache(maxsize=64)  # the rows of a file have the same keys
def nearest_keys(keys: tuple[str, ...], kind: str) -> str:
    """Return the keys of the three formats that are most like those of a row, for people."""
    own = [pairs_of_letters(key) for key in keys[:20]]

    def unlike(known: str) -> float:
        wanted = [pairs_of_letters(key) for key in known.split(",")]
        found = [max((alike(one, other) for other in own), default=0.0) for one in wanted]
        # up to a half it is chance
        return -sum(share for share in found if share > 0.5) / len(found)

    # of formats that are equally like it the commoner comes first
    in_order = dict.fromkeys([*COMMON.get(kind, ()), *known_keys(kind)])
    return " | ".join(sorted(in_order, key=unlike)[:3])


COMMON = {  # keys of formats that people use most
    "chat": ("messages", "question,answer", "instruction,output"),
    "preference": ("prompt,chosen,rejected", "chosen,rejected"),
}


def pairs_of_letters(key: object) -> set[str]:
    padded = f" {str(key).lower()[:40]} "
    return {padded[i : i + 2] for i in range(len(padded) - 1)}


def alike(one: set[str], other: set[str]) -> float:
    """Return the Dice coefficient of two sets, from 0 to 1."""
    return 2 * len(one & other) / (len(one) + len(other))


MEDIA = tuple(f"{kind}{s}" for kind in ("image", "video", "audio") for s in ("", "s"))
MEDIA_KEYS = frozenset(MEDIA)


def check_media(messages: list[dict], row: dict | list) -> list[dict]:
    """Return the messages. Raise BadRow if the row has a picture, video or sound beside them."""
    if not isinstance(row, dict) or MEDIA_KEYS.isdisjoint(row):
        return messages
    if found := next((key for key in MEDIA if has_content(row.get(key))), ""):
        raise BadRow(f"a turn holds an {found.removesuffix('s')} ({found}), not only text")
    return messages


def recognise(row: object, kind: str) -> RowFormat | None:
    """Return the format of a row, None if it has none."""
    return with_format(row, kind)[1] if isinstance(row, dict) else None


def with_format(row: dict, kind: str) -> tuple[dict, RowFormat | None]:
    """Return a row under the most common names of its keys, and its format. A rarer name of an
    answer counts where there is no other answer."""
    row = rename(row)
    found = format_of(row, kind)
    if ANSWER_NAMES.keys().isdisjoint(row) or (found and has_all(row, found)):
        return row, found
    other = rename(row, answers=True)
    better = format_of(other, kind)
    fits = not found or (better and has_all(other, better))
    return (other, better) if fits else (row, found)


def format_of(row: dict, kind: str) -> RowFormat | None:
    """Return the first format whose keys are all there and neither null nor empty.

    (A table joined from several sets has the columns of all, empty where a row's own set has none.)
    If there is none, return the first whose keys are there, so that what is missing is reported.
    A pair is no chat to learn, but for hh-rlhf's: its better side is a whole dialogue."""
    worse = row.get("rejected") or row.get("rejected_messages")
    if kind in ("text", "chat") and worse and ("chosen" in row or "messages" in row):
        return HH_CHAT if kind == "chat" and turns.is_dialogue(row.get("chosen")) else None
    known = formats_with(tuple(row), kind)
    for one in known:
        if has_all(row, one) and (one.fits is None or one.fits(row)):
            return one
    return next((one for one in known if one.fits is None or one.fits(row)), None)


@lru_cache(maxsize=64)  # the rows of a file have the same keys
def formats_with(keys: tuple[str, ...], kind: str) -> list[RowFormat]:
    return [known for known in FORMATS[kind] if set(known.keys.split(",")).issubset(keys)]


def has_all(row: dict, known: RowFormat) -> bool:
    for key in known.keys.split(","):  # all() takes three times as long
        value = row.get(key)
        if value in NO_VALUE or (value == "[]" and key in THREADS):
            return False
    return True


NO_VALUE = (None, "", [])


def rename(row: dict, answers: bool = False) -> dict:
    """Return a row under the usual names of its keys, or of its answers, unless it has these, too."""
    keys = usual_keys(tuple(row), answers)
    return dict(zip(keys, row.values(), strict=True)) if keys else row


@lru_cache(maxsize=64)  # the rows of a file have the same keys
def usual_keys(keys: tuple[str, ...], answers: bool) -> list[str]:
    """Return the usual names of the keys of a row, [] if they have these.

    Known keys may be in capitals: Question, PROMPT."""
    names = ANSWER_NAMES if answers else OTHER_NAMES
    found: list[str] = []
    for key in keys:
        name = names.get(key) or (key.lower() if key.lower() in COLUMNS else key)
        found.append(key if name in keys or name in found else name)
    return found if found != list(keys) else []


def usual_names(**names: str) -> dict[str, str]:
    """Return {rarer name: usual name} of names that are given the other way round."""
    return {name: usual for usual, rarer in names.items() for name in rarer.split()}


OTHER_NAMES = usual_names(
    # MedicalGPT, CValues, StackExchange, When2Call, OpenAI, Vezora, torchtune
    chosen="response_chosen pos_resp response_j chosen_response preferred_output accepted "
    "chosen_conversations",
    rejected="reject rejected_response response_rejected neg_resp response_k non_preferred_output "
    "rejected_conversations",
    input="inputs",  # Aya, FLAN, xP3
    reasoning_content="Complex_CoT",  # medical-o1
)
ANSWER_NAMES = usual_names(
    output="targets",  # Aya, FLAN, xP3
    response="generation",  # distilabel
    solution="generated_solution",  # OpenMathInstruct
)


# ---- keys that no reader asked for -----------------------------------------------------------

MOST_UNREAD = 12  # keys that are named
# Names of what is about a row and no part of what it says; so are names that end in id.
ABOUT = {"source", "url", "made_by", "prompt_id", "uuid", "index"}


def describe_unread(counts: Counter[str]) -> str:
    """Return how many rows have which unread keys, as a part of a line for people."""
    ordered = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    listing = [f"{key} in {counted(n, 'row')}" for key, n in ordered]
    more = f", and {len(listing) - MOST_UNREAD} more keys" if len(listing) > MOST_UNREAD else ""
    return ", ".join(listing[:MOST_UNREAD]) + more


def unread_keys(row: object, *kinds: str) -> list[str]:
    """Return the keys of a row that hold content but are not read. kinds: the first that fits it.

    Those of turns are named like messages.name. Numbers, null, what is empty or about the row, and
    what only repeats a value that is read, are no content."""
    row = {"messages": row} if isinstance(row, list) else row
    given = row
    for kind in kinds if isinstance(given, dict) else ():
        row, found = with_format(given, kind)
        if found:
            break
    else:
        return []
    known, others, lists = keys_read(found, kind, tuple(row))
    threads = {key: listing for key in lists if (listing := listed(row[key]))}
    left = [key for key in others if has_content(row[key])]
    left += [key for key in others if row[key] is False and OF_FLAGS.search(key)]
    if left:
        seen = [row[key] for key in known]
        for listing in threads.values():
            seen += [turn.get(name) for turn in listing for name in turns.CONTENT_KEYS]
        left = [key for key in left if row[key] not in seen]
    for key, listing in threads.items():
        left += unread_of_turns(key, listing)
    if left and row is not given:
        own = dict(zip(row, given, strict=True))  # the names that they have in the file
        left = [own.get(key, key) for key in left]
    if "chat_template_kwargs" in row:
        left += unread_settings(unpacked(row["chat_template_kwargs"]))
    if has_no_input(found.keys, row):
        left.append("input that says there is none")
    labels = [key for key in KTO_LABELS if key in row and str(row[key]) not in turns.NOTHING]
    return left + [key for key in labels if as_number(row[key]) not in (0, 1)]


@lru_cache(maxsize=256)  # the rows of a file have the same keys
def keys_read(
    found: RowFormat, kind: str, keys: tuple[str, ...]
) -> tuple[list[str], list[str], list[str]]:
    """Return which keys of a row are read, which are not but may hold content, and which of those
    that are read may hold turns."""
    names = set(",".join((found.keys, found.also, BESIDE[kind])).split(","))
    known = [key for key in keys if key in names]
    others = [key for key in keys if key not in names and not is_about(key)]
    return known, others, [key for key in known if key in TURN_LISTS and kind != "text"]


def is_about(key: str) -> bool:
    name = key.lower()
    # pandas writes the numbers of rows under "" and reads them as "Unnamed: 0"
    unnamed = not name or name.startswith("unnamed: ")
    return unnamed or name in ABOUT or name == "id" or name.endswith("_id")


def unread_settings(settings: object) -> list[str]:
    """Return the keys of smoltalk2's chat_template_kwargs that are not read."""
    if not isinstance(settings, dict):
        return []
    left = settings.keys() - {"custom_instructions", "xml_tools"}
    return [f"chat_template_kwargs.{key}" for key in left if has_content(settings[key])]


def unread_of_turns(key: str, listing: list[dict]) -> list[str]:
    """Return the keys of turns that hold content but are not read, each once."""
    known = turns.keys_read_of(listing)
    found: dict[str, None] = {}
    for turn in listing:
        if not turn.keys() <= known:
            for name in turn.keys() - known:
                value = turn[name]
                is_flag = value is not None and OF_FLAGS.search(name)
                is_obeyed = name in WEIGHTS and not math.isnan(as_number(value))
                if not is_obeyed and (is_flag or (not is_about(name) and has_content(value))):
                    found[name] = None
    return [f"{key}.{name}" for name in found]


# in the name of a key of a turn that may say whether to learn from it, whatever it holds
OF_FLAGS = re.compile("loss|train|learn|mask|weight", re.IGNORECASE)


def has_content(value: object) -> bool:
    if isinstance(value, str):
        return bool(value.strip()) and value not in turns.NOTHING
    return not isinstance(value, bool | int | float) and value not in (None, [], {})


TURN_LISTS = (*THREADS, "prompt", "completion", "chosen", "rejected", "rejected_messages")
TURN_LISTS += ("conversation_a", "conversation_b")
BESIDE = {"text": "", "preference": "completions,difficulty,score,margin,@answers"}  # in any format
BESIDE["chat"] = ",".join((*turns.SYSTEM_KEYS, *turns.TOOL_KEYS, *KTO_LABELS, *ROW_WEIGHTS, *MEDIA))
BESIDE["chat"] += ",chat_template_kwargs"
BESIDE["question"] = BESIDE["chat"]
BESIDE["preference"] += "," + BESIDE["chat"]


# ---- texts -----------------------------------------------------------------------------------


def list_at(key: str, row: dict, item: type, what: str) -> list:
    """Return the list under a key, also as JSON. Raise BadRow if its items are of another type."""
    found = unpacked(row[key])
    if not isinstance(found, list) or not all(isinstance(one, item) for one in found):
        raise BadRow(f"{key} is not a list of {what}")
    return found


def encyclopedia(row: dict) -> str:
    """Return title, summary, then every section with its heading."""
    sections = list_at("sections", row, dict, "objects")
    texts = [text("title?,content?", section) for section in sections]
    return "\n".join(filter(None, [text("title?,summary?", row), *texts]))


def article(row: dict) -> str:
    return "\n".join(filter(None, [text("title?", row) + text("desc?", row), text("content", row)]))


def poem(row: dict) -> str:
    lines = list_at("paragraphs", row, str, "texts")
    return "\n".join([text("title?,rhythmic?,author?", row), *lines]).strip("\n")


def question_and_answer(question: str, answer: str, row: dict) -> str:
    """Return a question with what belongs to it, and its answer, as one text."""
    return "\n".join([whole_question(question, row), answer_text(answer, row)])


# ---- a question and its answer ---------------------------------------------------------------

PASSAGES = ("context", "article", "passage")  # what a question is about
LETTERS = "ABCDEFGHIJ"
OPTIONS = ("options", "choices")  # of multiple choice; or the letters are keys of the row
ABOUT_QUESTIONS = {*PASSAGES, *OPTIONS, "A"}
ASKED = "history,context,article,passage,options,choices,A,B,C,D,E,F,G,H,I,J"  # by questions
ANSWERED = ",".join(turns.THOUGHT_KEYS)  # by answers


def one_turn(question: str, answer: str, row: dict) -> list[dict]:
    """Return a question and its answer, from two text_keys, or from turns under their keys."""
    asked = asked_turns(question, row)
    if found := turns_of_answer(row.get(answer)):
        return with_system([*asked, *read_turns(found)], row)
    said = without_space(question, answer_text(answer, row), row)
    if thoughts := turns.thoughts_of(row):
        said = turns.with_thoughts("\n".join(thoughts), said)
    return with_system([*asked, message("assistant", said)], row)


def asked_turns(question: str, row: dict) -> list[dict]:
    """Return the turns under the first key of a text_key, or its text after the history."""
    value = row[first_key(question)]
    if isinstance(value, str) and value.startswith('{"messages"'):
        value = unpacked(value)
    if isinstance(value, dict) and "messages" in value:  # OpenAI's preference tuning
        return turns_at("messages", value)
    if is_turns(value):
        return read_turns(value)
    return [*history(row), *turns.question_turns(whole_question(question, row))]


def first_key(text_key: str) -> str:
    return text_key.partition(",")[0].removesuffix("?")


def is_turns(value: object) -> bool:
    """Return whether a value is a list of turns; a text is one only if it names their roles."""
    found = listed(value)
    return bool(found) and (not isinstance(value, str) or turns.name_of(found[0]) is not None)


def turns_of_answer(value: object) -> list[dict] | None:
    """Return the turns that an answer is given as, None if there are none.

    A text is turns, or one turn, if all roles are known and the last is the assistant's. Another
    text that looks like turns may be an answer that says them."""
    found = unpacked(value) if isinstance(value, str) and value.startswith(("[", "{")) else value
    if isinstance(found, dict) and isinstance(turns.name_of(found), str):
        found = [found]
    found = listed(found)
    if not found or not isinstance(value, str):
        return found
    roles = [turns.ROLES.get(str(turns.name_of(one))) for one in found]
    return found if all(roles) and roles[-1] == "assistant" else None


def without_space(question: str, said: str, row: dict) -> str:
    """Return an answer to a question; one that goes on with a dialogue begins with a space."""
    is_text = said.startswith(" ") and isinstance(row[first_key(question)], str)
    opened = is_text and turns.OPEN_DIALOGUE.fullmatch(text(question, row))
    return said.removeprefix(" ") if opened else said


def history(row: dict) -> list[dict]:
    """Return the turns of history: [[question, answer], ...], or a list of turns."""
    if not row.get("history"):
        return []
    if listed(row["history"]):
        return read_turns(row["history"])
    pairs = list_at("history", row, list, "[question, answer]")
    if any(len(pair) != 2 for pair in pairs):
        raise BadRow("history is not a list of [question, answer]")
    roles = ("user", "assistant")
    return [message(role, said) for pair in pairs for role, said in zip(roles, pair, strict=True)]


# How sets that were made as Alpaca's say that an instruction has no input, in any capitals; the
# Chinese are wu, mei you, wu shu ru, mei you shu ru. pandas writes None and nan.
NO_INPUT = ("<noinput>", "<no input>", "noinput", "no input")
NO_INPUT += ("\u65e0", "\u6ca1\u6709", "\u65e0\u8f93\u5165", "\u6ca1\u6709\u8f93\u5165")


def has_no_input(question: str, row: dict) -> bool:
    """Return whether the input beside an instruction only says that there is none."""
    given = row.get("input") if question.startswith("instruction") else None
    return given in ("None", "nan") or str(given).strip().lower() in NO_INPUT


def whole_question(question: str, row: dict) -> str:
    """Return a question with the passage that it is about and the options that it offers.

    The passage follows an instruction, and stands before any other question."""
    asked = text(question, row | {"input": ""} if has_no_input(question, row) else row)
    if ABOUT_QUESTIONS.isdisjoint(row):
        return asked
    beside = [key for key in PASSAGES if key != first_key(question)]
    passages = [as_text(key, row) for key in beside if row.get(key) not in (None, "", [])]
    parts = [asked, *passages] if question.startswith("instruction") else [*passages, asked]
    return "\n".join([*parts, *(f"{letter}. {option}" for letter, option in options_of(row))])


def as_text(key: str, row: dict) -> str:
    found = row[key]
    lines = unpacked(found) if isinstance(found, str) and found.startswith('["') else found
    if isinstance(lines, list) and all(isinstance(one, str) for one in lines):
        return "\n".join(lines)
    if not isinstance(found, str):
        raise BadRow(f"{key} is {type(found).__name__}, not text; it belongs to the question")
    return found


def options_of(row: dict) -> list[tuple[str, str]]:
    """Return [(letter, option)] of a question of multiple choice, [] of another. Raise BadRow."""
    key = next((key for key in OPTIONS if row.get(key)), "")
    if not key:
        if not isinstance(row.get("A"), str) or not isinstance(row.get("B"), str):
            return []
        found = {letter: row[letter] for letter in LETTERS if row.get(letter)}
    else:
        found = unpacked(row[key])
    options = lettered(found)
    if options is None or not all(isinstance(letter, str) for letter, _ in options):
        raise BadRow(f"{key} is not a list or object of texts")
    for _, option in options:
        if not isinstance(option, str):
            raise BadRow(f"{key or 'an option'} holds {type(option).__name__}, not text")
    # some texts have their letter already
    return [(letter, without_letter(letter, option)) for letter, option in options]


def lettered(found: object) -> list[tuple[object, object]] | None:
    """Return [(letter, option)] of options in any form, None if they have none."""
    if isinstance(found, dict) and {"text", "label"} <= found.keys():  # ARC
        columns = found["label"], found["text"]
        lists = all(isinstance(column, list) for column in columns)
        return list(zip(*columns, strict=False)) if lists else None
    if isinstance(found, dict):
        return [(letter, option) for letter, option in found.items() if option is not None]
    if listing := listed(found):
        letters = [one.get("key", one.get("label")) for one in listing]
        return list(
            zip(letters, [one.get("value", one.get("text")) for one in listing], strict=True)
        )
    if isinstance(found, list) and len(found) <= len(LETTERS):
        return list(zip(LETTERS, found, strict=False))
    return None


def without_letter(letter: str, option: str) -> str:
    marks = tuple(f"{letter}{mark}" for mark in (".", ")", ":", "\u3001", "\uff0e"))
    return option[len(letter) + 1 :].strip() if option.startswith(marks) else option


def answer_text(answer: str, row: dict) -> str:
    """Return an answer; the number of an option, from 0, is its letter."""
    found = row.get(answer)
    number = isinstance(found, int) or (isinstance(found, str) and found.isdecimal())
    if number and not isinstance(found, bool) and (options := options_of(row)):
        named = any(found in (letter, option) for letter, option in options)
        if not named and 0 <= int(found) < len(options):
            return options[int(found)][0]
    return text(answer, row)


def seed_task(row: dict) -> list[dict]:
    """Return the instruction with its first instance."""
    instances = list_at("instances", row, dict, "objects")
    if not instances:
        raise BadRow("instances is not a list of objects, it is empty")
    return one_turn("instruction,input?", "output", {**row, **instances[0]})


def waits_for_answer(key: str, row: dict) -> bool:
    """Return whether the turns of a row end with a question, so that another key has the answer.

    An answer that is no text, as a number to check, is for a reward and not learned."""
    found = listed(row["messages"]) if isinstance(row[key], str) else None
    return found is not None and turns.ROLES.get(str(turns.name_of(found[-1]))) == "user"


def has_texts_by_turns(row: dict) -> bool:
    """Return whether data is texts, not the rows of a file, or their cells."""
    found = unpacked(row["data"])
    return isinstance(found, list) and all(isinstance(one, str) for one in found)


def has_turns_of_context(row: dict) -> bool:
    """Return whether the context of two answers is the turns before them, not a passage."""
    return is_turns(row["context"])


def first_answer(row: dict) -> list[dict]:
    """Return a question about a passage, and the first of the answers that are right (SQuAD)."""
    found = unpacked(row["answers"])  # CSV has lists as JSON
    answers = [one.get("text") for one in listed(found) or []]
    if not answers and isinstance(found, list):  # of texts
        answers = found
    if not answers or not isinstance(answers[0], str):
        raise BadRow("answers holds no text")
    return one_turn("question", "answer", row | {"answer": answers[0]})


def open_question(question: str, row: dict) -> list[dict]:
    """Return a question without an answer, or with one that is no text, as a number to check."""
    return with_system(asked_turns(question, row), row)


def dialogue_at(key: str, row: dict) -> list[dict]:
    """Return messages from one of Anthropic's dialogues, or from turns."""
    if listed(row[key]) or not isinstance(row[key], str):
        return turns_at(key, row)
    if not turns.HH_TURN.search(row[key]):
        raise BadRow(no_question(key, row))
    return with_system(turns.dialogue_turns(row[key], turns.HH_TURN), row)


def no_question(key: str, row: dict) -> str:
    """Return what to do about a row of two answers, one under `key`, without a known question."""
    texts = [one for one in row if isinstance(row[one], str) and not is_about(one)]
    others = [one for one in texts if one not in ("chosen", "rejected")]
    named = others[0] if len(others) == 1 else "KEY"
    how = f"prepare.py --text_key='question={named}' names it"
    whole = "a dialogue with its question begins with a blank line and Human:"
    return f"{key} is an answer, and no known key has its question ({keys_of(row)}); {how}; {whole}"


def calls_for(row: dict) -> list[dict]:
    """Return a query and the calls that answer it (xLAM)."""
    calls = list_at("answers", row, dict, "calls")
    if not calls:
        raise BadRow("answers is empty: no call")
    said = "\n".join(map(turns.call_text, calls))
    return with_system([message("user", row["query"]), message("assistant", said)], row)


def one_of_a_tree(row: dict) -> list[dict]:
    raise BadRow(
        "one message of a tree (OpenAssistant, flat): give the file of its trees or threads"
    )


# ---- preference pairs ------------------------------------------------------------------------


def two_answers(prompt: str, row: dict) -> Pair:
    """Return the pair of two answers to a text_key, or to the turns under it.

    The prompt is put in front of each, unless the chosen answer repeats it (UltraFeedback)."""
    asked = asked_turns(prompt, row)
    sides = [side for side in ("chosen", "rejected") if isinstance(row[side], str)]
    row = row | {side: without_space(prompt, row[side], row) for side in sides}
    chosen, rejected = answer_turns("chosen", row), answer_turns("rejected", row)
    if not repeats(chosen, asked):
        chosen, rejected = [*asked, *chosen], [*asked, *rejected]
    return two_conversations(with_system(chosen, row), with_system(rejected, row))


def repeats(answer: list[dict], prompt: list[dict]) -> bool:
    """Return whether a conversation that is given as an answer holds its prompt already."""
    whole, asked = turns.said(answer), turns.said(prompt)
    if whole and whole[0][0] == "system" and asked and asked[0][0] != "system":
        whole = whole[1:]
    one = len(asked) == 1 and asked[0][0] == "user"
    return whole[: len(asked)] == asked or (one and asked[0] in whole)


def answer_turns(key: str, row: dict) -> list[dict]:
    """Return an answer given as a text, as a turn, or as a list of turns."""
    value = row[key]
    if found := turns_of_answer(value):
        return read_turns(found)
    if not isinstance(value, str):
        what = "no" if value is None else f"{type(value).__name__}, not an"
        raise BadRow(f"{what} answer under {key!r}")
    return [message("assistant", value)]


def two_conversations(chosen: list[dict], rejected: list[dict]) -> Pair:
    """Return the pair of two conversations that differ in the last answer only."""
    *prompt, good = chosen
    *other, bad = rejected
    if good["role"] != "assistant" or bad["role"] != "assistant" or not prompt:
        raise BadRow("chosen or rejected does not end with a question and its answer")
    if not is_learned(good):
        raise BadRow("the chosen answer is one not to learn from")
    if turns.said(prompt) != turns.said(other):
        raise BadRow("different prompts", "chosen and rejected answer different prompts")
    prompt = [{key: turn[key] for key in turn if key != "learn"} for turn in prompt]
    return Pair(prompt, good["content"], bad["content"])


def two_dialogues(chosen: str, rejected: str, row: dict) -> Pair:
    """Return the pair of two conversations: turns, or Anthropic's dialogues."""
    return two_conversations(dialogue_at(chosen, row), dialogue_at(rejected, row))


def turns_then_worse(row: dict) -> Pair:
    """Return the last turn as the chosen answer."""
    *prompt, chosen = turns_at("messages", row)
    if chosen["role"] != "assistant" or not prompt:
        raise BadRow("messages does not end with a question and the chosen answer")
    return two_conversations([*prompt, chosen], [*prompt, *answer_turns("rejected", row)])


def two_outputs(row: dict) -> Pair:
    outputs = unpacked(row["output"])
    if not isinstance(outputs, list) or len(outputs) != 2:
        hint = "; this is instructions (Alpaca), of kind='chat'" if isinstance(outputs, str) else ""
        raise BadRow(f"output is not a list of a chosen and a rejected answer{hint}")
    sides = {"chosen": outputs[0], "rejected": outputs[1]}
    return two_answers("instruction,input?", row | sides)


def best_and_worst(prompt: str, key: str, answer: str, score: str, row: dict) -> Pair:
    """Return the pair of the answers of the highest and the lowest score, or of the first and the
    last rank. key: of the list of objects that hold them."""
    found = [(as_score(one, score), one.get(answer)) for one in listed(row[key]) or []]
    scored = [(-n if score == "rank" else n, said) for n, said in found if not math.isnan(n)]
    if len(scored) < 2:
        raise BadRow("fewer than two answers with a score")
    worst, best = min(scored, key=lambda one: one[0]), max(scored, key=lambda one: one[0])
    if worst[0] == best[0]:
        raise BadRow("all answers have the same score")
    return two_answers(prompt, row | {"chosen": best[1], "rejected": worst[1]})


def preferred(
    prompt: str, first: str, second: str, wins: Callable[[dict], float], row: dict
) -> Pair:
    """Return the answers under two keys. wins(row): 1 if the first is better, 0 if the second."""
    won = wins(row)
    if won not in (0, 1):
        raise BadRow("neither answer is preferred")
    better, worse = (first, second) if won else (second, first)
    if not prompt:
        return two_dialogues(better, worse, row)
    return two_answers(prompt, row | {"chosen": row[better], "rejected": row[worse]})


def comments(row: dict) -> Pair:
    """Return the comments on a post, the better one first (SHP)."""
    asked = {"prompt": row["history"], "history": None}
    first_wins = partial(as_score, key="labels")
    return preferred("prompt", "human_ref_A", "human_ref_B", first_wins, row | asked)


def second_wins(key: str, row: dict) -> float:
    return 1 - as_score(row, key)


def sign(key: str, row: dict) -> float:
    """Return 1 for a preference below 0, for the first answer, 0 for one above (HelpSteer)."""
    score = as_score(row, key)
    return math.nan if not score or math.isnan(score) else float(score < 0)


def first_or_second(key: str, row: dict) -> float:
    """Return 1 for a preference of 1, for the first answer, 0 for one of 2 (AlpacaFarm)."""
    return 2 - as_score(row, key)


def winner(key: str, row: dict) -> float:
    return {"model_a": 1.0, "model_b": 0.0}.get(str(row[key]), math.nan)


# ---- the formats: the first that fits is taken -----------------------------------------------
# "a,b?" is a text_key (see text_keys.py): the text under a, and below it that under b, if any.


def asked_keys(question: str) -> str:
    """Return the keys that are read for the question of a text_key."""
    return f"{question.replace('?', '')},{ASKED}"


def telling(name: str, question: str, answer: str) -> RowFormat:
    """Return a format of documents that are a question and its answer."""
    read_row = partial(question_and_answer, question, answer)
    return RowFormat(name, f"{first_key(question)},{answer}", read_row, asked_keys(question))


def joining(name: str, text_key: str, keys: str) -> RowFormat:
    """Return a format of documents that are the texts of a text_key."""
    return RowFormat(name, keys, partial(text, text_key), text_key.replace("?", ""))


DOCUMENTS = (
    joining("text", "text", "text"),
    joining("completions", "completion", "completion"),
    RowFormat("encyclopedia pages (Baidu Baike)", "title,sections", encyclopedia, "summary"),
    RowFormat("poems (chinese-poetry)", "author,paragraphs", poem, "title,rhythmic"),
    RowFormat("articles with a source", "data_src,title,content", article, "desc"),
    joining("articles or answers (WuDao, webtext2019zh)", "title?,desc?,content", "title,content"),
    joining("questions (medical CSV)", "title?,ask?,answer", "title,ask,answer"),
    joining("questions (baike_qa)", "title,desc?,answer", "title,answer"),
    telling("questions and answers", "question", "answer"),
    telling("prompts and responses", "prompt", "response"),
    telling("instructions (Zhihu-KOL, Dolly)", "instruction,input?", "response"),
    telling("questions and responses (OpenOrca)", "question", "response"),
    telling("queries and responses (MetaMathQA)", "query", "response"),
    joining("contents", "content", "content"),
    joining("responses", "response", "response"),
)


def asking(name: str, question: str, answer: str, keys: str = "") -> RowFormat:
    """Return a format of rows that hold one question and its answer. keys: if it has others."""
    keys = keys or f"{first_key(question)},{answer}"
    also = f"{asked_keys(question)},{ANSWERED}"
    return RowFormat(name, keys, partial(one_turn, question, answer), also)


def talking(name: str, key: str) -> RowFormat:
    """Return a format of rows that hold turns under a key."""
    return RowFormat(name, key, partial(turns_at, key))


CHATS = (
    *(
        asking("turns and their answer (Dolphin R1, AceMath)", "messages", key)._replace(
            fits=partial(waits_for_answer, key)
        )
        for key in ("response", "completion", "output", "answer")  # the last may be a result alone
    ),
    talking("messages (OpenAI)", "messages"),
    talking("conversations (ShareGPT)", "conversations"),
    talking("conversation (Firefly, WildChat, LMSYS, Capybara)", "conversation"),
    asking("instructions (Alpaca)", "instruction,input?", "output"),
    RowFormat("seed tasks (Alpaca)", "instruction,instances", seed_task, "input,output"),
    asking("instructions (Dolly, Zhihu-KOL)", "instruction,input?", "response"),
    asking("inputs and outputs", "input", "output"),
    asking("instructions and targets", "instruction,input?", "target"),
    asking("tasks (Natural Instructions)", "definition,input?", "target"),
    asking("tasks (Firefly, BBH)", "input", "target"),
    asking("thoughts and contents", "input", "content", "input,reasoning_content,content"),
    asking("prompts and responses", "prompt", "response"),
    asking("prompts and answers", "prompt", "answer"),
    asking("prompts and completions (trl)", "prompt", "completion"),
    asking("questions (medical CSV)", "title?,ask?", "answer", "title,ask,answer"),
    asking("questions and solutions (LIMO)", "question", "solution"),
    asking("questions and answers", "question", "answer"),
    RowFormat("questions on a passage (SQuAD)", "question,context,answers", first_answer, ASKED),
    asking("multiple choice (ARC)", "question", "answerKey", "question,choices,answerKey"),
    asking("questions and responses (OpenOrca)", "question", "response"),
    asking("questions (baike_qa)", "title,desc?", "answer"),
    asking("questions (webtext2019zh)", "title,desc?", "content", "title,desc,content"),
    asking("queries and responses (MetaMathQA)", "query", "response"),
    RowFormat("calls (xLAM)", "query,answers,tools", calls_for),
    asking("queries and answers (CodeFeedback)", "query", "answer"),
    asking("problems and solutions (NuminaMath, MATH)", "problem", "solution"),
    asking("problems and answers", "problem", "answer"),
    asking("contexts and responses (counselling)", "context", "response"),
    talking("contents (Gemini)", "contents"),
    talking("a thread (OpenAssistant)", "thread"),
    RowFormat("a tree (OpenAssistant)", "message_tree_id,prompt", turns.best_thread, "tree_state"),
    RowFormat("one message (OpenAssistant)", "message_id,parent_id,text,role", one_of_a_tree),
    RowFormat("glaive v2", "system,chat", turns.glaive),
    RowFormat("MOSS 002", "meta_instruction,plain_text", turns.moss_text),
    RowFormat("MOSS 003", "meta_instruction,chat", turns.moss_chat),
    talking("texts by turns (UltraChat)", "data")._replace(fits=has_texts_by_turns),
)

HH_CHAT = RowFormat(
    "the better of two dialogues (hh-rlhf)", "chosen,rejected", partial(dialogue_at, "chosen")
)


def alone(question: str) -> RowFormat:
    key = first_key(question)
    return RowFormat(f"{key}s", key, partial(open_question, question), asked_keys(question))


QUESTIONS = (  # without an answer, or with one that is no text
    alone("prompt"),
    alone("instruction,input?"),
    alone("question"),
    alone("problem"),
    alone("input"),
)


def answering(name: str, question: str) -> RowFormat:
    """Return a format of rows that hold a question, under this text_key, and two answers."""
    keys = f"{first_key(question)},chosen,rejected"
    read_row = partial(two_answers, question)
    return RowFormat(f"{name} with two answers", keys, read_row, asked_keys(question))


def conversing(name: str, keys: str) -> RowFormat:
    """Return a format of rows that hold two whole conversations."""
    return RowFormat(f"two {name}", keys, partial(two_dialogues, *keys.split(",")))


def scoring(name: str, keys: str, answer: str, score: str) -> RowFormat:
    """Return a format of rows with a question and a list of answers with scores."""
    return RowFormat(name, keys, partial(best_and_worst, *keys.split(","), answer, score), ASKED)


def better(name: str, keys: str, wins: Callable[[str, dict], float]) -> RowFormat:
    """Return a format of rows with a question, if any, two answers and which of them is better."""
    *prompt, first, second, verdict = keys.split(",")
    read_row = partial(preferred, "".join(prompt), first, second, partial(wins, verdict))
    return RowFormat(f"the better of two {name}", keys, read_row, ASKED)


PAIRS = (
    answering("turns", "conversations"),
    answering("tasks", "instruction,input?"),
    answering("prompts", "prompt"),
    answering("questions", "question"),
    answering("inputs", "input"),
    answering("turns (UltraInteract)", "trajectory"),
    answering("messages", "messages"),
    answering("contexts (ColossalAI)", "context")._replace(fits=has_turns_of_context),
    conversing("threads (ms-swift)", "messages,rejected_messages"),
    RowFormat("messages with a worse answer (ms-swift)", "messages,rejected", turns_then_worse),
    conversing("dialogues (UltraFeedback, hh-rlhf)", "chosen,rejected"),
    scoring("ranked answers (Nectar)", "prompt,answers", "answer", "rank"),
    scoring("ranked answers (NeMo RL)", "context,completions", "completion", "rank"),
    scoring("rated answers (StackExchange)", "question,answers", "text", "pm_score"),
    scoring(
        "rated answers (UltraFeedback, raw)",
        "instruction,completions",
        "response",
        "fine-grained_score",
    ),
    better(
        "responses (PKU-SafeRLHF)", "prompt,response_0,response_1,better_response_id", second_wins
    ),
    better("responses (HelpSteer2)", "prompt,response_1,response_2,preference_strength", sign),
    better("responses (HelpSteer3)", "context,response1,response2,overall_preference", sign),
    RowFormat(
        "the better of two comments (SHP)", "history,human_ref_A,human_ref_B,labels", comments
    ),
    better("outputs (AlpacaFarm)", "instruction,output_1,output_2,preference", first_or_second),
    better("conversations (arena)", "conversation_a,conversation_b,winner", winner),
    RowFormat("instructions with two outputs", "instruction,output", two_outputs, f"input,{ASKED}"),
)

FORMATS = {"text": DOCUMENTS, "chat": CHATS, "question": QUESTIONS, "preference": PAIRS}
# What documents are made of, and what shows that rows are of another kind; a table's other columns
# need not be read.
COLUMNS = {key for kind in FORMATS.values() for known in kind for key in known.keys.split(",")}
COLUMNS |= {key for known in DOCUMENTS for key in known.also.split(",") if key}
COLUMNS |= {*OTHER_NAMES, *ANSWER_NAMES}
