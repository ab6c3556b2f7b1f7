"""The grid of `extend`: which bases, scalings and lengths, refused here where no model can have them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..errors import UsageError
from ..words import base as base_words

OWN, MATCH = "own", "match"
BASES = (1e4, 1e5, 1e6, MATCH)  # where neither a base nor a scaling is asked for
FACTORED = ("linear", "dynamic", "yarn", "llama3")
SCALINGS = (OWN, "none", *FACTORED, "longrope")
LENGTHS = (512, 1024, 2048)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
FACTOR, SEGMENTS, SAMPLES = 2.0, 4, 4


@dataclass(frozen=True)
class Setting:
    """One base with one scaling.

    Attributes
    ----------
    base : float or str
        RoPE base; ``own`` is the checkpoint's, ``match`` the length that is read (FMRoPE).
    scaling : str
        ``own`` leaves the checkpoint's, ``none`` takes any off; else a rope type.
    factor : float or None
        Of the scalings that have one.
    """

    base: float | str
    scaling: str
    factor: float | None = None

    @property
    def name(self) -> str:
        """In words: `base 1e6, yarn × 2`."""
        factor = "" if self.factor is None else f" × {self.factor:g}"
        return f"base {self.base if isinstance(self.base, str) else base_words(self.base)}, {self.scaling}{factor}"

    def override(self, length: int) -> dict:
        """Arguments of the intervention :func:`rope_probe.interventions.rope`; empty for the model as it is."""
        base = {} if self.base == OWN else {"base": float(length if self.base == MATCH else self.base)}
        kind = {} if self.scaling == OWN else {"type": "default" if self.scaling == "none" else self.scaling}
        return base | kind | ({} if self.factor is None else {"factor": self.factor})


@dataclass(frozen=True)
class Grid:
    """Everything that is measured: settings × lengths, and prompts of some lengths × depths × keys × samples."""

    settings: tuple[Setting, ...]
    lengths: tuple[int, ...]
    passkey_lengths: tuple[int, ...]
    depths: tuple[float, ...]
    keys: tuple[int, ...]
    samples: int

    @cached_property
    def all_lengths(self) -> tuple[int, ...]:
        """Lengths of segments and of prompts."""
        return tuple(sorted({*self.lengths, *self.passkey_lengths}))

    @cached_property
    def edges(self) -> np.ndarray:
        """Where the position buckets begin (and, last, where they end), in tokens: 2^k and 3·2^k, and the lengths."""
        longest = max(self.lengths)
        steps = [size * 2**k for k in range(4, longest.bit_length() + 1) for size in (1, 1.5 if k >= 8 else 1)]
        return np.array(sorted({1, *(int(step) for step in steps if step < longest), *self.lengths}))


def _listed(values) -> list:
    return list(dict.fromkeys(values if isinstance(values, Iterable) and not isinstance(values, str) else [values]))


def _base(value) -> float | str:
    if value in (OWN, MATCH):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 1 < number < math.inf:
        raise UsageError(f"--base {value} is not possible: give numbers above 1, own or match.")
    return number


def _whole(values, option: str, least: int, most: float = math.inf) -> tuple[int, ...]:
    found = _listed(values)
    for value in found:
        if value != int(value) or not least <= value <= most:
            top = f" to {most:g}" if most < math.inf else " or more"
            raise UsageError(f"{option} {value:g} is not possible: give whole numbers, {least}{top}.")
    return tuple(sorted({int(value) for value in found}))


def _depths(values) -> tuple[float, ...]:
    found = [float(value) for value in _listed(values)]
    for value in found:
        if not 0 <= value <= 1:
            raise UsageError(f"--depths {value:g} is not possible: give numbers between 0 (the start) and 1 (the end).")
    return tuple(sorted(set(found)))


def _settings(base, scaling, factor) -> list[Setting]:
    if base is None and scaling is None:
        base = BASES
    bases = list(dict.fromkeys(map(_base, _listed(OWN if base is None else base))))
    scalings = _listed(OWN if scaling is None else scaling)
    for name in scalings:
        if name not in SCALINGS:
            raise UsageError(f"--scaling {name} is not known: choose from {', '.join(SCALINGS)}.")
    factors = [float(value) for value in _listed(FACTOR if factor is None else factor)]
    for value in factors:
        if not 1 <= value < math.inf:
            raise UsageError(f"--factor {value:g} is not possible: give numbers of 1 or more.")
    if factor is not None and not set(scalings) & set(FACTORED):
        raise UsageError(f"--factor is of a scaling that has one: add --scaling {', '.join(FACTORED[:-1])} or llama3.")
    return [
        Setting(one, name, size)
        for one in bases
        for name in scalings
        for size in (factors if name in FACTORED else [None])
    ]


def make_grid(
    base=None,
    scaling=None,
    factor=None,
    lengths=None,
    passkey_lengths=None,
    depths=None,
    samples=None,
    keys=None,
) -> Grid:
    """The grid asked for, with defaults where nothing is.

    Raises
    ------
    UsageError
        A number or a name that no model can have.
    """
    from .passkey import PLACES

    settings = _settings(base, scaling, factor)
    lengths = _whole(LENGTHS if lengths is None else lengths, "--lengths", 2)
    samples = SAMPLES if samples is None else _whole(samples, "--samples", 0)[0]
    if not samples and any(option is not None for option in (passkey_lengths, depths, keys)):
        raise UsageError("--samples 0 asks for no retrieval: leave --passkey-lengths, --depths and --keys out.")
    return Grid(
        tuple(settings),
        lengths,
        _whole(lengths if passkey_lengths is None else passkey_lengths, "--passkey-lengths", 2) if samples else (),
        _depths(DEPTHS if depths is None else depths),
        _whole(1 if keys is None else keys, "--keys", 1, len(PLACES)),
        samples,
    )
