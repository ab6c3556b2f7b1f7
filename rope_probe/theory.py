"""Closed forms of rotary position embedding: predicted band, floor, context bound.

Nothing here reads a model. Frequencies are in radians per token, lengths and wavelengths in tokens, pairs are
0-based with pair 0 the fastest, and all arithmetic is float64.

References
----------
Base of RoPE Bounds Context Length, arXiv 2405.14591; Scaling Laws of RoPE-based Extrapolation, arXiv 2310.05209;
FoPE, arXiv 2412.17739; YaRN, arXiv 2309.00071; Oka et al., frequency bands in RoPE, ICLR 2026.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .errors import ProbeError
from .scaling import inverse_frequencies, ladder

WORK = 20_000_000_000  # cosines that are added up before a sum is given up: about a minute

__all__ = [
    "PUBLISHED_BASES",
    "RULES",
    "base_grid",
    "below_floor",
    "bound_length",
    "cosine_blocks",
    "cosine_sum",
    "count_negative",
    "critical_dimension",
    "first_negative",
    "inverse_frequencies",
    "ladder",
    "predicted_pair",
    "smallest_base",
    "smallest_bases",
    "turns",
    "undertrained",
    "uniform_variance",
    "wavelength",
]

# --- where the band should be ----------------------------------------------------------------------------------------


def uniform_variance(x):
    """Variance of cos(θ) for θ uniform on [0, x], ``V(x) = 1/2 + sin 2x/(4x) − (sin x/x)²`` (Oka et al.).

    Parameters
    ----------
    x : float or ndarray
        Phase that a pair sweeps within the length, radians, above 0.
    """
    x = np.asarray(x, dtype=float)
    return 0.5 + np.sin(2 * x) / (4 * x) - (np.sin(x) / x) ** 2


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Bisection down to neighbouring floats."""
    sign = function(low) > 0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if (function(middle) > 0) == sign else (low, middle)
    return low


def _variance_slope(x: float) -> float:
    """Derivative of `uniform_variance`; one root, the maximum, between 3 and 4.2."""
    s, c = math.sin(x), math.cos(x)
    return math.cos(2 * x) / (2 * x) - math.sin(2 * x) / (4 * x * x) - 2 * s * (x * c - s) / x**3


#: Prediction rules: phase x that the band's pair sweeps within the length. Solved, not typed in:
#: 3.657210 (largest Var cos), π, 4.493409 (tan x = x: largest eigenvalue of the covariance of cos and sin), 2π.
RULES: dict[str, float] = {
    "variance": _root(_variance_slope, 3.0, 4.2),
    "half_turn": math.pi,
    "eigenvalue": _root(lambda x: math.sin(x) - x * math.cos(x), 4.0, 4.7),
    "full_turn": 2 * math.pi,
}


def predicted_pair(base: float, length: float, pairs: int, rule: str = "variance") -> float:
    """Real-valued pair index j with ``base^(−j/pairs) · length = x``.

    Parameters
    ----------
    base, length : float
        Base and length (tokens) of the stage in which the band formed.
    pairs : int
        Rotary pairs of a head.
    rule : {"variance", "half_turn", "eigenvalue", "full_turn"}
        A key of `RULES`; "variance" is the j* of Oka et al., "full_turn" the floor.

    Returns
    -------
    float
        May lie outside 0 … pairs − 1: the band is then off the ladder.

    Raises
    ------
    ValueError
        Unknown rule; base not above 1, length or pairs not positive.
    """
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r}: choose from {', '.join(RULES)}.")
    return _pair_sweeping(base, length, pairs, RULES[rule])


def _pair_sweeping(base: float, length: float, pairs: int, phase: float) -> float:
    if not (base > 1 and length > 0 and pairs > 0):
        raise ValueError(f"base {base}, length {length}, pairs {pairs}: base must be above 1, the others above 0.")
    return pairs * math.log(length / phase) / math.log(base)


# --- the floor: pairs that never finish a turn -----------------------------------------------------------------------


def wavelength(inv_freq) -> np.ndarray:
    """Tokens per turn, ``2π / inv_freq``; infinite where the frequency is 0, without a warning."""
    inv_freq = np.asarray(inv_freq, dtype=float)
    return np.divide(2 * math.pi, inv_freq, out=np.full_like(inv_freq, math.inf), where=inv_freq != 0)


