"""The band over training, of several runs."""

from __future__ import annotations

import numpy as np

from ..probes import summary
from . import compare_curves as parts
from . import style

_SIDES = {"keys": "i_band", "queries": "i_band_q", "usage": "i_band_usage"}


def compare_trajectory(results, ax=None, names=None, axis=None):
    """Draw i_band (usage) against the checkpoint on three axes; of keys, queries and usage where one is named.

    See `rope_probe.plots.compare`.
    """
    found = parts.curves(results, names)
    shown = parts.axes_of(axis)
    panels = [(axis, side) for side in _SIDES] if axis else [(name, "usage") for name in shown]
    titles = [f"{side} by {name}" for name, side in panels]
    given = style.given_axes(ax, titles, titles, "compare")
    steps = all(np.isfinite(ds["step"].values).all() for ds in results)
    groups = [(parts.entries(found, marker="o", ms=3), parts.columns(found))]
    if "relative" in shown:
        groups.append(([parts.predicted_entry()], 1))
    with style.look(given is None):
        axes = given or style.new_axes(panels, 2.1, [], compare_trajectory_caption(results, found, axis), groups)
        for one, (name, side) in zip(axes, panels, strict=True):
            for curve in found:
                _curve(one, curve, name, _SIDES[side], steps)
            parts.prepare(one, name, upright=True)
            _time(one, results, steps)
            one.set_title(f"i_band, {side}", loc="left", weight="bold")
        if given is None:
            style.finish(axes, groups)
    return axes


def i_bands(curve: parts.Curve, statistic: str) -> tuple[np.ndarray, np.ndarray]:
    """i_band of a kind of layer at every checkpoint and its standard error (0 where unknown)."""
    name = next(name for name in summary(curve.ds)["by_layer_type"] if name.replace("_", " ") == curve.kind.name)
    rows = [summary(_checkpoint(curve.ds, n))["by_layer_type"][name] for n in range(curve.ds.sizes["checkpoint"])]
    values = [np.nan if row[statistic] is None else row[statistic] for row in rows]
    return np.array(values), np.array([row[f"{statistic}_se"] or 0 for row in rows])


def _checkpoint(ds, number: int):
    """One checkpoint as a result of `bands`."""
    return ds.isel(checkpoint=number).assign_attrs(analysis="bands")


def _curve(ax, curve: parts.Curve, axis: str, statistic: str, steps: bool) -> None:
    value, error = i_bands(curve, statistic)
    x = curve.ds["step"].values if steps else np.arange(len(value))
    low, middle, high = (parts.place(curve.kind, axis, value + sign * error) for sign in (-1, 0, 1))
    look = {"color": curve.color, "ls": curve.dashes, "marker": "o", "ms": 2.6, "lw": 1, "elinewidth": 0.7}
    ax.errorbar(x, middle, np.stack([middle - low, high - middle]), label=curve.label, **look)


def _time(ax, results, steps: bool) -> None:
    if not steps:
        ax.set_xlabel("checkpoint, in order")
        style.integer_ticks(ax.xaxis)
        return
    known = np.unique(np.concatenate([ds["step"].values for ds in results]))
    positive = known[known > 0]
    if len(positive) > 1 and positive[-1] > 10 * positive[0]:
        ax.set_xscale("symlog", linthresh=float(positive[0]))
    if len(positive):  # a little room on both sides, which the scale may bend
        ax.set_xlim(0.9 * known[0] if known[0] else -0.3 * float(positive[0]), 1.2 * known[-1])
    ax.set_xlabel("training step")


def compare_trajectory_caption(results, found, axis=None) -> str:
    """What the axes of `compare_trajectory` show, for a caption."""
    return (
        "i_band: mean over heads and layers of the pair that is largest for most tokens (usage: of the largest product "
        "of mean norms), bars: standard error over segments, against the training step (x). "
        f"y: {parts.axis_words(parts.axes_of(axis))}. {parts.described(found)}. {parts.texts(results)}"
    )
