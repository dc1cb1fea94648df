"""What becomes of a text before it is learnt: cleaning, which changes it, and quality rules, which drop it. One text at
a time, no model, no network.

The numbers of the rules are in one table, RULES, with their sources. Two languages are told apart by their script:
Chinese ("zh"), and all that is written with spaces ("en").
"""

import re
from collections import defaultdict
from functools import cached_property
from itertools import count
from typing import NamedTuple

import numpy as np

from configurator import load_function
from groundup.errors import UserError
from groundup.text.cleaning import HAN_CLASS, LETTERS, SPACE, character_classes, code_points, language

# ---- the rules --------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """A text is dropped if what is measured is less, or more, than the limit of its language."""

    name: str
    sign: str  # < or >
    en: float | None  # None = no such rule for this language
    zh: float | None
    group: str = "web"  # by which setting it is on: all (web and curated), web, c4 or listed (a file of words is given)
    measure: str = ""  # the method of `Text`; "" = that of the rule's name
    n: int = 0  # of the n-grams that it measures


# In the order in which they are tried; the first that fires is the one that is counted. Sources:
# Gopher: Rae et al. 2021, appendix A1, table A1, as in datatrove's gopher_quality_filter and gopher_repetition_filter.
# FineWeb: Penedo et al. 2024, as in datatrove's fineweb_quality_filter.
# FineWeb-2: Penedo et al. 2025, its settings for Chinese (cmn_Hani.yml); counts of words there come from a segmenter.
# CWT: ChineseWebText, Chen et al. 2023, its preprocess.py.  C4: Raffel et al. 2020, section 2.2.
# A word is what white space separates. In Chinese, units of n-grams are characters, so that n is twice that of words;
# where something is counted per word, two characters are a word (own).
RULES = (
    Rule("replacement_characters", ">", 0.001, 0.001, "all"),  # own: decoded wrongly
    Rule("min_length", "<", 50, 200, "all", measure="length"),  # words, Gopher; characters, CWT
    Rule("max_length", ">", 100_000, 200_000, "all", measure="length"),  # words, Gopher; characters, own
    Rule("han_share", "<", None, 0.30),  # CWT
    Rule("mean_line_length", "<", None, 10),  # CWT
    Rule("short_words", "<", 3, None, measure="mean_word_length"),  # Gopher
    Rule("long_words", ">", 10, None, measure="mean_word_length"),  # Gopher
    Rule("hash_signs", ">", 0.1, 0.1),  # Gopher
    Rule("ellipses", ">", 0.1, 0.1),  # Gopher
    Rule("bullet_lines", ">", 0.9, 0.9),  # Gopher
    Rule("ellipsis_lines", ">", 0.3, 0.3),  # Gopher
    Rule("letters", "<", 0.8, 0.6),  # words with a letter, Gopher; characters that are letters, own
    Rule("stop_words", "<", 2, 2),  # Gopher; FineWeb-2
    Rule("terminal_punctuation", "<", 0.12, 0.106),  # FineWeb; FineWeb-2
    Rule("short_lines", ">", 0.67, None),  # FineWeb
    Rule("line_ends", ">", 0.3, 0.178),  # FineWeb; FineWeb-2
    Rule("duplicate_lines", ">", 0.30, 0.287),  # Gopher; FineWeb-2
    Rule("duplicate_line_characters", ">", 0.20, None),  # Gopher
    Rule("any_duplicate_lines", ">", 0.01, 0.1, measure="duplicate_line_characters"),  # FineWeb; FineWeb-2
    Rule("duplicate_paragraphs", ">", 0.30, 0.30),  # Gopher
    Rule("duplicate_paragraph_characters", ">", 0.20, 0.20),  # Gopher
    Rule("top_2_grams", ">", 0.20, 0.256, measure="top_grams", n=2),  # Gopher; FineWeb-2; and so are the next ones
    Rule("top_3_grams", ">", 0.18, 0.201, measure="top_grams", n=3),
    Rule("top_4_grams", ">", 0.16, 0.171, measure="top_grams", n=4),
    Rule("duplicate_5_grams", ">", 0.15, 0.198, measure="duplicate_grams", n=5),
    Rule("duplicate_6_grams", ">", 0.14, 0.182, measure="duplicate_grams", n=6),
    Rule("duplicate_7_grams", ">", 0.13, 0.167, measure="duplicate_grams", n=7),
    Rule("duplicate_8_grams", ">", 0.12, 0.154, measure="duplicate_grams", n=8),
    Rule("duplicate_9_grams", ">", 0.11, 0.14, measure="duplicate_grams", n=9),
    Rule("duplicate_10_grams", ">", 0.10, 0.127, measure="duplicate_grams", n=10),
    Rule("repeated_13_characters", ">", None, 0.5, measure="repeated_grams", n=13),  # CWT
    Rule("c4_lorem_ipsum", ">", 0, None, "c4", measure="lorem_ipsum"),
    Rule("c4_curly_brackets", ">", 0, None, "c4", measure="curly_brackets"),  # drops nearly all code
    Rule("c4_sentences", "<", 5, None, "c4", measure="sentences"),  # in the lines that c4_lines keeps
    Rule("listed_words", ">", 0.5, 0.5, "listed"),  # per line, CWT
)
ENOUGH = min(rule.en for rule in RULES if rule.en and rule.n)  # the n-gram rule that fires first
RULE_NAMES = (*(rule.name for rule in RULES), "keep")
GRAMS = {"en": (2, 3, 4, 5, 6, 7, 8, 9, 10), "zh": (4, 6, 8, 10, 12, 13, 14, 16, 18, 20)}  # units
CURATED_LENGTHS = {"min_length": 15, "max_length": float("inf")}  # characters (own); a book is one text