def turns(inv_freq, length: float) -> np.ndarray:
    """Turns that each pair makes within `length` tokens (r(d) in YaRN's "NTK-by-parts")."""
    return np.asarray(inv_freq, dtype=float) * length / (2 * math.pi)


def below_floor(inv_freq, length: float) -> np.ndarray:
    """Pairs that rotate but never finish a turn, ``0 < inv_freq < 2π/length`` (FoPE, floor frequency).

    The same set has two more names: YaRN's turns < 1, and for plain RoPE the pairs from `critical_dimension` on.
    Pairs of frequency 0 are no part of it.
    """
    count = turns(inv_freq, length)
    return (count > 0) & (count < 1)


def undertrained(inv_freq, length: float) -> int:
    """Number of pairs below the floor."""
    return int(below_floor(inv_freq, length).sum())


def critical_dimension(base: float, length: float, pairs: int) -> int:
    """Channels that see at least one turn in plain RoPE, ``2·ceil(pairs · log_base(length / 2π))``.

    Source: arXiv 2310.05209, critical dimension for extrapolation; held within 0 … 2·pairs. Half of it is the first
    pair below the floor.
    """
    return 2 * min(max(math.ceil(_pair_sweeping(base, length, pairs, 2 * math.pi)), 0), pairs)


# --- the bound: how far the base carries -----------------------------------------------------------------------------

#: Table 2 of arXiv 2405.14591: smallest base by length in tokens (the paper does not say whether 1k is 1000 or 1024),
#: head_dim 128.
PUBLISHED_BASES: dict[str, float] = dict(
    zip(
        ("1k", "2k", "4k", "8k", "16k", "32k", "64k", "128k", "256k", "512k", "1M"),
        (4.3e3, 1.6e4, 2.7e4, 8.4e4, 3.1e5, 6.4e5, 2.1e6, 7.8e6, 3.6e7, 6.4e7, 5.1e8),
        strict=True,
    )
)


def _frequencies_and_weights(inv_freq, weights) -> tuple[np.ndarray, np.ndarray]:
    inv_freq = np.asarray(inv_freq, dtype=float)
    weights = np.ones_like(inv_freq) if weights is None else np.asarray(weights, dtype=float)
    if inv_freq.ndim != 1 or weights.shape != inv_freq.shape:
        raise ValueError(f"inv_freq has shape {inv_freq.shape}, weights {weights.shape}: give one number per pair.")
    for name, values in (("inv_freq", inv_freq), ("weights", weights)):
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(f"{name} holds negative or non-finite numbers: leave padding out.")
    return inv_freq, weights


def cosine_sum(inv_freq, m, weights=None, unrotated: float = 0) -> np.ndarray:
    """``B(m) = Σ weight · cos(m · inv_freq) + unrotated``, the B of arXiv 2405.14591.

    With unit weights it is, up to a positive factor, by how much a similar token's expected score at distance m exceeds
    a random one's; where it is negative the model prefers the random token.

    Parameters
    ----------
    inv_freq : array_like, shape (pairs,)
        Radians per token. A pair of frequency 0 adds its weight at every m.
    m : array_like of int
        Distances in tokens, any shape.
    weights : array_like, shape (pairs,), optional
        Non-negative; all 1 by default.
    unrotated : float
        Pairs of the head that take no part in the rotation (partial rotary): each adds 1.

    Returns
    -------
    ndarray of float64, shape of `m`
    """
    inv_freq, weights = _frequencies_and_weights(inv_freq, weights)
    m = np.asarray(m, dtype=float)
    total = np.full(m.shape, float(unrotated))
    for frequency, weight in zip(inv_freq, weights, strict=True):  # pair by pair: no [m, pairs] array
        total += weight * np.cos(m * frequency)
    return total


