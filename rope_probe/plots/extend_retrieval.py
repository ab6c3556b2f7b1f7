"""Length × depth: in which prompts, and hidden how deep, is the key found?"""

from __future__ import annotations

import numpy as np

from ..errors import ProbeError
from ..probes import summary
from . import extend_parts as parts
from . import style

_EMPTY = "0.85"


def extend_retrieval(ds, ax=None, panels=None):
    """Draw the share of keys found, length × depth, a block for each base and a panel for each scaling.

    Parameters
    ----------
    ds : Dataset
        Result of `extend` with retrieval.
    ax : Axes or sequence of Axes, optional
        One for each panel. Without it a figure of its own is made, with caption.
    panels : sequence of str, optional
        Scalings as the table names them, e.g. ``yarn × 2``, with `` among N keys`` where there are several; default all.

    Returns
    -------
    list of Axes, or Axes where there is one panel

    Raises
    ------
    ProbeError
        There was no retrieval; a panel is not known; the number of axes is not that of the panels.
    """
    values = summary(ds)
    known = _panels(values)
    if not known:
        raise ProbeError("the result holds no retrieval: measure with --samples 1 or more.")
    panels = list(known) if panels is None else list(panels)
    given = style.given_axes(ax, panels, known, "extend_retrieval")
    lengths = values["passkey_lengths"]
    blocks = max(len(known[panel]) for panel in panels)
    height = 1.0 + 0.16 * len(values["depths"])
    with style.look(given is None):
        axes = given or style.new_axes(panels, len(panels) * height, [], extend_retrieval_caption(ds), [], True)
        for one, panel in zip(axes, panels, strict=True):
            mesh = _blocks(one, values, known[panel], lengths, blocks)
            one.set_title(panel, loc="left", weight="bold", pad=22)
            one.set_ylabel("depth")
        axes[-1].set_xlabel("tokens in the prompt")
        axes[0].figure.colorbar(mesh, ax=axes, label="keys found", pad=0.02, ticks=[0, 0.5, 1], aspect=12 * len(axes))
        if given is None:
            style.finish(axes, [])
    return axes if len(axes) > 1 else axes[0]


extend_retrieval.applies = lambda ds: bool(_panels(summary(ds)))


def _panels(values: dict) -> dict[str, list[tuple]]:
    """Title -> (setting, {length: entry}) of the settings with that scaling whose prompts were read."""
    found: dict[str, list[tuple]] = {}
    for keys in values["keys"]:
        for setting in values["settings"]:
            entries = {
                one["length"]: entry
                for one in setting["lengths"]
                for entry in one["retrieval"]
                if entry["keys"] == keys
            }
            if entries:
                several = f", among {keys} keys" if len(values["keys"]) > 1 else ""
                found.setdefault(parts.scaling_label(setting["scaling"]) + several, []).append((setting, entries))
    return found


def _blocks(ax, values: dict, settings: list[tuple], lengths: list[int], blocks: int):
    """A block of length × depth cells for each base, side by side."""
    width = len(lengths) + 0.5
    rows = np.arange(len(values["depths"]) + 1) - 0.5
    ticks, labels = [], []
    for place, (setting, entries) in enumerate(settings):
        start = place * width
        share = np.full((len(values["depths"]), len(lengths)), np.nan)
        for column, length in enumerate(lengths):
            if length in entries:
                share[:, column] = entries[length]["by_depth"]
            ticks.append(start + column + 0.5)
            labels.append(f"{length:,}")
        edges = start + np.arange(len(lengths) + 1)
        ax.add_patch(_background(start, len(lengths), len(values["depths"])))
        mesh = ax.pcolormesh(
            edges, rows, np.ma.masked_invalid(share), cmap="viridis", vmin=0, vmax=1, edgecolors="white", linewidth=0.6
        )
        name = parts.base_label(setting["base"]) if blocks < 5 else setting["base"]
        label = f"{name}\n{_bound(setting, lengths)}"
        ax.text(start + len(lengths) / 2, -0.6, label, ha="center", va="bottom", fontsize="small", linespacing=1.1)
    ax.set_xlim(-0.15, blocks * width - 0.35)
    ax.set_ylim(rows[-1], rows[0])
    ax.set_xticks(ticks, labels, rotation=45, ha="right", rotation_mode="anchor")
    ax.tick_params(length=0)
    ax.set_yticks(np.arange(len(values["depths"])), [f"{depth:g}" for depth in values["depths"]])
    for spine in ax.spines.values():
        spine.set_visible(False)
    return mesh


def _bound(setting: dict, lengths: list[int]) -> str:
    """L_bound of a setting, a range where it moves with the length."""
    bounds = [parts.reach(one) for one in setting["lengths"] if one["length"] in lengths]
    shown = list(dict.fromkeys("> 2M" if bound is None else f"{bound:,}" for bound in bounds))
    return shown[0] if len(shown) == 1 else f"{shown[0]}–{shown[-1]}"


def _background(start: float, columns: int, rows: int):
    from matplotlib.patches import Rectangle

    return Rectangle((start, -0.5), columns, rows, fc=_EMPTY, lw=0, zorder=0)


def extend_retrieval_caption(ds) -> str:
    """What the axes of `extend_retrieval` show, for a caption."""
    values = summary(ds)
    match = " Base = length: that of each prompt." if any(s["base"] == "match" for s in values["settings"]) else ""
    return (
        "Under each base its L_bound in tokens. Color: share of prompts in which greedy decoding writes the whole five-digit key that was hidden in filler text; "
        f"x: tokens of the prompt, answer included; y: where the key hides, 0 the start, 1 just before the question. "
        f"{style.count(values['samples'], 'prompt')} a cell, the same ones under every setting.{match} "
        + parts.source(ds, False)
    )
