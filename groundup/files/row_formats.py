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
    UselessRow,
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
    usual_names,
    with_system,
)


class RowFormat(NamedTuple):
    name: str  # for people
    keys: str  # a row that has all of these has this format
    read: Callable[[dict], str | list[dict] | Pair]
    also: str = ""  # keys that are read, too, where a row has them
    fits: Callable[[dict], bool] = lambda row: True  # what else is true of a row of this format


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
    # a chat first: the better side of a pair of dialogues (hh-rlhf) is one, and enough
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


def read_pair(row: object) -> Pair:
    """Return the pair of a row. Raise UselessRow or another BadRow."""
    pair = read(row, "preference")
    check_media(pair.prompt, row)
    if is_blank(pair.chosen) or is_blank(pair.rejected):
        raise UselessRow("empty answer")
    if are_equal(pair.chosen, pair.rejected):
        raise UselessRow("equal answers", "chosen and rejected are the same")
    return pair


# ---- which format ----------------------------------------------------------------------------


def read(row: object, kind: str) -> str | list[dict] | Pair:
    """Return what a row holds. Raise BadRow."""
    original = as_object(row)
    row, found = with_format(original, kind)  # row: under the usual names of its keys
    # A pair with an empty side is found under its keys all the same. Say which side it is, before
    # the reader complains of something less plain.
    if kind == "preference" and not (found and has_all(row, found)):
        refuse_one_side(row, original)
    if found:
        try:
            return found.read(row)
        except RecursionError:  # a field may hold JSON within JSON
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
    for side, missing in (("chosen", "rejected"), ("rejected", "chosen")):
        if row.get(side) and not row.get(missing):
            # "" is an answer of a model that said nothing: one to count, as in read_pair.
            if row.get(missing) == "":
                raise UselessRow("empty answer")
            raise BadRow(f"a {side} answer but none under {missing!r} ({keys_of(original)})")


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
    # Is it made for another stage?
    listing = listed(row.get("completions"))
    if kind == "preference" and listing and "text" in listing[0]:
        how = "prepare.py --pair_by=dataset or reward makes pairs of them"
        return f"; these are answers of sample.py: {how}"
    if "completions" in row and "labels" in row:
        return "; these are steps with labels (trl's stepwise), from which no stage here learns"
    if kind == "preference" and label_of(row) is not None and recognise(row, "chat"):
        return "; this is an answer with a label: dpo.py --loss=kto learns from it"
    # Is it of another kind?
    kinds = ("chat", "text", "preference")  # chats first: many are known as text too
    other = next((one for one in kinds if one != kind and recognise(row, one)), "")
    hint = f"; this is {recognise(row, other).name}, of kind={other!r}" if other else ""
    # Does it hold a list under a key that nobody knows?
    within = hint_of_list(row, kind, bool(other))
    if kind == "text":
        return hint + within or "; prepare.py --text_key=KEY reads other names"
    if within or other in ("chat", "preference"):
        return within or hint
    answers = "answer=KEY" if kind == "chat" else "chosen=KEY,rejected=KEY"
    return f"{hint}; prepare.py --text_key='question=KEY,{answers}' reads other names"


def hint_of_list(row: dict, kind: str, is_other: bool) -> str:
    """Return what to do about the first list in a row of no known format, "" if nothing helps.

    is_other: the row is of another kind, so the list needs no guess."""
    lists = (key for key, value in row.items() if turns.is_thread(value))
    thread = next((key for key in lists if key not in OPTIONS), "")
    if not thread:
        return ""
    found = listed(row[thread])  # None: a list of texts
    is_list = found and isinstance(row[thread], list) and not turns.exchange_keys(found)
    if is_list and not (kind == "text" and is_other) and recognise(found[0], kind):
        return f"; {thread!r} holds rows: give a file of that list alone"
    if kind == "text":
        told = (key for key in turns.CONTENT_KEYS if found and isinstance(found[0].get(key), str))
        content = next(told, "")
        return f"; text_key={thread}.{content} makes text of it" if content else ""
    if kind != "chat" or is_other:
        return ""
    # Objects may be turns if two of their keys can be role and content. Texts may be turns if no
    # other text of the row could be what is meant.
    names = turns.naming(found) if found else ""
    others = [value for key, value in row.items() if key != thread and isinstance(value, str)]
    if "KEY" in names or (not found and any(others)):
        return ""
    setting = ",".join(filter(None, (f"messages={thread}", names)))
    return f"; prepare.py --text_key='{setting}' reads {thread} as turns, if they are turns"


