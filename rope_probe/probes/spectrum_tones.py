"""The single-tone experiment of `spectrum`: attend through one pair in one layer, and look for its tone there and after.

A later layer's own rotation puts every tone into its scores whatever was injected, so each number has a control:
the same layer without injection, a pure tone through the same window, and the profile with the rotation taken back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..errors import ProbeError, UsageError
from ..interventions import ablate, single_tone
from ..rotary import Geometry, RotaryLayer
from ..tap import Call, Tap
from ..verify import rotate
from . import spectrum_core as core
from .spectrum_summary import TONES, middle

# what is kept of a head: its profile as attention sees it, and with the layer's own rotation taken back
ROTATED, UNROTATED = 0, 1


class Tones:
    """Runs the experiment batch by batch, and keeps sums of products by distance for every setting.

    Parameters
    ----------
    decoder : PreTrainedModel
    geometry : Geometry
    inject : iterable of int, or "all"
        Pairs of the first rotating layer.
    depth : int
        Layers that are recorded, that one included.
    parts : tuple of str
        Parts to take out of the layers before the recorded one; each on its own.
    distances, length, segments : int
    """

    state = ("sums",)

    def __init__(
        self, decoder, geometry: Geometry, inject, depth: int, parts, distances: int, length: int, segments: int
    ):
        self.decoder = decoder
        first = next((layer for layer in geometry.layers if layer.rotates), None)
        if first is None:
            raise ProbeError("no layer of this model rotates, so there is no tone to inject.")
        self.first = first
        after = [layer for layer in geometry.layers if layer.layer >= first.layer]
        self.layers = after[:depth]
        self.pairs = _pairs(inject, self.first)
        self.parts = parts
        self.length, self.distances = length, distances
        groups = min(core.GROUPS, segments)
        self.sums = {
            layer.layer: np.zeros((1 + len(self.parts), 1 + len(self.pairs), groups, 2, layer.heads, n))
            for layer in self.layers
            for n in (core.available(layer, distances),)
        }
        self._pending: list[tuple[int, tuple, torch.Tensor]] = []

    # -- while the model runs

    def measure(self, ids: torch.Tensor, runs: list[tuple[int, slice]]) -> None:
        """Read one batch under every setting; `blocks` takes what was seen."""
        self._pending.clear()
        for p, part in enumerate((None, *self.parts)):
            for recorded, before in self._passes(part):
                for t, pair in enumerate((None, *self.pairs)):
                    with contextlib.ExitStack() as stack:
                        if part is not None:
                            stack.enter_context(ablate(self.decoder, part, before))
                        if pair is not None:
                            stack.enter_context(single_tone(self.decoder, pair, self.first))
                        observer = self._observer(p, t, runs)
                        tap = stack.enter_context(Tap(self.decoder, observer, layers=recorded, stop=True))
                        tap.run(ids)

    def _passes(self, part: str | None) -> Iterator[tuple[list[int], list[int]]]:
        """(layers to record, layers to take the part out of) of each forward pass."""
        indices = [layer.layer for layer in self.layers]
        if part is None:
            yield indices, []
        else:
            for number, index in enumerate(indices[1:], 1):
                yield [index], indices[:number]

    def _observer(self, part: int, tone: int, runs):
        kept = {layer.layer: layer for layer in self.layers}
        positions = torch.arange(self.length)

        def observe(call: Call) -> None:
            layer = kept[call.layer]
            n, chunk = core.available(layer, self.distances), core.chunk_of(layer, self.length)
            q, k = call.q.float(), call.k.float()
            for which in (ROTATED, UNROTATED):
                if which == UNROTATED:
                    q, k = (rotate(x, layer, positions, inverse=True) for x in (q, k))
                keys = core.without_first(k)
                for group, block in runs:
                    own, seen = q[block], keys[block]
                    if chunk:
                        own, seen = core.fold(own, chunk), core.fold(seen, chunk)
                    value = core.lag_sums([own], [seen], n, total=True)
                    self._pending.append((call.layer, (part, tone, group, which), value * call.scaling))

        return observe

    def blocks(self) -> dict[tuple, np.ndarray]:
        """What was seen of the batch, on the host; refused where it is not finite."""
        found = {}
        for layer, where, value in self._pending:
            if not torch.isfinite(value).all():
                part, tone, *_ = where
                what = "" if not tone else f" under injection of pair {self.pairs[tone - 1]}"
                what += "" if not part else f" without {self.parts[part - 1]}"
                raise ProbeError(f"the queries or keys of layer {layer} are not finite{what}: use --dtype float32.")
            found["tones", layer, *where] = value.cpu().numpy()
        self._pending.clear()
        return found

    def merge(self, key: Sequence[int], value: np.ndarray) -> None:
        """Add one of the blocks to the sums."""
        layer, *where = key
        self.sums[layer][tuple(where)] += value

    # -- afterwards

    def coordinates(self) -> dict:
        """Coordinates of the dimensions that the experiment adds."""
        found = {"inject": self.pairs, "inject_layer": [layer.layer for layer in self.layers]}
        return found | ({"ablate": list(self.parts)} if self.parts else {})

    def options(self) -> dict:
        """What was asked for, for the provenance."""
        return {"inject": self.pairs, "depth": len(self.layers), "ablate": list(self.parts)}

    def variables(self, members: np.ndarray, ds, window: str) -> dict:
        """Variables of the result; NaN in layers that were not looked at."""
        rows = {int(index): row for row, index in enumerate(ds["layer"].values)}
        shape = (1 + len(self.parts), len(self.pairs), len(rows), ds.sizes["head"])
        numbers = {name: np.full(shape, np.nan) for name in TONES}
        numbers |= {f"{name}_se": np.full(shape[:-1], np.nan) for name in TONES}
        limit = np.full((len(self.pairs), len(rows)), np.nan)
        for depth, layer in enumerate(self.layers):
            row, n, profiles = rows[layer.layer], core.available(layer, self.distances), self._profiles(layer)
            limit[:, row] = 1 - core.tone_share(self._frequencies, n, window)
            for p in range(1 if depth == 0 else shape[0]):  # before the first layer nothing can be taken out
                for t, omega in enumerate(self._frequencies):
                    with_and_without = profiles[p, [1 + t, 0]].swapaxes(0, 1)
                    near = core.near(omega, n)
                    heads, error = self._cell(with_and_without, members, near, window, later=depth > 0)
                    for name in TONES:
                        numbers[name][p, t, row, : layer.heads] = heads[name]
                        numbers[f"{name}_se"][p, t, row] = error[name]
        dims = ("ablate", "inject", "layer", "head")
        out = {name: (dims[1 : value.ndim], value[0]) for name, value in numbers.items()}
        out["leakage_tone"] = (dims[1:3], limit)
        if self.parts:
            for name, value in numbers.items():
                ablated = f"{name.removesuffix('_se')}_ablated{'_se' * name.endswith('_se')}"
                out[ablated] = (dims[: value.ndim], value[1:])
        return out | self._spectra(members, ds.sizes["head"], window)

    @property
    def _frequencies(self) -> np.ndarray:
        return self.first.inv_freq[self.pairs].astype(float)

    def _profiles(self, layer: RotaryLayer) -> np.ndarray:
        """Mean over positions, summed over segments: [part, tone, group, which, head, distance]."""
        n, chunk = core.available(layer, self.distances), core.chunk_of(layer, self.length)
        return self.sums[layer.layer] / core.counts(self.length, n, chunk)

    def _spectra(self, members: np.ndarray, heads: int, window: str) -> dict:
        """Spectra of the intact model, with every injection and without."""
        shape = (2, 1 + len(self.pairs), len(self.layers), heads, self.distances // 2 + 1)
        power = np.full(shape, np.nan, dtype=np.float32)
        for depth, layer in enumerate(self.layers):
            mean = self._profiles(layer)[0].sum(axis=1) / members.sum()  # [tone, which, head, distance]
            found = core.power_spectrum(mean, window).swapaxes(0, 1)
            power[:, :, depth, : layer.heads, : found.shape[-1]] = found
        dims = ("inject", "inject_layer", "head", "freq")
        return {
            "power_injected": (dims, power[ROTATED, 1:]),
            "power_unrotated_injected": (dims, power[UNROTATED, 1:]),
            "power_unrotated": (dims[1:], power[UNROTATED, 0]),
        }

    def _cell(self, sums, members, near, window: str, later: bool) -> tuple[dict, dict]:
        """Numbers of each head, and the standard error of the layer's, from sums [group, with | without, …]."""
        heads = self._numbers(sums.sum(axis=0) / members.sum(), near, window, later)

        def layer(mean):
            found = self._numbers(mean, near, window, later)
            return np.array([middle(name, found[name]) for name in TONES])

        return heads, dict(zip(TONES, core.errors(sums, members, layer)[-1], strict=True))

    def _numbers(self, mean: np.ndarray, near: np.ndarray, window: str, later: bool) -> dict[str, np.ndarray]:
        """The numbers of each head from its mean profiles, shape (with | without, which, head, distance)."""
        power = core.power_spectrum(mean, window)
        share = core.share_near(power, near)
        inside, all_of_it = (power * near).sum(axis=-1), power.sum(axis=-1)
        leakage, none = 1 - share[0, ROTATED], 1 - share[1, ROTATED]
        told = 1.0 if later else np.nan  # the others compare a later layer with itself
        carried = _ratio(*inside[:, UNROTATED]) * told
        elsewhere = _ratio(*(all_of_it - inside)[:, UNROTATED]) * told
        values = leakage, none, (leakage - none) * told, carried, elsewhere, _ratio(carried, elsewhere)
        return dict(zip(TONES, values, strict=True))


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """NaN where there is nothing to divide by."""
    return np.divide(above, below, out=np.full(below.shape, np.nan), where=below > 0)


def _pairs(inject, layer: RotaryLayer) -> list[int]:
    turning = [int(pair) for pair in np.flatnonzero(layer.inv_freq > 0)]
    if isinstance(inject, str) and inject == "all":
        return turning
    chosen = list(dict.fromkeys(int(pair) for pair in inject))
    wrong = [pair for pair in chosen if pair not in turning]
    if not chosen or wrong:
        raise UsageError(
            f"--inject {wrong[0] if wrong else 'names no pair'}: layer {layer.layer}, the first that rotates, "
            f"has rotating pairs {turning[0]} to {turning[-1]}; give some of them, or all."
        )
    return chosen
