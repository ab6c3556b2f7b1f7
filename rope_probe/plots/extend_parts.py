"""What the figures of `extend` share: settings by color and dashes, and the words on model and text."""

from __future__ import annotations

from itertools import cycle

from . import style

DASHES = ("-", (0, (4, 1.6)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))  # one for each scaling


def base_colors(summary: dict) -> dict[str, str]:
    """A color for each base, in order of appearance."""
    names = dict.fromkeys(setting["base"] for setting in summary["settings"])
    return dict(zip(names, cycle(style.SERIES), strict=False))


def scaling_dashes(summary: dict) -> dict[str, object]:
    """Dashes for each scaling, in order of appearance."""
    names = dict.fromkeys(setting["scaling"] for setting in summary["settings"])
    return dict(zip(names, cycle(DASHES), strict=False))


def base_label(name: str) -> str:
    """A base in a legend."""
    return {"own": "own base", "match": "base = length"}.get(name, f"base {name}")


def scaling_label(name: str) -> str:
    """A scaling in a legend."""
    return {"own": "own scaling", "none": "no scaling"}.get(name, name)


def reach(one: dict) -> int | None:
    """The smallest L_bound over the kinds of layers at one length; None where none was met."""
    return min((bound for bound in one["bound"].values() if bound is not None), default=None)


def carried(one: dict) -> bool:
    """Does L_bound reach the length (or the window) in every kind of layer?"""
    return all(one["holds"].values())


def source(ds, texts: bool = True) -> str:
    """Sentences on model and text, for the end of a caption."""
    segments, length = int(ds.attrs["segments"]), int(ds.attrs["length"])
    read = f" Text: {ds.attrs['corpus']}, {style.count(segments, 'segment')} of {length:,} tokens." if texts else ""
    cut = " Interrupted before the end." if int(ds.attrs.get("partial", 0)) else ""
    return f"Model: {style.model_name(ds)}.{read}{cut}"


def prompts(summary: dict) -> str:
    """How many prompts are behind a point, for a caption."""
    drawn = summary["samples"] * len(summary["depths"])
    return f"{style.count(drawn, 'prompt')} a point ({style.count(len(summary['depths']), 'depth')})"
