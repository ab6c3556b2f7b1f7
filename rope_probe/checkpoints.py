"""Open a hub id, a folder, a GGUF file, a demo or a model object -> Checkpoint."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from . import limits, processes
from .bridges import inner_model, is_bridge
from .configs import override_rope, parse_rope
from .cut import Cut, cut
from .errors import ProbeError, ProbeWarning, UsageError, first_words
from .modules import layer_list, text_decoder
from .quiet import quiet
from .rotary import Geometry, RotaryLayer, decoder_without_weights, read_geometry
from .sources import Source, explain, find
from .stream import Stream, placement
from .verify import verified_geometry
from .weights import check_weights, refuse_incomplete, stored_bytes

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
# what to do about damaged weight files, where they are not the user's own
ADVICE = {
    "gguf": {"advice": "remove this folder, and it will be converted again"},
    "hub": {"advice": "incomplete download, open it again with the hub within reach"},
}


@dataclass
class Checkpoint:
    """A model that can be probed.

    Attributes
    ----------
    model : PreTrainedModel
        The causal LM with its head.
    name : str
        What the user called it.
    provenance : dict
        Where the weights come from (revision or file hash).
    load_tokenizer : callable
        Called the first time text has to be tokenized; large vocabularies take seconds to read.
    formed : dict of int to (float, int)
        Under a rope override: base and length of each layer before it, with which the weights were trained.
    stream : Stream or None
        What lends the layers their weights, where these stay on disk.
    shorter : Cut or None
        The first layers alone, where no more were asked for.
    """

    model: Any = field(repr=False)
    name: str
    provenance: dict = field(default_factory=dict)
    load_tokenizer: Callable[[], object | None] = field(default=lambda: None, repr=False)
    formed: dict[int, tuple[float, int]] = field(default_factory=dict, repr=False)
    stream: Stream | None = field(default=None, repr=False)
    shorter: Cut | None = field(default=None, repr=False)
    _geometries: dict[int, Geometry] = field(default_factory=dict, repr=False)

    @cached_property
    def tokenizer(self):
        """The tokenizer, or None where the checkpoint has none."""
        return self.load_tokenizer()

    @property
    def decoder(self):
        """The text decoder without its head (what q/k work runs)."""
        return text_decoder(self.model)

    @property
    def vocabulary(self) -> int:
        return self.decoder.get_input_embeddings().weight.shape[0]

    @property
    def claimed_length(self) -> int:
        return int(getattr(self.decoder.config, "max_position_embeddings", 0) or 0)

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        if self.stream:
            return str(self.stream.device)
        return "several" if hasattr(self.model, "hf_device_map") else str(self.model.device)

    @property
    def layers(self) -> tuple[RotaryLayer, ...]:
        """Layers as they rotate at the length they were trained for."""
        return self.geometry(max(2, min(self.claimed_length or 1024, 4096))).layers

    def geometry(self, length: int) -> Geometry:
        """Geometry in force at `length` tokens, measured on the live model once per length."""
        if length not in self._geometries:
            with self.stream.stand_ins() if self.stream else contextlib.nullcontext():
                self._geometries[length] = verified_geometry(self.decoder, length)
        return self._geometries[length]


def open_checkpoint(
    model,
    *,
    tokenizer=None,
    revision: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    device_map: str | None = None,
    rope: dict | str | None = None,
    stream_layers: bool | None = None,
    layers=None,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Open a checkpoint for probing.

    Parameters
    ----------
    model : str, Path or PreTrainedModel
        A hub id, a local folder, a ``.gguf`` file, ``demo:smollm2`` / ``demo:gemma3``, a loaded model, or a
        ``TransformerBridge`` of TransformerLens.
    tokenizer : PreTrainedTokenizer, optional
        Only with a model object; needed for text, not for token ids.
    revision : str, optional
        Branch, tag or commit on the hub.
    dtype : str, optional
        ``float32``, ``bfloat16``, ``float16``; default: the checkpoint's own.
    device : str, optional
        Default: the first GPU if there is one, else the CPU.
    device_map : str, optional
        Passed to accelerate (``auto`` splits a model over GPUs).
    rope : dict or str, optional
        Rope parameters to run with instead of the checkpoint's own, as ``{"rope_type": "yarn", "factor": 4}`` or
        ``"type=yarn,factor=4"``; the weights stay as they are.
    stream_layers : bool, optional
        Leave the weights on disk and read one decoder layer after the other; by default where they would not fit.
    layers : iterable of int, optional
        The layers that are wanted: those after the last of them are neither fetched nor loaded.
    trust_remote_code : bool
        Run code that comes with the checkpoint; off by default.

    Returns
    -------
    Checkpoint

    Raises
    ------
    ProbeError
        One sentence: what was wrong, the value seen, what to do.
    """
    if not isinstance(model, (str, Path)):
        if any(option is not None for option in (revision, dtype, device, device_map, rope, stream_layers, layers)):
            raise UsageError(
                "revision, dtype, device, device_map, rope, stream_layers and layers are for opening a model; "
                "this one is open already."
            )
        return _from_object(model, tokenizer)
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype is {dtype!r}: choose one of {', '.join(DTYPES)}.")
    if stream_layers and device_map is not None:
        raise UsageError("--stream-layers and --device-map both say where weights go: leave one out.")
    device = _device(device)
    override = parse_rope(rope) if isinstance(rope, str) else rope
    with quiet():
        found = find(str(model), revision, trust_remote_code)
        config = _config(found)
        own_code = trust_remote_code and bool(getattr(config, "auto_map", None))
        formed: dict = {}
        if override:
            config, formed = _overridden(found, config, override, own_code)
        shorter = None if own_code else _examined(found, config, layers)
        source = shorter.source if shorter else found
        config = shorter.config if shorter else config
        too_large = ""
        if stream_layers is None and device_map is None and not own_code:
            stored = shorter.stored if shorter else stored_bytes(Path(source.folder)) if source.folder else 0
            too_large = _too_large(source.name, stored, dtype, device)
            stream_layers = bool(too_large)
        folder = tempfile.TemporaryDirectory(prefix="rope-probe-") if stream_layers else None
        places: Any = device_map
        if folder:
            places = placement(config, device)
        loaded = _load_model(source, config, dtype, places, folder, shorter)
        stream = Stream(loaded, device, folder) if folder else None
        if own_code:
            read_geometry(text_decoder(loaded))
    if too_large:
        warnings.warn(too_large, ProbeWarning, stacklevel=2)
    if places is None:
        loaded = _move(loaded, device)
    provenance: dict[str, Any] = dict(source.provenance)
    commit = getattr(loaded.config, "_commit_hash", None)
    if commit:
        provenance["revision"] = commit
    if override:
        provenance["rope"] = override
    return Checkpoint(loaded.eval(), found.name, provenance, lambda: load_tokenizer_of(found), formed, stream, shorter)


