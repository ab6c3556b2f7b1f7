"""check: is this checkpoint what it says it is, and does the tool see it right?  Every self-check on a few tokens."""

from __future__ import annotations

import contextlib
import platform
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property

import numpy as np
import torch

from .. import results
from ..checkpoints import Checkpoint, open_checkpoint
from ..errors import ProbeError, UsageError, first_words
from ..likelihood import token_nll, unchanged
from ..rotary import Geometry, RotaryLayer, read_geometry
from ..tap import input_device
from ..texts import Segments, check_sources, segments_for
from ..words import base as base_words
from ..words import ranges
from . import check_structure as structure
from .check_attention import Seen, Watch
from .check_likelihood import as_trained, likelihood

LENGTH, LONGEST = 512, 1040  # tokens of a segment; more where that shows a window, up to LONGEST
COUNTED = 64  # segments whose tokens are counted for the likelihood without context


@dataclass(frozen=True)
class Finding:
    """The answer to one check.

    Attributes
    ----------
    name : str
    passed : bool or None
        None: it could not be asked here.
    number : float or None
        The number behind it.
    words : str
        What the number is, and what is wrong where it is.
    """

    name: str
    passed: bool | None
    number: float | None
    words: str


@dataclass(frozen=True)
class Report:
    """Every finding, with what a bug report needs to say.

    Attributes
    ----------
    model : str
    findings : tuple of Finding
    geometry : list of str
        One line for each kind of layer.
    versions : dict
    where : dict
        dtype, device, source of the weights, tokens read.
    """

    model: str
    findings: tuple[Finding, ...]
    geometry: list[str] = field(default_factory=list)
    versions: dict = field(default_factory=dict)
    where: dict = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """No check failed (one that could not be asked has not)."""
        return all(finding.passed is not False for finding in self.findings)

    def as_dict(self) -> dict:
        return asdict(self) | {"passed": self.passed}


CHECKS = {
    "weights": structure.weights,
    "tap": structure.tap,
    "rotation": structure.rotation,
    "frequencies": structure.frequencies,
    "causality": structure.causality,
    "attention": structure.attention,
    "norms": structure.norms,
    "likelihood": likelihood,
}


def check(
    model,
    *,
    text=None,
    dataset=None,
    tokens=None,
    length: int | None = None,
    quick: bool = False,
    progress: Callable[[int, int], None] | None = None,
    opening: Callable[..., Checkpoint] = open_checkpoint,
    **options,
) -> Report:
    """Run every self-check on a checkpoint, on a few tokens; all of them run even where one fails.

    Parameters
    ----------
    model : Checkpoint, or what `rp.open` takes
        A model that does not open is a finding, not an error.
    text, dataset, tokens
        What to read, as for every analysis; default: the built-in English text.
    length : int, optional
        Tokens of a segment (two are read); default 512, or what shows the smallest window.
    quick : bool
        Leave out the changes that must not help (about as many forward passes as the model has layers).
    progress : callable, optional
        Called with (changes tried, changes in all).
    opening : callable
        What opens `model`.
    **options
        Options of `rp.open`.

    Returns
    -------
    Report

    Raises
    ------
    UsageError
        Options that are wrong for any checkpoint.
    """
    check_sources(text=text, dataset=dataset, tokens=tokens, length=length)
    if isinstance(model, Checkpoint):
        ckpt = model
    else:
        try:
            ckpt = opening(model, **options)
        except UsageError:
            raise
        except ProbeError as error:
            return Report(str(model), (Finding("opens", False, None, str(error)),), versions=_versions())
    subject = Subject(ckpt, dict(text=text, dataset=dataset, tokens=tokens), length)
    findings = [Finding("opens", True, None, _source(ckpt))]
    with unchanged(ckpt.model):
        for name, ask in CHECKS.items():
            findings.append(_asked(name, ask, subject))
        if not quick:
            sound = findings[-1].passed is not False
            findings.append(_asked("as trained", lambda s: as_trained(s, sound, progress), subject))
    where = {
        "dtype": ckpt.dtype,
        "device": ckpt.device,
        "source": ckpt.provenance,
        "tokens": subject.described(),
    }
    return Report(ckpt.name, tuple(findings), subject.lines(), _versions(), where)


def _asked(name: str, ask: Callable, subject: Subject) -> Finding:
    """One check; whatever goes wrong inside is its finding."""
    try:
        return Finding(name, *ask(subject))
    except ProbeError as error:
        return Finding(name, False, None, str(error))
    except (MemoryError, torch.OutOfMemoryError):
        return Finding(name, None, None, "out of memory: use a smaller --length, or --dtype bfloat16.")
    except Exception as error:
        words = f"could not be asked: {type(error).__name__}, {first_words(error)} (please report this model)."
        return Finding(name, False, None, words)


