"""What the demo learns beside Python's documentation, in English and Chinese, made of this folder's
own sentences.

stories.txt     after `# en` or `# zh` lists of words, then stories between blank lines. A line is a
                sentence, one of several; {name} is a word of the list `name`, the same in the whole
                story, and {name2} another one.
knowledge.txt   subjects: forms of a question (en?, zh?), of its answer (en!, zh!) and of a
                statement where that differs (zh.), then a fact on each line: what stands for {0},
                {1}, ...; English first, if both are there.
questions.jsonl thirty questions that are asked in no training, for a trained model to answer.

Everything is chosen with fixed seeds: the same data in the same order.
"""

import ast
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from groundup.demo.python_docs import chinese_sample, docstrings, library_sources
from groundup.demo.python_talks import (
    HEADING,
    NOT_PROSE,
    QUESTIONS,
    SENTENCE,
    described,
    flow,
    message,
)
from groundup.errors import UserError

N_STORIES = 1200  # of a language
TOGETHER, TIMES = 5, 3  # statements in a document, and documents that a statement is in
MAX_SENTENCE = 120  # characters: longer descriptions are left to python_talks.py
# More ways to ask what a name of Python is, beside QUESTIONS
DESCRIBED = ("Can you explain {}?", "Please tell me about {}.", "Do you know what {} is for?")
KEPT = 4  # one comparison in four is never asked, so that questions.jsonl can ask it
FORM = re.compile("(en|zh)[?!.] ")  # how a line of knowledge.txt begins that is no fact
# A paragraph of whole sentences, without quoted code
SAYS = re.compile(r"[A-Z][A-Za-z0-9 ,.;:'()-]{38,}[.]")


class Subject(NamedTuple):
    """Facts of a kind, in one language."""

    name: str
    questions: list[str]  # "What is the capital of {0}?"
    answer: str  # "The capital of {0} is {1}."
    statement: str  # the same without a question before it
    facts: list[list[str]]  # what stands for {0}, {1}, ...


def demo_rows(language: str, kind: str) -> Iterator[str | dict]:
    """Yield the input `demo-en` or `demo-zh` of prepare.py as rows of this kind: text or chat.
    Raise UserError.
    """
    if kind == "preference":
        raise UserError(f"prepare: demo-{language} has no pairs of answers; python-docs has")
    if kind == "text":
        # English prose is on every machine with Python; Chinese prose is a file of this folder.
        yield from docs_prose() if language == "en" else chinese_sample()
        yield from stories(language)
        yield from statements(language)
    else:
        for question, answer in questions(language):
            yield {"messages": [message("user", question), message("assistant", answer)]}