def known_keys(kind: str) -> list[str]:
    """Return the keys of each format of a kind, each once."""
    return list(dict.fromkeys(known.keys for known in FORMATS[kind]))


@lru_cache(maxsize=64)  # the rows of a file have the same keys
def nearest_keys(keys: tuple[str, ...], kind: str) -> str:
    """Return the keys of the three formats that are most like those of a row, for people.

    Names are compared by their pairs of letters, so "quetsion" is still like "question"."""
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


MEDIA = ("image", "images", "video", "videos", "audio", "audios")


def check_media(messages: list[dict], row: dict | list) -> list[dict]:
    """Return the messages. Raise BadRow if the row has a picture, video or sound beside them."""
    for key in MEDIA if isinstance(row, dict) else ():
        if key in row and has_content(row[key]):
            raise BadRow(f"a turn holds an {key.removesuffix('s')} ({key}), not only text")
    return messages


def recognise(row: object, kind: str) -> RowFormat | None:
    """Return the format of a row, None if it has none."""
    return with_format(row, kind)[1] if isinstance(row, dict) else None


def with_format(row: dict, kind: str) -> tuple[dict, RowFormat | None]:
    """Return a row under the most common names of its keys, and its format. A rarer name of an
    answer counts where there is no other answer."""
    row = rename(row)
    found = format_of(row, kind)
    if not (found and has_all(row, found)):
        # "generation" is the answer in some sets, and in others a note beside the response.
        other = rename(row, answers=True)
        better = format_of(other, kind)
        if not found or (better and has_all(other, better)):
            return other, better
    return row, found


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
        if has_all(row, one) and one.fits(row):
            return one
    return next((one for one in known if one.fits(row)), None)


@lru_cache(maxsize=64)  # the rows of a file have the same keys
def formats_with(keys: tuple[str, ...], kind: str) -> list[RowFormat]:
    return [known for known in FORMATS[kind] if set(known.keys.split(",")).issubset(keys)]


def has_all(row: dict, known: RowFormat) -> bool:
    """Return whether a row has a value under each key of a format; "[]" is no turns in CSV."""
    for key in known.keys.split(","):  # all() takes three times as long
        value = row.get(key)
        if value in NO_VALUE or (value == "[]" and key in THREADS):
            return False
    return True


NO_VALUE = (None, "", [])


def rename(row: dict, answers: bool = False) -> dict:
    """Return a row under the usual names of its keys, or of its answers, if they are other ones."""
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


# Each of these means one thing wherever it stands, so it is renamed before anything else.
OTHER_NAMES = usual_names(
    # MedicalGPT, CValues, StackExchange, When2Call, OpenAI, Vezora, torchtune
    chosen="response_chosen pos_resp response_j chosen_response preferred_output accepted "
    "chosen_conversations",
    rejected="reject rejected_response response_rejected neg_resp response_k non_preferred_output "
    "rejected_conversations",
    input="inputs",  # Aya, FLAN, xP3
    reasoning_content="Complex_CoT",  # medical-o1
)
# These are answers only in a row that has no other, see `with_format`.
ANSWER_NAMES = usual_names(
    output="targets",  # Aya, FLAN, xP3
    response="generation",  # distilabel
    solution="generated_solution",  # OpenMathInstruct
)


