"""Attention by distance of chosen heads, and the pairs that make it."""

from __future__ import annotations

import numpy as np

from ..errors import ProbeError
from ..probes import summary
from ..probes.heads_summary import NEAREST, members
from . import roles, style

PANELS = {"weight": "attention by distance", "usage": "usage ‖q‖·‖k‖", "score": "what singles out the near"}
_COLORS = ("#117733", "#cc3377", "#222222", "#aa9900")  # none of those of the kinds of layers
_DASHES = ("-", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
FAR = 64


def heads_distance(ds, heads=None, ax=None, panels=("weight", "usage", "score")):
    """Draw the mean weight by distance of some heads, their usage by pair, and what each pair adds to near scores.

    Parameters
    ----------
    ds : Dataset
        Result of `heads`.
    heads : sequence of (layer, head), optional
        Default: the strongest heads on the previous token and on the own one, the strongest induction head, and the
        head of role other whose mean distance is the median of its kind.
    ax : Axes or sequence of Axes, optional
        One for each panel. Without it a figure of its own is made, with legend and caption.
    panels : sequence of {"weight", "usage", "score"}
        One panel alone makes a figure one column wide.

    Returns
    -------
    list of Axes, or Axes where there is one panel

    Raises
    ------
    ProbeError
        No such head in the result; a panel is not known; the number of axes is not that of the panels.
    """
    given = style.given_axes(ax, panels, PANELS, "heads_distance")
    places = _places(ds, heads)
    kinds = _kinds(ds, places)
    groups = [(_entries(ds, places), 4 if len(panels) > 1 else 2)]
    if len(kinds) > 1:
        groups.append((_rulers(kinds), len(kinds) if len(panels) > 1 else 1))
    with style.look(given is None):
        axes = given or style.new_axes(panels, 2.3, kinds, heads_distance_caption(ds, heads, panels), groups)
        for one, panel in zip(axes, panels, strict=True):
            for number, place in enumerate(places):
                x, y = {"weight": _weight, "usage": _usage, "score": contrast}[panel](ds, *place)
                one.plot(x, y, color=_COLORS[number % 4], ls=_DASHES[number % 4], lw=1.1)
            one.set_title(PANELS[panel], loc="left", weight="bold")
            if panel == "weight":
                one.set_xscale("symlog", linthresh=1)
                one.set_yscale("log")
                one.set_xlim(left=0)
                one.set_xlabel("distance (tokens)")
                one.set_ylabel("mean weight")
            else:
                one.axhline(0, color="0.6", lw=0.5, zorder=0)
                style.pair_axis(one, kinds)
                one.set_ylabel("usage / mean over pairs" if panel == "usage" else "score near − far")
        if given is None:
            style.finish(axes, groups)
    return axes if len(axes) > 1 else axes[0]


def _rows(ds, places) -> list[tuple[int, int]]:
    rows = {int(layer): row for row, layer in enumerate(ds["layer"].values)}
    for layer, head in places:
        if layer not in rows or not 0 <= head < ds["heads"].values[rows[layer]]:
            raise ProbeError(f"the result holds no head {layer}.{head}: name a layer and a head that were read.")
    return [(rows[layer], head) for layer, head in places]


def _places(ds, heads) -> list[tuple[int, int]]:
    """Positions in the result of the heads asked for, or of the telling ones."""
    if heads is not None:
        return _rows(ds, [tuple(place) for place in heads])
    nearest = np.nan_to_num(ds["weight_by_distance"].values[..., :NEAREST])
    rotating = ds["rotates"].values.astype(bool)[:, None]
    found = []
    for distance in (1, 0):
        if nearest.shape[-1] > distance:
            found.append(_strongest(nearest[..., distance], rotating & (ds["role"].values != "")))
    found.append(_strongest(ds["induction"].values, rotating & members(ds, "induction")))
    other = rotating & members(ds, "other")
    if other.any():
        distance = ds["mean_distance"].values
        found.append(_strongest(-np.abs(distance - np.median(distance[other])), other))
    return [place for n, place in enumerate(found) if place is not None and place not in found[:n]]


def _strongest(values, which) -> tuple[int, int] | None:
    values = np.where(which & np.isfinite(values), values, -np.inf)
    row, head = np.unravel_index(values.argmax(), values.shape)
    return (int(row), int(head)) if np.isfinite(values[row, head]) else None


def _kinds(ds, places) -> list[style.Kind]:
    return [kind for kind in style.kinds(ds) if any(row in kind.rows for row, _ in places)]


def _weight(ds, row: int, head: int):
    """Weight by distance; from 8 tokens on averaged over steps of a fifth of an octave."""
    y = ds["weight_by_distance"].values[row, head].astype(float)
    y = y[np.isfinite(y)]
    steps = np.unique(np.r_[np.arange(8), (8 * 2 ** np.arange(0, 20, 0.2)).astype(int)])
    steps = steps[steps < len(y)]
    mean = np.add.reduceat(y, steps) / np.diff(np.r_[steps, len(y)])
    middle = (steps + np.r_[steps[1:], len(y)] - 1) / 2
    return middle[mean > 0], mean[mean > 0]


def _usage(ds, row: int, head: int):
    y = ds["usage"].values[row, head, : int(ds["pairs"].values[row])]
    return np.arange(len(y)), y / y.mean()


def reference(ds, row: int, head: int) -> tuple[int, int]:
    """Positions along `lag` of the near distance the head weighs most, and of the far one it is compared with."""
    lags = ds["lag"].values
    far = int(np.flatnonzero(lags <= min(FAR, lags[-1]))[-1])
    nearest = np.nan_to_num(ds["weight_by_distance"].values[row, head, :NEAREST])
    best = int(nearest.argmax()) if ds["role"].values[row, head] == "positional" else 1
    near = int(np.abs(lags - best).argmin())
    return near, far


def contrast(ds, row: int, head: int):
    """What each pair adds to the mean score at the near distance, minus what it adds at the far one."""
    near, far = reference(ds, row, head)
    c = ds["pair_profile"].values[row, head, : int(ds["pairs"].values[row])]
    return np.arange(len(c)), c[:, near] - c[:, far]


def _name(ds, row: int, head: int) -> str:
    return f"{ds['layer'].values[row]}.{head}"


def _entries(ds, places) -> list:
    from matplotlib.lines import Line2D

    found = []
    for number, (row, head) in enumerate(places):
        role = str(ds["role"].values[row, head])
        label = f"{_name(ds, row, head)} ({role}"
        if role == "positional":
            label += f", {int(np.nanargmax(ds['weight_by_distance'].values[row, head, :NEAREST]))} back"
        look = {"color": _COLORS[number % 4], "ls": _DASHES[number % 4], "lw": 1.3}
        found.append(Line2D([], [], **look, label=label + ")"))
    return found


def _rulers(kinds) -> list:
    from matplotlib.lines import Line2D

    return [Line2D([], [], color=kind.color, lw=0.8, label=f"wavelengths of {kind.name}") for kind in kinds]


def heads_distance_caption(ds, heads=None, panels=("weight", "usage", "score")) -> str:
    """What the axes of `heads_distance` show, for a caption."""
    places = _places(ds, heads)
    lags = ds["lag"].values
    far = int(lags[lags <= min(FAR, lags[-1])][-1])
    how = (
        ""
        if heads is not None
        else (
            " (the strongest on the previous token, on the own token, in induction, and the head of role other of median "
            "mean distance)"
        )
    )
    shown = {
        "weight": "Attention by distance: mean weight on a key that is seen at that distance (no unit), from 8 tokens on "
        "averaged over fifths of an octave; the first position is one of the keys. ",
        "usage": "Usage: product of the mean norms of query and key, divided by its mean over the pairs of the head. ",
        "score": "What singles out the near: mean score that a pair adds at the distance a positional head rests on (1 "
        f"for the others), minus that at {far} tokens (before softmax, no unit). ",
    }
    names = ", ".join(_name(ds, *place) for place in places)
    return (
        f"Query heads {names}{how}, written LAYER.HEAD. "
        + "".join(shown[panel] for panel in panels)
        + "x: distance, or pair, 0 the fastest, and its wavelength. "
        + roles.definition(summary(ds))
        + roles.source(ds)
    )
