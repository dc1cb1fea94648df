"""JSON mode: which tokens may come next so that a text is one JSON object (RFC 8259).

A token is tried byte by byte. It is drawn as usual, and drawn again among the others if it does not
fit: that is a draw from the probabilities of those that fit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tokenizer import Tokenizer

SPACES = " \t\r\n"
MAX_SPACES = 32  # in a row: some models write them without end
MAX_DEPTH = 100  # of objects and lists in each other
LITERALS = {"t": "true", "f": "false", "n": "null"}
# {state: {kind of the next character: state}}; 1 = from 1 to 9
NUMBERS = {
    "-": {"0": "0", "1": "int"},
    "0": {".": ".", "e": "e"},
    "int": {"0": "int", "1": "int", ".": ".", "e": "e"},
    ".": {"0": "fraction", "1": "fraction"},
    "fraction": {"0": "fraction", "1": "fraction", "e": "e"},
    "e": {"+": "sign", "-": "sign", "0": "exponent", "1": "exponent"},
    "sign": {"0": "exponent", "1": "exponent"},
    "exponent": {"0": "exponent", "1": "exponent"},
}
WHOLE_NUMBERS = ("0", "int", "fraction", "exponent")


class State(NamedTuple):
    """Where in the object a text ends."""

    mode: str = "start"
    rest: str = ""  # of a literal; hexadecimal digits that \\u lacks
    is_key: bool = False  # a string is the name of a value
    stack: str = ""  # what is open: { and [
    n_spaces: int = 0


def advance(state: State, char: str) -> State | None:
    """Return the state after one more character, None if it does not fit.

    char: a byte as a character; those from 0x80 on may stand in strings."""
    mode, rest, is_key, stack, n_spaces = state
    if mode == "string":
        if char == '"':
            return State("colon", stack=stack) if is_key else State("after", stack=stack)
        if char == "\\":
            return state._replace(mode="escape")
        return state if char >= " " else None
    if mode == "escape":
        if char == "u":
            return state._replace(mode="hex", rest="0000")
        return state._replace(mode="string") if char in '"\\/bfnrt' else None
    if mode == "hex":
        if char not in "0123456789abcdefABCDEF":
            return None
        return state._replace(mode="hex" if rest[1:] else "string", rest=rest[1:])
    if mode == "literal":
        if char != rest[0]:
            return None
        return State("literal" if rest[1:] else "after", rest[1:], stack=stack)
    if mode in NUMBERS:
        kind = "1" if char in "123456789" else char.lower()
        if kind in NUMBERS[mode]:
            return State(NUMBERS[mode][kind], stack=stack)
        return advance(State("after", stack=stack), char) if mode in WHOLE_NUMBERS else None
    if char in SPACES and mode != "done":
        return state._replace(n_spaces=n_spaces + 1) if n_spaces < MAX_SPACES else None
    return structure(state, char)


def structure(state: State, char: str) -> State | None:
    """`advance` between strings, numbers and literals."""
    mode, stack = state.mode, state.stack
    if mode == "start":
        return State("key or end", stack="{") if char == "{" else None
    if mode == "colon":
        return State("value", stack=stack) if char == ":" else None
    if mode == "after" and char == ",":
        return State("key" if stack[-1] == "{" else "value", stack=stack)
    if char in "}]":
        ends = mode == "after" or mode == ("key or end" if char == "}" else "value or end")
        if not ends or stack[-1] + char not in ("{}", "[]"):
            return None
        return State("after" if stack[1:] else "done", stack=stack[:-1])
    if mode in ("key", "key or end"):
        return State("string", is_key=True, stack=stack) if char == '"' else None
    if mode not in ("value", "value or end"):
        return None
    if char in "{[" and len(stack) < MAX_DEPTH:
        return State("key or end" if char == "{" else "value or end", stack=stack + char)
    if char == '"':
        return State("string", stack=stack)
    if char in LITERALS:
        return State("literal", LITERALS[char][1:], stack=stack)
    kind = "1" if char in "123456789" else char
    return State({"-": "-", "0": "0", "1": "int"}[kind], stack=stack) if kind in "-01" else None


class JsonText:
    """A text that becomes one JSON object, token by token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.state = tokenizer, State()

    def after(self, token: int) -> State | None:
        """Return the state after a token, None if it does not fit."""
        if token >= self.tokenizer.vocab_size or token in self.tokenizer.special_ids:
            return None
        data = self.tokenizer.pieces.get(token, b"")
        state = self.state if data else None
        for char in data.decode("latin-1"):
            state = state and advance(state, char)
        return state

    def push(self, token: int) -> bool:
        """Take a token; return whether the text ends: it is complete, or nothing fits."""
        self.state = self.after(token)
        return self.state is None or self.state.mode == "done"

    def first(self, orders: list[Tensor]) -> int | None:
        """Return the first id that fits, None in a vocabulary without the characters of JSON."""
        ids = (token for order in orders for token in order.tolist())
        return next(filter(self.after, ids), None)


def drawn_orders(
    logits: list[Tensor], draws: bool, generator: torch.Generator | None
) -> list[Tensor]:
    """Return ids in the order in which they are drawn without replacement, for logits (V,) each.

    draws: by their probabilities, else the likeliest first. Ids at -inf are left out."""
    orders = []
    for x in logits:
        keys = x
        if draws:  # the exponential race, see sampling.choose
            noise = torch.empty_like(x).exponential_(generator=generator)
            keys = x - noise.log()
        n = int((x > -torch.inf).sum())
        orders.append(keys.argsort(descending=True)[:n])
    return orders
