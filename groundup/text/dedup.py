"""Find the same text twice: exact copies by a hash, near copies by MinHash.

MinHash compares sets of units. A unit is one character of Chinese or Japanese, or of a script that
puts no spaces between words (Thai, Lao, Burmese, Khmer); in any other script it is a run of
letters, marks and digits. So Chinese, English and mixed text need no word segmenter.
"""

import hashlib
import re
import unicodedata
from array import array
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from groundup.errors import UserError

SHINGLE = 5  # units; unrelated Chinese texts share half of their characters, but few runs of five
N_PERM = 128  # values of a signature
NO_UNITS = np.uint32(2**32 - 1)  # all values of the signature of a text without units
COMPARED = 64  # most kept documents per bucket that a document is compared with
MOST_DOCUMENTS = 2**31 - 1  # that are compared in one run: their numbers are int32
SLICE = 2**16  # characters or units processed at once, so that they stay in the L2 cache
CHARACTER_FACTOR = 0x9E3779B97F4A7C15  # of the polynomial hash of a unit; any odd number serves
UNIT_FACTOR = np.uint64(0xC2B2AE3D27D4EB4F)  # of the hash of a run of units


class Units(NamedTuple):
    """The units of several texts. Text t has the units starts[t] .. starts[t + 1] - 1."""

    hashes: np.ndarray  # (n,) uint64
    starts: np.ndarray  # (n_texts + 1,) int64
    begins: np.ndarray  # (n,) int64, in characters from the beginning of the unit's own text
    ends: np.ndarray  # (n,) int64


# Script=Han, Hiragana and Katakana in Unicode, with the marks of length and voice that they share.
# Planes 2 and 3 hold Han only, so characters of a newer Unicode than Python's are included.
# fmt: off
ONE_CHARACTER_UNITS = (
    (0x2E80, 0x2FD6), (0x3005, 0x3006), (0x3007, 0x3008), (0x3021, 0x302A), (0x3038, 0x303C),
    (0x3041, 0x3100), (0x31F0, 0x3200), (0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00),
    (0xFF66, 0xFFA0), (0x16FE3, 0x16FE4), (0x16FF0, 0x16FF7), (0x1AFF0, 0x1B170),
    (0x20000, 0x3FFFE),
)
# fmt: on
# Thai, Lao, Burmese, Khmer
UNSPACED = ((0xE00, 0xE80), (0xE80, 0xF00), (0x1000, 0x10A0), (0x1780, 0x1800))
SINGLE = np.uint32(2**31)  # added to the code of such a character


@lru_cache(maxsize=1)
def unit_codes() -> np.ndarray:
    """Return for each code point, (0x110000,) uint32, 0 if it separates units, else its lower case
    (plus SINGLE).

    Characters are lowered one by one, and full width becomes half width, so offsets into the text
    stay the same."""
    codes = np.arange(0x110000, dtype=np.uint32)
    lower = [c.lower() for c in map(chr, range(0x20000))]  # no script beyond has cases
    codes[: len(lower)] = [ord(c) if len(c) == 1 else i for i, c in enumerate(lower)]
    is_unit = np.zeros(0x110000, bool)
    is_unit[:0x20000] = [unicodedata.category(chr(i))[0] in "LMN" for i in range(0x20000)]
    is_unit[0xE0100:0xE01F0] = True  # variation selectors, which are marks
    is_unit[0x2E80:0x2FD6] = True  # radicals stand for characters in text extracted from PDF
    is_unit[0x20000:0x3FFFE] = True
    for table in (codes, is_unit):
        table[0xFF01:0xFF5F] = table[0x21:0x7F]
    for begin, end in ONE_CHARACTER_UNITS + UNSPACED:
        codes[begin:end] += SINGLE
    return codes * is_unit


@lru_cache(maxsize=1)
def character_powers() -> tuple[np.ndarray, np.ndarray]:
    """Return CHARACTER_FACTOR ** i and CHARACTER_FACTOR ** -i modulo 2**64 for i = 0 .. SLICE."""
    both = [[CHARACTER_FACTOR], [pow(CHARACTER_FACTOR, -1, 2**64)]]
    factors = np.array(both, np.uint64).repeat(SLICE + 1, axis=1)
    factors[:, 0] = 1
    return tuple(np.multiply.accumulate(factors, axis=1))


