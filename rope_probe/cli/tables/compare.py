"""The table of `compare`: every statistic of every result, and how far it is from that of the first."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table


def measured(value: float, error: float, sign: str = "") -> str:
    """A number with its standard error, to the digits that the error leaves it: 23.41 ± 0.12."""
    if not math.isfinite(value):
        return "–"
    if not math.isfinite(error) or error <= 0:
        return f"{value:{sign}.3f}"
    digits = min(4, max(0, 1 - math.floor(math.log10(error))))
    return f"{value:{sign}.{digits}f} ± {error:.{digits}f}"


def as_dict(comparison) -> dict:
    """The comparison as plain values, for JSON."""
    statistics = []
    for name in comparison["statistic"].values:
        rows = []
        for result in range(comparison.sizes["result"]):
            one = comparison.isel(result=result).sel(statistic=name)
            row = {key: float(one[key]) for key in ("value", "value_se", "difference", "difference_se")}
            rows.append({"result": str(one["result"].item())} | row | {"paired": bool(one["paired"])})
        statistics.append({"statistic": str(name), "results": rows})
    return {"analysis": "compare", "compared": comparison.attrs["compared"], "statistics": statistics}


def render(comparison) -> None:
    """Print the table of a comparison."""
    console = Console()
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(comparison.attrs["compared"], header_style="bold", overflow="fold")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("difference", justify="right", no_wrap=True)
    table.add_column("in s.e.", justify="right", no_wrap=True)
    for statistic in as_dict(comparison)["statistics"]:
        table.add_row(statistic["statistic"], style="bold")
        for n, row in enumerate(statistic["results"]):
            cells = [f"  {row['result']}", measured(row["value"], row["value_se"])]
            if n and math.isfinite(row["difference"]):
                error = row["difference_se"]
                far = f"{row['difference'] / error:+.1f}" if error > 0 else "–"
                cells += [measured(row["difference"], error, "+"), far]
            table.add_row(*cells)
    console.print(table, highlight=False)
    pairs = comparison["paired"].values[1:]
    how = (
        "segment by segment, on the same token ids"
        if pairs.all()
        else "of independent texts, the token ids not being the same"
        if not pairs.any()
        else "segment by segment where the token ids are the same, else of independent texts"
    )
    console.print(
        f"[dim]differences are from the first result; ±: standard error over segments, of\ndifferences {how}[/dim]",
        highlight=False,
    )
