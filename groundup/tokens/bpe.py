"""Train byte pair encoding: from text to merges (ours, exact, in numpy), or with sentencepiece.

Ours (Sennrich et al., 2016, arXiv:1508.07909, on bytes as in GPT-2): a regular expression cuts text
into chunks; equal chunks are counted, so a corpus of any size becomes a table of distinct chunks;
then the most frequent pair of neighbours inside chunks is merged into one token, again and again.
training.py makes a tokenizer of the result.
"""

import heapq
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import itemgetter

import numpy as np
import regex
import sentencepiece
from tqdm import tqdm

from groundup.errors import UserError
from groundup.files.untrusted import scrub
from groundup.tokens.foreign import MAX_CHARS, PATTERNS, SIZE_STEP, blocks

PATTERN = PATTERNS["qwen"]
MIN_COUNT = 2  # a pair seen once is not worth an id
# of distinct chunks kept; beyond it the rarest are dropped. Training takes 50 times as much memory
MAX_BYTES = 24_000_000
MAX_CHUNK_CHARS = 256  # longer runs (a rule of dashes, base64) are counted in parts
HAN = regex.compile(r"\p{Han}")
COVERED = 0.9999  # one Han character in ten thousand is left to its bytes
SENTENCEPIECE_MB = 200  # sentencepiece holds all of its text in memory, several times over


# ---- chunks ----------------------------------------------------------------------------------


def count_chunks(texts: Iterable[str], pattern: str = PATTERN) -> dict[bytes, int]:
    """Return {chunk in UTF-8: how often it occurs in all texts}.

    MAX_BYTES bounds the memory."""
    split = regex.compile(pattern).findall
    counts: Counter[str] = Counter()
    unchecked = 0
    for text in texts:
        for block in blocks(scrub(text)):
            counts.update(split(block))
        unchecked += len(text)
        if unchecked > MAX_BYTES // 8:
            unchecked = 0
            if sum(map(n_bytes, counts)) > MAX_BYTES:
                counts = drop_rarest(counts)
    parts: Counter[bytes] = Counter()
    for chunk, count in counts.items():
        for start in range(0, len(chunk), MAX_CHUNK_CHARS):
            parts[chunk[start : start + MAX_CHUNK_CHARS].encode()] += count
    return dict(parts)


def n_bytes(chunk: str) -> int:
    """Return the bytes in UTF-8 or more (not for the rarest characters, which have four)."""
    return len(chunk) if chunk.isascii() else 3 * len(chunk)


def drop_rarest(counts: Counter[str]) -> Counter[str]:
    """Return the most frequent chunks, up to half of MAX_BYTES; of equal ones the first."""
    kept, room = {}, MAX_BYTES // 2
    for chunk, count in sorted(counts.items(), key=itemgetter(1), reverse=True):
        room -= n_bytes(chunk)
        if room < 0:
            break
        kept[chunk] = count
    lost = f"{len(counts) - len(kept):,} of {len(counts):,} distinct chunks"
    print(f"tokenizer: {lost}, seen <= {count} times so far, are dropped")
    return Counter(kept)


def characters_first(counts: dict[bytes, int], most: int) -> dict[bytes, int]:
    """Return the counts with the frequent Han characters as chunks of their own.

    They count so often that they are merged before any word: then a model writes characters, not
    parts of them. Taken are those that make up COVERED of all Han characters, the most frequent
    first; with the two-byte beginnings that they share they need at most `most` merges.
    """
    seen: Counter[str] = Counter()
    for chunk, count in counts.items():
        for character in HAN.findall(chunk.decode()):
            seen[character] += count
    found, beginnings = [], set()
    left = seen.total() * COVERED
    for character, count in sorted(seen.items(), key=lambda item: (-item[1], item[0])):
        beginnings.add(character.encode()[:2])
        if left <= 0 or len(found) + len(beginnings) >= most:
            break
        found.append(character.encode())
        left -= count
    often = sum(counts.values()) + 1
    return counts | {character: counts.get(character, 0) + often for character in found}


# ---- merges ----------------------------------------------------------------------------------


