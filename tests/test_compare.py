"""compare: values, paired and unpaired errors, what is warned of, table and figure."""

import json
import warnings

import numpy as np
import pytest

import rope_probe as rp
from rope_probe.cli.tables.compare import measured
from rope_probe.errors import ProbeError, ProbeWarning, UsageError
from rope_probe.plots import compare as plot
from rope_probe.probes.compare import ANALYSES, Comparison
from rope_probe.probes.compare import compare as measure
from rope_probe.probes.compare_parts import Part, Statistic
from rope_probe.results import save


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two models of the same shape with different weights, as folders."""
    import torch
    from conftest import tiny_config
    from transformers import LlamaForCausalLM

    folders = []
    for seed in range(2):
        torch.manual_seed(seed)
        folder = tmp_path_factory.mktemp("models") / f"model-{'ab'[seed]}"
        LlamaForCausalLM(tiny_config()).save_pretrained(folder)
        folders.append(folder)
    return [rp.open(folder) for folder in folders]


def ids(seed, segments=5, length=48):
    return np.random.default_rng(seed).integers(2, 97, (segments, length))


@pytest.fixture(scope="module")
def similar(checkpoints):
    return [rp.similarity(ckpt, tokens=ids(0)) for ckpt in checkpoints]


@pytest.fixture(scope="module")
def banded(checkpoints):
    return [rp.bands(ckpt, tokens=ids(0)) for ckpt in checkpoints]


def standard_error(values):
    return values.std(ddof=1) / np.sqrt(len(values))


def one(comparison, result, statistic):
    return comparison.isel(result=result).sel(statistic=statistic)


def test_similarity_on_the_same_ids_is_paired(similar):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ProbeWarning)
        found = rp.compare(similar)
    assert found["result"].values.tolist() == ["model-a", "model-b"] and found["paired"].all()
    segments = [ds["rho_segment"].mean(("layer", "head")).values for ds in similar]
    free = one(found, 1, "rho")
    assert float(free["value"]) == pytest.approx(similar[1]["rho"].values.mean())
    assert float(free["value_se"]) == pytest.approx(standard_error(segments[1]))
    assert float(free["difference"]) == pytest.approx((segments[1] - segments[0]).mean())
    assert float(free["difference_se"]) == pytest.approx(standard_error(segments[1] - segments[0]))
    fixed = one(found, 1, "rho at fixed distance")
    assert float(fixed["value"]) == pytest.approx(similar[1]["rho_at_distance"].values.mean())
    late = similar[0]["rho"].values[2].mean()
    assert float(one(found, 0, "rho, late layers")["value"]) == pytest.approx(late)
    assert (found["difference"][0] == 0).all() and np.isnan(found["difference_se"][0]).all()


def test_other_ids_are_not_paired(checkpoints, similar):
    other = rp.similarity(checkpoints[1], tokens=ids(1))
    with pytest.warns(ProbeWarning, match="different token ids"):
        found = rp.compare([similar[0], other])
    assert found["same_tokens"].values.tolist() == [True, False] and not found["paired"][1].any()
    errors = found["value_se"].sel(statistic="rho").values
    assert float(one(found, 1, "rho")["difference_se"]) == pytest.approx(np.hypot(*errors))


def test_bands(banded):
    found = rp.compare(banded)
    keys = [ds["dominant_segment"].mean("layer").values for ds in banded]  # two kv heads in every layer
    row = one(found, 1, "i_band, keys")
    assert float(row["value"]) == pytest.approx(rp.summary(banded[1])["i_band"])
    assert float(row["value_se"]) == pytest.approx(standard_error(keys[1]))
    assert float(row["difference_se"]) == pytest.approx(standard_error(keys[1] - keys[0]))
    share = one(found, 1, "i_band / pairs, keys")
    assert float(share["value"]) == pytest.approx(float(row["value"]) / 8)
    assert float(share["difference_se"]) == pytest.approx(float(row["difference_se"]) / 8)
    waves = banded[1]["wavelength"].values[0]
    wave = one(found, 1, "wavelength of i_band, keys")
    assert float(wave["value"]) == pytest.approx(
        waves[0] ** (1 - float(row["value"]) / 7) * waves[7] ** (float(row["value"]) / 7)
    )
    relative = one(found, 1, "wavelength of i_band / L, keys")
    assert float(relative["value"]) == pytest.approx(float(wave["value"]) / 64)
    along = [np.exp(np.log(waves[0]) + values * np.log(waves[7] / waves[0]) / 7) for values in keys]
    assert float(wave["difference_se"]) == pytest.approx(standard_error(along[1] - along[0]))


def test_a_result_does_not_differ_from_itself(similar):
    found = rp.compare([similar[0], similar[0], similar[1]])
    assert found["result"].values.tolist() == ["model-a (1)", "model-a (2)", "model-b"]
    assert (found["difference"][1] == 0).all() and (found["difference_se"][1] == 0).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": ids(0, length=40)}, "length: 48 .*; 40 "),
        ({"tokens": ids(0, segments=3)}, "number of segments: 5 .*; 3 "),
        ({"queries": 5}, "option queries: 64 .*; 5 "),
        ({"sink": 3}, "option sink: 1 .*; 3 "),
        ({"distances": [1, 5]}, "distances: 1, 2, 4, 8, 16 .*; 1, 5 "),
        ({"layers": [0]}, "option layers: 0–2 .*; 0 "),
    ],
)
def test_what_differs_is_named(checkpoints, similar, options, words):
    other = rp.similarity(checkpoints[0], **{"tokens": ids(0)} | options)
    with pytest.warns(ProbeWarning, match=words):
        rp.compare([similar[0], other])


def test_texts_and_versions_are_compared(similar):
    other = similar[1].copy()
    other.attrs["corpus"] = "novels"
    other.attrs["versions"] = json.dumps(json.loads(other.attrs["versions"]) | {"torch": "1.0"})
    with pytest.warns(ProbeWarning) as seen:
        rp.compare([similar[0], other])
    words = " ".join(str(warning.message) for warning in seen)
    assert "the results differ in text: token ids (model-a); novels (model-b)." in words
    assert "version of torch" in words and "transformers" not in words


def test_what_cannot_be_compared(similar, banded):
    with pytest.raises(UsageError, match="1 result cannot be compared"):
        rp.compare(similar[:1])
    with pytest.raises(ProbeError, match=r"different analyses \(similarity, bands\)"):
        rp.compare([similar[0], banded[0]])
    other = banded[0].copy()
    other.attrs["analysis"] = "inspect"
    with pytest.raises(ProbeError, match="results of inspect cannot be compared, only those of bands"):
        rp.compare([other, other])


def test_another_analysis_is_one_entry(similar, monkeypatch):
    made = [ds.copy() for ds in similar]
    for ds in made:
        ds.attrs["analysis"] = "weight"

    def parts(ds):
        return [Part("all layers", {"mean": Statistic(2.0, ds["rho_segment"].mean(("layer", "head")).values)})]

    monkeypatch.setitem(ANALYSES, "weight", Comparison(parts, "compare_similarity"))
    assert plot(made)[0].get_xlabel() == "layer"
    found = measure(made)
    assert found["statistic"].values.tolist() == ["mean"] and (found["value"] == 2).all()


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (23.4142, 0.123, "23.41 ± 0.12"),
        (0.20971, 0.0065, "0.2097 ± 0.0065"),
        (23.4, 4.1, "23.4 ± 4.1"),
        (1234.0, 56.0, "1234 ± 56"),
        (37069.0, 265.0, "37.07k ± 0.27k"),
        (-34194.2, 297.0, "-34.19k ± 0.30k"),
        (1244672.0, 23765.0, "1245k ± 24k"),
        (230.061, np.nan, "230.1"),
        (0.5, np.nan, "0.500"),
        (np.nan, np.nan, "–"),
    ],
)
def test_digits_follow_the_error(value, error, words):
    assert measured(value, error) == words


@pytest.mark.parametrize("kind", ["similar", "banded"])
def test_command_and_figure(run_cli, request, kind, tmp_path):
    results = request.getfixturevalue(kind)
    paths = [save(ds, tmp_path / f"{name}.nc") for ds, name in zip(results, "ab", strict=True)]
    run = run_cli("compare", *paths, "--figure", "both.png")
    assert run.code == 0 and not run.err and "both.png" in run.out
    assert max(map(len, run.out.splitlines())) <= 80
    assert run.out.count("model-a") == run.out.count("model-b") == len(rp.compare(results)["statistic"])
    values = json.loads(run_cli("compare", *paths, "--json").out)
    assert values["compared"] == results[0].attrs["analysis"]
    assert values["statistics"][0]["results"][1]["paired"] is True
    axes = plot(results)
    labels = [text.get_text() for legend in axes[0].figure.legends for text in legend.get_texts()]
    assert {"model-a", "model-b"} <= set(labels)


def test_results_of_one_model_go_by_their_files(run_cli, similar, tmp_path):
    paths = [save(similar[0], tmp_path / f"{name}.nc") for name in ("before", "after")]
    assert "  before" in run_cli("compare", *paths).out
    run_cli("compare", paths[0]).refused("1 result", code=2)
    run_cli("compare", paths[0], tmp_path / "none.nc").refused("none.nc")
