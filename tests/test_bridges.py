"""A TransformerLens bridge is opened as the model inside it."""

import numpy as np
import pytest
import torch
from conftest import word_tokenizer
from families import NAMED, VOCABULARY
from transformers import AutoTokenizer

import rope_probe as rp

lens = pytest.importorskip("transformer_lens.model_bridge")

HOOKED = ("Llama 2", "Gemma 3 text", "Qwen3")  # hook_rot_q and hook_rot_k fire in these …
UNHOOKED = ("Phi-3 4k", "Pythia")  # … and not in these


def token_ids(length, segments):
    return torch.randint(2, VOCABULARY, (segments, length), generator=torch.Generator().manual_seed(0))


def bridge_of(name, folder):
    NAMED[name].build().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    model = type(NAMED[name].build()).from_pretrained(folder)
    return lens.TransformerBridge.boot_transformers(
        str(folder), hf_model=model, tokenizer=AutoTokenizer.from_pretrained(folder), device="cpu", dtype=torch.float32
    )


def hooked_norms(bridge, ids):
    """Mean pair norms of q and k of every layer from the bridge's own hooks, first position left out."""
    found = {}
    with torch.inference_mode():
        _, cache = bridge.run_with_cache(ids, names_filter=lambda name: name.endswith(("hook_rot_q", "hook_rot_k")))
    for name, value in cache.items():
        half = value.shape[-1] // 2
        found[name] = torch.hypot(value[..., :half], value[..., half:])
    return found


@pytest.mark.parametrize("name", HOOKED)
def test_pair_norms_equal_those_of_the_hooks(name, tmp_path):
    bridge, ids = bridge_of(name, tmp_path), token_ids(24, 3)
    norms = hooked_norms(bridge, ids)
    ds = rp.bands(rp.open(bridge), tokens=ids.numpy())
    for layer in range(ds.sizes["layer"]):
        for letter in "qk":
            hooked = norms[f"blocks.{layer}.attn.hook_rot_{letter}"]
            heads = ds.sizes["head" if letter == "q" else "kv_head"]
            if hooked.shape[1] != heads:  # heads after positions
                hooked = hooked.transpose(1, 2)
            expected = hooked[:, :, 1:].double().mean((0, 2))
            np.testing.assert_allclose(ds[f"{letter}_norm"][layer].values, expected, rtol=1e-5)


@pytest.mark.parametrize("name", [*HOOKED, *UNHOOKED])
def test_a_bridge_gives_what_the_model_gives(name, tmp_path):
    bridge, ids = bridge_of(name, tmp_path), token_ids(24, 3).numpy()
    plain = rp.bands(rp.open(tmp_path), tokens=ids)
    before = bridge(torch.as_tensor(ids))
    bridged = rp.bands(rp.open(bridge), tokens=ids)
    for variable in ("q_norm", "k_norm", "k_top"):
        np.testing.assert_allclose(bridged[variable], plain[variable], rtol=1e-5)
    assert torch.equal(bridge(torch.as_tensor(ids)), before)  # the bridge is as it was


@pytest.mark.parametrize("name", UNHOOKED)
def test_where_the_hooks_do_not_fire(name, tmp_path):
    assert hooked_norms(bridge_of(name, tmp_path), token_ids(8, 1)) == {}


def test_weights_are_shared_and_not_copied(tmp_path):
    bridge = bridge_of("Llama 2", tmp_path)
    ckpt = rp.open(bridge)
    theirs = {tensor.data_ptr() for tensor in bridge.original_model.parameters()}
    assert {tensor.data_ptr() for tensor in ckpt.model.parameters()} <= theirs
    assert ckpt.provenance == {"source": "TransformerLens bridge"}


def test_processed_weights_are_refused(tmp_path):
    bridge = bridge_of("Llama 2", tmp_path)
    bridge.enable_compatibility_mode(no_processing=True)
    rp.open(bridge)
    bridge._weights_processed = True
    with pytest.raises(rp.ProbeError, match="processed.*no_processing=True"):
        rp.open(bridge)