def units(texts: list[str]) -> Units:
    """Return the units of texts, in lower case and half width. A hash depends on its unit alone.

    A run of more than SLICE letters becomes several units. Surrogates and control characters
    separate units."""
    characters = np.frombuffer("\n".join([*texts, ""]).encode("utf-32-le", "surrogatepass"), "<u4")
    text_begins = np.cumsum([0] + [len(text) + 1 for text in texts])
    columns = [[np.empty(0, dtype)] for dtype in (np.uint64, np.int64, np.int64)]
    begin = 0
    while begin < len(characters):
        hashes, begins, ends = scan(characters[begin : begin + SLICE])
        end, n = begin + SLICE, len(ends)
        if n and ends[-1] == SLICE and begins[-1]:
            # The last unit may continue: read it again with the next slice.
            n -= 1
            end = begin + int(begins[n])
        for column, values in zip(columns, (hashes, begins + begin, ends + begin), strict=True):
            column.append(values[:n])
        begin = end
    # Free the pieces of each column before the next is joined.
    hashes, begins, ends = (np.concatenate(columns.pop(0)) for _ in range(3))
    starts = np.searchsorted(begins, text_begins)
    shift = np.repeat(text_begins[:-1], np.diff(starts))
    begins -= shift
    ends -= shift
    return Units(hashes, starts, begins, ends)


