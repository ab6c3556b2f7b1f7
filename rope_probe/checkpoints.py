"""Open a hub id, a folder, a GGUF file, a demo or a model object -> Checkpoint."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from . import gguf_cache
from .errors import ProbeError
from .rotary import Geometry, RotaryLayer, decoder_without_weights, read_geometry
from .verify import verified_geometry

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
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
    """

    model: object = field(repr=False)
    name: str
    provenance: dict = field(default_factory=dict)
    load_tokenizer: Callable[[], object | None] = field(default=lambda: None, repr=False)
    _geometries: dict[int, Geometry] = field(default_factory=dict, repr=False)

    @cached_property
    def tokenizer(self):
        """The tokenizer, or None where the checkpoint has none."""
        return self.load_tokenizer()

    @property
    def decoder(self):
        """The text decoder without its head (what q/k work runs)."""
        return self.model.get_decoder()

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
        return "several" if hasattr(self.model, "hf_device_map") else str(self.model.device)

    @property
    def layers(self) -> tuple[RotaryLayer, ...]:
        """Layers as they rotate at the length they were trained for."""
        return self.geometry(max(2, min(self.claimed_length or 1024, 4096))).layers

    def geometry(self, length: int) -> Geometry:
        """Geometry in force at `length` tokens, measured on the live model once per length."""
        if length not in self._geometries:
            self._geometries[length] = verified_geometry(self.decoder, length)
        return self._geometries[length]


@contextlib.contextmanager
def quiet():
    """Keep the libraries' own progress bars and advice off the user's screen while opening."""
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hub.setLevel(logging.ERROR)
    disable_progress_bars("huggingface_hub.snapshot_download")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(level)
        hub.setLevel(hub_level)


