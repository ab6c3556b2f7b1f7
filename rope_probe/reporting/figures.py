"""Figures as SVG inside a page: text that can be read and searched, colors that follow the reader's theme.

matplotlib draws for white paper.  Here black becomes the color of the text around, greys and dark hues get a variable
each with a second value for a dark page, and maps keep their colors, as an image.
"""

from __future__ import annotations

import base64
import colorsys
import io
import re
from dataclasses import dataclass, field
from xml.etree import ElementTree

import numpy as np
from markupsafe import Markup

PAPER, INK = "#15181d", "#e6e8ec"  # of a dark page
FONT = "DejaVu Sans"  # comes with matplotlib
CELLS = 3000  # of a map in a few colors, up to which it is drawn cell by cell
SVG, LINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}href"
_HEX = re.compile(r"#[0-9a-f]{6}")
MAP = "map"  # id of axes that hold one
_MARKS = ("line2d", "LineCollection", "PathCollection")  # what may lie on a map, and is seen against its colors


@dataclass
class Ink:
    """What the figures of a page need together.

    Attributes
    ----------
    colors : set of str
        As on white paper.
    letters : dict of bool to set of str
        Characters, in bold or not.
    """

    colors: set[str] = field(default_factory=set)
    letters: dict[bool, set[str]] = field(default_factory=lambda: {False: set(), True: set()})

    def variables(self, dark: bool) -> Markup:
        """Declarations of the colors for a theme."""
        return Markup("").join(
            Markup(f"--c{color[1:]}:{on_dark(color) if dark else color};") for color in sorted(self.colors)
        )

    def fonts(self) -> Markup:
        """The letters that are used, so that labels are as wide as they were drawn on every device."""
        return Markup("\n").join(_face(letters, bold) for bold, letters in self.letters.items() if letters)


@dataclass(frozen=True)
class Drawing:
    """A figure for the page; width in points."""

    name: str
    svg: Markup
    caption: str
    width: float


def drawing(axes, name: str, ink: Ink) -> Drawing:
    """What a plot function returned, as SVG; its caption apart.

    Parameters
    ----------
    axes : Axes or sequence of Axes
        Of a figure of our own, whose only text outside of axes is its caption.
    name : str
        Unique on the page; in front of every id.
    ink : Ink
        Told which colors and letters are used.
    """
    import matplotlib
    import matplotlib.pyplot as plt

    figure = np.ravel(np.array(axes, dtype=object))[0].figure.figure
    caption = ""
    for text in list(figure.texts):
        caption = re.sub(r"(?<=\w)-\n", "-", text.get_text()).replace("\n", " ")
        text.remove()
    kept = _as_images(figure)
    whole = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rope-probe"}):
        figure.savefig(
            whole,
            format="svg",
            dpi=200,
            facecolor="none",
            bbox_inches="tight",
            pad_inches=0.02,
        )
    plt.close(figure)
    root = ElementTree.fromstring(whole.getvalue())
    width = float(root.get("viewBox", "0 0 1 1").split()[2])
    _Theme(name, ink, kept).apply(root)
    return Drawing(name, Markup(ElementTree.tostring(root, encoding="unicode")), caption, width)


def _as_images(figure) -> set[str]:
    """Draw maps as images, cells being as many as they are; colors of legends that must stay those of the image."""
    from matplotlib.collections import QuadMesh
    from matplotlib.colors import ListedColormap, to_hex

    kept: set[str] = set()
    for ax in figure.axes:
        for one in ax.collections:
            values = one.get_array()
            if values is None:
                continue
            if isinstance(one, QuadMesh):
                ax.set_gid(MAP)
            few = isinstance(one.cmap, ListedColormap) and one.cmap.N <= 10
            if not few or values.size > CELLS:
                one.set_rasterized(True)
                kept |= {to_hex(color) for color in one.cmap.colors} if few else set()
    return kept


