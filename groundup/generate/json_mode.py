"""JSON mode: which tokens may come next so that a text is one JSON object (RFC 8259).

A token is tried byte by byte. It is drawn as usual, and drawn again among the others if it does not
fit: that is a draw from the probabilities of those that fit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tokenizer import Tokenizer

SPACES = " \t\r\n"
# Some models write spaces without end. Between two symbols a line break, of two characters at most,
# and its indentation have room; none stands before the object.
MAX_SPACES, MAX_BREAK = 32, 2
MAX_DEPTH = 100  # of objects and lists in each other

# A grammar of JSON. What a text still lacks is a stack of symbols. The next character replaces the
# first of them as RULES says. A symbol without a rule, such as ":" or "e", is that character.
on = dict.fromkeys
DIGITS, EXPONENT = "0123456789", on("eE", "X")
VALUE = {"{": "K", "[": "L", '"': "S", "t": "rue", "f": "alse", "n": "ull"}
NUMBER = {"0": "Z"} | on("123456789", "Q")
RULES = {
    "O": {"{": "K"},  # the object
    "K": {'"': "S:VM", "}": ""},  # its first key, or its end
    "N": {'"': "S:VM"},  # a key
    "M": {",": "N", "}": ""},  # behind a value of an object
    "V": VALUE | {"-": "P"} | NUMBER,
    "I": {",": "VI", "]": ""},  # behind an item of a list
    "S": on(map(chr, range(32, 256)), "S") | {'"': "", "\\": "ES"},  # in a string
    "E": on('"\\/bfnrt', "") | {"u": "HHHH"},  # behind a backslash
    "H": on(DIGITS + "abcdefABCDEF", ""),
    # Of a number, behind: a minus, a leading 0, digits, a point, digits behind it
    "P": NUMBER,
    "Z": {".": "F"} | EXPONENT,
    "Q": on(DIGITS, "Q") | {".": "F"} | EXPONENT,
    "F": on(DIGITS, "G"),
    "G": on(DIGITS, "G") | EXPONENT,
    # e, its sign, its digits
    "X": on("+-", "Y") | on(DIGITS, "W"),
    "Y": on(DIGITS, "W"),
    "W": on(DIGITS, "W"),
}
# The first item of a list, or its end
RULES["L"] = {char: lacks + "I" for char, lacks in RULES["V"].items()} | {"]": ""}
WHOLE_NUMBERS = ("Z", "Q", "G", "W")  # these may end before any character
OPEN, BETWEEN = "KNMLI", "KNMLIV:"  # symbols of an open object or list; where spaces may stand


class State(NamedTuple):
    """Where in the object a text ends."""

    lacks: str = "O"  # "" = the object is complete
    n_spaces: int = 0


def advance(state: State, char: str) -> State | None:
    """Return the state after one more character, None if it does not fit.

    char: a byte as a character; those from 0x80 on may stand in strings."""
    lacks, n_spaces = state
    if lacks.startswith(WHOLE_NUMBERS) and char not in RULES[lacks[0]]:
        lacks = lacks[1:]
    if not lacks:
        return None
    symbol = lacks[0]
    if char in SPACES and symbol in BETWEEN:
        most = MAX_BREAK if char in "\r\n" else MAX_SPACES
        return State(lacks, n_spaces + 1) if n_spaces < most else None
    new = RULES.get(symbol, {symbol: ""}).get(char)
    if new is None:
        return None
    lacks = new + lacks[1:]
    return State(lacks) if sum(map(lacks.count, OPEN)) <= MAX_DEPTH else None


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
        return self.state is None or not self.state.lacks

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
