"""The parts of a model that matter here: its text decoder, the attention and the rotary module of each layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from weakref import WeakKeyDictionary

import numpy as np
import torch

# attention module -> pairs that an intervention keeps from turning (one array of bool for each intervention)
STILLED: WeakKeyDictionary[torch.nn.Module, list[np.ndarray]] = WeakKeyDictionary()


def text_decoder(model):
    """The text model without its head (what q/k work runs)."""
    decoder = model.get_decoder()
    if not attention_modules(decoder):
        decoder = model if attention_modules(model) else decoder
    count = len(attention_modules(decoder))
    while count:
        inner = (child for child in decoder.children() if hasattr(child, "get_input_embeddings"))
        whole = next((child for child in inner if len(attention_modules(child)) == count), None)
        if whole is None:
            break
        decoder = whole
    return decoder


def decoder_of(model):
    """The text decoder of a `Checkpoint`, of a causal LM, or the decoder itself."""
    if hasattr(model, "decoder") and hasattr(model, "geometry"):
        return model.decoder
    return text_decoder(model) if hasattr(model, "get_decoder") else model


@cache
def _attends(cls) -> bool:
    """Does this class, or one it is derived from, attend through transformers' attention interface?"""
    for base in cls.__mro__:
        try:
            if "forward" in vars(base) and "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(base.forward):
                return True
        except (OSError, TypeError):
            continue
    return False


def attention_modules(decoder) -> dict[int, torch.nn.Module]:
    """Attention module of each layer index (the outermost one, vision towers left out)."""
    indexed = [
        (module.layer_idx, module)
        for name, module in decoder.named_modules()
        if isinstance(getattr(module, "layer_idx", None), int) and "vision" not in name
    ]
    chosen = [(index, module) for index, module in indexed if _attends(type(module))]  # type: ignore[arg-type]
    if not chosen:  # a class that goes another way is found too, so that it can be named
        chosen = [(index, module) for index, module in indexed if "attention" in type(module).__name__.lower()]
    found: dict[int, torch.nn.Module] = {}
    for index, module in chosen:
        found.setdefault(index, module)
    return dict(sorted(found.items()))


def decoder_layers(decoder) -> dict[int, torch.nn.Module]:
    """Decoder layer (the residual block) of each layer index."""
    names = {id(module): name for name, module in decoder.named_modules()}
    layers = {}
    for index, module in attention_modules(decoder).items():
        parts = names[id(module)].split(".")
        if str(index) in parts:
            layers[index] = decoder.get_submodule(".".join(parts[: parts.index(str(index)) + 1]))
    return layers


def layer_list(decoder) -> str:
    """Name of the list that holds the decoder layers; empty where there is none."""
    names = {id(module): name for name, module in decoder.named_modules()}
    parents = {names[id(layer)].rpartition(".")[0] for layer in decoder_layers(decoder).values()}
    return parents.pop() if len(parents) == 1 else ""


def _is_rotary(module) -> bool:
    names = {name for name, _ in module.named_buffers(recurse=False)}
    return any(name == "embed_positions" or name.endswith("inv_freq") for name in names)


def rotary_modules(decoder) -> dict[str, torch.nn.Module]:
    """Rotary modules by name: those whose own buffers hold inverse frequencies or a sin/cos table."""
    return {name: m for name, m in decoder.named_modules() if "vision" not in name and _is_rotary(m)}


# -- frequencies that the module itself changes with the length ------------------------------------


def _changing(module) -> list[str | None]:
    """Layer types (None: all) whose frequencies the module rewrites while it runs (LongRoPE, dynamic NTK)."""
    rope_type = getattr(module, "rope_type", None)
    kinds = rope_type if isinstance(rope_type, dict) else {None: rope_type}
    return [name for name, kind in kinds.items() if "dynamic" in str(kind) or kind == "longrope"]


def advance(module, layer_type: str | None, length: int) -> None:
    """Let a rotary module put itself in the state for `length` tokens, whatever it ran before.

    Position 0 comes first: dynamic NTK keeps the frequencies of the longest text it has seen until a
    text within the trained length takes them back.
    """
    if layer_type not in _changing(module):
        return
    device = next(module.buffers()).device
    named = () if layer_type is None else (layer_type,)
    with torch.no_grad():
        for position in {0: None, length - 1: None}:
            module(torch.zeros(1, device=device), torch.tensor([[position]], device=device), *named)


def forget_lengths(decoder) -> None:
    """Take back what the rotary modules of a live decoder remember of longer texts (dynamic NTK)."""
    for module in rotary_modules(decoder).values():
        for layer_type in _changing(module):
            advance(module, layer_type, 1)


def remember_frequencies(decoder) -> Callable[[], None]:
    """Note the frequencies that rotary modules rewrite while they run; call the result to put them back."""
    kept = []
    for module in rotary_modules(decoder).values():
        if _changing(module):
            buffers = {name: (buffer, buffer.clone()) for name, buffer in module.named_buffers(recurse=False)}
            kept.append((module, buffers, _memory(module)))

    def restore() -> None:
        with torch.inference_mode():  # the buffer may have been made in it
            for module, buffers, values in kept:
                for name, (buffer, copy) in buffers.items():
                    module._buffers[name] = buffer.copy_(copy)  # LongRoPE writes into it, dynamic NTK replaces it
                for name in _memory(module).keys() - values.keys():  # layer types get theirs while they run
                    delattr(module, name)
                vars(module).update(values)

    return restore


def _memory(module) -> dict:
    """What a rotary module remembers beside its buffers."""
    state = ("max_seq_len_cached", "attention_scaling")
    return {name: value for name, value in vars(module).items() if name.endswith(state)}
