"""Conversations and preference pairs made from the documentation that every Python carries, for the demo and the debug
runs: what a function, method, class, module or topic is, how it is called, what an example prints.

Everything is chosen by hashes of names: the same Python gives the same data in the same order.
"""

import ast
import builtins
import decimal
import doctest
import hashlib
import importlib
import inspect
import itertools
import math
import re
import textwrap
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from groundup.demo.python_docs import library_sources, python_docs

MIN_WORDS, MAX_CHARS = 3, 600  # of a description: shorter says nothing, longer does not fit a small model's window
CHINESE_EVERY, FOLLOW_UP_EVERY = 12, 3  # one subject in 12 is asked about in Chinese, one in 3 in two turns
C_MODULES = (builtins, itertools, math)  # written in C: their documentation is in no source file

QUESTIONS = {
    "function": (
        "What does {} do?", "What does the Python function {} do?", "Describe the function {}.", "Explain {}.",
        "What is {} for?", "Tell me what the function {} does.",
    ),
    "method": (
        "What does the method {} do?", "What does {} do?", "Describe the method {}.", "Explain what {} does.",
        "What is the method {} for?",
    ),
    "attribute": ("What is {}?", "What does the attribute {} hold?", "Describe the attribute {}."),
    "class": ("What is {}?", "What is the class {} for?", "Describe the class {}.", "Explain the Python class {}."),
    "module": (
        "What is the module {} for?", "What is in the Python module {}?", "Describe the module {}.",
        "What does the module {} of the standard library do?",
    ),
    "topic": (
        "What does the Python reference say about this: {}?", "Explain this topic of the Python language: {}.",
        "In Python, what is there to know about this: {}?",
    ),
    "example": (
        "What does Python print?", "What is the result of this?", "What is the output of this code?",
        "What does this print in Python?",
    ),
    "call": ("What are its arguments?", "How is it called?", "Which arguments does it take?", "How do I call it?"),
}  # fmt: skip

CHINESE = {  # the same questions
    "function": (
        "{} \u8fd9\u4e2a\u51fd\u6570\u6709\u4ec0\u4e48\u7528\uff1f", "\u51fd\u6570 {} \u505a\u4ec0\u4e48\uff1f",
    ),
    "method": ("\u65b9\u6cd5 {} \u6709\u4ec0\u4e48\u7528\uff1f", "\u8bf7\u8bf4\u660e {} \u65b9\u6cd5\u3002"),
    "attribute": ("\u5c5e\u6027 {} \u662f\u4ec0\u4e48\uff1f",),
    "class": ("\u7c7b {} \u662f\u4ec0\u4e48\uff1f", "\u8bf7\u4ecb\u7ecd\u4e00\u4e0b {} \u7c7b\u3002"),
    "module": ("\u6a21\u5757 {} \u6709\u4ec0\u4e48\u7528\uff1f", "\u8bf7\u4ecb\u7ecd\u6a21\u5757 {}\u3002"),
    "topic": ("\u8bf7\u89e3\u91ca Python \u7684\u8fd9\u4e2a\u6982\u5ff5\uff1a{}",),
    "example": ("\u8fd9\u6bb5 Python \u4ee3\u7801\u8f93\u51fa\u4ec0\u4e48\uff1f",),
    "call": ("\u5b83\u6709\u54ea\u4e9b\u53c2\u6570\uff1f", "\u600e\u4e48\u8c03\u7528\u5b83\uff1f"),
}  # fmt: skip


class Subject(NamedTuple):
    """Something that is documented, and can be asked about."""

    name: str  # heapq.merge
    kind: str  # a key of QUESTIONS
    text: str  # its documentation
    call: str | None = None  # its arguments: (*iterables, key=None); None if unknown
    module: str = ""  # where it is documented: heapq, or "topics" for the language reference


def docs_rows(kind: str) -> Iterator[str | dict]:
    """Yield the input `python-docs` of prepare.py as rows of this kind: text, chat or preference."""
    if kind == "text":
        return python_docs()
    if kind == "chat":
        return ({"messages": messages} for messages in docs_conversations())
    return docs_pairs()


def docs_conversations() -> Iterator[list[dict]]:
    """Yield conversations [{"role", "content"}, ...] about every subject once, then about every example whose output is
    as documented (each is run first). In English, some questions in Chinese."""
    for subject, answer in described():
        yield conversation(subject, answer)
    seen = set()
    for code, printed in itertools.chain.from_iterable(map(executed, docs_subjects())):
        if code not in seen:
            seen.add(code)
            question = phrase("example", code)
            yield [message("user", f"{question}\n{code}"), message("assistant", printed)]


