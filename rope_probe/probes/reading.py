"""One reading of a text by an analysis, batch by batch: what an observer is, and how it is led through the segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from ..checkpoints import Checkpoint
from ..rotary import RotaryLayer
from ..tap import Call, Tap, input_device
from .common import Reading

Blocks = Mapping[tuple, np.ndarray]


class Observer:
    """Statistics of one analysis, gathered while a model reads.

    A batch goes through it in three steps.  `begin` says which segments come; the model runs and shows every layer
    (`__call__`), whose statistics stay on the device; `blocks` takes them to the host as plain arrays, and refuses
    them where they are not finite.  `merge` adds such arrays to what was seen before: it is all that changes the
    state, so a batch counts whole or not at all, and may have been read by another process.

    Attributes
    ----------
    layers : dict of int to RotaryLayer
        The layers it wants to see, by index.
    hidden : bool
        Does it need the hidden states that enter them?
    state : tuple of str
        The attributes that `merge` changes.
    """

    layers: dict[int, RotaryLayer]
    hidden = False
    state: tuple[str, ...] = ()

    def begin(self, start: int, stop: int) -> None:
        """Segments `start` to `stop` − 1 come next; forget what a batch that was not finished has left."""
        raise NotImplementedError

    def __call__(self, call: Call) -> None:
        """See one layer attend."""
        raise NotImplementedError

    def run(self, decoder, ids: torch.Tensor) -> None:
        """Let the model read a batch of segments."""
        with Tap(decoder, self, layers=self.layers, stop=True, hidden=self.hidden) as tap:
            tap.run(ids)

    def blocks(self) -> Blocks:
        """Statistics of what was just read, on the host.

        Raises
        ------
        ProbeError
            They are not finite.
        """
        raise NotImplementedError

    def merge(self, blocks: Blocks, start: int, stop: int) -> None:
        """Add the statistics of segments `start` to `stop` − 1, of all layers or of some."""
        raise NotImplementedError


def measure(
    ckpt: Checkpoint,
    ids: np.ndarray,
    observer: Observer,
    batch: int,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Lead an observer through the segments.

    Parameters
    ----------
    ckpt : Checkpoint
    ids : ndarray of int, shape (segments, length)
    observer : Observer
    batch : int
        Segments per forward pass.
    progress : callable, optional
        Called with (segments read, segments in all) after every batch.

    Returns
    -------
    int
        Segments whose statistics are in the observer: all of them, or those before an interrupt or a failure in a
        later batch (which is warned about).
    """
    count = len(ids)
    device = input_device(ckpt.decoder)
    with Reading(count, progress) as reading:
        for start in range(0, count, batch):
            stop = min(start + batch, count)
            observer.begin(start, stop)
            # a copy, since a token file is mapped read-only
            observer.run(ckpt.decoder, torch.tensor(ids[start:stop], dtype=torch.long, device=device))
            blocks = observer.blocks()
            with reading.merging(stop):
                observer.merge(blocks, start, stop)
    return reading.done
