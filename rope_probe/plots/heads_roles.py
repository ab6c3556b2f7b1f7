"""Layers × heads: the role of every head, and the weights that make it."""

from __future__ import annotations

import numpy as np

from ..probes import summary
from ..probes.heads_summary import NEAREST, ROLES
from . import heat, roles, style

PANELS = {
    "role": "role",
    "positional": "one distance of 0–4",
    "induction": "induction score",
    "sink": "first position",
}
_EMPTY = "white"


def heads_roles(ds, ax=None, panels=("role", "positional", "induction", "sink")):
    """Draw layers × heads colored by role, beside maps of the weights that decide it.

    Parameters
    ----------
    ds : Dataset
        Result of `heads`.
    ax : Axes or sequence of Axes, optional
        One for each panel. Without it a figure of its own is made, with legend and caption.
    panels : sequence of {"role", "positional", "induction", "sink"}
        One panel alone makes a figure one column wide.

    Returns
    -------
    list of Axes, or Axes where there is one panel

    Raises
    ------
    ProbeError
        A panel is not known; the number of axes is not that of the panels.
    """
    given = style.given_axes(ax, panels, PANELS, "heads_roles")
    height = 0.45 + float(np.clip(0.085 * ds.sizes["layer"], 0.8, 3.6))
    groups = [(roles.entries(ds), 4 if len(panels) > 1 else 2)]
    edges = np.arange(ds.sizes["layer"] + 1) - 0.5
    with style.look(given is None):
        axes = given or style.new_axes(panels, height, [], heads_roles_caption(ds, panels), groups)
        mesh = None
        for one, panel in zip(axes, panels, strict=True):
            if panel == "role":
                _roles(one, ds, edges)
            else:
                mesh = _map(one, decisive(ds, panel), edges)
            heat.row_labels(one, edges, ds["layer"].values)
            style.integer_ticks(one.xaxis)
            one.set_title(PANELS[panel], loc="left", weight="bold")
            one.set_xlabel("head")
        axes[0].set_ylabel("layer")
        if mesh is not None:
            heat.color_bar(mesh, axes, "weight")
        if given is None:
            style.finish(axes, groups)
    return axes if len(axes) > 1 else axes[0]


def decisive(ds, role: str) -> np.ndarray:
    """The weight that decides whether a head has a role, shape (layer, head)."""
    if role == "positional":
        nearest = ds["weight_by_distance"].values[..., :NEAREST]
        best = np.max(nearest, axis=-1, initial=-1, where=np.isfinite(nearest))
        return np.where(best < 0, np.nan, best)
    return ds["induction" if role == "induction" else "sink_weight"].values


def _roles(ax, ds, edges) -> None:
    from matplotlib.colors import ListedColormap

    number = np.select([ds["role"].values == role for role in ROLES], range(len(ROLES)), -1)
    columns = np.arange(ds.sizes["head"] + 1) - 0.5
    colors = ListedColormap([roles.COLORS[role] for role in ROLES])
    masked = np.ma.masked_less(number, 0)
    ax.pcolormesh(columns, edges, masked, cmap=colors, vmin=-0.5, vmax=len(ROLES) - 0.5, edgecolors="white", lw=0.4)
    ax.set_facecolor(_EMPTY)
    ax.set_ylim(edges[-1], edges[0])


def _map(ax, values, edges):
    columns = np.arange(values.shape[1] + 1) - 0.5
    ax.set_facecolor(_EMPTY)
    values = np.ma.masked_invalid(values)
    mesh = ax.pcolormesh(columns, edges, values, cmap="viridis", vmin=0, vmax=1, edgecolors="face", linewidth=0.2)
    ax.set_ylim(edges[-1], edges[0])
    return mesh


def heads_roles_caption(ds, panels=("role", "positional", "induction", "sink")) -> str:
    """What the axes of `heads_roles` show, for a caption."""
    weights = (
        "The other panels: the weights that decide (no unit, 0 to 1). "
        if "role" in panels and len(panels) > 1
        else "Color: mean attention weight (no unit, 0 to 1). " * ("role" not in panels)
    )
    return "x: query head; y: layer. " + roles.definition(summary(ds)) + weights + roles.source(ds)
