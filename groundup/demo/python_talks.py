"""Conversations and preference pairs made from the documentation that every Python carries, for the
demo and the debug runs: what a function, method, class, module or topic is, and how it is called.

Everything is chosen by hashes of names: the same Python gives the same data in the same order.
"""

import ast
import builtins
import hashlib
import inspect
import itertools
import math
import re
import textwrap
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from groundup.demo.python_docs import library_sources, python_docs

# Of a description: fewer words say nothing, more characters do not fit a small model's window.
MIN_WORDS, MAX_CHARS = 3, 600
# One subject in 12 is asked about in Chinese, one in 3 in two turns.
CHINESE_EVERY, FOLLOW_UP_EVERY = 12, 3
C_MODULES = (builtins, itertools, math)  # written in C: their documentation is in no source file

# Several phrasings of each question: a model should learn the question, not one wording of it.
# {} is the name that is asked about.
QUESTIONS = {
    "function": (
        "What does {} do?",
        "What does the Python function {} do?",
        "Describe the function {}.",
        "Explain {}.",
        "What is {} for?",
        "Tell me what the function {} does.",
    ),
    "method": (
        "What does the method {} do?",
        "What does {} do?",
        "Describe the method {}.",
        "Explain what {} does.",
        "What is the method {} for?",
    ),
    "attribute": ("What is {}?", "What does the attribute {} hold?", "Describe the attribute {}."),
    "class": (
        "What is {}?",
        "What is the class {} for?",
        "Describe the class {}.",
        "Explain the Python class {}.",
    ),
    "module": (
        "What is the module {} for?",
        "What is in the Python module {}?",
        "Describe the module {}.",
        "What does the module {} of the standard library do?",
    ),
    "topic": (
        "What does the Python reference say about this: {}?",
        "Explain this topic of the Python language: {}.",
        "In Python, what is there to know about this: {}?",
    ),
    "call": (
        "What are its arguments?",
        "How is it called?",
        "Which arguments does it take?",
        "How do I call it?",
    ),
}

CHINESE = {  # the same questions; the answers stay English
    "function": (
        "{} \u8fd9\u4e2a\u51fd\u6570\u6709\u4ec0\u4e48\u7528\uff1f",
        "\u51fd\u6570 {} \u505a\u4ec0\u4e48\uff1f",
    ),
    "method": (
        "\u65b9\u6cd5 {} \u6709\u4ec0\u4e48\u7528\uff1f",
        "\u8bf7\u8bf4\u660e {} \u65b9\u6cd5\u3002",
    ),
    "attribute": ("\u5c5e\u6027 {} \u662f\u4ec0\u4e48\uff1f",),
    "class": (
        "\u7c7b {} \u662f\u4ec0\u4e48\uff1f",
        "\u8bf7\u4ecb\u7ecd\u4e00\u4e0b {} \u7c7b\u3002",
    ),
    "module": (
        "\u6a21\u5757 {} \u6709\u4ec0\u4e48\u7528\uff1f",
        "\u8bf7\u4ecb\u7ecd\u6a21\u5757 {}\u3002",
    ),
    "topic": ("\u8bf7\u89e3\u91ca Python \u7684\u8fd9\u4e2a\u6982\u5ff5\uff1a{}",),
    "call": ("\u5b83\u6709\u54ea\u4e9b\u53c2\u6570\uff1f", "\u600e\u4e48\u8c03\u7528\u5b83\uff1f"),
}


class Subject(NamedTuple):
    """Something that is documented, and can be asked about."""

    name: str  # heapq.merge
    kind: str  # a key of QUESTIONS
    text: str  # its documentation
    call: str | None = None  # its arguments: (*iterables, key=None); None if unknown
    module: str = ""  # where it is documented: heapq, or "topics" for the language reference


def docs_rows(kind: str) -> Iterator[str | dict]:
    """Yield the input `python-docs` of prepare.py as rows of this kind: text, chat or
    preference.
    """
    if kind == "text":
        return python_docs()
    if kind == "chat":
        return ({"messages": messages} for messages in docs_conversations())
    return docs_pairs()


