"""What is unusual about a model's rotation, in words."""

from __future__ import annotations

import math

import numpy as np

from .. import scaling
from ..rotary import Geometry, RotaryLayer
from ..words import ranges


def notes(geometry: Geometry) -> list[str]:
    """One sentence for each thing a reader of the numbers should know.

    Parameters
    ----------
    geometry : Geometry
        With its raw configuration, where there is one.
    """
    found = []
    still = [layer.layer for layer in geometry.layers if not layer.rotates]
    if still:
        found.append(f"layers {ranges(still)} do not rotate (NoPE).")
    for layers in geometry.kinds():
        if layers[0].rotates:
            found += _kind(geometry, layers[0])
    return list(dict.fromkeys(found)) + _length(geometry) + _unnamed(geometry)


def _kind(geometry: Geometry, layer: RotaryLayer) -> list[str]:
    found = []
    if layer.offset:
        found.append(
            f"MLA: the last {layer.rotary_dim} of {layer.head_dim} channels rotate, one rotary key for all heads."
        )
    elif layer.rotary_dim < layer.head_dim:
        found.append(f"partial rotary: the first {layer.rotary_dim} of {layer.head_dim} channels rotate.")
    if layer.zero_pairs:
        found.append(
            f"proportional: {layer.zero_pairs} of {layer.pairs} pairs in {layer.layer_type} layers have frequency 0 "
            "(the slowest ones never turn)."
        )
    if layer.layout == "interleaved":
        how = ", put into halves before rotating" if layer.layout_rotated == "half" else ""
        found.append(f"interleaved pairs: channels (2i, 2i+1) turn together{how}.")
    scale = {"longrope": _longrope, "dynamic": _dynamic, "yarn": _yarn, "llama3": _llama3}.get(layer.rope_type)
    if scale:
        found += scale(geometry, layer)
    found += _formula(geometry, layer)
    return found


def _longrope(geometry: Geometry, layer: RotaryLayer) -> list[str]:
    length = layer.parameters.get("original_max_position_embeddings", layer.length)
    return [
        f"LongRoPE: up to {length:,} tokens the short factors are in force, beyond it the long ones (--length shows either); "
        f"attention_scaling {layer.attention_scaling:.4f} in both."
    ]


def _dynamic(geometry: Geometry, layer: RotaryLayer) -> list[str]:
    return [
        f"dynamic NTK: beyond {layer.length:,} tokens the base grows with the length that runs (--length shows it)."
    ]


def _yarn(geometry: Geometry, layer: RotaryLayer) -> list[str]:
    ends = "real" if layer.parameters.get("truncate") is False else "rounded to whole pairs"
    found = [
        f"YaRN as released: the ramp is linear in the pair index, its ends {ends}; the paper's is linear in turns."
    ]
    text = geometry.raw.get("text_config") or geometry.raw
    given = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if geometry.raw and "original_max_position_embeddings" not in str(given):
        found.append(
            "YaRN without original_max_position_embeddings: transformers puts max_position_embeddings there, "
            "so the ramp may be that of the extended length."
        )
    return found


def _llama3(geometry: Geometry, layer: RotaryLayer) -> list[str]:
    if layer.parameters.get("low_freq_factor") == layer.parameters.get("high_freq_factor"):
        return [
            "llama3 scaling with low_freq_factor = high_freq_factor: no ramp, the frequencies are cut in two groups."
        ]
    return []


def _formula(geometry: Geometry, layer: RotaryLayer) -> list[str]:
    """The ladder that runs against the one its parameters describe."""
    if not layer.parameters.get("rope_theta"):
        return []
    try:
        expected, _ = scaling.inverse_frequencies(
            layer.parameters,
            layer.rotary_dim,
            length=layer.length,
            max_position_embeddings=geometry.claimed_length or None,
        )
    except ValueError:
        return []
    if layer.rope_type in ("longrope", "dynamic"):  # depend on the length that was asked for
        return []
    turning = expected > 0
    if len(expected) == layer.pairs and np.allclose(layer.inv_freq[turning], expected[turning], rtol=1e-4, atol=0):
        return []
    return [
        f"{layer.layer_type} layers do not run the frequencies their parameters describe "
        f"(rope type {layer.rope_type}, base {layer.base:g}); those that run are shown."
    ]


def _length(geometry: Geometry) -> list[str]:
    found = []
    claimed = geometry.claimed_length
    raw = geometry.raw.get("text_config") or geometry.raw
    trained = {layer.length for layer in geometry.layers if layer.rotates and layer.length != layer.window}
    for length in sorted(trained):
        if length and claimed and length != claimed:
            found.append(f"claims {claimed:,} tokens; its frequencies were formed at {length:,}, then extended.")
    chunked = raw.get("dual_chunk_attention_config")
    if isinstance(chunked, dict) and chunked.get("original_max_position_embeddings", claimed) != claimed:
        found.append(
            f"trained at {chunked['original_max_position_embeddings']:,} tokens (dual_chunk_attention_config, which "
            f"transformers ignores); the config claims {claimed:,}."
        )
    longest = raw.get("model_max_length")
    if isinstance(longest, (int, float)) and math.isfinite(longest) and claimed and claimed < longest < 1e9:
        found.append(
            f"model_max_length is {int(longest):,}, max_position_embeddings {claimed:,}: the latter is used here."
        )
    return found


def _unnamed(geometry: Geometry) -> list[str]:
    """Values the config does not name and the model class supplies."""
    if not geometry.raw:
        return []
    text = geometry.raw.get("text_config") or geometry.raw
    spellings = ("rope_theta", "rotary_emb_base", "rope_ratio")
    holders = [text, *(text.get(key) or {} for key in ("rope_parameters", "rope_scaling"))]
    holders += [entry for holder in holders[1:] for entry in holder.values() if isinstance(entry, dict)]
    found = []
    if not any(holder.get(key) is not None for holder in holders for key in spellings):
        bases = sorted({layer.base for layer in geometry.layers if layer.rotates})
        shown = " and ".join(f"{base:g}" for base in bases)
        found.append(f"the config names no base; {shown} is the default of its {geometry.model_type} class.")
    if not any(key in text for key in ("max_position_embeddings", "n_positions", "seq_length", "n_ctx")):
        found.append(f"the config names no length; {geometry.claimed_length:,} is the default of its class.")
    return found
