"""Raw files to token files: read, clean, drop copies and bad text, split, tokenize. The trainers read the result.

    python prepare.py --input='corpus/*.jsonl' --out_dir=data/x --vocab_size=32768     # trains a tokenizer of its own
    python prepare.py --input=more/,x.txt.gz --out_dir=data/y --tokenizer_dir=data/x   # uses that of data/x
    python prepare.py --input='wiki: wiki/*.json, weight=0.6; web: web/, weight=0.4, quality=web' --out_dir=data/mix
    python prepare.py --input=chat.jsonl --kind=chat --show=5                          # what is understood of 5 rows
    python prepare.py --input=chat.jsonl --kind=chat --tokenizer_dir=data/x --out_dir=data/chat    # for sft.py
    python prepare.py --input=answers.jsonl --kind=preference --pair_by=dataset --out_dir=data/pairs     # for dpo.py
    python prepare.py --verify=data/x                                                  # reads every byte again

In order: read -> clean -> quality rules -> evaluation text -> exact copies -> near copies -> split -> tokenize. What
concerns a document alone happens unit by unit in any number of processes (pipeline.py); then one pass compares
documents with each other (selection.py), units are tokenized, and one pass copies the tokens, in the order of the
input, into the splits. So the output is the same to the byte for any number of processes.

All of it is built in a hidden directory beside out_dir and renamed at the end: nothing half-made looks finished. A run
that was killed leaves that directory; the same command goes on with it. A run whose inputs, settings and tokenizer are
those of the directory that is there does nothing.
"""

import fcntl
import hashlib
import json
import math
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from stat import S_ISREG

import numpy as np

from configurator import configure, write_config
from groundup.demo.python_talks import docs_rows
from groundup.errors import UserError
from groundup.files import readers, streams
from groundup.files.splits import SPLITS
from groundup.files.text_mix import mix_texts
from groundup.text import answer_pairs, dedup
from groundup.text.decontaminate import Evals
from groundup.text.difficulty import NgramModel
from groundup.text.pipeline import (
    EXACT,
    KEPT,
    REASONS,
    UNIT_BYTES,
    Counts,
    Input,
    Recipe,
    Source,
    Unit,
    WorkerLost,
    inspect_unit,
    parse_score,
    plan_units,
    read_kept,
    run,
    tokenize_unit,
    unit_fates,
    wait_for_workers,
)
from groundup.text.selection import (
    ROW_SPLITS,
    Selection,
    Share,
    check_train,
    cut,
    nothing_kept,
    print_problems,
    select,
    shares,
    single_text,
    summarize,
    write_dropped,
    write_problems,
    write_report,
)
from groundup.text.show import show_rows
from groundup.tokens.bpe import PATTERNS
from groundup.tokens.chat_files import ConversationWriter, map_tokens
from groundup.tokens.packing import PackedData
from groundup.tokens.packing import pack as pack_documents
from groundup.tokens.row_reader import ROWS_FORMAT
from groundup.tokens.token_files import (
    FORMAT,
    ShardWriter,
    TokenData,
    file_sha256,
    read_manifest,
    token_dtype,
    verify_sha256,
    write_json,
    write_manifest,
)
from groundup.tokens.token_files import (
    verify as verify_tokens,
)
from tokenizer import FILES, SMALLEST, Tokenizer, train

# ---- config: override with a config file or --key=value; see --help --------------------------
input = ""  # files, directories, globs, comma-separated; python-docs; -: standard input; 'name: files, weight=1; ...'
out_dir = ""  # directory to make, for example data/x
tokenizer_dir = ""  # tokenizer to use; "" = train one; a directory without one gets that. kind=chat: "" = no tokens
vocab_size = 32_768  # of a tokenizer that is trained
backend = "bpe"  # of a tokenizer that is trained: bpe | sentencepiece
pattern = "gpt4"  # how such a bpe tokenizer cuts text: gpt4 | gpt2 | zh (mostly Chinese) | cl100k | qwen
kind = "text"  # what a document is: text | chat (conversations) | preference (pairs of answers)
text_key = ""  # where the text is in an object or row: 'text', 'a.b', 'title,body', 'title + "\n" + body'; "" = found
txt_split = "file"  # what a document is in plain text: file | blank (between blank lines) | line
workers = 0  # processes; 0 = one per core
show = 0  # print what is understood of the first so many rows, and stop
punctuation = False  # Chinese text: full-width marks, and none twice in a row
# what is dropped
quality = "curated"  # curated = only empty, tiny and garbled texts go; web = all rules of filters.py
rules_off = ""  # rules to leave out, comma-separated
rules_on = ""  # rules that are off otherwise: c4
min_chars = 0  # shortest document; 0 = the rule's own
max_chars = 0  # longest document; 0 = the rule's own
keep = ""  # a function of yours, 'file.py:function', that takes a text and tells whether to keep it
words = ""  # file of words, one per line: texts full of them go
question_min_chars = 0  # chat, preference: shortest first question
question_max_chars = 0  # chat, preference: longest first question; 0 = any
score = ""  # ranges of the rows' own numbers, such as 'bpb=0.3..1.5,ifd=5%..95%'
exact = True  # drop texts that are there already, but for case and white space
near = 0.8  # drop texts as similar as this to one that is there already; 0 = off
near_bands = 0  # of signatures; 0 = from `near`
near_rows = 0  # numbers per band; 0 = from `near`
near_engine = "numpy"  # numpy | datasketch (slow, the same result)
decontaminate = ""  # evaluation files whose questions must not be learnt: .csv of MMLU, CMMLU, C-Eval; .jsonl
decontaminate_action = "drop"  # drop the document | cut the place out of it
# what is made
val_fraction = 0.01  # of the documents; of the characters if there is only one document
test_fraction = 0.0  # likewise
hold_out = 0.0  # chat: of the first questions this share goes to held_out.jsonl, for preferences; tuning never sees it
prompts_from = ""  # preference: keep only pairs to a first question of these conversations, such as held_out.jsonl
pair_by = ""  # preference: make pairs of answers (answer_pairs.py): dataset | reward; "" = the rows are pairs
pair_margin = 0.0  # pair_by=reward: least difference of the rewards; 0 = any
length_within = 0.0  # pair_by: the longer answer has at most this share more characters, such as 0.2; 0 = any
fold = ""  # 'i/k': the i-th of k parts is val, the rest train (cross-validation), instead of val_fraction
order = "input"  # of documents: input | hash (mixed) | length, unigram, bigram, trigram, score (easy ones first)
pack = 0  # also rows of this many tokens that begin with a document, for pretrain.py --pack=True
shard_tokens = 134_217_728  # tokens per file
# what is not in order
strict = False  # stop at the first record that cannot be read, instead of counting it and going on
max_bad_fraction = 1.0  # exit status 1 if more of the records than this cannot be read
verify = ""  # check this prepared directory and exit
overwrite = False  # replace an out_dir that lacks the manifest.json by which prepare.py knows its own

