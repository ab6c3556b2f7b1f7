"""Wavelength against pair, for every kind of layer of one or several models."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import numpy as np

from ..words import base
from . import style


def inspect(described: list[dict], ax=None):
    """Ladder of wavelengths with the trained length, the context its heads see, the floor and the predicted band.

    Parameters
    ----------
    described : list of dict
        Results of :func:`rope_probe.probes.inspect.describe`, one for each model.
    ax : Axes, optional
        Draw here; otherwise a figure of its own, with legend and caption.

    Returns
    -------
    Axes
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    ladders = [(entry, kind) for entry in described for kind in entry["kinds"] if kind["rotates"]]
    colors = [color for color, _ in zip(cycle(style.SERIES), ladders, strict=False)]
    labels = [_label(entry, kind, len(described) > 1) for entry, kind in ladders]
    beyond = any(_beyond(kind) for _, kind in ladders)
    own = ax is None
    with style.look(own):
        marks = [
            Line2D([], [], color="#555555", ls=":", label="trained length"),
            *([Line2D([], [], color="#555555", ls=(0, (5, 2)), lw=0.8, label="context seen")] if beyond else []),
            Patch(color="#555555", alpha=0.2, lw=0, label="predicted: one turn to half a turn"),
        ]
        curves = [Line2D([], [], color=c, label=text) for c, text in zip(colors, labels, strict=True)]
        groups = [(curves, 1), (marks, 1)]
        if own:
            (ax,) = style.new_axes(("wavelength",), 2.6, [], _caption(ladders, labels), groups)
        for (entry, kind), color, label in zip(ladders, colors, labels, strict=True):
            _ladder(ax, entry, kind, color, label)
        ax.set_yscale("log")
        ax.set_xlim(left=0)
        style.integer_ticks(ax.xaxis)
        ax.set_xlabel("rotary pair (fast → slow)")
        ax.set_ylabel("wavelength (tokens)")
        if own:
            style.finish([ax], groups)
    return ax


def _ladder(ax, entry: dict, kind: dict, color: str, label: str) -> None:
    inv_freq = np.array(next(row["inv_freq"] for row in entry["layers"] if row["layer"] == kind["layers"][0]))
    turning = inv_freq > 0
    ax.plot(np.flatnonzero(turning), 2 * np.pi / inv_freq[turning], color=color, label=label)
    ax.axhline(kind["length"], color=color, lw=0.9, ls=":")
    if _beyond(kind):
        ax.axhline(kind["reach"], color=color, lw=0.8, ls=(0, (5, 2)))
    low, high = sorted((kind["predicted"]["full_turn"], kind["predicted"]["half_turn"]))
    ax.axvspan(low, high, color=color, alpha=0.15, lw=0)


def _beyond(kind: dict) -> bool:
    """Is the context that its heads see another one than the trained length?"""
    return bool(kind["reach"]) and kind["reach"] != kind["length"]


def _label(entry: dict, kind: dict, several: bool) -> str:
    name = _name(entry)
    scaled = "" if kind["rope_type"] == "default" else f", {kind['rope_type']}"
    layers = f"{kind['layer_type'].replace('_', ' ')}, base {base(kind['base'])}{scaled}"
    return f"{name}: {layers}" if several else layers


def _name(entry: dict) -> str:
    return Path(entry["model"]).name.removesuffix(".json").removesuffix(".gguf")


def _caption(ladders, labels) -> str:
    parts = [
        f"{label}: {kind['undertrained']} of {kind['pairs']} pairs below the floor"
        + (f", {kind['zero_pairs']} never turn" if kind["zero_pairs"] else "")
        for (_, kind), label in zip(ladders, labels, strict=True)
    ]
    return (
        "Tokens per turn of every rotary pair (y, log scale; x: pair, 0 the fastest), as the model's own rotary module gives "
        "them from its configuration. Dotted: trained length (for sliding layers the window); pairs above it never finish a "
        "turn (the floor). Shade: predicted band, one turn to half a turn within the trained length. "
        + "; ".join(parts)
        + f". Model: {', '.join(dict.fromkeys(_name(entry) for entry, _ in ladders))}."
    )
