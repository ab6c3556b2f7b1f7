"""Cutting the rotation: equal, to the last bit, to a model whose rotary module was changed by hand."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
import transformers
from families import FAMILIES, NAMED, rope, token_ids

import rope_probe as rp
from rope_probe import rotation_cuts
from rope_probe.checkpoints import open_checkpoint
from rope_probe.errors import ProbeError
from rope_probe.interventions import knockout, single_tone, truncate
from rope_probe.interventions import rope as other_rope
from rope_probe.modules import STILLED, attention_modules, rotary_modules, text_decoder
from rope_probe.probes.bands import bands

pytestmark = pytest.mark.usefixtures("one_thread")
every_length = pytest.mark.parametrize(("name", "length"), [(f.name, n) for f in FAMILIES for n in f.lengths])
LADDERS = ["Llama 3", "Pythia", "GPT-J", "Llama 4 text", "DeepSeek-V2", "DeepSeek-V3", "Gemma 3 text", "Cohere 2"]


@cache
def model_of(name):
    return NAMED[name].build()


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def by_hand(model, stop):
    """A copy whose rotary modules do not turn the pairs in `stop` (a function of the number of pairs -> slice)."""
    model = copy.deepcopy(model)
    for module in rotary_modules(text_decoder(model)).values():
        kinds = module.rope_type if isinstance(getattr(module, "rope_type", None), dict) else {}
        switching = str(getattr(module, "rope_type", "")) in ("dynamic", "longrope")
        if switching:  # rewritten in the forward: change what comes out of it (half-split, cos and sin twice)
            module.forward = _stopped(module, module.forward, stop)
        elif hasattr(module, "embed_positions"):
            pairs = module.embed_positions.shape[1] // 2
            module.embed_positions[:, :pairs][:, stop(pairs)] = 0
            module.embed_positions[:, pairs:][:, stop(pairs)] = 1
        else:
            for name in [f"{kind}_inv_freq" for kind in kinds] or ["inv_freq"]:
                frequencies = getattr(module, name, None)
                if frequencies is not None:
                    frequencies[stop(len(frequencies))] = 0
    return model


def _stopped(module, forward, stop):
    def run(*args, **kwargs):
        cos, sin = forward(*args, **kwargs)
        pairs = cos.shape[-1] // 2
        for half in (slice(0, pairs), slice(pairs, None)):
            cos[..., half][..., stop(pairs)] = module.attention_scaling
            sin[..., half][..., stop(pairs)] = 0
        return cos, sin

    return run


def slowest(keep):
    return lambda pairs: slice(int(keep * pairs), None)


def with_config(name, parameters):
    """The same weights in a model built with other rope parameters."""
    model = model_of(name)
    config = copy.deepcopy(model.config)
    config.rope_parameters = parameters
    other = type(model)(config)
    other.load_state_dict(model.state_dict())
    return other.eval()


# -- every family ------------------------------------------------------------------------------------


@every_length
def test_truncation_equals_a_rotary_module_changed_by_hand(name, length):
    model, ids = model_of(name), token_ids(length)
    intact, half = logits(model, ids), logits(by_hand(model, slowest(0.5)), ids)
    with truncate(model, keep=0.5, length=length):
        assert torch.equal(logits(model, ids), half)
    with truncate(model, keep=1.0, length=length):
        assert torch.equal(logits(model, ids), intact)
    assert torch.equal(logits(model, ids), intact)
    if name not in ("Llama 3.2",):  # its slow half hardly turns within a few tokens
        assert not torch.allclose(half, intact, rtol=1e-4, atol=1e-4)


@every_length
def test_no_rotation_equals_a_module_that_returns_cos_a_and_sin_0(name, length):
    """By hand again, and wherever cos and sin come as two tensors without asking for frequencies at all."""
    model, ids = model_of(name), token_ids(length)
    with truncate(model, keep=0, length=length):
        none = logits(model, ids)
    assert torch.equal(none, logits(by_hand(model, slowest(0)), ids))
    still = copy.deepcopy(model)
    for module in rotary_modules(text_decoder(still)).values():
        module.forward = _constant(module, module.forward, sine=0 if hasattr(module, "embed_positions") else 1)
    assert torch.equal(none, logits(still, ids))
    assert not torch.allclose(none, logits(model, ids), rtol=1e-3, atol=1e-3)


def _constant(module, forward, sine):
    def run(x, position_ids, layer_type=None, **kwargs):
        layer_type = kwargs.get("layer_type", layer_type)
        a = getattr(module, f"{layer_type}_attention_scaling" if layer_type else "attention_scaling", 1.0)
        out = forward(x, position_ids, **({"layer_type": layer_type} if layer_type else {}))
        if isinstance(out, torch.Tensor):
            return torch.full_like(out, a)
        return tuple(torch.zeros_like(part) if i == sine else torch.full_like(part, a) for i, part in enumerate(out))

    return run


@pytest.mark.parametrize("name", LADDERS)
def test_each_pair_and_both_ends(name):
    model, ids = model_of(name), token_ids(13)
    pairs = min(layer.pairs for layer in open_checkpoint(model).geometry(13).layers if layer.rotates)
    for pair in {0, 1, pairs - 1}:
        with knockout(model, pair, length=13):
            assert torch.equal(logits(model, ids), logits(by_hand(model, lambda n, pair=pair: pair), ids))
    with truncate(model, keep=0.5, reverse=True):
        fast = logits(by_hand(model, lambda n: slice(0, n - int(0.5 * n))), ids)
        assert torch.equal(logits(model, ids), fast)


@pytest.mark.parametrize("name", LADDERS)
def test_removing_a_pair_equals_zero_channels_of_q_and_k(name):
    """The same through the tap's own single tones: all pairs but one removed leave that pair alone."""
    family, model, ids = NAMED[name], model_of(name), token_ids(13)
    count = family.layers[0].dim // 2
    if family.layers[0].dim < family.layers[0].head_dim:
        pytest.skip("channels outside the pairs stay when pairs are removed")
    import contextlib

    with contextlib.ExitStack() as pile:
        for pair in range(1, count):
            pile.enter_context(knockout(model, pair, "remove", layers=[0], length=13))
        alone = logits(model, ids)
    with single_tone(model, 0, layer=0):
        assert torch.equal(logits(model, ids), alone)


