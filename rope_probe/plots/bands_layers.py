"""Layers × pairs: where on the frequency ladder every layer has the norm of its queries and keys."""

from __future__ import annotations

import numpy as np

from . import heat, style

PANELS = {"q": ("q_norm", "queries ‖q‖", "query head", "heads"), "k": ("k_norm", "keys ‖k‖", "key head", "kv_heads")}


def bands_layers(ds, ax=None, panels=("q", "k")):
    """Draw heat maps of the mean pair norm, layers × pairs, each layer divided by its own maximum.

    Parameters
    ----------
    ds : Dataset
        Result of `bands`.
    ax : Axes or sequence of Axes, optional
        One for each panel. Without it a figure of its own is made, with legend and caption.
    panels : sequence of {"q", "k"}
        Queries and keys. One panel alone makes a figure one column wide.

    Returns
    -------
    list of Axes, or Axes where there is one panel

    Raises
    ------
    ProbeError
        A panel is not known; the number of axes is not that of the panels.
    """
    given = style.given_axes(ax, panels, PANELS, "bands_layers")
    kinds = style.kinds(ds)
    edges = np.arange(ds.sizes["layer"] + 1) - 0.5
    resting = np.flatnonzero(~ds["rotates"].values.astype(bool))
    height = 0.75 + float(np.clip(0.085 * ds.sizes["layer"], 0.8, 3.6))
    groups = _entries(kinds, resting, 2 if len(panels) > 1 else 1)
    with style.look(given is None):
        axes = given or style.new_axes(panels, height, kinds, bands_layers_caption(ds, panels), groups)
        for one, panel in zip(axes, panels, strict=True):
            mesh = heat.heat_map(one, layer_means(ds, PANELS[panel][0]), edges, kinds)
            for row in resting:
                one.axhspan(row - 0.5, row + 0.5, **heat.RESTING)
            for kind in kinds:
                heat.row_marks(one, kind, kind.rows - 0.5, kind.rows + 0.5)
            heat.row_labels(one, edges, ds["layer"].values)
            if len(kinds) > 1:
                heat.strip(one, kinds)
            one.set_title(PANELS[panel][1], loc="left", weight="bold")
        axes[0].set_ylabel("layer")
        heat.color_bar(mesh, axes)
        if given is None:
            style.finish(axes, groups)
    return axes if len(axes) > 1 else axes[0]


def layer_means(ds, variable: str) -> np.ndarray:
    """Mean over the heads of every layer, shape (layer, pair); NaN where a layer has no such pair."""
    values = ds[variable].values
    seen = np.isfinite(values)
    heads = seen.sum(axis=1)
    total = np.where(seen, values, 0).sum(axis=1)
    return np.divide(total, heads, out=np.full(total.shape, np.nan), where=heads > 0)


def _entries(kinds, resting, columns: int) -> list:
    from matplotlib.patches import Patch

    of_kinds = [Patch(facecolor=kind.color, lw=0, label=kind.label) for kind in kinds] if len(kinds) > 1 else []
    marks = heat.row_mark_entries(kinds)
    if len(resting):
        marks.append(Patch(**heat.RESTING, label="layer without rotation"))
    if len({kind.pairs for kind in kinds}) > 1:
        marks.append(heat.empty_entry())
    groups = [(of_kinds, columns), (marks, min(len(marks), 4) if columns > 1 else 1)]
    return [group for group in groups if group[0]]


def bands_layers_caption(ds, panels=("q", "k")) -> str:
    """What the axes of `bands_layers` show, for a caption."""
    rotating = ds["rotates"].values.astype(bool)
    heads = " and ".join(style.span(ds[PANELS[panel][3]].values[rotating], PANELS[panel][2]) for panel in panels)
    return (
        "Color: mean norm of a rotary pair, averaged over the heads of a layer "
        f"({heads}), then divided by the largest mean of the layer (no unit). x: pair, 0 the fastest, and its "
        "wavelength in tokens; y: layer. " + style.prediction(style.kinds(ds)) + style.source(ds)
    )
