"""truncate: which pairs' rotation does a model need?  Cut some, and see what it costs.

Sources: Barbero et al., arXiv 2410.06205 (p-RoPE: keep the fastest pairs), Oka et al. (frequency bands: perplexity
breaks where the cut reaches the band), FoPE, arXiv 2412.17739 (pairs below the floor frequency set to 0).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import xarray as xr

from .. import results
from ..checkpoints import Checkpoint
from ..errors import ProbeWarning, UsageError
from ..likelihood import segment_nll, unchanged
from ..rotary import Geometry, RotaryLayer
from ..rotation_changes import MODES, removed
from ..rotation_cuts import cut_pairs, handed_angles, select_layers, stilled, stops
from ..texts import check_sources, segments_for
from ..words import ranges
from .bands import bands as measure_bands
from .bands_summary import summary as bands_summary
from .common import default_batch
from .reading import Blocks, Observer, measure

KEEP = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.25, 0.0)


@dataclass(frozen=True)
class Setting:
    """One way to cut.

    Attributes
    ----------
    kind : str
        ``keep``, ``floor``, ``unrotate`` or ``remove``.
    value : float
        Share of pairs kept, multiple of the floor frequency, or the pair.
    where : str
        Which layers, in words.
    layers : list of RotaryLayer
        Those it cuts.
    cuts : dict of layer -> ndarray of bool, shape (pairs,)
        Pairs that lose their rotation (or, for ``remove``, their content).
    """

    kind: str
    value: float
    where: str
    layers: list[RotaryLayer] = field(repr=False)
    cuts: dict[int, np.ndarray] = field(repr=False)

    @property
    def idle(self) -> bool:
        """Does it leave the model as it is?"""
        return self.kind != "remove" and not any(stops(layer, self.cuts[layer.layer]) for layer in self.layers)


def _unit(values, name: str, top: float = np.inf) -> list[float]:
    found = [float(value) for value in (values if np.iterable(values) else [values])]
    for value in found:
        if not 0 <= value <= top or not np.isfinite(value):
            wanted = f"between 0 and {top:g}" if np.isfinite(top) else "0 or more"
            raise UsageError(f"{name} {value:g} is not possible: give numbers {wanted}.")
    return list(dict.fromkeys(found))


def check_options(keep=None, floor=None, knockout=None, pairs=None) -> None:
    """Refuse numbers and modes that no model can have."""
    if keep is not None:
        _unit(keep, "--keep", 1.0)
    if floor is not None:
        _unit(floor, "--floor")
    for mode in knockout or ():
        if mode not in MODES:
            raise UsageError(f"--knockout knows {' and '.join(MODES)}, not {mode!r}.")
    if pairs is not None and not knockout:
        raise UsageError("--pairs says which pairs to knock out: add --knockout unrotate or remove.")


def settings_of(
    geometry: Geometry,
    keep=None,
    floor=None,
    knockout=None,
    pairs=None,
    reverse: bool = False,
    layers=None,
    layer_type=None,
) -> list[Setting]:
    """The settings asked for, in order; the default grid of `keep` where none is.

    Parameters
    ----------
    layer_type : str or sequence of str, optional
        With several types each is cut alone.
    """
    check_options(keep, floor, knockout, pairs)
    if keep is None and floor is None and not knockout:
        keep = KEEP
    types = [None] if layer_type is None else [layer_type] if isinstance(layer_type, str) else list(layer_type)
    found = []
    for kind in types:
        chosen = select_layers(geometry, layers, kind)
        where = (
            "all layers" if layers is None else f"layer{'s' * (len(chosen) > 1)} {ranges([x.layer for x in chosen])}"
        )
        where = where if kind is None else f"{kind.replace('_', ' ')}{'' if layers is None else ', ' + where}"
        for name, values in (("keep", keep), ("floor", floor)):
            for value in _unit(values if values is not None else (), f"--{name}"):
                cuts = {layer.layer: cut_pairs(layer, **{name: value}, reverse=reverse) for layer in chosen}
                found.append(Setting(name, value, where, chosen, cuts))
        for mode in knockout or ():
            found += _knockouts(chosen, mode, pairs, where)
    return found


def _knockouts(chosen: list[RotaryLayer], mode: str, pairs, where: str) -> list[Setting]:
    """One setting for each pair that can lose what the mode takes."""
    can = {pair for layer in chosen for pair in range(layer.pairs) if mode == "remove" or layer.inv_freq[pair] > 0}
    wanted = sorted(can if pairs is None else set(pairs))
    if set(wanted) - can:
        raise UsageError(f"pair {min(set(wanted) - can)} cannot be knocked out: pairs 0 to {max(can)} can.")
    found = []
    for pair in wanted:
        having = [layer for layer in chosen if pair < layer.pairs]
        cuts = {layer.layer: np.arange(layer.pairs) == pair for layer in having}
        found.append(Setting(mode, float(pair), where, having, cuts))
    return found


def truncate(
    ckpt: Checkpoint,
    *,
    text=None,
    dataset: str | None = None,
    tokens=None,
    segments: int | None = None,
    length: int | None = None,
    batch: int | None = None,
    keep=None,
    floor=None,
    knockout=None,
    pairs=None,
    reverse: bool = False,
    layers=None,
    layer_type=None,
    bands=None,
    progress: Callable[[int, int], None] | None = None,
) -> xr.Dataset:
    """Likelihood of a text while some pairs do not rotate.

    Parameters
    ----------
    ckpt : Checkpoint
    text, dataset, tokens, segments, length, batch : optional
        What is read, as for `bands`; default 16 segments of 1024 tokens.
    keep : sequence of float, optional
        Shares of the pairs that go on turning, the fastest ``int(keep · pairs)`` (p-RoPE).  Default, where nothing
        else is asked for: 1, 0.95, … 0.
    floor : sequence of float, optional
        Pairs with inv_freq below so many times 2π / L stop (FoPE).
    knockout : sequence of {"unrotate", "remove"}, optional
        Each pair alone loses its rotation, or its content.
    pairs : iterable of int, optional
        Which pairs to knock out; default all.
    reverse : bool
        `keep` and `floor` cut from the fast end.
    layers : iterable of int, optional
        Cut only there.
    layer_type : str or sequence of str, optional
        Cut only in layers of this type; several types are cut one at a time.
    bands : Dataset or path, optional
        A `bands` result of the same model, to compare with; measured on the same text where it is not given.
    progress : callable, optional
        Called with (segments read, segments in all), every setting reading them again.

    Returns
    -------
    Dataset
        ``nll[setting, segment]`` (nats per token over all predictions), ``nll_intact[segment]``, ``ratio[setting]``
        of perplexities and its standard error from the paired differences, ``turning[setting, layer]``.
        After an interrupt, or a failure in a later batch (with a warning): the segments that all settings have
        read until then (the settings that are done, in the first batch), with attribute ``partial`` = 1.

    Raises
    ------
    UsageError
        Settings that are not possible for this model.
    ProbeError
        The model or the tokens cannot be read; the likelihood is not finite; the rotation cannot be changed.
    """
    check_sources(batch=batch)
    knockout = [knockout] if isinstance(knockout, str) else list(knockout or ())
    check_options(keep, floor, knockout, pairs)
    chosen = segments_for(ckpt, text=text, dataset=dataset, tokens=tokens, segments=segments, length=length)
    count, size = chosen.ids.shape
    if size < 2:
        raise UsageError("segments of 1 token predict nothing: use 2 or more.")
    geometry = ckpt.geometry(size)
    settings = settings_of(geometry, keep, floor, knockout, pairs, reverse, layers, layer_type)
    batch = batch or default_batch(ckpt.device, size)
    ticks = _Ticks(progress, count * (1 + (bands is None) + sum(not setting.idle for setting in settings)))
    measured = _bands_of(ckpt, chosen.ids, geometry, bands, batch, ticks)

    options = {
        "keep": None if keep is None else _unit(keep, "--keep"),
        "floor": None if floor is None else _unit(floor, "--floor"),
        "knockout": knockout,
        "reverse": reverse,
        "layers": None if layers is None else sorted(set(layers)),
        "layer_type": layer_type if layer_type is None or isinstance(layer_type, str) else list(layer_type),
        "batch": batch,
    }
    observer = _Likelihoods(ckpt, geometry, settings, count, size, ticks)
    done = measure(ckpt, "truncate", chosen.ids, observer, batch, options)
    asked, nll = len(settings), observer.nll
    if not done:  # the settings that the first batch has been through
        done = min(batch, count)
        ready = np.isfinite(nll[:, :done]).all(axis=1)
        if not ready.any():
            raise KeyboardInterrupt
        nll, settings = nll[ready], [setting for setting, there in zip(settings, ready, strict=True) if there]
    partial = done < count or len(settings) < asked
    ds = _dataset(geometry, settings, nll[:, :done], observer.intact[:done], measured)
    read = replace(chosen, ids=chosen.ids[:done])
    ds.attrs = results.provenance(ckpt, geometry, read, "truncate", options, partial=partial)
    ds.attrs["bands"] = json.dumps(bands_summary(measured))
    return results.describe(ds)


class _Ticks:
    """Segments read so far by all settings together, told to whoever asked."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int):
        self.progress, self.total, self.done = progress, total, 0

    def add(self, block: slice) -> None:
        self.done += block.stop - block.start
        if self.progress:
            self.progress(self.done, self.total)


