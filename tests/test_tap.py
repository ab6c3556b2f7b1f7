"""The tap sees what attention is given, and leaves no trace."""

import pytest
import torch
from families import NAMED, VOCABULARY, tiny, token_ids

from rope_probe import tap as tap_module
from rope_probe.attention import visible
from rope_probe.checkpoints import open_checkpoint
from rope_probe.errors import ProbeError
from rope_probe.modules import text_decoder
from rope_probe.tap import Tap

pytestmark = pytest.mark.usefixtures("one_thread")


def silent(call):
    """An observer that changes nothing."""


def state(model):
    """Everything of a model that a tap could leave changed."""
    implementations = [
        (type(module).__name__, module.config._attn_implementation)
        for module in model.modules()
        if getattr(module, "config", None) is not None
    ]
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    remembered = {n: int(m.max_seq_len_cached) for n, m in model.named_modules() if hasattr(m, "max_seq_len_cached")}
    return implementations, hooks, buffers, remembered


def assert_same(before, after):
    assert before[:2] == after[:2] and before[3] == after[3]
    assert before[2].keys() == after[2].keys()
    for name, buffer in before[2].items():
        torch.testing.assert_close(after[2][name], buffer, rtol=0, atol=0, equal_nan=True)
    assert not tap_module._WATCHED


EVERY_KIND = ["Llama 3", "Gemma 2", "Gemma 3 multimodal", "Llama with dynamic NTK", "Phi-3.5", "GPT-J", "Llama 4 text"]


class Stop(Exception):
    pass


def failing(call):
    raise Stop


# -- everything is put back ------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY_KIND)
def test_restored_on_exit(name):
    model = NAMED[name].build()
    model(token_ids(24), use_cache=False)  # dynamic NTK and LongRoPE now remember 24 tokens
    before = state(model)
    with Tap(text_decoder(model), silent, hidden=True) as tap:
        assert text_decoder(model).config._attn_implementation.startswith("rope_probe_")
        tap.run(token_ids(5))
        tap.run(token_ids(30))
    assert_same(before, state(model))


@pytest.mark.parametrize("name", EVERY_KIND)
def test_restored_after_an_exception(name):
    model = NAMED[name].build()
    before = state(model)
    with pytest.raises(Stop), Tap(text_decoder(model), failing, hidden=True) as tap:
        tap.run(token_ids(24))
    assert_same(before, state(model))
    with pytest.raises(IndexError), Tap(text_decoder(model), silent) as tap:
        tap.run(torch.full((1, 5), VOCABULARY))  # the model itself fails
    assert_same(before, state(model))


def test_an_attention_that_cannot_be_watched_changes_nothing():
    model = NAMED["Gemma 3 text"].build()
    before = state(model)
    model.model.layers[1].self_attn.config = type("Other", (), {"_attn_implementation_internal": "unknown"})()
    with pytest.raises(KeyError), Tap(model.model, silent):
        pass
    model.model.layers[1].self_attn.config = model.config
    assert_same(before, state(model))


def test_other_models_are_not_seen():
    watched, other = NAMED["Llama 3"].build(), NAMED["Llama 2"].build()
    seen = []
    with Tap(watched.model, lambda call: seen.append(call.layer)):
        other(token_ids(5))
        assert not seen
        watched(token_ids(5))
    assert seen == [0, 1]


# -- nested taps, layers, early end --------------------------------------------------------------------


def test_nested_taps_see_the_same():
    model, ids, outer, inner = NAMED["Llama 3"].build(), token_ids(5), [], []
    before = state(model)
    plain = model(ids).logits
    with Tap(model.model, lambda call: outer.append((call.layer, call.q.clone()))):
        with Tap(model.model, lambda call: inner.append((call.layer, call.q.clone())), layers=[1]):
            assert torch.equal(model(ids).logits, plain)
        assert [layer for layer, _ in outer] == [0, 1] and [layer for layer, _ in inner] == [1]
        assert torch.equal(outer[1][1], inner[0][1])
        with pytest.raises(Stop), Tap(model.model, failing) as tap:
            tap.run(ids)
        model(ids)
    assert [layer for layer, _ in outer] == [0, 1, 0, 0, 1] and len(inner) == 1
    assert_same(before, state(model))


def test_layers_limit_what_is_shown():
    model, seen = NAMED["SmolLM3"].build(), []
    with Tap(model.model, lambda call: seen.append(call.layer), layers=[2, 0]) as tap:
        tap.run(token_ids(5))
    assert seen == [0, 2] and tap.seen == {0, 1, 2, 3}


@pytest.mark.parametrize(("layers", "stop", "run"), [(None, True, 4), ([1], True, 2), ([1], False, 4)])
def test_stop_ends_the_forward_pass(layers, stop, run):
    """Layers after the last one that is shown do not run, nor does the final norm."""
    model, started, ended = NAMED["SmolLM3"].build(), [], []
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: started.append(index))
    model.model.norm.register_forward_hook(lambda *_: ended.append(True))
    with Tap(model.model, silent, layers=layers, stop=stop) as tap:
        tap.run(token_ids(5))
    assert started == list(range(run)) and bool(ended) is (not stop)


