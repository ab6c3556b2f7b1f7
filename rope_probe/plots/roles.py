"""What the figures of `heads` share: colors of roles, and the words on what was read."""

from __future__ import annotations

from ..probes.heads_summary import members
from . import style

#: role -> color, apart for color-blind eyes and in grey
COLORS = {"positional": "#d95f02", "induction": "#004488", "sink": "#93a5a8", "other": "#e6dfc8"}


def entries(ds) -> list:
    """Legend entries: every role that occurs, with its number of heads."""
    from matplotlib.patches import Patch

    counts = {role: int(members(ds, role).sum()) for role in COLORS}
    return [
        Patch(facecolor=color, edgecolor="0.4", lw=0.4, label=f"{role} ({counts[role]})")
        for role, color in COLORS.items()
        if counts[role]
    ]


def definition(summary: dict) -> str:
    """A sentence on how roles are given."""
    limits = summary["thresholds"]
    return (
        f"Roles, tried in this order: positional, mean weight of {limits['positional']:g} or more on one distance of 0 "
        f"to 4 tokens; induction, {limits['induction']:g} or more on the token after the previous copy of the current "
        f"one in repeated random tokens; sink, {limits['sink']:g} or more on the first position. "
    )


def source(ds) -> str:
    """Sentences on model and text, for the end of a caption."""
    segments, length = int(ds.attrs["segments"]), int(ds.attrs["length"])
    cut = ", interrupted before the end" if int(ds.attrs.get("partial", 0)) else ""
    return (
        f"Model: {style.model_name(ds)}. Text: {ds.attrs['corpus']}, {style.count(segments, 'segment')} of {length:,} "
        f"tokens{cut}; means over {segments * (length - 1):,} query positions, the first of each segment left out."
    )
