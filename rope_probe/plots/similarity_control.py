"""Free against distance-controlled rho, one point per head: what is left when position is held fixed."""

from __future__ import annotations

import numpy as np

from . import style
from .similarity_layers import distances, source, values


def similarity_control(ds, ax=None):
    """Draw rho at fixed distance (mean of distances) against rho over the keys of a row, one point for each head.

    Parameters
    ----------
    ds : Dataset
        Result of `similarity`.
    ax : Axes, optional
        Without it a figure of its own is made, with legend and caption.

    Returns
    -------
    Axes

    Raises
    ------
    ProbeError
        More than one axes was given.
    """
    from matplotlib.lines import Line2D

    given = style.given_axes(ax, ("control",), ("control",), "similarity_control")
    free, fixed = values(ds, "free"), values(ds, "fixed")
    layers = np.broadcast_to(ds["layer"].values[:, None], free.shape)
    windowed = np.broadcast_to(ds["window"].values[:, None] > 0, free.shape)
    mixed = windowed.any() and not windowed.all()
    shapes = [("o", ~windowed, "full attention"), ("s", windowed, "window")] if mixed else [("o", free == free, "")]
    entries = [Line2D([], [], color="0.4", ls="--", lw=0.8, label="the same free and at fixed distance")]
    if mixed:
        entries += [
            Line2D(
                [],
                [],
                ls="none",
                marker=shape,
                ms=3.5,
                mfc="0.5",
                mec="white",
                mew=0.3,
                label=f"head of a layer with {name}",
            )
            for shape, _, name in shapes
        ]
    groups = [(entries, 1)]
    with style.look(given is None):
        one = (given or style.new_axes(("control",), 2.75, [], similarity_control_caption(ds), groups))[0]
        for shape, chosen, _ in shapes:
            points = one.scatter(
                free[chosen],
                fixed[chosen],
                c=layers[chosen],
                cmap="viridis",
                vmin=layers.min(),
                vmax=max(layers.max(), layers.min() + 1),
                marker=shape,
                s=14,
                lw=0.3,
                edgecolors="white",
            )
        known = np.isfinite(free) & np.isfinite(fixed)
        both = np.concatenate([free[known], fixed[known]])
        low, high = (both.min(), both.max()) if len(both) else (0, 1)
        margin = 0.04 * (high - low) + 0.01
        limits = (min(low, 0) - margin, max(high, 0) + margin)
        one.plot(limits, limits, color="0.4", ls="--", lw=0.8, zorder=0)
        one.axhline(0, color="0.4", lw=0.6, zorder=0)
        one.axvline(0, color="0.4", lw=0.6, zorder=0)
        one.set(xlim=limits, ylim=limits, aspect="equal")
        one.set_xlabel("rho over the keys of a row")
        one.set_ylabel("rho at fixed distance")
        bar = one.figure.colorbar(points, ax=one, label="layer", aspect=30, pad=0.02)
        style.integer_ticks(bar.ax.yaxis)
        if given is None:
            style.finish([one], groups)
    return one


def similarity_control_caption(ds) -> str:
    """What the axes of `similarity_control` show, for a caption."""
    free, fixed = values(ds, "free"), values(ds, "fixed")
    known = np.isfinite(free) & np.isfinite(fixed)
    above = f"; {(fixed[known] > free[known]).mean():.0%} lie above the diagonal" if known.any() else ""
    return (
        "Spearman correlation (no unit) of hidden-state similarity and pre-softmax score, one point for each head "
        f"({style.count(int(known.sum()), 'head')}{above}). x: over the keys of each query row, mean over rows, where near "
        "keys may be both more alike and preferred; y: over query positions at fixed distance, mean of the distances "
        f"{distances(ds)}, where distance plays no part. {source(ds)}"
    )
