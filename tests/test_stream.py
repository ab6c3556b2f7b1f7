"""Layers lent their weights one at a time give the numbers of a model that is whole."""

import os

import numpy as np
import pytest
import torch
import xarray as xr
from conftest import VOCABULARY
from families import NAMED, token_ids

import rope_probe as rp
from rope_probe.errors import ProbeError, UsageError
from rope_probe.modules import decoder_layers
from rope_probe.resume import resumable

pytestmark = pytest.mark.usefixtures("one_thread")


def saved(name, tmp_path):
    """A tiny model of a family on disk, in several shards."""
    folder = tmp_path / "model"
    NAMED[name].build().save_pretrained(folder, max_shard_size="40KB")
    return folder


def identical(one, other):
    xr.testing.assert_identical(one.drop_attrs(), other.drop_attrs())


FAMILIES = (
    "Llama 3.1",
    "Gemma 2",
    "Gemma 3 multimodal",
    "Gemma 4 text, shared keys",
    "Phi-3.5",
    "Pythia",
    "GPT-J",
    "Qwen3 MoE",
    "Mixtral",
    "DeepSeek-V3",
    "gpt-oss",
    "Cohere 2",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_bands_are_identical(name, tmp_path):
    folder, ids = saved(name, tmp_path), token_ids(24, 5).numpy()
    whole = rp.bands(rp.open(folder), tokens=ids, batch=2)
    ckpt = rp.open(folder, stream_layers=True)
    identical(rp.bands(ckpt, tokens=ids, batch=2), whole)
    assert all(parameter.is_meta for layer in decoder_layers(ckpt.decoder).values() for parameter in layer.parameters())


@pytest.mark.parametrize("analysis", ["spectrum", "similarity", "heads"])
def test_other_analyses_are_identical(analysis, tmp_path):
    folder, ids = saved("Gemma 3 text", tmp_path), token_ids(60, 5).numpy()
    measure = getattr(rp, analysis)
    whole = measure(rp.open(folder), tokens=ids, batch=2)
    identical(measure(rp.open(folder, stream_layers=True), tokens=ids, batch=2), whole)


def test_what_needs_several_passes_works_too(tiny_folder):
    ids = np.random.default_rng(0).integers(2, VOCABULARY, (3, 24))
    whole, streamed = rp.open(tiny_folder), rp.open(tiny_folder, stream_layers=True)
    for measure, options in ((rp.truncate, {"keep": [0.5]}), (rp.spectrum, {"inject": [2]})):
        identical(measure(streamed, tokens=ids, batch=2, **options), measure(whole, tokens=ids, batch=2, **options))


def test_every_weight_is_read_once_and_no_layer_beyond_the_last(tiny_folder, monkeypatch):
    ckpt = rp.open(tiny_folder, stream_layers=True)
    reads, real = [], type(ckpt.stream)._read

    def counted(self, prefix, module):
        reads.append(prefix)
        return real(self, prefix, module)

    monkeypatch.setattr(type(ckpt.stream), "_read", counted)
    ids = np.random.default_rng(0).integers(2, VOCABULARY, (5, 24))
    rp.bands(ckpt, tokens=ids, batch=1)
    assert reads == ["model.layers.0", "model.layers.1", "model.layers.2"]
    reads.clear()
    rp.bands(ckpt, tokens=ids, batch=1, layers=[1])
    assert reads == ["model.layers.0", "model.layers.1"]


def test_a_layer_that_rotates_otherwise_is_found_without_its_weights(tiny_folder, monkeypatch):
    """The check of the rotation runs on stand-in weights: it reads nothing, and sees what it sees on the whole model."""
    ckpt = rp.open(tiny_folder, stream_layers=True)
    monkeypatch.setattr(type(ckpt.stream), "_read", None)
    np.testing.assert_array_equal(
        ckpt.geometry(32).layers[1].inv_freq, rp.open(tiny_folder).geometry(32).layers[1].inv_freq
    )
    from transformers.models.llama import modeling_llama

    real = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, c, s, **more: real(q, k, c, -2 * s, **more)
    )
    with pytest.raises(ProbeError, match="do not turn as inv_freq says"):
        ckpt.geometry(48)


