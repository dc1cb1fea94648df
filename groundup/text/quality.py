"""Quality rules: which texts to keep, decided for each text alone, without a model.

RULES has what is measured and the limits with their sources, for English ("en"), Chinese ("zh") and any other language
("other"), which has only rules that need no words, or hold for texts with and without spaces.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import count
from typing import NamedTuple

import numpy as np

from configurator import load_function
from groundup.errors import UserError
from groundup.text.cleaning import HAN_CLASS, LETTERS, N_CLASSES, SPACE, character_classes, code_points, language_of


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


def length(f: "Features") -> int:
    return len(f.words) if f.language == "en" else len(f.text.strip())


def mean(values: Iterable[float]) -> float:
    """Return the mean, 0 of nothing."""
    values = list(values)
    return ratio(sum(values), len(values))


def duplicates(parts: list[str]) -> float:
    """Return the ratio of parts that occurred before."""
    return ratio(len(parts) - len(set(parts)), len(parts))


def duplicate_characters(parts: list[str]) -> float:
    """Return the ratio of characters in parts that occurred before."""
    total = sum(map(len, parts))
    return ratio(total - sum(map(len, set(parts))), total)


STOP_WORDS = {"en": ("the", "be", "to", "of", "and", "that", "have", "with")}  # Gopher
STOP_WORDS["zh"] = tuple(  # FineWeb-2, Chinese: 22 characters
    "\u7684\u5e74\u5728\u6708\u662f\u548c\u65e5\u4e86\u65bc\u70ba\u6709\u88ab\u4eba\u4e2d\u4e3a\u4ed6\u8207\u5f8c"
    "\u4e5f\u800c\u7531"
)
STOP_WORD_FORMS = {form: word for word in STOP_WORDS["en"] for form in (word, word.capitalize(), word.upper())}
BULLETS = tuple("-*\u2022\u2023\u25b6\u25c6\u25cf\u25cb\u25e6\u25a0\u25a1\u25aa\u25ab\u00b7")
ELLIPSES = ("...", "\u2026")
TERMINAL = tuple(".!?\"'\u201d\u2019\u2026\u3002\uff01\uff1f\uff1b\u300d\u300f")  # C4's, with those of Chinese
LETTER = re.compile(r"[^\W\d_]")

# In the order in which they are tried; only the first that a text breaks is counted. Sources:
# Gopher: Rae et al. 2021, appendix A1, table A1, as in datatrove's gopher_quality_filter and gopher_repetition_filter.
# FineWeb: Penedo et al. 2024, as in datatrove's fineweb_quality_filter.
# FineWeb-2: Penedo et al. 2025, its settings for Chinese (cmn_Hani.yml); counts of words there come from a segmenter.
# CWT: ChineseWebText, Chen et al. 2023, its preprocess.py.
# A word is what white space separates. In Chinese two characters count as one word (own), so n-grams of words become
# 2n-grams of characters. The limits of "other" are those of Gopher where they do not depend on a language, or own.
RULES = (
    Rule("replacement_characters", ">", 0.001, 0.001, 0.001, lambda f: ratio(f.text.count("\ufffd"), len(f.text)),
         quality="all"),  # own; left by a wrong decoding
    Rule("min_length", "<", 50, 200, 200, length, quality="text"),  # words, Gopher; characters, CWT
    Rule("max_length", ">", 100_000, 200_000, 600_000, length, quality="text"),  # words, Gopher; characters, own
    Rule("han_share", "<", None, 0.30, None, lambda f: ratio(f.class_counts[HAN_CLASS], f.n_visible)),  # CWT
    Rule("mean_line_length", "<", None, 10, None, lambda f: mean(map(len, f.lines))),  # CWT
    Rule("short_words", "<", 3, None, None, lambda f: mean(map(len, f.words))),  # Gopher
    Rule("long_words", ">", 10, None, None, lambda f: mean(map(len, f.words))),  # Gopher
    Rule("hash_signs", ">", 0.1, 0.1, 0.1, lambda f: ratio(f.text.count("#"), f.n_words)),  # Gopher
    Rule("ellipses", ">", 0.1, 0.1, 0.1, lambda f: ratio(sum(map(f.text.count, ELLIPSES)), f.n_words)),  # Gopher
    Rule("bullet_lines", ">", 0.9, 0.9, 0.9, lambda f: mean(line.startswith(BULLETS) for line in f.lines)),  # Gopher
    Rule("ellipsis_lines", ">", 0.3, 0.3, 0.3, lambda f: mean(line.endswith(ELLIPSES) for line in f.lines)),  # Gopher
    Rule("letters", "<", 0.8, 0.6, 0.5, lambda f: f.letters()),  # words with a letter, Gopher; characters, own
    Rule("stop_words", "<", 2, 2, None, lambda f: f.stop_words()),  # Gopher; FineWeb-2
    Rule("terminal_punctuation", "<", 0.12, 0.106, None, lambda f: mean(line.endswith(TERMINAL) for line in f.lines)),
    # FineWeb; FineWeb-2
    Rule("short_lines", ">", 0.67, None, None, lambda f: mean(len(line) <= 30 for line in f.lines)),  # FineWeb
    Rule("line_ends", ">", 0.3, 0.178, 0.3, lambda f: ratio(f.text.count("\n"), f.n_words)),  # FineWeb; FineWeb-2
    Rule("duplicate_lines", ">", 0.30, 0.287, 0.30, lambda f: duplicates(f.lines)),  # Gopher; FineWeb-2
    Rule("duplicate_line_characters", ">", 0.20, None, 0.20, lambda f: duplicate_characters(f.lines)),  # Gopher
    Rule("any_duplicate_lines", ">", 0.01, 0.1, 0.1, lambda f: duplicate_characters(f.lines)),  # FineWeb; FineWeb-2
    Rule("duplicate_paragraphs", ">", 0.30, 0.30, 0.30, lambda f: duplicates(f.paragraphs)),  # Gopher
    Rule("duplicate_paragraph_characters", ">", 0.20, 0.20, 0.20, lambda f: duplicate_characters(f.paragraphs)),
    # Gopher
    *(Rule(f"top_{n}_grams", ">", en, zh, en, "top", n)  # Gopher; FineWeb-2
      for n, en, zh in ((2, 0.20, 0.256), (3, 0.18, 0.201), (4, 0.16, 0.171))),
    *(Rule(f"duplicate_{n}_grams", ">", en, zh, en, "covered", n)  # Gopher; FineWeb-2
      for n, en, zh in ((5, 0.15, 0.198), (6, 0.14, 0.182), (7, 0.13, 0.167), (8, 0.12, 0.154), (9, 0.11, 0.14),
                        (10, 0.10, 0.127))),
    Rule("repeated_13_characters", ">", None, 0.5, None, "repeats", 13),  # CWT
)  # fmt: skip
ENOUGH = min(rule.en for rule in RULES if rule.en and rule.n)  # the lowest limit of the n-gram rules
RULE_NAMES = (*(rule.name for rule in RULES), "keep")
GRAMS = {"en": tuple(range(2, 11)), "zh": (4, 6, 8, 10, 12, 13, 14, 16, 18, 20)}  # words, characters
GRAMS["other"] = GRAMS["en"]
CURATED_LENGTHS = {"min_length": 15, "max_length": float("inf")}  # characters (own); a book is one text


class Rules:
    """Which texts to keep.

    quality: "web" = all rules; "curated" (books, encyclopedias, code) = length and replacement characters; "rows"
    (conversations and pairs, where a short answer is a good one) = replacement characters. off, on:
    rules by name, separated by commas. min_chars, max_chars: lengths that replace those of the table, if not 0. keep:
    your own function text -> bool, as "file.py:function". Raise UserError if a setting is wrong.
    """

    def __init__(
        self, quality: str = "curated", off: str = "", on: str = "", min_chars: int = 0, max_chars: int = 0,
        keep: str = "",
    ) -> None:  # fmt: skip
        if quality not in ("curated", "web", "rows"):
            raise UserError(f"filters: quality must be curated or web, got {quality!r}")
        lengths = {k: n for k, n in (("min_length", min_chars), ("max_length", max_chars)) if n}
        of = ("all", quality) if quality == "rows" else ("all", "text", quality)
        names = {rule.name for rule in RULES if rule.quality in of} | {"keep", *lengths}
        names = (names | named_rules(on, "on")) - named_rules(off, "off")
        lengths = ({} if quality == "web" else CURATED_LENGTHS) | lengths
        rules = [
            rule._replace(measure=lambda f: len(f.text.strip()), en=n, zh=n, other=n)
            if (n := lengths.get(rule.name)) else rule
            for rule in RULES if rule.name in names
        ]  # fmt: skip
        self.limits = {  # by language: (rule, limit) in order
            language: [(rule, getattr(rule, language)) for rule in rules if getattr(rule, language) is not None]
            for language in ("en", "zh", "other")
        }
        self.keep = load_function(keep, "keep") if keep and "keep" in names else None
        self.keep_name = keep

    def check(self, text: str) -> tuple[str, str]:
        """Return (name of the first rule that the text breaks, what was measured and the limit), or ("", "")."""
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


def named_rules(names: str, setting: str) -> set[str]:
    """Return the names in a comma-separated setting. Raise UserError for an unknown one."""
    found = {name.strip() for name in names.split(",")} - {""}
    if unknown := sorted(found - set(RULE_NAMES)):
        raise UserError(f"filters: no rule {unknown[0]!r} in {setting}={names!r}; there are: {', '.join(RULE_NAMES)}")
    return found


def ratio(part: float, whole: float) -> float:
    """Return part / whole, 0 if there is nothing to divide by."""
    return float(part / whole) if whole else 0.0


class Grams(NamedTuple):
    """Measures of the n-grams of a text, for one n."""

    top: float = 0.0  # characters in all occurrences of the most frequent one / all characters
    covered: float = 0.0  # characters within any that occurred before, each counted once / all characters
    repeats: float = 0.0  # n-grams that occurred before / all n-grams


class Features:
    """What the rules look at in a text; each part is made when it is first needed."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def language(self) -> str:
        return "en" if self.text.isascii() else language_of(self.class_counts)

    def measure(self, rule: Rule) -> float:
        if not rule.n:
            return rule.measure(self)
        doubled = self.language == "zh" and rule.measure != "repeats"  # that rule is for Chinese alone
        return getattr(self.grams.get(rule.n * (1 + doubled), Grams()), rule.measure)

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

    @property
    def n_words(self) -> float:
        return len(self.words) if self.language == "en" else self.n_visible / (2 if self.language == "zh" else 5)

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
            ids = self.numbered[0]
            lengths = np.fromiter(map(len, self.words), np.int64, len(ids))
        return repeated(ids.astype(np.uint64), lengths, GRAMS[self.language], ENOUGH)

    def letters(self) -> float:
        """Return the ratio of characters that are letters, in English of words with a letter."""
        if self.language != "en":
            return ratio(self.class_counts[LETTERS:].sum(), self.n_visible)
        ids, numbers = self.numbered
        without = [i for word, i in numbers.items() if not word[0].isalpha() and not LETTER.search(word)]
        return ratio(len(ids) - np.bincount(ids, minlength=1)[without].sum(), len(ids))

    def stop_words(self) -> int:
        """Return how many different stop words the text has."""
        if self.language == "zh":
            return sum(word in self.text for word in STOP_WORDS["zh"])
        return len({STOP_WORD_FORMS[word] for word in STOP_WORD_FORMS.keys() & self.numbered[1].keys()})


