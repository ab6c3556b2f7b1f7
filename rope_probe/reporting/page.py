"""The page: sections with their tables, figures and files, put into one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.resources import files

import xarray as xr
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from .. import plots
from ..cli.common import _finite
from ..cli.show import FEW
from ..errors import ProbeError, first_words
from ..results import replace_file
from .figures import INK, PAPER, Drawing, Ink, drawing
from .glance import facts
from .plan import duration
from .record import Report, Section
from .sections import ABOUT, About
from .tables import Block, html_blocks

LARGEST = 24_000_000  # bytes of a result that is still put into the page


@dataclass(frozen=True)
class Download:
    """A file inside the page."""

    name: str
    words: str
    href: Markup


@dataclass
class Part:
    """What the template shows of one analysis."""

    name: str
    about: About
    read: str
    blocks: list[Block] = field(default_factory=list)
    figures: list[Drawing] = field(default_factory=list)
    downloads: list[Download] = field(default_factory=list)
    failed: str = ""
    notes: list[str] = field(default_factory=list)


def write(report: Report) -> None:
    """Write the page of a report, as a whole or not at all.

    Raises
    ------
    ProbeError
        The disk is full, or the file cannot be written.
    """
    try:
        replace_file(report.path, page(report).encode())
    except OSError as error:
        raise ProbeError(f"cannot write {report.path}: {error.strerror}; free space or give another name.") from error


def page(report: Report) -> str:
    """A report as HTML."""
    ink = Ink()
    parts = [_part(section, report, ink) for section in report.sections]
    notes: dict[str, list[str]] = {}
    for part in parts:
        for note in part.notes:
            notes.setdefault(note, []).append(part.about.title)
    own = files(__package__)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    template = environment.from_string(own.joinpath("page.html").read_text(encoding="utf-8"))
    numbers = json.dumps(_finite(report.as_dict()), allow_nan=False).encode()
    return template.render(
        report=report,
        facts=facts(report),
        parts=parts,
        notes=notes,
        left_out={ABOUT[name].title: why for name, why in report.left_out.items()},
        everything=_download(f"report-{_file_name(report.model)}.json", numbers, "application/json", "all numbers"),
        style=Markup(own.joinpath("page.css").read_text(encoding="utf-8")),
        fonts=ink.fonts(),
        light=ink.variables(dark=False),
        dark=Markup(f"--paper:{PAPER};--ink:{INK};") + ink.variables(dark=True),
    )


def _part(section: Section, report: Report, ink: Ink) -> Part:
    part = Part(section.name, ABOUT[section.name], _read(section), failed=section.failed, notes=list(section.warned))
    if not section.values:
        return part
    if section.name == "check" and not section.result.passed:
        bad = ", ".join(one.name for one in section.result.findings if one.passed is False)
        part.notes.append(f"Not passed: {bad}.")
    if section.partial:
        part.notes.append(f"Interrupted: {section.segments} segments were read.")
    stem = f"{section.name}-{_file_name(report.model)}"
    steps: list[Callable[[], None]] = [
        lambda: part.blocks.extend(_blocks(section)),
        *(partial(_draw, part, name, draw, ink) for name, draw in _figures(section).items()),
        lambda: _add_files(part, section, stem),
    ]
    for step in steps:  # what one of them cannot show must not take the page away
        try:
            step()
        except Exception as error:
            part.notes.append(f"Not shown: {type(error).__name__}, {first_words(error)} (please report this model).")
    return part


def _read(section: Section) -> str:
    """How much was read, and how long that took."""
    if not section.values:
        return ""
    if not section.segments:
        return "" if section.name == "inspect" else duration(section.seconds)
    rough = ", so standard errors are rough" if 1 < section.segments < FEW else ""
    return f"{section.segments} segment{'s' * (section.segments != 1)} read in {duration(section.seconds)}{rough}"


def _blocks(section: Section) -> list[Block]:
    render = import_module(f"..cli.tables.{section.name}", __package__).render
    return html_blocks(render, section.result, *([section.values] if isinstance(section.result, xr.Dataset) else []))


def _figures(section: Section) -> dict[str, Callable]:
    """Figures of an analysis by name, as functions without arguments."""
    if section.name == "inspect":
        return {"wavelengths": partial(plots.inspect, [section.result])}
    known = plots.FIGURES.get(section.name, {})
    applying = {name: plot for name, plot in known.items() if getattr(plot, "applies", lambda ds: True)(section.result)}
    return {name: partial(plot, section.result) for name, plot in applying.items()}


def _draw(part: Part, name: str, draw: Callable, ink: Ink) -> None:
    part.figures.append(drawing(draw(), f"{part.name}-{name}", ink))


def _add_files(part: Part, section: Section, stem: str) -> None:
    """The result file and the numbers of the table."""
    if isinstance(section.result, xr.Dataset):
        data = _packed(section.result)
        if len(data) <= LARGEST:
            part.downloads.append(_download(f"{stem}.nc", data, "application/x-netcdf", "result"))
        else:
            part.notes.append(f"The result file ({len(data) / 1e6:.0f} MB) is too large for this page.")
    values = json.dumps(_finite(section.values), allow_nan=False).encode()
    part.downloads.append(_download(f"{stem}.json", values, "application/json", "numbers of the table"))


def _packed(ds: xr.Dataset) -> bytes:
    """A result file, compressed."""
    numbers = [name for name, variable in ds.variables.items() if variable.dtype.kind in "iuf" and variable.ndim]
    whole = io.BytesIO()
    packing = {name: {"zlib": True, "complevel": 6, "shuffle": True} for name in numbers}
    ds.to_netcdf(whole, engine="h5netcdf", encoding=packing)
    return whole.getvalue()


def _download(name: str, data: bytes, kind: str, words: str) -> Download:
    size = f"{len(data) / 1e6:.1f} MB" if len(data) >= 1e5 else f"{max(1, len(data) // 1000)} kB"
    href = Markup(f"data:{kind};base64,{base64.b64encode(data).decode()}")
    return Download(name, f"{words}, {name.rpartition('.')[2]}, {size}", href)


def _file_name(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-.") or "model"
