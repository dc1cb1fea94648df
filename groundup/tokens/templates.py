"""A checkpoint's own chat template: a conversation as text, with what is special in it and what the model learns.

Published models carry a Jinja template (tokenizer_config.json or chat_template.jinja). It is run as transformers runs
it, in Jinja's sandbox. Two things are added:

1. User text never becomes a special token. A character that occurs nowhere else (GUARD) is put before every name of a
   special token in the messages; such names are then ordinary text, and the guards are taken out again.
2. What the assistant says is found exactly. Where the template has {% generation %}, that is it. Elsewhere each answer
   is replaced by one character and the conversation rendered again: what stands before and after that character must
   stand before and after the answer, too. A template for which it does not is refused.

Calls of tools come as text in the form of our own models; a template that knows tools reads them in OpenAI's form, with
ids that Mistral's templates take.
"""

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

from groundup.errors import UserError
from groundup.files.row_formats import TOOLS_HEAD, TOOLS_TAIL
from groundup.files.untrusted import loads, time_limit, why_unusable

GUARD, BEGIN, END = "\ufdd0", "\ufdd1", "\ufdd2"  # Unicode's noncharacters: in no text that is meant to be read
RENDER_S = 4  # at most, for one conversation; thousands of messages take less than one
TRIAL = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
GIVEN = {"messages", "tools", "add_generation_prompt", "documents", "loop"}  # by whoever renders, not settings
MARKS = re.compile(f"[{BEGIN}{END}]")


class Piece(NamedTuple):
    """A part of a rendered conversation: one special token, or ordinary text."""

    text: str
    special: bool
    learned: list[tuple[int, int]]  # (begin, end) in `text`: what the assistant says


