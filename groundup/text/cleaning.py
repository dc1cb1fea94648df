"""Clean a text before the quality rules see it: control characters, zero-width characters, white space, Unicode forms.

Also tells English ("en") and Chinese ("zh") from other languages ("other"), by the script of the characters.
"""

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class Cleaning:
    """Which steps `clean` takes beyond line ends, controls, zero-width characters and NFC."""

    white_space: bool = True  # no blanks at line ends, at most one blank line and 256 white space characters in a row
    punctuation: bool = False  # Chinese: full-width marks between Chinese characters, no mark twice in a row


CURATED = Cleaning(white_space=False)
WEB = Cleaning()
CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f]")
SEPARATORS = "\x0b\x0c\x1c\x1d\x1e\x1f"  # of lines, pages, fields: controls that become a line end
ZERO_WIDTH = re.compile("[\ufeff\u200b\u2060]")
JOINERS = re.compile("[\u200c\u200d]")
VIRAMA = 9  # combining class of the marks that take the vowel from a letter
BLANKS = " \t\xa0\u3000"
TRAILING_BLANKS = re.compile(f"(?<![{BLANKS}])[{BLANKS}]+$", re.MULTILINE)
LONG_RUN = re.compile(r"(?<!\s)(\s{256})\s+")
HAN_RANGES = ((0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0x20000, 0x323B0))
HAN = "".join(f"{chr(begin)}-{chr(end - 1)}" for begin, end in HAN_RANGES)
HALF_WIDTH = re.compile(f"(?<=[{HAN}])[,.!?:;()](?=[{HAN}])")
FULL_WIDTH = dict(zip(",.!?:;()", "\uff0c\u3002\uff01\uff1f\uff1a\uff1b\uff08\uff09", strict=True))
REPEATED_MARKS = re.compile("([\u3002\uff01\uff1f\uff0c\u3001])\\1+")
SPACE, OTHER, LETTERS, KANA, ACCENTED, LATIN, HAN_CLASS = range(7)  # classes of characters; accented Latin letters
N_CLASSES = 7


def clean(text: str, steps: Cleaning) -> str:
    """Return the cleaned text; cleaning it again changes nothing. The check before a step is faster than the step."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = CONTROLS.sub(lambda control: "\n" if control[0] in SEPARATORS else "", text)
    if not text.isascii():
        text = ZERO_WIDTH.sub("", text)
        text = JOINERS.sub(lambda joiner: joiner[0] if joins(joiner.string, joiner.start()) else "", text)
        text = unicodedata.normalize("NFC", text)  # full-width forms stay
    if steps.white_space:
        if text[-1:] in BLANKS or any(blank + "\n" in text for blank in BLANKS):
            text = TRAILING_BLANKS.sub("", text)
        if "\n\n\n" in text:
            text = re.sub("\n{3,}", "\n\n", text)
        if len(text) > 256 and re.search(r"\s{8}", text[::32]):  # 257 hold 8 of every 32nd
            text = LONG_RUN.sub(r"\1", text)  # tiktoken fails at about a million
        text = text.strip()
    if steps.punctuation and language(text) == "zh":
        text = HALF_WIDTH.sub(lambda mark: FULL_WIDTH[mark[0]], text)
        text = REPEATED_MARKS.sub(r"\1", text)
    return text


def joins(text: str, i: int) -> bool:
    """Return whether the zero-width joiner or non-joiner text[i] stands in an emoji, between letters of a script that
    joins letters, as in Persian and Hindi, or behind a virama, which it gives another form, as in Malayalam."""
    before, after = text[i - 1 : i], text[i + 1 : i + 2]
    if before and unicodedata.combining(before) == VIRAMA:
        return True
    if not before or not after or any(begin <= ord(c) < end for c in (before, after) for begin, end in HAN_RANGES):
        return False
    kinds = unicodedata.category(before), unicodedata.category(after)
    if kinds[0][0] in "LM" and kinds[1][0] in "LM":
        return True
    # an emoji may end in a variation selector, a skin colour or a key cap
    # and go on with an arrow, which is Sm
    begins = kinds[0] in ("So", "Sk", "Me") or before == "\ufe0f"
    return text[i] == "\u200d" and begins and kinds[1] in ("So", "Sm")


@lru_cache(maxsize=1)
def character_classes() -> np.ndarray:
    """Return the class of each code point, (0x110000,) uint8."""
    characters = [chr(code) for code in range(0x20000)]  # beyond are Han alone: no other letters, no white space
    classes = np.full(0x110000, OTHER, np.uint8)
    classes[:0x20000][[character.isalpha() for character in characters]] = LETTERS
    classes[:0x20000][[character.isspace() for character in characters]] = SPACE
    of_ranges = {LATIN: ((0, 0x80), (0xFF21, 0xFF5B)), ACCENTED: ((0x80, 0x250), (0x1E00, 0x1F00))}
    of_ranges[KANA] = ((0x3040, 0x3100), (0x31F0, 0x3200), (0xFF66, 0xFFA0))
    for kind, ranges in of_ranges.items():  # Latin also in its full-width form
        for begin, end in ranges:
            classes[begin:end][classes[begin:end] == LETTERS] = kind
    for begin, end in HAN_RANGES:
        classes[begin:end] = HAN_CLASS
    return classes


def code_points(text: str) -> np.ndarray:
    """Return the code points of a text, (n,) uint32."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def language(text: str) -> str:
    """Return zh, en or other, see `language_of`."""
    if text.isascii():
        return "en"
    return language_of(np.bincount(character_classes()[code_points(text)], minlength=N_CLASSES))


def language_of(class_counts: np.ndarray) -> str:
    """Return the language of a text that has so many characters of each class, (N_CLASSES,).

    zh: at least 30 % of the letters are Chinese, and of them and kana at most 10 % kana. Else other: more letters of
    other scripts than Latin ones, or more than 0.5 % of the Latin letters are accented (German has 2 %, French 4 %,
    English 0.05 %). Else en, and so is what has no letters. A language without accents, such as Indonesian, passes for
    English. The shares are our own."""
    letters, kana, accented, latin, han = class_counts[LETTERS:].tolist()
    latin += accented
    if han and han >= 0.3 * (letters + kana + latin + han) and kana <= 0.1 * (han + kana):
        return "zh"
    return "other" if letters + kana > latin or accented > 0.005 * latin else "en"