VERSION = 6  # of what is made of an input; a directory made by another version is made anew
TOKENIZER_BYTES = 2**27  # of text that a tokenizer is trained on; more changes little and takes minutes
PAIR_KEYS = ("pair_by", "pair_margin", "length_within")
ORDERS = ("input", "hash", "length", "unigram", "bigram", "trigram", "score")


# ---- inputs ----------------------------------------------------------------------------------

NAMED = re.compile(r"\s*([\w-]+)\s*:\s+(.*)", re.DOTALL)
OWN_KEYS = ("weight", "text_key", "txt_split", "quality", "rules_off", "rules_on", "min_chars", "max_chars")


def parse_sources(config: dict) -> tuple[Source, ...]:
    """The sources that `input` names, with their settings, else one without a name. Raises ConfigError."""
    general = {key: config[key] for key in OWN_KEYS if key != "weight"}
    parts = [part for part in config["input"].split(";") if part.strip()]
    if not any(NAMED.fullmatch(part) for part in parts):
        return (Source(input=config["input"], **general),)
    sources = []
    for part in parts:
        named = NAMED.fullmatch(part)
        if not named:
            raise UserError(f"config: input: {part.strip()!r} is not of the form 'name: files, key=value, ...'")
        items = [item.strip() for item in named[2].split(",") if item.strip()]
        own = dict(item.split("=", 1) for item in items if item.partition("=")[0].strip() in OWN_KEYS)
        paths = [item for item in items if item.partition("=")[0].strip() not in OWN_KEYS]
        if "-" in paths and any("-" in source.input.split(",") for source in sources):
            raise UserError("config: input: standard input (-) can be read once only")
        if not paths:
            raise UserError(f"config: input: source {named[1]} names no files")
        sources.append(make_source(named[1], ",".join(paths), general, own))
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        raise UserError(f"config: input: two sources have the same name: {', '.join(names)}")
    if len({source.weight > 0 for source in sources}) > 1:
        raise UserError("config: input: give a weight to every source, or to none")
    return tuple(sources)


def make_source(name: str, paths: str, general: dict, own: dict[str, str]) -> Source:
    settings: dict = dict(general)
    for key, text in own.items():
        kind = {"weight": float, "min_chars": int, "max_chars": int}.get(key.strip(), str)
        try:
            settings[key.strip()] = kind(text.strip())
        except ValueError:
            raise UserError(f"config: input: {key}={text} of source {name} is not a number") from None
    for key in ("rules_off", "rules_on"):
        settings[key] = settings[key].replace("+", ",")  # a comma would end the setting
    for key in ("weight", "min_chars", "max_chars"):
        if not 0 <= settings.get(key, 0) < math.inf:
            raise UserError(f"config: input: {key}={settings[key]} of source {name} must be 0 or more")
    return Source(name, paths, **settings)


def find_inputs(sources: tuple[Source, ...], out_dir: Path, work: Path, kind: str = "text") -> list[Input]:
    """The files of all sources, less those of `out_dir`, each once. What is not a file becomes one in `work`. Raises
    DataError if nothing matches."""
    found: dict[str, Input] = {}
    for number, source in enumerate(sources):
        n_before = len(found)
        for name in filter(None, (part.strip() for part in source.input.split(","))):
            if name == "python-docs":
                files = [made_file(write_documents(docs_rows(kind), work / "python-docs.jsonl"), name, number)]
            elif name == "-":
                files = [made_file(spool_stdin(work), name, number)]
            else:
                files = [look(path, path, number) for path in readers.find_files(name) if not is_within(path, out_dir)]
            for file in files:
                if found.setdefault(file.path, file).source != number:
                    print(f"prepare: {file.name} is in an earlier source already, and is left out of {source.name}")
        if len(found) == n_before and source.name:
            print(f"prepare: warning: source {source.name} has no files of its own")
    return list(found.values())


def is_within(path: str, directory: Path) -> bool:
    return bool(directory.name) and directory.resolve() in Path(path).resolve().parents


def look(path: str | Path, name: str, source: int) -> Input:
    try:
        stat = os.stat(path)
        if not S_ISREG(stat.st_mode):
            return Input(str(path), name, 0, "", source, problem="not a regular file")
        open(path, "rb").close()
    except OSError as error:
        return Input(str(path), name, 0, "", source, problem=error.strerror)
    return Input(str(path), name, stat.st_size, str(stat.st_mtime_ns), source)


def made_file(path: Path, name: str, source: int) -> Input:
    """As `look`, of a file that each run makes anew: its content tells whether it changed."""
    return look(path, name, source)._replace(stamp=file_sha256(path))


