"""A checkpoint's own chat template: a conversation as text, what is a token in it, what is learned.

Published models carry a Jinja template (tokenizer_config.json or chat_template.jinja). It is run as
transformers runs it, in Jinja's sandbox. Four things are added:

1. User text never becomes a marker. A marker is the name of a special token, or of another added
   token that the template writes. A character that occurs nowhere else (GUARD) is put before every
   such name in the messages; these names are then ordinary text, and the guards are taken out.
2. What the assistant says is found exactly. A template with {% generation %} marks it. With another
   one, each answer is replaced by one character and the conversation rendered again: what stands
   before and after that character must stand before and after the answer, too. A template for which
   it does not is refused.
3. What the template leaves out of a conversation is counted.
4. The date that a template writes is fixed: it does not change while a run goes on.

Calls of tools come as text in the form of our own models; a template that knows tools reads them in
OpenAI's form, with ids that Mistral's templates take. Thoughts come as text, too:
<think>...</think> before an answer. A template that has a form of its own for them gets them under
its key or as a part of the content.
"""

import itertools
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

from groundup.errors import UserError
from groundup.files import TOOLS_HEAD, TOOLS_TAIL
from groundup.files.turns import THOUGHT_KEYS
from groundup.files.untrusted import loads, why_unusable
from groundup.tokens import BEGIN, END

GUARD = "\ufdd0"  # one more of Unicode's noncharacters
MARKS = re.compile(f"[{BEGIN}{END}]")
# They show what a template leaves out of the messages of a role, and how that is counted.
PROBES = {"assistant": "\ufdd3", "system": "\ufdd4", "tool": "\ufdd5", "words": "\ufdd6"}
PROBE_OF_CALL = "_{}probe"  # in ASCII, since calls may be written with escapes
NOT_WRITTEN = {
    "assistant": "thoughts of answers",
    "system": "system messages",
    "tool": "results of tools",
    "words": "words beside calls",
}
OUR_CHARACTERS = re.compile("[\ufdd0-\ufdd6]")
RENDER_S = 4  # of CPU time at most, for one conversation; thousands of messages take less than one
WAIT = 10  # times as long on the clock
TRIAL = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
CALL_OF_F = "<tool_call>\n" + '{"name": "f", "arguments": {"x": 1}}' + "\n</tool_call>"
PROBED = [  # conversations that reach most branches of a template
    TRIAL,
    [{"role": "system", "content": "c"}, *TRIAL, TRIAL[0]],
    [TRIAL[0], {"role": "assistant", "content": CALL_OF_F}, {"role": "tool", "content": "r"}],
    [TRIAL[0], {"role": "assistant", "content": "<think>\nt\n</think>\n\nb"}],
    [TRIAL[0], {"role": "assistant", "content": "b"} | dict.fromkeys(THOUGHT_KEYS, "t")],
]
# what a template may read that is no setting
NOT_SETTINGS = {"messages", "tools", "add_generation_prompt", "documents", "loop"}
# A block of thoughts that a prompt opens for the model, closed or not
OPENED = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
THOUGHTS = re.compile(r"(<think>\s*\S.*?)(\s*</think>)", re.DOTALL)
# an answer with thoughts, whose marks may be special tokens and have guards
THOUGHTFUL = re.compile(rf"\s*{GUARD}?<think>\n?(.*?)\n?{GUARD}?</think>\n*(.*)", re.DOTALL)
AS_PARTS = "content"  # thoughts_key of a template that takes them as a part of the content

HIDDEN = (
    "tokenizer: the chat template does not show where {}, so it cannot be trained on; "
    "add {{% generation %}} to the template"
)

Span = tuple[int, int]  # (begin, end) in a text


class RenderInput(NamedTuple):
    """What a template renders: a conversation, with guards."""

    messages: list[dict]
    tools: list[dict] | None = None  # None = the template gets none
    opens: bool = False  # the turn of the next answer is opened: add_generation_prompt

    def with_messages(self, *messages: dict, opens: bool = False) -> "RenderInput":
        """Return the same with other messages."""
        return RenderInput(list(messages), self.tools, opens)


