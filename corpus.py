"""Text that is on every machine that has Python and this repository: what the demo and the debug runs learn from."""

import ast
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

# folders that hold tests, tables, programs, or what is installed later
NOT_DOCS = "test tests encodings idlelib lib2to3 pydoc_data turtledemo ensurepip site-packages dist-packages"


class CorpusError(ValueError):
    one_line = True


def python_docs() -> Iterator[str]:
    """The documentation that every Python carries: its reference, a document per topic; then a document per module of
    the standard library, docstrings as prose followed by the source. Always in the same order."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(library.rglob("*.py")) if is_documentation(file.relative_to(library))]
    if not files:
        raise CorpusError(f"prepare: python-docs: no sources of the standard library in {library}; use other text")
    for file in files:
        with tokenize.open(file) as f:  # in the encoding that the file declares
            source = f.read()
        module = ".".join(file.relative_to(library).with_suffix("").parts).removesuffix(".__init__")
        yield "\n\n\n".join([*docstrings(ast.parse(source), module), source])


def is_documentation(file: Path) -> bool:
    """Whether a file of the standard library is no test and the same on every machine."""
    local = file.parts[0].startswith("config-") or file.name.startswith("_sysconfigdata")
    return not local and not set(NOT_DOCS.split()) & set(file.parts) and not re.match(r"test_|.*_test\.py$", file.name)


def docstrings(node: ast.AST, name: str) -> Iterator[str]:
    """The docstrings of a module, class or function and of all in it, each under its name, as ordered in the source."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        if text := ast.get_docstring(node):
            yield f"{name}\n\n{text}"
        for child in node.body:
            yield from docstrings(child, f"{name}.{getattr(child, 'name', '')}")


def chinese_sample() -> list[str]:
    """The documents of data/zh_sample.txt, everyday prose written for this repository."""
    return Path(__file__).with_name("data").joinpath("zh_sample.txt").read_text(encoding="utf-8").split("\n\n")


def debug_texts() -> list[str]:
    """Some 0.2 MB: half of the reference of the running Python, by topic, and a little Chinese."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)[::2]] + chinese_sample()[:8]
