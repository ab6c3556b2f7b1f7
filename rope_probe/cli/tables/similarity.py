"""The table of `similarity`: how far attention follows similarity, by layer and by distance, and how sure that is."""

from __future__ import annotations

from rich.table import Table

from ...words import model_name, ranges
from .console import Console

MANY = 36  # layers from which on neighbours share a row


def signed(value: float | None, error: float | None = None) -> str:
    """A correlation with its standard error: +0.214 ± 0.010."""
    if value is None:
        return "–"
    return f"{value:+.3f}" + ("" if error is None else f" ± {error:.3f}")


def render(ds, summary: dict) -> None:
    """Print the table of a `similarity` result."""
    console = Console()
    read = f"{summary['segments']} × {summary['length']:,} tokens of {summary['corpus']}"
    if summary["partial"]:
        read += " (interrupted: what was read until then)"
    console.print(f"[bold]{model_name(ds)}[/bold]   {read}", highlight=False)
    rows = "all query rows" if summary["queries"] == "all" else f"{summary['queries']} query rows per segment"
    console.print(f"{rows}, keys from position {summary['sink']} on", highlight=False)
    console.print(_layers(summary), highlight=False)
    if summary["by_distance"]:
        console.print()
        console.print(_distances(summary["by_distance"]), highlight=False)
    for note in _notes(summary):
        console.print(note, highlight=False)
    console.print(
        "[dim]rho: Spearman correlation of hidden-state similarity and score over the keys\n"
        "of a row, mean over heads; at distance: over query positions, the key always\n"
        "as far back, mean of distances; > 0: share of heads; ±: standard error[/dim]",
        highlight=False,
    )


def _layers(summary: dict) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    mixed = len(summary["by_layer_type"]) > 1
    table.add_column("layer", no_wrap=True)
    for name in ("rho", "lowest", "highest", "> 0", "at distance", *(["window"] if mixed else [])):
        table.add_column(name, justify="right", no_wrap=True)
    rows = summary["by_layer"]
    size = -(-len(rows) // MANY)
    for start in range(0, len(rows), size):
        group = rows[start : start + size]
        seen = ", ".join(dict.fromkeys(_window(row) for row in group)) if mixed else None
        table.add_row(ranges([row["layer"] for row in group]), *_cells(_mean(group)), *([seen] if mixed else []))
    if mixed:
        for name, row in summary["by_layer_type"].items():
            table.add_row(name.replace(" attention", "").replace("full, no", "no"), *_cells(row), style="bold")
    table.add_row("all", *_cells(summary), style="bold")
    return table


def _window(row: dict) -> str:
    """What a layer sees, in few characters."""
    if not row["rotates"]:
        return "no RoPE"
    return f"{row['window']:,}" if row["window"] else "none"


def _cells(row: dict) -> list[str]:
    share = "–" if row["positive"] is None else f"{row['positive']:.0%}"
    return [
        signed(row["rho"], row["rho_se"]),
        signed(row["lowest"]),
        signed(row["highest"]),
        share,
        signed(row["rho_fixed"], row["rho_fixed_se"]),
    ]


def _mean(group: list[dict]) -> dict:
    """Neighbouring layers as one row; a single layer stays as it is."""
    if len(group) == 1:
        return group[0]
    known = [row for row in group if row["rho"] is not None]
    if not known:
        return group[0]

    def mean(name):
        values = [row[name] for row in known if row[name] is not None]
        return sum(values) / len(values) if values else None

    return {
        "rho": mean("rho"),
        "rho_se": None,  # layers err together on the same text
        "lowest": min(row["lowest"] for row in known),
        "highest": max(row["highest"] for row in known),
        "positive": mean("positive"),
        "rho_fixed": mean("rho_fixed"),
        "rho_fixed_se": None,
    }


def _distances(rows: list[dict]) -> Table:
    """rho by distance, as many columns as fit."""
    step = -(-len(rows) // 10)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("distance", no_wrap=True)
    for row in rows[::step]:
        table.add_column(f"{row['distance']:,}", justify="right", no_wrap=True)
    for name, key in (("rho", "rho"), ("±", "rho_se")):
        if any(row[key] is not None for row in rows):
            table.add_row(name, *(_short(row[key], key == "rho") for row in rows[::step]))
    return table


def _short(value: float | None, sign: bool) -> str:
    if value is None:
        return "–"
    return f"{value:+.2f}" if sign else f"{value:.3f}".removeprefix("0")


def _notes(summary: dict) -> list[str]:
    notes = []
    negative = [row["layer"] for row in summary["by_layer"] if row["rho"] is not None and row["rho"] <= 0]
    if negative:
        notes.append(f"layers whose mean is not positive: {ranges(negative)}")
    empty = [row["layer"] for row in summary["by_layer"] if row["rho"] is None]
    if empty:
        notes.append(f"layers without a value: {ranges(empty)}")
    elif summary["without_value"]:
        notes.append(f"heads without a value (one side constant): {summary['without_value']}")
    return notes
