"""Single tensors of a safetensors checkpoint, from a folder or from the hub: no byte is read that was not asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .errors import ProbeError
from .sources import Source, explain
from .weights import INDEX, SINGLE, check_weights

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCK = 1 << 25  # bytes held while a tensor becomes float32
GAP = 1 << 18  # rows closer than this are read in one go: a request costs more than the bytes between
PAUSES = (0.5, 2.0, 8.0)  # seconds before a range is asked for again
BUSY = (429, 500, 502, 503, 504)
HEADER_LIMIT = 100_000_000  # of the format itself


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: file, dtype, shape, and its bytes within the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class _Folder:
    """Byte ranges of files on disk."""

    def __init__(self, folder: Path):
        check_weights(folder)
        self.folder = folder

    def json(self, file: str) -> dict | None:
        path = self.folder / file
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def has(self, file: str) -> bool:
        return (self.folder / file).is_file()

    def read(self, file: str, start: int, stop: int) -> bytes:
        with (self.folder / file).open("rb") as stream:
            stream.seek(start)
            return stream.read(stop - start)


class _Hub:
    """Byte ranges of files on the hub; files in the hub's own cache are read there."""

    def __init__(self, name: str, revision: str | None):
        self.name, self.revision = name, revision
        self._places: dict[str, str | None] = {}

    def json(self, file: str) -> dict | None:
        import huggingface_hub as hub

        if not self.has(file):
            return None
        return json.loads(Path(hub.hf_hub_download(self.name, file, revision=self.revision)).read_text("utf-8"))

    def has(self, file: str) -> bool:
        import huggingface_hub as hub

        try:
            hub.get_hf_file_metadata(hub.hf_hub_url(self.name, file, revision=self.revision))
        except hub.errors.EntryNotFoundError:
            return False
        return True

    def _cached(self, file: str) -> str | None:
        import huggingface_hub as hub

        if file not in self._places:
            found = hub.try_to_load_from_cache(self.name, file, revision=self.revision)
            self._places[file] = found if isinstance(found, str) else None
        return self._places[file]

    def read(self, file: str, start: int, stop: int) -> bytes:
        import huggingface_hub as hub

        place = self._cached(file)
        if place:
            with open(place, "rb") as stream:
                stream.seek(start)
                return stream.read(stop - start)
        for wait in PAUSES:
            try:
                return self._range(file, start, stop)
            except ProbeError:
                raise
            except hub.errors.HfHubHTTPError as error:
                if error.response.status_code not in BUSY:
                    raise
            except Exception:  # the connection was lost
                pass
            time.sleep(wait)
        return self._range(file, start, stop)

    def _range(self, file: str, start: int, stop: int) -> bytes:
        import huggingface_hub as hub
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = hub.hf_hub_url(self.name, file, revision=self.revision)
        headers = build_hf_headers() | {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        limit = hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=limit) as response:
            hf_raise_for_status(response)
            if response.status_code != 206:  # the whole file would follow
                raise ProbeError(
                    f"the server of {self.name} does not hand out parts of files (it answered {response.status_code} "
                    f"to a request for a range): download the checkpoint and give its folder."
                )
            return b"".join(response.iter_bytes())


def commit_on_hub(source: Source) -> str | None:
    """The commit that a revision of a hub id stands for now; None for what is not on the hub."""
    import huggingface_hub as hub

    if source.folder is not None:
        return None
    with source.explained():
        url = hub.hf_hub_url(source.name, "config.json", revision=source.revision)
        return hub.get_hf_file_metadata(url).commit_hash


