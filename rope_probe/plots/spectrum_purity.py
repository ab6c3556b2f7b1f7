"""Layers × pairs: which pairs are still pure tones, in most heads and in all, and which follow tones too slow to resolve."""

from __future__ import annotations

import numpy as np

from . import heat, style
from . import spectrum_parts as parts

# panel -> variable, title, quantile over heads, only where the pair is resolvable
PANELS = {
    "purity": ("purity", "purity, median head", 0.5, True),
    "lowest": ("purity", "purity, lowest head", 0.0, True),
    "fit": ("tone_r2", "R² of own tone, median", 0.5, False),
}


def spectrum_purity(ds, ax=None, panels=("purity", "lowest", "fit")):
    """Draw the purity of every pair, layers × pairs, for the median and the lowest head, and the fit by its own tone.

    Parameters
    ----------
    ds : Dataset
        Result of `spectrum`.
    ax : Axes or sequence of Axes, optional
        One for each panel. Without it a figure of its own is made, with legend and caption.
    panels : sequence of {"purity", "lowest", "fit"}
        One panel alone makes a figure one column wide.

    Returns
    -------
    list of Axes, or Axes where there is one panel

    Raises
    ------
    ProbeError
        A panel is not known; the number of axes is not that of the panels.
    """
    given = style.given_axes(ax, panels, PANELS, "spectrum_purity")
    kinds = style.kinds(ds)
    edges = np.arange(ds.sizes["layer"] + 1) - 0.5
    resting = np.flatnonzero(~ds["rotates"].values.astype(bool))
    height = 0.75 + float(np.clip(0.085 * ds.sizes["layer"], 0.8, 3.6))
    values = {panel: over_heads(ds, panel) for panel in panels}
    gaps = any(_gaps(values[panel], kinds) for panel in panels)
    groups = _entries(kinds, resting, gaps, 2 if len(panels) > 1 else 1)
    with style.look(given is None):
        axes = given or style.new_axes(panels, height, kinds, spectrum_purity_caption(ds, panels), groups)
        for one, panel in zip(axes, panels, strict=True):
            mesh = heat.heat_map(one, values[panel], edges, kinds, relative=False)
            one.set_xlim(-0.5, _last(values[panel]) + 0.5)
            for row in resting:
                one.axhspan(row - 0.5, row + 0.5, **heat.RESTING)
            for kind in kinds:
                heat.floor_marks(one, kind, kind.rows - 0.5, kind.rows + 0.5)
            heat.row_labels(one, edges, ds["layer"].values)
            if len(kinds) > 1:
                heat.strip(one, kinds)
            one.set_title(PANELS[panel][1], loc="left", weight="bold")
        axes[0].set_ylabel("layer")
        heat.color_bar(mesh, axes, "1: one clean tone")
        if given is None:
            style.finish(axes, groups)
    return axes if len(axes) > 1 else axes[0]


def over_heads(ds, panel: str) -> np.ndarray:
    """Median or lowest value over the heads of every layer, shape (layer, pair); NaN where there is nothing to show."""
    variable, _, quantile, resolved = PANELS[panel]
    values = ds[variable].values
    if resolved:
        values = np.where(ds["resolvable"].values.astype(bool)[:, None], values, np.nan)
    found = np.full((values.shape[0], values.shape[2]), np.nan)
    for row, pair in zip(*np.nonzero(np.isfinite(values).any(axis=1)), strict=True):
        found[row, pair] = np.nanquantile(values[row, :, pair], quantile)
    return found


def _last(values: np.ndarray) -> int:
    """The last pair of which there is something to show."""
    shown = np.flatnonzero(np.isfinite(values).any(axis=0))
    return int(shown[-1]) if len(shown) else values.shape[1] - 1


def _gaps(values: np.ndarray, kinds) -> bool:
    """Is there a cell without a value in a layer that rotates?"""
    rows = np.concatenate([kind.rows for kind in kinds])
    return bool(np.isnan(values[rows, : _last(values) + 1]).any())


def _entries(kinds, resting, gaps: bool, columns: int) -> list:
    from matplotlib.patches import Patch

    marks = heat.floor_entries(kinds)
    if gaps:
        marks.append(heat.empty_entry("fewer than two turns, or no power"))
    if len(resting):
        marks.append(Patch(**heat.RESTING, label="layer without rotation"))
    groups = [*parts.of_kinds(kinds, columns), (marks, min(len(marks), 3) if columns > 1 else 1)]
    return [group for group in groups if group[0]]


def spectrum_purity_caption(ds, panels=("purity", "lowest", "fit")) -> str:
    """What the axes of `spectrum_purity` show, for a caption."""
    rotating = ds["rotates"].values.astype(bool)
    purity = (
        "Purity: share of the power of a pair's mean score by distance within 2.5 bins of the pair's own frequency, "
        "for the pairs that turn at least twice within the distances. "
    )
    fit = "R²: of the least-squares fit of the same curve by the cosine and sine of that frequency and a constant. "
    return (
        purity * bool({"purity", "lowest"} & set(panels))
        + fit * ("fit" in panels)
        + f"Of {style.span(ds['heads'].values[rotating], 'query head')}; no unit. "
        "x: pair, 0 the fastest, and its wavelength in tokens; y: layer. L: length in which the frequencies were "
        "formed. " + parts.source(ds)
    )
