"""Near duplicates past one machine: datatrove's MinHash stages on its local, Slurm and Ray executors.

    pip install datatrove==0.6.0 orjson==3.13.0 tokenizers==0.23.3               # and ray==2.60.0 for Ray
    python tools/dedup_datatrove.py --input='web/*.jsonl.gz' --out=data/once --tasks=64
    python tools/dedup_datatrove.py --input=/nfs/web/ --out=/nfs/once --executor=slurm --partition=cpu --tasks=500
    python prepare.py --input=data/once/ --near=0 --out_dir=data/web             # exact duplicates and all the rest

A run that broke off goes on when the same command is given again; under Slurm a second call, after the last job, ends
the work. `out` appears only when all is done. Every machine must see the same files, this repository's included.

Units, runs of five of them, buckets and hashes per bucket are those of prepare.py. What differs from it:
- Nothing is compared. Two documents that share one bucket are duplicates: of pairs with similarity 0.7 that are 61 %,
  with 0.6 24 %. prepare.py compares their whole signatures, and drops hardly any of these.
- It is transitive: A~B~C leaves one of the three, although A and C may differ.
- Of a cluster the root of a union by size survives, not the first: it may change with `tasks` and appended documents.
- One task clusters all documents that have a duplicate, in memory: about 200 bytes for each.
"""

import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))

from configurator import configure
from groundup.errors import UserError
from groundup.files import readers
from groundup.text import dedup

if TYPE_CHECKING:
    from datatrove.data import Document
    from datatrove.executor.base import PipelineExecutor
    from datatrove.utils.word_tokenizers import WordTokenizer

# ---- config: override with a config file or --key=value; see --help --------------------------
input = ""  # files, directories, globs, comma-separated; all that prepare.py reads
out = ""  # directory to make, of jsonl.gz files; <out>.work is made on the way, and not needed after
text_key = "text"  # where the text is in a JSON object or a row, as in prepare.py
near = 0.8  # similarity; decides buckets and hashes per bucket as in prepare.py
exclusion = False  # also write the documents that are removed, to <out>.removed
executor = "local"  # local | slurm | ray
tasks = 16  # that read, at most one per 64 MB of plain input or per compressed file; each is a file of the output
per_bucket = 1  # tasks for each bucket of signatures; each opens `tasks` files
workers = 0  # tasks at once; 0 = as many as there are cores (local), or no limit
tasks_per_job = 1  # of Slurm and Ray: tasks that one job runs
mem_gb = 2  # of Slurm and Ray: memory of a task, GB
partition = ""  # of Slurm
time_limit = "24:00:00"  # of Slurm, per job
sbatch = ""  # further options of sbatch: 'account=lab,constraint=cpu'

ROOT = Path(__file__).resolve().parent.parent
PYTHONPATH = f"{ROOT}:{ROOT / 'tools'}"  # for tasks on other machines
NEEDED = ("datatrove==0.6.0", "orjson==3.13.0", "tokenizers==0.23.3", "regex==2026.11.15")