# ---- keys that no reader asked for -----------------------------------------------------------

MOST_UNREAD = 12  # keys that are named
# Names of what is about a row and no part of what it says; so are names that end in _id.
# pandas writes the numbers of rows under "", and reads them as "Unnamed: 0".
ABOUT = {"", "id", "uuid", "index", "source", "url", "made_by"}


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
    given = {"messages": row} if isinstance(row, list) else row
    for kind in kinds if isinstance(given, dict) else ():
        row, found = with_format(given, kind)
        if found:
            break
    else:  # no format: the row is counted as unusable, and its keys are shown there
        return []
    known, others, lists = keys_read(found, kind, tuple(row))
    threads = {key: listing for key in lists if (listing := listed(row[key]))}
    left = [key for key in others if has_content(row[key])]
    # false is no content, but "train": false may mean that the row is not to be learned
    left += [key for key in others if row[key] is False and OF_FLAGS.search(key)]
    left += [key for key in others if kind == "chat" and says_bad(key, row[key])]
    if left:  # Is it said elsewhere? Many sets have the question again under another key.
        seen = [row[key] for key in known]
        for listing in threads.values():
            seen += [turn.get(name) for turn in listing for name in turns.CONTENT_KEYS]
        left = [key for key in left if row[key] not in seen]
    for key, listing in threads.items():
        left += unread_of_turns(key, listing)
    if left and row is not given:  # show the names that keys have in the file
        own = dict(zip(row, given, strict=True))
        left = [own.get(key, key) for key in left]
    # These three are read, but not whatever they hold.
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
    return name in ABOUT or name.endswith("_id") or name.startswith("unnamed: ")


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
        for name in turn.keys() - known:
            value = turn[name]
            # What may be a flag is named even if it is a number: without it a model would be
            # trained on an answer that the row says not to learn from.
            is_flag = (value is not None and OF_FLAGS.search(name)) or says_bad(name, value)
            is_obeyed = name in WEIGHTS and not math.isnan(as_number(value))
            if not is_obeyed and (is_flag or (not is_about(name) and has_content(value))):
                found[name] = None
    return [f"{key}.{name}" for name in found]


# in the name of a key of a turn that may say whether to learn from it, whatever it holds
OF_FLAGS = re.compile("loss|train|learn|mask|weight", re.IGNORECASE)

# keys that say whether an answer is a good one
VERDICT = re.compile("(is_)?(correct|safe|valid|passed|accepted|resolved|verified)", re.IGNORECASE)


def says_bad(key: str, value: object) -> bool:
    """Return whether a key says that an answer is wrong or unsafe (OpenMathInstruct, BeaverTails).

    Nobody said that such an answer is not to be learned, so the key is only named."""
    return type(value) in (bool, int) and not value and VERDICT.fullmatch(key) is not None


def has_content(value: object) -> bool:
    """Return whether a value may be a part of what a row says. Numbers count, rate and identify."""
    if isinstance(value, str):
        return bool(value.strip()) and value not in turns.NOTHING
    return not isinstance(value, bool | int | float) and value not in (None, [], {})


# Keys that may hold turns, so that the keys of these are looked at as well.
TURN_LISTS = (*THREADS, "prompt", "completion", "chosen", "rejected", "rejected_messages")
TURN_LISTS += ("conversation_a", "conversation_b")
# Keys that are read of any format of a kind.
BESIDE = {"text": "", "preference": "completions,difficulty,score,margin,@answers"}
BESIDE["chat"] = ",".join((*turns.SYSTEM_KEYS, *turns.TOOL_KEYS, *KTO_LABELS, *ROW_WEIGHTS, *MEDIA))
BESIDE["chat"] += ",chat_template_kwargs"
BESIDE["question"] = BESIDE["chat"]
BESIDE["preference"] += "," + BESIDE["chat"]


