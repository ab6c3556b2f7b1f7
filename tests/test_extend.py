"""extend against the same weights loaded with the other configuration, full logits, and `generate`."""

import json

import numpy as np
import pytest
import torch
import xarray as xr
from conftest import tiny_model
from families import LONGROPE_SCALING, NAMED, longrope, rope, token_ids
from test_interventions_rotation import model_of, with_config
from test_passkey import character_tokenizer
from test_truncate import full_logits_nll

import rope_probe as rp
from rope_probe import theory
from rope_probe.errors import ProbeError, ProbeWarning, UsageError
from rope_probe.interventions import rope as other_rope
from rope_probe.likelihood import answer_scores
from rope_probe.probes import summary
from rope_probe.probes.extend_grid import make_grid

LENGTHS = [13, 48, 80]  # of 64 that the tiny models claim


@pytest.fixture(scope="module")
def ids():
    return token_ids(80)


def opened(name):
    return rp.open(model_of(name))


def parameters(base, kind, factor):
    """Rope parameters as a config would have them."""
    found = rope(base, {"rope_type": kind})
    if kind != "default":
        found["factor"] = factor
    if kind in ("yarn", "llama3"):
        found["original_max_position_embeddings"] = 64
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return found


# -- likelihood, on tiny models --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(ids):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    scalings = ["none", "linear", "dynamic", "yarn", "llama3"]
    ds = rp.extend(
        opened("Llama 2"),
        tokens=ids,
        batch=2,
        lengths=LENGTHS,
        base=[500, "match"],
        scaling=scalings,
        factor=4,
        samples=0,
    )
    torch.set_num_threads(threads)
    return ds


@pytest.mark.usefixtures("one_thread")
def test_every_setting_equals_the_model_loaded_with_that_configuration(measured, ids):
    assert measured["base_asked"].values.tolist() == ["own"] + ["500.0"] * 5 + ["match"] * 5
    for row in range(measured.sizes["setting"]):
        for column, length in enumerate(LENGTHS):
            base = {"own": 1e4, "match": float(length)}.get(str(measured["base_asked"].values[row]), 500.0)
            kind = {"own": "default", "none": "default"}.get(
                str(measured["scaling"].values[row]), str(measured["scaling"].values[row])
            )
            expected = full_logits_nll(with_config("Llama 2", parameters(base, kind, 4.0)), ids[:, :length])
            np.testing.assert_allclose(measured["nll"][row, column], expected.mean(1), rtol=0, atol=1e-6)
            for bucket in range(measured.sizes["bucket"]):
                first, last = (int(measured[f"position_{end}"][bucket]) for end in ("first", "last"))
                mean = measured["nll_position"].values[row, column, :, bucket]
                if last < length:
                    np.testing.assert_allclose(mean, expected[:, first - 1 : last].mean(1), rtol=0, atol=2e-6)
                else:
                    assert np.isnan(mean).all()
    assert len(np.unique(measured["nll"].values[:, 2, 0].round(4))) == 11  # no two settings are the same


def test_buckets_are_whole_and_end_at_the_lengths(measured):
    first, last = measured["position_first"].values, measured["position_last"].values
    assert first[0] == 1 and last[-1] == 79 and (first[1:] == last[:-1] + 1).all()
    assert {12, 47, 79} <= set(last.tolist())
    sizes = last - first + 1
    for column, length in enumerate(LENGTHS):
        inside = last < length
        total = (measured["nll_position"].values[:, column][..., inside] * sizes[inside]).sum(-1) / (length - 1)
        np.testing.assert_allclose(total, measured["nll"].values[:, column], rtol=1e-12)


def test_ratios_are_paired(measured):
    difference = measured["nll"].values - measured["nll"].values[0]
    np.testing.assert_allclose(measured["ratio"], np.exp(difference.mean(-1)), rtol=1e-12)
    error = np.exp(difference.mean(-1)) * difference.std(-1, ddof=1) / np.sqrt(3)
    np.testing.assert_allclose(measured["ratio_se"], error, atol=1e-12)
    assert measured["intact"].values.tolist() == [1] + [0] * 10


