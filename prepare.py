"""Raw files to token files: read, clean, tokenize, split, write. The trainers read the result.

    python prepare.py --input='corpus/*.jsonl' --out_dir=data/x --vocab_size=32768     # trains a tokenizer of its own
    python prepare.py --input=more/,x.txt.gz --out_dir=data/y --tokenizer_dir=data/x   # uses that of data/x
    python prepare.py --input=python-docs --out_dir=data/demo --vocab_size=4096        # text that is on every machine
    python prepare.py --verify=data/x                                                  # reads every byte again

The input is cut into units, which depend on nothing but the input. Any number of processes turn units into tokens; then
one pass copies the tokens, in the order of the units, into the splits. So the output is the same to the byte for any
number of processes. Each holds one document at a time, so memory does not grow with the input.

All of it is built in a hidden directory beside out_dir and renamed at the end: a run that was killed leaves nothing
that looks finished. A run whose inputs, settings and tokenizer are those of the directory that is there does nothing.
"""

import ast
import fcntl
import itertools
import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import struct
import sys
import sysconfig
import tempfile
import threading
import time
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
from tqdm import tqdm

import data
import readers
from configurator import ConfigError, configure, write_config
from tokenizer import FILES, Tokenizer, train

# ---- config: override with a config file or --key=value; see --help --------------------------
input = ""  # files, directories, globs, comma-separated; python-docs: those of the running Python; -: standard input
out_dir = ""  # directory to make, for example data/x
tokenizer_dir = ""  # tokenizer to use; "" = train one; a directory without one gets the one that is trained
vocab_size = 32_768  # of a tokenizer that is trained
backend = "bpe"  # of a tokenizer that is trained: bpe | sentencepiece
kind = "text"  # what a document is: text
text_key = "text"  # where the text is in a JSON object or a row: 'text', 'a.b', 'title,body'
txt_split = "file"  # what a document is in plain text: file | blank (between blank lines) | line
workers = 0  # processes; 0 = one per core
val_fraction = 0.01  # of the documents; of the characters if there is only one document
test_fraction = 0.0  # likewise
strict = False  # stop at the first record that cannot be read, instead of counting it and going on
shard_tokens = 134_217_728  # tokens per file
verify = ""  # check this prepared directory and exit
overwrite = False  # replace an out_dir that lacks the manifest.json by which prepare.py knows its own

VERSION = 1  # of what is made of an input; a directory made by another version is made anew
UNIT_BYTES = 2**26  # a large file is cut into units of this size
GROUP_BYTES = 2**22  # small files share a unit up to this size, so that 100,000 files are not 100,000 tasks
TOKENIZER_BYTES = 2**28  # of text that a tokenizer is trained on; more changes little and takes minutes
SHOWN = 20  # problems that are printed; errors.tsv has all of them
SPLITS = ("train", "val", "test")
SPLIT_KEY = b"split-v1"
# C0 controls but for tab and newline. In UTF-8 each is a byte that occurs in no other character.
CONTROLS = bytes(byte for byte in range(32) if byte not in b"\t\n")


class PrepareError(ValueError):
    """What the user can mend; printed as one line, without a traceback."""

    one_line = True


# ---- inputs ----------------------------------------------------------------------------------


class Input(NamedTuple):
    path: str  # where the bytes are
    name: str  # what the user calls it: the path, python-docs or -
    size: int
    mtime_ns: int
    problem: str = ""  # why it cannot be opened


def find_inputs(spec: str, work: Path) -> list[Input]:
    """The files that `spec` names. What is not a file becomes one in `work`. Raises DataError if nothing matches."""
    found: dict[str, Input] = {}
    for name in filter(None, (part.strip() for part in spec.split(","))):
        if name == "python-docs":
            found[name] = look(write_documents(python_docs(), work / "python-docs.jsonl"), name)
        elif name == "-":
            found[name] = look(spool_stdin(work), name)
        else:
            found |= {path: look(path, path) for path in readers.find_files(name)}
    return list(found.values())


def look(path: str | Path, name: str) -> Input:
    try:
        with open(path, "rb") as f:
            stat = os.fstat(f.fileno())
    except OSError as error:
        return Input(str(path), name, 0, 0, problem=error.strerror)
    return Input(str(path), name, stat.st_size, stat.st_mtime_ns)


