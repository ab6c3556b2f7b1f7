"""One attention map, averaged over cells where it is larger than a figure can show."""

from __future__ import annotations

import json

import numpy as np

from ..errors import ProbeError
from . import roles, style

_LOW = 1e-4  # weights below are drawn alike


def heads_map(ds, ax=None):
    """Draw the attention map that a `heads` result holds (`--map LAYER.HEAD`).

    Parameters
    ----------
    ds : Dataset
        Result of `heads` with a map.
    ax : Axes, optional
        Without it a figure of its own is made, with a caption.

    Returns
    -------
    Axes

    Raises
    ------
    ProbeError
        The result holds no map.
    """
    from matplotlib.colors import LogNorm

    if "attention_map" not in ds:
        raise ProbeError("the result holds no attention map: measure with --map LAYER.HEAD.")
    values, length = ds["attention_map"].values, int(ds.attrs["length"])
    with style.look(ax is None):
        own = ax is None
        ax = style.new_axes(["map"], 2.9, [], heads_map_caption(ds), [])[0] if own else ax
        cell = _cell(ds)
        edges = np.minimum(np.arange(len(values) + 1) * cell, length) - 0.5
        image = ax.pcolormesh(
            edges, edges, np.maximum(values, _LOW), cmap="magma", norm=LogNorm(_LOW, 1), rasterized=True
        )
        ax.set_aspect("equal")
        ax.set_ylim(edges[-1], edges[0])
        ax.set_xlabel("key position (tokens)")
        ax.set_ylabel("query position (tokens)")
        layer, head = json.loads(ds.attrs["options"])["map"]
        ax.set_title(f"layer {layer}, head {head}: {_role(ds, layer, head)}", loc="left", weight="bold")
        ax.figure.colorbar(image, ax=ax, label="attention weight", pad=0.02, shrink=0.9)
        if own:
            style.finish([ax], [])
    return ax


heads_map.applies = lambda ds: "attention_map" in ds


def _cell(ds) -> int:
    return -(-int(ds.attrs["length"]) // ds["attention_map"].shape[0])


def _role(ds, layer: int, head: int) -> str:
    return str(ds["role"].sel(layer=layer).values[head])


def heads_map_caption(ds) -> str:
    """What the axes of `heads_map` show, for a caption."""
    layer, head = json.loads(ds.attrs["options"])["map"]
    size, cell = ds["attention_map"].shape[0], _cell(ds)
    averaged = (
        f"Every pixel is the mean over a block of {cell} × {cell} tokens ({size} × {size} pixels); keys that a query does "
        "not see count as 0. "
        if cell > 1
        else "One pixel per query and key. "
    )
    return (
        f"Attention weights of query head {head} of layer {layer} in the first segment, row by row. {averaged}"
        f"Color: weight, logarithmic, 1e-4 and below alike. " + roles.source(ds).split("; means")[0] + "."
    )
