"""The first layers of a checkpoint as a checkpoint of their own: nothing after them is fetched or loaded.

Its folder holds links to those weight files that the layers need; of a hub repository only these are downloaded.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import EntryNotFoundError

from .sources import Source
from .weights import INDEX, SINGLE, check_weights, weight_map


@dataclass
class Cut:
    """Attributes
    ----------
    config : PreTrainedConfig
        Of the layers that are left.
    source : Source
        The folder of links.
    unused : set of str
        Parts after the last layer (final norm, head) whose weights are in files that were left out: nothing that is
        measured depends on them.
    stored : int
        Bytes of the weight files.
    folder : TemporaryDirectory
    """

    config: object
    source: Source
    unused: set[str]
    stored: int
    folder: tempfile.TemporaryDirectory


def cut(source: Source, config, last: int, name: str) -> Cut | None:
    """The layers up to and with `last`; None where the checkpoint cannot be cut, or there is nothing to cut off.

    Parameters
    ----------
    source : Source
    config : PreTrainedConfig
    last : int
    name : str
        Of the list of layers within the model (``model.layers``, ``transformer.h``).
    """
    text = config.get_text_config()
    total = text.num_hidden_layers
    shared = getattr(text, "num_kv_shared_layers", 0)  # counted from the last layer
    if not name or last >= total - 1 or shared:
        return None
    try:
        kept = _index(source)
        files: set[str] = {SINGLE}
        unused: set[str] = set()
        if kept:
            kept, unused = _needed(kept, last, name.rpartition(".")[2])
            files = set(kept.values())
        places = {file: _fetched(source, file) for file in files}
    except EntryNotFoundError:  # no safetensors on the hub, which opening it whole says better
        return None
    folder = tempfile.TemporaryDirectory(prefix="rope-probe-")
    place = Path(folder.name)
    for file, stored in places.items():
        (place / Path(file).name).symlink_to(stored)
    if kept:
        names = {key: Path(file).name for key, file in kept.items()}
        (place / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}), encoding="utf-8")
    shorter = _shorter(config, last + 1, total)
    shorter.save_pretrained(place)
    links = Source(source.name, folder.name, source.provenance, None, source.trust_remote_code, local=True)
    return Cut(shorter, links, unused, sum(path.stat().st_size for path in places.values()), folder)


def _needed(files: dict[str, str], last: int, name: str) -> tuple[dict[str, str], set[str]]:
    """Weight file of every tensor that is needed, and the tensors after the layers that can be done without."""
    layer = re.compile(rf"(?:^|\.){re.escape(name)}\.(\d+)\.")
    kept, after = {}, set()
    for key, file in files.items():
        found = None if "vision" in key else layer.search(key)
        if found is None or int(found[1]) <= last:
            kept[key] = file
        if not layer.search(key) and re.search(r"(^|\.)(\w*norm|ln_f|\w*head)\.", key):
            after.add(key)
    needed = {file for key, file in kept.items() if key not in after}
    unused = {key for key in after if kept[key] not in needed}
    return {key: file for key, file in kept.items() if key not in unused}, unused


def _shorter(config, layers: int, total: int):
    """The configuration of fewer layers, with every list of one entry for each layer cut to them."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    for key, value in vars(text).items():
        if isinstance(value, (list, tuple)) and len(value) == total:
            setattr(text, key, value[:layers])
    return config


def _index(source: Source) -> dict[str, str] | None:
    """Weight file of every tensor; None where there is a single file."""
    if source.folder:
        folder = Path(source.folder)
        check_weights(folder)
        return None if (folder / SINGLE).exists() else weight_map(folder / INDEX)
    try:
        return weight_map(_fetched(source, INDEX))
    except EntryNotFoundError:
        return None


def _fetched(source: Source, file: str) -> Path:
    """Where a file of the checkpoint is, once it is here."""
    if source.folder:
        return (Path(source.folder) / file).resolve()
    import huggingface_hub as hub

    return Path(hub.hf_hub_download(source.name, file, revision=source.revision))