def test_the_bound_beside_it_is_that_of_theory(measured):
    for row in range(measured.sizes["setting"]):
        base, scaling = str(measured["base_asked"].values[row]), str(measured["scaling"].values[row])
        for column, length in enumerate(LENGTHS):
            theta = {"own": 1e4, "match": float(length)}.get(base, 500.0)
            kind = "default" if scaling in ("own", "none") else scaling
            frequencies, _ = theory.inverse_frequencies(
                parameters(theta, kind, 4.0), 16, length=length, max_position_embeddings=64
            )
            assert measured["base_used"].values[row, column].tolist() == [theta, theta]
            assert measured["bound"].values[row, column].tolist() == [theory.bound_length(frequencies)] * 2
    one = summary(measured)["settings"][0]["lengths"][1]
    assert one["bound"] == {"full_attention": int(measured["bound"].values[0, 1, 0])}
    assert one["holds"]["full_attention"] == (one["bound"]["full_attention"] >= 48)


def test_the_model_is_as_before(measured, ids):
    np.testing.assert_allclose(measured["nll"][0, 2], full_logits_nll(model_of("Llama 2"), ids).mean(1), atol=1e-6)
    assert model_of("Llama 2").config.rope_parameters["rope_theta"] == 1e4


@pytest.mark.usefixtures("one_thread")
def test_a_text_is_read_once_where_its_length_changes_nothing(ids):
    told = []

    def progress(done, total):
        told.append((done, total))

    rp.extend(
        opened("Llama 2"),
        tokens=ids,
        lengths=LENGTHS,
        base=[500, 1e4, "match"],
        scaling=["none", "dynamic"],
        samples=0,
        progress=progress,
    )
    # 500 and 1e4: once; match and dynamic: dynamic stretches beyond 64 only, so 13 is read off 48
    assert told[-1] == (3 * (80 + 128 + 80 + 128 + 141 + 141),) * 2
    assert told[0] == (0, told[-1][1])


@pytest.mark.usefixtures("one_thread")
def test_longrope_of_the_config_reads_every_length_by_itself():
    """Its frequencies switch above 16 tokens: the beginning of a long text is not a short one."""
    ids, model = token_ids(24), model_of("Phi-3.5")
    ds = rp.extend(rp.open(model), tokens=ids, lengths=[13, 24], scaling=["longrope", "none", "own"], samples=0)
    plain = with_config("Phi-3.5", rope(1e4))
    for column, length in enumerate((13, 24)):
        own = full_logits_nll(model, ids[:, :length]).mean(1)
        np.testing.assert_allclose(ds["nll"][0, column], own, rtol=0, atol=1e-6)
        np.testing.assert_allclose(ds["nll"][2, column], own, rtol=0, atol=1e-6)
        expected = full_logits_nll(plain, ids[:, :length]).mean(1)
        np.testing.assert_allclose(ds["nll"][1, column], expected, rtol=0, atol=1e-6)
    prefix = full_logits_nll(model, ids)[:, :12].mean(1)
    assert np.abs(ds["nll"].values[0, 0] - prefix.numpy()).max() > 1e-3
    assert ds.sizes["setting"] == 3 and longrope(16)["rope_type"] == "longrope" and LONGROPE_SCALING > 1


@pytest.mark.usefixtures("one_thread")
def test_two_types_of_layers():
    """Gemma 3: every layer runs under the base, each type with its own bound and its own reach."""
    ds = rp.extend(opened("Gemma 3 text"), tokens=token_ids(40), lengths=[40], base=["own", 300.0], samples=0)
    values = summary(ds)
    own, other = (one["lengths"][0] for one in values["settings"])
    assert own["base"] == {"sliding_attention": 1e4, "full_attention": 1e6}
    assert other["base"] == {"sliding_attention": 300.0, "full_attention": 300.0}
    bound = theory.bound_length(theory.ladder(300.0, 8))
    assert other["bound"] == {"sliding_attention": bound, "full_attention": bound} and 8 <= bound < 40
    assert other["holds"] == {"sliding_attention": True, "full_attention": False}  # a window of 8
    assert values["layers"] == {"sliding_attention": [0, 1], "full_attention": [2]}


