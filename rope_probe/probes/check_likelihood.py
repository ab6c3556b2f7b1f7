"""Is the likelihood of a text plausible?  Three yardsticks, and changes that must not help.

*Uniform*: every token of the vocabulary alike.  *Word counts*: how often each token occurs in the rest of the same
text, with no context at all.  Whoever has learned the language of the text beats these counts from the first
sentence on, however small the model is; a network whose parts do not belong together does not.  The *entropy* of the
model's own predictions tells the two ways of failing apart: untrained weights predict nearly uniformly and know it,
scrambled ones are sure of themselves and wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..checkpoints import Checkpoint
from ..likelihood import token_nll
from .check_changes import Change, bases, exchanges, heads, orders, skips

COUNTED = 0.95  # share of the word counts in their mixture with the uniform distribution
FEW = 128  # tokens of a segment that all changes but those of the base are tried on
LEAST = 4  # layers that are missed least: exchanged with one another, the first of them with every layer
GAIN, SIGMA = 0.05, 4.0  # a change helps from so many nats per token, and so many standard errors, on
UNTRAINED = 0.85  # predictions with more than this share of the largest entropy are nearly uniform


@dataclass(frozen=True)
class Yardsticks:
    """Nats per token.

    Attributes
    ----------
    nll : float
        Of the model.
    uniform, counts : float
        Of the vocabulary, and of the counts of tokens in the text.
    entropy : float
        Mean entropy of the model's predictions.
    """

    nll: float
    uniform: float
    counts: float
    entropy: float

    @property
    def plausible(self) -> bool:
        return self.nll < min(self.counts, self.uniform)

    def words(self) -> str:
        """What the numbers mean, as a clause."""
        known = f"word counts alone reach {self.counts:.2f}, chance {self.uniform:.2f}"
        if self.plausible:
            return known
        if not math.isfinite(self.nll):
            return "it is not finite: use --dtype float32 or bfloat16, or check the weights"
        if self.entropy > UNTRAINED * self.uniform:
            return f"{known}: its predictions are nearly uniform (entropy {self.entropy:.2f}), as those of untrained weights"
        return (
            f"{known}, and its predictions have entropy {self.entropy:.2f}: sure of itself and wrong, its parts do not "
            "belong together, or it was never trained on such text (try --text)"
        )


def count_nll(stream: np.ndarray, wanted: np.ndarray, vocabulary: int) -> float:
    """Nats per token of the counts of tokens in a text, each token itself left out of its count.

    Parameters
    ----------
    stream : ndarray of int
        The whole text.
    wanted : ndarray of int
        The tokens to predict, part of it.
    """
    counts = np.bincount(stream.ravel(), minlength=vocabulary)
    rest = np.maximum(counts[wanted] - 1, 0) / max(1, stream.size - 1)
    return float(-np.log(COUNTED * rest + (1 - COUNTED) / vocabulary).mean())


def entropy(ckpt: Checkpoint, ids: torch.Tensor, rows: int = 64) -> float:
    """Mean entropy in nats of the predictions along the first tokens of a segment."""
    with torch.inference_mode():
        logits = ckpt.model(input_ids=ids[:1, :rows], use_cache=False).logits.float()
    found = logits.log_softmax(-1)
    return float(-(found.exp() * found).sum(-1).mean())


def likelihood(s):
    """The text is likelier than by word counts without any context."""
    if s.no_text is not None:
        return None, None, s.no_text
    vocabulary, read = s.ckpt.vocabulary, s.ids.cpu().numpy()
    found = Yardsticks(
        nll=float(s.nll.mean()),
        uniform=math.log(vocabulary),
        counts=count_nll(s.segments.ids, read[:, 1:], vocabulary),
        entropy=entropy(s.ckpt, s.ids),
    )
    return found.plausible, found.nll, f"nats/token; {found.words()}"


def as_trained(s, sound: bool, progress: Callable[[int, int], None] | None):
    """No change of base, of the order of channels, of the head or of the layers makes the text likelier.

    Parameters
    ----------
    sound : bool
        The likelihood is plausible; where it is not, layers are exchanged too.
    """
    if s.no_text is not None:
        return None, None, s.no_text
    whole, few = s.nll, s.nll[:, : FEW - 1]
    ladders, left_out = bases(s.ckpt, s.geometry), skips(s.ckpt)
    changes = [*orders(s.ckpt, s.geometry), *heads(s.ckpt)]
    total, gains = len(ladders) + len(changes) + len(left_out), []

    def tried(change: Change, before: torch.Tensor) -> float:
        with change.made():
            after = token_nll(s.ckpt.model, s.ids[:, : before.shape[1] + 1]).double()
        gained = (before - after).flatten()
        error = float(gained.std() / len(gained) ** 0.5)
        gains.append((float(gained.mean()), error, float(before.mean()), change))
        if progress:
            progress(len(gains), max(total, len(gains)))
        return gains[-1][0]

    for change in ladders:  # a base shows over long distances, and costs little where it is wrong
        tried(change, whole)
    for change in changes:
        tried(change, few)
    gained = {index: tried(change, few) for index, change in left_out.items()}
    doubtful = any(gain > SIGMA / 2 * error for gain, error, *_ in gains)
    if not sound or doubtful:  # the layers that are missed least may be in each other's place
        least = sorted(gained, key=lambda index: gained[index], reverse=True)[:LEAST]
        pairs = {(min(i, j), max(i, j)) for i in least for j in (least if i != least[0] else gained) if i != j}
        for change in exchanges(s.ckpt, s.geometry, sorted(pairs)):
            tried(change, few)
    helping = [entry for entry in gains if entry[0] > max(GAIN, SIGMA * entry[1])]
    gain, _, before, change = max(helping or gains, key=lambda entry: entry[0])
    if helping:
        became = f"{before - gain:.2f} instead of {before:.2f}"
        return False, gain, f"nats/token gained with {change.words} ({became}): {change.cause}."
    return True, gain, f"nats/token gained by the best of {len(gains)} changes that should not help ({change.words})"
