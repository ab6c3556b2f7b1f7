"""What the table and captions of `truncate` say, computed from a result alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # figures import this, and drawing must not wait for it
    import xarray as xr

HARMLESS = 1.05  # largest ratio of perplexities at which a cut counts as harmless


def _number(value) -> float | None:
    return float(value) if np.isfinite(value) else None


def _setting(ds: xr.Dataset, row: int) -> dict:
    one = ds.isel(setting=row)
    turning = one["turning"].values[one["cut"].values.astype(bool)]
    return {
        "kind": str(one["kind"].values),
        "value": float(one["value"]),
        "where": str(one["where"].values),
        "turning": [int(turning.min()), int(turning.max())],
        "nll": float(one["nll"].mean()),
        "ratio": float(one["ratio"]),
        "ratio_se": _number(one["ratio_se"]),
    }


def critical_keep(settings: list[dict]) -> float | None:
    """Smallest share kept of those tried whose ratio is harmless (METHODS: at most 1.05); None if none is."""
    return min((one["value"] for one in settings if one["kind"] == "keep" and one["ratio"] <= HARMLESS), default=None)


def groups_at(by_type: dict, where: str) -> dict:
    """The band statistics of the layers that a setting cuts: those of its type, or of every type."""
    kind = where.split(",")[0].replace(" ", "_")
    return {name: group for name, group in by_type.items() if name.split(",")[0] == kind} or by_type


def profile(ds: xr.Dataset, kind: str, where: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Importance of each pair: (pairs, added nats per token, standard error) of one mode of knocking out."""
    rows = np.flatnonzero((ds["kind"].values == kind) & (ds["where"].values == where))
    added = ds["nll"].values[rows] - ds["nll_intact"].values
    count = added.shape[1]
    error = added.std(axis=1, ddof=1) / np.sqrt(count) if count > 1 else np.full(len(rows), np.nan)
    return ds["value"].values[rows].astype(int), added.mean(axis=1), error


def usage_at(ds: xr.Dataset, layers: list[int]) -> np.ndarray:
    """Usage of each pair relative to its mean over pairs, averaged over these layers, shape (pairs,)."""
    rows = ds["usage_mean"].sel(layer=layers).values
    own = rows / np.nanmean(rows, axis=1, keepdims=True)
    seen = np.isfinite(own)
    return np.divide(np.nansum(own, axis=0), seen.sum(0), out=np.full(own.shape[1], np.nan), where=seen.any(0))


def _knockout(ds: xr.Dataset, kind: str, where: str, groups: dict) -> dict:
    from scipy.stats import spearmanr

    pairs, added, error = profile(ds, kind, where)
    order = np.argsort(-added, kind="stable")
    usage = usage_at(ds, [layer for group in groups.values() for layer in group["layers"]])[pairs]
    known = np.isfinite(usage)
    rho = spearmanr(added[known], usage[known]).statistic if known.sum() > 2 else np.nan
    low, high = min(g["band"][0] for g in groups.values()), max(g["band"][1] for g in groups.values())
    inside = (pairs >= low) & (pairs <= high)
    positive = np.clip(added, 0, None)
    return {
        "kind": kind,
        "where": where,
        "order": pairs[order].tolist(),
        "added": added[order].tolist(),
        "added_se": [_number(value) for value in error[order]],
        "usage": usage[order].tolist(),
        "usage_rank_correlation": _number(rho),
        "band": [low, high],
        "band_pairs": float(inside.mean()),
        "band_share": float(positive[inside].sum() / positive.sum()) if positive.sum() > 0 else None,
    }


def summary(ds: xr.Dataset) -> dict:
    """Every setting, the critical keep beside the band, and how the knockouts order the pairs.

    Returns
    -------
    dict
        ``nll`` (intact, nats per token) with its standard error over segments; ``settings``; ``keep``: for each
        group of layers that was cut, ``critical`` (smallest share kept with ratio ≤ 1.05) beside ``share``
        (i_band / P) of the layer types in it; ``knockout``: pairs by importance, their rank correlation with usage,
        and the share of the harm that pairs inside the band do; ``by_layer_type``: the band, as in `bands`.
    """
    from .bands_summary import standard_error

    bands = json.loads(ds.attrs["bands"])
    settings = [_setting(ds, row) for row in range(ds.sizes["setting"])]
    by_type = bands["by_layer_type"]
    keep, knockout = [], []
    for where in dict.fromkeys(one["where"] for one in settings):
        here = [one for one in settings if one["where"] == where]
        groups = groups_at(by_type, where)
        kinds = dict.fromkeys(one["kind"] for one in here)
        if "keep" in kinds:
            keep.append(
                {
                    "where": where,
                    "critical": critical_keep(here),
                    "tried": [one["value"] for one in here if one["kind"] == "keep"],
                    "share": {name: group["share"] for name, group in groups.items()},
                    "share_usage": {name: group["i_band_usage"] / group["pairs"] for name, group in groups.items()},
                }
            )
        knockout += [_knockout(ds, kind, where, groups) for kind in kinds if kind in ("unrotate", "remove")]
    intact = ds["nll_intact"].values
    return {
        "model": ds.attrs["model"],
        "analysis": "truncate",
        "segments": int(ds.attrs["segments"]),
        "length": int(ds.attrs["length"]),
        "corpus": ds.attrs["corpus"],
        "partial": bool(ds.attrs["partial"]),
        "reverse": bool(json.loads(ds.attrs["options"])["reverse"]),
        "nll": float(intact.mean()),
        "nll_se": standard_error(intact),
        "perplexity": float(np.exp(intact.mean())),
        "settings": settings,
        "keep": keep,
        "knockout": knockout,
        "i_band": bands["i_band"],
        "i_band_usage": bands["i_band_usage"],
        "share": bands["share"],
        "by_layer_type": by_type,
    }
