"""The main numbers of a report, in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..cli.tables.compare import measured
from ..probes.heads_summary import ROLES
from ..probes.truncate_summary import HARMLESS
from ..words import tokens

if TYPE_CHECKING:
    from .record import Report


@dataclass(frozen=True)
class Fact:
    """One number, or one for each kind of layer.

    Attributes
    ----------
    label : str
    section : str
        The analysis it is from.
    values : tuple of (str, str)
        Of what (empty where there is but one), and the number.
    words : str
        What it means.
    """

    label: str
    section: str
    values: tuple[tuple[str, str], ...]
    words: str

    def as_dict(self) -> dict:
        return asdict(self)


def facts(report: Report) -> list[Fact]:
    """What a reader asks first; only of analyses that have an answer."""
    found = []
    for section in report.sections:
        for make in _FACTS.get(section.name, ()) if section.values else ():
            fact = make(section.values)
            if fact and fact.values:
                found.append(fact)
    return found


def _number(values: dict, key: str, sign: str = "", percent: bool = False) -> str:
    """A number with its standard error, to the digits that this leaves it."""
    value, error = values[key], values.get(f"{key}_se")
    if value is None:
        return "–"
    size = 100 if percent else 1
    return measured(size * value, math.nan if error is None else size * error, sign) + "%" * percent


def _pair(group: dict, key: str) -> str:
    """A place on the pair axis with its standard error, as the table of `bands` has it."""
    value, error = group[key], group[f"{key}_se"]
    if value is None:
        return "–"
    return f"{value:.2f}" if error is None else f"{value:.2f} ± {error:.2f}"


def _kinds(groups: dict[str, dict], words: Callable[[dict], str]) -> tuple[tuple[str, str], ...]:
    """A number for every kind of layer; without its name where there is one kind."""
    return tuple(("" if len(groups) == 1 else name.replace("_", " "), words(group)) for name, group in groups.items())


def _rotating(values: dict) -> dict[str, dict]:
    """Kinds of layers that rotate, as `inspect` describes them."""
    found: dict[str, dict] = {}
    for kind in values["kinds"]:
        if kind["rotates"]:
            name = kind["layer_type"]
            found[name if name not in found else f"{name}, base {kind['base']:g}"] = kind
    return found


def _floor(values: dict) -> Fact:
    kinds = _rotating(values)
    lengths = " and ".join(dict.fromkeys(f"{kind['length']:,}" for kind in kinds.values()))
    words = f"never finish a turn within the trained length of {lengths} tokens"
    return Fact(
        "Pairs below the floor",
        "inspect",
        _kinds(kinds, lambda kind: f"{kind['undertrained']} of {kind['pairs']}"),
        words,
    )


def _bound(values: dict) -> Fact:
    def words(kind: dict) -> str:
        return "over 2M tokens" if kind["bound"] is None else f"{kind['bound']:,} tokens"

    kinds = _rotating(values)
    enough = [("enough for" if kind["carries"] else "short of") + f" the {kind['reach']:,}" for kind in kinds.values()]
    words_of = f"how far the base carries: {' and '.join(enough)} tokens that heads see"
    return Fact("L_bound", "inspect", _kinds(kinds, words), words_of)


def _band(values: dict) -> Fact:
    def words(group: dict) -> str:
        return f"pair {_pair(group, 'i_band')} of {group['pairs']}"

    groups = values["by_layer_type"]
    waves = " and ".join(tokens(group["wavelength"]) for group in groups.values() if group["wavelength"] is not None)
    usage = " and ".join(_pair(group, "i_band_usage") for group in groups.values())
    return Fact(
        "Frequency band",
        "bands",
        _kinds(groups, words),
        f"by keys, at a wavelength of {waves} tokens; by usage {usage}",
    )


def _predicted(values: dict) -> Fact:
    groups = values["by_layer_type"]

    def words(group: dict) -> str:
        low, high = group["predicted"]["full_turn"], group["predicted"]["half_turn"]
        off = " (off the ladder)" if high > group["pairs"] - 1 else ""
        return f"pair {low:.1f} to {high:.1f}{off}"

    ratios = " and ".join("–" if group["c"] is None else f"{group['c']:.2f}" for group in groups.values())
    return Fact(
        "Predicted band",
        "bands",
        _kinds(groups, words),
        f"one turn to half a turn within the trained length; measured / j* = {ratios}",
    )


def _roles(values: dict) -> Fact:
    groups = values["groups"]
    roles = ", ".join(f"{groups[name]['heads']} {name}" for name in ROLES)
    return Fact("Roles of heads", "heads", (("", roles),), f"of {groups['all']['heads']} heads")


def _rho(values: dict) -> Fact:
    words = "rank correlation of hidden-state similarity and score"
    if values["positive"] is not None:
        words += f"; positive in {values['positive']:.0%} of heads"
    words += f"; at fixed distance {_number(values, 'rho_fixed', '+')}"
    return Fact("Similar tokens", "similarity", (("", f"rho {_number(values, 'rho', '+')}"),), words)


def _critical(values: dict) -> Fact | None:
    if not values["keep"]:
        return None
    group = values["keep"][0]
    bands = " and ".join(f"{share:.2f}" for share in group["share"].values() if share is not None)
    limit = f"perplexity to rise by at most {HARMLESS - 1:.0%}"
    if group["critical"] is None:
        return Fact("Critical keep", "truncate", (("", "none tried"),), f"too few pairs turned for {limit}")
    there = (one for one in values["settings"] if one["kind"] == "keep" and one["value"] == group["critical"])
    cost = f"must turn for {limit} (ratio there {_number(next(there), 'ratio')})"
    return Fact(
        "Critical keep", "truncate", (("", f"{group['critical']:.2f} of the pairs"),), f"{cost}; the band is at {bands}"
    )


def _damage(values: dict) -> Fact:
    def words(group: dict) -> str:
        if group["damage"] is None:
            return "no pair turns twice"
        return _number(group, "damage", percent=True)

    groups = values["by_layer_type"]
    tones = " and ".join(f"{group['damage_tone']:.1%}" for group in groups.values() if group["damage_tone"] is not None)
    return Fact(
        "Spectrum damage",
        "spectrum",
        _kinds(groups, words),
        f"power away from a pair's own tone; pure tones show {tones or '–'}",
    )


def _checks(values: dict) -> Fact:
    asked = [one for one in values["findings"] if one["passed"] is not None]
    failed = [one["name"] for one in asked if not one["passed"]]
    value = f"{len(failed)} of {len(asked)} failed" if failed else f"all {len(asked)} passed"
    return Fact("Self-checks", "check", (("", value),), ", ".join(failed) or "weights, rotation, attention, likelihood")


_FACTS: dict[str, tuple[Callable[[dict], Fact | None], ...]] = {
    "inspect": (_floor, _bound),
    "bands": (_band, _predicted),
    "heads": (_roles,),
    "similarity": (_rho,),
    "truncate": (_critical,),
    "spectrum": (_damage,),
    "check": (_checks,),
}
