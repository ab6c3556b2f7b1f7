"""Numbers and names as a person reads them."""

from __future__ import annotations

import json
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
    mantissa, _, exponent = f"{value:g}".partition("e")
    return mantissa if not exponent else f"{mantissa}e{int(exponent)}"


def override(provenance: dict) -> str:
    """' under type=yarn, factor=4' where a result was measured with other rope parameters than the checkpoint's."""
    short = {"rope_type": "type", "rope_theta": "base", "original_max_position_embeddings": "original"}
    parts = [
        f"{short.get(key, key)}={value if isinstance(value, str) else base(value)}"
        for key, value in sorted(provenance.get("rope", {}).items(), key=lambda item: item[0] != "rope_type")
    ]
    return f" under {', '.join(parts)}" if parts else ""


def model_name(ds) -> str:
    """Short name of a result's model: last part of its id or path, or what the weights of a demo call themselves."""
    name, source = str(ds.attrs["model"]), json.loads(ds.attrs.get("provenance", "{}"))
    if name.startswith("demo:"):
        name = source.get("file") or name.removeprefix("demo:")
    return name.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf") + override(source)
