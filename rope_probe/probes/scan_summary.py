"""What the tables and captions of `scan` say, and how far an estimate is from what `bands` measured."""

from __future__ import annotations

import json

import numpy as np
import xarray as xr
from scipy.stats import spearmanr

from ..errors import ProbeError
from ..results import describe
from . import bands_summary

# Agreement of the layers that are estimated with `bands` on 16 x 1024 tokens of the built-in text, 512 draws, seed 0;
# a test computes these again from the demos and the results in figures/data.
KNOWN = {
    "SmolLM2-135M-Instruct": {
        "keys": {"top": 0.84, "rank": 0.47},
        "queries": {"top": 0.53, "rank": 0.70},
        "usage": {"top": 0.78, "rank": 0.68},
    },
    "Gemma-3-270M": {
        "keys": {"top": 0.53, "rank": 0.80},
        "queries": {"top": 0.51, "rank": 0.78},
        "usage": {"top": 0.57, "rank": 0.74},
    },
}
SIDES = {"keys": ("k_top", "k_norm"), "queries": ("q_top", "q_norm"), "usage": ("usage", "usage")}
MEASURED, SUFFIX = ("q_norm", "k_norm", "usage", "q_top", "k_top"), "_measured"


def beside(scan: xr.Dataset, bands: xr.Dataset) -> xr.Dataset:
    """A scan with what `bands` measured on the same checkpoint, as variables ``…_measured``.

    Raises
    ------
    ProbeError
        The other is not a result of `bands`, of another model, or of other layers.
    """
    if bands.attrs.get("analysis") != "bands":
        raise ProbeError(f"--bands is a result of {bands.attrs.get('analysis')}: give one of `rope-probe bands`.")
    sizes = [{dim: ds.sizes[dim] for dim in ("head", "kv_head", "pair")} for ds in (scan, bands)]
    if sizes[0] != sizes[1] or bands.attrs["model_type"] != scan.attrs["model_type"]:
        raise ProbeError(
            f"the bands file is of {bands.attrs['model']}, a model of another shape than {scan.attrs['model']}: "
            "give the result of the same checkpoint."
        )
    found = scan.copy()
    for name in MEASURED:
        values = bands[name].astype(float).reindex(layer=scan["layer"].values)
        found[f"{name}{SUFFIX}"] = (values.dims, values.values)
    if not len(_estimated(found)):
        raise ProbeError("no estimated layer of the scan is in the bands file: scan and measure the same layers.")
    text = f"{bands.attrs['corpus']}, {bands.attrs['segments']} × {bands.attrs['length']:,} tokens"
    return describe(found.assign_attrs(measured_on=text))


def measured(ds: xr.Dataset) -> xr.Dataset | None:
    """The measured values beside a scan, under the names they have in a result of `bands`; None if there are none."""
    if f"k_norm{SUFFIX}" not in ds:
        return None
    return ds.assign({name: ds[f"{name}{SUFFIX}"] for name in MEASURED})


def _estimated(ds: xr.Dataset) -> np.ndarray:
    """Positions of the layers that are estimated, and measured beside it."""
    known = np.isfinite(ds[f"k_norm{SUFFIX}"].values).any(axis=(1, 2))
    return np.flatnonzero(ds["rotates"].values & ~ds["exact"].values.astype(bool) & known)


def agreement(ds: xr.Dataset) -> dict | None:
    """How far the estimated layers of a scan agree with what was measured beside it (see `beside`).

    Returns
    -------
    dict or None
        For ``keys``, ``queries`` and ``usage``: ``heads``, ``top`` (share of heads whose dominant pair is the measured
        one), ``near`` (it or a neighbour), ``rank`` (Spearman correlation of the two profiles over the pairs that turn,
        mean over heads), ``mean`` and ``mean_measured`` (of the dominant pair), ``mode`` and ``mode_measured``.
        Layers that are exact are left out.  None where nothing was measured.
    """
    other = measured(ds)
    if other is None:
        return None
    rows = _estimated(ds)
    return {side: _agreement(ds.isel(layer=rows), other.isel(layer=rows), *names) for side, names in SIDES.items()}


def _agreement(ours: xr.Dataset, theirs: xr.Dataset, top: str, norm: str) -> dict:
    a, b = (np.concatenate(_dominant(ds, top)) for ds in (ours, theirs))
    both = (a >= 0) & (b >= 0)
    a, b = a[both], b[both]
    ranks = []
    for row in range(ours.sizes["layer"]):
        turning = ours["inv_freq"].values[row] > 0
        for x, y in zip(ours[norm].values[row], theirs[norm].values[row], strict=True):
            if np.ptp(x[turning]) > 0 and np.ptp(y[turning]) > 0:
                ranks.append(spearmanr(x[turning], y[turning])[0])
    return {
        "heads": len(a),
        "top": float((a == b).mean()),
        "near": float((abs(a - b) <= 1).mean()),
        "rank": float(np.mean(ranks)),
        "mean": float(a.mean()),
        "mean_measured": float(b.mean()),
        "mode": int(np.bincount(a).argmax()),
        "mode_measured": int(np.bincount(b).argmax()),
    }


def _dominant(ds: xr.Dataset, name: str) -> list[np.ndarray]:
    """Dominant pair of every head by layer, -1 where there is none (padding, a dead head)."""
    rows = []
    for values, turning in zip(ds[name].values.astype(float), ds["inv_freq"].values > 0, strict=True):
        values = np.where(turning & np.isfinite(values), values, 0.0)
        rows.append(np.where(values.max(-1) > 0, values.argmax(-1), -1))
    return rows


def summary(ds: xr.Dataset) -> dict:
    """The statistics of a `scan` result: those of `bands`, and how far they are to be trusted.

    Returns
    -------
    dict
        As of `bands`, without standard errors over segments; ``exact`` and ``shared_keys`` (layers), ``draws``,
        ``weight_bytes_read``; ``known``: the agreement with `bands` on the demos, and ``agreement``: that with the
        bands beside this scan, if any (see `agreement`).
    """
    unknown = np.full((1, ds.sizes["layer"]), np.nan)  # nothing was measured by segment
    names = ("dominant_segment", "dominant_q_segment", "dominant_usage_segment")
    values = bands_summary.summary(ds.assign({name: (("segment", "layer"), unknown) for name in names}))
    return values | {
        "analysis": "scan",
        "exact": [int(layer) for layer in ds["layer"].values[ds["exact"].values.astype(bool)]],
        "shared_keys": json.loads(ds.attrs["shared_keys"]),
        "draws": json.loads(ds.attrs["options"])["draws"],
        "weight_bytes_read": int(ds.attrs["weight_bytes_read"]),
        "known": KNOWN,
        "agreement": agreement(ds),
        "measured_on": ds.attrs.get("measured_on"),
    }
