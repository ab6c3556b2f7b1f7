"""What cannot be probed is refused in one sentence: never a traceback, never wrong numbers."""

import json
import re

import numpy as np
import pytest
import torch
import transformers
from families import NAMED, SIZES, randomised, tiny, token_ids

from rope_probe.checkpoints import load_config, open_checkpoint
from rope_probe.errors import ProbeError
from rope_probe.probes.bands import bands
from rope_probe.rotary import config_geometry

pytestmark = pytest.mark.usefixtures("one_thread")

WITHOUT_ROPE = {
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {}),
    "OPT": ("OPTForCausalLM", "OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "BLOOM": ("BloomForCausalLM", "BloomConfig", {}),
    "MPT": ("MptForCausalLM", "MptConfig", {}),
    "GPT-Neo": ("GPTNeoForCausalLM", "GPTNeoConfig", {"attention_types": [[["global", "local"], 1]]}),
    "Mamba": ("MambaForCausalLM", "MambaConfig", {}),
    "Falcon with ALiBi": ("FalconForCausalLM", "FalconConfig", {"alibi": True}),
}


def refusal(function, *args, **kwargs):
    """The message of the ProbeError that the call ends in: one sentence of one line."""
    with pytest.raises(ProbeError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    assert len(re.findall(r"\. [A-Z]", message)) == 0
    return message


def llama(**options):
    return tiny("Llama", **options)


@pytest.mark.parametrize("name", WITHOUT_ROPE)
def test_models_without_rope(name):
    model, config, options = WITHOUT_ROPE[name]
    config = getattr(transformers, config)(**{**SIZES, **options})
    model = randomised(getattr(transformers, model)(config))
    for said in (refusal(open_checkpoint, model), refusal(config_geometry, config)):
        assert repr(config.model_type) in said
        assert ("ALiBi" if "ALiBi" in name else "no rotary position embedding") in said


def test_falcon_bypasses_the_attention_interface():
    """Its rotation could be read from its config, but its q and k are never seen."""
    ckpt = open_checkpoint(tiny("Falcon", alibi=False))
    for function in (lambda: ckpt.geometry(13), lambda: bands(ckpt, tokens=token_ids(13))):
        said = refusal(function)
        assert "FalconModel" in said and "attention interface" in said


def test_not_a_model():
    assert "Linear" in refusal(open_checkpoint, torch.nn.Linear(2, 2))


# -- odd rotary dimensions ---------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [5, 7])
def test_odd_heads_in_a_folder(tmp_path, head_dim):
    config = {**SIZES, "model_type": "llama", "head_dim": head_dim}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "even rotary dimension" in refusal(load_config, str(tmp_path))


def test_odd_heads_that_transformers_lets_through():
    config = transformers.LlamaConfig(**SIZES, head_dim=3)
    said = refusal(config_geometry, config)
    assert "3 of 3 channels" in said and "pairs" in said


@pytest.mark.parametrize("prefix", ["StableLm", "Phi"])
def test_odd_share_of_a_head(prefix):
    options = {"hidden_size": 80, "partial_rotary_factor": 0.25}
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **options})
    for said in (refusal(config_geometry, config), refusal(open_checkpoint, tiny(prefix, **options))):
        assert "5 of 20 channels" in said and "pairs" in said


def test_more_channels_than_a_head_has():
    said = refusal(config_geometry, transformers.GPTJConfig(**{**SIZES, "rotary_dim": 64}))
    assert "64 channels" in said and "have 16" in said


@pytest.mark.filterwarnings("ignore:segments of .* are longer")
def test_more_tokens_than_a_table_has():
    """GPT-J looks its angles up in a table, and there are none beyond its last row."""
    ckpt = open_checkpoint(NAMED["GPT-J"].build())
    bands(ckpt, tokens=token_ids(64))
    said = refusal(bands, ckpt, tokens=token_ids(65))
    assert "64 positions" in said and "65 tokens" in said


# -- frequencies that cannot be right ------------------------------------------------------------------


def with_frequencies(change):
    model = llama()
    with torch.no_grad():
        change(model.model.rotary_emb.inv_freq)
    return model


