"""python_talks.py against the live objects, Python's own prompt and inspect.signature."""

import ast
import builtins
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from groundup.demo import python_docs, python_talks
from groundup.demo.python_talks import first_paragraph
from groundup.files import row_formats

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def conversations(described):
    with mock.patch.object(python_talks, "described", lambda: iter(described)):
        return list(python_talks.docs_conversations())


@pytest.fixture(scope="module")
def pairs(described):
    with mock.patch.object(python_talks, "described", lambda: iter(described)):
        return list(python_talks.docs_pairs())


def phrasings(kind):
    return [*python_talks.QUESTIONS[kind], *python_talks.CHINESE[kind]]


def test_thousands_of_conversations_each_of_another_question(conversations):
    assert len(conversations) >= 4000
    questions = [turns[0]["content"] for turns in conversations]
    assert len(set(questions)) == len(questions)
    chinese = sum(any("\u4e00" <= c <= "\u9fff" for c in question) for question in questions)
    assert 0.04 < chinese / len(questions) < 0.15
    assert sum(len(turns) == 4 for turns in conversations) > 500
    for turns in conversations:
        roles = [turn["role"] for turn in turns]
        assert roles in (["user", "assistant"], ["user", "assistant"] * 2)
        assert all(turn["content"].strip() == turn["content"] != "" for turn in turns)
        assert row_formats.messages_of({"messages": turns}) == (turns, "")


def test_every_phrasing_is_used(conversations):
    """Each question is made of exactly one form, and no form is never chosen."""
    asked = [turn["content"] for turns in conversations for turn in turns if turn["role"] == "user"]
    for kind in python_talks.QUESTIONS:
        for form in phrasings(kind):
            pattern = re.compile(re.escape(form).replace(re.escape("{}"), r"\S.*"), re.DOTALL)
            assert any(map(pattern.fullmatch, asked)), form


HASHES = """
import hashlib, itertools
from groundup.demo import python_docs, python_talks
sources = python_docs.library_sources
some = lambda: itertools.islice(sources(), 0, None, 40)
python_docs.library_sources = python_talks.library_sources = some
found = list(python_talks.described())
python_talks.described = lambda: found
for texts in (python_docs.python_docs(), python_talks.docs_conversations(), python_talks.docs_pairs()):
    print(hashlib.sha256(repr(list(texts)).encode()).hexdigest())
"""


@pytest.mark.slow
def test_the_same_in_every_process():
    """Whatever the order of sets is there, and whatever modules are loaded. Of every fortieth module."""
    printed = set()
    for seed, code in (("1", HASHES), ("2", "import sqlite3, xml.dom" + HASHES)):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        printed.add(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=env, text=True))
    assert len(printed) == 1 and printed.pop().count("\n") == 3


# ---- descriptions and calls, against the live objects -----------------------------------------------------

MODULES = "bisect csv fnmatch glob heapq json.decoder keyword shutil textwrap string tempfile zipfile".split()


def live_objects():
    """Name and object of the functions and classes written in Python in MODULES, and of their methods."""
    for name in MODULES:
        module = importlib.import_module(name)
        for own, value in vars(module).items():
            if getattr(value, "__module__", "") != name or own.startswith("_"):
                continue
            if inspect.isfunction(value) or inspect.isclass(value):
                yield f"{name}.{own}", value
            for member, method in vars(value).items() if inspect.isclass(value) else ():
                if inspect.isfunction(method) and not member.startswith("_"):
                    yield f"{name}.{own}.{member}", method


