"""Runs that are killed: whatever was measured is kept, and a resumed run ends with the numbers of one that was not."""

import json
import os
import signal
import time

import numpy as np
import pytest
import xarray as xr
from conftest import COMMANDS, VOCABULARY, command_of, edit_weights

import rope_probe as rp
from rope_probe import cli
from rope_probe.cli import common
from rope_probe.errors import ProbeError, ProbeWarning
from rope_probe.resume import Keeper, resumable


@pytest.fixture
def long_tokens(tmp_path):
    path = tmp_path / "long.npy"
    np.save(path, np.random.default_rng(3).integers(2, VOCABULARY, (10, 48)))
    return path


def arguments(analysis, folder, tokens, output):
    return ["rope-probe", *command_of(analysis, folder, tokens, output)]


def same(path, whole):
    ds = rp.load(path)
    assert ds.attrs["partial"] == 0 and ds.attrs["segments"] == whole.attrs["segments"]
    xr.testing.assert_equal(ds, whole)
    for name in ("options", "tokens_sha256", "model"):
        assert ds.attrs[name] == whole.attrs[name]


# -- a run that dies ---------------------------------------------------------------------------------


def forked(argv, monkeypatch, kill_after=None) -> int:
    """Run a command in a child of this process; its exit code, or −9 where it was killed first."""
    monkeypatch.setattr("sys.argv", argv)
    monkeypatch.setenv("ROPE_PROBE_KEEP_EVERY", "0")
    child = os.fork()
    if child == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            cli.main()
            os._exit(0)
        except SystemExit as stop:
            os._exit(int(stop.code or 0))
        finally:
            os._exit(70)
    if kill_after is not None:
        deadline = time.perf_counter() + kill_after
        while time.perf_counter() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("analysis", "kills"), [(name, 2) for name in COMMANDS])