class Piece(NamedTuple):
    """A part of a rendered conversation: one marker, or ordinary text."""

    text: str
    special: bool  # a marker
    learned: list[Span]  # in `text`: what the assistant says
    cuts: list[int] = []  # in `text`: to be encoded in parts, so that no marker is found in it


class Markers:
    """The names of tokens that a template writes between texts, which no user's text may become.

    specials: names of special tokens. words: those of other added tokens that are markers.
    strips: {name: whether white space before and after it belongs to it}.
    """

    def __init__(
        self,
        specials: list[str],
        words: list[str],
        of_turns: list[str],
        strips: Mapping[str, tuple[bool, bool]],
    ) -> None:
        """of_turns: the words that the model itself does not write."""
        # The model itself writes thoughts and calls of tools; nobody else writes a marker.
        everyone, assistant = one_of([*specials, *words]), one_of([*specials, *of_turns])
        self.in_text = re.compile(f"(?={everyone})")
        self.in_answers = re.compile(f"(?={assistant})")
        self.name = re.compile(everyone)
        self.word = re.compile(one_of(words))  # tokenizers find these in ordinary text, too

        # One pattern for each way to take in white space: what belongs to a token is dropped.
        patterns = []
        names = [*specials, *words]
        # white space before a name is looked for once, where it begins
        for before, left in ((True, r"(?:(?<!\s)\s*+)?"), (False, "")):
            for after, right in ((True, r"\s*"), (False, "")):
                same = [n for n in names if strips.get(n, (False, False)) == (before, after)]
                if same:
                    patterns.append(f"{left}(?<!{GUARD}){one_of(same)}{right}")
        self.split = re.compile(f"({'|'.join(patterns) or '(?!)'})")

    def guard(self, message: dict) -> dict:
        """Return a message with a guard before every name of a marker in it."""
        own = message.get("role") == "assistant"
        return self.guarded(message, self.in_answers if own else self.in_text)

    def guarded(self, value: Any, names: re.Pattern) -> Any:
        """Return a message, tools or a part of them with a guard before every name."""
        if isinstance(value, str):
            return names.sub(GUARD, OUR_CHARACTERS.sub("", value))
        if isinstance(value, dict):
            items = value.items()
            return {key: one if key == "role" else self.guarded(one, names) for key, one in items}
        if isinstance(value, list | tuple):
            return [self.guarded(one, names) for one in value]
        return value

    def cut(self, text: str, spans: list[Span]) -> list[Piece]:
        """Cut `text` at its markers, and take the guards out."""
        pieces, start = [], 0
        # text, marker, text, marker, ..., text
        for k, part in enumerate(self.split.split(text)):
            end, is_marker = start + len(part), k % 2 == 1  # every second one is a marker
            if is_marker:  # perhaps with the white space around it
                name = self.name.search(part)
                begin = start + name.start()
                learned = any(a < begin + len(name[0]) and b > begin for a, b in spans)
                pieces.append(Piece(name[0], True, [(0, len(name[0]))] if learned else []))
            elif part:
                learned = []
                for span in spans:
                    if span[0] < end and span[1] > start:
                        first, last = max(span[0] - start, 0), min(span[1] - start, len(part))
                        # the guards are taken out, so places behind them move to the left
                        first -= part[:first].count(GUARD)
                        last -= part[:last].count(GUARD)
                        learned.append((first, last))
                pieces.append(Piece(part.replace(GUARD, ""), False, learned, self.cuts(part)))
            start = end
        return pieces

    def cuts(self, part: str) -> list[int]:
        """Return where to cut a text without its guards: after the first character of a word."""
        clean = part.replace(GUARD, "")
        begins = [guard.start() - k for k, guard in enumerate(re.finditer(GUARD, part))]
        return [begin + 1 for begin in begins if self.word.match(clean, begin)]


