"""README.md and README.zh.md: every command runs, in the order of the text."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import readme

ROOT = Path(__file__).parent.parent
READMES = ("README.md", "README.zh.md")
RUN = ("README.md", "docs/serving.md", "docs/post_training.md")  # the Chinese pages have the same commands
FIGURE = r"\d[\d,]*\.\d+|\d{1,3}(?:,\d{3})+"


@pytest.mark.slow
def test_every_command_runs_with_small_shapes(tmp_path):
    """Each in a fork of one process, see readme.py: importing torch takes long."""
    command = [sys.executable, ROOT / "tests/readme.py", tmp_path, *(ROOT / name for name in RUN)]
    done = forks.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_command_is_run_or_listed_with_its_reason():
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in RUN]
    found = [readme.commands(text) for text in texts]
    assert sum(map(len, found)) > 50
    for command in sum(found, []):
        assert readme.reason_not_run(command) or (ROOT / readme.arguments(command)[0]).exists(), command
    for part in readme.NOT_RUN:  # none is left over
        assert any(part in command for command in sum(found, [])), part


def test_a_new_command_is_seen():
    text = "Text, `python x.py --a=1`.\n```\ndocker run it\npython y.py \\\n  --b='1\n2'  # why\n```\n"
    text += "```python\nz.py\n```\n```\nstep    3/3 | loss\n```\n"
    assert readme.commands(text) == ["python x.py --a=1", "docker run it", "python y.py   --b='1\n2'  # why"]
    assert readme.arguments("python y.py   --b='1\n2'  # why") == ("y.py", ["--b=1\n2"])
    with pytest.raises(AssertionError, match="neither run nor in NOT_RUN: docker run it"):
        readme.arguments("docker run it")


def test_make_refuses_an_older_python_by_name(tmp_path):
    code = "import sys; code = sys.argv[2]; sys.version_info, sys.version = (3, 10, 2), '3.10.2 x'; exec(code)"
    (tmp_path / "old").write_text(f"#!{sys.executable}\n{code}\n", encoding="utf-8")
    (tmp_path / "old").chmod(0o755)
    for name in ("Makefile", "requirements.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(["make", "demo", "PYTHON=./old", "VENV=.venv"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / ".venv").exists()
    assert " is Python 3.10.2; 3.11 or newer is needed, for example: make PYTHON=python3.12" in done.stderr


def test_make_demo_begins_what_is_older_than_its_data_anew(tmp_path):
    """With a python that prints its arguments, by the times of the files."""
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "RUN $*"\n', encoding="utf-8")
    python.chmod(0o755)
    for name in ("Makefile", "requirements.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / ".venv/core").touch()

    def begun() -> list[str]:
        command = ["make", "demo-chat", "demo-tools", "VENV=.venv"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        runs = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RUN")]
        assert all("--overwrite=True" in run for run in runs if run[0] == "prepare.py")
        flags = ["--resume=never", "--overwrite=True"]
        trained = {run[1]: run[2:] for run in runs if run[1].startswith("config/")}
        trained = {name: [flag for flag in found if flag in flags] for name, found in trained.items()}
        assert len(trained) == 6 and all(found in ([], flags) for found in trained.values())
        return [Path(name).stem for name, found in trained.items() if found]

    assert begun() == []  # nothing is there yet
    data = [tmp_path / f"data/{name}/manifest.json" for name in ("demo", "demo_chat", "demo_pairs")]
    names = ["demo", "demo_sft", "demo_reward", "demo_dpo", "demo_sums", "demo_tools"]
    runs = [tmp_path / f"out/{name}/config.py" for name in names]
    answers = tmp_path / "data/demo_answers.jsonl"
    for path in (*data, *runs, answers):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (1000 + 100 * (path not in data),) * 2)
    assert begun() == [] and answers.exists()
    os.utime(data[2], (1200, 1200))
    assert begun() == ["demo_reward", "demo_dpo"] and answers.exists()
    os.utime(data[0], (1200, 1200))
    assert begun() == names and not answers.exists()


@pytest.mark.parametrize("name", ["demo", "demo_sft", "real_sft"])
def test_settings_for_texts_of_ones_own_have_no_prompts_of_the_demo(name):
    """The Makefile gives these: a model of other texts would continue or answer nonsense."""
    config = (ROOT / f"config/{name}.py").read_text(encoding="utf-8")
    assert "\nsample_prompts" not in config
    assert f"config/{name}.py" in (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    [line] = [line for line in makefile.splitlines() if f" config/{name}.py" in line]
    assert "--sample_prompts='" in line


CHINESE = (ROOT / "README.zh.md", *sorted(ROOT.glob("docs/zh/*.md")))


def test_figures_in_chinese_stand_in_english_too():
    """Decimals and numbers with separators: in README.md, docs or config."""
    others = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("config/*.py")]
    known = set(re.findall(FIGURE, "".join(path.read_text(encoding="utf-8") for path in others)))
    for path in CHINESE:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not [figure for figure in re.findall(FIGURE, line) if figure not in known], line


@pytest.mark.parametrize("path", CHINESE, ids=lambda path: path.name)
def test_a_paragraph_in_chinese_is_one_line(path):
    """A line break would be shown as a space between two characters."""
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for one, other in itertools.pairwise(text.splitlines()):
        is_list = re.match(r"[|#-]|\d+\.", one) and re.match(r"[|-]|\d+\.", other)
        assert not one or not other or is_list, (one, other)


def test_the_chinese_readme_is_the_english_one():
    """The same sections, tables, commands (without their comments) and figures, in the same order."""
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in READMES)
    lines_of = [re.sub(r" +#.*", "", "\n".join(readme.commands(text))).splitlines() for text in (english, chinese)]
    assert lines_of[0] == lines_of[1]
    for pattern in (r"^(#+) ", r"^(\|[-|]+\|)$", r"^```(\w*)$"):
        assert re.findall(pattern, english, re.MULTILINE) == re.findall(pattern, chinese, re.MULTILINE), pattern
    assert sorted(re.findall(FIGURE, english)) == sorted(re.findall(FIGURE, chinese))
    for name in ("common_errors.md", "cost.md", "help.md"):
        tables = [re.findall(r"^\|", (ROOT / path / name).read_text("utf-8"), re.M) for path in ("docs", "docs/zh")]
        assert len(tables[0]) == len(tables[1]) > 10


def test_a_newcomer_can_read_it_on_one_screen_after_the_other():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200 and max(map(len, text.splitlines())) <= 100


PAGES = [ROOT / "README.md", *CHINESE, *sorted(ROOT.glob("docs/*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_settings_of_a_page_exist(path):
    """Every link to a file, every script and config of a command, and every key that it sets."""
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (path.parent / link).exists(), link
    for command in readme.commands(text):
        words = readme.words_of(command)
        script = next((ROOT / word for word in words if word.endswith(".py")), None)
        if readme.reason_not_run(command) or script is None or script.name == "train.py":  # nanoGPT's
            continue
        known = readme.settings_of(script)
        for word in words[words.index(str(script.relative_to(ROOT))) + 1 :]:
            if word.startswith("--") and known:
                assert word[2:].partition("=")[0] in known | {"help"}, (command, word)
            elif word.startswith("config/"):
                assert (ROOT / word).exists(), command
