"""What a cut of the rotation does: which pairs of which layers stop, and the angles that attention is handed instead.

Whatever a rotary module does for the length that runs (a table, frequencies rewritten while it runs, one ladder
for each type of layer), the angles reach every attention module as its `position_embeddings`.  A cut changes
them there, for the layers it is meant for, before anything is rotated: the pair is handed cos = a and sin = 0,
what a rotary module with inv_freq 0 would hand it, to the last bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from .errors import ProbeError, UsageError
from .modules import STILLED, attention_modules, decoder_of
from .rotary import Geometry, RotaryLayer, read_geometry
from .tap import Tap, input_device
from .verify import verified_geometry

# -- which pairs of which layers -------------------------------------------------------------------


def cut_pairs(
    layer: RotaryLayer, keep: float | None = None, floor: float | None = None, reverse: bool = False
) -> np.ndarray:
    """Pairs of a layer that a truncation keeps from turning.

    Parameters
    ----------
    keep : float, optional
        Share of the pairs that go on turning, the fastest ``int(keep · pairs)`` (p-RoPE, arXiv 2410.06205).
    floor : float, optional
        Cut pairs with inv_freq below this many times ``2π / L``, L the formation length (FoPE, arXiv 2412.17739).
    reverse : bool
        Cut from the other end: keep the slowest ``int(keep · pairs)``, cut the pairs that are not below the floor.

    Returns
    -------
    ndarray of bool, shape (pairs,)
    """
    index = np.arange(layer.pairs)
    cut = np.zeros(layer.pairs, dtype=bool)
    if keep is not None:
        kept = int(keep * layer.pairs)
        cut |= index < layer.pairs - kept if reverse else index >= kept
    if floor is not None:
        slow = layer.inv_freq < floor * 2 * np.pi / layer.length
        cut |= ~slow if reverse else slow
    return cut


def select_layers(geometry: Geometry, layers=None, layer_type: str | None = None) -> list[RotaryLayer]:
    """The layers an intervention is meant for; all that rotate if neither is given.

    Raises
    ------
    UsageError
        No such layer or layer type; a layer asked for by its number does not rotate.
    """
    known = {layer.layer: layer for layer in geometry.layers}
    wanted = set(known) if layers is None else set(layers)
    if not wanted or wanted - set(known):
        missing = min(wanted - set(known), default=None)
        raise UsageError(f"there is no layer {missing}: the model has layers {min(known)} to {max(known)}.")
    types = sorted({layer.layer_type for layer in geometry.layers if layer.rotates})
    if layer_type is not None and layer_type not in types:
        raise UsageError(f"no layer that rotates has type {layer_type!r}: the model has {', '.join(types) or 'none'}.")
    resting = [index for index in wanted if not known[index].rotates]
    if layers is not None and resting:
        raise UsageError(f"layer {min(resting)} does not rotate, so its rotation cannot be changed.")
    chosen = [known[i] for i in sorted(wanted) if known[i].rotates and layer_type in (None, known[i].layer_type)]
    if not chosen:
        raise UsageError(f"none of the layers asked for is of type {layer_type!r} and rotates.")
    return chosen


def running_length(model, length: int | None) -> int:
    """The length at which a rotation is measured: that which runs, or as much of the claimed one as is cheap."""
    claimed = int(getattr(decoder_of(model).config, "max_position_embeddings", 0) or 0)
    return max(2, length or min(claimed or 1024, 4096))


def geometry_of(model, length: int) -> Geometry:
    return model.geometry(length) if hasattr(model, "geometry") else verified_geometry(decoder_of(model), length)


# -- the angles that are handed to attention -------------------------------------------------------


@dataclass(frozen=True)
class _Angles:
    """How a layer is handed its angles.

    Attributes
    ----------
    pair_of : ndarray of int, shape (column,)
        Pair that each column belongs to (cos and sin may come once or twice, in either order).
    sine : int or None
        Which of the two tensors is the sine (GPT-J hands it first); None for complex numbers.
    still : Tensor, shape (column,)
        The cosine of a pair that does not turn: `attention_scaling` in the dtype of the model.
    """

    pair_of: np.ndarray
    sine: int | None
    still: torch.Tensor


def _handed(module, args, kwargs):
    """The `position_embeddings` of one call of an attention module."""
    found = kwargs.get("position_embeddings")
    pair = isinstance(found, (tuple, list)) and len(found) == 2 and all(isinstance(x, torch.Tensor) for x in found)
    if not pair and not (isinstance(found, torch.Tensor) and found.is_complex()):
        raise ProbeError(
            f"{type(module).__name__} is not handed its cos and sin as position_embeddings, "
            "so its rotation cannot be changed: use a model class of transformers 5."
        )
    return found


def handed_angles(decoder, layers: list[RotaryLayer]) -> dict[int, _Angles]:
    """What two tokens show of the way each layer is handed its angles."""
    modules = attention_modules(decoder)
    seen: dict[int, object] = {}

    def watch(index: int) -> Callable:
        def keep(module, args, kwargs) -> None:
            seen[index] = _handed(module, args, kwargs)

        return keep

    wanted = [layer.layer for layer in layers]
    ids = torch.tensor([[1, 2]], device=input_device(decoder))
    with contextlib.ExitStack() as undo:
        for index in wanted:
            hook = modules[index].register_forward_pre_hook(watch(index), with_kwargs=True)
            undo.callback(hook.remove)
        with Tap(decoder, lambda call: None, layers=wanted, stop=True) as tap:
            tap.run(ids)
        expected = {layer.layer: layer for layer in read_geometry(decoder, 2).layers}
    return {index: _read_angles(seen[index], expected[index], modules[index]) for index in wanted}


def _read_angles(handed, layer: RotaryLayer, module) -> _Angles:
    if isinstance(handed, torch.Tensor):
        parts, sine = (handed.real, handed.imag), None
    else:
        sine = 1 if not handed[1][..., 0, :].any() else 0  # at position 0 every sine is 0
        parts = handed[1 - sine], handed[sine]
    cos, sin = (part.flatten(0, -3)[0].double().cpu() if part.dim() > 2 else part.double().cpu() for part in parts)
    turned = torch.atan2(sin[1], cos[1]).numpy()
    pairs = np.arange(layer.pairs)
    candidates = {1: [pairs], 2: [np.tile(pairs, 2), np.repeat(pairs, 2)]}.get(len(turned) // max(1, layer.pairs), [])
    errors = [np.abs(turned - layer.inv_freq[pair_of]).max() for pair_of in candidates if len(pair_of) == len(turned)]
    if not errors or min(errors) > 0.02:  # a bfloat16 cosine of 1 rad is this far off at most
        raise ProbeError(
            f"the angles that {type(module).__name__} of layer {layer.layer} is handed are not those of its "
            "frequencies, so its rotation cannot be changed; please report this model."
        )
    return _Angles(candidates[int(np.argmin(errors))], sine, parts[0].reshape(-1, len(turned))[0].clone())


def _cutter(angles: _Angles, cut: np.ndarray) -> Callable:
    """A hook that hands attention the same angles, but for the pairs that are cut."""
    columns = torch.as_tensor(np.flatnonzero(cut[angles.pair_of]))
    last: list = [None, None]  # layers of a kind are handed the same object, which is changed once

    def change(module, args, kwargs):
        handed = _handed(module, args, kwargs)
        if handed is not last[0]:
            last[:] = handed, _cut(handed)
        return args, kwargs | {"position_embeddings": last[1]}

    def _cut(handed):
        device = (handed if angles.sine is None else handed[0]).device
        where, still = columns.to(device), angles.still.to(device)[columns.to(device)]
        if angles.sine is None:
            changed = handed.clone()
            changed[..., where] = still.to(changed.dtype)
            return changed
        changed = [part.clone() for part in handed]
        changed[1 - angles.sine][..., where] = still
        changed[angles.sine][..., where] = 0
        return tuple(changed)

    return change


@contextlib.contextmanager
def stilled(
    model,
    cuts: dict[int, np.ndarray],
    geometry: Geometry,
    length: int,
    angles: dict[int, _Angles] | None = None,
    verify: bool = True,
) -> Iterator[None]:
    """Some pairs of some layers do not turn.

    Parameters
    ----------
    model : Checkpoint or PreTrainedModel
    cuts : dict of layer -> ndarray of bool, shape (pairs,)
    geometry : Geometry
        As it was before.
    length : int
        Tokens that run.
    angles : dict, optional
        What `handed_angles` found, where it is known already.
    verify : bool
        Measure on single tokens that the rotation changed as asked.
    """
    decoder = decoder_of(model)
    layers = [layer for layer in geometry.layers if stops(layer, cuts.get(layer.layer))]
    if not layers:  # nothing turns that should not
        yield
        return
    modules, angles = attention_modules(decoder), angles or handed_angles(decoder, layers)
    cutters: dict[tuple, Callable] = {}
    with contextlib.ExitStack() as undo:
        for layer in layers:
            module, how, cut = modules[layer.layer], angles[layer.layer], cuts[layer.layer]
            key = (layer.kind, cut.tobytes(), how.pair_of.tobytes(), how.sine)
            hook = module.register_forward_pre_hook(cutters.setdefault(key, _cutter(how, cut)), with_kwargs=True)
            undo.callback(hook.remove)
            undo.callback(_forget, module, cut)
            STILLED.setdefault(module, []).append(cut)
        undo.enter_context(measured_anew(model))
        if verify:
            expected = {layer.layer: layer.inv_freq.copy() for layer in geometry.layers}
            for layer in layers:
                expected[layer.layer][cuts[layer.layer]] = 0
            verify_rotation(model, length, expected)
        yield


def stops(layer: RotaryLayer, cut: np.ndarray | None) -> bool:
    """Does a cut keep any pair of the layer from turning that turns now?"""
    return cut is not None and bool((layer.inv_freq[cut] > 0).any())


def _forget(module, cut: np.ndarray) -> None:
    STILLED[module] = [other for other in STILLED[module] if other is not cut]
    if not STILLED[module]:
        del STILLED[module]


@contextlib.contextmanager
def measured_anew(model) -> Iterator[None]:
    """A checkpoint remembers what it measured; inside an intervention it measures again."""
    if not hasattr(model, "_geometries"):
        yield
        return
    before, model._geometries = model._geometries, {}
    try:
        yield
    finally:
        model._geometries = before


def verify_rotation(model, length: int, expected: dict[int, np.ndarray]) -> None:
    """Refuse an intervention after which the model does not rotate as asked.

    Parameters
    ----------
    expected : dict of layer -> ndarray, shape (pairs,)
        Frequencies at `length` tokens; 0 or none at all for what must not turn.
    """
    try:
        found = {layer.layer: layer for layer in geometry_of(model, length).layers}
    except ProbeError as error:
        raise ProbeError(f"the rotation did not change as asked: {error}") from error
    for index, wanted in expected.items():
        got = found[index].inv_freq if found[index].rotates else np.zeros_like(wanted)
        if got.shape != wanted.shape or not np.allclose(got, wanted, rtol=1e-4, atol=0):
            raise ProbeError(f"the rotation of layer {index} did not change as asked; please report this model.")