# ---- texts -----------------------------------------------------------------------------------
# From here on functions read a row of one format, or a part of one. A row has all keys of its
# format, so these are row[key]; row.get(key) is for what some rows have beside them.


def list_at(key: str, row: dict, item: type, what: str) -> list:
    """Return the list under a key, also as JSON. Raise BadRow if its items are of another type."""
    found = unpacked(row[key])
    if not isinstance(found, list) or not all(isinstance(one, item) for one in found):
        raise BadRow(f"{key} is not a list of {what}")
    return found


def encyclopedia(row: dict) -> str:
    """Return title, summary, then every section with its heading."""
    sections = list_at("sections", row, dict, "objects")
    texts = [text("title?,content?", section) for section in sections]  # some are a heading alone
    return "\n".join(filter(None, [text("title?,summary?", row), *texts]))


def article(row: dict) -> str:
    # The description begins where the title ends, so the two are one line.
    return "\n".join(filter(None, [text("title?", row) + text("desc?", row), text("content", row)]))


def poem(row: dict) -> str:
    lines = list_at("paragraphs", row, str, "texts")
    return "\n".join([text("title?,rhythmic?,author?", row), *lines]).strip("\n")


def question_and_answer(question_key: str, answer_key: str, row: dict) -> str:
    """Return a question with what belongs to it, and its answer, as one text."""
    return "\n".join([whole_question(question_key, row), answer_text(answer_key, row)])


# ---- a question and its answer ---------------------------------------------------------------

# A row may have more than two texts: a passage that the question is about, options to choose from,
# earlier turns. They become part of the question, for without them nobody could answer it.
PASSAGES = ("context", "article", "passage")
LETTERS = "ABCDEFGHIJ"
OPTIONS = ("options", "choices")  # of multiple choice; or the letters are keys of the row

ASKED = "history,context,article,passage,options,choices,A,B,C,D,E,F,G,H,I,J"  # by questions
ANSWERED = ",".join(turns.THOUGHT_KEYS)  # by answers


def one_turn(question_key: str, answer_key: str, row: dict) -> list[dict]:
    """Return a question and its answer, from two text_keys, or from turns under their keys."""
    asked = asked_turns(question_key, row)
    if found := turns_of_answer(row.get(answer_key)):
        return with_system([*asked, *read_turns(found)], row)
    said = without_space(question_key, answer_text(answer_key, row), row)
    said = turns.with_thoughts("\n".join(turns.thoughts_of(row)), said)
    return with_system([*asked, message("assistant", said)], row)


def asked_turns(question_key: str, row: dict) -> list[dict]:
    """Return the turns under the first key of a text_key, or its text after the history.

    In trl's sets "prompt" is either, so the value decides and not the key."""
    value = row[first_key(question_key)]
    if isinstance(value, str) and value.startswith('{"messages"'):
        value = unpacked(value)
    if isinstance(value, dict) and "messages" in value:  # OpenAI's preference tuning
        return turns_at("messages", value)
    if is_turns(value):
        return read_turns(value)
    return [*history(row), *turns.question_turns(whole_question(question_key, row))]


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
        found = [found]  # one turn
    found = listed(found)
    if not found or not isinstance(value, str):
        return found
    # A text that can be parsed: is it a conversation in a cell of CSV, or an answer that is JSON?
    roles = [turns.ROLES.get(str(turns.name_of(one))) for one in found]
    return found if all(roles) and roles[-1] == "assistant" else None


def without_space(question_key: str, said: str, row: dict) -> str:
    """Return what is said without the space before it, if the question is an open dialogue.

    That is a text such as "...Assistant:". In the answer " Yes" the space follows the colon."""
    is_text = said.startswith(" ") and isinstance(row[first_key(question_key)], str)
    opened = is_text and turns.OPEN_DIALOGUE.fullmatch(text(question_key, row))
    return said.removeprefix(" ") if opened else said


