"""The model inside a TransformerLens bridge.

A bridge puts modules of its own in the places of the model's, and its attention is a reimplementation that does not go
through transformers' attention interface.  So the same class is built again around the same tensors: nothing is copied,
and the bridge stays as it is.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch

from .errors import ProbeError

_WRAPPED = "._original_component"  # what a bridge calls the module it took the place of


def is_bridge(model) -> bool:
    """Is this a bridge of TransformerLens?  It is not imported to find out."""
    return any(kind.__module__.startswith("transformer_lens.") for kind in type(model).__mro__)


def inner_model(bridge):
    """The transformers model around the weights of a bridge.

    Parameters
    ----------
    bridge : transformer_lens.model_bridge.TransformerBridge

    Returns
    -------
    PreTrainedModel
        Of the class the bridge was made from; it shares its parameters and buffers with the bridge.

    Raises
    ------
    ProbeError
        The bridge holds no module, or its weights were processed, so that they are no longer the checkpoint's.
    """
    wrapped: Any = getattr(bridge, "original_model", None)
    if not hasattr(wrapped, "config"):
        raise ProbeError(
            f"{type(bridge).__name__} holds no transformers model: pass a TransformerBridge, or the hub id itself."
        )
    if getattr(bridge, "_weights_processed", False):
        raise ProbeError(
            "the weights of this bridge were processed (folded, centered), so they are no longer the checkpoint's: "
            "boot it anew, and call enable_compatibility_mode(no_processing=True) if you need that mode."
        )
    tensors = {
        name.replace(_WRAPPED, ""): tensor
        for name, tensor in chain(
            wrapped.named_parameters(remove_duplicate=False), wrapped.named_buffers(remove_duplicate=False)
        )
    }
    config = copy.deepcopy(wrapped.config)
    config._attn_implementation = None  # a bridge asks for eager attention; the model may choose
    with torch.device("meta"):
        plain = type(wrapped)._from_config(config)
    for module_name, module in plain.named_modules():
        for own in (module._parameters, module._buffers):
            for name, empty in own.items():
                if empty is None:
                    continue
                full = f"{module_name}.{name}" if module_name else name
                if full not in tensors:
                    raise ProbeError(f"the bridge has no {full} of {type(wrapped).__name__}: pass the hub id itself.")
                own[name] = tensors[full]
    return plain
