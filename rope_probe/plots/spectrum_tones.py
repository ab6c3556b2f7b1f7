"""Injected pair × frequency, one panel a layer, with the later layer's own rotation and with it taken back."""

from __future__ import annotations

import numpy as np

from . import spectrum_parts as parts
from . import style

_LOWEST, _FOLD = 1e-5, 3  # of the color scales: share of power, and powers of two of a ratio


def spectrum_tones(ds, ax=None):
    """Draw injected pair × frequency: share of power in every recorded layer, and what was carried into the later ones.

    Parameters
    ----------
    ds : Dataset
        Result of `spectrum` with several pairs injected.
    ax : Axes or sequence of Axes, optional
        One for every panel: the recorded layers, then the later ones with their rotation taken back. Without it a
        figure of its own is made, with a caption.

    Returns
    -------
    list of Axes

    Raises
    ------
    ProbeError
        The result has no such experiment; the number of axes is not that of the panels.
    """
    parts.need_experiment(ds, "spectrum_tones")
    layers = [int(layer) for layer in ds["inject_layer"].values]
    panels = [(layer, False) for layer in layers] + [(layer, True) for layer in layers[1:]]
    names = [f"layer {layer}" + ", own rotation taken back" * still for layer, still in panels]
    given = style.given_axes(ax, names, names, "spectrum_tones")
    with style.look(given is None):
        height = 1.1 + float(np.clip(0.06 * ds.sizes["inject"], 0.8, 2.6))
        axes = given or style.new_axes(names, height, style.kinds(ds)[:1], spectrum_tones_caption(ds), [])
        meshes = {}
        for one, (layer, still), name in zip(axes, panels, names, strict=True):
            meshes[still] = one, _panel(one, ds, layer, still)
            one.set_title(name, loc="left", weight="bold")
        axes[0].set_ylabel("injected pair")
        if given is None:
            rotated = [one for one, (_, still) in zip(axes, panels, strict=True) if not still]
            figure = axes[0].figure
            figure.colorbar(meshes[False][1], ax=rotated, label="share of power", aspect=25, pad=0.02, extend="min")
            if True in meshes:
                later = [one for one in axes if one not in rotated]
                bar = figure.colorbar(
                    meshes[True][1], ax=later, label="with / without", aspect=25, pad=0.02, extend="both"
                )
                ticks = np.arange(-_FOLD, _FOLD + 1)
                bar.set_ticks(ticks, labels=[f"{2.0**tick:g}" for tick in ticks])
            style.finish(axes, [])
    return axes


def _panel(ax, ds, layer: int, still: bool):
    from matplotlib.colors import LogNorm

    here = ds.sel(layer=layer, inject_layer=layer)
    frequency = here["frequency"].values
    seen = np.isfinite(frequency)
    frequency = frequency[seen]
    values: np.ndarray
    if still:
        ratio = parts.share(_near(here["power_unrotated_injected"].values), _near(here["power_unrotated"].values))
        values = np.ma.masked_invalid(_median_of_heads(np.log2(np.where(ratio > 0, ratio, np.nan)))[:, seen])
        scale = {"cmap": "RdBu_r", "vmin": -_FOLD, "vmax": _FOLD}
    else:
        values = parts.mean_of_heads(parts.share(here["power_injected"].values))[:, seen]
        values = np.ma.masked_invalid(np.maximum(values, _LOWEST))
        scale = {"cmap": "viridis", "norm": LogNorm(_LOWEST, 1)}
    width = frequency[1]
    columns = np.append(np.maximum(frequency - width / 2, 0.4 * width), frequency[-1] + width / 2)
    pairs = ds["inject"].values
    rows = np.arange(len(pairs) + 1) - 0.5
    mesh = ax.pcolormesh(columns, rows, values, edgecolors="face", linewidth=0.1, rasterized=True, **scale)
    parts.frequency_axis(ax, frequency)
    ax.set_ylim(rows[-1], rows[0])
    step = slice(None, None, -(-len(pairs) // 12))
    ax.set_yticks(np.arange(len(pairs))[step], [str(pair) for pair in pairs[step]])
    _mark_tones(ax, ds, frequency[1])
    return mesh


def _near(power: np.ndarray) -> np.ndarray:
    """Power within two and a half bins of every bin."""
    width = int(parts.HALF_WIDTH)
    padded = np.pad(np.nan_to_num(power), [(0, 0)] * (power.ndim - 1) + [(width, width)])
    return np.lib.stride_tricks.sliding_window_view(padded, 2 * width + 1, axis=-1).sum(axis=-1)


def _median_of_heads(values: np.ndarray) -> np.ndarray:
    seen = np.isfinite(values).any(axis=-2)
    filled = np.where(seen[..., None, :], values, 0)
    return np.where(seen, np.nanmedian(filled, axis=-2), np.nan)


def _mark_tones(ax, ds, width: float) -> None:
    """Where the tone of every injected pair is: two short lines beside its cells."""
    first = ds.sel(layer=int(ds["inject_layer"].values[0]))
    for row, pair in enumerate(ds["inject"].values):
        tone = float(first["inv_freq"].values[pair])
        for side in (-2.5, 2.5):
            if tone + side * width > 0.7 * width:
                ax.plot([tone + side * width] * 2, [row - 0.5, row + 0.5], color="#ff79c6", lw=0.7)


def spectrum_tones_caption(ds) -> str:
    """What the axes of `spectrum_tones` show, for a caption."""
    layers = [int(layer) for layer in ds["inject_layer"].values]
    later = (
        " Own rotation taken back: power within 2.5 bins of each frequency with injection over that without, median over "
        "heads; a tone that is carried would stand out between its lines, from its row and from its column."
        if len(layers) > 1
        else ""
    )
    return (
        f"Power spectra of the mean score by distance while layer {layers[0]} attends through one pair alone (y), "
        "divided by their sum, mean over heads. Lines: 2.5 bins to either side of the injected frequency. x: frequency; "
        f"the first bins hold the slowest pairs together.{later} " + parts.source(ds, resting=False)
    )


def _applies(ds) -> bool:
    return parts.has_experiment(ds) and ds.sizes["inject"] > 1


spectrum_tones.applies = _applies
