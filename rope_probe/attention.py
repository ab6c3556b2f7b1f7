"""Scores and weights of chosen query rows, from the q and k of a tap: never more than the rows asked for."""

from __future__ import annotations

import numpy as np
import torch

from .tap import Call


def visible(call: Call, rows: torch.Tensor) -> torch.Tensor:
    """Which keys the queries at `rows` may see: bool, shape (1 or batch, 1 or head, row, key).

    Taken from the mask that attention itself was given; no mask means plain causal.
    """
    mask = call.mask
    if mask is not None and mask.dim() == 4:
        chosen = mask[..., rows, : call.k.shape[2]]
        return chosen if mask.dtype == torch.bool else chosen > torch.finfo(mask.dtype).min / 2
    keys = torch.arange(call.k.shape[2], device=call.k.device)
    offset = call.k.shape[2] - call.q.shape[2]
    distance = (rows + offset)[:, None] - keys
    seen = distance >= 0
    if call.window:
        seen = seen & (distance < call.window)
    return seen[None, None]


def logits(call: Call, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scores of some queries against some keys of a call, after scale and soft-cap, in float32.

    Parameters
    ----------
    q : Tensor, shape (..., head, row, channel)
    k : Tensor, shape (..., kv_head, key, channel)
        Consecutive heads share a kv head.

    Returns
    -------
    Tensor, shape (..., head, row, key)
    """
    heads, kv_heads = q.shape[-3], k.shape[-3]
    stacked = q.float().reshape(*q.shape[:-3], kv_heads, heads // kv_heads * q.shape[-2], q.shape[-1])
    out = torch.matmul(stacked, k.float().transpose(-1, -2))
    return _finish(out.reshape(*q.shape[:-1], k.shape[-2]), call)


def _finish(products: torch.Tensor, call: Call) -> torch.Tensor:
    products.mul_(call.scaling)
    if call.softcap is not None:
        products.div_(call.softcap).tanh_().mul_(call.softcap)
    return products


def scores(call: Call, rows: torch.Tensor, heads: torch.Tensor | None = None, mask: bool = True) -> torch.Tensor:
    """Pre-softmax scores of query rows, after scale and soft-cap, in float32.

    Parameters
    ----------
    call : Call
    rows : Tensor of int, shape (row,)
        Query positions.
    heads : Tensor of int, optional
        Query heads; default all.
    mask : bool
        Put -inf where a key is not visible.

    Returns
    -------
    Tensor, shape (batch, head, row, key)
    """
    count = call.q.shape[1]
    if heads is None:
        out = logits(call, call.q[:, :, rows], call.k)
    else:
        heads = heads.to(call.q.device)
        out = logits(call, call.q[:, heads][:, :, rows], call.k[:, heads // (count // call.k.shape[1])])
    if mask:
        seen = visible(call, rows)
        seen = seen[:, heads] if heads is not None and seen.shape[1] == count > 1 else seen
        out = out.masked_fill(~seen, -torch.inf)
    return out


def inner(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Products of vectors along the last axis; the other axes are broadcast."""
    if a.device.type == "cpu":  # without a product of the size of both
        return torch.from_numpy(np.asarray(np.einsum("...i,...i->...", a.numpy(), b.numpy())))
    return torch.linalg.vecdot(a, b)


def scores_at(call: Call, distance: int) -> torch.Tensor:
    """Scores of every query with the key `distance` tokens before it, as `scores` has them.

    Returns
    -------
    Tensor, shape (batch, head, token - distance)
        Entry n is the score of query n + distance on key n.
    """
    size = call.k.shape[2] - distance
    q = call.q[:, :, distance:].float().unflatten(1, (call.k.shape[1], -1))
    products = inner(q, call.k[:, :, None, :size].float())
    return _finish(products.flatten(1, 2), call)


def visible_at(call: Call, distance: int) -> torch.Tensor:
    """Which of those queries may see that key: bool, shape (1 or batch, 1 or head, token - distance)."""
    mask, size = call.mask, call.k.shape[2] - distance
    if mask is not None and mask.dim() == 4:
        chosen = mask[..., : call.k.shape[2]].diagonal(-distance, -2, -1)
        return chosen if mask.dtype == torch.bool else chosen > torch.finfo(mask.dtype).min / 2
    seen = torch.ones(1, 1, size, dtype=torch.bool, device=call.k.device)
    return seen & (not call.window or distance < call.window)


def weights(masked: torch.Tensor, call: Call, heads: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax of masked scores; sink logits take their share, so rows may sum to less than 1."""
    if call.sinks is None:
        return masked.softmax(-1)
    sinks = call.sinks.float() if heads is None else call.sinks.float()[heads]
    sinks = sinks.reshape(1, -1, 1, 1).expand(masked.shape[0], masked.shape[1], masked.shape[2], 1)
    return torch.cat([masked, sinks], dim=-1).softmax(-1)[..., :-1]
