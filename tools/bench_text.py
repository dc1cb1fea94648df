"""Rows tokenize, bpe and dedup: text, without torch.

bpe: every training has a fresh process, a warm-up on a small part and the text in memory; by the clock and in CPU
seconds; the note is the peak memory above the process with the text in it. The same regular expression cuts the text
for ours and for tokenizers; sentencepiece merges characters within words, not bytes. Ours and sentencepiece have one
thread. dedup: datasketch gets its elements ready made, only our times include reading the text.
"""

import importlib.util
import io
import json
import multiprocessing
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import timing
from timing import Line, Options

import tokenizer
from groundup.demo.python_docs import chinese_sample, python_docs
from groundup.errors import UserError
from groundup.files import readers
from groundup.text import dedup
from groundup.tokens import bpe

THRESHOLD, BANDS, ROWS = 0.8, 16, 8


class Cost(NamedTuple):
    wall: float  # seconds
    cpu: float  # seconds of all threads
    memory: float  # MB


# ---- texts ----------------------------------------------------------------------------------------------------------


def corpora(spec: str) -> dict[str, Iterator[str]]:
    """Return {name: texts} of 'name:paths,name:paths'; without any the documentation of Python and a Chinese sample.
    Raise UserError for a part without a name or without files."""
    files: dict[str, list[str]] = {}
    for part in filter(None, spec.split(",")):
        name, colon, paths = part.strip().partition(":")
        if not colon:
            raise UserError(f"config: input={spec!r}: give every part a name, as in en:books/*.txt,zh:poems/*.json")
        files.setdefault(name, []).extend(readers.find_files(paths))
    if not files:
        return {"docs": python_docs(), "zh": iter(chinese_sample())}
    return {
        name: (document.value for path in paths for document in readers.read_documents(path, "text"))
        for name, paths in files.items()
    }


def corpus_files(options: Options) -> Iterator[tuple[str, Path]]:
    """Yield (name and size, JSON file) of each text."""
    for name, texts in list(corpora(options.keys["input"]).items())[: 1 if options.quick else None]:
        path = options.folder / f"{name}.json"
        yield f"{name} {write_corpus(texts, path, 0.5 if options.quick else options.keys['corpus_mb']):.1f} MB", path


def write_corpus(texts: Iterator[str], path: Path, max_mb: float) -> float:
    """Write the texts, each once, until max_mb; return the megabytes. Lone surrogates, which no UTF-8 has and the peers
    refuse, become question marks."""
    kept: dict[str, None] = {}
    n_bytes = 0
    for text in texts:
        encoded = text.encode("utf-8", "replace")
        if encoded.decode() not in kept:
            kept[encoded.decode()] = None
            n_bytes += len(encoded)
        if n_bytes >= max_mb * 1e6:
            break
    path.write_text(json.dumps(list(kept)), encoding="utf-8")
    return n_bytes / 1e6


# ---- tokenize -------------------------------------------------------------------------------------------------------


def tokenize_row(options: Options) -> Iterator[Line]:
    """MB per CPU second beside tiktoken alone and Hugging Face's tokenizers; the ids are compared first."""
    size = 2048 if options.quick else options.keys["vocab_size"]
    for case, path in corpus_files(options):
        texts = json.loads(path.read_text(encoding="utf-8"))
        tokenizer.train(texts, size).save(options.folder / path.stem)
        yield from compare_encoding(f"{case}, {size} ids", texts, options.folder / path.stem, options.repeats)


