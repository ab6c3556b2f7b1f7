"""Measure what fits, one analysis after the other, and write the page; what fails leaves the others alone."""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import xarray as xr

from .. import processes, results
from ..checkpoints import Checkpoint
from ..errors import ProbeError, ProbeWarning, UsageError, first_words
from ..probes import summary
from ..probes.check import check
from ..probes.common import uninterrupted
from ..probes.inspect import describe
from ..texts import check_sources, segments_for
from ..words import model_name
from . import plan
from .record import Report, Section
from .sections import ABOUT

MARK = b'<meta name="generator" content="rope-probe">'  # in every page
MEMORY = "out of memory: use a smaller --batch or --length, or --dtype bfloat16."


def report(
    ckpt: Checkpoint,
    output,
    *,
    budget: float | str = plan.BUDGET,
    text=None,
    dataset: str | None = None,
    tokens=None,
    segments: int | None = None,
    length: int | None = None,
    batch: int | None = None,
    seed: int = 0,
    command: str = "rope_probe.report(…)",
    tell: Callable[[str], None] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Report:
    """Run every analysis that fits into a time, and write one page of HTML that needs nothing else.

    Parameters
    ----------
    ckpt : Checkpoint
    output : str or Path
        The page, ending in .html; replaced as a whole.
    budget : float or str
        Seconds, or ``90s``, ``10m``, ``1h``, from the moment the model is open; writing the page comes on top.
    text, dataset, tokens, length, batch : optional
        What is read, as for `bands`.
    segments : int, optional
        At most so many for each analysis; default 16.
    seed : int
        Of what `heads` and `similarity` draw at random.
    command : str
        How it was called, for the page.
    tell : callable, optional
        Called with every line of the plan.
    progress : callable, optional
        Called with (analysis, segments read, segments in all).

    Returns
    -------
    Report
        After an interrupt, with what was measured until then and ``partial`` set; the page is written all the same.

    Raises
    ------
    UsageError
        A budget that is no time, a page that does not end in .html, several processes.
    ProbeError
        The page cannot be written; the text or the model cannot be read at all.
    """
    seconds, path = plan.seconds(budget), page_path(output)
    source = {"text": text, "dataset": dataset, "tokens": tokens}
    check_sources(**source, segments=segments, length=length, batch=batch)
    if processes.size() > 1:
        raise UsageError("report reads in one process: leave out torchrun.")
    say = tell or (lambda line: None)
    started = time.perf_counter()
    with _listening(set()) as heard:
        chosen = segments_for(ckpt, **source, segments=segments, length=length)
    available, size = chosen.ids.shape
    available = min(available, segments or plan.MOST)
    trial = plan.measure_passes(ckpt, chosen.ids[:1])
    run = _Run(ckpt, source | {"length": length}, size, batch, seed, progress)
    run.said.update(heard)
    run.add("inspect", lambda: describe(ckpt.geometry(size), _name(ckpt), size))
    wanted = plan.choose(trial, plan.COSTS, _left(seconds, started), seconds, available)
    # the quickest first: whatever takes longer than estimated then takes little from the others
    waiting = sorted(plan.COSTS, key=lambda name: trial.cost(name, plan.FEWEST))
    for line in plan.words(trial, wanted, seconds, size):
        say(line)
    spent = expected = 0.0
    while waiting and not run.interrupted:
        # what has been slower than estimated leaves less for the rest, and is likely to stay so
        pace = max(1.0, spent / expected) if expected else 1.0
        left = _left(seconds, started) / pace
        now = plan.choose(trial, waiting, left, seconds, available) if expected else wanted
        name = waiting.pop(0)
        if name in now:
            run.measure(name, now[name])
            spent, expected = spent + run.sections[-1].seconds, expected + trial.cost(name, now[name])
    done = [section.name for section in run.sections]
    left_out = {name: why for name, why in plan.left_outs(trial, wanted, seconds).items() if name not in done}
    left_out |= {
        name: "interrupted before" if run.interrupted else "no time was left" for name in wanted if name not in done
    }
    about = _about(ckpt, chosen, command, seconds, time.perf_counter() - started)
    order = list(ABOUT)
    sections = sorted(run.sections, key=lambda section: order.index(section.name))
    made = Report(_name(ckpt), path, sections, left_out, run.interrupted, about)
    from .page import write

    with uninterrupted():
        write(made)
    return made


def page_path(output) -> Path:
    """Where the page goes, checked before anything is measured."""
    path = Path(output)
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"the page is {path}: its name must end in .html.")
    results.check_writable(path)
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as stream:
            if MARK not in stream.read(4096):
                raise ProbeError(f"{path} exists and is not a report: give another name, or remove it first.")
    return path


