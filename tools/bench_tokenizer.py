"""Time and memory of training a tokenizer, with the peers beside it: ours, Hugging Face's tokenizers, sentencepiece.

    python tools/bench_tokenizer.py --quick=True                                       # under a minute
    python tools/bench_tokenizer.py --input='en:books/*.txt,zh:poems/*.json,zh:news/'  # corpora of your own, by name

Every training has a fresh process, a warm-up on a small part of the text, and the text in memory; the trainers take
turns, and the median counts. A line for seconds by the clock and one for CPU seconds, which a busy machine disturbs
less; the memory in a line is what the peak is above the process with the text in it.
tokenizers runs with each number of threads in `threads`; ours has one thread, and so has sentencepiece here. The same
regular expression cuts the text for ours and tokenizers; sentencepiece merges characters inside words, not bytes.
"""

import ast
import importlib.util
import io
import json
import multiprocessing
import os
import resource
import statistics
import sys
import sysconfig
import tempfile
import time
import tokenize
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import timing

from configurator import configure
from groundup.errors import UserError
from groundup.files import readers
from groundup.tokens import bpe
from tokenizer import Tokenizer

# ---- config ---------------------------------------------------------------------------------------------------------
input = ""  # name:paths,name:paths; "" = prose and code of the installed Python
text_key = "text"  # where the text is in JSON, csv and parquet
corpus_mb = 10.0  # megabytes of each corpus at most
vocab_sizes = "8192,32768"
threads = "1,2"  # of tokenizers
repeats = 3  # timed trainings of each; the median counts
quick = False  # 2 MB, the first vocabulary size, one training of each


Encode = Callable[[str], Sequence[int]]


class Cost(NamedTuple):
    wall: float  # seconds
    cpu: float  # seconds, of all threads
    memory: float  # MB


def python_corpora() -> dict[str, Iterator[str]]:
    """English prose (docstrings and pydoc's topics) and Python source, of the library and the installed packages."""
    from pydoc_data.topics import topics

    paths = dict.fromkeys(sysconfig.get_paths()[key] for key in ("stdlib", "purelib"))
    files = [file for path in paths for file in sorted(Path(path).rglob("*.py"))]

    def parsed() -> Iterator[tuple[str, ast.Module]]:
        for file in files:
            try:
                with tokenize.open(file) as f:
                    source = f.read()
                yield source, ast.parse(source)
            except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
                continue  # tests of the library that are broken on purpose

    def prose() -> Iterator[str]:
        yield from (topics[name] for name in sorted(topics))
        for _, tree in parsed():
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    yield ast.get_docstring(node) or ""

    return {"prose": prose(), "code": (source for source, _ in parsed())}


def named_corpora(spec: str, text_key: str) -> dict[str, Iterator[str]]:
    """{name: texts} of 'name:paths,name:paths'. Raises ConfigError, DataError."""
    files: dict[str, list[str]] = {}
    for part in spec.split(","):
        name, colon, paths = part.strip().partition(":")
        if not colon:
            raise UserError(f"config: input={spec!r}: give every part a name, as in en:books/*.txt,zh:poems/*.json")
        files.setdefault(name, []).extend(readers.find_files(paths))
    return {
        name: (document.text for path in paths for document in readers.read_documents(path, text_key))
        for name, paths in files.items()
    }


def write_corpus(texts: Iterator[str], path: Path, max_mb: float) -> float:
    """Write the texts, each once, until max_mb; return the megabytes. Halves of surrogate pairs, which are in no UTF-8
    and which the peers refuse, become question marks."""
    kept: dict[str, None] = {}
    n_bytes = 0
    for text in texts:
        encoded = text.encode("utf-8", "replace")
        text = encoded.decode()
        if text in kept:
            continue
        kept[text] = None
        n_bytes += len(encoded)
        if n_bytes >= max_mb * 1e6:
            break
    path.write_text(json.dumps(list(kept)), encoding="utf-8")
    return n_bytes / 1e6


# ---- the trainers ---------------------------------------------------------------------------------------------------


def ours(texts: list[str], vocab_size: int) -> None:
    bpe.train_bpe(bpe.count_chunks(texts), vocab_size - 256)


def hugging_face(texts: list[str], vocab_size: int) -> None:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(bpe.PATTERN), "isolated"), byte_level
    ])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=bpe.MIN_COUNT, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)


def sentence_piece(texts: list[str], vocab_size: int) -> None:
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


TRAINERS = {"ours": ours, "tokenizers": hugging_face, "sentencepiece": sentence_piece}


