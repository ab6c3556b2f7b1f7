"""The table of `trajectory`: where the band is at every checkpoint, and where theory puts it."""

from __future__ import annotations

import textwrap

from rich.table import Table

from ...words import amount, base, model_name, ranges
from .bands import RULE_NAMES
from .console import Console


def render(ds, summary: dict) -> None:
    """Print the table of a `trajectory` result."""
    console = Console()
    kinds = summary["by_layer_type"]
    read = f"{summary['segments']} × {summary['length']:,} tokens of {summary['corpus']}"
    console.print(f"[bold]{model_name(ds)}[/bold]   {read}", highlight=False)
    for name, last in kinds.items():
        words = f"base {base(last['formation_base'])}, length {last['length']:,}, {last['pairs']} pairs"
        console.print(f"{name.replace('_', ' ')}, layers {ranges(last['layers'])}: {words}", highlight=False)
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        table.add_column("checkpoint", header_style="bold")
        for title in ("i_band, keys", "queries", "usage q·k", "band", "max / median"):
            table.add_column(title, justify="right", header_style="bold", no_wrap=True)
        for row in summary["checkpoints"]:
            one = row["by_layer_type"][name]
            low, high = one["band"]
            table.add_row(
                row["checkpoint"],
                _with_error(one, "i_band"),
                amount(one["i_band_q"]),
                _with_error(one, "i_band_usage"),
                f"{low}–{high}" if low != high else f"{low}",
                amount(one["concentration"]),
            )
        console.print(table, highlight=False)
        rules = ", ".join(f"{RULE_NAMES[rule]} {value:.1f}" for rule, value in last["predicted"].items())
        print(textwrap.fill(f"predicted: {rules}", 79, subsequent_indent="  "))
    if summary["partial"]:
        console.print("not all checkpoints that were asked for are measured yet", highlight=False)
    console.print(
        "[dim]pair 0 is the fastest; band: half of peak usage; max / median: key norm over\n"
        "pairs; ±: standard error over segments[/dim]",
        highlight=False,
    )


def _with_error(group: dict, key: str) -> str:
    value, error = group[key], group[f"{key}_se"]
    return amount(value) if value is None or error is None else f"{value:.1f} ± {error:.1f}"
