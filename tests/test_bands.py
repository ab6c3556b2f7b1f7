"""bands on a real checkpoint, against projection hooks and direct sums."""

import json

import numpy as np
import pytest
import torch
import xarray as xr

import rope_probe as rp
from rope_probe.probes.bands_summary import band_range, summary


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 49152, (3, 128))


@pytest.fixture(scope="module")
def measured(smollm2, tokens):
    return rp.bands(smollm2, tokens=tokens, control=True)


def projections(model, tokens, names):
    """Outputs of each layer's projections on the ordinary model, per head: [layer][name] -> (B, T, head, 64)."""
    found = [dict() for _ in model.model.layers]
    hooks = []
    for index, layer in enumerate(model.model.layers):
        for name in names:

            def keep(_module, _args, out, index=index, name=name):
                found[index][name] = out.detach().reshape(*out.shape[:2], -1, 64).double().numpy()

            hooks.append(getattr(layer.self_attn, name).register_forward_hook(keep))
    with torch.no_grad():
        model.model(torch.as_tensor(tokens))
    for hook in hooks:
        hook.remove()
    return found


def test_norms_and_tops_equal_projection_hooks(smollm2, tokens, measured):
    layers = projections(smollm2.model, tokens, ("q_proj", "k_proj", "v_proj"))
    for side, name, top in (
        ("q_norm", "q_proj", "q_top"),
        ("k_norm", "k_proj", "k_top"),
        ("v_norm", "v_proj", "v_top"),
    ):
        for index, layer in enumerate(layers):
            x = layer[name]
            norms = np.hypot(x[..., :32], x[..., 32:])  # half-split pairs (i, i + 32)
            rest = norms[:, 1:].reshape(-1, *norms.shape[2:])
            np.testing.assert_allclose(measured[side][index], rest.mean(0), rtol=1e-5)
            # a token whose two largest pairs are equal to float32 may count for either, as the sums are ordered
            largest = rest >= rest.max(-1, keepdims=True) * (1 - 1e-5)
            sure = largest & (largest.sum(-1, keepdims=True) == 1)
            counts = measured[top][index].values
            assert (sure.sum(0) <= counts).all() and (counts <= largest.sum(0)).all()
            assert (counts.sum(-1) == len(rest)).all() and sure.sum() > 0.999 * counts.sum()
            if side != "v_norm":
                np.testing.assert_allclose(measured[f"{side}_std"][index], rest.std(0), rtol=1e-4)
                np.testing.assert_allclose(measured[f"{side}_first"][index], norms[:, 0].mean(0), rtol=1e-5)


