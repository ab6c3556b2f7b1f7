"""compare of every analysis: its numbers against the files, errors, compared_models with several kinds of layers, figures."""

import json

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from conftest import COMPARED, compared_ids, lines_of

import rope_probe as rp
from rope_probe.cli.tables.compare import as_dict, render
from rope_probe.cli.tables.compare import measured as measured_words
from rope_probe.errors import ProbeError, ProbeWarning, UsageError
from rope_probe.plots import compare as plot
from rope_probe.probes.compare import ANALYSES
from rope_probe.probes.heads_summary import ROLES, members
from rope_probe.results import save

matplotlib.use("agg")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


@pytest.fixture
def pair(compared):
    return lambda analysis: compared[analysis][:2]


def at(found, row, statistic):
    return {
        name: found[name].isel(result=row).sel(statistic=statistic).item()
        for name in found.data_vars
        if "statistic" in found[name].dims
    }


def standard_error(values):
    return values.std(ddof=1) / np.sqrt(len(values))


# --- numbers -------------------------------------------------------------------------------------------------------------


def test_truncate(pair):
    results = pair("truncate")
    found = rp.compare(results)
    row = at(found, 1, "ratio, keep 0.5")
    (setting,) = np.flatnonzero((results[0]["kind"] == "keep") & (results[0]["value"] == 0.5))
    ratios = [ds["ratio"].values[setting] for ds in results]
    added = [ds["nll"].values[setting] - ds["nll_intact"].values for ds in results]
    assert row["value"] == pytest.approx(ratios[1]) == pytest.approx(np.exp(added[1].mean()))
    assert row["value_se"] == pytest.approx(results[1]["ratio_se"].values[setting])
    assert row["difference"] == pytest.approx(ratios[1] - ratios[0])
    assert row["paired"]
    assert row["difference_se"] == pytest.approx(standard_error(ratios[1] * added[1] - ratios[0] * added[0]))
    intact = at(found, 1, "intact, nats/token")
    assert intact["value"] == pytest.approx(results[1]["nll_intact"].values.mean())
    assert intact["difference_se"] == pytest.approx(
        standard_error((results[1]["nll_intact"] - results[0]["nll_intact"]).values)
    )
    assert at(found, 0, "ratio, keep 1")["value"] == 1
    removed = results[0]["kind"].values == "remove"
    costs = (results[0]["nll"] - results[0]["nll_intact"]).values[removed].mean(1)
    assert at(found, 0, "remove: costliest pair, nats")["value"] == pytest.approx(costs.max())
    assert at(found, 0, "critical keep")["value"] == rp.summary(results[0])["keep"][0]["critical"]


def test_extend(pair):
    results = pair("extend")
    found = rp.compare(results)
    assert found["statistic"].values[-1].startswith("nats/token: base 500")
    nll = [ds["nll"].values[1, 1] for ds in results]
    row = at(found, 1, found["statistic"].values[-1])
    assert row["value"] == pytest.approx(nll[1].mean()) and row["paired"]
    assert row["difference"] == pytest.approx((nll[1] - nll[0]).mean())
    assert row["difference_se"] == pytest.approx(standard_error(nll[1] - nll[0]))
    (ax,) = plot(results)
    name = next(name for name in lines_of(ax) if name.startswith("two, base 500"))
    np.testing.assert_allclose(lines_of(ax)[name].get_xdata(), [32, 64])
    np.testing.assert_allclose(lines_of(ax)[name].get_ydata()[1], np.exp(nll[1].mean()))
    with pytest.raises(UsageError, match="extend is compared by length"):
        plot(results, axis="index")
    other = results[1].isel(setting=[1])
    with pytest.raises(ProbeError, match="no setting in common"):
        plot([results[0].isel(setting=[0]), other])


