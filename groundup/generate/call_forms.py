"""Thoughts and calls of tools in the text of an answer, in the forms that public models write.

    Hermes, Qwen, ours   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>
    Qwen3-Coder          <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    GLM-4.5              <tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
    Mistral              [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]
                         [TOOL_CALLS]add{"a": 1}
    Granite, Phi-4       <|tool_call|>[{"name": "add", "arguments": {"a": 1}}]
    DeepSeek             its own special characters around a name and {"a": 1}
    Llama 3.1            {"name": "add", "parameters": {"a": 1}}, <function=add>{"a": 1}</function>
    Llama 3.2            [add(a=1)]; LFM2 and Llama 4 between marks
    Gemma 4              <|tool_call>call:add{a:1,b:<|"|>text<|"|>}<tool_call|>

A form without a mark is a call only as the whole answer. What cannot be read stays text, as does a
call that gives an argument twice.
"""

import ast
import contextlib
import json
import re
import secrets
import warnings
from collections.abc import Mapping, Sequence

from groundup.files.untrusted import mended
from groundup.generate.engine import n_pending
from groundup.tokens.templates import CALL_ID

# ---- the text of an answer is divided ------------------------------------------------------------


THINK, THINK_END = "<think>", "</think>"  # around the thoughts before an answer
DEEPSEEK = "<\uff5ctool\u2581{}\uff5c>"
DEEPSEEK_MARKS = ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
CALLS_BEGIN, CALL_BEGIN, SEP, CALL_END, CALLS_END = map(DEEPSEEK.format, DEEPSEEK_MARKS)
GEMMA_MARK, GEMMA_QUOTE, GEMMA_END = "<|tool_call>", '<|"|>', "<tool_call|>"
PYTHON_MARKS = {
    "<|tool_call_start|>": "<|tool_call_end|>",  # LFM2
    "<|python_start|>": "<|python_end|>",  # Llama 4
}


class ThoughtReader:
    """Divides an answer into thoughts, <think>...</think> at its beginning, and the rest."""

    def __init__(self, opened: bool) -> None:
        """opened: whether the prompt ends with <think>, which the answer then lacks."""
        self.state = "thinking" if opened else "beginning"  # then between, saying
        self.pending = ""

    def push(self, text: str, last: bool) -> tuple[str, str]:
        """Return (more thoughts, more of what is said)."""
        self.pending += text
        # It is decided once the text cannot become <think> any more.
        if self.state == "beginning":
            begin = self.pending.lstrip()
            if not last and THINK.startswith(begin):
                return "", ""
            thinks = begin.startswith(THINK)
            self.state = "thinking" if thinks else "saying"
            self.pending = begin.removeprefix(THINK) if thinks else self.pending
        thoughts = ""
        if self.state == "thinking":
            thoughts, close, rest = self.pending.partition(THINK_END)
            if not close:
                # A beginning of </think> is held back.
                keep = 0 if last else n_pending(thoughts, [THINK_END])
                cut = len(thoughts) - keep
                self.pending = thoughts[cut:]
                return thoughts[:cut], ""
            self.state, self.pending = "between", rest
        if self.state == "between":  # the empty lines after </think>
            self.pending = self.pending.lstrip("\n")
            self.state = "saying" if self.pending else "between"
        said, self.pending = self.pending, ""
        return thoughts, said


