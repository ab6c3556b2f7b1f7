"""The table of `scan`: where the band is by the weights alone, and how far that is to be trusted."""

from __future__ import annotations

from rich.table import Table

from ...words import amount, model_name, ranges
from .bands import _rows
from .console import Console

SIDES = ("keys", "queries", "usage")


def _trust(summary: dict, name: str) -> Table:
    """Agreement with `bands`, on the demos and on this model."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("agreement with bands", header_style="bold")
    for side in SIDES:
        table.add_column(side, justify="right")
    rows = dict(summary["known"])
    if summary["agreement"]:
        rows.pop(name, None)
        rows[f"{name}, this scan"] = summary["agreement"]
    for model, found in rows.items():
        table.add_row(model, *(f"{found[side]['top']:.0%} {found[side]['rank']:+.2f}" for side in SIDES))
    if found := summary["agreement"]:
        for label, suffix in (("estimated", ""), ("measured", "_measured")):
            cells = (f"{found[side][f'mean{suffix}']:.1f} ({found[side][f'mode{suffix}']})" for side in SIDES)
            table.add_row(f"  mean (mode), {label}", *cells)
    return table


def render(ds, summary: dict) -> None:
    """Print the table of a `scan` result."""
    console = Console()
    name, groups = model_name(ds), summary["by_layer_type"]
    megabytes = summary["weight_bytes_read"] / 1e6
    cut = " (interrupted: the layers until then)" if summary["partial"] else ""
    console.print(
        f"[bold]{name}[/bold]   estimated from {megabytes:,.0f} MB of weights, the model was not run{cut}",
        highlight=False,
    )
    table = Table(show_header=len(groups) > 1, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for group in groups:
        table.add_column(group.replace("_", " "), style="none", header_style="bold")
    for cells in zip(*(_rows(group) for group in groups.values()), strict=True):
        bold = "bold" if cells[0][0].startswith("i_band,") else None
        table.add_row(cells[0][0], *(value for _, value in cells), style=bold)
    console.print(table, highlight=False)
    if summary["not_rotating"]:
        console.print(f"layers that do not rotate: {ranges(summary['not_rotating'])} (left out)", highlight=False)
    if summary["shared_keys"]:
        console.print(
            f"layers that read the keys of an earlier one: {ranges(summary['shared_keys'])} (left out)", highlight=False
        )
    if len(groups) > 1:
        console.print(
            f"all layers: i_band {amount(summary['i_band'])}, by usage {amount(summary['i_band_usage'])}",
            highlight=False,
        )
    console.print()
    console.print(_trust(summary, name), highlight=False)
    exact = f"layer 0 is exact for {summary['corpus']}, all others" if summary["exact"] else "all layers"
    console.print(
        f"[dim]{exact} are estimates;\n"
        "agreement in these: heads whose dominant pair is that of `bands`, rank\n"
        "correlation of the two profiles over pairs[/dim]",
        highlight=False,
    )
