"""tools/cluster.py against prepare.py: the same token files to the byte, for any number of tasks, whatever was killed.

Most tests call the stages in this process, for which datatrove is not needed."""

import gzip
import importlib.util
import json
import random
from pathlib import Path

import cluster
import pytest

import prepare
from configurator import is_key
from groundup.text import inputs
from groundup.text import select as selection
from groundup.text import unit as units
from groundup.tokens.token_writer import verify
from groundup.tokens.training import train

WORDS = "the of and model reads every word in a text that people wrote about rivers and hills".split()
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
        texts.append("" if i % 50 == 9 else text)
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
    return given | {"txt_split": "line", "val_fraction": 0.1, "shard_tokens": 3000, "max_bad_fraction": 0.1} | own


def run_stages(config: dict) -> dict:
    """Run all tasks of all stages here, the last task of each first. Return the manifest."""
    job = cluster.make_plan(KEYS | config)
    for name, n in job.stages:
        for rank in reversed(range(n)):
            cluster.STAGES[name](job, rank, n)
    return verify(job.out_dir)


def arrays(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*.npy"))}


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "SHARD_TOKENS", 3000)
        assert prepare.main(PREPARE | {"workers": 1} | settings(corpus, out)) == 0
    return out


@pytest.mark.parametrize("tasks", [1, 3])
def test_the_files_are_those_of_prepare_for_any_number_of_tasks(corpus, prepared, tmp_path, tasks):
    manifest = run_stages(settings(corpus, tmp_path / "out", tasks=tasks))
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