def test_stopping_twice_is_no_error():
    model, seen = NAMED["Llama 3"].build(), []
    with Tap(model.model, lambda call: seen.append(len(call.q)), layers=[0], stop=True) as tap:
        for batch in token_ids(5).split(2):
            tap.run(batch)
    assert seen == [2, 1]


@pytest.mark.parametrize("name", NAMED)
def test_the_decoder_has_no_head(name):
    """What q/k work runs is the text model alone: hidden states, never logits."""
    model = NAMED[name].build()
    decoder = open_checkpoint(model).decoder
    assert decoder.get_output_embeddings() is None
    assert "vision" not in " ".join(child for child, _ in decoder.named_modules())
    out = decoder(token_ids(5, segments=1), use_cache=False).last_hidden_state
    assert out.shape == (1, 5, decoder.config.hidden_size)


def test_a_head_called_decoder_is_not_the_decoder():
    """ModernBERT Decoder names its vocabulary projection so, and transformers' look-up believes it."""
    model = tiny("ModernBertDecoder", num_key_value_heads=4)
    assert isinstance(model.get_decoder(), torch.nn.Linear)
    assert text_decoder(model) is model.model


# -- masks -------------------------------------------------------------------------------------------

WINDOWS = {  # keys that the last of 12 tokens sees in each layer, with a window of 4
    "Mistral": ("Mistral", {"sliding_window": 4}, [4, 4, 4, 4]),
    "Phi-3": ("Phi3", {"sliding_window": 4}, [4, 4, 4, 4]),
    "Gemma 2": ("Gemma2", {"sliding_window": 4, "head_dim": 16}, [4, 12, 4, 12]),
    "Qwen2 off": ("Qwen2", {"sliding_window": 4, "use_sliding_window": False}, [12, 12, 12, 12]),
    "Qwen2": ("Qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2}, [12, 12, 4, 4]),
    "gpt-oss": ("GptOss", {"sliding_window": 4, "head_dim": 16, "num_local_experts": 4}, [4, 12, 4, 12]),
}


def masks(model, length):
    kept = []
    with Tap(text_decoder(model), kept.append) as tap:
        tap.run(token_ids(length))
    return kept


EAGER_ONLY = ("Gemma 2", "gpt-oss")  # soft-cap, sink logits


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        (name, attention)
        for name in WINDOWS
        for attention in ("sdpa", "eager")
        if name not in EAGER_ONLY or attention == "eager"
    ],
)
def test_sliding_layers_see_their_window(name, attention):
    """The window counts the token itself, and the geometry says the same as the mask."""
    prefix, options, expected = WINDOWS[name]
    model = tiny(prefix, num_hidden_layers=4, max_position_embeddings=64, **options)
    assert model.config._attn_implementation == ("eager" if name in EAGER_ONLY else "sdpa")
    model.set_attn_implementation(attention)
    calls = masks(model, 12)
    seen = [visible(call, torch.arange(12))[0, 0] for call in calls]
    assert [int(keys[-1].sum()) for keys in seen] == expected
    for keys, call in zip(seen, calls, strict=True):
        assert not keys.triu(1).any() and keys.diagonal().all()
        assert (call.mask is None) == (attention == "sdpa" and not call.window)
    windows = [layer.window for layer in open_checkpoint(model).geometry(12).layers]
    assert [window or 12 for window in windows] == expected


@pytest.mark.parametrize("name", ["Llama 3", "Pythia", "GPT-J", "DeepSeek-V3", "Gemma 3 multimodal", "Qwen3 MoE"])
def test_no_mask_is_built_for_plain_causal_input(name):
    """sdpa keeps its fast causal path; sliding layers get a mask only from the window on."""
    model = NAMED[name].build()
    for length in (7, 60):
        for call, layer in zip(masks(model, length), NAMED[name].layers, strict=True):
            assert (call.mask is None) == (not layer.window or length < layer.window)


def test_softcap_sinks_and_scale_are_passed_on():
    call = masks(NAMED["Gemma 2"].build(), 5)[0]
    assert (call.scaling, call.softcap, call.sinks) == (64**-0.5, 5.0, None)
    call = masks(NAMED["gpt-oss"].build(), 5)[0]
    assert call.scaling == 16**-0.5 and call.sinks.shape == (4,)
    assert {call.scaling for call in masks(NAMED["Granite"].build(), 5)} == {0.1}


def test_hidden_states_enter_the_layer():
    model, ids, kept = NAMED["Llama 3"].build(), token_ids(5), []
    with Tap(model.model, kept.append, hidden=True) as tap:
        tap.run(ids)
    with torch.no_grad():
        states = model.model(ids, output_hidden_states=True).hidden_states
    for call in kept:
        assert torch.equal(call.hidden, states[call.layer])


def test_an_attention_that_is_never_seen_is_an_error():
    model = tiny("Falcon", alibi=False)
    with pytest.raises(ProbeError, match="FalconModel does not attend through"), Tap(model.transformer, silent) as tap:
        tap.run(token_ids(5))
