"""Several results of the same analysis in one figure."""

from __future__ import annotations

from itertools import cycle

import numpy as np

from ..words import base
from . import style
from .bands_profile import PANELS, relative
from .similarity_layers import similarity_layers

_DASHES = ("-", "--", ":")  # kinds of layers of one model


def compare(results, ax=None, names=None):
    """Draw several results of `bands`, or of `similarity`, over each other.

    Parameters
    ----------
    results : sequence of Dataset
        Two or more results of one analysis.
    ax : sequence of Axes, optional
        One for each panel of the figure; default: a figure of its own, with legend and caption.
    names : sequence of str, optional
        What to call them; default: the models.

    Returns
    -------
    list of Axes

    Raises
    ------
    ProbeError
        The results cannot be compared; the number of axes is not that of the panels.
    """
    from ..probes.compare import check, model_names

    results = list(results)
    return OVERLAYS[check(results)](results, ax=ax, names=list(names or model_names(results)))


def compare_bands(results, ax=None, names=None, panels=("q", "k", "usage")):
    """Profiles of the pair norms of several models against wavelength / trained length, which other bases share."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    given = style.given_axes(ax, panels, PANELS, "compare")
    curves = list(_curves(results, names))
    entries = [Line2D([], [], color=color, ls=dashes, lw=1.3, label=label) for _, _, color, dashes, label in curves]
    marks = [
        Line2D([], [], color="0.35", lw=0, marker="v", ms=4, label="measured i_band"),
        Patch(facecolor="0.35", alpha=0.15, lw=0, label="predicted: one turn to half a turn in L"),
    ]
    groups = [(entries, 2), (marks, 3)] if len(panels) > 1 else [([*entries, *marks], 1)]
    with style.look(given is None):
        axes = given or style.new_axes(panels, 2.3, [], compare_bands_caption(curves), groups)
        for one, panel in zip(axes, panels, strict=True):
            _, title, measure, _ = PANELS[panel]
            for row, (ds, kind, color, dashes, _) in enumerate(curves):
                _profile(one, kind, relative(ds, kind, panel), color, dashes)
                _measured(one, kind, kind.summary[measure], 0.96 - 0.05 * row, color)
            one.set_xscale("log")
            one.set_ylim(0, one.get_ylim()[1] * (1.05 + 0.06 * len(curves)))
            one.axvspan(1, 2, color="0.35", alpha=0.15, lw=0, zorder=0)
            one.set_xlabel("wavelength / trained length L")
            one.set_title(title, loc="left", weight="bold")
        axes[0].set_ylabel("relative to the mean over pairs")
        if given is None:
            style.finish(axes, groups)
    return axes if len(axes) > 1 else axes[0]


def _curves(results, names):
    """(result, kind of layer, color, dashes, label) of every curve: a color for each result, dashes for its kinds."""
    for ds, name, color in zip(results, names, cycle(style.SERIES), strict=False):
        kinds = style.kinds(ds)
        for kind, dashes in zip(kinds, cycle(_DASHES), strict=False):
            yield ds, kind, color, dashes, f"{name}: {kind.name}" if len(kinds) > 1 else name


def _profile(ax, kind, heads, color: str, dashes: str) -> None:
    turning = np.isfinite(kind.wavelength)
    if not len(heads) or not turning.any():
        return
    waves, heads = kind.wavelength[turning] / kind.length, heads[:, turning]
    low, high = np.percentile(heads, (25, 75), axis=0)
    ax.fill_between(waves, low, high, color=color, alpha=0.15, lw=0)
    ax.plot(waves, heads.mean(axis=0), color=color, ls=dashes, lw=1.1)


def _measured(ax, kind, i_band, height: float, color: str) -> None:
    """Triangle at the wavelength of the measured band."""
    waves = kind.wavelength[np.isfinite(kind.wavelength)] / kind.length
    if i_band is None or not len(waves):
        return
    wave = np.exp(np.interp(i_band, np.arange(len(waves)), np.log(waves)))
    ax.plot(wave, height, "v", color=color, ms=4, mec="white", mew=0.4, transform=ax.get_xaxis_transform())


def compare_bands_caption(curves) -> str:
    """What the axes of `compare_bands` show, for a caption."""
    parts = [
        f"{label}: {style.count(len(kind.rows), 'layer')}, base {base(kind.base)}, L\xa0=\xa0{kind.length:,}, "
        f"i_band {kind.summary['i_band_usage']:.1f} of {kind.pairs} pairs by usage"
        for _, kind, _, _, label in curves
        if kind.summary["i_band_usage"] is not None
    ]
    texts = dict.fromkeys(
        f"{ds.attrs['corpus']}, {style.count(int(ds.attrs['segments']), 'segment')} of {int(ds.attrs['length']):,} tokens"
        for ds, *_ in curves
    )
    return (
        "Mean norm of each rotary pair, divided by the mean over pairs of the same head (y, no unit; 1: all pairs alike), "
        "against its wavelength as a multiple of the length L in which the frequencies were formed (x, log scale), which "
        "models of different bases share; pairs that do not turn are left out. Line: mean over heads and layers; shade: "
        "quartiles; usage: product of the mean norms of query and key. Triangle: mean over "
        f"heads of the pair that is largest for most tokens (usage: of largest usage). {'; '.join(parts)}. "
        f"Text: {'; '.join(texts)}."
    )


#: analysis -> its overlaid figure, called with (results, ax=, names=)
OVERLAYS = {"bands": compare_bands, "similarity": similarity_layers}