class ChatTemplate:
    """A Jinja chat template. variables: what it may read beside the messages (bos_token,
    enable_thinking ...). reads: the settings that it reads."""

    def __init__(self, source: str, specials: Iterable[str], variables: dict[str, Any]) -> None:
        """Raise UserError if Jinja cannot read the template, or if two messages are too much for it."""
        import jinja2  # torch needs it, too
        from jinja2.nodes import Name

        if why := on_trial(source, tuple(variables.items())):
            raise UserError(f"tokenizer: the chat template cannot be used: {why}")
        try:
            self.template = environment().from_string(source)
            names = list(environment().parse(source).find_all(Name))
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"tokenizer: the chat template is damaged: line {error.lineno}: {error.message}") from None
        except (jinja2.TemplateError, TypeError, RecursionError, SyntaxError) as error:
            raise UserError(f"tokenizer: the chat template is damaged: {type(error).__name__}: {error}") from None
        own = {name.name for name in names if name.ctx != "load"} | GIVEN | environment().globals.keys()
        self.reads = {name.name for name in names if name.name not in own and not name.name.endswith("_token")}
        self.errors = jinja2.TemplateError, TypeError, LookupError, ValueError, AttributeError, ArithmeticError
        self.errors, self.too_slow = (*self.errors, RecursionError, MemoryError), ""
        names = "|".join(re.escape(name) for name in sorted(specials, key=len, reverse=True))
        self.names = re.compile(f"(?=(?:{names}))" if names else "(?!)")
        self.split = re.compile(f"((?<!{GUARD})(?:{names}))" if names else "((?!))")
        self.takes_tools = re.search(r"\btools\b", source) is not None and "tool_calls" in source
        self.variables, self.tagged = variables, re.search(r"{%-?\s*generation\s*-?%}", source) is not None

    def pieces(
        self, messages: Sequence[dict], add_generation_prompt: bool = False, tools: list[dict] | None = None,
        learn: bool = True,
    ) -> list[Piece]:  # fmt: skip
        """Return the conversation in pieces. learn: find the answers, else nothing is marked as learned. Raise
        UserError if the template cannot take the conversation."""
        if tools is None and self.takes_tools:
            messages, tools = with_tools(messages)
        messages, tools = self.guarded(messages), self.guarded(tools)
        marked = self.text(messages, tools, add_generation_prompt)
        text, spans = MARKS.sub("", marked), []
        if learn and self.tagged:
            at = [match.start() - k for k, match in enumerate(MARKS.finditer(marked))]
            spans = list(zip(at[::2], at[1::2], strict=True))
        elif learn:
            answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
            spans = [self.answer(text, messages, i, tools, add_generation_prompt) for i in answers]
        return self.cut(text, spans)

    def settings(self, written: str) -> dict[str, bool | str]:
        """Return settings written as 'enable_thinking=False,...'. Raise UserError for one that the template ignores."""
        found = {}
        for part in written.split(","):
            name, equals, value = (text.strip() for text in part.partition("="))
            if not equals or name not in self.reads:
                known = ", ".join(sorted(self.reads)) or "no settings"
                raise UserError(f"config: chat_template_kwargs: {part!r}: the chat template reads {known}")
            found[name] = {"True": True, "False": False}.get(value, value)
        return found

    def guarded(self, value: Any) -> Any:
        """Return messages or tools with a guard before every name of a special token in their texts."""
        if isinstance(value, str):
            return self.names.sub(GUARD, MARKS.sub("", value.replace(GUARD, "")))
        if isinstance(value, dict):
            return {key: one if key == "role" else self.guarded(one) for key, one in value.items()}
        return [self.guarded(one) for one in value] if isinstance(value, list | tuple) else value

    def text(self, messages: list[dict], tools: list[dict] | None, prompt: bool) -> str:
        if self.too_slow:  # for one conversation; others would take as long
            raise UserError(self.too_slow)
        try:
            with time_limit(RENDER_S):
                return self.template.render(
                    messages=messages, tools=tools, add_generation_prompt=prompt, **self.variables
                )
        except TimeoutError as error:
            self.too_slow = f"tokenizer: the chat template cannot be used: {error}"
            raise UserError(self.too_slow) from None
        except self.errors as error:
            raise UserError(f"tokenizer: the chat template refuses this conversation: {error}") from None

    def answer(
        self, text: str, messages: list[dict], i: int, tools: list[dict] | None, prompt: bool
    ) -> tuple[int, int]:
        """Return where the answer messages[i] begins and ends in `text`: from what the template opens for the model
        (with a block of thoughts that it does not write itself) through the special token that ends the turn."""
        asked = MARKS.sub("", self.text(messages[:i], tools, True)) if i else ""
        words = {"role": "assistant", "content": BEGIN}
        try:
            other = self.text([*messages[:i], words, *messages[i + 1 :]], tools, prompt)
        except UserError:
            if span := self.call(text, messages, i, tools, prompt):
                return span
            raise
        before, found, after = other.partition(BEGIN)
        begin = len(asked) if asked and text.startswith(asked) else len(before)
        end = len(text) - len(after)
        if not found or not text.endswith(after) or not text.startswith((before, asked or before)) or begin > end:
            raise UserError(
                f"tokenizer: the chat template does not show where answer {i} begins and ends, so it cannot be trained "
                "on; add {% generation %} to the template"
            )
        ending = self.split.match(text, end)
        return begin, ending.end() if ending else end

    def call(
        self, text: str, messages: list[dict], i: int, tools: list[dict] | None, prompt: bool
    ) -> tuple[int, int] | None:
        """Return where the calls of messages[i] begin and end in `text`, None if that cannot be said, for a template
        that refuses words in their place: Mistral's let words of a user and of the assistant alternate. Words in place
        of the calls, their results and what follows them up to the user's next turn show where the calls begin and
        which special token ends a turn."""
        roles = [message["role"] for message in messages]
        after = roles.index("user", i) if "user" in roles[i:] else len(roles)
        words = {"role": "assistant", "content": BEGIN}
        before, _, rest = self.text([*messages[:i], words, *messages[after:]], tools, prompt).partition(BEGIN)
        ending = self.split.match(rest)
        if not messages[i].get("tool_calls") or not ending or not text.startswith(before):
            return None
        found = re.compile(f"(?<!{GUARD}){re.escape(ending[0])}").search(text, len(before))
        alone = self.text(messages[: i + 1], tools, False).rstrip()
        said = text[len(before) : found.end()] if found else ""
        return (len(before), found.end()) if said and alone.endswith(said) else None

    def cut(self, text: str, spans: list[tuple[int, int]]) -> list[Piece]:
        """Cut `text` at its special tokens, and take the guards out."""
        pieces, at = [], 0
        for k, part in enumerate(self.split.split(text)):
            if part:
                inside = [(max(b - at, 0), min(e - at, len(part))) for b, e in spans if b < at + len(part) and e > at]
                guards = [sum(c == GUARD for c in part[:n]) for span in inside for n in span]
                inside = [(b - guards[2 * j], e - guards[2 * j + 1]) for j, (b, e) in enumerate(inside)]
                pieces.append(Piece(part.replace(GUARD, ""), k % 2 == 1, inside))
            at += len(part)
        return pieces