def signature(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_answers_are_in_the_docstrings_of_the_live_objects(conversations):
    by_name = {}
    for turns in conversations:
        for word in re.findall(r"[\w.]+\w", turns[0]["content"].split("\n")[0]):
            by_name.setdefault(word, []).append(turns)
    n_checked = n_calls = 0
    for name, value in live_objects():
        for turns in by_name.get(name, []):
            document = "".join((inspect.getdoc(value) or "").split())
            assert "".join(turns[1]["content"].split()) in document, name
            n_checked += 1
            if len(turns) == 4 and inspect.isfunction(value):
                call = turns[3]["content"].removeprefix("It takes no arguments: ").removeprefix(name)
                written = eval(f"lambda {call[1:-1]}: 0", dict(vars(sys.modules[value.__module__])))
                assert signature(written) == [p for p in signature(value) if p[0] != "self"], name
                n_calls += 1
    assert n_checked > 60
    assert n_calls > 12


def test_well_known_answers(conversations):
    answers = {turns[0]["content"]: turns[1]["content"] for turns in conversations}

    def first(name, kind):
        (asked,) = answers.keys() & {form.format(name) for form in phrasings(kind)}
        return answers[asked]

    assert first("textwrap.dedent", "function") == "Remove any common leading whitespace from every line in `text`."
    assert first("math.gcd", "function") == "Greatest Common Divisor."
    assert first("list.append", "method") == "Append object to the end of the list."
    assert first("fractions", "module") == "Fraction, infinite-precision, rational numbers."
    assert "conditional execution" in first('The "if" statement', "topic")
    assert first("object.__len__", "method").startswith('Called to implement the built-in function "len()".')
    assert first("collections.Counter", "class").startswith("Dict subclass for counting hashable items.")


def test_calls_of_methods_leave_out_what_is_bound():
    source = """
class A:
    "An a of its own."
    def __init__(self, size: int = 3, *, deep=False): "Make it ready now."
    def none(self): "Do nothing at all."
    def only(self, /): "Do nothing at all."
    def some(self, /, a, b=(1, 2), *rest, c, **more): "Do all of it."
    def star(*args): "Do it to these."
    @staticmethod
    def free(x, y=None): "Do it for everyone."
    @classmethod
    def made(cls, x): "Make one of x."
    @property
    def held(self): "What it holds now."
    @held.setter
    def held(self, value): "Set what it holds."
def f(x, /, y, *, z=1): "Do it once more."
async def g(): "Wait for it all."
"""
    found = {subject.name: (subject.kind, subject.call) for subject in python_talks.subjects_in(ast.parse(source), "m")}
    assert found == {
        "m": ("module", None),
        "m.A": ("class", "(size: int=3, *, deep=False)"),
        "m.A.__init__": ("method", "(size: int=3, *, deep=False)"),
        "m.A.none": ("method", "()"),
        "m.A.only": ("method", "()"),
        "m.A.some": ("method", "(a, b=(1, 2), *rest, c, **more)"),
        "m.A.star": ("method", "(*args)"),
        "m.A.free": ("method", "(x, y=None)"),
        "m.A.made": ("method", "(x)"),
        "m.A.held": ("attribute", None),
        "m.f": ("function", "(x, /, y, *, z=1)"),
        "m.g": ("function", "()"),
    }


def test_calls_of_c_code_are_those_of_an_instance():
    """What is bound in an instance has no self, as inspect sees it."""
    found = {subject.name: subject.call for subject in python_talks.c_subjects()}
    for instance in ("", b"", bytearray(), [], (), {}, 1, 1.0, set()):
        for name in dir(instance):
            call = found.get(f"{type(instance).__name__}.{name}")
            if call is not None and not name.startswith("_"):
                assert call == str(inspect.signature(getattr(instance, name))), name
    assert found["bytes.maketrans"] == "(frm, to, /)"
    assert found["math.gcd"] in ("(*integers)", None)


def test_nothing_private_and_no_name_of_tests(conversations):
    names = " ".join(turns[0]["content"].split("\n")[0] for turns in conversations)
    assert not re.findall(r"\w\._[a-z]\w*", names)
    assert all(name.startswith("object.") for name in re.findall(r"[\w.]+\.__\w+__", names))
    assert " test." not in names and ".tests." not in names


def test_the_first_paragraph_that_says_something():
    cases = {
        "Return the\nsum  of it.\n\nMore.": "Return the sum of it.",
        "f(x) -> int\nf(x, y)\n\nAdd them all up.": "Add them all up.",
        "f(x) -> the number of things that are in x": "f(x) -> the number of things that are in x",
        "f(x)": "",
        "f(x) -> integer": "",
        "": "",
        "Too short.": "",
        "word " * 200: "",
        "Copyright 1999 by all of us": "",
        "A title here\n============\n\nText of it.": "",
        ">>> f(1, 2, 3)\n6\n": "",
        "A pseudo-\ncode of it.": "A pseudo-code of it.",
        "It is one of these:\n\n* a\n\n* b\n\nMore of it.": "It is one of these:\n\n* a\n\n* b",
        "It is called so:\n\n    f(x)\n\nMore of it.": "It is called so:\n\n    f(x)",
        "There is nothing after this:": "",
        "These are there\n  - one\n  - two": "These are there\n  - one\n  - two",
    }
    assert {text: first_paragraph(text) for text in cases} == cases


def test_no_answer_is_only_a_signature(conversations):
    for turns in conversations:
        line = turns[1]["content"]
        assert not re.fullmatch(r"[\w.]+\([^()]*\)( -> \w+)?", line), turns
        assert len(line) <= python_talks.MAX_CHARS


# ---- preference pairs --------------------------------------------------------------------------------------

AGAIN = re.compile(r"(?<!\S)(\S.*?)(?:\s+\1)+(?!\w)", re.DOTALL)  # the same words twice in a row
CHINESE_TEXT = "\u8fd4\u56de\u5217\u8868\u7684\u957f\u5ea6 \u6216\u8005 \u96f6"  # three words


def way(pair):
    """How the rejected answer is wrong, as it can be seen."""
    chosen, rejected = pair["chosen"], pair["rejected"]
    if chosen.startswith(rejected):
        return "stopped"
    words = {word.rstrip(".") for word in chosen.split()}
    same = all(word.rstrip(".") in words for word in rejected.split())
    return "repeated" if same and len(rejected) > len(chosen) and AGAIN.search(rejected) else "another"


@pytest.fixture(scope="module")
def ways(pairs):
    found = {"stopped": [], "repeated": [], "another": []}
    for pair in pairs:
        found[way(pair)].append(pair)
    return found


def squeezed(text):
    return "".join(text.split())


def test_pairs_ask_what_the_conversations_ask(conversations, pairs):
    asked = [(turns[:1], turns[1]["content"]) for turns in conversations]
    assert [(pair["prompt"], pair["chosen"]) for pair in pairs] == asked
    for pair in pairs:
        found = row_formats.pair_of(pair)[0]
        assert (found.prompt, found.chosen, found.rejected) == (pair["prompt"], pair["chosen"], pair["rejected"])


def test_the_longer_answer_is_as_often_right_as_wrong(pairs, ways):
    for length in (len, lambda text: len(text.split()), lambda text: len(text.encode())):
        gaps = [length(pair["chosen"]) - length(pair["rejected"]) for pair in pairs]
        wins, ties = sum(gap > 0 for gap in gaps), gaps.count(0)
        assert 0.45 < (wins + ties / 2) / len(pairs) < 0.55
    assert all(0.3 < len(found) / len(pairs) < 0.37 for found in ways.values())


def test_stopped_answers_end_in_the_middle_of_a_sentence(ways):
    for pair in ways["stopped"]:
        chosen, rejected = pair["chosen"], pair["rejected"]
        rest = chosen[len(rejected) :]
        assert rest[0].isspace()
        assert rest.strip()
        assert rejected[-1] not in ".!?:;"
        assert 0.25 < len(rejected) / len(chosen) < 0.85


def test_other_answers_are_right_for_something_else_in_the_module(ways):
    """As the module's file has it, whatever subject it belongs to there."""
    sources = {name: squeezed(inspect.getsource(importlib.import_module(name))) for name in [*MODULES, "argparse"]}
    names = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, sources)) + r")(?=[.?\u4e00-\u9fff ]|$)")
    n_checked = 0
    for pair in ways["another"]:
        if found := names.search(pair["prompt"][0]["content"]):
            assert squeezed(pair["rejected"]) in sources[found[1]], pair
            n_checked += 1
    assert n_checked > 30


