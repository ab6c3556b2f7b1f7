"""Checks that need no knowledge of language: the tool sees the model as it is, and the model is what its config says.

Each takes the `Subject` of :mod:`.check` and returns (passed, number, words); passed is None where it cannot be asked.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import torch

from ..scaling import inverse_frequencies, ladder
from ..verify import rotation_error
from ..weights import stored_tensors
from ..words import base as base_words
from ..words import ranges
from .check_attention import expected_reach
from .check_changes import own_base

SAME = 1e-4  # relative difference of frequencies that float32 explains
STORED = 0.02  # the same for frequencies in weight files, which may be bfloat16


def _precise(s) -> bool:
    return s.ckpt.dtype in ("float32", "float64")


def weights(s):
    """No tensor is empty of numbers, and the head is tied where the config says so."""
    bad, zero = [], []
    for name, tensor in s.ckpt.model.named_parameters():
        if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = (float(x) for x in torch.aminmax(tensor.detach()))
        if not math.isfinite(low) or not math.isfinite(high):
            bad.append(name)
        elif tensor.ndim > 1 and low == high == 0:
            zero.append(name)
    for names, what in ((bad, "not finite"), (zero, "all zero, as in a file that was never filled")):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            return False, len(names), f"{names[0]}{more}: {what}; fetch the checkpoint again."
    head, embedding = s.ckpt.model.get_output_embeddings(), s.ckpt.model.get_input_embeddings()
    tied = bool(getattr(s.ckpt.model.config, "tie_word_embeddings", False)) and head is not None
    words = "tensors that are not finite or all zero"
    if not tied or head.weight is embedding.weight or head.weight.is_meta:
        return True, 0, words + ("; the head is the embedding" if tied else "")
    if head.weight.shape == embedding.weight.shape:
        apart = float((head.weight - embedding.weight).detach().abs().max())
        if apart == 0:
            return True, 0, words
        return False, apart, "largest difference of head and embedding, and the config says they are tied."
    return False, None, "the head has another shape than the embedding, and the config says they are tied."


def tap(s):
    """The model's output is the same with the tap and without."""
    apart = float((s.watched[0] - s.plain).abs().max())
    if apart == 0:
        return True, 0, "largest difference of the output with and without the tap"
    again = float((s.hidden(s.ids[:1]) - s.plain).abs().max())
    if apart <= 4 * again:
        return True, apart, f"difference with the tap; two runs without it differ by {again:.3g} (not deterministic)"
    return False, apart, f"the output changes when the tap is on (two runs without it differ by {again:.3g})."


def rotation(s):
    """q and k turn as inv_freq and layout say."""
    worst, layer = rotation_error(s.ckpt.decoder, s.length)
    found = {x.layer: x for x in s.geometry.layers}
    declared = {x.layer: x for x in s.declared.layers if x.layer in found and x.rotates}
    words = f"deviation of q and k from their rotation over its tolerance (largest, layer {layer})"
    still = [index for index in declared if not found[index].rotates]
    if still:
        words += f"; layers {ranges(still)} were declared to rotate and do not"
    other = [
        index
        for index, x in declared.items()
        if found[index].rotates and found[index].layout_rotated != x.layout_rotated
    ]
    if other:
        words += f"; the pairs of layers {ranges(other)} are laid out otherwise than the code says"
    return worst <= 1, worst, words


def _closed_form(s, layer) -> np.ndarray | None:
    """Frequencies by the config alone; None for a rope type of the model's own."""
    if layer.parameters.get("rope_theta") is None:  # none anywhere (GPT-J): is it a ladder at all?
        return ladder(layer.base, layer.pairs) * layer.inv_freq[0]
    try:
        longest = s.ckpt.claimed_length or None
        return inverse_frequencies(
            layer.parameters, layer.rotary_dim, length=s.length, max_position_embeddings=longest
        )[0]
    except (ValueError, TypeError):
        return None


def _apart(values: np.ndarray, wanted: np.ndarray) -> float:
    """Largest relative difference; pairs that should stand still and turn are infinitely far off."""
    turning = wanted > 0
    if (values[~turning] != 0).any():
        return math.inf
    return float(np.abs(values[turning] / wanted[turning] - 1).max(initial=0.0))


