"""The table of `bands`: where is the band, how sharp, how steady, where does theory put it, who does not follow."""

from __future__ import annotations

from rich.table import Table

from ...words import amount, base, model_name, ranges, tokens
from .console import Console

RULE_NAMES = {
    "variance": "variance (j*)",
    "half_turn": "half turn",
    "eigenvalue": "covariance",
    "full_turn": "full turn (floor)",
}


def _at(group: dict, key: str, wavelength: str = "") -> str:
    value, error = group[key], group[f"{key}_se"]
    if value is None:
        return "–"
    text = f"{value:.2f}" if error is None else f"{value:.2f} ± {error:.2f}"
    return text if not wavelength else f"{text}   λ {tokens(group[wavelength])}"


def _predicted(group: dict, rule: str) -> str:
    return f"{group['predicted'][rule]:.1f}" + (" (off the ladder)" if rule in group["off_ladder"] else "")


def _rows(group: dict) -> list[tuple[str, str]]:
    low, high = group["band"]
    scaled = "" if group["rope_type"] == "default" else f" ({group['rope_type']})"
    formed = "" if group["formation_base"] == group["base"] else f", formed at {base(group['formation_base'])}"
    return [
        ("layers", ranges(group["layers"])),
        ("base", f"{base(group['base'])}{scaled}{formed}"),
        ("trained length", f"{group['length']:,}" + (" (the window)" if group["window"] == group["length"] else "")),
        ("pairs", f"{group['pairs']}"),
        ("", ""),
        ("i_band, keys", _at(group, "i_band", "wavelength")),
        ("i_band, queries", _at(group, "i_band_q")),
        ("i_band, usage q·k", _at(group, "i_band_usage", "wavelength_usage")),
        ("i_band / pairs", f"{group['share']:.2f}"),
        ("", ""),
        ("mode  (keys, usage)", _both(group, "mode", "{:.0f}")),
        ("median", _both(group, "i_band{}_median", "{:.1f}")),
        ("s.d. over heads", _both(group, "std_heads", "{:.1f}")),
        ("s.d. over layers", _both(group, "std_layers", "{:.1f}")),
        ("", ""),
        ("band, half of peak usage", f"{low} to {high}" if low != high else f"{low}"),
        ("key norm, max / median", amount(group["concentration"])),
        ("effective pairs", amount(group["effective_pairs"])),
        ("layers off the band", ranges(group["deviating_layers"]) or "none"),
        ("", ""),
        *((f"predicted, {RULE_NAMES[rule]}", _predicted(group, rule)) for rule in group["predicted"]),
        ("i_band / j*", "–" if group["c"] is None else f"{group['c']:.2f}"),
    ]


def _both(group: dict, key: str, form: str) -> str:
    """The statistic of the keys, and of the usage."""
    names = (key.format(""), key.format("_usage") if "{}" in key else f"{key}_usage")
    return ",  ".join("–" if group[name] is None else form.format(group[name]) for name in names)


def render(ds, summary: dict) -> None:
    """Print the table of a `bands` result."""
    console = Console()
    groups = summary["by_layer_type"]
    read = f"{summary['segments']} × {summary['length']:,} tokens of {summary['corpus']}"
    if summary["partial"]:
        read += " (interrupted: what was read until then)"
    console.print(f"[bold]{model_name(ds)}[/bold]   {read}", highlight=False)
    table = Table(show_header=len(groups) > 1, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for name in groups:
        table.add_column(name.replace("_", " "), style="none", header_style="bold")
    for cells in zip(*(_rows(group) for group in groups.values()), strict=True):
        table.add_row(
            cells[0][0], *(value for _, value in cells), style="bold" if cells[0][0].startswith("i_band,") else None
        )
    console.print(table, highlight=False)
    if summary["not_rotating"]:
        console.print(f"layers that do not rotate: {ranges(summary['not_rotating'])} (left out)", highlight=False)
    if len(groups) > 1:
        console.print(
            f"all layers: i_band {amount(summary['i_band'])}, by usage {amount(summary['i_band_usage'])}",
            highlight=False,
        )
    console.print(
        "[dim]pair 0 is the fastest; λ: tokens per turn; ±: standard error over segments;\n"
        "off the band: median head over a tenth of the pairs from the median of all[/dim]",
        highlight=False,
    )