def write_documents(texts: Iterable[str | dict], path: Path) -> Path:
    with open(path, "w", encoding="utf-8") as f:
        for text in texts:
            f.write(json.dumps(text, ensure_ascii=False) + "\n")
    return path


def spool_stdin(work: Path) -> Path:
    """Standard input as a file, which can be read twice and in parts. Its suffix says whether it is JSON."""
    path = work / "stdin.txt"
    with open(path, "wb") as f:
        shutil.copyfileobj(sys.stdin.buffer, f, 2**20)
    with streams.open_stream(str(path)) as stream:
        kind = readers.container("-", stream.peek(), "file")
    return path.rename(work / "stdin.json") if kind in ("array", "values", "jsonl") else path


# ---- tokens ----------------------------------------------------------------------------------


def training_texts(share: Share, chosen: Selection, work: Path) -> Iterator[str]:
    """What a tokenizer learns from: kept documents of train, all or, by their hash, about TOKENIZER_BYTES of them."""
    own = share.rows[share.splits == 0]
    size = int(chosen.rows["n_bytes"][own].sum())
    if size > TOKENIZER_BYTES:
        chance = chosen.rows["key"][own, 1] / 2.0**64
        own = own[chance < TOKENIZER_BYTES / size]
    taken = np.zeros(len(chosen.rows), bool)
    taken[own] = True
    for unit in share.units:
        wanted = taken[chosen.starts[unit.number] : chosen.starts[unit.number + 1]]
        yield from (text for _, text in read_kept(unit, work, np.where(wanted, KEPT, EXACT)))


def train_tokenizer(parts: list[Share], chosen: Selection, single: str | None, recipe: Recipe, config: dict,
                    work: Path) -> Tokenizer:  # fmt: skip
    """A tokenizer learnt from the train split. A run that was killed after this finds it again."""
    settings = repr((config["vocab_size"], config["backend"], config["pattern"], recipe.settings(), VERSION)).encode()
    key = hashlib.sha256(settings + chosen.fates.tobytes() + chosen.rows["position"].tobytes()).hexdigest()
    kept = work / "tokenizer"
    if (kept / "key").exists() and (kept / "key").read_text(encoding="utf-8") == key:
        return Tokenizer.load(kept)
    if single is not None:
        texts = iter([cut(single, recipe)[0]])
    elif len(parts) == 1:
        texts = training_texts(parts[0], chosen, work)
    else:
        weights = [part.source.weight or float(chosen.rows["n_bytes"][part.rows].sum()) for part in parts]
        sources = [(training_texts(part, chosen, work), weight) for part, weight in zip(parts, weights, strict=True)]
        texts = mix_texts([source for source in sources if source[1] > 0], TOKENIZER_BYTES)
    tokenizer = train(texts, config["vocab_size"], config["backend"], config["pattern"])
    (kept / "key").unlink(missing_ok=True)  # it vouches for the tokenizer that is about to be replaced
    tokenizer.save(kept)
    (kept / "key").write_text(key, encoding="utf-8")
    return tokenizer


class Tokens:
    """The ids of a share's documents, on disk."""

    OPEN = 64  # files at once: a system allows a process some 1,000

    def __init__(self, share: Share, dtype: np.dtype, work: Path) -> None:
        self.share, self.dtype, self.work = share, dtype, work
        lengths = [np.fromfile(unit.file(work, "lengths"), "<i8") for unit in share.units]
        empty = np.zeros(0, np.int64)
        self.unit = np.repeat(np.arange(len(lengths)), [len(n) for n in lengths])  # (n,) index in share.units
        self.begin = np.concatenate([empty, *(np.cumsum(n) - n for n in lengths)])  # (n,) in its unit's ids
        self.length = np.concatenate([empty, *lengths])  # (n,)
        self.mapped: dict[int, np.ndarray] = {}

    def ids(self, i: int) -> np.ndarray:
        unit, begin, length = int(self.unit[i]), int(self.begin[i]), int(self.length[i])
        if unit not in self.mapped and length:
            if len(self.mapped) == self.OPEN:
                del self.mapped[next(iter(self.mapped))]
            self.mapped[unit] = np.memmap(self.share.units[unit].file(self.work, "tokens"), self.dtype, "r")
        return self.mapped[unit][begin : begin + length] if length else np.zeros(0, self.dtype)


def document_order(share: Share, tokens: Tokens, chosen: Selection, recipe: Recipe) -> np.ndarray:
    """The order in which a share's documents are written, (n,) int64."""
    if recipe.order == "input":
        return np.arange(len(share.rows))
    if recipe.order == "hash":
        return np.argsort(chosen.rows["position"][share.rows], kind="stable")
    if recipe.order == "length":
        return np.argsort(tokens.length, kind="stable")
    if recipe.order == "score":
        return np.argsort(chosen.rows["score"][share.rows], kind="stable")
    model = NgramModel({"unigram": 1, "bigram": 2, "trigram": 3}[recipe.order])
    for i in np.flatnonzero(share.splits == 0).tolist():
        model.add(tokens.ids(i))
    added = (share.splits == 0).tolist()
    return np.argsort([model.difficulty(tokens.ids(i), added[i]) for i in range(len(added))], kind="stable")


def write_splits(parts: list[Share], chosen: Selection, recipe: Recipe, tokenizer: Tokenizer, work: Path) -> list[dict]:
    """Copy the tokens into the shards of their sources and splits; returns the shards for the manifest."""
    dtype, shards = token_dtype(tokenizer.vocab_size), []
    for part in parts:
        tokens = Tokens(part, dtype, work)
        assert len(tokens.length) == len(part.rows), f"{len(tokens.length)=} {len(part.rows)=}"
        order = document_order(part, tokens, chosen, recipe)
        n_bytes = chosen.rows["n_bytes"][part.rows]
        for number, split in enumerate(SPLITS):
            writer = new_writer(split, recipe, tokenizer, work, part.source.name)
            for i in order[part.splits[order] == number].tolist():
                writer.add(tokens.ids(i), int(n_bytes[i]))
            shards += writer.close()
    return shards


