"""Weight files: found and checked before anything is loaded, and complete afterwards."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .errors import ProbeError
from .limits import JSON_BYTES, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def check_weights(folder: Path, advice: str = "incomplete download, fetch this file again") -> None:
    """Name the weight file that is missing, cut short or a pointer.

    Raises
    ------
    ProbeError
        No safetensors weights, or a file of them that cannot be whole.
    """
    files = _files(folder)
    if not files:
        raise ProbeError(f"{folder} has no {SINGLE}: {advice}.")
    for file in files:
        problem = _problem(folder / file)
        if problem:
            raise ProbeError(f"{folder / file} {problem}: {advice}.")


def _files(folder: Path) -> list[str]:
    """Names of the weight files, as transformers chooses them: the single file before the index; [] if there are none."""
    if os.path.lexists(folder / SINGLE):
        return [SINGLE]
    index = folder / INDEX
    if index.is_file():
        return sorted(set(weight_map(index).values()))
    names = sorted(path.name for path in folder.iterdir())
    if any("-of-" in name and name.endswith(".safetensors") for name in names):
        raise ProbeError(f"{folder} has weight shards but no {INDEX}: incomplete download, fetch that file too.")
    others = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf", ".safetensors"))]
    if others:
        seen = f"{folder} has no {SINGLE} (only {', '.join(others[:3])})"
        if others[0].endswith(".gguf"):
            raise ProbeError(f"{seen}: give the .gguf file itself.")
        raise ProbeError(f"{seen}: convert the weights to safetensors first; pickled weights are never loaded.")
    return []


def weight_map(index: Path) -> dict[str, str]:
    """Weight file of every tensor, from an index; refused where a file is not in the folder of the index."""
    try:
        found = dict(read_json(index)["weight_map"])
        outside = any(_leaves(index.parent, file) for file in set(found.values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise ProbeError(f"{index} is not an index of weight files: fetch it again.") from None
    if outside:
        raise ProbeError(f"{index} names files outside its own folder: do not use this checkpoint.")
    return found


def _leaves(folder: Path, file: str) -> bool:
    """Does a name in an index lead out of the folder?  Links into the blobs of the hub's own cache do not."""
    if Path(file).is_absolute() or ".." in Path(file).parts:
        return True
    home, place = folder.resolve(), (folder / file).resolve()
    return not place.is_relative_to(home) and place.parent != home.parent.parent / "blobs"


def stored_bytes(folder: Path) -> int:
    """Bytes of the weight files that are there."""
    return sum((folder / file).stat().st_size for file in _files(folder) if (folder / file).is_file())


def _problem(path: Path) -> str | None:
    """What is wrong with a safetensors file, from its first bytes and its size."""
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(64)
        if head.startswith(b"version https://git-lfs"):
            return "is a Git LFS pointer, not weights"
        if size < 9:
            return f"is cut short ({size} bytes)"
        if head[8:9] != b"{":
            return f"is not a safetensors file (it begins with {head[:12]!r})"
        length = int.from_bytes(head[:8], "little")
        if length + 8 > size:
            return f"is cut short ({size} bytes)"
        if length > JSON_BYTES:
            return f"has a damaged header ({length} bytes)"
        stream.seek(8)
        try:
            header = json.loads(stream.read(length))
            end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
            end = int(end)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError):
            return "has a damaged header"
    return f"is cut short ({size} bytes of {end + 8 + length})" if end + 8 + length > size else None


def refuse_incomplete(name: str, loading_info: dict) -> None:
    """Refuse a model some of whose tensors were not in its weight files: they would be random numbers.

    Parameters
    ----------
    loading_info : dict
        What ``from_pretrained(..., output_loading_info=True)`` returns beside the model.
    """
    missing = sorted(loading_info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ProbeError(
            f"the weights of {name} lack {', '.join(missing[:3])}{more}, which would be random numbers: "
            "fetch the checkpoint again, or export it whole."
        )
    wrong = sorted(loading_info["mismatched_keys"])
    if wrong:
        key, stored, expected = wrong[0]
        raise ProbeError(
            f"{key} of {name} has shape {list(stored)}, and its config.json asks for {list(expected)} "
            f"({len(wrong)} such): the weights and the config do not belong together."
        )


def stored_tensors(folder: Path, suffix: str) -> dict:
    """Tensors of the weight files whose name ends in `suffix`, by name; {} where no file of weights is there."""
    from safetensors import safe_open

    found: dict = {}
    for file in _files(folder):
        with safe_open(folder / file, "pt") as stream:
            found |= {name: stream.get_tensor(name) for name in stream.keys() if name.endswith(suffix)}
    return found
