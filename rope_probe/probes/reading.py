"""One reading of a text by an analysis, batch by batch: what an observer is, and how it is led through the segments."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from .. import processes, resume
from ..checkpoints import Checkpoint
from ..errors import ProbeError, ProbeWarning, SharedError
from ..rotary import RotaryLayer
from ..tap import Call, Tap, input_device
from .common import uninterrupted
from .reading_layers import measure_layers

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
    one_pass : bool
        Is one forward pass enough, so that layers can be streamed?
    unit : str
        What is counted; segments, unless something else is read one by one.
    """

    layers: dict[int, RotaryLayer]
    hidden = False
    state: tuple[str, ...] = ()
    one_pass = True
    unit = "segments"

    def begin(self, start: int, stop: int) -> None:
        """Segments `start` to `stop` − 1 come next; forget what a batch that was not finished has left."""
        raise NotImplementedError

    def __call__(self, call: Call) -> None:
        """See one layer attend."""
        raise NotImplementedError

    def passes(self, decoder, ids: torch.Tensor) -> Iterator[bool]:
        """Let the model read a batch of segments; yields after every part that `merge` can take, True after the last.

        Whoever reads a batch in parts must be able to take one twice, since a batch that was cut short is read anew.
        """
        with Tap(decoder, self, layers=self.layers, stop=True, hidden=self.hidden) as tap:
            tap.run(ids)
        yield True

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


class Reading:
    """Context of a run over segments: an interrupt, or a failure in a later batch, keeps what was measured.

    Attributes
    ----------
    count, done : int
        Segments in all, and those whose statistics are merged.
    merged : bool
        Is there anything that was measured?  An error before that goes through.
    """

    def __init__(self, count: int, done: int = 0, unit: str = "segments"):
        self.count, self.done, self.merged, self.unit = count, done, done > 0, unit

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, kind, error, traceback) -> bool:
        kept = (KeyboardInterrupt, ProbeError, MemoryError, torch.OutOfMemoryError)
        if not self.merged or not isinstance(error, kept):
            return False
        if not isinstance(error, KeyboardInterrupt):
            message = f"stopped after {self.done} of {self.count} {self.unit}: {error}"
            warnings.warn(message, ProbeWarning, stacklevel=3)
        return True


def measure(
    ckpt: Checkpoint,
    analysis: str,
    ids: np.ndarray,
    observer: Observer,
    batch: int,
    options: dict,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Lead an observer through the segments; several processes (torchrun) read in turn and all see everything.

    Parameters
    ----------
    ckpt : Checkpoint
    analysis : str
        Name of the reading, under which a run that can be resumed keeps its state.
    ids : ndarray of int, shape (segments, length)
    observer : Observer
    batch : int
        Segments per forward pass.
    options : dict
        What else the numbers depend on.
    progress : callable, optional
        Called with (segments read, segments to read): with 0 at the start, then after every batch.

    Returns
    -------
    int
        Segments whose statistics are in the observer: all of them, or those before an interrupt or a failure in a
        later batch (which is warned about).
    """
    if ckpt.stream and observer.one_pass:
        return measure_layers(ckpt, analysis, ids, observer, batch, options, progress)
    keeper = resume.current()
    mark = resume.fingerprint(ckpt, ids, options) if keeper else {}
    first = keeper.restore(analysis, observer, mark) if keeper else 0
    if keeper:
        keeper.over = False
    if progress:
        progress(0, len(ids) - first)
    with Reading(len(ids), first, observer.unit) as reading:
        while reading.done < reading.count:
            for _ in _round(ckpt, ids, observer, batch, reading):
                if keeper and processes.rank() == 0:
                    keeper.keep(analysis, observer, mark, reading.done)
            if progress:
                progress(reading.done - first, reading.count - first)
    if keeper:
        keeper.over, keeper.whole = True, reading.done == reading.count
        if not keeper.whole and processes.rank() == 0:
            keeper.keep(analysis, observer, mark, reading.done, now=True)
    return reading.done


def _round(ckpt: Checkpoint, ids: np.ndarray, observer: Observer, batch: int, reading: Reading) -> Iterator[None]:
    """One batch for every process; yields whenever the state of the observer is whole."""
    together = processes.size() > 1
    starts = range(reading.done, reading.count, batch)[: processes.size()]
    spans = [(start, min(start + batch, reading.count)) for start in starts]
    own = spans[processes.rank() : processes.rank() + 1]
    pieces = _pieces(ckpt, ids, observer, *own[0]) if own else iter(())
    unfinished = list(spans)
    while unfinished:
        # processes stop together, so that none waits for one that has left
        held: Any = uninterrupted() if together else contextlib.nullcontext([])
        with held as signals:
            found = processes.gather((*_next(pieces, together), bool(signals)))
            with uninterrupted():
                for span, (blocks, last, message, _) in zip(spans, found, strict=False):
                    if message:
                        break
                    if blocks is not None:
                        observer.merge(blocks, *span)
                        reading.merged = True
                    if last and span == unfinished[0]:
                        unfinished.pop(0)
                        reading.done = span[1]
            yield
        for *_, message, stopped in found:
            if message:
                raise SharedError(message)
            if stopped:
                raise KeyboardInterrupt


def _pieces(ckpt, ids, observer: Observer, start: int, stop: int) -> Iterator[tuple[Blocks, bool]]:
    observer.begin(start, stop)
    # a copy, since a token file is mapped read-only
    block = torch.tensor(ids[start:stop], dtype=torch.long, device=input_device(ckpt.decoder))
    for last in observer.passes(ckpt.decoder, block):
        yield observer.blocks(), last


def _next(pieces: Iterator, together: bool) -> tuple[Blocks | None, bool, str]:
    """The next piece of a batch, if there is one, whether it is the last, and what went wrong."""
    try:
        return *next(pieces, (None, True)), ""
    except (ProbeError, MemoryError, torch.OutOfMemoryError) as error:
        if not together:
            raise
        return None, False, str(error) or "out of memory"