def new_writer(split: str, recipe: Recipe, tokenizer: Tokenizer, work: Path, name: str) -> ShardWriter:
    return ShardWriter(work / "out", split, tokenizer.vocab_size, tokenizer.eot_id, recipe.shard_tokens, name)


def write_single(text: str, recipe: Recipe, tokenizer: Tokenizer, work: Path) -> list[dict]:
    print("prepare: there is only one document; it is cut into the splits")
    shards = []
    for split, part in zip(SPLITS, cut(text, recipe), strict=True):
        writer = new_writer(split, recipe, tokenizer, work, recipe.sources[0].name)
        if part:
            writer.add(tokenizer.encode_array(part), len(part.encode()))
        shards += writer.close()
    return shards


def write_jsonl(parts: list[Share], chosen: Selection, work: Path) -> dict:
    """Conversations or pairs as train.jsonl, val.jsonl, ...; {split: what the manifest says of it}."""
    splits = {}
    names = [part.source.name for part in parts]
    for number, split in enumerate(ROW_SPLITS):
        path, n_rows = work / "out" / f"{split}.jsonl", 0
        with open(path, "w", encoding="utf-8") as f:
            for unit, own in units_of_split(number, parts, chosen):
                name = names[unit.source]
                for _, row in read_kept(unit, work, np.where(own, KEPT, EXACT)):
                    f.write((f'{row[:-1]}, "source": {json.dumps(name)}}}' if name else row) + "\n")
                    n_rows += 1
        if n_rows:
            sha256 = file_sha256(path)
            splits[split] = {"file": path.name, "rows": n_rows, "bytes": path.stat().st_size, "sha256": sha256}
        else:
            path.unlink()
    return splits


def units_of_split(number: int, parts: list[Share], chosen: Selection) -> Iterator[tuple[Unit, np.ndarray]]:
    """The units in order, each with (n,) bool: which of its documents are in that split."""
    inside = np.zeros(len(chosen.rows), bool)
    for part in parts:
        inside[part.rows] = part.splits == number
    for unit in (unit for part in parts for unit in part.units):
        yield unit, inside[chosen.starts[unit.number] : chosen.starts[unit.number + 1]]


def write_conversations(splits: dict, parts: list[Share], chosen: Selection, tokenizer: Tokenizer, work: Path) -> None:
    """The ids and masks of the rows of write_jsonl, in their order, but of those held out, which nobody learns; the
    manifest's entries of `splits` learn of it."""
    dtype = token_dtype(tokenizer.vocab_size)
    for number, split in enumerate(SPLITS):
        if split not in splits:
            continue
        writer = ConversationWriter(work / "out", split, dtype)
        for unit, own in units_of_split(number, parts, chosen):
            kept = unit_fates(unit, work) == KEPT
            ends = np.cumsum(np.fromfile(unit.file(work, "lengths"), "<i8"))
            tokens = np.fromfile(unit.file(work, "tokens"), dtype)
            mask = np.fromfile(unit.file(work, "mask"), np.uint8)
            for i in np.flatnonzero(own[kept]).tolist():
                place = slice(int(ends[i - 1]) if i else 0, int(ends[i]))
                writer.add(tokens[place], mask[place])
        splits[split]["tokens"] = writer.close()


# ---- the directory ---------------------------------------------------------------------------

OWN = re.compile(
    r"(train|val|test)(_pack\d+)?_\d{5}(\.\w+)?\.npy|train_pack\d+(\.len\.npy|\.json)|(train|val|test|held_out)\.jsonl"
    r"|manifest\.json|config\.py|errors\.tsv|dropped\.tsv|report\.md|" + "|".join(FILES)
)


@contextmanager
def work_dir(out_dir: Path, wait: bool = False) -> Iterator[Path]:
    """The hidden directory beside `out_dir` in which it is made, locked. It is removed in the end, also after an error
    of the input or the settings; what a run did that was killed or lost a worker stays, for the next one to go on with.
    Raises PrepareError if another run holds it."""
    work = out_dir.absolute().parent / f".{out_dir.absolute().name}.work.tmp"
    handle = lock(work, wait, out_dir)
    try:
        if (work / "old").exists() and not out_dir.exists():
            (work / "old").rename(out_dir)  # killed between the two renames of `publish`
        try:
            yield work
        except ValueError as error:
            done = sum(path.stat().st_size for path in (work / "units").glob("*.docs"))
            of_input = isinstance(error, UserError) and not isinstance(error, WorkerLost)
            if of_input and done < UNIT_BYTES:  # little is lost
                remove(work)
            raise
        remove(work)
    finally:
        os.close(handle)


def remove(work: Path) -> None:
    """Remove `work`. What another run would go on with is first put aside, by one rename each: after a kill in the
    middle, no file vouches for another that is gone."""
    aside = work / "removed"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for name in ("units", "tokenizer", "old"):
        if (work / name).exists():
            (work / name).rename(aside / name)
    shutil.rmtree(work, ignore_errors=True)


