"""What a cut costs: perplexity against the pairs that keep turning, and against the floor, beside the band."""

from __future__ import annotations

import numpy as np

from ..probes import summary
from ..probes.truncate_summary import HARMLESS
from . import style

EVERYWHERE = "0.15"  # color of a cut in layers of several kinds


def truncate_keep(ds, ax=None):
    """Draw what perplexity gains when only the fastest (or slowest) pairs turn, against the first pair that stops.

    Parameters
    ----------
    ds : Dataset
        Result of `truncate` with `keep`.
    ax : Axes, optional
        Without it a figure of its own is made, with legend and caption.

    Returns
    -------
    Axes

    Raises
    ------
    ProbeError
        More than one axes was given.
    """
    given = style.given_axes(ax, ("keep",), ("keep",), "truncate_keep")
    kinds = style.kinds(ds)
    groups = [(_curves(ds, "keep", kinds), 1), (_marks(kinds), 2)]
    with style.look(given is None):
        one = (given or style.new_axes(("keep",), 2.6, kinds, truncate_keep_caption(ds), groups))[0]
        reverse = summary(ds)["reverse"]
        pairs = max(kind.pairs for kind in kinds)
        for where, rows in _rows(ds, "keep").items():
            own = max(kind.pairs for kind in _kinds_at(where, kinds))
            kept = (ds["value"].values[rows] * own).astype(int)
            _curve(one, ds, rows, own - kept if reverse else kept, color_of(where, kinds))
        for kind in kinds:
            one.axvspan(*kind.predicted, color=kind.color, alpha=0.14, lw=0, zorder=0)
            if 0 <= kind.reach <= kind.pairs - 1:
                one.axvline(kind.reach, color=kind.color, lw=0.8, ls=style.SEGMENT, zorder=1)
        excess_axis(one)
        for row, kind in enumerate(kinds):
            for name, filled in (("i_band", True), ("i_band_usage", False)):
                if kind.summary[name] is not None:
                    band_mark(one, kind, kind.summary[name], 0.96 - 0.05 * (2 * row + (not filled)), filled)
        style.pair_axis(one, kinds)
        one.set_xlim(-0.02 * pairs, 1.02 * pairs)
        one.set_xlabel(
            "first pair that turns (fast → slow)" if reverse else "first pair that stands still (fast → slow)"
        )
        if given is None:
            style.finish([one], groups)
    return one


def truncate_floor(ds, ax=None):
    """Draw what perplexity gains when pairs slower than a multiple of the floor frequency stop.

    Parameters
    ----------
    ds : Dataset
        Result of `truncate` with `floor`.
    ax : Axes, optional
        Without it a figure of its own is made, with legend and caption.

    Returns
    -------
    Axes

    Raises
    ------
    ProbeError
        More than one axes was given.
    """
    given = style.given_axes(ax, ("floor",), ("floor",), "truncate_floor")
    kinds = style.kinds(ds)
    groups = [(_curves(ds, "floor", kinds), 1)]
    with style.look(given is None):
        one = (given or style.new_axes(("floor",), 2.0, kinds[:1], truncate_floor_caption(ds), groups))[0]
        for where, rows in _rows(ds, "floor").items():
            _curve(one, ds, rows, ds["value"].values[rows], color_of(where, kinds))
        one.axvline(1, color="0.6", lw=0.7, ls=style.FLOOR)
        excess_axis(one)
        top = max(1.0, float(ds["value"].values[ds["kind"].values == "floor"].max()))
        one.set_xlim(-0.03 * top, 1.03 * top)
        one.set_xlabel("pairs slower than this × 2π/L stand still")
        if given is None:
            style.finish([one], groups)
    return one


truncate_keep.applies = lambda ds: bool((ds["kind"] == "keep").any())
truncate_floor.applies = lambda ds: bool((ds["kind"] == "floor").any())


# --- shared with the profile of knockouts ------------------------------------------------------------------------------


def color_of(where: str, kinds: list[style.Kind]) -> str:
    """Color of a group of layers that was cut: that of its kind, or a dark grey for several kinds."""
    own = _kinds_at(where, kinds)
    return own[0].color if len(own) == 1 else EVERYWHERE


def _kinds_at(where: str, kinds: list[style.Kind]) -> list[style.Kind]:
    """The kind of layer that was cut, or all of them where the cut was not meant for one type."""
    return [kind for kind in kinds if where.split(",")[0] == kind.name.split(",")[0]] or kinds


def band_mark(ax, kind: style.Kind, position: float, height: float, filled: bool = True) -> None:
    """A triangle at a measured band."""
    face = kind.color if filled else "white"
    ax.plot(position, height, "v", color=kind.color, mfc=face, ms=4, mew=0.7, transform=ax.get_xaxis_transform())


