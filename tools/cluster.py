"""prepare.py for text that one machine cannot hold: its steps as tasks of datatrove, here, on Slurm
or on Ray.

    pip install -r requirements-cluster.txt
    python tools/cluster.py --input='web/*.jsonl.gz' --tokenizer_dir=data/small --out_dir=data/web
    python tools/cluster.py config/web.py --executor=slurm --partition=cpu --tasks=1000
    python tools/cluster.py config/web.py --executor=ray --input='s3://bucket/web/*.parquet'

The token files are those of prepare.py to the byte, for any number of tasks: both call the same
functions, and a text's number, its unit and its place there, follows the order of the input. Files
are local, or of any system that fsspec knows (s3://, hf://): a task copies one of these to its own
disk while it reads it. out_dir lies on a file system that all machines share.

stage     tasks  reads                        writes, in .NAME.cluster.tmp beside out_dir
inspect   tasks  its units of the input       units/ (unit.py), keys/: a hash of each text, sorted
equal     parts  keys/, a range of hashes     exact/: copies, each with the first equal text
sign      tasks  units/*.sigs, exact/         bands/: a hash of each band and text, sorted
link      bands  bands/ of one band           links/: pairs of texts with the same hash
join      1      links/                       groups/: texts that links connect, in parts
compare   parts  groups/, units/*.sigs        near/: copies, each with the most similar text kept
tokenize  tasks  units/*.docs, exact/, near/  units/: ids, lengths and splits of the texts kept
cut       1      units/*.lengths, *.splits    shards.json: which texts each shard holds
write     tasks  shards.json, units/*.tokens  out/: shards
finish    1      what was counted, shards/    out/manifest.json; out/ becomes out_dir

A stage begins when all tasks of the one before are complete, which datatrove notes in
log/STAGE/completions. So the same command, given again after a failure, runs only the tasks that
are missing. docs/scaling.md has what it costs, and what datatrove does that one should know.
"""

import io
import json
import multiprocessing
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import prepare
from configurator import configure, is_key, split_names, write_config
from groundup.errors import UserError, refuse
from groundup.files.paths import is_data
from groundup.files.splits import FEW, SPLITS, least_to_cut, split_of
from groundup.text import dedup, report
from groundup.text.inputs import Input, find_inputs
from groundup.text.prepared_dir import lock, read_prepared
from groundup.text.recipe import VERSION, Recipe
from groundup.text.unit import (
    EXACT,
    KEPT,
    NEAR,
    REASONS,
    ROW,
    Counts,
    Unit,
    inspect_unit,
    plan_units,
    read_json,
    tokenize_unit,
)
from groundup.text.workers import start_worker
from groundup.tokens.token_files import token_dtype
from groundup.tokens.token_writer import ShardWriter, write_json, write_manifest
from tokenizer import Tokenizer

try:
    from datatrove.pipeline.base import PipelineStep
except ModuleNotFoundError:
    PipelineStep = object  # the stages work without it; `main` says how to install it

# ---- config: override with a config file or --key=value; see --help --------------------------
input = ""  # files, globs, s3://, hf://, 'name: files, weight=1; ...': see prepare.py
out_dir = ""  # directory to make, on a file system that all machines share
tokenizer_dir = ""  # tokenizer to use; prepare.py trains one on a part of the text
# where it runs
executor = "local"  # local | slurm | ray
tasks = 4  # of the stages that work on parts of the input, at least 1
parts = 16  # tasks of equal and compare; more of them hold less each, at least 1
workers = 0  # tasks at once; 0 = one per core, with slurm and ray no limit
hours = 24.0  # limit of a task of slurm or ray
memory_gb = 4  # of a task of slurm or ray, at least 1
large_gb = 16  # of a task of equal, link, join, compare and cut, at least 1
partition = ""  # slurm: partition
sbatch = ""  # slurm: more options, such as 'account=x,constraint=icelake'
# which documents are kept, and what is written: see prepare.py
text_key = ""  # field of the text: 'text', 'a.b', 'title,body'; "" = found
txt_split = "file"  # file | blank | line: what a document is in plain text
encoding = ""  # of lines that are not UTF-8; "" = found for each file
quality = "curated"  # curated | web
rules = ""  # 'length=30..5000, stop_words=off, keep=my.py:good, punctuation=on'
near = 0.8  # drop texts this similar to an earlier one; 0 = exact copies only, -1 = keep all copies
decontaminate = ""  # evaluation files to keep out of training; 'cut: files' cuts them out
val_fraction = 0.01  # of the documents
test_fraction = 0.0  # of the documents
shard_tokens = 134_217_728  # tokens per file, at least 1
max_bad_fraction = 0.0  # exit status 1 if a larger share of bytes or records is lost

