"""The table of `truncate`: what each cut costs, where it starts to hurt, and which pairs alone matter most."""

from __future__ import annotations

from rich.table import Table

from ...probes.truncate_summary import HARMLESS
from ...words import model_name, ranges
from .console import Console

SHOWN = 10  # pairs in the table of knockouts
MODE_NAMES = {"unrotate": "not rotated", "remove": "removed"}


def _signed(value: float, error: float | None) -> str:
    text = f"{value:+.4f}"
    return text if error is None else f"{text} ± {error:.4f}"


def _ratio(one: dict) -> str:
    text = f"{one['ratio']:.3f}" if one["ratio"] < 1000 else f"{one['ratio']:.3g}"
    if one["ratio_se"] is None:
        return text
    return f"{text} ± {one['ratio_se']:.3f}" if one["ratio"] < 1000 else f"{text} ± {one['ratio_se']:.2g}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name == "cut in" else "right", header_style="bold")
    return table


def _cuts(console: Console, summary: dict, kind: str) -> None:
    chosen = [one for one in summary["settings"] if one["kind"] == kind]
    several = len({one["where"] for one in chosen}) > 1 or any(one["where"] != "all layers" for one in chosen)
    name = "keep" if kind == "keep" else "floor ×"
    table = _table(*(["cut in"] if several else []), name, "pairs turning", "nats/token", "perplexity ratio")
    previous = None
    for one in chosen:
        low, high = one["turning"]
        cells = [f"{one['value']:.2f}", f"{low}" if low == high else f"{low}–{high}", f"{one['nll']:.4f}", _ratio(one)]
        where = [one["where"] if one["where"] != previous else ""] if several else []
        table.add_row(*where, *cells)
        previous = one["where"]
    console.print(table, highlight=False)


def _critical(console: Console, summary: dict) -> None:
    for group in summary["keep"]:
        tried = f"ratio at most {HARMLESS}"
        critical = "none tried" if group["critical"] is None else f"{group['critical']:.2f}"
        where = "" if group["where"] == "all layers" else f" in {group['where']}"
        console.print(f"critical keep{where}: [bold]{critical}[/bold]  ({tried})", highlight=False)
        for name, share in group["share"].items():
            label = "" if len(group["share"]) == 1 else f" of {name.replace('_', ' ')}"
            usage = group["share_usage"][name]
            console.print(f"i_band / pairs{label}: {share:.2f} by keys, {usage:.2f} by usage", highlight=False)


def _knockouts(console: Console, summary: dict) -> None:
    for where in dict.fromkeys(one["where"] for one in summary["knockout"]):
        modes = [one for one in summary["knockout"] if one["where"] == where]
        if where != "all layers":
            console.print(f"[bold]{where}[/bold]", highlight=False)
        columns = [name for mode in modes for name in ("pair", "usage", f"{MODE_NAMES[mode['kind']]}, nats")]
        table = _table(*columns)
        for row in range(min(SHOWN, max(len(mode["order"]) for mode in modes))):
            cells = []
            for mode in modes:
                if row < len(mode["order"]):
                    cells += [f"{mode['order'][row]}", f"{mode['usage'][row]:.2f}"]
                    cells.append(_signed(mode["added"][row], mode["added_se"][row]))
                else:
                    cells += ["", "", ""]
            table.add_row(*cells)
        console.print(table, highlight=False)
        for mode in modes:
            rho, share = mode["usage_rank_correlation"], mode["band_share"]
            low, high = mode["band"]
            parts = [f"rank correlation with usage {rho:.2f}"] if rho is not None else []
            if share is not None:
                parts.append(
                    f"the band, pairs {ranges(list(range(low, high + 1)))}, is {mode['band_pairs']:.0%} of the pairs "
                    f"and does {share:.0%} of the harm"
                )
            console.print(f"{MODE_NAMES[mode['kind']]}: " + ";\n  ".join(parts), highlight=False)


def render(ds, summary: dict) -> None:
    """Print the tables of a `truncate` result."""
    console = Console()
    read = f"{summary['segments']} × {summary['length']:,} tokens of {summary['corpus']}"
    if summary["partial"]:
        read += " (interrupted: what was read until then)"
    console.print(f"[bold]{model_name(ds)}[/bold]   {read}", highlight=False)
    error = "" if summary["nll_se"] is None else f" ± {summary['nll_se']:.4f}"
    console.print(
        f"intact: {summary['nll']:.4f}{error} nats/token, perplexity {summary['perplexity']:.2f}", highlight=False
    )
    kinds = {one["kind"] for one in summary["settings"]}
    end = "fast" if summary["reverse"] else "slow"
    for kind in ("keep", "floor"):
        if kind in kinds:
            console.print()
            _cuts(console, summary, kind)
            if kind == "keep":
                _critical(console, summary)
    if summary["knockout"]:
        console.print()
        _knockouts(console, summary)
    notes = ["±: standard error over segments (paired)"]
    if kinds & {"keep", "floor"}:
        notes.insert(0, f"pairs stop from the {end} end; damage grows with the length of the segments")
    if summary["knockout"]:
        notes.append("usage: mean ‖q‖·‖k‖ of the pair, 1 = the average pair")
    console.print("[dim]" + ";\n".join(notes) + "[/dim]", highlight=False)