class _Theme:
    """Turns the SVG of one figure into a part of the page."""

    def __init__(self, name: str, ink: Ink, kept: set[str]):
        self.name, self.ink, self.kept = name, ink, kept

    def apply(self, root: ElementTree.Element) -> None:
        ElementTree.register_namespace("", SVG)
        self.used = {
            *re.findall(r"url\(#([^)]+)\)", " ".join(v for e in root.iter() for v in e.attrib.values())),
            *(e.attrib[LINK][1:] for e in root.iter() if e.get(LINK, "").startswith("#")),
        }
        self.maps = any(element.get("id") == MAP for element in root.iter())
        self._visit(root, False, False)
        for attribute in ("width", "height", "version"):
            root.attrib.pop(attribute, None)
        root.attrib |= {"role": "img", "aria-labelledby": f"{self.name}-caption", "fill": "currentColor"}

    def _visit(self, element: ElementTree.Element, literal: bool, bold: bool) -> None:
        """`literal`: colors stay as they are."""
        tag = element.tag.removeprefix(f"{{{SVG}}}")
        style = _declarations(element.get("style", ""))
        bold = bold or style.get("font-weight", "") in ("bold", "700")
        if tag in ("text", "tspan") and element.text:
            self.ink.letters[bold].update(element.text)
        self._attributes(element, style, literal)
        kind = element.get("id", "")
        on_map = kind == MAP or self.maps and kind.startswith("legend")
        for child in list(element):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                element.remove(child)
                continue
            self._visit(child, literal or on_map and child.get("id", "").startswith(_MARKS), bold)
        self._identity(element)

    def _attributes(self, element, style: dict[str, str], literal: bool) -> None:
        style.pop("font-family", None)  # that of all figures
        if not literal:
            style = {key: self._color(value) if key in ("fill", "stroke") else value for key, value in style.items()}
        if style:
            element.set("style", self._own("; ".join(f"{key}: {value}" for key, value in style.items())))
        for name in ("d", "x", "y", "points"):
            if name in element.attrib:
                element.set(name, re.sub(r"(\.\d\d)\d+", r"\1", " ".join(element.attrib[name].split())))
        for name in ("clip-path", "fill", "stroke"):
            if name in element.attrib:
                element.set(name, self._own(element.attrib[name]))

    def _identity(self, element) -> None:
        """Ids that are referred to get the figure's name in front, all others go."""
        identity = element.attrib.pop("id", None)
        if identity in self.used:
            element.set("id", f"{self.name}-{identity}")
        link = element.attrib.pop(LINK, None)
        if link is not None:
            element.set("href", f"#{self.name}-{link[1:]}" if link.startswith("#") else link)

    def _own(self, value: str) -> str:
        return re.sub(r"url\(#", f"url(#{self.name}-", value)

    def _color(self, value: str) -> str:
        if value == "#000000":
            return "currentColor"
        if not _HEX.fullmatch(value) or value in self.kept:
            return value
        self.ink.colors.add(value)
        return f"var(--c{value[1:]})"


def _declarations(style: str) -> dict[str, str]:
    pairs = (part.partition(":") for part in style.split(";") if ":" in part)
    return {key.strip(): value.strip() for key, _, value in pairs}


def on_dark(color: str) -> str:
    """A color of a figure on a dark page: greys change ends, dark hues become as light as they were dark."""
    red, green, blue = (int(color[n : n + 2], 16) / 255 for n in (1, 3, 5))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    if saturation < 0.15:
        ends = [[int(end[n : n + 2], 16) / 255 for n in (1, 3, 5)] for end in (INK, PAPER)]
        found = [ink + (paper - ink) * light for ink, paper in zip(*ends, strict=True)]
    else:
        found = list(colorsys.hls_to_rgb(hue, max(light, 1 - light), saturation))
    return "#" + "".join(f"{round(255 * part):02x}" for part in found)


def _face(letters: set[str], bold: bool) -> Markup:
    """A font of these letters alone, as a CSS rule."""
    from fontTools import subset
    from matplotlib.font_manager import FontProperties, findfont

    weight = "bold" if bold else "normal"
    options = subset.Options(flavor="woff", layout_features=[], hinting=False, notdef_outline=True)
    options.drop_tables += ["FFTM"]  # else it warns of a table that it does not know
    font = subset.load_font(findfont(FontProperties(family=FONT, weight=weight)), options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(text="".join(sorted(letters)))
    subsetter.subset(font)
    whole = io.BytesIO()
    subset.save_font(font, whole, options)
    data = base64.b64encode(whole.getvalue()).decode()
    return Markup(f'@font-face{{font-family:"figure";font-weight:{weight};src:url(data:font/woff;base64,{data})}}')
