"""What the figures of `spectrum` share: words for their captions, the frequency axis, means over heads."""

from __future__ import annotations

import json

import numpy as np

from ..errors import ProbeError
from . import style

HALF_WIDTH = 2.5  # bins on either side of a tone, as in the analysis


def source(ds, resting: bool = True) -> str:
    """Sentences on model, text and spectra, for the end of a caption."""
    options, segments, length = json.loads(ds.attrs["options"]), int(ds.attrs["segments"]), int(ds.attrs["length"])
    cut = ", interrupted before the end" if int(ds.attrs["partial"]) else ""
    window = {"hann": "Hann", "hamming": "Hamming", "blackman": "Blackman", "none": "no"}[options["window"]]
    words = (
        f"Scores are means over positions (first key left out) and {style.count(segments, 'segment')} of {length:,} "
        f"tokens{cut}, taken before spectra ({options['distances']:,} distances, {window} window). "
        f"Model: {style.model_name(ds)}. Text: {ds.attrs['corpus']}."
    )
    layers = ds["layer"].values[~ds["rotates"].values.astype(bool)]
    if resting and len(layers):
        words += f" Without rotation: layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}."
    return words


def of_kinds(kinds, columns: int) -> list[tuple]:
    """Legend entries that name the kinds of layers, where there are several."""
    from matplotlib.patches import Patch

    return [([Patch(facecolor=kind.color, lw=0, label=kind.label) for kind in kinds], columns)] * (len(kinds) > 1)


def need_experiment(ds, name: str) -> None:
    """Refuse to draw the single-tone experiment from a result without it."""
    if not has_experiment(ds):
        raise ProbeError(f"{name} draws the single-tone experiment, and the result has none: run it with --inject.")


def has_experiment(ds) -> bool:
    """Was a tone injected?"""
    return "power_injected" in ds


def mean_of_heads(values: np.ndarray) -> np.ndarray:
    """Mean over the heads (axis −2) that there are."""
    seen = np.isfinite(values)
    count = seen.sum(axis=-2)
    total = np.where(seen, values, 0).sum(axis=-2)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


def share(power: np.ndarray, total: np.ndarray | None = None) -> np.ndarray:
    """Spectra [..., head, bin] divided by the power of each head (or by `total`)."""
    total = np.nansum(power, axis=-1, keepdims=True) if total is None else total
    return np.divide(power, total, out=np.full(power.shape, np.nan), where=total > 0)


def frequency_axis(ax, frequency: np.ndarray) -> None:
    """x = frequency from slow to fast, on a log scale from the first bin on, and wavelengths on top."""
    ax.set_xscale("log")
    ax.set_xlim(0.7 * frequency[1], np.nanmax(frequency))
    ax.set_xlabel("frequency (rad / token)")
    ruler = ax.secondary_xaxis("top", functions=(_turn, _turn))
    ruler.set_xlabel("wavelength (tokens)", labelpad=2.5)
    ruler.tick_params(pad=1.5)


def _turn(x):
    return 2 * np.pi / np.maximum(x, 1e-9)
