"""spectrum: the mean score by distance of every rotary pair, and how far it is still the one tone that RoPE made it.

Source: FoPE, arXiv 2412.17739 (spectrum damage, leakage, floor frequency).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr

from .. import results, theory
from ..attention import scores, weights
from ..checkpoints import Checkpoint
from ..errors import ProbeError, UsageError
from ..interventions import PARTS
from ..rotary import RotaryLayer
from ..tap import Call
from ..texts import segments_for
from ..verify import to_pairs
from . import spectrum_core as core
from .bands import pair_power
from .common import choose_layers, default_batch
from .reading import Blocks, Observer, measure
from .spectrum_tones import Tones

FEWEST = 8  # distances of which a spectrum says anything


def outside(x: torch.Tensor, layer: RotaryLayer) -> torch.Tensor:
    """The channels of q or k that belong to no pair; they come before the rotary part or after it."""
    return x[..., : layer.offset] if layer.offset else x[..., layer.rotary_dim :]


def weight_sums(call: Call, distances: int) -> torch.Tensor:
    """Post-softmax weight by distance, summed over queries and batch, in blocks of queries: shape (head, distance).

    The first position takes its share in the softmax and is left out as a key.
    """
    batch, heads, length, _ = call.q.shape
    step = min(length, max(16, 2**22 // (batch * heads * length)))
    total = torch.zeros(heads, distances, device=call.q.device)
    for start in range(0, length, step):
        rows = torch.arange(start, min(start + step, length), device=call.q.device)
        block = weights(scores(call, rows), call).sum(0)
        block[..., 0] = 0
        total = total + core.diagonal_sums(block, start, distances)
    return total


class _Profiles(Observer):
    """Sums of products by distance, of every layer and group of segments; the single-tone experiment beside them."""

    def __init__(
        self,
        layers: list[RotaryLayer],
        distances: int,
        length: int,
        segments: int,
        weigh: bool,
        tones: Tones | None = None,
    ):
        self.layers = {layer.layer: layer for layer in layers}
        self.distances = {layer.layer: core.available(layer, distances) for layer in layers}
        self.chunk = {layer.layer: core.chunk_of(layer, length) for layer in layers}
        self.segments, self.weigh, self.tones = segments, weigh, tones
        self.state = ("scale", "sums", "tones") if tones else ("scale", "sums")
        self.one_pass = tones is None
        self.scale: dict[int, float] = {}
        self.sums: dict[tuple[int, str], np.ndarray] = {}  # (layer, name) -> [group, head, …]
        self._pending: list[tuple[int, str, int, torch.Tensor]] = []

    def begin(self, start: int, stop: int) -> None:
        self._pending.clear()
        self.runs = core.runs(start, stop, self.segments)

    def passes(self, decoder, ids: torch.Tensor) -> Iterator[bool]:
        for last in super().passes(decoder, ids):
            if self.tones:
                self.tones.measure(ids, self.runs)
            yield last

    def __call__(self, call: Call) -> None:
        self._pending.append((call.layer, "scale", 0, torch.tensor(call.scaling, dtype=torch.float64)))
        for group, part in self.runs:
            mask = call.mask if call.mask is None or len(call.mask) == 1 else call.mask[part]
            one = replace(call, q=call.q[part], k=call.k[part], v=call.v[part], mask=mask)
            self._pending += [(call.layer, name, group, value) for name, value in self._block(one).items()]

    def _block(self, call: Call) -> dict[str, torch.Tensor]:
        layer, distances, chunk = self.layers[call.layer], self.distances[call.layer], self.chunk[call.layer]
        q, k = call.q, core.without_first(call.k)
        if chunk:
            q, k = core.fold(q, chunk), core.fold(k, chunk)
        block = {}
        if layer.rotates:
            keys = k[:, : layer.kv_heads]  # one rotary key for all heads in MLA
            block["pairs"] = core.lag_sums(to_pairs(q, layer), to_pairs(keys, layer), distances)
            for name, x in (("q_norm", call.q), ("k_norm", call.k[:, : layer.kv_heads])):
                block[name] = pair_power(x, layer).sqrt()[:, :, 1:].sum((0, 2))
        if layer.rotary_dim < layer.head_dim:
            block["rest"] = core.lag_sums([outside(q, layer)], [outside(k, layer)], distances, total=True)
        if self.weigh:
            block["weights"] = weight_sums(call, distances)
        return block

    def blocks(self) -> Blocks:
        found = {}
        for layer, name, group, value in self._pending:
            if not torch.isfinite(value).all():
                raise ProbeError(
                    f"the {'attention weights' if name == 'weights' else 'queries or keys'} of layer {layer} are not "
                    "finite: use --dtype float32 or bfloat16, or check the weights."
                )
            found["profiles", layer, name, group] = value.cpu().numpy()
        self._pending.clear()
        return found | (self.tones.blocks() if self.tones else {})

    def merge(self, blocks: Blocks, start: int, stop: int) -> None:
        for (part, *key), value in blocks.items():
            if part == "tones":
                assert self.tones is not None
                self.tones.merge(key, value)
                continue
            layer, name, group = key
            if name == "scale":
                self.scale[layer] = float(value)
                continue
            if (layer, name) not in self.sums:
                self.sums[layer, name] = np.zeros((min(core.GROUPS, self.segments), *value.shape))
            self.sums[layer, name][group] += value

    def members(self, done: int) -> np.ndarray:
        """Segments in each group, of the first `done`."""
        found = np.zeros(min(core.GROUPS, self.segments))
        for group, part in core.runs(0, done, self.segments):
            found[group] += part.stop - part.start
        return found


class _Results:
    """Variables of the result, filled layer by layer; NaN where a layer has fewer heads, pairs or distances."""

    def __init__(self, layers: list[RotaryLayer], distances: int):
        self.sizes = {
            "layer": len(layers),
            "head": max(layer.heads for layer in layers),
            "pair": max(layer.pairs for layer in layers),
            "distance": distances,
            "freq": distances // 2 + 1,
        }
        self.variables: dict[str, tuple] = {}

    def put(self, name: str, row: int, value, *dims: str, large: bool = False) -> None:
        """Store the value of one layer; `dims` beside the layer, float32 where there are many numbers."""
        if name not in self.variables:
            shape = [self.sizes[dim] for dim in ("layer", *dims)]
            empty = np.full(shape, np.nan, dtype=np.float32 if large else np.float64)
            self.variables[name] = (("layer", *dims), empty)
        value = np.asarray(value)
        self.variables[name][1][(row, *(slice(size) for size in value.shape))] = value


def _finish(seen: _Profiles, members: np.ndarray, length: int, distances: int, window: str, keep_pairs: bool) -> dict:
    """Averages, then spectra: the variables of the result."""
    out = _Results(list(seen.layers.values()), distances)
    segments = members.sum()
    for row, (index, layer) in enumerate(seen.layers.items()):
        n, scale = seen.distances[index], seen.scale[index]
        visible = core.counts(length, n, seen.chunk[index])

        def averaged(name, index=index, visible=visible):
            return seen.sums[index, name].sum(axis=0) / (segments * visible)

        profile: Any = 0.0
        if layer.rotates:
            pairs = averaged("pairs") * scale
            profile = pairs.sum(axis=1)
            usage = _usage(seen, layer, segments * (length - 1))
            limit = np.where(layer.inv_freq > 0, core.tone_share(layer.inv_freq, n, window), np.nan)
            for name, value in _tones(pairs, layer, window).items():
                out.put(name, row, value, "head", "pair")
            out.put("usage", row, usage, "head", "pair")
            damage, limit_of_text, error = core.errors(
                seen.sums[index, "pairs"] / visible,
                members,
                partial(_damage, usage=usage, layer=layer, window=window),
            )
            out.put("damage", row, damage)
            out.put("damage_limit", row, limit_of_text)
            out.put("damage_se", row, error)
            out.put("purity_tone", row, limit, "pair")
            out.put("damage_tone", row, _weighted(np.broadcast_to(limit, usage.shape), usage, layer, n))
            out.put("power_below_floor", row, _below_floor(pairs, layer))
            if keep_pairs:
                out.put("pair_profile", row, pairs, "head", "pair", "distance", large=True)
        if (index, "rest") in seen.sums:
            profile = profile + averaged("rest") * scale
        out.put("profile", row, profile, "head", "distance", large=True)
        out.put("power", row, core.power_spectrum(profile, window), "head", "freq", large=True)
        out.put("frequency", row, core.frequencies(n), "freq")
        if seen.weigh:
            out.put("weight_profile", row, averaged("weights"), "head", "distance", large=True)
            out.put("weight_power", row, core.power_spectrum(averaged("weights"), window), "head", "freq", large=True)
    return out.variables


def _usage(seen: _Profiles, layer: RotaryLayer, tokens: float) -> np.ndarray:
    q, k = (seen.sums[layer.layer, name].sum(axis=0) / tokens for name in ("q_norm", "k_norm"))
    return q * np.repeat(k, layer.heads // layer.kv_heads, axis=0)


def _tones(pairs: np.ndarray, layer: RotaryLayer, window: str) -> dict[str, np.ndarray]:
    return {"purity": _purity(pairs, layer, window), "tone_r2": core.tone_r2(pairs, layer.inv_freq.astype(float))}


def _purity(pairs: np.ndarray, layer: RotaryLayer, window: str) -> np.ndarray:
    """Share of a pair's power near its own frequency, shape (head, pair); NaN where the pair does not turn."""
    bins = core.near(layer.inv_freq, pairs.shape[-1])
    return np.where(layer.inv_freq > 0, core.share_near(core.power_spectrum(pairs, window), bins), np.nan)