def cost(trainer: str, n_threads: int, path: Path, vocab_size: int) -> Cost:
    """Of one training, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(cost_here, trainer, n_threads, path, vocab_size).result()


def cost_here(trainer: str, n_threads: int, path: Path, vocab_size: int) -> Cost:
    os.environ["RAYON_NUM_THREADS"] = str(n_threads)  # read by tokenizers when it starts
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if n_threads > 1 else "false"
    texts = json.loads(path.read_text(encoding="utf-8"))
    train = TRAINERS[trainer]
    train(texts[: len(texts) // 50 + 1], vocab_size)
    before, wall, cpu = peak_mb(), time.perf_counter(), time.process_time()
    train(texts, vocab_size)
    return Cost(time.perf_counter() - wall, time.process_time() - cpu, peak_mb() - before)


def peak_mb() -> float:
    """The most memory that this process has held. (A child's ru_maxrss begins with its parent's.)"""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("VmHWM:")[1].split()[0]) / 1e3
    except OSError:
        unit = 1e6 if sys.platform == "darwin" else 1e3
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def compare(case: str, path: Path, vocab_size: int, n_threads: list[int], repeats: int) -> list[timing.Line]:
    """Seconds of all trainers, which take turns, by the clock and of the processor."""
    rows = [(f"tokenizers, {n} thread{'s' * (n > 1)}", "tokenizers", n) for n in n_threads]
    rows += [("sentencepiece", "sentencepiece", 1), ("ours", "ours", 1)]
    lost = [name for name, trainer, _ in rows if trainer != "ours" and importlib.util.find_spec(trainer) is None]
    sides = {name: partial(cost, trainer, n, path, vocab_size) for name, trainer, n in rows if name not in lost}
    costs, lines = timing.alternate(sides, repeats, warmups=0), []
    for i, clock in enumerate(("wall", "cpu")):
        seconds = {name: [cost[i] for cost in found] for name, found in costs.items()}
        notes = {name: f"{statistics.median(cost.memory for cost in found):,.0f} MB" for name, found in costs.items()}
        lines += timing.lines("bpe", f"{case}, {clock}", seconds, "s", list(sides)[:-1], notes=notes)
    notes = {name: f"needs pip install {name.partition(',')[0]}" for name in lost}
    return lines + [timing.Line("bpe", case, name, "s", note=note) for name, note in notes.items()]


# ---- encoding -------------------------------------------------------------------------------------------------------


def compare_encoding(case: str, texts: list[str], directory: Path, repeats: int) -> list[timing.Line]:
    """MB per CPU second of the tokenizer in `directory`: tiktoken alone, tokenizers, ours. Raises BenchError if they do
    not give the same ids."""
    tokenizer = Tokenizer.load(directory)

    def hugging_face_ids() -> Encode:
        from tokenizers import Tokenizer as Theirs

        theirs = Theirs.from_file(str(directory / "tokenizer.json"))
        return lambda text: theirs.encode(text, add_special_tokens=False).ids

    encoders, missing = timing.build({
        "tiktoken": lambda: tokenizer.engine.encoding.encode_ordinary,
        "tokenizers": hugging_face_ids,
        "ours": lambda: tokenizer.encode,
        "ours, arrays": lambda: tokenizer.encode_array,
    })  # fmt: skip
    for name, encode in encoders.items():
        if any(list(encode(text)) != tokenizer.encode(text) for text in texts):
            raise UserError(f"bench: tokenize: the ids of {name} are not those of ours, {case}")
    sides = {name: partial(timing.cpu_seconds, partial(encode_all, encode, texts)) for name, encode in encoders.items()}
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    lines = timing.lines(
        "tokenize", case, timing.alternate(sides, repeats), "MB/s", ("tiktoken", "tokenizers"), megabytes
    )  # fmt: skip
    return lines + [timing.Line("tokenize", case, name, "MB/s", note=note) for name, note in missing.items()]


def encode_all(encode: Encode, texts: list[str]) -> None:
    for text in texts:
        encode(text)


if __name__ == "__main__":
    configure(globals())
    sizes, limit = [int(size) for size in vocab_sizes.split(",")], 2.0 if quick else corpus_mb
    corpora = named_corpora(input, text_key) if input else python_corpora()
    print(timing.HEADER)
    with tempfile.TemporaryDirectory() as directory:
        for name, texts in corpora.items():
            path = Path(directory, name + ".json")
            megabytes = write_corpus(texts, path, limit)
            for vocab_size in sizes[:1] if quick else sizes:
                case = f"{name} {megabytes:.1f} MB, {vocab_size} ids"
                n_threads = [int(n) for n in threads.split(",")]
                for line in compare(case, path, vocab_size, n_threads, 1 if quick else repeats):
                    print(timing.text(line), flush=True)
