"""show: the table of the command, then the Dataset; in a terminal and in a notebook."""

import pytest
import xarray as xr

import rope_probe as rp
from rope_probe.display import table
from rope_probe.errors import ProbeError
from rope_probe.results import save

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def result(tiny_folder, tokens):
    return rp.bands(rp.open(tiny_folder), tokens=tokens)


@pytest.fixture
def shell():
    """An IPython shell with the extension; results are what its formatters make of an object."""
    interactive = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    config = pytest.importorskip("traitlets.config").Config()
    config.HistoryManager.enabled = False
    shell = interactive(config=config)
    shell.display_formatter.active_types = shell.display_formatter.format_types  # a terminal shows plain text only
    shell.run_line_magic("load_ext", "rope_probe")
    yield shell
    shell.run_line_magic("unload_ext", "rope_probe")


def test_show_prints_what_the_command_prints(run_cli, capsys, result, tmp_path):
    path = save(result, tmp_path / "b.nc")
    command = run_cli("show", path).out
    assert rp.show(result) is result
    printed = capsys.readouterr().out
    assert printed.startswith("tiny   4 × 16 tokens") and command.startswith(printed)
    assert table(result) == "\n".join(line.rstrip() for line in printed.splitlines())


def test_comparisons_have_a_table_too(capsys, result):
    comparison = rp.compare([result, result])
    assert rp.show(comparison) is comparison
    assert "tiny (2)" in capsys.readouterr().out


def test_other_datasets_are_refused():
    with pytest.raises(ProbeError, match="no table for a Dataset of analysis None"):
        rp.show(xr.Dataset())
    with pytest.raises(ProbeError, match="analysis 'reading'"):
        rp.show(xr.Dataset(attrs={"analysis": "reading"}))


def test_text_in_a_notebook(result, capsys, monkeypatch):
    """rich would write HTML there, past standard output."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    rp.show(result)
    assert "i_band, keys" in capsys.readouterr().out


def test_displayed_results_show_their_table_first(shell, result):
    shown, _ = shell.display_formatter.format(result)
    text, page = shown["text/plain"], shown["text/html"]
    assert text.startswith(table(result)) and text.endswith(repr(result))
    assert page.startswith("<pre>tiny") and page.index("i_band, keys") < page.index("xarray.Dataset")


def test_other_datasets_are_displayed_as_ever(shell, result):
    other = xr.Dataset({"x": ("t", [1.0, 2.0])})
    for ds in (other, result[["q_norm"]], result.isel(layer=[])):
        shown, _ = shell.display_formatter.format(ds)
        assert shown["text/plain"] == repr(ds) and "<pre>tiny" not in shown["text/html"]
    shell.run_line_magic("unload_ext", "rope_probe")
    shown, _ = shell.display_formatter.format(result)
    assert shown["text/plain"] == repr(result)
    shell.run_line_magic("load_ext", "rope_probe")
