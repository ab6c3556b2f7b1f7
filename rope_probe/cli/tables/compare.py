"""The table of `compare`: every statistic of every result, and how far it is from that of the first."""

from __future__ import annotations

import math
import textwrap

import numpy as np
from rich.table import Table

from ...probes.compare_axes import AXES
from .console import Console

UNITS = (("G", 1e9), ("M", 1e6), ("k", 1e3))


def measured(value: float, error: float, sign: str = "") -> str:
    """A number with its standard error, to the digits that the error leaves it: 23.41 ± 0.12, 37.07k ± 0.27k."""
    if not math.isfinite(value):
        return "–"
    unit, size = next(((unit, size) for unit, size in UNITS if abs(value) >= 10 * size), ("", 1.0))
    value, error = value / size, error / size
    if not math.isfinite(error) or error <= 0:
        return f"{value:{sign}.{3 if abs(value) < 10 else 1}f}{unit}"
    digits = min(4, max(0, 1 - math.floor(math.log10(error))))
    return f"{value:{sign}.{digits}f}{unit} ± {error:.{digits}f}{unit}"


def as_dict(comparison) -> dict:
    """The comparison as plain values, for JSON."""
    results, statistics = comparison["result"].values.tolist(), []
    known = {name: comparison[name].values for name in ("value", "value_se", "difference", "difference_se", "paired")}
    for column, name in enumerate(comparison["statistic"].values.tolist()):
        rows = [
            {"result": result} | {key: values[row, column].item() for key, values in known.items()}
            for row, result in enumerate(results)
        ]
        statistics.append({"statistic": name, "results": rows})
    about = [
        {"result": result} | {key: comparison[key].values[row].item() for key in ("kind", "reference", "same_tokens")}
        for row, result in enumerate(results)
    ]
    found = {"analysis": "compare", "compared": comparison.attrs["compared"], "results": about}
    return found | {"statistics": statistics, "axes": _axes(comparison)}


def _axes(comparison) -> list[dict]:
    """How far bands agree on each axis, one entry for each result that has one band."""
    if "offset" not in comparison:
        return []
    found = []
    for row, result in enumerate(comparison["result"].values.tolist()):
        one = comparison.isel(result=row)
        if one["overlap"].notnull().any():
            values = {
                axis: {key: one[key].sel(axis=axis).item() for key in ("offset", "offset_se", "overlap")}
                for axis in comparison["axis"].values.tolist()
            }
            found.append({"result": result, "reference": one["reference"].item()} | values)
    return found


def render(comparison) -> None:
    """Print the table of a comparison."""
    console = Console()
    values = as_dict(comparison)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column(comparison.attrs["compared"], header_style="bold", overflow="fold")
    for title in ("value", "difference", "in s.e."):
        table.add_column(title, justify="right", no_wrap=True, header_style="bold")
    files = comparison["file"].values.tolist()
    for statistic in values["statistics"]:
        table.add_row(statistic["statistic"], style="bold")
        rows = statistic["results"]
        known = {file for file, row in zip(files, rows, strict=True) if math.isfinite(row["value"])}
        for file, row in zip(files, rows, strict=True):
            if file in known and not math.isfinite(row["value"]):
                continue  # other layers of that result have it
            cells = [f"  {row['result']}", measured(row["value"], row["value_se"])]
            if file and math.isfinite(row["difference"]):
                error = row["difference_se"]
                far = f"{row['difference'] / error:+.1f}" if error > 0 else "–"
                cells += [measured(row["difference"], error, "+"), far]
            table.add_row(*cells)
    console.print(table, highlight=False)
    console.print(f"[dim]{_errors(comparison)}[/dim]", highlight=False)
    sizes = [[row[axis]["offset"] for axis in AXES] for row in values["axes"]]
    if sizes and np.ptp(sizes, axis=1).max() > 1e-9:  # else the axes are the same one
        console.print()
        _agreement(console, values["axes"])


def _errors(comparison) -> str:
    """What the errors are, in words."""
    later = comparison["file"].values > 0
    known = comparison["difference_se"].notnull().values[later]
    paired = comparison["paired"].values[later][known]
    same = comparison["same_tokens"].values[later]
    reference = "the first result"
    if (comparison["file"].values == 0).sum() > 1:
        reference += ", its layers of the same kind where it has them"
    if not known.any():
        words = "no errors: values of segments are not kept"
    elif paired.all():
        words = "of differences segment by segment, on the same token ids"
    elif not paired.any() and same.any():
        words = "of differences as of independent texts, values of segments not being kept"
    elif not paired.any():
        words = "of differences of independent texts, the token ids not being the same"
    else:
        words = "of differences segment by segment where the token ids are the same, else of independent texts"
    text = f"differences are from {reference}; "
    text += words if not known.any() else f"±: standard error over segments, {words}"
    if known.any() and not np.isfinite(comparison["value_se"].values).all(axis=0).all():
        text += "; without ±: all segments agree, or theirs are not kept"
    return textwrap.fill(text, 78)


def _agreement(console: Console, axes: list[dict]) -> None:
    """How far bands agree if pairs are laid side by side on each axis."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("pairs side by side by", header_style="bold", overflow="fold")
    for title in AXES.values():
        table.add_column(title, justify="right", no_wrap=True, header_style="bold")
    table.add_row("i_band, usage: off by, / pairs", style="bold")
    for row in axes:
        cells = [f"{row[axis]['offset']:+.3f}" for axis in AXES]
        errors = [row[axis]["offset_se"] for axis in AXES]
        cells = [f"{cell} ± {se:.3f}" if math.isfinite(se) else cell for cell, se in zip(cells, errors, strict=True)]
        table.add_row(f"  {row['result']}", *cells)
    table.add_row("usage profiles: overlap", style="bold")
    for row in axes:
        table.add_row(f"  {row['result']}", *(f"{row[axis]['overlap']:.2f}" for axis in AXES))
    console.print(table, highlight=False)
    sizes = {axis: sum(abs(row[axis]["offset"]) for row in axes) / len(axes) for axis in AXES}
    best = [AXES[axis] for axis in AXES if sizes[axis] <= min(sizes.values()) + 1e-9]
    words = (
        f"off by: from where the first has its band, on that axis; mean size "
        f"{', '.join(f'{size:.3f} by {AXES[axis]}' for axis, size in sizes.items())}: smallest by {' and '.join(best)}; "
        "overlap: area that profiles of area 1 share over the range of both, 1: the same"
    )
    console.print(f"[dim]{textwrap.fill(words, 78)}[/dim]", highlight=False)
