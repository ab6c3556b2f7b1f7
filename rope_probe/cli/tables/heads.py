"""The table of `heads`: how many heads have which role, where their band is, and who they are."""

from __future__ import annotations

import textwrap

from rich.table import Table

from ...probes.heads_summary import FAST, GROUPS
from ...words import amount, model_name, ranges, tokens
from .console import Console

MANY = 8  # heads named of each sort
NAMES = {0: "own token", 1: "previous token"}


def render(ds, summary: dict) -> None:
    """Print the table of a `heads` result."""
    console = Console()
    read = f"{summary['segments']} × {summary['length']:,} tokens of {summary['corpus']}"
    if summary["partial"]:
        read += " (interrupted: what was read until then)"
    console.print(f"[bold]{model_name(ds)}[/bold]   {read}", highlight=False)
    sums = summary["groups"]["all"]["row_sum"] < 0.9995  # sink logits take a share
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    titles = ["", "heads", "i_band", "usage", "λ", "fast", "distance", "entropy", "sink", *["sum"] * sums]
    for title in titles:
        table.add_column(title, justify="right" if title else "left", header_style="bold", no_wrap=True)
    for name in GROUPS:
        group = summary["groups"][name]
        table.add_row(*_row(name, group, sums), style="bold" if name in GROUPS[:2] else None)
    for name, kind in summary["by_layer_type"].items():
        if len(summary["by_layer_type"]) > 1:
            table.add_section()
            table.add_row(name.replace("_", " ").replace("attention", "layers"))
            for group in GROUPS[:2]:
                table.add_row(*_row(group, kind["groups"][group], sums))
    console.print(table, highlight=False)
    if summary["i_band_se"] is not None:
        print(f"all heads: i_band ± {summary['i_band_se']:.2f}, usage ± {summary['i_band_usage_se']:.2f} over segments")
    _heads(summary)
    _relations(summary)
    limits = summary["thresholds"]
    console.print(
        "[dim]i_band: mean dominant pair of the keys a head reads; usage: the same of q·k;\n"
        f"λ: its median, tokens per turn; fast: share of usage in pairs of λ ≤ {FAST};\n"
        "distance, entropy: means (tokens, nats); sink: weight on the first position;\n"
        f"positional: weight ≥ {limits['positional']:g} on one distance of 0–4; induction: score ≥ "
        f"{limits['induction']:g};\nsink: ≥ {limits['sink']:g}, in this order; semantic: all but positional[/dim]",
        highlight=False,
    )


def _row(name: str, group: dict, sums: bool) -> list[str]:
    def share(key):
        return "–" if group[key] is None else f"{group[key]:.2f}"

    cells = [
        name if name in GROUPS[:2] else f"  {name}",
        str(group["heads"]),
        amount(group["i_band"]),
        amount(group["i_band_usage"]),
        "–" if group["wavelength"] is None else tokens(group["wavelength"]),
        share("fast_share"),
        "–" if group["mean_distance"] is None else tokens(group["mean_distance"]),
        share("entropy"),
        share("sink_weight"),
    ]
    return [*cells, share("row_sum")] if sums else cells


def _heads(summary: dict) -> None:
    """Heads by name, LAYER.HEAD with the weight that makes their role."""
    sorts = {
        NAMES.get(distance, f"{distance} tokens back"): found for distance, found in summary["positional_heads"].items()
    }
    print()
    for name, found in (sorts | {"induction": summary["induction_heads"]}).items():
        words = ", ".join(f"{one['layer']}.{one['head']} ({one['weight']:.2f})" for one in found[:MANY])
        more = f" and {len(found) - MANY} more" if len(found) > MANY else ""
        print(textwrap.fill(f"{name:<16} {words or 'none'}{more}", 78, subsequent_indent=" " * 17))


def _relations(summary: dict) -> None:
    print()
    several = len(summary["by_layer_type"]) > 1
    for name, kind in summary["by_layer_type"].items():
        layers = f" of the {name.replace('_', ' ').replace('attention', 'layers')}" if several else ""
        rho = kind["wavelength_distance"]
        if rho is not None:
            print(f"λ against mean distance{layers}: rank correlation {rho:+.2f}")
        low, high = kind["band"]
        shares = dict(zip(kind["band_share"]["lag"], kind["band_share"]["all"], strict=True))
        shares = {lag: value for lag, value in shares.items() if value is not None and lag}
        if not shares:
            continue
        shown = sorted({min(shares), max(shares), *(lag for lag in shares if lag == 16)})
        values = ", ".join(f"{shares[lag]:.0%} at {lag}" for lag in shown)
        band = f"band pair {low}" if low == high else f"band pairs {low}–{high}"
        words = (
            f"{band}{layers} ({(high - low + 1) / kind['pairs']:.0%} of all): share of the mean score, in magnitude, "
            f"{values} tokens back"
        )
        print(textwrap.fill(words, 78, subsequent_indent="  "))
    if summary["not_rotating"]:
        print(f"layers that do not rotate: {ranges(summary['not_rotating'])} (weights only)")
