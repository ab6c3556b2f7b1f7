"""What all figures share: look, pair axis with its wavelength rulers, marks of theory, caption, saving.

Figures are drawn from results alone. matplotlib is imported when something is drawn, never before.
"""

from __future__ import annotations

import contextlib
import io
import math
import textwrap
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np

from .. import theory
from ..errors import ProbeError
from ..probes import summary
from ..words import base, model_name

FORMATS = (".pdf", ".png", ".svg")

_SINGLE, _DOUBLE = 3.3, 7.0  # widths of one and of two columns of a paper, inches
_LINE, _CHARACTERS = 0.122, 19.6  # inches per line of small text, characters of it per inch
_LOOK = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same figure everywhere
    "font.size": 7.5,
    "axes.labelsize": 7.5,
    "axes.titlesize": 8,
    "axes.titlepad": 3,
    "axes.linewidth": 0.6,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "hatch.linewidth": 0.5,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.labelspacing": 0.25,
    "legend.borderpad": 0.2,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.5,
}
_SAVING = {"svg.hashsalt": "rope-probe", "pdf.fonttype": 42}
_COLORS = ("#004488", "#d95f02", "#888888")  # one for each kind of layer: apart for color-blind eyes, and in grey
SERIES = ("#004488", "#d95f02", "#117733", "#aa3377", "#66aadd", "#bbaa33")  # one for each result of several
VARIANCE, FLOOR, SEGMENT = (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5))  # dashes of the three lines


def look(own: bool):
    """Context in which a figure of ours is drawn; axes of someone else keep their own look."""
    if not own:
        return contextlib.nullcontext()
    import matplotlib

    with contextlib.suppress(ImportError):  # a windowed backend without a display
        import matplotlib.pyplot as plt

        plt.draw_if_interactive()  # a notebook sets itself up now, so that leaving the context does not undo it
    return matplotlib.rc_context(_LOOK)


# --- kinds of layers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """The rotating layers of one kind. Positions on the pair axis are real-valued, NaN where there is none."""

    name: str
    rows: np.ndarray  # positions along the layer dimension of the result
    wavelength: np.ndarray  # [pairs] tokens, infinite where a pair does not turn
    base: float
    window: int
    length: int  # formation length, tokens
    segment: int  # length of the segments measured, tokens
    summary: dict  # of these layers
    color: str

    @property
    def pairs(self) -> int:
        return len(self.wavelength)

    @property
    def predicted(self) -> tuple[float, float]:
        """Predicted range: the pair that makes one turn within the formation length, and that which makes half a turn."""
        return self.summary["predicted"]["full_turn"], self.summary["predicted"]["half_turn"]

    @property
    def variance(self) -> float:
        """The predicted pair of largest variance of the cosine, j*."""
        return self.summary["predicted"]["variance"]

    @property
    def floor(self) -> float:
        """Where the effective wavelength is the formation length."""
        return pair_at(self.wavelength, self.length)

    @property
    def reach(self) -> float:
        """Where the wavelength is the segment length; NaN if that is not below the formation length."""
        return pair_at(self.wavelength, self.segment) if self.segment < self.length else math.nan

    @property
    def label(self) -> str:
        window = "window " if self.window == self.length else ""
        return f"{self.name} ({count(len(self.rows), 'layer')}, base {base(self.base)}, L = {window}{self.length:,})"

    @property
    def prediction(self) -> str:
        """Predicted positions in words."""
        low, high = self.predicted
        off = "" if 0 <= low and high <= self.pairs - 1 else f", off the ladder of {self.pairs} pairs"
        formed = f"L\xa0=\xa0{self.length:,}"
        if self.summary["formation_base"] != self.base:
            formed += f", formed with base {base(self.summary['formation_base'])}"
        return f"{self.name}, pairs {low:.1f} to {high:.1f}{off}, j*\xa0=\xa0{self.variance:.1f}, {formed}"


def kinds(ds) -> list[Kind]:
    """Rotating layers of a result by kind, in order of first appearance."""
    found = []
    for (name, group), color in zip(summary(ds)["by_layer_type"].items(), cycle(_COLORS), strict=False):
        rows = np.flatnonzero(np.isin(ds["layer"].values, group["layers"]))
        found.append(
            Kind(
                name=name.replace("_", " "),
                rows=rows,
                wavelength=ds["wavelength"].values[rows[0], : int(ds["pairs"].values[rows[0]])],
                base=group["base"],
                window=group["window"],
                length=group["length"],
                segment=int(ds.attrs["length"]),
                summary=group,
                color=color,
            )
        )
    return found


