"""Effective frequencies of every rope type, from its parameters alone.

Written from the papers and held against transformers in the tests; nothing is imported from there. Frequencies are
in radians per token, pair 0 is the fastest, arithmetic is float64.

References
----------
RoFormer, arXiv 2104.09864; YaRN, arXiv 2309.00071; LongRoPE, arXiv 2402.13753; p-RoPE, arXiv 2410.06205.
"""

import math
from collections.abc import Callable

import numpy as np


def _need(rope: dict, key: str):
    """Value of a key without which the rope type means nothing."""
    if rope.get(key) is None:
        raise ValueError(f"rope type {rope_type(rope)!r} needs {key!r}, and only {sorted(rope)} are given: add it.")
    return rope[key]


def _positive(value, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}: give a positive number.")
    return float(value)


def rope_type(rope: dict) -> str:
    """Name of the rope type of a parameter dict (older configs call the key ``type``; no key means plain RoPE)."""
    return rope.get("rope_type") or rope.get("type") or "default"


def ladder(base: float, pairs: int) -> np.ndarray:
    """Frequencies of plain RoPE, ``base^(−j/pairs)`` for pair j (RoFormer), shape (pairs,)."""
    return base ** (-np.arange(pairs) / pairs)


def _original_length(rope: dict, max_position_embeddings: int | None) -> float:
    length = rope.get("original_max_position_embeddings") or max_position_embeddings
    return _positive(length, f"original_max_position_embeddings of rope type {rope_type(rope)!r}")


def _factor(rope: dict, max_position_embeddings: int | None) -> float:
    """Stretch of a scaled type; where a config leaves it out it is the ratio of the two lengths."""
    if rope.get("factor") is None and max_position_embeddings and rope.get("original_max_position_embeddings"):
        return max_position_embeddings / rope["original_max_position_embeddings"]
    return _positive(_need(rope, "factor"), "factor")


def _default(rope, base, dim, length, longest):
    return ladder(base, dim // 2), 1.0


def _linear(rope, base, dim, length, longest):
    return ladder(base, dim // 2) / _positive(_need(rope, "factor"), "factor"), 1.0


def _proportional(rope, base, dim, length, longest):
    pairs = dim // 2
    share = 1.0 if rope.get("partial_rotary_factor") is None else float(rope["partial_rotary_factor"])
    if not 0 <= share <= 1:
        raise ValueError(f"partial_rotary_factor is {share}: give the share of pairs that rotate, between 0 and 1.")
    inv_freq = ladder(base, pairs) / _positive(rope.get("factor") or 1.0, "factor")
    inv_freq[int(share * dim // 2) :] = 0.0
    return inv_freq, 1.0


def _dynamic(rope, base, dim, length, longest):
    factor = _positive(_need(rope, "factor"), "factor")
    if length is None:
        return ladder(base, dim // 2), 1.0
    if dim == 2:
        raise ValueError("rope type 'dynamic' is undefined for a rotary dimension of 2: use at least 4.")
    longest = _positive(longest, "max_position_embeddings of rope type 'dynamic'")
    stretch = factor * max(length, longest) / longest - (factor - 1)
    return ladder(base * stretch ** (dim / (dim - 2)), dim // 2), 1.0


def _yarn(rope, base, dim, length, longest):
    original, factor = _original_length(rope, longest), _factor(rope, longest)

    def pair_with_turns(count: float) -> float:  # the real-valued pair that makes so many turns in the original length
        return dim / 2 * math.log(original / (2 * math.pi * count)) / math.log(base)

    low, high = pair_with_turns(rope.get("beta_fast") or 32), pair_with_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    # As deployed everywhere: the ramp is linear in the pair index and its end is capped by the dimension, not by the
    # number of pairs. The paper's ramp is linear in turns.
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low or 1e-3), 0.0, 1.0)

    def temperature(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = rope.get("attention_factor")
    if attention is None:
        top, bottom = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = temperature(top) / temperature(bottom) if top and bottom else temperature(1.0)
    return ladder(base, dim // 2) * (1 - ramp + ramp / factor), float(attention)


def _longrope(rope, base, dim, length, longest):
    original, factor = _original_length(rope, longest), _factor(rope, longest)
    name = "long_factor" if length is not None and length > original else "short_factor"
    divisors = np.asarray(_need(rope, name), dtype=float)
    if divisors.shape != (dim // 2,):
        raise ValueError(f"{name} has shape {divisors.shape}, and rotary dimension {dim} needs {dim // 2} numbers.")
    attention = rope.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return ladder(base, dim // 2) / divisors, float(attention)


def _llama3(rope, base, dim, length, longest):
    factor, original = _positive(_need(rope, "factor"), "factor"), _original_length(rope, longest)
    low, high = float(_need(rope, "low_freq_factor")), float(_need(rope, "high_freq_factor"))
    inv_freq = ladder(base, dim // 2)
    count = original * inv_freq / (2 * math.pi)
    # low == high is a step (Llama 4 Scout Instruct): the ramp has no width and must not divide by it
    keep = np.clip((count - low) / (high - low), 0.0, 1.0) if high != low else np.where(count < low, 0.0, 1.0)
    return inv_freq * (keep + (1 - keep) / factor), 1.0


_TYPES: dict[str, Callable] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}

# what each type uses beside the base
_LENGTH, _ATTENTION = "original_max_position_embeddings", "attention_factor"
PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", _LENGTH, _ATTENTION, "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", _LENGTH, _ATTENTION, "short_factor", "long_factor"),
    "llama3": ("factor", _LENGTH, "low_freq_factor", "high_freq_factor"),
    "proportional": ("factor", "partial_rotary_factor"),
}


def inverse_frequencies(
    rope: dict, dim: int, *, length: int | None = None, max_position_embeddings: int | None = None
) -> tuple[np.ndarray, float]:
    """Effective frequencies of one kind of layer, after any scaling.

    Parameters
    ----------
    rope : dict
        Flat rope parameters in the spelling of transformers 5: ``rope_theta``, ``rope_type`` and what the type needs.
    dim : int
        Rotary dimension; for type ``proportional`` the whole head dimension.
    length : int, optional
        Number of tokens running. LongRoPE takes its long table above the original length, dynamic NTK stretches the
        base above `max_position_embeddings`; the other types do not depend on it.
    max_position_embeddings : int, optional
        The config's own length, where a type falls back on it.

    Returns
    -------
    inv_freq : ndarray of float64, shape (dim / 2,)
        Radians per token; 0 where a pair does not rotate.
    attention_scaling : float
        Factor on cos and sin (YaRN, LongRoPE; 1 elsewhere).

    Raises
    ------
    ValueError
        Odd dimension, missing ``rope_theta`` or other needed key, unknown type.

    Notes
    -----
    Sources: RoFormer (default); YaRN (dynamic; yarn, with the ramp as deployed, linear in the pair index); LongRoPE
    (longrope); the code of the Llama 3.1 release (llama3); p-RoPE (proportional).
    """
    if isinstance(dim, bool) or dim != int(dim) or dim < 2 or dim % 2:
        raise ValueError(f"rotary dimension is {dim!r}: a rotation needs an even, positive number of channels.")
    kind = rope_type(rope)
    if kind not in _TYPES:
        raise ValueError(f"unknown rope type {kind!r}: known are {', '.join(_TYPES)}.")
    base = _positive(_need(rope, "rope_theta"), "rope_theta")
    if base <= 1:
        raise ValueError(f"rope_theta is {base}: give a base above 1.")
    return _TYPES[kind](rope, base, int(dim), length, max_position_embeddings)
