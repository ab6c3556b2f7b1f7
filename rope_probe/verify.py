"""Measure the rotation of a live model, instead of trusting its configuration.

A sequence of one token attends only to itself, so what every layer computes does not depend on the
token's position, except for the rotation of q and k.  Running the same single tokens at positions 0
and m therefore shows the rotation by m of every layer, with no knowledge of the family.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .errors import ProbeError
from .rotary import Geometry, RotaryLayer, read_geometry
from .tap import Call, Tap, input_device


def to_pairs(x: torch.Tensor, layer: RotaryLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second members of the rotary pairs of q or k as attention receives them.

    Parameters
    ----------
    x : Tensor, shape (..., channel)
    layer : RotaryLayer

    Returns
    -------
    (Tensor, Tensor)
        Views of shape (..., pair).
    """
    x = x[..., layer.offset : layer.offset + layer.rotary_dim]
    if layer.layout_rotated == "half":
        return x[..., : layer.pairs], x[..., layer.pairs :]
    return x[..., 0::2], x[..., 1::2]


def pair_channels(layer: RotaryLayer, pair: int) -> list[int]:
    """The two channels of a head, as attention receives it, that hold a rotary pair."""
    if layer.layout_rotated == "half":
        return [layer.offset + pair, layer.offset + layer.pairs + pair]
    return [layer.offset + 2 * pair, layer.offset + 2 * pair + 1]


