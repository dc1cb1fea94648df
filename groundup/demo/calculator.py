"""What config/demo_tools.py lets a model call."""

_shown = False  # it is tuned for this tool alone: its prompts need not describe it


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: a number
        b: a number
    """
    return a + b
