"""The command line as a person and as a script use it."""

import json
import resource
import subprocess
import sys

import numpy as np
import pytest

import rope_probe as rp


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`rope-probe bands demo:smollm2` on a few ids, once: folder and printed JSON."""
    folder = tmp_path_factory.mktemp("run")
    np.save(folder / "T.npy", np.random.default_rng(1).integers(0, 49152, (2, 64)))
    command = [sys.executable, "-m", "rope_probe", "bands", "demo:smollm2", "--tokens", "T.npy", "--layers", "0-3"]
    command += ["-o", "b.nc", "--figure", "b.svg", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_json_is_one_object_and_nothing_else(run):
    folder, done = run
    values = json.loads(done.stdout)  # fails on anything beside the object
    assert done.stderr == ""
    for key in ("i_band", "i_band_q", "i_band_usage", "mode", "pairs", "by_layer_type", "output"):
        assert key in values
    group = values["by_layer_type"]["full_attention"]
    for key in ("i_band", "i_band_q", "i_band_usage", "base", "length", "window", "predicted"):
        assert key in group
    assert set(group["predicted"]) == {"variance", "half_turn", "eigenvalue", "full_turn"}
    assert values["output"] == "b.nc"
    assert values["i_band"] == rp.summary(rp.load(folder / "b.nc"))["i_band"]


def test_figure_is_three_files(run):
    folder, done = run
    drawn = json.loads(done.stdout)["figures"]
    assert drawn == ["b.svg", "b-layers.svg", "b-heads.svg"]
    for name in drawn:
        assert (folder / name).read_text().startswith("<?xml")


def test_show_makes_table_and_figures_again(run, run_cli, tmp_path):
    folder, done = run
    again = run_cli("show", str(folder / "b.nc"), "--figure", str(tmp_path / "b.svg"))
    assert again.code == 0
    assert "SmolLM2-135M-Instruct" in again.out and "i_band, keys" in again.out
    assert (tmp_path / "b.svg").read_bytes() == (folder / "b.svg").read_bytes()


def test_default_output_never_overwrites(run, run_cli, tmp_path, monkeypatch):
    folder, _ = run
    monkeypatch.chdir(tmp_path)
    for name in ("bands-demo-smollm2.nc", "bands-demo-smollm2-2.nc"):
        arguments = ("--tokens", str(folder / "T.npy"), "--layers", "0", "--json")
        values = json.loads(run_cli("bands", "demo:smollm2", *arguments).out)
        assert values["output"] == name and (tmp_path / name).is_file()


def test_help_is_instant_and_imports_nothing_heavy():
    code = "import sys; sys.argv = ['rope-probe', '--help']\nfrom rope_probe.cli import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    pass\n"
    code += "heavy = {'torch', 'transformers', 'xarray', 'numpy', 'matplotlib', 'pandas'} & set(sys.modules)\n"
    code += "assert not heavy, heavy"
    times = []  # of the processor: the clock also counts what else the machine does
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(times) < 0.5


@pytest.mark.parametrize("command", ["bands", "inspect", "bound", "show"])
def test_every_help_ends_in_an_example(run_cli, command):
    done = run_cli(command, "--help")
    assert done.code == 0
    assert f"rope-probe {command}" in done.out.split("Example", 1)[1]


def test_inspect_json_from_a_bare_config(run_cli, tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "vocab_size": 97,
        "rope_theta": 10000.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = json.loads(run_cli("inspect", str(tmp_path / "config.json"), "--json").out)
    assert (values["model_type"], values["heads"], values["kv_heads"], values["claimed_length"]) == ("llama", 4, 2, 64)
    wanted = (
        "layer layer_type rotates base rope_type attention_scaling rotary_dim head_dim pairs zero_pairs layout window "
        "inv_freq wavelength_min wavelength_max undertrained length"
    )
    assert len(values["layers"]) == 2
    assert set(wanted.split()) <= set(values["layers"][0])
    # 8 pairs, base 1e4: wavelengths 2 pi 10^(j/2); those of pairs 3 to 7 exceed 64 tokens, pair 2 has 62.8
    assert values["layers"][0]["undertrained"] == 5