class Subject:
    """The checkpoint under examination, and what several checks read of it once.

    Parameters
    ----------
    ckpt : Checkpoint
    source : dict
        Options of `segments_for` that say what to read.
    length : int or None
    """

    def __init__(self, ckpt: Checkpoint, source: dict, length: int | None):
        self.ckpt, self.source, self.asked_length = ckpt, source, length

    @cached_property
    def declared(self) -> Geometry:
        """Geometry by the model's own code and config, not measured."""
        return read_geometry(self.ckpt.decoder, self.length)

    @cached_property
    def geometry(self) -> Geometry:
        return self.ckpt.geometry(self.length)

    @cached_property
    def length(self) -> int:
        if self.source["tokens"] is not None:
            return self.segments.ids.shape[1]
        if self.asked_length is not None:
            return self.asked_length
        limit = self.ckpt.claimed_length or LENGTH
        windows = [layer.window for layer in read_geometry(self.ckpt.decoder).layers if layer.window]
        return max(2, min(limit, max([LENGTH, *(window + 16 for window in windows if window + 16 <= LONGEST)])))

    @cached_property
    def segments(self) -> Segments:
        """Segments of text: the first two are read, all are counted."""
        size = self.asked_length if self.source["tokens"] is not None else self.length
        with warnings.catch_warnings():  # fewer are enough
            warnings.filterwarnings("ignore", message=".* segments of .* asked for")
            return segments_for(self.ckpt, **self.source, segments=COUNTED, length=size)

    @cached_property
    def no_text(self) -> str | None:
        """Why there is no text to read; None where there is."""
        try:
            ids = self.segments.ids
        except UsageError:
            raise
        except ProbeError as error:
            return str(error)
        return None if ids.shape[1] >= 2 else "segments of one token predict nothing: use --length 2 or more."

    @cached_property
    def ids(self) -> torch.Tensor:
        """Token ids to run, shape (1 or 2, length): the text, or any ids where there is none."""
        if self.no_text is None:
            ids = self.segments.ids[:2]
        else:
            ids = np.random.default_rng(0).integers(0, self.ckpt.vocabulary, (1, self.length))
        return torch.tensor(np.asarray(ids), device=input_device(self.ckpt.decoder))

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.ckpt.decoder(input_ids=ids, use_cache=False).last_hidden_state.float()

    @cached_property
    def plain(self) -> torch.Tensor:
        """Last hidden states without a tap."""
        return self.hidden(self.ids[:1])

    @cached_property
    def watched(self) -> tuple[torch.Tensor, dict[int, Seen]]:
        """Last hidden states under the tap, and what each layer's attention showed."""
        with Watch(self.ckpt.decoder) as watch:
            hidden = self.hidden(self.ids[:1])
        if not watch.found:
            raise ProbeError(
                f"{type(self.ckpt.decoder).__name__} does not attend through transformers' attention interface: "
                "its attention was never seen."
            )
        return hidden, watch.found

    @cached_property
    def nll(self) -> torch.Tensor:
        """Of every token but the first, shape (2, length - 1)."""
        return token_nll(self.ckpt.model, self.ids).double()

    def described(self) -> str:
        with contextlib.suppress(Exception):
            count, size = self.ids.shape
            what = self.segments.corpus if self.no_text is None else "random token ids"
            return f"{count} × {size:,} tokens of {what}"
        return "none"

    def lines(self) -> list[str]:
        """The geometry, one line for each kind of layer."""
        with contextlib.suppress(Exception):
            return [_kind(kind) for kind in self.declared.kinds()]
        return []


def _kind(kind: list[RotaryLayer]) -> str:
    first = kind[0]
    shape = f"{first.heads} heads, {first.kv_heads} kv heads of {first.head_dim}"
    turned = (
        f"base {base_words(first.base)}, {first.rope_type}, {first.pairs} pairs, layout {first.layout}"
        if first.rotates
        else "no rotation"
    )
    window = f", window {first.window:,}" if first.window else ""
    return f"layers {ranges([x.layer for x in kind])}: {first.layer_type}{window}, {shape}, {turned}"


def _source(ckpt: Checkpoint) -> str:
    count = sum(p.numel() for p in ckpt.model.parameters())
    return f"{type(ckpt.model).__name__}, {count / 1e6:,.1f} million parameters"


def _versions() -> dict:
    return results.versions() | {"python": platform.python_version(), "system": platform.platform()}
