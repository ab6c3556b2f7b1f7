"""The same reading in layer-major order, for checkpoints whose weights stay on disk."""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from .. import processes, resume
from ..checkpoints import Checkpoint
from ..errors import ProbeError, UsageError
from ..tap import Tap, input_device


class _Passed:
    """State of a reading that has been through some layers."""

    state = ("observer", "hidden", "bfloat16")

    def __init__(self, observer):
        self.observer, self.hidden, self.bfloat16 = observer, np.zeros(0), False

    def keep(self, hidden: torch.Tensor) -> None:
        """What left the last layer, as an array; numpy has no bfloat16."""
        self.bfloat16 = hidden.dtype == torch.bfloat16
        self.hidden = (hidden.view(torch.int16) if self.bfloat16 else hidden).cpu().numpy()

    def kept(self, device) -> torch.Tensor:
        hidden = torch.as_tensor(self.hidden, device=device)
        return hidden.view(torch.bfloat16) if self.bfloat16 else hidden


def measure_layers(ckpt: Checkpoint, analysis: str, ids: np.ndarray, observer, batch: int, options, progress) -> int:
    """All segments through each layer before the next is read; arguments as those of `measure`.

    Progress counts layers.  A run that is cut short can be resumed after the last layer that it has finished, and has
    no result before.
    """
    if processes.size() > 1:
        raise UsageError("--stream-layers reads every layer once, in one process: leave out torchrun.")
    stream, device = ckpt.stream, input_device(ckpt.decoder)
    assert stream is not None  # who calls this has looked
    batches = [(start, min(start + batch, len(ids))) for start in range(0, len(ids), batch)]
    last = max(observer.layers)
    layers, passed = stream.layers(last), _Passed(observer)
    keeper = resume.current()
    mark = resume.fingerprint(ckpt, ids, options) if keeper else {}
    first = keeper.restore(f"{analysis}, streamed", passed, mark) if keeper else 0
    before = (layers[first - 1], passed.kept(device)) if first else None
    seen = first

    @contextlib.contextmanager
    def around(index: int, bounds: tuple[int, int], hidden: torch.Tensor):
        observer.begin(*bounds)
        tap.enters(index, hidden)
        yield
        if index in observer.layers:
            observer.merge(observer.blocks(), *bounds)

    def after(index: int, hidden: torch.Tensor) -> None:
        nonlocal seen
        seen = layers.index(index) + 1
        if keeper:
            passed.keep(hidden)
            keeper.note(f"{analysis}, streamed", passed, mark, seen)
            if keeper.due:
                keeper.write()
        if progress:
            progress(seen - first, len(layers) - first)

    if progress:
        progress(0, len(layers) - first)
    if first < len(layers):
        try:
            with (
                Tap(ckpt.decoder, observer, layers=observer.layers, hidden=observer.hidden) as tap,
                stream.layer_major(batches, last, around, after, before),
            ):
                tap.run(torch.tensor(ids, dtype=torch.long, device=device))
        except (KeyboardInterrupt, ProbeError, MemoryError, torch.OutOfMemoryError) as error:
            if not keeper or not seen:
                raise
            keeper.write()
            why = "" if isinstance(error, KeyboardInterrupt) else f": {str(error).rstrip('.') or 'out of memory'}"
            raise ProbeError(
                f"stopped after {seen} of {len(layers)} layers{why}; --resume goes on from there ({keeper.path})."
            ) from error
    if keeper:
        keeper.over = keeper.whole = True
    return len(ids)
