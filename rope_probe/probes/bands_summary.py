"""What the tables and captions of `bands` say, computed from a result alone."""

from __future__ import annotations

import numpy as np
import xarray as xr

from .. import theory


def _mode(values: np.ndarray) -> int:
    """Most frequent value; the lower one of a tie."""
    found, counts = np.unique(values.astype(int), return_counts=True)
    return int(found[counts.argmax()])


def _per_head(ds: xr.Dataset, name: str) -> np.ndarray:
    """Index of the largest pair, for every layer and head that has one (1-d array)."""
    return np.concatenate(_by_layer(ds, name)) if ds.sizes["layer"] else np.zeros(0)


def _by_layer(ds: xr.Dataset, name: str) -> list[np.ndarray]:
    """Dominant pair of every head, layer by layer; only pairs that turn can win."""
    turning = ds["inv_freq"].values > 0
    rows = []
    for values, allowed in zip(ds[name].values.astype(float), turning, strict=True):
        values = np.where(allowed, values, -np.inf)
        values = np.where(np.isnan(values), -np.inf, values)
        heads = values[np.isfinite(values.max(axis=-1))]
        # a head whose norms are all zero (dead) has no dominant pair
        heads = heads[heads.max(axis=-1) > 0] if len(heads) else heads
        rows.append(heads.argmax(axis=-1) if len(heads) else np.zeros(0, dtype=int))
    return rows


def _mean(values) -> float | None:
    values = np.asarray(values, dtype=float)
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


def _std(values) -> float | None:
    values = np.asarray(values, dtype=float)
    return float(values.std(ddof=1)) if len(values) > 1 else None


def standard_error(segments: np.ndarray) -> float | None:
    """Standard error over segments of a per-segment statistic; None for a single segment."""
    values = np.asarray(segments, dtype=float)
    values = values[np.isfinite(values)]
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def segment_means(ds: xr.Dataset, name: str) -> np.ndarray:
    """Mean over all heads of a statistic `[segment, layer]`, shape (segment,)."""
    values = ds[name].values
    weights = ds["kv_heads" if name == "dominant_segment" else "heads"].values * np.isfinite(values)
    total = weights.sum(axis=1)
    return (np.nan_to_num(values) * weights).sum(axis=1) / np.where(total > 0, total, np.nan)


def wavelength_at(ds: xr.Dataset, index: float | None) -> float | None:
    """Wavelength in tokens at a real-valued pair index of the first layer, on its log scale."""
    if index is None:
        return None
    waves = ds["wavelength"].values[0]
    finite = np.isfinite(waves)
    return float(np.exp(np.interp(index, np.flatnonzero(finite), np.log(waves[finite]))))


def mean_usage(ds: xr.Dataset) -> np.ndarray:
    """Usage by pair, averaged over layers and heads."""
    usage = ds["usage"].values
    seen = np.isfinite(usage).sum(axis=(0, 1))
    return np.divide(np.nansum(usage, axis=(0, 1)), seen, out=np.full(usage.shape[-1], np.nan), where=seen > 0)


def band_range(usage: np.ndarray) -> tuple[int, int]:
    """First and last of the contiguous pairs around the peak whose usage stays above half of it."""
    usage = np.nan_to_num(usage)
    peak = first = last = int(usage.argmax())
    while first > 0 and usage[first - 1] > usage[peak] / 2:
        first -= 1
    while last < len(usage) - 1 and usage[last + 1] > usage[peak] / 2:
        last += 1
    return first, last


def _concentration(ds: xr.Dataset) -> dict:
    """How sharply a head's keys are concentrated: medians over heads."""
    norms = ds["k_norm"].values.reshape(-1, ds.sizes["pair"])
    norms = norms[np.isfinite(norms).any(axis=1)]
    ratios, effective = [], []
    for row in norms:
        row = row[np.isfinite(row)]
        middle = np.median(row)
        if middle > 0:
            ratios.append(row.max() / middle)
        if (row > 0).any():
            effective.append((row**2).sum() ** 2 / (row**4).sum())
    return {
        "concentration": float(np.median(ratios)) if ratios else None,
        "effective_pairs": float(np.median(effective)) if effective else None,
    }


