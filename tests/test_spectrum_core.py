"""The numbers of spectrum on arrays: against sums written out, and on signals whose answer is known."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rope_probe.probes import spectrum_core as core
from rope_probe.probes.spectrum import _Profiles
from rope_probe.rotary import RotaryLayer
from rope_probe.tap import Call

BINS = 5  # a band of ±2.5 bins around a bin


def direct(q, k, distances):
    """Σ_m Re(q[m] conj k[m − Δ]) in float64, one distance after the other, from pairs as complex numbers."""
    q, k = ((x[0].double() + 1j * x[1].double()).numpy() for x in (q, k))
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    length = q.shape[2]
    return np.stack(
        [(q[:, :, lag:] * k[:, :, : length - lag].conj()).real.sum(axis=(0, 2)) for lag in range(distances)], axis=-1
    )


def random_pairs(seed, batch, heads, kv_heads, length, pairs, offset=0.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def draw(count):
        shape = (batch, count, length, pairs)
        return [(torch.randn(shape, generator=generator) + offset).to(dtype) for _ in range(2)]

    return draw(heads), draw(kv_heads)


@pytest.mark.parametrize(
    ("length", "distances"), [(64, 32), (64, 64), (61, 47), (97, 96), (128, 1)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_fft_equals_direct_sums(length, distances, kv_heads):
    q, k = random_pairs(0, 2, 6, kv_heads, length, 5, offset=0.3)
    expected = direct(q, k, distances)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-13)):
        found = core.lag_sums([x.to(dtype) for x in q], [x.to(dtype) for x in k], distances)
        assert found.shape == (6, 5, distances) and found.dtype == dtype
        assert np.abs(found.numpy() - expected).max() <= tolerance * np.abs(expected).max()
        total = core.lag_sums([x.to(dtype) for x in q], [x.to(dtype) for x in k], distances, total=True)
        assert np.abs(total.numpy() - expected.sum(1)).max() <= tolerance * np.abs(expected.sum(1)).max()


@pytest.mark.parametrize(("length", "kv_heads"), [(2048, 2), (2048, 8), (512, 8), (4096, 1)])
def test_heads_in_blocks_give_the_same(length, kv_heads):
    """Blocks of part of a key head's queries, of one key head, of several."""
    q, k = random_pairs(1, 1, 16, kv_heads, length, 64)
    whole = core.lag_sums(q, k, length // 2)
    for head in (0, 4, 5, 7, 8, 15):
        alone = [x[:, head, None] for x in q], [x[:, head * kv_heads // 16, None] for x in k]
        torch.testing.assert_close(whole[head, None], core.lag_sums(*alone, length // 2), rtol=1e-4, atol=1e-3)


def test_half_precision_is_summed_in_float32():
    q, k = random_pairs(2, 1, 2, 1, 64, 3, dtype=torch.bfloat16)
    expected = direct(q, k, 32)
    assert np.abs(core.lag_sums(q, k, 32).numpy() - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("signal", ["noise", "offset", "tone"])
def test_precision_at_32k_tokens(signal):
    length, distances = 32768, 16384
    q, k = random_pairs(3, 1, 2, 1, length, 2, offset=3.0 if signal == "offset" else 0.0)
    if signal == "tone":
        angle = torch.arange(length, dtype=torch.float64)[:, None] * torch.tensor([0.7, 1e-4], dtype=torch.float64)
        for pair in (q, k):
            pair[0], pair[1] = (
                (5 * torch.cos(angle) + pair[0].double()).float(),
                (5 * torch.sin(angle) + pair[1].double()).float(),
            )
    found = core.lag_sums(q, k, distances).numpy()
    lags = np.unique(np.linspace(0, distances - 1, 60).astype(int))
    a, b = ((x[0].double() + 1j * x[1].double()).numpy()[0] for x in (q, k))
    expected = np.stack([(a[:, lag:] * b[:, : length - lag].conj()).real.sum(1) for lag in lags], axis=-1)
    peak = np.abs(expected).max(-1, keepdims=True)
    assert (np.abs(found[..., lags] - expected) / peak).max() <= 1e-4


def test_first_key_is_left_out_and_nothing_is_written_into_the_model():
    q, k = random_pairs(4, 1, 2, 1, 32, 1)
    before = k[0].clone()
    parts = [core.without_first(x) for x in k]
    assert torch.equal(k[0], before)
    found = core.lag_sums(q, parts, 31).numpy()
    for lag in range(31):
        terms = [q[i][0, :, m, 0] * k[i][0, 0, m - lag, 0] for i in (0, 1) for m in range(lag + 1, 32)]
        np.testing.assert_allclose(found[:, 0, lag], torch.stack(terms).sum(0), rtol=1e-4, atol=1e-4)
    core.lag_sums(q, k, 31)
    assert torch.equal(k[0], before)


@pytest.mark.parametrize(("length", "chunk"), [(13, 5), (12, 4), (7, 8), (20, 6)])
def test_chunks_see_only_themselves(length, chunk):
    q, k = random_pairs(5, 2, 2, 2, length, 1)
    distances = min(chunk, length - 1)
    k = [core.without_first(x) for x in k]
    folded = [[core.fold(x, chunk) for x in pair] for pair in (q, k)]
    found = core.lag_sums(*folded, distances).numpy()
    counts = core.counts(length, distances, chunk)
    for lag in range(distances):
        seen = [(m, m - lag) for m in range(length) for n in (m - lag,) if n >= 1 and m // chunk == n // chunk]
        assert counts[lag] == len(seen)
        expected = sum((q[i][:, :, m, 0] * k[i][:, :, n, 0]).sum(0) for i in (0, 1) for m, n in seen)
        np.testing.assert_allclose(found[:, 0, lag], expected, rtol=1e-4, atol=1e-4)


def test_counts_of_a_plain_causal_layer():
    assert core.counts(6, 6).tolist() == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(("first", "rows", "distances"), [(0, 7, 5), (3, 4, 7), (6, 1, 3)])
def test_diagonal_sums(first, rows, distances):
    weights = torch.rand(2, rows, 7)
    found = core.diagonal_sums(weights, first, distances)
    for lag in range(distances):
        terms = [weights[:, row, first + row - lag] for row in range(rows) if 0 <= first + row - lag < 7]
        torch.testing.assert_close(found[:, lag], sum(terms) if terms else torch.zeros(2))


# -- spectra ---------------------------------------------------------------------------------------


def tone(frequency, distances, phase=0.4):
    return np.cos(frequency * np.arange(distances) + phase)


@pytest.mark.parametrize("distances", [16, 17, 64])
def test_power_spectrum_is_the_windowed_dft_without_the_mean(distances):
    profile = np.random.default_rng(0).normal(2, 1, (3, distances))
    found = core.power_spectrum(profile)
    assert found.shape == (3, distances // 2 + 1)
    lag = np.arange(distances)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * lag / (distances - 1))
    for k in range(distances // 2 + 1):
        wave = np.exp(-2j * np.pi * k * lag / distances)
        expected = np.abs(((profile - profile.mean(1, keepdims=True)) * hann * wave).sum(1)) ** 2
        np.testing.assert_allclose(found[:, k], expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(core.frequencies(distances)[:3], 2 * np.pi * np.arange(3) / distances)


@pytest.mark.parametrize(
    ("turns", "least"),
    [(2, 0.9999), (2.3, 0.999), (2.51, 0.97), (3, 0.9999), (7.5, 0.996), (20, 0.9999), (81.6, 0.9995)],
)
def test_a_pure_tone_keeps_its_power_near_itself(turns, least):
    """But for what the mean leaves at frequency 0 when the last turn is not whole."""
    frequency = 2 * np.pi * turns / 512
    limit = core.tone_share(frequency, 512)
    assert least < limit <= 1
    spectra = [core.power_spectrum(tone(frequency, 512, phase)) for phase in (0.3, 0.3 + np.pi / 2)]
    assert core.share_near(sum(spectra), core.near(frequency, 512)) == pytest.approx(limit, abs=1e-6)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_two_tones_have_their_known_shares(share):
    first, second = 2 * np.pi * 20 / 512, 2 * np.pi * 50 / 512
    mixed = np.sqrt(share) * tone(first, 512) + np.sqrt(1 - share) * tone(second, 512, 1.9)
    power = core.power_spectrum(mixed)
    assert core.share_near(power, core.near(first, 512)) == pytest.approx(share, abs=1e-4)
    assert core.share_near(power, core.near(second, 512)) == pytest.approx(1 - share, abs=1e-4)


def test_white_noise_has_the_share_of_the_bins():
    noise = np.random.default_rng(1).normal(size=(4000, 128))
    power = core.power_spectrum(noise)
    bins = core.near(2 * np.pi * 30 / 128, 128)
    assert bins.sum() == BINS
    # the ends weigh half in the mean: the window spreads a real signal over 64 bins' worth of power
    assert core.share_near(power, bins).mean() == pytest.approx(BINS / 64, rel=0.02)


def test_no_power_is_nan_and_rounding_is_no_power():
    flat = np.full((2, 64), 3.7)
    flat[1] += 1e-7 * np.random.default_rng(2).normal(size=64)
    power = core.power_spectrum(flat)
    assert (power == 0).all()
    assert np.isnan(core.share_near(power, core.near(0.5, 64))).all()
    assert np.isnan(core.tone_r2(flat[:, None], np.array([0.5]))).all()


def test_tone_r2_is_that_of_least_squares():
    rng = np.random.default_rng(3)
    frequency = np.array([1.0, 0.05, 1e-3, 1e-5, 0.0])
    profile = rng.normal(size=(3, 5, 128)).cumsum(-1)
    found = core.tone_r2(profile, frequency)
    assert np.isnan(found[:, 4]).all()
    for pair in (0, 1, 2):
        angle = frequency[pair] * np.arange(128)
        design = np.stack([np.ones(128), np.cos(angle), np.sin(angle)], -1)
        for head in range(3):
            y = profile[head, pair]
            residual = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
            assert found[head, pair] == pytest.approx(1 - (residual**2).sum() / ((y - y.mean()) ** 2).sum(), abs=1e-6)
    line = np.stack([np.ones(128), np.arange(128.0), np.arange(128.0) ** 2], -1)  # what a very slow tone can follow
    for head in range(3):
        y = profile[head, 3]
        residual = y - line @ np.linalg.lstsq(line, y, rcond=None)[0]
        assert found[head, 3] == pytest.approx(1 - (residual**2).sum() / ((y - y.mean()) ** 2).sum(), abs=1e-4)


@pytest.mark.parametrize("frequency", [1.0, 0.03, 1e-3, 1e-5, 1e-7])
def test_tone_r2_of_a_tone_is_one_however_slow(frequency):
    angle = frequency * np.arange(256)
    slow = 3 + 2 * np.sin(angle) - 4 * np.sin(angle / 2) ** 2
    if core.power_spectrum(slow).any():
        assert core.tone_r2(slow[None, None], np.array([frequency]))[0, 0] == pytest.approx(1, abs=1e-5)
    else:
        assert frequency < 1e-6


# -- errors ----------------------------------------------------------------------------------------


def test_jackknife_of_a_mean_is_its_standard_error():
    values = np.random.default_rng(4).normal(size=(4, 3))
    mean, limit, error = core.errors(values * 5, np.full(4, 5.0), lambda mean: mean)
    np.testing.assert_allclose(mean, values.mean(0))
    np.testing.assert_allclose(limit, values.mean(0))
    np.testing.assert_allclose(error, values.std(0, ddof=1) / 2)
    assert np.isnan(core.errors(values[:1], np.ones(1), lambda mean: mean)[1:]).all()


def test_jackknife_allows_for_groups_that_are_not_full():
    members = np.array([4.0, 4, 2, 0])  # a run that was interrupted
    draws = np.random.default_rng(5).normal(size=(3000, 10))
    sums = np.stack([draws[:, :4].sum(1), draws[:, 4:8].sum(1), draws[:, 8:].sum(1), 0 * draws[:, 0]])
    mean, _, error = core.errors(sums, members, lambda mean: mean)
    np.testing.assert_allclose(mean, draws.mean(1))
    assert (error**2).mean() == pytest.approx(0.1, rel=0.05)


def test_limit_takes_off_what_falls_with_the_segments():
    """A tone in noise: the impurity of the mean is that of the tone plus a part in 1 / segments."""
    frequency, members = 2 * np.pi * 16 / 256, np.full(4, 4.0)
    rng = np.random.default_rng(6)
    found = []
    for _ in range(200):
        sums = 4 * tone(frequency, 256) + 0.7 * rng.normal(size=(4, 4, 256)).sum(axis=1)
        found.append(
            core.errors(
                sums, members, lambda mean: 1 - core.share_near(core.power_spectrum(mean), core.near(frequency, 256))
            )
        )
    whole, limit, error = np.array(found).T
    assert whole.mean() > 0.04
    assert abs(limit.mean()) < 0.004  # the tone itself is pure
    assert 1 < error.mean() / whole.std() < 1.8  # where noise is all there is, the error is on the safe side


@pytest.mark.parametrize("segments", [1, 3, 4, 10])
def test_runs_cover_every_batch_in_order(segments):
    whole = [core.group_of(segment, segments) for segment in range(segments)]
    assert whole == sorted(whole) and len(set(whole)) == min(core.GROUPS, segments)
    for batch in (1, 2, 3, 10):
        found = []
        for start in range(0, segments, batch):
            for group, part in core.runs(start, min(start + batch, segments), segments):
                found += [group] * len(range(batch)[part])
        assert found == whole


# -- memory ----------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Keeps the number of bytes of the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, torch.Tensor):
                self.bytes = max(self.bytes, value.nbytes)
        return out


def plain_layer(inv_freq, heads):
    """A layer that rotates all of its channels, with one key head."""
    width = 2 * len(inv_freq)
    sizes = {"head_dim": width, "rotary_dim": width, "offset": 0, "heads": heads, "kv_heads": 1}
    rest = {"layer": 0, "layer_type": "full_attention", "rotates": True, "base": 1e4, "rope_type": "default"}
    rest |= {"parameters": {}, "attention_scaling": 1.0, "layout": "half", "layout_rotated": "half"}
    return RotaryLayer(inv_freq=inv_freq, window=0, length=64, **sizes, **rest)


@pytest.mark.parametrize("weigh", [False, True])
def test_no_map_of_tokens_by_tokens_is_made(weigh):
    length, distances, pairs = 8192, 4096, 4
    layer = plain_layer(10.0 ** -np.arange(pairs), heads=2)
    q = torch.randn(1, 2, length, 8)
    seen = _Profiles([layer], distances, length, 1, weigh)
    seen.begin(0, 1)
    with Largest() as largest:
        seen(Call(0, q, q[:, :1], q[:, :1], None, 0.3, None, None, None))
    square = 2 * length * length * 4
    assert largest.bytes <= (square / 8 if weigh else 8 * 2 * pairs * (length + distances) * 4)


def test_sums_do_not_grow_with_the_segments():
    size = {}
    for segments in (4, 64):
        seen = _Profiles([plain_layer(np.ones(2), heads=1)], 8, 16, segments, False)
        for start in range(segments):
            seen.begin(start, start + 1)
            q = torch.randn(1, 1, 16, 4)
            seen(Call(0, q, q, q, None, 0.5, None, None, None))
            seen.merge(seen.blocks(), start, start + 1)
        size[segments] = sum(value.nbytes for value in seen.sums.values())
        assert seen.members(segments).sum() == segments
    assert size[4] == size[64]