class _Likelihoods(Observer):
    """Likelihood of every segment under every setting; a setting is verified the first time it is entered."""

    state = ("nll", "intact")
    one_pass = False

    def __init__(self, ckpt: Checkpoint, geometry: Geometry, settings: list[Setting], count: int, length: int, ticks):
        self.ckpt, self.geometry, self.settings, self.length, self.ticks = ckpt, geometry, settings, length, ticks
        self.layers = {}
        self.nll, self.intact = np.full((len(settings), count), np.nan), np.full(count, np.nan)
        self.verified: set[int] = set()
        turned = {layer.layer: layer for setting in settings if setting.kind != "remove" for layer in setting.layers}
        self.angles = handed_angles(ckpt.decoder, list(turned.values())) if turned else None
        self._pending: dict[tuple, np.ndarray] = {}

    def begin(self, start: int, stop: int) -> None:
        self._pending.clear()
        self._block = slice(start, stop)

    def passes(self, decoder, ids: torch.Tensor) -> Iterator[bool]:
        """The intact model, then every setting, each of them a part; what an earlier run has measured is left out."""
        known = np.isfinite(self.nll[:, self._block]).all(axis=1)
        rows = [row for row, setting in enumerate(self.settings) if not (known[row] or setting.idle)]
        with unchanged(self.ckpt.model):
            if not np.isfinite(self.intact[self._block]).all():
                values = segment_nll(self.ckpt.model, ids).numpy()
                idle = [row for row, setting in enumerate(self.settings) if setting.idle]
                self._pending = {("intact",): values} | {("nll", row): values for row in idle}
                yield not rows
            for row in rows:
                with self._changed(self.settings[row]):
                    self._pending["nll", row] = segment_nll(self.ckpt.model, ids).numpy()
                yield row == rows[-1]

    def blocks(self) -> Blocks:
        found, self._pending = self._pending, {}
        return found

    def merge(self, blocks: Blocks, start: int, stop: int) -> None:
        for (name, *row), values in blocks.items():
            getattr(self, name)[(*row, slice(start, stop))] = values
        self.ticks.add(slice(start, stop))

    def _changed(self, setting: Setting):
        verify = id(setting) not in self.verified
        self.verified.add(id(setting))
        if setting.kind == "remove":
            return removed(self.ckpt.decoder, setting.layers, int(setting.value), verify)
        return stilled(self.ckpt, setting.cuts, self.geometry, self.length, self.angles, verify)