def _statistics(ds: xr.Dataset) -> dict:
    """The band statistics of a group of layers."""
    keys, queries, usage = (_per_head(ds, name) for name in ("k_top", "q_top", "usage"))
    layers = [rows.mean() for rows in _by_layer(ds, "k_top") if len(rows)]
    pairs = int(ds["pairs"].max())
    i_band = _mean(keys)
    return {
        "i_band": i_band,
        "i_band_se": standard_error(segment_means(ds, "dominant_segment")),
        "i_band_median": float(np.median(keys)) if len(keys) else None,
        "i_band_q": _mean(queries),
        "i_band_q_se": standard_error(segment_means(ds, "dominant_q_segment")),
        "i_band_usage": _mean(usage),
        "i_band_usage_se": standard_error(segment_means(ds, "dominant_usage_segment")),
        "i_band_usage_median": float(np.median(usage)) if len(usage) else None,
        "mode": _mode(keys) if len(keys) else None,
        "mode_usage": _mode(usage) if len(usage) else None,
        "std_heads": _std(keys),
        "std_layers": _std(layers),
        "std_heads_usage": _std(usage),
        "std_layers_usage": _std([rows.mean() for rows in _by_layer(ds, "usage") if len(rows)]),
        "pairs": pairs,
        "share": i_band / pairs if i_band is not None else None,
        **_concentration(ds),
    }


def _group(ds: xr.Dataset) -> dict:
    """Statistics, geometry and prediction of the layers of one kind."""
    first = ds.isel(layer=0)
    out = _statistics(ds)
    base, length, pairs = float(first["formation_base"]), int(first["formation_length"]), int(first["pairs"])
    predicted = {rule: theory.predicted_pair(base, length, pairs, rule=rule) for rule in theory.RULES}
    low, high = band_range(mean_usage(ds))
    medians = np.array([np.median(rows) if len(rows) else np.nan for rows in _by_layer(ds, "usage")])
    far = np.abs(medians - np.nanmedian(medians)) > pairs / 10 if np.isfinite(medians).any() else medians > 0
    deviating = [int(layer) for layer in ds["layer"].values[far]]
    j_star = predicted["variance"]
    return out | {
        "layers": [int(layer) for layer in ds["layer"].values],
        "base": float(first["base"]),
        "formation_base": base,
        "length": length,
        "window": int(first["window"]),
        "rope_type": str(first["rope_type"].values),
        "wavelength": wavelength_at(ds, out["i_band"]),
        "wavelength_usage": wavelength_at(ds, out["i_band_usage"]),
        "band": [low, high],
        "predicted": predicted,
        "off_ladder": [rule for rule, value in predicted.items() if value > pairs - 1 or value < 0],
        "c": out["i_band"] / j_star if out["i_band"] is not None and j_star > 0 else None,
        "deviating_layers": deviating,
    }


def summary(ds: xr.Dataset) -> dict:
    """The statistics of a `bands` result: all layers, and each layer type.

    Returns
    -------
    dict
        ``i_band`` (mean over layers and kv heads of the dominant key pair), ``i_band_q``, ``i_band_usage``,
        their standard errors over segments (``_se``), spreads, ``mode``, ``pairs``, and ``by_layer_type`` with
        the same for every type of layer beside its ``base``, ``length`` (formation), ``window`` and
        ``predicted`` pair index under each rule.  Pair indices are 0-based, pair 0 the fastest.
    """
    rotating = ds.isel(layer=np.flatnonzero(ds["rotates"].values))
    kinds: dict[tuple, list[int]] = {}
    for row in range(rotating.sizes["layer"]):
        layer = rotating.isel(layer=row)
        kind = tuple(layer[name].item() for name in ("layer_type", "base", "window", "pairs", "rope_type"))
        kinds.setdefault(kind, []).append(row)
    by_type = {}
    for (layer_type, base, *_), rows in kinds.items():
        name = layer_type if layer_type not in by_type else f"{layer_type}, base {base:g}"
        by_type[name] = _group(rotating.isel(layer=rows))
    return {
        "model": ds.attrs["model"],
        "analysis": "bands",
        "segments": int(ds.attrs["segments"]),
        "length": int(ds.attrs["length"]),
        "corpus": ds.attrs["corpus"],
        "partial": bool(ds.attrs["partial"]),
        **_statistics(rotating),
        "by_layer_type": by_type,
        "not_rotating": [int(layer) for layer in ds["layer"].values[~ds["rotates"].values]],
    }
