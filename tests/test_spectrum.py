"""spectrum on models: against sums over every (m, Δ), from projections and from eager attention."""

import sys
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch
import xarray as xr
from families import NAMED, VOCABULARY, token_ids

import rope_probe as rp
from rope_probe.errors import ProbeError, UsageError
from rope_probe.modules import decoder_of
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
    ds = spectrum(tiny("Llama 3"), tokens=token_ids(32), inject="all")
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
    observer.commit()
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


# -- another independent way: q and k that eager attention was given --------------------------------


@cache
def tiny(name):
    return rp.open(NAMED[name].build())


@contextmanager
def eager_calls(model):
    """What every layer's own eager attention was given, and the weights it made."""
    decoder = decoder_of(model)
    homes = {
        sys.modules[type(m).__module__]
        for m in decoder.modules()
        if hasattr(sys.modules[type(m).__module__], "eager_attention_forward")
    }
    kept, originals = [], {home: home.eager_attention_forward for home in homes}
    before = decoder.config._attn_implementation
    model.set_attn_implementation("eager")
    for home, original in originals.items():

        def record(module, q, k, v, mask, *args, original=original, **kwargs):
            out, weights = original(module, q, k, v, mask, *args, **kwargs)
            scaling = kwargs.get("scaling", args[0] if args else None)
            kept.append((module.layer_idx, q.double(), k.double(), mask, scaling, weights))
            return out, weights

        home.eager_attention_forward = record
    try:
        yield kept
    finally:
        for home, original in originals.items():
            home.eager_attention_forward = original
        model.set_attn_implementation(before)


def diagonals(values, seen, distances):
    """Mean of [batch, head, m, n] over the visible (m, m − Δ) with m − Δ ≥ 1; NaN where there are none."""
    out = np.full((values.shape[1], distances), np.nan)
    for lag in range(distances):
        rows = [m for m in range(lag + 1, values.shape[2]) if seen[m, m - lag]]
        if rows:
            out[:, lag] = np.stack([values[:, :, m, m - lag] for m in rows]).mean(axis=(0, 1))
    return out


