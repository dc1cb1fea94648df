"""What holds for the repository as a whole: who imports whom, importing does nothing, every script explains itself."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configurator import read_file

ROOT = Path(__file__).parent.parent
# Floors, bottom to top: a file imports from floors below, or from its own room.
FLOORS = (
    ("configurator", "groundup.errors"),
    ("groundup.files", "groundup.demo"),
    ("tokenizer", "groundup.tokens.bpe", "groundup.tokens.foreign"),
    ("groundup.tokens", "model"),
    ("groundup.text",),
    ("groundup.train", "ddp"),
    ("groundup.generate",),
    ("groundup.align",),
    ("groundup.scores",),
    ("prepare", "pretrain", "sft", "dpo", "reward", "rl", "sample", "evaluate"),
)
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in [*ROOT.glob("*.py"), *ROOT.glob("groundup/**/*.py")]
    if path.name != "__init__.py"
}
TRAINERS = ("pretrain", "sft", "dpo", "reward", "rl")
SCRIPTS = ("tokenizer", "prepare", "pretrain", "sft", "dpo", "reward", "tools/merge", "sample", "evaluate", "rl")


def imports(path: Path) -> set[str]:
    """The files of the project that a file imports, also within a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names & FILES.keys()


def room(name: str) -> str:
    """The longest entry of FLOORS that `name` is or lies in."""
    return max((r for floor in FLOORS for r in floor if f"{name}.".startswith(f"{r}.")), key=len)


def floor(name: str) -> int:
    return next(k for k, rooms in enumerate(FLOORS) if room(name) in rooms)


@pytest.mark.parametrize("name", sorted(FILES))
def test_imports_go_down_or_stay_in_the_room(name):
    for other in imports(FILES[name]):
        beside = room(other) == room(name) or floor(name) == floor(other) < len(FLOORS) - 1
        assert floor(other) < floor(name) or beside, f"{name} imports {other}"


def test_no_file_imports_itself_by_way_of_others():
    graph = {name: imports(path) for name, path in FILES.items()}
    while leaves := [name for name, others in graph.items() if not others & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph, f"a cycle among {', '.join(sorted(graph))}"


def test_data_work_starts_without_torch():
    code = "import sys, tokenizer, prepare, data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_importing_prints_nothing_and_makes_nothing(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {', '.join(sorted(FILES))}"
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_every_key_with_a_comment(script):
    done = subprocess.run([sys.executable, ROOT / f"{script}.py", "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    keys = done.stdout.partition("keys (")[2].splitlines()[1:]
    assert len(keys) > 2
    bare = {"n_layer", "n_head", "n_embd", "rope_theta", "norm_eps", "tie_embeddings", "dropout", "max_steps"}
    bare |= {"beta1", "beta2"}
    for line in keys:
        name, _, rest = line.strip().partition(" ")
        assert name in bare or len(rest.split()) > 2, f"{script}: {name} has no comment"


@pytest.mark.parametrize("path", sorted(ROOT.glob("config/*.py")), ids=lambda path: path.name)
def test_configs_set_known_keys_and_say_how_to_run(path):
    """And open with a docstring that gives the command."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    script = next(name for name in TRAINERS if f"{name}.py config/{path.name}" in doc)
    source = (ROOT / f"{script}.py").read_text(encoding="utf-8")
    source = source.partition("# ---- config")[2].partition("\n")[2]
    source = re.split(r"^(?:ARCHITECTURE|# These decide)", source, flags=re.MULTILINE)[0]
    defaults: dict = {}
    exec(source, defaults)  # noqa: S102 - the script's own assignments
    del defaults["__builtins__"]
    config = read_file(str(path), defaults)
    assert config


def optimizer_step(name: str) -> str:
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    return source.partition("# >>> optimizer step")[2].partition("# <<< optimizer step")[0]


def test_optimizer_step_is_the_same_everywhere():
    first, *rest = [name for name in TRAINERS if (ROOT / f"{name}.py").exists()]
    assert "ddp.step(" in optimizer_step(first)
    for name in rest:
        assert optimizer_step(name) == optimizer_step(first), f"{name}: the step drifted from {first}; change both"


def test_text_is_ascii_in_code():
    for path in FILES.values():
        lines = path.read_text(encoding="utf-8").splitlines()
        bad = [f"{path.name}:{i}" for i, line in enumerate(lines, 1) if not line.isascii()]
        assert not bad or path.stem == "prepare", bad  # prepare.py carries a few Chinese sentences as data