def compare_encoding(case: str, texts: list[str], directory: Path, repeats: int) -> list[Line]:
    """Return the rates of the tokenizer in `directory`. Raise UserError if the sides give different ids."""
    ours = tokenizer.Tokenizer.load(directory)

    def hugging_face_ids() -> Callable[[str], Sequence[int]]:
        from tokenizers import Tokenizer

        theirs = Tokenizer.from_file(str(directory / "tokenizer.json"))
        return lambda text: theirs.encode(text, add_special_tokens=False).ids

    encoders, missing = timing.build({
        "tiktoken": lambda: ours.engine.encoding.encode_ordinary,
        "tokenizers": hugging_face_ids,
        "ours": lambda: ours.encode,
        "ours, arrays": lambda: ours.encode_array,
    })  # fmt: skip
    for name, encode in encoders.items():
        if any(list(encode(text)) != ours.encode(text) for text in texts):
            raise UserError(f"bench: tokenize: the ids of {name} are not those of ours, {case}")
    calls = {name: lambda encode=encode: [encode(text) for text in texts] for name, encode in encoders.items()}
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    lines = timing.compare_sides("tokenize", case, calls, "MB/s", ("tiktoken", "tokenizers"), megabytes, repeats)
    return lines + timing.missing_lines("tokenize", case, missing)


# ---- bpe ------------------------------------------------------------------------------------------------------------


def bpe_row(options: Options) -> Iterator[Line]:
    """Seconds to train a tokenizer beside Hugging Face's (on one thread and two) and sentencepiece."""
    size = 2048 if options.quick else options.keys["vocab_size"]
    sides = {"tokenizers, 1 thread": ("tokenizers", 1), "tokenizers, 2 threads": ("tokenizers", 2)}
    sides |= {"sentencepiece": ("sentencepiece", 1), "ours": ("ours", 1)}
    lost = {name: f"needs pip install {trainer}" for name, (trainer, _) in sides.items()
            if trainer != "ours" and importlib.util.find_spec(trainer) is None}  # fmt: skip
    for case, path in corpus_files(options):
        calls = {name: partial(cost, *side, path, size) for name, side in sides.items() if name not in lost}
        costs = timing.alternate(calls, options.few, warmups=0)
        notes = {name: f"{median(cost.memory for cost in found):,.0f} MB" for name, found in costs.items()}
        for i, clock in enumerate(("wall", "cpu")):
            seconds = {name: [cost[i] for cost in found] for name, found in costs.items()}
            peers, full = [name for name in costs if name != "ours"], f"{case}, {size} ids, {clock}"
            yield from timing.lines("bpe", full, seconds, "s", peers, notes=notes)
        yield from timing.missing_lines("bpe", case, lost)


def train_ours(texts: list[str], vocab_size: int) -> None:
    bpe.train_bpe(bpe.count_chunks(texts), vocab_size - 256)


def train_hugging_face(texts: list[str], vocab_size: int) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    theirs = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(bpe.PATTERN), "isolated")
    theirs.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=bpe.MIN_COUNT, initial_alphabet=alphabet, show_progress=False
    )
    theirs.train_from_iterator(texts, trainer)


def train_sentencepiece(texts: list[str], vocab_size: int) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.split("\n")), model_writer=io.BytesIO(),
        model_type="bpe", vocab_size=vocab_size, hard_vocab_limit=False, character_coverage=0.9995, byte_fallback=True,
        normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True, max_sentence_length=1 << 20, num_threads=1, minloglevel=2,
    )  # fmt: skip


TRAINERS = {"ours": train_ours, "tokenizers": train_hugging_face, "sentencepiece": train_sentencepiece}


