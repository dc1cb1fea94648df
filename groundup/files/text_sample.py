"""A sample of all files for tokenizer.py: the same share of each, from all over large ones."""

import os
from collections.abc import Iterator

from tqdm import tqdm

from groundup.files import readers
from groundup.files.readers import Report
from groundup.files.text_mix import Part


def size_of(parts: list[Part]) -> int:
    """Return the bytes of all files, 0 if that cannot be known: of standard input."""
    files = [file for part in parts for file in part.files]
    return 0 if "-" in files else sum(os.path.getsize(file) for file in files)


def sampled_texts(parts: list[Part], text_key: str, max_mb: int) -> Iterator[str]:
    """Yield texts of all files, about max_mb megabytes together: of each unit of a file (see
    `readers.work_units`) from its beginning, in proportion to its size. Print what each part of
    the input gave, and what could not be read."""
    share = max_mb * 1_000_000 / max(1, size_of(parts))
    report = Report()
    with tqdm(desc="reading", unit="B", unit_scale=True, disable=None) as progress:
        for part in parts:
            n_bytes = 0
            for file in part.files:
                units = readers.work_units(file)
                most = share * os.path.getsize(file) / len(units)
                for begin, end in units:
                    for text in first_bytes(file, text_key, begin, end, most, report):
                        size = len(text.encode())
                        n_bytes += size
                        progress.update(size)
                        yield text
            print(f"tokenizer: {part.name}: {n_bytes / 1e6:.2f} MB, a sample of all its files")
    for path, line, _, why in report.places[:10]:
        print(f"tokenizer: {path}:{line}: {why}")
    if report.problems:
        print(f"tokenizer: {report.problems.total()} documents could not be read")


def first_bytes(
    file: str, text_key: str, begin: int, end: int | None, most: float, report: Report
) -> Iterator[str]:
    """Yield the first documents of a part of a file; the last is cut after about `most` bytes."""
    left = most
    for document in readers.read_documents(file, text_key, begin=begin, end=end, report=report):
        text = document.value
        size = len(text.encode())
        if size > left:
            text = text[: int(len(text) * left / size) + 1]
        yield text
        left -= size
        if left <= 0:
            return
