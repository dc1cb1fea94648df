"""The same text twice: exact copies by a hash, near duplicates by MinHash.

Everything but the exact key works on units: a run of letters, marks and digits of scripts with spaces, or one character
of Han, Hiragana or Katakana. One rule for Chinese, English and mixed text, without a word segmenter.
"""

import hashlib
import unicodedata
from array import array
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from groundup.errors import UserError

SHINGLE = 5  # units; of unrelated Chinese texts single characters are half the same, runs of five hardly ever
N_PERM = 128
NO_UNITS = np.uint32(2**32 - 1)  # a signature of nothing, as in datasketch
COMPARED = 64  # kept documents of a bucket that a document is compared with at most
SLICE = 2**16  # characters or units worked on at once, so that they stay in the processor's L2 cache

CHARACTER_FACTOR = 0x9E3779B97F4A7C15  # odd, of arithmetic modulo 2**64; nothing depends on the choice
UNIT_FACTOR = np.uint64(0xC2B2AE3D27D4EB4F)





# ---- units --------------------------------------------------------------------------------------------------


class Units(NamedTuple):
    """The units of several texts, one after the other: those of text t are [starts[t], starts[t + 1])."""

    hashes: np.ndarray  # (n,) uint64
    starts: np.ndarray  # (n_texts + 1,) int64
    begins: np.ndarray  # (n,) int64, characters into the unit's own text
    ends: np.ndarray  # (n,) int64


# Script=Han, Hiragana and Katakana in Unicode, with the marks of length and voice that these share. Planes 2 and 3 are
# Han throughout, so that characters of a newer Unicode than Python's are known too.
ONE_CHARACTER_UNITS = (
    (0x2E80, 0x2FD6), (0x3005, 0x3006), (0x3007, 0x3008), (0x3021, 0x302A), (0x3038, 0x303C), (0x3041, 0x3100),
    (0x31F0, 0x3200), (0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0xFF66, 0xFFA0), (0x16FE3, 0x16FE4),
    (0x16FF0, 0x16FF7), (0x1AFF0, 0x1B170), (0x20000, 0x3FFFE),
)  # fmt: skip
SINGLE = np.uint32(2**31)  # added to the code of such a character


@lru_cache(maxsize=1)
def unit_codes() -> np.ndarray:
    """For each code point (0x110000,) uint32: 0 if it separates units, else its lower case (plus SINGLE).

    Lower case by single characters, and full width as half width, so that offsets into the text stay what they are.
    """
    codes = np.arange(0x110000, dtype=np.uint32)
    lower = [c.lower() for c in map(chr, range(0x20000))]  # no script beyond has cases
    codes[: len(lower)] = [ord(c) if len(c) == 1 else i for i, c in enumerate(lower)]
    codes[0xFF01:0xFF5F] = codes[0x21:0x7F]
    classes = "".join(unicodedata.category(chr(i))[0] for i in range(0x20000))
    is_unit = np.zeros(0x110000, bool)
    is_unit[: len(classes)] = np.isin(np.frombuffer(classes.encode(), np.uint8), np.frombuffer(b"LMN", np.uint8))
    is_unit[0xFF01:0xFF5F] = is_unit[0x21:0x7F]
    is_unit[0xE0100:0xE01F0] = True  # marks: variation selectors
    is_unit[0x2E80:0x2FD6] = True  # radicals, which stand for characters in text taken from PDF
    is_unit[0x20000:0x3FFFE] = True
    codes[~is_unit] = 0
    for begin, end in ONE_CHARACTER_UNITS:
        codes[begin:end] += SINGLE * is_unit[begin:end]
    return codes


@lru_cache(maxsize=1)
def character_powers() -> tuple[np.ndarray, np.ndarray]:
    """CHARACTER_FACTOR ** i and CHARACTER_FACTOR ** -i modulo 2**64, for i of a slice."""
    factors = np.full((2, SLICE + 1), CHARACTER_FACTOR, np.uint64)
    factors[1] = pow(CHARACTER_FACTOR, -1, 2**64)
    factors[:, 0] = 1
    powers = np.multiply.accumulate(factors, axis=1)
    return powers[0], powers[1]


def units(texts: list[str]) -> Units:
    """The units of texts: lower case, full width forms as half width; a hash depends on the characters alone.

    A run of more than SLICE letters may become several units. Surrogates and control characters separate.
    """
    counts: list[np.ndarray] = []
    columns: list[list[np.ndarray]] = [[], [], []]
    for group in groups(texts):
        counts.append(np.zeros(len(group), np.int64))
        for part in scan_long(group[0]) if group and len(group[0]) > SLICE else [scan(group)]:
            counts[-1] += np.diff(part.starts)
            for column, values in zip(columns, (part.hashes, part.begins, part.ends), strict=True):
                column.append(values)
    starts = np.cumsum(np.concatenate([np.zeros(1, np.int64), *counts]))
    hashes, begins, ends = (np.concatenate(columns.pop(0)) for _ in range(3))  # each is freed before the next is made
    return Units(hashes, starts, begins, ends)