class ChatTemplate:
    """A Jinja chat template.

    variables: what it may read beside the messages (bos_token, enable_thinking ...).
    reads: the settings that it reads. closing: what it writes after the last answer, up to the last
    of the markers there, "" if there is none. thoughts_key: the key of a message under which it
    takes thoughts, or AS_PARTS, "" if it takes them as text. opens_thoughts: whether a prompt ends
    within them. dated: whether it writes the date.
    """

    def __init__(
        self,
        source: str,
        specials: Iterable[str],
        variables: dict[str, Any],
        words: Iterable[str] = (),
        strips: Mapping[str, tuple[bool, bool]] | None = None,
        date: str = "",
    ) -> None:
        """words: names of added tokens that are not special. strips: {name: whether white space
        before and after it belongs to it}. date: YYYY-MM-DD, "" = today.

        Raise UserError if Jinja cannot read the template, or it fails on two messages."""
        from groundup.tokens import sandbox  # slow, and only templates need it

        # A template may come from anywhere: it is tried in a copy of this process first.
        if why := on_trial(source, tuple(variables.items())):
            raise UserError(f"tokenizer: the chat template cannot be used: {why}")
        self.template, names, assigned = sandbox.compiled(source)
        self.errors = sandbox.ERRORS
        self.reads = {
            name for name in names - assigned - NOT_SETTINGS if not name.endswith("_token")
        }
        self.dated = "strftime_now" in names
        now = datetime.fromisoformat(date) if date else datetime.now()
        self.variables = variables | {"strftime_now": now.strftime}
        self.tagged = re.search(r"{%-?\s*generation\s*-?%}", source) is not None
        self.takes_tools = re.search(r"\btools\b", source) is not None and "tool_calls" in source
        self.around: tuple = (None, "", "")  # the last answer that was looked for: see `answer`
        self.too_slow = ""  # the error, once a conversation has taken too long
        self.thoughts_key, self.opens_thoughts = "", False  # until they are found
        self.markers = self._find_markers(source, list(specials), list(words), strips or {})
        self.closing = self._find_closing()
        self.thoughts_key = self._find_thoughts_key(source)
        self.opens_thoughts = bool(opened_thoughts(self.trial(TRIAL[0], opens=True)))

    def _find_markers(
        self,
        source: str,
        specials: list[str],
        words: list[str],
        strips: Mapping[str, tuple[bool, bool]],
    ) -> Markers:
        """Return the markers among the added tokens: those that the template writes."""
        system = {"role": "system", "content": "c"}
        rendered = self.trial(*TRIAL) + self.trial(TRIAL[0], opens=True)
        rendered += self.trial(system, *TRIAL)
        # "\n\n" and "user" may be added tokens, too: they are no markers
        words = [word for word in words if re.search(r"\w", word) and re.search(r"\W", word)]
        words = [word for word in words if word in source or word in rendered]
        of_turns = [word for word in words if word in rendered and "think" not in word]
        return Markers(specials, words, of_turns, strips)

    def _find_closing(self) -> str:
        """Return what the last answer is followed by, up to markers that follow each other."""
        if self.tagged:
            with suppress(UserError):
                pieces = self.pieces(TRIAL)
                closing = [piece for piece in pieces if piece.special and piece.learned]
                return closing[-1].text if closing else ""
            return ""
        said = {"role": "assistant", "content": BEGIN}
        after = self.trial(TRIAL[0], said).partition(BEGIN)[2]
        found = re.match(rf"(?s:.*?)(?:{self.markers.name.pattern})+", after)
        return found[0] if found else ""

    def _find_thoughts_key(self, source: str) -> str:
        """Return the key of thoughts that are not written as they are when they come as text."""
        probe = PROBES["assistant"]
        text = {"role": "assistant", "content": f"<think>\n{probe}\n</think>\n\nb"}
        as_text = self.trial(TRIAL[0], text)
        for key in (*THOUGHT_KEYS, AS_PARTS):
            if (key if key != AS_PARTS else "thinking") not in source:
                continue
            written = self.trial(TRIAL[0], put_thoughts(TRIAL[1], key, probe))
            # a template that writes a list of parts as it is writes the names in it
            is_list = written.count("thinking") > as_text.count("thinking")
            if as_text and probe in written and written != as_text and not is_list:
                return key
        return ""

    def with_thoughts(self, message: dict) -> dict:
        """Return a message with its thoughts as the template takes them."""
        if not self.thoughts_key or message.get("role") != "assistant":
            return message
        content = message["content"]
        # an answer as it was drawn: the prompt has opened its thoughts
        opened = self.opens_thoughts and "<think>" not in content.partition("</think>")[0]
        found = THOUGHTFUL.fullmatch("<think>" * opened + content)
        if not found:
            return message
        return put_thoughts(message | {"content": found[2]}, self.thoughts_key, found[1])

    def pieces(
        self,
        messages: Sequence[dict],
        add_generation_prompt: bool = False,
        only_last: bool = False,
    ) -> list[Piece]:
        """Return the conversation in pieces. Of a prompt for an answer nothing is learned.

        only_last: nothing but the last answer is learned, which takes less time. Raise UserError if
        the template cannot take the conversation."""
        talk = self.render_input(messages, add_generation_prompt)
        marked = self.text(talk)
        text, spans = MARKS.sub("", marked), []
        if add_generation_prompt:
            return self.markers.cut(text, [])
        if self.tagged:
            # where the marks were, in the text without them
            places = [mark.start() - k for k, mark in enumerate(MARKS.finditer(marked))]
            spans = list(zip(places[::2], places[1::2], strict=True))
            spans = learned_spans(spans, talk.messages)
        else:
            # each answer takes two more renderings: that is why `only_last` exists
            answers = [i for i, m in enumerate(talk.messages) if m.get("role") == "assistant"]
            for i in answers[-1:] if only_last else answers:
                if talk.messages[i].get("learn", True):
                    spans.append(self.answer(text, talk, i))
            self.refuse_results(text, talk, spans)
        return self.markers.cut(text, spans)

    def render_input(self, messages: Sequence[dict], opens: bool = False) -> RenderInput:
        """Return messages, and the tools that they offer, as they go to the template."""
        tools = None
        if self.takes_tools:
            messages, tools = with_tools(messages)
        guarded = [self.markers.guard(message) for message in messages]
        return RenderInput(guarded, self.markers.guarded(tools, self.markers.in_text), opens)

    def left_out(self, messages: Sequence[dict]) -> Counter[str]:
        """Count what the template does not write: thoughts, system messages, calls, results."""
        probed, n_calls, expected = [], 0, Counter()
        talk = self.render_input(messages)
        for message in talk.messages:
            role, content = message["role"], message["content"]
            # A probe that is not in the rendered text shows that what it stood in was left out.
            if role == "assistant":
                content = THOUGHTS.sub(rf"\1{PROBES[role]}\2", content)
            elif role in PROBES and content.strip():
                content = content.rstrip() + PROBES[role]
            if calls := message.get("tool_calls"):
                if content.rpartition("</think>")[2].strip():
                    content = content.rstrip() + PROBES["words"]
                named = [with_probe(call, k) for k, call in enumerate(calls, start=n_calls)]
                message, n_calls = message | {"tool_calls": named}, n_calls + len(calls)
            expected.update(OUR_CHARACTERS.findall(content))
            probed.append(message | {"content": content})
        counts: Counter[str] = Counter()
        if expected or n_calls:
            with suppress(UserError):
                text = self.text(talk.with_messages(*probed))
                for role, what in NOT_WRITTEN.items():
                    counts[what] = expected[PROBES[role]] - text.count(PROBES[role])
                # each by itself: a result may be written with the name of its call
                written = [PROBE_OF_CALL.format(k) in text for k in range(n_calls)]
                counts["calls of tools"] = written.count(False)
        return +counts

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

    def text(self, talk: RenderInput) -> str:
        """Return the conversation as the template writes it, answers marked if it does that."""
        if self.too_slow:  # other conversations would take as long
            raise UserError(self.too_slow)
        messages = [self.with_thoughts(message) for message in talk.messages]
        variables = {"messages": messages, "tools": talk.tools}
        variables["add_generation_prompt"] = talk.opens
        try:
            with time_limit(RENDER_S):
                return self.template.render(**variables, **self.variables)
        except TimeoutError as error:
            self.too_slow = f"tokenizer: the chat template cannot be used: {error}"
            raise UserError(self.too_slow) from None
        except self.errors as error:
            refuses = "the chat template refuses this conversation"
            raise UserError(f"tokenizer: {refuses}: {error}") from None

    def trial(self, *messages: dict, opens: bool = False) -> str:
        """Return `text` of a short conversation, "" if the template refuses it."""
        with suppress(UserError):
            return self.text(RenderInput(list(messages), opens=opens))
        return ""

    def answer(self, text: str, talk: RenderInput, i: int) -> Span:
        """Return where the answer of message i stands in `text`.

        It begins with what the template opens for the model (with a block of thoughts that the
        model does not write itself) and ends with the markers that end the turn."""
        # Render the conversation again with one character, BEGIN, in place of the answer. What
        # stands before and behind it stands before and behind the answer, too.
        before_it, behind_it = talk.messages[:i], talk.messages[i + 1 :]
        others = talk.with_messages(*before_it, *behind_it), i
        if others != self.around[0]:  # those of a pair's two answers are the same
            asked = self.text(talk.with_messages(*before_it, opens=True)) if i else ""
            words = {"role": "assistant", "content": BEGIN}
            try:
                other = self.text(talk.with_messages(*before_it, words, *behind_it))
            except UserError:
                if span := self.call(text, talk, i):
                    return span
                raise
            self.around = (others, asked, other)
        _, asked, other = self.around
        before, found, after = other.partition(BEGIN)
        # If this answer has another block of thoughts than the one that the prompt opens, the model
        # writes the whole block.
        openings = [asked, OPENED.sub("", asked)] if OPENED.search(asked) else [asked]
        openings = [one for one in openings if one] + [before, OPENED.sub("", before)]
        begin = next((len(one) for one in openings if text.startswith(one)), -1)
        end = len(text) - len(after)
        # a template may write other turns differently after this answer: then nothing is certain
        if not found or not text.endswith(after) or not 0 <= begin <= end:
            raise UserError(HIDDEN.format(f"answer {i} begins and ends"))
        if self.closing and text.startswith(self.closing, end):
            return begin, end + len(self.closing)
        # gpt-oss: other answers end otherwise than the last
        ending = self.markers.name.match(text, end)
        return begin, ending.end() if ending else end

    def refuse_results(self, text: str, talk: RenderInput, spans: list[Span]) -> None:
        """Raise UserError if a result of a tool stands within an answer, as Gemma 4 writes it."""
        probe, probed = PROBES["tool"], []
        for message in talk.messages:
            if message["role"] == "tool":
                said = message["content"].rstrip()
                message = message | {"content": said + probe + message["content"][len(said) :]}
            probed.append(message)
        if probed == talk.messages:
            return
        other = self.text(talk.with_messages(*probed))
        if other.replace(probe, "") != text:
            return  # the template reads the results, as JSON perhaps
        places = [found.start() - k for k, found in enumerate(re.finditer(probe, other))]
        if any(begin < place <= end for begin, end in spans for place in places):
            raise UserError(HIDDEN.format("an answer ends and the result of a tool begins"))

    def call(self, text: str, talk: RenderInput, i: int) -> Span | None:
        """Return where the calls of message i stand in `text`, or None if unknown.

        This is for a template that refuses words in their place: Mistral's let words of a user and
        of the assistant alternate. Words in place of the calls, their results and what follows up
        to the user's next turn show where the calls begin."""
        messages = talk.messages
        ending = self.closing.strip()
        if not messages[i].get("tool_calls") or not ending:
            return None
        roles = [message["role"] for message in messages]
        after = roles.index("user", i) if "user" in roles[i:] else len(roles)
        words = {"role": "assistant", "content": BEGIN}
        other = self.text(talk.with_messages(*messages[:i], words, *messages[after:]))
        before = other.partition(BEGIN)[0]
        if not text.startswith(before):
            before = before.rstrip()  # Mistral's writes a space before words, none before calls
        if not text.startswith(before):
            return None
        # the first end of a turn behind the calls that is no text
        unguarded = re.compile(f"(?<!{GUARD}){re.escape(ending)}")
        found = unguarded.search(text, len(before))
        said = text[len(before) : found.end()] if found else ""
        # the conversation up to the calls must end with them, too
        alone = self.text(talk.with_messages(*messages[: i + 1])).rstrip()
        return (len(before), found.end()) if said and alone.endswith(said) else None


