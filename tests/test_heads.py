"""heads: every statistic against full eager attention maps; roles, induction, figures and the command."""

import json

import matplotlib
import numpy as np
import pytest
import torch
from families import NAMED, token_ids

import rope_probe as rp
from rope_probe.errors import ProbeError, UsageError
from rope_probe.plots import FIGURES, heads_distance, heads_map, heads_roles, heads_wavelength
from rope_probe.probes.heads import repeated, roles
from rope_probe.probes.heads_summary import band_share, dominant_pair, fast_share, members, summary

matplotlib.use("agg")

WITHIN = (8, 64, 512)


def eager_maps(model, ids):
    """Attention maps of every layer, as transformers' own eager attention returns them: float64 arrays."""
    decoder = model.get_decoder()
    before = decoder.config._attn_implementation
    decoder.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            found = decoder(torch.as_tensor(ids), output_attentions=True, use_cache=False).attentions
    finally:
        decoder.set_attn_implementation(before)
    return [one.double().numpy() for one in found]


def expected(maps, seen):
    """The statistics of one layer from its whole maps (segment, head, query, key), with a loop over the distances."""
    length = maps.shape[-1]
    rows = maps[:, :, 1:]
    back = np.arange(1, length)[:, None] - np.arange(length)
    share = rows / rows.sum(-1, keepdims=True)
    logs = np.log(np.where(share > 0, share, 1))
    out = {
        "self_weight": (rows * (back == 0)).sum(-1),
        "previous_weight": (rows * (back == 1)).sum(-1),
        "sink_weight": rows[..., 0],
        "entropy": -(share * logs).sum(-1),
        "mean_distance": (share * back).sum(-1),
        "row_sum": rows.sum(-1),
    }
    for last in WITHIN:
        out[f"weight_last_{last}"] = (rows * ((back >= 0) & (back < last))).sum(-1)
    out = {name: value.mean((0, 2)) for name, value in out.items()}
    by_distance = []
    for distance in range(length):
        there = [(m, m - distance) for m in range(max(1, distance), length) if seen(m, m - distance)]
        values = [maps[:, :, m, n].mean(0) for m, n in there]
        by_distance.append(np.mean(values, axis=0) if values else np.full(maps.shape[1], np.nan))
    return out | {"weight_by_distance": np.stack(by_distance, -1)}


def in_window(window):
    return lambda m, n: m - n < window


def in_chunk(size):
    return lambda m, n: m // size == n // size


def compare(ds, maps, sights, atol=1e-5, rtol=1e-6):
    for row, (layer, seen) in enumerate(zip(maps, sights, strict=True)):
        for name, value in expected(layer, seen).items():
            got = ds[name].values[row][: len(value)]
            # in float32 a mean distance of hundreds of tokens has no more than seven digits
            np.testing.assert_allclose(got, value, atol=atol, rtol=rtol, err_msg=f"layer {row}, {name}")


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(0, 49152, (2, 160))


@pytest.fixture(scope="module")
def measured(smollm2, ids):
    return rp.heads(smollm2, tokens=ids, attention_map=(18, 6))


def test_smollm2_equals_its_eager_maps(smollm2, ids, measured):
    compare(measured, eager_maps(smollm2.model, ids), [in_window(160)] * 30)


FAMILIES = {
    "Gemma 3 text": [in_window(8), in_window(8), in_window(99)],
    "Gemma 2": [in_window(8), in_window(99)],  # soft-cap
    "gpt-oss": [in_window(8), in_window(99)] * 2,  # sink logits
    "Llama 4 text": [in_chunk(8)] * 3 + [in_window(99)],  # chunks, and a layer without rotation
}


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_families_equal_their_eager_maps(name, one_thread, monkeypatch):
    monkeypatch.setattr("rope_probe.probes.heads_core.ROWS", 32)  # several blocks
    model, ids = NAMED[name].build(), token_ids(45)
    ds = rp.heads(rp.open(model), tokens=ids, batch=2)
    maps = eager_maps(model, ids)
    compare(ds, maps, FAMILIES[name])
    sums = ds["row_sum"].values
    assert (sums < 0.999).all() if name == "gpt-oss" else np.allclose(sums, 1)
    chunked = ds["weight_by_distance"].values[0, :, 8:]
    assert np.isnan(chunked).all()  # beyond window and chunk nothing is seen


