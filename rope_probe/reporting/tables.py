"""What the commands print, as HTML: real tables with numbers to the right, in the order of the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import rich.console
from markupsafe import Markup, escape
from rich.table import Table
from rich.text import Text

from ..cli.tables.console import blocks, marked

TAGS = {"bold": ("<b>", "</b>"), "dim": ('<span class="dim">', "</span>")}
COLORS = ("green", "red", "yellow")  # of words that pass, fail or were not asked
_PAGE = rich.console.Console(width=1000, force_jupyter=False)  # knows what styles mean; nothing is printed on it


@dataclass
class Cell:
    """One cell: what is in it, and how it stands."""

    words: Markup
    kind: str = ""


@dataclass
class Block:
    """A paragraph, or a table: headings, and groups of rows."""

    words: Markup = Markup("")
    head: list[Cell] = field(default_factory=list)
    groups: list[list[tuple[str, list[Cell]]]] = field(default_factory=list)


def html_blocks(render: Callable[..., None], *args) -> list[Block]:
    """What a command prints, for the page."""
    return [_table(one) if isinstance(one, Table) else Block(_inline(one)) for one in blocks(render, *args)]


def _inline(text: Text, broken: str = " ") -> Markup:
    """A line with its bold, dim and colored words; lines that were broken for a terminal are joined by `broken`."""
    found = Markup("")
    for segment in text.render(_PAGE):
        # where words were set apart by several spaces they stay apart
        spaced = re.sub(r" {2,}", "\u2003", re.sub(r"[ \t]*\n[ \t]*", "\n", segment.text))
        words = escape(spaced).replace("\n", Markup(broken))
        style = segment.style
        for name, (start, end) in TAGS.items():
            if style and getattr(style, name):
                words = Markup(start) + words + Markup(end)
        color = style.color.name if style and style.color else ""
        if color in COLORS:
            words = Markup(f'<span class="{color}">') + words + Markup("</span>")
        found += words
    return found.rstrip()


def _table(table: Table) -> Block:
    kinds = [
        "num" if column.justify == "right" else "wrap" if column.overflow == "fold" else "" for column in table.columns
    ]
    columns = [[_inline(marked(cell), "<br>") for cell in column.cells] for column in table.columns]
    head = [
        Cell(_inline(marked(column.header), "<br>"), kind) for column, kind in zip(table.columns, kinds, strict=True)
    ]
    groups: list[list[tuple[str, list[Cell]]]] = [[]]
    for number, row in enumerate(table.rows):
        cells = [Cell(column[number], kind) for column, kind in zip(columns, kinds, strict=True)]
        if any(cell.words for cell in cells):
            groups[-1].append(("bold" if row.style and "bold" in str(row.style) else "", cells))
        if groups[-1] and (row.end_section or not any(cell.words for cell in cells)):
            groups.append([])
    shown = table.show_header and any(cell.words for cell in head)
    return Block(head=head if shown else [], groups=[group for group in groups if group])
