"""Rows data, tokenize, bpe and dedup: text, by CPU seconds of this process.

bpe: the same regular expression cuts the text for ours and for tokenizers; sentencepiece merges
characters within words, not bytes. All have one thread. dedup: datasketch gets the hashes of its
shingles ready made, only our times include reading the text.
"""

import csv
import importlib.util
import io
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import timing
from timing import Case, Options

import tokenizer
from groundup.demo.python_docs import chinese_sample, python_docs
from groundup.errors import UserError
from groundup.files import readers
from groundup.files.paths import find_files
from groundup.text import dedup
from groundup.tokens import bpe, training

THRESHOLD, BANDS, ROWS = 0.8, 16, 8


def corpora(options: Options) -> Iterator[tuple[str, list[str], float]]:
    """Yield (name, texts, megabytes): texts of `input`, or the documentation of Python and a
    Chinese sample; each once, until corpus_mb. Lone surrogates, which no UTF-8 has and the peers
    refuse, become question marks.
    """
    found = {"docs": python_docs()} | ({} if options.quick else {"zh": chinese_sample()})
    if options.input:
        of_files = (our_texts(path, "text") for path in find_files(options.input))
        found = {"input": itertools.chain.from_iterable(of_files)}
    for name, texts in found.items():
        kept, n_bytes = {}, 0  # kept: a dict has an order
        for text in texts:
            encoded = text.encode("utf-8", "replace")
            n_bytes += len(encoded) * (encoded not in kept)
            kept[encoded] = None
            if n_bytes >= options.corpus_mb * 1e6:
                break
        yield name, [encoded.decode() for encoded in kept], n_bytes / 1e6


def cpu_sides(calls: dict[str, Callable]) -> dict[str, Callable[[], float]]:
    """Return sides that measure the CPU seconds of calls in this process."""
    clock = time.process_time
    return {name: partial(timing.seconds_of, call, clock) for name, call in calls.items()}


# ---- data ----------------------------------------------------------------------------------------


def data_row(options: Options) -> Iterator[Case]:
    """MB per CPU second of text read from each container beside the bare module for it, which
    reports no problem, has no byte offsets and, of JSON, holds the whole file; the texts are
    compared first.
    """
    name, texts, megabytes = next(corpora(options))
    texts = [text[i : i + 2000] for text in texts for i in range(0, len(text), 2000)]
    for container, (peer, group) in CONTAINERS.items():
        path = options.folder / f"{name}.{container.partition(',')[0]}"
        write_texts(path, texts, group)
        calls = {
            peer: lambda path=path: list(bare_texts(path)),
            "ours": lambda path=path: list(our_texts(path)),
        }
        if any(call() != texts for call in calls.values()):
            raise UserError(f"bench: data: the texts differ, {container}")
        case = f"{name} {megabytes:.1f} MB, {container}"
        yield Case(case, cpu_sides(calls), "MB/s", [peer], megabytes)


def our_texts(path: str | Path, text_key: str = "") -> Iterator[str]:
    yield from (document.value for document in readers.read_documents(str(path), text_key))


