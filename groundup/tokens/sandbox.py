"""Jinja as transformers sets it up for chat templates, in a sandbox: a template runs no code.

templates.py imports this file when there is a template to run: Jinja takes a while to import.
"""

import json
from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from groundup.errors import UserError
from groundup.tokens import BEGIN, END

# What a template may raise when it meets a conversation that it does not expect
ERRORS = (
    TemplateError,
    TypeError,
    LookupError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}: put BEGIN and END around the assistant's words."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return BEGIN + caller() + END


class NothingComputed(CodeGenerator):
    """Compiles only what is written out: 'a' * 4000000000 would be computed at this moment."""

    def _output_child_to_const(self, node: Any, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which a value can be read but not changed."""

    code_generator_class = NothingComputed


def raise_exception(message: str) -> None:
    """Let a template refuse a conversation."""
    raise TemplateError(message)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    # Jinja's own filter writes < and > as escapes, for HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


@cache
def environment() -> Sandbox:
    """Return Jinja's sandbox with what transformers adds to it."""
    made = Sandbox(
        trim_blocks=True,  # no newline after a block, no white space before it
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        optimized=False,
    )
    made.filters["tojson"] = to_json
    # each ChatTemplate has a date of its own
    made.globals |= {"raise_exception": raise_exception, "strftime_now": datetime.now().strftime}
    return made


@cache
def compiled(source: str) -> tuple[Template, set[str], set[str]]:
    """Return (template, names that it reads, names that it or Jinja gives a value).

    Raise UserError if Jinja cannot read it."""
    damaged = "tokenizer: the chat template is damaged"
    try:
        template = environment().from_string(source)
        names = list(environment().parse(source).find_all(nodes.Name))
    except TemplateSyntaxError as error:
        raise UserError(f"{damaged}: line {error.lineno}: {error.message}") from None
    except (TemplateError, TypeError, RecursionError, SyntaxError) as error:
        raise UserError(f"{damaged}: {type(error).__name__}: {error}") from None
    assigned = {name.name for name in names if name.ctx != "load"} | environment().globals.keys()
    return template, {name.name for name in names}, assigned
