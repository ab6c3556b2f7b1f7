"""Changes that could only hurt a sound checkpoint, tried in memory: where one helps, it names what is wrong.

A trained network is tuned to its own base, to the order of its keys and to the order of its layers.  So no change of
these makes text likelier, except where the checkpoint was stored or configured wrongly and the change takes that back.
Nothing is assumed about how good the model is: it is compared with itself, on the same tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..checkpoints import Checkpoint
from ..modules import decoder_layers
from ..rotary import Geometry, RotaryLayer
from ..tap import Call, Tap
from ..verify import rotate
from ..words import base as base_words
from ..words import ranges

BASES = (1e4, 1e5, 5e5, 1e6)  # those that most checkpoints are trained with


@dataclass(frozen=True)
class Change:
    """One change.

    Attributes
    ----------
    words : str
        What is done, as in "with …".
    cause : str
        What is wrong with the checkpoint if it helps.
    made : callable
        A context manager: the model is changed inside, and as it was afterwards.
    """

    words: str
    cause: str
    made: Callable


@contextlib.contextmanager
def _turned_anew(ckpt: Checkpoint, layers: list[RotaryLayer], change: Callable) -> Iterator[None]:
    """q and k of some layers, their rotation taken back, changed and rotated again."""
    by_index = {layer.layer: layer for layer in layers}

    def observe(call: Call):
        layer, positions = by_index[call.layer], torch.arange(call.q.shape[2])
        q, k = (rotate(x, layer, positions, inverse=True) for x in (call.q, call.k))
        q, k, layer = change(q, k, layer)
        return rotate(q, layer, positions), rotate(k, layer, positions)

    with Tap(ckpt.decoder, observe, layers=by_index):
        yield


def own_base(inv_freq: np.ndarray) -> float:
    """Base of the plain ladder that the two fastest pairs are on; NaN where they are on none."""
    return float((inv_freq[0] / inv_freq[1]) ** len(inv_freq)) if len(inv_freq) > 1 and inv_freq[1] > 0 else np.nan


def _running_base(layer: RotaryLayer) -> float:
    """The base that a layer runs with, whatever its config says."""
    return own_base(layer.inv_freq) if layer.rope_type == "default" else layer.base


def _rebased(base: float) -> Callable:
    def change(q, k, layer: RotaryLayer):
        ladder = (base / _running_base(layer)) ** (-np.arange(layer.pairs) / layer.pairs)
        return q, k, replace(layer, inv_freq=layer.inv_freq * ladder)

    return change


def bases(ckpt: Checkpoint, geometry: Geometry) -> list[Change]:
    """Other common bases, for each kind of layer that rotates."""
    found = []
    kinds = [kind for kind in geometry.kinds() if kind[0].rotates and _running_base(kind[0]) > 1]
    for kind in kinds:
        where = "" if len(kinds) == 1 else f" in layers {ranges([layer.layer for layer in kind])}"
        own = _running_base(kind[0])
        for base in BASES:
            if not 0.9 < base / own < 1.1:
                found.append(
                    Change(
                        f"base {base_words(base)}{where}",
                        f"it runs with base {own:.4g}{where}, and was trained with another",
                        lambda kind=kind, base=base: _turned_anew(ckpt, kind, _rebased(base)),
                    )
                )
    return found


def _reorder(layer: RotaryLayer, from_neighbours: bool, device) -> torch.Tensor:
    """Channels of a head with its rotary pairs moved from side by side to half apart, or back."""
    order = torch.arange(layer.head_dim, device=device)
    rotary = order[layer.offset : layer.offset + layer.rotary_dim]
    moved = rotary.reshape(-1, 2).T if from_neighbours else rotary.reshape(2, -1).T
    order[layer.offset : layer.offset + layer.rotary_dim] = moved.reshape(-1)
    return order


def orders(ckpt: Checkpoint, geometry: Geometry) -> list[Change]:
    """Keys, queries or both in the other order of channels (that of GGUF files and Meta's own)."""
    layers = [layer for layer in geometry.layers if layer.rotates and layer.pairs > 1]

    def reordered(sides: str, from_neighbours: bool) -> Callable:
        def change(q, k, layer: RotaryLayer):
            order = _reorder(layer, from_neighbours, q.device)
            return q[..., order] if "q" in sides else q, k[..., order] if "k" in sides else k, layer

        return change

    found = []
    for sides, noun in (("k", "keys"), ("q", "queries"), ("qk", "queries and keys")):
        for neighbours, order, other in ((True, "side by side", "half apart"), (False, "half apart", "side by side")):
            rows = " and ".join(f"{side}_proj" for side in sides)
            found.append(
                Change(
                    f"the pairs of the {noun} moved from {order} to {other}",
                    f"the rows of {rows} are permuted (as between GGUF or Meta files and transformers)",
                    lambda sides=sides, neighbours=neighbours: _turned_anew(ckpt, layers, reordered(sides, neighbours)),
                )
            )
    return found


@contextlib.contextmanager
def _without(layer: torch.nn.Module) -> Iterator[None]:
    def pass_on(_module, args, kwargs, output):
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    hook = layer.register_forward_hook(pass_on, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def skips(ckpt: Checkpoint) -> dict[int, Change]:
    """Each layer left out."""
    return {
        index: Change(
            f"layer {index} left out",
            f"layer {index} is damaged, or not in its place",
            lambda layer=layer: _without(layer),
        )
        for index, layer in decoder_layers(ckpt.decoder).items()
    }


@contextlib.contextmanager
def _exchanged(stack: torch.nn.ModuleList, i: int, j: int) -> Iterator[None]:
    stack[i], stack[j] = stack[j], stack[i]
    try:
        yield
    finally:
        stack[i], stack[j] = stack[j], stack[i]


def exchanges(ckpt: Checkpoint, geometry: Geometry, chosen: list[tuple[int, int]]) -> list[Change]:
    """Two layers exchanged, where they are of the same kind and built alike."""
    layers = decoder_layers(ckpt.decoder)
    stack = next(
        (m for m in ckpt.decoder.modules() if isinstance(m, torch.nn.ModuleList) and list(m) == list(layers.values())),
        None,
    )
    if stack is None or any(hasattr(layer, "_hf_hook") for layer in layers.values()):
        return []
    kinds = {layer.layer: layer.kind for layer in geometry.layers}
    shapes = {i: {name: p.shape for name, p in layer.named_parameters()} for i, layer in layers.items()}
    return [
        Change(
            f"layers {i} and {j} exchanged",
            f"layers {i} and {j} are in each other's place",
            lambda i=i, j=j: _exchanged(stack, i, j),
        )
        for i, j in chosen
        if kinds.get(i) == kinds.get(j) and shapes[i] == shapes[j]
    ]


@contextlib.contextmanager
def _tied(head: torch.nn.Module, weight: torch.nn.Parameter) -> Iterator[None]:
    own, head.weight = head.weight, weight
    try:
        yield
    finally:
        head.weight = own


def heads(ckpt: Checkpoint) -> list[Change]:
    """The input embedding as the head, where the head is another matrix of its shape."""
    head, embedding = ckpt.model.get_output_embeddings(), ckpt.model.get_input_embeddings()
    if head is None or head.weight is embedding.weight or head.weight.shape != embedding.weight.shape:
        return []
    return [
        Change(
            "the embedding as the head",
            "its head should be tied to the embedding, and is not",
            lambda: _tied(head, embedding.weight),
        )
    ]
