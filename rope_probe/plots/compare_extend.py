"""Perplexity and retrieval of several models against the length, under the settings that they share."""

from __future__ import annotations

from itertools import cycle

import numpy as np

from ..errors import ProbeError, UsageError
from ..probes import summary
from . import compare_curves as parts
from . import style

PANELS = {"perplexity": "perplexity", "retrieval": "key found"}
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)))  # settings


def compare_extend(results, ax=None, names=None, axis=None):
    """Draw perplexity, and the share of keys found where all looked for them, against the length.

    See `rope_probe.plots.compare`.
    """
    if axis is not None:
        raise UsageError(f"--axis {axis}: extend is compared by length and has no pairs to lay along it; leave it out.")
    settings = shared_settings(results)
    panels = [name for name in PANELS if all(points(ds, settings[0], name)[0].size for ds in results)]
    if not panels:
        raise ProbeError("the results of extend share no measure of a setting (perplexity, or retrieval) to draw.")
    given = style.given_axes(ax, panels, panels, "compare")
    groups = [(_models(names), 3), (_settings(settings), 2)]
    with style.look(given is None):
        axes = given or style.new_axes(panels, 2.2, [], compare_extend_caption(results, names, panels), groups)
        for one, panel in zip(axes, panels, strict=True):
            for ds, name, color in zip(results, names, cycle(style.SERIES), strict=False):
                for setting, dashes in zip(settings, cycle(_DASHES), strict=False):
                    x, y, error = points(ds, setting, panel)
                    look = {"color": color, "ls": dashes, "marker": "o", "ms": 2.8, "lw": 1, "elinewidth": 0.8}
                    one.errorbar(x, y, error, label=f"{name}, {setting}", **look)
            one.set_xscale("log", base=2)
            one.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
            one.set_xlabel("length (tokens)")
            one.set_ylabel("perplexity" if panel == "perplexity" else "share of keys found")
            if panel == "perplexity":
                one.set_yscale("log")
            else:
                one.set_ylim(-0.03, 1.03)
            one.set_title(PANELS[panel], loc="left", weight="bold")
        if given is None:
            style.finish(axes, groups)
    return axes


def shared_settings(results) -> list[str]:
    """Names of the settings that all results have, in the order of the first."""
    names = [[setting["name"] for setting in summary(ds)["settings"]] for ds in results]
    found = [name for name in names[0] if all(name in other for other in names)]
    if not found:
        raise ProbeError("the results of extend have no setting in common that could be drawn over each other.")
    return found


def points(ds, name: str, panel: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(length, value, standard error) of a setting, for the lengths that were measured."""
    setting = next(one for one in summary(ds)["settings"] if one["name"] == name)
    found = []
    for one in setting["lengths"]:
        if panel == "perplexity" and one["perplexity"] is not None:
            found.append((one["length"], one["perplexity"], one["perplexity"] * (one["nll_se"] or 0)))
        elif panel == "retrieval" and one["retrieval"]:
            fewest = min(one["retrieval"], key=lambda entry: entry["keys"])
            found.append((one["length"], fewest["exact_match"], fewest["exact_match_se"] or 0))
    x, y, error = np.array(sorted(found), dtype=float).reshape(-1, 3).T
    return x, y, error


def _models(names) -> list:
    from matplotlib.patches import Patch

    return [Patch(facecolor=color, lw=0, label=name) for name, color in zip(names, cycle(style.SERIES), strict=False)]


def _settings(settings) -> list:
    from matplotlib.lines import Line2D

    pairs = zip(settings, cycle(_DASHES), strict=False)
    return [Line2D([], [], color="0.35", ls=dashes, lw=1, label=name) for name, dashes in pairs]


def compare_extend_caption(results, names, panels) -> str:
    """What the axes of `compare_extend` show, for a caption."""
    found = " Key found: share of prompts whose hidden key greedy decoding writes, fewest keys that were tried."
    return (
        "Perplexity over all predictions of segments of a length (x, tokens), bars: standard error over segments."
        f"{found * ('retrieval' in panels)} Settings (dashes): those that all results have. Models: {', '.join(names)}. "
        f"{parts.texts(results)}"
    )