def scan(characters: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return hashes, begins and ends of the units in at most SLICE characters.

    The hash of a unit is a polynomial of its characters: the difference of two prefix sums, moved
    to the first place by a negative power of the factor."""
    codes = unit_codes()[characters]
    single = codes >= SINGLE
    # Whether each is a part of a unit of several characters; one more on each side.
    spaced = np.zeros(len(codes) + 2, bool)
    spaced[1:-1] = (codes > 0) > single
    begins = np.flatnonzero(single | (spaced[1:-1] > spaced[:-2]))
    ends = np.flatnonzero(single | (spaced[1:-1] > spaced[2:])) + 1
    powers, inverses = character_powers()
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum(codes * powers[: len(codes)], out=sums[1:])
    return mix64((sums[ends] - sums[begins]) * inverses[begins]), begins, ends


def mix64(h: np.ndarray) -> np.ndarray:
    """Apply MurmurHash3's 64-bit finalizer, a bijection, in place."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h ^= h >> np.uint64(33)
        h *= np.uint64(factor)
    h ^= h >> np.uint64(33)
    return h


def windows(hashes: np.ndarray, n: int) -> Iterator[np.ndarray]:
    """Yield the hashes of all runs of 1, 2, .. n units along the last axis; entry i is the run
    that begins at i."""
    h = hashes
    yield h
    for length in range(2, n + 1):
        h = h[..., :-1] * UNIT_FACTOR
        h += hashes[..., length - 1 :]
        yield h


# ---- exact copies --------------------------------------------------------------------------------

CJK_RANGES = ((0x2E80, 0x3100), *ONE_CHARACTER_UNITS, (0xFF01, 0xFF65))
CJK = "".join(f"{chr(begin)}-{chr(end - 1)}" for begin, end in CJK_RANGES)
INDENTS = re.compile(r"\n[ \t]*(?=\S)")  # of each line that is not blank
MAYBE_CJK = re.compile("[\u2e80-\U0003ffff]")  # a quick look: all of CJK, and more
BESIDE_HAN = re.compile(f" (?:(?=[{CJK}])|(?<=[{CJK}] ))")  # also beside full-width marks


def exact_key(text: str) -> bytes:
    """Return 16 bytes that are equal for texts that differ only in case, composition or the amount
    of white space.

    White space beside a Chinese or Japanese character does not count. Indentation does: it is a
    part of code. 128 bits, because with 64 a false pair among a billion documents is likely
    (n**2 / 2**65)."""
    text = unicodedata.normalize("NFC", text).lower().strip()
    indents = "".join(INDENTS.findall(text)) if "\n " in text or "\n\t" in text else ""
    text = " ".join(text.split())
    if not text.isascii() and MAYBE_CJK.search(text):
        text = BESIDE_HAN.sub("", text)
    if indents:
        text = f"{text}\0{indents}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def first_copies(keys: np.ndarray) -> np.ndarray:
    """Return for each row of keys (n, 2) uint64, made of exact_key, the index of the first equal
    row: (n,) int64. Takes 41 bytes of memory per row."""
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: the first of equal rows comes first
    new = np.ones(len(keys), bool)
    new[1:] = (np.diff(keys[order], axis=0) != 0).any(axis=1)
    first = np.empty(len(keys), np.int64)
    first[order] = order[new][np.cumsum(new) - 1]
    return first


# ---- MinHash -------------------------------------------------------------------------------------


def signatures(units: Units) -> np.ndarray:
    """Return MinHash signatures (n_texts, N_PERM) uint32 of the sets of shingles, which are runs of
    SHINGLE units.

    A shorter text has one shingle, all of its units; a text without units has NO_UNITS everywhere.
    Equal to datasketch's `MinHash(num_perm=N_PERM, seed=1, scheme="affine32")` for 32-bit elements,
    whatever else is in the batch. Broder, On the resemblance and containment of documents (1997).
    """
    result = np.full((len(units.starts) - 1, N_PERM), NO_UNITS, np.uint32)
    for first in range(0, len(units.hashes), SLICE):
        texts, begins, shingles = shingle_block(units, first)
        if len(texts):
            result[texts] = np.minimum(result[texts], least(shingles, begins))
    return result


def shingle_block(units: Units, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the shingles that begin at the SLICE units from `first` on: (numbers of the texts that
    have some, index of each one's first shingle, shingles uint32)."""
    hashes, starts = units.hashes, units.starts
    last = min(first + SLICE, len(hashes))
    # The texts with units in this slice; the first may begin before it, the last may go on.
    first_text = np.searchsorted(starts, first, "right") - 1
    texts = np.arange(first_text, np.searchsorted(starts, last, "left"))
    begins, counts = starts[texts], starts[texts + 1] - starts[texts]
    # The run from each unit on. Those that go on into the next text are left out below.
    elements = np.zeros(last - first, np.uint64)
    *_, runs = windows(hashes[first : last + SHINGLE - 1], SHINGLE)
    elements[: len(runs)] = runs[: len(elements)]
    # A text of n units, fewer than a shingle, has one: the run of them all.
    for n in range(1, SHINGLE):
        short = begins[(counts == n) & (begins >= first)]
        if len(short):
            *_, whole = windows(hashes[short[:, None] + np.arange(n)], n)
            elements[short - first] = whole[:, 0]
    # Where the shingles of each text begin and end, in this slice.
    ends = begins + np.maximum(counts - SHINGLE + 1, np.minimum(counts, 1))
    begins, ends = np.maximum(begins, first) - first, np.minimum(ends, last) - first
    some = begins < ends
    texts, begins, lengths = texts[some], begins[some], (ends - begins)[some]
    # The shingles of all these texts, end to end.
    places = np.cumsum(lengths) - lengths
    kept = np.arange(lengths.sum()) + np.repeat(begins - places, lengths)
    return texts, places, (elements[kept] >> np.uint64(32)).astype(np.uint32)


@lru_cache(maxsize=1)
def permutations() -> np.ndarray:
    """Return factors and summands (2, N_PERM) uint32: those of datasketch's affine32 scheme, whose
    import takes a second of each process. An odd factor permutes the numbers below 2**32."""
    random = np.random.RandomState(1)
    factors = 2 * random.randint(0, 2**31, N_PERM, np.uint32) + np.uint32(1)
    return np.stack([factors, random.randint(0, 2**32, N_PERM, np.uint32)])


def least(shingles: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Return the least value of each text's shingles, [begins[t], begins[t + 1]), under each
    permutation: (texts, N_PERM) uint32."""
    h = shingles ^ (shingles >> np.uint32(16))  # MurmurHash3's 32-bit finalizer, as in datasketch
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    result = np.empty((N_PERM, len(begins)), np.uint32)
    permuted = np.empty_like(h)
    for row, a, b in zip(result, *permutations(), strict=True):
        np.multiply(h, a, out=permuted)
        np.add(permuted, b, out=permuted)
        np.minimum.reduceat(permuted, begins, out=row)
    return result.T


# ---- near copies ---------------------------------------------------------------------------------


class NearDuplicates(NamedTuple):
    dropped: np.ndarray  # (m,) int64, ascending
    partner: np.ndarray  # (m,) int64, the most similar kept document before it, the first of equals
    similarity: np.ndarray  # (m,) float32, estimated Jaccard similarity of the two
    capped: int  # kept documents that some full bucket did not take, so later ones miss them there


def bands_for(threshold: float) -> tuple[int, int]:
    """Return (bands, rows) for N_PERM values; 16 x 8 for 0.8.

    Two texts of similarity s share a bucket with probability 1 - (1 - s**rows)**bands, which rises
    most steeply near s = (1 / bands)**(1 / rows). More rows rise more steeply: take the most whose
    rise lies 0.07 below the threshold. Rajaraman and Ullman, Mining of Massive Datasets, 3.4."""
    rise = max(threshold - 0.07, 1 / N_PERM)
    shapes = [(N_PERM // rows, rows) for rows in range(1, 33)]
    return [(bands, rows) for bands, rows in shapes if (1 / bands) ** (1 / rows) <= rise][-1]


def check_number(n_documents: int) -> None:
    """Raise UserError if so many documents cannot be compared in one run."""
    if n_documents > MOST_DOCUMENTS:
        what = f"{n_documents:,} documents are more than {MOST_DOCUMENTS:,}"
        raise UserError(f"dedup: {what}; prepare them in parts, or with near=0")


def near_duplicates(
    signatures: np.ndarray, threshold: float, bands: int, rows: int
) -> NearDuplicates:
    """Return which documents to drop, given signatures (n, n_values) uint32, a memory-mapped file
    if you like.

    Documents are taken in order. One is dropped if an earlier kept one has the same `rows` values
    in some band and at least `threshold` of the whole signature. So the first copy survives, a
    chain A~B~C does not drop C because of B, and documents added at the end never change earlier
    results. Documents without units are kept. Takes 90 to 230 bytes of memory per document."""
    check_number(len(signatures))
    signatures = np.asarray(signatures)  # rows of a memmap are slow
    buckets = Buckets(signatures, bands, rows)
    dropped, partner, similarity = array("q"), array("q"), array("f")  # small, unlike lists
    for i in memoryview(buckets.documents):  # ints, without a list of them all
        others = buckets.kept_beside(i)
        if len(others):
            same = (signatures[others] == signatures[i]).mean(axis=1)
            best = int(same.argmax())
            if same[best] >= threshold:
                dropped.append(i)
                partner.append(others[best])
                similarity.append(same[best])
                continue
        buckets.keep(i)
    return NearDuplicates(
        np.array(dropped, np.int64),
        np.array(partner, np.int64),
        np.array(similarity, np.float32),
        buckets.capped,
    )


class Buckets:
    """Kept documents by bucket, in flat arrays. A bucket is a value of a band that several
    documents have."""

    def __init__(self, signatures: np.ndarray, bands: int, rows: int) -> None:
        hashes, has_units = band_hashes(signatures, bands, rows)
        # (document, band): bucket of that band, or -1; reuses the memory of the hashes
        self.table = hashes.view(np.int32)
        shared = np.zeros(len(hashes), bool)
        room, firsts = [np.empty(0, np.uint8)], [0]
        for band in range(bands):
            documents, bucket, sizes = common_values(hashes[:, band], has_units)
            self.table[:, band] = -1
            self.table[documents, band] = bucket
            shared[documents] = True
            room.append(np.minimum(sizes, COMPARED).astype(np.uint8))
            firsts.append(firsts[-1] + len(sizes))
        self.first = np.array(firsts[:-1], np.int64)  # bucket of each band, among those of all
        # Bucket b has room for room[b] kept documents, from member[begin[b]] on.
        room = np.concatenate(room)
        self.member = np.empty(room.sum(dtype=np.int64), np.int32)
        self.begin = np.cumsum(room, dtype=np.int32 if len(self.member) < 2**31 else np.int64)
        self.begin -= room
        self.filled = np.zeros(len(room), np.uint8)
        self.documents = np.flatnonzero(shared)
        self.capped = 0

    def of(self, i: int) -> np.ndarray:
        """Return the buckets of a document."""
        bucket = self.table[i]
        return (bucket + self.first)[bucket >= 0]

    def kept_beside(self, i: int) -> np.ndarray:
        """Return the kept documents that share a bucket with document i, ascending."""
        buckets = self.of(i)
        places = zip(self.begin[buckets].tolist(), self.filled[buckets].tolist(), strict=True)
        found = [self.member[begin : begin + n] for begin, n in places if n]
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int32)

    def keep(self, i: int) -> None:
        buckets = self.of(i)
        free = buckets[self.filled[buckets] < COMPARED]
        self.member[self.begin[free] + self.filled[free]] = i
        self.filled[free] += 1
        self.capped += len(free) < len(buckets)


def band_hashes(signatures: np.ndarray, bands: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return hashes (n, bands) uint32 of each band's values, and (n,) bool: whether the text has
    units.

    32 bits are enough: documents that share a hash by chance have different signatures."""
    hashes = np.empty((len(signatures), bands), np.uint32)
    has_units = np.empty(len(signatures), bool)
    weights = character_powers()[0][1 : rows + 1]
    for begin in range(0, len(signatures), 2**10):
        part = slice(begin, begin + 2**10)
        values = signatures[part, : bands * rows].reshape(-1, bands, rows)
        hashes[part] = (values * weights).sum(axis=2) >> np.uint64(32)
        has_units[part] = (values != NO_UNITS).any(axis=(1, 2))
    return hashes, has_units


def common_values(
    values: np.ndarray, wanted: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group the equal ones among the `wanted` of values (n,) uint32. Return the places of those in
    groups of at least two, the number of each one's group, and the sizes of the groups."""
    # Value and place as one number: sorted, equal values are neighbours, in the order of places.
    keys = np.flatnonzero(wanted).view(np.uint64)
    keys |= values[wanted].astype(np.uint64) << np.uint64(32)
    keys.sort()
    new = np.ones(len(keys) + 1, bool)
    new[1:-1] = np.diff((keys >> np.uint64(32)).astype(np.uint32)) != 0
    sizes = np.diff(np.flatnonzero(new))
    common = sizes > 1
    places = keys[np.repeat(common, sizes)] & np.uint64(2**32 - 1)
    sizes = sizes[common]
    return places.view(np.int64), np.repeat(np.arange(len(sizes)), sizes), sizes
