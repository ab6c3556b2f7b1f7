"""The table of `check`: pass or fail with the number, and what a bug report needs."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from ...probes.check import Report
from .console import Console

STATES = {True: "[green]pass[/green]", False: "[bold red]fail[/bold red]", None: "[yellow]–[/yellow]"}


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if 0.01 <= abs(value) < 1000 or not value else f"{value:.2g}"


def render(report: Report) -> None:
    """Print every finding, the geometry and the versions."""
    console = Console()
    console.print(f"[bold]{escape(report.model)}[/bold]", highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column()
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    for finding in report.findings:
        table.add_row(finding.name, STATES[finding.passed], _number(finding.number), escape(finding.words))
    console.print(table, highlight=False)
    console.print()
    for line in report.geometry:
        console.print(escape(line), highlight=False)
    for key, value in report.where.items():
        console.print(f"{key}: {escape(_told(value))}", highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in report.versions.items()), highlight=False)
    failed = [finding.name for finding in report.findings if finding.passed is False]
    asked = sum(finding.passed is not None for finding in report.findings)
    verdict = f"{len(failed)} of {asked} checks failed: {', '.join(failed)}" if failed else f"all {asked} checks passed"
    unasked = [finding.name for finding in report.findings if finding.passed is None]
    console.print(
        f"\n[bold]{verdict}[/bold]" + (f" (not asked: {', '.join(unasked)})" if unasked else ""), highlight=False
    )


def _told(value) -> str:
    return ", ".join(f"{key} {x}" for key, x in value.items()) if isinstance(value, dict) else str(value)
