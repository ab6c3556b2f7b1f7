"""rho against distance: does attention follow similarity when the position is held fixed, near and far?"""

from __future__ import annotations

import numpy as np

from ..accumulate import mean_and_error
from ..probes.similarity_summary import thirds
from . import style
from .similarity_layers import heads, quartiles, source

_DEPTHS = ("#fd9a44", "#c2185b", "#2d1160")  # early, middle, late: light to dark


def similarity_distance(ds, ax=None):
    """Draw rho at fixed distance for early, middle and late layers, with the free rho of the same layers beside it.

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
    from matplotlib.patches import Patch

    given = style.given_axes(ax, ("distance",), ("distance",), "similarity_distance")
    depths = list(zip(thirds(ds).items(), _DEPTHS, strict=False))
    curves = [
        Line2D([], [], color=color, marker="o", ms=2.6, label=f"{name} layers ({_span(ds, rows)})")
        for (name, rows), color in depths
    ]
    marks = [
        Line2D([], [], color="0.35", ls="--", lw=0.9, label="free: over the keys of a row"),
        Patch(facecolor="0.35", alpha=0.2, lw=0, label="quartiles over heads"),
    ]
    groups = [([*curves, *marks], 1)]
    with style.look(given is None):
        one = (given or style.new_axes(("distance",), 2.5, [], similarity_distance_caption(ds), groups))[0]
        x = ds["distance"].values
        for (_, rows), color in depths:
            fixed = ds["rho_at_distance"].values[rows].reshape(-1, len(x))
            mean, error = mean_and_error(mean_and_error(ds["rho_at_distance_segment"].values[:, rows], axis=1)[0])
            one.fill_between(x, *quartiles(fixed.T), color=color, alpha=0.16, lw=0)
            one.errorbar(x, mean, np.nan_to_num(error), color=color, lw=1.1, elinewidth=0.7, marker="o", ms=2.6, mew=0)
            free = ds["rho"].values[rows]
            if np.isfinite(free).any():
                one.axhline(np.nanmean(free), color=color, ls="--", lw=0.9)
        one.axhline(0, color="0.4", lw=0.6, zorder=0)
        _ticks(one, x)
        one.set_xlabel("distance from query to key (tokens)")
        one.set_ylabel("Spearman rho")
        if given is None:
            style.finish([one], groups)
    return one


def _ticks(ax, x) -> None:
    """Powers of two on a log axis, as many labels as fit."""
    from matplotlib.ticker import NullLocator

    ax.set_xscale("log", base=2)
    shown = x[:: -(-len(x) // 8)] if len(x) else x
    ax.set_xticks(shown, [f"{tick:,}" for tick in shown])
    ax.xaxis.set_minor_locator(NullLocator())


def _span(ds, rows) -> str:
    first, last = ds["layer"].values[rows[0]], ds["layer"].values[rows[-1]]
    return f"{first}" if first == last else f"{first}–{last}"


def similarity_distance_caption(ds) -> str:
    """What the axes of `similarity_distance` show, for a caption."""
    windows = sorted({int(window) for window in ds["window"].values if window})
    reach = f" Layers with a window of {' or '.join(f'{w:,}' for w in windows)} end below it." if windows else ""
    return (
        "Spearman correlation (y, no unit) of the cosine similarity of the hidden states entering a layer and the "
        "pre-softmax score over query positions, the key always the same number of tokens back (x), so that distance "
        "plays no part. Mean over heads and layers with its standard error over segments; shade: quartiles over the heads of "
        f"these layers.{reach} {heads(ds, False)}. {source(ds)}"
    )
