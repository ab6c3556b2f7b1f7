"""The band over training: i_band at every checkpoint, and the profile over pairs."""

from __future__ import annotations

import numpy as np

from ..probes import summary
from . import heat, style

PANELS = {"band": "i_band over training", "q": "queries ‖q‖", "k": "keys ‖k‖"}
_STATISTICS = {"i_band": ("keys", "o", "-"), "i_band_usage": ("usage q·k", "s", style.VARIANCE)}


def trajectory(ds, ax=None, panels=("band", "q", "k")):
    """Draw i_band of keys and of usage at every checkpoint, and the mean profile over pairs of queries and keys.

    Parameters
    ----------
    ds : Dataset
        Result of `trajectory`.
    ax : Axes or sequence of Axes, optional
        One for each panel. Without it a figure of its own is made, with legend and caption.
    panels : sequence of {"band", "q", "k"}
        One panel alone makes a figure one column wide.

    Returns
    -------
    list of Axes, or Axes where there is one panel

    Raises
    ------
    ProbeError
        A panel is not known; the number of axes is not that of the panels.
    """
    given = style.given_axes(ax, panels, PANELS, "trajectory")
    kinds = style.kinds(ds)
    values = summary(ds)
    groups = [(_entries(kinds), 3 if len(panels) > 1 else 1)]
    height = 0.9 + float(np.clip(0.17 * ds.sizes["checkpoint"], 1.6, 3.2))
    edges = np.arange(ds.sizes["checkpoint"] + 1) - 0.5
    with style.look(given is None):
        axes = given or style.new_axes(panels, height, kinds, trajectory_caption(ds, panels), groups)
        mesh = None
        for one, panel in zip(axes, panels, strict=True):
            if panel == "band":
                _band(one, kinds, values)
            else:
                mesh = heat.heat_map(one, profiles(ds, kinds[0], panel), edges, kinds[:1])
                heat.row_marks(one, kinds[0], edges[:1], edges[-1:])
            heat.row_labels(one, edges, [row["checkpoint"] for row in values["checkpoints"]])
            one.set_ylim(edges[-1], edges[0])
            one.set_title(PANELS[panel], loc="left", weight="bold")
        axes[0].set_ylabel("checkpoint")
        if mesh is not None:
            heat.color_bar(mesh, axes)
        if given is None:
            style.finish(axes, groups)
    return axes if len(axes) > 1 else axes[0]


def profiles(ds, kind: style.Kind, side: str) -> np.ndarray:
    """Mean over heads and layers of each head's norm by pair, divided by its own mean: (checkpoint, pair)."""
    values = ds[f"{side}_norm"].values[:, kind.rows, :, : kind.pairs]
    mean = values.mean(-1, keepdims=True)
    seen = mean > 0  # neither padding nor a head of zero norm
    share = np.divide(values, mean, out=np.zeros_like(values), where=seen)
    return share.sum((1, 2)) / seen.sum((1, 2))


def _band(ax, kinds, values) -> None:
    y = np.arange(len(values["checkpoints"]))
    for kind, name in zip(kinds, values["by_layer_type"], strict=True):
        rows = [row["by_layer_type"][name] for row in values["checkpoints"]]
        for key, (_, marker, dashes) in _STATISTICS.items():
            x = [np.nan if row[key] is None else row[key] for row in rows]
            error = [row[f"{key}_se"] or 0 for row in rows]
            look = {"color": kind.color, "marker": marker, "ls": dashes, "ms": 3, "lw": 1}
            ax.errorbar(x, y, xerr=error, elinewidth=0.7, **look)
        ax.axvspan(*kind.predicted, color=kind.color, alpha=0.14, lw=0, zorder=0)
        ax.axvline(kind.variance, color=kind.color, lw=0.8, ls=style.SEGMENT, zorder=1)
    style.pair_axis(ax, kinds)


def _entries(kinds) -> list:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    measured = [
        Line2D([], [], color=kind.color, marker=marker, ls=dashes, ms=3, lw=1, label=_label(kinds, kind, words))
        for kind in kinds
        for words, marker, dashes in _STATISTICS.values()
    ]
    return [
        *measured,
        Patch(facecolor="0.35", alpha=0.25, lw=0, label="predicted: one turn to half a turn in L"),
        Line2D([], [], color="0.35", lw=0.9, ls=style.SEGMENT, label="predicted: j* (largest variance)"),
        *heat.row_mark_entries(kinds[:1]),
    ]


def _label(kinds, kind, words: str) -> str:
    return f"i_band, {words}" + (f", {kind.name}" if len(kinds) > 1 else "")


def trajectory_caption(ds, panels=("band", "q", "k")) -> str:
    """What the axes of `trajectory` show, for a caption."""
    kinds = style.kinds(ds)
    shown = []
    if "band" in panels:
        shown.append(
            "i_band: mean over heads and layers of the pair that is largest for most tokens (usage: of the largest "
            "product of mean norms), bars: standard error over segments. "
        )
    if {"q", "k"} & set(panels):
        which = "" if len(kinds) == 1 else f", {kinds[0].name} layers only"
        shown.append(
            "Color: mean norm of a pair, each head divided by its own mean over pairs, averaged over heads and layers"
            f"{which}, then divided by the largest of the checkpoint. "
        )
    cut = " Not all checkpoints that were asked for." if int(ds.attrs["partial"]) else ""
    return (
        "x: pair, 0 the fastest, and its wavelength; y: checkpoint, in the order of training. "
        + "".join(shown)
        + style.prediction(kinds)
        + style.source(ds.assign_attrs(partial=0))
        + cut
    )
