"""Profile over pairs: where queries, keys and their product have their norm, beside where theory puts the band."""

from __future__ import annotations

import numpy as np

from . import style

# panel -> variable, title, its i_band in the summary, what its heads are called
PANELS = {
    "q": ("q_norm", "queries ‖q‖", "i_band_q", "query head"),
    "k": ("k_norm", "keys ‖k‖", "i_band", "key head"),
    "usage": ("usage", "usage ‖q‖·‖k‖", "i_band_usage", "query head"),
}


def bands_profile(ds, ax=None, panels=("q", "k", "usage")):
    """Draw the mean profile over pairs of every kind of layer, its spread, and the predicted and measured band.

    Parameters
    ----------
    ds : Dataset
        Result of `bands`.
    ax : Axes or sequence of Axes, optional
        One for each panel. Without it a figure of its own is made, with legend and caption.
    panels : sequence of {"q", "k", "usage"}
        Queries, keys, and the product of their norms. One panel alone makes a figure one column wide.

    Returns
    -------
    list of Axes, or Axes where there is one panel

    Raises
    ------
    ProbeError
        A panel is not known; the number of axes is not that of the panels.

    Notes
    -----
    Every head is divided by its own mean over pairs: 1 is an even use of all pairs, and no head outweighs another.
    """
    given = style.given_axes(ax, panels, PANELS, "bands_profile")
    kinds = style.kinds(ds)
    groups = [(_curves(kinds), 2), (_marks(kinds), 3)]
    if len(panels) == 1:
        groups = [(handles, 1) for handles, _ in groups]
    with style.look(given is None):
        axes = given or style.new_axes(panels, 2.35, kinds, bands_profile_caption(ds, panels), groups)
        for one, panel in zip(axes, panels, strict=True):
            _panel(one, ds, kinds, panel)
        _share_height([one for one, panel in zip(axes, panels, strict=True) if panel != "usage"])
        axes[0].set_ylabel("relative to the mean over pairs")
        if given is None:
            style.finish(axes, groups)
    return axes if len(axes) > 1 else axes[0]


def relative(ds, kind: style.Kind, panel: str) -> np.ndarray:
    """Profile of every head of a kind of layer divided by its own mean, shape (layers × heads, pairs)."""
    values = ds[PANELS[panel][0]].values[kind.rows][..., : kind.pairs].reshape(-1, kind.pairs)
    mean = values.mean(axis=1)
    alive = mean > 0  # neither padding nor a head of zero norm
    return values[alive] / mean[alive, None]


def _panel(ax, ds, kinds, panel: str) -> None:
    _, title, measure, _ = PANELS[panel]
    top = 0.0
    for kind in kinds:
        heads = relative(ds, kind, panel)
        if not len(heads):
            continue
        low, high = np.percentile(heads, (25, 75), axis=0)
        mean, x = heads.mean(axis=0), np.arange(kind.pairs)
        ax.fill_between(x, low, high, color=kind.color, alpha=0.25, lw=0)
        ax.plot(x, mean, color=kind.color, lw=1.1, label=kind.label)
        top = max(top, high.max(), mean.max())
    for kind in kinds:
        ax.axvspan(*kind.predicted, color=kind.color, alpha=0.14, lw=0, zorder=0)
        for position, dashes in (
            (kind.variance, style.VARIANCE),
            (kind.floor, style.FLOOR),
            (kind.reach, style.SEGMENT),
        ):
            if 0 <= position <= kind.pairs - 1:
                ax.axvline(position, color=kind.color, lw=0.8, ls=dashes, zorder=1)
    ax.set_ylim(0, top * (1.06 + 0.08 * len(kinds)) or 1)
    style.integer_ticks(ax.yaxis)
    for row, kind in enumerate(kinds):
        _measured(ax, kind, kind.summary[measure], 0.95 - 0.075 * row, max(kind.pairs for kind in kinds))
    ax.set_title(title, loc="left", weight="bold")
    style.pair_axis(ax, kinds)


def _measured(ax, kind, i_band, height: float, pairs: int) -> None:
    """Triangle and number at the measured band."""
    if i_band is None:
        return
    side = -1 if i_band > 0.82 * pairs else 1
    across = ax.get_xaxis_transform()
    ax.plot(i_band, height, "v", color=kind.color, ms=4, mec="white", mew=0.4, transform=across)
    ax.annotate(
        f"{i_band:.1f}",
        (i_band, height),
        xycoords=across,
        xytext=(4 * side, 0),
        textcoords="offset points",
        ha="left" if side > 0 else "right",
        va="center",
        color=kind.color,
        fontsize=7,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.4},
    )


def _share_height(axes) -> None:
    """The same y axis for queries and keys."""
    if len(axes) > 1:
        top = max(one.get_ylim()[1] for one in axes)
        for one in axes:
            one.set_ylim(0, top)


def _curves(kinds) -> list:
    from matplotlib.lines import Line2D

    return [Line2D([], [], color=kind.color, lw=1.5, label=kind.label) for kind in kinds]


def _marks(kinds) -> list:
    """Legend entries of what is drawn beside the curves."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    grey = "0.35"

    def line(label, dashes):
        return Line2D([], [], color=grey, lw=0.9, ls=dashes, label=label)

    entries = [
        Line2D([], [], color=grey, lw=0, marker="v", ms=4, label="measured i_band"),
        Patch(facecolor=grey, alpha=0.25, lw=0, label="predicted: one turn to half a turn in L"),
        line("predicted: j* (largest variance)", style.VARIANCE),
    ]
    if any(np.isfinite(kind.floor) for kind in kinds):
        entries.append(line("floor: wavelength = L", style.FLOOR))
    if any(np.isfinite(kind.reach) for kind in kinds):
        entries.append(line(f"wavelength = segment length {kinds[0].segment:,}", style.SEGMENT))
    return entries


def bands_profile_caption(ds, panels=("q", "k", "usage")) -> str:
    """What the axes of `bands_profile` show, for a caption."""
    kinds = style.kinds(ds)
    sides = [side for side, shown in (("q", {"q", "usage"}), ("k", {"k"})) if shown & set(panels)]
    heads = "; ".join(
        f"{kind.name}, "
        + " and ".join(style.count(len(relative(ds, kind, side)), PANELS[side][3]) for side in sides)
        + f" in {style.count(len(kind.rows), 'layer')}"
        for kind in kinds
    )
    usage = " Usage: product of the mean norms of query and key." if "usage" in panels else ""
    largest = " (usage: of largest usage)" if "usage" in panels else ""
    return (
        "Mean norm of each rotary pair, divided by the mean over pairs of the same head (y, no unit; 1: all pairs "
        f"alike). x: pair, 0 the fastest, and its wavelength in tokens.{usage} "
        f"Line: mean over heads and layers; shade around it: quartiles over the same ({heads}). "
        f"i_band: mean over heads of the pair that is largest for most tokens{largest}. "
        + style.prediction(kinds)
        + style.source(ds)
    )
