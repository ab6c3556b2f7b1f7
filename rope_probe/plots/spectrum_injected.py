"""Spectra of the first layers under one injected tone, with the controls that the reading of them needs."""

from __future__ import annotations

import numpy as np

from ..errors import ProbeError
from ..probes import summary
from . import spectrum_parts as parts
from . import style

_WITH, _WITHOUT, _STILL = "#d95f02", "#004488", (0, (3, 1.2))


def spectrum_injected(ds, pair: int | None = None, ax=None):
    """Draw the power spectrum of each recorded layer with one tone injected and without, own rotation in and out.

    Parameters
    ----------
    ds : Dataset
        Result of `spectrum` with `inject`.
    pair : int, optional
        The injected pair; default: the resolvable one nearest the middle of those.
    ax : Axes or sequence of Axes, optional
        One for each recorded layer. Without it a figure of its own is made, with legend and caption.

    Returns
    -------
    list of Axes, or Axes where there is one layer

    Raises
    ------
    ProbeError
        The result has no such experiment; the number of axes is not that of the layers.
    """
    parts.need_experiment(ds, "spectrum_injected")
    pair = _chosen(ds, pair)
    layers = [int(layer) for layer in ds["inject_layer"].values]
    names = [f"layer {layer}" for layer in layers]
    given = style.given_axes(ax, names, names, "spectrum_injected")
    rows = {row["layer"]: row for row in summary(ds)["inject"] if row["inject"] == pair}
    groups = [(_entries(len(layers) > 1), 4 if len(names) > 1 else 1)]
    with style.look(given is None):
        caption = spectrum_injected_caption(ds, pair)
        axes = given or style.new_axes(names, 2.2, style.kinds(ds)[:1], caption, groups)
        for one, layer, name in zip(axes, layers, names, strict=True):
            _panel(one, ds, pair, layer, rows[layer], first=layer == layers[0])
            one.set_title(name, loc="left", weight="bold")
        axes[0].set_ylabel("share of power per bin")
        low = min(one.get_ylim()[0] for one in axes)
        for one in axes:
            one.set_ylim(max(low, 1e-6), 40)  # room for the numbers
            one.set_yticks(10.0 ** np.arange(-6, 1, 2))
        if given is None:
            style.finish(axes, groups)
    return axes if len(axes) > 1 else axes[0]


def _chosen(ds, pair: int | None) -> int:
    pairs = [int(one) for one in ds["inject"].values]
    if pair is None:
        told = [row["inject"] for row in summary(ds)["inject"] if row["resolvable"]]
        told = list(dict.fromkeys(told)) or pairs
        return told[len(told) // 2]
    if pair not in pairs:
        raise ProbeError(f"pair {pair} was not injected: choose from {', '.join(map(str, pairs))}.")
    return pair


def _panel(ax, ds, pair: int, layer: int, row: dict, first: bool) -> None:
    here = ds.sel(layer=layer, inject_layer=layer)
    frequency = here["frequency"].values
    seen = np.isfinite(frequency)
    frequency = frequency[seen]

    def curve(power, total=None):
        return parts.mean_of_heads(parts.share(power, total))[seen]

    tone, none = here["power_injected"].sel(inject=pair).values, here["power"].values
    ax.plot(frequency, curve(none), color=_WITHOUT, lw=0.9)
    ax.plot(frequency, curve(tone), color=_WITH, lw=0.9)
    if not first:
        still = here["power_unrotated"].values
        total = np.nansum(still, axis=-1, keepdims=True)
        ax.plot(frequency, curve(still, total), color=_WITHOUT, lw=0.8, ls=_STILL)
        ax.plot(
            frequency,
            curve(here["power_unrotated_injected"].sel(inject=pair).values, total),
            color=_WITH,
            lw=0.8,
            ls=_STILL,
        )
    bin_width = frequency[1]
    ax.axvspan(
        row["inv_freq"] - parts.HALF_WIDTH * bin_width,
        row["inv_freq"] + parts.HALF_WIDTH * bin_width,
        color="0.85",
        lw=0,
        zorder=0,
    )
    ax.set_yscale("log")
    parts.frequency_axis(ax, frequency)
    lines = [f"leakage {row['leakage']:.3f}, without {row['leakage_none']:.3f}"]
    if first:
        lines.append(f"leakage of a pure tone {row['leakage_tone']:.3f}")
    else:
        lines.append(f"carried ×{row['carried']:.2f}, elsewhere ×{row['carried_elsewhere']:.2f}")
    ax.text(0.98, 0.97, "\n".join(lines), transform=ax.transAxes, fontsize=7, ha="right", va="top")


def _entries(later: bool) -> list:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries = [
        Line2D([], [], color=_WITH, lw=1.2, label="one tone injected"),
        Line2D([], [], color=_WITHOUT, lw=1.2, label="without injection"),
        Patch(facecolor="0.85", lw=0, label="within 2.5 bins of the tone"),
    ]
    if later:
        entries.append(Line2D([], [], color="0.3", lw=1, ls=_STILL, label="own rotation taken back"))
    return entries


def spectrum_injected_caption(ds, pair: int) -> str:
    """What the axes of `spectrum_injected` show, for a caption."""
    layers = [int(layer) for layer in ds["inject_layer"].values]
    return (
        f"Power spectra of the mean score by distance while layer {layers[0]} attends through pair {pair} alone, and "
        "without that. Each head's spectrum is divided by its own power (own rotation taken back: by that without "
        "injection, so that the ratio of the dashed lines is what the residual stream brought along), then averaged "
        f"over {style.span(ds['heads'].sel(layer=layers).values, 'head')}. Leakage: share of power outside the shade, "
        "mean over heads; carried, elsewhere: power with injection over without, own rotation taken back, near the tone "
        "and at other frequencies, median over heads. " + parts.source(ds, resting=False)
    )


spectrum_injected.applies = parts.has_experiment