ROOT = Path(__file__).absolute().parent.parent
JOBS = "jobs.json"  # numbers of the jobs that were given to Slurm
LARGE = ("equal", "link", "join", "compare", "cut")  # stages whose tasks hold columns of many texts
# A text that passed the rules has the number unit * 2**32 + its place among those of its unit.
KEY = np.dtype([("hash", "<u8"), ("rest", "<u8"), ("id", "<u8")])
BAND = np.dtype([("hash", "<u8"), ("id", "<u8")])
COPY = np.dtype([("id", "<u8"), ("like", "<u8"), ("similarity", "<f4")])


class Job(NamedTuple):
    """What all tasks know; in job.pickle."""

    work: Path
    out_dir: Path
    key: list  # of everything that decides the result
    recipe: Recipe
    inputs: list[Input]
    units: list[Unit]
    config: dict

    @property
    def stages(self) -> list[tuple[str, int]]:
        """(name, number of tasks) of each stage, in order."""
        n, parts = self.config["tasks"], self.config["parts"]
        exact = [("equal", parts)] if self.recipe.near >= 0 else []
        near = [("sign", n), ("link", self.recipe.near_bands), ("join", 1), ("compare", parts)]
        near = near if self.recipe.near > 0 else []
        last = [("tokenize", n), ("cut", 1), ("write", n), ("finish", 1)]
        return [("inspect", n), *exact, *near, *last]

    def part(self, rank: int, tasks: int) -> list[Unit]:
        """Return the units of a task, which are neighbours."""
        n = len(self.units)
        return self.units[rank * n // tasks : (rank + 1) * n // tasks]


# ---- the plan, made where the command is given -----------------------------------------------


def work_path(out_dir: str) -> Path:
    out = Path(out_dir).absolute()
    return out.parent / f".{out.name}.cluster.tmp"


def make_plan(config: dict) -> Job:
    """Write job.pickle. Remove what another plan left, but its units: those that are the same are
    used again."""
    settings = {key: value for key, value in vars(prepare).items() if is_key(key, value)}
    checked = prepare.check_config(settings | config)
    tokenizer = prepare.existing_tokenizer(config["tokenizer_dir"], "text")
    if tokenizer is None:
        what = f"no tokenizer in tokenizer_dir={config['tokenizer_dir']!r}"
        raise UserError(f"cluster: {what}; make one with prepare.py on a part of the text")
    out_dir, work = Path(config["out_dir"]).absolute(), work_path(config["out_dir"])
    (work / "units").mkdir(parents=True, exist_ok=True)
    inputs = list_inputs(checked, out_dir, work)
    if problem := next((file for file in inputs if file.problem), None):
        raise UserError(f"cluster: cannot read {problem.name}: {problem.problem}")
    stamps = [[file.name, file.size, file.stamp, file.source] for file in inputs]
    written = [config["shard_tokens"], tokenizer.fingerprint()]
    key = [VERSION, checked.settings(), *written, stamps]
    key = json.loads(json.dumps(key))  # as it comes back from the manifest
    job = Job(work, out_dir, key, checked, inputs, plan_units(inputs), config)
    plan = {"key": key, "stages": list(map(list, job.stages))}
    if read_json(work / "plan.json") != plan:
        for path in work.iterdir():
            if path.is_dir() and path.name != "units":
                shutil.rmtree(path)
        (work / "out").mkdir()
        prepare.save_evals(checked, work)
        tokenizer.save(work / "out")
        write_json(work / "plan.json", plan)
    (work / "job.pickle").write_bytes(pickle.dumps(job))
    return job


def list_inputs(recipe: Recipe, out_dir: Path, work: Path) -> list[Input]:
    """Return the files of all sources, each once, in the order given."""
    found: dict[str, Input] = {}
    for number, source in enumerate(recipe.sources):
        for name in filter(None, split_names(source.input)):
            here = "://" not in name
            sources = (replace(source, input=name),)
            for file in find_inputs(sources, out_dir, work) if here else far_files(name):
                # not the real path: a link's own name says which container it is
                path = os.path.abspath(file.path) if here else file.path
                real = os.path.realpath(path) if here else path
                found.setdefault(real, file._replace(path=path, source=number))
    return list(found.values())


def far_files(url: str) -> Iterator[Input]:
    """Yield the files of a URL, which is a file, a directory or a pattern. Raise UserError."""
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(url)
    pattern = any(mark in path for mark in "*?[")
    infos = (fs.glob if pattern else fs.find)(path, detail=True)
    found = sorted(file for file, info in infos.items() if info["type"] == "file")
    if not pattern and found != [path]:  # a directory
        found = [file for file in found if is_data(os.path.basename(file))]
    if not found:
        raise UserError(f"cluster: no file matches {url!r}")
    for file in found:
        name = fs.unstrip_protocol(file)
        yield Input(name, name, infos[file]["size"], fs.ukey(file))


# ---- the stages: function(job, number of the task, number of tasks) ----------------------------


def inspect(job: Job, rank: int, tasks: int) -> None:
    """Read, clean and judge documents, and sign those that pass, as prepare.py does."""
    keys = []
    for unit in job.part(rank, tasks):
        done = read_json(unit.file(job.work, "json")).get("key")
        if done != unit.key(job.recipe):
            with TemporaryDirectory() as folder:
                inspect_unit(copied_here(unit, folder), job.recipe, job.work)
        rows = np.fromfile(unit.file(job.work, "rows"), ROW)
        hashes = rows["key"][rows["reason"] == KEPT]
        keys.append(table(KEY, *hashes.T, numbers(unit, np.arange(len(hashes)))))
    save_sorted(job.work / "keys" / f"{rank:05d}.npy", KEY, keys)


def copied_here(unit: Unit, folder: str) -> Unit:
    """Return a unit whose files are on this machine: those of a URL are copied into `folder`."""
    parts = []
    for number, part in enumerate(unit.parts):
        if "://" in part.path:
            from fsspec.core import url_to_fs

            fs, path = url_to_fs(part.path)
            copy = os.path.join(folder, f"{number}_{os.path.basename(path)}")
            fs.get_file(path, copy)
            part = part._replace(path=copy)
        parts.append(part)
    return unit._replace(parts=parts)


def equal(job: Job, rank: int, tasks: int) -> None:
    """Find the texts that are equal to an earlier one, among those in a range of hashes."""
    keys = select(job.work / "keys", "hash", *hash_range(rank, tasks))
    keys = keys[np.argsort(keys["id"])]
    first = dedup.first_copies(np.stack([keys["hash"], keys["rest"]], axis=1))
    later = np.flatnonzero(first != np.arange(len(keys)))
    copies = table(COPY, keys["id"][later], keys["id"][first[later]], np.ones(len(later)))
    save_sorted(job.work / "exact" / f"{rank:05d}.npy", COPY, [copies], "id")


def sign(job: Job, rank: int, tasks: int) -> None:
    """Hash each band of the signatures of the texts that are no exact copies."""
    bands, rows = job.recipe.near_bands, job.recipe.near_rows
    of_band: list[list[np.ndarray]] = [[] for _ in range(bands)]
    for unit in job.part(rank, tasks):
        signatures = np.fromfile(unit.file(job.work, "sigs"), "<u4").reshape(-1, dedup.N_PERM)
        signatures = signatures[:, : bands * rows].reshape(-1, bands, rows)
        compared = (signatures != dedup.NO_UNITS).any(axis=(1, 2))
        compared[copies_of(unit, job, "exact")] = False
        hashes = np.zeros((compared.sum(), bands), np.uint64)
        # 64 bits: with 32, a billion texts would share hashes by chance.
        for k in range(rows):
            hashes = dedup.mix64(hashes + signatures[compared, :, k] + np.uint64(1))
        for band, found in enumerate(of_band):
            found.append(table(BAND, hashes[:, band], numbers(unit, np.flatnonzero(compared))))
    for band, found in enumerate(of_band):
        save_sorted(job.work / "bands" / f"{band:03d}" / f"{rank:05d}.npy", BAND, found)


def link(job: Job, band: int, tasks: int) -> None:
    """Link each text to the one before it that has the same hash in this band."""
    links, parts = [], job.config["parts"]
    for part in range(parts):  # so that only one of them is in memory
        found = select(job.work / "bands" / f"{band:03d}", "hash", *hash_range(part, parts))
        found = found[np.lexsort((found["id"], found["hash"]))]
        same = np.flatnonzero(found["hash"][1:] == found["hash"][:-1])
        links.append(np.stack([found["id"][same], found["id"][same + 1]], axis=1))
    save(job.work / "links" / f"{band:03d}.npy", np.concatenate(links))


def join(job: Job, rank: int, tasks: int) -> None:
    """Put texts that links connect, over any number of others, into one group. Texts of other
    groups share no hash with these and have no say, so each task of `compare` takes some groups."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    files, parts = sorted((job.work / "links").iterdir()), job.config["parts"]
    ids = reduce(np.union1d, map(np.load, files))
    group = np.arange(len(ids))
    for file in files:  # one by one: each has up to one link per text
        one, other = group[np.searchsorted(ids, np.load(file))].T
        graph = coo_matrix((np.ones(len(one), bool), (one, other)), shape=(len(ids), len(ids)))
        group = connected_components(graph, directed=False)[1][group]
    sizes = np.bincount(group)
    part = (np.cumsum(sizes) - sizes) * parts // max(1, len(ids))  # whole groups
    for number in range(parts):
        save(job.work / "groups" / f"{number:05d}.npy", ids[part[group] == number])


def compare(job: Job, rank: int, tasks: int) -> None:
    """Find the near copies within some groups, as prepare.py does among all texts."""
    bands, rows = job.recipe.near_bands, job.recipe.near_rows
    ids = np.load(job.work / "groups" / f"{rank:05d}.npy")
    path = job.work / "groups" / f"{rank:05d}.sigs"
    with open(path, "wb") as out:  # to be mapped: they may not fit in memory
        of_unit, begins = np.unique(ids >> np.uint64(32), return_index=True)
        for number, (begin, end) in zip(of_unit, pairwise([*begins, len(ids)]), strict=True):
            places = ids[begin:end] & np.uint64(2**32 - 1)
            signatures = np.memmap(job.units[number].file(job.work, "sigs"), "<u4", "r")
            out.write(signatures.reshape(-1, dedup.N_PERM)[places, : bands * rows].tobytes())
    signatures = np.memmap(path, "<u4", "r") if len(ids) else np.empty(0, np.uint32)
    signatures = signatures.reshape(len(ids), bands * rows)
    found = dedup.near_duplicates(signatures, job.recipe.near, bands, rows)
    copies = table(COPY, ids[found.dropped], ids[found.partner], found.similarity)
    save_sorted(job.work / "near" / f"{rank:05d}.npy", COPY, [copies], "id")
    write_json(job.work / "near" / f"{rank:05d}.json", {"not_compared": found.capped})
    path.unlink()


def tokenize(job: Job, rank: int, tasks: int) -> None:
    """Encode the texts that are kept, choose their splits, and count what became of all."""
    tokenizer = Tokenizer.load(job.work / "out")
    fingerprint = tokenizer.chat_fingerprint()
    documents, n_bytes = np.zeros((2, len(REASONS)), np.int64)
    records: Counter[str] = Counter()  # by source, with a text that is kept
    sizes: Counter[str] = Counter()  # bytes of these texts
    longest: dict[str, list[int]] = {}  # bytes of the longest of them
    for unit in job.part(rank, tasks):
        rows = np.fromfile(unit.file(job.work, "rows"), ROW)
        fates = rows["reason"].copy()
        passed = np.flatnonzero(fates == KEPT)
        fates[passed[copies_of(unit, job, "exact")]] = EXACT
        fates[passed[copies_of(unit, job, "near")]] = NEAR
        save(unit.file(job.work, "fates.npy"), fates)
        tokenize_unit(unit, fingerprint, job.work)
        kept = rows[fates == KEPT]
        splits = split_of(kept["position"], job.recipe.val_fraction, job.recipe.test_fraction)
        splits.tofile(unit.file(job.work, "splits"))
        documents += report.by_fate(fates)
        n_bytes += report.by_fate(fates, rows["n_bytes"])
        name = job.recipe.sources[unit.source].name
        places, record = np.unique(kept[["part", "offset"]], return_inverse=True)
        lengths = np.bincount(record, kept["n_bytes"]).astype(np.int64)
        records[name] += len(places)
        longest[name] = sorted(longest.get(name, []) + lengths.tolist())[-FEW:]
        sizes[name] += int(kept["n_bytes"].sum())
    counts = {"documents": documents.tolist(), "bytes": n_bytes.tolist(), "records": records}
    counts |= {"sizes": sizes, "longest": longest}
    (job.work / "counts").mkdir(exist_ok=True)
    write_json(job.work / "counts" / f"{rank:05d}.json", counts)


def cut(job: Job, rank: int, tasks: int) -> None:
    """Decide which texts each shard holds: as many as fit, as ShardWriter does."""
    share = job.recipe.val_fraction + job.recipe.test_fraction
    sizes = sum((Counter(one["sizes"]) for one in counted(job)), Counter())
    for name, n in sum((Counter(one["records"]) for one in counted(job)), Counter()).items():
        longest = [size for one in counted(job) for size in one["longest"].get(name, [])]
        longest = np.array(sorted(longest)[-FEW:], np.int64)
        least = least_to_cut(longest, n, sizes[name], share)
        if least < np.inf:  # prepare.py cuts these
            of = f" of source {name}" if name else ""
            what = f"{n} documents{of} are few" if not least else f"few documents{of} hold most"
            raise UserError(f"cluster: {what}; use prepare.py for these")
    # By source and split: for each shard, [unit, begin, end] of its texts.
    shards: dict[tuple[int, int], list[list]] = {}
    room: Counter[tuple[int, int]] = Counter()  # for tokens in the last shard
    for unit in job.units:
        lengths = np.fromfile(unit.file(job.work, "lengths"), "<i8") + 1  # with <|endoftext|>
        splits = np.fromfile(unit.file(job.work, "splits"), np.uint8)
        for split in np.unique(splits).tolist():
            own, of, begin = np.cumsum(lengths[splits == split]), (unit.source, split), 0
            while begin < len(own):
                used = own[begin - 1] if begin else 0
                end = int(np.searchsorted(own, used + room[of], side="right"))
                if end <= begin:  # no more fits in; a text of any length begins a shard
                    shards.setdefault(of, []).append([])
                    end, room[of] = begin + 1, job.config["shard_tokens"]
                shards[of][-1].append([unit.number, begin, end])
                room[of] -= own[end - 1] - used
                begin = end
    if not shards:
        what = "no document is kept; prepare.py --show=5 prints how rows are read"
        raise UserError(f"cluster: {what}")
    plan = []
    for (source, split), own in sorted(shards.items()):
        for k, texts in enumerate(own):
            shard = {"source": source, "split": split, "number": k, "texts": texts}
            plan.append(shard | {"last": k == len(own) - 1})
    write_json(job.work / "shards.json", {"shards": plan})


def write(job: Job, rank: int, tasks: int) -> None:
    """Copy the ids of texts into shards."""
    tokenizer, out = Tokenizer.load(job.work / "out"), job.work / "out"
    ids = tokenizer.vocab_size, tokenizer.eot_id, job.config["shard_tokens"]
    (job.work / "shards").mkdir(exist_ok=True)
    plan = json.loads((job.work / "shards.json").read_text(encoding="utf-8"))["shards"]
    for number in range(rank, len(plan), tasks):
        shard = plan[number]
        source, split = job.recipe.sources[shard["source"]].name, SPLITS[shard["split"]]
        writer = ShardWriter(out, split, *ids, source, shard["number"])
        for of, begin, end in shard["texts"]:
            unit = job.units[of]
            rows = np.fromfile(unit.file(job.work, "rows"), ROW)
            n_bytes = rows["n_bytes"][unit.fates(job.work) == KEPT].tolist()
            ends = np.cumsum(np.fromfile(unit.file(job.work, "lengths"), "<i8"))
            splits = np.fromfile(unit.file(job.work, "splits"), np.uint8)
            tokens = np.fromfile(unit.file(job.work, "tokens"), token_dtype(ids[0]))
            for i in np.flatnonzero(splits == shard["split"])[begin:end].tolist():
                writer.add(tokens[ends[i - 1] if i else 0 : ends[i]], n_bytes[i])
        (entry,) = writer.close(last=shard["last"])
        write_json(job.work / "shards" / f"{number:05d}.json", entry)


def finish(job: Job, rank: int, tasks: int) -> None:
    """Write the manifest with what was counted, and rename the directory."""
    out, tokenizer = job.work / "out", Tokenizer.load(job.work / "out")
    counts = Counts()
    for unit in job.units:
        counts.add(inspect_unit(unit, job.recipe, job.work))
    report.write_problems(job.inputs, [], counts, job.units, job.work)
    shards = [read_json(file) for file in sorted((job.work / "shards").glob("*.json"))]
    info = {"key": job.key, "recipe": job.recipe.settings()} | what_became(job, counts)
    weights = {source.name: source.weight for source in job.recipe.sources if source.weight}
    ids = tokenizer.vocab_size, tokenizer.eot_id, tokenizer.fingerprint()
    write_manifest(out, *ids, shards, info, weights)
    command = f"python tools/cluster.py {job.out_dir}/config.py"
    write_config(job.config, str(out / "config.py"), command=command)
    out.rename(job.out_dir)


def what_became(job: Job, counts: Counts) -> dict:
    """Return the entries that prepare.py's manifest has, after the same check."""
    sums = (np.sum([one[what] for one in counted(job)], axis=0) for what in ("documents", "bytes"))
    capped = [read_json(file)["not_compared"] for file in (job.work / "near").glob("*.json")]
    return report.what_became(job.inputs, counts, *sums) | {"near": {"not_compared": sum(capped)}}


def counted(job: Job) -> list[dict]:
    return [read_json(file) for file in sorted((job.work / "counts").glob("*.json"))]


STAGES = (inspect, equal, sign, link, join, compare, tokenize, cut, write, finish)
STAGES = {stage.__name__: stage for stage in STAGES}


# ---- sorted tables on disk -----------------------------------------------------------------------


def numbers(unit: Unit, places: np.ndarray) -> np.ndarray:
    """Return the numbers of the texts at these places among those of a unit that passed."""
    return places.astype("<u8") + np.uint64(unit.number << 32)


def table(dtype: np.dtype, *columns: np.ndarray) -> np.ndarray:
    rows = np.empty(len(columns[0]), dtype)
    for name, column in zip(dtype.names, columns, strict=True):
        rows[name] = column
    return rows


def save(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)


def save_sorted(path: Path, dtype: np.dtype, tables: list[np.ndarray], by: str = "hash") -> None:
    rows = np.concatenate([np.empty(0, dtype), *tables])
    save(path, rows[np.argsort(rows[by], kind="stable")])


def select(folder: Path, by: str, begin: int, end: int) -> np.ndarray:
    """Return the rows of all tables of a folder, which are sorted `by` a column, whose value is in
    [begin, end)."""
    found = []
    for path in sorted(folder.glob("*.npy")):
        rows = np.load(path, mmap_mode="r")
        places = (bisect_left(rows, bound, key=lambda row: int(row[by])) for bound in (begin, end))
        found.append(np.array(rows[slice(*places)]))
    return np.concatenate(found) if found else np.empty(0, COPY)


def hash_range(part: int, parts: int) -> tuple[int, int]:
    return part * 2**64 // parts, (part + 1) * 2**64 // parts


def copies_of(unit: Unit, job: Job, kind: str) -> np.ndarray:
    """Return the places of the copies among the texts of a unit that passed. kind: exact | near."""
    first = unit.number << 32
    copies = select(job.work / kind, "id", first, first + 2**32)
    return copies["id"] - np.uint64(first)


# ---- datatrove runs them -------------------------------------------------------------------------


class Step(PipelineStep):
    """A stage, as datatrove calls it."""

    type = "groundup"

    def __init__(self, work: Path, name: str) -> None:
        self.work, self.name, self.directory = work, name, os.getcwd()
        super().__init__()

    def run(self, data: object = None, rank: int = 0, world_size: int = 1) -> None:
        with suppress(OSError):  # not on this machine, so nothing there is asked for
            os.chdir(self.directory)  # rules name their function by a path from there
        job = pickle.loads((self.work / "job.pickle").read_bytes())
        # Slurm may begin a stage although tasks of an earlier one failed: it waits for the last of
        # several arrays.
        for name, n in job.stages[: job.stages.index((self.name, world_size))]:
            if len(list(job.work.glob(f"log/{name}/completions/*"))) < n:
                what = f"{self.name} needs all tasks of {name}; give the command again"
                raise UserError(f"cluster: {what}")
        STAGES[self.name](job, rank, world_size)


def executors(job: Job, exported: dict[str, str]) -> list:
    """Return an executor of datatrove for each stage. exported: environment of the tasks."""
    from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor

    config, made = job.config, []
    options = filter(None, config["sbatch"].split(","))
    of_slurm = {
        "time": str(round(config["hours"] * 60)),  # minutes
        "partition": config["partition"],
        "qos": "",
        "env_command": "export " + " ".join(f"{k}={shlex.quote(v)}" for k, v in exported.items()),
        "sbatch_args": dict(option.partition("=")[::2] for option in options),
    }
    for name, tasks in job.stages:
        settings = {"pipeline": [Step(job.work, name)], "tasks": tasks}
        settings |= {"workers": config["workers"] or -1}
        settings |= {"logging_dir": str(job.work / "log" / name)}
        memory = {"mem_per_cpu_gb": config["large_gb" if name in LARGE else "memory_gb"]}
        if config["executor"] == "local":
            made.append(LocalPipelineExecutor(**settings))
        elif config["executor"] == "ray":
            made.append(RayPipelineExecutor(**settings, **memory, time=int(config["hours"] * 3600)))
        else:
            order = {"job_name": f"{job.out_dir.name}-{name}", "depends": (made or [None])[-1]}
            made.append(SlurmPipelineExecutor(**settings, **memory, **of_slurm, **order))
    return made


def environment() -> dict[str, str]:
    """Return what a task needs to find Python, datatrove and this file on any machine."""
    packages = [str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
    programs = [str(Path(sys.executable).parent), os.environ["PATH"]]
    found = {"PYTHONPATH": ":".join(filter(None, packages)), "PATH": ":".join(programs)}
    return found | {"OMP_NUM_THREADS": "1"}


def run_local(executor: object, workers: int, work: Path) -> None:
    """Run the tasks that are missing, each in a process of its own, which ends with this one.
    datatrove's pool would wait forever for a worker that was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cluster"])  # so that the imports are done once
    watched, lifeline = context.Pipe(duplex=False)

    def run_one(rank: int) -> None:
        process = context.Process(target=run_task, args=(executor, rank, watched, work))
        process.start()
        process.join()

    with lifeline, ThreadPool(workers or os.cpu_count() or 1) as threads:
        threads.map(run_one, executor.get_incomplete_ranks(), chunksize=1)


def run_task(executor: object, rank: int, watched: Connection, work: Path) -> None:
    start_worker(watched, work)
    try:
        with redirect_stderr(io.StringIO()):  # datatrove's log has a file, too
            executor._run_for_rank(rank)
    except UserError as error:
        sys.exit(str(error))


def main(config: dict) -> int:
    """Run all stages, or submit them. Return the exit status: 1 if too much is lost."""
    if PipelineStep is object:
        hint = "run: pip install -r requirements-cluster.txt"
        raise UserError(f"cluster: datatrove is not installed; {hint}")
    refuse(not config["out_dir"], "out_dir is empty; give --out_dir=...")
    if config["executor"] == "slurm":
        what = "executor=slurm needs partition; the command sinfo lists them"
        refuse(not config["partition"], what)
        return run(config)  # its jobs go on when this process ends
    handle = lock(work_path(config["out_dir"]), Path(config["out_dir"]))
    try:
        return run(config)
    finally:
        os.close(handle)


def check_no_jobs(work: Path) -> None:
    """Raise UserError if jobs of an earlier command still wait or run on Slurm."""
    jobs = read_json(work / JOBS).get("jobs", [])
    if not jobs or not shutil.which("squeue"):
        return
    command = ["squeue", "--noheader", "--format=%F", f"--jobs={','.join(jobs)}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "invalid job id" not in done.stderr.lower():  # that one: all have ended
        raise UserError(f"cluster: {' '.join(command)} fails: {done.stderr.strip()}")
    listed = done.stdout.split()
    if unfinished := sorted(set(listed) & set(jobs)):
        text = f"jobs of an earlier command wait or run: {len(unfinished)}"
        raise UserError(f"cluster: {text}; wait, or end them: scancel {' '.join(unfinished)}")


def run(config: dict) -> int:
    start, out_dir = time.perf_counter(), Path(config["out_dir"])
    check_no_jobs(work_path(config["out_dir"]))
    job = make_plan(config)
    if not out_dir.exists():
        exported = environment()
        os.environ |= exported
        made = executors(job, exported)
        if config["executor"] == "slurm":
            made[-1].run()  # submits the others before it
            jobs = [str(one.job_id) for one in made if one.job_id not in (None, -1)]
            write_json(job.work / JOBS, {"jobs": jobs})
            print(f"cluster: submitted; {out_dir} appears at the end; logs are in {job.work}/log")
            return 0
        if config["executor"] == "ray":
            import ray

            ray.init(runtime_env={"env_vars": exported})
        for (name, tasks), one in zip(job.stages, made, strict=True):
            run_stage(job, name, tasks, one)
            seconds = time.perf_counter() - start
            print(f"cluster: {name}: {tasks} tasks, {seconds:.1f} s", flush=True)
    shutil.rmtree(job.work)
    manifest = read_prepared(out_dir)
    if manifest["info"].get("key") != job.key:
        what = f"{out_dir} holds something else; remove it, or use another out_dir"
        raise UserError(f"cluster: {what}")
    report.print_report(manifest, time.perf_counter() - start)
    return report.exit_status(manifest["info"], len(job.inputs), config["max_bad_fraction"])


def run_stage(job: Job, name: str, tasks: int, executor: object) -> None:
    """Run the tasks of a stage that are missing. Raise UserError if some do not finish."""
    if job.config["executor"] == "local":
        run_local(executor, job.config["workers"], job.work)
    else:
        executor.run()
    if missing := executor.get_incomplete_ranks(skip_completed=True):
        log = f"{job.work}/log/{name}/logs/task_{missing[0]:05d}.log"
        what = f"{len(missing)} of {tasks} tasks of {name} did not finish, see {log}"
        raise UserError(f"cluster: {what}; the same command runs only these again")


if __name__ == "__main__":
    import cluster  # this file under a name by which processes on other machines find it

    sys.exit(cluster.main(configure(globals())))
