"""What every probe does around its reading: choose layers, choose a batch, keep an interrupt from splitting a batch."""

from __future__ import annotations

import contextlib
import signal
import threading
import warnings
from collections.abc import Callable

import torch

from ..errors import ProbeError, ProbeWarning, UsageError
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
def uninterrupted():
    """Ctrl-C waits until the block is done, so that statistics are never left half merged."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals arrive in the main thread only
        return
    arrived = []
    previous = signal.signal(signal.SIGINT, lambda *args: arrived.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)
        if arrived and callable(previous):
            previous(*arrived[0])


class Reading:
    """Context of a run over segments: an interrupt, or a failure in a later batch, keeps what was measured.

    Parameters
    ----------
    count : int
        Segments in all.
    progress : callable, optional
        Called with (segments read, segments in all) after every batch.

    Attributes
    ----------
    done : int
        Segments whose statistics are merged.  An error before the first of them goes through.
    """

    def __init__(self, count: int, progress: Callable[[int, int], None] | None = None):
        self.count, self.progress, self.done = count, progress, 0

    def __enter__(self) -> Reading:
        return self

    @contextlib.contextmanager
    def merging(self, stop: int):
        """Merge a batch inside: whole or not at all, and counted as soon as it is."""
        with uninterrupted():
            yield
            self.done = stop
        if self.progress:
            self.progress(self.done, self.count)

    def __exit__(self, kind, error, traceback) -> bool:
        kept = (KeyboardInterrupt, ProbeError, MemoryError, torch.OutOfMemoryError)
        if not self.done or not isinstance(error, kept):
            return False
        if not isinstance(error, KeyboardInterrupt):
            message = f"stopped after {self.done} of {self.count} segments: {error}"
            warnings.warn(message, ProbeWarning, stacklevel=3)
        return True
