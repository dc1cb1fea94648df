"""Thoughts and calls of tools in the text of an answer, in the forms that public models write.

    Hermes, Qwen, ours   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    Mistral              [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]
                         [TOOL_CALLS]add{"a": 1}
    DeepSeek             its own special characters around a name and {"a": 1}
    Llama 3.1            {"name": "add", "parameters": {"a": 1}}, <function=add>{"a": 1}</function>
    Llama 3.2            [add(a=1)]

They are those of the models that model.py computes. A form without a mark is a call only as the
whole answer. What cannot be read stays text, as does a call that gives an argument twice.

Both functions take all the text so far: what they return only grows with it, so a stream sends what
is new of it.
"""

import ast
import json
import re
import secrets
import warnings

from groundup.files.untrusted import mended
from groundup.generate.engine import n_begun
from groundup.tokens.templates import CALL_ID

# ---- the text of an answer is divided ------------------------------------------------------------


THINK, THINK_END = "<think>", "</think>"  # around the thoughts before an answer
DEEPSEEK = "<\uff5ctool\u2581{}\uff5c>"
DEEPSEEK_MARKS = ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
CALLS_BEGIN, CALL_BEGIN, SEP, CALL_END, CALLS_END = map(DEEPSEEK.format, DEEPSEEK_MARKS)
MARKS = ("<tool_call>", "[TOOL_CALLS]", "<function=", CALLS_BEGIN)  # that begin calls
# That stand within a call: Mistral's between a name and its arguments, DeepSeek's
INNER_MARKS = ("[CALL_ID]", "[ARGS]", CALL_BEGIN, SEP, CALL_END, CALLS_END)
MARK = re.compile("|".join(map(re.escape, MARKS)))
CLOSE = re.compile(rf"\s*(?:</tool_call>|{CALLS_END})?\s*")
SPACE = re.compile(r"\s*")


def divide_thoughts(text: str, opened: bool, last: bool) -> tuple[str, str]:
    """Return (the thoughts at the beginning of an answer, what is said behind them).

    opened: whether the prompt ends with <think>, which the answer then lacks. last: whether the
    text has ended."""
    if not opened:
        begin = text.lstrip()
        if not last and THINK.startswith(begin):  # it may become <think>
            return "", ""
        if not begin.startswith(THINK):
            return "", text
        text = begin.removeprefix(THINK)
    thoughts, close, said = text.partition(THINK_END)
    if not close and not last:  # a beginning of </think> is held back
        thoughts = thoughts[: len(thoughts) - n_begun(THINK_END, thoughts)]
    return thoughts, said.lstrip("\n")


def divide_calls(text: str, last: bool) -> tuple[str, list[dict]]:
    """Return (what is said, the calls); calls come with the last piece of the text only.

    A call that cannot be read makes all of the text what is said."""
    # Forms without a mark are calls only as the whole answer.
    first = text.lstrip()
    may_be_bare = first[:1] in ("", "{", "[")
    if not last:
        if may_be_bare:
            return "", []
        found = [at for mark in MARKS if (at := text.find(mark)) >= 0]
        cut = min(found, default=len(text) - max(n_begun(mark, text) for mark in MARKS))
        return text[:cut].rstrip(), []  # before a call no space is said
    is_bare = may_be_bare and not MARK.match(first)
    begin = SPACE.match(text) if is_bare else MARK.search(text)
    said, calls, end = "", [], 0
    while begin:
        try:
            found, after = calls_at(text, begin, "" if is_bare else begin[0])
        except (ValueError, RecursionError):
            found = []
        if not found:
            return text, []
        said += text[end : begin.start()]
        calls += found
        # Marks that close a call are no text, even of another form.
        end = CLOSE.match(text, after).end()
        begin = None if is_bare else MARK.search(text, end)
    rest = text[end:]
    if not calls or is_bare and rest:
        return text, []
    return said + rest if rest else said.rstrip(), calls


def calls_at(text: str, begin: re.Match, mark: str) -> tuple[list[dict], int]:
    """Return (the calls that stand there in a text, where they end), ([], ...) = no calls do.

    begin: where the mark was found; mark "" = the whole answer. Raise ValueError or RecursionError
    if they cannot be read."""
    if not mark and PYTHON.match(text):
        return python_calls(text), len(text)
    calls, end = [], begin.start()
    if mark in NAMED:
        calls, end = named_calls(text, end, *NAMED[mark])
    return (calls, end) if calls else json_calls(text, begin.end(), mark)


