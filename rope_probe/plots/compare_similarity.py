"""rho by layer of several models."""

from __future__ import annotations

from ..errors import UsageError
from .similarity_layers import similarity_layers


def compare_similarity(results, ax=None, names=None, axis=None):
    """Draw rho by layer of several `similarity` results; see `rope_probe.plots.compare`."""
    if axis is not None:
        raise UsageError(
            f"--axis {axis}: similarity is compared by layer and has no pairs to lay along it; leave it out."
        )
    return similarity_layers(results, ax=ax, names=names)