def test_retrieval(pair):
    """Keys found, as `extend` keeps them: [setting, length, keys, depth, sample]."""
    results = [ds.drop_dims("sample").drop_vars(["depth", "keys"]) for ds in pair("extend")]
    for seed, ds in enumerate(results):
        sizes = [ds.sizes["setting"], ds.sizes["length"], 1, 3, 5]
        dims = ("setting", "length", "keys", "depth", "sample")
        for name in ("exact_match", "key_right", "key_logprob"):
            ds[name] = (dims, np.random.default_rng(seed).integers(0, 2, sizes).astype(float))
    results = [ds.assign_coords(keys=[1], depth=[0.0, 0.5, 1.0]) for ds in results]
    found = rp.compare(results)
    name = next(name for name in found["statistic"].values if name.startswith("key found: base 500"))
    samples = [ds["exact_match"].values[1, 0, 0].mean(0) for ds in results]
    row = at(found, 1, name)
    assert row["value"] == pytest.approx(samples[1].mean()) and not row["paired"]
    assert row["difference_se"] == pytest.approx(np.hypot(*map(standard_error, samples)))
    axes = plot(results)
    assert [ax.get_title(loc="left") for ax in axes] == ["perplexity", "key found"]
    line = next(line for name, line in lines_of(axes[1]).items() if name.startswith("two, base 500"))
    np.testing.assert_allclose(line.get_ydata(), results[1]["exact_match"].values[1, :, 0].mean((1, 2)))


def test_other_texts_are_independent(compared_models, compared):
    other = rp.truncate(rp.open(compared_models / "two"), tokens=compared_ids(5), **COMPARED["truncate"])
    with pytest.warns(ProbeWarning, match="different token ids"):
        found = rp.compare([compared["truncate"][0], other])
    row, first = at(found, 1, "ratio, keep 0.5"), at(found, 0, "ratio, keep 0.5")
    assert not row["paired"] and row["difference_se"] == pytest.approx(np.hypot(first["value_se"], row["value_se"]))


def test_heads(pair):
    results = pair("heads")
    found = rp.compare(results)
    for role in ROLES:
        share = (results[1]["role"] == role).values.mean()
        assert at(found, 1, f"share of heads, {role}")["value"] == pytest.approx(share)
    row = at(found, 1, "weight on the previous token")
    means = [float(ds["previous_weight"].mean()) for ds in results]
    assert (row["value"], row["difference"]) == (pytest.approx(means[1]), pytest.approx(means[1] - means[0]))
    assert np.isnan(row["value_se"]) and np.isnan(row["difference_se"]) and not row["paired"]  # segments are not kept
    band = at(found, 1, "i_band, keys")
    segments = [ds["dominant_segment"].mean("layer").values for ds in results]
    assert band["paired"] and band["difference_se"] == pytest.approx(standard_error(segments[1] - segments[0]))
    semantic = at(found, 1, "i_band, usage, semantic heads")["value"]
    values = results[1]["usage"].values[members(results[1], "semantic")].argmax(-1)
    assert semantic == pytest.approx(values.mean())


def test_spectrum(pair):
    results = pair("spectrum")
    found = rp.compare(results)
    row, first = at(found, 1, "damage, mean over layers"), at(found, 0, "damage, mean over layers")
    assert row["value"] == pytest.approx(results[1]["damage"].values.mean())
    assert row["value_se"] == pytest.approx(results[1]["damage_se"].values.mean())
    assert not row["paired"] and row["difference_se"] == pytest.approx(np.hypot(row["value_se"], first["value_se"]))
    ratio = (results[1]["purity"] / results[1]["purity_tone"]).values
    known = ratio[np.broadcast_to(results[1]["resolvable"].values[:, None], ratio.shape) & np.isfinite(ratio)]
    assert at(found, 1, "purity over a pure tone's, median")["value"] == pytest.approx(np.median(known))
    assert at(found, 1, "share below 0.98")["value"] == pytest.approx((known < 0.98).mean())


