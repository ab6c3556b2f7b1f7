"""The rotation of a live model is measured, whatever its code and configuration say."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from families import NAMED, SLIDING, tiny, token_ids
from projections import projected

from rope_probe import rotary
from rope_probe.checkpoints import open_checkpoint
from rope_probe.errors import ProbeError
from rope_probe.probes.bands import bands
from rope_probe.rotary import config_geometry, read_geometry
from rope_probe.tap import Tap
from rope_probe.verify import rotate, to_pairs, verified_geometry

pytestmark = pytest.mark.usefixtures("one_thread")


def layouts(geometry):
    return {(layer.layout, layer.layout_rotated) for layer in geometry.layers}


# -- pair layout -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "model_type", "right", "wrong"),
    [
        ("Llama 3", "llama", "half", "interleaved"),
        ("Pythia", "gpt_neox", "half", "interleaved"),
        ("GPT-J", "gptj", "interleaved", "half"),
        ("Llama 4 text", "llama4_text", "interleaved", "half"),
        ("DeepSeek-V2", "deepseek_v2", "interleaved", "half"),
    ],
)
def test_a_wrong_layout_is_put_right(monkeypatch, name, model_type, right, wrong):
    """A family declared with the other layout: the declaration is read, the measurement holds."""
    family = NAMED[name]
    ckpt = open_checkpoint(family.build())
    expected = bands(ckpt, tokens=token_ids(13))
    monkeypatch.setitem(rotary.LAYOUTS, model_type, (wrong, wrong))
    assert layouts(config_geometry(family.configuration(), 13)) == {(wrong, wrong)}
    live = [layer for layer in verified_geometry(ckpt.decoder, 13).layers if layer.rotates]
    assert live and {layer.layout_rotated for layer in live} == {right}
    again = bands(open_checkpoint(ckpt.model), tokens=token_ids(13))
    np.testing.assert_array_equal(again["k_norm"], expected["k_norm"])


@pytest.mark.parametrize("name", ["Llama 3", "GPT-J", "Pythia", "DeepSeek-V3", "Phi-3.5", "Gemma 4 text", "Cohere 2"])
def test_unrotating_gives_the_projections(name):
    """q and k turned back by the layer's own angles are those of the projections, times the attention scaling."""
    family, ids = NAMED[name], token_ids(13)
    ckpt = open_checkpoint(family.build())
    expected = projected(family, ckpt.model, ids)
    calls = {}
    with Tap(ckpt.decoder, lambda call: calls.update({call.layer: call})) as tap:
        tap.run(ids)
    for layer in ckpt.geometry(13).layers:
        q, k = expected[layer.layer]
        for x, after in ((q, calls[layer.layer].q), (k, calls[layer.layer].k[:, : layer.kv_heads])):
            before = rotate(after, layer, torch.arange(13), inverse=True)
            if not layer.rotates:
                torch.testing.assert_close(before, x, rtol=1e-5, atol=1e-5)
                continue
            dim = layer.rotary_dim
            x = x[..., -dim:] if family.last else x[..., :dim]
            pairs = (x[..., : dim // 2], x[..., dim // 2 :]) if family.layout == "half" else (x[..., ::2], x[..., 1::2])
            for mine, projection in zip(to_pairs(before, layer), pairs, strict=True):
                torch.testing.assert_close(mine, projection * layer.attention_scaling, rtol=1e-5, atol=2e-5)


def test_low_precision_is_measured_too(monkeypatch):
    """bfloat16 weights pass, and still show a wrong layout."""
    config = NAMED["Llama 3"].configuration()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    assert layouts(verified_geometry(model.model, 64)) == {("half", "half")}
    monkeypatch.setitem(rotary.LAYOUTS, "llama", ("interleaved", "interleaved"))
    assert layouts(verified_geometry(model.model, 64)) == {("half", "half")}


# -- layers that do not rotate -------------------------------------------------------------------------


def unturned(model, index):
    """The model whose layer `index` is handed cos = 1 and sin = 0: nothing in its class says so."""
    attention = model.model.layers[index].self_attn
    forward = attention.forward

    def still(*args, position_embeddings, **kwargs):
        cos, sin = position_embeddings
        return forward(*args, position_embeddings=(torch.ones_like(cos), torch.zeros_like(sin)), **kwargs)

    attention.forward = still
    return model


def test_a_layer_that_stands_still_is_found():
    model = unturned(NAMED["Llama 3"].build(), 1)
    assert [layer.rotates for layer in read_geometry(model.model, 13).layers] == [True, True]
    ckpt = open_checkpoint(model)
    first, second = ckpt.geometry(13).layers
    assert first.rotates and not second.rotates
    assert (second.pairs, second.rotary_dim, second.rope_type) == (0, 0, "none")
    ds = bands(ckpt, tokens=token_ids(13))
    assert np.isfinite(ds["k_norm"][0]).all() and np.isnan(ds["k_norm"][1]).all()
    k = projected(NAMED["Llama 3"], model, token_ids(13))[1][1]
    np.testing.assert_allclose(ds["k_norm_unrotated"][1], k[:, :, 1:].norm(dim=-1).mean((0, 2)), rtol=1e-5)


def test_a_guard_on_a_call_argument_is_left_to_the_measurement():
    """OLMo Hybrid rotates `if position_embeddings is not None`: only the run shows that they are."""
    options = {"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 4}
    options |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    model = tiny("OlmoHybrid", **options, linear_value_head_dim=8, rope_parameters={"rope_theta": 1e4})
    assert [layer.rotates for layer in open_checkpoint(model).geometry(13).layers] == [True]


def test_a_layer_that_only_the_run_shows_to_stand_still():
    """Lara Mini hands its full layers no position embeddings; its attention class does not know."""
    types = ["sliding_attention", "full_attention"]
    model = tiny("LaraMini", layer_types=types, head_dim=16, sliding_window=8, num_experts=4, moe_intermediate_size=32)
    assert [layer.rotates for layer in open_checkpoint(model).geometry(13).layers] == [True, False]


def test_layers_without_softmax_attention_are_left_out():
    options = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    options |= {"shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    model = tiny("Qwen3Next", num_hidden_layers=4, **options, linear_key_head_dim=16, linear_value_head_dim=16)
    ckpt = open_checkpoint(model)
    for geometry in (ckpt.geometry(13), config_geometry(model.config, 13)):
        assert [(layer.layer, layer.rotates, layer.rotary_dim) for layer in geometry.layers] == [(3, True, 4)]
    ds = bands(ckpt, tokens=token_ids(13))
    assert ds.sizes["layer"] == 1 and ds["layer"] == 3 and ds["k_top"].sum() == 2 * 3 * 12


# -- temperature -----------------------------------------------------------------------------------------


def ministral(beta):
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": beta}
    return tiny("Ministral3", head_dim=16, sliding_window=8, max_position_embeddings=16, rope_parameters=rope)


def test_queries_with_a_temperature_that_grows_with_the_position():
    """Ministral 3 multiplies its queries by 1 + β ln(1 + ⌊m / original length⌋): the rotation is still found."""
    ckpt, ids = open_checkpoint(ministral(0.5)), token_ids(13)
    geometry = ckpt.geometry(13)
    assert layouts(geometry) == {("half", "half")} and all(layer.rotates for layer in geometry.layers)
    ds = bands(ckpt, tokens=ids)
    expected = projected(replace(NAMED["Mistral"], layers=(SLIDING, SLIDING)), ckpt.model, ids)
    temperature = 1 + 0.5 * torch.log1p(torch.arange(13) // 4)
    for layer in (0, 1):
        q, k = (torch.hypot(x[..., :8], x[..., 8:]) for x in expected[layer])
        np.testing.assert_allclose(ds["k_norm"][layer], k[:, :, 1:].mean((0, 2)), rtol=1e-5)
        hot = (q * temperature[:, None])[:, :, 1:]
        np.testing.assert_allclose(ds["q_norm"][layer], hot.mean((0, 2)), rtol=1e-5)


def test_temperature_of_layers_that_do_not_rotate():
    """Llama 4 heats the queries of its NoPE layers; they still count as not rotating."""
    family = NAMED["Llama 4 text"]
    family = replace(family, options=family.options | {"floor_scale": 2, "attn_scale": 0.5})
    ckpt, ids = open_checkpoint(family.build()), token_ids(13)
    assert [layer.rotates for layer in ckpt.geometry(13).layers] == [True, True, True, False]
    q = projected(family, ckpt.model, ids)[3][0].norm(dim=-1)
    hot = q * (1 + 0.5 * torch.log1p(torch.floor((torch.arange(13) + 1) / 2)))
    found = bands(ckpt, tokens=ids)["q_norm_unrotated"].sel(layer=3)
    np.testing.assert_allclose(found, hot[:, :, 1:].mean((0, 2)), rtol=1e-5)


def test_a_temperature_of_single_channels_is_no_temperature():
    model = NAMED["Llama 3"].build()
    module, forward = model.model.rotary_emb, model.model.rotary_emb.forward

    def uneven(x, position_ids):
        cos, sin = forward(x, position_ids)
        heat = 1 + 0.1 * position_ids[..., None] * (torch.arange(16) % 8 < 4)
        return cos * heat, sin * heat

    module.forward = uneven
    with pytest.raises(ProbeError, match="layer 0 of LlamaModel"):
        open_checkpoint(model).geometry(13)


# -- frequencies are those of the length that runs ---------------------------------------------------------


def test_longrope_switches_between_lengths_in_any_order():
    ckpt = open_checkpoint(NAMED["Phi-3.5"].build())
    first = {}
    for length in (24, 16, 13, 24, 17, 2):
        for layer in verified_geometry(ckpt.decoder, length).layers:
            first.setdefault(length > 16, layer.inv_freq)
            np.testing.assert_array_equal(layer.inv_freq, first[length > 16])
            assert layer.attention_scaling == pytest.approx(math.sqrt(1.5))
    np.testing.assert_allclose(first[False][3] / first[True][3], 4.0 / 1.3, rtol=1e-6)


def test_dynamic_ntk_follows_the_length_down_as_well_as_up():
    family = NAMED["Llama with dynamic NTK"]
    model = family.build()
    for length in (24, 13, 6, 24):
        live = verified_geometry(model.model, length).layers[0]
        np.testing.assert_array_equal(live.inv_freq, config_geometry(family.configuration(), length).layers[0].inv_freq)