class CallReader:
    """Divides an answer into what is said and what is called.

    schemas: of the tools, in OpenAI's form; they tell text from numbers where a form does not."""

    MARKS = ("<tool_call>", "[TOOL_CALLS]", "<|tool_call|>", "<function=", CALLS_BEGIN)
    MARKS += (GEMMA_MARK, *PYTHON_MARKS)
    # That stand within a call: Mistral's between a name and its arguments, DeepSeek's, Gemma's
    INNER_MARKS = ("[CALL_ID]", "[ARGS]", CALL_BEGIN, SEP, CALL_END, CALLS_END)
    INNER_MARKS += (GEMMA_QUOTE, GEMMA_END, *PYTHON_MARKS.values())
    MARK = re.compile("|".join(map(re.escape, MARKS)))
    CLOSE = re.compile(rf"\s*(?:</tool_call>|<\|/tool_call\|>|<tool_call\|>|{CALLS_END})?\s*")
    SPACE = re.compile(r"\s*")

    def __init__(self, schemas: Sequence[dict] = ()) -> None:
        functions = [one["function"] for one in schemas]
        self.types = {one["name"]: types_of(one) for one in functions}
        self.pending = ""
        self.said = False  # whether something was said already

    def push(self, text: str, last: bool) -> tuple[str, list[dict]]:
        """Return (more of what is said, calls); calls come with the last piece only."""
        self.pending += text
        if last:
            return self.divide(self.pending)
        # Until something is said, { or [ may begin an answer that is a call.
        if not self.said and self.pending.lstrip()[:1] in ("", "{", "["):
            return "", []
        mark = self.MARK.search(self.pending)
        cut = mark.start() if mark else len(self.pending) - n_pending(self.pending, self.MARKS)
        text = self.pending[:cut].rstrip()  # before a call no space is said
        self.pending = self.pending[len(text) :]
        self.said |= bool(text)
        return text, []

    def divide(self, text: str) -> tuple[str, list[dict]]:
        """Return (what is said, calls). A call that cannot be read makes all of it text."""
        first = "" if self.said else text.lstrip()
        # Forms without a mark are calls only as the whole answer.
        is_bare = first[:1] in ("{", "[") and not self.MARK.match(first)
        begin = self.SPACE.match(text) if is_bare else self.MARK.search(text)
        said, calls, end = "", [], 0
        while begin:
            try:
                found, after = calls_at(text, begin, "" if is_bare else begin[0], self.types)
            except (ValueError, RecursionError):
                found = []
            if not found:
                return text, []
            said += text[end : begin.start()]
            calls += found
            # Marks that close a call are no text, even of another form.
            end = self.CLOSE.match(text, after).end()
            begin = None if is_bare else self.MARK.search(text, end)
        rest = text[end:]
        if not calls or is_bare and rest:
            return text, []
        return said + rest if rest else said.rstrip(), calls


Types = Mapping[str, Mapping[str, bool]]  # {function: {parameter: whether it is a text}}