def history(row: dict) -> list[dict]:
    """Return the turns of history: [[question, answer], ...], or a list of turns."""
    if not row.get("history"):
        return []
    if listed(row["history"]):
        return read_turns(row["history"])
    # as LLaMA-Factory and ChatGLM have it
    pairs = list_at("history", row, list, "[question, answer]")
    if any(len(pair) != 2 for pair in pairs):
        raise BadRow("history is not a list of [question, answer]")
    roles = ("user", "assistant")
    return [message(role, said) for pair in pairs for role, said in zip(roles, pair, strict=True)]


# How sets that were made as Alpaca's say that an instruction has no input, in any capitals; the
# Chinese are wu, mei you, wu shu ru, mei you shu ru. pandas writes None and nan.
NO_INPUT = ("<noinput>", "<no input>", "noinput", "no input")
NO_INPUT += ("\u65e0", "\u6ca1\u6709", "\u65e0\u8f93\u5165", "\u6ca1\u6709\u8f93\u5165")


def has_no_input(question_key: str, row: dict) -> bool:
    """Return whether the input beside an instruction only says that there is none."""
    given = row.get("input") if question_key.startswith("instruction") else None
    return given in ("None", "nan") or str(given).strip().lower() in NO_INPUT


def whole_question(question_key: str, row: dict) -> str:
    """Return a question with the passage that it is about and the options that it offers.

    The passage follows an instruction, and stands before any other question."""
    asked = text(question_key, row | {"input": ""} if has_no_input(question_key, row) else row)
    beside = [key for key in PASSAGES if key != first_key(question_key)]
    passages = [as_text(key, row) for key in beside if row.get(key) not in NO_VALUE]
    parts = [asked, *passages] if question_key.startswith("instruction") else [*passages, asked]
    return "\n".join([*parts, *(f"{letter}. {option}" for letter, option in options_of(row))])


def as_text(key: str, row: dict) -> str:
    """Return the passage under a key, which may be a list of paragraphs. Raise BadRow."""
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
    if not key:  # a column for each option, as in C-Eval; a column A alone may be anything
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
    # Some options begin with their letter, as in "A. Paris": it would stand there twice.
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
        return [
            (one.get("key", one.get("label")), one.get("value", one.get("text"))) for one in listing
        ]
    if isinstance(found, list) and len(found) <= len(LETTERS):
        return list(zip(LETTERS, found, strict=False))
    return None


def without_letter(letter: str, option: str) -> str:
    marks = tuple(f"{letter}{mark}" for mark in (".", ")", ":", "\u3001", "\uff0e"))
    return option[len(letter) + 1 :].strip() if option.startswith(marks) else option


def answer_text(answer_key: str, row: dict) -> str:
    """Return an answer. The number of an option, from 0, becomes its letter, unless the options are
    numbers or are numbered."""
    found = row.get(answer_key)
    number = isinstance(found, int) or (isinstance(found, str) and found.isdecimal())
    if number and not isinstance(found, bool) and (options := options_of(row)):
        named = any(found in (letter, option) for letter, option in options)
        if not named and 0 <= int(found) < len(options):
            return options[int(found)][0]
    return text(answer_key, row)


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


def first_answer(row: dict) -> list[dict]:
    """Return a question about a passage, and the first of the answers that are right (SQuAD)."""
    found = unpacked(row["answers"])  # CSV has lists as JSON
    answers = [one.get("text") for one in listed(found) or []]
    if not answers and isinstance(found, list):  # of texts
        answers = found
    if not answers or not isinstance(answers[0], str):
        raise BadRow("answers holds no text")
    return one_turn("question", "answer", row | {"answer": answers[0]})


def open_question(question_key: str, row: dict) -> list[dict]:
    """Return a question without an answer, or with one that is no text, as a number to check."""
    return with_system(asked_turns(question_key, row), row)


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