def write_documents(texts: Iterable[str], path: Path) -> Path:
    with open(path, "w", encoding="utf-8") as f:
        for text in texts:
            f.write(json.dumps(text, ensure_ascii=False) + "\n")
    return path


def spool_stdin(work: Path) -> Path:
    """Standard input as a file, which can be read twice and in parts. Its suffix says whether it is JSON."""
    path = work / "stdin.txt"
    with open(path, "wb") as f:
        shutil.copyfileobj(sys.stdin.buffer, f, 2**20)
    with readers.open_stream(str(path)) as stream:
        kind = readers.container("-", stream.peek(), "file")
    return path.rename(work / "stdin.json") if kind in ("array", "values", "jsonl") else path


class Part(NamedTuple):
    """What one call of `readers.read_documents` reads."""

    path: str
    name: str
    begin: int
    end: int | None
    size: int  # bytes of input, for the progress bar


def plan_units(inputs: list[Input], txt_split: str) -> list[list[Part]]:
    """The work, in the order of the output: parts of large files one by one, small files in groups."""
    units: list[list[Part]] = []
    room = -1
    for file in inputs:
        cuts = readers.work_units(file.path, txt_split, UNIT_BYTES) if not file.problem else []
        for begin, end in cuts:
            size = file.size // len(cuts)
            if size > room:
                units.append([])
                room = GROUP_BYTES
            units[-1].append(Part(file.path, file.name, begin, end, size))
            room -= size
    return units


# ---- a unit to tokens, in any process --------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """The settings that decide what is made of an input, besides the tokenizer."""

    kind: str
    text_key: str
    txt_split: str
    val_fraction: float
    test_fraction: float
    strict: bool
    shard_tokens: int


@dataclass
class Counts:
    """What became of some documents."""

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # documents by reason
    mended: Counter[str] = field(default_factory=Counter)  # documents by what was mended; they are kept
    bytes_read: int = 0  # of text in UTF-8
    bytes_kept: int = 0  # after cleaning
    failed: list[str] = field(default_factory=list)  # files that could not be read, or not to the end
    shown: list[str] = field(default_factory=list)  # the first problems, in words

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


class Problems(readers.Report):
    """Writes every problem to a file as it comes: however many there are, they need no memory."""

    def __init__(self, name: str, file: TextIO, strict: bool) -> None:
        super().__init__(strict)
        self.name, self.file = name, file
        self.shown: list[str] = []  # the first of them

    def add(self, path: str, line: int, offset: int, reason: str, detail: str) -> None:
        detail = " ".join(detail.split())  # one line without tabs
        what = f"{self.name}:{line}: {reason}: {detail}"
        if self.strict:
            raise PrepareError(f"prepare: {what}; mend it, or leave such records out with strict=False")
        self.problems[reason] += 1
        self.file.write(f"{self.name}\t{line}\t{offset}\t{reason}\t{detail}\n")
        if len(self.shown) < SHOWN:
            self.shown.append(what)


ROW = struct.Struct("<QQQ")  # position, tokens, bytes: a document in the file <unit>.rows


def tokenize_unit(number: int, unit: list[Part], recipe: Recipe, work: Path, tokenizer: Tokenizer) -> Counts:
    """Read, clean and tokenize a unit. Writes to `work`: its tokens end to end, a row per document, its problems."""
    counts = Counts()
    with (
        open(unit_file(work, number, "problems"), "w", encoding="utf-8") as problems_file,
        open(unit_file(work, number, "tokens"), "wb") as tokens_file,
        open(unit_file(work, number, "rows"), "wb") as rows_file,
    ):
        for text, raw in read_unit(unit, recipe, problems_file, counts):
            ids = tokenizer.encode_array(text)
            tokens_file.write(ids.data)
            rows_file.write(ROW.pack(split_position(raw), len(ids), len(raw)))
    return counts


def unit_file(work: Path, number: int, what: str) -> str:
    return str(work / f"{number:06d}.{what}")