def put_thoughts(message: dict, key: str, thoughts: str) -> dict:
    """Return a message without thoughts with these, as ChatTemplate.thoughts_key says."""
    if key != AS_PARTS:
        return message | {key: thoughts}
    text = {"type": "text", "text": message["content"]}
    return message | {"content": [{"type": "thinking", "thinking": thoughts}, text]}


def opened_thoughts(prompt: str) -> str:
    """Return the <think> that a prompt opens for the model, which belongs to the answer, or ""."""
    opened = OPENED.search(prompt)
    return "" if not opened or "</think>" in opened[0] else opened[0]


def with_probe(call: dict, number: int) -> dict:
    function = call["function"]
    name = f"{function['name']}{PROBE_OF_CALL.format(number)}"
    return call | {"function": function | {"name": name}}


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body after so many seconds of this thread's CPU time, or ten times
    as many on the clock: a busy machine is no reason. Only the main thread gets signals."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return

    began, cpu_began = time.monotonic(), time.thread_time()

    # The alarm follows the clock. When it comes, set it again if some of the CPU time is left.
    def stop(number: int, frame: object) -> None:
        left = seconds - (time.thread_time() - cpu_began)
        if left <= 0 or time.monotonic() - began > WAIT * seconds:
            raise TimeoutError(f"it takes more than {seconds} s")
        signal.setitimer(signal.ITIMER_REAL, max(left, 0.01))

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def one_of(names: list[str]) -> str:
    """Return the regular expression of any of these names, the longest that is there."""
    if not names:
        return "(?!)"
    first = "".join(re.escape(c) for c in sorted({name[0] for name in names}))  # tried first: fast
    longest_first = sorted(names, key=len, reverse=True)
    return f"(?=[{first}])(?:{'|'.join(map(re.escape, longest_first))})"


