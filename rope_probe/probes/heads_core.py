"""Statistics of attention weights, head by head, in blocks of query rows: no map is ever held whole.

Everything that is linear in the weights (own token, previous token, the last N, row sum) follows from
their sums along the diagonals, one for each distance.  A block's diagonals are the columns of a skewed
view of its memory, so one product of the row normalisers with that view sums all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..attention import inner, logits, scores, visible, visible_at, weights
from ..rotary import RotaryLayer
from ..tap import Call
from ..verify import to_pairs

ROWS = 256  # query rows of a block, those of all heads that share a key head counted together
CELLS = {"cpu": 2**20, "cuda": 2**27}  # weights held at a time, where that is more than one key head's block
_HIDDEN = -1e30  # finite, so that its product with a weight of zero is zero


@dataclass
class Block:
    """Consecutive query rows, and the keys that any of them sees.

    Attributes
    ----------
    rows : (int, int)
        First query position, and the one after the last.
    keys : (int, int)
    hidden : Tensor of bool, shape (1 or batch, 1 or head, row, key)
        Which keys a row does not see, from column `first_hidden` on.
    first_hidden : int
        Before this column of the block every row sees every key.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    hidden: torch.Tensor
    first_hidden: int


def block_rows(call: Call) -> int:
    """Query rows in a block."""
    size = max(16, ROWS // (call.q.shape[1] // call.k.shape[1]))
    return size if call.q.device.type == "cpu" else max(size, 512)


def blocks(call: Call, start: int = 1) -> Iterator[Block]:
    """The query rows from `start` on, in blocks; the mask that attention was given says which keys they see."""
    length, size = call.q.shape[2], block_rows(call)
    for first in range(start, length, size):
        last = min(first + size, length)
        seen = visible(call, torch.arange(first, last, device=call.q.device))
        columns = seen.flatten(0, 2).any(0).nonzero()[:, 0]
        low, high = int(columns[0]), int(columns[-1]) + 1
        hidden = ~seen[..., low:high]
        some = hidden.flatten(0, 2).any(0).nonzero()[:, 0]
        first_hidden = int(some[0]) if len(some) else high - low
        yield Block((first, last), (low, high), hidden[..., first_hidden:], first_hidden)


class _Skewed:
    """Rows × keys of a block, laid out so that the diagonals are columns of a view of the same memory."""

    def __init__(self, maps: int, block: Block, scratch: torch.Tensor):
        self.rows, self.keys = block.rows[1] - block.rows[0], block.keys[1] - block.keys[0]
        width = self.keys + self.rows - 1
        size = self.rows - 1 + self.rows * width
        flat = scratch[: maps * size].view(maps, size)
        flat[:, : self.rows - 1] = 0
        table = flat[:, self.rows - 1 :].view(maps, self.rows, width)
        table[:, :, self.keys :] = 0  # what a diagonal meets beyond the ends of a row
        self.table = table[:, :, : self.keys]
        # entry (i, c) is row i, key c + i - (rows - 1): distances fall along c
        self._diagonals = flat.as_strided((maps, self.rows, width), (size, width + 1, 1), flat.storage_offset())
        self.farthest = block.rows[0] - block.keys[0] + self.rows - 1

    def sums(self, factors: torch.Tensor) -> torch.Tensor:
        """Sums along the diagonals, rows times `factors` (map, kind, row): (map, kind, distance 0 … farthest)."""
        return torch.bmm(factors, self._diagonals)[..., : self.farthest + 1].flip(-1)


def visible_counts(call: Call, start: int = 1) -> torch.Tensor:
    """Query rows from `start` on that see the key at each distance 0 … T − 1, shape (distance,)."""
    length, size = call.q.shape[2], block_rows(call)
    found = torch.zeros(length, dtype=torch.float64, device=call.q.device)
    scratch = torch.empty(size * (length + size), device=call.q.device)
    for block in blocks(call, start):
        skewed = _Skewed(1, block, scratch)
        skewed.table.fill_(1)
        skewed.table[..., block.first_hidden :].masked_fill_(block.hidden[0, :1], 0)
        along = skewed.sums(torch.ones(1, 1, skewed.rows, device=call.q.device))[0, 0]
        found[: len(along)] += along
    return found


def weight_sums(call: Call, start: int = 1) -> dict[str, torch.Tensor]:
    """Sums over query rows (from `start` on) and batch of what each head's attention weights say.

    Parameters
    ----------
    call : Call
    start : int
        First query position that counts.

    Returns
    -------
    dict of Tensor
        ``by_distance`` (head, T): weight on the key at each distance; and, shape (head,), ``sink`` (weight on the
        first position), ``entropy`` in nats, ``mean_distance`` in tokens, ``row_sum``.  Entropy and distance are of
        rows that sum to 1: the share of sink logits is left out of them.

    Notes
    -----
    Memory is that of one block of rows against their keys: linear in T, whatever the number of heads.
    """
    batch, heads, length, _ = call.q.shape
    kv_heads = call.k.shape[1]
    group = heads // kv_heads
    device, size = call.q.device, block_rows(call)
    wide = torch.float32 if device.type == "mps" else torch.float64
    by_distance = torch.zeros(heads, length, dtype=wide, device=device)
    scalars = torch.zeros(4, heads, dtype=wide, device=device)
    cells = group * size * (length + size)  # of one key head
    step = min(kv_heads, max(1, CELLS.get(device.type, CELLS["cpu"]) // cells))
    scratch = torch.empty(step * cells, dtype=torch.float32, device=device)
    for block in blocks(call, start):
        for segment in range(batch):
            for low in range(0, kv_heads, step):
                which = slice(low, min(low + step, kv_heads))
                _add_block(call, segment, which, block, scratch, by_distance, scalars)
    return {"by_distance": by_distance} | dict(
        zip(("sink", "entropy", "mean_distance", "row_sum"), scalars, strict=True)
    )


def _add_block(call, segment: int, kv: slice, block: Block, scratch, by_distance, scalars) -> None:
    """Add the rows of one block: one segment, the query heads of some key heads."""
    group = call.q.shape[1] // call.k.shape[1]
    which = slice(kv.start * group, kv.stop * group)
    low, high = block.keys
    heads, rows = which.stop - which.start, block.rows[1] - block.rows[0]
    d = logits(call, call.q[segment, which, slice(*block.rows)], call.k[segment, kv, low:high])
    if block.first_hidden < high - low:
        hidden = block.hidden
        hidden = hidden[segment if len(hidden) > 1 else 0]
        d[..., block.first_hidden :].masked_fill_(hidden[which] if len(hidden) > 1 else hidden, _HIDDEN)
    largest = d.amax(-1, keepdim=True)
    d.sub_(largest)
    skewed = _Skewed(heads, block, scratch)
    e = torch.exp(d, out=skewed.table) if d.device.type == "cpu" else skewed.table.copy_(d.exp())
    total = e.sum(-1)
    spread = inner(e, d)
    per_row = 1 / total
    if call.sinks is None:
        factors, share = per_row[:, None], None
    else:
        sinks = call.sinks.float().flatten()[which, None]
        share = torch.sigmoid(total.log() + largest[..., 0] - sinks)
        factors = torch.stack([per_row * share, per_row], 1)
    along = skewed.sums(factors).to(by_distance.dtype)
    distances = torch.arange(along.shape[-1], dtype=along.dtype, device=d.device)
    by_distance[which, : along.shape[-1]] += along[:, 0]
    if low == 0:
        scalars[0, which] += (e[..., 0] * factors[:, 0]).sum(-1)
    scalars[1, which] += (total.log() - spread * per_row).sum(-1)
    scalars[2, which] += along[:, -1] @ distances
    scalars[3, which] += rows if share is None else share.sum(-1)


def pair_profile(call: Call, layer: RotaryLayer, lags: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What each rotary pair adds to the scores at some distances, summed over query positions and batch.

    The first position is left out as a key, and keys that are not visible are.

    Returns
    -------
    sums : Tensor, shape (head, pair, lag)
        Before any soft-cap, softmax scale taken in.
    counts : Tensor, shape (lag,)
        Query positions of one segment that were summed.
    """
    length, kv_heads = call.q.shape[2], layer.kv_heads
    q1, q2 = (part.float().unflatten(1, (kv_heads, -1)) for part in to_pairs(call.q, layer))
    k1, k2 = (part[:, :, None].float() for part in to_pairs(call.k[:, :kv_heads], layer))
    sums, counts = [], []
    for lag in lags:
        seen = visible_at(call, lag)[0, 0].float()
        seen[:1] = 0  # key 0
        mine, theirs = slice(lag, None), slice(length - lag)
        products = torch.addcmul(q1[..., mine, :] * k1[..., theirs, :], q2[..., mine, :], k2[..., theirs, :])
        sums.append(torch.einsum("bgrtp,t->grp", products, seen).flatten(0, 1) * call.scaling)
        counts.append(seen.sum())
    return torch.stack(sums, -1), torch.stack(counts)


def shrunk_map(call: Call, head: int, pixels: int) -> torch.Tensor:
    """Attention map of one head in the first segment, averaged over square cells so that it has at most `pixels` a side.

    Returns
    -------
    Tensor, shape (cell, cell)
        Mean weight; cells are ``ceil(T / pixels)`` tokens wide, the last ones narrower where that does not divide T.
    """
    one = Call(**{**vars(call), "q": call.q[:1], "k": call.k[:1], "v": call.v[:1]})
    length = call.q.shape[2]
    cell = -(-length // pixels)
    chosen, rows = torch.tensor([head]), []
    step = cell * max(1, 256 // cell)
    edge = torch.arange(0, length, cell)
    widths = torch.diff(torch.cat([edge, torch.tensor([length])])).to(call.q.device)
    for first in range(0, length, step):
        at = torch.arange(first, min(first + step, length), device=call.q.device)
        block = weights(scores(one, at, chosen), one, chosen)[0, 0]
        pad = (0, -length % cell, 0, -len(at) % cell)
        block = torch.nn.functional.pad(block, pad)
        rows.append(block.unflatten(1, (-1, cell)).sum(2).unflatten(0, (-1, cell)).sum(1))
    return torch.cat(rows) / (widths[:, None] * widths)
