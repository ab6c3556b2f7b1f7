"""Another base or scaling: equal, to the last bit, to the same weights loaded with that configuration."""

import pytest
import torch
from families import NAMED, longrope, rope, scaled, token_ids
from test_interventions_rotation import logits, model_of, with_config

from rope_probe.errors import ProbeError
from rope_probe.interventions import rope as other_rope
from rope_probe.interventions import truncate
from rope_probe.modules import attention_modules

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("keep", [0.75, 0.5, 0.3])
def test_keep_equals_the_rope_type_proportional(keep):
    ids = token_ids(24)
    other = with_config("Llama 2", rope(1e4, scaled("proportional", partial_rotary_factor=keep)))
    with truncate(model_of("Llama 2"), keep=keep):
        assert torch.equal(logits(model_of("Llama 2"), ids), logits(other, ids))
    with other_rope(model_of("Llama 2"), type="proportional", partial_rotary_factor=keep):
        assert torch.equal(logits(model_of("Llama 2"), ids), logits(other, ids))


OVERRIDES = {
    "base": {"base": 2e3},
    "linear": {"type": "linear", "factor": 4.0},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 64},
}
FULL_NAMES = {"base": "rope_theta", "type": "rope_type", "original": "original_max_position_embeddings"}


@pytest.mark.parametrize("kind", OVERRIDES)
@pytest.mark.parametrize(
    "name", ["Llama 2", "Phi-2", "Pythia", "Gemma 3 text", "DeepSeek-V3 not interleaved", "Llama 4 text"]
)
def test_another_ladder_equals_the_model_loaded_with_it(name, kind):
    length = 80 if kind == "dynamic" else 24  # it stretches beyond 64 tokens
    model, ids = model_of(name), token_ids(length)
    intact = logits(model, ids)
    wanted = {FULL_NAMES.get(key, key): value for key, value in OVERRIDES[kind].items()}

    def merged(old):
        kept = {k: old[k] for k in ("rope_theta", "partial_rotary_factor", "rope_type") if k in old}
        return kept | wanted

    old = model.config.rope_parameters
    nested = any(isinstance(value, dict) for value in old.values())
    other = with_config(name, {k: merged(v) for k, v in old.items()} if nested else merged(old))
    with other_rope(model, **OVERRIDES[kind], length=length):
        assert torch.equal(logits(model, ids), logits(other, ids))
    assert torch.equal(logits(model, ids), intact)
    assert not torch.allclose(intact, logits(other, ids), rtol=1e-3, atol=1e-3)


def test_the_softmax_scale_of_yarn_follows():
    """DeepSeek-V3 multiplies it by the square of YaRN's temperature when it is built, not when it runs."""
    model, ids = model_of("DeepSeek-V3 not interleaved"), token_ids(13)
    yarn = scaled("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0)
    before = attention_modules(model.model)[0].scaling
    other = with_config("DeepSeek-V3 not interleaved", rope(1e4, yarn))
    with other_rope(model, type="yarn", **{k: v for k, v in yarn.items() if k != "rope_type"}):
        assert attention_modules(model.model)[0].scaling > 1.1 * before
        assert torch.equal(logits(model, ids), logits(other, ids))
    assert attention_modules(model.model)[0].scaling == before


@pytest.mark.parametrize("length", [13, 24])
def test_longrope_of_the_config_with_another_base(length):
    ids = token_ids(length)
    other = with_config("Phi-3.5", rope(5e5, longrope(16)))
    with other_rope(model_of("Phi-3.5"), base=5e5, length=length):
        assert torch.equal(logits(model_of("Phi-3.5"), ids), logits(other, ids))


def test_a_rotary_module_that_nobody_asks_is_refused():
    """Attention keeps the angles of the first module: swapping it changes nothing that runs."""
    model = NAMED["Llama 3"].build()
    kept = model.model.rotary_emb

    def stubborn(module, args, kwargs):
        ids = kwargs["position_ids"]
        return args, kwargs | {"position_embeddings": kept(args[0] if args else kwargs["hidden_states"], ids)}

    for module in attention_modules(model.model).values():
        module.register_forward_pre_hook(stubborn, with_kwargs=True)
    with pytest.raises(ProbeError, match="did not change as asked"), other_rope(model, base=100.0):
        pass
    assert model.model.rotary_emb is kept


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("Llama 2", lambda m: other_rope(m), "needs something to change"),
        ("Llama 2", lambda m: other_rope(m, type="linear"), "'linear' needs 'factor'"),
        ("Llama 2", lambda m: other_rope(m, type="linear", fator=2.0), "does not use fator"),
        ("Llama 2", lambda m: other_rope(m, factor=2.0), "'default' does not use factor"),
        ("Llama 2", lambda m: other_rope(m, type="longrope", factor=2.0), "short_factor"),
        ("Llama 2", lambda m: other_rope(m, type="spiral"), "spiral"),
        ("GPT-J", lambda m: other_rope(m, base=1e5), "no rope parameters"),
    ],
)
def test_refusals(name, change, words):
    with pytest.raises(ProbeError, match=words), change(model_of(name)):
        pass