def learned_spans(spans: list[Span], messages: Sequence[dict]) -> list[Span]:
    """Return the spans of the answers that are to be learned. Raise UserError if unknown."""
    # the n-th marked span is that of the n-th answer
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
    """Return why a template cannot be used, "" if it writes short conversations within bounds.

    They reach most of its branches, in a copy of this process that has little time and memory. What
    is left, a loop over what a row says, is stopped by the time limit of `ChatTemplate.text`."""

    from groundup.tokens import sandbox

    def render() -> None:
        template = sandbox.environment().from_string(source)
        talks = [with_tools(talk)[0] for talk in PROBED]
        talks.append([TRIAL[0], put_thoughts(TRIAL[1], AS_PARTS, "t")])
        for talk, tools, prompt in itertools.product(talks, (None, TOOLS), (False, True)):
            values = {"messages": talk, "tools": tools}
            try:
                template.render(**values, add_generation_prompt=prompt, **dict(variables))
            except MemoryError:
                raise
            except Exception:  # it may refuse some of them
                continue

    return why_unusable(render)


# ---- tools -----------------------------------------------------------------------------------

CALL = re.compile(r"(?:\A|\n)<tool_call>\n(.*)\n</tool_call>")
RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
CALL_ID = re.compile(r"[A-Za-z0-9]{9}")  # Mistral's templates take no other


