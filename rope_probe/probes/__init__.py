"""One file per analysis: numeric core -> labelled Dataset -> summary."""

from importlib import import_module

from ..errors import ProbeError

# analysis named in a result -> module with its `summary(ds)`
SUMMARIES = {"bands": "bands_summary"}


def summary(ds) -> dict:
    """The statistics a person reads, from a result of any analysis."""
    analysis = ds.attrs.get("analysis")
    if analysis not in SUMMARIES:
        raise ProbeError(f"the result is of analysis {analysis!r}, which has no summary here.")
    return import_module(f".{SUMMARIES[analysis]}", __name__).summary(ds)