def train_bpe(counts: dict[bytes, int], max_merges: int) -> list[tuple[int, int]]:
    """Return the merges [(left id, right id), ...] that byte pair encoding learns.

    Merge i makes the token 256 + i. Merge the most frequent pair of neighbours (ties: the smallest
    (left, right)) everywhere, left to right inside each chunk, until no pair occurs MIN_COUNT
    times. The result does not depend on the order of `counts`.
    """
    lengths = np.fromiter(map(len, counts), np.int64, len(counts))
    weights = np.fromiter(counts.values(), np.int64, len(counts))
    tokens = np.frombuffer(b"".join(counts), np.uint8)
    return Chunks(tokens, lengths, weights).train(max_merges, first_id=256)


class Chunks:
    """All distinct chunks end to end, one slot per token, with a sentinel slot around each chunk.

    token (slots,) int32: the id that starts in the slot, SENTINEL, or GONE when it was merged
    after, before (slots,) int32: the neighbouring slots in use
    weight (slots,) int64: how often the chunk occurs
    pair_counts {pair: weighted count}, without pairs that were below MIN_COUNT when first seen
    places {pair: the slots where it began when first seen, ascending}
    waiting: heap of (-count when last looked at, pair)
    A pair is the integer left << 32 | right.

    A new pair appears only when the later of its two tokens does; from then on its count only
    falls. So the places recorded when it was first seen are all it will ever have, and the most
    frequent pair is the first in the heap whose count is still right.
    """

    SENTINEL, GONE = -1, -2

    def __init__(self, tokens: np.ndarray, lengths: np.ndarray, weights: np.ndarray) -> None:
        """Take the tokens of all chunks, end to end, and each chunk's length and weight (int64)."""
        slots = len(tokens) + len(lengths) + 1
        inside = np.ones(slots, bool)
        inside[0] = False
        inside[np.cumsum(lengths + 1)] = False
        self.token = np.full(slots, self.SENTINEL, np.int32)
        self.token[inside] = tokens
        self.weight = np.zeros(slots, np.int64)
        self.weight[inside] = np.repeat(weights, lengths)
        self.after = np.arange(1, slots + 1, dtype=np.int32)
        self.before = np.arange(-1, slots - 1, dtype=np.int32)
        self.pair_counts: dict[int, int] = {}
        self.places: dict[int, np.ndarray] = {}
        self.waiting: list[tuple[int, int]] = []
        first = np.flatnonzero(inside[:-1] & inside[1:]).astype(np.int32)
        self.add_pairs(joined(self.token[first], self.token[first + 1]), first)

    def train(self, max_merges: int, first_id: int) -> list[tuple[int, int]]:
        """Return at most max_merges merges [(left id, right id), ...].

        Merge i makes the token first_id + i."""
        merges: list[tuple[int, int]] = []
        progress = tqdm(total=max_merges, desc="merges", unit="", disable=None)
        while self.waiting and len(merges) < max_merges:
            level, pair = heapq.heappop(self.waiting)
            count = self.pair_counts[pair]
            if count == -level:
                self.merge(pair, first_id + len(merges))
                merges.append(halves(pair))
                progress.update()
            elif count >= MIN_COUNT:
                heapq.heappush(self.waiting, (-count, pair))
            else:
                del self.pair_counts[pair], self.places[pair]
        progress.close()
        return merges

    def merge(self, pair: int, new: int) -> None:
        """Replace `pair` by the token `new` wherever it occurs, and update the pairs around it."""
        del self.pair_counts[pair]
        left, right = halves(pair)
        first = self.places.pop(pair)
        still = (self.token[first] == left) & (self.token[self.after[first]] == right)
        first = first[still]
        if left == right:
            first = every_other(first, self.after)
        second = self.after[first]
        following = self.after[second]
        preceding = self.before[first]
        # In "abab" the second "ab" follows the first: count the pair between them once, from the
        # first.
        apart = np.ones(len(first), bool)
        apart[1:] = preceding[1:] != second[:-1]

        self.token[first] = new
        self.token[second] = self.GONE
        self.after[first] = following
        self.before[following] = first

        token_after, token_before = self.token[following], self.token[preceding]
        ahead = token_after != self.SENTINEL
        behind = apart & (token_before != self.SENTINEL)
        with_after = joined(new, token_after[ahead])
        with_before = joined(token_before[behind], new)
        pairs = np.concatenate((with_after, with_before))
        places = np.concatenate((first[ahead], preceding[behind]))
        added, counts = self.add_pairs(pairs, places)

        # What a new pair gained, the pair in whose place it stands has lost.
        old_left = np.where(added >> 32 == new, right, added >> 32)
        old_right = added & 0xFFFF_FFFF
        old_right = np.where(old_right == new, left, old_right)
        old = joined(old_left, old_right).tolist()
        for old_pair, count in zip(old, counts.tolist(), strict=True):
            if old_pair in self.pair_counts:
                self.pair_counts[old_pair] -= count

    def add_pairs(self, pairs: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Enter new pairs, int64 (n,), that begin at places (n,).

        Return the distinct pairs and their counts."""
        by_pair = np.argsort(pairs, kind="stable")
        pairs, places = pairs[by_pair], places[by_pair]
        del by_pair  # large
        starts = np.flatnonzero(pairs[1:] != pairs[:-1]) + 1
        starts = np.concatenate(([0], starts))[: len(pairs)]
        ends = np.append(starts[1:], len(places))
        pairs = pairs[starts]
        counts = np.add.reduceat(self.weight[places], starts) if len(starts) else starts
        often = np.flatnonzero(counts >= MIN_COUNT)
        columns = [a[often].tolist() for a in (pairs, counts, starts, ends)]  # int is fast
        for pair, count, begin, end in zip(*columns, strict=True):
            self.pair_counts[pair] = count
            self.places[pair] = places[begin:end]
            heapq.heappush(self.waiting, (-count, pair))
        return pairs, counts


def joined(left: np.ndarray | int, right: np.ndarray | int) -> np.ndarray:
    """Return pairs as left << 32 | right."""
    return np.asarray(left, np.int64) << 32 | right


def halves(pair: int) -> tuple[int, int]:
    """Return (left id, right id) of a pair."""
    return pair >> 32, pair & 0xFFFF_FFFF


def every_other(first: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return the places of "aa" that merge from left to right: in "aaaaa" the 1st and the 3rd."""
    n = np.arange(len(first))
    starts_run = np.ones(len(first), bool)
    starts_run[1:] = first[1:] != after[first[:-1]]
    run_start = np.maximum.accumulate(np.where(starts_run, n, 0))
    return first[(n - run_start) % 2 == 0]


# ---- sentencepiece ---------------------------------------------------------------------------


def train_sentencepiece(texts: Iterable[str], vocab_size: int, specials: Iterable[str]) -> bytes:
    """Return a tokenizer.model of sentencepiece that gives text back exactly. Raise UserError."""
    lines = list(lines_of(texts))  # an error of `texts` would be lost inside sentencepiece
    if not lines:
        raise UserError("tokenizer: the input holds no text to learn from")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            minloglevel=2,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            split_digits=True,
            character_coverage=0.9995,  # the rarest characters are written as bytes
            control_symbols=list(specials),  # unlike user_defined_symbols, never found in text
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            # defaults that change the text are undone
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            # bytes; longer lines would be dropped silently, see lines_of
            max_sentence_length=1 << 20,
        )
    except RuntimeError as error:
        if found := re.search(r"value <= (\d+)", str(error)):
            most = int(found[1]) // SIZE_STEP * SIZE_STEP
            how = f"use vocab_size <= {most}, more text, or backend=bpe"
            small = f"the text is too small for vocab_size={vocab_size}"
            raise UserError(f"tokenizer: {small}; {how}") from None
        raise UserError(f"tokenizer: sentencepiece: {' '.join(str(error).split())}") from None
    return model.getvalue()


def lines_of(texts: Iterable[str]) -> Iterator[str]:
    """Yield the lines of `texts`, long ones in parts, up to SENTENCEPIECE_MB.

    Line ends become byte tokens."""
    room = SENTENCEPIECE_MB * 1_000_000
    for text in texts:
        for line in scrub(text).split("\n"):
            for start in range(0, len(line), MAX_CHARS):
                part = line[start : start + MAX_CHARS]
                room -= len(part.encode())
                yield part
        if room <= 0:
            first = f"the first {SENTENCEPIECE_MB} MB"
            print(f"tokenizer: sentencepiece learns from {first}; the rest is not read")
            return
