"""Files from strangers: what they declare is checked before anything is allocated, and none leads anywhere else."""

import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import gguf
import h5py
import numpy as np
import pytest

import rope_probe as rp
from rope_probe import limits

ROOT = Path(rp.__file__).parent


def peak():
    """Largest memory of this process so far, in kB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.fixture
def sober():
    """Fails a test that takes long or much memory."""
    before, start = peak(), time.process_time()
    yield
    assert time.process_time() - start < 30 and peak() - before < 1_000_000


pytestmark = pytest.mark.usefixtures("sober")


# -- configurations ----------------------------------------------------------------------------------


def with_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 10**9),
        ("num_key_value_heads", 10**12),
        ("hidden_size", 10**12),
        ("head_dim", 10**9),
        ("vocab_size", 10**12),
        ("intermediate_size", 10**12),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 1e300),
    ],
)
def test_a_config_that_asks_for_too_much(run_cli, tiny, key, value):
    path = with_config(tiny, **{key: value})
    for name in (tiny, path):
        said = run_cli("inspect", name).refused(f"says {key} = {value:.6g}", "check config.json")
        assert "nothing beyond" in said
    run_cli("bands", tiny, "--tokens", "none.npy")
    run_cli("check", tiny)


def test_a_nested_config_is_looked_at_too(run_cli, tiny):
    path = with_config(tiny, text_config={"num_hidden_layers": 10**9})
    run_cli("inspect", path).refused("says text_config.num_hidden_layers = 1e+09")


def test_many_experts_in_many_layers():
    with pytest.raises(rp.ProbeError, match="2,000 layers of 1,000 experts"):
        limits.check_config({"num_hidden_layers": 2000, "num_experts": 1000}, "x")


def test_a_config_larger_than_any(run_cli, tiny):
    with (tiny / "config.json").open("r+b") as stream:
        stream.truncate(limits.JSON_BYTES + 1)
    run_cli("inspect", tiny).refused("far more than any such file")


def test_a_config_nested_without_end(run_cli, tiny):
    (tiny / "config.json").write_text('{"model_type":' + '{"a":' * 100_000 + "1" + "}" * 100_001)
    run_cli("inspect", tiny).refused("is not JSON")


def test_a_config_larger_than_its_weights(run_cli, tiny, tokens):
    with_config(tiny, hidden_size=1 << 17, vocab_size=1 << 20)
    run_cli("bands", tiny, "--tokens", tokens).refused(
        "parameters, and its weight files hold", "do not belong together"
    )


def test_a_table_of_angles_without_end(run_cli, tmp_path):
    config = {"model_type": "gptj", "n_positions": 10**10, "rotary_dim": 16, "n_embd": 64, "n_head": 4, "n_layer": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run_cli("inspect", tmp_path / "config.json").refused("a table of")


def test_heads_wider_than_any(run_cli, tiny):
    path = with_config(tiny, head_dim=None, hidden_size=1 << 20, num_attention_heads=2, num_key_value_heads=2)
    run_cli("inspect", path).refused("heads of layer 0 have 524,288 channels")


# -- weights -----------------------------------------------------------------------------------------


def sharded(folder, name):
    """The tiny checkpoint as one shard of this name in an index."""
    source = folder / "model.safetensors"
    index = {"metadata": {}, "weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return source


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../outside.safetensors"])
def test_an_index_that_names_files_elsewhere(tiny, name):
    sharded(tiny, name).rename(tiny.parent / "outside.safetensors")
    with pytest.raises(rp.ProbeError, match="names files outside its own folder: do not use this checkpoint"):
        rp.open(tiny)


def test_a_link_that_leads_elsewhere(tiny):
    outside = sharded(tiny, "model-00001-of-00001.safetensors").rename(tiny.parent / "outside.safetensors")
    (tiny / "model-00001-of-00001.safetensors").symlink_to(outside)
    with pytest.raises(rp.ProbeError, match="names files outside its own folder"):
        rp.open(tiny)
    (tiny / "model-00001-of-00001.safetensors").unlink()
    (tiny / "sub").symlink_to(tiny.parent)
    sharded(tiny, "sub/outside.safetensors")
    with pytest.raises(rp.ProbeError, match="names files outside its own folder"):
        rp.open(tiny)


def test_links_of_the_hub_cache_are_followed(tiny, tmp_path):
    """snapshots/COMMIT/file -> ../../blobs/HASH is how every download lies there."""
    home = tmp_path / "models--someone--tiny"
    blobs, snapshot = home / "blobs", home / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    name = "model-00001-of-00001.safetensors"
    sharded(tiny, name).rename(tiny / name)
    for file in tiny.iterdir():
        file.rename(blobs / f"hash-{file.name}")
        (snapshot / file.name).symlink_to(os.path.join("..", "..", "blobs", f"hash-{file.name}"))
    assert rp.open(snapshot).provenance["source"] == "folder"


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b'{"weight_map": 3}',
        b'{"weight_map": {"a": 3}}',
        b'{"weight_map": {"a": ["b"]}}',
        b'{"weight_map": {"a": null}}',
        b"[" * 100_000,
    ],
)
def test_an_index_that_is_none(tiny, content):
    (tiny / "model.safetensors").unlink()
    (tiny / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(rp.ProbeError, match="is not an index of weight files"):
        rp.open(tiny)


@pytest.mark.parametrize("offsets", [[0, "9"], [0, 1e400], [0, None], 3, [0, 10**30]])
def test_a_weight_header_that_lies(tiny, offsets):
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    (tiny / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(rp.ProbeError, match="has a damaged header|is cut short"):
        rp.open(tiny)


def test_a_gguf_that_asks_for_too_much(tmp_path, monkeypatch):
    monkeypatch.setenv("ROPE_PROBE_CACHE", str(tmp_path / "cache"))
    writer = gguf.GGUFWriter(tmp_path / "deep.gguf", "llama")
    writer.add_block_count(10**9)
    writer.add_embedding_length(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(rp.ProbeError, match=r"the config of deep.gguf says num_hidden_layers = 1e\+09"):
        rp.open(tmp_path / "deep.gguf")


# -- token files -------------------------------------------------------------------------------------


def npy(path, descr, shape, data=b""):
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data)
    return path


@pytest.mark.parametrize("shape", ["(10**9, 10**9)", "(1000000000, 1000000000)", "(-1, 4)", f"({2**62}, {2**62})", "3"])
def test_a_token_file_that_declares_more_than_it_holds(probe, tmp_path, shape):
    probe(source=("--tokens", npy(tmp_path / "t.npy", "<i8", shape, bytes(64)))).refused(
        "t.npy is not a .npy array of integers"
    )


def test_a_sparse_token_file_of_a_terabyte(probe, tmp_path):
    path = npy(tmp_path / "t.npy", "<i8", "(1000000000, 1000)")
    with path.open("r+b") as stream:
        stream.truncate(128 + 8 * 10**12)
    probe(source=("--tokens", path)).refused("read at most", "(--segments, --length)")
    assert probe("--segments", "2", "--length", "8", source=("--tokens", path)).code == 0


def test_pickled_tokens_are_never_loaded(probe, tmp_path):
    class Trap:
        def __reduce__(self):
            return open, (str(tmp_path / "canary"), "w")

    np.save(tmp_path / "t.npy", np.array([[Trap()]], dtype=object), allow_pickle=True)
    probe(source=("--tokens", tmp_path / "t.npy")).refused("is not a .npy array of integers")
    assert not (tmp_path / "canary").exists()


# -- result files ------------------------------------------------------------------------------------


@pytest.fixture
def result(probe, run_cli):
    assert probe("-o", "a.nc").code == 0
    return Path("a.nc").absolute()


def shown(run_cli, path, *parts):
    """Neither shown nor compared nor bound; one sentence each."""
    run_cli("show", path).refused(*parts)
    run_cli("compare", path, path).refused(*parts)
    run_cli("bound", "--weights", path).refused(*parts)


def test_an_array_of_terabytes_in_a_small_file(run_cli, result):
    with h5py.File(result, "a") as file:
        file.create_dataset("bomb", (10**6, 10**6), "f8", chunks=(1000, 1000), compression="gzip")
    shown(run_cli, result, "declares more than", "(in bomb): do not use this file")


def test_one_long_text_named_many_times(run_cli, result):
    with h5py.File(result, "a") as file:
        file.create_dataset("bomb", (200_000,), h5py.string_dtype())
    shown(run_cli, result, "holds 200,000 texts")


def test_texts_in_a_file_of_megabytes(tmp_path):
    """Kinds of layers and roles of heads, beside numbers: all of them short, however large the file."""
    import xarray as xr

    texts = {name: ("layer", np.full(30, "default")) for name in ("layer_type", "rope_type", "layout")}
    ds = xr.Dataset(
        {"role": (("layer", "head"), np.full((30, 9), "other")), "weight": ("x", np.zeros(300_000)), **texts}
    )
    path = rp.save(ds.assign_attrs(analysis="heads", schema=1), tmp_path / "h.nc")
    assert path.stat().st_size * 30 * 2 > limits.ARRAY_BYTES
    xr.testing.assert_equal(rp.load(path), ds)


def test_an_attribute_of_many_texts(run_cli, result):
    with h5py.File(result, "a") as file:
        file["k_norm"].attrs["bomb"] = np.array(["x" * 1000] * 3000, dtype=h5py.string_dtype())
    shown(run_cli, result, "attribute bomb")


def test_data_kept_in_other_files(run_cli, result, tmp_path):
    (tmp_path / "secret").write_bytes(bytes(80))
    for kind in ("external", "virtual", "link"):
        with h5py.File(result, "a") as file:
            if "leak" in file:
                del file["leak"]
            if kind == "external":
                file.create_dataset("leak", (10,), "f8", external=[(str(tmp_path / "secret"), 0, 80)])
            elif kind == "virtual":
                layout = h5py.VirtualLayout((10,), "f8")
                layout[:] = h5py.VirtualSource(str(tmp_path / "secret"), "x", (10,))
                file.create_virtual_dataset("leak", layout)
            else:
                file["leak"] = h5py.ExternalLink(str(tmp_path / "secret"), "x")
        shown(run_cli, result, "leak in", "do not use this file")


@pytest.mark.parametrize("analysis", ["../../x", "show", "inspect", "bands.evil", "x" * 10_000])
def test_an_analysis_that_is_none(run_cli, result, analysis):
    rp.save(rp.load(result).assign_attrs(analysis=analysis), result)
    run_cli("show", result).refused("the result is of analysis", "which has no summary here")


# -- no code -----------------------------------------------------------------------------------------


def test_nothing_here_loads_a_pickle():
    """By the text of every module: no pickle, no torch.load, no numpy.load that would allow one."""
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"\bimport (pickle|dill|marshal|shelve|joblib)\b|torch\.load|allow_pickle=True", text), (
            path
        )
        for call in re.findall(r"np\.load\(.*", text):
            assert "allow_pickle=False" in call, path


def test_opening_runs_no_code_of_the_checkpoint(tiny):
    """Whichever file says that there is code: in a process of its own, so that nothing hides."""
    canary = tiny / "canary"
    for module in ("configuration_own", "modeling_own", "tokenization_own"):
        (tiny / f"{module}.py").write_text(f"open({str(canary)!r}, 'w')")
    with_config(
        tiny,
        auto_map={"AutoConfig": "configuration_own.A", "AutoModelForCausalLM": "modeling_own.A"},
    )
    config = json.loads((tiny / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["tokenization_own.A", None]}}
    (tiny / "tokenizer_config.json").write_text(json.dumps(config))
    script = f"import rope_probe as rp\nrp.check({str(tiny)!r}, quick=True)"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=300)
    assert not canary.exists()