def cost(trainer: str, n_threads: int, path: Path, vocab_size: int) -> Cost:
    """Return the cost of one training in its own process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(cost_here, trainer, n_threads, path, vocab_size).result()


def cost_here(trainer: str, n_threads: int, path: Path, vocab_size: int) -> Cost:
    os.environ["RAYON_NUM_THREADS"] = str(n_threads)  # tokenizers reads it when it starts
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if n_threads > 1 else "false"
    texts = json.loads(path.read_text(encoding="utf-8"))
    TRAINERS[trainer](texts[: len(texts) // 50 + 1], vocab_size)
    before, wall, cpu = peak_mb(), time.perf_counter(), time.process_time()
    TRAINERS[trainer](texts, vocab_size)
    return Cost(time.perf_counter() - wall, time.process_time() - cpu, peak_mb() - before)


def peak_mb() -> float:
    """Return the most memory that this process has held. (A child's ru_maxrss starts at its parent's.)"""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("VmHWM:")[1].split()[0]) / 1e3
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


# ---- dedup ----------------------------------------------------------------------------------------------------------


def dedup_row(options: Options) -> Iterator[Line]:
    """Documents per CPU second: MinHash signatures beside datasketch's bulk API, and from texts to survivors beside
    the usual loop. Raise UserError if the survivors differ."""
    from datasketch import MinHash

    peer = ("datasketch",)
    for name, found in corpora(options.keys["input"]).items():
        texts = pieces(found, 100 if options.quick else 500)
        signed = partial(MinHash.bulk, shingles_of(texts), num_perm=128, seed=1)
        calls = {"datasketch": signed, "ours": partial(our_signatures, texts)}
        case = f"signatures, {name}"
        yield from timing.compare_sides("dedup", case, calls, "doc/s", peer, len(texts), options.repeats)
        copies = with_copies(texts)
        sets = elements(copies)
        if our_survivors(copies) != plain_survivors(sets):
            raise UserError(f"bench: dedup: survivors differ, {name}")
        calls = {"datasketch": partial(plain_survivors, sets), "ours": partial(our_survivors, copies)}
        case = f"texts to survivors, {name}"
        yield from timing.compare_sides("dedup", case, calls, "doc/s", peer, len(copies), options.repeats)


def pieces(texts: Iterator[str], most: int) -> list[str]:
    """Return at most so many documents of 2,000 characters, 600 of Chinese, cut from all texts in a row."""
    held = ""
    for text in texts:
        held += text + "\n"
        if len(held) > 2000 * most:
            break
    size = 2000 if len(held.encode("utf-8", "replace")) < 1.5 * len(held) else 600
    return [held[i : i + size] for i in range(0, len(held) - size + 1, size)][:most]


def with_copies(texts: list[str]) -> list[str]:
    """Return as many documents, every fifth a copy of an earlier one with 1 % of its characters changed."""
    rng, copies = random.Random(0), texts.copy()
    for i in range(4, len(texts), 5):
        copy = list(copies[rng.randrange(i)])
        for place in rng.sample(range(len(copy)), len(copy) // 100):
            copy[place] = "#"
        copies[i] = "".join(copy)
    return copies


def elements(texts: list[str]) -> list[list[int]]:
    """Return for each text the 32-bit shingle hashes that its signature is made of."""
    units = dedup.units(texts)
    found: list[list[int]] = [[] for _ in texts]
    for first in range(0, len(units.hashes), dedup.SLICE):
        numbers, begins, shingles = dedup.shingle_block(units, first)
        for number, part in zip(numbers.tolist(), np.split(shingles, begins[1:]), strict=True):
            found[number] += part.tolist()
    return found


def shingles_of(texts: list[str]) -> list[list[bytes]]:
    """Return for each text its runs of five words or characters as bytes; MinHash.bulk hashes them itself."""
    units, found = dedup.units(texts), []
    for t, text in enumerate(texts):
        part = slice(*units.starts[t : t + 2])
        words = [text[b:e] for b, e in zip(units.begins[part].tolist(), units.ends[part].tolist(), strict=True)]
        found.append([" ".join(words[i : i + 5]).lower().encode() for i in range(len(words) - 4)])
    return found


def our_signatures(texts: list[str]) -> np.ndarray:
    return dedup.signatures(dedup.units(texts))


def our_survivors(texts: list[str]) -> list[int]:
    return dedup.near_duplicates(our_signatures(texts), THRESHOLD, BANDS, ROWS).dropped.tolist()


def plain_survivors(sets: list[list[int]]) -> list[int]:
    """Run the usual loop: all shingles of a document at once, a query, an insert if nothing found is similar."""
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