def test_other_answers_about_builtin_types(ways):
    """They are described in the language reference, else where they are written in C."""
    from pydoc_data.topics import topics

    values = [value for name, value in vars(builtins).items() if callable(value) and not name.startswith("_")]
    members = [member for value in values if inspect.isclass(value) for member in vars(value).values()]
    written_in_c = squeezed("\n".join(inspect.getdoc(value) or "" for value in [*values, *members]))
    reference = squeezed("\n".join(topics.values()))
    n_checked = {True: 0, False: 0}
    for pair in ways["another"]:
        if re.search(r" (list|str|dict|bytes|set|int|float)\.\w+", pair["prompt"][0]["content"]):
            in_c = squeezed(pair["chosen"]) in written_in_c
            assert squeezed(pair["rejected"]) in (written_in_c if in_c else reference), pair
            n_checked[in_c] += 1
    assert min(n_checked.values()) > 10


def test_other_answers_are_of_similar_length():
    lengths = [10, 40, 45, 90, 100, 119, 126, 130, 400]
    answers = [letter * n for letter, n in zip("abcdefghi", lengths, strict=True)]
    chosen = {len(python_talks.another(str(k), "e" * 100, answers)) for k in range(200)}
    assert chosen == {90, 119}  # 126 and 130 are more than a fifth longer, seen from themselves 20.6 % and 23 %
    assert python_talks.another("x", "i" * 400, answers) == "h" * 130  # the nearest
    assert python_talks.another("x", "a" * 10, answers) == "b" * 40
    assert python_talks.another("x", "e" * 100, ["e" * 100]) == ""