def pair_at(wavelength, tokens: float) -> float:
    """Real-valued pair of a given wavelength, on the log scale between pairs; NaN beyond the turning pairs."""
    turning = wavelength[np.isfinite(wavelength)]
    if not len(turning) or not turning[0] <= tokens <= turning[-1]:
        return math.nan
    return float(np.interp(math.log(tokens), np.log(turning), np.arange(len(turning))))


# --- axes ------------------------------------------------------------------------------------------------------------


def given_axes(ax, panels, known, name: str) -> list | None:
    """The axes handed to a plot as a list, one for each panel; None where none was handed.

    Raises
    ------
    ProbeError
        A panel is not known; more or fewer axes than panels.
    """
    unknown = [panel for panel in panels if panel not in known]
    if unknown or not panels:
        raise ProbeError(f"{name} has no panel {str(*unknown[:1])!r}: choose from {', '.join(known)}.")
    if ax is None:
        return None
    axes = list(np.ravel(np.array(ax, dtype=object)))
    if len(axes) != len(panels):
        raise ProbeError(
            f"{name} draws {count(len(panels), 'panel')} ({', '.join(panels)}) and was given {len(axes)} axes: "
            "give one for each, or name fewer in panels=(…)."
        )
    return axes


def new_axes(
    panels, height: float, layer_kinds: list[Kind], caption: str, groups, stacked: bool = False, rows: int = 1
) -> list:
    """Panels side by side (or stacked) in a new figure, with room for legend and caption, and the caption written.

    Parameters
    ----------
    panels : sequence of str
        One makes the figure one column wide, more make it two columns wide.
    height : float
        Inches between legend and caption, with one ruler of wavelengths.
    layer_kinds : list of Kind
        The kinds drawn; every ruler beyond the first adds its height.
    caption : str
    groups : list of (handles, columns)
        What `finish` will be given.
    stacked : bool
        One panel under the other, in a figure one column wide.
    rows : int
        Rows of panels, each of them `height` high.
    """
    width = _SINGLE if len(panels) == 1 or stacked else _DOUBLE
    lines = textwrap.wrap(caption, int((width - 0.12) * _CHARACTERS))
    height = rows * (height + 0.21 * (len(_rulers(layer_kinds)) - 1))
    strip, head = _LINE * len(lines) + 0.14, _legend_height(groups) + 0.05
    total = head + height + strip
    figure = blank_figure((width, total))
    figure.get_layout_engine().set(rect=(0, strip / total, 1, height / total))
    figure.text(0.06 / width, (strip - 0.08) / total, "\n".join(lines), fontsize=7, va="top", linespacing=1.25)
    shape = (len(panels), 1) if stacked else (rows, math.ceil(len(panels) / rows))
    axes = list(figure.subplots(*shape, squeeze=False).flat)
    for one in axes:  # the number of ticks depends on it, and is settled again when the figure is drawn
        one.tick_params(labelsize=_LOOK["xtick.labelsize"])
    return axes


def blank_figure(size):
    try:
        import matplotlib.pyplot as plt

        return plt.figure(figsize=size, layout="constrained")
    except ImportError:  # a windowed backend is set and there is no display
        from matplotlib.figure import Figure

        return Figure(figsize=size, layout="constrained")


def finish(axes, groups) -> None:
    """Legend over the panels of a figure of ours, in rows, and the layout settled, so that every drawing is the same.

    `groups` is a list of (handles, columns).
    """
    figure = axes[0].figure
    top = 1 - 0.03 / figure.get_figheight()
    for handles, columns in groups:
        figure.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, top), ncols=columns, borderaxespad=0)
        top -= _legend_height([(handles, columns)]) / figure.get_figheight()
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine("none")


def _legend_height(groups) -> float:
    """Inches that the rows of such a legend take."""
    return sum(_LINE * math.ceil(len(handles) / columns) + 0.045 for handles, columns in groups)


def pair_axis(ax, layer_kinds: list[Kind]) -> None:
    """x = pair, fast to slow, and on top a ruler of wavelengths for every kind of layer that has its own."""
    pairs = max(kind.pairs for kind in layer_kinds)
    ax.set_xlim(-0.5, pairs - 0.5)
    integer_ticks(ax.xaxis)
    ax.set_xlabel("rotary pair (fast → slow)")
    rulers = _rulers(layer_kinds)
    for row, kind in enumerate(reversed(rulers)):
        ruler = ax.secondary_xaxis("top")
        ruler.spines["top"].set_position(("outward", 15 * row))
        ruler.set_xticks(*_decades(kind.wavelength, pairs))
        ruler.tick_params(pad=1.5)
        if len(rulers) > 1:
            ruler.tick_params(colors=kind.color)
            ruler.spines["top"].set_color(kind.color)
    ruler.set_xlabel("wavelength (tokens)", labelpad=2.5)


