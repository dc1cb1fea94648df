"""A checkpoint's own chat template: a conversation as text, what is special in it, what is learned.

Published models carry a Jinja template (tokenizer_config.json or chat_template.jinja). It is run as
transformers runs it, in Jinja's sandbox. Two things are added:

1. User text never becomes a special token. A character that occurs nowhere else (GUARD) is put
   before every name of a special token in the messages; such names are then ordinary text, and the
   guards are taken out again.
2. What the assistant says is found exactly. A template with {% generation %} marks it. With another
   one, each answer is replaced by one character and the conversation rendered again: what stands
   before and after that character must stand before and after the answer, too. A template for which
   it does not is refused.

Calls of tools come as text in the form of our own models; a template that knows tools reads them in
OpenAI's form, with ids that Mistral's templates take.
"""

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

from groundup.errors import UserError
from groundup.files import TOOLS_HEAD, TOOLS_TAIL
from groundup.files.untrusted import loads, time_limit, why_unusable

# Unicode's noncharacters: in no text that is meant to be read
GUARD, BEGIN, END = "\ufdd0", "\ufdd1", "\ufdd2"
MARKS = re.compile(f"[{BEGIN}{END}]")
RENDER_S = 4  # at most, for one conversation; thousands of messages take less than one
TRIAL = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
# what a template may read that is no setting
GIVEN = {"messages", "tools", "add_generation_prompt", "documents", "loop"}

Span = tuple[int, int]  # (begin, end) in a text


class Piece(NamedTuple):
    """A part of a rendered conversation: one special token, or ordinary text."""

    text: str
    special: bool
    learned: list[Span]  # in `text`: what the assistant says


