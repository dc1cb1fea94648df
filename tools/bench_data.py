"""Near duplicates, with datasketch beside ours: CPU seconds of one process, the two taking turns in one run.

    OMP_NUM_THREADS=1 python tools/bench_data.py                                    # English: Python's documentation
    OMP_NUM_THREADS=1 python tools/bench_data.py --input='poems/*.json' --out=bench.json      # and Chinese from JSON

What is given to datasketch for nothing: its elements are made beforehand, so that only our times have the reading of
the text in them. Median of `repeats` after a warm-up.
"""

import os
import platform
import random
import re
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from datasketch import MinHashLSH  # else where it is used: it imports scipy, half a second

sys.path.insert(0, str(Path(__file__).parent.parent))

import timing

from configurator import configure
from groundup.demo.python_docs import python_docs
from groundup.errors import UserError
from groundup.files import readers
from groundup.text import dedup

# ---- config ---------------------------------------------------------------------------------------------------------
input = ""  # Chinese text: all strings of JSON files, or text files; "" = groundup/demo/zh_sample.txt if it is there
documents = 500  # of each language; 2,000 characters of English, 600 of Chinese
index_documents = 20_000  # for the memory of the index
repeats = 3  # timed runs of each; the median counts
out = ""  # JSON file to write; "" = none

THRESHOLD, BANDS, ROWS = 0.8, 16, 8