def groups(texts: list[str]) -> Iterator[list[str]]:
    """Texts that make up a slice together; a longer one alone."""
    group, size = [], 0
    for text in texts:
        if group and size + len(text) >= SLICE:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text) + 1
    yield group


def scan_long(text: str) -> Iterator[Units]:
    """Slice by slice from the text's own start: what else is in the batch does not matter. A unit that ends where the
    slice ends may go on, and is read again with the next one."""
    begin = 0
    while begin < len(text):
        part = scan([text[begin : begin + SLICE]])
        n, end = len(part.hashes), begin + SLICE
        if end < len(text) and n > 1 and part.ends[-1] == SLICE:
            n -= 1
            end = begin + int(part.begins[n])
        yield Units(part.hashes[:n], np.array([0, n]), part.begins[:n] + begin, part.ends[:n] + begin)
        begin = end


def scan(texts: list[str]) -> Units:
    """Units of texts that make up at most a slice.

    The hash of a unit is a polynomial of its characters. Sums over all characters up to each one give that of any run:
    a difference, moved to the first place by a negative power.
    """
    joined = np.frombuffer("\n".join([*texts, ""]).encode("utf-32-le", "surrogatepass"), "<u4")
    codes = unit_codes()[joined]
    single = codes >= SINGLE
    spaced = (codes > 0) > single
    first, last = single.copy(), single.copy()
    first[:1] |= spaced[:1]
    first[1:] |= spaced[1:] > spaced[:-1]
    last[:-1] |= spaced[:-1] > spaced[1:]  # the last character of all is a separator
    begins, ends = np.flatnonzero(first), np.flatnonzero(last) + 1
    powers, inverses = character_powers()
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum(codes * powers[: len(codes)], out=sums[1:])
    hashes = mix64((sums[ends] - sums[begins]) * inverses[begins])
    text_begins = np.cumsum([0] + [len(text) + 1 for text in texts])
    starts = np.searchsorted(begins, text_begins)
    shift = np.repeat(text_begins[:-1], np.diff(starts))
    return Units(hashes, starts, begins - shift, ends - shift)


def mix64(h: np.ndarray) -> np.ndarray:
    """MurmurHash3's finalizer, a bijection: every bit of the result depends on every bit given."""
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xFF51AFD7ED558CCD)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    h ^= h >> np.uint64(33)
    return h


def windows(hashes: np.ndarray, n: int) -> Iterator[np.ndarray]:
    """Hashes of all runs of 1, 2, .. n units, along the last axis; entry i is that of the run from unit i on."""
    h = hashes
    yield h
    for length in range(2, n + 1):
        h = h[..., :-1] * UNIT_FACTOR
        h += hashes[..., length - 1 :]
        yield h


# ---- exact --------------------------------------------------------------------------------------------------


def exact_key(text: str) -> bytes:
    """16 bytes, equal for texts that differ in white space, case or the composition of characters at most.

    64 bits would make one false pair among a billion documents likely (n**2 / 2**65); 128 do not.
    """
    text = "".join(unicodedata.normalize("NFC", text).lower().split())
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def first_copies(keys: np.ndarray) -> np.ndarray:
    """keys (n, 2) uint64, a row from each exact_key -> (n,) int64: the first row that is equal, the row itself if none
    before it is. 33 bytes of memory per row."""
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: of equal rows the first comes first
    new = np.ones(len(keys), bool)
    for column in keys.T:
        ordered = column[order]
        new[1:] &= ordered[1:] == ordered[:-1]
    new[1:] ^= True
    group = np.cumsum(new)
    group -= 1
    first = np.empty(len(keys), np.int64)
    first[order] = order[new][group]
    return first


# ---- signatures ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def permutations(n_perm: int) -> tuple[np.ndarray, np.ndarray]:
    """Factors and summands (n_perm,) uint32 of datasketch's affine32 scheme."""
    from datasketch import MinHash  # here because it imports scipy, half a second

    a, b = MinHash(num_perm=n_perm, seed=1).permutations
    return a, b


def signatures(units: Units, n_perm: int = N_PERM) -> np.ndarray:
    """MinHash signatures (n_texts, n_perm) uint32 of the sets of 5 consecutive units; a text of fewer has one element,
    all its units; the row of a text without units is all 2**32 - 1.

    Equal to datasketch's `MinHash(num_perm=n_perm, seed=1, scheme="affine32")` for 32-bit elements, and independent of
    what else is in the batch. Broder, On the resemblance and containment of documents (1997).
    """
    result = np.full((len(units.starts) - 1, n_perm), NO_UNITS, np.uint32)
    for first in range(0, len(units.hashes), SLICE):
        texts, begins, shingles = shingle_block(units, first)
        if len(texts):
            result[texts] = np.minimum(result[texts], least(shingles, begins, n_perm))
    return result