def test_bfloat16_and_a_run_that_goes_on(tiny_folder, tmp_path):
    """Cut short after layer 1 of 3, resumed: only layer 2 is read."""
    ids = np.random.default_rng(0).integers(2, VOCABULARY, (5, 24))
    ckpt = rp.open(tiny_folder, stream_layers=True, dtype="bfloat16")
    assert next(ckpt.model.model.norm.parameters()).dtype == torch.bfloat16
    whole = rp.bands(ckpt, tokens=ids, batch=2)
    identical(whole, rp.bands(rp.open(tiny_folder, dtype="bfloat16"), tokens=ids, batch=2))

    def stop(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(ProbeError, match="stopped after 2 of 3 layers; --resume goes on"):
        with resumable(tmp_path / "a.state"):
            rp.bands(ckpt, tokens=ids, batch=2, progress=stop)
    read = []
    with resumable(tmp_path / "a.state", resume=True):
        again = rp.bands(ckpt, tokens=ids, batch=2, progress=lambda *seen: read.append(seen))
    assert read == [(0, 1), (1, 1)]
    identical(again, whole)
    assert not (tmp_path / "a.state").exists()


def test_command_line(probe, run_cli, tiny_folder, tokens):
    assert probe("-o", "a.nc").code == 0
    done = probe("-o", "b.nc", "--stream-layers")
    assert (done.code, done.err) == (0, "")
    identical(rp.load("a.nc"), rp.load("b.nc"))
    probe("--stream-layers", "--device-map", "auto").refused("--stream-layers and --device-map", code=2)
    assert sorted(os.listdir()) == ["a.nc", "b.nc"]


def test_chosen_by_itself_where_weights_do_not_fit(probe, monkeypatch):
    monkeypatch.setattr("rope_probe.checkpoints.free_memory", lambda: 200_000)
    done = probe("-o", "a.nc")
    assert done.code == 0 and "do not fit into the 0.0 GB of memory that are free, so layers are streamed" in done.err
    done = probe("-o", "b.nc", "--no-stream-layers")
    assert (done.code, done.err) == (0, "")
    identical(rp.load("a.nc"), rp.load("b.nc"))


def test_an_open_model_cannot_be_streamed():
    with pytest.raises(UsageError, match="stream_layers"):
        rp.open(NAMED["Llama 3"].build(), stream_layers=True)


def test_files_that_vanish_in_mid_run(tiny, tmp_path, run_cli, tokens):
    """What was read before is kept, and goes on once the files are back."""
    aside = tmp_path / "aside"
    ckpt, ids = rp.open(tiny, stream_layers=True), np.load(tokens)
    whole = rp.bands(rp.open(tiny), tokens=ids)

    def vanish(done, total):
        if done == 1:  # the next layer may be read ahead, the one after it is not
            os.rename(tiny / "model.safetensors", aside)

    with pytest.raises(ProbeError, match="stopped after . of 3 layers: .*can no longer be read .*; --resume goes on"):
        with resumable("a.state"):
            rp.bands(ckpt, tokens=ids, progress=vanish)
    os.rename(aside, tiny / "model.safetensors")
    with resumable("a.state", resume=True):
        identical(rp.bands(rp.open(tiny, stream_layers=True), tokens=ids), whole)


@pytest.mark.slow
@pytest.mark.parametrize("demo", ["demo:smollm2", "demo:gemma3"])
def test_demos_are_identical(demo):
    whole, streamed = rp.open(demo), rp.open(demo, stream_layers=True)
    for measure in (rp.bands, rp.spectrum, rp.similarity, rp.heads):
        options = {"segments": 3, "length": 128, "batch": 2}
        identical(measure(streamed, **options), measure(whole, **options))
