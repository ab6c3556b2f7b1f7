"""rho by layer: how far attention follows similarity, free and at fixed distance, for one or several models."""

from __future__ import annotations

import json
from itertools import cycle

import numpy as np

from ..accumulate import mean_and_error
from ..probes.similarity_summary import controlled
from . import style

# panel -> title
PANELS = {"free": "over the keys of a row", "fixed": "at fixed distance"}


def similarity_layers(results, ax=None, panels=("free", "fixed"), names=None):
    """Draw rho by layer: mean over heads with its standard error, and the band of the heads.

    Parameters
    ----------
    results : Dataset or sequence of Dataset
        Results of `similarity`; several are drawn in one plot.
    ax : Axes or sequence of Axes, optional
        One for each panel. Without it a figure of its own is made, with legend and caption.
    panels : sequence of {"free", "fixed"}
        Over the keys of each query row; over query positions at fixed distance, mean of distances. One panel alone
        makes a figure one column wide.
    names : sequence of str, optional
        What to call several results; default: the models.

    Returns
    -------
    list of Axes, or Axes where there is one panel

    Raises
    ------
    ProbeError
        A panel is not known; the number of axes is not that of the panels.
    """
    results = several(results)
    names = list(names or map(style.model_name, results))
    given = style.given_axes(ax, panels, PANELS, "similarity_layers")
    columns = 3 if len(panels) > 1 else 1
    groups = [(handles, columns) for handles in (_curves(names), _marks(results)) if handles]
    with style.look(given is None):
        axes = given or style.new_axes(panels, 2.5, [], similarity_layers_caption(results, panels), groups)
        for one, panel in zip(axes, panels, strict=True):
            for ds, color in zip(results, cycle(style.SERIES), strict=False):
                _curve(one, ds, panel, color)
            one.axhline(0, color="0.4", lw=0.6, zorder=0)
            style.integer_ticks(one.xaxis)
            one.set_xlabel("layer")
            one.set_title(PANELS[panel], loc="left", weight="bold")
        low, high = (pick(one.get_ylim()[n] for one in axes) for n, pick in enumerate((min, max)))
        for one in axes:
            one.set_ylim(low, high)
        axes[0].set_ylabel("Spearman rho")
        if given is None:
            style.finish(axes, groups)
    return axes if len(axes) > 1 else axes[0]


def several(results) -> list:
    """One result or several, as a list."""
    return [results] if hasattr(results, "data_vars") else list(results)


def values(ds, panel: str) -> np.ndarray:
    """rho of every head, shape (layer, head): of the rows, or mean over distances."""
    return ds["rho"].values if panel == "free" else controlled(ds)


def layer_means(ds, panel: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean over heads by layer and its standard error over segments."""
    if panel == "free":
        return mean_and_error(mean_and_error(ds["rho_segment"].values, axis=2)[0])
    return mean_and_error(mean_and_error(ds["rho_at_distance_segment"].values, axis=2)[0])


def quartiles(heads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quartiles over the last axis, NaN where nothing is known."""
    low, high = (np.full(len(heads), np.nan) for _ in range(2))
    for row, own in enumerate(heads):
        if np.isfinite(own).any():
            low[row], high[row] = np.nanpercentile(own, (25, 75))
    return low, high


def _curve(ax, ds, panel: str, color: str) -> None:
    layers, windowed = ds["layer"].values, ds["window"].values > 0
    mean, error = layer_means(ds, panel)
    ax.fill_between(layers, *quartiles(values(ds, panel)), color=color, alpha=0.2, lw=0)
    ax.errorbar(layers, mean, np.nan_to_num(error), color=color, lw=1.1, elinewidth=0.7)
    mixed = windowed.any() and not windowed.all()
    for rows, face in ((~windowed, color), (windowed, "white" if mixed else color)):
        ax.plot(layers[rows], mean[rows], "o", ms=2.6, mfc=face, mec=color, mew=0.7)


def _curves(names) -> list:
    from matplotlib.lines import Line2D

    if len(names) == 1:
        return []
    pairs = zip(names, cycle(style.SERIES), strict=False)
    return [Line2D([], [], color=color, lw=1.5, label=name) for name, color in pairs]


def _marks(results) -> list:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    grey = {"color": "0.35", "lw": 1.1}
    entries = [
        Line2D([], [], marker="o", ms=2.6, label="mean over heads ± standard error", **grey),
        Patch(facecolor="0.35", alpha=0.2, lw=0, label="quartiles over heads"),
    ]
    windows = [ds["window"].values > 0 for ds in results]
    if any(one.any() and not one.all() for one in windows):
        entries.append(Line2D([], [], marker="o", ms=2.6, mfc="white", label="layer with a window", **grey))
    return entries


def similarity_layers_caption(results, panels=("free", "fixed")) -> str:
    """What the axes of `similarity_layers` show, for a caption."""
    results = several(results)
    fixed = (
        " At fixed distance: over query positions, the key always the same number of tokens back, then the mean of the "
        f"distances ({'; '.join(dict.fromkeys(distances(ds) for ds in results))})."
        if "fixed" in panels
        else ""
    )
    return (
        "Spearman correlation (y, no unit) of the cosine similarity of the hidden states entering a layer (x) and the "
        f"pre-softmax score, over the keys of each query row, then the mean over rows.{fixed} "
        f"{'; '.join(heads(ds, len(results) > 1) for ds in results)}. " + source(*results)
    )


def heads(ds, named: bool) -> str:
    """How many heads in how many layers."""
    layers = ds.sizes["layer"]
    words = f"{style.span(np.isfinite(ds['rho'].values).sum(1), 'head')} in each of {style.count(layers, 'layer')}"
    return f"{style.model_name(ds)}: {words}" if named else words[0].upper() + words[1:]


def distances(ds) -> str:
    """1, 2, 4, …, 512: the distances of a result in few characters."""
    found = [f"{distance:,}" for distance in ds["distance"].values]
    return ", ".join(found if len(found) < 6 else [*found[:3], "…", found[-1]])


def source(*results) -> str:
    """Sentences on models, text and sample, for the end of a caption; what several share is said once."""
    texts = [_text(ds) for ds in results]
    names = [style.model_name(ds) for ds in results]
    if len(set(texts)) == 1:
        return f"Model{'s' * (len(names) > 1)}: {', '.join(names)}. {texts[0]}"
    return " ".join(f"Model: {name}. {text}" for name, text in zip(names, texts, strict=True))


def _text(ds) -> str:
    options, segments, length = json.loads(ds.attrs["options"]), int(ds.attrs["segments"]), int(ds.attrs["length"])
    rows = "all query rows" if options["queries"] == "all" else f"{options['queries']} query rows of each"
    cut = ", interrupted before the end" if int(ds.attrs.get("partial", 0)) else ""
    return (
        f"Text: {ds.attrs['corpus']}, {style.count(segments, 'segment')} of {length:,} tokens{cut}, {rows}, "
        f"keys from position {options['sink']} on."
    )