def open_checkpoint(
    model,
    *,
    tokenizer=None,
    revision: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Open a checkpoint for probing.

    Parameters
    ----------
    model : str, Path or PreTrainedModel
        A hub id, a local folder, a ``.gguf`` file, ``demo:smollm2`` / ``demo:gemma3``, or a loaded model.
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
        return _from_object(model, tokenizer)
    name = str(model)
    if dtype is not None and dtype not in DTYPES:
        raise ProbeError(f"--dtype is {dtype!r}: choose one of {', '.join(DTYPES)}.")
    device = _device(device)
    with quiet():
        folder, provenance = _locate(name)
        options = {"revision": revision, "trust_remote_code": trust_remote_code}
        config = load_config(folder or name, name=name, **options)
        read_geometry(decoder_without_weights(config))  # refuse what cannot work before reading weights
        loaded = _load_model(folder or name, name, config, dtype, device_map, options)
    if device_map is None:
        loaded = _move(loaded, device)
    commit = getattr(loaded.config, "_commit_hash", None)
    if commit:
        provenance["revision"] = commit
    return Checkpoint(loaded.eval(), name, provenance, lambda: _load_tokenizer(folder or name, options))


def _from_object(model, tokenizer) -> Checkpoint:
    if not hasattr(model, "get_decoder"):
        raise ProbeError(f"{type(model).__name__} is not a transformers model: pass one, or a hub id, folder or file.")
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    read_geometry(model.get_decoder())
    return Checkpoint(model.eval(), name, {"source": "model object"}, lambda: tokenizer)


def _device(device: str | None) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise ProbeError(f"--device {device!r} is not available here: use cpu, or cuda where there is one.") from None
    return device


def _move(model, device: str):
    try:
        return model.to(device)
    except torch.OutOfMemoryError:
        raise ProbeError(
            f"the model does not fit on {device}: use --device cpu, --device-map auto or --dtype bfloat16."
        ) from None


def _locate(name: str) -> tuple[str | None, dict]:
    """Folder to load from (None for a hub id), and where it comes from."""
    if name.startswith("demo:"):
        return gguf_cache.demo(name.removeprefix("demo:"))
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        if not path.is_file():
            raise ProbeError(f"no file at {name}.")
        return gguf_cache.converted(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ProbeError(f"{name} has no config.json: give the folder of a transformers checkpoint.")
        _check_shards(path)
        return str(path), {"source": "folder"}
    if path.exists() or name.count("/") > 1 or name.startswith((".", "~", "/")):
        raise ProbeError(f"{name} is neither a checkpoint folder nor a .gguf file.")
    return None, {"source": "hub"}


def load_config(source: str, *, name: str | None = None, revision=None, trust_remote_code=False):
    """The transformers configuration of a checkpoint; every way it can fail is one sentence."""
    from transformers import AutoConfig

    name = name or source
    try:
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ProbeError(_explain(name, error)) from error


def _load_model(source, name, config, dtype, device_map, options):
    from transformers import AutoModelForCausalLM

    kwargs = {"device_map": device_map} if device_map else {}
    try:
        return AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=DTYPES.get(dtype, "auto"), use_safetensors=True, **kwargs, **options
        )
    except Exception as error:
        raise ProbeError(_explain(name, error)) from error


def _load_tokenizer(source, options):
    from transformers import AutoTokenizer

    try:
        with quiet():
            return AutoTokenizer.from_pretrained(source, **options)
    except Exception:  # many checkpoints come without one; text then needs --tokens, and says so
        return None


def _explain(name: str, error: Exception) -> str:
    """One sentence for the ways a checkpoint fails to open."""
    from huggingface_hub import errors as hub

    causes = []
    cause: BaseException | None = error
    while cause is not None and len(causes) < 8:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    if any(isinstance(c, hub.GatedRepoError) for c in causes) or "gated repo" in text:
        return (
            f"{name} is gated: accept its terms at https://huggingface.co/{name}, "
            "then log in with `hf auth login` (or set HF_TOKEN)."
        )
    if any(isinstance(c, hub.RevisionNotFoundError) for c in causes):
        return f"{name} has no such revision on the hub: check --revision."
    if any(isinstance(c, hub.RepositoryNotFoundError) for c in causes):
        return f"{name} is not on the hub (or is private): check the spelling, or log in with `hf auth login`."
    if any(isinstance(c, (hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError, ConnectionError)) for c in causes) or (
        "connect" in text and "huggingface.co" in text
    ):
        return f"{name} is not in the local cache and the hub cannot be reached: check the id and the network, or give a folder."
    if "trust_remote_code" in text:
        return f"{name} needs code from its own repository: pass --trust-remote-code if you trust it."
    if "safetensors" in text and ("no file named" in text.lower() or "does not appear to have" in text):
        return f"{name} has no safetensors weights (pickled weights are never loaded): convert it to safetensors first."
    if "does not recognize this architecture" in text or "Unrecognized model" in text:
        return f"{name} has a model type that transformers does not know ({first[:160]}): it cannot be run natively."
    if "Unrecognized configuration class" in text:
        return f"{name} is not a causal language model ({type(error).__name__}): give a decoder-only text model."
    return f"cannot open {name}: {first[:300]}"


def _check_shards(folder: Path) -> None:
    """Name the weight file that is missing, cut short or a pointer, before anything is loaded."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ProbeError(f"{index} is not a safetensors index: download it again.") from None
        if any(Path(f).is_absolute() or ".." in Path(f).parts for f in files):
            raise ProbeError(f"{index} names files outside its own folder: do not use this checkpoint.")
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        if not files:
            raise ProbeError(
                f"{folder} has no safetensors weights (pickled weights are never loaded): convert it first."
            )
    for file in files:
        problem = _shard_problem(folder / file)
        if problem:
            raise ProbeError(f"{folder / file} {problem}: incomplete download, fetch this file again.")


def _shard_problem(path: Path) -> str | None:
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(64)
        if head.startswith(b"version https://git-lfs"):
            return "is a Git LFS pointer, not weights"
        length = int.from_bytes(head[:8], "little")
        if size < 8 or length + 8 > size:
            return f"is cut short ({size} bytes)"
        stream.seek(8)
        try:
            header = json.loads(stream.read(length))
            end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return "has a damaged header"
    return f"is cut short ({size} bytes of {end + 8 + length})" if end + 8 + length > size else None