@cache
def docs_subjects() -> tuple[Subject, ...]:
    return (*topic_subjects(), *c_subjects(), *library_subjects())


def described() -> Iterator[tuple[Subject, str]]:
    """Yield each subject that can be asked about, once, with its description."""
    seen = set()
    for subject in docs_subjects():
        answer = first_paragraph(subject.text)
        if answer and subject.name not in seen and is_public(subject):
            seen.add(subject.name)
            yield subject, answer


def conversation(subject: Subject, answer: str) -> list[dict]:
    messages = [question_about(subject), message("assistant", answer)]
    if subject.call is None or zlib.crc32(subject.name.encode()) % FOLLOW_UP_EVERY:
        return messages
    none = "It takes no arguments: " if subject.call == "()" else ""
    how = f"{none}{subject.name}{subject.call}"
    return [*messages, message("user", phrase("call", subject.name)), message("assistant", how)]


def question_about(subject: Subject) -> dict:
    return message("user", phrase(subject.kind, subject.name, subject.name))


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def phrase(kind: str, key: str, *names: str) -> str:
    """Return one of the phrasings of a question, chosen by a hash of `key`."""
    number = zlib.crc32(key.encode()) // FOLLOW_UP_EVERY
    phrasings = (QUESTIONS if number % CHINESE_EVERY else CHINESE)[kind]
    return phrasings[number // CHINESE_EVERY % len(phrasings)].format(*names)


def is_public(subject: Subject) -> bool:
    """Return whether no part of a name is private. Special methods count as the language reference has them."""
    return subject.kind == "topic" or subject.name.startswith("object.__") or "._" not in f".{subject.name}"


# ---- subjects: what is documented --------------------------------------------------------------------------

DEFINITION = re.compile(r"(?<=\n\n)(?:class |coroutine )?([\w.]+\.\w+)(\([^\n]*\))?\n\n((?: {3}.*\n|\n)+)")
HEADING = re.compile(r"^[=*~^\"-]{3,}$", re.MULTILINE)
NO_TOPIC = re.compile(rf"{HEADING.pattern}|^New in version|\((self|cls)", re.MULTILINE)  # paragraphs to skip


def topic_subjects() -> Iterator[Subject]:
    """Yield the topics of the language reference, and the methods that they describe."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        title, _, text = topics[name].partition("\n")
        parts = re.split(r"\n\s*?\n", text)
        while parts and (not parts[0][:1].isalpha() or NO_TOPIC.search(parts[0])):
            parts.pop(0)
        yield Subject(title.strip(), "topic", "\n\n".join(parts), module="topics")
        for match in DEFINITION.finditer(topics[name]):
            kind = "method" if match[2] else "attribute"
            yield Subject(match[1], kind, textwrap.dedent(match[3]), module="topics")


def c_subjects() -> Iterator[Subject]:
    """Yield the functions, classes and methods of the modules that are written in C."""
    for module in C_MODULES:
        prefix = "" if module is builtins else f"{module.__name__}."
        for name, value in sorted(vars(module).items()):
            if not inspect.isbuiltin(value) and not inspect.isclass(value):
                continue
            kind = "class" if inspect.isclass(value) else "function"
            yield Subject(prefix + name, kind, inspect.getdoc(value) or "", signature(value), module.__name__)
            for own, method in sorted(vars(value).items()) if kind == "class" else ():
                if inspect.ismethoddescriptor(method):
                    call = signature(method, bound=not isinstance(method, staticmethod))
                    text = inspect.getdoc(method) or ""
                    yield Subject(f"{prefix}{name}.{own}", "method", text, call, module.__name__)


def signature(value: object, bound: bool = False) -> str | None:
    """Return the arguments of a C function as source code, None if unknown. bound: without self."""
    try:
        parameters = inspect.signature(value)
    except (ValueError, TypeError):
        return None
    own = list(parameters.parameters.values())[bound:]
    return str(parameters.replace(parameters=own))


def library_subjects() -> Iterator[Subject]:
    for module, source in library_sources():
        name = {"_pydecimal": "decimal"}.get(module, module)  # the documented Python twin of a C module
        for subject in subjects_in(ast.parse(source), name):
            yield subject._replace(module=name)


def subjects_in(node: ast.AST, name: str, in_class: bool = False) -> Iterator[Subject]:
    """Yield a module, class or function, and every class and function in it that can be used from outside."""
    text = ast.get_docstring(node) or ""
    if isinstance(node, ast.Module):
        yield Subject(name, "module", text)
    elif isinstance(node, ast.ClassDef):
        makers = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        yield Subject(name, "class", text, arguments(makers[0], True) if makers else None)
    else:
        marks = [ast.unparse(mark) for mark in node.decorator_list]
        if any(re.search(r"property|\.(setter|deleter)$", mark) for mark in marks):
            yield Subject(name, "attribute", text)
        else:
            call = arguments(node, bound=in_class and "staticmethod" not in marks)
            yield Subject(name, "method" if in_class else "function", text, call)
        return
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from subjects_in(child, f"{name}.{child.name}", isinstance(node, ast.ClassDef))


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool) -> str:
    """Return the arguments as written in the source. bound: without the first one, which is self or cls."""
    text = ast.unparse(function.args)
    if bound and (function.args.posonlyargs or function.args.args):
        text = text.partition(", ")[2].removeprefix("/").removeprefix(", ")
    return f"({text})"


LISTED = re.compile(r"\s|[*-] |\d+\. ")
WORD_BREAK = re.compile(r"(?<=\w-)\n\s*(?=\w)")  # pseudo-
SIGNATURE = re.compile(r"[\w.]+\s?\(.*\)(\s*[-=]+>?(?:\s*\S+){0,4})?:?", re.DOTALL)
NOT_PROSE = re.compile(r">>>|::=|\$|\||^\s*(Copyright|Author|Written|Created|Usage|Arguments)|^\W*$", re.IGNORECASE)


def first_paragraph(text: str) -> str:
    """Return the first paragraph that says something, its lines joined, or "" if it is missing, too short or too long.
    If it ends with a colon, what it announces follows as it is written."""
    parts = [part.rstrip() for part in re.split(r"\n\s*?\n", text) if part.strip()]
    while parts and all(map(SIGNATURE.fullmatch, parts[0].strip().split("\n"))):
        parts.pop(0)
    if not parts:
        return ""
    answer = flow(parts[0])
    bad = NOT_PROSE.search(answer) or HEADING.search(parts[0]) or SIGNATURE.fullmatch(answer)
    if answer.endswith(":"):
        listed = list(itertools.takewhile(LISTED.match, parts[1:])) or parts[1:2]
        answer = "\n\n".join([answer, *listed]) if listed else ""
    return answer if len(answer.split()) >= MIN_WORDS and len(answer) <= MAX_CHARS and not bad else ""


def flow(paragraph: str) -> str:
    """Join the lines of a paragraph, unless they are laid out as code or a list."""
    lines = textwrap.dedent(paragraph).split("\n")
    laid_out = any(re.match(r"\s|[-*] ", line) for line in lines[1:])
    return "\n".join(lines).strip() if laid_out else " ".join(WORD_BREAK.sub("", paragraph).split())


# ---- examples ----------------------------------------------------------------------------------------------

EXECUTED = "collections decimal difflib enum fractions heapq ipaddress json statistics textwrap"  # no side effects
UNSAFE = "__import__ breakpoint compile eval exec exit help input open quit"  # what no example may call
MAX_CODE_CHARS = 400  # of an example with the lines that it needs
# Output that differs between processes: loaded classes, addresses, the order of sets.
VARIES = re.compile(r"__subclasses__|<BLANKLINE>|doctest:|0x[0-9a-f]{4}|\bset\(|\{(?![^{}]*:)[^{}]*,")
IMPORT = re.compile(r"import |from ")
PRIVATE = re.compile(r"\b_[a-z]")
MISSING = object()


def executed(subject: Subject) -> Iterator[tuple[str, str]]:
    """Yield (code as at Python's prompt, its output) for each example that prints what its documentation says. The code
    begins with what it needs: imports, and earlier lines of the same documentation."""
    module = subject.name.split(".")[0]
    names = vars(importlib.import_module(module)) if module in EXECUTED.split() and subject.kind != "topic" else {}
    ours = names or subject.kind == "topic" or hasattr(builtins, module)
    if ">>>" not in subject.text or not ours:
        return
    try:
        examples = doctest.DocTestParser().get_examples(subject.text)
    except ValueError:  # not written as the parser wants it
        return
    for number, example in enumerate(examples):
        if example.exc_msg or not example.want.strip() or VARIES.search(example.source + example.want):
            continue
        if example.want[0].isspace():  # a conversation has no white space around what is said
            continue
        earlier = [e.source for e in examples[:number] if not e.want and not IMPORT.match(e.source)]
        for sources in ([example.source], [*earlier, example.source]):
            if prints(sources, example.want, names):
                code = imports(sources, module, names) + "".join(map(at_prompt, sources))
                if len(code) <= MAX_CODE_CHARS and not PRIVATE.search(code):
                    yield code.rstrip("\n"), example.want.rstrip("\n")
                break


def prints(sources: list[str], want: str, names: dict) -> bool:
    """Return whether, to doctest, the last of the sources prints `want` and those before it print nothing."""
    wants = [*([""] * (len(sources) - 1)), want]
    examples = [doctest.Example(source, text) for source, text in zip(sources, wants, strict=True)]
    safe = {name: value for name, value in vars(builtins).items() if name not in UNSAFE.split()}
    around = {**names, "__builtins__": safe, "__name__": "__main__"}  # as at the prompt
    test = doctest.DocTest(examples, around, "example", None, None, None)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.DONT_ACCEPT_TRUE_FOR_1)
    with decimal.localcontext():  # examples may set the precision
        failed = runner.run(test, out=lambda text: None).failed
    vars(builtins).pop("_", None)  # where an expression at the prompt leaves its value
    return not failed


def imports(sources: list[str], module: str, names: dict) -> str:
    """Return the lines that import what the sources use of a module."""
    used = {node.id for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    own = sorted(name for name in used & set(names) if names[name] is not getattr(builtins, name, MISSING))
    lines = [f">>> import {module}\n"] if names and module in used and module not in own else []
    return "".join(lines) + (f">>> from {module} import {', '.join(own)}\n" if own else "")


def at_prompt(source: str) -> str:
    first, *rest = source.rstrip("\n").split("\n")
    return "".join([f">>> {first}\n", *(f"... {line}\n" for line in rest)])


# ---- preference pairs --------------------------------------------------------------------------------------

SIMILAR = 0.2  # two answers have similar lengths if they differ by at most this fraction of the longer
SENTENCE = re.compile(r"\S.*?(?:[.!?](?=\s)|$)", re.DOTALL)
MAX_SENTENCE = 200  # characters of a sentence that is repeated


def docs_pairs() -> Iterator[dict]:
    """Yield {"prompt", "chosen", "rejected"}: a first question of docs_conversations (examples excluded), the right
    description, and a wrong one: it describes something else in the same module, or stops in the middle of a sentence,
    or repeats itself. A hash of the name decides which, so the wrong answer is the longer one half of the time."""
    found = list(described())
    answers = {}
    for subject, answer in found:
        answers.setdefault(subject.module, []).append(answer)
    for subject, answer in found:
        name = subject.name
        wrong = (another(name, answer, answers[subject.module]), stopped(name, answer), repeated(name, answer))
        if possible := list(filter(None, wrong)):
            yield {"prompt": [question_about(subject)], "chosen": answer, "rejected": pick(f"way {name}", possible)}


def pick(key: str, items: Sequence[str | int]) -> str | int:
    """Return one of the items, by a hash of the key (not crc32: its values for keys with the same end are related)."""
    return items[int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % len(items)]


def another(name: str, answer: str, answers: list[str]) -> str:
    """Return another of the answers, of similar length if there is one, else the nearest in length; "" if none."""
    gaps = {text: abs(len(text) - len(answer)) for text in answers if text != answer}
    near = [text for text, gap in gaps.items() if gap <= SIMILAR * max(len(text), len(answer))]
    return pick(f"another {name}", near) if near else min(gaps, key=gaps.get, default="")


def stopped(name: str, answer: str) -> str:
    """Return the answer up to a word in its middle that ends no sentence; "" if it has none."""
    ends = [match.end() for match in re.finditer(r"\S+", answer) if match[0][-1] not in ".!?:;"]
    middle = [end for end in ends if 0.3 * len(answer) <= end <= 0.8 * len(answer)]
    return answer[: pick(f"stopped {name}", middle)] if middle else ""


def repeated(name: str, answer: str) -> str:
    """Return the answer with one sentence said two or three times, or its last words said three or four times."""
    sentence = pick(f"sentence {name}", SENTENCE.findall(answer))
    times = pick(f"times {name}", (2, 2, 3))
    if pick(f"repeated {name}", (True, False)) and len(sentence) <= MAX_SENTENCE:
        return answer.replace(sentence, " ".join([sentence] * times), 1)
    body = answer.rstrip(". ")
    n_words = pick(f"words {name}", (2, 3, 4, 5))
    phrase = re.search(rf"(?:\S+\s+){{0,{n_words - 1}}}\S+$", body)[0]
    return " ".join([body, *[phrase] * times]) + answer[len(body) :]
