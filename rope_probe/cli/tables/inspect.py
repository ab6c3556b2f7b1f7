"""The table of `inspect`: one column for each kind of layer."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from ...words import base, ranges, tokens
from .bands import RULE_NAMES
from .console import Console


def _scaling(kind: dict) -> str:
    """Rope type and its numbers; long lists of factors by their range."""
    shown = []
    for key, value in kind["parameters"].items():
        if key in ("rope_theta", "rope_type", "type") or value is None:
            continue
        if isinstance(value, bool):
            value = str(value).lower()
        if isinstance(value, (list, tuple)):
            value = f"{min(value):g}–{max(value):g}"
        name = {"original_max_position_embeddings": "original"}.get(key, key)
        shown.append(f"{name} {value:g}" if isinstance(value, (int, float)) else f"{name} {value}")
    return "\n".join([kind["rope_type"], *shown])


def _bound(kind: dict) -> str:
    if kind["bound"] is None:
        return "none up to 2M"
    return f"{kind['bound']:,} " + ("≥" if kind["carries"] else "<") + f" {kind['reach']:,}"


def _rows(kind: dict) -> list[tuple[str, str]]:
    rows = [
        ("layers", f"{kind['count']}:  {ranges(kind['layers'])}"),
        ("window", f"{kind['window']:,}" if kind["window"] else "none"),
    ]
    if not kind["rotates"]:
        return [*rows, ("rotation", "none (NoPE)")]
    return [
        *rows,
        ("base", base(kind["base"])),
        ("rope type", _scaling(kind)),
        ("attention scaling", f"{kind['attention_scaling']:.6g}"),
        ("channels that rotate", f"{kind['rotary_dim']} of {kind['head_dim']}, {kind['layout']}"),
        ("pairs", f"{kind['pairs']}" + (f" ({kind['zero_pairs']} never turn)" if kind["zero_pairs"] else "")),
        ("wavelength", f"{tokens(kind['wavelength_min'])} to {tokens(kind['wavelength_max'])} tokens"),
        ("trained length", f"{kind['length']:,}"),
        ("pairs below the floor", f"{kind['undertrained']}"),
        ("critical dimension", f"{kind['critical_dimension']}"),
        *((f"predicted, {RULE_NAMES[rule]}", f"{value:.2f}") for rule, value in kind["predicted"].items()),
        ("L_bound, context seen", _bound(kind)),
    ]


def render(entry: dict) -> None:
    """Print what `inspect` found of one model."""
    console = Console()
    name = Path(entry["model"]).stem if entry["model"].endswith(".json") else Path(entry["model"]).name
    at = f", at {entry['at_length']:,} tokens" if entry["at_length"] else ""
    console.print(
        f"[bold]{name}[/bold]\n{entry['model_type']}, {entry['heads']} heads, {entry['kv_heads']} kv heads, "
        f"claims {entry['claimed_length']:,} tokens{at}",
        highlight=False,
    )
    columns = [dict(_rows(kind)) for kind in entry["kinds"]]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    table = Table(show_header=len(columns) > 1, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    for kind in entry["kinds"]:
        table.add_column(kind["layer_type"].replace("_", " "), header_style="bold")
    for label in labels:
        table.add_row(label, *(column.get(label, "") for column in columns))
    console.print(table, highlight=False)
    for note in entry["notes"]:
        console.print(f"· {note}", highlight=False)
    console.print()
