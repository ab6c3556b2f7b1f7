"""spectrum on SmolLM2: against sums over every (m, Δ), from projections; the single-tone experiment."""

import numpy as np
import pytest
import torch
from families import NAMED, token_ids

import rope_probe as rp
from rope_probe.probes.spectrum import _Profiles, spectrum
from rope_probe.tap import Tap

HEADS, KV, WIDTH, PAIRS = 9, 3, 64, 32  # SmolLM2


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(7).integers(0, 49152, (2, 512))


# -- an independent way: projections of the untouched model, rotated and summed here ------------------


def projections(model, tokens, layers, change=None):
    """Outputs of q_proj and k_proj as float64 pairs [batch, token, head, pair]; `change` acts on them in layer 0."""
    found, hooks = {}, []
    for index in {0, *layers} if change else layers:
        for name in ("q_proj", "k_proj"):

            def keep(_module, _args, out, index=index, name=name):
                if change and index == 0:
                    out = change(out)
                x = out.detach().reshape(*out.shape[:2], -1, WIDTH).double().numpy()
                found[index, name] = x[..., :PAIRS] + 1j * x[..., PAIRS:]
                return out if change else None

            module = getattr(model.model.layers[index].self_attn, name)
            hooks.append(module.register_forward_hook(keep))
    with torch.no_grad():
        model.model(torch.as_tensor(tokens), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def pair_sums(q, k, inv_freq, distances):
    """Mean over m of Re(q conj k e^{iωΔ}) for m − Δ ≥ 1, averaged over the batch: [head, pair, distance]."""
    length = q.shape[1]
    k = np.repeat(k, HEADS // KV, axis=2)
    out = np.empty((HEADS, PAIRS, distances))
    for lag in range(distances):
        product = q[:, lag + 1 :] * k[:, 1 : length - lag].conj()  # keys from position 1 on
        out[:, :, lag] = (product.mean(axis=(0, 1)) * np.exp(1j * inv_freq * lag)).real
    return out / np.sqrt(WIDTH)


def profile_from_maps(q, k, inv_freq, distances):
    """The same summed over pairs, from whole maps of scores and their diagonals: [head, distance]."""
    turn = np.exp(1j * np.arange(q.shape[1])[:, None, None] * inv_freq)
    k = np.repeat(k, HEADS // KV, axis=2)
    q, k = ((x * turn).transpose(0, 2, 1, 3) for x in (q, k))
    scores = (q @ k.conj().transpose(0, 1, 3, 2)).real.mean(0) / np.sqrt(WIDTH)
    return np.stack([scores.diagonal(-lag, 1, 2)[:, 1:].mean(1) for lag in range(distances)], axis=-1)


def inverse_frequencies(model):
    return model.model.rotary_emb.inv_freq.double().numpy()


def windowed(profile):
    """Power in bins 0 … N/2, by a DFT matrix."""
    size = profile.shape[-1]
    wave = np.exp(-2j * np.pi * np.outer(np.arange(size), np.arange(size // 2 + 1)) / size)
    hann = np.sin(np.pi * np.arange(size) / (size - 1)) ** 2
    return np.abs((profile - profile.mean(-1, keepdims=True)) * hann @ wave) ** 2


def around(frequency, size):
    return np.abs(np.arange(size // 2 + 1) - frequency * size / (2 * np.pi)) <= 2.5


@pytest.fixture(scope="module")
def layers():
    return [0, 3, 11]


@pytest.fixture(scope="module")
def direct(smollm2, tokens, layers):
    seen = projections(smollm2.model, tokens, layers)
    inv_freq = inverse_frequencies(smollm2.model)
    return {i: pair_sums(seen[i, "q_proj"], seen[i, "k_proj"], inv_freq, 256) for i in layers}


@pytest.fixture(scope="module")
def measured(smollm2, tokens, layers):
    return spectrum(smollm2, tokens=tokens, layers=layers, keep_pairs=True)


def test_profiles_equal_direct_sums_from_projection_hooks(measured, direct):
    assert measured["profile"].shape == (3, HEADS, 256)
    for index, pairs in direct.items():
        peak = np.abs(pairs).max(axis=(1, 2), keepdims=True)
        error = np.abs(measured["pair_profile"].sel(layer=index).values - pairs) / peak
        assert error.max() <= 1e-4
        profile = pairs.sum(1)
        error = np.abs(measured["profile"].sel(layer=index).values - profile) / np.abs(profile).max(-1, keepdims=True)
        assert error.max() <= 1e-4


@pytest.mark.slow
def test_profiles_of_all_layers_from_the_command_line(smollm2, tokens, tmp_path, run_cli):
    np.save(tmp_path / "T.npy", tokens)
    done = run_cli("spectrum", "demo:smollm2", "--tokens", tmp_path / "T.npy", "-o", "s.nc", "--keep-pairs")
    assert done.code == 0, done
    ds = rp.load("s.nc")
    seen = projections(smollm2.model, tokens, range(30))
    inv_freq = inverse_frequencies(smollm2.model)
    for index in range(30):
        pairs = pair_sums(seen[index, "q_proj"], seen[index, "k_proj"], inv_freq, 256)
        for name, wanted in (("pair_profile", pairs), ("profile", pairs.sum(1))):
            error = np.abs(ds[name].sel(layer=index).values - wanted).max(-1) / np.abs(wanted).max(-1)
            assert error.max() <= 1e-4, (index, name)


def test_purity_and_fit_follow_their_definitions(measured, direct, smollm2):
    inv_freq = inverse_frequencies(smollm2.model)
    for index, pairs in direct.items():
        here = measured.sel(layer=index)
        power = windowed(pairs)
        angle = np.arange(256)
        for pair in (0, 4, 8, 15, 24, 31):
            share = power[:, pair, around(inv_freq[pair], 256)].sum(-1) / power[:, pair].sum(-1)
            np.testing.assert_allclose(here["purity"][:, pair], share, atol=1e-4)
            columns = np.stack([np.ones(256), np.cos(inv_freq[pair] * angle), np.sin(inv_freq[pair] * angle)], -1)
            left = np.linalg.lstsq(columns, pairs[:, pair].T, rcond=None)[0]
            residual = ((pairs[:, pair].T - columns @ left) ** 2).sum(0)
            fit = 1 - residual / (pairs[:, pair].var(-1) * 256)
            np.testing.assert_allclose(here["tone_r2"][:, pair], fit, atol=2e-4)
        np.testing.assert_allclose(here["power"], windowed(pairs.sum(1)), rtol=1e-3, atol=1e-4 * power.max())
        slow = inv_freq < 2 * np.pi / 8192
        expected = (pairs[:, slow] ** 2).sum() / (pairs**2).sum()
        assert float(here["power_below_floor"]) == pytest.approx(expected, rel=1e-4)
    np.testing.assert_array_equal(measured["resolvable"], np.tile(inv_freq * 256 >= 4 * np.pi, (3, 1)))
    np.testing.assert_allclose(measured["frequency"][0], 2 * np.pi * np.arange(129) / 256)


def test_damage_is_weighted_by_usage(measured, smollm2, tokens, layers):
    usage = rp.bands(smollm2, tokens=tokens, layers=layers)["usage"].values
    np.testing.assert_allclose(measured["usage"], usage, rtol=1e-5)
    weight = usage * measured["resolvable"].values[:, None]
    expected = 1 - (weight * measured["purity"].values).sum((1, 2)) / weight.sum((1, 2))
    np.testing.assert_allclose(measured["damage"], expected, rtol=1e-5)
    assert (measured["damage_se"] > 0).all()


def test_batches_merge_to_the_same_result(smollm2, tokens, measured, layers):
    again = spectrum(smollm2, tokens=tokens, layers=layers, keep_pairs=True, batch=1)
    assert measured.attrs["options"] != again.attrs["options"]
    for name in measured.data_vars:
        scale = float(np.nanmax(np.abs(measured[name].values)))
        np.testing.assert_allclose(again[name], measured[name], rtol=1e-4, atol=1e-5 * scale, err_msg=name)


def test_layers_and_distances_are_options(smollm2, tokens, measured):
    part = spectrum(smollm2, tokens=tokens, layers=[3], distances=100)
    assert part["layer"].values.tolist() == [3] and part.sizes["distance"] == 100
    np.testing.assert_allclose(part["profile"][0], measured["profile"].sel(layer=3)[:, :100], rtol=1e-4, atol=1e-4)
    assert "pair_profile" not in part


def test_pairs_of_text_are_pure_in_the_first_layers(smollm2):
    ds = spectrum(smollm2, segments=4, length=512, layers=range(4))
    medians = np.median(ds["purity"].values, axis=1)
    assert (medians[:, :9] >= 0.98).all()
    assert (medians[:, 16:] < 0.98).any()


@pytest.mark.slow
def test_pairs_of_text_are_pure_in_every_layer(smollm2):
    ds = spectrum(smollm2, segments=4, length=1024)
    assert (np.median(ds["purity"].values, axis=1)[:, :9] >= 0.98).all()


# -- one tone --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def injected(smollm2, tokens):
    return spectrum(smollm2, tokens=tokens, layers=[0], inject=[4, 20], depth=3)


def test_experiment_equals_the_one_made_with_hooks(smollm2, tokens, injected):
    inv_freq = inverse_frequencies(smollm2.model)
    none = projections(smollm2.model, tokens, [0, 1, 2])

    def only_pair_4(out):
        heads = torch.zeros_like(out).unflatten(-1, (-1, WIDTH))
        heads[..., [4, 4 + PAIRS]] = out.unflatten(-1, (-1, WIDTH))[..., [4, 4 + PAIRS]]
        return heads.flatten(-2)

    tone = projections(smollm2.model, tokens, [0, 1, 2], only_pair_4)
    near = around(inv_freq[4], 256)
    for layer in (0, 1, 2):
        power, still = [], []
        for seen in (tone, none):
            q, k = seen[layer, "q_proj"], seen[layer, "k_proj"]
            power.append(windowed(profile_from_maps(q, k, inv_freq, 256)))
            still.append(windowed(profile_from_maps(q, k, 0 * inv_freq, 256)))
        leakage = [1 - p[:, near].sum(-1) / p.sum(-1) for p in power]
        here = injected.sel(inject=4, layer=layer)
        np.testing.assert_allclose(here["leakage"], leakage[0], atol=2e-4)
        np.testing.assert_allclose(here["leakage_none"], leakage[1], atol=2e-4)
        if layer == 0:
            assert here[["excess", "carried", "carried_elsewhere"]].to_array().isnull().all()
            continue
        np.testing.assert_allclose(here["excess"], leakage[0] - leakage[1], atol=4e-4)
        carried = still[0][:, near].sum(-1) / still[1][:, near].sum(-1)
        elsewhere = still[0][:, ~near].sum(-1) / still[1][:, ~near].sum(-1)
        np.testing.assert_allclose(here["carried"], carried, rtol=5e-3)
        np.testing.assert_allclose(here["carried_elsewhere"], elsewhere, rtol=5e-3)
        np.testing.assert_allclose(here["selectivity"], carried / elsewhere, rtol=5e-3)


def test_an_injected_tone_is_clean_where_it_is_injected(injected):
    first = injected.sel(inject=4, layer=0)
    assert float(first["leakage"].mean()) < 0.02
    assert 0 <= float(first["leakage_tone"]) < 0.005
    # without injection the first layer has all its tones: the share of one says nothing
    assert float(first["leakage_none"].mean()) > 0.5


def test_the_layers_of_the_experiment_are_always_there_and_no_more_are_run(smollm2, tokens):
    smollm2.geometry(64)  # measured once, on the whole model
    calls = []
    hooks = [
        layer.mlp.register_forward_hook(lambda *args, index=index: calls.append(index))
        for index, layer in enumerate(smollm2.model.model.layers)
    ]
    ds = spectrum(smollm2, tokens=tokens[:, :64], layers=[1], inject=[3], depth=2)
    for hook in hooks:
        hook.remove()
    assert ds["layer"].values.tolist() == [0, 1] and ds["inject_layer"].values.tolist() == [0, 1]
    assert calls == [0, 0, 0]  # profiles, without injection, with it: nothing beyond the attention of layer 1


def test_all_injects_every_rotating_pair():
    ds = spectrum(rp.open(NAMED["Llama 3"].build()), tokens=token_ids(32), inject="all")
    assert ds["inject"].values.tolist() == list(range(8))


def test_attention_taken_out_removes_the_tone(smollm2, tokens):
    ds = spectrum(smollm2, tokens=tokens[:, :128], layers=[0], inject=[4], ablate=("attention", "mlp"), depth=3)
    assert ds["ablate"].values.tolist() == ["attention", "mlp"]
    gone = ds.sel(ablate="attention", inject=4)
    assert gone["leakage_ablated"].sel(layer=0).isnull().all()  # nothing comes before it
    for layer in (1, 2):
        np.testing.assert_allclose(gone["carried_ablated"].sel(layer=layer), 1, rtol=1e-6)
        np.testing.assert_allclose(gone["excess_ablated"].sel(layer=layer), 0, atol=1e-9)
    kept = ds.sel(ablate="mlp", inject=4, layer=1)
    assert (kept["carried_ablated"] != 1).all() and not np.allclose(
        kept["leakage_ablated"], ds["leakage"].sel(inject=4, layer=1)
    )


def test_nothing_is_left_of_a_run(smollm2, tokens):
    ids = torch.as_tensor(tokens[:, :64])

    def logits():
        with torch.no_grad():
            return smollm2.model(ids, use_cache=False).logits

    before = logits()
    spectrum(smollm2, tokens=tokens[:, :64], layers=[0, 5], inject=[2], ablate=("norm",), weights=True)
    assert torch.equal(logits(), before)


def test_watching_changes_no_output(smollm2, tokens):
    ids = torch.as_tensor(tokens[:, :96])
    layers = list(smollm2.geometry(96).layers)
    observer = _Profiles(layers, 48, 96, 2, weigh=True)
    observer.begin(0, 2)
    with torch.inference_mode():
        bare = smollm2.decoder(ids, use_cache=False).last_hidden_state
        with Tap(smollm2.decoder, observer):
            watched = smollm2.decoder(ids, use_cache=False).last_hidden_state
    assert torch.equal(watched, bare)
    observer.merge(observer.blocks(), 0, 2)
    assert len(observer.sums) == 4 * len(layers)


@pytest.mark.usefixtures("one_thread")
def test_bfloat16_gives_nearly_the_same():
    model = NAMED["Llama 3"].build()
    ids = token_ids(60).numpy()
    exact = spectrum(rp.open(model), tokens=ids)
    for parameter in model.parameters():  # the frequencies stay as they are
        parameter.data = parameter.data.to(torch.bfloat16)
    rough = spectrum(rp.open(model), tokens=ids)
    assert rough.attrs["dtype"] == "bfloat16"
    peak = float(np.abs(exact["profile"]).max())
    np.testing.assert_allclose(rough["profile"], exact["profile"], atol=0.05 * peak)
