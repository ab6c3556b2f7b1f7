"""What stopping pairs costs several models, against where the cut comes."""

from __future__ import annotations

import numpy as np

from ..errors import ProbeError
from ..probes.compare_axes import AXES
from ..probes.truncate_summary import groups_at, profile, summary
from . import compare_curves as parts
from . import style
from .truncate_keep import excess_axis

CUTS = ("keep", "floor")
KNOCKOUTS = {"unrotate": "rotation of one pair taken away", "remove": "content of one pair taken away"}


def compare_truncate(results, ax=None, names=None, axis=None):
    """Draw the perplexity of several `truncate` results against the first pair that a cut stops, on three axes.

    Results that have no cut in common but knockouts are drawn as what each pair costs.  See `rope_probe.plots.compare`.
    """
    kind = drawn_kind(results)
    found = [(curve, where) for curve in parts.curves(results, names) for where in _cut_here(curve, kind)]
    labelled = _labelled(found)
    panels = parts.axes_of(axis)
    given = style.given_axes(ax, panels, panels, "compare")
    marks = [parts.band_entry(results), *([parts.predicted_entry()] if "relative" in panels else [])]
    groups = [(parts.entries(labelled, marker="o", ms=2.8), parts.columns(labelled)), (marks, 2)]
    with style.look(given is None):
        caption = compare_truncate_caption(results, found, kind, axis)
        axes = given or style.new_axes(panels, 2.3, [], caption, groups)
        for one, name in zip(axes, panels, strict=True):
            for row, (curve, (_, where)) in enumerate(zip(labelled, found, strict=True)):
                x, y, error = points(curve, kind, where, name)
                face = curve.color if curve.filled else "white"
                look = {"color": curve.color, "ls": curve.dashes, "marker": "o", "ms": 2.8, "lw": 1, "elinewidth": 0.8}
                one.errorbar(x, y, error, mfc=face, label=curve.label, **look)
                parts.mark(one, curve, name, curve.kind.summary["i_band_usage"], row)
            parts.prepare(one, name)
            if kind in CUTS:
                excess_axis(one)
            one.set_title(f"by {AXES[name]}", loc="left", weight="bold")
            if one is not axes[0]:
                one.set_ylabel("")
        if kind not in CUTS:
            axes[0].set_ylabel("added nats per token")
        if given is None:
            style.finish(axes, groups)
    return axes


def drawn_kind(results) -> str:
    """The kind of setting that all results have."""
    for kind in (*CUTS, *KNOCKOUTS):
        if all((ds["kind"] == kind).any() for ds in results):
            break
    else:
        raise ProbeError(
            "the results of truncate have no kind of setting in common that could be drawn over each other."
        )
    if kind in CUTS and len({summary(ds)["reverse"] for ds in results}) > 1:
        raise ProbeError("some cuts come from the slow end and some from the fast end (--reverse): draw each alone.")
    return kind


def _cut_here(curve: parts.Curve, kind: str) -> list[str]:
    """Groups of layers that were cut and have layers of this kind in them."""
    ds = curve.ds
    layers = set(ds["layer"].values[curve.kind.rows].tolist())
    by_type = summary(ds)["by_layer_type"]
    found = []
    for where in dict.fromkeys(ds["where"].values[ds["kind"].values == kind].tolist()):
        meant = {layer for group in groups_at(by_type, where).values() for layer in group["layers"]}
        if layers & meant:
            found.append(where)
    return found


def _labelled(found) -> list[parts.Curve]:
    """The curves, named by what was cut where that is not everything or not only this kind."""
    labelled = []
    for curve, where in found:
        own = curve.kind.name.split(",")[0] == where.split(",")[0]
        words = "" if own or where == "all layers" else f" (cut in {where})"
        labelled.append(curve._replace(label=curve.label + words))
    return labelled


def points(curve: parts.Curve, kind: str, where: str, axis: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(x, y, error) of the settings of a kind, for one kind of the layers that were cut.

    Of cuts x is the first pair that stands still (that turns, if they come from the fast end), and y the perplexity
    above that of the intact model in percent; settings that stop no pair, or all of them, have no such pair on a scale of
    wavelengths and are left out there.  Of knockouts x is the pair, y what it adds in nats per token.
    """
    ds, pairs = curve.ds, curve.kind.pairs
    if kind not in CUTS:
        index, y, error = profile(ds, kind, where)
        inside = np.isin(index, parts.places(curve.kind, axis)[0])
        index, y, error = index[inside], y[inside], error[inside]
    else:
        rows = np.flatnonzero((ds["kind"].values == kind) & (ds["where"].values == where))
        layer = next(row for row in curve.kind.rows if ds["cut"].values[rows[0], row])
        turning = ds["turning"].values[rows, layer]
        index = pairs - turning if summary(ds)["reverse"] else turning
        order = np.argsort(index, kind="stable")
        rows, index = rows[order], index[order]
        y, error = 100 * (ds["ratio"].values[rows] - 1), 100 * ds["ratio_se"].values[rows]
        if axis != "index":
            there = np.isin(index, parts.places(curve.kind, axis)[0])
            index, y, error = index[there], y[there], error[there]
    x = index / pairs if axis == "index" else parts.place(curve.kind, axis, index)
    return x, y, np.nan_to_num(error)


def compare_truncate_caption(results, found, kind: str, axis=None) -> str:
    """What the axes of `compare_truncate` show, for a caption."""
    if kind in CUTS:
        what = "turns" if summary(results[0])["reverse"] else "stands still"
        y = "Perplexity above that of the intact model (y, percent; linear below 1)"
        x = f"the first pair that {what}"
    else:
        y, x = f"What perplexity's logarithm gains (y) with the {KNOCKOUTS[kind]}", "that pair"
    together = len({(id(curve.ds), where) for curve, where in found}) < len(found)
    kinds = " Where layers of several kinds are cut together, each kind has a curve of the same y." * together
    bars = "Bars: standard error of the paired differences over segments. "
    return (
        f"{y}, against {x} (x): {parts.axis_words(parts.axes_of(axis))}.{kinds} Triangle: i_band by usage. {bars}"
        f"{parts.described(_labelled(found))}. {parts.texts(results)}"
    )
