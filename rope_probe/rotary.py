"""What each layer of a model rotates, and how: read from the modules that run.

Frequencies are never recomputed from configuration values.  They come from the rotary
module of the model itself, built from the configuration alone where there are no weights,
so that what is reported is what runs.  :mod:`rope_probe.theory` holds the independent closed forms.
"""

from __future__ import annotations

import copy
import math
import sys
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from .errors import ProbeError
from .guards import deinterleaves, rotates_by_guard
from .limits import HEAD_WIDTH, check_table
from .modules import STILLED, advance, attention_modules, rotary_modules

# Families whose rotation cannot be recognised from a `rotate_half` in their modelling file:
# model_type -> (layout of the checkpoint, layout of the vectors that attention receives).
LAYOUTS = {
    "gptj": ("interleaved", "interleaved"),
    "codegen": ("interleaved", "interleaved"),
    "llama4_text": ("interleaved", "interleaved"),
    "deepseek_v2": ("interleaved", "interleaved"),
}


@dataclass(frozen=True)
class RotaryLayer:
    """The rotation of one attention layer.

    Attributes
    ----------
    layer : int
        0-based index.
    layer_type : str
        ``full_attention``, ``sliding_attention`` or ``chunked_attention``.
    rotates : bool
        False for layers without positional rotation (NoPE).
    base : float
        RoPE base (theta) of this layer.
    rope_type : str
        ``default``, ``linear``, ``dynamic``, ``yarn``, ``longrope``, ``llama3``, ``proportional``.
    parameters : dict
        The scaling parameters as the configuration gives them.
    inv_freq : ndarray, shape (pairs,)
        Effective angular frequencies in radians per token, pair 0 the fastest; 0 = does not rotate.
    attention_scaling : float
        Factor on cos and sin (YaRN, LongRoPE).
    head_dim, rotary_dim, offset : int
        Width of a query head, width of its rotary part, first channel of the rotary part.
    layout, layout_rotated : str
        Pair layout of the checkpoint, and of the vectors handed to attention:
        ``half`` pairs channels (i, i + rotary_dim/2), ``interleaved`` pairs (2i, 2i+1).
    heads, kv_heads : int
        Query heads and distinct rotary key heads (1 for MLA, whose rotary key is shared).
    window : int
        Sliding window or attention chunk in tokens, 0 for none.
    length : int
        Formation length: what the frequencies were trained for (window where that is shorter).
    """

    layer: int
    layer_type: str
    rotates: bool
    base: float
    rope_type: str
    parameters: dict
    inv_freq: np.ndarray = field(repr=False)
    attention_scaling: float
    head_dim: int
    rotary_dim: int
    offset: int
    layout: str
    layout_rotated: str
    heads: int
    kv_heads: int
    window: int
    length: int

    @property
    def pairs(self) -> int:
        return len(self.inv_freq)

    @property
    def zero_pairs(self) -> int:
        return int((self.inv_freq == 0).sum())

    @property
    def unrotated_pairs(self) -> int:
        """Channel pairs of the head outside its rotary part (partial rotary, MLA)."""
        return (self.head_dim - self.rotary_dim) // 2

    @property
    def kind(self) -> tuple:
        """What makes two layers the same kind of layer."""
        return (self.layer_type, self.rotates, self.base, self.rope_type, self.window, self.head_dim, self.rotary_dim)


@dataclass(frozen=True)
class Geometry:
    """The rotation of every attention layer of a model."""

    model_type: str
    heads: int
    kv_heads: int
    claimed_length: int
    layers: tuple[RotaryLayer, ...]
    config: object = field(repr=False, default=None)
    raw: dict = field(repr=False, default_factory=dict)

    def kinds(self) -> list[list[RotaryLayer]]:
        """Layers grouped by kind, in order of first appearance."""
        groups: dict[tuple, list[RotaryLayer]] = {}
        for layer in self.layers:
            groups.setdefault(layer.kind, []).append(layer)
        return list(groups.values())


# -- reading a decoder ---------------------------------------------------------------------------


def _materialise(module, config):
    """A copy of a rotary module on the CPU; one built on the meta device is built again for real."""
    if any(buffer.is_meta for buffer in module.buffers()):
        check_table(module, config)
        return type(module)(config)
    return copy.deepcopy(module).to("cpu")