def lock(work: Path, wait: bool, out_dir: Path) -> int:
    """A handle that locks `work`, made if it is not there. Raises PrepareError if another process has it."""
    while True:
        (work / "units").mkdir(parents=True, exist_ok=True)
        handle = os.open(work, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.path.exists(work) and os.stat(work).st_ino == os.fstat(handle).st_ino:
                (work / "units").mkdir(exist_ok=True)
                wait_for_workers(work)
                return handle
        except BlockingIOError:
            os.close(handle)
            raise UserError(f"prepare: another run is making {out_dir}; wait for it, or stop it") from None
        os.close(handle)  # of a directory that the run before has removed meanwhile


def complete_manifest(out_dir: Path) -> dict:
    """manifest.json of a directory whose files are all there, {} of any other."""
    try:
        manifest = json.loads((out_dir / "manifest.json").read_text(encoding="utf-8"))
        if manifest["format"] == ROWS_FORMAT:
            files = {entry["file"]: entry["bytes"] for entry in manifest["splits"].values()}
            complete = all((out_dir / name).stat().st_size == n for name, n in files.items())
            return manifest if complete and chat_tokens_fit(out_dir, manifest) else {}
        for split in read_manifest(out_dir)["splits"]:
            TokenData(out_dir, split)  # compares the sizes
        if (pack := manifest["info"].get("recipe", {}).get("pack")) and "train" in manifest["splits"]:
            for name in manifest.get("sources", {"": {}}):
                PackedData(out_dir, pack, name)
        same_tokenizer = Tokenizer.load(out_dir).fingerprint() == manifest["tokenizer_fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):  # DataError and TokenizerError are ValueErrors
        return {}
    return manifest if same_tokenizer else {}


def chat_tokens_fit(out_dir: Path, manifest: dict) -> bool:
    """Whether the token files of conversations have their sizes, and the tokenizer is theirs. Raises DataError."""
    if "tokenizer_fingerprint" not in manifest:
        return True
    for split, entry in manifest["splits"].items():
        if split in SPLITS:
            map_tokens(out_dir, entry["tokens"], manifest["dtype"])
    return Tokenizer.load(out_dir).fingerprint() == manifest["tokenizer_fingerprint"]


def check_replaceable(out_dir: Path, overwrite: bool) -> None:
    """Raise PrepareError if `out_dir` is not one of ours, whatever its state. Files of others are never removed."""
    if not out_dir.exists():
        return
    if not out_dir.is_dir():
        raise UserError(f"prepare: out_dir={out_dir} is a file; choose another")
    paths = sorted(path.relative_to(out_dir) for path in out_dir.rglob("*") if not path.is_dir())
    others = [path for path in paths if not OWN.fullmatch(path.name) or len(path.parts) > 2]
    empty = [path.name for path in out_dir.iterdir() if path.is_dir() and not any(path.iterdir())]
    if others or empty:
        what = str(others[0]) if others else empty[0]
        raise UserError(f"prepare: {out_dir} holds {what}, which is not ours; move it, or use another out_dir")
    if paths and not overwrite:
        try:
            known = json.loads((out_dir / "manifest.json").read_text(encoding="utf-8"))["format"]
        except (OSError, ValueError, KeyError, TypeError):
            known = ""
        if known not in (FORMAT, ROWS_FORMAT):
            hint = "overwrite=True replaces it"
            raise UserError(f"prepare: {out_dir} holds {paths[0]}, but no manifest.json of ours; {hint}")


def publish(work: Path, out_dir: Path) -> None:
    """Rename work/out to `out_dir`, and what is there out of the way. After a kill in between, neither is there."""
    shutil.rmtree(work / "old", ignore_errors=True)
    if out_dir.exists():
        out_dir.rename(work / "old")
    (work / "out").rename(out_dir)


# ---- all of it -------------------------------------------------------------------------------


def build(
    inputs: list[Input], recipe: Recipe, tokenizer: Tokenizer | None, work: Path, config: dict, info: dict,
    lost: Counts | None = None,
) -> dict:  # fmt: skip
    """Make work/out, all that out_dir will hold, and return its manifest. info: what else the manifest is to hold.
    lost: what could not be read before."""
    out, workers = work / "out", config["workers"] or os.cpu_count() or 1
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    if evals := load_evals(recipe, work):
        info["decontaminate"] = {"items": evals.n_items, "unprotected": len(evals.unprotected)}
    units = plan_units(inputs, recipe)
    inspect = partial(inspect_unit, recipe=recipe, version=VERSION, work=work)
    counts = sum(run(inspect, units, workers, "read", work), lost or Counts())
    unreadable, answers = [file for file in inputs if file.problem], info.get("answers", [])
    print_problems(unreadable, counts)
    write_problems(unreadable, [work / f"pairs_{k}.jsonl.problems" for k in range(len(answers))], units, work)
    chosen = select(units, recipe, work) if units else None
    if chosen is None or not (chosen.fates == KEPT).any():
        raise nothing_kept(counts, chosen)
    single = single_text(chosen, units, counts, work) if recipe.kind == "text" else None
    parts = shares(chosen, units, recipe)
    check_train(parts)
    summarize(info, inputs, counts, chosen, parts, recipe)
    if recipe.kind == "text":
        if tokenizer is None:
            tokenizer = train_tokenizer(parts, chosen, single, recipe, config, work)
            if config["tokenizer_dir"]:
                tokenizer.save(config["tokenizer_dir"])
                info["tokenizer"] = tokenizer.fingerprint()
        if single is None:
            tokenize(units, recipe, tokenizer, workers, work)
            shards = write_splits(parts, chosen, recipe, tokenizer, work)
        else:
            tokenizer.save(out)
            shards = write_single(single, recipe, tokenizer, work)
    elif tokenizer:
        tokenize(units, recipe, tokenizer, workers, work)
    check_unchanged([file for file in inputs if not file.problem and not Path(file.path).is_relative_to(work)])
    write_dropped(chosen, units, out)
    write_report(info, answer_pairs.describe(answers), chosen, units, work)
    if recipe.kind != "text":
        splits = write_jsonl(parts, chosen, work)
        manifest = {"format": ROWS_FORMAT, "kind": recipe.kind, "splits": splits, "info": info}
        if tokenizer:
            write_conversations(splits, parts, chosen, tokenizer, work)
            manifest |= {"tokenizer_fingerprint": tokenizer.fingerprint(), "vocab_size": tokenizer.vocab_size}
            manifest |= {"dtype": token_dtype(tokenizer.vocab_size).name}
        write_json(out / "manifest.json", manifest)
        return manifest
    weights = {source.name: source.weight for source in recipe.sources if source.weight}
    ids = tokenizer.vocab_size, tokenizer.eot_id, tokenizer.fingerprint()
    manifest = write_manifest(out, *ids, shards, info, weights)
    if config["pack"]:
        pack_documents(out, config["pack"])
    return manifest


def tokenize(units: list[Unit], recipe: Recipe, tokenizer: Tokenizer, workers: int, work: Path) -> None:
    """The ids of all units, into their files."""
    tokenizer.save(work / "out")  # the workers read it there
    dtype, fingerprint = token_dtype(tokenizer.vocab_size).str, tokenizer.fingerprint()
    function = partial(tokenize_unit, dtype=dtype, fingerprint=fingerprint, work=work, chat=recipe.kind == "chat")
    run(function, units, workers, "tokenize", work)


def load_evals(recipe: Recipe, work: Path) -> Evals | None:
    """What must not be learnt, if anything; also put where the workers find it."""
    if not recipe.decontaminate:
        return None
    evals = Evals.from_files(readers.find_files(recipe.decontaminate))
    evals.save(work / "evals.npz")
    return evals


def check_unchanged(inputs: list[Input]) -> None:
    for file in inputs:
        if look(file.path, file.name, file.source) != file:
            raise UserError(f"prepare: {file.name} changed while it was read; run again")


# ---- the command -----------------------------------------------------------------------------


def check_config(config: dict) -> Recipe:
    """The recipe in a configuration. Raises ConfigError."""
    for key in ("input", "out_dir"):
        if not config[key] and not (key == "out_dir" and config["show"]):
            raise UserError(f"config: {key} is empty; give --{key}=... (--help lists the keys)")
    sources = parse_sources(config)
    choices = {"kind": ("text", "chat", "preference"), "near_engine": ("numpy", "datasketch"), "order": ORDERS}
    choices |= {"decontaminate_action": ("drop", "cut"), "pattern": tuple(PATTERNS)}
    choices |= {"pair_by": ("", "dataset", "reward")}
    for key, allowed in choices.items():
        if config[key] not in allowed:
            raise UserError(f"config: {key} must be one of {', '.join(filter(None, allowed))}, got {config[key]!r}")
    for source in sources:
        for key, allowed in (("txt_split", ("file", "blank", "line")), ("quality", ("curated", "web"))):
            if getattr(source, key) not in allowed:
                raise UserError(f"config: {key} must be one of {', '.join(allowed)}, got {getattr(source, key)!r}")
    val, test = config["val_fraction"], config["test_fraction"]
    if not (0 <= val and 0 <= test and val + test < 1):
        raise UserError(f"config: val_fraction={val} and test_fraction={test} must leave something for train")
    least = {"shard_tokens": 1, "workers": 0, "min_chars": 0, "max_chars": 0, "question_min_chars": 0, "pack": 0}
    for key, minimum in (least | {"question_max_chars": 0, "near_bands": 0, "near_rows": 0, "show": 0,
                              "pair_margin": 0, "length_within": 0}).items():  # fmt: skip
        if config[key] < minimum:
            raise UserError(f"config: {key} must be at least {minimum}, got {config[key]}")
    if not 0 <= config["hold_out"] < 1:
        raise UserError(f"config: hold_out must be from 0 to below 1, got {config['hold_out']}")
    if not 0 <= config["near"] <= 1:
        raise UserError(f"config: near must be from 0 (off) to 1, got {config['near']}")
    fold = re.fullmatch(r"(\d+)/(\d+)", config["fold"])
    if config["fold"] and not (fold and 1 <= int(fold[1]) <= int(fold[2]) and int(fold[2]) > 1):
        raise UserError(f"config: fold={config['fold']!r} is not i/k with 1 <= i <= k, such as 2/5")
    if config["vocab_size"] < SMALLEST:
        what = f"vocab_size={config['vocab_size']}"
        raise UserError(f"config: {what} cannot hold bytes and specials; use >= {SMALLEST}")
    check_kind(config)
    if config["kind"] != "text" and any(source.weight for source in sources):
        raise UserError(f"config: input: weight has no effect with kind={config['kind']}; weigh when you train")
    if config["order"] == "score" and not config["score"]:
        raise UserError("config: order='score' needs score, which names the number, such as score='bpb=..'")
    return make_recipe(config, sources)


def check_kind(config: dict) -> None:
    """Raise ConfigError for a setting that would do nothing."""
    for_text = {"text_key": "", "order": "input", "pack": 0, "decontaminate_action": "drop"}
    for_pairs = {"pair_by": "", "pair_margin": 0, "length_within": 0, "prompts_from": ""}
    idle = {"question_min_chars": 0, "question_max_chars": 0} if config["kind"] == "text" else for_text
    idle |= {} if config["kind"] == "chat" else {"hold_out": 0}
    idle |= {} if config["kind"] == "preference" else for_pairs
    for key, default in idle.items():
        if config[key] != default:
            raise UserError(f"config: {key}={config[key]} has no effect with kind={config['kind']}; leave it out")
    for key, by in (("pair_margin", ("reward",)), ("length_within", ("dataset", "reward"))):
        if config[key] and config["pair_by"] not in by:
            raise UserError(f"config: {key}={config[key]} has no effect without pair_by={' or '.join(by)}")


def make_recipe(config: dict, sources: tuple[Source, ...]) -> Recipe:
    own = {item.name: config[item.name] for item in fields(Recipe) if item.name in config}
    recipe = Recipe(**(own | {"sources": sources, "aids": aids(config)}))
    ranges = parse_score(recipe.score)
    if any(bound.endswith("%") for _, *bounds in ranges[1:] for bound in bounds):
        raise UserError("config: score: only the first key may have bounds in per cent")
    if recipe.near and not (recipe.near_bands and recipe.near_rows):
        bands, rows = dedup.bands_for(recipe.near)
        recipe = replace(recipe, near_bands=recipe.near_bands or bands, near_rows=recipe.near_rows or rows)
    return recipe


def aids(config: dict) -> str:
    """sha256 of the files that settings name: the result depends on what is in them. Raises ConfigError."""
    files = [config["keep"].rpartition(":")[0] if config["keep"] else "", config["words"]]
    for key in ("decontaminate", "prompts_from"):
        files += readers.find_files(config[key]) if config[key] else []
    try:
        return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files if file)).hexdigest()
    except OSError as error:
        raise UserError(f"config: cannot read {error.filename}: {error.strerror}") from None