def test_usage_is_the_product_of_mean_norms(measured):
    q, k = measured["q_norm"].values, measured["k_norm"].values
    for head in range(9):
        np.testing.assert_allclose(measured["usage"].values[:, head], q[:, head] * k[:, head // 3], rtol=1e-12)


def test_batches_merge_to_the_same_file(smollm2, tokens, measured):
    whole = rp.bands(smollm2, tokens=tokens, control=True, batch=3)
    for name in measured.data_vars:
        np.testing.assert_allclose(whole[name], measured[name], rtol=2e-5, atol=1e-6)
    assert whole.attrs["tokens_sha256"] == measured.attrs["tokens_sha256"]


def test_band_of_smollm2_on_text(smollm2):
    """The published neighbourhood: band at pairs 22 to 25, i_band about 24, mode 23 or 24 of 32."""
    values = summary(rp.bands(smollm2, segments=2, length=512))
    assert 23.5 < values["i_band"] < 24.8
    assert values["mode"] in (23, 24)
    assert values["pairs"] == 32
    group = values["by_layer_type"]["full_attention"]
    assert group["base"] == 1e5 and group["length"] == 8192 and group["window"] == 0
    # half turn: base^(-j/P) * L = pi
    assert group["predicted"]["half_turn"] == pytest.approx(32 * np.log(8192 / np.pi) / np.log(1e5), abs=1e-9)
    assert group["predicted"]["variance"] == pytest.approx(32 * np.log(8192 / 3.657210) / np.log(1e5), abs=1e-5)
    assert group["c"] == pytest.approx(group["i_band"] / group["predicted"]["variance"])


def test_statistics_follow_their_definitions(measured):
    values = summary(measured)
    dominant = measured["k_top"].values.argmax(-1)
    assert values["i_band"] == pytest.approx(dominant.mean())
    assert values["i_band_q"] == pytest.approx(measured["q_top"].values.argmax(-1).mean())
    assert values["i_band_usage"] == pytest.approx(measured["usage"].values.argmax(-1).mean())
    assert values["mode"] == np.bincount(dominant.ravel()).argmax()
    assert values["std_heads"] == pytest.approx(dominant.std(ddof=1))
    assert values["std_layers"] == pytest.approx(dominant.mean(1).std(ddof=1))
    segments = measured["dominant_segment"].values.mean(1)
    assert values["i_band_se"] == pytest.approx(segments.std(ddof=1) / np.sqrt(3))
    norms = measured["k_norm"].values.reshape(-1, 32)
    assert values["concentration"] == pytest.approx(np.median(norms.max(1) / np.median(norms, axis=1)))
    effective = (norms**2).sum(1) ** 2 / (norms**4).sum(1)
    assert values["effective_pairs"] == pytest.approx(np.median(effective))


def test_layers_limit_the_run_and_keep_the_numbers(smollm2, tokens, measured):
    calls = []
    hook = smollm2.model.model.layers[4].register_forward_pre_hook(lambda *a: calls.append(1))
    part = rp.bands(smollm2, tokens=tokens, layers=[1, 3])
    hook.remove()
    assert part["layer"].values.tolist() == [1, 3]
    xr.testing.assert_allclose(part["k_norm"], measured["k_norm"].sel(layer=[1, 3]), rtol=1e-6)
    assert not calls  # the rotation was verified before; no segment went past layer 3


def test_formation_moves_the_prediction_only(smollm2, tokens, measured):
    other = rp.bands(smollm2, tokens=tokens, layers=range(3), formation={"base": 1e4, "length": 2048})
    group = summary(other)["by_layer_type"]["full_attention"]
    assert group["base"] == 1e5 and group["formation_base"] == 1e4 and group["length"] == 2048
    assert group["predicted"]["full_turn"] == pytest.approx(32 * np.log(2048 / (2 * np.pi)) / np.log(1e4))
    np.testing.assert_allclose(other["k_norm"], measured["k_norm"][:3], rtol=1e-6)


def test_result_file_holds_everything(tmp_path, measured):
    rp.save(measured, tmp_path / "b.nc")
    again = rp.load(tmp_path / "b.nc")
    xr.testing.assert_identical(again.drop_vars("rotates"), measured.drop_vars("rotates"))
    assert summary(again) == summary(measured)
    for name in ("model", "dtype", "device", "corpus", "tokens_sha256", "segments", "length", "versions", "date"):
        assert name in again.attrs
    assert json.loads(again.attrs["provenance"])["sha256"].startswith("b179c952")
    for name in again.data_vars:
        assert again[name].attrs["long_name"] and again[name].attrs["units"]


def test_band_range_is_contiguous_around_the_peak():
    assert band_range(np.array([9.0, 1, 6, 10, 6, 5, 9])) == (2, 4)  # 5 is not above half of 10
    assert band_range(np.array([10.0, 6, 1])) == (0, 1)
    assert band_range(np.array([1.0, 2, 3])) == (1, 2)


@pytest.mark.slow
def test_gemma3_has_a_band_for_each_layer_type():
    values = summary(rp.bands(rp.open("demo:gemma3"), segments=4))["by_layer_type"]
    sliding, full = values["sliding_attention"], values["full_attention"]
    assert sliding["window"] == sliding["length"] == 512 and sliding["base"] == 1e4
    assert full["window"] == 0 and full["length"] == 32768 and full["base"] == 1e6
    assert sliding["predicted"]["half_turn"] == pytest.approx(70.8, abs=0.05)
    assert full["predicted"]["half_turn"] == pytest.approx(85.7, abs=0.05)
    assert sliding["i_band_usage"] == pytest.approx(78, abs=1)
    assert full["i_band_usage"] == pytest.approx(91, abs=1)
    assert sliding["band"][0] <= 75 <= sliding["band"][1]
    assert full["band"][0] <= 87 <= full["band"][1]


def test_bfloat16_of_smollm2(smollm2):
    ids = np.random.default_rng(5).integers(0, 49152, (2, 128))
    exact, rough = rp.bands(smollm2, tokens=ids), rp.bands(rp.open("demo:smollm2", dtype="bfloat16"), tokens=ids)
    assert rough.attrs["dtype"] == "bfloat16"
    for name in ("q_norm", "k_norm"):
        means = [ds[name].mean(["layer", ds[name].dims[1]]).values for ds in (exact, rough)]
        np.testing.assert_allclose(means[1], means[0], rtol=0.01)
        assert np.median(abs(rough[name] / exact[name] - 1)) < 0.01
    for name in ("i_band", "i_band_usage"):
        assert summary(rough)[name] == pytest.approx(summary(exact)[name], abs=0.3)
