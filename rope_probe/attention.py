"""Scores and weights of chosen query rows, from the q and k of a tap: never more than the rows asked for."""

from __future__ import annotations

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
    group = call.q.shape[1] // call.k.shape[1]
    count = call.q.shape[1]
    heads = torch.arange(count, device=call.q.device) if heads is None else heads.to(call.q.device)
    q = call.q[:, heads][:, :, rows].float()
    k = call.k[:, heads // group].float()
    out = torch.matmul(q, k.transpose(-1, -2)).mul_(call.scaling)
    if call.softcap is not None:
        out = torch.tanh(out / call.softcap) * call.softcap
    if mask:
        seen = visible(call, rows)
        seen = seen[:, heads] if seen.shape[1] == count and count > 1 else seen
        out = out.masked_fill(~seen, -torch.inf)
    return out


def weights(masked: torch.Tensor, call: Call, heads: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax of masked scores; sink logits take their share, so rows may sum to less than 1."""
    if call.sinks is None:
        return masked.softmax(-1)
    sinks = call.sinks.float() if heads is None else call.sinks.float()[heads]
    sinks = sinks.reshape(1, -1, 1, 1).expand(masked.shape[0], masked.shape[1], masked.shape[2], 1)
    return torch.cat([masked, sinks], dim=-1).softmax(-1)[..., :-1]
