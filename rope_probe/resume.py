"""Keep what a run has measured in a file beside its result, and go on from there.

The file holds plain arrays and JSON, for every reading of the run (one by most analyses) under its name, with a
fingerprint of what was read by what.  It is replaced as a whole, so a run that is killed while it writes leaves the
state before.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import time
import warnings
import zipfile
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

from .accumulate import Moments
from .errors import ProbeError, ProbeWarning, first_words
from .results import replace_file

EVERY = 120.0  # seconds between two states
SCHEMA = 1


class Keeper:
    """The state file of one run.

    Parameters
    ----------
    path : str or Path
    resume : bool
        Go on from what the file holds, if it is there.
    every : float
        Seconds between two states.

    Attributes
    ----------
    whole, over : bool
        The reading that came last was finished; it has ended, and its result is being stored.
    """

    def __init__(self, path, resume: bool = False, every: float = EVERY):
        self.path, self.every = Path(path), every
        self.sections: dict[str, tuple[dict, list[np.ndarray]]] = self._read() if resume and self.path.exists() else {}
        self.whole = self.over = False
        self._last = time.monotonic()

    def restore(self, name: str, observer, fingerprint: dict) -> int:
        """Give an observer the state of an earlier run; the segments that it holds.

        Raises
        ------
        ProbeError
            The state is of another run.
        """
        if name not in self.sections:
            return 0
        entry, arrays = self.sections[name]
        for key, now in fingerprint.items():
            before = entry["fingerprint"].get(key)
            if before != now:
                raise ProbeError(
                    f"{self.path} is of a run with {'other' if key.endswith('s') else 'another'} {key} ({first_words(before, 60)}, now "
                    f"{first_words(now, 60)}): give the same again, or leave out --resume to start anew."
                )
        try:
            _restore(observer, entry["state"], arrays)
            return int(entry["done"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise self._damaged(error) from None

    def keep(self, name: str, observer, fingerprint: dict, done: int, *, now: bool = False) -> None:
        """Write the state, if it is time to."""
        if now or self.due:
            self.note(name, observer, fingerprint, done)
            self.write()

    @property
    def due(self) -> bool:
        """Is the last state old enough for another?"""
        return time.monotonic() - self._last >= self.every

    def note(self, name: str, observer, fingerprint: dict, done: int) -> None:
        """Copy the state, for `write`."""
        arrays: list[np.ndarray] = []
        state = _state(observer, arrays)
        self.sections[name] = ({"fingerprint": fingerprint, "done": done, "state": state}, arrays)

    def write(self) -> None:
        """Write what was noted; a disk that is full does not end the run."""
        try:
            self._write()
        except OSError as error:
            message = f"the state of the run could not be kept in {self.path} ({error.strerror}); it goes on."
            warnings.warn(message, ProbeWarning, stacklevel=2)
        self._last = time.monotonic()

    def remove(self) -> None:
        """The run is over and its result is safe."""
        self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        flat: list[np.ndarray] = []
        index = {}
        for name, (entry, arrays) in self.sections.items():
            index[name] = entry | {"first": len(flat), "arrays": len(arrays)}
            flat += arrays
        text = np.frombuffer(json.dumps({"schema": SCHEMA, "sections": index}).encode(), dtype=np.uint8)
        whole = io.BytesIO()
        named: dict[str, Any] = {f"a{number}": array for number, array in enumerate(flat)}
        np.savez(whole, index=text, **named)
        replace_file(self.path, whole.getbuffer())

    def _read(self) -> dict:
        try:
            if not zipfile.is_zipfile(self.path):
                raise ValueError("it is not whole")
            with np.load(self.path, allow_pickle=False) as stored:
                index = json.loads(stored["index"].tobytes())
                if index["schema"] != SCHEMA:
                    raise ValueError(f"schema {index['schema']}")
                found = {}
                for name, entry in index["sections"].items():
                    first, count = entry.pop("first"), entry.pop("arrays")
                    found[name] = (entry, [stored[f"a{number}"] for number in range(first, first + count)])
                return found
        except Exception as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> ProbeError:
        return ProbeError(
            f"{self.path} is not the state of a run ({first_words(error, 80)}): remove it, and start without --resume."
        )


_CURRENT: ContextVar[Keeper | None] = ContextVar("rope_probe_keeper", default=None)


def current() -> Keeper | None:
    """The keeper of the run we are in."""
    return _CURRENT.get()


@contextlib.contextmanager
def resumable(path, resume: bool = False, every: float | None = None) -> Iterator[Keeper]:
    """Inside, what an analysis has measured is kept in a file, every few minutes and when it is interrupted.

    Parameters
    ----------
    path : str or Path
        The state file.  It is removed when the block ends and the analysis in it was finished.
    resume : bool
        Go on from the state that the file holds.  A run with another model, text or option is refused.
    every : float, optional
        Seconds; default two minutes, or ``ROPE_PROBE_KEEP_EVERY`` from the environment.

    Examples
    --------
    >>> with rp.resumable("bands.state", resume=True):  # doctest: +SKIP
    ...     ds = rp.bands(ckpt, segments=10_000)
    """
    if every is None:
        every = float(os.environ.get("ROPE_PROBE_KEEP_EVERY", EVERY))
    keeper = Keeper(path, resume, every)
    token = _CURRENT.set(keeper)
    try:
        yield keeper
    finally:
        _CURRENT.reset(token)
    if keeper.whole:
        keeper.remove()


# -- what a run is ---------------------------------------------------------------------------------


def fingerprint(ckpt, ids: np.ndarray, options: dict) -> dict[str, str]:
    """What must be the same for numbers of two runs to go together."""
    asked = {key: value for key, value in options.items() if key != "batch"}  # how it is cut changes nothing
    return {
        "model": ckpt.name,
        "dtype": ckpt.dtype,
        "weights": _weights(ckpt.model),
        "text": hashlib.sha256(np.ascontiguousarray(ids, dtype=np.int64).tobytes()).hexdigest()[:16],
        "shape": "x".join(map(str, ids.shape)),
        "options": json.dumps(asked, sort_keys=True, default=str),
    }


def _weights(model) -> str:
    """Hash of a few numbers of every tensor: another checkpoint, revision or override has others."""
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        if not tensor.is_meta:
            flat = tensor.detach().flatten()
            digest.update(flat[:: max(1, len(flat) // 16)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


# -- state as plain data ---------------------------------------------------------------------------


def _state(observer, arrays: list[np.ndarray]) -> dict:
    return {name: _packed(getattr(observer, name), arrays) for name in observer.state}


def _packed(value, arrays: list[np.ndarray]):
    """A value as JSON, its arrays put aside."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    if isinstance(value, np.ndarray):
        arrays.append(value.copy())  # it is written later, and changed by then
        return {"array": len(arrays) - 1}
    if isinstance(value, Moments):
        return {"moments": [_packed(part, arrays) for part in (value.count, value.mean, value.m2)]}
    if isinstance(value, dict):
        return {"dict": [[_key(key), _packed(item, arrays)] for key, item in value.items()]}
    return {"observer": _state(value, arrays)}


def _key(key):
    return {"tuple": list(key)} if isinstance(key, tuple) else key


def _restore(observer, stored: dict, arrays: list[np.ndarray]) -> None:
    if set(stored) != set(observer.state):
        raise ValueError("other statistics")
    for name, packed in stored.items():
        now = getattr(observer, name)
        if "observer" in packed:
            _restore(now, packed["observer"], arrays)
        else:
            setattr(observer, name, _unpacked(packed, arrays))


def _unpacked(packed: dict, arrays: list[np.ndarray]):
    (kind, value), *_ = packed.items()
    if kind == "array":
        return arrays[value].copy()
    if kind == "moments":
        count, mean, m2 = (_unpacked(part, arrays) for part in value)
        moments = Moments(count.shape)
        moments.count, moments.mean, moments.m2 = count, mean, m2
        return moments
    if kind == "dict":
        return {tuple(key["tuple"]) if isinstance(key, dict) else key: _unpacked(item, arrays) for key, item in value}
    if kind != "value":
        raise ValueError(f"unknown kind {kind}")
    return value