def shingle_block(units: Units, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The shingles that begin at one of SLICE units: the texts they are of, where in the block each text begins, and
    the elements (uint32)."""
    hashes, starts = units.hashes, units.starts
    last = min(first + SLICE, len(hashes))
    texts = np.arange(np.searchsorted(starts, first, "right") - 1, np.searchsorted(starts, last, "left"))
    begins, counts = starts[texts], starts[texts + 1] - starts[texts]
    elements = np.zeros(last - first, np.uint64)
    *_, runs = windows(hashes[first : last + SHINGLE - 1], SHINGLE)
    elements[: len(runs)] = runs[: len(elements)]
    for n in range(1, SHINGLE):
        short = begins[(counts == n) & (begins >= first)]
        if len(short):
            *_, whole = windows(hashes[short[:, None] + np.arange(n)], n)
            elements[short - first] = whole[:, 0]
    ends = begins + np.maximum(counts - SHINGLE + 1, np.minimum(counts, 1))
    begins, ends = np.maximum(begins, first) - first, np.minimum(ends, last) - first
    some = begins < ends
    texts, begins, lengths = texts[some], begins[some], (ends - begins)[some]
    places = np.cumsum(lengths) - lengths
    kept = np.arange(lengths.sum()) + np.repeat(begins - places, lengths)
    return texts, places, (elements[kept] >> np.uint64(32)).astype(np.uint32)


def least(shingles: np.ndarray, begins: np.ndarray, n_perm: int) -> np.ndarray:
    """(texts, n_perm) uint32: under each permutation the least of a text's shingles, [begins[t], begins[t + 1])."""
    h = shingles ^ (shingles >> np.uint32(16))  # MurmurHash3's 32-bit finalizer, as datasketch applies it first
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    result = np.empty((n_perm, len(begins)), np.uint32)
    permuted = np.empty_like(h)
    for row, a, b in zip(result, *permutations(n_perm), strict=True):
        np.multiply(h, a, out=permuted)
        np.add(permuted, b, out=permuted)
        np.minimum.reduceat(permuted, begins, out=row)
    return result.T


# ---- near duplicates ----------------------------------------------------------------------------------------


class NearDuplicates(NamedTuple):
    dropped: np.ndarray  # (m,) int64, ascending
    partner: np.ndarray  # (m,) int64: of the kept documents before it the most similar one, the first of equals
    similarity: np.ndarray  # (m,) float32: estimated Jaccard similarity of the two
    capped: int  # kept documents in a bucket that held COMPARED others already; later ones do not meet them there


def bands_for(threshold: float) -> tuple[int, int]:
    """(bands, rows) for N_PERM values: the steepest chance 1 - (1 - s**rows)**bands of two texts of similarity s to
    meet in a bucket, whose steep part, about (1 / bands)**(1 / rows), ends below the threshold: 16 x 8 for 0.8.

    Rajaraman and Ullman, Mining of Massive Datasets, section 3.4. Raises DedupError outside (0, 1].
    """
    if not 0 < threshold <= 1:
        raise UserError(f"dedup: the similarity of near duplicates must be above 0 and at most 1, got {threshold}")
    shapes = [(N_PERM // rows, rows) for rows in range(1, 33)]
    low = [(bands, rows) for bands, rows in shapes if (1 / bands) ** (1 / rows) <= threshold - 0.07]
    return low[-1] if low else shapes[0]


def near_duplicates(
    signatures: np.ndarray, threshold: float, bands: int, rows: int, engine: str = "numpy"
) -> NearDuplicates:
    """What to drop of signatures (n, n_perm) uint32, which may be a memory-mapped file.

    Documents are taken in order. One is dropped if a kept one before it shares a bucket with it (all `rows` values of
    some band) and at least `threshold` of the whole signature: the first survives, A~B~C does not drop C for B's sake,
    and appended documents never change what happened before. Rows without units are always kept.

    engine: "numpy", or "datasketch" (MinHashLSH): the same result while nothing is capped; it compares all there is.
    numpy: 90 to 230 bytes of memory per document. Raises DedupError.
    """
    if bands < 1 or rows < 1 or bands * rows > signatures.shape[1]:
        raise UserError(f"dedup: {bands} bands of {rows} rows do not fit in {signatures.shape[1]} values; use fewer")
    if engine not in ("numpy", "datasketch"):
        raise UserError(f"dedup: engine must be numpy or datasketch, got {engine!r}")
    if len(signatures) * bands >= 2**32:
        raise UserError(f"dedup: {len(signatures):,} documents are too many for {bands} bands; dedup them in parts")
    signatures = np.asarray(signatures)  # not as a memmap, whose every row is a slow object
    index = (Buckets if engine == "numpy" else DatasketchBuckets)(signatures, bands, rows)
    dropped, partner, similarity = array("q"), array("q"), array("f")  # flat, a tenth of lists
    for i in memoryview(index.documents):
        others = index.kept_beside(i)
        if len(others):
            same = (signatures[others] == signatures[i]).mean(axis=1)
            best = int(same.argmax())
            if same[best] >= threshold:
                dropped.append(i)
                partner.append(others[best])
                similarity.append(same[best])
                continue
        index.keep(i)
    columns = np.array(dropped, np.int64), np.array(partner, np.int64), np.array(similarity, np.float32)
    return NearDuplicates(*columns, index.capped)


class Buckets:
    """Kept documents by band and band value, in flat arrays; only of values that several documents have."""

    def __init__(self, signatures: np.ndarray, bands: int, rows: int) -> None:
        hashes, has_units = band_hashes(signatures, bands, rows)
        self.table = hashes.view(np.int32)  # in place: of document and band, the bucket or -1
        shared = np.zeros(len(hashes), bool)
        room = [np.empty(0, np.uint8)]
        for band in range(bands):
            documents, bucket, sizes = common_values(hashes[:, band], has_units)
            self.table[:, band] = -1
            self.table[documents, band] = bucket + sum(map(len, room))
            shared[documents] = True
            room.append(np.minimum(sizes, COMPARED).astype(np.uint8))
        room = np.concatenate(room)
        self.member = np.empty(room.sum(dtype=np.int64), np.int32)
        self.begin = np.cumsum(room, dtype=np.int32 if len(self.member) < 2**31 else np.int64)  # of a bucket
        self.begin -= room
        self.filled = np.zeros(len(room), np.uint8)
        self.documents = np.flatnonzero(shared)
        self.capped = 0

    def kept_beside(self, i: int) -> np.ndarray:
        """Kept documents, ascending, that share a bucket with i."""
        buckets = self.table[i]
        buckets = buckets[buckets >= 0]
        filled = self.filled[buckets]
        held = [self.member[b : b + n] for b, n in zip(self.begin[buckets].tolist(), filled.tolist(), strict=True) if n]
        return np.unique(np.concatenate(held)) if held else np.empty(0, np.int32)

    def keep(self, i: int) -> None:
        buckets = self.table[i]
        buckets = buckets[buckets >= 0]
        free = buckets[self.filled[buckets] < COMPARED]
        self.member[self.begin[free] + self.filled[free]] = i
        self.filled[free] += 1
        self.capped += len(free) < len(buckets)


def band_hashes(signatures: np.ndarray, bands: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes (n, bands) uint32 of each band's values, and (n,) bool: whether a row is of a text with units.

    32 bits: documents that meet by chance are told apart by their signatures.
    """
    hashes = np.empty((len(signatures), bands), np.uint32)
    has_units = np.empty(len(signatures), bool)
    weights = character_powers()[0][1 : rows + 1]
    for begin in range(0, len(signatures), 2**10):
        part = slice(begin, begin + 2**10)
        values = signatures[part, : bands * rows].reshape(-1, bands, rows)
        hashes[part] = (values * weights).sum(axis=2) >> np.uint64(32)
        has_units[part] = (values != NO_UNITS).any(axis=(1, 2))
    return hashes, has_units


def common_values(values: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of values (n,) uint32 the places where `wanted` that have a value in common with others, the group of each, and
    the sizes of the groups."""
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


class DatasketchBuckets:
    """Kept documents in datasketch's MinHashLSH: slower, several kB per document, and independent of `Buckets`."""

    def __init__(self, signatures: np.ndarray, bands: int, rows: int) -> None:
        from datasketch import LeanMinHash, MinHashLSH

        # params: what datasketch would choose for a threshold finds 40 % of the pairs at 0.8
        self.index = MinHashLSH(num_perm=signatures.shape[1], params=(bands, rows))
        self.sketch = lambda i: LeanMinHash(seed=1, hashvalues=signatures[i], scheme="affine32")
        self.documents = np.flatnonzero((signatures[:, : bands * rows] != NO_UNITS).any(axis=1))
        self.capped = 0

    def kept_beside(self, i: int) -> np.ndarray:
        return np.array(sorted(self.index.query(self.sketch(i))), np.int64)

    def keep(self, i: int) -> None:
        self.index.insert(i, self.sketch(i), check_duplication=False)
