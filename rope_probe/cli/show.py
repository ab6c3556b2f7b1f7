"""rope-probe show: the table and figures of a result file, and the presenting that all commands share."""

from pathlib import Path
from typing import Annotated

import typer

from . import options as opt

FEW = 8  # segments below which a standard error is itself a rough guess
WITH_ERRORS = ("bands", "spectrum", "similarity", "heads", "truncate", "extend", "trajectory")


def show(
    result: Annotated[str, typer.Argument(metavar="FILE.nc", help="A result file.", show_default=False)],
    figure: opt.Figure = None,
    json: opt.Json = False,
) -> None:
    """The table and the figures of a result file, without the model.

    Example:  rope-probe show bands-SmolLM2-135M-Instruct.nc --figure band.pdf
    """
    from ..limits import as_data
    from ..results import load
    from . import common

    drawing = common.figure_path(figure)
    ds = load(result)
    with as_data(result):
        present(ds, Path(result), drawing, json)


def present(ds, path: Path, figure: Path | None, as_json: bool) -> None:
    """Print a result as a table or as JSON, and draw its figures."""
    from ..probes import summary
    from . import common

    values = summary(ds)
    if as_json:
        drawn = _draw(ds, figure) if figure else []
        common.print_json(values | {"output": str(path), "figures": [str(p) for p in drawn]})
        return
    from importlib import import_module

    table = import_module(f"rope_probe.cli.tables.{ds.attrs['analysis']}")
    table.render(ds, values)
    if ds.attrs["analysis"] in WITH_ERRORS:
        _few_segments(ds.attrs["segments"])
    print(f"\nresult   {path}")
    for drawing in _draw(ds, figure) if figure else []:
        print(f"figure   {drawing}")


def _few_segments(segments: int) -> None:
    """Say where too few segments were read to tell how sure the numbers are."""
    if segments == 1:
        print(f"one segment: no standard error; read {FEW} or more.")
    elif segments < FEW:
        print(f"{segments} segments: the standard errors are rough; read {FEW} or more.")


def _draw(ds, figure: Path) -> list[Path]:
    """Every figure of the analysis: FILE.ext is the first, FILE-name.ext the others."""
    from ..plots import FIGURES, save_figure

    paths: list[Path] = []
    for name, plot in FIGURES[ds.attrs["analysis"]].items():
        if not getattr(plot, "applies", lambda ds: True)(ds):
            continue
        path = figure if not paths else figure.with_name(f"{figure.stem}-{name}{figure.suffix}")
        paths.append(save_figure(plot(ds), path))
    return paths
