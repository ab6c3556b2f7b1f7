"""What the tables and captions of `heads` say, computed from a result alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # the figures import this, and importing them costs little
    import xarray as xr

ROLES = ("positional", "induction", "sink", "other")  # in the order in which they are tried
NEAREST = 5  # a positional head rests on one of the distances 0 … 4
GROUPS = ("all", "semantic", *ROLES)
FAST = 64  # tokens: a pair that turns at least once within as many is fast


def members(ds: xr.Dataset, group: str) -> np.ndarray:
    """Which heads belong to a group, bool of shape (layer, head); semantic are all that are not positional."""
    role = ds["role"].values
    if group in ("all", "semantic"):
        return (role != "") & (group == "all") | ~np.isin(role, ("", "positional"))
    return role == group


def dominant_pair(ds: xr.Dataset, name: str) -> np.ndarray:
    """Turning pair of the largest `k_top`, `q_top` or `usage` for every query head, shape (layer, head).

    A query head has the dominant key pair of the key head it reads. NaN where there is none.
    """
    values = ds[name].values.astype(float)
    values = np.where((ds["inv_freq"].values > 0)[:, None] & (values > 0), values, 0)
    peaks = (
        np.where(values.any(-1), values.argmax(-1), np.nan) if values.shape[-1] else np.full(values.shape[:2], np.nan)
    )
    if name != "k_top":
        return peaks
    out = np.full(ds["role"].shape, np.nan)
    for row, (heads, kv_heads) in enumerate(zip(ds["heads"].values, ds["kv_heads"].values, strict=True)):
        out[row, :heads] = np.repeat(peaks[row, :kv_heads], heads // kv_heads)
    return out


def dominant_wavelength(ds: xr.Dataset) -> np.ndarray:
    """Wavelength in tokens of the pair of largest usage, shape (layer, head); NaN where there is none."""
    peaks = dominant_pair(ds, "usage")
    known = np.isfinite(peaks)
    out = np.full(peaks.shape, np.nan)
    out[known] = ds["wavelength"].values[np.nonzero(known)[0], peaks[known].astype(int)]
    return out


def fast_share(ds: xr.Dataset) -> np.ndarray:
    """Share of a head's usage that its fast pairs hold, shape (layer, head)."""
    usage = np.nan_to_num(ds["usage"].values)
    fast = np.nan_to_num(ds["wavelength"].values, nan=np.inf) <= FAST
    total = usage.sum(-1)
    inside = (usage * fast[:, None]).sum(-1)
    return np.divide(inside, total, out=np.full(total.shape, np.nan), where=total > 0)


def _middle(values: np.ndarray, how=np.mean) -> float | None:
    values = values[np.isfinite(values)]
    return float(how(values)) if len(values) else None


def _group(ds: xr.Dataset, which: np.ndarray) -> dict:
    """The numbers of some heads."""
    pairs = {key: dominant_pair(ds, name)[which] for key, name in (("", "k_top"), ("_q", "q_top"), ("_usage", "usage"))}
    return {
        "heads": int(which.sum()),
        **{f"i_band{key}": _middle(values) for key, values in pairs.items()},
        "wavelength": _middle(dominant_wavelength(ds)[which], np.median),
        "fast_share": _middle(fast_share(ds)[which]),
        **{name: _middle(ds[name].values[which]) for name in ("mean_distance", "entropy", "sink_weight", "row_sum")},
    }


def _named(ds: xr.Dataset, which: np.ndarray, values: np.ndarray) -> list[dict]:
    """Layer, head and value of some heads, the largest value first."""
    layers, found = ds["layer"].values, [(row, head) for row, head in zip(*np.nonzero(which), strict=True)]
    found.sort(key=lambda place: -values[place])
    return [{"layer": int(layers[row]), "head": int(head), "weight": float(values[row, head])} for row, head in found]


def _positional(ds: xr.Dataset) -> dict[int, list[dict]]:
    """Positional heads by the distance they rest on."""
    nearest = np.nan_to_num(ds["weight_by_distance"].values[..., :NEAREST])
    where, weight = nearest.argmax(-1), nearest.max(-1)
    named = {}
    for distance in range(nearest.shape[-1]):
        found = _named(ds, members(ds, "positional") & (where == distance), weight)
        if found:
            named[distance] = found
    return named


def correlation(ds: xr.Dataset, which: np.ndarray) -> float | None:
    """Spearman correlation over heads of dominant wavelength and mean distance; None for fewer than three heads."""
    from scipy.stats import spearmanr

    waves, distance = dominant_wavelength(ds)[which], ds["mean_distance"].values[which]
    known = np.isfinite(waves) & np.isfinite(distance)
    if known.sum() < 3 or np.ptp(waves[known]) == 0 or np.ptp(distance[known]) == 0:
        return None
    return float(spearmanr(waves[known], distance[known]).statistic)


def band_share(ds: xr.Dataset, low: int, high: int) -> np.ndarray:
    """Share that the pairs `low` to `high` hold of a head's mean score, shape (layer, head, lag).

    What pairs add to a score has both signs, so the share is one of magnitudes: Σ |c| over the band, by Σ |c| over
    all rotary pairs.
    """
    size = np.abs(ds["pair_profile"].values.astype(float))
    seen = np.isfinite(size)
    total = np.where(seen, size, 0).sum(2)
    inside = np.where(seen, size, 0)[:, :, low : high + 1].sum(2)
    return np.divide(inside, total, out=np.full(total.shape, np.nan), where=total > 0)


def _shares(ds: xr.Dataset, band: list[int]) -> dict:
    """Mean over heads of the share of the band, by distance, of all heads and of the semantic ones."""
    share = band_share(ds, *band)
    means = {group: [_middle(share[members(ds, group)][:, n]) for n in range(ds.sizes["lag"])] for group in GROUPS[:2]}
    return {"lag": [int(lag) for lag in ds["lag"].values], **means}


def summary(ds: xr.Dataset) -> dict:
    """The statistics of a `heads` result.

    Returns
    -------
    dict
        Everything that the summary of `bands` says, and ``groups``: number of heads, ``i_band`` (mean over query heads
        of the dominant pair of the keys they read), ``i_band_q``, ``i_band_usage``, median ``wavelength`` of the pair
        of largest usage, ``fast_share`` (of usage, in pairs of wavelength up to 64 tokens), means of ``mean_distance``, ``entropy``, ``sink_weight`` and ``row_sum``, for all heads, for
        semantic ones and for each role; ``positional_heads`` by distance and ``induction_heads`` with their weights,
        largest first.  Under ``by_layer_type`` beside the rest ``groups``, ``band_share`` (see `band_share`) and
        ``wavelength_distance``: Spearman correlation over heads of dominant wavelength and mean distance.
    """
    from . import bands_summary

    out = bands_summary.summary(ds)
    kinds = out["by_layer_type"]
    for kind in kinds.values():
        part = ds.isel(layer=np.flatnonzero(np.isin(ds["layer"].values, kind["layers"])))
        kind["groups"] = {group: _group(part, members(part, group)) for group in GROUPS[:2]}
        kind["band_share"] = _shares(part, kind["band"])
        kind["wavelength_distance"] = correlation(part, members(part, "all"))
    options = json.loads(ds.attrs["options"])
    return out | {
        "analysis": "heads",
        "thresholds": options["thresholds"],
        "groups": {group: _group(ds, members(ds, group)) for group in GROUPS},
        "positional_heads": _positional(ds),
        "induction_heads": _named(ds, members(ds, "induction"), ds["induction"].values),
        "map": options["map"],
    }
