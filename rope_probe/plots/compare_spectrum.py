"""Damage by depth and purity by pair of several models."""

from __future__ import annotations

import numpy as np

from ..probes.compare_axes import AXES
from ..probes.spectrum_summary import relative_purity
from . import compare_curves as parts
from . import style

LEAST = 1e-4  # lower end of the scale of 1 − purity; what is purer is drawn there


def compare_spectrum(results, ax=None, names=None, axis=None):
    """Draw damage by layer, and the purity of the pairs on three axes, of several `spectrum` results.

    See `rope_probe.plots.compare`.
    """
    found = parts.curves(results, names)
    panels = ["damage", *parts.axes_of(axis)]
    given = style.given_axes(ax, panels, panels, "compare")
    groups = [(parts.entries(found), parts.columns(found)), (_marks(), 2)]
    with style.look(given is None):
        caption = compare_spectrum_caption(results, found, axis)
        axes = given or style.new_axes(panels, 1.75, [], caption, groups, rows=len(panels) // 2)
        for one, panel in zip(axes, panels, strict=True):
            for curve in found:
                (_damage if panel == "damage" else _purity)(one, curve, panel)
            if panel == "damage":
                one.set_xlabel("layer / last layer")
                one.set_ylabel("1 − mean purity (%)")
                one.set_ylim(bottom=0)
            else:
                parts.prepare(one, panel, predicted=False)
                one.set_yscale("log")
                one.set_ylim(0.8 * LEAST, 1)
                one.set_ylabel("1 − purity")
            title = "damage" if panel == "damage" else f"pairs by {AXES[panel]}"
            one.set_title(title, loc="left", weight="bold")
        if given is None:
            style.finish(axes, groups)
    return axes


def _damage(ax, curve: parts.Curve, _panel: str) -> None:
    rows, layers = curve.kind.rows, curve.ds["layer"].values
    x = layers[rows] / max(1, layers.max())
    value, error, limit = (100 * curve.ds[name].values[rows] for name in ("damage", "damage_se", "damage_limit"))
    ax.errorbar(x, value, np.nan_to_num(error), color=curve.color, ls=curve.dashes, marker="o", ms=2.6, lw=0.8)
    ax.plot(x, np.maximum(limit, 0), "o", ms=2.6, mew=0.7, mfc="white", color=curve.color)


def purities(curve: parts.Curve) -> np.ndarray:
    """Purity over that of a pure tone of every head of a kind of layer, shape (layers × heads, pairs)."""
    values = relative_purity(curve.ds)[curve.kind.rows][..., : curve.kind.pairs]
    return values.reshape(-1, curve.kind.pairs)


def _purity(ax, curve: parts.Curve, axis: str) -> None:
    heads = purities(curve)
    turning, x = parts.places(curve.kind, axis)
    known = np.isfinite(heads[:, turning]).any(axis=0)
    if not known.any():
        return
    lost = 1 - np.nanpercentile(heads[:, turning[known]], (75, 50, 25), axis=0)
    low, middle, high = np.maximum(lost, LEAST)
    ax.fill_between(x[known], low, high, color=curve.color, alpha=0.15, lw=0)
    ax.plot(x[known], middle, color=curve.color, ls=curve.dashes, lw=1.1, label=curve.label)


def _marks() -> list:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color="0.35", marker="o", ms=3, lw=0, label="damage of one layer ± standard error"),
        Line2D([], [], color="0.35", marker="o", ms=3, mew=0.7, mfc="white", lw=0, label="with endless text"),
    ]


def compare_spectrum_caption(results, found, axis=None) -> str:
    """What the axes of `compare_spectrum` show, for a caption."""
    return (
        "Damage: 1 − usage-weighted mean purity of a layer's pairs that turn at least twice within the distances, against "
        "depth; with endless text: the part that falls with the number of segments taken off (jackknife). 1 − purity: "
        "share of a pair's power away from its own frequency, 0 for a pure tone; line: median over heads and layers, "
        f"shade: quartiles, drawn at {LEAST:g} where below. x: {parts.axis_words(parts.axes_of(axis))}. {parts.described(found)}. {parts.texts(results)}"
    )