def write_texts(path: Path, texts: list[str], group: int) -> None:
    """Write rows {"text": ...} in the container that the suffix names. group: rows of a parquet
    row group."""
    rows = [{"text": text} for text in texts]
    if path.suffix == ".parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)
        return
    with open(path, "w", encoding="utf-8", newline="") as f:
        if path.suffix == ".csv":
            csv.writer(f).writerows([["text"], *([text] for text in texts)])
        elif path.suffix == ".json":
            json.dump(rows, f)
        else:
            f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def bare_texts(path: Path) -> Iterator[str]:
    """Yield the texts as the module alone reads them."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(256):
            yield from (row["text"] for row in batch.to_pylist())
        return
    read = {".csv": csv.DictReader, ".json": json.load}
    with open(path, encoding="utf-8", newline="") as f:
        rows = read.get(path.suffix, partial(map, json.loads))(f)
        yield from (row["text"] for row in rows)


CONTAINERS = {  # {name, which begins with the suffix: (the module that reads it, rows of a group)}
    "jsonl": ("json", 0),
    "json": ("json", 0),
    "csv": ("csv", 0),
    "parquet": ("pyarrow", 1000),
    "parquet, groups of 5 rows": ("pyarrow", 5),
}


# ---- tokenize, bpe -------------------------------------------------------------------------------


def tokenize_row(options: Options) -> Iterator[Case]:
    """MB per CPU second beside tiktoken alone and Hugging Face's tokenizers; the ids are compared
    first.
    """
    from tokenizers import Tokenizer

    for name, texts, megabytes in corpora(options):
        directory = options.folder / name
        training.train(texts, options.vocab_size).save(directory)
        ours = tokenizer.Tokenizer.load(directory)
        theirs = Tokenizer.from_file(str(directory / "tokenizer.json"))
        encoders = {
            "tiktoken": ours.engine.encoding.encode_ordinary,
            "tokenizers": lambda text, of=theirs: of.encode(text, add_special_tokens=False).ids,
            "ours": ours.encode,
            "ours, arrays": ours.encode_array,
        }
        calls = {}
        for side, encode in encoders.items():
            if any(list(encode(text)) != ours.encode(text) for text in texts):
                raise UserError(f"bench: tokenize: the ids of {side} are not those of ours, {name}")
            calls[side] = lambda encode=encode, texts=texts: list(map(encode, texts))
        case = f"{name} {megabytes:.1f} MB, {options.vocab_size} ids"
        yield Case(case, cpu_sides(calls), "MB/s", ["tiktoken", "tokenizers"], megabytes)


def bpe_row(options: Options) -> Iterator[Case]:
    """Seconds to train a tokenizer beside rustbpe (if it is installed), Hugging Face's and
    sentencepiece.
    """
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}  # one thread
    trainers = {"tokenizers": train_hugging_face, "sentencepiece": train_sentencepiece}
    if importlib.util.find_spec("rustbpe"):
        trainers = {"rustbpe": train_rustbpe} | trainers
    peers = list(trainers)
    trainers["ours"] = train_ours
    for name, texts, megabytes in corpora(options):
        V = options.vocab_size
        calls = {side: partial(train, texts, V) for side, train in trainers.items()}
        case = f"{name} {megabytes:.1f} MB, {V} ids"
        yield Case(case, cpu_sides(calls), "s", peers)


def train_ours(texts: list[str], vocab_size: int) -> None:
    bpe.train_bpe(bpe.count_chunks(texts), vocab_size - 256)


def train_rustbpe(texts: list[str], vocab_size: int) -> None:
    import rustbpe

    rustbpe.Tokenizer().train_from_iterator(texts, vocab_size, pattern=bpe.PATTERN)


def train_hugging_face(texts: list[str], vocab_size: int) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    theirs = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(bpe.PATTERN), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(False, use_regex=False)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, min_frequency=bpe.MIN_COUNT, **options)
    theirs.train_from_iterator(texts, trainer)


def train_sentencepiece(texts: list[str], vocab_size: int) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.split("\n")),
        model_writer=io.BytesIO(),
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=0.9995,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        max_sentence_length=1 << 20,
        num_threads=1,
        minloglevel=2,
    )


# ---- dedup ---------------------------------------------------------------------------------------


def dedup_row(options: Options) -> Iterator[Case]:
    """Documents per CPU second: MinHash signatures beside datasketch's bulk API, and from texts to
    survivors beside the usual loop. Raise UserError if the survivors differ.
    """
    from datasketch import MinHash

    for name, found, _ in corpora(options):
        texts = with_copies(pieces(found, 500))
        sets = elements(texts)
        if our_survivors(texts) != plain_survivors(sets):
            raise UserError(f"bench: dedup: survivors differ, {name}")
        # What bulk() hashes
        shingles = [[number.to_bytes(4, "little") for number in numbers] for numbers in sets]
        bulk = partial(MinHash.bulk, shingles, num_perm=128, seed=1)
        for case, theirs, ours in (
            ("signatures", bulk, our_signatures),
            ("texts to survivors", partial(plain_survivors, sets), our_survivors),
        ):
            calls = {"datasketch": theirs, "ours": partial(ours, texts)}
            sides, case = cpu_sides(calls), f"{case}, {name}"
            yield Case(case, sides, "doc/s", ["datasketch"], len(texts))


def pieces(texts: list[str], most: int) -> list[str]:
    """Return at most `most` documents of 2,000 characters, 600 of Chinese, cut from the texts in a
    row.
    """
    held = "\n".join(texts)
    size = 2000 if len(held.encode()) < 1.5 * len(held) else 600
    return [held[i : i + size] for i in range(0, len(held) - size + 1, size)][:most]


def with_copies(texts: list[str]) -> list[str]:
    """Return the documents with every fifth one replaced by a near copy of the one before, which
    lacks the first hundredth.
    """
    found = list(texts)
    for i in range(4, len(texts), 5):
        found[i] = texts[i - 1][len(texts[i]) // 100 :]
    return found


def elements(texts: list[str]) -> list[list[int]]:
    """Return for each text the 32-bit shingle hashes that its signature is made of."""
    units, found = dedup.units(texts), [[] for _ in texts]
    for first in range(0, len(units.hashes), dedup.SLICE):
        numbers, begins, shingles = dedup.shingle_block(units, first)
        for number, part in zip(numbers.tolist(), np.split(shingles, begins[1:]), strict=True):
            found[number] += part.tolist()
    return found


def our_signatures(texts: list[str]) -> np.ndarray:
    return dedup.signatures(dedup.units(texts))


def our_survivors(texts: list[str]) -> list[int]:
    """Return the numbers of the documents that are dropped."""
    found = dedup.near_duplicates(our_signatures(texts), THRESHOLD, BANDS, ROWS)
    return found.dropped.tolist()


def plain_survivors(sets: list[list[int]]) -> list[int]:
    """Run the usual loop: all shingles of a document at once, a query, an insert if nothing found
    is similar.
    """
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
