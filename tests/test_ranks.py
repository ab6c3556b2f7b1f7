"""Ranks and correlations of many rows, against scipy, row by row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from rope_probe.probes.ranks import average_ranks, spearman

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])


def reference(x, y):
    """scipy's correlation; NaN without its warning where it has none."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return np.nan
    return stats.spearmanr(x, y).statistic


def assert_rows_equal(x, y, seen, dtype):
    """x [row, n], y [head, row, n], seen [row, n] or None: both functions equal scipy on every row."""
    x, y = torch.as_tensor(x).to(dtype), torch.as_tensor(y).to(dtype)
    mask = None if seen is None else torch.as_tensor(seen)
    ranks, rho = average_ranks(x, mask), spearman(x, y, mask)
    assert ranks.dtype == rho.dtype == torch.float64 and rho.shape == y.shape[:2]
    for row in range(len(x)):
        keep = np.ones(x.shape[-1], dtype=bool) if seen is None else seen[row]
        a = x[row].double().numpy()[keep]
        np.testing.assert_array_equal(ranks[row][keep], stats.rankdata(a))
        assert not ranks[row][~keep].any()
        for head in range(len(y)):
            b = y[head, row].double().numpy()[keep]
            np.testing.assert_allclose(rho[head, row], reference(a, b), rtol=0, atol=1e-12)


few_values = st.sampled_from([-3.0, -1.5, -0.0, 0.0, 0.25, 1.0, 1e-40, 3e38, -3e38])  # ties, zeros, extremes
any_float = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def rows(draw):
    """x [row, n], y [head, row, n] and which entries take part."""
    heads, count, size = draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 12)))
    elements = draw(st.sampled_from([few_values, any_float]))
    x = draw(hnp.arrays(np.float32, (count, size), elements=elements))
    y = draw(hnp.arrays(np.float32, (heads, count, size), elements=elements))
    seen = draw(st.none() | hnp.arrays(bool, (count, size)))
    return x, y, seen


@given(rows())
@settings(max_examples=150, deadline=None)
def test_rows_equal_scipy(case):
    x, y, seen = case
    assert_rows_equal(x, y, seen, torch.float32)
    assert_rows_equal(x, y, seen, torch.float64)


@FLOATS
@pytest.mark.parametrize("levels", [2, 5, 40, 10**6])
def test_long_rows_with_ties(dtype, levels):
    generator = np.random.default_rng(levels)
    x = generator.integers(0, levels, (3, 700)) / 7 - 1
    y = generator.integers(0, levels, (4, 3, 700)) / 3 - 1
    assert_rows_equal(x, y, None, dtype)
    assert_rows_equal(x, y, generator.random((3, 700)) < 0.7, dtype)


def test_more_rows_than_are_taken_at_a_time():
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(16, 800)), generator.normal(size=(9, 16, 800))
    y[2, :, ::5] = 0.5
    assert y.size > 3 * 2**15
    assert_rows_equal(x, y, np.arange(800) < np.arange(100, 900, 50)[:, None], torch.float32)


def test_constructed_ties():
    """Values worked out by hand."""
    x = torch.tensor([1.0, 1.0, 2.0, 3.0])
    np.testing.assert_array_equal(average_ranks(x), [1.5, 1.5, 3, 4])
    # ranks (1.5, 1.5, 3, 4) and (1, 2, 3, 4): covariance 4.5, spreads 4.5 and 5
    expected = 4.5 / np.sqrt(4.5 * 5)
    for dtype in (torch.float32, torch.float64):
        assert abs(float(spearman(x.to(dtype), torch.arange(4).to(dtype))) - expected) < 1e-15
    # two against two: (1.5, 1.5, 3.5, 3.5) and (1.5, 3.5, 1.5, 3.5) have covariance 0
    assert float(spearman(torch.tensor([0.0, 0, 1, 1]), torch.tensor([0.0, 1, 0, 1]))) == 0
    assert float(spearman(x, x)) == 1 and float(spearman(x, -x)) == -1


def test_zero_and_minus_zero_are_equal():
    np.testing.assert_array_equal(average_ranks(torch.tensor([0.0, -0.0, -1.0])), [2.5, 2.5, 1])


def test_neighbouring_floats_are_told_apart():
    one = np.float32(1)
    x = torch.tensor([np.nextafter(one, np.float32(2)), one, np.nextafter(one, np.float32(0))])
    np.testing.assert_array_equal(average_ranks(x), [3, 2, 1])
    small = torch.tensor([2.8e-45, 1.4e-45, -1.4e-45, 0.0])  # the smallest there are
    np.testing.assert_array_equal(average_ranks(small), [4, 3, 1, 2])


def test_constant_sides_have_no_correlation():
    x, y = torch.tensor([[1.0, 1, 1], [1, 2, 3]]), torch.tensor([[1.0, 2, 3], [2, 2, 2]])
    assert torch.isnan(spearman(x, y)).all()
    seen = torch.tensor([[True, False, False], [False, False, False]])
    assert torch.isnan(spearman(y, x, seen)).all()


def test_inputs_stay_as_they_were():
    x, y = torch.randn(4, 50), torch.randn(3, 4, 50)
    seen = torch.rand(4, 50) < 0.8
    before = x.clone(), y.clone(), seen.clone()
    spearman(x, y, seen)
    average_ranks(x, seen)
    assert torch.equal(x, before[0]) and torch.equal(y, before[1]) and torch.equal(seen, before[2])


def test_sums_stay_exact_for_long_rows():
    """A perfect order of 20,000 entries correlates at exactly 1, and one swap is seen."""
    x = torch.arange(20000.0)
    y = x.clone()
    assert float(spearman(x, y)) == 1
    y[:2] = y[:2].flip(0)
    n = 20000.0
    assert float(spearman(x, y)) == pytest.approx(1 - 6 * 2 / (n * (n**2 - 1)), abs=1e-15)
    assert float(spearman(x, y)) < 1
