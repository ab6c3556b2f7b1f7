"""Result files: what is written comes back, atomically; what is no result is refused in one sentence."""

import errno
import io
import os
import subprocess
import sys

import h5py
import numpy as np
import pytest
import xarray as xr
from conftest import tiny_model

import rope_probe as rp
from rope_probe import results


@pytest.fixture(scope="module")
def measured():
    ids = np.random.default_rng(0).integers(0, 97, (3, 16))
    return rp.bands(rp.open(tiny_model()), tokens=ids, control=True)


@pytest.fixture
def file(tmp_path, measured):
    return rp.save(measured, tmp_path / "bands.nc")


def refusal(function, *arguments) -> str:
    with pytest.raises(rp.ProbeError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- writing and reading ---------------------------------------------------------------------------------------------


def test_a_result_comes_back_whole(file, measured):
    back = rp.load(file)
    xr.testing.assert_identical(back, measured)
    assert rp.summary(back) == rp.summary(measured)
    assert back.attrs["schema"] == results.SCHEMA and back.attrs["partial"] == 0


def test_a_result_is_plain_netcdf(file, measured):
    with h5py.File(file) as stored:
        assert set(measured.data_vars) <= set(stored)
        np.testing.assert_array_equal(stored["k_norm"][()], measured["k_norm"].values)


def test_every_variable_has_a_name_and_a_unit(measured):
    assert len(measured.data_vars) > 10
    for name, variable in measured.data_vars.items():
        assert variable.attrs["long_name"] and variable.attrs["units"], name


def test_exactly_the_file_is_written(tmp_path, measured):
    path = rp.save(measured, tmp_path / "any name.result")
    assert path == tmp_path / "any name.result"
    assert os.listdir(tmp_path) == ["any name.result"]


def test_the_mode_of_a_new_file_is_the_users(tmp_path, measured):
    mask = os.umask(0o027)
    try:
        path = rp.save(measured, tmp_path / "a.nc")
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o640


# --- writing that fails ----------------------------------------------------------------------------------------------


class Full(io.FileIO):
    """A file on a disk that has room for ten bytes more."""

    def write(self, data):
        super().write(bytes(data[:10]))
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(file, measured, monkeypatch):
    before = file.read_bytes()
    monkeypatch.setattr(results, "open", Full, raising=False)
    assert refusal(rp.save, measured * 2, file) == (
        f"cannot write {file}: No space left on device; free space or give another name."
    )
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files")
def test_a_disk_that_is_really_full(file):
    """The system refuses to let the file grow, as on a full disk, in the middle of writing."""
    code = f"""
import resource, signal, rope_probe as rp
from rope_probe.errors import ProbeError
ds = rp.load({str(file)!r})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
try:
    rp.save(ds, {str(file)!r})
except ProbeError as error:
    print(error)
"""
    before = file.read_bytes()
    assert len(before) > 6000
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"cannot write {file}: File too large; free space or give another name.\n"
    assert done.stderr == ""
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_an_interrupt_while_writing_leaves_nothing(file, measured, monkeypatch):
    before = file.read_bytes()

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rp.save(measured, file)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert refusal(results.check_writable, tmp_path) == f"{tmp_path} is a folder: give the file to write."
    assert refusal(results.check_writable, tmp_path / "no" / "a.nc") == (
        f"cannot write {tmp_path}/no/a.nc: the folder {tmp_path}/no does not exist; make it, or give another name."
    )
    assert "does not exist" in refusal(results.check_writable, tmp_path / "file" / "a.nc")
    assert refusal(results.check_writable, "/dev/null") == "/dev/null is not a regular file: give another name."
    results.check_writable(tmp_path / "a.nc")
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_a_folder_that_takes_no_files(tmp_path, monkeypatch):
    def denied(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", denied)
    sentence = refusal(results.check_writable, tmp_path / "a.nc")
    assert sentence == f"cannot write {tmp_path / 'a.nc'}: Permission denied; give another name."


# --- files that are no results ---------------------------------------------------------------------------------------


def test_a_file_that_is_not_there(tmp_path):
    sentence = f"there is no result file {tmp_path / 'a.nc'}: check the path."
    assert refusal(rp.load, tmp_path / "a.nc") == sentence
    assert refusal(rp.load, tmp_path) == f"there is no result file {tmp_path}: check the path."


@pytest.mark.parametrize("content", [b"", b"name,value\na,1\n", b"\x89HDF\r\n\x1a\n", b"CDF\x01" + b"\x00" * 28])
def test_a_file_that_is_no_result(tmp_path, content):
    path = tmp_path / "a.nc"
    path.write_bytes(content)
    sentence = refusal(rp.load, path)
    assert sentence.startswith(f"{path} is not a result file (") or sentence.startswith(f"{path} was not written by")
    assert sentence.endswith(": give a .nc file that rope-probe wrote.")


@pytest.mark.parametrize("share", [0.01, 0.3, 0.7, 0.99])
def test_a_file_cut_short(file, share):
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    assert refusal(rp.load, file).startswith(f"{file} is not a result file (")


def test_netcdf_of_someone_else(tmp_path):
    path = tmp_path / "weather.nc"
    xr.Dataset({"rain": ("day", [1.0, 2.0])}).to_netcdf(path, engine="h5netcdf")
    assert refusal(rp.load, path) == (
        f"{path} was not written by rope-probe (it names no analysis): give a .nc file that rope-probe wrote."
    )


def changed(measured, path, **attributes):
    return rp.save(measured.assign_attrs(attributes), path)


@pytest.mark.parametrize("schema", [results.SCHEMA + 1, 99, "two"])
def test_a_newer_schema(tmp_path, measured, schema):
    path = changed(measured, tmp_path / "a.nc", schema=schema)
    sentence = f"{path} has schema {schema}, newer than this version reads ({results.SCHEMA}): update rope-probe."
    assert refusal(rp.load, path) == sentence


def test_an_analysis_that_is_unknown(tmp_path, measured):
    back = rp.load(changed(measured, tmp_path / "a.nc", analysis="tides"))
    assert "the result is of analysis 'tides', which" in refusal(rp.summary, back)


def test_a_result_that_lacks_a_variable(measured):
    sentence = refusal(rp.summary, measured.drop_vars("usage"))
    assert sentence.startswith("the bands result is not whole (\"No variable named 'usage'")
    assert sentence.endswith("): run the analysis again.")
