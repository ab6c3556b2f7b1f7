"""compare: results of the same analysis side by side, with the error of every difference."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import xarray as xr

from ..accumulate import mean_and_error
from ..errors import ProbeError, ProbeWarning, UsageError
from ..words import model_name, ranges
from . import compare_parts as parts
from .compare_axes import AXES, overlap, transfer
from .compare_parts import Part, Statistic


class Comparison(NamedTuple):
    """How results of an analysis are compared.

    Attributes
    ----------
    parts : callable
        Takes a result, returns its `Part`s.
    figure : str
        Module of `plots` with a function of that name, called with (results, ax=, names=, axis=).
    """

    parts: Callable[[xr.Dataset], list[Part]]
    figure: str


#: analysis -> how it is compared; a further analysis is one entry here
ANALYSES: dict[str, Comparison] = {
    "bands": Comparison(parts.bands, "compare_bands"),
    "scan": Comparison(parts.bands, "compare_bands"),
    "spectrum": Comparison(parts.spectrum, "compare_spectrum"),
    "similarity": Comparison(parts.similarity, "compare_similarity"),
    "heads": Comparison(parts.heads, "compare_heads"),
    "truncate": Comparison(parts.truncate, "compare_truncate"),
    "trajectory": Comparison(parts.trajectory, "compare_trajectory"),
    "extend": Comparison(parts.extend, "compare_extend"),
}

#: analyses whose results hold what those of `bands` do, and are compared as such with each other
HOLD_BANDS = ("bands", "scan", "heads")


def compare(results: Sequence[xr.Dataset], names: Sequence[str] | None = None) -> xr.Dataset:
    """Statistics of several results of one analysis, and how they differ from those of the first.

    Parameters
    ----------
    results : sequence of Dataset
        Two or more results of one analysis.
    names : sequence of str, optional
        What to call them; default: the models.

    Returns
    -------
    Dataset
        ``value[result, statistic]`` and ``difference[result, statistic]`` with standard errors over segments
        ``value_se``, ``difference_se``; a result has one row for every kind of layer, and one for all of them where
        there are several.  Differences are from the row ``reference[result]``: of the first result, its layers of the
        same kind if it has them.  ``paired[result, statistic]``: measured on the same token ids, so that the error is
        that of the differences segment by segment.  NaN where there is none.

        Where the results hold bands, ``offset[result, axis]``: how far i_band (usage) is from the pair that stands
        where the reference has its own, as a share of the pairs, if pairs are laid side by side by index / P, by
        wavelength, or by wavelength / length of formation; and ``overlap[result, axis]``, the area that the usage
        profiles share (see `compare_axes.overlap`).

    Warns
    -----
    ProbeWarning
        For everything but the model in which the measurements differ: text, token ids, length, segments, options,
        versions.

    Raises
    ------
    UsageError
        Fewer than two results.
    ProbeError
        Results of different analyses, of one that cannot be compared, or without a statistic in common.
    """
    results = list(results)
    analysis = check(results)
    names = list(names or model_names(results))
    for sentence in mismatches(results, names):
        warnings.warn(sentence, ProbeWarning, stacklevel=2)
    found = [ANALYSES[analysis].parts(ds) for ds in results]
    rows = [(number, part) for number, own in enumerate(found) for part in own]
    references = [_reference(part, found[0]) for _, part in rows]
    same_ids = [_same_ids(results[0], ds) for ds in results]
    shared = _shared(found)
    if not shared:
        raise ProbeError(f"the results of {analysis} have no statistic in common: compare those of the same settings.")
    labels = [f"{names[number]}, {part.title}" if part.title else names[number] for number, part in rows]
    nothing = Statistic(np.nan)
    table: dict[str, list[list[float]]] = {
        name: [] for name in ("value", "value_se", "difference", "difference_se", "paired")
    }
    for (number, part), reference in zip(rows, references, strict=True):
        ours = [part.statistics.get(name, nothing) for name in shared]
        theirs = [found[0][reference].statistics.get(name, nothing) for name in shared]
        table["value"].append([one.value for one in ours])
        table["value_se"].append([one.standard_error for one in ours])
        pairs = list(zip(ours, theirs, strict=True))
        table["difference"].append([difference(one, other) for one, other in pairs])
        itself = part is found[0][reference]
        errors = [np.nan if itself else difference_error(one, other, same_ids[number]) for one, other in pairs]
        table["difference_se"].append(errors)
        table["paired"].append([same_ids[number] and _by_segment(one, other) for one, other in pairs])
    dims = ("result", "statistic")
    ds = xr.Dataset(
        {name: (dims, np.array(values)) for name, values in table.items()},
        coords={
            "result": labels,
            "statistic": shared,
            "file": ("result", [number for number, _ in rows]),
            "kind": ("result", [part.kind for _, part in rows]),
            "reference": ("result", [labels[reference] for reference in references]),
            "same_tokens": ("result", [same_ids[number] for number, _ in rows]),
        },
        attrs={"analysis": "compare", "compared": analysis},
    )
    return _with_axes(ds, rows, [found[0][reference] for reference in references], same_ids)


def _with_axes(ds: xr.Dataset, rows, references: list[Part], same_ids) -> xr.Dataset:
    """How well bands agree on each axis, where there are any."""
    offset, error, shared = (np.full((len(rows), len(AXES)), np.nan) for _ in range(3))
    for row, ((number, part), reference) in enumerate(zip(rows, references, strict=True)):
        if part is reference or part.band is None or reference.band is None:
            continue
        ours, theirs = part.band, reference.band
        pairs = len(ours.ladder.wavelength)
        for column, axis in enumerate(AXES):

            def moved(index, axis=axis, ours=ours, theirs=theirs, pairs=pairs):
                return transfer(index, theirs.ladder, ours.ladder, axis) / pairs

            expected = parts.scaled(theirs.i_band, moved)
            measured = parts.scaled(ours.i_band, lambda index, pairs=pairs: index / pairs)
            offset[row, column] = measured.value - expected.value
            error[row, column] = difference_error(measured, expected, same_ids[number])
            shared[row, column] = overlap(theirs.ladder, theirs.profile, ours.ladder, ours.profile, axis)
    if np.isnan(shared).all():
        return ds
    dims = ("result", "axis")
    found = {"offset": (dims, offset), "offset_se": (dims, error), "overlap": (dims, shared)}
    return ds.assign(found).assign_coords(axis=list(AXES))


def _reference(part: Part, first: list[Part]) -> int:
    """Which part of the first result goes with a part: that of the same kind, else the first one."""
    return next((row for row, own in enumerate(first) if own.kind == part.kind), 0)


def _shared(found: list[list[Part]]) -> list[str]:
    """Statistics that two results have, in order of first appearance."""
    names = [dict.fromkeys(name for part in own for name in part.statistics) for own in found]
    return [name for name in dict.fromkeys(name for own in names for name in own) if sum(name in n for n in names) > 1]


def _by_segment(one: Statistic, other: Statistic) -> bool:
    return one.segments is not None and other.segments is not None


def difference(one: Statistic, other: Statistic) -> float:
    """How much larger one is than the other; NaN for indices on ladders of different sizes."""
    return one.value - other.value if one.pairs == other.pairs else np.nan


def difference_error(one: Statistic, other: Statistic, same_ids: bool) -> float:
    """Standard error of the difference: of the segments' differences on the same token ids, else of independent texts."""
    if one.pairs != other.pairs:
        return np.nan
    if same_ids and one.segments is not None and other.segments is not None:
        return float(mean_and_error(one.segments - other.segments)[1])
    return float(np.hypot(one.standard_error, other.standard_error))


