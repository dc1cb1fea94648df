"""Near duplicates, with datasketch beside ours: CPU seconds of one process, the two taking turns in one run.

    OMP_NUM_THREADS=1 python tools/bench_data.py                                    # English: Python's documentation
    OMP_NUM_THREADS=1 python tools/bench_data.py --input='poems/*.json' --out=bench.json      # and Chinese from JSON

What is given to datasketch for nothing: its elements are made beforehand, so that only our times have the reading of
the text in them. Median of `repeats` after a warm-up.
"""

import json
import os
import random
import re
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from datasketch import LeanMinHash, MinHash, MinHashLSH

sys.path.insert(0, str(Path(__file__).parent.parent))

import dedup
import readers
from configurator import ConfigError, configure
from corpus import python_docs

# ---- config ---------------------------------------------------------------------------------------------------------
input = ""  # Chinese text: all strings of JSON files, or text files; "" = data/zh_sample.txt if it is there
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


def chinese_text() -> Iterator[str]:
    sample = Path(__file__).parent.parent / "data" / "zh_sample.txt"
    for path in readers.find_files(input or str(sample)) if input or sample.exists() else []:
        for record in readers.read_records(path):
            yield from strings(record.value)


def pieces(texts: Iterator[str], size: int) -> list[str]:
    """Documents of `size` characters, cut from all texts in a row; at most `documents`."""
    held, found = "", []
    for text in texts:
        held += text + "\n"
        found += [held[i : i + size] for i in range(0, len(held) - size + 1, size)]
        held = held[len(held) // size * size :]
        if len(found) >= documents:
            break
    return found[:documents]


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
    """The usual loop: an update per shingle, a query per document, an insert if nothing found is similar."""
    index, kept, dropped = MinHashLSH(num_perm=128, params=(BANDS, ROWS)), {}, []
    for i, numbers in enumerate(sets):
        sketch = MinHash(num_perm=128, seed=1, hashfunc=int)
        for number in numbers:
            sketch.update(number)
        if any(sketch.jaccard(kept[other]) >= THRESHOLD for other in index.query(sketch)):
            dropped.append(i)
        elif numbers:
            kept[i] = sketch
            index.insert(i, sketch)
    return dropped


def cpu_seconds(run: Callable) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def compare(name: str, ours: Callable, theirs: Callable, n: int, n_bytes: int) -> dict:
    """One row of the table: documents per CPU second of both, which take turns."""
    cpu_seconds(ours), cpu_seconds(theirs)
    times = [(cpu_seconds(ours), cpu_seconds(theirs)) for _ in range(repeats)]
    mine, other = (statistics.median(column) for column in zip(*times, strict=True))
    spread = max((max(column) - min(column)) / statistics.median(column) for column in zip(*times, strict=True))
    row = {"name": name, "ours": n / mine, "datasketch": n / other, "ratio": other / mine}
    row |= {"mb_per_s": n_bytes / mine / 1e6, "spread": spread}
    print(
        f"{name:32} {row['ours']:9,.0f} documents/s {row['mb_per_s']:6.1f} MB/s   "
        f"datasketch {row['datasketch']:7,.0f} documents/s   "
        f"x {row['ratio']:6.1f}   spread {100 * spread:.0f}%"
    )
    return row


def language_rows(language: str, texts: list[str]) -> list[dict]:
    n, n_bytes = len(texts), sum(len(text.encode("utf-8", "replace")) for text in texts)
    shingles, seed_one = shingles_of(texts), {"num_perm": 128, "seed": 1}
    rows = [
        compare(
            f"signatures, {language}",
            lambda: dedup.signatures(dedup.units(texts)),
            lambda: MinHash.bulk(shingles, **seed_one),
            n, n_bytes,
        )
    ]  # fmt: skip
    copies = with_copies(texts)
    sets = elements(copies)
    if our_survivors(copies) != plain_survivors(sets):
        raise SystemExit(f"bench_data: survivors differ, {language}")
    name = f"texts to survivors, {language}"
    rows.append(compare(name, lambda: our_survivors(copies), lambda: plain_survivors(sets), n, n_bytes))
    return rows


def index_memory() -> dict:
    """Bytes per document that the index takes, signatures not counted: 10 % copies, and in pairs throughout."""
    row = {"name": "index memory"}
    for kind, share in (("10 % copies", 0.1), ("all in pairs", 0.5)):
        n = index_documents
        signatures = np.random.default_rng(0).integers(0, 2**32 - 1, (n, 128), dtype=np.uint32)
        signatures[n - int(share * n) :] = signatures[: int(share * n)]
        ours = peak(lambda s=signatures: dedup.near_duplicates(s, THRESHOLD, BANDS, ROWS)) / n
        theirs = peak(lambda s=signatures: filled_index(s)) / n
        row[kind] = {"ours": ours, "datasketch": theirs}
        print(f"index memory, {kind:18} {ours:9,.0f} bytes/document           datasketch {theirs:7,.0f}")
    return row


def filled_index(signatures: np.ndarray) -> MinHashLSH:
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
        raise ConfigError(f"config: too few documents or repeats: {documents=} {index_documents=} {repeats=}")
    if os.environ.get("OMP_NUM_THREADS") != "1":
        print("note: CPU seconds of one thread are meant; start with OMP_NUM_THREADS=1")
    print(f"CPU seconds of one process, numpy {np.__version__}, {documents} documents of each language")
    rows = language_rows("English", pieces(python_docs(), 2000))
    chinese = pieces(chinese_text(), 600)
    if chinese:
        rows += language_rows("Chinese", chinese)
    else:
        print("no Chinese text: give --input=...")
    rows.append(index_memory())
    if out:
        Path(f"{out}.tmp").write_text(json.dumps(rows, indent=1), encoding="utf-8")
        os.replace(f"{out}.tmp", out)
