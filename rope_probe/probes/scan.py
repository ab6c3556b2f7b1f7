"""scan: the pair profile of every head estimated from weights, without running the model.

What enters the first layer are embeddings, so its norms are computed, not estimated: every token of a text is
embedded, normed and projected as the model does it.  What enters later layers is not known without running those
before.  Its directions are drawn at random and passed once through the layer's own projections and back,
x = Σ Wᵀ W ξ with ξ ~ N(0, 1): gradient descent builds the rows of W from what the layer reads in training, so that the
directions W weighs most are those its inputs have most of.  Norm, biases and q/k norms are then those of the layer.
(With x = ξ the norm of a pair would be about the norm of its rows of W · diag(norm weight).)
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import xarray as xr

from .. import results
from ..checkpoints import load_tokenizer_of
from ..configs import load as load_config
from ..errors import ProbeError, ProbeWarning, UsageError
from ..fronts import Fronts
from ..rotary import RotaryLayer
from ..sources import Source, find
from ..tap import Call
from ..tensors import Tensors, commit_on_hub
from ..texts import check_sources, segments_for
from ..verify import not_finite, with_shapes
from .bands import coordinates, pair_power
from .common import choose_layers
from .scan_summary import beside

DRAWS = 512
CHUNK = 1024  # tokens at a time


@dataclass
class Unopened:
    """A checkpoint whose weights are not loaded: what a text is cut for, and what provenance names."""

    name: str
    source: Source = field(repr=False)
    provenance: dict
    vocabulary: int
    claimed_length: int
    dtype: str = "float32"
    device: str = "cpu"
    formed: dict = field(default_factory=dict)

    @cached_property
    def tokenizer(self):
        return load_tokenizer_of(self.source)


class _Profile:
    """Weighted mean norm and largest pair of every head, over what a front is shown."""

    def __init__(self, layer: RotaryLayer):
        self.layer, self.total = layer, 0.0
        self.sums: dict[str, np.ndarray] = {}
        self.top: dict[str, np.ndarray] = {}

    def add(self, call: Call, weights: np.ndarray) -> None:
        """Take in a call of single tokens, each counted `weights` times."""
        layer = self.layer
        rotating = layer.pairs - layer.zero_pairs
        counts = torch.as_tensor(weights, dtype=torch.float64)
        self.total += float(weights.sum())
        for side, x in (("q", call.q), ("k", call.k[:, : layer.kv_heads])):
            norm = pair_power(x, layer)[:, :, 0].sqrt()
            if not torch.isfinite(norm).all():
                raise not_finite(side, layer.layer)
            largest = torch.nn.functional.one_hot(norm[..., :rotating].argmax(-1), layer.pairs)
            for store, values in ((self.sums, norm), (self.top, largest)):
                summed = torch.einsum("n,nhp->hp", counts, values.double()).numpy()
                store[side] = store.get(side, 0) + summed

    def mean(self, side: str) -> np.ndarray:
        return self.sums[side] / self.total


def draw(modules: list[torch.nn.Linear], width: int, count: int, seed: int) -> torch.Tensor:
    """Inputs of a layer as its projections suggest them: x = Σ Wᵀ W ξ, each of root mean square 1.

    Parameters
    ----------
    modules : list of Linear
        Projections of the layer's input, their weights of shape (channels, width).
    width, count, seed : int

    Returns
    -------
    Tensor, shape (count, width)
    """
    noise = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    x = torch.stack([(noise @ module.weight.T) @ module.weight for module in modules]).sum(0)
    return x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)


def scan(
    model: str,
    *,
    text=None,
    dataset: str | None = None,
    tokens=None,
    segments: int | None = None,
    length: int | None = None,
    layers=None,
    draws: int = DRAWS,
    seed: int = 0,
    formation: dict | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    bands=None,
    progress: Callable[[int, int], None] | None = None,
) -> xr.Dataset:
    """Estimate query and key norms by rotary pair from weights alone; those of layer 0 are exact for the text.

    Parameters
    ----------
    model : str
        Hub id (read in byte ranges, nothing is downloaded whole), folder, ``.gguf`` file or demo.
    text, dataset, tokens, segments, length : optional
        As in :func:`rope_probe.bands`: the token ids whose embeddings enter layer 0.
    layers : iterable of int, optional
        Only these layers; no weights of others are read.
    draws : int
        Inputs drawn for every layer after the first.
    seed : int
    formation : dict, optional
        ``base`` and/or ``length`` the frequencies were formed with.
    revision : str, optional
    trust_remote_code : bool
        Of the tokenizer; the model must be one of transformers' own.
    bands : Dataset or path, optional
        Result of `bands` of the same checkpoint, kept beside the estimate as ``…_measured``.
    progress : callable, optional
        Called with (layers done, layers in all).

    Returns
    -------
    Dataset
        ``q_norm[layer, head, pair]``, ``k_norm[layer, kv_head, pair]``, ``usage``, ``q_top``, ``k_top`` (tokens, or
        draws) as in a result of `bands`; coordinate ``exact[layer]``.  After an interrupt, or a failure in a later
        layer (with a warning): the layers until then, with attribute ``partial`` = 1.

    Raises
    ------
    ProbeError
        The weights are not there, quantized, or not enough to form q and k.
    """
    check_sources(text=text, dataset=dataset, tokens=tokens, segments=segments, length=length)
    if not isinstance(model, (str, Path)):
        raise UsageError(
            f"a scan reads weights from files, not from a {type(model).__name__}: give a hub id, a folder or a .gguf file."
        )
    if draws < 2:
        raise UsageError(f"--draws is {draws}: give 2 or more.")
    if isinstance(bands, (str, Path)):
        bands = results.load(bands)
    source = find(str(model), revision, trust_remote_code)
    config, _ = load_config(str(model), revision, trust_remote_code)
    commit = commit_on_hub(source)
    tensors = Tensors(source, commit or revision)
    fronts = Fronts(config, tensors)
    selected = choose_layers(fronts.geometry, layers)
    selected = [layer for layer in selected if layer.layer not in fronts.shared]
    if not any(layer.rotates for layer in selected):
        raise ProbeError("none of the chosen layers rotates, so there are no rotary pairs to estimate.")
    ckpt = Unopened(
        source.name,
        source,
        source.provenance | ({"revision": commit} if commit else {}),
        fronts.decoder.get_input_embeddings().num_embeddings,
        fronts.geometry.claimed_length,
    )
    chosen = segments_for(ckpt, text=text, dataset=dataset, tokens=tokens, segments=segments, length=length)
    if chosen.ids.shape[1] < 2:
        raise UsageError("segments of 1 token hold nothing but the first position, which is left out: use 2 or more.")
    rows, found = [], []
    try:
        for done, layer in enumerate(selected, start=1):
            if layer.rotates:
                profile = _estimate(fronts, layer, chosen.ids, draws, seed)
                found.append(profile)
                layer = profile.layer
            rows.append(layer)
            if progress:  # the first layer reads the whole text, and says nothing of how fast the others go
                progress(done if layer.layer else 0, len(selected))
    except (KeyboardInterrupt, ProbeError, MemoryError) as error:
        if not found:
            raise
        if not isinstance(error, KeyboardInterrupt):
            warnings.warn(f"stopped after {len(rows)} of {len(selected)} layers: {error}", ProbeWarning, stacklevel=2)
    coords = coordinates(ckpt, rows, formation)
    coords["exact"] = ("layer", [layer.layer == 0 for layer in rows])
    ds = xr.Dataset(_variables(rows, found), coords=coords)
    options = {"draws": draws, "seed": seed, "formation": formation or {}, "layers": [layer.layer for layer in rows]}
    ds.attrs = results.provenance(ckpt, fronts.geometry, chosen, "scan", options, partial=len(rows) < len(selected))
    ds.attrs |= {"weight_bytes_read": tensors.read_bytes, "shared_keys": json.dumps(fronts.shared)}
    ds = results.describe(ds)
    return ds if bands is None else beside(ds, bands)


def _estimate(fronts: Fronts, layer: RotaryLayer, ids: np.ndarray, draws: int, seed: int) -> _Profile:
    """Profile of one layer: of all tokens for the first one, of drawn inputs for the others."""
    with torch.inference_mode(), fronts.layer(layer.layer) as front:
        if layer.layer == 0:
            found, counts = np.unique(ids[:, 1:], return_counts=True)
            call, _ = front(ids=found[:CHUNK])
            profile = _Profile(with_shapes(layer, call))
            profile.add(call, counts[:CHUNK])
            for start in range(CHUNK, len(found), CHUNK):
                call, _ = front(ids=found[start : start + CHUNK])
                profile.add(call, counts[start : start + CHUNK])
            return profile
        _, modules = front(hidden=torch.ones(1, fronts.width))
        call, _ = front(hidden=draw(modules, fronts.width, draws, seed + layer.layer))
        profile = _Profile(with_shapes(layer, call))
        profile.add(call, np.ones(draws))
        return profile


def _variables(rows: list[RotaryLayer], found: list[_Profile]) -> dict:
    """Data variables, padded with NaN where layers have fewer heads or pairs."""
    dims = {"q": ("layer", "head", "pair"), "k": ("layer", "kv_head", "pair")}
    place = {layer.layer: row for row, layer in enumerate(rows)}
    pairs = max(profile.layer.pairs for profile in found)
    sizes = {"q": max(layer.heads for layer in rows), "k": max(layer.kv_heads for layer in rows)}
    out: dict[str, tuple] = {}
    for side, heads in sizes.items():
        for name in ("norm", "top"):
            values = np.full((len(rows), heads, pairs), np.nan)
            for profile in found:
                own = profile.mean(side) if name == "norm" else profile.top[side]
                values[place[profile.layer.layer], : own.shape[0], : own.shape[1]] = own
            out[f"{side}_{name}"] = (dims[side], values)
    usage = np.full_like(out["q_norm"][1], np.nan)
    for profile in found:
        q, k = profile.mean("q"), profile.mean("k")
        usage[place[profile.layer.layer], : len(q), : q.shape[1]] = q * np.repeat(k, len(q) // len(k), axis=0)
    out["usage"] = (dims["q"], usage)
    return out
