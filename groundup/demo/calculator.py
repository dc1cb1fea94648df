"""The tool of config/demo_tools.py: --tools=groundup/demo/calculator.py for rl.py and sample.py.

Prompts do not describe it: that would be most of what the demo's small model reads.
"""

import ast
import operator

_shown = False  # groundup/generate/tool_process.py reads it
# No powers: 2 ** 9 ** 9 would compute for ever.
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """Calculate with whole and decimal numbers.

    Args:
        expression: like 12 + 34; it may have + - * / and parentheses
    """
    return str(_value(ast.parse(expression, mode="eval").body))


def _value(node: ast.expr) -> int | float:
    """Return what a part of an expression amounts to. Raise ValueError for all but numbers."""
    # The expression is parsed, not evaluated: a model writes it, and it can run nothing.
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError(f"{ast.unparse(node)} is no number")