def test_several_key_heads_at_once_and_one_by_one_are_the_same(one_thread, monkeypatch):
    ckpt, ids = rp.open(NAMED["gpt-oss"].build()), token_ids(45)
    together = rp.heads(ckpt, tokens=ids)
    monkeypatch.setattr("rope_probe.probes.heads_core.CELLS", {"cpu": 1})
    monkeypatch.setattr("rope_probe.probes.heads_core.ROWS", 40)
    apart = rp.heads(ckpt, tokens=ids, batch=1)
    for name in ("entropy", "mean_distance", "row_sum", "sink_weight", "weight_by_distance", "induction"):
        np.testing.assert_allclose(apart[name], together[name], rtol=2e-6, atol=1e-7)


def test_scores_of_hundreds_overflow_nothing(one_thread):
    model = NAMED["Llama 3"].build()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 300
    ds = rp.heads(rp.open(model), tokens=token_ids(24))
    compare(ds, eager_maps(model, token_ids(24)), [in_window(99)] * 2, atol=1e-4)


def test_pair_profile_is_what_each_pair_adds_to_the_mean_score(smollm2, ids, measured):
    with rp.capture(smollm2, layers=[5], keep=("q", "k", "scores")) as c:
        c.run(ids)
    q, k = c.q[5], np.repeat(c.k[5], 3, axis=1)
    assert measured["lag"].values.tolist() == [0, 1, 2, 4, 8, 16, 32, 64]
    for n, lag in enumerate(measured["lag"].values):
        first = max(1 + lag, 1)  # key 0 is left out
        products = q[:, :, first:] * k[:, :, 1 : 160 - lag]
        c_pair = (products[..., :32] + products[..., 32:]).mean((0, 2)) / 8
        np.testing.assert_allclose(measured["pair_profile"].values[5, :, :, n], c_pair, atol=2e-5)
        scores = np.stack([c.scores[5][:, :, m, m - lag] for m in range(first, 160)]).mean((0, 1))
        np.testing.assert_allclose(c_pair.sum(-1), scores, atol=1e-4)


def test_induction_is_the_weight_after_the_previous_copy(smollm2, measured):
    sequences, count = repeated(smollm2, 0, 8192)
    assert sequences.shape == (4, 256) and count == 128
    np.testing.assert_array_equal(sequences[:, :128], sequences[:, 128:])
    assert all(len(set(row)) == 128 for row in sequences)
    assert not set(sequences.ravel()) & set(smollm2.tokenizer.all_special_ids)
    maps = eager_maps(smollm2.model, sequences)
    for row in (5, 17, 18):
        wanted = np.mean([maps[row][:, :, m, m - 127] for m in range(128, 256)], axis=(0, 1))
        np.testing.assert_allclose(measured["induction"].values[row], wanted, atol=1e-5)
    other, _ = repeated(smollm2, 1, 8192)
    assert (other != sequences).any()


def test_induction_starts_with_bos_where_every_text_does(tmp_path, tiny_folder):
    from conftest import word_tokenizer

    ckpt = rp.open(rp.open(tiny_folder).model, tokenizer=word_tokenizer(adds_bos=True))
    sequences, count = repeated(ckpt, 0, 64)
    assert (sequences[:, 0] == 1).all() and count == 31  # 1 + 2 · 31 fits into 64
    np.testing.assert_array_equal(sequences[:, 1:32], sequences[:, 32:])
    assert not {0, 1} & set(sequences[:, 1:].ravel())


def test_roles_are_tried_in_order(measured):
    ds = measured.copy(deep=True)
    ds["weight_by_distance"].values[:] = 0
    for name in ("induction", "sink_weight"):
        ds[name].values[:] = 0
    ds["weight_by_distance"].values[0, :4, 2] = 0.5
    ds["weight_by_distance"].values[0, 4, 5] = 0.9  # a distance beyond 4 makes no positional head
    ds["induction"].values[0, 3:6] = 0.3
    ds["sink_weight"].values[0, 5:8] = 0.5
    limits = {"positional": 0.5, "induction": 0.3, "sink": 0.5}
    names = ["positional"] * 4 + ["induction"] * 2 + ["sink"] * 2 + ["other"]
    assert roles(ds, limits)[0].tolist() == names
    assert (roles(ds, limits)[1:] == "other").all()
    assert (roles(ds, limits | {"positional": 0.51})[0, :4] == ["other"] * 3 + ["induction"]).all()


def test_previous_token_heads_of_smollm2_and_its_induction_heads(measured):
    values = summary(measured)
    assert (16, 0) in [(one["layer"], one["head"]) for one in values["positional_heads"][1]]
    first = values["induction_heads"][0]
    assert (first["layer"], first["head"]) == (18, 6) and first["weight"] > 0.8


