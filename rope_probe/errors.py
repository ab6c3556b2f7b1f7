"""The exceptions that reach a user as a sentence instead of a traceback."""


class ProbeError(Exception):
    """Something could not be done; the message says what, the value seen, and what to do."""


class UsageError(ProbeError):
    """The arguments are wrong, whatever the checkpoint and the text (the command's exit code is 2)."""


class SharedError(ProbeError):
    """One of several processes has failed and told the others; one of them says it."""


class ProbeWarning(UserWarning):
    """The numbers are right, but something about the run deserves a second look."""


def first_words(error: BaseException, limit: int = 200) -> str:
    """What an exception says, on one line."""
    return " ".join(str(error).split())[:limit] or type(error).__name__
