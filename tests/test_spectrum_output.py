"""spectrum on the command line, in its table, and in its figures."""

import json

import numpy as np
import pytest
from families import NAMED, token_ids

import rope_probe as rp
from rope_probe.cli.tables.spectrum import render, sentences
from rope_probe.plots import FIGURES, save_figure
from rope_probe.plots.spectrum_profile import head_damage, typical_heads
from rope_probe.plots.spectrum_purity import over_heads
from rope_probe.probes.spectrum_summary import injections

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def two_kinds():
    """A tiny Gemma 3: sliding and full layers, one tone injected, with and without the MLP."""
    ids = token_ids(60, 4).numpy()
    return rp.spectrum(
        rp.open(NAMED["Gemma 3 text"].build()), tokens=ids, inject=[0, 1, 3], ablate=["mlp", "attention"]
    )


@pytest.fixture(scope="module")
def resting():
    """A tiny SmolLM3, whose last layer does not rotate, without injection."""
    return rp.spectrum(rp.open(NAMED["SmolLM3"].build()), tokens=token_ids(60, 4).numpy())


@pytest.fixture(scope="module")
def one_segment():
    return rp.spectrum(rp.open(NAMED["Llama 3"].build()), tokens=token_ids(60, 1).numpy(), inject=[0])


# -- summary ---------------------------------------------------------------------------------------


def test_summary_follows_its_definitions(two_kinds):
    groups = rp.summary(two_kinds)["by_layer_type"]
    assert list(groups) == ["sliding_attention", "full_attention"]
    assert groups["sliding_attention"]["layers"] == [0, 1] and groups["full_attention"]["layers"] == [2]
    assert groups["sliding_attention"]["resolvable"] == []  # a window of 8 holds no two turns
    full = groups["full_attention"]
    assert full["distances"] == 30 and full["resolvable"] == [0]
    relative = np.median(two_kinds["purity"].values[2], axis=0) / two_kinds["purity_tone"].values[2]
    assert full["pure"] == ([0] if relative[0] >= 0.98 else [])
    assert full["onset"] == (None if relative[0] >= 0.98 else 0)
    assert full["damage"] == pytest.approx(float(two_kinds["damage"][2]))
    assert full["damage_se"] == pytest.approx(float(two_kinds["damage_se"][2]))
    fit = np.median(two_kinds["tone_r2"].values[2], axis=0)
    assert full["onset_r2"] == int(np.flatnonzero(fit < 0.9)[0])
    worst = full["worst"]
    assert worst["purity"] == pytest.approx(two_kinds["purity"].values[2, :, 0].min())
    assert two_kinds["purity"].values[2, worst["head"], worst["pair"]] == worst["purity"]
    slow = two_kinds["inv_freq"].values[2] < 2 * np.pi / 64
    assert full["floor"] == slow.argmax() and full["below_floor"] == slow.sum()
    assert full["power_below_floor"] == pytest.approx(float(two_kinds["power_below_floor"][2]))


def test_injections_are_means_of_shares_and_medians_of_ratios(two_kinds):
    row = next(row for row in injections(two_kinds) if (row["inject"], row["layer"]) == (1, 1))
    here = two_kinds.sel(inject=1, layer=1)
    for name in ("leakage", "leakage_none", "excess"):
        assert row[name] == pytest.approx(float(here[name].mean()))
    for name in ("carried", "carried_elsewhere", "selectivity"):
        assert row[name] == pytest.approx(float(here[name].median()))
    assert row["excess_se"] == pytest.approx(float(here["excess_se"])) and row["excess_se"] > 0
    first = next(row for row in injections(two_kinds) if (row["inject"], row["layer"]) == (1, 0))
    assert first["excess"] is None and first["carried"] is None and first["leakage"] is not None
    without = next(row for row in injections(two_kinds, "mlp") if (row["inject"], row["layer"]) == (1, 1))
    assert without["carried"] == pytest.approx(
        float(two_kinds["carried_ablated"].sel(ablate="mlp", inject=1, layer=1).median())
    )


def test_the_result_file_is_enough(two_kinds, tmp_path):
    rp.save(two_kinds, tmp_path / "s.nc")
    again = rp.load(tmp_path / "s.nc")
    assert rp.summary(again) == rp.summary(two_kinds)
    for name in again.data_vars:
        assert again[name].attrs["long_name"] and again[name].attrs["units"], name


# -- table -----------------------------------------------------------------------------------------