def two_answers(prompt_key: str, row: dict) -> Pair:
    """Return the pair of two answers to the text of a text_key, or to the turns under it.

    The prompt is put in front of each, unless the chosen answer repeats it."""
    asked = asked_turns(prompt_key, row)
    sides = [side for side in ("chosen", "rejected") if isinstance(row[side], str)]
    row = row | {side: without_space(prompt_key, row[side], row) for side in sides}
    chosen, rejected = answer_turns("chosen", row), answer_turns("rejected", row)
    # UltraFeedback has the prompt by itself, and once more in each side.
    if not repeats(chosen, asked):
        chosen, rejected = [*asked, *chosen], [*asked, *rejected]
    return two_conversations(with_system(chosen, row), with_system(rejected, row))


def repeats(answer: list[dict], prompt: list[dict]) -> bool:
    """Return whether a conversation that is given as an answer holds its prompt already."""
    whole, asked = turns.said(answer), turns.said(prompt)
    # The system prompt may stand in the answers alone.
    if whole and whole[0][0] == "system" and asked and asked[0][0] != "system":
        whole = whole[1:]
    # A prompt of one question may be any question of the whole, such as its last.
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
        raise UselessRow("different prompts", "chosen and rejected answer different prompts")
    # Only the last answers are compared, so flags of earlier turns decide nothing.
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
    return two_answers("instruction,input?", row | {"chosen": outputs[0], "rejected": outputs[1]})


def best_and_worst(prompt_key: str, key: str, answer_key: str, score: str, row: dict) -> Pair:
    """Return the pair of the answers of the highest and the lowest score, or of the first and the
    last rank. key: of the list of objects that hold them."""
    found = [(as_score(one, score), one.get(answer_key)) for one in listed(row[key]) or []]
    # rank 1 is the best, but score 1 the worst
    scored = [(-n if score == "rank" else n, said) for n, said in found if not math.isnan(n)]
    if len(scored) < 2:
        raise BadRow("fewer than two answers with a score")
    worst, best = min(scored, key=lambda one: one[0]), max(scored, key=lambda one: one[0])
    if worst[0] == best[0]:
        raise BadRow("all answers have the same score")
    return two_answers(prompt_key, row | {"chosen": best[1], "rejected": worst[1]})


def preferred(
    prompt_key: str, first: str, second: str, verdict: str, says: tuple, row: dict
) -> Pair:
    """Return the pair of the answers under two keys; the verdict's key tells which is better.

    says: what stands there if the first is, and if the second is; or BY_SIGN."""
    score = as_score(row, verdict)
    if says is BY_SIGN:  # how much better; 0 and nan stay without a winner
        score = (score > 0) - (score < 0)
    said = str(row[verdict]) if math.isnan(score) else score
    if said not in says:
        raise BadRow("neither answer is preferred")
    better, worse = (first, second) if said == says[0] else (second, first)
    if not prompt_key:
        return two_dialogues(better, worse, row)
    return two_answers(prompt_key, row | {"chosen": row[better], "rejected": row[worse]})


def comments(row: dict) -> Pair:
    """Return the comments on a post, the better one first (SHP)."""
    # Here "history" is the post itself; elsewhere it is turns before the question.
    asked = {"prompt": row["history"], "history": None}
    return preferred("prompt", "human_ref_A", "human_ref_B", "labels", (1, 0), row | asked)


BY_SIGN = (-1, 1)  # HelpSteer's preference: -3 .. 3, below 0 for the first


# ---- the formats: the first that fits is taken -----------------------------------------------
# "a,b?" is a text_key (see text_keys.py): the text under a, and below it that under b, if any.


def asked_keys(question_key: str) -> str:
    """Return the keys that are read for the question of a text_key."""
    return f"{question_key.replace('?', '')},{ASKED}"


# The makers of formats below get the text_keys and derive from them which keys a row must have.
def telling(name: str, question_key: str, answer_key: str) -> RowFormat:
    """Return a format of documents that are a question and its answer."""
    read_row = partial(question_and_answer, question_key, answer_key)
    return RowFormat(
        name, f"{first_key(question_key)},{answer_key}", read_row, asked_keys(question_key)
    )


