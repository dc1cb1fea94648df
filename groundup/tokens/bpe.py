"""Train byte pair encoding: from text to merges (ours, exact), or with sentencepiece.

Ours (Sennrich et al., 2016, arXiv:1508.07909, on bytes as in GPT-2): a regular expression cuts text
into chunks; equal chunks are counted, so a corpus of any size becomes a table of distinct chunks;
then the most frequent pair of neighbours inside chunks is merged into one token, again and again.
`learn_in_python` is the algorithm to read; where there is a C compiler, bpe.c finds the same merges
some fifty times as fast. training.py makes a tokenizer of the result.
"""

import ctypes
import heapq
import io
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, pairwise
from operator import itemgetter
from pathlib import Path

import numpy as np
import regex
import sentencepiece

from groundup.compile_c import compile_c
from groundup.errors import UserError, counted
from groundup.files.untrusted import scrub
from groundup.tokens import engines
from groundup.tokens.engines import SIZE_STEP

PATTERNS = engines.PATTERNS | {
    # To learn from text with Chinese, where the others make tokens of whole clauses, comma
    # included. Here a token has at most four characters, the length of an idiom. Digits are
    # single. [^\P{L}\p{Han}] is a letter that is not Han. The tokenizer itself splits text by
    # "qwen", so that words lie where they are and not at every fourth character.
    "zh": r"'(?i:[sdmt]|ll|ve|re)|\p{Han}{1,4}|[^\r\n\p{L}\p{N}]?+[^\P{L}\p{Han}]++|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
}
PATTERN = PATTERNS["qwen"]
MIN_COUNT = 2  # a pair seen once is not worth an id
# of distinct chunks kept; beyond it the rarest are dropped. Training takes 50 times as much memory
MAX_BYTES = 24_000_000
BATCH_CHARS = 500_000  # cut at a time: more takes more memory, and less counts less in C
# A text is cut into blocks. It may be cut between a letter or digit and one of these (U+3001 and
# on: Chinese punctuation): no pattern here has a chunk across the two, looks back, or looks further
# ahead than to the end of a run of white space.
MAX_CHARS = 100_000
SAFE_CUT = re.compile("(?<=[^\\W_])(?=[ \n\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])")
# patterns that bpe.c knows: how many digits and, apart from other letters, Han a chunk has at most
IN_C = {
    PATTERNS[name]: most
    for name, most in {"qwen": (1, 0), "gpt4": (2, 0), "cl100k": (3, 0), "zh": (1, 4)}.items()
}
HAN = regex.compile(r"\p{Han}")
CJK_MARKS = regex.compile("[\u3001-\u303f\uff00-\uff65]")  # Chinese punctuation
COVERED = 0.9999  # one Han character in ten thousand is left to its bytes
SENTENCEPIECE_MB = 200  # sentencepiece holds all of its text in memory, several times over


# ---- chunks ----------------------------------------------------------------------------------


def count_chunks(texts: Iterable[str], pattern: str = PATTERN) -> dict[bytes, int]:
    """Return {chunk in UTF-8: how often it occurs in all texts}.

    MAX_BYTES bounds the memory. A chunk of more than MAX_CHARS is counted in parts."""
    count_batch = counter(pattern)
    counts: Counter[str] = Counter()
    size = 0
    for batch in batches(texts, pattern):
        found = count_batch(batch)
        size += sum(map(n_bytes, found.keys() - counts.keys()))
        counts.update(found)
        if size > MAX_BYTES:
            counts = drop_rarest(counts)
            size = sum(map(n_bytes, counts))
    return {chunk.encode(): count for chunk, count in counts.items()}


