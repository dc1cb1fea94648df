"""Quality rules: which texts to keep, decided for each text alone, without a model.

RULES is the table of what is measured, with the limits and their sources, for English ("en"),
Chinese ("zh") and any other language ("other"). The last has only rules that need no words, or
hold for texts with and without spaces.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import count
from typing import NamedTuple

import numpy as np

from groundup.errors import UserError, refuse
from groundup.files.functions import load_function
from groundup.text.clean import (
    HAN_CLASS,
    LETTERS,
    N_CLASSES,
    SPACE,
    character_classes,
    code_points,
    language_of,
)

# ---- the table -----------------------------------------------------------------------------------


class Rule(NamedTuple):
    """Drops a text whose measure is below, or above, the limit of its language."""

    name: str
    sign: str  # < or >
    en: float | None  # None = no such rule for this language
    zh: float | None
    other: float | None
    measure: Callable[["Features"], float] | str  # a field of Grams if n is set
    n: int = 0  # of n-grams
    quality: str = "web"  # or text: web and curated; all: conversations and pairs, too


def ratio(part: float, whole: float) -> float:
    """Return part / whole, 0 if there is nothing to divide by."""
    return float(part / whole) if whole else 0.0


def mean(values: list[float]) -> float:
    return ratio(sum(values), len(values))


def duplicates(parts: list[str]) -> float:
    """Return the ratio of parts that occurred before."""
    return ratio(len(parts) - len(set(parts)), len(parts))


def duplicate_characters(parts: list[str]) -> float:
    """Return the ratio of characters in parts that occurred before."""
    total = sum(map(len, parts))
    return ratio(total - sum(map(len, set(parts))), total)


STOP_WORDS = {
    "en": ("the", "be", "to", "of", "and", "that", "have", "with"),  # Gopher
    "zh": tuple(
        "\u7684\u5e74\u5728\u6708\u662f\u548c\u65e5\u4e86\u65bc\u70ba\u6709"
        "\u88ab\u4eba\u4e2d\u4e3a\u4ed6\u8207\u5f8c\u4e5f\u800c\u7531"
    ),  # FineWeb-2, Chinese
}
STOP_WORD_FORMS = {
    form: word for word in STOP_WORDS["en"] for form in (word, word.capitalize(), word.upper())
}
BULLETS = frozenset("-*\u2022\u2023\u25b6\u25c6\u25cf\u25cb\u25e6\u25a0\u25a1\u25aa\u25ab\u00b7")
ELLIPSES = ("...", "\u2026")
TERMINAL = frozenset(
    ".!?\"'\u201d\u2019\u2026\u3002\uff01\uff1f\uff1b\u300d\u300f"
)  # C4's, with those of Chinese
LETTER = re.compile(r"[^\W\d_]")

# In the order in which they are tried; only the first that a text breaks is counted. A word is what
# white space separates. In Chinese two characters count as one word (own), so n-grams of words
# become 2n-grams of characters. The limits of "other" are Gopher's where they do not depend on a
# language, or own. Sources:
#   Gopher: Rae et al. 2021, table A1, as in datatrove's gopher_quality_filter and
#   gopher_repetition_filter.
#   FineWeb: Penedo et al. 2024, as in datatrove's fineweb_quality_filter.
#   FineWeb-2: Penedo et al. 2025, cmn_Hani.yml; counts of words there come from a segmenter.
#   CWT: ChineseWebText, Chen et al. 2023, preprocess.py.
# fmt: off
RULES = (
    # own; left by a wrong decoding
    Rule("replacement_characters", ">", 0.001, 0.001, 0.001,
         lambda f: ratio(f.text.count("\ufffd"), len(f.text)), quality="all"),
    # words, Gopher; characters, CWT
    Rule("min_length", "<", 50, 200, 200, lambda f: f.length(), quality="text"),
    # words, Gopher; characters, own
    Rule("max_length", ">", 100_000, 200_000, 600_000, lambda f: f.length(), quality="text"),
    # CWT
    Rule("han_share", "<", None, 0.30, None,
         lambda f: ratio(f.class_counts[HAN_CLASS], f.n_visible)),
    Rule("mean_line_length", "<", None, 10, None, lambda f: mean([*map(len, f.lines)])),
    # Gopher
    Rule("short_words", "<", 3, None, None, lambda f: f.word_length()),
    Rule("long_words", ">", 10, None, None, lambda f: f.word_length()),
    Rule("hash_signs", ">", 0.1, 0.1, 0.1, lambda f: f.per_word("#")),
    Rule("ellipses", ">", 0.1, 0.1, 0.1, lambda f: f.per_word(*ELLIPSES)),
    Rule("bullet_lines", ">", 0.9, 0.9, 0.9,
         lambda f: mean([line[0] in BULLETS for line in f.lines])),
    Rule("ellipsis_lines", ">", 0.3, 0.3, 0.3,
         lambda f: mean([line.endswith(ELLIPSES) for line in f.lines])),
    # words with a letter, Gopher; characters, own
    Rule("letters", "<", 0.8, 0.6, 0.5, lambda f: f.letters()),
    # Gopher; FineWeb-2
    Rule("stop_words", "<", 2, 2, None, lambda f: f.stop_words()),
    # FineWeb; FineWeb-2
    Rule("terminal_punctuation", "<", 0.12, 0.106, None,
         lambda f: mean([line[-1] in TERMINAL for line in f.lines])),
    Rule("short_lines", ">", 0.67, None, None, lambda f: mean([len(line) <= 30 for line in f.lines])),
    Rule("line_ends", ">", 0.3, 0.178, 0.3, lambda f: f.per_word("\n")),
    # Gopher; FineWeb-2
    Rule("duplicate_lines", ">", 0.30, 0.287, 0.30, lambda f: duplicates(f.lines)),
    # Gopher
    Rule("duplicate_line_characters", ">", 0.20, None, 0.20,
         lambda f: duplicate_characters(f.lines)),
    # FineWeb; FineWeb-2
    Rule("any_duplicate_lines", ">", 0.01, 0.1, 0.1, lambda f: duplicate_characters(f.lines)),
    # Gopher
    Rule("duplicate_paragraphs", ">", 0.30, 0.30, 0.30, lambda f: duplicates(f.paragraphs)),
    Rule("duplicate_paragraph_characters", ">", 0.20, 0.20, 0.20,
         lambda f: duplicate_characters(f.paragraphs)),
    # Gopher; FineWeb-2
    Rule("top_2_grams", ">", 0.20, 0.256, 0.20, "top", 2),
    Rule("top_3_grams", ">", 0.18, 0.201, 0.18, "top", 3),
    Rule("top_4_grams", ">", 0.16, 0.171, 0.16, "top", 4),
    Rule("duplicate_5_grams", ">", 0.15, 0.198, 0.15, "covered", 5),
    Rule("duplicate_6_grams", ">", 0.14, 0.182, 0.14, "covered", 6),
    Rule("duplicate_7_grams", ">", 0.13, 0.167, 0.13, "covered", 7),
    Rule("duplicate_8_grams", ">", 0.12, 0.154, 0.12, "covered", 8),
    Rule("duplicate_9_grams", ">", 0.11, 0.14, 0.11, "covered", 9),
    Rule("duplicate_10_grams", ">", 0.10, 0.127, 0.10, "covered", 10),
    # CWT
    Rule("repeated_13_characters", ">", None, 0.5, None, "repeats", 13),
)
# fmt: on
ENOUGH = min(rule.en for rule in RULES if rule.en and rule.n)  # the lowest limit of n-gram rules
RULE_NAMES = (*(rule.name for rule in RULES), "keep")
# Lengths of n-grams, in words or in characters.
GRAMS = {"en": tuple(range(2, 11)), "zh": (4, 6, 8, 10, 12, 13, 14, 16, 18, 20)}
GRAMS["other"] = GRAMS["en"]
# Characters (own); a book is one text. The least is not for texts that are made of chats.
CURATED_LENGTH = {"min_length": 15, "max_length": math.inf}


# ---- the setting `rules` -------------------------------------------------------------------------


class Bounds(NamedTuple):
    """A range of numbers, both ends included."""

    least: float = float("-inf")
    most: float = float("inf")


class Changes(NamedTuple):
    """What the setting `rules` changes, see `parse_rules`."""

    switched: dict[str, bool]  # rules by name: on or off
    length: Bounds = Bounds()  # of a text, in characters; an open end leaves the rule its own
    question_length: Bounds | None = None  # of a conversation's or pair's first question
    keep: str = ""  # file.py:function
    punctuation: bool = False  # clean Chinese punctuation


BOUND = r"(?:(-?\d*\.?\d+(?:e-?\d+)?)%?)?"


def parse_bounds(text: str) -> Bounds | None:
    """Return the range of a text such as 5..300, 5.. or ..300, per cent signs left out; None if it
    is none."""
    found = re.fullmatch(rf"\s*{BOUND}\.\.{BOUND}\s*", text)
    bounds = Bounds(float(found[1] or "-inf"), float(found[2] or "inf")) if found else None
    return bounds if bounds and bounds.least <= bounds.most else None


def named_values(setting: str) -> Iterator[tuple[str, str, str]]:
    """Yield (part, name, value) of each part of 'name=value, name'; value "" if there is none."""
    for part in filter(None, map(str.strip, setting.split(","))):
        name, _, value = map(str.strip, part.partition("="))
        yield part, name, value


def parse_rules(setting: str) -> Changes:
    """Return the changes in a setting such as

    'stop_words=off, hash_signs=on, length=30..5000, question_length=5.., keep=my.py:good,
    punctuation=on'

    Raise UserError."""
    switched: dict[str, bool] = {}
    others: dict = {}
    for part, name, value in named_values(setting):
        switch = {"on": True, "off": False}.get(value)
        if name in ("length", "question_length"):
            others[name] = parse_bounds(value)
            wrong = others[name] is None
            refuse(wrong, f"rules: {part!r} is not {name}=least..most, such as 5..300")
        elif name == "keep" and value and switch is None:
            others[name] = value
        elif switch is None:
            hint = "give NAME=on, NAME=off, length=5..300 or keep=file.py:function"
            raise UserError(f"config: rules: {part!r} is not understood; {hint}")
        elif name == "punctuation":
            others[name] = switch
        elif name in RULE_NAMES:
            switched[name] = switch
        else:
            names = ", ".join(RULE_NAMES)
            raise UserError(f"config: rules: no rule {name!r} in {setting!r}; there are: {names}")
    return Changes(switched, **others)


# ---- checking a text -----------------------------------------------------------------------------


class Rules:
    """Which texts to keep. Raise UserError if a setting is wrong.

    quality: "web" = all rules; "curated" (books, encyclopedias, code) = length and replacement
    characters; "rows" (conversations and pairs, where a short answer is a good one) = replacement
    characters. changes: the setting `rules`, see `parse_rules`."""

    def __init__(self, quality: str = "curated", changes: str = "") -> None:
        known = quality in ("curated", "web", "rows")
        refuse(not known, f"quality must be curated or web, got {quality!r}")
        wanted = parse_rules(changes)
        bounds = zip(CURATED_LENGTH, wanted.length, strict=True)
        given = {name: bound for name, bound in bounds if math.isfinite(bound)}
        lengths = given if quality == "web" else CURATED_LENGTH | given
        of = ("all", quality) if quality == "rows" else ("all", "text", quality)
        names = {rule.name for rule in RULES if rule.quality in of} | {"keep", *given}
        names = {name for name in RULE_NAMES if wanted.switched.get(name, name in names)}
        self.limits: dict[str, list] = {"en": [], "zh": [], "other": []}  # (rule, limit), in order
        for rule in RULES:
            if rule.name not in names:
                continue
            if (limit := lengths.get(rule.name)) is not None:  # in characters of any language
                characters = Features.n_characters
                rule = rule._replace(measure=characters, en=limit, zh=limit, other=limit)
            for language, limits in self.limits.items():
                if (limit := getattr(rule, language)) is not None:
                    limits.append((rule, limit))
        self.keep_name = wanted.keep if "keep" in names else ""
        self.keep = load_function(self.keep_name, "keep") if self.keep_name else None

    def check(self, text: str) -> tuple[str, str]:
        """Return (name of the first rule that the text breaks, its measure and limit), or two empty
        strings."""
        features = Features(text)
        for rule, limit in self.limits[features.language]:
            value = features.measure(rule)
            if value < limit if rule.sign == "<" else value > limit:
                return rule.name, f"{value:.4g} {rule.sign} {limit:g}"
        try:
            kept = not self.keep or bool(self.keep(text))
        except (Exception, SystemExit) as error:  # the user's code can raise anything
            what = f"on a text of {len(text)} characters: {type(error).__name__}: {error}"
            raise UserError(f"filters: keep={self.keep_name!r} failed {what}") from error
        return ("", "") if kept else ("keep", f"{self.keep_name} returns False")


class Grams(NamedTuple):
    """Measures of the n-grams of a text, for one n."""

    top: float = 0.0  # characters in all occurrences of the most frequent one / all characters
    covered: float = 0.0  # characters in any that occurred before, counted once / all characters
    repeats: float = 0.0  # n-grams that occurred before / all n-grams


class Features:
    """What the rules look at in a text. Each part is made when it is first needed."""

    def __init__(self, text: str) -> None:
        self.text = text

    def measure(self, rule: Rule) -> float:
        if not rule.n:
            return rule.measure(self)
        doubled = self.language == "zh" and rule.measure != "repeats"  # that rule is Chinese only
        return getattr(self.grams.get(rule.n * (1 + doubled), Grams()), rule.measure)

    @cached_property
    def language(self) -> str:
        return "en" if self.text.isascii() else language_of(self.class_counts)

    @cached_property
    def lines(self) -> list[str]:
        """Lines that are not empty, without white space at their ends."""
        return list(filter(None, map(str.strip, self.text.split("\n"))))

    @cached_property
    def paragraphs(self) -> list[str]:
        return [part for part in (part.strip("\n") for part in self.text.split("\n\n")) if part]

    @cached_property
    def classes(self) -> np.ndarray:
        return character_classes()[code_points(self.text)]

    @cached_property
    def class_counts(self) -> np.ndarray:
        return np.bincount(self.classes, minlength=N_CLASSES)

    @property
    def n_visible(self) -> int:
        return len(self.text) - self.class_counts[SPACE]

    @cached_property
    def words(self) -> list[str]:
        return self.text.split()

    @cached_property
    def word_lengths(self) -> np.ndarray:
        return np.fromiter(map(len, self.words), np.int64, len(self.words))

    def word_length(self) -> float:
        return ratio(self.word_lengths.sum(), len(self.words))

    @property
    def n_words(self) -> float:
        if self.language == "en":
            return len(self.words)
        return self.n_visible / (2 if self.language == "zh" else 5)

    @cached_property
    def numbered(self) -> tuple[np.ndarray, dict[str, int]]:
        """Return the number of each word, int64 (n_words,), and {word: number}."""
        numbers: defaultdict[str, int] = defaultdict(count().__next__)
        return np.fromiter(map(numbers.__getitem__, self.words), np.int64, len(self.words)), numbers

    @cached_property
    def grams(self) -> dict[int, Grams]:
        if self.language == "zh":
            ids = code_points(self.text)[self.classes != SPACE]
            lengths = np.ones(len(ids), np.int64)
        else:
            ids, lengths = self.numbered[0], self.word_lengths
        return repeated(ids.astype(np.uint64), lengths, GRAMS[self.language], ENOUGH)

    def length(self) -> int:
        """Return the length in words of English, in characters of any other text."""
        return len(self.words) if self.language == "en" else self.n_characters()

    def n_characters(self) -> int:
        return len(self.text.strip())

    def per_word(self, *marks: str) -> float:
        return ratio(sum(map(self.text.count, marks)), self.n_words)

    def letters(self) -> float:
        """Return the ratio of characters that are letters, in English of words with a letter."""
        if self.language != "en":
            return ratio(self.class_counts[LETTERS:].sum(), self.n_visible)
        ids, numbers = self.numbered
        without = [
            number
            for word, number in numbers.items()
            if not word[0].isalpha() and not LETTER.search(word)
        ]
        return ratio(len(ids) - np.bincount(ids, minlength=1)[without].sum(), len(ids))

    def stop_words(self) -> int:
        """Return how many different stop words the text has."""
        if self.language == "zh":
            return sum(word in self.text for word in STOP_WORDS["zh"])
        return len({STOP_WORD_FORMS[word] for word in STOP_WORD_FORMS.keys() & self.numbered[1]})


def repeated(
    ids: np.ndarray, lengths: np.ndarray, wanted: tuple[int, ...], enough: float
) -> dict[int, Grams]:
    """Return {n: Grams} for the wanted n, ascending, up to one where no n-gram occurs twice or,
    from the third n on, where repeated ones cover less than `enough`: longer ones never cover more,
    and only the first three have a rule on their frequency.
    ids uint64 (n,): words or characters; lengths int64 (n,): their lengths in characters.

    An n-gram occurs twice only where its beginning does, so fewer positions are left as n grows.
    N-grams are compared by the bits of a 64-bit hash that the position leaves free: sorting both as
    one number is faster than argsort."""
    found: dict[int, Grams] = {}
    before = np.concatenate(([0], np.cumsum(lengths)))  # characters before each unit
    starts, hashes, done = np.arange(len(ids)), np.zeros(len(ids), np.uint64), 0
    for n in wanted:
        # Only positions where n units are left; extend their hashes to n units.
        fits = np.searchsorted(starts, len(ids) - n, side="right")
        starts, hashes = starts[:fits], hashes[:fits]
        for i in range(done, n):
            following = ids[starts + i] if done else ids[i : i + fits]
            hashes = (hashes + following) * np.uint64(0x9E3779B97F4A7C15)  # the golden ratio's
            hashes ^= hashes >> np.uint64(29)
        done = n
        # Sort hash and index as one number.
        bits = np.uint64(len(hashes).bit_length())
        packed = np.sort((hashes >> bits << bits) | np.arange(len(hashes), dtype=np.uint64))
        in_order = packed >> bits
        # Indices in the order of the hashes; of equal hashes in the order of the text.
        order = (packed ^ (in_order << bits)).astype(np.int64)
        edges = np.ones(len(hashes) + 1, bool)  # where a group of equal ones begins or ends
        edges[1:-1] = in_order[1:] != in_order[:-1]
        if edges.all():
            break
        found[n] = measure_grams(starts, order, edges, before, n)
        if n >= wanted[2] and found[n].covered < enough:
            break
        # Go on with those that occur at least twice.
        twice = np.sort(order[~(edges[:-1] & edges[1:])])
        starts, hashes = starts[twice], hashes[twice]
    return found


def measure_grams(
    starts: np.ndarray, order: np.ndarray, edges: np.ndarray, before: np.ndarray, n: int
) -> Grams:
    """Return the measures of the n-grams that begin at starts (m,); order, edges: see `repeated`.
    before[i] is the number of characters before word or character i."""
    # Of the most frequent n-grams take the one that occurs first.
    bounds = np.flatnonzero(edges)
    sizes = np.diff(bounds)
    most_frequent = order[bounds[:-1][sizes == sizes.max()]]
    first = starts[most_frequent].min()
    top = sizes.max() * (before[first + n] - before[first])
    begins = np.sort(starts[order[~edges[:-1]]])  # of those that occurred before
    ends = begins + n
    ends[:-1] = np.minimum(ends[:-1], begins[1:])  # count each character once
    covered = (before[ends] - before[begins]).sum()
    n_grams = len(before) - n
    return Grams(float(top / before[-1]), float(covered / before[-1]), len(begins) / n_grams)
