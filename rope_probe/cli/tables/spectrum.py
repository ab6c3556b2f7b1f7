"""The table of `spectrum`: which pairs are still pure tones, where damage sets in, what came of the injected tone."""

from __future__ import annotations

import textwrap

from rich.table import Table

from ...probes.spectrum_summary import CLEAN, PURE
from ...words import base, model_name, ranges
from .console import Console

MANY = 6  # injected pairs from which on layers are summed up in one row


def _percent(value: float | None, error: float | None = None) -> str:
    if value is None:
        return "–"
    digits = 1 if value < 0.1 else 0
    return f"{value:.{digits}%}" + ("" if error is None else f" ± {100 * error:.{digits}f}")


def _with_error(row: dict, key: str, form: str) -> str:
    value, error = row[key], row[f"{key}_se"]
    if value is None:
        return ""
    return f"{value:{form}}" + ("" if error is None else f" ±{error:{form.lstrip('+')}}")


def _pure(group: dict) -> str:
    if not group["resolvable"]:
        return "no pair turns twice within the distances"
    return ranges(group["pure"]) or "none"


def _onset(group: dict) -> str:
    if not group["resolvable"]:
        return "–"
    return "in none of the resolvable pairs" if group["onset"] is None else f"at pair {group['onset']}"


def _followed(group: dict) -> str:
    onset = group["onset_r2"]
    return "every pair" if onset is None else f"0–{onset - 1}" if onset > 1 else "0" if onset else "none"


def _floor(group: dict) -> str:
    if group["floor"] is None:
        return "no pair is below it"
    last = group["floor"] + group["below_floor"] - 1
    return f"{_percent(group['power_below_floor'])} in pairs {ranges(list(range(group['floor'], last + 1)))}"


def _worst(group: dict) -> str:
    worst = group["worst"]
    if worst is None:
        return "–"
    return f"{worst['purity']:.2f} in layer {worst['layer']}, head {worst['head']}, pair {worst['pair']}"


def _rows(group: dict) -> list[tuple[str, str]]:
    most = [f"{row['layer']} ({_percent(row['damage'], row['damage_se'])})" for row in group["most_damaged"]]
    return [
        ("layers", ranges(group["layers"])),
        ("base", base(group["base"])),
        ("trained length", f"{group['length']:,}" + (" (the window)" if group["window"] == group["length"] else "")),
        ("distances", f"0–{group['distances'] - 1}"),
        ("resolvable pairs", f"{ranges(group['resolvable']) or 'none'} of {group['pairs']}"),
        ("", ""),
        ("pure in every layer", _pure(group)),
        ("damage sets in", _onset(group)),
        ("lowest single head", _worst(group)),
        ("heads below the mark", _percent(group["heads_below"])),
        ("follow their tone", _followed(group)),
        ("", ""),
        ("damage, mean of layers", _percent(group["damage"], group["damage_se"])),
        ("with endless text", _percent(group["damage_limit"])),
        ("of pure tones", _percent(group["damage_tone"])),
        *(("" if n else "most damaged", text) for n, text in enumerate(most)),
        ("power below the floor", _floor(group)),
    ]


