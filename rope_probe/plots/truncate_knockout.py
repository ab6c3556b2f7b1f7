"""Importance of each pair alone: what the model loses with its rotation, and with its content, over its usage."""

from __future__ import annotations

import numpy as np

from ..probes import summary
from ..probes.truncate_summary import groups_at, profile, usage_at
from . import style
from .truncate_keep import band_entries, band_mark, color_of, read_words

PANELS = {"usage": "usage ‖q‖·‖k‖", "unrotate": "pair not rotated", "remove": "pair removed"}


def truncate_knockout(ds, ax=None, panels=None):
    """Draw the usage of every pair and, under it, what knocking that pair out adds to the negative log likelihood.

    Parameters
    ----------
    ds : Dataset
        Result of `truncate` with `knockout`.
    ax : Axes or sequence of Axes, optional
        One for each panel. Without it a figure of its own is made, one panel under the other.
    panels : sequence of {"usage", "unrotate", "remove"}, optional
        Default: usage, and what the result holds.

    Returns
    -------
    list of Axes, or Axes where there is one panel

    Raises
    ------
    ProbeError
        A panel is not known; the number of axes is not that of the panels.
    """
    done = summary(ds)["knockout"]
    known = ["usage", *dict.fromkeys(one["kind"] for one in done)]
    panels = known if panels is None else panels
    given = style.given_axes(ax, panels, known, "truncate_knockout")
    kinds = style.kinds(ds)
    wheres = list(dict.fromkeys(one["where"] for one in done))
    groups = [(_curves(wheres, kinds), 1), (band_entries(), 2)]
    with style.look(given is None):
        height = 0.75 + 1.15 * len(panels)
        axes = given or style.new_axes(panels, height, kinds, truncate_knockout_caption(ds), groups, stacked=True)
        for one, panel in zip(axes, panels, strict=True):
            for where in wheres:
                _curve(one, ds, panel, where, color_of(where, kinds))
            for row, kind in enumerate(kinds):
                one.axvspan(*kind.predicted, color=kind.color, alpha=0.14, lw=0, zorder=0)
                for name, filled in (("i_band", True), ("i_band_usage", False)):
                    if kind.summary[name] is not None:
                        band_mark(one, kind, kind.summary[name], 0.93 - 0.08 * (2 * row + (not filled)), filled)
            one.axhline(1 if panel == "usage" else 0, color="0.6", lw=0.6, zorder=0)
            one.set_ylabel("relative to mean" if panel == "usage" else "added nats/token")
            one.set_title(PANELS[panel], loc="left", weight="bold")
            low, high = one.get_ylim()
            one.set_ylim(0 if panel == "usage" else low, high + 0.2 * len(kinds) * (high - low))
        _pair_axes(axes, kinds, stacked=given is None)
        if given is None:
            style.finish(axes, groups)
    return axes if len(axes) > 1 else axes[0]


truncate_knockout.applies = lambda ds: bool(ds["kind"].isin(["unrotate", "remove"]).any())


def _curve(ax, ds, panel: str, where: str, color: str) -> None:
    if panel == "usage":
        groups = groups_at(summary(ds)["by_layer_type"], where)
        usage = usage_at(ds, [layer for group in groups.values() for layer in group["layers"]])
        ax.plot(np.arange(len(usage)), usage, color=color, lw=1.1)
        return
    pairs, added, error = profile(ds, panel, where)
    dense = len(pairs) > 48
    ax.errorbar(
        pairs, added, np.nan_to_num(error), fmt="o-", ms=1.5 if dense else 2.6, lw=0.8, elinewidth=0.7, color=color
    )


def _pair_axes(axes, kinds, stacked: bool) -> None:
    """The ruler of wavelengths over the first of stacked panels, the pairs under the last; both on any other axes."""
    for row, one in enumerate(axes):
        if not stacked or row == 0:
            style.pair_axis(one, kinds)
        one.set_xlim(-0.5, max(kind.pairs for kind in kinds) - 0.5)
        style.integer_ticks(one.xaxis)
        last = not stacked or row == len(axes) - 1
        one.tick_params(labelbottom=last)
        one.set_xlabel("rotary pair (fast → slow)" if last else "")


def _curves(wheres: list[str], kinds) -> list:
    from matplotlib.lines import Line2D

    return [Line2D([], [], color=color_of(where, kinds), lw=1.3, label=f"knocked out in {where}") for where in wheres]


def truncate_knockout_caption(ds) -> str:
    """What the axes of `truncate_knockout` show, for a caption."""
    modes = dict.fromkeys(one["kind"] for one in summary(ds)["knockout"])
    words = {
        "unrotate": "not rotated (its angle is 0 at every position)",
        "remove": "removed (its components of queries and keys are 0)",
    }
    return (
        "Top: usage of a pair, product of mean query and key norm, divided by the mean over pairs, averaged over heads and "
        "layers (no unit). Below: what one pair alone adds to the negative log likelihood (nats per token) when it is "
        f"{' or '.join(words[mode] for mode in modes)}. x: pair, 0 the fastest, and its wavelength in tokens. "
        "i_band: mean over heads of the dominant pair. " + style.prediction(style.kinds(ds)) + read_words(ds)
    )
