"""Which roles the heads of several models have, what they attend to, and whose band it is."""

from __future__ import annotations

from itertools import cycle

import numpy as np

from ..probes.compare_axes import AXES
from ..probes.heads_summary import ROLES, dominant_pair, members
from . import compare_curves as parts
from . import style

WEIGHTS = {
    "self_weight": "itself",
    "previous_weight": "previous",
    "sink_weight": "first",
    "weight_last_8": "last 8",
    "weight_last_64": "last 64",
    "weight_last_512": "last 512",
}
GROUPS = {"all": "o", "semantic": "s", "positional": "^", "induction": "D"}
FIXED = {"roles": "roles", "weights": "mean weight", "distance": "weight by distance"}


def compare_heads(results, ax=None, names=None, axis=None):
    """Draw shares of roles, mean weights, weight by distance and i_band of groups of heads, of several `heads` results.

    See `rope_probe.plots.compare`.
    """
    found = parts.curves(results, names)
    panels = [*FIXED, *parts.axes_of(axis)]
    given = style.given_axes(ax, panels, panels, "compare")
    colors = [color for _, color in zip(results, cycle(style.SERIES), strict=False)]
    groups = [(_models(names, colors), 3), (_groups(found), len(GROUPS)), ([parts.predicted_entry()], 1)]
    groups = groups if "relative" in panels else groups[:2]
    with style.look(given is None):
        caption = compare_heads_caption(results, found, axis)
        axes = given or style.new_axes(panels, 1.9, [], caption, groups, rows=2)
        for one, panel in zip(axes, panels, strict=True):
            if panel in ("roles", "weights"):
                _bars(one, results, colors, panel)
            elif panel == "distance":
                _distance(one, results, colors)
            else:
                _bands(one, found, panel)
            title = FIXED.get(panel, f"i_band by {AXES.get(panel)}")
            one.set_title(title, loc="left", weight="bold")
        if given is None:
            style.finish(axes, groups)
    return axes


def bars(ds, panel: str) -> dict[str, float]:
    """Share of the heads of each role, or mean weights over heads."""
    everyone = members(ds, "all")
    if panel == "roles":
        return {role: float(members(ds, role).sum() / everyone.sum()) for role in ROLES}
    return {words: float(np.nanmean(ds[name].values[everyone])) for name, words in WEIGHTS.items()}


def _bars(ax, results, colors, panel: str) -> None:
    width = 0.8 / len(results)
    for row, (ds, color) in enumerate(zip(results, colors, strict=True)):
        found = bars(ds, panel)
        ax.bar(np.arange(len(found)) + (row - (len(results) - 1) / 2) * width, found.values(), width, color=color)
    ax.set_xticks(range(len(found)), found, rotation=30, ha="right", rotation_mode="anchor")
    ax.set_ylabel("share of heads" if panel == "roles" else "weight")
    ax.set_ylim(0, 1 if panel == "roles" else None)


def by_distance(ds) -> np.ndarray:
    """Mean over heads of the weight on a key at each distance, NaN where no head sees it."""
    weight = ds["weight_by_distance"].values[members(ds, "all")]
    seen = np.isfinite(weight).sum(axis=0)
    return np.divide(np.nansum(weight, axis=0), seen, out=np.full(len(seen), np.nan), where=seen > 0)


def _distance(ax, results, colors) -> None:
    for ds, color in zip(results, colors, strict=True):
        ax.plot(ds["distance"].values + 1, by_distance(ds), color=color, lw=0.9)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("distance + 1 (tokens)")
    ax.set_ylabel("weight on one key")


def i_band(curve: parts.Curve, group: str) -> float:
    """Mean over some heads of the pair of largest usage; NaN where there are none."""
    part = curve.ds.isel(layer=curve.kind.rows)
    values = dominant_pair(part, "usage")[members(part, group)]
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else np.nan


def _bands(ax, found, axis: str) -> None:
    for row, curve in enumerate(found):
        for group, marker in GROUPS.items():
            value = i_band(curve, group)
            if np.isfinite(value):
                face = "white" if group == "semantic" else curve.color
                at = float(parts.place(curve.kind, axis, value))
                ax.plot(at, row, marker, color=curve.color, mfc=face, ms=4.5 if group == "all" else 3.5, mew=0.8)
    ax.set_ylim(len(found) - 0.5, -0.5)
    ax.set_yticks(range(len(found)), [str(row + 1) for row in range(len(found))])
    _, x = zip(*(parts.places(curve.kind, axis) for curve in found), strict=True)
    parts.prepare(ax, axis)
    ends = (min(one.min() for one in x), max(one.max() for one in x))
    ax.set_xlim(ends if axis != "index" else (0, 1))


def _models(names, colors) -> list:
    from matplotlib.patches import Patch

    return [Patch(facecolor=color, lw=0, label=name) for name, color in zip(names, colors, strict=True)]


def _groups(found) -> list:
    from matplotlib.lines import Line2D

    return [
        Line2D(
            [], [], color="0.35", marker=marker, lw=0, ms=4, mfc="white" if name == "semantic" else "0.35", label=name
        )
        for name, marker in GROUPS.items()
        if any(np.isfinite(i_band(curve, name)) for curve in found)
    ]


def compare_heads_caption(results, found, axis=None) -> str:
    """What the axes of `compare_heads` show, for a caption."""
    rows = ", ".join(f"{row + 1} {curve.label}" for row, curve in enumerate(found))
    return (
        "Roles: share of the heads of all layers. Mean weight: over heads, on the token itself, the previous one, the "
        "first position, and within the last tokens. By distance: mean over heads of the weight on one key that far back, "
        "where it is seen (the rise at the end is the first position). i_band: mean over the heads of a group (marker) of the pair of largest usage ‖q‖·‖k‖; semantic: all but "
        f"positional; rows: {rows}. x of i_band: {parts.axis_words(parts.axes_of(axis))}. {parts.described(found)}. "
        f"{parts.texts(results)}"
    )
