"""Perplexity and retrieval side by side against the base: the one can be fine where the other is gone."""

from __future__ import annotations

from itertools import cycle

import numpy as np

from ..errors import ProbeError
from ..probes import summary
from . import extend_parts as parts
from . import style

PANELS = {"perplexity": "perplexity", "retrieval": "key found"}
MATCHED = ("D", "s", "^", "P")  # points with base = length, which lie on no line: a marker for each scaling


def extend_base(ds, ax=None, panels=None, keys: int | None = None):
    """Draw perplexity and the share of keys found against the base, a line for each length and scaling.

    Parameters
    ----------
    ds : Dataset
        Result of `extend`.
    ax : Axes or sequence of Axes, optional
        One for each panel. Without it a figure of its own is made, with legend and caption.
    panels : sequence of {"perplexity", "retrieval"}, optional
        Default: those that were measured. One panel alone makes a figure one column wide.
    keys : int, optional
        Of prompts with so many keys; default the fewest.

    Returns
    -------
    list of Axes, or Axes where there is one panel

    Raises
    ------
    ProbeError
        A panel is not known or was not measured; the number of axes is not that of the panels.
    """
    values = summary(ds)
    keys = keys or min(values["keys"])
    there = [name for name in PANELS if _points(values, name, keys)]
    panels = there if panels is None else list(panels)
    given = style.given_axes(ax, panels, PANELS, "extend_base")
    missing = [name for name in panels if name not in there]
    if missing:
        raise ProbeError(f"the result holds no {missing[0]} to draw: measure it, or leave the panel out.")
    lengths = sorted({length for name in panels for length in _lengths(values, name)})
    colors = dict(zip(lengths, _shades(len(lengths)), strict=True))
    dashes = parts.scaling_dashes(values)
    matched = dict(zip(dashes, cycle(MATCHED), strict=False))
    groups = _entries(values, colors, dashes, matched, len(panels))
    with style.look(given is None):
        axes = given or style.new_axes(panels, 2.3, [], extend_base_caption(ds, panels, keys), groups)
        for one, panel in zip(axes, panels, strict=True):
            for (length, scaling), points in _points(values, panel, keys).items():
                _curve(one, points, colors[length], dashes[scaling], matched[scaling])
            one.set_xscale("log")
            one.set_xlabel("base")
            one.set_title(PANELS[panel], loc="left", weight="bold")
            (_perplexity_axis if panel == "perplexity" else _share_axis)(one)
        if given is None:
            style.finish(axes, groups)
    return axes if len(axes) > 1 else axes[0]


def _lengths(values: dict, panel: str) -> list[int]:
    return values["lengths" if panel == "perplexity" else "passkey_lengths"]


def _points(values: dict, panel: str, keys: int) -> dict[tuple, list[tuple]]:
    """(length, scaling) -> points (base, value, error, carried, matched), by base."""
    found: dict[tuple, list[tuple]] = {}
    for setting in values["settings"]:
        for one in setting["lengths"]:
            base = max((base for base in one["base"].values() if base is not None), default=None)
            if panel == "perplexity":
                value = one["perplexity"]
                error = None if value is None or one["nll_se"] is None else value * one["nll_se"]
            else:
                entry: dict = next((entry for entry in one["retrieval"] if entry["keys"] == keys), {})
                value, error = entry.get("exact_match"), entry.get("exact_match_se")
            if value is not None and base is not None and one["length"] in _lengths(values, panel):
                point = (base, value, error or 0.0, parts.carried(one), setting["base"] == "match")
                found.setdefault((one["length"], setting["scaling"]), []).append(point)
    return {key: sorted(points) for key, points in sorted(found.items())}


def _curve(ax, points: list[tuple], color, dashes, apart: str) -> None:
    """A line through the bases asked for; a base that matches its length stands apart."""
    line = [point for point in points if not point[4]]
    ax.plot([point[0] for point in line], [point[1] for point in line], ls=dashes, lw=1, color=color)
    for base, value, error, carried, is_matched in points:
        face = color if carried else "white"
        ax.errorbar(base, value, error, color=color, elinewidth=0.7, zorder=3)
        ax.plot(base, value, apart if is_matched else "o", ms=3.4, mew=0.8, color=color, mfc=face, zorder=4)


def _perplexity_axis(ax) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high / low < 100 else (1,)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    ax.set_ylabel("perplexity")


def _share_axis(ax) -> None:
    from matplotlib.ticker import PercentFormatter

    ax.set_ylim(-0.04, 1.04)
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.set_ylabel("share of prompts")


def _shades(count: int) -> list:
    """Light to dark, short to long."""
    import matplotlib

    return [matplotlib.colormaps["viridis_r"](share) for share in np.linspace(0.12, 0.95, max(count, 1))][:count]


def _entries(values: dict, colors: dict, dashes: dict, matched: dict, panels: int) -> list:
    from matplotlib.lines import Line2D

    grey = "0.35"
    of_lengths = [Line2D([], [], color=color, lw=1.6, label=f"{length:,} tokens") for length, color in colors.items()]
    of_scalings = [Line2D([], [], color=grey, lw=1, ls=ls, label=parts.scaling_label(n)) for n, ls in dashes.items()]
    marks = [
        Line2D([], [], color=grey, lw=0, marker="o", ms=3.4, label="L_bound reaches the length"),
        Line2D([], [], color=grey, lw=0, marker="o", ms=3.4, mfc="white", mew=0.8, label="it falls short"),
    ]
    apart = dict.fromkeys(setting["scaling"] for setting in values["settings"] if setting["base"] == "match")
    for scaling in apart:
        label = "base = length" + (f", {parts.scaling_label(scaling)}" if len(apart) > 1 else "")
        marks.append(Line2D([], [], color=grey, lw=0, marker=matched[scaling], ms=3.4, label=label))
    wide = panels > 1
    return [(of_lengths, 5 if wide else 2), (of_scalings, 4 if wide else 2), (marks, 4 if wide else 1)]


extend_base.applies = lambda ds: any(_points(summary(ds), name, int(ds["keys"].min())) for name in PANELS)


def extend_base_caption(ds, panels=tuple(PANELS), keys: int = 1) -> str:
    """What the axes of `extend_base` show, for a caption."""
    values = summary(ds)
    words = "x: RoPE base of every layer. "
    if "perplexity" in panels:
        bars = ", bars: standard error over segments" if values["segments"] > 1 else ""
        words += f"Perplexity of texts of so many tokens (a shorter text is the beginning of a longer{bars}). "
    if "retrieval" in panels:
        bars = ", bars: standard error over samples" if values["samples"] > 1 else ""
        hidden = "a five-digit key" if keys == 1 else f"one of {keys} five-digit keys"
        words += (
            f"Key found: share of prompts of so many tokens in which greedy decoding writes {hidden} hidden in "
            f"filler text; {parts.prompts(values)}{bars}. "
        )
    words += "Filled where L_bound reaches the length (or the window of a layer, where that is shorter). "
    return words + parts.source(ds, "perplexity" in panels)
