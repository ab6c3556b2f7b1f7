"""What every probe does around its reading: choose layers, choose a batch, make an interrupt wait."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from ..errors import ProbeError, UsageError
from ..rotary import Geometry, RotaryLayer


def choose_layers(geometry: Geometry, layers) -> list[RotaryLayer]:
    """The layers asked for, in order; all if None."""
    for layer in geometry.layers:  # ladders end in pairs that stand still; only an intervention leaves gaps
        gaps = (layer.inv_freq[:-1] == 0) & (layer.inv_freq[1:] > 0)
        if gaps.any():
            raise ProbeError(
                f"pair {gaps.argmax()} of layer {layer.layer} stands still while slower ones turn (an intervention): "
                "run this analysis outside of it."
            )
    if layers is None:
        return list(geometry.layers)
    wanted, known = set(layers), {layer.layer for layer in geometry.layers}
    if not wanted:
        raise UsageError("layers names no layer: name some, or leave it out for all.")
    if wanted - known:
        raise ProbeError(f"there is no layer {min(wanted - known)}: the model has layers {min(known)} to {max(known)}.")
    return [layer for layer in geometry.layers if layer.layer in wanted]


def default_batch(device: str, length: int) -> int:
    """Segments per forward pass: a few thousand tokens fill a CPU, more a GPU."""
    return max(1, (2048 if device == "cpu" else 16384) // length)


@contextlib.contextmanager
def uninterrupted() -> Iterator[list]:
    """Ctrl-C and SIGTERM wait until the block is done, so that statistics are never left half merged.

    Yields
    ------
    list
        Signals that wait.
    """
    arrived: list[tuple] = []
    if threading.current_thread() is not threading.main_thread():
        yield arrived  # signals arrive in the main thread only
        return
    waiting = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(one, lambda *args: arrived.append(args)) for one in waiting]
    try:
        yield arrived
    finally:
        for one, handler in zip(waiting, previous, strict=True):
            signal.signal(one, signal.SIG_DFL if handler is None else handler)
        if arrived:
            signal.raise_signal(arrived[0][0])