def test_trajectory(compared):
    with pytest.warns(ProbeWarning, match="checkpoints: one, two .up.; two, one .down."):
        found = rp.compare(compared["trajectory"], names=["up", "down"])
    bands = [rp.summary(ds) for ds in compared["bands"][:2]]
    assert at(found, 0, "i_band, usage, first checkpoint")["value"] == pytest.approx(bands[0]["i_band_usage"])
    assert at(found, 0, "i_band, usage, last checkpoint")["value"] == pytest.approx(bands[1]["i_band_usage"])
    moved = [at(found, row, "i_band, keys, last − first") for row in (0, 1)]
    change = bands[1]["i_band"] - bands[0]["i_band"]
    assert (moved[0]["value"], moved[1]["value"]) == (pytest.approx(change), pytest.approx(-change))
    segments = [ds["dominant_segment"].mean("layer").values for ds in compared["bands"][:2]]
    assert moved[0]["value_se"] == pytest.approx(standard_error(segments[1] - segments[0]))
    assert moved[1]["difference_se"] == pytest.approx(2 * moved[0]["value_se"])


# --- several kinds of layers, several ladders ----------------------------------------------------------------------------


def test_kinds_are_compared_with_their_kind(compared):
    one, _, gemma = compared["bands"]
    found = rp.compare([one, gemma])
    assert found["kind"].values.tolist() == ["full attention", "all layers", "sliding attention", "full attention"]
    assert found["result"].values.tolist() == ["one", "gemma", "gemma, sliding layers", "gemma, full layers"]
    assert set(found["reference"].values) == {"one"}
    kinds = rp.summary(gemma)["by_layer_type"]
    for row, kind in ((2, "sliding_attention"), (3, "full_attention")):
        assert at(found, row, "i_band, usage q·k")["value"] == pytest.approx(kinds[kind]["i_band_usage"])
        wave = at(found, row, "wavelength of i_band / L, keys")["value"]
        assert wave == pytest.approx(kinds[kind]["wavelength"] / kinds[kind]["length"])
    assert np.isnan(at(found, 1, "wavelength of i_band, keys")["value"])  # two bases
    turned = rp.compare([gemma, one])
    assert turned["reference"].values.tolist()[-1] == "gemma, full layers"
    itself = rp.compare([gemma, gemma])
    assert itself["reference"].values.tolist()[3:] == itself["result"].values.tolist()[:3]
    assert (itself["difference"][3:].fillna(0) == 0).all()


def test_indices_on_other_ladders_have_no_difference(compared):
    one, two, gemma = compared["bands"]
    changed = gemma.isel(pair=slice(0, 6)).assign_coords(pairs=("layer", [6] * gemma.sizes["layer"]))
    found = rp.compare([one, changed])
    row = at(found, 3, "i_band, keys")
    assert np.isfinite(row["value"]) and np.isnan(row["difference"]) and np.isnan(row["difference_se"])
    assert np.isfinite(at(found, 3, "i_band / pairs, keys")["difference"])
    assert np.isfinite(at(rp.compare([one, two]), 1, "i_band, keys")["difference"])


def test_offsets_on_the_three_axes(compared):
    one, _, gemma = compared["bands"]
    found = rp.compare([one, gemma]).isel(result=2)
    ours, theirs = rp.summary(gemma)["by_layer_type"]["sliding_attention"], rp.summary(one)
    length = rp.summary(one)["by_layer_type"]["full_attention"]["length"]
    pairs, base, (i, j) = 8, ours["base"], (theirs["i_band_usage"], ours["i_band_usage"])
    wave = 2 * np.pi * 1e4 ** (i / pairs)
    expected = {
        "index": i,
        "wavelength": pairs * np.log(wave / (2 * np.pi)) / np.log(base),
        "relative": pairs * np.log(wave * ours["length"] / length / (2 * np.pi)) / np.log(base),
    }
    for axis, index in expected.items():
        assert found["offset"].sel(axis=axis).item() == pytest.approx((j - index) / pairs)
    assert found["offset"].sel(axis="index").item() == pytest.approx(
        at(rp.compare([one, gemma]), 2, "i_band / pairs, usage")["difference"]
    )
    segments = [one["dominant_usage_segment"].mean("layer").values]
    rows = gemma["layer_type"].values == "sliding_attention"
    segments.append(gemma["dominant_usage_segment"].values[:, rows].mean(1))
    assert found["offset_se"].sel(axis="index").item() == pytest.approx(
        standard_error(segments[1] - segments[0]) / pairs
    )
    assert ((found["overlap"] > 0) & (found["overlap"] <= 1)).all()