def blocks(text: str, pattern: str) -> Iterator[str]:
    """Yield `text` in parts of at most MAX_CHARS, cut where that cannot change the chunks.

    Only a chunk of more than MAX_CHARS is cut inside."""
    start = 0
    while len(text) - start > MAX_CHARS:
        cut = SAFE_CUT.search(text, start + MAX_CHARS // 2, start + MAX_CHARS)
        end = cut.start() if cut else border_of_chunks(text, start, pattern)
        yield text[start:end]
        start = end
    yield text[start:]


def border_of_chunks(text: str, start: int, pattern: str) -> int:
    """Return where the last chunk ends that may end a block from `start` on.

    If the first one is too long for a block: the end of the block."""
    last = start + MAX_CHARS
    end = start
    for chunk in regex.finditer(pattern, text, pos=start, endpos=last):
        # It may go on; and whether a quote begins a chunk ('re) is seen two characters later.
        if chunk.end() > last - 2:
            break
        # At the end of a text several chunks of white space can become one.
        if end == start or not chunk[0].isspace():
            end = chunk.end()
    return end if end > start else last


def batches(texts: Iterable[str], pattern: str) -> Iterator[list[str]]:
    """Yield lists of texts, long ones in parts, of BATCH_CHARS or a little more."""
    batch, room = [], BATCH_CHARS
    for text in texts:
        for block in blocks(scrub(text), pattern):
            batch.append(block)
            room -= len(block)
            if room <= 0:
                yield batch
                batch, room = [], BATCH_CHARS
    yield batch


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
    print(f"tokenizer: {lost}, seen at most {counted(count, 'time')} so far, are dropped")
    return Counter(kept)


def characters_first(counts: dict[bytes, int], most: int) -> dict[bytes, int]:
    """Return the counts with the frequent Han characters as chunks of their own.

    They count so often that they are merged before any word: then a model writes characters, not
    parts of them. Taken are those that make up COVERED of all Han characters, the most frequent
    first; with the two-byte beginnings that they share they need at most `most` merges. So is a
    punctuation mark that only stands beside others, as a full stop where every sentence ends a
    line: its last byte would be merged with the line end, and the mark alone be two tokens.
    """
    seen: Counter[str] = Counter()
    marks: Counter[str] = Counter()
    for chunk, count in counts.items():
        text = chunk.decode()
        for character in HAN.findall(text):
            seen[character] += count
        if not chunk.isascii():
            marks.update(dict.fromkeys(CJK_MARKS.findall(text), count))
    never_alone = [
        mark.encode()
        for mark, count in sorted(marks.items())
        if count >= MIN_COUNT and mark.encode() not in counts
    ]
    # Each character is three bytes: two merges, the first of which many characters share.
    found, beginnings = [], {mark[:2] for mark in never_alone}
    left = seen.total() * COVERED
    for character, count in sorted(seen.items(), key=lambda item: (-item[1], item[0])):
        beginnings.add(character.encode()[:2])
        if left <= 0 or len(never_alone) + len(found) + len(beginnings) >= most:
            break
        found.append(character.encode())
        left -= count
    often = sum(counts.values()) + 1  # more often than any pair in the text
    first = [*found, *never_alone]
    return counts | {character: counts.get(character, 0) + often for character in first}


# ---- merges ----------------------------------------------------------------------------------


def train_bpe(counts: dict[bytes, int], max_merges: int) -> list[tuple[int, int]]:
    """Return the merges [(left id, right id), ...] that byte pair encoding learns.

    Merge i makes the token 256 + i. The result does not depend on the order of `counts`."""
    return learn_merges(list(counts), list(counts.values()), max_merges, first_id=256)


def learn_merges(
    chunks: Sequence[Sequence[int]], weights: Sequence[int], max_merges: int, first_id: int
) -> list[tuple[int, int]]:
    """Return at most max_merges merges [(left id, right id), ...].

    Merge i makes the token first_id + i.
    chunks: their tokens, below first_id; weights: how often each occurs"""
    library = load_library()
    if library is None:
        return learn_in_python(chunks, weights, max_merges, first_id)
    # bpe.c takes the chunks end to end
    tokens = np.fromiter(chain.from_iterable(chunks), np.int32)
    lengths = np.fromiter(map(len, chunks), np.int32)
    merges = np.empty((max_merges, 2), np.int32)
    sizes = (len(lengths), len(tokens), first_id, max_merges, MIN_COUNT)
    weights = np.array(weights, np.int64)
    n = library.learn(*map(address, (tokens, lengths, weights)), *sizes, address(merges))
    return list(map(tuple, merges[:n].tolist()))


def learn_in_python(
    chunks: Sequence[Sequence[int]], weights: Sequence[int], max_merges: int, first_id: int
) -> list[tuple[int, int]]:
    """Do what learn_merges says: the algorithm of bpe.c, to be read and tested against.

    Merge the most frequent pair of neighbours (ties: the smallest (left, right)) everywhere, left
    to right inside each chunk, until no pair occurs MIN_COUNT times."""
    chunks = list(map(list, chunks))
    pair_counts, chunks_with = count_pairs(chunks, weights)

    # A pair is new when the later of its tokens is; from then on its count only falls. So the most
    # frequent pair is the first in the heap whose count is still right.
    waiting = [(-count, pair) for pair, count in pair_counts.items()]
    heapq.heapify(waiting)
    merges: list[tuple[int, int]] = []
    while waiting and len(merges) < max_merges:
        count, merged = heapq.heappop(waiting)
        if pair_counts[merged] < MIN_COUNT:
            continue
        if pair_counts[merged] < -count:  # it has fallen since: put it back with its count of now
            heapq.heappush(waiting, (-pair_counts[merged], merged))
            continue
        token = first_id + len(merges)
        merges.append(merged)
        new_pairs = set()
        for number in dict.fromkeys(chunks_with.pop(merged)):
            for pair in pairwise(chunks[number]):
                pair_counts[pair] -= weights[number]
            chunks[number] = replaced(chunks[number], merged, token)
            for pair in pairwise(chunks[number]):
                pair_counts[pair] += weights[number]
                if token in pair:
                    chunks_with[pair].append(number)
                    new_pairs.add(pair)
        for pair in new_pairs:
            heapq.heappush(waiting, (-pair_counts[pair], pair))
    return merges


def count_pairs(
    chunks: Sequence[Sequence[int]], weights: Sequence[int]
) -> tuple[Counter[tuple[int, int]], dict[tuple[int, int], list[int]]]:
    """Return ({pair of neighbours: how often it occurs}, {pair: numbers of the chunks with it})."""
    pair_counts: Counter[tuple[int, int]] = Counter()
    chunks_with = defaultdict(list)  # when a pair was new; merges may have removed it since
    for number, chunk in enumerate(chunks):
        for pair in pairwise(chunk):
            pair_counts[pair] += weights[number]
            chunks_with[pair].append(number)
    return pair_counts, chunks_with


def replaced(chunk: list[int], pair: tuple[int, int], token: int) -> list[int]:
    """Return the chunk with `token` in place of the pair, wherever it occurs."""
    out: list[int] = []
    i = 0
    while i < len(chunk):
        found = tuple(chunk[i : i + 2]) == pair
        out.append(token if found else chunk[i])
        i += 2 if found else 1
    return out


# ---- the same in C ---------------------------------------------------------------------------


class Text(ctypes.Structure):
    """What `count` of bpe.c takes, see there."""

    names = ("text", "length", "classes", "n_classes", "most_digits", "most_han")
    _fields_ = [(name, ctypes.c_int64) for name in names]


@cache
def load_library() -> ctypes.CDLL | None:
    """Return bpe.c, compiled; None without a C compiler."""
    library = compile_c(Path(__file__).with_name("bpe.c"))
    if library is not None:
        library.count.restype = library.learn.restype = ctypes.c_int64
        library.learn.argtypes = [ctypes.c_int64] * 9
        library.count.argtypes = [ctypes.POINTER(Text), *[ctypes.c_int64] * 7]
    return library


def address(array: np.ndarray) -> int:
    return array.ctypes.data


@cache
def character_classes() -> np.ndarray:
    """Return the classes that bpe.c asks for, of the characters that may have one: (n,) uint8."""
    characters = "".join(map(chr, range(0x40000)))
    classes = np.zeros(len(characters), np.uint8)
    for bit, name in ((1, r"\p{L}+"), (2, r"\p{N}+"), (4, r"\s+"), (8, r"\p{Han}+")):
        for run in regex.finditer(name, characters):
            classes[run.start() : run.end()] |= bit
    return classes


def counter(pattern: str) -> Callable[[list[str]], Mapping[str, int]]:
    """Return a function that counts the chunks of texts: {match of the pattern: count}."""
    library = load_library()
    if pattern not in IN_C or library is None:
        split = regex.compile(pattern).findall
        return lambda texts: Counter(chain.from_iterable(map(split, texts)))
    classes = character_classes()

    def count(texts: list[str]) -> dict[str, int]:
        whole = "".join(texts)
        codes = np.frombuffer(whole.encode("utf-32-le"), np.uint32)
        ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
        found = np.empty((3, len(codes)), np.int32)  # of distinct chunks: begin, end, times
        # the hash table has room for twice as many chunks as there are characters
        table = np.zeros(2 << len(codes).bit_length(), np.int32)
        text = Text(address(codes), 0, address(classes), len(classes), *IN_C[pattern])
        arrays = map(address, (ends, *found, table))
        n = library.count(text, len(texts), len(table) - 1, *arrays)
        columns = found[:, :n].tolist()
        return {whole[begin:end]: times for begin, end, times in zip(*columns, strict=True)}

    return count


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
