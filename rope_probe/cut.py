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

from .sources import Source
from .weights import INDEX, SINGLE, check_weights


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
    folder : TemporaryDirectory
    """

    config: object
    source: Source
    unused: set[str]
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
    weight_map = _index(source)
    files, unused = {SINGLE}, set()
    if weight_map:
        layer = re.compile(rf"(?:^|\.){re.escape(name.rpartition('.')[2])}\.(\d+)\.")
        kept = {}
        for key, file in weight_map.items():
            found = None if "vision" in key else layer.search(key)
            if found is None or int(found[1]) <= last:
                kept[key] = file
        after = {key for key in kept if not layer.search(key) and re.search(r"(^|\.)(\w*norm|ln_f|\w*head)\.", key)}
        files = {file for key, file in kept.items() if key not in after}
        unused = {key for key in after if kept[key] not in files}
        weight_map = {key: file for key, file in kept.items() if key not in unused}
    folder = tempfile.TemporaryDirectory(prefix="rope-probe-")
    place = Path(folder.name)
    for file in files:
        (place / Path(file).name).symlink_to(_fetched(source, file))
    if weight_map:
        names = {key: Path(file).name for key, file in weight_map.items()}
        (place / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}), encoding="utf-8")
    shorter = _shorter(config, last + 1, total)
    shorter.save_pretrained(place)
    links = Source(source.name, folder.name, source.provenance, None, source.trust_remote_code, local=True)
    return Cut(shorter, links, unused, folder)


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
        check_weights(Path(source.folder))
        path = Path(source.folder) / INDEX
        if (Path(source.folder) / SINGLE).exists() or not path.is_file():
            return None
    else:
        import huggingface_hub as hub

        try:
            path = Path(hub.hf_hub_download(source.name, INDEX, revision=source.revision))
        except hub.errors.EntryNotFoundError:
            return None
    return json.loads(path.read_text(encoding="utf-8"))["weight_map"]


def _fetched(source: Source, file: str) -> Path:
    if source.folder:
        return (Path(source.folder) / file).resolve()
    import huggingface_hub as hub

    return Path(hub.hf_hub_download(source.name, file, revision=source.revision)).resolve()