def test_bands_come_with_it_and_hold_for_semantic_heads(smollm2, ids, measured):
    alone = rp.bands(smollm2, tokens=ids)
    for name in alone.data_vars:
        np.testing.assert_array_equal(measured[name], alone[name])
    values, plain = summary(measured), rp.summary(alone)
    for key in ("i_band", "i_band_q", "i_band_usage"):
        assert values[key] == plain[key]
        assert values["groups"]["all"][key] == pytest.approx(plain[key])
    positional = measured["role"].values == "positional"
    assert positional.any() and not positional.all()
    usage = measured["usage"].values.argmax(-1)
    keys = np.repeat(measured["k_top"].values.argmax(-1), 3, axis=1)
    assert values["groups"]["semantic"]["i_band_usage"] == pytest.approx(usage[~positional].mean())
    assert values["groups"]["semantic"]["i_band"] == pytest.approx(keys[~positional].mean())
    assert values["groups"]["positional"]["i_band"] == pytest.approx(keys[positional].mean())
    counts = {role: group["heads"] for role, group in values["groups"].items()}
    assert counts["all"] == 270 == counts["semantic"] + counts["positional"]
    assert counts["semantic"] == counts["induction"] + counts["sink"] + counts["other"]
    fast = measured["wavelength"].values[0] <= 64
    share = measured["usage"].values[..., fast].sum(-1) / measured["usage"].values.sum(-1)
    np.testing.assert_allclose(fast_share(measured), share)
    c = np.abs(measured["pair_profile"].values)
    np.testing.assert_allclose(band_share(measured, 22, 25), c[:, :, 22:26].sum(2) / c.sum(2), rtol=1e-5)


def test_the_map_is_the_mean_over_cells(smollm2, ids, measured, monkeypatch):
    whole = rp.attention_map(smollm2, 18, 6, ids[0])
    # a batch of another shape sums in another order; what that does to a score is the relative error of its weight
    np.testing.assert_allclose(measured["attention_map"], whole, rtol=1e-4, atol=1e-6)
    monkeypatch.setattr("rope_probe.probes.heads.PIXELS", 50)
    small = rp.heads(smollm2, tokens=ids[:, :110], layers=[3], attention_map=(3, 6))["attention_map"].values
    whole = rp.attention_map(smollm2, 3, 6, ids[0, :110])
    assert small.shape == (37, 37)  # cells of 3, the last of 2
    for row, column in ((0, 0), (20, 11), (36, 4), (36, 36)):
        cell = whole[3 * row : 3 * row + 3, 3 * column : 3 * column + 3]
        assert small[row, column] == pytest.approx(cell.mean(), abs=1e-7)


def test_a_layer_without_rotation_has_weights_and_no_band(one_thread):
    ds = rp.heads(rp.open(NAMED["Llama 4 text"].build()), tokens=token_ids(24))
    assert np.isfinite(ds["entropy"].values).all()
    assert np.isnan(dominant_pair(ds, "usage")[3]).all() and np.isnan(ds["pair_profile"].values[3]).all()
    values = summary(ds)
    assert values["not_rotating"] == [3] and values["groups"]["all"]["heads"] == 16
    with pytest.raises(ProbeError, match="none of the chosen layers rotates"):
        rp.heads(rp.open(NAMED["Llama 4 text"].build()), tokens=token_ids(24), layers=[3])


def test_layers_with_fewer_heads_are_padded(one_thread):
    ds = rp.heads(rp.open(NAMED["DeepSeek-V3"].build()), tokens=token_ids(24))
    assert ds["entropy"].shape == (2, 4) and np.isfinite(ds["induction"].values).all()
    ds["role"].values[1, 3] = ""
    assert members(ds, "all").sum() == 7 and members(ds, "semantic").sum() <= 7


def test_an_interrupt_keeps_whole_batches(one_thread):
    ckpt, ids = rp.open(NAMED["Llama 3"].build()), token_ids(24)

    def stop(done, total):
        if done == 1:
            raise KeyboardInterrupt

    part = rp.heads(ckpt, tokens=ids, batch=1, progress=stop)
    assert part.attrs["partial"] == 1 and part.attrs["segments"] == 1
    whole = rp.heads(ckpt, tokens=ids[:1])
    np.testing.assert_allclose(part["entropy"], whole["entropy"], rtol=1e-12)


def test_refusals(one_thread):
    ckpt, ids = rp.open(NAMED["Llama 3"].build()), token_ids(24)
    for options, words in (
        ({"attention_map": (7, 0)}, "layer 7 is not among"),
        ({"attention_map": (0, 4)}, "has heads 0 to 3"),
        ({"positional": 0}, "--positional is 0"),
        ({"sink": 1.5}, "--sink is 1.5"),
    ):
        with pytest.raises(UsageError, match=words):
            rp.heads(ckpt, tokens=ids, **options)
    with pytest.raises(UsageError, match="1 token"):
        rp.heads(ckpt, tokens=ids[:, :1])


