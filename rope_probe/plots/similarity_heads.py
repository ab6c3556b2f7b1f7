"""rho of every head, layers × heads, free and at fixed distance."""

from __future__ import annotations

import numpy as np

from . import heat, style
from .similarity_layers import PANELS, distances, source, values


def similarity_heads(ds, ax=None, panels=("free", "fixed")):
    """Draw a map of rho, layers × heads; white is no correlation, grey a head that has none.

    Parameters
    ----------
    ds : Dataset
        Result of `similarity`.
    ax : Axes or sequence of Axes, optional
        One for each panel. Without it a figure of its own is made, with caption.
    panels : sequence of {"free", "fixed"}
        Over the keys of each query row; at fixed distance, mean of distances. One panel alone makes a figure one
        column wide.

    Returns
    -------
    list of Axes, or Axes where there is one panel

    Raises
    ------
    ProbeError
        A panel is not known; the number of axes is not that of the panels.
    """
    from matplotlib.ticker import MaxNLocator

    given = style.given_axes(ax, panels, PANELS, "similarity_heads")
    maps = [values(ds, panel) for panel in panels]
    top = max([0.01, *(np.abs(one[np.isfinite(one)]).max(initial=0) for one in maps)])
    edges = np.arange(ds.sizes["layer"] + 1) - 0.5
    height = 0.75 + float(np.clip(0.085 * ds.sizes["layer"], 0.8, 3.6))
    columns = np.arange(ds.sizes["head"] + 1) - 0.5
    with style.look(given is None):
        axes = given or style.new_axes(panels, height, [], similarity_heads_caption(ds, panels), [])
        for one, panel, rho in zip(axes, panels, maps, strict=True):
            one.set_facecolor("0.8")
            # edges in the color of the cell: without them PDF viewers show hairlines between cells
            mesh = one.pcolormesh(
                columns,
                edges,
                np.ma.masked_invalid(rho),
                cmap="RdBu_r",
                vmin=-top,
                vmax=top,
                edgecolors="face",
                linewidth=0.2,
            )
            one.set_ylim(edges[-1], edges[0])
            heat.row_labels(one, edges, ds["layer"].values)
            step = slice(None, None, -(-ds.sizes["head"] // 16))
            one.set_xticks(np.arange(ds.sizes["head"])[step], ds["head"].values[step])
            one.set_xlabel("query head")
            one.set_title(PANELS[panel], loc="left", weight="bold")
        axes[0].set_ylabel("layer")
        ticks = MaxNLocator(7, steps=[1, 2, 5, 10])
        axes[0].figure.colorbar(mesh, ax=axes, label="Spearman rho", aspect=30, pad=0.01, ticks=ticks)
        if given is None:
            style.finish(axes, [])
    return axes if len(axes) > 1 else axes[0]


def similarity_heads_caption(ds, panels=("free", "fixed")) -> str:
    """What the axes of `similarity_heads` show, for a caption."""
    rho, fixed = ds["rho"].values, values(ds, "fixed")
    known, known_fixed = rho[np.isfinite(rho)], fixed[np.isfinite(fixed)]
    words = (
        "Color: Spearman correlation (no unit) of the cosine similarity of the hidden states entering a layer (y) and "
        "the pre-softmax score of a query head (x)"
    )
    if "free" in panels and len(known):
        words += f"; over the keys of each query row, mean over rows: positive in {(known > 0).mean():.0%} of heads"
    if "fixed" in panels and len(known_fixed):
        words += (
            f"; at fixed distance, mean of the distances {distances(ds)}: positive in "
            f"{(known_fixed > 0).mean():.0%} of heads"
        )
    if not np.isfinite(rho).all():
        words += "; grey: no such head, or one side constant"
    return f"{words}. {source(ds)}"
