"""How far a base carries: rows of the tables and curves of the figures, numpy only.

`rope_probe.theory` holds the closed forms; here they are applied to a head dimension, to the layers of a model, and to
the heads of a bands file.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .. import theory

LIMIT = 2_000_000
GRID = "a.b x 10^x"
LONGEST = 100_000_000  # tokens


def parse_length(text: str | int, kilo: int = 1024) -> int:
    """Tokens in a length such as 4096, "32k" or "1M" (k = `kilo`, M = k²).

    Raises
    ------
    ValueError
        Anything else, or less than one token.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kM]?)", str(text).strip().replace("K", "k").replace("_", ""))
    length = float(match[1]) * {"": 1, "k": kilo, "M": kilo**2}[match[2]] if match else 0
    if not 1 <= length <= LONGEST or length != int(length):
        raise ValueError(f"{text!r} is no length: give whole tokens up to {LONGEST:,}, as 32768, 32k or 1M.")
    return int(length)


def published_base(length: int, pairs: int, unrotated: float = 0) -> float | None:
    """Table 2 of arXiv 2405.14591 for this length (1k read as 1000 or as 1024); None where it has no such entry."""
    if pairs == 64 and not unrotated:
        for kilo in (1000, 1024):
            for label, base in theory.PUBLISHED_BASES.items():
                if parse_length(label, kilo) == length:
                    return base
    return None


@dataclass(frozen=True)
class LengthRow:
    """Smallest base that carries one length, with the published one beside it.

    Attributes
    ----------
    length, kilo : int
        Tokens, and what 1k was taken to be.
    base : float or None
        First base of the grid that holds; None where none does.
    published : float or None
        Published base for this length, where there is one.
    published_fails_at : int or None
        First m ≤ length at which the published base turns B negative; None where it holds (or there is none).
    """

    length: int
    kilo: int
    base: float | None
    published: float | None
    published_fails_at: int | None


def length_rows(lengths: Sequence[int], pairs: int, *, kilo: int = 1024, unrotated: float = 0) -> list[LengthRow]:
    """One row per length; `pairs` rotary pairs and `unrotated` pairs outside the rotary part."""
    bases = theory.smallest_bases(lengths, pairs, unrotated=unrotated)
    rows = []
    for length, base in zip(lengths, bases, strict=True):
        published = published_base(length, pairs, unrotated)
        ladder = theory.ladder(published, pairs) if published else None
        fails = None if ladder is None else theory.first_negative(ladder, length, unrotated)
        rows.append(LengthRow(length, kilo, base, published, fails))
    return rows


def table(pairs: int, *, kilo: int = 1024, unrotated: float = 0) -> list[LengthRow]:
    """The rows 1k … 1M of arXiv 2405.14591, table 2, for any number of pairs."""
    lengths = [parse_length(label, kilo) for label in theory.PUBLISHED_BASES]
    return length_rows(lengths, pairs, kilo=kilo, unrotated=unrotated)


@dataclass(frozen=True)
class KindRow:
    """The bound of one kind of layer of a model: layers that share frequencies, window and unrotated part.

    Attributes
    ----------
    layers : list of int
    layer_type, rope_type, base, pairs, zero_pairs, unrotated_pairs, window
        As in the layer's geometry. A kind that does not rotate has no bound and no base.
    context : int or None
        Tokens this kind has to carry: the claimed length, or the window where that is shorter.
    bound : int or None
        L_bound; None where B stays non-negative up to `limit`.
    holds : bool or None
        Whether `bound` reaches `context`.
    smallest_base : float or None
        Smallest plain base (no scaling) of the grid that carries `context`.
    published : float or None
        The published base for `context`.
    """

    layers: list[int]
    layer_type: str
    rotates: bool
    rope_type: str | None
    base: float | None
    pairs: int
    zero_pairs: int
    unrotated_pairs: int
    window: int
    context: int | None
    limit: int
    bound: int | None = None
    holds: bool | None = None
    smallest_base: float | None = None
    published: float | None = None
    inv_freq: np.ndarray = field(default_factory=lambda: np.empty(0), repr=False)


def kind_rows(layers: Iterable, claimed_length: int | None, limit: int = LIMIT) -> list[KindRow]:
    """Group the layers of a model's geometry by what they rotate and bound each group.

    Parameters
    ----------
    layers : iterable of RotaryLayer
        What `rope_probe.rotary` reads from a model or a config.
    claimed_length : int or None
        Context length that the model claims, tokens.
    limit : int
        How far B is followed; always at least the context.
    """
    kinds: dict[tuple, list] = {}
    for layer in layers:
        frequencies = tuple(np.asarray(layer.inv_freq, dtype=float)) if layer.rotates else ()
        kinds.setdefault((layer.layer_type, frequencies, layer.window or 0, layer.unrotated_pairs), []).append(layer)
    return [_kind_row(members, claimed_length, limit) for members in kinds.values()]


