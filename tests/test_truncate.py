"""truncate against frequencies set by hand and the likelihood of full logits."""

import copy
import json
import signal

import numpy as np
import pytest
import torch
import xarray as xr
from conftest import tiny_model
from families import FAMILIES, NAMED, token_ids

import rope_probe as rp
from rope_probe.cli import common
from rope_probe.errors import ProbeError, UsageError
from rope_probe.interventions import truncate as cut
from rope_probe.likelihood import segment_nll, token_nll
from rope_probe.probes import summary
from rope_probe.probes.truncate import KEEP
from rope_probe.probes.truncate_summary import critical_keep


def full_logits_nll(model, ids):
    """Every logit of a segment at once, softmax in float64, shape (segment, token - 1)."""
    ids = torch.as_tensor(ids)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits.double()
    return -logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


# -- likelihood --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_likelihood_equals_full_logits(name):
    """Soft-caps, logit scales, biases and heads of every family, whatever the chunk."""
    model, ids = NAMED[name].build(), token_ids(NAMED[name].lengths[-1])
    expected = full_logits_nll(model, ids)
    for chunk in (None, 1, 5):
        torch.testing.assert_close(token_nll(model, ids, chunk).double(), expected, rtol=1e-6, atol=2e-6)
    assert expected.std() > 1e-3
    torch.testing.assert_close(full_logits_nll(model, ids), expected, rtol=0, atol=0)  # the head is the model's again


def test_likelihood_of_a_real_model(smollm2):
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 49152, (2, 96)))
    expected = full_logits_nll(smollm2.model, ids)
    found = token_nll(smollm2.model, ids, chunk=40).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # logits themselves are rounded by rows at a time
    torch.testing.assert_close(found.mean(1), expected.mean(1), rtol=0, atol=1e-6)
    torch.testing.assert_close(segment_nll(smollm2.model, ids), expected.mean(1), rtol=0, atol=1e-6)


def test_the_head_never_sees_a_whole_segment():
    model, seen = tiny_model(), []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    token_nll(model, token_ids(24) % 97, chunk=7)
    assert seen == [7, 7, 7, 2]


def test_a_decoder_without_a_head_is_refused():
    with pytest.raises(ProbeError, match="no head"):
        token_nll(tiny_model().model, token_ids(5))


def test_a_likelihood_that_is_not_finite_is_refused():
    model = tiny_model()
    model.lm_head.weight.data[3] = float("nan")
    with pytest.raises(ProbeError, match="not finite"):
        segment_nll(model, token_ids(5) % 97)


# -- numbers, on a real checkpoint ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def words(smollm2):
    from rope_probe.texts import segments_for

    return segments_for(smollm2, segments=2, length=96).ids


@pytest.fixture(scope="module")
def measured(smollm2, words):
    return rp.truncate(
        smollm2, tokens=words, batch=1, keep=[1, 0.5, 0], floor=[1.0], knockout=["unrotate", "remove"], pairs=[0, 24]
    )


