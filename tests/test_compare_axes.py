"""The three axes: where pairs are, how a band moves from one ladder to another, and what two profiles share."""

import numpy as np
import pytest

from rope_probe import theory
from rope_probe.probes.compare_axes import AXES, Ladder, overlap, position_at, positions, transfer


def ladder(base, pairs, length, still=0):
    inv_freq = theory.ladder(base, pairs)
    inv_freq[pairs - still :] = 0
    return Ladder(theory.wavelength(inv_freq), length)


ONE, OTHER = ladder(1e4, 32, 4096), ladder(1e6, 128, 32768)


def test_positions():
    np.testing.assert_allclose(positions(ONE, "index"), np.arange(32) / 32)
    np.testing.assert_allclose(positions(ONE, "wavelength"), np.log(2 * np.pi) + np.arange(32) / 32 * np.log(1e4))
    np.testing.assert_allclose(positions(ONE, "relative"), positions(ONE, "wavelength") - np.log(4096))
    standing = ladder(1e4, 32, 4096, still=8)
    for axis in AXES:
        np.testing.assert_allclose(positions(standing, axis), positions(ONE, axis)[:24])
        assert position_at(ONE, axis, 3.5) == pytest.approx(positions(ONE, axis)[3:5].mean())


@pytest.mark.parametrize("index", [0.0, 11.3, 24.2, 31.0])
def test_a_band_at_the_same_place(index):
    """By the closed form of the ladder: wavelength = 2π · base^(j / P)."""
    wave = 2 * np.pi * 1e4 ** (index / 32)
    assert transfer(index, ONE, OTHER, "index") == pytest.approx(index / 32 * 128)
    assert transfer(index, ONE, OTHER, "wavelength") == pytest.approx(128 * np.log(wave / (2 * np.pi)) / np.log(1e6))
    relative = 128 * np.log(wave * 32768 / 4096 / (2 * np.pi)) / np.log(1e6)
    assert transfer(index, ONE, OTHER, "relative") == pytest.approx(relative)  # also beyond the end of the ladder
    for axis in AXES:
        assert transfer(transfer(index, ONE, OTHER, axis), OTHER, ONE, axis) == pytest.approx(index)


def test_the_predicted_band_is_where_wavelength_over_length_says():
    """Every rule puts the band at one multiple of the length, whatever base, length and number of pairs."""
    for rule in theory.RULES:
        ours, theirs = (theory.predicted_pair(*what, rule=rule) for what in ((1e4, 4096, 32), (1e6, 32768, 128)))
        assert transfer(ours, ONE, OTHER, "relative") == pytest.approx(theirs)


@pytest.mark.parametrize("axis", AXES)
def test_overlap(axis):
    rng = np.random.default_rng(0)
    profile = rng.uniform(size=32)
    assert overlap(ONE, profile, ONE, 7 * profile, axis) == pytest.approx(1)
    assert overlap(ONE, np.ones(32), OTHER, np.ones(128), axis) == pytest.approx(1)  # even use is even everywhere
    early, late = np.zeros(32), np.zeros(32)
    early[:16], late[16:] = 1, 1
    assert overlap(ONE, early, ONE, late, axis) == 0
    other = rng.uniform(size=128)
    assert overlap(ONE, profile, OTHER, other, axis) == pytest.approx(overlap(OTHER, other, ONE, profile, axis))
    assert overlap(ONE, profile, OTHER, other, axis) == pytest.approx(
        by_sampling(ONE, profile, OTHER, other, axis), abs=2e-3
    )


def by_sampling(first, profile, second, other, axis, count=20_000):
    """The same area on a fine grid, the value of a point being that of the nearest pair."""
    sides = [(positions(ladder, axis), values) for ladder, values in ((first, profile), (second, other))]
    half = [np.diff(x)[0] / 2 for x, _ in sides]
    low = max(x[0] - h for (x, _), h in zip(sides, half, strict=True))
    high = min(x[-1] + h for (x, _), h in zip(sides, half, strict=True))
    grid = low + (np.arange(count) + 0.5) / count * (high - low)
    found = [values[np.abs(grid[:, None] - x).argmin(1)] for x, values in sides]
    return np.minimum(*(values / values.sum() for values in found)).sum()


def test_nothing_in_common_is_not_a_number():
    far = Ladder(ONE.wavelength * 1e6, 4096)
    assert np.isnan(overlap(ONE, np.ones(32), far, np.ones(32), "wavelength"))
    assert overlap(ONE, np.ones(32), far, np.ones(32), "index") == pytest.approx(1)
    assert np.isnan(overlap(ONE, np.zeros(32), ONE, np.ones(32), "index"))
    lone = Ladder(np.array([6.28, np.inf]), 64)
    assert np.isnan(overlap(ONE, np.ones(32), lone, np.ones(2), "index"))
    assert np.isnan(transfer(3.0, lone, ONE, "index"))