STOP_WORDS = {"en": ("the", "be", "to", "of", "and", "that", "have", "with")}  # Gopher
STOP_WORDS["zh"] = tuple(  # FineWeb-2, Chinese: 22 characters
    "\u7684\u5e74\u5728\u6708\u662f\u548c\u65e5\u4e86\u65bc\u70ba\u6709\u88ab\u4eba\u4e2d\u4e3a\u4ed6\u8207\u5f8c"
    "\u4e5f\u800c\u7531"
)
STOP_FORMS = {form: word for word in STOP_WORDS["en"] for form in (word, word.capitalize(), word.upper())}
BULLETS = tuple("-*\u2022\u2023\u25b6\u25c6\u25cf\u25cb\u25e6\u25a0\u25a1\u25aa\u25ab\u00b7")
ELLIPSES = ("...", "\u2026")
TERMINAL = tuple(".!?\"'\u201d\u2019\u2026\u3002\uff01\uff1f\uff1b\u300d\u300f")  # C4's, with those of Chinese
GLUED = re.compile("[a-z0-9]{2}")
LETTER = re.compile(r"[^\W\d_]")
POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")  # C4


class Rules:
    """Which texts to keep.

    quality: "web" = all rules but C4's; "curated" (books, encyclopedias, code) = length and replacement characters.
    off, on: rules by name, separated by commas; on="c4" is the three of C4. min_chars, max_chars: instead of the
    lengths of the table, if not 0. words: a file of unwanted words, one on a line. keep: a function of your own, text
    -> bool, as "file.py:function". Raise UserError.
    """

    def __init__(
        self, quality: str = "curated", off: str = "", on: str = "", min_chars: int = 0, max_chars: int = 0,
        keep: str = "", words: str = "",
    ) -> None:  # fmt: skip
        self.settings = quality, off, on, min_chars, max_chars, keep, words
        if quality not in ("curated", "web"):
            raise UserError(f"filters: quality must be curated or web, got {quality!r}")
        groups = {"all"} | ({"web"} if quality == "web" else set()) | ({"listed"} if words else set())
        names = {rule.name for rule in RULES if rule.group in groups} | ({"keep"} if keep else set())
        names = (names | named_rules(on, "on")) - named_rules(off, "off")
        lengths = CURATED_LENGTHS if quality == "curated" else {}  # in characters, instead of those of the table
        lengths = lengths | {k: n for k, n in (("min_length", min_chars), ("max_length", max_chars)) if n}
        rules = [
            rule._replace(measure="characters", en=n, zh=n) if (n := lengths.get(rule.name)) else rule
            for rule in RULES if rule.name in names
        ]  # fmt: skip
        self.limits = {  # by language: (rule, limit) in order
            "en": [(rule, rule.en) for rule in rules if rule.en is not None],
            "zh": [(rule, rule.zh) for rule in rules if rule.zh is not None],
        }
        self.words = WordList.load(words) if words else None
        self.keep = load_function(keep, "keep") if keep and "keep" in names else None
        self.keep_name = keep

    def __reduce__(self) -> tuple:
        return Rules, self.settings  # for other processes: the function is loaded again from its file

    def check(self, text: str) -> tuple[str, str]:
        """(name of the first rule that fires, what it measured and its limit), or ("", "")."""
        measured = Text(text, self.words)
        for rule, limit in self.limits[measured.language]:
            measure = getattr(measured, rule.measure or rule.name)
            value = measure(rule.n) if rule.n else measure()
            if value < limit if rule.sign == "<" else value > limit:
                return rule.name, f"{value:.4g} {rule.sign} {limit:g}"
        if self.keep and not self._keeps(text):
            return "keep", f"{self.keep_name} returns False"
        return "", ""

    def _keeps(self, text: str) -> bool:
        try:
            return bool(self.keep(text))
        except (Exception, SystemExit) as error:  # of code that is not ours
            what = f"on a text of {len(text)} characters: {type(error).__name__}: {error}"
            raise UserError(f"filters: keep={self.keep_name!r} failed {what}") from error