class Tensors:
    """The tensors of a checkpoint by name.

    Parameters
    ----------
    source : Source
        A folder, or a hub id, whose files are then read in ranges and never downloaded whole.
    revision : str, optional
        Commit on the hub, so that all files are of the same one.

    Attributes
    ----------
    entries : dict of str to Entry
    read_bytes : int
        Bytes of weights read so far, headers left out.
    remote : bool

    Raises
    ------
    ProbeError
        There are no safetensors weights, or their headers are damaged.
    """

    def __init__(self, source: Source, revision: str | None = None):
        self.name, self.read_bytes = source.name, 0
        self.remote = source.folder is None
        with source.explained():
            self._files = _Folder(Path(source.folder)) if source.folder else _Hub(source.name, revision)
            self.entries = dict(self._find())

    def _find(self) -> Iterator[tuple[str, Entry]]:
        """All tensors; the single file comes before the index, as in transformers."""
        if self._files.has(SINGLE):
            files = [SINGLE]
        else:
            index = self._files.json(INDEX)
            if index is None:
                raise ProbeError(
                    f"{self.name} has no safetensors weights: convert it first; pickled weights are never loaded."
                )
            files = sorted(set(index.get("weight_map", {}).values()))
        for file in files:
            yield from self._header(file)

    def _header(self, file: str) -> Iterator[tuple[str, Entry]]:
        size = int.from_bytes(self._files.read(file, 0, 8), "little")
        try:
            if not 2 <= size <= HEADER_LIMIT:
                raise ValueError
            header = json.loads(self._files.read(file, 8, 8 + size))
            for name, entry in header.items():
                if name != "__metadata__":
                    start, stop = (8 + size + offset for offset in entry["data_offsets"])
                    yield name, Entry(file, str(entry["dtype"]), tuple(entry["shape"]), start, stop)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ProbeError(f"{file} of {self.name} has a damaged header: fetch the file again.") from None

    def _entry(self, name: str) -> Entry:
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise ProbeError(
                f"{name} of {self.name} is stored as {entry.dtype}, and a scan reads float32, bfloat16 and float16 only: "
                "give the checkpoint before it was quantized, or run `rope-probe bands`."
            )
        return entry

    def _read(self, entry: Entry, start: int, stop: int) -> bytes:
        try:
            data = self._files.read(entry.file, entry.start + start, entry.start + stop)
        except ProbeError:
            raise
        except Exception as error:
            raise ProbeError(explain(self.name, error, asked=self.remote)) from error
        if len(data) != stop - start:
            raise ProbeError(f"{entry.file} of {self.name} is cut short: fetch the file again.")
        self.read_bytes += len(data)
        return data

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as float32, read in blocks so that hardly more than the result is in memory."""
        entry = self._entry(name)
        dtype = DTYPES[entry.dtype]
        out = torch.empty(int(np.prod(entry.shape, dtype=np.int64)))
        step = BLOCK // dtype.itemsize
        for first in range(0, len(out), step):
            last = min(first + step, len(out))
            data = bytearray(self._read(entry, first * dtype.itemsize, last * dtype.itemsize))
            out[first:last] = torch.frombuffer(data, dtype=dtype)
        return out.reshape(entry.shape)

    def rows(self, name: str, wanted: np.ndarray) -> torch.Tensor:
        """Some rows of a matrix as float32, neighbours read together.

        Parameters
        ----------
        wanted : ndarray of int
            Increasing row numbers.
        """
        entry = self._entry(name)
        dtype = DTYPES[entry.dtype]
        width = entry.shape[1] * dtype.itemsize
        out = torch.empty(len(wanted), entry.shape[1])
        reach = max(1, GAP // width)
        cuts = np.flatnonzero(np.diff(wanted) > reach) + 1
        for run in np.split(np.arange(len(wanted)), cuts):
            first = wanted[run[0]]
            for piece in np.split(run, np.flatnonzero(np.diff((wanted[run] - first) * width // BLOCK)) + 1):
                low, high = int(wanted[piece[0]]), int(wanted[piece[-1]]) + 1
                data = bytearray(self._read(entry, low * width, high * width))
                block = torch.frombuffer(data, dtype=dtype).reshape(high - low, -1)
                out[piece] = block[wanted[piece] - low].float()
        return out