def read_unit(unit: list[Part], recipe: Recipe, problems_file: TextIO, counts: Counts) -> Iterator[tuple[str, bytes]]:
    """The documents of a unit that are kept, as (cleaned text, the same in UTF-8); `counts` grows as they are read."""
    for part in unit:
        problems, kept_before = Problems(part.name, problems_file, recipe.strict), counts.kept
        documents = readers.read_documents(
            part.path, recipe.text_key, recipe.txt_split, part.begin, part.end, report=problems
        )
        for document in documents:
            text, raw, n_bytes = clean(document.text)
            counts.bytes_read += n_bytes
            if not raw or text.isspace():
                counts.dropped["empty"] += 1
            else:
                counts.kept += 1
                counts.bytes_kept += len(raw)
                yield text, raw
        counts.dropped += problems.problems
        counts.mended += problems.mended
        counts.shown = (counts.shown + problems.shown)[:SHOWN]
        if problems.problems["truncated_file"] or (problems.problems and counts.kept == kept_before):
            counts.failed.append(part.name)


def clean(text: str) -> tuple[str, bytes, int]:
    r"""`text` with "\n" for every line end and no NUL or other control character; that in UTF-8; bytes of `text`."""
    raw = text.encode()
    if len(raw.translate(None, CONTROLS)) == len(raw):  # as fast as copying
        return text, raw, len(raw)
    cleaned = raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n").translate(None, CONTROLS)
    return cleaned.decode(), cleaned, len(raw)


def split_position(raw: bytes) -> int:
    """Where in [0, 2**64) a document falls, by a keyed hash of its text: adding others never moves it, and a text that
    occurs twice is in one split."""
    return int.from_bytes(blake2b(raw, digest_size=8, key=SPLIT_KEY).digest(), "little")


def split_of(position: int, test_end: int, val_end: int) -> str:
    return "test" if position < test_end else "val" if position < val_end else "train"


def split_ends(recipe: Recipe) -> tuple[int, int]:
    """Where test ends and val begins, and where val ends, in [0, 2**64]."""
    return int(recipe.test_fraction * 2**64), int((recipe.test_fraction + recipe.val_fraction) * 2**64)


# ---- all units, in several processes ---------------------------------------------------------


def tokenize_units(units: list[list[Part]], recipe: Recipe, work: Path, tokenizer: Tokenizer, workers: int) -> Counts:
    """Run tokenize_unit for all. Raises what a worker raised, and PrepareError if one was killed."""
    counts = [Counts()] * len(units)
    sizes = [sum(part.size for part in unit) for unit in units]
    with tqdm(total=sum(sizes), unit="B", unit_scale=True, desc="tokenize", disable=None) as progress:
        with closing(run(units, recipe, work, tokenizer, min(workers, len(units)))) as results:
            for number, counted in results:
                counts[number] = counted
                progress.update(sizes[number])
    return sum(counts, Counts())


def run(
    units: list[list[Part]], recipe: Recipe, work: Path, tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[int, Counts]]:
    """(number, counts) of every unit, as it is done."""
    if workers <= 1:
        for number, unit in enumerate(units):
            yield number, tokenize_unit(number, unit, recipe, work, tokenizer)
        return
    spawn = multiprocessing.get_context("spawn")
    watched, lifeline = spawn.Pipe(duplex=False)
    # On an error, too, the lifeline is closed first: the workers end, and the executor does not wait for their units.
    with ProcessPoolExecutor(workers, spawn, start_worker, (watched,)) as executor, lifeline:
        tasks = {executor.submit(tokenize_in_worker, k, unit, recipe, work): k for k, unit in enumerate(units)}
        for task in as_completed(tasks):
            try:
                counts = task.result()
            except BrokenProcessPool:
                hint = "run again, with fewer workers if memory was short"
                raise PrepareError(f"prepare: a worker process was killed; {hint}") from None
            yield tasks[task], counts