def named_rules(names: str, setting: str) -> set[str]:
    found = set()
    for name in filter(None, (name.strip() for name in names.split(","))):
        matches = {rule for rule in RULE_NAMES if rule == name or (name == "c4" and rule.startswith("c4_"))}
        if not matches:
            raise UserError(f"filters: no rule {name!r} in {setting}={names!r}; there are: {', '.join(RULE_NAMES)}")
        found |= matches
    return found


def c4_lines(text: str, terminal_mark: bool = False) -> str:
    """The lines that C4 keeps: at least three words, none of more than 1000 characters, no "javascript", nothing about
    cookies or terms of use; and, as C4 but not FineWeb wants it, with a terminal mark."""
    kept = []
    for line in text.split("\n"):
        words, low = line.split(), line.lower()
        ends = not terminal_mark or (line.rstrip().endswith(TERMINAL) and not line.rstrip().endswith("..."))
        bad = "javascript" in low or any(phrase in low for phrase in POLICY)
        if ends and not bad and len(words) >= 3 and max(map(len, words)) <= 1000:
            kept.append(line)
    return "\n".join(kept)


# ---- what is measured -------------------------------------------------------------------------------------


def ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


class Text:
    """A text and what the rules ask of it. All shares are 0 where there is nothing to divide by."""

    def __init__(self, text: str, unwanted: "WordList | None" = None) -> None:
        self.text, self.unwanted = text, unwanted

    # parts, each made when it is first asked for

    @cached_property
    def language(self) -> str:
        return language(self.text)

    @cached_property
    def lines(self) -> list[str]:
        """Without white space at their ends, and without empty ones."""
        return list(filter(None, map(str.strip, self.text.split("\n"))))

    @cached_property
    def paragraphs(self) -> list[str]:
        return [part for part in (part.strip("\n") for part in self.text.split("\n\n")) if part]

    @cached_property
    def classes(self) -> np.ndarray:
        return character_classes()[code_points(self.text)]

    @cached_property
    def class_counts(self) -> np.ndarray:
        return np.bincount(self.classes, minlength=5)

    @cached_property
    def words(self) -> list[str]:
        return self.text.split()

    @cached_property
    def numbered(self) -> tuple[np.ndarray, dict[str, int]]:
        """int64 (n_words,) numbers of the words, and the numbers of the different words, in their order."""
        numbers: defaultdict[str, int] = defaultdict(count().__next__)
        return np.fromiter(map(numbers.__getitem__, self.words), np.int64, len(self.words)), numbers

    @cached_property
    def grams(self) -> dict[int, "Grams"]:
        if self.language == "zh":
            codes = code_points(self.text)[self.classes != SPACE].astype(np.uint64)
            return repeated(codes, np.ones(len(codes), np.int64), GRAMS["zh"], ENOUGH)
        ids, _ = self.numbered
        lengths = np.fromiter(map(len, self.words), np.int64, len(ids))
        return repeated(ids.astype(np.uint64), lengths, GRAMS["en"], ENOUGH)

    @cached_property
    def n_words(self) -> float:
        if self.language == "zh":
            return (len(self.text) - self.class_counts[SPACE]) / 2
        return len(self.words)

    # measures

    def characters(self) -> int:
        return len(self.text.strip())

    def length(self) -> int:
        return self.characters() if self.language == "zh" else len(self.words)

    def replacement_characters(self) -> float:
        return 0.0 if self.text.isascii() else ratio(self.text.count("\ufffd"), len(self.text))

    def han_share(self) -> float:
        return ratio(self.class_counts[HAN_CLASS], len(self.text) - self.class_counts[SPACE])

    def mean_line_length(self) -> float:
        return ratio(sum(map(len, self.lines)), len(self.lines))

    def mean_word_length(self) -> float:
        return ratio(len("".join(self.words)), len(self.words))

    def hash_signs(self) -> float:
        return ratio(self.text.count("#"), self.n_words)

    def ellipses(self) -> float:
        return ratio(sum(map(self.text.count, ELLIPSES)), self.n_words)

    def bullet_lines(self) -> float:
        return ratio(sum(line.startswith(BULLETS) for line in self.lines), len(self.lines))

    def ellipsis_lines(self) -> float:
        return ratio(sum(line.endswith(ELLIPSES) for line in self.lines), len(self.lines))

    def letters(self) -> float:
        if self.language == "zh":
            counts = self.class_counts
            return ratio(counts[LETTERS:].sum(), len(self.text) - counts[SPACE])
        ids, numbers = self.numbered
        without = [i for word, i in numbers.items() if not word[0].isalpha() and not LETTER.search(word)]
        return ratio(len(ids) - np.bincount(ids, minlength=1)[without].sum(), len(ids))

    def stop_words(self) -> int:
        if self.language == "zh":
            return sum(word in self.text for word in STOP_WORDS["zh"])
        return len({STOP_FORMS[word] for word in STOP_FORMS.keys() & self.numbered[1].keys()})

    def terminal_punctuation(self) -> float:
        return ratio(sum(line.endswith(TERMINAL) for line in self.lines), len(self.lines))

    def short_lines(self) -> float:
        return ratio(sum(len(line) <= 30 for line in self.lines), len(self.lines))

    def line_ends(self) -> float:
        return ratio(self.text.count("\n"), self.n_words)

    def duplicate_lines(self) -> float:
        return ratio(len(self.lines) - len(set(self.lines)), len(self.lines))

    def duplicate_line_characters(self) -> float:
        return duplicate_characters(self.lines)

    def duplicate_paragraphs(self) -> float:
        return ratio(len(self.paragraphs) - len(set(self.paragraphs)), len(self.paragraphs))

    def duplicate_paragraph_characters(self) -> float:
        return duplicate_characters(self.paragraphs)

    def top_grams(self, n: int) -> float:
        return self._gram(n).top

    def duplicate_grams(self, n: int) -> float:
        return self._gram(n).covered

    def repeated_grams(self, n: int) -> float:
        """Of n characters: not doubled, this is a rule for Chinese alone."""
        return self.grams.get(n, NO_GRAMS).repeats

    def _gram(self, n: int) -> "Grams":
        return self.grams.get(2 * n if self.language == "zh" else n, NO_GRAMS)

    def lorem_ipsum(self) -> int:
        return self.text.lower().count("lorem ipsum")

    def curly_brackets(self) -> int:
        return self.text.count("{")

    def sentences(self) -> int:
        return len(re.findall(r"[.!?]+(?=[\s\"')]|$)", c4_lines(self.text), re.MULTILINE))

    def listed_words(self) -> float:
        return self.unwanted.count(self.text) / max(1, len(self.lines)) if self.unwanted else 0.0


