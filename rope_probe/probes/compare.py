"""compare: results of the same analysis side by side, with the error of every difference."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import xarray as xr

from ..accumulate import mean_and_error
from ..errors import ProbeError, ProbeWarning, UsageError
from ..words import model_name, ranges
from . import bands_summary, similarity_summary

# statistic -> (its value, the same of every segment)
Statistics = dict[str, tuple[float | None, np.ndarray]]


def _bands(ds: xr.Dataset) -> Statistics:
    values = bands_summary.summary(ds)
    keys, queries, usage = (bands_summary.segment_means(ds, f"dominant{side}_segment") for side in ("", "_q", "_usage"))
    found = {
        "i_band, keys": (values["i_band"], keys),
        "i_band, queries": (values["i_band_q"], queries),
        "i_band, usage q·k": (values["i_band_usage"], usage),
    }
    if values["pairs"]:
        found["i_band / pairs, keys"] = (values["share"], keys / values["pairs"])
        found["i_band / pairs, usage"] = (values["i_band_usage"] / values["pairs"], usage / values["pairs"])
    return found


def _similarity(ds: xr.Dataset) -> Statistics:
    values = similarity_summary.summary(ds)
    found = {
        "rho": (values["rho"], similarity_summary.free_segments(ds)),
        "rho at fixed distance": (values["rho_fixed"], similarity_summary.controlled_segments(ds)),
    }
    for name, rows in similarity_summary.thirds(ds).items():
        part = ds.isel(layer=rows)
        segments = similarity_summary.free_segments(part)
        found[f"rho, {name} layers"] = (float(mean_and_error(segments)[0]), segments)
    return found


#: analysis -> what is compared; a further analysis is one entry here, and one in `plots.compare`
ANALYSES: dict[str, Callable[[xr.Dataset], Statistics]] = {"bands": _bands, "similarity": _similarity}


def compare(results: Sequence[xr.Dataset], names: Sequence[str] | None = None) -> xr.Dataset:
    """Statistics of several results of one analysis, and how they differ from those of the first.

    Parameters
    ----------
    results : sequence of Dataset
        Two or more results of `bands`, or of `similarity`.
    names : sequence of str, optional
        What to call them; default: the models.

    Returns
    -------
    Dataset
        ``value[result, statistic]`` and ``difference[result, statistic]`` (from the first result) with standard errors
        over segments ``value_se``, ``difference_se``; coordinate ``paired[result]``: measured on the same token ids as
        the first, so that the error is that of the differences segment by segment.  NaN where there is none.

    Warns
    -----
    ProbeWarning
        For everything but the model in which the measurements differ: text, length, segments, options, versions.

    Raises
    ------
    UsageError
        Fewer than two results.
    ProbeError
        Results of different analyses, or of one that cannot be compared.
    """
    results = list(results)
    analysis = check(results)
    names = list(names or model_names(results))
    for sentence in mismatches(results, names):
        warnings.warn(sentence, ProbeWarning, stacklevel=2)
    found = [ANALYSES[analysis](ds) for ds in results]
    shared = [name for name in found[0] if all(name in one for one in found)]
    values = np.array([[np.nan if one[name][0] is None else one[name][0] for name in shared] for one in found])
    errors = np.array([[mean_and_error(one[name][1])[1] for name in shared] for one in found])
    same_ids = [_same_ids(results[0], ds) for ds in results]
    apart = np.full(values.shape, np.nan)
    for row in range(1, len(found)):
        for column, name in enumerate(shared):
            if same_ids[row]:
                apart[row, column] = mean_and_error(found[row][name][1] - found[0][name][1])[1]
            else:
                apart[row, column] = np.hypot(errors[row, column], errors[0, column])
    dims = ("result", "statistic")
    return xr.Dataset(
        {
            "value": (dims, values),
            "value_se": (dims, errors),
            "difference": (dims, values - values[0]),
            "difference_se": (dims, apart),
        },
        coords={"result": names, "statistic": shared, "paired": ("result", same_ids)},
        attrs={"analysis": "compare", "compared": analysis},
    )


def check(results: Sequence[xr.Dataset]) -> str:
    """The one analysis of some results; an error where they cannot be compared."""
    if len(results) < 2:
        raise UsageError(f"{len(results)} result cannot be compared: give two or more files.")
    found = list(dict.fromkeys(str(ds.attrs.get("analysis")) for ds in results))
    if len(found) > 1:
        raise ProbeError(f"the results are of different analyses ({', '.join(found)}): compare those of one.")
    if found[0] not in ANALYSES:
        raise ProbeError(f"results of {found[0]} cannot be compared yet, only those of {', '.join(ANALYSES)}.")
    return found[0]


def model_names(results: Sequence[xr.Dataset]) -> list[str]:
    """Short names of the models, numbered where one comes twice."""
    names = [model_name(ds) for ds in results]
    return [f"{name} ({names[:n].count(name) + 1})" if names.count(name) > 1 else name for n, name in enumerate(names)]


def _same_ids(first: xr.Dataset, ds: xr.Dataset) -> bool:
    return ds.attrs["tokens_sha256"] == first.attrs["tokens_sha256"]


def mismatches(results: Sequence[xr.Dataset], names: Sequence[str]) -> list[str]:
    """One sentence for everything but the model in which measurements differ from each other."""
    facts = [_facts(ds, same_model=len({ds.attrs["model"] for ds in results}) == 1) for ds in results]
    found = []
    for label in dict.fromkeys(label for one in facts for label in one):
        seen = [str(one.get(label, "none")) for one in facts]
        if len(set(seen)) > 1:
            said = "; ".join(f"{value} ({name})" for value, name in zip(seen, names, strict=True))
            found.append(f"the results differ in {label}: {said}.")
    if not found and not all(_same_ids(results[0], ds) for ds in results):
        found.append(
            "the results were measured on different token ids (another tokenizer, or another text of that name): "
            "their segments cannot be paired."
        )
    return found


def _facts(ds: xr.Dataset, same_model: bool) -> dict:
    """What has to match, by the words for it."""
    options = json.loads(ds.attrs["options"])
    options.pop("batch", None)  # changes no number
    if not same_model:  # other models have other layers and heads
        options.pop("layers", None)
        options.pop("heads", None)
    facts = {
        "text": ds.attrs["corpus"],
        "length": int(ds.attrs["length"]),
        "number of segments": int(ds.attrs["segments"]),
        "dtype": ds.attrs["dtype"],
    }
    if ds.attrs["analysis"] == "similarity":
        facts["distances"] = ", ".join(map(str, ds["distance"].values))
    for name, value in options.items():
        facts[f"option {name}"] = ranges(value) if name in ("layers", "heads") and value else value
    return facts | {f"version of {name}": value for name, value in json.loads(ds.attrs["versions"]).items()}
