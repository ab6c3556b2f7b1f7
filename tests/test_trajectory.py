"""trajectory: the same numbers as bands at every checkpoint, taken up again where it stopped; and bands under --rope."""

import gc
import json
import weakref

import matplotlib
import numpy as np
import pytest
import torch
from conftest import tiny_model

import rope_probe as rp
from rope_probe.errors import ProbeError, UsageError
from rope_probe.plots import trajectory as plot
from rope_probe.plots.trajectory import profiles
from rope_probe.probes import trajectory as module  # the module: its function has the same name
from rope_probe.probes.trajectory import KEPT, places, trajectory

matplotlib.use("agg")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folders(tmp_path):
    """Three checkpoints of one shape with other weights."""
    found = []
    for number in (0, 50, 400):
        model = tiny_model()
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.weight[number % 7] *= 1 + number
        model.save_pretrained(tmp_path / f"step{number}")
        found.append(tmp_path / f"step{number}")
    return found


def test_every_checkpoint_has_the_numbers_of_bands(folders, tokens):
    ds = trajectory(folders, tokens=tokens)
    assert ds["checkpoint"].values.tolist() == ["step0", "step50", "step400"]
    assert ds["step"].values.tolist() == [0, 50, 400]
    values = rp.summary(ds)
    for number, folder in enumerate(folders):
        alone = rp.bands(rp.open(folder), tokens=tokens)
        for name in KEPT:
            np.testing.assert_array_equal(ds[name].values[number], alone[name].values)
        assert values["checkpoints"][number]["i_band"] == rp.summary(alone)["i_band"]
    assert values["i_band"] == values["checkpoints"][-1]["i_band"] and values["analysis"] == "trajectory"
    assert len({row["i_band"] for row in values["checkpoints"]}) > 1


def test_it_goes_on_where_it_stopped(folders, tokens, tmp_path, monkeypatch):
    file, opened = tmp_path / "t.nc", []
    real = module.open_checkpoint

    def watched(model, **options):
        opened.append(str(model)[-6:])
        return real(model, **options)

    def interrupted(done, total):
        if done == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "open_checkpoint", watched)
    with pytest.raises(KeyboardInterrupt):
        trajectory(folders, tokens=tokens, file=file, progress=interrupted)
    held = rp.load(file)
    assert held["checkpoint"].values.tolist() == ["step0", "step50"] and held.attrs["partial"] == 1
    again = trajectory(folders, tokens=tokens, file=file)
    assert opened == ["/step0", "step50", "tep400"]
    whole = trajectory(folders, tokens=tokens)
    assert again.attrs["partial"] == 0
    for name in KEPT:
        np.testing.assert_array_equal(again[name], whole[name])
    assert again.attrs["provenance"] == whole.attrs["provenance"]


def test_a_stop_inside_a_checkpoint_leaves_that_one_out(folders, tokens, monkeypatch):
    real, calls = module.bands, []

    def stopping(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "bands", stopping)
    ds = trajectory(folders, tokens=tokens)
    assert ds.attrs["partial"] == 1 and ds["checkpoint"].values.tolist() == ["step0"]


def test_weights_are_freed_before_the_next_is_opened(folders, tokens, monkeypatch):
    real, models = module.open_checkpoint, []

    def watched(model, **options):
        gc.collect()
        assert not [one for one in models if one() is not None]
        ckpt = real(model, **options)
        models.append(weakref.ref(ckpt.model))
        return ckpt

    monkeypatch.setattr(module, "open_checkpoint", watched)
    trajectory(folders, tokens=tokens)
    assert len(models) == 3


def test_refusals(folders, tokens, tmp_path):
    with pytest.raises(UsageError, match="one model"):
        places(["a", "b"], ["main"])
    with pytest.raises(UsageError, match="named twice"):
        places("a", ["main", "main"])
    assert [place.label for place in places(["x/final", "y/final"])] == ["x/final", "y/final"]
    file = tmp_path / "t.nc"
    trajectory(folders[:2], tokens=tokens, file=file)
    other = tmp_path / "other.npy"
    np.save(other, np.load(tokens)[:, ::-1])
    with pytest.raises(ProbeError, match="on other tokens"):
        trajectory(folders, tokens=other, file=file)
    with pytest.raises(ProbeError, match="step50, which is not asked for"):
        trajectory(folders[::2], tokens=tokens, file=file)
    tiny_model(num_hidden_layers=2).save_pretrained(tmp_path / "shallow")
    with pytest.raises(ProbeError, match="other layers"):
        trajectory([folders[0], tmp_path / "shallow"], tokens=tokens)
    tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 500.0}).save_pretrained(tmp_path / "based")
    with pytest.raises(ProbeError, match="other frequencies"):
        trajectory([folders[0], tmp_path / "based"], tokens=tokens)