def joining(name: str, text_key: str, keys: str) -> RowFormat:
    """Return a format of documents that are the texts of a text_key."""
    return RowFormat(name, keys, partial(text, text_key), text_key.replace("?", ""))


DOCUMENTS = (
    joining("text", "text", "text"),
    joining("completions", "completion", "completion"),
    # several keys that are one text
    RowFormat("encyclopedia pages (Baidu Baike)", "title,sections", encyclopedia, "summary"),
    RowFormat("poems (chinese-poetry)", "author,paragraphs", poem, "title,rhythmic"),
    RowFormat("articles with a source", "data_src,title,content", article, "desc"),
    joining("articles or answers (WuDao, webtext2019zh)", "title?,desc?,content", "title,content"),
    joining("questions (medical CSV)", "title?,ask?,answer", "title,ask,answer"),
    joining("questions (baike_qa)", "title,desc?,answer", "title,answer"),
    # a question and its answer, which are as good a text as any
    telling("questions and answers", "question", "answer"),
    telling("prompts and responses", "prompt", "response"),
    telling("instructions (Zhihu-KOL, Dolly)", "instruction,input?", "response"),
    telling("questions and responses (OpenOrca)", "question", "response"),
    telling("queries and responses (MetaMathQA)", "query", "response"),
    # last, for rows of the formats above have these keys, too
    joining("contents", "content", "content"),
    joining("responses", "response", "response"),
)


def asking(name: str, question_key: str, answer_key: str, keys: str = "") -> RowFormat:
    """Return a format of rows that hold one question and its answer. keys: if it has others."""
    keys = keys or f"{first_key(question_key)},{answer_key}"
    also = f"{asked_keys(question_key)},{ANSWERED}"
    return RowFormat(name, keys, partial(one_turn, question_key, answer_key), also)


def talking(name: str, key: str) -> RowFormat:
    """Return a format of rows that hold turns under a key."""
    return RowFormat(name, key, partial(turns_at, key))


CHATS = (
    # the last turn is the question, and another key has its answer
    *(
        asking("turns and their answer (Dolphin R1, AceMath)", "messages", key)._replace(
            fits=partial(waits_for_answer, key)
        )
        for key in ("response", "completion", "output", "answer")  # the last may be a result alone
    ),
    # turns: [{"role": "user", "content": ...}, ...], or under other names, see turns.py
    talking("messages (OpenAI)", "messages"),
    talking("conversations (ShareGPT)", "conversations"),
    talking("conversation (Firefly, WildChat, LMSYS, Capybara)", "conversation"),
    # one question and its answer
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
    # conversations under keys and in forms of their own
    talking("contents (Gemini)", "contents"),
    talking("a thread (OpenAssistant)", "thread"),
    RowFormat("a tree (OpenAssistant)", "message_tree_id,prompt", turns.best_thread, "tree_state"),
    RowFormat("one message (OpenAssistant)", "message_id,parent_id,text,role", one_of_a_tree),
    RowFormat("glaive v2", "system,chat", turns.glaive),
    RowFormat("MOSS 002", "meta_instruction,plain_text", turns.moss_text),
    RowFormat("MOSS 003", "meta_instruction,chat", turns.moss_chat),
    talking("texts by turns (UltraChat)", "data")._replace(fits=has_texts_by_turns),
)

# Not in the table, for such a row is a pair first; see `format_of`.
HH_CHAT = RowFormat(
    "the better of two dialogues (hh-rlhf)", "chosen,rejected", partial(dialogue_at, "chosen")
)


def alone(question_key: str) -> RowFormat:
    """Return a format of rows whose question has no answer, or one that is no text."""
    key = first_key(question_key)
    return RowFormat(f"{key}s", key, partial(open_question, question_key), asked_keys(question_key))


