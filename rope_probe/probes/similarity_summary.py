"""What the tables and captions of `similarity` say, computed from a result alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from ..accumulate import mean_and_error

if TYPE_CHECKING:  # figures need these numbers, not what reads files
    import xarray as xr


def controlled(ds: xr.Dataset) -> np.ndarray:
    """Mean over distances of `rho_at_distance`, shape (layer, head); NaN where there is none."""
    return mean_and_error(ds["rho_at_distance"].values, axis=2)[0]


def _number(value) -> float | None:
    return float(value) if np.isfinite(value) else None


def _with_error(name: str, segments: np.ndarray) -> dict:
    """Mean and standard error over segments of a statistic that every segment has."""
    mean, error = mean_and_error(segments)
    return {name: _number(mean), f"{name}_se": _number(error)}


def free_segments(ds: xr.Dataset) -> np.ndarray:
    """rho of every segment, mean over the heads of all layers of `ds`, shape (segment,)."""
    values = ds["rho_segment"].values
    return mean_and_error(values.reshape(len(values), -1), axis=1)[0]


def controlled_segments(ds: xr.Dataset) -> np.ndarray:
    """Mean over distances and heads of `rho_at_distance` of every segment, shape (segment,)."""
    layers = mean_and_error(ds["rho_at_distance_segment"].values, axis=2)[0]
    weights = np.isfinite(layers) * np.isfinite(controlled(ds)).sum(1)
    total = weights.sum(1)
    return (np.nan_to_num(layers) * weights).sum(1) / np.where(total > 0, total, np.nan)


def _statistics(ds: xr.Dataset) -> dict:
    """Of some layers together."""
    rho, fixed = ds["rho"].values, controlled(ds)
    known, known_fixed = rho[np.isfinite(rho)], fixed[np.isfinite(fixed)]
    return {
        **_with_error("rho", free_segments(ds)),
        **_with_error("rho_fixed", controlled_segments(ds)),
        "heads": len(known),
        "std_heads": _number(known.std(ddof=1)) if len(known) > 1 else None,
        "lowest": _number(known.min(initial=np.inf)),
        "highest": _number(known.max(initial=-np.inf)),
        "positive": _number((known > 0).mean()) if len(known) else None,
        "positive_fixed": _number((known_fixed > 0).mean()) if len(known_fixed) else None,
    }


def summary(ds: xr.Dataset) -> dict:
    """The statistics of a `similarity` result.

    Returns
    -------
    dict
        ``rho`` (mean over all heads of the chosen layers) and ``rho_fixed`` (the same at fixed distance, mean over
        distances), with their standard errors over segments (``_se``), share of heads that are ``positive``;
        ``by_layer`` and ``by_layer_type`` with the same for some of the layers, and ``by_distance``.
    """
    options = json.loads(ds.attrs["options"])
    distances = mean_and_error(ds["rho_at_distance_segment"].values, axis=1)[0]
    layers = []
    for row in range(ds.sizes["layer"]):
        one = ds.isel(layer=[row])
        facts = {name: one[name].values[0].item() for name in ("layer", "layer_type", "window", "rotates")}
        layers.append(facts | _statistics(one) | {"rows": float(one["query_rows"].values.mean())})
    return {
        "model": ds.attrs["model"],
        "analysis": "similarity",
        "segments": int(ds.attrs["segments"]),
        "length": int(ds.attrs["length"]),
        "corpus": ds.attrs["corpus"],
        "partial": bool(ds.attrs["partial"]),
        "queries": options["queries"],
        "sink": options["sink"],
        **_statistics(ds),
        "without_value": int(((ds["head"] < ds["heads"]) & ~np.isfinite(ds["rho"])).sum()),
        "by_layer_type": {
            name: {"layers": ds["layer"].values[rows].tolist()} | _statistics(ds.isel(layer=rows))
            for name, rows in kinds(ds).items()
        },
        "by_layer": layers,
        "by_distance": [
            {"distance": int(distance), **_with_error("rho", distances[:, n])}
            for n, distance in enumerate(ds["distance"].values)
        ],
    }


def kinds(ds: xr.Dataset) -> dict[str, list[int]]:
    """Rows of the layers of each kind: what they see, and whether they rotate."""
    found: dict[str, list[int]] = {}
    for row, (kind, rotates) in enumerate(zip(ds["layer_type"].values, ds["rotates"].values, strict=True)):
        name = str(kind).replace("_", " ") + ("" if rotates else ", no rotation")
        found.setdefault(name, []).append(row)
    return found


def thirds(ds: xr.Dataset) -> dict[str, np.ndarray]:
    """Rows of the early, middle and late layers; fewer groups where there are fewer layers."""
    parts = np.array_split(np.arange(ds.sizes["layer"]), 3)
    return {name: rows for name, rows in zip(("early", "middle", "late"), parts, strict=True) if len(rows)}
