"""Markdown of an untrusted text: what is rendered, what never comes through, and how long it takes."""

import html.parser
import time
from importlib.util import find_spec

import pytest

from groundup.generate.markdown import ATTRIBUTES, TAGS, to_html

LIBRARIES = ("markdown_it", "mdit_py_plugins", "latex2mathml", "nh3")
pytestmark = pytest.mark.skipif(not all(map(find_spec, LIBRARIES)), reason="it needs requirements-serve.txt")


@pytest.mark.parametrize(
    "text, html",
    [
        ("# A *b*\n\nc\nd", "<h1>A <em>b</em></h1>\n<p>c<br>\nd</p>\n"),
        ("__a__ _b_ \\*c\\* d_e_f ~~g~~", "<p><strong>a</strong> <em>b</em> *c* d_e_f <s>g</s></p>\n"),
        ("$5 and $6", "<p>$5 and $6</p>\n"),
        ("$\\foo{$", "<p>$\\foo{$</p>\n"),
        ("\\(x\\)", '<p><math display="inline"><mrow><mi>x</mi></mrow></math></p>\n'),
        ("$$\nx\n$$", '<p><math display="block"><mrow><mi>x</mi></mrow></math></p>'),
        ("![a](https://b.example/c.png)", '<p><a href="https://b.example/c.png" target="_blank" '
         'rel="noopener noreferrer">a</a></p>\n'),
        ("看https://b.example/c。", '<p>看<a href="https://b.example/c" target="_blank" '
         'rel="noopener noreferrer">https://b.example/c</a>。</p>\n'),
        ("```py\n<b>\n```", '<pre><code class="language-py">&lt;b&gt;\n</code></pre>\n'),
    ],
)  # fmt: skip
def test_what_is_rendered(text, html):
    assert to_html(text, whole=True) == (html, "")


def test_lists_of_tasks_and_alignment():
    html, _ = to_html("- [ ] a\n- [x] b\n\n|c|d|\n|:-:|-:|\n|1|2|", whole=True)
    assert html.count("<input") == 2 and html.count(" checked=") == 1 and "[" not in html
    assert '<th align="center">c</th>' in html and '<td align="right">2</td>' in html


@pytest.mark.parametrize(
    "text, rest",
    [
        ("a\n\nb", "b"), ("a\nb\n", "a\nb\n"), ("a\r\n\r\nb\r\nc", "b\r\nc"), ("```\na\n\nb", "```\na\n\nb"),
        ("- a\n\n- b", "- a\n\n- b"), ("- a\n\nb", "b"), ("", ""), ("一\n\n🙂 二", "🙂 二"),
    ],
)  # fmt: skip
def test_the_block_that_grows_stays(text, rest):
    found, left = to_html(text, whole=False)
    assert left == rest
    whole = to_html(text, whole=True)[0].replace("\n", "")
    assert (found + to_html(left, whole=True)[0]).replace("\n", "") == whole


class Seen(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {(tag, name, value) for name, value in attrs}


EVIL = ["<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "[a](javascript:alert(1))",
        "[a](data:text/html,<script>)", "![a](javascript:alert(1))", "[a](https://b.example/\"onclick=alert(1))",
        "<a href='https://b.example' style='position:fixed'>c</a>", "[a](/v1/models)", "<javascript:alert(1)>",
        "$\\text{<img src=x onerror=alert(1)>}$", "$\\href{javascript:alert(1)}{a}$", "$\\style{color:red}{a}$",
        "```<img onerror=a>\nb\n```", "|<img>|\n|-|\n|<svg onload=a>|", "- [ ] <input autofocus onfocus=a>",
        "$$<mtext><table><mglyph><style><img src=x onerror=a></style></mglyph></table></mtext>$$",
        "\\[\\unicode{x3c}img\\]", "&lt;script&gt;", "[a]: javascript:alert(1)\n\n[a]"]  # fmt: skip


@pytest.mark.parametrize("text", EVIL)
def test_nothing_that_runs_or_loads_comes_through(text):
    for wrapped in (text, f"> {text}", f"- {text}", f"# {text}", f"**{text}**", f"|a|\n|-|\n|{text}|"):
        seen = Seen(to_html(wrapped, whole=True)[0])
        assert seen.tags <= set(TAGS.split())
        for tag, name, value in seen.attributes:
            allowed = ATTRIBUTES.get(tag, set()) | {"target", "rel", "type", "disabled", "display"}
            assert name in allowed, (tag, name, value)
            assert name != "href" or value.startswith(("http://", "https://", "mailto:"))


def test_no_text_takes_long():
    shapes = [">", "- ", "`", "**", "[", "# ", "|", "> - ", "~~~", "![", "](", "a|b\n-|-|", "$", "$x", "*a _", "$$\n"]
    shapes += ["$$a\n\n", "\\(", "\\[\n", "[a](", "- [ ] ", "http://", "://a", "[a]: b\n", "|a\n|-", "$a$ ", "<a"]
    for shape in shapes:
        began = time.process_time()
        to_html((shape * 8000)[:8000], whole=True)
        assert time.process_time() - began < 1.5, shape


@pytest.mark.parametrize("formula", ("$$\nx\n$$\n", "\\[x\\]\n", "$$x$$ (1)\n"))
def test_a_formula_that_is_the_last_block_so_far(formula):
    """It does not say on which line it begins, so what stands before it may wait with it."""
    text = f"a\n\n{formula}"
    html, rest = to_html(text, whole=False)
    assert text.endswith(rest) and "x" in rest and "math" not in html
    assert "<math" in to_html(text, whole=True)[0]
