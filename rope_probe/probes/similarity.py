"""similarity: do similar tokens get more attention?

Source: the rebuttal of "Base of RoPE Bounds Context Length" (Men et al., arXiv 2405.14591): Spearman correlation of
hidden-state cosine similarity and attention, and the same at fixed distance.  Its numbers and code are not public.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
import xarray as xr

from .. import results
from ..accumulate import mean_and_error
from ..attention import inner, logits, scores_at, visible, visible_at
from ..checkpoints import Checkpoint
from ..errors import ProbeError, UsageError
from ..rotary import RotaryLayer
from ..tap import Call
from ..texts import check_sources, segments_for
from .common import choose_layers, default_batch
from .ranks import spearman
from .reading import Blocks, Observer, measure

FEWEST_KEYS = 32  # a row with fewer keys is left out
QUERIES = 64  # rows per segment, unless asked otherwise
_ROWS = 64  # rows taken at a time, to bound memory


def sample_rows(segment: int, length: int, sink: int, queries: int | str, seed: int) -> np.ndarray:
    """Query positions of one segment, ascending: all that can have enough keys, or a sample of them.

    The sample depends on seed and segment alone: the same for every layer, batch size and number of segments.
    """
    rows = np.arange(sink + FEWEST_KEYS, length)
    if isinstance(queries, str) or queries >= len(rows):
        return rows
    return np.sort(np.random.default_rng([seed, segment]).choice(rows, queries, replace=False))


def cosines(hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states scaled to norm 1, in float64; a state of zeros stays one.

    Products of these are rounded to float32 before they are ranked, so that equal states give equal similarities
    however a library orders its sums.
    """
    states = hidden.double()
    return states.mul_(inner(states, states).sqrt_().clamp_min_(1e-300).reciprocal_()[..., None])


def _blocks(rows: np.ndarray, tight: bool) -> Iterator[np.ndarray]:
    """Runs of neighbouring rows; tight ones have nearly as many keys, so that little is padding."""
    start = 0
    while start < len(rows):
        size = int(np.searchsorted(rows[start:], 64 + 1.25 * rows[start])) if tight else _ROWS
        yield rows[start : start + min(_ROWS, size)]
        start += min(_ROWS, size)


def free_rho(call: Call, states: torch.Tensor, item: int, rows: np.ndarray, sink: int) -> tuple[torch.Tensor, ...]:
    """Spearman correlation of similarity and score over the keys of each query row, of one segment and layer.

    Parameters
    ----------
    call : Call
    states : Tensor of float64, shape (batch, token, hidden)
        From `cosines`.
    item : int
        Which of the batch.
    rows : ndarray of int
        Query positions, ascending.
    sink : int
        First position that counts as key.

    Returns
    -------
    (total, count, rows) : tuple of Tensor
        Sum over rows and number of rows that have a value, shape (head,); number of rows with enough keys.
    """
    device, heads = call.q.device, call.q.shape[1]
    total = torch.zeros(heads, dtype=torch.float64, device=device)
    count, full = torch.zeros_like(total), torch.zeros((), dtype=torch.int64, device=device)
    own = replace(call, mask=None if call.mask is None else call.mask[min(item, len(call.mask) - 1)][None])
    for block in _blocks(rows, tight=device.type == "cpu"):  # elsewhere padding costs less than another call
        index = torch.as_tensor(block, device=device)
        keys = torch.arange(int(block[-1]), device=device)
        seen = visible(own, index)[0, ..., : len(keys)] & (keys >= sink) & (keys < index[:, None])
        some = seen.flatten(0, -2).any(0).nonzero()
        if len(some) < FEWEST_KEYS:
            continue
        span = slice(int(some[0]), int(some[-1]) + 1)
        seen = seen[..., span]
        similar = (states[item, index] @ states[item, span].T).float().expand(seen.shape)
        rho = spearman(similar, logits(call, call.q[item, :, index], call.k[item, :, span]), seen)
        enough = seen.sum(-1) >= FEWEST_KEYS
        rho = torch.where(enough, rho, torch.nan)
        total += rho.nansum(-1)
        count += rho.isfinite().sum(-1)
        full += enough.any(0).sum()
    return total, count, full


def fixed_rho(call: Call, states: torch.Tensor, distances: list[int], sink: int) -> torch.Tensor:
    """Spearman correlation over query positions, key always `distance` tokens back, of a batch and layer.

    Returns
    -------
    Tensor of float64, shape (batch, head, distance)
    """
    (batch, length, _), heads = states.shape, call.q.shape[1]
    if not distances:
        return states.new_zeros((batch, heads, 0))
    # one row for each distance, short ones padded; heads first, for they share the similarities
    shape = (batch, len(distances), length - sink - min(distances))
    similar, score = (torch.zeros(size, device=states.device) for size in (shape, (heads, *shape)))
    seen = torch.zeros((heads, *shape), dtype=torch.bool, device=states.device)
    for row, distance in enumerate(distances):
        size = length - sink - distance
        similar[:, row, :size] = inner(states[:, sink + distance :], states[:, sink : length - distance])
        score[:, :, row, :size] = scores_at(call, distance)[..., sink:].transpose(0, 1)
        seen[:, :, row, :size] = visible_at(call, distance)[..., sink:].transpose(0, 1)
    alike = call.mask is None or call.mask.dim() < 4 or call.mask.shape[1] == 1  # what all heads see
    seen = seen[0] if alike else seen
    return spearman(similar.expand(seen.shape), score, seen).transpose(0, 1)