def cosine_blocks(inv_freq, limit: int, weights=None, unrotated: float = 0) -> Iterator[tuple[int, np.ndarray]]:
    """B(m) at every integer m in [0, limit], as consecutive blocks ``(first m, values)``.

    A block is one matrix product: with m = a + b, ``cos(ωm) = cos(ωa) cos(ωb) − sin(ωa) sin(ωb)``, so a few thousand
    cosines per block replace one per pair and distance. Blocks grow from 4096 to 262144 distances, so that a sum which
    turns negative early costs little. Values near zero are computed again term by term, so their sign is exact.
    """
    inv_freq, weights = _frequencies_and_weights(inv_freq, weights)
    doubt = 1e-6 * (weights.sum() + abs(unrotated))
    columns, rows, start = 256, 16, 0
    # A stack of products so small that the linear algebra library keeps each in one thread: waking others for them
    # costs more than it gains, and very much more on a busy machine.
    chunk = max(1, min(rows, 512 >> max(len(inv_freq) - 1, 0).bit_length()))  # a power of two, so it divides rows
    fine = np.outer(inv_freq, np.arange(columns))
    fine = np.concatenate([weights[:, None] * np.cos(fine), -weights[:, None] * np.sin(fine)])
    while start <= limit:
        if start * len(inv_freq) > WORK:
            raise ProbeError(
                f"B(m) of {len(inv_freq)} pairs is followed up to m = {start:,} and no further, for the time it takes: "
                "give a smaller length or limit."
            )
        coarse = np.outer(start + columns * np.arange(rows), inv_freq)
        coarse = np.concatenate([np.cos(coarse), np.sin(coarse)], axis=1).reshape(rows // chunk, chunk, len(fine))
        values = (coarse @ fine).ravel()[: limit + 1 - start]
        values += unrotated
        near = np.flatnonzero(np.abs(values) < doubt)
        values[near] = cosine_sum(inv_freq, start + near, weights, unrotated)
        yield start, values
        start += rows * columns
        rows = min(2 * rows, 1024)


def first_negative(inv_freq, limit: int = 2_000_000, unrotated: float = 0, weights=None) -> int | None:
    """First integer m in [0, limit] with B(m) < 0; None where there is none. Arguments as in `cosine_sum`."""
    for start, values in cosine_blocks(inv_freq, limit, weights, unrotated):
        negative = values < 0
        if negative.any():
            return start + int(negative.argmax())
    return None


def bound_length(inv_freq, limit: int = 2_000_000, unrotated: float = 0, weights=None) -> int | None:
    """L_bound: the largest L with B(m) ≥ 0 for every integer m in [0, L]; None where B stays so up to `limit`.

    Arguments as in `cosine_sum`. Source: arXiv 2405.14591, the L of its definition of B.
    """
    first = first_negative(inv_freq, limit, unrotated, weights)
    return None if first is None else first - 1


def count_negative(inv_freq, limit: int, unrotated: float = 0, weights=None) -> int:
    """Number of integers m in [0, limit] with B(m) < 0 (arXiv 2405.14591, table 4). Arguments as in `cosine_sum`."""
    return sum(int((values < 0).sum()) for _, values in cosine_blocks(inv_freq, limit, weights, unrotated))


def base_grid(largest: float = 1e16) -> Iterator[float]:
    """Bases of two significant digits, a.b × 10^x, from 1.0 upwards."""
    for exponent in range(math.ceil(math.log10(largest))):
        for digits in range(10, 100):
            yield float(f"{digits}e{exponent - 1}")  # parsed, not multiplied: 4.3e3 is exactly 4300


def smallest_bases(
    lengths: Sequence[int], pairs: int, *, zero_pairs: int = 0, unrotated: float = 0
) -> list[float | None]:
    """For each length the first base of `base_grid` with B(m) ≥ 0 at every integer m in [0, length].

    Parameters
    ----------
    lengths : sequence of int
        Tokens, in any order.
    pairs : int
        Pairs of the frequency ladder.
    zero_pairs : int
        How many of them, the slowest, do not rotate (rope type ``proportional``).
    unrotated : float
        Pairs outside the rotary part.

    Returns
    -------
    list of float or None
        In the order of `lengths`; None where no base of the grid holds.

    Notes
    -----
    The grid is walked upwards and never bisected, since holding is not monotone in the base. One walk serves all
    lengths: a base that holds for a length holds for every shorter one. Source: arXiv 2405.14591, table 2.
    """
    found: dict[int, float] = {}
    waiting = sorted(set(lengths), reverse=True)
    for base in base_grid():
        if not waiting:
            break
        inv_freq = ladder(base, pairs)
        inv_freq[pairs - zero_pairs :] = 0.0
        first = first_negative(inv_freq, waiting[0], unrotated)
        while waiting and (first is None or first > waiting[-1]):
            found[waiting.pop()] = base
    return [found.get(length) for length in lengths]


def smallest_base(length: int, pairs: int, *, zero_pairs: int = 0, unrotated: float = 0) -> float | None:
    """The first base of the grid that carries `length`; see `smallest_bases`."""
    return smallest_bases([length], pairs, zero_pairs=zero_pairs, unrotated=unrotated)[0]