def _examined(source: Source, config, layers) -> Cut | None:
    """Refuse what cannot work before weights are read; the first layers alone where no others are wanted."""
    with source.explained():
        bare = decoder_without_weights(config)
        read_geometry(bare)
        if source.folder:
            limits.check_parameters(bare, source.name, stored_bytes(Path(source.folder)))
        return cut(source, config, max(layers), layer_list(bare)) if layers else None


def _overridden(source: Source, config, override: dict, own_code: bool):
    """The configuration with other rope parameters, and base and length of every layer before that."""
    formed = {}
    with source.explained():
        if not own_code:
            layers = read_geometry(decoder_without_weights(config)).layers
            formed = {layer.layer: (layer.base, layer.length) for layer in layers if layer.rotates}
        return override_rope(config, override), formed


def _from_object(model, tokenizer) -> Checkpoint:
    origin = "model object"
    if is_bridge(model):
        tokenizer = tokenizer or getattr(model, "tokenizer", None)
        model, origin = inner_model(model), "TransformerLens bridge"
    if not hasattr(model, "get_decoder"):
        raise ProbeError(f"{type(model).__name__} is not a transformers model: pass one, or a hub id, folder or file.")
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    read_geometry(text_decoder(model))
    return Checkpoint(model.eval(), name, {"source": origin}, lambda: tokenizer)


