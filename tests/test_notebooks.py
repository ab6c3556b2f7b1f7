"""The notebooks run, in a short form, and what is stored is what their sources say and what came of them."""

import ast
import getpass
import importlib.util
import platform
import re
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
spec = importlib.util.spec_from_file_location("execute", NOTEBOOKS / "execute.py")
execute = importlib.util.module_from_spec(spec)
spec.loader.exec_module(execute)

# the sizes that CI runs; none for a notebook that only draws result files
SHORT = {
    "01_bands": {"segments": 2, "length": 128},
    "02_spectrum": {"segments": 2, "length": 128},
    "03_similarity": {"segments": 2, "length": 128},
    "04_base_and_bound": {"segments": 2, "length": 128, "longest": 4096, "limit": 4096},
    "05_cutting_the_rotation": {"segments": 2, "length": 128, "keep": [1, 0.5, 0], "knocked": [0, 8, 23]},
    "06_transformer_lens": {"segments": 2, "length": 128},
    "trajectory": {},
}
EXTRAS = ("transformer_lens",)  # what only those have who installed an extra
LARGEST = 600_000  # bytes of a stored notebook

every_notebook = pytest.mark.parametrize("name", execute.NAMES)


def stored(name):
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def texts_of(notebook):
    """Everything a reader can read: sources, and outputs but for pictures."""
    texts = [cell.source for cell in notebook.cells]
    for output in outputs_of(notebook):
        data = {kind: value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")}
        texts += [output.get("text", ""), *map(str, data.values())]
    return texts


def source_of(name):
    """A notebook to run; skips the test where it needs an extra that is not there."""
    notebook = execute.read(name)
    for module in EXTRAS:
        if any(module in cell.source for cell in notebook.cells if cell.cell_type == "code"):
            pytest.importorskip(module)
    return notebook


def test_every_notebook_is_listed_and_stored():
    assert sorted(SHORT) == execute.NAMES == sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


@every_notebook
def test_a_short_form_runs(name):
    notebook, values = source_of(name), SHORT[name]
    if values:
        nodes = ast.walk(ast.parse(execute.parameters(notebook).source))
        assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        assert values.keys() <= assigned, "a size that no cell would look at"
    done = execute.run(notebook, values, timeout=300)
    assert not execute.complaints(done)


@pytest.mark.slow
@every_notebook
def test_it_runs_as_it_stands(name):
    assert not execute.complaints(execute.run(source_of(name)))


@every_notebook
def test_the_stored_notebook_is_that_of_the_source(name):
    def cells(notebook):
        return [(cell.id, cell.cell_type, cell.source, cell.metadata.get("tags")) for cell in notebook.cells]

    nbformat.validate(stored(name))
    assert cells(stored(name)) == cells(execute.read(name))


@every_notebook
def test_outputs_are_stored_and_nothing_else(name):
    notebook = stored(name)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(cell.outputs for cell in code if "parameters" not in cell.metadata.get("tags", ()))
    assert any("image/png" in output.get("data", {}) for output in outputs_of(notebook))
    assert not [output for output in outputs_of(notebook) if output.output_type == "error"]
    assert not execute.complaints(notebook)
    assert not [output for output in outputs_of(notebook) if output.output_type == "execute_result"]
    assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size < LARGEST


@every_notebook
def test_nothing_tells_who_ran_it_and_where(name):
    text = "\n".join(texts_of(stored(name)))
    assert not re.findall(r"(?<![\w./:])(?:/|[A-Z]:\\)\w[\w.-]*[/\\]\S*", text)
    for tell_tale in (f"{getpass.getuser()}@", rf"\b{re.escape(platform.node())}\b"):
        assert not re.search(tell_tale, text)
    assert not {"timestamp", "execution", "papermill"} & {key for cell in stored(name).cells for key in cell.metadata}


def test_a_cell_that_raises_fails_and_one_that_complains_is_found():
    def notebook(source):
        return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])

    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute.run(notebook("1 / 0"))
    assert "careful" in execute.complaints(execute.run(notebook("import warnings; warnings.warn('careful')")))
