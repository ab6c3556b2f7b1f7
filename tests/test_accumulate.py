"""Moments: any split of the values merges to the same numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rope_probe.accumulate import Moments

CELLS = (2, 3)
values = arrays(
    np.float64, st.tuples(st.integers(1, 30), *map(st.just, CELLS)), elements=st.floats(-1e6, 1e6, width=32)
)


def block(x):
    """Count, mean and sum of squared deviations of some values, by cell."""
    return len(x), x.mean(0), ((x - x.mean(0)) ** 2).sum(0)


def pieces(x, cuts):
    return [part for part in np.split(x, sorted(cut % len(x) for cut in cuts)) if len(part)]


def close(a, b, x):
    """Equal to the rounding of float64 sums over values of this size."""
    np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * np.abs(x).max())


@settings(max_examples=80, deadline=None)
@given(x=values, cuts=st.lists(st.integers(0, 29), max_size=6))
def test_blocks_in_any_split_give_numpys_numbers(x, cuts):
    moments = Moments(CELLS)
    for part in pieces(x, cuts):
        moments.add((), *block(part))
    assert (moments.count == len(x)).all()
    close(moments.average, x.mean(0), x)
    close(moments.std, x.std(0), x)


@settings(max_examples=80, deadline=None)
@given(x=values, cuts=st.lists(st.integers(0, 29), max_size=6), order=st.randoms(use_true_random=False))
def test_accumulators_merge_in_any_order(x, cuts, order):
    parts = pieces(x, cuts)
    order.shuffle(parts)
    whole = Moments(CELLS)
    for part in parts:
        one = Moments(CELLS)
        one.add((), *block(part))
        whole.merge(one)
    close(whole.average, x.mean(0), x)
    close(whole.std, x.std(0), x)


@settings(max_examples=40, deadline=None)
@given(x=values)
def test_one_value_at_a_time(x):
    moments = Moments(CELLS)
    for value in x:
        moments.add((), 1, value, 0.0)
    close(moments.average, x.mean(0), x)
    close(moments.std, x.std(0), x)


def test_a_small_spread_on_a_large_mean_keeps_its_digits():
    x = 1e8 + np.random.default_rng(0).normal(size=(4000, *CELLS))
    moments = Moments(CELLS)
    for part in np.split(x, 40):
        moments.add((), *block(part))
    np.testing.assert_allclose(moments.std, x.std(0), rtol=1e-8)


def test_cells_count_for_themselves():
    x = np.random.default_rng(1).normal(size=(7, 3))
    moments = Moments((2, 4))
    moments.add((0, slice(3)), *block(x))
    moments.add((0, slice(2)), *block(x[:2, :2]))
    np.testing.assert_array_equal(moments.count, [[9, 9, 7, 0], [0, 0, 0, 0]])
    both = np.concatenate([x[:, :2], x[:2, :2]])
    np.testing.assert_allclose(moments.average[0, :2], both.mean(0))
    np.testing.assert_allclose(moments.std[0, :2], both.std(0))
    assert np.isnan(moments.average[1]).all() and np.isnan(moments.average[0, 3])
    assert np.isnan(moments.std[1]).all()


def test_merging_nothing_changes_nothing():
    moments = Moments((3,))
    moments.add((), 4, np.array([1.0, 2.0, 3.0]), np.array([0.5, 0.0, 2.0]))
    before = moments.average.copy(), moments.std.copy()
    moments.merge(Moments((3,)))
    np.testing.assert_array_equal(moments.average, before[0])
    np.testing.assert_array_equal(moments.std, before[1])
    empty = Moments((3,))
    empty.merge(moments)
    np.testing.assert_allclose(empty.average, before[0])
    np.testing.assert_allclose(empty.std, before[1])


@pytest.mark.parametrize("count", [1, 5])
def test_the_spread_of_equal_values_is_zero(count):
    moments = Moments(())
    for _ in range(count):
        moments.add((), 1, 0.1, 0.0)
    assert moments.std == pytest.approx(0, abs=1e-17) and moments.average == pytest.approx(0.1)