def start_worker(watched: Connection) -> None:
    """Make this process end when the parent closes its end of the pipe or ends itself, also by kill -9."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent sees to the others
    threading.Thread(target=end_with, args=(watched,), daemon=True).start()


@lru_cache(maxsize=1)
def load_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


def tokenize_in_worker(number: int, unit: list[Part], recipe: Recipe, work: Path) -> Counts:
    return tokenize_unit(number, unit, recipe, work, load_tokenizer(work / "out"))


def end_with(watched: Connection) -> None:
    try:
        watched.recv()
    except EOFError:
        os._exit(1)


# ---- tokens to splits, in one process --------------------------------------------------------


def write_splits(units: list[list[Part]], kept: int, recipe: Recipe, tokenizer: Tokenizer, work: Path) -> list[dict]:
    """Copy the tokens of all units, in order, into the shards of their splits; returns the shards for the manifest."""
    writers = {
        split: data.ShardWriter(work / "out", split, tokenizer.vocab_size, tokenizer.eot_id, recipe.shard_tokens)
        for split in SPLITS
    }
    if kept == 1:
        print("prepare: there is only one document; it is cut into the splits")
        text, _ = next(read_again(units, recipe, Counts()))
        for split, part in zip(SPLITS, cut(text, recipe), strict=True):
            if part:
                writers[split].add(tokenizer.encode_array(part), len(part.encode()))
    else:
        test_end, val_end = ends_for(recipe, len(units), work)
        for number in range(len(units)):
            for position, ids, n_bytes in tokenized(number, work):
                writers[split_of(position, test_end, val_end)].add(ids, n_bytes)
    shards = [shard for split in SPLITS for shard in writers[split].close()]
    if not any(shard["split"] == "train" for shard in shards):
        raise PrepareError("prepare: no document is left for train; lower val_fraction, or give more text")
    return shards


def read_again(units: list[list[Part]], recipe: Recipe, counts: Counts) -> Iterator[tuple[str, bytes]]:
    """What read_unit gives, for all units, the problems left to the reading that counts."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        for unit in units:
            yield from read_unit(unit, recipe, nowhere, counts)


def cut(text: str, recipe: Recipe) -> tuple[str, str, str]:
    """A single document as train, val and test: test is the last test_fraction of its characters, val lies before it.

    With val_fraction=0.1 these are nanoGPT's text[: int(n * 0.9)] and text[int(n * 0.9) :].
    """
    val_begin = int(len(text) * (1 - recipe.test_fraction - recipe.val_fraction))
    test_begin = int(len(text) * (1 - recipe.test_fraction))
    return text[:val_begin], text[val_begin:test_begin], text[test_begin:]


def ends_for(recipe: Recipe, n_units: int, work: Path) -> tuple[int, int]:
    """split_ends; if they leave val empty, val's end is moved to take in the next document."""
    test_end, val_end = split_ends(recipe)
    if test_end == val_end:
        return test_end, val_end
    lowest = 2**64
    for position in (position for number in range(n_units) for position, _, _ in rows(number, work)):
        if test_end <= position < val_end:
            return test_end, val_end
        lowest = min(lowest, position) if position >= test_end else lowest
    print(f"prepare: warning: val_fraction={recipe.val_fraction} takes none of so few documents; one is moved to val")
    return test_end, lowest + 1


def rows(number: int, work: Path) -> Iterator[tuple[int, int, int]]:
    """(position, tokens, bytes) of the documents of a unit."""
    with open(unit_file(work, number, "rows"), "rb") as f:
        while block := f.read(ROW.size * 2**12):
            yield from ROW.iter_unpack(block)


def tokenized(number: int, work: Path) -> Iterator[tuple[int, np.ndarray, int]]:
    """(position, ids, bytes) of the documents of a unit. Afterwards its tokens are removed, to save space."""
    tokens_file = unit_file(work, number, "tokens")
    with open(tokens_file, "rb") as f:
        for position, n_tokens, n_bytes in rows(number, work):
            yield position, np.frombuffer(f.read(4 * n_tokens), np.uint32), n_bytes
    os.unlink(tokens_file)


# ---- the built-in corpus ---------------------------------------------------------------------

# folders that hold tests, tables, programs, or what is installed later
NOT_DOCS = "test tests encodings idlelib lib2to3 pydoc_data turtledemo ensurepip site-packages dist-packages"


