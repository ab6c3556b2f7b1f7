"""What a report holds: every analysis with what came of it, and where the numbers are from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xarray as xr

MEASURED = ("bands", "heads", "similarity", "truncate", "spectrum")  # those that end in a result file


@dataclass
class Section:
    """One analysis of a report.

    Attributes
    ----------
    name : str
    result : object
        What the table is made from: a Dataset, the description of `inspect`, the report of `check`; None where it
        could not be measured.
    values : dict
        Its numbers, as ``--json`` of the command prints them.
    failed : str
        Why there is no result.
    warned : list of str
    segments : int
        Segments read.
    seconds : float
        Time it took.
    """

    name: str
    result: Any = None
    values: dict = field(default_factory=dict)
    failed: str = ""
    warned: list[str] = field(default_factory=list)
    segments: int = 0
    seconds: float = 0.0

    @property
    def partial(self) -> bool:
        """Was it interrupted before the end?"""
        return isinstance(self.result, xr.Dataset) and bool(self.result.attrs["partial"])


@dataclass
class Report:
    """What was measured of a checkpoint, and the page that shows it.

    Attributes
    ----------
    model : str
        Short name.
    path : Path
    sections : list of Section
        In the order of the page.
    left_out : dict of str to str
        Analyses that did not fit, and why.
    partial : bool
        Interrupted before the end.
    about : dict of str to str
        Where the numbers come from.
    """

    model: str
    path: Path
    sections: list[Section]
    left_out: dict[str, str]
    partial: bool
    about: dict[str, str]

    @property
    def results(self) -> dict[str, xr.Dataset]:
        """The results of the analyses that have one, as their functions return them."""
        return {
            section.name: section.result for section in self.sections if section.name in MEASURED and section.values
        }

    @property
    def failed(self) -> dict[str, str]:
        """Analyses that failed, and why."""
        return {section.name: section.failed for section in self.sections if section.failed}

    def as_dict(self) -> dict:
        """Everything as plain values, for JSON."""
        from .glance import facts

        return {
            "analysis": "report",
            "model": self.model,
            "output": str(self.path),
            "partial": self.partial,
            "glance": [fact.as_dict() for fact in facts(self)],
            "analyses": {section.name: section.values for section in self.sections if section.values},
            "warnings": {section.name: section.warned for section in self.sections if section.warned},
            "seconds": {section.name: round(section.seconds, 2) for section in self.sections},
            "failed": self.failed,
            "left_out": self.left_out,
            "about": self.about,
        }
