"""One file per analysis: numeric core -> labelled Dataset -> summary."""

from importlib import import_module

from ..errors import ProbeError, first_words

# analysis named in a result -> module with its `summary(ds)`
SUMMARIES = {
    "bands": "bands_summary",
    "spectrum": "spectrum_summary",
    "similarity": "similarity_summary",
    "heads": "heads_summary",
    "trajectory": "trajectory_summary",
    "truncate": "truncate_summary",
    "scan": "scan_summary",
    "extend": "extend_summary",
}


def summary(ds) -> dict:
    """The statistics a person reads, from a result of any analysis."""
    analysis = ds.attrs.get("analysis")
    if analysis not in SUMMARIES:
        raise ProbeError(f"the result is of analysis {analysis!r}, which has no summary here.")
    try:
        return import_module(f".{SUMMARIES[analysis]}", __name__).summary(ds)
    except KeyError as error:
        raise ProbeError(
            f"the {analysis} result is not whole ({first_words(error, 60)}): run the analysis again."
        ) from error
