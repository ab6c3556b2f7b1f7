"""What the tables and captions of `spectrum` say, computed from a result alone."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import xarray as xr

from .. import theory

PURE = 0.98  # of the purity of a pure tone: median over heads from which a pair counts as one
CLEAN = 0.9  # R² of the fit by one tone from which a pair follows it
TONES = ("leakage", "leakage_none", "excess", "carried", "carried_elsewhere", "selectivity")


def _median(values: np.ndarray, axis=None) -> np.ndarray:
    """Median of what is there; NaN where there is nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.nanmedian(values, axis=axis)


def _number(value) -> float | None:
    return float(value) if np.isfinite(value) else None


def _mean(values) -> float | None:
    values = np.asarray(values, dtype=float)
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


def relative_purity(ds: xr.Dataset) -> np.ndarray:
    """Purity over that of a pure tone, shape (layer, head, pair); NaN where a pair does not turn twice."""
    relative = ds["purity"].values / ds["purity_tone"].values[:, None]
    return np.where(ds["resolvable"].values.astype(bool)[:, None], relative, np.nan)


def by_kind(ds: xr.Dataset) -> dict[str, list[int]]:
    """Rows of the rotating layers of each kind, in order of first appearance."""
    kinds: dict[tuple, list[int]] = {}
    for row in np.flatnonzero(ds["rotates"].values):
        layer = ds.isel(layer=row)
        kind = tuple(layer[name].item() for name in ("layer_type", "base", "window", "pairs", "rope_type"))
        kinds.setdefault(kind, []).append(int(row))
    named: dict[str, list[int]] = {}
    for (layer_type, base, *_), rows in kinds.items():
        named[layer_type if layer_type not in named else f"{layer_type}, base {base:g}"] = rows
    return named


def _group(ds: xr.Dataset) -> dict:
    """Geometry, purity and damage of the layers of one kind."""
    first = ds.isel(layer=0)
    pairs, base, length = int(first["pairs"]), float(first["base"]), int(first["formation_length"])
    heads = relative_purity(ds)[..., :pairs]
    purity = _median(heads, axis=1)
    seen = np.flatnonzero(np.isfinite(purity).any(axis=0))
    lowest = np.array([np.nanmin(purity[:, pair]) for pair in seen])
    pure = seen[lowest >= PURE]
    followed = _median(ds["tone_r2"].values[..., :pairs], axis=(0, 1))
    damage, error = ds["damage"].values, ds["damage_se"].values
    layers = ds["layer"].values
    order = np.argsort(-np.nan_to_num(damage, nan=-1))[: min(3, len(damage))]
    below = theory.below_floor(np.nan_to_num(first["inv_freq"].values[:pairs]), length)
    return {
        "layers": [int(layer) for layer in layers],
        "base": base,
        "formation_base": base,
        "length": length,
        "window": int(first["window"]),
        "pairs": pairs,
        "predicted": {rule: theory.predicted_pair(base, length, pairs, rule=rule) for rule in theory.RULES},
        "distances": int(first["distances"]),
        "resolvable": [int(pair) for pair in seen],
        "pure": [int(pair) for pair in pure],
        "onset": next((int(pair) for pair, value in zip(seen, lowest, strict=True) if value < PURE), None),
        "purity": _number(_median(heads)),
        "heads_below": _mean((heads < PURE)[np.isfinite(heads)]),
        "worst": _worst(np.where(np.isfinite(heads), ds["purity"].values[..., :pairs], np.nan), layers),
        "onset_r2": next((pair for pair in range(pairs) if followed[pair] < CLEAN), None),
        "damage": _mean(damage),
        "damage_limit": _mean(ds["damage_limit"].values),
        "damage_tone": _mean(ds["damage_tone"].values),
        "damage_se": _mean(error),  # an upper bound: layers err together on the same text
        "most_damaged": [
            {"layer": int(layers[row]), "damage": _number(damage[row]), "damage_se": _number(error[row])}
            for row in order
            if np.isfinite(damage[row])
        ],
        "floor": int(below.argmax()) if below.any() else None,
        "below_floor": int(below.sum()),
        "power_below_floor": _mean(ds["power_below_floor"].values),
    }


def _worst(purity: np.ndarray, layers: np.ndarray) -> dict | None:
    """The head and resolvable pair of lowest purity."""
    if not np.isfinite(purity).any():
        return None
    row, head, pair = np.unravel_index(np.nanargmin(purity), purity.shape)
    return {"layer": int(layers[row]), "head": int(head), "pair": int(pair), "purity": float(purity[row, head, pair])}


def middle(name: str, values: np.ndarray) -> float:
    """The number of a layer from those of its heads: mean of shares, median of ratios."""
    values = values[np.isfinite(values)]
    if not len(values):
        return np.nan
    return float(values.mean() if name in TONES[:3] else np.median(values))


def injections(ds: xr.Dataset, part: str | None = None) -> list[dict]:
    """The single-tone experiment, one row for every injected pair and recorded layer.

    Parameters
    ----------
    part : str, optional
        With this part taken out; default: the intact model.
    """
    if "leakage" not in ds:
        return []
    suffix = "" if part is None else "_ablated"
    layers = [int(layer) for layer in ds["inject_layer"].values]
    source = ds.sel(layer=layers[0])
    rows = []
    for pair in (int(pair) for pair in ds["inject"].values):
        for layer in layers:
            here = ds.sel(inject=pair, layer=layer)
            here = here if part is None else here.sel(ablate=part)
            row: dict[str, Any] = {"inject": pair, "layer": layer, "inv_freq": float(source["inv_freq"][pair])}
            row |= {"resolvable": bool(ds["inv_freq"].sel(layer=layers[0])[pair] * here["distances"] >= 4 * np.pi)}
            for name in TONES:
                row[name] = _number(middle(name, here[name + suffix].values))
                row[f"{name}_se"] = _number(here[f"{name}{suffix}_se"].item())
            row["leakage_tone"] = _number(here["leakage_tone"].item())
            rows.append(row)
    return rows


def summary(ds: xr.Dataset) -> dict:
    """The statistics of a `spectrum` result.

    Returns
    -------
    dict
        ``by_layer_type``: for every kind of layer ``pure`` (pairs whose median purity over heads is at least 0.98 of
        a pure tone's in every layer), ``onset`` (first resolvable pair for which it is not), ``onset_r2`` (first pair whose median R²
        is below 0.9), ``damage``, ``most_damaged``, ``power_below_floor``; ``inject``: one row for every injected
        pair and recorded layer; ``ablate``: the same with a part taken out.  Pair 0 is the fastest.
    """
    options = json.loads(ds.attrs["options"])
    parts = [str(part) for part in ds["ablate"].values] if "ablate" in ds.coords else []
    return {
        "model": ds.attrs["model"],
        "analysis": "spectrum",
        "segments": int(ds.attrs["segments"]),
        "length": int(ds.attrs["length"]),
        "distances": int(options["distances"]),
        "window": options["window"],
        "corpus": ds.attrs["corpus"],
        "partial": bool(ds.attrs["partial"]),
        "by_layer_type": {name: _group(ds.isel(layer=rows)) for name, rows in by_kind(ds).items()},
        "not_rotating": [int(layer) for layer in ds["layer"].values[~ds["rotates"].values.astype(bool)]],
        "inject": injections(ds),
        "ablate": {part: injections(ds, part) for part in parts},
    }