def _left(seconds: float, started: float) -> float:
    return seconds - (time.perf_counter() - started)


class _Run:
    """The analyses of one checkpoint, and what came of them."""

    def __init__(self, ckpt: Checkpoint, source: dict, size: int, batch: int | None, seed: int, progress):
        self.ckpt, self.source, self.size, self.batch, self.seed = ckpt, source, size, batch, seed
        self.progress = progress
        self.sections: list[Section] = []
        self.said: set[str] = set()
        self.interrupted = False

    def measure(self, name: str, segments: int) -> None:
        """One analysis by its name."""
        if name == "check":
            self.add(name, lambda: check(self.ckpt, **self.source, quick=True))
            return
        options: dict[str, Any] = self.source | {"segments": segments, "batch": self.batch}
        if name in ("heads", "similarity"):
            options["seed"] = self.seed
        if name == "truncate":
            options["bands"] = next((one.result for one in self.sections if one.name == "bands"), None)
        if self.progress:
            options["progress"] = lambda done, total: self.progress(name, done, total)
        measure = getattr(import_module(f"..probes.{name}", __package__), name)
        self.add(name, lambda: measure(self.ckpt, **options))

    def add(self, name: str, measure: Callable[[], Any]) -> None:
        """Measure, and keep what came of it, whatever that is."""
        section, start = Section(name), time.perf_counter()
        self.sections.append(section)
        with _listening(self.said) as section.warned:
            try:
                section.result = measure()
                section.values = _values(section.result)
            except KeyboardInterrupt:
                self.interrupted, section.failed = True, "interrupted before anything was measured."
            except Exception as error:
                if os.environ.get("ROPE_PROBE_DEBUG"):
                    raise
                section.failed = _sentence(error)
        section.seconds = time.perf_counter() - start
        if isinstance(section.result, xr.Dataset):
            section.segments = int(section.result.attrs["segments"])
            # a failure in a later batch has been warned about, and leaves the other analyses alone
            failure = any(one.startswith("stopped after") for one in section.warned)
            self.interrupted |= section.partial and not failure


def _values(result) -> dict:
    """The numbers of a result, as its command prints them with --json."""
    if isinstance(result, xr.Dataset):
        return summary(result)
    return result if isinstance(result, dict) else result.as_dict()


def _sentence(error: Exception) -> str:
    if isinstance(error, ProbeError):
        return str(error)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "out of memory" in str(error):
        return MEMORY
    return f"unexpected {type(error).__name__}: {first_words(error)} (please report this model)."


@contextlib.contextmanager
def _listening(said: set[str]) -> Iterator[list[str]]:
    """What is warned about inside, each sentence once; people hear it once in all."""
    heard: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ProbeWarning)
        yield heard
    for warning in caught:
        message = str(warning.message)
        if issubclass(warning.category, ProbeWarning) and message not in heard:
            heard.append(message)
        if message not in said:
            said.add(message)
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _name(ckpt: Checkpoint) -> str:
    return model_name(xr.Dataset(attrs={"model": ckpt.name, "provenance": json.dumps(ckpt.provenance)}))


def _about(ckpt: Checkpoint, chosen, command: str, budget: float, took: float) -> dict[str, str]:
    """Where the numbers come from, beside what each result file says of itself."""
    where = {"model": ckpt.name} | {key: str(value) for key, value in ckpt.provenance.items()}
    return where | {
        "class": type(ckpt.model).__name__,
        "dtype": ckpt.dtype,
        "device": ckpt.device,
        "text": chosen.corpus,
        "segment length": f"{chosen.ids.shape[1]:,} tokens",
        "time": f"{plan.duration(took)} of {plan.duration(budget)}",
        "versions": ", ".join(f"{name} {number}" for name, number in results.versions().items()),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
    }