def test_stopped_and_repeated_by_hand():
    text = "Add it. Then, when all is there: go on, and end."
    assert {python_talks.stopped(str(k), text) for k in range(200)} == {
        f"Add it. Then, {rest}" for rest in ("when", "when all", "when all is", "when all is there: go")
    }
    assert python_talks.stopped("x", "One. Two. Three.") == python_talks.stopped("x", "\u4e00\u53e5\u8bdd") == ""
    assert python_talks.stopped("x", CHINESE_TEXT) == CHINESE_TEXT[:7]  # the second word ends after 83 %
    assert {python_talks.repeated(str(k), "Add it.") for k in range(200)} == {
        "Add it. Add it.", "Add it. Add it. Add it.", "Add it Add it Add it.", "Add it Add it Add it Add it.",
    }  # fmt: skip
    two = {python_talks.repeated(str(k), "Is a.b it? So it is") for k in range(200)}
    assert {"Is a.b it? Is a.b it? So it is", "Is a.b it? So it is So it is", "Is a.b it? So it is it is it is"} <= two
    assert len(two) == 4 + 8 - 1  # sentences twice, thrice; two to five words, three or four times; one is the same
    assert {python_talks.repeated(str(k), CHINESE_TEXT) for k in range(200)} > {f"{CHINESE_TEXT} {CHINESE_TEXT}"}


# ---- prepare.py --------------------------------------------------------------------------------------------


def test_rows_of_each_kind():
    assert next(iter(python_talks.docs_rows("text"))) == next(python_docs.python_docs())
    assert next(iter(python_talks.docs_rows("chat"))) == {"messages": next(python_talks.docs_conversations())}


def prepared(directory, monkeypatch, kind):
    """The rows that prepare.py makes of python-docs, of train and val; its manifest."""
    import prepare

    config = {key: value for key, value in vars(prepare).items() if type(value) in (bool, int, float, str)}
    config = {key: value for key, value in config.items() if key.islower() and not key.startswith("_")}
    config |= {"input": "python-docs", "kind": kind, "out_dir": str(directory), "workers": 1, "near": 0.0}
    assert prepare.main(config | {"val_fraction": 0.3}) == 0
    lines = [(directory / f"{split}.jsonl").read_text(encoding="utf-8") for split in ("train", "val")]
    manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
    return [json.loads(line) for line in "".join(lines).splitlines()], manifest


def test_prepare_makes_rows_of_the_documentation(tmp_path, monkeypatch, conversations):
    """A few conversations through prepare.py: all are there again, in train and val."""
    few = conversations[::400]
    monkeypatch.setattr(python_talks, "docs_conversations", lambda: iter(few))
    rows, manifest = prepared(tmp_path / "x", monkeypatch, "chat")
    assert sorted((row["messages"] for row in rows), key=str) == sorted(few, key=str)
    assert manifest["kind"] == "chat"
    assert manifest["info"]["inputs"]["files"] == 1
    assert "python-docs" in (tmp_path / "x/inputs.tsv").read_text(encoding="utf-8")


def test_prepare_makes_pairs_of_the_documentation(tmp_path, monkeypatch, pairs):
    few = pairs[::400]
    monkeypatch.setattr(python_talks, "docs_pairs", lambda: iter(few))
    rows, manifest = prepared(tmp_path / "x", monkeypatch, "preference")
    key = lambda row: (row["prompt"][0]["content"], text_of(row["chosen"]), text_of(row["rejected"]))  # noqa: E731
    assert sorted(map(key, rows)) == sorted(map(key, few))
    assert manifest["kind"] == "preference"


def text_of(answer):
    return answer if isinstance(answer, str) else answer[-1]["content"]