def existing_tokenizer(directory: str, kind: str) -> Tokenizer | None:
    """The tokenizer of tokenizer_dir; None if one has to be trained, or is not wanted. Raises PrepareError."""
    exists = any(Path(directory, name).exists() for name in ("tokenizer.json", "tokenizer.model"))
    if not directory or kind == "preference" or (kind == "text" and not exists):
        return None
    tokenizer = Tokenizer.load(directory)
    if kind == "chat" and min(tokenizer.im_start_id, tokenizer.im_end_id) < 0:
        raise UserError(f"prepare: the tokenizer in {directory} has no <|im_start|> and <|im_end|> to mark turns")
    if tokenizer.eot_id < 0 and kind == "text":
        raise UserError(f"prepare: the tokenizer in {directory} has no end of text, which separates documents")
    return tokenizer


def describe(inputs: list[Input], known: list[dict]) -> list[dict]:
    """The inputs as a manifest has them. known: those of an earlier run, whose digests hold while size and time do."""
    before = {(entry["path"], entry["size"], entry["stamp"]): entry["sha256"] for entry in known}

    def entry(file: Input) -> dict:
        sha256 = file.problem or before.get((file.name, file.size, file.stamp)) or file_sha256(Path(file.path))
        about = {"path": file.name, "source": file.source, "size": file.size, "stamp": file.stamp, "sha256": sha256}
        return about | ({"python": platform.python_version()} if file.name == "python-docs" else {})

    with ThreadPoolExecutor() as threads:  # hashing does not hold Python's lock
        blocks = [inputs[k : k + 256] for k in range(0, len(inputs), 256)]  # 100,000 small tasks would need 0.2 GB
        return [about for block in threads.map(lambda block: list(map(entry, block)), blocks) for about in block]