# --- figures and command ---------------------------------------------------------------------------------------------


def test_figures_show_what_the_result_holds(measured):
    axes = heads_roles(measured)
    colors = axes[0].collections[0].get_array().reshape(30, 9)
    order = np.array(["positional", "induction", "sink", "other"])
    np.testing.assert_array_equal(order[colors.astype(int)], measured["role"].values)
    np.testing.assert_allclose(axes[3].collections[0].get_array().reshape(30, 9), measured["sink_weight"].values)
    left, right = heads_wavelength(measured)
    points = [line for line in left.lines if line.get_marker() == "o"]
    assert sum(len(line.get_xdata()) for line in points) == 270
    assert sum(len(line.get_xdata()) for line in right.lines) == 270
    chosen = heads_distance(measured, heads=[(18, 6), (16, 0)])
    usage = measured["usage"].values[18, 6]
    np.testing.assert_allclose(chosen[1].lines[0].get_ydata(), usage / usage.mean())
    c = measured["pair_profile"].values[18, 6]
    np.testing.assert_allclose(chosen[2].lines[0].get_ydata(), c[:, 1] - c[:, 7])  # 1 token back, 64 back
    mesh = heads_map(measured).collections[0]
    np.testing.assert_allclose(mesh.get_array().ravel(), np.maximum(measured["attention_map"], 1e-4).values.ravel())
    with pytest.raises(ProbeError, match="no head 18.9"):
        heads_distance(measured, heads=[(18, 9)])
    with pytest.raises(ProbeError, match="--map"):
        heads_map(measured.drop_vars("attention_map"))
    assert not FIGURES["heads"]["map"].applies(measured.drop_vars("attention_map"))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["Gemma 3 text", "gpt-oss", "Llama 4 text", "DeepSeek-V3"])
def test_figures_of_every_kind_of_model(name, one_thread):
    ds = rp.heads(rp.open(NAMED[name].build()), tokens=token_ids(24), attention_map=(1, 0))
    for plot in FIGURES["heads"].values():
        axes = np.ravel(np.array(plot(ds), dtype=object))
        axes[0].figure.canvas.draw()
        matplotlib.pyplot.close(axes[0].figure)


def test_command_writes_shows_and_speaks_json(run_cli, tiny_folder, tokens, tmp_path):
    out = tmp_path / "h.nc"
    figure = tmp_path / "h.png"
    options = ("heads", tiny_folder, "--tokens", tokens, "-o", out, "--map", "1.2")
    done = run_cli(*options, "--figure", figure)
    assert done.code == 0 and "semantic" in done.out and "induction" in done.out
    names = ["h.png", "h-distance.png", "h-map.png", "h-wavelength.png"]
    assert all((tmp_path / name).stat().st_size for name in names)
    again = run_cli("show", out)
    assert again.out.split("result")[0] == done.out.split("result")[0]
    values = json.loads(run_cli(*options, "--json").out)
    assert values["groups"]["all"]["heads"] == 12 and values["map"] == [1, 2]
    ds = rp.load(out)
    assert ds["role"].dtype.kind in "OUT" and all(
        ds[name].attrs["long_name"] and ds[name].attrs["units"] for name in ds.data_vars
    )


def test_command_refuses_before_it_opens(run_cli, no_opening):
    run_cli("heads", "demo:smollm2", "--map", "5").misused("LAYER.HEAD", "--map")
    run_cli("heads", "demo:smollm2", "--sink", "0").refused("--sink is 0", code=2)


# --- long ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("model", ["demo:smollm2", "demo:gemma3"])
def test_512_tokens_equal_the_eager_maps(model):
    ckpt = rp.open(model)
    ids = np.random.default_rng(0).integers(0, 49152, (2, 512))
    ds = rp.heads(ckpt, tokens=ids)
    sights = [in_window(window or 9999) for window in ds["window"].values]
    maps = eager_maps(ckpt.model, ids)
    compare(ds, maps, sights, rtol=1e-5)  # the activations of sdpa and of eager attention differ by 1e-6
    ckpt.decoder.set_attn_implementation("eager")
    compare(rp.heads(ckpt, tokens=ids), maps, sights)


@pytest.mark.slow
def test_8192_tokens_fit_in_3_gigabytes():
    import subprocess
    import sys

    code = (
        "import numpy as np, rope_probe as rp, resource\n"
        "ids = np.random.default_rng(0).integers(0, 49152, (1, 8192))\n"
        "rp.heads(rp.open('demo:smollm2'), tokens=ids, layers=range(6))\n"  # every layer takes the same
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    peak = int(done.stdout.split()[-1]) * (1 if sys.platform == "darwin" else 1024)
    assert peak < 3e9
