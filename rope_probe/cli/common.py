"""What commands have in common: parsing, opening, progress, output."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import typer

from ..errors import ProbeError, UsageError

COMMAND = ""  # as it was typed, where there was one


def parse_layers(text: str | None, option: str = "--layers", noun: str = "layers") -> list[int] | None:
    """`0-3,10` -> [0, 1, 2, 3, 10]."""
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", part)
        if not match:
            raise typer.BadParameter(f"{text!r} is not a list of {noun}: write it like 0-3,10.", param_hint=option)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise typer.BadParameter(
                f"the range {part.strip()} runs backwards: write {last}-{first}.", param_hint=option
            )
        found.update(range(first, last + 1))
    return sorted(found)


def parse_numbers(text: str | None, option: str, known: tuple[str, ...]) -> dict[str, float] | None:
    """`base=1e4,length=4096` -> {'base': 10000.0, 'length': 4096}; every number above 1."""
    if text is None:
        return None
    found = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        key = key.strip()
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if key not in known or not 1 < number < math.inf:
            raise typer.BadParameter(
                f"{part!r} is not one of {', '.join(f'{name}=NUMBER' for name in known)} with a number above 1.",
                param_hint=option,
            )
        found[key] = int(number) if key == "length" else number
    return found


def parse_words(text: str | None) -> list[str] | None:
    """`none,yarn` -> ['none', 'yarn']."""
    return None if text is None else list(dict.fromkeys(part.strip() for part in text.split(",")))


def parse_floats(text: str | None, option: str) -> list[float] | None:
    """`1,0.8,0.5` -> [1.0, 0.8, 0.5]."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of numbers: write it like 1,0.8,0.5.", param_hint=option
        ) from None


def open_model(model: str, **options):
    """Open a checkpoint, with a line on standard error while a person waits."""
    with _status(f"opening {model}"):
        from ..checkpoints import open_checkpoint

        return open_checkpoint(model, **options)


def speaks() -> bool:
    """Is this the process that tells people what goes on?"""
    from ..processes import rank

    return rank() == 0


def _console():
    from rich.console import Console

    return Console(stderr=True)


def _status(message: str):
    import contextlib

    return _console().status(message) if sys.stderr.isatty() and speaks() else contextlib.nullcontext()


class Progress:
    """Segments read, tokens per second and time left, on standard error; silent when that is no terminal.

    Call it with (segments read, segments in all); with 0 read, its clock starts anew.  Where the whole run will take more than half a
    minute, the first call also says so, with the memory in use.
    """

    def __init__(self, length: int | None = None, noun: str = "segments"):
        import time

        self.clock = time.perf_counter
        self.started = self.clock()
        self.length, self.noun = length, noun
        self.bar: Any = None
        self.announced = False

    def __enter__(self):
        self.started = self.clock()
        return self

    def __call__(self, done: int, total: int) -> None:
        if not done:  # what came before the reading is not part of its speed
            self.started = self.clock()
            return
        elapsed = self.clock() - self.started
        if not speaks():
            return
        if not self.announced:
            self.announced = True
            expected = elapsed * total / done
            if expected > 30 and done < total:
                print(
                    f"about {_duration(expected)} for {total} {self.noun}, {_peak_memory():.1f} GB of memory in use",
                    file=sys.stderr,
                )
        if not sys.stderr.isatty():
            return
        if self.bar is None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
            self.bar = Progress(*columns, TimeRemainingColumn(), console=_console(), transient=True)
            self.task = self.bar.add_task("", total=total, speed="")
            self.bar.start()
        speed = (
            f"{done * self.length / elapsed:,.0f} tokens/s" if self.length else f"{done / elapsed:.2f} {self.noun}/s"
        )
        self.bar.update(self.task, completed=done, speed=speed)

    def __exit__(self, *exc) -> None:
        if self.bar is not None:
            self.bar.stop()


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


def _peak_memory() -> float:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform != "darwin" else peak / 1e9


def check_sources(**sources) -> None:
    """Refuse a text or token file that cannot be read, before the model is opened for it."""
    from ..texts import check_sources

    check_sources(**sources)


def state_path(path: Path) -> Path:
    """Where a run keeps what it has measured, beside its result."""
    return path.with_name(f"{path.name}.resume")


def output_path(
    output: str | None, analysis: str, model: str, figure: Path | None = None, resume: bool = False
) -> Path:
    """Where the result goes, checked before the run: exactly `output`, or a free name here.

    A run that is to be resumed has the name of the one that was interrupted.
    """
    from ..results import check_writable

    if output is None:
        stem = f"{analysis}-{re.sub(r'[^A-Za-z0-9._-]+', '-', Path(model).name)}"
        path = Path(f"{stem}.nc")
        number = 2
        while path.exists() and not (resume and state_path(path).exists()):
            path = Path(f"{stem}-{number}.nc")
            number += 1
    else:
        path = Path(output)
    check_writable(path)
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as stream:
            if stream.read(4) != b"\x89HDF":
                raise ProbeError(f"{path} exists and is not a result file: give another name, or remove it first.")
    if figure is not None and figure.resolve() == path.resolve():
        raise UsageError(f"--output and --figure are both {path}: give two names.")
    return path


def carry_out(
    measure,
    ckpt,
    path: Path,
    drawing: Path | None,
    json: bool,
    resume: bool,
    clock: Progress | None = None,
    **options: Any,
) -> None:
    """Measure, store, show, draw.  What is measured is kept beside the result until that is whole.

    `clock` is given where something else than segments is counted.
    """
    from ..resume import resumable
    from .show import present

    state = state_path(path)
    if not speaks():
        pass
    elif resume and not state.exists():
        print(f"there is no {state}, so the run starts from the beginning", file=sys.stderr)
    elif state.exists() and not resume:
        print(f"{state} of an interrupted run is there: --resume would go on from it", file=sys.stderr)
    with resumable(state, resume), clock or Progress(options["length"]) as progress:
        ds = measure(ckpt, **options, progress=progress)
        if speaks():
            store(ds, path)
    if not speaks():
        return
    present(ds, path, drawing, json)
    if ds.attrs["partial"]:
        more = f"; --resume goes on from there ({state})" if state.exists() else ""
        when = "before the end" if clock else f"after {ds.attrs['segments']} segments"
        raise ProbeError(f"stopped {when}; {path} holds what was measured{more}.")


def store(ds, path: Path) -> None:
    """Save a result; where that fails, save it in the temporary folder, so that the run is not lost."""
    import tempfile

    from ..results import save

    if COMMAND:
        ds.attrs["command"] = COMMAND
    try:
        save(ds, path)
    except ProbeError as error:
        try:
            refuge = save(ds, Path(tempfile.mkdtemp(prefix="rope-probe-")) / path.name)
        except (ProbeError, OSError):
            raise error from None
        raise ProbeError(f"{error} The result is in {refuge}.") from error


def print_json(values: dict) -> None:
    """One JSON object on standard output; numbers that are not finite become null."""
    print(json.dumps(_finite(values), allow_nan=False))


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def figure_path(figure: str | None) -> Path | None:
    """Where the figure goes, checked before the run."""
    if figure is None:
        return None
    from ..results import check_writable

    path = Path(figure)
    if path.suffix.lower() not in (".pdf", ".png", ".svg"):
        raise UsageError(f"--figure is {figure}: the name must end in .pdf, .png or .svg.")
    check_writable(path)
    return path