def _frequencies(module, layer_type: str, length: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies in force at `length` tokens, and the factor on cos and sin."""
    if hasattr(module, f"{layer_type}_inv_freq"):
        advance(module, layer_type, length)
        scaling = getattr(module, f"{layer_type}_attention_scaling", 1.0)
        return getattr(module, f"{layer_type}_inv_freq"), float(scaling)
    if hasattr(module, "inv_freq"):
        advance(module, None, length)
        scaling = getattr(module, "attention_scaling", 1.0)
        return module.inv_freq, float(scaling)
    if hasattr(module, "embed_positions"):  # a table [position, sin | cos]: its row 1 holds the angles
        if length > len(module.embed_positions):
            raise ProbeError(
                f"this model looks its angles up in a table of {len(module.embed_positions)} positions, "
                f"too few for {length} tokens: use a shorter --length."
            )
        sin, cos = module.embed_positions[1].double().chunk(2)
        return torch.atan2(sin, cos).float(), 1.0
    raise ProbeError(
        f"{type(module).__name__} holds no inverse frequencies for layers of type {layer_type!r}; "
        "please report this model."
    )


def _check_frequencies(inv_freq: torch.Tensor, layer: int, rope_type: str) -> np.ndarray:
    """Refuse frequencies that cannot be right (uninitialised memory, low precision)."""
    if inv_freq.dtype not in (torch.float32, torch.float64):
        raise ProbeError(
            f"inv_freq of layer {layer} is {str(inv_freq.dtype).removeprefix('torch.')}, which cannot tell positions "
            "above 256 apart: load the model with dtype=… instead of casting it afterwards."
        )
    values = inv_freq.detach().double().cpu().numpy()
    wrong = None
    if not np.isfinite(values).all():
        wrong = "not finite"
    elif (values < 0).any() or not values.any():
        wrong = "negative or all zero"
    elif (np.diff(values) > 0).any():
        wrong = "increasing"
    elif not 1e-3 <= values[0] <= 2:  # 1, or 1 over a scaling factor
        wrong = "not about 1 for the fastest pair"
    elif rope_type != "proportional" and (values == 0).any():
        wrong = "zero in some pairs"
    if wrong:
        shown = ", ".join(f"{v:.4g}" for v in values[:4])
        raise ProbeError(
            f"inv_freq of layer {layer} is {wrong} ({shown}, …): the buffer was not initialised when the model was "
            "loaded; build it again from the config or update the model's code."
        )
    return values


def _layout(module, config) -> tuple[str, str]:
    """Pair layout in the checkpoint and after rotation, from the family or its own `rotate_half`."""
    if config.model_type in LAYOUTS:
        return LAYOUTS[config.model_type]
    if deinterleaves(module):
        return "interleaved", "half"
    rotate = getattr(sys.modules.get(type(module).__module__), "rotate_half", None)
    if rotate is not None:
        try:
            moved = rotate(torch.arange(4.0).reshape(1, 1, 1, 4)).reshape(-1).tolist()
        except Exception:  # an unusual signature says nothing about the layout
            moved = None
        if moved == [-1, 0, -3, 2]:
            return "interleaved", "interleaved"
    return "half", "half"


def _rope_parameters(config, layer_type: str) -> dict | None:
    """Rope parameters of one layer type; None where the configuration says the type does not rotate."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if layer_type in parameters:
        nested = parameters[layer_type]
        return None if nested is None else dict(nested)
    return {key: value for key, value in dict(parameters).items() if not isinstance(value, dict)}


def _layer_type(config, module, index: int) -> tuple[str, int]:
    """Layer type and window in tokens (0 = none)."""
    types = getattr(config, "layer_types", None)
    window = getattr(module, "sliding_window", None) or getattr(config, "sliding_window", None) or 0
    if types:
        kind = types[index]
        if kind == "chunked_attention":
            return kind, int(getattr(config, "attention_chunk_size", 0) or 0)
        return kind, int(window) if kind == "sliding_attention" else 0
    return ("sliding_attention", int(window)) if window else ("full_attention", 0)


def _per_layer(config, index: int, attribute: str):
    """A configuration value that may differ by layer (Gemma 4); None where it is absent."""
    try:
        return getattr(config.per_layer_config[index], attribute, None)
    except (AttributeError, KeyError, IndexError, ValueError, TypeError):
        return getattr(config, attribute, None)


def _heads(config, module, index: int) -> tuple[int, int, int]:
    """(query heads, key heads, query head width) of a layer."""
    heads = int(config.num_attention_heads)
    groups, own = getattr(module, "num_key_value_groups", None), getattr(module, "num_kv_heads", None)
    if isinstance(own, int) and own > 0:
        kv = own
    elif isinstance(groups, int) and groups > 0 and heads % groups == 0:
        kv = heads // groups
    else:
        kv = _per_layer(config, index, "num_key_value_heads") or heads
    width = (
        getattr(module, "qk_head_dim", None)
        or getattr(module, "head_dim", None)
        or getattr(module, "head_size", None)
        or config.hidden_size // heads
    )
    return heads, int(kv), int(width)


def formation_length(config, parameters: dict, window: int) -> int:
    """Length the frequencies were trained for (METHODS: formation), in tokens."""
    length = (
        parameters.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        or getattr(config, "max_position_embeddings", None)
        or 0
    )
    return int(min(length, window) if window and length else length or window)


def read_geometry(decoder, length: int | None = None) -> Geometry:
    """Read what every layer of a text decoder rotates.

    Parameters
    ----------
    decoder : PreTrainedModel
        The text model without its head; its weights may be on the meta device.
    length : int, optional
        Tokens that run (LongRoPE and dynamic NTK switch with it); default: the formation length.

    Raises
    ------
    ProbeError
        No rotary embedding, an odd rotary dimension, or frequencies that cannot be right.
    """
    config = decoder.config
    name = type(decoder).__name__
    rotary = rotary_modules(decoder)
    attention = attention_modules(decoder)
    if not rotary or getattr(config, "alibi", False):
        reason = "uses ALiBi" if getattr(config, "alibi", False) else "has no rotary position embedding"
        raise ProbeError(f"{name} (model type {config.model_type!r}) {reason}: there is nothing to probe.")
    if not attention:
        raise ProbeError(f"{name} has no attention module with a layer index: this architecture is not supported.")
    copies = {key: _materialise(module, config) for key, module in rotary.items()}
    names = {id(module): key for key, module in decoder.named_modules()}
    layers = []
    for index, module in attention.items():
        own = [key for key in rotary if key.startswith(names[id(module)] + ".")]
        key = own[0] if own else ("rotary_emb" if "rotary_emb" in rotary else next(iter(rotary)))
        layers.append(_read_layer(config, module, copies[key], index, length))
    return Geometry(
        model_type=config.model_type,
        heads=int(config.num_attention_heads),
        kv_heads=_heads(config, *next((module, index) for index, module in attention.items()))[1],
        claimed_length=int(getattr(config, "max_position_embeddings", 0) or 0),
        layers=tuple(layers),
        config=config,
    )


def _read_layer(config, module, rotary, index: int, length: int | None) -> RotaryLayer:
    layer_type, window = _layer_type(config, module, index)
    parameters = _rope_parameters(config, layer_type)
    heads, kv_heads, head_dim = _heads(config, module, index)
    if head_dim > HEAD_WIDTH:
        raise ProbeError(f"heads of layer {index} have {head_dim:,} channels, beyond {HEAD_WIDTH:,}: check the config.")
    rotates = parameters is not None and rotates_by_guard(module)
    parameters = parameters or {}
    trained = formation_length(config, parameters, window)
    rope_type = str(parameters.get("rope_type", "default"))
    layout, layout_rotated = _layout(module, config)
    if rotates:
        raw, scaling = _frequencies(rotary, layer_type, length or trained or 1)
        inv_freq = ladder = _check_frequencies(raw, index, rope_type)
        for still in STILLED.get(module, ()):
            inv_freq = np.where(still, 0, inv_freq)
        rotates = bool(inv_freq.any())
    if not rotates:
        inv_freq, scaling, ladder = np.zeros(0), 1.0, np.zeros(0)
    rotary_dim = 2 * len(inv_freq)
    _refuse_odd(config, parameters, rope_type, head_dim, rotary_dim, index)
    mla = getattr(module, "qk_rope_head_dim", None)
    base = parameters.get("rope_theta")
    if base is None:  # no theta anywhere (GPT-J): measured on the ladder that runs
        base = float(f"{ladder[1] ** -len(ladder):.6g}") if len(ladder) > 1 else math.nan
    return RotaryLayer(
        layer=index,
        layer_type=layer_type,
        rotates=rotates,
        base=float(base),
        rope_type=rope_type if rotates else "none",
        parameters=parameters,
        inv_freq=inv_freq,
        attention_scaling=scaling,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        offset=head_dim - rotary_dim if mla and rotates else 0,
        layout=layout,
        layout_rotated=layout_rotated,
        heads=heads,
        kv_heads=1 if mla else kv_heads,
        window=window,
        length=trained,
    )


def _refuse_odd(config, parameters, rope_type, head_dim, rotary_dim, index) -> None:
    factor = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    declared = int(head_dim * factor) if factor and rope_type != "proportional" else None
    odd = declared if declared is not None and declared % 2 else None
    if rotary_dim > head_dim + 1:
        raise ProbeError(
            f"layer {index} would rotate {rotary_dim} channels of heads that have {head_dim}: check the config."
        )
    if rotary_dim > head_dim:  # an odd head: its last pair is one channel short
        odd = head_dim
    if odd:
        raise ProbeError(
            f"layer {index} would rotate {odd} of {head_dim} channels, but channels rotate in pairs: "
            "the head dimension times partial_rotary_factor must be even."
        )


# -- from a configuration alone ------------------------------------------------------------------


def decoder_without_weights(config):
    """The text decoder of a configuration, on the meta device (structure only, no memory)."""
    from transformers import AutoModel

    text = config.get_text_config(decoder=True)
    try:
        with torch.device("meta"):
            return AutoModel.from_config(text)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ProbeError(f"cannot build a {text.model_type!r} model from this config: {reason}") from error


def config_geometry(config, length: int | None = None) -> Geometry:
    """Geometry of a transformers configuration, without weights."""
    return read_geometry(decoder_without_weights(config), length)


def with_formation(layer: RotaryLayer, base: float | None, length: int | None) -> RotaryLayer:
    """The layer with another formation base or length (bands form early; see METHODS)."""
    return replace(layer, base=base or layer.base, length=length or layer.length)
