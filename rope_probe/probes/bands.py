"""bands: query and key norms by rotary pair, and where the frequency band sits.

Sources: Oka et al. (frequency bands: dominant pair, i_band), Barbero et al., arXiv 2410.06205 (mean
2-norm per pair), MHA2MLA, arXiv 2502.14837 (product of norms).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xarray as xr

from .. import results
from ..accumulate import Moments
from ..checkpoints import Checkpoint
from ..errors import ProbeError, UsageError
from ..rotary import RotaryLayer, with_formation
from ..tap import Call
from ..texts import check_sources, segments_for
from ..verify import not_finite, to_pairs
from .common import choose_layers, default_batch
from .reading import Blocks, Observer, measure


def pair_power(x: torch.Tensor, layer: RotaryLayer) -> torch.Tensor:
    """Squared norm of every rotary pair, in float32 or better, `attention_scaling` divided out.

    Parameters
    ----------
    x : Tensor, shape (batch, head, token, channel)
        q or k as attention receives them.

    Returns
    -------
    Tensor, shape (batch, head, token, pair)
    """
    first, second = to_pairs(x, layer)
    if x.dtype in (torch.float16, torch.bfloat16):
        first, second = first.float(), second.float()
    power = torch.addcmul(first * first, second, second)
    return power if layer.attention_scaling == 1 else power / layer.attention_scaling**2


def _unrotated_norm(x: torch.Tensor, layer: RotaryLayer) -> torch.Tensor:
    """Norm of the channels outside the rotary part, shape (batch, head, token)."""
    before, after = x[..., : layer.offset].float(), x[..., layer.offset + layer.rotary_dim :].float()
    return (before.square().sum(-1) + after.square().sum(-1)).sqrt()


def _blocks(x: torch.Tensor, layer: RotaryLayer, rotating: int) -> dict[str, torch.Tensor]:
    """Per-segment statistics of q or k of one layer, a few segments at a time: less memory, and it stays in the cache."""
    few = max(1, (1 << 27 if x.is_cuda else 1 << 21) // x[0].numel())
    parts = [_block(pair_power(piece, layer), rotating) for piece in x.split(few)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _block(power: torch.Tensor, rotating: int) -> dict[str, torch.Tensor]:
    """Per-segment statistics of one layer: the first position apart, the others summed.

    Parameters
    ----------
    power : Tensor, shape (batch, head, token, pair)
    rotating : int
        Pairs that turn; they come first, and only they can be the largest.
    """
    norm = power.sqrt()
    rest = norm[:, :, 1:]
    mean = rest.mean(2)
    top = power[:, :, 1:, :rotating].max(-1).indices
    counts = torch.zeros(mean.shape, dtype=torch.float32, device=power.device)
    counts.scatter_add_(2, top, torch.ones_like(top, dtype=torch.float32))
    return {
        "first": norm[:, :, 0].clone(),  # a view would keep the norms of every token alive
        "mean": mean,
        "m2": (rest - mean[:, :, None]).square_().sum(2),
        "top": counts,
    }


class BandsObserver(Observer):
    """Norms and tops of every layer, of `count` segments of `length` tokens."""

    state = ("norm", "first", "top", "unrotated", "values", "dominant")

    def __init__(self, layers: list[RotaryLayer], count: int, length: int, control: bool = False):
        self.layers = {layer.layer: layer for layer in layers}
        self.length = length
        self.row = {layer.layer: i for i, layer in enumerate(layers)}
        heads = max(layer.heads for layer in layers)
        kv = max(layer.kv_heads for layer in layers)
        pairs = max(layer.pairs for layer in layers)
        self.sides = {"q": heads, "k": kv}
        self.control = control
        size = len(layers)
        self.norm = {side: Moments((size, n, pairs)) for side, n in self.sides.items()}
        self.first = {side: Moments((size, n, pairs)) for side, n in self.sides.items()}
        self.top = {side: np.zeros((size, n, pairs)) for side, n in self.sides.items()}
        self.unrotated = {side: Moments((size, n)) for side, n in self.sides.items()}
        self.values: dict[str, Any] = {}
        self.dominant = {name: np.full((count, size), np.nan) for name in ("k", "q", "usage")}
        self._pending: dict[tuple[int, str, str], torch.Tensor] = {}

    # -- while the model runs

    def begin(self, start: int, stop: int) -> None:
        self._pending.clear()

    def __call__(self, call: Call) -> None:
        layer = self.layers[call.layer]
        if layer.rotates:
            rotating = layer.pairs - layer.zero_pairs
            for side, x in (("q", call.q), ("k", call.k[:, : layer.kv_heads])):
                for name, value in _blocks(x, layer, rotating).items():
                    self._pending[call.layer, side, name] = value
        if layer.rotary_dim < layer.head_dim:
            for side, x in (("q", call.q), ("k", call.k)):
                norm = _unrotated_norm(x, layer)[:, :, 1:].mean(2)
                if side == "k" and layer.kv_heads < norm.shape[1]:  # MLA: own part per head, rotary key shared
                    norm = norm.mean(1, keepdim=True)
                self._pending[call.layer, side, "unrotated"] = norm
        if self.control and layer.rotates:
            width = call.v.shape[-1] // 2  # values chunked the way keys are, over their own width
            half = layer.layout_rotated == "half"
            v = call.v.float()
            first, second = (v[..., :width], v[..., width : 2 * width]) if half else (v[..., 0::2], v[..., 1::2])
            for name, value in _block(first.square() + second.square(), width).items():
                self._pending[call.layer, "v", name] = value

    # -- between batches

    def blocks(self) -> Blocks:
        keys = list(self._pending)
        flat = torch.cat([self._pending[key].flatten().float().cpu() for key in keys]).numpy()
        sizes = [self._pending[key].numel() for key in keys]
        found = {}
        for key, values in zip(keys, np.split(flat, np.cumsum(sizes)[:-1]), strict=True):
            if not np.isfinite(values).all():
                raise not_finite(key[1], key[0])
            found[key] = values.reshape(tuple(self._pending[key].shape))
        self._pending.clear()
        return found

    def merge(self, blocks: Blocks, start: int, stop: int) -> None:
        blocks = {key: values.astype(np.float64) for key, values in blocks.items()}
        present = {index for index, *_ in blocks}
        for segment in range(start, stop):
            for index in self.layers.keys() & present:
                self._merge_layer(blocks, index, segment, segment - start)

    def _merge_layer(self, blocks: Blocks, index: int, segment: int, item: int) -> None:
        """Take in one segment, the `item`-th of the batch, of one layer."""
        layer, row = self.layers[index], self.row[index]
        for side in ("q", "k"):
            if (index, side, "unrotated") in blocks:
                values = blocks[index, side, "unrotated"][item]
                self.unrotated[side].add((row, slice(len(values))), 1, values, 0.0)
        if not layer.rotates:
            return
        means = {}
        for side in ("q", "k"):
            block = {name: blocks[index, side, name][item] for name in ("first", "mean", "m2", "top")}
            heads, pairs = block["mean"].shape
            where = (row, slice(heads), slice(pairs))
            self.norm[side].add(where, self.length - 1, block["mean"], block["m2"])
            self.first[side].add(where, 1, block["first"], 0.0)
            self.top[side][where] += block["top"]
            self.dominant[side][segment, row] = block["top"].argmax(-1).mean()
            means[side] = block["mean"]
        product = means["q"] * np.repeat(means["k"], layer.heads // layer.kv_heads, axis=0)
        self.dominant["usage"][segment, row] = product[:, : layer.pairs - layer.zero_pairs].argmax(-1).mean()
        if (index, "v", "mean") in blocks:
            self._merge_values(row, blocks, index, item)

    def _merge_values(self, row: int, blocks: Blocks, index: int, item: int) -> None:
        mean = blocks[index, "v", "mean"][item]
        if not self.values:
            # value heads may outnumber the rotary key (MLA) and differ in width from the keys
            shape = (len(self.layers), *mean.shape)
            self.values = {"norm": Moments(shape), "top": np.zeros(shape)}
        store = self.values["norm"]
        if mean.shape[0] > store.mean.shape[1] or mean.shape[1] > store.mean.shape[2]:
            self._grow_values(mean.shape)
            store = self.values["norm"]
        where = (row, slice(mean.shape[0]), slice(mean.shape[1]))
        store.add(where, self.length - 1, mean, blocks[index, "v", "m2"][item])
        self.values["top"][where] += blocks[index, "v", "top"][item]

    def _grow_values(self, shape) -> None:
        old, top = self.values["norm"], self.values["top"]
        size = (len(self.layers), max(shape[0], old.mean.shape[1]), max(shape[1], old.mean.shape[2]))
        pad = [(0, new - was) for new, was in zip(size, old.mean.shape, strict=True)]
        grown = Moments(size)
        grown.count, grown.mean, grown.m2 = (np.pad(x, pad) for x in (old.count, old.mean, old.m2))
        self.values = {"norm": grown, "top": np.pad(top, pad)}

    # -- afterwards

    def variables(self, done: int) -> dict:
        """Data variables of the result of the first `done` segments."""
        dims = {"q": ("layer", "head", "pair"), "k": ("layer", "kv_head", "pair")}
        out: dict[str, tuple] = {}
        for side in ("q", "k"):
            seen = self.norm[side].count > 0
            out[f"{side}_norm"] = (dims[side], self.norm[side].average)
            out[f"{side}_norm_std"] = (dims[side], self.norm[side].std)
            out[f"{side}_norm_first"] = (dims[side], self.first[side].average)
            out[f"{side}_top"] = (dims[side], _counts(self.top[side], seen))
            if self.unrotated[side].count.any():
                out[f"{side}_norm_unrotated"] = (dims[side][:2], self.unrotated[side].average)
        out["usage"] = (dims["q"], self._usage(out["q_norm"][1], out["k_norm"][1]))
        if self.values:
            seen = self.values["norm"].count > 0
            dim = ("layer", "value_head", "value_pair")
            if self.values["norm"].mean.shape[1:] == self.norm["k"].mean.shape[1:]:
                dim = dims["k"]
            out["v_norm"] = (dim, self.values["norm"].average)
            out["v_top"] = (dim, _counts(self.values["top"], seen))
        for name, variable in (
            ("k", "dominant_segment"),
            ("q", "dominant_q_segment"),
            ("usage", "dominant_usage_segment"),
        ):
            out[variable] = (("segment", "layer"), self.dominant[name][:done])
        return out

    def _usage(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        usage = np.full_like(q, np.nan)
        for index, layer in self.layers.items():
            if layer.rotates:
                row, group = self.row[index], layer.heads // layer.kv_heads
                usage[row, : layer.heads] = q[row, : layer.heads] * np.repeat(k[row, : layer.kv_heads], group, axis=0)
        return usage


def _counts(values: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Whole numbers, or floats with NaN where a layer has fewer heads or pairs."""
    return values.astype(np.int64) if seen.all() else np.where(seen, values, np.nan)


