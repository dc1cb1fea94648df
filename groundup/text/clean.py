"""Clean a text before the quality rules see it: control characters, zero-width characters, white
space, Unicode forms.

Also tell English ("en") and Chinese ("zh") from other languages ("other") by their characters.
"""

import re
import unicodedata
from functools import lru_cache

import numpy as np

CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f]")
CONTROL_BYTES = bytes(code for code in range(128) if CONTROLS.match(chr(code)))
SEPARATORS = "\x0b\x0c\x1c\x1d\x1e\x1f"  # control characters that become a line end
ZERO_WIDTH = "\ufeff\u200b\u2060"
JOINERS = re.compile("[\u200c\u200d]")
VIRAMA = 9  # combining class of the marks that remove a letter's vowel
BLANKS = " \t\xa0\u3000"
LONG_RUN = re.compile(r"(?<!\s)(\s{256})\s+")
HAN_RANGES = ((0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0x20000, 0x323B0))
HAN = "".join(f"{chr(begin)}-{chr(end - 1)}" for begin, end in HAN_RANGES)
# A mark between Chinese characters, or between one and a quotation or title. Of repeated marks only
# these: ... and :: mean something else.
MARK = r"(?:,+|!+|\?+|[.:;])"
OPENING, CLOSING = "\u201c\u2018\u300a\u300c\u300e", "\u201d\u2019\u300b\u300d\u300f"
HALF_WIDTH = re.compile(
    f"(?<=[{HAN}]){MARK}(?=[{HAN}{OPENING}])|(?<=[{CLOSING}]){MARK}(?=[{HAN}])"
    f"|(?<=[{HAN}])[()](?=[{HAN}])"
)
FULL_WIDTH = dict(zip(",.!?:;()", "\uff0c\u3002\uff01\uff1f\uff1a\uff1b\uff08\uff09", strict=True))
REPEATED_MARKS = re.compile("([\u3002\uff01\uff1f\uff0c\u3001])\\1+")
# Classes of characters; ACCENTED are Latin letters.
SPACE, OTHER, LETTERS, KANA, ACCENTED, LATIN, HAN_CLASS = range(7)
N_CLASSES = 7


def clean(text: str, white_space: bool = True, punctuation: bool = False) -> str:
    """Return the text with line ends as \\n, without control and zero-width characters, in NFC.
    Cleaning it again changes nothing.

    white_space: also remove blanks at line ends, all but one blank line, and all but 256 white
    space characters in a row. punctuation: also write Chinese marks between Chinese characters,
    quotations and titles in full width, and none twice."""
    # The quick checks before the steps are faster than the steps.
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    raw = text.encode("utf-8", "surrogatepass")
    if len(raw.translate(None, CONTROL_BYTES)) < len(raw):
        text = CONTROLS.sub(lambda control: "\n" if control[0] in SEPARATORS else "", text)
    if not text.isascii():
        for mark in ZERO_WIDTH:
            text = text.replace(mark, "")
        if "\u200c" in text or "\u200d" in text:
            text = JOINERS.sub(
                lambda found: found[0] if joins(found.string, found.start()) else "", text
            )
        text = unicodedata.normalize("NFC", text)  # full-width forms stay
    if white_space:
        text = "\n".join([line.rstrip(BLANKS) for line in text.split("\n")])
        if "\n\n\n" in text:
            text = re.sub("\n{3,}", "\n\n", text)
        # A run of 257 has eight in a row among every 32nd character.
        if len(text) > 256 and re.search(r"\s{8}", text[::32]):
            text = LONG_RUN.sub(r"\1", text)  # tiktoken fails at about a million
        text = text.strip()
    if punctuation and language(text) == "zh":
        text = HALF_WIDTH.sub(lambda mark: FULL_WIDTH[mark[0][0]], text)
        text = REPEATED_MARKS.sub(r"\1", text)
    return text


def joins(text: str, i: int) -> bool:
    """Return whether the zero-width joiner or non-joiner text[i] is a part of the text: in an
    emoji, between letters or own digits as in Persian, or after a virama as in Malayalam."""
    before, after = text[i - 1 : i], text[i + 1 : i + 2]
    if before and unicodedata.combining(before) == VIRAMA:
        return True
    if not before or not after or is_han(before) or is_han(after):
        return False
    kinds = unicodedata.category(before), unicodedata.category(after)
    pairs = zip(kinds, (before, after), strict=True)
    if all(kind[0] in "LM" or (kind == "Nd" and not one.isascii()) for kind, one in pairs):
        return True
    # An emoji may end in a variation selector, a skin colour or a key cap,
    # and continue with an arrow, which is Sm.
    begins = kinds[0] in ("So", "Sk", "Me") or before == "\ufe0f"
    return text[i] == "\u200d" and begins and kinds[1] in ("So", "Sm")


def is_han(character: str) -> bool:
    return any(begin <= ord(character) < end for begin, end in HAN_RANGES)


@lru_cache(maxsize=1)
def character_classes() -> np.ndarray:
    """Return the class of each code point, (0x110000,) uint8."""
    # Beyond 0x20000 there are no letters but Han, and no white space.
    characters = [chr(code) for code in range(0x20000)]
    classes = np.full(0x110000, OTHER, np.uint8)
    classes[:0x20000][[character.isalpha() for character in characters]] = LETTERS
    classes[:0x20000][[character.isspace() for character in characters]] = SPACE
    of_ranges = {
        LATIN: ((0, 0x80), (0xFF21, 0xFF5B)),  # also full-width
        ACCENTED: ((0x80, 0x250), (0x1E00, 0x1F00)),
        KANA: ((0x3040, 0x3100), (0x31F0, 0x3200), (0xFF66, 0xFFA0)),
    }
    for kind, ranges in of_ranges.items():
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
    """Return the language of a text, given its number of characters of each class (N_CLASSES,).

    zh: at least 30 % of the letters are Chinese, and kana are at most 10 % of Han and kana.
    other: more letters of other scripts than Latin ones, or more than 0.5 % of the Latin letters
    are accented (German has 2 %, French 4 %, English 0.05 %). en: the rest, also text without
    letters. A language without accents, such as Indonesian, counts as English. The shares are own.
    """
    letters, kana, accented, latin, han = class_counts[LETTERS:].tolist()
    latin += accented
    if han and han >= 0.3 * (letters + kana + latin + han) and kana <= 0.1 * (han + kana):
        return "zh"
    return "other" if letters + kana > latin or accented > 0.005 * latin else "en"
