"""The parts of a text that grows: stop strings, thoughts, calls of tools.

Each class takes the text piece by piece. What may become one of its marks is held back.
"""

import json
import re
import secrets
from collections.abc import Sequence

from groundup.tokens.templates import CALL_ID


class StopStrings:
    """Finds strings in a growing text (Knuth, Morris and Pratt, 1977).

    The time for a character does not depend on the length of the strings."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words
        self.matched = [0] * len(words)  # characters of each with which the text ends
        # borders[i][n - 1]: the longest beginning of word[:n] that also ends it, but not all of it;
        # known for the n that have matched so far
        self.borders: list[list[int]] = [[0] for _ in words]

    def push(self, char: str) -> str:
        """Return the longest of the strings that the text now ends with, "" if there is none."""
        found = ""
        for i, (word, borders) in enumerate(zip(self.words, self.borders, strict=True)):
            n = longer(word, borders, self.matched[i], char)
            if n > len(borders):
                borders.append(longer(word, borders, borders[-1], char))
            if n == len(word):
                found = max(found, word, key=len)
                n = borders[n - 1]
            self.matched[i] = n
        return found

    @property
    def n_pending(self) -> int:
        """Characters at the end of the text that may become one of the strings."""
        return max(self.matched, default=0)


def longer(word: str, borders: list[int], n: int, char: str) -> int:
    """Return how much of `word` a text ends with that ended with word[:n] before `char`."""
    while n and word[n] != char:
        n = borders[n - 1]
    return n + (word[n] == char)


def n_pending(text: str, marks: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may begin one of these short marks."""
    begun = (k for mark in marks for k in range(1, len(mark)) if text.endswith(mark[:k]))
    return max(begun, default=0)


class ThoughtReader:
    """Divides an answer into thoughts, <think>...</think> at its beginning, and what is said."""

    OPEN, CLOSE = "<think>", "</think>"

    def __init__(self, opened: bool) -> None:
        """opened: whether the prompt ends with <think>, which the answer then lacks."""
        self.state = "thinking" if opened else "beginning"  # then between, saying
        self.pending = ""

    def push(self, text: str, last: bool) -> tuple[str, str]:
        """Return (more thoughts, more of what is said)."""
        self.pending += text
        if self.state == "beginning":
            begin = self.pending.lstrip()
            if not last and self.OPEN.startswith(begin):
                return "", ""
            thinks = begin.startswith(self.OPEN)
            self.state = "thinking" if thinks else "saying"
            self.pending = begin.removeprefix(self.OPEN) if thinks else self.pending
        thoughts = ""
        if self.state == "thinking":
            thoughts, close, rest = self.pending.partition(self.CLOSE)
            if not close:
                keep = 0 if last else n_pending(thoughts, [self.CLOSE])
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

    Three forms are calls: <tool_call>{...}</tool_call> (Hermes, Qwen, ours), {...} as the whole
    answer (Llama 3), [TOOL_CALLS] and a list (Mistral). A list may also be the whole answer."""

    MARKS = ("<tool_call>", "[TOOL_CALLS]")
    MARK = re.compile("|".join(map(re.escape, MARKS)))
    CLOSE, SPACE = re.compile(r"\s*(?:</tool_call>)?\s*"), re.compile(r"\s*")

    def __init__(self) -> None:
        self.pending = ""
        self.said = False  # whether something was said already

    def push(self, text: str, last: bool) -> tuple[str, list[dict]]:
        """Return (more of what is said, calls); calls come with the last piece only."""
        self.pending += text
        if last:
            return self.divide(self.pending)
        if not self.said and self.pending.lstrip()[:1] in ("", "{", "["):
            return "", []
        mark = self.MARK.search(self.pending)
        if mark:
            cut = mark.start()
        else:
            cut = len(self.pending) - n_pending(self.pending, self.MARKS)
        text, self.pending = self.pending[:cut], self.pending[cut:]
        self.said |= bool(text)
        return text, []

    def divide(self, text: str) -> tuple[str, list[dict]]:
        """Return (what is said, calls). A call that cannot be read makes all of it text."""
        first = "" if self.said else text.lstrip()
        is_bare = first[:1] in ("{", "[") and not self.MARK.match(first)
        begin = self.SPACE.match(text) if is_bare else self.MARK.search(text)
        said, calls, end = "", [], 0
        while begin:
            try:
                value, after = STRICT.raw_decode(text, self.SPACE.match(text, begin.end()).end())
                found = calls_in(value)
            except (ValueError, RecursionError):
                found = []
            if not found:
                return text, []
            said += text[end : begin.start()]
            calls += found
            end = self.CLOSE.match(text, after).end()
            begin = None if is_bare else self.MARK.search(text, end)
        rest = text[end:]
        if not calls or is_bare and rest:
            return text, []
        return said + rest if rest else said.rstrip(), calls


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


STRICT = json.JSONDecoder(parse_constant=refuse_constant)  # without NaN


def calls_in(value: object) -> list[dict]:
    """Return the calls in a JSON object or list of them in OpenAI's form, [] if it is none."""
    calls = []
    for call in value if isinstance(value, list) else [value]:
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", call.get("parameters")) if isinstance(name, str) else None
        if isinstance(arguments, str):  # JSON within JSON, as in OpenAI's own form
            arguments = STRICT.decode(arguments or "{}")
        if not isinstance(arguments, dict):
            return []
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)  # 1e999 is infinite
        function = {"name": name, "arguments": written}
        own = call.get("id")  # Mistral's models write one, which the result is to have
        is_own = isinstance(own, str) and CALL_ID.fullmatch(own)
        calls.append({
            "id": own if is_own else f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": function,
        })
    return calls