def band_entries() -> list:
    """Legend entries of the measured and of the predicted band."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    grey = "0.35"
    return [
        Line2D([], [], color=grey, lw=0, marker="v", ms=4, label="i_band, keys"),
        Line2D([], [], color=grey, lw=0, marker="v", ms=4, mfc="white", label="i_band, usage"),
        Patch(facecolor=grey, alpha=0.25, lw=0, label="predicted band"),
    ]


def read_words(ds) -> str:
    """Sentences on model and text, for the end of a caption."""
    segments, length = int(ds.attrs["segments"]), int(ds.attrs["length"])
    cut = ", interrupted before the end" if int(ds.attrs.get("partial", 0)) else ""
    bars = "Bars: standard error of the paired differences over segments. " if segments > 1 else ""
    return (
        f"{bars}Model: {style.model_name(ds)}. Text: {ds.attrs['corpus']}, {style.count(segments, 'segment')} of "
        f"{length:,} tokens{cut}, all {segments * (length - 1):,} predictions."
    )


# --- parts --------------------------------------------------------------------------------------------------------------


def _rows(ds, kind: str) -> dict[str, np.ndarray]:
    """Settings of a kind by the layers they cut, in order of value."""
    found: dict[str, np.ndarray] = {}
    for where in dict.fromkeys(ds["where"].values[ds["kind"].values == kind].tolist()):
        rows = np.flatnonzero((ds["kind"].values == kind) & (ds["where"].values == where))
        found[where] = rows[np.argsort(ds["value"].values[rows])]
    return found


def _curve(ax, ds, rows, x, color: str) -> None:
    excess, error = 100 * (ds["ratio"].values[rows] - 1), 100 * np.nan_to_num(ds["ratio_se"].values[rows])
    ax.errorbar(x, excess, error, fmt="o-", ms=2.8, lw=1, elinewidth=0.8, color=color)


def excess_axis(ax) -> None:
    """y = perplexity above that of the intact model in percent: linear around 0, logarithmic beyond 1 %."""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    drawn = np.concatenate([np.asarray(line.get_ydata()) for line in ax.lines if line.get_marker() == "o"])
    low, high = min(-1.0, 1.3 * float(np.nanmin(drawn))), max(10.0, float(np.nanmax(drawn)))
    ax.set_yscale("symlog", linthresh=1, linscale=0.6)
    decades = [10.0**e for e in range(int(np.ceil(np.log10(high))) + 1)]
    ax.yaxis.set_major_locator(FixedLocator([-10, -1, 0, *decades]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+,.0f}" if value else "0"))
    ax.yaxis.set_minor_locator(FixedLocator([]))
    ax.set_ylim(low, 3 * high)
    ax.axhline(0, color="0.6", lw=0.6, zorder=0)
    ax.axhline(100 * (HARMLESS - 1), color="0.6", lw=0.7, ls=":", zorder=0)
    ax.set_ylabel("perplexity above intact (%)")


def _curves(ds, kind: str, kinds) -> list:
    from matplotlib.lines import Line2D

    groups = list(_rows(ds, kind))
    entries = [
        Line2D([], [], color=color_of(where, kinds), marker="o", ms=2.8, lw=1.2, label=f"cut in {where}")
        for where in groups
    ]
    return [*entries, Line2D([], [], color="0.6", lw=0.8, ls=":", label=f"+{100 * (HARMLESS - 1):.0f} %")]


def _marks(kinds) -> list:
    from matplotlib.lines import Line2D

    entries = band_entries()
    if any(np.isfinite(kind.reach) for kind in kinds):
        label = f"λ = segment, {kinds[0].segment:,}"
        entries.append(Line2D([], [], color="0.35", lw=0.9, ls=style.SEGMENT, label=label))
    return entries


def truncate_keep_caption(ds) -> str:
    """What the axes of `truncate_keep` show, for a caption."""
    end, kept = ("fast", "slowest") if summary(ds)["reverse"] else ("slow", "fastest")
    return (
        f"Perplexity above that of the intact model (y, percent; linear below 1) when only the {kept} pairs rotate: the "
        f"cut comes from the {end} end and reaches the pair at x (0 the fastest; wavelengths in tokens above). "
        "i_band: mean over heads of the dominant pair. " + style.prediction(style.kinds(ds)) + read_words(ds)
    )


def truncate_floor_caption(ds) -> str:
    """What the axes of `truncate_floor` show, for a caption."""
    lengths = ", ".join(f"{kind.name}: L\xa0=\xa0{kind.length:,}" for kind in style.kinds(ds))
    return (
        "Perplexity above that of the intact model (y, percent; linear below 1) when every pair slower than x times "
        f"2π/L stands still, L the length the frequencies were formed in ({lengths}). " + read_words(ds)
    )
