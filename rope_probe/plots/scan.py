"""Profile over pairs as estimated from weights, and beside it what was measured, where that is known."""

from __future__ import annotations

import numpy as np

from . import style
from .bands_profile import PANELS, _curves, _marks, bands_profile, relative

_MEASURED = (0, (1, 0.7))  # dashes


def scan(ds, ax=None, panels=("q", "k", "usage")):
    """Draw the estimated mean profile over pairs of every kind of layer, and the measured one over it.

    Parameters
    ----------
    ds : Dataset
        Result of `scan`, with or without bands beside it.
    ax : Axes or sequence of Axes, optional
        One for each panel. Without it a figure of its own is made, with legend and caption.
    panels : sequence of {"q", "k", "usage"}
        Queries, keys, and the product of their norms.

    Returns
    -------
    list of Axes, or Axes where there is one panel

    Raises
    ------
    ProbeError
        A panel is not known; the number of axes is not that of the panels.
    """
    from ..probes.scan_summary import measured

    given = style.given_axes(ax, panels, PANELS, "scan")
    kinds, other = style.kinds(_without_segments(ds)), measured(ds)
    groups = [(_curves(kinds), 2), (_entries(kinds, other is not None), 3)]
    if len(panels) == 1:
        groups = [(handles, 1) for handles, _ in groups]
    with style.look(given is None):
        axes = given or style.new_axes(panels, 2.35, kinds, scan_caption(ds, panels), groups)
        bands_profile(_without_segments(ds), ax=axes, panels=panels)
        if other is not None:
            for one, panel in zip(axes, panels, strict=True):
                _overlay(one, other, kinds, panel)
        if given is None:
            style.finish(axes, groups)
    return axes if len(axes) > 1 else axes[0]


def _without_segments(ds):
    """The result, its segments as long as the trained length: none was read, so no line marks where they end."""
    return ds.assign_attrs(length=int(ds["formation_length"].max()))


def _overlay(ax, other, kinds, panel: str) -> None:
    """Mean profile of the measured norms, dashed, with room for its peak."""
    top = ax.get_ylim()[1]
    room = 1.1 + 0.08 * len(kinds)
    for kind in kinds:
        heads = relative(other, kind, panel)
        if len(heads):
            mean = heads.mean(axis=0)
            ax.plot(np.arange(kind.pairs), mean, color=kind.color, lw=1.3, ls=_MEASURED)
            top = max(top, mean.max() * room)
    ax.set_ylim(0, top)


def _entries(kinds, measured: bool) -> list:
    from matplotlib.lines import Line2D

    marks = _marks(kinds)
    marks[0].set_label("estimated i_band")
    if measured:
        marks.append(Line2D([], [], color="0.35", lw=1.3, ls=_MEASURED, label="measured by bands (mean)"))
    return marks


def scan_caption(ds, panels=("q", "k", "usage")) -> str:
    """What the axes of `scan` show, for a caption."""
    from ..probes.scan_summary import agreement

    kinds, found = style.kinds(ds), agreement(ds)
    words = (
        "Mean norm of each rotary pair, estimated from the weights of norm, q and k alone, divided by the mean over pairs of "
        "the same head (y, no unit; 1: all pairs alike). x: pair, 0 the fastest, and its wavelength in tokens. Line: mean over "
        "heads and layers; shade around it: quartiles over the same; triangle: mean over heads of the pair that is largest for "
        "most inputs (usage: of largest usage). "
    )
    if found:
        shares = ", ".join(f"{side} {values['top']:.0%}" for side, values in found.items())
        words += (
            f"Dotted: mean of what bands measured ({ds.attrs['measured_on']}); same dominant pair in the estimated layers: "
            f"{shares} of heads. "
        )
    return words + style.prediction(kinds) + style.source(ds)
