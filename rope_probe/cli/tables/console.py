"""Where tables are written."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable

import rich.console
from rich.errors import MarkupError
from rich.table import Table
from rich.text import Text


class Console(rich.console.Console):
    """Standard output, in a notebook as well: there rich alone would turn each line of a table into HTML of its own."""

    def __init__(self):
        super().__init__(force_jupyter=False)

    def print(self, *objects, **options) -> None:
        if isinstance(sys.stdout, _Blocks):
            sys.stdout.found.extend(one if isinstance(one, Table) else marked(one) for one in objects)
        else:
            super().print(*objects, **options)


def marked(words) -> Text:
    """A cell or a line with its markup read; what is no markup stays as it is."""
    if isinstance(words, Text):
        return words
    try:
        return Text.from_markup(str(words), emoji=False)
    except MarkupError:
        return Text(str(words))


class _Blocks(io.StringIO):
    """In place of standard output: keeps tables as tables."""

    def __init__(self):
        super().__init__()
        self.found: list[Text | Table] = []

    def write(self, words: str) -> int:
        if words.strip():
            self.found.append(Text(words))
        return len(words)


def blocks(render: Callable[..., None], *args) -> list[Text | Table]:
    """What a `render` writes, as lines and tables instead of characters on a screen."""
    with contextlib.redirect_stdout(_Blocks()) as written:
        render(*args)
    return written.found
