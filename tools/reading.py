"""How much a reader has to read: imports, line lengths, comments, bytes, settings, long functions.

    python tools/reading.py                   # for pretrain.py
    python tools/reading.py dpo.py            # the imports of another script
    python tools/reading.py --root=../other   # of another copy of the project

The figures inform (docs/design.md, "What we optimise for"); nothing fails.
"""

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles

sys.path.insert(0, str(Path(__file__).parent.parent))

from configurator import defaults_of, is_key
from groundup.errors import end_in_one_line

ROOT = Path(__file__).parent.parent
TRAINERS = ("pretrain.py", "sft.py", "dpo.py", "reward.py", "rl.py")
LONG = 40  # lines of a function
MOST = 100  # columns of a line


def python_files(root: Path) -> list[Path]:
    """Return the Python files of the project, without tests and what runs have made."""
    folders = ("config", "docs", "groundup", "tools")
    return sorted([
        *root.glob("*.py"),
        *(path for f in folders for path in (root / f).rglob("*.py")),
    ])


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


# ---- imports -------------------------------------------------------------------------


def modules_in(root: Path) -> dict[str, Path]:
    """Return {module name: file} of what a script at the root can import."""
    found = {}
    for path in [*root.glob("*.py"), *root.glob("groundup/**/*.py")]:
        if path.name != "__init__.py":
            found[".".join(path.relative_to(root).with_suffix("").parts)] = path
    return found


def is_main_block(node: ast.AST) -> bool:
    """Return whether this is `if __name__ == "__main__":`, which does not run on import."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def imported_names(path: Path, as_script: bool) -> Iterator[str]:
    """Yield the names of modules that a file imports, also inside functions."""
    for statement in parse(path).body:
        if is_main_block(statement) and not as_script:
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                # `from a import b`: b may be a file or a name in a.py
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def closure(root: Path, script: Path) -> list[Path]:
    """Return the script and all files of the project that it imports, directly or indirectly."""
    modules = modules_in(root)
    found, waiting = [], [script]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.append(path)
        names = imported_names(path, as_script=path == script)
        waiting += [modules[name] for name in names if name in modules]
    return sorted(found)


# ---- text ----------------------------------------------------------------------------


def room_of(path: Path, root: Path) -> str:
    """Return the group of files that a line of the table is about."""
    parts = path.relative_to(root).parts
    if parts[0] in TRAINERS:
        return "trainers"
    if parts[0] in ("model.py", "ddp.py"):
        return "model + ddp"
    if len(parts) == 1:
        return "other scripts"
    if parts[0] == "groundup" and len(parts) > 2:
        return f"groundup/{parts[1]}"
    return parts[0]


def n_comments(source: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def text_row(name: str, paths: list[Path]) -> str:
    """Return a line about the text of some files. Lengths are those of non-blank lines."""
    sources = [path.read_text(encoding="utf-8") for path in paths]
    lines = [line for source in sources for line in source.splitlines()]
    lengths = [len(line) for line in lines if line.strip()]
    # [4] is the median, [8] the 90th percentile
    tenths = quantiles(lengths, n=10, method="inclusive")
    comments = 100 * sum(map(n_comments, sources)) / len(lengths)
    too_long = sum(length > MOST for length in lengths)
    kb = sum(path.stat().st_size for path in paths) / 1000
    figures = f"{tenths[4]:>7.0f} {tenths[8]:>6.0f} {too_long:>6,} {comments:>9.1f} {kb:>8,.1f}"
    return f"{name:<20} {len(paths):>5} {len(lines):>8,} {figures}"


def text_table(root: Path) -> list[str]:
    """Return the table of text figures: the whole tree, then room by room."""
    rooms: dict[str, list[Path]] = {}
    files = python_files(root)
    for path in files:
        rooms.setdefault(room_of(path, root), []).append(path)
    # what a reader opens first comes first
    first = ("trainers", "model + ddp", "groundup/train", "groundup/kernels")
    order = [name for name in first if name in rooms]
    order += sorted(rooms.keys() - set(first))
    head = f"{'room':<20} {'files':>5} {'lines':>8} {'median':>7} {'90 %':>6} {'> ' + str(MOST):>6}"
    rows = [f"{head} {'comments':>9} {'KB':>8}", text_row("all outside tests", files)]
    return rows + [text_row(name, rooms[name]) for name in order]


# ---- settings and functions ----------------------------------------------------------


def n_settings(path: Path) -> int:
    """Return the number of settings of a trainer."""
    return sum(is_key(name, value) for name, value in defaults_of(path).items())


def long_functions(root: Path) -> list[tuple[int, str]]:
    """Return (lines, place) of the functions over LONG lines, the longest first."""
    found = []
    for path in python_files(root):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > LONG:
                    found.append((length, f"{path.relative_to(root)}:{node.lineno} {node.name}"))
    return sorted(found, reverse=True)


def report(root: Path, script: str) -> str:
    files = closure(root, root / script)
    sizes = [len(path.read_text(encoding="utf-8").splitlines()) for path in files]
    lines = [f"{script} imports, itself included: {len(files)} files, {sum(sizes):,} lines"]
    for size, path in sorted(zip(sizes, files, strict=True), reverse=True):
        lines.append(f"  {size:>5}  {path.relative_to(root)}")
    lines += ["", "length of non-blank lines in columns; comments per 100 of them"]
    lines += text_table(root)
    trainers = [name for name in TRAINERS if (root / name).exists()]
    settings = [f"{name} {n_settings(root / name)}" for name in trainers]
    lines += ["", f"settings: {', '.join(settings)}"]
    functions = long_functions(root)
    lines += ["", f"functions over {LONG} lines: {len(functions)}"]
    lines += [f"  {length:>5}  {place}" for length, place in functions]
    return "\n".join(lines)


if __name__ == "__main__":
    end_in_one_line()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("script", nargs="?", default="pretrain.py", help="file at the root")
    parser.add_argument("--root", type=Path, default=ROOT, help="directory of the project")
    options = parser.parse_args()
    print(report(options.root.resolve(), options.script))
