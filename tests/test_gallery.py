"""The figure set: measured once, drawn again to the same bytes."""

import hashlib
import json
import re
import shutil
import subprocess
import sys

import pytest

import rope_probe as rp
from rope_probe import gallery
from rope_probe.plots import FIGURES

SMALL = ("--segments", "2", "--length", "48")


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def made(tiny_folder, tmp_path_factory):
    """The set of a tiny model, without the analyses that take long."""
    folder = tmp_path_factory.mktemp("set") / "figures"
    only = "bands,inspect,heads,similarity,truncate,truncate-floor"
    words = ("figures", folder, "--run", tiny_folder, "--only", only, *SMALL)
    done = subprocess.run([sys.executable, "-m", "rope_probe", *map(str, words)], capture_output=True, text=True)
    return folder, words, done


def test_what_is_there_is_not_measured_again_and_drawn_to_the_same_bytes(made, run_cli):
    folder, words, first = made
    assert first.returncode == 0, first.stderr
    before = hashes(folder) | hashes(folder / "data")
    assert {"tiny-bands.png", "tiny-bands-layers.pdf", "inspect.png", "tiny-truncate-floor.pdf"} <= set(before)
    assert "--layer-type" not in rp.load(folder / "data" / "truncate-tiny.nc").attrs["command"]  # it has one type
    again = run_cli(*words, "--json")
    assert json.loads(again.out)["measured"] == []
    assert hashes(folder) | hashes(folder / "data") == before


def test_another_option_is_measured_anew(made, run_cli, tmp_path):
    folder, words, _ = made
    copy = shutil.copytree(folder, tmp_path / "figures")
    other = ["figures", copy, *words[2:4], "--only", "bands", "--segments", "3", "--length", "48"]
    (command,) = json.loads(run_cli(*other, "--json").out)["measured"]
    assert command.startswith("rope-probe bands") and "--segments 3" in command
    assert rp.load(copy / "data" / "bands-tiny.nc").attrs["segments"] == 3


def test_a_result_that_is_not_whole_is_measured_again(made, run_cli, tmp_path):
    folder, words, _ = made
    copy = shutil.copytree(folder, tmp_path / "figures")
    ds = rp.load(copy / "data" / "bands-tiny.nc")
    ds.attrs["partial"] = 1
    rp.save(ds, copy / "data" / "bands-tiny.nc")
    again = run_cli("figures", copy, *words[2:4], "--only", "bands", *SMALL, "--json")
    assert len(json.loads(again.out)["measured"]) == 1


def test_the_page_shows_every_figure_with_caption_and_command(made, run_cli, tmp_path):
    folder, _, _ = made
    copy = shutil.copytree(folder, tmp_path / "figures")
    done = run_cli("figures", copy)
    assert done.code == 0, done.err
    page = (copy / "README.md").read_text()
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
    assert set(shown) == {path.name for path in copy.glob("*.png")} and len(shown) == len(set(shown))
    assert page.count("· [PDF](") == len(shown)
    assert "`rope-probe bands " in page and "Model: tiny" in page


def test_a_failed_analysis_keeps_the_others_and_says_how_to_go_on(run_cli, tiny, tmp_path):
    folder = tmp_path / "figures"
    run = run_cli("figures", folder, "--run", tiny, "--only", "bands,extend", *SMALL)
    assert run.code == 1 and "extend" in run.err and "goes on from there" in run.err.splitlines()[-1]
    assert rp.load(folder / "data" / "bands-tiny.nc").attrs["segments"] == 2


def test_refusals(run_cli, tmp_path, tiny):
    run_cli("figures", tmp_path / "none").refused("no folder", "--run MODEL")
    run_cli("figures", tmp_path, "--run", tiny, "--only", "band").refused("'band'", "choose from", code=2)
    (tmp_path / "data").mkdir()
    run_cli("figures", tmp_path).refused("no result", "--run MODEL")
    run_cli("figures", tmp_path, "--segments", "2").refused("--segments", "--run", code=2)
    (tmp_path / "data" / "bands-x.nc").write_bytes(b"nothing")
    run_cli("figures", tmp_path).refused("bands-x.nc", "is not a result file")


def test_several_types_of_layers_are_cut_one_at_a_time(compared, tmp_path):
    rp.save(compared["bands"][2], tmp_path / "bands-gemma.nc")
    (recipe,) = [recipe for recipe in gallery.RECIPES if recipe.name == "truncate"]
    words = gallery.command(recipe, "owner/gemma", tmp_path)
    assert words[words.index("--layer-type") + 1] == "sliding_attention,full_attention"


def test_names():
    names = {"demo:smollm2": "smollm2", "meta-llama/Llama-2-7b-hf": "llama-2-7b-hf", "../a b/My.Model": "my.model"}
    assert {model: gallery.slug(model) for model in names} == names


def test_every_figure_says_what_it_stands_beside():
    known = {(analysis, figure) for analysis, drawn in FIGURES.items() for figure in drawn}
    extra = {("inspect", "inspect"), ("bound", "bound")}
    assert set(gallery.ANSWERS) <= known | extra
    assert known - set(gallery.ANSWERS) == {("scan", "layers"), ("scan", "heads")}
