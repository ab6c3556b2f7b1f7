"""What `extend` runs: every setting entered on the one model, its segments and its prompts read, the numbers kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..checkpoints import Checkpoint
from ..errors import ProbeError
from ..interventions import rope
from ..likelihood import answer_scores, token_nll, unchanged
from ..rotary import Geometry, read_geometry
from ..tap import input_device
from .common import default_batch
from .extend_grid import Grid, Setting
from .passkey import Prompt, PromptWriter
from .reading import Blocks, Observer


@dataclass(frozen=True)
class Part:
    """The lengths that run under one override of a setting (`match` needs one for each length).

    Attributes
    ----------
    override : dict
        Arguments of `rope`; empty for the model as it is.
    geometries : dict of length -> Geometry
        How the model rotates at each length.
    reads : list of list of int
        Lengths of segments grouped by equal frequencies, longest first: one reading serves a group.
    intact : bool
        The model has the rope parameters that it has without an override.
    """

    override: dict
    geometries: dict[int, Geometry]
    reads: list[list[int]]
    intact: bool

    @property
    def longest(self) -> int:
        return max(self.geometries)


def _changed(ckpt: Checkpoint, override: dict, length: int):
    return rope(ckpt, length=length, **override) if override else contextlib.nullcontext()


def plan(ckpt: Checkpoint, grid: Grid, setting: Setting) -> list[Part]:
    """Enter a setting, with every override that its lengths need, and see how the model rotates then.

    Raises
    ------
    UsageError, ProbeError
        The model cannot have it.
    """
    own = getattr(ckpt.decoder.config, "rope_parameters", None)
    lengths_of: dict[tuple, list[int]] = {}
    for length in sorted(grid.all_lengths, reverse=True):
        lengths_of.setdefault(tuple(setting.override(length).items()), []).append(length)
    parts = []
    for override, lengths in lengths_of.items():
        try:
            with _changed(ckpt, dict(override), lengths[0]):
                geometries = {length: read_geometry(ckpt.decoder, length) for length in lengths}
                intact = getattr(ckpt.decoder.config, "rope_parameters", None) == own
        except ProbeError as error:
            raise type(error)(f"setting {setting.name}: {error}") from error
        groups: dict[tuple, list[int]] = {}
        for length in (length for length in lengths if length in grid.lengths):
            layers = geometries[length].layers
            same = tuple((layer.inv_freq.tobytes(), layer.attention_scaling) for layer in layers)
            groups.setdefault(same, []).append(length)
        parts.append(Part(dict(override), geometries, list(groups.values()), intact))
    return parts


def write_prompts(ckpt: Checkpoint, grid: Grid, seed: int) -> dict[tuple[int, int], list[list[Prompt]]]:
    """Prompts [depth][sample] for each (length, keys), the longest first.

    Raises
    ------
    UsageError
        A length that does not hold the keys.
    ProbeError
        There is no tokenizer that writes digits.
    """
    if not grid.samples:
        return {}
    write = PromptWriter(ckpt.tokenizer)
    return {
        (length, keys): [
            [write(length, depth, keys, sample, seed) for sample in range(grid.samples)] for depth in grid.depths
        ]
        for length in sorted(grid.passkey_lengths, reverse=True)
        for keys in grid.keys
    }


@dataclass(frozen=True)
class Task:
    """One reading under one setting: segments for a group of lengths, or the prompts of one length.

    Attributes
    ----------
    row : int
        The setting.
    part : Part
    lengths : tuple of int
        Lengths of segments that one reading serves, longest first; of prompts, the one.
    keys : int
        Keys in a prompt; 0 for segments.
    """

    row: int
    part: Part
    lengths: tuple[int, ...]
    keys: int = 0


def tasks_of(plans: list[list[Part]], prompts: dict, first: int) -> list[Task]:
    """Everything there is to read, the plan `first` first, the longest texts of each first."""
    found = []
    for row in sorted(range(len(plans)), key=lambda row: row != first):
        for part in plans[row]:
            found += [Task(row, part, tuple(group)) for group in part.reads]
            found += [Task(row, part, (length,), keys) for length, keys in prompts if length in part.geometries]
    return found


class Answers(Observer):
    """The numbers measured so far, task by task; NaN where nothing is, and only whole cells are ever filled in."""

    state = ("nll", "by_position", "exact", "right", "logprob")
    one_pass, unit = False, "readings"

    def __init__(
        self,
        ckpt: Checkpoint,
        grid: Grid,
        ids: np.ndarray,
        prompts: dict[tuple[int, int], list[list[Prompt]]],
        tasks: list[Task],
        batch: int | None,
        progress: Callable[[int, int], None] | None,
    ):
        self.ckpt, self.grid, self.ids, self.prompts, self.tasks = ckpt, grid, ids, prompts, tasks
        self.layers = {}
        self.batch, self.device = batch, input_device(ckpt.decoder)
        self.progress, self.done, self.total = progress, 0, 0
        base = (len(grid.settings), len(grid.all_lengths))
        cells = (*base, len(grid.keys), len(grid.depths), grid.samples)
        self.nll = np.full((*base, len(ids)), np.nan)
        self.by_position = np.full((*base, len(ids), len(grid.edges) - 1), np.nan)
        self.exact, self.right, self.logprob = (np.full(cells, np.nan) for _ in range(3))
        self._found: dict[tuple, np.ndarray] = {}

    def column(self, length: int) -> int:
        return self.grid.all_lengths.index(length)

    def measured(self) -> np.ndarray:
        """Settings of which something is there."""
        return np.isfinite(self.nll).any(axis=(1, 2)) | np.isfinite(self.exact).any(axis=(1, 2, 3, 4))

    def _size(self, task: Task) -> int:
        """Tokens that a task reads."""
        asked = len(self.grid.depths) * self.grid.samples
        return task.lengths[0] * (asked if task.keys else len(self.ids))

    # -- one task is one batch

    def begin(self, start: int, stop: int) -> None:
        self._found = {}
        if not self.done:  # the clock starts; what an earlier run has read does not count
            self.total = sum(self._size(task) for task in self.tasks[start:])
            self._tell()

    def passes(self, decoder, ids: torch.Tensor) -> Iterator[bool]:
        """`ids` is the number of the task."""
        task = self.tasks[int(ids)]
        with unchanged(self.ckpt.model), _changed(self.ckpt, task.part.override, task.part.longest):
            if task.keys:
                self._found["answers",] = self._answers(self.prompts[task.lengths[0], task.keys])
            else:
                self._found["lost",] = self._segments(task.lengths[0])
        yield True

    def blocks(self) -> Blocks:
        return self._found

    def merge(self, blocks: Blocks, start: int, stop: int) -> None:
        task = self.tasks[start]
        for length in task.lengths:
            place = task.row, self.column(length)
            if task.keys:
                cell = *place, self.grid.keys.index(task.keys)
                self.exact[cell], self.right[cell], self.logprob[cell] = blocks["answers",]
                continue
            lost = blocks["lost",][:, : length - 1]
            edges = self.grid.edges[self.grid.edges <= length]
            sums = np.add.reduceat(lost, edges[:-1] - 1, axis=1)
            self.by_position[place][:, : len(edges) - 1] = sums / np.diff(edges)
            self.nll[place] = lost.mean(axis=1)
        self._tell()

    # -- while the model runs

    def _blocks(self, count: int, length: int):
        """Slices of a batch, each counted once it is read (and the last one told of once its numbers are kept)."""
        batch = self.batch or default_batch(self.ckpt.device, length)
        for start in range(0, count, batch):
            block = slice(start, min(start + batch, count))
            yield block
            self.done += (block.stop - block.start) * length
            if block.stop < count:
                self._tell()

    def _tell(self) -> None:
        if self.progress:
            self.progress(self.done, self.total)

    def _segments(self, length: int) -> np.ndarray:
        """Nats of every prediction in the first `length` tokens of each segment, shape (segment, length - 1)."""
        lost = np.empty((len(self.ids), length - 1))
        for block in self._blocks(len(self.ids), length):
            ids = torch.as_tensor(self.ids[block, :length], dtype=torch.long, device=self.device)
            lost[block] = _finite(token_nll(self.ckpt.model, ids)).numpy()
        return lost

    def _answers(self, prompts: list[list[Prompt]]) -> np.ndarray:
        """Exact match, share of the tokens right and log probability of each key, shape (3, depth, sample)."""
        flat = [prompt for row in prompts for prompt in row]
        scores = np.empty((3, len(flat)))
        for block in self._blocks(len(flat), len(flat[0].ids)):
            ids = torch.as_tensor(np.stack([prompt.ids for prompt in flat[block]]), device=self.device)
            lost, likeliest = answer_scores(self.ckpt.model, ids, max(prompt.answer for prompt in flat[block]))
            _finite(lost)
            for column, prompt in enumerate(flat[block]):
                right = likeliest[column, -prompt.answer :].double()
                logprob = -lost[column, -prompt.answer :].double().sum()
                scores[:, block.start + column] = [right.min(), right.mean(), logprob]
        return scores.reshape(3, len(prompts), len(prompts[0]))


def _finite(lost: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(lost).all():
        raise ProbeError("the likelihood is not finite: use --dtype float32 or bfloat16, or check the weights.")
    return lost
