"""tools/dedup_datatrove.py on planted copies: one of each family survives, and everything that is alone."""

import gzip
import itertools
import json
import os
import random
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from groundup.files import readers

ROOT = Path(__file__).parents[2]
NEEDED = ("datatrove", "orjson", "regex", "tokenizers")
MISSING = [name for name in NEEDED if not find_spec(name)]
needs_datatrove = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed")

ZH = "天地人山水火木金土日月风云雨雪花草鸟鱼虫春夏秋冬东西南北高低长短来去开关书画琴棋茶酒米面衣食住行车船路桥"
EN = [a + b for a in "ba ko mi tru sel nor pa vi".split() for b in "den ra lis mo ket un".split()]


SHORT = "Too short", "too SHORT!"  # for runs of five


def make_text(random_: random.Random, chinese: bool, n: int) -> str:
    """n units of noise: no two texts have much in common."""
    units = random_.choices(ZH if chinese else EN, k=n)
    marks = random_.choices(["", "", "", "", "，" if chinese else ","], k=n)
    return ("" if chinese else " ").join(unit + mark for unit, mark in zip(units, marks, strict=True))


def edit(random_: random.Random, text: str, chinese: bool, share: float) -> str:
    """text with `share` of its units, in a row, replaced, and other punctuation, case and white space."""
    units = shape(text)
    n = max(1, round(share * len(units)))
    at = random_.randrange(len(units) - n)
    units[at : at + n] = shape(make_text(random_, chinese, n))
    return "「" + "".join(units) + "」\n" if chinese else " ".join(units).upper() + " ."


def shape(text: str) -> list[str]:
    """The units of such a text, by a rule of its own."""
    return re.findall(r"[a-z]+|[^\W\da-z]", text.lower())


def similarity(a: str, b: str) -> float:
    one, other = ({tuple(s[i : i + 5]) for i in range(len(s) - 4)} for s in (shape(a), shape(b)))
    return len(one & other) / len(one | other)


def make_corpus() -> dict[str, int]:
    """300 texts and the family of each: 150 alone, 25 families of an original and its copies with 1 to 5 % edited."""
    random_ = random.Random(1)
    families = {}
    for family in range(175):
        chinese, n_copies = family % 2 == 0, 0 if family < 150 else 5
        text = make_text(random_, chinese, random_.randint(200, 400))
        families[text] = family
        for k in range(n_copies):
            families[edit(random_, text, chinese, (k + 1) / 100)] = family
    return families