def python_docs() -> Iterator[str]:
    """The documentation that every Python carries: its reference, a document per topic; then a document per module of
    the standard library, docstrings as prose followed by the source. Always in the same order."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(library.rglob("*.py")) if is_documentation(file.relative_to(library))]
    if not files:
        raise PrepareError(f"prepare: python-docs: no sources of the standard library in {library}; use other text")
    for file in files:
        with tokenize.open(file) as f:  # in the encoding that the file declares
            source = f.read()
        module = ".".join(file.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
        yield "\n\n\n".join([*docstrings(ast.parse(source), module), source])


def is_documentation(file: Path) -> bool:
    """Whether a file of the standard library is no test and the same on every machine."""
    local = file.parts[0].startswith("config-") or file.name.startswith("_sysconfigdata")
    return not local and not set(NOT_DOCS.split()) & set(file.parts) and not re.match(r"test_|.*_test\.py$", file.name)


def docstrings(node: ast.AST, name: str) -> Iterator[str]:
    """The docstrings of a module, class or function and of all in it, each under its name, as ordered in the source."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        if text := ast.get_docstring(node):
            yield f"{name}\n\n{text}"
        for child in node.body:
            yield from docstrings(child, f"{name}.{getattr(child, 'name', '')}")


# ---- the directory ---------------------------------------------------------------------------

OWN = re.compile(r"(train|val|test)_\d{5}(\.off)?\.npy|manifest\.json|config\.py|errors\.tsv|" + "|".join(FILES))


