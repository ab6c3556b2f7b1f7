"""Interventions: what they change, that they change nothing else, and that they are undone."""

import numpy as np
import pytest
import torch
from families import FAMILIES, VOCABULARY

from rope_probe.errors import ProbeError, UsageError
from rope_probe.interventions import ablate, single_tone, sublayers
from rope_probe.modules import decoder_of
from rope_probe.rotary import read_geometry
from rope_probe.tap import Tap

BY_NAME = {family.name: family for family in FAMILIES}
USUAL = [family for family in FAMILIES if family.name != "LongCat-Flash"]  # two of each part in a layer


def ids(length=12):
    return torch.as_tensor(np.random.default_rng(0).integers(3, VOCABULARY, (2, length)))


def output(model, tokens):
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def seen(decoder, tokens):
    """q and k of every layer as a tap sees them."""
    calls = {}
    with Tap(decoder, lambda call: calls.update({call.layer: (call.q.clone(), call.k.clone())})) as tap:
        tap.run(tokens)
    return calls


# -- one tone --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Llama 3", "Pythia", "GPT-J", "DeepSeek-V2", "DeepSeek-V3", "Gemma 3 text"])
def test_single_tone_keeps_two_channels_of_one_layer(name):
    family = BY_NAME[name]
    model = family.build()
    decoder = decoder_of(model)
    intact = seen(decoder, ids())
    dim = family.layers[0].dim
    pair = dim // 2 - 1
    layout = family.rotated or family.layout
    channels = [pair, pair + dim // 2] if layout == "half" else [2 * pair, 2 * pair + 1]
    if family.last:
        channels = [family.layers[0].head_dim - dim + channel for channel in channels]
    with single_tone(model, pair=pair):
        changed = seen(decoder, ids())
    for before, after in zip(intact[0], changed[0], strict=True):
        others = [channel for channel in range(before.shape[-1]) if channel not in channels]
        assert torch.equal(after[..., channels], before[..., channels])
        assert not after[..., others].any() and before[..., others].any()
    assert not torch.allclose(changed[1][0], intact[1][0])  # the next layer is given something else
    for before, after in zip(intact[1], seen(decoder, ids())[1], strict=True):
        assert torch.equal(before, after)


def test_single_tone_goes_to_the_first_layer_that_rotates():
    family = BY_NAME["SmolLM3"]
    model = family.build()
    assert not family.layers[3].rotates
    decoder = decoder_of(model)
    intact = seen(decoder, ids())
    with single_tone(model, 2, layer=1):
        changed = seen(decoder, ids())
    assert torch.equal(changed[0][0], intact[0][0]) and not torch.equal(changed[1][0], intact[1][0])
    with pytest.raises(ProbeError, match="layer 3 does not rotate"), single_tone(model, 2, layer=3):
        pass


@pytest.mark.parametrize(("pair", "layer"), [(8, None), (-1, None), (0, 7)])
def test_single_tone_refuses_what_is_not_there(pair, layer):
    with pytest.raises(UsageError, match=f"no (pair {pair}|layer {layer})"):
        with single_tone(BY_NAME["Llama 3"].build(), pair, layer):
            pass


def test_a_pair_that_stands_still_is_no_tone():
    model = BY_NAME["Gemma 4 text"].build()
    layer = next(layer for layer in read_geometry(decoder_of(model)).layers if layer.zero_pairs)
    with pytest.raises(ProbeError, match="does not rotate"), single_tone(model, layer.pairs - 1, layer):
        pass


# -- parts taken out -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", USUAL, ids=lambda family: family.name)
def test_parts_of_every_family_are_told_apart(family):
    decoder = decoder_of(family.build())
    for index in range(len(family.layers)):
        found = sublayers(decoder, index)
        assert len(found["attention"]) == len(found["mlp"]) == 1
        assert 1 <= len(found["norm"]) <= 5
        assert not any("norm" in type(module).__name__.lower() for module in (*found["attention"], *found["mlp"]))


def test_a_layer_of_other_parts_is_refused():
    with pytest.raises(ProbeError, match="could be told"):
        sublayers(decoder_of(BY_NAME["LongCat-Flash"].build()), 0)
    with pytest.raises(UsageError, match="layer 9"):
        sublayers(decoder_of(BY_NAME["Llama 3"].build()), 9)


def residuals(model, tokens):
    """Residual stream after every layer."""
    with torch.no_grad():
        return model(tokens, use_cache=False, output_hidden_states=True).hidden_states


def test_without_attention_and_mlp_a_layer_passes_on_what_it_got():
    model = BY_NAME["Llama 3"].build()
    with ablate(model, "attention", [0]), ablate(model, "mlp", [0]):
        after = residuals(model, ids())
    assert torch.equal(after[0], after[1]) and not torch.allclose(after[1], after[2])


@pytest.mark.parametrize("part", ["mlp", "attention"])
def test_what_is_left_of_a_layer_is_the_other_part(part):
    model = BY_NAME["Llama 3"].build()
    layer = model.model.layers[0]
    with ablate(model, part, [0]):
        before, after = residuals(model, ids())[:2]
    if part == "attention":
        with torch.no_grad():
            expected = before + layer.mlp(layer.post_attention_layernorm(before))
        assert torch.equal(after, expected)
    else:
        kept = []
        hook = layer.self_attn.register_forward_hook(lambda _m, _a, out: kept.append(out[0]))
        residuals(model, ids())
        hook.remove()
        assert torch.equal(after, before + kept[0])


def undivided(module, x):
    """The norm of each kind with its division written out, and left out."""
    name, weight, bias = type(module).__name__, getattr(module, "weight", None), getattr(module, "bias", None)
    if "LayerNorm" in name and not name.startswith(("Cohere", "Olmo", "Nemotron")) or name.startswith("Cohere"):
        centred = x - x.mean(-1, keepdim=True)
        return centred * weight + (0 if bias is None else bias)
    if name == "OlmoLayerNorm":
        return x - x.mean(-1, keepdim=True)
    if name == "NemotronLayerNorm1P":
        return (x - x.mean(-1, keepdim=True)) * (1 + weight) + bias
    if name.startswith(("Gemma", "Gemma2", "Gemma3")) and not name.startswith("Gemma4"):
        return x * (1 + weight)
    return x * weight


@pytest.mark.parametrize(
    "name",
    ["Llama 3", "Gemma 2", "Gemma 3 text", "Gemma 4 text", "OLMo", "OLMo 2", "Phi-2", "Pythia", "Cohere", "Nemotron"],
)
def test_norms_keep_everything_but_their_division(name):
    model = BY_NAME[name].build()
    decoder = decoder_of(model)
    x = torch.randn(2, 5, sublayers(decoder, 0)["norm"][0](torch.randn(1, 1, decoder.config.hidden_size)).shape[-1])
    for module in sublayers(decoder, 0)["norm"]:
        with torch.no_grad():
            divided = module(x)
            with ablate(model, "norm", [0]):
                found = module(x)
            torch.testing.assert_close(found, undivided(module, x), rtol=1e-4, atol=1e-5)
            assert not torch.allclose(found, divided, rtol=1e-2)
            assert torch.equal(module(x), divided)


def test_a_norm_of_tiny_weights_is_not_mistaken():
    model = BY_NAME["Llama 3"].build()
    module = model.model.layers[0].input_layernorm
    x = torch.randn(1, 3, 64) + 0.5
    with torch.no_grad():
        module.weight.mul_(1e-3)
        with ablate(model, "norm", [0]):
            torch.testing.assert_close(module(x), x * module.weight, rtol=1e-4, atol=1e-8)


# -- around them -----------------------------------------------------------------------------------


@pytest.mark.parametrize("give", ["checkpoint", "model", "decoder"])
def test_everything_that_holds_the_model_will_do(give):
    import rope_probe as rp

    model = BY_NAME["Llama 3"].build()
    target = {"checkpoint": rp.open(model), "model": model, "decoder": model.model}[give]
    before = output(model, ids())
    with single_tone(target, 0), ablate(target, "mlp", [1]):
        inside = output(model, ids())
    assert not torch.allclose(inside, before)
    assert torch.equal(output(model, ids()), before)


def test_they_are_undone_when_the_block_fails():
    model = BY_NAME["Llama 3"].build()
    before = output(model, ids())
    for change in (
        lambda: single_tone(model, 1),
        lambda: ablate(model, "norm", [0, 1]),
        lambda: ablate(model, "mlp", [0]),
    ):
        with pytest.raises(RuntimeError, match="inside"), change():
            raise RuntimeError("inside")
        assert torch.equal(output(model, ids()), before)
    with pytest.raises(UsageError), ablate(model, "attention", [0, 9]):
        pass
    assert torch.equal(output(model, ids()), before)
    assert not any(module._forward_hooks for module in model.modules())


def test_an_unknown_part_is_refused():
    with pytest.raises(UsageError, match="mlp, attention, norm, not 'heads'"):
        with ablate(BY_NAME["Llama 3"].build(), "heads", [0]):
            pass
