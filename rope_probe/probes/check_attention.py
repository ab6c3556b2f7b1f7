"""What attention lets through, asked of the attention that runs and not of the mask alone.

Attention is linear in its values.  Called a second time with values that say nothing but "I am position 0", "I am
the middle" and "I am here", it answers with its own weights: how far back each row really sees, whether it sees
ahead, and what its weights sum to, whatever mask, kernel or window made them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..errors import ProbeError
from ..rotary import RotaryLayer
from ..tap import Tap, model_attention


@dataclass
class Seen:
    """What one layer's attention showed.

    Attributes
    ----------
    reach : int
        Distance of the last row that gives position 0 any weight.
    ahead : float
        Largest weight of a row on a later token.
    low, high : float
        Smallest and largest sum of a row's weights.
    sinks : bool
        The layer has sink logits, which take a share.
    q_norm, k_norm : (float, float)
        Smallest and largest mean norm of a head, NaN where anything is not finite.
    """

    reach: int
    ahead: float
    low: float
    high: float
    sinks: bool
    q_norm: tuple[float, float] = field(default=(0.0, 0.0))
    k_norm: tuple[float, float] = field(default=(0.0, 0.0))


def _norms(x: torch.Tensor) -> tuple[float, float]:
    norms = x.float().norm(dim=-1).mean((0, 2))
    return (float(norms.min()), float(norms.max())) if torch.isfinite(norms).all() else (float("nan"),) * 2


class Watch(Tap):
    """A tap that asks every layer's attention for its weights, and hands on q and k as they are."""

    def __init__(self, decoder):
        super().__init__(decoder, lambda call: None)
        self.found: dict[int, Seen] = {}

    def __enter__(self) -> Watch:
        super().__enter__()
        return self

    def see(self, module, q, k, v, mask, kwargs):
        original = str(module.config._attn_implementation).removeprefix("rope_probe_")
        if v.shape[-1] < 3:
            raise ProbeError(f"the values of layer {self.modules[id(module)]} have fewer than 3 channels to ask with.")
        middle = q.shape[2] // 2
        marks = torch.zeros_like(v)
        marks[:, :, 0, 0] = marks[:, :, middle, 1] = marks[..., 2] = 1
        quiet = {key: value for key, value in kwargs.items() if key != "dropout"}
        answer, *_ = model_attention(original, module)(module, q, k, marks, mask, **quiet)
        answer = answer.detach().float()  # batch, row, head, channel
        seen = (answer[..., 0] > 0).any(-1).any(0).nonzero()
        self.found[self.modules[id(module)]] = Seen(
            reach=int(seen.max()) if len(seen) else -1,
            ahead=float(answer[:, :middle, :, 1].abs().max()) if middle else 0.0,
            low=float(answer[..., 2].min()),
            high=float(answer[..., 2].max()),
            sinks=kwargs.get("s_aux") is not None,
            q_norm=_norms(q),
            k_norm=_norms(k),
        )
        return super().see(module, q, k, v, mask, kwargs)


def expected_reach(layer: RotaryLayer, length: int) -> int:
    """How far back the last row that may see position 0 is, by the configuration."""
    return min(layer.window or length, length) - 1