@contextmanager
def scratch_dir(out_dir: Path) -> Iterator[Path]:
    """A new hidden directory beside `out_dir`, removed in the end. Those that killed runs left are removed first.

    Each is locked while its process lives, and gets the name by which others find it once it is locked.
    """
    parent, prefix, suffix = out_dir.absolute().parent, f".{out_dir.absolute().name}.", ".building.tmp"
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.iterdir():
        if left.name.startswith(prefix) and left.name.endswith(suffix):
            with locked(left) as is_dead:
                if is_dead:
                    shutil.rmtree(left, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix=prefix, suffix=".tmp", dir=parent))
    with locked(new):
        scratch = new.rename(new.with_suffix(suffix))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def locked(directory: Path) -> Iterator[bool]:
    """Lock a directory; False if a living process holds the lock, if the directory is gone, or where there are none."""
    handle = -1
    try:
        handle = os.open(directory, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        if handle >= 0:
            os.close(handle)


def complete_manifest(out_dir: Path) -> dict:
    """manifest.json of a directory whose files are all there, {} of any other."""
    try:
        manifest = data.read_manifest(out_dir)
        for split in manifest["splits"]:
            data.TokenData(out_dir, split)  # compares the sizes
        same_tokenizer = Tokenizer.load(out_dir).fingerprint() == manifest["tokenizer_fingerprint"]
    except (ValueError, KeyError, TypeError):  # DataError and TokenizerError are ValueErrors
        return {}
    return manifest if same_tokenizer else {}


def check_replaceable(out_dir: Path, overwrite: bool) -> None:
    """Raise PrepareError if `out_dir` is not one of ours, whatever its state. Files of others are never removed."""
    if not out_dir.exists():
        return
    if not out_dir.is_dir():
        raise PrepareError(f"prepare: out_dir={out_dir} is a file; choose another")
    names = sorted(os.listdir(out_dir))
    others = [name for name in names if not OWN.fullmatch(name)]
    if others:
        raise PrepareError(f"prepare: {out_dir} holds {others[0]}, which is not ours; move it, or use another out_dir")
    if names and not overwrite:
        try:
            data.read_manifest(out_dir)
        except readers.DataError:
            hint = "overwrite=True replaces it"
            raise PrepareError(f"prepare: {out_dir} holds {names[0]}, but no manifest.json of ours; {hint}") from None


def publish(work: Path, out_dir: Path) -> None:
    """Rename work/out to `out_dir`, and what is there out of the way. After a kill in between, neither is there."""
    if out_dir.exists():
        out_dir.rename(work / "old")
    (work / "out").rename(out_dir)


# ---- all of it -------------------------------------------------------------------------------


def training_texts(units: list[list[Part]], recipe: Recipe) -> Iterator[str]:
    """What a tokenizer learns from: documents of train, some TOKENIZER_BYTES, from units all over the input."""
    size = sum(part.size for unit in units for part in unit)
    counts = Counts()
    documents = read_again(units[:: 1 + size // TOKENIZER_BYTES], recipe, counts)
    first = list(itertools.islice(documents, 2))
    if not first:
        raise nothing_kept(counts)
    if len(first) == 1:
        yield cut(first[0][0], recipe)[0]
        return
    for text, raw in itertools.chain(first, documents):
        if split_of(split_position(raw), *split_ends(recipe)) == "train":
            yield text
        if counts.bytes_read > TOKENIZER_BYTES:
            return


def nothing_kept(counts: Counts) -> PrepareError:
    reasons = ", ".join(f"{n} {reason}" for reason, n in counts.dropped.items()) or "the input holds none"
    first = f"; first: {counts.shown[0]}" if counts.shown else ""
    return PrepareError(f"prepare: no document to prepare: {reasons}{first}")


def build(
    inputs: list[Input], units: list[list[Part]], recipe: Recipe, tokenizer: Tokenizer, work: Path, workers: int,
    info: dict,
) -> dict:  # fmt: skip
    """Make work/out, all that out_dir will hold, and return its manifest. info: what else the manifest is to hold."""
    out = work / "out"
    tokenizer.save(out)  # the workers read it there
    counts = tokenize_units(units, recipe, work, tokenizer, workers)
    unreadable = [file for file in inputs if file.problem]
    write_problems(unreadable, len(units), work)
    problems = [f"{file.name}: cannot be read: {file.problem}" for file in unreadable] + counts.shown
    print("".join(f"prepare: {problem}\n" for problem in problems[:SHOWN]), end="")
    if counts.kept == 0:
        raise nothing_kept(counts)
    shards = write_splits(units, counts.kept, recipe, tokenizer, work)
    for file in inputs:
        if not file.problem and look(file.path, file.name) != file:
            raise PrepareError(f"prepare: {file.name} changed while it was read; run again")
    n_read = counts.kept + counts.dropped.total()
    info["documents"] = {"read": n_read, "kept": counts.kept, "dropped": counts.dropped, "mended": counts.mended}
    info["bytes"] = {"read": counts.bytes_read, "kept": counts.bytes_kept}
    info["failed"] = sorted({file.name for file in unreadable} | set(counts.failed))
    fingerprint = tokenizer.fingerprint()
    return data.write_manifest(out, tokenizer.vocab_size, tokenizer.eot_id, fingerprint, shards, info)


def write_problems(unreadable: list[Input], n_units: int, work: Path) -> None:
    """out/errors.tsv: all problems in the order of the inputs, files that cannot be opened first."""
    with open(work / "out" / "errors.tsv", "w", encoding="utf-8") as out:
        out.write("path\tline\tbyte\treason\tdetail\n")
        out.writelines(f"{file.name}\t0\t0\tunreadable_file\t{file.problem}\n" for file in unreadable)
        for number in range(n_units):
            with open(unit_file(work, number, "problems"), encoding="utf-8") as f:
                shutil.copyfileobj(f, out)


# ---- data to try things out on ---------------------------------------------------------------


def make_debug_data(out_dir: str | Path) -> None:
    """A small corpus and tokenizer to try things out on, made in a second unless it is there.

    Several processes may call this at once: each makes it, one of them wins, and all go on with that.
    """
    out_dir = Path(out_dir)
    if (out_dir / "manifest.json").exists():
        return
    recipe = Recipe("text", "text", "file", val_fraction=0.1, test_fraction=0.0, strict=True, shard_tokens=2**27)
    check_replaceable(out_dir, overwrite=False)
    with scratch_dir(out_dir) as work:
        inputs = [look(write_documents(debug_texts(), work / "debug.jsonl"), "debug")]
        units = plan_units(inputs, recipe.txt_split)
        tokenizer = train(training_texts(units, recipe), vocab_size=512)
        build(inputs, units, recipe, tokenizer, work, workers=1, info={})
        try:
            (work / "out").rename(out_dir)
        except OSError:  # another process was first
            if not (out_dir / "manifest.json").exists():
                raise


def debug_texts() -> list[str]:
    """Some 0.2 MB: half of the reference of the running Python, by topic, and a little Chinese."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)[::2]] + CHINESE.split("\n\n")


CHINESE = """\
春天来了，小河边的柳树发了芽。孩子们放下书包，跑到河边去看小鱼。风很轻，水很清，天上的云慢慢地走。

北京的秋天最好看。天很高，叶子黄了，风里有一点凉。老人们坐在树下喝茶，说起从前的事，笑声很远都能听见。

学习一门语言，先要听，再要说，然后读书写字。每天学一点，时间长了，就会懂得很多。不要怕说错，说错了再说一次就好。

语言模型读了很多文字，学会猜下一个字是什么。它猜得越准，写出来的话就越像人写的话。可是像不等于对，用的人还要自己想一想。

问：一年有几个季节？答：一年有四个季节，春天、夏天、秋天和冬天。问：一天有多少小时？答：一天有二十四小时。

妈妈说：“外面下雨了，你带上伞。”我说：“好的，我马上就走。”路上的人很多，车开得很慢，到学校的时候雨已经停了。

做饭不难。先把米洗干净，加水，用小火慢慢煮；再把菜切好，放一点油和盐。二十分钟以后，就可以吃了。

山上有一座小庙，庙里有一口井。井水冬天不冷，夏天不热。走路的人累了，就在井边坐一坐，喝一口水，再往前走。
"""


# ---- the command -----------------------------------------------------------------------------


def check_config(config: dict) -> Recipe:
    """The recipe in a configuration. Raises ConfigError."""
    recipe = Recipe(**{item.name: config[item.name] for item in fields(Recipe)})
    val, test = recipe.val_fraction, recipe.test_fraction
    for key in ("input", "out_dir"):
        if not config[key]:
            raise ConfigError(f"config: {key} is empty; give --{key}=... (--help lists the keys)")
    if recipe.kind != "text":
        raise ConfigError(f"config: kind must be text, got {recipe.kind!r}")
    if recipe.txt_split not in ("file", "blank", "line"):
        raise ConfigError(f"config: txt_split must be file, blank or line, got {recipe.txt_split!r}")
    if not (0 <= val and 0 <= test and val + test < 1):
        raise ConfigError(f"config: val_fraction={val} and test_fraction={test} must leave something for train")
    for key, least in (("shard_tokens", 1), ("workers", 0)):
        if config[key] < least:
            raise ConfigError(f"config: {key} must be at least {least}, got {config[key]}")
    return recipe


def existing_tokenizer(directory: str) -> Tokenizer | None:
    """The tokenizer of tokenizer_dir, None if one has to be trained."""
    exists = any(Path(directory, name).exists() for name in ("tokenizer.json", "tokenizer.model"))
    if not directory or not exists:
        return None
    tokenizer = Tokenizer.load(directory)
    if tokenizer.eot_id < 0:
        raise PrepareError(f"prepare: the tokenizer in {directory} has no end of text, which separates documents")
    return tokenizer


def describe(inputs: list[Input], known: list[dict]) -> list[dict]:
    """The inputs as a manifest has them. known: those of an earlier run, whose digests hold while size and time do."""
    before = {(entry["path"], entry["size"], entry["mtime_ns"]): entry["sha256"] for entry in known}

    def entry(file: Input) -> dict:
        sha256 = file.problem or before.get((file.name, file.size, file.mtime_ns)) or data.file_sha256(Path(file.path))
        about = {"path": file.name, "size": file.size, "mtime_ns": file.mtime_ns, "sha256": sha256}
        return about | ({"python": platform.python_version()} if file.name == "python-docs" else {})

    with ThreadPoolExecutor() as threads:  # hashing does not hold Python's lock
        return list(threads.map(entry, inputs))


def decisive(info: dict) -> dict:
    """What decides the content of a prepared directory, {name: value}, from its manifest's info."""
    inputs = {f"input {entry['path']}": entry["sha256"] for entry in info.get("inputs", [])}
    return {"prepare.py": info.get("prepare"), "tokenizer": info.get("tokenizer")} | info.get("recipe", {}) | inputs


def difference(info: dict, old: dict) -> str:
    """Why a directory with the info `old` is not what this run would make, "" if it is."""
    if not old:
        return "nothing complete is there yet"
    now, was = decisive(info), decisive(old)
    changed = [name for name in was | now if was.get(name) != now.get(name)]
    return ", ".join(changed[:5]) or ("the order of the inputs" if list(was) != list(now) else "")


def main(config: dict) -> int:
    """Prepare out_dir, or verify a directory. The exit status is 1 if a file could not be read, or not to its end."""
    if config["verify"]:
        return verify_directory(Path(config["verify"]))
    start, recipe, out_dir = time.perf_counter(), check_config(config), Path(config["out_dir"])
    with scratch_dir(out_dir) as work:
        inputs, manifest = find_inputs(config["input"], work), complete_manifest(out_dir)
        unreadable = [f"prepare: cannot read {file.name}: {file.problem}" for file in inputs if file.problem]
        if unreadable and (recipe.strict or len(unreadable) == len(inputs)):
            raise PrepareError(unreadable[0])
        tokenizer = existing_tokenizer(config["tokenizer_dir"])
        to_train = f"trained, {config['backend']} {config['vocab_size']}"
        info = {
            "prepare": VERSION,
            "recipe": asdict(recipe),
            "tokenizer": tokenizer.fingerprint() if tokenizer else to_train,
            "inputs": describe(inputs, manifest.get("info", {}).get("inputs", [])),
        }
        why = difference(info, manifest.get("info", {}))
        if why:
            if out_dir.exists():
                print(f"prepare: {out_dir} is made anew: {why}")
            check_replaceable(out_dir, config["overwrite"])
            units = plan_units(inputs, recipe.txt_split)
            if tokenizer is None:
                tokenizer = train(training_texts(units, recipe), config["vocab_size"], config["backend"])
                if config["tokenizer_dir"]:
                    tokenizer.save(config["tokenizer_dir"])
                    info["tokenizer"] = tokenizer.fingerprint()
            workers = config["workers"] or os.cpu_count() or 1
            manifest = build(inputs, units, recipe, tokenizer, work, workers, info)
            write_config(config, str(work / "out" / "config.py"), command=f"python prepare.py {out_dir}/config.py")
            publish(work, out_dir)
            report(manifest, time.perf_counter() - start)
    failed = manifest["info"]["failed"]
    print(f"prepare: {out_dir} is {'done' if why else 'up to date'}")
    if failed:
        names = ", ".join(failed[:3])
        print(f"prepare: {len(failed)} of {len(inputs)} files could not be read, or not to the end: {names}")
    return 1 if failed else 0


def verify_directory(directory: Path) -> int:
    manifest = data.verify(directory)
    if Tokenizer.load(directory).fingerprint() != manifest["tokenizer_fingerprint"]:
        raise PrepareError(f"prepare: the tokenizer in {directory} did not make its tokens; rerun prepare.py")
    print_splits(manifest)
    print(f"prepare: {directory} is as it was written")
    return 0


def report(manifest: dict, seconds: float) -> None:
    """What was read, what became of it, and how fast."""
    info = manifest["info"]
    documents, n_bytes, dropped = info["documents"], info["bytes"], info["documents"]["dropped"]
    removed = n_bytes["read"] - n_bytes["kept"]
    n_dropped = sum(dropped.values())
    print(f"prepare: documents: {documents['read']:,} read = {documents['kept']:,} kept + {n_dropped:,} dropped")
    print(f"prepare: bytes of text: {n_bytes['read']:,} read = {n_bytes['kept']:,} kept + {removed:,} cleaned away")
    for what in ("dropped", "mended"):
        for reason, count in documents[what].items():
            print(f"prepare: {what}: {count:,} {reason}")
    print_splits(manifest)
    print(f"prepare: {seconds:.1f} s, {n_bytes['read'] / 1e6 / seconds:.1f} MB/s")


def print_splits(manifest: dict) -> None:
    print(f"{'split':<6}{'documents':>14}{'bytes':>18}{'tokens':>18}{'bytes/token':>14}")
    for split, entry in manifest["splits"].items():
        ratio = entry["bytes"] / entry["tokens"]
        print(f"{split:<6}{entry['documents']:>14,}{entry['bytes']:>18,}{entry['tokens']:>18,}{ratio:>14.2f}")


if __name__ == "__main__":
    sys.exit(main(configure(globals())))