def render(ds, summary: dict) -> None:
    """Print the table of a `spectrum` result."""
    console = Console()
    groups = summary["by_layer_type"]
    read = f"{summary['segments']} × {summary['length']:,} tokens of {summary['corpus']}"
    if summary["partial"]:
        read += " (interrupted: what was read until then)"
    console.print(f"[bold]{model_name(ds)}[/bold]   {read}", highlight=False)
    table = Table(show_header=len(groups) > 1, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("", no_wrap=True)
    for name in groups:
        table.add_column(name.replace("_", " "), header_style="bold")
    for cells in _aligned([_rows(group) for group in groups.values()]):
        table.add_row(*cells, style="bold" if cells[0] in ("pure in every layer", "damage sets in") else None)
    console.print(table, highlight=False)
    if summary["not_rotating"]:
        console.print(f"layers that do not rotate: {ranges(summary['not_rotating'])} (profile only)", highlight=False)
    console.print(
        "[dim]purity: share of a pair's power near its own frequency; resolvable: turns\n"
        f"twice; pure: median of heads at least {PURE:g} of a pure tone's; follow: median R²\n"
        f"of the tone ≥ {CLEAN:g} from pair 0 on; damage: 1 − usage-weighted mean purity; with\n"
        "endless text: the part that falls with the segments taken off (jackknife); of\n"
        "pure tones: the limit of the estimator; ±: standard error over segments[/dim]",
        highlight=False,
    )
    if summary["inject"]:
        _experiment(console, summary)


def _aligned(columns: list[list[tuple[str, str]]]) -> list[tuple[str, ...]]:
    """Rows of all kinds of layers side by side; kinds of fewer layers have fewer rows of most damaged ones."""
    longest = max(columns, key=len)
    rows = []
    for column in columns:
        missing = len(longest) - len(column)
        rows.append([*column[:-1], *[("", "")] * missing, column[-1]])
    return [(longest[n][0], *(column[n][1] for column in rows)) for n in range(len(longest))]


def _experiment(console: Console, summary: dict) -> None:
    """The single-tone experiment, with its controls, and the sentence that its numbers allow."""
    first = summary["inject"][0]["layer"]
    console.print(f"\n[bold]one tone at a time, in layer {first}[/bold]", highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    names = ("pair", "layer", "leakage", "none", "tone", "excess", "carried", "elsewhere")
    for name in ("", *names):
        table.add_column(name, justify="right" if name in names[1:5] else "left", no_wrap=True)
    experiments = {"": summary["inject"]} | {f"no {part}": rows for part, rows in summary["ablate"].items()}
    for name, rows in experiments.items():
        for row in _shown(rows):
            if name and row["layer"] == first:
                continue
            shares = (
                _with_error(row | {f"{key}_se": None}, key, ".3f")
                for key in ("leakage", "leakage_none", "leakage_tone")
            )
            others = (
                _with_error(row, key, form)
                for key, form in (("excess", "+.3f"), ("carried", ".2f"), ("carried_elsewhere", ".2f"))
            )
            table.add_row(name, str(row["inject"]), str(row["layer"]), *shares, *others)
    console.print(table, highlight=False)
    for name, rows in experiments.items():
        if name == "no attention":
            print("no attention: without it in the layer of the tone, nothing of the tone goes on.")
            continue
        for sentence in sentences(rows):
            words = f"{name}: {sentence}" if name else sentence
            print(textwrap.fill(words, 78, subsequent_indent="  "))
    console.print(
        "[dim]leakage: share of power away from the tone; none: without injection; tone:\n"
        "of a pure tone; carried: power near the tone, the layer's own rotation taken\n"
        "back, over that without injection; elsewhere: at all other frequencies[/dim]",
        highlight=False,
    )


def _shown(rows: list[dict]) -> list[dict]:
    """The rows to print: one for each pair, or the mean over resolvable pairs where there are many."""
    if len({row["inject"] for row in rows}) <= MANY:
        return rows
    summed = []
    for layer in dict.fromkeys(row["layer"] for row in rows):
        here = [row for row in _telling(rows) if row["layer"] == layer]
        one = {"inject": f"{len(here)} pairs", "layer": layer}
        for key in ("leakage", "leakage_none", "leakage_tone", "excess", "carried", "carried_elsewhere"):
            values = [row[key] for row in here if row[key] is not None]
            one |= {key: sum(values) / len(values) if values else None, f"{key}_se": None}
        summed.append(one)
    return summed


def sentences(rows: list[dict]) -> list[str]:
    """What the numbers of each later layer allow to be said; a difference counts beyond two standard errors."""
    found = []
    for layer in dict.fromkeys(row["layer"] for row in rows):
        here = [row for row in _telling(rows) if row["layer"] == layer and row["excess"] is not None]
        judged = [row for row in here if row["excess_se"] is not None and row["selectivity_se"] is not None]
        if not here:
            continue
        if not judged:
            found.append(f"layer {layer}: one segment does not tell what is due to the tone.")
            continue
        higher = sum(row["excess"] > 2 * row["excess_se"] for row in judged)
        lower = sum(row["excess"] < -2 * row["excess_se"] for row in judged)
        favoured = sum(row["selectivity"] - 1 > 2 * row["selectivity_se"] for row in judged)
        if len(judged) == 1:
            row = judged[0]
            change = (
                f"{abs(row['excess']):.3f} {'higher' if higher else 'lower'}" if higher or lower else "no different"
            )
            stands = "stands out" if favoured else "does not stand out, within the errors"
            found.append(
                f"layer {layer}: leakage is {change} with the tone; its own rotation taken back, power near the "
                f"tone is {row['carried']:.1f} times that without it, elsewhere {row['carried_elsewhere']:.1f} times: "
                f"the tone {stands}."
            )
        else:
            found.append(
                f"layer {layer}, {len(judged)} pairs: leakage is higher with the tone for {higher}, lower for "
                f"{lower}; its own rotation taken back, the tone stands out from other frequencies for {favoured}."
            )
    return found


def _telling(rows: list[dict]) -> list[dict]:
    """Resolvable pairs only, where many were injected and there are any."""
    many = len({row["inject"] for row in rows}) > MANY
    return [row for row in rows if row["resolvable"]] * many or rows