def strings(value: object) -> Iterator[str]:
    """All texts with Han characters within a JSON value."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)
    elif isinstance(value, str) and re.search("[\u4e00-\u9fff]", value):
        yield value


def chinese_text(paths: str = "") -> Iterator[str]:
    sample = Path(__file__).parent.parent / "groundup" / "demo" / "zh_sample.txt"
    for path in readers.find_files(paths or str(sample)) if paths or sample.exists() else []:
        for record in readers.read_records(path):
            yield from strings(record.value)


def pieces(texts: Iterator[str], size: int, most: int) -> list[str]:
    """Documents of `size` characters, cut from all texts in a row; at most so many."""
    held, found = "", []
    for text in texts:
        held += text + "\n"
        found += [held[i : i + size] for i in range(0, len(held) - size + 1, size)]
        held = held[len(held) // size * size :]
        if len(found) >= most:
            break
    return found[:most]


def with_copies(texts: list[str]) -> list[str]:
    """The same number of documents, every fifth a copy of an earlier one with 1 % of its characters changed."""
    rng, copies = random.Random(0), texts.copy()
    for i in range(4, len(texts), 5):
        copy = list(copies[rng.randrange(i)])
        for place in rng.sample(range(len(copy)), len(copy) // 100):
            copy[place] = "#"
        copies[i] = "".join(copy)
    return copies


def elements(texts: list[str]) -> list[list[int]]:
    """For each text the 32-bit elements that its signature is of."""
    units = dedup.units(texts)
    found: list[list[int]] = [[] for _ in texts]
    for first in range(0, len(units.hashes), dedup.SLICE):
        numbers, begins, shingles = dedup.shingle_block(units, first)
        for number, part in zip(numbers.tolist(), np.split(shingles, begins[1:]), strict=True):
            found[number] += part.tolist()
    return found


def shingles_of(texts: list[str]) -> list[list[bytes]]:
    """For each text its runs of five units as bytes, which MinHash.bulk hashes itself."""
    units, found = dedup.units(texts), []
    for t, text in enumerate(texts):
        part = slice(*units.starts[t : t + 2])
        words = [text[b:e] for b, e in zip(units.begins[part].tolist(), units.ends[part].tolist(), strict=True)]
        found.append([" ".join(words[i : i + 5]).lower().encode() for i in range(len(words) - 4)])
    return found


def our_survivors(texts: list[str]) -> list[int]:
    signatures = dedup.signatures(dedup.units(texts))
    return dedup.near_duplicates(signatures, THRESHOLD, BANDS, ROWS).dropped.tolist()


def plain_survivors(sets: list[list[int]]) -> list[int]:
    """The usual loop: all shingles of a document at once, a query, an insert if nothing found is similar."""
    from datasketch import MinHash, MinHashLSH

    index, kept, dropped = MinHashLSH(num_perm=128, params=(BANDS, ROWS)), {}, []
    for i, numbers in enumerate(sets):
        sketch = MinHash(num_perm=128, seed=1, hashfunc=int)
        sketch.update_batch(numbers)
        if any(sketch.jaccard(kept[other]) >= THRESHOLD for other in index.query(sketch)):
            dropped.append(i)
        elif numbers:
            kept[i] = sketch
            index.insert(i, sketch)
    return dropped


def compare(case: str, ours: Callable, theirs: Callable, texts: list[str], repeats: int) -> list[timing.Line]:
    """Documents per CPU second of both, which take turns."""
    calls = {"datasketch": theirs, "ours": ours}
    seconds = timing.alternate({name: partial(timing.cpu_seconds, call) for name, call in calls.items()}, repeats)
    n_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
    notes = {"ours": f"{n_bytes / median(seconds['ours']) / 1e6:.1f} MB/s"}
    return timing.lines("dedup", case, seconds, "doc/s", ("datasketch",), len(texts), notes=notes)


def language_lines(language: str, texts: list[str], repeats: int) -> list[timing.Line]:
    """Signatures, and the whole way from texts to survivors. Raises BenchError if the two do not keep the same."""
    from datasketch import MinHash

    shingles, seed_one = shingles_of(texts), {"num_perm": 128, "seed": 1}
    signed = compare(
        f"signatures, {language}",
        lambda: dedup.signatures(dedup.units(texts)),
        lambda: MinHash.bulk(shingles, **seed_one),
        texts, repeats,
    )  # fmt: skip
    copies = with_copies(texts)
    sets = elements(copies)
    if our_survivors(copies) != plain_survivors(sets):
        raise UserError(f"bench: dedup: survivors differ, {language}")
    ours, theirs = partial(our_survivors, copies), partial(plain_survivors, sets)
    return signed + compare(f"texts to survivors, {language}", ours, theirs, copies, repeats)


def index_memory(n: int) -> Iterator[timing.Line]:
    """Bytes per document that an index of n takes, signatures not counted: 10 % copies, and in pairs throughout."""
    for kind, share in (("10 % copies", 0.1), ("all in pairs", 0.5)):
        signatures = np.random.default_rng(0).integers(0, 2**32 - 1, (n, 128), dtype=np.uint32)
        signatures[n - int(share * n) :] = signatures[: int(share * n)]
        ours = peak(lambda s=signatures: dedup.near_duplicates(s, THRESHOLD, BANDS, ROWS)) / n
        theirs = peak(lambda s=signatures: filled_index(s)) / n
        for name, n_bytes in (("datasketch", theirs), ("ours", ours)):
            yield timing.Line("dedup", f"index memory, {kind}", name, "B/doc", [n_bytes])


def filled_index(signatures: np.ndarray) -> "MinHashLSH":
    from datasketch import LeanMinHash, MinHashLSH

    index = MinHashLSH(num_perm=128, params=(BANDS, ROWS))
    for i, row in enumerate(signatures):
        sketch = LeanMinHash(seed=1, hashvalues=row, scheme="affine32")
        if not index.query(sketch):
            index.insert(i, sketch)
    return index


def peak(run: Callable) -> int:
    tracemalloc.start()
    result = run()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del result
    return peak_bytes


if __name__ == "__main__":
    configure(globals())
    if documents < 10 or repeats < 1 or index_documents < 10:
        raise UserError(f"config: too few documents or repeats: {documents=} {index_documents=} {repeats=}")
    if os.environ.get("OMP_NUM_THREADS") != "1":
        print("note: CPU seconds of one thread are meant; start with OMP_NUM_THREADS=1")
    print(f"CPU seconds of one process, numpy {np.__version__}, {documents} documents of each language")
    print(timing.HEADER)
    found = []
    languages = {"English": (python_docs(), 2000), "Chinese": (chinese_text(input), 600)}
    for language, (texts, size) in languages.items():
        if cut := pieces(texts, size, documents):
            found += language_lines(language, cut, repeats)
        else:
            print("no Chinese text: give --input=...")
    found += index_memory(index_documents)
    print("\n".join(map(timing.text, found)))
    if out:
        timing.write_json(out, found, platform.machine(), " ".join(sys.argv))
