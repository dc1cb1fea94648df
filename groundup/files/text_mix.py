"""The texts that a tokenizer is trained on, up to a limit.

They are documents of several inputs: mixed by weights, or the same share of each file."""

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from configurator import split_names, split_weight
from groundup.errors import UserError, counted, refuse
from groundup.files import readers
from groundup.files.paths import find_files
from groundup.files.records import Report
from groundup.files.row_formats import any_text_of
from groundup.files.sources import (
    BUILT_IN,
    Source,
    check_reading,
    look_of,
    say_looks,
    write_built_in,
)
from groundup.files.text_keys import columns_of
from groundup.files.untrusted import scrub

MAX_DOC_CHARS = 100_000  # of each document of a mixture, so that no single one decides the merges


class Part(NamedTuple):
    """One part of `input`: its name, files, and weight, 0 where none is given."""

    name: str
    files: list[str]
    weight: float
    text_key: str = ""
    txt_split: str = "file"
    encoding: str = ""


def parts_of(sources: Sequence[Source], folder: Path) -> list[Part]:
    """Return the parts of `input`; a file that several of them name belongs to the first. Built-in
    sources become files in `folder`.

    sources: of `parse_sources`; without names their input is split here: a=0.7,b=0.3. One that is
    left without files is no part; print that. Raise UserError."""
    if not sources[0].name:
        sources = split_source(sources[0])
    parts, taken = [], set()
    for one in sources:
        check_reading(one)
        unused = one.quality != Source.quality or one.rules
        refuse(unused, f"input: {one.name}: quality and rules are prepare.py's; leave them out")
        names = filter(None, split_names(one.input))
        found = {os.path.realpath(file): file for name in names for file in files_of(name, folder)}
        files = [file for real, file in found.items() if real not in taken]
        taken.update(found)
        say_looks("tokenizer", [(file, look_of(file, first_bytes(file))) for file in files])
        part = Part(one.name, files, one.weight, one.text_key, one.txt_split, one.encoding)
        if files:
            parts.append(part)
        else:
            print(f"tokenizer: {one.name}: all its files belong to earlier parts")
    return parts


def files_of(name: str, folder: Path) -> list[str]:
    if name in BUILT_IN:
        return [str(write_built_in(name, "text", folder))]
    return find_files(name, "input")


def first_bytes(path: str) -> bytes:
    """Return the first bytes of a file, b"" of standard input."""
    if path == "-":
        return b""
    with open(path, "rb") as f:
        return f.read(2**16)


def split_source(source: Source) -> list[Source]:
    """Return a source for each part of an `input` without names. Raise UserError."""
    parts, weights = [], []
    for piece in filter(None, split_names(source.input)):
        name, weight = split_weight(piece)
        if weight and not re.fullmatch(r"\d+\.?\d*|\.\d+", weight):
            name, weight = piece, ""
        parts.append(replace(source, name=name, input=name, weight=float(weight or 0)))
        weights.append(weight)
    if any(weights) and not all(part.weight for part in parts):
        raise UserError(
            f"tokenizer: input={source.input!r}: give every part a weight above 0, as in "
            "a=0.7,b=0.3, or none"
        )
    return parts


def check_parts(parts: list[Part]) -> None:
    """Raise UserError if a part of `input` has no text: a tokenizer would lack it."""
    for part in parts:
        report = Report()
        if "-" in part.files or any(read(part, report)):  # which cannot be read again
            continue
        first = "".join(f": {path}:{line}: {why}" for path, line, _, why in report.places[:1])
        hint = "name its text with text_key=KEY, or leave it out; no tokenizer is written"
        raise UserError(f"tokenizer: {part.name} has no text{first}; {hint}")


def texts_of(parts: list[Part], max_mb: float) -> Iterator[str]:
    """Yield documents of all parts, about max_mb megabytes together.

    They come by turns if the parts have weights. Else they are one file after the other; of files
    that are larger than max_mb, the same share of each. Print what each part gave where it is not
    everything, and what could not be read."""
    report, most, size = Report(), max_mb * 1_000_000, size_of(parts)
    try:
        if any(part.weight for part in parts):
            sources = [
                (f"{part.name}, weight {part.weight:g}", read(part, report), part.weight)
                for part in parts
            ]
            yield from mix_texts(sources, most)
            return
        share = most / size if size > most else 0.0
        texts = itertools.chain(*(read(part, report, share) for part in parts))
        note = f"tokenizer: the first {max_mb:g} MB are read, no more; max_mb sets this"
        yield from texts if share else first_of(texts, most, note)
    finally:  # also where a limit ends it
        first = {why: f"{path}:{line}" for path, line, _, why in reversed(report.places)}
        for why, place in list(reversed(first.items()))[:10]:  # each reason once
            print(f"tokenizer: {place}: {why}")
        if n := report.problems.total():
            print(f"tokenizer: could not be read: {counted(n, 'record')}")


def size_of(parts: list[Part]) -> int:
    """Return the bytes of all files, 0 if that cannot be known: of standard input."""
    files = [file for part in parts for file in part.files]
    return 0 if "-" in files else sum(map(os.path.getsize, files))


def read(part: Part, report: Report, share: float = 0.0) -> Iterator[str]:
    """Yield the documents of a part of `input`, with a progress bar. Conversations and pairs are
    text, too.

    share: of each unit of a file (see `readers.work_units`) only this much, from its beginning;
    then print how much that was."""
    n_bytes, columns = 0, columns_of(part.text_key)
    understand = partial(any_text_of, text_key=part.text_key)
    with tqdm(desc="reading", unit="B", unit_scale=True, disable=None) as progress:
        for path in part.files:
            units = [(0, None)]
            if share:
                units = readers.work_units(path, part.txt_split, encoding=part.encoding)
            for begin, end in units:
                rows = readers.read_rows(
                    path, understand, part.txt_split, begin, end, report, columns, part.encoding
                )
                texts = (row.value for row in rows)
                if share:
                    texts = first_of(texts, share * os.path.getsize(path) / len(units))
                for text in texts:
                    yield text
                    size = len(text.encode())
                    progress.update(size)
                    n_bytes += size
    if share:
        print(f"tokenizer: {part.name}: {n_bytes / 1e6:.2f} MB, a sample of all its files")


def first_of(texts: Iterable[str], most: float, note: str = "") -> Iterator[str]:
    """Yield texts up to about `most` bytes, the last one cut there.

    note: printed if there are more"""
    left = most
    for text in texts:
        if left <= 0:
            print(note, end="\n" if note else "")
            return
        size = len(text.encode())
        yield text if size <= left else text[: int(len(text) * left / size) + 1]
        left -= size


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
            f"{counted(n_texts[k], 'text')}, {n_cut[k]:,} of them cut to {MAX_DOC_CHARS:,} "
            f"characters{end}"
        )