def test_killed_at_random_and_resumed(analysis, kills, tiny_folder, long_tokens, run_cli, monkeypatch):
    killed_and_resumed(analysis, kills, tiny_folder, long_tokens, monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_fifty_kills(tiny_folder, long_tokens, run_cli, monkeypatch):
    for number, analysis in enumerate(COMMANDS):
        print(analysis, killed_and_resumed(analysis, 10, tiny_folder, long_tokens, monkeypatch, seed=number))


def killed_and_resumed(analysis, kills, folder, tokens, monkeypatch, seed=0):
    """Kill runs at random times, resume each until it ends, and compare; how many segments the kills found done."""
    rng, found = np.random.default_rng([seed, kills]), []
    started = time.perf_counter()
    assert forked(arguments(analysis, folder, tokens, "whole.nc"), monkeypatch) == 0
    takes, whole = time.perf_counter() - started, rp.load("whole.nc")
    again = [*arguments(analysis, folder, tokens, "a.nc"), "--resume"]
    while len(found) < kills:
        code = forked(again, monkeypatch, kill_after=rng.uniform(0.1, 1.0) * takes)
        if code == -signal.SIGKILL:
            held = 0
            if os.path.exists("a.nc.resume"):
                keeper = Keeper("a.nc.resume", resume=True)
                held = keeper.sections[analysis][0]["done"] if analysis in keeper.sections else 0
            found.append(held)
        else:
            assert code == 0
            same("a.nc", whole)
            os.remove("a.nc")
    assert forked(again, monkeypatch) == 0
    same("a.nc", whole)
    left = [name for name in os.listdir() if name not in ("a.nc", "whole.nc")]
    assert not left, left
    return found


@pytest.mark.parametrize("analysis", COMMANDS)
def test_interrupted_by_a_scheduler_and_resumed(analysis, tiny_folder, long_tokens, run_cli, monkeypatch):
    """SIGTERM in the middle: a partial result, and a state that goes on."""
    argv = arguments(analysis, tiny_folder, long_tokens, "a.nc")[1:]
    assert run_cli(*argv).code == 0
    whole = rp.load("a.nc")
    os.rename("a.nc", "whole.nc")

    pressed = []

    def press(self, done, total):  # truncate counts every setting, extend tokens
        if 2 * done >= total and not pressed:
            pressed.append(signal.raise_signal(signal.SIGTERM))

    with monkeypatch.context() as patch:
        patch.setattr(common.Progress, "__call__", press)
        done = run_cli(*argv)
    assert done.code == 1 and "--resume goes on from there (a.nc.resume)" in done.err
    cut = rp.load("a.nc")
    assert cut.attrs["partial"] == 1
    assert (cut.attrs["segments"] < 10) == (analysis != "extend")
    done = run_cli(*argv, "--resume")
    assert (done.code, done.err) == (0, "")
    same("a.nc", whole)
    assert sorted(os.listdir()) == ["a.nc", "whole.nc"]


# -- what a state is refused for -----------------------------------------------------------------------


@pytest.fixture
def interrupted(tiny, long_tokens, tmp_path):
    """A run of bands cut short after 4 of 10 segments: the model folder, and the state file."""
    state = tmp_path / "a.state"
    stop_after(rp.open(tiny), state, np.load(long_tokens), 4)
    assert state.is_file()
    return tiny, state


def stop_after(ckpt, state, ids, segments):
    def stop(done, total):
        if done == segments:
            raise KeyboardInterrupt

    with resumable(state):
        assert rp.bands(ckpt, tokens=ids, batch=2, progress=stop).attrs["segments"] == segments


def test_python_resumes_with_another_batch(interrupted, long_tokens):
    folder, state = interrupted
    ids, read = np.load(long_tokens), []
    with resumable(state, resume=True):
        ds = rp.bands(rp.open(folder), tokens=ids, batch=3, progress=lambda *seen: read.append(seen))
    assert read == [(0, 6), (3, 6), (6, 6)]
    whole = rp.bands(rp.open(folder), tokens=ids, batch=2)
    xr.testing.assert_allclose(ds, whole, rtol=2e-5, atol=1e-6)
    assert not state.exists()


@pytest.mark.parametrize("what", ["text", "options", "weights", "dtype", "model"])
def test_a_changed_run_is_refused(interrupted, long_tokens, what, tmp_path):
    folder, state = interrupted
    ids, options, opening = np.load(long_tokens), {}, {}
    if what == "text":
        ids[7, 3] += 1
    if what == "options":
        options["layers"] = [0, 1]
    if what == "dtype":
        opening["dtype"] = "bfloat16"
    if what == "weights":

        def change(tensors):
            tensors["model.layers.1.self_attn.k_proj.weight"] *= 1.01

        edit_weights(folder, change)
    if what == "model":
        os.rename(folder, tmp_path / "renamed")
        folder = tmp_path / "renamed"
    before = state.read_bytes()
    with pytest.raises(ProbeError, match=f"with (an)?other {what} .*give the same again, or leave out --resume"):
        with resumable(state, resume=True):
            rp.bands(rp.open(folder, **opening), tokens=ids, **options)
    assert state.read_bytes() == before


def test_a_state_of_another_analysis_is_no_start(interrupted, long_tokens):
    folder, state = interrupted
    with resumable(state, resume=True):
        ds = rp.similarity(rp.open(folder), tokens=np.load(long_tokens))
    assert ds.attrs["segments"] == 10


@pytest.mark.parametrize("damage", ["cut", "text", "array", "pickle"])
def test_a_damaged_state_is_refused(interrupted, long_tokens, damage, probe, tokens):
    folder, state = interrupted
    if damage == "cut":
        state.write_bytes(state.read_bytes()[:-100])
    if damage == "text":
        state.write_text("no state")
    if damage == "array":
        index = {
            "schema": 1,
            "sections": {"bands": {"fingerprint": {}, "done": 4, "state": {}, "first": 0, "arrays": 1}},
        }
        np.savez(state.with_suffix(".npz"), index=np.frombuffer(json.dumps(index).encode(), dtype=np.uint8))
        os.replace(state.with_suffix(".npz"), state)
    if damage == "pickle":
        np.savez(state.with_suffix(".npz"), index=np.array([{"schema": 1}], dtype=object))
        os.replace(state.with_suffix(".npz"), state)
    os.replace(state, "a.nc.resume")
    probe("-o", "a.nc", "--resume").refused("a.nc.resume is not the state of a run", "remove it")


def test_resume_without_a_state_says_so(probe):
    done = probe("-o", "a.nc", "--resume")
    assert done.code == 0 and done.err == "there is no a.nc.resume, so the run starts from the beginning\n"


def test_a_state_that_is_there_is_named(probe):
    open("a.nc.resume", "w").close()
    done = probe("-o", "a.nc")
    assert done.code == 0 and done.err == "a.nc.resume of an interrupted run is there: --resume would go on from it\n"


def test_a_full_disk_does_not_end_the_run(tiny_folder, long_tokens, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rope_probe.resume.replace_file", full)
    with pytest.warns(ProbeWarning, match="could not be kept in .*No space left on device"):
        with resumable(tmp_path / "a.state", every=0):
            ds = rp.bands(rp.open(tiny_folder), tokens=np.load(long_tokens))
    assert ds.attrs["partial"] == 0


def test_scratch_of_killed_runs_is_removed(tmp_path):
    from rope_probe.results import replace_file

    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    host = os.uname().nodename
    ours = [tmp_path / f".a.nc-{host}-{number}.part" for number in (child, os.getppid())]
    others = [tmp_path / f".a.nc-elsewhere-{child}.part", tmp_path / f".b.nc-{host}-{child}.part"]
    for path in (*ours, *others):
        path.write_text("half")
    replace_file(tmp_path / "a.nc", b"whole")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted(["a.nc", ours[1].name, *(path.name for path in others)])