# -- retrieval -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def retrieved(smollm2):
    return rp.extend(
        smollm2,
        segments=1,
        lengths=[32],
        base=["own", "match"],
        passkey_lengths=[100],
        depths=[0, 1],
        samples=1,
        keys=[1, 2],
        seed=5,
    )


def test_exact_match_is_that_of_generate(smollm2, retrieved):
    from rope_probe.probes.passkey import PromptWriter

    write, found = PromptWriter(smollm2.tokenizer), []
    for row, base in enumerate((None, 100.0)):
        for column, depth in enumerate((0, 1)):
            prompt = write(100, depth, 2, 0, 5)
            given = torch.as_tensor(prompt.ids[None, : -prompt.answer])
            change = other_rope(smollm2, base=base) if base else torch.no_grad()
            with change:
                written = smollm2.model.generate(
                    given, attention_mask=torch.ones_like(given), max_new_tokens=prompt.answer, do_sample=False
                )[0, given.shape[1] :]
                logits = smollm2.model(torch.as_tensor(prompt.ids[None])).logits[0].double().log_softmax(-1)
            place = {"setting": row, "length": 1, "keys": 1, "depth": column, "sample": 0}
            exact = smollm2.tokenizer.decode(written).strip() == prompt.key
            assert retrieved["exact_match"][place] == exact
            answer = torch.as_tensor(prompt.ids[-prompt.answer :])
            expected = logits[-prompt.answer - 1 : -1].gather(-1, answer[:, None]).sum().item()
            assert retrieved["key_logprob"][place].item() == pytest.approx(expected, abs=1e-4)
            right = (logits[-prompt.answer - 1 : -1].argmax(-1) == answer).double().mean().item()
            assert retrieved["key_right"][place].item() == pytest.approx(right)
            assert retrieved["key_position"][{k: v for k, v in place.items() if k != "setting"}] == prompt.position
            found.append(exact)
    assert set(found) == {True, False}  # found by the model as it is, and lost under the base 100


def test_what_was_not_asked_for_is_not_there(retrieved):
    assert retrieved["length"].values.tolist() == [32, 100]
    for name, there, missing in (("nll", 0, 1), ("exact_match", 1, 0)):
        values = retrieved[name].values
        assert np.isfinite(values[:, there]).all() and np.isnan(values[:, missing]).all()
    values = summary(retrieved)
    own = values["settings"][0]
    assert [len(one["retrieval"]) for one in own["lengths"]] == [0, 2]
    entry = own["lengths"][1]["retrieval"][1]
    cell = retrieved["exact_match"].values[0, 1, 1]
    assert (entry["keys"], entry["exact_match"], entry["by_depth"]) == (2, cell.mean(), cell[:, 0].tolist())
    assert entry["exact_match_se"] is None  # of one sample


def test_scores_of_answers_are_exact_on_a_tiny_model():
    model, ids = tiny_model(), token_ids(24) % 97
    lost, likeliest = answer_scores(model, ids, 5)
    expected = full_logits_nll(model, ids)[:, -5:]
    torch.testing.assert_close(lost.double(), expected, rtol=0, atol=2e-6)
    with torch.no_grad():
        best = model(ids).logits[:, -6:-1].argmax(-1)
    assert torch.equal(likeliest, best == ids[:, -5:])
    lost, likeliest = answer_scores(model, torch.cat([ids[:, :-1], best[:, -1:]], 1), 1)
    assert likeliest.all()


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base": [0.5]}, "--base 0.5"),
        ({"base": ["mach"]}, "--base mach"),
        ({"base": [float("inf")]}, "--base inf"),
        ({"scaling": ["spiral"]}, "--scaling spiral"),
        ({"scaling": ["yarn"], "factor": 0.5}, "--factor 0.5"),
        ({"base": [1e5], "factor": 2}, "--factor is of a scaling"),
        ({"lengths": [1]}, "--lengths 1"),
        ({"passkey_lengths": [99.5]}, "--passkey-lengths 99.5"),
        ({"depths": [1.5]}, "--depths 1.5"),
        ({"samples": -1}, "--samples -1"),
        ({"samples": 0, "depths": [0]}, "--samples 0 asks for no retrieval"),
        ({"keys": [0]}, "--keys 0"),
        ({"keys": [99]}, "whole numbers, 1 to"),
    ],
)
def test_what_no_model_can_have_is_refused(options, words):
    with pytest.raises(UsageError, match=words):
        make_grid(**options)