class Documents:
    """The first step of a pipeline: what readers.py makes of a task's share of the input, in its order."""

    def __init__(self, parts: list[tuple[str, int, int | None]], text_key: str, folder: Path) -> None:
        self.parts, self.text_key, self.folder = parts, text_key, folder

    def __repr__(self) -> str:
        return f"documents of {len(self.parts)} parts"  # datatrove logs its steps; a list of all files is too long

    def __call__(self, data: None, rank: int, world_size: int) -> Iterator["Document"]:
        from datatrove.data import Document

        n, report = 0, readers.Report(max_places=20)
        first, last = (len(self.parts) * k // world_size for k in (rank, rank + 1))
        for path, begin, end in self.parts[first:last]:
            for document in readers.read_documents(path, self.text_key, begin=begin, end=end, report=report):
                yield Document(document.text, f"{path}:{document.offset}")
                n += 1
        # What is to be dropped is known by its number alone, so the last stage must read what the first one has read.
        counts = json.dumps({"documents": n, "problems": report.problems, "places": report.places})
        write_once(self.folder / f"{rank:05d}.json", counts, "the input has changed on the way")


def unit_words() -> "WordTokenizer":
    """What datatrove splits texts with: its words are the units of dedup.py, by their hashes. Needs no model.

    A text of fewer than five units has one shingle, as in dedup.py; datatrove would have none.
    """
    from datatrove.utils.word_tokenizers import WordTokenizer

    class UnitWords(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            words = [f"{h:x}" for h in dedup.units([text]).hashes.tolist()]
            return words and words + [""] * (dedup.SHINGLE - len(words))

        sent_tokenize = span_tokenize = None  # abstract methods, for which MinHash has no use

    return UnitWords()


def only_text(writer: object, document: "Document") -> dict:
    """A line of the output. datatrove's own would leave out an empty text."""
    return {"text": document.text, "id": document.id}


def stages(c: SimpleNamespace, parts: list[tuple[str, int, int | None]], work: Path) -> list[tuple[str, list, int]]:
    """(name, pipeline, tasks) of datatrove's four stages."""
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
    from datatrove.pipeline.writers import JsonlWriter
    from datatrove.utils.hashing import HashConfig
    from datatrove.utils.text import TextNormConfig

    buckets, hashes = dedup.bands_for(c.near)
    as_it_is = TextNormConfig(False, False, False, False, False)  # the units see to all of that
    # sha1: xxhash takes half the time, but its version 4 refuses the text that datatrove hands it.
    # To every stage: one that is given none works with 14 buckets of 8, and those beyond are lost without a word.
    config = MinhashConfig(dedup.SHINGLE, buckets, hashes, norm_config=as_it_is, hash_config=HashConfig(64, "sha1"))
    signatures, pairs, clusters = (str(work / name) for name in ("signatures", "pairs", "clusters"))
    documents, n_tasks = Documents(parts, c.text_key, work / "read"), min(c.tasks, len(parts))
    removed = JsonlWriter(str(work / "removed"), adapter=only_text) if c.exclusion else None
    kept = JsonlWriter(str(work / "kept"), adapter=only_text)
    return [
        ("signatures", [documents, MinhashDedupSignature(signatures, config, language=unit_words())], n_tasks),
        ("buckets", [MinhashDedupBuckets(signatures, pairs, config=config)], buckets * c.per_bucket),
        ("clusters", [MinhashDedupCluster(pairs, clusters, config=config)], 1),
        ("filter", [documents, MinhashDedupFilter(clusters, removed), kept], n_tasks),
    ]


def make_executor(
    c: SimpleNamespace, logs: Path, pipeline: list, n_tasks: int, before: "PipelineExecutor | None"
) -> "PipelineExecutor":
    """One stage on the chosen executor; Slurm itself waits for the stage before."""
    from datatrove.executor import LocalPipelineExecutor, RayPipelineExecutor, SlurmPipelineExecutor

    if c.executor == "local":
        return LocalPipelineExecutor(pipeline, n_tasks, min(n_tasks, c.workers or os.cpu_count()), str(logs))
    options = {"workers": c.workers or -1, "tasks_per_job": c.tasks_per_job, "mem_per_cpu_gb": c.mem_gb}
    if c.executor == "ray":
        return RayPipelineExecutor(pipeline, n_tasks, logging_dir=str(logs), **options)
    options |= {"job_name": f"dedup_{logs.name}", "qos": "", "depends": before}
    options["sbatch_args"] = dict(option.strip().partition("=")[::2] for option in c.sbatch.split(",") if option)
    options["env_command"] = f"export PYTHONPATH={shlex.quote(PYTHONPATH)}"
    return SlurmPipelineExecutor(pipeline, n_tasks, c.time_limit, c.partition, logging_dir=str(logs), **options)


def run(c: SimpleNamespace) -> None:
    """All stages, from the first that is not done. Raises ConfigError for what the user can mend."""
    target, work = Path(c.out).resolve(), Path(f"{Path(c.out).resolve()}.work")
    files = [str(Path(file).resolve()) for file in readers.find_files(c.input)]
    claim(c, files, target, work)
    parts = [(file, begin, end) for file in files for begin, end in readers.work_units(file)]
    if c.executor == "ray":
        import ray

        ray.init(runtime_env={"env_vars": {"PYTHONPATH": PYTHONPATH}})
    last = None
    for name, pipeline, n_tasks in stages(c, parts, work):
        last = make_executor(c, work / "logs" / name, pipeline, n_tasks, last)
        last.run()
        if c.executor != "slurm" and last.get_incomplete_ranks():
            raise UserError(f"dedup: tasks of {name} failed; see {work}/logs/{name}, then run again")
    if last.get_incomplete_ranks():
        print(f"jobs are queued; when they are done, and not before, give the same command again: it makes {target}")
    else:
        finish(c, target, work)


def claim(c: SimpleNamespace, files: list[str], target: Path, work: Path) -> None:
    """Make `work`, or see that it is of the same input and settings: tasks that are done are not run again."""
    if target.exists() and not work.exists():
        raise UserError(f"dedup: {target} exists already; delete it or choose another --out")
    stats = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    settings = [c.text_key, c.near, c.exclusion, c.tasks, c.per_bucket, stats]
    write_once(work / "settings.json", json.dumps(settings, indent=1), "made of other input or settings")


def write_once(path: Path, text: str, problem: str) -> None:
    """Make the file, or see that it has this text already: else the problem is raised, with what to delete."""
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise UserError(f"dedup: {path}: {problem}; delete the .work directory, or choose another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def finish(c: SimpleNamespace, target: Path, work: Path) -> None:
    """Move the output to its place and say what became of the documents."""
    counts = [json.loads(file.read_text(encoding="utf-8")) for file in sorted((work / "read").glob("*.json"))]
    n_documents = sum(count["documents"] for count in counts)
    n_removed = sum(file.stat().st_size for file in (work / "clusters").glob("*.remove")) // 4  # uint32 each
    if not n_documents:
        raise UserError(f"dedup: no document in {c.input}; is text_key={c.text_key!r} right?")
    for name, place in (("kept", target), ("removed", Path(f"{target}.removed"))):
        if (work / name).exists():
            os.replace(work / name, place)
    if not target.exists():
        raise UserError(f"dedup: {target} was made from {work} before, but is gone; delete the latter, too")
    print(f"{n_documents:,} documents: {n_removed:,} near duplicates, {n_documents - n_removed:,} kept in {target}")
    for path, line, _, detail in [place for count in counts for place in count["places"]][:20]:
        print(f"left out: {path}:{line}: {detail}")
    for reason, n in sum((Counter(count["problems"]) for count in counts), Counter()).items():
        print(f"left out: {n:,} {reason}")


if __name__ == "__main__":
    config = configure(globals())
    wrong = min(tasks, per_bucket, tasks_per_job) < 1 or (executor == "slurm" and not partition)
    if wrong or not input or not out or executor not in ("local", "slurm", "ray"):
        raise UserError("config: give input and out, executor local, slurm (with a partition) or ray, tasks from 1")
    needed = NEEDED + ("ray==2.60.0",) * (executor == "ray")
    if missing := [pin for pin in needed if not find_spec(pin.split("==")[0])]:
        raise UserError(f"dedup: packages are missing; run: pip install {' '.join(missing)}")
    import dedup_datatrove  # again, by its name: what it defines is pickled by reference, also for other machines

    dedup_datatrove.run(SimpleNamespace(**config))
