"""python_docs.py against the files of the running Python."""

import difflib
import inspect
import os
from pathlib import Path

import pytest

from groundup.demo import python_docs
from groundup.errors import UserError


def test_python_docs_hold_reference_docstrings_and_sources_but_no_tests(monkeypatch):
    """The documents are made of one module: to read the docstrings of all takes seconds."""
    sources, library = dict(python_docs.library_sources()), Path(os.__file__).parent
    assert len(sources) > 400
    for name in ("test/support/__init__.py", "unittest/test/testmock/testmock.py", "idlelib/idle_test/test_run.py"):
        tested = library / name
        if tested.exists():
            assert tested.read_text("utf-8") not in sources.values(), name
    monkeypatch.setattr(python_docs, "library_sources", lambda: [("difflib", sources["difflib"])])
    *topics, module = python_docs.python_docs()
    assert sum(map(len, topics)) > 300_000  # the reference
    assert module.startswith("difflib\n\n" + difflib.__doc__.strip())
    ratio = inspect.cleandoc(difflib.SequenceMatcher.ratio.__doc__)
    assert f"\n\n\ndifflib.SequenceMatcher.ratio\n\n{ratio}" in module
    assert module.endswith("\n\n\n" + Path(difflib.__file__).read_text("utf-8"))


@pytest.mark.parametrize(
    "name",
    ["test/test_os.py", "ctypes/test/test_cast.py", "test_x.py", "site-packages/numpy/a.py", "config-3.11/x.py"],
)
def test_tests_and_local_files_are_no_documentation(name):
    assert not python_docs.is_documentation(Path(name))


def test_modules_are_documentation():
    for name in ("os.py", "unittest/case.py", "json/__init__.py", "doctest.py", "contextlib.py"):
        assert python_docs.is_documentation(Path(name)), name


def test_python_docs_without_sources_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(python_docs.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match=f"no sources of the standard library in {tmp_path}"):
        list(python_docs.python_docs())
