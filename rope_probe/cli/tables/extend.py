"""The table of `extend`: perplexity and retrieval of every setting by length, with L_bound beside them."""

from __future__ import annotations

from rich.table import Table

from ...words import model_name
from .console import Console


def _table(summary: dict) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("base", header_style="bold")
    table.add_column("scaling", header_style="bold")
    several = len(summary["layers"]) > 1
    for name in summary["layers"]:
        title = f"L_bound\n{name.replace('_', ' ').replace(' attention', '')}" if several else "L_bound"
        table.add_column(title, justify="right", header_style="bold")
    return table


def _columns(table: Table, names: list[str]) -> None:
    for name in names:
        table.add_column(name, justify="right", header_style="bold")


def _head(summary: dict, setting: dict, lengths: list[int]) -> list[str]:
    """Base, scaling, and the bound of each kind of layer: a range where it moves with the length."""
    cells = [setting["base"], setting["scaling"]]
    for name in summary["layers"]:
        bounds = [one["bound"][name] for one in setting["lengths"] if one["length"] in lengths]
        shown = list(dict.fromkeys("> 2M" if bound is None else f"{bound:,}" for bound in bounds))
        cells.append(shown[0] if len(shown) == 1 else f"{shown[0]}–{shown[-1]}")
    return cells


def _perplexity(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}" if value < 1e5 else f"{value:.1e}"


def _ratio(one: dict) -> str:
    if one["ratio"] is None:
        return "–"
    digits = ".3f" if one["ratio"] < 10 else ".1f" if one["ratio"] < 1000 else ".2g"
    error = "" if one["ratio_se"] is None else f" ± {one['ratio_se']:{digits}}"
    return f"{one['ratio']:{digits}}{error}"


def _texts(console: Console, summary: dict) -> None:
    lengths = summary["lengths"]
    table = _table(summary)
    _columns(table, [*(f"{length:,}" for length in lengths), f"ratio, {lengths[-1]:,}"])
    for setting in summary["settings"]:
        by_length = {one["length"]: one for one in setting["lengths"]}
        cells = [_perplexity(by_length[length]["perplexity"]) for length in lengths]
        table.add_row(*_head(summary, setting, lengths), *cells, _ratio(by_length[lengths[-1]]))
    console.print("[bold]perplexity[/bold] of so many tokens", highlight=False)
    console.print(table, highlight=False)


def _keys(console: Console, summary: dict, keys: int) -> None:
    lengths = summary["passkey_lengths"]
    table = _table(summary)
    _columns(table, [*(f"{length:,}" for length in lengths), *(f"ln p\n{length:,}" for length in lengths)])
    for setting in summary["settings"]:
        found = [
            next((entry for entry in one["retrieval"] if entry["keys"] == keys), None)
            for one in setting["lengths"]
            if one["length"] in lengths
        ]
        exact = ["–" if entry is None else f"{entry['exact_match']:.0%}" for entry in found]
        logprob = ["–" if entry is None else f"{entry['key_logprob']:.1f}" for entry in found]
        table.add_row(*_head(summary, setting, lengths), *exact, *logprob)
    prompts = len(summary["depths"]) * summary["samples"]
    others = "" if keys == 1 else f" among {keys}"
    console.print(
        f"[bold]key[/bold] found{others} in prompts of so many tokens ({prompts} each); its log probability",
        highlight=False,
    )
    console.print(table, highlight=False)


def render(ds, summary: dict) -> None:
    """Print the tables of an `extend` result."""
    console = Console()
    read = f"{summary['segments']} × {summary['length']:,} tokens of {summary['corpus']}"
    if summary["partial"]:
        read += " (interrupted: what was whole by then)"
    console.print(f"[bold]{model_name(ds)}[/bold]   {read}", highlight=False)
    console.print()
    _texts(console, summary)
    intact = next((f"the model as it is ({one['name']})" for one in summary["settings"] if one["intact"]), "")
    notes = [f"ratio: of perplexities, to {intact}", "±: standard error over segments (paired)"]
    for keys in summary["keys"] if summary["passkey_lengths"] else []:
        console.print()
        _keys(console, summary, keys)
    if summary["passkey_lengths"]:
        notes.append("found: greedy decoding writes all five digits; ln p: nats, mean of prompts")
    if any(setting["base"] == "match" for setting in summary["settings"]):
        notes.append("base match: the length that is read, of a prompt its own")
    console.print("[dim]" + ";\n".join(notes) + "[/dim]", highlight=False)