BROKEN = {
    "NaN": (lambda f: f.fill_(torch.nan), "not finite"),
    "one infinity": (lambda f: f[3:4].fill_(torch.inf), "not finite"),
    "noise of both signs": (lambda f: f.copy_(torch.linspace(-3e-26, 3e-25, 8)), "negative"),
    "all zero": (lambda f: f.zero_(), "zero"),
    "tail of zeros": (lambda f: f[5:].zero_(), "zero"),
    "tiny leftovers": (lambda f: f.copy_(torch.linspace(4e-41, 1e-41, 8)), "not about 1"),
    "huge leftovers": (lambda f: f.copy_(torch.linspace(1e20, 1e19, 8)), "not about 1"),
    "wrong order": (lambda f: f.copy_(f.flip(0).clone()), "increasing"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_uninitialised_frequencies(broken):
    change, words = BROKEN[broken]
    said = refusal(open_checkpoint, with_frequencies(change))
    assert words in said and "layer 0" in said and "not initialised" in said


def test_class_that_forgets_its_frequencies_when_loaded(tmp_path):
    """A buffer that is not saved and not built again is uninitialised memory after loading."""
    model = llama()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    open_checkpoint(loaded)
    loaded.model.rotary_emb.inv_freq = torch.full((8,), 3.1e-41)
    assert "3.1e-41" in refusal(open_checkpoint, loaded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frequencies_in_low_precision(dtype):
    said = refusal(open_checkpoint, llama().to(dtype))
    assert str(dtype).removeprefix("torch.") in said and "dtype=" in said


def test_low_precision_weights_are_fine():
    config = NAMED["Llama 3"].configuration()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ds = bands(open_checkpoint(randomised(model)), tokens=token_ids(13))
    assert ds.attrs["dtype"] == "bfloat16" and np.isfinite(ds["k_norm"]).all()


# -- code and frequencies that disagree ------------------------------------------------------------------


def slowed(model):
    """The model turning at twice the positions, its inv_freq left as it was."""
    module, forward = model.model.rotary_emb, model.model.rotary_emb.forward
    module.forward = lambda x, position_ids: forward(x, position_ids * 2)
    return model


def stale(model):
    """The model turning by a table of its own, made before its inv_freq was changed."""
    module = model.model.rotary_emb
    inv_freq = module.inv_freq.clone()

    def forward(x, position_ids):
        angle = position_ids[..., None] * inv_freq.repeat(2)
        return angle.cos(), angle.sin()

    module.forward = forward
    module.inv_freq[-1] *= 0.5  # the slowest pair alone
    return model


def half_turned(model):
    """The first layer rotating only the first half of its channels."""
    attention = model.model.layers[0].self_attn
    forward = attention.forward

    def partly(hidden_states, position_embeddings, **kwargs):
        cos, sin = (x.clone() for x in position_embeddings)
        slow = torch.arange(16) % 8 >= 4
        cos[..., slow], sin[..., slow] = 1, 0
        return forward(hidden_states, position_embeddings=(cos, sin), **kwargs)

    attention.forward = partly
    return model


@pytest.mark.parametrize("tamper", [slowed, stale, half_turned])
def test_rotation_that_is_not_the_one_of_its_frequencies(tamper):
    open_checkpoint(llama()).geometry(13)
    ckpt = open_checkpoint(tamper(llama()))
    for function in (lambda: ckpt.geometry(13), lambda: bands(ckpt, tokens=token_ids(13))):
        said = refusal(function)
        assert "layer 0 of LlamaModel" in said and "inv_freq" in said


def test_rotation_that_the_code_denies():
    """A layer marked as not rotating that rotates all the same."""
    model = NAMED["SmolLM3"].build()
    attention = model.model.layers[3].self_attn
    forward = attention.forward

    def rotating(*args, **kwargs):
        attention.use_rope = 1
        try:
            return forward(*args, **kwargs)
        finally:
            attention.use_rope = 0

    attention.forward = rotating
    said = refusal(open_checkpoint(model).geometry, 13)
    assert "layer 3" in said and "rotates although" in said


def test_non_finite_activations_name_the_layer():
    """Seen while the rotation is verified, or later in the text alone."""
    model = llama()
    ckpt = open_checkpoint(model)
    ckpt.geometry(13)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.inf
    for function in (lambda: bands(ckpt, tokens=token_ids(13)), lambda: open_checkpoint(model).geometry(13)):
        assert "keys of layer 1 are not finite" in refusal(function)