def write_corpus(folder: Path, families: dict[str, int]) -> None:
    """In files of which one is compressed, one damaged and one empty; some texts twice or three times."""
    texts = [*families, *list(families)[140:160], *list(families)[150:155]]
    random.Random(2).shuffle(texts)
    lines = [json.dumps({"body": {"text": text}, "n": i}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    folder.mkdir()
    (folder / "a.jsonl").write_text("\n".join([*lines[:100], '{"body": ']) + "\n", encoding="utf-8")
    others = [json.dumps({"body": {"text": text}}) for text in ("", *SHORT)]
    (folder / "b.jsonl").write_text("\n".join([*lines[100:200], *others]), encoding="utf-8")
    (folder / "c.jsonl").write_text("", encoding="utf-8")
    with gzip.open(folder / "d.jsonl.gz", "wt", encoding="utf-8") as f:
        f.write("\n".join(lines[200:]) + "\n")


def run(folder: Path, *flags: str, path: str = "") -> subprocess.CompletedProcess:
    """The tool on folder/in, unless a flag says otherwise."""
    settings = {"--input": f"{folder}/in", "--out": f"{folder}/out", "--text_key": "body.text"}
    settings |= dict(flag.split("=", 1) for flag in flags)
    command = [sys.executable, ROOT / "tools" / "dedup_datatrove.py", *(f"{k}={v}" for k, v in settings.items())]
    env = os.environ | {"PATH": f"{path}:{os.environ['PATH']}"}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)


def read(folder: Path) -> list[str]:
    return [document.text for file in readers.find_files(str(folder)) for document in readers.read_documents(file)]


def check(folder: Path, families: dict[str, int], removed: bool) -> None:
    kept = read(folder / "out")
    assert sorted(families[text] for text in kept if text not in ("", *SHORT)) == list(range(175))  # one of each family
    assert kept.count("") == 1  # no near duplicate of anything; prepare.py counts it
    assert sum(text in SHORT for text in kept) == 1
    assert (folder / "out.removed").exists() == removed
    if removed:
        assert sorted(kept + read(folder / "out.removed")) == sorted(read_input(folder / "in"))


def read_input(folder: Path) -> list[str]:
    files = readers.find_files(str(folder))
    return [document.text for file in files for document in readers.read_documents(file, "body.text")]


@pytest.mark.slow
@needs_datatrove
def test_one_of_each_family_survives(tmp_path):
    families = make_corpus()
    assert len(families) == 300
    originals = {}
    for text, family in families.items():
        assert similarity(originals.setdefault(family, text), text) > 0.86  # 99.7 % of such pairs share a bucket
    assert max(similarity(a, b) for a, b in itertools.combinations(list(originals.values())[::2], 2)) < 0.05
    write_corpus(tmp_path / "in", families)
    done = run(tmp_path, "--tasks=3", "--workers=2", "--exclusion=True")
    assert done.returncode == 0, done.stderr
    assert "328 documents: 151 near duplicates, 177 kept" in done.stdout
    assert "left out: 1 bad_json" in done.stdout
    check(tmp_path, families, removed=True)

    before = sorted((file.name, file.stat().st_mtime_ns) for file in (tmp_path / "out").iterdir())
    again = run(tmp_path, "--tasks=3", "--workers=1", "--exclusion=True")  # nothing is left to do
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert sorted((file.name, file.stat().st_mtime_ns) for file in (tmp_path / "out").iterdir()) == before
    other = run(tmp_path, "--tasks=3", "--near=0.7")
    assert other.returncode == 1 and "other input or settings" in other.stderr and other.stderr.count("\n") == 1


SBATCH = """#!{python}
# Runs the tasks of a job at once, as Slurm would later, where nothing is known of the shell that queued them.
import os, re, subprocess, sys
script = open(sys.argv[-1]).read()
open("{log}", "a").write(" ".join(sys.argv[1:-1]) + "\\n" + script)
env = {{"PATH": os.environ["PATH"], "RUN_OFFSET": "0"}}
for k in range(1 + int(re.search(r"array=0-([0-9]+)", script)[1])):
    code = subprocess.run(["bash"], input=script, text=True, env=env | {{"SLURM_ARRAY_TASK_ID": str(k)}}, cwd="/",
        stdout=subprocess.DEVNULL).returncode
    assert code == 0, (code, script)
print("Submitted batch job", 100 + os.getpid() % 100)
"""
SRUN = '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do [ "$1" = "-n" ] && shift; shift; done\nexec "$@"\n'


@pytest.mark.slow
@needs_datatrove
def test_slurm_jobs_wait_for_each_other_and_need_nothing_of_the_shell(tmp_path):
    families = make_corpus()
    write_corpus(tmp_path / "in", families)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sbatch").write_text(SBATCH.format(python=sys.executable, log=tmp_path / "log"), encoding="utf-8")
    (tools / "srun").write_text(SRUN, encoding="utf-8")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    flags = "--executor=slurm", "--tasks=9", "--tasks_per_job=16", "--partition=cpu", "--sbatch=account=lab,exclusive"
    done = run(tmp_path, *flags, path=f"{tools}:{Path(sys.executable).parent}")
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "log").read_text(encoding="utf-8")
    for line in ("partition=cpu", "account=lab", "exclusive", "time=24:00:00"):
        assert f"#SBATCH --{line}\n" in log
    calls = [line for line in log.splitlines() if line.startswith("--export=")]
    assert [("--dependency=afterok:" in line) for line in calls] == [False, True, True, True]
    assert "177 kept" in done.stdout
    check(tmp_path, families, removed=False)


def test_mistakes_are_one_line(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "x"}\n', encoding="utf-8")
    mistakes = {"--executor=cloud": "executor", "--executor=slurm": "partition"}
    mistakes |= {"--tasks=0": "tasks", "--input=": "input"}
    if MISSING:
        mistakes["--tasks=1"] = "pip install datatrove=="
    else:
        mistakes |= {f"--input={tmp_path}/nothing": "no file matches", f"--out={tmp_path}": "exists already"}
    for flag, what in mistakes.items():
        done = run(tmp_path, flag)
        assert done.returncode == 1 and what in done.stderr and done.stderr.count("\n") == 1, (flag, done.stderr)
