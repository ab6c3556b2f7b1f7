"""The one exception that reaches a user as a sentence instead of a traceback."""


class ProbeError(Exception):
    """Something could not be done; the message says what, the value seen, and what to do."""


class ProbeWarning(UserWarning):
    """The numbers are right, but something about the run deserves a second look."""
