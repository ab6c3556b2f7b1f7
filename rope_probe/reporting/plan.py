"""What fits into a time: every analysis is estimated from two timed passes, and reads as much as it can."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from ..checkpoints import Checkpoint
from ..errors import ProbeError, UsageError
from ..likelihood import segment_nll, unchanged
from ..probes.truncate import KEEP
from ..tap import Tap, input_device

BUDGET = "10m"
MOST, FEWEST = 16, 2  # segments: what the commands read by themselves, and the fewest that have an error
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
SOON = 3.0  # seconds: a pass that takes less is timed again, the first one having set things up


@dataclass(frozen=True)
class Cost:
    """What an analysis costs, in passes over one segment.

    Attributes
    ----------
    passes : float
        Bare passes of the decoder for each segment.
    likelihoods : float
        Passes with the head on top (likelihood of every token) for each segment.
    once : float
        Bare passes whatever is read.
    seconds : float
        Seconds whatever is read and whatever the model: tokenizing, arrays, tables.
    share : float
        Of the budget, beyond which it is left out.
    """

    passes: float = 0.0
    likelihoods: float = 0.0
    once: float = 0.0
    seconds: float = 1.0
    share: float = 1.0

    @property
    def reads(self) -> bool:
        """Does it read more for a larger number of segments?"""
        return bool(self.passes or self.likelihoods)


# measured on SmolLM2 and Gemma 3 270M (docs/report.md), in the order in which a reader asks
COSTS = {
    "bands": Cost(passes=1.05),
    "heads": Cost(passes=1.8, once=1.0),
    "similarity": Cost(passes=1.6),
    "truncate": Cost(likelihoods=len(KEEP), once=1.0),
    "spectrum": Cost(passes=1.2, seconds=2.0),
    "check": Cost(once=3.0, seconds=3.0, share=0.1),
}


@dataclass(frozen=True)
class Trial:
    """Seconds that one segment takes: a bare pass, and one with the head on top."""

    bare: float
    likelihood: float

    def cost(self, name: str, segments: int) -> float:
        """Seconds that an analysis will take on so many segments."""
        cost = COSTS[name]
        a_segment = cost.passes * self.bare + cost.likelihoods * self.likelihood
        return cost.seconds + cost.once * self.bare + segments * a_segment


def seconds(budget) -> float:
    """`90s`, `10m`, `1h`, or a number of seconds.

    Raises
    ------
    UsageError
        Anything else.
    """
    if isinstance(budget, (int, float)) and not isinstance(budget, bool) and 0 < budget < float("inf"):
        return float(budget)
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*([smh])\s*", str(budget))
    if not match or not float(match[1]):
        raise UsageError(f"--budget is {budget!r}: give a time like 90s, 10m or 1h.")
    return float(match[1]) * UNITS[match[2]]


def measure_passes(ckpt: Checkpoint, ids: np.ndarray) -> Trial:
    """Time a bare pass and one with the head over one segment, shape (1, length).

    Raises
    ------
    ProbeError
        The model does not attend through transformers' interface, so nothing here can be measured.
    """
    block = torch.tensor(ids, dtype=torch.long, device=input_device(ckpt.decoder))
    ckpt.geometry(block.shape[1])  # once for all analyses, and refused here where it cannot be
    with Tap(ckpt.decoder, lambda call: None, layers=()) as tap:
        bare = _timed(lambda: tap.run(block))
    try:
        with unchanged(ckpt.model):
            likelihood = _timed(lambda: segment_nll(ckpt.model, block))
    except ProbeError:  # the analyses that need it will say so
        likelihood = 2 * bare
    return Trial(bare, likelihood)


def _timed(run: Callable[[], object]) -> float:
    took = SOON
    for _ in range(2):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        if took >= SOON:
            break
    return took


def choose(trial: Trial, names: Iterable[str], left: float, budget: float, available: int) -> dict[str, int]:
    """Segments for every analysis that fits into the seconds that are left.

    First each gets the fewest that have an error, in the order given; then each gets twice as many in turn, as long
    as that fits: a longer reading of one is worth less than another analysis.

    Parameters
    ----------
    trial : Trial
    names : iterable of str
    left, budget : float
        Seconds, of all.
    available : int
        Segments that there are to read.
    """
    chosen: dict[str, int] = {}
    for name in names:
        cost = trial.cost(name, min(FEWEST, available))
        if cost <= left and cost <= COSTS[name].share * budget:
            chosen[name] = min(FEWEST, available)
            left -= cost
    growing = [name for name in chosen if COSTS[name].reads]
    while growing:
        for name in list(growing):
            more = min(2 * chosen[name], available)
            cost = trial.cost(name, more) - trial.cost(name, chosen[name])
            if more == chosen[name] or cost > left:
                growing.remove(name)
                continue
            chosen[name] = more
            left -= cost
    return chosen


def duration(value: float) -> str:
    """40 s, 6 min, 1.5 h."""
    if value < 90:
        return f"{value:.0f} s" if value >= 1 else "1 s"
    return f"{value / 60:.0f} min" if value < 5400 else f"{value / 3600:.1f} h"


def words(trial: Trial, chosen: dict[str, int], budget: float, length: int) -> list[str]:
    """The plan in one or two lines: what will run on how many segments, and what is left out and why."""
    reading = [f"{name} {count}" for name, count in chosen.items() if COSTS[name].reads]
    takes = sum(trial.cost(name, count) for name, count in chosen.items())
    plan = f"{', '.join(reading)} segments of {length:,} tokens" if reading else "no reading"
    rest = "".join(f", and {name}" for name in chosen if not COSTS[name].reads)
    lines = [f"plan for {duration(budget)}: {plan}{rest}; about {duration(takes)}"]
    left_out = [f"{name} ({why})" for name, why in left_outs(trial, chosen, budget).items()]
    return lines + ([f"left out: {', '.join(left_out)}"] if left_out else [])


def left_outs(trial: Trial, chosen: dict[str, int], budget: float) -> dict[str, str]:
    """Why an analysis is not among those chosen."""
    found = {}
    for name, cost in COSTS.items():
        if name not in chosen:
            takes = duration(trial.cost(name, FEWEST))
            limit = f", more than {cost.share:.0%} of the time" if cost.share < 1 else ""
            found[name] = f"would take about {takes}" + (f" for {FEWEST} segments" if cost.reads else limit)
    return found