def rotate(x: torch.Tensor, layer: RotaryLayer, positions: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotate (or un-rotate) the rotary channels of q or k by the layer's own angles.

    Angles are the float32 products the model itself forms; `attention_scaling` is left alone.

    Parameters
    ----------
    x : Tensor, shape (batch, head, token, channel)
    positions : Tensor, shape (token,)
    inverse : bool
        Undo the rotation.
    """
    if not layer.rotates:
        return x
    inv_freq = torch.as_tensor(layer.inv_freq, dtype=torch.float32, device=x.device)
    angle = positions.to(x.device, torch.float32)[:, None] * inv_freq
    cos, sin = angle.cos(), angle.sin()
    if inverse:
        sin = -sin
    first, second = (part.float() for part in to_pairs(x, layer))
    turned = first * cos - second * sin, second * cos + first * sin
    out = x.clone()
    for part, value in zip(to_pairs(out, layer), turned, strict=True):
        part.copy_(value)
    return out


def _single_tokens(decoder, positions: list[int], together: bool) -> list[dict[int, Call]]:
    """q and k of four single-token sequences, at each of the given positions: in one run, or in one for each."""
    vocabulary = decoder.get_input_embeddings().weight.shape[0]
    ids = torch.linspace(0.1, 0.9, 4).mul(vocabulary).long()[:, None].to(input_device(decoder))
    shots: list[dict[int, Call]] = []
    for group in [positions] if together else [[position] for position in positions]:
        calls: list[Call] = []
        places = torch.tensor(group, device=ids.device).repeat_interleave(len(ids))[:, None]
        with Tap(decoder, calls.append) as tap:
            tap.run(ids.repeat(len(group), 1), position_ids=places)
        for start in range(0, len(places), len(ids)):
            rows = slice(start, start + len(ids))
            shots.append({call.layer: replace(call, q=call.q[rows], k=call.k[rows]) for call in calls})
    return shots


def _error(before: torch.Tensor, after: torch.Tensor, layer: RotaryLayer, position: int) -> float:
    """Largest deviation of `after` from `before` rotated to `position`, relative to the largest channel."""
    expected = rotate(before.float(), layer, torch.tensor([position]))
    after = after.float()
    norms = expected.norm(), after.norm()
    if abs(float(norms[0] - norms[1])) > 0 and float(norms[1]) > 0:  # position-dependent temperature
        after = after * (norms[0] / norms[1])
    return float((expected - after).abs().max() / expected.abs().max().clamp_min(1e-30))


def verified_geometry(decoder, length: int) -> Geometry:
    """Geometry of a live decoder at `length` tokens, each layer's rotation measured.

    Layers that were declared to rotate and do not are marked so; layers that do not attend through
    softmax attention are left out.

    Raises
    ------
    ProbeError
        A layer's rotation is not the one its frequencies and layout describe, or its q or k are not finite.
    """
    return _measured(decoder, length)[0]


def rotation_error(decoder, length: int) -> tuple[float, int]:
    """Largest deviation of q and k from their verified rotation, over its tolerance, and the layer it is in.

    Raises
    ------
    ProbeError
        As :func:`verified_geometry`.
    """
    geometry, deviations = _measured(decoder, length)
    worst = max(range(len(deviations)), key=deviations.__getitem__)
    return deviations[worst], geometry.layers[worst].layer


def _measured(decoder, length: int) -> tuple[Geometry, list[float]]:
    """Verified geometry, and the deviation of each of its layers over the tolerance."""
    positions = sorted({1, max(1, length - 1)})
    declared = read_geometry(decoder, length)
    together = not any(layer.rope_type in ("dynamic", "longrope") for layer in declared.layers)  # one length a run
    origin, *shots = _single_tokens(decoder, [0, *positions], together)
    by_position = {p: declared if p + 1 >= length else read_geometry(decoder, p + 1) for p in positions}
    layers, deviations = [], []
    for index, layer in enumerate(declared.layers):
        if layer.layer not in origin:  # linear attention, state space layers
            continue
        layer = with_shapes(layer, origin[layer.layer])
        for shot in (origin, *shots):
            for side, x in (("q", shot[layer.layer].q), ("k", shot[layer.layer].k)):
                if not torch.isfinite(x).all():
                    raise not_finite(side, layer.layer)
        candidates = [layer]
        if layer.rotates:
            other = "half" if layer.layout_rotated == "interleaved" else "interleaved"
            candidates += [replace(layer, layout=other, layout_rotated=other), _still(layer)]
        errors = []
        for candidate in candidates:
            worst = 0.0
            for position, shot in zip(positions, shots, strict=True):
                there = by_position[position].layers[index]
                if candidate.rotates:
                    candidate_there = replace(candidate, inv_freq=there.inv_freq)
                else:
                    candidate_there = candidate
                before, after = origin[layer.layer], shot[layer.layer]
                tolerance = _tolerance(before.q.dtype, position)
                for a, b in ((before.q, after.q), (before.k, after.k)):
                    worst = max(worst, _error(a, b, candidate_there, position) / tolerance)
            errors.append(worst)
            if worst <= 1:
                layers.append(candidate)
                deviations.append(worst)
                break
        else:
            raise ProbeError(_mismatch(decoder, layer, errors))
    if not layers:
        raise ProbeError(f"{type(decoder).__name__} has no layer with softmax attention.")
    return replace(declared, layers=tuple(layers)), deviations


def not_finite(side: str, layer: int) -> ProbeError:
    """The refusal of infinities and NaN in the q, k or v of a layer."""
    what = {"q": "queries", "k": "keys", "v": "values"}[side]
    return ProbeError(
        f"the {what} of layer {layer} are not finite: use --dtype float32 or bfloat16, or check the weights."
    )


def _still(layer: RotaryLayer) -> RotaryLayer:
    """The layer, known not to rotate."""
    return replace(
        layer,
        rotates=False,
        rope_type="none",
        inv_freq=layer.inv_freq[:0],
        rotary_dim=0,
        offset=0,
        attention_scaling=1.0,
    )


def with_shapes(layer: RotaryLayer, call: Call) -> RotaryLayer:
    """The layer with the head counts and width that attention really receives."""
    shared = layer.kv_heads == 1 and layer.offset > 0  # one rotary key for all heads (MLA)
    return replace(
        layer,
        heads=call.q.shape[1],
        kv_heads=1 if shared else call.k.shape[1],
        head_dim=call.q.shape[-1],
        offset=call.q.shape[-1] - layer.rotary_dim if layer.offset else 0,
    )


def _tolerance(dtype: torch.dtype, position: int) -> float:
    """Rounding of cos and sin in the model's dtype, and of the float32 angle at `position`."""
    return (2e-4 if dtype in (torch.float32, torch.float64) else 4e-2) + 3e-7 * position


def _mismatch(decoder, layer: RotaryLayer, errors: list[float]) -> str:
    if not layer.rotates:
        return f"layer {layer.layer} of {type(decoder).__name__} rotates although its own code says it does not."
    return (
        f"layer {layer.layer} of {type(decoder).__name__}: q and k do not turn as inv_freq says "
        f"({errors[0]:.3g} times the tolerance under layout {layer.layout_rotated!r}, {errors[1]:.3g} under the other, "
        f"{errors[2]:.3g} without rotation): its code and its frequencies disagree; please report this model."
    )
