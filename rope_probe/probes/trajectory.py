"""trajectory: the statistics of `bands` at every checkpoint of a training run, on the same tokens."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr

from .. import processes, results
from ..checkpoints import open_checkpoint
from ..errors import ProbeError, UsageError
from ..texts import check_sources, segments_for
from .bands import bands

KEPT = (
    "q_norm",
    "k_norm",
    "q_top",
    "k_top",
    "usage",
    "dominant_segment",
    "dominant_q_segment",
    "dominant_usage_segment",
)


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is, and what it is called in the result."""

    model: str
    revision: str | None
    label: str

    @property
    def step(self) -> float:
        """The last number of its name (step1000 -> 1000); NaN where there is none."""
        found = re.findall(r"\d+", self.label)
        return float(found[-1]) if found else np.nan


def places(models, revisions=None) -> list[Place]:
    """The checkpoints that are asked for, in order.

    Raises
    ------
    UsageError
        None, fewer than one revision, several models with revisions, or the same one twice.
    """
    models = [models] if isinstance(models, (str, Path)) else list(models)
    models = [str(model) for model in models]
    if not models:
        raise UsageError("no checkpoint is named: give a model with --revisions, or several folders.")
    if revisions:
        if len(models) > 1:
            raise UsageError(f"--revisions goes with one model, and {len(models)} were given.")
        found = [Place(models[0], revision, revision) for revision in revisions]
    else:
        names = [Path(model.rstrip("/")).name for model in models]
        labels = names if len(set(names)) == len(names) else models
        found = [Place(model, None, label) for model, label in zip(models, labels, strict=True)]
    labels = [place.label for place in found]
    twice = [label for label in labels if labels.count(label) > 1]
    if twice:
        raise UsageError(f"checkpoint {twice[0]} is named twice: name each once.")
    return found


def trajectory(
    models,
    *,
    revisions=None,
    text=None,
    dataset: str | None = None,
    tokens=None,
    segments: int | None = None,
    length: int | None = None,
    batch: int | None = None,
    layers=None,
    formation: dict | None = None,
    file=None,
    progress: Callable[[int, int], None] | None = None,
    **opening,
) -> xr.Dataset:
    """Statistics of `bands` at every checkpoint, all of them reading the same tokens.

    Parameters
    ----------
    models : str, Path, or sequence of them
        A hub id with `revisions`, or the folders of the checkpoints.
    revisions : sequence of str, optional
        Branches, tags or commits of the one model.
    text, dataset, tokens, segments, length, batch, layers, formation
        As in :func:`rope_probe.bands`; text is tokenized once, by the first checkpoint that is opened.
    file : str or Path, optional
        Written after every checkpoint.  Checkpoints that it holds already are not measured again.
    progress : callable, optional
        Called with (checkpoints measured, checkpoints in all).
    **opening
        Passed to :func:`rope_probe.open` (``dtype``, ``device``, …).

    Returns
    -------
    Dataset
        The norms, counts and usage of `bands` with a leading dimension ``checkpoint`` (their names; ``step`` is the
        last number in the name).  After an interrupt: the checkpoints measured until then, with attribute ``partial``.

    Raises
    ------
    UsageError
        The checkpoints, or the sources, cannot be what was named.
    ProbeError
        A checkpoint cannot be read, or is of another shape; the file holds a run on other tokens.

    Notes
    -----
    One checkpoint is in memory at a time.
    """
    wanted = places(models, revisions)
    check_sources(text=text, dataset=dataset, tokens=tokens, segments=segments, length=length, batch=batch)
    done = _held(file, wanted)
    chosen, ckpt = None, None
    for number, place in enumerate(wanted):
        if place.label in done:
            continue
        try:
            ckpt = open_checkpoint(place.model, revision=place.revision, **opening)
            if chosen is None:
                chosen = segments_for(ckpt, text=text, dataset=dataset, tokens=tokens, segments=segments, length=length)
            one = bands(ckpt, tokens=chosen.ids, batch=batch, layers=layers, formation=formation)
            one.attrs["corpus"] = chosen.corpus
        except KeyboardInterrupt:
            one = None
        except ProbeError as error:
            if file is None or not done:
                raise
            raise ProbeError(f"checkpoint {place.label}: {error} {file} holds the {len(done)} before it.") from error
        ckpt = None  # its weights are freed before the next is read
        gc.collect()
        if one is None or one.attrs["partial"]:
            break
        done[place.label] = _entry(one, place, next(iter(done.values()), None))
        if file is not None and processes.rank() == 0:
            results.save(_joined(done, wanted), file)
        if progress:
            progress(number + 1, len(wanted))
    if not done:
        raise KeyboardInterrupt
    return _joined(done, wanted)


def _entry(one: xr.Dataset, place: Place, first: xr.Dataset | None) -> xr.Dataset:
    """One checkpoint's part of the result; refused where it does not go with the others."""
    kept = one[list(KEPT)].expand_dims(checkpoint=[place.label])
    kept = kept.assign_coords(step=("checkpoint", [place.step]))
    kept.attrs = one.attrs
    if first is None:
        return kept
    if {name: kept.sizes[name] for name in kept.sizes} != {name: first.sizes[name] for name in first.sizes}:
        raise ProbeError(f"checkpoint {place.label} has other layers, heads or pairs than the one before it.")
    if not np.array_equal(kept["inv_freq"], first["inv_freq"], equal_nan=True):
        raise ProbeError(f"checkpoint {place.label} rotates with other frequencies than the one before it.")
    if kept.attrs["tokens_sha256"] != first.attrs["tokens_sha256"]:
        raise ProbeError("the result file holds a run on other tokens: give another --output, or the same tokens.")
    return kept


def _joined(done: dict[str, xr.Dataset], wanted: list[Place]) -> xr.Dataset:
    """The result of what is measured, in the order asked for."""
    parts = [done[place.label] for place in wanted if place.label in done]
    ds = xr.concat(parts, "checkpoint", coords="minimal", compat="override", join="override", combine_attrs="override")
    sources = {part["checkpoint"].item(): _source(part) for part in parts}
    ds.attrs = parts[0].attrs | {
        "analysis": "trajectory",
        "model": wanted[0].model if wanted[0].revision else str(Path(wanted[0].model).parent),
        "provenance": json.dumps({"checkpoints": sources}, sort_keys=True),
        "partial": int(len(parts) < len(wanted)),
    }
    return results.describe(ds)


def _source(part: xr.Dataset) -> dict:
    source = json.loads(part.attrs["provenance"])
    return source["checkpoints"][part["checkpoint"].item()] if "checkpoints" in source else source


def _held(file, wanted: list[Place]) -> dict[str, xr.Dataset]:
    """Checkpoints that the file of an earlier run holds."""
    if file is None or not Path(file).is_file():
        return {}
    ds = results.load(file)
    if ds.attrs["analysis"] != "trajectory":
        raise ProbeError(f"{file} is a result of {ds.attrs['analysis']}, not of trajectory: give another --output.")
    known = [str(label) for label in ds["checkpoint"].values]
    labels = {place.label for place in wanted}
    strangers = [label for label in known if label not in labels]
    if strangers:
        raise ProbeError(f"{file} holds checkpoint {strangers[0]}, which is not asked for: give another --output.")
    found = {}
    for number, label in enumerate(known):
        found[label] = ds.isel(checkpoint=[number])
        found[label].attrs = dict(ds.attrs)
    return found
