"""Raw access: q, k, v, scores and weights of chosen layers and heads, as arrays."""

from __future__ import annotations

import numpy as np
import torch

from .attention import scores, weights
from .checkpoints import Checkpoint
from .errors import ProbeError
from .probes.common import choose_layers
from .tap import Call, Tap, input_device
from .texts import from_tokens
from .verify import rotate

KEEP = ("q", "k", "v", "q_before", "k_before", "scores", "weights")


class capture:  # noqa: N801 - used as a verb: `with rp.capture(ckpt) as c`
    """Keep what attention sees in chosen layers and heads.

    Parameters
    ----------
    ckpt : Checkpoint
    layers : iterable of int, optional
        Default all.
    heads : iterable of int, optional
        Query heads.  When given, `k` and `v` are those each chosen head reads; otherwise all kv heads, once.
    keep : tuple of str
        Any of ``q``, ``k`` (after rotation), ``q_before``, ``k_before`` (before it, after any q/k norm),
        ``v``, ``scores`` (after scale and soft-cap, -inf where masked), ``weights``.

    Attributes
    ----------
    q, k, v, q_before, k_before : dict of layer -> ndarray, shape (batch, head or kv_head, token, channel)
    scores, weights : dict of layer -> ndarray, shape (batch, head, query, key)

    Examples
    --------
    >>> with rp.capture(ckpt, layers=[0, 5], heads=[1], keep=("q", "k", "scores")) as c:
    ...     c.run(tokens)            # or any forward pass of ckpt.model
    >>> c.scores[5].shape            # (batch, 1, T, T)

    The arrays are those of the latest forward pass.  T × T maps cost T² numbers per head kept.
    """

    weights: dict[int, np.ndarray]  # as every other name in KEEP that is asked for

    def __init__(self, ckpt: Checkpoint, layers=None, heads=None, keep=("q", "k")):
        keep = (keep,) if isinstance(keep, str) else tuple(keep)
        unknown = [name for name in keep if name not in KEEP]
        if unknown:
            raise ProbeError(f"keep knows {', '.join(KEEP)}, not {unknown[0]!r}.")
        self._ckpt, self._keep, self._wanted = ckpt, keep, layers
        self._heads = None if heads is None else torch.as_tensor(list(heads), dtype=torch.long)
        self._geometries: dict[int, dict] = {}
        for name in KEEP:
            setattr(self, name, {})

    def __enter__(self) -> capture:
        geometry = self._ckpt.geometry(2)
        chosen = choose_layers(geometry, self._wanted)
        count = min(layer.heads for layer in chosen)
        if self._heads is not None and (
            not len(self._heads) or not 0 <= self._heads.min() <= self._heads.max() < count
        ):
            raise ProbeError(f"heads {self._heads.tolist()} are not all between 0 and {count - 1}.")
        self._tap = Tap(self._ckpt.decoder, self._see, layers=[layer.layer for layer in chosen])
        self._tap.__enter__()
        return self

    def __exit__(self, *exc) -> None:
        self._tap.__exit__(*exc)

    def __getitem__(self, name: str) -> dict[int, np.ndarray]:
        return getattr(self, name)

    def run(self, tokens) -> capture:
        """Read token ids (shape (T,) or (batch, T)) through the decoder, without computing logits."""
        ids = from_tokens(_rows(tokens), self._ckpt.vocabulary, None, None).ids
        self._prepare(ids.shape[1])
        self._tap.run(torch.as_tensor(ids, device=input_device(self._ckpt.decoder)))
        return self

    def _prepare(self, length: int) -> None:
        """Un-rotating needs the frequencies in force; measured outside the forward pass where possible."""
        if length not in self._geometries and {"q_before", "k_before"} & set(self._keep):
            watching, self._tap.observer = self._tap.observer, lambda call: None
            try:
                layers = self._ckpt.geometry(max(2, length)).layers
            finally:
                self._tap.observer = watching
            self._geometries[length] = {layer.layer: layer for layer in layers}

    def _see(self, call: Call) -> None:
        heads = self._heads
        group = call.q.shape[1] // call.k.shape[1]
        q = call.q if heads is None else call.q[:, heads]
        k, v = (x if heads is None else x[:, heads // group] for x in (call.k, call.v))
        kept = {"q": q, "k": k, "v": v}
        if {"q_before", "k_before"} & set(self._keep):
            length = call.q.shape[2]
            if length not in self._geometries:
                raise ProbeError("q_before and k_before need c.run(tokens), which measures the rotation first.")
            layer = self._geometries[length][call.layer]
            positions = torch.arange(length)
            for name, x in (("q_before", q), ("k_before", k)):
                kept[name] = rotate(x, layer, positions, inverse=True) / layer.attention_scaling**layer.rotates
        if {"scores", "weights"} & set(self._keep):
            rows = torch.arange(call.q.shape[2], device=call.q.device)
            kept["scores"] = scores(call, rows, heads)
            if "weights" in self._keep:
                kept["weights"] = weights(kept["scores"], call, heads)
        for name in self._keep:
            getattr(self, name)[call.layer] = kept[name].detach().float().cpu().numpy()


def _rows(tokens):
    """Token ids as a 2-d array; a flat list is one segment."""
    if isinstance(tokens, str):
        return tokens
    array = tokens.detach().cpu().numpy() if hasattr(tokens, "detach") else np.asarray(tokens)
    return array[None] if array.ndim == 1 else array


def attention_map(ckpt: Checkpoint, layer: int, head: int, tokens) -> np.ndarray:
    """Attention weights of one head on one segment.

    Parameters
    ----------
    tokens : array of int, shape (T,) or (1, T)

    Returns
    -------
    ndarray, shape (T, T)
        Row = query; rows sum to 1, or to less where the model has sink logits.
    """
    rows = _rows(tokens)
    if not isinstance(rows, str) and len(rows) != 1:
        raise ProbeError(f"attention_map draws one segment, and {len(rows)} were given: pass tokens[0].")
    with capture(ckpt, layers=[layer], heads=[head], keep=("weights",)) as c:
        c.run(rows)
    return c.weights[layer][0, 0]
