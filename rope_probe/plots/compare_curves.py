"""What the figures of `compare` share: curves of the kinds of layers of several results, and the three axes."""

from __future__ import annotations

import math
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from ..errors import UsageError
from ..probes.compare_axes import AXES, Ladder, position_at, positions
from ..words import base
from . import style

DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)))  # kinds of layers of one result
TITLES = {
    "index": "pair / P (fast → slow)",
    "wavelength": "wavelength (tokens)",
    "relative": "wavelength / trained length L",
}


class Curve(NamedTuple):
    """One kind of layer of one result."""

    ds: Any
    kind: style.Kind
    color: str
    dashes: Any
    label: str
    filled: bool = True  # markers


def curves(results, names) -> list[Curve]:
    """A color for each result, dashes for its kinds of layers."""
    found = []
    for ds, name, color in zip(results, names, cycle(style.SERIES), strict=False):
        kinds = style.kinds(ds)
        for row, (kind, dashes) in enumerate(zip(kinds, cycle(DASHES), strict=False)):
            own = kind.name.replace("attention", "layers")
            found.append(Curve(ds, kind, color, dashes, f"{name}, {own}" if len(kinds) > 1 else name, row % 2 == 0))
    return found


def axes_of(axis: str | None, default=tuple(AXES)) -> tuple[str, ...]:
    """The axes to draw: the one asked for, or the default ones."""
    if axis is None:
        return tuple(default)
    if axis not in AXES:
        raise UsageError(f"--axis is {axis!r}: choose {', '.join(AXES)}.")
    return (axis,)


def _ladder(kind: style.Kind) -> Ladder:
    return Ladder(kind.wavelength, kind.length)


def _shown(x, axis: str):
    return x if axis == "index" else np.exp(x)


def places(kind: style.Kind, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """(pairs that turn, where each of them is on an axis)."""
    ladder = _ladder(kind)
    return ladder.turning, _shown(positions(ladder, axis), axis)


def place(kind: style.Kind, axis: str, index):
    """Where a real-valued pair index is on an axis."""
    return _shown(position_at(_ladder(kind), axis, index), axis)


def prepare(ax, axis: str, upright: bool = False, predicted: bool = True) -> None:
    """Scale and label of an axis (the y axis if upright), and on wavelength / L the predicted band."""
    which = "y" if upright else "x"
    getattr(ax, f"set_{which}label")(TITLES[axis])
    if axis != "index":
        getattr(ax, f"set_{which}scale")("log")
    if axis == "relative" and predicted:
        getattr(ax, f"ax{'h' if upright else 'v'}span")(1, 2, color="0.35", alpha=0.15, lw=0, zorder=0)


def mark(ax, curve: Curve, axis: str, index: float | None, row: int) -> None:
    """A triangle at a measured band, a row lower for each further curve."""
    if index is None or not math.isfinite(index):
        return
    x, y = float(place(curve.kind, axis, index)), 0.96 - 0.05 * row
    face = curve.color if curve.filled else "white"
    ax.plot(x, y, "v", color=curve.color, ms=4, mfc=face, mew=0.7, transform=ax.get_xaxis_transform())


def entries(found: list[Curve], **look) -> list:
    """Legend entries of the curves."""
    from matplotlib.lines import Line2D

    return [
        Line2D(
            [],
            [],
            color=curve.color,
            ls=curve.dashes,
            label=curve.label,
            mfc=curve.color if curve.filled else "white",
            **{"lw": 1.3} | look,
        )
        for curve in found
    ]


def band_entry(results):
    """Legend entry of the triangles."""
    from matplotlib.lines import Line2D

    how = "estimated" if results[0].attrs["analysis"] == "scan" else "measured"
    return Line2D([], [], color="0.35", lw=0, marker="v", ms=4, label=f"{how} i_band")


def predicted_entry():
    """Legend entry of the predicted band on wavelength / L."""
    from matplotlib.patches import Patch

    return Patch(facecolor="0.35", alpha=0.15, lw=0, label="predicted: one turn to half a turn in L")


def columns(found: list[Curve]) -> int:
    """Of the legend: as many as the names leave room for."""
    longest = max(len(curve.label) for curve in found)
    return max(1, min(len(found), 3, 110 // (longest + 8)))


def axis_words(axes) -> str:
    """What the axes are, for a caption."""
    words = {
        "index": "index of a pair over the number of pairs P, 0 the fastest",
        "wavelength": "wavelength, tokens per turn",
        "relative": "wavelength over L, the length in which the frequencies were formed",
    }
    return "; ".join(words[axis] for axis in axes)


def described(found: list[Curve]) -> str:
    """What each curve is, for a caption."""
    return "; ".join(
        f"{curve.label}: {style.count(len(curve.kind.rows), 'layer')}, {curve.kind.pairs} pairs, base "
        f"{base(curve.kind.base)}, L\xa0=\xa0{curve.kind.length:,}"
        for curve in found
    )


def texts(results) -> str:
    """What was read, for a caption; said once where it is the same."""
    if results[0].attrs["analysis"] == "scan":
        corpora = "; ".join(dict.fromkeys(str(ds.attrs["corpus"]) for ds in results))
        return f"Estimated from weights; layer 0 computed from the embeddings of {corpora}."
    found = dict.fromkeys(
        f"{ds.attrs['corpus']}, {style.count(int(ds.attrs['segments']), 'segment')} of {int(ds.attrs['length']):,} tokens"
        for ds in results
    )
    return f"Text: {'; '.join(found)}."