def _bands_of(ckpt: Checkpoint, ids, geometry: Geometry, bands, batch: int, ticks: _Ticks) -> xr.Dataset:
    """The `bands` result given, which must be of this model, or one measured on the same segments."""
    if bands is None:
        seen = [0]

        def tick(done: int, _total: int) -> None:
            ticks.add(slice(seen[0], done))
            seen[0] = done

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ProbeWarning)  # about the segments, which were warned about already
            found = measure_bands(ckpt, tokens=ids, batch=batch, progress=tick)
        if found.attrs["partial"]:
            raise KeyboardInterrupt
        return found
    found = results.load(bands) if isinstance(bands, (str, Path)) else bands
    name = bands if isinstance(bands, (str, Path)) else "the result"
    if found.attrs.get("analysis") != "bands":
        raise UsageError(f"--bands {name} is a result of {found.attrs.get('analysis')!r}: give one of bands.")
    ours = [(layer.layer, layer.pairs) for layer in geometry.layers]
    theirs = list(zip(found["layer"].values.tolist(), found["pairs"].values.tolist(), strict=True))
    if ours != theirs:
        raise UsageError(
            f"--bands {name} is of another model or of some layers only ({found.attrs['model']}, "
            f"{len(theirs)} layers): measure bands of {ckpt.name} in all layers."
        )
    return found


def _dataset(geometry: Geometry, settings: list[Setting], nll, intact, measured: xr.Dataset) -> xr.Dataset:
    coords = results.layer_coordinates(list(geometry.layers))
    coords["formation_base"] = ("layer", measured["formation_base"].values)
    for name in ("kind", "value", "where"):
        coords[name] = ("setting", [getattr(setting, name) for setting in settings])
    difference = nll - intact
    ratio = np.exp(difference.mean(axis=1))
    error = np.full(len(settings), np.nan)
    if len(intact) > 1:
        error = ratio * difference.std(axis=1, ddof=1) / np.sqrt(len(intact))
    turning = np.array([[_turning(setting, layer) for layer in geometry.layers] for setting in settings])
    cut = np.array([[layer.layer in setting.cuts for layer in geometry.layers] for setting in settings])
    usage = measured["usage"].values
    seen = np.isfinite(usage)
    mean = np.divide(
        np.nansum(usage, axis=1), seen.sum(axis=1), out=np.full_like(usage[:, 0], np.nan), where=seen.any(1)
    )
    variables = {
        "nll": (("setting", "segment"), nll),
        "nll_intact": ("segment", intact),
        "ratio": ("setting", ratio),
        "ratio_se": ("setting", error),
        "turning": (("setting", "layer"), turning),
        "cut": (("setting", "layer"), cut.astype(np.int8)),
        "usage_mean": (("layer", "pair"), mean),
    }
    return xr.Dataset(variables, coords=coords)


def _turning(setting: Setting, layer: RotaryLayer) -> int:
    """Pairs of a layer that turn under a setting."""
    turning = layer.inv_freq > 0
    if layer.layer in setting.cuts:
        turning = turning & ~setting.cuts[layer.layer]
    return int(turning.sum())
