"""Numbers of `spectrum`: products of q and k by distance, and the spectra made of them.  Arrays in, arrays out.

The first half works on tensors where the model runs, the second half on float64 arrays of what was averaged.
No published code takes the spectrum of an attention map (FoPE, arXiv 2412.17739, describes it in words); the
procedure is ours.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.fft import next_fast_len

from .. import theory
from ..rotary import RotaryLayer

HALF_WIDTH = 2.5  # bins on either side of a tone: the main lobe of a Hann window is two bins to a side
TURNS = 2  # a tone is resolvable when it turns at least twice within the distances
WINDOWS: dict[str, Callable[[int], np.ndarray]] = {
    "hann": np.hanning,
    "hamming": np.hamming,
    "blackman": np.blackman,
    "none": np.ones,
}
GROUPS = 4  # of consecutive segments, summed apart for the jackknife
_ROUNDING = 1e-6  # of its root mean square: what a float32 transform leaves of a curve that does not vary


# -- what a layer sees -----------------------------------------------------------------------------


def available(layer: RotaryLayer, distances: int) -> int:
    """Distances 0 … n − 1 that a layer can see, of those asked for."""
    return min(distances, layer.window) if layer.window else distances


def chunk_of(layer: RotaryLayer, length: int) -> int:
    """Tokens of an attention chunk where the layer attends within chunks shorter than the segment, else 0."""
    return layer.window if layer.layer_type == "chunked_attention" and layer.window < length else 0


def resolvable(layer: RotaryLayer, distances: int) -> np.ndarray:
    """Pairs that turn at least twice within the distances that the layer sees."""
    return theory.turns(layer.inv_freq, available(layer, distances)) >= TURNS


# -- sums over positions, on the model's device ----------------------------------------------------


def lag_sums(q, k, distances: int, *, total: bool = False) -> torch.Tensor:
    """Sum over m of ``q[m] · k[m − Δ]`` for Δ = 0 … distances − 1, by FFT: never a token × token map.

    Parameters
    ----------
    q, k : sequence of Tensor, shapes (batch, head, token, pair) and (batch, kv_head, token, pair)
        Members of the pairs, one tensor each; the product of a pair is the sum over its members.
    total : bool
        Sum over the pairs as well.

    Returns
    -------
    Tensor, shape (head, pair, distance), or (head, distance) if `total`
        Summed over the batch; float32, or float64 where q is.

    Notes
    -----
    The zeros that follow the tokens are as many as there are distances at least, so nothing wraps around.  Keys
    are transformed once for all the heads that share them, and heads go in blocks that fit a cache.
    """
    batch, heads, length, pairs = q[0].shape
    kv_heads = k[0].shape[1]
    shared = heads // kv_heads
    size = next_fast_len(length + distances, real=True)
    kind = torch.float64 if q[0].dtype == torch.float64 else torch.float32
    budget = 2**23 if q[0].device.type == "cpu" else 2**28  # bytes
    step = max(1, budget // (8 * batch * (size // 2 + 1) * pairs))  # heads in a block
    groups = max(1, step // shared)  # key heads in a block; where not even one has room, its heads are split
    shape = (kv_heads, shared, distances) if total else (kv_heads, shared, pairs, distances)
    out = torch.empty(shape, dtype=kind, device=q[0].device)
    q = [part.unflatten(1, (kv_heads, shared)) for part in q]

    def transform(x):
        return torch.fft.rfft(x.transpose(-2, -1).to(kind), n=size)

    for first in range(0, kv_heads, groups):
        some = slice(first, first + groups)
        keys = [transform(part[:, some, None]).conj().resolve_conj() for part in k]
        for start in range(0, shared, step):
            block = slice(start, start + step)
            products = sum(
                transform(part[:, some, block]).mul_(key).sum(0) for part, key in zip(q, keys, strict=True)
            )  # [kv_head, head, pair, frequency]
            if total:
                products = products.sum(-2)
            out[some, block] = torch.fft.irfft(products, n=size)[..., :distances]
    return out.flatten(0, 1)


def without_first(k: torch.Tensor) -> torch.Tensor:
    """A copy of the keys [batch, kv_head, token, channel] in which the first position is zero."""
    k = k.clone()
    k[:, :, 0] = 0
    return k


def fold(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """Chunks of `chunk` tokens as a longer batch, the last one filled with zeros (chunked attention)."""
    batch, heads, length, width = x.shape
    x = torch.nn.functional.pad(x, (0, 0, 0, -length % chunk))
    return x.reshape(batch, heads, -1, chunk, width).transpose(1, 2).reshape(-1, heads, chunk, width)


def diagonal_sums(weights: torch.Tensor, first: int, distances: int) -> torch.Tensor:
    """Sum over the query rows of ``weights[…, m, m − Δ]`` for Δ = 0 … distances − 1.

    Parameters
    ----------
    weights : Tensor, shape (head, row, key)
        Rows of consecutive query positions, from `first` on.

    Returns
    -------
    Tensor, shape (head, distance)
    """
    heads, rows, keys = weights.shape
    padded = torch.nn.functional.pad(weights, (distances, 0)).contiguous()  # key n in column n + distances
    width = keys + distances
    skewed = padded.as_strided((heads, rows, distances), (rows * width, width + 1, 1), first + 1)
    return skewed.sum(1).flip(-1)


def counts(length: int, distances: int, chunk: int = 0) -> np.ndarray:
    """Number of positions m with m − Δ ≥ 1 (in the same chunk), for Δ = 0 … distances − 1."""
    lag = np.arange(distances)
    sizes = [length] if not chunk else [min(chunk, length - start) for start in range(0, length, chunk)]
    return sum(np.maximum(size - lag, 0) for size in sizes) - (lag < sizes[0])


# -- spectra of averages, on the host --------------------------------------------------------------


def frequencies(distances: int) -> np.ndarray:
    """Bins 0 … distances // 2 of the spectrum, rad/token."""
    return 2 * np.pi * np.arange(distances // 2 + 1) / distances


def power_spectrum(profile: np.ndarray, window: str = "hann") -> np.ndarray:
    """Squared magnitude of the real DFT over the last axis, mean removed and tapered.

    A profile that does not vary beyond float32 rounding has zero power.

    Parameters
    ----------
    profile : ndarray, shape (..., distance)
    window : {"hann", "hamming", "blackman", "none"}

    Returns
    -------
    ndarray, shape (..., distance // 2 + 1)
        Bins 0 … N/2, each counted once.
    """
    centred = _centred(profile)
    return np.abs(np.fft.rfft(centred * WINDOWS[window](profile.shape[-1]), axis=-1)) ** 2


def _centred(profile: np.ndarray) -> np.ndarray:
    centred = profile - profile.mean(axis=-1, keepdims=True)
    still = (centred**2).mean(axis=-1) <= _ROUNDING**2 * (profile**2).mean(axis=-1)
    centred[still] = 0
    return centred


def near(frequency, distances: int) -> np.ndarray:
    """Which bins lie within `HALF_WIDTH` of each frequency: bool, shape (..., bin)."""
    center = np.asarray(frequency, dtype=float)[..., None] * distances / (2 * np.pi)
    return np.abs(np.arange(distances // 2 + 1) - center) <= HALF_WIDTH


def share_near(power: np.ndarray, bins: np.ndarray) -> np.ndarray:
    """Share of the power in the chosen bins; NaN where there is no power."""
    total = power.sum(axis=-1)
    inside = (power * bins).sum(axis=-1)
    return np.divide(inside, total, out=np.full(inside.shape, np.nan), where=np.broadcast_to(total > 0, inside.shape))


def tone_share(frequency, distances: int, window: str = "hann") -> np.ndarray:
    """Share of its power that a pure tone has near itself, averaged over its phase: the estimator's own limit."""
    angle = np.asarray(frequency, dtype=float)[..., None] * np.arange(distances)
    power = power_spectrum(np.cos(angle), window) + power_spectrum(np.sin(angle), window)
    return share_near(power, near(frequency, distances))


def tone_r2(profile: np.ndarray, frequency: np.ndarray) -> np.ndarray:
    """R² of the least-squares fit by the cosine and sine of one frequency and a constant.

    Parameters
    ----------
    profile : ndarray, shape (head, pair, distance)
    frequency : ndarray, shape (pair,)
        rad/token.

    Returns
    -------
    ndarray, shape (head, pair)
        NaN where the profile does not vary or the frequency is 0.
    """
    angle = frequency[:, None] * np.arange(profile.shape[-1])
    # 1, sin a and sin² a/2 span what 1, cos a and sin a do, and stay independent where a is small
    columns = np.stack([np.ones_like(angle), np.sin(angle), np.sin(angle / 2) ** 2], axis=-1)
    largest = np.abs(columns).max(axis=1, keepdims=True)
    basis = np.linalg.qr(columns / np.where(largest > 0, largest, 1))[0][..., 1:]
    centred = _centred(profile)
    fitted = (np.einsum("hpd,pdc->hpc", centred, basis) ** 2).sum(axis=-1)
    varied = (centred**2).sum(axis=-1)
    return np.divide(fitted, varied, out=np.full(varied.shape, np.nan), where=(varied > 0) & (frequency > 0))


# -- errors over segments --------------------------------------------------------------------------


def group_of(segment: int, segments: int) -> int:
    """Group of consecutive segments that one of `segments` belongs to."""
    return segment * min(GROUPS, segments) // segments


def runs(start: int, stop: int, segments: int) -> list[tuple[int, slice]]:
    """Groups of the segments of a batch, and where in the batch their members are."""
    found: list[tuple[int, slice]] = []
    for segment in range(start, stop):
        group, here = group_of(segment, segments), segment - start
        if found and found[-1][0] == group:
            here = found.pop()[1].start
        found.append((group, slice(here, segment - start + 1)))
    return found


def leave_one_out(sums: np.ndarray, members: np.ndarray) -> list[np.ndarray]:
    """Means over the segments of all groups but one, for each group that has any.

    Parameters
    ----------
    sums : ndarray, shape (group, ...)
    members : ndarray, shape (group,)
        Segments in each sum.
    """
    total, count = sums.sum(axis=0), members.sum()
    return [(total - sums[g]) / (count - members[g]) for g in np.flatnonzero(members) if count > members[g]]


def jackknife(whole: np.ndarray, parts: list[np.ndarray], members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Limit and standard error of a statistic from its values without each group (delete-a-group, unequal groups).

    Parameters
    ----------
    whole : ndarray
        The statistic of everything.
    parts : list of ndarray
        The statistic without each group, as from `leave_one_out`.
    members : ndarray, shape (group,)

    Returns
    -------
    (ndarray, ndarray)
        The statistic with the part taken off that falls with the number of segments, and its standard error; NaN with
        fewer than two groups.

    Notes
    -----
    Busing, Meijer and van der Leeden, "Delete-m jackknife for unequal m" (Statistics and Computing, 1999).
    """
    whole = np.asarray(whole, dtype=float)
    if len(parts) < 2:
        return np.full(whole.shape, np.nan), np.full(whole.shape, np.nan)
    members = members[members > 0]
    h = (members.sum() / members).reshape(-1, *[1] * whole.ndim)
    pseudo = h * whole - (h - 1) * np.array(parts)
    estimate = (pseudo / h).sum(axis=0)
    return estimate, np.sqrt(((pseudo - estimate) ** 2 / (h - 1)).mean(axis=0))


def errors(sums: np.ndarray, members: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray | float]):
    """A statistic of the mean over segments, its limit for endless text, and its standard error."""
    whole = np.asarray(statistic(sums.sum(axis=0) / members.sum()))
    return whole, *jackknife(whole, [np.asarray(statistic(mean)) for mean in leave_one_out(sums, members)], members)
