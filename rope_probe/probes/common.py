"""What every probe does before it reads: choose layers, choose a batch."""

from __future__ import annotations

from ..errors import ProbeError
from ..rotary import Geometry, RotaryLayer


def choose_layers(geometry: Geometry, layers) -> list[RotaryLayer]:
    """The layers asked for, in order; all if None."""
    if layers is None:
        return list(geometry.layers)
    wanted, known = set(layers), {layer.layer for layer in geometry.layers}
    if not wanted or wanted - known:
        missing = min(wanted - known, default=None)
        raise ProbeError(f"there is no layer {missing}: the model has layers {min(known)} to {max(known)}.")
    return [layer for layer in geometry.layers if layer.layer in wanted]


def default_batch(device: str, length: int) -> int:
    """Segments per forward pass: a few thousand tokens fill a CPU, more a GPU."""
    return max(1, (2048 if device == "cpu" else 16384) // length)
