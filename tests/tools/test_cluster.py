"""tools/cluster.py against prepare.py: the same token files to the byte, for any number of tasks,
whatever was killed.

Most tests call the stages in this process, for which datatrove is not needed."""

import gzip
import importlib.util
import json
import os
import random
from pathlib import Path

import cluster
import pytest

import prepare
from configurator import is_key
from groundup.errors import UserError
from groundup.text import inputs
from groundup.text import select as selection
from groundup.text import unit as units
from groundup.tokens.token_files import TokenData
from groundup.tokens.token_writer import verify
from groundup.tokens.training import train

WORDS = (
    "the of and model reads every word in a text that people wrote about rivers and hills".split()
)
HAN = "天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏闰余成岁律吕调阳"
KEYS = {key: value for key, value in vars(cluster).items() if is_key(key, value)}
PREPARE = {key: value for key, value in vars(prepare).items() if is_key(key, value)}
needs_datatrove = pytest.mark.skipif(
    importlib.util.find_spec("datatrove") is None, reason="needs requirements-cluster.txt"
)


def documents(n: int) -> list[str]:
    """Return English and Chinese texts, a fifth of them exact or near copies of any earlier one."""
    r, texts = random.Random(3), []
    for i in range(n):
        text = " ".join(r.choices(WORDS, k=60)) if i % 2 else "".join(r.choices(HAN, k=90))
        if i > 20 and i % 10 == 0:
            text = f" {r.choice(texts).upper()}  "
        if i > 20 and i % 10 == 5:
            text = r.choice(texts).replace("river", "brook") + "末尾"
        texts.append(
            "" if i % 50 == 9 else text * 40 if i == 33 else text
        )  # 33 fills a shard of 3,000 tokens
    return texts


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Directory of a tokenizer and of raw/: four files of 400 documents, with broken lines."""
    top = tmp_path_factory.mktemp("corpus")
    train([" ".join(WORDS), HAN] * 4, 320).save(top / "tokenizer")
    texts = documents(400)
    (top / "raw").mkdir()
    for k, name in enumerate(("a.jsonl", "b.jsonl.gz", "c.txt", "d.jsonl")):
        part = texts[k * 100 : (k + 1) * 100]
        lines = [json.dumps({"text": text}, ensure_ascii=False) for text in part]
        lines = part if name == "c.txt" else [*lines[:50], '{"text": "broken', *lines[50:]]
        data = ("\n".join(lines) + "\n").encode()
        (top / "raw" / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    return top


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(inputs, "UNIT_BYTES", 2**13)
    monkeypatch.setattr(units, "GROUP_BYTES", 2**12)


def settings(corpus: Path, out: Path, **own) -> dict:
    given = {"input": f"{corpus}/raw", "tokenizer_dir": f"{corpus}/tokenizer", "out_dir": str(out)}
    return (
        given
        | {"txt_split": "line", "val_fraction": 0.1, "shard_tokens": 3000, "max_bad_fraction": 0.1}
        | own
    )


def run_stages(config: dict) -> dict:
    """Run all tasks of all stages here, the last task of each first. Return the manifest."""
    job = cluster.make_plan(KEYS | config)
    for name, n in job.stages:
        for rank in reversed(range(n)):
            cluster.STAGES[name](job, rank, n)
    return verify(job.out_dir)


def arrays(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*.npy"))
    }


def run_prepare(config: dict) -> Path:
    config = dict(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "SHARD_TOKENS", config.pop("shard_tokens"))
        assert prepare.main(PREPARE | {"workers": 1} | config) == 0
    return Path(config["out_dir"])


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory) -> Path:
    return run_prepare(settings(corpus, tmp_path_factory.mktemp("prepared") / "out"))


def test_the_files_are_those_of_prepare_for_any_number_of_tasks(corpus, prepared, tmp_path):
    manifest = run_stages(settings(corpus, tmp_path / "out", tasks=3, parts=2))
    assert arrays(tmp_path / "out") == arrays(prepared)
    expected = verify(prepared)
    assert manifest["splits"] == expected["splits"]
    for key in ("documents", "bytes", "input", "marked", "unread", "failed"):
        assert manifest["info"][key] == expected["info"][key], key
    assert len(manifest["splits"]["train"]["shards"]) > 3
    dropped = manifest["info"]["documents"]["dropped"]
    assert dropped["exact_duplicate"] > 20 and dropped["near_duplicate"] > 10
    assert manifest["info"]["documents"]["lost"] == {"bad_json": 3}
    assert (tmp_path / "out" / "errors.tsv").read_bytes() == (prepared / "errors.tsv").read_bytes()


def test_named_sources_keep_their_weights(corpus, tmp_path):
    raw = f"{corpus}/raw"
    sources = f"one: {raw}/a.jsonl, {raw}/c.txt, weight=0.7; two: {raw}/d.jsonl, weight=0.3"
    own = {"input": sources, "val_fraction": 0.2, "test_fraction": 0.2}
    run_prepare(settings(corpus, tmp_path / "whole", **own))
    manifest = run_stages(settings(corpus, tmp_path / "parts", **own, tasks=2))
    assert arrays(tmp_path / "parts") == arrays(tmp_path / "whole")
    expected = verify(tmp_path / "whole")
    assert (manifest["sources"], manifest["splits"]) == (expected["sources"], expected["splits"])
    assert TokenData(tmp_path / "parts" / "two", "train").n_tokens > 0  # as pretrain.py opens it


def test_files_elsewhere_give_the_same_result(corpus, prepared, tmp_path):
    memory = pytest.importorskip("fsspec").filesystem("memory")
    for path in (corpus / "raw").iterdir():
        memory.pipe(f"/web/{path.name}", path.read_bytes())
    memory.pipe("/web/README.md", b"no data")
    manifest = run_stages(settings(corpus, tmp_path / "out", input="memory://web", tasks=2))
    assert arrays(tmp_path / "out") == arrays(prepared)
    assert list(manifest["info"]["input"]["files"])[0] == "memory:///web/a.jsonl"
    memory.rm("/web", recursive=True)
    with pytest.raises(UserError, match="no file matches 'memory://web/none-"):
        run_stages(settings(corpus, tmp_path / "none", input="memory://web/none-*"))


def test_nothing_is_compared_if_nothing_is_to_be_dropped(corpus, tmp_path):
    own = {"near": -1.0}
    run_prepare(settings(corpus, tmp_path / "whole", **own))
    run_stages(settings(corpus, tmp_path / "parts", **own, tasks=2))
    assert arrays(tmp_path / "parts") == arrays(tmp_path / "whole")


def test_a_plan_with_other_settings_starts_again_and_the_same_one_goes_on(corpus, tmp_path):
    config = KEYS | settings(corpus, tmp_path / "out", tasks=2)
    job = cluster.make_plan(config)
    cluster.inspect(job, 0, 2)
    (job.work / "log").mkdir()
    first = [path.stat().st_mtime_ns for path in sorted((job.work / "units").glob("*.json"))]
    assert first
    cluster.make_plan(config)
    assert (job.work / "log").exists() and (job.work / "keys").exists()
    job = cluster.make_plan(config | {"near": 0.0, "tasks": 1})
    assert not (job.work / "log").exists() and not (job.work / "keys").exists()
    assert [
        path.stat().st_mtime_ns for path in sorted((job.work / "units").glob("*.json"))
    ] == first


@pytest.mark.parametrize(
    "own, message",
    [
        (
            {"tokenizer_dir": "none"},
            "no tokenizer in tokenizer_dir='none'; make one with prepare.py",
        ),
        ({"near": 2.0}, "got 2.0"),
        ({"rules": "length=1000000.."}, "no document is kept"),
        ({"rules": "length=2000.."}, "1 documents are few"),
    ],
)
def test_what_cannot_be_prepared_is_said_in_one_line(corpus, tmp_path, own, message):
    with pytest.raises(UserError) as error:
        run_stages(settings(corpus, tmp_path / "out", **own))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_without_datatrove_the_command_says_how_to_install_it(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "PipelineStep", object)
    with pytest.raises(UserError, match="pip install -r requirements-cluster.txt"):
        cluster.main(KEYS | settings(corpus, tmp_path / "out"))


# ---- with datatrove ------------------------------------------------------------------------------

KEEP = """
import os, pathlib
mark = pathlib.Path(__file__).with_suffix(".mark")

