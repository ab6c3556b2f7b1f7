"""Heat maps of pair norms: rows × pairs, with the marks of theory across the rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import style

_EMPTY, _MARK = "0.85", "#ff79c6"  # cells without a value; lines, in a hue the map lacks
RESTING = {"facecolor": "white", "edgecolor": "0.55", "hatch": "//////", "lw": 0}  # layers without rotation


def heat_map(ax, values, edges, layer_kinds: list[style.Kind], relative: bool = True):
    """Rows × pairs as a map from 0 to 1, each row divided by its own maximum; cells without a value stay grey.

    Parameters
    ----------
    values : ndarray, shape (row, pair)
        NaN where a row has fewer pairs.
    edges : ndarray, shape (row + 1,)
        Where the rows begin and end on the y axis.
    relative : bool
        False: the values are shares as they are.

    Returns
    -------
    QuadMesh
    """
    largest = np.max(values, axis=1, keepdims=True, initial=0, where=np.isfinite(values))
    share = np.divide(values, largest, out=np.full_like(values, np.nan), where=largest > 0) if relative else values
    columns = np.arange(values.shape[1] + 1) - 0.5
    ax.set_facecolor(_EMPTY)
    # edges in the color of the cell: without them PDF viewers show hairlines between cells
    mesh = ax.pcolormesh(
        columns, edges, np.ma.masked_invalid(share), cmap="viridis", vmin=0, vmax=1, edgecolors="face", linewidth=0.2
    )
    style.pair_axis(ax, layer_kinds)
    ax.set_ylim(edges[-1], edges[0])
    return mesh


def row_labels(ax, edges, labels) -> None:
    """Ticks in the middle of rows, about a dozen of them."""
    step = slice(None, None, -(-len(labels) // 12))
    ax.set_yticks(((edges[1:] + edges[:-1]) / 2)[step], [str(label) for label in labels[step]])


def strip(ax, kinds) -> None:
    """Color of the kind of every layer, between map and tick labels."""
    from matplotlib.patches import Rectangle

    for kind in kinds:
        for row in kind.rows:
            ax.add_patch(
                Rectangle(
                    (-0.028, row - 0.5), 0.02, 1, fc=kind.color, lw=0, transform=ax.get_yaxis_transform(), clip_on=False
                )
            )
    ax.tick_params(axis="y", length=0, pad=7)


def row_marks(ax, kind: style.Kind, tops, bottoms) -> None:
    """Half a turn within the formation length, and the floor, across the rows of a kind of layer."""
    for position, dashes in ((kind.predicted[1], "-"), (kind.floor, style.FLOOR)):
        if 0 <= position <= kind.pairs - 1:
            where = np.full(len(tops), position)
            ax.vlines(where, tops, bottoms, color=_MARK, lw=1.1, ls=dashes, path_effects=_outline())


def floor_marks(ax, kind: style.Kind, tops, bottoms) -> None:
    """The floor alone, across the rows of a kind of layer."""
    if 0 <= kind.floor <= kind.pairs - 1:
        where = np.full(len(tops), kind.floor)
        ax.vlines(where, tops, bottoms, color=_MARK, lw=1.1, ls=style.FLOOR, path_effects=_outline())


def color_bar(mesh, axes, label: str = "norm / row maximum") -> None:
    """Scale of a heat map, beside its panels."""
    axes[0].figure.colorbar(mesh, ax=axes, label=label, aspect=30, pad=0.01, ticks=np.linspace(0, 1, 6))


def _outline() -> list:
    from matplotlib import patheffects

    return [patheffects.Stroke(linewidth=2.1, foreground="black"), patheffects.Normal()]


def row_mark_entries(layer_kinds: list[style.Kind]) -> list:
    """Legend entries of `row_marks`."""
    from matplotlib.lines import Line2D

    entries: list[tuple[str, Any]] = [("predicted: half a turn within L", "-")]
    if any(math.isfinite(kind.floor) for kind in layer_kinds):
        entries.append(("floor: wavelength = L", style.FLOOR))
    return [
        Line2D([], [], color=_MARK, lw=1.1, ls=dashes, path_effects=_outline(), label=label)
        for label, dashes in entries
    ]


def floor_entries(layer_kinds: list[style.Kind]) -> list:
    """Legend entry of `floor_marks`."""
    return row_mark_entries(layer_kinds)[1:]


def empty_entry(label: str = "no such pair"):
    """Legend entry of cells without a value."""
    from matplotlib.patches import Patch

    return Patch(facecolor=_EMPTY, lw=0, label=label)
