"""A model's configuration without its weights: found, checked, overridden, and read as a geometry."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

from . import limits
from .errors import ProbeError, UsageError, first_words
from .quiet import quiet
from .rotary import Geometry, config_geometry
from .sources import Source, check_config_file, find

# `--rope` shorthand -> the configuration's own key
SHORT = {"base": "rope_theta", "type": "rope_type", "original": "original_max_position_embeddings"}
# what describes the ladder itself and survives a change of the scaling type
LADDER = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def raw_config(name: str, revision: str | None = None, trust_remote_code: bool = False) -> tuple[Source, dict]:
    """A checkpoint's config.json as it stands, and where it is.

    `name` may also be a bare config.json; the weights need not be there.
    """
    from transformers import PreTrainedConfig

    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".json":
        check_config_file(path)
        source = Source(name, str(path), {"source": "config"}, local=True)
    else:
        source = find(name, revision, trust_remote_code)
    with source.explained():
        options = {key: value for key, value in source.options.items() if key != "trust_remote_code"}
        raw, _ = PreTrainedConfig.get_config_dict(source.place, **options)
    if not isinstance(raw, dict) or not raw.get("model_type"):
        raise ProbeError(f"{name} names no model_type: give the config.json of a transformers checkpoint.")
    limits.check_config(raw, name)
    return source, raw


def _rope_dicts(raw: dict):
    """Every dict of rope parameters in a raw configuration, old spelling or new."""
    for holder in (raw, raw.get("text_config")):
        if not isinstance(holder, dict):
            continue
        for key in ("rope_scaling", "rope_parameters"):
            value = holder.get(key)
            if isinstance(value, dict):
                nested = [entry for entry in value.values() if isinstance(entry, dict)]
                yield from nested or [value]


def _known_types() -> set[str]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return {"default", "mrope", *ROPE_INIT_FUNCTIONS}


def _refuse_unknown_types(name: str, raw: dict) -> None:
    """A rope type that transformers does not know must never become a silent default."""
    known = _known_types()
    for entry in _rope_dicts(raw):
        kind = entry.get("rope_type", entry.get("type"))
        if kind is not None and (not isinstance(kind, str) or kind not in known):
            hint = "; it is called longrope now: rename it in config.json" if kind == "su" else ""
            raise ProbeError(f"{name} has rope type {kind!r}, which transformers does not know{hint}.")


def load(name: str, revision: str | None = None, trust_remote_code: bool = False):
    """The transformers configuration of a checkpoint, and its raw dict; every failure is one sentence."""
    from transformers import AutoConfig

    source, raw = raw_config(name, revision, trust_remote_code)
    _refuse_unknown_types(name, raw)
    with quiet(), source.explained():
        return AutoConfig.from_pretrained(source.place, **source.options), raw


def parse_rope(text: str) -> dict:
    """`type=yarn,factor=4` -> {'rope_type': 'yarn', 'factor': 4.0}; `base`, `type` and `original` are shorthands."""
    found: dict = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key.replace("_", "").isalnum() or not value:
            raise UsageError(f"--rope {text!r}: write it like base=5e5 or type=yarn,factor=4.")
        key = SHORT.get(key, key)
        if key != "rope_type":
            try:
                value = json.loads(value)
            except ValueError:
                raise UsageError(f"--rope {part.strip()}: {value!r} is not a number.") from None
            if isinstance(value, bool) and key != "truncate" or not isinstance(value, (bool, int, float)):
                raise UsageError(f"--rope {part.strip()}: {value!r} is not a number.")
        found[key] = value
    return found


def _merged(parameters: dict, override: dict, config) -> dict:
    kind = override.get("rope_type", parameters.get("rope_type", "default"))
    if kind != parameters.get("rope_type", "default"):  # the parameters of another scaling mean nothing now
        parameters = {key: parameters[key] for key in LADDER if key in parameters}
    merged = {**parameters, **override, "rope_type": kind}
    if kind in ("yarn", "llama3", "longrope"):  # these need the length before extension
        merged.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    if kind == "llama3":
        merged.setdefault("low_freq_factor", 1.0)
        merged.setdefault("high_freq_factor", 4.0)
    return merged


def override_rope(config, override: dict):
    """A copy of a configuration with rope parameters merged in, for every layer type.

    Parameters
    ----------
    config : PreTrainedConfig
    override : dict
        Keys of `rope_parameters`, e.g. ``{"rope_type": "yarn", "factor": 4.0}``.  What is not named stays;
        a new ``rope_type`` drops the parameters of the old scaling.

    Raises
    ------
    UsageError
        The rope type is none that transformers knows.
    ProbeError
        The configuration has no rope parameters to override.
    """
    kind = override.get("rope_type", "default")
    if kind not in _known_types():
        raise UsageError(f"--rope type={kind}: choose from {', '.join(sorted(_known_types()))}.")
    changed = copy.deepcopy(config)
    text = changed.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None)
    if not parameters:
        raise ProbeError(
            f"a {text.model_type!r} model has no rope parameters in its config, so --rope cannot change them."
        )
    if any(isinstance(value, dict) for value in parameters.values()):
        text.rope_parameters = {
            kind: _merged(value, override, text) if isinstance(value, dict) else value
            for kind, value in parameters.items()
        }
    else:
        text.rope_parameters = _merged(dict(parameters), override, text)
    return changed


def read_config(
    name: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    length: int | None = None,
    rope: dict | None = None,
) -> Geometry:
    """What a checkpoint rotates, from its configuration alone (no weights are read).

    Parameters
    ----------
    name : str
        Hub id, folder, bare config.json, ``.gguf`` file or demo.
    length : int, optional
        Tokens that run, for frequencies that depend on it; default: the formation length.
    rope : dict, optional
        Override, see :func:`override_rope`.

    Returns
    -------
    Geometry
        With the raw config.json as ``raw``, for what the model class ignores.
    """
    config, raw = load(name, revision, trust_remote_code)
    try:
        with quiet():
            if rope:
                config = override_rope(config, rope)
            return replace(config_geometry(config, length), raw=raw)
    except ProbeError:
        raise
    except Exception as error:
        raise ProbeError(f"{name}: its config describes no model that can be built ({first_words(error)}).") from error
