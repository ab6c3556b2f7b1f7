"""Every family, through its real class: the tap changes nothing, and the numbers are those of the projections."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from families import FAMILIES, NAMED, VOCABULARY, token_ids
from projections import outside_norms, pair_norms, projected

from rope_probe.checkpoints import open_checkpoint
from rope_probe.probes.bands import bands
from rope_probe.rotary import config_geometry
from rope_probe.scaling import inverse_frequencies
from rope_probe.tap import Tap

LENGTHS = [(family.name, length) for family in FAMILIES for length in family.lengths]

pytestmark = pytest.mark.usefixtures("one_thread")

every_family = pytest.mark.parametrize("name", NAMED)
every_length = pytest.mark.parametrize(("name", "length"), LENGTHS)


@cache
def checkpoint(name):
    return open_checkpoint(NAMED[name].build())


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def watch(decoder):
    seen = []
    return Tap(decoder, lambda call: seen.append(call.layer)), seen


@every_family
@pytest.mark.parametrize("attention", ["own", "eager"])
def test_output_is_the_same_with_the_tap(name, attention):
    ckpt, ids = checkpoint(name), token_ids(13)
    own = ckpt.model.config._attn_implementation
    ckpt.model.set_attn_implementation(own if attention == "own" else "eager")
    try:
        plain = logits(ckpt.model, ids)
        tap, seen = watch(ckpt.decoder)
        with tap:
            tapped = logits(ckpt.model, ids)
    finally:
        ckpt.model.set_attn_implementation(own)
    assert seen == list(range(len(NAMED[name].layers)))
    assert torch.isfinite(plain).all() and plain.std() > 0
    assert torch.equal(plain, tapped)


@every_length
def test_the_future_leaves_the_past_alone(name, length):
    family, ckpt, ids = NAMED[name], checkpoint(name), token_ids(length)
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 7) % VOCABULARY
    tap, seen = watch(ckpt.decoder)
    with tap:
        first, second = (logits(ckpt.model, x) for x in (ids, other))
    assert len(seen) == 2 * len(family.layers)
    assert not torch.allclose(first[:, -1], second[:, -1], atol=1e-3)
    if family.exact:
        assert torch.equal(first[:, :-1], second[:, :-1])
    else:  # experts are given their tokens in batches of another size, which rounds differently
        torch.testing.assert_close(first[:, :-1], second[:, :-1], rtol=1e-5, atol=1e-5)


def reference(family, length, index):
    """Frequencies and attention scaling of one layer, from the closed forms."""
    layer, options = family.layers[index], family.configuration()
    parameters = {"rope_theta": layer.base, **layer.rope}
    longest = options.get_text_config().max_position_embeddings
    return inverse_frequencies(parameters, layer.dim, length=length, max_position_embeddings=longest)


@every_length
@pytest.mark.parametrize("source", ["config", "live"])
def test_geometry(name, length, source):
    family = NAMED[name]
    if source == "config":
        layers = config_geometry(family.configuration(), length).layers
    else:
        layers = checkpoint(name).geometry(length).layers
    assert [layer.layer for layer in layers] == list(range(len(family.layers)))
    for index, (found, expected) in enumerate(zip(layers, family.layers, strict=True)):
        assert (found.layer_type, found.window) == (expected.kind, expected.window)
        assert found.rotates == expected.rotates
        assert found.base == expected.base
        assert found.length == expected.length
        assert (found.heads, found.kv_heads, found.head_dim) == (expected.heads, expected.kv_heads, expected.head_dim)
        assert found.rotary_dim == expected.dim
        assert found.offset == (found.head_dim - found.rotary_dim if family.last else 0)
        if not expected.rotates:
            assert found.pairs == 0 and found.rope_type == "none"
            continue
        assert found.rope_type == expected.rope.get("rope_type", "default")
        assert (found.layout, found.layout_rotated) == (family.layout, family.rotated or family.layout)
        inv_freq, scaling = reference(family, length, index)
        np.testing.assert_allclose(found.inv_freq, inv_freq, rtol=1e-6)
        assert scaling == pytest.approx(expected.scaling, rel=1e-9)
        assert found.attention_scaling == pytest.approx(expected.scaling, rel=1e-9)


def statistics(family, model, ids):
    """Per layer and side: norm, first, top and the norm outside the rotary part, from the projections."""
    for index, sides in projected(family, model, ids).items():
        layer, found = family.layers[index], {}
        for side, x in zip("qk", sides, strict=True):
            if x.shape[-1] > layer.dim:
                found[f"{side}_norm_unrotated"] = outside_norms(x, layer.dim, family.last)[:, :, 1:].mean((0, 2))
            if not layer.rotates:
                continue
            norms = pair_norms(x, family.layout, layer.dim, family.last)
            inv_freq, _ = reference(family, ids.shape[1], index)
            top = norms[:, :, 1:, : int((inv_freq > 0).sum())].argmax(-1)
            found[f"{side}_norm"] = norms[:, :, 1:].mean((0, 2))
            found[f"{side}_norm_first"] = norms[:, :, 0].mean(0)
            found[f"{side}_top"] = torch.nn.functional.one_hot(top, layer.dim // 2).sum((0, 2))
        yield index, found


def assert_bands_equal(ds, expected):
    """Every statistic of a layer: 1e-5 relative, tops to the token, nothing but NaN beyond its heads and pairs."""
    for index, found in expected:
        for variable, values in found.items():
            got = ds[variable].sel(layer=index).values
            inside = got[tuple(slice(n) for n in values.shape)]
            if variable.endswith("top"):
                np.testing.assert_array_equal(inside, values.numpy(), err_msg=f"{variable} of layer {index}")
            else:
                np.testing.assert_allclose(inside, values.numpy(), rtol=1e-5, err_msg=f"{variable} of layer {index}")
            assert np.isfinite(got).sum() == values.numel()


@pytest.mark.filterwarnings("ignore:segments of .* are longer")  # dynamic NTK runs beyond its length on purpose
@every_length
def test_bands_equal_the_projections(name, length):
    family, ckpt, ids = NAMED[name], checkpoint(name), token_ids(length)
    expected = list(statistics(family, ckpt.model, ids))
    rotating = [i for i, layer in enumerate(family.layers) if layer.rotates]
    assert [i for i, found in expected if "k_norm" in found and "q_top" in found] == rotating
    ds = bands(ckpt, tokens=ids, batch=2)
    assert_bands_equal(ds, expected)
    for index in set(range(len(family.layers))) - set(rotating):
        assert np.isnan(ds["k_norm"].sel(layer=index)).all()
    np.testing.assert_array_equal(ds["rotates"], [layer.rotates for layer in family.layers])
    np.testing.assert_array_equal(ds["base"], [layer.base for layer in family.layers])
    np.testing.assert_array_equal(ds["window"], [layer.window for layer in family.layers])


WRONG = {
    "three equal blocks": ("Pythia", {"split": "thirds"}),
    "half-split for interleaved": ("GPT-J", {"layout": "half"}),
    "interleaved for half-split": ("Llama 2", {"layout": "interleaved"}),
    "first channels for last": ("DeepSeek-V3 not interleaved", {"last": False}),
    "projection without its norm": ("Qwen3", {"split": "bare"}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_cut_would_be_seen(wrong):
    """Negative control: the comparison fails for the mistakes that give plausible numbers."""
    name, changes = WRONG[wrong]
    family, ckpt, ids = NAMED[name], checkpoint(name), token_ids(13)
    ds = bands(ckpt, tokens=ids)
    assert_bands_equal(ds, statistics(family, ckpt.model, ids))
    with pytest.raises(AssertionError):
        assert_bands_equal(ds, statistics(replace(family, **changes), ckpt.model, ids))


@pytest.mark.parametrize("name", ["TinyLlama", "SmolLM2", "Gemma", "DeepSeek-V3", "Gemma 4 text"])
def test_usage_pairs_each_head_with_the_keys_it_reads(name):
    """Head h reads kv head h // group; tiling the kv heads gives other numbers."""
    family, ckpt, ids = NAMED[name], checkpoint(name), token_ids(13)
    ds = bands(ckpt, tokens=ids)
    for index, found in statistics(family, ckpt.model, ids):
        q, k = found["q_norm"], found["k_norm"]
        group = len(q) // len(k)
        usage = ds["usage"].sel(layer=index).values[: len(q), : q.shape[1]]
        np.testing.assert_allclose(usage, q * k.repeat_interleave(group, 0), rtol=2e-5)
        if len(k) > 1:
            assert not np.allclose(usage, q * k.repeat(group, 1), rtol=1e-2)


@pytest.mark.filterwarnings("ignore:segments of .* are longer")
def test_dynamic_ntk_does_not_remember_a_longer_text():
    """Transformers keeps the frequencies of the longest text; what is measured depends on its own length only."""
    model = NAMED["Llama with dynamic NTK"].build()
    ckpt = open_checkpoint(model)
    before = bands(ckpt, tokens=token_ids(13))
    logits(model, token_ids(24))
    kept = model.model.rotary_emb.inv_freq.clone()
    for other in (ckpt, open_checkpoint(model)):
        ds = bands(other, tokens=token_ids(13))
        np.testing.assert_array_equal(ds["inv_freq"], before["inv_freq"])
        assert ds.drop_attrs().equals(before.drop_attrs())
    assert torch.equal(model.model.rotary_emb.inv_freq, kept)
    assert not np.allclose(kept, before["inv_freq"][0], rtol=1e-2)
