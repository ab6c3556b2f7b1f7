"""Profiles of the pair norms of several models on the axes that could make them agree."""

from __future__ import annotations

import numpy as np

from ..probes.compare_axes import AXES
from . import compare_curves as parts
from . import style
from .bands_profile import PANELS, relative


def compare_bands(results, ax=None, names=None, axis=None):
    """Draw the usage profiles of several `bands` results on three axes; queries, keys and usage where one is named.

    See `rope_probe.plots.compare`.
    """
    found = parts.curves(results, names)
    one_axis = axis is not None
    panels = [(axis, side) for side in PANELS] if one_axis else [(name, "usage") for name in parts.axes_of(None)]
    parts.axes_of(axis)
    titles = [f"{side} by {name}" for name, side in panels]
    given = style.given_axes(ax, titles, titles, "compare")
    marks = [parts.band_entry(results)]
    if any(name == "relative" for name, _ in panels):
        marks.append(parts.predicted_entry())
    groups = [(parts.entries(found), parts.columns(found)), (marks, 2)]
    with style.look(given is None):
        axes = given or style.new_axes(panels, 2.2, [], compare_bands_caption(results, found, axis), groups)
        for one, (name, side) in zip(axes, panels, strict=True):
            _, title, measure, _ = PANELS[side]
            for row, curve in enumerate(found):
                _profile(one, curve, name, side)
                parts.mark(one, curve, name, curve.kind.summary[measure], row)
            parts.prepare(one, name)
            one.set_title(title if one_axis else f"by {AXES[name]}", loc="left", weight="bold")
        top = max(one.get_ylim()[1] for one in axes) if not one_axis else None
        for one in axes:
            one.set_ylim(0, (top or one.get_ylim()[1]) * (1.05 + 0.06 * len(found)))
        axes[0].set_ylabel("relative to the mean over pairs" if one_axis else "usage over mean of pairs")
        if given is None:
            style.finish(axes, groups)
    return axes


def _profile(ax, curve: parts.Curve, axis: str, side: str) -> None:
    heads = relative(curve.ds, curve.kind, side)
    turning, x = parts.places(curve.kind, axis)
    if not len(heads) or not len(turning):
        return
    low, high = np.percentile(heads[:, turning], (25, 75), axis=0)
    ax.fill_between(x, low, high, color=curve.color, alpha=0.15, lw=0)
    ax.plot(x, heads[:, turning].mean(axis=0), color=curve.color, ls=curve.dashes, lw=1.1, label=curve.label)


def compare_bands_caption(results, found, axis=None) -> str:
    """What the axes of `compare_bands` show, for a caption."""
    bands = "; ".join(
        f"{curve.label}: {curve.kind.summary['i_band_usage']:.1f} of {curve.kind.pairs}"
        for curve in found
        if curve.kind.summary["i_band_usage"] is not None
    )
    return (
        "Mean norm of each rotary pair, divided by the mean over pairs of the same head (y, no unit; 1: all pairs alike); "
        "usage: product of the mean norms of query and key. "
        f"x: {parts.axis_words(parts.axes_of(axis))}; pairs that do not turn are left out. Line: mean over heads and "
        f"layers; shade: quartiles. Triangle: mean over heads of the pair that is largest for most tokens (usage: of "
        f"largest usage; {bands}). {parts.described(found)}. {parts.texts(results)}"
    )