def _kind_row(members: list, claimed_length: int | None, limit: int) -> KindRow:
    layer = members[0]
    window = layer.window or 0
    context = min(filter(None, (window, claimed_length)), default=None)
    limit = max(limit, context or 0)
    row = {
        "layers": [member.layer for member in members],
        "layer_type": layer.layer_type,
        "rotates": bool(layer.rotates),
        "window": window,
        "context": context,
        "limit": limit,
    }
    if not layer.rotates:
        return KindRow(**row, rope_type=None, base=None, pairs=0, zero_pairs=0, unrotated_pairs=0)
    inv_freq = np.asarray(layer.inv_freq, dtype=float)
    inv_freq = inv_freq[np.isfinite(inv_freq)]  # padding
    pairs, zero_pairs, unrotated = len(inv_freq), int((inv_freq == 0).sum()), int(layer.unrotated_pairs)
    bound = theory.bound_length(inv_freq, limit, unrotated)
    if context:
        row["holds"] = bound is None or bound >= context
        row["smallest_base"] = theory.smallest_base(context, pairs, zero_pairs=zero_pairs, unrotated=unrotated)
        row["published"] = None if zero_pairs else published_base(context, pairs, unrotated)
    return KindRow(
        **row,
        rope_type=layer.rope_type,
        base=layer.base,
        pairs=pairs,
        zero_pairs=zero_pairs,
        unrotated_pairs=unrotated,
        bound=bound,
        inv_freq=inv_freq,
    )


def head_bounds(usage, inv_freq, rotates, limit: int = LIMIT) -> np.ndarray:
    """Usage-weighted bound of every head: the length that the head's own spectrum supports.

    ``B_w(m) = Σ w · cos(m · inv_freq)`` with w the head's usage, scaled to sum to its number of pairs.

    Parameters
    ----------
    usage : array_like, shape (layer, head, pair)
        Mean norm of q times mean norm of k; NaN where a layer has fewer heads or pairs.
    inv_freq : array_like, shape (layer, pair)
        Radians per token; NaN where a layer has fewer pairs.
    rotates : array_like of bool, shape (layer,)
    limit : int
        How far B is followed.

    Returns
    -------
    ndarray of float64, shape (layer, head)
        L_bound in tokens; inf where B_w stays non-negative up to `limit`, NaN where the layer does not rotate or the
        head has no usage.
    """
    usage, inv_freq = np.asarray(usage, dtype=float), np.asarray(inv_freq, dtype=float)
    bounds = np.full(usage.shape[:2], np.nan)
    for layer, head in np.ndindex(*bounds.shape):
        weights = head_weights(usage[layer, head], inv_freq[layer])
        if rotates[layer] and weights is not None:
            bound = theory.bound_length(inv_freq[layer, : len(weights)], limit, weights=weights)
            bounds[layer, head] = np.inf if bound is None else bound
    return bounds


def head_weights(usage: np.ndarray, inv_freq: np.ndarray) -> np.ndarray | None:
    """Usage of one head over its own pairs, scaled to sum to their number; None where there is nothing to scale."""
    usage = usage[: int(np.isfinite(inv_freq).sum())]
    total = usage.sum()
    return usage * (len(usage) / total) if total > 0 else None


def quantiles(bounds: np.ndarray) -> dict[str, float]:
    """Minimum, 10, 25, 50, 75, 90 % and maximum over heads; taken from the heads themselves, never interpolated."""
    values = bounds[~np.isnan(bounds)]
    levels = {"min": 0, "p10": 0.1, "p25": 0.25, "median": 0.5, "p75": 0.75, "p90": 0.9, "max": 1}
    # "lower" picks a value that occurs: halfway to a head without a bound there is no number
    return {name: float(np.quantile(values, level, method="lower")) for name, level in levels.items()}


@dataclass(frozen=True)
class Curve:
    """B(m)/B(0) against m in bins even in log m, as drawn.

    Attributes
    ----------
    label : str
    m : ndarray, shape (bins,)
        Geometric middle of each bin, tokens.
    low, high : ndarray, shape (bins,)
        Least and greatest B(m)/B(0) over the integers of the bin.
    first_negative : int or None
        First m with B(m) < 0, None where there is none up to `limit`.
    limit : int
        How far B was followed.
    context : int or None
        Length to carry, tokens.
    """

    label: str
    m: np.ndarray
    low: np.ndarray
    high: np.ndarray
    first_negative: int | None
    limit: int
    context: int | None = None


def curve(
    label: str,
    inv_freq,
    limit: int,
    *,
    weights=None,
    unrotated: float = 0,
    context: int | None = None,
    bins: int = 250,
) -> Curve:
    """Follow B(m) to `limit` and keep its envelope. Arguments as in `rope_probe.theory.cosine_sum`."""
    values = np.concatenate([part for _, part in theory.cosine_blocks(inv_freq, limit, weights, unrotated)])
    edges = np.unique(np.geomspace(1, limit + 1, bins + 1).round().astype(int))
    first, last = edges[:-1], edges[1:] - 1
    negative = np.flatnonzero(values < 0)
    return Curve(
        label=label,
        m=np.sqrt(first * last.astype(float)),
        low=np.minimum.reduceat(values[: limit + 1], first) / values[0],
        high=np.maximum.reduceat(values[: limit + 1], first) / values[0],
        first_negative=int(negative[0]) if len(negative) else None,
        limit=limit,
        context=context,
    )
