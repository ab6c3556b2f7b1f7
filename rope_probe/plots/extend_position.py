"""Likelihood against position: how far into a text a model can go under another base or scaling."""

from __future__ import annotations

import numpy as np

from ..accumulate import mean_and_error
from ..probes import summary
from . import extend_parts as parts
from . import style


def extend_position(ds, ax=None, panels=None):
    """Draw nats per token against the position in the text, a line for each base, a panel for each scaling.

    Parameters
    ----------
    ds : Dataset
        Result of `extend`.
    ax : Axes or sequence of Axes, optional
        One for each panel. Without it a figure of its own is made, with legend and caption.
    panels : sequence of str, optional
        Scalings as the table names them, e.g. ``yarn × 2``; default all.

    Returns
    -------
    list of Axes, or Axes where there is one panel

    Raises
    ------
    ProbeError
        A panel is not known; the number of axes is not that of the panels.
    """
    values = summary(ds)
    known = list(dict.fromkeys(setting["scaling"] for row, setting in enumerate(values["settings"]) if _read(ds, row)))
    panels = known if panels is None else list(panels)
    given = style.given_axes(ax, panels, known, "extend_position")
    colors = parts.base_colors(values)
    groups = _entries(values, colors, len(panels))
    with style.look(given is None):
        stacked = len(panels) > 3
        height = 1.6 * len(panels) if stacked else 2.2
        axes = given or style.new_axes(panels, height, [], extend_position_caption(ds), groups, stacked)
        for one, panel in zip(axes, panels, strict=True):
            for row, setting in enumerate(values["settings"]):
                if _read(ds, row) and (setting["scaling"] == panel or setting["intact"]):
                    _curve(one, ds, row, setting, colors[setting["base"]], setting["scaling"] == panel)
            one.set_xscale("log", base=2)
            one.set_xlabel("position (tokens)")
            one.set_title(parts.scaling_label(panel), loc="left", weight="bold")
            _position_axis(one, ds)
        low, high = (pick(one.get_ylim()[n] for one in axes) for n, pick in enumerate((min, max)))
        for one in axes:
            one.set_ylim(low, high)
        axes[0].set_ylabel("nats per token")
        if given is None:
            style.finish(axes, groups)
    return axes if len(axes) > 1 else axes[0]


extend_position.applies = lambda ds: bool(np.isfinite(ds["nll"].values).any())


def _read(ds, row: int) -> list[int]:
    """Columns of the lengths that a setting has read."""
    return np.flatnonzero(np.isfinite(ds["nll"].values[row]).all(axis=-1)).tolist()


def _curve(ax, ds, row: int, setting: dict, color: str, own_panel: bool) -> None:
    """The longest text of a setting; the model as it is also stands behind the panels of other scalings."""
    column = _read(ds, row)[-1]
    mean, error = mean_and_error(ds["nll_position"].values[row, column])
    seen = np.isfinite(mean)
    x = np.sqrt(ds["position_first"].values * ds["position_last"].values.astype(float))[seen]
    if not own_panel:
        ax.plot(x, mean[seen], color="0.7", lw=1.8, zorder=0)
        return
    ax.errorbar(x, mean[seen], np.nan_to_num(error[seen]), color=color, lw=1.1, elinewidth=0.7, marker="o", ms=2, mew=0)
    bound = parts.reach(setting["lengths"][column])
    if bound is not None and bound <= x[-1]:
        ax.plot(bound, 0.97, "v", color=color, ms=4, mew=0, transform=ax.get_xaxis_transform())


def _position_axis(ax, ds) -> None:
    from matplotlib.ticker import NullLocator

    top = int(ds["position_last"].values.max()) + 1
    ticks = 2 ** np.arange(4, top.bit_length())
    ticks = ticks[(len(ticks) - 1) % 2 :: 2]
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.xaxis.set_minor_locator(NullLocator())


def _entries(values: dict, colors: dict, panels: int) -> list:
    from matplotlib.lines import Line2D

    bases = [
        Line2D([], [], color=color, marker="o", ms=2, lw=1.2, label=parts.base_label(name))
        for name, color in colors.items()
    ]
    marks = [Line2D([], [], color="0.35", lw=0, marker="v", ms=4, label="L_bound")]
    if len({setting["scaling"] for setting in values["settings"]}) > 1:
        marks.append(Line2D([], [], color="0.7", lw=1.8, label="the model as it is"))
    columns = 5 if 1 < panels <= 3 else 2
    return [(bases, columns), (marks, columns)]


def extend_position_caption(ds) -> str:
    """What the axes of `extend_position` show, for a caption."""
    values = summary(ds)
    bars = "; bars: standard error over segments" if values["segments"] > 1 else ""
    match = (
        " Base = length: the base is the length of the whole text that is read."
        if any(setting["base"] == "match" for setting in values["settings"])
        else ""
    )
    return (
        "Negative log likelihood of a token (y, nats) against its position in the text (x, logarithmic), means over "
        f"buckets of positions and over segments{bars}. L_bound: where the sum of the cosines first turns negative "
        f"(the smallest over layers; not drawn beyond the text).{match} {parts.source(ds)}"
    )
