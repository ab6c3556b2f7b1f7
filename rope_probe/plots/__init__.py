"""One file per figure; every plot takes a result, never a model, and returns the axes.

Importing this package costs little: matplotlib is imported when something is drawn.
"""

from .bands_heads import bands_heads
from .bands_layers import bands_layers
from .bands_profile import bands_profile
from .bound import bound, smallest_bases
from .inspect import inspect
from .style import save_figure

__all__ = [
    "FIGURES",
    "bands_heads",
    "bands_layers",
    "bands_profile",
    "bound",
    "inspect",
    "save_figure",
    "smallest_bases",
]

#: analysis -> its figures by short name, the main one first; each takes the result alone
FIGURES = {"bands": {"profile": bands_profile, "layers": bands_layers, "heads": bands_heads}}
