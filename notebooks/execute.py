"""Run the notebooks and store them with their outputs: NAME.py is the source, NAME.ipynb is made from it.

    python notebooks/execute.py              # all of them (`make notebooks`)
    python notebooks/execute.py 01_bands     # one

The sources are in jupytext's percent format: Jupyter with jupytext opens them as notebooks too.
"""

import base64
import copy
import io
import os
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image, ImageChops

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("*.py") if path.read_text(encoding="utf-8").startswith("# ---"))


def read(name: str) -> nbformat.NotebookNode:
    """A notebook from its source, without outputs; the same source gives the same notebook."""
    found = jupytext.read(HERE / f"{name}.py")
    kept = {key: found.metadata[key] for key in ("kernelspec", "jupytext") if key in found.metadata}
    kept["jupytext"] = {"formats": kept["jupytext"]["formats"]}
    cells = []
    for number, cell in enumerate(found.cells):
        tags = {"tags": cell.metadata["tags"]} if "tags" in cell.metadata else {}
        make = nbformat.v4.new_code_cell if cell.cell_type == "code" else nbformat.v4.new_markdown_cell
        cells.append(make(cell.source, id=f"cell-{number}", metadata=tags))
    return nbformat.v4.new_notebook(cells=cells, metadata=kept | {"language_info": {"name": "python"}})


def parameters(notebook) -> nbformat.NotebookNode:
    """The cell tagged `parameters`, which is the first with code."""
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    if "parameters" not in first.metadata.get("tags", ()):
        raise ValueError("the first code cell is not tagged parameters.")
    return first


def run(notebook, values: dict | None = None, timeout: float = 900) -> nbformat.NotebookNode:
    """Execute a notebook in a kernel of its own, in this folder; raises what a cell raises.

    Parameters
    ----------
    notebook : NotebookNode
    values : dict, optional
        Assigned right after the cell tagged `parameters`.
    timeout : float
        Seconds that a cell may take.
    """
    notebook = copy.deepcopy(notebook)
    if values:
        source = "\n".join(f"{name} = {value!r}" for name, value in values.items())
        at = notebook.cells.index(parameters(notebook))
        notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(source, id="values"))
    client = NotebookClient(notebook, timeout=timeout, kernel_name="python3", record_timing=False)
    client.resources = {"metadata": {"path": str(HERE)}}
    client.coalesce_streams = True
    client.extra_arguments = ["--log-level=ERROR"]  # it would warn of the local connection that it uses
    with tempfile.TemporaryDirectory() as folder:
        changes = {
            "IPYTHONDIR": folder,  # IPython would keep its history in the user's home
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "TTY_COMPATIBLE": "0",  # tables as plain text
        }
        client.execute(env=os.environ | changes)
    notebook.metadata["language_info"] = {"name": "python"}  # the version is that of whoever ran it
    return notebook


def complaints(notebook) -> str:
    """What the cells have written to standard error."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.text for output in outputs if output.get("name") == "stderr")


def shrink(notebook) -> None:
    """Keep pictures in 256 colors where that changes none of them by much: a third of the size."""
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        data = output.get("data", {})
        if "image/png" in data:
            picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGB")
            fewer = picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            change = max(high for _, high in ImageChops.difference(picture, fewer.convert("RGB")).getextrema())
            small = io.BytesIO()
            (fewer if change < 16 else picture).save(small, "png", optimize=True)
            data["image/png"] = base64.b64encode(small.getvalue()).decode()


def main(names) -> None:
    for name in names:
        started = time.perf_counter()
        done = run(read(name))
        if complaints(done):
            raise SystemExit(f"{name} was not stored, since it wrote to standard error:\n{complaints(done)}")
        shrink(done)
        path = HERE / f"{name}.ipynb"
        nbformat.write(done, path)
        seconds, size = time.perf_counter() - started, path.stat().st_size / 1e3
        print(f"{path.name:28s} {seconds:4.0f} s {size:6.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or NAMES)