class ChatTemplate:
    """A Jinja chat template.

    variables: what it may read beside the messages (bos_token, enable_thinking ...).
    reads: the settings that it reads.
    """

    def __init__(self, source: str, specials: Iterable[str], variables: dict[str, Any]) -> None:
        """Raise UserError if Jinja cannot read the template, or it fails on two messages."""
        import jinja2  # torch needs it, too
        from jinja2.nodes import Name

        cannot = "tokenizer: the chat template"
        if why := on_trial(source, tuple(variables.items())):
            raise UserError(f"{cannot} cannot be used: {why}")
        try:
            self.template = environment().from_string(source)
            names = list(environment().parse(source).find_all(Name))
        except jinja2.TemplateSyntaxError as error:
            where = f"line {error.lineno}: {error.message}"
            raise UserError(f"{cannot} is damaged: {where}") from None
        except (jinja2.TemplateError, TypeError, RecursionError, SyntaxError) as error:
            raise UserError(f"{cannot} is damaged: {type(error).__name__}: {error}") from None

        own = {name.name for name in names if name.ctx != "load"}
        own |= GIVEN | environment().globals.keys()
        read = {name.name for name in names} - own
        self.reads = {name for name in read if not name.endswith("_token")}
        self.variables = variables
        self.tagged = re.search(r"{%-?\s*generation\s*-?%}", source) is not None
        self.takes_tools = re.search(r"\btools\b", source) is not None and "tool_calls" in source

        found = "|".join(re.escape(name) for name in sorted(specials, key=len, reverse=True))
        self.names = re.compile(f"(?=(?:{found}))" if found else "(?!)")
        self.split = re.compile(f"((?<!{GUARD})(?:{found}))" if found else "((?!))")
        self.errors = (
            jinja2.TemplateError,
            TypeError,
            LookupError,
            ValueError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        )
        self.too_slow = ""  # the error, once a conversation has taken too long

    def pieces(
        self,
        messages: Sequence[dict],
        add_generation_prompt: bool = False,
        tools: list[dict] | None = None,
        learn: bool = True,
    ) -> list[Piece]:
        """Return the conversation in pieces. learn=False: nothing is marked as learned.

        Raise UserError if the template cannot take the conversation."""
        if tools is None and self.takes_tools:
            messages, tools = with_tools(messages)
        messages, tools = self.guarded(messages), self.guarded(tools)
        marked = self.text(messages, tools, add_generation_prompt)
        text, spans = MARKS.sub("", marked), []
        if learn and self.tagged:
            places = [mark.start() - k for k, mark in enumerate(MARKS.finditer(marked))]
            spans = learned_spans(list(zip(places[::2], places[1::2], strict=True)), messages)
        elif learn:
            for i, message in enumerate(messages):
                if message.get("role") == "assistant" and message.get("learn", True):
                    spans.append(self.answer(text, messages, i, tools, add_generation_prompt))
        return self.cut(text, spans)

    def settings(self, written: str) -> dict[str, bool | str]:
        """Return settings written as 'enable_thinking=False,...'.

        Raise UserError for one that the template ignores."""
        found = {}
        for part in written.split(","):
            name, equals, value = part.partition("=")
            name, value = name.strip(), value.strip()
            if not equals or name not in self.reads:
                known = ", ".join(sorted(self.reads)) or "no settings"
                reads = f"{part!r}: the chat template reads {known}"
                raise UserError(f"config: chat_template_kwargs: {reads}")
            found[name] = {"True": True, "False": False}.get(value, value)
        return found

    def guarded(self, value: Any) -> Any:
        """Return messages or tools with a guard before every name of a special token."""
        if isinstance(value, str):
            return self.names.sub(GUARD, MARKS.sub("", value.replace(GUARD, "")))
        if isinstance(value, dict):
            return {key: one if key == "role" else self.guarded(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.guarded(one) for one in value]
        return value

    def text(self, messages: list[dict], tools: list[dict] | None, prompt: bool) -> str:
        """Return the conversation as the template writes it, answers marked if it does that."""
        if self.too_slow:  # other conversations would take as long
            raise UserError(self.too_slow)
        given = {"messages": messages, "tools": tools, "add_generation_prompt": prompt}
        try:
            with time_limit(RENDER_S):
                return self.template.render(**given, **self.variables)
        except TimeoutError as error:
            self.too_slow = f"tokenizer: the chat template cannot be used: {error}"
            raise UserError(self.too_slow) from None
        except self.errors as error:
            refuses = "the chat template refuses this conversation"
            raise UserError(f"tokenizer: {refuses}: {error}") from None

    def answer(
        self, text: str, messages: list[dict], i: int, tools: list[dict] | None, prompt: bool
    ) -> Span:
        """Return where the answer messages[i] stands in `text`.

        It begins with what the template opens for the model (with a block of thoughts that the
        model does not write itself) and ends with the special token that ends the turn."""
        asked = MARKS.sub("", self.text(messages[:i], tools, True)) if i else ""
        words = {"role": "assistant", "content": BEGIN}
        try:
            other = self.text([*messages[:i], words, *messages[i + 1 :]], tools, prompt)
        except UserError:
            if span := self.call(text, messages, i, tools, prompt):
                return span
            raise
        before, found, after = other.partition(BEGIN)
        opened = asked and text.startswith(asked)
        begin, end = len(asked if opened else before), len(text) - len(after)
        same = text.startswith((before, asked or before)) and text.endswith(after)
        if not found or not same or begin > end:
            hidden = f"does not show where answer {i} begins and ends"
            how = "add {% generation %} to the template"
            raise UserError(
                f"tokenizer: the chat template {hidden}, so it cannot be trained on; {how}"
            )
        ending = self.split.match(text, end)
        return begin, ending.end() if ending else end

    def call(
        self, text: str, messages: list[dict], i: int, tools: list[dict] | None, prompt: bool
    ) -> Span | None:
        """Return where the calls of messages[i] stand in `text`, or None if unknown.

        This is for a template that refuses words in their place: Mistral's let words of a user and
        of the assistant alternate. Words in place of the calls, their results and what follows up
        to the user's next turn show where the calls begin and which special token ends a turn."""
        roles = [message["role"] for message in messages]
        after = roles.index("user", i) if "user" in roles[i:] else len(roles)
        words = {"role": "assistant", "content": BEGIN}
        other = self.text([*messages[:i], words, *messages[after:]], tools, prompt)
        before, _, rest = other.partition(BEGIN)
        ending = self.split.match(rest)
        if not messages[i].get("tool_calls") or not ending or not text.startswith(before):
            return None
        unguarded = re.compile(f"(?<!{GUARD}){re.escape(ending[0])}")
        found = unguarded.search(text, len(before))
        said = text[len(before) : found.end()] if found else ""
        # the conversation up to the calls must end with them, too
        alone = self.text(messages[: i + 1], tools, False).rstrip()
        return (len(before), found.end()) if said and alone.endswith(said) else None

    def cut(self, text: str, spans: list[Span]) -> list[Piece]:
        """Cut `text` at its special tokens, and take the guards out."""
        pieces, start = [], 0
        for k, part in enumerate(self.split.split(text)):
            end = start + len(part)
            learned = []
            for span in spans:
                if part and span[0] < end and span[1] > start:
                    first, last = max(span[0] - start, 0), min(span[1] - start, len(part))
                    first -= part[:first].count(GUARD)
                    last -= part[:last].count(GUARD)
                    learned.append((first, last))
            if part:  # every second one is special
                pieces.append(Piece(part.replace(GUARD, ""), k % 2 == 1, learned))
            start = end
        return pieces


def learned_spans(spans: list[Span], messages: Sequence[dict]) -> list[Span]:
    """Return the spans of the answers that are to be learned. Raise UserError if unknown."""
    flags = [one.get("learn", True) for one in messages if one.get("role") == "assistant"]
    if all(flags):
        return spans
    if len(spans) != len(flags):
        marks = f"marks {len(spans)} spans in {len(flags)} answers"
        raise UserError(
            f"tokenizer: the chat template {marks}, so that those not to learn are unknown"
        )
    return [span for span, flag in zip(spans, flags, strict=True) if flag]


@cache
def on_trial(source: str, variables: tuple[tuple[str, Any], ...]) -> str:
    """Return why a template cannot be used, "" if it writes a short conversation within bounds."""

    def render() -> None:
        environment().from_string(source).render(messages=TRIAL, **dict(variables))

    return why_unusable(render)


# ---- tools -----------------------------------------------------------------------------------

CALL = re.compile(r"(?:\A|\n)<tool_call>\n(.*)\n</tool_call>")
CALL_ID = re.compile(r"[A-Za-z0-9]{9}")  # Mistral's templates take no other


def with_tools(messages: Sequence[dict]) -> tuple[list[dict], list[dict] | None]:
    """Return (messages, tools) as templates that know tools read them.

    row_formats.py writes tools into the system message and calls into the answers, as text. Text
    that is not exactly so is left as it is. A call keeps the row's id if Mistral's templates take
    it, else its id is its number in the conversation; a result has the id of its call."""
    turns, tools = take_tools(list(messages))
    n_calls, new_ids, waiting = 0, {}, []
    for i, turn in enumerate(turns):
        if turn["role"] == "tool":
            called = new_ids.get(turn.get("tool_call_id"), "")
            if called in waiting:
                waiting.remove(called)
            else:
                called = waiting.pop(0) if waiting else call_id(n_calls)
            turns[i] = {"role": "tool", "content": turn["content"], "tool_call_id": called}
        said, calls = take_calls(turn)
        if calls:
            old = turn.get("tool_call_ids", [])
            if len(old) != len(calls):
                old = [""] * len(calls)
            numbered = enumerate(old, start=n_calls)
            waiting = [one if CALL_ID.fullmatch(one) else call_id(k) for k, one in numbered]
            new_ids |= zip(old, waiting, strict=True)
            n_calls += len(calls)
            calls = [
                {"type": "function", "function": call, "id": called}
                for call, called in zip(calls, waiting, strict=True)
            ]
            learn = {"learn": False} if not turn.get("learn", True) else {}
            turns[i] = {"role": "assistant", "content": said, "tool_calls": calls} | learn
    return turns, tools


def call_id(number: int) -> str:
    return f"call{number:05d}"


def take_tools(turns: list[dict]) -> tuple[list[dict], list[dict] | None]:
    """Return the turns without the tools in the system message, and the tools.

    A system message that held only tools is left out, so that the template's own stays."""
    system = turns[0]["content"] if turns and turns[0]["role"] == "system" else ""
    before, head, listed = system.partition(TOOLS_HEAD)
    if not head or not listed.endswith(TOOLS_TAIL):
        return turns, None
    tools = objects(listed.removesuffix(TOOLS_TAIL).split("\n"))
    if not tools:
        return turns, tools
    said = before.removesuffix("\n\n")
    return [{"role": "system", "content": said}] * bool(said) + turns[1:], tools


def take_calls(turn: dict) -> tuple[str, list[dict] | None]:
    """Return the words of an answer and the calls that follow them, None if there are none."""
    first = CALL.search(turn["content"]) if turn["role"] == "assistant" else None
    if not first:
        return "", None
    said, written = turn["content"][: first.start()], turn["content"][first.start() :]
    calls = None if CALL.sub("", written) else objects(CALL.findall(written))
    if calls and all({"name", "arguments"} <= call.keys() for call in calls):
        return said, calls
    return "", None


def objects(lines: list[str]) -> list[dict] | None:
    """Return the JSON objects in these lines, None if there is anything else."""
    try:
        found = [loads(line) for line in lines]
    except ValueError:
        return None
    return found if all(isinstance(one, dict) for one in found) else None


# ---- Jinja as transformers sets it up --------------------------------------------------------


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

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return made
