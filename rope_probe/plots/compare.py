"""Several results of the same analysis in one figure."""

from __future__ import annotations

from importlib import import_module


def compare(results, ax=None, names=None, axis=None):
    """Draw several results of one analysis over each other.

    Parameters
    ----------
    results : sequence of Dataset
        Two or more results of one analysis.
    ax : sequence of Axes, optional
        One for each panel of the figure; default: a figure of its own, with legend and caption.
    names : sequence of str, optional
        What to call them; default: the models.
    axis : {"index", "wavelength", "relative"}, optional
        Where pairs are laid side by side: by index / number of pairs, by wavelength, or by wavelength / length in
        which the frequencies were formed; default: a panel for each.

    Returns
    -------
    list of Axes, or Axes where there is one panel

    Raises
    ------
    UsageError
        Another axis, or one for an analysis that has no pairs to lay along it.
    ProbeError
        The results cannot be compared; the number of axes is not that of the panels.
    """
    from ..probes.compare import ANALYSES, check, model_names

    results = list(results)
    figure = ANALYSES[check(results)].figure
    draw = getattr(import_module(f".{figure}", __package__), figure)
    return draw(results, ax=ax, names=list(names or model_names(results)), axis=axis)