def calls_at(text: str, begin: re.Match, mark: str, types: Types) -> tuple[list[dict], int]:
    """Return (the calls that stand there in a text, where they end), ([], ...) = no calls do.

    begin: where the mark was found; mark "" = the whole answer. Raise ValueError or RecursionError
    if they cannot be read."""
    at = begin.end()
    # By their marks; some marks have several forms, which what follows tells apart.
    if mark == CALLS_BEGIN:
        return deepseek_calls(text, at)
    if mark == GEMMA_MARK:
        return gemma_call(text, at)
    if mark == "[TOOL_CALLS]" and (named := NAMED.match(text, at)):
        arguments, end = JSON.raw_decode(text, named.end())
        return [call_of({"name": named[1], "arguments": arguments, "id": named[2]})], end
    # Qwen3-Coder's and Llama's form begin alike, the first within <tool_call>.
    function = FUNCTION.match(text, begin.start() if mark == "<function=" else at)
    if function and mark in ("<function=", "<tool_call>"):
        return function_call(text, function, types)
    if mark == "<tool_call>" and (name := KEYED.match(text, at)):
        return keyed_call(text, name, types)
    if mark in ("", *PYTHON_MARKS) and PYTHON.match(text, at):
        close = PYTHON_MARKS.get(mark)
        written, closed, _ = text[at:].partition(close) if close else (text[at:], "", "")
        return python_calls(written), at + len(written) + len(closed)
    return json_calls(text, at, mark)


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
NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?(?=\{)")  # Mistral's
# DeepSeek-V3 and R1: function SEP name ```json {...} ```; DeepSeek-V3.1: name SEP {...}
DEEPSEEK_CALL = re.compile(
    rf"\s*{CALL_BEGIN}(?:function{SEP})?([\w.-]+)\s*(?:(?:{SEP}|```json)\s*)?(?=\{{)"
)
DEEPSEEK_END = re.compile(rf"\s*(?:```\s*)?{CALL_END}")


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


def deepseek_calls(text: str, end: int) -> tuple[list[dict], int]:
    """Return the calls behind DeepSeek's mark, and their end."""
    calls = []
    while one := DEEPSEEK_CALL.match(text, end):
        arguments, end = JSON.raw_decode(text, one.end())
        calls.append(call_of({"name": one[1], "arguments": arguments}))
        if closed := DEEPSEEK_END.match(text, end):
            end = closed.end()
    return calls, end


# ---- arguments between tags ----------------------------------------------------------------------

FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>\s*")
PARAMETER = re.compile(r"<parameter=([^<>]+)>\n?(.*?)\n?</parameter>\s*", re.S)
FUNCTION_END = re.compile(r"\s*</function>")
KEYED = re.compile(r"\s*([\w.-]+)\s*(?=<arg_key>|</tool_call>)")  # the latter: no arguments
KEY_AND_VALUE = re.compile(r"<arg_key>([^<>]+)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.S)


def function_call(text: str, begin: re.Match, types: Types) -> tuple[list[dict], int]:
    """Return the call of <function=name>..., with Llama's JSON or Qwen3-Coder's tags; its end."""
    if text.startswith("{", begin.end()):
        arguments, end = JSON.raw_decode(text, begin.end())
    else:
        arguments, end = tagged(text, begin.end(), PARAMETER, types.get(begin[1], {}))
    closed = FUNCTION_END.match(text, end)
    if not closed:  # the model was cut off within it, or tells of the form
        return [], end
    return [call_of({"name": begin[1], "arguments": arguments})], closed.end()


def keyed_call(text: str, begin: re.Match, types: Types) -> tuple[list[dict], int]:
    """Return the call of GLM's name, keys and values, and its end."""
    arguments, end = tagged(text, begin.end(), KEY_AND_VALUE, types.get(begin[1], {}))
    if not arguments and begin[1] not in types:  # a word between the tags
        return [], end
    return [call_of({"name": begin[1], "arguments": arguments})], end


def tagged(
    text: str, end: int, pattern: re.Pattern, is_text: Mapping[str, bool]
) -> tuple[dict, int]:
    """Return the arguments that are written as `pattern`, a key and a value each, and their end.

    A value is JSON if its parameter is no text, and it can be."""
    pairs = []
    while one := pattern.match(text, end):
        key, value = one.groups()
        with contextlib.suppress(ValueError, RecursionError):
            value = value if is_text.get(key, True) else JSON.decode(value.strip())
        pairs.append((key, value))
        end = one.end()
    return without_doubles(pairs), end


def types_of(function: dict) -> dict[str, bool]:
    """Return {parameter: whether its schema lets it be a text} of a tool."""
    parameters = function.get("parameters")
    # A client's schema may be anything: what cannot be read says nothing.
    known = parameters.get("properties") if isinstance(parameters, dict) else None
    return (
        {name: may_be_text(one) for name, one in known.items()} if isinstance(known, dict) else {}
    )


def may_be_text(schema: object) -> bool:
    """Return whether a JSON schema has a string among its types. One that does not say has."""
    if not isinstance(schema, dict):
        return True
    options, kinds = schema.get("anyOf", schema.get("oneOf")), schema.get("type", "string")
    if isinstance(options, list):
        return any(map(may_be_text, options))
    return "string" in (kinds if isinstance(kinds, list) else [kinds])


# ---- arguments as Gemma 4 writes them ------------------------------------------------------------

GEMMA_CALL = re.compile(r"\s*call:\s*([\w.-]+)\s*(?=\{)")
GEMMA_KEY = re.compile(r"\s*([\w.$-]+)\s*:\s*")


def gemma_call(text: str, begin: int) -> tuple[list[dict], int]:
    """Return the call behind Gemma's mark, and its end."""
    opening = GEMMA_CALL.match(text, begin)
    if not opening:
        return [], begin
    arguments, end = gemma_value(text, opening.end())
    return [call_of({"name": opening[1], "arguments": arguments})], end


def gemma_value(text: str, begin: int) -> tuple[object, int]:
    """Return the value that stands there, and its end. Raise ValueError."""
    if text.startswith(GEMMA_QUOTE, begin):  # a text, which has no escapes
        begin += len(GEMMA_QUOTE)
        end = text.index(GEMMA_QUOTE, begin)
        return text[begin:end], end + len(GEMMA_QUOTE)
    if text.startswith("None", begin):  # as its template writes null
        return None, begin + len("None")
    # An object or a list of such values; everything else is JSON.
    close = {"{": "}", "[": "]"}.get(text[begin : begin + 1])
    if not close:
        return JSON.raw_decode(text, begin)
    # Recursion is bounded by Python: a RecursionError makes it text.
    items, end = [], begin + 1
    while not text.startswith(close, end):
        key = GEMMA_KEY.match(text, end) if close == "}" else None
        if close == "}" and not key:
            raise ValueError("a value without a key")
        value, end = gemma_value(text, key.end() if key else end)
        items.append((key[1], value) if key else value)
        if text.startswith(",", end):
            end += 1
        elif not text.startswith(close, end):
            raise ValueError(f"no {close} at the end")
    return without_doubles(items) if close == "}" else items, end + 1


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
