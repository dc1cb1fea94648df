"""The one exception for mistakes that the user can mend."""


class UserError(ValueError):
    """Raise for what the user can mend: bad settings, bad input, a damaged file. Scripts print it as one line, without
    a traceback, so the message says what is wrong, where, with which value, and what to do."""