def frequencies(s):
    """inv_freq of the modules, and any in the weight files, against the closed form of the config."""
    rotating = {layer.layer: layer for layer in s.declared.layers if layer.rotates}
    wanted = {index: _closed_form(s, layer) for index, layer in rotating.items()}
    worst = 0.0
    for index, layer in rotating.items():
        closed = wanted[index]
        if closed is None:
            continue
        apart = _apart(layer.inv_freq, closed)
        worst = max(worst, apart)
        if apart > SAME:
            says = f"base {base_words(layer.base)}, {layer.rope_type}"
            own = f"its fastest pairs are those of base {own_base(layer.inv_freq):.4g}"
            return False, apart, f"inv_freq of layer {index} is not that of the config ({says}): {own}."
    for name, tensor in _stored(s).items():
        number = re.search(r"(?:layers|h|blocks)\.(\d+)\.", name)
        layer = rotating.get(int(number[1]) if number else min(rotating, default=-1))
        values = tensor.double().numpy()
        if layer is None or values.shape != layer.inv_freq.shape:
            continue
        apart = min(_apart(values, layer.inv_freq), _apart(values, ladder(layer.base, layer.pairs)))
        if apart > STORED:
            own = f"{name} in the weight files is that of base {own_base(values):.4g}"
            return False, apart, f"{own}, and the config says base {base_words(layer.base)}: one of them is wrong."
    if all(x is None for x in wanted.values()):
        kinds = ", ".join(sorted({layer.rope_type for layer in rotating.values()})) or "none"
        return None, None, f"there is no closed form for rope type {kinds}"
    return True, worst, "largest relative difference of inv_freq from the closed form of the config"


def _stored(s) -> dict:
    """inv_freq that the weight files hold (older ones do), by name of the tensor."""
    folder = Path(str(getattr(s.ckpt.model, "name_or_path", "") or "."))
    if not (folder / "config.json").is_file() or s.ckpt.provenance.get("source") == "model object":
        return {}
    return {name: x for name, x in stored_tensors(folder, "inv_freq").items() if "vision" not in name}


def causality(s):
    """Another token in the middle leaves every output before it alone, and changes those from it on."""
    if s.length < 2:
        return None, None, "one token has nothing before it: use --length 2 or more."
    ids, middle = s.ids[:1].clone(), s.length // 2
    ids[0, middle] = (ids[0, middle] + s.ckpt.vocabulary // 2) % s.ckpt.vocabulary
    moved = (s.hidden(ids) - s.plain).abs().amax(-1)[0] / s.plain.abs().max()
    before, after = float(moved[:middle].max()), float(moved[middle:].max())
    tolerance = 1e-4 if _precise(s) else 3e-2
    if not math.isfinite(before + after):
        return False, None, "the output is not finite: use --dtype float32 or bfloat16, or check the weights."
    if after <= tolerance:
        return False, after, f"token {middle} changes nothing at all: the output does not depend on the text."
    if before > tolerance:
        return False, before, f"relative change of the outputs before token {middle} when it changes: they see ahead."
    return True, before, f"relative change of the outputs before token {middle} when it changes ({after:.2g} after it)"


def attention(s):
    """Windows are where the config has them, no row sees ahead, and weights sum to 1."""
    tolerance = 1e-3 if _precise(s) else 2e-2
    told: dict[str, list[int]] = {}
    for layer in s.declared.layers:
        seen, index = s.watched[1].get(layer.layer), layer.layer
        if seen is None:  # linear attention, state space layers
            continue
        if seen.ahead > 0:
            return False, seen.ahead, f"weight that layer {index} puts on later tokens: it is not causal."
        if not seen.high <= 1 + tolerance or not (seen.sinks or seen.low >= 1 - tolerance):
            return (
                False,
                seen.low,
                f"sum of attention weights in layer {index} (up to {seen.high:.4g}), which should be 1.",
            )
        wanted = expected_reach(layer, s.length)
        if not 0.9 * wanted <= seen.reach <= wanted:
            says = f"by its config ({layer.layer_type}) it should see {wanted + 1:,}"
            return False, seen.reach + 1, f"tokens that layer {index} sees, itself counted; {says}."
        words = f"all {s.length:,} tokens are seen"
        if layer.window:
            held = layer.window < s.length
            words = f"the window of {layer.window:,} " + ("holds" if held else f"is not reached by {s.length:,} tokens")
        told.setdefault(words, []).append(index)
    return (
        True,
        0,
        "weight on later tokens; " + "; ".join(f"{words} in layers {ranges(x)}" for words, x in told.items()),
    )


def norms(s):
    """q and k are finite, and no layer's are zero."""
    found = s.watched[1]
    for side, noun in (("q_norm", "queries"), ("k_norm", "keys")):
        for index, seen in found.items():
            low, high = getattr(seen, side)
            if math.isnan(low):
                return False, None, f"the {noun} of layer {index} are not finite: use --dtype float32 or bfloat16."
            if high == 0:
                return False, 0, f"norm of every one of the {noun} of layer {index}: check its weights."
    largest = max(found, key=lambda index: found[index].k_norm[1])
    low = min(seen.k_norm[0] for seen in found.values())
    q = min(seen.q_norm[0] for seen in found.values()), max(seen.q_norm[1] for seen in found.values())
    words = f"largest mean key norm of a head (layer {largest}; smallest {low:.3g}; queries {q[0]:.3g} to {q[1]:.3g})"
    return True, found[largest].k_norm[1], words
