"""Markdown of an answer -> HTML that the page may show. The text is a model's: it is not trusted.

markdown-it-py reads it, latex2mathml writes its formulas, and nh3 lets through no element,
attribute or address but those named below. Pictures become links: the page loads nothing. This runs
in a process of its own: some texts take a second, in which others would wait.
"""

import contextlib
import functools
import json
import os
import re
import sys
from typing import Any

MAX_CHARS = 50_000  # of a text; what is beyond them is shown as it is
MAX_INLINE = 5_000  # characters of a paragraph: some rules take time with the square of it
MAX_FORMULA = 1_000
LINK = re.compile(r"https?://[!#-;=?-_a-~]+")  # all of ASCII but spaces, quotes, < and >
# latex2mathml's, but without annotations and styles
MATH = "math mrow mi mn mo mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover"
MATH += " mtable mtr mtd mpadded mphantom menclose mstyle"
TAGS = (
    "p br hr h1 h2 h3 h4 h5 h6 strong em s a code pre blockquote ul ol li table thead tbody tr th"
)
TAGS += " td input " + MATH
ATTRIBUTES = {
    "a": {"href"}, "ol": {"start"}, "code": {"class"}, "th": {"align"}, "td": {"align"},
    "input": {"checked"}, "mo": {"stretchy", "fence"}, "mi": {"mathvariant"},
    "mtable": {"columnalign"}, "mspace": {"width"},
}  # fmt: skip


def to_html(text: str, whole: bool) -> tuple[str, str]:
    """Return (HTML of the blocks that have ended, the rest of the text). whole: the text has ended,
    and with it its last block."""
    reader = markdown_reader()
    tokens = reader.parse(text[:MAX_CHARS])
    n_chars = len(text)
    if not whole or n_chars > MAX_CHARS:
        # The rest begins with the last block that says where it begins: formulas do not.
        blocks = [i for i, one in enumerate(tokens) if one.level == 0 and one.nesting >= 0]
        last = next((i for i in reversed(blocks) if tokens[i].map is not None), 0)
        line = tokens[last].map[0] if blocks and tokens[last].map else 0
        ends = [match.end() for match in re.finditer(r"\r\n?|\n", text[:MAX_CHARS])]
        tokens, n_chars = tokens[:last], ends[line - 1] if line else 0
    html = reader.renderer.render(tokens, reader.options, {})
    return cleaner().clean(html), text[n_chars:]


@functools.cache
def markdown_reader() -> Any:
    from markdown_it import MarkdownIt
    from mdit_py_plugins.tasklists import tasklists_plugin
    from mdit_py_plugins.texmath import texmath_plugin

    reader = MarkdownIt("commonmark", {"html": False, "breaks": True})
    reader.enable(["table", "strikethrough"])
    reader.use(tasklists_plugin)
    for marks in ("kramdown", "dollars", "brackets"):  # $$ $$, $ $, \( \) and \[ \]
        reader.use(texmath_plugin, delimiters=marks)
    # One rule of ours before the library's, one after them
    reader.core.ruler.before("inline", "long", leave_long_ones)
    reader.core.ruler.push("adjust", adjust)
    # The plugin writes formulas for a script of its own; ours become MathML.
    for name in list(reader.renderer.rules):
        if name.startswith("math_"):
            reader.add_render_rule(name, render_formula)
    return reader


@functools.cache
def cleaner() -> Any:
    import nh3

    return nh3.Cleaner(
        tags=set(TAGS.split()),
        attributes=ATTRIBUTES,
        tag_attribute_values={"math": {"display": {"block", "inline"}}},
        set_tag_attribute_values={
            "a": {"target": "_blank"},
            "input": {"type": "checkbox", "disabled": ""},
        },
        url_schemes={"http", "https", "mailto"},
        url_relative="deny",
    )


def leave_long_ones(state: Any) -> None:
    """Leave paragraphs as they are that would take too long."""
    for token in state.tokens:
        if token.type == "inline" and len(token.content) > MAX_INLINE:
            token.type = "text"


def adjust(state: Any) -> None:
    """Make pictures and bare addresses links, and say alignment without styles, which the page's
    headers do not allow."""
    from markdown_it.token import Token

    def link(address: str, text: str) -> list[Token]:
        words = Token("text", "", 0, content=text)
        return [Token("link_open", "a", 1, {"href": address}), words, Token("link_close", "a", -1)]

    for token in state.tokens:
        if style := token.attrs.pop("style", ""):
            token.attrSet("align", style.removeprefix("text-align:"))
        # Within a link an address is text: links do not nest.
        found, n_links = [], 0
        for child in token.children or ():
            n_links += child.nesting * child.type.startswith("link_")
            if child.type == "image":
                found += link(child.attrs["src"], child.content or child.attrs["src"])
            elif child.type == "text" and not n_links:
                begin = 0
                for match in LINK.finditer(child.content):
                    # Punctuation behind an address belongs to the sentence.
                    address = match[0].rstrip(".,:;!?)")
                    before = Token("text", "", 0, content=child.content[begin : match.start()])
                    found += [before, *link(address, address)]
                    begin = match.start() + len(address)
                found.append(Token("text", "", 0, content=child.content[begin:]))
            else:
                found.append(child)
        token.children = found if token.children else token.children


def render_formula(_: Any, tokens: list, i: int, _options: Any, _env: Any) -> str:
    """Return a formula in MathML, as it stands if it cannot be read."""
    from html import escape

    from latex2mathml.converter import convert

    token = tokens[i]
    formula, begin = token.content.strip(), token.markup
    try:
        if len(formula) > MAX_FORMULA:
            raise ValueError
        html = convert(formula, display="block" if begin in ("$$", "\\[") else "inline")
    except Exception:  # whatever: it is a model's
        end = {"\\(": "\\)", "\\[": "\\]"}.get(begin, begin)
        html = escape(begin + token.content + end)
    number = f" ({escape(token.info)})" if "eqno" in token.type else ""
    return f"<p>{html}{number}</p>" if token.block else html


if __name__ == "__main__":
    markdown_reader(), cleaner()  # what they import takes long on a busy machine
    with contextlib.suppress(AttributeError, OSError):
        os.nice(10)  # answers that are written go first
    for line in sys.stdin:  # [text, whole], after an empty one
        print(json.dumps(to_html(*json.loads(line)) if line.strip() else "ready"), flush=True)
