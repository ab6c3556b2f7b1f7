"""Average ranks and Spearman correlation of many rows at once, ties and left-out entries included.

Ranks are exact: the sums of products of ranks are whole numbers, kept as such.  The trick that makes
rows cheap is to sort values that carry something with them.  A float32 widened to float64 leaves 29
low bits empty; put an integer there and it travels through the sort: the entry's position, which gives
ranks, or the other side's rank, which gives the correlation without ever going back to the old order.
"""

from __future__ import annotations

import torch

_EMPTY = 28  # low bits of a float64 that can be set without rounding to another float32
_LAST = 2.0**1000  # above every float32, and its low bits are empty too
_CHUNK = 1 << 15  # entries that one CPU core takes at a time, within its cache; more would be shared among threads


def average_ranks(x: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
    """Ranks along the last axis, from 1; equal values share the mean of their ranks.

    Parameters
    ----------
    x : Tensor of float, shape (..., n)
        Finite (float64: below 2**1000); 0.0 and -0.0 are equal.
    seen : Tensor of bool, broadcastable to x, optional
        Entries that take part; default all.

    Returns
    -------
    Tensor of float64, shape (..., n)
        Equal to ``scipy.stats.rankdata`` of the entries that take part; 0 elsewhere.
    """
    return _double_ranks(x, seen).double() / 2


def spearman(x: torch.Tensor, y: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
    """Spearman correlation along the last axis.

    Parameters
    ----------
    x : Tensor of float, shape (..., n)
        Ranked once, however many rows of y it is compared with.
    y : Tensor of float, shape (..., n)
        The leading axes of x are broadcast to those of y.
    seen : Tensor of bool, broadcastable to x, optional
        Entries that take part; default all.

    Returns
    -------
    Tensor of float64, shape (...)
        NaN where a side is constant or fewer than two entries take part.

    Notes
    -----
    Pearson correlation of average ranks.  With doubled ranks a, b (whole numbers) of n entries:
    ``Σ(a - n - 1)(b - n - 1) = Σab - n(n + 1)²``, and ``Σ(b - n - 1)² = n(n² - 1)/3`` where b has no ties.
    """
    if y.dim() == 1:
        return spearman(x, y[None], seen)[0]
    size, rows = y.shape[-1], y.shape[:-1]
    ranks = _double_ranks(x, seen)
    count = _count(x, seen)
    n = count.double()
    center = n * (n + 1) ** 2
    spread_x = ranks.double().square().sum(-1) - center
    products, spread_y = x.new_empty(rows, dtype=torch.float64), (n * (n**2 - 1) / 3).expand(rows).clone()
    doubled = torch.arange(2, 2 * size + 2, 2, dtype=torch.float64, device=x.device)
    last, ranks, count, center = _push(seen, x), ranks.expand(y.shape), count.expand(rows), center.expand(rows)
    last = last.expand(y.shape)
    step = max(1, _CHUNK * len(y) // max(1, y.numel())) if y.device.type == "cpu" else max(1, len(y))
    for part in (slice(i, i + step) for i in range(0, len(y), step)):
        levels, carried = _sort_carrying(y[part], ranks[part], last[part])
        product = carried.double() @ doubled  # entries left out carry a rank of 0
        tied = _tied(levels, count[part])
        if tied is not None:
            own = _shared_ranks(levels[tied])
            own *= torch.arange(size, device=x.device) < count[part][tied][:, None]
            product[tied] = (carried[tied] * own).sum(-1).double()
            spread_y[part][tied] = own.square().sum(-1).double() - center[part][tied]
        products[part] = product
    return (products - center) / (spread_x * spread_y).sqrt()


def _count(x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    """Entries that take part, by row."""
    return torch.full((), x.shape[-1], device=x.device) if seen is None else seen.sum(-1)


def _push(seen: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """What to add so that entries that take no part come last; adding 0.0 also makes 0.0 of -0.0."""
    last = torch.zeros((1,) if seen is None else seen.shape, dtype=torch.float64, device=x.device)
    return last if seen is None else last.masked_fill_(~seen, _LAST)


def _double_ranks(x: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    """Twice the average ranks, int64; 0 for entries that take no part."""
    places = torch.arange(x.shape[-1], device=x.device)
    levels, order = _sort_carrying(x, places, _push(seen, x))
    ranks = (2 * places + 2).expand(levels.shape)
    tied = _tied(levels, _count(x, seen).expand(levels.shape[:-1]))
    if tied is not None:
        ranks = ranks.clone()
        ranks[tied] = _shared_ranks(levels[tied])
    ranks = torch.empty_like(order).scatter_(-1, order, ranks)
    return ranks if seen is None else ranks.mul_(seen)


def _sort_carrying(x: torch.Tensor, carried: torch.Tensor, last: torch.Tensor):
    """Sort rows of x + last; (levels, carried): equal where values are equal, and `carried` in the new order.

    `carried` are whole numbers from 0 to 2**28 - 1.
    """
    keys = x.double() + last
    if x.dtype == torch.float64:  # no empty bits
        levels, order = keys.sort(dim=-1)
        return levels, carried.expand(order.shape).gather(-1, order)
    keys = keys.view(torch.int64).bitwise_or_(carried).view(torch.float64)
    if keys.device.type == "cpu":
        keys.numpy().sort(axis=-1)  # vectorised: some 30 times faster than torch.sort
    else:
        keys = keys.sort(dim=-1).values
    return keys.float(), keys.view(torch.int64).bitwise_and_((1 << _EMPTY) - 1)


def _tied(levels: torch.Tensor, count: torch.Tensor) -> torch.Tensor | None:
    """Rows with equal neighbours among the first `count` entries (the rest, left out, are all equal), if any."""
    equal = (levels[..., 1:] == levels[..., :-1]).sum(-1)
    tied = equal > (levels.shape[-1] - count - 1).clamp(min=0)
    return tied if tied.any() else None


def _shared_ranks(levels: torch.Tensor) -> torch.Tensor:
    """Twice the average ranks of sorted rows: first plus last place of each run of equal values."""
    size = levels.shape[-1]
    places = torch.arange(1, size + 1, device=levels.device)
    changes = levels[:, 1:] != levels[:, :-1]
    edge = torch.ones_like(levels[:, :1], dtype=torch.bool)
    first = torch.where(torch.cat([edge, changes], 1), places, 0).cummax(1).values
    last = torch.where(torch.cat([changes, edge], 1), places, size).flip(1).cummin(1).values.flip(1)
    return first + last
