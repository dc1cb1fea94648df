"""tools/reading.py on a small project whose figures are counted by hand."""

import subprocess
import sys
from pathlib import Path

import pytest
import reading

ROOT = Path(__file__).parent.parent.parent
FILES = {
    "pretrain.py": '''"""Doc."""

import ddp

n_layer = 2  # blocks
out_dir = "out"  # where
_hidden = 1
SIZE = 3

if __name__ == "__main__":
    import groundup.late
''',
    "ddp.py": """from groundup.parts import thing


def step() -> None:
    from groundup.parts import deep

    # one
    deep()


if __name__ == "__main__":
    from groundup import unused
""",
    "groundup/__init__.py": "",
    "groundup/late.py": "x = 1\n",
    "groundup/unused.py": "x = 1\n",
    "groundup/parts/__init__.py": "",
    "groundup/parts/thing.py": "import os\n",
    "groundup/parts/deep.py": "def deep() -> None:\n" + "    pass\n" * 41,
    "tests/test_x.py": "x = 1\n" * 1000,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_imports_within_functions_count_but_not_the_main_block_of_others(project):
    names = {
        path.relative_to(project).as_posix()
        for path in reading.closure(project, project / "pretrain.py")
    }
    assert names == {
        "pretrain.py",
        "ddp.py",
        "groundup/late.py",
        "groundup/parts/thing.py",
        "groundup/parts/deep.py",
    }


def test_the_figures_of_a_room_are_those_counted_by_hand(project):
    # ddp.py: 12 lines, of which 7 are not blank: 37, 20, 41, 9, 10, 26, 31 columns; one comment
    row = reading.text_row("room", [project / "ddp.py"]).split()
    assert row[:4] == ["room", "1", "12", "26"] and row[6] == f"{100 / 7:.1f}"


def test_the_report_names_settings_and_long_functions(project):
    text = reading.report(project, "pretrain.py")
    assert text.startswith("pretrain.py imports, itself included: 5 files, 67 lines\n")
    assert "settings: pretrain.py 2\n" in text
    assert "functions over 40 lines: 1\n     42  groundup/parts/deep.py:1 deep" in text
    assert "all outside tests        8" in text  # tests are left out


def test_the_command(project):
    command = [sys.executable, ROOT / "tools/reading.py", "ddp.py", f"--root={project}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ddp.py imports, itself included: 4 files")