def row(**changes):
    values = {"inject": 4, "layer": 1, "resolvable": True, "excess": 0.0, "excess_se": 0.01, "selectivity": 1.0}
    values |= {"selectivity_se": 0.1, "carried": 1.2, "carried_elsewhere": 1.1}
    return values | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["is no different with the tone", "does not stand out, within the errors."]),
        ({"excess": 0.021}, ["leakage is 0.021 higher with the tone"]),
        ({"excess": -0.021}, ["leakage is 0.021 lower with the tone"]),
        ({"excess": 0.019, "selectivity": 1.19}, ["no different", "does not stand out"]),
        ({"selectivity": 1.21, "carried": 2.0}, ["2.0 times", "1.1 times: the tone stands out"]),
        ({"excess_se": None}, ["one segment does not tell"]),
    ],
)
def test_the_sentence_is_the_one_the_numbers_allow(changes, words):
    (sentence,) = sentences([row(layer=0, excess=None), row(**changes)])
    assert sentence.startswith("layer 1: ")
    for word in words:
        assert word in sentence


def test_many_pairs_are_counted_resolvable_ones_only():
    rows = [row(inject=pair, excess=0.1 * (pair < 3), selectivity=2 if pair == 5 else 1) for pair in range(8)]
    rows += [row(inject=pair, excess=1.0, resolvable=False) for pair in range(8, 12)]
    (sentence,) = sentences(rows)
    assert sentence.startswith("layer 1, 8 pairs: leakage is higher with the tone for 3, lower for 0;")
    assert sentence.endswith("for 1.")


