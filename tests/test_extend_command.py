"""rope-probe extend: table, file, figures, refusals, interrupts."""

import json
import signal

import numpy as np
import pytest
from conftest import tiny_model
from test_passkey import character_tokenizer

import rope_probe as rp
from rope_probe.cli import common


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A Llama of one layer with a tokenizer of characters, saved."""
    folder = tmp_path_factory.mktemp("extend") / "characters"
    tiny_model(num_hidden_layers=1, max_position_embeddings=512).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def command(run_cli, folder, tokens):
    return lambda *options: run_cli("extend", folder, "--tokens", tokens, "--lengths", "8,16", *options)


PROMPTS = ("--passkey-lengths", "160,200", "--depths", "0,1", "--samples", "1", "--keys", "1,2")


@pytest.mark.usefixtures("one_thread")
def test_command_writes_table_file_and_figures(command):
    done = command("--base", "1e3,match", "--scaling", "none,yarn", *PROMPTS, "-o", "e.nc", "--figure", "e.png")
    assert (done.code, done.err) == (0, "")
    for words in ("L_bound", "yarn × 2", "found among 2", "base match", "the model as it is", "result   e.nc"):
        assert words in done.out
    assert [line for line in done.out.splitlines() if line.startswith("figure")] == [
        "figure   e.png",
        "figure   e-position.png",
        "figure   e-retrieval.png",
    ]


@pytest.mark.usefixtures("one_thread")
def test_show_gives_the_same_table_and_figure(command, run_cli):
    first = command("--base", "1e3", "--samples", "0", "-o", "e.nc", "--figure", "a.svg")
    again = run_cli("show", "e.nc", "--figure", "b.svg")
    assert again.out == first.out.replace("a.svg", "b.svg").replace("a-position", "b-position")
    assert open("a.svg").read() == open("b.svg").read()


@pytest.mark.usefixtures("one_thread")
def test_json(command):
    values = json.loads(command("--scaling", "linear", "--factor", "2,4", *PROMPTS, "--json").out)
    assert [one["name"] for one in values["settings"]] == [
        "base own, own",
        "base own, linear × 2",
        "base own, linear × 4",
    ]
    assert [one["length"] for one in values["settings"][0]["lengths"]] == [8, 16, 160, 200]
    assert values["settings"][1]["lengths"][2]["retrieval"][1]["prompts"] == 2


@pytest.mark.usefixtures("no_opening")
def test_wrong_arguments_are_refused_before_the_model_is_opened(command):
    command("--base", "1").refused("--base 1", code=2)
    command("--scaling", "spiral").refused("spiral", code=2)
    command("--factor", "2").refused("--factor", code=2)
    command("--samples", "0", "--keys", "2").refused("--samples 0", code=2)
    assert command("--base", "a").code == 2
    assert command("--keys", "1.5").code == 2


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("pressed", [0, 1, 2, 3])
def test_ctrl_c_keeps_what_was_measured(command, monkeypatch, pressed):
    """Whole cells: after the call that starts the clock, each is one reading of one setting, of all 4 segments."""
    calls = []

    def press(self, done, total):
        calls.append(done)
        if len(calls) == pressed + 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(common.Progress, "__call__", press)
    done = command("--base", "match", "--samples", "0", "-o", "e.nc")
    assert done.code == (pressed < 3)
    if not pressed:  # not even the model as it is
        assert "nothing more was written" in done.err
        return
    kept = rp.load("e.nc")
    whole = {1: [[True, True]], 2: [[True, True], [False, True]], 3: [[True, True]] * 2}
    assert np.isfinite(kept["nll"].values).all(-1).tolist() == whole[pressed]
    assert kept.attrs["partial"] == ("interrupted" in done.out) == (pressed < 3)
    assert ("e.nc holds what was measured" in done.err) == (pressed < 3)
