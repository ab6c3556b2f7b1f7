"""What the tables and captions of `trajectory` say, computed from a result alone."""

from __future__ import annotations

import xarray as xr

from . import bands_summary

#: what is followed over training
FOLLOWED = ("i_band", "i_band_se", "i_band_q", "i_band_usage", "i_band_usage_se", "concentration", "band", "c")


def summary(ds: xr.Dataset) -> dict:
    """The statistics of a `trajectory` result.

    Returns
    -------
    dict
        Everything that the summary of `bands` says of the last checkpoint, and ``checkpoints``: for each of them
        ``checkpoint``, ``step``, ``i_band``, ``i_band_usage`` and ``by_layer_type`` with the band statistics of
        every kind of layer.
    """
    rows = []
    last = {}
    for number in range(ds.sizes["checkpoint"]):
        last = bands_summary.summary(ds.isel(checkpoint=number))
        kinds = {name: {key: kind[key] for key in FOLLOWED} for name, kind in last["by_layer_type"].items()}
        one = ds.isel(checkpoint=number)
        rows.append(
            {
                "checkpoint": str(one["checkpoint"].item()),
                "step": float(one["step"]),
                "i_band": last["i_band"],
                "i_band_usage": last["i_band_usage"],
                "by_layer_type": kinds,
            }
        )
    return last | {"analysis": "trajectory", "checkpoints": rows}
