"""Three axes on which pairs of different models can be laid side by side, and how far two bands agree on each.

A pair is at index / P, at its wavelength, or at its wavelength as a multiple of the length its frequencies were formed
in.  On the last two, positions are natural logarithms, as wavelengths grow by a constant factor from pair to pair.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

AXES = {"index": "index / P", "wavelength": "wavelength", "relative": "wavelength / L"}


class Ladder(NamedTuple):
    """The rotary pairs of one kind of layer.

    Attributes
    ----------
    wavelength : ndarray, shape (pairs,)
        Tokens per turn, infinite where a pair does not turn.
    length : float
        Length in which the frequencies were formed, tokens.
    """

    wavelength: np.ndarray
    length: float

    @property
    def turning(self) -> np.ndarray:
        """Indices of the pairs that turn."""
        return np.flatnonzero(np.isfinite(self.wavelength))


def positions(ladder: Ladder, axis: str) -> np.ndarray:
    """Where the pairs that turn are on an axis, shape (turning pairs,), increasing."""
    if axis == "index":
        return ladder.turning / len(ladder.wavelength)
    waves = np.log(ladder.wavelength[ladder.turning])
    return waves - np.log(ladder.length) if axis == "relative" else waves


def position_at(ladder: Ladder, axis: str, index) -> np.ndarray:
    """Where a real-valued pair index is on an axis; beyond the ladder, the step of its last two pairs goes on."""
    return _line(index, ladder.turning, positions(ladder, axis))


def transfer(index, source: Ladder, target: Ladder, axis: str) -> np.ndarray:
    """The pair of another ladder that stands where a pair of this one does: real-valued, possibly off the ladder."""
    return _line(position_at(source, axis, index), positions(target, axis), target.turning)


def _line(x, known_x: np.ndarray, known_y: np.ndarray) -> np.ndarray:
    """Linear interpolation, carried on beyond both ends; NaN where fewer than two points are known."""
    x = np.asarray(x, dtype=float)
    if len(known_x) < 2:
        return np.full(x.shape, np.nan)
    left = np.clip(np.searchsorted(known_x, x) - 1, 0, len(known_x) - 2)
    with np.errstate(divide="ignore", invalid="ignore"):  # two pairs at the same wavelength
        slope = (known_y[left + 1] - known_y[left]) / (known_x[left + 1] - known_x[left])
        return known_y[left] + slope * (x - known_x[left])


def overlap(first: Ladder, profile, second: Ladder, other, axis: str) -> float:
    """Area that two profiles share on an axis, each scaled to area 1 over the range that both ladders cover.

    Every pair holds its value from half-way to the pair before to half-way to the pair after.

    Parameters
    ----------
    first, second : Ladder
    profile, other : array_like, shape (pairs,)
        Not negative.

    Returns
    -------
    float
        1: the same shape at the same place; two even profiles have it on every axis.  0: no place in common.  NaN
        where the ladders have no range in common, or a profile nothing in it.
    """
    sides = []
    for ladder, values in ((first, profile), (second, other)):
        if len(ladder.turning) < 2:
            return np.nan
        sides.append((_edges(positions(ladder, axis)), np.asarray(values, dtype=float)[ladder.turning]))
    low, high = max(edges[0] for edges, _ in sides), min(edges[-1] for edges, _ in sides)
    cuts = np.concatenate([edges for edges, _ in sides])
    grid = np.unique([low, high, *cuts[(cuts > low) & (cuts < high)]])
    if high <= low:
        return np.nan
    width, middle = np.diff(grid), (grid[1:] + grid[:-1]) / 2
    shares = [values[np.searchsorted(edges, middle) - 1] * width for edges, values in sides]
    if not all(np.sum(share) > 0 for share in shares):
        return np.nan
    return float(np.minimum(*(share / share.sum() for share in shares)).sum())


def _edges(x: np.ndarray) -> np.ndarray:
    """Half-way between neighbors, and as far beyond both ends as before them."""
    middle = (x[1:] + x[:-1]) / 2
    return np.concatenate([[2 * x[0] - middle[0]], middle, [2 * x[-1] - middle[-1]]])
