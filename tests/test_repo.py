"""What holds for the repository as a whole: who imports whom, importing does nothing, every script explains itself."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configurator import read_file

ROOT = Path(__file__).parent.parent
MODULES = {path.stem for path in ROOT.glob("*.py")}
BASE = {"configurator", "readers", "shapes", "filters", "dedup", "bpe", "tokenizer", "mixture", "data"}
BASE |= {"sampling", "completion", "generate", "chat_files", "conversations", "lora", "memory_plan", "runs"}
BASE |= {"answer_pairs", "run_card", "pairs", "preference", "token_logps", "reward_model", "reward_scores"}
BASE |= {"decontaminate", "difficulty", "corpus", "pipeline", "selection", "show", "prepare"}
BASE |= {"critic", "policy_gradient", "prompts", "rewards", "rollouts"}
BASE |= {"merge", "model", "optim", "ranks", "ddp", "checkpoint", "train_utils", "sample"}
MAY_IMPORT = {
    "configurator": set(),
    "shapes": set(),
    "readers": {"shapes"},
    "filters": {"configurator"},
    "dedup": set(),
    "decontaminate": {"dedup", "readers"},
    "bpe": {"readers"},
    "tokenizer": {"configurator", "readers", "shapes", "bpe"},
    "data": {"readers", "mixture"},
    "mixture": {"readers"},
    "corpus": set(),
    "pipeline": {"readers", "shapes", "filters", "dedup", "decontaminate", "tokenizer", "data"},
    "selection": {"dedup", "pipeline"},
    "show": {"corpus", "data", "dedup", "pipeline", "readers", "shapes", "tokenizer"},
    "prepare": {"bpe", "chat_files", "configurator", "corpus", "data", "decontaminate", "dedup", "difficulty"}
    | {"answer_pairs", "pipeline", "readers", "selection", "show", "tokenizer"},
    "difficulty": {"filters"},
    "pairs": {"chat_files", "conversations", "data", "mixture", "pipeline", "readers", "selection", "shapes"}
    | {"tokenizer"},
    "token_logps": {"model"},
    "reward_model": {"checkpoint", "ddp", "lora", "model", "pairs", "tokenizer", "train_utils"},
    "preference": {"checkpoint", "configurator", "ddp", "lora", "model", "pairs", "token_logps", "train_utils"},
    "chat_files": {"data", "pipeline", "readers", "selection", "shapes", "tokenizer"},
    "conversations": {"chat_files", "data", "mixture", "readers", "tokenizer"},
    "model": set(),
    "optim": set(),
    "ranks": set(),
    "ddp": {"ranks"},
    "lora": {"model"},
    "direct_file": set(),
    "checkpoint": {"ddp", "direct_file", "lora", "model", "tokenizer"},
    "merge": {"checkpoint", "configurator", "lora", "model", "tokenizer"},
    "train_utils": {"ddp"},
    "run_card": {"train_utils"},
    "answer_files": set(),
    "score_tables": set(),
    "reward_scores": {"answer_files", "answer_pairs", "checkpoint", "readers", "reward_model", "shapes", "tokenizer"},
    "policy_gradient": set(),
    "rewards": {"checkpoint", "configurator", "reward_model", "tokenizer"},
    "prompts": {"answer_pairs", "chat_files", "conversations", "data", "mixture", "pipeline", "readers", "selection"}
    | {"shapes", "tokenizer"},
    "rollouts": {"data", "generate", "mixture", "model", "pairs", "policy_gradient", "prompts", "rewards", "sampling"}
    | {"token_logps", "tokenizer", "train_utils"},
    "critic": {"checkpoint", "ddp", "lora", "optim", "policy_gradient", "reward_model", "rewards", "rollouts", "runs"}
    | {"tokenizer", "train_utils"},
    "chat_client": set(),
    "likelihood": {"ddp", "model", "train_utils"},
    "domains": {"likelihood", "model", "readers", "tokenizer"},
    "row_scores": {"ddp", "domains", "likelihood", "model", "readers", "reward_scores", "shapes", "tokenizer"},
    "choices": {"generate", "likelihood", "model", "readers", "tokenizer"},
    "evaluate": {"checkpoint", "choices", "configurator", "ddp", "domains", "generate", "generated", "judging"}
    | {"model", "readers", "reward_model", "row_scores", "sampling", "score_tables", "tokenizer", "train_utils"},
    "generated": {"chat_files", "ddp", "filters", "generate", "model", "readers", "sample", "sampling", "tokenizer"},
    "judging": {"answers", "chat_client", "conversations", "ddp", "generated", "pairs", "readers", "reward_model"}
    | {"tokenizer"},
    "write_behind": {"ranks"},
    "runs": {"checkpoint", "configurator", "data", "ddp", "lora", "model", "optim", "tokenizer", "train_utils"}
    | {"write_behind"},
    "memory_plan": {"configurator", "ddp", "model", "train_utils"},
    "sampling": set(),
    "completion": {"model", "sampling", "tokenizer"},
    "generate": {"completion", "lora", "model", "sampling", "tokenizer"},
    "chat": {"generate", "model", "sampling", "tokenizer"},
    "answer_pairs": {"answer_files", "data", "pipeline", "readers", "shapes"},
    "best_of": {"completion", "reward_model", "sampling", "tokenizer"},
    "answers": {"answer_files", "generate", "model", "sampling", "tokenizer"},
    "sample": {"answers", "chat", "checkpoint", "configurator", "generate", "model", "sampling", "tokenizer"}
    | {"best_of", "reward_model", "train_utils"},
}
TRAINERS = ("pretrain", "sft", "dpo", "reward", "rl")
SCRIPTS = ("tokenizer", "prepare", "pretrain", "sft", "dpo", "reward", "merge", "sample", "evaluate", "rl")


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return names


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_one_way(module):
    allowed = BASE if module in TRAINERS else MAY_IMPORT[module]
    assert imports(ROOT / f"{module}.py") & MODULES <= allowed


def test_data_work_starts_without_torch():
    code = "import sys, tokenizer, prepare, data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_importing_prints_nothing_and_makes_nothing(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {', '.join(sorted(MODULES))}"
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
    for path in ROOT.glob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        bad = [f"{path.name}:{i}" for i, line in enumerate(lines, 1) if not line.isascii()]
        assert not bad or path.stem == "prepare", bad  # prepare.py carries a few Chinese sentences as data
