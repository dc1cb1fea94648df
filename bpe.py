"""Byte pair encoding, the training half: from text to the list of merges, exact, in numpy.

Text is cut into chunks by a regular expression; chunks are counted, so a corpus of any size becomes a table of distinct
chunks; then the most frequent pair of neighbours inside chunks is joined, again and again (Sennrich et al., 2016,
arXiv:1508.07909, on bytes as in GPT-2). tokenizer.py turns the merges into a tokenizer.
"""

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import itemgetter

import numpy as np
import regex
from tqdm import tqdm

# GPT-4's pattern (tiktoken, cl100k_base) with at most two digits per chunk instead of three: better for vocabularies of
# about 32k (nanochat). "?+" and "++" do not give back what they took. Every character matches some branch.
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # what HF's "ByteLevel" means
MIN_COUNT = 2  # a pair seen once is not worth an id
MAX_CHUNKS = 4_000_000  # distinct chunks held while counting, about 0.4 GB; beyond it the rarest are let go
MAX_CHUNK_CHARS = 256  # longer runs (a rule of dashes, base64) are counted in parts

# tiktoken's regular expressions overflow their stack on about a million white-space characters, so it is given text
# in blocks. A text may be cut between a letter or digit and one of these: no pattern in use has a chunk across the two,
# or looks back, or looks further ahead than to the end of a run of white space. U+3001 and the others are the
# punctuation of Chinese, which has no spaces.
MAX_CHARS = 100_000
SAFE_CUT = re.compile("(?<=[^\\W_])(?=[ \n\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])")


# ---- text to counted chunks ----