def test_removing_a_pair_of_mla_leaves_the_unrotated_channels():
    ckpt, ids = open_checkpoint(model_of("DeepSeek-V3")), token_ids(13)
    with knockout(ckpt, 2, "remove"), rp.capture(ckpt, keep=("q", "k")) as seen:
        seen.run(ids)
    for x in (seen.q[0], seen.k[0]):  # 16 unrotated channels, then 4 half-split pairs
        zero = np.flatnonzero(~x.reshape(-1, 24).any(0))
        assert zero.tolist() == [16 + 2, 16 + 4 + 2]


# -- some layers only ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Llama 3", "Phi-3.5", "Pythia", "GPT-J", "DeepSeek-V2"])
def test_layers_that_are_not_asked_for_are_left_alone(name):
    """Layer 1 takes the angles of a changed copy; layer 0 those of the model."""
    model, ids = model_of(name), token_ids(13)
    mixed, changed = copy.deepcopy(model), by_hand(model, slowest(0.5))
    angles = {}
    watched = attention_modules(text_decoder(changed))[1]
    hook = watched.register_forward_pre_hook(lambda m, a, k: angles.update(k), with_kwargs=True)
    logits(changed, ids)
    hook.remove()

    def swap(module, args, kwargs):
        return args, kwargs | {"position_embeddings": angles["position_embeddings"]}

    attention_modules(text_decoder(mixed))[1].register_forward_pre_hook(swap, with_kwargs=True)
    with truncate(model, keep=0.5, layers=[1]):
        assert torch.equal(logits(model, ids), logits(mixed, ids))
    assert not torch.equal(logits(mixed, ids), logits(changed, ids))


