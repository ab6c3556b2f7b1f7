"""Two processes (torchrun, gloo) write the file that one would have written."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import xarray as xr
from conftest import COMMANDS, VOCABULARY, command_of

import rope_probe as rp


def together(code, folder, count=2):
    """Run code in several processes: each has `rank`; run(argv) runs a command and returns its exit code."""
    script = folder / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys
            import torch
            torch.set_num_threads(1)
            from rope_probe import cli
            rank = int(os.environ["RANK"])

            def run(argv):
                sys.argv = ["rope-probe", *argv]
                try:
                    cli.main()
                except SystemExit as stop:
                    return int(stop.code or 0)
                return 0
            """
        )
        + textwrap.dedent(code)
    )
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=240, env=environment
    )


@pytest.fixture
def odd_tokens(tmp_path):
    """Five segments: one process has more to read than the other."""
    path = tmp_path / "odd.npy"
    np.save(path, np.random.default_rng(3).integers(2, VOCABULARY, (5, 48)))
    return path


@pytest.mark.usefixtures("one_thread")
def test_two_processes_equal_one(tiny_folder, odd_tokens, tmp_path, run_cli):
    commands = [command_of(name, tiny_folder, odd_tokens, f"{name}.nc") for name in COMMANDS]
    commands.append(["trajectory", str(tiny_folder), "--tokens", str(odd_tokens), "-o", "trajectory.nc"])
    done = together(f"sys.exit(max(run(argv) for argv in {commands!r}))", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("result   bands.nc") == 1  # said by one of them
    for command in commands:
        assert run_cli(*command).code == 0
        name = command[0]
        ours, alone = rp.load(tmp_path / f"{name}.nc"), rp.load(f"{name}.nc")
        assert ours.attrs["segments"] == alone.attrs["segments"] == 5
        assert ours.attrs["tokens_sha256"] == alone.attrs["tokens_sha256"]
        for variable in alone.variables:
            if alone[variable].dtype.kind in "iubOU":  # counts, names
                np.testing.assert_array_equal(ours[variable], alone[variable], err_msg=f"{name} {variable}")
            else:
                np.testing.assert_allclose(ours[variable], alone[variable], rtol=1e-9, err_msg=f"{name} {variable}")
    left = [path.name for path in tmp_path.iterdir() if path.name.endswith((".part", ".resume"))]
    assert not left


@pytest.mark.usefixtures("one_thread")
def test_what_is_not_shared_is_done_once(tiny_folder, odd_tokens, tmp_path):
    commands = [["inspect", str(tiny_folder)], ["scan", str(tiny_folder), "--tokens", str(odd_tokens), "-o", "s.nc"]]
    commands += [["show", "s.nc"], ["figures", "set", "--run", str(tiny_folder)]]
    code = f"""
    codes = [run(argv) for argv in {commands!r}[: 2 if rank else 4]]
    assert codes == ([0, 0] if rank else [0, 0, 0, 2]), codes
    """
    done = together(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("result   s.nc") == 2  # of scan and of show
    assert done.stderr.count("without torchrun") == 1


@pytest.mark.usefixtures("one_thread")
def test_a_failure_in_one_process_is_said_once_and_keeps_the_rest(tiny_folder, odd_tokens, tmp_path):
    """Process 1 fails in the second round (segment 3): 0 to 2 are kept."""
    command = command_of("bands", tiny_folder, odd_tokens, "a.nc")
    code = f"""
    from rope_probe.errors import ProbeError
    from rope_probe.probes.bands import BandsObserver
    real = BandsObserver.blocks

    def failing(self, seen=[]):
        seen.append(1)
        if rank == 1 and len(seen) == 2:
            raise ProbeError("the queries of layer 2 are not finite: use --dtype float32.")
        return real(self)

    BandsObserver.blocks = failing
    code = run({command!r})
    assert code == (1 if rank == 0 else 0), code
    """
    done = together(code, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith(("warning", "rope-probe"))]
    assert lines == [
        "warning: stopped after 3 of 5 segments: the queries of layer 2 are not finite: use --dtype float32.",
        "rope-probe: stopped after 3 segments; a.nc holds what was measured; --resume goes on from there (a.nc.resume).",
    ]
    ids = np.load(odd_tokens)[:3]
    whole = rp.bands(rp.open(tiny_folder), tokens=ids, batch=1, control=True)
    cut = rp.load(tmp_path / "a.nc")
    assert cut.attrs["partial"] == 1
    xr.testing.assert_allclose(cut, whole, rtol=1e-9)


@pytest.mark.usefixtures("one_thread")
def test_a_dead_process_leaves_what_was_measured(tiny_folder, odd_tokens, tmp_path):
    command = command_of("bands", tiny_folder, odd_tokens, "a.nc")
    code = f"""
    from rope_probe.probes.bands import BandsObserver
    real = BandsObserver.blocks

    def dying(self, seen=[]):
        seen.append(1)
        if rank == 1 and len(seen) == 2:
            os._exit(9)
        return real(self)

    BandsObserver.blocks = dying
    sys.exit(run({command!r}))
    """
    done = together(code, tmp_path)
    assert done.returncode != 0
    cut = rp.load(tmp_path / "a.nc")
    assert (cut.attrs["partial"], cut.attrs["segments"]) == (1, 2)
    xr.testing.assert_allclose(
        cut, rp.bands(rp.open(tiny_folder), tokens=np.load(odd_tokens)[:2], batch=1, control=True)
    )
    assert not list(tmp_path.glob(".*.part"))


def test_the_environment_of_torchrun_is_checked(probe, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    probe().refused("WORLD_SIZE is 'two'", "torchrun", code=2)
