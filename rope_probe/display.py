"""Results as a person reads them, in a terminal and in a notebook: the table of the command, then the Dataset."""

from __future__ import annotations

import contextlib
import html
import io
import warnings
from importlib import import_module

import xarray as xr

from .errors import ProbeError
from .probes import SUMMARIES, summary


def show(ds: xr.Dataset) -> xr.Dataset:
    """Print the table of a result, as its command does, and hand the result back.

    As the last line of a notebook cell this shows the table first and then the Dataset.

    Parameters
    ----------
    ds : Dataset
        Result of an analysis, or of `compare`.

    Returns
    -------
    Dataset
        The same.

    Raises
    ------
    ProbeError
        Not a result of this tool, or one that is not whole.
    """
    analysis = ds.attrs.get("analysis")
    if analysis == "compare":
        import_module("rope_probe.cli.tables.compare").render(ds)
    elif analysis in SUMMARIES:
        import_module(f"rope_probe.cli.tables.{analysis}").render(ds, summary(ds))
    else:
        raise ProbeError(f"there is no table for a Dataset of analysis {analysis!r}: give a result of rope-probe.")
    return ds


def table(ds: xr.Dataset) -> str:
    """The table of a result as text."""
    with contextlib.redirect_stdout(io.StringIO()) as written:
        show(ds)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def _above(ds: xr.Dataset) -> str | None:
    """The table of a result; None of any other Dataset, and of a part of a result that lacks what the table needs."""
    try:
        return table(ds)
    except Exception:  # whatever is wrong, a cell that shows a Dataset shows it
        return None


def _text(ds: xr.Dataset, printer, cycle: bool) -> None:
    above = _above(ds)
    printer.text(repr(ds) if above is None else f"{above}\n\n{ds!r}")


def _html(ds: xr.Dataset) -> str:
    above = _above(ds)
    return ds._repr_html_() if above is None else f"<pre>{html.escape(above)}</pre>{ds._repr_html_()}"


def load_ipython_extension(ipython) -> None:
    """`%load_ext rope_probe`: every result that is displayed shows its table first; other Datasets are shown as ever.

    What libraries have to say about missing widgets for progress bars, which are not shown here, is left out.
    """
    warnings.filterwarnings("ignore", message="IProgress not found")
    for kind, show_as in (("text/html", _html), ("text/plain", _text)):
        ipython.display_formatter.formatters[kind].for_type(xr.Dataset, show_as)


def unload_ipython_extension(ipython) -> None:
    """`%unload_ext rope_probe`."""
    for kind in ("text/html", "text/plain"):
        ipython.display_formatter.formatters[kind].pop(xr.Dataset, None)