def check(results: Sequence[xr.Dataset]) -> str:
    """The one analysis of some results; an error where they cannot be compared."""
    if len(results) < 2:
        raise UsageError(f"{len(results)} result cannot be compared: give two or more files.")
    found = list(dict.fromkeys(str(ds.attrs.get("analysis")) for ds in results))
    if len(found) > 1 and all(name in HOLD_BANDS for name in found):
        return "bands"
    if len(found) > 1:
        raise ProbeError(f"the results are of different analyses ({', '.join(found)}): compare those of one.")
    if found[0] not in ANALYSES:
        raise ProbeError(f"results of {found[0]} cannot be compared, only those of {', '.join(ANALYSES)}.")
    return found[0]


def model_names(results: Sequence[xr.Dataset]) -> list[str]:
    """Short names of the models, numbered where one comes twice."""
    several = len({ds.attrs["analysis"] for ds in results}) > 1
    names = [model_name(ds) + (f" ({ds.attrs['analysis']})" if several else "") for ds in results]
    return [f"{name} ({names[:n].count(name) + 1})" if names.count(name) > 1 else name for n, name in enumerate(names)]


def _same_ids(first: xr.Dataset, ds: xr.Dataset) -> bool:
    return ds.attrs["tokens_sha256"] == first.attrs["tokens_sha256"]


def mismatches(results: Sequence[xr.Dataset], names: Sequence[str]) -> list[str]:
    """One sentence for everything but the model in which measurements differ from each other."""
    facts = [_facts(ds, same_model=len({ds.attrs["model"] for ds in results}) == 1) for ds in results]
    if len({one["analysis"] for one in facts}) > 1:  # each has options that the others have not
        common = set.intersection(*(set(one) for one in facts))
        facts = [{label: value for label, value in one.items() if label in common} for one in facts]
    found: dict[str, str] = {}
    for label in dict.fromkeys(label for one in facts for label in one):
        seen = [str(one.get(label, "none")) for one in facts]
        if len(set(seen)) > 1:
            said = "; ".join(f"{value} ({name})" for value, name in zip(seen, names, strict=True))
            found[label] = f"the results differ in {label}: {said}."
    read = {"text", "length", "number of segments"}  # each makes other token ids of itself
    if not read & set(found) and not all(_same_ids(results[0], ds) for ds in results):
        found["token ids"] = (
            "the results were measured on different token ids (another tokenizer, or another text of that name): "
            "their segments cannot be paired."
        )
    cut = [name for name, ds in zip(names, results, strict=True) if int(ds.attrs.get("partial", 0))]
    if cut:
        found["partial"] = f"cut short, and compared as far as read: {', '.join(cut)}."
    return list(found.values())


def _facts(ds: xr.Dataset, same_model: bool) -> dict:
    """What has to match, by the words for it."""
    options = json.loads(ds.attrs["options"])
    options.pop("batch", None)  # changes no number
    if not same_model:  # other models have other layers and heads
        for name in ("layers", "heads", "layer_type", "map", "inject"):
            options.pop(name, None)
    facts = {
        "analysis": ds.attrs["analysis"],
        "text": ds.attrs["corpus"],
        "length": int(ds.attrs["length"]),
        "number of segments": int(ds.attrs["segments"]),
        "dtype": ds.attrs["dtype"],
    }
    if ds.attrs["analysis"] == "similarity":
        facts["distances"] = ", ".join(map(str, ds["distance"].values))
    if "checkpoint" in ds.dims:
        facts["checkpoints"] = ", ".join(map(str, ds["checkpoint"].values))
    for name, value in options.items():
        facts[f"option {name}"] = ranges(value) if name in ("layers", "heads") and value else value
    return facts | {f"version of {name}": value for name, value in json.loads(ds.attrs["versions"]).items()}
