"""Numbers as a person reads them."""

from __future__ import annotations

import math


def amount(value: float | None) -> str:
    """One decimal, or a dash."""
    return "–" if value is None else f"{value:.1f}"


def tokens(value: float) -> str:
    """A number of tokens to three digits: 512, 28.3k, 1.2M; infinite means it never turns."""
    if not math.isfinite(value):
        return "none"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def ranges(values: list[int]) -> str:
    """[0, 1, 2, 5] -> '0–2, 5'."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)


def base(value: float) -> str:
    """A RoPE base: 10000, 1e6, 1.5e5."""
    return f"{value:g}".replace("e+0", "e").replace("e+", "e")
