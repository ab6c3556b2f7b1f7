"""A run that is cut short keeps what was measured: a valid file marked partial, and exit code 1."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import xarray as xr
from conftest import edit_weights

import rope_probe as rp
from rope_probe.cli import common

INTERRUPT = (
    "stopped after {count} segments; {path} holds what was measured; --resume goes on from there ({path}.resume)."
)


@pytest.fixture
def interrupt(monkeypatch):
    """Press Ctrl-C when so many segments have been read, by a real signal."""

    def at(count):
        def press(self, done, total):
            if done == count:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(common.Progress, "__call__", press)

    return at


def same_numbers(path, whole, count):
    cut = rp.load(path)
    assert (cut.attrs["partial"], cut.attrs["segments"]) == (int(count < 4), count)
    assert cut.attrs["tokens_sha256"] == whole.attrs["tokens_sha256"]
    xr.testing.assert_allclose(cut, whole, rtol=1e-6)


@pytest.fixture
def first_three(tiny_folder, tokens):
    return rp.bands(rp.open(tiny_folder), tokens=np.load(tokens)[:3], batch=1)


def test_ctrl_c_keeps_what_was_measured(probe, interrupt, first_three):
    interrupt(3)
    done = probe("--batch", "1", "-o", "a.nc")
    assert done.code == 1 and "interrupted" in done.out and "result   a.nc" in done.out
    assert done.err == f"rope-probe: {INTERRUPT.format(count=3, path='a.nc')}\n"
    same_numbers("a.nc", first_three, 3)


def test_ctrl_c_with_json(probe, interrupt):
    interrupt(2)
    done = probe("--batch", "1", "--json")
    assert done.code == 1
    values = json.loads(done.out)
    assert (values["partial"], values["segments"]) == (True, 2)


def test_show_reads_an_interrupted_result(probe, run_cli, interrupt):
    interrupt(2)
    probe("--batch", "1", "-o", "a.nc")
    done = run_cli("show", "a.nc", "--figure", "a.svg")
    assert (done.code, done.err) == (0, "") and "interrupted" in done.out


def test_ctrl_c_after_the_last_segment_changes_nothing(probe, interrupt):
    interrupt(4)
    done = probe("--batch", "1", "-o", "a.nc")
    assert (done.code, done.err) == (0, "")
    assert rp.load("a.nc").attrs["partial"] == 0


def test_ctrl_c_while_numbers_are_merged_waits_for_the_batch(probe, monkeypatch, first_three):
    from rope_probe.probes.bands import BandsObserver

    merge, calls = BandsObserver.merge, []

    def pressed(self, *arguments):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        merge(self, *arguments)

    monkeypatch.setattr(BandsObserver, "merge", pressed)
    assert probe("--batch", "1", "-o", "a.nc").code == 1
    same_numbers("a.nc", first_three, 3)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_anything_was_measured(probe, monkeypatch):
    def pressed(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("rope_probe.tap.Tap.run", pressed)
    probe("-o", "a.nc").refused("interrupted before the end; nothing more was written.")
    assert os.listdir() == []


def test_a_failure_in_a_later_batch_keeps_the_earlier_ones(probe, tiny, first_three):
    def spoil(tensors):
        tensors["model.embed_tokens.weight"][96] = float("nan")

    edit_weights(tiny, spoil)
    ids = np.random.default_rng(0).integers(2, 96, (4, 16))
    ids[3, 7] = 96
    np.save("ids.npy", ids)
    done = probe("--batch", "1", "-o", "a.nc", model=tiny, source=("--tokens", "ids.npy"))
    assert done.code == 1
    warning, sentence = done.err.splitlines()
    assert warning.startswith("warning: stopped after 3 of 4 segments: the queries of layer 0 are not finite: ")
    assert sentence == f"rope-probe: {INTERRUPT.format(count=3, path='a.nc')}"
    assert np.isfinite(rp.load("a.nc")["k_norm"]).all() and rp.load("a.nc").attrs["partial"] == 1


def test_ctrl_c_in_a_process_of_its_own(tiny_folder, tokens, tmp_path):
    code = """
    import os, signal, sys
    from rope_probe.cli import common, main
    def press(self, done, total):
        if done == 2:
            os.kill(os.getpid(), signal.SIGINT)
    common.Progress.__call__ = press
    main()
    """
    command = ["-c", textwrap.dedent(code), "bands", tiny_folder, "--tokens", tokens, "--batch", "1", "-o", "a.nc"]
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (1, f"rope-probe: {INTERRUPT.format(count=2, path='a.nc')}\n")
    assert "interrupted" in done.stdout
    assert rp.load(tmp_path / "a.nc").attrs["partial"] == 1
