"""One file per figure; every plot takes a result, never a model, and returns the axes.

Importing this package costs little: matplotlib is imported when something is drawn.
"""

from collections.abc import Callable

from .bands_heads import bands_heads
from .bands_layers import bands_layers
from .bands_profile import bands_profile
from .bound import bound, smallest_bases
from .compare import compare
from .extend_base import extend_base
from .extend_position import extend_position
from .extend_retrieval import extend_retrieval
from .heads_distance import heads_distance
from .heads_map import heads_map
from .heads_roles import heads_roles
from .heads_wavelength import heads_wavelength
from .inspect import inspect
from .scan import scan
from .similarity_control import similarity_control
from .similarity_distance import similarity_distance
from .similarity_heads import similarity_heads
from .similarity_layers import similarity_layers
from .spectrum_damage import spectrum_damage
from .spectrum_injected import spectrum_injected
from .spectrum_profile import spectrum_profile
from .spectrum_purity import spectrum_purity
from .spectrum_tones import spectrum_tones
from .style import save_figure
from .trajectory import trajectory
from .truncate_keep import truncate_floor, truncate_keep
from .truncate_knockout import truncate_knockout

__all__ = [
    "FIGURES",
    "bands_heads",
    "bands_layers",
    "bands_profile",
    "bound",
    "compare",
    "extend_base",
    "extend_position",
    "extend_retrieval",
    "heads_distance",
    "heads_map",
    "heads_roles",
    "heads_wavelength",
    "inspect",
    "save_figure",
    "scan",
    "similarity_control",
    "similarity_distance",
    "similarity_heads",
    "similarity_layers",
    "smallest_bases",
    "spectrum_damage",
    "spectrum_injected",
    "spectrum_profile",
    "spectrum_purity",
    "spectrum_tones",
    "truncate_floor",
    "truncate_keep",
    "truncate_knockout",
    "trajectory",
]

#: analysis -> its figures by short name, the main one first; each takes the result alone
FIGURES: dict[str, dict[str, Callable]] = {
    "bands": {"profile": bands_profile, "layers": bands_layers, "heads": bands_heads},
    "spectrum": {
        "purity": spectrum_purity,
        "damage": spectrum_damage,
        "profile": spectrum_profile,
        "injected": spectrum_injected,
        "tones": spectrum_tones,
    },
    "heads": {"roles": heads_roles, "wavelength": heads_wavelength, "distance": heads_distance, "map": heads_map},
    "scan": {"profile": scan, "layers": bands_layers, "heads": bands_heads},
    "trajectory": {"trajectory": trajectory},
    "similarity": {
        "layers": similarity_layers,
        "heads": similarity_heads,
        "distance": similarity_distance,
        "control": similarity_control,
    },
    "extend": {"base": extend_base, "position": extend_position, "retrieval": extend_retrieval},
    "truncate": {"keep": truncate_keep, "floor": truncate_floor, "knockout": truncate_knockout},
}