def by_eager_attention(name, ids, distances):
    """Profile, profile of each pair, and mean weight by distance of every layer, from whole maps."""
    family = NAMED[name]
    model = tiny(name).model
    with eager_calls(model) as calls, torch.no_grad():
        decoder_of(model)(ids, use_cache=False)
    found = {}
    for index, q, k, mask, scaling, weights in calls:
        layer = family.layers[index]
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        seen = (mask[0, 0] > -1).numpy() if mask is not None else np.tri(q.shape[2], dtype=bool)
        scaling = q.shape[-1] ** -0.5 if scaling is None else scaling

        def profile(channels, q=q, k=k, seen=seen, scaling=scaling):
            scores = (q[..., channels] @ k[..., channels].transpose(-1, -2) * scaling).numpy()
            return diagonals(scores, seen, distances)

        dim, start = layer.dim, layer.head_dim - layer.dim if family.last else 0
        half = (family.rotated or family.layout) == "half"
        members = [[i, i + dim // 2] if half else [2 * i, 2 * i + 1] for i in range(dim // 2)]
        pairs = [profile([start + channel for channel in pair]) for pair in members] if layer.rotates else []
        found[index] = profile(slice(None)), pairs, diagonals(weights.numpy(), seen, distances)
    return found


FAMILIES = [
    "Llama 3",
    "Mistral",  # windows
    "Gemma 2",  # windows, soft-cap, its own scale
    "Gemma 3 text",  # two kinds of layers
    "Gemma 4 text",  # pairs that stand still, heads that differ by layer
    "SmolLM3",  # a layer without rotation
    "Llama 4 text",  # chunks, a layer without rotation
    "Pythia",  # partial rotary
    "GPT-J",  # interleaved
    "DeepSeek-V2",  # one rotary key for all heads
    "DeepSeek-V3",
    "Llama with YaRN",  # attention_scaling
    "gpt-oss",  # sink logits
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_kind_of_layer_equals_its_whole_maps(name):
    family, ids = NAMED[name], token_ids(29)
    ds = spectrum(tiny(name), tokens=ids.numpy(), distances=20, keep_pairs=True, weights=True)
    expected = by_eager_attention(name, ids, 20)
    assert sorted(expected) == ds["layer"].values.tolist() == list(range(len(family.layers)))
    for index, (profile, pairs, weights) in expected.items():
        layer, here = family.layers[index], ds.sel(layer=index)
        reach = min(20, layer.window or 20)
        assert int(here["distances"]) == reach and bool(here["rotates"]) == layer.rotates
        kept = [("profile", here["profile"], profile), ("weights", here["weight_profile"], weights)]
        kept += [(f"pair {pair}", here["pair_profile"][:, pair], wanted) for pair, wanted in enumerate(pairs)]
        for what, got, wanted in kept:
            assert np.isnan(wanted[:, reach:]).all()
            limit = 1e-4 * np.nanmax(np.abs(wanted))
            np.testing.assert_allclose(got.values[: len(wanted)], wanted, rtol=0, atol=limit, err_msg=what)
        assert np.isfinite(here["power"].values[: len(profile), : reach // 2 + 1]).all()
        assert np.isnan(here["power"].values[:, reach // 2 + 1 :]).all()
        turning = here["inv_freq"].values > 0
        standing = 12 if family.name == "Gemma 4 text" and layer.kind == "full_attention" else 0
        assert turning.sum() == (layer.dim // 2 - standing if layer.rotates else 0)
        assert (
            np.isnan(here["purity"].values[:, ~turning]).all() and np.isnan(here["tone_r2"].values[:, ~turning]).all()
        )
        assert np.isfinite(here["purity"].values[: len(profile), turning]).all()
        if not layer.rotates:
            assert here["purity"].isnull().all() and here["damage"].isnull() and not here["resolvable"].any()
            assert here["pair_profile"].isnull().all()


@pytest.mark.usefixtures("one_thread")
def test_a_model_of_constant_vectors_is_made_of_pure_tones():
    """Embeddings all alike: q and k do not vary, so every pair is the tone that the rotation makes it."""
    model = NAMED["Llama 3"].build()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight[5].expand(VOCABULARY, -1))
    with pytest.warns(rp.ProbeWarning, match="longer than the 64"):
        ds = spectrum(rp.open(model), tokens=np.full((2, 256), 5), distances=200, inject=[0, 1])
    assert ds["resolvable"].values.sum(axis=1).tolist() == [2, 2]
    purity, limit, _ = xr.broadcast(ds["purity"], ds["purity_tone"], ds["usage"])
    np.testing.assert_allclose(purity[..., :2], limit[..., :2], atol=2e-3)
    assert (ds["tone_r2"].values > 0.9999).all()
    np.testing.assert_allclose(ds["damage"], ds["damage_tone"], atol=2e-3)
    leakage, limit = xr.broadcast(ds["leakage"].sel(layer=0), ds["leakage_tone"].sel(layer=0))
    np.testing.assert_allclose(leakage, limit, atol=2e-3)


# -- what is refused, and what is kept --------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"distances": 4}, "4 distances .* from 8 to 31"),
        ({"distances": 32}, "32 distances"),
        ({"window": "kaiser"}, "kaiser.*hann, hamming, blackman, none"),
        ({"inject": [9]}, "--inject 9: layer 0.*pairs 0 to 7"),
        ({"inject": []}, "names no pair"),
        ({"inject": [1], "depth": 0}, "--depth is 0"),
        ({"inject": [1], "ablate": "mlp", "depth": 1}, "--depth is 1: give 2 or more"),
        ({"inject": [1], "ablate": ["heads"]}, "not 'heads'"),
        ({"ablate": ["mlp"]}, "give --inject"),
    ],
)
def test_wrong_arguments_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        spectrum(tiny("Llama 3"), tokens=token_ids(32).numpy(), **options)


def test_layers_without_rotation_alone_are_refused():
    with pytest.raises(ProbeError, match="none of the chosen layers rotates"):
        spectrum(tiny("SmolLM3"), tokens=token_ids(32).numpy(), layers=[3])


def test_what_is_not_finite_is_refused():
    model = NAMED["Llama 3"].build()
    ckpt = rp.open(model)
    ckpt.geometry(32)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = np.nan
    with pytest.raises(ProbeError, match="queries or keys of layer 1 are not finite"):
        spectrum(ckpt, tokens=token_ids(32).numpy())


def test_an_interrupt_keeps_what_was_measured():
    ids = token_ids(32, 6).numpy()

    def stop(done, total):
        if done == 4:
            raise KeyboardInterrupt

    options = {"batch": 2, "inject": [1]}
    part = spectrum(tiny("Llama 3"), tokens=ids, progress=stop, **options)
    assert part.attrs["partial"] == 1 and part.attrs["segments"] == 4
    whole = spectrum(tiny("Llama 3"), tokens=ids[:4], **options)
    assert whole.attrs["partial"] == 0 and whole.attrs["tokens_sha256"] == part.attrs["tokens_sha256"]
    for name in ("profile", "purity", "damage", "leakage", "carried"):
        np.testing.assert_allclose(part[name], whole[name], rtol=1e-4, atol=1e-6)
    assert np.isfinite(part["damage_se"]).all()
