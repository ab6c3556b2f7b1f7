"""Dominant wavelength of a head against how far it looks, one point per head."""

from __future__ import annotations

import numpy as np

from ..probes import summary
from ..probes.heads_summary import dominant_wavelength, fast_share, members
from . import roles, style

PANELS = {"wavelength": "dominant wavelength", "fast": "fast pairs"}


def heads_wavelength(ds, ax=None, panels=("wavelength", "fast")):
    """Draw the wavelength of the pair of largest usage, and the share of usage of fast pairs, against mean distance.

    Parameters
    ----------
    ds : Dataset
        Result of `heads`.
    ax : Axes or sequence of Axes, optional
        One for each panel. Without it a figure of its own is made, with legend and caption.
    panels : sequence of {"wavelength", "fast"}
        One panel alone makes a figure one column wide.

    Returns
    -------
    list of Axes, or Axes where there is one panel

    Raises
    ------
    ProbeError
        A panel is not known; the number of axes is not that of the panels.
    """
    given = style.given_axes(ax, panels, PANELS, "heads_wavelength")
    values = {"wavelength": dominant_wavelength(ds), "fast": fast_share(ds)}
    groups = [(_entries(ds), 5 if len(panels) > 1 else 3)]
    with style.look(given is None):
        axes = given or style.new_axes(panels, 2.5, [], heads_wavelength_caption(ds, panels), groups)
        for one, panel in zip(axes, panels, strict=True):
            for role, color in reversed(roles.COLORS.items()):
                where = members(ds, role) & np.isfinite(values[panel])
                one.plot(ds["mean_distance"].values[where], values[panel][where], **_point(role, color))
            one.set_xscale("log")
            one.set_xlabel("mean distance (tokens)")
            one.set_title(PANELS[panel], loc="left", weight="bold")
            if panel == "wavelength":
                one.set_yscale("log")
                one.set_ylabel("wavelength (tokens)")
                low, high = one.get_xlim()
                one.plot([low, high], [low, high], **_EQUAL)
                one.set_xlim(low, high)
                kinds = style.kinds(ds)
                for length in sorted({kind.length for kind in kinds}):
                    one.axhline(length, color="0.35", lw=0.8, ls=style.FLOOR, zorder=0)
                    own = [kind.name for kind in kinds if kind.length == length]
                    words = f"L = {length:,}" + f" ({', '.join(own)})" * (len(kinds) > 1)
                    one.text(low * 1.1, length, words, color="0.25", fontsize=6.5, va="bottom")
            else:
                one.set_ylabel("share of usage")
                one.set_ylim(bottom=0)
        if given is None:
            style.finish(axes, groups)
    return axes if len(axes) > 1 else axes[0]


_EQUAL = {"color": "0.35", "lw": 0.8, "ls": style.SEGMENT, "zorder": 0}


def _point(role: str, color: str) -> dict:
    edge = "0.45" if role == "other" else "black"
    size = 3 if role in ("other", "sink") else 4
    return {"ls": "none", "marker": "o", "ms": size, "color": color, "mec": edge, "mew": 0.35}


def _entries(ds) -> list:
    from matplotlib.lines import Line2D

    points = [
        Line2D([], [], **_point(role, color), label=f"{role} ({int(members(ds, role).sum())})")
        for role, color in roles.COLORS.items()
        if members(ds, role).any()
    ]
    return [*points, Line2D([], [], **_EQUAL, label="wavelength = distance")]


def heads_wavelength_caption(ds, panels=("wavelength", "fast")) -> str:
    """What the axes of `heads_wavelength` show, for a caption."""
    words = summary(ds)
    kinds = words["by_layer_type"]
    found = [(name, kind["wavelength_distance"]) for name, kind in kinds.items()]
    rho = ", ".join(
        f"{value:+.2f}" + f" ({name.replace('_', ' ')})" * (len(kinds) > 1)
        for name, value in found
        if value is not None
    )
    shown = {
        "wavelength": "wavelength of the rotary pair with the largest usage (product of the mean norms of query and key"
        f"{f'; rank correlation with the distance {rho}' if rho else ''}), L: length in which the "
        "frequencies were formed. ",
        "fast": "share of the usage of all pairs held by those that turn at least once in 64 tokens (no unit). ",
    }
    parts = [
        f"{place}{shown[panel]}"
        for panel, place in zip(panels, ("Left: ", "Right: ") if len(panels) > 1 else ("y: ",), strict=True)
    ]
    return (
        "One point per query head. x: mean distance of what it attends to. "
        + "".join(parts)
        + roles.definition(words)
        + roles.source(ds)
    )
