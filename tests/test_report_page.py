"""The page of a report: whole, safe, the same numbers as the commands, and readable in a browser by itself."""

import base64
import json
import re

import browser
import numpy as np
import pytest
import torch
from conftest import tiny_model
from families import NAMED
from pages import read

import rope_probe as rp
from rope_probe.probes.truncate import KEEP
from rope_probe.reporting.figures import on_dark
from rope_probe.reporting.record import MEASURED
from rope_probe.reporting.sections import ABOUT

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = list(ABOUT)
needs_browser = pytest.mark.skipif(
    not browser.found(), reason=f"no browser here: none of {', '.join(browser.NAMES)} is installed"
)


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(2, 97, (4, 64))


@pytest.fixture(scope="module")
def made(tmp_path_factory, ids):
    """Reports of a Llama, and of a Gemma 3 with two kinds of layers."""
    folder = tmp_path_factory.mktemp("report")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    models = {"llama": tiny_model(), "gemma": NAMED["Gemma 3 text"].build()}
    found = {name: rp.report(rp.open(model), folder / f"{name}.html", tokens=ids) for name, model in models.items()}
    torch.set_num_threads(threads)
    return found


both = pytest.mark.parametrize("model", ["llama", "gemma"])


@both
def test_every_analysis_is_on_the_page(made, model):
    report, (text, page) = made[model], read(made[model])
    assert (report.partial, report.failed) == (False, {})
    assert set(ALL) == {section.name for section in report.sections} | set(report.left_out)
    assert list(report.results) == list(MEASURED)
    assert [name for name in page.ids if name in ALL] == [name for name in ALL if name not in report.left_out]
    assert page.tags.count("svg") >= 14 and page.tags.count("table") >= 8
    for name, ds in report.results.items():
        assert ds.attrs["segments"] == 4
        assert f"sha256 {ds.attrs['tokens_sha256']}" in text, name
    for words in ("At a glance", "Predicted band", "Critical keep", "Spectrum damage", "4 segments read"):
        assert words in text


@both
def test_the_page_is_whole_and_asks_for_nothing(made, model):
    text, page = read(made[model])
    assert len(set(page.ids)) == len(page.ids)
    assert not {"script", "iframe", "object", "embed", "form"} & set(page.tags)
    assert "@import" not in text and "xlink" not in text
    for tag, key, value in page.links:
        inside = value.startswith("data:") or value.startswith("#") and value[1:] in page.ids
        assert inside or (tag, key) == ("a", "href") and value.startswith("https://arxiv.org/abs/"), (tag, key, value)
    for target in re.findall(r"url\(([^)]*)\)", text):
        assert target.startswith("data:") or target[1:] in page.ids, target[:60]
    assert len(text) < 8e6


@both
def test_results_and_numbers_can_be_taken_out_of_the_page(made, model, tmp_path):
    report, (text, _) = made[model], read(made[model])
    files = {
        name: base64.b64decode(data) for name, data in re.findall(r'download="([^"]+)" href="data:[^,]+,([^"]+)"', text)
    }
    for analysis, ds in report.results.items():
        (name,) = (name for name in files if name.startswith(analysis) and name.endswith(".nc"))
        (tmp_path / name).write_bytes(files[name])
        assert rp.load(tmp_path / name).identical(ds), analysis
        assert json.loads(files[name.replace(".nc", ".json")])["analysis"] == analysis
    (everything,) = (json.loads(data) for name, data in files.items() if name.startswith("report-"))
    assert set(everything["analyses"]) == set(ALL) - set(report.left_out)


def test_numbers_are_those_of_the_commands(made, ids, tmp_path):
    bands = rp.bands(rp.open(tiny_model()), tokens=ids)
    assert rp.summary(bands) == rp.summary(made["llama"].results["bands"])
    (fact,) = (fact for fact in made["llama"].as_dict()["glance"] if fact["label"] == "Frequency band")
    assert fact["values"][0][1].startswith(f"pair {rp.summary(bands)['i_band']:.2f} ± ")


def test_columns_of_numbers_stand_to_the_right(made):
    text, _ = read(made["llama"])
    table = re.search(r"<table>\s*<thead>.*?pairs turning.*?</table>", text, re.S)[0]
    assert table.count('<th scope="row" class="num">') == len(KEEP)
    assert '<td class="num">' in table and "│" not in text and "\x1b" not in text


# --- how it looks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("light", "dark"), [("#ffffff", "#15181d"), ("#004488", "#77bbff"), ("#66aadd", "#66aadd")])
def test_colors_on_a_dark_page(light, dark):
    assert on_dark(light) == dark


def test_figures_follow_the_theme(made):
    text, _ = read(made["llama"])
    figures = re.findall(r"<svg.*?</svg>", text, re.S)
    assert all("#000000" not in figure for figure in figures if "<image" not in figure)
    assert "var(--c004488)" in text and "--c004488:#004488;" in text and "--c004488:#77bbff;" in text
    assert text.count("@font-face") == 2
    for figure in figures:
        assert "<text" in figure and "font-family" not in figure


CONTRAST = """(() => {
  const light = color => {
    const [r, g, b] = color.match(/[0-9.]+/g).map(x => x / 255).map(x => x > .04045 ? ((x + .055) / 1.055) ** 2.4 : x / 12.92);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const page = light(getComputedStyle(document.documentElement).backgroundColor);
  const seen = [...document.querySelectorAll("figure svg text, p, th, td, a, dd, figcaption")].map(one => {
    const style = getComputedStyle(one), own = light(one.matches("svg text") ? style.fill : style.color);
    return (Math.max(own, page) + .05) / (Math.min(own, page) + .05);
  });
  return Math.min(...seen);
})()"""


@needs_browser
@both
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_in_a_browser(made, model, dark, width, tmp_path):
    with browser.Browser(tmp_path / "profile") as page:
        page.show(made[model].path, width, dark)
        assert page.requests() == [made[model].path.as_uri()]
        assert page.complaints() == []
        assert page.ask("document.documentElement.scrollWidth") <= width
        assert page.ask("document.fonts.check('12px figure')") is True
        assert page.ask(CONTRAST) > 3