def test_ratios_equal_frequencies_set_by_hand(smollm2, words, measured):
    inv_freq = smollm2.model.model.rotary_emb.inv_freq
    before = inv_freq.clone()
    stops = [slice(32, None), slice(16, None), slice(0, None), slice(20, None), slice(0, 1), slice(24, 25)]
    try:  # floor: 1e5^(-j/32) < 2π/8192 from pair 20 on (the critical dimension, 40)
        for row, stop in enumerate(stops):
            inv_freq.copy_(before)
            inv_freq[stop] = 0
            expected = full_logits_nll(smollm2.model, words).mean(1).numpy()
            np.testing.assert_allclose(measured["nll"][row], expected, rtol=0, atol=2e-6)
    finally:
        inv_freq.copy_(before)
    intact = full_logits_nll(smollm2.model, words).mean(1).numpy()
    np.testing.assert_allclose(measured["nll_intact"], intact, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(measured["nll"][0], measured["nll_intact"])
    assert measured["turning"][:, 0].values.tolist() == [32, 16, 0, 20, 31, 31, 31, 31]


def test_removal_equals_projections_without_the_pair(smollm2, words, measured):
    """Rows i and i + 32 of every head's 64 in q_proj and k_proj set to 0."""
    for row, pair in ((6, 0), (7, 24)):
        model = copy.deepcopy(smollm2.model)
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj"):
                weight = getattr(layer.self_attn, name).weight.data
                weight.view(-1, 64, weight.shape[1])[:, [pair, pair + 32]] = 0
        expected = full_logits_nll(model, words).mean(1).numpy()
        np.testing.assert_allclose(measured["nll"][row], expected, rtol=0, atol=2e-6)


def test_statistics_follow_their_definitions(measured):
    nll, intact = measured["nll"].values, measured["nll_intact"].values
    values = summary(measured)
    for row, one in enumerate(values["settings"]):
        difference = nll[row] - intact
        assert one["ratio"] == pytest.approx(np.exp(nll[row].mean() - intact.mean()), rel=1e-12)
        error = np.exp(difference.mean()) * abs(difference[0] - difference[1]) / 2
        assert one["ratio_se"] == pytest.approx(error, abs=1e-12)
    assert values["perplexity"] == pytest.approx(np.exp(intact.mean()))
    assert [one["kind"] for one in values["settings"]] == ["keep"] * 3 + ["floor"] + ["unrotate"] * 2 + ["remove"] * 2
    assert values["settings"][2]["ratio"] > 5  # without any rotation little is left
    removed = next(one for one in values["knockout"] if one["kind"] == "remove")
    added = (nll[6:] - intact).mean(1)
    assert removed["added"] == pytest.approx(sorted(added, reverse=True))
    assert removed["order"] == [(0, 24)[row] for row in np.argsort(-added)]


def test_the_band_beside_it_is_that_of_bands(smollm2, words, measured):
    ds = rp.bands(smollm2, tokens=words)
    expected = rp.summary(ds)
    values = summary(measured)
    assert values["i_band"] == pytest.approx(expected["i_band"]) and values["share"] == pytest.approx(
        expected["i_band"] / 32
    )
    assert values["keep"][0]["share"]["full_attention"] == values["share"]
    np.testing.assert_allclose(measured["usage_mean"], ds["usage"].values.mean(1), rtol=2e-5)


def test_the_model_is_as_before(smollm2, words, measured):
    again = segment_nll(smollm2.model, torch.as_tensor(words[:1]))
    np.testing.assert_array_equal(again, measured["nll_intact"][:1])


def test_result_file_holds_everything(tmp_path, measured):
    rp.save(measured, tmp_path / "t.nc")
    again = rp.load(tmp_path / "t.nc")
    xr.testing.assert_identical(again.drop_vars("rotates"), measured.drop_vars("rotates"))
    assert json.dumps(summary(again)) == json.dumps(summary(measured))
    for name in again.data_vars:
        assert again[name].attrs["long_name"] and again[name].attrs["units"]


# -- settings, on a tiny checkpoint ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_ckpt(tiny_folder):
    return rp.open(tiny_folder)


IDS = np.random.default_rng(0).integers(2, 97, (4, 16))


def test_batches_and_a_given_bands_file_change_nothing(tiny_ckpt, tmp_path):
    one = rp.truncate(tiny_ckpt, tokens=IDS, batch=1, keep=[0.5, 0])
    rp.save(rp.bands(tiny_ckpt, tokens=IDS), tmp_path / "b.nc")
    three = rp.truncate(tiny_ckpt, tokens=IDS, batch=3, keep=[0.5, 0], bands=tmp_path / "b.nc")
    np.testing.assert_allclose(one["nll"], three["nll"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(one["usage_mean"], three["usage_mean"], rtol=1e-5)


def test_the_default_grid(tiny_ckpt):
    ds = rp.truncate(tiny_ckpt, tokens=IDS)
    assert ds["value"].values.tolist() == list(KEEP)
    assert ds["turning"][:, 0].values.tolist() == [int(r * 8) for r in KEEP]


@pytest.mark.usefixtures("one_thread")
def test_each_type_of_layer_is_cut_alone():
    ckpt, ids = rp.open(NAMED["Gemma 3 text"].build()), token_ids(13)
    ds = rp.truncate(ckpt, tokens=ids, keep=[0.25], layer_type=["sliding_attention", "full_attention"])
    assert ds["where"].values.tolist() == ["sliding attention", "full attention"]
    for row, kind in enumerate(("sliding_attention", "full_attention")):
        model = copy.deepcopy(ckpt.model)
        getattr(model.model.rotary_emb, f"{kind}_inv_freq")[2:] = 0
        np.testing.assert_allclose(ds["nll"][row], full_logits_nll(model, ids).mean(1), rtol=0, atol=1e-6)
    assert ds["turning"].values.tolist() == [[2, 2, 8], [8, 8, 2]]
    assert [one["turning"] for one in summary(ds)["settings"]] == [[2, 2], [2, 2]]  # of the layers that are cut
    keep = summary(ds)["keep"]
    assert [list(one["share"]) for one in keep] == [["sliding_attention"], ["full_attention"]]


@pytest.mark.usefixtures("one_thread")
def test_some_layers_from_the_fast_end():
    ckpt, ids = rp.open(NAMED["Llama 3"].build()), token_ids(13)
    ds = rp.truncate(ckpt, tokens=ids, keep=[0.5], reverse=True, layers=[1])
    with cut(ckpt, keep=0.5, reverse=True, layers=[1]):
        expected = full_logits_nll(ckpt.model, ids).mean(1)
    np.testing.assert_allclose(ds["nll"][0], expected, rtol=0, atol=1e-6)
    assert ds["where"].item() == "layer 1" and ds["turning"].values.tolist() == [[8, 4]]


@pytest.mark.filterwarnings("ignore:segments of .* are longer")
@pytest.mark.usefixtures("one_thread")
def test_a_ladder_that_follows_the_length():
    """Dynamic NTK: every segment has its own frequencies back, and the model its memory."""
    ckpt, ids = rp.open(NAMED["Llama with dynamic NTK"].build()), token_ids(24)
    kept = ckpt.model.model.rotary_emb.inv_freq.clone()
    ds = rp.truncate(ckpt, tokens=ids, batch=1, keep=[1.0, 0.5])
    assert torch.equal(ckpt.model.model.rotary_emb.inv_freq, kept)
    np.testing.assert_allclose(ds["nll"][0], full_logits_nll(ckpt.model, ids).mean(1), rtol=0, atol=1e-6)
    assert (ds["inv_freq"].values[0, 1] < kept[1].item()).all()


def test_pairs_that_stand_still_already():
    """Gemma 4: 12 of 16 pairs of the full layers do not turn, and have no rotation to lose."""
    ckpt, ids = rp.open(NAMED["Gemma 4 text"].build()), token_ids(13)
    ds = rp.truncate(ckpt, tokens=ids, knockout=["unrotate"], layer_type="full_attention")
    assert ds["value"].values.tolist() == [0, 1, 2, 3]
    ds = rp.truncate(ckpt, tokens=ids, knockout=["remove"], pairs=[15], layer_type="full_attention")
    assert abs(ds["ratio"].item() - 1) > 1e-4


def test_critical_keep_is_the_smallest_harmless_one():
    def one(value, ratio, kind="keep"):
        return {"kind": kind, "value": value, "ratio": ratio}

    assert critical_keep([one(1, 1), one(0.8, 1.05), one(0.7, 1.051), one(0.1, 1, "floor")]) == 0.8
    assert critical_keep([one(0.5, 2.0)]) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": [1.5]}, "--keep 1.5"),
        ({"keep": [float("nan")]}, "--keep nan"),
        ({"floor": [-1]}, "--floor -1"),
        ({"knockout": ["erase"]}, "unrotate and remove"),
        ({"pairs": [3]}, "--knockout"),
        ({"knockout": ["remove"], "pairs": [8]}, "pairs 0 to 7"),
        ({"layers": [5]}, "no layer 5"),
        ({"layer_type": "sliding_attention"}, "full_attention"),
    ],
)
def test_refusals(tiny_ckpt, options, words):
    with pytest.raises(UsageError, match=words):
        rp.truncate(tiny_ckpt, tokens=IDS, **options)


def test_bands_of_another_model_are_refused(tiny_ckpt):
    other = rp.bands(rp.open(tiny_model(num_hidden_layers=2)), tokens=IDS)
    with pytest.raises(UsageError, match="another model"):
        rp.truncate(tiny_ckpt, tokens=IDS, bands=other)
    with pytest.raises(UsageError, match="one of bands"):
        rp.truncate(tiny_ckpt, tokens=IDS, bands=rp.truncate(tiny_ckpt, tokens=IDS, keep=[0]))


# -- the command ----------------------------------------------------------------------------------------------


@pytest.fixture
def command(run_cli, tiny_folder, tokens):
    return lambda *options: run_cli("truncate", tiny_folder, "--tokens", tokens, *options)


def test_command_writes_table_file_and_figures(command):
    done = command(
        "--keep", "1,0.5,0", "--floor", "1", "--knockout", "unrotate,remove", "-o", "t.nc", "--figure", "t.png"
    )
    assert (done.code, done.err) == (0, "")
    for words in ("intact:", "critical keep", "i_band / pairs", "not rotated", "rank correlation", "result   t.nc"):
        assert words in done.out
    assert [line for line in done.out.splitlines() if line.startswith("figure")] == [
        "figure   t.png",
        "figure   t-floor.png",
        "figure   t-knockout.png",
    ]


def test_show_gives_the_same_table_and_figure(command, run_cli):
    first = command("--knockout", "remove", "--pairs", "0-2", "-o", "t.nc", "--figure", "a.svg")
    again = run_cli("show", "t.nc", "--figure", "b.svg")
    assert again.out == first.out.replace("a.svg", "b.svg")
    assert open("a.svg").read() == open("b.svg").read()


def test_json(command):
    values = json.loads(command("--keep", "0.5", "--json").out)
    assert values["settings"][0]["turning"] == [4, 4]
    assert values["keep"][0]["tried"] == [0.5]


@pytest.mark.usefixtures("no_opening")
def test_wrong_arguments_are_refused_before_the_model_is_opened(command):
    command("--keep", "2").refused("--keep 2", code=2)
    command("--knockout", "erase").refused("erase", code=2)
    command("--pairs", "1").refused("--knockout", code=2)
    command("--bands", "none.nc").refused("none.nc", code=1)
    assert command("--keep", "a,b").code == 2


@pytest.mark.parametrize(("pressed", "segments", "settings"), [(8, 2, 2), (2, 1, 1), (1, None, None)])
def test_ctrl_c_keeps_what_was_measured(command, monkeypatch, pressed, segments, settings):
    """Whole segments; in the first batch the settings that are done; nothing where there is neither."""

    def press(self, done, total):
        assert total == 16
        if done == 4 + pressed:  # 4 for the bands; then intact, 0.5 and 0 of each segment in turn
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(common.Progress, "__call__", press)
    done = command("--batch", "1", "--keep", "0.5,0", "-o", "t.nc")
    assert done.code == 1
    if segments is None:
        assert "nothing more was written" in done.err
        return
    cut_short = rp.load("t.nc")
    assert (cut_short.sizes["segment"], cut_short.sizes["setting"]) == (segments, settings)
    assert cut_short.attrs["partial"] == 1 and np.isfinite(cut_short["nll"]).all()
    assert "interrupted" in done.out


def test_ctrl_c_after_the_last_setting_changes_nothing(command, monkeypatch):
    def press(self, done, total):
        if done == total:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(common.Progress, "__call__", press)
    done = command("--keep", "0.5,0", "-o", "t.nc")
    assert (done.code, done.err) == (0, "")
    assert rp.load("t.nc").attrs["partial"] == 0


# -- on text ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_breaks_where_its_band_is(smollm2):
    """1.00 at keep 0.80, a few per cent at the band (pairs 22 to 24), a third more at 0.5, on 1024 tokens."""
    ds = rp.truncate(smollm2, segments=4, length=1024, keep=[0.8, 0.75, 22 / 32, 0.5])
    at_80, at_75, at_22, half = ds["ratio"].values
    assert at_80 == pytest.approx(1, abs=0.005)
    assert 1.0 < at_75 < 1.02 and 1.01 < at_22 < 1.06
    assert half == pytest.approx(1.35, abs=0.1)


@pytest.mark.slow
def test_gemma3_fits_and_needs_its_bands():
    ds = rp.truncate(rp.open("demo:gemma3"), segments=1, length=512, keep=[0.9, 0.5], layer_type="sliding_attention")
    assert ds["ratio"][0] < 1.05 < ds["ratio"][1]


# -- figures ----------------------------------------------------------------------------------------------------


def test_figures_draw_what_the_result_holds(measured):
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    from rope_probe.plots import truncate_floor, truncate_keep, truncate_knockout

    def points(ax):
        return next(line for line in ax.lines if len(line.get_xdata()) > 1 and line.get_marker() == "o")

    excess = 100 * (measured["ratio"].values - 1)
    ax = truncate_keep(measured)
    assert points(ax).get_xdata().tolist() == [0, 16, 32]  # slowest cut first, in order of what is kept
    np.testing.assert_allclose(points(ax).get_ydata(), excess[[2, 1, 0]])
    assert ax.get_ylim()[1] > excess.max() and "pairs 19.9 to 21.9" in ax.figure.texts[0].get_text().replace("\n", " ")
    usage, unrotated, removed = truncate_knockout(measured)
    added = (measured["nll"].values - measured["nll_intact"].values).mean(1)
    for panel, rows in ((unrotated, [4, 5]), (removed, [6, 7])):
        assert points(panel).get_xdata().tolist() == [0, 24]
        np.testing.assert_allclose(points(panel).get_ydata(), added[rows])
    assert usage.lines[0].get_ydata().mean() == pytest.approx(1)
    _, own = plt.subplots()
    assert truncate_floor(measured.isel(setting=[3]), ax=own) is own
    with pytest.raises(ProbeError, match="no panel 'unrotate'"):
        truncate_knockout(measured.isel(setting=[6, 7]), panels=("unrotate",))
    assert not truncate_keep.applies(measured.isel(setting=[3])) and truncate_floor.applies(measured)
    plt.close("all")
