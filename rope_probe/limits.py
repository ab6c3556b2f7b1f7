"""What a file declares is checked before anything is allocated or built for it.

Configurations, weight headers, token files and result files come from strangers.  A few bytes of them can ask for a
billion layers, or for an array of a terabyte.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from pathlib import Path

from .errors import ProbeError, first_words

JSON_BYTES = 1 << 26  # no config.json or index is larger
LAYERS, HEADS, WIDTH, HEAD_WIDTH = 2_000, 100_000, 1 << 24, 1 << 14
MODULES = 200_000  # layers times experts
TABLE = 1 << 28  # numbers in a table that a rotary module builds
PER_BYTE = 16  # parameters that a byte of weights may stand for (the densest quantization holds 8)
ARRAY_BYTES, SWELL = 1 << 26, 20  # a result file may declare this much, or so many times its own size
STRINGS = 100_000


def read_json(path: Path):
    """A JSON file of sane size.

    Raises
    ------
    ProbeError
        It is too large.
    OSError, ValueError
        It cannot be read, or is not JSON.
    """
    size = path.stat().st_size
    if size > JSON_BYTES:
        raise ProbeError(f"{path} has {size:,} bytes, far more than any such file: fetch it again.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _limit(key: str) -> int | None:
    """Largest number that a key of a configuration may sensibly have; None for keys that size nothing."""
    if key.endswith(("layers", "_layer")) or key in ("depth", "num_blocks"):
        return LAYERS
    if key.endswith(("head_dim", "rotary_dim")):
        return HEAD_WIDTH
    if key.endswith(("heads", "_head", "experts", "groups", "n_inner_heads")):
        return HEADS
    if key.endswith(("_size", "_dim", "_embd", "d_model", "_rank", "d_ff", "_inner")):
        return WIDTH
    return None


def check_config(config: dict, name: str, path: str = "") -> None:
    """Refuse a configuration that asks for a model no machine can build.

    Parameters
    ----------
    config : dict
        config.json as it stands; nested configurations are looked at as well.
    name : str
        What the user calls it.
    """
    for key, value in config.items():
        if isinstance(value, dict):
            if path.count(".") > 20:
                raise ProbeError(f"the config of {name} is nested too deeply: check config.json.")
            check_config(value, name, f"{path}{key}.")
            continue
        limit = _limit(str(key))
        if limit is None or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if not 0 <= value <= limit:
            raise ProbeError(
                f"the config of {name} says {path}{key} = {value:.6g}, and nothing beyond {limit:,} is built: "
                "check config.json."
            )
    layers = max((_number(value) for key, value in config.items() if _limit(str(key)) == LAYERS), default=0)
    experts = max((_number(value) for key, value in config.items() if str(key).endswith("experts")), default=0)
    if layers * experts > MODULES:
        raise ProbeError(
            f"the config of {name} says {layers:,} layers of {experts:,} experts, more than is built: check config.json."
        )


def _number(value) -> int:
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0


def check_parameters(decoder, name: str, stored: int) -> None:
    """Refuse a model that is far larger than its weight files.

    Parameters
    ----------
    decoder : PreTrainedModel
        Built on the meta device.
    stored : int
        Bytes of the weight files.
    """
    count = sum(parameter.numel() for parameter in decoder.parameters())
    if count > PER_BYTE * stored + (1 << 20):
        raise ProbeError(
            f"the config of {name} describes {count:,} parameters, and its weight files hold {stored:,} bytes: "
            "they do not belong together."
        )


def check_table(module, config) -> None:
    """Refuse to build a rotary module that keeps an absurd table of angles."""
    size = sum(buffer.numel() for buffer in module.buffers())
    if size > TABLE:
        raise ProbeError(
            f"the config asks for a table of {size:,} angles ({type(module).__name__}): check max_position_embeddings."
        )


# -- result files ------------------------------------------------------------------------------------


@contextlib.contextmanager
def as_data(*paths):
    """Work on result files that anyone may have written: whatever does not fit in them becomes one sentence."""
    try:
        yield
    except (ProbeError, OSError, MemoryError):
        raise
    except Exception as error:
        named = " or ".join(str(path) for path in paths)
        raise ProbeError(
            f"{named} is not whole ({type(error).__name__}: {first_words(error, 120)}): run the analysis again."
        ) from error


def check_result(path: Path) -> None:
    """Refuse a result file that declares far more than it holds, or that reaches into other files.

    Raises
    ------
    ProbeError
    """
    import h5py

    size = path.stat().st_size
    allowed = max(ARRAY_BYTES, SWELL * size)
    declared = 0
    with h5py.File(path, "r") as file:
        _check_attributes(file, path, size, allowed)
        for name in file:
            if not isinstance(file.get(name, getlink=True), h5py.HardLink):
                raise ProbeError(f"{name} in {path} is a link to another place: do not use this file.")
            item = file[name]
            if not isinstance(item, h5py.Dataset):
                continue  # groups are not read
            if item.is_virtual or item.external:
                raise ProbeError(f"{name} in {path} is kept in another file: do not use this file.")
            _check_attributes(item, path, size, allowed)
            count = math.prod(item.shape or ())
            if h5py.check_string_dtype(item.dtype) and item.dtype.kind == "O":
                declared += _string_bytes(item, count, size, allowed, path)
            elif item.dtype.hasobject:
                raise ProbeError(f"{name} in {path} is of a kind that no result has: do not use this file.")
            else:
                declared += count * item.dtype.itemsize
            if declared > allowed:
                raise ProbeError(
                    f"{path} has {size:,} bytes and declares more than {allowed:,} (in {name}): do not use this file."
                )


def _check_attributes(item, path: Path, size: int, allowed: int) -> None:
    """A short list of strings can name one long string many times."""
    for name in item.attrs:
        attribute = item.attrs.get_id(name)
        count = math.prod(attribute.shape)
        if attribute.dtype.kind == "O" and name not in ("DIMENSION_LIST", "REFERENCE_LIST") and count * size > allowed:
            raise ProbeError(f"attribute {name} in {path} holds {count:,} texts: do not use this file.")


def _string_bytes(item, count: int, size: int, allowed: int, path: Path) -> int:
    if count > STRINGS:
        raise ProbeError(f"{item.name} in {path} holds {count:,} texts: do not use this file.")
    if count * size <= allowed // 64:  # there may be a few such variables
        return count * size
    block = max(1, allowed // size)
    if item.ndim == 1:
        blocks = (item[start : start + block] for start in range(0, count, block))
    else:  # one text at a time: the roles of heads are a table of a few hundred
        blocks = ([item[place]] for place in itertools.product(*map(range, item.shape)))
    total = 0
    for texts in blocks:
        total += sum(len(text) for text in texts)
        if total > allowed:
            break
    return total


def check_array(shape: tuple[int, ...], what: str, largest: int = 1 << 30) -> None:
    """Refuse more token ids than fit in memory as 64-bit numbers."""
    if math.prod(shape) > largest:
        raise ProbeError(
            f"{what} has shape {list(shape)}: read at most {largest:,} ids at a time (--segments, --length)."
        )
