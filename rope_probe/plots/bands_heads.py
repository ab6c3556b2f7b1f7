"""Heads × pairs of one layer: which pairs each head uses."""

from __future__ import annotations

import numpy as np

from ..errors import ProbeError
from ..words import base
from . import heat, style

PANELS = {"q": ("q_norm", "q_top", "queries ‖q‖", "heads"), "k": ("k_norm", "k_top", "keys ‖k‖", "kv_heads")}


def bands_heads(ds, layer=None, ax=None, panels=("q", "k")):
    """Draw heat maps of the mean pair norm, heads × pairs of one layer, each head divided by its own maximum.

    Parameters
    ----------
    ds : Dataset
        Result of `bands`.
    layer : int, optional
        Default: the layer whose mean dominant pair of the keys is nearest the median over layers.
    ax : Axes or sequence of Axes, optional
        One for each panel. Without it a figure of its own is made, with legend and caption.
    panels : sequence of {"q", "k"}
        Queries and keys; a key head takes the height of the query heads that share it. One panel alone makes a figure
        one column wide.

    Returns
    -------
    list of Axes, or Axes where there is one panel

    Raises
    ------
    ProbeError
        No such layer in the result, or it does not rotate; a panel is not known; the number of axes is not that of the
        panels.
    """
    given = style.given_axes(ax, panels, PANELS, "bands_heads")
    row = _row(ds, layer)
    kind = next(kind for kind in style.kinds(ds) if row in kind.rows)
    heads = int(ds["heads"].values[row])
    height = 0.75 + float(np.clip(0.12 * heads, 1.1, 3.6))
    entries = [_dot_entry(), *heat.row_mark_entries([kind])]
    groups = [(entries, len(entries) if len(panels) > 1 else 1)]
    with style.look(given is None):
        axes = given or style.new_axes(panels, height, [kind], bands_heads_caption(ds, layer), groups)
        for one, panel in zip(axes, panels, strict=True):
            variable, top, title, size = PANELS[panel]
            rows = int(ds[size].values[row])
            edges = np.linspace(0, heads, rows + 1) - 0.5
            mesh = heat.heat_map(one, ds[variable].values[row, :rows, : kind.pairs], edges, [kind])
            heat.row_marks(one, kind, edges[:-1], edges[1:])
            heat.row_labels(one, edges, np.arange(rows))
            peaks = dominant(ds[top].values[row, :rows], ds["inv_freq"].values[row])
            one.plot(peaks, (edges[1:] + edges[:-1]) / 2, **_DOT)
            one.set_title(f"{title}, layer {ds['layer'].values[row]}", loc="left", weight="bold")
            one.set_ylabel("query head" if panel == "q" else "key head")
        heat.color_bar(mesh, axes)
        if given is None:
            style.finish(axes, groups)
    return axes if len(axes) > 1 else axes[0]


_DOT = {"marker": "o", "ms": 3, "color": "white", "mec": "black", "mew": 0.7, "ls": "none"}


def _dot_entry():
    from matplotlib.lines import Line2D

    return Line2D([], [], **_DOT, label="dominant pair")


def dominant(counts, inv_freq) -> np.ndarray:
    """Turning pair of the largest count on the last axis (ties to the lower one); NaN where there is none."""
    counts = np.where((inv_freq > 0) & (counts > 0), counts, 0)
    return np.where(counts.any(axis=-1), counts.argmax(axis=-1), np.nan)


def _layer_peaks(ds) -> np.ndarray:
    """Mean over key heads of the dominant pair, by layer; NaN where a layer has none."""
    peaks = dominant(ds["k_top"].values, ds["inv_freq"].values[:, None])
    seen = np.isfinite(peaks)
    return np.divide(np.where(seen, peaks, 0).sum(1), seen.sum(1), out=np.full(len(peaks), np.nan), where=seen.any(1))


def _row(ds, layer) -> int:
    """Position of a layer in the result, or that of the most typical one."""
    layers, rotates = ds["layer"].values, ds["rotates"].values.astype(bool)
    if layer is None:
        peaks = _layer_peaks(ds)
        seen = np.flatnonzero(np.isfinite(peaks))
        return int(seen[np.abs(peaks[seen] - np.median(peaks[seen])).argmin()])
    found = np.flatnonzero(layers == layer)
    if not len(found):
        raise ProbeError(f"the result holds no layer {layer}: choose from {', '.join(map(str, layers))}.")
    if not rotates[found[0]]:
        raise ProbeError(
            f"layer {layer} does not rotate, so it has no pairs to draw: choose from "
            f"{', '.join(map(str, layers[rotates]))}."
        )
    return int(found[0])


def bands_heads_caption(ds, layer=None) -> str:
    """What the axes of `bands_heads` show, for a caption."""
    row = _row(ds, layer)
    kind = next(kind for kind in style.kinds(ds) if row in kind.rows)
    chosen = ""
    if layer is None:
        peaks = _layer_peaks(ds)
        middle = np.median(peaks[np.isfinite(peaks)])
        chosen = f", whose mean dominant key pair ({peaks[row]:.1f}) is nearest the median over layers ({middle:.1f})"
    return (
        f"Layer {ds['layer'].values[row]} ({kind.name}, base {base(kind.base)}){chosen}. Color: mean norm of a "
        "rotary pair, divided by the largest of the head (no unit). x: pair, 0 the fastest, and its wavelength in "
        "tokens; y: head, a key head as high as the query heads that share it. Dot: the pair that is largest for most "
        "tokens. " + style.prediction([kind]) + style.source(ds, resting=False)
    )
