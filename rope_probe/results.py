"""Result files: schema, provenance, atomic save, load."""

from __future__ import annotations

import glob
import io
import json
import os
import platform
import tempfile
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import xarray as xr

from .errors import ProbeError, first_words
from .limits import check_result
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
    "profile": ("mean pre-softmax score by distance", "1"),
    "pair_profile": ("what a rotary pair adds to the mean pre-softmax score, by distance", "1"),
    "power": ("power spectrum of the profile", "1"),
    "frequency": ("frequency of a bin of the spectrum", "rad/token"),
    "purity": ("share of a pair's power near its own frequency", "1"),
    "tone_r2": ("R² of the fit of a pair's profile by its own frequency", "1"),
    "resolvable": ("the pair turns at least twice within the distances", "1"),
    "damage": ("1 - usage-weighted mean purity of the resolvable pairs", "1"),
    "purity_tone": ("purity of a pure tone: the limit of the estimator", "1"),
    "damage_limit": ("damage extrapolated to endless text by the jackknife", "1"),
    "damage_tone": ("damage that pure tones would show: the limit of the estimator", "1"),
    "power_below_floor": ("share of the squared profiles in pairs below the floor", "1"),
    "weight_profile": ("mean attention weight by distance", "1"),
    "weight_power": ("power spectrum of the mean attention weight", "1"),
    "leakage": ("share of power away from the injected tone", "1"),
    "leakage_none": ("share of power away from that tone without injection", "1"),
    "leakage_tone": ("share of a pure tone's power that the window lets out", "1"),
    "excess": ("leakage with injection minus leakage without", "1"),
    "carried": ("power near the injected tone, own rotation taken back, with injection over without", "1"),
    "carried_elsewhere": ("the same ratio of the power at all other frequencies", "1"),
    "selectivity": ("carried near the tone over carried elsewhere", "1"),
    "power_injected": ("power spectrum of the profile under injection", "1"),
    "power_unrotated": ("power spectrum of the profile, own rotation taken back", "1"),
    "power_unrotated_injected": ("power spectrum under injection, own rotation taken back", "1"),
    "rho": ("Spearman correlation of hidden-state similarity and score, mean over query rows", "1"),
    "rho_se": ("standard error over segments of rho", "1"),
    "rho_segment": ("rho of one segment", "1"),
    "rho_at_distance": ("the same over query positions, the key always this many tokens back", "1"),
    "rho_at_distance_se": ("standard error over segments of rho_at_distance", "1"),
    "rho_at_distance_segment": ("rho_at_distance of one segment, mean over heads", "1"),
    "query_rows": ("query rows with at least 32 keys", "rows"),
    "self_weight": ("mean attention weight on the token itself", "1"),
    "previous_weight": ("mean attention weight on the previous token", "1"),
    "sink_weight": ("mean attention weight on the first position", "1"),
    "weight_last_8": ("mean attention weight within the last 8 tokens, the token itself counted", "1"),
    "weight_last_64": ("mean attention weight within the last 64 tokens, the token itself counted", "1"),
    "weight_last_512": ("mean attention weight within the last 512 tokens, the token itself counted", "1"),
    "entropy": ("mean entropy of the attention weights, rows brought to sum 1", "nats"),
    "mean_distance": ("mean distance of what is attended to, rows brought to sum 1", "tokens"),
    "row_sum": ("mean sum of the attention weights of a query", "1"),
    "induction": ("mean weight on the token after the previous copy of the current one", "1"),
    "role": ("role of the head", "1"),
    "weight_by_distance": ("mean attention weight on a key that is seen at this distance", "1"),
    "attention_map": ("attention weights of one head in the first segment, averaged over cells", "1"),
    "nll": ("mean negative log likelihood under a setting", "nats/token"),
    "nll_intact": ("mean negative log likelihood of the intact model", "nats/token"),
    "ratio": ("perplexity under a setting over that of the intact model", "1"),
    "turning": ("rotary pairs that turn under a setting", "pairs"),
    "cut": ("the setting is meant for this layer", "1"),
    "usage_mean": ("usage of a pair, mean over the heads of a layer", "1"),
    "nll_position": ("mean negative log likelihood of a bucket of positions", "nats/token"),
    "position_first": ("first predicted position of a bucket", "tokens"),
    "position_last": ("last predicted position of a bucket", "tokens"),
    "exact_match": ("greedy decoding writes the whole key", "1"),
    "key_right": ("share of the key's tokens that are the most likely after those before", "1"),
    "key_logprob": ("log probability of the key", "nats"),
    "key_position": ("position of the hidden key's first token", "tokens"),
    "base_used": ("base that a layer ran with", "1"),
    "intact": ("the model as it is", "1"),
    "bound": ("L_bound of a layer's frequencies", "tokens"),
    "exact": ("norms are computed from the token ids, not estimated", "1"),
    "step": ("training step", "1"),
    "inv_freq": ("effective angular frequency", "rad/token"),
    "wavelength": ("tokens per turn", "tokens"),
}
SUFFIXES = {
    "_se": "standard error over segments",
    "_ablated": "with a part taken out of the layers before",
    "_measured": "as bands measured it",
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


def _words(name: str) -> tuple[str, str] | None:
    """Long name and unit of a variable; a suffix adds its own words."""
    if name in VARIABLES:
        return VARIABLES[name]
    for suffix, words in SUFFIXES.items():
        known = _words(name.removesuffix(suffix)) if name.endswith(suffix) else None
        if known:
            return f"{known[0]}, {words}", known[1]
    return None


def describe(ds: xr.Dataset) -> xr.Dataset:
    """Give every variable its long name and unit."""
    for name in ds.variables:
        words = _words(str(name))
        if words:
            ds[name].attrs.update(long_name=words[0], units=words[1])
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
    if path.exists() and not path.is_file():
        raise ProbeError(f"{path} is not a regular file: give another name.")
    if not path.parent.is_dir():
        raise ProbeError(
            f"cannot write {path}: the folder {path.parent} does not exist; make it, or give another name."
        )
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-"):
            pass
    except OSError as error:
        raise ProbeError(f"cannot write {path}: {error.strerror}; give another name.") from None


def replace_file(path: Path, content) -> None:
    """Write a file atomically: the old one stays until the new one is whole."""
    remove_scratch(path)
    scratch = path.parent / f".{path.name}-{platform.node()}-{os.getpid()}.part"
    try:
        with open(scratch, "wb") as stream:
            stream.write(content)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def remove_scratch(path: Path) -> None:
    """Remove what runs on this machine that were killed while they wrote this file have left."""
    for left in path.parent.glob(f".{glob.escape(path.name)}-{glob.escape(platform.node())}-*.part"):
        owner = left.name.removesuffix(".part").rpartition("-")[2]
        if owner.isdecimal() and not _alive(int(owner)):
            left.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # somebody else's
    return True


def save(ds: xr.Dataset, path) -> Path:
    """Write a result to exactly this file (netCDF4), atomically: the old file stays until the new one is whole."""
    path = Path(path)
    whole = io.BytesIO()  # HDF5 on a full disk leaves handles behind that complain for as long as they live
    ds.to_netcdf(whole, engine="h5netcdf")
    try:
        replace_file(path, whole.getbuffer())
    except OSError as error:
        raise ProbeError(f"cannot write {path}: {error.strerror}; free space or give another name.") from error
    return path


def load(path) -> xr.Dataset:
    """Read a result file.

    Raises
    ------
    ProbeError
        The file is missing, is not a result of this tool, or was written by a newer version.
    """
    if not Path(path).is_file():
        raise ProbeError(f"there is no result file {path}: check the path.")
    try:
        check_result(Path(path))
        with xr.open_dataset(path, engine="h5netcdf") as stored:
            ds = stored.load()
    except ProbeError:
        raise
    except Exception as error:
        raise ProbeError(
            f"{path} is not a result file ({first_words(error, 120)}): give a .nc file that rope-probe wrote."
        ) from None
    if "analysis" not in ds.attrs or "schema" not in ds.attrs:
        raise ProbeError(
            f"{path} was not written by rope-probe (it names no analysis): give a .nc file that rope-probe wrote."
        )
    if not isinstance(ds.attrs["schema"], (int, np.integer)) or ds.attrs["schema"] > SCHEMA:
        raise ProbeError(
            f"{path} has schema {ds.attrs['schema']}, newer than this version reads ({SCHEMA}): update rope-probe."
        )
    return ds
