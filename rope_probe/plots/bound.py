"""Figures of the bound: B(m) against distance, and the smallest base against length."""

from __future__ import annotations

import textwrap

import numpy as np

from . import style

_WIDTH, _HEIGHT = 5.2, 2.6  # inches: the text width of a page, without legend and caption
_LINE, _CHARACTERS = 0.122, 99  # inches per line of small text, and characters in it


def _new_axes(caption: str, legend_lines: int):
    """Axes of a figure of their own, with the caption under them and room for it and the legend."""
    lines = textwrap.wrap(caption, _CHARACTERS)
    strip = _LINE * len(lines) + 0.14
    height = _HEIGHT + _LINE * legend_lines
    total = height + strip
    figure = style.blank_figure((_WIDTH, total))
    figure.get_layout_engine().set(rect=(0, strip / total, 1, height / total))
    figure.text(0.06 / _WIDTH, (strip - 0.08) / total, "\n".join(lines), fontsize=7, va="top", linespacing=1.25)
    return figure.subplots()


def _legend(ax) -> None:
    """Legend above the axes: labels hold model names, and no corner is free of curves for every model."""
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, fontsize=7, frameon=False)


def bound_caption(curves) -> str:
    """What the axes of `bound` show, for a caption."""
    furthest = max(curve.limit for curve in curves)
    return (
        "B(m) = Σ over pairs of cos(m · inv_freq), divided by B(0), against the distance m in tokens (log axis); where "
        "the legend names a head, each pair is weighted by its usage there, else no weights of a model enter. Below zero "
        "a similar token is expected to score lower than a random one. Line: least value in each bin of m "
        f"({len(curves[0].m)} bins, even in log m); shade: up to the greatest. Circle: first m with B(m)\xa0<\xa00; "
        f"dotted line: length to carry. Every integer m up to {furthest:,} was evaluated."
    )


def bound(curves, ax=None):
    """Draw B(m)/B(0) on a logarithmic m axis, the first crossing of each curve marked.

    Parameters
    ----------
    curves : sequence of rope_probe.probes.bound.Curve
    ax : matplotlib.axes.Axes, optional
        Axes to draw into; without them a figure of its own is made, with the caption under it.

    Returns
    -------
    matplotlib.axes.Axes
    """
    curves = list(curves)
    with style.look(ax is None):
        ax = _new_axes(bound_caption(curves), len(curves)) if ax is None else ax
        ax.axhline(0, color="0.35", linewidth=0.8)
        for curve, color in zip(curves, _colors(len(curves)), strict=True):
            _draw(ax, curve, color)
        ax.set_xscale("log")
        ax.set_xlim(1, max(curve.m[-1] for curve in curves))
        ax.set_ylim(top=1.02)
        ax.set_xlabel("distance m (tokens)")
        ax.set_ylabel("B(m) / B(0)")
        _legend(ax)
    return ax


def _draw(ax, curve, color) -> None:
    first = curve.first_negative
    crossing = f"first negative at m = {first:,}" if first is not None else f"not negative to {curve.limit:,}"
    ax.fill_between(curve.m, curve.low, curve.high, color=color, alpha=0.12, linewidth=0)
    ax.plot(curve.m, curve.low, color=color, linewidth=1, label=f"{curve.label}: {crossing}")
    if first is not None:
        ax.plot(first, 0, "o", color=color, markeredgecolor="black", markersize=4.5, zorder=4)
    if curve.context:
        ax.axvline(curve.context, color=color, linewidth=1, linestyle=":")


def smallest_bases_caption(rows) -> str:
    """What the axes of `smallest_bases` show, for a caption."""
    kilos = " and ".join(str(kilo) for kilo in sorted({row.kilo for row in rows}))
    words = (
        "Smallest base that carries a length: the first base of the grid a.b × 10^x (two significant digits, walked "
        "upwards) with B(m) = Σ over pairs of cos(m · inv_freq)\xa0≥\xa00 at every integer m up to the length. Length in "
        f"tokens, both axes logarithmic, 1k = {kilos}. No weights of a model enter."
    )
    if any(row.published for row in rows):
        words += (
            " Published: arXiv 2405.14591, table 2 (head dimension 128); a cross marks a published base that turns B "
            "negative before its own length."
        )
    return words


def smallest_bases(rows, ax=None, label: str = "exact"):
    """Draw the smallest base against length, with the published points where the rows hold them.

    Parameters
    ----------
    rows : sequence of rope_probe.probes.bound.LengthRow
        One or two readings of 1k; each is a line of its own.
    ax : matplotlib.axes.Axes, optional
        Axes to draw into; without them a figure of its own is made, with the caption under it.
    label : str
        Start of the legend entry of the exact bases, such as "head dimension 128".

    Returns
    -------
    matplotlib.axes.Axes
    """
    rows = [row for row in rows if row.base is not None]
    kilos = sorted({row.kilo for row in rows}, reverse=True)
    published = [row for row in rows if row.published and row.kilo == kilos[0]]
    verdicts = ((False, "o", "holds"), (True, "x", "fails before its length"))
    with style.look(ax is None):
        ax = _new_axes(smallest_bases_caption(rows), len(kilos) + 2 * bool(published)) if ax is None else ax
        for kilo, color, dashes in zip(kilos, _colors(len(kilos)), ("-", "--"), strict=False):
            own = [row for row in rows if row.kilo == kilo]
            lengths, bases = [row.length for row in own], [row.base for row in own]
            ax.plot(lengths, bases, dashes, marker=".", color=color, linewidth=1, label=f"{label}, 1k = {kilo}")
        for fails, marker, words in verdicts:
            points = [row for row in published if (row.published_fails_at is not None) == fails]
            if points:
                lengths, bases = [row.length for row in points], [row.published for row in points]
                words = f"published, {words} (1k = {kilos[0]})"
                ax.plot(lengths, bases, marker, color="black", fillstyle="none", markersize=5, label=words)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ticks = [row.length for row in rows if row.kilo == kilos[0]]
        ax.set_xticks(ticks, [_short(length, kilos[0]) for length in ticks])
        ax.minorticks_off()
        ax.set_xlabel("length (tokens)")
        ax.set_ylabel("smallest base")
        _legend(ax)
    return ax


def _short(length: int, kilo: int) -> str:
    for unit, size in (("M", kilo**2), ("k", kilo)):
        if length % size == 0:
            return f"{length // size}{unit}"
    return str(length)


def _colors(count: int):
    import matplotlib

    return matplotlib.colormaps["viridis"](np.linspace(0, 0.8, max(count, 2)))[:count]