def keep(text):
    if "HILLS" in text and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), 9)
    return True
"""


@needs_datatrove
@pytest.mark.slow
def test_a_killed_task_is_started_again_alone(corpus, prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(KEEP, encoding="utf-8")
    config = KEYS | settings(corpus, tmp_path / "out", tasks=2, workers=2, rules="keep=own.py:keep")
    with pytest.raises(UserError, match="1 of 2 tasks of inspect did not finish"):
        cluster.main(config)
    (done,) = (tmp_path / ".out.cluster.tmp" / "log" / "inspect" / "completions").iterdir()
    log = done.parent.parent / "logs" / f"task_{done.name}.log"
    os.link(log, tmp_path / "log")  # datatrove begins the log of a task anew
    before = log.read_bytes()
    assert cluster.main(config) == 0
    assert (tmp_path / "log").read_bytes() == before
    assert arrays(tmp_path / "out") == arrays(prepared)
    assert not (tmp_path / ".out.cluster.tmp").exists()
    assert cluster.main(config) == 0  # up to date
    with pytest.raises(UserError, match="holds something else"):
        cluster.main(config | {"near": 0.0})


@needs_datatrove
def test_slurm_gets_a_job_for_each_stage_that_waits_for_the_one_before(
    corpus, tmp_path, monkeypatch
):
    fake, scripts = tmp_path / "bin" / "sbatch", tmp_path / "scripts"
    fake.parent.mkdir()
    scripts.mkdir()
    shown = '{ echo "$@"; cat "${@: -1}"; }'
    save = f"n=$(ls {scripts} | wc -l)\n{shown} > {scripts}/$(printf %02d $n)"
    fake.write_text(
        f"#!/bin/bash\n{save}\necho Submitted batch job $((100 + n))\n", encoding="utf-8"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    own = {
        "executor": "slurm",
        "partition": "cpu",
        "tasks": 3,
        "workers": 2,
        "sbatch": "account=me",
    }
    config = KEYS | settings(corpus, tmp_path / "out", **own)
    with pytest.raises(UserError, match="executor=slurm needs partition"):
        cluster.main(config | {"partition": ""})
    assert cluster.main(config) == 0
    texts = [path.read_text(encoding="utf-8") for path in sorted(scripts.iterdir())]
    jobs = [text for text in texts if "launch_pickled_pipeline" in text]
    names = "inspect equal sign link join compare tokenize cut write finish".split()
    for k, (text, name, n) in enumerate(
        zip(jobs, names, [3, 16, 3, 16, 1, 16, 3, 1, 3, 1], strict=True)
    ):
        for line in (
            f"job-name=out-{name}",
            f"array=0-{n - 1}%2",
            "partition=cpu",
            "account=me",
            "time=1440",
        ):
            assert f"#SBATCH --{line}\n" in text
        assert f"{cluster.ROOT}/tools" in text and f"log/{name}/executor.pik" in text
        # two scripts for each stage: its own, and one that adds its statistics
        waits = f"--dependency=afterok:{100 + 2 * (k - 1)} "
        assert (waits in text.splitlines()[0] + " ") == (k > 0)

    # the same command again: not while these wait or run
    squeue = fake.parent / "squeue"
    squeue.write_text("#!/bin/bash\necho 104\necho 77\n", encoding="utf-8")
    squeue.chmod(0o755)
    with pytest.raises(UserError, match="earlier command wait or run: 1; .*scancel 104$"):
        cluster.main(config)
    assert len(list(scripts.iterdir())) == len(texts)
    squeue.write_text("#!/bin/bash\necho Invalid job id >&2; exit 1\n", encoding="utf-8")
    assert cluster.main(config) == 0
    assert len(list(scripts.iterdir())) == 2 * len(texts)
