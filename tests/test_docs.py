"""What the documents name is there."""

import ast
import functools
import re
from pathlib import Path

import pytest

from configurator import defaults_of
from groundup.files import row_formats

ROOT = Path(__file__).parent.parent
NAMED = r"`tests/((?:\w+/)?test_\w+\.py)::(test_\w+)(?:\[(check_\w+)?-?\d?\])?`(?: \(`(check_\w+)`\))?"


@functools.cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


def test_every_known_bug_names_tests_that_exist():
    """A test of several ranks runs functions check_*, which are named in brackets as pytest does, or by themselves."""
    rows = (ROOT / "docs" / "bugs_we_test_for.md").read_text(encoding="utf-8").splitlines()
    rows = [row for row in rows if row.startswith("|") and not row.startswith(("| The bug", "|---"))]
    assert len(rows) > 60
    for row in rows:
        _, bug, seen, tests, _ = row.split("|")
        named = re.findall(NAMED, tests)
        assert bug.strip() and seen.strip() and named and len(named) == tests.count("::"), row
        for file, *names in named:
            assert {name for name in names if name} <= functions(ROOT / "tests" / file), row


def test_the_page_on_data_lists_the_keys_of_all_layouts():
    """An error about rows names it."""
    table = (ROOT / "docs" / "data.md").read_text(encoding="utf-8").partition("| kind | keys |\n")[2]
    for kind, row in zip(row_formats.FORMATS, table.splitlines()[1:5], strict=True):
        assert row.startswith(f"| {kind} ") and row.count("|") == 3, row
        assert re.findall("`(.*?)`", row.split("|")[2]) == row_formats.known_keys(kind), kind


def check_batch(script: str, config: str, flags: str) -> None:
    """A step on one rank is a whole number of micro-steps."""
    settings = defaults_of(ROOT / script) | defaults_of(ROOT / "config" / config)
    settings |= {key: int(value) for key, value in re.findall(r"--(\w+)=(\d+)\b", flags)}
    if "total_batch_pairs" in settings:
        assert settings["total_batch_pairs"] % settings["batch_size"] == 0, (config, flags)
    if "total_batch_tokens" in settings:
        assert settings["total_batch_tokens"] % (settings["batch_size"] * settings["block_size"]) == 0, (config, flags)


@pytest.mark.parametrize("page", ["docs/help.md", "docs/zh/help.md"])
def test_every_value_of_a_log_line_is_explained(page):
    """Those of groundup/train/log.py: without a slash, and no loss that begins all lines."""
    logged = r"# log\n(.*?)\n            log\.train\("
    trainers = [(ROOT / f"{name}.py").read_text("utf-8") for name in ("sft", "dpo", "reward", "rl")]
    sources = [re.search(logged, text, re.S)[1] for text in trainers]
    sources += re.findall(r'figures\["\w+"\]', trainers[-1])
    rollouts = (ROOT / "groundup/align/rollouts.py").read_text("utf-8")
    sources += re.findall(r"^def (?:describe_[acdu]|mean_figures).*?(?=\n\n\n)", rollouts, re.S | re.M)
    shown = set(re.findall(r'"(\w+)"', "\n".join(sources)))
    shown -= {"loss", "lr", "grad_norm", "tokens", "learning_rate", "value_learning_rate"}
    shown -= {"positions", "drawn", "draw_s", "n_calls", "n_failed"}  # of which others are made
    assert shown >= {"labels_per_s", "margin", "flat_groups", "clipped", "draw_ms", "without_call", "value_norm"}
    text = (ROOT / page).read_text("utf-8")
    assert [name for name in sorted(shown) if f"`{name}`" not in text] == []


ON_CPU = r"--compile=False(?:\s+--\w+=\w+)+"


@pytest.mark.parametrize("page", ["README.md", "README.zh.md", "docs/post_training.md", "docs/zh/post_training.md"])
def test_what_pages_add_on_a_cpu_fits_the_configs(page):
    """Where a page says what to add to the commands of tuning, it fits config/sft.py and config/lora.py."""
    added = re.findall(f"`({ON_CPU})`", (ROOT / page).read_text(encoding="utf-8"))
    assert added
    for flags in added:
        for config in ("sft.py", "lora.py"):
            check_batch("sft.py", config, flags)


def test_what_configs_add_on_a_cpu_fits_them():
    n_found = 0
    for path in sorted((ROOT / "config").glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for flags in re.findall(ON_CPU, text):
            check_batch(re.search(r"python (\w+\.py) config/", text)[1], path.name, flags)
            n_found += 1
    assert n_found > 3