def printed(ds, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    render(ds, rp.summary(ds))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out
    return " ".join(out.split())


def test_table_says_it_in_words(two_kinds, capsys, monkeypatch):
    out = printed(two_kinds, capsys, monkeypatch)
    for words in (
        "sliding attention full attention",
        "pure in every layer no pair turns twice",
        "damage sets in",
        "most damaged 2 (",
        "power below the floor",
        "one tone at a time, in layer 0",
        "no mlp: layer 1, 3 pairs: leakage is",
        "no attention: without it in the layer of the tone, nothing of the tone goes on.",
    ):
        assert words in out, words


def test_table_names_layers_that_do_not_rotate(resting, capsys, monkeypatch):
    out = printed(resting, capsys, monkeypatch)
    assert "layers that do not rotate: 3 (profile only)" in out and "one tone" not in out


def test_table_of_one_segment_has_no_errors(one_segment, capsys, monkeypatch):
    out = printed(one_segment, capsys, monkeypatch)
    assert "one segment does not tell" in out and "nan" not in out.lower() and "±:" in out


# -- command line ----------------------------------------------------------------------------------


def test_command_writes_file_figures_and_json(run_cli, tiny_folder, tokens, tmp_path):
    done = run_cli(
        "spectrum", tiny_folder, "--tokens", tokens, "--inject", "0-1", "--ablate", "norm", "--weights",
        "--keep-pairs", "-o", "s.nc", "--figure", "s.png", "--json",
    )  # fmt: skip
    assert done.code == 0, done
    values = json.loads(done.out)
    assert values["analysis"] == "spectrum" and values["segments"] == 4 and values["distances"] == 8
    assert values["output"] == "s.nc"
    assert values["figures"] == ["s.png", "s-damage.png", "s-profile.png", "s-injected.png", "s-tones.png"]
    ds = rp.load("s.nc")
    assert ds["inject"].values.tolist() == [0, 1] and ds["ablate"].values.tolist() == ["norm"]
    assert {"pair_profile", "weight_profile", "weight_power"} <= set(ds.data_vars)
    shown = run_cli("show", "s.nc", "--json")
    assert json.loads(shown.out) | {"figures": 0} == values | {"figures": 0}


def test_command_injects_all_and_draws_what_there_is(run_cli, tiny_folder, tokens):
    done = run_cli("spectrum", tiny_folder, "--tokens", tokens, "--inject", "all", "--depth", "3", "-o", "s.nc")
    assert done.code == 0 and "8 pairs" in done.out
    done = run_cli("spectrum", tiny_folder, "--tokens", tokens, "-o", "s.nc", "--figure", "s.png", "--json")
    assert json.loads(done.out)["figures"] == ["s.png", "s-damage.png", "s-profile.png"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--window", "kaiser"], "--window is 'kaiser'"),
        (["--ablate", "mlp"], "give --inject"),
        (["--inject", "2", "--ablate", "mlp,heads"], "not 'heads'"),
        (["--inject", "2", "--ablate", "mlp", "--depth", "1"], "give 2 or more"),
        (["--inject", "x"], "'x' is not a list of pairs"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_opened(run_cli, tiny_folder, no_opening, arguments, words):
    done = run_cli("spectrum", tiny_folder, *arguments)
    assert done.code == 2 and words in done.err and done.out == ""


def test_pairs_that_are_not_there_are_refused(run_cli, tiny_folder, tokens):
    run_cli("spectrum", tiny_folder, "--tokens", tokens, "--inject", "40").refused("--inject 40", "0 to 7", code=2)


# -- figures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIGURES["spectrum"])
@pytest.mark.parametrize("which", ["two_kinds", "resting", "one_segment"])
def test_every_figure_draws_with_its_caption(name, which, request, tmp_path):
    ds, plot = request.getfixturevalue(which), FIGURES["spectrum"][name]
    if not getattr(plot, "applies", lambda ds: True)(ds):
        if which == "resting":
            with pytest.raises(rp.ProbeError, match="--inject"):
                plot(ds)
        return
    axes = plot(ds)
    path = save_figure(axes, tmp_path / "figure.png")
    assert path.stat().st_size > 10_000
    figure = np.ravel(np.array(axes, dtype=object))[0].figure
    caption = " ".join(figure.texts[0].get_text().split())
    assert f"{ds.attrs['segments']} segment" in caption and "60 tokens" in caption and "Hann" in caption
    for one in np.ravel(np.array(axes, dtype=object)):
        assert one.get_xlabel() and one.get_title(loc="left")
    import matplotlib.pyplot as plt

    plt.close(figure)


def closing(axes):
    import matplotlib.pyplot as plt

    plt.close(np.ravel(np.array(axes, dtype=object))[0].figure)


def test_purity_draws_median_and_lowest_head(two_kinds):
    axes = rp.plot.spectrum_purity(two_kinds)
    for one, panel in zip(axes, ("purity", "lowest", "fit"), strict=True):
        values = over_heads(two_kinds, panel)
        drawn = one.collections[0].get_array()
        np.testing.assert_allclose(np.ma.filled(drawn, np.nan).reshape(values.shape), values)
    purity = two_kinds["purity"].values
    assert over_heads(two_kinds, "lowest")[2, 0] == purity[2, :, 0].min()
    assert np.isnan(over_heads(two_kinds, "purity")[0]).all()  # nothing turns twice within the window
    closing(axes)


def test_damage_draws_every_rotating_layer(resting):
    axes = rp.plot.spectrum_damage(resting)
    points = axes[0].lines[0].get_xydata()
    assert points[:, 0].tolist() == [0, 1, 2]
    np.testing.assert_allclose(points[:, 1], 100 * resting["damage"].values[:3])
    closing(axes)


def test_profile_draws_the_heads_asked_for(two_kinds):
    axes = rp.plot.spectrum_profile(two_kinds, heads=[(0, 1), (2, 3)])
    for one, (layer, head) in zip(axes, [(0, 1), (2, 3)], strict=True):
        np.testing.assert_array_equal(one.lines[0].get_ydata(), two_kinds["profile"].values[layer, head])
    closing(axes)
    damage = head_damage(two_kinds)
    cleanest, _, worst = typical_heads(two_kinds)
    assert damage[cleanest] == np.nanmin(damage) and damage[worst] == np.nanmax(damage)
    with pytest.raises(rp.ProbeError, match="no head 0.9"):
        rp.plot.spectrum_profile(two_kinds, heads=[(0, 9)])


def test_injected_draws_the_shares_of_power(two_kinds):
    axes = rp.plot.spectrum_injected(two_kinds, pair=1)
    assert [one.get_title(loc="left") for one in axes] == ["layer 0", "layer 1"]
    power = two_kinds["power_injected"].sel(inject=1, inject_layer=1).values[:, :5]  # a window of 8: bins 0 to 4
    expected = (power / power.sum(-1, keepdims=True)).mean(0)
    np.testing.assert_allclose(axes[1].lines[1].get_ydata(), expected, rtol=1e-5)
    assert len(axes[0].lines) == 2 and len(axes[1].lines) == 4
    closing(axes)
    with pytest.raises(rp.ProbeError, match="pair 2 was not injected: choose from 0, 1, 3"):
        rp.plot.spectrum_injected(two_kinds, pair=2)


def test_tones_draws_what_carried_says():
    ds = rp.spectrum(rp.open(NAMED["Llama 3"].build()), tokens=token_ids(60, 4).numpy(), inject="all")
    axes = rp.plot.spectrum_tones(ds)
    assert [one.get_title(loc="left") for one in axes] == ["layer 0", "layer 1", "layer 1, own rotation taken back"]
    drawn = np.ma.filled(axes[2].collections[0].get_array(), np.nan).reshape(8, 16)
    bins = ds["frequency"].values[0]
    for pair in (0, 1):  # where a tone falls on a bin, the cell is `carried`
        at = int(np.argmin(np.abs(bins - ds["inv_freq"].values[0, pair])))
        power = [ds[name].sel(inject_layer=1) for name in ("power_unrotated_injected", "power_unrotated")]
        near = [p.values[..., max(0, at - 2) : at + 3].sum(-1) for p in (power[0].sel(inject=pair), power[1])]
        assert drawn[pair, at] == pytest.approx(np.median(np.log2(near[0] / near[1])), abs=1e-4)
    closing(axes)
