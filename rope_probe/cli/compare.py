"""rope-probe compare: results of the same analysis side by side."""

from pathlib import Path
from typing import Annotated

import typer

from . import options as opt


def compare(
    results: Annotated[
        list[str], typer.Argument(metavar="A.nc", help="Result files of one analysis.", show_default=False)
    ],
    axis: Annotated[
        str | None,
        typer.Option(
            "--axis",
            metavar="AXIS",
            help="Draw pairs by index (/ P), wavelength, or relative (wavelength / trained length); default: all three.",
        ),
    ] = None,
    figure: opt.Figure = None,
    json: opt.Json = False,
) -> None:
    """Results of one analysis side by side: one table, one figure, differences from the first with their error.

    Example:  rope-probe compare bands-a.nc bands-b.nc --figure both.png
    """
    from ..errors import UsageError
    from ..limits import as_data
    from ..probes.compare import check, model_names
    from ..probes.compare import compare as measure
    from ..probes.compare_axes import AXES
    from ..results import load
    from . import common

    drawing = common.figure_path(figure)
    if axis is not None and axis not in AXES:
        raise UsageError(f"--axis is {axis!r}: choose {', '.join(AXES)}.")
    if axis is not None and not drawing:
        raise UsageError("--axis says how the figure is drawn: add --figure.")
    loaded = [load(path) for path in results]
    with as_data(*results):
        check(loaded)
        names = model_names(loaded)
        stems = [Path(path).stem for path in results]
        if any(ds.attrs["model"] == loaded[0].attrs["model"] for ds in loaded[1:]) and len(set(stems)) == len(stems):
            names = stems
        comparison = measure(loaded, names)
        drawn = []
        if drawing:
            from ..plots import compare as plot
            from ..plots import save_figure

            drawn.append(save_figure(plot(loaded, names=names, axis=axis), drawing))
        from .tables.compare import as_dict, render

        if json:
            common.print_json(as_dict(comparison) | {"figures": [str(path) for path in drawn]})
            return
        render(comparison)
        for path in drawn:
            print(f"figure   {path}")
