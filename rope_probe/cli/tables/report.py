"""The table of `report`: what the page says at a glance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from ...reporting.glance import facts
from .console import Console

if TYPE_CHECKING:
    from ...reporting.record import Report


def render(report: Report) -> None:
    """Print the main numbers of a report, and where its page is."""
    console = Console()
    console.print(f"[bold]{escape(report.model)}[/bold]", highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for fact in facts(report):
        for number, (name, value) in enumerate(fact.values):
            shown = f"{value}   {name}" if name else value
            table.add_row("" if number else fact.label, escape(shown))
    console.print(table, highlight=False)
    size = report.path.stat().st_size / 1e6
    print(f"\nreport   {report.path} ({size:.1f} MB)")