def duplicate_characters(parts: list[str]) -> float:
    """Share of the characters that lie in parts that are said again."""
    different = set(parts)
    if len(different) == len(parts):
        return 0.0
    total = sum(map(len, parts))
    return ratio(total - sum(map(len, different)), total)


class Grams(NamedTuple):
    """Of the n-grams of a text, for one n."""

    top: float  # characters of all occurrences of the most frequent one, of all characters
    covered: float  # characters within any that was said before, each once, of all characters
    repeats: float  # n-grams that were said before, of all n-grams
    most: int  # occurrences of the most frequent one


NO_GRAMS = Grams(0.0, 0.0, 0.0, 0)


def repeated(ids: np.ndarray, lengths: np.ndarray, wanted: tuple[int, ...], enough: float) -> dict[int, Grams]:
    """{n: Grams} for the wanted n, in growing order. ids uint64 (n,): the units; lengths int64 (n,): in characters.

    Ends where no n-gram occurs twice, or no longer one can reach a share of `enough`: longer ones never cover more, and
    are never more frequent. An n-gram can occur twice only where the shorter one at its start does, so little is left
    to sort as n grows. They are compared by what of a 64-bit hash the position leaves.
    """
    found: dict[int, Grams] = {}
    before = np.concatenate(([0], np.cumsum(lengths)))  # characters before each unit
    top = wanted[2]  # only the first three are asked for their frequency
    longest = (before[top:] - before[:-top]).max(initial=0)  # characters of that many units
    starts, hashes, done = np.arange(len(ids)), np.zeros(len(ids), np.uint64), 0
    for n in wanted:
        fits = np.searchsorted(starts, len(ids) - n, side="right")
        starts, hashes = starts[:fits], hashes[:fits]
        for i in range(done, n):
            hashes = mix(hashes, ids[starts + i] if done else ids[i : i + fits])
        done = n
        order, edges = sort_groups(hashes)
        if edges.all():
            break
        found[n] = measure_grams(starts, order, edges, before, n)
        if found[n].covered < enough and found[n].most * longest / before[-1] < enough:
            break
        twice = np.sort(order[~(edges[:-1] & edges[1:])])
        starts, hashes = starts[twice], hashes[twice]
    return found