def integer_ticks(axis) -> None:
    """Ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))


def _rulers(layer_kinds: list[Kind]) -> list[Kind]:
    """Kinds that differ in their wavelengths."""
    found: list[Kind] = []
    for kind in layer_kinds:
        if not any(np.array_equal(kind.wavelength, other.wavelength) for other in found):
            found.append(kind)
    return found


def _decades(wavelength, pairs: int):
    """Ticks at powers of ten, as many as there is room for, and one for the pairs that do not turn."""
    turning = wavelength[np.isfinite(wavelength)]
    ticks = []
    if len(turning):
        low, high = math.ceil(math.log10(turning[0])), math.floor(math.log10(turning[-1]))
        step = max(1, math.ceil(0.13 * (high - low) * pairs / len(turning)))
        ticks = [(pair_at(wavelength, 10.0**e), short(10**e)) for e in range(high, low - 1, -step)]
    if len(turning) < len(wavelength):
        ticks.append(((len(turning) + len(wavelength) - 1) / 2, "∞"))
    return [position for position, _ in ticks], [label for _, label in ticks]


# --- words -----------------------------------------------------------------------------------------------------------


def short(tokens: int) -> str:
    """100, 1k, 10k, 1M: a power of ten in few characters."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if tokens >= size:
            return f"{tokens // size}{unit}"
    return str(tokens)


def count(size: int, noun: str) -> str:
    """A number with its noun, in the plural where it needs one."""
    return f"{size:,} {noun}" + ("" if size == 1 else "s")


def prediction(layer_kinds: list[Kind]) -> str:
    """Sentences on where theory puts the band, for a caption."""
    return (
        "L is the length in which the frequencies were formed. Predicted: one turn (2π) to half a turn (π) within L, and "
        f"{theory.RULES['variance']:.2f} rad (j*, largest variance of the cosine): {'; '.join(kind.prediction for kind in layer_kinds)}. "
    )


def span(sizes, noun: str) -> str:
    """9 query heads, or 4 to 8 query heads where layers differ."""
    low, high = int(np.min(sizes)), int(np.max(sizes))
    return count(high, noun) if low == high else f"{low:,} to {count(high, noun)}"


def source(ds, resting: bool = True) -> str:
    """Sentences on model and text, and on the layers that do not rotate, for the end of a caption."""
    segments, length = int(ds.attrs["segments"]), int(ds.attrs["length"])
    cut = ", interrupted before the end" if int(ds.attrs.get("partial", 0)) else ""
    words = (
        f"Model: {model_name(ds)}. Text: {ds.attrs['corpus']}, {count(segments, 'segment')} of {length:,} tokens{cut}; "
        f"norms are means over {segments * (length - 1):,} tokens, the first of each segment left out."
    )
    if ds.attrs["analysis"] == "scan":
        words = f"Model: {model_name(ds)}, estimated from its weights"
        exact = np.asarray(ds["exact"], dtype=bool).any()
        words += f"; layer 0 is computed from the embeddings of {ds.attrs['corpus']}." if exact else "."
    layers = ds["layer"].values[~ds["rotates"].values.astype(bool)]
    if resting and len(layers):
        words += f" Without rotation, so without pairs: layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}."
    return words


# --- saving ----------------------------------------------------------------------------------------------------------


def save_figure(axes, path) -> Path:
    """Write the figure of some axes as PDF, PNG (200 dpi) or SVG, atomically; the same figure gives the same bytes.

    Parameters
    ----------
    axes : Axes, sequence of Axes, or Figure
        What a plot function returned.
    path : str or Path
        Ends in .pdf, .png or .svg.

    Returns
    -------
    Path

    Raises
    ------
    ProbeError
        Any other ending; the file cannot be written.
    """
    import matplotlib

    from ..results import replace_file

    path = Path(path)
    ending = path.suffix.lower()
    if ending not in FORMATS:
        raise ProbeError(f"cannot draw into {path}: the name of a figure ends in {', '.join(FORMATS)}.")
    figure = np.ravel(np.array(axes, dtype=object))[0].figure.figure  # the whole of it, from axes in a part as well
    dates = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    whole = io.BytesIO()
    try:
        with matplotlib.rc_context(_SAVING):
            figure.savefig(whole, format=ending[1:], dpi=200, metadata=dates.get(ending))
        replace_file(path, whole.getbuffer())
    except OSError as error:
        raise ProbeError(f"cannot write {path}: {error.strerror or error}.") from None
    return path
