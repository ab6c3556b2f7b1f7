"""heads: what each head attends to, the role that makes it, and the band of the heads of each role.

Sources: Barbero et al., arXiv 2410.06205 (diagonal and previous-token heads), Oka et al. (semantic heads),
Xiao et al., arXiv 2309.17453 (attention sinks), Olsson et al., arXiv 2209.11895 (induction heads).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xarray as xr

from .. import results
from ..checkpoints import Checkpoint
from ..errors import ProbeError, UsageError
from ..rotary import RotaryLayer
from ..tap import Call, Tap, input_device
from ..texts import check_sources, segments_for
from .bands import BandsObserver, coordinates
from .common import choose_layers, default_batch
from .heads_core import pair_profile, shrunk_map, visible_counts, weight_sums
from .heads_summary import NEAREST, ROLES
from .reading import Blocks, Observer, measure

THRESHOLDS = {"positional": 0.5, "induction": 0.3, "sink": 0.5}
WITHIN = (8, 64, 512)
PIXELS = 512
REPEAT, SEQUENCES = 128, 4  # induction: tokens that are repeated, and how often that is done


class _Heads(Observer):
    """Sums of the attention weights of every layer; bands beside them."""

    state = ("bands", "sums", "seen", "lag_counts", "map")

    def __init__(self, layers: list[RotaryLayer], count: int, length: int, chosen: tuple[int, int] | None):
        self.bands = BandsObserver(layers, count, length)
        self.layers = self.bands.layers
        self.lags = [0, *(2**n for n in range(length.bit_length()) if 2**n <= length // 2)]
        self.chosen, self.map = chosen, np.zeros((0, 0))
        self.sums: dict[tuple[int, str], np.ndarray] = {}
        self.seen: dict[int, np.ndarray] = {}  # layer -> visible keys at each distance, of one segment
        self.lag_counts: dict[int, np.ndarray] = {}
        self._pending: dict[tuple[int, str], torch.Tensor] = {}

    def begin(self, start: int, stop: int) -> None:
        self._pending.clear()
        self.bands.begin(start, stop)
        self._maps = start == 0

    def __call__(self, call: Call) -> None:
        layer = self.layers[call.layer]
        self.bands(call)
        found = weight_sums(call)
        found["seen"] = visible_counts(call)
        if layer.rotates:
            found["pair_profile"], found["lag_counts"] = pair_profile(call, layer, self.lags)
        if self._maps and self.chosen and call.layer == self.chosen[0]:
            found["map"] = shrunk_map(call, self.chosen[1], PIXELS)
        for name, value in found.items():
            self._pending[call.layer, name] = value

    def blocks(self) -> Blocks:
        found = {("heads", *key): value.cpu().numpy() for key, value in self._pending.items()}
        self._pending.clear()
        for (_, layer, _), value in found.items():
            if not np.isfinite(value).all():
                raise ProbeError(
                    f"the attention weights of layer {layer} are not finite: use --dtype float32 or bfloat16, "
                    "or check the weights."
                )
        return found | {("bands", *key): value for key, value in self.bands.blocks().items()}

    def merge(self, blocks: Blocks, start: int, stop: int) -> None:
        self.bands.merge(dict(_split(blocks, "bands")), start, stop)
        for (layer, name), value in _split(blocks, "heads"):
            if name == "map":
                self.map = value
            elif name in ("seen", "lag_counts"):  # of one segment, and the same for all
                getattr(self, name)[layer] = value
            else:
                self.sums[layer, name] = self.sums.get((layer, name), 0) + value.astype(np.float64)

    def variables(self, segments: int, length: int) -> dict[str, tuple]:
        """Means over segments and query positions 1 … T − 1; NaN where a layer has fewer heads."""
        size, heads = len(self.layers), max(layer.heads for layer in self.layers.values())
        pairs = max(layer.pairs for layer in self.layers.values())
        out: dict[str, tuple] = {}

        def put(name: str, row: int, value, dims=(), shape=(), dtype=np.float64) -> None:
            if name not in out:
                out[name] = (("layer", "head", *dims), np.full((size, heads, *shape), np.nan, dtype=dtype))
            out[name][1][(row, *(slice(n) for n in value.shape))] = value

        rows = segments * (length - 1)
        for row, (index, layer) in enumerate(self.layers.items()):
            total = self.sums[index, "by_distance"]
            put("self_weight", row, total[:, 0] / rows)
            put("previous_weight", row, total[:, 1] / rows)
            put("sink_weight", row, self.sums[index, "sink"] / rows)
            for last in WITHIN:
                put(f"weight_last_{last}", row, total[:, :last].sum(1) / rows)
            for name in ("entropy", "mean_distance", "row_sum"):
                put(name, row, self.sums[index, name] / rows)
            seen = self.seen[index] * segments
            mean = np.divide(total, seen, out=np.full(total.shape, np.nan), where=seen > 0)
            put("weight_by_distance", row, mean, ("distance",), (length,), np.float32)
            if layer.rotates:
                counts = self.lag_counts[index] * segments
                sums = self.sums[index, "pair_profile"]
                mean = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
                put("pair_profile", row, mean, ("pair", "lag"), (pairs, len(self.lags)), np.float32)
        return self.bands.variables(segments) | out


def _split(blocks: Blocks, part: str) -> Iterator[tuple[tuple, np.ndarray]]:
    """The blocks of one part, without its name."""
    return ((key[1:], value) for key, value in blocks.items() if key[0] == part)


def roles(ds: xr.Dataset, thresholds: dict[str, float]) -> np.ndarray:
    """Role of every head, shape (layer, head): positional, induction, sink, other; empty where there is no head."""
    nearest = ds["weight_by_distance"].values[..., :NEAREST]
    positional = np.max(nearest, axis=-1, initial=0, where=np.isfinite(nearest)) >= thresholds["positional"]
    tests = (positional, ds["induction"] >= thresholds["induction"], ds["sink_weight"] >= thresholds["sink"])
    named = np.select(tests, ROLES[:3], ROLES[3])
    return np.where(np.isfinite(ds["self_weight"]), named, "")


def repeated(ckpt: Checkpoint, seed: int, limit: int) -> tuple[np.ndarray, int]:
    """Random tokens, none twice and none special, repeated once: the sequences, and how many tokens are repeated.

    They start with BOS where the tokenizer adds one by itself.
    """
    special, size, bos = _special(ckpt)
    usable = np.setdiff1d(np.arange(size), list(special))
    count = min(REPEAT, len(usable), (limit - len(bos)) // 2)
    rng = np.random.default_rng(seed)
    once = np.stack([rng.choice(usable, count, replace=False) for _ in range(SEQUENCES)])
    start = np.tile(np.array(bos, dtype=np.int64), (SEQUENCES, 1))
    return np.concatenate([start, once, once], axis=1), count


def _special(ckpt: Checkpoint) -> tuple[set[int], int, list[int]]:
    """Special tokens, size of the vocabulary that has a meaning, and the BOS that every text starts with."""
    try:
        tokenizer = ckpt.tokenizer
    except ProbeError:  # ids were given, and the checkpoint has none that can be read
        tokenizer = None
    if tokenizer is not None:
        bos = tokenizer.bos_token_id
        starts = bos is not None and list(tokenizer("a")["input_ids"][:1]) == [bos]
        return set(tokenizer.all_special_ids), min(len(tokenizer), ckpt.vocabulary), [bos] if starts else []
    config = ckpt.decoder.config
    ids = (getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
    flat = [one for value in ids if value is not None for one in (value if isinstance(value, list) else [value])]
    return set(flat), ckpt.vocabulary, []


def _induction(ckpt: Checkpoint, layers: dict[int, RotaryLayer], seed: int) -> tuple[np.ndarray, dict]:
    """Mean weight of every head on the token after the previous copy of the current one."""
    sequences, count = repeated(ckpt, seed, max(4, ckpt.claimed_length or 2 * REPEAT + 1))
    start = sequences.shape[1] - count
    score = np.full((len(layers), max(layer.heads for layer in layers.values())), np.nan)
    rows = {index: row for row, index in enumerate(layers)}

    def observe(call: Call) -> None:
        found = weight_sums(call, start)["by_distance"][:, count - 1] / (count * len(sequences))
        score[rows[call.layer], : len(found)] = found.cpu().numpy()

    ckpt.geometry(sequences.shape[1])  # refuses, at this length, what cannot be measured
    with Tap(ckpt.decoder, observe, layers=layers, stop=True) as tap:
        tap.run(torch.as_tensor(sequences, device=input_device(ckpt.decoder)))
    return score, {"repeated": count, "sequences": len(sequences), "seed": seed}


def heads(
    ckpt: Checkpoint,
    *,
    text=None,
    dataset: str | None = None,
    tokens=None,
    segments: int | None = None,
    length: int | None = None,
    batch: int | None = None,
    layers=None,
    positional: float = THRESHOLDS["positional"],
    induction: float = THRESHOLDS["induction"],
    sink: float = THRESHOLDS["sink"],
    attention_map: tuple[int, int] | None = None,
    formation: dict | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> xr.Dataset:
    """What each head attends to and its role, with the statistics of `bands`, over one reading of a text.

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
    positional, induction, sink : float
        Weights from which a head has that role, tried in this order: on one fixed distance of 0 … 4 tokens; on the
        token after the previous copy of the current one; on the first position.
    attention_map : (int, int), optional
        Layer and head whose attention map of the first segment is kept, averaged over cells to at most 512 a side.
    formation : dict, optional
        ``base`` and/or ``length`` the frequencies were formed with, for the predicted position.
    seed : int
        Of the random tokens of the induction score.
    progress : callable, optional
        Called with (segments read, segments in all).

    Returns
    -------
    Dataset
        ``self_weight``, ``previous_weight``, ``sink_weight``, ``weight_last_8`` (64, 512; the token itself counts),
        ``entropy`` (nats), ``mean_distance`` (tokens), ``row_sum``, ``induction``, ``role`` ``[layer, head]``: means
        over query positions from 1 on; ``weight_by_distance[layer, head, distance]`` over the query positions that
        see the key; ``pair_profile[layer, head, pair, lag]``: what each pair adds to the mean score; and all of
        `bands`.  The share of sink logits is left out of entropy and mean distance.
        After an interrupt, or a failure in a later batch (with a warning): what was measured until then, with
        attribute ``partial`` = 1.

    Raises
    ------
    UsageError
        Thresholds or a map that cannot be.
    ProbeError
        The model or the tokens cannot be read; activations are not finite.
    """
    check_sources(batch=batch)
    thresholds = {"positional": positional, "induction": induction, "sink": sink}
    check_thresholds(thresholds)
    chosen = segments_for(ckpt, text=text, dataset=dataset, tokens=tokens, segments=segments, length=length)
    count, size = chosen.ids.shape
    if size < 2:
        raise UsageError("segments of 1 token hold nothing to attend to but the token itself: use 2 or more.")
    geometry = ckpt.geometry(size)
    selected = choose_layers(geometry, layers)
    if not any(layer.rotates for layer in selected):
        raise ProbeError(
            "none of the chosen layers rotates, so there is no band to set beside the roles: choose others."
        )
    _check_map(attention_map, selected)
    observer = _Heads(selected, count, size, attention_map)
    batch = batch or default_batch(ckpt.device, size)
    score, repeats = _induction(ckpt, observer.layers, seed)
    options: dict[str, Any] = {
        "thresholds": thresholds,
        "induction": repeats,
        "map": attention_map,
        "formation": formation or {},
    }
    options |= {"layers": sorted(observer.layers), "batch": batch}
    done = measure(ckpt, "heads", chosen.ids, observer, batch, options, progress)
    ds = xr.Dataset(observer.variables(done, size), coords=coordinates(ckpt, selected, formation))
    ds["induction"] = (("layer", "head"), score)
    ds["role"] = (("layer", "head"), roles(ds, thresholds))
    ds = ds.assign_coords(distance=np.arange(size), lag=observer.lags)
    if attention_map:
        ds["attention_map"] = (("query", "key"), observer.map.astype(np.float32))
    read_so_far = replace(chosen, ids=chosen.ids[:done])
    ds.attrs = results.provenance(ckpt, geometry, read_so_far, "heads", options, partial=done < count)
    return results.describe(ds)


def check_thresholds(thresholds: dict[str, float]) -> None:
    """Refuse what is no share of attention."""
    for name, value in thresholds.items():
        if not 0 < value <= 1:
            raise UsageError(f"--{name} is {value}: give a share of the attention, above 0 and at most 1.")


def _check_map(chosen: tuple[int, int] | None, layers: list[RotaryLayer]) -> None:
    if chosen is None:
        return
    layer, head = chosen
    found = next((one for one in layers if one.layer == layer), None)
    if found is None:
        raise UsageError(f"--map {layer}.{head}: layer {layer} is not among those that are read.")
    if not 0 <= head < found.heads:
        raise UsageError(f"--map {layer}.{head}: layer {layer} has heads 0 to {found.heads - 1}.")