@pytest.mark.filterwarnings("error")
def test_figure_shows_every_checkpoint(folders, tokens):
    ds = trajectory(folders, tokens=tokens)
    axes = plot(ds)
    rows = rp.summary(ds)["checkpoints"]
    lines = [line for line in axes[0].lines if line.get_marker() == "o"]
    assert list(lines[0].get_xdata()) == [row["i_band"] for row in rows]
    kind = next(iter(rp.plot.style.kinds(ds)))
    heads = ds["k_norm"].values / ds["k_norm"].values.mean(-1, keepdims=True)
    np.testing.assert_allclose(profiles(ds, kind, "k"), heads.mean((1, 2)))
    drawn = axes[2].collections[0].get_array().reshape(3, 8)
    np.testing.assert_allclose(drawn, profiles(ds, kind, "k") / profiles(ds, kind, "k").max(1, keepdims=True))


def test_command(run_cli, folders, tokens, tmp_path):
    out, figure = tmp_path / "t.nc", tmp_path / "t.png"
    done = run_cli("trajectory", *folders, "--tokens", tokens, "-o", out, "--figure", figure)
    assert done.code == 0, done.err
    assert all(f"step{step}" in done.out for step in (0, 50, 400)) and "predicted" in done.out
    assert figure.stat().st_size
    assert run_cli("show", out).out.split("result")[0] == done.out.split("result")[0]
    values = json.loads(run_cli("trajectory", *folders, "--tokens", tokens, "-o", out, "--json").out)
    assert [row["step"] for row in values["checkpoints"]] == [0, 50, 400]
    run_cli("trajectory", folders[0], folders[1], "--revisions", "a,b").refused("--revisions", code=2)


# --- bands under other rope parameters -------------------------------------------------------------------------------

OVERRIDES = {
    "type=yarn,factor=4": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "type=linear,factor=2": {"rope_type": "linear", "factor": 2.0},
    "base=500": {"rope_type": "default"},
    "type=llama3,factor=8": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("rope", OVERRIDES)
def test_an_override_is_the_model_of_that_config(rope, tiny_folder, tokens):
    from transformers import LlamaConfig, LlamaForCausalLM

    changed = rp.open(tiny_folder, rope=rope)
    ds = rp.bands(changed, tokens=tokens)
    config = LlamaConfig.from_pretrained(tiny_folder)
    base = 500.0 if "base" in rope else 1e4
    config.rope_parameters = OVERRIDES[rope] | {"rope_theta": base}
    same = rp.bands(rp.open(LlamaForCausalLM.from_pretrained(tiny_folder, config=config)), tokens=tokens)
    for name in (*ds.data_vars, "wavelength", "attention_scaling", "base"):
        np.testing.assert_array_equal(ds[name], same[name])
    plain = rp.bands(rp.open(tiny_folder), tokens=tokens)
    assert not np.array_equal(ds["wavelength"], plain["wavelength"])
    assert not np.array_equal(ds["k_norm"][1:], plain["k_norm"][1:])  # later layers read what attention made
    # the bands were formed before the override: theory keeps its place
    kind, before = (next(iter(rp.summary(one)["by_layer_type"].values())) for one in (ds, plain))
    assert kind["predicted"] == before["predicted"] and kind["formation_base"] == 1e4
    assert kind["wavelength"] != before["wavelength"]


def test_an_override_is_named_in_file_table_and_caption(run_cli, tiny_folder, tokens, tmp_path):
    out = tmp_path / "y.nc"
    done = run_cli("bands", tiny_folder, "--tokens", tokens, "--rope", "type=yarn,factor=4", "-o", out)
    assert "tiny under type=yarn, factor=4" in done.out
    ds = rp.load(out)
    assert json.loads(ds.attrs["provenance"])["rope"] == {"rope_type": "yarn", "factor": 4}
    assert "tiny under type=yarn, factor=4" in rp.plot.style.source(ds)
    assert rp.plot.style.kinds(ds)[0].wavelength[-1] == pytest.approx(4 * 2 * np.pi * 1e4 ** (7 / 8), rel=1e-5)


def test_an_override_that_cannot_be_is_refused(run_cli, tiny_folder, tokens, no_network):
    run_cli("bands", tiny_folder, "--tokens", tokens, "--rope", "factor").refused("--rope", code=2)
    run_cli("bands", tiny_folder, "--tokens", tokens, "--rope", "type=foo").refused("foo", "yarn", code=2)
    with pytest.raises(UsageError, match="rope.* are for opening"):
        rp.open(tiny_model(), rope="base=500")