class _Similarity(Observer):
    """Correlations of every segment, layer and head."""

    hidden = True
    state = ("rho", "at_distance", "used")

    def __init__(self, layers: list[RotaryLayer], heads: list[int], rows: list[np.ndarray], distances, sink: int):
        self.layers = {layer.layer: layer for layer in layers}
        self.heads, self.rows, self.distances, self.sink = heads, rows, distances, sink
        shape = (len(rows), len(layers), len(heads))
        self.rho = np.full(shape, np.nan)
        self.at_distance = np.full((*shape, len(distances)), np.nan)
        self.used = np.zeros(shape[:2], dtype=np.int64)
        self._pending: dict[int, dict[str, torch.Tensor]] = {}

    def begin(self, start: int, stop: int) -> None:
        self._pending.clear()
        self._batch = self.rows[start:stop]

    def __call__(self, call: Call) -> None:
        call = self._reduced(call)
        assert call.hidden is not None  # _reduced has refused it
        states = cosines(call.hidden.to(call.q.device))
        rows = self._batch
        free = [free_rho(call, states, item, own, self.sink) for item, own in enumerate(rows)]
        total, count, used = (torch.stack(values) for values in zip(*free, strict=True))
        near = fixed_rho(call, states, self.distances, self.sink)
        # one sum each: not finite as soon as anything in it is not
        finite = torch.stack([x.sum().isfinite() for x in (states, call.q, call.k)])
        self._pending[call.layer] = {"rho": total / count, "near": near, "used": used, "finite": finite}

    def _reduced(self, call: Call) -> Call:
        """The call with the chosen heads alone, in float32."""
        if call.hidden is None or call.hidden.dim() != 3:
            raise ProbeError(f"layer {call.layer} takes no plain residual stream, so similarity cannot be measured.")
        count, group = call.q.shape[1], call.q.shape[1] // call.k.shape[1]
        q, k, mask = call.q.float(), call.k.float(), call.mask
        heads = [head for head in self.heads if head < count]
        if len(heads) < count:
            index = torch.as_tensor(heads, device=q.device)
            q, k = q[:, index], k[:, index // group]
            mask = mask[:, index] if mask is not None and mask.dim() == 4 and mask.shape[1] > 1 else mask
        return replace(call, q=q, k=k, mask=mask)

    def blocks(self) -> Blocks:
        found: dict = {}
        for index, kept in self._pending.items():
            values = {name: value.cpu().numpy() for name, value in kept.items()}
            for ok, what in zip(values.pop("finite"), ("hidden states", "queries", "keys"), strict=True):
                if not ok:
                    raise ProbeError(
                        f"the {what} of layer {index} are not finite: use --dtype float32 or bfloat16, "
                        "or check the weights."
                    )
            found |= {(index, name): value for name, value in values.items()}
        self._pending.clear()
        return found

    def merge(self, blocks: Blocks, start: int, stop: int) -> None:
        for row, (index, layer) in enumerate(self.layers.items()):
            if (index, "rho") not in blocks:
                continue
            known = [i for i, head in enumerate(self.heads) if head < layer.heads]
            self.rho[start:stop, row, known] = blocks[index, "rho"]
            self.at_distance[start:stop, row, known] = blocks[index, "near"]
            self.used[start:stop, row] = blocks[index, "used"]

    def variables(self, done: int) -> dict:
        """Data variables of the result of the first `done` segments."""
        rho, near = self.rho[:done], self.at_distance[:done]
        mean, error = mean_and_error(rho)
        mean_near, error_near = mean_and_error(near)
        dims = ("layer", "head", "distance")
        return {
            "rho": (dims[:2], mean),
            "rho_se": (dims[:2], error),
            "rho_segment": (("segment", *dims[:2]), rho),
            "rho_at_distance": (dims, mean_near),
            "rho_at_distance_se": (dims, error_near),
            "rho_at_distance_segment": (("segment", "layer", "distance"), mean_and_error(near, axis=2)[0]),
            "query_rows": (("segment", "layer"), self.used[:done]),
        }


def similarity(
    ckpt: Checkpoint,
    *,
    text=None,
    dataset: str | None = None,
    tokens=None,
    segments: int | None = None,
    length: int | None = None,
    batch: int | None = None,
    layers=None,
    heads=None,
    queries: int | str = QUERIES,
    sink: int = 1,
    distances=None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> xr.Dataset:
    """Spearman correlation of hidden-state similarity and attention score, for every layer and head.

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
    heads : iterable of int, optional
        Only these query heads.
    queries : int or "all"
        Query rows per segment, sampled without replacement from those with 32 keys, the same rows in every layer.
    sink : int
        Keys before this position are left out (default 1: the first one, on which many heads rest).
    distances : iterable of int, optional
        Distances of `rho_at_distance`; default 1, 2, 4, … up to half the segment.
    seed : int
        Of the sample of rows.
    progress : callable, optional
        Called with (segments read, segments in all), first with 0.

    Returns
    -------
    Dataset
        ``rho[layer, head]`` (mean over rows of a segment, then over segments), ``rho_segment``, ``rho_se`` (standard
        error over segments), ``rho_at_distance[layer, head, distance]`` with ``_se``,
        ``rho_at_distance_segment[segment, layer, distance]`` (mean over heads), and ``query_rows[segment, layer]``, the
        rows with at least 32 keys.  NaN where one side is constant, where a layer has no such head, where no row has
        32 keys, and at distances beyond a window.
        After an interrupt, or a failure in a later batch (with a warning): what was measured until then, with
        attribute ``partial`` = 1.

    Raises
    ------
    UsageError
        Sink, queries, heads or distances that cannot be.
    ProbeError
        The model or the tokens cannot be read; activations are not finite.

    Notes
    -----
    Ranked are the cosine similarity of the residual stream entering the layer (computed in float64, rounded to
    float32), and the pre-softmax score after scale and soft-cap, computed in float32 from the model's own q and k
    whatever its dtype.  Scores that a low-precision model would itself have rounded to the same value are told apart.
    Keys are the visible positions n with sink ≤ n < m.
    """
    queries, sink = check_options(queries, sink, seed)
    check_sources(batch=batch)
    chosen = segments_for(ckpt, text=text, dataset=dataset, tokens=tokens, segments=segments, length=length)
    count, size = chosen.ids.shape
    distances = _distances(distances, size, sink)
    geometry = ckpt.geometry(size)
    selected = choose_layers(geometry, layers)
    heads = _heads(heads, max(layer.heads for layer in selected))
    rows = [sample_rows(segment, size, sink, queries, seed) for segment in range(count)]
    observer = _Similarity(selected, heads, rows, distances, sink)
    batch = batch or default_batch(ckpt.device, size)
    options = {"queries": queries, "sink": sink, "seed": seed, "heads": heads, "batch": batch}
    options["layers"] = sorted(observer.layers)
    done = measure(ckpt, "similarity", chosen.ids, observer, batch, options, progress)
    ds = xr.Dataset(observer.variables(done), coords=results.layer_coordinates(selected))
    ds = ds.assign_coords(head=heads, distance=distances)
    read_so_far = replace(chosen, ids=chosen.ids[:done])
    ds.attrs = results.provenance(ckpt, geometry, read_so_far, "similarity", options, partial=done < count)
    return results.describe(ds)


def check_options(queries: int | str, sink: int, seed: int) -> tuple[int | str, int]:
    """Refuse what can be no sample of rows, sink or seed, before a model is opened for it."""
    if queries != "all" and (not isinstance(queries, (int, np.integer)) or queries < 1):
        raise UsageError(f"--queries is {queries!r}: give a positive number of rows, or all.")
    if sink < 0:
        raise UsageError(f"--sink is {sink}: give the number of leading positions to leave out as keys, 0 or more.")
    if seed < 0:
        raise UsageError(f"--seed is {seed}: give 0 or a positive number.")
    return queries if queries == "all" else int(queries), int(sink)


def _distances(distances, length: int, sink: int) -> list[int]:
    if length <= sink + FEWEST_KEYS:
        raise UsageError(
            f"no query of a segment of {length} tokens has {FEWEST_KEYS} keys from position {sink} on: "
            f"give --length {sink + FEWEST_KEYS + 1} or more."
        )
    if distances is None:
        return [2**i for i in range((length // 2).bit_length()) if 2**i + sink < length]
    found = sorted({int(distance) for distance in distances})
    if found and not 1 <= found[0] <= found[-1] < length - sink:
        wrong = found[0] if found[0] < 1 else found[-1]
        raise UsageError(
            f"--distances has {wrong}: in segments of {length} tokens give numbers from 1 to {length - sink - 1}."
        )
    return found


def _heads(heads, count: int) -> list[int]:
    found = list(range(count)) if heads is None else sorted({int(head) for head in heads})
    if not found or not 0 <= found[0] <= found[-1] < count:
        wrong = next((head for head in found if not 0 <= head < count), None)
        raise UsageError(f"there is no head {wrong}: the chosen layers have heads 0 to {count - 1}.")
    return found
