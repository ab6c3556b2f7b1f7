"""Interventions on the rotation: pairs that stand still, one pair knocked out, another ladder altogether."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch

from .configs import SHORT, override_rope
from .errors import ProbeError, UsageError, first_words
from .modules import STILLED, attention_modules, decoder_of, rotary_modules
from .rotary import RotaryLayer, decoder_without_weights, read_geometry
from .rotation_cuts import (
    cut_pairs,
    geometry_of,
    measured_anew,
    running_length,
    select_layers,
    stilled,
    verify_rotation,
)
from .scaling import PARAMETERS, inverse_frequencies
from .tap import Call, Tap, input_device
from .verify import pair_channels

MODES = ("unrotate", "remove")


@contextlib.contextmanager
def truncate(
    model,
    keep: float | None = None,
    floor: float | None = None,
    reverse: bool = False,
    layers=None,
    layer_type: str | None = None,
    length: int | None = None,
    verify: bool = True,
) -> Iterator[None]:
    """Keep only some of the pairs turning; the others are handed cos = attention_scaling and sin = 0.

    Parameters
    ----------
    model : Checkpoint or PreTrainedModel
    keep, floor, reverse
        Which pairs stop, see :func:`cut_pairs`; at least one of `keep` and `floor`.
    layers : iterable of int, optional
        Cut only there; default all that rotate.
    layer_type : str, optional
        Cut only in layers of this type, e.g. ``sliding_attention``.
    length : int, optional
        Tokens that run, for frequencies that depend on it.
    verify : bool
        Measure on single tokens that the rotation changed as asked.

    Raises
    ------
    UsageError
        No such layer; a share outside 0 … 1, or a negative floor.
    ProbeError
        The rotation of this model cannot be changed, or did not change as asked.
    """
    if keep is None and floor is None:
        raise UsageError("truncate needs keep, the share of pairs that go on turning, or floor, a multiple of 2π/L.")
    if keep is not None and not 0 <= keep <= 1:
        raise UsageError(f"keep is {keep}: give the share of pairs that go on turning, between 0 and 1.")
    if floor is not None and not 0 <= floor < np.inf:
        raise UsageError(f"floor is {floor}: give a multiple of 2π/L, 0 or more.")
    length = running_length(model, length)
    geometry = geometry_of(model, length)
    cuts = {x.layer: cut_pairs(x, keep, floor, reverse) for x in select_layers(geometry, layers, layer_type)}
    with stilled(model, cuts, geometry, length, verify=verify):
        yield


@contextlib.contextmanager
def knockout(
    model,
    pair: int,
    mode: str = "unrotate",
    layers=None,
    layer_type: str | None = None,
    length: int | None = None,
    verify: bool = True,
) -> Iterator[None]:
    """One pair loses its rotation, or its content.

    Parameters
    ----------
    model : Checkpoint or PreTrainedModel
    pair : int
        0 is the fastest; layers with fewer pairs are left alone.
    mode : {"unrotate", "remove"}
        The pair does not turn, or its components of q and k are 0.
    layers, layer_type, length, verify
        As for :func:`truncate`.

    Raises
    ------
    UsageError
        No such layer, pair or mode.
    ProbeError
        The pair does not turn anyway; or as for :func:`truncate`.
    """
    if mode not in MODES:
        raise UsageError(f"knockout knows {' and '.join(MODES)}, not {mode!r}.")
    length = running_length(model, length)
    geometry = geometry_of(model, length)
    chosen = select_layers(geometry, layers, layer_type)
    most = max(layer.pairs for layer in chosen)
    if not 0 <= pair < most:
        raise UsageError(f"there is no pair {pair}: these layers have pairs 0 to {most - 1}.")
    chosen = [layer for layer in chosen if pair < layer.pairs]
    if mode == "remove":
        with removed(decoder_of(model), chosen, pair, verify):
            yield
        return
    if not any(layer.inv_freq[pair] > 0 for layer in chosen):
        raise ProbeError(f"pair {pair} does not turn in any of these layers, so it has no rotation to lose.")
    cuts = {layer.layer: np.arange(layer.pairs) == pair for layer in chosen}
    with stilled(model, cuts, geometry, length, verify=verify):
        yield


@contextlib.contextmanager
def removed(decoder, layers: list[RotaryLayer], pair: int, verify: bool = True) -> Iterator[None]:
    """The components of one pair of q and k are 0 in these layers, which all have it."""
    channels = {layer.layer: torch.tensor(pair_channels(layer, pair)) for layer in layers}

    def change(call: Call):
        where = channels[call.layer].to(call.q.device)
        return call.q.index_fill(-1, where, 0), call.k.index_fill(-1, where, 0)

    def check(call: Call) -> None:
        where = channels[call.layer].to(call.q.device)
        if call.q[..., where].any() or call.k[..., where].any():
            raise ProbeError(f"pair {pair} of layer {call.layer} could not be removed; please report this model.")

    with Tap(decoder, change, layers=channels):
        if verify:
            with Tap(decoder, check, layers=channels, stop=True) as tap:
                tap.run(torch.tensor([[1]], device=input_device(decoder)))
            missing = set(channels) - tap.seen
            if missing:
                raise ProbeError(f"layer {min(missing)} was never seen attending, so nothing can be removed there.")
        yield


@contextlib.contextmanager
def rope(
    model, base: float | None = None, type: str | None = None, length: int | None = None, **parameters
) -> Iterator[None]:
    """Another base or scaling of the frequencies, in every layer that rotates.

    Parameters
    ----------
    model : Checkpoint or PreTrainedModel
    base : float, optional
        RoPE base (theta).
    type : str, optional
        ``default``, ``linear``, ``dynamic``, ``yarn``, ``llama3``, ``longrope``, ``proportional``; a new type drops
        the parameters of the old one.
    length : int, optional
        Tokens that run, for frequencies that depend on it.
    **parameters
        What the type needs, e.g. ``factor=4.0``, under its name in `rope_parameters`.

    Raises
    ------
    UsageError
        Nothing to change, or parameters that make no ladder.
    ProbeError
        The model has no such parameters, or did not rotate as asked.

    Notes
    -----
    The rotary modules are built again by their own class from the changed configuration, and what that
    configuration changes in the attention modules (the softmax scale of DeepSeek's YaRN) is taken over.
    """
    override = {"rope_theta": base, "rope_type": type} | {SHORT.get(k, k): v for k, v in parameters.items()}
    override = {key: value for key, value in override.items() if value is not None}
    if not override:
        raise UsageError("rope needs something to change: base, type, or a parameter of the type such as factor.")
    decoder, length = decoder_of(model), running_length(model, length)
    geometry = geometry_of(model, length)  # refuses a model that cannot be measured, before it is changed
    before, config = getattr(decoder.config, "rope_parameters", None), override_rope(decoder.config, override)
    _check_parameters(config, override, max(layer.rotary_dim for layer in geometry.layers) or 4)
    fresh, plain = decoder_without_weights(config), decoder_without_weights(decoder.config)
    wanted = _expected(fresh, length)
    with contextlib.ExitStack() as undo:
        for own in {id(c): c for m in decoder.modules() if (c := getattr(m, "config", None)) is not None}.values():
            if getattr(own, "rope_parameters", None) == before:
                _set(undo, own, "rope_parameters", fresh.config.rope_parameters)
        for name, old in rotary_modules(decoder).items():
            parent, _, leaf = name.rpartition(".")
            device = next(old.buffers()).device
            _set(undo, decoder.get_submodule(parent), leaf, old.__class__(fresh.config).to(device))
        known, changed = attention_modules(plain), attention_modules(fresh)
        for index, module in attention_modules(decoder).items():
            for name, value in vars(changed[index]).items():
                if isinstance(value, float) and vars(known[index]).get(name) != value:
                    _set(undo, module, name, value)
        undo.enter_context(measured_anew(model))
        for index, module in attention_modules(decoder).items():
            for still in STILLED.get(module, ()):
                wanted[index] = np.where(still, 0, wanted[index])
        verify_rotation(model, length, wanted)
        yield


def _set(undo: contextlib.ExitStack, holder, name: str, value) -> None:
    undo.callback(setattr, holder, name, getattr(holder, name))
    setattr(holder, name, value)


def _check_parameters(config, override: dict, dim: int) -> None:
    """Refuse parameters that make no ladder, or that its type would ignore."""
    parameters = config.rope_parameters
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for entry in nested or [parameters]:
        kind = entry["rope_type"]
        if kind not in PARAMETERS:
            raise UsageError(f"there is no rope type {kind!r}: choose from {', '.join(PARAMETERS)}.")
        unused = set(override) - {"rope_theta", "rope_type", *PARAMETERS[kind]}
        if unused:
            uses = ", ".join(PARAMETERS[kind]) or "nothing but the base"
            raise UsageError(f"rope type {kind!r} does not use {min(unused)}: it uses {uses}.")
        try:
            inverse_frequencies(entry, dim, length=1, max_position_embeddings=config.max_position_embeddings)
        except (ValueError, TypeError) as error:
            raise UsageError(f"the rotation cannot be changed so: {first_words(error)}") from error


def _expected(fresh, length: int) -> dict[int, np.ndarray]:
    """Frequencies of a decoder built from the changed configuration, held against the closed forms.

    Raises
    ------
    ProbeError
        The code of the family does not follow its configuration, so the change would be lost.
    """
    layers = [layer for layer in read_geometry(fresh, length).layers if layer.rotates]
    longest = fresh.config.max_position_embeddings
    for layer in layers:
        wanted, scaling = inverse_frequencies(
            layer.parameters, layer.rotary_dim, length=length, max_position_embeddings=longest
        )
        same = np.allclose(layer.inv_freq, wanted, rtol=1e-4, atol=0)
        if not same or not np.isclose(layer.attention_scaling, scaling, rtol=1e-4):
            raise ProbeError(
                f"a {fresh.config.model_type!r} model does not follow rope type {layer.rope_type!r} as it is defined, "
                "so its rotation cannot be changed so."
            )
    return {layer.layer: layer.inv_freq for layer in layers}