@cache
def on_trial(source: str, variables: tuple[tuple[str, Any], ...]) -> str:
    """Return why a template cannot be used, "" if it writes a short conversation within bounds."""
    return why_unusable(lambda: environment().from_string(source).render(messages=TRIAL, **dict(variables)))


CALL = re.compile(r"(?:\A|\n)<tool_call>\n(.*)\n</tool_call>")
CALL_ID = re.compile(r"[A-Za-z0-9]{9}")  # Mistral's templates take no other


def with_tools(messages: Sequence[dict]) -> tuple[list[dict], list[dict] | None]:
    """Return (messages, tools) as templates that know tools read them: row_formats.py writes tools into the system
    message and calls into the answers, as text. A system message that held only tools is left out, so that the
    template's own stays. Text that is not exactly so is left as it is. A call keeps the row's id if Mistral's
    templates take it, else its id is its number in the conversation; a result has the id of its call."""
    tools, turns = None, list(messages)
    system = turns[0]["content"] if turns and turns[0]["role"] == "system" else ""
    before, head, listed = system.partition(TOOLS_HEAD)
    if head and listed.endswith(TOOLS_TAIL):
        tools = objects(listed.removesuffix(TOOLS_TAIL).split("\n"))
        said = before.removesuffix("\n\n")
        turns[:1] = turns[:1] if not tools else [{"role": "system", "content": said}] if said else []
    n_calls, new_ids, waiting = 0, {}, []
    for i, turn in enumerate(turns):
        if turn["role"] == "tool":
            own = new_ids.get(turn.get("tool_call_id"), "")
            called = own if own in waiting else waiting[0] if waiting else f"call{n_calls:05d}"
            waiting = [one for k, one in enumerate(waiting) if k != waiting.index(called)]
            turns[i] = {"role": "tool", "content": turn["content"], "tool_call_id": called}
        first = CALL.search(turn["content"]) if turn["role"] == "assistant" else None
        said, written = (turn["content"][: first.start()], turn["content"][first.start() :]) if first else ("", "")
        calls = objects(CALL.findall(written)) if not CALL.sub("", written) else None
        if calls and all({"name", "arguments"} <= call.keys() for call in calls):
            old = turn.get("tool_call_ids", [])
            old = old if len(old) == len(calls) else [""] * len(calls)
            waiting = [one if CALL_ID.fullmatch(one) else f"call{n_calls + k:05d}" for k, one in enumerate(old)]
            new_ids, n_calls = dict(zip(old, waiting, strict=True)), n_calls + len(calls)
            about = zip(calls, waiting, strict=True)
            calls = [{"type": "function", "function": call, "id": called} for call, called in about]
            turns[i] = {"role": "assistant", "content": said, "tool_calls": calls}
    return turns, tools


def objects(lines: list[str]) -> list[dict] | None:
    """Return the JSON objects in these lines, None if there is anything else."""
    try:
        found = [loads(line) for line in lines]
    except ValueError:
        return None
    return found if all(isinstance(one, dict) for one in found) else None


@cache
def environment() -> Any:
    """Return Jinja's sandbox with what transformers adds to it."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}: mark the assistant's words."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return BEGIN + caller() + END

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals |= {"raise_exception": raise_exception, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made