def read(name: str) -> list[str]:
    """Return the blocks of a file in this folder, between blank lines."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8").strip().split("\n\n")


# ---- prose of the documentation, without code, tables and lists ----------------------------------


def docs_prose() -> Iterator[str]:
    """Yield the paragraphs of the language reference by topic, then of the docstrings by module,
    each as one line.
    """
    from pydoc_data.topics import topics

    sources = library_sources()
    written = ("\n\n".join(docstrings(ast.parse(source), name)) for name, source in sources)
    for text in itertools.chain((topics[name] for name in sorted(topics)), written):
        # paragraphs, without headings
        lines = [flow(part) for part in re.split(r"\n\s*?\n", text) if not HEADING.search(part)]
        if found := [line for line in lines if SAYS.fullmatch(line) and not NOT_PROSE.search(line)]:
            yield "\n".join(found)


# ---- stories -------------------------------------------------------------------------------------


def stories(language: str) -> Iterator[str]:
    """Yield N_STORIES stories, each of the sentences of one plot."""
    blocks = iter(read("stories.txt"))
    # the words of the language: name: value | value | ...
    lists = next(block for block in blocks if block.startswith(f"# {language}\n")).split("\n")[1:]
    words = {}
    for line in lists:
        name, values = line.split(": ")
        words[name] = values.split(" | ")
    # then its plots, up to the words of the other language: a line for each sentence
    plots = []
    for block in itertools.takewhile(lambda block: not block.startswith("# "), blocks):
        plots.append([line.split(" | ") for line in block.split("\n")])
    # Chinese has no spaces between sentences.
    rng, between = random.Random(language), " " if language == "en" else ""
    for _ in range(N_STORIES):
        story = between.join(rng.choice(line) for line in rng.choice(plots))
        # {name} is the same word in the whole story, {name2} another one.
        for name, values in words.items():
            for number, value in enumerate(rng.sample(values, len(values)), 1):
                story = story.replace(f"{{{name}{number if number > 1 else ''}}}", value)
        yield story


# ---- knowledge -----------------------------------------------------------------------------------


def subjects(language: str) -> Iterator[Subject]:
    """Yield the subjects of knowledge.txt that are written in a language."""
    for block in read("knowledge.txt"):
        title, *lines = block.split("\n")
        forms = {line[:3]: line[4:] for line in lines if FORM.match(line)}
        facts = [line.split("; ") for line in lines if not FORM.match(line)]
        # A fact in both languages has the English words in its first half.
        if {"en?", "zh?"} <= forms.keys() and facts:
            middle = (len(facts[0]) + 1) // 2
            facts = [fact[:middle] if language == "en" else fact[middle:] for fact in facts]
        if f"{language}?" in forms:
            asked = forms[f"{language}?"].split(" | ")
            answer = forms.get(f"{language}!", "")
            statement = forms.get(f"{language}.", answer)
            yield Subject(title.removeprefix("# "), asked, answer, statement, facts)


def questions(language: str) -> Iterator[tuple[str, str]]:
    """Yield all questions with their answers, some of them as a part of a longer message."""
    # the first subject has no facts, but what is said around a question: "Please tell me: {0}"
    rng, messages = random.Random(f"ask {language}"), next(subjects(language)).questions
    for question, answer in bare_questions(language):
        yield rng.choice(messages).format(question), answer


def bare_questions(language: str) -> Iterator[tuple[str, str]]:
    """Yield all questions with their answers. Names of Python are described in English by its own
    documentation.
    """
    for subject in subjects(language):
        if subject.name.startswith("bigger"):
            yield from comparisons(subject, language)
            continue
        # every question in all its forms: what matters is the fact, not the wording
        for fact in subject.facts:
            answer = capital(subject.answer.format(*fact))
            yield from ((form.format(*fact), answer) for form in subject.questions)
    if language == "en":
        # Those that knowledge.txt describes in Chinese; the description is a first sentence.
        (subject,) = (one for one in subjects("zh") if one.name == "python names")
        names = {fact[0] for fact in subject.facts}
        for named, text in described():
            sentence = SENTENCE.match(text)[0]
            if named.name in names and len(sentence) <= MAX_SENTENCE:
                forms = (*QUESTIONS[named.kind], *DESCRIBED)
                yield from ((form.format(named.name), sentence) for form in forms)


def comparisons(subject: Subject, language: str, asked: bool = True) -> Iterator[tuple[str, str]]:
    """Yield questions which of two things is bigger, in both orders. asked: those to learn from,
    else the others.
    """
    # the facts are things from the smallest to the biggest
    rng, things = random.Random(f"bigger {language}"), [fact[0] for fact in subject.facts]
    for i, j in itertools.combinations(range(len(things)), 2):
        # by the sum, so that each thing is in some pairs of either kind
        if ((i + j) % KEPT != 1) is asked:
            answer = capital(subject.answer.format(small=things[i], big=things[j]))
            for two in ((i, j), (j, i)):
                yield rng.choice(subject.questions).format(*(things[k] for k in two)), answer


def statements(language: str) -> Iterator[str]:
    """Yield documents of a few statements on one subject; each statement is in several, among
    others.
    """
    rng = random.Random(f"statements {language}")
    for subject in subjects(language):
        if subject.name.startswith("bigger"):
            continue
        told = [subject.statement.format(*fact) for fact in subject.facts]
        if language == "en":  # a Chinese sentence may begin with zip, which is a name
            told = list(map(capital, told))
        # Each time in another order: a statement should be known whatever stands before it.
        for _ in range(TIMES):
            rng.shuffle(told)
            for first in range(0, len(told), TOGETHER):
                yield "\n".join(told[first : first + TOGETHER])


def capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
