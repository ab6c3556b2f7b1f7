"""The first layers alone: the same numbers, and nothing of the others is fetched or loaded."""

import json

import numpy as np
import pytest
import xarray as xr
from conftest import VOCABULARY
from families import NAMED, token_ids
from test_tensors import hub  # noqa: F401  (a fixture)

import rope_probe as rp
from rope_probe.errors import ProbeError

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = (
    "Llama 3.1",
    "Gemma 3 text",
    "Gemma 3 multimodal",
    "Phi-3.5",
    "Pythia",
    "GPT-J",
    "Mixtral",
    "DeepSeek-V3",
    "gpt-oss",
)


@pytest.mark.parametrize("shards", ["40KB", "5GB"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_layers_alone(name, shards, tmp_path):
    folder, ids = tmp_path / "model", token_ids(24, 3).numpy()
    NAMED[name].build().save_pretrained(folder, max_shard_size=shards)
    whole = rp.open(folder)
    ckpt = rp.open(folder, layers=[0])
    assert ckpt.decoder.config.num_hidden_layers == 1 and sum(1 for _ in ckpt.decoder.parameters()) < sum(
        1 for _ in whole.decoder.parameters()
    )
    one, other = (rp.bands(opened, tokens=ids, layers=[0]) for opened in (ckpt, whole))
    xr.testing.assert_identical(one.drop_attrs(), other.drop_attrs())
    assert one.attrs["provenance"] == other.attrs["provenance"] and one.attrs["model"] == other.attrs["model"]


def test_streamed_too(tiny_folder):
    ids = np.random.default_rng(0).integers(2, VOCABULARY, (3, 48))
    one = rp.similarity(rp.open(tiny_folder, layers=[1], stream_layers=True), tokens=ids, layers=[1], sink=0)
    other = rp.similarity(rp.open(tiny_folder), tokens=ids, layers=[1], sink=0)
    xr.testing.assert_identical(one.drop_attrs(), other.drop_attrs())


def test_layers_that_share_keys_with_the_last_ones_are_not_cut(tmp_path):
    NAMED["Gemma 4 text, shared keys"].build().save_pretrained(tmp_path / "model")
    ckpt = rp.open(tmp_path / "model", layers=[0])
    assert ckpt.shorter is None and len(ckpt.geometry(24).layers) > 1


def test_a_layer_that_is_not_there(probe):
    probe("--layers", "0,7").refused("there is no layer 7: the model has layers 0 to 2")


def test_a_missing_weight_of_a_wanted_layer_is_named(tmp_path):
    folder = tmp_path / "model"
    NAMED["Llama 3.1"].build().save_pretrained(folder, max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.layers.0.self_attn.q_proj.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ProbeError, match=r"lack .*layers\.0\.self_attn\.q_proj"):
        rp.open(folder, layers=[0])


def test_of_the_hub_only_the_shards_that_are_needed(hub, tmp_path, tokens):  # noqa: F811
    server, folder, run = hub
    done = run("--tokens", tokens, "--layers", "0", "--json", "-o", tmp_path / "hub.nc", command="bands")
    assert done.returncode == 0, done.stderr
    here = rp.bands(rp.open(folder), tokens=tokens, layers=[0])
    ds = rp.load(tmp_path / "hub.nc")
    for name in here.data_vars:
        np.testing.assert_array_equal(ds[name], here[name])
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for key, file in index.items() if ".layers.0." in key or "embed" in key}
    fetched = {name for name, _ in server.sent if name.endswith(".safetensors")}
    assert fetched == needed and len(fetched) < len(set(index.values()))


def test_a_hub_repository_without_safetensors_is_refused_as_without_layers(hub, tmp_path, tokens):  # noqa: F811
    _, folder, run = hub
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    errors = [run("--tokens", tokens, *more, command="bands").stderr for more in ((), ("--layers", "0"))]
    assert errors[0] == errors[1]
    assert errors[0].startswith("rope-probe: owner/tiny has no safetensors weights")
