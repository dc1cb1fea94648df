"""What the documents name is there."""

import ast
import functools
import re
from pathlib import Path

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
