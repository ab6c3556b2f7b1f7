"""What the tables and captions of `extend` say, computed from a result alone."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import numpy as np

from ..words import base as base_words

if TYPE_CHECKING:  # figures import this, and drawing must not wait for it
    import xarray as xr


def _number(value) -> float | None:
    return float(value) if np.isfinite(value) else None


def _error(values: np.ndarray) -> float | None:
    """Standard error of the mean of independent values; None for a single one."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


def base_name(asked: str) -> str:
    """A base as a person writes it: 1e6, own, match."""
    try:
        return base_words(float(asked))
    except ValueError:
        return asked


def scaling_name(scaling: str, factor: float | None) -> str:
    """A scaling with its factor: yarn × 2."""
    return scaling if factor is None else f"{scaling} × {factor:g}"


def kinds(ds: xr.Dataset) -> dict[str, list[int]]:
    """Layers that rotate alike under every setting, by their type: positions along the layer dimension."""
    groups: dict[tuple, list[int]] = {}
    for row in np.flatnonzero(ds["rotates"].values.astype(bool)):
        alike = ds["bound"].values[..., row].tobytes(), ds["base_used"].values[..., row].tobytes()
        groups.setdefault((str(ds["layer_type"].values[row]), int(ds["window"].values[row]), *alike), []).append(
            int(row)
        )
    named: dict[str, list[int]] = {}
    for (name, *_), rows in groups.items():
        several = sum(key[0] == name for key in groups) > 1
        layers = f", layer {ds['layer'].values[rows[0]]}" + ("…" if len(rows) > 1 else "")
        named[name + (layers if several else "")] = rows
    return named


def _at_length(ds: xr.Dataset, row: int, column: int, groups: dict[str, list[int]]) -> dict:
    """Everything about one setting at one length."""
    one = ds.isel(setting=row, length=column)
    length, nll = int(one["length"]), one["nll"].values
    found: dict = {"length": length, "base": {}, "bound": {}, "holds": {}}
    for name, rows in groups.items():
        bound, window = float(one["bound"].values[rows[0]]), int(ds["window"].values[rows[0]])
        found["base"][name] = _number(one["base_used"].values[rows[0]])
        found["bound"][name] = int(bound) if math.isfinite(bound) else None  # None: none was met
        found["holds"][name] = bool(bound >= (min(window, length) if window else length))
    read = bool(np.isfinite(nll).all())
    found["nll"] = float(nll.mean()) if read else None
    found["nll_se"] = _error(nll) if read else None
    found["perplexity"] = float(np.exp(nll.mean())) if read else None
    found["ratio"], found["ratio_se"] = (_number(one[name]) for name in ("ratio", "ratio_se"))
    found["retrieval"] = [_retrieval(one, index) for index in range(ds.sizes["keys"])]
    found["retrieval"] = [entry for entry in found["retrieval"] if entry]
    return found


def _retrieval(one: xr.Dataset, index: int) -> dict | None:
    """Retrieval over all depths, and by depth; errors are over samples, whose keys are drawn independently."""
    here = one.isel(keys=index)
    exact, right, logprob = (here[name].values for name in ("exact_match", "key_right", "key_logprob"))
    if not exact.size or not np.isfinite(exact).all():
        return None
    return {
        "keys": int(here["keys"]),
        "prompts": int(exact.size),
        "exact_match": float(exact.mean()),
        "exact_match_se": _error(exact.mean(axis=0)),
        "key_right": float(right.mean()),
        "key_logprob": float(logprob.mean()),
        "key_logprob_se": _error(logprob.mean(axis=0)),
        "by_depth": exact.mean(axis=1).tolist(),
        "logprob_by_depth": logprob.mean(axis=1).tolist(),
    }


def summary(ds: xr.Dataset) -> dict:
    """Every setting at every length: perplexity, its ratio to the model as it is, retrieval, and L_bound beside them.

    Returns
    -------
    dict
        ``settings``: for each its ``base``, ``scaling``, ``factor``, ``name``, ``intact`` (the model as it is) and
        ``lengths``; each length holds ``nll``, ``perplexity`` and ``ratio`` with standard errors over segments (None
        where it was not read), ``retrieval`` for each number of keys, and by layer type ``base``, ``bound`` (None
        where none was met) and ``holds``: whether the bound reaches the length, or the window where that is shorter.
    """
    groups = kinds(ds)
    settings = []
    for row in range(ds.sizes["setting"]):
        base, scaling = str(ds["base_asked"].values[row]), str(ds["scaling"].values[row])
        factor = _number(ds["factor"].values[row])
        settings.append(
            {
                "base": base_name(base),
                "scaling": scaling_name(scaling, factor),
                "factor": factor,
                "intact": bool(ds["intact"].values[row]),
                "name": f"base {base_name(base)}, {scaling_name(scaling, factor)}",
                "lengths": [_at_length(ds, row, column, groups) for column in range(ds.sizes["length"])],
            }
        )
    options = json.loads(ds.attrs["options"])
    return {
        "model": ds.attrs["model"],
        "analysis": "extend",
        "segments": int(ds.attrs["segments"]),
        "length": int(ds.attrs["length"]),
        "corpus": ds.attrs["corpus"],
        "partial": bool(ds.attrs["partial"]),
        "claimed_length": int(ds.attrs["claimed_length"]),
        "lengths": options["lengths"],
        "passkey_lengths": options["passkey_lengths"],
        "depths": ds["depth"].values.tolist(),
        "samples": int(ds.sizes["sample"]),
        "keys": ds["keys"].values.tolist(),
        "settings": settings,
        "layers": {name: ds["layer"].values[rows].tolist() for name, rows in groups.items()},
    }
