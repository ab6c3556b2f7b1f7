"""Change what a model does while it runs, and undo it: one context manager for each intervention.

All of them take a `Checkpoint`, a causal LM or its text decoder, act on every forward pass inside the
``with`` block, nest, and leave the model as it was however the block ends.  A tap that is entered inside the
block sees the changed model::

    with single_tone(model, pair=4), Tap(decoder, observer) as tap: ...

Those that change the rotation itself (`truncate`, `knockout`, `rope`) live in :mod:`rope_probe.rotation_changes`.

An intervention that a model cannot have is refused, never ignored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from .errors import ProbeError, UsageError
from .modules import attention_modules, decoder_layers, decoder_of
from .rotary import RotaryLayer, read_geometry
from .rotation_changes import knockout, rope, truncate
from .tap import Call, Tap
from .verify import pair_channels

__all__ = ["PARTS", "ablate", "knockout", "rope", "single_tone", "sublayers", "truncate"]

PARTS = ("mlp", "attention", "norm")


# -- on q and k ------------------------------------------------------------------------------------


def _keeping(channels: list[int]) -> Callable[[Call], tuple[torch.Tensor, torch.Tensor]]:
    """q and k with every channel at zero except these."""

    def change(call: Call):
        mask = torch.zeros(call.q.shape[-1], dtype=call.q.dtype, device=call.q.device)
        mask[channels] = 1
        return call.q * mask, call.k * mask

    return change


@contextlib.contextmanager
def single_tone(model, pair: int, layer: int | RotaryLayer | None = None) -> Iterator[None]:
    """In one layer, attend through a single rotary pair: every other channel of q and k is zero.

    Channels outside the rotary part (partial rotary, MLA) are zero as well: the scores of the layer are
    one tone, of the frequency of that pair, and nothing else.

    Parameters
    ----------
    model : Checkpoint or PreTrainedModel
    pair : int
        0 is the fastest.
    layer : int or RotaryLayer, optional
        Default: the first layer that rotates.

    Raises
    ------
    UsageError
        No such layer or pair.
    ProbeError
        The layer, or the pair, does not rotate.
    """
    decoder = decoder_of(model)
    if not isinstance(layer, RotaryLayer):
        layer = _layer(model, decoder, layer)
    if not 0 <= pair < layer.pairs:
        raise UsageError(f"layer {layer.layer} has no pair {pair}: its pairs are 0 to {layer.pairs - 1}.")
    if layer.inv_freq[pair] == 0:
        raise ProbeError(f"pair {pair} of layer {layer.layer} does not rotate, so it carries no tone.")
    with Tap(decoder, _keeping(pair_channels(layer, pair)), layers=[layer.layer]):
        yield


def _layer(model, decoder, index: int | None) -> RotaryLayer:
    layers = model.layers if hasattr(model, "geometry") else read_geometry(decoder).layers
    found = next((layer for layer in layers if (layer.rotates if index is None else layer.layer == index)), None)
    if found is None:
        raise UsageError(f"there is no layer {index}: the model has layers {layers[0].layer} to {layers[-1].layer}.")
    if not found.rotates:
        raise ProbeError(f"layer {found.layer} does not rotate, so it has no tone to inject.")
    return found


# -- on sub-layers ---------------------------------------------------------------------------------


def sublayers(decoder, index: int) -> dict[str, list[torch.nn.Module]]:
    """Attention, MLP and norms of one decoder layer, by name of the part.

    Norms are those of the residual stream; a norm of q and k belongs to attention.

    Raises
    ------
    ProbeError
        The layer is not made of these parts.
    """
    block, attention = decoder_layers(decoder).get(index), attention_modules(decoder).get(index)
    if block is None:
        raise UsageError(f"there is no layer {index} to take a part out of.")
    found: dict[str, list[torch.nn.Module]] = {part: [] for part in PARTS}
    for name, child in block.named_children():
        if any(module is attention for module in child.modules()):
            found["attention"].append(child)
        elif "norm" in type(child).__name__.lower():
            found["norm"].append(child)
        elif ("mlp" in name or "feed_forward" in name) and any(True for _ in child.parameters()):
            found["mlp"].append(child)
    missing = [part for part in PARTS if not found[part]]
    if missing:
        raise ProbeError(f"{type(block).__name__} has no {missing[0]} that could be told from its other parts.")
    return found


def _silent(_module, _args, output):
    """The sub-layer puts out zeros."""
    if isinstance(output, tuple):
        return (torch.zeros_like(output[0]), *output[1:])
    return torch.zeros_like(output)


def _undivided(module) -> Callable:
    """The norm without its division: whatever it multiplies and adds stays."""
    centred = _takes_out_mean(module)
    small = getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)) or 0.0

    def multiply(_module, args, output):
        x = args[0].float()
        if centred:
            x = x - x.mean(-1, keepdim=True)
        divisor = (x.square().mean(-1, keepdim=True) + small).sqrt()
        bias = getattr(module, "bias", None)
        scaled = output.float() if bias is None else output.float() - bias.float()
        return (scaled * divisor + (0 if bias is None else bias.float())).to(output.dtype)

    return multiply


def _takes_out_mean(module) -> bool:
    """Is this norm blind to a constant added to all channels?  Asked of the module itself."""
    weight = getattr(module, "weight", None)
    where = {} if weight is None else {"device": weight.device, "dtype": weight.dtype}
    x = torch.linspace(-1, 1, 64 if weight is None else len(weight), **where)[None, None]
    with torch.no_grad():
        here, shifted, opposite = (module(value).float() for value in (x, x + 1, -x))
    return float((here - shifted).norm()) < 0.1 * float((here - opposite).norm())


@contextlib.contextmanager
def ablate(model, part: str, layers) -> Iterator[None]:
    """Take a part out of some layers: their MLP or attention puts out zeros, or their norms do not divide.

    Parameters
    ----------
    model : Checkpoint or PreTrainedModel
    part : {"mlp", "attention", "norm"}
        ``norm``: each norm of the residual stream keeps its weight, its bias and its centring (layer norm), and
        leaves its division by the root mean square out.
    layers : iterable of int

    Raises
    ------
    UsageError
        No such part or layer.
    ProbeError
        The part cannot be told from the others in this architecture.
    """
    if part not in PARTS:
        raise UsageError(f"--ablate knows {', '.join(PARTS)}, not {part!r}.")
    decoder = decoder_of(model)
    modules = [module for index in layers for module in sublayers(decoder, index)[part]]
    with contextlib.ExitStack() as undo:
        for module in modules:
            hook = module.register_forward_hook(_undivided(module) if part == "norm" else _silent)
            undo.callback(hook.remove)
        yield