@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
@pytest.mark.parametrize("name", ["Gemma 3 text", "Gemma 4 text", "OLMo 3"])
def test_one_type_of_layer(name, kind):
    model, ids = model_of(name), token_ids(13)
    changed = copy.deepcopy(model)
    getattr(text_decoder(changed).rotary_emb, f"{kind}_inv_freq")[3:] = 0
    layers = [layer for layer in NAMED[name].layers if layer.kind == kind]
    with truncate(model, keep=3.5 / (layers[0].dim // 2), layer_type=kind, length=13):
        assert torch.equal(logits(model, ids), logits(changed, ids))


def test_the_floor_is_that_of_each_layer_type():
    """Sliding layers: window 8, base 1e4; full layers: length 64, base 1e6; 8 pairs each."""
    ckpt, ids = open_checkpoint(model_of("Gemma 3 text")), token_ids(13)
    changed = copy.deepcopy(ckpt.model)
    rotary = text_decoder(changed).rotary_emb
    for kind, base, length in (("sliding_attention", 1e4, 8), ("full_attention", 1e6, 64)):
        frequencies = getattr(rotary, f"{kind}_inv_freq")
        below = base ** (-np.arange(8) / 8) < 0.75 * 2 * np.pi / length
        assert 0 < below.sum() < 8
        frequencies[torch.tensor(below)] = 0
    with truncate(ckpt, floor=0.75):
        assert torch.equal(logits(ckpt.model, ids), logits(changed, ids))
        sliding, _, full = ckpt.geometry(13).layers
        assert (sliding.zero_pairs, full.zero_pairs) == (7, 6)
    assert ckpt.geometry(13).layers[0].zero_pairs == 0


# -- nesting, undoing, measuring -------------------------------------------------------------------------


def test_they_nest_in_any_order():
    model, ids = model_of("Llama 2"), token_ids(24)
    base = with_config("Llama 2", rope(5e5))
    both = logits(by_hand(base, lambda n: [1, *range(int(0.5 * n), n)]), ids)
    with truncate(model, keep=0.5), other_rope(model, base=5e5), knockout(model, 1):
        assert torch.equal(logits(model, ids), both)
    with knockout(model, 1), other_rope(model, base=5e5), truncate(model, keep=0.5):
        assert torch.equal(logits(model, ids), both)
    with truncate(model, keep=0), other_rope(model, base=5e5):
        assert torch.equal(logits(model, ids), logits(by_hand(model, slowest(0)), ids))
    with truncate(model, keep=0.75), truncate(model, keep=0.25):
        assert torch.equal(logits(model, ids), logits(by_hand(model, slowest(0.25)), ids))


@pytest.mark.parametrize("name", ["Llama with dynamic NTK", "Phi-3.5", "Gemma 4 text", "GPT-J"])
def test_everything_is_undone_after_an_error(name):
    model = model_of(name)
    ids, intact = token_ids(13), logits(model, token_ids(13))
    modules = {k: id(m) for k, m in rotary_modules(text_decoder(model)).items()}
    changes = [lambda: truncate(model, keep=0.3), lambda: knockout(model, 0), lambda: knockout(model, 0, "remove")]
    if name != "GPT-J":
        changes.append(lambda: other_rope(model, base=1234.0))
    for change in changes:
        with pytest.raises(RuntimeError, match="on purpose"), change():
            raise RuntimeError("on purpose")
        assert torch.equal(logits(model, ids), intact)
    assert {k: id(m) for k, m in rotary_modules(text_decoder(model)).items()} == modules
    assert not STILLED
    assert not any(module._forward_pre_hooks for module in attention_modules(text_decoder(model)).values())


def test_a_probe_inside_sees_the_changed_rotation():
    ckpt = open_checkpoint(NAMED["Llama 2"].build())
    before = bands(ckpt, tokens=token_ids(24))
    with truncate(ckpt, keep=0.5):
        inside = bands(ckpt, tokens=token_ids(24))
    assert (inside["inv_freq"].values[:, 4:] == 0).all() and (inside["q_top"].values[..., 4:] == 0).all()
    np.testing.assert_allclose(inside["k_norm"][0], before["k_norm"][0], rtol=1e-6)  # a rotation keeps norms
    with other_rope(ckpt, base=500.0):
        inside = bands(ckpt, tokens=token_ids(24))
        np.testing.assert_allclose(inside["inv_freq"][0], 500.0 ** (-np.arange(8) / 8), rtol=1e-6)
        assert (inside["base"] == 500).all()
    np.testing.assert_array_equal(bands(ckpt, tokens=token_ids(24))["inv_freq"], before["inv_freq"])


def test_a_probe_that_needs_a_whole_ladder_refuses_gaps():
    ckpt = open_checkpoint(model_of("Llama 2"))
    with knockout(ckpt, 2), pytest.raises(ProbeError, match="pair 2 of layer 0 stands still"):
        bands(ckpt, tokens=token_ids(24))


def test_low_precision():
    config = NAMED["Llama 3"].configuration()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = token_ids(24)
    for keep in (0.5, 0):
        with truncate(model, keep=keep):
            assert torch.equal(logits(model, ids), logits(by_hand(model, slowest(keep)), ids))


# -- refusals -----------------------------------------------------------------------------------------------


def test_a_change_that_does_not_take_hold_is_refused(monkeypatch):
    """Negative control of the measurement after entering: a hook that changes nothing."""
    monkeypatch.setattr(rotation_cuts, "_cutter", lambda angles, cut: lambda module, args, kwargs: None)
    model = model_of("Llama 3")
    for change in (lambda: truncate(model, keep=0.5), lambda: truncate(model, keep=0), lambda: knockout(model, 6)):
        with pytest.raises(ProbeError, match="did not change as asked"), change():
            pass
    assert not STILLED


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("Llama 2", lambda m: truncate(m), "needs keep"),
        ("Llama 2", lambda m: truncate(m, keep=1.5), "keep is 1.5"),
        ("Llama 2", lambda m: truncate(m, floor=-1.0), "floor is -1.0"),
        ("Llama 2", lambda m: truncate(m, floor=float("nan")), "floor is nan"),
        ("Llama 2", lambda m: truncate(m, keep=0.5, layers=[7]), "no layer 7"),
        ("Llama 2", lambda m: truncate(m, keep=0.5, layer_type="sliding_attention"), "the model has full_attention"),
        ("Cohere 2", lambda m: truncate(m, keep=0.5, layers=[3]), "layer 3 does not rotate"),
        ("Llama 2", lambda m: knockout(m, 8), "pairs 0 to 7"),
        ("Llama 2", lambda m: knockout(m, 0, "erase"), "unrotate and remove"),
        ("Gemma 4 text", lambda m: knockout(m, 10, layers=[2]), "does not turn"),
    ],
)
def test_refusals(name, change, words):
    with pytest.raises(ProbeError, match=words), change(model_of(name)):
        pass


def test_attention_that_is_not_handed_its_angles():
    model = NAMED["Llama 2"].build()
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def renamed(*args, angles, **kwargs):
        return forward(*args, position_embeddings=angles, **kwargs)

    layer = model.model.layers[1]
    attention.forward = renamed
    outer = layer.self_attn
    layer.self_attn = _Renaming(outer)
    with pytest.raises(ProbeError, match="is not handed its cos and sin"), truncate(model, keep=0.5):
        pass


class _Renaming(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, position_embeddings, **kwargs):
        return self.inner(*args, angles=position_embeddings, **kwargs)