QUESTIONS = tuple(map(alone, ("prompt", "instruction,input?", "question", "problem", "input")))


def answering(name: str, question_key: str) -> RowFormat:
    """Return a format of rows that hold a question, under this text_key, and two answers."""
    keys = f"{first_key(question_key)},chosen,rejected"
    read_row = partial(two_answers, question_key)
    return RowFormat(f"{name} with two answers", keys, read_row, asked_keys(question_key))


def conversing(name: str, keys: str) -> RowFormat:
    """Return a format of rows that hold two whole conversations."""
    return RowFormat(f"two {name}", keys, partial(two_dialogues, *keys.split(",")))


def scoring(name: str, keys: str, answer_key: str, score: str) -> RowFormat:
    """Return a format of rows with a question and a list of answers with scores."""
    _, key = keys.split(",")
    read_row = partial(best_and_worst, *keys.split(","), answer_key, score)
    return RowFormat(name, keys, read_row, ASKED, fits=lambda row: listed(row[key]) is not None)


def better(name: str, keys: str, says: tuple) -> RowFormat:
    """Return a format of rows with a question, if any, two answers and which of them is better."""
    *prompt, first, second, verdict = keys.split(",")
    read_row = partial(preferred, "".join(prompt), first, second, verdict, says)
    return RowFormat(f"the better of two {name}", keys, read_row, ASKED)


PAIRS = (
    # a question, and under "chosen" and "rejected" its answers
    answering("turns", "conversations"),
    answering("tasks", "instruction,input?"),
    answering("prompts", "prompt"),
    answering("questions", "question"),
    answering("inputs", "input"),
    answering("turns (UltraInteract)", "trajectory"),
    answering("messages", "messages"),
    # a context of turns; a passage would need a question beside it
    answering("contexts (ColossalAI)", "context")._replace(
        fits=lambda row: is_turns(row["context"])
    ),
    # whole conversations that differ in the last answer
    conversing("threads (ms-swift)", "messages,rejected_messages"),
    RowFormat("messages with a worse answer (ms-swift)", "messages,rejected", turns_then_worse),
    conversing("dialogues (UltraFeedback, hh-rlhf)", "chosen,rejected"),
    # several answers with a number each
    scoring("ranked answers (Nectar)", "prompt,answers", "answer", "rank"),
    scoring("ranked answers (NeMo RL)", "context,completions", "completion", "rank"),
    scoring("rated answers (StackExchange)", "question,answers", "text", "pm_score"),
    scoring(
        "rated answers (UltraFeedback, raw)",
        "instruction,completions",
        "response",
        "fine-grained_score",
    ),
    # two answers, and a verdict
    better("responses (PKU-SafeRLHF)", "prompt,response_0,response_1,better_response_id", (0, 1)),
    better("responses (HelpSteer2)", "prompt,response_1,response_2,preference_strength", BY_SIGN),
    better("responses (HelpSteer3)", "context,response1,response2,overall_preference", BY_SIGN),
    RowFormat(
        "the better of two comments (SHP)", "history,human_ref_A,human_ref_B,labels", comments
    ),
    better("outputs (AlpacaFarm)", "instruction,output_1,output_2,preference", (1, 2)),
    better("conversations (arena)", "conversation_a,conversation_b,winner", ("model_a", "model_b")),
    # a list of the better answer and the worse
    RowFormat("instructions with two outputs", "instruction,output", two_outputs, f"input,{ASKED}"),
)

FORMATS = {"text": DOCUMENTS, "chat": CHATS, "question": QUESTIONS, "preference": PAIRS}
# What documents are made of, and what shows that rows are of another kind; a table's other columns
# need not be read.
COLUMNS = {key for kind in FORMATS.values() for known in kind for key in known.keys.split(",")}
COLUMNS |= {key for known in DOCUMENTS for key in known.also.split(",") if key}
COLUMNS |= {*OTHER_NAMES, *ANSWER_NAMES}
