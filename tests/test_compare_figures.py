"""Figures of compare: what they draw is what the files hold."""

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from conftest import lines_of

import rope_probe as rp
from rope_probe.errors import ProbeError
from rope_probe.plots import compare as plot
from rope_probe.plots import compare_curves as curves
from rope_probe.plots.compare_heads import by_distance
from rope_probe.probes.heads_summary import ROLES

matplotlib.use("agg")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@pytest.fixture
def pair(compared):
    return lambda analysis: compared[analysis][:2]


def test_bands_figure_shows_the_profiles(compared):
    one, _, gemma = compared["bands"]
    axes = plot([one, gemma])
    assert [ax.get_title(loc="left") for ax in axes] == ["by index / P", "by wavelength", "by wavelength / L"]
    rows = np.flatnonzero(gemma["layer_type"].values == "sliding_attention")
    usage = gemma["usage"].values[rows].reshape(-1, 8)
    profile = (usage / usage.mean(1, keepdims=True)).mean(0)
    waves = gemma["wavelength"].values[rows[0]]
    length = gemma["formation_length"].values[rows[0]]
    for ax, x in zip(axes, (np.arange(8) / 8, waves, waves / length), strict=True):
        line = lines_of(ax)["gemma, sliding layers"]
        np.testing.assert_allclose(line.get_xdata(), x)
        np.testing.assert_allclose(line.get_ydata(), profile)
        assert ax.get_xscale() == ("linear" if ax is axes[0] else "log")
    marks = [line for line in axes[0].lines if line.get_marker() == "v"]
    i_bands = [
        rp.summary(one)["i_band_usage"],
        *(kind["i_band_usage"] for kind in rp.summary(gemma)["by_layer_type"].values()),
    ]
    np.testing.assert_allclose([line.get_xdata()[0] for line in marks], np.array(i_bands) / 8)
    keys = plot([one, gemma], axis="index")
    assert [ax.get_title(loc="left").split()[0] for ax in keys] == ["queries", "keys", "usage"]


def test_truncate_figure_shows_the_cuts(pair):
    results = pair("truncate")
    axes = plot(results)
    keep = results[1]["kind"].values == "keep"
    excess = 100 * (results[1]["ratio"].values[keep] - 1)
    line = lines_of(axes[0])["two"]
    np.testing.assert_allclose(line.get_xdata(), [0, 0.5, 0.75, 1])
    np.testing.assert_allclose(line.get_ydata(), excess[::-1])
    waves = results[1]["wavelength"].values[0]
    np.testing.assert_allclose(lines_of(axes[1])["two"].get_xdata(), waves[[0, 4, 6]])  # keep 1 stops no pair
    knockouts = [ds.isel(setting=np.flatnonzero(ds["kind"].values == "remove")) for ds in results]
    line = lines_of(plot(knockouts, axis="index")[0])["two"]
    added = (results[1]["nll"] - results[1]["nll_intact"]).values[~keep].mean(1)
    np.testing.assert_allclose(line.get_ydata(), added)
    with pytest.raises(ProbeError, match="no kind of setting in common"):
        plot([knockouts[0], results[1].isel(setting=np.flatnonzero(keep))])


def test_spectrum_figure(pair):
    results = pair("spectrum")
    axes = plot(results, axis="index")
    line = lines_of(axes[1])["two"]
    ratio = (results[1]["purity"] / results[1]["purity_tone"]).values.reshape(-1, 8)
    resolved = results[1]["resolvable"].values[0]
    np.testing.assert_allclose(line.get_ydata(), np.maximum(1 - np.nanmedian(ratio, axis=0)[resolved], 1e-4))
    damage = axes[0].containers[1].lines[0]
    np.testing.assert_allclose(damage.get_ydata(), 100 * results[1]["damage"].values)
    np.testing.assert_allclose(damage.get_xdata(), [0, 0.5, 1])


def test_heads_figure(pair):
    results = pair("heads")
    axes = plot(results)
    heights = [patch.get_height() for patch in axes[0].containers[1]]
    np.testing.assert_allclose(heights, [(results[1]["role"] == role).values.mean() for role in ROLES])
    np.testing.assert_allclose(axes[2].lines[1].get_ydata(), by_distance(results[1]))
    np.testing.assert_allclose(
        by_distance(results[1]), results[1]["weight_by_distance"].mean(("layer", "head")), rtol=1e-5
    )
    spot = next(line for line in axes[3].lines if line.get_marker() == "o" and line.get_ydata()[0] == 1)
    np.testing.assert_allclose(spot.get_xdata(), results[1]["usage"].argmax("pair").values.mean() / 8)


def test_trajectory_figure(compared):
    results = compared["trajectory"]
    axes = plot(results, names=["up", "down"])
    i_bands = [rp.summary(ds)["i_band_usage"] for ds in compared["bands"][:2]]
    np.testing.assert_allclose(lines_of(axes[0])["up"].get_ydata(), np.array(i_bands) / 8)
    kind = curves.curves(results, ["up", "down"])[0].kind
    waves = np.exp(np.interp(i_bands, np.arange(8), np.log(kind.wavelength)))
    np.testing.assert_allclose(lines_of(axes[1])["up"].get_ydata(), waves)
    np.testing.assert_allclose(lines_of(axes[2])["up"].get_ydata(), waves / kind.length)
