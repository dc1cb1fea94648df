"""The one exception for mistakes that the user can fix."""

from collections.abc import Sequence


class UserError(ValueError):
    """Raise for what the user can fix: bad settings, bad input, a damaged file. Scripts print it as one line, without
    a traceback, so the message says what is wrong, where, with which value, and what to do."""


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first `most` names and how many more there are, for an error message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