def scrub(text: str) -> str:
    """`text` as valid Unicode: surrogate pairs are joined, lone surrogates (which UTF-8 cannot hold) become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def blocks(text: str) -> Iterator[str]:
    """`text` in parts of at most MAX_CHARS, cut where that cannot change the ids, or anywhere in a stretch of more than
    MAX_CHARS / 2 characters without such a place."""
    start = 0
    while len(text) - start > MAX_CHARS:
        cut = SAFE_CUT.search(text, start + MAX_CHARS // 2, start + MAX_CHARS)
        end = cut.start() if cut else start + MAX_CHARS
        yield text[start:end]
        start = end
    yield text[start:]


def count_chunks(texts: Iterable[str], pattern: str = PATTERN) -> dict[bytes, int]:
    """{chunk of text as UTF-8: how often it occurs}, over all texts; memory is bounded by MAX_CHUNKS."""
    split = regex.compile(pattern).findall
    counts: Counter[str] = Counter()
    for text in texts:
        for block in blocks(scrub(text)):
            counts.update(split(block))
        if len(counts) > MAX_CHUNKS:
            counts = drop_rarest(counts)
    parts: Counter[bytes] = Counter()
    for chunk, count in counts.items():
        for start in range(0, len(chunk), MAX_CHUNK_CHARS):
            parts[chunk[start : start + MAX_CHUNK_CHARS].encode()] += count
    return dict(parts)


def drop_rarest(counts: Counter[str]) -> Counter[str]:
    """The most frequent chunks of `counts`, as many as half of MAX_CHUNKS."""
    kept = sorted(counts.items(), key=itemgetter(1), reverse=True)[: MAX_CHUNKS // 2]
    lost = len(counts) - len(kept)
    print(f"tokenizer: {lost:,} of {len(counts):,} distinct chunks, seen <= {kept[-1][1]} times so far, are let go")
    return Counter(dict(kept))


def train_bpe(counts: dict[bytes, int], max_merges: int) -> list[tuple[int, int]]:
    """The merges [(left id, right id), ...] that byte pair encoding learns; merge i makes the token 256 + i.

    Repeatedly joins the neighbours that occur most often (ties: the smallest (left, right)), everywhere, left to right
    inside each chunk. Exact, and independent of the order of `counts`. Ends early when no pair occurs MIN_COUNT times.

    A pair can only come into being when the later of its two tokens does; from then on its count only falls. Hence a
    heap of counts as they once were, corrected when an entry reaches the top, always yields the true maximum, and the
    list of positions made at a pair's birth holds all that it will ever have.
    """
    corpus = Corpus(counts)
    heap = [(-count, pair) for pair, count in corpus.pair_counts.items()]
    heapq.heapify(heap)
    merges: list[tuple[int, int]] = []
    progress = tqdm(total=max_merges, desc="merges", unit="", disable=None)
    while heap and len(merges) < max_merges:
        negative, pair = heapq.heappop(heap)
        count = corpus.pair_counts[pair]
        if count < MIN_COUNT:
            corpus.forget(pair)
        elif count != -negative:
            heapq.heappush(heap, (-count, pair))
        else:
            born = corpus.merge(pair, 256 + len(merges))
            merges.append(halves(pair))
            for new in born:
                heapq.heappush(heap, (-corpus.pair_counts[new], new))
            progress.update()
    progress.close()
    return merges


def halves(pair: int) -> tuple[int, int]:
    """(left id, right id) of left << 32 | right."""
    return pair >> 32, pair & 0xFFFF_FFFF


class Corpus:
    """All distinct chunks laid end to end in numpy arrays, one slot per byte, with a sentinel slot around each chunk.

    token (slots,) int32: the id that starts in the slot, SENTINEL, or GONE when a merge has swallowed it
    after, before (slots,) int32: the neighbouring live slots;  weight (slots,) int64: how often the chunk occurs
    pair_counts {pair: weighted count}, places {pair: slots where it began at its birth, ascending}, for all pairs that
    occurred at least MIN_COUNT times when they were born; a pair is the integer left << 32 | right
    """

    SENTINEL, GONE = -1, -2

    def __init__(self, counts: dict[bytes, int]) -> None:
        chunks = list(counts)
        lengths = np.fromiter(map(len, chunks), np.int64, len(chunks))
        slots = int(lengths.sum()) + len(chunks) + 1
        inside = np.ones(slots, bool)
        inside[0] = False
        inside[np.cumsum(lengths + 1)] = False
        self.token = np.full(slots, self.SENTINEL, np.int32)
        self.token[inside] = np.frombuffer(b"".join(chunks), np.uint8)
        self.weight = np.zeros(slots, np.int64)
        self.weight[inside] = np.repeat(np.fromiter(counts.values(), np.int64, len(chunks)), lengths)
        self.after = np.arange(1, slots + 1, dtype=np.int32)
        self.before = np.arange(-1, slots - 1, dtype=np.int32)
        self.pair_counts: dict[int, int] = {}
        self.places: dict[int, np.ndarray] = {}
        first = np.flatnonzero(inside[:-1] & inside[1:]).astype(np.int32)
        pairs = self.token[first].astype(np.int64) << 32 | self.token[first + 1]
        for pair, count, where in grouped(pairs, self.weight[first], first):
            if count >= MIN_COUNT:
                self.pair_counts[pair] = count
                self.places[pair] = where

    def forget(self, pair: int) -> None:
        del self.pair_counts[pair], self.places[pair]

    def merge(self, pair: int, new: int) -> list[int]:
        """Replace `pair` by the token `new` wherever it occurs; return the pairs that this gives birth to."""
        left, right = halves(pair)
        first = self.places[pair]
        first = first[(self.token[first] == left) & (self.token[self.after[first]] == right)]  # where it still is
        self.forget(pair)
        if left == right:
            first = every_other(first, self.after)
        second = self.after[first]
        following = self.after[second]
        preceding = self.before[first]
        # In "abab" one occurrence follows the other: the pair between them is seen from the first, not again from the
        # second.
        apart = np.ones(len(first), bool)
        apart[1:] = preceding[1:] != second[:-1]

        self.token[first] = new
        self.token[second] = self.GONE
        self.after[first] = following
        self.before[following] = first

        born = []
        weight = self.weight[first]
        token_after = self.token[following]
        some = token_after != self.SENTINEL
        for other, count, where in grouped(token_after[some], weight[some], first[some]):
            before_merge = left if other == new else other
            self.lose(right << 32 | before_merge, count)
            born += self.gain(new << 32 | other, count, where)
        token_before = self.token[preceding]
        some = apart & (token_before != self.SENTINEL)
        for other, count, where in grouped(token_before[some], weight[some], preceding[some]):
            self.lose(other << 32 | left, count)
            born += self.gain(other << 32 | new, count, where)
        return born

    def lose(self, pair: int, count: int) -> None:
        if pair in self.pair_counts:
            self.pair_counts[pair] -= count

    def gain(self, pair: int, count: int, where: np.ndarray) -> list[int]:
        if count < MIN_COUNT:
            return []
        self.pair_counts[pair] = count
        self.places[pair] = where
        return [pair]


def grouped(keys: np.ndarray, weight: np.ndarray, where: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """(key, its total weight, its places in the order given) for every distinct key; all three (n,) integers."""
    if len(keys) == 0:
        return
    order = np.argsort(keys, kind="stable")
    keys, where = keys[order], where[order]
    start = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    totals = np.add.reduceat(weight[order], start).tolist()
    ends = [*start[1:].tolist(), len(keys)]
    for key, total, begin, end in zip(keys[start].tolist(), totals, start.tolist(), ends, strict=True):
        yield key, total, where[begin:end]


def every_other(first: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Of the places where "aa" occurs, those that merging from left to right uses: in "aaaaa" the 1st and the 3rd."""
    n = np.arange(len(first))
    starts_run = np.ones(len(first), bool)
    starts_run[1:] = first[1:] != after[first[:-1]]
    run_start = np.maximum.accumulate(np.where(starts_run, n, 0))
    return first[(n - run_start) % 2 == 0]
