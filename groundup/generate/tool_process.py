"""The process in which a model's tools run: python -m groundup.generate.tool_process FILE SECONDS.

It answers an empty line with [schemas of the file's functions, whether prompts show them] or an
error, and {"name", "arguments"} with {"text", "failed"}. tools.py ends it when a tool loops.
"""

import inspect
import json
import os
import re
import signal
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path

from groundup.errors import UserError
from groundup.files.untrusted import limit_memory
from groundup.generate.rendering import answer_lines

MAX_CHARS = 2_000  # of a result; the rest is cut off
MEMORY_MB = 1_000  # beside what the process has at its start
NAMES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
NAMES |= {typing.Any: None, list: "array", tuple: "array", dict: "object"}

# "  name (type): what it is", which may go on in lines that begin no other
BEGIN = r"[ \t]+(\w+)(?: \([^)\n]*\))?:"
ARGUMENT = re.compile(rf"^{BEGIN}[ \t]*(.*(?:\n(?!{BEGIN}).*)*)", re.M)


def functions_of(path: str) -> tuple[dict[str, Callable], bool]:
    """Return the functions that a Python file offers, and whether prompts are to show them.

    They are all that it defines without a leading _; shown, unless it says _shown = False."""
    # Not imported: its name may be that of a module of ours.
    module = types.ModuleType("tools_of_the_model")
    module.__file__ = path
    sys.modules[module.__name__] = module  # where dataclasses look for it
    sys.path.insert(0, str(Path(path).absolute().parent))  # files beside it can be imported
    space = vars(module)
    code = compile(Path(path).read_text(encoding="utf-8"), path, "exec")
    exec(code, space)  # noqa: S102 (the user's own file)
    found = {}
    for name, value in space.items():
        if inspect.isfunction(value) and not name.startswith("_") and value.__globals__ is space:
            found[name] = value
    return found, bool(space.get("_shown", True))


def schema_of(function: Callable) -> dict:
    """Return the JSON schema of a function, as a chat template shows it.

    Types are those of the hints, descriptions those of the docstring: its text, and a block "Args:"
    with a line "name: what it is" for each parameter. Raise UserError for one that is missing."""
    name, text = function.__name__, inspect.getdoc(function) or ""
    # Pairs of a heading and what is below it, behind the text
    sections = re.split(r"^(Args|Returns|Raises):[ \t]*\n?", text, flags=re.M)
    if not sections[0].strip():
        raise UserError(f"{name}: it has no docstring to tell the model what it does")
    described = dict(zip(sections[1::2], sections[2::2], strict=True))
    arguments = ARGUMENT.findall(described.get("Args", ""))
    words = {key: " ".join(value.split()) for key, value, _ in arguments}
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{name}: async functions are not supported; make it a plain one")
    hints, properties, required = typing.get_type_hints(function), {}, []
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"{name}: its parameter {key!r} cannot be given by name")
        # A model cannot use what it is not told about.
        for what, there in (("type hint", key in hints), ("line under Args:", key in words)):
            if not there:
                raise UserError(f"{name}: its parameter {key!r} has no {what}")
        properties[key] = type_of(hints[key], f"{name}: {key}") | {"description": words[key]}
        if parameter.default is inspect.Parameter.empty:
            required.append(key)
    parameters: dict = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    about = {"name": name, "description": sections[0].strip(), "parameters": parameters}
    if "return" in hints and hints["return"] is not type(None):
        about["return"] = type_of(hints["return"], f"{name}: its result")
        if "Returns" in described:
            about["return"]["description"] = " ".join(described["Returns"].split())
    return {"type": "function", "function": about}


def type_of(hint: object, what: str) -> dict:
    """Return a type hint in JSON schema. Raise UserError for a type that JSON does not have."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return type_of(type(inner[0]), what) | {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        # None is no type of its own here, but makes the others nullable.
        kinds = [type_of(one, what) for one in inner if one is not type(None)]
        if len(kinds) > 1:
            kinds = [{"type": sorted(kind["type"] for kind in kinds)}]
        return kinds[0] | ({"nullable": True} if type(None) in inner else {})
    # list[int] is a list, whose items have a type.
    plain = origin or hint
    if plain not in NAMES:
        raise UserError(f"{what} has the type {hint}, which JSON does not have")
    schema = {"type": NAMES[plain]} if NAMES[plain] else {}
    if inner and plain is list:
        schema["items"] = type_of(inner[0], what)
    if inner and plain is dict:
        schema["additionalProperties"] = type_of(inner[1], what)
    return schema


def call(functions: dict[str, Callable], name: str, arguments: dict) -> dict:
    """Return {"text": what a tool says, "failed": whether it is an error's text}."""
    if name not in functions:
        return {"text": f"Error: there is no tool {name!r}", "failed": True}
    try:
        result = functions[name](**arguments)
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    except (Exception, SystemExit) as error:  # the tool's answer, not the run's end
        return {"text": f"Error: {type(error).__name__}: {error}"[:MAX_CHARS], "failed": True}
    if len(text) > MAX_CHARS:
        text = f"{text[:MAX_CHARS]}... ({len(text) - MAX_CHARS:,} characters more)"
    return {"text": text, "failed": False}


def serve(path: str, most_s: int) -> None:
    """Answer the lines of standard input until it ends."""
    # What a tool prints must not look like an answer, and it has nothing to read.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    calls = os.fdopen(os.dup(0), encoding="utf-8")
    sink = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(sink, fd)
    functions: dict[str, Callable] = {}
    try:
        functions, shown = functions_of(path)
        first: list | str = [[schema_of(function) for function in functions.values()], shown]
    except UserError as error:
        first = str(error)
    except (Exception, SystemExit) as error:  # whatever the file does
        first = " ".join(f"{type(error).__name__}: {error}".split())
    limit_memory(MEMORY_MB)

    def answer(asked: dict) -> dict:
        signal.alarm(most_s)  # it ends on its own if the one that asks was killed meanwhile
        found = call(functions, **asked)
        signal.alarm(0)
        return found

    answer_lines(first, answer, calls, answers)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