def _damage(pairs: np.ndarray, usage: np.ndarray, layer: RotaryLayer, window: str) -> float:
    return _weighted(_purity(pairs, layer, window), usage, layer, pairs.shape[-1])


def _weighted(purity: np.ndarray, usage: np.ndarray, layer: RotaryLayer, distances: int) -> float:
    """1 − usage-weighted mean purity of the resolvable pairs of all heads; NaN where there are none."""
    used = np.where(np.isfinite(purity) & core.resolvable(layer, distances), usage, 0)
    return 1 - float((used * np.nan_to_num(purity)).sum() / used.sum()) if used.any() else np.nan


def _below_floor(pairs: np.ndarray, layer: RotaryLayer) -> float:
    """Share of Σ c² (mean kept) that pairs below the floor hold, summed over heads."""
    power = (pairs**2).sum(axis=(0, 2))
    slow = theory.below_floor(layer.inv_freq, layer.length)
    return float(power[slow].sum() / power.sum()) if power.any() else np.nan


def spectrum(
    ckpt: Checkpoint,
    *,
    text=None,
    dataset: str | None = None,
    tokens=None,
    segments: int | None = None,
    length: int | None = None,
    batch: int | None = None,
    layers=None,
    distances: int | None = None,
    window: str = "hann",
    weights: bool = False,
    inject=None,
    depth: int = 2,
    ablate=(),
    keep_pairs: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> xr.Dataset:
    """Mean score by distance of every head and rotary pair, its spectrum, and how pure a tone each pair still is.

    Parameters
    ----------
    ckpt : Checkpoint
    text, dataset, tokens : optional
        A text file, a data set, or an integer array [segments, length] (or its .npy file); default: built-in text.
    segments, length : int, optional
        Default 16 segments of 1024 tokens.
    batch : int, optional
        Segments per forward pass.
    layers : iterable of int, optional
        Only these layers, and those of the single-tone experiment.
    distances : int, optional
        Distances 0 … N − 1 tokens; default half the segment.
    window : {"hann", "hamming", "blackman", "none"}
        Taper of the spectra.
    weights : bool
        Also the mean post-softmax weight by distance.
    inject : iterable of int, or "all", optional
        Single-tone experiment: in the first rotating layer attend through one pair alone, for each of these pairs.
    depth : int
        Layers in which the injected tone is looked for, from the first rotating one on.
    ablate : iterable of {"mlp", "attention", "norm"}
        Repeat the experiment with this part taken out of the layers before the one that is looked at.
    keep_pairs : bool
        Keep the profile of every pair (`pair_profile`); it is the bulk of what is measured.
    progress : callable, optional
        Called with (segments read, segments in all).

    Returns
    -------
    Dataset
        ``profile[layer, head, distance]``, ``power[layer, head, freq]``, ``purity``, ``tone_r2``, ``usage``
        ``[layer, head, pair]``, ``resolvable[layer, pair]``, ``damage[layer]`` with its standard error,
        ``power_below_floor[layer]``; ``damage_limit[layer]``, the damage with the part
        taken off that falls with the number of segments (jackknife); ``purity_tone[layer, pair]`` and ``damage_tone[layer]``, what pure tones would
        give (the estimator's own limit); under injection ``leakage``, ``leakage_none``, ``excess``, ``carried``
        ``[inject, layer, head]`` and ``leakage_tone[inject, layer]``.  Scores are pre-softmax, before any soft-cap.
        After an interrupt, or a failure in a later batch (with a warning): what was measured until then, with
        attribute ``partial`` = 1.

    Raises
    ------
    UsageError
        Distances, pairs, parts or window that cannot be.
    ProbeError
        The model or the tokens cannot be read; activations are not finite.

    Notes
    -----
    Profiles are averaged over positions and segments first, then one spectrum is taken: purity rises with the number
    of segments, so compare results of equally many only.  Standard errors are jackknifed over four groups of
    segments.
    """
    chosen = segments_for(ckpt, text=text, dataset=dataset, tokens=tokens, segments=segments, length=length)
    count, size = chosen.ids.shape
    distances = _distances(distances, size)
    parts = check_options(window, inject, depth, ablate)
    geometry = ckpt.geometry(size)
    tones = None if inject is None else Tones(ckpt.decoder, geometry, inject, depth, parts, distances, size, count)
    selected = choose_layers(geometry, layers)
    if tones:
        selected = choose_layers(geometry, {layer.layer for layer in (*selected, *tones.layers)})
    if not any(layer.rotates for layer in selected):
        raise ProbeError("none of the chosen layers rotates, so there are no tones to look for.")
    observer = _Profiles(selected, distances, size, count, weights, tones)
    batch = batch or default_batch(ckpt.device, size)
    options = {"distances": distances, "window": window, "weights": weights, "batch": batch}
    options |= {"layers": sorted(observer.layers), "keep_pairs": keep_pairs}
    options |= tones.options() if tones else {}
    done = measure(ckpt, "spectrum", chosen.ids, observer, batch, options, progress)
    members = observer.members(done)
    variables = _finish(observer, members, size, distances, window, keep_pairs)
    ds = xr.Dataset(variables, coords=results.layer_coordinates(selected))
    ds["resolvable"] = (("layer", "pair"), _padded([core.resolvable(layer, distances) for layer in selected]))
    ds["distances"] = ("layer", [core.available(layer, distances) for layer in selected])
    ds = ds.set_coords(["frequency", "distances"]).assign_coords(distance=np.arange(distances))
    if tones:
        ds = ds.assign(tones.variables(members, ds, window)).assign_coords(tones.coordinates())
    read_so_far = replace(chosen, ids=chosen.ids[:done])
    ds.attrs = results.provenance(ckpt, geometry, read_so_far, "spectrum", options, partial=done < count)
    return results.describe(ds)


def check_options(window: str, inject, depth: int, ablate) -> tuple[str, ...]:
    """Refuse what no model can do; the parts to take out."""
    parts = (ablate,) if isinstance(ablate, str) else tuple(dict.fromkeys(ablate))
    unknown = [part for part in parts if part not in PARTS]
    if window not in core.WINDOWS:
        raise UsageError(f"--window is {window!r}: choose one of {', '.join(core.WINDOWS)}.")
    if unknown:
        raise UsageError(f"--ablate knows {', '.join(PARTS)}, not {unknown[0]!r}.")
    if parts and inject is None:
        raise UsageError("--ablate changes the single-tone experiment: give --inject as well.")
    if depth < 1 + bool(parts):
        need = "2 or more, since a part is taken out before a later layer" if parts else "1 or more"
        raise UsageError(f"--depth is {depth}: give {need}.")
    return parts


def _distances(distances: int | None, length: int) -> int:
    if distances is None:
        distances = length // 2
    if not FEWEST <= distances < length:
        raise UsageError(
            f"{distances} distances cannot be taken in segments of {length} tokens: "
            f"give --distances from {FEWEST} to {length - 1}, or longer segments."
        )
    return distances


def _padded(rows: list[np.ndarray]) -> np.ndarray:
    """Rows of unequal length as one boolean array, False where a row has ended."""
    out = np.zeros((len(rows), max(map(len, rows))), dtype=bool)
    for into, row in zip(out, rows, strict=True):
        into[: len(row)] = row
    return out