def decisive(info: dict) -> dict:
    """What decides the content of a prepared directory, {name: value}, from its manifest's info."""
    inputs = {f"input {entry['path']}": [entry["source"], entry["sha256"]] for entry in info.get("inputs", [])}
    whole = {key: info.get(key) for key in ("tokenizer", "answers")}
    return whole | info.get("recipe", {}) | inputs


def difference(info: dict, old: dict) -> str:
    """Why a directory with the info `old` is not what this run would make, "" if it is."""
    if not old:
        return "nothing complete is there yet"
    if old.get("prepare") != VERSION:
        return "prepare.py"
    now, was = decisive(info), decisive(old)
    changed = [name for name in was | now if was.get(name) != now.get(name)]
    return ", ".join(changed[:5]) or ("the order of the inputs" if list(was) != list(now) else "")


def main(config: dict) -> int:
    """Prepare out_dir, or verify or show. The exit status is 1 if a file could not be read, or not to its end."""
    if config["verify"]:
        return verify_directory(Path(config["verify"]))
    start, recipe, out_dir = time.perf_counter(), check_config(config), Path(config["out_dir"])
    if config["show"]:
        with tempfile.TemporaryDirectory() as folder:
            load_evals(recipe, Path(folder))
            sources, names = readable_twice(recipe, Path(folder), config)
            recipe = replace(recipe, sources=sources)
            return show_rows(recipe, config["show"], config["tokenizer_dir"], Path(folder), names)
    with work_dir(out_dir) as work:
        inputs, manifest = find_inputs(recipe.sources, out_dir, work, recipe.kind), complete_manifest(out_dir)
        unreadable = [f"prepare: cannot read {file.name}: {file.problem}" for file in inputs if file.problem]
        if unreadable and (recipe.strict or len(unreadable) == len(inputs)):
            raise UserError(unreadable[0])
        answers, lost = [], Counts()
        if config["pair_by"]:
            inputs, answers, lost = answer_pairs.replace_answers(inputs, config, work)
        tokenizer = existing_tokenizer(config["tokenizer_dir"], recipe.kind)
        to_train = f"trained, {config['backend']} {config['vocab_size']} {config['pattern']}"
        to_train = to_train if recipe.kind == "text" else "none"
        before = manifest.get("info", {})
        info = {
            "prepare": VERSION,
            "recipe": recipe.settings() | {key: config[key] for key in ("pack", *PAIR_KEYS)},
            "tokenizer": tokenizer.fingerprint() if tokenizer else to_train,
            "inputs": describe(inputs, before.get("inputs", []) if before.get("prepare") == VERSION else []),
        } | ({"answers": answers} if answers else {})
        why = difference(info, before)
        if why:
            if out_dir.exists():
                print(f"prepare: {out_dir} is made anew: {why}")
            check_replaceable(out_dir, config["overwrite"])
            manifest = build(inputs, recipe, tokenizer, work, config, info, lost)
            write_config(config, str(work / "out" / "config.py"), command=f"python prepare.py {out_dir}/config.py")
            publish(work, out_dir)
            report(manifest, time.perf_counter() - start)
    print(f"prepare: {out_dir} is {'done' if why else 'up to date'}")
    return exit_status(manifest["info"], len(inputs), config["max_bad_fraction"])


