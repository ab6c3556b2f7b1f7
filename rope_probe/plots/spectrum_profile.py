"""Mean score by distance of chosen heads: what the sum of tones looks like."""

from __future__ import annotations

import numpy as np

from ..errors import ProbeError
from . import spectrum_parts as parts
from . import style

_NAMES = ("cleanest", "median", "most damaged")


def spectrum_profile(ds, heads=None, ax=None):
    """Draw the mean pre-softmax score by distance of some heads.

    Parameters
    ----------
    ds : Dataset
        Result of `spectrum`.
    heads : sequence of (layer, head), optional
        Default: the cleanest, the median and the most damaged head of the rotating layers.
    ax : Axes or sequence of Axes, optional
        One for each head. Without it a figure of its own is made, with a caption.

    Returns
    -------
    list of Axes, or Axes where there is one head

    Raises
    ------
    ProbeError
        No such head; the number of axes is not that of the heads.
    """
    chosen = [(int(layer), int(head)) for layer, head in heads] if heads is not None else typical_heads(ds)
    rows = [_row(ds, *one) for one in chosen]
    names = [f"{layer}.{head}" for layer, head in chosen]
    given = style.given_axes(ax, names, names, "spectrum_profile")
    kinds, damage = style.kinds(ds), head_damage(ds)
    with style.look(given is None):
        axes = given or style.new_axes(names, 1.9, kinds[:1], spectrum_profile_caption(ds, heads is None), [])
        for number, (one, row, (layer, head)) in enumerate(zip(axes, rows, chosen, strict=True)):
            color = next((kind.color for kind in kinds if row in kind.rows), "0.35")
            one.plot(ds["distance"].values, ds["profile"].values[row, head], color=color, lw=0.8)
            one.axhline(0, color="0.7", lw=0.5, zorder=0)
            one.set_xlabel("distance (tokens)")
            title = f"head {layer}.{head}" if heads is not None else f"{_NAMES[number]}: head {layer}.{head}"
            one.set_title(title, loc="left", weight="bold")
            if np.isfinite(damage[row, head]):
                words = f"damage {100 * damage[row, head]:.1f}%"
                one.text(0.97, 0.95, words, transform=one.transAxes, ha="right", va="top", fontsize=7)
        axes[0].set_ylabel("mean score before softmax")
        if given is None:
            style.finish(axes, [])
    return axes if len(axes) > 1 else axes[0]


def head_damage(ds) -> np.ndarray:
    """Damage of every head, shape (layer, head); NaN where no pair is resolvable."""
    purity = np.where(ds["resolvable"].values.astype(bool)[:, None], ds["purity"].values, np.nan)
    used = np.where(np.isfinite(purity), ds["usage"].values, 0)
    total = used.sum(axis=-1)
    mean = np.divide((used * np.nan_to_num(purity)).sum(-1), total, out=np.full(total.shape, np.nan), where=total > 0)
    return 1 - mean


def typical_heads(ds) -> list[tuple[int, int]]:
    """(layer, head) of the cleanest, the median and the most damaged head; the first heads where none can be told."""
    damage = head_damage(ds)
    seen = np.argwhere(np.isfinite(damage))
    if not len(seen):
        return [(int(ds["layer"].values[0]), head) for head in range(min(3, int(ds["heads"].values[0])))]
    order = seen[np.argsort(damage[tuple(seen.T)], kind="stable")]
    return [(int(ds["layer"].values[row]), int(head)) for row, head in order[[0, len(order) // 2, -1]]]


def _row(ds, layer: int, head: int) -> int:
    found = np.flatnonzero(ds["layer"].values == layer)
    if not len(found) or not 0 <= head < int(ds["heads"].values[found[0]]):
        raise ProbeError(f"the result has no head {layer}.{head}: give (layer, head) pairs that it has.")
    return int(found[0])


def spectrum_profile_caption(ds, typical: bool = True) -> str:
    """What the axes of `spectrum_profile` show, for a caption."""
    chosen = "Of all heads, the one of least, of median and of most damage. " if typical else ""
    return (
        "Mean attention score before softmax (scale in, soft-cap out; no unit) of the heads layer.head, against the "
        f"distance Δ between query and key. {chosen}Damage: 1 − usage-weighted mean purity of the head's resolvable "
        "pairs (purity: share of power within 2.5 bins of the pair's own frequency). " + parts.source(ds)
    )