def with_tools(messages: Sequence[dict]) -> tuple[list[dict], list[dict] | None]:
    """Return (messages, tools) as templates that know tools read them.

    row_formats.py writes tools into the system message and calls into the answers, as text. Text
    that is not exactly so is left as it is. A call keeps the row's id if Mistral's templates take
    it, else its id is its number in the conversation; a result has the id of its call."""
    turns, tools = take_tools([one for turn in messages for one in results_of(turn)])
    n_calls, new_ids, waiting = 0, {}, []  # waiting: ids of calls without a result
    for i, turn in enumerate(turns):
        if turn["role"] == "tool":
            # by the row's id of the call, or in the order of the calls
            called = new_ids.get(turn.get("tool_call_id"), "")
            if called in waiting:
                waiting.remove(called)
            else:
                called = waiting.pop(0) if waiting else call_id(n_calls)
            turns[i] = {"role": "tool", "content": turn["content"], "tool_call_id": called}
        said, calls = take_calls(turn)
        if calls:
            # ids of the row, if each call has one
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


def results_of(turn: dict) -> list[dict]:
    """Return a tool's turn as one for each result, without the tags that Hermes' data have, and
    that templates write themselves."""
    found = RESULT.findall(turn["content"]) if turn["role"] == "tool" else []
    if not found or RESULT.sub("", turn["content"]).strip():
        return [turn]
    return [turn | {"content": result} for result in found]


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