def test_estimate_against_measurement(compared):
    """A result without values of segments, as `scan` writes it, beside the measurement."""
    bands = compared["bands"][0]
    names = [f"dominant{side}_segment" for side in ("", "_q", "_usage")]
    estimate = bands.drop_vars(names).assign_attrs(
        analysis="scan", options=json.dumps({"draws": 9}), shared_keys="[]", weight_bytes_read=1
    )
    estimate = estimate.assign_coords(exact=("layer", np.zeros(3, dtype=int)))
    estimate["usage"] = estimate["usage"].roll(pair=1)
    with pytest.warns(ProbeWarning, match=r"differ in analysis: bands \(one \(bands\)\); scan \(one \(scan\)\)"):
        found = rp.compare([bands, estimate])
    row = at(found, 1, "i_band, usage q·k")
    assert row["value"] == pytest.approx(bands["usage"].roll(pair=1).argmax("pair").values.mean())
    assert np.isnan(row["difference_se"]) and not row["paired"]
    assert found["offset"].sel(axis="index")[1].item() == pytest.approx(row["difference"] / 8)
    with pytest.raises(ProbeError, match=r"different analyses \(scan, similarity\)"):
        rp.compare([estimate, compared["similarity"][0]])


def test_cut_short_is_said(pair):
    results = pair("truncate")
    with pytest.warns(ProbeWarning, match="cut short, and compared as far as read: two"):
        rp.compare([results[0], results[1].assign_attrs(partial=1)])


def test_nothing_in_common_is_refused(pair, monkeypatch):
    alone = ANALYSES["bands"]._replace(
        parts=lambda ds: [part._replace(statistics={ds.attrs["model"]: None}) for part in ANALYSES["scan"].parts(ds)]
    )
    monkeypatch.setitem(ANALYSES, "bands", alone)
    with pytest.raises(ProbeError, match="no statistic in common"):
        rp.compare(pair("bands"))


# --- table and figures ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the results differ in checkpoints")
@pytest.mark.parametrize("analysis", [*COMPARED, "trajectory"])
def test_table_and_json_of_every_analysis(capsys, compared, analysis):
    found = rp.compare(compared[analysis], names=list("abc")[: len(compared[analysis])])
    render(found)
    table = capsys.readouterr().out
    assert max(map(len, table.splitlines())) <= 80
    rows = {name: [at(found, row, name) for row in range(found.sizes["result"])] for name in found["statistic"].values}
    for name, values in rows.items():
        assert name in " ".join(table.split())
        for row in values:
            assert not np.isfinite(row["value"]) or measured_words(row["value"], row["value_se"]) in table
    printed = as_dict(found)
    assert [one["statistic"] for one in printed["statistics"]] == list(rows)
    for one in printed["statistics"]:
        for row, expected in zip(one["results"], rows[one["statistic"]], strict=True):
            np.testing.assert_equal({key: row[key] for key in expected}, expected)
    assert bool(printed["axes"]) == (analysis in ("bands", "heads", "trajectory"))


def test_the_command_draws_one_axis(run_cli, compared, tmp_path):
    paths = [save(ds, tmp_path / f"{name}.nc") for ds, name in zip(compared["truncate"], "abc", strict=True)]
    run = run_cli("compare", *paths, "--figure", "one.svg", "--axis", "relative", "--json")
    assert json.loads(run.out)["figures"] == ["one.svg"]


def test_similarity_has_no_pairs(pair):
    with pytest.raises(UsageError, match="--axis index: similarity is compared by layer"):
        plot(pair("similarity"), axis="index")


def test_axis_is_checked(run_cli, compared, tmp_path):
    paths = [save(ds, tmp_path / f"{name}.nc") for ds, name in zip(compared["bands"], "abc", strict=True)]
    run_cli("compare", *paths, "--figure", "a.png", "--axis", "hertz").refused("--axis is 'hertz'", "relative", code=2)
    run_cli("compare", *paths, "--axis", "index").refused("--figure", code=2)
    with pytest.raises(UsageError, match="hertz"):
        plot(compared["bands"], axis="hertz")
    with pytest.raises(ProbeError, match="3 panels"):
        plot(compared["bands"], ax=plt.subplots(1, 2)[1])
