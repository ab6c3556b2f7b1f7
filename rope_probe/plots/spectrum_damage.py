"""Damage by layer, and how much of the scores sits in pairs that never finish a turn."""

from __future__ import annotations

import numpy as np

from . import spectrum_parts as parts
from . import style

PANELS = {"damage": "damage", "floor": "power below the floor"}


def spectrum_damage(ds, ax=None, panels=("damage", "floor")):
    """Draw the damage of every layer with its standard error, and the share of power below the floor.

    Parameters
    ----------
    ds : Dataset
        Result of `spectrum`.
    ax : Axes or sequence of Axes, optional
        One for each panel. Without it a figure of its own is made, with legend and caption.
    panels : sequence of {"damage", "floor"}
        One panel alone makes a figure one column wide.

    Returns
    -------
    list of Axes, or Axes where there is one panel

    Raises
    ------
    ProbeError
        A panel is not known; the number of axes is not that of the panels.
    """
    given = style.given_axes(ax, panels, PANELS, "spectrum_damage")
    kinds = style.kinds(ds)
    groups = _entries(kinds, panels)
    with style.look(given is None):
        axes = given or style.new_axes(panels, 1.9, kinds[:1], spectrum_damage_caption(ds, panels), groups)
        for one, panel in zip(axes, panels, strict=True):
            (_damage if panel == "damage" else _floor)(one, ds, kinds)
            one.set_xlabel("layer")
            style.integer_ticks(one.xaxis)
            one.set_ylim(bottom=0)
            one.set_title(PANELS[panel], loc="left", weight="bold")
        if given is None:
            style.finish(axes, groups)
    return axes if len(axes) > 1 else axes[0]


def _damage(ax, ds, kinds) -> None:
    for kind in kinds:
        layers = ds["layer"].values[kind.rows]
        value, error, limit = (100 * ds[name].values[kind.rows] for name in ("damage", "damage_se", "damage_tone"))
        ax.errorbar(layers, value, np.nan_to_num(error), fmt="o", ms=3, lw=0.9, capsize=1.5, color=kind.color)
        endless = np.maximum(100 * ds["damage_limit"].values[kind.rows], 0)
        ax.plot(layers, endless, "o", ms=3, mew=0.7, mfc="white", color=kind.color)
        ax.plot(layers, limit, "_", color="0.5", ms=5, mew=1)
    ax.set_ylabel("1 − mean purity (%)")


def _floor(ax, ds, kinds) -> None:
    for kind in kinds:
        share = 100 * ds["power_below_floor"].values[kind.rows]
        ax.plot(ds["layer"].values[kind.rows], share, "o", ms=3, color=kind.color)
    ax.set_ylabel("share of squared scores (%)")
    ax.set_ylim(top=102)


def _entries(kinds, panels) -> list:
    from matplotlib.lines import Line2D

    several = len(kinds) > 1
    dots = [
        Line2D([], [], color=kind.color, marker="o", ms=3, lw=0, label=kind.label if several else "one layer")
        for kind in kinds
    ]
    groups = [(dots, 2)] if several else []
    if "damage" in panels:
        marks = [
            Line2D([], [], color="0.35", marker="|", ms=7, lw=0, label="standard error over segments"),
            Line2D([], [], color="0.35", marker="o", ms=3, mew=0.7, mfc="white", lw=0, label="with endless text"),
            Line2D([], [], color="0.5", marker="_", ms=6, lw=0, label="pure tones, same estimator"),
        ]
        groups.append(([*([] if several else dots), *marks], 4 if len(panels) > 1 else 1))
    return groups


def spectrum_damage_caption(ds, panels=("damage", "floor")) -> str:
    """What the axes of `spectrum_damage` show, for a caption."""
    words = {
        "damage": "Damage: 1 − mean purity (share of a pair's power within 2.5 bins of its own frequency) over heads and "
        "the pairs that turn at least twice within the distances, weighted by usage ‖q‖·‖k‖; with endless text: the part "
        "that falls with the number of segments taken off (jackknife). ",
        "floor": "Below the floor: share of the squared mean scores, summed over distances (mean kept), heads and "
        "pairs, that sits in pairs whose wavelength exceeds the length in which they were formed "
        f"({' and '.join(f'{kind.length:,}' for kind in style.kinds(ds))} tokens). ",
    }
    return "".join(words[panel] for panel in panels) + "x: layer. " + parts.source(ds)
