"""spectrum on every kind of layer, against whole eager maps; what is refused, and what is kept."""

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
from rope_probe.probes.spectrum import spectrum

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