def bands(
    ckpt: Checkpoint,
    *,
    text=None,
    dataset: str | None = None,
    tokens=None,
    segments: int | None = None,
    length: int | None = None,
    batch: int | None = None,
    layers=None,
    control: bool = False,
    formation: dict | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> xr.Dataset:
    """Query and key norms by rotary pair, over one reading of a text.

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
        Only these layers; the model is not run beyond the last of them.
    control : bool
        Also the value vectors, which carry no rotation.
    formation : dict, optional
        ``base`` and/or ``length`` the frequencies were formed with, for the predicted position.
    progress : callable, optional
        Called with (segments read, segments in all).

    Returns
    -------
    Dataset
        ``q_norm[layer, head, pair]``, ``k_norm[layer, kv_head, pair]`` (mean over tokens, first position left
        out), their ``_std`` and ``_first``, ``q_top``, ``k_top`` (tokens), ``usage`` and provenance.
        After an interrupt, or a failure in a later batch (with a warning): what was measured until then, with
        attribute ``partial`` = 1.

    Raises
    ------
    ProbeError
        The model or the tokens cannot be read; activations are not finite.
    """
    check_sources(batch=batch)
    chosen = segments_for(ckpt, text=text, dataset=dataset, tokens=tokens, segments=segments, length=length)
    count, size = chosen.ids.shape
    if size < 2:
        raise UsageError("segments of 1 token hold nothing but the first position, which is kept apart: use 2 or more.")
    geometry = ckpt.geometry(size)
    selected = choose_layers(geometry, layers)
    if not any(layer.rotates for layer in selected):
        raise ProbeError("none of the chosen layers rotates, so there are no rotary pairs to measure.")
    observer = BandsObserver(selected, count, size, control)
    batch = batch or default_batch(ckpt.device, size)
    options = {"control": control, "formation": formation or {}, "layers": sorted(observer.layers), "batch": batch}
    done = measure(ckpt, "bands", chosen.ids, observer, batch, options, progress)
    ds = xr.Dataset(observer.variables(done), coords=coordinates(ckpt, selected, formation))
    read_so_far = replace(chosen, ids=chosen.ids[:done])
    ds.attrs = results.provenance(ckpt, geometry, read_so_far, "bands", options, partial=done < count)
    return results.describe(ds)


def coordinates(ckpt, layers: list[RotaryLayer], formation: dict | None) -> dict:
    """Coordinates of a result that holds the variables of `bands`: layers, pairs, and what the bands formed with."""
    given = _formation(formation)
    before = ckpt.formed or {}  # under a --rope override: what the weights were trained with
    formed = []
    for layer in layers:
        base, length = before.get(layer.layer, (None, None))
        formed.append(with_formation(layer, given["base"] or base, given["length"] or length))
    coords = results.layer_coordinates(formed)
    coords["formation_base"] = coords["base"]
    return coords | {"base": ("layer", [layer.base for layer in layers])}


def _formation(formation: dict | None) -> dict:
    formation = dict(formation or {})
    unknown = set(formation) - {"base", "length"}
    if unknown:
        raise UsageError(f"--formation knows base and length, not {sorted(unknown)[0]!r}.")
    for key, value in formation.items():
        if not value > 1:
            raise UsageError(f"--formation {key} is {value}: give a number above 1.")
    return {"base": formation.get("base"), "length": formation.get("length")}