def call_of(found: dict) -> dict:
    """Return a call in OpenAI's form. Raise ValueError for arguments that are no object."""
    # Llama's models write parameters.
    arguments = found.get("arguments", found.get("parameters"))
    if isinstance(arguments, str):  # JSON within JSON, as in OpenAI's own form
        arguments = JSON.decode(arguments or "{}")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    name, arguments = mended([found["name"], arguments])  # \ud83d alone is JSON, but no text
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)  # 1e999 is infinite
    own = found.get("id")  # Mistral's models write one, which the result is to have
    is_own = isinstance(own, str) and CALL_ID.fullmatch(own)
    return {
        "id": own if is_own else f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": written},
    }


# ---- arguments as JSON ---------------------------------------------------------------------------


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def without_doubles(pairs: list[tuple]) -> dict:
    """Return {key: value}. Raise ValueError for a key that comes twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found


# Without NaN, but with the line breaks that some models write into their strings
JSON = json.JSONDecoder(
    object_pairs_hook=without_doubles, parse_constant=refuse_constant, strict=False
)
OPENING = re.compile(r"\s*(?:;\s*)?(?=[\[{])")  # of the first value, or of one that follows
# By the mark: what stands before the arguments, with the name, and what stands behind them
NAMED = {
    "[TOOL_CALLS]": (
        r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?(?=\{)",
        "",
    ),
    "<function=": (r"<function=(?P<name>[^<>\s]+)>\s*(?=\{)", r"\s*</function>"),
    # DeepSeek-V3 and R1: function SEP name ```json {...} ```; DeepSeek-V3.1: name SEP {...}
    CALLS_BEGIN: (
        rf"(?:{CALLS_BEGIN})?\s*{CALL_BEGIN}(?:function{SEP})?(?P<name>[\w.-]+)\s*"
        rf"(?:(?:{SEP}|```json)\s*)?(?=\{{)",
        rf"(?:\s*(?:```\s*)?{CALL_END})?",
    ),
}
NAMED = {mark: tuple(map(re.compile, both)) for mark, both in NAMED.items()}


def json_calls(text: str, end: int, mark: str) -> tuple[list[dict], int]:
    """Return the calls of the JSON values that stand there one behind another, and their end."""
    calls = []
    while opening := OPENING.match(text, end):
        try:
            value, after = JSON.raw_decode(text, opening.end())
            found = value if isinstance(value, list) else [value]
            if not found or not all(is_call(one, mark) for one in found):
                break
            calls += [call_of(one) for one in found]
        except (ValueError, RecursionError):
            if not calls:
                raise
            break  # a rest that only begins like JSON
        end = after
    return calls, end


def is_call(value: object, mark: str) -> bool:
    """Return whether a value is a call. Others have names, too: only behind a mark it may have no
    arguments."""
    has_name = isinstance(value, dict) and isinstance(value.get("name"), str)
    return has_name and bool(mark or {"arguments", "parameters"} & value.keys())


def named_calls(
    text: str, end: int, opening: re.Pattern, closing: re.Pattern
) -> tuple[list[dict], int]:
    """Return the calls that stand there one behind another, each a name with its arguments, and
    their end."""
    calls = []
    while named := opening.match(text, end):
        arguments, end = JSON.raw_decode(text, named.end())
        closed = closing.match(text, end)
        if not closed:  # the model was cut off within it, or tells of the form
            return [], end
        calls.append(call_of({"arguments": arguments, **named.groupdict()}))
        end = closed.end()
    return calls, end


# ---- calls as Python writes them -----------------------------------------------------------------

PYTHON = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\(")
NAME = re.compile(r"[\w.]+")


def python_calls(text: str) -> list[dict]:
    """Return the calls of a list like [add(a=1, b=2)], none if it is something else."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes like "\d" in a text
            tree = ast.parse(text.strip(), mode="eval").body
        return [python_call(one) for one in tree.elts] if isinstance(tree, ast.List) else []
    except (SyntaxError, TypeError, MemoryError) as error:
        raise ValueError("not Python") from error


class JsonNames(ast.NodeTransformer):
    """Reads true, false and null, which some models write in Python."""

    VALUES = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.VALUES[node.id]) if node.id in self.VALUES else node


def python_call(node: ast.expr) -> dict:
    """Return a call whose arguments are named literals. Raise ValueError, TypeError for others."""
    if not isinstance(node, ast.Call) or node.args or not NAME.fullmatch(ast.unparse(node.func)):
        raise ValueError("not a call with named arguments")
    pairs = [(o.arg, ast.literal_eval(JsonNames().visit(o.value))) for o in node.keywords]
    if None in (arguments := without_doubles(pairs)):  # **
        raise ValueError("not a named argument")
    # As JSON has them: keys are texts, tuples are lists. Sets and bytes are a TypeError.
    arguments = JSON.decode(json.dumps(arguments, allow_nan=False))
    return call_of({"name": ast.unparse(node.func), "arguments": arguments})
