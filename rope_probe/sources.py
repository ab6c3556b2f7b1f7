"""Where a checkpoint comes from: find it, and say in one sentence why it does not open."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from . import gguf_cache, limits
from .errors import ProbeError, UsageError, first_words


@dataclass(frozen=True)
class Source:
    """A checkpoint that was found.

    Attributes
    ----------
    name : str
        As the user wrote it.
    folder : str or None
        Where its files are; None: on the hub.
    provenance : dict
    revision : str or None
    trust_remote_code : bool
    local : bool
        Nothing is asked of the network.
    """

    name: str
    folder: str | None
    provenance: dict = field(default_factory=dict)
    revision: str | None = None
    trust_remote_code: bool = False
    local: bool = False

    @property
    def place(self) -> str:
        """What transformers is told to open."""
        return self.folder or self.name

    @property
    def options(self) -> dict:
        """Options of every ``from_pretrained``."""
        return {
            "revision": self.revision if self.folder is None else None,
            "trust_remote_code": self.trust_remote_code,
            "local_files_only": self.local,
        }

    @contextlib.contextmanager
    def explained(self):
        """Whatever goes wrong inside becomes one sentence."""
        try:
            yield
        except ProbeError:
            raise
        except Exception as error:
            raise ProbeError(explain(self.name, error)) from error


def find(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Source:
    """Find a demo, a ``.gguf`` file, a folder or a hub id; its files are checked, none is loaded.

    Raises
    ------
    ProbeError
        It is not there, or damaged.
    """
    found = _local(name)
    if found is None:
        return _on_hub(name, revision, trust_remote_code)
    if revision is not None:
        raise UsageError(f"--revision {revision} has no meaning for {name}, which is not on the hub: leave it out.")
    folder, provenance = found
    return Source(name, folder, provenance, None, trust_remote_code, local=not trust_remote_code)


def _local(name: str) -> tuple[str, dict] | None:
    """Folder of a checkpoint on this machine and where it comes from; None if the name is a hub id."""
    if name.startswith("demo:"):
        return gguf_cache.demo(name.removeprefix("demo:"))
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        if not path.is_file():
            raise ProbeError(f"there is no file {name}: check the path.")
        return gguf_cache.converted(path)
    if path.is_dir():
        check_config(path)
        return str(path), {"source": "folder"}
    if path.exists() or name.count("/") > 1 or name.startswith((".", "~", "/")):
        raise ProbeError(
            f"{name} is neither a checkpoint folder nor a .gguf file: give one, or a hub id like owner/name."
        )
    return None


def check_config(folder: Path) -> None:
    """Refuse a folder whose config.json is missing or says nothing."""
    path = folder / "config.json"
    if not path.is_file():
        raise ProbeError(f"{folder} has no config.json: give the folder of a transformers checkpoint.")
    check_config_file(path)


def check_config_file(path: Path) -> None:
    """Refuse a config.json that is not JSON, says nothing, or asks for more than can be built."""
    try:
        config = limits.read_json(path)
    except (OSError, ValueError) as error:
        raise ProbeError(f"{path} is not JSON ({first_words(error)}): fetch it again.") from None
    if not isinstance(config, dict) or not config.get("model_type") or not isinstance(config["model_type"], str):
        raise ProbeError(f"{path} names no model_type: give the folder of a transformers checkpoint.")
    limits.check_config(config, str(path))


def ask_hub(name: str, file: str, **where) -> Exception | None:
    """Ask the hub for a file once, without the retries of half a minute that loading makes: what went wrong, if any."""
    import huggingface_hub as hub

    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(name, file, **where))
    except Exception as error:
        return error
    return None


def _on_hub(name: str, revision: str | None, trust_remote_code: bool) -> Source:
    """A hub id; where the hub does not hand it out, the copy in the hub's own cache."""
    import huggingface_hub as hub

    error = ask_hub(name, "config.json", revision=revision)
    if error is not None:
        try:
            cached = hub.try_to_load_from_cache(name, "config.json", revision=revision)
        except ValueError:  # not a possible id
            cached = None
        if not isinstance(cached, str):
            raise ProbeError(explain(name, error, asked=True)) from error
        folder = Path(cached).parent
        provenance = {"source": "hub", "revision": folder.name}
        return Source(name, str(folder), provenance, revision, trust_remote_code, local=True)
    return Source(name, None, {"source": "hub"}, revision, trust_remote_code)


def _chain(error: BaseException | None):
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return seen


def explain(name: str, error: Exception, asked: bool = False) -> str:
    """One sentence for the ways a checkpoint fails to open.

    Parameters
    ----------
    asked : bool
        The error is the answer of the hub, or of the network on the way to it.
    """
    from huggingface_hub import errors as hub

    causes = _chain(error)

    def is_a(*kinds):
        return any(isinstance(cause, kinds) for cause in causes)

    text = first_words(error, 5000)
    shown = text[:200]
    if is_a(hub.GatedRepoError) or "gated repo" in text:
        return (
            f"{name} is gated: accept its terms at https://huggingface.co/{name}, "
            "then log in with `hf auth login` (or set HF_TOKEN)."
        )
    if is_a(hub.RevisionNotFoundError):
        return f"{name} has no such revision on the hub: check --revision."
    if is_a(hub.RepositoryNotFoundError):
        return f"{name} is not on the hub (or is private): check the spelling, or log in with `hf auth login`."
    if is_a(hub.HFValidationError):
        return f"{name!r} is neither a path here nor a possible hub id: give a folder, a .gguf file or owner/name."
    if is_a(hub.OfflineModeIsEnabled):
        return f"{name} is not in the local cache and HF_HUB_OFFLINE is set: unset it, or give a folder."
    missing = is_a(hub.EntryNotFoundError) and not is_a(hub.LocalEntryNotFoundError)
    if missing and asked:
        return f"{name} has no config.json on the hub, so it is no transformers checkpoint: check the id."
    if missing or ("safetensors" in text and ("no file named" in text.lower() or "does not appear to have" in text)):
        return f"{name} has no safetensors weights: convert it first; pickled weights are never loaded."
    if is_a(hub.HfHubHTTPError):
        return f"the hub does not hand out {name} ({shown}): try again later, or give a folder."
    if asked or is_a(hub.LocalEntryNotFoundError, ConnectionError) or "couldn't connect" in text:
        return (
            f"{name} is not in the local cache and the hub cannot be reached ({shown}): "
            "check the id and the network, or give a folder."
        )
    if is_a(MemoryError) or "out of memory" in text:
        return f"{name} does not fit in memory: use --dtype bfloat16, --device cpu or --device-map auto."
    if "device_map" in text or "accelerate" in text.lower():
        return f"cannot place {name} on devices ({shown}): check --device-map, or leave it out."
    if "trust_remote_code" in text:
        return f"{name} needs code from its own repository: pass --trust-remote-code if you trust it."
    if "does not recognize this architecture" in text or "Unrecognized model" in text:
        return f"{name} has a model type that transformers does not know ({shown}): it cannot be run natively."
    if "Unrecognized configuration class" in text:
        return f"{name} is not a causal language model ({type(error).__name__}): give a decoder-only text model."
    return f"cannot open {name} ({type(error).__name__}: {shown}): the checkpoint or its config.json may be damaged."