def exit_status(info: dict, n_inputs: int, max_bad_fraction: float) -> int:
    failed, dropped = info["failed"], info["documents"]["dropped"]
    if failed:
        names = ", ".join(failed[:3])
        print(f"prepare: {len(failed)} of {n_inputs} files could not be read, or not to the end: {names}")
    bad = sum(n for reason, n in dropped.items() if reason not in REASONS and reason != "empty")
    n_read = info["documents"]["read"]
    for answers in info.get("answers", []):  # a good line of answers counts as one, however many pairs it gives
        n_read += answers["lines"] - answers["lines_bad"] - answers["pairs"]
    too_many = bad > max_bad_fraction * n_read
    if too_many:
        print(f"prepare: {bad} of {n_read} records could not be read; {max_bad_fraction=}")
    return 1 if failed or too_many else 0


def readable_twice(recipe: Recipe, folder: Path, config: dict) -> tuple[tuple[Source, ...], dict[str, str]]:
    """The sources with a file in the place of standard input, and of answers, which become pairs; {path: what the user
    calls it} of these files."""
    sources, names = [], {}
    if config["pair_by"]:
        inputs = find_inputs(recipe.sources, Path(), folder, recipe.kind)
        pairs, _, _ = answer_pairs.replace_answers(inputs, config, folder)
        names = {file.path: file.name for file in pairs}
    for number, source in enumerate(recipe.sources):
        paths = [name.strip() for name in source.input.split(",")]
        if config["pair_by"]:
            paths = [file.path for file in pairs if file.source == number]
        elif "-" in paths:
            path = str(spool_stdin(folder))
            paths, names = [path if name == "-" else name for name in paths], {path: "-"}
        sources.append(replace(source, input=",".join(paths)))
    return tuple(sources), names


def verify_directory(directory: Path) -> int:
    if is_rows(directory):
        return verify_rows(directory)
    manifest = verify_tokens(directory)
    if Tokenizer.load(directory).fingerprint() != manifest["tokenizer_fingerprint"]:
        raise UserError(f"prepare: the tokenizer in {directory} did not make its tokens; rerun prepare.py")
    print_splits(manifest)
    print(f"prepare: {directory} is as it was written")
    return 0


def is_rows(directory: Path) -> bool:
    """Whether it holds conversations or pairs."""
    try:
        return json.loads((directory / "manifest.json").read_text(encoding="utf-8"))["format"] == ROWS_FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        return False


def verify_rows(directory: Path) -> int:
    manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    for entry in manifest["splits"].values():
        for name, sha256 in ({entry["file"]: entry["sha256"]} | entry.get("tokens", {}).get("sha256", {})).items():
            verify_sha256(directory / name, sha256)
    if not chat_tokens_fit(directory, manifest):
        raise UserError(f"prepare: the tokenizer in {directory} did not make its tokens; rerun prepare.py")
    print_splits(manifest)
    print(f"prepare: {directory} is as it was written")
    return 0


def report(manifest: dict, seconds: float) -> None:
    """What was read, what became of it, and how fast."""
    info = manifest["info"]
    documents, n_bytes, dropped = info["documents"], info["bytes"], info["documents"]["dropped"]
    n_dropped, dropped_bytes = sum(dropped.values()), sum(n_bytes["dropped"].values())
    removed = n_bytes["cleaned"] + n_bytes["cut"]
    print(f"prepare: documents: {documents['read']:,} read = {documents['kept']:,} kept + {n_dropped:,} dropped")
    print(
        f"prepare: bytes of text: {n_bytes['read']:,} read = {n_bytes['kept']:,} kept + {dropped_bytes:,} dropped "
        f"+ {removed:,} cleaned away"
    )
    for what in ("dropped", "mended"):
        for reason, count in documents[what].items():
            print(f"prepare: {what}: {count:,} {reason}")
    if "decontaminate" in info:
        print(f"prepare: {info['decontaminate']['unprotected']:,} of {info['decontaminate']['items']:,} evaluation "
              f"items are too short to be looked for")  # fmt: skip
    for line in answer_pairs.describe(info.get("answers", [])):
        print(f"prepare: {line}")
    print_splits(manifest)
    print(f"prepare: {seconds:.1f} s, {n_bytes['read'] / 1e6 / seconds:.1f} MB/s")


def print_splits(manifest: dict) -> None:
    if manifest["format"] == ROWS_FORMAT:
        for split, entry in manifest["splits"].items():
            tokens = f"{entry['tokens']['ids']:>18,} tokens" if "tokens" in entry else ""
            print(f"{split:<8}{entry['rows']:>12,} rows{entry['bytes']:>18,} bytes{tokens}")
        return
    print(f"{'split':<6}{'documents':>14}{'bytes':>18}{'tokens':>18}{'bytes/token':>14}")
    for split, entry in manifest["splits"].items():
        print_split(split, entry)
        names = sorted({shard.get("source", "") for shard in entry["shards"]})
        for name in names if names != [""] else []:
            own = [shard for shard in entry["shards"] if shard["source"] == name]
            print_split(f"  {name}", {key: sum(s[key] for s in own) for key in ("documents", "bytes", "tokens")})


def print_split(name: str, entry: dict) -> None:
    ratio = entry["bytes"] / entry["tokens"]
    print(f"{name:<6}{entry['documents']:>14,}{entry['bytes']:>18,}{entry['tokens']:>18,}{ratio:>14.2f}")


if __name__ == "__main__":
    try:
        sys.exit(main(configure(globals())))
    except OSError as error:
        raise UserError(f"prepare: {error.filename or 'writing'}: {error.strerror}") from None
    except KeyboardInterrupt:
        print("\nprepare: interrupted; the same command goes on", file=sys.stderr)
        sys.exit(130)
