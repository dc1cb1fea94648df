"""What config/demo_tools.py lets a model call."""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: a number
        b: a number
    """
    return a + b