def repeated(ids: np.ndarray, lengths: np.ndarray, wanted: tuple[int, ...], enough: float) -> dict[int, Grams]:
    """Return {n: Grams} for the wanted n, which ascend, up to one where no n-gram occurs twice or, from the third on,
    those that do cover less than `enough`: longer ones never cover more, and only for three the frequency is limited.
    ids uint64 (n,): words or characters; lengths int64 (n,): their lengths in characters.

    An n-gram occurs twice only where its beginning does, so fewer positions are left as n grows. N-grams are compared
    by those bits of a 64-bit hash that the position leaves free: sorting both as one is faster than argsort.
    """
    found: dict[int, Grams] = {}
    before = np.concatenate(([0], np.cumsum(lengths)))  # characters before each unit
    starts, hashes, done = np.arange(len(ids)), np.zeros(len(ids), np.uint64), 0
    for n in wanted:
        fits = np.searchsorted(starts, len(ids) - n, side="right")
        starts, hashes = starts[:fits], hashes[:fits]
        for i in range(done, n):
            following = ids[starts + i] if done else ids[i : i + fits]
            hashes = (hashes + following) * np.uint64(0x9E3779B97F4A7C15)  # the golden ratio's
            hashes ^= hashes >> np.uint64(29)
        done = n
        bits = np.uint64(len(hashes).bit_length())
        packed = np.sort((hashes >> bits << bits) | np.arange(len(hashes), dtype=np.uint64))
        in_order = packed >> bits
        order = (packed ^ (in_order << bits)).astype(np.int64)  # of the hashes, and in the text of equal ones
        edges = np.ones(len(hashes) + 1, bool)  # where a group of equal ones begins or ends
        edges[1:-1] = in_order[1:] != in_order[:-1]
        if edges.all():
            break
        found[n] = measure_grams(starts, order, edges, before, n)
        if n >= wanted[2] and found[n].covered < enough:
            break
        twice = np.sort(order[~(edges[:-1] & edges[1:])])
        starts, hashes = starts[twice], hashes[twice]
    return found


def measure_grams(starts: np.ndarray, order: np.ndarray, edges: np.ndarray, before: np.ndarray, n: int) -> Grams:
    """Return the measures of the n-grams that begin at starts (m,); before[i] is the number of characters before word
    or character i."""
    bounds = np.flatnonzero(edges)
    sizes = np.diff(bounds)
    frequent = starts[order[bounds[:-1][sizes == sizes.max()]]].min()  # the first of equally frequent ones
    top = sizes.max() * (before[frequent + n] - before[frequent])
    begins = np.sort(starts[order[~edges[:-1]]])  # of those that occurred before
    ends = begins + n
    ends[:-1] = np.minimum(ends[:-1], begins[1:])  # count each character once
    covered = (before[ends] - before[begins]).sum()
    return Grams(float(top / before[-1]), float(covered / before[-1]), len(begins) / (len(before) - n))
