"""The texts that a tokenizer is trained on.

They are documents of several inputs, mixed by their weights, up to a limit."""

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tqdm import tqdm

from groundup.errors import UserError
from groundup.files.paths import split_names, split_weight
from groundup.files.readers import Report, find_files, read_documents
from groundup.files.untrusted import scrub

MAX_DOC_CHARS = 100_000  # of each document of a mixture, so that no single one decides the merges


class Part(NamedTuple):
    """One part of `input`: its name, files, and weight, 0 where none is given."""

    name: str
    files: list[str]
    weight: float


def parts_of(spec: str) -> list[Part]:
    """Return the parts of `input`; a file that several of them name belongs to the first.

    Raise UserError."""
    parts, taken = [], set()
    for piece in filter(None, split_names(spec)):
        name, weight = split_weight(piece)
        if weight and not re.fullmatch(r"\d+\.?\d*|\.\d+", weight):
            name, weight = piece, ""
        files = [file for file in find_files(name) if file not in taken]
        taken.update(files)
        parts.append((Part(name, files, float(weight or 0)), weight))
    if any(weight for _, weight in parts) and not all(part.weight for part, _ in parts):
        raise UserError(
            f"tokenizer: input={spec!r}: give every part a weight above 0, as in a=0.7,b=0.3, "
            "or none"
        )
    return [part for part, _ in parts]


def read_texts(part: Part, text_key: str, report: Report) -> Iterator[str]:
    with tqdm(desc="reading", unit="B", unit_scale=True, disable=None) as progress:
        for path in part.files:
            for document in read_documents(path, text_key, report=report):
                yield document.value
                progress.update(len(document.value.encode()))


def first_texts(part: Part, text_key: str, max_mb: int) -> Iterator[str]:
    """Yield the documents of one part, up to max_mb."""
    n_bytes = 0
    for text in read_texts(part, text_key, Report()):
        if n_bytes >= max_mb * 1_000_000:
            return
        yield text
        n_bytes += len(text.encode())


def texts_by_weight(parts: list[Part], text_key: str, max_mb: int) -> Iterator[str]:
    """Yield the documents of all parts, up to max_mb.

    They come by turns if the parts have weights, else one part after the other. Print
    what is not read and what could not be read."""
    report, n_bytes = Report(), 0
    streams = [read_texts(part, text_key, report) for part in parts]
    try:
        if all(part.weight for part in parts):
            weighted = zip(parts, streams, strict=True)
            sources = [
                (f"{part.name}, weight {part.weight:g}", texts, part.weight)
                for part, texts in weighted
            ]
            yield from mix_texts(sources, max_mb * 1_000_000)
            return
        for text in itertools.chain(*streams):
            if n_bytes >= max_mb * 1_000_000:
                print(
                    f"tokenizer: the first {n_bytes / 1e6:.0f} MB are read, no more; "
                    "max_mb sets this"
                )
                return
            yield text
            n_bytes += len(text.encode())
    finally:  # also where a limit ends it
        for path, line, _, why in report.places[:10]:
            print(f"tokenizer: {path}:{line}: {why}")
        if report.problems:
            print(f"tokenizer: {report.problems.total()} documents could not be read")


def mix_texts(sources: list[tuple[str, Iterable[str], float]], max_bytes: int) -> Iterator[str]:
    """Yield texts of all sources (label, texts, weight above 0) by turns, until max_bytes.

    The bytes of each source follow its weight: the next text is of the source that is furthest
    behind. When a source is exhausted, the others keep their weights. Of each text the first
    MAX_DOC_CHARS are taken. Print what every source gave, by its label. Deterministic.
    """
    iterators = [iter(texts) for _, texts, _ in sources]
    n_bytes, n_texts, n_cut = ([0] * len(sources) for _ in range(3))
    going = list(range(len(sources)))
    while going and sum(n_bytes) < max_bytes:
        k = min(going, key=lambda k: n_bytes[k] / sources[k][2])
        text = next(iterators[k], None)
        if text is None:
            going.remove(k)
            continue
        n_texts[k] += 1
        n_cut[k] += len(text) > MAX_DOC_CHARS
        text = scrub(text[:MAX_DOC_CHARS])
        n_bytes[k] += len(text.encode())
        yield text
    for k, (label, _, _) in enumerate(sources):
        fraction, end = n_bytes[k] / max(sum(n_bytes), 1), "" if k in going else "; read to its end"
        print(
            f"tokenizer: {label}: {n_bytes[k] / 1e6:.2f} MB ({fraction:.1%}), "
            f"{n_texts[k]:,} texts, {n_cut[k]:,} of them cut to {MAX_DOC_CHARS:,} characters{end}"
        )
