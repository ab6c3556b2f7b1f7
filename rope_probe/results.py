"""Result files: schema, provenance, atomic save, load."""

from __future__ import annotations

import json
import os
import tempfile
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import xarray as xr

from .errors import ProbeError
from .rotary import RotaryLayer
from .theory import wavelength

SCHEMA = 1

# name -> (long name, unit); one line per variable of any analysis
VARIABLES = {
    "q_norm": ("mean query norm of a rotary pair", "1"),
    "k_norm": ("mean key norm of a rotary pair", "1"),
    "v_norm": ("mean value norm of a channel pair (control)", "1"),
    "q_norm_std": ("standard deviation over tokens of the query pair norm", "1"),
    "k_norm_std": ("standard deviation over tokens of the key pair norm", "1"),
    "q_norm_first": ("mean query pair norm at the first position of a segment", "1"),
    "k_norm_first": ("mean key pair norm at the first position of a segment", "1"),
    "q_top": ("tokens for which this pair has the largest query norm", "tokens"),
    "k_top": ("tokens for which this pair has the largest key norm", "tokens"),
    "v_top": ("tokens for which this pair has the largest value norm (control)", "tokens"),
    "q_norm_unrotated": ("mean query norm of the channels that do not rotate", "1"),
    "k_norm_unrotated": ("mean key norm of the channels that do not rotate", "1"),
    "usage": ("product of mean query and mean key norm of a pair", "1"),
    "dominant_segment": ("mean over kv heads of the dominant key pair, by segment", "pair"),
    "dominant_q_segment": ("mean over heads of the dominant query pair, by segment", "pair"),
    "dominant_usage_segment": ("mean over heads of the pair of largest usage, by segment", "pair"),
    "inv_freq": ("effective angular frequency", "rad/token"),
    "wavelength": ("tokens per turn", "tokens"),
}


def layer_coordinates(layers: list[RotaryLayer]) -> dict:
    """Coordinates of the `layer` and `pair` dimensions, padded with NaN where layers have fewer pairs."""
    pairs = max((layer.pairs for layer in layers), default=0)
    inv_freq = np.full((len(layers), pairs), np.nan)
    for row, layer in zip(inv_freq, layers, strict=True):
        row[: layer.pairs] = layer.inv_freq
    waves = np.where(np.isnan(inv_freq), np.nan, wavelength(np.nan_to_num(inv_freq)))

    def along(attribute):
        return ("layer", [getattr(layer, attribute) for layer in layers])

    return {
        "layer": ("layer", [layer.layer for layer in layers]),
        "pair": ("pair", np.arange(pairs)),
        "layer_type": along("layer_type"),
        "window": along("window"),
        "base": along("base"),
        "rotates": along("rotates"),
        "attention_scaling": along("attention_scaling"),
        "rope_type": along("rope_type"),
        "layout": along("layout_rotated"),
        "pairs": along("pairs"),
        "heads": along("heads"),
        "kv_heads": along("kv_heads"),
        "formation_length": along("length"),
        "inv_freq": (("layer", "pair"), inv_freq),
        "wavelength": (("layer", "pair"), waves),
    }


def describe(ds: xr.Dataset) -> xr.Dataset:
    """Give every variable its long name and unit."""
    for name in [*ds.data_vars, "inv_freq", "wavelength"]:
        if name in ds and name in VARIABLES:
            ds[name].attrs.update(long_name=VARIABLES[name][0], units=VARIABLES[name][1])
    return ds


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {}
    for package in ("rope-probe", "torch", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def provenance(ckpt, geometry, segments, analysis: str, options: dict, *, partial: bool = False) -> dict:
    """Attributes that say what was run, on what, and with what; values are plain strings and numbers."""
    return {
        "schema": SCHEMA,
        "analysis": analysis,
        "model": ckpt.name,
        "model_type": geometry.model_type,
        "provenance": json.dumps(ckpt.provenance, sort_keys=True),
        "claimed_length": geometry.claimed_length,
        "dtype": ckpt.dtype,
        "device": ckpt.device,
        "corpus": segments.corpus,
        "tokens_sha256": segments.sha256,
        "segments": len(segments.ids),
        "length": segments.ids.shape[1],
        "options": json.dumps(options, sort_keys=True),
        "versions": json.dumps(versions(), sort_keys=True),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "partial": int(partial),
    }


def check_writable(path) -> None:
    """Refuse an output path that cannot be written, before the run instead of after it."""
    path = Path(path)
    if path.is_dir():
        raise ProbeError(f"{path} is a folder: give the file to write.")
    if not path.parent.is_dir():
        raise ProbeError(f"cannot write {path}: the folder {path.parent} does not exist.")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-"):
            pass
    except OSError as error:
        raise ProbeError(f"cannot write {path}: {error.strerror}.") from None


def save(ds: xr.Dataset, path) -> Path:
    """Write a result to exactly this file (netCDF4), atomically: the old file stays until the new one is whole."""
    path = Path(path)
    handle, scratch = -1, ""
    try:
        handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".part")
        os.close(handle)
        ds.to_netcdf(scratch, engine="h5netcdf")
        os.chmod(scratch, 0o666 & ~_umask())
        os.replace(scratch, path)
    except OSError as error:
        raise ProbeError(f"cannot write {path}: {error.strerror or error}.") from None
    finally:
        if scratch and os.path.exists(scratch):
            os.unlink(scratch)
    return path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def load(path) -> xr.Dataset:
    """Read a result file.

    Raises
    ------
    ProbeError
        The file is missing, is not a result of this tool, or was written by a newer version.
    """
    if not Path(path).is_file():
        raise ProbeError(f"no result file at {path}.")
    try:
        with xr.open_dataset(path, engine="h5netcdf") as stored:
            ds = stored.load()
    except Exception as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise ProbeError(f"{path} is not a result file ({reason}): give a .nc file that rope-probe wrote.") from None
    if "analysis" not in ds.attrs or "schema" not in ds.attrs:
        raise ProbeError(f"{path} was not written by rope-probe (it names no analysis).")
    if int(ds.attrs["schema"]) > SCHEMA:
        raise ProbeError(
            f"{path} has schema {ds.attrs['schema']}, newer than this version reads ({SCHEMA}): update rope-probe."
        )
    return ds
