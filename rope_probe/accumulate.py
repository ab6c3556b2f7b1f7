"""Statistics that can be merged: any split of the tokens into batches or processes gives the same sums."""

from __future__ import annotations

import numpy as np


class Moments:
    """Mean and variance of an array of quantities, merged exactly in float64.

    Uses the pairwise update of Chan, Golub and LeVeque (1979), which keeps its digits where the
    spread is small next to the mean.

    Parameters
    ----------
    shape : tuple of int
        Shape of the quantities; every cell has its own count.
    """

    def __init__(self, shape):
        self.count = np.zeros(shape)
        self.mean = np.zeros(shape)
        self.m2 = np.zeros(shape)

    def add(self, index, count, mean, m2) -> None:
        """Merge a block: `count` values with `mean` and sum of squared deviations `m2`, into cells `index`."""
        before, total = self.count[index], self.count[index] + count
        safe = np.where(total > 0, total, 1.0)
        delta = np.asarray(mean, dtype=np.float64) - self.mean[index]
        self.mean[index] += delta * (count / safe)
        self.m2[index] += m2 + delta**2 * (before * count / safe)
        self.count[index] = total

    def merge(self, other: Moments) -> None:
        """Take in everything another accumulator has seen."""
        self.add((), other.count, other.mean, other.m2)

    @property
    def std(self) -> np.ndarray:
        """Standard deviation over the values (population form); NaN where nothing was seen."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.sqrt(self.m2 / self.count)

    @property
    def average(self) -> np.ndarray:
        """Mean; NaN where nothing was seen."""
        return np.where(self.count > 0, self.mean, np.nan)


def mean_and_error(values, axis: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Mean and its standard error over independent repeats (segments).

    Parameters
    ----------
    values : array_like
        Entries that are NaN do not take part.
    axis : int
        Of the repeats.

    Returns
    -------
    (mean, error) : tuple of ndarray of float64
        Mean NaN where there is no value, error NaN where there are fewer than two.
    """
    values = np.asarray(values, dtype=np.float64)
    known = np.isfinite(values)
    count = known.sum(axis)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(known, values, 0).sum(axis) / count
        squares = np.where(known, values - np.expand_dims(mean, axis), 0) ** 2
        return mean, np.sqrt(squares.sum(axis) / (count - 1.0) / count)