def _device(device: str | None) -> str:
    if device is None:
        return processes.device() or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if torch.empty(0, device=device).is_meta:
            raise RuntimeError("the meta device holds no numbers")
    except (RuntimeError, AssertionError) as error:
        raise ProbeError(
            f"--device {device!r} is not available here ({first_words(error, 80)}): use cpu, or cuda where there is one."
        ) from None
    return device


def _move(model, device: str):
    try:
        return model.to(device)
    except torch.OutOfMemoryError:
        raise ProbeError(
            f"the model does not fit on {device}: use --device cpu, --device-map auto or --dtype bfloat16."
        ) from None


def load_config(source: str, *, revision: str | None = None, trust_remote_code: bool = False):
    """The transformers configuration of a checkpoint; every way it can fail is one sentence."""
    return _config(find(source, revision, trust_remote_code))


def _config(source: Source):
    from transformers import AutoConfig, PreTrainedConfig

    with source.explained():
        if source.folder is None:  # a folder's config.json was checked when it was found
            options = {key: value for key, value in source.options.items() if key != "trust_remote_code"}
            with contextlib.suppress(OSError):  # said below
                limits.check_config(PreTrainedConfig.get_config_dict(source.place, **options)[0], source.name)
        return AutoConfig.from_pretrained(source.place, **source.options)


def _too_large(name: str, size: int, dtype: str | None, device: str) -> str:
    """What to say where weights of so many bytes do not fit into the memory that is free; empty where they do."""
    free = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else free_memory()
    if dtype == "float32":
        size *= 2  # most are stored in 16 bits
    if not free or size < 0.9 * free:
        return ""
    return (
        f"the weights of {name} ({size / 1e9:.1f} GB) do not fit into the {free / 1e9:.1f} GB of memory that are "
        "free, so layers are streamed from disk."
    )


def free_memory() -> int:
    """Bytes of main memory that are free for use; 0 where that is not known."""
    try:
        with open("/proc/meminfo") as stream:
            return next(int(line.split()[1]) * 1024 for line in stream if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 0


def _load_model(source: Source, config, dtype: str | None, device_map, offload=None, shorter: Cut | None = None):
    from transformers import AutoModelForCausalLM

    if source.folder and not shorter:  # whose files were checked before they were linked
        check_weights(Path(source.folder), **ADVICE.get(source.provenance["source"], {}))
    extra = {"device_map": device_map} if device_map else {}
    if offload:
        extra["offload_folder"] = offload.name
    with source.explained():
        loaded, info = AutoModelForCausalLM.from_pretrained(
            source.place,
            config=config,
            dtype=DTYPES.get(dtype or "", "auto"),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **extra,
            **source.options,
        )
    unused = tuple(shorter.unused) if shorter else ()
    info["missing_keys"] = {key for key in info["missing_keys"] if not key.endswith(unused)}
    refuse_incomplete(source.name, info)
    return loaded


def load_tokenizer_of(source: Source):
    """The tokenizer of a checkpoint that was found; refused where there is none that can be read."""
    from transformers import AutoTokenizer

    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(source.place, **source.options)
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        if not set(tokenizer.get_vocab()) - added - set(tokenizer.all_special_tokens):
            raise ValueError("its vocabulary is empty: the files of the tokenizer are missing")
        return tokenizer
    except Exception as error:  # many checkpoints come without one
        reason = explain(source.name, error) if "trust_remote_code" in str(error) else first_words(error)
        raise ProbeError(
            f"{source.name} has no tokenizer that can be read ({reason}): pass token ids with --tokens FILE.npy."
        ) from error