def docs_conversations() -> Iterator[list[dict]]:
    """Yield a conversation [{"role", "content"}, ...] about each subject. In English, some
    questions in Chinese.
    """
    for subject, answer in described():
        messages = [question_about(subject), message("assistant", answer)]
        # some go on: "How is it called?" - "heapq.merge(*iterables, key=None)"
        if subject.call is not None and zlib.crc32(subject.name.encode()) % FOLLOW_UP_EVERY == 0:
            none = "It takes no arguments: " if subject.call == "()" else ""
            messages.append(message("user", phrase("call", subject.name)))
            messages.append(message("assistant", f"{none}{subject.name}{subject.call}"))
        yield messages


def described() -> Iterator[tuple[Subject, str]]:
    """Yield each subject that can be asked about, once, with its description."""
    seen = set()  # names: some are documented in several places, and the first one counts
    for subject in itertools.chain(topic_subjects(), c_subjects(), library_subjects()):
        answer = first_paragraph(subject.text)
        if answer and subject.name not in seen and is_public(subject):
            seen.add(subject.name)
            yield subject, answer


def question_about(subject: Subject) -> dict:
    return message("user", phrase(subject.kind, subject.name, subject.name))


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def phrase(kind: str, key: str, *names: str) -> str:
    """Return one of the phrasings of a question, chosen by a hash of `key`."""
    # The hash's remainder by FOLLOW_UP_EVERY has decided about a second turn: use the rest of it,
    # first for the language, then for the words.
    number = zlib.crc32(key.encode()) // FOLLOW_UP_EVERY
    phrasings = (QUESTIONS if number % CHINESE_EVERY else CHINESE)[kind]
    return phrasings[number // CHINESE_EVERY % len(phrasings)].format(*names)


def is_public(subject: Subject) -> bool:
    """Return whether no part of a name is private. Special methods count as the language reference
    has them.
    """
    is_special = subject.name.startswith("object.__")
    return subject.kind == "topic" or is_special or "._" not in f".{subject.name}"


# ---- subjects: what is documented ----------------------------------------------------------------

# In a topic: a name with its arguments, and below, indented by three spaces, what it does
DEFINITION = re.compile(
    r"(?<=\n\n)(?:class |coroutine )?([\w.]+\.\w+)(\([^\n]*\))?\n\n((?: {3}.*\n|\n)+)"
)
HEADING = re.compile(r"^[=*~^\"-]{3,}$", re.MULTILINE)  # the line below a title
# Paragraphs to skip
NO_TOPIC = re.compile(rf"{HEADING.pattern}|^New in version|\((self|cls)", re.MULTILINE)


def topic_subjects() -> Iterator[Subject]:
    """Yield the topics of the language reference, and the methods that they describe."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        title, _, text = topics[name].partition("\n")
        parts = re.split(r"\n\s*?\n", text)
        # begin with the first paragraph of prose
        while parts and (not parts[0][:1].isalpha() or NO_TOPIC.search(parts[0])):
            parts.pop(0)
        yield Subject(title.strip(), "topic", "\n\n".join(parts), module="topics")
        # the special methods that a topic describes, such as object.__len__(self)
        for match in DEFINITION.finditer(topics[name]):
            kind = "method" if match[2] else "attribute"
            yield Subject(match[1], kind, textwrap.dedent(match[3]), module="topics")


def c_subjects() -> Iterator[Subject]:
    """Yield the functions, classes and methods of the modules that are written in C."""
    for module in C_MODULES:
        # people write len, but math.sqrt
        prefix = "" if module is builtins else f"{module.__name__}."
        for name, value in sorted(vars(module).items()):
            if not inspect.isbuiltin(value) and not inspect.isclass(value):
                continue
            kind = "class" if inspect.isclass(value) else "function"
            text = inspect.getdoc(value) or ""
            yield Subject(prefix + name, kind, text, signature(value), module.__name__)
            for own, method in sorted(vars(value).items()) if kind == "class" else ():
                if inspect.ismethoddescriptor(method):
                    call = signature(method, bound=not isinstance(method, staticmethod))
                    text = inspect.getdoc(method) or ""
                    yield Subject(f"{prefix}{name}.{own}", "method", text, call, module.__name__)


def signature(value: object, bound: bool = False) -> str | None:
    """Return the arguments of a C function as source code, None if unknown. bound: without self."""
    try:
        parameters = inspect.signature(value)
    except (ValueError, TypeError):  # range(), for example, has several forms
        return None
    own = list(parameters.parameters.values())[bound:]
    return str(parameters.replace(parameters=own))


def library_subjects() -> Iterator[Subject]:
    """Yield what is documented in the sources of the standard library."""
    for module, source in library_sources():
        # The documented Python twin of a C module
        name = {"_pydecimal": "decimal"}.get(module, module)
        for subject in subjects_in(ast.parse(source), name):
            yield subject._replace(module=name)


def subjects_in(node: ast.AST, name: str, in_class: bool = False) -> Iterator[Subject]:
    """Yield a module, class or function, and every class and function in it that can be used from
    outside.
    """
    text = ast.get_docstring(node) or ""
    if isinstance(node, ast.Module):
        yield Subject(name, "module", text)
    elif isinstance(node, ast.ClassDef):
        # a class is called with the arguments of its __init__
        functions = (item for item in node.body if isinstance(item, ast.FunctionDef))
        makers = [item for item in functions if item.name == "__init__"]
        yield Subject(name, "class", text, arguments(makers[0], True) if makers else None)
    else:
        marks = [ast.unparse(mark) for mark in node.decorator_list]
        if any(re.search(r"property|\.(setter|deleter)$", mark) for mark in marks):
            yield Subject(name, "attribute", text)
        else:
            call = arguments(node, bound=in_class and "staticmethod" not in marks)
            yield Subject(name, "method" if in_class else "function", text, call)
        return  # what is inside a function cannot be used from outside
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from subjects_in(child, f"{name}.{child.name}", isinstance(node, ast.ClassDef))


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef, bound: bool) -> str:
    """Return the arguments as written in the source. bound: without the first one, which is self or
    cls.
    """
    text = ast.unparse(function.args)
    # (self, /, a) without self is (a): the slash has nothing left before it
    if bound and (function.args.posonlyargs or function.args.args):
        text = text.partition(", ")[2].removeprefix("/").removeprefix(", ")
    return f"({text})"


# ---- descriptions --------------------------------------------------------------------------------

LISTED = re.compile(r"\s|[*-] |\d+\. ")  # how a paragraph begins that a colon announces
WORD_BREAK = re.compile(r"(?<=\w-)\n\s*(?=\w)")  # pseudo-
# "merge(*iterables) -> iterator": C functions have it above their documentation
SIGNATURE = re.compile(r"[\w.]+\s?\(.*\)(\s*[-=]+>?(?:\s*\S+){0,4})?:?", re.DOTALL)
NOT_PROSE = re.compile(
    r">>>|::=|\$|\||^\s*(Copyright|Author|Written|Created|Usage|Arguments)|^\W*$", re.IGNORECASE
)


def first_paragraph(text: str) -> str:
    """Return the first paragraph that says something, its lines joined, or "" if it is missing, too
    short or too long. If it ends with a colon, what it announces follows as it is written.
    """
    parts = [part.rstrip() for part in re.split(r"\n\s*?\n", text) if part.strip()]
    # C functions repeat their signature above the description, on one line or several.
    while parts and all(map(SIGNATURE.fullmatch, parts[0].strip().split("\n"))):
        parts.pop(0)
    if not parts:
        return ""
    answer = flow(parts[0])
    bad = NOT_PROSE.search(answer) or HEADING.search(parts[0]) or SIGNATURE.fullmatch(answer)
    # A sentence that announces a list or an example says little without it.
    if answer.endswith(":"):
        listed = list(itertools.takewhile(LISTED.match, parts[1:])) or parts[1:2]
        answer = "\n\n".join([answer, *listed]) if listed else ""
    fits = len(answer.split()) >= MIN_WORDS and len(answer) <= MAX_CHARS
    return answer if fits and not bad else ""


def flow(paragraph: str) -> str:
    """Join the lines of a paragraph, unless they are laid out as code or a list."""
    lines = textwrap.dedent(paragraph).split("\n")
    # an indented line or a bullet: these line breaks mean something
    laid_out = any(re.match(r"\s|[-*] ", line) for line in lines[1:])
    return "\n".join(lines).strip() if laid_out else " ".join(WORD_BREAK.sub("", paragraph).split())


# ---- preference pairs ----------------------------------------------------------------------------

# Two answers have similar lengths if they differ by at most this fraction of the longer one.
SIMILAR = 0.2
SENTENCE = re.compile(r"\S.*?(?:[.!?](?=\s)|$)", re.DOTALL)
MAX_SENTENCE = 200  # characters of a sentence that is repeated


def docs_pairs() -> Iterator[dict]:
    """Yield {"prompt", "chosen", "rejected"}: a first question of docs_conversations, the right
    description, and a wrong one: it describes something else in the same module, or stops in the
    middle of a sentence, or repeats itself.
    """
    found = list(described())
    answers = {}
    for subject, answer in found:
        answers.setdefault(subject.module, []).append(answer)
    # A wrong answer is about the same module or a damaged form of the right one, so that its words
    # alone do not tell.
    for subject, answer in found:
        name = subject.name
        wrong = another(name, answer, answers[subject.module]), stopped(name, answer)
        possible = list(filter(None, (*wrong, repeated(name, answer))))
        # A hash of the name decides which, so the wrong answer is the longer one half of the time:
        # a reward model must not learn that length is worth something.
        if possible:
            rejected = pick(f"way {name}", possible)
            yield {"prompt": [question_about(subject)], "chosen": answer, "rejected": rejected}


def pick(key: str, items: Sequence[str | int]) -> str | int:
    """Return one of the items, by a hash of the key."""
    # not by crc32, whose values for keys with the same end are related
    return items[int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % len(items)]


def another(name: str, answer: str, answers: list[str]) -> str:
    """Return another of the answers, of similar length if there is one, else the nearest in length;
    "" if none.
    """
    gaps = {text: abs(len(text) - len(answer)) for text in answers if text != answer}
    near = [text for text, gap in gaps.items() if gap <= SIMILAR * max(len(text), len(answer))]
    return pick(f"another {name}", near) if near else min(gaps, key=gaps.get, default="")


def stopped(name: str, answer: str) -> str:
    """Return the answer up to a word in its middle that ends no sentence; "" if it has none."""
    ends = [match.end() for match in re.finditer(r"\S+", answer) if match[0][-1] not in ".!?:;"]
    # far enough to read like an answer, not so far that little is missing
    middle = [end for end in ends if 0.3 * len(answer) <= end <= 0.8 * len(answer)]
    return answer[: pick(f"stopped {name}", middle)] if middle else ""


def repeated(name: str, answer: str) -> str:
    """Return the answer with one sentence said two or three times, or its last words said three or
    four times.
    """
    sentence = pick(f"sentence {name}", SENTENCE.findall(answer))
    times = pick(f"times {name}", (2, 2, 3))
    if pick(f"repeated {name}", (True, False)) and len(sentence) <= MAX_SENTENCE:
        return answer.replace(sentence, " ".join([sentence] * times), 1)
    # as small models do when they get stuck: the last few words again and again
    body = answer.rstrip(". ")
    n_words = pick(f"words {name}", (2, 3, 4, 5))
    phrase = re.search(rf"(?:\S+\s+){{0,{n_words - 1}}}\S+$", body)[0]
    return " ".join([body, *[phrase] * times]) + answer[len(body) :]
