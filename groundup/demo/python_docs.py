"""Texts that are on every machine with Python and this repository: the documentation and source of
the standard library, and a sample of Chinese prose.
"""

import ast
import os
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from groundup.errors import UserError

# Folders that hold tests, tables, programs, or packages installed later
NOT_DOCS = {"test", "tests", "encodings", "idlelib", "lib2to3", "pydoc_data", "turtledemo"}
NOT_DOCS |= {"ensurepip", "site-packages", "dist-packages"}


def python_docs() -> Iterator[str]:
    """Yield the language reference, one document per topic, then one document per module of the
    standard library: its docstrings, then its source. Always in the same order.
    """
    from pydoc_data.topics import topics  # {name: text}: what help("topics") lists

    yield from (topics[name] for name in sorted(topics))
    # The docstrings first: in a window that ends early, prose is worth more than code.
    for module, source in library_sources():
        yield "\n\n\n".join([*docstrings(ast.parse(source), module), source])


def library_sources() -> Iterator[tuple[str, str]]:
    """Yield (name, source) of every documented module of the standard library, always in the same
    order.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, inner, names in os.walk(library):
        # os.walk goes only into what is left; site-packages may be a hundred times larger than all
        # the rest
        inner[:] = set(inner) - NOT_DOCS
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files = [file for file in sorted(files) if is_documentation(file.relative_to(library))]
    if not files:
        what = f"no sources of the standard library in {library}; use other text"
        raise UserError(f"prepare: python-docs: {what}")
    for file in files:
        with tokenize.open(file) as f:  # in the encoding that the file declares
            source = f.read()
        name = ".".join(file.relative_to(library).with_suffix("").parts)
        yield name.removesuffix(".__init__"), source


def is_documentation(file: Path) -> bool:
    """Return whether a file of the standard library is no test and the same on every machine."""
    # How this Python was compiled
    local = file.parts[0].startswith("config-") or file.name.startswith("_sysconfigdata")
    is_test = re.match(r"test_|.*_test\.py$", file.name)
    return not local and not is_test and NOT_DOCS.isdisjoint(file.parts)


def docstrings(node: ast.AST, name: str) -> Iterator[str]:
    """Yield the docstrings of a module, class or function and of everything in it, each under its
    name.
    """
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        if text := ast.get_docstring(node):
            yield f"{name}\n\n{text}"
        for child in node.body:
            yield from docstrings(child, f"{name}.{getattr(child, 'name', '')}")


def chinese_sample() -> list[str]:
    """Return the documents of zh_sample.txt, everyday prose written for this repository."""
    return Path(__file__).with_name("zh_sample.txt").read_text(encoding="utf-8").split("\n\n")


def debug_texts() -> list[str]:
    """Return about 0.2 MB: every second topic of the language reference, and a little Chinese."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)[::2]] + chinese_sample()[:8]