@pytest.fixture
def unread(monkeypatch):
    """Fails a test that reads anything."""
    from rope_probe.probes import extend_run

    def read(*args):
        raise AssertionError("a text was read")

    monkeypatch.setattr(extend_run, "token_nll", read)
    monkeypatch.setattr(extend_run, "answer_scores", read)


@pytest.mark.usefixtures("unread", "one_thread")
@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        (
            "Llama 2",
            {"base": [1e5], "scaling": ["none", "longrope"]},
            UsageError,
            "base 100000, longrope: .*short_factor",
        ),
        ("GPT-J", {"base": [1e5]}, ProbeError, "no rope parameters"),
        ("Llama 2", {"samples": 1}, ProbeError, "tokenizer"),
    ],
)
def test_what_this_model_cannot_have_is_refused_before_anything_is_read(name, options, error, words):
    with pytest.raises(error, match=words):
        rp.extend(opened(name), tokens=token_ids(13), lengths=[13], **{"samples": 0, **options})


@pytest.mark.usefixtures("unread", "one_thread")
def test_a_prompt_too_short_for_its_key_is_refused():
    ckpt = rp.open(tiny_model(), tokenizer=character_tokenizer())
    with pytest.raises(UsageError, match="too short"):
        rp.extend(ckpt, tokens=token_ids(13) % 97, lengths=[13], passkey_lengths=[40])


# -- the file --------------------------------------------------------------------------------------------


def test_result_file_holds_everything(tmp_path, retrieved):
    rp.save(retrieved, tmp_path / "e.nc")
    again = rp.load(tmp_path / "e.nc")
    xr.testing.assert_identical(again.drop_vars("rotates"), retrieved.drop_vars("rotates"))
    assert json.dumps(summary(again)) == json.dumps(summary(retrieved))
    for name in again.data_vars:
        assert again[name].attrs["long_name"] and again[name].attrs["units"]


def test_a_likelihood_that_is_not_finite_keeps_what_was_measured(ids):
    """The model breaks under the second setting (its base): the first one stays, with a warning."""
    ckpt = rp.open(NAMED["Llama 2"].build())

    def broken(module, args, output):
        nan = ckpt.model.config.rope_parameters["rope_theta"] == 500
        return output * float("nan") if nan else output

    ckpt.model.lm_head.register_forward_hook(broken)
    with pytest.warns(ProbeWarning, match="stopped after 1 of 2 readings"):
        ds = rp.extend(ckpt, tokens=ids, batch=1, lengths=[80], base=[500, 1e4], samples=0)
    assert (ds["base_asked"].item(), ds.attrs["partial"]) == ("10000.0", 1)


# -- figures ---------------------------------------------------------------------------------------------


def test_figures_draw_what_the_result_holds(measured, retrieved):
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    from rope_probe.plots import extend_base, extend_position, extend_retrieval

    axes = extend_position(measured)
    assert len(axes) == 6  # own, none, linear, dynamic, yarn, llama3
    line = next(line for line in axes[0].lines if line.get_marker() == "o")
    np.testing.assert_allclose(line.get_ydata(), measured["nll_position"].values[0, 2].mean(0))
    perplexity, found = extend_base(retrieved)
    drawn = {(point.get_xdata()[0], point.get_ydata()[0]) for point in found.lines if point.get_marker() in "oD"}
    exact = retrieved["exact_match"].values[:, :, 0].mean((-1, -2))
    assert drawn == {(1e5, exact[0, 1]), (100, exact[1, 1])}
    assert not extend_retrieval.applies(measured) and extend_retrieval.applies(retrieved)
    with pytest.raises(ProbeError, match="no retrieval"):
        extend_retrieval(measured)
    with pytest.raises(ProbeError, match="no retrieval to draw"):
        extend_base(measured, panels=("retrieval",))
    one = extend_retrieval(retrieved, panels=("own scaling, among 2 keys",))
    assert one.collections[0].get_array().shape == (2, 1)
    np.testing.assert_array_equal(one.collections[0].get_array(), retrieved["exact_match"].values[0, 1:, 1, :, 0].T)
    plt.close("all")
