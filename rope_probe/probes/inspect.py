"""inspect: what a checkpoint rotates, layer by layer, from its configuration alone."""

from __future__ import annotations

import numpy as np

from .. import theory
from ..rotary import Geometry, RotaryLayer
from .inspect_notes import notes

BOUND_LIMIT = 2_000_000


def layer_row(layer: RotaryLayer) -> dict:
    """One layer as plain values (the entries of ``layers`` in the JSON output)."""
    turning = layer.inv_freq[layer.inv_freq > 0]
    return {
        "layer": layer.layer,
        "layer_type": layer.layer_type,
        "rotates": layer.rotates,
        "base": layer.base,
        "rope_type": layer.rope_type,
        "attention_scaling": layer.attention_scaling,
        "rotary_dim": layer.rotary_dim,
        "head_dim": layer.head_dim,
        "pairs": layer.pairs,
        "zero_pairs": layer.zero_pairs,
        "layout": layer.layout,
        "window": layer.window,
        "inv_freq": [float(value) for value in layer.inv_freq],
        "wavelength_min": float(2 * np.pi / turning.max()) if len(turning) else None,
        "wavelength_max": float(2 * np.pi / turning.min()) if len(turning) else None,
        "undertrained": theory.undertrained(layer.inv_freq, layer.length) if layer.rotates else 0,
        "length": layer.length,
    }


def kind_row(layers: list[RotaryLayer], claimed: int, bounds: dict | None = None) -> dict:
    """One kind of layer: its geometry, the predicted band, the floor and the bound.

    Parameters
    ----------
    layers : list of RotaryLayer
        All of the same kind.
    claimed : int
        Context the checkpoint claims, in tokens.
    bounds : dict, optional
        Bounds already found, by frequencies: kinds that differ in their window alone share one.
    """
    first = layers[0]
    row = {key: value for key, value in layer_row(first).items() if key not in ("layer", "inv_freq")}
    row |= {"layers": [layer.layer for layer in layers], "count": len(layers), "parameters": first.parameters}
    if not first.rotates:
        return row | {"predicted": {}, "critical_dimension": None, "bound": None, "reach": None}
    reach = min(claimed, first.window) if first.window and claimed else claimed or first.window
    bounds = {} if bounds is None else bounds
    key = (first.inv_freq.tobytes(), first.unrotated_pairs)
    if key not in bounds:
        bounds[key] = theory.bound_length(first.inv_freq, BOUND_LIMIT, first.unrotated_pairs)
    return row | {
        "predicted": {
            rule: theory.predicted_pair(first.base, first.length, first.pairs, rule=rule) for rule in theory.RULES
        },
        # channels whose pairs finish a turn; for a plain ladder the closed form of theory.critical_dimension
        "critical_dimension": 2 * (first.pairs - first.zero_pairs - row["undertrained"]),
        "bound": bounds[key],
        "reach": reach,
        "carries": bounds[key] is None or bounds[key] >= reach,
    }


def describe(geometry: Geometry, model: str, length: int | None = None) -> dict:
    """Everything `rope-probe inspect` says of one model.

    Parameters
    ----------
    geometry : Geometry
        From :func:`rope_probe.configs.read_config`.
    model : str
        What the user called it.
    length : int, optional
        The length the frequencies were read at.

    Returns
    -------
    dict
        ``layers`` (one entry a layer), ``kinds`` (one entry a kind of layer, with ``predicted`` pair by rule,
        ``critical_dimension``, ``bound``: the largest L with B(m) ≥ 0 up to L, None if beyond 2M tokens,
        and ``reach``: the context its heads see), ``notes`` in words, ``model_type``, ``heads``, ``kv_heads``,
        ``claimed_length``.
    """
    bounds: dict = {}
    return {
        "model": model,
        "model_type": geometry.model_type,
        "heads": geometry.heads,
        "kv_heads": geometry.kv_heads,
        "claimed_length": geometry.claimed_length,
        "at_length": length,
        "kinds": [kind_row(layers, geometry.claimed_length, bounds) for layers in geometry.kinds()],
        "notes": notes(geometry),
        "layers": [layer_row(layer) for layer in geometry.layers],
    }
