"""What a text loses before it is judged: control characters, needless white space, one of two forms of a character."""

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class Cleaning:
    """The steps of `clean`, in their order. Line ends always become "\\n"."""

    controls: bool = True  # drop NUL and the other control characters of ASCII, less tab and line end
    zero_width: bool = True  # drop byte order marks and zero-width characters that join nothing
    nfc: bool = True  # one form for characters that Unicode writes in two; full-width forms stay
    trailing_blanks: bool = True
    blank_lines: bool = True  # at most one between two lines
    white_space_runs: bool = True  # at most 256 characters of white space: tiktoken fails at about a million
    strip: bool = True
    punctuation: bool = False  # full-width marks between Chinese characters, and no mark twice


CURATED = Cleaning(trailing_blanks=False, blank_lines=False, white_space_runs=False, strip=False)
WEB = Cleaning()
CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f]")
ZERO_WIDTH = re.compile("[\ufeff\u200b\u2060]+")
JOINERS = re.compile("[\u200c\u200d]")
BLANKS = " \t\xa0\u3000"
BLANKS_AT_END = re.compile(f"(?<![{BLANKS}])[{BLANKS}]+$", re.MULTILINE)
LINE_ENDS = re.compile("\n{3,}")
LONG_RUN = re.compile(r"(?<!\s)(\s{256})\s+")
EIGHT_SPACES = re.compile(r"\s{8}")
HAN_RANGES = ((0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0x20000, 0x323B0))
HAN = "".join(f"{chr(begin)}-{chr(end - 1)}" for begin, end in HAN_RANGES)
HALF_WIDTH = re.compile(f"(?<=[{HAN}])[,.!?:;()](?=[{HAN}])")
FULL_WIDTH = dict(zip(",.!?:;()", "\uff0c\u3002\uff01\uff1f\uff1a\uff1b\uff08\uff09", strict=True))
SAME_MARKS = re.compile("([\u3002\uff01\uff1f\uff0c\u3001])\\1+")


def clean(text: str, steps: Cleaning) -> str:
    """The text after these steps; to clean it again changes nothing. Most texts need nothing, and cost a look each."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if steps.controls and CONTROLS.search(text):
        text = CONTROLS.sub("", text)
    if not text.isascii():
        if steps.zero_width:
            text = drop_zero_width(text)
        if steps.nfc and not unicodedata.is_normalized("NFC", text):
            text = unicodedata.normalize("NFC", text)
    if steps.trailing_blanks and has_trailing_blanks(text):
        text = BLANKS_AT_END.sub("", text)
    if steps.blank_lines and "\n\n\n" in text:
        text = LINE_ENDS.sub("\n\n", text)
    if steps.white_space_runs and may_have_long_run(text):
        text = LONG_RUN.sub(r"\1", text)
    if steps.strip:
        text = text.strip()
    if steps.punctuation and language(text) == "zh":
        text = HALF_WIDTH.sub(lambda mark: FULL_WIDTH[mark[0]], text)
        text = SAME_MARKS.sub(r"\1", text)
    return text


def drop_zero_width(text: str) -> str:
    """Without zero-width characters, but for joiners where they matter: in emoji, and between letters of scripts that
    join them, as Persian and Hindi do."""
    if "\ufeff" in text or "\u200b" in text or "\u2060" in text:
        text = ZERO_WIDTH.sub("", text)
    if "\u200c" in text or "\u200d" in text:
        text = JOINERS.sub(lambda joiner: joiner[0] if joins(text, joiner.start()) else "", text)
    return text


def joins(text: str, i: int) -> bool:
    before, after = text[i - 1 : i], text[i + 1 : i + 2]
    if not before or not after or is_han(before) or is_han(after):
        return False
    kinds = unicodedata.category(before), unicodedata.category(after)
    if kinds[0][0] in "LM" and kinds[1][0] in "LM":
        return True
    # symbols; a variation selector, a skin colour or a key cap may stand behind one
    return text[i] == "\u200d" and (kinds[0] in ("So", "Sk", "Me") or before == "\ufe0f") and kinds[1] == "So"


def is_han(character: str) -> bool:
    return any(begin <= ord(character) < end for begin, end in HAN_RANGES)


def has_trailing_blanks(text: str) -> bool:
    return text[-1:] in BLANKS or any(blank + "\n" in text for blank in (BLANKS[:2] if text.isascii() else BLANKS))


def may_have_long_run(text: str) -> bool:
    """A run of more than 256 holds eight neighbours of every 32nd character."""
    return len(text) > 256 and bool(EIGHT_SPACES.search(text[::32]))


SPACE, OTHER, LETTERS, LATIN, HAN_CLASS = range(5)


@lru_cache(maxsize=1)
def character_classes() -> np.ndarray:
    """uint8 (0x110000,): what a character is. Made once for each process."""
    characters = [chr(code) for code in range(0x20000)]  # beyond are Han alone: no other letters, no white space
    classes = np.full(0x110000, OTHER, np.uint8)
    n = len(characters)
    classes[:n][np.fromiter(map(str.isalpha, characters), bool, n)] = LETTERS
    classes[:n][np.fromiter(map(str.isspace, characters), bool, n)] = SPACE
    letters = classes == LETTERS
    for begin, end in ((0, 0x250), (0x1E00, 0x1F00), (0xFF21, 0xFF5B)):  # Latin, its extensions, its full-width form
        classes[begin:end][letters[begin:end]] = LATIN
    for begin, end in HAN_RANGES:
        classes[begin:end] = HAN_CLASS
    return classes


def code_points(text: str) -> np.ndarray:
    """uint32 (n,)"""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def language(text: str) -> str:
    """zh if at least three in ten of its Chinese characters and Latin letters are Chinese, else en."""
    if text.isascii():
        return "en"
    counts = np.bincount(character_classes()[code_points(text)], minlength=HAN_CLASS + 1).tolist()
    han, latin = counts[HAN_CLASS], counts[LATIN]
    return "zh" if han and han / (han + latin) >= 0.3 else "en"