def sort_groups(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(order int64 (m,): equal hashes together, in the order of the text; edges bool (m + 1,): where a group of
    equal ones begins or ends). One sort of numbers that end in the position: faster than argsort."""
    bits = np.uint64(len(hashes).bit_length())
    packed = np.sort((hashes >> bits << bits) | np.arange(len(hashes), dtype=np.uint64))
    in_order = packed >> bits
    edges = np.ones(len(hashes) + 1, bool)
    edges[1:-1] = in_order[1:] != in_order[:-1]
    return (packed ^ (in_order << bits)).astype(np.int64), edges


def measure_grams(starts: np.ndarray, order: np.ndarray, edges: np.ndarray, before: np.ndarray, n: int) -> Grams:
    """starts (m,): where n-grams begin; order (m,), edges (m + 1,): from `sort_groups`."""
    n_characters = before[-1]
    bounds = np.flatnonzero(edges)
    sizes = bounds[1:] - bounds[:-1]
    most = sizes.max()
    frequent = starts[order[bounds[:-1][sizes == most]]].min()  # of several, the one that comes first
    length = before[frequent + n] - before[frequent]
    begins = np.sort(starts[order[~edges[:-1]]])  # of those that were said before
    ends = begins + n
    ends[:-1] = np.minimum(ends[:-1], begins[1:])  # each character once
    covered = (before[ends] - before[begins]).sum()
    repeats = len(begins) / (len(before) - n)
    return Grams(float(most * length / n_characters), float(covered / n_characters), repeats, int(most))


def mix(hashes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """uint64: the hashes of sequences that go on with these values. The factor is odd, from the golden ratio."""
    hashes = (hashes + values) * np.uint64(0x9E3779B97F4A7C15)
    return hashes ^ (hashes >> np.uint64(29))


class WordList:
    """Counts the words of a list in texts: every occurrence, also overlapping ones, in lower case. A word of Latin
    letters or digits counts only where it stands alone."""

    SLOT_BITS = 18

    def __init__(self, words: list[str]) -> None:
        self.words = {word.strip().lower() for word in words} - {""}
        self.tables: dict[int, np.ndarray] = {}  # by length: bool (slots,), which hashes occur
        for word in self.words:
            table = self.tables.setdefault(len(word), np.zeros(2**self.SLOT_BITS, bool))
            table[window_hashes(code_points(word), len(word)) >> np.uint64(64 - self.SLOT_BITS)] = True

    @classmethod
    def load(cls, path: str) -> "WordList":
        try:
            with open(path, encoding="utf-8-sig") as f:
                return cls(f.read().split("\n"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"filters: cannot read words={path!r}: {error}; give a text file, one word a line"
            ) from None

    def count(self, text: str) -> int:
        text = text.lower()
        codes, total = code_points(text), 0
        hashes = np.zeros(len(codes), np.uint64)  # of the windows of each length, one after the other
        for length in range(1, min(max(self.tables, default=0), len(codes)) + 1):
            hashes = mix(hashes[: len(codes) - length + 1], codes[length - 1 :])
            if length in self.tables:
                likely = self.tables[length][hashes >> np.uint64(64 - self.SLOT_BITS)]
                for i in np.flatnonzero(likely).tolist():
                    total += text[i : i + length] in self.words and stands_alone(text, i, i + length)
        return total


def window_hashes(codes: np.ndarray, length: int) -> np.ndarray:
    """uint64 (n - length + 1,): of each window of this length."""
    if len(codes) < length:
        return np.zeros(0, np.uint64)
    hashes = np.zeros(len(codes) - length + 1, np.uint64)
    for i in range(length):
        hashes = mix(hashes, codes[i : i + len(hashes)])
    return hashes


def stands_alone(text: str, begin: int, end: int) -> bool:
    """Whether no Latin letter or digit goes on where the word begins or ends with one."""
    return not (GLUED.match(text, begin - 1) if begin else None) and not GLUED.match(text, end - 1)
